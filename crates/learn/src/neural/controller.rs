//! Recurrent policy that makes one choice after another.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::Trained;
use super::policy::{policy_loss, probability};
use crate::tape::{Dense, LayerBuilder, Lstm, NumberRows, Parameters, Tape, Var, Weight, forth, log_softmax};

/// Score of a choice that is not allowed.
const FORBIDDEN: f32 = -1e9;

/// Training options of a controller.
#[derive(Debug, Clone, PartialEq)]
pub struct ControllerOptions {
    /// Width of the LSTM's state, and of the embedding of a choice.
    pub n_hidden: usize,
    /// Learning rate of Adam.
    pub learning_rate: f64,
    /// Weight of the entropy bonus, which prevents premature convergence of the policy.
    pub entropy: f32,
    /// Decay of the moving-average baseline, 0 to 1.
    pub baseline_decay: f32,
}

impl Default for ControllerOptions {
    fn default() -> ControllerOptions {
        ControllerOptions { n_hidden: 64, learning_rate: 5e-3, entropy: 0.01, baseline_decay: 0.9 }
    }
}

/// Recurrent policy over sequences of choices: an LSTM that reads each choice made and predicts the
/// probabilities of the next one.
///
/// The policy learns by REINFORCE with a moving average of the rewards as the baseline.
///
/// # Source
/// Zoph and Le, "Neural architecture search with reinforcement learning" (2017), section 3; a baseline in the
/// paper on GEMM tiling as a Markov decision process.
pub struct Controller {
    network: Trained<ControllerLayers>,
    /// Number of alternatives at each position.
    n_choices: Vec<usize>,
    entropy: f32,
    baseline_decay: f32,
    /// Moving average of the rewards, once there are any.
    baseline: Option<f32>,
    rng: Xoshiro256PlusPlus,
}

struct ControllerLayers {
    /// Embedding of the start of a sequence, and then of each alternative of each position but the last.
    embedding: Weight,
    /// Cell from an embedded choice and the hidden state to the next state.
    lstm: Lstm,
    /// Layers from the hidden state to the scores at each position.
    heads: Vec<Dense>,
}

impl ControllerLayers {
    fn new(builder: &mut LayerBuilder, n_choices: &[usize], n_hidden: usize) -> ControllerLayers {
        let n_embedded: usize = n_choices.iter().rev().skip(1).sum();
        let head = |builder: &mut LayerBuilder, place: usize| {
            builder.dense(&format!("heads.{place}"), n_hidden, n_choices[place], forth(n_hidden))
        };
        ControllerLayers {
            embedding: builder.weight("embedding".into(), 1 + n_embedded, n_hidden, 1.0),
            lstm: builder.lstm("lstm", n_hidden, n_hidden, [forth(2 * n_hidden); 2], 0.0),
            heads: (0..n_choices.len()).map(|place| head(builder, place)).collect(),
        }
    }

    /// Reads the choices made before `place`, as rows of the embedding, and returns the next state and the
    /// scores at that position.
    fn step(&self, tape: &mut Tape, before: Option<Var>, place: usize, rows: Vec<usize>) -> (Var, Var) {
        let n = rows.len();
        let inputs = tape.lookup(self.embedding, rows);
        let entering = tape.dense(inputs, self.lstm.entering);
        let state = tape.lstm(self.lstm, entering, 0, n, before.map(|before| (before, before)));
        (state, tape.dense(state, self.heads[place]))
    }
}

impl Controller {
    /// Makes an untrained policy, for sequences with `n_choices` alternatives at each position.
    ///
    /// # Panics
    /// If a position has no alternative.
    pub fn new(n_choices: &[usize], options: &ControllerOptions, seed: u64) -> Controller {
        assert!(n_choices.iter().all(|&n| n > 0), "invariant: a place has an alternative");
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut builder = LayerBuilder::new(&mut rng);
        let layers = ControllerLayers::new(&mut builder, n_choices, options.n_hidden);
        Controller {
            network: Trained::new(layers, builder.finish(), options.learning_rate),
            n_choices: n_choices.to_vec(),
            entropy: options.entropy,
            baseline_decay: options.baseline_decay,
            baseline: None,
            rng,
        }
    }

    /// Samples sequences. `allows` tells whether an alternative is allowed after the choices made so far; at
    /// least one must be.
    ///
    /// # Cost
    /// About 0.1 ms for each position.
    pub fn sample(&mut self, n_sequences: usize, allows: impl Fn(&[usize], usize) -> bool) -> Vec<Vec<usize>> {
        let mut tape = Tape::new(&self.network.parameters);
        let mut state = None;
        let mut sequences = vec![Vec::with_capacity(self.n_choices.len()); n_sequences];
        for (place, &n) in self.n_choices.iter().enumerate() {
            let rows = self.embedding_rows(sequences.iter().map(Vec::as_slice));
            let forbidden = forbidden(sequences.iter().map(Vec::as_slice), n, &allows);
            let (next, scores) = self.network.layers.step(&mut tape, state, place, rows);
            state = Some(next);
            let mut scores = allowed(tape.value(scores), &forbidden);
            for (sequence, log_policy) in sequences.iter_mut().zip(scores.values.chunks_exact_mut(n)) {
                log_softmax(log_policy);
                let mut rest: f32 = self.rng.random();
                let allowed = |&choice: &usize| log_policy[choice] > FORBIDDEN / 2.0;
                let drawn = (0..n).filter(allowed).find(|&choice| {
                    rest -= probability(log_policy[choice]);
                    rest < 0.0
                });
                // Rounding can leave some probability after the last one.
                let choice = drawn.or_else(|| (0..n).rfind(allowed));
                sequence.push(choice.expect("invariant: an alternative is allowed"));
            }
        }
        sequences
    }

    /// Takes a training step on sequences from any source and their rewards. `allows` is as for
    /// [`Controller::sample`].
    ///
    /// # Panics
    /// If there is not one reward for each sequence, or a sequence could not have been drawn.
    pub fn train(&mut self, sequences: &[Vec<usize>], rewards: &[f32], allows: impl Fn(&[usize], usize) -> bool) {
        assert_eq!(sequences.len(), rewards.len(), "invariant: a reward for each sequence");
        if sequences.is_empty() || self.n_choices.is_empty() {
            return;
        }
        let mean = rewards.iter().sum::<f32>() / rewards.len() as f32;
        let baseline = self.baseline.unwrap_or(mean);
        self.baseline = Some(self.baseline_decay * baseline + (1.0 - self.baseline_decay) * mean);
        let advantages: Vec<f32> = rewards.iter().map(|reward| reward - baseline).collect();
        let steps = self.steps(sequences, allows);
        let entropy = self.entropy;
        self.network.descend(|layers, parameters| loss(layers, parameters, &steps, &advantages, entropy));
    }

    /// Inputs of the network at each position of these sequences.
    fn steps(&self, sequences: &[Vec<usize>], allows: impl Fn(&[usize], usize) -> bool) -> Vec<SequenceStep> {
        let of_place = |(place, &n): (usize, &usize)| {
            assert!(
                sequences
                    .iter()
                    .all(|s| s.len() == self.n_choices.len() && s[place] < n && allows(&s[..place], s[place]))
            );
            let prefixes = sequences.iter().map(|sequence| &sequence[..place]);
            SequenceStep {
                rows: self.embedding_rows(prefixes.clone()),
                forbidden: forbidden(prefixes, n, &allows),
                chosen: sequences.iter().map(|sequence| sequence[place]).collect(),
            }
        };
        self.n_choices.iter().enumerate().map(of_place).collect()
    }

    /// Row of the embedding for the last choice of each prefix; all prefixes have the same length.
    fn embedding_rows<'a>(&self, prefixes: impl Iterator<Item = &'a [usize]>) -> Vec<usize> {
        let row = |prefix: &[usize]| match prefix.split_last() {
            None => 0,
            Some((choice, before)) => 1 + self.n_choices[..before.len()].iter().sum::<usize>() + choice,
        };
        prefixes.map(row).collect()
    }
}

/// Position in a batch of sequences.
struct SequenceStep {
    rows: Vec<usize>,
    forbidden: Vec<bool>,
    chosen: Vec<usize>,
}

/// Determines whether each alternative is forbidden after each of these prefixes.
fn forbidden<'a>(
    prefixes: impl Iterator<Item = &'a [usize]>,
    n: usize,
    allows: &impl Fn(&[usize], usize) -> bool,
) -> Vec<bool> {
    prefixes.flat_map(|prefix| (0..n).map(move |choice| !allows(prefix, choice))).collect()
}

/// Scores in which forbidden alternatives have such low values that their probability is 0.
fn allowed(scores: &NumberRows, forbidden: &[bool]) -> NumberRows {
    let mut scores = scores.clone();
    scores.values.iter_mut().zip(forbidden).filter(|(_, forbidden)| **forbidden).for_each(|(x, _)| *x = FORBIDDEN);
    scores
}

/// Computes the sum of the losses of the choices at all positions, with its gradients.
fn loss(
    layers: &ControllerLayers,
    parameters: &Parameters,
    steps: &[SequenceStep],
    advantages: &[f32],
    entropy: f32,
) -> (f64, Vec<Vec<f32>>) {
    let mut tape = Tape::new(parameters);
    let (mut state, mut sum, mut seeds) = (None, 0.0, Vec::with_capacity(steps.len()));
    for (place, SequenceStep { rows, forbidden, chosen }) in steps.iter().enumerate() {
        let (next, scores) = layers.step(&mut tape, state, place, rows.clone());
        let of_allowed = allowed(tape.value(scores), forbidden);
        let (loss, gradient) = policy_loss(&of_allowed, chosen.iter().copied(), advantages, entropy);
        (state, sum) = (Some(next), sum + loss);
        seeds.push((scores, gradient));
    }
    (sum, tape.backward(seeds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::gradients;

    fn anything(_: &[usize], _: usize) -> bool {
        true
    }

    fn options() -> ControllerOptions {
        ControllerOptions { n_hidden: 16, ..ControllerOptions::default() }
    }

    #[test]
    fn the_gradient_is_that_of_the_loss() {
        let allows = |prefix: &[usize], choice| prefix != [1] || choice != 0;
        let controller = Controller::new(&[2, 3, 2], &ControllerOptions { n_hidden: 4, ..options() }, 5);
        let steps = controller.steps(&[vec![0, 2, 1], vec![1, 1, 0], vec![1, 2, 1]], allows);
        let layers = &controller.network.layers;
        gradients::check(&controller.network.parameters, |p| loss(layers, p, &steps, &[1.0, -0.5, 2.0], 0.1));
    }

    /// The second arm that pays depends on the first.
    #[test]
    fn the_best_pair_of_arms_is_learnt() {
        let reward = |s: &[usize]| {
            if s == [3, 1] {
                1.0
            } else if s[1] == 4 {
                0.4
            } else {
                0.1
            }
        };
        let mut controller = Controller::new(&[5, 6], &options(), 7);
        for _ in 0..150 {
            let sequences = controller.sample(16, anything);
            let rewards: Vec<f32> = sequences.iter().map(|s| reward(s)).collect();
            controller.train(&sequences, &rewards, anything);
        }
        let n_best = controller.sample(100, anything).iter().filter(|s| **s == [3, 1]).count();
        assert!(n_best > 80, "{n_best} of 100");
    }

    #[test]
    fn what_is_not_allowed_is_never_drawn() {
        let allows = |prefix: &[usize], choice| prefix.first().is_none_or(|first| choice > *first);
        let mut controller = Controller::new(&[3, 4], &options(), 1);
        for _ in 0..20 {
            let sequences = controller.sample(50, allows);
            assert!(sequences.iter().all(|s| s[1] > s[0]), "{sequences:?}");
            let rewards: Vec<f32> = sequences.iter().map(|s| s[0] as f32).collect();
            controller.train(&sequences, &rewards, allows);
        }
    }

    #[test]
    fn the_seed_decides() {
        let of_seed = |seed| Controller::new(&[9, 9, 9], &options(), seed).sample(5, anything);
        assert_eq!(of_seed(1), of_seed(1));
        assert_ne!(of_seed(1), of_seed(2));
    }
}
