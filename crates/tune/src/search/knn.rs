//! Regression by weighted nearest neighbours.

/// The mean of the targets of the `k` nearest examples, weighted by the inverse of the Canberra distance; the target of an
/// example at distance 0 where there is one. 0 without examples.
///
/// # Source
/// NoSE, equations 1 to 3.
pub(super) fn predict(examples: &[(Vec<f64>, f64)], k: usize, at: &[f64]) -> f64 {
    let mut near: Vec<(f64, f64)> = examples.iter().map(|(x, y)| (canberra(x, at), *y)).collect();
    if near.len() > k {
        near.select_nth_unstable_by(k - 1, |a, b| a.0.total_cmp(&b.0));
        near.truncate(k);
    }
    if let Some((_, y)) = near.iter().find(|(distance, _)| *distance == 0.0) {
        return *y;
    }
    let (sum, weight) = near.iter().fold((0.0, 0.0), |(sum, weight), (d, y)| (sum + y / d, weight + 1.0 / d));
    if weight > 0.0 { sum / weight } else { 0.0 }
}

/// Σ |x − z| / (|x| + |z|), where 0/0 is 0.
fn canberra(x: &[f64], z: &[f64]) -> f64 {
    let term = |(x, z): (&f64, &f64)| if x == z { 0.0 } else { (x - z).abs() / (x.abs() + z.abs()) };
    x.iter().zip(z).map(term).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_examples_weigh_more_and_far_ones_nothing() {
        let examples = [(vec![1.0, 0.0], 10.0), (vec![3.0, 0.0], 20.0), (vec![100.0, 1.0], 1000.0)];
        assert_eq!(canberra(&[1.0, 0.0, -2.0], &[3.0, 0.0, 2.0]), 1.5);
        // Distances 1/3 and 1/5: weights 3 and 5.
        assert!((predict(&examples, 2, &[2.0, 0.0]) - 130.0 / 8.0).abs() < 1e-12);
        assert_eq!(predict(&examples, 2, &[3.0, 0.0]), 20.0);
        assert_eq!(predict(&[], 2, &[3.0]), 0.0);
    }
}
