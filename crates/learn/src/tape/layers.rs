//! Trainable weights, and the layers built from them.

use std::sync::OnceLock;

use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::NumberRows;
use super::product::PanelFactor;

/// Index of a weight among the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Weight(pub(super) usize);

/// Layer of weights and a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dense {
    pub(crate) weight: Weight,
    pub(crate) bias: Weight,
}

/// Weights of an LSTM. Columns: input gate, forget gate, output gate, candidate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lstm {
    /// Layer from an input to the gates.
    pub(crate) entering: Dense,
    pub(crate) recurrent: Weight,
}

/// Weights of a network, also in packed form for products.
#[derive(Debug, Clone)]
pub(crate) struct Parameters {
    names: Vec<String>,
    pub(super) arrays: Vec<NumberRows>,
    factors: Vec<LazyFactor>,
}

/// Weight as an operand of products, packed on first use.
#[derive(Debug, Clone, Default)]
struct LazyFactor {
    plain: OnceLock<PanelFactor>,
    /// Transposed weights, for gradients of their inputs.
    transposed: OnceLock<PanelFactor>,
}

impl Parameters {
    fn new(names: Vec<String>, arrays: Vec<NumberRows>) -> Parameters {
        Parameters { factors: vec![LazyFactor::default(); arrays.len()], names, arrays }
    }

    /// All weights with their names.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.names.iter().map(String::as_str).zip(self.arrays.iter().map(|array| array.values.as_slice()))
    }

    /// Values of each weight.
    pub(crate) fn values(&self) -> Vec<Vec<f32>> {
        self.arrays.iter().map(|array| array.values.clone()).collect()
    }

    /// Returns the number of inputs of a weight's products.
    pub(crate) fn n_inputs(&self, weight: Weight) -> usize {
        self.arrays[weight.0].n_rows()
    }

    pub(super) fn factor(&self, weight: Weight) -> &PanelFactor {
        self.factors[weight.0].plain.get_or_init(|| PanelFactor::new(&self.arrays[weight.0]))
    }

    pub(super) fn transposed(&self, weight: Weight) -> &PanelFactor {
        self.factors[weight.0].transposed.get_or_init(|| PanelFactor::new(&self.arrays[weight.0].transposed()))
    }

    /// Changes the values of each weight.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut dyn Iterator<Item = &mut Vec<f32>>)) {
        change(&mut self.arrays.iter_mut().map(|array| &mut array.values));
        self.factors.fill(LazyFactor::default());
    }
}

/// Builder that makes weights one after another.
pub(crate) struct LayerBuilder<'r> {
    names: Vec<String>,
    arrays: Vec<NumberRows>,
    rng: &'r mut Xoshiro256PlusPlus,
}

/// Returns the limit for random weights that keep the variance of the values in the forward pass.
pub(crate) fn forth(n_inputs: usize) -> f32 {
    (3.0 / n_inputs.max(1) as f32).sqrt()
}

/// Returns the limit for random weights that keep the variance of the values in the forward and the backward
/// pass (Glorot and Bengio, 2010).
pub(crate) fn both_ways(n_inputs: usize, n_outputs: usize) -> f32 {
    (6.0 / (n_inputs + n_outputs) as f32).sqrt()
}

impl<'r> LayerBuilder<'r> {
    pub(crate) fn new(rng: &'r mut Xoshiro256PlusPlus) -> LayerBuilder<'r> {
        LayerBuilder { names: Vec::new(), arrays: Vec::new(), rng }
    }

    fn push(&mut self, name: String, array: NumberRows) -> Weight {
        self.names.push(name);
        self.arrays.push(array);
        Weight(self.arrays.len() - 1)
    }

    /// Makes a weight that is drawn uniformly between `-limit` and `limit`.
    pub(crate) fn weight(&mut self, name: String, n_inputs: usize, n_outputs: usize, limit: f32) -> Weight {
        let values = (0..n_inputs * n_outputs).map(|_| self.rng.random_range(-limit..=limit)).collect();
        self.push(name, NumberRows { n_columns: n_outputs, values })
    }

    /// Makes a layer with a bias of 0.
    pub(crate) fn dense(&mut self, name: &str, n_inputs: usize, n_outputs: usize, limit: f32) -> Dense {
        let weight = self.weight(format!("{name}.weight"), n_inputs, n_outputs, limit);
        Dense { weight, bias: self.push(format!("{name}.bias"), NumberRows::zeros(1, n_outputs)) }
    }

    /// Makes an LSTM, with weights drawn between these limits and this bias of its forget gates.
    pub(crate) fn lstm(&mut self, name: &str, n_inputs: usize, n_hidden: usize, limits: [f32; 2], forget: f32) -> Lstm {
        let weight = self.weight(format!("{name}.input"), n_inputs, 4 * n_hidden, limits[0]);
        let recurrent = self.weight(format!("{name}.recurrent"), n_hidden, 4 * n_hidden, limits[1]);
        let mut bias = NumberRows::zeros(1, 4 * n_hidden);
        bias.values[n_hidden..2 * n_hidden].fill(forget);
        Lstm { entering: Dense { weight, bias: self.push(format!("{name}.bias"), bias) }, recurrent }
    }

    pub(crate) fn finish(self) -> Parameters {
        Parameters::new(self.names, self.arrays)
    }
}
