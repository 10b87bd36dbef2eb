//! Schedule of a configuration, built step by step on the current program; steps that are illegal for it are
//! skipped.

use super::super::step::{
    accumulate, compute_at, fuse, inline, layout, parallel, peel, reorder, rfactor, split, unroll, vectorize,
};
use super::super::{TemplateSetting, ceil_div};
use super::stages::{self, LoopStage, StageGroup, groups, stages};
use tilewright_ir::index::Ranges;
use tilewright_ir::schedule::LayoutAxis::Whole;
use tilewright_ir::schedule::apply;
use tilewright_ir::{Index, Program, Step};
use tilewright_search::{Config, Space};

/// Choices of a configuration; parameters that a space does not have get defaults.
pub struct Choices {
    /// Number of vectors that the lane loop processes per iteration.
    pub vectors: i64,
    /// Unroll factor of a reduction.
    pub unroll: i64,
    /// Direction of vector lanes, if both are possible.
    pub lanes: Option<LaneDirection>,
    /// Tile size across the lanes, if an input is transposed relative to the output.
    pub tile: i64,
    /// Whether stages are computed separately, rather than fused by rows.
    pub apart: bool,
    /// Whether conditions on lanes stay as selects, rather than being peeled off.
    pub selects: bool,
    /// Whether all threads take part, however small the work.
    pub all_threads: bool,
    /// Number of pieces of work per thread.
    pub pieces: i64,
}

/// Direction of vector lanes in a reduction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum LaneDirection {
    /// Each lane computes another result.
    Across,
    /// Lanes hold partial results of one result, which are combined at the end.
    Along,
}

impl Default for Choices {
    fn default() -> Choices {
        let (vectors, unroll, tile) = (4, 16, 8);
        Choices { vectors, unroll, lanes: None, tile, apart: false, selects: false, all_threads: false, pieces: 1 }
    }
}

impl Choices {
    /// Choices that a configuration makes.
    pub fn of(space: &Space, config: &Config) -> Choices {
        let int = |name: &str, default: i64| if space.has(name) { space.int(config, name) } else { default };
        let is = |name: &str, text: &str| space.has(name) && space.text(config, name) == text;
        let default = Choices::default();
        let lanes = match () {
            () if is("lanes", "across") => Some(LaneDirection::Across),
            () if is("lanes", "along") => Some(LaneDirection::Along),
            () => None,
        };
        Choices {
            vectors: int("vectors", default.vectors),
            unroll: int("unroll", default.unroll),
            lanes,
            tile: int("tile", default.tile),
            apart: is("stages", "apart"),
            selects: is("borders", "selected"),
            all_threads: is("threads", "all"),
            pieces: int("pieces", default.pieces),
        }
    }
}

/// Loop of a stage that is vectorized.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum LaneLoop {
    /// Loop over results, by index.
    Across(usize),
    /// Loop of the reduction, by index.
    Along(usize),
    /// No loop, as there is a single element.
    None,
}

impl LaneLoop {
    /// Index of the loop, if any.
    pub fn at(self) -> Option<usize> {
        match self {
            LaneLoop::Across(at) | LaneLoop::Along(at) => Some(at),
            LaneLoop::None => None,
        }
    }

    /// Whether both directions of lanes are possible.
    pub fn is_choice(stages: &[LoopStage], group: &StageGroup, at: usize, lanes: i64) -> bool {
        let stage = &stages[at];
        across(stages, group, at).is_some() && along(stage, lanes).is_some()
    }

    /// Loop of a stage that is vectorized with these choices.
    pub fn of(stages: &[LoopStage], group: &StageGroup, at: usize, lanes: i64, choices: &Choices) -> LaneLoop {
        let stage = &stages[at];
        let chosen = choices.lanes.filter(|_| at == group.root);
        match (across(stages, group, at), along(stage, lanes)) {
            (None, None) => LaneLoop::None,
            (Some(a), None) => LaneLoop::Across(a),
            (None, Some(r)) => LaneLoop::Along(r),
            (Some(a), Some(r)) => match chosen {
                Some(LaneDirection::Across) => LaneLoop::Across(a),
                Some(LaneDirection::Along) => LaneLoop::Along(r),
                None if cost(stage, r, lanes) + 8.0 / n_combined(stage) < cost(stage, a, lanes) => LaneLoop::Along(r),
                None => LaneLoop::Across(a),
            },
        }
    }
}

/// Maximum number of sequential additions into one accumulator: the relative error of a sum of positive
/// numbers is then below 2⁻¹⁴ in f32, whatever the extent. Longer sums are sums of partial sums.
pub const MOST_ADDED: i64 = 1024;

/// Number of sequential additions into one accumulator of a stage.
pub fn n_added(stages: &[LoopStage], group: &StageGroup, at: usize, lanes: i64, choices: &Choices) -> i64 {
    let stage = &stages[at];
    let n: i64 = stage.reduction().map(|r| stage.loops[r].extent).product();
    match LaneLoop::of(stages, group, at, lanes, choices) {
        _ if !stage.is_sum => 0,
        LaneLoop::Along(r) => ceil_div(n, parts_width(stage, r, lanes, choices)),
        LaneLoop::Across(_) | LaneLoop::None => n,
    }
}

/// Number of partial sums in lanes along a loop.
fn parts_width(stage: &LoopStage, r: usize, lanes: i64, choices: &Choices) -> i64 {
    let extent = stage.loops[r].extent;
    let wanted = lanes * choices.vectors.min((extent / lanes).max(1));
    wanted.min(1 << extent.ilog2())
}

/// Number of elements that each result combines.
fn n_combined(stage: &LoopStage) -> f64 {
    stage.reduction().map(|r| stage.loops[r].extent as f64).product()
}

/// Loop over elements along which the output is contiguous, else the last one.
fn across(stages: &[LoopStage], group: &StageGroup, at: usize) -> Option<usize> {
    let stage = &stages[at];
    let own: Vec<usize> = stage.axes().filter(|a| !group.is_row(at, *a)).collect();
    own.iter().copied().find(|a| stage.loops[*a].stride == Some(1)).or(own.last().copied())
}

/// Reduction loop along which most inputs are contiguous.
fn along(stage: &LoopStage, lanes: i64) -> Option<usize> {
    let long = stage.reduction().filter(|r| stage.loops[*r].extent >= 4 && stage.reduces);
    let best = long.min_by(|a, b| cost(stage, *a, lanes).total_cmp(&cost(stage, *b, lanes)));
    best.filter(|r| stage.reads.iter().any(|read| read.strides[*r] == Some(1)))
}

/// Cycles of reading per element if lanes lie along a loop.
fn cost(stage: &LoopStage, at: usize, lanes: i64) -> f64 {
    let extent = stage.loops[at].extent;
    let read = |strides: &[Option<i64>]| match strides[at] {
        Some(0 | 1) => 0.5,
        Some(2..=4) => 2.0,
        _ => lanes as f64,
    };
    let step: f64 = 1.0 + stage.reads.iter().map(|r| read(&r.strides)).sum::<f64>();
    step * ceil_div(extent, lanes) as f64 / extent as f64
}

/// Loop of a group's last stage along which an input is contiguous, if that is not the lane loop.
pub fn crossing(stages: &[LoopStage], group: &StageGroup, lanes: i64) -> Option<usize> {
    let stage = &stages[group.root];
    if stage.reduces {
        return None;
    }
    let LaneLoop::Across(lane) = LaneLoop::of(stages, group, group.root, lanes, &Choices::default()) else {
        return None;
    };
    let crosses = |at: &usize| {
        let is_far = |stride: Option<i64>| stride.is_some_and(|s| s.abs() > 4);
        !group.is_row(group.root, *at)
            && *at != lane
            && stage.loops[*at].extent >= 4
            && stage.reads.iter().any(|r| r.strides[*at] == Some(1) && is_far(r.strides[lane]))
    };
    stage.axes().find(crosses)
}

/// Number of first and of last iterations of the lane loop that conditions treat differently, in a group's
/// last stage.
pub fn borders(stages: &[LoopStage], group: &StageGroup, lanes: i64) -> Option<[i64; 2]> {
    let stage = &stages[group.root];
    let LaneLoop::Across(lane) = LaneLoop::of(stages, group, group.root, lanes, &Choices::default()) else {
        return None;
    };
    let (var, n) = (stage.loops[lane].var, stage.loops[lane].extent);
    let mut ranges = Ranges::default();
    stage.loops.iter().for_each(|l| ranges.push(l.var, l.extent.into()));
    let (mut front, mut back) = (0, 0);
    for [a, b] in &stage.conditions {
        // 0 <= step·v + rest
        let all = b.sub(a).offset(-1);
        let step = all.coefficient(var);
        let rest = all.sub(&Index::from(var).scale(step));
        if step == 0 || rest.uses(var) {
            continue;
        }
        let (Some(least), Some(most)) = (ranges.lower(&rest), ranges.upper(&rest)) else { continue };
        let (start, end) = if step > 0 {
            (-most.div_euclid(step), -least.div_euclid(step))
        } else {
            (least.div_euclid(-step) + 1, most.div_euclid(-step) + 1)
        };
        let (start, end) = (start.clamp(0, n), end.clamp(0, n));
        if start == end {
            continue;
        }
        if end <= n - start { front = front.max(end) } else { back = back.max(n - start) }
    }
    // Wide borders come from concatenation rather than from padding.
    let is_narrow = front + back > 0 && front + back <= n / 4;
    is_narrow.then_some([front, back])
}

/// Group of stages, with the choices that schedule it.
struct InGroup<'a> {
    all: &'a [LoopStage],
    group: &'a StageGroup,
    /// Elements of a vector.
    lanes: i64,
    choices: &'a Choices,
}

impl InGroup<'_> {
    /// Returns the last stage.
    fn root(&self) -> &LoopStage {
        &self.all[self.group.root]
    }

    /// Lanes of a stage of the group.
    fn lanes_of(&self, at: usize) -> LaneLoop {
        LaneLoop::of(self.all, self.group, at, self.lanes, self.choices)
    }
}

/// Loops over the elements of a group's last stage, by number: rows, others outside, the one across lanes of
/// a tile, the one of lanes.
struct RootLoops {
    outside: Vec<usize>,
    /// Number of outside loops that are rows of attached stages, too.
    n_rows: usize,
    tile: Option<usize>,
    lane: Option<usize>,
}

impl RootLoops {
    fn of(g: &InGroup) -> RootLoops {
        let (root, group) = (g.root(), g.group);
        let tile = crossing(g.all, group, g.lanes).filter(|_| g.choices.tile > 1);
        let lane = match g.lanes_of(group.root) {
            LaneLoop::Across(at) => Some(at),
            LaneLoop::Along(_) | LaneLoop::None => None,
        };
        let outside: Vec<usize> = root.axes().filter(|a| Some(*a) != lane && Some(*a) != tile).collect();
        let n_rows = match group.attached.is_empty() {
            true => 0,
            false => outside.iter().filter(|a| group.is_row(group.root, **a)).count(),
        };
        RootLoops { outside, n_rows, tile, lane }
    }
}

/// Names of the loops of a group's last stage, as the steps so far have left them.
struct ScheduledLoops {
    /// Loops around the lanes, outermost first.
    around: Vec<String>,
    lane: Option<String>,
    /// Loop that threads share.
    shared: Option<String>,
}

/// Builder of a schedule: a program with the steps that made it.
#[derive(Clone)]
pub struct ScheduleBuilder {
    program: Program,
    steps: Vec<Step>,
}

impl ScheduleBuilder {
    /// Program of a workload with small stages inlined, and the steps that did it.
    pub fn inlined(s: &TemplateSetting) -> (Program, Vec<Step>) {
        let mut builder = ScheduleBuilder { program: s.workload.program(), steps: Vec::new() };
        let mut refused: Vec<String> = Vec::new();
        loop {
            let mut all = stages(&builder.program);
            all.iter_mut().filter(|stage| refused.contains(&stage.name)).for_each(|stage| stage.cycles = f64::INFINITY);
            match stages::to_inline(&builder.program, &all).filter(|name| !refused.contains(name)) {
                None => return (builder.program, builder.steps),
                Some(name) => {
                    if !builder.attempt(inline(&name)) {
                        refused.push(name);
                    }
                }
            }
        }
    }

    /// Continues a program, with the steps that made it.
    pub fn on(program: Program, steps: Vec<Step>) -> ScheduleBuilder {
        ScheduleBuilder { program, steps }
    }

    /// Current program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Steps that made the program.
    pub fn finish(self) -> Vec<Step> {
        self.steps
    }

    /// Schedule of a configuration.
    pub fn scheduled(s: &TemplateSetting, choices: &Choices) -> Vec<Step> {
        let (program, steps) = ScheduleBuilder::inlined(s);
        let mut builder = ScheduleBuilder::on(program, steps);
        let lanes = s.target.lanes(stages::lane_type(&builder.program));
        builder.cut_long_sums(lanes, choices);
        let all = stages(&builder.program);
        for group in groups(&builder.program, &all, choices.apart, false) {
            builder.group(s, &InGroup { all: &all, group: &group, lanes, choices });
        }
        builder.steps
    }

    /// Applies a step if it is legal; returns whether it was.
    pub fn attempt(&mut self, step: Step) -> bool {
        match apply(&self.program, &step) {
            Ok(program) => {
                self.program = program;
                self.steps.push(step);
                true
            }
            Err(_) => false,
        }
    }

    pub fn attempt_all(&mut self, steps: impl IntoIterator<Item = Step>) {
        for step in steps {
            self.attempt(step);
        }
    }

    /// Splits sums of more than [`MOST_ADDED`] numbers into sums of partial sums, each in a separate stage.
    fn cut_long_sums(&mut self, lanes: i64, choices: &Choices) {
        let mut refused: Vec<String> = Vec::new();
        loop {
            let all = stages(&self.program);
            let groups = groups(&self.program, &all, choices.apart, false);
            let mut each = groups.iter().flat_map(|g| g.attached.iter().chain([&g.root]).map(move |at| (g, *at)));
            let n_added = |(group, at): (&StageGroup, usize)| n_added(&all, group, at, lanes, choices);
            let is_long = |(group, at): &(&StageGroup, usize)| {
                n_added((group, *at)) > MOST_ADDED && !refused.contains(&all[*at].name)
            };
            let Some((group, at)) = each.find(is_long) else { return };
            let along = LaneLoop::of(&all, group, at, lanes, choices);
            if !self.cut_sum(&all[at], n_added((group, at)), along, lanes) {
                refused.push(all[at].name.clone());
            }
        }
    }

    /// Splits a stage's sum into partial sums over its outermost loop that can be cut, so that at most
    /// [`MOST_ADDED`] of its `n_added` numbers are added sequentially.
    fn cut_sum(&mut self, stage: &LoopStage, n_added: i64, along: LaneLoop, lanes: i64) -> bool {
        let long = stage.reduction().filter(|r| stage.loops[*r].extent > 1);
        for r in long {
            let before = self.clone();
            if self.cut_loop(stage, r, n_added, along, lanes) {
                return true;
            }
            *self = before;
        }
        false
    }

    fn cut_loop(&mut self, stage: &LoopStage, r: usize, n_added: i64, along: LaneLoop, lanes: i64) -> bool {
        let extent = stage.loops[r].extent;
        let mut n_each = (MOST_ADDED as f64 * extent as f64 / n_added as f64).max(1.0) as i64;
        if along == LaneLoop::Along(r) {
            n_each = n_each.max(lanes) / lanes * lanes;
        }
        n_each = (n_each / 2 + 1..=n_each).rev().find(|n| extent % n == 0).unwrap_or(n_each);
        if n_each >= extent {
            return false;
        }
        let (number, name) = (self.steps.len(), &stage.loops[r].name);
        let mut outer = name.clone();
        if n_each > 1 {
            outer = format!("{name}.s{number}");
            if !self.attempt(split(name, n_each, &outer, &format!("{name}.e{number}"))) {
                return false;
            }
        }
        let parts = format!("{}.s{number}", stage.name);
        let is_cut = self.attempt(rfactor(&stage.name, &outer, &parts));
        // Results that are adjacent in the input stay adjacent, so that lanes lie across them.
        if let LaneLoop::Across(lane) = along
            && stage.reads.iter().any(|read| read.strides[lane] == Some(1))
        {
            let own = stage.subscripts.len();
            self.attempt(layout(&parts, &[own].into_iter().chain(0..own).map(Whole).collect::<Vec<_>>()));
        }
        is_cut
    }

    /// Schedules the stages of a group around the loops of its last one.
    fn group(&mut self, s: &TemplateSetting, g: &InGroup) {
        let root = g.root();
        // Sums are split into parts before any loop is moved.
        let mut parts: Vec<(usize, LaneParts)> = Vec::new();
        for at in g.group.attached.iter().chain([&g.group.root]) {
            if let LaneLoop::Along(r) = g.lanes_of(*at) {
                parts.extend(self.in_lanes(&g.all[*at], r, g.lanes, g.choices).map(|p| (*at, p)));
            }
        }
        let loops = RootLoops::of(g);
        let name = |at: usize| root.loops[at].name.clone();
        let order: Vec<String> = loops.outside.iter().copied().chain(loops.tile).chain(loops.lane).map(name).collect();
        if order.len() > 1 {
            self.attempt(reorder(&refs(&order)));
        }
        let around = loops.outside.iter().map(|a| name(*a)).collect();
        let mut nest = ScheduledLoops { around, lane: loops.lane.map(name), shared: None };
        let wanted = if g.choices.all_threads { s.n_threads as i64 * g.choices.pieces } else { 1 };
        if wanted > 1 && !self.share_rows(g, &loops, [wanted, s.n_threads as i64], &mut nest) {
            self.share_lane(g, &loops, wanted, &mut nest);
        }
        // Rows: fused ones come first, and take two names if each thread takes several.
        let row = match g.group.attached.is_empty() {
            true => nest.around.last().cloned(),
            false => {
                let own = name(loops.outside[loops.n_rows - 1]);
                Some(if nest.around.contains(&own) { own } else { self.innermost_shared(&nest.around, root) })
            }
        };
        self.attach(g, &parts, &nest, row);
        self.lanes_of_root(g, &loops, wanted, &mut nest);
        if let Some(shared) = nest.shared {
            self.attempt(parallel(&shared));
        }
    }

    /// Fuses the outermost loops into one that threads share, in `wanted` pieces for `n_threads` threads;
    /// returns whether there are enough iterations.
    fn share_rows(
        &mut self,
        g: &InGroup,
        loops: &RootLoops,
        [wanted, n_threads]: [i64; 2],
        nest: &mut ScheduledLoops,
    ) -> bool {
        let root = g.root();
        let most = if g.group.attached.is_empty() { loops.outside.len() } else { loops.n_rows };
        let (mut n, mut n_fused) = (1, 0);
        while n_fused < most && (n_fused == 0 || n < wanted) {
            n *= root.loops[loops.outside[n_fused]].extent;
            n_fused += 1;
        }
        if n_fused == 0 || n < n_threads {
            return false;
        }
        let mut fused = nest.around[0].clone();
        for (at, inner) in nest.around[1..n_fused].iter().enumerate() {
            let new = format!("{}.f{at}", root.name);
            if !self.attempt(fuse(&fused, inner, &new)) {
                break;
            }
            fused = new;
        }
        let rest = nest.around.split_off(n_fused);
        let (outer, each) = (format!("{}.each", root.name), format!("{}.row", root.name));
        nest.around = match n > wanted && self.attempt(split(&fused, ceil_div(n, wanted), &outer, &each)) {
            true => vec![outer, each],
            false => vec![fused],
        };
        nest.shared = nest.around.first().cloned();
        nest.around.extend(rest);
        true
    }

    /// Makes the lane loop parallel in a separate stage without another loop.
    fn share_lane(&mut self, g: &InGroup, loops: &RootLoops, wanted: i64, nest: &mut ScheduledLoops) {
        let (root, is_alone) = (g.root(), g.group.attached.is_empty() && loops.tile.is_none());
        let (Some(at), Some(inner)) = (loops.lane, &nest.lane) else { return };
        if !is_alone || !loops.outside.is_empty() {
            return;
        }
        let width = g.lanes * g.choices.vectors;
        let each = ceil_div(ceil_div(root.loops[at].extent, wanted), width) * width;
        let (outer, own) = (format!("{}.each", root.name), format!("{}.own", root.name));
        if each < root.loops[at].extent && self.attempt(split(inner, each, &outer, &own)) {
            nest.shared = Some(outer.clone());
            nest.around.push(outer);
            nest.lane = Some(own);
        }
    }

    /// Computes attached stages inside of a row, and finishes sums whose parts lie in lanes.
    fn attach(&mut self, g: &InGroup, parts: &[(usize, LaneParts)], nest: &ScheduledLoops, row: Option<String>) {
        let (all, group) = (g.all, g.group);
        // Readers come first, each with the parts of its sum, so that their inputs are then read within the
        // row only.
        let parts_of = |at: usize| parts.iter().find(|(of, _)| *of == at).map(|(_, parts)| parts);
        if let Some(parts) = parts_of(group.root) {
            self.finish_parts(g.root(), parts, nest.around.last().map(String::as_str));
        }
        for at in group.attached.iter().rev() {
            let stage = &all[*at];
            if let Some(row) = &row {
                self.attempt(compute_at(&stage.name, row));
            }
            if let Some(parts) = parts_of(*at) {
                let own = stage.axes().filter(|a| !group.is_row(*at, *a)).last();
                let inside = own.map(|a| stage.loops[a].name.clone()).or(row.clone());
                self.finish_parts(stage, parts, inside.as_deref());
            }
        }
        for at in &group.attached {
            if let LaneLoop::Across(a) = g.lanes_of(*at) {
                let stage = &all[*at];
                let own = stage.axes().filter(|x| !group.is_row(*at, *x) && *x != a).last();
                let around = own.map(|x| stage.loops[x].name.clone()).or(row.clone());
                let lane = &stage.loops[a];
                self.in_vectors(stage, &lane.name, (lane.extent, false), around.as_deref(), g.lanes, g.choices);
            }
        }
    }

    /// Vectorizes or tiles the last stage, with its borders separate, or unrolls its reduction.
    fn lanes_of_root(&mut self, g: &InGroup, loops: &RootLoops, wanted: i64, nest: &mut ScheduledLoops) {
        let (root, choices) = (g.root(), g.choices);
        let (Some(at), Some(lane)) = (loops.lane, nest.lane.clone()) else {
            if g.lanes_of(g.group.root) == LaneLoop::None && root.reduces {
                self.unroll_reduction(root, choices);
            }
            return;
        };
        let mut extent = root.loops[at].extent;
        let is_wide = |b: &[i64; 2]| !choices.selects && extent - b[0] - b[1] > g.lanes;
        let borders = borders(g.all, g.group, g.lanes).filter(is_wide);
        if let Some([front, back]) = borders {
            if front > 0 && self.attempt(peel(&lane, front, false, "left")) {
                extent -= front;
            }
            if back > 0 && self.attempt(peel(&lane, back, true, "right")) {
                extent -= back;
            }
        }
        match loops.tile {
            Some(tile) => {
                let outer = self.in_tiles(root, tile, &lane, extent, g.lanes, choices);
                nest.shared = nest.shared.take().or(outer.filter(|_| wanted > 1));
            }
            None => {
                let around = nest.around.last().map(String::as_str);
                self.in_vectors(root, &lane, (extent, borders.is_some()), around, g.lanes, choices);
            }
        }
    }

    /// Innermost of the loops that the fused rows were split into.
    fn innermost_shared(&self, around: &[String], root: &LoopStage) -> String {
        let each = format!("{}.row", root.name);
        if around.contains(&each) { each } else { around[0].clone() }
    }

    /// Vectorizes a stage without a reduction, or vectors of results of one with a reduction.
    ///
    /// `is_cut`: whether the ends of the loop were peeled off.
    fn in_vectors(
        &mut self,
        stage: &LoopStage,
        lane: &str,
        (extent, is_cut): (i64, bool),
        around: Option<&str>,
        lanes: i64,
        choices: &Choices,
    ) {
        let mut width = lanes * choices.vectors.min(ceil_div(extent, lanes));
        if is_cut && extent <= width {
            width = lanes * ((extent - 1) / lanes).max(1);
        }
        let (outer, inner) = (format!("{lane}.v"), format!("{lane}.l"));
        let is_split = extent > width && self.attempt(split(lane, width, &outer, &inner));
        let (around, inner) = if is_split { (Some(outer.as_str()), inner) } else { (around, lane.to_owned()) };
        if stage.reduces {
            let mut n = 1;
            let reduced: Vec<usize> = stage.reduction().collect();
            let is_small = |r: &&usize| {
                n *= stage.loops[**r].extent;
                n <= choices.unroll
            };
            let n_small = reduced.iter().rev().take_while(is_small).count();
            let (large, small) = reduced.split_at(reduced.len() - n_small);
            let of = |at: &usize| stage.loops[*at].name.clone();
            let (mut large, small): (Vec<String>, Vec<String>) =
                (large.iter().map(of).collect(), small.iter().map(of).collect());
            let once = match (around, large.first_mut()) {
                (None, Some(outermost)) => self.once(outermost, stage.loops[reduced[0]].extent),
                _ => None,
            };
            let around = around.or(once.as_deref());
            let mut order: Vec<String> = large.clone();
            order.push(inner.clone());
            order.extend(small.iter().cloned());
            self.attempt(reorder(&refs(&order)));
            if let Some(around) = around {
                self.attempt(accumulate(&stage.name, around, &format!("{}.sum", stage.name)));
            }
            self.attempt_all(small.iter().map(|l| unroll(l)));
            if n_small == 0
                && choices.unroll > 1
                && let Some(last) = large.last()
            {
                let (o, i) = (format!("{last}.o"), format!("{last}.u"));
                if self.attempt(split(last, choices.unroll.min(8), &o, &i)) {
                    self.attempt(unroll(&i));
                }
            }
        }
        self.attempt(vectorize(&inner));
    }

    /// Tiles a stage so that rows of an input become columns; returns the outer loop over tiles, if there is
    /// one.
    fn in_tiles(
        &mut self,
        stage: &LoopStage,
        tile: usize,
        lane: &str,
        extent: i64,
        lanes: i64,
        choices: &Choices,
    ) -> Option<String> {
        let across = &stage.loops[tile].name;
        let (to, ti, lo, li) = (format!("{across}.o"), format!("{across}.t"), format!("{lane}.v"), format!("{lane}.l"));
        let mut order = Vec::new();
        let ti = if stage.loops[tile].extent > choices.tile && self.attempt(split(across, choices.tile, &to, &ti)) {
            order.push(to);
            ti
        } else {
            across.clone()
        };
        let li = if extent > lanes && self.attempt(split(lane, lanes, &lo, &li)) {
            order.push(lo);
            li
        } else {
            lane.to_owned()
        };
        let outer = order.first().cloned();
        order.extend([li.clone(), ti.clone()]);
        self.attempt(reorder(&refs(&order)));
        self.attempt(unroll(&ti));
        self.attempt(vectorize(&li));
        outer
    }

    fn unroll_reduction(&mut self, stage: &LoopStage, choices: &Choices) {
        let mut n = 1;
        let reduced: Vec<usize> = stage.reduction().collect();
        for r in reduced.into_iter().rev() {
            n *= stage.loops[r].extent;
            if n > choices.unroll {
                break;
            }
            self.attempt(unroll(&stage.loops[r].name));
        }
    }

    /// Splits a reduction loop into partial results in lanes, which are then combined by halves until one is
    /// left. The number of lanes is the chosen one, or divides an extent that is dynamic.
    fn in_lanes(&mut self, stage: &LoopStage, r: usize, lanes: i64, choices: &Choices) -> Option<LaneParts> {
        let width = parts_width(stage, r, lanes, choices);
        if self.program.sizes.is_empty() {
            return self.in_parts(stage, r, width);
        }
        let least = lanes.min(width);
        let widths = std::iter::successors(Some(width), |n| (n / 2 >= least).then_some(n / 2));
        for width in widths {
            let before = self.clone();
            let parts = self.in_parts(stage, r, width);
            if parts.is_some() {
                return parts;
            }
            *self = before;
        }
        None
    }

    /// Splits a reduction loop into partial results in `width` lanes, if that is possible.
    fn in_parts(&mut self, stage: &LoopStage, r: usize, width: i64) -> Option<LaneParts> {
        let LoopStage { name, .. } = stage;
        let k = &stage.loops[r].name;
        let extent = stage.loops[r].extent;
        let mut at = k.clone();
        let (outer, inner) = (format!("{k}.o"), format!("{k}.l"));
        let is_split = extent > width && self.attempt(split(k, width, &outer, &inner));
        if is_split {
            at = inner;
        } else if extent != width {
            return None;
        }
        let first = format!("{name}.p0");
        if !self.attempt(rfactor(name, &at, &first)) {
            return None;
        }
        let mut parts = LaneParts {
            levels: vec![LaneSums { name: first, lane: at.clone(), outer: is_split.then_some(outer) }],
            last: String::new(),
            n_last: 0,
        };
        let mut n = width;
        for level in 1.. {
            let next = n / 2;
            let (o, i, new) = (format!("{k}.{level}o"), format!("{k}.{level}"), format!("{name}.p{level}"));
            if next <= 1 || !self.attempt(split(&at, next, &o, &i)) || !self.attempt(rfactor(name, &i, &new)) {
                break;
            }
            parts.levels.push(LaneSums { name: new, lane: i.clone(), outer: Some(o) });
            (at, n) = (i, next);
        }
        (parts.last, parts.n_last) = (at, n);
        Some(parts)
    }

    /// Puts a loop of one iteration around a loop of so many, which gets another name; returns its name.
    fn once(&mut self, inside: &mut String, extent: i64) -> Option<String> {
        let (once, all) = (format!("{inside}.once"), format!("{inside}.all"));
        self.attempt(split(inside, extent, &once, &all)).then(|| {
            *inside = all;
            once
        })
    }

    /// Moves the partial sums to the place of their sum, and vectorizes their lanes. A single result has a
    /// loop of one iteration around it, in which its sums are in registers.
    fn finish_parts(&mut self, stage: &LoopStage, parts: &LaneParts, place: Option<&str>) {
        let mut last = parts.last.clone();
        let once = if place.is_none() { self.once(&mut last, parts.n_last) } else { None };
        let Some(place) = place.or(once.as_deref()) else {
            for level in &parts.levels {
                self.attempt(vectorize(&format!("{}.{}", level.name, level.lane)));
            }
            self.attempt(unroll(&last));
            return;
        };
        for level in parts.levels.iter().rev() {
            self.attempt(compute_at(&level.name, place));
        }
        for (at, level) in parts.levels.iter().enumerate() {
            let of = |l: &str| format!("{}.{l}", level.name);
            let lane = of(&level.lane);
            if at == 0 {
                let mut order: Vec<String> = stage
                    .reduction()
                    .map(|r| of(&stage.loops[r].name))
                    .filter(|l| self.program.find_loop(l).is_some())
                    .collect();
                order.retain(|l| *l != lane);
                order.extend(level.outer.as_ref().map(|o| of(o)));
                order.push(lane.clone());
                self.attempt(reorder(&refs(&order)));
                self.attempt(accumulate(&level.name, place, &format!("{}.r", level.name)));
            } else if let Some(outer) = &level.outer {
                self.attempt(unroll(&of(outer)));
            }
            self.attempt(vectorize(&lane));
        }
        self.attempt(unroll(&last));
        self.attempt(accumulate(&stage.name, place, &format!("{}.sum", stage.name)));
    }
}

/// Levels of partial sums in lanes, the one with the most parts first.
struct LaneParts {
    levels: Vec<LaneSums>,
    /// Loop over the parts that are left, and their number.
    last: String,
    n_last: i64,
}

/// Level of partial sums.
struct LaneSums {
    /// Name of their buffer, and prefix of their loops' names.
    name: String,
    /// Stage's loop that became their lanes.
    lane: String,
    /// Loop of the stage over the elements that each part combines.
    outer: Option<String>,
}

fn refs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}
