//! Metrics of commands.

use regex_lite::{Regex, RegexBuilder};
use tilewright_search::ErrorClass;

use super::process::Run;
use crate::kernel::Answer;

/// Metric of a command. Searches minimise: of a number to be maximised they see the reciprocal.
#[derive(Debug, Clone)]
pub enum Metric {
    /// The time it takes, by the clock.
    Wall,
    /// The CPU time of all its processes.
    Cpu,
    /// A number that it writes, the last one that fits.
    Output {
        /// The expression, of which the first group that takes part is the number, or all of it.
        pattern: Regex,
        /// Whether more is better.
        maximize: bool,
    },
    /// Times of a kernel that one of our workers runs.
    Kernel,
}

impl PartialEq for Metric {
    fn eq(&self, other: &Metric) -> bool {
        match (self, other) {
            (Metric::Output { pattern: a, maximize: x }, Metric::Output { pattern: b, maximize: y }) => {
                a.as_str() == b.as_str() && x == y
            }
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// Reason why a text is not a metric. The fault is the writer's.
#[derive(Debug, thiserror::Error)]
pub enum MetricError {
    /// An invalid regular expression.
    #[error("{0}")]
    Pattern(regex_lite::Error),
    /// Maximising a time, which is always minimised.
    #[error("a time is made small, so --maximize does not go with it")]
    MaximizeTime,
}

/// Time, in nanoseconds, that stands for a value of 1 of a number to be maximised; greater values take less.
const UNIT: f64 = 1e9;
/// Bytes of an output that are looked at together.
const PIECE: usize = 1 << 20;

impl Metric {
    /// `wall`, `cpu`, or a regular expression.
    ///
    /// # Errors
    /// [`MetricError`].
    pub fn parse(text: &str, maximize: bool) -> Result<Metric, MetricError> {
        match text {
            "wall" | "cpu" if maximize => Err(MetricError::MaximizeTime),
            "wall" => Ok(Metric::Wall),
            "cpu" => Ok(Metric::Cpu),
            pattern => RegexBuilder::new(pattern)
                .multi_line(true)
                .build()
                .map(|pattern| Metric::Output { pattern, maximize })
                .map_err(MetricError::Pattern),
        }
    }

    /// Formats the metric as a line of a candidate's record.
    pub(super) fn line(&self) -> String {
        match self {
            Metric::Wall => "minimize wall".to_owned(),
            Metric::Cpu => "minimize cpu".to_owned(),
            Metric::Kernel => "minimize kernel".to_owned(),
            Metric::Output { pattern, maximize } => {
                format!("{} {}", if *maximize { "maximize" } else { "minimize" }, pattern.as_str())
            }
        }
    }

    /// The metric among the lines that are recorded of a candidate.
    pub fn of_steps(steps: &str) -> Option<Metric> {
        steps.lines().find_map(|line| match line.split_once(' ')? {
            ("minimize", "kernel") => Some(Metric::Kernel),
            ("minimize", text) => Metric::parse(text, false).ok(),
            ("maximize", text) => Metric::parse(text, true).ok(),
            _ => None,
        })
    }

    /// Whether it is a time.
    pub fn is_time(&self) -> bool {
        !matches!(self, Metric::Output { .. })
    }

    /// The number that the command said, for what searches see; milliseconds of a time.
    pub fn value(&self, median_ns: f64) -> f64 {
        match self {
            Metric::Output { maximize: true, .. } => UNIT / median_ns,
            Metric::Output { .. } => median_ns,
            Metric::Wall | Metric::Cpu | Metric::Kernel => median_ns / 1e6,
        }
    }

    /// Failure that the output of a failed run reports, if it reports one.
    pub(super) fn failure(&self, output: &[u8]) -> Option<(ErrorClass, String)> {
        match (self, Answer::last_of(output)) {
            (Metric::Kernel, Some(Answer::Failed { class, message })) => Some((class.0, message)),
            _ => None,
        }
    }

    /// Finds the last match of the metric's pattern in a text: the first of its groups that takes part, or
    /// the whole match.
    pub(super) fn last_match(&self, text: &[u8]) -> Option<String> {
        let Metric::Output { pattern, .. } = self else { return None };
        let mut end = text.len();
        // By pieces of whole lines from the end: most that is long says nothing.
        while end > 0 {
            let from = end.saturating_sub(PIECE);
            let start = text[..from].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
            let piece = String::from_utf8_lossy(&text[start..end]);
            let all = pattern.captures_iter(&piece).filter_map(|found| {
                let mut groups = (1..found.len()).filter_map(|group| found.get(group));
                groups.next().or(found.get(0))
            });
            // An expression such as `(.*)` fits the nothing behind the last line, too.
            let last = all.map(|found| found.as_str()).filter(|found| !found.trim().is_empty()).last();
            if let Some(last) = last {
                return Some(last.to_owned());
            }
            end = start;
        }
        None
    }

    /// The samples that a run gives.
    ///
    /// # Errors
    /// If it says none.
    pub(super) fn samples_ns(&self, run: &Run) -> Result<Vec<f64>, (ErrorClass, String)> {
        let positive = |value: f64| value > 0.0 && value.is_finite();
        match self {
            Metric::Wall => Ok(vec![run.wall_s * 1e9]),
            // The system counts in steps; none is no time.
            Metric::Cpu => Ok(vec![(run.cpu_s * 1e9).max(1.0)]),
            Metric::Kernel => match Answer::last_of(&run.output) {
                Some(Answer::Timed { samples_ns, .. })
                    if !samples_ns.is_empty() && samples_ns.iter().all(|&ns| positive(ns)) =>
                {
                    Ok(samples_ns)
                }
                Some(Answer::Failed { class, message }) => Err((class.0, message)),
                _ => Err((ErrorClass::Unknown, "the kernel's process said nothing".into())),
            },
            Metric::Output { pattern, maximize } => {
                let found = [&run.output, &run.errors].into_iter().zip(&run.found_before);
                let found = found.filter_map(|(text, before)| self.last_match(text).or_else(|| before.clone())).next();
                let unknown = |message: String| Err((ErrorClass::Unknown, message));
                let Some(found) = found else {
                    return unknown(format!("no metric: nothing that it wrote fits `{}`", pattern.as_str()));
                };
                match found.trim().parse::<f64>() {
                    Ok(value) if positive(value) && *maximize => Ok(vec![UNIT / value]),
                    Ok(value) if positive(value) => Ok(vec![value]),
                    _ => unknown(format!("the metric is {found:?}, which is no number above 0")),
                }
            }
        }
    }
}
