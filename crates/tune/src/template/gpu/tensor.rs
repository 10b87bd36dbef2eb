//! Matrix products on tensor cores by warps (`mma.sync`).

use super::super::algorithm::{self, Algorithm};
use super::super::step::{accumulate, bind, exact, fuse, inline, reorder, shared, tensorize, unroll, vectorize};
use super::super::{Template, TemplateSetting, ceil_div};
use super::conv::is_window;
use super::copies::{self, Copies};
use super::matmul::{in_registers, is_contraction, loaded_ahead, of_blocks, order, product, split_k, sums_of_parts};
use super::model::{BETWEEN_STEPS, Blocks};
use super::parts::{BlockThreads, Copied};
use super::product::{Division, GpuFactor, GpuProduct, bind_blocks};
use super::{constraint, gpu};
use tilewright_ir::gpu::tensor::{self, WARP};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{DType, LoopKind, Step, TensorProduct};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Warp tiles on tensor cores, with operands staged in shared memory.
///
/// # Source
/// The structure is that of CUTLASS's products with `mma.sync`: tiles of blocks, warps and instructions, and
/// three products of parts of 11 bits in place of one in f32 (its example 27). Rows of the operands in shared
/// memory are padded, so that the threads of a warp read without conflicts.
pub const GPU_MATMUL_MMA: Template = Template {
    name: "gpu-matmul-mma",
    text: "GPU: mma by warps, on f16, bf16, or f32 as one or three TF32 products; block and warp tiles",
    serves: |s| is_contraction(s) && (MMA.applies)(s),
    space: |s| algorithm::space("gpu-matmul-mma", s, s, &[MMA]),
    steps: |s, space, config| (MMA.steps)(s, s, space, config),
    estimate: Some(|s, space, config| (MMA.estimate)(s, s, space, config)),
};

/// Implicit GEMM on tensor cores: see [`super::GPU_CONV`].
pub const GPU_CONV_MMA: Template = Template {
    name: "gpu-conv-mma",
    text: "GPU: implicit GEMM, patches gathered into shared memory, tiled as gpu-matmul-mma",
    serves: |s| is_window(s) && (MMA.applies)(s),
    space: |s| algorithm::space("gpu-conv-mma", s, s, &[MMA]),
    steps: |s, space, config| (MMA.steps)(s, s, space, config),
    estimate: Some(|s, space, config| (MMA.estimate)(s, s, space, config)),
};

/// Both templates as an algorithm.
pub(super) const MMA: Algorithm<TemplateSetting> = Algorithm {
    name: "mma",
    applies: |s| {
        let w = &s.workload;
        let fits = |p: GpuProduct| !p.is_among_others || p.m % LEAST_BLOCK == 0;
        s.target.has_tf32() && !w.exact && w.fills_tiles() && GpuProduct::of(w).is_some_and(fits)
    },
    parameters: |s, _| parameters(s, &product(s)),
    constraints: |s, _| {
        let p = product(s);
        constraints(s, &p, &parameters(s, &p))
    },
    steps: |s, _, space, config| steps(s.workload.dtype, &product(s), space, config),
    estimate: |s, _, space, config| estimate(s, &product(s), space, config),
};

/// Rows and columns of a tile that an instruction computes.
const TILE: [i64; 2] = [16, 8];
/// Rows and columns of the smallest block: two tiles of 16.
const LEAST_BLOCK: i64 = 32;
/// Number of registers for addresses, counters and data on the way to shared memory.
const OTHER_REGISTERS: i64 = 40;

/// Padding in elements of an operand's row in shared memory, for threads that read along the reduction and
/// for ones that read across it: 16 bytes if they load tiles together.
fn row_ends(dtype: DType) -> [i64; 2] {
    if dtype.is_half() { [8, 8] } else { [4, 8] }
}

fn parameters(s: &TemplateSetting, p: &GpuProduct) -> Vec<Parameter> {
    let sizes = |least: i64, n: i64| {
        let all = [16, 32, 64, 128, 256].into_iter();
        all.filter(move |&b| b == least || (b > least && b / 2 < n))
    };
    let vector = |loads: i64| [1, 2, 4, 8].into_iter().filter(move |v| *v <= loads);
    let precisions: &[&str] = match s.workload.takes_tf32() {
        _ if s.workload.dtype.is_half() => &["halves"],
        true => &["tf32x3", "tf32"],
        false => &["tf32x3"],
    };
    let fits_rows = |b: &i64| !p.is_among_others || p.m % b == 0;
    let own = [
        Parameter::ordinal("block_m", sizes(LEAST_BLOCK, p.m).filter(fits_rows)),
        Parameter::ordinal("block_n", sizes(LEAST_BLOCK, p.n)),
        Parameter::ordinal("block_k", [16, 32, 64].into_iter().filter(|&b| b == 16 || b / 2 < p.k)),
        Parameter::ordinal("warp_m", sizes(16, p.m).filter(|w| *w <= 64)),
        Parameter::ordinal("warp_n", sizes(16, p.n).filter(|w| *w <= 64)),
        Parameter::ordinal("vector_a", vector(p.a.loads)),
        Parameter::ordinal("vector_b", vector(p.b.loads)),
        Parameter::categorical("order", &["rows", "columns", "groups"]),
        Parameter::ordinal("unroll_k", [1, 2, 4, 8]),
        copies::ahead(s, 4),
        Parameter::categorical("precision", precisions),
        split_k(p.k).optional(),
    ];
    own.into_iter().chain(copies::way(s)).collect()
}

/// Number of elements of an operand in shared memory, as an expression.
fn elements(dtype: DType, factor: &GpuFactor, block: &str) -> String {
    let [along, across] = row_ends(dtype);
    if factor.along_k { format!("{block} * (block_k + {along})") } else { format!("block_k * ({block} + {across})") }
}

fn constraints(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let gpu = gpu(s);
    let say = |name: &str, text: &str| constraint(name, text, parameters);
    let warp = gpu.warp_size;
    let threads = format!("{warp} * (block_m // warp_m) * (block_n // warp_n)");
    let dtype = s.workload.dtype;
    // Sums, which restart in each step if products have three parts, and both parts of the operands of a
    // step; half-precision operands have one part, and a register holds two of them. If the products of three
    // parts leave time, the operands of half of the unrolled steps are loaded ahead.
    let (again, each_register, ahead) = match dtype.is_half() {
        true => ("", 4, ""),
        false => (
            " * (2 if precision == 'tf32x3' else 1)",
            2,
            " + ((max(unroll_k // 2, 1) - 1) * (warp_m + warp_n) // 2 if precision == 'tf32x3' else 0)",
        ),
    };
    let of_factors = format!("warp_m // {each_register} + warp_n // {each_register}{ahead}");
    let loaded = loaded_ahead(s, &threads);
    let registers = format!("warp_m * warp_n // 32{again} + {of_factors} + {loaded} + {OTHER_REGISTERS}");
    let each = tensor::steps(dtype);
    let factors = [elements(dtype, &p.a, "block_m"), elements(dtype, &p.b, "block_n")];
    let mut constraints = vec![
        say("warps", "block_m % warp_m == 0 and block_n % warp_n == 0"),
        say("threads", &format!("{threads} <= {}", gpu.most_threads)),
        in_registers(s, &registers, &threads, parameters),
        say("unrolled", &format!("unroll_k * {each} <= block_k and unroll_k * warp_m * warp_n <= 16384")),
    ];
    constraints.extend(copies::constraints(s, &factors.join(" + "), "", gpu.most_shared_bytes, parameters));
    constraints.extend(of_blocks(s, std::slice::from_ref(p), &threads, parameters));
    constraints
}

/// Divides the rows and columns of a block into warps, tiles and elements of threads. `over`: prefix of the
/// names of the loops.
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
pub(super) fn bind_warps(over: &str) -> [Step; 3] {
    let of = |name: &str| format!("{over}{name}");
    [bind(&of("w"), LoopKind::Thread(2)), bind(&of("i.l"), LoopKind::Thread(1)), bind(&of("j.l"), LoopKind::Thread(0))]
}

/// Division of the product among blocks.
pub(super) fn division(space: &Space, config: &Config) -> Division {
    let int = |name: &str| space.int(config, name);
    Division { tile: ["block_m", "block_n"].map(int), products: 1, depth: int("block_k"), split: int("split_k") }
}

fn steps(dtype: DType, p: &GpuProduct, space: &Space, config: &Config) -> Vec<Step> {
    let int = |name: &str| space.int(config, name);
    let (unrolled, each) = (int("unroll_k"), tensor::steps(dtype));
    let copies = Copies::of(space, config);
    let warp = ["warp_m", "warp_n"].map(int);
    let division = division(space, config);
    let ([bm, bn], depth) = (division.tile, division.depth);
    let (mut steps, [b, i, j, k]) = division.steps(p);

    // Tiles of warps and their threads.
    steps.extend(divide("", [&i, &j], warp));
    steps.extend([exact(&k, depth, "k.o", "k.s"), exact("k.s", each * unrolled, "k.m", "k.u")]);
    steps.push(exact("k.u", each, "k.n", "k.i"));
    let products: Vec<&str> = p.batch.map(|_| b.as_str()).into_iter().collect();
    let loops = ["i.w", "j.w", "i.l", "j.l", "k.m", "k.n", "i.m", "j.m", "k.i", "i.h", "j.e"];
    steps.push(reorder(&[&["k.o"][..], &products, &loops].concat()));
    steps.push(fuse("i.w", "j.w", "w"));
    steps.push(accumulate(division.stage(), "j.b", "C.r"));

    // Operands in shared memory.
    let warps = (bm / warp[0]) * (bn / warp[1]);
    let threads = BlockThreads([WARP[0], WARP[1], warps]);
    let mut copied_by = Vec::new();
    for (name, factor, size, vector) in [("A", &p.a, bm, int("vector_a")), ("B", &p.b, bn, int("vector_b"))] {
        let [x, shared_name] = ["x", "s"].map(|part| format!("{name}.{part}"));
        let at = usize::from(p.batch.is_some());
        let mut axes = if p.batch.is_some() { vec![Whole(0)] } else { Vec::new() };
        let [along, across] = row_ends(dtype);
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
        let copied =
            Copied { name: &shared_name, extents: &extents, order: &in_order, vector, runs: false, across: false };
        steps.extend(copied.by(threads));
        let n_loads = size * depth / (vector * threads.n());
        steps.extend(copies.through_registers("k.o", &shared_name, n_loads));
        copied_by.push((shared_name, n_loads));
    }
    let copied_by: Vec<(&str, i64)> = copied_by.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    steps.extend(copies.stream("k.o", &copied_by, [false; 4]));
    steps.extend(bind_warps(""));
    steps.extend(["i.h", "j.e", "i.m", "j.m", "k.n"].map(unroll));
    steps.push(tensorize("k.i", precision(space, config)));
    steps.extend(bind_blocks(order(space, config), division.outer(p)));

    // The epilogue.
    if division.split > 1 {
        steps.extend(division.sums_of_parts(p));
        return steps;
    }
    steps.extend(divide("o", ["oi.b", "oj.b"], warp));
    steps.push(reorder(&["oi.w", "oj.w", "oi.l", "oj.l", "oi.m", "oj.m", "oi.h", "oj.e"]));
    steps.push(fuse("oi.w", "oj.w", "ow"));
    steps.extend(bind_warps("o"));
    let is_whole = p.m % bm == 0 && p.n % bn == 0 && p.stores % 2 == 0;
    steps.push(if is_whole { vectorize("oj.e") } else { unroll("oj.e") });
    steps.extend(["oi.h", "oj.m", "oi.m"].map(unroll));
    steps
}

/// Tensor core operation of a configuration.
fn precision(space: &Space, config: &Config) -> TensorProduct {
    match space.text(config, "precision").as_str() {
        "halves" => TensorProduct::Halves,
        "tf32" => TensorProduct::Tf32,
        _ => TensorProduct::Tf32x3,
    }
}

/// Cycles of a store by a warp for each of the eight rows that it writes to, measured on an H100.
const STORE: f64 = 1.5;

/// Cycles for storing a tile: a lane stores 16 bytes of a row if threads exchange halves, otherwise two
/// elements, or one at a time in a partial tile.
pub(super) fn stores(p: &GpuProduct, [bm, bn]: [i64; 2], split: i64, is_exchanged: bool) -> f64 {
    let is_whole = split > 1 || p.m % bm == 0 && p.n % bn == 0 && p.stores % 2 == 0;
    let each = match (is_exchanged, is_whole) {
        (true, _) => 8,
        (false, true) => 2,
        (false, false) => 1,
    };
    // Four lanes store adjacent elements.
    STORE * (bm * bn) as f64 / (4 * each) as f64
}

/// Estimated cycles of the blocks, with their tile products and reads.
fn estimate(s: &TemplateSetting, p: &GpuProduct, space: &Space, config: &Config) -> f64 {
    let int = |name: &str| space.int(config, name);
    let [wm, wn] = ["warp_m", "warp_n"].map(int);
    let division = division(space, config);
    let ([bm, bn], depth, split) = (division.tile, division.depth, division.split);
    let gpu = gpu(s);
    let threads = 32 * (bm / wm) * (bn / wn);
    let copies = Copies::of(space, config);
    let bytes = s.workload.dtype.bytes() as i64;
    let loaded = copies.in_registers((bm + bn) * depth / threads) * bytes / 4;
    let padded = division.padded_sum(p) / split;
    // A warp's instructions for a step: products of tiles, loads and parts of both factors, copies.
    let tiles = (wm / TILE[0] * (wn / TILE[1])) as f64;
    let elements = (wm + wn) as f64 / 4.0;
    let each = tensor::steps(s.workload.dtype);
    let loads = [("vector_a", bm), ("vector_b", bn)].map(|(v, n)| (n * each) as f64 / (threads * int(v)) as f64);
    let others = 5.0 * elements + 4.0 * (loads[0] + loads[1]) + 8.0;
    let n_products = if precision(space, config) == TensorProduct::Tf32x3 { 3.0 } else { 1.0 };
    let products = n_products * 6.0 * tiles;
    let tensor_fmas = 4.0 / bytes as f64 * f64::from(gpu.tensor_fmas);
    let blocks = Blocks {
        n: p.batch.unwrap_or(1) * split * ceil_div(p.m, bm) * ceil_div(p.n, bn),
        threads,
        registers: wm * wn / 32 + (wm + wn) / 2 * bytes / 4 + loaded + OTHER_REGISTERS,
        shared_bytes: bytes * copies.n() * (bm + bn) * (depth + 8),
        // In units of the threads' multiply-adds.
        fmas: (bm * bn * padded) as f64 * n_products * f64::from(gpu.unit_fmas) / tensor_fmas,
        efficiency: products / (products + others),
        bytes: bytes as f64 * ((bm + bn) * padded + bm * bn) as f64,
        steps: (padded / depth) as f64,
        stages: copies.in_flight(),
        exposed: BETWEEN_STEPS,
        stores: stores(p, [bm, bn], split, false),
        begins: 0.0,
        fill: 4 * i64::from(gpu.warp_size),
    };
    blocks.cycles(&s.target, &gpu) + sums_of_parts(s, p, split)
}
