//! Execution of a compiled model on host tensors.

use std::ops::Range;
use std::time::Instant;

use bytes::Bytes;
use tilewright::{Cache, NO_CACHE};
use tilewright_device::gpu::{GpuContext, GpuError};
use tilewright_graph::{DType, Tensor, TensorType, Value};
use tilewright_runtime::{self as runtime, Aligned, AnyModel, Context, Member, OpenDimension, Place, SharedPool};
use tilewright_search::Timing;

use crate::compile::Compiled;

/// Reason why a run fails.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Input that does not exist, or has the wrong type or shape.
    #[error("input `{name}` {what}")]
    Input {
        /// The input.
        name: String,
        /// Reason.
        what: String,
    },
    /// Failed allocation of memory or threads.
    #[error("no memory or threads for a run: {0}")]
    Memory(#[from] std::io::Error),
    /// Error of an operator without code.
    #[error(transparent)]
    Run(#[from] tilewright_runtime::RunError),
    /// Error of a GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// Executable instance of a model: its memory, and threads or a GPU.
pub struct Runner {
    context: RunContext,
    inputs: Vec<LargestPort>,
    outputs: Vec<LargestPort>,
    states: Vec<KeptState>,
}

/// Input or output with memory for the largest size of an open dimension.
struct LargestPort {
    name: String,
    /// Type at the size of the next run.
    ty: TensorType,
    /// Tensor of the plan.
    tensor: Option<runtime::PlanTensor>,
    memory: Aligned,
}

impl LargestPort {
    fn n_bytes(&self) -> usize {
        self.ty.checked_bytes().expect("invariant: it is in memory")
    }

    fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[..self.n_bytes()]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let n_bytes = self.n_bytes();
        &mut self.memory.bytes_mut()[..n_bytes]
    }
}

/// State of the context, which appears in the model as an input and an output.
struct KeptState {
    past: String,
    present: String,
    /// Type of the model's input and output.
    dtype: DType,
    /// Type at the largest size.
    ty: TensorType,
    axis: usize,
    /// Number of items in the next run, if it is open: the first ones.
    n_items: Option<usize>,
}

impl KeptState {
    /// Type with `n` rows, of the items of the next run.
    fn with(&self, n: usize) -> TensorType {
        let mut ty = self.ty.clone();
        ty.shape[self.axis] = n;
        if let Some(n_items) = self.n_items {
            ty.shape[0] = n_items;
        }
        ty
    }

    /// Byte ranges of each contiguous run of rows: in memory for the largest size, and in a tensor with `n`
    /// rows.
    fn parts(&self, n: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let row = self.ty.shape[self.axis + 1..].iter().product::<usize>() * self.ty.dtype.size();
        let (all, most) = (self.with(n).shape[..self.axis].iter().product::<usize>(), self.ty.shape[self.axis]);
        let part = move |at: usize, pitch: usize| at * pitch * row..at * pitch * row + n * row;
        (0..all).map(move |at| (part(at, most), part(at, n)))
    }
}

/// Execution context of a run.
enum RunContext {
    Cpu(Box<Context>),
    Gpu(GpuContext),
}

impl Runner {
    /// Allocates the memory for a model and, for a GPU, loads its code and constants.
    ///
    /// # Errors
    /// If memory or threads do not suffice, or the GPU reports an error.
    pub fn new(compiled: &Compiled, threads: &SharedPool) -> Result<Runner, RunError> {
        Runner::cached(compiled, threads, &NO_CACHE)
    }

    /// Makes a runner as [`Runner::new`] does, with GPU code from a cache, to which missing code is added.
    ///
    /// # Errors
    /// As [`Runner::new`].
    pub fn cached(compiled: &Compiled, threads: &SharedPool, cache: &Cache) -> Result<Runner, RunError> {
        let (net, plan) = (&compiled.fused.net, compiled.model.plan());
        let ports = |ids: &[crate::ValueId], place: fn(usize) -> Place| -> Result<Vec<LargestPort>, RunError> {
            let tensors = plan.ports(place);
            let port = |(at, id): (usize, &crate::ValueId)| {
                let value = net.value(*id);
                let tensor = tensors.get(at).map(|tensor| plan.tensors[*tensor].clone());
                let (name, mut ty) = (value.name.clone(), value.ty());
                if let (Some(items), true) = (&plan.items, tensor.as_ref().is_some_and(|tensor| tensor.in_items)) {
                    ty.shape[0] = items.most as usize;
                }
                let memory = Aligned::new(ty.checked_bytes().expect("invariant: it is in memory") as u64)?;
                Ok(LargestPort { name, ty, tensor, memory })
            };
            ids.iter().enumerate().map(port).collect()
        };
        let (inputs, outputs) = (ports(&net.inputs, Place::Input)?, ports(&net.outputs, Place::Output)?);
        let context = match &compiled.model {
            AnyModel::Cpu(model) => RunContext::Cpu(Box::new(Context::new(model, threads)?)),
            AnyModel::Gpu(model) => RunContext::Gpu(GpuContext::new(model, cache)?),
        };
        let kept = |state: &crate::net::State| KeptState {
            past: state.past.clone(),
            present: state.present.clone(),
            dtype: state.dtype,
            ty: net.value(state.value).ty(),
            axis: state.axis,
            n_items: plan.items.as_ref().map(|items| items.most as usize),
        };
        let states = net.states.iter().map(kept).collect();
        let mut runner = Runner { context, inputs, outputs, states };
        if let (Some(dim), Some(n)) = (runner.rows_dim().cloned(), runner.rows()) {
            runner.set_dim(&dim.name, n)?;
        }
        Ok(runner)
    }

    /// Names and types of the inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.inputs.iter().map(|port| (port.name.as_str(), &port.ty))
    }

    /// Dimension of the rows of a run, if their number is open.
    fn rows_dim(&self) -> Option<&OpenDimension> {
        let RunContext::Cpu(context) = &self.context else { return None };
        context.model().plan().rows.as_ref()
    }

    /// Number of rows of the next run, if it is open; see [`Context::rows`].
    pub fn rows(&self) -> Option<i64> {
        let RunContext::Cpu(context) = &self.context else { return None };
        context.rows()
    }

    /// Number of items of the next run; 1 if it is not open.
    pub(crate) fn n_items(&self) -> i64 {
        let RunContext::Cpu(context) = &self.context else { return 1 };
        context.items().unwrap_or(1)
    }

    /// Steps of the next run, where each size has steps of its own.
    pub(crate) fn steps_of_member(&self) -> Option<Range<usize>> {
        let RunContext::Cpu(context) = &self.context else { return None };
        context.member().map(|member| member.steps.clone())
    }

    /// Sets the size of an open dimension of the model for subsequent inputs and runs; the default is the
    /// largest size.
    ///
    /// # Errors
    /// If there is no such dimension, or the size is outside its range.
    pub fn set_dim(&mut self, name: &str, size: i64) -> Result<(), RunError> {
        let RunContext::Cpu(context) = &mut self.context else {
            return Err(runtime::RunError::NoDim { name: name.to_owned(), open: None }.into());
        };
        context.set_dim(name, size)?;
        if let Some(member) = context.member() {
            let ports = self.inputs.iter_mut().chain(&mut self.outputs);
            for (port, tensor) in ports.zip(&member.ports) {
                port.ty.shape.clone_from(&context.model().plan().tensors[*tensor].shape);
            }
            return Ok(());
        }
        let sizes = context.sizes_of_ports();
        let n_items = context.items().unwrap_or(1);
        self.states.iter_mut().for_each(|state| state.n_items = state.n_items.map(|_| n_items as usize));
        for port in self.inputs.iter_mut().chain(&mut self.outputs) {
            if let Some(tensor) = &port.tensor {
                port.ty.shape = tensor.shape_of(sizes, n_items);
            }
        }
        Ok(())
    }

    /// Sets an input by name, or the past of a state. Inputs that are not set keep their values.
    ///
    /// # Errors
    /// If there is no input of that name, or it has another type.
    pub fn set(&mut self, name: &str, tensor: &Tensor) -> Result<(), RunError> {
        let names: Vec<String> = self.inputs.iter().map(|port| port.name.clone()).collect();
        let refuse = |what: String| RunError::Input { name: name.to_owned(), what };
        let state = self.states.iter().position(|state| state.past == name);
        if let (Some(at), RunContext::Cpu(context)) = (state, &mut self.context) {
            let (n, state, tensor) = (context.past() as usize, &self.states[at], &tensor.widened());
            if *tensor.ty() != state.with(n) {
                return Err(refuse(format!("is {}, and should be {}", tensor.ty(), state.with(n))));
            }
            let memory = context.state_mut(at).expect("invariant: the plan has the net's states");
            for (all, part) in state.parts(n) {
                memory[all].copy_from_slice(&tensor.bytes()[part]);
            }
            return Ok(());
        }
        let found = self.inputs.iter_mut().find(|port| port.name == name);
        let port =
            found.ok_or_else(|| refuse(format!("is not an input of the model, which has {}", names.join(", "))))?;
        if *tensor.ty() != port.ty {
            return Err(refuse(format!("is {}, and should be {}", tensor.ty(), port.ty)));
        }
        port.bytes_mut().copy_from_slice(tensor.bytes());
        Ok(())
    }

    /// Sizes of open dimensions that tensors determine: the length of the past, from the tensors of states;
    /// the rows of a run or the model's open dimension; the second one; and the number of items.
    fn sizes_of(&self, inputs: &[(Value, Tensor)]) -> Vec<(String, i64)> {
        let RunContext::Cpu(context) = &self.context else { return Vec::new() };
        let plan = context.model().plan();
        let given = |name: &str| inputs.iter().find(|(value, _)| value.name == name).map(|(_, tensor)| tensor);
        if let Some(members) = &plan.members {
            let fits = |member: &&Member| {
                let mut ports = self.inputs.iter().zip(&member.ports);
                ports.all(|(port, own)| given(&port.name).is_none_or(|x| x.shape() == plan.tensors[*own].shape))
            };
            // The size that was set applies unless the tensors determine another.
            let found = context.member().into_iter().chain(&members.each).find(fits);
            let sizes = found.map_or(&[][..], |member| &member.sizes[..]);
            return members.dims.iter().zip(sizes).map(|(dim, size)| (dim.name.clone(), *size)).collect();
        }
        let size = |dim: usize, port: &LargestPort| {
            let (axis, open) = port.tensor.as_ref()?.open.filter(|(_, open)| open.dim == dim)?;
            let n = *given(&port.name)?.shape().get(axis)? as i64 - open.term;
            (n % open.factor == 0).then_some(n / open.factor)
        };
        let n_items = |port: &LargestPort| {
            let has_items = port.tensor.as_ref().is_some_and(|tensor| tensor.in_items);
            Some(*given(&port.name).filter(|_| has_items)?.shape().first()? as i64)
        };
        let past = |state: &KeptState| Some(*given(&state.past)?.shape().get(state.axis)? as i64);
        let past = self.states.iter().find_map(past).and_then(|n| Some((plan.dim.as_ref()?, n)));
        let own = plan.rows.as_ref().or(plan.dim.as_ref()).filter(|_| plan.rows.is_some() || past.is_none());
        let of_inputs = |at: usize| self.inputs.iter().find_map(|port| size(at, port));
        let own = own.and_then(|dim| Some((dim, of_inputs(0)?)));
        let second = plan.second.as_ref().and_then(|dim| Some((dim, of_inputs(1)?)));
        let items = plan.items.as_ref().and_then(|items| Some((items, self.inputs.iter().find_map(n_items)?)));
        past.into_iter().chain(own).chain(second).chain(items).map(|(dim, n)| (dim.name.clone(), n)).collect()
    }

    /// Sets all inputs of a model except those that are constants in the compiled model; the sizes of open
    /// dimensions, of the past and of the rows are taken from the tensors.
    ///
    /// # Errors
    /// As [`Runner::set`] and [`Runner::set_dim`].
    pub fn set_all(&mut self, inputs: &[(Value, Tensor)]) -> Result<(), RunError> {
        for (dim, size) in self.sizes_of(inputs) {
            self.set_dim(&dim, size)?;
        }
        let mut names: Vec<String> = self.inputs.iter().map(|port| port.name.clone()).collect();
        names.extend(self.states.iter().map(|state| state.past.clone()));
        let taken = inputs.iter().filter(|(value, _)| names.contains(&value.name));
        taken.into_iter().try_for_each(|(value, tensor)| self.set(&value.name, tensor))
    }

    /// Median of `n_runs` runs, in nanoseconds.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn median_ns(&mut self, n_runs: usize) -> Result<f64, RunError> {
        let ns = (0..n_runs.max(1)).map(|_| self.run().map(|ns| ns as f64)).collect::<Result<Vec<_>, _>>()?;
        Ok(Timing::of_samples(&ns, false).median_ns)
    }

    /// Runs the model on the current inputs; returns the time in nanoseconds.
    ///
    /// # Errors
    /// If an operator without code fails.
    pub fn run(&mut self) -> Result<u64, RunError> {
        let inputs: Vec<&[u8]> = self.inputs.iter().map(LargestPort::bytes).collect();
        let mut outputs: Vec<&mut [u8]> = self.outputs.iter_mut().map(LargestPort::bytes_mut).collect();
        let start = Instant::now();
        match &mut self.context {
            // States keep their length: runs have the size that was set.
            RunContext::Cpu(context) if context.model().plan().appends > 0 => {
                let past = context.past();
                context.run(&inputs, &mut outputs)?;
                context.rewind(past)?;
            }
            RunContext::Cpu(context) => context.run(&inputs, &mut outputs)?,
            RunContext::Gpu(context) => context.run(&inputs, &mut outputs)?,
        }
        Ok(start.elapsed().as_nanos() as u64)
    }

    /// Runs the model as [`Runner::run`] does, and adds each step's time in nanoseconds to its entry.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn profile(&mut self, step_ns: &mut [u64]) -> Result<(), RunError> {
        let inputs: Vec<&[u8]> = self.inputs.iter().map(LargestPort::bytes).collect();
        let mut outputs: Vec<&mut [u8]> = self.outputs.iter_mut().map(LargestPort::bytes_mut).collect();
        match &mut self.context {
            RunContext::Cpu(context) => {
                let past = context.past();
                context.profile(&inputs, &mut outputs, step_ns)?;
                if context.model().plan().appends > 0 {
                    context.rewind(past)?;
                }
            }
            RunContext::Gpu(context) => context.profile(&inputs, &mut outputs, step_ns)?,
        }
        Ok(())
    }

    /// Outputs of the last run by name, followed by the present values of states.
    pub fn outputs(&self) -> Vec<(String, Tensor)> {
        let tensor = |port: &LargestPort| {
            Tensor::new(port.ty.clone(), Bytes::copy_from_slice(port.bytes())).expect("it has the type's bytes")
        };
        let mut all: Vec<(String, Tensor)> =
            self.outputs.iter().map(|port| (port.name.clone(), tensor(port))).collect();
        let RunContext::Cpu(context) = &self.context else { return all };
        let n = (context.past() + context.appends()) as usize;
        for (at, state) in self.states.iter().enumerate() {
            let memory = context.state(at).expect("invariant: the plan has the net's states");
            let bytes: Vec<u8> = state.parts(n).flat_map(|(all, _)| memory[all].to_vec()).collect();
            let tensor = Tensor::new(state.with(n), bytes.into()).expect("it has the type's bytes");
            all.push((state.present.clone(), tensor.rounded(state.dtype)));
        }
        all
    }
}
