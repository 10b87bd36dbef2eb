//! Writer of ONNX models that are built here: tensors, nodes without subgraphs, declared inputs and outputs.

use crate::op::Attribute;
use crate::{DType, Dim, Tensor};

/// Version of the format that is written: weights need not be listed among inputs since version 4, and this
/// version is old enough for all common runtimes.
const IR_VERSION: i64 = 8;

/// ONNX model under construction, to be written by [`write()`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelFile {
    /// Name of the graph.
    pub name: String,
    /// Version of ONNX's own operator set.
    pub opset: i64,
    /// Other operator domains, with their versions.
    pub domains: Vec<(String, i64)>,
    /// Inputs of the graph.
    pub inputs: Vec<GraphPort>,
    /// Outputs of the graph.
    pub outputs: Vec<GraphPort>,
    /// Initializers by name.
    pub weights: Vec<(String, Tensor)>,
    /// Nodes in topological order.
    pub nodes: Vec<NodeFile>,
}

/// Graph input or output: a name with type and shape.
#[derive(Debug, Clone, PartialEq)]
pub struct GraphPort {
    /// Name of the value.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Dimensions of the value.
    pub dims: Vec<Dim>,
}

/// `NodeProto` to be written.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFile {
    /// Name of the node, which may be empty.
    pub name: String,
    /// Operator of the node.
    pub op: String,
    /// Domain of the operator; empty for ONNX's own.
    pub domain: String,
    /// Names of the inputs; empty for an omitted optional input.
    pub inputs: Vec<String>,
    /// Outputs of the node.
    pub outputs: Vec<String>,
    /// Attributes by name.
    pub attributes: Vec<(String, Attribute)>,
}

/// Encodes a model as the bytes of an ONNX file.
///
/// # Panics
/// If an attribute is of an unsupported kind.
pub fn write(model: &ModelFile) -> Vec<u8> {
    let mut graph = Vec::new();
    model.nodes.iter().for_each(|node| bytes(&mut graph, 1, &node_bytes(node)));
    bytes(&mut graph, 2, model.name.as_bytes());
    model.weights.iter().for_each(|(name, tensor)| bytes(&mut graph, 5, &tensor_bytes(name, tensor)));
    model.inputs.iter().for_each(|port| bytes(&mut graph, 11, &port_bytes(port)));
    model.outputs.iter().for_each(|port| bytes(&mut graph, 12, &port_bytes(port)));
    let mut file = Vec::new();
    ir_version(&mut file);
    bytes(&mut file, 2, b"tilewright");
    bytes(&mut file, 7, &graph);
    let domains = model.domains.iter().map(|(domain, version)| (domain.as_str(), *version));
    for (domain, version) in std::iter::once(("", model.opset)).chain(domains) {
        let mut opset = Vec::new();
        bytes(&mut opset, 1, domain.as_bytes());
        int(&mut opset, 2, version);
        bytes(&mut file, 8, &opset);
    }
    file
}

/// Appends the field of a model with the version of the format.
pub(super) fn ir_version(into: &mut Vec<u8>) {
    int(into, 1, IR_VERSION);
}

fn varint(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

/// Appends an integer field.
fn int(into: &mut Vec<u8>, field: u64, number: i64) {
    varint(into, field << 3);
    varint(into, number as u64);
}

/// Appends an f32 field.
fn float(into: &mut Vec<u8>, field: u64, number: f32) {
    varint(into, field << 3 | 5);
    into.extend_from_slice(&number.to_le_bytes());
}

/// Appends a field of bytes, text or a message.
pub(super) fn bytes(into: &mut Vec<u8>, field: u64, content: &[u8]) {
    varint(into, field << 3 | 2);
    varint(into, content.len() as u64);
    into.extend_from_slice(content);
}

/// Encodes a tensor as a message.
pub(super) fn tensor_bytes(name: &str, tensor: &Tensor) -> Vec<u8> {
    let mut message = Vec::with_capacity(tensor.bytes().len() + name.len() + 64);
    tensor.shape().iter().for_each(|&d| int(&mut message, 1, d as i64));
    int(&mut message, 2, tensor.dtype().to_onnx().into());
    bytes(&mut message, 8, name.as_bytes());
    bytes(&mut message, 9, &tensor.packed());
    message
}

fn node_bytes(node: &NodeFile) -> Vec<u8> {
    let mut message = Vec::new();
    node.inputs.iter().for_each(|name| bytes(&mut message, 1, name.as_bytes()));
    node.outputs.iter().for_each(|name| bytes(&mut message, 2, name.as_bytes()));
    if !node.name.is_empty() {
        bytes(&mut message, 3, node.name.as_bytes());
    }
    bytes(&mut message, 4, node.op.as_bytes());
    for (name, attribute) in &node.attributes {
        let mut inner = Vec::new();
        bytes(&mut inner, 1, name.as_bytes());
        let kind = match attribute {
            Attribute::Float(x) => {
                float(&mut inner, 2, *x);
                1
            }
            Attribute::Int(x) => {
                int(&mut inner, 3, *x);
                2
            }
            Attribute::Text(text) => {
                bytes(&mut inner, 4, text.as_bytes());
                3
            }
            Attribute::Tensor(tensor) => {
                bytes(&mut inner, 5, &tensor_bytes("", tensor));
                4
            }
            Attribute::Floats(xs) => {
                xs.iter().for_each(|x| float(&mut inner, 7, *x));
                6
            }
            Attribute::Ints(xs) => {
                xs.iter().for_each(|x| int(&mut inner, 8, *x));
                7
            }
            Attribute::Texts(texts) => {
                texts.iter().for_each(|text| bytes(&mut inner, 9, text.as_bytes()));
                8
            }
            Attribute::Foreign(what) => panic!("an attribute that is {what} cannot be written"),
        };
        int(&mut inner, 20, kind);
        bytes(&mut message, 5, &inner);
    }
    if !node.domain.is_empty() {
        bytes(&mut message, 7, node.domain.as_bytes());
    }
    message
}

fn port_bytes(port: &GraphPort) -> Vec<u8> {
    let (mut shape, mut tensor, mut ty, mut message) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for dim in &port.dims {
        let mut inner = Vec::new();
        match dim {
            Dim::Size(size) => int(&mut inner, 1, *size as i64),
            Dim::Named(name) => bytes(&mut inner, 2, name.as_bytes()),
            Dim::Unknown => {}
        }
        bytes(&mut shape, 1, &inner);
    }
    int(&mut tensor, 1, port.dtype.to_onnx().into());
    bytes(&mut tensor, 2, &shape);
    bytes(&mut ty, 1, &tensor);
    bytes(&mut message, 1, port.name.as_bytes());
    bytes(&mut message, 2, &ty);
    message
}

#[cfg(test)]
mod tests {
    use ::bytes::Bytes;

    use super::super::proto::{DimProto, GraphProto, ModelProto, ValueInfo};
    use super::super::wire::{Budget, Message};
    use super::super::{Importer, LoadedTensor, TensorBytes};
    use super::*;
    use crate::SplitMix64;

    fn port(info: &ValueInfo<'_>) -> GraphPort {
        let dim = |dim: &DimProto<'_>| match dim {
            DimProto::Size(size) => Dim::Size(*size as usize),
            DimProto::Named(name) => Dim::Named((*name).to_owned()),
            DimProto::Unknown => Dim::Unknown,
        };
        GraphPort {
            name: info.name.to_owned(),
            dtype: DType::from_onnx(info.elements.expect("a tensor")).expect("a type"),
            dims: info.dims.as_ref().expect("a shape").iter().map(dim).collect(),
        }
    }

    /// Reads a file back into the form in which it is written.
    fn read(file: &Bytes) -> ModelFile {
        let budget = Budget::of_file(file.len());
        let proto = ModelProto::read(Message { bytes: file, at: 0 }, &budget).expect("a model");
        assert_eq!((proto.ir_version, proto.producer.0), (IR_VERSION, "tilewright"));
        let graph = GraphProto::read(proto.graph.expect("a graph"), &budget, &|_, _| true).expect("a graph");
        let mut external = |_: &str| Err("no file".to_owned());
        let source = TensorBytes { file, external: &mut external, opened: Vec::new(), budget: &budget };
        let mut importer = Importer { source, functions: &[], scopes: Vec::new(), has_defaults: true };
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let mut model = ModelFile {
            name: graph.name.to_owned(),
            opset: proto.opsets[0].1,
            domains: proto.opsets[1..].iter().map(|&(domain, version)| (domain.to_owned(), version)).collect(),
            inputs: graph.inputs.iter().map(port).collect(),
            outputs: graph.outputs.iter().map(port).collect(),
            weights: Vec::new(),
            nodes: Vec::new(),
        };
        for proto in &graph.initializers {
            let Ok(LoadedTensor::Tensor(tensor)) = importer.source.load(proto) else {
                panic!("{} is read", proto.name)
            };
            model.weights.push((proto.name.to_owned(), tensor));
        }
        for node in &graph.nodes {
            let attribute = |proto| importer.attribute(proto).expect("an attribute");
            let names = node.attributes.iter().map(|proto| proto.name.to_owned());
            model.nodes.push(NodeFile {
                name: node.name.to_owned(),
                op: node.op_type.to_owned(),
                domain: node.domain.to_owned(),
                inputs: owned(&node.inputs),
                outputs: owned(&node.outputs),
                attributes: names.zip(node.attributes.iter().map(attribute)).collect(),
            });
        }
        model
    }

    fn below(random: &mut SplitMix64, n: usize) -> usize {
        random.between(0.0, n as f64) as usize
    }

    fn list<T>(random: &mut SplitMix64, mut make: impl FnMut(&mut SplitMix64) -> T) -> Vec<T> {
        (0..below(random, 4)).map(|_| make(random)).collect()
    }

    /// Random text, sometimes empty, or so long that its length takes two bytes.
    fn text(random: &mut SplitMix64) -> String {
        let n = [0, 1, 5, 200][below(random, 4)];
        (0..n).map(|_| ['a', '_', '/', 'é', '→'][below(random, 5)]).collect()
    }

    fn number(random: &mut SplitMix64) -> i64 {
        [0, -1, 127, 128, i64::MIN, i64::MAX][below(random, 6)]
    }

    fn tensor(random: &mut SplitMix64) -> Tensor {
        let types = [DType::F32, DType::I64, DType::Bool, DType::F16, DType::U8];
        let shape = list(random, |random| below(random, 4));
        let numbers: Vec<f64> = (0..shape.iter().product()).map(|_| below(random, 2) as f64).collect();
        Tensor::from_floats(types[below(random, 5)], shape, &numbers)
    }

    fn attribute(random: &mut SplitMix64) -> Attribute {
        let float = |random: &mut SplitMix64| random.between(-9.0, 9.0) as f32;
        match below(random, 7) {
            0 => Attribute::Float(float(random)),
            1 => Attribute::Int(number(random)),
            2 => Attribute::Text(text(random)),
            3 => Attribute::Tensor(tensor(random)),
            4 => Attribute::Floats(list(random, float)),
            5 => Attribute::Ints(list(random, number)),
            _ => Attribute::Texts(list(random, text)),
        }
    }

    fn any_port(random: &mut SplitMix64) -> GraphPort {
        let dims = list(random, |random| match below(random, 3) {
            0 => Dim::Unknown,
            1 => Dim::Named(format!("n{}", text(random))),
            _ => Dim::Size(below(random, 1 << 20)),
        });
        GraphPort { name: text(random), dtype: [DType::F32, DType::I64, DType::Bf16][below(random, 3)], dims }
    }

    #[test]
    fn what_is_written_is_read() {
        let cases = std::env::var("TILEWRIGHT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
        for seed in 0..cases {
            let random = &mut SplitMix64::new(seed);
            let model = ModelFile {
                name: text(random),
                opset: [1, 17, 300][below(random, 3)],
                domains: list(random, |random| (text(random), number(random))),
                inputs: list(random, any_port),
                outputs: list(random, any_port),
                weights: list(random, |random| (text(random), tensor(random))),
                nodes: list(random, |random| NodeFile {
                    name: text(random),
                    op: text(random),
                    domain: text(random),
                    inputs: list(random, text),
                    outputs: list(random, text),
                    attributes: list(random, |random| (text(random), attribute(random))),
                }),
            };
            assert_eq!(read(&write(&model).into()), model, "seed {seed}");
        }
    }
}
