//! Code that is made quickly: what there has to be.

mod common;

use common::gemm::Gemm;
use common::*;
use tilewright_codegen::{CompileError, CompiledKernel, Compiler, Interface, Runtime};
use tilewright_ir::expr::UnaryOp;
use tilewright_ir::{DType, Program, Target};

/// The targets of this machine that have quick code.
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
            // Written down and loaded, as another process does: calls of the C library have their addresses.
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
