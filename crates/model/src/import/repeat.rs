//! Import of loops, whose body is a net of its own.

use tilewright_graph::op::Loop;

use super::import;
use super::job::NodeImport;
use crate::net::{Kind, Node, Repeat, ValueId};
use crate::no_code::Lowered;

impl NodeImport<'_> {
    /// Imports a loop, whose graph becomes a net.
    pub(super) fn loop_of(&mut self, op: &Loop) -> Lowered {
        let (mut op, n_carried) = (op.clone(), op.n_carried);
        for &id in self.inputs.iter().flatten() {
            self.type_number(id)?;
        }
        let mut outputs = Vec::new();
        for at in 0..n_carried {
            let like = self.net.value(self.input(2 + at)?);
            let (dtype, shape) = (like.dtype, like.shape.clone());
            outputs.push(self.output_or(at, dtype, &shape));
        }
        // Unused rows are not collected.
        let rows = op.body.graph.outputs.split_off(1 + n_carried);
        for (at, row) in rows.into_iter().enumerate() {
            if let Some(to) = self.try_output(n_carried + at) {
                self.type_number(to)?;
                op.body.graph.outputs.push(row);
                outputs.push(to);
            }
        }
        let body = import(&op.body.graph, self.dots);
        let goes_on = body.value(body.outputs[0]).constant.as_ref().is_some_and(|holds| holds.integers()[0] != 0);
        let begins = self.try_input(1).is_none_or(|id| self.net.scalar(id) == Some(1.0));
        let most = self.try_input(0).and_then(|id| self.net.value(id).constant.as_ref()).map(|n| n.i64s()[0]);
        let n = most.filter(|_| goes_on && begins);
        let origin = self.node.place.node.clone();
        let inputs: Vec<Option<ValueId>> = self.inputs.clone();
        let kind = Kind::Loop(Box::new(Repeat { body, n_carried, n, op: op.into() }));
        self.net.nodes.push(Node { kind, inputs, outputs, origin });
        Ok(())
    }
}
