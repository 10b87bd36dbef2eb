//! Gradients against finite differences.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};

use super::{device, numbers};

/// How far a weight is moved to each side; rounding in `f32` allows no less.
const STEP: f32 = 5e-3;
/// Weights of each parameter that are tried, at most.
const N_TRIED: usize = 25;

/// Compares the gradient of a loss by weights all over the network with differences of the loss.
pub(super) fn check<M: Module>(network: &M, loss: impl Fn(&M) -> Tensor<1>) {
    let mut reader = Reader { gradients: loss(network).backward(), found: Vec::new() };
    network.visit(&mut reader);
    assert!(reader.found.iter().flatten().any(|g| g.abs() > 1e-3), "a loss that does not depend on the network");
    for (parameter, gradient) in reader.found.iter().enumerate() {
        for weight in (0..gradient.len()).step_by(gradient.len().div_ceil(N_TRIED)) {
            let at = |step| {
                let moved = network.clone().map(&mut Nudge { parameter, weight, step, n_passed: 0 });
                numbers(loss(&moved))[0]
            };
            let difference = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let error = (difference - gradient[weight]).abs();
            assert!(
                error < 2e-3 + 0.02 * difference.abs(),
                "weight {weight} of parameter {parameter}: gradient {}, difference {difference}",
                gradient[weight]
            );
        }
    }
}

/// Collects the gradients by each parameter.
struct Reader {
    gradients: Gradients,
    found: Vec<Vec<f32>>,
}

impl ModuleVisitor for Reader {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(&self.gradients);
        self.found.push(numbers(gradient.expect("every parameter has a part in the loss")));
    }
}

/// Moves one weight.
struct Nudge {
    parameter: usize,
    weight: usize,
    step: f32,
    n_passed: usize,
}

impl ModuleMapper for Nudge {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.n_passed += 1;
        if self.n_passed != self.parameter + 1 {
            return param;
        }
        let shape = param.val().dims();
        let mut values = numbers(param.val());
        values[self.weight] += self.step;
        Param::from_tensor(Tensor::from_data(TensorData::new(values, shape), &device()))
    }
}
