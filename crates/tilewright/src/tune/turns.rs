//! Whose turn it is among tasks that share time: the one by which the whole is expected to gain most.
//!
//! This is the rule alone: it is told what the turns of each task came to, and knows no clock.

use std::time::Duration;

/// How long a turn is, as a rule: long enough that going from one task to another costs little beside it.
pub const TURN: Duration = Duration::from_secs(2);

/// How much of what is expected of a turn is what the last ones brought; the rest is that a time falls as one
/// over the turns spent on it.
const OF_LAST: f64 = 0.2;
/// How many turns are the last ones.
const LAST_TURNS: f64 = 3.0;
/// A turn that gains the whole less than this is not worth its time.
const LEAST_GAIN: f64 = 0.002;
/// A task that has no valid trial after so many turns has had its chance.
const TURNS_FOR_A_RESULT: f64 = 3.0;

/// How a task has done so far.
#[derive(Debug, Clone)]
pub struct Course {
    weight: f64,
    /// No kernel is as fast, in nanoseconds.
    bound_ns: f64,
    /// Seconds spent until a new best, and its time in nanoseconds.
    bests: Vec<(f64, f64)>,
    seconds: f64,
    is_over: bool,
}

impl Course {
    /// A task that runs so often in the whole, and takes longer than this.
    pub fn new(weight: f64, bound_ns: f64) -> Course {
        Course { weight, bound_ns, bests: Vec::new(), seconds: 0.0, is_over: false }
    }

    /// So many seconds more were spent on it, and its best is this now.
    pub fn spend(&mut self, seconds: f64, best_ns: Option<f64>) {
        self.seconds += seconds;
        if let Some(ns) = best_ns.filter(|ns| self.best_ns().is_none_or(|best| *ns < best)) {
            self.bests.push((self.seconds, ns));
        }
    }

    /// Nothing is left to be measured of it.
    pub fn end(&mut self) {
        self.is_over = true;
    }

    /// The time of its best in nanoseconds.
    pub fn best_ns(&self) -> Option<f64> {
        self.bests.last().map(|(_, ns)| *ns)
    }

    /// What it adds to the whole, in nanoseconds.
    pub fn share_ns(&self) -> Option<f64> {
        self.best_ns().map(|ns| self.weight * ns)
    }

    /// What no kernel of it falls below, in nanoseconds.
    pub fn bound_ns(&self) -> f64 {
        self.bound_ns
    }

    /// Whether it waits for its first turn.
    pub fn is_new(&self) -> bool {
        self.seconds == 0.0 && !self.is_over
    }

    /// Its best after so many seconds, or the first one.
    fn best_after(&self, seconds: f64) -> Option<f64> {
        let after = self.bests.iter().rev().find(|(at, _)| *at <= seconds);
        after.or(self.bests.first()).map(|(_, ns)| *ns)
    }

    /// By how many nanoseconds the whole is expected to gain by a turn; infinite where there is no result yet.
    ///
    /// # Source
    /// TVM's task schedulers (auto_scheduler/task_scheduler.py, meta_schedule/task_scheduler/gradient_based.cc),
    /// which count rounds of so many trials; this counts seconds, and knows a bound.
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
        let next = best_ns / n_turns.max(1.0);
        self.weight * (OF_LAST * last + (1.0 - OF_LAST) * next).min(best_ns - self.bound_ns).max(0.0)
    }
}

/// The task whose turn it is; none where no turn is worth its time. Each has one before any has another.
pub fn next(courses: &[&Course]) -> Option<usize> {
    if let Some(new) = courses.iter().position(|course| course.is_new()) {
        return Some(new);
    }
    let gains = courses.iter().map(|course| course.gain_ns()).enumerate();
    let (at, gain_ns) = gains.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let known_ns: f64 = courses.iter().filter_map(|course| course.share_ns()).sum();
    (gain_ns > LEAST_GAIN * known_ns).then_some(at)
}
