//! Import of recurrent networks: the input's contribution to all gates is one product over all time steps;
//! the first step is specialised, and the others are a [`Sequence`](crate::net::Sequence).

use tilewright_graph::op::{Cell, Recurrent, RecurrentDirection};
use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;

use super::job::NodeImport;
use super::quantize::{IntegerFactor, Levels};
use crate::net::{Kind, Net, Node, Read, Sequence, Track, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{self, add, choose, clip, input, mul, number, sub, where_less};

/// Maximum number of time steps in all directions; longer networks have no code.
const MOST_STEPS: i64 = 1 << 14;
/// Steps of each direction that are unrolled.
const WRITTEN_OUT: i64 = 2;

/// A direction's weights and sizes.
#[derive(Clone)]
pub(super) struct DirectionWeights<'a> {
    pub(super) op: &'a Recurrent,
    /// Index of the direction.
    pub(super) at: usize,
    /// Whether it runs from the last step to the first.
    pub(super) is_reverse: bool,
    /// Sizes of the batch and of the state.
    pub(super) sizes: [i64; 2],
    /// Contribution of the inputs to all gates, step by step.
    pub(super) inputs: ValueId,
    /// Mask of sequences that may be shorter than all steps, 1 inside a sequence, else 0: for each step a
    /// column, as long as the batch.
    pub(super) inside: Option<ValueId>,
    /// Constants of its steps.
    pub(super) known: KnownWeights,
}

/// Constants of a direction, in the net or in the body of a sequence.
#[derive(Clone)]
pub(super) struct KnownWeights {
    /// Weights of the state: for all gates, `[gates·hidden, hidden]`, or for a GRU that resets ahead of the
    /// product, for all but the last gate and for the last. Empty where these are integers.
    weights: Vec<ValueId>,
    /// Weights of the state as integers, by which its levels are multiplied.
    integers: Option<IntegerFactor>,
    /// Bias of the state's contribution to a GRU's last gate.
    bias: Option<ValueId>,
    /// Peephole weights of the cells; empty without any.
    peepholes: Vec<ValueId>,
}

impl KnownWeights {
    /// Copies the constants into the body of a sequence, and pairs them with the originals.
    pub(super) fn within(&self, outer: &Net, body: &mut Net) -> (KnownWeights, Vec<(ValueId, ValueId)>) {
        let mut pairs = Vec::new();
        let mut within = |id: &ValueId| {
            body.values.push(outer.value(*id).clone());
            pairs.push((ValueId(body.values.len() - 1), *id));
            ValueId(body.values.len() - 1)
        };
        let weights = self.weights.iter().map(&mut within).collect();
        let integers = self.integers.map(|IntegerFactor { weights, of_zero, scales }| {
            let [weights, of_zero, scales] = [weights, of_zero, scales].each_ref().map(&mut within);
            IntegerFactor { weights, of_zero, scales }
        });
        let bias = self.bias.as_ref().map(&mut within);
        let peepholes = self.peepholes.iter().map(&mut within).collect();
        (KnownWeights { weights, integers, bias, peepholes }, pairs)
    }
}

impl DirectionWeights<'_> {
    /// Applies an activation of this direction.
    fn act(&self, which: usize, x: Expr) -> Lowered<Expr> {
        let n_directions = if self.op.direction == RecurrentDirection::Both { 2 } else { 1 };
        let of_each = self.op.activations.len() / n_directions;
        let activation = self.op.activations[self.at * of_each + which];
        scalar::unary(activation, x).ok_or(NoCode::Form("its activation"))
    }

    /// Applies the activation of a gate, after a clip if there is one.
    fn gate(&self, which: usize, x: Expr) -> Lowered<Expr> {
        let bound = self.op.clip.unwrap_or(f64::INFINITY);
        self.act(which, clip(x, -bound, bound))
    }
}

/// Whether inputs and states are dynamically quantized before products.
fn rounds(op: &Recurrent) -> bool {
    matches!(op.cell, Cell::Lstm { rounds: true, .. })
}

/// State that a step passes to the next one: hidden state, and of an LSTM the cell.
pub(super) type StepState = (ValueId, Option<ValueId>);

impl NodeImport<'_> {
    /// Lowers a recurrent network. After the end of a sequence, states stay constant, and the outputs of
    /// steps are zero.
    pub(crate) fn recurrent(&mut self, op: &Recurrent) -> Lowered {
        if op.batch_first { self.batch_first(op) } else { self.steps_first(op) }
    }

    /// Lowers a recurrent network whose tensors have the batch as their first dimension.
    fn batch_first(&mut self, op: &Recurrent) -> Lowered {
        for slot in [0, 5, 6] {
            let Some(id) = self.try_input(slot) else { continue };
            let [batch, steps, n] = self.sizes_of(id)?;
            let turned = self.step("turned", Kind::Transpose(vec![1, 0, 2]), &[id], &[steps, batch, n]);
            self.inputs[slot] = Some(turned);
        }
        let outputs = self.outputs.clone();
        // The batch comes first: before steps and directions in all states, and before directions in the last
        // states.
        let orders = [vec![2, 0, 1, 3], vec![1, 0, 2], vec![1, 0, 2]];
        for (at, order) in orders.iter().enumerate() {
            let Some(to) = self.try_output(at) else { continue };
            let shape = self.net.shape(to).to_vec();
            let mut plain = vec![0; shape.len()];
            order.iter().zip(&shape).for_each(|(&from, &n)| plain[from] = n);
            self.outputs[at] = Some(self.value("plain", self.net.value(to).dtype, &plain));
        }
        self.steps_first(&Recurrent { batch_first: false, ..op.clone() })?;
        for ((to, plain), order) in outputs.into_iter().zip(self.outputs.clone()).zip(orders) {
            if let (Some(to), Some(plain)) = (to, plain) {
                self.push(Kind::Transpose(order), &[plain], to);
            }
        }
        Ok(())
    }

    /// Whether the batch is the open dimension. Its items are then contiguous within each step, as tensors of
    /// all steps have three dimensions, `[steps, batch, n]`.
    fn has_open_batch(&self, batch: i64) -> bool {
        self.net.open_size.is_some() && !self.is_open_behind(batch)
    }

    /// Shape of a tensor of rows for each item of so many steps.
    fn shape_of_steps(&self, steps: i64, batch: i64, n: i64) -> Vec<i64> {
        if self.has_open_batch(batch) { vec![steps, batch, n] } else { vec![steps * batch, n] }
    }

    /// Matrix of the rows of all items, each with its steps one behind the other.
    fn by_items(&mut self, x: ValueId) -> ValueId {
        let [steps, batch, n] = *self.net.shape(x) else { unreachable!("it has steps, items and columns") };
        let turned = Kind::Transpose(vec![1, 0, 2]);
        let is_turned =
            |node: &&Node| node.outputs == [x] && matches!(&node.kind, Kind::Transpose(by) if by == &[1, 0, 2]);
        let before = self.net.nodes.iter().find(is_turned).map(|node| node.input(0));
        let items = before.unwrap_or_else(|| self.step("items", turned, &[x], &[batch, steps, n]));
        self.step("steps", Kind::View, &[items], &[batch * steps, n])
    }

    /// Undoes [`NodeImport::by_items`]: the rows of all items, `[steps, batch, n]`.
    fn by_steps(&mut self, rows: ValueId, batch: i64) -> ValueId {
        let [n_rows, n] = *self.net.shape(rows) else { unreachable!("all steps are a matrix") };
        let steps = n_rows / batch;
        let items = self.step("items", Kind::View, &[rows], &[batch, steps, n]);
        self.step("steps", Kind::Transpose(vec![1, 0, 2]), &[items], &[steps, batch, n])
    }

    fn steps_first(&mut self, op: &Recurrent) -> Lowered {
        let x = self.input(0)?;
        let [steps, batch, n] = self.sizes_of(x)?;
        let n_directions = if op.direction == RecurrentDirection::Both { 2 } else { 1 };
        self.need_real(x)?;
        need(steps > 0, || self.no_elements(x))?;
        let too_large =
            || NoCode::Size { what: "steps of all directions", size: steps * n_directions, most: MOST_STEPS };
        need(steps * n_directions <= MOST_STEPS, too_large)?;
        let inside = self.inside(steps, batch)?;
        // In reverse, the shorter sequences of a batch begin later, so they would be quantized together with
        // other steps.
        let is_in_step = !rounds(op) || inside.is_none() || batch == 1 || op.direction == RecurrentDirection::Forward;
        need(is_in_step, || NoCode::Form("sequences of several lengths, rounded together and backwards"))?;
        let has_integers = rounds(op) && self.has_integer_weights();
        let x = if rounds(op) && !has_integers { self.rounded_by_range(x)? } else { x };
        let flat = match self.has_open_batch(batch) {
            true => self.by_items(x),
            false => self.step("steps", Kind::View, &[x], &[steps * batch, n]),
        };
        let levels = if has_integers { Some(self.levels_by_range(flat)?) } else { None };
        let mut ways = Vec::new();
        for at in 0..n_directions as usize {
            let way = self.way(op, at, (flat, levels.as_ref()), batch)?;
            let inputs = if self.has_open_batch(batch) { self.by_steps(way.inputs, batch) } else { way.inputs };
            ways.push(DirectionWeights { inside, inputs, ..way });
        }
        let lasts = match self.is_open_behind(batch) {
            true => self.of_any_length(&ways, steps)?,
            false => self.step_by_step(&ways, inside, [steps, batch])?,
        };
        if let Some(to) = self.try_output(1) {
            let states: Vec<ValueId> = lasts.iter().map(|(state, _)| *state).collect();
            self.stacked(&states, batch, to);
        }
        if let Some(to) = self.try_output(2) {
            let cells = lasts.iter().map(|(_, cell)| cell.ok_or(NoCode::Output(2))).collect::<Lowered<Vec<_>>>()?;
            self.stacked(&cells, batch, to);
        }
        Ok(())
    }

    /// Steps of all directions, and the output of all states, where it is read. Returns the last states.
    fn step_by_step(
        &mut self,
        ways: &[DirectionWeights],
        inside: Option<ValueId>,
        [steps, batch]: [i64; 2],
    ) -> Lowered<Vec<StepState>> {
        let hidden = ways[0].sizes[1];
        let mut firsts = Vec::new();
        for way in ways {
            let [state, cell] = [5, 6].map(|slot| self.first(slot, way.at as i64, &[batch, hidden]));
            let first = if way.is_reverse { steps - 1 } else { 0 };
            firsts.push(self.advance_at(way, first, (state, cell))?);
        }
        // States in the order of the output, and the last ones of each direction.
        let (all, lasts) = match steps <= WRITTEN_OUT {
            true => self.written_out(ways, firsts, steps)?,
            false => self.in_sequence(ways, firsts, steps)?,
        };
        if let Some(to) = self.outputs[0] {
            let states = self.states_of(to, inside);
            self.stacked(&all, batch, states);
            self.ended(states, inside, [steps, batch]);
        }
        Ok(lasts)
    }

    /// Value of all states: the output itself, but where sequences may end before the last step.
    pub(super) fn states_of(&mut self, to: ValueId, inside: Option<ValueId>) -> ValueId {
        let shape = self.net.shape(to).to_vec();
        if inside.is_some() { self.value("states", self.net.value(to).dtype, &shape) } else { to }
    }

    /// Makes the output of all states one that is zero behind the end of each sequence.
    pub(super) fn ended(&mut self, states: ValueId, inside: Option<ValueId>, [steps, batch]: [i64; 2]) {
        if let (Some(to), Some(inside)) = (self.outputs[0], inside) {
            let inside = self.step("inside", Kind::View, &[inside], &[steps, 1, batch, 1]);
            self.push(Kind::Map(choose(input(0), input(1), number(0.0))), &[inside, states], to);
        }
    }

    /// A direction, with what the inputs, or their levels, add to its gates.
    fn way<'a>(
        &mut self,
        op: &'a Recurrent,
        at: usize,
        (flat, levels): (ValueId, Option<&Levels>),
        batch: i64,
    ) -> Lowered<DirectionWeights<'a>> {
        let hidden = op.hidden as i64;
        let [rows_of_inputs, n] = *self.net.shape(flat) else { unreachable!("all steps are a matrix") };
        let gates = match op.cell {
            Cell::Rnn => 1,
            Cell::Gru { .. } => 3,
            Cell::Lstm { .. } => 4,
        };
        let rows = gates * hidden;
        let (product, both, known) = match levels {
            Some(levels) => {
                let factor = self.integer_factor([1, 8], at, [rows, n])?;
                let product = self.product_of_levels("inputs", levels, factor);
                let integers = Some(self.integer_factor([2, 9], at, [rows, hidden])?);
                let (both, known) = self.known_biases(op, at, rows)?;
                (product, both, KnownWeights { integers, ..known })
            }
            None => {
                let (weights, both, known) = match self.are_known(&[1, 2, 3, 7, 8, 9]) {
                    true => self.known_weights(op, at, [rows, n])?,
                    false => self.given_weights(op, at, [rows, n])?,
                };
                (self.matrix_product("inputs", flat, weights, true), both, known)
            }
        };
        let inputs = self.step("gates", Kind::Map(add(input(0), input(1))), &[product, both], &[rows_of_inputs, rows]);
        let is_reverse = op.direction == RecurrentDirection::Reverse || at == 1;
        Ok(DirectionWeights { op, at, is_reverse, sizes: [batch, hidden], inputs, inside: None, known })
    }

    /// Whether those of these inputs that are present are f32 constants.
    fn are_known(&self, slots: &[usize]) -> bool {
        slots.iter().all(|slot| self.try_input(*slot).is_none_or(|id| self.net.numbers(id).is_some()))
    }

    /// Whether all weights are constant 8-bit integers with scales.
    fn has_integer_weights(&self) -> bool {
        let is_byte = |x: &f32| x.fract() == 0.0 && (-128.0..128.0).contains(x);
        let are_bytes = |slot: &usize| {
            let numbers = self.try_input(*slot).and_then(|id| self.net.numbers(id));
            numbers.is_some_and(|numbers| numbers.iter().all(is_byte))
        };
        self.dots && self.are_known(&[3, 7, 8, 9]) && [1, 2].iter().all(are_bytes)
    }

    /// Part of a constant input for a direction.
    fn known_part(&self, slot: usize, at: usize, n: i64) -> Lowered<Vec<f32>> {
        let id = self.input(slot)?;
        let numbers = self.net.numbers(id).ok_or_else(|| self.unknown(id))?;
        Ok(numbers[at * n as usize..][..n as usize].to_vec())
    }

    /// Rows of constant weights for a direction, and the scale of each row.
    fn known_rows(&self, [slot, scales]: [usize; 2], at: usize, [rows, n]: [i64; 2]) -> Lowered<(Vec<f32>, Vec<f32>)> {
        let weights = self.known_part(slot, at, rows * n)?;
        let Some(id) = self.try_input(scales) else { return Ok((weights, vec![1.0; rows as usize])) };
        let n_each = self.net.value(id).n_elements() / self.net.shape(self.input(slot)?)[0];
        let part = self.known_part(scales, at, n_each)?;
        Ok((weights, part.into_iter().cycle().take(rows as usize).collect()))
    }

    /// Makes rows of constant weights for a direction the columns of an integer operand.
    fn integer_factor(&mut self, slots: [usize; 2], at: usize, [rows, n]: [i64; 2]) -> Lowered<IntegerFactor> {
        let (weights, scales) = self.known_rows(slots, at, [rows, n])?;
        let of_row = |row: &[f32]| -row.iter().map(|x| *x as i64).sum::<i64>();
        let of_zero: Vec<i64> = weights.chunks(n as usize).map(of_row).collect();
        let turned: Vec<i64> = (0..n * rows).map(|to| weights[(to % rows * n + to / rows) as usize] as i64).collect();
        Ok(IntegerFactor {
            weights: self.whole_constant("weights", DType::I8, &[n, rows], &turned),
            of_zero: self.whole_constant("of_zero", DType::I32, &[rows], &of_zero),
            scales: self.constant("scales", &[rows], &scales),
        })
    }

    /// Weights of a direction for its inputs, their bias, and the constants of its steps, if all are
    /// constant.
    fn known_weights(
        &mut self,
        op: &Recurrent,
        at: usize,
        [rows, n]: [i64; 2],
    ) -> Lowered<(ValueId, ValueId, KnownWeights)> {
        let hidden = op.hidden as i64;
        let gates = rows / hidden;
        let scaled = |job: &Self, slots: [usize; 2], n: i64| {
            let (mut weights, scales) = job.known_rows(slots, at, [rows, n])?;
            let rows = weights.chunks_mut(n as usize).zip(scales);
            rows.for_each(|(row, scale)| row.iter_mut().for_each(|x| *x *= scale));
            Ok::<_, NoCode>(weights)
        };
        let (w, r) = (scaled(self, [1, 8], n)?, scaled(self, [2, 9], hidden)?);
        let name = self.node.place.node.clone();
        let mut add_constant = |what: &str, shape: &[i64], numbers: &[f32]| {
            self.net.add_constant(&format!("{name}.{what}{at}"), shape, numbers)
        };
        let weights = add_constant("w", &[rows, n], &w);
        let parts = if matches!(op.cell, Cell::Gru { resets_behind: false }) { vec![2, 1] } else { vec![gates] };
        let mut rest = &r[..];
        let of_state = parts.into_iter().map(|n| {
            let (part, behind) = rest.split_at((n * hidden * hidden) as usize);
            rest = behind;
            add_constant("r", &[n * hidden, hidden], part)
        });
        let of_state = of_state.collect();
        let (both, known) = self.known_biases(op, at, rows)?;
        Ok((weights, both, KnownWeights { weights: of_state, ..known }))
    }

    /// Bias of a direction's inputs, and the constants of its steps except weights, if all are constant.
    fn known_biases(&mut self, op: &Recurrent, at: usize, rows: i64) -> Lowered<(ValueId, KnownWeights)> {
        let hidden = op.hidden as i64;
        let bias = match self.try_input(3) {
            Some(_) => self.known_part(3, at, 2 * rows)?,
            None => vec![0.0; 2 * rows as usize],
        };
        let (w_bias, r_bias) = bias.split_at(rows as usize);
        // If a GRU resets after the product, the bias of its new state's last part belongs to that product.
        let is_own = |row: i64| matches!(op.cell, Cell::Gru { resets_behind: true }) && row >= 2 * hidden;
        let both: Vec<f32> =
            (0..rows).map(|row| w_bias[row as usize] + if is_own(row) { 0.0 } else { r_bias[row as usize] }).collect();
        let peepholes = match self.try_input(7) {
            Some(_) => self.known_part(7, at, 3 * hidden)?,
            None => Vec::new(),
        };
        let name = self.node.place.node.clone();
        let mut add_constant = |what: &str, shape: &[i64], numbers: &[f32]| {
            self.net.add_constant(&format!("{name}.{what}{at}"), shape, numbers)
        };
        let both = add_constant("b", &[rows], &both);
        let own = matches!(op.cell, Cell::Gru { .. }).then(|| &r_bias[2 * hidden as usize..]);
        let bias = own.map(|numbers| add_constant("rb", &[hidden], numbers));
        let peepholes = peepholes.chunks(hidden as usize).map(|p| add_constant("p", &[hidden], p)).collect();
        Ok((both, KnownWeights { weights: Vec::new(), integers: None, bias, peepholes }))
    }

    /// Weights of a direction for its inputs, their bias, and the values of its steps, if they are inputs of
    /// a run.
    fn given_weights(
        &mut self,
        op: &Recurrent,
        at: usize,
        [rows, n]: [i64; 2],
    ) -> Lowered<(ValueId, ValueId, KnownWeights)> {
        let hidden = op.hidden as i64;
        let at = at as i64;
        let weights = self.scaled_of_direction([1, 8], at, [rows, n])?;
        let of_state = self.scaled_of_direction([2, 9], at, [rows, hidden])?;
        let bias = match self.try_input(3) {
            Some(_) => self.of_direction(3, at, &[2 * rows])?,
            None => self.real_constant("b", weights, &[2 * rows], &vec![0.0; 2 * rows as usize]),
        };
        let (of_inputs, own) = (self.stretch(bias, 0, rows), self.stretch(bias, rows, rows));
        // As for constants: if a GRU resets after the product, the bias of the last part belongs to that
        // product.
        let is_own = |row: i64| matches!(op.cell, Cell::Gru { resets_behind: true }) && row >= 2 * hidden;
        let shares: Vec<f64> = (0..rows).map(|row| if is_own(row) { 0.0 } else { 1.0 }).collect();
        let shares = self.real_constant("shares", weights, &[rows], &shares);
        let both = add(input(0), mul(input(1), input(2)));
        let both = self.step("b", Kind::Map(both), &[of_inputs, own, shares], &[rows]);
        let parts = match op.cell {
            Cell::Gru { resets_behind: false } => vec![(0, 2 * hidden), (2 * hidden, hidden)],
            _ => vec![(0, rows)],
        };
        let weights_of_state = parts.into_iter().map(|(first, n)| self.rows(of_state, first, n)).collect();
        let bias = matches!(op.cell, Cell::Gru { .. }).then(|| self.stretch(own, 2 * hidden, hidden));
        let peepholes = match self.try_input(7) {
            Some(_) => {
                let all = self.of_direction(7, at, &[3 * hidden])?;
                (0..3).map(|part| self.stretch(all, part * hidden, hidden)).collect()
            }
            None => Vec::new(),
        };
        Ok((weights, both, KnownWeights { weights: weights_of_state, integers: None, bias, peepholes }))
    }

    /// Weights of a direction, multiplied by their scales, if any.
    fn scaled_of_direction(&mut self, [slot, scales]: [usize; 2], at: i64, shape: [i64; 2]) -> Lowered<ValueId> {
        let weights = self.of_direction(slot, at, &shape)?;
        let Some(id) = self.try_input(scales) else { return Ok(weights) };
        let own = self.net.shape(id)[1..].to_vec();
        let scales = self.of_direction(scales, at, &own)?;
        let n = self.net.value(scales).n_elements();
        let scales = self.viewed("scales", scales, &[n, 1]);
        Ok(self.step("weights", Kind::Map(mul(input(0), input(1))), &[weights, scales], &shape))
    }

    /// Part of an input for a direction.
    fn of_direction(&mut self, slot: usize, at: i64, shape: &[i64]) -> Lowered<ValueId> {
        let x = self.input(slot)?;
        self.need_same_type(x, self.input(0)?)?;
        let parts = std::iter::once((at, 1)).chain(shape.iter().map(|_| (0, 1))).collect();
        let part = self.step("direction", Kind::Slice(parts), &[x], &[&[1], shape].concat());
        Ok(self.step("direction", Kind::View, &[part], shape))
    }

    /// Slices a one-dimensional value.
    fn stretch(&mut self, x: ValueId, first: i64, n: i64) -> ValueId {
        if self.net.shape(x) == [n] { x } else { self.step("part", Kind::Slice(vec![(first, 1)]), &[x], &[n]) }
    }

    /// Adds a step of a direction to the enclosing net.
    fn advance_at(
        &mut self,
        way: &DirectionWeights,
        step: i64,
        before: (Option<ValueId>, Option<ValueId>),
    ) -> Lowered<StepState> {
        let [batch, _] = way.sizes;
        let mut of_step = |all: ValueId| self.items_of_step(all, step, batch);
        let (gates, inside) = (of_step(way.inputs), way.inside.map(&mut of_step));
        self.advance(way, gates, inside, before)
    }

    /// Advances a direction by a step, given the inputs' contribution to all gates and the mask of the
    /// sequences that continue.
    pub(super) fn advance(
        &mut self,
        way: &DirectionWeights,
        gates: ValueId,
        inside: Option<ValueId>,
        (state, cell): (Option<ValueId>, Option<ValueId>),
    ) -> Lowered<StepState> {
        let (new, new_cell) = match way.op.cell {
            Cell::Rnn => (self.rnn(way, gates, state)?, None),
            Cell::Gru { resets_behind } => (self.gru(way, gates, state, resets_behind)?, None),
            Cell::Lstm { couples_gates, .. } => {
                let (state, cell) = self.lstm(way, gates, state, cell, couples_gates)?;
                (state, Some(cell))
            }
        };
        let Some(inside) = inside else { return Ok((new, new_cell)) };
        let mut kept = |new: ValueId, before: Option<ValueId>| {
            let otherwise = if before.is_some() { input(2) } else { number(0.0) };
            let inputs: Vec<ValueId> = [inside, new].into_iter().chain(before).collect();
            self.step("kept", Kind::Map(choose(input(0), input(1), otherwise)), &inputs, &way.sizes)
        };
        Ok((kept(new, state), new_cell.map(|new| kept(new, cell))))
    }

    /// Unrolls all steps after the first; returns all states in the order of the output, and the last ones.
    fn written_out(
        &mut self,
        ways: &[DirectionWeights],
        firsts: Vec<StepState>,
        steps: i64,
    ) -> Lowered<(Vec<ValueId>, Vec<StepState>)> {
        let (mut all, mut lasts) = (Vec::new(), Vec::new());
        for (way, first) in ways.iter().zip(firsts) {
            let mut states = vec![first];
            for step in 1..steps {
                let step = if way.is_reverse { steps - 1 - step } else { step };
                let (state, cell) = states[states.len() - 1];
                states.push(self.advance_at(way, step, (Some(state), cell))?);
            }
            lasts.push(states[states.len() - 1]);
            if way.is_reverse {
                states.reverse();
            }
            all.push(states);
        }
        let of_steps = (0..steps as usize).flat_map(|step| all.iter().map(move |states| states[step].0));
        Ok((of_steps.collect(), lasts))
    }

    /// Lowers to the steps of a sequence, each of all directions.
    fn in_sequence(
        &mut self,
        ways: &[DirectionWeights],
        firsts: Vec<StepState>,
        steps: i64,
    ) -> Lowered<(Vec<ValueId>, Vec<StepState>)> {
        let [batch, hidden] = ways[0].sizes;
        let (n_ways, n_steps, size) = (ways.len() as i64, steps - 1, batch * hidden);
        let outer = std::mem::take(self.net);
        let constants = self.body(ways, &outer);
        let body = std::mem::replace(self.net, outer);
        let constants = constants?;
        // In the output, the states of the first steps are at both ends, and all others between them. If the
        // output is unused, only two states of each direction are kept at a time.
        let n_ahead = ways.iter().filter(|way| !way.is_reverse).count() as i64;
        let is_kept = self.outputs[0].is_some();
        let n_states = if is_kept { n_steps } else { 2 } * n_ways;
        let dtype = self.net.value(ways[0].inputs).dtype;
        let states = self.shape_of_steps(n_states, batch, hidden);
        let states = self.value("states", dtype, &states);
        let (mut inputs, mut outputs) = (Vec::new(), vec![states]);
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        // Tensors with the last state and the last cell of each direction.
        let mut lasts: Vec<[Option<(ValueId, Track)>; 2]> = Vec::new();
        for ((at, way), &(first, first_cell)) in (0..).zip(ways).zip(&firsts) {
            let n_gates = batch * self.n_columns(way.inputs);
            let in_order = |first: i64, last: i64, by: i64| match way.is_reverse {
                true => Track { first: last, by: -by, round: n_steps, next: 0 },
                false => Track { first, by, round: n_steps, next: 0 },
            };
            reads.push(Read::Part(inputs.len(), in_order(n_gates, (steps - 2) * n_gates, n_gates)));
            inputs.push(way.inputs);
            let place = |step: i64| (step * n_ways + at - n_ahead) * size;
            let of_state = match is_kept {
                true => in_order(place(1), place(steps - 2), n_ways * size),
                false => Track { first: 2 * at * size, by: size, round: 2, next: 0 },
            };
            let mut carried = |job: &mut Self, first: ValueId, to: Option<ValueId>, track: Track| {
                reads.push(Read::Before { output: writes.len(), first: inputs.len() });
                inputs.push(first);
                let to = to.unwrap_or_else(|| {
                    let cells = job.shape_of_steps(2, batch, hidden);
                    outputs.push(job.value("cells", dtype, &cells));
                    outputs[outputs.len() - 1]
                });
                let output = outputs.iter().position(|id| *id == to).expect("it was pushed");
                writes.push((output, track));
                (to, track)
            };
            let state = carried(self, first, Some(states), of_state);
            let of_cell = Track { first: 0, by: size, round: 2, next: 0 };
            let cell = first_cell.map(|first| carried(self, first, None, of_cell));
            if let Some(inside) = way.inside {
                reads.push(Read::Part(inputs.len(), in_order(batch, (steps - 2) * batch, batch)));
                inputs.push(inside);
            }
            lasts.push([Some(state), cell]);
        }
        let sequence = Sequence { n_steps, body, reads, writes, constants };
        // Weights that are inputs of a run are read as well.
        let given = sequence.constants.iter().map(|(_, outer)| *outer);
        let given = given.filter(|id| self.net.value(*id).constant.is_none()).collect::<Vec<_>>();
        let inputs = inputs.into_iter().chain(given).map(Some).collect();
        let origin = self.node.place.node.clone();
        self.net.nodes.push(Node { kind: Kind::Sequence(Box::new(sequence)), inputs, outputs, origin });
        let mut last = |of: Option<(ValueId, Track)>| {
            of.map(|(of, track)| self.items_of_step(of, track.at(n_steps - 1) / size, batch))
        };
        let lasts = lasts.into_iter().map(|[state, cell]| (last(state).expect("each direction has one"), last(cell)));
        let lasts = lasts.collect();
        let of_order = |is_reverse: bool| {
            let own = ways.iter().zip(&firsts).filter(move |(way, _)| way.is_reverse == is_reverse);
            own.map(|(_, (state, _))| *state)
        };
        Ok((of_order(false).chain([states]).chain(of_order(true)).collect(), lasts))
    }

    /// Turns the net into the body of a sequence, a step of all directions; returns the pairs of its
    /// constants and those of the enclosing net.
    fn body(&mut self, ways: &[DirectionWeights], outer: &Net) -> Lowered<Vec<(ValueId, ValueId)>> {
        let mut constants = Vec::new();
        for way in ways {
            let [batch, hidden] = way.sizes;
            let rows = outer.shape(way.inputs).last().copied().expect("they are rows");
            let dtype = outer.value(way.inputs).dtype;
            let gates = self.value("gates", dtype, &[batch, rows]);
            let state = self.value("state", dtype, &[batch, hidden]);
            let is_lstm = matches!(way.op.cell, Cell::Lstm { .. });
            let cell = is_lstm.then(|| self.value("cell", dtype, &[batch, hidden]));
            let inside = way.inside.map(|_| self.value("inside", dtype, &[batch, 1]));
            let (known, pairs) = way.known.within(outer, self.net);
            constants.extend(pairs);
            let (new, new_cell) =
                self.advance(&DirectionWeights { known, ..way.clone() }, gates, inside, (Some(state), cell))?;
            self.net.inputs.extend([gates, state].into_iter().chain(cell).chain(inside));
            self.net.outputs.extend([new].into_iter().chain(new_cell));
        }
        Ok(constants)
    }

    /// Mask of sequences that may be shorter than the number of steps, a row for each step and element of the
    /// batch: 1 inside a sequence, else 0. `None` if all have full length.
    fn inside(&mut self, steps: i64, batch: i64) -> Lowered<Option<ValueId>> {
        let Some(lengths) = self.try_input(4) else { return Ok(None) };
        let known = self.net.value(lengths).constant.as_ref().map(Tensor::i64s);
        if known.is_some_and(|lengths| lengths.iter().all(|&length| length == steps)) {
            return Ok(None);
        }
        self.need_code(lengths)?;
        need(self.net.shape(lengths) == [batch], || NoCode::Form("lengths of other than each sequence"))?;
        let x = self.input(0)?;
        let numbers: Vec<f64> = (0..steps).map(|step| step as f64).collect();
        let numbers = self.real_constant("numbers", x, &[steps, 1], &numbers);
        let to = self.value("lengths", self.net.value(x).dtype, &[batch]);
        let lengths = self.push(Kind::Map(input(0)), &[lengths], to);
        let is_inside = where_less(input(0), input(1), number(1.0), number(0.0));
        let inside = self.step("inside", Kind::Map(is_inside), &[numbers, lengths], &[steps, batch]);
        let shape = self.shape_of_steps(steps, batch, 1);
        Ok(Some(self.step("inside", Kind::View, &[inside], &shape)))
    }

    /// Slices the rows of a step from those of all steps.
    fn items_of_step(&mut self, all: ValueId, step: i64, batch: i64) -> ValueId {
        if !self.has_open_batch(batch) {
            return self.rows(all, step * batch, batch);
        }
        let n = self.n_columns(all);
        let one = self.step("step", Kind::Slice(vec![(step, 1), (0, 1), (0, 1)]), &[all], &[1, batch, n]);
        self.step("rows", Kind::View, &[one], &[batch, n])
    }

    /// Slices rows of a matrix.
    fn rows(&mut self, from: ValueId, first: i64, n: i64) -> ValueId {
        let columns = self.net.shape(from)[1];
        self.step("rows", Kind::Slice(vec![(first, 1), (0, 1)]), &[from], &[n, columns])
    }

    /// Slices the columns of a gate from a matrix.
    fn columns(&mut self, from: ValueId, gate: i64, way: &DirectionWeights) -> ValueId {
        let [batch, hidden] = way.sizes;
        self.step("gate", Kind::Slice(vec![(0, 1), (gate * hidden, 1)]), &[from], &[batch, hidden])
    }

    /// The first state of a direction; none where it is zero.
    pub(super) fn first(&mut self, at: usize, direction: i64, shape: &[i64; 2]) -> Option<ValueId> {
        let given = self.try_input(at)?;
        let parts = vec![(direction, 1), (0, 1), (0, 1)];
        let part = self.step("first", Kind::Slice(parts), &[given], &[1, shape[0], shape[1]]);
        Some(self.step("state", Kind::View, &[part], shape))
    }

    /// Concatenates states of some steps in the shape of an output.
    fn stacked(&mut self, parts: &[ValueId], batch: i64, to: ValueId) {
        let hidden = self.n_columns(parts[0]);
        let n_steps = |id: &ValueId| self.net.value(*id).n_elements() / (batch * hidden);
        let n_steps: Vec<i64> = parts.iter().map(n_steps).collect();
        let mut parts = parts.to_vec();
        if self.has_open_batch(batch) {
            for (part, n) in parts.iter_mut().zip(&n_steps) {
                *part = self.viewed("step", *part, &[*n, batch, hidden]);
            }
        }
        let shape = self.shape_of_steps(n_steps.iter().sum(), batch, hidden);
        let joined = self.step("states", Kind::Concat(0), &parts, &shape);
        self.push(Kind::View, &[joined], to);
    }

    /// Number of elements of a row.
    fn n_columns(&self, id: ValueId) -> i64 {
        self.net.shape(id).last().copied().expect("states and gates are rows")
    }

    /// Adds the state's contribution to the gates.
    fn with_state(&mut self, way: &DirectionWeights, gates: ValueId, state: Option<ValueId>) -> Lowered<ValueId> {
        let Some(state) = state else { return Ok(gates) };
        let shape = [way.sizes[0], self.net.shape(gates)[1]];
        let product = match way.known.integers {
            Some(factor) => {
                let levels = self.levels_by_range(state)?;
                self.product_of_levels("state", &levels, factor)
            }
            None => {
                let state = if rounds(way.op) { self.rounded_by_range(state)? } else { state };
                self.matrix_product("state", state, way.known.weights[0], true)
            }
        };
        Ok(self.step("gates", Kind::Map(add(input(0), input(1))), &[product, gates], &shape))
    }

    fn rnn(&mut self, way: &DirectionWeights, gates: ValueId, state: Option<ValueId>) -> Lowered<ValueId> {
        let gates = self.with_state(way, gates, state)?;
        Ok(self.step("state", Kind::Map(way.gate(0, input(0))?), &[gates], &way.sizes))
    }

    /// Adds a step of an LSTM; returns the new state and the new cell.
    fn lstm(
        &mut self,
        way: &DirectionWeights,
        gates: ValueId,
        state: Option<ValueId>,
        cell: Option<ValueId>,
        couples_gates: bool,
    ) -> Lowered<(ValueId, ValueId)> {
        let gates = self.with_state(way, gates, state)?;
        let [i, o, f, c] = [0, 1, 2, 3].map(|gate| self.columns(gates, gate, way));
        let peep = |which: usize| way.known.peepholes.get(which).copied();
        // Inputs of the new cell: its gates, then optional values.
        let mut inputs = vec![i, f, c];
        let mut slot = |id: Option<ValueId>| {
            let id = id?;
            inputs.push(id);
            Some(input(inputs.len() - 1))
        };
        let before = slot(cell);
        let (p_i, p_f) = match before {
            Some(_) => (slot(peep(0)), slot(peep(2))),
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
        if let Some(p) = peep(1) {
            inputs.push(p);
            leaves = add(leaves, mul(input(2), input(1)));
        }
        let value = mul(way.gate(0, leaves)?, way.act(2, input(1))?);
        Ok((self.step("state", Kind::Map(value), &inputs, &way.sizes), new_cell))
    }

    /// Adds a step of a GRU.
    fn gru(
        &mut self,
        way: &DirectionWeights,
        gates: ValueId,
        state: Option<ValueId>,
        resets_behind: bool,
    ) -> Lowered<ValueId> {
        let own = way.known.bias.expect("a gated recurrent unit has one");
        let [x_z, x_r, x_h] = [0, 1, 2].map(|gate| self.columns(gates, gate, way));
        let Some(state) = state else {
            let z = way.gate(0, input(0))?;
            let inner = match resets_behind {
                true => add(input(1), mul(way.gate(0, input(2))?, input(3))),
                false => input(1),
            };
            let value = mul(sub(number(1.0), z), way.gate(1, inner)?);
            return Ok(self.step("state", Kind::Map(value), &[x_z, x_h, x_r, own], &way.sizes));
        };
        if resets_behind {
            let all = self.matrix_product("state", state, way.known.weights[0], true);
            let [h_z, h_r, h_h] = [0, 1, 2].map(|gate| self.columns(all, gate, way));
            let z = way.gate(0, add(input(0), input(3)))?;
            let reset = way.gate(0, add(input(1), input(4)))?;
            let new = way.gate(1, add(input(2), mul(reset, add(input(5), input(7)))))?;
            let value = add(mul(sub(number(1.0), z.clone()), new), mul(z, input(6)));
            return Ok(self.step("state", Kind::Map(value), &[x_z, x_r, x_h, h_z, h_r, h_h, state, own], &way.sizes));
        }
        let [of_gates, of_new] = way.known.weights[..] else { unreachable!("these gates have two products") };
        let both = self.matrix_product("state", state, of_gates, true);
        let [h_z, h_r] = [0, 1].map(|gate| self.columns(both, gate, way));
        let reset = mul(way.gate(0, add(input(0), input(1)))?, input(2));
        let reset = self.step("reset", Kind::Map(reset), &[x_r, h_r, state], &way.sizes);
        let inner = self.matrix_product("state", reset, of_new, true);
        let z = way.gate(0, add(input(0), input(1)))?;
        let new = way.gate(1, add(input(2), input(3)))?;
        let value = add(mul(sub(number(1.0), z.clone()), new), mul(z, input(4)));
        Ok(self.step("state", Kind::Map(value), &[x_z, h_z, x_h, inner, state], &way.sizes))
    }
}
