//! Matrix products in tensor cores.

use super::super::step::{
    accumulate, bind, compute_at, exact, fuse, inline, pad, pipeline, reorder, shared, tensorize, unroll, vectorize,
};
use super::super::{Setting, Template, ceil_div};
use super::copies::{self, Copies};
use super::matmul::{in_registers, of_blocks, order, product};
use super::model::Blocks;
use super::parts::{Copied, Cut, Threads, cut};
use super::product::{Factor, Product, SUM, bind_blocks};
use super::{constraint, gpu};
use crate::space::{Config, Constraint, Parameter, Space, SpaceError};
use tilewright_ir::gpu::tensor::{STEPS, WARP};
use tilewright_ir::op::Structure;
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{DType, LoopKind, Step, Tensor};

/// Tiles of warps in tensor cores, factors through shared memory.
///
/// # Source
/// The structure is that of CUTLASS's products with `mma.sync`: tiles of blocks, warps and instructions, and
/// three products of parts of 11 bits in place of one in single precision (its example 27). Rows of the
/// factors in shared memory end in elements that nobody uses, so that the threads of a warp read without
/// conflicts.
pub const GPU_MATMUL_MMA: Template = Template {
    name: "gpu-matmul-mma",
    text: "GPU: tensor cores multiply numbers in single precision as parts of 11 bits, block and warp tiles",
    serves: |s| {
        let w = &s.workload;
        s.target.has_tf32()
            && w.dtype == DType::F32
            && !w.exact
            && matches!(w.structure(), Structure::Contraction(_))
            && w.has_inexact()
    },
    space,
    steps,
    estimate: Some(estimate),
};

/// Rows and columns of a tile that an instruction computes.
const TILE: [i64; 2] = [16, 8];
/// Registers for addresses, counters and what is on its way to shared memory.
const OTHER_REGISTERS: i64 = 40;
/// Loads of a thread into shared memory that are repeated in the code.
const MOST_UNROLLED: i64 = 16;
/// Elements that end a row of a factor in shared memory, whose threads read along the sum, or across it.
const ROW_ENDS: [i64; 2] = [4, 8];

fn space(s: &Setting) -> Result<Space, SpaceError> {
    let p = product(s);
    let sizes = |most: i64, n: i64| {
        let all = [16, 32, 64, 128, 256].into_iter();
        all.filter(move |&b| b <= most && (b == 16 || b / 2 < n))
    };
    let vector = |loads: i64| [1, 2, 4].into_iter().filter(move |v| *v <= loads);
    let precisions: &[&str] = if s.workload.takes_tf32() { &["tf32x3", "tf32"] } else { &["tf32x3"] };
    let parameters = vec![
        Parameter::ordinal("block_m", sizes(256, p.m).filter(|b| *b > 16)),
        Parameter::ordinal("block_n", sizes(256, p.n).filter(|b| *b > 16)),
        Parameter::ordinal("block_k", [16, 32, 64].into_iter().filter(|&b| b == 16 || b / 2 < p.k)),
        Parameter::ordinal("warp_m", sizes(64, p.m)),
        Parameter::ordinal("warp_n", sizes(64, p.n)),
        Parameter::ordinal("vector_a", vector(p.a.loads)),
        Parameter::ordinal("vector_b", vector(p.b.loads)),
        Parameter::categorical("order", &["rows", "columns", "groups"]),
        Parameter::ordinal("unroll_k", [1, 2, 4, 8]),
        copies::ahead(s),
        Parameter::categorical("precision", precisions),
    ];
    let parameters: Vec<Parameter> = parameters.into_iter().chain(copies::way(s)).collect();
    let constraints = constraints(s, &p, &parameters);
    Space::new("gpu-matmul-mma", parameters, constraints)
}

/// Elements of a factor in shared memory, as an expression.
fn elements(factor: &Factor, block: &str) -> String {
    let [along, across] = ROW_ENDS;
    if factor.along_k { format!("{block} * (block_k + {along})") } else { format!("block_k * ({block} + {across})") }
}

fn constraints(s: &Setting, p: &Product, parameters: &[Parameter]) -> Vec<Constraint> {
    let gpu = gpu(s);
    let say = |name: &str, text: &str| constraint(name, text, parameters);
    let warp = gpu.warp_size;
    let threads = format!("{warp} * (block_m // warp_m) * (block_n // warp_n)");
    // Sums, and both parts of the factors of a step.
    let loaded = format!("{} * (block_m + block_n) * block_k // ({threads})", copies::in_registers(s));
    let registers = format!("warp_m * warp_n // 32 + warp_m // 2 + warp_n // 2 + {loaded} + {OTHER_REGISTERS}");
    let factors = [elements(&p.a, "block_m"), elements(&p.b, "block_n")];
    let mut constraints = vec![
        say("warps", "block_m % warp_m == 0 and block_n % warp_n == 0"),
        say("threads", &format!("{threads} <= {}", gpu.most_threads)),
        in_registers(s, &registers, &threads, parameters),
        say("unrolled", &format!("unroll_k * {STEPS} <= block_k and unroll_k * warp_m * warp_n <= 16384")),
    ];
    constraints.extend(copies::constraints(s, &factors.join(" + "), gpu.most_shared_bytes, parameters));
    constraints.extend(of_blocks(s, std::slice::from_ref(p), &threads, parameters));
    constraints
}

/// Divides rows and columns of a block into warps, tiles, and what threads have of these: loops `name.w`,
/// which is one for both, and in `rows` and `columns` the others. `over`: what the names begin with.
fn divide(over: &str, [rows, columns]: [&str; 2], warp: [i64; 2]) -> Vec<Step> {
    let of = |name: &str| format!("{over}{name}");
    let [iw, ir, im, it, ih, il] = ["i.w", "i.r", "i.m", "i.t", "i.h", "i.l"].map(of);
    let [jw, jr, jm, jt, jl, je] = ["j.w", "j.r", "j.m", "j.t", "j.l", "j.e"].map(of);
    vec![
        exact(rows, warp[0], &iw, &ir),
        exact(&ir, TILE[0], &im, &it),
        exact(&it, WARP[1], &ih, &il),
        exact(columns, warp[1], &jw, &jr),
        exact(&jr, TILE[1], &jm, &jt),
        exact(&jt, TILE[1] / WARP[0], &jl, &je),
    ]
}

/// Binds warps and their threads.
fn bind_warps(over: &str) -> [Step; 3] {
    let of = |name: &str| format!("{over}{name}");
    [bind(&of("w"), LoopKind::Thread(2)), bind(&of("i.l"), LoopKind::Thread(1)), bind(&of("j.l"), LoopKind::Thread(0))]
}

fn steps(s: &Setting, space: &Space, config: &Config) -> Vec<Step> {
    let int = |name: &str| space.int(config, name);
    let [bm, bn, depth, unrolled] = ["block_m", "block_n", "block_k", "unroll_k"].map(int);
    let copies = Copies::of(space, config);
    let warp = ["warp_m", "warp_n"].map(int);
    let p = product(s);
    let mut steps = p.steps.clone();
    let [b, i, j, k] = p.loops;
    steps.extend([pad(SUM, i, bm), pad(SUM, j, bn), pad(SUM, k, depth)]);
    let batch = |name: &'static str| p.batch.map(|_| name);

    // Blocks of the result.
    let [ob, oi, oj] = p.last;
    let loops: Vec<&str> = batch(ob).into_iter().chain([oi, oj]).collect();
    steps.extend(cut(
        &loops,
        &[
            Cut { target: oi, size: bm, outer: "i.b", inner: "oi.b" },
            Cut { target: oj, size: bn, outer: "j.b", inner: "oj.b" },
        ],
    ));
    steps.push(compute_at(SUM, "j.b"));

    // Tiles of warps and their threads.
    steps.extend(divide("", [i, j], warp));
    steps.extend([exact(k, depth, "k.o", "k.s"), exact("k.s", STEPS * unrolled, "k.m", "k.u")]);
    steps.push(exact("k.u", STEPS, "k.n", "k.i"));
    let products: Vec<&str> = batch(b).into_iter().collect();
    let loops = ["i.w", "j.w", "i.l", "j.l", "k.m", "k.n", "i.m", "j.m", "k.i", "i.h", "j.e"];
    steps.push(reorder(&[&["k.o"][..], &products, &loops].concat()));
    steps.push(fuse("i.w", "j.w", "w"));
    steps.push(accumulate(SUM, "j.b", "C.r"));

    // Factors in shared memory.
    let warps = (bm / warp[0]) * (bn / warp[1]);
    let threads = Threads([WARP[0], WARP[1], warps]);
    let mut copied_by = Vec::new();
    for (name, factor, size, vector) in [("A", &p.a, bm, int("vector_a")), ("B", &p.b, bn, int("vector_b"))] {
        let [x, shared_name] = ["x", "s"].map(|part| format!("{name}.{part}"));
        let at = usize::from(p.batch.is_some());
        let mut axes = if p.batch.is_some() { vec![Whole(0)] } else { Vec::new() };
        let [along, across] = ROW_ENDS;
        let mut extents: Vec<i64> = p.batch.map(|_| 1).into_iter().collect();
        if factor.along_k {
            axes.extend([Whole(at), Outer(at + 1, depth + along), Inner(at + 1, depth + along)]);
            extents.extend([size, 1, depth]);
        } else {
            axes.extend([Whole(at + 1), Outer(at, size + across), Inner(at, size + across)]);
            extents.extend([depth, 1, size]);
        }
        steps.extend([shared(&x, "k.o", &shared_name, &axes), inline(&x)]);
        let in_order: Vec<usize> = (0..extents.len()).collect();
        let copied = Copied { name: &shared_name, extents: &extents, order: &in_order, vector, runs: false };
        steps.extend(copied.by(threads));
        let n_loads = size * depth / (vector * threads.n());
        match copies {
            Copies::Registers(ahead @ 1..) => {
                steps.push(pipeline(&shared_name, "k.o", &format!("{shared_name}.n"), ahead > 1));
                steps.push(unroll(&format!("{shared_name}.o")));
            }
            Copies::Registers(_) if n_loads <= MOST_UNROLLED => steps.push(unroll(&format!("{shared_name}.o"))),
            Copies::Registers(_) | Copies::Async(_) => {}
        }
        copied_by.push((shared_name, n_loads));
    }
    let copied_by: Vec<(&str, i64)> = copied_by.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    steps.extend(copies.stream("k.o", &copied_by));
    steps.extend(bind_warps(""));
    steps.extend(["i.h", "j.e", "i.m", "j.m", "k.n"].map(unroll));
    steps.push(tensorize("k.i", precision(space, config)));
    steps.extend(bind_blocks(order(space, config), batch(ob).map(str::to_owned).into_iter().collect()));

    // What is made of the sums.
    steps.extend(divide("o", ["oi.b", "oj.b"], warp));
    steps.push(reorder(&["oi.w", "oj.w", "oi.l", "oj.l", "oi.m", "oj.m", "oi.h", "oj.e"]));
    steps.push(fuse("oi.w", "oj.w", "ow"));
    steps.extend(bind_warps("o"));
    let is_whole = p.m % bm == 0 && p.n % bn == 0 && p.stores % 2 == 0;
    steps.push(if is_whole { vectorize("oj.e") } else { unroll("oj.e") });
    steps.extend(["oi.h", "oj.m", "oi.m"].map(unroll));
    steps
}

/// How numbers are multiplied.
fn precision(space: &Space, config: &Config) -> Tensor {
    if space.text(config, "precision") == "tf32" { Tensor::Tf32 } else { Tensor::Tf32x3 }
}

/// Blocks of products of tiles and what they read.
fn estimate(s: &Setting, space: &Space, config: &Config) -> f64 {
    let int = |name: &str| space.int(config, name);
    let [bm, bn, depth, wm, wn] = ["block_m", "block_n", "block_k", "warp_m", "warp_n"].map(int);
    let (p, gpu) = (product(s), gpu(s));
    let threads = 32 * (bm / wm) * (bn / wn);
    let copies = Copies::of(space, config);
    let loaded = copies.in_registers((bm + bn) * depth / threads);
    let padded = ceil_div(p.k, depth) * depth;
    // A warp's instructions for a step: products of tiles, loads and parts of both factors, copies.
    let tiles = (wm / TILE[0] * (wn / TILE[1])) as f64;
    let elements = (wm + wn) as f64 / 4.0;
    let loads = [("vector_a", bm), ("vector_b", bn)].map(|(v, n)| (n * STEPS) as f64 / (threads * int(v)) as f64);
    let others = 5.0 * elements + 4.0 * (loads[0] + loads[1]) + 8.0;
    let n_products = if precision(space, config) == Tensor::Tf32 { 1.0 } else { 3.0 };
    let products = n_products * 6.0 * tiles;
    let blocks = Blocks {
        n: p.batch.unwrap_or(1) * ceil_div(p.m, bm) * ceil_div(p.n, bn),
        threads,
        registers: wm * wn / 32 + wm / 2 + wn / 2 + loaded + OTHER_REGISTERS,
        shared_bytes: 4 * copies.n() * (bm + bn) * (depth + 8),
        // A tile's product takes a warp about as long as 12 multiply-adds of each of its threads.
        fmas: (bm * bn * padded) as f64 * n_products * 12.0 * 32.0 / (TILE[0] * TILE[1] * STEPS) as f64,
        efficiency: products / (products + others),
        bytes: 4.0 * ((bm + bn) * padded + bm * bn) as f64,
        waits: if copies.are_ahead() { 1.0 } else { (padded / depth) as f64 } + 1.0,
    };
    blocks.cycles(&gpu)
}
