//! Encoder of ONNX files for tests.

use bytes::Bytes;
use tilewright_graph::{DType, Tensor};

/// Encodes a varint.
pub fn varint(mut n: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
    bytes
}

/// Encodes a field of bytes.
pub fn field(number: u64, bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&varint(number << 3 | 2)[..], &varint(bytes.len() as u64), bytes].concat()
}

/// Encodes an integer field.
pub fn int(number: u64, n: i64) -> Vec<u8> {
    [varint(number << 3), varint(n as u64)].concat()
}

/// Encodes a tensor with raw elements.
pub fn tensor(name: &str, x: &Tensor) -> Vec<u8> {
    let dims: Vec<u8> = x.shape().iter().flat_map(|&d| int(1, d as i64)).collect();
    [dims, int(2, x.dtype().to_onnx().into()), field(8, name), field(9, x.bytes())].concat()
}

/// Attribute of a node.
pub enum Attr {
    Int(i64),
    Ints(Vec<i64>),
    Float(f32),
    Floats(Vec<f32>),
    Text(&'static str),
    Texts(Vec<&'static str>),
    Tensor(Tensor),
    Graph(Vec<u8>),
}

/// Encodes a node as a field of a graph.
pub fn node(op: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Attr)]) -> Vec<u8> {
    node_of("", op, inputs, outputs, attributes)
}

/// Encodes a node of an operator of a domain.
pub fn node_of(domain: &str, op: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Attr)]) -> Vec<u8> {
    let mut message: Vec<u8> = inputs.iter().flat_map(|name| field(1, name)).collect();
    message.extend(outputs.iter().flat_map(|name| field(2, name)));
    message.extend([field(4, op), field(7, domain)].concat());
    for (name, value) in attributes {
        let (value, kind) = match value {
            Attr::Int(n) => (int(3, *n), 2),
            Attr::Ints(list) => (list.iter().flat_map(|&n| int(8, n)).collect(), 7),
            Attr::Float(x) => ([&varint(2 << 3 | 5)[..], &x.to_le_bytes()].concat(), 1),
            Attr::Floats(list) => (field(7, list.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>()), 6),
            Attr::Text(text) => (field(4, text), 3),
            Attr::Texts(list) => (list.iter().flat_map(|text| field(9, text)).collect(), 8),
            Attr::Tensor(x) => (field(5, tensor("", x)), 4),
            Attr::Graph(graph) => (field(6, graph), 5),
        };
        message.extend(field(5, [field(1, name), value, int(20, kind)].concat()));
    }
    field(1, message)
}

/// Encodes a declared tensor; a negative dimension has no size.
pub fn declared(name: &str, dtype: DType, dims: &[i64]) -> Vec<u8> {
    let dim = |&n: &i64| field(1, if n < 0 { field(2, "N") } else { int(1, n) });
    let shape: Vec<u8> = dims.iter().flat_map(dim).collect();
    let ty = field(1, [int(1, dtype.to_onnx().into()), field(2, shape)].concat());
    [field(1, name), field(2, ty)].concat()
}

/// Encodes a model with a graph.
pub fn model(opset: i64, graph: impl AsRef<[u8]>) -> Bytes {
    [int(1, 8), field(7, graph), field(8, int(2, opset))].concat().into()
}

/// Encodes a model of one node, with inputs `a`, `b`, …, of which those that are `None` are omitted, and
/// outputs `y0`, `y1`, ….
pub fn single(op: &str, opset: i64, attributes: &[(&str, Attr)], inputs: &[Option<Tensor>], n_outputs: usize) -> Bytes {
    let names: Vec<String> = (0..inputs.len()).map(|at| char::from(b'a' + at as u8).to_string()).collect();
    let given: Vec<&str> = names.iter().zip(inputs).map(|(n, x)| if x.is_some() { n.as_str() } else { "" }).collect();
    let outputs: Vec<String> = (0..n_outputs).map(|at| format!("y{at}")).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    let mut graph = node(op, &given, &outputs, attributes);
    for (name, x) in given.iter().zip(inputs) {
        if let Some(x) = x {
            let dims: Vec<i64> = x.shape().iter().map(|&d| d as i64).collect();
            graph.extend(field(11, declared(name, x.dtype(), &dims)));
        }
    }
    graph.extend(outputs.iter().flat_map(|name| field(12, field(1, name))));
    model(opset, graph)
}
