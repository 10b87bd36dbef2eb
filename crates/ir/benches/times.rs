//! Benchmarks of the interpreter, the reference, the verifier and the lowering, without assertions.
//!
//! `cargo bench -p tilewright-ir [-- NAME]` measures all benchmarks, or those whose names contain NAME.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{arguments, matmul, matmul_transposed, only, program, softmax};
use tilewright_ir::Program;
use tilewright_ir::interp::run;
use tilewright_ir::lower::{PASSES, lower, run_pass};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{evaluate, work};
use tilewright_ir::schedule::{apply, parse_steps};
use tilewright_ir::verify::check;

const BENCHES: &[(&str, fn())] =
    &[("interpreter", interpreter), ("reference", reference), ("verifier", verifier), ("lowering", lowering)];

fn main() {
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    for (name, bench) in BENCHES.iter().filter(|(name, _)| name.contains(&wanted)) {
        println!("{name}");
        bench();
    }
}

/// Time of the fastest of `n_runs` runs, in seconds.
fn least<R>(n_runs: usize, run: impl Fn() -> R) -> f64 {
    let seconds = |_| {
        let start = Instant::now();
        std::hint::black_box(run());
        start.elapsed().as_secs_f64()
    };
    (0..n_runs).map(seconds).fold(f64::INFINITY, f64::min)
}

fn operator(text: &str) -> Program {
    Workload::parse(text).expect("a workload").program()
}

fn interpreter() {
    let n = 256;
    let program = matmul("f32", n, n, n);
    let arguments = arguments(&program, 1);
    let seconds = least(1, || run(&program, &mut arguments.clone()).expect("it runs"));
    println!("  {:.1} million updates a second", (n * n * n) as f64 / seconds / 1e6);
}

fn reference() {
    let operators = [
        "matmul:m=1024,n=1024,k=1024",
        "matmul:m=2048,n=2048,k=2048",
        "matmul:m=1,n=4096,k=4096",
        "matmul:m=4096,n=1,k=4096",
        "matmul:m=64,n=3072,k=768",
        "batch_matmul:b=96,m=128,n=128,k=64",
        "conv2d:c=3,h=224,w=224,k=64,r=7,s=7,stride=2,pad=3",
        "conv2d:c=64,h=56,w=56,k=64,r=3,s=3,pad=1",
        "conv2d:c=512,h=7,w=7,k=512,r=3,s=3,pad=1",
        "conv2d:n=64,c=256,h=28,w=28,k=256,r=3,s=3,pad=1",
        "conv2d:n=8,c=3,h=112,w=112,k=64,r=7,s=7,pad=3",
        "depthwise_conv2d:c=256,h=112,w=112,r=3,s=3,pad=1",
        "conv2d_transpose:c=1026,h=1,w=224,k=1,r=1,s=1024,stride_w=256",
        "conv2d_transpose:c=256,h=32,w=32,k=128,r=4,s=4,stride=2,pad=1",
    ];
    let of_operators = operators.into_iter().map(|text| (text, operator(text)));
    let others = [
        ("matmul 1024, transposed", matmul_transposed(1024, 1024, 1024)),
        ("matmul 2048, transposed", matmul_transposed(2048, 2048, 2048)),
        ("softmax 1024", softmax(1024, 1024)),
    ];
    for (name, program) in of_operators.chain(others) {
        let inputs = only(&program, &arguments(&program, 1), false);
        for n_threads in [1, 2] {
            let seconds = least(1, || evaluate(&program, &inputs, n_threads).expect("it is evaluated"));
            let rate = work(&program) / seconds / 1e9;
            println!("  {name}: {seconds:.3} s on {n_threads} threads, {rate:.2} G/s");
        }
    }
}

/// Measures the verifier on a large unrolled tile.
fn verifier() {
    let body = (0..200).map(|i| {
        let at = format!("C[12*a + {}, 16*b + {} + c]", i % 12, (i / 12) * 16 % 48);
        format!("vectorized c in 16 {{ {at} += A[12*a + {}, b] first never }} ", i % 12)
    });
    let program = program(&format!(
        "program \"p\" buffer A: f32[1200, 64] global input buffer C: f32[1200, 1072] global output loops a, b, c
        run {{ parallel a in 100 {{ for b in 64 {{ {} }} }} }}",
        body.collect::<String>()
    ));
    println!("  {:.1} ms for 200 statements of an unrolled tile", least(20, || check(&program)) * 1e3);
}

/// Measures the lowering of a 6 × 48 tile of a product.
fn lowering() {
    let steps = "split i 6 -> io ii
        split j 48 -> jo ji
        split ji 16 -> jv jl
        split k 4 -> ko ki
        reorder jo io ko ki ii jv jl
        accumulate C at io -> acc
        unroll ki
        unroll ii
        unroll jv
        vectorize jl";
    let steps = parse_steps(steps).expect("steps are well formed");
    let mut program = steps.iter().fold(matmul("f32", 1000, 1000, 1000), |program, step| {
        apply(&program, step).unwrap_or_else(|error| panic!("{step}: {error}"))
    });
    println!("  all: {:.2} ms", least(20, || lower(&program)) * 1e3);
    for (name, pass) in PASSES {
        println!("  {name}: {:.2} ms", least(20, || run_pass(program.clone(), pass)) * 1e3);
        program = run_pass(program, pass);
    }
}
