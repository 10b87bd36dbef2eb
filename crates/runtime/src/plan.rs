//! What a run does: tensors, where they lie, and steps in their order. Plain data, made by whoever compiles.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use tilewright_ir::{DType, Part};

use crate::host::HostCall;

/// A tensor of a run, or another view of the memory of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, for people; for inputs and outputs that of the interface.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions as they lie in memory, the last one contiguous.
    pub shape: Vec<usize>,
    /// Where it lies.
    pub place: Place,
}

impl Tensor {
    /// Its size.
    pub fn n_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes() as usize
    }
}

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In what the caller passes as an input.
    Input(usize),
    /// In what the caller passes as an output.
    Output(usize),
    /// In the arena, from this byte on; see [`crate::plan_memory`].
    Arena(usize),
    /// In one of [`Plan::constants`].
    Constant(usize),
}

/// What stays the same from run to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constant {
    /// Given.
    Data(Bytes),
    /// Made once by the `prepare` part of a kernel that keeps it: so many bytes.
    Prepared(usize),
    /// Given, and forgotten once it had served: so many bytes.
    Forgotten(usize),
}

impl Constant {
    /// Its size.
    pub fn n_bytes(&self) -> usize {
        match self {
            Constant::Data(data) => data.len(),
            Constant::Prepared(n_bytes) | Constant::Forgotten(n_bytes) => *n_bytes,
        }
    }
}

/// Bytes of a tensor next to each other: all of it, or a part that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The tensor, an index into [`Plan::tensors`].
    pub tensor: usize,
    /// Where in the tensor it begins, in bytes.
    pub offset: usize,
    /// Its size.
    pub n_bytes: usize,
}

/// What an operator without a kernel does: makes outputs of inputs, whose sizes are those of the step's
/// slices.
pub type HostFunction = dyn Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<(), String> + Send + Sync;

/// What a step runs that is no kernel.
#[derive(Clone)]
pub enum Host {
    /// A function in C, which libraries contain.
    Call(HostCall),
    /// A function of this process; a plan with such a step cannot be shipped.
    Function(Arc<HostFunction>),
}

impl Host {
    /// Scratch memory that it uses.
    pub fn scratch_bytes(&self) -> usize {
        match self {
            Host::Call(call) => call.scratch_bytes,
            Host::Function(_) => 0,
        }
    }
}

/// What a step does.
#[derive(Clone)]
pub enum Work {
    /// Runs a kernel.
    Kernel {
        /// The kernel: an index into the table beside the plan.
        kernel: usize,
        /// Its arguments, in its order.
        arguments: Vec<Slice>,
        /// Its kept buffers, in its order: constants to be prepared, or memory that other steps share.
        kept: Vec<Slice>,
        /// The parts that each run carries out, as a rule the body alone.
        parts: Vec<Part>,
        /// Whether its parallel loops run on all threads, or on the caller's alone.
        all_threads: bool,
    },
    /// Copies.
    Copy {
        /// From here.
        from: Slice,
        /// To here, as many bytes.
        to: Slice,
    },
    /// Calls a function that is no kernel.
    Host {
        /// What it reads.
        inputs: Vec<Slice>,
        /// What it writes.
        outputs: Vec<Slice>,
        /// The function.
        run: Host,
    },
}

/// One step of a run.
#[derive(Clone)]
pub struct Step {
    /// Its name, for people.
    pub name: String,
    /// What it does.
    pub work: Work,
}

/// Everything about a run but the kernels.
#[derive(Clone, Default)]
pub struct Plan {
    /// The tensors. The first one of each input and output says its name, type and shape.
    pub tensors: Vec<Tensor>,
    /// What stays the same from run to run.
    pub constants: Vec<Constant>,
    /// What happens, in this order.
    pub steps: Vec<Step>,
}

impl Plan {
    /// Adds a tensor and says its number.
    pub fn tensor(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize], place: Place) -> usize {
        self.tensors.push(Tensor { name: name.into(), dtype, shape: shape.to_vec(), place });
        self.tensors.len() - 1
    }

    /// All of a tensor.
    pub fn whole(&self, tensor: usize) -> Slice {
        Slice { tensor, offset: 0, n_bytes: self.tensors[tensor].n_bytes() }
    }

    /// The tensors that say what the inputs, or the outputs, are, in their order: those in the first, second
    /// and so on of such places.
    pub fn ports(&self, place: fn(usize) -> Place) -> Vec<usize> {
        (0..).map_while(|at| self.tensors.iter().position(|tensor| tensor.place == place(at))).collect()
    }

    /// Size of the arena.
    pub fn arena_bytes(&self) -> usize {
        let ends = self.tensors.iter().filter_map(|tensor| match tensor.place {
            Place::Arena(offset) => Some(offset + tensor.n_bytes()),
            Place::Input(_) | Place::Output(_) | Place::Constant(_) => None,
        });
        ends.max().unwrap_or(0)
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.work {
            Work::Kernel { kernel, .. } => format!("kernel {kernel}"),
            Work::Copy { .. } => "copy".to_owned(),
            Work::Host { .. } => "host".to_owned(),
        };
        write!(f, "{} ({what})", self.name)
    }
}
