//! Speed and compile time of handwritten matrix products, in GFLOP/s of one thread (best of several runs).
//!
//! `cargo run --release --example microkernel [-- FILTER]`; with `asm` as the second argument, prints the
//! assembly.

#[path = "../tests/common/mod.rs"]
mod common;

use std::io::Write;
use std::time::Instant;

use common::gemm::{ALayout, Gemm};
use common::*;
use tilewright_codegen::{CompileTimes, Emit, Runtime, SCRATCH_ALIGN, compile, emit};
use tilewright_ir::expr::{Expr, UnaryOp};
use tilewright_ir::{DType, Index, Program, Scope, Stmt, Target};

struct Aligned(*mut u8, std::alloc::Layout);

impl Aligned {
    fn new(bytes: u64) -> Aligned {
        let layout = std::alloc::Layout::from_size_align(bytes.max(1) as usize, 4096).expect("a size");
        // SAFETY: the size is not zero.
        Aligned(unsafe { std::alloc::alloc_zeroed(layout) }, layout)
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.0, self.1) };
    }
}

/// Time of the fastest run in seconds, and of the fastest compilation.
fn measure(p: &Program, target: &Target, seconds: f64) -> (f64, CompileTimes) {
    let mut times = CompileTimes { machine_code_ns: u64::MAX, ..CompileTimes::default() };
    let mut kernel = None;
    for _ in 0..5 {
        let k = compile(p, target).expect("compiles");
        if k.times().machine_code_ns < times.machine_code_ns {
            times = k.times();
        }
        kernel = Some(k);
    }
    let kernel = kernel.expect("compiled five times");
    let arguments: Vec<Aligned> = p.arguments().map(|(_, b)| Aligned::new(b.size_bytes().unwrap())).collect();
    let kept: Vec<Aligned> = kernel.kept_bytes().iter().map(|b| Aligned::new(*b)).collect();
    let scratch = Aligned::new(kernel.scratch_bytes(1) + SCRATCH_ALIGN);
    for ((_, b), memory) in p.arguments().zip(&arguments) {
        let mut numbers = common::Numbers(3);
        let values: Vec<f64> = (0..b.n_elements().unwrap()).map(|_| numbers.next()).collect();
        // SAFETY: the slice covers the buffer, to which there are no other references.
        b.dtype.write(&values, unsafe { std::slice::from_raw_parts_mut(memory.0, b.size_bytes().unwrap() as usize) });
    }
    let pointers: Vec<*mut u8> = arguments.iter().map(|m| m.0).collect();
    let kept: Vec<*mut u8> = kept.iter().map(|m| m.0).collect();
    let runtime = Runtime::serial();
    let mut best = f64::INFINITY;
    // SAFETY: the memory has the required sizes.
    unsafe {
        kernel.prepare(&pointers, &kept, scratch.0, &runtime);
        let start = Instant::now();
        let mut repeats = 1u32;
        while start.elapsed().as_secs_f64() < seconds {
            let t = Instant::now();
            for _ in 0..repeats {
                kernel.run(&pointers, &kept, scratch.0, &runtime);
            }
            let each = t.elapsed().as_secs_f64() / f64::from(repeats);
            best = best.min(each);
            repeats = ((1e-3 / each) as u32).clamp(1, 1 << 16);
        }
    }
    (best, times)
}

/// Number of vector register spills in the assembly: stores to and loads from the stack.
fn spills(p: &Program, target: &Target) -> usize {
    let asm = String::from_utf8(emit(p, target, Emit::Asm).expect("compiles")).expect("text");
    asm.lines().filter(|l| l.contains("mm") && l.contains("(%rsp)")).count()
}

/// Multiply-adds on registers only, which measure the machine's current peak.
fn peak(dtype: DType, lanes: i64) -> (Program, f64) {
    let (n, rows) = (4096, 12);
    let mut p = program("peak");
    let a = input(&mut p, "A", dtype, &[lanes]);
    let c = output(&mut p, "C", dtype, &[rows, lanes]);
    let r = temporary(&mut p, "R", dtype, &[rows, lanes], Scope::Register);
    let x = temporary(&mut p, "X", dtype, &[lanes], Scope::Register);
    let [i, k, l] = ["i", "k", "l"].map(|name| p.add_loop(name));
    let rows_of = |stmt| unrolled(i, rows, vec![vector(l, lanes, vec![stmt])]);
    let product = mul(load(x, &[ix(l)]), load(x, &[ix(l)]));
    p.body = vec![
        Stmt::Alloc(r),
        Stmt::Alloc(x),
        vector(l, lanes, vec![store(x, &[ix(l)], load(a, &[ix(l)]))]),
        rows_of(store(r, &[ix(i), ix(l)], Expr::Const(0.0))),
        for_(k, n, vec![rows_of(add_to(r, &[ix(i), ix(l)], product, never()))]),
        rows_of(store(c, &[ix(i), ix(l)], load(r, &[ix(i), ix(l)]))),
    ];
    (p, 2.0 * (n * rows * lanes) as f64)
}

/// Copy of rows into panels `[k, rows]`, within the L1 cache.
fn transposing_pack(dtype: DType, rows: i64, lanes: i64) -> (Program, f64) {
    let k = 2048 / rows / lanes * lanes;
    let mut p = program("pack");
    let a = input(&mut p, "A", dtype, &[rows, k]);
    let b = output(&mut p, "B", dtype, &[k, rows]);
    let [o, l] = ["o", "l"].map(|name| p.add_loop(name));
    let at = times(lanes, o).add(&ix(l));
    let stores = (0..rows).map(|i| store(b, &[at.clone(), ix(i)], load(a, &[ix(i), at.clone()]))).collect();
    p.body = vec![for_(o, k / lanes, vec![vector(l, lanes, stores)])];
    (p, (rows * k) as f64)
}

/// Copy of columns of a tile `[lanes, columns]` into rows, within the L1 cache.
fn transposing_unpack(dtype: DType, columns: i64, lanes: i64) -> (Program, f64) {
    let n = 2048 / columns / lanes;
    let mut p = program("unpack");
    let a = input(&mut p, "A", dtype, &[n, lanes, columns]);
    let b = output(&mut p, "B", dtype, &[n, columns, lanes]);
    let [o, l] = ["o", "l"].map(|name| p.add_loop(name));
    let stores = (0..columns).map(|j| store(b, &[ix(o), ix(j), ix(l)], load(a, &[ix(o), ix(l), ix(j)]))).collect();
    p.body = vec![for_(o, n, vec![vector(l, lanes, stores)])];
    (p, (n * columns * lanes) as f64)
}

/// Elementwise function within the L1 cache, in vectors or as scalars.
fn elementwise(op: UnaryOp, dtype: DType, lanes: Option<i64>) -> (Program, f64) {
    let mut p = program("elementwise");
    let a = input(&mut p, "A", dtype, &[1024]);
    let b = output(&mut p, "B", dtype, &[1024]);
    let [o, l] = ["o", "l"].map(|name| p.add_loop(name));
    let of = |at: Index| store(b, std::slice::from_ref(&at), un(op, load(a, std::slice::from_ref(&at))));
    p.body = vec![match lanes {
        Some(lanes) => for_(o, 1024 / lanes, vec![vector(l, lanes, vec![of(times(lanes, o).add(&ix(l)))])]),
        None => for_(o, 1024, vec![of(ix(o))]),
    }];
    (p, 1024.0)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let filter = arguments.next().unwrap_or_default();
    let asm = arguments.next().is_some_and(|a| a == "asm");
    let mut cases: Vec<(String, Target, Gemm)> = Vec::new();
    let avx512 = host();
    let avx2 = Target::named("x86-64-v3").expect("a known name");
    let resident = Gemm { prepacked: true, ku: 4, kc: 256, k: 256, ..Gemm::default() };
    for (mr, nv) in [(8, 3), (12, 2), (14, 2), (6, 4), (28, 1), (13, 2), (9, 3), (5, 5)] {
        for a in [ALayout::Panels, ALayout::Rows, ALayout::Plain] {
            let g = Gemm { mr, nv, mc: mr * 4, m: mr * 4, nc: nv * 16 * 2, n: nv * 16 * 2, a, ..resident };
            cases.push((format!("resident-{mr}x{}-{a:?}", nv * 16), avx512.clone(), g));
        }
    }
    for ku in [1, 2, 8] {
        let g = Gemm { mr: 8, nv: 3, mc: 32, m: 32, nc: 96, n: 96, ku, ..resident };
        cases.push((format!("resident-8x48-ku{ku}"), avx512.clone(), g));
    }
    for (mr, nv) in [(6, 2), (4, 3), (12, 1)] {
        let g = Gemm { mr, nv, lanes: 8, mc: mr * 8, m: mr * 8, nc: nv * 32, n: nv * 32, ..resident };
        cases.push((format!("avx2-{mr}x{}", nv * 8), avx2.clone(), g));
    }
    for (mr, nv, m, n) in [(8, 3, 1024, 1008), (12, 2, 1008, 1024), (6, 4, 1008, 1024), (14, 2, 1008, 1024)] {
        for (blocks, kc, ku, prefetch) in
            [(8, 1024, 1, 0), (16, 1024, 1, 0), (16, 512, 1, 0), (16, 256, 1, 0), (8, 1024, 1, 8), (8, 1024, 4, 0)]
        {
            for (a, prepacked) in [(ALayout::Panels, true), (ALayout::Panels, false), (ALayout::Plain, true)] {
                let tiles = m / mr;
                let blocks = (blocks..).find(|b| tiles % b == 0).expect("a divisor");
                let g =
                    Gemm { m, n, k: 1024, mr, nv, ku, mc: blocks * mr, kc, nc: n, a, prepacked, prefetch, ..resident };
                let how = if prepacked { "prepacked" } else { "packing" };
                cases.push((
                    format!("1024-{mr}x{}-mc{}-kc{kc}-ku{ku}-pf{prefetch}-{a:?}-{how}", nv * 16, blocks * mr),
                    avx512.clone(),
                    g,
                ));
            }
        }
    }
    let g = Gemm { dtype: DType::F64, lanes: 8, mr: 8, nv: 3, m: 32, mc: 32, n: 48, nc: 48, ..resident };
    cases.push(("resident-f64-8x24".into(), avx512.clone(), g));

    let mut out = std::io::stdout().lock();
    let mut cases: Vec<(String, Target, Program, f64, Option<i64>)> = cases
        .into_iter()
        .map(|(name, target, g)| {
            let lanes = (i64::from(target.vector_bits) / 8) / g.dtype.bytes() as i64;
            (name, target, g.program(), g.flops(), Some(lanes))
        })
        .collect();
    for target in [&avx512, &avx2] {
        for rows in 2..=16 {
            let lanes = target.lanes(DType::F32);
            let (p, elements) = transposing_pack(DType::F32, rows, lanes);
            cases.push((format!("pack-{}-{rows}", target.vector_bits), target.clone(), p, elements, None));
            let (p, elements) = transposing_unpack(DType::F32, rows, lanes);
            cases.push((format!("unpack-{}-{rows}", target.vector_bits), target.clone(), p, elements, None));
        }
        for (dtype, name) in DType::ALL.into_iter().filter(|(dtype, _)| dtype.is_float()) {
            for (op, function) in UnaryOp::ALL {
                let (p, elements) = elementwise(op, dtype, Some(target.lanes(dtype)));
                cases.push((format!("{function}-{name}-{}", target.vector_bits), target.clone(), p, elements, None));
                let (p, elements) = elementwise(op, dtype, None);
                cases.push((format!("{function}-{name}-scalar"), target.clone(), p, elements, None));
            }
        }
    }
    writeln!(
        out,
        "{:44} {:>8} {:>6} {:>6}   compile ms: generate passes machine load",
        "kernel (packs: elements, and elements a cycle)", "G/s", "/peak", "spills"
    )
    .unwrap();
    for (name, target, p, work, flops_lanes) in cases.iter().filter(|(name, ..)| name.contains(&filter)) {
        if asm {
            out.write_all(&emit(p, target, Emit::Asm).expect("compiles")).unwrap();
        }
        let (seconds, t) = measure(p, target, 0.3);
        // Packing is compared with one element per cycle; the clock rate is derived from two 8-lane
        // multiply-adds per cycle.
        let (reference, reference_work) = match flops_lanes {
            Some(lanes) => peak(p.buffers[0].dtype, *lanes),
            None => peak(DType::F32, 8),
        };
        let (reference_seconds, _) = measure(&reference, target, 0.1);
        let mut reference_rate = reference_work / reference_seconds;
        if flops_lanes.is_none() {
            // Two 8-lane multiply-adds per cycle.
            reference_rate /= 32.0;
        }
        let ms = |ns: u64| ns as f64 / 1e6;
        writeln!(
            out,
            "{name:44} {:8.1} {:6.3} {:6}   {:5.2} ms: {:.2} {:.2} {:.2} {:.2}",
            work / seconds / 1e9,
            work / seconds / reference_rate,
            spills(p, target),
            ms(t.generate_ns + t.passes_ns + t.machine_code_ns + t.load_ns),
            ms(t.generate_ns),
            ms(t.passes_ns),
            ms(t.machine_code_ns),
            ms(t.load_ns)
        )
        .unwrap();
    }
}
