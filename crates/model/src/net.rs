//! Model as a net of few kinds of operations, on which fusion works.

use bytes::Bytes;
use tilewright_graph::{DType, Op, Tensor, TensorType};
use tilewright_ir::Expr;
use tilewright_ir::expr::ReduceOp;
use tilewright_ir::op::Heads;
use tilewright_runtime::HostCall;

use crate::no_code::NoCode;
use crate::scalar::{number, whole};

/// Index of a value in its net.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub usize);

/// Tensor of a net.
#[derive(Debug, Clone)]
pub struct Value {
    /// Name in the model, or one derived from it.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Shape, row-major.
    pub shape: Vec<i64>,
    /// Elements, if they are constant.
    pub constant: Option<Tensor>,
}

impl Value {
    /// Number of elements.
    pub fn n_elements(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Size in bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_elements() as u64 * self.dtype.size() as u64
    }

    /// Type of the value.
    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.shape.iter().map(|&d| d as usize).collect::<Vec<_>>())
    }
}

/// Affine index map with division: the index `at` maps to `floor((factor · at + term) / divisor)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line {
    /// `factor` of the formula.
    pub factor: i64,
    /// `term` of the formula.
    pub term: i64,
    /// `divisor` of the formula.
    pub divisor: i64,
}

impl Line {
    /// Identity map.
    pub const SAME: Line = Line { factor: 1, term: 0, divisor: 1 };

    /// Map of this form from `0, 1, …` to these indices; `None` if no such map exists.
    pub fn through(places: &[i64]) -> Option<Line> {
        const MOST: i64 = 16;
        let first = *places.first()?;
        let fits = |line: &Line| places.iter().zip(0..).all(|(place, at)| line.at(at) == *place);
        for divisor in 1..=MOST {
            for factor in 0..=MOST {
                for rest in 0..divisor {
                    let line = Line { factor, term: first * divisor + rest, divisor };
                    if fits(&line) {
                        return Some(line);
                    }
                }
            }
        }
        None
    }

    /// Index that `at` maps to.
    pub fn at(&self, at: i64) -> i64 {
        (self.factor * at + self.term).div_euclid(self.divisor)
    }
}

/// Sliding windows over a tensor, one extent per dimension, most of them 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    /// Sizes of the windows.
    pub kernel: Vec<i64>,
    /// Strides of the windows.
    pub strides: Vec<i64>,
    /// Dilations.
    pub dilations: Vec<i64>,
    /// Padding before the tensor.
    pub before: Vec<i64>,
}

/// Two-dimensional convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Convolution {
    /// Number of groups of channels, which are convolved separately.
    pub groups: i64,
    /// Whether the output's channels are interleaved across groups (a channel shuffle); weights are not.
    pub interleaved: bool,
    /// Strides; those of the output if the convolution is transposed.
    pub strides: [i64; 2],
    /// Dilations of the filter.
    pub dilations: [i64; 2],
    /// Padding before rows and columns.
    pub before: [i64; 2],
    /// Padding after rows and columns.
    pub after: [i64; 2],
    /// Whether the convolution is transposed; weights are then `[c, k, r, s]`.
    pub transposed: bool,
}

/// Layout of a batched product whose operands are laid out like the heads of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsHeads {
    /// Batch size.
    pub b: i64,
    /// Heads of operand A.
    pub of_a: Heads,
    /// Heads of operand B.
    pub of_b: Heads,
    /// Whether the result is `[m, b, n]`.
    pub beside: bool,
}

/// Kind of operation of a node.
#[derive(Debug, Clone)]
pub enum Kind {
    /// Elementwise map with broadcasting: `Load(i, [])` is the element of input `i`.
    Map(Expr),
    /// Reshape, without moving elements.
    View,
    /// Transpose: the input dimension of each output dimension.
    Transpose(Vec<usize>),
    /// Strided slice: first index and step of each dimension.
    Slice(Vec<(i64, i64)>),
    /// Concatenation along a dimension.
    Concat(usize),
    /// Padding with a constant: number of elements before each dimension, negative to crop.
    Pad(Vec<i64>, f64),
    /// Separable gather: the input's index in each dimension is a function of the output's index in that
    /// dimension.
    Pick(Vec<Line>),
    /// Channels to pixels (depth to space): each pixel becomes a block of pixels, of which each takes as many
    /// adjacent channels as the result has.
    Pixels {
        /// Rows and columns of a block.
        block: [i64; 2],
        /// Rows and columns of pixels that are cut off before the result; those behind it are, too.
        before: [i64; 2],
    },
    /// Reduction along some dimensions, which are kept with size 1.
    Reduce(ReduceOp, Vec<usize>),
    /// Reduction of each sliding window; elements in the padding are left out.
    Window(ReduceOp, Windows),
    /// Convolution of input 0 with the weights, input 1.
    Conv(Convolution),
    /// Matrix product of `[b, m, k]` and `[b, k, n]`, or without a batch of `[m, k]` and `[k, n]`; operand B
    /// may be stored transposed, `[b, n, k]`.
    Product {
        /// Whether operand B is stored transposed.
        turned: bool,
        /// Layout of the batch, if it is not the one above.
        heads: Option<AsHeads>,
    },
    /// Matrix product with block-quantized weights: input 0 is A, 1 the packed weights, 2 their scales, 3
    /// their zero points, if any.
    Packed(Packing),
    /// Gather from input 0 along `axis` by the integers of input 1. Negative indices count from the end; the
    /// result is clamped to the dimension.
    Gather {
        /// Dimension that the indices refer to.
        axis: usize,
        /// Whether there is an index for each element of the output, as in ONNX's `GatherElements`; else the
        /// indices' dimensions replace `axis`, as in `Gather`.
        by_element: bool,
    },
    /// Append to a state along a dimension: the output is the whole state in its new length.
    Append(usize),
    /// Net repeated for each time step of a sequence.
    Sequence(Box<Sequence>),
    /// Loop over a net.
    Loop(Box<Repeat>),
    /// Call of a generated C function.
    Call(Box<HostCall>),
    /// Operator without code, which the reference evaluates.
    Host(Box<Evaluated>),
}

/// Operator without code.
#[derive(Debug, Clone)]
pub struct Evaluated {
    /// The operator.
    pub op: Op,
    /// Reason why it has no code.
    pub reason: NoCode,
}

/// Packing of block-quantized weights, as of the workload `packed_matmul`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Bits of a weight: 4 or 8.
    pub bits: i64,
    /// Block size: reduction steps that share a scale.
    pub block: i64,
    /// Whether blocks have zero points, input 3.
    pub has_zeros: bool,
    /// Whether operand A is quantized to 8 bits dynamically.
    pub rounds: bool,
}

/// Net that runs once for each time step of a sequence.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Number of time steps.
    pub n_steps: i64,
    /// Net of a time step; each of its outputs is computed by a node.
    pub body: Net,
    /// Sources of its inputs.
    pub reads: Vec<Read>,
    /// Destinations of its outputs: index of the node's output, and the position in it.
    pub writes: Vec<(usize, Track)>,
    /// Constants shared with the enclosing net: pairs of a value of the body and one of the enclosing net.
    pub constants: Vec<(ValueId, ValueId)>,
}

/// Loop: a net that repeats while a condition holds, up to a number of iterations. Inputs of the node: the
/// number of iterations and the initial condition, each optional, the initial loop-carried values, and
/// captured values. Outputs: the final loop-carried values, and tensors that collect a row from each
/// iteration.
#[derive(Debug, Clone)]
pub struct Repeat {
    /// Net of an iteration. Inputs: the iteration number, an unused condition, the loop-carried values,
    /// captured values. Outputs: the next condition, the updated loop-carried values, rows to collect.
    pub body: Net,
    /// Number of loop-carried values.
    pub n_carried: usize,
    /// Number of iterations, if known.
    pub n: Option<i64>,
    /// Operator of the graph.
    pub op: Op,
}

/// Source of an input of a sequence's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// Slice of an input of the node, by index.
    Part(usize, Track),
    /// Output of the previous time step.
    Before {
        /// Index of the body's output.
        output: usize,
        /// Index of the node's input for the first time step.
        first: usize,
    },
}

/// Position of each time step's slice in a tensor, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Track {
    /// Offset of the first time step.
    pub first: i64,
    /// Distance between consecutive time steps.
    pub by: i64,
    /// Period: number of time steps after which the positions start over.
    pub round: i64,
    /// Distance between the first positions of consecutive periods.
    pub next: i64,
}

impl Track {
    /// Offset of a time step.
    pub fn at(&self, step: i64) -> i64 {
        self.first + self.by * (step % self.round) + self.next * (step / self.round)
    }
}

/// Node of a net.
#[derive(Debug, Clone)]
pub struct Node {
    /// Kind of operation.
    pub kind: Kind,
    /// Inputs; `None` for omitted inputs of a host operator.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs.
    pub outputs: Vec<ValueId>,
    /// Names of the model's nodes that it comes from, for display.
    pub origin: String,
}

impl Node {
    /// The node for values of other names.
    pub(crate) fn renamed(&self, new: &dyn Fn(ValueId) -> ValueId) -> Node {
        let inputs = self.inputs.iter().map(|id| id.map(new)).collect();
        Node { inputs, outputs: self.outputs.iter().map(|id| new(*id)).collect(), ..self.clone() }
    }

    /// Output of a node with a single one.
    pub fn output(&self) -> ValueId {
        self.outputs[0]
    }

    /// Name of a host operator or C function; empty for other kinds.
    pub fn operator(&self) -> String {
        match &self.kind {
            Kind::Call(call) => call.operator.name.to_owned(),
            Kind::Host(host) => format!("{:?}", host.op).split(['(', ' ', '{']).next().unwrap_or_default().to_owned(),
            _ => String::new(),
        }
    }

    /// Input of a node that has no omitted inputs.
    pub fn input(&self, at: usize) -> ValueId {
        self.inputs[at].expect("only host operators leave inputs out")
    }
}

/// Dataflow graph of few kinds of operations, in topological order.
#[derive(Debug, Clone, Default)]
pub struct Net {
    /// Values of the net.
    pub values: Vec<Value>,
    /// Operations, in order.
    pub nodes: Vec<Node>,
    /// Inputs of the net.
    pub inputs: Vec<ValueId>,
    /// Outputs of the net.
    pub outputs: Vec<ValueId>,
    /// States that live between runs, such as key-value caches.
    pub states: Vec<State>,
    /// Representative size of the open (dynamic) dimension; `None` without one.
    pub open_size: Option<i64>,
    /// Representative size of a second open dimension, if any.
    pub second_size: Option<i64>,
    /// Branches that known conditions chose (see [`tilewright_graph::Graph::branches`]).
    pub branches: Vec<(String, bool)>,
    /// Values that depend only on the size of the open dimension, with their elements at this net's size.
    pub varying: Vec<(ValueId, Tensor)>,
    /// Inputs whose numbers select slices of a constant, each with the number of slices.
    pub selections: Vec<(ValueId, i64)>,
}

/// State that lives between runs, each of which appends to it along a dimension, such as a key-value cache.
/// It replaces an input and an output of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Name of the model's input for the state before a run.
    pub past: String,
    /// Name of the model's output for the state after a run.
    pub present: String,
    /// Type of that input and output; of 16 bits the state itself is f32.
    pub dtype: DType,
    /// State after a run.
    pub value: ValueId,
    /// Dimension that grows.
    pub axis: usize,
}

impl Net {
    /// Value of an index.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// Shape of a value.
    pub fn shape(&self, id: ValueId) -> &[i64] {
        &self.values[id.0].shape
    }

    /// Name of the model's node that computes or reads a value, for messages; else the value's own.
    pub(crate) fn maker_of(&self, id: ValueId) -> String {
        let maker = self.nodes.iter().find(|node| node.outputs.contains(&id));
        let found = maker.or_else(|| self.nodes.iter().find(|node| node.inputs.contains(&Some(id))));
        found.map_or_else(|| self.value(id).name.clone(), |node| node.origin.clone())
    }

    /// Adds a value without a producer.
    pub fn add_value(&mut self, name: &str, dtype: DType, shape: &[i64]) -> ValueId {
        self.values.push(Value { name: name.to_owned(), dtype, shape: shape.to_vec(), constant: None });
        ValueId(self.values.len() - 1)
    }

    /// Adds an f32 constant.
    pub fn add_constant(&mut self, name: &str, shape: &[i64], numbers: &[f32]) -> ValueId {
        let mut bytes = vec![0; 4 * numbers.len()];
        bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(to, x)| *to = x.to_le_bytes());
        self.add_bytes(name, DType::F32, shape, bytes)
    }

    /// Adds a constant of any type, whose elements in memory are these bytes.
    ///
    /// # Panics
    /// If they are not as many as the shape takes.
    pub fn add_bytes(&mut self, name: &str, dtype: DType, shape: &[i64], bytes: Vec<u8>) -> ValueId {
        let id = self.add_value(name, dtype, shape);
        let tensor = Tensor::new(self.value(id).ty(), Bytes::from(bytes));
        self.values[id.0].constant = Some(tensor.expect("as many bytes as the shape takes"));
        id
    }

    /// Elements of an f32 constant; `None` for other values.
    pub fn numbers(&self, id: ValueId) -> Option<Vec<f32>> {
        let tensor = self.value(id).constant.as_ref().filter(|tensor| tensor.dtype() == DType::F32)?;
        Some(tensor.bytes().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    /// Element of a constant that has a single one; `None` for other values.
    pub fn scalar(&self, id: ValueId) -> Option<f64> {
        let tensor = self.value(id).constant.as_ref().filter(|tensor| tensor.n_elements() == 1)?;
        self.element_type(id).map(|_| tensor.floats()[0])
    }

    /// Common value of all elements of a constant; `None` if they differ.
    pub fn uniform(&self, id: ValueId) -> Option<f64> {
        let numbers = self.value(id).constant.as_ref()?.floats();
        let first = *numbers.first()?;
        (self.element_type(id).is_some() && numbers.iter().all(|x| *x == first)).then_some(first)
    }

    /// Constant of a single element, or of equal ones, as an exact expression.
    pub fn literal(&self, id: ValueId) -> Option<Expr> {
        if self.value(id).n_elements() == 1 { self.literal_at(id, 0) } else { None }
    }

    /// Element of a constant as an exact expression.
    pub fn literal_at(&self, id: ValueId, at: usize) -> Option<Expr> {
        let dtype = self.element_type(id)?;
        let tensor = self.value(id).constant.as_ref()?;
        Some(match dtype.is_float() {
            true => number(*tensor.floats().get(at)?),
            false => whole(dtype, *tensor.integers().get(at)?),
        })
    }

    /// Element type of a value in the IR; `None` if kernels of models do not support it.
    pub fn element_type(&self, id: ValueId) -> Option<tilewright_ir::DType> {
        // Integers of fewer than 8 bits have a byte each.
        let name = match self.value(id).dtype {
            DType::I2 | DType::I4 => "i8",
            DType::U2 | DType::U4 => "u8",
            other => other.name(),
        };
        let found = tilewright_ir::DType::ALL.into_iter().find(|(_, n)| *n == name);
        found.map(|(dtype, _)| dtype)
    }

    /// Whether arithmetic on a value's type yields results of that type: `false` for integers that are
    /// computed in a wider type, except booleans.
    pub fn stays(&self, id: ValueId) -> bool {
        self.element_type(id)
            .is_some_and(|dtype| dtype.is_float() || dtype.arithmetic() == dtype || dtype == tilewright_ir::DType::Bool)
    }

    /// Values that outlive the steps of a run: outputs and states.
    fn kept(&self) -> impl Iterator<Item = ValueId> {
        self.outputs.iter().chain(self.states.iter().map(|state| &state.value)).copied()
    }

    /// Whether a value outlives the steps of a run, being an output or a state.
    pub(crate) fn is_kept(&self, id: ValueId) -> bool {
        self.kept().any(|kept| kept == id)
    }

    /// Number of uses of each value, including those by the net's outputs and states.
    pub fn n_uses(&self) -> Vec<usize> {
        let mut n_uses = vec![0; self.values.len()];
        let read = self.nodes.iter().flat_map(|node| node.inputs.iter().flatten().copied());
        read.chain(self.kept()).for_each(|id| n_uses[id.0] += 1);
        n_uses
    }

    /// Nodes that read each value, in order; a node that reads it twice is listed twice.
    pub fn readers(&self) -> Vec<Vec<usize>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            node.inputs.iter().flatten().for_each(|id| readers[id.0].push(at));
        }
        readers
    }

    /// Nodes that read each value, in order, without repetition.
    pub fn users(&self) -> Vec<Vec<usize>> {
        let mut readers = self.readers();
        readers.iter_mut().for_each(Vec::dedup);
        readers
    }

    /// Node that computes each value; `None` for inputs and constants.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            node.outputs.iter().for_each(|id| producers[id.0] = Some(at));
        }
        producers
    }

    /// Eliminates dead nodes: those that no output needs.
    pub fn prune(&mut self) {
        let mut is_needed = vec![false; self.values.len()];
        self.kept().for_each(|id| is_needed[id.0] = true);
        let mut kept = Vec::with_capacity(self.nodes.len());
        for node in std::mem::take(&mut self.nodes).into_iter().rev() {
            if node.outputs.iter().any(|id| is_needed[id.0]) {
                node.inputs.iter().flatten().for_each(|id| is_needed[id.0] = true);
                kept.push(node);
            }
        }
        kept.reverse();
        self.nodes = kept;
    }

    /// Sorts the nodes topologically, with as few moves as possible.
    ///
    /// # Panics
    /// If the nodes form a cycle.
    pub fn sort(&mut self) {
        let producers = self.producers();
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut state = vec![0u8; self.nodes.len()];
        for root in 0..self.nodes.len() {
            let mut stack = vec![root];
            while let Some(&at) = stack.last() {
                if state[at] == 2 {
                    stack.pop();
                    continue;
                }
                let inputs = self.nodes[at].inputs.iter().flatten();
                let waits: Vec<usize> =
                    inputs.filter_map(|id| producers[id.0]).filter(|&before| state[before] != 2).collect();
                if waits.is_empty() {
                    state[at] = 2;
                    order.push(at);
                    stack.pop();
                } else {
                    assert!(state[at] == 0, "the nodes go round in a circle");
                    state[at] = 1;
                    stack.extend(waits.into_iter().rev());
                }
            }
        }
        let mut nodes: Vec<Option<Node>> = std::mem::take(&mut self.nodes).into_iter().map(Some).collect();
        self.nodes = order.into_iter().map(|at| nodes[at].take().expect("each comes once")).collect();
    }
}
