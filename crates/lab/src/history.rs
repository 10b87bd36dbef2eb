//! Runs reconstructed from records: their results over trials and time.

use std::collections::BTreeMap;

use tilewright_search::{ErrorClass, Seconds};
use tilewright_tune::Record;

use crate::stats::{MeanStd, Quartiles, median};

/// Pause in seconds between two trials that ends a run in records of an earlier version, which lack the start
/// of runs.
const PAUSE_S: u64 = 600;

/// Maximum plausible duration of a session, in seconds, so that sums over imported records stay finite.
const MOST_S: f64 = 1e12;

/// Run: the trials of one search with one seed on one space, those of resumed sessions included.
#[derive(Debug, Clone)]
pub struct SearchRun {
    /// Template of the space.
    pub template: String,
    /// Search with its options.
    pub search: String,
    /// Seed of the search.
    pub seed: u64,
    /// Trials in order.
    pub trials: Vec<TrialPoint>,
}

/// Trial of a run.
#[derive(Debug, Clone)]
pub struct TrialPoint {
    /// Seconds of the run until its end, without pauses between sessions.
    pub elapsed_s: f64,
    /// Median time of the kernel in nanoseconds, or the error class.
    pub result: Result<f64, ErrorClass>,
    /// Seconds spent on the trial.
    pub seconds: Seconds,
}

/// Monotonic step curve: a best-so-far value from each position on.
#[derive(Debug, Clone, Default)]
pub struct Curve {
    /// Positions and values at each step.
    pub points: Vec<(f64, f64)>,
    /// End of the last step.
    pub end: f64,
}

/// Reconstructs the runs from records of one space, in order of their starts.
pub fn runs(records: &[Record]) -> Vec<SearchRun> {
    let mut runs: Vec<(SearchRun, SessionTime)> = Vec::new();
    for record in records {
        let is_own =
            |run: &SearchRun| (&run.template, &run.search, run.seed) == (&record.template, &record.search, record.seed);
        let at = runs.iter().position(|(run, _)| is_own(run)).unwrap_or_else(|| {
            let Record { template, search, seed, .. } = record.clone();
            runs.push((SearchRun { template, search, seed, trials: Vec::new() }, SessionTime::default()));
            runs.len() - 1
        });
        let (run, clock) = &mut runs[at];
        let result = match (record.outcome.class(), record.outcome.timing()) {
            (Some(class), _) => Err(class),
            (None, timing) => Ok(timing.map_or(f64::INFINITY, |timing| timing.median_ns)),
        };
        run.trials.push(TrialPoint { elapsed_s: clock.elapsed_s(record), result, seconds: record.seconds });
    }
    runs.into_iter().map(|(run, _)| run).collect()
}

/// Sum of the sessions of a run. If two processes carried it out in parallel, the seconds of both count.
#[derive(Default)]
struct SessionTime {
    /// Seconds of each session so far, by its start in milliseconds since 1970.
    sessions: BTreeMap<u64, f64>,
    /// Start of the session of the last record, and the time of that record, in seconds.
    last: Option<(u64, u64)>,
}

impl SessionTime {
    fn elapsed_s(&mut self, record: &Record) -> f64 {
        let start = match (record.run, self.last) {
            (Some(run), _) => run.start_unix_ms,
            (None, Some((start, last))) if record.unix_time <= last.saturating_add(PAUSE_S) => start,
            (None, _) => record.unix_time.saturating_mul(1000),
        };
        self.last = Some((start, record.unix_time));
        let own_s = record.run.map_or_else(
            || record.unix_time.saturating_mul(1000).saturating_sub(start) as f64 / 1e3,
            |run| run.elapsed_s,
        );
        let seconds = self.sessions.entry(start).or_default();
        *seconds = seconds.max(own_s).min(MOST_S);
        self.sessions.values().sum()
    }
}

impl SearchRun {
    /// Duration of all its sessions, in seconds.
    pub fn seconds(&self) -> f64 {
        self.trials.last().map_or(0.0, |trial| trial.elapsed_s)
    }

    /// Seconds spent on the trials.
    pub fn seconds_in(&self) -> Seconds {
        self.trials.iter().fold(Seconds::default(), |mut sum, trial| {
            sum += trial.seconds;
            sum
        })
    }

    /// Nanoseconds of the best trial; `None` if all failed.
    pub fn best_ns(&self) -> Option<f64> {
        self.trials[self.best_of_first(self.trials.len())?].result.ok()
    }

    /// Index of the best of the first `n_trials` trials.
    pub fn best_of_first(&self, n_trials: usize) -> Option<usize> {
        let first = self.trials.iter().take(n_trials).enumerate();
        let timed = first.filter_map(|(at, trial)| Some((at, trial.result.ok()?)));
        timed.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(at, _)| at)
    }

    /// First trial at least this fast: its number, from 1, and its end in seconds.
    pub fn reached(&self, ns: f64) -> Option<(u64, f64)> {
        let at = self.trials.iter().position(|trial| trial.result.is_ok_and(|own| own <= ns))?;
        Some((at as u64 + 1, self.trials[at].elapsed_s))
    }

    /// Best-so-far curve: `position` maps a trial's number, from 1, and the trial; `value` maps nanoseconds.
    pub fn best_so_far(&self, position: impl Fn(u64, &TrialPoint) -> f64, value: impl Fn(f64) -> f64) -> Curve {
        let mut curve = Curve::default();
        let mut best_ns = f64::INFINITY;
        for (at, trial) in self.trials.iter().enumerate() {
            curve.end = position(at as u64 + 1, trial);
            if let Ok(ns) = trial.result
                && ns < best_ns
            {
                best_ns = ns;
                curve.points.push((curve.end, value(ns)));
            }
        }
        curve
    }
}

impl Curve {
    /// Quotient of another curve and this one, defined on their common range.
    pub fn ratio(&self, other: &Curve) -> Curve {
        let end = self.end.min(other.end);
        let mut positions: Vec<f64> = self.points.iter().chain(&other.points).map(|point| point.0).collect();
        positions.retain(|position| *position <= end);
        positions.sort_by(f64::total_cmp);
        positions.dedup();
        let ratio = |at: f64| Some((at, other.at(at)? / self.at(at)?));
        Curve { points: positions.into_iter().filter_map(ratio).collect(), end }
    }

    fn at(&self, position: f64) -> Option<f64> {
        self.points.iter().take_while(|point| point.0 <= position).last().map(|point| point.1)
    }
}

/// Maximum number of points of a curve that is drawn.
const MOST_POINTS: usize = 400;

/// Median curve of several curves, with a band.
#[derive(Debug, Clone, Default)]
pub struct MedianCurve {
    /// Positions and values at each step, thinned out if there are many.
    pub points: Vec<(f64, f64)>,
    /// Band at each point, the quartiles; empty for a single curve.
    pub band: Vec<(f64, f64)>,
}

/// Median of several curves with their quartiles as the band. It is defined while at least half of the curves
/// are; curves that have ended keep their last value.
pub fn median_curve(curves: &[Curve]) -> MedianCurve {
    centre_curve(curves, |values| Quartiles::of(values).map(|q| (q.median, (q.first, q.third))))
}

/// Mean of several curves with a standard deviation as the band, on the same range as [`median_curve`].
pub fn mean_curve(curves: &[Curve]) -> MedianCurve {
    centre_curve(curves, |values| {
        let MeanStd { mean, std } = MeanStd::of(values)?;
        Some((mean, ((mean - std).max(0.0), mean + std)))
    })
}

/// Centre of curves within a band.
fn centre_curve(curves: &[Curve], centre: impl Fn(&[f64]) -> Option<(f64, (f64, f64))>) -> MedianCurve {
    let ends: Vec<f64> = curves.iter().map(|curve| curve.end).collect();
    let Some(end) = median(&ends) else { return MedianCurve::default() };
    let mut positions: Vec<f64> = curves.iter().flat_map(|c| c.points.iter().map(|p| p.0)).chain([end]).collect();
    positions.retain(|position| *position <= end);
    positions.sort_by(f64::total_cmp);
    positions.dedup();
    let every = positions.len().div_ceil(MOST_POINTS).max(1);
    let last = positions.len().saturating_sub(1);
    let (mut points, mut band) = (Vec::new(), Vec::new());
    for (_, position) in positions.iter().enumerate().filter(|(at, _)| at % every == 0 || *at == last) {
        let values: Vec<f64> = curves.iter().filter_map(|curve| curve.at(*position)).collect();
        if values.len() * 2 < curves.len() {
            continue;
        }
        let Some((value, around)) = centre(&values) else { continue };
        points.push((*position, value));
        if curves.len() > 1 {
            band.push(around);
        }
    }
    MedianCurve { points, band }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tilewright_search::{Conditions, Outcome, Timing};
    use tilewright_tune::RunTime;

    fn record(seed: u64, unix_time: u64, run: Option<RunTime>, ns: Option<f64>) -> Record {
        let timing = |median_ns| Timing::of_samples(&[median_ns], false);
        let failed = Outcome::Failed { class: ErrorClass::WrongAnswer, message: String::new() };
        Record {
            workload: "w".into(),
            target: "t".into(),
            template: "g".into(),
            threads: 1,
            config: json!({}),
            outcome: ns.map_or(failed, |ns| Outcome::Measured(timing(ns))),
            seconds: Seconds::default(),
            steps: String::new(),
            search: "random".into(),
            seed,
            trial: 0,
            version: String::new(),
            toolchain: String::new(),
            unix_time,
            run,
            limit: None,
            conditions: Conditions::default(),
            is_imported: false,
        }
    }

    #[test]
    fn a_resumed_run_goes_on_where_it_stopped() {
        let at = |start_unix_ms, elapsed_s| Some(RunTime { start_unix_ms, elapsed_s });
        let records = [
            record(1, 0, at(1000, 0.5), Some(9.0)),
            record(1, 0, at(1000, 1.5), None),
            record(2, 0, at(5000, 0.25), Some(8.0)),
            record(1, 0, at(9000, 0.5), Some(7.0)),
        ];
        let runs = runs(&records);
        let elapsed: Vec<Vec<f64>> = runs.iter().map(|r| r.trials.iter().map(|t| t.elapsed_s).collect()).collect();
        assert_eq!(elapsed, [vec![0.5, 1.5, 2.0], vec![0.25]]);
        assert_eq!(
            (runs[0].best_ns(), runs[0].best_of_first(1), runs[0].reached(7.5)),
            (Some(7.0), Some(0), Some((3, 2.0)))
        );
        let curve = runs[0].best_so_far(|n, _| n as f64, |ns| ns);
        assert_eq!((curve.points, curve.end), (vec![(1.0, 9.0), (3.0, 7.0)], 3.0));
    }

    #[test]
    fn sessions_side_by_side_count_once_each() {
        let at = |start_unix_ms, elapsed_s| Some(RunTime { start_unix_ms, elapsed_s });
        let starts_and_seconds = [(1000, 0.5), (1100, 0.5), (1000, 1.0), (1100, 0.75), (1000, 2.0)];
        let records = starts_and_seconds.map(|(start, elapsed_s)| record(1, 0, at(start, elapsed_s), Some(1.0)));
        let elapsed: Vec<f64> = runs(&records)[0].trials.iter().map(|t| t.elapsed_s).collect();
        assert_eq!(elapsed, [0.5, 1.0, 1.5, 1.75, 2.75]);
    }

    #[test]
    fn records_without_a_run_are_timed_by_their_clock() {
        let records = [100, 103, 5000, 5001].map(|unix_time| record(1, unix_time, None, Some(1.0)));
        let elapsed: Vec<f64> = runs(&records)[0].trials.iter().map(|t| t.elapsed_s).collect();
        assert_eq!(elapsed, [0.0, 3.0, 3.0, 4.0]);
    }

    #[test]
    fn a_median_lasts_as_long_as_half_of_the_runs() {
        let curve = |points: &[(f64, f64)], end| Curve { points: points.to_vec(), end };
        let curves =
            [curve(&[(1.0, 10.0)], 4.0), curve(&[(2.0, 20.0)], 10.0), curve(&[(1.0, 10.0), (3.0, 40.0)], 10.0)];
        let MedianCurve { points, band } = median_curve(&curves);
        assert_eq!(points, [(1.0, 10.0), (2.0, 10.0), (3.0, 20.0), (10.0, 20.0)]);
        assert_eq!(band.last(), Some(&(15.0, 30.0)));
        let MedianCurve { points, band } = mean_curve(&curves[1..]);
        assert_eq!(
            (points.last(), band.last()),
            (Some(&(10.0, 30.0)), Some(&(30.0 - 200f64.sqrt(), 30.0 + 200f64.sqrt())))
        );
        let ratio = curves[2].ratio(&curves[1]);
        assert_eq!((ratio.points, ratio.end), (vec![(2.0, 2.0), (3.0, 0.5)], 10.0));
        let MedianCurve { points, band } = median_curve(&curves[..1]);
        assert_eq!((points, band), (vec![(1.0, 10.0), (4.0, 10.0)], vec![]));
    }
}
