//! Races of commands, with a process for each sample.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tilewright_device::command::{Invocation, Metric, sample};
use tilewright_device::host;

use super::{Raced, Rules, TellRound, referee};
use crate::device_spec::{CPU, DeviceSpec, HOST};
use crate::error::{Error, Setting, one_line};

/// Race of commands.
#[derive(Debug, Clone, PartialEq)]
pub struct CommandRace {
    /// Commands; the first is the baseline if there is one.
    pub commands: Vec<String>,
    /// Whether commands are started by `sh -c`, rather than split into words.
    pub shell: bool,
    /// Metric: `wall`, `cpu`, or a regular expression that extracts a number from the output.
    pub metric: String,
    /// Whether more of the metric is better.
    pub maximize: bool,
    /// Whether file system caches are dropped before every run, as far as the system permits, without warm-up
    /// runs. Otherwise each command has a warm-up run before the first round.
    pub cold: bool,
    /// Number of CPUs that runs are bound to; `None` leaves them unbound.
    pub threads: Option<usize>,
    /// Timeout of a run.
    pub timeout: Duration,
    /// Rules of the race.
    pub rules: Rules,
}

impl Default for CommandRace {
    /// Returns a race without commands: by wall-clock time, warm, with a timeout of ten minutes per run.
    fn default() -> CommandRace {
        CommandRace {
            commands: Vec::new(),
            shell: false,
            metric: "wall".to_owned(),
            maximize: false,
            cold: false,
            threads: None,
            timeout: Duration::from_secs(600),
            rules: Rules::default(),
        }
    }
}

impl CommandRace {
    /// Parses the metric.
    ///
    /// # Errors
    /// If the text is neither a time nor a regular expression.
    pub fn metric(&self) -> Result<Metric, Error> {
        parse_metric(&self.metric, self.maximize)
    }

    /// Runs the race until the verdict is clear, a limit is reached or `stop` is raised. `say` receives
    /// messages, `tell` the progress.
    ///
    /// # Errors
    /// Bad input if a command, the metric, the number of CPUs or the rules are wrong; failure if a command
    /// fails.
    pub fn run(&self, stop: &AtomicBool, say: &dyn Fn(&str), tell: TellRound) -> Result<Raced, Error> {
        self.rules.check(self.commands.len())?;
        let metric = self.metric()?;
        let invocation = |text: &String| {
            let refuse = |error| Error::input(format!("the command `{}`: {error}", one_line(text)));
            Invocation::parse(text, self.shell).map_err(refuse)
        };
        let invocations = self.commands.iter().map(invocation).collect::<Result<Vec<Invocation>, Error>>()?;
        if let Some(threads) = self.threads {
            DeviceSpec { device: CPU, target: HOST, threads }.check_threads()?;
        }
        let cpus = self.threads.map_or_else(Vec::new, host::pin_cpus);
        let is_over = || stop.load(Ordering::Relaxed);
        let mut drops = self.cold;
        let mut run = |at: usize| {
            if drops && let Err(error) = host::drop_file_cache() {
                say(&format!("the system's cache of files stays: this process may not empty it ({error})"));
                drops = false;
            }
            let name = format!("`{}`", one_line(&self.commands[at]));
            sample(&invocations[at], &name, &metric, &cpus, self.timeout, &is_over).map_err(Error::failed)
        };
        let warm_ups = if self.cold { 0 } else { invocations.len() };
        for at in 0..warm_ups {
            run(at)?;
        }
        referee(&self.commands, &self.rules, &mut run, &|cost| metric.value(cost), tell)
    }
}

/// Parses a metric of commands.
///
/// # Errors
/// If the text is neither a time nor a regular expression.
pub(crate) fn parse_metric(text: &str, maximize: bool) -> Result<Metric, Error> {
    Metric::parse(text, maximize).map_err(|error| {
        let known = "give wall, cpu or a regular expression, such as 'time: ([0-9.]+)'";
        Error::setting(Setting::Metric, format!(": {} ({known})", one_line(&error.to_string())))
    })
}
