//! Graph of a session in memory of our own, and parts of it as graphs that are compiled.

use std::collections::{HashMap, HashSet};

use tilewright_graph::onnx::{self, GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Declared, Dim, Graph, Place, ReadError, Tensor, TensorType};

use crate::sizes::{DimensionNames, InputShape};

/// A value's index in [`SessionGraph::values`].
pub type ValueIndex = usize;
/// A node's index in [`SessionGraph::nodes`].
pub type NodeAt = usize;

/// Value of a session's graph.
#[derive(Clone, Debug, Default)]
pub struct DraftValue {
    /// Name in the session's graph.
    pub name: String,
    /// Element type and dimensions; `None` where it is no tensor of a type that is known here.
    pub declared: Option<Declared>,
    /// Elements, where it is a constant.
    pub constant: Option<Tensor>,
}

/// Node of a session's graph.
#[derive(Clone, Debug, Default)]
pub struct DraftNode {
    /// Operator of the node.
    pub op: String,
    /// Domain of the operator; empty for ONNX's own.
    pub domain: String,
    /// Inputs; `None` for those that are left out. Of a node with graphs within, these read the last ones.
    pub inputs: Vec<Option<ValueIndex>>,
    /// Outputs; `None` for those that are not asked for.
    pub outputs: Vec<Option<ValueIndex>>,
    /// Attributes by name.
    pub attributes: Vec<(String, Attribute)>,
    /// Reason why it cannot run here whatever its operator, such as a graph within it.
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

/// Interface of a part: values that it takes and gives, each in the order of the nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports {
    /// Values that are computed or given outside.
    pub inputs: Vec<ValueIndex>,
    /// Constants that it reads.
    pub constants: Vec<ValueIndex>,
    /// Values that are read outside.
    pub outputs: Vec<ValueIndex>,
}

/// Reason why there is no graph of a part.
#[derive(Debug)]
pub enum NoSessionGraph {
    /// A node breaks a rule of its operator.
    Node(NodeAt, String),
    /// Something else.
    Other(String),
}

/// Name that a value has in a graph that is compiled.
fn name_of(value: ValueIndex) -> String {
    format!("v{value}")
}

/// The node of a place in a graph that was made of a part.
pub fn node_at(place: &str) -> Option<NodeAt> {
    place.strip_prefix('n')?.parse().ok()
}

/// The value of a name in a graph that was made of a part.
pub fn value_at(name: &str) -> Option<ValueIndex> {
    name.strip_prefix('v')?.parse().ok()
}

/// The node that a place is of.
pub fn node_of(place: &Place) -> Option<NodeAt> {
    node_at(&place.node)
}

/// Part of a session's graph.
#[derive(Clone, Debug)]
pub struct PartDraft {
    /// Graph that the part is of.
    pub graph: SessionGraph,
    /// Nodes of the part, in the order of the graph's.
    pub nodes: Vec<NodeAt>,
    /// Interface of the part.
    pub ports: Ports,
}

impl PartDraft {
    /// Part that these nodes of a graph are.
    pub fn new(graph: SessionGraph, nodes: Vec<NodeAt>) -> PartDraft {
        PartDraft { ports: graph.ports(&nodes), graph, nodes }
    }

    /// Position of a value among the inputs.
    pub fn input_at(&self, value: ValueIndex) -> Option<usize> {
        self.ports.inputs.iter().position(|&input| input == value)
    }

    /// Shapes of the inputs where all their dimensions are known.
    pub fn fixed_shapes(&self) -> Option<Vec<InputShape>> {
        self.ports.inputs.iter().map(|&value| self.graph.fixed_shape(value)).collect()
    }

    /// Names of the inputs' dimensions.
    pub fn dimension_names(&self) -> DimensionNames {
        DimensionNames(self.ports.inputs.iter().map(|&value| self.graph.dim_names(value)).collect())
    }

    /// Constants that the part reads, where they are known.
    pub fn constants(&self) -> impl Iterator<Item = &Tensor> {
        self.ports.constants.iter().filter_map(|&value| self.graph.values[value].constant.as_ref())
    }

    /// Forgets the elements of all constants.
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
    /// If a node breaks a rule, or an input has no shape or is no tensor.
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
        // They become constants below, so that their elements are in no file.
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

    /// Shape of a value where all its dimensions are known.
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

    /// Shape of a value with a stand-in for each dimension that is not known.
    pub fn shape_with(&self, value: ValueIndex, stand_in: usize) -> Option<Vec<usize>> {
        let dims = self.values[value].declared.as_ref()?.dims.as_ref()?;
        Some(dims.iter().map(|dim| if let Dim::Size(size) = dim { *size } else { stand_in }).collect())
    }
}

/// Types of a graph's values by the values that they are named after.
pub fn types_of(graph: &Graph) -> HashMap<ValueIndex, TensorType> {
    let known = |value: &tilewright_graph::Value| Some((value_at(&value.name)?, value.ty.clone()?));
    graph.values().filter_map(|(_, value)| known(value)).collect()
}
