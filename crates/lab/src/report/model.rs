//! Facts of the report on a model: the steps of a run, their times, and the effect of tuning.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::Value as Json;
use tilewright::{Choice, Database, Error, Source, gflops, target_name, validators};
use tilewright_device::{Caches, host, peak};
use tilewright_graph::{Tensor, Value};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_model::{Compiled, Kernel, Places, ProfiledStep, Runner, Step, Steps, ValueId};
use tilewright_runtime::SharedPool;
use tilewright_tune::{Record, Store, StoreError};

/// Pause in seconds without any trial that is not counted as time of the search.
const PAUSE_S: f64 = 60.0;

/// Model to report on.
pub struct ModelSubject<'a> {
    /// Name of the model.
    pub name: &'a str,
    /// Compiled model.
    pub compiled: &'a Compiled,
    /// Tensor for each of its inputs.
    pub inputs: &'a [(Value, Tensor)],
    /// Machine.
    pub target: &'a Target,
    /// Number of threads that kernels may use.
    pub threads: usize,
    /// Database of its kernels' records.
    pub database: &'a Database,
    /// Number of runs for medians.
    pub n_runs: usize,
}

/// Facts of the report.
#[derive(Debug, Serialize)]
pub struct ModelFacts {
    /// Name of the model.
    pub model: String,
    /// Path of the database.
    pub db: String,
    /// Name of the CPU.
    pub cpu: String,
    /// Name of the target, as in records.
    pub target: String,
    /// Number of threads that kernels may use.
    pub threads: usize,
    /// Median of a whole run, in milliseconds.
    pub ms_median: f64,
    /// Sum of the steps' medians, in milliseconds.
    pub ms_steps: f64,
    /// Measured f32 peak of the threads in GFLOP/s, if known.
    pub peak_gflops: Option<f64>,
    /// Size of the arena for intermediate tensors, in bytes.
    pub arena_bytes: usize,
    /// Steps of a run, in order.
    pub steps: Vec<StepFacts>,
    /// Distinct kernels, in the order of their first call.
    pub tasks: Vec<TaskFacts>,
    /// Nodes of the graph in topological order: inputs, steps, concatenations and outputs.
    pub nodes: Vec<GraphNode>,
    /// Tensors as edges between nodes.
    pub edges: Vec<GraphEdge>,
    /// Progress of the search, by kernel.
    pub search: SearchTime,
}

/// Step of a run.
#[derive(Debug, Serialize)]
pub struct StepFacts {
    /// Profile of the step.
    #[serde(flatten)]
    pub step: ProfiledStep,
    /// Share of the total time of all steps.
    pub share: f64,
    /// Index of its kernel among the tasks, if it is a kernel.
    pub task: Option<usize>,
}

/// Distinct kernel of a model.
#[derive(Debug, Serialize)]
pub struct TaskFacts {
    /// The workload.
    pub workload: String,
    /// Label of the workload for people.
    #[serde(skip)]
    pub label: String,
    /// Number of its calls per run.
    pub times: usize,
    /// Template of its configuration.
    pub template: String,
    /// Configuration that runs.
    pub config: Json,
    /// Whether it is recorded, rather than guessed.
    pub is_recorded: bool,
    /// Median of the first valid trial, in milliseconds.
    pub ms_before: Option<f64>,
    /// Median of the best, in milliseconds.
    pub ms_after: Option<f64>,
    /// Throughput of the best, in GFLOP/s.
    pub gflops: Option<f64>,
    /// Number of recorded trials.
    pub trials: u64,
    /// Number of trials that failed.
    pub failed: u64,
    /// Number of its turns in the search: periods without a trial of another kernel.
    pub turns: u64,
    /// Total duration of its turns, in seconds.
    pub seconds: f64,
}

/// Node of the graph.
#[derive(Debug, Serialize)]
pub struct GraphNode {
    /// Kind: `input`, `step`, `join` (a concatenation of tensors) or `output`.
    pub kind: &'static str,
    /// Name in the model.
    pub name: String,
    /// Type of its output.
    pub ty: String,
    /// Index among the steps, if it is a step.
    pub step: Option<usize>,
}

/// Tensor as an edge between two nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GraphEdge {
    /// Index of the node that computes it.
    pub from: usize,
    /// Index of the node that reads it.
    pub to: usize,
    /// Name in the model.
    pub tensor: String,
    /// Type of the tensor.
    pub ty: String,
}

/// Progress of a search, by turns.
#[derive(Debug, Default, Serialize)]
pub struct SearchTime {
    /// Seconds of the search, without pauses.
    pub seconds: f64,
    /// Turns, in order.
    pub turns: Vec<TurnFacts>,
    /// Points where the total changed: seconds, and total milliseconds of all kernels of a run.
    pub curve: Vec<(f64, f64)>,
}

/// Turn of a kernel in the search.
#[derive(Debug, Serialize)]
pub struct TurnFacts {
    /// Index of the task.
    pub task: usize,
    /// Start, in seconds of the search.
    pub from: f64,
    /// End, in seconds of the search.
    pub to: f64,
    /// Number of trials in the turn.
    pub trials: u64,
}

/// Runs a model, and collects the facts of its report.
///
/// # Errors
/// If it cannot run, or its records cannot be read.
pub fn model_facts(subject: &ModelSubject) -> Result<ModelFacts, Error> {
    let ModelSubject { name, compiled, inputs, target, threads, database, n_runs } = *subject;
    let failed = |error: tilewright_model::RunError| Error::failed(&error).because(error);
    let pool = SharedPool::new(threads).map_err(|error| Error::failed("no threads for a run").because(error))?;
    let mut runner = Runner::new(compiled, &pool).map_err(failed)?;
    runner.set_all(inputs).map_err(failed)?;
    runner.run().map_err(failed)?;
    let ms_median = runner.median_ns(n_runs).map_err(failed)? / 1e6;
    let steps = compiled.profile(&mut runner, n_runs).map_err(failed)?;
    let ms_steps = steps.iter().map(|step| step.us).sum::<f64>() / 1e3;

    let caches = compiled.fused.caches(target);
    let (known, store) = (database.records()?, database.open_to_read()?);
    let mut tasks = Vec::new();
    let mut trials: Vec<KernelTrial> = Vec::new();
    for (workload, times) in compiled.fused.tasks() {
        let records = match &store {
            None => Vec::new(),
            Some(store) => {
                let records = records_of(&workload, target, threads, caches.of(&workload), store);
                records.map_err(|error| database.refuse(error))?
            }
        };
        trials.extend(records.iter().filter_map(|record| KernelTrial::of(record, tasks.len())));
        let (choice, _) = known.choose(&workload, target, threads, caches.of(&workload), None)?;
        tasks.push(TaskFacts::new(&workload, times, &choice, &records));
    }
    let search = search_time(trials, &tasks);
    for turn in &search.turns {
        tasks[turn.task].turns += 1;
        tasks[turn.task].seconds += turn.to - turn.from;
    }
    let of_tasks: HashMap<&str, usize> = tasks.iter().zip(0..).map(|(task, at)| (task.workload.as_str(), at)).collect();
    let kernels = compiled.fused.each().filter_map(|(step, _)| match step {
        Step::Kernel(kernel) => Some(&kernel.workload),
        _ => None,
    });
    // Sums of open length are not tuned, and have no task.
    let task_of = |w: &Workload| of_tasks.get(w.representative().to_string().as_str()).copied();
    let place: HashMap<String, usize> = kernels.filter_map(|w| Some((w.to_string(), task_of(w)?))).collect();
    let steps: Vec<StepFacts> = steps
        .into_iter()
        .map(|step| StepFacts {
            share: if ms_steps > 0.0 { step.us / 1e3 / ms_steps } else { 0.0 },
            task: place.get(&step.workload).copied().filter(|_| step.kind == "kernel"),
            step,
        })
        .collect();
    let (nodes, edges) = picture(compiled, &steps);
    Ok(ModelFacts {
        model: name.to_owned(),
        db: database.path.display().to_string(),
        cpu: host::cpu_name(),
        target: target_name(target, caches.others()),
        threads,
        ms_median,
        ms_steps,
        peak_gflops: peak::gflops(target, peak::PeakKind::F32, threads).ok(),
        arena_bytes: compiled.memory.total,
        steps,
        tasks,
        nodes,
        edges,
        search,
    })
}

/// Records of a kernel in this cache state; in another state if there are none.
fn records_of(
    workload: &Workload,
    target: &Target,
    threads: usize,
    caches: Caches,
    store: &Store,
) -> Result<Vec<Record>, StoreError> {
    let n_threads = u32::try_from(threads).unwrap_or(u32::MAX);
    for caches in [caches, Caches::ColdConstants, Caches::Warm] {
        let target = target_name(target, caches);
        let validators = validators(workload, &target, n_threads);
        let (records, _) = store.trials_of(&workload.to_string(), &target, n_threads, None, &validators)?;
        if !records.is_empty() {
            return Ok(records);
        }
    }
    Ok(Vec::new())
}

impl TaskFacts {
    /// Makes the facts, without the task's turns, which are not known yet.
    fn new(workload: &Workload, times: usize, choice: &Choice, records: &[Record]) -> TaskFacts {
        let first = records.iter().find_map(|record| record.outcome.timing());
        let after_ns = match choice.source {
            Source::Recorded(ns) => Some(ns),
            Source::Guessed | Source::Outdated => None,
        };
        TaskFacts {
            workload: workload.to_string(),
            label: workload.label(),
            times,
            template: choice.task.template.name.to_owned(),
            config: choice.task.space.config_to_json(&choice.config),
            is_recorded: choice.is_recorded(),
            ms_before: first.map(|timing| timing.median_ns / 1e6),
            ms_after: after_ns.map(|ns| ns / 1e6),
            gflops: after_ns.filter(|_| workload.flops() > 0.0).map(|ns| gflops(workload, ns)),
            trials: records.len() as u64,
            failed: records.iter().filter(|record| record.outcome.class().is_some()).count() as u64,
            turns: 0,
            seconds: 0.0,
        }
    }
}

/// Trial of one of several kernels.
struct KernelTrial {
    task: usize,
    /// Time of its end, in seconds since 1970.
    end: f64,
    /// Duration of the trial in seconds.
    seconds: f64,
    /// Median in milliseconds, if it was valid.
    ms: Option<f64>,
}

impl KernelTrial {
    fn of(record: &Record, task: usize) -> Option<KernelTrial> {
        let run = record.run?;
        let seconds = record.seconds.build + record.seconds.run + record.seconds.verify;
        Some(KernelTrial {
            task,
            end: run.start_unix_ms as f64 / 1e3 + run.elapsed_s,
            seconds: seconds.clamp(0.0, PAUSE_S),
            ms: record.outcome.timing().map(|timing| timing.median_ns / 1e6),
        })
    }
}

/// Turns of trials with known times.
fn search_time(mut trials: Vec<KernelTrial>, tasks: &[TaskFacts]) -> SearchTime {
    trials.sort_by(|a, b| a.end.total_cmp(&b.end));
    let mut search = SearchTime::default();
    let mut best: Vec<Option<f64>> = vec![None; tasks.len()];
    let mut last: Option<f64> = None;
    for trial in &trials {
        let since = last.map(|last| trial.end - last).filter(|since| *since < PAUSE_S);
        let begin = search.seconds;
        search.seconds += since.unwrap_or(trial.seconds);
        last = Some(trial.end);
        match search.turns.last_mut().filter(|turn| turn.task == trial.task && since.is_some()) {
            Some(turn) => (turn.to, turn.trials) = (search.seconds, turn.trials + 1),
            None => search.turns.push(TurnFacts { task: trial.task, from: begin, to: search.seconds, trials: 1 }),
        }
        best[trial.task] = best[trial.task].into_iter().chain(trial.ms).reduce(f64::min);
        let whole = best.iter().zip(tasks).map(|(ms, task)| Some((*ms)? * task.times as f64)).sum::<Option<f64>>();
        if let Some(whole) = whole.filter(|whole| search.curve.last().is_none_or(|(_, ms)| ms != whole)) {
            search.curve.push((search.seconds, whole));
        }
    }
    search
}

/// Graph of a run.
struct RunPicture<'a> {
    compiled: &'a Compiled,
    nodes: Vec<GraphNode>,
    edges: Vec<GraphEdge>,
    /// Node that produces a value; constants have none.
    makers: HashMap<ValueId, usize>,
}

fn picture(compiled: &Compiled, steps: &[StepFacts]) -> (Vec<GraphNode>, Vec<GraphEdge>) {
    let (fused, places) = (&compiled.fused, Places::new(&compiled.fused));
    let net = &fused.net;
    let mut picture = RunPicture { compiled, nodes: Vec::new(), edges: Vec::new(), makers: HashMap::new() };
    for &id in &net.inputs {
        let node = picture.add("input", &net.value(id).name, Some(id), None);
        picture.makers.insert(id, node);
    }
    let mut joins: Vec<(&[ValueId], usize)> = Vec::new();
    let mut n_steps = 0;
    let mut copies = places.copies.iter().peekable();
    // Copies before a step are steps of the run, in their order.
    let mut copied: HashMap<(usize, ValueId), usize> = HashMap::new();
    for at in 0..=fused.steps.len() {
        while let Some(copy) = copies.next_if(|copy| copy.before == at) {
            let node = picture.add("step", "copy", Some(copy.from), Some(n_steps));
            picture.connect(copy.from, node);
            // At the end, the destination of a copy is an output.
            copied.insert((at, if at < fused.steps.len() { copy.from } else { net.outputs[copy.offset] }), node);
            n_steps += 1;
        }
        let Some(step) = fused.steps.get(at) else { break };
        match step {
            Step::Kernel(kernel) => {
                picture.kernel(kernel, n_steps);
                n_steps += 1;
            }
            Step::Sequence(sequence) => picture.sequence(sequence, &mut n_steps),
            Step::Host(operator) => {
                let node = picture.add("step", &operator.origin, operator.outputs.first().copied(), Some(n_steps));
                operator.inputs.iter().flatten().for_each(|id| picture.connect(*id, node));
                picture.makers.extend(operator.outputs.iter().map(|id| (*id, node)));
                n_steps += 1;
            }
            Step::While(_) | Step::Again(_) => n_steps += 1,
            Step::Append { from, to, .. } | Step::Set { from, to } => {
                let node = picture.add("step", &net.value(*to).name, Some(*to), Some(n_steps));
                picture.connect(*from, node);
                picture.makers.insert(*to, node);
                n_steps += 1;
            }
            Step::Part { of, part, .. } => picture.is_made_as(*part, *of),
            Step::Join { parts, whole } => {
                let node = picture.add("join", &net.value(*whole).name, Some(*whole), None);
                picture.join(parts, node, &joins, |part| copied.get(&(at, part)).copied());
                joins.push((parts, node));
                picture.makers.insert(*whole, node);
            }
        }
    }
    debug_assert_eq!(n_steps, steps.len(), "a node for each step");
    for &id in &net.outputs {
        let node = picture.add("output", &net.value(id).name, Some(id), None);
        match copied.get(&(fused.steps.len(), id)) {
            Some(copy) => picture.edge(id, *copy, node),
            None => picture.connect(id, node),
        }
    }
    (picture.nodes, picture.edges)
}

impl RunPicture<'_> {
    fn add(&mut self, kind: &'static str, name: &str, value: Option<ValueId>, step: Option<usize>) -> usize {
        let ty = value.map_or(String::new(), |id| self.compiled.fused.net.value(id).ty().to_string());
        self.nodes.push(GraphNode { kind, name: name.to_owned(), ty, step });
        self.nodes.len() - 1
    }

    fn kernel(&mut self, kernel: &Kernel, step: usize) {
        let node = self.add("step", &kernel.origin, Some(kernel.output), Some(step));
        kernel.inputs.iter().for_each(|id| self.connect(*id, node));
        self.makers.insert(kernel.output, node);
    }

    /// Draws repeated steps only once; values from the previous iteration are not drawn.
    fn sequence(&mut self, sequence: &Steps, n_steps: &mut usize) {
        for moving in &sequence.moving {
            self.is_made_as(moving.value, moving.first.unwrap_or(moving.of));
        }
        for step in &sequence.steps {
            match step {
                Step::Kernel(kernel) => {
                    self.kernel(kernel, *n_steps);
                    *n_steps += 1;
                }
                Step::Part { of, part, .. } => self.is_made_as(*part, *of),
                _ => {}
            }
        }
        for moving in sequence.moving.iter().filter(|moving| moving.first.is_none()) {
            self.is_made_as(moving.of, moving.value);
        }
    }

    /// Connects the parts that a node joins. Parts with which an earlier join begins come from that join.
    fn join(
        &mut self,
        parts: &[ValueId],
        node: usize,
        joins: &[(&[ValueId], usize)],
        copied: impl Fn(ValueId) -> Option<usize>,
    ) {
        let begun = joins.iter().filter(|(of, _)| of.len() > 1 && parts.starts_with(of));
        let begun = begun.max_by_key(|(of, _)| of.len()).copied();
        if let Some((_, from)) = begun {
            let GraphNode { name, ty, .. } = &self.nodes[from];
            self.edges.push(GraphEdge { from, to: node, tensor: name.clone(), ty: ty.clone() });
        }
        for part in &parts[begun.map_or(0, |(of, _)| of.len())..] {
            match copied(*part) {
                Some(copy) => self.edge(*part, copy, node),
                None => self.connect(*part, node),
            }
        }
    }

    /// Records that a value is produced by the same node as another one.
    fn is_made_as(&mut self, value: ValueId, other: ValueId) {
        let maker = self.makers.get(&other).copied();
        self.makers.extend(maker.map(|node| (value, node)));
    }

    /// Connects the producer of a value to a node; a constant has no producer.
    fn connect(&mut self, id: ValueId, to: usize) {
        if let Some(&from) = self.makers.get(&id) {
            self.edge(id, from, to);
        }
    }

    fn edge(&mut self, id: ValueId, from: usize, to: usize) {
        let value = self.compiled.fused.net.value(id);
        let edge = GraphEdge { from, to, tensor: value.name.clone(), ty: value.ty().to_string() };
        if !self.edges.contains(&edge) {
            self.edges.push(edge);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(times: usize) -> TaskFacts {
        TaskFacts {
            workload: String::new(),
            label: String::new(),
            times,
            template: String::new(),
            config: Json::Null,
            is_recorded: true,
            ms_before: None,
            ms_after: None,
            gflops: None,
            trials: 0,
            failed: 0,
            turns: 0,
            seconds: 0.0,
        }
    }

    #[test]
    fn turns_are_stretches_and_add_up() {
        let trial = |task, end, ms| KernelTrial { task, end, seconds: 0.5, ms };
        let trials = vec![
            trial(0, 1000.5, Some(4.0)),
            trial(0, 1001.0, None),
            trial(1, 1002.0, Some(1.0)),
            // After a pause.
            trial(1, 5000.0, Some(2.0)),
            trial(0, 5001.0, Some(3.0)),
        ];
        let search = search_time(trials, &[task(2), task(1)]);
        let turns: Vec<_> = search.turns.iter().map(|turn| (turn.task, turn.from, turn.to, turn.trials)).collect();
        assert_eq!(turns, [(0, 0.0, 1.0, 2), (1, 1.0, 2.0, 1), (1, 2.0, 2.5, 1), (0, 2.5, 3.5, 1)]);
        assert_eq!((search.seconds, &search.curve[..]), (3.5, &[(2.0, 9.0), (3.5, 7.0)][..]));
    }
}
