//! Execution of models.

use std::io;
use std::ops::Range;
use std::slice;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;
use tilewright_codegen::{ARGUMENT_ALIGN, Runtime};

use crate::memory::Aligned;
use crate::model::{BaseMemory, Model, Port};
use crate::plan::{
    CopiedRows, Host, Member, OpenDimension, Plan, RunSize, Sizes, StepCondition, TensorSlice, Together, Work,
};
use crate::pool::SharedPool;

/// Reason why a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RunError {
    /// Wrong number of inputs or outputs.
    #[error("the model has {expected} {what}, {given} were passed")]
    Count {
        /// Kind: inputs or outputs.
        what: &'static str,
        /// Number of the model's tensors.
        expected: usize,
        /// Number of tensors passed.
        given: usize,
    },
    /// Wrong size of an input or output.
    #[error("`{tensor}` has {expected} bytes, {given} were passed")]
    Size {
        /// Name of the tensor.
        tensor: String,
        /// Size of the tensor in bytes.
        expected: usize,
        /// Size that was passed, in bytes.
        given: usize,
    },
    /// Insufficient alignment of an input or output.
    #[error("`{tensor}` is to be aligned to {align} bytes")]
    Unaligned {
        /// Name of the tensor.
        tensor: String,
        /// Required alignment in bytes.
        align: usize,
    },
    /// Index among the numbers of an input that leads out of a table.
    #[error("`{tensor}` has the index {index}, and it selects among {n} (give {} to {})", -n, n - 1)]
    Index {
        /// Name of the tensor.
        tensor: String,
        /// Index out of range.
        index: i64,
        /// Number of rows of the table.
        n: i64,
    },
    /// Unknown open (dynamic) dimension.
    #[error("the model has no open dimension `{name}`{}", open.as_ref().map_or(String::new(), |dim| format!(" (there is {dim})")))]
    NoDim {
        /// Name that was given.
        name: String,
        /// Name of the model's open dimension, if it has one.
        open: Option<String>,
    },
    /// Size outside the range of the open dimension.
    #[error("{name}={size} is not a size of the model ({least}..{most} in steps of {step})")]
    BadSize {
        /// Name of the dimension.
        name: String,
        /// Size that was given.
        size: i64,
        /// Smallest size.
        least: i64,
        /// Largest size.
        most: i64,
        /// Step between neighbouring sizes.
        step: i64,
    },
    /// Full state: a run would exceed the capacity of the open dimension.
    #[error("{name}={size} is all that states have room for (rewind, or compile for more)")]
    Full {
        /// Name of the dimension.
        name: String,
        /// Capacity of the dimension.
        size: i64,
    },
    /// Unknown state, or memory too small for it.
    #[error("state {state} cannot be in {n_bytes} bytes (there are {n_states} states, which say their sizes)")]
    State {
        /// Index of the state.
        state: usize,
        /// Size of the memory in bytes.
        n_bytes: usize,
        /// Number of states.
        n_states: usize,
    },
    /// Failed step in a function of this process.
    #[error("step `{step}`: {why}")]
    Host {
        /// The step.
        step: String,
        /// Reason given by the function.
        why: String,
    },
}

/// Maximum number of iterations of all loops of a run: an infinite loop fails the run.
const MOST_ITERATIONS: u64 = 1 << 24;

/// Address in a step's list that depends on the tensors passed to a run, or on the current item.
struct Passed {
    at: usize,
    base: BaseMemory,
    /// Item of a piece that has its rows behind another dimension.
    item: usize,
    offset: usize,
    /// Bytes of an item of a group, if the arena has a place for each.
    pitch: Option<RunSize>,
    /// Start of a part of a packed input.
    start: Option<RunSize>,
}

/// Steps that run for a group of items at once, or for each item.
struct Turn {
    steps: Range<usize>,
    is_together: bool,
    /// Range of the steps' addresses in the list of passed ones.
    passed: Range<usize>,
}

/// Execution context of a model: memory of its own, and a thread pool that it may share.
pub struct Context {
    model: Arc<Model>,
    threads: SharedPool,
    arena: Aligned,
    scratch: Aligned,
    /// Addresses of all slices, step by step.
    pointers: Vec<*mut u8>,
    passed: Vec<Passed>,
    /// Turns of a run whose items are processed in groups; empty otherwise.
    turns: Arc<[Turn]>,
    /// Index in `pointers` of the first guard's boolean; these are last.
    first_truth: usize,
    /// Memory of each state.
    states: Vec<Aligned>,
    /// Addresses of the states: index in `pointers`, state, and offset in the state in bytes.
    of_states: Vec<(usize, usize, usize)>,
    /// Size of the model's open dimension in the next run; 0 without one.
    size: i64,
    /// Size of its second open dimension; 0 without one.
    second: i64,
    /// Number of rows of the next run.
    n_rows: i64,
    /// Number of items of the next run, if it is open; else 1.
    n_items: i64,
    /// Index of the member that the next run executes, if the plan has members.
    member: usize,
    /// Steps of the next run, or of its current piece.
    steps: Range<usize>,
    /// Open sizes of the kernels in the next run, step by step.
    sizes: Vec<i64>,
    /// Start of each step's addresses and sizes.
    starts: Vec<[usize; 2]>,
    /// Reused list of arguments for functions of this process; empty between calls.
    reads: Vec<&'static [u8]>,
    writes: Vec<&'static mut [u8]>,
}

// SAFETY: its pointers lead to memory that it owns, to the model's constants, which are never written, and,
// during a run, to the caller's tensors.
unsafe impl Send for Context {}

impl Context {
    /// Allocates the memory to run a model.
    ///
    /// # Errors
    /// If memory or threads do not suffice.
    pub fn new(model: &Arc<Model>, threads: &SharedPool) -> io::Result<Context> {
        Context::for_loops_of(model, threads, threads.n_threads())
    }

    /// Allocates the memory to run a model on `n_threads` threads of the caller ([`Context::run_on`]).
    ///
    /// # Errors
    /// If memory or threads do not suffice.
    pub fn for_others(model: &Arc<Model>, n_threads: usize) -> io::Result<Context> {
        Context::for_loops_of(model, &SharedPool::new(1)?, n_threads)
    }

    fn for_loops_of(model: &Arc<Model>, threads: &SharedPool, n_threads: usize) -> io::Result<Context> {
        let arena = Aligned::new(model.plan().arena_bytes() as u64)?;
        let scratch = Aligned::new(model.scratch_bytes(n_threads))?;
        let (mut pointers, mut passed) = (Vec::new(), Vec::new());
        let (mut most_reads, mut most_writes) = (0, 0);
        let states = model.plan().states().map(|tensor| Aligned::untouched(tensor.n_bytes() as u64));
        let states = states.collect::<io::Result<Vec<_>>>()?;
        let mut of_states = Vec::new();
        let together = model.plan().together.as_ref();
        let mut add = |slice: &TensorSlice| {
            let pointer = model.address(slice).map_or(std::ptr::null_mut(), |address| match address.base {
                BaseMemory::Arena => {
                    let pitch =
                        together.and_then(|together| together.tensors.iter().find(|(of, _)| *of == slice.tensor));
                    if let Some((_, pitch)) = pitch {
                        let (at, offset) = (pointers.len(), address.offset);
                        let base = BaseMemory::Arena;
                        passed.push(Passed { at, base, item: 0, offset, pitch: Some(*pitch), start: None });
                    }
                    // SAFETY: the model has checked that slices are within their memory.
                    unsafe { arena.pointer().add(address.offset) }
                }
                // SAFETY: as above.
                BaseMemory::Constants => unsafe { model.constants().as_ptr().cast_mut().add(address.offset) },
                BaseMemory::State(state) => {
                    of_states.push((pointers.len(), state, address.offset));
                    // SAFETY: as above.
                    unsafe { states[state].pointer().add(address.offset) }
                }
                base @ (BaseMemory::Input(_) | BaseMemory::Output(_)) => {
                    let (item, offset) = model.plan().item_of(slice);
                    let start = model.plan().tensors[slice.tensor].start;
                    passed.push(Passed { at: pointers.len(), base, item, offset, pitch: None, start });
                    std::ptr::null_mut()
                }
            });
            pointers.push(pointer);
        };
        let (mut starts, mut n_slices, mut n_sizes) = (Vec::with_capacity(model.plan().steps.len()), 0, 0);
        for step in &model.plan().steps {
            starts.push([n_slices, n_sizes]);
            n_slices += slices(&step.work).count();
            n_sizes += n_sizes_of(&step.work);
            if let Work::Host { inputs, outputs, run: Host::Function(_) } = &step.work {
                (most_reads, most_writes) = (most_reads.max(inputs.len()), most_writes.max(outputs.len()));
            }
            slices(&step.work).for_each(&mut add);
        }
        model.plan().guards.iter().for_each(|guard| add(&guard.truth));
        let first_truth = pointers.len() - model.plan().guards.len();
        let turns = turns_of(model.plan(), &starts, &passed, first_truth);
        let (reads, writes) = (Vec::with_capacity(most_reads), Vec::with_capacity(most_writes));
        let (model, threads) = (Arc::clone(model), threads.clone());
        let sizes = vec![0; n_sizes];
        let size = 0;
        let second = model.plan().second.as_ref().map_or(0, |second| second.most);
        let n_rows = model.plan().rows.as_ref().map_or(model.plan().appends, |rows| rows.least);
        let n_items = model.plan().items.as_ref().map_or(1, |items| items.most);
        let members = model.plan().members.as_ref();
        let steps = members.map_or(0..model.plan().steps.len(), |members| members.each[0].steps.clone());
        let mut context = Context {
            model,
            threads,
            arena,
            scratch,
            pointers,
            passed,
            turns,
            first_truth,
            states,
            of_states,
            size,
            second,
            n_rows,
            n_items,
            member: 0,
            steps,
            sizes,
            starts,
            reads,
            writes,
        };
        let has_states = context.model.plan().appends > 0;
        if let Some(first) = context.model.plan().dim.as_ref().map(|dim| if has_states { dim.least } else { dim.most })
        {
            context.at(first);
        }
        Ok(context)
    }

    /// Sets the size of one of the model's open dimensions for the following runs, without allocating memory.
    /// Initially it is the largest, or the smallest if states have the dimension.
    ///
    /// # Errors
    /// If the model has no such dimension, or the size is out of its range; then nothing changes.
    pub fn set_dim(&mut self, name: &str, size: i64) -> Result<(), RunError> {
        let plan = self.model.plan();
        if let Some(members) = &plan.members {
            let Some(at) = members.dims.iter().position(|dim| dim.name == name) else {
                let open = members.dims.first().map(|dim| dim.name.clone());
                return Err(RunError::NoDim { name: name.to_owned(), open });
            };
            let now = &members.each[self.member].sizes;
            let Some(member) = members.at(|dim| if dim == at { size } else { now[dim] }) else {
                let OpenDimension { name, least, most, step } = members.dims[at].clone();
                return Err(RunError::BadSize { name, size, least, most, step });
            };
            let opened = members.opened(plan).map(|dim| members.each[member].sizes[dim]);
            self.member = member;
            self.steps = members.each[member].steps.clone();
            if let Some(size) = opened {
                self.at(size);
            }
            return Ok(());
        }
        let is_it = |dim: &Option<OpenDimension>| dim.as_ref().is_some_and(|dim| dim.name == name);
        let Some(dim) =
            [&plan.dim, &plan.rows, &plan.items, &plan.second].into_iter().flatten().find(|dim| dim.name == name)
        else {
            let open = plan.dim.as_ref().map(|dim| dim.name.clone());
            return Err(RunError::NoDim { name: name.to_owned(), open });
        };
        if !dim.has(size) {
            let (name, least, most, step) = (dim.name.clone(), dim.least, dim.most, dim.step);
            return Err(RunError::BadSize { name, size, least, most, step });
        }
        let [is_dim, is_rows, is_items, is_second] = [&plan.dim, &plan.rows, &plan.items, &plan.second].map(is_it);
        if is_second {
            self.second = size;
            self.at(self.size);
        }
        if is_rows {
            self.n_rows = size;
        }
        if is_items {
            self.n_items = size;
        }
        if is_dim {
            self.at(size);
        }
        Ok(())
    }

    /// Size of the model's open dimension in the next run, if it has one.
    pub fn size(&self) -> Option<i64> {
        self.model.plan().dim.as_ref().map(|_| self.size)
    }

    /// Size of the model's second open dimension in the next run, if it has one: the largest, unless set by
    /// [`Context::set_dim`].
    pub fn second(&self) -> Option<i64> {
        self.model.plan().second.as_ref().map(|_| self.second)
    }

    /// Number of rows of the next run, if it is open: the smallest, unless set by [`Context::set_dim`].
    pub fn rows(&self) -> Option<i64> {
        self.model.plan().rows.as_ref().map(|_| self.n_rows)
    }

    /// Number of items of the next run, if it is open: the largest, unless set by [`Context::set_dim`].
    pub fn items(&self) -> Option<i64> {
        self.model.plan().items.as_ref().map(|_| self.n_items)
    }

    /// Member that the next run executes, if the model has steps for each size.
    pub fn member(&self) -> Option<&Member> {
        self.model.plan().members.as_ref().map(|members| &members.each[self.member])
    }

    /// Sizes that inputs and outputs depend on: the number of rows in place of a past.
    pub fn sizes_of_ports(&self) -> Sizes {
        [self.rows().unwrap_or(self.size), self.second]
    }

    /// Number of elements that the next run appends to states.
    pub fn appends(&self) -> i64 {
        self.rows().unwrap_or(self.model.plan().appends)
    }

    /// Current length of the states, to which runs append; 0 for a model without states.
    pub fn past(&self) -> i64 {
        if self.model.plan().appends > 0 { self.size } else { 0 }
    }

    /// Truncates states to a length, which is then the length of the past in the next run: 0 for a new
    /// sequence, or less than the current length to continue differently from there.
    ///
    /// # Errors
    /// If the model has no states, or they are shorter than `length`; then nothing changes.
    pub fn rewind(&mut self, length: i64) -> Result<(), RunError> {
        let no_dim = || RunError::NoDim { name: "past".to_owned(), open: None };
        let dim = self.model.plan().dim.as_ref().filter(|_| self.model.plan().appends > 0).ok_or_else(no_dim)?;
        if length > self.size || length < dim.least || (length - dim.least) % dim.step != 0 {
            let (name, least, most, step) = (dim.name.clone(), dim.least, self.size, dim.step);
            return Err(RunError::BadSize { name, size: length, least, most, step });
        }
        self.at(length);
        Ok(())
    }

    /// Replaces the memory of a state, for example by that of another sequence; returns the previous memory.
    ///
    /// # Errors
    /// If there is no such state, or the memory is too small; then nothing changes.
    pub fn bind_state(&mut self, state: usize, memory: Aligned) -> Result<Aligned, RunError> {
        let needed = self.model.plan().states().nth(state).map(|tensor| tensor.n_bytes());
        let (n_bytes, n_states) = (memory.bytes().len(), self.states.len());
        if needed.is_none_or(|needed| n_bytes < needed) {
            return Err(RunError::State { state, n_bytes, n_states });
        }
        for &(at, _, offset) in self.of_states.iter().filter(|(_, of, _)| *of == state) {
            // SAFETY: the model has checked that slices are within the state, and the new memory is at least
            // as large.
            self.pointers[at] = unsafe { memory.pointer().add(offset) };
        }
        Ok(std::mem::replace(&mut self.states[state], memory))
    }

    /// Memory of a state, in the layout of the largest size.
    pub fn state(&self, state: usize) -> Option<&[u8]> {
        Some(self.states.get(state)?.bytes())
    }

    /// Memory of a state, mutable, in the layout of [`Context::state`].
    pub fn state_mut(&mut self, state: usize) -> Option<&mut [u8]> {
        Some(self.states.get_mut(state)?.bytes_mut())
    }

    /// Sets the open sizes of steps for a size of the open dimension.
    fn at(&mut self, size: i64) {
        self.size = size;
        self.sizes_at(self.steps.clone(), [size, self.second]);
    }

    /// Sets the open sizes of these steps.
    fn sizes_at(&mut self, steps: Range<usize>, now: Sizes) {
        for at in steps {
            let step = &self.model.plan().steps[at];
            let own = &mut self.sizes[self.starts[at][1]..];
            match &step.work {
                Work::Kernel { sizes, .. } => own.iter_mut().zip(sizes).for_each(|(to, open)| *to = open.of(now)),
                Work::Move { rows, .. } => own.iter_mut().zip(moved(rows)).for_each(|(to, open)| *to = open.of(now)),
                Work::Host { run: Host::Call(call), .. } => {
                    own.iter_mut().zip(&call.sizes).for_each(|(to, open)| *to = open.of(now));
                }
                Work::Copy { .. } | Work::Host { .. } | Work::While { .. } | Work::Again { .. } => {}
            }
        }
    }

    /// Model of the context.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Runs the model: computes outputs from inputs, both in the model's order, row-major and packed.
    /// Allocates nothing, except in functions of this process.
    ///
    /// # Errors
    /// If the number or sizes of tensors do not match the model, an address is not aligned to its elements
    /// (to 64 bytes if a kernel requires it), or a step in this process fails.
    pub fn run(&mut self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), RunError> {
        self.pieces(&self.threads.runtime(), inputs, outputs, None)
    }

    /// Runs the model as [`Context::run`] does, with parallel loops on threads of the caller.
    ///
    /// # Errors
    /// As for [`Context::run`].
    ///
    /// # Safety
    /// The runtime executes each iteration of a loop exactly once before it returns, with thread numbers
    /// below the number of threads that the context was made for, and never runs two iterations with the same
    /// thread number at the same time.
    pub unsafe fn run_on(
        &mut self,
        runtime: &Runtime,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
    ) -> Result<(), RunError> {
        self.pieces(runtime, inputs, outputs, None)
    }

    /// Runs the model as [`Context::run`] does, and adds the nanoseconds of each step to its entry.
    ///
    /// # Errors
    /// As for [`Context::run`].
    ///
    /// # Panics
    /// If `step_ns` does not have an entry for each step.
    pub fn profile(
        &mut self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        step_ns: &mut [u64],
    ) -> Result<(), RunError> {
        assert_eq!(step_ns.len(), self.model.plan().steps.len(), "an entry for each step");
        self.pieces(&self.threads.runtime(), inputs, outputs, Some(step_ns))
    }

    /// Executes the pieces of a run one after the other; without pieces, all steps for the items.
    fn pieces(
        &mut self,
        on_all: &Runtime,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mut step_ns: Option<&mut [u64]>,
    ) -> Result<(), RunError> {
        self.check(inputs, outputs)?;
        if self.model.plan().pieces.is_empty() {
            match self.turns.is_empty() {
                true => {
                    for item in 0..self.n_items {
                        self.pass(0..self.passed.len(), [item, 0], inputs, outputs);
                        self.steps(self.steps.clone(), on_all, step_ns.as_deref_mut())?;
                    }
                }
                false => self.groups(on_all, inputs, outputs, step_ns)?,
            }
            let appends = self.model.plan().appends;
            if appends > 0 {
                self.at(self.size + appends);
            }
            return Ok(());
        }
        let (first, mut done) = (self.size, 0);
        while let Some(piece) = self.model.plan().piece(self.n_items, self.n_rows - done) {
            let (n, steps) = (piece.n, piece.steps.clone());
            self.steps = steps;
            self.at(first + done);
            self.pass(0..self.passed.len(), [done, 0], inputs, outputs);
            if let Err(error) = self.steps(self.steps.clone(), on_all, step_ns.as_deref_mut()) {
                // Discards elements that the failed run appended.
                self.size = first;
                return Err(error);
            }
            done += n;
        }
        self.size = first + done;
        Ok(())
    }

    /// Executes the steps for groups of items.
    fn groups(
        &mut self,
        on_all: &Runtime,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mut step_ns: Option<&mut [u64]>,
    ) -> Result<(), RunError> {
        let (model, turns) = (Arc::clone(&self.model), Arc::clone(&self.turns));
        let (Some(together), Some(dim)) = (&model.plan().together, &model.plan().dim) else {
            unreachable!("the model has checked that groups have rows")
        };
        let most = together.n_items(dim, self.size);
        let mut first = 0;
        while first < self.n_items {
            let n = most.min(self.n_items - first);
            for Turn { steps, is_together, passed } in turns.iter() {
                if *is_together {
                    self.sizes_at(steps.clone(), [n * self.size, self.second]);
                }
                for item in 0..if *is_together { 1 } else { n } {
                    self.pass(passed.clone(), [first + item, item], inputs, outputs);
                    self.steps(steps.clone(), on_all, step_ns.as_deref_mut())?;
                }
            }
            first += n;
        }
        Ok(())
    }

    /// Checks the tensors that the caller passes.
    fn check(&self, inputs: &[&[u8]], outputs: &[&mut [u8]]) -> Result<(), RunError> {
        let plan = self.model.plan();
        if let Some(dim) = plan.dim.as_ref().filter(|_| self.size + self.appends() > plan.capacity()) {
            return Err(RunError::Full { name: dim.name.clone(), size: self.size });
        }
        let (of_inputs, of_outputs) = (self.model.inputs(), self.model.outputs());
        for (what, expected, given) in
            [("inputs", of_inputs.len(), inputs.len()), ("outputs", of_outputs.len(), outputs.len())]
        {
            if expected != given {
                return Err(RunError::Count { what, expected, given });
            }
        }
        let outputs_given = outputs.iter().map(|bytes| &**bytes);
        let given = inputs.iter().copied().chain(outputs_given);
        for (at, (port, given)) in of_inputs.iter().chain(of_outputs).zip(given).enumerate() {
            let tensor = || self.model.plan().tensors[port.tensor].name.clone();
            let of_port = &plan.tensors[self.member().map_or(port.tensor, |member| member.ports[at])];
            let expected = of_port.n_bytes_of(self.sizes_of_ports(), self.n_items);
            if given.len() != expected {
                return Err(RunError::Size { tensor: tensor(), expected, given: given.len() });
            }
            let are_apart = of_port.in_items && plan.pieces.is_empty();
            let to_next = if are_apart { of_port.n_bytes_at([self.size, self.second]) } else { 0 };
            let is_aligned = [given.as_ptr() as usize, to_next].iter().all(|start| start.is_multiple_of(port.align));
            if !given.is_empty() && !is_aligned {
                return Err(RunError::Unaligned { tensor: tensor(), align: port.align });
            }
            if let (Some(n), Some(index)) = (of_port.selects_among, of_port.out_of_range(given)) {
                return Err(RunError::Index { tensor: tensor(), index, n });
            }
        }
        Ok(())
    }

    /// Sets the addresses of the caller's tensors, from a row or item on, and of the current item within a
    /// group.
    fn pass(&mut self, places: Range<usize>, [at, in_group]: [i64; 2], inputs: &[&[u8]], outputs: &mut [&mut [u8]]) {
        let plan = self.model.plan();
        let before = |port: &Port, item: usize| {
            let tensor = &plan.tensors[port.tensor];
            let bytes_of = |size: i64| tensor.n_bytes_at([size, self.second]);
            match () {
                () if plan.pieces.is_empty() && tensor.in_items => bytes_of(self.size) * at as usize,
                () if plan.pieces.is_empty() || !tensor.has_rows() => 0,
                () => (bytes_of(at) + item * bytes_of(self.n_rows)) / tensor.n_outer(),
            }
        };
        for Passed { at: place, base, item, offset, pitch, start: of_part } in &self.passed[places] {
            let (start, n_bytes, before) = match base {
                BaseMemory::Input(input) => {
                    let given = inputs[*input];
                    (given.as_ptr().cast_mut(), given.len(), before(&self.model.inputs()[*input], *item))
                }
                BaseMemory::Output(output) => {
                    let before = before(&self.model.outputs()[*output], *item);
                    (outputs[*output].as_mut_ptr(), outputs[*output].len(), before)
                }
                BaseMemory::Arena => {
                    let pitch = pitch.map_or(0, |pitch| pitch.at(self.size));
                    (self.arena.pointer(), self.arena.bytes().len(), (pitch * in_group) as usize)
                }
                BaseMemory::Constants | BaseMemory::State(_) => unreachable!("these are there from the beginning"),
            };
            // An empty slice may have any aligned address.
            let start = if n_bytes == 0 { std::ptr::without_provenance_mut(ARGUMENT_ALIGN as usize) } else { start };
            let ahead = of_part.map_or(0, |of_part| of_part.of([self.size, self.second]) as usize);
            self.pointers[*place] = start.wrapping_add(before + ahead + *offset);
        }
    }

    /// Whether steps with this guard are executed. If an outer guard does not hold, the booleans of its inner
    /// guards may not have been computed.
    fn is_needed(&self, mut guard: Option<usize>) -> bool {
        while let Some(at) = guard {
            let StepCondition { holds, outer, .. } = self.model.plan().guards[at];
            // SAFETY: the model has checked that the boolean is a byte within its memory.
            if (unsafe { *self.pointers[self.first_truth + at] } != 0) != holds {
                return false;
            }
            guard = outer;
        }
        true
    }

    fn steps(
        &mut self,
        steps: Range<usize>,
        on_all: &Runtime,
        mut step_ns: Option<&mut [u64]>,
    ) -> Result<(), RunError> {
        let on_one = Runtime::serial();
        let (mut next, mut n_again) = (steps.start, 0);
        while next < steps.end {
            let (at, step) = (next, &self.model.plan().steps[next]);
            next += 1;
            let start = step_ns.is_some().then(Instant::now);
            let [first, first_size] = self.starts[at];
            let pointers = &self.pointers[first..first + slices(&step.work).count()];
            let sizes = &self.sizes[first_size..first_size + n_sizes_of(&step.work)];
            let is_needed = self.is_needed(step.guard);
            if let Work::While { end, .. } = step.work {
                // SAFETY: the model has checked that the boolean is a byte within its memory.
                if !is_needed || unsafe { *pointers[0] } == 0 {
                    next = end + 1;
                }
            }
            if !is_needed {
                continue;
            }
            match &step.work {
                Work::While { .. } => {}
                Work::Again { to } => {
                    n_again += 1;
                    if n_again >= MOST_ITERATIONS {
                        let why = format!(
                            "no end after {MOST_ITERATIONS} iterations (give inputs with which its condition ends it)"
                        );
                        return Err(RunError::Host { step: step.name.clone(), why });
                    }
                    next = *to;
                }
                Work::Kernel { kernel, parts, all_threads, .. } => {
                    let runtime = if *all_threads { on_all } else { &on_one };
                    let kernel = self.model.codes()[*kernel].kernel();
                    for part in parts {
                        // SAFETY: the model has checked sizes, alignments and overlaps, and `pass` the
                        // caller's tensors; scratch memory suffices for all threads, and all memory is
                        // borrowed.
                        unsafe { kernel.run_part(*part, sizes, pointers, self.scratch.pointer(), runtime) };
                    }
                }
                Work::Copy { from, rows, .. } => {
                    let n_bytes =
                        rows.map_or(from.n_bytes, |(rows, row)| rows.of([self.size, self.second]) as usize * row);
                    // SAFETY: both slices are within their memory; they may overlap.
                    unsafe { std::ptr::copy(pointers[0], pointers[1], n_bytes) }
                }
                Work::Move { rows, .. } => {
                    let [from_at, to_at, n_bytes] = [0, 1, 2].map(|at| sizes[at] as usize);
                    for row in 0..rows.n {
                        let [from, to] = [from_at + row * rows.pitches[0], to_at + row * rows.pitches[1]];
                        // SAFETY: the model has checked that all rows are within their memory, at any size of
                        // the dimension, and that source and destination do not overlap.
                        unsafe { std::ptr::copy_nonoverlapping(pointers[0].add(from), pointers[1].add(to), n_bytes) };
                    }
                }
                Work::Host { run: Host::Call(call), .. } => {
                    // SAFETY: as for kernels; scratch memory is for the largest of steps.
                    let result = unsafe { call.call(pointers, self.scratch.pointer(), &on_one, sizes) };
                    result.map_err(|why| RunError::Host { step: step.name.clone(), why })?;
                }
                Work::Host { inputs, outputs, run: Host::Function(run) } => {
                    let (reads, writes) = pointers.split_at(inputs.len());
                    // A function that panicked may have left entries.
                    self.reads.clear();
                    self.writes.clear();
                    for (pointer, slice) in reads.iter().zip(inputs) {
                        // SAFETY: the slice is within its memory, which is not written during the call, as
                        // the model has checked that outputs do not overlap anything. The reference is
                        // dropped below.
                        self.reads.push(unsafe { slice::from_raw_parts(*pointer, slice.n_bytes) });
                    }
                    for (pointer, slice) in writes.iter().zip(outputs) {
                        // SAFETY: as above.
                        self.writes.push(unsafe { slice::from_raw_parts_mut(*pointer, slice.n_bytes) });
                    }
                    let result = run(&self.reads, &mut self.writes);
                    self.reads.clear();
                    self.writes.clear();
                    result.map_err(|why| RunError::Host { step: step.name.clone(), why })?;
                }
            }
            if let (Some(step_ns), Some(start)) = (&mut step_ns, start) {
                step_ns[at] += start.elapsed().as_nanos() as u64;
            }
        }
        Ok(())
    }
}

/// Turns of a run in groups of items: each step's addresses begin at its entry of `starts`; those of the last
/// step end at `end`.
fn turns_of(plan: &Plan, starts: &[[usize; 2]], passed: &[Passed], end: usize) -> Arc<[Turn]> {
    let turn = |(steps, is_together): (Range<usize>, bool)| {
        let place = |step: usize| starts.get(step).map_or(end, |[first, _]| *first);
        let rank = |step: usize| passed.partition_point(|passed| passed.at < place(step));
        let passed = rank(steps.start)..rank(steps.end);
        Turn { steps, is_together, passed }
    };
    plan.together.iter().flat_map(Together::turns).map(turn).collect()
}

/// Number of sizes of a move.
const MOVED: usize = 3;

/// Number of open sizes of a step.
fn n_sizes_of(work: &Work) -> usize {
    match work {
        Work::Kernel { sizes, .. } => sizes.len(),
        Work::Move { .. } => MOVED,
        Work::Host { run: Host::Call(call), .. } => call.sizes.len(),
        Work::Copy { .. } | Work::Host { .. } | Work::While { .. } | Work::Again { .. } => 0,
    }
}

/// Sizes of a move, in their order.
fn moved(rows: &CopiedRows) -> [RunSize; MOVED] {
    [rows.offsets[0], rows.offsets[1], rows.n_bytes]
}

/// Slices that a step reads and writes, in the order of its addresses.
fn slices(work: &Work) -> impl Iterator<Item = &TensorSlice> {
    let (first, second) = match work {
        Work::Kernel { arguments, kept, .. } => (&arguments[..], &kept[..]),
        Work::Copy { from, to, .. } | Work::Move { from, to, .. } => (slice::from_ref(from), slice::from_ref(to)),
        Work::Host { inputs, outputs, .. } => (&inputs[..], &outputs[..]),
        Work::While { truth, .. } => (slice::from_ref(truth), &[][..]),
        Work::Again { .. } => (&[][..], &[][..]),
    };
    first.iter().chain(second)
}
