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

/// Name of the dimension that is open in a node's kernel: the first of its inputs.
const COUNT: &str = "count";
/// Minimum number of rows that an open kernel has room for.
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

/// Kernel of a node for any number of rows, the size of the first dimension of some of its inputs.
struct CountedNode {
    types: Types,
    /// Whether each input has the rows.
    has_rows: Vec<bool>,
    /// Maximum number of rows.
    most: i64,
    runner: Runner,
}

impl CountedNode {
    /// Number of rows of inputs of these types; `None` if they differ in more than the rows.
    fn n_rows(&self, types: &Types) -> Option<i64> {
        let (has_others, [_, n]) = rows_between(&self.types, types)?;
        if has_others.contains(&true) {
            return (has_others == self.has_rows).then_some(n as i64);
        }
        let (own, _) = self.types.iter().zip(&self.has_rows).find(|(_, has_rows)| **has_rows)?;
        own.as_ref()?.shape.first().map(|n| *n as i64)
    }
}

/// Inputs whose number of rows differs between two runs, and both numbers; `None` if the inputs differ in
/// more.
fn rows_between(first: &Types, second: &Types) -> Option<(Vec<bool>, [usize; 2])> {
    let mut numbers = None;
    let mut has_rows = |(a, b): (&Option<TensorType>, &Option<TensorType>)| {
        if a == b {
            return Some(false);
        }
        let (a, b) = (a.as_ref()?, b.as_ref()?);
        let [(n, of_a), (m, of_b)] = [a.shape.split_first()?, b.shape.split_first()?];
        let is_alike = (a.dtype, of_a) == (b.dtype, of_b) && *numbers.get_or_insert([*n, *m]) == [*n, *m];
        is_alike.then_some(true)
    };
    let has_rows = first.iter().zip(second).map(&mut has_rows).collect::<Option<_>>()?;
    Some((has_rows, numbers.unwrap_or_default()))
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
        if !self.met.iter().any(|met| met.types == types) && self.n_rows(&types).is_none() {
            self.meet(node, &types);
        }
        if let (Some(n), Some(counted)) = (self.n_rows(&types), &mut self.counted) {
            counted.runner.set_dim(COUNT, n).ok()?;
            return run_alone(&mut counted.runner, node.inputs);
        }
        let met = self.met.iter_mut().find(|met| met.types == types)?;
        run_alone(met.runner.as_mut()?, node.inputs)
    }

    /// Number of rows of inputs of these types, if the kernel for any number of rows takes them.
    fn n_rows(&self, types: &Types) -> Option<i64> {
        let counted = self.counted.as_ref()?;
        counted.n_rows(types).filter(|n| (1..=counted.most).contains(n))
    }

    /// Compiles a node for shapes that are new to it: for any number of rows if only that number differs from
    /// an earlier run.
    fn meet(&mut self, node: &RunNode, types: &Types) {
        let before = self.counted.as_ref().map(|counted| &counted.types).or(self.met.last().map(|met| &met.types));
        if let Some(counted) = before.and_then(|before| node.counted(before, types)) {
            self.met.retain(|met| counted.n_rows(&met.types).is_none());
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
/// the number of rows, such as that of a detector's boxes, to a kernel for any number of rows; otherwise to a
/// kernel for each of the most recent shapes.
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

/// Reason why a node has no kernel for any number of rows.
struct NotCounted;

impl From<OpenError> for NotCounted {
    fn from(_: OpenError) -> NotCounted {
        NotCounted
    }
}

impl RunNode<'_> {
    /// Lowers the node for inputs of these types; `None` if it has no code, or is not worth a kernel.
    fn lowered(&self, inputs: Inputs<'_>) -> Option<Fused> {
        let fused = lower(&self.part.node_alone(self.id, inputs)?, false, self.options.target).ok()?;
        let has_code = fused.without_code().next().is_none();
        has_code.then_some(fused)
    }

    fn compiled(&self, fused: Fused) -> Option<Runner> {
        let PartOptions { target, pool, threads, records, making } = self.options;
        let compiled = compile_known(fused, target, threads, records, making).ok()?;
        Runner::cached(&compiled, pool, making.cache).ok()
    }

    /// Compiles the node on its own.
    fn kernel(&self) -> Option<Runner> {
        self.part.is_heavy(self.id, self.inputs).then(|| self.compiled(self.lowered(self.inputs)?)).flatten()
    }

    /// Compiles the node for any number of rows, the dimension in which its inputs differ from `before`.
    fn counted(&self, before: &Types, types: &Types) -> Option<CountedNode> {
        let (has_rows, numbers) = rows_between(before, types)?;
        let is_worth_it = has_rows.contains(&true) && self.part.is_heavy(self.id, self.inputs);
        if !is_worth_it || self.options.target.gpu.is_some() {
            return None;
        }
        let most = (numbers.into_iter().max()?.next_power_of_two() as i64).max(LEAST_ROOM);
        let dim = OpenDimension { name: COUNT.to_owned(), least: 1, most, step: 1 };
        let lowered = |n: i64| {
            let with_rows = |(ty, has_rows): (&Option<TensorType>, &bool)| {
                let mut ty = ty.clone()?;
                if *has_rows {
                    ty.shape[0] = n as usize;
                }
                Some(ty)
            };
            let own: Types = types.iter().zip(&has_rows).map(with_rows).collect();
            let mut facts = Vec::with_capacity(own.len());
            for ((fact, own), has_rows) in self.inputs.0.iter().zip(&own).zip(&has_rows) {
                let counted = own.as_ref().filter(|_| *has_rows).map(|ty| Fact { ty, value: None });
                facts.push(counted.or(*fact));
            }
            self.lowered(Inputs(&facts)).ok_or(NotCounted)
        };
        let fused = open_or_repeat::<NotCounted>(&dim, lowered).ok()?;
        let runner = self.compiled(fused)?;
        Some(CountedNode { types: types.clone(), has_rows, most, runner })
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
