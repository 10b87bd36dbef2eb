//! Repeated compilation must not leak memory. This test is alone in its process, so that nothing else
//! allocates.
#![cfg(feature = "llvm")]

mod common;

use common::gemm::Gemm;
use common::host;
use tilewright_codegen::compile;

#[test]
fn dropped_kernels_give_memory_back() {
    let p = Gemm::default().program();
    let resident_pages = || -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").expect("Linux tells");
        text.split(' ').nth(1).expect("a second field").parse().expect("a number")
    };
    let compile_some = |n| (0..n).for_each(|_| drop(compile(&p, &host()).unwrap()));
    compile_some(50);
    let grown_by = |n| {
        let before = resident_pages();
        compile_some(n);
        resident_pages().saturating_sub(before)
    };
    // The code of a kernel has at least two pages, LLVM's data for it a thousand. A leak grows each time; the
    // allocator only occasionally keeps some more megabytes.
    assert!((0..3).any(|_| grown_by(300) < 300), "grew by 300 pages or more each time");
}
