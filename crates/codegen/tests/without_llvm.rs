//! Builds without LLVM: their supported functions, and the errors of the others.
#![cfg(not(feature = "llvm"))]

mod common;

use common::gemm::Gemm;
use common::*;
use tilewright_codegen::{CompileError, Emit, Runtime, compile, emit, llvm_version};
use tilewright_ir::Target;

#[test]
fn kernels_are_those_made_quickly() {
    assert_eq!(llvm_version(), None);
    let (p, host) = (Gemm::default().program(), host());
    if host.vector_bits < 256 {
        return println!("skipped: this machine is not x86-64 with AVX2");
    }
    let arguments = arguments(&p);
    let mut expected = arguments.clone();
    tilewright_ir::interp::run(&p, &mut expected).unwrap();
    compare(&p, &host, &run(&p, &compile(&p, &host).unwrap(), &arguments, &Runtime::serial(), 1), &expected);
}

#[test]
fn what_needs_llvm_says_so() {
    let p = Gemm::default().program();
    let target = Target::named("cortex-a53").unwrap();
    for what in [Emit::Llvm, Emit::LlvmOptimized, Emit::Asm, Emit::Object] {
        let refused = emit(&p, &target, what).unwrap_err();
        assert!(matches!(refused, CompileError::NoLlvm { .. }));
        assert!(refused.to_string().contains("build with the feature `llvm`"), "{refused}");
    }
    assert!(emit(&p, &target, Emit::Ssa).unwrap().starts_with(b"module"));
    assert!(matches!(compile(&p, &Target { vector_bits: 128, ..host() }), Err(CompileError::NotQuick(_))));
}
