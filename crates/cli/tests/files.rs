//! Files that commands write: complete or not at all; anything other than a file keeps its kind.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use common::{check_refused, command, run, stderr, text};

const SHOW: [&str; 5] = ["show", "matmul:m=64,n=64,k=64", "--guess", "--emit", "object"];

fn show(file: &Path) -> Vec<&str> {
    [&SHOW[..], &["-o", text(file)]].concat()
}

fn names_in(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// File system of 64 KiB, unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Small> {
        let small = Small(tempfile::tempdir().unwrap());
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "small", text(small.0.path())]).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(small)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_leaves_the_file_that_was_there() {
    let Some(small) = Small::mount() else {
        eprintln!("skipped: only root mounts a small file system");
        return;
    };
    let folder = small.0.path();
    let file = folder.join("x.o");
    fs::write(&file, "before").unwrap();
    // Fills all free space.
    let mut filler = File::create(folder.join("filler")).unwrap();
    let _ = std::io::copy(&mut std::io::repeat(1), &mut filler);
    let output = run(&show(&file));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("x.o: No space left on device"), "{}", stderr(&output));
    assert_eq!(fs::read(&file).unwrap(), b"before");
    assert_eq!(names_in(folder), ["filler", "x.o"]);
    drop(filler);
    fs::remove_file(folder.join("filler")).unwrap();
    let output = run(&show(&file));
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(fs::read(&file).unwrap().starts_with(b"\x7fELF"));
}

#[test]
fn a_limit_on_the_size_of_files_leaves_the_file_that_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.o");
    fs::write(&file, "before").unwrap();
    // Half a KiB, in the shell's blocks; a process that exceeds it is killed.
    let script = "ulimit -f 1; exec \"$@\"";
    let output = Command::new("sh").args(["-c", script, "sh", common::TILEWRIGHT]).args(show(&file)).output().unwrap();
    assert!(!output.status.success(), "{}", stderr(&output));
    assert_eq!(fs::read(&file).unwrap(), b"before");
}

#[test]
fn standard_output_is_written_to_where_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    fs::write(&path, "before\n").unwrap();
    let log = File::options().append(true).open(&path).unwrap();
    let arguments = ["show", "matmul:m=8,n=8,k=8", "--emit", "ir", "-o", "/dev/stdout"];
    let output = command(&arguments).stdout(log).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let written = fs::read_to_string(&path).unwrap();
    assert!(written.starts_with("before\nprogram") && written.ends_with("}\n"), "{written}");
    // A JSON document has standard output to itself.
    common::check_refused(&[&arguments[..], &["--json"]].concat(), "--json and /dev/stdout both take standard output");
}

#[test]
fn a_model_can_go_where_nothing_can_be_beside_it() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("m");
    symlink("/dev/null", &link).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let data = root.join("tests/corpus/miopen/ConvAsmBwdWrW3x3.fp32.csv");
    let spec = root.join("kernels/miopen/ConvAsmBwdWrW3x3.toml");
    let train = ["predict", "train", text(&data), "--spec", text(&spec), "-o", text(&link)];
    let output = run(&train);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("m is no file"), "{}", stderr(&output));
    assert!(!Path::new("/dev/null").metadata().unwrap().is_file());
    assert_eq!(names_in(folder.path()), ["m"]);
}

#[test]
fn a_database_is_not_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("r.db");
    assert!(run(&["import", "/dev/null", "--db", text(&db)]).status.success());
    let before = fs::read(&db).unwrap();
    let record = ["record-space", "matmul:m=8,n=8,k=8", "--max", "5", "--db", text(&db), "-o", text(&db)];
    for arguments in [&show(&db)[..], &["report", "--db", text(&db), "-o", text(&db)], &record] {
        check_refused(arguments, "r.db is a database and would be written over");
    }
    assert_eq!(fs::read(&db).unwrap(), before);
    for part in ["r.db-wal", "r.db-shm", "r.db-journal"] {
        check_refused(&show(&folder.path().join(part)), "where the database beside it has its log");
    }
    // Nor a database that does not exist yet.
    let [new, link] = ["new", "link"].map(|name| folder.path().join(name));
    symlink("new", &link).unwrap();
    for output in [&new, &link] {
        let record = ["record-space", "matmul:m=8,n=8,k=8", "--max", "5", "--db", text(&new), "-o", text(output)];
        check_refused(&record, "which is needed");
    }
    assert_eq!(names_in(folder.path()), ["link", "r.db"]);
}

#[test]
fn what_a_model_is_learnt_from_is_not_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let [data, spec] = ["data", "model.json"].map(|name| folder.path().join(name));
    fs::copy(root.join("tests/corpus/miopen/ConvAsmBwdWrW3x3.fp32.csv"), &data).unwrap();
    fs::copy(root.join("kernels/miopen/ConvAsmBwdWrW3x3.toml"), &spec).unwrap();
    let before = [&data, &spec].map(|file| fs::read(file).unwrap());
    // The description of a model is written beside it.
    for output in [&data, &spec, &folder.path().join("model")] {
        let train = ["predict", "train", text(&data), "--spec", text(&spec), "-o", text(output)];
        check_refused(&train, "which is needed");
    }
    assert_eq!([&data, &spec].map(|file| fs::read(file).unwrap()), before);
    assert_eq!(names_in(folder.path()), ["data", "model.json"]);
}

#[test]
fn what_goes_to_standard_output_is_alone_there() {
    let folder = tempfile::tempdir().unwrap();
    let [db, copy] = ["r.db", "copy.db"].map(|name| folder.path().join(name));
    let record = ["record-space", "matmul:m=8,n=8,k=8", "--max", "2", "--db", text(&db), "-o", "/dev/stdout"];
    let output = run(&record);
    serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("a recorded space and nothing else");
    assert!(stderr(&output).contains("2 configurations"), "{}", stderr(&output));
    let show = |name| run(&["show", "matmul:m=8,n=8,k=8", "--emit", "ir", "-o", name]).stdout;
    assert!(!show("-").is_empty());
    assert_eq!(show("-"), show("/dev/stdout"));
    assert!(!Path::new("-").exists());
    for name in ["/dev/stdout", "-"] {
        let page = run(&["report", "--db", text(&db), "-o", name]).stdout;
        assert!(page.trim_ascii_end().ends_with(b"</html>"));
    }
    let lines = folder.path().join("lines");
    fs::write(&lines, run(&["export", "/dev/stdout", "--db", text(&db)]).stdout).unwrap();
    let imported = run(&["import", text(&lines), "--db", text(&copy)]);
    assert!(imported.status.success(), "{}", stderr(&imported));
}

#[test]
fn what_cannot_be_written_is_refused_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("no/such/file");
    let db = folder.path().join("r.db");
    // The database of the second command does not exist either, which would be noticed later.
    for mut arguments in [show(&nowhere), vec!["export", text(&nowhere)], vec!["report", "-o", text(&nowhere)]] {
        if arguments[0] != "show" {
            arguments.extend(["--db", text(&db)]);
        }
        check_refused(&arguments, "no/such/file: there is no folder");
    }
    let record = ["record-space", "matmul:m=8,n=8,k=8", "--max", "5", "--db", text(&db), "-o"];
    check_refused(&[&record[..], &[text(&nowhere)]].concat(), "there is no folder");
    check_refused(&[&record[..], &[text(folder.path())]].concat(), "it is a folder");
    assert!(names_in(folder.path()).is_empty(), "the database was not begun");
}
