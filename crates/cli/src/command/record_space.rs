//! `record-space`: measures a whole space, or a sample of it, and writes what became of every configuration.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use serde_json::{Map, json};
use tilewright::version::BUILD;
use tilewright::words::errors_text;
use tilewright::{Note, Recorder, earlier, errors_of, gflops, task_key};
use tilewright_device::Device;
use tilewright_tune::{Budget, Config, Event, HeadStart, RecordedSpace, Summary, Task, TaskKey, Trial, search};

use super::tune::{Interrupts, Shown};
use super::{DatabaseArgs, WorkloadArgs, count, device_options, make_task, open_to_write, start_device};
use crate::error::{OrBadInput, bad_input};
use crate::output::{Destination, check_apart, digits, grouped, message, writable, write_result, write_result_of};
use crate::progress::Status;
use tilewright::Database;

/// The search that draws samples, and under whose name configurations are recorded.
const SEARCH: &str = "random";
/// Configurations that are measured to tell how long the whole space would take.
const N_FIRST: usize = 16;
/// The longest that is begun unasked, in seconds.
const LONGEST_S: f64 = 3600.0;
/// Configurations in one file, at most.
const MOST: u64 = 10_000_000;

/// Arguments of `record-space`.
#[derive(Args, Debug)]
pub struct RecordSpaceArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    /// Template whose space is measured [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// File to write, T4 results for `replay`, packed where it ends in .gz [default: none, only records]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Configurations to come to: a random sample where the space has more
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST))]
    max: Option<u64>,
    /// Seed of the sample and of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// A space that is being recorded.
struct Space<'a> {
    task: &'a Task,
    seed: u64,
    /// None where it was interrupted before it was ready.
    device: Option<Device>,
    recording: tilewright::Recording,
    interrupts: Arc<Interrupts>,
    database: Database,
    /// What is recorded of the task, whoever measured it.
    trials: Vec<Trial>,
}

/// Measures a space; what is recorded already counts, whoever measured it.
///
/// # Errors
/// Bad input if an argument does not fit, the file or the database given cannot be written, or the space is
/// too large; failure if workers do not start or records cannot be written.
pub fn run(args: &RecordSpaceArgs, as_json: bool) -> anyhow::Result<()> {
    let workload = args.of.workload()?;
    Device::check_memory(&workload).or_bad_input("")?;
    let machine = &args.of.machine;
    machine.warn_of_limits();
    let task = make_task(workload, machine.runnable_target()?, machine.threads, args.template.as_deref())?;
    let output = args.output.as_deref().map(|path| writable(path, "another file with -o")).transpose()?;
    let database = args.records.database()?;
    if let Some((path, place)) = args.output.as_deref().zip(output.as_ref()) {
        // It need not be there yet.
        check_apart(path, place, &[&database.path], "another file with -o")?;
    }
    let opened = open_to_write(&database)?;
    let key = task_key(&task, false);
    let mut options = device_options(machine.threads)?;
    let told = |note: Note| {
        if let Note::Message(line) = note {
            message(&line);
        }
    };
    let trials =
        earlier(&opened.store, &key, &task, &options.limits(), &told).map_err(|error| database.refuse(error))?.trials;
    options.seed = args.seed;
    // A recorded space is not about the best one alone.
    options.to_the_end = true;
    let interrupts = Interrupts::watch()?;
    let device = start_device(&task.setting.workload, &task.setting.target, options, &interrupts)?;
    let mut recording = Space {
        task: &task,
        seed: args.seed,
        device,
        recording: tilewright::Recording::new(Recorder::new(opened, &task, key.clone(), SEARCH.to_owned(), args.seed)),
        interrupts,
        database: database.clone(),
        trials,
    };
    let start = Instant::now();
    let n_before = recording.trials.len();
    let size = task.space.size();
    message(&format!("{}: template {}, {}", key.workload, key.template, count(size, "configuration")));
    if args.max.is_none() {
        recording.check_time()?;
    }
    let configs = recording.draw(args.max.unwrap_or(MOST), &[])?;
    recording.measure(&configs)?;
    let recorded = recording.recording.conclude(None);
    recorded.map_err(|error| database.failure(&error))?;

    let n_new = recording.trials.len() - n_before;
    let mut trials = recording.trials;
    let asked: HashSet<&Config> = configs.iter().collect();
    trials.retain(|trial| asked.contains(&trial.config));
    let recorded = RecordedSpace::new(task.space.clone(), trials.iter().cloned());
    if let (Some(path), Some(output)) = (&args.output, &output) {
        write(path, output, &recorded, &key, args.seed)?;
    }
    let errors = errors_of(&trials);
    let best_gflops = recorded.optimum_ns().map(|ns| gflops(&task.setting.workload, ns));
    let seconds = start.elapsed().as_secs_f64();
    let json = json!({
        "workload": key.workload,
        "template": key.template,
        "target": key.target,
        "threads": key.threads,
        "seed": args.seed,
        "size": u64::try_from(size).unwrap_or(u64::MAX),
        "configurations": recorded.len(),
        "missing": configs.len() - recorded.len(),
        "valid": recorded.n_valid(),
        "new_trials": n_new,
        "errors": errors.iter().map(|(class, n)| (class.name().to_owned(), (*n).into())).collect::<Map<_, _>>(),
        "best_gflops": best_gflops,
        "seconds": seconds,
        "file": args.output.as_ref().map(|path| path.to_string_lossy()),
        "db": database.path.to_string_lossy(),
    });
    let mut text = format!(
        "{} of {} recorded, {} of them valid{}",
        count(recorded.len() as u64, "configuration"),
        grouped(size),
        grouped(recorded.n_valid()),
        best_gflops.map_or(String::new(), |best| format!(", the best at {} GFLOP/s", digits(best))),
    );
    if !errors.is_empty() {
        text += &format!("\nerrors   {}", errors_text(&errors));
    }
    if recorded.len() < configs.len() {
        let n_missing = count((configs.len() - recorded.len()) as u64, "configuration");
        text += &format!("\nmissing  {n_missing}: the run was interrupted; run it again to go on");
    }
    text += &format!("\nrecords  {}", database.name());
    if let Some(path) = &args.output {
        text += &format!("\nfile     {}", path.display());
    }
    match output {
        Some(output) => write_result_of(&output, as_json, &json, &text),
        None => write_result(as_json, &json, &text),
    }
}

impl Space<'_> {
    /// So many configurations of the space that are not among these, in random order, or all if it has fewer.
    fn draw(&self, n: u64, known: &[Trial]) -> anyhow::Result<Vec<Config>> {
        let mut search = search::build(SEARCH, &self.task.space, self.seed)?;
        search.observe(known);
        Ok(search.propose(usize::try_from(n)?))
    }

    /// Measures a few configurations, and refuses a space of which the rest would take too long.
    fn check_time(&mut self) -> anyhow::Result<()> {
        let size = self.task.space.size();
        let first = self.draw(N_FIRST as u64, &self.trials)?;
        let Some(summary) = self.measure(&first)?.filter(|summary| summary.n_trials > 0) else { return Ok(()) };
        let rate = summary.n_trials as f64 / summary.wall_seconds;
        let seconds = (size - self.trials.len() as u128) as f64 / rate;
        if (seconds <= LONGEST_S && size <= MOST.into()) || self.interrupts.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(bad_input(format!(
            "all {} configurations would take {}, at {} a second (give --max N for a sample, or for all of up to {})",
            grouped(size),
            hours(seconds),
            digits(rate),
            grouped(MOST)
        )))
    }

    /// Measures the configurations that are not recorded; `None` if all are, or after an interrupt.
    fn measure(&mut self, configs: &[Config]) -> anyhow::Result<Option<Summary>> {
        let known: HashSet<&Config> = self.trials.iter().map(|trial| &trial.config).collect();
        let n_known = configs.iter().filter(|config| known.contains(config)).count() as u64;
        let n_new = configs.len() as u64 - n_known;
        let Some(device) = &mut self.device else { return Ok(None) };
        if n_new == 0 || self.interrupts.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        message(&format!("{} to measure, {n_known} recorded already in {}", grouped(n_new), self.database.name()));
        let shown = Shown::new(&self.task.setting.workload, SEARCH, self.seed, &self.interrupts);
        let most_trials = Some(configs.len() as u64);
        shown.start(Some(&self.recording), Status { n_trials: n_known, most_trials, ..Status::default() });
        let prior = self.trials.clone();
        // It is never asked: the budget ends with the guesses.
        let mut search = search::build(SEARCH, &self.task.space, self.seed)?;
        let mut lost = None;
        let summary = tilewright_tune::tune(
            search.as_mut(),
            self.task.into(),
            device,
            HeadStart { prior: &prior, guesses: configs },
            Budget { trials: Some(n_new), ..Budget::default() },
            &self.interrupts.stop,
            &mut |event| {
                if let Event::Trial(report) = &event {
                    self.trials.push(report.trial.clone());
                    shown.note(Note::Trial(report));
                }
                self.recording.take_note(&event, &|line| shown.note(Note::Message(line))).map_err(|error| {
                    lost = Some(self.database.failure(&error));
                    "records cannot be written".into()
                })
            },
        );
        shown.finish();
        match lost {
            Some(lost) => Err(lost.into()),
            None => Ok(Some(summary?)),
        }
    }
}

fn write(path: &Path, output: &Destination, recorded: &RecordedSpace, key: &TaskKey, seed: u64) -> anyhow::Result<()> {
    let about = [
        ("workload", key.workload.as_str().into()),
        ("target", key.target.as_str().into()),
        ("template", key.template.as_str().into()),
        ("threads", key.threads.into()),
        ("seed", seed.into()),
        ("version", BUILD.into()),
    ];
    let is_packed = path.extension().is_some_and(|ending| ending == "gz");
    output
        .write(|file| recorded.write_t4(file, is_packed, &about))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A long time in words.
fn hours(seconds: f64) -> String {
    let hours = seconds / 3600.0;
    if hours < 48.0 { format!("{hours:.1} hours") } else { format!("{} days", grouped((hours / 24.0).round())) }
}
