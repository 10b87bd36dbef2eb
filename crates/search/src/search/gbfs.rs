//! Greedy best-first search over the neighbourhoods of the space.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::space::Config;
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "gbfs",
    text: "expands the best state measured so far by a few of its neighbours",
    paper: "GEMM tiling as a Markov decision process (G-BFS), algorithm 1",
    transfers: false,
    options: &[
        SearchOption {
            name: "rho",
            default: "5",
            text: "neighbours tried of each state; at or above their number the search is complete",
        },
        SearchOption {
            name: "start",
            default: "untiled",
            text: "untiled (the first legal configuration: first factors whole, first values) or random",
        },
    ],
    make: |Problem { space, .. }, seed, options| {
        let rho = options.number("rho", 1..=usize::MAX)?;
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let start = match options.choice("start", &["untiled", "random"])? {
            0 => space.config_at(0),
            _ => space.sample(&mut rng),
        };
        let (sampled, queue) = (VecDeque::from([start]), BinaryHeap::new());
        Ok(Box::new(Gbfs { rho, seen: Seen::new(space), rng, sampled, queue, n_queued: 0 }))
    },
};

/// Priority queue of measured states, cheapest first.
///
/// # Source
/// G-BFS, algorithm 1 of the paper on GEMM tiling as a Markov decision process. We differ in three points.
/// Batches: as many states are popped as it takes to fill one. Failures: their neighbours are worth trying
/// once nothing better is queued, so they join the queue at infinite cost. End of the queue: the paper stops;
/// we continue from a random unvisited state, so that the budget is always used.
struct Gbfs {
    rho: usize,
    /// Visited set.
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    /// Neighbours sampled of the states popped so far, not proposed yet.
    sampled: VecDeque<Config>,
    /// States by cost, then by age. The bits of a non-negative float are ordered as the float is.
    queue: BinaryHeap<Reverse<(u64, u64, Config)>>,
    n_queued: u64,
}

impl Search for Gbfs {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let mut batch = Vec::new();
        while batch.len() < n {
            if let Some(config) = self.sampled.pop_front() {
                if self.seen.insert(&config) {
                    batch.push(config);
                }
            } else if let Some(Reverse((_, _, state))) = self.queue.pop() {
                let mut around = self.seen.space().neighbours(&state);
                let (sample, _) = around.partial_shuffle(&mut self.rng, self.rho);
                self.sampled.extend(sample.iter().cloned());
            } else if batch.is_empty()
                && let Some(config) = self.seen.draw(&mut self.rng)
            {
                return vec![config];
            } else {
                break;
            }
        }
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in self.seen.note(trials) {
            self.queue.push(Reverse((trial.outcome.cost().to_bits(), self.n_queued, trial.config.clone())));
            self.n_queued += 1;
        }
    }
}
