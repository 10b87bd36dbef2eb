//! Templates: each declares a search space for an operator on a target, and turns a configuration into
//! schedule steps.

mod algorithm;
mod conv;
mod gpu;
mod matmul;
mod model;
mod nest;
mod share;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::sync::Arc;
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{Illegal, apply_all, steps_text};
use tilewright_ir::{DType, Program, Step, Target};
use tilewright_search::{Config, Constraint, Describe, Domain, Parameter, Problem, Space, SpaceError, Subject};

use crate::loops::loop_contexts;

/// Template, as a row of the table of templates.
pub struct Template {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// Description of the space, in one line.
    pub text: &'static str,
    /// Whether the template has configurations for a workload on a target.
    pub serves: fn(&TemplateSetting) -> bool,
    /// Space of a task, declared but not enumerated.
    pub space: fn(&TemplateSetting) -> Result<Space, SpaceError>,
    /// Schedule of a configuration of that space.
    pub steps: fn(&TemplateSetting, &Space, &Config) -> Vec<Step>,
    /// Estimated cost of a run, in cycles of a core, by an analytical model; `None` without one. It ranks
    /// initial guesses.
    pub estimate: Option<fn(&TemplateSetting, &Space, &Config) -> f64>,
}

/// Table of templates; the first one that serves a setting is its default.
pub const TEMPLATES: &[Template] = &[
    matmul::MATMUL,
    matmul::MATMUL_BLOCKED,
    matmul::MATMUL_DOT,
    gpu::GPU_ANY,
    gpu::GPU_MATMUL,
    gpu::GPU_MATMUL_MMA,
    gpu::GPU_MATMUL_WGMMA,
    matmul::GEMM_4_2_4,
    matmul::MATMUL_4_3_4,
    matmul::PACKED,
    conv::CONV,
    conv::CONV_DIRECT,
    conv::CONV_WINOGRAD,
    conv::CONV_IM2COL,
    conv::CONV_COL2IM,
    gpu::GPU_CONV,
    gpu::GPU_CONV_MMA,
    gpu::GPU_WINOGRAD,
    conv::CONV_4_4_4_2_2_2,
    nest::NEST,
    gpu::GPU_NEST,
    gpu::CONV_3_3_3,
    gpu::DEPTHWISE_4_4_4,
];

/// Smallest number of floating-point operations with which any template computes a workload, for example by
/// leaving out padding or with Winograd's algorithm.
pub fn least_flops(workload: &Workload) -> f64 {
    workload.flops_inside() * conv::least_share(workload)
}

/// Setting that a template is instantiated for.
#[derive(Clone, Debug)]
pub struct TemplateSetting {
    /// Operator and its sizes.
    pub workload: Workload,
    /// Target machine.
    pub target: Target,
    /// Number of threads that the kernel may use.
    pub n_threads: usize,
}

impl TemplateSetting {
    /// Whether copies of 8-bit operands are 16-bit integers: if the machine has no dot products of bytes,
    /// unless sums of two products with weights of 7 bits fit 16 bits.
    pub(crate) fn widens_bytes(&self) -> bool {
        let stay = self.target.adds_pairs_of_bytes() && self.workload.factors().contains(&DType::I7);
        self.workload.has_integer_factors() && self.target.widens_bytes() && !stay
    }
}

/// Tuning task: a template instantiated for a setting, with its space.
#[derive(Clone)]
pub struct Task {
    /// Workload, target and threads.
    pub setting: TemplateSetting,
    /// The template.
    pub template: &'static Template,
    /// Space of the task.
    pub space: Arc<Space>,
}

/// Reason why there is no task: a mistake of the caller, except for `Space`, which is a bug in the template.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// Name that is not one of a template that serves the workload.
    #[error("no template `{name}` for {workload}; there are {known}")]
    NoTemplate {
        /// The name given.
        name: String,
        /// The workload.
        workload: String,
        /// Names of the templates that serve it.
        known: String,
    },
    /// Workload with open (dynamic) sizes on a GPU, which is not supported.
    #[error("{workload} has sizes that are ranges, which kernels for CPUs alone take; give numbers for {target}")]
    FamilyOnGpu {
        /// The workload.
        workload: String,
        /// The target.
        target: String,
    },
    /// Workload too large for any configuration of the template.
    #[error("{workload} is too large for template {template}: {what}, as {error}")]
    TooLarge {
        /// The workload.
        workload: String,
        /// The template.
        template: &'static str,
        /// Size that is too large, and one that would fit.
        what: String,
        /// Constraint that excludes everything.
        error: Box<SpaceError>,
    },
    /// Invalid space of the template.
    #[error(transparent)]
    Space(#[from] SpaceError),
}

/// Makes the constraint of an expression over these parameters.
fn constraint(name: &str, text: &str, parameters: &[Parameter]) -> Constraint {
    Constraint::parse(name, text, parameters).unwrap_or_else(|e| panic!("invariant: `{text}` is an expression: {e}"))
}

/// Makes the constraint of an expression over some of these parameters, `reads`; see
/// [`Constraint::parse_over`].
fn constraint_over(name: &str, reads: &[&str], text: &str, parameters: &[Parameter]) -> Constraint {
    let read: Vec<Parameter> = reads.iter().map(|name| named(parameters, name).clone()).collect();
    Constraint::parse_over(name, text, &read)
        .unwrap_or_else(|e| panic!("invariant: `{text}` is an expression over {reads:?}: {e}"))
}

/// Parameter with this name.
fn named<'a>(parameters: &'a [Parameter], name: &str) -> &'a Parameter {
    parameters.iter().find(|p| p.name == name).unwrap_or_else(|| panic!("invariant: there is a parameter {name}"))
}

/// Whether a word is among the values of a parameter.
fn has_value(parameters: &[Parameter], name: &str, word: &str) -> bool {
    matches!(&named(parameters, name).domain, Domain::Categorical(words) if words.iter().any(|known| known == word))
}

/// Condition that a parameter has none of these values, as an expression.
fn none_of(parameters: &[Parameter], name: &str, words: &[&str]) -> String {
    let Domain::Categorical(values) = &named(parameters, name).domain else {
        panic!("invariant: the values of {name} are words")
    };
    let others: Vec<String> =
        values.iter().filter(|v| !words.contains(&v.as_str())).map(|value| format!("'{value}'")).collect();
    format!("{name} in [{}]", others.join(", "))
}

/// Size for which a template has a configuration, whatever the others are within reason.
const MODEST_SIZE: i64 = 256;

/// Error of a space; if nothing is legal, it names the sizes that are too large: each one that alone would do
/// if it were modest, or all of them.
fn too_large(template: &Template, setting: &TemplateSetting, error: SpaceError) -> TaskError {
    let workload = &setting.workload;
    let large =
        || workload.operator().sizes.iter().map(|size| size.name).filter(|name| workload.size(name) > MODEST_SIZE);
    if !matches!(error, SpaceError::NothingLegal { .. }) || large().next().is_none() {
        return error.into();
    }
    let would_do = |name: &&str| {
        let workload = workload.with_size(name, MODEST_SIZE);
        workload.is_some_and(|workload| {
            (template.space)(&TemplateSetting { workload, ..setting.clone() })
                .and_then(|space| space.enumerate())
                .is_ok()
        })
    };
    let mut names: Vec<&str> = large().filter(would_do).collect();
    let link = if names.is_empty() { " and " } else { " or " };
    if names.is_empty() {
        names = large().collect();
    }
    let sizes: Vec<String> = names.iter().map(|name| format!("{name}={}", workload.size(name))).collect();
    let what = format!("give less than {}", sizes.join(link));
    TaskError::TooLarge { workload: workload.label(), template: template.name, what, error: Box::new(error) }
}

impl Task {
    /// Makes the task of a template by name, or of the workload's default template.
    ///
    /// # Errors
    /// [`TaskError`] if there is no such template for the operator, or its space cannot be built.
    pub fn new(setting: TemplateSetting, template: Option<&str>) -> Result<Task, TaskError> {
        let task = Task::declared(setting, template)?;
        // What is left by advice is a part of the whole.
        if task.space.advised().is_none() {
            task.space.enumerate().map_err(|error| too_large(task.template, &task.setting, error))?;
        }
        Ok(task)
    }

    /// Makes the task as [`Task::new`] does, without enumerating its space: enough for a known configuration.
    ///
    /// # Errors
    /// [`TaskError`] if there is no such template for the operator.
    pub fn declared(setting: TemplateSetting, template: Option<&str>) -> Result<Task, TaskError> {
        if setting.workload.is_family() && setting.target.gpu.is_some() {
            let (workload, target) = (setting.workload.label(), setting.target.name());
            return Err(TaskError::FamilyOnGpu { workload, target });
        }
        // A part of a pair must fit into a vector, and pairs are not supported on GPUs.
        let is_wide = |part: i64| setting.target.gpu.is_some() || part > setting.target.lanes(setting.workload.dtype);
        let has_wide_pairs = setting.workload.pairs().is_some_and(is_wide);
        let serving: Vec<&Template> = TEMPLATES.iter().filter(|t| !has_wide_pairs && (t.serves)(&setting)).collect();
        let found = match template {
            None => serving.first(),
            Some(name) => serving.iter().find(|t| t.name == name),
        };
        let template = *found.ok_or_else(|| TaskError::NoTemplate {
            name: template.unwrap_or("default").chars().take(60).collect(),
            workload: setting.workload.label(),
            known: serving.iter().map(|t| t.name).collect::<Vec<_>>().join(", "),
        })?;
        let space = (template.space)(&setting)?;
        Ok(Task { setting, template, space: Arc::new(space) })
    }

    /// Task without the constraints of a GPU's limits: configurations beyond them fail when they are
    /// instantiated, as papers count them.
    ///
    /// # Errors
    /// [`SpaceError`] if the space cannot be built without those constraints.
    pub fn beyond_limits(&self) -> Result<Task, SpaceError> {
        Ok(Task { space: Arc::new(self.space.without(&gpu::LIMITS)?), ..self.clone() })
    }

    /// Schedule of a configuration.
    pub fn steps(&self, config: &Config) -> Vec<Step> {
        (self.template.steps)(&self.setting, &self.space, config)
    }

    /// Schedule of a configuration as text, one step per line.
    pub fn steps_text(&self, config: &Config) -> String {
        steps_text(&self.steps(config))
    }

    /// Initial guesses: configurations that the template's analytical model ranks first in a sample of the
    /// space. Each algorithm is represented, and they lie at growing distances from each other, so that a
    /// single flaw of the model does not affect all of them; the best comes first, and those predicted to be
    /// far slower are left out. Empty without a model.
    ///
    /// # Cost
    /// A few thousand evaluations of the model, and as much as making the space for each of its algorithms.
    pub fn guesses(&self, seed: u64) -> Vec<Config> {
        const SAMPLE: u64 = 4096;
        const OF_EACH_ALGORITHM: usize = 16;
        /// Number of best samples from which better neighbours are followed.
        const WALKS: usize = 32;
        // A guess that is slower than the best one by this factor is not worth a trial, even if the model is
        // far off.
        const HOPELESS: f64 = 30.0;
        let Some(estimate) = self.template.estimate else { return Vec::new() };
        let (space, algorithm) = (self.advised(), self.space.names().position(|name| name == "algorithm"));
        // Some algorithms have a thousand times as many configurations as others.
        let parts: Vec<Arc<Space>> = match algorithm {
            None => vec![space],
            Some(at) => (0..space.n_values(at)).filter_map(|which| space.part(at, which).map(Arc::new)).collect(),
        };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut of_part = |part: &Arc<Space>| {
            let n = SAMPLE / parts.len() as u64;
            let size = u64::try_from(part.size()).unwrap_or(u64::MAX);
            let sample: Vec<Config> = match size <= n {
                true => (0..size).map(|at| part.config_at(at.into())).collect(),
                false => (0..n).map(|_| part.sample(&mut rng)).collect(),
            };
            let cost = |config: Config| (estimate(&self.setting, &self.space, &config), config);
            let order = |a: &(f64, Config), b: &(f64, Config)| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1));
            let mut ranked: Vec<(f64, Config)> = sample.into_iter().map(cost).collect();
            ranked.sort_by(order);
            // GPU spaces are much larger than the sample: the best configuration is not in it, but near some
            // of it.
            let is_large = self.setting.target.gpu.is_some() && part.size() > n.into();
            let starts: Vec<(f64, Config)> = ranked.iter().take(if is_large { WALKS } else { 0 }).cloned().collect();
            for (least, start) in starts {
                let better = |(least, from): &(f64, Config)| {
                    let next = part.neighbours(from).into_iter().map(cost).min_by(order);
                    next.filter(|(cost, _)| cost < least)
                };
                ranked.extend(std::iter::successors(better(&(least, start)), better));
            }
            ranked.sort_by(order);
            ranked.dedup();
            let distances = std::iter::successors(Some(0), |at| Some(at + 1 + at / 4)).take(OF_EACH_ALGORITHM);
            distances.map_while(|at| ranked.get(at).cloned()).collect::<Vec<_>>()
        };
        let mut guesses: Vec<(f64, Config)> = parts.iter().flat_map(&mut of_part).collect();
        // The first guess is the configuration that runs if nothing is measured, so that it is tried even
        // without time for all of them.
        guesses.sort_by(|a, b| a.0.total_cmp(&b.0));
        let best = guesses.first().map_or(0.0, |(cycles, _)| *cycles);
        guesses.into_iter().filter(|(cycles, _)| *cycles <= HOPELESS * best).map(|(_, config)| config).collect()
    }

    /// First of the [guesses](Task::guesses): the configuration that runs if nothing is recorded.
    pub fn first_guess(&self, seed: u64) -> Option<Config> {
        self.guesses(seed).into_iter().next()
    }

    /// Space that searches propose configurations of, and guesses are drawn from.
    fn advised(&self) -> Arc<Space> {
        self.space.advised().unwrap_or(&self.space).clone()
    }

    /// Search problem of the task: what is worth proposing of its space, and the loop contexts of its
    /// programs.
    pub fn problem(&self) -> Problem {
        let (task, untransformed) = (self.clone(), self.setting.workload.program());
        let contexts = move |config: &Config| {
            let program = apply_all(&untransformed, &task.steps(config)).ok()?;
            Some(loop_contexts(&program))
        };
        Problem { space: self.advised(), contexts: Some(Arc::new(contexts)), experience: None }
    }

    /// Scheduled, unlowered program of a configuration.
    ///
    /// # Errors
    /// The position of the illegal step, and the reason; a bug in the template.
    pub fn program(&self, config: &Config) -> Result<Program, (usize, Illegal)> {
        apply_all(&self.setting.workload.program(), &self.steps(config))
    }
}

impl Describe for Task {
    fn describe(&self, config: &Config) -> String {
        self.steps_text(config)
    }
}

impl<'a> From<&'a Task> for Subject<'a> {
    fn from(task: &'a Task) -> Subject<'a> {
        Subject::described(&task.space, task)
    }
}

fn ceil_div(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

/// Short constructors for steps, for templates to read like schedules.
mod step {
    use tilewright_ir::schedule::{LayoutAxis, Tail};
    use tilewright_ir::{DType, LoopKind, Step, TensorProduct};

    /// Split with a shorter last iteration if the factor does not divide the extent.
    pub fn split(target: &str, factor: i64, outer: &str, inner: &str) -> Step {
        split_with(Tail::Shrink, target, factor, outer, inner)
    }

    /// Split by a factor that must divide the extent.
    pub fn exact(target: &str, factor: i64, outer: &str, inner: &str) -> Step {
        split_with(Tail::Exact, target, factor, outer, inner)
    }

    /// Split with guards: a condition skips iterations beyond the extent in the last iteration.
    pub fn guard(target: &str, factor: i64, outer: &str, inner: &str) -> Step {
        split_with(Tail::Guard, target, factor, outer, inner)
    }

    fn split_with(tail: Tail, target: &str, factor: i64, outer: &str, inner: &str) -> Step {
        let (target, outer, inner) = (target.into(), outer.into(), inner.into());
        Step::Split { target, factor, tail, outer, inner }
    }

    pub fn bind(target: &str, axis: LoopKind) -> Step {
        Step::Bind { target: target.into(), axis }
    }

    pub fn pad(stage: &str, target: &str, multiple: i64) -> Step {
        Step::Pad { stage: stage.into(), target: target.into(), multiple }
    }

    pub fn reorder(loops: &[&str]) -> Step {
        Step::Reorder { loops: loops.iter().map(|l| (*l).to_owned()).collect() }
    }

    pub fn peel(target: &str, iterations: i64, last: bool, suffix: &str) -> Step {
        Step::Peel { target: target.into(), iterations, last, suffix: suffix.into() }
    }

    pub fn vectorize(target: &str) -> Step {
        Step::Vectorize { target: target.into() }
    }

    pub fn unroll(target: &str) -> Step {
        Step::Unroll { target: target.into() }
    }

    pub fn tensorize(target: &str, how: TensorProduct) -> Step {
        Step::Tensorize { target: target.into(), how }
    }

    pub fn parallel(target: &str) -> Step {
        Step::Parallel { target: target.into() }
    }

    pub fn stage(buffer: &str, at: Option<&str>, name: &str, layout: &[LayoutAxis]) -> Step {
        stage_as(buffer, at, name, layout, None)
    }

    pub fn stage_as(buffer: &str, at: Option<&str>, name: &str, layout: &[LayoutAxis], dtype: Option<DType>) -> Step {
        let (buffer, at, name) = (buffer.into(), at.map(Into::into), name.into());
        Step::Stage { buffer, at, name, layout: layout.to_vec(), dtype, shared: false }
    }

    /// Staging in shared memory of a GPU block.
    pub fn shared(buffer: &str, at: &str, name: &str, layout: &[LayoutAxis]) -> Step {
        let (buffer, at, name) = (buffer.into(), Some(at.into()), name.into());
        Step::Stage { buffer, at, name, layout: layout.to_vec(), dtype: None, shared: true }
    }

    pub fn accumulate(buffer: &str, at: &str, name: &str) -> Step {
        Step::Accumulate { buffer: buffer.into(), at: at.into(), name: name.into() }
    }

    pub fn compute_at(buffer: &str, at: &str) -> Step {
        Step::ComputeAt { buffer: buffer.into(), at: at.into() }
    }

    pub fn inline(buffer: &str) -> Step {
        Step::Inline { buffer: buffer.into() }
    }

    pub fn reindex(stage: &str, buffer: &str, name: &str) -> Step {
        Step::Reindex { stage: stage.into(), buffer: buffer.into(), name: name.into() }
    }

    pub fn fuse(outer: &str, inner: &str, fused: &str) -> Step {
        Step::Fuse { outer: outer.into(), inner: inner.into(), fused: fused.into() }
    }

    pub fn layout(buffer: &str, layout: &[LayoutAxis]) -> Step {
        Step::Layout { buffer: buffer.into(), layout: layout.to_vec() }
    }

    pub fn rfactor(stage: &str, target: &str, name: &str) -> Step {
        Step::Rfactor { stage: stage.into(), target: target.into(), name: name.into() }
    }

    pub fn winograd(buffer: &str, tile: i64) -> Step {
        Step::Winograd { buffer: buffer.into(), tile }
    }

    pub fn col2im(buffer: &str, block: i64, taps_last: bool) -> Step {
        Step::Col2im { buffer: buffer.into(), block, taps_last }
    }

    pub fn prefetch(buffer: &str, at: &str, ahead: i64) -> Step {
        Step::Prefetch { buffer: buffer.into(), at: at.into(), ahead, inside: Vec::new() }
    }

    pub fn prefetch_in_parts(buffer: &str, at: &str, ahead: i64, inside: &[&str]) -> Step {
        Step::Prefetch {
            buffer: buffer.into(),
            at: at.into(),
            ahead,
            inside: inside.iter().map(|l| (*l).to_owned()).collect(),
        }
    }

    pub fn pipeline(buffer: &str, at: &str, name: &str, twice: bool) -> Step {
        Step::Pipeline { buffer: buffer.into(), at: at.into(), name: name.into(), twice }
    }

    pub fn stream(buffers: &[&str], at: &str, stages: i64, options: [bool; 4]) -> Step {
        let [held, last, fed, multicast] = options;
        let buffers = buffers.iter().map(|b| (*b).into()).collect();
        Step::Stream { buffers, at: at.into(), stages, held, last, by_producer: fed, multicast }
    }
}
