//! Files of an experiment's results: data, plots and a page of tables.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;

use serde::Serialize;
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::file::write_whole;
use tilewright::format::{count, digits, grouped};
use tilewright::version::BUILD;
use tilewright_search::{ErrorClass, Outcome, Seconds};

use super::data;
use super::elsewhere;
use super::finished::{Finished, RunSummary, n_complete};
use super::folder::{PAGE, TRIALS};
use super::machine::MachineResults;
use super::plan::ExperimentPlan;
use super::table::{Arm, Centre, ComparedMoment, PlottedQuantity, ResultView, SpaceProblem};
use crate::OrFailed;
use crate::history::{Curve, MedianCurve, mean_curve, median_curve};
use crate::plot::{Bar, Boxed, Layer, Marks, Plot, PlotAxis, Scale, colours, sheet};
use crate::stats::{MeanStd, Quartiles, geometric_mean, median};

/// Function that returns a part of a run's time, in seconds.
type RunTimePart = fn(&Finished) -> f64;

/// Share of the best known throughput from which on it counts as reached.
const NEAR_BEST: f64 = 0.95;
/// Number of bars of a histogram.
const N_BARS: usize = 40;
/// Number of plots beside each other.
const N_COLUMNS: usize = 3;
/// Placeholder for a missing number.
const NOTHING: &str = "–";
/// Columns of `trials.csv`.
const COLUMNS: &str = "problem,arm,seed,trial,elapsed_s,outcome,median_ns,gflops,build_s,run_s,verify_s\n";

/// Writes all result files, and returns the contents of `data.json`.
///
/// # Errors
/// If a file cannot be written.
pub fn write(plan: &ExperimentPlan, finished: &[Finished]) -> Result<Json, Error> {
    let results = ExperimentResults::of_all(plan, finished);
    let json = results.json();
    data::write(&plan.folder, &format!("{json:#}\n")).or_failed(data::path(&plan.folder).display())?;
    let mut files = vec![(TRIALS.to_owned(), results.trials())];
    let mut pictures = Vec::new();
    for view in plan.experiment.views.iter().filter(|_| !finished.is_empty()) {
        let (name, title) = view.name();
        let plots = results.plots(*view);
        if !plots.is_empty() {
            let file = format!("{name}.svg");
            files.push((file.clone(), sheet(&plots, N_COLUMNS)));
            pictures.push((title, file));
        }
    }
    files.push((PAGE.to_owned(), results.readme(&pictures)));
    for (name, text) in files {
        let path = plan.folder.join(name);
        write_whole(&path, |file| file.write_all(text.as_bytes())).or_failed(path.display())?;
    }
    Ok(json)
}

impl ResultView {
    /// File name of a plot, and its description.
    fn name(self) -> (&'static str, &'static str) {
        match self {
            ResultView::Trials => ("by-trials", "The best so far against trials"),
            ResultView::Time => ("by-time", "The best so far against time"),
            ResultView::Share => ("by-share", "The best so far against the share of the space that was tried"),
            ResultView::Relative => ("relative", "The best so far as a share of the best known, over all problems"),
            ResultView::SpeedUpOver(_) => ("speed-up", "How many times as fast as another arm's the best so far is"),
            ResultView::Boxes => ("best", "The best of each run"),
            ResultView::NearBest => {
                ("trials-to-95", "Trials until 95 % of the best known, of the runs that come so far")
            }
            ResultView::Histogram => ("histogram", "How often which throughput occurs"),
            ResultView::Outcomes => ("outcomes", "How trials end, and the time that they take"),
            ResultView::Seconds => ("time", "Where the time goes"),
        }
    }
}

/// Run in `data.json`.
#[derive(Serialize)]
struct RunRow<'a> {
    problem: &'a str,
    arm: &'a str,
    seed: u64,
    ended_by_time: bool,
    trials_to_95: Option<u64>,
    best_gflops: Option<f64>,
    #[serde(flatten)]
    summary: &'a RunSummary,
}

struct ExperimentResults<'a> {
    plan: &'a ExperimentPlan,
    finished: &'a [Finished<'a>],
    /// Results of this machine and of the others, if results of others are included.
    machines: Vec<MachineResults>,
}

impl<'a> ExperimentResults<'a> {
    fn of_all(plan: &'a ExperimentPlan, finished: &'a [Finished<'a>]) -> ExperimentResults<'a> {
        let here = plan.elsewhere.iter().take(1).map(|_| elsewhere::here(plan, finished));
        ExperimentResults { plan, finished, machines: here.chain(plan.elsewhere.iter().cloned()).collect() }
    }

    fn of(&self, problem: &SpaceProblem, arm: &Arm) -> impl Iterator<Item = &'a Finished<'a>> {
        let (problem, arm) = (problem.label, arm.label);
        self.finished.iter().filter(move |f| (f.planned.problem.label, f.planned.arm.label) == (problem, arm))
    }

    fn of_arm(&self, arm: &'a Arm) -> impl Iterator<Item = &'a Finished<'a>> {
        self.plan.problems.iter().flat_map(|problem| self.of(problem, arm))
    }

    /// Nanoseconds of the best kernel of any run at any of the moments.
    fn best_known(&self, problem: &SpaceProblem) -> Option<f64> {
        let own = self.finished.iter().filter(|f| f.planned.problem.label == problem.label);
        own.flat_map(|f| &f.summary.found).flatten().filter_map(|found| found.ns).min_by(f64::total_cmp)
    }

    /// Best throughput of each run at one of the plan's moments.
    fn bests(&self, problem: &SpaceProblem, arm: &Arm, moment: usize) -> Vec<f64> {
        self.of(problem, arm).filter_map(|f| Some(f.gflops(f.ns_at(moment)?))).collect()
    }

    /// Centre of the runs' values.
    fn centre(&self, values: &[f64]) -> Option<f64> {
        match self.plan.experiment.centre {
            Centre::Median => median(values),
            Centre::Mean => MeanStd::of(values).map(|summary| summary.mean),
        }
    }

    /// Formats the centre of the runs' values and their spread.
    fn cell(&self, values: &[f64]) -> String {
        match (self.plan.experiment.centre, MeanStd::of(values)) {
            (Centre::Mean, Some(MeanStd { mean, std })) if values.len() > 1 => {
                format!("{} ± {}", digits(mean), digits(std))
            }
            _ => spread(values, digits),
        }
    }

    /// Centre of the runs' curves, and their spread.
    fn centre_curve(&self, curves: &[Curve]) -> MedianCurve {
        match self.plan.experiment.centre {
            Centre::Median => median_curve(curves),
            Centre::Mean => mean_curve(curves),
        }
    }

    /// Geometric mean, over the problems, of an arm's centre as a share of the best known.
    fn of_best_known(&self, arm: &Arm, moment: usize) -> Option<f64> {
        let shares: Option<Vec<f64>> = self
            .plan
            .problems
            .iter()
            .map(|problem| {
                let flops = self.of(problem, arm).next()?.workload.flops();
                Some(self.centre(&self.bests(problem, arm, moment))? * self.best_known(problem)? / flops)
            })
            .collect();
        geometric_mean(&shares?)
    }

    fn json(&self) -> Json {
        let plan = self.plan;
        let runs = self.finished.iter().map(|f| {
            let run = RunRow {
                problem: f.planned.problem.label,
                arm: f.planned.arm.label,
                seed: f.planned.seed,
                ended_by_time: f.is_cut_short(),
                trials_to_95: self.trials_to_near_best(f),
                best_gflops: f.best_ns().map(|ns| f.gflops(ns)),
                summary: &f.summary,
            };
            serde_json::to_value(run).expect("invariant: it is numbers and text by name")
        });
        let mut summary = Vec::new();
        for problem in &plan.problems {
            for arm in &plan.arms {
                for (at, moment) in plan.moments().into_iter().enumerate() {
                    let bests = self.bests(problem, arm, at);
                    summary.push(json!({
                        "problem": problem.label,
                        "arm": arm.label,
                        "when": moment.to_string(),
                        "runs": bests.len(),
                        "best_gflops": Quartiles::of(&bests),
                        "mean_gflops": MeanStd::of(&bests),
                    }));
                }
            }
        }
        let shares = plan.arms.iter().flat_map(|arm| {
            plan.moments().into_iter().enumerate().map(move |(at, moment)| {
                json!({
                    "arm": arm.label,
                    "when": moment.to_string(),
                    "share_of_best_known": self.of_best_known(arm, at),
                })
            })
        });
        let everywhere = plan.arms.iter().filter(|_| !self.machines.is_empty()).flat_map(|arm| {
            let of_arm = plan.moments().into_iter().enumerate().map(|(at, moment)| {
                let of_problem = |problem: &SpaceProblem| {
                    let shares = self.shares_everywhere(problem, arm, at);
                    (problem.label, json!({"runs": shares.len(), "share_of_best_known": Quartiles::of(&shares)}))
                };
                json!({
                    "arm": arm.label,
                    "when": moment.to_string(),
                    "problems": plan.problems.iter().map(of_problem).collect::<BTreeMap<_, _>>(),
                    "share_of_best_known": self.share_everywhere(arm, at),
                })
            });
            of_arm.collect::<Vec<_>>()
        });
        json!({
            "experiment": plan.experiment.name,
            "paper": plan.experiment.paper,
            "figure": plan.experiment.figure,
            "differs": self.differs(),
            "raced": plan.experiment.is_raced,
            "command": plan.command(),
            "budget": plan.budget,
            "seed": plan.seed,
            "repeats": plan.repeats,
            "complete": n_complete(self.finished) == plan.compared().count(),
            "cpu": plan.hardware.name,
            "target": plan.hardware.target.name(),
            "threads": plan.hardware.threads,
            "extent": plan.extent(),
            "dates": self.dates(),
            "version": BUILD,
            "summary": summary,
            "geometric_means": shares.collect::<Vec<_>>(),
            "machines": self.machines,
            "on_all_machines": everywhere.collect::<Vec<_>>(),
            "runs": runs.collect::<Vec<_>>(),
        })
    }

    /// Deviations from the paper on this machine.
    fn differs(&self) -> String {
        let experiment = self.plan.experiment;
        self.plan.hardware.differences(experiment.on_cpus, experiment.differs)
    }

    /// Builds that made the runs, as far as they are known.
    fn builds(&self) -> String {
        let builds: BTreeSet<&str> = self.finished.iter().map(|f| f.summary.version.as_str()).collect();
        let known: Vec<&str> = builds.into_iter().filter(|build| !build.is_empty()).collect();
        if known.is_empty() { BUILD.to_owned() } else { known.join(" and ") }
    }

    /// Dates of the first and the last run.
    fn dates(&self) -> Option<[&str; 2]> {
        let started = || self.finished.iter().map(|f| f.summary.started.as_str());
        Some([started().min()?, started().max()?])
    }

    /// Formats every trial as a line of comma-separated values; runs whose records are gone keep the lines
    /// written before.
    fn trials(&self) -> String {
        let before = fs::read_to_string(self.plan.folder.join(TRIALS)).unwrap_or_default();
        let mut lines_before: BTreeMap<&str, String> = BTreeMap::new();
        for line in before.lines() {
            if let Some(run) = run_of(line) {
                let lines = lines_before.entry(run).or_default();
                *lines += line;
                lines.push('\n');
            }
        }
        let mut out = COLUMNS.to_owned();
        for f in self.finished {
            let run = format!("{},\"{}\",{}", f.planned.problem.label, f.planned.arm.label, f.planned.seed);
            if f.run.is_none() {
                out += lines_before.get(&run[..]).map_or("", String::as_str);
            }
            for (at, trial) in f.run.iter().flat_map(|run| &run.trials).enumerate() {
                let Seconds { build, run: run_s, verify } = trial.seconds;
                let outcome = Outcome::name_of(trial.result.err());
                let times = trial.result.map_or(",".to_owned(), |ns| format!("{ns},{:.4}", f.gflops(ns)));
                let _ = writeln!(
                    out,
                    "{run},{},{:.4},{outcome},{times},{build:.6},{run_s:.6},{verify:.6}",
                    at + 1,
                    trial.elapsed_s
                );
            }
        }
        out
    }

    fn readme(&self, pictures: &[(&str, String)]) -> String {
        let experiment = self.plan.experiment;
        let mut out = format!("# {}\n\n{}: {}", experiment.name, experiment.paper, experiment.compares);
        if !experiment.figure.is_empty() {
            let _ = write!(out, " ({})", experiment.figure);
        }
        out += ".\n";
        let differs = self.differs();
        if !differs.is_empty() {
            let _ = writeln!(out, "Differs from the paper: {differs}.");
        }
        let _ = write!(
            out,
            "\n`{}` on {}, {}, {}, version {}.\n{}. {} complete{}.\n",
            self.plan.command(),
            self.plan.hardware.name,
            self.plan.hardware.target.name(),
            self.dates().map_or("not run yet".to_owned(), |[first, last]| match first == last {
                true => first.to_owned(),
                false => format!("{first} to {last}"),
            }),
            self.builds(),
            self.plan.extent(),
            match n_complete(self.finished) {
                all if all == self.plan.compared().count() => "All are".to_owned(),
                some => format!("{some} of them are"),
            },
            match self.finished.iter().filter(|f| f.is_cut_short()).count() {
                0 => String::new(),
                n => format!("; {n} came to the end of their time before that of their trials"),
            }
        );
        let (centre, summary) = match experiment.centre {
            Centre::Median => ("median", "median over runs, in brackets the quartiles"),
            Centre::Mean => ("mean", "mean ± standard deviation over runs"),
        };
        for (at, moment) in self.plan.moments().into_iter().enumerate() {
            let what = match (experiment.is_raced, moment) {
                (true, ComparedMoment::End) => {
                    "What won the race of a run's leaders, timed beside that of all other runs"
                }
                (true, _) => "What won a race of a run's leaders by then, timed beside that of all other runs",
                (false, _) => "A run's fastest trial",
            };
            let _ = write!(
                out,
                "\n## Best GFLOP/s {moment}\n\n{what}: {summary}; the last row is the geometric mean over problems\nof what the \
                 {centre} is of the best known.\n\n"
            );
            out += &self.table(at);
        }
        if experiment.views.contains(&ResultView::NearBest) {
            out += "\n## Trials until 95 % of the best known\n\nMedian over runs, in brackets how many of them come so far.\n\n";
            out += &self.near_best_table();
        }
        if experiment.views.contains(&ResultView::Outcomes) {
            out += "\n## How trials end\n\n";
            out += &self.outcome_table();
        }
        if !self.machines.is_empty() {
            out += &self.everywhere();
        }
        for (title, file) in pictures {
            let _ = write!(out, "\n## {title}\n\n![{title}]({file})\n");
        }
        out + &format!(
            "\n`{}` holds the numbers, and more repeats can go on from it; `trials.csv` has every trial and `runs/` the \
                 records of the runs\nthat were made in this folder.\n",
            data::name(&self.plan.folder)
        )
    }

    /// Shares of the best known on its machine that the runs of an arm on a problem reached, on all machines.
    fn shares_everywhere(&self, problem: &SpaceProblem, arm: &Arm, moment: usize) -> Vec<f64> {
        self.machines.iter().flat_map(|machine| machine.shares(problem.label, arm.label, moment)).collect()
    }

    /// Geometric mean, over all problems, of the medians of these shares.
    fn share_everywhere(&self, arm: &Arm, moment: usize) -> Option<f64> {
        let problems = self.plan.problems.iter();
        let shares = problems.map(|problem| median(&self.shares_everywhere(problem, arm, moment)));
        geometric_mean(&shares.collect::<Option<Vec<_>>>()?)
    }

    fn everywhere(&self) -> String {
        let mut out = "\n## On all machines\n\n".to_owned();
        for machine in &self.machines {
            let MachineResults { cpu, target, version, .. } = machine;
            let _ = writeln!(out, "- {cpu}, {target}: {}, version {version}", count(machine.n_runs() as u64, "run"));
        }
        let arms = &self.plan.arms;
        for (at, moment) in self.plan.moments().into_iter().enumerate() {
            let _ = write!(
                out,
                "\n### Share of the best known {moment}\n\nOf the best that any run knew on the same machine: median over the runs on \
                 all machines, in brackets the quartiles;\nthe last row is the geometric mean.\n\n"
            );
            let mut rows = vec![head(arms)];
            for problem in &self.plan.problems {
                let cell = |arm: &Arm| spread(&self.shares_everywhere(problem, arm, at), share_text);
                rows.push(std::iter::once(problem.label.to_owned()).chain(arms.iter().map(cell)).collect());
            }
            let mean = |arm: &Arm| self.share_everywhere(arm, at).map_or(NOTHING.to_owned(), share_text);
            rows.push(std::iter::once("all".to_owned()).chain(arms.iter().map(mean)).collect());
            out += &markdown(&rows);
        }
        out
    }

    fn table(&self, moment: usize) -> String {
        let arms = &self.plan.arms;
        let mut rows = vec![head(arms)];
        for problem in &self.plan.problems {
            let cell = |arm: &Arm| self.cell(&self.bests(problem, arm, moment));
            rows.push(std::iter::once(problem.label.to_owned()).chain(arms.iter().map(cell)).collect::<Vec<_>>());
        }
        let share = |arm: &Arm| self.of_best_known(arm, moment).map_or(NOTHING.to_owned(), share_text);
        rows.push(std::iter::once("of the best".to_owned()).chain(arms.iter().map(share)).collect());
        markdown(&rows)
    }

    /// Number of trials until a run was near the best of all runs on its problem, by the winners of races if
    /// the plan has several moments; `None` if it never was.
    fn trials_to_near_best(&self, f: &Finished) -> Option<u64> {
        let near_ns = self.best_known(&f.planned.problem)? / NEAR_BEST;
        if !self.plan.experiment.is_raced {
            return f.summary.reached(near_ns);
        }
        let found = f.summary.found.iter().flatten().find(|found| found.ns.is_some_and(|ns| ns <= near_ns))?;
        Some(found.trials)
    }

    fn near_best_table(&self) -> String {
        let arms = &self.plan.arms;
        let mut rows = vec![head(arms)];
        for problem in &self.plan.problems {
            let cell = |arm: &Arm| {
                let trials: Vec<Option<u64>> = self.of(problem, arm).map(|f| self.trials_to_near_best(f)).collect();
                let n_near = trials.iter().flatten().count();
                // Runs that never reach it count as longer than any other.
                let numbers: Vec<f64> = trials.iter().map(|n| n.map_or(f64::MAX, |n| n as f64)).collect();
                match median(&numbers) {
                    None => NOTHING.to_owned(),
                    Some(n) if n > u32::MAX.into() => format!("not reached ({n_near} of {})", trials.len()),
                    Some(n) => format!("{} ({n_near} of {})", grouped(n.round()), trials.len()),
                }
            };
            rows.push(std::iter::once(problem.label.to_owned()).chain(arms.iter().map(cell)).collect());
        }
        markdown(&rows)
    }

    fn outcome_table(&self) -> String {
        let mut rows =
            vec![["arm", "outcome", "trials", "share of trials", "s", "share of time"].map(str::to_owned).to_vec()];
        for arm in &self.plan.arms {
            let sums = self.outcomes(arm);
            let all = sums.iter().fold((0.0, 0.0), |all, (_, n, s)| (all.0 + n, all.1 + s));
            for (name, n, seconds) in sums.iter().filter(|sum| sum.1 > 0.0) {
                let share = |part: f64, whole: f64| format!("{:.2} %", 100.0 * part / f64::max(whole, 1e-12));
                rows.push(vec![
                    arm.label.to_owned(),
                    (*name).to_owned(),
                    grouped(*n),
                    share(*n, all.0),
                    format!("{seconds:.1}"),
                    share(*seconds, all.1),
                ]);
            }
        }
        markdown(&rows)
    }

    /// Outcomes of an arm's trials: name, number of trials, and seconds.
    fn outcomes(&self, arm: &'a Arm) -> Vec<(&'static str, f64, f64)> {
        let classes = std::iter::once(None).chain(ErrorClass::ALL.map(Some));
        let sum = |class: Option<ErrorClass>| {
            let name = Outcome::name_of(class);
            let trials = self.of_arm(arm).filter_map(|f| f.summary.outcomes.get(name));
            let (n, Seconds { build, run, verify }) = trials.fold((0, Seconds::default()), |(n, mut sum), trials| {
                sum += trials.seconds;
                (n + trials.n, sum)
            });
            (name, n as f64, build + run + verify)
        };
        classes.map(sum).collect()
    }

    fn colours(&self) -> Vec<&'static str> {
        colours(&self.plan.arms.iter().map(|arm| arm.label.to_owned()).collect::<Vec<_>>())
    }

    /// Layers of the arms that have something to show.
    fn layers(&self, marks: impl Fn(usize, &'a Arm) -> Option<Marks>) -> Vec<Layer> {
        let arms = self.plan.arms.iter().zip(self.colours()).enumerate();
        arms.filter_map(|(at, (arm, colour))| {
            Some(Layer { label: arm.label.to_owned(), colour, marks: marks(at, arm)? })
        })
        .collect()
    }

    fn value(&self, finished: &Finished, ns: f64) -> f64 {
        match self.plan.experiment.measure {
            PlottedQuantity::Throughput => finished.gflops(ns),
            PlottedQuantity::Cost => ns / 1e6,
        }
    }

    fn value_axis(&self) -> PlotAxis {
        match self.plan.experiment.measure {
            PlottedQuantity::Throughput => PlotAxis { label: "GFLOP/s".into(), scale: Scale::FromZero },
            PlottedQuantity::Cost => PlotAxis { label: "time of a kernel, ms".into(), scale: Scale::Log },
        }
    }

    fn plots(&self, view: ResultView) -> Vec<Plot> {
        let problems = &self.plan.problems;
        match view {
            ResultView::Trials | ResultView::Time | ResultView::Share => {
                problems.iter().map(|p| self.curves(p, view)).collect()
            }
            ResultView::Relative => vec![self.relative()],
            ResultView::SpeedUpOver(label) => {
                let over = self.plan.arms.iter().find(|arm| arm.label == label);
                over.map(|over| self.speed_up(over)).into_iter().collect()
            }
            ResultView::Boxes => {
                vec![self.boxes("The best of each run", self.value_axis(), |f| Some(self.value(f, f.best_ns()?)))]
            }
            ResultView::NearBest => {
                let axis = PlotAxis { label: "trials".into(), scale: Scale::Log };
                vec![
                    self.boxes("Trials until 95 % of the best known", axis, |f| {
                        Some(self.trials_to_near_best(f)? as f64)
                    }),
                ]
            }
            ResultView::Histogram => problems.iter().map(|problem| self.histogram(problem)).collect(),
            ResultView::Outcomes => self.outcome_plots(),
            ResultView::Seconds => vec![self.seconds()],
        }
    }

    fn curves(&self, problem: &SpaceProblem, view: ResultView) -> Plot {
        let curve = |f: &Finished| -> Curve {
            f.summary.best_so_far(
                |n, elapsed_s| match view {
                    ResultView::Time => elapsed_s,
                    ResultView::Share => 100.0 * n as f64 / f.space_size,
                    _ => n as f64,
                },
                |ns| self.value(f, ns),
            )
        };
        let unit = match view {
            ResultView::Time => "time, s",
            ResultView::Share => "configurations tried, % of the space",
            _ => "trials",
        };
        Plot {
            title: problem.label.to_owned(),
            x: PlotAxis { label: unit.into(), scale: Scale::Log },
            y: self.value_axis(),
            layers: self.layers(|_, arm| {
                let curves: Vec<Curve> = self.of(problem, arm).map(curve).collect();
                (!curves.is_empty()).then(|| Marks::Steps(self.centre_curve(&curves)))
            }),
        }
    }

    /// Speedup of the best so far over the centre of another arm's runs on the same problem.
    fn speed_up(&self, over: &'a Arm) -> Plot {
        let curves = |problem: &SpaceProblem, arm: &Arm| -> Vec<Curve> {
            self.of(problem, arm).map(|f| f.summary.best_so_far(|_, elapsed_s| elapsed_s, |ns| f.gflops(ns))).collect()
        };
        let of_problem = |problem: &SpaceProblem, arm: &Arm| -> Vec<Curve> {
            let MedianCurve { points, .. } = self.centre_curve(&curves(problem, over));
            let end = points.last().map_or(0.0, |point| point.0);
            let theirs = Curve { points, end };
            curves(problem, arm).iter().map(|own| theirs.ratio(own)).collect()
        };
        Plot {
            title: format!("Over {}, over problems and runs", over.label),
            x: PlotAxis { label: "time, s".into(), scale: Scale::Log },
            y: PlotAxis { label: "times as fast".into(), scale: Scale::FromZero },
            layers: self.layers(|_, arm| {
                let ratios: Vec<Curve> =
                    self.plan.problems.iter().flat_map(|problem| of_problem(problem, arm)).collect();
                (arm.label != over.label && !ratios.is_empty()).then(|| Marks::Steps(self.centre_curve(&ratios)))
            }),
        }
    }

    fn relative(&self) -> Plot {
        Plot {
            title: match self.plan.experiment.centre {
                Centre::Median => "Median over problems and runs, with quartiles".into(),
                Centre::Mean => "Mean over problems and runs, with standard deviation".into(),
            },
            x: PlotAxis { label: "time, s".into(), scale: Scale::Log },
            y: PlotAxis { label: "share of the best known, %".into(), scale: Scale::FromZero },
            layers: self.layers(|_, arm| {
                let curves = self.of_arm(arm).filter_map(|f| {
                    let best = self.best_known(&f.planned.problem)?;
                    Some(f.summary.best_so_far(|_, elapsed_s| elapsed_s, |ns| 100.0 * best / ns))
                });
                let curves: Vec<Curve> = curves.collect();
                (!curves.is_empty()).then(|| Marks::Steps(self.centre_curve(&curves)))
            }),
        }
    }

    /// Box plot of a value of each run, by problem and arm.
    fn boxes(&self, title: &str, y: PlotAxis, value: impl Fn(&Finished) -> Option<f64>) -> Plot {
        let problems = &self.plan.problems;
        let width = 0.8 / self.plan.arms.len() as f64;
        let names = problems.iter().map(|problem| problem.label.to_owned()).collect();
        Plot {
            title: title.to_owned(),
            x: PlotAxis { label: String::new(), scale: Scale::Categories(names) },
            y,
            layers: self.layers(|at, arm| {
                let x = |problem: usize| problem as f64 - 0.4 + (at as f64 + 0.5) * width;
                let boxes = problems.iter().enumerate().map(|(i, problem)| Boxed {
                    x: x(i),
                    width: width * 0.8,
                    values: self.of(problem, arm).filter_map(&value).collect(),
                });
                Some(Marks::Boxes(boxes.filter(|boxed| !boxed.values.is_empty()).collect()))
            }),
        }
    }

    fn histogram(&self, problem: &SpaceProblem) -> Plot {
        let values = |arm: &Arm| -> Vec<f64> {
            let trials = self
                .of(problem, arm)
                .flat_map(|f| f.run.iter().flat_map(|run| &run.trials).map(move |trial| (f, trial)));
            trials.filter_map(|(f, trial)| Some(f.gflops(trial.result.ok()?))).collect()
        };
        let most = self.plan.arms.iter().flat_map(values).fold(f64::MIN_POSITIVE, f64::max);
        let step = most / N_BARS as f64;
        Plot {
            title: problem.label.to_owned(),
            x: PlotAxis { label: "GFLOP/s".into(), scale: Scale::FromZero },
            y: PlotAxis { label: "configurations".into(), scale: Scale::FromZero },
            layers: self.layers(|_, arm| {
                let mut counts = [0u64; N_BARS];
                values(arm).iter().for_each(|v| counts[((v / step) as usize).min(N_BARS - 1)] += 1);
                let bars = counts.iter().enumerate().map(|(at, n)| Bar {
                    x: (at as f64 * step, (at as f64 + 0.9) * step),
                    y: (0.0, *n as f64),
                    text: format!("{} to {}: {n}", digits(at as f64 * step), digits((at + 1) as f64 * step)),
                });
                Some(Marks::Bars(bars.collect()))
            }),
        }
    }

    fn outcome_plots(&self) -> Vec<Plot> {
        let sums: Vec<_> = self.plan.arms.iter().map(|arm| self.outcomes(arm)).collect();
        let occurs = |at: &usize| sums.iter().any(|of_arm| of_arm[*at].1 > 0.0);
        let shown: Vec<usize> = (0..=ErrorClass::ALL.len()).filter(occurs).collect();
        let names: Vec<String> = shown.iter().map(|at| sums[0][*at].0.replace('_', " ")).collect();
        let width = 0.8 / sums.len() as f64;
        let plot = |title: &str, part: fn(&(&str, f64, f64)) -> f64, unit: &str| Plot {
            title: title.into(),
            x: PlotAxis { label: String::new(), scale: Scale::Categories(names.clone()) },
            y: PlotAxis { label: "%".into(), scale: Scale::FromZero },
            layers: self.layers(|arm, _| {
                let all: f64 = sums[arm].iter().map(part).sum();
                let bars = shown.iter().enumerate().map(|(place, at)| {
                    let own = part(&sums[arm][*at]);
                    let left = place as f64 - 0.4 + arm as f64 * width;
                    Bar {
                        x: (left, left + width * 0.9),
                        y: (0.0, 100.0 * own / all.max(f64::MIN_POSITIVE)),
                        text: format!("{}{unit}", digits(own)),
                    }
                });
                Some(Marks::Bars(bars.collect()))
            }),
        };
        vec![
            plot("Share of trials", |(_, n, _)| *n, " trials"),
            plot("Share of the time in trials", |(_, _, seconds)| *seconds, " s"),
        ]
    }

    fn seconds(&self) -> Plot {
        let arms = &self.plan.arms;
        let of_part: [(&str, RunTimePart); 4] = [
            ("search", |f| f.summary.search_seconds),
            ("build", |f| f.summary.seconds_in().build),
            ("run", |f| f.summary.seconds_in().run),
            ("verify", |f| f.summary.seconds_in().verify),
        ];
        let names: Vec<String> = of_part.iter().map(|(name, _)| (*name).to_owned()).collect();
        let sum = |arm: &'a Arm, part: RunTimePart| self.of_arm(arm).map(part).sum::<f64>();
        let mut below = vec![0.0; arms.len()];
        let mut layers = Vec::new();
        for ((name, part), colour) in of_part.into_iter().zip(colours(&names)) {
            let bars = arms.iter().enumerate().map(|(at, arm)| {
                let all: f64 = of_part.iter().map(|(_, part)| sum(arm, *part)).sum();
                let share = 100.0 * sum(arm, part) / all.max(f64::MIN_POSITIVE);
                let from = below[at];
                below[at] += share;
                let x = (at as f64 - 0.3, at as f64 + 0.3);
                Bar { x, y: (from, from + share), text: format!("{name}: {share:.1} %") }
            });
            layers.push(Layer { label: name.into(), colour, marks: Marks::Bars(bars.collect()) });
        }
        Plot {
            title: "Where the time goes".into(),
            x: PlotAxis {
                label: String::new(),
                scale: Scale::Categories(arms.iter().map(|arm| arm.label.to_owned()).collect()),
            },
            y: PlotAxis { label: "%".into(), scale: Scale::FromZero },
            layers,
        }
    }
}

/// Start of a line of `trials.csv` that identifies the run: problem, arm in quotes, seed.
fn run_of(line: &str) -> Option<&str> {
    let arm_end = line.find("\",")? + 2;
    line.get(..arm_end + line[arm_end..].find(',')?)
}

/// Median of values, followed by their quartiles in brackets if there are several values.
fn spread(values: &[f64], text: impl Fn(f64) -> String) -> String {
    Quartiles::of(values).map_or(NOTHING.to_owned(), |q| match values.len() {
        1 => text(q.median),
        _ => format!("{} ({}–{})", text(q.median), text(q.first), text(q.third)),
    })
}

fn share_text(share: f64) -> String {
    format!("{share:.3}")
}

/// First row of a table of problems by arms.
fn head(arms: &[Arm]) -> Vec<String> {
    std::iter::once("problem").chain(arms.iter().map(|arm| arm.label)).map(str::to_owned).collect()
}

/// Formats rows as a Markdown table; the first one is the header.
pub fn markdown(rows: &[Vec<String>]) -> String {
    let line = |row: &Vec<String>| format!("| {} |\n", row.join(" | "));
    let rule = |row: &Vec<String>| format!("|{}\n", "---|".repeat(row.len()));
    let (head, body) = rows.split_first().expect("invariant: a table has a head");
    line(head) + &rule(head) + &body.iter().map(line).collect::<String>()
}
