//! Runs of a part of a model whose shapes depend on the data.

use tilewright::Records;
use tilewright_graph::op::Inputs;
use tilewright_graph::{DynamicPart, EvaluateError, NodeId, Tensor, TensorType};
use tilewright_ir::Target;
use tilewright_runtime::SharedPool;

use crate::compile::CompileOptions;
use crate::fuse::lower;
use crate::runner::Runner;
use crate::schedule::compile_known;

/// Means of compiling the nodes of a part.
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

/// Kernel of a node for the shapes that a run has met.
struct MetNode {
    types: Vec<Option<TensorType>>,
    /// `None` for a node that is left to the reference.
    runner: Option<Runner>,
}

/// Part of a model whose shapes depend on the data, evaluated operator by operator. Nodes with much
/// arithmetic become kernels when a run meets their shapes; each keeps the kernel of the last shapes.
pub struct PartRunner<'a> {
    part: &'a DynamicPart,
    options: PartOptions<'a>,
    met: Vec<Option<MetNode>>,
}

impl<'a> PartRunner<'a> {
    /// Prepares a part.
    pub fn new(part: &'a DynamicPart, options: PartOptions<'a>) -> PartRunner<'a> {
        PartRunner { part, options, met: (0..part.n_nodes()).map(|_| None).collect() }
    }

    /// Number of nodes that ran as kernels.
    pub fn n_kernels(&self) -> usize {
        self.met.iter().flatten().filter(|met| met.runner.is_some()).count()
    }

    /// Computes the model's outputs, by name, from the outputs of the graph ahead of the part.
    ///
    /// # Errors
    /// If an operator refuses.
    pub fn run(&mut self, ahead: &[Tensor]) -> Result<Vec<(String, Tensor)>, EvaluateError> {
        let PartRunner { part, options, met } = self;
        part.evaluate_with(ahead, &mut |id, inputs| {
            let met = &mut met[id.0 as usize];
            let types: Vec<_> = inputs.0.iter().map(|fact| fact.map(|fact| fact.ty.clone())).collect();
            if met.as_ref().is_none_or(|met| met.types != types) {
                *met = Some(MetNode { types, runner: kernel_of(part, id, inputs, *options) });
            }
            run_alone(met.as_mut()?.runner.as_mut()?, inputs)
        })
    }
}

/// Compiles a node by itself; `None` where it has no code, or none that is worth it.
fn kernel_of(part: &DynamicPart, id: NodeId, inputs: Inputs<'_>, options: PartOptions<'_>) -> Option<Runner> {
    let PartOptions { target, pool, threads, records, making } = options;
    let fused = lower(&part.heavy_node(id, inputs)?, false, target).ok()?;
    if fused.without_code().next().is_some() {
        return None;
    }
    let compiled = compile_known(fused, target, threads, records, making).ok()?;
    Runner::cached(&compiled, pool, making.cache).ok()
}

/// Runs a node by itself on its inputs, which are named by their places.
fn run_alone(runner: &mut Runner, inputs: Inputs<'_>) -> Option<Vec<Tensor>> {
    let names: Vec<String> = runner.inputs().map(|(name, _)| name.to_owned()).collect();
    for name in names {
        let place: usize = name.parse().ok()?;
        runner.set(&name, inputs.optional(place)?.value?).ok()?;
    }
    runner.run().ok()?;
    Some(runner.outputs().into_iter().map(|(_, tensor)| tensor).collect())
}
