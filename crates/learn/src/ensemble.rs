//! Bootstrap ensembles: predictions with a standard deviation.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::gbt::{Gbt, GbtOptions};
use crate::matrix::{Examples, Matrix};
use crate::{Acquisition, LearnError};

/// Prediction with its uncertainty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Mean over the models.
    pub mean: f32,
    /// Standard deviation over the models.
    pub standard_deviation: f32,
}

impl Prediction {
    /// Score by an acquisition function; `best` is the largest known value.
    pub fn score(self, acquisition: Acquisition, best: f32) -> f64 {
        acquisition.score(self.mean.into(), self.standard_deviation.into(), best.into())
    }
}

/// Boosted trees, each fitted on a bootstrap sample: as many rows, drawn with replacement.
///
/// # Source
/// AutoTVM, section 3.3: five models, fitted by regression. Scores of models fitted by rank have no common
/// scale, and their spread means little.
#[derive(Debug, Clone)]
pub struct Ensemble {
    models: Vec<Gbt>,
}

impl Ensemble {
    /// Fits `n_models` models.
    ///
    /// # Errors
    /// [`LearnError`] if `n_models` is 0, or as [`Gbt::fit`].
    pub fn fit(
        examples: &Examples<'_>,
        options: &GbtOptions,
        n_models: usize,
        seed: u64,
    ) -> Result<Ensemble, LearnError> {
        if n_models == 0 {
            let (option, value) = ("n_models", "0".to_string());
            return Err(LearnError::BadOption { option, value, expected: "at least 1" });
        }
        examples.check()?;
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let n_rows = examples.features.n_rows();
        let models = (0..n_models).map(|_| {
            let drawn: Vec<usize> = (0..n_rows).map(|_| rng.random_range(0..n_rows)).collect();
            let features =
                Matrix::from_rows(examples.features.n_columns(), drawn.iter().map(|&row| examples.features.row(row)));
            let sample = Examples {
                features: &features,
                targets: &pick(examples.targets, &drawn),
                base: &pick(examples.base, &drawn),
                groups: &pick(examples.groups, &drawn),
            };
            Gbt::fit(&sample, options, rng.random())
        });
        Ok(Ensemble { models: models.collect::<Result<_, _>>()? })
    }

    /// Predicts these rows.
    ///
    /// # Panics
    /// If the rows do not have as many columns as the examples.
    pub fn predict(&self, rows: &Matrix) -> Vec<Prediction> {
        let by_model: Vec<Vec<f32>> = self.models.iter().map(|model| model.predict(rows)).collect();
        let n = by_model.len() as f64;
        let combine = |row: usize| {
            let values = || by_model.iter().map(|predictions| f64::from(predictions[row]));
            let mean = values().sum::<f64>() / n;
            let variance = values().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
            Prediction { mean: mean as f32, standard_deviation: variance.sqrt() as f32 }
        };
        (0..rows.n_rows()).map(combine).collect()
    }
}

/// Values of these rows; empty if there are no values.
fn pick<T: Copy>(values: &[T], rows: &[usize]) -> Vec<T> {
    if values.is_empty() { Vec::new() } else { rows.iter().map(|&row| values[row]).collect() }
}
