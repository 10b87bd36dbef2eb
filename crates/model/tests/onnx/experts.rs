//! Layers of language models in ONNX Runtime's domain, compared with sums written out here: mixtures of
//! experts, and convolutions with a state.

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tilewright_graph::onnx::NodeFile;
use tilewright_graph::op::Attribute;
use tilewright_graph::{DType, Tensor};

use crate::packed::{Drawn, Random, check, of_node, packed, port, singles};

/// Weights of all experts, as rows of numbers and as the model's constants.
struct Weights {
    rows: Vec<Vec<f64>>,
    constants: Vec<(String, Tensor)>,
}

/// Draws weights `[experts, rows, columns]`, in 4 or 8 bits in blocks of 16 or of whole rows.
fn weights(random: &mut Random, at: usize, shape: [usize; 3], bits: Option<(u32, usize)>) -> Weights {
    let [experts, n_rows, columns] = shape;
    let name = |what: &str| format!("{what}{at}");
    let Some((bits, block)) = bits else {
        let all = singles(random, experts * n_rows * columns, 0.5);
        let constants = vec![(name("w"), Tensor::from_floats(DType::F32, shape, &all))];
        return Weights { rows: all.chunks(columns).map(<[f64]>::to_vec).collect(), constants };
    };
    let size = if block == 0 { columns } else { block };
    let numbers: Vec<Vec<i64>> =
        (0..experts * n_rows).map(|_| (0..columns).map(|_| random.random_range(0..1 << bits)).collect()).collect();
    let scales = singles(random, experts * n_rows * columns / size, 0.1);
    let scale = |row: usize, column: usize| scales[row * (columns / size) + column / size];
    let number = |row: usize, column: usize| (numbers[row][column] - (1 << (bits - 1))) as f64 * scale(row, column);
    let rows = (0..experts * n_rows).map(|row| (0..columns).map(|column| number(row, column)).collect()).collect();
    let of_bytes = [experts, n_rows, columns * bits as usize / 8];
    let of_scales = if block == 0 { vec![experts, n_rows] } else { vec![experts, n_rows, columns / size] };
    let constants = vec![
        (name("w"), Tensor::from_integers(DType::U8, of_bytes, &packed(&numbers, bits))),
        (name("s"), Tensor::from_floats(DType::F32, of_scales, &scales)),
    ];
    Weights { rows, constants }
}

/// Networks of a mixture: weights `[experts, rows, columns]`, with biases if there are any.
struct Networks {
    shapes: [[usize; 3]; 2],
    weights: [Weights; 2],
    biases: Option<[Vec<f64>; 2]>,
    activation: &'static str,
}

impl Networks {
    fn product(&self, at: usize, expert: usize, x: &[f64]) -> Vec<f64> {
        let rows = expert * self.shapes[at][1]..(expert + 1) * self.shapes[at][1];
        let bias = |row: usize| self.biases.as_ref().map_or(0.0, |biases| biases[at][row]);
        let dot = |row: usize| self.weights[at].rows[row].iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        rows.map(|row| dot(row) + bias(row)).collect()
    }

    fn pass(&self, expert: usize, x: &[f64]) -> Vec<f64> {
        let swish = |x: f64, alpha: f64| x / (1.0 + (-alpha * x).exp());
        let sums = self.product(0, expert, x);
        let between: Vec<f64> = match self.activation {
            "relu" => sums.iter().map(|x| x.max(0.0)).collect(),
            "silu" => sums.iter().map(|x| swish(*x, 1.0)).collect(),
            "identity" => sums,
            _ => {
                let of = |pair: &[f64]| swish(pair[0].min(1.5), 1.5) * (pair[1].clamp(-1.5, 1.5) + 1.0);
                sums.chunks(2).map(of).collect()
            }
        };
        self.product(1, expert, &between)
    }

    /// Result of a token for the scores of the experts, of which it passes through `k`.
    fn answer(&self, x: &[f64], scores: &[f64], k: usize, is_normalized: bool) -> Vec<f64> {
        let mut best: Vec<(f64, usize)> = scores.iter().map(|score| score.exp()).zip(0..).collect();
        let all: f64 = best.iter().map(|(share, _)| share).sum();
        best.sort_by(|a, b| b.0.total_cmp(&a.0));
        best.truncate(k);
        let whole = if is_normalized { best.iter().map(|(share, _)| share).sum() } else { all };
        let mut y = vec![0.0; x.len()];
        for (share, expert) in best {
            y.iter_mut().zip(self.pass(expert, x)).for_each(|(y, own)| *y += share / whole * own);
        }
        y
    }
}

fn mixture(seed: u64) -> Drawn {
    let random = &mut Random::seed_from_u64(seed);
    let bits = random.random_bool(0.6).then(|| (*[4, 8].choose(random).unwrap(), *[0, 16].choose(random).unwrap()));
    let [hidden, inner] = [0; 2].map(|_| 16 * random.random_range(1..4));
    let experts: usize = random.random_range(2..7);
    let k = random.random_range(1..=experts.min(3));
    let tokens = *[1, 2, 9, 24, 29].choose(random).unwrap();
    let activation = *["relu", "silu", "identity", "swiglu"].choose(random).unwrap();
    let parts = if activation == "swiglu" { 2 } else { 1 };
    let [is_normalized, has_bias] = [0; 2].map(|_| random.random_bool(0.5));
    let x = singles(random, tokens * hidden, 1.0);
    let router = singles(random, hidden * experts, 1.0);
    let shapes = [[experts, parts * inner, hidden], [experts, hidden, inner]];
    let weights = [0, 1].map(|at| weights(random, at, shapes[at], bits));
    let biases = has_bias.then(|| [0, 1].map(|at| singles(random, experts * shapes[at][1], 1.0)));
    let networks = Networks { shapes, weights, biases, activation };
    let score = |x: &[f64], expert: usize| (0..hidden).map(|i| x[i] * router[i * experts + expert]).sum::<f64>();
    let answer = |x: &[f64]| {
        let scores: Vec<f64> = (0..experts).map(|expert| score(x, expert)).collect();
        networks.answer(x, &scores, k, is_normalized)
    };
    let expected = x.chunks(hidden).flat_map(answer).collect();
    let inputs = match (bits.is_some(), has_bias) {
        (true, true) => "x scores w0 s0 b0 w1 s1 b1",
        (true, false) => "x scores w0 s0  w1 s1",
        (false, true) => "x scores w0 b0 w1 b1",
        (false, false) => "x scores w0  w1",
    };
    let inputs: Vec<&str> = inputs.split(' ').collect();
    let mut attributes = vec![("k", k as i64), ("normalize_routing_weights", i64::from(is_normalized))];
    attributes.extend((parts == 2).then_some(("swiglu_fusion", 1)));
    attributes.extend(bits.map(|(bits, _)| ("expert_weight_bits", i64::from(bits))));
    attributes.extend(bits.filter(|(_, block)| *block > 0).map(|(_, block)| ("block_size", block as i64)));
    let (op, shape) = (if bits.is_some() { "QMoE" } else { "MoE" }, [tokens, hidden]);
    let mut file = of_node(op, &inputs, &attributes, port("x", DType::F32, &shape), &shape);
    let own = &mut file.nodes[0].attributes;
    own.push(("activation_type".to_owned(), Attribute::Text(activation.to_owned())));
    for (name, x) in [("activation_alpha", 1.5), ("activation_beta", 1.0), ("swiglu_limit", 1.5)] {
        own.push((name.to_owned(), Attribute::Float(x)));
    }
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let (inputs, outputs) = (names(&["x", "router"]), names(&["scores"]));
    file.nodes.insert(0, NodeFile { op: "MatMul".to_owned(), inputs, outputs, ..NodeFile::default() });
    file.weights = vec![("router".to_owned(), Tensor::from_floats(DType::F32, [hidden, experts], &router))];
    for (at, biases) in networks.biases.iter().flatten().enumerate() {
        file.weights.push((format!("b{at}"), Tensor::from_floats(DType::F32, [experts, shapes[at][1]], biases)));
    }
    file.weights.extend(networks.weights.into_iter().flat_map(|own| own.constants));
    let text = format!("{op} {bits:?} {experts} experts, {k} of {tokens} tokens, {hidden} {inner} {activation}");
    Drawn { text, file, input: ("x", Tensor::from_floats(DType::F32, shape, &x)), expected }
}

#[test]
fn tokens_pass_through_their_experts() {
    (0..40).map(mixture).for_each(check);
}

/// Result of a convolution of two channels, or its next state.
fn convolution(seed: u64) -> Drawn {
    let random = &mut Random::seed_from_u64(seed);
    let [new, taps] = [random.random_range(1..5), random.random_range(2..5)];
    let [is_last, is_next] = [0; 2].map(|_| random.random_bool(0.5));
    let dilation: usize = random.random_range(1..3);
    let before = (taps - 1) * dilation;
    let [x, state, w, b] = [new, before, taps, 1].map(|n| singles(random, 2 * n, 1.0));
    let all = |c: usize| [&state[c * before..][..before], &x[c * new..][..new]].concat();
    let n = if is_next { before } else { new };
    let number = |c: usize, at: usize| {
        let all = all(c);
        let sum = (0..taps).map(|tap| w[c * taps + tap] * all[at + tap * dilation]).sum::<f64>() + b[c];
        sum / (1.0 + (-sum).exp())
    };
    let of = |c: usize, at: usize| if is_next { all(c)[new + at] } else { number(c, at) };
    // With channels last, each position has its channels together.
    let ordered = |n: usize, of: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
        (0..2 * n).map(|i| if is_last { of(i % 2, i / 2) } else { of(i / n, i % n) }).collect()
    };
    let shape = |n: usize| if is_last { [1, n, 2] } else { [1, 2, n] };
    let tensor = |n: usize, own: &[f64]| Tensor::from_floats(DType::F32, shape(n), &ordered(n, &|c, i| own[c * n + i]));
    let attributes = [("dilation", dilation as i64), ("channels_last", i64::from(is_last))];
    let inputs = ["x", "w", "b", "state"];
    let mut file = of_node("CausalConvWithState", &inputs, &attributes, port("x", DType::F32, &shape(new)), &shape(n));
    let node = &mut file.nodes[0];
    node.attributes.push(("activation".to_owned(), Attribute::Text("silu".to_owned())));
    node.outputs = if is_next { vec!["rest".to_owned(), "y".to_owned()] } else { vec!["y".to_owned()] };
    file.weights = vec![
        ("w".to_owned(), Tensor::from_floats(DType::F32, [2, 1, taps], &w)),
        ("b".to_owned(), Tensor::from_floats(DType::F32, [2], &b)),
        ("state".to_owned(), tensor(before, &state)),
    ];
    let text = format!("{new} positions, {taps} taps, {dilation} apart, last {is_last}, next {is_next}");
    Drawn { text, file, input: ("x", tensor(new, &x)), expected: ordered(n, &of) }
}

#[test]
fn convolutions_go_on_from_their_state() {
    (0..16).map(convolution).for_each(check);
}
