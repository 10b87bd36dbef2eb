//! Loss functions of classification.

use super::util::{around, check_rank};
use super::{Import, Inputs, Operation, Operator, row};
use crate::error::invalid;
use crate::{OpError, Tensor, TensorType};

/// Reduction of the losses over all positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum LossReduction {
    None,
    Sum,
    Mean,
}

/// Negative log-likelihood loss. Inputs: log-probabilities `[n, classes, …]`, labels `[n, …]`, and optional
/// weights of classes `[classes]`.
#[derive(Debug, Clone, Copy)]
pub struct NegativeLogLikelihoodLoss {
    /// Reduction of the losses.
    pub reduction: LossReduction,
    /// Label whose positions are excluded from the loss (`ignore_index`).
    pub ignored: Option<i64>,
}

/// Cross-entropy loss of logits and labels; the log-softmax is the second output.
#[derive(Debug, Clone, Copy)]
pub struct SoftmaxCrossEntropyLoss(pub NegativeLogLikelihoodLoss);

fn import(node: &Import) -> Result<NegativeLogLikelihoodLoss, OpError> {
    let known = [("none", LossReduction::None), ("sum", LossReduction::Sum), ("mean", LossReduction::Mean)];
    let reduction = node.one_of("reduction", "mean", &known)?;
    Ok(NegativeLogLikelihoodLoss { reduction, ignored: node.int("ignore_index")? })
}

pub(super) const ROWS: &[Operator] = &[
    row("NegativeLogLikelihoodLoss", &[12, 13, 22], 2..=3, |node| Ok(import(node)?.into())),
    row("SoftmaxCrossEntropyLoss", &[12, 13], 2..=3, |node| Ok(SoftmaxCrossEntropyLoss(import(node)?).into())),
];

impl NegativeLogLikelihoodLoss {
    fn of(&self, inputs: Inputs<'_>, logarithms: &[f64]) -> Result<Tensor, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (_, n_classes, inner) = around(inputs.shape(0)?, 1);
        let labels = inputs.tensor(1)?.i64s();
        let weights = inputs.optional_tensor(2)?.map(Tensor::floats);
        let (mut losses, mut sum) = (Vec::with_capacity(labels.len()), 0.0);
        for (at, &label) in labels.iter().enumerate() {
            if Some(label) == self.ignored {
                losses.push(0.0);
                continue;
            }
            let class = usize::try_from(label).ok().filter(|&class| class < n_classes);
            let class = class.ok_or_else(|| invalid!("label {label} is not one of {n_classes} classes"))?;
            let weight = match &weights {
                Some(weights) => *weights.get(class).ok_or_else(|| invalid!("class {class} has no weight"))?,
                None => 1.0,
            };
            sum += weight;
            losses.push(-weight * logarithms[(at / inner * n_classes + class) * inner + at % inner]);
        }
        let losses = match self.reduction {
            LossReduction::None => losses,
            LossReduction::Sum => vec![losses.iter().sum()],
            LossReduction::Mean => vec![losses.iter().sum::<f64>() / sum],
        };
        Ok(Tensor::from_floats(ty.dtype, ty.shape, &losses))
    }
}

impl Operation for NegativeLogLikelihoodLoss {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (ty, labels) = (inputs.ty(0)?, inputs.shape(1)?);
        check_rank(&ty.shape, 2)?;
        let places = [&ty.shape[..1], &ty.shape[2..]].concat();
        if labels != places {
            return Err(invalid!("labels of shape {labels:?} do not fit {ty}"));
        }
        let shape = if self.reduction == LossReduction::None { places } else { Vec::new() };
        Ok(vec![TensorType::new(ty.dtype, shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        Ok(vec![self.of(inputs, &inputs.tensor(0)?.floats())?])
    }
}

impl Operation for SoftmaxCrossEntropyLoss {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut types = self.0.infer(inputs)?;
        types.push(inputs.ty(0)?.clone());
        Ok(types)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        self.infer(inputs)?;
        let (outer, n, inner) = around(x.shape(), 1);
        let mut numbers = x.floats();
        for o in 0..outer {
            for i in 0..inner {
                let at = |k: usize| (o * n + k) * inner + i;
                let largest = (0..n).map(|k| numbers[at(k)]).fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = (0..n).map(|k| (numbers[at(k)] - largest).exp()).sum();
                (0..n).for_each(|k| numbers[at(k)] -= largest + sum.ln());
            }
        }
        let loss = self.0.of(inputs, &numbers)?;
        Ok(vec![loss, Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}
