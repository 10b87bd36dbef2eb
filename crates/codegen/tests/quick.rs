//! Code of the fast back end.

mod common;

use common::gemm::Gemm;
use common::*;
use tilewright_codegen::{CompileError, CompiledKernel, Compiler, Interface, Runtime};
use tilewright_ir::expr::{BinaryOp, UnaryOp};
use tilewright_ir::{DType, Expr, Program, Target};

/// Targets of this machine that the fast back end supports.
fn served() -> Vec<Target> {
    let served: Vec<Target> =
        targets().into_iter().filter(|t| t.has_fma && (t.vector_bits == 256 || t.n_vector_registers == 32)).collect();
    if served.is_empty() {
        println!("skipped: this machine is not x86-64 with AVX2");
    }
    served
}

fn compile_quickly(p: &Program, target: &Target) -> CompiledKernel {
    Compiler::new(target.clone()).compile_quickly(p).unwrap_or_else(|e| panic!("{} on {target}: {e}", p.name))
}

#[test]
fn tiles_within_and_beyond_the_registers_have_quick_code() {
    for target in served() {
        for (mr, nv) in [(1, 1), (6, 2), (8, 3), (12, 2), (4, 7), (30, 1), (16, 3), (24, 4)] {
            for dtype in [DType::F32, DType::F64] {
                let lanes = i64::from(target.vector_bits / 8) / dtype.bytes() as i64;
                let gemm =
                    Gemm { dtype, m: 2 * mr, mc: mr, mr, n: nv * lanes, nc: nv * lanes, nv, lanes, ..Gemm::default() };
                let p = gemm.program();
                let arguments = arguments(&p);
                let mut expected = arguments.clone();
                tilewright_ir::interp::run(&p, &mut expected).unwrap();
                let kernel = compile_quickly(&p, &target);
                compare(&p, &target, &run(&p, &kernel, &arguments, &Runtime::serial(), 1), &expected);
            }
        }
    }
}

#[test]
fn elementary_functions_have_quick_code() {
    for target in served() {
        for op in [UnaryOp::Exp, UnaryOp::Log, UnaryOp::Tanh, UnaryOp::Erf, UnaryOp::Sqrt, UnaryOp::Abs] {
            let mut p = program(&format!("{op:?}"));
            let [a, b] = [input(&mut p, "A", DType::F32, &[64]), output(&mut p, "B", DType::F32, &[64])];
            let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
            let at = times(8, i).add(&ix(l));
            let at = std::slice::from_ref(&at);
            p.body = vec![for_(i, 8, vec![vector(l, 8, vec![store(b, at, un(op, load(a, at)))])])];
            let arguments: Vec<Vec<f64>> = arguments(&p).iter().map(|v| v.iter().map(|x| x.abs()).collect()).collect();
            let mut expected = arguments.clone();
            tilewright_ir::interp::run(&p, &mut expected).unwrap();
            let kernel = compile_quickly(&p, &target);
            compare(&p, &target, &run(&p, &kernel, &arguments, &Runtime::serial(), 1), &expected);
            // Serialized and loaded as by another process, with the addresses of C library functions.
            let compiler = Compiler::new(target.clone());
            let written = compiler.quick_object(&p).unwrap();
            let (loaded, interface) = compiler.load_quick(&p, &written).unwrap();
            assert_eq!(interface, Interface::new(&p, &target, 1, Some(Compiler::PREFIX)).unwrap());
            compare(&p, &target, &run(&p, &loaded, &arguments, &Runtime::serial(), 1), &expected);
            for len in (0..written.len()).step_by(41) {
                let _ = compiler.load_quick(&p, &written[..len]);
            }
        }
    }
}

/// Checks powers, which call a function of two arguments, lane by lane.
#[test]
fn powers_have_quick_code() {
    for (dtype, lanes) in [(DType::F32, 1), (DType::F32, 8), (DType::F64, 4)] {
        let mut p = program(&format!("powers of {dtype:?}"));
        let [a, b, c] =
            [input(&mut p, "A", dtype, &[64]), input(&mut p, "B", dtype, &[64]), output(&mut p, "C", dtype, &[64])];
        let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
        let at = times(lanes, i).add(&ix(l));
        let at = std::slice::from_ref(&at);
        let power = |x: Expr, y: Expr| bin(BinaryOp::Pow, un(UnaryOp::Abs, x), y);
        // Each operand comes first once, as the arguments may have to exchange registers.
        let both = bin(BinaryOp::Sub, power(load(a, at), load(b, at)), power(load(b, at), load(a, at)));
        p.body = vec![for_(i, 64 / lanes, vec![vector(l, lanes, vec![store(c, at, both)])])];
        check(&p);
    }
}

/// Checks quotients of integer vectors, for which there is no instruction.
#[test]
fn what_has_no_vectors_is_computed_lane_by_lane() {
    for dtype in [DType::I32, DType::I64, DType::U8] {
        let mut p = program(&format!("quotients of {dtype:?}"));
        let [a, b, c] =
            [input(&mut p, "A", dtype, &[64]), input(&mut p, "B", dtype, &[64]), output(&mut p, "C", dtype, &[64])];
        let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
        let at = times(8, i).add(&ix(l));
        let at = std::slice::from_ref(&at);
        let quotient = bin(BinaryOp::Div, load(a, at), load(b, at));
        p.body = vec![for_(i, 8, vec![vector(l, 8, vec![store(c, at, quotient)])])];
        let arguments: Vec<Vec<f64>> = vec![
            (0..64).map(|n| f64::from(n * 37 % 101)).collect(),
            (0..64).map(|n| f64::from(n * 11 % 13)).collect(),
            vec![0.0; 64],
        ];
        let mut expected = arguments.clone();
        tilewright_ir::interp::run(&p, &mut expected).unwrap();
        for target in served() {
            let mut compiler = Compiler::new(target.clone());
            assert!(matches!(compiler.compile_quickly(&p), Err(CompileError::NotQuick(_))), "{dtype:?} on {target}");
            let kernel = compiler.compile_without_llvm(&p).unwrap();
            compare(&p, &target, &run(&p, &kernel, &arguments, &Runtime::serial(), 1), &expected);
            let (loaded, _) = compiler.load_quick(&p, &compiler.quick_object(&p).unwrap()).unwrap();
            compare(&p, &target, &run(&p, &loaded, &arguments, &Runtime::serial(), 1), &expected);
        }
    }
}

#[test]
fn long_blocks_compile() {
    check(&row_of_sums(4096));
}

#[test]
fn what_is_not_served_says_so() {
    let p = Gemm::default().program();
    let mut compiler = Compiler::new(Target { vector_bits: 128, ..host() });
    assert!(matches!(compiler.compile_quickly(&p), Err(CompileError::NotQuick(_))));
}
