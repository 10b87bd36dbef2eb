//! Neural networks: policies that searches sample from, and a cost model that reads trees of loops.

mod actor_critic;
mod controller;
mod policy;
mod tree_gru;

use crate::tape::{Adam, Parameters};

pub use actor_critic::{ActorCritic, ActorCriticOptions, Transition};
pub use controller::{Controller, ControllerOptions};
pub use tree_gru::{Readout, TreeGru, TreeGruOptions, TreeObjective, TreeRows};

/// Network with its optimizer.
struct Trained<L> {
    layers: L,
    parameters: Parameters,
    adam: Adam,
    learning_rate: f64,
}

impl<L> Trained<L> {
    fn new(layers: L, parameters: Parameters, learning_rate: f64) -> Trained<L> {
        Trained { adam: Adam::new(&parameters), layers, parameters, learning_rate }
    }

    /// Takes a gradient step on a loss, which comes with its gradients.
    fn descend(&mut self, loss: impl FnOnce(&L, &Parameters) -> (f64, Vec<Vec<f32>>)) {
        let (_, gradients) = loss(&self.layers, &self.parameters);
        self.adam.step(&mut self.parameters, &gradients, self.learning_rate);
    }
}

/// Computes the mean squared error of predictions, and its gradient with respect to them.
fn squared_error(predicted: &[f32], targets: &[f32]) -> (f64, Vec<f32>) {
    let n = targets.len() as f32;
    let errors = predicted.iter().zip(targets).map(|(x, target)| x - target);
    let sum: f64 = errors.clone().map(|error| f64::from(error * error)).sum();
    (sum / f64::from(n), errors.map(|error| 2.0 * error / n).collect())
}
