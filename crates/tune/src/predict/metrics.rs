//! Quality of predictions.
//!
//! # Source
//! "Optimal Kernel Tuning Parameter Prediction using Deep Sequence Models", section VI.

use serde::{Deserialize, Serialize};

use super::data::TunedProblem;
use super::specification::KernelSpecification;

/// Quality of a model's predictions, as means over problems.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Score {
    /// Share of parameters predicted correctly; the best of several predictions for a problem counts.
    pub average_accuracy: f64,
    /// Share of problems with a prediction that is correct in all parameters.
    pub perfect: f64,
    /// Like `perfect`, but an equivalent kernel counts as correct, too.
    pub perfect_equivalent: f64,
    /// Share of predictions that are valid configurations.
    pub valid: f64,
}

/// Scores the predictions for each row.
pub fn score(kernel: &KernelSpecification, rows: &[&TunedProblem], answers: &[Vec<Vec<u32>>]) -> Score {
    let mut sum = Score::default();
    let (mut n_answers, mut n_valid) = (0usize, 0usize);
    for (row, answers) in rows.iter().zip(answers) {
        let n_right = |answer: &Vec<u32>| answer.iter().zip(&row.answer).filter(|(a, b)| a == b).count();
        let best = answers.iter().map(n_right).max().unwrap_or(0);
        sum.average_accuracy += best as f64 / row.answer.len() as f64;
        sum.perfect += f64::from(u8::from(best == row.answer.len()));
        let canonical = kernel.canonical(&row.problem, &row.answer);
        let is_equivalent = |answer: &Vec<u32>| kernel.canonical(&row.problem, answer) == canonical;
        sum.perfect_equivalent += f64::from(u8::from(answers.iter().any(is_equivalent)));
        n_answers += answers.len();
        n_valid += answers.iter().filter(|answer| kernel.is_valid(&row.problem, answer)).count();
    }
    let n_rows = rows.len().max(1) as f64;
    Score {
        average_accuracy: sum.average_accuracy / n_rows,
        perfect: sum.perfect / n_rows,
        perfect_equivalent: sum.perfect_equivalent / n_rows,
        valid: n_valid as f64 / n_answers.max(1) as f64,
    }
}
