//! Automatic differentiation by a tape: operations on rows of numbers are recorded, and differentiated in
//! reverse.
//!
//! Each building block of a network is a single operation, so that the gates of a cell are one pass over
//! memory, and each weight's gradient is one product for all time steps: a training step with the LSTM of a
//! library was measured at 58 ms, with this module at 22 ms.

mod adam;
mod backward;
#[cfg(test)]
pub(crate) mod gradients;
mod layers;
mod product;

use crate::simd::{exp, sigmoid, tanh, wide};
use product::add_product;

pub(crate) use adam::Adam;
pub(crate) use layers::{Dense, LayerBuilder, Lstm, Parameters, Weight, both_ways, forth};

/// Rows of numbers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NumberRows {
    pub(crate) n_columns: usize,
    pub(crate) values: Vec<f32>,
}

impl NumberRows {
    pub(crate) fn zeros(n_rows: usize, n_columns: usize) -> NumberRows {
        NumberRows { n_columns, values: vec![0.0; n_rows * n_columns] }
    }

    pub(crate) fn n_rows(&self) -> usize {
        self.values.len() / self.n_columns.max(1)
    }

    pub(crate) fn row(&self, at: usize) -> &[f32] {
        &self.values[at * self.n_columns..][..self.n_columns]
    }
}

/// Value on a tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Var(usize);

/// Operation that produced a value. Sequences are stacked: all rows of the first step, then all of the
/// second.
enum TapeOp {
    /// Constant, which is not differentiated.
    Constant,
    /// `a · w`, added to something.
    Product { a: Var, w: Weight, onto: Onto },
    /// Rows of a weight, by index.
    Lookup { w: Weight, rows: Vec<usize> },
    /// Larger of `a` and 0.
    Relu { a: Var },
    /// Hyperbolic tangent of `a`.
    Tanh { a: Var },
    /// `a` times `factors`, entry by entry.
    Scale { a: Var, factors: Vec<f32> },
    /// Hidden state of an LSTM cell, from the inputs of its gates and the cell before it.
    Cell { gates: Var, before: Option<Var>, saved: CellState },
    /// State of a gated recurrent unit, from the inputs of its gates, whose rows begin at `row` of `input`,
    /// and from the previous state's contribution to them, with that state.
    Gru { input: Var, row: usize, before: Option<(Var, Var)>, gates: Vec<f32> },
    /// Concatenation of columns.
    Beside { parts: Vec<Var> },
    /// Slice of rows, from `row` on.
    Cut { a: Var, row: usize },
    /// Concatenation of rows.
    Stack { parts: Vec<Var> },
    /// Sums of rows.
    Sum { terms: Vec<Term> },
    /// Slots of each owner: slot by slot, the sum of its rows of `a` by their shares of the slot, the softmax
    /// of `scores`.
    Slots { a: Var, scores: Var, owners: Vec<usize>, shares: Vec<f32> },
    /// Windows: for each step of `n` rows, the columns of it and the steps after it, `size` in all.
    Windows { a: Var, n: usize, size: usize },
    /// Flattening: all steps of `n` rows, concatenated by columns.
    Flatten { a: Var, n: usize },
    /// Attention: for each row the mean of the steps of `values`, weighted by the softmax of `energy ·
    /// tanh(keys + query)`.
    Attention { keys: Var, query: Var, values: Var, energy: Weight, shares: Vec<f32>, hidden: Vec<f32> },
}

/// Addend of a product.
enum Onto {
    Nothing,
    /// Row that is added to all rows.
    Bias(Weight),
    /// Rows of another value, from `row` on.
    Rows {
        onto: Var,
        row: usize,
    },
}

/// Addition of a row of one value to a row of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Term {
    pub(crate) from: Var,
    pub(crate) row: usize,
    pub(crate) to: usize,
}

/// State of a cell besides its hidden state.
#[derive(Debug, Clone, Default)]
struct CellState {
    /// Input, forget and output gate and candidate, for each row.
    gates: Vec<f32>,
    /// Cell state, and its tanh.
    cell: Vec<f32>,
    tanh: Vec<f32>,
}

struct TapeNode {
    value: NumberRows,
    op: TapeOp,
}

/// Tape of the operations carried out, for differentiation.
pub(crate) struct Tape<'a> {
    parameters: &'a Parameters,
    nodes: Vec<TapeNode>,
}

impl<'a> Tape<'a> {
    pub(crate) fn new(parameters: &'a Parameters) -> Tape<'a> {
        Tape { parameters, nodes: Vec::new() }
    }

    pub(crate) fn parameters(&self) -> &'a Parameters {
        self.parameters
    }

    fn push(&mut self, value: NumberRows, op: TapeOp) -> Var {
        self.nodes.push(TapeNode { value, op });
        Var(self.nodes.len() - 1)
    }

    pub(crate) fn value(&self, var: Var) -> &NumberRows {
        &self.nodes[var.0].value
    }

    /// Returns a value and drops the rest of the tape.
    pub(crate) fn take(mut self, var: Var) -> NumberRows {
        self.nodes.swap_remove(var.0).value
    }

    pub(crate) fn constant(&mut self, value: NumberRows) -> Var {
        self.push(value, TapeOp::Constant)
    }

    /// Repeats the values of a bias for each of `n_rows` rows.
    fn bias(&self, bias: Weight, n_rows: usize) -> NumberRows {
        let bias = &self.parameters.arrays[bias.0].values;
        NumberRows { n_columns: bias.len(), values: bias.repeat(n_rows) }
    }

    fn add_product(&mut self, a: Var, w: Weight, onto: Onto) -> Var {
        let (factor, n_rows) = (self.parameters.factor(w), self.value(a).n_rows());
        let n_columns = self.parameters.arrays[w.0].n_columns;
        let mut value = match onto {
            Onto::Nothing => NumberRows::zeros(n_rows, n_columns),
            Onto::Bias(bias) => self.bias(bias, n_rows),
            Onto::Rows { onto, row } => self.cut_value(onto, row, n_rows),
        };
        add_product(&self.value(a).values, factor, &mut value.values);
        self.push(value, TapeOp::Product { a, w, onto })
    }

    pub(crate) fn product(&mut self, a: Var, w: Weight) -> Var {
        self.add_product(a, w, Onto::Nothing)
    }

    pub(crate) fn dense(&mut self, a: Var, Dense { weight, bias }: Dense) -> Var {
        self.add_product(a, weight, Onto::Bias(bias))
    }

    pub(crate) fn product_onto(&mut self, a: Var, w: Weight, onto: Var, row: usize) -> Var {
        self.add_product(a, w, Onto::Rows { onto, row })
    }

    pub(crate) fn lookup(&mut self, w: Weight, rows: Vec<usize>) -> Var {
        let weight = &self.parameters.arrays[w.0];
        let values = rows.iter().flat_map(|&row| weight.row(row)).copied().collect();
        self.push(NumberRows { n_columns: weight.n_columns, values }, TapeOp::Lookup { w, rows })
    }

    pub(crate) fn relu(&mut self, a: Var) -> Var {
        let mut value = self.value(a).clone();
        value.values.iter_mut().for_each(|x| *x = x.max(0.0));
        self.push(value, TapeOp::Relu { a })
    }

    pub(crate) fn tanh(&mut self, a: Var) -> Var {
        let mut value = self.value(a).clone();
        wide(|| value.values.iter_mut().for_each(|x| *x = tanh(*x)));
        self.push(value, TapeOp::Tanh { a })
    }

    pub(crate) fn scale(&mut self, a: Var, factors: Vec<f32>) -> Var {
        let mut value = self.value(a).clone();
        multiply(&mut value.values, &factors);
        self.push(value, TapeOp::Scale { a, factors })
    }

    /// Computes the next state of an LSTM. `gates` has the columns of the input, forget and output gate and
    /// of the candidate.
    pub(crate) fn cell(&mut self, gates: Var, before: Option<Var>) -> Var {
        let entering = self.value(gates);
        let (n_rows, width) = (entering.n_rows(), entering.n_columns / 4);
        let cell = match before {
            Some(before) => self.cell_state(before).cell.clone(),
            None => vec![0.0; n_rows * width],
        };
        let mut saved = CellState { gates: entering.values.clone(), tanh: vec![0.0; cell.len()], cell };
        let mut hidden = NumberRows::zeros(n_rows, width);
        wide(|| {
            let states = saved.cell.chunks_exact_mut(width).zip(saved.tanh.chunks_exact_mut(width));
            let rows = saved.gates.chunks_exact_mut(4 * width).zip(hidden.values.chunks_exact_mut(width));
            for ((gates, hidden), (cell, tanh_of_cell)) in rows.zip(states) {
                let (sigmoids, candidate) = gates.split_at_mut(3 * width);
                sigmoids.iter_mut().for_each(|x| *x = sigmoid(*x));
                candidate.iter_mut().for_each(|x| *x = tanh(*x));
                let (input, forget, output, candidate) = quarters(gates);
                for (i, cell) in cell.iter_mut().enumerate() {
                    *cell = forget[i] * *cell + input[i] * candidate[i];
                    tanh_of_cell[i] = tanh(*cell);
                    hidden[i] = output[i] * tanh_of_cell[i];
                }
            }
        });
        self.push(hidden, TapeOp::Cell { gates, before, saved })
    }

    fn cell_state(&self, var: Var) -> &CellState {
        match &self.nodes[var.0].op {
            TapeOp::Cell { saved, .. } => saved,
            _ => panic!("invariant: only cells have a state"),
        }
    }

    /// Computes a step of an LSTM; the inputs of the gates begin at `row` of `entering`. `before` is the
    /// previous cell, and its hidden state, possibly after dropout.
    pub(crate) fn lstm(
        &mut self,
        lstm: Lstm,
        entering: Var,
        row: usize,
        n_rows: usize,
        before: Option<(Var, Var)>,
    ) -> Var {
        let gates = match before {
            None => self.cut(entering, row, n_rows),
            Some((_, hidden)) => self.product_onto(hidden, lstm.recurrent, entering, row),
        };
        self.cell(gates, before.map(|(cell, _)| cell))
    }

    /// Computes the next state of a gated recurrent unit, with `n_rows` rows; the inputs begin at `row` of
    /// `input`. `before` is the previous state's contribution to the gates, and that state. Columns: reset
    /// gate, update gate, candidate.
    pub(crate) fn gru(&mut self, input: Var, row: usize, n_rows: usize, before: Option<(Var, Var)>) -> Var {
        let mut gates = self.cut_value(input, row, n_rows);
        let width = gates.n_columns / 3;
        let mut state = match before {
            Some((_, state)) => self.value(state).clone(),
            None => NumberRows::zeros(n_rows, width),
        };
        let added = before.map(|(added, _)| self.value(added));
        wide(|| {
            let rows = gates.values.chunks_exact_mut(3 * width).zip(state.values.chunks_exact_mut(width));
            for (row, (gates, state)) in rows.enumerate() {
                let (sigmoids, candidate) = gates.split_at_mut(2 * width);
                if let Some(added) = added {
                    let (of_sigmoids, of_candidate) = added.row(row).split_at(2 * width);
                    sigmoids.iter_mut().zip(of_sigmoids).for_each(|(x, y)| *x = sigmoid(*x + y));
                    let pairs = candidate.iter_mut().zip(of_candidate).zip(&*sigmoids);
                    pairs.for_each(|((x, y), reset)| *x = tanh(*x + reset * y));
                } else {
                    sigmoids.iter_mut().for_each(|x| *x = sigmoid(*x));
                    candidate.iter_mut().for_each(|x| *x = tanh(*x));
                }
                let update = &sigmoids[width..];
                for ((state, update), candidate) in state.iter_mut().zip(update).zip(&*candidate) {
                    *state = (1.0 - update) * candidate + update * *state;
                }
            }
        });
        self.push(state, TapeOp::Gru { input, row, before, gates: gates.values })
    }

    /// Selects rows of a cell's state, as a cell that is not differentiated.
    pub(crate) fn select_cell(&mut self, cell: Var, rows: &[usize]) -> Var {
        let value = self.value(cell);
        let width = value.n_columns;
        let take = |values: &[f32]| rows.iter().flat_map(|&row| values[row * width..][..width].to_vec()).collect();
        let value = NumberRows { n_columns: width, values: take(&value.values) };
        let saved = CellState { cell: take(&self.cell_state(cell).cell), ..CellState::default() };
        self.push(value, TapeOp::Cell { gates: cell, before: None, saved })
    }

    pub(crate) fn beside(&mut self, parts: &[Var]) -> Var {
        let n_rows = self.value(parts[0]).n_rows();
        let n_columns = parts.iter().map(|&p| self.value(p).n_columns).sum();
        let mut value = NumberRows { n_columns, values: Vec::with_capacity(n_rows * n_columns) };
        for row in 0..n_rows {
            for &part in parts {
                let part = self.value(part);
                value.values.extend_from_slice(&part.values[row * part.n_columns..][..part.n_columns]);
            }
        }
        self.push(value, TapeOp::Beside { parts: parts.to_vec() })
    }

    fn cut_value(&self, a: Var, row: usize, n_rows: usize) -> NumberRows {
        let NumberRows { n_columns, ref values } = *self.value(a);
        NumberRows { n_columns, values: values[row * n_columns..][..n_rows * n_columns].to_vec() }
    }

    pub(crate) fn cut(&mut self, a: Var, row: usize, n_rows: usize) -> Var {
        self.push(self.cut_value(a, row, n_rows), TapeOp::Cut { a, row })
    }

    pub(crate) fn stack(&mut self, parts: &[Var]) -> Var {
        let n_columns = self.value(parts[0]).n_columns;
        let values = parts.iter().flat_map(|&p| self.value(p).values.iter().copied()).collect();
        self.push(NumberRows { n_columns, values }, TapeOp::Stack { parts: parts.to_vec() })
    }

    /// Computes `n_rows` rows, each the sum of the terms assigned to it.
    pub(crate) fn sum(&mut self, n_rows: usize, n_columns: usize, terms: Vec<Term>) -> Var {
        let mut value = NumberRows::zeros(n_rows, n_columns);
        for &Term { from, row, to } in &terms {
            add(&mut value.values[to * n_columns..][..n_columns], self.value(from).row(row));
        }
        self.push(value, TapeOp::Sum { terms })
    }

    /// Sums rows of `a` into the slots of `n_owners` owners; `scores` have a column for each slot.
    pub(crate) fn slots(&mut self, a: Var, scores: Var, owners: Vec<usize>, n_owners: usize) -> Var {
        let (rows, scores_value) = (self.value(a), self.value(scores));
        let (width, n_slots) = (rows.n_columns, scores_value.n_columns);
        let mut shares = scores_value.values.clone();
        shares.chunks_exact_mut(n_slots).for_each(|row| {
            log_softmax(row);
            row.iter_mut().for_each(|x| *x = exp(x.max(-87.0)));
        });
        let mut value = NumberRows::zeros(n_owners, n_slots * width);
        for (row, (&owner, shares)) in owners.iter().zip(shares.chunks_exact(n_slots)).enumerate() {
            let slots = value.values[owner * n_slots * width..].chunks_exact_mut(width);
            slots.zip(shares).for_each(|(slot, &share)| add_scaled(slot, share, rows.row(row)));
        }
        self.push(value, TapeOp::Slots { a, scores, owners, shares })
    }

    pub(crate) fn windows(&mut self, a: Var, n: usize, size: usize) -> Var {
        let from = self.value(a);
        let width = from.n_columns;
        let n_windows = from.n_rows() / n + 1 - size;
        let mut value =
            NumberRows { n_columns: size * width, values: Vec::with_capacity(n_windows * n * size * width) };
        for row in 0..n_windows * n {
            for step in 0..size {
                value.values.extend_from_slice(&from.values[(row + step * n) * width..][..width]);
            }
        }
        self.push(value, TapeOp::Windows { a, n, size })
    }

    pub(crate) fn flatten(&mut self, a: Var, n: usize) -> Var {
        let from = self.value(a);
        let (width, n_steps) = (from.n_columns, from.n_rows() / n);
        let mut value = NumberRows { n_columns: n_steps * width, values: Vec::with_capacity(from.values.len()) };
        for row in 0..n {
            for step in 0..n_steps {
                value.values.extend_from_slice(&from.values[(step * n + row) * width..][..width]);
            }
        }
        self.push(value, TapeOp::Flatten { a, n })
    }

    pub(crate) fn attention(&mut self, keys: Var, query: Var, values: Var, energy: Weight) -> Var {
        let (keys_value, query_value, values_value) = (self.value(keys), self.value(query), self.value(values));
        let (n, d) = (query_value.n_rows(), query_value.n_columns);
        let n_steps = keys_value.n_rows() / n;
        let energies = &self.parameters.arrays[energy.0].values;
        let mut hidden = keys_value.values.clone();
        hidden.chunks_exact_mut(n * d).for_each(|step| add(step, &query_value.values));
        wide(|| hidden.iter_mut().for_each(|x| *x = tanh(*x)));
        // Step by step, like the keys.
        let mut shares: Vec<f32> = hidden.chunks_exact(d).map(|h| dot(h, energies)).collect();
        let mut context = NumberRows::zeros(n, values_value.n_columns);
        let width = context.n_columns;
        for row in 0..n {
            let largest = (0..n_steps).map(|t| shares[t * n + row]).fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = (0..n_steps)
                .map(|t| {
                    let share = &mut shares[t * n + row];
                    *share = exp((*share - largest).max(-87.0));
                    *share
                })
                .sum();
            for t in 0..n_steps {
                let share = &mut shares[t * n + row];
                *share /= sum;
                let step = &values_value.values[(t * n + row) * width..][..width];
                add_scaled(&mut context.values[row * width..][..width], *share, step);
            }
        }
        self.push(context, TapeOp::Attention { keys, query, values, energy, shares, hidden })
    }
}

#[inline(always)]
fn quarters(row: &[f32]) -> (&[f32], &[f32], &[f32], &[f32]) {
    let width = row.len() / 4;
    (&row[..width], &row[width..2 * width], &row[2 * width..3 * width], &row[3 * width..])
}

fn add(to: &mut [f32], from: &[f32]) {
    wide(|| to.iter_mut().zip(from).for_each(|(to, from)| *to += from));
}

fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

fn multiply(to: &mut [f32], from: &[f32]) {
    wide(|| to.iter_mut().zip(from).for_each(|(to, from)| *to *= from));
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_or_set(to: &mut Vec<f32>, from: Vec<f32>) {
    if to.is_empty() { *to = from } else { add(to, &from) }
}

/// Converts scores to logarithms of probabilities.
pub(crate) fn log_softmax(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = row.iter().map(|x| exp((x - largest).max(-87.0))).sum();
    let log_sum = largest + sum.ln();
    row.iter_mut().for_each(|x| *x -= log_sum);
}
