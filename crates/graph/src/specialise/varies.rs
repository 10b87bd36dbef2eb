//! Dependence of values on the size of the open dimension.

use crate::op::{Fact, Inputs, Op};
use crate::{DType, TensorType};

/// How a value depends on the size of the open dimension (see [`Graph::open_size`](crate::Graph::open_size)),
/// as far as operators alone show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Varies {
    /// Whether its dimensions may depend on the size.
    pub shape: bool,
    /// Whether elements with the same indices may depend on the size.
    pub elements: bool,
}

impl Varies {
    /// Dependence of what is computed from values.
    pub(crate) fn all(values: impl Iterator<Item = Varies>) -> Varies {
        values.fold(Varies::default(), |a, b| Varies { shape: a.shape | b.shape, elements: a.elements | b.elements })
    }

    /// Whether anything depends on the size.
    pub fn any(self) -> bool {
        self.shape || self.elements
    }
}

/// Dependence of a node's outputs.
pub(super) fn outputs_vary(op: &Op, inputs: &[Option<Varies>]) -> Varies {
    let sizes: &[usize] = match op {
        Op::Range(_) | Op::Expand(_) | Op::Reshape(_) | Op::Tile(_) => &[1],
        Op::ConstantOfShape(_) => &[0],
        Op::Slice(_) => &[2],
        _ => &[],
    };
    let found = Varies::all(inputs.iter().enumerate().filter_map(|(at, varies)| match (varies, sizes.contains(&at)) {
        // Elements of a size are a dimension of the output.
        (Some(varies), true) => Some(Varies { shape: varies.elements, elements: false }),
        (varies, _) => *varies,
    }));
    match op {
        op if op.reads_type_only() => Varies { shape: false, elements: found.shape },
        op if is_elementwise(op) || moves(op) || !sizes.is_empty() => found,
        // Sums and the like depend on the number of elements.
        _ => Varies { elements: found.any(), ..found },
    }
}

pub(super) fn is_elementwise(op: &Op) -> bool {
    matches!(op, Op::Unary(_) | Op::Binary(_) | Op::Variadic(_) | Op::Clip(_) | Op::Where(_) | Op::Cast(_))
}

/// Whether an operator only moves the elements of its first input.
pub(super) fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Concat(_)
            | Op::Expand(_)
            | Op::Flatten(_)
            | Op::Gather(_)
            | Op::Reshape(_)
            | Op::Slice(_)
            | Op::Squeeze(_)
            | Op::Transpose(_)
            | Op::Trilu(_)
            | Op::Unsqueeze(_)
    )
}

/// Maximum rank of a shape whose elements a model may test.
const MOST_DIMS: usize = 8;

/// Whether a node with known inputs may be folded. Quantized weights stay integers. Of values that depend on
/// the open size, element counts, positions, conditions of branches and masks without a hole are folded;
/// functions of as many positions as the size are computed by a run.
pub(super) fn may_fold(op: &Op, inputs: Inputs<'_>, types: &[TensorType], varies: Varies) -> bool {
    if matches!(op, Op::DequantizeLinear(_)) {
        return false;
    }
    if !varies.any() {
        return true;
    }
    let is_one = |ty: &TensorType| ty.n_elements() == 1;
    let is_short = |ty: &TensorType| ty.shape.len() <= 1 && ty.n_elements() <= MOST_DIMS;
    let is_open = varies.shape && varies.elements && is_elementwise(op);
    let is_size = |ty: &TensorType| match ty.dtype {
        // Exported models test whether each element of a shape is -1.
        DType::Bool => is_one(ty) || is_short(ty),
        // Other integers are quantized numbers, such as rows of a table.
        dtype => matches!(dtype, DType::I32 | DType::I64),
    };
    let is_mask = |ty: &TensorType| ty.dtype == DType::Bool && (moves(op) || matches!(op, Op::Cast(_)));
    types.iter().all(|ty| is_one(ty) || is_short(ty) || !is_open) && types.iter().all(is_size)
        || types.iter().all(is_mask) && inputs.0.first().copied().flatten().is_some_and(is_filled)
}

/// Whether several elements are known, and equal.
fn is_filled(fact: Fact<'_>) -> bool {
    let Some(tensor) = fact.value.filter(|tensor| tensor.n_elements() > 1) else { return false };
    let width = tensor.bytes().len() / tensor.n_elements();
    width > 0 && tensor.bytes().chunks(width).all(|element| element == &tensor.bytes()[..width])
}
