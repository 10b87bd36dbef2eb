//! Helpers of the command's tests.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashSet;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value as Json;
use tilewright_device::DeviceOptions;
use tilewright_device::device::WorkerCommand;

/// Command under test.
pub const TILEWRIGHT: &str = env!("CARGO_BIN_EXE_tilewright");

/// Command with these arguments, its output captured. It compiles everything anew.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(TILEWRIGHT);
    command
        .env("XDG_CACHE_HOME", "/dev/null")
        // Without this, PoCL would have no place for its compiled code, and so no device.
        .env("POCL_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/pocl"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs the command to its end.
pub fn run(arguments: &[&str]) -> Output {
    command(arguments).output().expect("the command starts")
}

/// Runs the command with `--json` and reads the document it prints.
pub fn run_json(arguments: &[&str]) -> Json {
    json_of(arguments, &command(arguments).arg("--json").output().expect("the command starts"))
}

/// JSON document that a successful run printed.
pub fn json_of(arguments: &[&str], output: &Output) -> Json {
    assert!(output.status.success(), "{arguments:?}: {}: {}", output.status, stderr(output));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{arguments:?}: {e}: {}", String::from_utf8_lossy(&output.stdout)))
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Checks that bad input is refused: exit code 2, no standard output, one line that contains these words.
pub fn check_refused<S: AsRef<str>>(arguments: &[S], expected: &str) {
    let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    let output = run(&arguments);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
    assert_eq!((stderr.lines().count(), output.stdout.len()), (1, 0), "{arguments:?}: {stderr}");
    assert!(stderr.starts_with("error: ") && stderr.contains(expected), "{arguments:?}: {stderr}");
}

/// A folder with an emulator of PTX in place of NVIDIA's driver, for programs that look for libraries there
/// first; `None` where it was not built, or nothing makes PTX.
pub fn emulated_cuda() -> Option<tempfile::TempDir> {
    // Where cargo builds it to.
    let emulator = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples/libemulated_cuda.so");
    if !emulator.is_file() || tilewright_codegen::llvm_version().is_none() {
        println!("skipped: no emulator of NVIDIA's driver (cargo build --examples), or no LLVM");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(emulator, folder.path().join("libcuda.so.1")).unwrap();
    Some(folder)
}

/// Arguments that live as long as one likes.
pub fn owned(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|argument| (*argument).to_owned()).collect()
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("temporary folders have plain names")
}

/// Configurations of all records of a database, each as text; empty without a database.
///
/// # Panics
/// If a configuration is recorded twice.
pub fn recorded(db: &Path) -> HashSet<String> {
    if !db.exists() {
        return HashSet::new();
    }
    let arguments = ["export", "--db", text(db)];
    let output = run(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let mut configs = HashSet::new();
    for line in String::from_utf8(output.stdout).expect("records are text").lines() {
        let record: Json = serde_json::from_str(line).expect("a record is JSON");
        assert!(configs.insert(record["config"].to_string()), "recorded twice: {}", record["config"]);
    }
    configs
}

/// Sends a signal to a process.
pub fn send(signal: &str, child: &Child) {
    let id = child.id().to_string();
    let status = Command::new("kill").args([signal, &id]).status().expect("there is a kill command");
    assert!(status.success(), "kill {signal} {id}");
}

/// Options of a device whose workers are the command under test.
pub fn device_options(n_threads: usize) -> DeviceOptions {
    let worker = WorkerCommand { program: TILEWRIGHT.into(), arguments: vec!["worker".to_owned()] };
    DeviceOptions::new(worker, n_threads)
}

/// Returns `name` if the program is installed; otherwise prints what is skipped.
pub fn tool(name: &str) -> Option<&str> {
    let found = Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: no `{name}`");
    }
    found.then_some(name)
}

/// Runs a tool to its end, which must be successful.
pub fn done(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(status.success(), "{command:?}: {status}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).expect("the tools print text")
}

/// Compiles the runner in a folder with this compiler; `None` if it is not installed.
pub fn make_runner(folder: &Path, compiler: &str) -> Option<()> {
    tool(compiler)?;
    std::fs::write(folder.join("tw-run.c"), run(&["runner"]).stdout).unwrap();
    let options = ["-std=gnu99", "-Wall", "-Wextra", "-Werror", "-O2", "-static", "-pthread", "-o", "tw-run"];
    done(Command::new(compiler).args(options).args(["tw-run.c", "-lm"]).current_dir(folder));
    Some(())
}

/// Compiles a runner for 64-bit Arm; `None` unless an emulator is installed as well.
pub fn make_arm_runner(folder: &Path) -> Option<()> {
    tool("qemu-aarch64")?;
    make_runner(folder, "aarch64-linux-gnu-gcc")
}
