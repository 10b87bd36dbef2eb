//! Models: a plan with its kernels and constants, ready to run.

use std::collections::HashSet;
use std::io;
use std::ptr;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use thiserror::Error;
use tilewright_codegen::{ArgumentAlign, CallerBuffer, CompileError, CompiledKernel, Compiler, Interface, Runtime};
use tilewright_ir::{OpenSize, Part, Program, lower, text};

use crate::cores::on_all_cores;
use crate::gpu::GpuModel;
use crate::kernel_plan::plan_of_kernel;
use crate::memory::{ALIGN, Aligned};
use crate::plan::{
    Constant, Member, Members, OpenDimension, Piece, Place, Plan, PlanStep, PlanTensor, RunSize, TensorSlice, Work,
};

/// Reason why a plan is invalid: a bug of the code that made it.
#[derive(Debug, Error)]
pub enum PlanError {
    /// Reference to something that does not exist.
    #[error("step `{step}` names {what} {index}, which does not exist")]
    Missing {
        /// Name of the step.
        step: String,
        /// Kind of the missing thing.
        what: &'static str,
        /// Index of the missing thing.
        index: usize,
    },
    /// Wrong number of a kernel's buffers.
    #[error("step `{step}` passes {given} {what}, its kernel takes {expected}")]
    Count {
        /// Name of the step.
        step: String,
        /// Kind of the buffers.
        what: &'static str,
        /// Number that the kernel takes.
        expected: usize,
        /// Number passed.
        given: usize,
    },
    /// Slice whose size differs from the argument's.
    #[error("step `{step}` passes {given} bytes of `{tensor}` where {expected} are taken")]
    Size {
        /// Name of the step.
        step: String,
        /// Name of the tensor.
        tensor: String,
        /// Size that the kernel takes, in bytes.
        expected: u64,
        /// Size that is passed, in bytes.
        given: usize,
    },
    /// Slice beyond its tensor, or tensor beyond its constant.
    #[error("step `{step}` goes beyond the end of `{tensor}`")]
    Outside {
        /// Name of the step.
        step: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// Slice without the alignment that the kernel requires.
    #[error("step `{step}` passes a part of `{tensor}` that is not aligned to {align} bytes")]
    Unaligned {
        /// Name of the step.
        step: String,
        /// Name of the tensor.
        tensor: String,
        /// Required alignment in bytes.
        align: usize,
    },
    /// Write to read-only memory.
    #[error("step `{step}` writes to `{tensor}`, which is an input or a constant")]
    ReadOnly {
        /// Name of the step.
        step: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// Written slice that overlaps another one of the same step.
    #[error("step `{step}` writes to `{written}`, which overlaps `{other}`")]
    Overlap {
        /// Name of the step.
        step: String,
        /// Slice that is written.
        written: String,
        /// Name of the other tensor.
        other: String,
    },
    /// Kept buffer that is not made of constants only, or is not a whole constant.
    #[error("step `{step}` prepares constants with `{tensor}`, which is not constant")]
    NotConstant {
        /// Name of the step.
        step: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// Inputs or outputs with gaps in their indices, or with views that differ in size.
    #[error("`{tensor}` is input or output {index}, but one before it is missing or of another size")]
    Interface {
        /// Name of the tensor.
        tensor: String,
        /// Number of the input or output.
        index: usize,
    },
    /// Open (dynamic) size of a kernel that is out of range at some size of the model's dimension.
    #[error("step `{step}` does not give its kernel a value of each of its open sizes")]
    OpenSize {
        /// Name of the step.
        step: String,
    },
    /// Insufficient memory.
    #[error("no memory for constants: {0}")]
    Memory(#[from] io::Error),
}

/// Compiled kernel with the program it was compiled from.
pub struct Code {
    source: KernelSource,
    kernel: CompiledKernel,
    interface: Interface,
}

/// Program of a kernel.
enum KernelSource {
    /// Lowered program.
    Lowered(Program),
    /// Scheduled program as text, which is rarely needed.
    Text {
        /// Name, buffers and sizes.
        header: Program,
        text: String,
        /// Lowered program, once it was requested.
        lowered: OnceLock<Program>,
    },
}

impl Code {
    /// Compiles a lowered program. Plans that pass slices of tensors need a compiler for
    /// [`ArgumentAlign::Elements`].
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub fn compile(compiler: &mut Compiler, program: Program) -> Result<Code, CompileError> {
        let kernel = compiler.compile(&program)?;
        Code::new(compiler, program, kernel)
    }

    /// Loads an object of the program, made by [`Compiler::object`] here or in another process.
    ///
    /// # Errors
    /// As [`Compiler::load`].
    pub fn load(compiler: &Compiler, program: Program, object: &[u8]) -> Result<Code, CompileError> {
        let kernel = compiler.load(&program, object)?;
        Code::new(compiler, program, kernel)
    }

    /// Loads code of the program, made by [`Compiler::quick_object`] here or in another process. The program
    /// is given as its tables and as its text, which is not parsed until [`Code::program`] is called.
    ///
    /// # Errors
    /// As [`Compiler::load_quick`].
    pub fn load_quick(compiler: &Compiler, header: Program, text: String, code: &[u8]) -> Result<Code, CompileError> {
        let (kernel, interface) = compiler.load_quick(&header, code)?;
        Ok(Code { source: KernelSource::Text { header, text, lowered: OnceLock::new() }, kernel, interface })
    }

    /// Compiles as [`Code::compile`] does, by [`Compiler::compile_without_llvm`].
    ///
    /// # Errors
    /// As [`Compiler::compile_without_llvm`].
    pub fn compile_without_llvm(compiler: &mut Compiler, program: Program) -> Result<Code, CompileError> {
        let kernel = compiler.compile_without_llvm(&program)?;
        Code::new(compiler, program, kernel)
    }

    fn new(compiler: &Compiler, program: Program, kernel: CompiledKernel) -> Result<Code, CompileError> {
        let interface = Interface::new(&program, compiler.target(), 1, Some(Compiler::PREFIX))?;
        Ok(Code { source: KernelSource::Lowered(program), kernel, interface })
    }

    /// Lowered program.
    ///
    /// # Panics
    /// If the text with which it was loaded is not a program.
    pub fn program(&self) -> &Program {
        match &self.source {
            KernelSource::Lowered(program) => program,
            KernelSource::Text { text, lowered, .. } => lowered.get_or_init(|| {
                lower::lower(&text::parse(text).expect("invariant: code is loaded with the text of a program"))
            }),
        }
    }

    /// Name of the program.
    fn name(&self) -> &str {
        let (KernelSource::Lowered(program) | KernelSource::Text { header: program, .. }) = &self.source;
        &program.name
    }

    /// Compiled kernel.
    pub fn kernel(&self) -> &CompiledKernel {
        &self.kernel
    }

    /// Interface of the kernel: its buffers, arguments first, and the parts that use them.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Plan that runs this kernel alone: its inputs and outputs are the program's, except those given as
    /// constants. Kept buffers made of constants only are prepared once, others in each run.
    pub fn plan(&self, constant: &dyn Fn(&str) -> Option<Bytes>) -> Plan {
        let has = |part: Part| self.interface.has(part);
        plan_of_kernel(self.name(), &self.interface.buffers, &has, ALIGN, constant)
    }

    /// Alignment that an argument's address needs, in bytes.
    fn argument_align(&self, at: usize) -> usize {
        match self.kernel.argument_align() {
            ArgumentAlign::Lines => ALIGN,
            ArgumentAlign::Elements => self.interface.buffers[at].dtype.bytes() as usize,
        }
    }
}

/// Memory that addresses are relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BaseMemory {
    /// Caller's input with this index.
    Input(usize),
    /// Caller's output with this index.
    Output(usize),
    /// Arena of the context.
    Arena,
    /// Constants of the model.
    Constants,
    /// State of the context with this index.
    State(usize),
}

/// Address: an offset in some memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Memory that the address is relative to.
    pub base: BaseMemory,
    /// Offset in bytes.
    pub offset: usize,
}

/// Plan with its kernels and prepared constants. Many contexts may run it at the same time.
pub struct Model {
    plan: Plan,
    codes: Vec<Code>,
    constants: Aligned,
    /// Offset of each constant in the block; `None` if only `prepare` parts read it.
    constant_offsets: Vec<Option<usize>>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
}

/// Call of a kernel's `prepare` part on constants.
struct Preparation {
    kernel: usize,
    /// Arguments, then kept buffers.
    buffers: Vec<PreparationBuffer>,
}

/// Buffer of a preparation.
enum PreparationBuffer {
    Unused,
    /// Offset in the block of constants.
    InBlock(usize),
    /// Data that no run needs, outside the block.
    Data(Bytes),
}

/// Input or output as callers pass it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Index of its tensor in the plan.
    pub tensor: usize,
    /// Size in bytes.
    pub n_bytes: usize,
    /// Required alignment in bytes.
    pub align: usize,
}

impl Model {
    /// Validates a plan, lays its constants out in one block, and prepares those that kernels keep. Constants
    /// that no run needs are not in the block.
    ///
    /// A kernel may write a slice that it also reads, if it reads each element before writing it and never
    /// again; other overlaps are rejected.
    pub fn new(plan: Plan, codes: Vec<Code>) -> Result<Model, PlanError> {
        Model::made(plan, codes, false)
    }

    /// Makes a model as [`Model::new`] does, for runs only and not for a library: constants become
    /// [`Constant::Forgotten`] once they, or the buffers prepared from them, are in the block, so that they
    /// are not in memory twice.
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn for_runs(plan: Plan, codes: Vec<Code>) -> Result<Model, PlanError> {
        Model::made(plan, codes, true)
    }

    fn made(plan: Plan, codes: Vec<Code>, forgets_data: bool) -> Result<Model, PlanError> {
        let checker = PlanChecker { plan: &plan, codes: &codes };
        let (inputs, outputs) = checker.interface()?;
        plan.steps.iter().enumerate().try_for_each(|(at, step)| checker.step(step, &plan.dims_of(at)))?;
        checker.guards()?;
        checker.loops()?;
        checker.pieces()?;
        checker.members()?;
        checker.together()?;
        let mut end = 0;
        let needed = needed_constants(&plan, &codes);
        let offsets = plan.constants.iter().enumerate().map(|(at, constant)| {
            let is_needed = needed.contains(&at) || matches!(constant, Constant::Prepared(_));
            is_needed.then(|| {
                let offset = end;
                end += constant.n_bytes().next_multiple_of(ALIGN);
                offset
            })
        });
        let constant_offsets: Vec<Option<usize>> = offsets.collect();
        let constants = Aligned::untouched(end as u64)?;
        let mut model = Model { plan, codes, constants, constant_offsets, inputs, outputs };
        model.fill_constants(forgets_data)?;
        Ok(model)
    }

    /// Plan of the model.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Kernels, by their index in the plan.
    pub fn codes(&self) -> &[Code] {
        &self.codes
    }

    /// Block of all constants that runs need.
    pub fn constants(&self) -> &[u8] {
        self.constants.bytes()
    }

    /// Address of a slice; `None` for a constant that no run needs.
    pub fn address(&self, slice: &TensorSlice) -> Option<Address> {
        let (base, offset) = match self.plan.tensors[slice.tensor].place {
            Place::Input(at) => (BaseMemory::Input(at), 0),
            Place::Output(at) => (BaseMemory::Output(at), 0),
            Place::Arena(offset) => (BaseMemory::Arena, offset),
            Place::State(at) => (BaseMemory::State(at), 0),
            Place::Constant(at) => (BaseMemory::Constants, self.constant_offsets[at]?),
        };
        Some(Address { base, offset: offset + slice.offset })
    }

    /// Whether the given parts of a kernel use one of its buffers.
    pub fn is_used(&self, kernel: usize, buffer: usize, parts: &[Part]) -> bool {
        is_used(&self.codes[kernel], buffer, parts)
    }

    /// Inputs in their order.
    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    /// Outputs in their order.
    pub fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    /// Scratch memory for `n_threads` threads, in bytes.
    pub fn scratch_bytes(&self, n_threads: usize) -> u64 {
        let of_kernels = self.codes.iter().map(|code| code.kernel.scratch_bytes(n_threads));
        let of_host = self.plan.steps.iter().map(|step| match &step.work {
            Work::Host { run, .. } => run.scratch_bytes() as u64,
            _ => 0,
        });
        of_kernels.chain(of_host).max().unwrap_or(0)
    }

    fn constant(&self, at: usize) -> Option<*mut u8> {
        // SAFETY: offsets are within the block.
        self.constant_offsets[at].map(|offset| unsafe { self.constants.pointer().add(offset) })
    }

    fn fill_constants(&mut self, forgets_data: bool) -> Result<(), PlanError> {
        for (at, constant) in self.plan.constants.iter().enumerate() {
            if let (Constant::Data(data), Some(to)) = (constant, self.constant(at)) {
                // SAFETY: the block has room for the constant there, and is not shared yet.
                unsafe { ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
            }
        }
        let steps = self.preparations();
        let are_apart = self.are_apart(&steps);
        let preparations: Vec<Preparation> = steps.into_iter().map(|at| self.preparation(at)).collect();
        if forgets_data {
            // From here on each preparation owns a reference to its data, and releases it when it is done.
            for constant in self.plan.constants.iter_mut().filter(|constant| matches!(constant, Constant::Data(_))) {
                *constant = Constant::Forgotten(constant.n_bytes());
            }
        }
        let prepare = |scratch: &mut io::Result<Aligned>, preparation: Preparation| match scratch {
            Ok(scratch) => self.prepare(preparation, scratch),
            Err(error) => Err(error.kind().into()),
        };
        // Few preparations use scratch memory.
        let scratch = || Aligned::untouched(self.scratch_bytes(1));
        let done: io::Result<()> = if are_apart {
            on_all_cores(preparations, scratch, prepare).into_iter().collect()
        } else {
            let mut scratch = scratch();
            preparations.into_iter().try_for_each(|preparation| prepare(&mut scratch, preparation))
        };
        Ok(done?)
    }

    /// Whether no preparation reads or writes a buffer that another one writes.
    fn are_apart(&self, steps: &[usize]) -> bool {
        let mut made = HashSet::new();
        steps.iter().all(|&at| {
            let Work::Kernel { arguments, kept, .. } = &self.plan.steps[at].work else { return true };
            let is_prepared = |at: &usize| matches!(self.plan.constants[*at], Constant::Prepared(_));
            let own: HashSet<usize> = kept.iter().filter_map(|slice| self.constant_of(slice)).collect();
            let reads_prepared =
                arguments.iter().filter_map(|slice| self.constant_of(slice)).any(|at| is_prepared(&at));
            !reads_prepared && own.into_iter().all(|constant| made.insert(constant))
        })
    }

    /// Indices of the steps whose kernels prepare constants; for steps that share constants, the first one.
    pub fn preparations(&self) -> Vec<usize> {
        let mut is_made = HashSet::new();
        let mut found = Vec::new();
        for (at, step) in self.plan.steps.iter().enumerate() {
            let Work::Kernel { kept, parts, .. } = &step.work else { continue };
            let made: Vec<usize> = kept.iter().filter_map(|slice| self.constant_of(slice)).collect();
            if !parts.contains(&Part::Prepare) && made.iter().any(|constant| !is_made.contains(constant)) {
                is_made.extend(made);
                found.push(at);
            }
        }
        found
    }

    /// Preparation of a step's kernel.
    fn preparation(&self, step: usize) -> Preparation {
        let Work::Kernel { kernel, arguments, kept, .. } = &self.plan.steps[step].work else {
            unreachable!("what prepares is a kernel")
        };
        let code = &self.codes[*kernel];
        let buffers = arguments.iter().chain(kept).zip(0..).map(|(slice, at)| {
            let constant = self.constant_of(slice).filter(|_| is_used(code, at, &[Part::Prepare]));
            constant.map_or(PreparationBuffer::Unused, |constant| {
                match (self.constant_offsets[constant], &self.plan.constants[constant]) {
                    (Some(start), _) => PreparationBuffer::InBlock(start + slice.offset),
                    (None, Constant::Data(data)) => {
                        PreparationBuffer::Data(data.slice(slice.offset..slice.offset + slice.n_bytes))
                    }
                    (None, Constant::Prepared(_) | Constant::Forgotten(_)) => unreachable!("it has a place, or data"),
                }
            })
        });
        Preparation { kernel: *kernel, buffers: buffers.collect() }
    }

    fn prepare(&self, preparation: Preparation, scratch: &mut Aligned) -> io::Result<()> {
        let code = &self.codes[preparation.kernel];
        let mut copies = Vec::new();
        let mut pointers = Vec::new();
        for (buffer, at) in preparation.buffers.iter().zip(0..) {
            pointers.push(match buffer {
                PreparationBuffer::Unused => ptr::null_mut(),
                // SAFETY: the slice is within its constant, which is within the block.
                PreparationBuffer::InBlock(offset) => unsafe { self.constants.pointer().add(*offset) },
                // Aligned data that is only read is used in place.
                PreparationBuffer::Data(data) if (data.as_ptr() as usize).is_multiple_of(code.argument_align(at)) => {
                    data.as_ptr().cast_mut()
                }
                PreparationBuffer::Data(data) => {
                    let mut copy = Aligned::untouched(data.len() as u64)?;
                    copy.bytes_mut().copy_from_slice(data);
                    copies.push(copy);
                    copies[copies.len() - 1].pointer()
                }
            });
        }
        // SAFETY: sizes, alignments and overlaps were checked; the part uses only constants, which are all
        // present; the block is not shared yet, except with preparations of other parts of it.
        unsafe { code.kernel.run_part(Part::Prepare, &[], &pointers, scratch.pointer(), &Runtime::serial()) };
        Ok(())
    }

    /// Offset of a constant in [`Model::constants`]; `None` if no run needs it.
    pub fn constant_offset(&self, constant: usize) -> Option<usize> {
        self.constant_offsets[constant]
    }

    /// Constant that a slice belongs to, if any.
    pub fn constant_of(&self, slice: &TensorSlice) -> Option<usize> {
        match self.plan.tensors[slice.tensor].place {
            Place::Constant(at) => Some(at),
            Place::Input(_) | Place::Output(_) | Place::Arena(_) | Place::State(_) => None,
        }
    }
}

/// Model for any kind of device.
#[derive(Clone)]
pub enum AnyModel {
    /// Model for this machine's CPU.
    Cpu(Arc<Model>),
    /// Model for a GPU.
    Gpu(Arc<GpuModel>),
}

impl AnyModel {
    /// Plan of the model.
    pub fn plan(&self) -> &Plan {
        match self {
            AnyModel::Cpu(model) => model.plan(),
            AnyModel::Gpu(model) => &model.plan,
        }
    }

    /// Model, if it is for this machine's CPU.
    pub fn cpu(&self) -> Option<&Arc<Model>> {
        match self {
            AnyModel::Cpu(model) => Some(model),
            AnyModel::Gpu(_) => None,
        }
    }
}

fn is_used(code: &Code, buffer: usize, parts: &[Part]) -> bool {
    let buffer = &code.interface.buffers[buffer];
    buffer.read_by.iter().chain(&buffer.written_by).any(|part| parts.contains(part))
}

/// Constants that runs read.
fn needed_constants(plan: &Plan, codes: &[Code]) -> HashSet<usize> {
    let mut needed = HashSet::new();
    let mut need = |slice: &TensorSlice| {
        if let Place::Constant(at) = plan.tensors[slice.tensor].place {
            needed.insert(at);
        }
    };
    for step in &plan.steps {
        match &step.work {
            Work::Kernel { kernel, arguments, kept, parts, .. } => {
                let used = arguments.iter().chain(kept).zip(0..);
                used.filter(|(_, at)| is_used(&codes[*kernel], *at, parts)).for_each(|(slice, _)| need(slice));
            }
            Work::Copy { from, .. } | Work::Move { from, .. } => need(from),
            Work::Host { inputs, .. } => inputs.iter().for_each(&mut need),
            Work::While { truth, .. } => need(truth),
            Work::Again { .. } => {}
        }
    }
    plan.guards.iter().for_each(|guard| need(&guard.truth));
    needed
}

/// Fixed number of rows that a step computes with code for a variable number of rows of a matrix product.
#[derive(Clone, Copy)]
struct ComputedRows {
    n: i64,
    most: i64,
}

impl ComputedRows {
    /// Whether a slice consists of these rows of a matrix buffer.
    fn are_all(&self, slice: &TensorSlice, buffer: &CallerBuffer) -> bool {
        let row = buffer.size_bytes / self.most.max(1) as u64;
        matches!(buffer.shape[..], [most, _] if most == self.most) && slice.n_bytes as u64 == row * self.n as u64
    }
}

/// Rows that a step computes, if its code supports any number of them and the step's number is the same in
/// all runs.
fn rows_of(code: &Code, sizes: &[RunSize]) -> Option<ComputedRows> {
    match (&code.interface.sizes[..], sizes) {
        ([open], &[RunSize { factor: 0, term, multiple: 1, divisor: 1, .. }]) if open.name == "m" => {
            Some(ComputedRows { n: term, most: open.most() })
        }
        _ => None,
    }
}

/// Checker of a plan before it runs.
struct PlanChecker<'p> {
    plan: &'p Plan,
    codes: &'p [Code],
}

impl PlanChecker<'_> {
    /// Returns the inputs and outputs, and checks that they are numbered without gaps.
    fn interface(&self) -> Result<(Vec<Port>, Vec<Port>), PlanError> {
        let (mut inputs, mut outputs) = (self.ports(Place::Input), self.ports(Place::Output));
        for tensor in &self.plan.tensors {
            let (index, ports) = match tensor.place {
                Place::Input(at) => (at, &inputs),
                Place::Output(at) => (at, &outputs),
                Place::State(index) => {
                    // The first tensor of a state says how much memory there is.
                    let whole = self.plan.states().nth(index);
                    let fits = whole.is_some_and(|whole| tensor.n_bytes() <= whole.n_bytes());
                    let error = || PlanError::Interface { tensor: tensor.name.clone(), index };
                    fits.then_some(()).ok_or_else(error)?;
                    continue;
                }
                Place::Arena(_) | Place::Constant(_) => continue,
            };
            if tensor.start.is_some() {
                let fits = ports.get(index).is_some_and(|port| self.is_part_of(tensor, port));
                fits.then_some(()).ok_or_else(|| PlanError::Interface { tensor: tensor.name.clone(), index })?;
                continue;
            }
            let is_of_piece = |port: &Port| {
                let whole = &self.plan.tensors[port.tensor];
                let most = self.plan.second.as_ref().map_or(0, |second| second.most);
                let n_bytes = |piece: &Piece| whole.n_bytes_of([piece.n, most], piece.items);
                self.plan.pieces.iter().any(|piece| n_bytes(piece) == tensor.n_bytes())
            };
            let at = if matches!(tensor.place, Place::Input(_)) { index } else { inputs.len() + index };
            let is_of = |member: &Member| {
                let port = member.ports.get(at).and_then(|port| self.plan.tensors.get(*port));
                port.is_some_and(|port| port.place == tensor.place && port.n_bytes() == tensor.n_bytes())
            };
            let is_of_member =
                |_: &Port| self.plan.members.as_ref().is_some_and(|members| members.each.iter().any(is_of));
            let fits = |port: &Port| port.n_bytes == tensor.n_bytes() || is_of_piece(port) || is_of_member(port);
            if !ports.get(index).is_some_and(fits) {
                return Err(PlanError::Interface { tensor: tensor.name.clone(), index });
            }
        }
        for step in &self.plan.steps {
            if let Work::Kernel { kernel, arguments, .. } = &step.work
                && let Some(code) = self.codes.get(*kernel)
            {
                for (at, slice) in arguments.iter().enumerate().take(code.interface.buffers.len()) {
                    let port = match self.plan.tensors.get(slice.tensor).map(|tensor| tensor.place) {
                        Some(Place::Input(at)) => &mut inputs[at],
                        Some(Place::Output(at)) => &mut outputs[at],
                        Some(Place::Arena(_) | Place::Constant(_) | Place::State(_)) | None => continue,
                    };
                    port.align = port.align.max(code.argument_align(at));
                }
            }
        }
        Ok((inputs, outputs))
    }

    /// Whether a part of a packed input is within it at all sizes, and begins at an element.
    fn is_part_of(&self, part: &PlanTensor, port: &Port) -> bool {
        let (Some(start), Some((_, size)), Place::Input(_)) = (part.start, part.open, part.place) else {
            return false;
        };
        let Some(dim) = [&self.plan.dim, &self.plan.second][start.dim] else { return false };
        let n_bytes = part.dtype.bytes() as i64;
        // Both are affine in the dimension, so its ends suffice.
        let is_within = |size: i64| {
            let sizes = [size; 2];
            let (start, whole) = (start.of(sizes), &self.plan.tensors[port.tensor]);
            start >= 0 && start as usize + part.n_bytes_at(sizes) <= whole.n_bytes_at(sizes)
        };
        let is_of_elements = [start.factor, start.term].iter().all(|n| n % n_bytes == 0);
        let is_plain = (start.divisor, start.multiple, size.dim) == (1, 1, start.dim);
        is_plain && is_of_elements && [dim.least, dim.most].into_iter().all(is_within)
    }

    fn ports(&self, place: fn(usize) -> Place) -> Vec<Port> {
        let port = |tensor: usize| {
            let of = &self.plan.tensors[tensor];
            Port { tensor, n_bytes: of.n_bytes(), align: of.dtype.bytes() as usize }
        };
        self.plan.ports(place).into_iter().map(port).collect()
    }

    /// Checks that guards are bytes of tensors, and that each outer guard precedes its inner ones.
    fn guards(&self) -> Result<(), PlanError> {
        for (at, guard) in self.plan.guards.iter().enumerate() {
            let step = PlanStep {
                name: format!("guard {at}"),
                work: Work::Copy { from: guard.truth, to: guard.truth, rows: None },
                guard: None,
            };
            self.slice(&step, &guard.truth)?;
            if guard.truth.n_bytes != 1 {
                let (tensor, given) = (self.name(&guard.truth), guard.truth.n_bytes);
                return Err(PlanError::Size { step: step.name, tensor, expected: 1, given });
            }
            if let Some(index) = guard.outer.filter(|outer| *outer >= at) {
                return Err(PlanError::Missing { step: step.name, what: "guard", index });
            }
        }
        let is_missing = |step: &&PlanStep| step.guard.is_some_and(|at| at >= self.plan.guards.len());
        match self.plan.steps.iter().find(is_missing) {
            Some(PlanStep { name, guard: Some(index), .. }) => {
                Err(PlanError::Missing { step: name.clone(), what: "guard", index: *index })
            }
            _ => Ok(()),
        }
    }

    /// Checks that pieces have steps, start at sizes for which states have room, and can make up every number
    /// of rows.
    fn pieces(&self) -> Result<(), PlanError> {
        let Plan { pieces, rows, items, .. } = self.plan;
        let wrong = |index: usize| PlanError::Missing { step: "pieces".to_owned(), what: "piece", index };
        for (index, piece) in pieces.iter().enumerate() {
            let fits = piece.n > 0
                && piece.n + piece.most <= self.plan.capacity()
                && piece.steps.end <= self.plan.steps.len()
                && piece.n % self.plan.appends.max(1) == 0;
            fits.then_some(()).ok_or_else(|| wrong(index))?;
        }
        let most_rows = rows.as_ref().map_or(self.plan.appends, |rows| rows.most);
        let mut numbers = Vec::new();
        for of_items in pieces.chunk_by(|a, b| a.items == b.items) {
            let is_made_up = of_items[0].n == most_rows
                && of_items[of_items.len() - 1].n == self.plan.appends
                && of_items.is_sorted_by(|a, b| a.n > b.n);
            is_made_up.then_some(()).ok_or_else(|| wrong(pieces.len()))?;
            numbers.push(of_items[0].items);
        }
        let is_whole = match (rows, items) {
            (Some(rows), _) if rows.step != rows.least || rows.least != self.plan.appends => false,
            (_, Some(items)) if !pieces.is_empty() => {
                numbers == (items.least..=items.most).rev().step_by(items.step as usize).collect::<Vec<_>>()
            }
            (None, _) => pieces.is_empty(),
            (Some(_), _) => numbers == [1],
        };
        is_whole.then_some(()).ok_or_else(|| wrong(pieces.len()))?;
        // Items that run one by one are independent: they have no states, and no open rows.
        let have_items = self.plan.tensors.iter().filter(|tensor| tensor.in_items);
        let is_of = |tensor: &PlanTensor, n: usize| {
            tensor.shape.first() == Some(&n) && matches!(tensor.place, Place::Input(_) | Place::Output(_))
        };
        let fits = match items {
            Some(items) if !pieces.is_empty() => have_items.clone().all(|tensor| is_of(tensor, items.most as usize)),
            Some(_) => self.plan.states().next().is_none() && have_items.clone().all(|tensor| is_of(tensor, 1)),
            None => have_items.clone().next().is_none(),
        };
        fits.then_some(()).ok_or_else(|| PlanError::Missing { step: "items".to_owned(), what: "item", index: 0 })
    }

    /// Checks that members have steps of the plan and all inputs and outputs, none larger than the first
    /// member's, and that their sizes are descending.
    fn members(&self) -> Result<(), PlanError> {
        let plan = self.plan;
        let Some(Members { dims, each }) = &plan.members else { return Ok(()) };
        let wrong = |index: usize| PlanError::Missing { step: "members".to_owned(), what: "member", index };
        let ports = [plan.ports(Place::Input), plan.ports(Place::Output)].concat();
        for (index, member) in each.iter().enumerate() {
            let fits_port = |(own, whole): (&usize, &usize)| {
                let whole = &plan.tensors[*whole];
                let fits = |own: &PlanTensor| own.place == whole.place && own.n_bytes() <= whole.n_bytes();
                plan.tensors.get(*own).is_some_and(fits)
            };
            let fits = member.steps.start <= member.steps.end
                && member.steps.end <= plan.steps.len()
                && member.sizes.len() == dims.len()
                && member.sizes.iter().zip(dims).all(|(size, dim)| dim.has(*size))
                && member.ports.len() == ports.len()
                && member.ports.iter().zip(&ports).all(fits_port)
                && (index == 0 || each[index - 1].sizes > member.sizes);
            fits.then_some(()).ok_or_else(|| wrong(index))?;
        }
        let is_whole = !dims.is_empty() && each.first().is_some_and(|first| first.ports == ports);
        let is_of_members = plan.dim.is_none() || plan.members.as_ref().is_some_and(|all| all.opened(plan).is_some());
        let is_alone = is_of_members && plan.second.is_none() && plan.items.is_none() && plan.states().next().is_none();
        (is_whole && is_alone).then_some(()).ok_or_else(|| wrong(each.len()))
    }

    /// Checks that steps for several items are kernels over all rows of these items, and that there is room
    /// for each item of a group.
    fn together(&self) -> Result<(), PlanError> {
        let Plan { together, dim, second, items, steps, tensors, .. } = self.plan;
        let Some(together) = together else { return Ok(()) };
        let is_multiple = |size: &RunSize| (size.term, size.divisor, size.multiple) == (0, 1, 1);
        let fits_step = |(step, together): (&PlanStep, &bool)| match &step.work {
            Work::Kernel { sizes, .. } => step.guard.is_none() && (!together || sizes.iter().all(is_multiple)),
            Work::Copy { .. } | Work::Move { .. } => step.guard.is_none() && !together,
            Work::Host { .. } | Work::While { .. } | Work::Again { .. } => false,
        };
        let has_room = |(tensor, pitch): &(usize, RunSize)| {
            let tensor = tensors.get(*tensor).filter(|tensor| matches!(tensor.place, Place::Arena(_)));
            let dtype_bytes = tensor.map_or(1, |tensor| tensor.dtype.bytes() as i64);
            let is_aligned = [pitch.factor, pitch.term].iter().all(|n| *n >= 0 && n % dtype_bytes == 0);
            let n_bytes = |dim: &OpenDimension| match pitch.factor {
                0 => pitch.term * together.most,
                _ => pitch.at(dim.most),
            };
            is_aligned && tensor.zip(dim.as_ref()).is_some_and(|(tensor, dim)| tensor.n_bytes() as i64 >= n_bytes(dim))
        };
        let fits = items.is_some()
            && second.is_none()
            && dim.as_ref().is_some_and(|dim| dim.step == 1 && dim.least >= 1)
            && together.most >= 1
            && together.steps.len() == steps.len()
            && steps.iter().zip(&together.steps).all(fits_step)
            && together.tensors.iter().all(has_room);
        fits.then_some(()).ok_or_else(|| PlanError::Missing {
            step: "groups".to_owned(),
            what: "place of an item",
            index: 0,
        })
    }

    /// Checks that loops are properly nested.
    fn loops(&self) -> Result<(), PlanError> {
        let mut begun: Vec<(usize, usize)> = Vec::new();
        for (at, step) in self.plan.steps.iter().enumerate() {
            let missing = |index| PlanError::Missing { step: step.name.clone(), what: "end of a loop", index };
            match step.work {
                Work::While { end, .. } => begun.push((at, end)),
                Work::Again { to } if begun.pop() != Some((to, at)) => return Err(missing(at)),
                _ => {}
            }
        }
        match begun.pop() {
            Some((at, index)) => {
                let step = self.plan.steps[at].name.clone();
                Err(PlanError::Missing { step, what: "end of a loop", index })
            }
            None => Ok(()),
        }
    }

    /// Checks a step, at all sizes of its open dimensions.
    fn step(&self, step: &PlanStep, dims: &[Option<OpenDimension>; 2]) -> Result<(), PlanError> {
        let name = || step.name.clone();
        match &step.work {
            Work::Kernel { kernel, arguments, kept, parts, sizes, .. } => {
                let missing = || PlanError::Missing { step: name(), what: "kernel", index: *kernel };
                let code = self.codes.get(*kernel).ok_or_else(missing)?;
                let open = &code.interface.sizes;
                let is_value = |(open, size): (&OpenSize, &RunSize)| match &dims[size.dim] {
                    Some(dim) => (dim.least..=dim.most)
                        .step_by(dim.step.max(1) as usize)
                        .all(|value| open.steps_to(size.at(value)).is_some()),
                    None => false,
                };
                if open.len() != sizes.len() || !open.iter().zip(sizes).all(is_value) {
                    return Err(PlanError::OpenSize { step: name() });
                }
                let n_kept = code.kernel.kept_bytes().len();
                let n_arguments = code.interface.buffers.len() - n_kept;
                for (what, expected, given) in
                    [("arguments", n_arguments, arguments.len()), ("kept buffers", n_kept, kept.len())]
                {
                    if expected != given {
                        return Err(PlanError::Count { step: name(), what, expected, given });
                    }
                }
                let buffers = [&arguments[..], &kept[..]].concat();
                self.kernel(step, code, &buffers, n_arguments, parts, rows_of(code, sizes))
            }
            Work::Copy { from, to, .. } => {
                [from, to].into_iter().try_for_each(|slice| self.slice(step, slice))?;
                if from.n_bytes != to.n_bytes {
                    let (tensor, expected) = (self.name(from), to.n_bytes as u64);
                    return Err(PlanError::Size { step: name(), tensor, expected, given: from.n_bytes });
                }
                self.written(step, to, &[*from])
            }
            Work::Move { from, to, rows } => {
                [from, to].into_iter().try_for_each(|slice| self.slice(step, slice))?;
                if !rows.are_within([from.n_bytes, to.n_bytes], dims) {
                    return Err(PlanError::Outside { step: name(), tensor: self.name(to) });
                }
                if self.overlap(from, to) {
                    return Err(self.overlapping(step, to, from));
                }
                self.written(step, to, &[])
            }
            Work::While { truth, .. } => {
                self.slice(step, truth)?;
                match truth.n_bytes {
                    1 => Ok(()),
                    given => Err(PlanError::Size { step: name(), tensor: self.name(truth), expected: 1, given }),
                }
            }
            Work::Again { .. } => Ok(()),
            Work::Host { inputs, outputs, .. } => {
                let all = [&inputs[..], &outputs[..]].concat();
                all.iter().try_for_each(|slice| self.slice(step, slice))?;
                outputs.iter().enumerate().try_for_each(|(at, slice)| {
                    let mut others = all.clone();
                    others.remove(inputs.len() + at);
                    self.written(step, slice, &others)?;
                    // A function takes references, which must not alias.
                    match others.iter().find(|other| self.overlap(slice, other)) {
                        Some(other) => Err(self.overlapping(step, slice, other)),
                        None => Ok(()),
                    }
                })
            }
        }
    }

    fn kernel(
        &self,
        step: &PlanStep,
        code: &Code,
        buffers: &[TensorSlice],
        n_arguments: usize,
        parts: &[Part],
        rows: Option<ComputedRows>,
    ) -> Result<(), PlanError> {
        let name = || step.name.clone();
        for (at, (slice, buffer)) in buffers.iter().zip(&code.interface.buffers).enumerate() {
            self.slice(step, slice)?;
            let tensor = || self.name(slice);
            let is_of_caller = matches!(self.plan.tensors[slice.tensor].place, Place::Input(_) | Place::Output(_));
            let has_its_rows = rows.is_some_and(|rows| is_of_caller && rows.are_all(slice, buffer));
            if slice.n_bytes as u64 != buffer.size_bytes && !has_its_rows {
                let (expected, given) = (buffer.size_bytes, slice.n_bytes);
                return Err(PlanError::Size { step: name(), tensor: tensor(), expected, given });
            }
            let align = if at < n_arguments { code.argument_align(at) } else { ALIGN };
            let start = match self.plan.tensors[slice.tensor].place {
                Place::Arena(offset) => offset,
                // These begin at cache lines. The caller's tensors are checked in each run.
                Place::Constant(_) | Place::State(_) | Place::Input(_) | Place::Output(_) => 0,
            };
            let is_callers = at >= n_arguments && !self.is_ours(slice);
            if !(start + slice.offset).is_multiple_of(align) || is_callers {
                return Err(PlanError::Unaligned { step: name(), tensor: tensor(), align });
            }
        }
        let is_constant = |slice: &TensorSlice| matches!(self.plan.tensors[slice.tensor].place, Place::Constant(_));
        let is_prepared = |slice: &TensorSlice| match self.plan.tensors[slice.tensor].place {
            Place::Constant(at) => matches!(self.plan.constants[at], Constant::Prepared(_)),
            Place::Input(_) | Place::Output(_) | Place::Arena(_) | Place::State(_) => false,
        };
        // Slices that runs write, and slices that must not overlap them.
        let used =
            |parts: &[Part]| -> Vec<usize> { (0..buffers.len()).filter(|at| is_used(code, *at, parts)).collect() };
        let writes =
            |at: usize, parts: &[Part]| code.interface.buffers[at].written_by.iter().any(|part| parts.contains(part));
        let in_runs = used(parts);
        for &at in in_runs.iter().filter(|at| writes(**at, parts)) {
            let others: Vec<TensorSlice> =
                in_runs.iter().filter(|other| **other != at).map(|other| buffers[*other]).collect();
            self.written(step, &buffers[at], &others)?;
        }
        if parts.contains(&Part::Prepare) || !buffers[n_arguments..].iter().any(is_constant) {
            return Ok(());
        }
        // Prepared buffers are constants, and are made from constants only.
        for at in used(&[Part::Prepare]) {
            let fits = if writes(at, &[Part::Prepare]) { is_prepared(&buffers[at]) } else { is_constant(&buffers[at]) };
            if !fits {
                return Err(PlanError::NotConstant { step: name(), tensor: self.name(&buffers[at]) });
            }
        }
        Ok(())
    }

    fn is_ours(&self, slice: &TensorSlice) -> bool {
        match self.plan.tensors[slice.tensor].place {
            Place::Arena(_) | Place::Constant(_) => true,
            Place::Input(_) | Place::Output(_) | Place::State(_) => false,
        }
    }

    fn name(&self, slice: &TensorSlice) -> String {
        self.plan.tensors[slice.tensor].name.clone()
    }

    /// Checks that a slice is within its tensor, and the tensor within its constant.
    fn slice(&self, step: &PlanStep, slice: &TensorSlice) -> Result<(), PlanError> {
        let missing = |what, index| PlanError::Missing { step: step.name.clone(), what, index };
        let tensor = self.plan.tensors.get(slice.tensor).ok_or_else(|| missing("tensor", slice.tensor))?;
        let room = match tensor.place {
            Place::Constant(at) => match self.plan.constants.get(at) {
                Some(constant @ (Constant::Data(_) | Constant::Prepared(_))) => constant.n_bytes(),
                Some(Constant::Forgotten(_)) | None => return Err(missing("constant", at)),
            },
            Place::Input(_) | Place::Output(_) | Place::Arena(_) | Place::State(_) => usize::MAX,
        };
        let end = slice.offset.checked_add(slice.n_bytes);
        // Rows of different items are not contiguous.
        let item = |offset: usize| self.plan.item_of(&TensorSlice { offset, ..*slice }).0;
        let is_of_items = slice.n_bytes > 0 && matches!(tensor.place, Place::Input(_) | Place::Output(_));
        let is_split = is_of_items && item(slice.offset) != item(slice.offset.saturating_add(slice.n_bytes - 1));
        if end.is_none_or(|end| end > tensor.n_bytes()) || tensor.n_bytes() > room || is_split {
            return Err(PlanError::Outside { step: step.name.clone(), tensor: tensor.name.clone() });
        }
        if !slice.offset.is_multiple_of(tensor.dtype.bytes() as usize) {
            let (tensor, align) = (tensor.name.clone(), tensor.dtype.bytes() as usize);
            return Err(PlanError::Unaligned { step: step.name.clone(), tensor, align });
        }
        Ok(())
    }

    /// Checks that a slice may be written while others are used, one of which may be the same slice.
    fn written(&self, step: &PlanStep, slice: &TensorSlice, others: &[TensorSlice]) -> Result<(), PlanError> {
        match self.plan.tensors[slice.tensor].place {
            Place::Input(_) | Place::Constant(_) => {
                return Err(PlanError::ReadOnly { step: step.name.clone(), tensor: self.name(slice) });
            }
            Place::Output(_) | Place::Arena(_) | Place::State(_) => {}
        }
        let start = |slice: &TensorSlice| self.region(slice);
        match others.iter().find(|other| self.overlap(slice, other) && start(slice) != start(other)) {
            Some(other) => Err(self.overlapping(step, slice, other)),
            None => Ok(()),
        }
    }

    fn overlapping(&self, step: &PlanStep, written: &TensorSlice, other: &TensorSlice) -> PlanError {
        PlanError::Overlap { step: step.name.clone(), written: self.name(written), other: self.name(other) }
    }

    /// Memory of a slice, with its start and end there.
    fn region(&self, slice: &TensorSlice) -> (Place, usize, usize) {
        let (place, start) = match self.plan.tensors[slice.tensor].place {
            Place::Arena(offset) => (Place::Arena(0), offset),
            place @ (Place::Input(_) | Place::Output(_) | Place::Constant(_) | Place::State(_)) => (place, 0),
        };
        (place, start + slice.offset, start + slice.offset + slice.n_bytes)
    }

    fn overlap(&self, a: &TensorSlice, b: &TensorSlice) -> bool {
        let ((place, start, end), (other, other_start, other_end)) = (self.region(a), self.region(b));
        place == other && start < other_end && other_start < end
    }
}
