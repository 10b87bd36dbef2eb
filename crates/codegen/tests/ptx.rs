//! Code for NVIDIA GPUs: LLVM's PTX is run in an emulator, assembled, and analyzed.
#![cfg(feature = "llvm")]

mod common;
mod emulator;
mod gpu;
mod nvidia;

use std::path::{Path, PathBuf};

use common::*;
use emulator::Order;
use gpu::Product;
use nvidia::{assemble, innermost_loop, tool};
use tilewright_codegen::{CompileError, Emit, compile_gpu, emit_gpu};
use tilewright_ir::target::{Arch, GENERIC, GpuApi};
use tilewright_ir::{GpuProgram, Target};

/// Names of all NVIDIA GPUs.
fn gpus() -> impl Iterator<Item = &'static str> {
    GENERIC.iter().filter(|generic| generic.arch == Arch::Gpu(GpuApi::Cuda)).map(|generic| generic.name)
}

fn ptx(program: &GpuProgram, target: &Target) -> String {
    String::from_utf8(compile_gpu(program, target).unwrap().code).unwrap()
}

fn product(p: &Product, arguments: &[Vec<f64>]) -> Vec<f64> {
    let (m, n, k) = (p.m as usize, p.n as usize, p.k as usize);
    let of = |i: usize, j: usize| (0..k).map(|x| arguments[0][i * k + x] * arguments[1][x * n + j]).sum();
    (0..m * n).map(|at| of(at / n, at % n)).collect()
}

const LARGE: Product = Product { m: 256, n: 128, k: 32, block: [128, 128, 16], thread: [8, 8], vector: 4 };

#[test]
fn products_are_right() {
    let small = Product { m: 64, n: 32, k: 24, block: [32, 32, 8], thread: [4, 4], vector: 4 };
    let scalar = Product { m: 37, n: 29, k: 19, block: [16, 16, 8], thread: [4, 2], vector: 1 };
    let pairs = Product { m: 32, n: 48, k: 8, block: [16, 16, 4], thread: [2, 4], vector: 2 };
    for (p, orders) in [
        (LARGE, vec![Order::Descending]),
        (small, vec![Order::Ascending, Order::Strided(7)]),
        (scalar, vec![Order::Ascending, Order::Descending]),
        (pairs, vec![Order::Strided(5)]),
    ] {
        for name in gpus() {
            let program = p.program();
            let text = ptx(&program, &Target::named(name).unwrap());
            let given = arguments(&program.program);
            for &order in &orders {
                let after = emulator::run(&program, &text, &given, order).unwrap_or_else(|why| panic!("{why}\n{text}"));
                let expected = product(&p, &given);
                for (at, (x, y)) in after[2].iter().zip(&expected).enumerate() {
                    assert!(
                        (x - y).abs() <= 1e-5 * p.k as f64,
                        "{p:?} on {name}, {order:?}: {at} is {x}, not {y}\n{text}"
                    );
                }
            }
        }
    }
}

#[test]
fn code_assembles_as_expected() {
    let Some(ptxas) = tool("ptxas") else { return };
    let folder = folder("ptx");
    for name in gpus() {
        let program = LARGE.program();
        let text = ptx(&program, &Target::named(name).unwrap());
        let made = assemble(&ptxas, text.as_bytes(), name, &folder.join(format!("{name}.cubin")));
        let made = made.unwrap_or_else(|why| panic!("{why}\n{text}"))["product"];
        println!("{name}: {made:?}");
        // The schedule determines unrolling, so the assembler must not unroll further.
        assert!(text.contains(".pragma \"nounroll\""), "{name}:\n{text}");
        assert_eq!(made.shared_bytes, program.body[0].shared_bytes(&program), "{name}");
        assert!(made.registers <= 128 && made.spilled_bytes == 0 && made.local_bytes == 0, "{name}: {made:?}");
    }
}

/// Checks that nine of ten instructions of the loop are useful ones.
#[test]
fn loops_multiply_and_add() {
    let (Some(ptxas), Some(nvdisasm)) = (tool("ptxas"), tool("nvdisasm")) else { return };
    let folder = folder("loops");
    // The disassembler does not support older GPUs.
    for name in ["sm_80", "sm_90a"] {
        let text = ptx(&LARGE.program(), &Target::named(name).unwrap());
        let cubin = folder.join(format!("{name}.cubin"));
        assemble(&ptxas, text.as_bytes(), name, &cubin).unwrap();
        let opcodes = innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{name}: {} of {} instructions are FFMA", n("FFMA"), opcodes.len());
        assert_eq!(n("FFMA"), 1024, "{name}: a tile of 8 x 8, 16 times");
        assert!(100 * n("FFMA") >= 90 * opcodes.len(), "{name}: {opcodes:?}");
        assert_eq!((n("LDG.E.128"), n("LDS.128")), (n("LDG"), n("LDS")), "{name}: loads of four at once");
        assert_eq!((n("LDG"), n("LDS"), n("LDL") + n("STL")), (4, 64, 0), "{name}");
    }
}

#[test]
fn what_is_no_gpu_is_refused() {
    let program = LARGE.program();
    let refused = compile_gpu(&program, &Target::named("x86-64").unwrap()).unwrap_err();
    assert!(matches!(refused, CompileError::NotGpu { .. }), "{refused}");
    let text = emit_gpu(&program, &Target::named("sm_80").unwrap(), Emit::Ssa).unwrap().0;
    assert!(String::from_utf8(text).unwrap().contains("Barrier"));
}

/// Separate folder for a test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
