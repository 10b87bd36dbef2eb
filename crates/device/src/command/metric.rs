//! Metrics of commands.

use regex_lite::{Regex, RegexBuilder};
use tilewright_search::{ErrorClass, OtherCosts, Timing};

use super::program_run::ProgramRun;
use crate::failure::Failure;
use crate::kernel::ProcessResult;

/// Metric of a command. Searches minimise: they get the reciprocal of a metric that is maximised.
#[derive(Debug, Clone)]
pub enum Metric {
    /// Wall-clock time.
    Wall,
    /// CPU time of all its processes.
    Cpu,
    /// Number in the output: the last match of a regular expression.
    Output {
        /// Regular expression; the number is its first participating group, or the whole match.
        pattern: Regex,
        /// Whether it is maximised.
        maximize: bool,
    },
    /// Time of a kernel that one of our workers runs.
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

/// Metric with the name given by the user; empty for a single metric.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedMetric {
    /// The name.
    pub name: String,
    /// The metric.
    pub metric: Metric,
}

/// Objectives of a command: one metric, or several named ones. The first leads: it is recorded as the time.
#[derive(Debug, Clone, PartialEq)]
pub struct Objectives(Vec<NamedMetric>);

impl From<Metric> for Objectives {
    fn from(metric: Metric) -> Objectives {
        Objectives(vec![NamedMetric { name: String::new(), metric }])
    }
}

/// First word of the line of an objective among several in a candidate's record.
const OBJECTIVE: &str = "objective";

impl Objectives {
    /// Several objectives.
    ///
    /// # Errors
    /// A message, if there are fewer than two or more than can be searched at once, or a name is invalid or
    /// repeated.
    pub fn several(all: Vec<NamedMetric>) -> Result<Objectives, String> {
        let most = OtherCosts::MOST + 1;
        if !(2..=most).contains(&all.len()) {
            return Err(format!("{} metrics at once (give 2 to {most}, or one without a name)", all.len()));
        }
        for (at, NamedMetric { name, .. }) in all.iter().enumerate() {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            if name.is_empty() || !name.chars().all(is_plain) {
                return Err(format!("{name:?} is not a name of a metric (take letters, digits, _, - and .)"));
            }
            if all[..at].iter().any(|other| other.name == *name) {
                return Err(format!("the metric {name} is given twice (give each a name of its own)"));
            }
        }
        Ok(Objectives(all))
    }

    /// Metrics, the leading one first.
    pub fn all(&self) -> &[NamedMetric] {
        &self.0
    }

    /// Leading metric.
    pub fn leading(&self) -> &Metric {
        &self.0[0].metric
    }

    /// Whether there are several metrics.
    pub fn is_several(&self) -> bool {
        self.0.len() > 1
    }

    /// Value of each metric, as by [`Metric::value`], with its name.
    pub fn values<'a>(&'a self, timing: &'a Timing) -> impl Iterator<Item = (&'a str, f64)> {
        let named = self.0.iter().zip(timing.costs());
        named.map(|(NamedMetric { name, metric }, cost)| (name.as_str(), metric.value(cost)))
    }

    /// Formats the objectives as lines of a candidate's record.
    pub(super) fn lines(&self) -> String {
        match self.is_several() {
            false => format!("{}\n", self.leading().line()),
            true => self.0.iter().map(|of| format!("{OBJECTIVE} {} {}\n", of.name, of.metric.line())).collect(),
        }
    }

    /// Objectives among the recorded lines of a candidate, if any.
    pub fn of_steps(steps: &str) -> Option<Objectives> {
        if let Some(metric) = steps.lines().find_map(Metric::of_line) {
            return Some(metric.into());
        }
        let objective = |line: &str| {
            let (name, line) = line.strip_prefix(OBJECTIVE)?.strip_prefix(' ')?.split_once(' ')?;
            Some(NamedMetric { name: name.to_owned(), metric: Metric::of_line(line)? })
        };
        Objectives::several(steps.lines().filter_map(objective).collect()).ok()
    }

    /// Samples of a run, by objective.
    ///
    /// # Errors
    /// If the run reports none for an objective.
    pub(super) fn samples(&self, run: &ProgramRun) -> Result<Vec<Vec<f64>>, (ErrorClass, String)> {
        let samples = |(at, of): (usize, &NamedMetric)| {
            let named = |(class, message)| match self.is_several() {
                true => (class, format!("{}: {message}", of.name)),
                false => (class, message),
            };
            of.metric.samples_ns(run, at).map_err(named)
        };
        self.0.iter().enumerate().map(samples).collect()
    }
}

/// Reason why a text is not a metric, an error of its author.
#[derive(Debug, thiserror::Error)]
pub enum MetricError {
    /// Invalid regular expression.
    #[error("{0}")]
    Pattern(regex_lite::Error),
    /// Empty expression.
    #[error("an empty expression finds no number")]
    Empty,
    /// Request to maximise a time.
    #[error("times are minimised, so --maximize does not apply")]
    MaximizeTime,
}

/// Bytes of an output that are looked at together.
const PIECE: usize = 1 << 20;

impl Metric {
    /// Parses `wall`, `cpu`, or a regular expression.
    ///
    /// # Errors
    /// [`MetricError`].
    pub fn parse(text: &str, maximize: bool) -> Result<Metric, MetricError> {
        match text {
            "wall" | "cpu" if maximize => Err(MetricError::MaximizeTime),
            "" => Err(MetricError::Empty),
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
    fn line(&self) -> String {
        match self {
            Metric::Wall => "minimize wall".to_owned(),
            Metric::Cpu => "minimize cpu".to_owned(),
            Metric::Kernel => "minimize kernel".to_owned(),
            Metric::Output { pattern, maximize } => {
                format!("{} {}", if *maximize { "maximize" } else { "minimize" }, pattern.as_str())
            }
        }
    }

    /// Parses the metric of a recorded line of a candidate; `None` for any other line.
    fn of_line(line: &str) -> Option<Metric> {
        match line.split_once(' ')? {
            ("minimize", "kernel") => Some(Metric::Kernel),
            ("minimize", text) => Metric::parse(text, false).ok(),
            ("maximize", text) => Metric::parse(text, true).ok(),
            _ => None,
        }
    }

    /// Whether it is a time.
    pub fn is_time(&self) -> bool {
        !matches!(self, Metric::Output { .. })
    }

    /// Value of the metric from a search's cost; milliseconds for a time.
    pub fn value(&self, median_ns: f64) -> f64 {
        match self {
            Metric::Output { maximize, .. } => Timing::value_of(median_ns, *maximize),
            Metric::Wall | Metric::Cpu | Metric::Kernel => median_ns / 1e6,
        }
    }

    /// Failure that the output of a failed run reports, if it reports one.
    pub(super) fn failure(&self, output: &[u8]) -> Option<Failure> {
        match (self, ProcessResult::last_of(output)) {
            (Metric::Kernel, Some(ProcessResult::Failed { class, message, is_of_device })) => {
                Some(Failure { class: class.0, message, lacks_memory: false, is_of_device })
            }
            _ => None,
        }
    }

    /// Finds the last match of the metric's pattern in a text: the first of its groups that takes part, or
    /// the whole match.
    pub(super) fn last_match(&self, text: &[u8]) -> Option<String> {
        let Metric::Output { pattern, .. } = self else { return None };
        let mut end = text.len();
        // By pieces of whole lines from the end: most of a long output is irrelevant.
        while end > 0 {
            let from = end.saturating_sub(PIECE);
            let start = text[..from].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
            let piece = String::from_utf8_lossy(&text[start..end]);
            let all = pattern.captures_iter(&piece).filter_map(|found| {
                let mut groups = (1..found.len()).filter_map(|group| found.get(group));
                groups.next().or(found.get(0))
            });
            // An expression such as `(.*)` also matches the empty text after the last line.
            let last = all.map(|found| found.as_str()).filter(|found| !found.trim().is_empty()).last();
            if let Some(last) = last {
                return Some(last.to_owned());
            }
            end = start;
        }
        None
    }

    /// Samples of a run; `at` is the metric's position among the metrics searched for.
    ///
    /// # Errors
    /// If the run reports none.
    pub(super) fn samples_ns(&self, run: &ProgramRun, at: usize) -> Result<Vec<f64>, (ErrorClass, String)> {
        let positive = |value: f64| value > 0.0 && value.is_finite();
        match self {
            Metric::Wall => Ok(vec![run.wall_s * 1e9]),
            // The system counts in steps; zero steps are not a valid time.
            Metric::Cpu => Ok(vec![(run.cpu_s * 1e9).max(1.0)]),
            Metric::Kernel => match ProcessResult::last_of(&run.output) {
                Some(ProcessResult::Timed { samples_ns, .. })
                    if !samples_ns.is_empty() && samples_ns.iter().all(|&ns| positive(ns)) =>
                {
                    Ok(samples_ns)
                }
                Some(ProcessResult::Failed { class, message, .. }) => Err((class.0, message)),
                _ => Err((ErrorClass::Unknown, "the kernel's process said nothing".into())),
            },
            Metric::Output { pattern, maximize } => {
                let found = [&run.output, &run.errors].into_iter().zip(&run.found_before);
                let found = found
                    .filter_map(|(text, before)| self.last_match(text).or_else(|| before.get(at).cloned().flatten()))
                    .next();
                let unknown = |message: String| Err((ErrorClass::Unknown, message));
                let Some(found) = found else {
                    return unknown(format!("no metric: nothing that it wrote fits `{}`", pattern.as_str()));
                };
                let value = found.trim().parse::<f64>();
                if let Some(cost) = value.as_ref().ok().and_then(|&value| Timing::cost_of(value, *maximize)) {
                    return Ok(vec![cost]);
                }
                match value {
                    Err(_) if found.contains(|c: char| c.is_ascii_digit()) => {
                        let mend = "(put the part of the expression that is the number in parentheses)";
                        unknown(format!("the metric is {found:?}, which is no number {mend}"))
                    }
                    Ok(value) if value < 0.0 && value.is_finite() => {
                        let mend =
                            "(searches compare ratios: print a number that is 0 or above, such as a constant more)";
                        unknown(format!("the metric is {found:?}, which is below 0 {mend}"))
                    }
                    _ => unknown(format!("the metric is {found:?}, which is no finite number")),
                }
            }
        }
    }
}
