//! What a search has proposed or observed, and draws from the rest.

use std::collections::HashSet;
use std::sync::Arc;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::space::{Config, Space};

/// The configurations of a space that a search must not propose again.
pub(super) struct Seen {
    space: Arc<Space>,
    indices: HashSet<u128>,
    /// Once most of the space is seen: a superset of the unseen indices, from which draws take without rejection.
    rest: Option<Vec<u128>>,
}

impl Seen {
    pub(super) fn new(space: &Arc<Space>) -> Seen {
        Seen { space: space.clone(), indices: HashSet::new(), rest: None }
    }

    pub(super) fn space(&self) -> &Space {
        &self.space
    }

    /// Marks a configuration as seen; false where it was before or is not legal.
    pub(super) fn insert(&mut self, config: &Config) -> bool {
        self.space.index_of(config).is_some_and(|index| self.insert_index(index))
    }

    /// Marks the configuration with this index as seen; false where it was before.
    pub(super) fn insert_index(&mut self, index: u128) -> bool {
        self.indices.insert(index)
    }

    /// Draws one of the unseen configurations, each with the same probability, and marks it as seen.
    ///
    /// # Cost
    /// O(1) expected, averaged over the draws that exhaust the space: rejection while most of the space is unseen, then one pass
    /// over the indices, which is no longer than what has been seen already.
    pub(super) fn draw(&mut self, rng: &mut Xoshiro256PlusPlus) -> Option<Config> {
        let size = self.space.size();
        let index = if (self.indices.len() as u128) < size.div_ceil(2) {
            loop {
                let index = rng.random_range(0..size);
                if self.insert_index(index) {
                    break index;
                }
            }
        } else {
            let indices = &self.indices;
            let rest = self.rest.get_or_insert_with(|| (0..size).filter(|index| !indices.contains(index)).collect());
            loop {
                if rest.is_empty() {
                    return None;
                }
                let index = rest.swap_remove(rng.random_range(0..rest.len()));
                if self.indices.insert(index) {
                    break index;
                }
            }
        };
        Some(self.space.config_at(index))
    }
}
