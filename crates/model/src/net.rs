//! A model in few kinds of operations: what fusion and kernels work on.

use bytes::Bytes;
use tilewright_graph::{DType, Op, Tensor, TensorType};
use tilewright_ir::Expr;
use tilewright_ir::expr::ReduceOp;
use tilewright_ir::op::Heads;
use tilewright_runtime::HostCall;

use crate::import::NoCode;
use crate::scalar::{number, whole};

/// A value's place in [`Net::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub usize);

/// A tensor of a net.
#[derive(Debug, Clone)]
pub struct Value {
    /// The name that the model gives it; derived from that where it has none.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Dimensions, the last one contiguous.
    pub shape: Vec<i64>,
    /// Elements, where they are known before the model runs.
    pub constant: Option<Tensor>,
}

impl Value {
    /// Elements.
    pub fn n_elements(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_elements() as u64 * self.dtype.size() as u64
    }

    /// Type of the value.
    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.shape.iter().map(|&d| d as usize).collect::<Vec<_>>())
    }
}

/// The place `floor((factor · at + term) / divisor)` of each place `at`.
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
    /// Every place itself.
    pub const SAME: Line = Line { factor: 1, term: 0, divisor: 1 };

    /// Line through these places; `None` if they are not on a line.
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

    /// Position that an index maps to.
    pub fn at(&self, at: i64) -> i64 {
        (self.factor * at + self.term).div_euclid(self.divisor)
    }
}

/// Windows over a tensor: of each dimension one, most of them of a single element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    /// Sizes of the windows.
    pub kernel: Vec<i64>,
    /// Strides of the windows.
    pub strides: Vec<i64>,
    /// Distances within a window.
    pub dilations: Vec<i64>,
    /// Elements ahead of the tensor at which the first window begins.
    pub before: Vec<i64>,
}

/// A convolution over rows and columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Convolution {
    /// Number of groups of each image's channels, which do not mix.
    pub groups: i64,
    /// Whether channels of the output that belong to different groups take turns; weights do not.
    pub interleaved: bool,
    /// Distances of windows; on the output where it is transposed.
    pub strides: [i64; 2],
    /// Distances within a window.
    pub dilations: [i64; 2],
    /// Borders ahead of rows and columns.
    pub before: [i64; 2],
    /// Borders behind them.
    pub after: [i64; 2],
    /// Scatter instead of gather; then weights are `[c, k, r, s]`.
    pub transposed: bool,
}

/// Layout of a batch of products in memory, where it is as the heads of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsHeads {
    /// Products.
    pub b: i64,
    /// Heads of the first factor.
    pub of_a: Heads,
    /// Heads of the second factor.
    pub of_b: Heads,
    /// The result is `[m, b, n]`.
    pub beside: bool,
}

/// Operation of a node.
#[derive(Debug, Clone)]
pub enum Kind {
    /// Each element of the output of those at the same place of the inputs, which broadcast: `Load(i, [])`
    /// is that of input `i`.
    Map(Expr),
    /// A view of the elements in another shape.
    View,
    /// Dimensions in another order.
    Transpose(Vec<usize>),
    /// A part of each dimension: the first place and the step.
    Slice(Vec<(i64, i64)>),
    /// Tensors one behind the other along a dimension.
    Concat(usize),
    /// Padding with a constant: positions added ahead of each dimension; they may be negative.
    Pad(Vec<i64>, f64),
    /// The element at a place of each dimension that depends on that dimension's place alone.
    Pick(Vec<Line>),
    /// Reduction along some dimensions, which stay with size 1.
    Reduce(ReduceOp, Vec<usize>),
    /// Reduction of each window; positions beyond the tensor are left out.
    Window(ReduceOp, Windows),
    /// Input 0 convolved with input 1.
    Conv(Convolution),
    /// Products of matrices `[b, m, k]` and `[b, k, n]`; the second may be stored as `[b, n, k]`. Without
    /// `b`, both are matrices.
    Product {
        /// The second factor's sums are its last dimension.
        turned: bool,
        /// Layout of the products of a batch in the factors and the result, where it is not as above.
        heads: Option<AsHeads>,
    },
    /// Product of a matrix with packed weights, input 1, their scales, input 2, and zero points, input 3,
    /// where these have them.
    Packed(Packing),
    /// Elements of input 0 at places of one of its dimensions that are the numbers in input 1; negative ones
    /// count from the end, and what is then outside is the first or the last.
    Gather {
        /// The dimension.
        axis: usize,
        /// Each number is for one element, in the output's shape; else the numbers' dimensions stand in the
        /// output for that one.
        by_element: bool,
    },
    /// Elements put behind those that a state has along a dimension: the state is the node's output, as long
    /// as it then is.
    Append(usize),
    /// A net for each step of a sequence.
    Sequence(Box<Sequence>),
    /// A net that repeats.
    Loop(Box<Repeat>),
    /// A function in C.
    Call(Box<HostCall>),
    /// An operator as the model has it, for which there is no code.
    Host(Box<Evaluated>),
}

/// Operator without code, which the reference evaluates.
#[derive(Debug, Clone)]
pub struct Evaluated {
    /// The operator.
    pub op: Op,
    /// Reason why it has no code.
    pub reason: NoCode,
}

/// Packing of the weights of a product, as the workload `packed_matmul` has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Bits of a weight: 4 or 8.
    pub bits: i64,
    /// Steps of the sum with a common scale.
    pub block: i64,
    /// Whether blocks have zero points, input 3.
    pub has_zeros: bool,
    /// Whether the first factor is rounded to 8 bits.
    pub rounds: bool,
}

/// A net that runs once for each step of a sequence.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Number of steps.
    pub n_steps: i64,
    /// Net of a step; each of its outputs is an operation's result.
    pub body: Net,
    /// Sources of its inputs.
    pub reads: Vec<Read>,
    /// Destinations of its outputs: an output of the node, and the position in it.
    pub writes: Vec<(usize, Track)>,
    /// Constants of the body that are those of the net around it.
    pub constants: Vec<(ValueId, ValueId)>,
}

/// A net that repeats while a condition holds, as often as is said at most. The node's inputs are that number
/// and the first condition, where they are there, what is carried from iteration to iteration, and what the
/// net captures; its outputs what is carried in the end, and tensors of one row of each iteration.
#[derive(Debug, Clone)]
pub struct Repeat {
    /// Net of an iteration: its inputs are the number of the iteration, a condition that nobody reads, what
    /// is carried, and what is captured; its outputs the next condition, what is carried on, and rows.
    pub body: Net,
    /// Number of carried values.
    pub n_carried: usize,
    /// Number of iterations, where it is known.
    pub n: Option<i64>,
    /// The operator.
    pub op: Op,
}

/// Source of an input of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// A part of an input of the node.
    Part(usize, Track),
    /// Result of the step before.
    Before {
        /// Index among its outputs.
        output: usize,
        /// The node's input that it is at the first step.
        first: usize,
    },
}

/// Positions of the steps' parts in a tensor, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Track {
    /// The first step's.
    pub first: i64,
    /// Distance from a step's to the next step's.
    pub by: i64,
    /// Number of steps after which the positions repeat.
    pub round: i64,
}

impl Track {
    /// Offset of a step's part.
    pub fn at(&self, step: i64) -> i64 {
        self.first + self.by * (step % self.round)
    }
}

/// An operation.
#[derive(Debug, Clone)]
pub struct Node {
    /// Operation.
    pub kind: Kind,
    /// Inputs; of a host operator, some may be left out.
    pub inputs: Vec<Option<ValueId>>,
    /// Outputs.
    pub outputs: Vec<ValueId>,
    /// The model's nodes that it comes from, for people.
    pub origin: String,
}

impl Node {
    /// The only output.
    pub fn output(&self) -> ValueId {
        self.outputs[0]
    }

    /// The name of a host operator or of a function in C; empty of another node.
    pub fn operator(&self) -> String {
        match &self.kind {
            Kind::Call(call) => call.operator.name.to_owned(),
            Kind::Host(host) => format!("{:?}", host.op).split(['(', ' ', '{']).next().unwrap_or_default().to_owned(),
            _ => String::new(),
        }
    }

    /// Input of a node whose inputs are all present.
    pub fn input(&self, at: usize) -> ValueId {
        self.inputs[at].expect("only host operators leave inputs out")
    }
}

/// A model in few kinds of operations, each reading only what stands before it.
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
    /// Memory that runs add to.
    pub states: Vec<State>,
    /// Size of the dimension of which each run says a size, where there is one: one of many.
    pub open_size: Option<i64>,
    /// Values that are known once runs have said the size of the open dimension, at this net's size.
    pub varying: Vec<(ValueId, Tensor)>,
}

/// Memory that stays between runs, each of which adds to it along a dimension. An input and an output of the
/// model become one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Name of the model's input that has what was there before a run.
    pub past: String,
    /// Name of the model's output that has all that is there after a run.
    pub present: String,
    /// All that is there after a run.
    pub value: ValueId,
    /// Dimension that becomes longer.
    pub axis: usize,
}

impl Net {
    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// Dimensions of a value.
    pub fn shape(&self, id: ValueId) -> &[i64] {
        &self.values[id.0].shape
    }

    /// Adds a value.
    pub fn add_value(&mut self, name: &str, dtype: DType, shape: &[i64]) -> ValueId {
        self.values.push(Value { name: name.to_owned(), dtype, shape: shape.to_vec(), constant: None });
        ValueId(self.values.len() - 1)
    }

    /// Adds a constant of f32 numbers.
    pub fn add_constant(&mut self, name: &str, shape: &[i64], numbers: &[f32]) -> ValueId {
        let mut bytes = vec![0; 4 * numbers.len()];
        bytes.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(to, x)| *to = x.to_le_bytes());
        let id = self.add_value(name, DType::F32, shape);
        let tensor = Tensor::new(self.value(id).ty(), Bytes::from(bytes));
        self.values[id.0].constant = Some(tensor.expect("as many numbers as the shape takes"));
        id
    }

    /// Numbers of an f32 constant.
    pub fn numbers(&self, id: ValueId) -> Option<Vec<f32>> {
        let tensor = self.value(id).constant.as_ref().filter(|tensor| tensor.dtype() == DType::F32)?;
        Some(tensor.bytes().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    /// The number of a constant of one element.
    pub fn scalar(&self, id: ValueId) -> Option<f64> {
        let tensor = self.value(id).constant.as_ref().filter(|tensor| tensor.n_elements() == 1)?;
        self.element_type(id).map(|_| tensor.floats()[0])
    }

    /// The number that each element of a constant is.
    pub fn uniform(&self, id: ValueId) -> Option<f64> {
        let numbers = self.value(id).constant.as_ref()?.floats();
        let first = *numbers.first()?;
        (self.element_type(id).is_some() && numbers.iter().all(|x| *x == first)).then_some(first)
    }

    /// Gives the exact value as an expression.
    pub fn literal(&self, id: ValueId) -> Option<Expr> {
        if self.value(id).n_elements() == 1 { self.literal_at(id, 0) } else { None }
    }

    /// An element of a constant as an expression, exactly.
    pub fn literal_at(&self, id: ValueId, at: usize) -> Option<Expr> {
        let dtype = self.element_type(id)?;
        let tensor = self.value(id).constant.as_ref()?;
        Some(match dtype.is_float() {
            true => number(*tensor.floats().get(at)?),
            false => whole(dtype, *tensor.integers().get(at)?),
        })
    }

    /// The type of a value's elements in code, where kernels of models have it.
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

    /// Whether results computed for a value's elements are of its type already: not those of integers that
    /// are computed in longer ones, but booleans.
    pub fn stays(&self, id: ValueId) -> bool {
        self.element_type(id)
            .is_some_and(|dtype| dtype.is_float() || dtype.arithmetic() == dtype || dtype == tilewright_ir::DType::Bool)
    }

    /// Number of reads of each value, the net's outputs and states included.
    pub fn n_uses(&self) -> Vec<usize> {
        let mut n_uses = vec![0; self.values.len()];
        let read = self.nodes.iter().flat_map(|node| node.inputs.iter().flatten());
        let kept = self.outputs.iter().chain(self.states.iter().map(|state| &state.value));
        read.chain(kept).for_each(|id| n_uses[id.0] += 1);
        n_uses
    }

    /// Lists the nodes that read each value, in order, one as often as it does.
    pub fn readers(&self) -> Vec<Vec<usize>> {
        let mut readers = vec![Vec::new(); self.values.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            node.inputs.iter().flatten().for_each(|id| readers[id.0].push(at));
        }
        readers
    }

    /// Lists the nodes that read each value, in order, each once.
    pub fn users(&self) -> Vec<Vec<usize>> {
        let mut readers = self.readers();
        readers.iter_mut().for_each(Vec::dedup);
        readers
    }

    /// The node that computes each value.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            node.outputs.iter().for_each(|id| producers[id.0] = Some(at));
        }
        producers
    }

    /// Leaves out what no output needs.
    pub fn prune(&mut self) {
        let mut is_needed = vec![false; self.values.len()];
        let kept = self.outputs.iter().chain(self.states.iter().map(|state| &state.value));
        kept.for_each(|id| is_needed[id.0] = true);
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

    /// Puts nodes into an order in which each reads only what comes before it, as near to theirs as can be.
    ///
    /// # Panics
    /// If they go round in a circle.
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
