//! Programs compiled in sequence share code and compute the same results as separately compiled ones.
#![cfg(feature = "llvm")]

mod common;

use common::gemm::{ALayout, Gemm};
use common::{arguments, host, run};
use tilewright_codegen::{CompiledKernel, Compiler, Runtime, compile};
use tilewright_ir::Program;

/// Products with common loops: the same size with different blocks, layouts and tiles.
fn programs() -> Vec<Program> {
    let mut all = Vec::new();
    for a in [ALayout::Panels, ALayout::Rows, ALayout::Plain] {
        for (mc, kc) in [(192, 128), (384, 128), (192, 256)] {
            for nv in [1, 2, 3] {
                for prepacked in [false, true] {
                    all.push(Gemm { m: 384, k: 256, a, mc, kc, nc: 96, nv, prepacked, ..Gemm::default() }.program());
                }
            }
        }
    }
    all
}

fn results(p: &Program, kernel: &CompiledKernel) -> Vec<Vec<f64>> {
    run(p, kernel, &arguments(p), &Runtime::serial(), 1)
}

#[test]
fn shared_code_computes_the_same() {
    let mut compiler = Compiler::new(host());
    let mut n_bytes = [0; 2];
    for p in programs() {
        let mut shared = compiler.compile(&p).unwrap();
        let mut alone = compile(&p, &host()).unwrap();
        assert_eq!(results(&p, &shared), results(&p, &alone), "{p}");
        for (n, kernel) in n_bytes.iter_mut().zip([&mut shared, &mut alone]) {
            *n += kernel.take_object().map_or(0, |object| object.len());
        }
        // All code is available now.
        assert!(compiler.compile(&p).unwrap().take_object().is_none());
    }
    assert!(n_bytes[0] < n_bytes[1], "bytes of code shared and alone: {n_bytes:?}");
}

#[test]
fn kernels_outlive_the_compiler_and_each_other() {
    let p = Gemm::default().program();
    let expected = results(&p, &compile(&p, &host()).unwrap());
    let mut compiler = Compiler::new(host());
    let first = compiler.compile(&p).unwrap();
    let second = compiler.compile(&p).unwrap();
    drop(compiler);
    drop(first);
    assert_eq!(results(&p, &second), expected);
}

#[test]
fn code_comes_from_the_objects_of_others() {
    let [mut theirs, mut ours] = [0; 2].map(|_| Compiler::new(host()));
    for p in programs() {
        let mut kernel = theirs.compile(&p).unwrap();
        if let Some(object) = kernel.take_object() {
            ours.add(&object).unwrap();
        }
        let mut copy = ours.compile(&p).unwrap();
        assert!(copy.take_object().is_none(), "{}", p.name);
        assert_eq!(results(&p, &copy), results(&p, &kernel), "{}", p.name);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn code_for_another_target_is_not_taken() {
    let [mut theirs, mut ours, mut alone] =
        ["x86-64", "x86-64-v3", "x86-64-v3"].map(|name| Compiler::new(tilewright_ir::Target::named(name).unwrap()));
    let p = Gemm::default().program();
    ours.add(&theirs.compile(&p).unwrap().take_object().unwrap()).unwrap();
    let [ours, alone] = [&mut ours, &mut alone].map(|compiler| compiler.compile(&p).unwrap().take_object());
    assert!(alone.is_some() && ours == alone);
}

#[test]
fn what_cannot_be_added_is_an_error() {
    let mut theirs = Compiler::new(host());
    let objects: Vec<Vec<u8>> = programs().iter().filter_map(|p| theirs.compile(p).unwrap().take_object()).collect();
    let mut ours = Compiler::new(host());
    assert!(ours.add(b"no object").is_err());
    assert!(ours.add(&objects[0][..100]).is_err());
    // From the last to the first, so that some refer to code of others not added yet.
    let n_refused = objects.iter().rev().filter(|object| ours.add(object).is_err()).count();
    assert!((1..objects.len()).contains(&n_refused), "{n_refused} of {}", objects.len());
    for p in programs() {
        assert_eq!(results(&p, &ours.compile(&p).unwrap()), results(&p, &compile(&p, &host()).unwrap()), "{}", p.name);
    }
}
