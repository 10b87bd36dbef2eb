//! Decomposition of an operator of another domain into several nodes of known operators.

use crate::op::{Import, Op, Texts};
use crate::{OpError, Tensor};

/// Row of a table of operators that are decomposed.
pub struct Row {
    /// Name of the operator.
    pub name: &'static str,
    /// Versions of the domain in which the operator changed, beginning with the first supported one.
    pub since: &'static [i64],
    /// Number of inputs.
    pub n_inputs: std::ops::RangeInclusive<usize>,
    /// Builds the decomposition, and returns its outputs.
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

/// Operand of a node of a decomposition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Port {
    /// Input of the operator, by index.
    Input(usize),
    /// Constant of the decomposition, by index.
    Constant(usize),
    /// Output of a node of the decomposition, by index.
    Node(usize),
}

/// Decomposition under construction: nodes of one output each, in topological order.
#[derive(Debug, Default)]
pub struct Draft {
    /// Operators with their inputs.
    pub nodes: Vec<(Op, Vec<Port>)>,
    /// Constants, each with the string table that its elements index, if any.
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
