//! Metrics of prediction quality.

/// Coefficient of determination: 1 for perfect predictions, 0 for those as good as the mean of the targets.
///
/// If all targets are equal, it is 1 for perfect predictions and −∞ for others.
///
/// # Panics
/// If there is not one prediction for each target.
pub fn r_squared(predictions: &[f32], targets: &[f32]) -> f64 {
    let pairs = || zip(predictions, targets);
    let mean = targets.iter().map(|&t| f64::from(t)).sum::<f64>() / targets.len() as f64;
    let residual: f64 = pairs().map(|(p, t)| (p - t).powi(2)).sum();
    let total: f64 = pairs().map(|(_, t)| (t - mean).powi(2)).sum();
    if residual == 0.0 { 1.0 } else { 1.0 - residual / total }
}

/// Kendall's rank correlation τ-b: 1 for the same order, −1 for the reverse, 0 if either side is constant.
///
/// # Panics
/// If there is not one prediction for each target.
///
/// # Cost
/// O(n²).
pub fn kendall_tau(predictions: &[f32], targets: &[f32]) -> f64 {
    let pairs: Vec<(f64, f64)> = zip(predictions, targets).collect();
    let (mut concordance, mut in_prediction, mut in_target) = (0.0, 0.0f64, 0.0f64);
    for (i, a) in pairs.iter().enumerate() {
        for b in &pairs[..i] {
            let sign = |d: f64| if d == 0.0 { 0.0 } else { d.signum() };
            let (p, t) = (sign(a.0 - b.0), sign(a.1 - b.1));
            concordance += p * t;
            in_prediction += p * p;
            in_target += t * t;
        }
    }
    let scale = (in_prediction * in_target).sqrt();
    if scale > 0.0 { concordance / scale } else { 0.0 }
}

/// Recall of the truly largest `k` values among the `k` predicted largest, averaged over `k` from 1 to `n`.
///
/// With fewer than `n` targets, all of them are used; without any the result is 1.
///
/// # Panics
/// If there is not one prediction for each target.
///
/// # Source
/// AutoTVM's public implementation, which monitors it during training.
pub fn average_recall(predictions: &[f32], targets: &[f32], n: usize) -> f64 {
    assert_eq!(predictions.len(), targets.len(), "invariant: a prediction for each target");
    let n = n.min(targets.len());
    if n == 0 {
        return 1.0;
    }
    let (predicted, actual) = (largest(predictions, n), largest(targets, n));
    // 1 if a row is in one of the lists read so far, 2 if it is in both.
    let mut seen = vec![0u8; targets.len()];
    let (mut found, mut total) = (0, 0.0);
    for k in 0..n {
        for row in [predicted[k], actual[k]] {
            seen[row] += 1;
            found += usize::from(seen[row] == 2);
        }
        total += found as f64 / (k + 1) as f64;
    }
    total / n as f64
}

/// Returns the rows of the `n` largest values, largest first.
fn largest(values: &[f32], n: usize) -> Vec<usize> {
    let mut rows: Vec<usize> = (0..values.len()).collect();
    let order = |a: &usize, b: &usize| values[*b].total_cmp(&values[*a]).then(a.cmp(b));
    if n < rows.len() {
        rows.select_nth_unstable_by(n, order);
        rows.truncate(n);
    }
    rows.sort_unstable_by(order);
    rows
}

fn zip(predictions: &[f32], targets: &[f32]) -> impl Iterator<Item = (f64, f64)> {
    assert_eq!(predictions.len(), targets.len(), "invariant: a prediction for each target");
    predictions.iter().zip(targets).map(|(&p, &t)| (f64::from(p), f64::from(t)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_small_examples() {
        assert_eq!(r_squared(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]), 1.0);
        assert_eq!(r_squared(&[2.0, 2.0, 2.0], &[1.0, 2.0, 3.0]), 0.0);
        assert_eq!(kendall_tau(&[1.0, 2.0, 4.0], &[5.0, 6.0, 9.0]), 1.0);
        assert_eq!(kendall_tau(&[1.0, 2.0, 4.0], &[9.0, 6.0, 5.0]), -1.0);
        // One of three pairs is reversed.
        assert!((kendall_tau(&[1.0, 3.0, 2.0], &[1.0, 2.0, 3.0]) - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(kendall_tau(&[1.0, 1.0], &[1.0, 2.0]), 0.0);
    }

    #[test]
    fn recall_counts_the_top_of_the_list() {
        let targets = [9.0, 8.0, 7.0, 1.0, 0.0];
        assert_eq!(average_recall(&targets, &targets, 3), 1.0);
        // Top 1: row 1 instead of row 0. Top 2: both.
        assert_eq!(average_recall(&[8.0, 9.0, 7.0, 0.0, 0.0], &targets, 2), 0.5);
        assert_eq!(average_recall(&[], &[], 3), 1.0);
    }
}
