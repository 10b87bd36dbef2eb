//! Fleets by the command: the guide as written, refusals, and that a fleet of one device finds what one
//! machine does.

mod common;
#[path = "../../fleet/tests/fleet/port.rs"]
mod port;

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{TILEWRIGHT, check_refused, json_of, run_json, text};
use port::free_port;

/// Running program, killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Path of the server: `TILEWRIGHT_NATS_SERVER`, or the installed one.
fn nats_server() -> Option<String> {
    let given = std::env::var("TILEWRIGHT_NATS_SERVER").ok();
    let installed = ["nats-server", "/usr/sbin/nats-server"].map(str::to_owned);
    let found = given
        .into_iter()
        .chain(installed)
        .find(|program| Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()));
    if found.is_none() {
        println!("skipped: there is no nats-server (apt-get install nats-server)");
    }
    found
}

/// Command of these words, with this folder as the data of its machine.
fn words(line: &str, folder: &Path) -> Command {
    let mut words = line.split_whitespace();
    let program = words.next().unwrap();
    let mut command = Command::new(if program == "tilewright" { TILEWRIGHT } else { program });
    command.args(words).current_dir(folder).env("XDG_DATA_HOME", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn wait_for_port(port: u16) {
    let until = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < until, "the server does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until a device is in a fleet.
fn wait_for_device(fleet: &str, folder: &Path) {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let output = words(&format!("{fleet} --json"), folder).output().unwrap();
        let listed = json_of(&[fleet], &output);
        if listed["devices"].as_array().is_some_and(|devices| !devices.is_empty()) {
            return;
        }
        assert!(Instant::now() < until, "no device comes");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_guide_can_be_followed() {
    let Some(server) = nats_server() else { return };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/fleet.md");
    let page = std::fs::read_to_string(page).unwrap();
    let shown = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()).collect::<String>();
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines.len(), 5, "five commands: {lines:?}");
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let mut running = Vec::new();
    for line in lines {
        // Both machines are this one, and tests have their own ports.
        let line = line.replace("tls://desk", &format!("tls://localhost:{port}"));
        if line.starts_with("nats-server") {
            let line = format!("{line} -a 127.0.0.1 -p {port}").replacen("nats-server", &server, 1);
            running.push(Running(words(&line, folder.path()).stderr(Stdio::null()).spawn().unwrap()));
            wait_for_port(port);
        } else if line.starts_with("tilewright serve") {
            running.push(Running(words(&line, folder.path()).stderr(Stdio::null()).spawn().unwrap()));
        } else {
            if line.starts_with("tilewright fleet --fleet") {
                // The device takes a moment to join.
                wait_for_device(&line, folder.path());
            }
            let line = line.replace("--time 10", "--time 2");
            let output = words(&line, folder.path()).output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
            let expected = match line.split_whitespace().nth(1) {
                Some("tune") => "verified against the reference",
                Some("fleet") if line.contains("keys -o") => "pi1.key",
                _ => "lab",
            };
            assert!(said.contains(expected), "{line}: {said}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    check_refused(&["serve"], "--fleet");
    check_refused(&["serve", "--fleet", "http://127.0.0.1"], "nats://");
    check_refused(&["fleet", "--fleet", "nats://192.0.2.1"], "not encrypted");
    check_refused(&["fleet", "--fleet", "nats://127.0.0.1", "--key", "/nonexistent"], "/nonexistent");
    check_refused(&["tune", "matmul-256", "--fleet", "nats://127.0.0.1"], "--on");
    check_refused(&["tune", "matmul-256", "--on", "lab"], "--fleet");
    for own in [["--device", "opencl"], ["--target", "cortex-a72"], ["--runner", "./tw-run"]] {
        let arguments = [&["tune", "matmul-256", "--fleet", "nats://127.0.0.1", "--on", "lab"][..], &own].concat();
        check_refused(&arguments, own[0]);
    }
    check_refused(&["tune", "matmul-256", "--fleet", "nats://127.0.0.1", "--on", "A B"], "`A B`");
    check_refused(&["fleet", "keys", "-o", "/nonexistent/x/y", "--devices", "a.b"], "");
}

#[test]
fn records_of_a_fleet_are_its_classes() {
    let Some(server) = nats_server() else { return };
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let store = text(folder.path()).to_owned();
    let _server = Running(
        words(&format!("{server} -js -sd {store} -a 127.0.0.1 -p {port}"), folder.path())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    wait_for_port(port);
    let serve = format!("tilewright serve --fleet nats://127.0.0.1:{port} --class desk");
    let _device = Running(words(&serve, folder.path()).stderr(Stdio::null()).spawn().unwrap());
    wait_for_device(&format!("tilewright fleet --fleet nats://127.0.0.1:{port}"), folder.path());
    // A machine can serve only once.
    let again = words(&serve, folder.path()).output().unwrap();
    assert_eq!(again.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&again.stderr).contains("serves already"));
    let db = folder.path().join("records.db");
    let url = format!("nats://127.0.0.1:{port}");
    let tune = |more: &[&str]| {
        let all = [
            &["tune", "matmul:m=96,n=96,k=96", "--db", text(&db), "--fleet", &url, "--on", "desk", "--no-race"][..],
            more,
        ]
        .concat();
        run_json(&all)
    };
    let tuned = tune(&["--trials", "20"]);
    assert!(tuned["target"].as_str().unwrap().ends_with("@desk"), "{tuned}");
    assert_eq!(tuned["trials"], 20);
    // Each trial names the device on which it was measured.
    let name = std::fs::read_to_string(folder.path().join("tilewright/device")).unwrap();
    let exported = common::run(&["export", "--db", text(&db)]);
    let exported = String::from_utf8(exported.stdout).unwrap();
    let says = format!("\"device\":\"{}\"", name.trim());
    assert_eq!(exported.lines().filter(|line| line.contains(&says)).count(), 20, "{exported}");
    // It resumes, and trials measured here count as another machine's.
    let more = tune(&["--trials", "30"]);
    assert_eq!((&more["trials"], &more["new_trials"]), (&30.into(), &10.into()));
    // If nothing was measured here, the fleet's record is used.
    let best = run_json(&["best", "matmul:m=96,n=96,k=96", "--db", text(&db)]);
    assert_eq!(best["best"]["config"], more["best"]["config"], "{best}");
    let here = run_json(&["tune", "matmul:m=96,n=96,k=96", "--db", text(&db), "--trials", "5", "--no-race"]);
    assert_eq!(here["trials"], 5);
}

#[test]
fn a_device_of_a_fleet_may_be_without_a_compiler() {
    let Some(server) = nats_server() else { return };
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    if common::make_arm_runner(folder.path()).is_none() {
        return;
    }
    let (store, address) = (text(folder.path()).to_owned(), format!("nats://127.0.0.1:{port}"));
    let server = format!("{server} -js -sd {store} -a 127.0.0.1 -p {port}");
    let _server = Running(words(&server, folder.path()).stderr(Stdio::null()).spawn().unwrap());
    wait_for_port(port);
    let runner = "qemu-aarch64 -cpu cortex-a72 ./tw-run";
    let mut serve = words(&format!("tilewright serve --fleet {address} --class pi"), folder.path());
    let _device = Running(serve.args(["--runner", runner]).stderr(Stdio::null()).spawn().unwrap());
    let list = format!("tilewright fleet --fleet {address}");
    wait_for_device(&list, folder.path());
    let listed = json_of(&["fleet"], &words(&format!("{list} --json"), folder.path()).output().unwrap());
    let device = &listed["devices"][0];
    assert!(device["is_emulated"] == true && device["class"] == "pi", "{device}");
    assert!(device["target"].as_str().unwrap().starts_with("aarch64/cortex-a72/128:"), "{device}");
    let tune = format!("tilewright tune matmul:m=33,n=40,k=29 --fleet {address} --on pi --trials 5 --json");
    let tuned = json_of(&["tune"], &words(&tune, folder.path()).output().unwrap());
    assert!(tuned["emulated"] == true && tuned["verified"] == true && tuned["trials"] == 5, "{tuned}");
    assert!(tuned["errors"].as_object().unwrap().is_empty() && tuned["best"].is_null(), "{tuned}");
}

#[test]
fn a_gpu_is_a_device_of_a_fleet() {
    let place = tilewright::DeviceSpec { device: "opencl", target: tilewright::HOST, threads: 1 };
    match place.runnable_target() {
        Ok(target) => tune_on_a_card("opencl", &target.name(), None),
        Err(why) => println!("skipped: {why}"),
    }
}

/// Device of a fleet that is an NVIDIA GPU, whose driver is replaced by a PTX emulator.
#[test]
fn a_card_of_nvidias_is_a_device_of_a_fleet() {
    let Some(libraries) = common::emulated_cuda() else { return };
    tune_on_a_card("cuda", "cuda/sm_90a", Some(libraries.path()));
}

/// Serves a device and searches on it remotely; programs look for libraries in a folder first.
fn tune_on_a_card(device: &str, target: &str, libraries: Option<&Path>) {
    let Some(server) = nats_server() else { return };
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let (store, address) = (text(folder.path()).to_owned(), format!("nats://127.0.0.1:{port}"));
    let server = format!("{server} -js -sd {store} -a 127.0.0.1 -p {port}");
    let _server = Running(words(&server, folder.path()).stderr(Stdio::null()).spawn().unwrap());
    wait_for_port(port);
    let command = |line: &str| {
        let mut command = words(line, folder.path());
        libraries.map(|path| command.env("LD_LIBRARY_PATH", path));
        command
    };
    // Its times are not those of a CPU.
    let serve = format!("tilewright serve --fleet {address} --device {device}");
    let refused = command(&serve).output().unwrap();
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains("a class of its own (give --class NAME)"), "{refused}");
    let serve = format!("{serve} --class card");
    let _device = Running(command(&serve).stderr(Stdio::null()).spawn().unwrap());
    let list = format!("tilewright fleet --fleet {address}");
    wait_for_device(&list, folder.path());
    let listed = json_of(&["fleet"], &words(&format!("{list} --json"), folder.path()).output().unwrap());
    assert!(listed["devices"][0]["target"].as_str().unwrap().starts_with(&format!("{target}:")), "{listed}");
    let workload = "matmul:m=33,n=40,k=29,exact=1";
    // The searching program needs no such device.
    let tune = format!("tilewright tune {workload} --fleet {address} --on card --trials 3 --no-race --json");
    let tuned = json_of(&["tune"], &words(&tune, folder.path()).output().unwrap());
    assert_eq!((&tuned["target"], &tuned["trials"]), (&format!("{target}@card").into(), &3.into()), "{tuned}");
    assert!(tuned["best"]["gflops"].as_f64() > Some(0.0), "{tuned}");
    // If nothing was measured on this machine, the fleet's record is used.
    let best = command(&format!("tilewright best {workload} --device {device} --json")).output().unwrap();
    assert_eq!(json_of(&["best"], &best)["best"]["config"], tuned["best"]["config"]);
}
