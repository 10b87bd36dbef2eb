//! Graph of operators: nodes and values in two arenas with typed indices, and use lists.

use crate::error::Place;
use crate::op::{Op, Texts};
use crate::specialise::Varies;
use crate::{DType, Tensor, TensorType};

/// Index of a node in the graph's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// Index of a value in the graph's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// Dimension of a tensor as the model declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// Fixed size.
    Size(usize),
    /// Symbolic dimension (ONNX's `dim_param`), such as `batch`.
    Named(String),
    /// Unknown size.
    Unknown,
}

impl std::fmt::Display for Dim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dim::Size(size) => write!(f, "{size}"),
            Dim::Named(name) => f.write_str(name),
            Dim::Unknown => f.write_str("?"),
        }
    }
}

/// Type and shape that a model declares for a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    /// The type of its elements.
    pub dtype: DType,
    /// Dimensions; `None` if the rank is unknown.
    pub dims: Option<Vec<Dim>>,
}

/// Tensor of a graph: an input, a constant or a node's output.
#[derive(Debug, Clone, Default)]
pub struct Value {
    /// Name in the model.
    pub name: String,
    /// Declaration in the model.
    pub declared: Option<Declared>,
    /// Concrete type and shape; `Some` for every value of a [`specialise`](crate::specialise())d graph.
    pub ty: Option<TensorType>,
    /// Elements, if they are constant.
    pub constant: Option<Tensor>,
    /// Dependence of its shape and elements on the size of the open dimension (see [`Graph::open_size`]).
    pub varies: Varies,
    /// String table of a string tensor: its elements are integers that index this list.
    pub texts: Option<Texts>,
    /// Tensors of a sequence, which only operators on sequences read; such a value has no type.
    pub parts: Option<Vec<ValueId>>,
    /// Node that computes the value, with the index of its output; `None` for inputs and constants.
    pub producer: Option<(NodeId, usize)>,
    /// Nodes that read the value; a node that reads it twice is listed twice.
    pub users: Vec<NodeId>,
}

impl Value {
    /// Gives declared dimensions their concrete sizes, but for the open one, if any.
    pub(crate) fn bind_dims_but(&mut self, open: Option<&str>) {
        let (Some(open), Some(declared), Some(ty)) = (open, &mut self.declared, &self.ty) else { return };
        for (dim, size) in declared.dims.iter_mut().flatten().zip(&ty.shape) {
            if !matches!(dim, Dim::Named(name) if name == open) {
                *dim = Dim::Size(*size);
            }
        }
    }
}

/// Operation with its inputs and outputs.
#[derive(Debug, Clone)]
pub struct Node {
    /// Operator with its parameters.
    pub op: Op,
    /// Location in the model, for error messages.
    pub place: Place,
    /// Inputs in the operator's order; `None` for omitted optional inputs.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs in the operator's order; `None` for omitted ones.
    pub outputs: Vec<Option<ValueId>>,
}

/// Dataflow graph with its nodes in topological order.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Name of the graph.
    pub name: String,
    values: Vec<Value>,
    nodes: Vec<Node>,
    /// Inputs that a caller must give; initializers are not among them.
    pub inputs: Vec<ValueId>,
    /// Inputs with a default: initializers that are also listed as graph inputs.
    pub defaults: Vec<ValueId>,
    /// Outputs of the graph.
    pub outputs: Vec<ValueId>,
    /// Representative size of the open dimension, whose real size each run gives; `None` if all sizes are
    /// fixed.
    pub open_size: Option<usize>,
    /// Representative size of a second open dimension, such as the length of an encoder's states beside a
    /// past.
    pub second_size: Option<usize>,
    /// Branches that each `If` with a known condition was replaced by: the node's name, and whether the
    /// condition holds.
    pub branches: Vec<(String, bool)>,
}

/// Model as read from its file.
#[derive(Debug, Clone)]
pub struct Model {
    /// Main graph.
    pub graph: Graph,
    /// Imported operator sets: each domain with its version. The domain of ONNX's own operators is empty.
    pub opsets: Vec<(String, i64)>,
    /// Name and version of the program that wrote the model.
    pub producer: String,
}

impl Graph {
    /// Values with their indices.
    pub fn values(&self) -> impl ExactSizeIterator<Item = (ValueId, &Value)> {
        self.values.iter().enumerate().map(|(at, value)| (ValueId(at as u32), value))
    }

    /// Nodes in topological order: each reads only graph inputs, constants and outputs of earlier nodes.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(at, node)| (NodeId(at as u32), node))
    }

    /// Value with an index.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Dependence on the open size of what is computed from these values.
    pub fn varies(&self, inputs: &[Option<ValueId>]) -> Varies {
        Varies::all(inputs.iter().flatten().map(|id| self.value(*id).varies))
    }

    /// Value with an index, mutable; only its name and properties may be changed, not its links.
    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }

    /// Renames a symbolic dimension in the declarations of inputs; returns whether any input has it.
    pub fn rename_dim(&mut self, from: &str, to: &str) -> bool {
        let mut is_there = false;
        for id in self.inputs.clone() {
            let dims = self.value_mut(id).declared.as_mut().and_then(|declared| declared.dims.as_mut());
            for dim in dims.into_iter().flatten() {
                if matches!(dim, Dim::Named(name) if name == from) {
                    *dim = Dim::Named(to.into());
                    is_there = true;
                }
            }
        }
        is_there
    }

    /// Names of the inputs, followed by those of the inputs with defaults.
    pub fn input_names(&self) -> Vec<&str> {
        self.inputs.iter().chain(&self.defaults).map(|&id| self.value(id).name.as_str()).collect()
    }

    /// Operators of all nodes, mutable, so that their subgraphs can be changed.
    pub fn ops_mut(&mut self) -> impl Iterator<Item = &mut Op> {
        self.nodes.iter_mut().map(|node| &mut node.op)
    }

    /// Whether results differ between evaluations with the same inputs, as random numbers do.
    pub fn is_random(&self) -> bool {
        self.nodes.iter().any(|node| node.op.is_random())
    }

    /// Node with an index.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Concrete type of a value.
    ///
    /// # Panics
    /// If the graph is not specialised.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        self.value(id).ty.as_ref().expect("every value of a specialised graph has its type")
    }

    /// Adds a value without a producer, and returns its index.
    pub fn add_value(&mut self, value: Value) -> ValueId {
        self.values.push(value);
        ValueId(u32::try_from(self.values.len() - 1).expect("fewer values than a file of 4 GiB has bytes"))
    }

    /// Appends a node and links it to its inputs and outputs. The producers of its inputs must have been
    /// added before.
    ///
    /// # Panics
    /// If another node computes one of its outputs.
    pub fn add_node(&mut self, node: Node) -> NodeId {
        let id = NodeId(u32::try_from(self.nodes.len()).expect("fewer nodes than a file of 4 GiB has bytes"));
        for &input in node.inputs.iter().flatten() {
            self.values[input.0 as usize].users.push(id);
        }
        for (at, output) in node.outputs.iter().enumerate() {
            if let Some(output) = output {
                let producer = &mut self.values[output.0 as usize].producer;
                assert!(producer.is_none(), "a value has one producer");
                *producer = Some((id, at));
            }
        }
        self.nodes.push(node);
        id
    }
}
