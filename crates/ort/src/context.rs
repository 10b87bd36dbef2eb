//! Compiled parts as nodes of a model.
//!
//! If a session's option `ep.context_enable` requests it, ONNX Runtime writes a copy of the model in which
//! each part is replaced by a node `EPContext`. Its context, embedded or in a file beside the model, contains
//! the part's nodes, the configurations of its kernels from the records, and its code:
//!
//! ```text
//! tilewright context 1\n
//! sections: the part as a model without weights, configurations as JSON, entries of a cache of code
//! ```
//!
//! A section consists of its length (eight bytes, little-endian), its checksum (eight bytes) and its bytes.
//! Weights stay in the model. If configurations or code cannot be used, for example on another machine or
//! with another version, the part is recompiled; code is run only if the session's options trust it.

use std::hash::Hasher;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use fnv::FnvHasher;
use tilewright::Answer;
use tilewright::file::{self, write_into_folder};
use tilewright_graph::Declared;
use tilewright_graph::onnx::{self, GraphPort, ModelFile, NodeFile};

use crate::draft::{DraftNode, DraftValue, NodeAt, PartDraft, SessionGraph, ValueIndex};

/// Operator of the nodes.
pub const OPERATOR: &str = "EPContext";
/// Domain of the operator.
pub const DOMAIN: &str = "com.microsoft";

const MAGIC: &[u8] = b"tilewright context 1\n";
/// Beginning of contexts of all versions.
const KIND: &[u8] = b"tilewright context ";

/// Request of a session to write a model with contexts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Whether contexts are embedded in the model.
    pub is_embedded: bool,
    /// File of the new model, if it is named.
    pub file: Option<PathBuf>,
    /// Beginning of the nodes' names.
    pub prefix: String,
}

impl Wish {
    /// Reads the request from a session's options, if any; `value` returns an option's value.
    pub fn read(value: impl Fn(&str) -> Option<String>) -> Option<Wish> {
        let is_set = |name: &str| value(name).is_some_and(|text| text == "1");
        is_set("ep.context_enable").then(|| Wish {
            is_embedded: is_set("ep.context_embed_mode"),
            file: value("ep.context_file_path").filter(|path| !path.is_empty()).map(PathBuf::from),
            prefix: value("ep.context_node_name_prefix").unwrap_or_default(),
        })
    }

    /// Path of the file that ONNX Runtime writes for a model.
    ///
    /// # Errors
    /// If neither file has a name.
    fn path(&self, model: &Path) -> Result<PathBuf, String> {
        if let Some(file) = &self.file {
            return Ok(file.clone());
        }
        let stem = model.file_stem().filter(|_| !model.as_os_str().is_empty());
        let stem = stem.ok_or("the model with contexts has no name (give ep.context_file_path)")?;
        Ok(model.with_file_name(format!("{}_ctx.onnx", stem.to_string_lossy())))
    }

    /// Writes a context beside the new model, which is made from the one at `model`; returns the file's name.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_beside(&self, model: &Path, node: &str, context: &[u8]) -> Result<String, String> {
        let path = self.path(model)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let plain: String = node.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let name = format!("{stem}_{plain}.tilewright");
        let beside = path.with_file_name(&name);
        write_into_folder(&beside, context).map_err(|error| format!("{}: {error}", beside.display()))?;
        Ok(name)
    }
}

/// Reads a context from a file beside the model.
///
/// # Errors
/// If the name leads to another folder, or the file cannot be read.
pub fn read_beside(model: &Path, name: &str) -> Result<Vec<u8>, String> {
    let is_plain = Path::new(name).file_name().is_some_and(|file| file == name);
    if !is_plain {
        return Err(format!("the context `{name}` is no file beside the model"));
    }
    if model.as_os_str().is_empty() {
        return Err(format!("the model has no folder in which `{name}` could be (read it from its file)"));
    }
    file::read(&model.with_file_name(name), "a context").map_err(|error| error.to_string())
}

/// Context of a part.
#[derive(Debug)]
pub struct PartContext {
    /// Part, as a model without weights.
    pub model: ModelFile,
    /// Configurations of its kernels.
    pub answers: Vec<Answer>,
    /// Entries of a cache of code.
    pub entries: Vec<u8>,
    /// Reasons why some content could not be used.
    pub notes: Vec<String>,
}

impl PartContext {
    /// Encodes the context.
    pub fn to_bytes(&self) -> Vec<u8> {
        let answers = serde_json::to_vec(&self.answers).expect("invariant: answers are text, numbers and JSON");
        let mut bytes = MAGIC.to_vec();
        for section in [&onnx::write(&self.model), &answers, &self.entries] {
            bytes.extend((section.len() as u64).to_le_bytes());
            bytes.extend(sum(section).to_le_bytes());
            bytes.extend_from_slice(section);
        }
        bytes
    }

    /// Decodes a context written by [`PartContext::to_bytes`]. Damaged answers and entries are left out.
    ///
    /// # Errors
    /// If the bytes are not a context, are of another version, or the part is damaged.
    pub fn from_bytes(bytes: &[u8]) -> Result<PartContext, String> {
        let again = "make it again from the original model";
        let Some(mut rest) = bytes.strip_prefix(MAGIC) else {
            let what =
                if bytes.starts_with(KIND) { "of another version of tilewright" } else { "none of tilewright's" };
            return Err(format!("the context is {what} ({again})"));
        };
        let model = section(&mut rest).ok_or_else(|| format!("the context is damaged or cut off ({again})"))?;
        let model = onnx::read_outline(&Bytes::copy_from_slice(model));
        let model = model.map_err(|error| format!("the context's part: {error} ({again})"))?;
        let answers = section(&mut rest).and_then(|bytes| serde_json::from_slice(bytes).ok());
        let entries = section(&mut rest);
        let is_whole = answers.is_some() && entries.is_some();
        let note = "a context's code is damaged or cut off; its part is compiled anew".to_owned();
        Ok(PartContext {
            model,
            answers: answers.unwrap_or_default(),
            entries: entries.unwrap_or_default().to_vec(),
            notes: if is_whole { Vec::new() } else { vec![note] },
        })
    }
}

/// Removes a section from the front; `None` if it is incomplete.
fn section<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (expected, rest) = rest.split_first_chunk()?;
    let (section, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    *bytes = rest;
    (u64::from_le_bytes(*expected) == sum(section)).then_some(section)
}

/// Checksum that is the same in all builds.
fn sum(bytes: &[u8]) -> u64 {
    let mut hasher = FnvHasher::default();
    hasher.write(bytes);
    hasher.finish()
}

/// Makes a model without weights from a part; its constants become inputs after the others.
pub fn outline(part: &PartDraft) -> ModelFile {
    let PartDraft { graph: draft, nodes, ports } = part;
    let port = |&value: &ValueIndex| {
        let DraftValue { name, declared, .. } = &draft.values[value];
        let declared = declared.as_ref().expect("invariant: ports of parts are tensors");
        let dims = declared.dims.clone().unwrap_or_default();
        GraphPort { name: name.clone(), dtype: declared.dtype, dims }
    };
    let name = |value: &Option<ValueIndex>| value.map_or_else(String::new, |value| draft.values[value].name.clone());
    let node = |&at: &NodeAt| {
        let DraftNode { op, domain, inputs, outputs, attributes, .. } = &draft.nodes[at];
        NodeFile {
            name: String::new(),
            op: op.clone(),
            domain: domain.clone(),
            inputs: inputs.iter().map(name).collect(),
            outputs: outputs.iter().map(name).collect(),
            attributes: attributes.clone(),
        }
    };
    ModelFile {
        name: "part".to_owned(),
        opset: draft.opset,
        domains: draft.domains.clone(),
        inputs: ports.inputs.iter().chain(&ports.constants).map(port).collect(),
        outputs: ports.outputs.iter().map(port).collect(),
        weights: Vec::new(),
        nodes: nodes.iter().map(node).collect(),
    }
}

/// Makes the draft of a part, with the constants and sizes that the session's graph has under the same names.
///
/// # Errors
/// If a value of the graph has the name of an input or output, but another type.
pub fn draft_of(model: &ModelFile, session: &SessionGraph) -> Result<SessionGraph, String> {
    let mut draft = SessionGraph { opset: model.opset, domains: model.domains.clone(), ..SessionGraph::default() };
    let at = |draft: &mut SessionGraph, name: &str| {
        let known = draft.values.iter().position(|value| value.name == name);
        known.unwrap_or_else(|| {
            draft.values.push(DraftValue { name: name.to_owned(), ..DraftValue::default() });
            draft.values.len() - 1
        })
    };
    let ports = model.inputs.iter().map(|port| (port, true)).chain(model.outputs.iter().map(|port| (port, false)));
    for (port, is_input) in ports {
        let value = at(&mut draft, &port.name);
        let here = session.values.iter().find(|here| here.name == port.name);
        let here = here.ok_or_else(|| format!("the graph has no `{}`, which its context names", port.name))?;
        let declared = here.declared.as_ref().filter(|_| is_input);
        if declared.is_some_and(|declared| declared.dtype != port.dtype) {
            return Err(format!("`{}` has elements of another type than in its context", port.name));
        }
        // The session may have bound previously unknown sizes.
        let bound = declared.and_then(|declared| declared.dims.clone()).filter(|dims| dims.len() == port.dims.len());
        let dims = Some(bound.unwrap_or_else(|| port.dims.clone()));
        draft.values[value].declared = Some(Declared { dtype: port.dtype, dims });
        draft.values[value].constant = here.constant.clone();
        if !is_input {
            draft.outputs.push(value);
        }
    }
    for node in &model.nodes {
        let mut values = |names: &[String]| -> Vec<Option<ValueIndex>> {
            names.iter().map(|name| (!name.is_empty()).then(|| at(&mut draft, name))).collect()
        };
        let (inputs, outputs) = (values(&node.inputs), values(&node.outputs));
        let NodeFile { op, domain, attributes, .. } = node.clone();
        draft.nodes.push(DraftNode { op, domain, inputs, outputs, attributes, ..DraftNode::default() });
    }
    Ok(draft)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_graph::{DType, Dim};

    /// Makes a part of two nodes between others: `x`, with an open dimension, times `w`, then the
    /// exponential.
    fn draft() -> (SessionGraph, Vec<NodeAt>) {
        let value = |name: &str, dims: Vec<Dim>| DraftValue {
            name: name.to_owned(),
            declared: Some(Declared { dtype: DType::F32, dims: Some(dims) }),
            constant: None,
        };
        let rows = || Dim::Named("rows".to_owned());
        let square = || vec![Dim::Size(8), Dim::Size(8)];
        let mut draft = SessionGraph { opset: 17, ..SessionGraph::default() };
        draft.values = vec![
            value("in", vec![rows(), Dim::Size(8)]),
            value("x", vec![rows(), Dim::Size(8)]),
            value("w", square()),
            value("a", vec![rows(), Dim::Size(8)]),
            value("y", vec![rows(), Dim::Size(8)]),
        ];
        draft.values[2].constant = tilewright_graph::Tensor::new(
            tilewright_graph::TensorType::new(DType::F32, vec![8, 8]),
            Bytes::from(vec![0; 256]),
        );
        let node = |op: &str, inputs: &[ValueIndex], output: ValueIndex| DraftNode {
            op: op.to_owned(),
            inputs: inputs.iter().map(|&value| Some(value)).collect(),
            outputs: vec![Some(output)],
            ..DraftNode::default()
        };
        draft.nodes = vec![node("NoSuch", &[0], 1), node("MatMul", &[1, 2], 3), node("Exp", &[3], 4)];
        draft.outputs = vec![4];
        (draft, vec![1, 2])
    }

    fn context() -> PartContext {
        let (draft, nodes) = draft();
        let model = outline(&PartDraft::new(draft, nodes));
        let answer = Answer {
            workload: "matmul:m=1,n=8,k=8".to_owned(),
            target: "x86_64/a/512".to_owned(),
            threads: 2,
            template: "matmul".to_owned(),
            config: serde_json::json!({"mr": 4}),
            median_ns: 0.1,
        };
        PartContext { model, answers: vec![answer], entries: b"code".to_vec(), notes: Vec::new() }
    }

    #[test]
    fn what_is_written_is_read() {
        let (written, (session, _)) = (context(), draft());
        let read = PartContext::from_bytes(&written.to_bytes()).unwrap();
        assert_eq!((&read.model, &read.answers, &read.entries), (&written.model, &written.answers, &written.entries));
        assert_eq!(read.notes, [""; 0]);
        let part = draft_of(&read.model, &session).unwrap();
        let part = PartDraft::new(part, vec![0, 1]);
        let PartDraft { graph, ports, .. } = &part;
        let names = |values: &[ValueIndex]| values.iter().map(|&v| graph.values[v].name.clone()).collect::<Vec<_>>();
        assert_eq!([&ports.inputs, &ports.constants, &ports.outputs].map(|v| names(v)), [["x"], ["w"], ["y"]]);
        assert_eq!(graph.dim_names(ports.inputs[0]), [Some("rows".to_owned()), None]);
        assert_eq!(outline(&part), read.model);
    }

    #[test]
    fn a_damaged_context_is_an_error_or_compiled_anew() {
        let whole = context().to_bytes();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            for bytes in [&bytes[..], &whole[..at]] {
                match PartContext::from_bytes(bytes) {
                    Ok(read) => assert_eq!((read.model, read.notes.len()), (context().model, 1), "at {at}"),
                    Err(why) => assert!(why.ends_with("(make it again from the original model)"), "{why}"),
                }
            }
        }
        assert!(PartContext::from_bytes(b"tilewright context 2\n").is_err_and(|why| why.contains("another version")));
    }

    #[test]
    fn files_beside_a_model_are_in_its_folder() {
        let folder = std::env::temp_dir().join(format!("tilewright-context-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let model = folder.join("net.onnx");
        let mut wish = Wish { is_embedded: false, file: None, prefix: String::new() };
        let name = wish.write_beside(&model, "part/1", b"context").unwrap();
        assert_eq!(name, "net_ctx_part_1.tilewright");
        assert_eq!(read_beside(&folder.join("net_ctx.onnx"), &name).unwrap(), b"context");
        wish.file = Some(folder.join("other.onnx"));
        assert_eq!(wish.write_beside(&model, "n", b"").unwrap(), "other_n.tilewright");
        for name in ["../net.onnx", "/etc/passwd", "", "..", "a/b"] {
            assert!(read_beside(&model, name).is_err_and(|why| why.contains("no file beside")), "{name}");
        }
        assert!(read_beside(Path::new(""), "name").is_err() && read_beside(&model, "none").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn wishes_are_read() {
        let of = |given: &'static [(&str, &str)]| {
            Wish::read(|name| given.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
        };
        assert_eq!(of(&[("ep.context_file_path", "a")]), None);
        assert_eq!(of(&[("ep.context_enable", "0")]), None);
        let plain = Wish { is_embedded: false, file: None, prefix: String::new() };
        assert_eq!(of(&[("ep.context_enable", "1")]), Some(plain.clone()));
        let all = &[("ep.context_enable", "1"), ("ep.context_embed_mode", "1"), ("ep.context_file_path", "a")];
        assert_eq!(of(all), Some(Wish { is_embedded: true, file: Some("a".into()), ..plain }));
    }
}
