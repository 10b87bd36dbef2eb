//! Fused stages of a loop nest by rows: a block computes all stages for some rows, and intermediate results
//! stay in shared memory.

use super::super::nest::ScheduleBuilder;
use super::super::nest::stages::{LoopStage, StageGroup};
use super::super::step::{accumulate, bind, compute_at, fuse, inline, rfactor, shared, split, unroll};
use super::super::{TemplateSetting, ceil_div};
use super::gpu;
use super::model::StagesWork;
use tilewright_ir::gpu::GpuKernel;
use tilewright_ir::schedule::LayoutAxis::Whole;
use tilewright_ir::{BufferId, Index, LoopKind, Program, Step, lower_gpu};

/// Maximum number of parts of a sum that one thread adds up; if there are more, several threads first add up
/// some each.
const MOST_PARTS: i64 = 32;
/// Minimum number of elements of a sum that threads share.
const LEAST_SUM: i64 = 8;
/// Maximum number of elements of an intermediate stage that are private to a thread.
const MOST_PRIVATE: i64 = 64;

/// Division of rows among blocks.
#[derive(Clone, Copy)]
pub(super) struct RowDivision {
    /// Number of rows per block.
    pub rows: i64,
    /// Number of threads that share a row.
    pub along: i64,
    /// Whether threads of one row are adjacent, rather than threads of neighbouring rows.
    pub along_first: bool,
}

impl RowDivision {
    /// Divides the rows of a group of stages among blocks of `threads` threads.
    pub fn new(stages: &[LoopStage], group: &StageGroup, threads: i64, along: i64) -> RowDivision {
        let last = group.rows.checked_sub(1).map_or(1, |at| stages[group.root].loops[at].extent);
        let rows = (threads / along).clamp(1, last);
        let is_near = |at: usize| {
            let stage = &stages[at];
            let last = if stage.reduces { stage.reduction().last() } else { own(stages, group, at).last() };
            last.is_some_and(|l| stage.reads.iter().any(|read| read.strides[l] == Some(1)))
        };
        let along_first = along > 1 && (rows == 1 || members(group).any(is_near));
        RowDivision { rows, along, along_first }
    }
}

impl RowDivision {
    /// Approximate shared memory of a block, in bytes.
    pub fn shared_bytes(&self, program: &Program, stages: &[LoopStage], group: &StageGroup) -> i64 {
        let of = |at: usize| {
            let stage = &stages[at];
            let n_own: i64 = own(stages, group, at).map(|l| stage.loops[l].extent).product();
            let n_parts = if stage.reduces && n_own == 1 { 2 * self.along } else { 0 };
            let between = if at == group.root { 0 } else { n_own };
            (between + n_parts) * program.buffer(stage.buffer).dtype.bytes() as i64
        };
        if self.along == 1 { 0 } else { members(group).map(of).sum::<i64>() * self.rows }
    }

    /// Estimated cycles of the kernel of a group with this division.
    pub fn cycles(
        &self,
        s: &TemplateSetting,
        program: &Program,
        stages: &[LoopStage],
        group: &StageGroup,
        unroll: i64,
    ) -> f64 {
        let (gpu, mut work) = (gpu(s), StagesWork::default());
        for at in members(group) {
            let stage = &stages[at];
            let row = group.rows.checked_sub(1).and_then(|last| row_loop(group, at, last));
            let n_own: i64 = own(stages, group, at).map(|l| stage.loops[l].extent).product();
            let n_combined: i64 = stage.reduction().map(|r| stage.loops[r].extent).product();
            let is_parted = stage.reduces && n_own == 1 && n_combined >= LEAST_SUM && self.along > 1;
            let (along, n_each) = match is_parted {
                true => (stage.reduction().last(), ceil_div(n_combined, self.along)),
                false => (own(stages, group, at).last(), ceil_div(n_own, self.along) * n_combined),
            };
            let sides = [(along, self.along), (row, self.rows)];
            let sides = if self.along_first { sides } else { [sides[1], sides[0]] };
            let is_near = |b: BufferId| group.attached.iter().any(|at| stages[*at].buffer == b);
            work.add(&gpu, program, stage, sides, [n_each, if stage.reduces { unroll } else { 1 }], is_near);
            if self.along > 1 {
                let width = self.along.min(n_combined);
                work.share(if is_parted { if width > MOST_PARTS { 2 * width.isqrt() } else { width } } else { 0 });
            }
        }
        let rows: Vec<i64> = stages[group.root].loops[..group.rows].iter().map(|l| l.extent).collect();
        let last = rows.last().copied().unwrap_or(1);
        let n_blocks = rows.iter().product::<i64>() / last * ceil_div(last, self.rows);
        work.cycles(&gpu, n_blocks, self.rows * self.along)
    }
}

/// Loop of a stage that follows the loop `of_root` of the last stage.
fn row_loop(group: &StageGroup, at: usize, of_root: usize) -> Option<usize> {
    group.follows[at].iter().position(|followed| *followed == Some(of_root))
}

/// All stages of a group, in their order.
pub(super) fn members(group: &StageGroup) -> impl Iterator<Item = usize> + '_ {
    group.attached.iter().chain([&group.root]).copied()
}

/// Loops of a stage over its elements of a row.
pub(super) fn own<'a>(stages: &'a [LoopStage], group: &'a StageGroup, at: usize) -> impl Iterator<Item = usize> + 'a {
    stages[at].axes().filter(move |l| !group.is_row(at, *l))
}

/// Schedule with a group as one kernel, if that is legal and fits into a block.
pub(super) fn scheduled(
    s: &TemplateSetting,
    builder: &ScheduleBuilder,
    stages: &[LoopStage],
    group: &StageGroup,
    division: RowDivision,
    n_unrolled: i64,
) -> Option<ScheduleBuilder> {
    let mut making = Making { builder: builder.clone(), stages, group, division, n_unrolled };
    making.all()?;
    let kernels = lower_gpu(making.builder.program()).ok()?;
    let (threads, bytes) = (i64::from(gpu(s).most_threads), gpu(s).shared_bytes);
    let fits = |kernel: &GpuKernel| kernel.n_threads() <= threads && kernel.shared_bytes(&kernels) <= bytes;
    kernels.kernels().all(fits).then_some(making.builder)
}

/// State while a group is made a kernel.
struct Making<'a> {
    builder: ScheduleBuilder,
    stages: &'a [LoopStage],
    group: &'a StageGroup,
    division: RowDivision,
    n_unrolled: i64,
}

/// Parts of a sum, one for each thread.
struct ThreadParts {
    levels: Vec<ThreadSums>,
    /// Loop over the parts that are left.
    last: String,
    n_last: i64,
}

/// Level of partial sums, the one with the most parts first. Their buffer has the stage's dimensions, then
/// the parts.
struct ThreadSums {
    name: String,
    /// Loop over the elements that each part combines, with its extent, if there is more than one element.
    combined: Option<(String, i64)>,
    /// Loop over parts.
    part: String,
    n_parts: i64,
}

impl ThreadSums {
    fn of(&self, name: &str) -> String {
        format!("{}.{name}", self.name)
    }
}

impl Making<'_> {
    fn require(&mut self, step: Step) -> Option<()> {
        self.builder.attempt(step).then_some(())
    }

    /// Returns the loop of a stage that follows the last one over rows.
    fn row_loop(&self, at: usize) -> Option<usize> {
        row_loop(self.group, at, self.group.rows.checked_sub(1)?)
    }

    fn all(&mut self) -> Option<()> {
        let (stages, group) = (self.stages, self.group);
        let mut all: Vec<(usize, Option<ThreadParts>)> = Vec::new();
        for at in members(group) {
            let is_one = stages[at].reduces && own(stages, group, at).next().is_none();
            let parts = if is_one && self.division.along > 1 { self.in_parts(&stages[at])? } else { None };
            all.push((at, parts));
        }
        let root_parts = all.last().and_then(|(_, parts)| parts.as_ref());
        let (block, row, first) = self.blocks(root_parts.map(|parts| (parts.last.as_str(), parts.n_last)))?;
        let along = self.division.along;
        // Readers come first, so that their inputs are then read within the block only.
        let mut inlined = vec![false; stages.len()];
        for (at, parts) in all.iter().rev() {
            let stage = &stages[*at];
            if *at != group.root {
                let n_own: i64 = own(stages, group, *at).map(|l| stage.loops[l].extent).product();
                if along > 1 {
                    self.share(&stage.name, &block, stage.subscripts.len())?;
                    inlined[*at] = !stage.reduces && self.builder.attempt(inline(&stage.name));
                } else if n_own > MOST_PRIVATE {
                    return None;
                }
                if !inlined[*at] {
                    self.require(compute_at(&stage.name, &block))?;
                }
            }
            for level in parts.iter().flat_map(|parts| parts.levels.iter().rev()) {
                self.share(&level.name, &block, stage.axes().count() + 1)?;
                self.require(compute_at(&level.name, &block))?;
            }
        }
        for (at, parts) in &all {
            let stage = &stages[*at];
            let is_root = *at == group.root;
            let row_loop = self.row_loop(*at).filter(|_| self.division.rows > 1);
            let row_name = row_loop.map(|l| stage.loops[l].name.clone());
            // Dimension of the buffer that a loop indexes.
            let dimension = |l: usize| stage.subscripts.iter().position(|i| *i == Index::from(stage.loops[l].var));
            let row_part = row_loop.and_then(|l| stage.axes().position(|a| a == l));
            for level in parts.iter().flat_map(|parts| &parts.levels) {
                let row = row_name.as_deref().map(|row| level.of(row));
                self.sum(level, &block)?;
                self.threads(row, vec![level.of(&level.part)], level.n_parts)?;
                self.threads_of_copy(&level.name, row_part, &[stage.axes().count()], level.n_parts)?;
            }
            let own: Vec<usize> = own(stages, group, *at).collect();
            let n_own = own.iter().map(|l| stage.loops[*l].extent).product();
            if !inlined[*at] {
                let row = if is_root { row.clone() } else { row_name };
                let mut names: Vec<String> = own.iter().map(|l| stage.loops[*l].name.clone()).collect();
                if let (true, Some(first), Some(name)) = (is_root, &first, names.first_mut()) {
                    name.clone_from(first);
                }
                let inside = self.threads(row.clone(), names, n_own)?.or(row).unwrap_or_else(|| block.clone());
                if stage.reduces {
                    self.require(accumulate(&stage.name, &inside, &format!("{}.sum", stage.name)))?;
                    match parts {
                        Some(parts) => {
                            let last = first.as_ref().filter(|_| is_root && own.is_empty()).unwrap_or(&parts.last);
                            self.builder.attempt(unroll(last));
                        }
                        None => {
                            if let Some(last) = stage.reduction().last() {
                                self.unrolled(&stage.loops[last].name, stage.loops[last].extent);
                            }
                        }
                    }
                }
            }
            if !is_root && along > 1 {
                let axes: Vec<usize> = own.iter().filter_map(|l| dimension(*l)).collect();
                self.threads_of_copy(&stage.name, row_loop.and_then(dimension), &axes, n_own)?;
            }
        }
        self.require(bind(&block, LoopKind::Block(0)))
    }

    /// Divides a stage's sum among the threads of a row, if it is long enough, in levels of fewer and fewer
    /// parts.
    fn in_parts(&mut self, stage: &LoopStage) -> Option<Option<ThreadParts>> {
        let reduced: Vec<usize> = stage.reduction().collect();
        let n: i64 = reduced.iter().map(|r| stage.loops[*r].extent).product();
        if n < LEAST_SUM {
            return Some(None);
        }
        let mut all = stage.loops[reduced[0]].name.clone();
        for (at, inner) in reduced[1..].iter().enumerate() {
            let fused = format!("{}.k{at}", stage.name);
            self.require(fuse(&all, &stage.loops[*inner].name, &fused))?;
            all = fused;
        }
        let mut levels: Vec<ThreadSums> = Vec::new();
        let mut left = n;
        let mut width = self.division.along.min(n);
        while levels.is_empty() || left > MOST_PARTS {
            let name = format!("{}.p{}", stage.name, levels.len());
            let (outer, inner) = (format!("{name}.c"), format!("{name}.t"));
            let combined = if left > width {
                self.require(split(&all, width, &outer, &inner))?;
                all = inner;
                Some((outer, ceil_div(left, width)))
            } else {
                None
            };
            self.require(rfactor(&stage.name, &all, &name))?;
            levels.push(ThreadSums { name, combined, part: all.clone(), n_parts: width });
            left = width;
            width = 1 << (width.ilog2() / 2);
        }
        Some(Some(ThreadParts { levels, last: all, n_last: left }))
    }

    /// Makes a loop over blocks of the last stage's rows, or of the whole stage; `last` is the remaining loop
    /// of its sum. Returns this loop, the one over the rows of a block, and the new name of the first other
    /// loop.
    fn blocks(&mut self, last: Option<(&str, i64)>) -> Option<(String, Option<String>, Option<String>)> {
        let root = &self.stages[self.group.root];
        let of = |part: &str| format!("{}.{part}", root.name);
        let mut rows: Vec<String> = root.loops[..self.group.rows].iter().map(|l| l.name.clone()).collect();
        let Some(inner) = rows.last_mut() else {
            let own = root.axes().next().map(|l| (root.loops[l].name.as_str(), root.loops[l].extent));
            let (first, extent) = own.or(last)?;
            self.require(split(first, extent, &of("block"), &of("first")))?;
            return Some((of("block"), None, Some(of("first"))));
        };
        let mut row = None;
        if self.division.rows > 1 {
            self.require(split(inner, self.division.rows, &of("rows"), &of("row")))?;
            *inner = of("rows");
            row = Some(of("row"));
        }
        let mut all = rows[0].clone();
        for (at, inner) in rows[1..].iter().enumerate() {
            let fused = of(&format!("f{at}"));
            self.require(fuse(&all, inner, &fused))?;
            all = fused;
        }
        Some((all, row, None))
    }

    /// Places the results of a stage for a block's rows in shared memory.
    fn share(&mut self, buffer: &str, block: &str, rank: usize) -> Option<()> {
        let whole: Vec<_> = (0..rank).map(Whole).collect();
        self.require(shared(buffer, block, &format!("{buffer}.s"), &whole))
    }

    /// Keeps the part that each thread combines in a register.
    fn sum(&mut self, level: &ThreadSums, block: &str) -> Option<()> {
        let Some((combined, extent)) = &level.combined else { return Some(()) };
        self.require(accumulate(&level.name, block, &level.of("r")))?;
        self.unrolled(&level.of(combined), *extent);
        Some(())
    }

    /// Unrolls a loop by the largest factor that divides it, up to the chosen one.
    fn unrolled(&mut self, name: &str, extent: i64) {
        let n = (1..=self.n_unrolled).rev().find(|n| extent % n == 0).unwrap_or(1);
        let (outer, inner) = (format!("{name}.uo"), format!("{name}.u"));
        if n > 1 && self.builder.attempt(split(name, n, &outer, &inner)) {
            self.builder.attempt(unroll(&inner));
        }
    }

    /// Distributes the copy of a buffer to shared memory over threads; its dimensions are rows and elements.
    fn threads_of_copy(&mut self, buffer: &str, row: Option<usize>, own: &[usize], n_own: i64) -> Option<()> {
        let of = |d: usize| format!("{buffer}.s.{d}");
        self.threads(row.map(of), own.iter().map(|d| of(*d)).collect(), n_own).map(drop)
    }

    /// Distributes a nest over threads: the rows of a block, and `n_own` elements of each. Returns the loop
    /// over a thread's elements, or else over rows, if there is one.
    fn threads(&mut self, row: Option<String>, own: Vec<String>, n_own: i64) -> Option<Option<String>> {
        let [along, across] = if self.division.along_first { [0, 1] } else { [1, 0] };
        let mut inside = row.clone();
        if self.division.along > 1
            && let Some(first) = own.first()
        {
            let mut all = first.clone();
            for (at, inner) in own[1..].iter().enumerate() {
                let fused = format!("{first}.f{at}");
                self.require(fuse(&all, inner, &fused))?;
                all = fused;
            }
            if n_own > self.division.along {
                let (outer, inner) = (format!("{all}.o"), format!("{all}.t"));
                self.require(split(&all, self.division.along, &outer, &inner))?;
                all = inner;
            }
            self.require(bind(&all, LoopKind::Thread(along)))?;
            inside = Some(all);
        } else if let Some(last) = own.last() {
            inside = Some(last.clone());
        }
        if let Some(row) = row {
            self.require(bind(&row, LoopKind::Thread(across)))?;
        }
        Some(inside)
    }
}
