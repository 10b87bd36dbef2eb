//! Tests of gradients against finite differences.

use super::Parameters;

/// Step of the central differences, by which a weight is moved to each side; rounding in `f32` allows no
/// smaller one.
const STEP: f32 = 4e-3;
/// Maximum number of weights of each parameter that are tested.
const N_TRIED: usize = 25;

/// Compares the gradient of a loss with respect to weights all over a network with differences of the loss.
/// `evaluate` returns both.
#[track_caller]
pub(crate) fn check(parameters: &Parameters, evaluate: impl Fn(&Parameters) -> (f64, Vec<Vec<f32>>)) {
    let (_, gradients) = evaluate(parameters);
    let mut n_moving = 0;
    for (at, ((name, _), gradient)) in parameters.iter().zip(&gradients).enumerate() {
        for i in (0..gradient.len()).step_by(gradient.len().div_ceil(N_TRIED)) {
            let loss_at = |by: f32| {
                let mut moved = parameters.clone();
                moved.update(|arrays| arrays.nth(at).expect("invariant: a gradient for each weight")[i] += by);
                evaluate(&moved).0
            };
            let slope = (loss_at(STEP) - loss_at(-STEP)) / f64::from(2.0 * STEP);
            let error = (slope - f64::from(gradient[i])).abs();
            assert!(error < 1e-3 + 0.02 * slope.abs(), "{name}[{i}]: {}, by differences {slope}", gradient[i]);
            n_moving += usize::from(slope.abs() > 0.01);
        }
    }
    assert!(n_moving > 10, "{n_moving} of the weights looked at matter");
}
