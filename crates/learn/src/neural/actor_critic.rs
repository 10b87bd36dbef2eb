//! Advantage actor-critic, for walks through a space.

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::policy::{policy_loss, probability};
use super::{Trained, squared_error};
use crate::tape::{Dense, LayerBuilder, NumberRows, Parameters, Tape, Var, forth, log_softmax};

/// Training options of an actor and its critic.
#[derive(Debug, Clone, PartialEq)]
pub struct ActorCriticOptions {
    /// Width of the two hidden layers of each network.
    pub n_hidden: usize,
    /// Learning rate of Adam.
    pub learning_rate: f64,
    /// Discount factor, 0 to 1.
    pub discount: f32,
    /// Weight of the entropy bonus, which prevents premature convergence of the policy.
    pub entropy: f32,
}

impl Default for ActorCriticOptions {
    fn default() -> ActorCriticOptions {
        ActorCriticOptions { n_hidden: 128, learning_rate: 1e-3, discount: 0.9, entropy: 0.01 }
    }
}

/// Step of an episode, with its reward.
#[derive(Debug, Clone, PartialEq)]
pub struct Transition {
    /// Features of the state.
    pub state: Vec<f32>,
    /// Action taken in the state.
    pub action: usize,
    /// Reward of the action.
    pub reward: f32,
    /// Features of the state that the action led to.
    pub next_state: Vec<f32>,
}

/// Advantage actor-critic: a policy network that chooses actions, and a value network for states.
///
/// # Source
/// Section 3.4 of the paper on GEMM tiling as a Markov decision process; Mnih et al., "Asynchronous methods
/// for deep reinforcement learning" (2016), for the entropy.
pub struct ActorCritic {
    actor: Trained<Perceptron>,
    critic: Trained<Perceptron>,
    n_features: usize,
    n_actions: usize,
    discount: f32,
    entropy: f32,
}

/// Two hidden layers and the last one.
#[derive(Clone, Copy)]
struct Perceptron([Dense; 3]);

impl Perceptron {
    fn new(builder: &mut LayerBuilder, n_inputs: usize, n_hidden: usize, n_outputs: usize) -> Perceptron {
        let mut layer = |name, n_inputs, n_outputs| builder.dense(name, n_inputs, n_outputs, forth(n_inputs));
        Perceptron([
            layer("first", n_inputs, n_hidden),
            layer("second", n_hidden, n_hidden),
            layer("last", n_hidden, n_outputs),
        ])
    }

    fn forward(&self, tape: &mut Tape, inputs: NumberRows) -> Var {
        let [first, second, last] = self.0;
        let inputs = tape.constant(inputs);
        let hidden = [first, second].into_iter().fold(inputs, |inputs, layer| {
            let sums = tape.dense(inputs, layer);
            tape.relu(sums)
        });
        tape.dense(hidden, last)
    }
}

impl Trained<Perceptron> {
    fn outputs(&self, inputs: NumberRows) -> NumberRows {
        let mut tape = Tape::new(&self.parameters);
        let outputs = self.layers.forward(&mut tape, inputs);
        tape.take(outputs)
    }
}

impl ActorCritic {
    /// Makes untrained networks.
    ///
    /// # Panics
    /// If there are no features or no actions.
    pub fn new(n_features: usize, n_actions: usize, options: &ActorCriticOptions, seed: u64) -> ActorCritic {
        assert!(n_features > 0 && n_actions > 0, "invariant: a walk has states and actions");
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut network = |n_outputs| {
            let mut builder = LayerBuilder::new(&mut rng);
            let layers = Perceptron::new(&mut builder, n_features, options.n_hidden, n_outputs);
            Trained::new(layers, builder.finish(), options.learning_rate)
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

    /// Action probabilities in each of these states.
    ///
    /// # Panics
    /// If a state does not have `n_features` features.
    pub fn policy<'a>(&self, states: impl IntoIterator<Item = &'a [f32]>) -> Vec<Vec<f32>> {
        let mut scores = self.actor.outputs(self.states(states));
        let policy = |row: &mut [f32]| {
            log_softmax(row);
            row.iter().map(|&log_policy| probability(log_policy)).collect()
        };
        scores.values.chunks_exact_mut(self.n_actions).map(policy).collect()
    }

    /// Value of each of these states.
    ///
    /// # Panics
    /// If a state does not have `n_features` features.
    pub fn values<'a>(&self, states: impl IntoIterator<Item = &'a [f32]>) -> Vec<f32> {
        self.critic.outputs(self.states(states)).values
    }

    /// Takes a training step of both networks.
    ///
    /// # Panics
    /// If a state does not have `n_features` features, or an action is out of range.
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
        let states = self.states(transitions.iter().map(|t| t.state.as_slice()));
        let actions = transitions.iter().map(|t| t.action);
        let entropy = self.entropy;
        self.actor
            .descend(|actor, parameters| actor_loss(actor, parameters, states.clone(), actions, &advantages, entropy));
        self.critic.descend(|critic, parameters| critic_loss(critic, parameters, states, &targets));
    }

    fn states<'a>(&self, states: impl IntoIterator<Item = &'a [f32]>) -> NumberRows {
        let mut values = Vec::new();
        for state in states {
            assert_eq!(state.len(), self.n_features, "invariant: a state has a number for each feature");
            values.extend_from_slice(state);
        }
        NumberRows { n_columns: self.n_features, values }
    }
}

/// Computes the loss of the actions, with its gradients.
fn actor_loss(
    actor: &Perceptron,
    parameters: &Parameters,
    states: NumberRows,
    actions: impl Iterator<Item = usize>,
    advantages: &[f32],
    entropy: f32,
) -> (f64, Vec<Vec<f32>>) {
    let mut tape = Tape::new(parameters);
    let scores = actor.forward(&mut tape, states);
    let (loss, of_scores) = policy_loss(tape.value(scores), actions, advantages, entropy);
    (loss, tape.backward(vec![(scores, of_scores)]))
}

/// Computes the mean squared error of the values, with its gradients.
fn critic_loss(
    critic: &Perceptron,
    parameters: &Parameters,
    states: NumberRows,
    targets: &[f32],
) -> (f64, Vec<Vec<f32>>) {
    let mut tape = Tape::new(parameters);
    let values = critic.forward(&mut tape, states);
    let (loss, of_values) = squared_error(&tape.value(values).values, targets);
    (loss, tape.backward(vec![(values, of_values)]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tape::gradients;

    #[test]
    fn gradients_are_those_of_the_losses() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        let states = NumberRows { n_columns: 2, values: vec![0.3, -0.8, 0.5, 0.9, 0.1, -0.4] };
        let mut network = |n_outputs| {
            let mut builder = LayerBuilder::new(&mut rng);
            (Perceptron::new(&mut builder, 2, 5, n_outputs), builder.finish())
        };
        let ((actor, of_actor), (critic, of_critic)) = (network(4), network(1));
        let factors = [1.0, -0.5, 2.0];
        gradients::check(&of_actor, |p| actor_loss(&actor, p, states.clone(), [2, 0, 3].into_iter(), &factors, 0.1));
        gradients::check(&of_critic, |p| critic_loss(&critic, p, states.clone(), &factors));
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
