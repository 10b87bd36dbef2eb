//! Facts of the report on records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value as Json;
use tilewright::{ParetoPoint, is_own, validators};
use tilewright_device::command::{NamedMetric, Objectives};
use tilewright_ir::op::Workload;
use tilewright_search::{
    ErrorClass, LEAST_TRIALS, Outcome, Parameter, Seconds, Space, belief, expected_gain, importance,
};
use tilewright_tune::{PassedOver, Record, Store, StoreError, TaskKey, Validator};

use crate::history::{SearchRun, runs};
use crate::stats::{Quartiles, median};

/// Number of promising configurations that are named.
const N_PROMISING: usize = 5;
/// Share of the best throughput from which on it counts as reached.
const NEAR_BEST: f64 = 0.95;

/// Subject of the report: a workload on a machine with some number of threads.
#[derive(Debug, Serialize)]
pub struct ReportSubject {
    /// The workload.
    pub workload: String,
    /// Name of the target, as in records.
    pub target: String,
    /// Number of threads.
    pub threads: u32,
    /// Number of recorded trials, failures included.
    pub trials: u64,
    /// Numbers of skipped records, which are implausible or unreadable.
    pub passed_over: PassedOver,
    /// Best configuration; `None` if nothing was correct.
    pub best: Option<BestConfig>,
    /// Facts by search and template.
    pub searches: Vec<SearchFacts>,
    /// Numbers of trials by outcome, successes included, with the seconds spent on them.
    pub outcomes: Vec<OutcomeFacts>,
    /// Facts by template, in the order in which they were first searched.
    pub templates: Vec<TemplateFacts>,
    /// Trade-offs of a command with several metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pareto: Option<ParetoFacts>,
    /// Leading metric of a command, unless it is a time.
    #[serde(skip)]
    pub metric: Option<NamedMetric>,
    /// Points of all trials, in the order of recording.
    #[serde(skip)]
    pub points: Vec<Point>,
}

/// Trade-offs between several metrics.
#[derive(Debug, Serialize)]
pub struct ParetoFacts {
    /// Names of the metrics, the leading one first.
    pub metrics: Vec<String>,
    /// Pareto set.
    pub set: Vec<ParetoPoint>,
    /// Values of every trial that has all metrics, in their order.
    #[serde(skip)]
    pub values: Vec<Vec<f64>>,
}

/// Best configuration.
#[derive(Debug, Serialize)]
pub struct BestConfig {
    /// Throughput in GFLOP/s.
    pub gflops: f64,
    /// Median in milliseconds.
    pub ms_median: f64,
    /// Template of the configuration.
    pub template: String,
    /// Parameters of the configuration.
    pub config: Json,
    /// Whether it won the final race of a run.
    pub confirmed: bool,
    /// Margin over the runner-up as a share of the median, if it won a race.
    pub margin: Option<f64>,
    /// Search that proposed it.
    pub search: String,
    /// Seed of that search.
    pub seed: u64,
    /// Schedule, one step per line.
    pub steps: String,
}

/// Results of a search on a template.
#[derive(Debug, Serialize)]
pub struct SearchFacts {
    /// Search with its options.
    pub search: String,
    /// The template.
    pub template: String,
    /// Number of runs.
    pub runs: u64,
    /// Number of trials of all runs.
    pub trials: u64,
    /// Number of trials that failed.
    pub failed: u64,
    /// Total duration of its runs, in seconds.
    pub seconds: f64,
    /// Quartiles over its runs of the best throughput; `None` if no run had a valid trial.
    pub best_gflops: Option<Quartiles>,
    /// Costs in nanoseconds of the best trial of each run.
    #[serde(skip)]
    pub best_ns: Vec<f64>,
    /// Trials and seconds until its runs come close to the best known result.
    pub near_best: NearBest,
    /// Seconds spent on its trials.
    pub seconds_in: Seconds,
    /// The runs.
    #[serde(skip)]
    pub members: Vec<SearchRun>,
}

/// Trials and seconds until runs reach 95 % of the best known throughput of the workload.
#[derive(Debug, Serialize)]
pub struct NearBest {
    /// Number of runs that reach it.
    pub runs: u64,
    /// Median number of trials until then.
    pub trials: Option<f64>,
    /// Median seconds until then.
    pub seconds: Option<f64>,
}

/// Trials with the same outcome.
#[derive(Debug, Serialize)]
pub struct OutcomeFacts {
    /// Error class, or `no_error`.
    pub class: &'static str,
    /// Number of trials.
    pub trials: u64,
    /// Seconds spent on them.
    pub seconds_in: Seconds,
    /// Message of the first failure.
    pub example: Option<String>,
}

/// Facts about a template that models learn from its trials.
#[derive(Debug, Serialize)]
pub struct TemplateFacts {
    /// The template.
    pub template: String,
    /// Number of trials.
    pub trials: u64,
    /// Coefficient of determination (R²) of log time on held-out trials.
    pub r_squared: Option<f64>,
    /// Permutation importance of each parameter, largest first: the drop of R² when it is shuffled.
    pub importance: Vec<(String, f64)>,
    /// Reason why there is no importance, if there is none.
    pub not_known: Option<String>,
    /// Expected improvement from the same number of further trials, as a share of the best time.
    pub expected_gain: Option<f64>,
    /// Calibration factor of the Gaussian process's standard deviation.
    pub widened: Option<f64>,
    /// Unmeasured configurations, by decreasing probability of improvement.
    pub promising: Vec<PromiseFacts>,
}

/// Prediction for an unmeasured configuration.
#[derive(Debug, Serialize)]
pub struct PromiseFacts {
    /// Parameters of the configuration.
    pub config: Json,
    /// Predicted median in milliseconds.
    pub ms_median: f64,
    /// Ends of the 80 % prediction interval, in milliseconds.
    pub ms_interval: [f64; 2],
    /// Probability of improvement over the best trial.
    pub chance: f64,
}

/// Trial as a point of the scatter plot.
#[derive(Debug)]
pub struct Point {
    /// Cost in nanoseconds; `None` if it failed.
    pub cost_ns: Option<f64>,
    /// Category: the algorithm if the space has several, else the search.
    pub kind: String,
}

impl ReportSubject {
    /// Quantity by which trials are judged, computed from their cost in nanoseconds: the metric of a command,
    /// otherwise the throughput.
    pub fn quantity(&self, cost_ns: f64) -> f64 {
        match &self.metric {
            Some(objective) => objective.metric.value(cost_ns),
            None => flops_of(&self.workload) / cost_ns,
        }
    }

    /// Unit or name of that quantity.
    pub fn unit(&self) -> &str {
        match &self.metric {
            Some(objective) if objective.name.is_empty() => "metric",
            Some(objective) => &objective.name,
            None if is_own(&self.workload) => "runs/s",
            None => "GFLOP/s",
        }
    }
}

impl SearchFacts {
    /// Label among the searches of a subject.
    pub fn label(&self, subject: &ReportSubject) -> String {
        match subject.templates.len() {
            1 => self.search.clone(),
            _ => format!("{} on {}", self.search, self.template),
        }
    }
}

/// Facts of a database.
#[derive(Debug, Default)]
pub struct Facts {
    /// Subjects, in the order in which they were first tuned.
    pub subjects: Vec<ReportSubject>,
    /// Numbers of skipped records.
    pub passed_over: PassedOver,
    /// Notes on other skipped things, one per line.
    pub notes: Vec<String>,
}

/// Collects the facts of these workloads' records, or of all records if none is named.
///
/// # Errors
/// If the database fails.
pub fn facts(store: &Store, asked: &[String]) -> Result<Facts, StoreError> {
    let mut seen: Vec<TaskKey> = Vec::new();
    let mut facts = Facts::default();
    for key in store.tasks()?.into_iter().filter(|task| asked.is_empty() || asked.contains(&task.workload)) {
        let is_same = |other: &TaskKey| {
            (&key.workload, &key.target, key.threads) == (&other.workload, &other.target, other.threads)
        };
        if seen.iter().any(is_same) {
            continue;
        }
        let workload = match is_own(&key.workload) {
            true => Ok(None),
            false => Workload::parse(&key.workload).map(Some),
        };
        match workload {
            Ok(workload) => match subject(store, &key, workload.as_ref())? {
                Ok(subject) => {
                    if subject.passed_over.total() > 0 {
                        let (workload, passed_over) = (&key.workload, subject.passed_over);
                        facts.notes.push(format!("{workload} on {}: {passed_over}", key.target));
                    }
                    facts.subjects.push(subject);
                }
                Err(passed_over) => facts.passed_over += passed_over,
            },
            Err(error) => facts.notes.push(format!("{}: {error}: its records are passed over", key.workload)),
        }
        seen.push(key);
    }
    Ok(facts)
}

/// Number of operations of a run; 1e9 for commands and user kernels, so that GFLOP/s are runs per second.
pub fn flops_of(workload: &str) -> f64 {
    if is_own(workload) { 1e9 } else { Workload::parse(workload).map_or(0.0, |workload| workload.flops()) }
}

/// Collects the facts of a subject, or the count of its records if all are implausible. Records of users' own
/// commands and kernels are always accepted.
fn subject(
    store: &Store,
    key: &TaskKey,
    workload: Option<&Workload>,
) -> Result<Result<ReportSubject, PassedOver>, StoreError> {
    let validators = |template: &str| {
        workload.map_or_else(Validator::default, |workload| validators(workload, &key.target, key.threads)(template))
    };
    let flops = flops_of(&key.workload);
    // In the order of recording: runs on several templates are interleaved.
    let (records, passed_over) = store.trials_of(&key.workload, &key.target, key.threads, None, &validators)?;
    if records.is_empty() {
        return Ok(Err(passed_over));
    }
    let (best, _) = store.best(&key.workload, &key.target, key.threads, None, &validators)?;
    let best = best.map(|best| match workload {
        Some(workload) => tilewright::Best::of_store(workload, best),
        None => tilewright::Best::of_own(best),
    });
    let runs = runs(&records);
    let fastest_ns = runs.iter().filter_map(SearchRun::best_ns).min_by(f64::total_cmp);
    let mut of_search: Vec<Vec<SearchRun>> = Vec::new();
    for run in runs {
        match of_search.iter_mut().find(|m| (&m[0].search, &m[0].template) == (&run.search, &run.template)) {
            Some(members) => members.push(run),
            None => of_search.push(vec![run]),
        }
    }
    let mut templates: Vec<&str> = Vec::new();
    for record in &records {
        if !templates.contains(&record.template.as_str()) {
            templates.push(&record.template);
        }
    }
    Ok(Ok(ReportSubject {
        trials: records.len() as u64,
        passed_over,
        best: best.map(|best| best_facts(best, flops, &records)),
        searches: of_search.into_iter().map(|members| search_facts(members, flops, fastest_ns)).collect(),
        outcomes: outcomes(&records),
        templates: templates.iter().map(|name| template_facts(name, &validators(name), &records)).collect(),
        pareto: pareto_facts(&records),
        metric: metric_of(&records),
        points: records.iter().map(point).collect(),
        workload: key.workload.clone(),
        target: key.target.clone(),
        threads: key.threads,
    }))
}

/// Finds the leading metric of a command, unless it is a time.
fn metric_of(records: &[Record]) -> Option<NamedMetric> {
    let objectives = records.iter().find_map(|record| Objectives::of_steps(&record.steps))?;
    objectives.all().first().filter(|objective| !objective.metric.is_time()).cloned()
}

/// Collects the trade-offs between several metrics, as the records name them.
fn pareto_facts(records: &[Record]) -> Option<ParetoFacts> {
    let timed = || records.iter().filter_map(|record| Some((record, record.outcome.timing()?)));
    let (record, _) = timed().find(|(_, timing)| !timing.others.is_empty())?;
    let objectives = Objectives::of_steps(&record.steps)?;
    let metrics: Vec<String> = objectives.all().iter().map(|objective| objective.name.clone()).collect();
    let values = timed().map(|(_, timing)| objectives.values(timing).map(|(_, value)| value).collect::<Vec<f64>>());
    let values = values.filter(|values| values.len() == metrics.len()).collect();
    Some(ParetoFacts { set: ParetoPoint::of_records(&objectives, records), metrics, values })
}

fn best_facts(best: tilewright::Best, flops: f64, records: &[Record]) -> BestConfig {
    let record = records.iter().find(|r| r.template == best.template && r.config == best.config);
    let text = |of: fn(&Record) -> &String| record.map_or(String::new(), |record| of(record).clone());
    BestConfig {
        gflops: flops / best.median_ns,
        ms_median: best.median_ns / 1e6,
        confirmed: best.is_confirmed,
        margin: best.margin,
        search: text(|record| &record.search),
        seed: record.map_or(0, |record| record.seed),
        steps: text(|record| &record.steps),
        template: best.template,
        config: best.config,
    }
}

fn search_facts(members: Vec<SearchRun>, flops: f64, fastest_ns: Option<f64>) -> SearchFacts {
    let trials = || members.iter().flat_map(|run| &run.trials);
    let best_ns: Vec<f64> = members.iter().filter_map(SearchRun::best_ns).collect();
    let bests: Vec<f64> = best_ns.iter().map(|ns| flops / ns).collect();
    let near: Vec<(u64, f64)> = match fastest_ns {
        Some(fastest) => members.iter().filter_map(|run| run.reached(fastest / NEAR_BEST)).collect(),
        None => Vec::new(),
    };
    SearchFacts {
        search: members[0].search.clone(),
        template: members[0].template.clone(),
        runs: members.len() as u64,
        trials: trials().count() as u64,
        failed: trials().filter(|trial| trial.result.is_err()).count() as u64,
        seconds: members.iter().map(SearchRun::seconds).sum(),
        best_gflops: Quartiles::of(&bests),
        best_ns,
        near_best: NearBest {
            runs: near.len() as u64,
            trials: median(&near.iter().map(|(n, _)| *n as f64).collect::<Vec<_>>()),
            seconds: median(&near.iter().map(|(_, s)| *s).collect::<Vec<_>>()),
        },
        seconds_in: members.iter().fold(Seconds::default(), |mut sum, run| {
            sum += run.seconds_in();
            sum
        }),
        members,
    }
}

fn outcomes(records: &[Record]) -> Vec<OutcomeFacts> {
    let mut by_class: BTreeMap<Option<ErrorClass>, OutcomeFacts> = BTreeMap::new();
    for record in records {
        let class = record.outcome.class();
        let facts = by_class.entry(class).or_insert_with(|| OutcomeFacts {
            class: Outcome::name_of(class),
            trials: 0,
            seconds_in: Seconds::default(),
            example: match &record.outcome {
                Outcome::Failed { message, .. } => Some(message.clone()),
                Outcome::Measured(_) => None,
            },
        });
        facts.trials += 1;
        facts.seconds_in += record.seconds;
    }
    by_class.into_values().collect()
}

fn template_facts(name: &str, validator: &Validator, records: &[Record]) -> TemplateFacts {
    let own: Vec<&Record> = records.iter().filter(|record| record.template == name).collect();
    let costs: Vec<f64> = own.iter().map(|record| record.outcome.cost()).collect();
    let mut facts = TemplateFacts {
        template: name.to_owned(),
        trials: own.len() as u64,
        r_squared: None,
        importance: Vec::new(),
        not_known: None,
        expected_gain: expected_gain(&costs, costs.len() as f64),
        widened: None,
        promising: Vec::new(),
    };
    // For a template of another version or machine, the current space says nothing about its parameters.
    let recorded = own.first().filter(|record| is_own(&record.workload)).and_then(|_| space_of(name, &own));
    let known = validator.space().filter(|space| space.enumerate().is_ok());
    let Some(space) = known.or(recorded.as_ref()) else {
        facts.not_known = Some("This machine does not know the space.".to_owned());
        return facts;
    };
    let trials: Vec<_> = own.iter().filter_map(|record| record.trial(space).ok()).collect();
    if let Some(found) = importance(space, &trials, 0) {
        facts.r_squared = Some(found.r_squared);
        facts.importance = space.names().map(str::to_owned).zip(found.by_parameter).collect();
        facts.importance.sort_by(|a, b| b.1.total_cmp(&a.1));
    } else {
        let n_valid = trials.iter().filter(|trial| trial.outcome.timing().is_some()).count();
        facts.not_known = Some(match n_valid < LEAST_TRIALS {
            true => format!("{n_valid} of the {LEAST_TRIALS} valid trials that a model takes."),
            false => "All valid trials are equal.".to_owned(),
        });
    }
    if let Some(found) = belief(space, &trials, N_PROMISING, 0) {
        facts.widened = Some(found.widened);
        let promise = |promise: &tilewright_search::Promise| PromiseFacts {
            config: space.config_to_json(&promise.config),
            ms_median: promise.median_ns / 1e6,
            ms_interval: promise.interval_ns.map(|ns| ns / 1e6),
            chance: promise.chance,
        };
        facts.promising = found.promising.iter().map(promise).collect();
    }
    facts
}

/// Makes a space of the values in records of a command or a kernel, without constraints; `None` if the values
/// are neither numbers nor texts. If there is a text in a list of numbers, all are texts.
fn space_of(name: &str, records: &[&Record]) -> Option<Arc<Space>> {
    let names = records.first()?.config.as_object()?.keys();
    let parameter = |name: &String| {
        let values = || records.iter().filter_map(|record| record.config.get(name));
        let whole: Option<BTreeSet<i64>> = values().map(Json::as_i64).collect();
        let word = |value: &Json| value.as_str().map(str::to_owned).or_else(|| Some(value.as_i64()?.to_string()));
        let words: Option<BTreeSet<String>> = values().map(word).collect();
        match (whole, words) {
            (Some(whole), _) => Some(Parameter::ordinal(name, whole)),
            (None, Some(words)) => {
                Some(Parameter::categorical(name, &words.iter().map(String::as_str).collect::<Vec<_>>()))
            }
            (None, None) => None,
        }
    };
    let parameters = names.map(parameter).collect::<Option<Vec<_>>>()?;
    Space::new(name, parameters, vec![]).ok().map(Arc::new)
}

fn point(record: &Record) -> Point {
    let algorithm = record.config.get("algorithm").and_then(Json::as_str);
    Point {
        cost_ns: record.outcome.timing().map(|timing| timing.median_ns),
        kind: algorithm.unwrap_or(&record.search).to_owned(),
    }
}
