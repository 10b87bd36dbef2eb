//! Values with their number of lanes.

use crate::ssa::Id;

/// Value with its number of lanes; 0 for a scalar, which is the same in every lane.
#[derive(Clone, Copy)]
pub(super) struct LaneOperand {
    pub value: Id,
    pub lanes: usize,
}

impl LaneOperand {
    /// Operand that is the same in all lanes.
    pub fn scalar(value: Id) -> LaneOperand {
        LaneOperand { value, lanes: 0 }
    }
}
