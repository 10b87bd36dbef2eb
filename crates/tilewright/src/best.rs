//! Best recorded configurations.

use serde::Serialize;
use serde_json::{Map, Value as Json};
use tilewright_device::command::Objectives;
use tilewright_device::{Caches, host};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_ir::target::{GENERIC, Generic};
use tilewright_search::{Timing, is_tie, pareto_set};
use tilewright_tune::record::Validators;
use tilewright_tune::{self as core, PassedOver, Record, Store, StoreError, TaskKey, Validator, Winner};

use crate::format::{digits, duration, percent, table};

/// Member of a Pareto set: no other configuration is at least as good by every metric and better by one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParetoPoint {
    /// Value of each metric, by its name; times are in milliseconds.
    pub values: Map<String, Json>,
    /// Configuration.
    pub config: Json,
    /// Commands of the configuration, one per line.
    pub commands: String,
}

impl ParetoPoint {
    /// Computes the Pareto set of timings by several objectives; empty for a single objective. `describe`
    /// returns the configuration and the commands of the timing at an index.
    pub fn set_of<'a>(
        objectives: &Objectives,
        timings: impl Iterator<Item = Option<&'a Timing>>,
        describe: impl Fn(usize) -> (Json, String),
    ) -> Vec<ParetoPoint> {
        if !objectives.is_several() {
            return Vec::new();
        }
        let timings: Vec<Option<&Timing>> = timings.collect();
        let point = |at: usize| {
            let (config, commands) = describe(at);
            let values = timings[at].into_iter().flat_map(|timing| objectives.values(timing));
            let values = values.map(|(name, value)| (name.to_owned(), value.into())).collect();
            ParetoPoint { values, config, commands }
        };
        pareto_set(timings.iter().copied()).into_iter().map(point).collect()
    }

    /// Computes the Pareto set of records: of those measured on this machine, if there are any.
    pub fn of_records(objectives: &Objectives, records: &[Record]) -> Vec<ParetoPoint> {
        let is_own = |record: &&Record| !record.is_imported && record.outcome.timing().is_some();
        let has_own = records.iter().any(|record| is_own(&record));
        let records: Vec<&Record> = records.iter().filter(|record| !has_own || is_own(record)).collect();
        ParetoPoint::set_of(objectives, records.iter().map(|record| record.outcome.timing()), |at| {
            (records[at].config.clone(), records[at].steps.clone())
        })
    }

    /// Formats a set as a table, with a column for each metric; empty for an empty set.
    pub fn table(set: &[ParetoPoint]) -> String {
        let Some(first) = set.first() else { return String::new() };
        let configs: Vec<String> = set.iter().map(|point| point.config.to_string()).collect();
        let width = configs.iter().map(|config| config.chars().count()).max().unwrap_or(0);
        let last = |text: &str| format!("{text:<width$}");
        let head = first.values.keys().cloned().chain([last("configuration")]).collect();
        let row = |(point, config): (&ParetoPoint, &String)| {
            let values = point.values.values().map(|value| value.as_f64().map_or(String::new(), digits));
            values.chain([last(config)]).collect()
        };
        let rows = set.iter().zip(&configs).map(row);
        table(&std::iter::once(head).chain(rows).collect::<Vec<Vec<String>>>())
    }
}

/// Best known configuration of a workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Best {
    /// Throughput in 10⁹ floating-point operations a second; 0 without an operation count.
    pub gflops: f64,
    /// Median in milliseconds.
    pub ms_median: f64,
    /// Configuration.
    pub config: Json,
    /// Margin over the runner-up as a share of the median; `None` without a race.
    pub margin: Option<f64>,
    /// Whether the best and the runner-up are statistically indistinguishable.
    #[serde(rename = "tie")]
    pub is_tie: bool,
    /// Template of the configuration.
    pub template: String,
    /// Value of the metric of a user's command or kernel; milliseconds for a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// Commands of the configuration, one per line, for a user's command or kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commands: Option<String>,
    /// Pareto set of a command with several metrics, the best by the first metric first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pareto: Vec<ParetoPoint>,
    /// Whether it is the winner of a race.
    #[serde(rename = "confirmed")]
    pub is_confirmed: bool,
    /// Whether it was imported, so that it may have been measured on another machine.
    #[serde(rename = "imported")]
    pub is_imported: bool,
    /// Shared store that the record comes from; `None` if it comes from the database.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// Whether this release has verified the result, on any machine; false if that is unknown, as for records
    /// of the database.
    #[serde(skip)]
    pub is_of_this_release: bool,
    /// Relative spread of its rounds and of the runner-up's, the larger one, if known.
    #[serde(skip)]
    pub spread: Option<f64>,
    /// Median in nanoseconds.
    #[serde(skip)]
    pub median_ns: f64,
}

impl Best {
    /// Makes a result without a race from template, configuration and median.
    pub fn new(workload: &Workload, template: String, config: Json, median_ns: f64) -> Best {
        Best { gflops: gflops(workload, median_ns), ..Best::unnamed(template, config, median_ns) }
    }

    /// Makes a result without an operation count (GFLOP/s is 0).
    pub(crate) fn unnamed(template: String, config: Json, median_ns: f64) -> Best {
        Best {
            gflops: 0.0,
            ms_median: median_ns / 1e6,
            config,
            margin: None,
            is_tie: false,
            template,
            value: None,
            commands: None,
            pareto: Vec::new(),
            is_confirmed: false,
            is_imported: false,
            store: None,
            is_of_this_release: false,
            spread: None,
            median_ns,
        }
    }

    /// Text of its speed, its rank and its configuration, in several lines.
    pub fn text(&self) -> String {
        format!(
            "{} GFLOP/s, {} ({})\ntemplate {}\n{}",
            digits(self.gflops),
            duration(self.median_ns),
            self.rank(),
            self.template,
            self.config
        )
    }

    /// Rank in words: whether a race or only a trial found it, here or elsewhere.
    pub fn rank(&self) -> String {
        let rank = match (self.is_confirmed, self.ahead(None)) {
            (true, Some(ahead)) => format!("winner: {ahead}"),
            (true, None) => "winner".to_owned(),
            (false, _) => "fastest trial, not raced".to_owned(),
        };
        match &self.store {
            Some(store) => format!("{rank}, from the store {store}"),
            None if self.is_imported => rank + ", imported",
            None => rank,
        }
    }

    /// Margin of a race's winner over the runner-up, in words, among `n_leaders` finalists; `None` without a
    /// race.
    pub fn ahead(&self, n_leaders: Option<usize>) -> Option<String> {
        let margin = percent(self.margin?);
        let of = n_leaders.map_or(String::new(), |n| format!(" of {n}"));
        let spread = self.spread.map_or(String::new(), |spread| format!(", rounds spread by {}", percent(spread)));
        Some(match self.is_tie {
            true => format!("tie within noise: the runner-up{of} is {margin} behind{spread}"),
            false => format!("{margin} ahead of the runner-up{of}{spread}"),
        })
    }

    /// Result of a race's winner.
    pub fn of_winner(workload: &Workload, winner: &Winner) -> Best {
        Best { gflops: gflops(workload, winner.median_ns), ..Best::of_unnamed_winner(winner) }
    }

    /// Result of a race's winner without an operation count.
    pub(crate) fn of_unnamed_winner(winner: &Winner) -> Best {
        Best {
            margin: winner.margin,
            is_tie: winner.margin.zip(winner.spread).is_some_and(|(margin, spread)| is_tie(margin, spread)),
            is_confirmed: true,
            is_imported: winner.is_imported,
            spread: winner.spread,
            ..Best::unnamed(winner.template.clone(), winner.config.clone(), winner.median_ns)
        }
    }

    /// Result of a store's best record of a user's command or kernel.
    pub fn of_own(best: core::BestRecord) -> Best {
        match best {
            core::BestRecord::Confirmed(winner) => Best::of_unnamed_winner(&winner),
            core::BestRecord::Trial(record) => {
                let best = Best::unnamed(record.template, record.config, record.outcome.cost());
                Best { is_imported: record.is_imported, ..best }
            }
        }
    }

    /// Result of a store's best record of a workload.
    pub fn of_store(workload: &Workload, best: core::BestRecord) -> Best {
        match best {
            core::BestRecord::Confirmed(winner) => Best::of_winner(workload, &winner),
            core::BestRecord::Trial(record) => Best {
                is_imported: record.is_imported,
                ..Best::new(workload, record.template, record.config, record.outcome.cost())
            },
        }
    }
}

/// Throughput in GFLOP/s of a run that takes `ns`.
pub fn gflops(workload: &Workload, ns: f64) -> f64 {
    workload.flops() / ns
}

/// Cache states before timed runs that records distinguish.
pub const CACHES: [Caches; 3] = [Caches::Warm, Caches::ColdConstants, Caches::Cold];

/// Name of a target in records, with the cache state appended unless it is the default.
pub fn target_name(target: &Target, caches: Caches) -> String {
    let condition = match caches {
        Caches::Warm => "",
        Caches::ColdConstants => "/cold-constants",
        Caches::Cold => "/cold",
    };
    format!("{}{condition}", target.name())
}

/// Target by its name in records, if it is this machine or a predefined target.
pub fn known_target(name: &str) -> Option<Target> {
    let known = std::iter::once(host::target()).chain(GENERIC.iter().map(Generic::target));
    known.into_iter().find(|target| CACHES.iter().any(|caches| target_name(target, *caches) == name))
}

/// Plausibility checks of a workload's records for this target and number of threads, by template.
pub fn validators<'a>(workload: &'a Workload, target: &'a str, threads: u32) -> impl Fn(&str) -> Validator + 'a {
    let machine = known_target(target);
    move |template| Validator::new(workload, target, threads, template, machine.clone())
}

/// Finds the best plausible record of a workload, and counts the records that are skipped.
///
/// # Errors
/// If the database fails.
pub(crate) fn known_best(
    store: &Store,
    workload: &Workload,
    target: &str,
    threads: u32,
    template: Option<&str>,
) -> Result<(Option<Best>, PassedOver), StoreError> {
    let validators = validators(workload, target, threads);
    let (best, passed_over) = store.best(&workload.to_string(), target, threads, template, &validators)?;
    Ok((best.map(|best| Best::of_store(workload, best)), passed_over))
}

/// Reads the plausible trials of a task, and counts the records that are skipped.
///
/// # Errors
/// If the database fails.
pub fn trials_of(
    store: &Store,
    key: &TaskKey,
    validators: Validators,
    passed_over: &mut PassedOver,
) -> Result<Vec<Record>, StoreError> {
    let TaskKey { workload, target, template, threads } = key;
    let (records, rejected) = store.trials_of(workload, target, *threads, Some(template), validators)?;
    *passed_over += rejected;
    Ok(records)
}
