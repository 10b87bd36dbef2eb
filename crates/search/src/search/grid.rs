//! Grid search: every legal configuration, in the order of the space's indices. A resumed run continues where
//! the observed trials end, since those are skipped.

use super::seen::Seen;
use super::{Problem, Search, SearchRow};
use crate::space::Config;
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "grid",
    text: "every legal configuration, in order",
    paper: "",
    transfers: false,
    options: &[],
    make: |Problem { space, .. }, _, _| Ok(Box::new(Grid { seen: Seen::new(space), next: 0 })),
};

struct Grid {
    seen: Seen,
    next: u128,
}

impl Search for Grid {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let mut batch = Vec::new();
        while batch.len() < n && self.next < self.seen.space().size() {
            if self.seen.insert_index(self.next) {
                batch.push(self.seen.space().config_at(self.next));
            }
            self.next += 1;
        }
        batch
    }

    fn looks_ahead(&self) -> bool {
        true
    }

    fn observe(&mut self, trials: &[Trial]) {
        self.seen.note(trials);
    }
}
