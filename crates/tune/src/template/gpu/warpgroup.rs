//! Matrix products on tensor cores by warpgroups (`wgmma`).

use super::super::algorithm::{self, Algorithm};
use super::super::step::{accumulate, bind, exact, fuse, inline, reorder, shared, tensorize, unroll, vectorize};
use super::super::{Template, TemplateSetting, ceil_div};
use super::copies::{self, Copies};
use super::matmul::{in_registers, is_contraction, loaded_ahead, of_blocks, order, split_k, sums_of_parts};
use super::model::{BARRIER, Blocks, UNPROVEN_WAY};
use super::parts::{BlockThreads, Copied};
use super::product::{GpuFactor, GpuProduct, Rasterization, bind_blocks, bind_units};
use super::tensor::{bind_warps, division, stores};
use super::{constraint, gpu};
use tilewright_ir::gpu::tensor::{self, WARP};
use tilewright_ir::gpu::warpgroup::{COLUMNS, MOST_COLUMNS, ROW_BYTES, ROWS, WARPS};
use tilewright_ir::gpu::{bulk, cluster, producer_warp, store};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{DType, LoopKind, Step, TensorProduct};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Warpgroup tiles on tensor cores, which read both operands from shared memory.
///
/// # Source
/// The structure is that of CUTLASS's products with `wgmma`: tiles of blocks and of warpgroups, operands in
/// swizzled rows of 128 bytes, along the reduction or, in half precision, across it, and a producer warp that
/// only copies them.
pub const GPU_MATMUL_WGMMA: Template = Template {
    name: "gpu-matmul-wgmma",
    text: "GPU: wgmma by warpgroups, on f16, bf16, or f32 as one or three TF32 products",
    serves: |s| is_contraction(s) && (WGMMA.applies)(s),
    space: |s| algorithm::space("gpu-matmul-wgmma", s, s, &[WGMMA]),
    steps: |s, space, config| (WGMMA.steps)(s, s, space, config),
    estimate: Some(|s, space, config| (WGMMA.estimate)(s, s, space, config)),
};

/// Warpgroup product as an algorithm.
pub(super) const WGMMA: Algorithm<TemplateSetting> = Algorithm {
    name: "wgmma",
    applies: |s| {
        let w = &s.workload;
        let fits = |p: GpuProduct| !p.is_among_others || p.m % ROWS == 0;
        s.target.has_wgmma() && !w.exact && w.fills_tiles() && GpuProduct::of(w).is_some_and(fits)
    },
    parameters: |s, _| parameters(s, &product(s)),
    constraints: |s, _| {
        let p = product(s);
        constraints(s, &p, &parameters(s, &p))
    },
    steps: |s, _, space, config| steps(s, &product(s), space, config),
    estimate: |s, _, space, config| estimate(s, &product(s), space, config),
};

/// Maximum number of pipeline stages: small blocks need many, since computing one takes less time than a
/// copy.
const MOST_STAGES: i64 = 8;
/// Divisor of the bytes of rows that are copied in boxes.
const BOX_BYTES: i64 = 16;
/// Columns of the smallest block.
const LEAST_COLUMNS: i64 = 32;
/// Number of elements of a load along reduction steps that are not contiguous.
const APART: [i64; 2] = [1, 4];
/// Cycles that tensor cores idle between two dependent steps, a guess.
const IDLE: f64 = 60.0;
/// Multiply-adds of a multiprocessor's threads in the time in which tensor cores begin an instruction, a
/// guess.
const BEGUN: f64 = 128.0 * 2.0;
/// Bytes that tensor cores read from shared memory in a cycle.
const SHARED_BYTES: f64 = 128.0;

// Instructions of a thread for an element that it copies, and for a load; cycles of clusters. From
// 2,300 configurations on an H100, measured on 2026-11-28: of eight products, model and times agree in rank
// to 0.89 on average, and to 0.82 without these.

/// Instructions for an element in two parts, and for a load of several.
const IN_PARTS: [f64; 2] = [11.0, 6.0];
/// Instructions for an element that is rounded to TF32, and for a load of several.
const ROUNDED: [f64; 2] = [2.0, 4.0];
/// Instructions for an element of 16 bits, and for a load of several.
const AS_IT_IS: [f64; 2] = [1.0, 8.0];
/// Instructions for an asynchronous copy by a thread.
const ASYNC: f64 = 6.0;
/// Cycles in which blocks of a cluster wait for each other when they begin and when they end.
const CLUSTER: f64 = 2000.0;
/// Number of registers for addresses, counters and data on the way to shared memory.
const OTHER_REGISTERS: i64 = 40;
/// Number of threads of the producer warp and of converter warps.
const BESIDE_PARTS: i64 = producer_warp::THREADS + producer_warp::CONVERTER_THREADS;
/// Number of registers besides sums if boxes are copied: ptxas needs 26, rounded up to a multiple of 8.
const BOX_REGISTERS: i64 = 32;

/// Penalty in cycles per tile for variants that have not run on any GPU, so that first guesses use the
/// measured variant, while searches use whichever is faster.
const UNPROVEN: f64 = 1.0;

/// Rasterizations of the blocks: the first three, as elsewhere, then groups of fewer rows and of columns.
const ORDERS: [&str; 8] = [
    "rows",
    "columns",
    "groups",
    "groups_4",
    "groups_2",
    "groups_of_columns",
    "groups_of_columns_4",
    "groups_of_columns_2",
];
/// Required divisor of an output's row length, so that tiles begin at multiples of 16 bytes.
const IN_LINES: i64 = 4;

/// Product of a workload, transposed if threads may then load the operand of the rows from boxes.
fn product(s: &TemplateSetting) -> GpuProduct {
    let transposed = || GpuProduct::transposed(&s.workload).filter(|p| is_loaded(s, p));
    let own = super::matmul::product(s);
    if is_loaded(s, &own) || are_boxes(s, &own) { own } else { transposed().unwrap_or(own) }
}

/// Whether threads may load the operand of the rows, which is not contiguous along the reduction, into
/// registers from boxes, so that it need not be transposed. The operand of the columns must be contiguous
/// along the reduction.
fn is_loaded(s: &TemplateSetting, p: &GpuProduct) -> bool {
    let dtype = s.workload.dtype;
    let is_whole = p.a.loads * dtype.bytes() as i64 == BOX_BYTES;
    s.workload.takes_tf32() && is_turned(dtype, &p.a) && is_whole && is_box(dtype, &p.b) && copies::way(s).is_some()
}

/// Whether the threads of a configuration load the operand of the rows from boxes.
fn loads_rows(s: &TemplateSetting, p: &GpuProduct, copies: Copies) -> bool {
    matches!(copies, Copies::Bulk(_)) && is_loaded(s, p)
}

/// Number of elements of an operand's row in shared memory.
fn row(dtype: DType) -> i64 {
    ROW_BYTES / dtype.bytes() as i64
}

/// Whether an operand is transposed on its way to shared memory: tensor cores take f32 K-major only, f16 and
/// bf16 MN-major too.
fn is_turned(dtype: DType, factor: &GpuFactor) -> bool {
    !factor.along_k && !dtype.is_half()
}

fn parameters(s: &TemplateSetting, p: &GpuProduct) -> Vec<Parameter> {
    let dtype = s.workload.dtype;
    let row = row(dtype);
    let sizes = |least: i64, n: i64| {
        let all = [32, 64, 128, 256].into_iter();
        all.filter(move |&b| b == least || (b > least && b / 2 < n))
    };
    let vector = |factor: &GpuFactor| {
        let turned = is_turned(dtype, factor);
        let all: &[i64] = if turned { &APART } else { &[1, 2, 4, 8] };
        let most = if turned { APART[1] } else { factor.loads };
        all.iter().copied().filter(move |v| *v <= most)
    };
    // Boxes may have any number of rows.
    let columns = sizes(least_columns(dtype, &p.b), p.n);
    let between = [96, 160, 192, 224].into_iter().filter(|b| are_boxes(s, p) && b / 2 < p.n);
    let mut columns: Vec<i64> = columns.chain(between).collect();
    columns.sort_unstable();
    let fits_rows = |b: &i64| !p.is_among_others || p.m % b == 0;
    let own = [
        Parameter::ordinal("block_m", sizes(ROWS, p.m).filter(fits_rows)),
        Parameter::ordinal("block_n", columns),
        Parameter::ordinal("block_k", [row, 2 * row].into_iter().filter(|&b| b == row || b / 2 < p.k)),
        Parameter::ordinal("groups_m", [1, 2, 4]),
        Parameter::ordinal("groups_n", [1, 2]),
        Parameter::ordinal("vector_a", vector(&p.a)),
        Parameter::ordinal("vector_b", vector(&p.b)),
        Parameter::categorical("order", &ORDERS),
        copies::ahead(s, MOST_STAGES),
        split_k(p.k).optional(),
        Parameter::categorical("precision", precisions(s)).optional(),
    ];
    let ways: &[&str] = match precisions(s) {
        // Numbers are split into parts on the way to shared memory, or after it.
        ["tf32x3"] if are_boxes(s, p) => &["registers", "bulk"],
        ["tf32x3"] => &["registers"],
        _ if is_loaded(s, p) || is_box(dtype, &p.a) || is_box(dtype, &p.b) => &["registers", "async", "bulk"],
        _ => &["registers", "async"],
    };
    let way = copies::way(s).map(|_| Parameter::categorical("copies", ways).optional());
    // Sums of products in parts restart in each step.
    let goes_on = Some("in_flight").filter(|_| precisions(s) != ["tf32x3"]);
    let of_boxes = goes_on.into_iter().chain(["producer", "persistent"]);
    let of_boxes = of_boxes.map(|name| Parameter::ordinal(name, [0, 1]).optional());
    let cluster = Parameter::ordinal("cluster", [1, cluster::BLOCKS]).optional();
    let teams = Parameter::ordinal("teams", [1, producer_warp::TEAMS]).optional();
    let of_boxes = of_boxes.into_iter().chain([cluster, teams]).filter(|_| are_boxes(s, p));
    let ways = [("exchanged", may_exchange(s, p)), ("bulk", may_store_boxes(s, p))];
    let ways: Vec<&str> =
        ["direct"].into_iter().chain(ways.iter().filter(|(_, may)| *may).map(|(way, _)| *way)).collect();
    let store = Some(Parameter::categorical("store", &ways).optional()).filter(|_| ways.len() > 1);
    own.into_iter().chain(way).chain(of_boxes).chain(store).collect()
}

/// Whether warps may store boxes of the output.
fn may_store_boxes(s: &TemplateSetting, p: &GpuProduct) -> bool {
    is_contraction(s) && are_boxes(s, p) && p.stores % IN_LINES == 0
}

/// Whether threads may exchange elements of the output, so that each stores 16 bytes of a row.
fn may_exchange(s: &TemplateSetting, p: &GpuProduct) -> bool {
    s.workload.dtype.is_half() && p.stores % IN_LINES == 0
}

/// Whether one thread may copy both operands in boxes.
fn are_boxes(s: &TemplateSetting, p: &GpuProduct) -> bool {
    let is_box = |factor| is_box(s.workload.dtype, factor);
    is_loaded(s, p) || copies::way(s).is_some() && is_box(&p.a) && is_box(&p.b)
}

/// Precisions in which numbers may be multiplied.
fn precisions(s: &TemplateSetting) -> &'static [&'static str] {
    match s.workload.takes_tf32() {
        _ if s.workload.dtype.is_half() => &["halves"],
        true => &["tf32", "tf32x3"],
        false => &["tf32x3"],
    }
}

/// Tensor core operation of a configuration.
fn precision(space: &Space, config: &Config) -> TensorProduct {
    if space.text(config, "precision") == "tf32x3" { TensorProduct::Wgmmax3 } else { TensorProduct::Wgmma }
}

/// Whether the products of a reduction step are in flight while those of the next one are issued.
fn goes_on(space: &Space, config: &Config) -> bool {
    has(space, config, "in_flight")
}

/// Whether there is a producer warp, which only copies boxes.
fn has_producer(space: &Space, config: &Config) -> bool {
    has(space, config, "producer")
}

/// Whether blocks are persistent: one for each compute unit, which processes several tiles.
fn is_persistent(space: &Space, config: &Config) -> bool {
    has(space, config, "persistent")
}

/// Number of neighbouring blocks that copy the operand that they share for each other.
fn cluster(space: &Space, config: &Config) -> i64 {
    if space.has("cluster") { space.int(config, "cluster") } else { 1 }
}

/// Number of teams of warpgroups, which take tiles in turns.
fn teams(space: &Space, config: &Config) -> i64 {
    if space.has("teams") { space.int(config, "teams") } else { 1 }
}

/// Whether threads exchange elements of a row before they store it.
fn exchanges(space: &Space, config: &Config) -> bool {
    space.has("store") && space.text(config, "store") == "exchanged"
}

/// Whether warps store boxes of the output.
fn stores_boxes(space: &Space, config: &Config) -> bool {
    space.has("store") && space.text(config, "store") == "bulk"
}

fn has(space: &Space, config: &Config, name: &str) -> bool {
    space.has(name) && space.int(config, name) > 0
}

/// Columns of the smallest block: rows of an operand that is not contiguous along the reduction are whole.
fn least_columns(dtype: DType, factor: &GpuFactor) -> i64 {
    if factor.along_k || is_turned(dtype, factor) { LEAST_COLUMNS } else { row(dtype) }
}

/// Whether one thread may copy boxes of an operand: rows in the order of tensor cores, which begin at
/// multiples of 16 bytes.
fn is_box(dtype: DType, factor: &GpuFactor) -> bool {
    !is_turned(dtype, factor) && factor.loads * dtype.bytes() as i64 == BOX_BYTES
}

fn constraints(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let group = WARPS * i64::from(gpu(s).warp_size);
    let threads = format!("{group} * groups_m * groups_n");
    let mut constraints = of_block(s, p, &threads, parameters);
    constraints.extend(of_blocks(s, std::slice::from_ref(p), &threads, parameters));
    constraints.extend(of_orders(s, p, parameters));
    constraints.extend(of_stores(s, p, parameters));
    constraints.extend(of_precisions(s, p, parameters));
    if are_boxes(s, p) {
        constraints.extend(of_boxes(s, p, parameters));
    }
    constraints.extend(of_vectors(s, p, parameters));
    constraints
}

/// Constraints on a block: its warpgroups, threads and registers, its code, and its shared memory.
fn of_block(s: &TemplateSetting, p: &GpuProduct, threads: &str, parameters: &[Parameter]) -> Vec<Constraint> {
    let (gpu, dtype) = (gpu(s), s.workload.dtype);
    let say = |name: &str, text: &str| constraint(name, text, parameters);
    let with_producer = |n: String| match are_boxes(s, p) {
        true => format!("({threads} * teams + {n} * producer)"),
        false => threads.to_owned(),
    };
    let launched = match precisions(s) {
        ["halves"] => with_producer(producer_warp::THREADS.to_string()),
        ["tf32x3"] => with_producer(BESIDE_PARTS.to_string()),
        _ => with_producer(format!("({BESIDE_PARTS} if precision == 'tf32x3' else {})", producer_warp::THREADS)),
    };
    let tiles = format!("(block_m // ({ROWS} * groups_m))");
    let loaded = loaded_ahead(s, threads);
    // With numbers in parts, sums restart in each step, and shared memory holds both parts.
    let twice = match precisions(s) {
        ["tf32x3"] => "2",
        ["halves"] => "1",
        _ => "(2 if precision == 'tf32x3' else 1)",
    };
    let others = match are_boxes(s, p) {
        true => format!("({BOX_REGISTERS} if copies == 'bulk' else {OTHER_REGISTERS})"),
        false => OTHER_REGISTERS.to_string(),
    };
    // Four registers for 8 steps of 64 rows.
    let of_rows = match is_loaded(s, p) {
        true => format!(" + ({tiles} * block_k // 2 if copies == 'bulk' else 0)"),
        false => String::new(),
    };
    let registers = format!("{tiles} * block_n * {twice} // (2 * groups_n) + {loaded} + {others}{of_rows}");
    let columns = if p.b.along_k || is_turned(dtype, &p.b) { COLUMNS } else { row(dtype) };
    let mut constraints = vec![
        say(
            "warpgroups",
            &format!(
                "block_m % ({ROWS} * groups_m) == 0 and block_n % ({columns} * groups_n) == 0 and \
                 block_n <= {MOST_COLUMNS} * groups_n"
            ),
        ),
        say("threads", &format!("{launched} <= {}", gpu.most_threads)),
        // Each of a multiprocessor's four partitions has registers for the same number of warps: one more
        // warp counts for each.
        in_registers(s, &registers, &with_producer((WARPS * i64::from(gpu.warp_size)).to_string()), parameters),
        say("unrolled", &format!("{tiles} * block_k * block_n // groups_n <= 16384")),
    ];
    let of_boxes = match may_store_boxes(s, p) {
        true => {
            let bytes = WARPS * store::SLOTS * store::BOX_BYTES;
            format!(" + ({bytes} * groups_m * groups_n * teams if store == 'bulk' else 0)")
        }
        false => String::new(),
    };
    let of_teams =
        if are_boxes(s, p) { format!(" + {} * (teams - 1)", 2 * bulk::BARRIER_BYTES) } else { String::new() };
    // One more barrier for each stage of numbers in parts.
    let of_parts = match precisions(s) {
        ["halves"] => String::new(),
        _ if !are_boxes(s, p) => String::new(),
        ["tf32x3"] => format!(" + {} * ahead * producer", bulk::BARRIER_BYTES),
        _ => format!(" + ({} * ahead * producer if precision == 'tf32x3' else 0)", bulk::BARRIER_BYTES),
    };
    let beside = of_boxes + &of_teams + &of_parts;
    let elements = format!("(block_m + block_n) * block_k * {twice}");
    constraints.extend(copies::constraints(s, &elements, &beside, gpu.most_shared_bytes, parameters));
    constraints
}

/// Constraints on orders of blocks that take groups of rows or of columns: like `groups` and `grid`, which
/// cover the group of eight rows.
fn of_orders(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let split = if parameters.iter().any(|p| p.name == "split_k") { " * split_k" } else { "" };
    let (most, batch) = (gpu(s).most_blocks_along[2], p.batch.unwrap_or(1));
    let of_groups = |name: &str, block: &str, size: i64, groups: &[(i64, &str)]| {
        let of = |(group, order): &(i64, &str)| {
            let whole = format!("{block} * {group}");
            format!(
                "(order != '{order}' or ceil_div({size}, {block}) % {group} == 0 and \
                 {batch}{split} * ceil_div({size}, {whole}) <= {most})"
            )
        };
        constraint(name, &groups.iter().map(of).collect::<Vec<_>>().join(" and "), parameters)
    };
    let columns = [(8, "groups_of_columns"), (4, "groups_of_columns_4"), (2, "groups_of_columns_2")];
    vec![
        of_groups("groups_of_rows", "block_m", p.m, &[(4, "groups_4"), (2, "groups_2")]),
        of_groups("groups_of_columns", "block_n", p.n, &columns),
    ]
}

/// Constraint on stores that require whole blocks.
fn of_stores(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Option<Constraint> {
    let whole = format!("{} % block_m == 0 and {} % block_n == 0 and split_k == 1", p.m, p.n);
    let parts = |columns: i64| format!("block_n % ({columns} * groups_n) == 0");
    let boxes = format!("producer == 1 and {}", parts(row(s.workload.dtype)));
    let parts = match (may_exchange(s, p), may_store_boxes(s, p)) {
        (true, true) => format!("({} if store == 'exchanged' else {boxes})", parts(4 * COLUMNS)),
        (true, false) => parts(4 * COLUMNS),
        (false, true) => boxes,
        (false, false) => return None,
    };
    Some(constraint("store", &format!("store == 'direct' or {whole} and {parts}"), parameters))
}

/// Constraints on precisions, by the method that copies operands: a load along steps that are not contiguous
/// is whole, and threads do not load data that are copied in boxes.
fn of_precisions(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    if !has_ways(parameters) || precisions(s) == ["halves"] {
        return Vec::new();
    }
    // Second parts are made in registers or by converter warps.
    let of_parts = match are_boxes(s, p) && !is_loaded(s, p) {
        true => "copies == 'registers' or copies == 'bulk' and producer == 1",
        false => "copies == 'registers'",
    };
    if precisions(s) == ["tf32x3"] {
        return vec![constraint("parts", of_parts, parameters)];
    }
    // Asynchronous copies by threads do not round to TF32; registers and TMA do.
    let way = if are_boxes(s, p) { "copies != 'async'" } else { "copies == 'registers'" };
    vec![
        constraint("parts", &format!("precision != 'tf32x3' or {of_parts}"), parameters),
        constraint("rounded", &format!("precision != 'tf32' or {way}"), parameters),
    ]
}

/// Whether there is a choice of the method that copies operands.
fn has_ways(parameters: &[Parameter]) -> bool {
    parameters.iter().any(|p| p.name == "copies")
}

/// Constraints on kernels that copy boxes: on products in flight, a producer warp, persistent blocks, and
/// clusters.
fn of_boxes(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let say = |name: &str, text: &str| constraint(name, text, parameters);
    let goes_on = "in_flight == 0 or copies == 'bulk' and ahead >= 3";
    let most_in_flight = match precisions(s) {
        ["tf32x3"] => None,
        _ if is_loaded(s, p) => Some("in_flight == 0".to_owned()),
        ["halves"] => Some(goes_on.to_owned()),
        _ => Some(format!("{goes_on} and precision == 'tf32'")),
    };
    // No box may lie wholly outside of its array: it would be all zeros, which is not a copy.
    let row = row(s.workload.dtype);
    let mut reaches = vec![format!("ceil_div({0}, block_k * split_k) * block_k * split_k - {0} < {row}", p.k)];
    for (factor, block, size) in [(&p.a, "block_m", p.m), (&p.b, "block_n", p.n)] {
        if !factor.along_k {
            reaches.push(format!("ceil_div({size}, {block}) * {block} - {size} < {row}"));
        }
    }
    let reaches = reaches.join(" and ");
    let blocks = format!("ceil_div({}, block_m) * ceil_div({}, block_n) * split_k", p.m, p.n);
    let several = format!("{} * {blocks} > {}", p.batch.unwrap_or(1), n_units(s));
    // Neighbours share rows in these orders, and columns in all others.
    let [rows, columns] = [("block_m", p.m), ("block_n", p.n)].map(|(block, n)| format!("ceil_div({n}, {block})"));
    let by_rows = "order in ['rows', 'groups_of_columns', 'groups_of_columns_4', 'groups_of_columns_2']";
    let pairs = format!("({columns} if {by_rows} else {rows}) % {} == 0", cluster::BLOCKS);
    let most_in_flight = most_in_flight.map(|text| say("in_flight", &text));
    let others = [
        say("producer", &format!("producer == 0 or copies == 'bulk' and {reaches}")),
        say("persistent", &format!("persistent == 0 or producer == 1 and {several}")),
        say("teams", "teams == 1 or persistent == 1"),
        say("columns", "copies == 'bulk' or 256 % block_n == 0"),
        say("cluster", &format!("cluster == 1 or producer == 1 and {pairs}")),
    ];
    most_in_flight.into_iter().chain(others).collect()
}

/// Constraints on the vectors in which threads load each operand.
fn of_vectors(s: &TemplateSetting, p: &GpuProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let dtype = s.workload.dtype;
    let may_be_boxes = has_ways(parameters) && (precisions(s) != ["tf32x3"] || are_boxes(s, p));
    let mut constraints = Vec::new();
    for (name, factor, in_boxes) in [("a", &p.a, is_loaded(s, p)), ("b", &p.b, false)] {
        if (in_boxes || is_box(dtype, factor)) && may_be_boxes {
            let text = format!("vector_{name} == 1 or copies != 'bulk'");
            constraints.push(constraint(&format!("boxes_of_{name}"), &text, parameters));
        }
        if is_turned(dtype, factor) {
            let whole = format!("vector_{name} == 1 or {} % (block_k * split_k) == 0", p.k);
            constraints.push(constraint(&format!("steps_of_{name}"), &whole, parameters));
        }
    }
    constraints
}

/// Division of rows and columns of a block into warpgroups, tiles, and elements of threads.
struct Divided {
    steps: Vec<Step>,
    /// Loops over threads, in order.
    of_threads: Vec<String>,
    /// Steps that then join them to three loops, `w`, `i.l` and `j.l`.
    joined: Vec<Step>,
}

/// Divides rows and columns of a block. `over`: prefix of the names of loops; `is_loaded`: whether threads
/// load the rows: eight threads then have two times four rows that are adjacent in shared memory, in
/// different banks for four steps.
fn divide(over: &str, [rows, columns]: [&str; 2], groups_m: i64, group_n: i64, is_loaded: bool) -> Divided {
    let of = |name: &str| format!("{over}{name}");
    let [im, it, iw, iq, ih, il] = ["i.m", "i.t", "i.w", "i.q", "i.h", "i.l"].map(of);
    let [jw, jr, jm, jt, jl, je] = ["j.w", "j.r", "j.m", "j.t", "j.l", "j.e"].map(of);
    let mut steps = vec![exact(rows, ROWS * groups_m, &im, &it)];
    let (mut of_threads, mut joined) = (vec![jw.clone()], Vec::new());
    if is_loaded {
        // Of 32 rows, a thread of 2 × 4 in each of two warps has two.
        let [[wo, wi], [lo, li]] = [["i.w.o", "i.w.i"], ["i.l.o", "i.l.i"]].map(|names| names.map(of));
        let [ir, ip] = ["i.r", "i.p"].map(of);
        let half = WARP[1] / 2;
        steps.extend([exact(&it, 8 * half, &wo, &ir), exact(&ir, 4 * half, &lo, &iq)]);
        steps.extend([exact(&iq, 2 * half, &wi, &ip), exact(&ip, half, &ih, &li)]);
        joined.extend([fuse(&wo, &wi, &iw), fuse(&lo, &li, &il)]);
        of_threads.extend([wo, wi, lo, li]);
    } else {
        steps.extend([exact(&it, ROWS / WARPS, &iw, &iq), exact(&iq, WARP[1], &ih, &il)]);
        of_threads.extend([iw.clone(), il]);
    }
    of_threads.push(jl.clone());
    steps.extend([
        exact(columns, group_n, &jw, &jr),
        exact(&jr, COLUMNS, &jm, &jt),
        exact(&jt, COLUMNS / WARP[0], &jl, &je),
    ]);
    joined.push(fuse(&jw, &iw, &of("w")));
    Divided { steps, of_threads, joined }
}

/// Moves loops over threads inside those `ahead` and outside those `inner`.
fn ordered(ahead: &[&str], of_threads: &[String], inner: &[&str]) -> Step {
    let of_threads: Vec<&str> = of_threads.iter().map(String::as_str).collect();
    reorder(&[ahead, &of_threads, inner].concat())
}

/// Number of the device's compute units.
fn n_units(s: &TemplateSetting) -> i64 {
    i64::from(gpu(s).n_units).max(1)
}

/// Number of persistent blocks, in whole clusters.
fn n_persistent(s: &TemplateSetting, space: &Space, config: &Config) -> i64 {
    let cluster = cluster(space, config);
    n_units(s) / cluster * cluster
}

/// Maximum number of the `n_tiles` tiles that one block processes.
fn n_rounds(s: &TemplateSetting, space: &Space, config: &Config, n_tiles: i64) -> i64 {
    if is_persistent(space, config) { ceil_div(n_tiles, n_persistent(s, space, config)) } else { 1 }
}

fn steps(s: &TemplateSetting, p: &GpuProduct, space: &Space, config: &Config) -> Vec<Step> {
    let dtype = s.workload.dtype;
    let int = |name: &str| space.int(config, name);
    let [groups_m, groups_n] = ["groups_m", "groups_n"].map(int);
    let copies = Copies::of(space, config);
    let division = division(space, config);
    let ([_, bn], depth) = (division.tile, division.depth);
    let (mut steps, [b, i, j, k]) = division.steps(p);

    // Tiles of warpgroups and their threads.
    let is_loaded = loads_rows(s, p, copies);
    let Divided { steps: divided, of_threads, joined } = divide("", [&i, &j], groups_m, bn / groups_n, is_loaded);
    steps.extend(divided);
    steps.extend([exact(&k, depth, "k.o", "k.s"), exact("k.s", tensor::steps(dtype), "k.n", "k.i")]);
    let ahead: Vec<&str> = ["k.o"].into_iter().chain(p.batch.map(|_| b.as_str())).collect();
    steps.push(ordered(&ahead, &of_threads, &["k.n", "i.m", "k.i", "j.m", "i.h", "j.e"]));
    steps.extend(joined);
    steps.push(accumulate(division.stage(), "j.b", "C.r"));

    let shared = copied_factors(s, p, space, config);
    steps.extend(shared.steps);
    let copied_by: Vec<(&str, i64)> = shared.copied_by.iter().map(|(name, n)| (name.as_str(), *n)).collect();
    // While tensor cores multiply, threads begin copies.
    let options = [goes_on(space, config), true, has_producer(space, config), cluster(space, config) > 1];
    steps.extend(copies.stream("k.o", &copied_by, options));
    steps.extend(shared.boxes.iter().map(|boxes| unroll(boxes)));
    steps.extend(bind_warps(""));
    steps.extend(["j.e", "i.h", "j.m", "i.m", "k.n"].map(unroll));
    steps.push(tensorize("k.i", precision(space, config)));
    let (order, outer) = (order(space, config), division.outer(p));
    steps.extend(match is_persistent(space, config) {
        true => bind_units(order, outer, n_persistent(s, space, config)),
        false => bind_blocks(order, outer),
    });
    steps.extend((teams(space, config) > 1).then(|| bind("round", LoopKind::Turns)));

    // The epilogue.
    if division.split > 1 {
        steps.extend(division.sums_of_parts(p));
        return steps;
    }
    steps.extend(stored(s, p, space, config));
    steps
}

/// Steps that copy operands to shared memory.
struct CopiedFactors {
    steps: Vec<Step>,
    /// Buffer of each operand, and the loads of a thread for it; as many as there are for boxes.
    copied_by: Vec<(String, i64)>,
    /// Loops over the boxes of operands that TMA copies.
    boxes: Vec<String>,
}

/// Copies operands to shared memory, in rows along the reduction or, if that is their layout, across it.
fn copied_factors(s: &TemplateSetting, p: &GpuProduct, space: &Space, config: &Config) -> CopiedFactors {
    let dtype = s.workload.dtype;
    let row = row(dtype);
    let int = |name: &str| space.int(config, name);
    let copies = Copies::of(space, config);
    let division = division(space, config);
    let ([bm, bn], depth) = (division.tile, division.depth);
    let is_loaded = loads_rows(s, p, copies);
    let threads = BlockThreads([WARP[0], WARP[1], WARPS * int("groups_m") * int("groups_n")]);
    let (mut steps, mut copied_by, mut boxes) = (Vec::new(), Vec::new(), Vec::new());
    for (name, factor, size, vector) in [("A", &p.a, bm, int("vector_a")), ("B", &p.b, bn, int("vector_b"))] {
        let [x, shared_name] = ["x", "s"].map(|part| format!("{name}.{part}"));
        let at = usize::from(p.batch.is_some());
        let mut axes = if p.batch.is_some() { vec![Whole(0)] } else { Vec::new() };
        let turned = is_turned(dtype, factor) && !is_loaded;
        let along_k = factor.along_k || turned;
        let ([along, other], of_rows) =
            if along_k { ([at + 1, at], [depth / row, size]) } else { ([at, at + 1], [size / row, depth]) };
        axes.extend([Outer(along, row), Whole(other), Inner(along, row)]);
        steps.extend([shared(&x, "k.o", &shared_name, &axes), inline(&x)]);
        let extents: Vec<i64> = p.batch.map(|_| 1).into_iter().chain(of_rows).chain([row]).collect();
        let [outer, line, inner] = [at, at + 1, at + 2];
        let within = if turned { [outer, inner, line] } else { [line, outer, inner] };
        let order: Vec<usize> = (0..at).chain(within).collect();
        let copied =
            Copied { name: &shared_name, extents: &extents, order: &order, vector, runs: false, across: turned };
        if matches!(copies, Copies::Bulk(_)) && (is_loaded || is_box(dtype, factor)) {
            boxes.push(format!("{shared_name}.{at}"));
            copied_by.push((shared_name, i64::MAX));
            continue;
        }
        steps.extend(copied.by(threads));
        let n_loads = size * depth / (vector * threads.n());
        steps.extend(copies.through_registers("k.o", &shared_name, n_loads));
        copied_by.push((shared_name, n_loads));
    }
    CopiedFactors { steps, copied_by, boxes }
}

/// Steps for the epilogue, and for its stores.
fn stored(s: &TemplateSetting, p: &GpuProduct, space: &Space, config: &Config) -> Vec<Step> {
    let dtype = s.workload.dtype;
    let [groups_m, groups_n] = ["groups_m", "groups_n"].map(|name| space.int(config, name));
    let [bm, bn] = division(space, config).tile;
    let is_loaded = loads_rows(s, p, Copies::of(space, config));
    let last = ["oi.b", "oj.b"];
    let Divided { steps: divided, of_threads, joined } = divide("o", last, groups_m, bn / groups_n, is_loaded);
    let mut steps = divided;
    // Parts of a row that are stored one after the other are exchanged.
    let are_boxes = stores_boxes(space, config);
    let order: &[&str] = match (are_boxes, exchanges(space, config)) {
        (true, _) => &["oi.m", "oj.o", "oj.p", "oi.h", "oj.e"],
        (false, true) => &["oi.m", "oi.h", "oj.m", "oj.e"],
        (false, false) => &["oi.m", "oj.m", "oi.h", "oj.e"],
    };
    steps.extend(are_boxes.then(|| exact("oj.m", store::parts(dtype), "oj.o", "oj.p")));
    steps.push(ordered(&[], &of_threads, order));
    steps.extend(joined);
    steps.extend(bind_warps("o"));
    let is_whole = p.m % bm == 0 && p.n % bn == 0 && p.stores % 2 == 0;
    steps.push(if is_whole { vectorize("oj.e") } else { unroll("oj.e") });
    if are_boxes {
        steps.extend(["oi.h", "oj.o", "oi.m"].map(unroll));
        steps.push(tensorize("oj.p", TensorProduct::Tma));
    } else {
        steps.extend(["oi.h", "oj.m", "oi.m"].map(unroll));
    }
    steps
}

/// Estimated cycles of the blocks, with their tile products and reads.
fn estimate(s: &TemplateSetting, p: &GpuProduct, space: &Space, config: &Config) -> f64 {
    let int = |name: &str| space.int(config, name);
    let division = division(space, config);
    let ([bm, bn], depth, split) = (division.tile, division.depth, division.split);
    let [groups_m, groups_n] = ["groups_m", "groups_n"].map(int);
    let (gpu, dtype) = (gpu(s), s.workload.dtype);
    let bytes = dtype.bytes() as i64;
    let threads = WARPS * i64::from(gpu.warp_size) * groups_m * groups_n;
    let stages = Copies::of(space, config);
    let is_loaded = loads_rows(s, p, stages);
    // Converter warps have not run on any GPU: they are modelled as copies through registers, with a penalty.
    let in_parts = precision(space, config) == TensorProduct::Wgmmax3;
    let is_converted = in_parts && matches!(stages, Copies::Bulk(_));
    let copies = if is_converted { Copies::Registers(1) } else { stages };
    let has_producer = has_producer(space, config) && !is_converted;
    let of_rows = if is_loaded { bm / ROWS / groups_m * depth / 2 } else { 0 };
    let loaded = copies.in_registers((bm + bn) * depth / threads) * bytes / 4 + of_rows;
    let padded = division.padded_sum(p) / split;
    // Tensor cores do eight times the multiply-adds of threads, and 16 times in half precision. Numbers in
    // two parts need three products.
    let faster = if in_parts { 8.0 / 3.0 } else { (32 / bytes) as f64 };
    let twice = if in_parts { 2 } else { 1 };
    let products = (bm * bn * depth) as f64 / faster;
    let n_instructions = (bm / ROWS) * groups_n * depth / tensor::steps(dtype);
    let begun = BEGUN * n_instructions as f64;
    let [each, load] = match dtype.is_half() {
        true => AS_IT_IS,
        false if in_parts => IN_PARTS,
        false => ROUNDED,
    };
    let copied = [("vector_a", &p.a, bm), ("vector_b", &p.b, bn)].map(|(vector, factor, n)| {
        let elements = (n * depth) as f64;
        let loads = elements / if is_converted { factor.loads } else { int(vector) } as f64;
        match copies {
            Copies::Bulk(_) if is_loaded || is_box(dtype, factor) => 0.0,
            Copies::Bulk(_) | Copies::Async(_) => ASYNC * loads,
            Copies::Registers(_) => each * elements + load * loads,
        }
    });
    // If threads wait for the products of each step, tensor cores idle for some cycles, unless other
    // warpgroups proceed independently.
    let idle = if goes_on(space, config) || has_producer && groups_m * groups_n > 1 { 0.0 } else { IDLE };
    let barrier = if has_producer { 0.0 } else { BARRIER };
    let n_steps = padded / depth;
    // A persistent block waits once: it copies for the next tile while it stores.
    let n_tiles = p.batch.unwrap_or(1) * split * ceil_div(p.m, bm) * ceil_div(p.n, bn);
    let rounds = if is_converted { 1 } else { n_rounds(s, space, config, n_tiles) };
    // Each block of a cluster reads its part of the shared operand.
    let cluster = if is_converted { 1 } else { cluster(space, config) };
    let rows_and_columns = match order(space, config) {
        Rasterization::Rows | Rasterization::GroupsOfColumns(_) => bm / cluster + bn,
        Rasterization::Columns | Rasterization::Groups(_) => bm + bn / cluster,
    };
    // An instruction reads 64 rows of one operand and all of its columns of the other.
    let columns = (bn / groups_n).min(MOST_COLUMNS) as f64;
    let read = (ROWS as f64 + columns) * 32.0 / SHARED_BYTES;
    // Bulk stores and teams have not run on any GPU: they are modelled as the measured variant, with a small
    // penalty.
    let (are_boxes, teams) = (stores_boxes(space, config), teams(space, config));
    let unproven = UNPROVEN * (i64::from(are_boxes) + teams - 1) as f64;
    let is_measured = exchanges(space, config) || are_boxes && dtype.is_half();
    let n_warps = threads * teams / i64::from(gpu.warp_size);
    let boxes = if are_boxes { store::SLOTS * store::BOX_BYTES * n_warps } else { 0 };
    let blocks = Blocks {
        n: ceil_div(n_tiles, rounds),
        threads: threads * teams + if has_producer { producer_warp::THREADS } else { 0 },
        registers: twice * bm * bn / threads + loaded + OTHER_REGISTERS,
        shared_bytes: twice * bytes * stages.n() * (bm + bn) * depth + boxes,
        fmas: (rounds * bm * bn * padded) as f64 / faster,
        efficiency: products / (products * (read / (columns / 2.0)).max(1.0) + copied[0] + copied[1] + begun),
        bytes: (rounds * bytes * (rows_and_columns * padded + bm * bn)) as f64,
        steps: (rounds * n_steps) as f64,
        stages: copies.in_flight() - i64::from(goes_on(space, config)),
        exposed: idle + barrier,
        stores: rounds as f64 * (stores(p, [bm, bn], split, is_measured) + unproven),
        begins: if cluster > 1 { CLUSTER } else { 0.0 },
        fill: WARPS * i64::from(gpu.warp_size),
    };
    let slower = if is_converted { UNPROVEN_WAY } else { 1.0 };
    slower * (blocks.cycles(&s.target, &gpu) + sums_of_parts(s, p, split))
}
