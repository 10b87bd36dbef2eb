//! Seeded random weights for models without useful ones, such as benchmark topologies.

use std::collections::HashMap;

use bytes::Bytes;

use super::data::{External, LoadedTensor, TensorBytes};
use super::proto::{GraphProto, ModelProto, NodeProto};
use super::wire::{Budget, Message};
use super::write;
use crate::{Bindings, ReadError, SplitMix64, Tensor, TensorType, ValueId, evaluate, specialise};

/// Numbers of the fields.
const IR_VERSION: u32 = 1;
const GRAPH: u32 = 7;
const NODE: u32 = 1;
const INITIALIZER: u32 = 5;
const INPUT: u32 = 11;

/// Spread (standard deviation) of the last product's results, for which softmax distinguishes classes without
/// certainty.
const SPREAD: f64 = 2.0;

/// Replaces a model's f32 weights, and the outputs of its `ConstantOfShape`, by random ones from a seed.
/// Everything else is kept.
///
/// Weights of products follow He's uniform initialisation, variances and scales are positive, and the last
/// product's weights give its results a standard deviation of 2: activations keep their magnitude, and the
/// result depends on the input.
///
/// # Errors
/// If the bytes are not a model, or its inputs have dimensions without a size.
///
/// # Cost
/// Evaluates the model once.
pub fn reweight(file: &Bytes, external: &mut External<'_>, seed: u64) -> Result<Vec<u8>, ReadError> {
    let new = Bytes::from(replaced(file, external, seed, None)?);
    match last_product(&new, external, seed)? {
        None => Ok(new.to_vec()),
        Some((weights, factor)) => replaced(file, external, seed, Some((&weights, factor))),
    }
}

/// Weights of the last product, and the factor that they must be multiplied by.
fn last_product(file: &Bytes, external: &mut External<'_>, seed: u64) -> Result<Option<(Vec<String>, f64)>, ReadError> {
    let mut graph = super::read(file, external)?.graph;
    let is_product = |operator: &str| PRODUCTS.contains(&operator);
    let Some((_, node)) = graph.nodes().filter(|(_, node)| is_product(&node.place.operator)).last() else {
        return Ok(None);
    };
    let result: Vec<ValueId> = node.outputs.iter().flatten().copied().collect();
    let weights = node.inputs.iter().flatten().skip(1).map(|&id| graph.value(id).name.clone()).collect();
    graph.outputs = result;
    let refuse = |what: String| ReadError::NoModel(format!("{what}: weights are for models with sizes"));
    let special = specialise(&graph, &Bindings::default());
    if let Some(problem) = special.problems.first() {
        return Err(refuse(problem.to_string()));
    }
    let graph = &special.graph;
    let mut random = SplitMix64::new(seed);
    let inputs: Vec<(&str, Tensor)> =
        graph.inputs.iter().map(|&id| (graph.value(id).name.as_str(), random.input(graph.ty(id)))).collect();
    let y = evaluate(graph, &inputs).map_err(|error| refuse(error.to_string()))?[0].floats();
    let mean = y.iter().sum::<f64>() / y.len() as f64;
    let spread = (y.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / y.len() as f64).sqrt();
    Ok((spread > 0.0).then_some((weights, SPREAD / spread)))
}

/// Operators that sum products with weights.
const PRODUCTS: [&str; 4] = ["Conv", "ConvTranspose", "Gemm", "MatMul"];

/// Replaces the weights of a model; those with some names are multiplied by a factor.
fn replaced(
    file: &Bytes,
    external: &mut External<'_>,
    seed: u64,
    scaled: Option<(&[String], f64)>,
) -> Result<Vec<u8>, ReadError> {
    let budget = Budget::of_file(file.len());
    let whole = Message { bytes: file, at: 0 };
    let proto = ModelProto::read(whole, &budget)?;
    let message =
        proto.graph.ok_or_else(|| ReadError::NoModel("it has no graph: it is not an ONNX model".to_owned()))?;
    let graph = GraphProto::read(message, &budget, &|_, _| false)?;
    let mut source = TensorBytes { file, external, opened: Vec::new(), budget: &budget };
    let mut tensors: HashMap<&str, Tensor> = HashMap::new();
    for initializer in &graph.initializers {
        if let LoadedTensor::Tensor(tensor) = source.load(initializer)? {
            tensors.insert(initializer.name, tensor);
        }
    }
    let mut random = SplitMix64::new(seed);
    let mut new = |name: &str, shape: Vec<usize>| {
        let (mut low, mut high) = range(name, &shape, &graph);
        if let Some((_, factor)) = scaled.filter(|(names, _)| names.iter().any(|scaled| scaled == name)) {
            (low, high) = (low * factor, high * factor);
        }
        write::tensor_bytes(name, &random.tensor(shape, low, high))
    };
    let mut written = Vec::new();
    let (mut nodes, mut initializers) = (graph.nodes.iter(), graph.initializers.iter());
    let mut inputs = graph.inputs.iter();
    copy_fields(message, &mut written, |number, into| {
        match number {
            NODE => {
                let node = nodes.next().expect("each node was read");
                let Some(shape) = made_of_shape(node, &tensors) else { return false };
                write::bytes(into, INITIALIZER.into(), &new(node.outputs[0], shape));
            }
            INITIALIZER => {
                let name = initializers.next().expect("each weight was read").name;
                let single = tensors.get(name).filter(|tensor| tensor.dtype() == crate::DType::F32);
                let Some(tensor) = single else { return false };
                write::bytes(into, INITIALIZER.into(), &new(name, tensor.shape().to_vec()));
            }
            // Weights are removed from the inputs, where old versions required them.
            INPUT => return tensors.contains_key(inputs.next().expect("each input was read").name),
            _ => return false,
        }
        true
    })?;
    let mut model = Vec::new();
    copy_fields(whole, &mut model, |number, into| {
        match number {
            IR_VERSION => write::ir_version(into),
            GRAPH => write::bytes(into, GRAPH.into(), &written),
            _ => return false,
        }
        true
    })?;
    Ok(model)
}

/// Copies a message field by field; `replace` is called for each field, and returns whether it has written a
/// replacement.
fn copy_fields(
    mut message: Message<'_>,
    into: &mut Vec<u8>,
    mut replace: impl FnMut(u32, &mut Vec<u8>) -> bool,
) -> Result<(), ReadError> {
    loop {
        let before = message.bytes;
        let Some(field) = message.next() else { return Ok(()) };
        if !replace(field?.number, into) {
            into.extend_from_slice(&before[..before.len() - message.bytes.len()]);
        }
    }
}

/// Shape of a node's result, if the node depends only on a constant shape.
fn made_of_shape(node: &NodeProto<'_>, tensors: &HashMap<&str, Tensor>) -> Option<Vec<usize>> {
    let shape = tensors.get(*node.inputs.first()?).filter(|_| node.op_type == "ConstantOfShape")?;
    let shape: Vec<usize> = shape.i64s().iter().map(|&d| usize::try_from(d).ok()).collect::<Option<_>>()?;
    TensorType::new(crate::DType::F32, shape.clone()).checked_bytes().map(|_| shape)
}

/// Range of a weight's numbers, which depends on its first reader.
fn range(name: &str, shape: &[usize], graph: &GraphProto<'_>) -> (f64, f64) {
    let user = |name: &str| {
        let reads = |node: &&NodeProto<'_>| node.inputs.contains(&name);
        graph.nodes.iter().find(reads).map(|node| (node, node.inputs.iter().position(|input| *input == name)))
    };
    let mut found = user(name);
    // Skips changes of its shape.
    while let Some((node, Some(0))) = found
        && matches!(node.op_type, "Reshape" | "Unsqueeze")
    {
        found = node.outputs.first().and_then(|output| user(output));
    }
    let Some((node, Some(at))) = found else { return (-0.1, 0.1) };
    match (node.op_type, at) {
        ("Conv" | "ConvTranspose" | "Gemm" | "MatMul", 1) if shape.len() > 1 => {
            let bound = (6.0 / shape[1..].iter().product::<usize>().max(1) as f64).sqrt();
            (-bound, bound)
        }
        // The scales are small if the result is added to another one, so that sums grow slowly.
        ("BatchNormalization", 1) if is_added(node, graph) => (0.3, 0.6),
        ("BatchNormalization", 1 | 4) | ("Mul", _) => (0.5, 1.5),
        _ => (-0.1, 0.1),
    }
}

/// Whether a node's result is added to another node's result.
fn is_added(node: &NodeProto<'_>, graph: &GraphProto<'_>) -> bool {
    let is_computed = |name: &&str| graph.nodes.iter().any(|node| node.outputs.contains(name));
    graph.nodes.iter().any(|user| {
        matches!(user.op_type, "Add" | "Sum")
            && node.outputs.iter().any(|output| user.inputs.contains(output))
            && user.inputs.iter().filter(|name| is_computed(name)).count() > 1
    })
}
