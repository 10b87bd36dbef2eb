//! Tuning runs: a search, its records, and a final race of the best candidates.

pub mod earlier;
pub mod finals;
pub(crate) mod head_start;
pub mod recorder;
pub mod together;
pub mod transfer;
mod turns;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tilewright_device::command::Objectives;
use tilewright_device::device::WorkerCommand;
use tilewright_search::{
    BoxError, Budget, Config, Event, HeadStart, Measure, Report, Search, Summary, Timing, Trial, Tuning,
};
use tilewright_tune::{BestRecord as Recorded, PassedOver, Store, StoreError, TaskKey, Winner};

use crate::best::{Best, ParetoPoint, trials_of};
use crate::clock::since_1970;
use crate::database::{Database, Opened};
use crate::error::Error;
use crate::format::{count, digits, duration};
use crate::observer::{Begin, Note, Observer, Plan};
use crate::request::{DEFAULT_TIME, Job, Request, Settings};
use crate::subject::workload::{Elsewhere, WorkloadRun};
use crate::subject::{Runnable, command, kernel};
use crate::tuned::{NewTrials, Race, Tuned, Wall};
use crate::version::BUILD;
use earlier::{Earlier, earlier_of, may_do_better};
use finals::{Contenders, EndLimits, Finals, Leader, RunEnd};
use recorder::{Recorder, Recording};

/// Relative error of a trial's median in addition to the spread of its samples.
const NOISE_OF_RECORDS: f64 = 0.1;

/// Executes a request, on this machine or elsewhere.
///
/// # Errors
/// If the request does not fit, the database cannot be written, or workers do not start. A run without a
/// correct candidate is not an error: it returns a [`Tuned`] without a best.
pub(crate) fn run<'a>(
    request: &'a Request,
    place: Option<Elsewhere<'a>>,
    database: &Database,
    worker: &WorkerCommand,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Tuned, Error> {
    let wall = Wall::new();
    request.check()?;
    let settings = request.settings();
    if place.is_some() {
        request.workload()?;
    }
    let subject: Box<dyn Runnable + 'a> = match request.job() {
        Job::Workload(_) => Box::new(WorkloadRun::new(request, place, worker)?),
        Job::Command(command) => Box::new(command::subject(command, settings, observer)?),
        Job::Kernel(kernel) => Box::new(kernel::subject(kernel, request, worker)?),
    };
    let (search, mut guesses) = subject.search(observer)?;
    let opened = open(database, settings.fresh.then_some(subject.key()), observer)?;
    let elsewhere = subject.best_elsewhere(&opened.store).map_err(|error| database.refuse(error))?;
    guesses.splice(0..0, elsewhere);
    let run = Run::new(subject.as_ref(), settings, database, &opened.store, stop, observer)?;
    run.carry_out(search, &guesses, opened, wall)
}

/// Opens a database for recording, and deletes its records of `forgotten`.
fn open<'a>(
    database: &Database,
    forgotten: impl IntoIterator<Item = &'a TaskKey>,
    observer: &dyn Observer,
) -> Result<Opened, Error> {
    let mut opened = database.open_to_write()?;
    if let Some(warning) = &opened.warning {
        observer.note(Note::Message(warning.clone()));
    }
    for key in forgotten {
        let n_forgotten = opened.store.forget(key).map_err(|error| database.failure(&error))?;
        observer.note(Note::Message(format!("{} of earlier runs forgotten", count(n_forgotten, "trial"))));
    }
    Ok(opened)
}

/// Findings of a run, and the error that lost records, if any.
struct Findings {
    /// All trials, those of earlier runs included.
    trials: Vec<Trial>,
    lost: Option<StoreError>,
}

/// Run of a subject.
struct Run<'a> {
    subject: &'a dyn Runnable,
    settings: &'a Settings,
    database: &'a Database,
    stop: &'a AtomicBool,
    observer: &'a dyn Observer,
    earlier: Earlier,
    /// Measured peak of the machine, once known.
    peak_gflops: Option<f64>,
}

impl<'a> Run<'a> {
    /// Makes a run that continues from the records.
    ///
    /// # Errors
    /// If the database cannot be read.
    fn new(
        subject: &'a dyn Runnable,
        settings: &'a Settings,
        database: &'a Database,
        store: &Store,
        stop: &'a AtomicBool,
        observer: &'a dyn Observer,
    ) -> Result<Run<'a>, Error> {
        let (space, validator) = (subject.space().as_ref(), subject.validator());
        let earlier = earlier_of(store, subject.key(), space, &validator, &subject.limits(), observer);
        let earlier = earlier.map_err(|error| database.refuse(error))?;
        Ok(Run { subject, settings, database, stop, observer, earlier, peak_gflops: None })
    }

    fn say(&self, line: String) {
        self.observer.note(Note::Message(line));
    }

    /// Whether the best candidates race.
    fn may_race(&self) -> bool {
        // No member of a Pareto set is ahead of another.
        self.settings.race && !self.subject.is_emulated() && !self.has_several_objectives()
    }

    fn has_several_objectives(&self) -> bool {
        self.subject.objectives().is_some_and(Objectives::is_several)
    }

    /// Time limit of the search.
    fn time(&self) -> Option<Duration> {
        let ends = self.settings.trials.is_some() || self.settings.stop_below.is_some();
        self.settings.time.or((!ends).then_some(DEFAULT_TIME))
    }

    /// Number of trials left to make.
    fn left(&self) -> Option<u64> {
        self.settings.trials.map(|trials| trials.saturating_sub(self.earlier.trials.len() as u64))
    }

    /// Reason why there is nothing to search, if so.
    fn nothing_left(&self) -> Option<&'static str> {
        match self.left() {
            Some(0) => Some("all trials asked for are recorded already"),
            _ if self.earlier.trials.len() as u128 >= self.subject.space().size() => {
                Some("the whole space is recorded already")
            }
            _ => None,
        }
    }

    fn carry_out(
        mut self,
        search: Box<dyn Search>,
        guesses: &[Config],
        opened: Opened,
        mut wall: Wall,
    ) -> Result<Tuned, Error> {
        if let Some(known) = self.begin(&opened.store)? {
            wall.seconds.start = wall.lap();
            return Ok(self.as_before(&known, &wall));
        }
        self.peak_gflops = self.subject.peak_gflops();
        let plan = self.plan();
        self.observer.note(Note::Plan(&plan));
        let Some(measure) = self.subject.start(self.stop, self.observer)? else {
            wall.seconds.start = wall.lap();
            return Ok(self.tuned(&[], None, &wall));
        };
        wall.seconds.start = wall.lap();
        let recording = self.recording(opened);
        self.observer.note(Note::Search(&recording, &plan));
        self.search(search, guesses, measure, &recording, wall)
    }

    /// Reports the beginning of the run. Returns the known winner if there is nothing to do.
    fn begin(&self, store: &Store) -> Result<Option<Winner>, Error> {
        let nothing_left = self.nothing_left();
        self.observer.note(Note::Begin(&Begin {
            key: self.subject.key().clone(),
            space_size: self.subject.space().size(),
            database: self.database.name(),
            n_earlier: self.earlier.trials.len() as u64,
            default_time: self.time().filter(|_| self.settings.time.is_none() && nothing_left.is_none()),
            is_emulated: self.subject.is_emulated(),
        }));
        let Some(nothing_left) = nothing_left else { return Ok(None) };
        if let Some(known) = self.known_winner(store).map_err(|error| self.database.refuse(error))? {
            self.say(nothing_left.to_owned());
            return Ok(Some(known));
        }
        let race = if self.may_race() { "; the leaders have yet to be raced" } else { "" };
        self.say(format!("{nothing_left}: there is nothing to search{race}"));
        Ok(None)
    }

    fn plan(&self) -> Plan {
        let costs = self.earlier.trials.iter().map(|trial| trial.outcome.cost());
        let best_ns = costs.min_by(f64::total_cmp).filter(|ns| ns.is_finite());
        let best_ns = best_ns.filter(|_| self.subject.objectives().is_none());
        Plan {
            time: self.time(),
            most_trials: self.settings.trials,
            n_earlier: self.earlier.trials.len() as u64,
            best_gflops: best_ns.map(|ns| self.subject.gflops(ns)),
            peak_gflops: self.peak_gflops,
            start_and_run_s: self.peak_gflops.and_then(|peak| self.subject.start_and_run_s(peak)),
            limits: (self.may_race() && self.subject.objectives().is_none()).then(|| EndLimits::of(self.time())),
        }
    }

    /// Recording of the trials, in the open database.
    fn recording(&self, opened: Opened) -> Recording {
        let Settings { search, seed, .. } = self.settings;
        let (space, least_ns) = (self.subject.space(), self.subject.least_ns());
        let key = self.subject.key().clone();
        Recording::new(Recorder::of_space(opened, space, least_ns, key, search.clone(), *seed))
    }

    fn search(
        &self,
        mut search: Box<dyn Search>,
        guesses: &[Config],
        mut measure: Box<dyn Measure + '_>,
        recording: &Recording,
        mut wall: Wall,
    ) -> Result<Tuned, Error> {
        let mut found = Findings { trials: self.earlier.trials.clone(), lost: None };
        let head_start = HeadStart { prior: &self.earlier.trials, guesses };
        let mut tuning = Tuning::new(search.as_mut(), self.subject.subject(), head_start);
        let least = self.subject.least_batch();
        let budget = Budget {
            trials: self.left(),
            time: self.time(),
            stop_below: self.settings.stop_below,
            least,
            ..Budget::default()
        };
        let ended = tuning
            .go_on(measure.as_mut(), budget, self.stop, &mut |event| self.take_note(&event, recording, &mut found));
        wall.seconds.search = wall.lap();
        let ended = ended.map_err(|error| Error::failed(&error).because(error))?;
        let limits = EndLimits::of(self.time());
        let limits = limits.after(self.earlier.searched().saturating_add(Duration::from_secs_f64(wall.seconds.search)));
        self.finish((Some(measure), recording), found, &tuning.summary(ended), limits, &mut wall)
    }

    /// Records and reports an event of the search.
    fn take_note(&self, event: &Event, recording: &Recording, found: &mut Findings) -> Result<(), BoxError> {
        let is_emulated = self.subject.is_emulated();
        if let Event::Trial(report) = event {
            found.trials.push(report.trial.clone());
            let best_ns = report.best_ns.filter(|_| !is_emulated);
            self.observer.note(Note::Trial(&Report { best_ns, ..(*report).clone() }));
        }
        if is_emulated {
            return Ok(());
        }
        if let Err(error) = recording.take_note(event, &|message| self.say(message)) {
            // Trials made so far are raced and reported nevertheless.
            found.lost.get_or_insert(error);
            self.stop.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Races the best candidates, if requested and possible, and makes the result of the run.
    fn finish(
        &self,
        (mut measure, recording): (Option<Box<dyn Measure + '_>>, &Recording),
        Findings { trials, lost }: Findings,
        summary: &Summary,
        limits: EndLimits,
        wall: &mut Wall,
    ) -> Result<Tuned, Error> {
        let end = match measure.as_deref_mut().filter(|_| self.may_race()) {
            Some(measure) => self.race(measure, &trials, lost.is_none(), summary, limits),
            None => Ok(RunEnd::NoTime),
        };
        wall.end_race(end.as_ref().ok());
        let raced = end.as_ref().ok().and_then(RunEnd::finals);
        let winner = raced.map(|finals| self.winner(finals));
        if let Some(contradiction) = raced.and_then(|finals| self.contradiction(finals)) {
            self.observer.note(Note::MayBeStale(contradiction));
        }
        let recorded = recording.conclude(winner.as_ref());
        let end = end.map_err(|error| Error::failed("measuring the leading candidates").because(error))?;
        drop(measure);
        wall.seconds.end = wall.lap();
        let lost = lost.or(recorded.err()).map(|error| self.database.failure(&error));
        let mut tuned = self.tuned(&trials[self.earlier.trials.len()..], Some(summary), wall);
        tuned.recorded = lost.is_none();
        tuned.lost = lost;
        let is_emulated = self.subject.is_emulated();
        match (&end, winner) {
            (RunEnd::Raced(finals), Some(winner)) => {
                let leader = &finals.ranking[0];
                tuned.best = Some(self.describe(Best::of_unnamed_winner(&winner), &leader.config));
                tuned.race = Some(Race {
                    relative_error: leader.relative_error,
                    is_tie: finals.is_tie(),
                    untuned_gflops: finals.untuned.ns().map(|ns| self.subject.gflops(ns)),
                    untuned: finals.untuned,
                    n_leaders: finals.ranking.len(),
                });
            }
            (RunEnd::NoTime, _) if !is_emulated => tuned.best = self.fastest(&trials),
            _ => {}
        }
        tuned.verified = tuned.best.is_some() && self.subject.is_verified() || is_emulated && tuned.any_right;
        Ok(tuned)
    }

    /// Races the best candidates.
    fn race(
        &self,
        measure: &mut dyn Measure,
        trials: &[Trial],
        is_recorded: bool,
        summary: &Summary,
        limits: EndLimits,
    ) -> Result<RunEnd, BoxError> {
        // If the database is gone, another file may be at its path; opening it would apply our log to it.
        let others = if is_recorded { self.trials_of_others(trials) } else { Vec::new() };
        let known = [trials, others.as_slice()].concat();
        let subject = self.subject.subject();
        // Trials whose cost is another number took about as long each.
        let is_time = self.subject.objectives().is_none_or(|objectives| objectives.leading().is_time());
        let run_ns = (!is_time).then(|| 1e9 * summary.seconds.run / summary.n_trials.max(1) as f64);
        let contenders = Contenders { subject, trials: &known, imported: &self.earlier.imported, run_ns };
        finals::run(measure, contenders, self.subject.baseline(), limits, self.stop, self.observer)
    }

    /// Result of a run without a winner yet, with its new trials.
    fn tuned(&self, new: &[Trial], summary: Option<&Summary>, wall: &Wall) -> Tuned {
        let found = NewTrials { new, summary, seconds: wall.seconds };
        Tuned {
            peak_gflops: self.peak_gflops,
            emulated: self.subject.is_emulated(),
            db: self.database.path.to_string_lossy().into_owned(),
            ..Tuned::of(self.subject.key(), self.settings, &self.earlier, &found)
        }
    }

    /// Result of a run without new trials, with the known winner.
    fn as_before(&self, known: &Winner, wall: &Wall) -> Tuned {
        let best = Best::of_unnamed_winner(known);
        let best = match self.subject.space().config_from_json(&known.config) {
            Ok(config) => self.describe(best, &config),
            Err(_) => best,
        };
        // Candidates of this machine are verified; imported records say whether they were.
        let verified = known.verified || self.subject.is_verified() && !known.is_imported;
        Tuned { verified, best: Some(best), ..self.tuned(&[], None, wall) }
    }

    /// Adds the throughput to a result, and the form in which users know its configuration.
    fn describe(&self, best: Best, config: &Config) -> Best {
        self.subject.describe(Best { gflops: self.subject.gflops(best.median_ns), ..best }, config)
    }

    /// Winner of this space's race, if it was run here and nothing has been recorded since.
    fn known_winner(&self, store: &Store) -> Result<Option<Winner>, StoreError> {
        let TaskKey { workload, target, template, threads } = self.subject.key();
        match store.best(workload, target, *threads, Some(template), &|_| self.subject.validator())?.0 {
            Some(Recorded::Confirmed(winner)) if store.is_settled(&winner)? => Ok(Some(winner)),
            _ => Ok(None),
        }
    }

    fn winner(&self, finals: &Finals) -> Winner {
        let config = |at: usize| self.subject.space().config_to_json(&finals.ranking[at].config);
        let TaskKey { workload, target, template, threads } = self.subject.key().clone();
        let median_ns = finals.ranking[0].timing.median_ns;
        Winner {
            workload,
            target,
            template,
            threads,
            config: config(0),
            median_ns,
            margin: finals.margin(),
            spread: Some(finals.spread()),
            runner_up: (finals.ranking.len() > 1).then(|| config(1)),
            gflops: self.subject.gflops(median_ns),
            verified: self.subject.is_verified(),
            version: BUILD.to_owned(),
            toolchain: recorder::toolchain(),
            unix_time: since_1970().as_secs(),
            is_imported: false,
        }
    }

    /// Fastest trial, which is the best known result without a race. Imported trials may have been measured
    /// on another machine: they count only if there are no others.
    fn fastest(&self, trials: &[Trial]) -> Option<Best> {
        let is_imported = |trial: &Trial| self.earlier.imported.contains(&trial.config);
        let cost = |trial: &Trial| trial.outcome.cost();
        let timed = trials.iter().filter(|trial| trial.outcome.timing().is_some());
        let fastest = timed.min_by(|a, b| is_imported(a).cmp(&is_imported(b)).then(cost(a).total_cmp(&cost(b))))?;
        let (space, template) = (self.subject.space(), &self.subject.key().template);
        let best = Best::unnamed(template.clone(), space.config_to_json(&fastest.config), cost(fastest));
        let best =
            Best { is_imported: is_imported(fastest), pareto: self.pareto(trials, is_imported(fastest)), ..best };
        Some(self.describe(best, &fastest.config))
    }

    /// Pareto set of the trials of this machine, or of the imported ones; empty for a single objective.
    fn pareto(&self, trials: &[Trial], of_imported: bool) -> Vec<ParetoPoint> {
        let Some(objectives) = self.subject.objectives() else { return Vec::new() };
        let counts = |trial: &&Trial| self.earlier.imported.contains(&trial.config) == of_imported;
        let trials: Vec<&Trial> = trials.iter().filter(counts).collect();
        let (space, subject) = (self.subject.space(), self.subject.subject());
        ParetoPoint::set_of(objectives, trials.iter().map(|trial| trial.outcome.timing()), |at| {
            let config = &trials[at].config;
            (space.config_to_json(config), subject.candidate(config.clone()).steps.to_string())
        })
    }

    /// Trials of the same space that other processes have recorded meanwhile: a winner that did not race
    /// against them must not hide them.
    fn trials_of_others(&self, own: &[Trial]) -> Vec<Trial> {
        let validator = self.subject.validator();
        let recorded = || -> Result<_, Error> {
            let Some(store) = self.database.open_to_read()? else { return Ok(Vec::new()) };
            let mut passed_over = PassedOver::default();
            let found = trials_of(&store, self.subject.key(), &|_| validator.clone(), &mut passed_over);
            found.map_err(|error| self.database.failure(&error))
        };
        let recorded = recorded().unwrap_or_else(|error| {
            self.say(format!("what others have recorded is not known: {error}"));
            Vec::new()
        });
        let own: HashSet<&Config> = own.iter().map(|trial| &trial.config).collect();
        let limits = self.subject.limits();
        let recorded = recorded.iter().filter(|record| !may_do_better(record, &limits));
        let recorded = recorded.filter_map(|record| record.trial(self.subject.space()).ok());
        let others: Vec<Trial> = recorded.filter(|trial| !own.contains(&trial.config)).collect();
        if !others.is_empty() {
            let n_others = count(others.len() as u64, "trial");
            self.say(format!("another process has recorded {n_others} meanwhile"));
        }
        others
    }

    /// Describes, in a line, the largest contradiction between a race and an earlier record of this machine
    /// that noise does not explain. Users' programs may have changed; our own kernels have not.
    fn contradiction(&self, finals: &Finals) -> Option<String> {
        let metric = self.subject.objectives()?.leading();
        let show = |ns: f64| if metric.is_time() { duration(ns) } else { digits(metric.value(ns)) };
        let earlier = self.earlier.trials.iter().filter(|trial| !self.earlier.imported.contains(&trial.config));
        let known: HashMap<&Config, Timing> =
            earlier.filter_map(|trial| Some((&trial.config, *trial.outcome.timing()?))).collect();
        let off = finals.ranking.iter().filter_map(|Leader { config, timing, .. }| {
            let recorded = known.get(config)?;
            let factor = (timing.median_ns / recorded.median_ns).max(recorded.median_ns / timing.median_ns);
            let noise = NOISE_OF_RECORDS + recorded.spread + timing.spread;
            (factor - 1.0 > noise).then_some((factor, recorded.median_ns, timing.median_ns))
        });
        let (_, recorded_ns, raced_ns) = off.max_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
        Some(format!("the race contradicts the records: {} where {} is recorded", show(raced_ns), show(recorded_ns)))
    }
}
