//! Network as a library for another machine, run in an emulator.
#![cfg(feature = "llvm")]

#[path = "../../graph/tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{cases, light, no_files};
use tilewright::library::{Form, Weights, library, write_library};
use tilewright_graph::{Bindings, onnx, specialise};
use tilewright_ir::Target;
use tilewright_model::{Runner, compile_guessed, lower};
use tilewright_runtime::SharedPool;

/// Program that runs the library on the input in one file, and writes the output to another.
const MAIN: &str = r#"#include <stdio.h>
#include <stdlib.h>
#include "net.h"
int main(int argc, char **argv) {
    const void *inputs[1];
    void *outputs[1];
    net_context *context;
    if (argc != 3 || net_inputs() != 1 || net_outputs() != 1) return 2;
    size_t n_in = net_input(0)->bytes, n_out = net_output(0)->bytes;
    void *in = malloc(n_in), *out = malloc(n_out);
    FILE *from = fopen(argv[1], "rb"), *to = fopen(argv[2], "wb");
    if (!in || !out || !from || !to || fread(in, 1, n_in, from) != n_in) return 3;
    inputs[0] = in;
    outputs[0] = out;
    if (net_create(NULL, &context) != NET_OK || net_run(context, inputs, outputs) != NET_OK) return 4;
    net_destroy(context);
    return fwrite(out, 1, n_out, to) == n_out && !fclose(to) ? 0 : 5;
}
"#;

const COMPILER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

fn done(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_network_gives_the_same_answer_on_another_machine() {
    for tool in [COMPILER, EMULATOR] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: no `{tool}` (Debian: gcc-aarch64-linux-gnu, qemu-user)");
            return;
        }
    }
    let case = cases("light.cases.gz").into_iter().find(|case| case.name == "squeezenet").expect("it is there");
    let model = onnx::read(&case.model, &mut no_files).expect("a model");
    let special = specialise(&model.graph, &Bindings { fold_bytes: 1 << 8, ..Bindings::default() });
    let graph = light::with_weights(&special.graph);
    let target = Target::named("cortex-a72").unwrap();
    let compiled = compile_guessed(lower(&graph, false, &target, 1).unwrap(), &target, 2).unwrap();
    let (input, x) = light::input_of(&graph);
    let mut runner = Runner::new(&compiled, &SharedPool::new(2).unwrap()).unwrap();
    runner.set(&input, &x).unwrap();
    runner.run().unwrap();
    let here = runner.outputs()[0].1.floats();
    light::check("squeezenet", &here, &light::answers()["squeezenet"], 1e-4);

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("arm-{}", std::process::id()));
    let origin = ["squeezenet".to_owned()];
    let library = library("net", &compiled.model, &target, 2, Weights::Small, &origin).unwrap();
    let bytes: Vec<u8> = x.floats().iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
    for form in [Form::C, Form::Shared] {
        fs::create_dir_all(&folder).unwrap();
        write_library(&library, form, &folder).unwrap();
        fs::write(folder.join("main.c"), MAIN).unwrap();
        fs::write(folder.join("in"), &bytes).unwrap();
        let mut link = Command::new(COMPILER);
        link.current_dir(&folder).args(["-O2", "-o", "program", "main.c"]);
        match form {
            Form::C => link.args(["net.c", "net_kernels.a", "-static", "-pthread", "-lm"]),
            _ => link.args(["-L.", "-lnet", "-Wl,-rpath,$ORIGIN"]),
        };
        done(&mut link);
        let mut run = Command::new(EMULATOR);
        done(run.current_dir(&folder).args(["-L", "/usr/aarch64-linux-gnu", "program", "in", "out"]));
        let there = fs::read(folder.join("out")).unwrap();
        let there: Vec<f64> = there.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect();
        assert_eq!(there.len(), here.len());
        let largest = here.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let apart = here.iter().zip(&there).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
        println!("{form:?}: answers are up to {apart:e} apart, the largest is {largest:e}");
        assert!(apart <= 1e-4 * largest, "{apart} apart, and the largest is {largest}");
        light::check("squeezenet", &there, &light::answers()["squeezenet"], 1e-4);
        fs::remove_dir_all(&folder).unwrap();
    }
}
