//! Import of loops, whose body is a net of its own.

use tilewright_graph::DType;
use tilewright_graph::op::Loop;
use tilewright_runtime::HostCall;
use tilewright_runtime::host::TAKE;

use super::import;
use super::job::NodeImport;
use crate::net::{Kind, Net, Node, Repeat, ValueId};
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
        let mut body = import(&op.body.graph, self.dots);
        let goes_on = body.value(body.outputs[0]).constant.as_ref().is_some_and(|holds| holds.integers()[0] != 0);
        let begins = self.try_input(1).is_none_or(|id| self.net.scalar(id) == Some(1.0));
        let most = self.try_input(0).and_then(|id| self.net.value(id).constant.as_ref()).map(|n| n.i64s()[0]);
        let mut n = most.filter(|_| goes_on && begins);
        let origin = self.node.place.node.clone();
        let mut inputs: Vec<Option<ValueId>> = self.inputs.clone();
        if let (Some(most), true) = (n, n.is_some_and(|n| n > 1) && n == self.net.open_size) {
            (n, inputs[0]) = (None, Some(self.number_of_run("n", most)));
            take_rows(&mut body, 2 + n_carried);
        }
        let kind = Kind::Loop(Box::new(Repeat { body, n_carried, n, op: op.into() }));
        self.net.nodes.push(Node { kind, inputs, outputs, origin });
        Ok(())
    }
}

/// Has calls look up rows of what a loop captures, its inputs from `n_own` on: calls take any number of rows.
fn take_rows(body: &mut Net, n_own: usize) {
    for at in 0..body.nodes.len() {
        let node = &body.nodes[at];
        if !matches!(node.kind, Kind::Gather { axis: 0, by_element: false }) {
            continue;
        }
        let (rows, place) = (body.value(node.input(0)), body.value(node.input(1)));
        let is_row = body.inputs[n_own..].contains(&node.input(0)) && rows.constant.is_none();
        if is_row && place.n_elements() == 1 && place.dtype == DType::I64 && place.constant.is_none() {
            let n_bytes = body.value(node.output()).n_bytes() as i64;
            let parameters = vec![n_bytes, rows.shape[0]];
            let call = HostCall { operator: TAKE, parameters, sizes: Vec::new(), scratch_bytes: 0 };
            body.nodes[at].kind = Kind::Call(Box::new(call));
        }
    }
}
