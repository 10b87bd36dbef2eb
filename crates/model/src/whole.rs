//! End-to-end comparison of a model before and after its kernels were tuned, which decides which
//! configurations stay.
//!
//! Kernels are measured one by one, in a cache state close to that of a run, but the sum of their times
//! decides nothing here: two whole models are run in turns. Kernels with whose previous configuration a run
//! is clearly faster get that configuration back.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tilewright::format::{count, digits, duration};
use tilewright::{Choice, Database, Error, Records};
use tilewright_graph::{Tensor, Value};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_runtime::SharedPool;
use tilewright_search::Timing;

use crate::caches::CachesOfKernels;
use crate::compile::{CompileOptions, Compiled, compile_as};
use crate::fuse::{Fused, Step};
use crate::runner::{RunError, Runner};
use crate::schedule::{LayoutPurpose, laid_out};

/// Limits of runs in turns: total time, and minimum and maximum number of turns.
const ROUNDS_TIME: Duration = Duration::from_secs(2);
const FEWEST_ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 31;
/// Time of the runs of one turn.
const ROUND_NS: f64 = 2e6;
/// Number of profiled runs, and time limit for them.
const PROFILED: usize = 15;
const PROFILE_NS: f64 = 0.5e9;
/// Factor by which a kernel must be slower than before, and share of the run that it must lose by it, to be
/// restored.
const SLOWER: f64 = 1.05;
const PART_OF_RUN: f64 = 0.003;
/// Relative difference of whole runs below which they count as equally fast.
const NOISE: f64 = 0.01;
/// Maximum difference of outputs, relative to the largest element, between two sets of correct kernels.
const SAME: f64 = 1e-2;

/// Model with a configuration for each of its kernels.
pub struct ConfiguredModel {
    fused: Fused,
    target: Target,
    threads: usize,
    /// Choices by the text of the workload.
    kernels: HashMap<String, Rc<Choice>>,
}

/// Run times of a model before and after tuning. Its JSON is `run` of `tilewright tune MODEL --json`.
#[derive(Debug, Clone, Serialize)]
pub struct Whole {
    /// Median in milliseconds with the previously best configurations, recorded or guessed.
    pub ms_before: f64,
    /// Median in milliseconds with all configurations that this tuning run found.
    pub ms_tuned: f64,
    /// Median in milliseconds with the configurations now recorded as best.
    pub ms: f64,
    /// Number of workloads whose configuration changed.
    pub n_changed: usize,
    /// Workloads whose previous configuration was restored.
    pub put_back: Vec<String>,
}

impl Whole {
    /// Formats the times as one line.
    pub fn text(&self) -> String {
        let (ms, before) = (duration(self.ms * 1e6), duration(self.ms_before * 1e6));
        let compared = match self.ms_before / self.ms {
            _ if self.n_changed == 0 => "the same kernels".to_owned(),
            faster if faster > 1.0 + NOISE => format!("{} times as fast", digits(faster)),
            _ => "no faster".to_owned(),
        };
        let put_back = match self.put_back.len() {
            0 => String::new(),
            n => {
                let kernels = count(n as u64, "kernel");
                format!("; {kernels} put back as before, as the tuned run took {}", duration(self.ms_tuned * 1e6))
            }
        };
        format!("whole run {ms}, before {before}: {compared}{put_back}\n")
    }
}

/// Time that a run of a model spends in a kernel.
#[derive(Clone, Copy, Default)]
struct Spent {
    us: f64,
    /// Number of calls of the kernel in the run.
    times: usize,
}

/// Times of a run by the text of the workload.
type Profile = BTreeMap<String, Spent>;

/// Workload of a kernel in the form that records use.
fn recorded_as(workload: &Workload) -> String {
    workload.representative().to_string()
}

impl ConfiguredModel {
    /// Configures each kernel of a model with the best record, else a guess.
    ///
    /// # Errors
    /// If records cannot be read, or a kernel has no configuration.
    pub fn known(fused: Fused, target: &Target, threads: usize, records: &Records) -> Result<ConfiguredModel, Error> {
        let failed = |error: crate::CompileError| Error::failed(&error).because(error);
        let fused = laid_out(fused, target, threads, LayoutPurpose::Run(records)).map_err(failed)?;
        let caches = fused.caches(target);
        let mut kernels = HashMap::new();
        for (step, _) in fused.all() {
            let Step::Kernel(kernel) = step else { continue };
            let workload = &kernel.workload;
            if let Entry::Vacant(place) = kernels.entry(workload.to_string()) {
                let (choice, _) = records.choose(workload, target, threads, caches.of(workload), None)?;
                place.insert(Rc::new(choice));
            }
        }
        Ok(ConfiguredModel { fused, target: target.clone(), threads, kernels })
    }

    fn compile(&self) -> Result<Compiled, Error> {
        let schedule =
            |workload: &Workload| self.kernels[&workload.to_string()].program().map_err(|error| error.to_string());
        let compiled = compile_as(self.fused.clone(), &self.target, &schedule, CompileOptions::default());
        compiled.map_err(|error| Error::failed(&error).because(error))
    }

    /// Workloads, in the form that records use, whose configuration differs from that of `other` or is
    /// missing there.
    fn changed_from(&self, other: &ConfiguredModel) -> HashSet<String> {
        let is_same = |a: &Choice, b: &Choice| a.same_configuration(b);
        let changed = self
            .kernels
            .iter()
            .filter(|(text, choice)| other.kernels.get(*text).is_none_or(|other| !is_same(choice, other)));
        changed.map(|(_, choice)| recorded_as(&choice.task.setting.workload)).collect()
    }

    /// Model with the configurations of another one for some workloads.
    fn with(&self, others: &ConfiguredModel, workloads: &HashSet<String>) -> ConfiguredModel {
        let chosen = |(text, choice): (&String, &Rc<Choice>)| {
            let other =
                others.kernels.get(text).filter(|_| workloads.contains(&recorded_as(&choice.task.setting.workload)));
            (text.clone(), Rc::clone(other.unwrap_or(choice)))
        };
        let kernels = self.kernels.iter().map(chosen).collect();
        ConfiguredModel { fused: self.fused.clone(), target: self.target.clone(), threads: self.threads, kernels }
    }
}

/// Compiled model with its runner.
struct RunningModel {
    compiled: Compiled,
    runner: Runner,
}

fn failed(error: RunError) -> Error {
    Error::failed(&error).because(error)
}

impl RunningModel {
    fn new(choices: &ConfiguredModel, inputs: &[(Value, Tensor)]) -> Result<RunningModel, Error> {
        let compiled = choices.compile()?;
        let threads = SharedPool::new(choices.threads);
        let threads = threads.map_err(|error| Error::failed("no threads for a run").because(error))?;
        let mut runner = Runner::new(&compiled, &threads).map_err(failed)?;
        runner.set_all(inputs).map_err(failed)?;
        runner.run().map_err(failed)?;
        Ok(RunningModel { compiled, runner })
    }

    /// Time of a run in each kernel, by the workload's text.
    fn profile(&mut self, ns: f64) -> Result<Profile, Error> {
        let n_runs = ((PROFILE_NS / ns) as usize).clamp(3, PROFILED);
        let steps = self.compiled.profile(&mut self.runner, n_runs).map_err(failed)?;
        let mut profile = Profile::new();
        for step in steps.into_iter().filter(|step| step.kind == "kernel") {
            let spent = profile.entry(step.workload).or_default();
            spent.us += step.us;
            spent.times += step.times;
        }
        Ok(profile)
    }
}

/// Median nanoseconds of runs in turns.
fn in_turns(all: [&mut RunningModel; 2]) -> Result<[f64; 2], Error> {
    let mut once = [0.0; 2];
    let mut samples = [Vec::new(), Vec::new()];
    let [a, b] = all;
    let mut runners = [&mut a.runner, &mut b.runner];
    for (ns, runner) in once.iter_mut().zip(&mut runners) {
        *ns = runner.run().map_err(failed)? as f64;
    }
    let begin = Instant::now();
    for round in 0..MOST_ROUNDS {
        if round >= FEWEST_ROUNDS && begin.elapsed() > ROUNDS_TIME {
            break;
        }
        for turn in 0..2 {
            // The order alternates.
            let at = (round + turn) % 2;
            let n_runs = (ROUND_NS / once[at].max(1.0)).ceil().clamp(1.0, 1e4) as usize;
            let ns = (0..n_runs).try_fold(0.0, |sum, _| runners[at].run().map(|ns| sum + ns as f64));
            samples[at].push(ns.map_err(failed)? / n_runs as f64);
        }
    }
    Ok(samples.map(|ns| Timing::of_samples(&ns, false).median_ns))
}

/// Whether the last outputs of two models agree, as those of correct kernels do.
fn agree(a: &RunningModel, b: &RunningModel) -> bool {
    let pairs = a.runner.outputs().into_iter().zip(b.runner.outputs());
    pairs.into_iter().all(|((_, a), (_, b))| {
        if !a.dtype().is_float() {
            return a.bytes() == b.bytes();
        }
        let (a, b) = (a.floats(), b.floats());
        let largest = b.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs()));
        a.iter().zip(&b).all(|(a, b)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= SAME * largest)
    })
}

/// Workloads that took clearly less of a run before.
fn better_before(before: &Profile, after: &Profile) -> HashSet<String> {
    let whole: f64 = after.values().map(|spent| spent.us).sum();
    let plain = after.iter().filter(|(text, after)| {
        let is_plain = |before: &Spent| after.us > SLOWER * before.us && after.us - before.us > PART_OF_RUN * whole;
        before.get(*text).is_some_and(is_plain)
    });
    plain.map(|(text, _)| text.clone()).collect()
}

/// Compares a model before and after tuning, and restores the previous configurations of those kernels with
/// which it is faster: those that the profiles identify, or all kernels if the model as a whole was faster
/// before.
///
/// # Errors
/// If the model does not run here, or records cannot be written.
pub fn settle(
    before: &ConfiguredModel,
    after: ConfiguredModel,
    inputs: &[(Value, Tensor)],
    database: &Database,
) -> Result<Whole, Error> {
    let changed = after.changed_from(before);
    let mut first = RunningModel::new(before, inputs)?;
    if changed.is_empty() {
        let ms = first.runner.median_ns(PROFILED).map_err(failed)? / 1e6;
        return Ok(Whole { ms_before: ms, ms_tuned: ms, ms, n_changed: 0, put_back: Vec::new() });
    }
    let mut best = RunningModel::new(&after, inputs)?;
    let [before_ns, tuned_ns] = in_turns([&mut first, &mut best])?;
    let mut whole = Whole {
        ms_before: before_ns / 1e6,
        ms_tuned: tuned_ns / 1e6,
        ms: tuned_ns / 1e6,
        n_changed: changed.len(),
        put_back: Vec::new(),
    };
    let profile = first.profile(before_ns)?;
    let plain = better_before(&profile, &best.profile(tuned_ns)?);
    let named = |text: &String| after.kernels.get(text).map(|choice| recorded_as(&choice.task.setting.workload));
    let plain: HashSet<String> = plain.iter().filter_map(named).filter(|name| changed.contains(name)).collect();
    let mut put_back = HashSet::new();
    for tried in [plain, changed] {
        let is_slower = whole.ms > (1.0 + NOISE) * whole.ms_before;
        if tried.is_empty() || tried.len() == whole.n_changed && !is_slower {
            continue;
        }
        let other = after.with(before, &tried);
        let mut running = RunningModel::new(&other, inputs)?;
        let [best_ns, ns] = in_turns([&mut best, &mut running])?;
        if ns < (1.0 - NOISE) * best_ns && agree(&running, &best) {
            whole.ms *= ns / best_ns;
            (put_back, best) = (tried, running);
        }
    }
    whole.put_back = record(before, &after, &put_back, &profile, database)?;
    Ok(whole)
}

/// Records the previous configurations as the best ones for some workloads; returns the workloads for which
/// they now are.
fn record(
    before: &ConfiguredModel,
    after: &ConfiguredModel,
    put_back: &HashSet<String>,
    profile: &Profile,
    database: &Database,
) -> Result<Vec<String>, Error> {
    let mut names: Vec<String> = Vec::new();
    let caches: CachesOfKernels = after.fused.caches(&after.target);
    for (text, choice) in &after.kernels {
        let workload = &choice.task.setting.workload;
        let (Some(old), name) = (before.kernels.get(text), recorded_as(workload)) else { continue };
        if put_back.contains(&name) && !names.contains(&name) {
            // Kernels that the compared run did not execute have no times: those of other numbers of tokens.
            let Some(Spent { us, times }) = profile.get(text) else { continue };
            old.put_back(1e3 * us / *times as f64, choice, database, caches.of(workload))?;
            names.push(name);
        }
    }
    let records = database.records()?;
    let is_best = |name: &String| -> Result<bool, Error> {
        let is_of = |choice: &Choice| recorded_as(&choice.task.setting.workload) == *name;
        let old = before.kernels.values().find(|choice| is_of(choice)).expect("it was put back");
        let workload = &old.task.setting.workload;
        let (now, _) = records.choose(workload, &after.target, after.threads, caches.of(workload), None)?;
        Ok(now.same_configuration(old))
    };
    names.sort();
    let mut kept = Vec::new();
    for name in names {
        if is_best(&name)? {
            kept.push(name);
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_took_plainly_less_before_are_named() {
        let profile = |us: &[(&str, f64)]| -> Profile {
            us.iter().map(|(name, us)| ((*name).to_owned(), Spent { us: *us, times: 1 })).collect()
        };
        let before = profile(&[("slower", 100.0), ("faster", 200.0), ("noise", 500.0), ("tiny", 0.1)]);
        let after = profile(&[("slower", 120.0), ("faster", 100.0), ("noise", 510.0), ("tiny", 0.3), ("new", 9.0)]);
        assert_eq!(better_before(&before, &after), HashSet::from(["slower".to_owned()]));
    }

    #[test]
    fn a_run_that_got_no_faster_says_so() {
        let whole = |ms: f64, n_changed: usize, put_back: &[&str]| {
            let put_back = put_back.iter().map(|&name| name.to_owned()).collect();
            Whole { ms_before: 2.0, ms_tuned: 4.0, ms, n_changed, put_back }.text()
        };
        assert_eq!(whole(1.0, 3, &[]), "whole run 1.000 ms, before 2.000 ms: 2.000 times as fast\n");
        assert_eq!(whole(1.99, 3, &[]), "whole run 1.990 ms, before 2.000 ms: no faster\n");
        assert_eq!(whole(2.0, 0, &[]), "whole run 2.000 ms, before 2.000 ms: the same kernels\n");
        let put_back = "; 2 kernels put back as before, as the tuned run took 4.000 ms\n";
        assert_eq!(whole(2.0, 3, &["a", "b"]), format!("whole run 2.000 ms, before 2.000 ms: no faster{put_back}"));
    }
}
