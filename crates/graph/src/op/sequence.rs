//! Operators on sequences of tensors. A specialised graph has no sequences, as their tensors are then known
//! individually.

use super::util::{axis, size};
use super::{ANY, Concat, Inputs, Op, Operation, Operator, Slice, Squeeze, Unsqueeze, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Operator on a sequence of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequence {
    /// Sequence of the inputs.
    Construct,
    /// Sequence without tensors.
    Empty,
    /// Tensor at a position, input 1; negative counts from the end.
    At,
    /// Sequence with a tensor, input 1, inserted at a position, input 2, or at the end.
    Insert,
    /// Sequence without the tensor at a position, input 1, or without the last one.
    Erase,
    /// Number of tensors.
    Length,
    /// Parts of a tensor along `axis`, of the sizes in input 1: one number for all, or one for each; parts of
    /// size 1 without it.
    Split {
        /// Dimension to split; negative counts from the end.
        axis: i64,
        /// Whether parts of size 1 keep the dimension, if no sizes are given.
        keeps_dim: bool,
    },
    /// Concatenation of all tensors along `axis`.
    Concat {
        /// Dimension to concatenate along; negative counts from the end.
        axis: i64,
        /// Whether the dimension is a new one.
        is_new: bool,
    },
}

pub(super) const ROWS: &[Operator] = &[
    row("SequenceConstruct", &[11], 1..=ANY, |_| Ok(Sequence::Construct.into())),
    row("SequenceEmpty", &[11], 0..=0, |node| {
        let _ = node.int("dtype")?;
        Ok(Sequence::Empty.into())
    }),
    row("SequenceAt", &[11], 2..=2, |_| Ok(Sequence::At.into())),
    row("SequenceInsert", &[11], 2..=3, |_| Ok(Sequence::Insert.into())),
    row("SequenceErase", &[11], 1..=2, |_| Ok(Sequence::Erase.into())),
    row("SequenceLength", &[11], 1..=1, |_| Ok(Sequence::Length.into())),
    row("SplitToSequence", &[11, 24], 1..=2, |node| {
        Ok(Sequence::Split { axis: node.int_or("axis", 0)?, keeps_dim: node.flag("keepdims", true)? }.into())
    }),
    row("ConcatFromSequence", &[11], 1..=1, |node| {
        let axis = node.int("axis")?.ok_or_else(|| invalid!("it has no axis"))?;
        Ok(Sequence::Concat { axis, is_new: node.flag("new_axis", false)? }.into())
    }),
];

/// Input or output of an operator on sequences.
#[derive(Debug, Clone)]
pub(crate) enum Item<T> {
    /// Tensor.
    One(T),
    /// Sequence of tensors.
    Many(Vec<T>),
}

/// Operations on the tensors of sequences, which may be known tensors or values that a run computes.
pub(crate) trait Elements {
    /// Representation of a tensor.
    type Element: Clone;

    /// Type of a tensor.
    ///
    /// # Errors
    /// If the type is not known.
    fn ty(&self, of: &Self::Element) -> Result<TensorType, OpError>;

    /// Elements of a tensor, if they are known.
    fn known(&self, of: &Self::Element) -> Option<Tensor>;

    /// Makes a constant tensor.
    fn constant(&mut self, tensor: Tensor) -> Self::Element;

    /// Computes the output of an operator that has one.
    ///
    /// # Errors
    /// If the operator fails.
    fn computed(&mut self, op: Op, inputs: &[Self::Element]) -> Result<Self::Element, OpError>;
}

/// Resolves a position in a sequence of `n` tensors; `n_places` positions are valid.
fn position(index: i64, n: usize, n_places: usize) -> Result<usize, OpError> {
    let counted = if index < 0 { index.saturating_add(n as i64) } else { index };
    let found = usize::try_from(counted).ok().filter(|&position| position < n_places);
    found.ok_or_else(|| invalid!("position {index} is not one of a sequence of {n}"))
}

impl Sequence {
    /// Computes the output for inputs, `None` for omitted ones.
    ///
    /// # Errors
    /// If inputs do not fit, or a position or a size is not known.
    pub(crate) fn of<E: Elements>(
        self,
        inputs: &[Option<Item<E::Element>>],
        elements: &mut E,
    ) -> Result<Item<E::Element>, OpError> {
        let number = |elements: &E, at: usize| match inputs.get(at) {
            Some(Some(Item::One(index))) => {
                let known = elements.known(index).ok_or(OpError::NeedsValue(at))?;
                known.i64s().first().copied().map(Some).ok_or_else(|| invalid!("its input {} is empty", at + 1))
            }
            _ => Ok(None),
        };
        let one = |at: usize| match inputs.get(at) {
            Some(Some(Item::One(one))) => Ok(one.clone()),
            _ => Err(invalid!("its input {} is no tensor", at + 1)),
        };
        let many = || match inputs.first() {
            Some(Some(Item::Many(many))) => Ok(many.clone()),
            _ => Err(invalid!("its input 1 is no sequence")),
        };
        Ok(match self {
            Sequence::Construct => Item::Many((0..inputs.len()).map(one).collect::<Result<_, _>>()?),
            Sequence::Empty => Item::Many(Vec::new()),
            Sequence::At => {
                let many = many()?;
                let index = number(elements, 1)?.ok_or_else(|| invalid!("it has no position"))?;
                Item::One(many[position(index, many.len(), many.len())?].clone())
            }
            Sequence::Insert => {
                let mut many = many()?;
                let n = many.len();
                let at = number(elements, 2)?.map_or(Ok(n), |index| position(index, n, n + 1))?;
                many.insert(at, one(1)?);
                Item::Many(many)
            }
            Sequence::Erase => {
                let mut many = many()?;
                let n = many.len();
                many.remove(position(number(elements, 1)?.unwrap_or(-1), n, n)?);
                Item::Many(many)
            }
            Sequence::Length => {
                let n = many()?.len() as i128;
                Item::One(elements.constant(Tensor::from_integers(DType::I64, [], &[n])))
            }
            Sequence::Split { axis, keeps_dim } => {
                let sizes = match inputs.get(1) {
                    Some(Some(Item::One(sizes))) => Some(elements.known(sizes).ok_or(OpError::NeedsValue(1))?),
                    _ => None,
                };
                Item::Many(split(one(0)?, axis, sizes, keeps_dim, elements)?)
            }
            Sequence::Concat { axis, is_new } => {
                let mut many = many()?;
                if is_new {
                    let axes = Unsqueeze { axes: Some(vec![axis]) };
                    for one in &mut many {
                        *one = elements.computed(axes.clone().into(), std::slice::from_ref(one))?;
                    }
                }
                if many.is_empty() {
                    return Err(invalid!("an empty sequence has nothing to concatenate"));
                }
                Item::One(elements.computed(Concat { axis }.into(), &many)?)
            }
        })
    }
}

/// Splits a tensor along an axis.
fn split<E: Elements>(
    x: E::Element,
    along: i64,
    sizes: Option<Tensor>,
    keeps_dim: bool,
    elements: &mut E,
) -> Result<Vec<E::Element>, OpError> {
    let ty = elements.ty(&x)?;
    let along = axis(along, ty.shape.len())?;
    let n = ty.shape[along];
    let is_squeezed = sizes.is_none() && !keeps_dim;
    let sizes: Vec<usize> = match sizes {
        Some(sizes) if sizes.shape().is_empty() => {
            let each = size(sizes.i64s()[0])?;
            if each == 0 {
                return Err(invalid!("parts have size 0"));
            }
            (0..n.div_ceil(each)).map(|at| each.min(n - at * each)).collect()
        }
        Some(sizes) => sizes.i64s().into_iter().map(size).collect::<Result<_, _>>()?,
        None => vec![1; n],
    };
    if sizes.iter().try_fold(0_usize, |sum, &n| sum.checked_add(n)) != Some(n) {
        return Err(invalid!("parts of {sizes:?} are not the dimension's {n}"));
    }
    let (mut parts, mut start) = (Vec::with_capacity(sizes.len()), 0);
    for size in sizes {
        let [begin, end] = [start as i64, (start + size) as i64];
        let slice = Slice { attributes: Some((vec![begin], vec![end], Some(vec![along as i64]))) };
        let mut part = elements.computed(slice.into(), std::slice::from_ref(&x))?;
        if is_squeezed {
            part = elements.computed(Squeeze { axes: Some(vec![along as i64]) }.into(), &[part])?;
        }
        parts.push(part);
        start += size;
    }
    Ok(parts)
}

/// Error for a sequence where an operator takes only tensors.
pub(crate) fn no_tensor() -> OpError {
    unsupported!("a sequence of tensors is supported only in operators on sequences")
}

impl Operation for Sequence {
    fn infer(&self, _: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Err(no_tensor())
    }

    fn evaluate(&self, _: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        Err(no_tensor())
    }
}
