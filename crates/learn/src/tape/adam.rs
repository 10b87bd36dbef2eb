//! Adam optimizer.

use super::Parameters;
use crate::simd::wide;

const BETA_1: f32 = 0.9;
const BETA_2: f32 = 0.999;
const EPSILON: f32 = 1e-8;

/// Adam optimizer, with the constants of its paper.
///
/// # Source
/// Kingma and Ba, "Adam: a method for stochastic optimization" (2015).
#[derive(Debug, Clone)]
pub(crate) struct Adam {
    /// Running means of the gradients and of their squares.
    pub(crate) first: Vec<Vec<f32>>,
    pub(crate) second: Vec<Vec<f32>>,
    pub(crate) n_steps: i32,
}

impl Adam {
    pub(crate) fn new(parameters: &Parameters) -> Adam {
        let zeros = || parameters.iter().map(|(_, values)| vec![0.0; values.len()]).collect();
        Adam { first: zeros(), second: zeros(), n_steps: 0 }
    }

    pub(crate) fn step(&mut self, parameters: &mut Parameters, gradients: &[Vec<f32>], learning_rate: f64) {
        self.n_steps += 1;
        let correction = |beta: f32| 1.0 - f64::from(beta).powi(self.n_steps);
        let rate = (learning_rate * correction(BETA_2).sqrt() / correction(BETA_1)) as f32;
        let epsilon = EPSILON * correction(BETA_2).sqrt() as f32;
        let moments = self.first.iter_mut().zip(&mut self.second);
        parameters.update(|weights| {
            for ((weights, gradient), (first, second)) in weights.zip(gradients).zip(moments) {
                wide(|| {
                    for (((weight, &g), m), v) in weights.iter_mut().zip(gradient).zip(first).zip(second) {
                        *m = BETA_1 * *m + (1.0 - BETA_1) * g;
                        *v = BETA_2 * *v + (1.0 - BETA_2) * g * g;
                        *weight -= rate * *m / (v.sqrt() + epsilon);
                    }
                });
            }
        });
    }
}
