//! Attention operators, compared with sums written out here.

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Graph, SplitMix64, Tensor, evaluate, specialise};
use tilewright_ir::Target;
use tilewright_model::{Compiled, Runner, Step, lower};
use tilewright_runtime::SharedPool;

use crate::blocks::graph_at;
use crate::{compile_quickly, compiled_for, guess};

type Draw = rand_xoshiro::Xoshiro256PlusPlus;

/// Rotates pairs of a head's numbers by the angles of a position, `1 / 100^(i / n)` per step.
pub(crate) fn turned(x: &mut [f64], position: usize, interleaved: bool) {
    let half = x.len() / 2;
    for i in 0..half {
        let (sine, cosine) = (position as f64 * 100f64.powf(-(i as f64) / half as f64)).sin_cos();
        let [a, b] = if interleaved { [2 * i, 2 * i + 1] } else { [i, i + half] };
        (x[a], x[b]) = (x[a] * cosine - x[b] * sine, x[a] * sine + x[b] * cosine);
    }
}

/// Tables of cosines and sines of the first positions.
pub(crate) fn tables(n: usize, half: usize) -> [Tensor; 2] {
    let angle = |at: usize| (at / half) as f64 * 100f64.powf(-((at % half) as f64) / half as f64);
    [f64::cos, f64::sin]
        .map(|f| Tensor::from_floats(DType::F32, [n, half], &(0..n * half).map(|at| f(angle(at))).collect::<Vec<_>>()))
}

/// Attention of one query over keys and values of its head; scores have the soft cap `cap`, unless it is 0.
pub(crate) fn attended(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64, cap: f64, added: &[f64]) -> Vec<f64> {
    let score = |(key, added): (&&[f64], &f64)| {
        let product = q.iter().zip(*key).map(|(a, b)| a * b).sum::<f64>() * scale;
        if cap > 0.0 { (product / cap).tanh() * cap + added } else { product + added }
    };
    let powers: Vec<f64> = keys.iter().zip(added).map(score).map(f64::exp).collect();
    let all: f64 = powers.iter().sum();
    (0..values[0].len()).map(|i| powers.iter().zip(values).map(|(p, v)| p * v[i]).sum::<f64>() / all).collect()
}

/// Random attention with a cache: its sizes and attributes.
struct Drawn {
    batch: usize,
    new: usize,
    past: usize,
    room: usize,
    heads: [usize; 2],
    depth: usize,
    packed: bool,
    rotary: bool,
    interleaved: bool,
    window: i64,
    cap: f64,
    scale: Option<f64>,
    bias: bool,
    sink: Sink,
}

/// Number whose exponential the softmax of each head adds to its sum.
#[derive(Clone, Copy, PartialEq)]
enum Sink {
    None,
    Zero,
    Given,
}

impl Drawn {
    fn new(seed: u64) -> Drawn {
        let random = &mut Draw::seed_from_u64(seed);
        let n_kv = random.random_range(1..4);
        let new = *[1, 1, 2, 5].choose(random).unwrap();
        let past = *[0, 1, 6, 19].choose(random).unwrap();
        Drawn {
            batch: random.random_range(1..3),
            new,
            past,
            room: past + if random.random_bool(0.3) { new + random.random_range(0..3) } else { 0 },
            heads: [n_kv * random.random_range(1..4), n_kv],
            depth: 2 * random.random_range(1..9),
            packed: random.random_bool(0.3),
            rotary: random.random_bool(0.7),
            interleaved: random.random_bool(0.4),
            window: *[-1, -1, 1, 4].choose(random).unwrap(),
            cap: *[0.0, 0.0, 1.5].choose(random).unwrap(),
            scale: random.random_bool(0.3).then_some(0.25),
            bias: random.random_bool(0.3),
            sink: *[Sink::None, Sink::None, Sink::Zero, Sink::Given].choose(random).unwrap(),
        }
    }

    fn graph(&self) -> Graph {
        let Drawn { batch, new, past, room, heads: [h, n], depth: d, .. } = *self;
        let q = if self.packed { (h + 2 * n) * d } else { h * d };
        let kv =
            if self.packed { String::new() } else { format!("k[{batch} {new} {0}], v[{batch} {new} {0}], ", n * d) };
        let bias = if self.bias { format!(", bias[1 {h} {new} {}]", past + new) } else { String::new() };
        let sink = if self.sink == Sink::Given { format!(", sink[{h}]") } else { String::new() };
        let cache = format!("pk[{batch} {n} {room} {d}], pv[{batch} {n} {room} {d}]");
        let inputs = format!("q[{batch} {new} {q}], {kv}{cache}{bias}{sink}");
        let all = room.max(past + new);
        let outputs = format!("y[{batch} {new} {}], ok[{batch} {n} {all} {d}], ov[{batch} {n} {all} {d}]", h * d);
        let mut named = format!(
            "num_heads={h},kv_num_heads={n},do_rotary={},rotary_interleaved={},local_window_size={},softcap={:.1}",
            u8::from(self.rotary),
            u8::from(self.interleaved),
            self.window,
            self.cap
        );
        if let Some(scale) = self.scale {
            named += &format!(",scale={scale}");
        }
        if self.sink == Sink::Zero {
            named += ",smooth_softmax=1";
        }
        let [k, v] = if self.packed { ["", ""] } else { ["k", "v"] };
        let tables = if self.rotary { "cos, sin" } else { ", " };
        let rest = match (self.bias, self.sink) {
            (true, Sink::Given) => ", , bias, sink",
            (true, _) => ", , bias",
            (false, Sink::Given) => ", , , sink",
            (false, _) => "",
        };
        let call =
            format!("com.microsoft.GroupQueryAttention[{named}](q, {k}, {v}, pk, pv, last, total, {tables}{rest})");
        let mut statements = String::new();
        if self.rotary {
            let half = d / 2;
            statements += &format!("cos = angles[cos {half}]\nsin = angles[sin {half}]\n");
        }
        let last = vec![(past + new - 1).to_string(); batch].join(" ");
        statements += &format!("last = singles[{last}]\ntotal = single[{}]\ny, ok, ov = {call}", past + new);
        graph_at(17, &inputs, &outputs, &statements)
    }

    /// Computes the results, and the keys and values without padding, from the inputs by name.
    fn expected(&self, given: &[(String, Tensor)]) -> [Vec<f64>; 3] {
        let Drawn { batch, new, past, room, heads: [h, n], depth: d, .. } = *self;
        let of = |name: &str| given.iter().find(|(own, _)| own == name).map(|(_, x)| x.floats());
        let q = of("q").unwrap();
        let (k, v, [pk, pv], bias) = (of("k"), of("v"), ["pk", "pv"].map(|name| of(name).unwrap()), of("bias"));
        let row = q.len() / (batch * new);
        let head = |own: &Option<Vec<f64>>, first: usize, b: usize, s: usize, head: usize| match own {
            Some(own) => own[((b * new + s) * n + head) * d..][..d].to_vec(),
            None => q[(b * new + s) * row + (first + head) * d..][..d].to_vec(),
        };
        let (mut keys, mut values, mut y) = (Vec::new(), Vec::new(), vec![0.0; batch * new * h * d]);
        for b in 0..batch {
            for j in 0..n {
                for t in 0..past {
                    keys.push(pk[((b * n + j) * room + t) * d..][..d].to_vec());
                    values.push(pv[((b * n + j) * room + t) * d..][..d].to_vec());
                }
                for s in 0..new {
                    let mut key = head(&k, h, b, s, j);
                    if self.rotary {
                        turned(&mut key, past + s, self.interleaved);
                    }
                    keys.push(key);
                    values.push(head(&v, h + n, b, s, j));
                }
            }
            for (s, i) in (0..new).flat_map(|s| (0..h).map(move |i| (s, i))) {
                let mut query = q[(b * new + s) * row + i * d..][..d].to_vec();
                if self.rotary {
                    turned(&mut query, past + s, self.interleaved);
                }
                let last = past + s + 1;
                let first = if self.window > 0 { last.saturating_sub(self.window as usize) } else { 0 };
                let of_head = (b * n + i / (h / n)) * (past + new);
                let seen = of_head + first..of_head + last;
                let [keys, values] =
                    [&keys, &values].map(|all| all[seen.clone()].iter().map(Vec::as_slice).collect::<Vec<_>>());
                let at = (i * new + s) * (past + new);
                let added = bias.as_ref().map_or(vec![0.0; last], |bias| bias[at..at + last].to_vec());
                let scale = self.scale.unwrap_or(1.0 / (d as f64).sqrt());
                let sink = match self.sink {
                    Sink::None => None,
                    Sink::Zero => Some(0.0),
                    Sink::Given => Some(of("sink").unwrap()[i]),
                };
                // It is the score of a key without a value.
                let zeros = vec![0.0; d];
                let [keys, values] =
                    [keys, values].map(|all| all.into_iter().chain(sink.map(|_| &zeros[..])).collect::<Vec<_>>());
                let added = [&added[first..], sink.as_slice()].concat();
                let found = attended(&query, &keys, &values, scale, self.cap, &added);
                y[((b * new + s) * h + i) * d..][..d].copy_from_slice(&found);
            }
        }
        [y, keys.concat(), values.concat()]
    }
}

#[test]
fn grouped_attention_is_that_of_each_head() {
    for seed in 0..60 {
        let drawn = Drawn::new(seed);
        check(seed, &drawn, &drawn.graph());
    }
}

/// Attention whose heads have separate keys, with biases of queries, keys and values.
#[test]
fn attention_of_many_heads_has_a_past() {
    for seed in 0..8 {
        let drawn = Drawn::new(seed);
        let h = drawn.heads[0];
        let past = drawn.past.max(1);
        let (rotary, packed) = (false, false);
        let drawn =
            Drawn { heads: [h, h], past, room: past, packed, rotary, window: -1, cap: 0.0, scale: None, ..drawn };
        let drawn = Drawn { sink: Sink::None, ..drawn };
        let Drawn { batch, new, depth: d, .. } = drawn;
        let [one, all] = [h * d, past + new];
        let bias = if drawn.bias { format!(", bias[1 {h} {new} {all}]") } else { String::new() };
        let cache = format!("pk[{batch} {h} {past} {d}], pv[{batch} {h} {past} {d}]{bias}");
        let row = format!("[{batch} {new} {one}]");
        let given = format!("q{row}, k{row}, v{row}, {cache}");
        let made = format!("y{row}, ok[{batch} {h} {all} {d}], ov[{batch} {h} {all} {d}]");
        let more = if drawn.bias { "bias" } else { "" };
        let text = |qkv: &str| {
            let named = format!("num_heads={h},unidirectional=1");
            format!("y, ok, ov = com.microsoft.MultiHeadAttention[{named}]({qkv}, , {more}, pk, pv)")
        };
        check(seed, &drawn, &graph_at(17, &given, &made, &text("q, k, v, ")));
        // The bias is subtracted beforehand.
        let parts =
            ["q", "k", "v"].map(|x| format!("{x}0 = Slice(all, at{x}, to{x})\n{x}1 = Sub({x}, {x}0)\n")).concat();
        let places = [("q", 0), ("k", one), ("v", 2 * one)];
        let places = places.map(|(x, at)| format!("at{x} = numbers[{at}]\nto{x} = numbers[{}]\n", at + one)).concat();
        let biased = format!("all = weights[{}]\n{places}{parts}{}", 3 * one, text("q1, k1, v1, all"));
        check(seed, &drawn, &graph_at(17, &given, &made, &biased));
    }
}

/// Sizes of a fused attention of ONNX Runtime's, with the form of its mask.
struct Fused {
    batch: usize,
    heads: usize,
    depth: usize,
    new: usize,
    past: usize,
    /// Dimensions of the mask: 0 without one, 1 for numbers of keys.
    rank: usize,
    is_causal: bool,
    /// Whether it computes in f16.
    is_half: bool,
}

impl Fused {
    fn graph(&self) -> Graph {
        let Fused { batch, heads, depth, new, past, rank, is_causal, is_half } = *self;
        let (width, all) = (heads * depth, past + new);
        let mask = [String::new(), format!("{batch}"), format!("{batch} {all}"), format!("{batch} {new} {all}")];
        let mut inputs = format!("x[{batch} {new} {width}], w[{width} {0}], b[{0}]", 3 * width);
        let mut outputs = format!("y[{batch} {new} {width}]");
        let (mut made, mut given) = ("y", "x, w, b".to_owned());
        if rank > 0 {
            inputs += &format!(", lengths[{}]", mask[rank]);
        }
        given += if rank > 0 { ", lengths" } else { ", " };
        if past > 0 {
            inputs += &format!(", past[2 {batch} {heads} {past} {depth}]");
            outputs += &format!(", present[2 {batch} {heads} {all} {depth}]");
            (made, given) = ("y, present", given + ", past");
        }
        let causal = u8::from(is_causal);
        let mut call = format!("com.microsoft.Attention[num_heads={heads},unidirectional={causal}]({given})");
        if is_half {
            call = ["x", "w", "b"].map(|name| format!("{name}h = Cast[to=10]({name})\n")).concat()
                + &format!("yh = {}\ny = Cast[to=1](yh)", call.replace("(x, w, b", "(xh, wh, bh"));
            return graph_at(17, &inputs, &outputs, &call);
        }
        graph_at(17, &inputs, &outputs, &format!("{made} = {call}"))
    }

    /// Result, and keys and values of the present.
    fn expected(&self, given: &[(String, Tensor)]) -> [Vec<f64>; 2] {
        let Fused { batch, heads, depth, new, past, rank, is_causal, .. } = *self;
        let (width, all) = (heads * depth, past + new);
        let numbers = |name: &str| given.iter().find(|(own, _)| own == name).map(|(_, x)| x.floats());
        let [x, w, b] = ["x", "w", "b"].map(|name| numbers(name).unwrap());
        let mask = numbers("lengths").unwrap_or_default();
        let row = |at: usize| -> Vec<f64> {
            let of_column = |j: usize| (0..width).map(|i| x[at * width + i] * w[i * 3 * width + j]).sum::<f64>() + b[j];
            (0..3 * width).map(of_column).collect()
        };
        let rows: Vec<Vec<f64>> = (0..batch * new).map(row).collect();
        let mut present = Vec::new();
        for (part, b, h, s) in places([2, batch, heads, all]) {
            let of_past = (((part * batch + b) * heads + h) * past + s) * depth;
            present.push(match s.checked_sub(past) {
                None => numbers("past").unwrap()[of_past..][..depth].to_vec(),
                Some(s) => rows[b * new + s][(1 + part) * width + h * depth..][..depth].to_vec(),
            });
        }
        let mut y = Vec::new();
        for (b, s, h, _) in places([batch, new, heads, 1]) {
            let [keys, values] = [0, 1].map(|part| {
                let first = ((part * batch + b) * heads + h) * all;
                present[first..first + all].iter().map(Vec::as_slice).collect::<Vec<_>>()
            });
            let is_seen = |key: usize| match rank {
                0 => true,
                1 => (key as f64) < mask[b],
                2 => mask[b * all + key] > 0.0,
                _ => mask[(b * new + s) * all + key] > 0.0,
            };
            let added = |key: usize| match is_causal && key > past + s {
                true => f64::NEG_INFINITY,
                false if is_seen(key) => 0.0,
                false => -10000.0,
            };
            let added: Vec<f64> = (0..all).map(added).collect();
            let query = &rows[b * new + s][h * depth..][..depth];
            y.extend(attended(query, &keys, &values, 1.0 / (depth as f64).sqrt(), 0.0, &added));
        }
        [y, present.concat()]
    }
}

/// All places in four dimensions, in order.
fn places(sizes: [usize; 4]) -> Vec<(usize, usize, usize, usize)> {
    let [_, b, c, d] = sizes;
    (0..sizes.iter().product()).map(|at: usize| (at / (b * c * d), at / (c * d) % b, at / d % c, at % d)).collect()
}

/// Attentions with their product, causal or not, with every form of mask, and with a past.
#[test]
fn fused_attentions_have_masks_and_a_past() {
    for seed in 0..32 {
        let random = &mut Draw::seed_from_u64(seed);
        let (rank, is_causal) = (seed as usize % 4, seed / 4 % 2 == 1);
        let past = if seed >= 16 { random.random_range(1..4) } else { 0 };
        let [batch, heads, depth, new] = [3, 3, 4, 6].map(|most| random.random_range(1..=most));
        let is_half = [2, 7, 8].contains(&seed);
        let fused = Fused { batch, heads, depth: 2 * depth, new, past, rank, is_causal, is_half };
        check_fused(seed, &fused, &host::target(), random);
    }
}

/// Scores that exceed the level 2 cache, which are computed in blocks of heads or of rows.
#[test]
fn scores_beyond_the_cache_are_computed_in_blocks() {
    let sizes = [([6, 20], 2 * 20 * 20), ([2, 301], 301 * 151), ([1, 700], 700 * 150)];
    for (seed, ([heads, new], n_scores)) in (0..).zip(sizes.into_iter().cycle().take(8)) {
        let (rank, is_causal) = (seed as usize % 4, seed / 4 % 2 == 1);
        let fused = Fused { batch: 1, heads, depth: 4, new, past: 0, rank, is_causal, is_half: false };
        let target = Target { l2_bytes: 4 * n_scores, ..host::target() };
        let graph = specialise(&fused.graph(), &Bindings::default()).graph;
        let divided = lower(&graph, false, &target, 1).unwrap();
        assert!(divided.steps.iter().any(|step| matches!(step, Step::Sequence(_))), "{seed}");
        check_fused(seed, &fused, &target, &mut Draw::seed_from_u64(seed));
    }
}

/// Attention of several sequences, which is computed of one after the other.
#[test]
fn scores_of_several_sequences_are_computed_apart() {
    for seed in 0..8 {
        let (rank, is_causal) = (seed as usize % 4, seed >= 4);
        let fused = Fused { batch: 3, heads: 3, depth: 4, new: 20, past: 0, rank, is_causal, is_half: false };
        let target = Target { l2_bytes: 4 * 3 * 20 * 20, ..host::target() };
        let divided = lower(&specialise(&fused.graph(), &Bindings::default()).graph, false, &target, 1).unwrap();
        let outputs = divided.net.nodes.iter().flat_map(|node| &node.outputs);
        assert!(outputs.map(|id| divided.net.value(*id).n_elements()).all(|n| n < 3 * 3 * 20 * 20), "{seed}");
        check_fused(seed, &fused, &target, &mut Draw::seed_from_u64(seed));
    }
}

/// Each block reads its own part of what is added to the scores.
#[test]
fn biases_of_heads_are_divided_like_the_scores() {
    for (bias, width) in [("4 260 260", 8), ("1 260 260", 1), ("260 1", 8), ("4 1 260", 3)] {
        let inputs = format!("q[4 260 {width}], k[4 260 {width}], v[4 260 {width}], bias[{bias}]");
        let statements = "k0 = Transpose[perm=0 2 1](k)
             s = MatMul(q, k0)
             a = Add(s, bias)
             p = Softmax[axis=-1](a)
             y = MatMul(p, v)";
        let special =
            specialise(&graph_at(17, &inputs, &format!("y[4 260 {width}]"), statements), &Bindings::default());
        assert!(special.problems.is_empty(), "{bias}: {}", special.problems[0]);
        let (graph, target) = (special.graph, Target { l2_bytes: 4 * 260 * 135, ..host::target() });
        let divided = lower(&graph, false, &target, 1).unwrap();
        assert!(divided.steps.iter().any(|step| matches!(step, Step::Sequence(_))), "{bias}");
        let mut random = SplitMix64::new(7);
        let given: Vec<(&str, Tensor)> = graph
            .inputs
            .iter()
            .map(|id| (graph.value(*id).name.as_str(), random.input(graph.value(*id).ty.as_ref().unwrap())))
            .collect();
        let compiled = compiled_here(divided);
        let mut runner = Runner::new(&compiled, &SharedPool::new(2).unwrap()).unwrap();
        given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
        runner.run().unwrap();
        let [found, expected] = [&runner.outputs()[0].1, &evaluate(&graph, &given).unwrap()[0]].map(Tensor::floats);
        let far = found.iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(far <= 1e-5, "{bias}: {far:e}");
    }
}

/// Compiles what was lowered for a machine with other caches for this one.
fn compiled_here(lowered: tilewright_model::Fused) -> Compiled {
    let host = host::target();
    compile_quickly(lowered, &host, &|workload| guess(workload, &host)).unwrap()
}

/// Checks kernels, lowered for a target, and the reference, on random numbers.
fn check_fused(seed: u64, fused: &Fused, target: &Target, random: &mut Draw) {
    let Fused { new, past, rank, is_half, .. } = *fused;
    let special = specialise(&fused.graph(), &Bindings::default());
    assert!(special.problems.is_empty(), "{seed}: {}", special.problems[0]);
    let graph = special.graph;
    let mut numbers = SplitMix64::new(seed);
    let given: Vec<(String, Tensor)> = graph
        .inputs
        .iter()
        .map(|id| {
            let (name, ty) = (graph.value(*id).name.clone(), graph.value(*id).ty.as_ref().unwrap());
            let all = past + new;
            // The first key is seen, so that sums are not of -10000 alone.
            let mut draw = |at: usize| match rank {
                1 => random.random_range(1..=all) as f64,
                _ if at.is_multiple_of(all) => 1.0,
                _ => f64::from(random.random_range(0..2)),
            };
            let x = match name == "lengths" {
                true => Tensor::from_floats(
                    ty.dtype,
                    &ty.shape[..],
                    &(0..ty.shape.iter().product()).map(&mut draw).collect::<Vec<_>>(),
                ),
                false => numbers.input(ty),
            };
            (name, x)
        })
        .collect();
    let expected = fused.expected(&given);
    let compiled = compiled_here(lower(&graph, false, target, 1).unwrap());
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    let found: Vec<Tensor> = runner.outputs().into_iter().map(|(_, x)| x).collect();
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    for (who, found) in [("kernels", found), ("reference", evaluate(&graph, &named).unwrap())] {
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let pairs = found.floats().into_iter().zip(expected);
            let far = pairs.map(|(x, y)| (x - y).abs() / y.abs().max(1.0)).fold(0.0, f64::max);
            let most = if is_half { 2e-2 } else { 2e-5 };
            assert!(found.n_elements() == expected.len() && far <= most, "{seed}, {who}, output {at}: {far:e}");
        }
    }
}

/// Checks kernels and the reference of a graph on what was drawn.
fn check(seed: u64, drawn: &Drawn, graph: &Graph) {
    let special = specialise(graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{seed}: {}", special.problems[0]);
    let graph = special.graph;
    let mut random = SplitMix64::new(seed);
    let given: Vec<(String, Tensor)> = graph
        .inputs
        .iter()
        .map(|id| (graph.value(*id).name.clone(), random.input(graph.value(*id).ty.as_ref().unwrap())))
        .collect();
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    let mut all = given.clone();
    // Unused inputs are removed.
    for name in ["pk", "pv"].into_iter().filter(|name| !given.iter().any(|(own, _)| own == name)) {
        let Drawn { batch, room, heads: [_, n], depth, .. } = *drawn;
        all.push((name.to_owned(), Tensor::from_floats(DType::F32, [batch, n, room, depth], &[])));
    }
    let expected = drawn.expected(&all);
    let compiled = compiled_for(&graph, &host::target()).unwrap_or_else(|error| panic!("{seed}: {error}"));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    let found: Vec<Tensor> = runner.outputs().into_iter().map(|(_, x)| x).collect();
    let reference = evaluate(&graph, &named).unwrap();
    for (who, found) in [("kernels", &found), ("reference", &reference)] {
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let (mut numbers, shape) = (found.floats(), found.shape());
            if at > 0 {
                // Without the padding of the cache.
                let n_head = (drawn.past + drawn.new) * drawn.depth;
                let heads = numbers.chunks(shape[2] * shape[3]);
                numbers = heads.flat_map(|head| head[..n_head].to_vec()).collect();
            }
            assert_eq!(numbers.len(), expected.len(), "{seed}, {who}, output {at}");
            let is_near = numbers.iter().zip(expected).all(|(x, y)| (x - y).abs() <= 1e-5 * y.abs().max(1.0));
            assert!(is_near, "{seed}, {who}, output {at}: {numbers:?}, and should be {expected:?}");
        }
    }
}

#[test]
fn lengths_of_their_own_and_unknown_ones_are_refused() {
    let refused = |lengths: &str, last: &str| {
        let inputs = format!("q[2 1 8], k[2 1 4], v[2 1 4], pk[2 1 3 4], pv[2 1 3 4]{lengths}");
        let statements = format!(
            "{last}
             total = single[4]
             y, ok, ov = com.microsoft.GroupQueryAttention[num_heads=2,kv_num_heads=1](q, k, v, pk, pv, last, total)"
        );
        let graph = graph_at(17, &inputs, "y[2 1 8]", &statements);
        specialise(&graph, &Bindings::default()).problems[0].to_string()
    };
    let said = refused("", "last = singles[3 2]");
    assert!(said.contains("sequences of a batch with lengths of their own are not supported"), "{said}");
    let said = refused(", lengths[2]", "last = Identity(lengths)");
    assert!(said.contains("--set lengths=VALUE") && said.contains("GroupQueryAttention"), "{said}");
    let said = refused("", "last = singles[9 9]");
    assert!(said.contains("lengths of their own"), "{said}");
}
