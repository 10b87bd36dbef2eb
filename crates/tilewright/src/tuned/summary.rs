//! Runs in words, as the command shows them.

use std::fmt;
use std::time::Duration;

use tilewright_ir::op::Workload;
use tilewright_search::Ended;
use tilewright_tune::TaskKey;

use super::{Race, Tuned, WallSeconds};
use crate::best::{Best, gflops};
use crate::error::{Error, one_line};
use crate::observer::{Begin, Plan};
use crate::run::finals::Untuned;
use crate::run::together::{TunedMany, Turned};
use crate::words::{count, digits, duration, errors_text, grouped, percent, table};

/// Seconds of a run that is announced as slow.
const SLOW_RUN_S: f64 = 0.1;

impl fmt::Display for Plan {
    /// Writes the times that the parts of the run may take.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
        let mut parts = Vec::new();
        if let Some((start_s, run_s)) = self.start_and_run_s {
            parts.push(format!("start: about {start_s:.1} s"));
            if run_s >= SLOW_RUN_S {
                parts.push(format!("first kernel: some {run_s:.1} s a run"));
            }
        }
        parts.push(match (self.time, self.most_trials) {
            (Some(time), _) => format!("search: {}", seconds(time)),
            (None, trials) => format!("search: until there are {}", count(trials.unwrap_or(0), "trial")),
        });
        if let Some(limits) = self.limits {
            parts.push(format!("race: at most {}", seconds(limits.race)));
            parts.push(format!("untuned program: at most {}", seconds(limits.untuned)));
        }
        f.write_str(&parts.join("; "))
    }
}

/// Reason why a fastest trial was not raced.
fn why_not_raced(best: &Best, may_race: bool) -> &'static str {
    match (best.is_imported, may_race) {
        (true, _) => "imported, and not measured here",
        (false, true) => "one trial, the time was too short for a race",
        (false, false) => "one trial, not raced",
    }
}

impl Begin {
    /// Lines on the search, the space, and the database.
    pub fn lines(&self, search: &str, seed: u64) -> Vec<String> {
        let TaskKey { workload, target, template, threads } = &self.key;
        let threads = count(*threads, "thread");
        let space = count(self.space_size, "configuration");
        let there = match self.n_earlier {
            0 => String::new(),
            n => format!(", where {} of earlier runs are", count(n, "trial")),
        };
        let recording = match self.is_emulated {
            true => "the device is emulated: candidates are verified, and nothing is timed or recorded".to_owned(),
            false => format!("recording to {}{there}", self.database),
        };
        let mut lines = vec![
            format!("{workload} on {target}, {threads}: template {template}, {space}, search {search}, seed {seed}"),
            recording,
        ];
        if let Some(time) = self.default_time {
            lines.push(format!("searching for {} s (choose with --time or --trials)", time.as_secs()));
        }
        lines
    }
}

impl Turned {
    /// Summary of all tasks after a turn, in a line; `labels` name the tasks.
    pub fn line(&self, labels: &[String]) -> String {
        let whole = match self.whole_ns {
            Some(ns) => format!("together {}", duration(ns)),
            None => format!("{} of {} measured", self.n_known, labels.len()),
        };
        let best = self.best_ns.map_or("nothing valid yet".to_owned(), duration);
        let (n_trials, left) = (grouped(self.n_trials), self.left.as_secs_f64());
        format!("{n_trials} trials · {left:.0} s left · {whole} · {} {best}", labels[self.at])
    }
}

impl Tuned {
    /// The result in lines: the winner, by how much, against what, where the time went and where records are.
    /// `may_race` says whether a race was wanted.
    pub fn summary(&self, workload: &Workload, may_race: bool) -> String {
        let title = format!("{} on {}, {}", self.workload, self.target, count(self.threads, "thread"));
        if self.emulated && self.any_right {
            let n_right = self.trials - self.errors.values().sum::<u64>();
            let of = count(self.trials, "candidate");
            let ending = self.ending();
            return format!("{title}\nemulated {n_right} of {of} gave the right answer; none was timed\n{ending}");
        }
        let Some(best) = &self.best else { return "interrupted before a candidate was measured".to_owned() };
        let speed = format!("{} GFLOP/s, {}", digits(best.gflops), duration(best.median_ns));
        match &self.race {
            Some(race) => format!("{title}\nwinner   {speed}{}{}", self.raced(workload, best, race), self.ending()),
            None if self.ended.is_none() => {
                let ahead = best.ahead(None).map_or(String::new(), |ahead| format!("margin   {ahead}\n"));
                format!("{title}\nwinner   {speed}\n{ahead}config   {}", best.config)
            }
            None => {
                let config = &best.config;
                let why = why_not_raced(best, may_race);
                format!("{title}\nfastest  {speed}: {why}\nconfig   {config}\n{}", self.ending())
            }
        }
    }

    /// Summary of a user's command or kernel; `show` puts the time of a run into words, and `may_race` tells
    /// whether a race was wanted.
    pub fn own_summary(&self, show: &dyn Fn(f64) -> String, may_race: bool) -> String {
        let mut text = match &self.best {
            None => "interrupted before a candidate was measured\n".to_owned(),
            Some(best) => {
                let threads = count(self.threads, "thread");
                let is_winner = self.race.is_some() || self.ended.is_none();
                let what = if is_winner { "winner  " } else { "fastest " };
                let margin = match (best.ahead(self.race.as_ref().map(|race| race.n_leaders)), &self.race) {
                    (Some(ahead), _) => format!("\nmargin   {ahead}"),
                    (None, Some(_)) => "\nmargin   no other candidate came near".to_owned(),
                    (None, None) if is_winner => String::new(),
                    (None, None) => format!(": {}", why_not_raced(best, may_race)),
                };
                let mut text = format!(
                    "{} on {}, {threads}\n{what} {}{margin}\nconfig   {}\n",
                    self.workload,
                    self.target,
                    show(best.median_ns),
                    best.config
                );
                for line in best.commands.iter().flat_map(|commands| commands.lines()) {
                    let (what, command) = line.split_once(' ').unwrap_or(("", line));
                    text += &format!("{what:<8} {command}\n");
                }
                text
            }
        };
        if !self.errors.is_empty() {
            text += &format!("errors   {}\n", errors_text(&self.errors));
        }
        let of = &self.seconds_in;
        text += &format!(
            "search   {} ({} trials/s): proposals {:.1} s, build {:.1} s on all threads, run {:.1} s, check {:.1} s\n",
            count(self.new_trials, "trial"),
            digits(self.trials_per_second),
            of.search,
            of.build,
            of.run,
            of.verify
        );
        if self.recorded {
            let (database, workload) = (one_line(&self.db), &self.workload);
            text += &format!("records  {database} (`tilewright best {workload}` shows the best)\n");
        }
        text
    }

    /// Remarks on a run, besides its result.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if let Some(option) = self.option_to_raise().filter(|_| self.any_right) {
            remarks.push(format!("most candidates came to the limit of {option}: raise it, and they are tried again"));
        }
        if self.ended == Some(Ended::Exhausted) {
            remarks.push("the whole space has been measured".to_owned());
        }
        remarks
    }

    /// Lines on the race.
    fn raced(&self, workload: &Workload, best: &Best, race: &Race) -> String {
        let of_peak = self.peak_gflops.map_or(String::new(), |peak| {
            format!(", {} of the measured peak of {}", percent(best.gflops / peak), digits(peak))
        });
        let mut text = format!(
            "{of_peak}; verified against the reference{}\n",
            race.relative_error.map_or(String::new(), |e| format!(", relative error {e:.1e}"))
        );
        text += &match best.ahead(Some(race.n_leaders)) {
            None => "margin   no other candidate came near\n".to_owned(),
            Some(ahead) => format!("margin   {ahead}\n"),
        };
        text += &match race.untuned {
            Untuned::Measured { ns } => format!(
                "untuned  {} GFLOP/s, {}: the winner is {} times as fast\n",
                digits(gflops(workload, ns)),
                duration(ns),
                digits(ns / best.median_ns)
            ),
            Untuned::SlowerThan { limit } => format!(
                "untuned  > {} s: the winner is more than {} times as fast\n",
                limit.as_secs_f64(),
                digits(limit.as_nanos() as f64 / best.median_ns)
            ),
            Untuned::Failed => "untuned  not measured\n".to_owned(),
        };
        text + &format!("config   {}\n", best.config)
    }

    /// Last lines of each result: failures, the time by phase, and the database.
    fn ending(&self) -> String {
        let errors = match self.errors.is_empty() {
            true => String::new(),
            false => format!("errors   {}\n", errors_text(&self.errors)),
        };
        let of = &self.seconds_in;
        let WallSeconds { start, search, race, untuned, end, total } = self.wall_seconds;
        let mut text = format!(
            "{errors}time     {total:.1} s: start {start:.1} s, search {search:.1} s, race {race:.1} s, \
             untuned {untuned:.1} s, end {end:.1} s\n\
             search   {} ({} trials/s): proposals {:.1} s, build {:.1} s on all workers, run {:.1} s, verify {:.1} s\n",
            count(self.new_trials, "trial"),
            digits(self.trials_per_second),
            of.search,
            of.build,
            of.run,
            of.verify,
        );
        if self.recorded && !self.emulated {
            text += &format!("records  {}\n", one_line(&self.db));
        }
        text
    }
}

impl TunedMany {
    /// Summary as a table, with the time of the whole; `labels` name the tasks.
    pub fn summary(&self, labels: &[String]) -> String {
        let mut rows = vec![["workload", "GFLOP/s", "time", "share", "turns"].map(str::to_owned).to_vec()];
        for (task, label) in self.workloads.iter().zip(labels) {
            let best = task.tuned.best.as_ref();
            rows.push(vec![
                label.clone(),
                best.map_or("none".to_owned(), |best| digits(best.gflops)),
                best.map_or(String::new(), |best| duration(best.median_ns)),
                task.share.map_or(String::new(), percent),
                task.turns.to_string(),
            ]);
        }
        let whole = |ms: Option<f64>| ms.map_or("unknown".to_owned(), |ms| duration(ms * 1e6));
        format!(
            "{}together {}, before {}; {:.1} s{}\n",
            table(&rows),
            whole(self.whole_ms),
            whole(self.whole_ms_before),
            self.seconds,
            if self.ended_early { ": more is not expected to be worth its time" } else { "" }
        )
    }

    /// The first workload that lost records, or else that has no winner where it should have one; and why.
    pub fn failure(&mut self) -> Option<(String, Error)> {
        let lost =
            self.workloads.iter_mut().find_map(|task| Some((task.tuned.workload.clone(), task.tuned.lost.take()?)));
        let without = || {
            let task = self.workloads.iter().find(|task| task.tuned.best.is_none() && !self.interrupted)?;
            Some((task.tuned.workload.clone(), task.tuned.failure()?))
        };
        lost.or_else(without)
    }
}
