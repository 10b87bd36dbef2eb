//! Descriptive statistics.

use serde::Serialize;
use tilewright_search::quantile;

/// Five-number summary, with quartiles by [`quantile`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Quartiles {
    /// Minimum.
    pub least: f64,
    /// First quartile.
    pub first: f64,
    /// Median.
    pub median: f64,
    /// Third quartile.
    pub third: f64,
    /// Maximum.
    pub most: f64,
}

impl Quartiles {
    /// Summary of values; `None` for an empty list.
    pub fn of(values: &[f64]) -> Option<Quartiles> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() {
            return None;
        }
        let [least, first, median, third, most] = [0.0, 0.25, 0.5, 0.75, 1.0].map(|q| quantile(&sorted, q));
        Some(Quartiles { least, first, median, third, most })
    }
}

/// Mean and sample standard deviation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MeanStd {
    /// The mean.
    pub mean: f64,
    /// The standard deviation.
    pub std: f64,
}

impl MeanStd {
    /// Statistics of values; `None` for an empty list. A single value has a standard deviation of 0.
    pub fn of(values: &[f64]) -> Option<MeanStd> {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let std = (squares / (values.len().max(2) - 1) as f64).sqrt();
        (!values.is_empty()).then_some(MeanStd { mean, std })
    }
}

/// Median; `None` for an empty list.
pub fn median(values: &[f64]) -> Option<f64> {
    Quartiles::of(values).map(|q| q.median)
}

/// Geometric mean of positive values; `None` for an empty list.
pub fn geometric_mean(values: &[f64]) -> Option<f64> {
    let sum: f64 = values.iter().map(|v| v.ln()).sum();
    (!values.is_empty()).then(|| (sum / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_interpolated() {
        let q = Quartiles::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!([q.least, q.first, q.median, q.third, q.most], [1.0, 1.75, 2.5, 3.25, 4.0]);
        assert_eq!(Quartiles::of(&[]), None);
        assert_eq!(median(&[7.0]), Some(7.0));
        assert!((geometric_mean(&[2.0, 8.0]).unwrap() - 4.0).abs() < 1e-12);
    }
}
