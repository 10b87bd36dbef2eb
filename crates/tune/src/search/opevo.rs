//! Evolution with mutations that follow the topology of each parameter.

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::scored::{Roulette, Scored};
use super::seen::Seen;
use super::walk::q_random_walk;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::space::Config;
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "opevo",
    text: "recombines the best configurations and mutates each parameter by a random walk on its own topology",
    paper: "OpEvo, algorithm 1",
    transfers: false,
    options: &[
        SearchOption { name: "parents", default: "8", text: "best configurations that are recombined, at least 1" },
        SearchOption { name: "children", default: "8", text: "configurations in a generation, at least 1" },
        SearchOption {
            name: "q",
            default: "0.3",
            text: "probability of each further step of a walk, 0 to 0.99; 0.5 in the paper",
        },
    ],
    make: |Problem { space, .. }, seed, options| {
        Ok(Box::new(OpEvo {
            n_parents: options.number("parents", 1..=1_000_000)?,
            n_children: options.number("children", 1..=1_000_000)?,
            q: options.number("q", 0.0..=0.99)?,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            best: Vec::new(),
            parents: Vec::new(),
            roulette: Roulette::new(&[]),
            unborn: 0,
        }))
    },
};

/// Top configurations as parents, one parent for each parameter, walks as mutations.
///
/// # Source
/// OpEvo, algorithm 1, with its λ = ρ = 8. We differ in the default of q, since 0.5 changes most
/// parameters of a child at once, and in that a child which constraints forbid is mutated again,
/// as one that is not new, and after several such mutations becomes the nearest legal configuration.
struct OpEvo {
    n_parents: usize,
    n_children: usize,
    q: f64,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    /// The best trials so far, at most as many as there are parents, best first.
    best: Vec<Scored>,
    /// The parents of this generation; empty while the first one is filled at random.
    parents: Vec<Scored>,
    /// Chooses among the parents in proportion to their fitness.
    roulette: Roulette,
    /// Children left to breed in this generation.
    unborn: usize,
}

impl OpEvo {
    fn next_generation(&mut self) {
        if self.best.len() < self.n_parents {
            self.unborn = self.n_parents - self.best.len();
        } else {
            self.parents.clone_from(&self.best);
            self.roulette = Roulette::new(&self.parents);
            self.unborn = self.n_children;
        }
    }

    /// A new legal configuration, or `None` where the space is exhausted.
    fn child(&mut self) -> Option<Config> {
        if self.parents.is_empty() {
            return self.seen.draw(&mut self.rng);
        }
        let n = self.seen.space().n_parameters();
        let mut inherit = |parameter| self.parents[self.roulette.spin(&mut self.rng)].config.ranks()[parameter];
        let inherited: Vec<u64> = (0..n).map(&mut inherit).collect();
        self.seen.breed(&mut self.rng, |space, rng| {
            let walk = |(parameter, &rank)| q_random_walk(space, parameter, rank, self.q, rng);
            Config::new(inherited.iter().enumerate().map(walk).collect::<Vec<_>>())
        })
    }
}

impl Search for OpEvo {
    /// A batch ends with its generation, for the next one is bred from what this one turns out to be.
    fn propose(&mut self, n: usize) -> Vec<Config> {
        if self.unborn == 0 {
            self.next_generation();
        }
        let batch: Vec<Config> = (0..n.min(self.unborn)).map_while(|_| self.child()).collect();
        self.unborn -= batch.len();
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in trials {
            if self.seen.space().contains(&trial.config) {
                self.seen.insert(&trial.config);
                self.best.push(Scored::new(trial));
            }
        }
        Scored::keep_best(&mut self.best, self.n_parents);
    }
}
