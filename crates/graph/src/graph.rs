//! A graph of operators: nodes and values in arenas of their own, with typed indices and lists of uses.

use crate::error::Place;
use crate::op::{Op, Texts};
use crate::{DType, Tensor, TensorType};

/// A node's place in [`Graph::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// A value's place in [`Graph::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A dimension as a model declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dim {
    /// A size.
    Size(usize),
    /// A name that stands for a size.
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

/// Type and dimensions that a model declares of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    /// The type of its elements.
    pub dtype: DType,
    /// Dimensions, where their number is known.
    pub dims: Option<Vec<Dim>>,
}

/// A tensor that a graph computes, takes or contains.
#[derive(Debug, Clone, Default)]
pub struct Value {
    /// Name in the model.
    pub name: String,
    /// Declaration in the model.
    pub declared: Option<Declared>,
    /// Exact type; every value of a [`specialise`](crate::specialise())d graph has one.
    pub ty: Option<TensorType>,
    /// Elements, where they are known before the graph runs.
    pub constant: Option<Tensor>,
    /// Whether its elements or its shape depend on the size of an open dimension.
    pub varies: bool,
    /// Strings, where the model has them: the elements are integers that index this list.
    pub texts: Option<Texts>,
    /// The node that computes it, and which of its outputs it is.
    pub producer: Option<(NodeId, usize)>,
    /// The nodes that read it, each once for each time it does.
    pub users: Vec<NodeId>,
}

/// Operation with its inputs and outputs.
#[derive(Debug, Clone)]
pub struct Node {
    /// Operator with its parameters.
    pub op: Op,
    /// Place in the model.
    pub place: Place,
    /// Inputs in the operator's order; `None` for optional inputs that are left out.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs; `None` for those that are not named.
    pub outputs: Vec<Option<ValueId>>,
}

/// Nodes in an order in which each reads only what comes before it.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    /// Name of the graph.
    pub name: String,
    values: Vec<Value>,
    nodes: Vec<Node>,
    /// Inputs, without constants.
    pub inputs: Vec<ValueId>,
    /// Constants that a caller may replace: initializers that are inputs as well.
    pub defaults: Vec<ValueId>,
    /// Outputs of the graph.
    pub outputs: Vec<ValueId>,
    /// Size of the dimension of which each run says a size, where there is one: one of many.
    pub open_size: Option<usize>,
}

/// A model as its file has it.
#[derive(Debug, Clone)]
pub struct Model {
    /// The main graph.
    pub graph: Graph,
    /// The domains it names, with their versions. ONNX's own domain is the empty name.
    pub opsets: Vec<(String, i64)>,
    /// Program that wrote the model, with its version.
    pub producer: String,
}

impl Graph {
    /// All values.
    pub fn values(&self) -> impl ExactSizeIterator<Item = (ValueId, &Value)> {
        self.values.iter().enumerate().map(|(at, value)| (ValueId(at as u32), value))
    }

    /// All nodes; each reads only what graph inputs, constants and nodes before it give.
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = (NodeId, &Node)> {
        self.nodes.iter().enumerate().map(|(at, node)| (NodeId(at as u32), node))
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// A value, for changing its name or properties.
    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }

    /// Gives a named dimension of inputs another name, and says whether there was such.
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

    /// The operators of all nodes, for changing graphs in them.
    pub fn ops_mut(&mut self) -> impl Iterator<Item = &mut Op> {
        self.nodes.iter_mut().map(|node| &mut node.op)
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The exact type of a value.
    ///
    /// # Panics
    /// In a graph that is not specialised.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        self.value(id).ty.as_ref().expect("every value of a specialised graph has its type")
    }

    /// Adds a value that no node computes yet.
    pub fn add_value(&mut self, value: Value) -> ValueId {
        self.values.push(value);
        ValueId(u32::try_from(self.values.len() - 1).expect("fewer values than a file of 4 GiB has bytes"))
    }

    /// Adds a node behind the producers of its inputs, and links it to its inputs and outputs.
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
