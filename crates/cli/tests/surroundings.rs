//! Disturbances from outside, not from a candidate: limits and quotas of the system, pauses, killed workers.
//! None of them is recorded as a configuration's failure, and each is reported in a line.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::{TILEWRIGHT, device_options, run, run_json, stderr, text};
use serde_json::{Value as Json, json};
use tilewright_device::device::WorkerCommand;
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Device, DeviceOptions, host};
use tilewright_ir::op::Workload;
use tilewright_search::{ErrorClass, Limit, Measured, pause};

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";

/// Matrix product of size 16 followed by `n_additions` sequential additions that do not change it.
fn slow(n_additions: u64) -> ProgramSource {
    ProgramSource::Lowered(format!(
        "program \"slow\"
buffer A: f32[16, 16] global input
buffer B: f32[16, 16] global input
buffer C: f32[16, 16] global output
buffer T: f32[1] global temporary
loops i, j, k, t
run {{
    for i in 16 {{ for j in 16 {{ for k in 16 {{ C[i, j] += A[i, k] * B[k, j] first k == 0 }} }} }}
    alloc T for t in {n_additions} {{ T[0] += A[0, 0] first t == 0 }}
}}"
    ))
}

const FOR_EVER: u64 = 1_000_000_000_000_000;

/// Device for the matrix product of size 16 that has one worker and runs candidates to the end.
fn device(options: DeviceOptions) -> Device {
    let options = DeviceOptions { n_workers: 1, to_the_end: true, ..options };
    Device::new(Workload::parse("matmul:m=16,n=16,k=16").unwrap(), &host::target(), options).unwrap()
}

/// Measures a source; an error if the device gives up.
fn measure(device: &mut Device, source: ProgramSource) -> Result<Measured, String> {
    let mut found = device.measure_sources(&[source]).map_err(|error| error.to_string())?;
    Ok(found.remove(0))
}

/// Runs a shell script on this process's workers, `$workers`, after a moment, in parallel with the test.
fn after_a_moment(script: &str) -> std::process::Child {
    let me = std::process::id();
    let script = format!("sleep 0.1; workers=$(pgrep -P {me} -f ' worker$'); {script}");
    Command::new("sh").args(["-c", &script]).stderr(Stdio::null()).spawn().expect("there is a shell")
}

/// Runs the command in a shell, after the shell command `first`.
fn run_after(first: &str, arguments: &[&str]) -> Output {
    let script = format!("{first}\nexec \"$0\" \"$@\"");
    let mut command = Command::new("bash");
    command.args(["-c", &script, TILEWRIGHT]).args(arguments).stdin(Stdio::null());
    command.output().expect("there is a shell")
}

/// Checks that a command ends with a code and one line that contains these words.
fn check_line(output: &Output, code: i32, expected: &str) {
    let stderr = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    let errors: Vec<&str> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert!(matches!(errors[..], [error] if error.contains(expected)), "{stderr}");
    assert!(!stderr.contains("bug"), "{stderr}");
}

/// Control group of the tests, removed when dropped.
struct Group {
    folder: PathBuf,
}

impl Group {
    /// Makes a control group with these settings: a controller, a file and its contents, in either version of
    /// control groups. `None`, with a message, if this process has no permission.
    fn new(files: &[(&str, &str, &str)]) -> Option<Group> {
        let name = format!("tilewright-test-{}", std::process::id());
        for (controller, file, contents) in files {
            let root = Path::new("/sys/fs/cgroup");
            for folder in [root.join(controller).join(&name), root.join(&name)] {
                if !folder.parent().is_some_and(|parent| parent.join("cgroup.procs").exists()) {
                    continue;
                }
                let _ = std::fs::remove_dir(&folder);
                let group = Group { folder };
                if std::fs::create_dir(&group.folder).is_ok()
                    && std::fs::write(group.folder.join(file), contents).is_ok()
                    // A machine may permit creating groups but not joining them.
                    && run_after(&group.join(), &["--version"]).status.success()
                {
                    return Some(group);
                }
            }
        }
        eprintln!("skipped: this process may make no control groups");
        None
    }

    /// Shell command that joins the group.
    fn join(&self) -> String {
        format!("set -e; echo $$ > {}/cgroup.procs; set +e", self.folder.display())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.folder);
    }
}

#[test]
fn a_failure_of_a_limit_is_tried_again_under_a_higher_one_only() {
    let folder = tempfile::tempdir().unwrap();
    let db = |name: &str| folder.path().join(name);
    let arguments =
        |db: &'static str| ["tune", WORKLOAD, "--search", "random", "--trials", "4", "--no-race", "--db", db];
    let good = db("good.db");
    let mut of_good = arguments("");
    of_good[8] = text(&good);
    run_json(&of_good);
    let lines = String::from_utf8(run(&["export", "--db", text(&good)]).stdout).unwrap();
    for (name, limit, n_tried) in [
        ("lower", Some(json!({"run_s": 1e-3})), 4),
        ("higher", Some(json!({"run_s": 1e6})), 0),
        ("of-memory", Some(json!({"memory_bytes": 1000})), 4),
        ("unknown", None, 0),
    ] {
        let failed = lines.lines().map(|line| {
            let mut record: Json = serde_json::from_str(line).unwrap();
            record["outcome"] = json!({"class": "run_timeout", "message": "not finished"});
            if let Some(limit) = &limit {
                record["limit"] = limit.clone();
            }
            format!("{record}\n")
        });
        let (file, db) = (db(&format!("{name}.jsonl")), db(&format!("{name}.db")));
        std::fs::write(&file, failed.collect::<String>()).unwrap();
        run_json(&["import", text(&file), "--db", text(&db)]);
        let mut arguments = arguments("");
        arguments[8] = text(&db);
        let output = run(&[&arguments[..], &["--json"]].concat());
        let result: Json = serde_json::from_slice(&output.stdout).expect("the result is JSON");
        assert_eq!((&result["trials"], &result["new_trials"]), (&4.into(), &n_tried.into()), "{name}: {result}");
        assert_eq!(output.status.code(), Some(if n_tried > 0 { 0 } else { 1 }), "{name}");
        assert_eq!(stderr(&output).contains("--run-timeout"), name == "higher", "{name}: {}", stderr(&output));
        let recorded = String::from_utf8(run(&["export", "--db", text(&db)]).stdout).unwrap();
        assert_eq!(recorded.contains("run_timeout"), n_tried == 0, "{name}: {recorded}");
    }
}

#[test]
fn a_time_out_names_its_limit() {
    let options = DeviceOptions { run_timeout: Duration::from_millis(50), ..device_options(1) };
    let measured = measure(&mut device(options), slow(FOR_EVER)).unwrap();
    assert_eq!((measured.outcome.class(), measured.limit), (Some(ErrorClass::RunTimeout), Some(Limit::RunS(0.05))));
}

#[test]
fn a_pause_is_not_a_candidates_time() {
    // Many times the time of the kernel, with some reserve for other load, but less than the pause.
    let mut device = device(DeviceOptions { run_timeout: Duration::from_millis(1200), ..device_options(1) });
    let me = std::process::id();
    let mut pauser = after_a_moment(&format!("kill -STOP {me} $workers; sleep 5.5; kill -CONT {me} $workers"));
    // A fast machine finishes a source before the pause begins.
    while pauser.try_wait().unwrap().is_none() {
        let measured = measure(&mut device, slow(200_000_000)).unwrap();
        assert!(measured.outcome.timing().is_some(), "{measured:?}");
    }
    assert!(pause::total() > Duration::from_secs(4), "{:?}", pause::total());
}

#[test]
fn a_candidate_whose_worker_is_killed_is_measured_again() {
    let mut device = device(device_options(1));
    let mut killer = after_a_moment("kill -KILL $workers");
    let measured = measure(&mut device, slow(300_000_000)).unwrap();
    assert!(measured.outcome.timing().is_some(), "{measured:?}");
    killer.wait().unwrap();
}

#[test]
fn what_the_system_ends_again_and_again_ends_the_run() {
    let script = "ulimit -t 1; exec \"$0\" worker".to_owned();
    let worker =
        WorkerCommand { program: "sh".into(), arguments: vec!["-c".to_owned(), script, TILEWRIGHT.to_owned()] };
    let mut device = device(DeviceOptions { worker, ..device_options(1) });
    let ended = measure(&mut device, slow(FOR_EVER)).unwrap_err();
    assert!(ended.contains("killed") && ended.contains("nothing is recorded"), "{ended}");
}

#[test]
fn limits_of_the_shell_are_told_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let tune = |workload: &'static str| ["tune", workload, "--trials", "2", "--db", text(&db)];
    check_line(&run_after("ulimit -f 100", &tune("matmul-256")), 1, "`ulimit -f`");
    check_line(&run_after("ulimit -f 8", &tune("matmul-256")), 2, "raise `ulimit -f`");
    check_line(&run_after("ulimit -n 8", &tune("matmul-256")), 1, "`ulimit -n`");
    check_line(&run_after("ulimit -v 1000000", &tune("matmul:m=8192,n=8192,k=8192")), 2, "`ulimit -v`");
    let doctor = run_after("ulimit -t 1000; ulimit -v 8000000", &["doctor", "--json"]);
    let doctor: Json = serde_json::from_slice(&doctor.stdout).expect("the result is JSON");
    let limits = &doctor["limits"];
    assert_eq!((&limits["cpu_seconds"], &limits["address_space_bytes"]), (&1000.into(), &8_192_000_000u64.into()));
}

#[test]
fn a_quota_of_cpu_time_is_seen() {
    let Some(group) = Group::new(&[("cpu", "cpu.cfs_quota_us", "100000"), ("", "cpu.max", "100000 100000")]) else {
        return;
    };
    let doctor = run_after(&group.join(), &["doctor", "--json"]);
    let doctor: Json = serde_json::from_slice(&doctor.stdout).expect("the result is JSON");
    assert_eq!((&doctor["threads"], &doctor["limits"]["cpus"]), (&1.into(), &1.0.into()));
    if host::allowed_cpus().len() < 2 {
        return eprintln!("skipped: one CPU alone may be used");
    }
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    for (threads, warns) in [("1", false), ("2", true)] {
        let arguments = ["tune", WORKLOAD, "--threads", threads, "--trials", "1", "--no-race", "--db", text(&db)];
        let output = run_after(&group.join(), &arguments);
        assert_eq!(stderr(&output).contains("warning: a quota"), warns, "{}", stderr(&output));
    }
}

#[test]
fn memory_and_threads_of_a_control_group_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let tune = |workload: &'static str| ["tune", workload, "--trials", "2", "--db", text(&db)];
    if let Some(group) = Group::new(&[("memory", "memory.limit_in_bytes", "200M"), ("", "memory.max", "200M")]) {
        check_line(&run_after(&group.join(), &tune("matmul-2048")), 2, "this process may have 200");
    }
    if let Some(group) = Group::new(&[("pids", "pids.max", "3"), ("", "pids.max", "3")]) {
        check_line(&run_after(&group.join(), &tune("matmul-256")), 1, "pids.max");
    }
}
