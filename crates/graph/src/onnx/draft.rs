//! Drafts: several nodes of known operators in the place of one of another domain.

use crate::op::{Import, Op, Texts};
use crate::{OpError, Tensor};

/// A row of a table of operators that become nodes of others.
pub struct Row {
    /// The operator's name.
    pub name: &'static str,
    /// The versions of the domain in which it changed, from the first one on.
    pub since: &'static [i64],
    /// Number of inputs.
    pub n_inputs: std::ops::RangeInclusive<usize>,
    /// Drafts the computation, and returns its outputs.
    pub draw: fn(&Import, &mut Draft) -> Result<Vec<Port>, OpError>,
}

pub(super) const fn row(
    name: &'static str,
    since: &'static [i64],
    n_inputs: std::ops::RangeInclusive<usize>,
    draw: fn(&Import, &mut Draft) -> Result<Vec<Port>, OpError>,
) -> Row {
    Row { name, since, n_inputs, draw }
}

/// Operand of a node of a draft.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Port {
    /// An input of the operator.
    Input(usize),
    /// A constant of the draft.
    Constant(usize),
    /// Output of a node of the draft.
    Node(usize),
}

/// The nodes that an operator becomes, of one output each, in their order.
#[derive(Debug, Default)]
pub struct Draft {
    /// Operators with their inputs.
    pub nodes: Vec<(Op, Vec<Port>)>,
    /// Constants, with the strings that they index, if any.
    pub constants: Vec<(Tensor, Option<Texts>)>,
}

impl Draft {
    /// Adds a node, and returns its output.
    pub fn op(&mut self, op: impl Into<Op>, inputs: &[Port]) -> Port {
        self.nodes.push((op.into(), inputs.to_vec()));
        Port::Node(self.nodes.len() - 1)
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> Port {
        self.constants.push((tensor, None));
        Port::Constant(self.constants.len() - 1)
    }
}
