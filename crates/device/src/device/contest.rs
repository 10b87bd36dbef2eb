//! Race of many candidates by successive halving: the slower half is eliminated after some rounds, so that
//! likely winners get most rounds.
//!
//! Most disturbances slow a kernel down, so its fast rounds tell most; but the very fastest round may owe its
//! time to luck. Therefore candidates are ranked by the first quartile of their rounds. A kernel may also be
//! lucky with its pages for a whole sitting (a session in one process), so a race has several sittings. It
//! has only one if a run takes as long as a round, since verifying it anew would take longer than measuring
//! it, if the user waits, or on a GPU, which has its own memory and takes seconds to start.
//!
//! Most of a race's time is spent on building and verifying, which cannot be predicted: as many candidates
//! are admitted, and as many sittings held, as there is time for. The race ends early if the verdict is
//! clear.

use super::Device;
use super::race::Racer;
use crate::protocol::ProgramSource;
use crate::timing::RoundLength;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tilewright_search::{Candidate, Outcome, RaceLimits, Standing};

/// Number of candidates that run all rounds of a race; of more, the slower half leaves after some rounds.
const FINALISTS: usize = 6;
/// Maximum number of rounds at the end, if there is time, and the number of sittings that they are divided
/// into.
const MOST_ROUNDS: u64 = 12;
const LAST_SITTINGS: u64 = 3;
/// Number of candidates that are admitted however long their builds take, and number of those admitted at
/// once later, while there is time.
const FIRST: usize = 2;
const AT_ONCE: usize = 4;
/// Minimum time of a race with several sittings: the user waits for a shorter one.
const LEAST_FOR_SITTINGS: Duration = Duration::from_secs(1);

/// Candidate in the race, with its index among all.
type RacingCandidate = (usize, Racer);

impl Device {
    /// Races candidates, as specified by [`Measure::race`](tilewright_search::Measure::race).
    pub(super) fn contest(
        &mut self,
        candidates: &[Candidate],
        limits: RaceLimits,
        stop: Option<&AtomicBool>,
        tell: &mut dyn FnMut(usize),
    ) -> io::Result<Vec<Standing>> {
        let start = Instant::now();
        let run_time = Duration::try_from_secs_f64(limits.best_ns / 1e9).unwrap_or_default();
        let is_late =
            || start.elapsed() + run_time >= limits.total || stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        let sources: Vec<ProgramSource> =
            candidates.iter().map(|c| ProgramSource::Steps(c.steps.to_string())).collect();
        tell(sources.len());
        let goal = limits.rounds * RaceLimits::GOAL;
        // Even beyond the goal, each remaining candidate has a round in each stage.
        let over = Over { late: &is_late, long: &|| start.elapsed() >= goal };
        let (first, others) = sources.split_at(sources.len().min(FIRST));
        let mut left: Vec<RacingCandidate> = self.start_race(first, &is_late)?.into_iter().enumerate().collect();
        for more in others.chunks(AT_ONCE) {
            if start.elapsed() >= goal / 2 {
                tell(left.len());
                break;
            }
            left.extend((left.len()..).zip(self.join_race(more, &is_late)?));
        }
        let mut each = start.elapsed() / left.len().max(1) as u32;
        let round = RoundLength { time: RaceLimits::ROUND, min_samples: 1 };
        let moves = run_time < round.time && limits.rounds > LEAST_FOR_SITTINGS && !self.backend.has_driver();
        let mut move_on = |device: &mut Device, left: &mut [RacingCandidate]| -> io::Result<()> {
            let (begin, n) = (start.elapsed(), left.len() as u32);
            if moves && begin + each * n <= goal {
                device.next_sitting(&mut racers(left), &is_late)?;
                each = (start.elapsed() - begin) / n.max(1);
            }
            Ok(())
        };
        let mut standings = Vec::new();
        let mut rounds = RaceLimits::LEAST_ROUNDS;
        while left.len() > FINALISTS {
            self.some_rounds(&mut left, rounds, round, &over)?;
            for runner in left.split_off(left.len().div_ceil(2)) {
                // Of the candidates that leave, only failures are recorded.
                let standing = self.standing(runner);
                standings.extend(standing.filter(|standing| matches!(standing.outcome, Outcome::Failed { .. })));
            }
            tell(left.len());
            rounds *= 2;
            move_on(self, &mut left)?;
        }
        let affordable = limits.affordable(limits.rounds / RaceLimits::STAGES) / (left.len() as u64).max(1);
        let rounds = affordable.clamp(RaceLimits::LEAST_ROUNDS, MOST_ROUNDS);
        for sitting in 0..LAST_SITTINGS {
            if sitting > 0 {
                if is_settled(&left) || (over.long)() {
                    break;
                }
                move_on(self, &mut left)?;
            }
            self.some_rounds(&mut left, rounds.div_ceil(LAST_SITTINGS), round, &over)?;
        }
        let finalists: Vec<Standing> = left.into_iter().filter_map(|runner| self.standing(runner)).collect();
        standings.splice(0..0, finalists);
        // Failures are ranked by infinity.
        standings.sort_by(|a, b| a.quartile_ns.total_cmp(&b.quartile_ns));
        Ok(standings)
    }

    /// Runs some rounds, and sorts the fastest candidates first.
    fn some_rounds(
        &mut self,
        left: &mut [RacingCandidate],
        rounds: u64,
        round: RoundLength,
        over: &Over,
    ) -> io::Result<()> {
        self.race_rounds(&mut racers(left), rounds as u32, round, over.late, over.long)?;
        left.sort_by(|(_, a), (_, b)| a.quartile_ns().total_cmp(&b.quartile_ns()));
        Ok(())
    }

    /// Result of a candidate over all its rounds; `None` if it came too late for any.
    fn standing(&mut self, (at, racer): RacingCandidate) -> Option<Standing> {
        let (quartile_ns, relative_error) = (racer.quartile_ns(), racer.relative_error());
        let is_too_late = racer.is_without_rounds();
        let outcome = self.end_race(racer);
        (!is_too_late).then_some(Standing { at, outcome, quartile_ns, relative_error })
    }
}

/// End conditions of a race: immediately, and after the current round.
struct Over<'a> {
    late: &'a dyn Fn() -> bool,
    long: &'a dyn Fn() -> bool,
}

/// Whether the two leading candidates need no more rounds.
fn is_settled(left: &[RacingCandidate]) -> bool {
    match left {
        [(_, leading), (_, next), ..] => RaceLimits::is_settled(leading.medians_ns(), next.medians_ns()),
        _ => true,
    }
}

fn racers(left: &mut [RacingCandidate]) -> Vec<&mut Racer> {
    left.iter_mut().map(|(_, racer)| racer).collect()
}
