//! Users' programs and kernels: a failure costs one trial, and nothing is done twice.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{TILEWRIGHT, check_refused, command, json_of, owned, recorded, run, run_json, send, text};
use serde_json::{Value as Json, json};

/// Arguments of `tune` for a command, with a database in a folder.
fn tune<'a>(db: &'a Path, command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["tune", "--db", text(db), "--no-race", "--command", command], more].concat()
}

/// Awk program that prints a number computed from two parameters; the minimum is 1, at x = 8 and y = 6.
const BOWL: &str = "awk 'BEGIN {{ x = {x}; y = {y}; d = log(x / 8); print \"m \" \
                    (1 + (d < 0 ? -d : d)) * (1 + 0.1 * (y - 6) ^ 2) }}'";

/// Options of a command are refused beside a workload or a kernel, and options of workloads, as well as a
/// fleet without a class, beside a command: none is silently ignored.
#[test]
fn options_of_something_else_are_refused() {
    let help = String::from_utf8(command(&["tune", "--help"]).output().unwrap().stdout).unwrap();
    let (_, of_own) = help.split_once("Programs and kernels of your own:").unwrap();
    let names: Vec<&str> = of_own
        .lines()
        .filter_map(|line| line.split_once("--")?.1.split([' ', '[']).next())
        .take_while(|name| *name != "memory")
        .filter(|name| !["command", "kernel"].contains(name))
        .collect();
    assert!(names.len() >= 11 && names.contains(&"parameter") && names.contains(&"samples"), "{names:?}");
    for name in names {
        let value = match name {
            "parameter" => "=x=1,2",
            "timeout" | "samples" => "=3",
            "shell" => "",
            _ => "=true",
        };
        let option = format!("--{name}{value}");
        check_refused(&["tune", "matmul-256", &option], "cannot be used with");
        check_refused(&["tune", "--kernel", "kernel.json", &option], "cannot be used with");
    }
    let of_command = ["tune", "--command", "true", "-p", "x=1,2"];
    let url = "--fleet=nats://127.0.0.1:1";
    let alien =
        ["--exact", "--bf16", "--dim=n=1", "--shape=x=1", "--set=x=1", "--together", "--predict=m", "--runner=r", url];
    for option in alien {
        check_refused(&[&of_command[..], &[option]].concat(), "cannot be used with");
    }
    check_refused(&["tune", "matmul-256", "--together", url], "cannot be used with");
    check_refused(&["tune", "matmul-256", "--device", "opencl", url], "cannot be used with");
}

#[test]
fn twenty_trials_find_what_two_hundred_configurations_have() {
    let folder = tempfile::tempdir().unwrap();
    let n_seeds = 30;
    let mut parts = Vec::new();
    for seed in 0..n_seeds {
        let db = folder.path().join(format!("{seed}.db"));
        let seed = seed.to_string();
        let more = ["-p", "x=1..20", "-p", "y=1..10", "--metric", "^m (.*)$", "--trials", "20", "--seed", &seed];
        let tuned = run_json(&tune(&db, BOWL, &more));
        assert_eq!((&tuned["trials"], &tuned["errors"]), (&json!(20), &json!({})), "{tuned}");
        parts.push(1.0 / tuned["best"]["value"].as_f64().unwrap());
    }
    let mean = parts.iter().sum::<f64>() / n_seeds as f64;
    assert!(mean >= 0.9, "{mean:.3} of the optimum: {parts:?}");
}

#[test]
fn a_number_may_be_great_and_the_whole_space_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let more = ["-p", "x=3,1,2", "--metric", "m=([0-9]+)", "--maximize", "--trials", "9"];
    let tuned = run_json(&tune(&db, "echo m={x}", &more));
    assert_eq!((&tuned["trials"], &tuned["best"]["value"]), (&json!(3), &json!(3.0)), "{tuned}");
    let commands = tuned["best"]["commands"].as_str().unwrap();
    assert!(commands.contains("run echo m=3\n"), "{commands}");
    // If an expression matches everything, the last line counts.
    let plain = folder.path().join("plain.db");
    let whole = ["-p", "x=3,1,2", "--metric", "(.*)", "--trials", "3"];
    assert_eq!(run_json(&tune(&plain, "echo {x}", &whole))["best"]["value"], json!(1.0));
    let either = folder.path().join("either.db");
    let groups = ["-p", "x=3,1,2", "--metric", "s=(.*)|m=(.*)", "--trials", "3"];
    assert_eq!(run_json(&tune(&either, "echo m={x}", &groups))["best"]["value"], json!(1.0));
    // A race confirms it, and `best`, `export` and `report` show it.
    let race = ["tune", "--db", text(&db), "--command", "echo m={x}"];
    let raced = run_json(&[&race[..], &more].concat());
    assert_eq!((&raced["new_trials"], &raced["best"]["confirmed"]), (&json!(0), &json!(true)), "{raced}");
    let best = run_json(&["best", "--db", text(&db), raced["workload"].as_str().unwrap()]);
    assert_eq!((&best["best"]["config"], &best["best"]["value"]), (&json!({"x": 3}), &json!(3.0)), "{best}");
    let (lines, copy) = (folder.path().join("lines"), folder.path().join("copy.db"));
    let report = folder.path().join("report.html");
    fs::write(&lines, command(&["export", "--db", text(&db)]).output().unwrap().stdout).unwrap();
    for arguments in
        [vec!["import", "--db", text(&copy), text(&lines)], vec!["report", "--db", text(&db), "-o", text(&report)]]
    {
        let output = command(&arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", common::stderr(&output));
    }
    assert_eq!(recorded(&copy).len(), 3);
    assert!(fs::read_to_string(report).unwrap().contains("command:echo-"));
}

/// Error class and message by configuration.
fn errors(db: &Path) -> BTreeMap<String, (String, String)> {
    let output = command(&["export", "--db", text(db)]).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let error = |line: &str| {
        let record: Json = serde_json::from_str(line).unwrap();
        let of = |name: &str| record["outcome"][name].as_str().unwrap_or_default().to_owned();
        let what = record["config"].as_object().unwrap().values().next().unwrap();
        (what.as_str().map_or(what.to_string(), str::to_owned), (of("class"), of("message")))
    };
    lines.lines().map(error).collect()
}

#[track_caller]
fn check_error(errors: &BTreeMap<String, (String, String)>, what: &str, class: &str, words: &str) {
    let (found, message) = &errors[what];
    assert_eq!(found, class, "{what}: {message}");
    assert!(message.contains(words) && !message.contains('\n'), "{what}: {message}");
}

#[test]
fn what_goes_wrong_costs_one_trial_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let script = folder.path().join("app.sh");
    let body = "#!/bin/sh\ncase $1 in\ncrash) kill -SEGV $$;;\nfail) echo out of luck >&2; exit 3;;\n\
                hang) sleep 100 & wait;;\nwrong) echo m 1 wrong;;\nsilent) echo nothing;;\nodd) echo m zero;;\n\
                *) echo m 5;;\nesac\n";
    fs::write(&script, body).unwrap();
    let app = format!("sh {} {{what}}", text(&script));
    let more = ["-p", "what=crash,fail,hang,wrong,silent,odd,good,bad,none", "--timeout", "0.3", "--trials", "9"];
    let build = "[ {what} != bad ] || {{ echo \"app.c: error: no such thing\" >&2; exit 1; }}";
    let checked = ["--shell", "--build", build, "--check", "! grep -q wrong", "--metric", "m (.*)"];
    let start = Instant::now();
    let tuned = run_json(&tune(&db, &app, &[&more[..], &checked].concat()));
    assert_eq!((&tuned["trials"], &tuned["best"]["value"]), (&json!(9), &json!(5.0)), "{tuned}");
    assert!(start.elapsed() < Duration::from_secs(60));
    // A user who reads only the result learns the reason of one failure.
    let again = common::run(&tune(&db, &app, &[&more[..], &checked].concat()));
    let said = String::from_utf8_lossy(&again.stdout);
    let line = said.lines().find(|line| line.starts_with("errors   ")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("; for example ") && line.len() < 500, "{line}");
    let errors = errors(&db);
    check_error(&errors, "crash", "runtime_error", "SIGSEGV");
    check_error(&errors, "fail", "runtime_error", "exit code 3: out of luck");
    check_error(&errors, "hang", "run_timeout", "had not ended after 0.3");
    check_error(&errors, "wrong", "wrong_answer", "--check ended with exit code 1");
    check_error(&errors, "silent", "unknown", "no metric");
    check_error(&errors, "odd", "unknown", "\"zero\", which is no finite number");
    check_error(&errors, "bad", "compile_error_host", "app.c: error: no such thing");
    check_error(&errors, "good", "no_error", "");
    // No process of the hanging ones is left.
    let left =
        Command::new("ps").args(["-eo", "args"]).output().map(|ps| String::from_utf8_lossy(&ps.stdout).into_owned());
    assert!(left.is_ok_and(|left| !left.lines().any(|line| line.contains(text(&script)))));

    let db = folder.path().join("missing.db");
    let compiler = ["-p", "x=1,2", "--build", "no-such-compiler -DX={x}", "--trials", "2"];
    let output = command(&tune(&db, "true {x}", &compiler)).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = common::stderr(&output);
    assert!(said.contains("none of 2 candidates") && said.contains("there is no program no-such-compiler"), "{said}");
    assert_eq!(self::errors(&db).values().filter(|(class, _)| class == "instantiation_error").count(), 2);
}

#[test]
fn nothing_in_a_value_reaches_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let pwned = folder.path().join("pwned");
    let value = format!("['; touch {0};', '$(touch {0})', '\\'`touch {0}`', 'a b']", text(&pwned));
    let parameter = format!("x={value}");
    for shell in [&["--shell"][..], &[]] {
        let db = folder.path().join(format!("{}.db", shell.len()));
        let more =
            [&["-p", &parameter, "--metric", "<(.*)>", "--trials", "4", "--check", "grep -q {x}"], shell].concat();
        let tuned = run_json(&tune(&db, "echo \"<1>\" a{x}b \"{x}\"", &more));
        assert_eq!((&tuned["trials"], pwned.exists()), (&json!(4), false), "{tuned}");
    }
}

/// Command that takes some milliseconds, and logs each of its starts in a file.
fn slow(folder: &Path) -> String {
    format!("sh -c 'echo $1 >> $2; sleep 0.02; echo m $1' sh {{x}} {}", text(&folder.join("starts")))
}

#[test]
fn a_run_that_is_killed_repeats_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let app = slow(folder.path());
    let more = ["-p", "x=1..60", "--metric", "m (.*)", "--trials", "60"];
    let mut killed = Command::new(TILEWRIGHT)
        .args(tune(&db, &app, &more))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    while recorded(&db).len() < 5 && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let before = recorded(&db);
    assert!(before.len() >= 5 && before.len() < 60, "{}", before.len());
    let rest = run_json(&tune(&db, &app, &more));
    assert_eq!(rest["new_trials"], json!(60 - before.len()), "{rest}");
    assert_eq!(recorded(&db).len(), 60);
    // Only unrecorded candidates, at most a batch, were started again.
    let starts = fs::read_to_string(folder.path().join("starts")).unwrap().lines().count();
    assert!(starts <= 60 + 16, "{starts}");
}

#[test]
fn an_interrupt_keeps_all_and_ends_what_runs() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let pid = folder.path().join("pid");
    let app =
        format!("sh -c '[ $1 -lt 3 ] && echo m 1 || {{{{ echo $$ > $2; exec sleep 100; }}}}' sh {{x}} {}", text(&pid));
    let more = ["-p", "x=1..3", "--metric", "m (.*)", "--trials", "3", "--timeout", "100"];
    let running = command(&tune(&db, &app, &more)).spawn().unwrap();
    let start = Instant::now();
    while !pid.exists() && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(200));
    let sleeper = fs::read_to_string(&pid).unwrap().trim().to_owned();
    send("-INT", &running);
    let output = running.wait_with_output().unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "{}", common::stderr(&output));
    assert!(!Path::new(&format!("/proc/{sleeper}")).exists(), "what it started goes on");
    assert!(recorded(&db).len() <= 2);
}

#[test]
fn bad_commands_and_kernels_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let with = |more: &[&str]| owned(&[&["tune", "--db", text(&folder.path().join("r.db"))], more].concat());
    check_refused(&with(&["--command", "echo {y}", "-p", "x=1,2"]), "{y} is not a parameter; there are x, dir");
    check_refused(&with(&["--command", "echo {x} | cat", "-p", "x=1,2"]), "add --shell");
    check_refused(&with(&["--command", "echo {x}"]), "there are no parameters");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=1,2", "--where", "x >"]), "position 4");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=1,2", "--where", "x > 2 && x"]), "write `and`");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=1,2", "--metric", "("]), "--metric");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=1,2", "--maximize"]), "--maximize");
    check_refused(&with(&["--kernel", text(&folder.path().join("none.toml"))]), "none.toml");
    let of_gpus = ["matmul-256", "--beyond-limits", "--trials", "1"];
    check_refused(&with(&of_gpus), "a space beyond a GPU's limits means nothing on a CPU (leave it out)");
    // The hint names the option that was given.
    for option in ["--timeout", "--run-timeout"] {
        let more = ["--command", "sleep {x}", "-p", "x=20,30", "--trials", "2", option, "0.05"];
        let arguments = with(&more);
        let output = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let stderr = common::stderr(&output);
        assert!(stderr.ends_with(&format!("(raise {option}, and they are tried again)\n")), "{stderr}");
    }
    let file = |contents: &str| {
        let path = folder.path().join("k.toml");
        fs::write(&path, contents).unwrap();
        with(&["--kernel", text(&path)])
    };
    let kernel = |source: &str, more: &str| {
        file(&format!(
            "name = 'k'\nsource = '{source}'\nfunction = 'f'\nparameters = [{{ name = 'T', values = [1, 2] }}]\n\
             arguments = [{{ name = 'a', type = 'float', size = 4, role = 'out' }}]\nreference = {{ function = 'g' }}\n{more}"
        ))
    };
    check_refused(&kernel("k.cl", ""), "a kernel for a GPU has a grid (give `grid`");
    check_refused(&kernel("k.cu", "grid = 'n // T'"), "the grid, `n // T`: position 1: unknown name n");
    check_refused(&kernel("k.c", "grid = 1"), "are for sources in OpenCL C or CUDA");
    check_refused(&kernel("k.f90", ""), "k.f90 is no source in C, C++, OpenCL C or CUDA");
    check_refused(&kernel("k.cl", "grid = [1, 1, 1, 1]"), "the grid has more than three axes");
    check_refused(&kernel("k.cl", "grid = 1\nlanguage = 'fortran'"), "unknown variant `fortran`");
    check_refused(&kernel("k.c", ""), "k.c");
    check_refused(&kernel("k.c", "colour = 'red'"), "unknown field `colour`");
    for tolerance in ["nan", "inf", "-1"] {
        check_refused(&kernel("k.c", &format!("tolerance = {tolerance}")), "tolerance is ");
    }
    for (argument, told) in [
        ("type = 'int', value = 1.5", "argument b: 1.5 is no number of type int"),
        ("type = 'int', value = 99999999999", "argument b: 99999999999 is no number of type int"),
        ("type = 'uint8_t', size = 4, fill = -1", "argument b: -1 is no number of type uint8_t"),
        ("type = 'float', size = 4, fill = nan", "argument b: NaN is no number of type float"),
        ("type = 'long', value = 0.5", "argument b: 0.5 is no number of type long"),
    ] {
        let argument = format!("[[arguments]]\nname = 'b'\n{}", argument.replace(", ", "\n"));
        let of_table = format!(
            "name = 'k'\nsource = 'k.c'\nfunction = 'f'\nparameters = [{{ name = 'T', values = [1, 2] }}]\n\
             reference = {{ function = 'g' }}\n[[arguments]]\nname = 'a'\ntype = 'float'\nsize = 4\nrole = 'out'\n{argument}\n"
        );
        check_refused(&file(&of_table), told);
    }
    check_refused(&kernel("k.c", "constraints = ['T > x']"), "unknown name x");
}

/// Kernel with one of many behaviours.
const KERNEL: &str = r#"
#include <stdlib.h>
void f(const float *a, float *b, int n) {
    if (T == 1) for (int i = 0; i < n; i++) b[i] = 2 * a[i];
    if (T == 2) *(volatile int *)0 = 1;
    if (T == 3) for (volatile int i = 0; ; i++) {}
    if (T == 4) for (int i = 0; i <= n; i++) b[i] = 2 * a[i];
    if (T == 5) for (int i = 0; i < n; i++) b[i] = 3 * a[i];
    if (T == 6) ((float *)a)[0] = 1;
    if (T == 7) exit(0);
#if T == 8
    this is no C;
#endif
    if (T == 9) for (int i = 0; i < n - 1; i++) b[i] = 2 * a[i];
}
void g(const float *a, float *b, int n) { for (int i = 0; i < n; i++) b[i] = a[i] + a[i]; }
"#;

/// Kernels in OpenCL C, some of them faulty.
const OPENCL_KERNEL: &str = r#"
#include "own.h"
__kernel void f(__global const float *a, __global float *b, int n, __local float *shared) {
    const int i = get_global_id(0), t = get_local_id(0);
    if (T != 2 && i >= n) return;
    shared[t] = a[i];
    if (T == 1) b[i] = FACTOR * shared[t];
    if (T == 2 && i <= n) b[i] = 2 * a[i % n];
    if (T == 3) for (volatile int k = 0; ; k++) {}
    if (T == 4) b[i] = 3 * a[i];
    if (T == 5) { b[i] = 2 * a[i]; ((__global float *)a)[i] = 1; }
#if T == 6
    this is no C;
#endif
    if (T == 7 && i < n - 1) b[i] = 2 * a[i];
    if (T == 8) b[i] = 2 * a[i];
    if (T == 9) b[i + 100000000] = 1;
}
__kernel void g(__global const float *a, __global float *b, int n, __local float *unused) {
    for (int i = 0; i < n; i++) b[i] = a[i] + a[i];
}
"#;

#[test]
fn opencl_kernels_that_do_wrong_cost_one_trial_each() {
    match tilewright_device::opencl::device(0) {
        Ok(device) if device.is_cpu => {}
        Ok(device) => return eprintln!("skipped: {} is no CPU, and nobody knows what faults do to it", device.name),
        Err(why) => return eprintln!("skipped: {why}"),
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("k.cl"), OPENCL_KERNEL).unwrap();
    fs::write(path("own.h"), "#define FACTOR 2\n").unwrap();
    fs::write(
        path("plain.c"),
        "void g(const float *a, float *b, int n) { for (int i = 0; i < n; i++) b[i] = 2 * a[i]; }",
    )
    .unwrap();
    let form = |values: &str, reference: &str| {
        format!(
            "name = 'k'\nsource = 'k.cl'\nfunction = 'f'\nconstants = {{ N = 1000 }}\nflags = ['-cl-std=CL1.2']\n\
             parameters = [{{ name = 'T', values = {values} }}]\nreference = {reference}\n\
             block = '10**9 if T == 8 else 8'\ngrid = ['N // 8 + (1 if T == 2 else 0)', 1]\n\
             arguments = [{{ name = 'a', type = 'float', size = 'N' }},\n\
             {{ name = 'b', type = 'float', size = 'N', role = 'out' }}, {{ name = 'n', type = 'int', value = 'N' }},\n\
             {{ name = 'shared', type = 'float', local = '8 * T // T' }}]\n"
        )
    };
    let kernel = path("k.toml");
    fs::write(&kernel, form("'list(range(1, 10))'", "{ function = 'g', grid = 1, block = 1 }")).unwrap();
    let db = path("records.db");
    let tune = ["tune", "--db", text(&db), "--kernel", text(&kernel), "--trials", "9", "--run-timeout", "2"];
    let tuned = run_json(&tune);
    assert_eq!((&tuned["trials"], &tuned["best"]["config"]), (&json!(9), &json!({"T": 1})), "{tuned}");
    let errors = errors(&db);
    check_error(&errors, "1", "no_error", "");
    check_error(&errors, "2", "runtime_error", "outside its buffers, beside b");
    check_error(&errors, "3", "run_timeout", "had not ended after 2");
    check_error(&errors, "4", "wrong_answer", "b: 1000 elements are wrong");
    check_error(&errors, "5", "runtime_error", "it wrote into its input a");
    check_error(&errors, "6", "compile_error_device", "k.cl:13:");
    check_error(&errors, "7", "wrong_answer", "b: 1 elements are wrong");
    check_error(&errors, "8", "instantiation_error", "threads along x, of which there may be");
    check_error(&errors, "9", "runtime_error", "SIGSEGV");
    let best = run_json(&["best", "--db", text(&db), "--device", "opencl", tuned["workload"].as_str().unwrap()]);
    assert_eq!(best["best"]["config"], json!({"T": 1}), "{best}");
    check_refused(&[owned(&tune), owned(&["--device", "cuda:99"])].concat(), "--device cuda:99: ");

    let mut references = vec![("configuration", "{ configuration = { T = 1 } }")];
    if has_compiler() {
        references.push(("function", "{ function = 'g', source = 'plain.c' }"));
    }
    for (name, reference) in references {
        let (db, kernel) = (path(&format!("{name}.db")), path(&format!("{name}.toml")));
        // A local argument does not exist for a function in C.
        fs::write(&kernel, form("[1, 4]", reference)).unwrap();
        let tuned = run_json(&["tune", "--db", text(&db), "--kernel", text(&kernel), "--trials", "2", "--no-race"]);
        assert_eq!(tuned["best"]["config"], json!({"T": 1}), "{name}: {tuned}");
        check_error(&self::errors(&db), "4", "wrong_answer", "1000 elements are wrong");
    }
}

#[test]
fn the_guide_to_opencl_kernels_can_be_followed() {
    match tilewright_device::opencl::device(0) {
        Ok(_) => follow("opencl-kernel.md"),
        Err(why) => eprintln!("skipped: {why}"),
    }
}

/// Whether there is a C compiler; prints a message if not.
fn has_compiler() -> bool {
    let has = Command::new("cc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !has {
        eprintln!("skipped: there is no `cc` on this machine");
    }
    has
}

#[test]
fn kernels_that_do_wrong_cost_one_trial_each() {
    if !has_compiler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("k.c"), KERNEL).unwrap();
    let form = |values: &str, reference: &str| {
        format!(
            "name = 'k'\nsource = 'k.c'\nfunction = 'f'\nconstants = {{ N = 1000 }}\n\
             parameters = [{{ name = 'T', values = {values} }}]\nreference = {reference}\n\
             arguments = [{{ name = 'a', type = 'float', size = 'N' }},\n\
             {{ name = 'b', type = 'float', size = 'N', role = 'out' }}, {{ name = 'n', type = 'int', value = 'N' }}]\n"
        )
    };
    fs::write(path("k.toml"), form("'[1, 2, 3, 4, 5, 6, 7, 8, 9]'", "{ function = 'g' }")).unwrap();
    let (db, kernel) = (path("records.db"), path("k.toml"));
    let arguments = ["tune", "--db", text(&db), "--kernel", text(&kernel), "--trials", "9", "--run-timeout", "1"];
    let tuned = run_json(&arguments);
    assert_eq!((&tuned["trials"], &tuned["best"]["config"]), (&json!(9), &json!({"T": 1})), "{tuned}");
    let errors = errors(&db);
    check_error(&errors, "1", "no_error", "");
    check_error(&errors, "2", "runtime_error", "SIGSEGV");
    check_error(&errors, "3", "run_timeout", "had not ended after 1");
    check_error(&errors, "4", "runtime_error", "outside its buffers");
    check_error(&errors, "5", "wrong_answer", "b: 1000 elements are wrong");
    check_error(&errors, "6", "runtime_error", "SIGSEGV");
    check_error(&errors, "7", "unknown", "said nothing");
    check_error(&errors, "8", "compile_error_host", "error:");
    check_error(&errors, "9", "wrong_answer", "b: 1 elements are wrong");

    // The result is the same for each kind of reference.
    let double: Vec<u8> = std::iter::repeat_n(6f32.to_le_bytes(), 1000).flatten().collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': (1000,), }}{:>55}\n", "");
    let npy = [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), &double].concat();
    fs::write(path("b.npy"), npy).unwrap();
    fs::write(path("six.bin"), &double).unwrap();
    let command = format!("{{ command = \"cp {} {{dir}}/b.bin\" }}", text(&path("six.bin")));
    for (name, reference) in [
        ("configuration", "{ configuration = { T = 1 } }"),
        ("files", "{ files = { b = 'b.npy' } }"),
        ("command", command.as_str()),
    ] {
        let (db, kernel) = (path(&format!("{name}.db")), path(&format!("{name}.toml")));
        fs::write(&kernel, form("[1, 5]", reference).replace("size = 'N' }", "size = 'N', fill = 3 }")).unwrap();
        let tuned = run_json(&["tune", "--db", text(&db), "--kernel", text(&kernel), "--trials", "2", "--no-race"]);
        assert_eq!(tuned["best"]["config"], json!({"T": 1}), "{name}: {tuned}");
        check_error(&self::errors(&db), "5", "wrong_answer", "1000 elements are wrong");
    }
}

/// Follows a page of the guide: writes its files, and runs its commands in a shell.
fn follow(page: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide").join(page);
    let page = fs::read_to_string(path).unwrap();
    let mut script = "set -e\n".to_owned();
    for block in page.split("\n```").skip(1).step_by(2) {
        let (head, body) = block.split_once('\n').unwrap();
        match head.split_once(' ') {
            Some((_, name)) => fs::write(folder.path().join(name), format!("{body}\n")).unwrap(),
            None if head == "sh" => script += &format!("{body}\n"),
            // Only for readers.
            None if head.is_empty() => {}
            None => panic!("a block of neither a file nor commands: {head}"),
        }
    }
    assert!(script.contains("tilewright "), "{script}");
    let programs = Path::new(TILEWRIGHT).parent().unwrap();
    let path = std::env::join_paths(
        [programs.to_owned()].into_iter().chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .current_dir(folder.path())
        .env("PATH", path.unwrap())
        .env("XDG_DATA_HOME", folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_guide_to_any_command_can_be_followed() {
    if has_compiler() {
        follow("any-command.md");
    }
}

#[test]
fn the_guide_to_c_kernels_can_be_followed() {
    if has_compiler() {
        follow("c-kernel.md");
    }
}

#[test]
fn the_guide_to_races_in_ci_can_be_followed() {
    if has_compiler() {
        follow("ci.md");
    }
}

#[test]
fn the_guide_to_operators_can_be_followed() {
    if has_compiler() {
        follow("operator.md");
    }
}

#[test]
fn the_guide_to_models_can_be_followed() {
    if has_compiler() {
        follow("model.md");
    }
}

/// T1 description of the kernel above, with a change.
fn t1(change: (&str, &str)) -> String {
    let text = r#"{"ConfigurationSpace": {
        "TuningParameters": [{"Name": "T", "Type": "int", "Values": "list(range(1, 6))", "Default": 1}],
        "Conditions": [{"Parameters": ["T"], "Expression": "T != 3"}]},
    "KernelSpecification": {"Language": "C", "KernelName": "f", "KernelFile": "k.c", "ProblemSize": [10, 100],
        "GlobalSize": {"X": "1"}, "LocalSize": {"X": "1"}, "Arguments": [
        {"Name": "a", "Type": "float", "MemoryType": "Vector", "AccessType": "ReadOnly", "FillType": "Random",
         "Size": "ProblemSize[0] * ProblemSize[1]"},
        {"Name": "b", "Type": "float", "MemoryType": "Vector", "AccessType": "WriteOnly", "FillType": "Constant",
         "FillValue": 0, "Size": "max(T) * 200"},
        {"Name": "n", "Type": "int32", "MemoryType": "Scalar", "FillValue": 1000}]}}"#;
    text.replace(change.0, change.1)
}

#[test]
fn kernels_of_t1_files_are_tuned_and_begin_with_what_others_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("k.c"), KERNEL).unwrap();
    let (db, kernel, cache) = (path("records.db"), path("k.json"), path("cache.json"));
    let file = |change: (&str, &str)| {
        fs::write(&kernel, t1(change)).unwrap();
        owned(&["tune", "--db", text(&db), "--kernel", text(&kernel), "--trials", "1"])
    };
    check_refused(&file(("\"C\"", "\"Vulkan\"")), "kernels in Vulkan cannot be run");
    check_refused(&file(("ProblemSize[0] *", "Size *")), "argument a: its size: position 1: unknown name Size");
    check_refused(&file(("int32", "half2")), "argument n: there is no type half2");
    check_refused(&file(("list(range(1, 6))", "[1, x]")), "the values of T: position 5: unknown name x");
    check_refused(&file(("\"Random\"", "\"Script\"")), "argument a: its FillType is Script");
    check_refused(&file(("KernelFile", "File")), "missing field `KernelFile`");
    fs::write(
        &cache,
        r#"{"kernel_name": "f", "tune_params_keys": ["U"], "tune_params": {"U": [1]},
        "cache": {"1": {"U": 1, "time": 1.0}}}"#,
    )
    .unwrap();
    let transfer = |arguments: Vec<String>| [arguments, owned(&["--transfer", text(&cache)])].concat();
    check_refused(&transfer(file(("", ""))), "none of its results has the parameters T");
    if !has_compiler() {
        return;
    }
    fs::write(
        &cache,
        r#"{"kernel_name": "f", "tune_params_keys": ["T"], "tune_params": {"T": [5, 2]},
        "cache": {"5": {"T": 5, "time": 1.0}, "2": {"T": 2, "time": 2.0}}}"#,
    )
    .unwrap();
    let arguments = transfer(file(("", "")));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = command(&arguments).output().unwrap();
    // The configuration that another tuner found fastest is wrong here, and was tried first.
    assert_eq!(output.status.code(), Some(1), "{}", common::stderr(&output));
    check_error(&errors(&db), "5", "wrong_answer", "b: 1000 elements are wrong");
    let all = ["tune", "--db", text(&db), "--kernel", text(&kernel), "--trials", "4", "--run-timeout", "1"];
    let tuned = run_json(&all);
    assert_eq!((&tuned["trials"], &tuned["best"]["config"]), (&json!(4), &json!({"T": 1})), "{tuned}");
}

/// CUDA `__constant__` array, which is known by its name and is not an argument; elsewhere it is one.
#[test]
fn what_is_constant_may_be_a_variable_of_the_source() {
    let path = Path::new("k.cu");
    let constant = |language: &str| {
        let text = t1(("\"FillType\": \"Random\"", "\"MemType\": \"Constant\", \"FillType\": \"Random\""));
        tilewright::KernelFile::parse(&text.replace("\"C\"", language), path).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!((constant("\"CUDA\""), constant("\"OpenCL\""), constant("\"C\"")), (Ok(()), Ok(()), Ok(())));
    let form = |source: &str, more: &str| {
        let text = format!(
            "name = 'k'\nsource = '{source}'\nfunction = 'f'\ngrid = 1\nreference = {{ configuration = {{}} }}\n\
             parameters = [{{ name = 'T', values = [1] }}]\narguments = [\n\
             {{ name = 'b', type = 'float', size = 4, role = 'out' }}, {{ name = 'a', type = 'int', {more} }}]\n"
        );
        tilewright::KernelFile::parse(&text, path).map(drop).map_err(|e| e.to_string())
    };
    assert_eq!(form("k.cu", "size = 4, variable = true"), Ok(()));
    let check = |source: &str, more: &str, words: &str| {
        let error = form(source, more).unwrap_err();
        assert!(error.contains(words), "{error}");
    };
    check("k.cl", "size = 4, variable = true", "`variable` is for CUDA");
    check("k.cu", "value = 4, variable = true", "argument a: a variable has a `size` and the role in");
    check("k.cu", "size = 4, variable = true, role = 'inout'", "argument a: a variable has a `size`");
}

#[test]
fn a_run_of_a_command_is_one_json_document() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    // The build's folder exists for any command that uses it, built or not.
    let more = ["-p", "x=1,2", "--trials", "2", "--prepare", "test -d {dir}", "--check", "test -d {dir}"];
    let arguments = tune(&db, "true {x}", &more);
    let tuned = json_of(&arguments, &command(&arguments).arg("--json").output().unwrap());
    for name in ["workload", "template", "search", "trials", "new_trials", "errors", "best", "db"] {
        assert!(!tuned[name].is_null(), "{name}: {tuned}");
    }
    assert_eq!(tuned["template"], "command");
    assert!(tuned["best"]["ms_median"].as_f64().unwrap() > 0.0);
}

/// Runs `tune` to its end; returns its result and its messages.
fn told(arguments: &[&str]) -> (Json, String) {
    let output = command(arguments).arg("--json").output().unwrap();
    (json_of(arguments, &output), common::stderr(&output))
}

/// Writes a program that prints a number computed from its argument.
fn write_program(path: &Path, body: &str) {
    use std::os::unix::fs::PermissionsExt;
    fs::write(path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_program_that_changed_is_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (db, app, source) = (path("records.db"), path("app"), path("source.txt"));
    let best = |arguments: &[&str]| {
        let (tuned, _) = told(arguments);
        (tuned["new_trials"].as_u64().unwrap(), tuned["best"]["value"].as_f64().unwrap())
    };
    let more = ["-p", "x=1,2,3", "--metric", "m (.*)", "--trials", "3"];
    let direct = format!("{} {{x}}", text(&app));
    let script = format!("sh -c '. {0}; exit $?' {0} {{x}}", text(&app));
    let piped = format!("true && {} {{x}} | cat", text(&app));
    let shell = [&more[..], &["--shell"]].concat();
    for (command, more) in [(&direct, &more[..]), (&script, &more[..]), (&piped, &shell[..])] {
        let arguments = tune(&db, command, more);
        write_program(&app, "echo m $((10 * $1))");
        assert_eq!(best(&arguments), (3, 10.0), "{command}");
        assert_eq!(best(&arguments).0, 0, "{command}");
        write_program(&app, "echo m $((40 - 10 * $1))");
        assert_eq!(best(&arguments), (3, 10.0), "{command}");
        fs::remove_file(&app).unwrap();
    }
    // Files that a build names, but not those that it writes.
    let (made, build) = (path("made"), format!("cp {} {{dir}}/made", text(&source)));
    let run = format!("sh -c 'echo m $(( $1 * $(cat $2) ))' sh {{x}} {{dir}}/made -o {}", text(&made));
    let arguments = [tune(&db, &run, &more), vec!["--build", &build]].concat();
    for (n, value) in [("5", 5.0), ("7", 7.0)] {
        fs::write(&source, n).unwrap();
        assert_eq!(best(&arguments), (3, value));
        fs::write(&made, n).unwrap();
        assert_eq!(best(&arguments).0, 0);
    }
}

#[test]
fn what_changed_unseen_is_told_by_the_race_and_begun_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (db, data) = (folder.path().join("records.db"), folder.path().join("data"));
    let command = format!("sh -c 'echo m $(( $1 * $(cat $2) ))' sh {{x}} {}", text(&data));
    let more = ["-p", "x=1,2,3", "--metric", "m (.*)", "--trials", "3"];
    fs::write(&data, "10").unwrap();
    let (_, said) = told(&tune(&db, &command, &more));
    assert!(said.contains("records are of these texts and of what is in /"), "{said}");
    fs::write(&data, "20").unwrap();
    let raced = [&["tune", "--db", text(&db), "--command", &command], &more[..]].concat();
    let (tuned, said) = told(&raced);
    assert_eq!((&tuned["new_trials"], &tuned["best"]["value"]), (&json!(0), &json!(20.0)));
    assert!(said.contains("the race contradicts the records: ") && said.contains("--fresh"), "{said}");
    let (tuned, said) = told(&[&raced[..], &["--fresh"]].concat());
    assert_eq!((&tuned["new_trials"], &tuned["trials"]), (&json!(3), &json!(3)));
    assert!(said.contains("3 trials of earlier runs forgotten") && !said.contains("contradicts"), "{said}");
    assert_eq!(recorded(&db).len(), 3);
}

#[test]
fn what_was_imported_is_not_this_machines() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (there, here, lines) = (path("there.db"), path("here.db"), path("lines"));
    let more = |values| ["-p", values, "--metric", "m (.*)", "--trials", "2"];
    run_json(&tune(&there, "echo m {x}", &more("x=1,2")));
    fs::write(&lines, command(&["export", "--db", text(&there)]).output().unwrap().stdout).unwrap();
    run_json(&tune(&here, "echo m {x}", &more("x=3,4")));
    assert!(command(&["import", "--db", text(&here), text(&lines)]).output().unwrap().status.success());
    // It is faster, but was measured elsewhere; without other records it is shown as such.
    let all = ["-p", "x=1,2,3,4", "--metric", "m (.*)", "--trials", "4"];
    let tuned = run_json(&tune(&here, "echo m {x}", &all));
    assert_eq!((&tuned["best"]["value"], &tuned["best"]["imported"]), (&json!(3.0), &json!(false)), "{tuned}");
    let fresh = path("fresh.db");
    assert!(command(&["import", "--db", text(&fresh), text(&lines)]).output().unwrap().status.success());
    let name = tuned["workload"].as_str().unwrap();
    let best = String::from_utf8(command(&["best", name, "--db", text(&fresh)]).output().unwrap().stdout).unwrap();
    assert!(best.contains("(fastest trial, not raced, imported)"), "{best}");
    let tuned = run_json(&tune(&fresh, "echo m {x}", &more("x=1,2")));
    assert_eq!((&tuned["new_trials"], &tuned["best"]["imported"]), (&json!(0), &json!(true)), "{tuned}");
    // A race here makes it this machine's.
    let raced = run_json(&[&["tune", "--db", text(&fresh), "--command", "echo m {x}"], &more("x=1,2")[..]].concat());
    assert_eq!((&raced["best"]["imported"], &raced["best"]["confirmed"]), (&json!(false), &json!(true)), "{raced}");
}

/// The documentation promises the contents whatever the reference is.
#[test]
fn a_kernel_adds_to_what_its_buffer_is_filled_with() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let loops = "for (int i = 0; i < 8; i += T) for (int u = i; u < i + T; u++) for (int k = 0; k < 8; k++) \
                 for (int j = 0; j < 8; j++) c[8 * u + j] += a[8 * u + k] * b[8 * k + j];";
    fs::write(path("k.c"), format!("void f(const float *a, const float *b, float *c) {{ {loops} }}\n")).unwrap();
    let buffer = |name: &str, more: &str| format!("{{ name = '{name}', type = 'float', size = 64, {more} }}");
    let arguments =
        [buffer("a", "fill = 'index'"), buffer("b", "role = 'in'"), buffer("c", "role = 'inout', fill = 0")];
    let references = ["workload = 'matmul:m=8,n=8,k=8'", "function = 'f'", "configuration = { T = 2 }"];
    for (at, reference) in references.iter().enumerate() {
        let head = "name = 'k'\nsource = 'k.c'\nfunction = 'f'\nparameters = [{ name = 'T', values = [1, 2] }]\n";
        let form = format!("{head}arguments = [{}]\nreference = {{ {reference} }}\n", arguments.join(", "));
        fs::write(path("k.toml"), form).unwrap();
        let db = path(&format!("{at}.db"));
        let tuned = run_json(&["tune", "--kernel", text(&path("k.toml")), "--db", text(&db), "--trials", "2"]);
        assert_eq!((&tuned["errors"], &tuned["verified"]), (&json!({}), &json!(true)), "{reference}: {tuned}");
    }
}

#[test]
fn what_a_parameter_cannot_be_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("r.db");
    let with = |more: &[&str]| owned(&[&["tune", "--db", text(&db), "--no-race"], more].concat());
    for range in ["x=0.1..0.5", "x=1..", "x=1..8..2", "x=1..4,8"] {
        check_refused(&with(&["--command", "echo {x}", "-p", range]), "no range of whole numbers");
    }
    check_refused(&with(&["--command", "echo {x}", "-p", "x=8..1"]), "write the lesser first");
    check_refused(&with(&["--command", "echo {x}", "-p", "x="]), "a value is missing");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=[]"]), "x");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=1,2", "-p", "x=3"]), "x");
    check_refused(&with(&["--command", "echo {x}", "-p", "x=1,1"]), "x");
    let (_, said) = told(&tune(&db, "true", &["-p", "unused=1,2", "--trials", "2"]));
    assert!(said.contains("no text uses the parameter unused"), "{said}");
    let more = ["-p", "x=1,2", "--shell", "--metric", "m (.*)", "--trials", "2"];
    let (tuned, said) = told(&tune(&db, "echo m $TILEWRIGHT_x", &more));
    assert_eq!(tuned["best"]["value"], json!(1.0), "{said}");
    assert!(!said.contains("no text uses"), "{said}");
    let (tuned, said) = told(&tune(&db, "x=3; echo m $x", &more));
    assert_eq!(tuned["best"]["value"], json!(3.0));
    assert!(said.contains("no text uses the parameter x") && said.contains("$TILEWRIGHT_x"), "{said}");
}

#[test]
fn a_metric_may_stand_before_much_output() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    for n_mib in ["2", "40"] {
        let command = format!("echo m {{x}}; head -c {n_mib}M /dev/zero | tr '\\0' 'a' | fold -w 100; echo");
        let more =
            ["--shell", "-p", "x=3,4", "--metric", "^m (.*)$", "--trials", "2", "--check", "tail -n 1 > {dir}/end"];
        let tuned = run_json(&tune(&db, &command, &more));
        assert_eq!((&tuned["best"]["value"], &tuned["errors"]), (&json!(3.0), &json!({})), "{tuned}");
    }
}

#[test]
fn what_detaches_itself_ends_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    // In a session of its own, by itself and by a child that ends; and one that is killed at its timeout.
    let command = "setsid sleep 98761.5 & (setsid sh -c 'sleep 98761.5 & sleep 98761.5' &) ; sleep 0.2; \
                   [ {x} = 1 ] && echo m 5 || exec sleep 98761.5";
    let more = ["--shell", "-p", "x=1,2", "--metric", "m (.*)", "--trials", "2", "--timeout", "1"];
    let tuned = run_json(&tune(&db, command, &more));
    assert_eq!((&tuned["best"]["value"], &tuned["errors"]["run_timeout"]), (&json!(5.0), &json!(1)), "{tuned}");
    let processes = Command::new("ps").args(["-eo", "args"]).output().unwrap().stdout;
    let processes = String::from_utf8_lossy(&processes).into_owned();
    assert!(!processes.lines().any(|line| line.starts_with("sleep 98761.5")), "{processes}");
}

/// Command with conflicting time and size: the size doubles when the time halves, and odd `y` waste both.
const TRADE: &str = "awk 'BEGIN {{ t = 64 / 2 ^ {x} + {y}; print \"ms \" t; print \"kb \" 2 ^ {x} + {y} }}'";
const BOTH: [&str; 8] = ["-p", "x=0..6", "-p", "y=0..4", "--metric", "ms=ms (.*)", "--metric", "kb=kb (.*)"];

/// Values of a Pareto set by two metrics.
fn pairs(best: &Json, names: [&str; 2]) -> Vec<[f64; 2]> {
    let set = best["pareto"].as_array().unwrap_or_else(|| panic!("{best}"));
    set.iter().map(|point| names.map(|name| point["values"][name].as_f64().unwrap())).collect()
}

#[test]
fn several_metrics_make_a_pareto_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (db, copy, lines, page) = (path("records.db"), path("copy.db"), path("lines"), path("report.html"));
    let all = [&BOTH[..], &["--trials", "35"]].concat();
    let expected: Vec<[f64; 2]> = (0..7).rev().map(|x| [64.0 / f64::from(1 << x), f64::from(1 << x)]).collect();
    // A run that ends early is resumed, and nothing is measured twice.
    let part = run_json(&tune(&db, TRADE, &[&BOTH[..], &["--trials", "10"]].concat()));
    let tuned = run_json(&tune(&db, TRADE, &all));
    assert_eq!((&part["new_trials"], &tuned["new_trials"]), (&json!(10), &json!(25)), "{tuned}");
    assert_eq!(pairs(&tuned["best"], ["ms", "kb"]), expected);
    assert_eq!((&tuned["best"]["value"], &tuned["best"]["confirmed"]), (&json!(1.0), &json!(false)), "{tuned}");
    let name = tuned["workload"].as_str().unwrap();
    let best = run_json(&["best", name, "--db", text(&db)]);
    assert_eq!(best["best"], tuned["best"]);
    let said = String::from_utf8(command(&["best", name, "--db", text(&db)]).output().unwrap().stdout).unwrap();
    assert!(said.contains("pareto   7 configurations: ") && said.contains("\nobjective kb minimize kb (.*)"), "{said}");
    // Files keep all metrics: records, and results for a replay.
    fs::write(&lines, command(&["export", "--db", text(&db)]).output().unwrap().stdout).unwrap();
    let results = String::from_utf8(command(&["export", "--as", "t4", "--db", text(&db)]).output().unwrap().stdout);
    assert!(results.unwrap().contains(r#""objectives":["time","cost_2"]"#));
    assert!(command(&["import", "--db", text(&copy), text(&lines)]).output().unwrap().status.success());
    assert_eq!(pairs(&run_json(&["best", name, "--db", text(&copy)])["best"], ["ms", "kb"]), expected);
    assert!(command(&["report", "--db", text(&db), "-o", text(&page)]).output().unwrap().status.success());
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<h3>The Pareto set</h3>") && page.contains("kb against ms"));
}

#[test]
fn metrics_may_be_made_great_and_each_search_finds_some_of_the_set() {
    let folder = tempfile::tempdir().unwrap();
    let app = "sh -c 'echo rate $1 && echo bytes $(( $1 * $1 ))' sh {x}";
    let metrics = ["--metric", "rate=rate (.*)", "--metric", "bytes=bytes (.*)", "--maximize=rate"];
    let more = [&["-p", "x=1..9", "--trials", "9"], &metrics[..]].concat();
    let db = folder.path().join("records.db");
    let tuned = run_json(&tune(&db, app, &more));
    let expected: Vec<[f64; 2]> = (1..10).rev().map(f64::from).map(|x| [x, x * x]).collect();
    assert_eq!(pairs(&tuned["best"], ["rate", "bytes"]), expected, "more of the one is more of the other");
    for search in ["random", "genetic:population=4"] {
        let db = folder.path().join(search.replace(':', "-"));
        let tuned = run_json(&tune(&db, TRADE, &[&BOTH[..], &["--trials", "12", "--search", search]].concat()));
        assert!(!pairs(&tuned["best"], ["ms", "kb"]).is_empty(), "{search}: {tuned}");
    }
}

#[test]
fn metrics_that_do_not_go_together_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("r.db");
    let with = |more: &[&str]| {
        let command = ["tune", "--db", text(&db), "--command", "echo a {x} b nan", "-p", "x=1,2", "--trials", "2"];
        owned(&[&command, more].concat())
    };
    let two = ["--metric", "a=a ([0-9]+)", "--metric", "b=b (.*)"];
    check_refused(&with(&["--metric", "a (.*)", "--metric", "b=b (.*)"]), "of several metrics each is NAME=METRIC");
    check_refused(&with(&["--metric", "a=a (.*)", "--metric", "a=b (.*)"]), "the metric a is given twice");
    check_refused(&with(&["--metric", "a=(", "--metric", "b=b"]), "--metric");
    check_refused(&with(&["--metric", "a=a (.*)", "--metric", "b="]), "an empty expression finds no number (give wall");
    check_refused(&with(&["--metric", ""]), "an empty expression finds no number");
    check_refused(&with(&[&two[..], &["--maximize"]].concat()), "--maximize= names none of the metrics");
    check_refused(&with(&[&two[..], &["--maximize=c"]].concat()), "give --maximize=a or --maximize=b");
    check_refused(&with(&["--metric", "a (.*)", "--maximize=a"]), "there is one metric");
    check_refused(&with(&[&two[..], &["--stop-below", "1%"]].concat()), "of one metric alone");
    let five: Vec<String> = (0..5).map(|n| format!("m{n}=a (.*)")).collect();
    let five: Vec<&str> = five.iter().flat_map(|metric| ["--metric", metric]).collect();
    check_refused(&with(&five), "5 metrics at once (give 2 to 4");
    // An output without a number costs one trial, and the error names the metric.
    let check = |second: &str, expected: &str| {
        let arguments = with(&["--metric", "a=a ([0-9]+)", "--metric", second]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = command(&arguments).output().unwrap();
        let said = common::stderr(&output);
        assert!(output.status.code() == Some(1) && said.contains(expected), "{said}");
    };
    check("b=b (.*)", "b: the metric is \"nan\", which is no finite number");
    check("b=a \\d+", "b: the metric is \"a 1\", which is no number (put the part of the expression");
    check("c=c (.*)", "c: no metric: nothing that it wrote fits `c (.*)`");
}

/// How long a race may take goes by the time of a run, not by a metric that is none.
#[test]
fn a_metric_as_large_as_a_year_of_nanoseconds_is_raced() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("r.db");
    for (app, extra) in [("echo {x}e17", &[][..]), ("echo {x}e-9", &["--maximize"])] {
        let more = ["-p", "x=1..5", "--metric", "(.*)", "--trials", "5"];
        let tune = [&["tune", "--db", text(&db), "--command", app], &more[..], extra].concat();
        let said = common::run(&tune);
        let (said, progress) = (String::from_utf8_lossy(&said.stdout).into_owned(), common::stderr(&said));
        let value = if extra.is_empty() { "1.000e17" } else { "5.000e-9" };
        assert!(
            said.contains(&format!("winner   {value}\n")) && progress.contains("against each other"),
            "{said}{progress}"
        );
    }
}

/// Errors of 0 are the best that there is, and a rate of 0 is the worst.
#[test]
fn a_metric_may_be_0() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("r.db");
    let app = "sh -c 'echo errors $(( $1 * $1 )) && echo rate $1' sh {x}";
    let least = ["-p", "x=0..5", "--metric", "errors (.*)", "--trials", "6"];
    let tuned = run_json(&tune(&db, app, &least));
    assert_eq!((&tuned["best"]["config"], &tuned["best"]["value"]), (&json!({"x": 0}), &json!(0.0)), "{tuned}");
    let most = ["-p", "x=0..5", "--metric", "rate (.*)", "--maximize", "--trials", "6"];
    let tuned = run_json(&tune(&db, app, &most));
    assert_eq!((&tuned["best"]["value"], &tuned["errors"]), (&json!(5.0), &json!({})), "{tuned}");
    let both = ["--metric", "errors=errors (.*)", "--metric", "rate=rate (.*)", "--maximize=rate"];
    let tuned = run_json(&tune(&db, app, &[&["-p", "x=0..5", "--trials", "6"], &both[..]].concat()));
    let expected: Vec<[f64; 2]> = (0..6).map(f64::from).map(|x| [x * x, x]).collect();
    assert_eq!(pairs(&tuned["best"], ["errors", "rate"]), expected);
    let raced =
        ["tune", "--db", text(&db), "--command", app, "-p", "x=0..5", "--metric", "errors (.*)", "--trials", "6"];
    let said = common::run(&raced);
    let said = String::from_utf8_lossy(&said.stdout);
    assert!(said.contains("more than 1,000,000 % ahead of the runner-up"), "{said}");
}

/// List of numbers that becomes one of texts when a text is added; trials of the numbers stay.
#[test]
fn records_stay_valid_when_a_text_joins_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("r.db");
    let first = ["-p", "x=1..9", "-p", "y=1..9", "--metric", "m ([0-9]*)", "--trials", "40"];
    run_json(&tune(&db, "echo m 5{x}{y}", &first));
    let more = ["-p", "x=1,2,3,4,5,6,7,8,9,0auto", "-p", "y=1..9", "--metric", "m ([0-9]*)", "--trials", "45"];
    let tuned = run_json(&tune(&db, "echo m 5{x}{y}", &more));
    assert_eq!((&tuned["trials"], &tuned["new_trials"]), (&json!(45), &json!(5)), "{tuned}");
    let page = folder.path().join("page.html");
    let report = ["report", "--db", text(&db), "-o", text(&page)];
    let report = run_json(&report);
    let importance = &report["workloads"][0]["templates"][0]["importance"];
    assert_eq!(importance.as_array().map(Vec::len), Some(2), "{report}");
}
