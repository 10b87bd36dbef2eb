//! Plan of a model's run: tensors, their memory, and steps in order; plain data, made by the model compiler.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tilewright_ir::{DType, Part};

use crate::host::HostCall;

/// Open (dynamic) dimension, whose size each run gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenDimension {
    /// Name in the model.
    pub name: String,
    /// Smallest size.
    pub least: i64,
    /// Largest size, for which memory is allocated.
    pub most: i64,
    /// Step between neighbouring sizes.
    pub step: i64,
}

impl OpenDimension {
    /// Representative sizes: both ends, and some between them in about equal ratios; at most `n`, which must
    /// be at least 2.
    pub fn spread(&self, n: usize) -> Vec<i64> {
        // A size of 0 is treated as 1.
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

    /// Whether a size is in the range.
    pub fn has(&self, size: i64) -> bool {
        (self.least..=self.most).contains(&size) && (size - self.least) % self.step == 0
    }
}

/// Sizes of a plan's open dimensions in a run, [`Plan::dim`] and [`Plan::second`]; 0 for a missing one.
pub type Sizes = [i64; 2];

/// Number that depends on an open dimension: `(factor · size + term) / divisor`, rounded up to a multiple of
/// `multiple`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RunSize {
    /// Dimension: its index in [`Sizes`].
    pub dim: usize,
    /// Multiple of the dimension's size.
    pub factor: i64,
    /// Addend.
    pub term: i64,
    /// Divisor of the sum, without a remainder at all sizes of the dimension; 1 for none.
    pub divisor: i64,
    /// Multiple to round up to; 1 for none.
    pub multiple: i64,
}

impl RunSize {
    /// Number that is the same in all runs.
    pub const fn constant(term: i64) -> RunSize {
        RunSize { dim: 0, factor: 0, term, divisor: 1, multiple: 1 }
    }

    /// Number with factor and term times `by`, such as the bytes of so many rows.
    pub const fn scaled(self, by: i64) -> RunSize {
        RunSize { factor: self.factor * by, term: self.term * by, ..self }
    }

    /// Number in a run.
    pub fn of(&self, sizes: Sizes) -> i64 {
        self.at(sizes[self.dim])
    }

    /// Number at a size of the dimension.
    pub fn at(&self, size: i64) -> i64 {
        let exact = (self.factor * size + self.term).div_euclid(self.divisor);
        (exact + self.multiple - 1).div_euclid(self.multiple) * self.multiple
    }
}

/// Tensor of a run, or another view of a tensor's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanTensor {
    /// Name for display; for inputs and outputs, the name in the interface.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Dimensions in memory, row-major.
    pub shape: Vec<usize>,
    /// Memory of the tensor.
    pub place: Place,
    /// Open dimension: its index and its size in a run, at most as in the shape. A run uses only the
    /// beginning of the memory; callers pass inputs and outputs packed.
    pub open: Option<(usize, RunSize)>,
    /// Start of a part of a packed input, in bytes from that of the caller's tensor, if a run determines it.
    pub start: Option<RunSize>,
    /// Whether the first dimension of an input or output counts the items of a run: here 1, or the most if
    /// pieces process all items at once.
    pub in_items: bool,
    /// Number of elements that an input's numbers select among: they are indices, from `-n` to `n - 1`.
    pub selects_among: Option<i64>,
}

impl PlanTensor {
    /// First of the numbers in `bytes` that is an index out of range.
    pub fn out_of_range(&self, bytes: &[u8]) -> Option<i64> {
        let n = self.selects_among?;
        let is_outside = |index: &i64| !(-n..n).contains(index);
        match self.dtype {
            DType::I32 => {
                let numbers = bytes.as_chunks().0.iter().map(|index| i32::from_le_bytes(*index).into());
                numbers.into_iter().find(is_outside)
            }
            DType::I64 => bytes.as_chunks().0.iter().map(|index| i64::from_le_bytes(*index)).find(is_outside),
            _ => None,
        }
    }

    /// Size in bytes.
    pub fn n_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes() as usize
    }

    /// Shape in a run at sizes of the model's open dimensions.
    pub fn shape_at(&self, sizes: Sizes) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some((axis, open)) = self.open {
            shape[axis] = open.of(sizes) as usize;
        }
        shape
    }

    /// Bytes in a run at sizes of the model's open dimensions. Allocates nothing.
    pub fn n_bytes_at(&self, sizes: Sizes) -> usize {
        match self.open {
            Some((axis, open)) if self.shape[axis] > 0 => self.n_bytes() / self.shape[axis] * open.of(sizes) as usize,
            _ => self.n_bytes(),
        }
    }

    /// Shape in a run of `n_items` items, at sizes of the model's open dimensions.
    pub fn shape_of(&self, sizes: Sizes, n_items: i64) -> Vec<usize> {
        let mut shape = self.shape_at(sizes);
        if self.in_items {
            shape[0] = n_items as usize;
        }
        shape
    }

    /// Bytes in a run of `n_items` items, at sizes of the model's open dimensions. Allocates nothing.
    pub fn n_bytes_of(&self, sizes: Sizes, n_items: i64) -> usize {
        match self.in_items {
            true => self.n_bytes_at(sizes) / self.shape[0].max(1) * n_items as usize,
            false => self.n_bytes_at(sizes),
        }
    }

    /// Whether its open dimension is [`Plan::dim`], or [`Plan::rows`] in its place.
    pub fn has_rows(&self) -> bool {
        self.open.is_some_and(|(_, open)| open.dim == 0)
    }

    /// Number of places at which rows along the open dimension begin: the elements of the dimensions before
    /// it.
    pub fn n_outer(&self) -> usize {
        self.open.map_or(1, |(axis, _)| self.shape[..axis].iter().product())
    }
}

/// Memory of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Caller's input with this index.
    Input(usize),
    /// Caller's output with this index.
    Output(usize),
    /// Arena, at this offset in bytes; see [`crate::plan_memory`].
    Arena(usize),
    /// Constant with this index in [`Plan::constants`].
    Constant(usize),
    /// State with this index, which persists between runs of a context.
    State(usize),
}

/// Constant of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constant {
    /// Given data.
    Data(Bytes),
    /// Buffer of this many bytes that the `prepare` part of a kernel fills once.
    Prepared(usize),
    /// Data of this many bytes that was released after use.
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

/// Contiguous part of a tensor, or all of it, that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorSlice {
    /// Index of the tensor in [`Plan::tensors`].
    pub tensor: usize,
    /// Offset in the tensor, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub n_bytes: usize,
}

/// Function for an operator without a kernel: computes outputs from inputs, whose sizes are those of the
/// step's slices.
pub type HostFunction = dyn Fn(&[&[u8]], &mut [&mut [u8]]) -> Result<(), String> + Send + Sync;

/// Implementation of a step without a kernel.
#[derive(Clone)]
pub enum Host {
    /// C function, which libraries contain.
    Call(HostCall),
    /// Function of this process; a plan with such a step cannot be shipped.
    Function(Arc<HostFunction>),
}

impl Host {
    /// Scratch memory in bytes.
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
    /// Kernel call.
    Kernel {
        /// Index of the kernel in the table beside the plan.
        kernel: usize,
        /// Arguments, in the kernel's order.
        arguments: Vec<TensorSlice>,
        /// Kept buffers, in the kernel's order: prepared constants, or memory shared with other steps.
        kept: Vec<TensorSlice>,
        /// Parts of the kernel to execute in each run, usually the body alone.
        parts: Vec<Part>,
        /// Whether its parallel loops use all threads, rather than the caller's only.
        all_threads: bool,
        /// Values of the kernel's open sizes, in its order.
        sizes: Vec<RunSize>,
    },
    /// Copy of a slice.
    Copy {
        /// Source.
        from: TensorSlice,
        /// Destination, of the same size.
        to: TensorSlice,
        /// Number of rows, if it depends on the run, and bytes per row: only that much from the beginning is
        /// copied.
        rows: Option<(RunSize, usize)>,
    },
    /// Copy of rows between tensors with different strides.
    Move {
        /// Source tensor.
        from: TensorSlice,
        /// Destination tensor.
        to: TensorSlice,
        /// Geometry of the rows in both.
        rows: CopiedRows,
    },
    /// Call of a host function.
    Host {
        /// Slices that the function reads.
        inputs: Vec<TensorSlice>,
        /// Slices that the function writes.
        outputs: Vec<TensorSlice>,
        /// Function to call.
        run: Host,
    },
    /// Start of a loop: the following steps up to the end repeat while the condition holds.
    While {
        /// Condition: a boolean of one byte.
        truth: TensorSlice,
        /// Index of the step that ends the loop.
        end: usize,
    },
    /// End of a loop.
    Again {
        /// Index of the step that starts the loop.
        to: usize,
    },
}

/// Geometry of copied rows; sizes that depend on the run are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopiedRows {
    /// Number of rows.
    pub n: usize,
    /// Row strides in bytes, of the source and of the destination.
    pub pitches: [usize; 2],
    /// Offset of the first row in bytes, in the source and in the destination.
    pub offsets: [RunSize; 2],
    /// Bytes per row.
    pub n_bytes: RunSize,
}

impl CopiedRows {
    /// End of the copied rows at sizes of the dimensions, in the source and in the destination; `None` if it
    /// is not a valid offset.
    fn ends(&self, sizes: Sizes) -> Option<[usize; 2]> {
        let n_bytes = usize::try_from(self.n_bytes.of(sizes)).ok()?;
        let end = |at: usize| {
            let last = self.pitches[at].checked_mul(self.n.saturating_sub(1))?;
            usize::try_from(self.offsets[at].of(sizes)).ok()?.checked_add(last)?.checked_add(n_bytes)
        };
        (self.n == 1 || self.pitches.iter().all(|pitch| *pitch >= n_bytes)).then_some(())?;
        Some([end(0)?, end(1)?])
    }

    /// Whether all rows are within `n_bytes` of source and destination, at any sizes of the dimensions.
    pub(crate) fn are_within(&self, n_bytes: [usize; 2], dims: &[Option<OpenDimension>; 2]) -> bool {
        // Sizes are affine in a dimension, so its ends suffice.
        let [first, second] = dims.each_ref().map(|dim| dim.as_ref().map_or([0, 0], |dim| [dim.least, dim.most]));
        let mut corners = first.into_iter().flat_map(|first| second.map(|second| [first, second]));
        corners.all(|sizes| {
            self.ends(sizes).is_some_and(|ends| ends.iter().zip(n_bytes).all(|(end, n_bytes)| *end <= n_bytes))
        })
    }
}

/// Step of a run.
#[derive(Clone)]
pub struct PlanStep {
    /// Name for display.
    pub name: String,
    /// Work of the step.
    pub work: Work,
    /// Index in [`Plan::guards`] of the condition under which the step is executed; `None` for always.
    pub guard: Option<usize>,
}

/// Guard: a condition under which steps are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepCondition {
    /// Boolean of one byte, which an earlier step of the run may compute.
    pub truth: TensorSlice,
    /// Required value.
    pub holds: bool,
    /// Index of an enclosing guard, which must hold too; it is smaller than this one's.
    pub outer: Option<usize>,
}

/// Piece: steps that process a fixed number of rows, such as a chunk of a prompt, of each of a fixed number
/// of items. A run of more rows consists of several pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of items; 1 if it is not open.
    pub items: i64,
    /// Number of rows of an item.
    pub n: i64,
    /// Largest size of the open dimension at which it can start.
    pub most: i64,
    /// Range of the plan's steps.
    pub steps: Range<usize>,
}

/// Steps of a model at one size of each of its dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Size of each dimension.
    pub sizes: Vec<i64>,
    /// Steps of the plan.
    pub steps: Range<usize>,
    /// Tensors of the inputs, followed by those of the outputs.
    pub ports: Vec<usize>,
}

/// Dimensions of a model with steps for each combination of their sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// The dimensions.
    pub dims: Vec<OpenDimension>,
    /// Members in descending order of their sizes: one for each combination, unless the plan supports only
    /// some.
    pub each: Vec<Member>,
}

impl Members {
    /// Index of the dimension of which steps support any size: members that differ only in it share their
    /// steps.
    pub fn opened(&self, plan: &Plan) -> Option<usize> {
        self.dims.iter().position(|dim| Some(dim) == plan.dim.as_ref())
    }

    /// Index of the member with these sizes.
    pub fn at(&self, sizes: impl Fn(usize) -> i64) -> Option<usize> {
        let of = |member: &Member| {
            let own = member.sizes.iter().enumerate().map(|(dim, size)| sizes(dim).cmp(size));
            own.fold(Ordering::Equal, Ordering::then)
        };
        self.each.binary_search_by(of).ok()
    }

    /// Whether each combination of sizes has a member.
    pub fn are_whole(&self) -> bool {
        let n_sizes = |dim: &OpenDimension| ((dim.most - dim.least) / dim.step + 1) as usize;
        self.dims.iter().map(n_sizes).product::<usize>() == self.each.len()
    }
}

/// Steps that process several items of a run at once, such as products with weights, which are then read once
/// for all items. The other steps run for one item after the other.
///
/// A group has as many items as together have no more rows than the largest item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// Maximum number of items of a group.
    pub most: i64,
    /// Whether each step processes all items of a group: a kernel whose sizes are multiples of the run's.
    pub steps: Vec<bool>,
    /// Tensors with contiguous places for the items of a group, each with the bytes of an item at a size of
    /// the open dimension.
    pub tensors: Vec<(usize, RunSize)>,
}

impl Together {
    /// Number of items in a group at a size of the open dimension.
    pub fn n_items(&self, dim: &OpenDimension, size: i64) -> i64 {
        (dim.most / size.max(1)).clamp(1, self.most)
    }

    /// Ranges of steps that run for a whole group or for one item after the other, in order.
    pub fn turns(&self) -> impl Iterator<Item = (Range<usize>, bool)> {
        let mut first = 0;
        self.steps.chunk_by(|a, b| a == b).map(move |turn| {
            let steps = first..first + turn.len();
            first = steps.end;
            (steps, turn[0])
        })
    }
}

/// Plan of a run, without the kernels.
#[derive(Clone, Default)]
pub struct Plan {
    /// Tensors. The first one of each input and output defines its name, type and shape.
    pub tensors: Vec<PlanTensor>,
    /// Constants of all runs.
    pub constants: Vec<Constant>,
    /// Steps, in the order in which they run.
    pub steps: Vec<PlanStep>,
    /// Guards of steps.
    pub guards: Vec<StepCondition>,
    /// Open (dynamic) dimension, if any.
    pub dim: Option<OpenDimension>,
    /// Second open dimension, if any: a length of inputs beside a past, such as that of an encoder's states.
    pub second: Option<OpenDimension>,
    /// Number of elements by which a run extends the states along the open dimension; 0 without states. With
    /// several pieces, the number of the smallest.
    pub appends: i64,
    /// Open number of rows (such as new tokens) of a run, if any. Inputs and outputs then have this length,
    /// rather than the dimension's.
    pub rows: Option<OpenDimension>,
    /// Open number of independent items of a run, such as a batch, if any: all steps run for one item after
    /// the other, unless pieces process all items at once.
    pub items: Option<OpenDimension>,
    /// Steps that process several items at once, if any.
    pub together: Option<Together>,
    /// Pieces that runs consist of, those of the most items and then of the most rows first, all rows
    /// multiples of the smallest; empty if each run executes all steps.
    pub pieces: Vec<Piece>,
    /// Members, one of which each run executes, if each size has steps of its own. Tensors of inputs and
    /// outputs are those of the largest sizes.
    pub members: Option<Members>,
}

impl Plan {
    /// Adds a tensor, and returns its index.
    pub fn tensor(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize], place: Place) -> usize {
        self.tensors.push(PlanTensor {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            place,
            open: None,
            start: None,
            in_items: false,
            selects_among: None,
        });
        self.tensors.len() - 1
    }

    /// Piece that a run of `n` rows of each of `items` items starts with; `None` if it executes all steps.
    pub fn piece(&self, items: i64, n: i64) -> Option<&Piece> {
        self.pieces.iter().find(|piece| piece.items == items && piece.n <= n)
    }

    /// Item whose rows a slice of an input or output begins in, and the offset from the first of them. Items
    /// are those of a piece that has its rows behind another dimension; otherwise there is one.
    pub fn item_of(&self, slice: &TensorSlice) -> (usize, usize) {
        let own = &self.tensors[slice.tensor];
        let port = self.tensors.iter().find(|tensor| tensor.place == own.place);
        match port.filter(|port| port.has_rows() && !self.pieces.is_empty()).and_then(|port| port.open) {
            Some((axis, _)) => {
                let n_bytes = own.n_bytes() / own.shape[..axis].iter().product::<usize>().max(1);
                (slice.offset / n_bytes.max(1), slice.offset % n_bytes.max(1))
            }
            None => (0, slice.offset),
        }
    }

    /// Capacity of the states: the largest length of their open dimension.
    pub fn capacity(&self) -> i64 {
        self.dim.as_ref().map_or(0, |dim| dim.most) + self.appends
    }

    /// Open dimensions as they apply to a step.
    pub fn dims_of(&self, step: usize) -> [Option<OpenDimension>; 2] {
        let piece = self.pieces.iter().find(|piece| piece.steps.contains(&step));
        let own = |dim: OpenDimension| OpenDimension { most: piece.map_or(dim.most, |piece| piece.most), ..dim };
        [self.dim.clone().map(own), self.second.clone()]
    }

    /// Slice of a whole tensor.
    pub fn whole(&self, tensor: usize) -> TensorSlice {
        TensorSlice { tensor, offset: 0, n_bytes: self.tensors[tensor].n_bytes() }
    }

    /// Tensors of the inputs or outputs, in order; `place` is the constructor of their place.
    pub fn ports(&self, place: fn(usize) -> Place) -> Vec<usize> {
        (0..).map_while(|at| self.tensors.iter().position(|tensor| tensor.place == place(at))).collect()
    }

    /// Tensors of the states, in order.
    pub fn states(&self) -> impl Iterator<Item = &PlanTensor> {
        let of = |at: usize| self.tensors.iter().find(|tensor| tensor.place == Place::State(at));
        (0..).map_while(of)
    }

    /// Size of the arena in bytes.
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
