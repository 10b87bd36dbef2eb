//! Set of configurations proposed or observed so far, and sampling from the rest.

use std::collections::HashSet;
use std::sync::Arc;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::features::UnitFeatures;
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Number of attempts to breed a child before a random configuration takes its place.
const ATTEMPTS: usize = 100;
/// Number of illegal children in a row after which the nearest legal configuration takes their place.
const ILLEGAL_IN_A_ROW: usize = 10;

/// Configurations of a space that a search must not propose again.
pub(super) struct Seen {
    space: Arc<Space>,
    indices: HashSet<u128>,
    /// Once most of the space is seen: a superset of the unseen indices, from which draws take without
    /// rejection.
    rest: Option<Vec<u128>>,
}

impl Seen {
    pub(super) fn new(space: &Arc<Space>) -> Seen {
        Seen { space: space.clone(), indices: HashSet::new(), rest: None }
    }

    pub(super) fn space(&self) -> &Space {
        &self.space
    }

    /// Marks a configuration as seen; returns false if it is seen already or illegal.
    pub(super) fn insert(&mut self, config: &Config) -> bool {
        self.space.index_of(config).is_some_and(|index| self.insert_index(index))
    }

    /// Marks the configurations of trials as seen, and returns the trials of this space.
    pub(super) fn note<'a>(&mut self, trials: &'a [Trial]) -> Vec<&'a Trial> {
        let mut noted = Vec::with_capacity(trials.len());
        for trial in trials {
            if let Some(index) = self.space.index_of(&trial.config) {
                self.insert_index(index);
                noted.push(trial);
            }
        }
        noted
    }

    /// Marks the configuration with this index as seen; returns false if it is seen already.
    pub(super) fn insert_index(&mut self, index: u128) -> bool {
        self.indices.insert(index)
    }

    /// Whether a configuration is neither seen nor illegal.
    pub(super) fn is_fresh(&self, config: &Config) -> bool {
        self.space.index_of(config).is_some_and(|index| !self.indices.contains(&index))
    }

    /// Breeds a legal and unseen configuration that `accept` takes, without marking it as seen; `None` if
    /// many attempts fail. Illegal ones are bred again; after several in a row, the nearest legal
    /// configuration is tried.
    pub(super) fn bred(
        &self,
        rng: &mut Xoshiro256PlusPlus,
        mut breed: impl FnMut(&Space, &mut Xoshiro256PlusPlus) -> Config,
        mut accept: impl FnMut(&Config) -> bool,
    ) -> Option<Config> {
        let mut illegal = 0;
        (0..ATTEMPTS).find_map(|_| {
            let mut child = breed(&self.space, rng);
            if self.space.contains(&child) {
                illegal = 0;
            } else {
                illegal += 1;
                if illegal < ILLEGAL_IN_A_ROW {
                    return None;
                }
                illegal = 0;
                child = self.space.nearest(&child);
            }
            Some(child).filter(|child| self.is_fresh(child) && accept(child))
        })
    }

    /// Draws `n_draws` unseen configurations, and marks and returns the one that is farthest from all of
    /// these points of feature space; `None` if the space is exhausted.
    pub(super) fn draw_remote(
        &mut self,
        n_draws: usize,
        rng: &mut Xoshiro256PlusPlus,
        features: &UnitFeatures,
        points: impl IntoIterator<Item = impl AsRef<[f32]>> + Clone,
    ) -> Option<Config> {
        let distance = |x: &[f32], z: &[f32]| x.iter().zip(z).map(|(x, z)| (x - z).powi(2)).sum::<f32>();
        let mut remotest: Option<(f32, Config)> = None;
        for _ in 0..n_draws {
            let config = self.space.sample(rng);
            if self.is_fresh(&config) {
                let of = features.of(&config);
                let distances = points.clone().into_iter().map(|point| distance(point.as_ref(), &of));
                let nearest = distances.fold(f32::INFINITY, f32::min);
                if remotest.as_ref().is_none_or(|(other, _)| nearest > *other) {
                    remotest = Some((nearest, config));
                }
            }
        }
        match remotest {
            Some((_, config)) => {
                self.insert(&config);
                Some(config)
            }
            None => self.draw(rng),
        }
    }

    /// Draws at most `n` unseen configurations and marks them as seen: each is the farthest of `n_draws` from
    /// the previous ones and from these points.
    pub(super) fn draw_spread(
        &mut self,
        n: usize,
        n_draws: usize,
        rng: &mut Xoshiro256PlusPlus,
        features: &UnitFeatures,
        mut points: Vec<Vec<f32>>,
    ) -> Vec<Config> {
        let draw = |_| {
            let config = self.draw_remote(n_draws, rng, features, &points)?;
            points.push(features.of(&config));
            Some(config)
        };
        (0..n).map_while(draw).collect()
    }

    /// Draws one of the unseen configurations, each with the same probability, and marks it as seen.
    ///
    /// # Cost
    /// O(1) expected, averaged over the draws that exhaust the space: rejection while most of the space is
    /// unseen, then one pass over the indices, which are no more than the configurations seen already.
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
