//! Graphs of ONNX Runtime, read through its C interface.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::null;
use std::sync::Arc;

use bytes::Bytes;
use tilewright_graph::op::Attribute;
use tilewright_graph::{DType, Declared, Dim, Tensor, TensorType};

use crate::api::{self, Graph, Node, OrtApi, OrtFailure, TENSOR, TEXT, TensorInfo, ValueInfo, got, text};
use crate::context::{DOMAIN, OPERATOR};
use crate::draft::{DraftNode, DraftValue, NodeAt, SessionGraph, ValueIndex};
use crate::name::NAME;

/// Elements of a constant that ONNX Runtime owns. All constants of a graph share a mark, whose reference
/// count shows whether any of them is still in use.
struct HeldConstant {
    pointer: *const u8,
    len: usize,
    _mark: Arc<()>,
}

// SAFETY: the elements of a constant are never written.
unsafe impl Send for HeldConstant {}
// SAFETY: as above.
unsafe impl Sync for HeldConstant {}

impl AsRef<[u8]> for HeldConstant {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: ONNX Runtime keeps `len` bytes there for as long as the caller of [`read`] promises.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

/// Session's graph as read, with ONNX Runtime's pointers to its nodes.
pub struct ReadGraph {
    /// Copy of the graph.
    pub draft: SessionGraph,
    /// ONNX Runtime's nodes, in the order of the draft's.
    pub nodes: Vec<*const Node>,
    /// Mark of the constants' elements, which holds references to it while they are in use.
    pub mark: Arc<()>,
    /// Whether the graph reads values of an enclosing graph.
    pub reads_outside: bool,
    /// Nodes that represent compiled parts of this provider.
    pub contexts: Vec<ContextNode>,
    /// File of the model; empty if it has none.
    pub file: PathBuf,
}

/// Node that represents a compiled part.
pub struct ContextNode {
    /// Index of the node.
    pub at: NodeAt,
    /// Whether the context is embedded in the node, rather than in a file beside the model.
    pub is_embedded: bool,
    /// Context, or the name of its file.
    pub content: Vec<u8>,
}

/// Reader of a graph.
struct GraphReader<'a> {
    api: &'a OrtApi,
    draft: SessionGraph,
    known: HashMap<String, ValueIndex>,
    mark: Arc<()>,
    reads_outside: bool,
}

/// Reads a graph. The elements of constants are not copied.
///
/// # Errors
/// If a function of ONNX Runtime fails.
///
/// # Safety
/// The graph belongs to ONNX Runtime; it and its constants live until the draft is dropped.
pub unsafe fn read(api: &OrtApi, graph: *const Graph) -> Result<ReadGraph, OrtFailure> {
    let mark = Arc::new(());
    let draft = SessionGraph::default();
    let mut reader = GraphReader { api, draft, known: HashMap::new(), mark: Arc::clone(&mark), reads_outside: false };
    // SAFETY: the graph is valid, and the functions write as many elements as requested.
    unsafe {
        let mut versions = vec![0; got(api, 0, |out| api.n_opsets(graph, out))?];
        let mut domains = vec![null(); versions.len()];
        api.check(api.opsets(graph, domains.as_mut_ptr(), versions.as_mut_ptr(), versions.len()))?;
        for (domain, version) in domains.into_iter().zip(versions) {
            match text(domain).as_str() {
                "" | "ai.onnx" => reader.draft.opset = version,
                other => reader.draft.domains.push((other.to_owned(), version)),
            }
        }
        let nodes = api.list(null(), |n| api.n_nodes(graph, n), |list, n| api.nodes(graph, list, n))?;
        let mut contexts = Vec::new();
        for (at, &node) in nodes.iter().enumerate() {
            let read = reader.node(node)?;
            if is_context(&read) {
                contexts.extend(reader.context(at, node)?);
            }
            reader.draft.nodes.push(read);
        }
        for value in api.list(null(), |n| api.n_outputs(graph, n), |list, n| api.outputs(graph, list, n))? {
            if let Some(value) = reader.value(value)? {
                reader.draft.outputs.push(value);
            }
        }
        let file = PathBuf::from(text(got(api, null(), |out| api.model_path(graph, out))?));
        Ok(ReadGraph { draft: reader.draft, nodes, mark, reads_outside: reader.reads_outside, contexts, file })
    }
}

/// Whether a node represents a compiled part of any provider.
fn is_context(node: &DraftNode) -> bool {
    node.op == OPERATOR && node.domain == DOMAIN
}

/// Returns the names of a node's inputs and outputs.
///
/// # Errors
/// If a function of ONNX Runtime fails.
///
/// # Safety
/// The node is a valid node of ONNX Runtime.
pub unsafe fn ports_of(api: &OrtApi, node: *const Node) -> Result<[Vec<String>; 2], OrtFailure> {
    // SAFETY: promised by the caller.
    unsafe {
        let inputs = api.list(null(), |n| api.n_node_inputs(node, n), |list, n| api.node_inputs(node, list, n))?;
        let outputs = api.list(null(), |n| api.n_node_outputs(node, n), |list, n| api.node_outputs(node, list, n))?;
        let name = |value: &*const ValueInfo| match value.is_null() {
            true => Ok(String::new()),
            false => got(api, null(), |out| api.value_name(*value, out)).map(|name| text(name)),
        };
        let names = |list: Vec<_>| list.iter().map(name).collect::<Result<Vec<String>, OrtFailure>>();
        Ok([names(inputs)?, names(outputs)?])
    }
}

impl GraphReader<'_> {
    /// Reads a node.
    ///
    /// # Safety
    /// The node is a valid node of ONNX Runtime.
    unsafe fn node(&mut self, node: *const Node) -> Result<DraftNode, OrtFailure> {
        let api = self.api;
        // SAFETY: promised by the caller; names are zero-terminated, and are copied.
        unsafe {
            let op = text(got(api, null(), |out| api.operator(node, out))?);
            let domain = text(got(api, null(), |out| api.domain(node, out))?);
            let inputs = api.list(null(), |n| api.n_node_inputs(node, n), |list, n| api.node_inputs(node, list, n))?;
            let outputs =
                api.list(null(), |n| api.n_node_outputs(node, n), |list, n| api.node_outputs(node, list, n))?;
            let mut read = DraftNode { op, domain, ..DraftNode::default() };
            for value in inputs {
                read.inputs.push(self.value(value)?);
            }
            for value in outputs {
                read.outputs.push(self.value(value)?);
            }
            if got(api, 0, |out| api.n_subgraphs(node, out))? > 0 {
                // Subgraphs of the node read values of this graph by name.
                let captured = api.list(null(), |n| api.n_captured(node, n), |list, n| api.captured(node, list, n))?;
                for value in captured {
                    read.inputs.push(self.value(value)?);
                }
                read.foreign = Some("graphs within nodes stay with ONNX Runtime".to_owned());
                return Ok(read);
            }
            if is_context(&read) {
                read.foreign = Some("it is a compiled part".to_owned());
                return Ok(read);
            }
            for (name, attribute) in self.attributes(node)? {
                match self.attribute(attribute)? {
                    Some(value) => read.attributes.push((name, value)),
                    None => read.foreign = Some(format!("attribute `{name}` is of a kind that is not supported")),
                }
            }
            let values = read.inputs.iter().chain(&read.outputs).flatten();
            if let Some(value) = values.map(|&at| &self.draft.values[at]).find(|value| value.declared.is_none()) {
                read.foreign = Some(format!("`{}` is no tensor of a type that is supported", value.name));
            }
            Ok(read)
        }
    }

    /// Returns the attributes of a node, by name.
    ///
    /// # Safety
    /// The node is a valid node of ONNX Runtime.
    unsafe fn attributes(&self, node: *const Node) -> Result<Vec<(String, *const api::Attribute)>, OrtFailure> {
        let api = self.api;
        // SAFETY: promised by the caller; names are zero-terminated, and are copied.
        unsafe {
            let all = api.list(null(), |n| api.n_attributes(node, n), |list, n| api.attributes(node, list, n))?;
            let named = |at| Ok((text(got(api, null(), |out| api.attribute_name(at, out))?), at));
            all.into_iter().map(named).collect()
        }
    }

    /// Reads a node that represents a compiled part; `None` if it is another provider's.
    ///
    /// # Safety
    /// The node is a valid node of ONNX Runtime.
    unsafe fn context(&self, at: NodeAt, node: *const Node) -> Result<Option<ContextNode>, OrtFailure> {
        let (mut source, mut is_embedded, mut content) = (Vec::new(), true, Vec::new());
        // SAFETY: promised by the caller.
        unsafe {
            for (name, attribute) in self.attributes(node)? {
                match name.as_str() {
                    "source" => source = self.attribute_bytes(attribute, TEXT)?,
                    "ep_cache_context" => content = self.attribute_bytes(attribute, TEXT)?,
                    "embed_mode" => is_embedded = self.attribute(attribute)? != Some(Attribute::Int(0)),
                    _ => {}
                }
            }
        }
        Ok((without_end(&source) == NAME.to_bytes()).then_some(ContextNode { at, is_embedded, content }))
    }

    /// Returns the bytes of an attribute.
    ///
    /// # Safety
    /// The attribute is a valid attribute of ONNX Runtime.
    unsafe fn attribute_bytes(&self, attribute: *const api::Attribute, kind: i32) -> Result<Vec<u8>, OrtFailure> {
        let api = self.api;
        let mut n_bytes = 0;
        // SAFETY: promised by the caller. Called without room, the function fails but returns the size
        // needed.
        unsafe {
            let status = api.read_attribute(attribute, kind, api::nothing(), 0, &mut n_bytes);
            let asked = api.check(status);
            if n_bytes == 0 {
                // The call may have succeeded for an empty attribute.
                return asked.map(|()| Vec::new()).or(Ok(Vec::new()));
            }
            let mut bytes = vec![0_u8; n_bytes];
            let room: *mut c_void = bytes.as_mut_ptr().cast();
            api.check(api.read_attribute(attribute, kind, room, n_bytes, &mut n_bytes))?;
            Ok(bytes)
        }
    }

    /// Reads an attribute; `None` for unsupported kinds.
    ///
    /// # Safety
    /// The attribute is a valid attribute of ONNX Runtime.
    unsafe fn attribute(&self, attribute: *const api::Attribute) -> Result<Option<Attribute>, OrtFailure> {
        // SAFETY: promised by the caller.
        let kind = unsafe { got(self.api, 0, |out| self.api.attribute_kind(attribute, out))? };
        if !(1..=6).contains(&kind) {
            return Ok(None);
        }
        // SAFETY: promised by the caller.
        let bytes = unsafe { self.attribute_bytes(attribute, kind)? };
        let ints = || bytes.as_chunks::<8>().0.iter().map(|&b| i64::from_ne_bytes(b)).collect::<Vec<i64>>();
        let floats = || bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_ne_bytes(b)).collect::<Vec<f32>>();
        let word = |bytes: &[u8]| {
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        Ok(match kind {
            1 => ints().first().map(|&int| Attribute::Int(int)),
            2 => Some(Attribute::Ints(ints())),
            3 => floats().first().map(|&float| Attribute::Float(float)),
            4 => Some(Attribute::Floats(floats())),
            5 => Some(Attribute::Text(word(&bytes))),
            // Each string is zero-terminated.
            _ => Some(Attribute::Texts(bytes.split_inclusive(|&byte| byte == 0).map(word).collect())),
        })
    }

    /// Reads a value; `None` for an omitted one.
    ///
    /// # Safety
    /// The value is null, or a valid value of ONNX Runtime.
    unsafe fn value(&mut self, value: *const ValueInfo) -> Result<Option<ValueIndex>, OrtFailure> {
        if value.is_null() {
            return Ok(None);
        }
        let api = self.api;
        // SAFETY: promised by the caller; names are zero-terminated, and are copied.
        let name = unsafe { text(got(api, null(), |out| api.value_name(value, out))?) };
        if name.is_empty() {
            return Ok(None);
        }
        if let Some(&at) = self.known.get(&name) {
            return Ok(Some(at));
        }
        // SAFETY: promised by the caller.
        let (declared, constant) = unsafe {
            let info = got(api, null(), |out| api.value_type(value, out)).unwrap_or(null());
            let declared = if info.is_null() || got(api, 0, |out| api.kind_of(info, out))? != TENSOR {
                None
            } else {
                declared(api, got(api, null(), |out| api.as_tensor(info, out))?)?
            };
            self.reads_outside |= got(api, false, |out| api.is_from_outside(value, out))?;
            let is_constant = got(api, false, |out| api.is_constant(value, out))?;
            (declared, if is_constant { self.constant(value)? } else { None })
        };
        // A constant whose elements are not available cannot be used.
        let declared = constant.as_ref().map(|tensor| exactly(tensor.ty())).or(declared);
        self.draft.values.push(DraftValue { name: name.clone(), declared, constant });
        self.known.insert(name, self.draft.values.len() - 1);
        Ok(Some(self.draft.values.len() - 1))
    }

    /// Returns the elements of a constant; `None` for unsupported types.
    ///
    /// # Safety
    /// The value is a valid constant of ONNX Runtime.
    unsafe fn constant(&self, value: *const ValueInfo) -> Result<Option<Tensor>, OrtFailure> {
        let api = self.api;
        // SAFETY: promised by the caller; the result of `tensor_info` is released.
        unsafe {
            let tensor = got(api, null(), |out| api.initializer(value, out))?;
            if tensor.is_null() {
                return Ok(None);
            }
            let Some((dtype, shape)) = type_of(api, tensor)? else { return Ok(None) };
            let ty = TensorType::new(dtype, shape);
            let len = ty.checked_bytes().ok_or("a constant is larger than memory")?;
            let pointer = got(api, api::nothing(), |out| api.tensor_data(tensor.cast_mut(), out))?;
            if len == 0 {
                return Ok(Tensor::new(ty, Bytes::new()));
            }
            let held = HeldConstant { pointer: pointer.cast_const().cast(), len, _mark: Arc::clone(&self.mark) };
            Ok(Tensor::new(ty, Bytes::from_owner(held)))
        }
    }
}

/// Strips a terminating zero, if any.
pub fn without_end(text: &[u8]) -> &[u8] {
    text.strip_suffix(&[0]).unwrap_or(text)
}

/// Makes the declaration of a value of a known type.
fn exactly(ty: &TensorType) -> Declared {
    Declared { dtype: ty.dtype, dims: Some(ty.shape.iter().map(|&size| Dim::Size(size)).collect()) }
}

/// Returns element type and shape of a tensor; `None` for unsupported types.
///
/// # Errors
/// If a function of ONNX Runtime fails.
///
/// # Safety
/// The tensor is a valid tensor of ONNX Runtime.
pub unsafe fn type_of(api: &OrtApi, tensor: *const api::Value) -> Result<Option<(DType, Vec<usize>)>, OrtFailure> {
    // SAFETY: promised by the caller; the information is owned here, and released once.
    unsafe {
        let info = got(api, api::nothing(), |out| api.tensor_info(tensor, out))?;
        let declared = declared(api, info);
        api.release_tensor_info(info);
        let Some(Declared { dtype, dims: Some(dims) }) = declared? else { return Ok(None) };
        let size = |dim: &Dim| if let Dim::Size(size) = dim { Some(*size) } else { None };
        Ok(dims.iter().map(size).collect::<Option<Vec<usize>>>().map(|shape| (dtype, shape)))
    }
}

/// Returns element type and dimensions; `None` for unsupported types.
///
/// # Safety
/// The information is valid, from ONNX Runtime.
unsafe fn declared(api: &OrtApi, info: *const TensorInfo) -> Result<Option<Declared>, OrtFailure> {
    // SAFETY: promised by the caller; the functions write as many elements as requested.
    unsafe {
        let number = got(api, 0, |out| api.element_type(info, out))?;
        let Ok(dtype) = DType::from_onnx(number.into()) else { return Ok(None) };
        let sizes = api.list(0, |n| api.rank(info, n), |list, n| api.dims(info, list, n))?;
        let mut names = vec![null(); sizes.len()];
        api.check(api.dim_names(info, names.as_mut_ptr(), names.len()))?;
        let dim = |(size, name): (i64, _)| match (usize::try_from(size), text(name)) {
            (Ok(size), _) => Dim::Size(size),
            (Err(_), name) if name.is_empty() => Dim::Unknown,
            (Err(_), name) => Dim::Named(name),
        };
        let dims = sizes.into_iter().zip(names).map(dim).collect();
        Ok(Some(Declared { dtype, dims: Some(dims) }))
    }
}
