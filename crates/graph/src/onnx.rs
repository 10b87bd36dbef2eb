//! ONNX models: reading one from a file's bytes as a [`Model`], and writing models that are built here.

mod data;
mod deform;
mod draft;
mod functions;
mod fused;
mod ml;
mod other;
mod outline;
mod proto;
mod quantized;
mod reweight;
mod wire;
mod write;

use std::collections::HashMap;

use bytes::Bytes;

use crate::error::{invalid, unsupported};
use crate::graph::{Declared, Dim, Graph, Model, Node, Value, ValueId};
use crate::op::{Attribute, Attributes, Body, Import, Op, Unknown, find};
use crate::{DType, OpError, Place, Problem, ReadError, Reason, Tensor};
use data::{LoadedTensor, TensorBytes};
use draft::Draft;
use proto::{AttributeProto, DimProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfo};
use wire::{Budget, Message};

pub use data::External;
pub use other::kind_of_other;
pub use outline::read_outline;
pub use reweight::reweight;
pub use write::{GraphPort, ModelFile, NodeFile, write};

/// Newest version of ONNX's own operator set that is supported.
pub const NEWEST_OPSET: i64 = 28;
/// Deepest nesting of graphs in graphs, and of functions in functions.
const DEEPEST: usize = 16;

/// Reads a model. Weights are not copied but refer to the file's bytes, or to those of external data files,
/// which `external` opens by relative path; only weights that are stored as lists of numbers (`float_data`
/// and such) are copied.
///
/// Operators that are not supported are kept as [`Op::Unknown`].
///
/// # Errors
/// If the bytes are not a model, or the model violates ONNX's rules.
///
/// # Cost
/// Linear in the size of the file without its weights. Memory stays below four times the file's size plus 64
/// MiB, even for malicious files.
pub fn read(file: &Bytes, external: &mut External<'_>) -> Result<Model, ReadError> {
    let budget = Budget::of_file(file.len());
    let message = Message { bytes: file, at: 0 };
    let no_graph = || ReadError::NoModel("it has no graph: it is not an ONNX model".to_owned());
    let proto = ModelProto::read(message, &budget);
    let read = proto.and_then(|mut proto| Ok((proto.graph.take().ok_or_else(no_graph)?, proto)));
    let (graph, proto) = read.map_err(|error| {
        let kind = kind_of_other(file).map(str::to_owned).or_else(|| other::cut_off(message));
        kind.map_or(error, ReadError::NoModel)
    })?;
    let mut opsets = proto.opsets;
    if opsets.is_empty() && proto.ir_version < 3 {
        opsets.push(("", 1));
    }
    if opsets.is_empty() {
        let what = "it names no opset: it is not an ONNX model, or damaged (save it anew)";
        return Err(ReadError::NoModel(what.to_owned()));
    }
    let source = TensorBytes { file, external, opened: Vec::new(), budget: &budget };
    let mut importer = Importer {
        source,
        functions: &proto.functions,
        scopes: Vec::new(),
        // Before version 4, every weight had to be listed among the inputs.
        has_defaults: proto.ir_version >= 4,
    };
    let graph = importer.graph(graph, &opsets)?.0;
    Ok(Model {
        graph,
        opsets: opsets.iter().map(|&(domain, version)| (plain_domain(domain).to_owned(), version)).collect(),
        producer: [proto.producer.0, proto.producer.1].join(" ").trim().to_owned(),
    })
}

/// Whether there is an operator of this name, apart from a model's own functions.
fn is_known(domain: &str, name: &str) -> bool {
    let plain = plain_domain(domain);
    let is_value = plain.is_empty() && name == "Constant";
    is_value || find(plain, name).is_some() || functions::has(plain, name) || drafted_row(domain, name).is_some()
}

/// Row of an operator that is decomposed into other operators.
fn drafted_row(domain: &str, name: &str) -> Option<&'static draft::Row> {
    let tables: [(&str, &[draft::Row]); 4] = [
        ("", deform::ROWS),
        (ml::DOMAIN, ml::ROWS),
        (quantized::DOMAIN, quantized::ROWS),
        (fused::DOMAIN, fused::ROWS),
    ];
    tables
        .into_iter()
        .filter(|(own, _)| *own == plain_domain(domain))
        .flat_map(|(_, rows)| rows)
        .find(|row| row.name == name)
}

/// Normalises the name of ONNX's own domain, which has two.
fn plain_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Graph under construction.
#[derive(Default)]
struct Scope<'a> {
    graph: Graph,
    names: HashMap<&'a str, ValueId>,
    /// Nodes in the file's order, which need not be topological.
    pending: Vec<Node>,
    /// Values captured from the enclosing graph: the value there, and the input here.
    captures: Vec<(ValueId, ValueId)>,
    /// Whether names of the enclosing graph are not visible, as in a function.
    is_closed: bool,
}

struct Importer<'a, 'b> {
    source: TensorBytes<'b>,
    functions: &'b [FunctionProto<'a>],
    scopes: Vec<Scope<'a>>,
    /// Whether initializers that are also inputs are defaults.
    has_defaults: bool,
}

type Opsets<'a> = [(&'a str, i64)];

impl<'a> Importer<'a, '_> {
    fn scope(&mut self) -> &mut Scope<'a> {
        self.scopes.last_mut().expect("a graph is being built")
    }

    /// Builds a graph; returns it with the values of the enclosing graph that its last inputs capture.
    fn graph(&mut self, message: Message<'a>, opsets: &Opsets<'a>) -> Result<(Graph, Vec<ValueId>), ReadError> {
        if self.scopes.len() >= DEEPEST {
            return Err(ReadError::NoModel(format!("graphs lie in graphs more than {DEEPEST} deep")));
        }
        let functions = self.functions;
        let is_own = |domain: &str, name: &str| functions.iter().any(|f| f.name == name && f.domain == domain);
        let is_read = |domain: &str, name: &str| is_known(domain, name) || is_own(domain, name);
        let proto = GraphProto::read(message, self.source.budget, &is_read)?;
        self.scopes.push(Scope::default());
        self.scope().graph.name = proto.name.to_owned();
        if proto.n_sparse > 0 {
            let what = format!("{} of its weights are sparse, which is not supported", proto.n_sparse);
            return Err(ReadError::NoModel(what));
        }
        // Quantizers write a bias that two nodes share twice; as in ONNX Runtime the last one counts.
        let last: HashMap<&str, usize> = proto.initializers.iter().enumerate().map(|(at, w)| (w.name, at)).collect();
        for (at, initializer) in proto.initializers.iter().enumerate() {
            if last[initializer.name] != at {
                continue;
            }
            let id = self.declare(initializer.name)?;
            match self.source.load(initializer)? {
                LoadedTensor::Tensor(tensor) => self.set_constant(id, tensor),
                LoadedTensor::Texts(places, texts) => {
                    self.set_constant(id, places);
                    self.scope().graph.value_mut(id).texts = Some(texts);
                }
                LoadedTensor::Foreign(name) => {
                    let reason = unsupported!("elements of type {name} are not supported");
                    let node = NodeProto { op_type: "Constant", name: initializer.name, ..NodeProto::default() };
                    self.add(&node, opsets, Op::Unknown(Unknown { reason }), vec![], vec![Some(id)]);
                }
            }
        }
        for input in &proto.inputs {
            let known = self.scope().names.get(input.name).copied();
            // Old models list their weights among the inputs.
            let id = match known {
                Some(id) if !self.scope().graph.inputs.contains(&id) => {
                    let is_default = self.has_defaults && self.scopes.len() == 1;
                    let graph = &mut self.scope().graph;
                    let value = graph.value(id);
                    let is_default = is_default && value.constant.is_some() && value.texts.is_none();
                    if is_default && !graph.defaults.contains(&id) {
                        graph.defaults.push(id);
                    }
                    id
                }
                _ => {
                    let id = self.declare(input.name)?;
                    self.scope().graph.inputs.push(id);
                    id
                }
            };
            self.declare_type(id, input)?;
        }
        self.nodes(&proto.nodes, opsets)?;
        for info in proto.value_infos.iter().chain(&proto.outputs) {
            if let Some(&id) = self.scope().names.get(info.name) {
                self.declare_type(id, info)?;
            }
        }
        for output in &proto.outputs {
            let id = self.resolve(output.name).ok_or_else(|| {
                let what = format!("its output `{}` is computed by no node", output.name);
                ReadError::NoModel(format!("{what}: the model is damaged (save it anew)"))
            })?;
            self.scope().graph.outputs.push(id);
        }
        let scope = self.scopes.pop().expect("the graph that was pushed");
        let Scope { mut graph, pending, captures, .. } = scope;
        for node in sorted(pending, &graph)? {
            graph.add_node(node);
        }
        let (outer, inner): (Vec<ValueId>, Vec<ValueId>) = captures.into_iter().unzip();
        graph.inputs.extend(inner);
        Ok((graph, outer))
    }

    /// Declares a new value of this name; an empty name is anonymous.
    fn declare(&mut self, name: &'a str) -> Result<ValueId, ReadError> {
        self.source.budget.charge(2 * size_of::<Value>() + name.len())?;
        let scope = self.scope();
        let id = scope.graph.add_value(Value { name: name.to_owned(), ..Value::default() });
        match scope.names.insert(name, id) {
            None => Ok(id),
            Some(_) => Err(ReadError::NoModel(format!(
                "`{name}` is computed or given twice: the model is damaged (save it anew)"
            ))),
        }
    }

    fn set_constant(&mut self, id: ValueId, tensor: Tensor) {
        let value = self.scope().graph.value_mut(id);
        value.ty = Some(tensor.ty().clone());
        value.constant = Some(tensor);
    }

    fn declare_type(&mut self, id: ValueId, info: &ValueInfo<'a>) -> Result<(), ReadError> {
        let Some(declared) = declared_of(info) else { return Ok(()) };
        self.source.budget.charge(info.dims.as_ref().map_or(0, |dims| dims.len() * size_of::<Dim>()))?;
        self.scope().graph.value_mut(id).declared = Some(declared);
        Ok(())
    }

    /// Resolves a name to a value of this graph, or to an input that captures a value of an enclosing graph.
    fn resolve(&mut self, name: &'a str) -> Option<ValueId> {
        self.resolve_at(self.scopes.len() - 1, name)
    }

    fn resolve_at(&mut self, level: usize, name: &'a str) -> Option<ValueId> {
        if let Some(&id) = self.scopes[level].names.get(name) {
            return Some(id);
        }
        if level == 0 || self.scopes[level].is_closed {
            return None;
        }
        let outer = self.resolve_at(level - 1, name)?;
        let around = &self.scopes[level - 1].graph;
        let (value, is_default) = (around.value(outer), around.defaults.contains(&outer));
        // A caller may replace a default.
        let known = |value: &Value| (value.ty.clone(), value.constant.clone());
        let (ty, constant) = if is_default { (None, None) } else { known(value) };
        let declared = value.declared.clone();
        let texts = value.texts.clone();
        let scope = &mut self.scopes[level];
        let inner = scope.graph.add_value(Value { name: name.to_owned(), ty, declared, texts, ..Value::default() });
        scope.names.insert(name, inner);
        if constant.is_some() {
            scope.graph.value_mut(inner).constant = constant;
        } else {
            scope.captures.push((outer, inner));
        }
        Some(inner)
    }

    fn add(
        &mut self,
        node: &NodeProto<'a>,
        opsets: &Opsets<'a>,
        op: Op,
        inputs: Vec<Option<ValueId>>,
        outputs: Vec<Option<ValueId>>,
    ) {
        let node = Node { op, place: place_of(node, opsets), inputs, outputs };
        self.scope().pending.push(node);
    }

    fn nodes(&mut self, nodes: &[NodeProto<'a>], opsets: &Opsets<'a>) -> Result<(), ReadError> {
        // A node may read the result of a later one.
        let mut outputs = Vec::with_capacity(nodes.len());
        for node in nodes {
            let mut ids = Vec::with_capacity(node.outputs.len());
            for &name in &node.outputs {
                let is_new = name.is_empty() || !self.scope().names.contains_key(name);
                if !is_new {
                    let what = invalid!("its output `{name}` is computed or given twice (save the model anew)");
                    return Err(refuse(node, opsets, what));
                }
                ids.push(if name.is_empty() { None } else { Some(self.declare(name)?) });
            }
            outputs.push(ids);
        }
        for (node, outputs) in nodes.iter().zip(outputs) {
            self.node(node, opsets, outputs)?;
        }
        Ok(())
    }

    fn node(
        &mut self,
        node: &NodeProto<'a>,
        opsets: &Opsets<'a>,
        outputs: Vec<Option<ValueId>>,
    ) -> Result<(), ReadError> {
        self.source.budget.charge(2 * size_of::<Node>() + 16 * (node.inputs.len() + node.outputs.len()))?;
        if node.op_type.is_empty() {
            return Err(refuse(node, opsets, invalid!("it has no operator: the model is damaged (save it anew)")));
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &name in &node.inputs {
            let id = match name {
                "" => None,
                _ => Some(self.resolve(name).ok_or_else(|| {
                    let what = format!("its input `{name}` is neither computed nor given");
                    refuse(node, opsets, invalid!("{what} (save the model anew)"))
                })?),
            };
            inputs.push(id);
        }
        if let Some(function) = self.functions.iter().find(|f| f.name == node.op_type && f.domain == node.domain) {
            return self.function(function, node, &inputs, outputs);
        }
        match functions::known(node) {
            Some(Ok(function)) => return self.function(&function, node, &inputs, outputs),
            Some(Err(reason)) => {
                self.add(node, opsets, Op::Unknown(Unknown { reason }), inputs, outputs);
                return Ok(());
            }
            None => {}
        }
        // Captured values of a loop follow its own inputs, two of which may be omitted.
        if node.op_type == "Loop" {
            inputs.resize(inputs.len().max(2), None);
        }
        let mut attributes = Vec::with_capacity(node.attributes.len());
        let mut bodies = Vec::new();
        for proto in &node.attributes {
            let attribute = match proto.graph {
                Some(message) => {
                    let (graph, outer) = self.graph(message, opsets)?;
                    let captures = outer.into_iter().map(|id| self.capture(&mut inputs, id)).collect();
                    bodies.push((proto.name.to_owned(), Body { graph: Box::new(graph), captures }));
                    continue;
                }
                None => self.attribute(proto)?,
            };
            attributes.push((proto.name.to_owned(), attribute));
        }
        let attributes = Attributes::new(attributes);
        let row = drafted_row(node.domain, node.op_type);
        if row.is_some() || node.domain == ml::DOMAIN {
            return self.drafted(row, node, opsets, (inputs, outputs), attributes);
        }
        if node.op_type == "Constant" && plain_domain(node.domain).is_empty() {
            let constant = attributes.constant();
            if let (Ok(tensor), Some(Some(id))) = (constant, outputs.first()) {
                self.set_constant(*id, tensor);
                return Ok(());
            }
        }
        let op = make_op(node, opsets, &inputs, outputs.len(), attributes, bodies);
        let op = op.unwrap_or_else(|reason| Op::Unknown(Unknown { reason }));
        self.add(node, opsets, op, inputs, outputs);
        Ok(())
    }

    /// Adds a captured value to a node's inputs, and returns its position.
    fn capture(&self, inputs: &mut Vec<Option<ValueId>>, id: ValueId) -> usize {
        inputs.push(Some(id));
        inputs.len() - 1
    }

    /// Inlines the nodes of a model's own function in place of a call.
    fn function(
        &mut self,
        function: &FunctionProto<'a>,
        call: &NodeProto<'a>,
        inputs: &[Option<ValueId>],
        outputs: Vec<Option<ValueId>>,
    ) -> Result<(), ReadError> {
        if self.scopes.len() >= DEEPEST {
            return Err(ReadError::NoModel(format!("functions call functions more than {DEEPEST} deep")));
        }
        // The function has a scope of names of its own over the same graph, which is moved into that scope
        // for the time being.
        let caller = self.scopes.len() - 1;
        let mut scope = Scope { is_closed: true, ..Scope::default() };
        std::mem::swap(&mut scope.graph, &mut self.scopes[caller].graph);
        std::mem::swap(&mut scope.pending, &mut self.scopes[caller].pending);
        scope.names = function.inputs.iter().zip(inputs).filter_map(|(&name, id)| Some((name, (*id)?))).collect();
        let missing = function.inputs.iter().copied().filter(|name| !scope.names.contains_key(name));
        let missing: Vec<&str> = missing.collect();
        self.scopes.push(scope);
        let mut nodes = Vec::with_capacity(function.nodes.len());
        for node in &function.nodes {
            self.source.budget.charge(size_of::<NodeProto<'_>>())?;
            let mut node = node.clone();
            for attribute in &mut node.attributes {
                self.source.budget.charge(size_of::<AttributeProto<'_>>() + 8 * attribute.ints.len())?;
                if !attribute.reference.is_empty() {
                    let given = call.attributes.iter().chain(&function.defaults);
                    let name = attribute.name;
                    *attribute = given
                        .clone()
                        .find(|given| given.name == attribute.reference)
                        .map_or_else(AttributeProto::default, |given| AttributeProto { name, ..given.clone() });
                }
            }
            node.attributes.retain(|attribute| !attribute.name.is_empty());
            node.inputs.iter_mut().filter(|name| missing.contains(name)).for_each(|name| *name = "");
            nodes.push(node);
        }
        let result = self.nodes(&nodes, &function.opsets);
        let found: Vec<Option<ValueId>> =
            function.outputs.iter().map(|&name| self.scope().names.get(name).copied()).collect();
        let scope = self.scopes.pop().expect("the function's scope");
        self.scopes[caller].graph = scope.graph;
        self.scopes[caller].pending = scope.pending;
        result?;
        for (found, output) in found.into_iter().zip(outputs) {
            let Some(output) = output else { continue };
            let identity = NodeProto { op_type: "Identity", name: call.name, ..NodeProto::default() };
            self.add(&identity, &[("", NEWEST_OPSET)], Op::identity(), vec![found], vec![Some(output)]);
        }
        Ok(())
    }

    /// Replaces a node that has a draft by nodes of known operators, such as ONNX's own.
    fn drafted(
        &mut self,
        row: Option<&draft::Row>,
        node: &NodeProto<'a>,
        opsets: &Opsets<'a>,
        (inputs, outputs): (Vec<Option<ValueId>>, Vec<Option<ValueId>>),
        attributes: Attributes,
    ) -> Result<(), ReadError> {
        let mut draft = Draft::default();
        let drawn = row.ok_or_else(|| not_supported(node.domain));
        let drawn = drawn.and_then(|row| draw(row, node, opsets, (&inputs, outputs.len()), attributes, &mut draft));
        let ports = match drawn {
            Ok(ports) => ports,
            Err(reason) => {
                self.add(node, opsets, Op::Unknown(Unknown { reason }), inputs, outputs);
                return Ok(());
            }
        };
        let place = place_of(node, opsets);
        let graph = &mut self.scope().graph;
        let mut value = |what: &str, at: usize| {
            graph.add_value(Value { name: format!("{}.{what}{at}", place.node), ..Value::default() })
        };
        let constants: Vec<ValueId> = (0..draft.constants.len()).map(|at| value("constant", at)).collect();
        let results: Vec<ValueId> = (0..draft.nodes.len()).map(|at| value("step", at)).collect();
        let find = |port: &draft::Port| match *port {
            draft::Port::Input(at) => inputs[at],
            draft::Port::Constant(at) => Some(constants[at]),
            draft::Port::Node(at) => Some(results[at]),
        };
        for (&id, (tensor, texts)) in constants.iter().zip(draft.constants) {
            self.set_constant(id, tensor);
            self.scope().graph.value_mut(id).texts = texts;
        }
        let step = |op: Op, inputs: Vec<Option<ValueId>>, output: ValueId| {
            let name = format!("{:?}", op.operation()).split(['(', ' ', '{']).next().unwrap_or_default().to_owned();
            let place = Place { operator: name, ..place.clone() };
            Node { op, place, inputs, outputs: vec![Some(output)] }
        };
        for ((op, ports), &result) in draft.nodes.into_iter().zip(&results) {
            let node = step(op, ports.iter().map(find).collect(), result);
            self.scope().pending.push(node);
        }
        for (port, output) in ports.iter().zip(outputs) {
            if let Some(output) = output {
                let node = step(Op::identity(), vec![find(port)], output);
                self.scope().pending.push(node);
            }
        }
        Ok(())
    }

    fn attribute(&mut self, proto: &AttributeProto<'a>) -> Result<Attribute, ReadError> {
        Ok(match proto.kind {
            4 | 0 if proto.tensor.is_some() => {
                let message = proto.tensor.expect("it has a tensor");
                match self.source.load(&TensorProto::read(message, self.source.budget)?)? {
                    LoadedTensor::Tensor(tensor) => Attribute::Tensor(tensor),
                    LoadedTensor::Texts(..) => Attribute::Foreign("a tensor of texts".to_owned()),
                    LoadedTensor::Foreign(name) => Attribute::Foreign(format!("a tensor of type {name}")),
                }
            }
            _ => plain_attribute(proto),
        })
    }
}

/// Declaration of a tensor; `None` for anything else.
fn declared_of(info: &ValueInfo<'_>) -> Option<Declared> {
    let dtype = DType::from_onnx(info.elements.filter(|_| !info.is_foreign)?).ok()?;
    // They occur only within models.
    if dtype.is_float8() {
        return None;
    }
    let dim = |dim: &DimProto<'_>| match dim {
        DimProto::Size(size) => usize::try_from(*size).map_or(Dim::Unknown, Dim::Size),
        DimProto::Named("") | DimProto::Unknown => Dim::Unknown,
        DimProto::Named(name) => Dim::Named((*name).to_owned()),
    };
    Some(Declared { dtype, dims: info.dims.as_ref().map(|dims| dims.iter().map(dim).collect()) })
}

/// Decodes an attribute that is not a tensor.
fn plain_attribute(proto: &AttributeProto<'_>) -> Attribute {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match proto.kind {
        1 => Attribute::Float(proto.float.unwrap_or(0.0)),
        2 => Attribute::Int(proto.int.unwrap_or(0)),
        3 => Attribute::Text(text(proto.text.unwrap_or(&[]))),
        6 => Attribute::Floats(floats(&proto.floats)),
        7 => Attribute::Ints(proto.ints.clone()),
        8 => Attribute::Texts(proto.texts.iter().map(|bytes| text(bytes)).collect()),
        // Old files do not state the kind; it follows from the field that is present.
        0 => match (proto.float, proto.int, proto.text) {
            (Some(float), ..) => Attribute::Float(float),
            (_, Some(int), _) => Attribute::Int(int),
            (.., Some(bytes)) => Attribute::Text(text(bytes)),
            _ if !proto.floats.is_empty() => Attribute::Floats(floats(&proto.floats)),
            _ if !proto.texts.is_empty() => Attribute::Texts(proto.texts.iter().map(|b| text(b)).collect()),
            _ => Attribute::Ints(proto.ints.clone()),
        },
        kind => Attribute::Foreign(format!("an attribute of kind {kind}")),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

/// Version of a node's domain; 0 if the model does not import it. ONNX Runtime's own domain has one version
/// and need not be imported: Intel's quantizer leaves it out.
fn opset_of(node: &NodeProto<'_>, opsets: &Opsets<'_>) -> i64 {
    let domain = plain_domain(node.domain);
    let named = opsets.iter().find(|(name, _)| plain_domain(name) == domain);
    named.map_or(i64::from(domain == fused::DOMAIN), |(_, version)| *version)
}

fn place_of(node: &NodeProto<'_>, opsets: &Opsets<'_>) -> Place {
    let domain = plain_domain(node.domain);
    let operator = if domain.is_empty() { node.op_type.to_owned() } else { format!("{domain}.{}", node.op_type) };
    let first_output = node.outputs.iter().find(|name| !name.is_empty()).copied().unwrap_or("");
    let name = if node.name.is_empty() { first_output } else { node.name };
    Place { node: name.to_owned(), operator, opset: opset_of(node, opsets) }
}

fn refuse(node: &NodeProto<'_>, opsets: &Opsets<'_>, reason: OpError) -> ReadError {
    ReadError::Node(Box::new(Problem { place: Some(place_of(node, opsets)), reason: Reason::Op(reason) }))
}

/// Makes the operator of a node from its attributes.
fn make_op(
    node: &NodeProto<'_>,
    opsets: &Opsets<'_>,
    inputs: &[Option<ValueId>],
    n_outputs: usize,
    attributes: Attributes,
    bodies: Vec<(String, Body)>,
) -> Result<Op, OpError> {
    let row = find(plain_domain(node.domain), node.op_type).ok_or_else(|| not_supported(node.domain))?;
    let version = version_of(node, opsets, row.since)?;
    let n_captured: usize = bodies.iter().map(|(_, body)| body.captures.len()).sum();
    let given = given(&inputs[..inputs.len() - n_captured], &row.n_inputs)?;
    let import = Import { version, given, n_outputs, attributes, bodies };
    let op = (row.import)(&import)?;
    all_read(&import)?;
    Ok(op)
}

/// Drafts the nodes that compute an operator, and returns its outputs.
fn draw(
    row: &draft::Row,
    node: &NodeProto<'_>,
    opsets: &Opsets<'_>,
    (inputs, n_outputs): (&[Option<ValueId>], usize),
    attributes: Attributes,
    draft: &mut Draft,
) -> Result<Vec<draft::Port>, OpError> {
    let version = version_of(node, opsets, row.since)?;
    let import = Import { version, given: given(inputs, &row.n_inputs)?, n_outputs, attributes, bodies: Vec::new() };
    let ports = (row.draw)(&import, draft)?;
    all_read(&import)?;
    match ports.len() < n_outputs {
        true => Err(invalid!("it has {n_outputs} outputs, and gives {}", ports.len())),
        false => Ok(ports),
    }
}

fn not_supported(domain: &str) -> OpError {
    match domain {
        // The order of its weights is not stated in the file.
        "com.microsoft.nchwc" => unsupported!(
            "ONNX Runtime optimized the model for one kind of CPU (save it with ORT_ENABLE_EXTENDED at most)"
        ),
        _ => unsupported!("this operator is not supported"),
    }
}

/// Version of an operator: the last version in which it changed that is not newer than the model's.
fn version_of(node: &NodeProto<'_>, opsets: &Opsets<'_>, since: &[i64]) -> Result<i64, OpError> {
    let domain = plain_domain(node.domain);
    let opset = opset_of(node, opsets);
    if opset == 0 {
        return Err(invalid!("the model names no opset of its domain (save it anew)"));
    }
    let newest = match domain {
        "" => NEWEST_OPSET,
        ml::DOMAIN => ml::NEWEST,
        _ => i64::MAX,
    };
    if opset > newest {
        return Err(unsupported!("the newest opset that is supported is {newest}"));
    }
    let version = since.iter().copied().filter(|&since| since <= opset).max();
    version.ok_or_else(|| unsupported!("this operator is supported from opset {} on (convert the model)", since[0]))
}

/// Determines which inputs are present, and checks their number.
fn given(inputs: &[Option<ValueId>], known: &std::ops::RangeInclusive<usize>) -> Result<Vec<bool>, OpError> {
    if inputs.len() > *known.end() {
        return Err(unsupported!("it has {} inputs, and at most {} are known", inputs.len(), known.end()));
    }
    let n_present = inputs.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
    if n_present < *known.start() {
        return Err(invalid!("it has {n_present} inputs, and needs {}", known.start()));
    }
    Ok(inputs.iter().map(Option::is_some).collect())
}

/// Checks that the import has read every attribute.
fn all_read(import: &Import) -> Result<(), OpError> {
    match import.attributes.unused() {
        Some(name) => Err(unsupported!("attribute `{name}` is not supported at this opset")),
        None => Ok(()),
    }
}

/// Sorts nodes topologically; keeps the file's order if it is topological.
fn sorted(pending: Vec<Node>, graph: &Graph) -> Result<Vec<Node>, ReadError> {
    let n_values = graph.values().len();
    let mut producer = vec![None; n_values];
    for (at, node) in pending.iter().enumerate() {
        node.outputs.iter().flatten().for_each(|id| producer[id.0 as usize] = Some(at));
    }
    let producer_of = |id: &ValueId| producer[id.0 as usize];
    let mut n_missing = vec![0_usize; pending.len()];
    let mut users = vec![Vec::new(); pending.len()];
    for (at, node) in pending.iter().enumerate() {
        for from in node.inputs.iter().flatten().filter_map(producer_of) {
            n_missing[at] += 1;
            users[from].push(at);
        }
    }
    let ready = (0..pending.len()).filter(|&at| n_missing[at] == 0).map(std::cmp::Reverse);
    let mut ready: std::collections::BinaryHeap<_> = ready.collect();
    let mut nodes: Vec<Option<Node>> = pending.into_iter().map(Some).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(std::cmp::Reverse(at)) = ready.pop() {
        order.extend(nodes[at].take());
        for &user in &users[at] {
            n_missing[user] -= 1;
            if n_missing[user] == 0 {
                ready.push(std::cmp::Reverse(user));
            }
        }
    }
    match nodes.into_iter().flatten().next() {
        None => Ok(order),
        Some(node) => {
            let reason = Reason::Op(invalid!("it reads what is computed from its own output (mend the cycle)"));
            Err(ReadError::Node(Box::new(Problem { place: Some(node.place), reason })))
        }
    }
}
