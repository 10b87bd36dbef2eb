//! Recurrent networks: RNN, GRU and LSTM.

use super::quantize::by_range;
use super::util::size;
use super::{Import, Inputs, Op, Operation, Operator, Unary, row};
use crate::error::invalid;
use crate::{OpError, Tensor, TensorType};

/// Kind of recurrent cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Cell {
    Rnn,
    Gru {
        /// Whether the reset gate multiplies the state after its matrix product (`linear_before_reset`),
        /// rather than before.
        resets_behind: bool,
    },
    Lstm {
        /// Whether the forget gate is one minus the input gate (`input_forget`).
        couples_gates: bool,
        /// Whether inputs and states are dynamically quantized to 8 bits before the matrix products: all
        /// inputs with one range, the states of a batch with one range per step.
        rounds: bool,
    },
}

impl Cell {
    /// Name of the cell.
    pub fn name(self) -> &'static str {
        match self {
            Cell::Rnn => "rnn",
            Cell::Gru { .. } => "gru",
            Cell::Lstm { .. } => "lstm",
        }
    }
}

/// Direction in which the sequence is processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum RecurrentDirection {
    Forward,
    Reverse,
    Both,
}

/// Recurrent network. Inputs: sequence `[steps, batch, n]`, weights W `[directions, gates·hidden, n]`, R
/// `[directions, gates·hidden, hidden]`, B `[directions, 2·gates·hidden]`, lengths, initial states and
/// peepholes; if inputs and states are quantized, also scales of W and R, one for each direction or for each
/// of its rows.
#[derive(Debug, Clone)]
pub struct Recurrent {
    /// Kind of cell.
    pub cell: Cell,
    /// Number of elements of the state.
    pub hidden: usize,
    /// Direction of processing.
    pub direction: RecurrentDirection,
    /// Activation functions of each direction, in the cell's order.
    pub activations: Vec<Unary>,
    /// Bound to which the arguments of activations are clipped; `None` for no clipping.
    pub clip: Option<f64>,
    /// Whether the layout is `[batch, steps, n]` (`layout` 1).
    pub batch_first: bool,
}

/// Next number of an attribute, for an activation that takes one; its default if there are no more.
fn parameter(
    (attribute, numbers): (&str, &mut dyn Iterator<Item = f32>),
    activation: &str,
    default: Option<f64>,
) -> Result<f64, OpError> {
    let given = numbers.next().map(f64::from);
    given.or(default).ok_or_else(|| invalid!("the activation {activation} needs a number of {attribute}"))
}

/// Activations by their names. The numbers of `activation_alpha` and `activation_beta` belong, in order, to
/// the activations that take them.
fn activations(names: &[String], alphas: &[f32], betas: &[f32]) -> Result<Vec<Unary>, OpError> {
    let (mut alphas, mut betas) = (alphas.iter().copied(), betas.iter().copied());
    let mut all = Vec::with_capacity(names.len());
    for name in names {
        let mut alpha = |default| parameter(("activation_alpha", &mut alphas), name, default);
        let mut beta = |default| parameter(("activation_beta", &mut betas), name, default);
        all.push(match name.to_ascii_lowercase().as_str() {
            "affine" => Unary::Affine { alpha: alpha(None)?, beta: beta(None)? },
            "elu" => Unary::Elu { alpha: alpha(Some(1.0))? },
            "hardsigmoid" => Unary::HardSigmoid { alpha: alpha(Some(0.2))?, beta: beta(Some(0.5))? },
            "leakyrelu" => Unary::LeakyRelu { alpha: alpha(Some(0.01))? },
            "relu" => Unary::Relu,
            "scaledtanh" => Unary::ScaledTanh { alpha: alpha(None)?, beta: beta(None)? },
            "sigmoid" => Unary::Sigmoid,
            "softplus" => Unary::Softplus,
            "softsign" => Unary::Softsign,
            "tanh" => Unary::Tanh,
            "thresholdedrelu" => Unary::ThresholdedRelu { alpha: alpha(Some(1.0))? },
            _ => return Err(invalid!("there is no activation {name}")),
        });
    }
    Ok(all)
}

fn import(node: &Import, cell: Cell, defaults: &[&str]) -> Result<Op, OpError> {
    let hidden = node.int("hidden_size")?.ok_or_else(|| invalid!("it has no hidden_size"))?;
    let known = [
        ("forward", RecurrentDirection::Forward),
        ("reverse", RecurrentDirection::Reverse),
        ("bidirectional", RecurrentDirection::Both),
    ];
    let direction = node.one_of("direction", "forward", &known)?;
    let n_directions = if direction == RecurrentDirection::Both { 2 } else { 1 };
    let names = node.texts("activations")?.filter(|names| !names.is_empty());
    let all = || defaults.repeat(n_directions).iter().map(|&name| name.to_owned()).collect();
    let names: Vec<String> = names.unwrap_or_else(all);
    if names.len() != defaults.len() * n_directions {
        return Err(invalid!("it has {} activations, and should have {}", names.len(), defaults.len() * n_directions));
    }
    let alphas = node.floats("activation_alpha")?.unwrap_or_default();
    let betas = node.floats("activation_beta")?.unwrap_or_default();
    Ok(Recurrent {
        cell,
        hidden: size(hidden)?,
        direction,
        activations: activations(&names, &alphas, &betas)?,
        clip: node.float("clip")?.map(f64::from),
        batch_first: node.version >= 14 && node.flag("layout", false)?,
    }
    .into())
}

pub(super) const ROWS: &[Operator] = &[
    row("RNN", &[7, 14, 22], 3..=6, |node| import(node, Cell::Rnn, &["Tanh"])),
    row("GRU", &[7, 14, 22], 3..=6, |node| {
        let resets_behind = node.flag("linear_before_reset", false)?;
        import(node, Cell::Gru { resets_behind }, &["Sigmoid", "Tanh"])
    }),
    row("LSTM", &[7, 14, 22], 3..=8, |node| lstm(node, false)),
    // ONNX Runtime's `DynamicQuantizeLSTM`, with zero points subtracted from its weights, and their scales.
    Operator { domain: "com.microsoft", name: "LSTM", since: &[1], n_inputs: 3..=10, import: |node| lstm(node, true) },
];

fn lstm(node: &Import, rounds: bool) -> Result<Op, OpError> {
    let couples_gates = node.flag("input_forget", false)?;
    import(node, Cell::Lstm { couples_gates, rounds }, &["Sigmoid", "Tanh", "Tanh"])
}

/// Sizes of a network.
struct RecurrentSizes {
    steps: usize,
    batch: usize,
    n: usize,
    directions: usize,
    gates: usize,
}

/// Rounds numbers to the levels of `DynamicQuantizeLinear`: 256 over their range, which is extended to
/// include zero.
fn round_by_range(numbers: &mut [f64]) {
    let (levels, scale, zero) = by_range(numbers);
    numbers.iter_mut().zip(levels).for_each(|(x, level)| *x = (level - zero) * scale);
}

impl Recurrent {
    fn sizes(&self, inputs: Inputs<'_>) -> Result<RecurrentSizes, OpError> {
        let (x, w, r) = (inputs.shape(0)?, inputs.shape(1)?, inputs.shape(2)?);
        let &[a, b, n] = x else {
            return Err(invalid!("its input of shape {x:?} should have 3 dimensions"));
        };
        let (steps, batch) = if self.batch_first { (b, a) } else { (a, b) };
        let directions = if self.direction == RecurrentDirection::Both { 2 } else { 1 };
        let gates = match self.cell {
            Cell::Rnn => 1,
            Cell::Gru { .. } => 3,
            Cell::Lstm { .. } => 4,
        };
        let rows = gates * self.hidden.min(1 << 32);
        if w != [directions, rows, n] || r != [directions, rows, self.hidden] {
            return Err(invalid!("weights of shapes {w:?} and {r:?} do not fit {x:?} and {} states", self.hidden));
        }
        if inputs.optional(3).is_some_and(|bias| bias.shape() != [directions, 2 * rows]) {
            return Err(invalid!("what is added, of shape {:?}, does not fit", inputs.shape(3)?));
        }
        for shape in [8, 9].into_iter().filter_map(|at| Some(inputs.optional(at)?.shape())) {
            let fits = matches!(shape, [n] | [n, 1] if *n == directions) || shape == [directions, rows];
            if !fits {
                return Err(invalid!("scales of shape {shape:?} do not fit {directions} directions of {rows} rows"));
            }
        }
        Ok(RecurrentSizes { steps, batch, n, directions, gates })
    }

    /// Weights, input `at`, multiplied by their scales, input `scales`.
    fn weights(&self, inputs: Inputs<'_>, at: usize, scales: usize, rows: usize) -> Result<Vec<f64>, OpError> {
        let mut weights = inputs.tensor(at)?.floats();
        if let Some(scales) = inputs.optional_tensor(scales)? {
            let columns = weights.len() / rows.max(1);
            let n_each = rows / scales.n_elements().max(1);
            let scales = scales.floats();
            let rows = weights.chunks_mut(columns.max(1)).zip(0..);
            rows.for_each(|(row, at)| row.iter_mut().for_each(|x| *x *= scales[at / n_each]));
        }
        Ok(weights)
    }

    /// Initial states: input `at`, or zeros, as `[directions, batch, hidden]`.
    fn states(&self, inputs: Inputs<'_>, at: usize, sizes: &RecurrentSizes) -> Result<Vec<f64>, OpError> {
        let RecurrentSizes { batch, directions, .. } = *sizes;
        let n = directions * batch * self.hidden;
        let Some(given) = inputs.optional_tensor(at)? else { return Ok(vec![0.0; n]) };
        let given = given.floats();
        if given.len() != n {
            return Err(invalid!("{} first states do not fit {n}", given.len()));
        }
        if !self.batch_first {
            return Ok(given);
        }
        let h = self.hidden;
        let from = |to: usize| (to / h % batch * directions + to / (h * batch)) * h + to % h;
        Ok((0..n).map(|to| given[from(to)]).collect())
    }
}

/// Step of the cells of one sequence: weights and biases of the gates, row by row, and the values that they
/// read.
struct CellStep<'a> {
    w: &'a [f64],
    r: &'a [f64],
    wb: &'a [f64],
    rb: &'a [f64],
    x: &'a [f64],
    /// Hidden states that gates read.
    read: &'a [f64],
    activations: &'a [Unary],
    /// Bound of the arguments of activations.
    clip: Option<f64>,
    peepholes: Option<&'a [f64]>,
}

impl CellStep<'_> {
    fn act(&self, at: usize, x: f64) -> f64 {
        self.activations[at].of_float(self.clip.map_or(x, |bound| x.max(-bound).min(bound)))
    }

    fn of_x(&self, row: usize) -> f64 {
        dot(&self.w[row * self.x.len()..(row + 1) * self.x.len()], self.x) + self.wb[row]
    }

    fn of_h(&self, row: usize, states: &[f64]) -> f64 {
        dot(&self.r[row * states.len()..(row + 1) * states.len()], states) + self.rb[row]
    }

    fn gate(&self, row: usize) -> f64 {
        self.of_x(row) + self.of_h(row, self.read)
    }

    fn rnn(&self, states: &mut [f64]) {
        states.iter_mut().enumerate().for_each(|(j, state)| *state = self.act(0, self.gate(j)));
    }

    fn gru(&self, states: &mut [f64], resets_behind: bool) {
        let (h, before) = (states.len(), states.to_vec());
        let z: Vec<f64> = (0..h).map(|j| self.act(0, self.gate(j))).collect();
        let reset: Vec<f64> = (0..h).map(|j| self.act(0, self.gate(h + j))).collect();
        let scaled: Vec<f64> = before.iter().zip(&reset).map(|(h, r)| h * r).collect();
        for j in 0..h {
            let row = 2 * h + j;
            let inner = match resets_behind {
                true => reset[j] * self.of_h(row, &before),
                false => self.of_h(row, &scaled),
            };
            let new = self.act(1, self.of_x(row) + inner);
            states[j] = (1.0 - z[j]) * new + z[j] * before[j];
        }
    }

    fn lstm(&self, states: &mut [f64], cells: &mut [f64], couples_gates: bool) {
        let h = states.len();
        for j in 0..h {
            let peep = |k: usize| self.peepholes.map_or(0.0, |p| p[k * h + j]);
            let c = cells[j];
            let input = self.act(0, self.gate(j) + peep(0) * c);
            let forget = match couples_gates {
                true => 1.0 - input,
                false => self.act(0, self.gate(2 * h + j) + peep(2) * c),
            };
            let new = forget * c + input * self.act(1, self.gate(3 * h + j));
            let output = self.act(0, self.gate(h + j) + peep(1) * new);
            cells[j] = new;
            states[j] = output * self.activations[2].of_float(new);
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl Operation for Recurrent {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let RecurrentSizes { steps, batch, directions, .. } = self.sizes(inputs)?;
        let dtype = inputs.fact(0)?.dtype();
        let (all, last) = match self.batch_first {
            true => (vec![batch, steps, directions, self.hidden], vec![batch, directions, self.hidden]),
            false => (vec![steps, directions, batch, self.hidden], vec![directions, batch, self.hidden]),
        };
        let mut types = vec![TensorType::new(dtype, all), TensorType::new(dtype, last.clone())];
        types.extend(matches!(self.cell, Cell::Lstm { .. }).then(|| TensorType::new(dtype, last)));
        Ok(types)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(inputs)?;
        let sizes = self.sizes(inputs)?;
        let RecurrentSizes { steps, batch, n, directions, gates } = sizes;
        let h = self.hidden;
        let rows = gates * h;
        let rounds = matches!(self.cell, Cell::Lstm { rounds: true, .. });
        let mut x = inputs.tensor(0)?.floats();
        if rounds {
            round_by_range(&mut x);
        }
        let of_rows = |at, scales| self.weights(inputs, at, scales, directions * rows);
        let (w, r) = (of_rows(1, 8)?, of_rows(2, 9)?);
        let bias = inputs.optional_tensor(3)?.map_or_else(|| vec![0.0; directions * 2 * rows], Tensor::floats);
        let lengths = inputs.optional_i64s(4)?.unwrap_or_else(|| vec![steps as i64; batch]);
        if lengths.len() != batch || lengths.iter().any(|&length| length < 0 || length as usize > steps) {
            return Err(invalid!("lengths {lengths:?} do not fit {steps} steps"));
        }
        let mut hidden = self.states(inputs, 5, &sizes)?;
        let is_lstm = matches!(self.cell, Cell::Lstm { .. });
        let mut cells = if is_lstm { self.states(inputs, 6, &sizes)? } else { Vec::new() };
        let peepholes = if is_lstm { inputs.optional_tensor(7)?.map(Tensor::floats) } else { None };
        if peepholes.as_ref().is_some_and(|p| p.len() != directions * 3 * h) {
            return Err(invalid!("peepholes do not fit {h} states"));
        }
        let mut all = vec![0.0; steps * directions * batch * h];
        for d in 0..directions {
            let is_reverse = self.direction == RecurrentDirection::Reverse || d == 1;
            let (w, r) = (&w[d * rows * n..][..rows * n], &r[d * rows * h..][..rows * h]);
            let bias = bias[d * 2 * rows..][..2 * rows].split_at(rows);
            let per_direction = self.activations.len() / directions;
            let activations = &self.activations[d * per_direction..][..per_direction];
            let peepholes = peepholes.as_ref().map(|p| &p[d * 3 * h..][..3 * h]);
            for step in 0..steps {
                let mut read = hidden[d * batch * h..(d + 1) * batch * h].to_vec();
                if rounds {
                    round_by_range(&mut read);
                }
                for b in (0..batch).filter(|&b| step < lengths[b] as usize) {
                    let state = (d * batch + b) * h;
                    let t = if is_reverse { lengths[b] as usize - 1 - step } else { step };
                    let at = if self.batch_first { b * steps + t } else { t * batch + b };
                    let (x, read) = (&x[at * n..(at + 1) * n], &read[b * h..(b + 1) * h]);
                    let cell =
                        CellStep { w, r, wb: bias.0, rb: bias.1, x, read, activations, clip: self.clip, peepholes };
                    let states = &mut hidden[state..state + h];
                    match self.cell {
                        Cell::Rnn => cell.rnn(states),
                        Cell::Gru { resets_behind } => cell.gru(states, resets_behind),
                        Cell::Lstm { couples_gates, .. } => {
                            cell.lstm(states, &mut cells[state..state + h], couples_gates);
                        }
                    }
                    let to = match self.batch_first {
                        true => ((b * steps + t) * directions + d) * h,
                        false => ((t * directions + d) * batch + b) * h,
                    };
                    all[to..to + h].copy_from_slice(&hidden[state..state + h]);
                }
            }
        }
        let last = |states: &[f64]| -> Vec<f64> {
            if !self.batch_first {
                return states.to_vec();
            }
            let from = |to: usize| (to / h % directions * batch + to / (h * directions)) * h + to % h;
            (0..states.len()).map(|to| states[from(to)]).collect()
        };
        let mut outputs = vec![
            Tensor::from_floats(types[0].dtype, types[0].shape.clone(), &all),
            Tensor::from_floats(types[1].dtype, types[1].shape.clone(), &last(&hidden)),
        ];
        if is_lstm {
            outputs.push(Tensor::from_floats(types[2].dtype, types[2].shape.clone(), &last(&cells)));
        }
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_to_the_activations_that_take_them() {
        let check = |names: &str, alphas: &[f32], betas: &[f32], expected: &[Unary]| {
            let names: Vec<String> = names.split(' ').map(str::to_owned).collect();
            assert_eq!(activations(&names, alphas, betas).as_deref(), Ok(expected), "{names:?}");
        };
        use Unary as U;
        let hard = |alpha, beta| U::HardSigmoid { alpha, beta };
        let leaky = |alpha| U::LeakyRelu { alpha };
        check(
            "Sigmoid LeakyRelu Tanh HardSigmoid",
            &[0.5, 0.25],
            &[0.75],
            &[U::Sigmoid, leaky(0.5), U::Tanh, hard(0.25, 0.75)],
        );
        check(
            "hardsigmoid LeakyRelu HardSigmoid LeakyRelu",
            &[0.5, 0.25, 2.0],
            &[0.0],
            &[hard(0.5, 0.0), leaky(0.25), hard(2.0, 0.5), leaky(0.01)],
        );
        check(
            "Elu ThresholdedRelu Softplus Softsign Relu",
            &[],
            &[],
            &[U::Elu { alpha: 1.0 }, U::ThresholdedRelu { alpha: 1.0 }, U::Softplus, U::Softsign, U::Relu],
        );
        check(
            "Affine ScaledTanh",
            &[0.5, 2.0],
            &[0.25, 3.0],
            &[U::Affine { alpha: 0.5, beta: 0.25 }, U::ScaledTanh { alpha: 2.0, beta: 3.0 }],
        );
        for (name, why) in [("Affine", "Affine needs a number of activation_alpha"), ("Cube", "no activation Cube")] {
            let error = activations(&[name.to_owned()], &[], &[]).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
