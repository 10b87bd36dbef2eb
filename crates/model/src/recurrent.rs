//! Networks over steps, step by step: what their inputs add to all gates is one product for all steps.

use tilewright_graph::op::{Cell, Direction, Recurrent};
use tilewright_ir::Expr;

use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{self, add, clip, input, mul, number, sub};

/// Steps of all directions that are written out, at most; of more there is no code.
const MOST_STEPS: i64 = 2048;

/// A direction's weights and sizes.
struct Way<'a> {
    op: &'a Recurrent,
    /// Which of the directions it is.
    at: usize,
    /// Of the batch, of the state.
    sizes: [i64; 2],
    /// What the state is multiplied by, gate by gate: `[gates·hidden, hidden]`.
    r: Vec<f32>,
    /// What is added to the state's part of each gate.
    r_bias: Vec<f32>,
    /// What cells add to gates; none without.
    peepholes: Option<Vec<f32>>,
}

impl Way<'_> {
    /// An activation of this direction.
    fn act(&self, which: usize, x: Expr) -> Option<Expr> {
        let n_directions = if self.op.direction == Direction::Both { 2 } else { 1 };
        let of_each = self.op.activations.len() / n_directions;
        scalar::unary(self.op.activations[self.at * of_each + which], x)
    }

    /// The activation of a gate, which may be cut off before.
    fn gate(&self, which: usize, x: Expr) -> Option<Expr> {
        let bound = self.op.clip.unwrap_or(f64::INFINITY);
        self.act(which, clip(x, -bound, bound))
    }
}

impl Job<'_> {
    /// A recurrent network, where its weights are known and sequences are all of full length.
    pub(crate) fn recurrent(&mut self, op: &Recurrent) -> Option<()> {
        let x = self.try_input(0)?;
        let &[steps, batch, n] = &self.shape(0)?[..] else { return None };
        let n_directions = if op.direction == Direction::Both { 2 } else { 1 };
        let hidden = op.hidden as i64;
        let fits = !op.batch_first && steps > 0 && steps * n_directions <= MOST_STEPS && self.is_f32(x);
        (fits && !self.has_lengths(steps)).then_some(())?;
        let gates = match op.cell {
            Cell::Rnn => 1,
            Cell::Gru { .. } => 3,
            Cell::Lstm { .. } => 4,
        };
        let rows = gates * hidden;
        let known = |job: &Self, at: usize| job.net.numbers(job.try_input(at)?);
        let (w, r) = (known(self, 1)?, known(self, 2)?);
        let bias = match self.try_input(3) {
            Some(_) => known(self, 3)?,
            None => vec![0.0; (n_directions * 2 * rows) as usize],
        };
        let peepholes = match self.try_input(7) {
            Some(_) => Some(known(self, 7)?),
            None => None,
        };
        let flat = self.step("steps", Kind::View, &[x], &[steps * batch, n]);
        // States of all steps by direction, in the order of the input.
        let mut all: Vec<Vec<ValueId>> = Vec::new();
        let (mut last_states, mut last_cells) = (Vec::new(), Vec::new());
        for at in 0..n_directions as usize {
            let part = |numbers: &[f32], n: i64| numbers[at * n as usize..][..n as usize].to_vec();
            let (w_bias, r_bias) = (part(&bias, 2 * rows), part(&bias, 2 * rows));
            let (w_bias, r_bias) = (w_bias[..rows as usize].to_vec(), r_bias[rows as usize..].to_vec());
            let way = Way {
                op,
                at,
                sizes: [batch, hidden],
                r: part(&r, rows * hidden),
                r_bias: r_bias.clone(),
                peepholes: peepholes.as_ref().map(|p| part(p, 3 * hidden)),
            };
            // The part of the new state of a GRU that is reset behind the product comes with that product.
            let is_own = |row: i64| matches!(op.cell, Cell::Gru { resets_behind: true }) && row >= 2 * hidden;
            let both: Vec<f32> = (0..rows)
                .map(|row| w_bias[row as usize] + if is_own(row) { 0.0 } else { r_bias[row as usize] })
                .collect();
            let name = self.name();
            let weights = self.net.add_constant(&format!("{name}.w{at}"), &[rows, n], &part(&w, rows * n));
            let both = self.net.add_constant(&format!("{name}.b{at}"), &[rows], &both);
            let shape = [steps * batch, rows];
            let product = self.step("inputs", Kind::Product { turned: true, heads: None }, &[flat, weights], &shape);
            let inputs = self.step("gates", Kind::Map(add(input(0), input(1))), &[product, both], &shape);
            let weights = self.net.add_constant(&format!("{name}.r{at}"), &[rows, hidden], &way.r);
            let mut state = self.first(5, at as i64, &[batch, hidden]);
            let mut cell = self.first(6, at as i64, &[batch, hidden]);
            let is_reverse = op.direction == Direction::Reverse || at == 1;
            let mut states = Vec::new();
            for step in 0..steps {
                let t = if is_reverse { steps - 1 - step } else { step };
                let gates = self.rows(inputs, t * batch, batch);
                let new = match op.cell {
                    Cell::Rnn => self.rnn(&way, gates, weights, state)?,
                    Cell::Gru { resets_behind } => self.gru(&way, gates, weights, state, resets_behind)?,
                    Cell::Lstm { couples_gates } => {
                        let (new, new_cell) = self.lstm(&way, gates, weights, state, cell, couples_gates)?;
                        cell = Some(new_cell);
                        new
                    }
                };
                state = Some(new);
                states.push(new);
            }
            last_states.push(state?);
            last_cells.push(cell);
            if is_reverse {
                states.reverse();
            }
            all.push(states);
        }
        if let Some(to) = self.outputs[0] {
            let parts: Vec<ValueId> =
                (0..steps as usize).flat_map(|t| all.iter().map(move |states| states[t])).collect();
            self.stacked(&parts, [batch, hidden], to);
        }
        if let Some(to) = self.outputs.get(1).copied().flatten() {
            self.stacked(&last_states, [batch, hidden], to);
        }
        if let Some(to) = self.outputs.get(2).copied().flatten() {
            let cells: Vec<ValueId> = last_cells.into_iter().collect::<Option<_>>()?;
            self.stacked(&cells, [batch, hidden], to);
        }
        Some(())
    }

    /// Whether sequences may be shorter than all steps.
    fn has_lengths(&self, steps: i64) -> bool {
        self.try_input(4).is_some_and(|id| match &self.net.value(id).constant {
            Some(lengths) => lengths.i64s().iter().any(|&length| length != steps),
            None => true,
        })
    }

    fn name(&self) -> String {
        self.node.place.node.clone()
    }

    /// Rows of a matrix.
    fn rows(&mut self, from: ValueId, first: i64, n: i64) -> ValueId {
        let columns = self.net.shape(from)[1];
        self.step("rows", Kind::Slice(vec![(first, 1), (0, 1)]), &[from], &[n, columns])
    }

    /// Columns of a matrix: a gate.
    fn columns(&mut self, from: ValueId, gate: i64, way: &Way) -> ValueId {
        let [batch, hidden] = way.sizes;
        self.step("gate", Kind::Slice(vec![(0, 1), (gate * hidden, 1)]), &[from], &[batch, hidden])
    }

    /// The first state of a direction; none where it is zero.
    fn first(&mut self, at: usize, direction: i64, shape: &[i64; 2]) -> Option<ValueId> {
        let given = self.try_input(at)?;
        let parts = vec![(direction, 1), (0, 1), (0, 1)];
        let part = self.step("first", Kind::Slice(parts), &[given], &[1, shape[0], shape[1]]);
        Some(self.step("state", Kind::View, &[part], shape))
    }

    /// States one behind the other, in the shape of an output.
    fn stacked(&mut self, parts: &[ValueId], [batch, hidden]: [i64; 2], to: ValueId) {
        let n = parts.len() as i64;
        let joined = self.step("states", Kind::Concat(0), parts, &[n * batch, hidden]);
        self.push(Kind::View, &[joined], to);
    }

    /// What gates are of inputs and the state before.
    fn with_state(&mut self, way: &Way, gates: ValueId, weights: ValueId, state: Option<ValueId>) -> ValueId {
        let Some(state) = state else { return gates };
        let shape = [way.sizes[0], self.net.shape(gates)[1]];
        let product = self.step("state", Kind::Product { turned: true, heads: None }, &[state, weights], &shape);
        self.step("gates", Kind::Map(add(input(0), input(1))), &[product, gates], &shape)
    }

    fn rnn(&mut self, way: &Way, gates: ValueId, weights: ValueId, state: Option<ValueId>) -> Option<ValueId> {
        let gates = self.with_state(way, gates, weights, state);
        Some(self.step("state", Kind::Map(way.gate(0, input(0))?), &[gates], &way.sizes))
    }

    /// A step of a long short-term memory: the new state, and the new cell.
    fn lstm(
        &mut self,
        way: &Way,
        gates: ValueId,
        weights: ValueId,
        state: Option<ValueId>,
        cell: Option<ValueId>,
        couples_gates: bool,
    ) -> Option<(ValueId, ValueId)> {
        let gates = self.with_state(way, gates, weights, state);
        let [i, o, f, c] = [0, 1, 2, 3].map(|gate| self.columns(gates, gate, way));
        let (name, hidden) = (self.name(), way.sizes[1]);
        let peep = |job: &mut Self, which: usize| {
            let numbers = way.peepholes.as_ref()?[which * hidden as usize..][..hidden as usize].to_vec();
            Some(job.net.add_constant(&format!("{name}.p{which}"), &[hidden], &numbers))
        };
        // Inputs of the new cell: its gates, then what is optional.
        let mut inputs = vec![i, f, c];
        let mut slot = |id: Option<ValueId>| {
            let id = id?;
            inputs.push(id);
            Some(input(inputs.len() - 1))
        };
        let before = slot(cell);
        let (p_i, p_f) = match before {
            Some(_) => (slot(peep(self, 0)), slot(peep(self, 2))),
            None => (None, None),
        };
        let peeped = |gate: Expr, p: Option<Expr>| match (p, &before) {
            (Some(p), Some(cell)) => add(gate, mul(p, cell.clone())),
            _ => gate,
        };
        let enters = way.gate(0, peeped(input(0), p_i))?;
        let stays = match couples_gates {
            true => sub(number(1.0), enters.clone()),
            false => way.gate(0, peeped(input(1), p_f))?,
        };
        let new = mul(enters, way.gate(1, input(2))?);
        let value = match &before {
            Some(cell) => add(mul(stays, cell.clone()), new),
            None => new,
        };
        let new_cell = self.step("cell", Kind::Map(value), &inputs, &way.sizes);
        let mut inputs = vec![o, new_cell];
        let mut leaves = input(0);
        if let Some(p) = peep(self, 1) {
            inputs.push(p);
            leaves = add(leaves, mul(input(2), input(1)));
        }
        let value = mul(way.gate(0, leaves)?, way.act(2, input(1))?);
        Some((self.step("state", Kind::Map(value), &inputs, &way.sizes), new_cell))
    }

    /// A step of a gated recurrent unit.
    fn gru(
        &mut self,
        way: &Way,
        gates: ValueId,
        weights: ValueId,
        state: Option<ValueId>,
        resets_behind: bool,
    ) -> Option<ValueId> {
        let [_, hidden] = way.sizes;
        let name = self.name();
        let own = self.net.add_constant(&format!("{name}.rb"), &[hidden], &way.r_bias[2 * hidden as usize..]);
        let [x_z, x_r, x_h] = [0, 1, 2].map(|gate| self.columns(gates, gate, way));
        let Some(state) = state else {
            let z = way.gate(0, input(0))?;
            let inner = match resets_behind {
                true => add(input(1), mul(way.gate(0, input(2))?, input(3))),
                false => input(1),
            };
            let value = mul(sub(number(1.0), z), way.gate(1, inner)?);
            return Some(self.step("state", Kind::Map(value), &[x_z, x_h, x_r, own], &way.sizes));
        };
        let shape = [way.sizes[0], 3 * hidden];
        if resets_behind {
            let all = self.step("state", Kind::Product { turned: true, heads: None }, &[state, weights], &shape);
            let [h_z, h_r, h_h] = [0, 1, 2].map(|gate| self.columns(all, gate, way));
            let z = way.gate(0, add(input(0), input(3)))?;
            let reset = way.gate(0, add(input(1), input(4)))?;
            let new = way.gate(1, add(input(2), mul(reset, add(input(5), input(7)))))?;
            let value = add(mul(sub(number(1.0), z.clone()), new), mul(z, input(6)));
            return Some(self.step("state", Kind::Map(value), &[x_z, x_r, x_h, h_z, h_r, h_h, state, own], &way.sizes));
        }
        let of = |job: &mut Self, first: i64, n: i64| {
            let from = (first * hidden * hidden) as usize;
            let numbers = &way.r[from..from + (n * hidden * hidden) as usize];
            job.net.add_constant(&format!("{name}.r{}.{first}", way.at), &[n * hidden, hidden], numbers)
        };
        let (of_gates, of_new) = (of(self, 0, 2), of(self, 2, 1));
        let shape = [way.sizes[0], 2 * hidden];
        let both = self.step("state", Kind::Product { turned: true, heads: None }, &[state, of_gates], &shape);
        let [h_z, h_r] = [0, 1].map(|gate| self.columns(both, gate, way));
        let reset = mul(way.gate(0, add(input(0), input(1)))?, input(2));
        let reset = self.step("reset", Kind::Map(reset), &[x_r, h_r, state], &way.sizes);
        let inner = self.step("state", Kind::Product { turned: true, heads: None }, &[reset, of_new], &way.sizes);
        let z = way.gate(0, add(input(0), input(1)))?;
        let new = way.gate(1, add(input(2), input(3)))?;
        let value = add(mul(sub(number(1.0), z.clone()), new), mul(z, input(4)));
        Some(self.step("state", Kind::Map(value), &[x_z, h_z, x_h, inner, state], &way.sizes))
    }
}
