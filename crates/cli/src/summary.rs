//! Descriptions of runs, as shown by the command.

use tilewright::format::{count, digits, duration, errors_text, grouped, percent, table};
use tilewright::{
    Begin, Best, ParetoPoint, Race, Tuned, TunedMany, TurnEnd, Untuned, WallSeconds, Workload, gflops, one_line,
};
use tilewright_search::Ended;
use tilewright_tune::TaskKey;

use crate::error::option;

/// Maximum number of characters of a failed candidate's message.
const MOST_EXAMPLE: usize = 300;

/// Reason why a fastest trial was not raced.
fn why_not_raced(best: &Best, may_race: bool) -> &'static str {
    match (best.is_imported, may_race) {
        (true, _) => "imported, and not measured here",
        (false, true) => "one trial, the time was too short for a race",
        (false, false) => "one trial, not raced",
    }
}

/// Returns lines on the search, the space, and the database.
pub fn beginning(begin: &Begin, search: &str, seed: u64) -> Vec<String> {
    let TaskKey { workload, target, template, threads } = &begin.key;
    let threads = count(*threads, "thread");
    let space = count(begin.space_size, "configuration");
    let there = match begin.n_earlier {
        0 => String::new(),
        n => format!(", where {} of earlier runs are", count(n, "trial")),
    };
    let recording = match begin.is_emulated {
        true => "the device is emulated: candidates are verified, and nothing is timed or recorded".to_owned(),
        false => format!("recording to {}{there}", begin.database),
    };
    let mut lines = vec![
        format!("{workload} on {target}, {threads}: template {template}, {space}, search {search}, seed {seed}"),
        recording,
    ];
    if let Some(time) = begin.default_time {
        lines.push(format!("searching for {} s (choose with --time or --trials)", time.as_secs()));
    }
    lines
}

/// Summarises all tasks after a turn, in a line; `labels` name the tasks.
pub fn turn(turned: &TurnEnd, labels: &[String]) -> String {
    let whole = match turned.whole_ns {
        Some(ns) => format!("together {}", duration(ns)),
        None => format!("{} of {} measured", turned.n_known, labels.len()),
    };
    let best = turned.best_ns.map_or("nothing valid yet".to_owned(), duration);
    let (n_trials, left) = (grouped(turned.n_trials), turned.left.as_secs_f64());
    format!("{n_trials} trials · {left:.0} s left · {whole} · {} {best}", labels[turned.at])
}

/// Failure of a run, an interrupted one without a result included.
pub fn failure(tuned: &Tuned) -> Option<anyhow::Error> {
    let has_result = tuned.best.is_some() || tuned.emulated && tuned.any_right;
    match tuned.failure() {
        Some(failure) => Some(failure.into()),
        None if has_result => None,
        None => Some(anyhow::anyhow!("interrupted before a candidate gave a right answer")),
    }
}

/// Summarises a result in lines: the winner, its margin and its competitors, the time by phase and the place
/// of the records. `may_race` says whether a race was requested.
pub fn tuned(tuned: &Tuned, workload: &Workload, may_race: bool) -> String {
    let title = format!("{} on {}, {}", tuned.workload, tuned.target, count(tuned.threads, "thread"));
    if tuned.emulated && tuned.any_right {
        let n_right = tuned.trials - tuned.errors.values().sum::<u64>();
        let of = count(tuned.trials, "candidate");
        let ending = ending(tuned);
        return format!("{title}\nemulated {n_right} of {of} gave the right answer; none was timed\n{ending}");
    }
    let Some(best) = &tuned.best else { return String::new() };
    let speed = format!("{} GFLOP/s, {}", digits(best.gflops), duration(best.median_ns));
    match &tuned.race {
        Some(race) => format!("{title}\nwinner   {speed}{}{}", raced(tuned, workload, best, race), ending(tuned)),
        None if tuned.ended.is_none() => {
            let ahead = best.ahead(None).map_or(String::new(), |ahead| format!("margin   {ahead}\n"));
            format!("{title}\nwinner   {speed}\n{ahead}config   {}", best.config)
        }
        None => {
            let config = &best.config;
            let why = why_not_raced(best, may_race);
            format!("{title}\nfastest  {speed}: {why}\nconfig   {config}\n{}", ending(tuned))
        }
    }
}

/// Summarises the result of a user's command or kernel; `show` formats the time of a run, and `may_race` says
/// whether a race was requested.
pub fn own(tuned: &Tuned, show: &dyn Fn(f64) -> String, may_race: bool) -> String {
    let mut text = match &tuned.best {
        None => String::new(),
        Some(best) => {
            let threads = count(tuned.threads, "thread");
            let is_winner = tuned.race.is_some() || tuned.ended.is_none();
            let what = if is_winner { "winner  " } else { "fastest " };
            let margin = match (best.ahead(tuned.race.as_ref().map(|race| race.n_leaders)), &tuned.race) {
                (Some(ahead), _) => format!("\nmargin   {ahead}"),
                (None, Some(_)) => "\nmargin   no other candidate came near".to_owned(),
                (None, None) if is_winner => String::new(),
                (None, None) => format!(": {}", why_not_raced(best, may_race)),
            };
            let mut text = format!(
                "{} on {}, {threads}\n{what} {}{margin}\nconfig   {}\n",
                tuned.workload,
                tuned.target,
                show(best.median_ns),
                best.config
            );
            for line in best.commands.iter().flat_map(|commands| commands.lines()) {
                let (what, command) = line.split_once(' ').unwrap_or(("", line));
                text += &format!("{what:<8} {command}\n");
            }
            text += &pareto(&best.pareto);
            text
        }
    };
    text += &errors(tuned);
    let of = &tuned.seconds_in;
    text += &format!(
        "search   {} ({} trials/s): proposals {:.1} s, build {:.1} s on all threads, run {:.1} s, check {:.1} s\n",
        count(tuned.new_trials, "trial"),
        digits(tuned.trials_per_second),
        of.search,
        of.build,
        of.run,
        of.verify
    );
    if tuned.recorded {
        let (database, workload) = (one_line(&tuned.db), &tuned.workload);
        text += &format!("records  {database} (`tilewright best {workload}` shows the best)\n");
    }
    text
}

/// Describes a Pareto set in lines; empty if there is none.
pub fn pareto(set: &[ParetoPoint]) -> String {
    match set.len() as u64 {
        0 => String::new(),
        n => {
            let whom = "no other is as good by every metric and better by one";
            format!("pareto   {}: {whom}\n{}", count(n, "configuration"), ParetoPoint::table(set))
        }
    }
}

/// Lists remarks on a run, besides its result.
pub fn remarks(tuned: &Tuned) -> Vec<String> {
    let mut remarks = Vec::new();
    if let Some(option) = tuned.limit_to_raise().map(option).filter(|_| tuned.any_right) {
        remarks.push(format!("most candidates came to the limit of {option}: raise it, and they are tried again"));
    }
    if tuned.ended == Some(Ended::Exhausted) {
        remarks.push("the whole space has been measured".to_owned());
    }
    if tuned.ended == Some(Ended::LittleGain) {
        remarks.push("the search ended: the next minute was expected to gain less than --stop-below".to_owned());
    }
    remarks
}

/// Describes the race in lines.
fn raced(tuned: &Tuned, workload: &Workload, best: &Best, race: &Race) -> String {
    let of_peak = tuned.peak_gflops.map_or(String::new(), |peak| {
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
        Untuned::Winner { .. } => "untuned  the winner itself: nothing was faster than the first guess\n".to_owned(),
        Untuned::SlowerThan { limit } => format!(
            "untuned  > {} s: the winner is more than {} times as fast\n",
            limit.as_secs_f64(),
            digits(limit.as_nanos() as f64 / best.median_ns)
        ),
        Untuned::Failed => "untuned  not measured\n".to_owned(),
    };
    text + &format!("config   {}\n", best.config)
}

/// Describes failed candidates in a line, with the message of one; empty if there are none.
fn errors(tuned: &Tuned) -> String {
    if tuned.errors.is_empty() {
        return String::new();
    }
    let example: String = one_line(&tuned.example_text()).chars().take(MOST_EXAMPLE).collect();
    format!("errors   {}{example}\n", errors_text(&tuned.errors))
}

/// Returns the last lines of each result: failures, the time by phase, and the database.
fn ending(tuned: &Tuned) -> String {
    let errors = errors(tuned);
    let of = &tuned.seconds_in;
    let WallSeconds { start, search, race, untuned, end, total } = tuned.wall_seconds;
    let mut text = format!(
        "{errors}time     {total:.1} s: start {start:.1} s, search {search:.1} s, race {race:.1} s, \
             untuned {untuned:.1} s, end {end:.1} s\n\
             search   {} ({} trials/s): proposals {:.1} s, build {:.1} s on all workers, run {:.1} s, verify {:.1} s\n",
        count(tuned.new_trials, "trial"),
        digits(tuned.trials_per_second),
        of.search,
        of.build,
        of.run,
        of.verify,
    );
    if tuned.recorded && !tuned.emulated {
        text += &format!("records  {}\n", one_line(&tuned.db));
    }
    text
}

/// Summarises tasks as a table, with the total time; `labels` name the tasks.
pub fn together(tuned: &TunedMany, labels: &[String]) -> String {
    let mut rows = vec![["workload", "GFLOP/s", "time", "share", "turns"].map(str::to_owned).to_vec()];
    for (task, label) in tuned.workloads.iter().zip(labels) {
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
    let not_begun = match tuned.n_not_begun() as u64 {
        0 => String::new(),
        n => format!("{} had no turn: the time was up (run it again, or give more --time)\n", count(n, "workload")),
    };
    format!(
        "{}together {}, before {}; {:.1} s{}\n{not_begun}",
        table(&rows),
        whole(tuned.whole_ms),
        whole(tuned.whole_ms_before),
        tuned.seconds,
        if tuned.ended_early { ": more is not expected to be worth its time" } else { "" }
    )
}
