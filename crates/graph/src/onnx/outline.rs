//! Model in its textual structure: nodes with their attributes, and declared inputs and outputs, without
//! import.

use bytes::Bytes;

use super::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfo};
use super::wire::{Budget, Message};
use super::write::{GraphPort, ModelFile, NodeFile};
use super::{declared_of, plain_attribute, plain_domain};
use crate::op::Attribute;
use crate::{Declared, ReadError};

/// Reads the structure of a model that [`write`](super::write()) has written, without its weights. Nodes with
/// subgraphs are not supported.
///
/// # Errors
/// If the bytes are not such a model: they are damaged, or an input or output is not a tensor of known rank.
pub fn read_outline(file: &Bytes) -> Result<ModelFile, ReadError> {
    let budget = Budget::of_file(file.len());
    let proto = ModelProto::read(Message { bytes: file, at: 0 }, &budget)?;
    let graph = proto.graph.ok_or_else(|| ReadError::NoModel("it has no graph".to_owned()))?;
    let graph = GraphProto::read(graph, &budget, &|_, _| true)?;
    let (own, domains) = proto.opsets.iter().partition::<Vec<_>, _>(|(domain, _)| plain_domain(domain).is_empty());
    let opset = own.first().map(|(_, version)| *version);
    Ok(ModelFile {
        name: graph.name.to_owned(),
        opset: opset.ok_or_else(|| ReadError::NoModel("it names no opset".to_owned()))?,
        domains: domains.into_iter().map(|(domain, version)| (domain.to_owned(), version)).collect(),
        inputs: graph.inputs.iter().map(port).collect::<Result<_, _>>()?,
        outputs: graph.outputs.iter().map(port).collect::<Result<_, _>>()?,
        weights: Vec::new(),
        nodes: graph.nodes.iter().map(node).collect::<Result<_, _>>()?,
    })
}

fn port(info: &ValueInfo<'_>) -> Result<GraphPort, ReadError> {
    let Some(Declared { dtype, dims: Some(dims) }) = declared_of(info) else {
        return Err(ReadError::NoModel(format!("`{}` is no tensor of a known number of dimensions", info.name)));
    };
    Ok(GraphPort { name: info.name.to_owned(), dtype, dims })
}

fn node(proto: &NodeProto<'_>) -> Result<NodeFile, ReadError> {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let attribute = |proto: &AttributeProto<'_>| match plain_attribute(proto) {
        Attribute::Foreign(what) => Err(ReadError::NoModel(format!("attribute `{}` is {what}", proto.name))),
        attribute => Ok((proto.name.to_owned(), attribute)),
    };
    Ok(NodeFile {
        name: proto.name.to_owned(),
        op: proto.op_type.to_owned(),
        domain: proto.domain.to_owned(),
        inputs: names(&proto.inputs),
        outputs: names(&proto.outputs),
        attributes: proto.attributes.iter().map(attribute).collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::write;
    use crate::{DType, Dim};

    fn model() -> ModelFile {
        let port = |name: &str, dims| GraphPort { name: name.to_owned(), dtype: DType::F32, dims };
        let attributes = vec![
            ("alpha".to_owned(), Attribute::Float(-0.5)),
            ("axis".to_owned(), Attribute::Int(-1)),
            ("mode".to_owned(), Attribute::Text("same".to_owned())),
            ("pads".to_owned(), Attribute::Ints(vec![0, -3, i64::MAX])),
            ("scales".to_owned(), Attribute::Floats(vec![f32::INFINITY, 0.0])),
            ("names".to_owned(), Attribute::Texts(vec!["a".to_owned(), String::new()])),
        ];
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let (inputs, outputs) = (names(&["x", "", "w"]), names(&["y"]));
        let (name, op, domain) = ("n0".to_owned(), "Gelu".to_owned(), "com.microsoft".to_owned());
        ModelFile {
            name: "part".to_owned(),
            opset: 17,
            domains: vec![("com.microsoft".to_owned(), 1)],
            inputs: vec![
                port("x", vec![Dim::Named("rows".to_owned()), Dim::Size(64), Dim::Unknown]),
                port("w", vec![]),
            ],
            outputs: vec![port("y", vec![Dim::Size(0)])],
            weights: Vec::new(),
            nodes: vec![NodeFile { name, op, domain, inputs, outputs, attributes }],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read_outline(&write(&model()).into()).unwrap(), model());
    }

    #[test]
    fn damaged_bytes_are_an_error_or_another_model() {
        let whole = write(&model());
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                let _ = read_outline(&bytes.into());
            }
            assert!(read_outline(&whole[..at].to_vec().into()).map_or(true, |read| read != model()));
        }
    }
}
