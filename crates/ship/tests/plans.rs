//! A plan of several kernels as a C library: slices, constants, copies, threads.
#![cfg(target_os = "linux")]

#[path = "../../runtime/tests/common/mod.rs"]
mod common;

use std::fs;
use std::process::Command;

use common::*;
use tilewright_ship::{Library, ShipError, Weights};

const MAIN: &str = r#"
#include <stdio.h>
#include "two_Halves.h"
int main(void) {
    float x[33], y[66];
    const void *inputs[] = {x};
    void *outputs[] = {y};
    two_Halves_context *context;
    for (int i = 0; i < 33; i++) x[i] = 1.5f * (float)i - 7;
    two_Halves_context *second;
    if (two_Halves_create(NULL, &second) || two_Halves_create(NULL, &context)) return 1;
    two_Halves_destroy(second);
    for (int i = 0; i < 50; i++)
        if (two_Halves_run(context, inputs, outputs)) return 2;
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
    // Weights are kept twice: they are in the library once, or ready.
    for (n_threads, weights, sizes) in
        [(1, Weights::Small, [384, 640]), (3, Weights::Small, [384, 640]), (3, Weights::Ready, [640, 0])]
    {
        let origin = ["a test */ of plans".to_owned()];
        let library = || Library::new("two_Halves", &model, &target(), n_threads, weights, &origin).unwrap();
        assert_eq!(["constant_bytes", "made_bytes"].map(|key| library().build()[key].clone()), sizes);
        let files = library().c_files();
        assert_eq!(files, library().c_files());
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|file| fs::write(folder.path().join(&file.path), &file.bytes).unwrap());
        fs::write(folder.path().join("main.c"), MAIN).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "main.c", "two_Halves.c", "two_Halves_kernels.a"]);
        cc.args(["-lm", "-lpthread", "-o", "main"]).current_dir(folder.path());
        let Ok(output) = cc.output() else {
            println!("skipped: no `cc`");
            return;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let output = Command::new(folder.path().join("main")).output().unwrap();
        assert!(output.status.success(), "{}", output.status);
        let x: Vec<f32> = (0..33).map(|i| 1.5 * i as f32 - 7.0).collect();
        // All numbers are short, so that they are written in full.
        let expected: String = expected(&x, false).iter().map(|y| format!("{y} ")).collect();
        let got: String = String::from_utf8(output.stdout).unwrap().lines().map(|y| format!("{} ", hex(y))).collect();
        assert_eq!(got, expected, "{n_threads}");
    }
}

/// A number as C writes it in hexadecimal digits.
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
    if tilewright_codegen::llvm_version().is_some() {
        let error = refused("a", true).unwrap().to_string();
        assert_eq!(error, "step `last` has no kernel, so that it runs in this process only");
    }
}
