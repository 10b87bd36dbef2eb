//! Golden files of OpenCL C: each file of `opencl/` begins with a comment that contains a workload with the
//! steps of a schedule, or a program, followed by the code. `BLESS=1` rewrites the code.

use std::fs;
use std::path::{Path, PathBuf};

use tilewright_codegen::opencl_c;
use tilewright_ir::gpu::lower_gpu;
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Program, Target, text, verify};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/opencl")
}

/// Scheduled program of a case.
fn scheduled(head: &str) -> Program {
    if head.trim_start().starts_with("program") {
        return text::parse(head).unwrap();
    }
    let (workload, steps) = head.trim().split_once('\n').unwrap_or((head.trim(), ""));
    let steps = parse_steps(steps).unwrap();
    let program = Workload::parse(workload).unwrap().program();
    apply_all(&program, &steps).unwrap_or_else(|(at, why)| panic!("step `{}`: {why}", steps[at]))
}

#[test]
fn code_is_what_it_was() {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    let mut failures = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let case = fs::read_to_string(&path).unwrap();
        let (head, expected) = case.strip_prefix("/*\n").and_then(|case| case.split_once("*/\n")).unwrap();
        let program = scheduled(head);
        verify::verify(&program).unwrap_or_else(|why| panic!("{name}: {why}"));
        let kernels = lower_gpu(&program).unwrap_or_else(|why| panic!("{name}: {why}"));
        let printed = opencl_c(&kernels, &Target::named("opencl").unwrap());
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, format!("/*\n{head}*/\n{printed}")).unwrap();
        } else if printed != expected {
            failures.push(format!("{name} is now\n{printed}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
