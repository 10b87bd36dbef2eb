//! Random search: uniform over the legal configurations, without replacement.

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::seen::Seen;
use super::{Problem, Search, SearchRow};
use crate::space::Config;
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "random",
    text: "uniform over the legal configurations, without replacement",
    paper: "",
    transfers: false,
    options: &[],
    make: |Problem { space, .. }, seed, _| {
        Ok(Box::new(Random { seen: Seen::new(space), rng: Xoshiro256PlusPlus::seed_from_u64(seed) }))
    },
};

struct Random {
    seen: Seen,
    rng: Xoshiro256PlusPlus,
}

impl Search for Random {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        (0..n).map_while(|_| self.seen.draw(&mut self.rng)).collect()
    }

    fn looks_ahead(&self) -> bool {
        true
    }

    fn observe(&mut self, trials: &[Trial]) {
        self.seen.note(trials);
    }
}
