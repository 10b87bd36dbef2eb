//! Transposed convolution as a matrix product of weights and input, followed by col2im.

use super::super::model::{bandwidth, cuts, step_cycles};
use super::super::step::{
    accumulate, col2im, compute_at, fuse, inline, layout, parallel, reindex, reorder, split, unroll, vectorize,
};
use super::super::{TemplateSetting, constraint_over, has_value};
use super::direct::pack;
use super::{Algorithm, ReductionSizes, ceil_div, divisors, is_blocked};
use tilewright_ir::op::{SizeRange, Window, WindowAxis};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{Step, gcd};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Matrix product `columns[krs, hw] = Σ W[c, krs] · X[c, hw]` around a register tile; each result is then the
/// sum of the columns that contribute to it. No inserted zero is read or multiplied.
///
/// The lanes of the product are channels and taps, as in the layout of constant weights. Columns are computed
/// for all channels, or for a block of them just before they are added up, row by row of the output, followed
/// by the epilogue. The lanes of the sum are output channels, or columns of the output if the stride is about
/// a vector, since adjacent results within a stride come from adjacent taps.
///
/// # Source
/// Dumoulin and Visin, "A guide to convolution arithmetic for deep learning" (2016), chapter 4, for the
/// operation; Caffe's deconvolution, for adding up columns.
pub const COL2IM: Algorithm<ReductionSizes> = Algorithm {
    name: "col2im",
    applies: |shape| shape.inserts_zeros && !shape.is_agreed,
    parameters,
    constraints,
    steps,
    estimate,
};

/// Maximum size in bytes of columns that are computed as a whole.
const MOST_BYTES: i64 = 1 << 30;
/// Cycles of converting and broadcasting an element of 16 bits of the input, for each register tile that
/// reads it (Emerald Rapids, f16, 64 channels of 14 × 14 to 32 of 28 × 28 by 4 × 4 filters: 147 µs with two
/// vectors and 14 pixels in a tile, 101 with eight and two). LLVM's code takes about one.
const CONVERTED: f64 = 2.5;
/// Maximum number of phases, taps and vectors of the sum that are unrolled.
const MOST_UNROLLED: i64 = 4;

/// Pixels of the input that a register tile may have, up to a number; tiles of an open number of rows end
/// where the rows do.
fn tiles_of_pixels(s: &TemplateSetting, shape: &ReductionSizes, most: i64) -> Vec<i64> {
    let SizeRange { least, step, .. } = s.workload.range(Window::OPEN);
    let common = shape.open_rows.map(|_| gcd(least, step) * shape.axes[1].input);
    (1..=most).filter(|n| common.is_none_or(|common| common % n == 0)).collect()
}

/// The sizes along one spatial axis.
struct SpatialSizes {
    stride: i64,
    /// Maximum number of taps that contribute to one result.
    met: i64,
}

/// Rows and columns.
fn along(shape: &ReductionSizes) -> [SpatialSizes; 2] {
    shape.axes.map(|WindowAxis { filter, stride, dilation, .. }| {
        let period = (1..=stride).find(|r| r * dilation % stride == 0).expect("the stride is one");
        SpatialSizes { stride, met: ceil_div(filter, period) }
    })
}

/// Number of elements of a column per channel: the taps.
fn taps(shape: &ReductionSizes) -> i64 {
    shape.r * shape.s
}

/// Pixels of the input.
fn pixels(shape: &ReductionSizes) -> i64 {
    shape.axes.iter().map(|axis| axis.input).product()
}

fn parameters(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Parameter> {
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    let c = shape.c.unwrap_or(1);
    let whole = shape.n * shape.k * taps(shape) * pixels(shape) * s.workload.dtype.bytes() as i64;
    vec![
        Parameter::categorical("lanes", &["k", "q"]),
        Parameter::ordinal("k_block", divisors(shape.k, 1)).optional(),
        Parameter::ordinal("y_tile", 1..=ceil_div(shape.k * taps(shape), lanes).min(registers / 2)).optional(),
        Parameter::ordinal("pixels", tiles_of_pixels(s, shape, pixels(shape).min(registers - 2))).optional(),
        Parameter::ordinal("c_block", [64, 128, 256, 512].into_iter().filter(|&b| b < c).chain([c])),
        Parameter::ordinal("unroll_c", [1, 2, 4].into_iter().filter(|&u| u <= c)),
        Parameter::categorical("outer", &["rows", "k"]),
        Parameter::categorical("cols", if whole > MOST_BYTES { &["block"] } else { &["whole", "block"] }),
        // A copy of an open number of rows would be one of as many pixels.
        Parameter::categorical("input", if shape.open_rows.is_some() { &["plain"] } else { &["plain", "packed"] }),
    ]
}

fn constraints(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Constraint> {
    let parameters = parameters(s, shape);
    let over = |name: &str, reads: &[&str], text: &str| constraint_over(name, reads, text, &parameters);
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    let ReductionSizes { n, k, .. } = *shape;
    let (taps, pixels, [_, columns]) = (taps(shape), pixels(shape), along(shape));
    let fits = move |y: i64, x: i64| y * x + y < registers;
    let tiles = (1..=ceil_div(k * taps, lanes).min(registers / 2))
        .flat_map(|y| (1..=pixels.min(registers - 2)).map(move |x| (y, x)));
    let largest = tiles.filter(|&(y, x)| fits(y, x)).map(|(y, x)| y * x).max().unwrap_or(1);
    let vectors = format!("ceil_div(k_block * {taps}, {lanes})");
    // Half of the largest possible tile within a block.
    let enough = format!("min({largest}, {vectors} * {}) // 2", pixels.min(registers / 4));
    let in_registers = format!("y_tile * pixels + y_tile < {registers} and y_tile * pixels >= {enough}");
    // Channels are lanes if a block fills a vector or holds all of them; columns if a stride is at least half
    // a vector.
    let by_channels = format!("lanes == 'k' and k_block >= {}", lanes.min(k));
    let by_columns = if 2 * columns.stride >= lanes { " or lanes == 'q'" } else { "" };
    let mut constraints = vec![
        over("registers", &["y_tile", "pixels", "k_block"], &in_registers),
        over("inside", &["y_tile", "k_block"], &format!("y_tile <= {vectors}")),
        over("lanes_of_sum", &["lanes", "k_block"], &(by_channels + by_columns)),
    ];
    if s.n_threads > 1 {
        // Columns that are computed as a whole are shared among threads by tiles.
        let is_whole = if has_value(&parameters, "cols", "whole") { "cols == 'whole' or " } else { "" };
        let text = format!("{is_whole}{} // k_block >= {}", n * k, (s.n_threads as i64).min(n * k));
        constraints.push(over("work_for_all_threads", &["cols", "k_block"], &text));
    }
    constraints
}

fn steps(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> Vec<Step> {
    let plan = Col2ImDecisions::of(s, shape, space, config);
    [
        vec![col2im(Window::ACC, plan.k_block, !plan.by_channels), inline(Window::ACC)],
        plan.operands(),
        plan.results(),
        plan.product(),
        plan.sums(),
        plan.epilogue(),
        plan.threads(),
    ]
    .concat()
}

/// Decisions of a configuration, and values derived from them.
struct Col2ImDecisions<'a> {
    s: &'a TemplateSetting,
    shape: &'a ReductionSizes,
    lanes: i64,
    /// Whether the lanes of the sum are channels, and whether the epilogue processes vectors of them.
    by_channels: bool,
    in_vectors: bool,
    /// Channels of a block.
    k_block: i64,
    /// Channels and taps, and pixels, of a register tile.
    y_tile: i64,
    pixels: i64,
    c_block: i64,
    unroll_c: i64,
    /// Whether columns are made for all channels at once.
    is_whole: bool,
    /// Whether the input is copied.
    is_packed: bool,
    rows: SpatialSizes,
    columns: SpatialSizes,
    /// Whether at most one tap contributes to a result: the epilogue then reads the columns directly, phase
    /// by phase.
    is_alone: bool,
    /// Loops around a row of results.
    outer: &'static [&'static str],
    /// Loops over tiles of the product, the outer one first.
    order: (&'static str, &'static str),
}

impl<'a> Col2ImDecisions<'a> {
    fn of(s: &'a TemplateSetting, shape: &'a ReductionSizes, space: &Space, config: &Config) -> Col2ImDecisions<'a> {
        let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
        let (lanes, k_block, by_channels) = (s.target.lanes(s.workload.dtype), int("k_block"), text("lanes") == "k");
        let [rows, columns] = along(shape);
        let is_alone = rows.met * columns.met == 1;
        Col2ImDecisions {
            s,
            shape,
            lanes,
            by_channels,
            // A block that ends inside a block of lanes would share it with the next.
            in_vectors: by_channels && is_blocked(s) && (k_block % lanes == 0 || k_block == shape.k),
            k_block,
            y_tile: int("y_tile") * lanes,
            pixels: int("pixels"),
            c_block: int("c_block"),
            unroll_c: int("unroll_c"),
            is_whole: text("cols") == "whole",
            is_packed: text("input") == "packed",
            rows,
            columns,
            is_alone,
            outer: match by_channels {
                true => &["on", "okt", "op"],
                false if is_alone => &["on", "okt", "okr", "ops"],
                false => &["on", "okt", "okr", "op"],
            },
            order: if text("outer") == "rows" { ("acc.m.xo", "acc.m.yo") } else { ("acc.m.yo", "acc.m.xo") },
        }
    }

    /// Steps for the operands. Weights are stored in the order of their use.
    fn operands(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.by_channels {
            steps.extend([
                split("acc.w.y", self.k_block, "acc.w.x", "acc.w.k"),
                split("acc.w.k", self.lanes, "acc.w.v", "acc.w.l"),
                reorder(&["acc.w.c", "acc.w.t", "acc.w.v", "acc.w.x", "acc.w.l"]),
            ]);
            // Adjacent taps are transposed together.
            if taps(self.shape) > 1 && taps(self.shape) <= 16 {
                steps.push(unroll("acc.w.x"));
            }
        } else {
            steps.push(split("acc.w.y", self.lanes, "acc.w.v", "acc.w.l"));
        }
        steps.extend([
            vectorize("acc.w.l"),
            layout("acc.w", &[Whole(1), Outer(2, self.y_tile), Whole(0), Inner(2, self.y_tile)]),
        ]);
        match (self.is_packed, is_blocked(self.s)) {
            (true, true) => steps.push(layout(Window::KEPT_INPUT, &[Whole(0), Whole(2), Whole(3), Whole(1)])),
            (true, false) => {
                steps.push(reindex("acc.m", Window::INPUT, "acc.x"));
                steps.extend(pack("acc.x.2", "acc.x.3", self.lanes));
            }
            (false, _) => {}
        }
        if self.in_vectors {
            steps.push(layout(Window::KEPT_OUTPUT, &Window::channels_last(self.lanes)));
            steps.extend(
                self.s.workload.kept_operands().iter().map(|kept| layout(kept, &Window::channels_last(self.lanes))),
            );
        }
        steps
    }

    /// Steps for rows of a block of channels, each added up in a buffer of its own, which the epilogue reads.
    fn results(&self) -> Vec<Step> {
        let mut steps = vec![split("ok", self.k_block, "okt", "okr")];
        match (self.by_channels, self.in_vectors) {
            (true, true) => {
                steps.extend([
                    split("okr", self.lanes, "okv", "okl"),
                    reorder(&[self.outer, &["oq", "okv", "okl"]].concat()),
                ]);
            }
            (true, false) => {
                steps.extend([split("oq", self.lanes, "oqv", "oql"), split("okr", self.lanes, "okv", "okl")]);
                steps.push(reorder(&[self.outer, &["okv", "oqv", "oql", "okl"]].concat()));
            }
            (false, _) if self.is_alone => {
                steps.extend([
                    split("op", self.rows.stride, "ops", "opp"),
                    split("oq", self.columns.stride, "oqs", "oqp"),
                ]);
                steps.extend([split("oqp", self.lanes, "oqv", "oql")]);
                steps.push(reorder(&["on", "okt", "okr", "ops", "opp", "oqs", "oqv", "oql"]));
            }
            (false, _) => {
                steps.extend([split("oq", self.lanes, "oqv", "oql"), reorder(&[self.outer, &["oqv", "oql"]].concat())]);
            }
        }
        steps.push(if self.is_alone && !self.by_channels { inline("acc.t") } else { compute_at("acc.t", "op") });
        if !self.is_whole {
            steps.push(compute_at("acc.m", "okt"));
        }
        steps
    }

    /// Steps for the product.
    fn product(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let (outside, inside) = self.order;
        steps.extend([
            fuse("acc.m.h", "acc.m.w", "acc.m.x"),
            split("acc.m.x", self.pixels, "acc.m.xo", "acc.m.xi"),
            split("acc.m.y", self.y_tile, "acc.m.yo", "acc.m.yr"),
            split("acc.m.yr", self.lanes, "acc.m.yv", "acc.m.yl"),
            split("acc.m.c", self.c_block, "acc.m.co", "acc.m.cb"),
            split("acc.m.cb", self.unroll_c, "acc.m.ci", "acc.m.cu"),
            reorder(&[
                "acc.m.n", "acc.m.t", outside, "acc.m.co", inside, "acc.m.ci", "acc.m.cu", "acc.m.xi", "acc.m.yv",
                "acc.m.yl",
            ]),
            accumulate("acc.m", inside, "acc.m.tile"),
            layout("acc.m", &[Whole(0), Whole(1), Whole(3), Whole(4), Whole(2)]),
        ]);
        steps.extend(["acc.m.cu", "acc.m.xi", "acc.m.yv"].map(unroll));
        steps.push(vectorize("acc.m.yl"));
        steps
    }

    /// Steps for the sum of the columns, with a few vectors of it in registers.
    fn sums(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.by_channels {
            steps.extend([
                split("acc.t.k", MOST_UNROLLED * self.lanes, "acc.t.o", "acc.t.i"),
                split("acc.t.i", self.lanes, "acc.t.v", "acc.t.l"),
                reorder(&["acc.t.n", "acc.t.th", "acc.t.fh", "acc.t.tw", "acc.t.fw", "acc.t.o", "acc.t.v", "acc.t.l"]),
                layout("acc.t", &[Whole(0), Whole(2), Whole(3), Whole(4), Whole(5), Whole(1)]),
            ]);
            if self.columns.stride <= MOST_UNROLLED {
                steps.push(unroll("acc.t.fw"));
            }
        } else if !self.is_alone {
            steps.extend([
                split("acc.t.fw", MOST_UNROLLED * self.lanes, "acc.t.o", "acc.t.i"),
                split("acc.t.i", self.lanes, "acc.t.v", "acc.t.l"),
            ]);
        }
        if !self.is_alone {
            steps.push(reorder(&["acc.t.o", "acc.t.r", "acc.t.s", "acc.t.v", "acc.t.l"]));
            steps.push(accumulate("acc.t", "acc.t.o", "acc.t.tile"));
            let met = [("acc.t.r", self.rows.met), ("acc.t.s", self.columns.met)];
            steps.extend(met.iter().filter(|(_, met)| *met <= MOST_UNROLLED).map(|(taps, _)| unroll(taps)));
        }
        if self.by_channels || !self.is_alone {
            steps.extend([unroll("acc.t.v"), vectorize("acc.t.l")]);
        }
        steps
    }

    /// Steps for the epilogue.
    fn epilogue(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        match (self.by_channels, self.in_vectors) {
            (true, true) => steps.extend([unroll("okv"), vectorize("okl")]),
            (true, false) => steps.extend([unroll("okl"), vectorize("oql")]),
            (false, _) => {
                if self.is_alone && self.columns.stride <= MOST_UNROLLED * self.lanes {
                    steps.push(unroll("oqv"));
                }
                steps.push(vectorize("oql"));
            }
        }
        steps
    }

    /// Parallel loops.
    fn threads(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        let is_open = self.shape.open_rows.is_some();
        if is_open && self.is_whole && self.s.n_threads > 1 {
            // A number of rows that runs say has no inverse: the other loops cannot be joined with it.
            steps.extend(self.outer.last().map(|rows| parallel(rows)));
            steps.push(parallel(self.order.0));
        } else if self.s.n_threads > 1 {
            let mut shared = "on";
            let n_shared = if self.is_whole { self.outer.len() } else { 2 };
            for (inner, fused) in self.outer[1..n_shared].iter().zip(["threads.t", "threads.k", "threads.p"]) {
                steps.push(fuse(shared, inner, fused));
                shared = fused;
            }
            steps.push(parallel(shared));
            if self.is_whole {
                steps.extend([
                    fuse("acc.m.n", "acc.m.t", "acc.m.nt"),
                    fuse("acc.m.nt", self.order.0, "acc.m.threads"),
                    parallel("acc.m.threads"),
                ]);
            }
            if self.is_packed && !is_blocked(self.s) {
                steps.extend([fuse("acc.x.0", "acc.x.1", "acc.x.threads"), parallel("acc.x.threads")]);
            }
            if !self.s.workload.is_constant(Window::WEIGHTS) {
                steps.push(parallel("acc.w.c"));
            }
        }
        steps
    }
}

/// Estimated cycles: register tiles, bound by their multiply-adds and loads or by reading the weights and the
/// input from the cache that holds them; then writing the columns, adding them up and storing the results.
fn estimate(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> f64 {
    let lanes = s.target.lanes(s.workload.dtype);
    let bytes = s.workload.dtype.bytes() as f64;
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let ReductionSizes { n, k, p, q, .. } = *shape;
    let (c, taps, pixels, [rows, columns]) = (shape.c.unwrap_or(1), taps(shape), pixels(shape), along(shape));
    let k_block = int("k_block");
    let (n_blocks, of_block) = ((k / k_block) as f64, k_block * taps);
    let (by_channels, by_rows) = (text("lanes") == "k", text("outer") == "rows");
    let (c_block, y_tile) = (int("c_block"), int("y_tile"));
    let input = (c * pixels) as f64 * bytes;
    let weights = (c * of_block) as f64 * bytes;
    let all_weights = weights * n_blocks;
    let converted = if s.workload.dtype.is_half() { CONVERTED } else { 0.0 };

    let mut cycles = 0.0;
    for (n_y, y) in cuts(ceil_div(of_block, lanes), y_tile) {
        for (n_x, x) in cuts(pixels, int("pixels")) {
            for (n_c, depth) in cuts(c, c_block) {
                let slice = (depth * y * lanes) as f64 * bytes;
                let patch = (depth * x) as f64 * bytes;
                // The operand of the inner loop is read again for each tile of the outer one.
                let weights_from = if by_rows { all_weights + patch } else { slice + patch };
                let input_from = if by_rows { patch } else { input * depth as f64 / c as f64 + slice };
                let read = slice / bandwidth(s, weights_from) + 2.0 * patch / bandwidth(s, input_from);
                let step = step_cycles(s, y, x) + converted * x as f64;
                let compute = depth as f64 * step + 20.0 + 2.0 * (x * y) as f64;
                cycles += n_y * n_x * n_c * (compute.max(read) + 0.2 * compute.min(read));
            }
        }
    }
    cycles *= n_blocks;
    // Weights that no cache holds are read once.
    cycles = cycles.max(all_weights / bandwidth(s, all_weights + input));

    let in_columns = (k * taps * pixels) as f64;
    let made = in_columns * bytes / if text("cols") == "whole" { 1.0 } else { n_blocks };
    cycles += 2.0 * in_columns * bytes / bandwidth(s, made);
    let (results, met) = ((k * p * q) as f64, (rows.met * columns.met) as f64);
    // A vector of the sum is initialized and stored, and its taps are tested.
    let of_vector = |width: i64, tests: f64| results / width.min(lanes) as f64 * (2.0 + tests * met);
    cycles += match by_channels {
        true => of_vector(k_block, 1.0 + 2.0 / ceil_div(k_block, lanes).min(MOST_UNROLLED) as f64),
        false if met == 1.0 => 0.0,
        false => of_vector(columns.stride, 1.5),
    };
    cycles += match (by_channels, is_blocked(s)) {
        (true, false) => results * if k_block < lanes { 2.0 } else { 0.8 },
        (true, true) => results * 2.0 / lanes as f64,
        (false, _) => results * 2.0 / lanes.min(columns.stride) as f64,
    };
    cycles += results * bytes / bandwidth(s, results * bytes);
    if text("input") == "packed" && !is_blocked(s) {
        cycles += input / bytes * 0.6;
    }
    cycles * n as f64
}
