//! Runs of a part of a model whose shapes depend on the data.

use tilewright::Records;
use tilewright_graph::op::{Fact, Inputs};
use tilewright_graph::{DynamicPart, EvaluateError, NodeId, Tensor, TensorType};
use tilewright_ir::Target;
use tilewright_runtime::{OpenDimension, SharedPool};

use crate::compile::CompileOptions;
use crate::fuse::{Fused, lower};
use crate::open::{OpenError, open_or_repeat};
use crate::runner::Runner;
use crate::schedule::compile_known;

/// Name of the dimension that is open in a node's kernel.
const COUNT: &str = "count";
/// Minimum size that an open kernel has room for.
const LEAST_ROOM: i64 = 64;
/// Maximum number of kernels of a node for single shapes.
const MOST_KERNELS: usize = 8;

/// Options for compiling the nodes of a part.
#[derive(Clone, Copy)]
pub struct PartOptions<'a> {
    /// Machine to compile for.
    pub target: &'a Target,
    /// Threads of a kernel.
    pub pool: &'a SharedPool,
    /// Number of threads of a kernel.
    pub threads: usize,
    /// Records of the best kernels.
    pub records: &'a Records,
    /// Options of compiling.
    pub making: CompileOptions<'a>,
}

/// Types of a node's inputs.
type Types = Vec<Option<TensorType>>;

/// Kernel of a node for shapes that a run has met.
struct MetNode {
    types: Types,
    /// `None` for a node that is left to the reference.
    runner: Option<Runner>,
}

/// Kernel of a node for any size of a dimension that some of its inputs have, such as the number of rows.
struct CountedNode {
    types: Types,
    /// Open dimension of each input.
    axes: Vec<Option<usize>>,
    /// Maximum size.
    most: i64,
    runner: Runner,
}

impl CountedNode {
    /// Size of the dimension in inputs of these types; `None` if they differ in more than that.
    fn count(&self, types: &Types) -> Option<i64> {
        let (axes, [_, n]) = axes_between(&self.types, types)?;
        if axes.iter().any(Option::is_some) {
            return (axes == self.axes).then_some(n as i64);
        }
        let (own, axis) = self.types.iter().zip(&self.axes).find_map(|(own, axis)| Some((own.as_ref()?, (*axis)?)))?;
        own.shape.get(axis).map(|n| *n as i64)
    }
}

/// Dimension in which each input differs between two runs, and both of its sizes; `None` if the inputs differ
/// in more.
fn axes_between(first: &Types, second: &Types) -> Option<(Vec<Option<usize>>, [usize; 2])> {
    let mut numbers = None;
    let mut axis = |(a, b): (&Option<TensorType>, &Option<TensorType>)| {
        if a == b {
            return Some(None);
        }
        let (a, b) = (a.as_ref()?, b.as_ref()?);
        let mut differ = (0..a.shape.len()).filter(|&axis| a.shape.get(axis) != b.shape.get(axis));
        let (axis, None) = (differ.next()?, differ.next()) else { return None };
        let sizes = [a.shape[axis], *b.shape.get(axis)?];
        let is_alike = (a.dtype, a.shape.len()) == (b.dtype, b.shape.len());
        (is_alike && *numbers.get_or_insert(sizes) == sizes).then_some(Some(axis))
    };
    let axes = first.iter().zip(second).map(&mut axis).collect::<Option<_>>()?;
    Some((axes, numbers.unwrap_or_default()))
}

/// Kernels of a node.
#[derive(Default)]
struct NodeKernels {
    /// Kernels for single shapes, the most recently met last.
    met: Vec<MetNode>,
    counted: Option<CountedNode>,
    n_compiled: usize,
}

impl NodeKernels {
    fn run(&mut self, node: &RunNode) -> Option<Vec<Tensor>> {
        let types: Types = node.inputs.0.iter().map(|fact| fact.map(|fact| fact.ty.clone())).collect();
        if !self.met.iter().any(|met| met.types == types) && self.count(&types).is_none() {
            self.meet(node, &types);
        }
        if let (Some(n), Some(counted)) = (self.count(&types), &mut self.counted) {
            counted.runner.set_dim(COUNT, n).ok()?;
            return run_alone(&mut counted.runner, node.inputs);
        }
        let met = self.met.iter_mut().find(|met| met.types == types)?;
        run_alone(met.runner.as_mut()?, node.inputs)
    }

    /// Size of the open dimension in inputs of these types, if the kernel for any size takes them.
    fn count(&self, types: &Types) -> Option<i64> {
        let counted = self.counted.as_ref()?;
        counted.count(types).filter(|n| (1..=counted.most).contains(n))
    }

    /// Compiles a node for shapes that are new to it: for any size of a dimension if only that differs from
    /// an earlier run.
    fn meet(&mut self, node: &RunNode, types: &Types) {
        let before = self.counted.as_ref().map(|counted| &counted.types).or(self.met.last().map(|met| &met.types));
        if let Some(counted) = before.and_then(|before| node.counted(before, types)) {
            self.met.retain(|met| counted.count(&met.types).is_none());
            (self.counted, self.n_compiled) = (Some(counted), self.n_compiled + 1);
            return;
        }
        if self.met.len() == MOST_KERNELS {
            self.met.remove(0);
        }
        let runner = node.kernel();
        self.n_compiled += usize::from(runner.is_some());
        self.met.push(MetNode { types: types.clone(), runner });
    }
}

/// Part of a model whose shapes depend on the data, evaluated operator by operator. Nodes with much
/// arithmetic are compiled when a run first has their shapes: if the shapes of a second run differ only in
/// one dimension, such as the number of a detector's boxes or the length of a signal, to a kernel for any
/// size of it; otherwise to a kernel for each of the most recent shapes.
pub struct PartRunner<'a> {
    part: &'a DynamicPart,
    options: PartOptions<'a>,
    nodes: Vec<NodeKernels>,
}

impl<'a> PartRunner<'a> {
    /// Prepares a part.
    pub fn new(part: &'a DynamicPart, options: PartOptions<'a>) -> PartRunner<'a> {
        PartRunner { part, options, nodes: (0..part.n_nodes()).map(|_| NodeKernels::default()).collect() }
    }

    /// Number of nodes that ran as kernels.
    pub fn n_kernels(&self) -> usize {
        self.nodes.iter().filter(|node| node.n_compiled > 0).count()
    }

    /// Number of kernels that were compiled for these nodes.
    pub fn n_compiled(&self) -> usize {
        self.nodes.iter().map(|node| node.n_compiled).sum()
    }

    /// Computes the model's outputs, by name, from the outputs of the graph ahead of the part.
    ///
    /// # Errors
    /// If an operator fails.
    pub fn run(&mut self, ahead: &[Tensor]) -> Result<Vec<(String, Tensor)>, EvaluateError> {
        let PartRunner { part, options, nodes } = self;
        let (part, options) = (*part, *options);
        part.evaluate_with(ahead, &mut |id, inputs| nodes[id.0 as usize].run(&RunNode { part, id, inputs, options }))
    }
}

/// Node of a part in a run.
struct RunNode<'a> {
    part: &'a DynamicPart,
    id: NodeId,
    inputs: Inputs<'a>,
    options: PartOptions<'a>,
}

/// Reason why a node has no kernel for any size.
struct NotCounted;

impl From<OpenError> for NotCounted {
    fn from(_: OpenError) -> NotCounted {
        NotCounted
    }
}

impl RunNode<'_> {
    /// Lowers the node for inputs of these types; `None` if it has no code, or is not worth a kernel.
    fn lowered(&self, inputs: Inputs<'_>) -> Option<Fused> {
        let PartOptions { target, threads, .. } = self.options;
        let fused = lower(&self.part.node_alone(self.id, inputs)?, false, target, threads).ok()?;
        let has_code = fused.without_code().next().is_none();
        has_code.then_some(fused)
    }

    fn compiled(&self, fused: Fused) -> Option<Runner> {
        let PartOptions { target, pool, threads, records, making } = self.options;
        let compiled = compile_known(fused, target, threads, records, making).ok()?;
        Runner::cached(&compiled, pool, making.cache).ok()
    }

    /// Whether a kernel of the node would be faster than the reference; tensors without elements have none.
    fn is_heavy(&self) -> bool {
        let is_empty = self.inputs.0.iter().flatten().any(|fact| fact.ty.n_elements() == 0);
        !is_empty && self.part.is_heavy(self.id, self.inputs)
    }

    /// Compiles the node on its own.
    fn kernel(&self) -> Option<Runner> {
        self.is_heavy().then(|| self.compiled(self.lowered(self.inputs)?)).flatten()
    }

    /// Compiles the node for any size of the dimension in which its inputs differ from `before`.
    fn counted(&self, before: &Types, types: &Types) -> Option<CountedNode> {
        let (axes, numbers) = axes_between(before, types)?;
        let is_worth_it = axes.iter().any(Option::is_some) && self.is_heavy();
        if !is_worth_it || self.options.target.gpu.is_some() {
            return None;
        }
        let most = (numbers.into_iter().max()?.next_power_of_two() as i64).max(LEAST_ROOM);
        let dim = OpenDimension { name: COUNT.to_owned(), least: 1, most, step: 1 };
        let lowered = |n: i64| {
            let sized = |(ty, axis): (&Option<TensorType>, &Option<usize>)| {
                let mut ty = ty.clone()?;
                axis.iter().for_each(|axis| ty.shape[*axis] = n as usize);
                Some(ty)
            };
            let own: Types = types.iter().zip(&axes).map(sized).collect();
            let mut facts = Vec::with_capacity(own.len());
            for ((fact, own), axis) in self.inputs.0.iter().zip(&own).zip(&axes) {
                let counted = own.as_ref().filter(|_| axis.is_some()).map(|ty| Fact { ty, value: None });
                facts.push(counted.or(*fact));
            }
            self.lowered(Inputs(&facts)).ok_or(NotCounted)
        };
        let fused = open_or_repeat::<NotCounted>(&dim, lowered).ok()?;
        let runner = self.compiled(fused)?;
        Some(CountedNode { types: types.clone(), axes, most, runner })
    }
}

/// Runs a node on its own; its inputs are named by their indices.
fn run_alone(runner: &mut Runner, inputs: Inputs<'_>) -> Option<Vec<Tensor>> {
    let names: Vec<String> = runner.inputs().map(|(name, _)| name.to_owned()).collect();
    for name in names {
        let place: usize = name.parse().ok()?;
        runner.set(&name, inputs.optional(place)?.value?).ok()?;
    }
    runner.run().ok()?;
    Some(runner.outputs().into_iter().map(|(_, tensor)| tensor).collect())
}
