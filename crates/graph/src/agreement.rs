//! Agreement of computed tensors with the expected ones.

use crate::Tensor;

/// Measures of the agreement of two tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Agreement {
    /// Cosine similarity of the two tensors as vectors; 1 if both are all zero.
    pub cosine: f64,
    /// Relative error in the Euclidean norm: ‖found − wanted‖ / ‖wanted‖.
    pub relative_error: f64,
    /// Largest absolute difference of two elements, divided by the largest absolute element of the expected
    /// tensor.
    pub max_error: f64,
}

impl Agreement {
    /// Compares tensors; `None` if their shapes differ. Elements that are both infinite with the same sign,
    /// or both NaN, agree.
    pub fn of(found: &Tensor, wanted: &Tensor) -> Option<Agreement> {
        if found.shape() != wanted.shape() {
            return None;
        }
        let (mut dot, mut found_2, mut wanted_2, mut error_2) = (0.0, 0.0, 0.0, 0.0);
        let (mut largest, mut max_error) = (0.0_f64, 0.0_f64);
        for (x, y) in found.floats().into_iter().zip(wanted.floats()) {
            if x == y && x.is_infinite() || x.is_nan() && y.is_nan() {
                continue;
            }
            let error = (x - y).abs();
            (dot, found_2, wanted_2, error_2) =
                (dot + x * y, found_2 + x * x, wanted_2 + y * y, error_2 + error * error);
            largest = largest.max(y.abs());
            // A NaN difference counts as the largest.
            max_error = if error.is_nan() || error > max_error { error } else { max_error };
        }
        let over = |error: f64, size: f64| if error == 0.0 { 0.0 } else { error / size };
        let cosine = if dot == 0.0 && found_2 == wanted_2 { 1.0 } else { dot / (found_2 * wanted_2).sqrt() };
        Some(Agreement {
            cosine,
            relative_error: over(error_2.sqrt(), wanted_2.sqrt()),
            max_error: over(max_error, largest),
        })
    }

    /// Worst agreement of several outputs; `None` if their number or a shape differs.
    pub fn of_all(found: &[Tensor], wanted: &[Tensor]) -> Option<Agreement> {
        if found.len() != wanted.len() {
            return None;
        }
        let same = Agreement { cosine: 1.0, relative_error: 0.0, max_error: 0.0 };
        let worse = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
        found.iter().zip(wanted).try_fold(same, |all, (x, y)| {
            let one = Agreement::of(x, y)?;
            Some(Agreement {
                cosine: -worse(-all.cosine, -one.cosine),
                relative_error: worse(all.relative_error, one.relative_error),
                max_error: worse(all.max_error, one.max_error),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn vector(numbers: &[f64]) -> Tensor {
        Tensor::from_floats(DType::F64, [numbers.len()], numbers)
    }

    #[test]
    fn differences_count_against_what_is_wanted() {
        let (wanted, found) = (vector(&[3.0, 4.0, 0.0]), vector(&[3.0, 4.0, 0.5]));
        let agreement = Agreement::of(&found, &wanted).expect("one shape");
        assert!((agreement.relative_error - 0.1).abs() < 1e-12 && (agreement.max_error - 0.125).abs() < 1e-12);
        assert!((agreement.cosine - 25.0 / (25.0_f64 * 25.25).sqrt()).abs() < 1e-12);
        let same = Agreement { cosine: 1.0, relative_error: 0.0, max_error: 0.0 };
        for numbers in [&[1.0, f64::NAN, f64::INFINITY][..], &[0.0, 0.0], &[]] {
            assert_eq!(Agreement::of(&vector(numbers), &vector(numbers)), Some(same), "{numbers:?}");
        }
        let worst = Agreement::of_all(&[wanted.clone(), found.clone()], &[wanted.clone(), wanted.clone()]);
        assert_eq!(worst, Some(agreement));
        assert_eq!(Agreement::of(&vector(&[1.0]), &wanted), None);
        assert_eq!(Agreement::of_all(std::slice::from_ref(&wanted), &[]), None);
    }

    #[test]
    fn what_is_no_number_is_wrong() {
        let agreement = Agreement::of_all(&[vector(&[1.0, f64::NAN])], &[vector(&[1.0, 2.0])]).expect("one shape");
        assert!(agreement.max_error.is_nan() && agreement.relative_error.is_nan(), "{agreement:?}");
        assert!(agreement.cosine.is_nan(), "{agreement:?}");
        let agreement = Agreement::of(&vector(&[f64::INFINITY]), &vector(&[1.0])).expect("one shape");
        assert!(agreement.max_error.is_infinite(), "{agreement:?}");
    }
}
