//! Matrix products on GPUs without tensor cores.

use super::super::algorithm::{self, Algorithm};
use super::super::{Template, TemplateSetting, ceil_div};
use super::copies::{self, Copies};
use super::model::{BETWEEN_STEPS, Blocks, START, UNPROVEN_WAY};
use super::product::LEAST_BLOCK;
use super::{BlockTile, Fragments, GpuProduct, Rasterization, Tiling, constraint, gpu};
use tilewright_ir::DType;
use tilewright_ir::op::Structure;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_search::{Config, Constraint, Domain, Parameter, Space};

/// Blocks of the result in register tiles, with operands staged in shared memory.
///
/// # Source
/// The structure is that of CUTLASS's SIMT products and of "Anatomy of High-Performance Matrix
/// Multiplication" brought to GPUs (Nath, Tomov and Dongarra, "An Improved MAGMA GEMM for Fermi GPUs", 2010):
/// a thread's tile consists of parts of 4, a stride apart, so that the threads of a warp read shared memory
/// without conflicts. We pad the operands with zeros in shared memory, so that tiles need not divide the
/// sizes, and may share a sum among blocks, whose partial sums a second kernel adds up.
pub const GPU_MATMUL: Template = Template {
    name: "gpu-matmul",
    text: "GPU: block and thread tiles, shared memory, vector loads, split K, rasterization of blocks",
    serves: |s| is_contraction(s) && (SIMT.applies)(s),
    space: |s| algorithm::space("gpu-matmul", s, s, &[SIMT]),
    steps: |s, space, config| (SIMT.steps)(s, s, space, config),
    estimate: Some(|s, space, config| (SIMT.estimate)(s, s, space, config)),
};

/// SIMT product as an algorithm, for convolutions too.
pub(super) const SIMT: Algorithm<TemplateSetting> = Algorithm {
    name: "simt",
    applies: |s| s.target.gpu.is_some() && GpuProduct::of(&s.workload).is_some(),
    parameters: |s, _| parameters(s, &[product(s)]),
    constraints: |s, _| {
        let products = [product(s)];
        constraints(s, &products, &parameters(s, &products))
    },
    steps: |s, _, space, config| tiling(s, space, config).steps(&product(s)),
    estimate: |s, _, space, config| estimate(s, &product(s), space, config),
};

/// Whether a workload is a product, or a batch of them.
pub(super) fn is_contraction(s: &TemplateSetting) -> bool {
    matches!(s.workload.structure(), Structure::Contraction(_)) && !s.workload.has_integer_factors()
}

/// Product of a workload.
pub(super) fn product(s: &TemplateSetting) -> GpuProduct {
    GpuProduct::of(&s.workload).expect("the template serves products")
}

/// Number of adjacent elements of a thread, unless vectors hold more.
const NEXT: i64 = 4;
/// Minimum number of reduction steps that a block stages at a time.
const LEAST_DEPTH: i64 = 8;
/// Number of registers for addresses and counters: the least that ptxas needs besides tiles of 4 × 4 to 8 ×
/// 16. It uses more if they are available.
const OTHER_REGISTERS: i64 = 20;
/// Minimum number of elements of a sum for each block that shares it.
const LEAST_PART: i64 = 64;

/// Parameter of the number of blocks that share a sum of `k` elements (split-k).
pub(super) fn split_k(k: i64) -> Parameter {
    Parameter::ordinal("split_k", [1, 2, 4, 8, 16].into_iter().filter(|&n| n == 1 || k >= n * LEAST_PART))
}

/// Sizes of blocks up to the one that holds all.
fn blocks(n: i64) -> impl Iterator<Item = i64> {
    [1, 2, 4, 8].map(|n| n * LEAST_BLOCK).into_iter().filter(move |&b| b == LEAST_BLOCK || b / 2 < n)
}

/// Possible numbers of adjacent columns of a thread, which are lanes of a vector: four, and more if vectors
/// hold more, as on CPUs that are OpenCL devices.
fn lanes(s: &TemplateSetting) -> impl Iterator<Item = i64> + use<> {
    let most = s.target.lanes(s.workload.dtype);
    [NEXT, 8, 16].into_iter().filter(move |&n| n == NEXT || n <= most)
}

/// Whether threads may read operands in place, without shared memory: on devices whose shared memory may be
/// no faster than other memory. Adjacent columns must be contiguous.
fn may_read_directly(s: &TemplateSetting, products: &[GpuProduct]) -> bool {
    s.target.arch == Arch::Gpu(GpuApi::OpenCl) && products.iter().all(|p| !p.b.along_k && p.b.loads >= NEXT)
}

/// Operands that copies transpose on their way into shared memory, whose rows may be padded there: `a` of the
/// rows, `b` of the columns. Only of f32, whose elements are words of banks, and on GPUs.
fn transposed(s: &TemplateSetting, products: &[GpuProduct]) -> Vec<char> {
    let has_banks = s.target.arch != Arch::Gpu(GpuApi::OpenCl) && s.workload.dtype == DType::F32;
    let factors = [('a', products.iter().all(|p| p.a.along_k)), ('b', products.iter().all(|p| p.b.along_k))];
    factors.into_iter().filter(|(_, is_along_k)| has_banks && *is_along_k).map(|(name, _)| name).collect()
}

/// Parameters of tiled products; of several products, a further parameter chooses one.
pub(super) fn parameters(s: &TemplateSetting, products: &[GpuProduct]) -> Vec<Parameter> {
    let most = |of: &dyn Fn(&GpuProduct) -> i64| products.iter().map(of).max().expect("there is a product");
    let vector = |of: &dyn Fn(&GpuProduct) -> i64| {
        let most = products.iter().map(of).min().expect("there is a product").min(16 / s.workload.dtype.bytes() as i64);
        [1, 2, 4].into_iter().filter(move |v| *v <= most)
    };
    let k = most(&|p| p.k);
    let fits_rows = |b: &i64| products.iter().all(|p| !p.is_among_others || p.m % b == 0);
    let depths = [1, 2, 4, 8].map(|n| n * LEAST_DEPTH).into_iter().filter(|&b| b == LEAST_DEPTH || b / 2 < k);
    let widest = lanes(s).last().expect("there are four");
    let own = [
        Parameter::ordinal("block_m", blocks(most(&|p| p.m)).filter(fits_rows)),
        Parameter::ordinal("block_n", blocks(most(&|p| p.n))),
        Parameter::ordinal("block_k", depths),
        Parameter::ordinal("thread_m", [4, 8]),
        Parameter::ordinal("thread_n", [4, 8, 16, 32, 64].into_iter().filter(|&n| n <= NEXT * widest)),
        Parameter::ordinal("vector_a", vector(&|p| p.a.loads)),
        Parameter::ordinal("vector_b", vector(&|p| p.b.loads)),
        split_k(k),
        Parameter::categorical("order", &["rows", "columns", "groups"]),
        Parameter::ordinal("unroll_k", [1, 2, 4, 8, 16]),
        copies::ahead(s, 4),
        Parameter::ordinal("warp_n", [2, 4, 8, 16, 32]),
    ];
    let wide = (widest > NEXT).then(|| Parameter::ordinal("lanes", lanes(s)).optional());
    let direct = may_read_directly(s, products).then(|| Parameter::categorical("shared", &["yes", "no"]).optional());
    let pad = (!transposed(s, products).is_empty()).then(|| Parameter::ordinal("pad", [0, 1]).optional());
    own.into_iter().chain(copies::way(s)).chain(wide).chain(direct).chain(pad).collect()
}

/// Number of rows of blocks in a group.
const GROUP: i64 = 8;

/// Size of the product that the first parameter selects, as an expression.
fn size(products: &[GpuProduct], parameters: &[Parameter], of: impl Fn(&GpuProduct) -> i64) -> String {
    let sizes: Vec<i64> = products.iter().map(of).collect();
    match (&sizes[..], &parameters[0].domain) {
        ([first, second], Domain::Ordinal(values)) if first != second => {
            format!("({first} if {} == {} else {second})", parameters[0].name, values[0])
        }
        _ => sizes[0].to_string(),
    }
}

/// Constraints between the parameters. If there are several products, the first parameter chooses one.
pub(super) fn constraints(s: &TemplateSetting, products: &[GpuProduct], parameters: &[Parameter]) -> Vec<Constraint> {
    let gpu = gpu(s);
    let say = |name: &str, text: &str| constraint(name, text, parameters);
    let words = words(s);
    let threads = "(block_m // thread_m) * (block_n // thread_n)";
    let loaded = loaded_ahead(s, threads);
    // Sums, and the operands of a step and of the next one.
    let tile = "thread_m * thread_n + 2 * (thread_m + thread_n)";
    let registers = format!("{words} * ({tile} + {loaded}) + {OTHER_REGISTERS}");
    let mut constraints = vec![
        say("threads", &format!("{threads} <= {} and {threads} % {} == 0", gpu.most_threads, gpu.warp_size)),
        in_registers(s, &registers, threads, parameters),
        say("warp", "(block_n // thread_n) % warp_n == 0"),
        say("unrolled", "unroll_k <= block_k and unroll_k * thread_m * thread_n <= 1024"),
    ];
    let padded = transposed(s, products);
    let elements = format!("(block_m + block_n{}) * block_k", padding(&padded));
    constraints.extend(copies::constraints(s, &elements, "", gpu.shared_bytes, parameters));
    constraints.extend(of_blocks(s, products, threads, parameters));
    // A round of the loop within a step is of whole vectors then.
    constraints.extend(
        padded
            .iter()
            .map(|factor| say(&format!("padded_{factor}"), &format!("pad == 0 or unroll_k % vector_{factor} == 0"))),
    );
    constraints.extend(advice(s, products, threads, parameters));
    let has = |name: &str| parameters.iter().any(|p| p.name == name);
    if has("lanes") {
        constraints.push(say("lanes", "thread_n % lanes == 0"));
    }
    if has("shared") {
        let [n, k] = [|p: &GpuProduct| p.n, |p: &GpuProduct| p.k].map(|of| size(products, parameters, of));
        let none = format!("block_k == {LEAST_DEPTH} and vector_a == 1 and vector_b == 1 and ahead == 0");
        let is_whole = format!("{n} % block_n == 0 and {k} % (block_k * split_k) == 0");
        constraints.push(say("shared", &format!("shared == 'yes' or {none} and {is_whole}")));
    }
    constraints
}

/// Elements that pad a step's rows of these operands in shared memory, as [`Tiling::row`] has them, as the
/// end of a sum.
fn padding(factors: &[char]) -> String {
    let of = |factor: &char| {
        let (block, thread) = if *factor == 'a' { ("block_m", "thread_m") } else { ("block_n", "thread_n") };
        let row = format!("{block} * {NEXT} // {thread}");
        let each = format!("max(32 * vector_{factor} // block_k, {NEXT})");
        format!(" + pad * {thread} // {NEXT} * (({each} - {row}) % 32)")
    };
    factors.iter().map(of).collect()
}

/// Multiples of a GPU's multiprocessors: with so many blocks none gains by sharing sums with others.
const ENOUGH_BLOCKS: i64 = 4;
/// Least extent of a reduction for which operands of later steps are loaded ahead.
const LEAST_AHEAD: i64 = 128;
/// Steps of the sum that are repeated in the code, at least: between rounds all threads wait for shared
/// memory.
const LEAST_UNROLLED: i64 = 8;
/// Neighbouring threads that share rows, at most: more read other vectors of columns in each access.
const MOST_ALONG_COLUMNS: i64 = 8;

/// Advice on the parameters on GPUs, from what an H100 measured for products of 1024³ and 4096³ on
/// 2026-11-28: none of it cost more than 1 %, against what was fastest beside it.
fn advice(s: &TemplateSetting, products: &[GpuProduct], threads: &str, parameters: &[Parameter]) -> Vec<Constraint> {
    if s.target.arch == Arch::Gpu(GpuApi::OpenCl) {
        return Vec::new();
    }
    let say = |name: &str, text: &str| constraint(name, text, parameters).into_advice();
    let [m, n, k] =
        [|p: &GpuProduct| p.m, |p: &GpuProduct| p.n, |p: &GpuProduct| p.k].map(|of| size(products, parameters, of));
    let batch = size(products, parameters, |p| p.batch.unwrap_or(1));
    let enough = ENOUGH_BLOCKS * i64::from(gpu(s).n_units).max(1);
    let blocks = format!("{batch} * ceil_div({m}, block_m) * ceil_div({n}, block_n)");
    let mut advice = vec![
        say("rounds", &format!("unroll_k >= {LEAST_UNROLLED}")),
        say("columns_of_warps", &format!("warp_n <= {MOST_ALONG_COLUMNS}")),
        say("blocks_are_few", &format!("split_k == 1 or {blocks} * (split_k // 2) < {enough}")),
    ];
    let is_async = copies::way(s).is_some();
    let registers = if is_async { "copies == 'registers' and " } else { "" };
    if products.iter().all(|p| p.k >= LEAST_AHEAD) {
        advice.push(say("loaded_ahead", &format!("not ({registers}ahead == 0)")));
    }
    for (name, factor, block, size) in [("a", products[0].a, "block_m", &m), ("b", products[0].b, "block_n", &n)] {
        let widest = parameters.iter().find(|p| p.name == format!("vector_{name}")).map_or(1, |p| match &p.domain {
            Domain::Ordinal(widths) => widths.last().copied().unwrap_or(1),
            _ => 1,
        });
        if widest == 1 {
            continue;
        }
        let is_cut = if factor.along_k { format!("{k} % (block_k * split_k)") } else { format!("{size} % {block}") };
        // A thread has a vector to load at least, and asynchronous copies that transpose go element by
        // element.
        let fits = format!("{block} * block_k >= 2 * vector_{name} * {threads}");
        let alone = if factor.along_k && is_async { " or copies == 'async'" } else { "" };
        let text = format!("vector_{name} == {widest} or not ({fits}) or {is_cut} != 0{alone}");
        advice.push(say(&format!("widest_vectors_of_{name}"), &text));
        if factor.along_k && is_async {
            advice.push(say(&format!("transposed_{name}"), &format!("copies == 'registers' or {is_cut} != 0")));
        }
    }
    advice
}

/// Registers of 32 bits that hold one element while it is computed with.
fn words(s: &TemplateSetting) -> i64 {
    s.workload.dtype.arithmetic().bytes() as i64 / 4
}

/// Number of registers of each of `threads` threads for elements that are loaded ahead, as an expression: an
/// element that is loaded singly has an address, one that is gathered for a convolution also a condition, and
/// two f16 or bf16 elements that are loaded together share a register.
pub(super) fn loaded_ahead(s: &TemplateSetting, threads: &str) -> String {
    let is_loaded = copies::in_registers(s);
    let is_gathered = matches!(s.workload.structure(), Structure::Window(_));
    let (alone, each) = match s.workload.dtype.is_half() {
        true => (4, " // 2"),
        false => (if is_gathered { 4 } else { 2 }, ""),
    };
    let of = |factor: char, block: char| format!("block_{block} * ({alone} if vector_{factor} == 1 else 1)");
    format!("{is_loaded} * ({} + {}) * block_k // ({threads}){each}", of('a', 'm'), of('b', 'n'))
}

/// Number of registers for a copy of one element: its source and destination.
const COPY_REGISTERS: i64 = 3;

/// Number of registers of each of `threads` threads for copies of single elements that are not loaded ahead,
/// as an expression.
fn copied_alone(threads: &str, parameters: &[Parameter]) -> String {
    let of = |factor: char, block: char| {
        let n = format!("min(block_{block} * block_k // ({threads}), {})", copies::AT_A_TIME);
        format!("({n} if vector_{factor} == 1 else 0)")
    };
    format!("{} * {COPY_REGISTERS} * ({} + {})", copies::are_alone(parameters), of('a', 'm'), of('b', 'n'))
}

/// Constraints on the registers of a thread, and of all threads of a block. `registers`: registers of a
/// thread besides those for copies of single elements, of which each thread has fewer the more threads there
/// are, as an expression.
pub(super) fn in_registers(
    s: &TemplateSetting,
    registers: &str,
    threads: &str,
    parameters: &[Parameter],
) -> Constraint {
    let gpu = gpu(s);
    let mut copied = copied_alone(threads, parameters);
    if parameters.iter().any(|p| p.name == "shared") {
        copied = format!("({copied} if shared == 'yes' else 0)");
    }
    let text = format!(
        "{registers} + {copied} <= {} and ({registers}) * {threads} <= {}",
        gpu.registers_per_thread, gpu.registers_per_block
    );
    constraint("registers", &text, parameters)
}

/// Constraints on blocks: each of `threads` threads, an expression, has something to copy, and the grid fits
/// the device.
pub(super) fn of_blocks(
    s: &TemplateSetting,
    products: &[GpuProduct],
    threads: &str,
    parameters: &[Parameter],
) -> Vec<Constraint> {
    let gpu = gpu(s);
    let say = |name: &str, text: &str| constraint(name, text, parameters);
    let [m, n, k] =
        [|p: &GpuProduct| p.m, |p: &GpuProduct| p.n, |p: &GpuProduct| p.k].map(|of| size(products, parameters, of));
    let batch = size(products, parameters, |p| p.batch.unwrap_or(1));
    let most_blocks = gpu.most_blocks_along[1].min(gpu.most_blocks_along[2]);
    let is_split = parameters.iter().any(|p| p.name == "split_k");
    let (split, depth) = if is_split { (" * split_k", "(block_k * split_k)") } else { ("", "block_k") };
    let mut constraints = vec![
        say(
            "copied",
            &format!("block_m * block_k >= vector_a * {threads} and block_n * block_k >= vector_b * {threads}"),
        ),
        say("groups", &format!("order != 'groups' or ceil_div({m}, block_m) % {GROUP} == 0")),
        say(
            "grid",
            &format!(
                "ceil_div({m}, block_m) <= {most_blocks} and ceil_div({n}, block_n) <= {most_blocks} and \
                 {batch}{split} * (ceil_div({m}, block_m * {GROUP}) if order == 'groups' else 1) <= {most_blocks}"
            ),
        ),
    ];
    // Padded operands are loaded element by element.
    for (name, factor, block, size) in [("a", products[0].a, "block_m", m), ("b", products[0].b, "block_n", n)] {
        let is_whole = if factor.along_k { format!("{k} % {depth}") } else { format!("{size} % {block}") };
        constraints.push(say(&format!("vectors_of_{name}"), &format!("vector_{name} == 1 or {is_whole} == 0")));
    }
    constraints
}

/// Rasterization of the blocks in a configuration.
pub(super) fn order(space: &Space, config: &Config) -> Rasterization {
    match space.text(config, "order").as_str() {
        "rows" => Rasterization::Rows,
        "columns" => Rasterization::Columns,
        "groups_4" => Rasterization::Groups(4),
        "groups_2" => Rasterization::Groups(2),
        "groups_of_columns" => Rasterization::GroupsOfColumns(GROUP),
        "groups_of_columns_4" => Rasterization::GroupsOfColumns(4),
        "groups_of_columns_2" => Rasterization::GroupsOfColumns(2),
        _ => Rasterization::Groups(GROUP),
    }
}

/// Tiling of a configuration.
pub(super) fn tiling(s: &TemplateSetting, space: &Space, config: &Config) -> Tiling {
    let int = |name: &str| space.int(config, name);
    let tile = |block: &str, each: &str, next: i64| {
        let [block, each] = [block, each].map(int);
        BlockTile { strides: each / next, threads: block / each, elements: next }
    };
    let columns = tile("block_n", "thread_n", if space.has("lanes") { int("lanes") } else { NEXT });
    let lanes = 8 * columns.elements * s.workload.dtype.bytes() as i64 <= i64::from(s.target.vector_bits);
    Tiling {
        rows: tile("block_m", "thread_m", NEXT),
        columns,
        warp: int("warp_n"),
        products: 1,
        depth: int("block_k"),
        inner: int("unroll_k"),
        unrolled: true,
        fragments: Fragments::Step,
        split: int("split_k"),
        order: order(space, config),
        vectors: [int("vector_a"), int("vector_b")],
        copies: Copies::of(space, config),
        lanes,
        shared: !space.has("shared") || space.text(config, "shared") == "yes",
        padded: space.has("pad") && int("pad") == 1,
    }
}

/// Number of accumulators of all threads of a compute unit from which on its arithmetic is busy: a thread
/// with many accumulators need not wait for one of them.
const FILLED: i64 = 128 * 128;

// How threads wait for each other and for shared memory on an H100, from 384 configurations of 4096³,
// measured on 2026-11-28: model and times agree in rank to 0.87, and to 0.65 without these.

/// Cycles between two iterations of the loop within a step, if it is not fully unrolled.
const BETWEEN_ROUNDS: f64 = 700.0;
/// Cycles of a step whose elements are loaded when they are needed, and of one whose elements are loaded a
/// step ahead into a single buffer.
const LOADED_LATE: f64 = 600.0;
const ONE_BUFFER: f64 = 300.0;
/// Number of instructions of an asynchronous copy of a single element, including those that wait for the same
/// unit.
const ASYNC_ELEMENT: f64 = 40.0;

/// Number of instructions per thread and step that copy operands to shared memory, and the cycles of shared
/// memory among them, for which four warps wait.
fn copies(t: &Tiling, p: &GpuProduct) -> [f64; 2] {
    let n_threads = t.threads().n() as f64;
    let each = t.operands(p).map(|operand| {
        let (factor, tile, vector) = operand;
        let elements = tile.extent() as f64 / n_threads;
        let vectors = elements / vector as f64;
        // Along the sum, neighbours in memory are no neighbours in shared memory: they are stored one by one.
        // Vectors of 16 bytes go to each bank four times.
        let (stored, wavefronts) = match factor.along_k {
            true => (elements, elements * t.bank_conflicts(operand) as f64),
            false => (vectors, 4.0 * vectors),
        };
        match t.copies {
            Copies::Async(_) | Copies::Bulk(_) if factor.along_k => [ASYNC_ELEMENT * elements, wavefronts],
            Copies::Async(_) | Copies::Bulk(_) => [4.0 * stored, wavefronts],
            Copies::Registers(_) => [8.0 * vectors + 2.0 * stored, 8.0 * vectors + wavefronts],
        }
    });
    [each[0][0] + each[1][0], each[0][1] + each[1][1]]
}

/// Cycles of a step in which the threads of a block wait for each other.
fn between_steps(t: &Tiling) -> f64 {
    let late = match t.copies {
        Copies::Registers(0) => LOADED_LATE,
        Copies::Registers(1) => ONE_BUFFER,
        _ => 0.0,
    };
    BETWEEN_STEPS + BETWEEN_ROUNDS * (t.depth / t.inner - 1) as f64 + late
}

/// Estimated cycles: blocks of multiply-adds with their reads, then the kernel that adds up partial sums.
pub(super) fn estimate(s: &TemplateSetting, p: &GpuProduct, space: &Space, config: &Config) -> f64 {
    let (t, gpu) = (tiling(s, space, config), gpu(s));
    let bytes = s.workload.dtype.bytes() as f64;
    let division = t.division();
    let [bm, bn] = division.tile;
    let depth = division.padded_sum(p) / t.split;
    let batch = p.batch.unwrap_or(1);
    let n = batch * t.split * ceil_div(p.m, bm) * ceil_div(p.n, bn);
    let (tm, tn) = (t.rows.each(), t.columns.each());
    let products = (tm * tn) as f64;
    let [copied, stored] = copies(&t, p);
    let loads = if t.shared { (tm + tn) as f64 / 4.0 + copied } else { tm as f64 + tn as f64 / 4.0 };
    let others = loads + 3.0 / t.inner as f64;
    // Four warps begin an instruction in a cycle, and one of them an access to shared memory: of 16 bytes a
    // lane these take two cycles at least.
    let issued = (products + others) / 4.0;
    let accesses = if t.shared { (tm + tn) as f64 / 2.0 + stored } else { 0.0 };
    let loaded = t.copies.in_registers((bm + bn) * t.depth / t.threads().n());
    let rows = t.operands(p).map(|operand| operand.1.strides * t.row(operand));
    let blocks = Blocks {
        n,
        threads: t.threads().n(),
        registers: words(s) * (tm * tn + 2 * (tm + tn) + loaded) + OTHER_REGISTERS,
        shared_bytes: t.copies.n() * (rows[0] + rows[1]) * t.depth * bytes as i64,
        fmas: (bm * bn * depth) as f64 * bytes / 4.0,
        efficiency: products / 4.0 / issued.max(accesses),
        bytes: ((bm + bn) * depth + bm * bn) as f64 * bytes,
        steps: (depth / t.depth) as f64,
        stages: if t.shared { t.copies.in_flight() } else { 1 },
        exposed: if t.shared { between_steps(&t) } else { 0.0 },
        stores: 0.0,
        begins: 0.0,
        fill: (FILLED / (tm * tn)).clamp(128, 512),
    };
    let lanes = s.target.lanes(s.workload.dtype);
    let cycles = if lanes > NEXT { cycles_of_cores(s, &t, lanes, &blocks) } else { blocks.cycles(&s.target, &gpu) };
    let slower = if t.padded { UNPROVEN_WAY } else { 1.0 };
    slower * cycles + sums_of_parts(s, p, t.split)
}

/// Cycles of the blocks of a tiling on a CPU with vectors of `lanes` lanes: each core runs one block after
/// another. Its threads take turns between barriers, with their sums in memory meanwhile: on Zen 4 with
/// Intel's runtime, that leaves two fifths of the speed.
fn cycles_of_cores(s: &TemplateSetting, t: &Tiling, lanes: i64, blocks: &Blocks) -> f64 {
    let by_barriers = if t.shared { 0.4 } else { 1.0 };
    let used = by_barriers * (t.columns.elements as f64 / lanes as f64).min(1.0) * blocks.efficiency;
    let rounds = ceil_div(blocks.n, i64::from(gpu(s).n_units).max(1));
    // Two vectors of multiply-adds in each cycle.
    rounds as f64 * blocks.fmas / (used * 2.0 * lanes as f64)
}

/// Cost of the kernel that adds up partial sums, if blocks share sums (split-k), in cycles.
pub(super) fn sums_of_parts(s: &TemplateSetting, p: &GpuProduct, split: i64) -> f64 {
    if split == 1 {
        return 0.0;
    }
    let bytes = (split * p.batch.unwrap_or(1) * p.m * p.n) as f64 * s.workload.dtype.bytes() as f64;
    START + 2.0 * bytes / (20.0 * f64::from(gpu(s).n_units))
}
