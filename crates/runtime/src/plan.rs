//! Plan of a model's run: tensors, their memory, and steps in order. Plain data, made by a compiler of
//! models.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tilewright_ir::{DType, Part};

use crate::host::HostCall;

/// Dimension of which each run of a model says a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenDimension {
    /// Name, as the model has it.
    pub name: String,
    /// Smallest size.
    pub least: i64,
    /// Largest size; memory is there for it.
    pub most: i64,
    /// Distance of neighbouring sizes.
    pub step: i64,
}

impl OpenDimension {
    /// Sizes that stand for all: both ends, and between them some in about equal ratios; `n` at most, which
    /// is two or more.
    pub fn spread(&self, n: usize) -> Vec<i64> {
        // None is as few as one.
        let first = self.least.max(1) as f64;
        let ratio = self.most as f64 / first;
        let value = |i: usize| {
            let wanted = if i == 0 { self.least as f64 } else { first * ratio.powf(i as f64 / (n - 1) as f64) };
            let steps = (wanted - self.least as f64) / self.step as f64;
            self.least + steps.round() as i64 * self.step
        };
        let mut values: Vec<i64> = (0..n).map(value).collect();
        values.dedup();
        values
    }

    /// Whether a size is one of the dimension's.
    pub fn has(&self, size: i64) -> bool {
        (self.least..=self.most).contains(&size) && (size - self.least) % self.step == 0
    }
}

/// Number that depends on a model's open dimension: `factor · size + term`, rounded up to a multiple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunSize {
    /// Multiple of the dimension's size.
    pub factor: i64,
    /// Addend.
    pub term: i64,
    /// Multiples of this alone are taken; 1 for any number.
    pub multiple: i64,
}

impl RunSize {
    /// The number at a size of the dimension.
    pub fn at(&self, size: i64) -> i64 {
        let exact = self.factor * size + self.term;
        (exact + self.multiple - 1).div_euclid(self.multiple) * self.multiple
    }
}

/// A tensor of a run, or another view of the memory of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanTensor {
    /// Name for people; for inputs and outputs that of the interface.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Dimensions as they lie in memory, the last one contiguous.
    pub shape: Vec<usize>,
    /// Memory of the tensor.
    pub place: Place,
    /// Dimension that is as long as each run says, at most as in the shape: its first one longer than 1. A
    /// run uses the beginning of the memory.
    pub open: Option<(usize, RunSize)>,
    /// Whether an input or output has this for each item of a run, one behind the other: the first dimension,
    /// here 1, is as long as there are items.
    pub in_items: bool,
}

impl PlanTensor {
    /// Size in bytes.
    pub fn n_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes() as usize
    }

    /// Dimensions in a run at a size of the model's open dimension.
    pub fn shape_at(&self, size: i64) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some((axis, open)) = self.open {
            shape[axis] = open.at(size) as usize;
        }
        shape
    }

    /// Bytes in a run at a size of the model's open dimension. Allocates nothing.
    pub fn n_bytes_at(&self, size: i64) -> usize {
        match self.open {
            Some((axis, open)) if self.shape[axis] > 0 => self.n_bytes() / self.shape[axis] * open.at(size) as usize,
            _ => self.n_bytes(),
        }
    }

    /// Dimensions of a run of so many items, at a size of the model's open dimension.
    pub fn shape_of(&self, size: i64, n_items: i64) -> Vec<usize> {
        let mut shape = self.shape_at(size);
        if self.in_items {
            shape[0] = n_items as usize;
        }
        shape
    }

    /// Bytes of a run of so many items, at a size of the model's open dimension. Allocates nothing.
    pub fn n_bytes_of(&self, size: i64, n_items: i64) -> usize {
        self.n_bytes_at(size) * if self.in_items { n_items as usize } else { 1 }
    }
}

/// Memory of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The caller's input of this number.
    Input(usize),
    /// The caller's output of this number.
    Output(usize),
    /// The arena, at this offset; see [`crate::plan_memory`].
    Arena(usize),
    /// The constant of this index in [`Plan::constants`].
    Constant(usize),
    /// The state of this number, which stays between runs of a context.
    State(usize),
}

/// Constant of all runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constant {
    /// Given data.
    Data(Bytes),
    /// Data that the `prepare` part of a kernel makes once, of this size in bytes.
    Prepared(usize),
    /// Given data that was dropped once it had served, of this size in bytes.
    Forgotten(usize),
}

impl Constant {
    /// Size in bytes.
    pub fn n_bytes(&self) -> usize {
        match self {
            Constant::Data(data) => data.len(),
            Constant::Prepared(n_bytes) | Constant::Forgotten(n_bytes) => *n_bytes,
        }
    }
}

/// Bytes of a tensor next to each other: all of it, or a part that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorSlice {
    /// The tensor, an index into [`Plan::tensors`].
    pub tensor: usize,
    /// Offset in the tensor, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub n_bytes: usize,
}

/// Function of an operator without a kernel: computes outputs from inputs, whose sizes are those of the
/// step's slices.
pub type HostFunction = dyn Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<(), String> + Send + Sync;

/// Function that a step without a kernel calls.
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

/// Work of a step.
#[derive(Clone)]
pub enum Work {
    /// Runs a kernel.
    Kernel {
        /// The kernel: an index into the table beside the plan.
        kernel: usize,
        /// Arguments, in the kernel's order.
        arguments: Vec<TensorSlice>,
        /// Kept buffers, in the kernel's order: constants to be prepared, or memory that other steps share.
        kept: Vec<TensorSlice>,
        /// The parts that each run carries out, as a rule the body alone.
        parts: Vec<Part>,
        /// Whether its parallel loops run on all threads, or on the caller's alone.
        all_threads: bool,
        /// The kernel's open sizes, in its order.
        sizes: Vec<RunSize>,
    },
    /// Copies.
    Copy {
        /// Source.
        from: TensorSlice,
        /// Destination, of the same size.
        to: TensorSlice,
        /// Number of rows, where that depends on the run, and bytes of a row: so much of the beginning is
        /// copied.
        rows: Option<(RunSize, usize)>,
    },
    /// Copies rows of a tensor to rows of another one that lie in other distances.
    Move {
        /// Tensor that has the rows.
        from: TensorSlice,
        /// Tensor that gets them.
        to: TensorSlice,
        /// Rows, in both.
        rows: CopiedRows,
    },
    /// Calls a host function.
    Host {
        /// Slices that the function reads.
        inputs: Vec<TensorSlice>,
        /// Slices that the function writes.
        outputs: Vec<TensorSlice>,
        /// The function.
        run: Host,
    },
    /// Begins a loop: the steps behind it repeat up to its end, where that jumps back.
    While {
        /// Truth of one byte without which a run goes on behind the end.
        truth: TensorSlice,
        /// Index of the step that ends it.
        end: usize,
    },
    /// Ends a loop.
    Again {
        /// Index of the step that begins it.
        to: usize,
    },
}

/// Rows that are copied; what a run says of them is in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedRows {
    /// Number of rows.
    pub n: usize,
    /// Bytes from one row to the next, in the source and in the destination.
    pub pitches: [usize; 2],
    /// Bytes ahead of the first row, in the source and in the destination.
    pub offsets: [RunSize; 2],
    /// Bytes of a row.
    pub n_bytes: RunSize,
}

impl CopiedRows {
    /// End of what is copied at a size of the dimension, in the source and in the destination; none where
    /// that is no place.
    fn ends(&self, size: i64) -> Option<[usize; 2]> {
        let n_bytes = usize::try_from(self.n_bytes.at(size)).ok()?;
        let end = |at: usize| {
            let last = self.pitches[at].checked_mul(self.n.saturating_sub(1))?;
            usize::try_from(self.offsets[at].at(size)).ok()?.checked_add(last)?.checked_add(n_bytes)
        };
        (self.n == 1 || self.pitches.iter().all(|pitch| *pitch >= n_bytes)).then_some(())?;
        Some([end(0)?, end(1)?])
    }

    /// Whether all rows are within so many bytes, at any size of a dimension.
    pub(crate) fn are_within(&self, n_bytes: [usize; 2], dim: Option<&OpenDimension>) -> bool {
        // Sizes depend on the dimension linearly.
        dim.map_or([0, 0], |dim| [dim.least, dim.most]).iter().all(|size| {
            self.ends(*size).is_some_and(|ends| ends.iter().zip(n_bytes).all(|(end, n_bytes)| *end <= n_bytes))
        })
    }
}

/// Step of a run.
#[derive(Clone)]
pub struct PlanStep {
    /// Name for people.
    pub name: String,
    /// Work of the step.
    pub work: Work,
    /// Condition without which nobody needs what it does, an index into [`Plan::guards`].
    pub guard: Option<usize>,
}

/// Condition of steps that are left out of a run where it does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepCondition {
    /// Truth of one byte, which an earlier step of the run may compute.
    pub truth: TensorSlice,
    /// Value that the truth has to have.
    pub holds: bool,
    /// Another guard that has to hold too, an index that is smaller than this one's.
    pub outer: Option<usize>,
}

/// Steps that add a number of rows to the states: a run of more is one such piece after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of rows.
    pub n: i64,
    /// Largest size of the open dimension from which it goes on.
    pub most: i64,
    /// Steps of the plan.
    pub steps: Range<usize>,
}

/// Steps of a model at one size of each of its dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Size of each dimension.
    pub sizes: Vec<i64>,
    /// Steps of the plan.
    pub steps: Range<usize>,
    /// Tensors of the inputs and, behind them, of the outputs.
    pub ports: Vec<usize>,
}

/// Dimensions of a model with steps for each combination of their sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// The dimensions.
    pub dims: Vec<OpenDimension>,
    /// A member for each combination of sizes, the one of the largest first.
    pub each: Vec<Member>,
}

impl Members {
    /// Index of the member of these sizes.
    pub fn at(&self, sizes: impl Fn(usize) -> i64) -> Option<usize> {
        self.each.iter().position(|member| member.sizes.iter().enumerate().all(|(dim, size)| *size == sizes(dim)))
    }
}

/// Plan of a run, without the kernels.
#[derive(Clone, Default)]
pub struct Plan {
    /// The tensors. The first one of each input and output says its name, type and shape.
    pub tensors: Vec<PlanTensor>,
    /// Constants of all runs.
    pub constants: Vec<Constant>,
    /// Steps, in the order in which they run.
    pub steps: Vec<PlanStep>,
    /// Conditions of steps.
    pub guards: Vec<StepCondition>,
    /// Dimension of which runs say a size, if any.
    pub dim: Option<OpenDimension>,
    /// Size by which a run makes the dimension longer: that of what its states have; 0 where there are none.
    /// Of several pieces, the smallest's.
    pub appends: i64,
    /// Number of rows of which a run is made, where each says it. Inputs and outputs are as long as that, and
    /// not as the dimension.
    pub rows: Option<OpenDimension>,
    /// Items of which runs have as many as each says, such as those of a batch: all steps run for one after
    /// the other.
    pub items: Option<OpenDimension>,
    /// Pieces of which runs are made, the largest first, all of them multiples of the smallest; empty where
    /// each run has all steps.
    pub pieces: Vec<Piece>,
    /// Members of which each run carries out one, where each size has steps of its own. Tensors of inputs and
    /// outputs are those of the largest sizes.
    pub members: Option<Members>,
}

impl Plan {
    /// Adds a tensor and says its number.
    pub fn tensor(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize], place: Place) -> usize {
        self.tensors.push(PlanTensor {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            place,
            open: None,
            in_items: false,
        });
        self.tensors.len() - 1
    }

    /// The piece that a run of so many rows begins with: none where it has all steps.
    pub fn piece(&self, n: i64) -> Option<&Piece> {
        self.pieces.iter().find(|piece| piece.n <= n)
    }

    /// Largest length of the states' dimension, at capacity.
    pub fn capacity(&self) -> i64 {
        self.dim.as_ref().map_or(0, |dim| dim.most) + self.appends
    }

    /// The open dimension as the steps from an index on have it.
    pub fn dim_of(&self, step: usize) -> Option<OpenDimension> {
        let dim = self.dim.clone()?;
        let piece = self.pieces.iter().find(|piece| piece.steps.contains(&step));
        Some(OpenDimension { most: piece.map_or(dim.most, |piece| piece.most), ..dim })
    }

    /// All of a tensor.
    pub fn whole(&self, tensor: usize) -> TensorSlice {
        TensorSlice { tensor, offset: 0, n_bytes: self.tensors[tensor].n_bytes() }
    }

    /// Tensors of the inputs or of the outputs, in order; `place` makes the place of each number.
    pub fn ports(&self, place: fn(usize) -> Place) -> Vec<usize> {
        (0..).map_while(|at| self.tensors.iter().position(|tensor| tensor.place == place(at))).collect()
    }

    /// Tensors of the states, in order.
    pub fn states(&self) -> impl Iterator<Item = &PlanTensor> {
        let of = |at: usize| self.tensors.iter().find(|tensor| tensor.place == Place::State(at));
        (0..).map_while(of)
    }

    /// Size of the arena.
    pub fn arena_bytes(&self) -> usize {
        let ends = self.tensors.iter().filter_map(|tensor| match tensor.place {
            Place::Arena(offset) => Some(offset + tensor.n_bytes()),
            Place::Input(_) | Place::Output(_) | Place::Constant(_) | Place::State(_) => None,
        });
        ends.max().unwrap_or(0)
    }
}

impl fmt::Debug for PlanStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match &self.work {
            Work::Kernel { kernel, .. } => format!("kernel {kernel}"),
            Work::Copy { .. } | Work::Move { .. } => "copy".to_owned(),
            Work::Host { .. } => "host".to_owned(),
            Work::While { end, .. } => format!("while, up to {end}"),
            Work::Again { to } => format!("again from {to}"),
        };
        write!(f, "{} ({what})", self.name)
    }
}
