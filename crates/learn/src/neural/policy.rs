//! Losses of policies.

use crate::simd::exp;
use crate::tape::{NumberRows, log_softmax};

/// Computes the loss of choices that were made by the softmax of scores, a row for each, and its gradient
/// with respect to the scores: minus the mean of `advantage · log π(choice)` and of the weighted entropy.
/// Gradient descent on it makes better choices more likely.
pub(super) fn policy_loss(
    scores: &NumberRows,
    choices: impl Iterator<Item = usize>,
    advantages: &[f32],
    entropy: f32,
) -> (f64, Vec<f32>) {
    let mut gradient = scores.values.clone();
    let (mut gain, share) = (0.0, 1.0 / advantages.len() as f32);
    for ((row, choice), &advantage) in gradient.chunks_exact_mut(scores.n_columns).zip(choices).zip(advantages) {
        log_softmax(row);
        let chosen = row[choice];
        let disorder: f32 = row.iter().map(|&log_policy| -probability(log_policy) * log_policy).sum();
        gain += f64::from(advantage * chosen + entropy * disorder);
        for log_policy in row.iter_mut() {
            *log_policy = share * probability(*log_policy) * (advantage + entropy * (*log_policy + disorder));
        }
        row[choice] -= share * advantage;
    }
    (-gain * f64::from(share), gradient)
}

/// Returns the probability; 0 for the logarithm of an alternative that is not allowed.
pub(super) fn probability(log_policy: f32) -> f32 {
    if log_policy < -87.0 { 0.0 } else { exp(log_policy) }
}
