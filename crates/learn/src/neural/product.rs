//! Products of matrices, for layers whose gradients are written by hand.

use burn::tensor::{Device, Tensor};

use super::{matrix, numbers};

/// A matrix that products are taken of. Copies share the numbers.
#[derive(Debug, Clone)]
pub(crate) struct Factor(Tensor<2>);

impl Factor {
    /// `values` as rows of `n_columns`.
    pub(crate) fn new(values: Vec<f32>, n_columns: usize) -> Factor {
        Factor(matrix(values, n_columns, &Device::flex()))
    }

    /// The product with another matrix, row by row.
    pub(crate) fn times(&self, other: &Factor) -> Vec<f32> {
        numbers(self.0.clone().matmul(other.0.clone()))
    }

    /// Its mirror image at the diagonal, without moving a number.
    pub(crate) fn transposed(&self) -> Factor {
        Factor(self.0.clone().transpose())
    }
}
