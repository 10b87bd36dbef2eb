//! Values with their numbers of lanes.

use crate::ssa::Id;

/// A value with its number of lanes; 0 for a scalar, which stands for itself in every lane.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub value: Id,
    pub lanes: usize,
}

impl Operand {
    /// A value that is the same in all lanes.
    pub fn scalar(value: Id) -> Operand {
        Operand { value, lanes: 0 }
    }
}
