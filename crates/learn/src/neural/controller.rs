//! A recurrent policy that makes one choice after the other.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::activation::{log_softmax, sigmoid};
use burn::tensor::{Device, Tensor};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Trained, column, device, linear, matrix, numbers, one_hot, positions, tanh, uniform};

/// What is added to the logit of a choice that is not allowed.
const FORBIDDEN: f32 = -1e9;

/// How a controller learns.
#[derive(Debug, Clone, PartialEq)]
pub struct ControllerOptions {
    /// The width of the LSTM's state, and of the embedding of a choice.
    pub n_hidden: usize,
    /// Adam's.
    pub learning_rate: f64,
    /// The weight of the policy's entropy, which keeps it from settling too soon.
    pub entropy: f32,
    /// The share of the baseline that stays when the rewards of a batch join it, 0 to 1.
    pub baseline_decay: f32,
}

impl Default for ControllerOptions {
    fn default() -> ControllerOptions {
        ControllerOptions { n_hidden: 64, learning_rate: 5e-3, entropy: 0.01, baseline_decay: 0.9 }
    }
}

/// A policy over sequences of choices: an LSTM reads each choice that was made and gives the probabilities of the next one.
///
/// It learns by REINFORCE with a moving average of the rewards as the baseline.
///
/// # Source
/// Zoph and Le, "Neural architecture search with reinforcement learning" (2017), section 3; a rival in the paper on GEMM tiling as
/// a Markov decision process.
pub struct Controller {
    network: Trained<Network>,
    /// Alternatives at each place.
    n_choices: Vec<usize>,
    entropy: f32,
    baseline_decay: f32,
    /// The moving average of the rewards, once there are some.
    baseline: Option<f32>,
    rng: Xoshiro256PlusPlus,
}

#[derive(Module, Debug)]
struct Network {
    /// A row for the start of a sequence, then one for each alternative of each place but the last.
    embedding: Param<Tensor<2>>,
    /// From an embedded choice and the hidden state to the four gates of the LSTM.
    gates: Linear,
    /// From the hidden state to the logits at each place.
    heads: Vec<Linear>,
}

/// The state of an LSTM, a row for each sequence.
#[derive(Clone)]
struct State {
    cell: Tensor<2>,
    hidden: Tensor<2>,
}

impl Network {
    fn new(n_choices: &[usize], n_hidden: usize, rng: &mut Xoshiro256PlusPlus) -> Network {
        let n_embedded: usize = n_choices.iter().rev().skip(1).sum();
        Network {
            embedding: uniform(1 + n_embedded, n_hidden, 1.0, rng),
            gates: linear(2 * n_hidden, 4 * n_hidden, rng),
            heads: n_choices.iter().map(|&n| linear(n_hidden, n, rng)).collect(),
        }
    }

    fn start(&self, n_sequences: usize, device: &Device) -> State {
        let [_, n_hidden] = self.embedding.val().dims();
        let zeros = Tensor::zeros([n_sequences, n_hidden], device);
        State { cell: zeros.clone(), hidden: zeros }
    }

    /// Reads the choice made before `place`, as a row of the embedding, and gives the logarithms of the probabilities there.
    fn step(&self, state: &mut State, place: usize, rows: &[usize], forbidden: Tensor<2>) -> Tensor<2> {
        let device = forbidden.device();
        let input = self.embedding.val().select(0, positions(rows, &device));
        let gates = self.gates.forward(Tensor::cat(vec![input, state.hidden.clone()], 1));
        let mut gates = gates.chunk(4, 1).into_iter();
        let mut gate = || gates.next().expect("invariant: four gates");
        let (input, forget, output, candidate) = (sigmoid(gate()), sigmoid(gate()), sigmoid(gate()), tanh(gate()));
        state.cell = forget * state.cell.clone() + input * candidate;
        state.hidden = output * tanh(state.cell.clone());
        log_softmax(self.heads[place].forward(state.hidden.clone()) + forbidden, 1)
    }
}

impl Controller {
    /// A controller that knows nothing yet, for sequences with so many alternatives at each place.
    ///
    /// # Panics
    /// Where a place has no alternative.
    pub fn new(n_choices: &[usize], options: &ControllerOptions, seed: u64) -> Controller {
        assert!(n_choices.iter().all(|&n| n > 0), "invariant: a place has an alternative");
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let network = Network::new(n_choices, options.n_hidden, &mut rng);
        Controller {
            network: Trained::new(network, options.learning_rate),
            n_choices: n_choices.to_vec(),
            entropy: options.entropy,
            baseline_decay: options.baseline_decay,
            baseline: None,
            rng,
        }
    }

    /// Draws sequences. `allows` says which alternatives there are after the choices made so far; at least one is.
    ///
    /// # Cost
    /// About 0.1 ms for each place.
    pub fn sample(&mut self, n_sequences: usize, allows: impl Fn(&[usize], usize) -> bool) -> Vec<Vec<usize>> {
        let (network, device) = (self.network.frozen(), Device::flex());
        let mut state = network.start(n_sequences, &device);
        let mut sequences = vec![Vec::with_capacity(self.n_choices.len()); n_sequences];
        for (place, &n) in self.n_choices.iter().enumerate() {
            let rows = self.embedding_rows(sequences.iter().map(Vec::as_slice));
            let forbidden = forbidden(sequences.iter().map(Vec::as_slice), n, &allows, &device);
            let log_policy = numbers(network.step(&mut state, place, &rows, forbidden));
            for (sequence, log_policy) in sequences.iter_mut().zip(log_policy.chunks(n)) {
                let mut rest: f32 = self.rng.random();
                let allowed = |&choice: &usize| log_policy[choice] > FORBIDDEN / 2.0;
                let drawn = (0..n).filter(allowed).find(|&choice| {
                    rest -= log_policy[choice].exp();
                    rest < 0.0
                });
                // Rounding can leave a rest after the last one.
                let choice = drawn.or_else(|| (0..n).rfind(allowed));
                sequence.push(choice.expect("invariant: an alternative is allowed"));
            }
        }
        sequences
    }

    /// One step of learning from sequences, whoever drew them, and their rewards. `allows` is as for [`Controller::sample`].
    ///
    /// # Panics
    /// Where there is not one reward for each sequence, or a sequence is not one that could be drawn.
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
        self.network.descend(|network| loss(network, &steps, &advantages, entropy));
    }

    /// What the network is given at each place when these sequences are made.
    fn steps(&self, sequences: &[Vec<usize>], allows: impl Fn(&[usize], usize) -> bool) -> Vec<Step> {
        let of_place = |(place, &n): (usize, &usize)| {
            assert!(
                sequences
                    .iter()
                    .all(|s| s.len() == self.n_choices.len() && s[place] < n && allows(&s[..place], s[place]))
            );
            let prefixes = sequences.iter().map(|sequence| &sequence[..place]);
            Step {
                rows: self.embedding_rows(prefixes.clone()),
                forbidden: forbidden(prefixes, n, &allows, &device()),
                chosen: one_hot(sequences.iter().map(|sequence| sequence[place]), n, &device()),
            }
        };
        self.n_choices.iter().enumerate().map(of_place).collect()
    }

    /// The row of the embedding for the last choice of each prefix; all are of one length.
    fn embedding_rows<'a>(&self, prefixes: impl Iterator<Item = &'a [usize]>) -> Vec<usize> {
        let row = |prefix: &[usize]| match prefix.split_last() {
            None => 0,
            Some((choice, before)) => 1 + self.n_choices[..before.len()].iter().sum::<usize>() + choice,
        };
        prefixes.map(row).collect()
    }
}

/// One place of a batch of sequences.
struct Step {
    rows: Vec<usize>,
    forbidden: Tensor<2>,
    chosen: Tensor<2>,
}

/// What is added to the logits after these prefixes.
fn forbidden<'a>(
    prefixes: impl Iterator<Item = &'a [usize]>,
    n: usize,
    allows: &impl Fn(&[usize], usize) -> bool,
    device: &Device,
) -> Tensor<2> {
    let of_prefix = |prefix| (0..n).map(move |choice| if allows(prefix, choice) { 0.0 } else { FORBIDDEN });
    matrix(prefixes.flat_map(of_prefix).collect(), n, device)
}

/// Minus the mean of `advantage · log π(sequence)` and of the weighted entropy at each place.
fn loss(network: &Network, steps: &[Step], advantages: &[f32], entropy: f32) -> Tensor<1> {
    let device = device();
    let mut state = network.start(advantages.len(), &device);
    let mut gain = Tensor::zeros([advantages.len(), 1], &device);
    for (place, Step { rows, forbidden, chosen }) in steps.iter().enumerate() {
        let log_policy = network.step(&mut state, place, rows, forbidden.clone());
        let disorder = (log_policy.clone().exp() * log_policy.clone()).sum_dim(1) * -entropy;
        gain = gain + (log_policy * chosen.clone()).sum_dim(1) * column(advantages, &device) + disorder;
    }
    -gain.mean()
}

#[cfg(test)]
mod tests {
    use super::super::gradients;
    use super::*;

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
        gradients::check(&controller.network.network, |n| loss(n, &steps, &[1.0, -0.5, 2.0], 0.1));
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
