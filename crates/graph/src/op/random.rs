//! Random numbers.

use super::util::size;
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::random::{SplitMix64, fresh_key, key_of_seed};
use crate::{DType, OpError, Tensor, TensorType};

/// Random numbers, independent of each other: new ones in each run, or with a seed the same in all runs.
///
/// The numbers of a run are a function of its key: element `i` of a uniform distribution is made of word `i`
/// of [`SplitMix64`], and elements `2i` and `2i + 1` of a normal one of these two words (Box and Muller
/// 1958). Kernels and this reference agree where they have the same seed.
#[derive(Debug, Clone)]
pub struct Random {
    /// Distribution of an element.
    pub distribution: Distribution,
    /// Shape of the attribute; `None` for the shape of input 0.
    pub shape: Option<Vec<usize>>,
    /// Element type; `None` for that of input 0.
    pub dtype: Option<DType>,
    /// Seed, if the numbers are the same in all runs.
    pub seed: Option<u32>,
}

/// Distribution of random numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Distribution {
    /// Uniform in `low..high` (`RandomUniform`, `RandomUniformLike`).
    Uniform {
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// Normal (`RandomNormal`, `RandomNormalLike`).
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        scale: f64,
    },
    /// 1 with the probability in input 0, else 0 (`Bernoulli`).
    Bernoulli,
    /// Indices of classes, drawn by their unnormalized logarithmic probabilities in input 0, `[b, classes]`
    /// (`Multinomial`).
    Multinomial {
        /// Number of indices per row.
        n_samples: usize,
    },
}

fn dtype(node: &Import) -> Result<Option<DType>, OpError> {
    let found = node.int("dtype")?.map(DType::from_onnx).transpose();
    found.map_err(|name| unsupported!("elements of type {name}"))
}

fn seed(node: &Import) -> Result<Option<u32>, OpError> {
    Ok(node.float("seed")?.map(f32::to_bits))
}

fn uniform(node: &Import) -> Result<Distribution, OpError> {
    Ok(Distribution::Uniform { low: node.float_or("low", 0.0)?, high: node.float_or("high", 1.0)? })
}

fn normal(node: &Import) -> Result<Distribution, OpError> {
    Ok(Distribution::Normal { mean: node.float_or("mean", 0.0)?, scale: node.float_or("scale", 1.0)? })
}

/// Reads numbers in the shape of an attribute.
fn in_shape(node: &Import, distribution: Distribution) -> Result<Op, OpError> {
    let shape = node.ints("shape")?.unwrap_or_default();
    let shape = shape.into_iter().map(size).collect::<Result<_, _>>()?;
    let dtype = dtype(node)?.or(Some(DType::F32));
    Ok(Random { distribution, shape: Some(shape), dtype, seed: seed(node)? }.into())
}

/// Reads numbers in the shape of the input.
fn like(node: &Import, distribution: Distribution) -> Result<Op, OpError> {
    Ok(Random { distribution, shape: None, dtype: dtype(node)?, seed: seed(node)? }.into())
}

pub(super) const ROWS: &[Operator] = &[
    row("RandomUniform", &[1, 22], 0..=0, |node| in_shape(node, uniform(node)?)),
    row("RandomNormal", &[1, 22], 0..=0, |node| in_shape(node, normal(node)?)),
    row("RandomUniformLike", &[1, 22], 1..=1, |node| like(node, uniform(node)?)),
    row("RandomNormalLike", &[1, 22], 1..=1, |node| like(node, normal(node)?)),
    row("Bernoulli", &[15, 22], 1..=1, |node| like(node, Distribution::Bernoulli)),
    row("Multinomial", &[7, 22], 1..=1, |node| {
        let distribution = Distribution::Multinomial { n_samples: size(node.int_or("sample_size", 1)?)? };
        let dtype = dtype(node)?.or(Some(DType::I32));
        Ok(Random { distribution, shape: None, dtype, seed: seed(node)? }.into())
    }),
];

impl Op {
    /// Whether results differ between evaluations with the same inputs.
    pub fn is_random(&self) -> bool {
        match self {
            Op::Random(random) => random.seed.is_none(),
            Op::If(choice) => choice.then.graph.is_random() || choice.otherwise.graph.is_random(),
            Op::Loop(repeat) => repeat.body.graph.is_random(),
            Op::Scan(scan) => scan.body.graph.is_random(),
            _ => false,
        }
    }
}

impl Random {
    /// Key of the numbers, if they have a seed.
    pub fn key(&self) -> Option<u64> {
        self.seed.map(key_of_seed)
    }

    fn ty(&self, inputs: Inputs<'_>) -> Result<TensorType, OpError> {
        let mut shape = match &self.shape {
            Some(shape) => shape.clone(),
            None => inputs.shape(0)?.to_vec(),
        };
        let dtype = self.dtype.map_or_else(|| Ok(inputs.ty(0)?.dtype), Ok)?;
        let takes = match self.distribution {
            Distribution::Uniform { .. } | Distribution::Normal { .. } => dtype.is_float() && !dtype.is_float8(),
            Distribution::Bernoulli => dtype.bits() >= 8 && !dtype.is_float8(),
            Distribution::Multinomial { n_samples } => {
                let &[rows, n_classes] = &shape[..] else {
                    return Err(invalid!("probabilities of shape {shape:?} are not [rows, classes]"));
                };
                if n_classes == 0 && rows > 0 {
                    return Err(invalid!("there are no classes"));
                }
                shape = vec![rows, n_samples];
                matches!(dtype, DType::I32 | DType::I64)
            }
        };
        if takes { Ok(TensorType::new(dtype, shape)) } else { Err(invalid!("random numbers cannot be {dtype}")) }
    }
}

impl Operation for Random {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![self.ty(inputs)?])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.ty(inputs)?;
        let n = ty.n_elements();
        let mut random = SplitMix64::new(self.key().unwrap_or_else(fresh_key));
        let numbers = match self.distribution {
            Distribution::Uniform { low, high } => {
                let is_double = ty.dtype == DType::F64;
                let mut unit = || if is_double { random.unit_double() } else { random.unit() };
                (0..n).map(|_| low + unit() * (high - low)).collect()
            }
            Distribution::Normal { mean, scale } => {
                let of_pair = |_| random.normal_pair().map(|x| mean + scale * x);
                let mut numbers: Vec<f64> = (0..n.div_ceil(2)).flat_map(of_pair).collect();
                numbers.truncate(n);
                numbers
            }
            Distribution::Bernoulli => {
                let shares = inputs.tensor(0)?.floats();
                shares.iter().map(|share| f64::from(u8::from(random.unit() < *share))).collect()
            }
            Distribution::Multinomial { n_samples } => {
                let scores = inputs.tensor(0)?.floats();
                let rows = scores.chunks((scores.len() / ty.shape[0].max(1)).max(1));
                rows.flat_map(|row| drawn(row, n_samples, &mut random)).collect()
            }
        };
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

/// Indices drawn by logarithmic probabilities.
fn drawn(scores: &[f64], n_samples: usize, random: &mut SplitMix64) -> Vec<f64> {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let add_up = |sum: &mut f64, score: &f64| {
        *sum += (score - most).exp();
        Some(*sum)
    };
    let sums: Vec<f64> = scores.iter().scan(0.0, add_up).collect();
    let total = sums.last().copied().unwrap_or_default();
    let last = sums.iter().position(|sum| *sum == total).unwrap_or_default();
    let one = |_| {
        let wanted = random.unit_double() * total;
        sums.iter().position(|sum| wanted < *sum).unwrap_or(last) as f64
    };
    (0..n_samples).map(one).collect()
}
