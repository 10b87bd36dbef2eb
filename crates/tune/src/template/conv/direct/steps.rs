//! The schedule of a configuration, stage by stage.

use super::super::super::TemplateSetting;
use super::super::super::share::{self, EACH_PART, PART, PARTS, SharedWork};
use super::super::super::step::{
    accumulate, compute_at, fuse, inline, layout, parallel, prefetch, reorder, split, stage, stage_as, tensorize,
    unroll, vectorize,
};
use super::super::{ReductionSizes, in_blocks, is_blocked};
use super::pack::{copy_blocks, has_whole_blocks, pack, pack_padded, pad_blocks};
use super::{copied, cut_sum, dot, elements, in_rows, loops, pads_by_tile, skips_padding, steps_at_once, widens};
use tilewright_ir::dot::STEPS;
use tilewright_ir::op::Window;
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{Step, TensorProduct};
use tilewright_search::{Config, Space};

/// Number of constant weights from which on copying them one by one takes longer than compiling code that
/// copies vectors.
const MANY_WEIGHTS: i64 = 1 << 18;
/// Prefetch distance of weights in bytes: tiles of results read the weights once or a few times,
/// sequentially.
const BYTES_AHEAD: i64 = 4096;
/// Maximum number of taps of a filter that are copied together.
const MOST_TAPS: i64 = 16;

/// Steps of a configuration: the input, the tiles of the result, their sums, then the parallel loops.
pub(super) fn steps(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> Vec<Step> {
    let plan = DirectDecisions::of(s, shape, space, config);
    [
        plan.input(),
        plan.kept_layouts(),
        plan.tiles(),
        plan.sums(),
        plan.reduction(),
        plan.weights(),
        plan.register_tile(),
        plan.total(),
        plan.epilogue(),
        plan.threads(),
    ]
    .concat()
}

/// Decisions of a configuration, and values derived from them.
struct DirectDecisions<'a> {
    s: &'a TemplateSetting,
    shape: &'a ReductionSizes,
    lanes: i64,
    /// Whether the lanes of vectors are channels.
    by_channels: bool,
    /// Channels, rows and columns of a tile.
    k_tile: i64,
    p_tile: i64,
    q_tile: i64,
    /// Channels of a block of the sum, and of them those that are unrolled.
    c_block: i64,
    unroll_c: i64,
    /// Whether columns of the filter are unrolled, so that each knows whether it is padding.
    unrolls_columns: bool,
    /// Loops over tiles, the outermost first.
    order: Vec<String>,
    write: String,
    /// Whether the input is copied, and whether by tiles.
    is_packed: bool,
    pads_by_tile: bool,
    share: SharedWork,
    /// Loop of the sum of which each thread takes a part, and its extent.
    cut: Option<(&'static str, i64)>,
    /// Dot product instruction, the number of reduction steps that it takes, and whether these are rows of
    /// the filter.
    dot: Option<TensorProduct>,
    at_once: i64,
    rows: bool,
    /// Whether tiles of channels end where groups do.
    groups_fill_tiles: bool,
    packs_weights: bool,
}

impl<'a> DirectDecisions<'a> {
    fn of(s: &'a TemplateSetting, shape: &'a ReductionSizes, space: &Space, config: &Config) -> DirectDecisions<'a> {
        let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
        let lanes = s.target.lanes(s.workload.dtype);
        let by_channels = text("lanes") == "k";
        let k_tile = elements(int("k_tile"), by_channels, lanes);
        let share = SharedWork::of(s, space, config);
        let groups_fill_tiles = shape.k_group == shape.k || shape.k_group % k_tile == 0;
        DirectDecisions {
            s,
            shape,
            lanes,
            by_channels,
            k_tile,
            p_tile: int("p_tile"),
            q_tile: elements(int("q_tile"), !by_channels, lanes),
            c_block: int("c_block"),
            unroll_c: int("unroll_c"),
            unrolls_columns: match dot(s, shape) {
                Some(_) => skips_padding(s, shape),
                None => space.has("unroll_s") && space.flag(config, "unroll_s"),
            },
            order: space.order(config, "order"),
            write: text("write"),
            is_packed: text("input") == "packed",
            pads_by_tile: pads_by_tile(s, shape, space, config),
            share,
            cut: cut_sum(s, shape).filter(|_| share == SharedWork::Sum),
            dot: dot(s, shape),
            at_once: steps_at_once(s, shape),
            rows: in_rows(s, shape),
            groups_fill_tiles,
            packs_weights: if shape.c.is_some() { groups_fill_tiles } else { by_channels },
        }
    }

    /// Loops over channels, rows and columns of the result, then over those of the filter, of the stage that
    /// sums.
    fn loops(&self) -> [&'static str; 6] {
        loops(self.cut.map(|(cut, _)| cut))
    }

    /// Whether a row of tiles is written at once.
    fn by_row(&self) -> bool {
        self.write == "row"
    }

    /// Loop over the columns that are written at once.
    fn row(&self) -> &'static str {
        if self.by_row() { "oq" } else { "oqr" }
    }

    /// Loops around a tile of the result, the outermost first.
    fn outer(&self) -> Vec<&'static str> {
        let is_grouped = self.shape.k_group < self.shape.k;
        let of_tiles = self.order.iter().filter_map(|axis| match axis.as_str() {
            "k" => Some("okt"),
            "p" => Some("opt"),
            _ => (!self.by_row()).then_some("oqt"),
        });
        ["on"].into_iter().chain(is_grouped.then_some("og")).chain(of_tiles).collect()
    }

    /// Innermost loop around a tile of the result.
    fn at(&self) -> &'static str {
        self.outer().pop().expect("there are tile loops")
    }

    /// Steps that read the input in place, or copy it.
    fn input(&self) -> Vec<Step> {
        let (s, shape, c_block) = (self.s, self.shape, self.c_block);
        match (shape.padded, self.is_packed) {
            (true, false) => vec![inline(Window::PAD)],
            (true, true) if !self.pads_by_tile => self.padded_copy(),
            (false, true) => {
                let input = if is_blocked(s) { Window::KEPT_INPUT } else { Window::INPUT };
                let blocks = match s.workload.layout().channels()[0] {
                    1 => Window::channels_last(c_block),
                    _ => [0, 1, 2, 3, 4].map(Whole),
                };
                let mut steps = vec![stage_as(input, None, "X.p", &blocks, copied(s, shape))];
                if has_whole_blocks(s, shape, c_block) {
                    steps.extend(copy_blocks(s, "X.p.3", "X.p.4", "all"));
                } else {
                    steps.extend(pack("X.p.3", "X.p.4", self.lanes));
                }
                steps
            }
            _ => Vec::new(),
        }
    }

    /// Steps that copy the whole padded input, and copy it again if operands have another type.
    fn padded_copy(&self) -> Vec<Step> {
        let (s, shape, c_block) = (self.s, self.shape, self.c_block);
        let is_long = widens(s, shape);
        let mut steps = Vec::new();
        if is_long {
            let axes = Window::channels_last(c_block);
            steps.push(stage_as(Window::PAD, None, "X.p", &axes, copied(s, shape)));
        }
        steps.extend(match self.dot.is_some() || self.rows {
            true => pad_blocks(s, shape, c_block),
            false => pack_padded(s, shape, c_block),
        });
        if is_long && shape.channels % c_block == 0 {
            steps.extend(copy_blocks(s, "X.p.3", "X.p.4", "long"));
        } else if is_long {
            steps.extend([split("X.p.4", self.lanes, "X.p.v", "X.p.l"), vectorize("X.p.l")]);
        }
        steps
    }

    /// Steps for the layouts of activations, if the template chooses them.
    fn kept_layouts(&self) -> Vec<Step> {
        let (s, mut steps) = (self.s, Vec::new());
        if !is_blocked(s) {
            return steps;
        }
        if self.c_block > 1 {
            steps.push(layout(Window::KEPT_INPUT, &Window::channels_last(self.c_block)));
        }
        // A group that ends inside a block of lanes would share it with the next.
        if self.by_channels && self.groups_fill_tiles && !self.shape.interleaved {
            let blocks = Window::channels_last(self.lanes);
            steps.push(layout(Window::KEPT_OUTPUT, &blocks));
            steps.extend(s.workload.kept_operands().iter().map(|kept| layout(kept, &blocks)));
        }
        steps
    }

    /// Steps for the tiles of the output. A row of tiles that is written at once is not cut here.
    fn tiles(&self) -> Vec<Step> {
        let shape = self.shape;
        let is_grouped = shape.k_group < shape.k;
        let mut steps = Vec::new();
        if shape.interleaved {
            steps.push(split("ok", shape.k / shape.k_group, "okg", "og"));
        } else if is_grouped {
            steps.push(split("ok", shape.k_group, "og", "okg"));
        }
        let channels = if is_grouped { "okg" } else { "ok" };
        steps.extend([split(channels, self.k_tile, "okt", "okr"), split("op", self.p_tile, "opt", "opr")]);
        if !self.by_row() {
            steps.push(split("oq", self.q_tile, "oqt", "oqr"));
        }
        steps.push(reorder(&[&self.outer()[..], &["okr", "opr", self.row()]].concat()));
        steps
    }

    /// Steps that put the sums of a tile, or parts of them, into a buffer of their own, which the epilogue
    /// reads.
    fn sums(&self) -> Vec<Step> {
        let (shape, mut steps) = (self.shape, Vec::new());
        if let Some((cut, extent)) = self.cut {
            let part = share::part_of(self.s, extent, if cut == "c" { self.c_block } else { 1 });
            let is_left = |l: &&str| *l != cut && (*l != "c" || shape.c.is_some());
            let rest: Vec<&str> = ["c", "r", "s"].into_iter().filter(is_left).collect();
            steps.extend(share::in_parts(Window::ACC, &["n", "k", "p", "q"], cut, &rest, part));
        }
        steps.push(compute_at(Window::ACC, self.at()));
        if self.pads_by_tile {
            steps.push(compute_at(Window::PAD, "okt"));
            steps.extend(pad_blocks(self.s, shape, self.c_block));
        }
        if self.cut.is_some() {
            steps.push(compute_at(PARTS, self.at()));
        } else if self.by_row() {
            steps.push(split("q", self.q_tile, "qt", "qr"));
        }
        steps
    }

    /// Loop around a register tile of sums, and the one over its columns.
    fn tile_of_sums(&self) -> (&'static str, &'static str) {
        match self.cut {
            Some(_) => (EACH_PART, self.loops()[2]),
            None if self.by_row() => ("qt", "qr"),
            None => (self.at(), "q"),
        }
    }

    /// Steps for the reduction, outermost first: blocks of channels, taps, channels of a block; then the
    /// tile.
    fn reduction(&self) -> Vec<Step> {
        let [k, p, _, c, r, columns] = self.loops();
        let (_, column) = self.tile_of_sums();
        let (mut steps, mut nest) = (Vec::new(), Vec::new());
        nest.extend(self.by_row().then_some("qt"));
        if self.shape.c.is_some() {
            steps.push(split(c, self.c_block, "co", "cb"));
            nest.extend(["co", r, columns, "ci", "cu"]);
            if self.dot.is_some() {
                let at_once = self.at_once;
                steps.extend([split("cb", self.unroll_c * at_once, "ci", "cr"), split("cr", at_once, "cu", "kk")]);
                nest.push("kk");
            } else {
                steps.push(split("cb", self.unroll_c, "ci", "cu"));
            }
        } else if self.rows {
            steps.push(split(r, STEPS, "ro", "kk"));
            nest.extend(["ro", columns, "kk"]);
        } else {
            nest.extend([r, columns]);
        }
        if self.by_channels {
            steps.push(split(k, self.lanes, "kv", "kl"));
            nest.extend([p, column, "kv", "kl"]);
        } else {
            steps.push(split(column, self.lanes, "qv", "ql"));
            nest.extend([k, p, "qv", "ql"]);
        }
        steps.push(reorder(&nest));
        steps
    }

    /// Steps that store weights in the order of their use.
    fn weights(&self) -> Vec<Step> {
        let (shape, k_tile, [k_axis, c_axis]) = (self.shape, self.k_tile, self.shape.weight_axes);
        let packed = |axes: &[_]| stage(Window::WEIGHTS, None, "W.p", axes);
        let [(outer_k, inner_k), (outer_c, inner_c)] =
            [(k_axis, k_tile), (c_axis, self.c_block)].map(|(axis, n)| (Outer(axis, n), Inner(axis, n)));
        let blocks = [outer_k, outer_c, Whole(2), Whole(3), inner_c, inner_k];
        match shape.c {
            Some(_) if self.dot.is_some() => {
                // The elements of a dot product are adjacent, within the block of channels summed for a tap.
                let of_steps = [0, 1, 2, 3].map(Whole).into_iter();
                let of_steps = of_steps.chain([Outer(4, self.at_once), Whole(5), Inner(4, self.at_once)]);
                vec![
                    stage_as(Window::WEIGHTS, None, "W.p", &blocks, copied(self.s, shape)),
                    layout("W.p", &of_steps.collect::<Vec<_>>()),
                ]
            }
            Some(_) if self.packs_weights => {
                let mut steps = vec![stage_as(Window::WEIGHTS, None, "W.p", &blocks, copied(self.s, shape))];
                steps.extend(self.transposed_taps());
                steps
            }
            None if self.rows => {
                vec![packed(&[Outer(0, k_tile), Outer(1, STEPS), Whole(2), Inner(0, k_tile), Inner(1, STEPS)])]
            }
            None if self.packs_weights => vec![packed(&[Outer(0, k_tile), Whole(1), Whole(2), Inner(0, k_tile)])],
            _ => Vec::new(),
        }
    }

    /// Steps that transpose adjacent taps together, if the time for it matters.
    fn transposed_taps(&self) -> Vec<Step> {
        let shape = self.shape;
        let is_large = shape.k * shape.c.unwrap_or(1) * shape.r * shape.s >= MANY_WEIGHTS;
        let takes_time = !self.s.workload.is_constant(Window::WEIGHTS) || is_large;
        if shape.weight_axes[0] != 0 || self.k_tile == 1 || shape.s == 1 || !takes_time {
            return Vec::new();
        }
        let mut steps = vec![
            split("W.p.5", self.lanes, "W.p.v", "W.p.l"),
            reorder(&["W.p.0", "W.p.1", "W.p.4", "W.p.v", "W.p.2", "W.p.3", "W.p.l"]),
            unroll("W.p.3"),
            vectorize("W.p.l"),
        ];
        if shape.r * shape.s <= MOST_TAPS {
            steps.push(unroll("W.p.2"));
        }
        steps
    }

    /// Steps that keep the sums of a tile in registers, with the loops that are unrolled for it.
    fn register_tile(&self) -> Vec<Step> {
        let (shape, [k, p, _, _, r, columns]) = (self.shape, self.loops());
        let (at, column) = self.tile_of_sums();
        let mut steps = vec![accumulate(if self.cut.is_some() { PARTS } else { Window::ACC }, at, "acc.r")];
        if self.by_channels {
            steps.extend([unroll(p), unroll(column), unroll("kv"), vectorize("kl")]);
        } else {
            steps.extend([unroll(k), unroll(p), unroll("qv"), vectorize("ql")]);
        }
        if shape.c.is_some() {
            steps.push(unroll("cu"));
        }
        if self.rows {
            steps.push(unroll(columns));
            // Each dot product then knows how many rows it sums.
            if shape.r > STEPS && shape.r % STEPS != 0 {
                steps.push(unroll("ro"));
            }
        }
        steps.extend(self.dot.or(self.rows.then_some(TensorProduct::Dot4)).map(|how| tensorize("kk", how)));
        if self.dot.is_some() {
            // A lane has the steps of a dot product in 32 bits.
            let bytes = 4 * self.k_tile * self.unroll_c;
            steps.push(prefetch("W.p", "ci", (BYTES_AHEAD / bytes).max(1)));
        }
        // Padding depends on the tap; it is decided tap by tap if rows or columns of a tile are unrolled.
        if shape.padded && !self.is_packed {
            steps.extend(self.unrolls_columns.then(|| unroll(columns)));
            steps.extend((self.p_tile > 1).then(|| unroll(r)));
        }
        steps
    }

    /// Steps that add up the threads' parts.
    fn total(&self) -> Vec<Step> {
        if self.cut.is_none() {
            return Vec::new();
        }
        let (along, others) = if self.by_channels { ("k", ["p", "q"]) } else { ("q", ["k", "p"]) };
        let (order, last) =
            if self.by_channels { ([0, 1, 3, 4, 2], self.k_tile) } else { ([0, 1, 2, 3, 4], self.q_tile) };
        vec![
            split(along, self.lanes, "total.v", "total.l"),
            reorder(&[others[0], others[1], "total.v", PART, "total.l"]),
            accumulate(Window::ACC, "total.v", "total"),
            vectorize("total.l"),
            share::on_own_lines(self.s, &order, 4, last, 1),
        ]
    }

    /// Steps for the epilogue, over lanes that are contiguous in its reads and writes.
    fn epilogue(&self) -> Vec<Step> {
        let (lanes, row, mut steps) = (self.lanes, self.row(), Vec::new());
        if self.by_channels {
            steps.push(layout(Window::ACC, &[Whole(0), Whole(2), Whole(3), Whole(1)]));
        }
        let scatters = self.write == "scatter";
        if scatters || (in_blocks(self.s)[1] && self.by_channels && self.groups_fill_tiles) {
            steps.extend([split("okr", lanes, "okv", "okl"), reorder(&["opr", row, "okv", "okl"])]);
            steps.extend([unroll("okv"), vectorize("okl")]);
            // Lanes that are stored one by one need long code, which unrolling makes no faster.
            if !scatters {
                steps.extend([unroll("opr"), unroll(row)]);
            }
        } else {
            steps.extend([split(row, lanes, "oqv", "oql"), split("okr", lanes, "okv", "okl")]);
            steps.push(reorder(&["opr", "okv", "oqv", "oql", "okl"]));
            steps.extend([unroll("okl"), vectorize("oql")]);
        }
        steps
    }

    /// Parallel loops of the convolution and of copies.
    fn threads(&self) -> Vec<Step> {
        let (s, shape, mut steps) = (self.s, self.shape, Vec::new());
        if self.share == SharedWork::Nothing {
            return steps;
        }
        if self.cut.is_some() {
            steps.push(parallel(EACH_PART));
            if self.packs_weights && !s.workload.is_constant(Window::WEIGHTS) {
                steps.extend([fuse("W.p.0", "W.p.1", "W.p.kc"), parallel("W.p.kc")]);
            }
        } else if shape.n > 1 {
            steps.extend([fuse("on", self.outer()[1], "threads"), parallel("threads")]);
        } else {
            steps.push(parallel(self.outer()[1]));
        }
        match (self.is_packed, shape.padded) {
            (true, true) => {
                steps.push(parallel("pco"));
                steps.extend(widens(s, shape).then(|| parallel("X.p.1")));
            }
            (true, false) => steps.push(parallel("X.p.1")),
            (false, _) => {}
        }
        steps
    }
}
