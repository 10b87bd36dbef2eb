//! Running a compiled model on host tensors.

use std::time::Instant;

use bytes::Bytes;
use tilewright::{Cache, NO_CACHE};
use tilewright_device::gpu::{GpuContext, GpuError};
use tilewright_graph::{Tensor, TensorType, Value};
use tilewright_runtime::{Aligned, AnyModel, Context, Threads};
use tilewright_search::Timing;

use crate::compile::Compiled;

/// Why a run fails.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// An input that does not exist, or does not fit.
    #[error("input `{name}` {what}")]
    Input {
        /// The input.
        name: String,
        /// Reason.
        what: String,
    },
    /// Lack of memory or threads.
    #[error("no memory or threads for a run: {0}")]
    Memory(#[from] std::io::Error),
    /// An operator without code refused.
    #[error(transparent)]
    Run(#[from] tilewright_runtime::RunError),
    /// A GPU refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

/// A model with memory and threads, or a GPU, to run it.
pub struct Runner {
    context: On,
    inputs: Vec<(String, TensorType, Aligned)>,
    outputs: Vec<(String, TensorType, Aligned)>,
}

/// Execution context of a run.
enum On {
    Cpu(Context),
    Gpu(GpuContext),
}

impl Runner {
    /// Memory and threads for a model; where it is for a GPU, its code and its constants there.
    ///
    /// # Errors
    /// If there are not enough, or the GPU refuses.
    pub fn new(compiled: &Compiled, threads: &Threads) -> Result<Runner, RunError> {
        Runner::cached(compiled, threads, &NO_CACHE)
    }

    /// Does as [`Runner::new`], with a GPU's code from a cache, which keeps what it has not.
    ///
    /// # Errors
    /// As [`Runner::new`].
    pub fn cached(compiled: &Compiled, threads: &Threads, cache: &Cache) -> Result<Runner, RunError> {
        let net = &compiled.fused.net;
        let ports = |ids: &[crate::ValueId]| -> Result<Vec<(String, TensorType, Aligned)>, RunError> {
            let port = |id: &crate::ValueId| {
                let value = net.value(*id);
                Ok((value.name.clone(), value.ty(), Aligned::new(value.n_bytes())?))
            };
            ids.iter().map(port).collect()
        };
        let (inputs, outputs) = (ports(&net.inputs)?, ports(&net.outputs)?);
        let context = match &compiled.model {
            AnyModel::Cpu(model) => On::Cpu(Context::new(model, threads)?),
            AnyModel::Gpu(model) => On::Gpu(GpuContext::new(model, cache)?),
        };
        Ok(Runner { context, inputs, outputs })
    }

    /// Names and types of the inputs.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.inputs.iter().map(|(name, ty, _)| (name.as_str(), ty))
    }

    /// Takes inputs by name; those that are not given stay as they are.
    ///
    /// # Errors
    /// If there is none of a name, or it has another type.
    pub fn set(&mut self, name: &str, tensor: &Tensor) -> Result<(), RunError> {
        let names: Vec<String> = self.inputs.iter().map(|(name, ..)| name.clone()).collect();
        let refuse = |what: String| RunError::Input { name: name.to_owned(), what };
        let found = self.inputs.iter_mut().find(|(own, ..)| own == name);
        let (_, ty, memory) =
            found.ok_or_else(|| refuse(format!("is none of the model's (there are {})", names.join(", "))))?;
        if tensor.ty() != ty {
            return Err(refuse(format!("is {}, and should be {ty}", tensor.ty())));
        }
        memory.bytes_mut().copy_from_slice(tensor.bytes());
        Ok(())
    }

    /// Takes tensors of a model's inputs, all but those that are constants here.
    ///
    /// # Errors
    /// As [`Runner::set`].
    pub fn set_all(&mut self, inputs: &[(Value, Tensor)]) -> Result<(), RunError> {
        let names: Vec<String> = self.inputs.iter().map(|(name, ..)| name.clone()).collect();
        let taken = inputs.iter().filter(|(value, _)| names.contains(&value.name));
        taken.into_iter().try_for_each(|(value, tensor)| self.set(&value.name, tensor))
    }

    /// Median nanoseconds of `n_runs` runs.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn median_ns(&mut self, n_runs: usize) -> Result<f64, RunError> {
        let ns = (0..n_runs.max(1)).map(|_| self.run().map(|ns| ns as f64)).collect::<Result<Vec<_>, _>>()?;
        Ok(Timing::of_samples(&ns, false).median_ns)
    }

    /// Runs on the inputs that were set; the nanoseconds it takes.
    ///
    /// # Errors
    /// If an operator without code refuses.
    pub fn run(&mut self) -> Result<u64, RunError> {
        let inputs: Vec<&[u8]> = self.inputs.iter().map(|(.., memory)| memory.bytes()).collect();
        let mut outputs: Vec<&mut [u8]> = self.outputs.iter_mut().map(|(.., memory)| memory.bytes_mut()).collect();
        let start = Instant::now();
        match &mut self.context {
            On::Cpu(context) => context.run(&inputs, &mut outputs)?,
            On::Gpu(context) => context.run(&inputs, &mut outputs)?,
        }
        Ok(start.elapsed().as_nanos() as u64)
    }

    /// Runs the model as [`Runner::run`] does, adding to each step's entry the nanoseconds that it takes.
    ///
    /// # Errors
    /// As [`Runner::run`].
    pub fn profile(&mut self, step_ns: &mut [u64]) -> Result<(), RunError> {
        let inputs: Vec<&[u8]> = self.inputs.iter().map(|(.., memory)| memory.bytes()).collect();
        let mut outputs: Vec<&mut [u8]> = self.outputs.iter_mut().map(|(.., memory)| memory.bytes_mut()).collect();
        match &mut self.context {
            On::Cpu(context) => context.profile(&inputs, &mut outputs, step_ns)?,
            On::Gpu(context) => context.profile(&inputs, &mut outputs, step_ns)?,
        }
        Ok(())
    }

    /// Outputs of the last run, by name.
    pub fn outputs(&self) -> Vec<(String, Tensor)> {
        let tensor = |ty: &TensorType, memory: &Aligned| {
            Tensor::new(ty.clone(), Bytes::copy_from_slice(memory.bytes())).expect("it has the type's bytes")
        };
        self.outputs.iter().map(|(name, ty, memory)| (name.clone(), tensor(ty, memory))).collect()
    }
}
