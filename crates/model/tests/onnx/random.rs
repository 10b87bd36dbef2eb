//! Random graphs of elementwise functions, moves and products over tensors with many dimensions of size 1:
//! they become kernels in bounded time, whose results agree with the reference.

use std::sync::mpsc;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, SplitMix64, Tensor, evaluate, onnx, specialise};
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::common::{agree, no_files};
use crate::compiled;

/// Time limit for all graphs of a test.
const MOST: Duration = Duration::from_secs(200);

/// Writer of a graph, node by node.
struct Writer {
    random: Xoshiro256PlusPlus,
    file: ModelFile,
    /// Values computed so far, with shapes.
    values: Vec<(String, Vec<usize>)>,
}

impl Writer {
    fn new(seed: u64) -> Writer {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let shape: Vec<usize> = (0..random.random_range(1..5)).map(|_| dim(&mut random)).collect();
        let inputs = vec![port("x", &shape)];
        let (name, opset) = ("random".to_owned(), 17);
        let file = ModelFile { name, opset, inputs, ..ModelFile::default() };
        Writer { random, file, values: vec![("x".to_owned(), shape)] }
    }

    /// Draws a value, most likely the last one.
    fn any(&mut self) -> (String, Vec<usize>) {
        let back = self.random.random_range(0..4_usize).saturating_sub(2).min(self.values.len() - 1);
        self.values[self.values.len() - 1 - back].clone()
    }

    fn constant(&mut self, tensor: Tensor) -> String {
        let name = format!("w{}", self.file.weights.len());
        self.file.weights.push((name.clone(), tensor));
        name
    }

    fn weights(&mut self, shape: &[usize]) -> String {
        let tensor = SplitMix64::new(self.random.random()).tensor(shape, -0.9, 0.9);
        self.constant(tensor)
    }

    fn push(&mut self, op: &str, inputs: &[&str], attributes: &[(&str, Attribute)], shape: Vec<usize>) {
        let name = format!("v{}", self.file.nodes.len());
        self.file.nodes.push(NodeFile {
            op: op.to_owned(),
            inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
            outputs: vec![name.clone()],
            attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            ..NodeFile::default()
        });
        self.values.push((name, shape));
    }

    /// Adds a node of some kind.
    fn step(&mut self) {
        let (x, shape) = self.any();
        let rank = shape.len();
        match self.random.random_range(0..11) {
            0..3 => {
                let of = ["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softsign"][self.random.random_range(0..6)];
                self.push(of, &[&x], &[], shape);
            }
            3 | 4 => {
                // With another tensor, or with constants that broadcast.
                let (mut y, mut other) = self.any();
                if self.random.random_bool(0.5) || broadcast(&shape, &other).is_none() {
                    let kept = self.random.random_range(0..=rank);
                    other = shape[kept..].iter().map(|&n| if self.random.random_bool(0.3) { 1 } else { n }).collect();
                    y = self.weights(&other);
                }
                let out = broadcast(&shape, &other).expect("it was checked");
                let of = ["Add", "Mul", "Sub", "Max"][self.random.random_range(0..4)];
                self.push(of, &[&x, &y], &[], out);
            }
            5 => {
                let axes: Vec<i64> = (0..rank).filter(|&d| shape[d] == 1).map(|d| d as i64).collect();
                let axes: Vec<i64> = axes.into_iter().filter(|_| self.random.random_bool(0.7)).collect();
                if !axes.is_empty() {
                    let list = self.constant(Tensor::vector(&axes));
                    let out = (0..rank).filter(|&d| !axes.contains(&(d as i64))).map(|d| shape[d]).collect();
                    self.push("Squeeze", &[&x, &list], &[], out);
                }
            }
            6 if rank < 5 => {
                let at = self.random.random_range(0..=rank);
                let list = self.constant(Tensor::vector(&[at as i64]));
                let mut out = shape;
                out.insert(at, 1);
                self.push("Unsqueeze", &[&x, &list], &[], out);
            }
            7 => {
                let mut order: Vec<usize> = (0..rank).collect();
                (1..rank).for_each(|at| order.swap(at, self.random.random_range(0..=at)));
                let out = order.iter().map(|&d| shape[d]).collect();
                let order = order.into_iter().map(|d| d as i64).collect();
                self.push("Transpose", &[&x], &[("perm", Attribute::Ints(order))], out);
            }
            8 => {
                let at = self.random.random_range(0..=rank);
                let out = vec![shape[..at].iter().product(), shape[at..].iter().product()];
                self.push("Flatten", &[&x], &[("axis", Attribute::Int(at as i64))], out);
            }
            9 if rank >= 2 => {
                let n = dim(&mut self.random);
                let w = self.weights(&[shape[rank - 1], n]);
                let mut out = shape;
                out[rank - 1] = n;
                self.push("MatMul", &[&x, &w], &[], out);
            }
            10 if rank > 0 => {
                let axis = self.random.random_range(0..rank);
                let mut out = shape;
                out[axis] = 1;
                self.push("ReduceMax", &[&x], &[("axes", Attribute::Ints(vec![axis as i64]))], out);
            }
            _ => {}
        }
    }

    /// Returns the file, with the last value, and possibly an earlier one, as outputs.
    fn done(mut self) -> ModelFile {
        let mut outputs = vec![self.values.len() - 1];
        let has_more = self.random.random_bool(0.3);
        outputs.extend(self.values.len().checked_sub(3).filter(|_| has_more));
        outputs.retain(|&at| at > 0);
        self.file.outputs = outputs.iter().map(|&at| port(&self.values[at].0, &self.values[at].1)).collect();
        self.file
    }
}

fn dim(random: &mut Xoshiro256PlusPlus) -> usize {
    [1, 1, 1, 2, 3][random.random_range(0..5)]
}

fn port(name: &str, shape: &[usize]) -> GraphPort {
    GraphPort { name: name.to_owned(), dtype: DType::F32, dims: shape.iter().map(|&n| Dim::Size(n)).collect() }
}

fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let dim = |shape: &[usize], d: usize| (d + shape.len()).checked_sub(rank).map_or(1, |at| shape[at]);
    let both = |d: usize| match (dim(a, d), dim(b, d)) {
        (n, 1) | (1, n) => Some(n),
        (m, n) => (m == n).then_some(n),
    };
    (0..rank).map(both).collect()
}

/// Formats a file as lines, for messages.
fn shown(file: &ModelFile) -> String {
    let list =
        |of: &[(String, Tensor)]| of.iter().map(|(name, x)| format!("{name} {x:?}")).collect::<Vec<_>>().join(", ");
    let mut lines = vec![format!("{:?}, {}", file.inputs, list(&file.weights))];
    lines.extend(
        file.nodes
            .iter()
            .map(|node| format!("{:?} = {}{:?}({:?})", node.outputs, node.op, node.attributes, node.inputs)),
    );
    lines.join("\n")
}

fn check(file: &ModelFile) {
    println!("{}", shown(file));
    let graph = onnx::read(&onnx::write(file).into(), &mut no_files).unwrap_or_else(|error| panic!("{error}")).graph;
    let special = specialise(&graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    let compiled = compiled(&special.graph).unwrap_or_else(|error| panic!("{error}"));
    let x = SplitMix64::new(3).input(special.graph.ty(special.graph.inputs[0]));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", &x).unwrap();
    runner.run().unwrap();
    let wanted = evaluate(&graph, &[("x", x)]).unwrap();
    for ((name, found), wanted) in runner.outputs().iter().zip(&wanted) {
        agree(found, wanted).unwrap_or_else(|what| panic!("{name} {what}"));
    }
}

/// Checks files in a separate thread, with the time limit [`MOST`].
fn within_time(files: impl Iterator<Item = (String, ModelFile)> + Send + 'static) {
    let (said, heard) = mpsc::channel();
    let work = std::thread::spawn(move || {
        for (name, file) in files {
            println!("{name}");
            let _ = said.send(name);
            check(&file);
        }
    });
    let end = std::time::Instant::now() + MOST;
    let mut last = String::new();
    loop {
        match heard.recv_timeout(end.saturating_duration_since(std::time::Instant::now())) {
            Ok(name) => last = name,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{last} takes too long"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    work.join().unwrap_or_else(|_| panic!("{last} is wrong"));
}

#[test]
fn random_graphs_with_dimensions_of_one_compute_what_the_reference_says() {
    let n_cases = std::env::var("TILEWRIGHT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    within_time((0..n_cases).filter_map(|seed| {
        let mut writer = Writer::new(seed);
        let n_nodes = writer.random.random_range(2..12);
        (0..n_nodes).for_each(|_| writer.step());
        let file = writer.done();
        (!file.outputs.is_empty()).then(|| (format!("seed {seed}"), file))
    }));
}

/// The result of a product that a map reads twice, possibly through a view.
#[test]
fn a_product_may_be_read_twice() {
    let file = |(op, n, has_view): (&str, usize, bool)| {
        let mut writer = Writer::new(0);
        writer.values = vec![("x".to_owned(), vec![3, 4])];
        writer.file.inputs = vec![port("x", &[3, 4])];
        let w = writer.weights(&[4, n]);
        writer.push("MatMul", &["x", &w], &[], vec![3, n]);
        writer.push(if has_view { "Flatten" } else { "Sigmoid" }, &["v0"], &[], vec![3, n]);
        writer.push(op, &["v1", if has_view { "v0" } else { "v1" }], &[], vec![3, n]);
        writer.file.outputs = vec![port("v2", &[3, n])];
        (format!("{op} of {n} columns, {has_view}"), writer.file)
    };
    let all = ["Add", "Mul", "Sub"].into_iter().flat_map(|op| [(op, 1, true), (op, 5, false), (op, 5, true)]);
    within_time(all.map(file).collect::<Vec<_>>().into_iter());
}

/// A single score after a view, as at the end of networks at batch 1: the rules do not move the view forever.
#[test]
fn a_view_of_one_element_between_maps_is_passed_once() {
    let file = |rank: usize| {
        let mut writer = Writer::new(0);
        writer.values = vec![("x".to_owned(), vec![1; rank])];
        writer.file.inputs = vec![port("x", &vec![1; rank])];
        writer.push("Relu", &["x"], &[], vec![1; rank]);
        let list = writer.constant(Tensor::vector(&[0]));
        writer.push("Squeeze", &["v0", &list], &[], vec![1; rank - 1]);
        writer.push("Sigmoid", &["v1"], &[], vec![1; rank - 1]);
        writer.file.outputs = vec![port("v2", &vec![1; rank - 1])];
        (format!("of {rank} dimensions"), writer.file)
    };
    within_time([1, 2, 4].map(file).into_iter());
}

/// Graphs of 20,000 nodes, in a chain or side by side.
#[test]
fn graphs_of_many_nodes_take_time_in_proportion() {
    const N: usize = 20_000;
    let shape = vec![2, 2];
    let writer = || {
        let mut writer = Writer::new(0);
        writer.values = vec![("x".to_owned(), vec![2, 2])];
        writer.file.inputs = vec![port("x", &[2, 2])];
        writer
    };
    let before = |at: usize| if at == 0 { "x".to_owned() } else { format!("v{}", at - 1) };
    let mut chain = writer();
    for at in 0..N {
        chain.push(["Relu", "Sigmoid", "Neg", "Tanh"][at % 4], &[&before(at)], &[], shape.clone());
    }
    let mut products = writer();
    let w = products.weights(&[2, 2]);
    for at in 0..N / 4 {
        products.push("MatMul", &[&before(4 * at), &w], &[], shape.clone());
        products.push("Transpose", &[&before(4 * at + 1)], &[], shape.clone());
        products.push("Sigmoid", &[&before(4 * at + 2)], &[], shape.clone());
        products.push("Transpose", &[&before(4 * at + 3)], &[], shape.clone());
    }
    let mut wide = writer();
    wide.push("Exp", &["x"], &[], shape.clone());
    for at in 0..N / 2 {
        let c = wide.constant(Tensor::from_floats(DType::F32, [1], &[at as f64]));
        wide.push("Mul", &["v0", &c], &[], shape.clone());
        wide.push("Add", &[&before(2 * at + 1), &before(2 * at + 2)], &[], shape.clone());
    }
    let files = [("chain", chain), ("products", products), ("wide", wide)].map(|(name, mut writer)| {
        let last = before(writer.file.nodes.len());
        writer.file.outputs = vec![port(&last, &shape)];
        (name.to_owned(), writer.file)
    });
    within_time(files.into_iter());
}
