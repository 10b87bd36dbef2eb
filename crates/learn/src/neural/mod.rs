//! Neural networks: policies that searches sample from, and a cost model that reads trees of loops.
//!
//! Layers, differentiation and the optimizer are burn's, on its CPU backend; none of its types leave this module. Weights are
//! drawn from a seed, because burn's own generator is shared by the whole process.

mod actor_critic;
mod controller;
#[cfg(test)]
mod gradients;
mod product;
mod tree_gru;

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

pub use actor_critic::{ActorCritic, ActorCriticOptions, Transition};
pub use controller::{Controller, ControllerOptions};
pub(crate) use product::Factor;
pub use tree_gru::{Readout, TreeGru, TreeGruOptions, TreeObjective, TreeRows};

/// Adam's ε, as in its paper; burn's default would damp the small gradients of a policy.
const EPSILON: f32 = 1e-8;

/// A network and what trains it.
struct Trained<M> {
    network: M,
    optimizer: ModuleOptimizer,
    learning_rate: f64,
}

impl<M: Module> Trained<M> {
    fn new(network: M, learning_rate: f64) -> Trained<M> {
        Trained { network, optimizer: AdamConfig::new().with_epsilon(EPSILON).init(), learning_rate }
    }

    /// The network without the records that differentiation needs.
    fn frozen(&self) -> M {
        self.network.valid()
    }

    /// One step of Adam down the gradient of a loss.
    fn descend(&mut self, loss: impl FnOnce(&M) -> Tensor<1>) {
        let gradients = GradientsParams::from_grads(loss(&self.network).backward(), &self.network);
        self.network = self.optimizer.step(self.learning_rate, self.network.clone(), gradients);
    }
}

/// Where networks are made and trained.
fn device() -> Device {
    Device::flex().autodiff()
}

/// A parameter of this shape, drawn uniformly between `-limit` and `limit`.
fn uniform(n_rows: usize, n_columns: usize, limit: f32, rng: &mut Xoshiro256PlusPlus) -> Param<Tensor<2>> {
    let values = (0..n_rows * n_columns).map(|_| rng.random_range(-limit..=limit)).collect();
    Param::from_tensor(matrix(values, n_columns, &device()))
}

/// A layer whose weights keep the variance of what passes through, and whose bias is 0.
fn linear(n_inputs: usize, n_outputs: usize, rng: &mut Xoshiro256PlusPlus) -> Linear {
    let limit = (3.0 / n_inputs.max(1) as f32).sqrt();
    let bias = Param::from_tensor(Tensor::zeros([n_outputs], &device()));
    Linear { weight: uniform(n_inputs, n_outputs, limit, rng), bias: Some(bias) }
}

/// `values` as rows of `n_columns`.
fn matrix(values: Vec<f32>, n_columns: usize, device: &Device) -> Tensor<2> {
    let n_rows = values.len() / n_columns.max(1);
    Tensor::from_data(TensorData::new(values, [n_rows, n_columns]), device)
}

/// `values` as a column.
fn column(values: &[f32], device: &Device) -> Tensor<2> {
    matrix(values.to_vec(), 1, device)
}

/// Rows with a 1 at each of these places, and 0 elsewhere.
fn one_hot(places: impl ExactSizeIterator<Item = usize>, n_columns: usize, device: &Device) -> Tensor<2> {
    let mut values = vec![0.0; places.len() * n_columns];
    places.enumerate().for_each(|(row, place)| values[row * n_columns + place] = 1.0);
    matrix(values, n_columns, device)
}

/// Positions of rows.
fn positions(values: &[usize], device: &Device) -> Tensor<1, Int> {
    let n = values.len();
    let values: Vec<i64> = values.iter().map(|&value| value as i64).collect();
    Tensor::from_data(TensorData::new(values, [n]), device)
}

/// The hyperbolic tangent by the sigmoid: the backend calls the system's `tanhf`, an element at a time, which takes longer
/// than the products.
fn tanh(x: Tensor<2>) -> Tensor<2> {
    sigmoid(x * 2.0) * 2.0 - 1.0
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("invariant: networks compute in f32")
}
