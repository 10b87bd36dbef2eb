//! Plan of several kernels as a C library: slices, constants, copies, threads; on GPUs.
#![cfg(target_os = "linux")]

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use common::*;
use tilewright_ir::{DType, Target};
use tilewright_runtime::{Constant, Model, Place, Plan, PlanStep, Work};
use tilewright_ship::{File, Library, ShipError, Weights};

const MAIN: &str = r#"
#include <stdio.h>
#include "two_Halves.h"
int main(void) {
    float x[33], y[66];
    const void *inputs[] = {x};
    void *outputs[] = {y};
    two_Halves_context *context;
    two_Halves_context *second;
    int code = two_Halves_create(NULL, &second);
    if (code == TWO_HALVES_NO_DEVICE) return 77;
    if (code) puts(two_Halves_message(code));
    if (code || two_Halves_create(NULL, &context)) return 1;
    two_Halves_destroy(second);
    for (int run = 0; run < 50; run++) {
        for (int i = 0; i < 33; i++) x[i] = 1.5f * (float)i - 7 + (float)(49 - run);
        if (two_Halves_run(context, inputs, outputs)) return 2;
    }
    two_Halves_destroy(context);
    for (int i = 0; i < 66; i++) printf("%a\n", (double)y[i]);
    return 0;
}
"#;

#[test]
fn plans_compute_the_same_in_c() {
    if tilewright_codegen::llvm_version().is_none() {
        println!("skipped: no LLVM");
        return;
    }
    let model = model(false);
    // Kernels keep two copies of the weights: the library contains them once, or both copies ready.
    for (n_threads, weights, sizes) in
        [(1, Weights::Small, [384, 640]), (3, Weights::Small, [384, 640]), (3, Weights::Ready, [640, 0])]
    {
        let origin = ["a test */ of plans".to_owned()];
        let library = || Library::new("two_Halves", &model, &target(), n_threads, weights, &origin).unwrap();
        assert_eq!(["constant_bytes", "made_bytes"].map(|key| library().build()[key].clone()), sizes);
        let files = library().c_files();
        assert_eq!(files, library().c_files());
        let Some(program) = built(&files, &["-lm", "-lpthread"]) else { return };
        check(&mut Command::new(program.path().join("main")), &format!("{n_threads} threads"));
    }
}

/// Program of a library and [`MAIN`], in a folder; `None` without a compiler.
fn built(files: &[File], libraries: &[&str]) -> Option<tempfile::TempDir> {
    built_with(files, MAIN, libraries)
}

/// Program of a library and a text, in a folder; `None` without a compiler.
fn built_with(files: &[File], main: &str, flags: &[&str]) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    files.iter().for_each(|file| fs::write(folder.path().join(&file.path), &file.bytes).unwrap());
    fs::write(folder.path().join("main.c"), main).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "main.c", "two_Halves.c", "two_Halves_kernels.a"]);
    let Ok(output) = cc.args(flags).args(["-o", "main"]).current_dir(folder.path()).output() else {
        println!("skipped: no `cc`");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(folder)
}

/// Runs a program, which must give the correct result; without a device it reports that.
fn check(program: &mut Command, what: &str) {
    let output = program.output().unwrap();
    if output.status.code() == Some(77) {
        return println!("skipped: no device, {what}");
    }
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{what}: {}: {said}", output.status);
    let x: Vec<f32> = (0..33).map(|i| 1.5 * i as f32 - 7.0).collect();
    // All numbers are short, so that they are written in full.
    let expected: String = expected(&x, false).iter().map(|y| format!("{y} ")).collect();
    let got: String = said.lines().map(|y| format!("{} ", hex(y))).collect();
    assert_eq!(got, expected, "{what}");
}

/// Converts an f16 to the bits of the f32 of the same value, by the definition of its fields; infinities and
/// NaN are kept.
fn single(half: u16) -> u32 {
    let (exponent, fraction) = (i32::from(half >> 10 & 0x1f), u32::from(half & 0x3ff));
    let magnitude = match exponent {
        0 => (f64::from(fraction) * 2f64.powi(-24)) as f32,
        31 => f32::from_bits(0x7f80_0000 | fraction << 13),
        _ => ((1.0 + f64::from(fraction) / 1024.0) * 2f64.powi(exponent - 15)) as f32,
    };
    magnitude.to_bits() | u32::from(half >> 15) << 31
}

/// Weights of 16 bits and bytes with scales have the expected size in the file, and are widened exactly by
/// any compiler's code.
#[test]
fn weights_of_few_bits_are_stored_so() {
    if tilewright_codegen::llvm_version().is_none() {
        println!("skipped: no LLVM");
        return;
    }
    const MAIN: &str = r#"
#include <stdio.h>
#include <string.h>
#include "two_Halves.h"
static unsigned wanted[5][65536], found[5][65536];
int main(void) {
    void *outputs[] = {found[0], found[1], found[2], found[3], found[4]};
    two_Halves_context *context;
    FILE *file = fopen("wanted", "rb");
    if (!file || fread(wanted, 1, sizeof wanted, file) != sizeof wanted) return 3;
    if (two_Halves_create(NULL, &context) || two_Halves_run(context, NULL, outputs)) return 1;
    two_Halves_destroy(context);
    return memcmp(wanted, found, sizeof found) != 0;
}
"#;
    let all_f16: Vec<u32> = (0..=u16::MAX).map(single).collect();
    let all_bf16: Vec<u32> = (0..=u16::MAX).map(|half| u32::from(half) << 16).collect();
    let mut others = all_f16.clone();
    others[7] = 1.1f32.to_bits();
    // Bytes with a scale of each row, and u8 minus a zero point with a scale of each column.
    let scaled = |scale: &dyn Fn(usize) -> usize, zero: f32| {
        let x = |at: usize| (((at * 37 + at / 256 * 11) % 256) as f32 - zero) * (0.01 + scale(at) as f32 / 1000.0);
        (0..65536).map(|at| x(at).to_bits()).collect::<Vec<u32>>()
    };
    let (rows, columns) = (scaled(&|at| at / 256, 128.0), scaled(&|at| at % 256, 3.0));
    let data = [all_f16, all_bf16, others, rows, columns];
    let data = data.map(|bits| bits.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let mut plan = Plan::default();
    for (at, data) in data.iter().enumerate() {
        plan.constants.push(Constant::Data(data.clone().into()));
        let [from, to] = [("w", Place::Constant(at)), ("y", Place::Output(at))]
            .map(|(name, place)| plan.tensor(format!("{name}{at}"), DType::F32, &[256, 256], place));
        let work = Work::Copy { from: plan.whole(from), to: plan.whole(to), rows: None };
        plan.steps.push(PlanStep { name: "copy".to_owned(), work, guard: None });
    }
    let model = Model::new(plan, Vec::new()).unwrap();
    let small = [10 * 65536 + 2 * 8 * 256, 16 * 65536];
    for (weights, sizes) in [(Weights::Small, small), (Weights::Ready, [20 * 65536, 0])] {
        let library = Library::new("two_Halves", &model, &target(), 1, weights, &[]).unwrap();
        assert_eq!(["constant_bytes", "made_bytes"].map(|key| library.build()[key].clone()), sizes);
        for level in ["-O0", "-O3"] {
            let Some(program) = built_with(&library.c_files(), MAIN, &[level, "-lm", "-lpthread"]) else { return };
            fs::write(program.path().join("wanted"), data.concat()).unwrap();
            let status = Command::new("./main").current_dir(program.path()).status().unwrap();
            assert!(status.success(), "{weights:?} {level}: {status}");
        }
    }
}

#[test]
fn plans_compute_the_same_on_gpus() {
    let origin = ["a test of plans".to_owned()];
    for name in ["opencl", "sm_80", "sm_90a"] {
        let is_cuda = name != "opencl";
        if is_cuda && tilewright_codegen::llvm_version().is_none() {
            println!("skipped: no LLVM");
            continue;
        }
        let model = gpu_model(false, &Target::named(name).unwrap());
        // Kernels without machine code are assembled by the driver, and so are those whose machine code it
        // refuses.
        let assemble = |_: &[u8]| Ok((name == "sm_90a").then(|| b".entry f(\0".to_vec()));
        let library = Library::for_gpu("two_Halves", &model, &assemble, &origin).unwrap();
        assert_eq!(library.build()["made_bytes"], 2 * 66 * 4);
        let files = library.c_files();
        assert_eq!(files, Library::for_gpu("two_Halves", &model, &assemble, &origin).unwrap().c_files());
        let Some(program) = built(&files, &["-ldl"]) else { return };
        let main = program.path().join("main");
        check(Command::new(&main).env("LD_LIBRARY_PATH", with_emulator(program.path())), name);
        // Without a loader, a driver or a device this is reported, and nothing else happens.
        let mut without = Command::new(&main);
        without.env("OCL_ICD_VENDORS", "/nonexistent").env_remove("OCL_ICD_FILENAMES").env_remove("LD_LIBRARY_PATH");
        assert!(is_cuda || without.status().unwrap().code() == Some(77));
    }
}

/// Library path that begins with a folder into which the emulator of NVIDIA's driver is copied.
fn with_emulator(folder: &Path) -> OsString {
    let examples = std::env::current_exe().unwrap().ancestors().nth(2).unwrap().join("examples");
    let library = examples.join("libemulated_cuda.so");
    if library.is_file() {
        std::os::unix::fs::symlink(library, folder.join("libcuda.so.1")).unwrap();
    } else {
        println!("skipped: no emulator of NVIDIA's driver (cargo build --examples)");
    }
    let mut path = folder.as_os_str().to_owned();
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(more);
    }
    path
}

/// Parses a number that C wrote in hexadecimal digits.
fn hex(text: &str) -> f64 {
    let (sign, digits) = text.strip_prefix('-').map_or((1.0, text), |rest| (-1.0, rest));
    let (mantissa, exponent) = digits.strip_prefix("0x").unwrap().split_once('p').unwrap();
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let bits = u64::from_str_radix(&format!("{whole}{fraction}"), 16).unwrap();
    sign * bits as f64 * 2f64.powi(exponent.parse::<i32>().unwrap() - 4 * fraction.len() as i32)
}

#[test]
fn what_cannot_be_shipped_is_named() {
    let refused =
        |name: &str, on_host: bool| Library::new(name, &model(on_host), &target(), 1, Weights::Small, &[]).err();
    assert!(matches!(refused("9", false), Some(ShipError::Name(name)) if name == "9"));
    let on_gpu = |target: &str, on_host: bool| {
        let model = gpu_model(on_host, &Target::named(target).unwrap());
        Library::for_gpu("a", &model, &|_| Ok(None), &[]).err().unwrap().to_string()
    };
    assert_eq!(on_gpu("opencl", true), "step `last` has no kernel, so that it runs in this process only");
    assert_eq!(
        on_gpu("gfx90a", false),
        "libraries are for CPUs, for OpenCL and for NVIDIA's GPUs, not for amdgpu/gfx90a"
    );
    if tilewright_codegen::llvm_version().is_some() {
        let error = refused("a", true).unwrap().to_string();
        assert_eq!(error, "step `last` has no kernel, so that it runs in this process only");
    }
}
