//! `race`: commands against each other, with a verdict.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright::referee::{CommandRace, Contestant, MOST_ROUNDS, RaceEnd, Raced, Rules, Standpoint};
use tilewright_device::command::Metric;
use tilewright_lab::plot::{Boxed, Layer, Marks, Plot, PlotAxis, Scale, colours, sheet};

use super::on_interrupt;
use crate::error::one_line;
use crate::output::{Destination, digits, duration, message, table, writable, write_result};
use tilewright::format::seconds;
use tilewright::format::{count, percent};

/// Interval between reports on a race in progress.
const REPORT: Duration = Duration::from_secs(10);
/// Maximum number of characters of a command that are shown.
const MOST_SHOWN: usize = 60;

/// Arguments of `race`.
#[derive(Args, Debug)]
pub struct RaceArgs {
    /// The commands, each as one argument; with --ci the first is the baseline
    #[arg(value_name = "COMMAND", required = true, num_args = 2..)]
    commands: Vec<String>,
    /// Metric to minimise: wall, cpu, or the number that a regular expression finds in the output
    #[arg(long, value_name = "METRIC", default_value = "wall", allow_hyphen_values = true)]
    metric: String,
    /// Maximise the metric instead
    #[arg(long)]
    maximize: bool,
    /// Start the commands by `sh -c`
    #[arg(long)]
    shell: bool,
    /// Skip warm-up runs, and empty the system's file cache before each run if that is permitted
    #[arg(long)]
    cold: bool,
    /// Bind runs to N CPUs [default: the system chooses]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Most rounds [default: 1000]
    #[arg(long, value_name = "N", value_parser = rounds)]
    rounds: Option<usize>,
    /// Time after which no round begins [default: 60, without --rounds]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    time: Option<Duration>,
    /// Timeout of a run
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    timeout: Duration,
    /// Seed of the orders in which the commands run [default: another each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Exit with 1 if a command is slower than the first by more than --allow, else with 0
    #[arg(long)]
    ci: bool,
    /// Allowed slowdown
    #[arg(long, value_name = "PERCENT", requires = "ci", default_value = "5%", value_parser = share)]
    allow: f64,
    /// Write a picture of the samples, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

fn rounds(text: &str) -> Result<usize, String> {
    let n = text.parse::<usize>().ok().filter(|n| (1..=MOST_ROUNDS).contains(n));
    n.ok_or_else(|| format!("expected a whole number of rounds, at most {MOST_ROUNDS}"))
}

/// Parses a share written as a percentage.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    let share = number.map(|number| number / 100.0).filter(|share| (0.0..=100.0).contains(share));
    share.ok_or_else(|| "expected per cent, such as 5%".to_owned())
}

/// Races the commands and reports the verdict.
///
/// # Errors
/// Bad input if an argument does not fit; failure if a command fails, or with `--ci` is slower than allowed.
pub fn run(args: &RaceArgs, as_json: bool) -> anyhow::Result<()> {
    let picture =
        args.picture.as_deref().map(|path| writable(path, as_json, "another file with --picture")).transpose()?;
    let race = CommandRace {
        commands: args.commands.clone(),
        shell: args.shell,
        metric: args.metric.clone(),
        maximize: args.maximize,
        cold: args.cold,
        threads: args.threads.map(usize::from),
        timeout: args.timeout,
        rules: Rules {
            rounds: args.rounds,
            time: args.time,
            seed: args.seed.unwrap_or_else(some_seed),
            allow: args.ci.then_some(args.allow),
        },
    };
    let metric = race.metric()?;
    let stop = watched()?;
    let mut last = Instant::now();
    let mut tell = |n_rounds: usize, n_left: usize| {
        if last.elapsed() >= REPORT {
            last = Instant::now();
            message(&format!("{}, {n_left} commands go on", count(n_rounds as u64, "round")));
        }
    };
    let raced = race.run(&stop, &message, &mut tell)?;
    if let (Some(place), Some(path)) = (picture, &args.picture) {
        draw(&raced, &metric, &place).with_context(|| format!("cannot write {}", path.display()))?;
    }
    write_result(as_json, &document(&raced, args), &summary(&raced, &metric))?;
    match raced.slower.is_empty() {
        true => Ok(()),
        false => Err(anyhow::anyhow!("{}", slowdowns(&raced))),
    }
}

/// Flag that the first interrupt raises; the second one ends this process.
fn watched() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let raised = stop.clone();
    on_interrupt(move || {
        if raised.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        message("stopping; interrupt again to leave at once");
    })?;
    Ok(stop)
}

/// Arbitrary seed.
fn some_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64 % 1_000_000_007
}

/// Result as JSON.
fn document(raced: &Raced, args: &RaceArgs) -> Json {
    let mut document = json!(raced);
    let fields = document.as_object_mut().expect("invariant: a result has fields");
    fields.insert("metric".into(), json!(args.metric));
    fields.insert("maximize".into(), json!(args.maximize));
    fields.insert("cold".into(), json!(args.cold));
    document
}

/// Shortens a command for display.
fn named(name: &str) -> String {
    let line = one_line(name);
    match line.chars().count() <= MOST_SHOWN {
        true => format!("`{line}`"),
        // Commands of a series mostly differ at the end.
        false => format!("`…{}`", line.chars().skip(line.chars().count() - MOST_SHOWN).collect::<String>()),
    }
}

fn value(metric: &Metric, value: f64) -> String {
    if metric.is_time() { duration(value * 1e6) } else { digits(value) }
}

/// Formats a ratio as a difference in per cent.
fn difference(ratio: f64) -> String {
    let text = percent(ratio - 1.0);
    match text.starts_with(|c: char| c.is_ascii_digit()) {
        true => format!("+{text}"),
        false => text,
    }
}

/// Formats the result as text.
fn summary(raced: &Raced, metric: &Metric) -> String {
    let row = |one: &Contestant| {
        let quartiles = one.quartiles.map_or(String::new(), |q| q.map(|end| value(metric, end)).join(" to "));
        let ratio = match (one.stands, one.ratio) {
            (Standpoint::Reference, _) | (_, None) => String::new(),
            (_, Some(ratio)) => difference(ratio),
        };
        let interval = match one.interval {
            [Some(low), Some(high)] => format!("{} to {}", difference(low), difference(high)),
            _ => String::new(),
        };
        let median = one.median.map_or(String::new(), |median| value(metric, median));
        vec![named(&one.name), one.samples.len().to_string(), median, quartiles, ratio, interval]
    };
    let head = ["command", "rounds", "median", "quartiles", "cost", "99 % interval"].map(str::to_owned).to_vec();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(raced.contestants.iter().map(row)).collect();
    let ended = match raced.ended {
        RaceEnd::Plain => "the verdict is plain",
        RaceEnd::Rounds => "the rounds are done",
        RaceEnd::Time => "the time is up",
        RaceEnd::Interrupted => "interrupted",
    };
    let rounds = count(raced.rounds as u64, "round");
    let course = format!("{rounds} in {}, seed {}: {ended}", duration(raced.seconds * 1e9), raced.seed);
    format!("{}{}\n{course}\n", table(&rows), verdict(raced))
}

/// Formats the verdict in a line.
fn verdict(raced: &Raced) -> String {
    let names = |names: &[String]| names.iter().map(|name| named(name)).collect::<Vec<_>>().join(", ");
    let undecided: Vec<String> = raced
        .contestants
        .iter()
        .filter(|one| one.stands == Standpoint::Undecided)
        .map(|one| one.name.clone())
        .collect();
    let is_unknown = |one: &Contestant| one.stands == Standpoint::Undecided && one.interval[0].is_none();
    let few = match raced.contestants.iter().any(is_unknown) {
        true => "; the rounds are too few to tell (give more with --time or --rounds)",
        false => "",
    };
    if let Some(allow) = raced.allow {
        let beyond = percent(allow);
        return match (raced.slower.is_empty(), undecided.is_empty()) {
            (false, _) => format!("failed   {}", slowdowns(raced)),
            (true, true) => format!("passed   none is slower than the first by more than {beyond}"),
            (true, false) => {
                format!(
                    "passed   none is known to be slower than the first by more than {beyond}; undecided: {}{few}",
                    names(&undecided)
                )
            }
        };
    }
    match &raced.winner {
        None => format!("tie      {}; the choice is {}{few}", names(&raced.tied), named(&raced.choice)),
        Some(winner) => {
            let ratios = raced.contestants.iter().filter(|one| one.stands != Standpoint::Reference);
            let next = ratios.filter_map(|one| one.ratio).fold(f64::INFINITY, f64::min);
            format!("winner   {}, the next costs {} more", named(winner), percent(next - 1.0))
        }
    }
}

/// Describes the slowdowns beyond the allowance.
fn slowdowns(raced: &Raced) -> String {
    let slower = raced.contestants.iter().filter(|one| one.stands == Standpoint::Slower);
    let line = |one: &Contestant| {
        let part = |ratio: Option<f64>| ratio.map_or(String::new(), |ratio| percent(ratio - 1.0));
        format!("{} is slower by {}, at least {}", named(&one.name), part(one.ratio), part(one.interval[0]))
    };
    let all: Vec<String> = slower.map(line).collect();
    let baseline = named(&raced.choice);
    let allow = percent(raced.allow.unwrap_or_default());
    format!("{} (the baseline is {baseline}, {allow} is allowed)", all.join("; "))
}

/// Draws the samples: a box plot of each command beside its course over the rounds.
fn draw(raced: &Raced, metric: &Metric, place: &Destination) -> std::io::Result<()> {
    let names: Vec<String> = raced.contestants.iter().map(|one| named(&one.name).replace('`', "")).collect();
    let colours = colours(&names);
    let layers = |marks: &dyn Fn(usize, &Contestant) -> Marks, is_named: bool| {
        let layer = |at: usize| Layer {
            label: if is_named { names[at].clone() } else { String::new() },
            colour: colours[at],
            marks: marks(at, &raced.contestants[at]),
        };
        let with_samples = (0..names.len()).filter(|&at| !raced.contestants[at].samples.is_empty());
        with_samples.map(layer).collect::<Vec<Layer>>()
    };
    let y = || PlotAxis { label: if metric.is_time() { "ms" } else { "metric" }.to_owned(), scale: Scale::FromZero };
    let boxes = |at: usize, one: &Contestant| {
        Marks::Boxes(vec![Boxed { x: at as f64, width: 0.5, values: one.samples.clone() }])
    };
    let course = |_: usize, one: &Contestant| {
        Marks::Points(one.samples.iter().enumerate().map(|(round, &sample)| (round as f64 + 1.0, sample)).collect())
    };
    let plots = [
        Plot {
            title: verdict(raced).split_whitespace().collect::<Vec<_>>().join(" ").chars().take(70).collect(),
            x: PlotAxis { label: String::new(), scale: Scale::Categories(names.clone()) },
            y: y(),
            layers: layers(&boxes, false),
        },
        Plot {
            title: format!("{}, seed {}", count(raced.rounds as u64, "round"), raced.seed),
            x: PlotAxis { label: "round".to_owned(), scale: Scale::FromZero },
            y: y(),
            layers: layers(&course, true),
        },
    ];
    place.write(|file| file.write_all(sheet(&plots, 2).as_bytes()))
}
