//! Backpropagation through a tape.

use super::product::{PanelFactor, add_product};
use super::{
    CellState, NumberRows, Onto, Tape, TapeNode, TapeOp, Term, Var, Weight, add, add_or_set, add_scaled, dot, multiply,
    quarters,
};
use crate::simd::wide;

impl Tape<'_> {
    /// Computes the gradients of the parameters, given those of some values.
    pub(crate) fn backward(&self, seeds: Vec<(Var, Vec<f32>)>) -> Vec<Vec<f32>> {
        let n_weights = self.parameters.arrays.len();
        let mut gradients = Gradients {
            of_values: vec![Vec::new(); self.nodes.len()],
            of_states: vec![Vec::new(); self.nodes.len()],
            of_weights: vec![Vec::new(); n_weights],
            pending: (0..n_weights).map(|_| (Vec::new(), Vec::new())).collect(),
        };
        for (var, seed) in seeds {
            add_or_set(&mut gradients.of_values[var.0], seed);
        }
        for at in (0..self.nodes.len()).rev() {
            let gradient = std::mem::take(&mut gradients.of_values[at]);
            let state = std::mem::take(&mut gradients.of_states[at]);
            if !gradient.is_empty() || !state.is_empty() {
                self.backward_of(&self.nodes[at], gradient, state, &mut gradients);
            }
        }
        // One product for each weight needs far fewer passes over it than one for each step of a sequence.
        for (at, (inputs, outputs)) in gradients.pending.into_iter().enumerate() {
            let weight = &self.parameters.arrays[at];
            let gradient = &mut gradients.of_weights[at];
            gradient.resize(weight.values.len(), 0.0);
            if !outputs.is_empty() {
                let inputs = NumberRows { n_columns: weight.n_rows(), values: inputs }.transposed();
                let outputs = PanelFactor::new(&NumberRows { n_columns: weight.n_columns, values: outputs });
                add_product(&inputs.values, &outputs, gradient);
            }
        }
        gradients.of_weights
    }

    fn backward_of(&self, node: &TapeNode, gradient: Vec<f32>, state: Vec<f32>, gradients: &mut Gradients) {
        let n_columns = node.value.n_columns;
        match &node.op {
            TapeOp::Constant => {}
            TapeOp::Product { a, w, onto } => {
                match *onto {
                    Onto::Nothing => {}
                    Onto::Bias(bias) => {
                        let to = &mut gradients.of_weights[bias.0];
                        to.resize(n_columns, 0.0);
                        gradient.chunks_exact(n_columns).for_each(|row| add(to, row));
                    }
                    Onto::Rows { onto, row } => {
                        let to = gradients.of(onto, self.value(onto));
                        add(&mut to[row * n_columns..][..gradient.len()], &gradient);
                    }
                }
                self.backward_of_product(*a, *w, gradient, gradients);
            }
            TapeOp::Lookup { w, rows } => {
                let to = &mut gradients.of_weights[w.0];
                to.resize(self.parameters.arrays[w.0].values.len(), 0.0);
                for (&row, gradient) in rows.iter().zip(gradient.chunks_exact(n_columns)) {
                    add(&mut to[row * n_columns..][..n_columns], gradient);
                }
            }
            TapeOp::Relu { a } => {
                let pairs = gradient.iter().zip(&node.value.values);
                gradients.add(*a, pairs.map(|(g, &x)| if x > 0.0 { *g } else { 0.0 }).collect());
            }
            TapeOp::Tanh { a } => {
                let mut gradient = gradient;
                wide(|| gradient.iter_mut().zip(&node.value.values).for_each(|(g, x)| *g *= 1.0 - x * x));
                gradients.add(*a, gradient);
            }
            TapeOp::Scale { a, factors } => {
                let mut gradient = gradient;
                multiply(&mut gradient, factors);
                gradients.add(*a, gradient);
            }
            TapeOp::Cell { gates, before, saved } => {
                let before = before.map(|b| (b, &self.cell_state(b).cell));
                let (of_gates, of_before) =
                    backward_of_cell(n_columns, &gradient, state, saved, before.map(|(_, cell)| cell.as_slice()));
                gradients.add(*gates, of_gates);
                if let Some((before, _)) = before {
                    add_or_set(&mut gradients.of_states[before.0], of_before);
                }
            }
            &TapeOp::Gru { input, row, before, ref gates } => {
                let before = before.map(|(added, state)| (added, state, self.value(added), self.value(state)));
                let values = before.map(|(_, _, added, state)| (&added.values[..], &state.values[..]));
                let GruGradients { of_gates, of_added, of_state } = backward_of_gru(n_columns, gradient, gates, values);
                let to = gradients.of(input, self.value(input));
                add(&mut to[row * 3 * n_columns..][..of_gates.len()], &of_gates);
                if let Some((added, state, ..)) = before {
                    gradients.add(added, of_added);
                    gradients.add(state, of_state);
                }
            }
            TapeOp::Beside { parts } => {
                let mut from = 0;
                for &part in parts {
                    let value = self.value(part);
                    let width = value.n_columns;
                    let to = gradients.of(part, value);
                    for (to, row) in to.chunks_exact_mut(width).zip(gradient.chunks_exact(n_columns)) {
                        add(to, &row[from..][..width]);
                    }
                    from += width;
                }
            }
            TapeOp::Cut { a, row } => {
                let to = gradients.of(*a, self.value(*a));
                add(&mut to[row * n_columns..][..gradient.len()], &gradient);
            }
            TapeOp::Stack { parts } => {
                let mut from = 0;
                for &part in parts {
                    let size = self.value(part).values.len();
                    gradients.add(part, gradient[from..][..size].to_vec());
                    from += size;
                }
            }
            TapeOp::Sum { terms } => {
                for &Term { from, row, to } in terms {
                    let of_from = gradients.of(from, self.value(from));
                    add(&mut of_from[row * n_columns..][..n_columns], &gradient[to * n_columns..][..n_columns]);
                }
            }
            TapeOp::Slots { a, scores, owners, shares } => {
                let rows = self.value(*a);
                let (width, n_slots) = (rows.n_columns, self.value(*scores).n_columns);
                let mut of_scores = vec![0.0; shares.len()];
                let to = gradients.of(*a, rows);
                let of_rows = to.chunks_exact_mut(width).zip(of_scores.chunks_exact_mut(n_slots));
                for (row, ((of_row, of_scores), shares)) in of_rows.zip(shares.chunks_exact(n_slots)).enumerate() {
                    let of_slots = gradient[owners[row] * n_columns..][..n_columns].chunks_exact(width);
                    for ((of_slot, share), of_score) in of_slots.zip(shares).zip(&mut *of_scores) {
                        add_scaled(of_row, *share, of_slot);
                        *of_score = dot(of_slot, rows.row(row));
                    }
                    let mean = dot(of_scores, shares);
                    of_scores
                        .iter_mut()
                        .zip(shares)
                        .for_each(|(of_score, share)| *of_score = share * (*of_score - mean));
                }
                gradients.add(*scores, of_scores);
            }
            TapeOp::Windows { a, n, size } => {
                let width = n_columns / size;
                let to = gradients.of(*a, self.value(*a));
                for (row, from) in gradient.chunks_exact(n_columns).enumerate() {
                    for (step, from) in from.chunks_exact(width).enumerate() {
                        add(&mut to[(row + step * n) * width..][..width], from);
                    }
                }
            }
            TapeOp::Flatten { a, n } => {
                let value = self.value(*a);
                let width = value.n_columns;
                let to = gradients.of(*a, value);
                for (row, from) in gradient.chunks_exact(n_columns).enumerate() {
                    for (step, from) in from.chunks_exact(width).enumerate() {
                        add(&mut to[(step * n + row) * width..][..width], from);
                    }
                }
            }
            TapeOp::Attention { keys, query, values, energy, shares, hidden } => {
                let (n, d) = (self.value(*query).n_rows(), self.value(*query).n_columns);
                let n_steps = shares.len() / n;
                let steps = self.value(*values);
                let energies = &self.parameters.arrays[energy.0].values;
                let mut of_values = vec![0.0; steps.values.len()];
                let mut of_keys = vec![0.0; hidden.len()];
                let mut of_query = vec![0.0; n * d];
                gradients.of_weights[energy.0].resize(energies.len(), 0.0);
                for row in 0..n {
                    let g = &gradient[row * n_columns..][..n_columns];
                    let at = |t: usize| t * n + row;
                    let of_shares: Vec<f32> =
                        (0..n_steps).map(|t| dot(g, &steps.values[at(t) * n_columns..][..n_columns])).collect();
                    let mean: f32 = (0..n_steps).map(|t| shares[at(t)] * of_shares[t]).sum();
                    for t in 0..n_steps {
                        let share = shares[at(t)];
                        add_scaled(&mut of_values[at(t) * n_columns..][..n_columns], share, g);
                        let of_energy = share * (of_shares[t] - mean);
                        for i in 0..d {
                            let h = hidden[at(t) * d + i];
                            gradients.of_weights[energy.0][i] += of_energy * h;
                            let of_sum = of_energy * energies[i] * (1.0 - h * h);
                            of_keys[at(t) * d + i] = of_sum;
                            of_query[row * d + i] += of_sum;
                        }
                    }
                }
                gradients.add(*values, of_values);
                gradients.add(*keys, of_keys);
                gradients.add(*query, of_query);
            }
        }
    }

    fn backward_of_product(&self, a: Var, w: Weight, gradient: Vec<f32>, gradients: &mut Gradients) {
        let value = self.value(a);
        let (inputs, outputs) = &mut gradients.pending[w.0];
        inputs.extend_from_slice(&value.values);
        outputs.extend_from_slice(&gradient);
        if !matches!(self.nodes[a.0].op, TapeOp::Constant) {
            let to = gradients.of(a, value);
            add_product(&gradient, self.parameters.transposed(w), to);
        }
    }
}

/// Gradients during backpropagation; empty if there is none yet.
struct Gradients {
    of_values: Vec<Vec<f32>>,
    /// Gradients of cells' states.
    of_states: Vec<Vec<f32>>,
    of_weights: Vec<Vec<f32>>,
    /// Inputs of each weight's products, and the gradients of their outputs.
    pending: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Gradients {
    fn add(&mut self, var: Var, gradient: Vec<f32>) {
        add_or_set(&mut self.of_values[var.0], gradient);
    }

    fn of(&mut self, var: Var, value: &NumberRows) -> &mut [f32] {
        let gradient = &mut self.of_values[var.0];
        gradient.resize(value.values.len(), 0.0);
        gradient
    }
}

/// Computes the gradients of the inputs of a cell's gates, and of the cell state before it.
fn backward_of_cell(
    width: usize,
    of_hidden: &[f32],
    mut of_cell: Vec<f32>,
    saved: &CellState,
    before: Option<&[f32]>,
) -> (Vec<f32>, Vec<f32>) {
    of_cell.resize(saved.cell.len(), 0.0);
    let mut of_gates = vec![0.0; saved.gates.len()];
    wide(|| {
        for row in 0..saved.cell.len() / width {
            let range = row * width..(row + 1) * width;
            let (input, forget, output, candidate) = quarters(&saved.gates[4 * range.start..4 * range.end]);
            let (of_input, rest) = of_gates[4 * range.start..4 * range.end].split_at_mut(width);
            let (of_forget, rest) = rest.split_at_mut(width);
            let (of_output, of_candidate) = rest.split_at_mut(width);
            let (of_cell, tanh) = (&mut of_cell[range.clone()], &saved.tanh[range.clone()]);
            if !of_hidden.is_empty() {
                let of_hidden = &of_hidden[range.clone()];
                for i in 0..width {
                    of_output[i] = of_hidden[i] * tanh[i] * output[i] * (1.0 - output[i]);
                    of_cell[i] += of_hidden[i] * output[i] * (1.0 - tanh[i] * tanh[i]);
                }
            }
            if let Some(before) = before {
                let before = &before[range];
                for i in 0..width {
                    of_forget[i] = of_cell[i] * before[i] * forget[i] * (1.0 - forget[i]);
                }
            }
            for i in 0..width {
                of_input[i] = of_cell[i] * candidate[i] * input[i] * (1.0 - input[i]);
                of_candidate[i] = of_cell[i] * input[i] * (1.0 - candidate[i] * candidate[i]);
                of_cell[i] *= forget[i];
            }
        }
    });
    (of_gates, of_cell)
}

/// Gradients of the inputs of a gated recurrent unit.
struct GruGradients {
    of_gates: Vec<f32>,
    /// Gradients of the previous state's contribution to the gates, and of that state; empty if there was
    /// none.
    of_added: Vec<f32>,
    of_state: Vec<f32>,
}

/// `gates` are the reset gate, update gate and candidate; `before` is the previous state's contribution to
/// them, and that state.
fn backward_of_gru(width: usize, gradient: Vec<f32>, gates: &[f32], before: Option<(&[f32], &[f32])>) -> GruGradients {
    let mut of_gates = vec![0.0; gates.len()];
    let (mut of_added, mut of_state) = (Vec::new(), Vec::new());
    if before.is_some() {
        (of_added, of_state) = (vec![0.0; gates.len()], gradient.clone());
    }
    wide(|| {
        for row in 0..gradient.len() / width {
            let (narrow, broad) = (row * width..(row + 1) * width, 3 * row * width..3 * (row + 1) * width);
            let gradient = &gradient[narrow.clone()];
            let [reset, update, candidate] = thirds(&gates[broad.clone()]);
            let (of_reset, rest) = of_gates[broad.clone()].split_at_mut(width);
            let (of_update, of_candidate) = rest.split_at_mut(width);
            for i in 0..width {
                of_update[i] = -gradient[i] * candidate[i] * update[i] * (1.0 - update[i]);
                of_candidate[i] = gradient[i] * (1.0 - update[i]) * (1.0 - candidate[i] * candidate[i]);
            }
            let Some((added, state)) = before else { continue };
            let (state, of_state) = (&state[narrow.clone()], &mut of_state[narrow]);
            let [_, _, added] = thirds(&added[broad.clone()]);
            for i in 0..width {
                of_update[i] += gradient[i] * state[i] * update[i] * (1.0 - update[i]);
                of_reset[i] = of_candidate[i] * added[i] * reset[i] * (1.0 - reset[i]);
                of_state[i] *= update[i];
            }
            let of_added = &mut of_added[broad];
            of_added[..width].copy_from_slice(of_reset);
            of_added[width..2 * width].copy_from_slice(of_update);
            for i in 0..width {
                of_added[2 * width + i] = of_candidate[i] * reset[i];
            }
        }
    });
    GruGradients { of_gates, of_added, of_state }
}

#[inline(always)]
fn thirds(row: &[f32]) -> [&[f32]; 3] {
    let width = row.len() / 3;
    [&row[..width], &row[width..2 * width], &row[2 * width..]]
}
