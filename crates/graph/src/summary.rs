//! Summary of a model: its operators, its parameters, and the products, convolutions and recurrent networks
//! in it.

use std::collections::BTreeMap;

use crate::op::{Loop, Op, ScaledBlocks, Scan, product_shape};
use crate::tensor::shape_text;
use crate::{Graph, Node, TensorType};

/// Convolution, matrix product or recurrent network of given sizes, with its number of occurrences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedOperation {
    /// Kind of operation, in words.
    pub kind: &'static str,
    /// Sizes of the operation.
    pub text: String,
    /// Floating-point operations of one occurrence; a multiply-add counts as two.
    pub flops: u64,
    /// Number of occurrences in the model.
    pub count: usize,
}

/// Operators, parameters and work of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelSummary {
    /// Inputs by name, with their types.
    pub inputs: Vec<(String, TensorType)>,
    /// Outputs by name, with their types.
    pub outputs: Vec<(String, TensorType)>,
    /// Number of nodes of each operator in the specialised graph.
    pub operators: BTreeMap<String, usize>,
    /// Bytes of all constants that nodes read.
    pub parameter_bytes: u64,
    /// Convolutions, matrix products and recurrent networks, by decreasing share of the work.
    pub tasks: Vec<CountedOperation>,
}

impl ModelSummary {
    /// Floating-point operations of one run of the model.
    pub fn flops(&self) -> u64 {
        self.tasks.iter().map(|task| task.flops.saturating_mul(task.count as u64)).fold(0, u64::saturating_add)
    }
}

/// Adds the nodes of a graph and of its subgraphs to counts by operator.
pub fn count_operators(graph: &Graph, counts: &mut BTreeMap<String, usize>) {
    for (_, node) in graph.nodes() {
        *counts.entry(node.place.operator.clone()).or_default() += 1;
        if let Op::If(choice) = &node.op {
            count_operators(&choice.then.graph, counts);
            count_operators(&choice.otherwise.graph, counts);
        }
        if let Op::Loop(Loop { body, .. }) | Op::Scan(Scan { body, .. }) = &node.op {
            count_operators(&body.graph, counts);
        }
    }
}

/// Summarises a specialised graph.
pub fn summarise(graph: &Graph) -> ModelSummary {
    let named = |id: &crate::ValueId| (graph.value(*id).name.clone(), graph.ty(*id).clone());
    let mut summary = ModelSummary {
        inputs: graph.inputs.iter().map(named).collect(),
        outputs: graph.outputs.iter().map(named).collect(),
        ..ModelSummary::default()
    };
    count_operators(graph, &mut summary.operators);

    // Values computed only from constants are known before the model runs, even if they were too large to
    // fold.
    let mut is_known: Vec<bool> = graph.values().map(|(_, value)| value.constant.is_some()).collect();
    let mut is_counted = vec![false; is_known.len()];
    for (_, node) in graph.nodes() {
        if node.inputs.iter().flatten().all(|id| is_known[id.0 as usize]) {
            node.outputs.iter().flatten().for_each(|id| is_known[id.0 as usize] = true);
            continue;
        }
        for id in node.inputs.iter().flatten().filter(|id| is_known[id.0 as usize]) {
            if !std::mem::replace(&mut is_counted[id.0 as usize], true) {
                summary.parameter_bytes += graph.ty(*id).checked_bytes().unwrap_or(0) as u64;
            }
        }
    }

    let mut tasks: BTreeMap<(&str, String), CountedOperation> = BTreeMap::new();
    for task in graph.nodes().filter_map(|(_, node)| task_of(graph, node)) {
        let key = (task.kind, task.text.clone());
        tasks.entry(key).and_modify(|known| known.count += 1).or_insert(task);
    }
    summary.tasks = tasks.into_values().collect();
    summary.tasks.sort_by_key(|task| std::cmp::Reverse(task.flops.saturating_mul(task.count as u64)));
    summary
}

/// Describes a node that is a convolution, product or recurrent network.
fn task_of(graph: &Graph, node: &Node) -> Option<CountedOperation> {
    let shape = |at: usize| Some(graph.ty((*node.inputs.get(at)?)?).shape.as_slice());
    let ints = |list: &[i64]| list.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    let sizes = |list: &[usize]| list.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let n = |list: &[usize]| list.iter().fold(1_u64, |n, &d| n.saturating_mul(d as u64));
    let windows = |found: &crate::op::ConvShape, out: &[usize]| {
        let geometry = &found.geometry;
        let image = [&[found.n, found.c][..], out].concat();
        let pads = ints(&[&geometry.begins[..], &geometry.ends].concat());
        let mut text = format!(
            "x{} m={} kernel={} strides={} pads={pads}",
            shape_text(&image),
            found.m,
            sizes(&geometry.kernel),
            sizes(&geometry.strides)
        );
        if geometry.dilations.iter().any(|&d| d != 1) {
            text += &format!(" dilations={}", sizes(&geometry.dilations));
        }
        if found.groups > 1 {
            text += &format!(" groups={}", found.groups);
        }
        text
    };
    let conv = |kind, conv: &crate::op::Conv, w: usize| {
        let found = conv.shape(shape(0)?, shape(w)?).ok()?;
        let taps = n(&found.geometry.kernel).saturating_mul((found.c / found.groups) as u64);
        let flops = n(&found.out()).saturating_mul(taps).saturating_mul(2);
        Some(CountedOperation { kind, text: windows(&found, &found.image), flops, count: 1 })
    };
    let product = |kind, b: usize| {
        let found = product_shape(shape(0)?, shape(b)?).ok()?;
        let [m, n_columns, k] = found.sizes;
        let flops = [m, n_columns, k].iter().fold(2 * n(&found.batch), |all, &d| all.saturating_mul(d as u64));
        let batch = if found.batch.is_empty() { String::new() } else { format!("batch={} ", sizes(&found.batch)) };
        Some(CountedOperation { kind, text: format!("{batch}m={m} n={n_columns} k={k}"), flops, count: 1 })
    };
    match &node.op {
        Op::Conv(op) => conv("conv", op, 1),
        Op::ConvInteger(op) => conv("integer conv", &op.0, 1),
        Op::QLinearConv(op) => conv("quantized conv", &op.0, 3),
        Op::ConvTranspose(op) => {
            let found = op.shape(shape(0)?, shape(1)?).ok()?;
            let taps = n(&found.geometry.kernel).saturating_mul((found.m / found.groups) as u64);
            let flops = n(shape(0)?).saturating_mul(taps).saturating_mul(2);
            let text = windows(&found, &found.geometry.out);
            Some(CountedOperation { kind: "transposed conv", text, flops, count: 1 })
        }
        Op::MatMul(_) => product("matmul", 1),
        Op::MatMulInteger(_) => product("integer matmul", 1),
        Op::QLinearMatMul(_) => product("quantized matmul", 3),
        Op::MatMulNBits(op) => {
            let m = n(shape(0)?) / (op.k as u64).max(1);
            let flops = [op.n, op.k].iter().fold(2 * m, |all, &d| all.saturating_mul(d as u64));
            let ScaledBlocks { bits, size } = op.blocks;
            let text = format!("m={m} n={} k={} bits={bits} block={size}", op.n, op.k);
            Some(CountedOperation { kind: "matmul of packed weights", text, flops, count: 1 })
        }
        Op::Gemm(op) => {
            let [m, n_columns, k] = op.sizes(shape(0)?, shape(1)?).ok()?;
            let flops = [n_columns, k].iter().fold(2 * m as u64, |all, &d| all.saturating_mul(d as u64));
            Some(CountedOperation { kind: "matmul", text: format!("m={m} n={n_columns} k={k}"), flops, count: 1 })
        }
        Op::Recurrent(op) => {
            let (&[steps, batch, n_in], &[n_directions, gates, _], &[.., hidden]) = (shape(0)?, shape(1)?, shape(2)?)
            else {
                return None;
            };
            let (steps, batch) = if op.batch_first { (batch, steps) } else { (steps, batch) };
            let flops = n(&[steps, batch, n_directions, gates, n_in + hidden]).saturating_mul(2);
            let both = if n_directions > 1 { format!(" directions={n_directions}") } else { String::new() };
            let text = format!("steps={steps} batch={batch} n={n_in} hidden={hidden}{both}");
            Some(CountedOperation { kind: op.cell.name(), text, flops, count: 1 })
        }
        _ => None,
    }
}
