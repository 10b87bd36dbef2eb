//! Devices without a compiler: the runner in C, on this machine and under an emulator that replaces a board.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use common::{TILEWRIGHT, check_refused, done, json_of, make_arm_runner, make_runner, recorded, stderr, text, tool};
use serde_json::Value as Json;

const WORKLOAD: &str = "matmul:m=33,n=40,k=29";

/// Command whose runner and database are in a folder.
fn in_folder(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(TILEWRIGHT);
    command.args(arguments).current_dir(folder).env("XDG_DATA_HOME", folder).output().unwrap()
}

fn tune(folder: &Path, runner: &str, more: &[&str]) -> Json {
    let arguments = [&["tune", WORKLOAD, "--runner", runner, "--db", "records.db", "--json"], more].concat();
    json_of(&arguments, &in_folder(folder, &arguments))
}

#[test]
fn a_runner_on_this_machine_measures_and_its_winner_is_recorded() {
    let folder = tempfile::tempdir().unwrap();
    if make_runner(folder.path(), "cc").is_none() {
        return;
    }
    for threads in ["1", "2"] {
        let tuned = tune(folder.path(), "./tw-run", &["--trials", "5", "--threads", threads, "--cold=constants"]);
        let threads_here = std::thread::available_parallelism().unwrap().get();
        if threads == "2" && threads_here < 2 {
            continue;
        }
        assert_eq!((&tuned["verified"], &tuned["emulated"]), (&Json::from(true), &Json::from(false)), "{tuned}");
        assert!(tuned["best"]["gflops"].as_f64().is_some_and(|gflops| gflops > 0.0), "{tuned}");
        assert!(tuned["errors"].as_object().unwrap().is_empty(), "{tuned}");
    }
    assert!(recorded(&folder.path().join("records.db")).len() >= 5);
}

#[test]
fn an_emulated_device_verifies_and_records_nothing() {
    let folder = tempfile::tempdir().unwrap();
    if make_arm_runner(folder.path()).is_none() {
        return;
    }
    // It reports this itself; a flag reports it for one that does not look emulated.
    let mut runners = vec![("qemu-aarch64 -cpu cortex-a76 ./tw-run", "aarch64/cortex-a76/128")];
    let native = folder.path().join("native");
    fs::create_dir(&native).unwrap();
    if make_runner(&native, "cc").is_some() {
        runners.push(("native/tw-run --emulated", "x86_64/"));
    }
    for (runner, target) in runners {
        let tuned = tune(folder.path(), runner, &["--trials", "6"]);
        assert_eq!((&tuned["verified"], &tuned["emulated"]), (&Json::from(true), &Json::from(true)), "{tuned}");
        assert!(tuned["best"].is_null() && tuned["errors"].as_object().unwrap().is_empty(), "{tuned}");
        assert!(tuned["target"].as_str().unwrap().starts_with(target) && tuned["trials"] == 6, "{tuned}");
        assert!(recorded(&folder.path().join("records.db")).is_empty());
    }
    let arguments = ["tune", WORKLOAD, "--runner", "qemu-aarch64 ./tw-run", "--target", "cortex-a72", "--trials", "2"];
    let output = in_folder(folder.path(), &arguments);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("2 of 2 candidates gave the right answer; none was timed"), "{said}{}", stderr(&output));
    let older = "qemu-aarch64 -cpu cortex-a53 ./tw-run";
    let arguments = ["tune", WORKLOAD, "--runner", older, "--target", "cortex-a76", "--trials", "2"];
    let output = in_folder(folder.path(), &arguments);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("lacks fullfp16, dotprod"), "{}", stderr(&output));
}

#[test]
fn what_is_no_runner_is_refused() {
    check_refused(&["tune", WORKLOAD, "--runner", "true"], "the runner is gone: ended with exit code 0");
    check_refused(&["tune", WORKLOAD, "--runner", "/nonexistent/runner"], "No such file");
    check_refused(&["tune", WORKLOAD, "--runner", "sh -c 'echo not today >&2; exit 3'"], "not today");
    check_refused(&["tune", WORKLOAD, "--runner", "cat /dev/zero"], "protocol");
    check_refused(&["tune", WORKLOAD, "--runner", "a | b"], "`|` is for a shell");
    check_refused(&["tune", WORKLOAD, "--runner", "true", "--device", "opencl"], "leave --device opencl out");
}

#[test]
fn a_runner_is_asked_once_what_it_is_for_all_kernels_of_a_model() {
    let folder = tempfile::tempdir().unwrap();
    if make_runner(folder.path(), "cc").is_none() {
        return;
    }
    // Records what each runner is sent.
    fs::write(folder.path().join("note.sh"), "tee told.$$ | ./tw-run\n").unwrap();
    let run = |arguments: &[&str]| {
        let output = in_folder(folder.path(), arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    };
    run(&["network", "dqn", "-o", "dqn.onnx"]);
    run(&["tune", "dqn.onnx", "--runner", "sh note.sh", "--time", "1", "--db", "records.db"]);
    let told = fs::read_dir(folder.path()).unwrap().flatten();
    let told = told.filter(|file| file.file_name().to_string_lossy().starts_with("told."));
    let sizes: Vec<u64> = told.map(|file| file.metadata().unwrap().len()).collect();
    // Runners other than those that only report the device get a memory limit and buffers, except for one
    // that starts when the time is up.
    const HELLO: u64 = 16;
    assert!(sizes.len() > 4, "{sizes:?}");
    assert!((1..=2).contains(&sizes.iter().filter(|size| **size <= HELLO).count()), "{sizes:?}");
}

/// Runner that receives only the first bytes of its input: it ends in the middle of a frame, or between two.
const CUT_OFF: &str = "#!/bin/sh
n=$(cat after 2>/dev/null)
if [ -n \"$n\" ] && rm after 2>/dev/null; then dd bs=1 count=\"$n\" 2>/dev/null | ./tw-run; exit 9; fi
exec ./tw-run --emulated
";

#[test]
fn a_runner_that_dies_at_any_frame_costs_one_trial_at_most() {
    let folder = tempfile::tempdir().unwrap();
    if make_runner(folder.path(), "cc").is_none() {
        return;
    }
    fs::write(folder.path().join("cut.sh"), CUT_OFF).unwrap();
    let inputs = 4 * (33 * 29 + 29 * 40);
    let places = [0, 7, 16, 20, 40, 60, 1000, inputs, inputs + 200, inputs + 9000, inputs + 30_000, inputs + 60_000];
    let mut n_lost = 0;
    for after in places {
        // Except for the first start, which only queries the device.
        let look = "#!/bin/sh\n[ -e looked ] && exec sh cut.sh\ntouch looked\nexec ./tw-run --emulated\n";
        fs::write(folder.path().join("look.sh"), look).unwrap();
        let _ = fs::remove_file(folder.path().join("looked"));
        fs::write(folder.path().join("after"), after.to_string()).unwrap();
        let tuned = tune(folder.path(), "sh look.sh", &["--trials", "6"]);
        let n_errors = tuned["errors"]["runtime_error"].as_u64().unwrap_or(0);
        assert!(n_errors <= 1 && tuned["errors"].as_object().unwrap().len() as u64 == n_errors, "{after}: {tuned}");
        assert_eq!((&tuned["trials"], &tuned["verified"]), (&Json::from(6), &Json::from(true)), "{after}: {tuned}");
        assert!(!folder.path().join("after").exists(), "{after}: a runner was cut off");
        n_lost += n_errors;
    }
    assert!(n_lost > 0, "some died with a kernel");
}

#[test]
fn the_guide_can_be_followed() {
    if tool("qemu-aarch64").is_none() || tool("aarch64-linux-gnu-gcc").is_none() {
        return;
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/small-device.md");
    let page = fs::read_to_string(page).unwrap();
    let shown = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()).collect::<String>();
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines.len(), 5, "five commands: {lines:?}");
    // The emulator replaces the board, and the connection to it.
    let folder = tempfile::tempdir().unwrap();
    let programs = [
        ("ssh", "#!/bin/sh\nshift\nexec qemu-aarch64 -cpu cortex-a72 \"$@\"\n"),
        ("scp", "#!/bin/sh\ntest -x \"$1\"\n"),
    ];
    for (name, script) in programs {
        let path = folder.path().join(name);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let own = Path::new(TILEWRIGHT).parent().unwrap();
    let paths = format!("{}:{}:{}", text(folder.path()), text(own), std::env::var("PATH").unwrap());
    for line in lines {
        let line = line.replace("--time 60", "--trials 4");
        let mut command = Command::new("sh");
        command.args(["-c", &line]).current_dir(folder.path()).env("PATH", &paths).env("XDG_DATA_HOME", folder.path());
        let said = done(&mut command);
        if line.contains("tune") {
            assert!(said.contains("4 of 4 candidates gave the right answer") && said.contains("cortex-a72"), "{said}");
        }
    }
    assert!(folder.path().join("product").read_dir().unwrap().count() > 2, "a library is there");
}
