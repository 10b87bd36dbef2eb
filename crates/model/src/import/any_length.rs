//! Recurrent networks of any number of time steps: a loop of as many iterations as a run has steps.

use tilewright_graph::op::Cell;
use tilewright_graph::{DType, Tensor};
use tilewright_runtime::host::TAKE;

use super::job::NodeImport;
use super::recurrent::{DirectionWeights, StepState};
use crate::net::{Kind, Net, Node, Repeat, ValueId};
use crate::no_code::Lowered;
use crate::scalar::{input, number, sub};

impl NodeImport<'_> {
    /// Loops of all directions, and what nobody else makes: the output of all states, where it is read.
    /// Returns the last states.
    pub(super) fn of_any_length(&mut self, ways: &[DirectionWeights], steps: i64) -> Lowered<Vec<StepState>> {
        let n = self.number_of_run("n_steps", steps);
        let (mut parts, mut lasts) = (Vec::new(), Vec::new());
        for way in ways {
            let (states, last) = self.in_loop(way, n, steps)?;
            parts.extend(states.map(|states| if way.is_reverse { self.in_reverse(states, n, steps) } else { states }));
            lasts.push(last);
        }
        if let (Some(to), [first, ..]) = (self.outputs[0], &parts[..]) {
            let all = match parts.len() {
                1 => *first,
                n => self.step("states", Kind::Concat(1), &parts, &[steps, self.net.shape(*first)[1] * n as i64]),
            };
            let (inside, batch) = (ways[0].inside, ways[0].sizes[0]);
            let states = self.states_of(to, inside);
            self.push(Kind::View, &[all], states);
            self.ended(states, inside, [steps, batch]);
        }
        Ok(lasts)
    }

    /// Rows in the opposite order.
    fn in_reverse(&mut self, rows: ValueId, n: ValueId, steps: i64) -> ValueId {
        let counted = self.counted(1, 0, steps, 1);
        let places = self.whole_map("places", behind(), &[counted, n], &[steps]);
        let shape = self.net.shape(rows).to_vec();
        self.step("ordered", Kind::Gather { axis: 0, by_element: false }, &[rows, places], &shape)
    }

    /// A direction's loop: its states, the first computed first, where they are read, and the last ones.
    fn in_loop(&mut self, way: &DirectionWeights, n: ValueId, steps: i64) -> Lowered<(Option<ValueId>, StepState)> {
        let [batch, hidden] = way.sizes;
        let (dtype, n_gates) = (self.net.value(way.inputs).dtype, batch * self.net.shape(way.inputs)[1]);
        let rows = self.viewed("rows", way.inputs, &[steps, n_gates]);
        let outer = std::mem::take(self.net);
        let made = self.loop_body(way, &outer, [steps, n_gates]);
        let body = std::mem::replace(self.net, outer);
        let given = made?;
        let n_carried = if matches!(way.op.cell, Cell::Lstm { .. }) { 2 } else { 1 };
        let mut inputs = vec![Some(n), None];
        for slot in [5, 6].into_iter().take(n_carried) {
            let zeros = vec![0.0; (batch * hidden) as usize];
            let first = self.first(slot, way.at as i64, &[batch, hidden]);
            inputs.push(first.or_else(|| Some(self.real_constant("zeros", way.inputs, &[batch, hidden], &zeros))));
        }
        let inside = way.inside.map(|inside| self.viewed("inside", inside, &[steps, batch]));
        inputs.extend([rows, n].into_iter().chain(inside).chain(given).map(Some));
        let state = self.value("last_state", dtype, &[batch, hidden]);
        let cell = (n_carried == 2).then(|| self.value("last_cell", dtype, &[batch, hidden]));
        let states = self.outputs[0].map(|_| self.value("states", dtype, &[steps, batch * hidden]));
        let outputs = [state].into_iter().chain(cell).chain(states).collect();
        let kind = Kind::Loop(Box::new(Repeat { body, n_carried, n: None, op: way.op.clone().into() }));
        self.net.nodes.push(Node { kind, inputs, outputs, origin: self.node.place.node.clone() });
        Ok((states, (state, cell)))
    }

    /// Makes the net the body of a loop, a step of one direction. Returns the weights of the net around it
    /// that come with a run.
    fn loop_body(&mut self, way: &DirectionWeights, outer: &Net, rows: [i64; 2]) -> Lowered<Vec<ValueId>> {
        let [batch, hidden] = way.sizes;
        let dtype = outer.value(way.inputs).dtype;
        let (at, holds) = (self.value("at", DType::I64, &[]), self.value("holds", DType::Bool, &[]));
        let state = self.value("state", dtype, &[batch, hidden]);
        let cell = matches!(way.op.cell, Cell::Lstm { .. }).then(|| self.value("cell", dtype, &[batch, hidden]));
        let (all, n) = (self.value("rows", dtype, &rows), self.value("n_steps", DType::I64, &[]));
        let place = if way.is_reverse { self.whole_map("place", behind(), &[at, n], &[]) } else { at };
        let of_step = |job: &mut Self, all: ValueId, shape: &[i64]| {
            let own = job.value("of_step", dtype, shape);
            let n_bytes = job.net.value(own).n_bytes() as i64;
            job.call(TAKE, vec![n_bytes, rows[0]], 0, &[all, place], &[own]);
            own
        };
        let gates = of_step(self, all, &[batch, rows[1] / batch]);
        let masks = way.inside.map(|_| self.value("inside", dtype, &[rows[0], batch]));
        let inside = masks.map(|masks| of_step(self, masks, &[batch, 1]));
        let (known, pairs) = way.known.within(outer, self.net);
        let way = DirectionWeights { known, ..way.clone() };
        let (new, new_cell) = self.advance(&way, gates, inside, (Some(state), cell))?;
        let goes_on = self.value("goes_on", DType::Bool, &[]);
        self.net.values[goes_on.0].constant = Some(Tensor::scalar(DType::Bool, 1.0));
        self.net.inputs.extend([at, holds, state].into_iter().chain(cell).chain([all, n]).chain(masks));
        self.net.outputs.extend([goes_on, new].into_iter().chain(new_cell));
        self.net.outputs.extend(self.outputs[0].map(|_| new));
        let given = pairs.into_iter().filter(|(_, outer_id)| outer.value(*outer_id).constant.is_none());
        let (own, given): (Vec<ValueId>, Vec<ValueId>) = given.unzip();
        self.net.inputs.extend(own);
        Ok(given)
    }
}

/// The place that is as far from the last one as another one is from the first: that in input 0 of as many as
/// input 1 says.
fn behind() -> tilewright_ir::Expr {
    sub(sub(input(1), number(1.0)), input(0))
}
