//! Support vector machines.

use super::{Draft, Labels, Port, PostTransform, linear, two_classes, wide};
use crate::error::{invalid, unsupported};
use crate::op::{Binary, Clip, Import, MatMul, PairwiseCoupling, Reduce, ReduceKind, Unary, Variadic, Where};
use crate::{DType, OpError};

/// Kernel function: the similarity of a row and a support vector.
#[derive(Debug, Clone, Copy)]
enum SvmKernel {
    Linear,
    Poly,
    Rbf,
    Sigmoid,
}

struct SupportVectors {
    kernel: SvmKernel,
    /// Parameters: gamma, the constant and the degree.
    parameters: [f64; 3],
    coefficients: Vec<f64>,
    rho: Vec<f64>,
    vectors: Vec<f64>,
}

impl SupportVectors {
    fn read(node: &Import) -> Result<SupportVectors, OpError> {
        use SvmKernel as K;
        let known = [("LINEAR", K::Linear), ("POLY", K::Poly), ("RBF", K::Rbf), ("SIGMOID", K::Sigmoid)];
        let parameters = match &wide(node.floats("kernel_params")?)[..] {
            [] => [0.0; 3],
            &[gamma, constant, degree] => [gamma, constant, degree],
            other => return Err(invalid!("it has {} kernel_params instead of 3", other.len())),
        };
        let machine = SupportVectors {
            kernel: node.one_of("kernel_type", "LINEAR", &known)?,
            parameters,
            coefficients: wide(node.floats("coefficients")?),
            rho: wide(node.floats("rho")?),
            vectors: wide(node.floats("support_vectors")?),
        };
        match machine.rho.is_empty() {
            true => Err(invalid!("it has no rho")),
            false => Ok(machine),
        }
    }

    /// Adds the kernel function of each row and each of `n` support vectors.
    fn near(&self, x: Port, n: usize, draft: &mut Draft) -> Result<Port, OpError> {
        if n == 0 || self.vectors.is_empty() || !self.vectors.len().is_multiple_of(n) {
            return Err(invalid!("{} numbers are not {n} support vectors", self.vectors.len()));
        }
        let [gamma, constant, degree] = self.parameters;
        let SvmKernel::Rbf = self.kernel else {
            let product = linear(x, &self.vectors, n, &[], draft)?;
            if let SvmKernel::Linear = self.kernel {
                return Ok(product);
            }
            let (gamma, constant) = (draft.number(gamma), draft.number(constant));
            let scaled = draft.op(Binary::Mul, &[product, gamma]);
            let sum = draft.op(Binary::Add, &[scaled, constant]);
            return Ok(match (self.kernel, degree) {
                (SvmKernel::Sigmoid, _) => draft.op(Unary::Tanh, &[sum]),
                (_, 2.0) => draft.op(Binary::Mul, &[sum, sum]),
                (_, 3.0) => {
                    let square = draft.op(Binary::Mul, &[sum, sum]);
                    draft.op(Binary::Mul, &[square, sum])
                }
                (_, degree) => {
                    let degree = draft.number(degree);
                    draft.op(Binary::Pow, &[sum, degree])
                }
            });
        };
        // Differences are computed directly, since expanded squares would suffer from cancellation.
        let n_features = self.vectors.len() / n;
        let vectors = draft.floats(&[n, n_features], &self.vectors);
        let x = draft.unsqueezed(x, 1);
        let apart = draft.op(Binary::Sub, &[x, vectors]);
        let square = draft.op(Binary::Mul, &[apart, apart]);
        let sum = draft.op(
            Reduce { kind: ReduceKind::Sum, axes: Some(vec![2]), keeps_dims: false, none_is_none: false },
            &[square],
        );
        let factor = draft.number(-gamma);
        let scaled = draft.op(Binary::Mul, &[sum, factor]);
        Ok(draft.op(Unary::Exp, &[scaled]))
    }
}

pub(super) fn regressor(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let machine = SupportVectors::read(node)?;
    let (n, is_one_class) = (node.int_or("n_supports", 0)?, node.flag("one_class", false)?);
    // ONNX Runtime ignores this attribute.
    let _ = PostTransform::read(node)?;
    let x = draft.single(Port::Input(0));
    let x = draft.rows(x);
    let near = match usize::try_from(n).map_err(|_| invalid!("it has n_supports={n}"))? {
        0 => x,
        n => machine.near(x, n, draft)?,
    };
    let score = linear(near, &machine.coefficients, 1, &machine.rho[..1], draft)?;
    if !is_one_class {
        return Ok(vec![score]);
    }
    let [zero, one, other] = [0.0, 1.0, -1.0].map(|x| draft.number(x));
    let is_inside = draft.op(Binary::Greater, &[score, zero]);
    Ok(vec![draft.op(Where, &[is_inside, one, other])])
}

pub(super) fn classifier(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let machine = SupportVectors::read(node)?;
    let (labels, transform) = (Labels::read(node, "classlabels_ints")?, PostTransform::read(node)?);
    let counts = node.ints("vectors_per_class")?.unwrap_or_default();
    let (a, b) = (wide(node.floats("prob_a")?), wide(node.floats("prob_b")?));
    if labels.len() < 2 {
        return Err(unsupported!("a classifier of one class is not supported"));
    }
    let x = draft.single(Port::Input(0));
    let x = draft.rows(x);
    let n_vectors = counts.iter().try_fold(0_usize, |sum, &n| sum.checked_add(usize::try_from(n).ok()?));
    match n_vectors {
        Some(0) => linear_machine(&machine, &labels, transform, !a.is_empty(), x, draft),
        Some(n) if counts.len() == labels.len() => {
            let near = machine.near(x, n, draft)?;
            let counts: Vec<usize> = counts.iter().map(|&n| n as usize).collect();
            let classes = Classes { labels: &labels, counts: &counts, shares: [&a, &b], transform };
            pairwise(&machine, &classes, near, draft)
        }
        _ => Err(invalid!("vectors_per_class {counts:?} does not fit {} classes", labels.len())),
    }
}

/// Adds a score for each class, without support vectors.
fn linear_machine(
    machine: &SupportVectors,
    labels: &Labels,
    transform: PostTransform,
    has_shares: bool,
    x: Port,
    draft: &mut Draft,
) -> Result<Vec<Port>, OpError> {
    let added = vec![machine.rho[0]; labels.len()];
    let scores = linear(x, &machine.coefficients, labels.len(), &added, draft)?;
    let mut place = draft.best(scores);
    if labels.len() == 2 && !has_shares {
        // The second of two classes is chosen if any score is at least 0.5 or, with negative coefficients,
        // above 0.
        let is_positive = machine.coefficients.iter().all(|&x| x >= 0.0);
        let largest = draft.reduced(ReduceKind::Max, scores);
        let is_large = draft.is_above(largest, if is_positive { 0.5f32.next_down().into() } else { 0.0 });
        place = draft.op(Variadic::Max, &[place, is_large]);
    }
    Ok(vec![labels.at(place, draft), transform.of_many(scores, draft)])
}

/// Classes of a classifier with support vectors.
struct Classes<'a> {
    labels: &'a Labels,
    /// Number of support vectors of each class.
    counts: &'a [usize],
    /// Factors and terms, by pairs of classes, that convert scores to probabilities; empty if the classifier
    /// returns scores.
    shares: [&'a [f64]; 2],
    transform: PostTransform,
}

/// Adds a score for each pair of classes, from the support vectors of both.
fn pairwise(machine: &SupportVectors, classes: &Classes, near: Port, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let Classes { labels, counts, shares, transform } = *classes;
    let (n, n_vectors) = (labels.len(), counts.iter().sum::<usize>());
    let n_pairs = n * (n - 1) / 2;
    let fits = machine.coefficients.len() >= (n - 1) * n_vectors && machine.rho.len() >= n_pairs;
    if !fits || shares.iter().any(|list| !list.is_empty() && list.len() < n_pairs) || shares[0].len() != shares[1].len()
    {
        return Err(invalid!("its coefficients, rho, prob_a or prob_b do not fit {n} classes"));
    }
    let starts: Vec<usize> = (0..n).map(|c| counts[..c].iter().sum()).collect();
    // One matrix holds the weights of all pairs, another one their votes.
    let mut weights = vec![0.0; n_vectors * n_pairs];
    let (mut votes, mut against) = (vec![0.0; n_pairs * n], vec![0.0; n]);
    for (pair, (i, j)) in (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j))).enumerate() {
        for (class, row) in [(i, j - 1), (j, i)] {
            for v in starts[class]..starts[class] + counts[class] {
                weights[v * n_pairs + pair] = machine.coefficients[row * n_vectors + v];
            }
        }
        (votes[pair * n + i], votes[pair * n + j]) = (1.0, -1.0);
        against[j] += 1.0;
    }
    let weights = draft.floats(&[n_vectors, n_pairs], &weights);
    let rho = draft.floats(&[n_pairs], &machine.rho[..n_pairs]);
    let product = draft.op(MatMul, &[near, weights]);
    let scores = draft.op(Binary::Add, &[product, rho]);
    let zero = draft.number(0.0);
    let is_first = draft.op(Binary::Greater, &[scores, zero]);
    let is_first = draft.cast(is_first, DType::F32);
    let (votes, against) = (draft.floats(&[n_pairs, n], &votes), draft.floats(&[n], &against));
    let sums = draft.op(MatMul, &[is_first, votes]);
    let sums = draft.op(Binary::Add, &[sums, against]);
    let place = draft.best(sums);
    let label = labels.at(place, draft);
    if shares[0].is_empty() {
        let out = match n {
            2 => two_classes(scores, transform, transform != PostTransform::None, draft)?,
            _ => transform.of_many(scores, draft),
        };
        return Ok(vec![label, out]);
    }
    let [a, b] = shares.map(|list| draft.floats(&[n_pairs], &list[..n_pairs]));
    let scaled = draft.op(Binary::Mul, &[scores, a]);
    let sum = draft.op(Binary::Add, &[scaled, b]);
    let below = draft.op(Unary::Neg, &[sum]);
    let share = draft.op(Unary::Sigmoid, &[below]);
    let clip = Clip { min: Some(1e-7), max: Some(1.0 - 1e-7) };
    let share = draft.op(clip, &[share]);
    let all = draft.op(PairwiseCoupling { n_classes: n }, &[share]);
    Ok(vec![label, transform.of_many(all, draft)])
}
