//! Options of `tune` for the user's programs and kernels.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tilewright::format::seconds;
use tilewright::{Command, Direction, one_line};

use crate::error::bad_input;

/// Options of commands alone. clap does not enforce that an option requires another one where something
/// given conflicts with the latter, so these conflict with whatever replaces a command.
pub const OF_COMMAND: [&str; 11] = [
    "parameters",
    "constraints",
    "build",
    "check",
    "prepare",
    "cleanup",
    "metric",
    "maximize",
    "shell",
    "timeout",
    "samples",
];

/// Arguments of `tune` for programs and kernels of the user's.
#[derive(Args, Debug)]
#[command(next_help_heading = "Programs and kernels of your own")]
pub struct OwnArgs {
    /// Tune this command, where {name} stands for a parameter's value, {*name} for its words, and {dir} for
    /// the folder of the build
    #[arg(long, value_name = "COMMAND", allow_hyphen_values = true, conflicts_with = "kernel")]
    pub command: Option<String>,
    /// Tune the kernel in C, C++, OpenCL C or CUDA that this file describes: a description in our format, or
    /// a T1 file of Kernel Tuner
    #[arg(long, value_name = "FILE", conflicts_with_all = OF_COMMAND)]
    pub kernel: Option<PathBuf>,
    /// A parameter of the command and its values: tile=8,16,32 or t=1..8 (integers, both ends) or
    /// u=[2**i for i in range(8)]
    #[arg(short = 'p', long = "parameter", value_name = "NAME=VALUES", requires = "command", value_parser = parameter)]
    parameters: Vec<(String, String)>,
    /// Condition on the parameters, such as 'tile * t <= 64'; all must hold
    #[arg(long = "where", value_name = "EXPRESSION", requires = "command", allow_hyphen_values = true)]
    constraints: Vec<String>,
    /// Build command, run once for each distinct text after filling in its placeholders
    #[arg(long, value_name = "COMMAND", requires = "command", allow_hyphen_values = true)]
    build: Option<String>,
    /// Command that checks a run, by exit code 0; it reads the run's output
    #[arg(long, value_name = "COMMAND", requires = "command", allow_hyphen_values = true)]
    check: Option<String>,
    /// Command before each run
    #[arg(long, value_name = "COMMAND", requires = "command", allow_hyphen_values = true)]
    prepare: Option<String>,
    /// Command after each run
    #[arg(long, value_name = "COMMAND", requires = "command", allow_hyphen_values = true)]
    cleanup: Option<String>,
    /// Metric to minimise: wall, cpu, or the number that a regular expression finds in the output; give
    /// several as NAME=METRIC for a Pareto set
    #[arg(long, value_name = "METRIC", requires = "command", default_value = "wall", allow_hyphen_values = true)]
    metric: Vec<String>,
    /// Maximise the metric instead; of several metrics, the one with this name
    #[arg(
        long,
        value_name = "NAME",
        requires = "command",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = ""
    )]
    maximize: Vec<String>,
    /// Start the commands by `sh -c`: the value of {x} is the environment variable TILEWRIGHT_x, never parsed
    /// as code
    #[arg(long, requires = "command")]
    shell: bool,
    /// Timeout of a run of the command [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "command", conflicts_with = "run_timeout", value_parser = seconds)]
    pub timeout: Option<Duration>,
    /// Samples of a trial [default: 3 of a time, after a warm-up run, and 1 of another number]
    #[arg(long, value_name = "N", requires = "command", value_parser = clap::value_parser!(u32).range(1..=1000))]
    samples: Option<u32>,
    /// Memory that each process of a command may use for data, in MiB [default: half of the machine's]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    memory: Option<u64>,
}

fn parameter(text: &str) -> Result<(String, String), String> {
    let (name, values) = text.split_once('=').ok_or("expected NAME=VALUES, such as tile=8,16,32")?;
    Ok((name.trim().to_owned(), values.to_owned()))
}

/// Method that sets a text of a command.
type SetText = fn(Command, String) -> Command;

impl OwnArgs {
    /// Whether a user's command or kernel is to be tuned.
    pub fn is_asked_for(&self) -> bool {
        self.command.is_some() || self.kernel.is_some()
    }

    /// Memory limit of each process in bytes of data, if given.
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory.map(|mib| mib << 20)
    }

    /// Sets the metric of a command, or several metrics by name.
    fn with_metrics(&self, command: Command) -> anyhow::Result<Command> {
        if let [metric] = self.metric.as_slice() {
            return match self.maximize.iter().find(|name| !name.is_empty()) {
                Some(name) => Err(bad_input(format!("--maximize={name}: there is one metric (leave the name out)"))),
                None => Ok(command.metric(metric).maximize(!self.maximize.is_empty())),
            };
        }
        let named = |text: &String| {
            let of = |(name, metric): (&str, &str)| (name.to_owned(), metric.to_owned());
            let mend = "of several metrics each is NAME=METRIC, such as time='time: ([0-9.]+)'";
            text.split_once('=').map(of).ok_or_else(|| bad_input(format!("--metric {}: {mend}", one_line(text))))
        };
        let metrics = self.metric.iter().map(named).collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(name) = self.maximize.iter().find(|name| metrics.iter().all(|(known, _)| known != *name)) {
            let known: Vec<&str> = metrics.iter().map(|(name, _)| name.as_str()).collect();
            let mend = format!("give --maximize={}", known.join(" or --maximize="));
            return Err(bad_input(format!("--maximize={name} names none of the metrics ({mend})")));
        }
        Ok(metrics.into_iter().fold(command, |command, (name, metric)| {
            let is_great = self.maximize.contains(&name);
            command.objective(name, metric, if is_great { Direction::Maximize } else { Direction::Minimize })
        }))
    }

    /// Makes the command with all its options.
    ///
    /// # Errors
    /// Bad input if metrics have no names, or `--maximize` names none of them.
    pub fn command(&self, text: &str) -> anyhow::Result<Command> {
        let command = self.with_metrics(Command::new(text))?;
        let command = command.shell(self.shell).samples(self.samples.map(|n| n as usize));
        let command = self.parameters.iter().fold(command, |command, (name, values)| command.parameter(name, values));
        let command = self.constraints.iter().fold(command, Command::constraint);
        let more: [(&Option<String>, SetText); 4] = [
            (&self.build, |command, text| command.build(text)),
            (&self.check, |command, text| command.check(text)),
            (&self.prepare, |command, text| command.prepare(text)),
            (&self.cleanup, |command, text| command.cleanup(text)),
        ];
        Ok(more.into_iter().fold(command, |command, (text, set)| match text {
            Some(text) => set(command, text.clone()),
            None => command,
        }))
    }
}
