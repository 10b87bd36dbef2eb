//! Locations of a database: names that are special to SQLite, inaccessible folders, full disks, damaged
//! files.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use common::{TILEWRIGHT, check_refused, command, json_of, recorded, run, run_json, stderr, text};

const WORKLOAD: &str = "matmul:m=8,n=8,k=8";

fn tune(db: &str) {
    run_json(&["tune", WORKLOAD, "--search", "random", "--trials", "4", "--no-race", "--db", db]);
}

#[test]
fn a_name_is_the_name_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for name in [":memory:", "file:records.db?mode=memory", "file::memory:", "a%20b?x=1#y.db"] {
        let run = |arguments: &[&str]| {
            let output = command(arguments).arg("--json").current_dir(folder.path()).output().unwrap();
            json_of(arguments, &output)
        };
        run(&["tune", WORKLOAD, "--search", "random", "--trials", "2", "--no-race", "--db", name]);
        assert_eq!(run(&["best", WORKLOAD, "--db", name])["found"], true, "{name}");
        assert!(folder.path().join(name).is_file(), "{name}");
    }
    for name in ["/dev/null", "/dev/full"] {
        check_refused(&["tune", WORKLOAD, "--db", name], "it is no plain file (give another file with --db)");
        check_refused(&["best", WORKLOAD, "--db", name], "it is no plain file (give another file with --db)");
    }
}

/// Runs the command without root privileges; `None`, with a message, if that is not possible.
fn without_privilege(folder: &Path, arguments: &[&str]) -> Option<Output> {
    let probe = folder.join("probe");
    std::fs::create_dir_all(&probe).unwrap();
    std::fs::set_permissions(&probe, std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::read_dir(&probe).is_err() {
        return Some(run(arguments));
    }
    let privileges = "-dac_override,-dac_read_search";
    let lesser =
        |arguments: &[&str]| Command::new("setpriv").args(["--bounding-set", privileges]).args(arguments).output().ok();
    let is_closed = lesser(&["ls", text(&probe)]).is_some_and(|output| output.status.code() == Some(2));
    if !is_closed {
        println!("skipped: this user may read everything, and cannot give that up");
        return None;
    }
    lesser(&[&[TILEWRIGHT], arguments].concat())
}

#[test]
fn a_closed_folder_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    std::fs::create_dir(&closed).unwrap();
    let db = text(&closed.join("records.db")).to_owned();
    tune(&db);
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o644)).unwrap();
    for arguments in
        [["best", WORKLOAD, "--db", &db], ["tune", WORKLOAD, "--db", &db], ["bench", WORKLOAD, "--db", &db]]
    {
        let Some(output) = without_privilege(folder.path(), &arguments) else { break };
        let stderr = stderr(&output);
        let is_told = stderr.contains(&format!("error: database {db}: cannot be reached: Permission denied"));
        assert!(output.status.code() == Some(2) && is_told, "{arguments:?}: {stderr}");
    }
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(run_json(&["best", WORKLOAD, "--db", &db])["found"], true);
}

#[test]
fn a_full_disk_ends_the_run_with_its_winner_told_and_the_next_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let disk = text(folder.path()).to_owned();
    // Private mounts of the user, which end with the script.
    let script = format!(
        "mount -t tmpfs -o size=300k none {disk} || exit 77
        {TILEWRIGHT} tune matmul:m=64,n=64,k=64 --search random --trials 400 --db {disk}/r.db --json || echo code $? >&2
        mount -o remount,size=50m {disk} || exit 78
        {TILEWRIGHT} export --db {disk}/r.db - 2>/dev/null | wc -l
        {TILEWRIGHT} tune matmul:m=64,n=64,k=64 --search random --trials 400 --no-race --db {disk}/r.db --json"
    );
    let output = Command::new("unshare").args(["-rm", "sh", "-c", &script]).output();
    let output = match output {
        Ok(output) if output.status.success() => output,
        other => {
            println!("skipped: no file system of our own: {other:?}");
            return;
        }
    };
    let (stdout, stderr) = (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output));
    let lines: Vec<&str> = stdout.lines().collect();
    let [full, kept, resumed] = lines[..] else { panic!("{stdout}{stderr}") };
    let told =
        format!("error: database {disk}/r.db: disk or database full (make room and run the same again)\ncode 1\n");
    assert!(stderr.contains(&told), "{stderr}");
    let full: serde_json::Value = serde_json::from_str(full).unwrap();
    assert!(full["best"]["gflops"].as_f64().is_some_and(|g| g > 0.0), "{full}");
    assert_eq!(full["recorded"], false);
    let kept: u64 = kept.parse().unwrap();
    let resumed: serde_json::Value = serde_json::from_str(resumed).unwrap();
    assert!((1..400).contains(&kept), "{kept}");
    assert_eq!((&resumed["trials"], &resumed["new_trials"]), (&400.into(), &(400 - kept).into()));
}

#[test]
fn a_damaged_database_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    let (good, bad, out) = (at("good.db"), at("bad.db"), at("out.jsonl"));
    tune(&good);
    let mut bytes = std::fs::read(&good).unwrap();
    // All pages except the first, which identifies the file.
    bytes[4096..].fill(0xa5);
    std::fs::write(&bad, bytes).unwrap();
    let mend = format!("or move this one away, with {bad}-wal and {bad}-shm where they are there)");
    for arguments in [
        &["best", WORKLOAD, "--db", &bad][..],
        &["show", WORKLOAD, "--best", "--db", &bad],
        &["bench", WORKLOAD, "--against", "none", "--db", &bad],
        &["tune", WORKLOAD, "--trials", "9", "--db", &bad],
        &["tune", WORKLOAD, "--trials", "9", "--transfer", &bad, "--db", &good],
        &["record-space", WORKLOAD, "--max", "9", "--db", &bad],
        &["report", "--json", "--db", &bad],
        &["export", "--db", &bad],
        &["export", &out, "--db", &bad],
        &["predict", "train", "--db", &bad, "--template", "matmul", "-o", &out],
    ] {
        let output = run(arguments);
        let stderr = stderr(&output);
        let last = stderr.lines().last().unwrap_or_default();
        let is_named = last.starts_with(&format!("error: database {bad}: damaged: ")) && last.ends_with(&mend);
        assert!(output.status.code() == Some(2) && is_named, "{arguments:?}: {stderr}");
    }
    assert!(!Path::new(&out).exists());
    assert_eq!(recorded(Path::new(&good)).len(), 4);
}
