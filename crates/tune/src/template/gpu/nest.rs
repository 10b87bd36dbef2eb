//! Loop nests on GPUs: kernels of one stage, or of several that are fused by rows.

use super::super::algorithm::Algorithm;
use super::super::nest::stages::{LoopStage, StageGroup, groups, stages};
use super::super::nest::{ScheduleBuilder, inlined};
use super::super::step::{accumulate, bind, exact, reorder, rfactor, split, unroll};
use super::super::{Template, TemplateSetting, ceil_div};
use super::model::StagesWork;
use super::rows::{self, RowDivision};
use super::{constraint, gpu, parts};
use tilewright_ir::dependence::find_race;
use tilewright_ir::index::Ranges;
use tilewright_ir::op::Structure;
use tilewright_ir::{Index, LoopKind, Program, Role, Step, Stmt};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Small stages are inlined. Each other stage is a kernel whose neighbouring threads compute neighbouring
/// elements, or stages with common rows are fused to a kernel whose blocks compute some rows each. `along`
/// threads of a block share a long reduction, whose partial results are combined in shared memory. For few
/// results, `split` blocks share each reduction, and a further kernel combines their partial results.
pub const GPU_NEST: Template = Template {
    name: "gpu-nest",
    text: "GPU: a kernel a stage or fused by rows, an element a thread, sums shared by threads and by blocks",
    serves: |s| s.target.gpu.is_some() && all_nests(&s.workload.program()).is_some(),
    space: |s| {
        let parameters = parameters(s);
        let constraints = constraints(&parameters);
        Space::declare("gpu-nest", parameters, constraints)
    },
    steps: |s, space, config| scheduled(s, &GpuNestConfig::of(space, config)),
    estimate: Some(estimate),
};

/// Template as an algorithm for products of few rows or columns, whose tiles would be mostly empty.
pub(super) const ROWS: Algorithm<TemplateSetting> = Algorithm {
    name: "rows",
    applies: |s| match s.workload.structure() {
        Structure::Contraction(c) => s.target.gpu.is_some() && c.m.min(c.n) <= FEW_ROWS,
        Structure::Window(_) | Structure::Packed(_) | Structure::Nest(_) => false,
    },
    parameters: |s, _| parameters(s),
    constraints: |s, _| constraints(&parameters(s)),
    steps: |s, _, space, config| scheduled(s, &GpuNestConfig::of(space, config)),
    estimate: |s, _, space, config| estimate(s, space, config),
};

/// Maximum number of rows or columns of a product that count as few.
const FEW_ROWS: i64 = 8;
/// Minimum number of elements of a sum that threads share.
const LONG_SUM: i64 = 64;
/// Minimum number of elements of a sum that blocks share.
const VERY_LONG_SUM: i64 = 4096;
/// Number of sums from which on blocks do not share them.
const MANY_SUMS: i64 = 1024;
/// Number of iterations up to which a single block does the work of a further kernel.
const ALONE: f64 = 65536.0;

/// Nest of loops around one assignment.
struct AssignmentNest {
    /// Buffer that the nest writes.
    buffer: String,
    /// Loops, outermost first: names, maximum extents, and whether threads may share the iterations.
    loops: Vec<(String, i64, bool)>,
    /// Loop along which the written elements are contiguous.
    contiguous: Option<String>,
    /// Whether the nest is a reduction.
    reduces: bool,
}

impl AssignmentNest {
    fn of(program: &Program, stmt: &Stmt) -> Option<AssignmentNest> {
        let mut ranges = Ranges::default();
        let (mut loops, mut leaf) = (Vec::new(), stmt);
        while let Stmt::For(l) = leaf {
            let free = l.extent.as_const().is_some() && find_race(l, &ranges).is_none();
            loops.push((l.var, ranges.upper(&l.extent)?, free));
            ranges.push(l.var, l.extent.clone());
            let [only] = l.body.as_slice() else { return None };
            leaf = only;
        }
        let (buffer, index) = leaf.own_write()?;
        let flat = index.iter().zip(program.buffer(buffer).strides());
        let flat = flat.fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(stride)));
        let contiguous = loops.iter().find(|(v, extent, _)| flat.coefficient(*v) == 1 && *extent > 1);
        let name = |v| program.loop_name(v).to_owned();
        Some(AssignmentNest {
            buffer: program.buffer(buffer).name.clone(),
            contiguous: contiguous.map(|(v, _, _)| name(*v)),
            loops: loops.into_iter().map(|(v, extent, free)| (name(v), extent, free)).collect(),
            reduces: matches!(leaf, Stmt::Update { .. }),
        })
    }

    /// Number of elements that threads may compute in parallel.
    fn n_elements(&self) -> i64 {
        self.loops.iter().filter(|l| l.2).map(|l| l.1).product()
    }

    /// Number of iterations for each element.
    fn n_combined(&self) -> i64 {
        self.loops.iter().filter(|l| !l.2).map(|l| l.1).product()
    }

    fn has_long_sum(&self) -> bool {
        self.reduces && self.n_combined() >= LONG_SUM
    }

    /// Whether the nest has so few and long sums that blocks may share each of them.
    fn has_few_sums(&self) -> bool {
        self.reduces && self.n_combined() >= VERY_LONG_SUM && self.n_elements() <= MANY_SUMS
    }
}

/// Nests of a program, in order; `None` if the program contains any other statement.
fn all_nests(program: &Program) -> Option<Vec<AssignmentNest>> {
    let stmts = program.parts().into_iter().flatten().filter(|s| !matches!(s, Stmt::Alloc(_)));
    stmts.map(|s| AssignmentNest::of(program, s)).collect()
}

fn nests(program: &Program) -> Vec<AssignmentNest> {
    all_nests(program).expect("the template serves programs of nests")
}

/// Choices of a configuration.
struct GpuNestConfig {
    threads: i64,
    along: i64,
    split: i64,
    unroll: i64,
    by_rows: bool,
}

impl GpuNestConfig {
    fn of(space: &Space, config: &Config) -> GpuNestConfig {
        let int = |name: &str| if space.has(name) { space.int(config, name) } else { 1 };
        let by_rows = space.has("stages") && space.text(config, "stages") == "rows";
        GpuNestConfig {
            threads: int("threads"),
            along: int("along"),
            split: int("split"),
            unroll: int("unroll"),
            by_rows,
        }
    }
}

/// Parameters, which depend on the stages.
fn parameters(s: &TemplateSetting) -> Vec<Parameter> {
    let most = i64::from(gpu(s).most_threads.min(gpu(s).most_threads_along[0]));
    let (program, _) = inlined(s);
    let nests = nests(&program);
    let within = |n: &i64| *n <= most;
    let mut parameters = vec![Parameter::ordinal("threads", [32, 64, 128, 256, 512, 1024].into_iter().filter(within))];
    let stages = stages(&program);
    let is_together = groups_of(&program, &stages, true).iter().any(|group| !group.attached.is_empty());
    if is_together || nests.iter().any(AssignmentNest::has_long_sum) {
        parameters.push(Parameter::ordinal("along", [1, 8, 32, 128, 512].into_iter().filter(within)));
    }
    if nests.iter().any(AssignmentNest::has_few_sums) {
        parameters.push(Parameter::ordinal("split", [1, 4, 16, 64]));
    }
    if nests.iter().any(|nest| nest.reduces) {
        parameters.push(Parameter::ordinal("unroll", [1, 2, 4, 8]));
    }
    if is_together {
        parameters.push(Parameter::categorical("stages", &["apart", "rows"]));
    }
    parameters
}

fn constraints(parameters: &[Parameter]) -> Vec<Constraint> {
    let is_shared = parameters.iter().any(|p| p.name == "along");
    is_shared.then(|| constraint("along", "along <= threads", parameters)).into_iter().collect()
}

/// Groups the stages that are computed together: those with common rows, or all if there is little work;
/// otherwise each stage separately.
fn groups_of(program: &Program, stages: &[LoopStage], by_rows: bool) -> Vec<StageGroup> {
    let mut all = groups(program, stages, !by_rows, true);
    let is_between = |stage: &LoopStage| {
        program.buffer(stage.buffer).role == Role::Temporary
            && stages.iter().filter(|other| other.buffer == stage.buffer).count() == 1
    };
    let n = stages.iter().map(LoopStage::iterations).sum::<f64>();
    if by_rows && all.len() > 1 && n <= ALONE && stages[..stages.len() - 1].iter().all(is_between) {
        let follows = stages.iter().map(|stage| vec![None; stage.loops.len()]).collect();
        return vec![StageGroup {
            root: stages.len() - 1,
            attached: (0..stages.len() - 1).collect(),
            rows: 0,
            follows,
        }];
    }
    for group in &mut all {
        // In a separate stage, each sum is a row.
        let root = &stages[group.root];
        let n_axes = root.axes().count();
        if group.attached.is_empty() && root.reduces && root.axes().eq(0..n_axes) {
            group.rows = n_axes;
        }
    }
    all
}

/// Division of a group among the blocks of one kernel; `None` if one kernel does not compute it.
fn division_of(stages: &[LoopStage], group: &StageGroup, choices: &GpuNestConfig) -> Option<RowDivision> {
    let root = &stages[group.root];
    let n_combined: i64 = root.reduction().map(|r| root.loops[r].extent).product();
    let is_long = root.reduces && n_combined >= LONG_SUM && choices.along > 1 && root.axes().count() == group.rows;
    let is_one = !group.attached.is_empty() || is_long;
    is_one.then(|| RowDivision::new(stages, group, choices.threads, choices.along))
}

/// Program whose sums are shared among blocks, with its steps.
fn split_sums(s: &TemplateSetting, choices: &GpuNestConfig) -> ScheduleBuilder {
    let (program, steps) = inlined(s);
    let mut builder = ScheduleBuilder::on(program, steps);
    for nest in nests(builder.program()).into_iter().filter(|nest| choices.split > 1 && nest.has_few_sums()) {
        // As many parts as divide one of the loops.
        let parts = |extent: i64| (1..=choices.split).rev().find(|n| extent % n == 0).unwrap_or(1);
        let longest = nest.loops.iter().filter(|l| !l.2).max_by_key(|l| parts(l.1));
        if let Some((name, extent, _)) = longest.filter(|l| parts(l.1) > 1) {
            let [part, rest] = ["s", "r"].map(|part| format!("{name}.{part}"));
            let _ = builder.attempt(exact(name, extent / parts(*extent), &part, &rest))
                && builder.attempt(rfactor(&nest.buffer, &part, &format!("{}.parts", nest.buffer)));
        }
    }
    builder
}

fn scheduled(s: &TemplateSetting, choices: &GpuNestConfig) -> Vec<Step> {
    let mut builder = split_sums(s, choices);
    let stages = stages(builder.program());
    let [together, alone] = [choices.by_rows, false].map(|rows| groups_of(builder.program(), &stages, rows));
    let mut is_made = |group: &StageGroup| {
        let made = division_of(&stages, group, choices)
            .and_then(|division| rows::scheduled(s, &builder, &stages, group, division, choices.unroll));
        let found = made.is_some();
        if let Some(made) = made {
            builder = made;
        }
        found
    };
    for group in together {
        if !is_made(&group) && !group.attached.is_empty() {
            for one in alone.iter().filter(|one| rows::members(&group).any(|at| at == one.root)) {
                is_made(one);
            }
        }
    }
    let is_left = |stmt: &&Stmt| matches!(stmt, Stmt::For(l) if !matches!(l.kind, LoopKind::Block(_)));
    let program = builder.program();
    let left =
        program.parts().into_iter().flatten().filter(is_left).filter_map(|stmt| AssignmentNest::of(program, stmt));
    for (at, nest) in left.collect::<Vec<_>>().into_iter().enumerate() {
        bound(&mut builder, &nest, at, choices);
    }
    builder.finish()
}

/// Maps a nest's elements to threads.
fn bound(builder: &mut ScheduleBuilder, nest: &AssignmentNest, at: usize, choices: &GpuNestConfig) {
    let own = format!("nest{at}");
    let (mut free, rest): (Vec<_>, Vec<_>) = nest.loops.iter().map(|l| (l.0.as_str(), l.2)).partition(|l| l.1);
    // Adjacent threads write adjacent elements.
    free.sort_by_key(|l| Some(l.0) == nest.contiguous.as_deref());
    let order: Vec<&str> = free.iter().chain(&rest).map(|l| l.0).collect();
    let mut free: Vec<&str> = free.iter().map(|l| l.0).collect();
    let is_sorted = nest.loops.iter().map(|l| l.0.as_str()).eq(order.iter().copied());
    if !is_sorted && !builder.attempt(reorder(&order)) {
        free = nest.loops.iter().take_while(|l| l.2).map(|l| l.0.as_str()).collect();
    }
    if free.is_empty() {
        // A single thread computes everything.
        let Some((name, extent, _)) = nest.loops.first() else { return };
        let [outer, inner, block, thread] = ["o", "i", "block", "thread"].map(|part| format!("{own}.{part}"));
        builder.attempt_all([
            split(name, *extent, &outer, &inner),
            exact(&outer, 1, &block, &thread),
            bind(&block, LoopKind::Block(0)),
            bind(&thread, LoopKind::Thread(0)),
        ]);
        return;
    }
    let (steps, thread) = parts::each_thread(&own, &free, choices.threads);
    builder.attempt_all(steps);
    if nest.reduces {
        builder.attempt(accumulate(&nest.buffer, &thread, &format!("{own}.sum")));
        if let Some((last, _)) = rest.last()
            && choices.unroll > 1
        {
            let (outer, inner) = (format!("{own}.uo"), format!("{own}.u"));
            let _ = builder.attempt(split(last, choices.unroll, &outer, &inner)) && builder.attempt(unroll(&inner));
        }
    }
}

/// Estimated cycles, as the sum over all kernels.
fn estimate(s: &TemplateSetting, space: &Space, config: &Config) -> f64 {
    let choices = GpuNestConfig::of(space, config);
    let builder = split_sums(s, &choices);
    let (program, stages) = (builder.program(), stages(builder.program()));
    let mut cycles = 0.0;
    for group in groups_of(program, &stages, choices.by_rows) {
        let room = gpu(s).shared_bytes as i64;
        match division_of(&stages, &group, &choices).filter(|d| d.shared_bytes(program, &stages, &group) <= room) {
            Some(division) => cycles += division.cycles(s, program, &stages, &group, choices.unroll),
            None => {
                for at in rows::members(&group) {
                    cycles += of_each(s, program, &stages[at], &choices);
                }
            }
        }
    }
    cycles
}

/// Cycles of a stage in which each thread computes one element.
fn of_each(s: &TemplateSetting, program: &Program, stage: &LoopStage, choices: &GpuNestConfig) -> f64 {
    let n: i64 = stage.axes().map(|l| stage.loops[l].extent).product();
    let near = stage.axes().find(|l| stage.loops[*l].stride == Some(1)).or(stage.axes().last());
    let n_each: i64 = stage.reduction().map(|l| stage.loops[l].extent).product();
    let mut work = StagesWork::default();
    let sides = [(near, choices.threads), (None, 1)];
    work.add(&gpu(s), program, stage, sides, [n_each, if stage.reduces { choices.unroll } else { 1 }], |_| false);
    work.cycles(&gpu(s), ceil_div(n, choices.threads), choices.threads)
}
