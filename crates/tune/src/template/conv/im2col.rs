//! Convolution as a matrix product of the weights with patches of the input (im2col).

use super::super::model::{bandwidth, cuts, step_cycles, write_back};
use super::super::share::{self, EACH_PART, PART, PARTS, SharedWork};
use super::super::step::{
    accumulate, compute_at, fuse, inline, layout, parallel, reindex, reorder, split, stage_as, unroll, vectorize,
};
use super::super::{TemplateSetting, constraint_over, has_value, none_of};
use super::{Algorithm, ReductionSizes, ceil_div, divisors, is_blocked};
use tilewright_ir::op::{Window, WindowAxis};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{DType, Step};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Matrix product `acc[k, pq] = Σ W[k, crs] · cols[crs, pq]` around a register tile of channels and pixels.
///
/// Lanes are pixels, whose rows follow each other in `cols` and in NCHW, so that narrow images fill vectors
/// too. The patches are copied for the whole input (explicit im2col) or for a block of rows just before it is
/// multiplied (implicit); a pointwise convolution of stride 1 reads the input itself. Blocks are whole rows
/// of the output and divide it evenly, so that each is a box in every buffer and its last tile is known when
/// code is generated. Grouped convolutions are not supported: their patches differ from group to group.
///
/// # Source
/// Explicit: Chellapilla et al., "High Performance Convolutional Neural Networks for Document Processing"
/// (2006), section 3. Implicit: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (2014),
/// section 3; ours makes blocks that fit the second-level cache rather than a GPU's shared memory. The
/// reduction stays three loops: weights are read in any order equally well, and channels are the innermost
/// loop of a tap. Integer and rounded operands are left to [`super::direct`], which has dot products of
/// channels.
pub const IM2COL: Algorithm<ReductionSizes> = Algorithm {
    name: "im2col",
    applies: |shape| {
        let has_own_factors = shape.has_integers || shape.rounds;
        shape.c.is_some()
            && shape.k_group == shape.k
            && !shape.is_agreed
            && !has_own_factors
            && shape.open_rows.is_none()
    },
    parameters,
    constraints,
    steps,
    estimate,
};

/// Maximum size in bytes of a matrix of patches that is computed as a whole.
const MOST_BYTES: i64 = 1 << 30;

/// Whether the input is its own matrix of patches.
fn is_pointwise(shape: &ReductionSizes) -> bool {
    let is_strided = shape.axes.iter().any(|axis| axis.stride > 1);
    (shape.r, shape.s) == (1, 1) && !is_strided && !shape.padded
}

/// Whether each patch element is one element of the stage before the patches.
fn is_elementwise(shape: &ReductionSizes) -> bool {
    let is_plain = |axis: &WindowAxis| axis.filter == 1 && axis.stride == 1 && (axis.before, axis.after) == (0, 0);
    !shape.transposed && shape.axes.iter().all(is_plain)
}

/// Size in bytes of the patches of a row of the output.
fn bytes_per_row(s: &TemplateSetting, shape: &ReductionSizes) -> i64 {
    shape.c.unwrap_or(1) * shape.r * shape.s * shape.q * s.workload.dtype.bytes() as i64
}

/// Number of vectors that hold the pixels of `rows` rows.
fn vectors(shape: &ReductionSizes, lanes: i64, rows: i64) -> i64 {
    ceil_div(rows * shape.q, lanes)
}

/// Whether the weights may be copied. Those of 16 bits always are, in f32: each element is converted and
/// broadcast for every vector of pixels otherwise.
fn packings(s: &TemplateSetting) -> &'static [&'static str] {
    if s.workload.dtype.is_half() { &["true"] } else { &["false", "true"] }
}

fn parameters(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Parameter> {
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    let c = shape.c.unwrap_or(1);
    let copies: &[&str] = match is_pointwise(shape) {
        true => &["none"],
        false if shape.n * shape.p * bytes_per_row(s, shape) > MOST_BYTES => &["block"],
        false => &["whole", "block"],
    };
    let pads: &[&str] = match shape.padded {
        false => &["none"],
        // The patches are the stage itself: each of its elements belongs to one patch.
        true if is_elementwise(shape) => &["inline"],
        true => &["copied", "inline"],
    };
    let mut parameters = vec![
        Parameter::ordinal("k_tile", 1..=shape.k.min(registers / 2)),
        Parameter::ordinal("x_tile", 1..=vectors(shape, lanes, shape.p).min(6)),
        Parameter::ordinal("rows", divisors(shape.p, 1)),
        Parameter::ordinal("c_block", divisors(c, 8)),
        Parameter::categorical("outer", &["rows", "k"]),
        Parameter::categorical("cols", copies),
        Parameter::categorical("pad", pads),
        Parameter::categorical("pack_w", packings(s)),
        Parameter::ordinal("unroll_c", [1, 2, 4].into_iter().filter(|&u| u <= c)),
    ];
    parameters.extend(shape.work().parameter(s, can_cut_sum(s, shape)));
    parameters
}

/// Whether threads may share the channels of the reduction.
fn can_cut_sum(s: &TemplateSetting, shape: &ReductionSizes) -> bool {
    shape.c.is_some_and(|c| c >= s.n_threads as i64)
}

fn constraints(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Constraint> {
    let parameters = parameters(s, shape);
    let over = |name: &str, reads: &[&str], text: &str| constraint_over(name, reads, text, &parameters);
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    let ReductionSizes { n, k, p, q, .. } = *shape;
    let fits = move |k: i64, x: i64| k * x + x < registers;
    // Half of the largest possible tile within one row, which fits every block of rows.
    let tiles = (1..=k.min(registers / 2)).flat_map(|k| (1..=vectors(shape, lanes, 1).min(6)).map(move |x| (k, x)));
    let enough = tiles.filter(|&(k, x)| fits(k, x)).map(|(k, x)| k * x).max().unwrap_or(1) / 2;
    let vectors_of_rows = format!("ceil_div(rows * {q}, {lanes})");
    let (in_l2, by_rows) = match has_value(&parameters, "cols", "block") {
        true => {
            let (bytes, l2) = (bytes_per_row(s, shape), s.target.l2_bytes);
            let few = 2 * vectors(shape, lanes, p).min(6);
            let small = format!("rows * {bytes} <= {l2} or {vectors_of_rows} < {few} or rows == 1");
            (format!("cols != 'block' or {small}"), "cols != 'block' or outer == 'rows'".to_owned())
        }
        false => (none_of(&parameters, "cols", &[]), none_of(&parameters, "outer", &[])),
    };
    let registers = format!("k_tile * x_tile + x_tile < {registers} and k_tile * x_tile >= {enough}");
    let mut constraints = vec![
        over("registers", &["k_tile", "x_tile"], &registers),
        over("inside", &["x_tile", "rows"], &format!("x_tile <= {vectors_of_rows}")),
        // The patches of a block fit, or the block is less than two of the largest tiles.
        over("block_in_l2", &["cols", "rows"], &in_l2),
        over("block_copied_once", &["cols", "outer"], &by_rows),
    ];
    if s.n_threads > 1 {
        // Rows can always be shared among this many threads.
        let needed = (s.n_threads as i64).min(n * p);
        let iterations = format!("{n} * ({p} // rows if outer == 'rows' else ceil_div({k}, k_tile))");
        let reads = ["outer", "rows", "k_tile"];
        let for_all = over("work_for_all_threads", &reads, &format!("{iterations} >= {needed}"));
        constraints.push(shape.work().of_result(s, for_all));
    }
    constraints
}

/// Estimated cycles: register tiles, bound by their multiply-adds and loads or by reading the patches from
/// the cache that holds a block of them; then copying the patches.
fn estimate(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> f64 {
    let lanes = s.target.lanes(s.workload.dtype);
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let taps = shape.r * shape.s;
    let steps = (shape.c.unwrap_or(1) * taps) as f64;
    let rows = int("rows");
    let block = (rows * bytes_per_row(s, shape)) as f64;
    let weights = shape.k as f64 * steps * s.workload.dtype.bytes() as f64;
    let (patches_from, blocks) = match text("outer").as_str() {
        "rows" => (block + weights, (shape.p / rows) as f64),
        _ => (block * (shape.p / rows) as f64 + weights, (shape.p / rows) as f64),
    };
    let mut cycles = 0.0;
    for (n_k, channels) in cuts(shape.k, int("k_tile")) {
        for (n_x, x) in cuts(vectors(shape, lanes, rows), int("x_tile")) {
            let read = steps * (x * 4 * lanes) as f64 / bandwidth(s, patches_from);
            let compute = 1.35 * steps * step_cycles(s, x, channels) + 3.0 * taps as f64 + 20.0;
            cycles += n_k * n_x * blocks * (compute.max(read) + 0.2 * compute.min(read));
        }
    }
    let patches = steps * (shape.p * shape.q) as f64;
    let whole = patches * s.workload.dtype.bytes() as f64;
    cycles += match text("cols").as_str() {
        "none" => 0.0,
        "block" => patches * 0.4,
        _ => patches * 0.3 + 2.0 * whole / bandwidth(s, whole),
    };
    if shape.has_prologue {
        let input = (shape.c.unwrap_or(1) * shape.axes.iter().map(|axis| axis.input).product::<i64>()) as f64;
        let (changed, copied) = if text("pad") == "inline" { (patches, 0.0) } else { (input, 0.4 * input) };
        cycles += copied + changed * (2 * s.workload.prologue().len()) as f64 / lanes as f64;
    }
    cycles += write_back(s, (shape.k * shape.p * shape.q) as f64 * s.workload.dtype.bytes() as f64);
    cycles *= shape.n as f64;
    let (n_tiles, n_blocks) = (ceil_div(shape.k, int("k_tile")), shape.p / rows);
    let n_iterations = shape.n * if text("outer") == "rows" { n_blocks } else { n_tiles };
    let share = SharedWork::of(s, space, config);
    shape.work().of_busiest_thread(s, share, cycles, n_iterations, shape.n * n_tiles * n_blocks)
}

fn steps(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> Vec<Step> {
    let plan = Im2ColDecisions::of(s, shape, space, config);
    [plan.patches(), plan.tiles(), plan.operands(), plan.register_tile(), plan.threads()].concat()
}

/// Decisions of a configuration.
struct Im2ColDecisions<'a> {
    s: &'a TemplateSetting,
    shape: &'a ReductionSizes,
    lanes: i64,
    /// Channels, and vectors of pixels, of a tile.
    k_tile: i64,
    x_tile: i64,
    /// Rows of a block.
    rows: i64,
    c_block: i64,
    unroll_c: i64,
    /// Loops over blocks of rows and tiles of channels, the outer one first.
    outer: [&'static str; 2],
    /// Copies of the patches, of the padded input, and of the weights.
    cols: String,
    pad: String,
    packs_weights: bool,
    share: SharedWork,
}

impl<'a> Im2ColDecisions<'a> {
    fn of(s: &'a TemplateSetting, shape: &'a ReductionSizes, space: &Space, config: &Config) -> Im2ColDecisions<'a> {
        let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
        Im2ColDecisions {
            s,
            shape,
            lanes: s.target.lanes(s.workload.dtype),
            k_tile: int("k_tile"),
            x_tile: int("x_tile"),
            rows: int("rows"),
            c_block: int("c_block"),
            unroll_c: int("unroll_c"),
            outer: if text("outer") == "rows" { ["rows", "kt"] } else { ["kt", "rows"] },
            cols: text("cols"),
            pad: text("pad"),
            packs_weights: space.flag(config, "pack_w"),
            share: SharedWork::of(s, space, config),
        }
    }

    /// Whether each thread takes a part of the sums.
    fn is_cut(&self) -> bool {
        self.share == SharedWork::Sum
    }

    /// Stage that computes the sums, and its loops.
    fn sums(&self) -> [&'static str; 7] {
        match self.is_cut() {
            false => [Window::ACC, "k", "p", "q", "c", "r", "s"],
            true => [PARTS, "S.k", "S.p", "S.q", "S.in_part", "S.r", "S.s"],
        }
    }

    /// Steps that make the patches a buffer with axes n, p, q, c, r and s, and move p and q last, as pixels.
    fn patches(&self) -> Vec<Step> {
        if self.cols == "none" {
            return Vec::new();
        }
        let input = match self.shape.padded {
            true => Window::PAD,
            false if is_blocked(self.s) => Window::KEPT_INPUT,
            false => Window::INPUT,
        };
        vec![
            reindex(Window::ACC, input, "cols"),
            reorder(&["cols.0", "cols.4", "cols.5", "cols.3", "cols.1", "cols.2"]),
        ]
    }

    /// Steps for tiles of channels of a block of rows; the sum of each has a buffer of its own, which the
    /// epilogue reads.
    fn tiles(&self) -> Vec<Step> {
        let Im2ColDecisions { shape, lanes, outer, .. } = self;
        let mut steps = vec![
            split("ok", self.k_tile, "kt", "okr"),
            split("op", self.rows, "rows", "opr"),
            reorder(&["on", outer[0], outer[1], "okr", "opr", "oq"]),
        ];
        if self.is_cut() {
            let part = share::part_of(self.s, shape.c.unwrap_or(1), 1);
            steps.extend(share::in_parts(Window::ACC, &["n", "k", "p", "q"], "c", &["r", "s"], part));
            steps.extend([compute_at(Window::ACC, outer[1]), compute_at(PARTS, outer[1])]);
        } else {
            steps.push(compute_at(Window::ACC, outer[1]));
        }
        // If vectors hold several rows each and the last one fewer, it is not evident that blocks do not
        // overlap.
        let hides = shape.q > 1 && lanes % shape.q == 0 && self.rows * shape.q % lanes != 0;
        let pixels = if hides {
            "oq"
        } else {
            steps.push(fuse("opr", "oq", "ox"));
            "ox"
        };
        steps.extend([split(pixels, *lanes, "ov", "ol"), vectorize("ol")]);
        let [_, k, p, q, c, r, columns] = self.sums();
        steps.extend([
            fuse(p, q, "x"),
            split("x", self.x_tile * lanes, "xt", "xr"),
            split("xr", *lanes, "xv", "xl"),
            split(c, self.c_block, "co", "cb"),
            split("cb", self.unroll_c, "ci", "cu"),
            reorder(&["co", "xt", r, columns, "ci", "cu", k, "xv", "xl"]),
        ]);
        steps
    }

    /// Steps that store the operands in the order of their use.
    fn operands(&self) -> Vec<Step> {
        let Im2ColDecisions { shape, lanes, k_tile, .. } = self;
        let mut steps = Vec::new();
        if self.cols == "block" {
            steps.push(compute_at("cols", self.outer[0]));
        }
        match self.pad.as_str() {
            "inline" => steps.push(inline(Window::PAD)),
            "copied" => steps.extend([split("pw", *lanes, "pwv", "pwl"), vectorize("pwl")]),
            _ => {}
        }
        if self.cols != "none" {
            steps.push(layout("cols", &[Whole(0), Whole(4), Whole(5), Whole(3), Whole(1), Whole(2)]));
            steps.extend([split("cols.2", *lanes, "cols.v", "cols.l"), vectorize("cols.l")]);
        }
        if self.packs_weights {
            let [k, c] = shape.weight_axes;
            let axes = [Outer(k, *k_tile), Whole(2), Whole(3), Whole(c), Inner(k, *k_tile)];
            let dtype = self.s.workload.dtype.is_half().then_some(DType::F32);
            steps.push(stage_as(Window::WEIGHTS, None, "W.p", &axes, dtype));
        }
        steps
    }

    /// Steps that keep the sums of a tile in registers, and add up the threads' parts.
    fn register_tile(&self) -> Vec<Step> {
        let [sum, k, ..] = self.sums();
        let mut steps = vec![accumulate(sum, "xt", "acc.r")];
        steps.extend(["cu", k, "xv"].map(unroll));
        steps.push(vectorize("xl"));
        if self.is_cut() {
            let extent = self.k_tile.min(self.shape.k);
            steps.extend([fuse("p", "q", "pq"), split("pq", self.lanes, "total.v", "total.l")]);
            steps.push(reorder(&["k", "total.v", PART, "total.l"]));
            steps.extend([accumulate(Window::ACC, "total.v", "total"), vectorize("total.l")]);
            let inside = self.rows * self.shape.q;
            steps.push(share::on_own_lines(self.s, &[0, 1, 2, 3, 4], 2, extent, inside));
        }
        steps
    }

    /// Parallel loops of the convolution and of copies.
    fn threads(&self) -> Vec<Step> {
        if self.share == SharedWork::Nothing {
            return Vec::new();
        }
        let mut steps = match self.is_cut() {
            true => vec![parallel(EACH_PART)],
            false => vec![fuse("on", self.outer[0], "threads"), parallel("threads")],
        };
        if self.cols == "whole" || self.is_cut() && self.cols == "block" {
            steps.extend([
                fuse("cols.0", "cols.4", "cols.nr"),
                fuse("cols.nr", "cols.5", "cols.nrs"),
                parallel("cols.nrs"),
            ]);
        }
        if self.pad == "copied" {
            steps.extend([fuse("pn", "pc", "pnc"), parallel("pnc")]);
        }
        steps
    }
}
