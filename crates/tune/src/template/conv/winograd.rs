//! Winograd's algorithm: 3×3 convolutions with fewer multiplications, by transforms of tiles.

use super::super::model::{bandwidth, cuts, step_cycles};
use super::super::share::SharedWork;
use super::super::step::{
    accumulate, compute_at, fuse, inline, layout, parallel, reorder, split, stage, unroll, vectorize, winograd,
};
use super::super::{TemplateSetting, constraint_over};
use super::direct::{pack, pack_padded};
use super::{Algorithm, ReductionSizes, ceil_div, in_blocks, is_blocked};
use tilewright_ir::Step;
use tilewright_ir::op::Window;
use tilewright_ir::schedule::LayoutAxis::{self, Inner, Outer, Whole};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Blocks of tile rows; in each the input is transformed, multiplied with the transformed weights by a
/// register tile of channels and tiles, and transformed back. Lanes are channels throughout.
///
/// # Source
/// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015), section 4; blocking the tiles
/// so that their transforms stay in cache is as in Georganas et al. (2018) for direct convolution.
pub const WINOGRAD: Algorithm<ReductionSizes> =
    Algorithm { name: "winograd", applies: |shape| shape.has_winograd, parameters, constraints, steps, estimate };

/// Rows of an output tile.
const TILES: [i64; 2] = [SMALLEST_TILE, 4];
/// Fewest rows of an output tile.
pub const SMALLEST_TILE: i64 = 2;

/// Smallest share of a direct convolution's multiplications that a tile needs: `(m + 2)²` for `m²` outputs of
/// nine each.
pub fn least_share() -> f64 {
    let share = |m: i64| ((m + 2) * (m + 2)) as f64 / (9 * m * m) as f64;
    TILES.map(share).into_iter().fold(1.0, f64::min)
}

/// Whether blocks of this many rows of the result are whole, which a dynamic number of rows requires.
fn is_whole(shape: &ReductionSizes, rows: i64) -> bool {
    shape.open_rows.is_none_or(|common| common % rows == 0)
}

fn parameters(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Parameter> {
    let vectors = ceil_div(shape.k, s.target.lanes(s.workload.dtype));
    let has_plain = in_blocks(s)[0] && !shape.has_prologue;
    let mut parameters = vec![
        Parameter::ordinal("m", TILES.into_iter().filter(|m| is_whole(shape, *m))),
        Parameter::ordinal("rows", (1..=ceil_div(shape.p, 2)).filter(|rows| is_whole(shape, rows * SMALLEST_TILE))),
        Parameter::ordinal("k_blocks", (1..=vectors).filter(|b| vectors % b == 0)),
        Parameter::ordinal("k_tile", 1..=vectors.min(4)),
        Parameter::ordinal("t_tile", 1..=i64::from(s.target.n_vector_registers) / 2),
        Parameter::ordinal("unroll_c", [1, 2, 4]),
        Parameter::categorical("input", if has_plain { &["plain", "packed"] } else { &["packed"] }),
    ];
    if s.n_threads > 1 {
        parameters.push(Parameter::categorical("parallel", &["rows", "k"]));
    }
    parameters.extend(shape.work().parameter(s, false));
    parameters
}

fn constraints(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Constraint> {
    let parameters = parameters(s, shape);
    let over = |name: &str, reads: &[&str], text: &str| constraint_over(name, reads, text, &parameters);
    let registers = i64::from(s.target.n_vector_registers);
    let (bytes, l2) = (s.workload.dtype.bytes(), s.target.l2_bytes);
    let (n, k, p, q, c) = (shape.n, shape.k, shape.p, shape.q, shape.c.unwrap_or(1));
    let vectors = ceil_div(k, s.target.lanes(s.workload.dtype));
    let tiles = format!("(min(rows, ceil_div({p}, m)) * ceil_div({q}, m))");
    // Half of the registers are used if there are enough tiles.
    let enough = format!("min({}, {} * min({tiles}, {}))", registers / 2 - 2, vectors.min(4), registers / 4);
    let in_registers = format!("k_tile * t_tile + k_tile < {registers} and k_tile * t_tile >= {enough}");
    // A block of channels consists of whole tiles, unless it is the only one.
    let whole = format!("k_blocks == 1 or {vectors} // k_blocks % k_tile == 0");
    // The transformed input and the product of several rows of tiles.
    let of_block = format!("(m + 2) * (m + 2) * {tiles} * ({c} + {k} // k_blocks) * {bytes}");
    // Blocks of a dynamic number of rows are whole.
    let whole_blocks = match shape.open_rows {
        None => format!("rows <= ceil_div({p}, m)"),
        Some(common) => format!("{common} % (m * rows) == 0"),
    };
    let mut constraints = vec![
        over("rows_of_tiles", &["m", "rows"], &whole_blocks),
        over("registers", &["k_tile", "t_tile", "m", "rows"], &in_registers),
        over("inside", &["m", "rows", "t_tile"], &format!("t_tile <= {tiles}")),
        over("whole_tiles", &["k_blocks", "k_tile"], &whole),
        over("block_in_l2", &["m", "rows", "k_blocks"], &format!("rows == 1 or {of_block} <= {}", 2 * l2)),
    ];
    if s.n_threads > 1 {
        // As many iterations as there are threads, or as there can be.
        let needed = s.n_threads as i64;
        let rows = format!("{n} * ceil_div(ceil_div({p}, m), rows) >= {}", needed.min(n * ceil_div(p, 4)));
        let channels = format!("k_blocks >= {}", needed.min(vectors));
        let text = format!("{rows} if parallel == 'rows' else {channels}");
        let for_all = over("work_for_all_threads_of_winograd", &["parallel", "m", "rows", "k_blocks"], &text);
        constraints.push(shape.work().of_result(s, for_all));
        constraints.extend(shape.work().is_choice(s).then(|| SharedWork::Result.owns(&parameters, "parallel", "rows")));
    }
    constraints
}

fn steps(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> Vec<Step> {
    let plan = WinogradDecisions::of(s, shape, space, config);
    [
        vec![winograd(Window::ACC, plan.m)],
        plan.input(),
        plan.blocks(),
        plan.transforms(),
        plan.products(),
        plan.vectors(),
        plan.epilogue(),
        plan.threads(),
    ]
    .concat()
}

/// Decisions of a configuration.
struct WinogradDecisions<'a> {
    s: &'a TemplateSetting,
    shape: &'a ReductionSizes,
    lanes: i64,
    /// Rows and columns of a tile of results.
    m: i64,
    /// Rows of tiles in a block.
    rows: i64,
    /// Channels and tiles of a register tile.
    k_tile: i64,
    t_tile: i64,
    /// Channels of a block.
    k_block: i64,
    unroll_c: i64,
    /// Whether the input is copied.
    is_packed: bool,
    /// Whether input and result have contiguous channels.
    takes_blocks: bool,
    gives_blocks: bool,
    channels_last: [LayoutAxis; 5],
    share: SharedWork,
    /// Whether threads share rows, rather than blocks of channels.
    by_rows: bool,
}

impl<'a> WinogradDecisions<'a> {
    fn of(s: &'a TemplateSetting, shape: &'a ReductionSizes, space: &Space, config: &Config) -> WinogradDecisions<'a> {
        let (int, lanes) = (|name: &str| space.int(config, name), s.target.lanes(s.workload.dtype));
        let ([takes_blocks, gives_blocks], share) = (in_blocks(s), SharedWork::of(s, space, config));
        WinogradDecisions {
            s,
            shape,
            lanes,
            m: int("m"),
            rows: int("rows"),
            k_tile: int("k_tile") * lanes,
            t_tile: int("t_tile"),
            k_block: ceil_div(ceil_div(shape.k, lanes), int("k_blocks")) * lanes,
            unroll_c: int("unroll_c"),
            is_packed: space.text(config, "input") == "packed",
            takes_blocks,
            gives_blocks,
            channels_last: Window::channels_last(lanes),
            share,
            by_rows: share == SharedWork::Result && space.text(config, "parallel") == "rows",
        }
    }

    /// Steps that make the channels of a vector contiguous in the input.
    fn input(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        match (self.shape.padded, self.is_packed) {
            (true, false) => steps.push(inline(Window::PAD)),
            (true, true) => {
                steps.extend(pack_padded(self.s, self.shape, self.lanes));
            }
            (false, true) if !self.takes_blocks => {
                steps.push(stage(Window::INPUT, None, "X.p", &self.channels_last));
                steps.extend(pack("X.p.3", "X.p.4", self.lanes));
            }
            (false, _) => {}
        }
        if is_blocked(self.s) {
            steps.extend([
                layout(Window::KEPT_INPUT, &self.channels_last),
                layout(Window::KEPT_OUTPUT, &self.channels_last),
            ]);
            steps.extend(self.s.workload.kept_operands().iter().map(|kept| layout(kept, &self.channels_last)));
        }
        steps
    }

    /// Blocks of the output: rows of tiles, then channels, then tiles, then a vector of channels of one tile.
    fn blocks(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.gives_blocks {
            steps.push(inline(Window::ACC));
        }
        steps.extend([
            split("ok", self.k_block, "okt", "okb"),
            split("op", self.m * self.rows, "otho", "opb"),
            split("okb", self.lanes, "okv", "okl"),
        ]);
        if self.gives_blocks {
            steps.extend([
                split("opb", self.m, "oth", "opi"),
                split("oq", self.m, "otw", "oqi"),
                reorder(&["on", "otho", "okt", "oth", "otw", "okv", "opi", "oqi", "okl"]),
            ]);
        } else {
            steps.extend([
                split("oq", self.lanes, "oqv", "oql"),
                reorder(&["on", "otho", "okt", "okv", "opb", "oqv", "oql", "okl"]),
            ]);
        }
        let at = if self.gives_blocks {
            "okv"
        } else {
            // A block of results is stored channels-last, and is written row by row.
            steps.extend([
                compute_at(Window::ACC, "okt"),
                split("p", self.m, "th", "pi"),
                split("q", self.m, "tw", "qi"),
                split("k", self.lanes, "kv", "kl"),
                reorder(&["n", "th", "tw", "kv", "pi", "qi", "kl"]),
            ]);
            "kv"
        };
        steps.extend([compute_at("acc.r", at), compute_at("acc.m", "okt"), compute_at("acc.v", "otho")]);
        steps.push(reorder(&["acc.r.n", "acc.r.th", "acc.r.tw", "acc.r.i", "acc.r.b", "acc.r.k"]));
        steps
    }

    /// Transforms of the input, and of the weights, a vector of output channels at a time.
    fn transforms(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        // Transform of the input.
        steps.extend([
            split("acc.v.c", self.lanes, "acc.v.co", "acc.v.cl"),
            reorder(&["acc.v.n", "acc.v.th", "acc.v.tw", "acc.v.co", "acc.v.a", "acc.v.b", "acc.v.cl"]),
            compute_at("acc.d", "acc.v.co"),
            reorder(&["acc.d.n", "acc.d.th", "acc.d.tw", "acc.d.a", "acc.d.j", "acc.d.c"]),
        ]);
        // Transform of the weights, a vector of output channels at a time.
        steps.extend([
            layout("acc.g", &[Whole(0), Whole(1), Whole(3), Whole(2)]),
            split("acc.g.k", self.lanes, "acc.g.kv", "acc.g.kl"),
            reorder(&["acc.g.c", "acc.g.kv", "acc.g.a", "acc.g.s", "acc.g.kl"]),
            split("acc.u.k", self.lanes, "acc.u.kv", "acc.u.kl"),
            reorder(&["acc.u.c", "acc.u.kv", "acc.u.a", "acc.u.b", "acc.u.kl"]),
        ]);
        steps
    }

    /// Products, a matrix multiplication for each element of a tile, and layouts of their buffers.
    fn products(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        steps.extend([
            fuse("acc.m.th", "acc.m.tw", "acc.m.t"),
            split("acc.m.t", self.t_tile, "acc.m.to", "acc.m.ti"),
            split("acc.m.k", self.k_tile, "acc.m.ko", "acc.m.kb"),
            split("acc.m.kb", self.lanes, "acc.m.kv", "acc.m.kl"),
            split("acc.m.c", self.unroll_c, "acc.m.co", "acc.m.cu"),
            reorder(&[
                "acc.m.a", "acc.m.b", "acc.m.n", "acc.m.ko", "acc.m.to", "acc.m.co", "acc.m.cu", "acc.m.ti",
                "acc.m.kv", "acc.m.kl",
            ]),
            accumulate("acc.m", "acc.m.to", "acc.m.r"),
        ]);
        steps.extend([
            layout("acc.u", &[Whole(0), Whole(1), Outer(2, self.k_tile), Whole(3), Inner(2, self.k_tile)]),
            layout("acc.v", &[Whole(0), Whole(1), Whole(2), Whole(4), Whole(5), Whole(3)]),
            layout("acc.m", &[Whole(0), Whole(1), Whole(2), Whole(4), Whole(5), Whole(3)]),
            layout("acc.d", &[Whole(0), Whole(1), Whole(2), Whole(4), Whole(5), Whole(3)]),
            layout("acc.r", &[Whole(0), Whole(1), Whole(2), Whole(4), Whole(5), Whole(3)]),
        ]);
        steps
    }

    /// Loops that are unrolled and vectorized.
    fn vectors(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for unrolled in [
            "acc.g.a", "acc.g.s", "acc.u.a", "acc.u.b", "acc.d.a", "acc.d.j", "acc.v.a", "acc.v.b", "acc.m.cu",
            "acc.m.ti", "acc.m.kv", "acc.r.i", "acc.r.b",
        ] {
            steps.push(unroll(unrolled));
        }
        for lane in ["acc.g.kl", "acc.u.kl", "acc.d.c", "acc.v.cl", "acc.m.kl", "acc.r.k"] {
            steps.push(vectorize(lane));
        }
        steps
    }

    /// Steps for the epilogue.
    fn epilogue(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.gives_blocks {
            steps.extend([unroll("opi"), unroll("oqi"), vectorize("okl")]);
        } else {
            steps.push(layout(Window::ACC, &[Whole(0), Whole(2), Whole(3), Whole(1)]));
            steps.extend([unroll("pi"), unroll("qi"), vectorize("kl")]);
            steps.extend([unroll("okl"), vectorize("oql")]);
        }
        steps
    }

    /// Parallel loops.
    fn threads(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.share == SharedWork::Result {
            if self.shape.n > 1 && self.by_rows {
                steps.extend([fuse("on", "otho", "threads"), parallel("threads")]);
            } else if self.by_rows {
                steps.push(parallel("otho"));
            } else {
                steps.extend([parallel("okt"), parallel("acc.v.th")]);
            }
            if self.is_packed && (self.shape.padded || !self.takes_blocks) {
                steps.push(parallel(if self.shape.padded { "pco" } else { "X.p.1" }));
            }
        }
        steps
    }
}

/// Estimated cycles: products, bound by their register tile or by reading the transformed weights once per
/// block of rows; the transforms; and writing and reading intermediate results.
fn estimate(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> f64 {
    let lanes = s.target.lanes(s.workload.dtype);
    let bytes = s.workload.dtype.bytes() as f64;
    let int = |name: &str| space.int(config, name);
    let (m, c) = (int("m"), shape.c.unwrap_or(1));
    let elements = ((m + 2) * (m + 2)) as f64;
    let k_block = ceil_div(ceil_div(shape.k, lanes), int("k_blocks")) * lanes;
    let (tile_rows, tile_columns) = (ceil_div(shape.p, m), ceil_div(shape.q, m));
    let weights = elements * (shape.k * c) as f64 * bytes;
    let mut cycles = 0.0;
    for (n_blocks, rows) in cuts(tile_rows, int("rows")) {
        let tiles = rows * tile_columns;
        let mut products = 0.0;
        for (n_k, vectors) in cuts(ceil_div(k_block, lanes), int("k_tile")) {
            for (n_t, t) in cuts(tiles, int("t_tile")) {
                products += n_k * n_t * (c as f64 * step_cycles(s, vectors, t) + 20.0);
            }
        }
        products *= elements * int("k_blocks") as f64;
        let between = elements * (tiles * (c + k_block)) as f64 * bytes;
        let passed = elements * (tiles * (c * int("k_blocks") + shape.k)) as f64 * bytes;
        let read = weights / bandwidth(s, if n_blocks > 1.0 { weights + between } else { 1e9 });
        let vectors_of = |channels: i64| (tiles * ceil_div(channels, lanes)) as f64;
        let transforms = vectors_of(c) * 4.5 * elements + vectors_of(shape.k) * 3.0 * elements;
        cycles += n_blocks
            * (products.max(read) + 0.2 * products.min(read) + transforms + 2.0 * passed / bandwidth(s, between));
    }
    cycles *= 0.9 * shape.n as f64;
    let share = SharedWork::of(s, space, config);
    let n_iterations = match share {
        SharedWork::Result if space.text(config, "parallel") == "k" => int("k_blocks"),
        SharedWork::Result => shape.n * ceil_div(tile_rows, int("rows")),
        SharedWork::Sum | SharedWork::Nothing => 1,
    };
    shape.work().of_busiest_thread(s, share, cycles, n_iterations, 0)
}
