//! Rounds of a race: candidates timed against each other, interleaved.

use super::scheduler::{Goal, MOST_RETRIES, VerifiedKernel};
use super::{Device, LOOK};
use crate::child::describe;
use crate::limits::Allowed;
use crate::protocol::{ProgramSource, WorkerRequest, WorkerThread};
use crate::timing::RoundLength;
use crate::workers::{WorkerEvent, is_from_outside};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::io;
use tilewright_search::{ErrorClass, Measured, Outcome, Timing, pause, quantile};

/// Candidate in a race.
#[derive(Debug)]
pub struct Racer {
    source: ProgramSource,
    kept: Option<VerifiedKernel>,
    medians_ns: Vec<f64>,
    failure: Option<Outcome>,
}

impl Racer {
    /// Relative error of the result, ‖out − reference‖ / ‖reference‖; `None` if it was not correct.
    pub fn relative_error(&self) -> Option<f64> {
        self.kept.map(|kept| kept.relative_error)
    }

    /// Whether the candidate has no rounds, without having failed.
    pub fn is_without_rounds(&self) -> bool {
        self.failure.is_none() && self.medians_ns.is_empty()
    }

    /// Median of each round, in nanoseconds per run; empty if the candidate failed.
    pub fn medians_ns(&self) -> &[f64] {
        if self.failure.is_none() { &self.medians_ns } else { &[] }
    }

    /// First quartile of the rounds, in nanoseconds per run; infinite without rounds, or after a failure.
    pub fn quartile_ns(&self) -> f64 {
        let mut rounds = self.medians_ns().to_vec();
        rounds.sort_by(f64::total_cmp);
        if rounds.is_empty() { f64::INFINITY } else { quantile(&rounds, 0.25) }
    }
}

impl Device {
    /// Races candidates in `sittings` sessions of `rounds` rounds each, every session in new processes.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    pub fn race(
        &mut self,
        sources: &[ProgramSource],
        sittings: u32,
        rounds: u32,
        round: RoundLength,
    ) -> io::Result<Vec<Racer>> {
        let never = || false;
        let mut racers = self.start_race(sources, &never)?;
        for sitting in 0..sittings {
            let mut racers: Vec<&mut Racer> = racers.iter_mut().collect();
            if sitting > 0 {
                self.next_sitting(&mut racers, &never)?;
            }
            self.race_rounds(&mut racers, rounds, round, &never, &never)?;
        }
        Ok(racers)
    }

    /// Builds and verifies candidates for [`Device::race_rounds`] and [`Device::race_round`]; those not ready
    /// when `over` becomes true have no rounds.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    pub fn start_race(&mut self, sources: &[ProgramSource], over: &dyn Fn() -> bool) -> io::Result<Vec<Racer>> {
        if Allowed::here().cpu_seconds.is_some() {
            // The memory that the search used must not end the race.
            self.workers.renew()?;
        }
        self.join_race(sources, over)
    }

    /// Builds and verifies further candidates for a race in progress, as [`Device::start_race`] does.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    pub fn join_race(&mut self, sources: &[ProgramSource], over: &dyn Fn() -> bool) -> io::Result<Vec<Racer>> {
        let racer = |(source, (kept, failure))| Racer {
            source: ProgramSource::clone(source),
            kept,
            medians_ns: Vec::new(),
            failure,
        };
        Ok(sources.iter().zip(self.keep_all(sources, over)?).map(racer).collect())
    }

    /// Moves a race to new processes (a new session). The pages that a process gets determine which data
    /// share cache sets, and so change a kernel's time by a per cent or two: more rounds in one process do
    /// not average that out, more processes do.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    pub fn next_sitting(&mut self, racers: &mut [&mut Racer], over: &dyn Fn() -> bool) -> io::Result<()> {
        if over() {
            return Ok(());
        }
        self.workers.renew()?;
        let mut racers: Vec<&mut &mut Racer> = racers.iter_mut().filter(|racer| racer.failure.is_none()).collect();
        let sources: Vec<ProgramSource> = racers.iter().map(|racer| racer.source.clone()).collect();
        for (racer, of_keeping) in racers.iter_mut().zip(self.keep_all(&sources, over)?) {
            (racer.kept, racer.failure) = of_keeping;
        }
        Ok(())
    }

    /// Kernel of each source, or its failure; neither if it was not ready when `over` became true.
    fn keep_all(
        &mut self,
        sources: &[ProgramSource],
        over: &dyn Fn() -> bool,
    ) -> io::Result<Vec<(Option<VerifiedKernel>, Option<Outcome>)>> {
        // Work left over from the last batch is not needed any more.
        let commands = self.scheduler.cancel(0);
        self.carry_out(commands)?;
        self.scheduler.aim(Goal::Keep);
        let kept = self.keep(sources, over);
        self.scheduler.aim(Goal::Trial);
        kept
    }

    fn keep(
        &mut self,
        sources: &[ProgramSource],
        over: &dyn Fn() -> bool,
    ) -> io::Result<Vec<(Option<VerifiedKernel>, Option<Outcome>)>> {
        let first = self.submit_sources(sources).start;
        loop {
            self.act()?;
            if self.scheduler.is_settled() || over() {
                break;
            }
            self.listen(pause::now() + LOOK)?;
        }
        let mut results = vec![(None, None); sources.len()];
        for (number, settled) in self.scheduler.take_settled() {
            results[(number - first) as usize] = match settled {
                Ok(kept) => (Some(kept), None),
                Err(Measured { outcome, .. }) => (None, Some(outcome)),
            };
        }
        let commands = self.scheduler.cancel(0);
        self.carry_out(commands)?;
        Ok(results)
    }

    /// Runs rounds, each with every candidate once in random order, so that changes of the machine's speed
    /// affect all alike. Ends early when `over`, or after at least one round when `is_enough`.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    pub fn race_rounds(
        &mut self,
        racers: &mut [&mut Racer],
        rounds: u32,
        round: RoundLength,
        over: &dyn Fn() -> bool,
        is_enough: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        let mut order: Vec<usize> = (0..racers.len()).collect();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(self.options.seed);
        for at in 0..rounds {
            if at > 0 && is_enough() {
                break;
            }
            // The state of the caches and the speed of the cores depend on the candidate that ran before.
            order.shuffle(&mut rng);
            for &at in &order {
                if over() {
                    return Ok(());
                }
                self.race_round(racers[at], round)?;
            }
        }
        Ok(())
    }

    /// Times a candidate for a round, and records the median.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    pub fn race_round(&mut self, racer: &mut Racer, round: RoundLength) -> io::Result<()> {
        if let (Some(kept), None) = (racer.kept, &racer.failure) {
            match self.time_kept(kept, round)? {
                Outcome::Measured(timing) => racer.medians_ns.push(timing.median_ns),
                failure => racer.failure = Some(failure),
            }
        }
        Ok(())
    }

    /// Times a verified kernel, with nothing built beside it; repeats this after a pause.
    ///
    /// # Errors
    /// If a worker cannot be restarted, or is killed from outside.
    fn time_kept(&mut self, kept: VerifiedKernel, round: RoundLength) -> io::Result<Outcome> {
        while !self.workers.are_idle() {
            self.listen(pause::now() + LOOK)?;
        }
        for _ in 0..=MOST_RETRIES {
            let paused = pause::total();
            let (plan, timeout) = self.scheduler.round(round, kept.is_alone);
            let request = WorkerRequest::Run { id: kept.kernel.id, plan };
            self.workers.ask(kept.kernel.worker, &request, timeout);
            let answer = loop {
                let Some((worker, WorkerThread::Test, answer)) = self.workers.next_answer(None)? else { continue };
                if worker != kept.kernel.worker {
                    continue;
                }
                match answer {
                    // The reply for a cancelled kernel, which was still in progress, comes first.
                    WorkerEvent::Reply(reply) if reply.id().is_some_and(|id| id != kept.kernel.id) => {
                        self.workers.go_on(worker, WorkerThread::Test, timeout);
                    }
                    answer => break answer,
                }
            };
            let is_kept = match answer {
                WorkerEvent::Died(status) if is_from_outside(status) => return Err(io::Error::other(describe(status))),
                WorkerEvent::DeviceLost(why) => return Err(io::Error::other(why)),
                WorkerEvent::Reply(_) => true,
                _ => false,
            };
            if !is_kept || pause::total() == paused {
                return Ok(self.scheduler.outcome(answer, self.options.run_timeout, &mut 0.0).0);
            }
        }
        Err(io::Error::other("this process was stopped again and again"))
    }

    /// Removes a candidate from the race, and summarises its rounds.
    pub fn end_race(&mut self, racer: Racer) -> Outcome {
        if let Some(kept) = racer.kept {
            self.workers.tell(kept.kernel.worker, &WorkerRequest::Drop { id: kept.kernel.id });
        }
        racer.failure.unwrap_or_else(|| match racer.medians_ns.as_slice() {
            [] => Outcome::Failed { class: ErrorClass::Unknown, message: "it was never run".to_owned() },
            medians => Outcome::Measured(Timing::of_samples(medians, false)),
        })
    }
}
