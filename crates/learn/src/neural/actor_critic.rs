//! A policy and a value function, for walks through a space.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::{log_softmax, relu, softmax};
use burn::tensor::{Device, Tensor};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Trained, column, device, linear, matrix, numbers, one_hot};

/// How an actor and its critic learn.
#[derive(Debug, Clone, PartialEq)]
pub struct ActorCriticOptions {
    /// The width of the two hidden layers of each network.
    pub n_hidden: usize,
    /// Adam's.
    pub learning_rate: f64,
    /// What the value of the next state counts for, 0 to 1.
    pub discount: f32,
    /// The weight of the policy's entropy, which keeps it from settling too soon.
    pub entropy: f32,
}

impl Default for ActorCriticOptions {
    fn default() -> ActorCriticOptions {
        ActorCriticOptions { n_hidden: 128, learning_rate: 1e-3, discount: 0.9, entropy: 0.01 }
    }
}

/// A step of a walk and what it gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Transition {
    /// The features of the state.
    pub state: Vec<f32>,
    /// The action taken there.
    pub action: usize,
    /// What it gave.
    pub reward: f32,
    /// The features of the state that it led to.
    pub next_state: Vec<f32>,
}

/// Advantage actor-critic: an actor that says which action to take, and a critic that says what a state is worth.
///
/// # Source
/// Section 3.4 of the paper on GEMM tiling as a Markov decision process; Mnih et al., "Asynchronous methods for deep
/// reinforcement learning" (2016), for the entropy.
pub struct ActorCritic {
    actor: Trained<Perceptron>,
    critic: Trained<Perceptron>,
    n_features: usize,
    n_actions: usize,
    discount: f32,
    entropy: f32,
}

/// Two hidden layers.
#[derive(Module, Debug)]
struct Perceptron {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Perceptron {
    fn new(n_inputs: usize, n_hidden: usize, n_outputs: usize, rng: &mut Xoshiro256PlusPlus) -> Perceptron {
        Perceptron {
            first: linear(n_inputs, n_hidden, rng),
            second: linear(n_hidden, n_hidden, rng),
            last: linear(n_hidden, n_outputs, rng),
        }
    }

    fn forward(&self, inputs: Tensor<2>) -> Tensor<2> {
        self.last.forward(relu(self.second.forward(relu(self.first.forward(inputs)))))
    }
}

impl ActorCritic {
    /// An actor and a critic that know nothing yet.
    ///
    /// # Panics
    /// Without features or actions.
    pub fn new(n_features: usize, n_actions: usize, options: &ActorCriticOptions, seed: u64) -> ActorCritic {
        assert!(n_features > 0 && n_actions > 0, "invariant: a walk has states and actions");
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut network = |n_outputs| {
            let network = Perceptron::new(n_features, options.n_hidden, n_outputs, &mut rng);
            Trained::new(network, options.learning_rate)
        };
        ActorCritic {
            actor: network(n_actions),
            critic: network(1),
            n_features,
            n_actions,
            discount: options.discount,
            entropy: options.entropy,
        }
    }

    /// The probability of each action in each of these states.
    ///
    /// # Panics
    /// Where a state has not as many features as there are.
    pub fn policy<'a>(&self, states: impl IntoIterator<Item = &'a [f32]>) -> Vec<Vec<f32>> {
        let actor = self.actor.frozen();
        let probabilities = softmax(actor.forward(self.states(states, &Device::flex())), 1);
        numbers(probabilities).chunks(self.n_actions).map(<[f32]>::to_vec).collect()
    }

    /// What each of these states is worth.
    ///
    /// # Panics
    /// Where a state has not as many features as there are.
    pub fn values<'a>(&self, states: impl IntoIterator<Item = &'a [f32]>) -> Vec<f32> {
        numbers(self.critic.frozen().forward(self.states(states, &Device::flex())))
    }

    /// One step of learning for both.
    ///
    /// # Panics
    /// Where a state has not as many features as there are, or an action is none.
    ///
    /// # Cost
    /// Less than a millisecond for 64 transitions.
    pub fn train(&mut self, transitions: &[Transition]) {
        if transitions.is_empty() {
            return;
        }
        let next_values = self.values(transitions.iter().map(|t| t.next_state.as_slice()));
        let values = self.values(transitions.iter().map(|t| t.state.as_slice()));
        let targets: Vec<f32> =
            transitions.iter().zip(next_values).map(|(t, next)| t.reward + self.discount * next).collect();
        let advantages: Vec<f32> = targets.iter().zip(values).map(|(target, value)| target - value).collect();
        let states = self.states(transitions.iter().map(|t| t.state.as_slice()), &device());
        let actions = one_hot(transitions.iter().map(|t| t.action), self.n_actions, &device());
        let entropy = self.entropy;
        self.actor.descend(|actor| actor_loss(actor, states.clone(), actions, &advantages, entropy));
        self.critic.descend(|critic| critic_loss(critic, states, &targets));
    }

    fn states<'a>(&self, states: impl IntoIterator<Item = &'a [f32]>, device: &Device) -> Tensor<2> {
        let mut values = Vec::new();
        for state in states {
            assert_eq!(state.len(), self.n_features, "invariant: a state has a number for each feature");
            values.extend_from_slice(state);
        }
        matrix(values, self.n_features, device)
    }
}

/// Minus the mean of `advantage · log π(action)` and of the weighted entropy: descending it makes better actions likelier.
fn actor_loss(
    actor: &Perceptron,
    states: Tensor<2>,
    actions: Tensor<2>,
    advantages: &[f32],
    entropy: f32,
) -> Tensor<1> {
    let device = states.device();
    let log_policy = log_softmax(actor.forward(states), 1);
    let gain = (log_policy.clone() * actions).sum_dim(1) * column(advantages, &device);
    let disorder = (log_policy.clone().exp() * log_policy).sum_dim(1) * -entropy;
    -(gain + disorder).mean()
}

/// The mean squared error of the values.
fn critic_loss(critic: &Perceptron, states: Tensor<2>, targets: &[f32]) -> Tensor<1> {
    let device = states.device();
    let error = critic.forward(states) - column(targets, &device);
    (error.clone() * error).mean()
}

#[cfg(test)]
mod tests {
    use super::super::gradients;
    use super::*;

    fn small() -> (Perceptron, Perceptron, Tensor<2>) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        let states = matrix(vec![0.3, -0.8, 0.5, 0.9, 0.1, -0.4], 2, &device());
        (Perceptron::new(2, 5, 4, &mut rng), Perceptron::new(2, 5, 1, &mut rng), states)
    }

    #[test]
    fn gradients_are_those_of_the_losses() {
        let (actor, critic, states) = small();
        let actions = one_hot([2, 0, 3].into_iter(), 4, &device());
        gradients::check(&actor, |a| actor_loss(a, states.clone(), actions.clone(), &[1.0, -0.5, 2.0], 0.1));
        gradients::check(&critic, |c| critic_loss(c, states.clone(), &[1.0, -0.5, 2.0]));
    }

    /// Two states, in each of which another of five arms pays; every step leads to the other state.
    #[test]
    fn the_best_arm_of_a_bandit_is_learnt() {
        let best = [3, 1];
        let states = [[1.0, 0.0], [0.0, 1.0]];
        let mut learner = ActorCritic::new(2, 5, &ActorCriticOptions::default(), 1);
        let mut arms = (0..).map(|i| (i % 2, i / 2 % 5));
        let mut untrained = learner.policy(states.iter().map(|s| s.as_slice()));
        assert!(untrained.iter_mut().all(|p| p.iter().all(|&p| p < 0.9)), "{untrained:?}");
        for _ in 0..150 {
            let batch: Vec<Transition> = arms
                .by_ref()
                .take(30)
                .map(|(state, action)| Transition {
                    state: states[state].to_vec(),
                    action,
                    reward: if action == best[state] { 1.0 } else { 0.2 },
                    next_state: states[1 - state].to_vec(),
                })
                .collect();
            learner.train(&batch);
        }
        for (policy, best) in learner.policy(states.iter().map(|s| s.as_slice())).iter().zip(best) {
            assert!(policy[best] > 0.9, "{policy:?}, best {best}");
        }
    }

    #[test]
    fn values_approach_the_discounted_rewards() {
        let options = ActorCriticOptions { discount: 0.5, ..ActorCriticOptions::default() };
        let mut learner = ActorCritic::new(1, 2, &options, 2);
        let step = Transition { state: vec![1.0], action: 0, reward: 1.0, next_state: vec![1.0] };
        (0..400).for_each(|_| learner.train(std::slice::from_ref(&step)));
        let value = learner.values([[1.0].as_slice()])[0];
        assert!((value - 2.0).abs() < 0.1, "1 + 1/2 + 1/4 + … is 2, not {value}");
    }

    #[test]
    fn the_seed_decides() {
        let of_seed =
            |seed| ActorCritic::new(3, 4, &ActorCriticOptions::default(), seed).policy([[0.1, 0.2, 0.3].as_slice()]);
        assert_eq!(of_seed(1), of_seed(1));
        assert_ne!(of_seed(1), of_seed(2));
    }
}
