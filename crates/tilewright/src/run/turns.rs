//! Turns of tasks that share time: the next one goes to the task from which the total is expected to gain
//! most.
//!
//! This module is the rule alone: it receives the results of each task's turns, and reads no clock.

use std::time::Duration;

/// Usual length of a turn, long enough to make the cost of switching tasks small.
pub const TURN: Duration = Duration::from_secs(2);

/// Weight of the last turns' gain in the expected gain of a turn; the rest is the gain of a model in which
/// the excess over the bound falls as one over the turns spent.
const OF_LAST: f64 = 0.2;
/// Number of last turns that count.
const LAST_TURNS: f64 = 3.0;
/// Minimum relative gain of the total by a turn of each task; below it, turns are not worth their time.
const LEAST_GAIN: f64 = 0.002;
/// Number of turns after which a task without a valid trial gets no further turn.
const TURNS_FOR_A_RESULT: f64 = 3.0;

/// Minimum number of trials, and of batches of trials, that a turn has time for: a trial that is not measured
/// at the end of a turn is repeated in the next one, and a whole batch may be built before any of it is
/// measured.
const TRIALS_PER_TURN: f64 = 4.0;
const BATCHES_PER_TURN: f64 = 2.0;

/// Seconds per trial of a task; `None` if unknown.
#[derive(Debug, Clone, Copy)]
pub struct TrialRate(Option<f64>);

impl TrialRate {
    /// Rate of `n_trials` in `seconds`; without a trial the next turn is twice as long.
    pub fn of(seconds: f64, n_trials: usize) -> TrialRate {
        let trial = if n_trials == 0 { 2.0 * seconds / TRIALS_PER_TURN } else { seconds / n_trials as f64 };
        TrialRate(Some(trial).filter(|trial| *trial > 0.0))
    }

    /// Minimum length of a turn.
    pub fn least_turn(self) -> Duration {
        Duration::from_secs_f64(TRIALS_PER_TURN * self.0.unwrap_or(0.0))
    }

    /// Maximum batch size in a turn of this length.
    pub fn most_at_a_time(self, turn: Duration) -> usize {
        self.0.map_or(usize::MAX, |trial| (turn.as_secs_f64() / trial / BATCHES_PER_TURN) as usize).max(1)
    }
}

/// History of a task's turns.
#[derive(Debug, Clone)]
pub struct History {
    weight: f64,
    /// Lower bound on the task's time in nanoseconds.
    bound_ns: f64,
    /// Seconds spent until each new best, and its time in nanoseconds.
    bests: Vec<(f64, f64)>,
    seconds: f64,
    is_over: bool,
}

impl History {
    /// Makes the history of a task with this weight and lower bound on its time.
    pub fn new(weight: f64, bound_ns: f64) -> History {
        History { weight, bound_ns, bests: Vec::new(), seconds: 0.0, is_over: false }
    }

    /// Adds a turn of `seconds`, after which `best_ns` is the task's best.
    pub fn spend(&mut self, seconds: f64, best_ns: Option<f64>) {
        self.seconds += seconds;
        if let Some(ns) = best_ns.filter(|ns| self.best_ns().is_none_or(|best| *ns < best)) {
            self.bests.push((self.seconds, ns));
        }
    }

    /// Marks the task as exhausted.
    pub fn end(&mut self) {
        self.is_over = true;
    }

    /// Time of the task's best in nanoseconds, if any.
    pub fn best_ns(&self) -> Option<f64> {
        self.bests.last().map(|(_, ns)| *ns)
    }

    /// Contribution to the weighted total, in nanoseconds; `None` without a result.
    pub fn share_ns(&self) -> Option<f64> {
        self.best_ns().map(|ns| self.weight * ns)
    }

    /// Lower bound on the task's time, in nanoseconds.
    pub fn bound_ns(&self) -> f64 {
        self.bound_ns
    }

    /// Whether the task has had no turn yet.
    pub fn is_new(&self) -> bool {
        self.seconds == 0.0 && !self.is_over
    }

    /// Best after this many seconds, or the first one.
    fn best_after(&self, seconds: f64) -> Option<f64> {
        let after = self.bests.iter().rev().find(|(at, _)| *at <= seconds);
        after.or(self.bests.first()).map(|(_, ns)| *ns)
    }

    /// Expected gain of the total by a turn, in nanoseconds; infinite without a result.
    ///
    /// # Source
    /// TVM's task schedulers (auto_scheduler/task_scheduler.py,
    /// meta_schedule/task_scheduler/gradient_based.cc), which count rounds of a fixed number of trials, and
    /// let times fall towards zero; this rule counts seconds, and lets times fall towards a bound.
    fn gain_ns(&self) -> f64 {
        if self.is_over {
            return 0.0;
        }
        let turn = TURN.as_secs_f64();
        let n_turns = self.seconds / turn;
        let Some(best_ns) = self.best_ns() else {
            return if n_turns < TURNS_FOR_A_RESULT { f64::INFINITY } else { 0.0 };
        };
        let before = self.best_after(self.seconds - LAST_TURNS * turn).expect("it has a best");
        let last = (before - best_ns) / LAST_TURNS;
        let above_ns = best_ns - self.bound_ns;
        let next = above_ns / n_turns.max(1.0);
        self.weight * (OF_LAST * last + (1.0 - OF_LAST) * next).min(above_ns).max(0.0)
    }
}

/// Chooses the task of the next turn; `None` if no turn is expected to pay off. Each task has a first turn
/// before any has a second, larger tasks first as far as their size is known.
pub fn next(histories: &[&History]) -> Option<usize> {
    let new = histories.iter().enumerate().filter(|(_, history)| history.is_new());
    let least_ns = |history: &History| history.weight * history.bound_ns;
    if let Some((at, _)) = new.max_by(|(_, a), (_, b)| least_ns(a).total_cmp(&least_ns(b))) {
        return Some(at);
    }
    let gains_ns: Vec<f64> = histories.iter().map(|history| history.gain_ns()).collect();
    let (at, _) = gains_ns.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let known_ns: f64 = histories.iter().filter_map(|history| history.share_ns()).sum();
    (gains_ns.iter().sum::<f64>() > LEAST_GAIN * known_ns).then_some(at)
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    /// Simulated task: its best after a time, in steps.
    struct Simulated {
        weight: f64,
        bound_ns: f64,
        steps: Vec<(f64, f64)>,
    }

    impl Simulated {
        /// Makes a random task whose times come near the bound, or nearer with time, in a few steps sooner or
        /// later.
        fn new(rng: &mut Xoshiro256PlusPlus) -> Simulated {
            let bound_ns = 10f64.powf(rng.random_range(4.0..6.0));
            let mut ns = bound_ns * rng.random_range(1.05..4.0);
            let mut steps = vec![(0.0, ns)];
            let end_ns = bound_ns * rng.random_range(1.0..1.5);
            let mut at = 0.0;
            while steps.len() < 8 && ns > end_ns {
                at += 10f64.powf(rng.random_range(-1.0..1.0));
                ns -= rng.random_range(0.2..0.8) * (ns - end_ns);
                steps.push((at, ns));
            }
            Simulated { weight: rng.random_range(1..5).into(), bound_ns, steps }
        }

        fn best_after(&self, seconds: f64) -> f64 {
            self.steps.iter().rev().find(|(at, _)| *at <= seconds).expect("the first step is at 0").1
        }
    }

    fn tasks(seed: u64, n: usize) -> Vec<Simulated> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        (0..n).map(|_| Simulated::new(&mut rng)).collect()
    }

    /// Simulates turns for this time, each given to the task that `choose` returns; returns the total and the
    /// number of turns of each task. Switching tasks takes a while.
    fn play(
        tasks: &[Simulated],
        time_s: f64,
        choose: impl Fn(&[&History], &[u64]) -> Option<usize>,
    ) -> (f64, Vec<u64>) {
        const SWITCH_S: f64 = 0.06;
        let mut histories: Vec<History> = tasks.iter().map(|task| History::new(task.weight, task.bound_ns)).collect();
        let mut turns = vec![0; tasks.len()];
        let mut seconds = 0.0;
        while seconds < time_s {
            let Some(at) = choose(&histories.iter().collect::<Vec<_>>(), &turns) else { break };
            let history = &mut histories[at];
            let turn = if history.is_new() { 0.25 } else { TURN.as_secs_f64() }.min(time_s - seconds);
            history.spend(turn, Some(tasks[at].best_after(history.seconds + turn)));
            seconds += turn + SWITCH_S;
            turns[at] += 1;
        }
        (histories.iter().map(|history| history.share_ns().unwrap()).sum(), turns)
    }

    /// Number of trials of each of the first turns if each trial takes this many seconds, nothing is measured
    /// before a whole batch is built, and batches of 16 are requested.
    fn trials_of_turns(trial_s: f64) -> Vec<usize> {
        let mut trial_rate = TrialRate::of(0.0, 0);
        let turn = |_| {
            let turn = TURN.max(trial_rate.least_turn());
            let batch = trial_rate.most_at_a_time(turn).min(16);
            let n_trials = (turn.as_secs_f64() / trial_s) as usize / batch * batch;
            trial_rate = TrialRate::of(turn.as_secs_f64(), n_trials);
            n_trials
        };
        (0..6).map(turn).collect()
    }

    #[test]
    fn turns_are_long_enough_for_slow_trials() {
        assert_eq!(trials_of_turns(0.02), [96, 96, 96, 96, 96, 96]);
        assert_eq!(trials_of_turns(0.5), [0, 8, 4, 4, 4, 4]);
        assert_eq!(trials_of_turns(3.0), [0, 0, 2, 4, 4, 4]);
    }

    #[test]
    fn the_whole_is_ahead_of_equal_shares_and_of_turns_in_a_row() {
        let (mut of_equal, mut of_row) = (Vec::new(), Vec::new());
        for seed in 0..10 {
            let tasks = tasks(seed, 25);
            let time_s = 4.0 * tasks.len() as f64;
            let (by_gain, turns) = play(&tasks, time_s, |histories, _| next(histories));
            assert!(turns.iter().all(|n| *n > 0), "each has a turn: {turns:?}");
            let (in_a_row, _) = play(&tasks, time_s, |_, turns| (0..turns.len()).min_by_key(|at| turns[*at]));
            let equal: f64 = tasks.iter().map(|task| task.weight * task.best_after(4.0)).sum();
            of_equal.push(by_gain / equal);
            of_row.push(by_gain / in_a_row);
        }
        for of_other in [of_equal, of_row] {
            let mean = of_other.iter().sum::<f64>() / of_other.len() as f64;
            assert!(mean < 0.97 && of_other.iter().all(|ratio| *ratio < 1.0), "{of_other:?}");
        }
    }

    #[test]
    fn ten_minutes_come_near_to_a_minute_for_each() {
        // A seventh of the time is reserved for races.
        const SEARCH_S: f64 = 510.0;
        // With 50 tasks, each has a sixth of a minute on average; an oracle could reach 1.002.
        for (n_tasks, most) in [(25, 1.015), (50, 1.03)] {
            let ratios = (0..10).map(|seed| {
                let tasks = tasks(seed, n_tasks);
                let (by_gain, _) = play(&tasks, SEARCH_S, |histories, _| next(histories));
                let minutes: f64 = tasks.iter().map(|task| task.weight * task.best_after(60.0)).sum();
                by_gain / minutes
            });
            let ratios: Vec<f64> = ratios.collect();
            let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
            assert!(mean < most, "{n_tasks} tasks: {ratios:?}");
        }
    }

    #[test]
    fn who_is_at_its_bound_has_no_turn_and_where_all_are_it_ends() {
        let history = |bests: &[f64]| {
            let mut history = History::new(1.0, 100.0);
            bests.iter().for_each(|ns| history.spend(2.0, Some(*ns)));
            history
        };
        let (at_bound, near, over) = (history(&[150.0, 99.0]), history(&[130.0, 105.0]), {
            let mut over = history(&[500.0]);
            over.end();
            over
        });
        assert_eq!(next(&[&at_bound, &near, &over]), Some(1));
        assert_eq!(next(&[&at_bound, &over]), None);
        assert_eq!(next(&[]), None);
        // The expected gain falls with turns that gained nothing.
        let mut tried = history(&[400.0]);
        let n_turns = (1..1000).find(|_| {
            tried.spend(2.0, Some(400.0));
            next(&[&tried]).is_none()
        });
        assert!(n_turns.is_some_and(|n| n > 100), "{n_turns:?}");
    }

    #[test]
    fn who_is_new_comes_first_and_who_had_many_turns_last() {
        let history = |weight, turns: u32| {
            let mut history = History::new(weight, 1.0);
            (0..turns).for_each(|_| history.spend(2.0, Some(1000.0)));
            history
        };
        let (new, some, many, heavy) = (history(1.0, 0), history(1.0, 5), history(1.0, 20), history(8.0, 20));
        assert_eq!(next(&[&heavy, &new, &some, &many]), Some(1));
        assert_eq!(next(&[&many, &some]), Some(1));
        assert_eq!(next(&[&some, &heavy]), Some(1));
        // A task that has just gained is worth another turn.
        let mut gaining = history(1.0, 5);
        gaining.spend(2.0, Some(500.0));
        assert_eq!(next(&[&some, &gaining]), Some(0), "half as long, it gains half as much …");
        let mut gaining = history(1.0, 19);
        gaining.spend(2.0, Some(700.0));
        assert_eq!(next(&[&many, &gaining]), Some(1));
    }

    #[test]
    fn who_has_no_result_has_some_turns_and_not_all() {
        let (mut failing, mut other) = (History::new(1.0, 1.0), History::new(1.0, 1.0));
        other.spend(2.0, Some(1000.0));
        failing.spend(0.25, None);
        let n_turns = (0..100).take_while(|_| {
            next(&[&other, &failing]) == Some(1) && {
                failing.spend(2.0, None);
                true
            }
        });
        assert_eq!(n_turns.count(), 3);
        assert_eq!(failing.share_ns(), None);
    }
}
