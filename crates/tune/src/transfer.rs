//! Transfer learning: use of other workloads' trials for a new one.
//!
//! The programs of these trials train a cost model, which then starts with knowledge ([`experience`]); the
//! best configurations, mapped to the new space, are good first candidates ([`warm_start`]).

use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_search::features::value_features;
use tilewright_search::{Config, Experience};

use crate::loops::loop_contexts;
use crate::record::Record;
use crate::template::Task;

/// Maximum number of configurations of a warm start.
const MOST_GUESSES: usize = 16;
/// Maximum number of workloads that a warm start takes configurations from.
const MOST_TASKS: usize = 4;

/// Task tuned earlier, with its trials.
#[derive(Debug, Clone)]
pub struct EarlierTask {
    /// Workload of the task.
    pub workload: Workload,
    /// Name of the template.
    pub template: String,
    /// Number of threads.
    pub threads: u32,
    /// Records of its trials.
    pub records: Vec<Record>,
}

/// Training data for a cost model from these tasks: at most `most_programs` programs, shared among the tasks.
/// Programs are rebuilt from the recorded steps, so templates and spaces may have changed since. Records
/// whose steps no longer apply are left out, and so are tasks without a measured trial.
///
/// # Cost
/// Scheduling of each program.
pub fn experience(tasks: &[EarlierTask], most_programs: usize) -> Experience {
    let mut experience = Experience::default();
    let share = most_programs / tasks.len().max(1);
    for (group, task) in tasks.iter().enumerate() {
        let best = task.records.iter().map(|record| record.outcome.fitness()).fold(0.0, f64::max);
        if best == 0.0 {
            continue;
        }
        let untransformed = task.workload.program();
        // Samples at equal intervals, so that early and late, good and bad trials are all represented.
        for record in task.records.iter().step_by(task.records.len().div_ceil(share.max(1)).max(1)) {
            let steps = parse_steps(&record.steps).ok().filter(|steps| !steps.is_empty());
            let Some(program) = steps.and_then(|steps| apply_all(&untransformed, &steps).ok()) else { continue };
            experience.contexts.push(loop_contexts(&program));
            experience.values.push(value_features(&record.config));
            experience.targets.push((record.outcome.fitness() / best) as f32);
            experience.groups.push(group as u32);
        }
    }
    experience
}

/// Best configurations of the most similar tasks of the same template, mapped to this task's space: first the
/// best of each task, most similar first, then the second best of each.
pub fn warm_start(task: &Task, earlier: &[EarlierTask]) -> Vec<Config> {
    let mut near: Vec<(f64, Vec<Config>)> = earlier
        .iter()
        .filter(|other| other.template == task.template.name)
        .map(|other| (distance(task, other), carried_over(task, other)))
        .filter(|(_, configs)| !configs.is_empty())
        .collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    near.truncate(MOST_TASKS);
    let mut guesses: Vec<Config> = Vec::new();
    for place in 0..MOST_GUESSES {
        for config in near.iter().filter_map(|(_, configs)| configs.get(place)) {
            if guesses.len() < MOST_GUESSES && !guesses.contains(config) {
                guesses.push(config.clone());
            }
        }
    }
    guesses
}

/// Best configurations of a task, mapped to the space of another, best first.
fn carried_over(task: &Task, earlier: &EarlierTask) -> Vec<Config> {
    let measured = |record: &&Record| record.outcome.timing().is_some();
    let mut records: Vec<&Record> = earlier.records.iter().filter(measured).collect();
    records.sort_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost()));
    let mut configs: Vec<Config> = Vec::new();
    for config in records.into_iter().filter_map(|record| task.space.nearest_to_json(&record.config)) {
        if !configs.contains(&config) {
            configs.push(config);
        }
        if configs.len() == MOST_GUESSES {
            break;
        }
    }
    configs
}

/// Distance of two tasks: ratios of their sizes and threads on a logarithmic scale, and 1 for each attribute
/// that differs.
fn distance(task: &Task, earlier: &EarlierTask) -> f64 {
    let (a, b) = (&task.setting.workload, &earlier.workload);
    let log_size = |workload: &Workload, name: &str| {
        let is_there = workload.operator().sizes.iter().any(|size| size.name == name);
        // Sizes such as a padding may be 0.
        if is_there { (1.0 + workload.size(name) as f64).log2() } else { 0.0 }
    };
    let sizes = || a.operator().sizes.iter().map(|size| size.name);
    let others = b.operator().sizes.iter().map(|size| size.name).filter(|name| !sizes().any(|other| other == *name));
    let of_sizes = sizes().chain(others).map(|name| (log_size(a, name) - log_size(b, name)).abs());
    let differs = [
        a.operator() != b.operator(),
        a.dtype != b.dtype,
        a.constants() != b.constants(),
        a.layout() != b.layout(),
        a.prologue() != b.prologue(),
        a.epilogue() != b.epilogue(),
    ];
    let of_threads = (task.setting.n_threads as f64 / f64::from(earlier.threads)).log2().abs();
    of_sizes.sum::<f64>() + of_threads + differs.into_iter().map(|differs| f64::from(u8::from(differs))).sum::<f64>()
}
