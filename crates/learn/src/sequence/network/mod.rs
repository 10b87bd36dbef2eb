//! Networks: encoders, decoders, and their training.

mod tokens;
mod training;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};

use super::beam::{Decoder, LikelyAnswer};
use super::{Architecture, Training, Vocabulary};
use crate::tape::{
    Dense, LayerBuilder, Lstm, NumberRows, Parameters, Tape, Var, Weight, both_ways, forth, log_softmax,
};

pub(super) use tokens::Tokens;
pub(super) use training::train;

/// Number of nodes of the dense layer that computes attention weights, as in the paper.
const N_ATTENTION: usize = 2;

/// Number of filters of each convolution, number of steps in its window, and number of convolutions. The
/// paper does not say.
const N_FILTERS: usize = 64;
const WINDOW: usize = 3;
const N_CONVOLUTIONS: usize = 2;

/// Shape of a network, which together with the vocabulary determines its layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct NetworkShape {
    pub(super) architecture: Architecture,
    pub(super) n_hidden: usize,
    pub(super) tokens: Tokens,
    /// Number of values of each parameter.
    pub(super) sizes: Vec<usize>,
}

impl NetworkShape {
    /// Whether the shape is one for this vocabulary.
    pub(super) fn fits(&self, vocabulary: &Vocabulary) -> bool {
        let sizes = vocabulary.parameters.iter().map(|p| p.values.len());
        self.architecture != Architecture::Chain
            && self.n_hidden > 0
            && self.sizes.iter().copied().eq(sizes)
            && self.tokens.fit(vocabulary.fields.len())
    }
}

/// Network and its weights.
#[derive(Debug, Clone)]
pub(super) struct SequenceNetwork {
    shape: NetworkShape,
    layers: Layers,
    parameters: Parameters,
}

/// Weights of the layers.
#[derive(Debug, Clone)]
struct Layers {
    body: NetworkBody,
    /// Output layer of each parameter, from a state to its values' scores.
    heads: Vec<Dense>,
}

#[derive(Debug, Clone)]
enum NetworkBody {
    EncDec { encoder: Lstm, decoder: Lstm },
    Attention { encoder: [Lstm; 2], keys: Dense, query: Weight, energy: Weight, decoder: Lstm },
    Hybrid { convolutions: Vec<Dense>, first: [Lstm; 2], second: [Lstm; 2] },
}

/// Makes a layer whose weights keep the variance in both directions.
fn dense(builder: &mut LayerBuilder, name: &str, n_inputs: usize, n_outputs: usize) -> Dense {
    builder.dense(name, n_inputs, n_outputs, both_ways(n_inputs, n_outputs))
}

/// Makes an LSTM whose cells remember until they learn to forget.
fn lstm(builder: &mut LayerBuilder, name: &str, n_inputs: usize, n_hidden: usize) -> Lstm {
    builder.lstm(name, n_inputs, n_hidden, [both_ways(n_inputs, n_hidden), forth(n_hidden)], 1.0)
}

/// Makes an LSTM for each direction.
fn two_lstms(builder: &mut LayerBuilder, name: &str, n_inputs: usize, n_hidden: usize) -> [Lstm; 2] {
    ["forward", "backward"].map(|way| lstm(builder, &format!("{name}.{way}"), n_inputs, n_hidden))
}

impl SequenceNetwork {
    /// Makes an untrained network.
    fn new(
        architecture: Architecture,
        vocabulary: &Vocabulary,
        tokens: Tokens,
        training: &Training,
    ) -> SequenceNetwork {
        let sizes = vocabulary.parameters.iter().map(|p| p.values.len()).collect();
        let shape = NetworkShape { architecture, n_hidden: training.n_hidden, tokens, sizes };
        SequenceNetwork::drawn(shape, training.seed)
    }

    /// Makes the network of this shape with the weights that `read` returns by name; `read` receives their
    /// expected number.
    pub(super) fn read<E>(
        shape: NetworkShape,
        mut read: impl FnMut(&str, usize) -> Result<Vec<f32>, E>,
    ) -> Result<SequenceNetwork, E> {
        // The drawn values are discarded; only names and sizes are used.
        let mut network = SequenceNetwork::drawn(shape, 0);
        let read = |(name, values): (&str, &[f32])| read(name, values.len());
        let values = network.parameters.iter().map(read).collect::<Result<Vec<_>, E>>()?;
        network.set(values);
        Ok(network)
    }

    fn drawn(shape: NetworkShape, seed: u64) -> SequenceNetwork {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut builder = LayerBuilder::new(&mut rng);
        let layers = layers(&shape, &mut builder);
        SequenceNetwork { shape, layers, parameters: builder.finish() }
    }

    /// Replaces the values of all weights.
    fn set(&mut self, values: Vec<Vec<f32>>) {
        self.parameters.update(|arrays| arrays.zip(values).for_each(|(array, values)| *array = values));
    }

    pub(super) fn shape(&self) -> &NetworkShape {
        &self.shape
    }

    /// All weights with their names.
    pub(super) fn weights(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.parameters.iter()
    }

    /// Makes a decoder of the answers for a problem.
    pub(super) fn decoder(&self, problem: &[i64]) -> impl Decoder {
        let mut run = NetworkRun::new(self, self.shape.tokens.rows(&[problem]), 1, None);
        run.encode();
        NetworkDecoder { run }
    }
}

fn layers(shape: &NetworkShape, builder: &mut LayerBuilder) -> Layers {
    let (width, n_hidden) = (shape.tokens.width(), shape.n_hidden);
    let n_values: usize = shape.sizes.iter().sum();
    let (body, n_outputs) = match shape.architecture {
        Architecture::EncDec => {
            let encoder = lstm(builder, "encoder", width, n_hidden);
            (NetworkBody::EncDec { encoder, decoder: lstm(builder, "decoder", n_values, n_hidden) }, n_hidden)
        }
        Architecture::Attn | Architecture::Attn2 => {
            let n_decoder = 2 * n_hidden;
            let encoder = two_lstms(builder, "encoder", width, n_hidden);
            let keys = dense(builder, "attention.keys", 2 * n_hidden, N_ATTENTION);
            let mut weight = |name: &str, n_inputs, n_outputs| {
                builder.weight(format!("attention.{name}"), n_inputs, n_outputs, both_ways(n_inputs, n_outputs))
            };
            let (query, energy) = (weight("query", n_decoder, N_ATTENTION), weight("energy", N_ATTENTION, 1));
            let fed_back = if shape.architecture == Architecture::Attn { n_values } else { 0 };
            let decoder = lstm(builder, "decoder", 2 * n_hidden + fed_back, n_decoder);
            (NetworkBody::Attention { encoder, keys, query, energy, decoder }, n_decoder)
        }
        Architecture::Hybrid | Architecture::Hybrid2 => {
            let (mut width, mut n_steps) = (width, shape.tokens.n_steps());
            let mut convolutions = Vec::new();
            for at in 0..N_CONVOLUTIONS {
                let window = WINDOW.min(n_steps);
                convolutions.push(dense(builder, &format!("convolutions.{at}"), window * width, N_FILTERS));
                (width, n_steps) = (N_FILTERS, n_steps + 1 - window);
            }
            let first = two_lstms(builder, "first", n_steps * width, n_hidden);
            let second = two_lstms(builder, "second", 2 * n_hidden, n_hidden);
            (NetworkBody::Hybrid { convolutions, first, second }, 2 * n_hidden)
        }
        Architecture::Chain => panic!("invariant: a chain is no network"),
    };
    let heads = (0..shape.sizes.len()).map(|at| dense(builder, &format!("heads.{at}"), n_outputs, shape.sizes[at]));
    Layers { body, heads: heads.collect() }
}

/// Dropout masks of training, drawn once for all steps of a sequence (Gal and Ghahramani, 2016).
struct DropoutMasks<'a> {
    share: f32,
    rng: &'a mut Xoshiro256PlusPlus,
}

impl DropoutMasks<'_> {
    fn mask(&mut self, n: usize) -> Vec<f32> {
        let kept = 1.0 / (1.0 - self.share);
        (0..n).map(|_| if self.rng.random::<f32>() < self.share { 0.0 } else { kept }).collect()
    }
}

/// Run of a network on a batch of problems.
struct NetworkRun<'a> {
    network: &'a SequenceNetwork,
    tape: Tape<'a>,
    /// Number of problems; with a beam, of prefixes for one problem.
    n: usize,
    inputs: NumberRows,
    dropout: Option<DropoutMasks<'a>>,
    decoding: Decoding,
}

/// State of the decoding.
enum Decoding {
    Begun,
    /// Decoder of `NetworkBody::EncDec`.
    Recurrent {
        cell: Var,
        masks: Masks,
    },
    /// Decoder of `NetworkBody::Attention`; `cell` is `None` before the first step.
    Attending {
        keys: Var,
        values: Var,
        cell: Option<Var>,
        masks: Masks,
    },
    /// End of decoding: all outputs are computed.
    Done {
        states: Vec<Var>,
    },
}

/// Dropout of a decoder's inputs and of its state.
#[derive(Default, Clone)]
struct Masks {
    input: Option<Vec<f32>>,
    state: Option<Vec<f32>>,
}

impl<'a> NetworkRun<'a> {
    fn new(
        network: &'a SequenceNetwork,
        inputs: NumberRows,
        n: usize,
        dropout: Option<DropoutMasks<'a>>,
    ) -> NetworkRun<'a> {
        let tape = Tape::new(&network.parameters);
        NetworkRun { network, tape, n, inputs, dropout, decoding: Decoding::Begun }
    }

    fn masks(&mut self, n_inputs: usize, n_hidden: usize) -> Masks {
        let n = self.n;
        let mut mask = |width| self.dropout.as_mut().map(|dropout| dropout.mask(n * width));
        Masks { input: mask(n_inputs), state: mask(n_hidden) }
    }

    fn masked(&mut self, a: Var, mask: &Option<Vec<f32>>) -> Var {
        match mask {
            Some(mask) => self.tape.scale(a, mask.clone()),
            None => a,
        }
    }

    /// Takes a step of an LSTM; the inputs of the gates begin at `row` of `entering`.
    fn step(&mut self, lstm: Lstm, entering: Var, row: usize, before: Option<Var>, mask: &Option<Vec<f32>>) -> Var {
        let before = before.map(|cell| (cell, self.masked(cell, mask)));
        self.tape.lstm(lstm, entering, row, self.n, before)
    }

    /// Returns the states after each step; with `constant`, every step has the same input.
    fn states(
        &mut self,
        lstm: Lstm,
        entering: Var,
        n_steps: usize,
        way: StepOrder,
        mask: &Option<Vec<f32>>,
    ) -> Vec<Var> {
        let mut states: Vec<Var> = Vec::with_capacity(n_steps);
        for i in 0..n_steps {
            let row = match way {
                StepOrder::Forward => i * self.n,
                StepOrder::Backward => (n_steps - 1 - i) * self.n,
                StepOrder::Constant => 0,
            };
            let state = self.step(lstm, entering, row, states.last().copied(), mask);
            states.push(state);
        }
        states
    }

    /// Reads the problems.
    fn encode(&mut self) {
        let network = self.network;
        let n_steps = network.shape.tokens.n_steps();
        let inputs = std::mem::replace(&mut self.inputs, NumberRows::zeros(0, 1));
        let inputs = self.tape.constant(inputs);
        let n_hidden = network.shape.n_hidden;
        let n_values: usize = network.shape.sizes.iter().sum();
        self.decoding = match &network.layers.body {
            NetworkBody::EncDec { encoder, .. } => {
                let entering = self.tape.dense(inputs, encoder.entering);
                let states = self.states(*encoder, entering, n_steps, StepOrder::Forward, &None);
                let masks = self.masks(n_values, n_hidden);
                Decoding::Recurrent { cell: states[n_steps - 1], masks }
            }
            NetworkBody::Attention { encoder, keys: key, decoder, .. } => {
                let [forward, backward] = [StepOrder::Forward, StepOrder::Backward].map(|way| {
                    let lstm = encoder[usize::from(way == StepOrder::Backward)];
                    let entering = self.tape.dense(inputs, lstm.entering);
                    self.states(lstm, entering, n_steps, way, &None)
                });
                let both = forward.iter().zip(backward.iter().rev());
                let both: Vec<Var> = both.map(|(&f, &b)| self.tape.beside(&[f, b])).collect();
                let values = self.tape.stack(&both);
                let keys = self.tape.dense(values, *key);
                let n_inputs = network.parameters.n_inputs(decoder.entering.weight);
                let masks = self.masks(n_inputs, 2 * n_hidden);
                Decoding::Attending { keys, values, cell: None, masks }
            }
            NetworkBody::Hybrid { convolutions, first, second } => {
                let mut steps = inputs;
                let mut n_left = n_steps;
                for &convolution in convolutions {
                    let window = WINDOW.min(n_left);
                    n_left = n_left + 1 - window;
                    let windows = self.tape.windows(steps, self.n, window);
                    let sums = self.tape.dense(windows, convolution);
                    steps = self.tape.relu(sums);
                }
                let flat = self.tape.flatten(steps, self.n);
                Decoding::Done { states: self.decode_in_layers(flat, first, second) }
            }
        };
    }

    /// The two bidirectional layers of the hybrid decoders.
    fn decode_in_layers(&mut self, flat: Var, first: &[Lstm; 2], second: &[Lstm; 2]) -> Vec<Var> {
        let n_outputs = self.network.shape.sizes.len();
        let n_hidden = self.network.shape.n_hidden;
        let width = self.tape.value(flat).n_columns;
        let firsts = first.map(|lstm| {
            let masks = self.masks(width, n_hidden);
            let input = self.masked(flat, &masks.input);
            let entering = self.tape.dense(input, lstm.entering);
            self.states(lstm, entering, n_outputs, StepOrder::Constant, &masks.state)
        });
        let layered = self.network.shape.architecture == Architecture::Hybrid2;
        // The last output of both directions is the input of every step, or each step has a separate one.
        let between: Vec<Var> = (0..n_outputs)
            .filter(|at| !layered || *at + 1 == n_outputs)
            .map(|at| {
                let backward = if layered { at } else { n_outputs - 1 - at };
                self.tape.beside(&[firsts[0][at], firsts[1][backward]])
            })
            .collect();
        let mut ways = second.iter().zip([StepOrder::Forward, StepOrder::Backward]).map(|(&lstm, way)| {
            let masks = self.masks(2 * n_hidden, n_hidden);
            let masked: Vec<Var> = between.iter().map(|&b| self.masked(b, &masks.input)).collect();
            let stacked = self.tape.stack(&masked);
            let entering = self.tape.dense(stacked, lstm.entering);
            let way = if layered { StepOrder::Constant } else { way };
            self.states(lstm, entering, n_outputs, way, &masks.state)
        });
        let forward = ways.next().expect("invariant: two ways");
        let backward = ways.next().expect("invariant: two ways");
        drop(ways);
        forward.iter().zip(backward.iter().rev()).map(|(&f, &b)| self.tape.beside(&[f, b])).collect()
    }

    /// Whether the next output depends on the previous ones.
    fn feeds_back(&self) -> bool {
        matches!(self.network.shape.architecture, Architecture::EncDec | Architecture::Attn)
    }

    /// Computes the scores of the next parameter's values; `written` are the values of the previous
    /// parameter, one for each problem.
    fn decode(&mut self, at: usize, written: Option<&[u32]>) -> Var {
        let network = self.network;
        let decoding = std::mem::replace(&mut self.decoding, Decoding::Begun);
        let state = match (&network.layers.body, decoding) {
            (NetworkBody::EncDec { decoder, .. }, Decoding::Recurrent { cell, masks }) => {
                let token = self.token(at, written);
                let input = self.masked(token, &masks.input);
                let entering = self.tape.dense(input, decoder.entering);
                let cell = self.step(*decoder, entering, 0, Some(cell), &masks.state);
                self.decoding = Decoding::Recurrent { cell, masks };
                cell
            }
            (
                NetworkBody::Attention { query, energy, decoder, .. },
                Decoding::Attending { keys, values, cell, masks },
            ) => {
                let before =
                    cell.unwrap_or_else(|| self.tape.constant(NumberRows::zeros(self.n, 2 * network.shape.n_hidden)));
                let query = self.tape.product(before, *query);
                let context = self.tape.attention(keys, query, values, *energy);
                let mut parts = vec![context];
                if self.feeds_back() {
                    parts.push(self.token(at, written));
                }
                let input = self.tape.beside(&parts);
                let input = self.masked(input, &masks.input);
                let entering = self.tape.dense(input, decoder.entering);
                let cell = self.step(*decoder, entering, 0, cell, &masks.state);
                self.decoding = Decoding::Attending { keys, values, cell: Some(cell), masks };
                cell
            }
            (NetworkBody::Hybrid { .. }, Decoding::Done { states }) => {
                let state = states[at];
                self.decoding = Decoding::Done { states };
                state
            }
            _ => panic!("invariant: problems are read before answers are written"),
        };
        self.tape.dense(state, network.layers.heads[at])
    }

    /// Values of the previous parameter as tokens; zero before the first.
    fn token(&mut self, at: usize, written: Option<&[u32]>) -> Var {
        let sizes = &self.network.shape.sizes;
        let mut tokens = NumberRows::zeros(self.n, sizes.iter().sum());
        if at > 0 {
            let from: usize = sizes[..at - 1].iter().sum();
            let written = written.expect("invariant: a value was written before");
            for (row, &value) in tokens.values.chunks_exact_mut(tokens.n_columns).zip(written) {
                row[from + value as usize] = 1.0;
            }
        }
        self.tape.constant(tokens)
    }

    /// Continues with these prefixes only.
    fn select(&mut self, parents: &[usize]) {
        let n = std::mem::replace(&mut self.n, parents.len());
        match &mut self.decoding {
            Decoding::Recurrent { cell, .. } => *cell = self.tape.select_cell(*cell, parents),
            Decoding::Attending { keys, values, cell, .. } => {
                *cell = cell.map(|cell| self.tape.select_cell(cell, parents));
                // All prefixes are of the same problem.
                if n != parents.len() {
                    for var in [keys, values] {
                        let steps = self.tape.value(*var);
                        let width = steps.n_columns;
                        let of_first = steps.values.chunks_exact(n * width).map(|step| &step[..width]);
                        let repeated = of_first.flat_map(|row| row.repeat(parents.len())).collect();
                        *var = self.tape.constant(NumberRows { n_columns: width, values: repeated });
                    }
                }
            }
            Decoding::Begun | Decoding::Done { .. } => {}
        }
    }
}

/// Order in which an LSTM processes steps, or a constant input for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepOrder {
    Forward,
    Backward,
    Constant,
}

struct NetworkDecoder<'a> {
    run: NetworkRun<'a>,
}

impl Decoder for NetworkDecoder<'_> {
    fn next(&mut self, prefixes: &[LikelyAnswer], parents: &[usize]) -> Vec<f32> {
        let at = prefixes[0].values.len();
        if !self.run.feeds_back() {
            let scores = self.run.decode(at, None);
            let mut row = self.run.tape.value(scores).values.clone();
            log_softmax(&mut row);
            return row.repeat(prefixes.len());
        }
        self.run.select(parents);
        let written: Vec<u32> = prefixes.iter().filter_map(|prefix| prefix.values.last().copied()).collect();
        let scores = self.run.decode(at, Some(&written));
        let mut rows = self.run.tape.value(scores).clone();
        rows.values.chunks_exact_mut(rows.n_columns).for_each(log_softmax);
        rows.values
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ARCHITECTURES, Encoding, Example, Field, FieldKind, KernelParameter};
    use super::*;
    use crate::tape::gradients;

    fn example(problem: &[i64], answer: &[u32]) -> Example {
        Example { problem: problem.to_vec(), answer: answer.to_vec() }
    }

    /// Checks each weight of each architecture, with dropout, at a few positions.
    #[test]
    fn gradients_are_those_of_the_loss() {
        let field = |name: &str| Field { name: name.into(), kind: FieldKind::Integer };
        let parameter = |n: u32| KernelParameter { name: "p".into(), values: (0..n).map(|v| v.to_string()).collect() };
        let vocabulary = Vocabulary {
            fields: ["a", "b", "c", "d"].map(field).to_vec(),
            parameters: [3, 2, 4].map(parameter).to_vec(),
        };
        let examples = [
            example(&[1, 8, 3, 5], &[0, 1, 3]),
            example(&[2, 4, 3, 9], &[2, 0, 1]),
            example(&[7, 4, 6, 5], &[1, 1, 0]),
        ];
        let examples: Vec<&Example> = examples.iter().collect();
        for row in ARCHITECTURES.iter().filter(|row| row.architecture != Architecture::Chain) {
            let training = Training { n_hidden: 3, seed: 5, ..Training::default() };
            let problems = examples.iter().map(|e| e.problem.as_slice());
            let tokens = Tokens::new(Encoding::Numeric, &vocabulary, problems);
            let network = SequenceNetwork::new(row.architecture, &vocabulary, tokens, &training);
            eprintln!("{}", row.name);
            gradients::check(&network.parameters, |parameters| {
                let network = SequenceNetwork { parameters: parameters.clone(), ..network.clone() };
                let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
                let dropout = Some(DropoutMasks { share: 0.2, rng: &mut rng });
                let (fit, gradients) = training::gradients(&network, &examples, dropout);
                (fit.loss, gradients)
            });
        }
    }
}
