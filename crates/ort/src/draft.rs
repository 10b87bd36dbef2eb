//! Copy of a session's graph, and its parts as graphs to compile.

use std::collections::{HashMap, HashSet};

use tilewright_graph::onnx::{self, GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Declared, Dim, Graph, Place, ReadError, Tensor, TensorType};

use crate::sizes::{DimensionNames, InputShape};

/// Index of a value in [`SessionGraph::values`].
pub type ValueIndex = usize;
/// Index of a node in [`SessionGraph::nodes`].
pub type NodeAt = usize;

/// Value of a session's graph.
#[derive(Clone, Debug, Default)]
pub struct DraftValue {
    /// Name in the session's graph.
    pub name: String,
    /// Element type and dimensions; `None` unless the value is a tensor of a supported type.
    pub declared: Option<Declared>,
    /// Elements, if the value is a constant.
    pub constant: Option<Tensor>,
}

/// Node of a session's graph.
#[derive(Clone, Debug, Default)]
pub struct DraftNode {
    /// Operator of the node.
    pub op: String,
    /// Domain of the operator; empty for ONNX's own.
    pub domain: String,
    /// Inputs; `None` for omitted ones. The last inputs of a node with subgraphs are those that these
    /// capture.
    pub inputs: Vec<Option<ValueIndex>>,
    /// Outputs; `None` for omitted ones.
    pub outputs: Vec<Option<ValueIndex>>,
    /// Attributes by name.
    pub attributes: Vec<(String, Attribute)>,
    /// Reason why the node cannot run here regardless of its operator, such as a subgraph.
    pub foreign: Option<String>,
}

/// Graph of a session.
#[derive(Clone, Debug, Default)]
pub struct SessionGraph {
    /// Values of the graph.
    pub values: Vec<DraftValue>,
    /// Nodes, each after those that compute its inputs.
    pub nodes: Vec<DraftNode>,
    /// Outputs of the graph.
    pub outputs: Vec<ValueIndex>,
    /// Version of ONNX's own operators.
    pub opset: i64,
    /// Domains of other operators, with their versions.
    pub domains: Vec<(String, i64)>,
}

/// Interface of a part: its inputs, constants and outputs, each in the order of the nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// Values that are computed outside the part, or inputs of the graph.
    pub inputs: Vec<ValueIndex>,
    /// Constants that the part reads.
    pub constants: Vec<ValueIndex>,
    /// Values that are read outside the part.
    pub outputs: Vec<ValueIndex>,
}

/// Reason why there is no graph of a part.
#[derive(Debug)]
pub enum NoSessionGraph {
    /// A node breaks a rule of its operator.
    Node(NodeAt, String),
    /// Any other reason.
    Other(String),
}

/// Name of a value in a graph to compile.
fn name_of(value: ValueIndex) -> String {
    format!("v{value}")
}

/// Parses the index of a node from its name in the graph of a part.
pub fn node_at(place: &str) -> Option<NodeAt> {
    place.strip_prefix('n')?.parse().ok()
}

/// Parses the index of a value from its name in the graph of a part.
pub fn value_at(name: &str) -> Option<ValueIndex> {
    name.strip_prefix('v')?.parse().ok()
}

/// Index of the node at a place.
pub fn node_of(place: &Place) -> Option<NodeAt> {
    node_at(&place.node)
}

/// Part of a session's graph.
#[derive(Clone, Debug)]
pub struct PartDraft {
    /// Graph that contains the part.
    pub graph: SessionGraph,
    /// Nodes of the part, in the order of the graph's.
    pub nodes: Vec<NodeAt>,
    /// Interface of the part.
    pub ports: Ports,
}

impl PartDraft {
    /// Makes a part from these nodes of a graph.
    pub fn new(graph: SessionGraph, nodes: Vec<NodeAt>) -> PartDraft {
        PartDraft { ports: graph.ports(&nodes), graph, nodes }
    }

    /// Position of a value among the inputs.
    pub fn input_at(&self, value: ValueIndex) -> Option<usize> {
        self.ports.inputs.iter().position(|&input| input == value)
    }

    /// Shapes of the inputs, if all their dimensions are known.
    pub fn fixed_shapes(&self) -> Option<Vec<InputShape>> {
        self.ports.inputs.iter().map(|&value| self.graph.fixed_shape(value)).collect()
    }

    /// Names of the inputs' dimensions.
    pub fn dimension_names(&self) -> DimensionNames {
        DimensionNames(self.ports.inputs.iter().map(|&value| self.graph.dim_names(value)).collect())
    }

    /// Elements of the constants that the part reads, where known.
    pub fn constants(&self) -> impl Iterator<Item = &Tensor> {
        self.ports.constants.iter().filter_map(|&value| self.graph.values[value].constant.as_ref())
    }

    /// Releases the elements of all constants.
    pub fn forget_constants(&mut self) {
        self.graph.values.iter_mut().for_each(|value| value.constant = None);
    }
}

impl SessionGraph {
    /// Interface of a part.
    pub fn ports(&self, part: &[NodeAt]) -> Ports {
        let nodes = || part.iter().map(|&at| &self.nodes[at]);
        let made: HashSet<ValueIndex> = nodes().flat_map(|node| &node.outputs).flatten().copied().collect();
        let inside: HashSet<NodeAt> = part.iter().copied().collect();
        let outside = self.nodes.iter().enumerate().filter(|(at, _)| !inside.contains(at));
        let mut read: HashSet<ValueIndex> = outside.flat_map(|(_, node)| &node.inputs).flatten().copied().collect();
        read.extend(&self.outputs);
        let mut ports = Ports::default();
        let mut seen = HashSet::new();
        for &value in nodes().flat_map(|node| &node.inputs).flatten().filter(|value| !made.contains(value)) {
            if seen.insert(value) {
                let is_constant = self.values[value].constant.is_some();
                if is_constant { &mut ports.constants } else { &mut ports.inputs }.push(value);
            }
        }
        ports.outputs =
            nodes().flat_map(|node| &node.outputs).flatten().copied().filter(|v| read.contains(v)).collect();
        ports
    }

    /// Graph of a part, for inputs of these shapes.
    ///
    /// # Errors
    /// If a node is invalid, or an input has no shape or is not a tensor.
    pub fn graph(
        &self,
        part: &[NodeAt],
        ports: &Ports,
        shape: &dyn Fn(ValueIndex) -> Option<Vec<usize>>,
    ) -> Result<Graph, NoSessionGraph> {
        let port = |value: ValueIndex, dims: Vec<usize>| {
            let declared = self.values[value].declared.as_ref();
            let dtype =
                declared.ok_or_else(|| NoSessionGraph::Other(format!("`{}` is no tensor", self.values[value].name)))?;
            let dims = dims.into_iter().map(Dim::Size).collect();
            Ok(GraphPort { name: name_of(value), dtype: dtype.dtype, dims })
        };
        let mut inputs = Vec::new();
        for &value in &ports.inputs {
            let unknown = || NoSessionGraph::Other(format!("the shape of `{}` is not known", self.values[value].name));
            inputs.push(port(value, shape(value).ok_or_else(unknown)?)?);
        }
        let constant = |value: ValueIndex| self.values[value].constant.as_ref().expect("it is among the constants");
        // These become constants below, so that their elements need not be encoded.
        for &value in &ports.constants {
            inputs.push(port(value, constant(value).shape().to_vec())?);
        }
        let outputs = ports.outputs.iter().map(|&value| port(value, Vec::new())).collect::<Result<_, _>>()?;
        let names =
            |values: &[Option<ValueIndex>]| values.iter().map(|v| v.map_or_else(String::new, name_of)).collect();
        let node = |&at: &NodeAt| {
            let DraftNode { op, domain, inputs, outputs, attributes, .. } = &self.nodes[at];
            let (op, domain, attributes) = (op.clone(), domain.clone(), attributes.clone());
            NodeFile { name: format!("n{at}"), op, domain, inputs: names(inputs), outputs: names(outputs), attributes }
        };
        let file = ModelFile {
            name: "part".to_owned(),
            opset: self.opset,
            domains: self.domains.clone(),
            inputs,
            outputs,
            weights: Vec::new(),
            nodes: part.iter().map(node).collect(),
        };
        let read = onnx::read(&onnx::write(&file).into(), &mut |_| Err("it has no files".to_owned()));
        let read = read.map_err(|error| match &error {
            ReadError::Node(problem) => match problem.place.as_ref().and_then(node_of) {
                Some(at) => NoSessionGraph::Node(at, problem.to_string()),
                None => NoSessionGraph::Other(error.to_string()),
            },
            _ => NoSessionGraph::Other(error.to_string()),
        })?;
        let mut graph = read.graph;
        for id in graph.inputs.split_off(ports.inputs.len()) {
            let value = value_at(&graph.value(id).name).expect("it was named after a value");
            let tensor = constant(value).clone();
            graph.value_mut(id).ty = Some(tensor.ty().clone());
            graph.value_mut(id).constant = Some(tensor);
        }
        // Shapes of outputs follow from those of inputs.
        for id in graph.outputs.clone() {
            graph.value_mut(id).declared = None;
        }
        Ok(graph)
    }

    /// Shape of a value, if all its dimensions are known.
    pub fn fixed_shape(&self, value: ValueIndex) -> Option<Vec<usize>> {
        let dims = self.values[value].declared.as_ref()?.dims.as_ref()?;
        dims.iter().map(|dim| if let Dim::Size(size) = dim { Some(*size) } else { None }).collect()
    }

    /// Names of a value's dimensions; `None` for those that have a size or no name.
    pub fn dim_names(&self, value: ValueIndex) -> Vec<Option<String>> {
        let dims = self.values[value].declared.as_ref().and_then(|declared| declared.dims.as_ref());
        let name = |dim: &Dim| if let Dim::Named(name) = dim { Some(name.clone()) } else { None };
        dims.into_iter().flatten().map(name).collect()
    }

    /// Shape of a value with a stand-in for each unknown dimension.
    pub fn shape_with(&self, value: ValueIndex, stand_in: usize) -> Option<Vec<usize>> {
        let dims = self.values[value].declared.as_ref()?.dims.as_ref()?;
        Some(dims.iter().map(|dim| if let Dim::Size(size) = dim { *size } else { stand_in }).collect())
    }
}

/// Types of the values of a part's graph, by their indices in the session's graph.
pub fn types_of(graph: &Graph) -> HashMap<ValueIndex, TensorType> {
    let known = |value: &tilewright_graph::Value| Some((value_at(&value.name)?, value.ty.clone()?));
    graph.values().filter_map(|(_, value)| known(value)).collect()
}
