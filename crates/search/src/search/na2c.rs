//! Neighborhood actor advantage critic (N-A2C): an actor that learns to walk around the best state.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use rand::distr::weighted::WeightedIndex;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{ActorCritic, ActorCriticOptions, Transition};

use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::features::UnitFeatures;
use crate::space::{Config, Domain, Space, Value};
use crate::trial::Trial;

/// Number of configurations that are spread over the space before the first walks.
const N_START: usize = 10;
/// Number of random draws for each configuration that is spread over the space, of which the one farthest
/// from the others is taken.
const N_DRAWS: usize = 20;
/// Maximum number of rounds of walks for a batch, after which it may stay incomplete.
const ROUNDS: usize = 4;
/// Number of batches without a better state after which walks grow by a step.
const PATIENCE: usize = 4;
/// Maximum length of a walk, as a multiple of its initial length.
const MOST_GROWTH: usize = 8;
/// Number of transitions in a learning step.
const LEARNING_BATCH: usize = 64;
/// Maximum number of learning steps at once: one for each trial would be too many if thousands are known when
/// a search begins.
const MOST_STEPS: usize = 512;
/// Maximum number of categories of a parameter that have an action each; if there are more, several share
/// one.
const MOST_CATEGORIES: u64 = 64;

pub(super) const ROW: SearchRow = SearchRow {
    name: "na2c",
    text: "walks from the best state so far, led by an actor-critic that learns from all steps between known states",
    paper: "GEMM tiling as a Markov decision process (N-A2C), algorithm 2",
    transfers: false,
    options: &[
        SearchOption {
            name: "steps",
            default: "3",
            text: "steps of a walk, at least 1; twice as many at the start, more while nothing better is found",
        },
        SearchOption {
            name: "tau",
            default: "0.9",
            text: "probability that a step is the actor's and not a random one, 0 to 1",
        },
        SearchOption {
            name: "batch",
            default: "6",
            text: "states collected between two updates of the centre, at least 1",
        },
        SearchOption { name: "width", default: "128", text: "width of the networks' hidden layers, 1 to 1024" },
        SearchOption { name: "memory", default: "2048", text: "size of the replay memory, in steps, at least 1" },
        SearchOption {
            name: "start",
            default: "spread",
            text: "where walks first set out: spread (the best of 10 that are far apart), random or untiled (the first legal \
                   configuration), as in the paper",
        },
    ],
    make: |Problem { space, .. }, seed, options| {
        let n_steps = options.number("steps", 1..=1000)?;
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (features, actions) = (UnitFeatures::new(space), Actions::new(space));
        let mut start = VecDeque::new();
        let centre = match options.choice("start", &["spread", "random", "untiled"])? {
            0 => {
                start = spread(space, &features, &mut rng);
                start[0].clone()
            }
            1 => space.sample(&mut rng),
            _ => space.config_at(0),
        };
        let network =
            ActorCriticOptions { n_hidden: options.number("width", 1..=1024)?, ..ActorCriticOptions::default() };
        let learner = (actions.n_actions > 0)
            .then(|| ActorCritic::new(features.n_features(), actions.n_actions, &network, rng.random()));
        Ok(Box::new(Na2c {
            n_steps,
            tau: options.number("tau", 0.0..=1.0)?,
            batch: options.number("batch", 1..=1_000_000)?,
            n_remembered: options.number("memory", 1..=1_000_000)?,
            seen: Seen::new(space),
            rng,
            features,
            actions,
            learner,
            costs: HashMap::new(),
            memory: VecDeque::new(),
            start,
            centre,
            best: f64::INFINITY,
            collected: VecDeque::new(),
            under_way: HashSet::new(),
            walk_length: 2 * n_steps,
            n_observed: 0,
            n_idle: 0,
        }))
    },
};

/// Draws configurations that are far apart, at least one.
fn spread(space: &Arc<Space>, features: &UnitFeatures, rng: &mut Xoshiro256PlusPlus) -> VecDeque<Config> {
    let mut drawn = Seen::new(space);
    let mut points: Vec<Vec<f32>> = Vec::with_capacity(N_START);
    let mut draw = || {
        let config = drawn.draw_remote(N_DRAWS, rng, features, &points)?;
        points.push(features.of(&config));
        Some(config)
    };
    (0..N_START).map_while(|_| draw()).collect()
}

/// Neighbourhood actor advantage critic.
///
/// # Source
/// N-A2C, algorithm 2 of the paper on GEMM tiling as a Markov decision process, with its T = 3 and its
/// reward, scaled so that the best state so far gives 1. Batch, width, rate and τ are those of NNI. We differ
/// in that actions are the moves of every kind of parameter (see [`Actions`]), in that a walk ends if no move
/// is legal, in that a batch is drawn at random if walks reach no unvisited state, and in the starting points
/// of the first walks, which can be as in the paper.
struct Na2c {
    n_steps: usize,
    tau: f64,
    batch: usize,
    n_remembered: usize,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    features: UnitFeatures,
    actions: Actions,
    /// Actor-critic network; `None` if the space has no moves.
    learner: Option<ActorCritic>,
    /// Time of each known state, infinite for a failure.
    costs: HashMap<Config, f64>,
    /// Steps between known states, the latest last.
    memory: VecDeque<(Config, usize, Config)>,
    /// Configurations to measure before the first walks, unless as many trials are known already.
    start: VecDeque<Config>,
    /// State from which walks start: the best so far.
    centre: Config,
    best: f64,
    /// Configurations of the batch that are left to measure.
    collected: VecDeque<Config>,
    /// Configurations that walks found and that are being measured: other trials say nothing about the best
    /// length of walks.
    under_way: HashSet<Config>,
    walk_length: usize,
    /// States of walks observed since the last batch ended.
    n_observed: usize,
    /// Batches since the centre moved.
    n_idle: usize,
}

impl Na2c {
    /// Collects the unvisited states on walks from the centre, walk by walk, at most a batch.
    fn collect(&mut self) -> VecDeque<Config> {
        let mut found = HashSet::new();
        let mut collected = VecDeque::new();
        if self.seen.is_fresh(&self.centre) {
            found.insert(self.centre.clone());
            collected.push_back(self.centre.clone());
        }
        for _ in 0..ROUNDS {
            if collected.len() >= self.batch {
                break;
            }
            let n_walks = (self.batch - collected.len()).div_ceil(self.walk_length);
            for state in self.walk(n_walks).into_iter().flatten() {
                if collected.len() < self.batch && self.seen.is_fresh(&state) && found.insert(state.clone()) {
                    collected.push_back(state);
                }
            }
        }
        collected
    }

    /// Walks from the centre several times; returns the states of each walk.
    fn walk(&mut self, n_walks: usize) -> Vec<Vec<Config>> {
        let mut walks = vec![Vec::new(); n_walks];
        let Some(learner) = &self.learner else { return walks };
        for _ in 0..self.walk_length {
            let here = |walk: &Vec<Config>| walk.last().unwrap_or(&self.centre).clone();
            let states: Vec<Config> = walks.iter().map(here).collect();
            let features: Vec<Vec<f32>> = states.iter().map(|state| self.features.of(state)).collect();
            let policies = learner.policy(features.iter().map(Vec::as_slice));
            for ((walk, state), policy) in walks.iter_mut().zip(&states).zip(policies) {
                let moves = self.actions.moves(state);
                let weights = WeightedIndex::new(moves.iter().map(|(action, _)| policy[*action])).ok();
                let next = match weights {
                    Some(weights) if self.rng.random_bool(self.tau) => Some(&moves[self.rng.sample(weights)]),
                    _ => moves.choose(&mut self.rng),
                };
                walk.extend(next.map(|(_, next)| next.clone()));
            }
        }
        walks
    }

    /// Remembers the steps between a state that has become known and the known ones around it, both ways.
    fn remember(&mut self, config: &Config) {
        for (action, neighbour) in self.actions.moves(config) {
            if !self.costs.contains_key(&neighbour) {
                continue;
            }
            let back = self.actions.between(&neighbour, config);
            self.memory.push_back((config.clone(), action, neighbour.clone()));
            self.memory.push_back((neighbour, back, config.clone()));
        }
        self.memory.drain(..self.memory.len().saturating_sub(self.n_remembered));
    }

    /// Learns from a random batch of the memory.
    fn learn(&mut self) {
        let Some(learner) = &mut self.learner else { return };
        let memory = self.memory.make_contiguous();
        let chosen: Vec<Transition> = memory
            .sample(&mut self.rng, LEARNING_BATCH)
            .map(|(state, action, next)| {
                let cost = self.costs[next];
                Transition {
                    state: self.features.of(state),
                    action: *action,
                    reward: if cost.is_finite() { (self.best / cost) as f32 } else { 0.0 },
                    next_state: self.features.of(next),
                }
            })
            .collect();
        learner.train(&chosen);
    }

    /// Shortens the walks while better states are found, and lengthens them otherwise.
    fn end_batch(&mut self) {
        self.n_observed = 0;
        self.n_idle += 1;
        if self.n_idle < PATIENCE {
            self.walk_length = self.n_steps.max(self.walk_length - 1);
        } else if self.n_idle.is_multiple_of(PATIENCE) {
            self.lengthen();
        }
    }

    fn lengthen(&mut self) {
        self.walk_length = (self.walk_length + 1).min(self.n_steps * MOST_GROWTH);
    }
}

impl Search for Na2c {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let n_start = n.min(N_START.saturating_sub(self.costs.len()));
        let start = self.start.drain(..n_start.min(self.start.len()));
        let batch: Vec<Config> = start.filter(|config| self.seen.insert(config)).collect();
        if !batch.is_empty() {
            return batch;
        }
        // Another run may have measured some since they were collected.
        self.collected.retain(|config| self.seen.is_fresh(config));
        if self.collected.is_empty() {
            self.collected = self.collect();
        }
        if self.collected.is_empty() {
            self.lengthen();
            return (0..n.min(self.batch)).map_while(|_| self.seen.draw(&mut self.rng)).collect();
        }
        let batch: Vec<Config> = self.collected.drain(..n.min(self.collected.len())).collect();
        batch.iter().for_each(|config| assert!(self.seen.insert(config), "invariant: collected states are unvisited"));
        self.under_way.extend(batch.iter().cloned());
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in self.seen.note(trials) {
            let cost = trial.outcome.cost();
            self.costs.insert(trial.config.clone(), cost);
            self.remember(&trial.config);
            if cost < self.best {
                self.best = cost;
                self.centre = trial.config.clone();
                self.n_idle = 0;
            }
            self.n_observed += usize::from(self.under_way.remove(&trial.config));
            if self.n_observed >= self.batch {
                self.end_batch();
            }
        }
        (0..trials.len().min(MOST_STEPS)).for_each(|_| self.learn());
    }
}

/// Moves of a space as a fixed set of numbered actions, which are the same in every state.
///
/// For an ordinal: down and up. For a categorical: to each value. For a factorization: one of its primes from
/// one part to another. For a permutation: a swap at each place. An action that is not a move of the current
/// state has no effect there.
struct Actions {
    space: Arc<Space>,
    /// First action of each parameter.
    first: Vec<usize>,
    n_actions: usize,
}

impl Actions {
    fn new(space: &Arc<Space>) -> Actions {
        let mut n_actions = 0;
        let n_of = |parameter| match space.domain(parameter) {
            _ if space.is_ordered(parameter) => 2,
            Domain::Ordinal(_) | Domain::Categorical(_) => space.n_values(parameter).min(MOST_CATEGORIES) as usize,
            Domain::Factorization { parts, .. } => space.prime_powers(parameter).len() * parts * parts,
            Domain::Permutation(names) => names.len() - 1,
        };
        let mut first = Vec::with_capacity(space.n_parameters());
        for parameter in 0..space.n_parameters() {
            first.push(n_actions);
            n_actions += n_of(parameter);
        }
        Actions { space: Arc::clone(space), first, n_actions }
    }

    /// Returns the legal moves of a state, each with its action.
    fn moves(&self, config: &Config) -> Vec<(usize, Config)> {
        let mut moves = Vec::new();
        for (parameter, &here) in config.ranks().iter().enumerate() {
            let value = self.space.value_at(parameter, here);
            for rank in self.space.rank_neighbours(parameter, here) {
                let neighbour = config.with(parameter, rank);
                if self.space.contains(&neighbour) {
                    moves.push((self.action(parameter, (here, &value), rank), neighbour));
                }
            }
        }
        moves
    }

    /// Returns the action that leads from a state to a neighbour.
    fn between(&self, from: &Config, to: &Config) -> usize {
        let differs = |parameter: &usize| from.ranks()[*parameter] != to.ranks()[*parameter];
        let parameter = (0..self.first.len()).find(differs).expect("invariant: neighbours differ");
        let here = from.ranks()[parameter];
        self.action(parameter, (here, &self.space.value_at(parameter, here)), to.ranks()[parameter])
    }

    fn action(&self, parameter: usize, (here, value): (u64, &Value), there: u64) -> usize {
        let of_parameter = match self.space.domain(parameter) {
            _ if self.space.is_ordered(parameter) => usize::from(there > here),
            Domain::Ordinal(_) | Domain::Categorical(_) => {
                let n = self.space.n_values(parameter);
                (there * n.min(MOST_CATEGORIES) / n) as usize
            }
            Domain::Factorization { parts, .. } => {
                let (before, after) = (value.factors(), self.space.value_at(parameter, there));
                let after = after.factors();
                let part =
                    |grows: bool| (0..*parts).find(|&i| before[i] != after[i] && (after[i] > before[i]) == grows);
                let (Some(from), Some(to)) = (part(false), part(true)) else {
                    panic!("invariant: neighbours differ by a prime that is moved");
                };
                let prime = after[to] / before[to];
                let at = self.space.prime_powers(parameter).iter().position(|&(p, _)| p == prime);
                (at.expect("invariant: the prime is one of the product's") * parts + from) * parts + to
            }
            Domain::Permutation(_) => {
                let (before, after) = (value.order(), self.space.value_at(parameter, there));
                let swapped = before.iter().zip(after.order()).position(|(a, b)| a != b);
                swapped.expect("invariant: neighbours differ by a swap")
            }
        };
        self.first[parameter] + of_parameter
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::build;
    use crate::space::{Constraint, Parameter};
    use crate::trial::{Outcome, Timing};

    fn space() -> Arc<Space> {
        let parameters = vec![
            Parameter::permutation("order", &["i", "j", "k", "l"]),
            Parameter::categorical("pack", &["none", "a", "b"]),
            Parameter::factorization("m", 60, 3),
            Parameter::ordinal("unroll", [0, 4, 16]),
        ];
        let tied = Constraint::new("tied", "unroll or pack = none", &["unroll", "pack"], |v| {
            v[0].int() > 0 || v[1].text() == "none"
        });
        Arc::new(Space::new("test", parameters, vec![tied]).unwrap())
    }

    #[test]
    fn an_action_is_one_move_of_a_state_and_the_same_move_of_all() {
        let space = space();
        let actions = Actions::new(&space);
        assert_eq!(actions.n_actions, 3 + 3 + 3 * 9 + 2);
        for index in (0..space.size()).step_by(7) {
            let config = space.config_at(index);
            let moves = actions.moves(&config);
            let distinct: HashSet<usize> = moves.iter().map(|(action, _)| *action).collect();
            assert_eq!(distinct.len(), space.neighbours(&config).len());
            for (action, neighbour) in moves {
                assert!(action < actions.n_actions && space.contains(&neighbour));
                assert_eq!(actions.between(&config, &neighbour), action);
            }
        }
        // Factor 5 moves from the first part to the last, regardless of the others.
        let move_of = |from: [u64; 3], to: [u64; 3]| {
            let config = |factors: &[u64]| Config::new([0, 0, space.rank_of_factors(2, factors).unwrap(), 0]);
            actions.between(&config(&from), &config(&to))
        };
        assert_eq!(move_of([60, 1, 1], [12, 1, 5]), move_of([5, 4, 3], [1, 4, 15]));
        assert_ne!(move_of([60, 1, 1], [12, 1, 5]), move_of([60, 1, 1], [20, 1, 3]));
    }

    #[test]
    fn a_start_is_spread_unless_enough_is_known() {
        let space = Arc::new(Space::new("test", vec![Parameter::ordinal("p", 0..1000)], vec![]).unwrap());
        let mut start: Vec<u64> =
            build("na2c", &space, 0).unwrap().propose(16).iter().map(|config| config.ranks()[0]).collect();
        start.sort();
        assert_eq!(start.len(), N_START);
        assert!(start.windows(2).all(|pair| pair[1] - pair[0] >= 20), "{start:?}");
        let mut search = build("na2c", &space, 0).unwrap();
        let known = (0..N_START as u64).map(|rank| Trial {
            config: Config::new([500 + rank]),
            outcome: Outcome::Measured(Timing::of_samples(&[rank as f64 + 1.0], false)),
        });
        search.observe(&known.collect::<Vec<_>>());
        let around = search.propose(6);
        assert!(!around.is_empty() && around.iter().all(|c| c.ranks()[0].abs_diff(500) <= 30), "{around:?}");
    }

    #[test]
    fn walks_start_at_the_best_state() {
        let space = Arc::new(Space::new("test", vec![Parameter::ordinal("p", 0..1000)], vec![]).unwrap());
        let mut search = build("na2c:start=untiled,steps=2", &space, 0).unwrap();
        let measured = |config: &Config, median_ns| {
            let timing = Timing::of_samples(&[median_ns], false);
            Trial { config: config.clone(), outcome: Outcome::Measured(timing) }
        };
        let first = search.propose(6);
        assert_eq!(first[0], Config::new([0]));
        let mut trials: Vec<Trial> = first.iter().map(|config| measured(config, 5.0)).collect();
        trials.push(measured(&Config::new([500]), 3.0));
        search.observe(&trials);
        let around = search.propose(6);
        assert!(!around.is_empty() && around.iter().all(|c| c.ranks()[0].abs_diff(500) <= 4), "{around:?}");
    }
}
