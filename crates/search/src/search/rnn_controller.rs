//! Recurrent policy that emits one parameter after another.

use std::collections::HashMap;
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Controller, ControllerOptions};

use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::space::{Config, Domain, Space};
use crate::trial::Trial;

/// Maximum number of alternatives of a choice; parameters with more values take several choices.
const MOST_ALTERNATIVES: u64 = 64;
/// Number of times that the policy is sampled for unseen configurations before random ones replace them.
const ROUNDS: usize = 4;
/// Maximum number of trials that the policy learns from when a search begins: the latest ones.
const MOST_LESSONS: usize = 512;

pub(super) const ROW: SearchRow = SearchRow {
    name: "rnn_controller",
    text: "an LSTM that emits one parameter after the other and learns from the rewards",
    paper: "the RNN baseline of GEMM tiling as a Markov decision process; Zoph and Le (2017)",
    transfers: false,
    options: &[
        SearchOption { name: "batch", default: "8", text: "trials between two gradient steps, at least 1" },
        SearchOption { name: "width", default: "64", text: "width of the LSTM's state, 1 to 1024" },
        SearchOption { name: "rate", default: "0.005", text: "the learning rate, 0.000001 to 1" },
        SearchOption { name: "entropy", default: "0.01", text: "the weight of the policy's entropy, 0 to 10" },
    ],
    make: |Problem { space, .. }, seed, options| {
        let batch = options.number("batch", 1..=100_000)?;
        let controller = ControllerOptions {
            n_hidden: options.number("width", 1..=1024)?,
            learning_rate: options.number("rate", 1e-6..=1.0)?,
            entropy: options.number("entropy", 0.0..=10.0)?,
            ..ControllerOptions::default()
        };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let sequences = Sequences::new(space);
        Ok(Box::new(RnnController {
            batch,
            controller: Controller::new(&sequences.n_choices(), &controller, rng.random()),
            sequences,
            seen: Seen::new(space),
            rng,
            fitness: HashMap::new(),
            best: f64::MIN_POSITIVE,
            lessons: Vec::new(),
        }))
    },
};

/// REINFORCE on sequences of choices.
///
/// # Source
/// Zoph and Le, "Neural architecture search with reinforcement learning" (2017), which the paper on GEMM
/// tiling as a Markov decision process compares with. The reward is the throughput, as a share of the best so
/// far. No configuration is measured twice: when the policy draws a known one, it learns from the known
/// reward. An illegal configuration becomes the nearest legal one.
struct RnnController {
    batch: usize,
    controller: Controller,
    sequences: Sequences,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    /// Fitness of each known configuration.
    fitness: HashMap<Config, f64>,
    best: f64,
    /// Configurations to learn from, each with its fitness.
    lessons: Vec<(Config, f64)>,
}

impl RnnController {
    /// Learns from the collected lessons.
    fn learn(&mut self) {
        let sequences: Vec<Vec<usize>> = self.lessons.iter().map(|(config, _)| self.sequences.of(config)).collect();
        let rewards: Vec<f32> = self.lessons.iter().map(|(_, fitness)| (fitness / self.best) as f32).collect();
        self.controller.train(&sequences, &rewards, |prefix, choice| self.sequences.allows(prefix, choice));
        self.lessons.clear();
    }
}

impl Search for RnnController {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let n = n.min(self.batch);
        let mut batch = Vec::new();
        for _ in 0..ROUNDS {
            if batch.len() >= n {
                break;
            }
            let allows = |prefix: &[usize], choice| self.sequences.allows(prefix, choice);
            for sequence in self.controller.sample(n - batch.len(), allows) {
                let mut config = self.sequences.config(&sequence);
                if !self.seen.space().contains(&config) {
                    config = self.seen.space().nearest(&config);
                }
                if self.seen.insert(&config) {
                    batch.push(config);
                } else if let Some(&fitness) = self.fitness.get(&config) {
                    self.lessons.push((config, fitness));
                }
            }
            if self.lessons.len() >= self.batch {
                self.learn();
            }
        }
        if batch.is_empty() && n > 0 {
            batch.extend((0..n).map_while(|_| self.seen.draw(&mut self.rng)));
        }
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        let fresh = self.seen.note(trials);
        for (at, trial) in fresh.iter().enumerate() {
            let fitness = trial.outcome.fitness();
            self.fitness.insert(trial.config.clone(), fitness);
            self.best = self.best.max(fitness);
            if at + MOST_LESSONS < fresh.len() {
                continue;
            }
            self.lessons.push((trial.config.clone(), fitness));
            if self.lessons.len() >= self.batch {
                self.learn();
            }
        }
    }
}

/// Encoding of the configurations of a space as sequences of choices with few alternatives each.
///
/// A factorization is a sequence of divisors, each of the quotient that the previous ones leave; the last
/// part is the remaining quotient. Any other value is the digits of its rank: in the factorial number system
/// for a permutation, so that each digit selects one of the remaining names; a single digit for a parameter
/// with few values; and digits of equal size for one with many, coarsest first.
struct Sequences {
    space: Arc<Space>,
    choices: Vec<Decision>,
}

enum Decision {
    /// Digit of a parameter's rank.
    Digit { parameter: usize, weight: u64, n: u64 },
    /// Factor of a factorization, as an index into the divisors of the product.
    Factor { parameter: usize, product: u64, divisors: Vec<u64> },
}

impl Decision {
    fn parameter(&self) -> usize {
        match self {
            Decision::Digit { parameter, .. } | Decision::Factor { parameter, .. } => *parameter,
        }
    }
}

impl Sequences {
    fn new(space: &Arc<Space>) -> Sequences {
        let mut choices = Vec::new();
        for parameter in 0..space.n_parameters() {
            let n_values = space.n_values(parameter);
            if n_values == 1 {
                continue;
            }
            match space.domain(parameter) {
                Domain::Factorization { n, parts } => {
                    let divisors = divisors(space.prime_powers(parameter));
                    let factor = || Decision::Factor { parameter, product: *n, divisors: divisors.clone() };
                    choices.extend((1..*parts).map(|_| factor()));
                }
                Domain::Permutation(names) => {
                    let mut weight = n_values;
                    choices.extend((2..=names.len() as u64).rev().map(|n| {
                        weight /= n;
                        Decision::Digit { parameter, weight, n }
                    }));
                }
                Domain::Ordinal(_) | Domain::Categorical(_) => {
                    let n_digits = (1..).find(|&digits| MOST_ALTERNATIVES.saturating_pow(digits) >= n_values);
                    let n_digits = n_digits.expect("invariant: some power is large enough");
                    let base = (2..).find(|base: &u64| base.saturating_pow(n_digits) >= n_values);
                    let base = base.expect("invariant: the largest base is large enough");
                    choices.extend((0..n_digits).rev().map(|digit| {
                        let weight = base.pow(digit);
                        Decision::Digit { parameter, weight, n: base.min(n_values.div_ceil(weight)) }
                    }));
                }
            }
        }
        Sequences { space: Arc::clone(space), choices }
    }

    /// Returns the number of alternatives of each choice.
    fn n_choices(&self) -> Vec<usize> {
        let n = |choice: &Decision| match choice {
            Decision::Digit { n, .. } => *n as usize,
            Decision::Factor { divisors, .. } => divisors.len(),
        };
        self.choices.iter().map(n).collect()
    }

    /// Whether an alternative leads to a value, after the choices made so far.
    fn allows(&self, prefix: &[usize], alternative: usize) -> bool {
        let next = &self.choices[prefix.len()];
        let of_parameter = self.choices.iter().zip(prefix).filter(|(choice, _)| choice.parameter() == next.parameter());
        match next {
            Decision::Digit { parameter, weight, .. } => {
                let digits = of_parameter.map(|(choice, &digit)| match choice {
                    Decision::Digit { weight, .. } => weight * digit as u64,
                    Decision::Factor { .. } => 0,
                });
                digits.sum::<u64>() + weight * (alternative as u64) < self.space.n_values(*parameter)
            }
            Decision::Factor { product, divisors, .. } => {
                let taken: u64 = of_parameter.map(|(_, &divisor)| divisors[divisor]).product();
                (product / taken).is_multiple_of(divisors[alternative])
            }
        }
    }

    /// Sequence of choices for a configuration.
    fn of(&self, config: &Config) -> Vec<usize> {
        let mut sequence = Vec::with_capacity(self.choices.len());
        // Remaining factors of the current factorization.
        let mut factors = Vec::new();
        let mut at = usize::MAX;
        for choice in &self.choices {
            let parameter = choice.parameter();
            let rank = config.ranks()[parameter];
            sequence.push(match choice {
                Decision::Digit { weight, n, .. } => (rank / weight % n) as usize,
                Decision::Factor { divisors, .. } => {
                    if parameter != at {
                        factors = self.space.value_at(parameter, rank).factors().to_vec();
                        factors.reverse();
                    }
                    let factor = factors.pop().expect("invariant: a choice for each factor but the last");
                    divisors.binary_search(&factor).expect("invariant: a factor divides the product")
                }
            });
            at = parameter;
        }
        sequence
    }

    /// Configuration of a sequence, which need not be legal.
    fn config(&self, sequence: &[usize]) -> Config {
        let mut ranks = vec![0; self.space.n_parameters()];
        // For each factorization, all factors but the last.
        let mut factors = vec![Vec::new(); ranks.len()];
        for (choice, &alternative) in self.choices.iter().zip(sequence) {
            match choice {
                Decision::Digit { parameter, weight, .. } => ranks[*parameter] += weight * alternative as u64,
                Decision::Factor { parameter, divisors, .. } => factors[*parameter].push(divisors[alternative]),
            }
        }
        for (parameter, mut factors) in factors.into_iter().enumerate() {
            if let Domain::Factorization { n, .. } = self.space.domain(parameter)
                && !factors.is_empty()
            {
                factors.push(n / factors.iter().product::<u64>());
                let rank = self.space.rank_of_factors(parameter, &factors);
                ranks[parameter] = rank.expect("invariant: only divisors of what is left are allowed");
            }
        }
        Config::new(ranks)
    }
}

/// Returns the divisors of a product of prime powers, in ascending order.
fn divisors(prime_powers: &[(u64, u32)]) -> Vec<u64> {
    let mut divisors = vec![1];
    for &(prime, exponent) in prime_powers {
        let powers = (0..=exponent).map(|e| prime.pow(e));
        divisors = powers.flat_map(|power| divisors.iter().map(move |divisor| divisor * power)).collect();
    }
    divisors.sort();
    divisors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Parameter;

    #[test]
    fn every_configuration_is_a_sequence_that_is_allowed() {
        let parameters = vec![
            Parameter::permutation("order", &["i", "j", "k", "l"]),
            Parameter::factorization("m", 60, 3),
            Parameter::ordinal("one", [7]),
            Parameter::categorical("pack", &["none", "a", "b"]),
            Parameter::factorization("prime", 1, 2),
        ];
        let space = Arc::new(Space::new("test", parameters, vec![]).unwrap());
        let sequences = Sequences::new(&space);
        for index in 0..space.size() {
            check(&sequences, &space.config_at(index));
        }
        // A choice whose alternatives are all forbidden would end the sampling.
        assert_eq!(sequences.n_choices(), [4, 3, 2, 12, 12, 3]);
        assert!(sequences.allows(&[0, 0, 0, 3], 2) && !sequences.allows(&[0, 0, 0, 3], 6), "60 = 4 · 15");
    }

    #[test]
    fn many_values_take_several_digits() {
        let space = Space::new("test", vec![Parameter::ordinal("p", 0..5000)], vec![]).unwrap();
        let sequences = Sequences::new(&Arc::new(space));
        assert_eq!(sequences.n_choices(), [16, 18, 18]);
        for rank in 0..5000 {
            check(&sequences, &Config::new([rank]));
        }
    }

    fn check(sequences: &Sequences, config: &Config) {
        let sequence = sequences.of(config);
        assert_eq!(&sequences.config(&sequence), config);
        for (place, &alternative) in sequence.iter().enumerate() {
            assert!(sequences.allows(&sequence[..place], alternative), "{config:?}: {sequence:?}");
        }
    }
}
