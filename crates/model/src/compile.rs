//! Compilation of fused steps to an executable plan.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tilewright::{Cache, NO_CACHE, target_here};
use tilewright_codegen::{ArgumentAlign, CallerBuffer, Compiler, Interface};
use tilewright_device::mapped;
use tilewright_graph::op::{Fact, Inputs};
use tilewright_graph::{Op, Tensor};
use tilewright_ir::op::{Structure, Workload};
use tilewright_ir::text::stmt_to_string;
use tilewright_ir::{DType, Part, Program, Role, Target, lower, lower_gpu, repeat};
use tilewright_runtime::gpu::GPU_LINE;
use tilewright_runtime::{
    self as runtime, AnyModel, ArenaLayout, Block, Constant, CopiedRows, GpuModel, Member, Members, Model, Piece,
    Place, Plan, PlanTensor, RunSize, StepCondition, TensorSlice, Together, Work, on_all_cores, plan_memory,
};

use crate::branches::{BranchCondition, conditions, is_selection};
use crate::fuse::{Fused, Kernel, SizedNets, Step, Steps};
use crate::net::{Kind, Net, Node, ValueId};
use crate::open::{Groups, OpenError, are_counted};
use crate::value_memory::{Places, ValuePart};

/// Reason why a model cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// Kernel that cannot be compiled.
    #[error("{workload}: {why}")]
    Kernel {
        /// Workload of the kernel.
        workload: String,
        /// Reason.
        why: String,
    },
    /// Layouts of images that could not be chosen.
    #[error("layouts of images: {why}")]
    Layouts {
        /// Reason.
        why: String,
    },
    /// Dimension that cannot be open (dynamic).
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Open (dynamic) dimension on a GPU, which is not supported.
    #[error("{name} cannot be open on a GPU (give a number)")]
    OpenOnGpu {
        /// Name of the dimension.
        name: String,
    },
    /// Tensor of an element type that runs do not support.
    #[error("`{name}` has elements of type {dtype}, which models do not run with")]
    Dtype {
        /// The tensor.
        name: String,
        /// Type of the tensor.
        dtype: &'static str,
    },
    /// Inconsistent plan: a bug of this crate.
    #[error(transparent)]
    Plan(#[from] tilewright_runtime::PlanError),
}

/// Compiled model.
pub struct Compiled {
    /// Executable model.
    pub model: AnyModel,
    /// Fused steps that it was compiled from.
    pub fused: Fused,
    /// Memory plan of intermediate results.
    pub memory: ArenaLayout,
    /// Index in [`Fused::each`] of each executable step; `None` for a copy.
    pub origins: Vec<Option<usize>>,
    /// Number of distinct kernels with guessed configurations; 0 if no records were consulted.
    pub n_guessed: usize,
}

/// Function that schedules a workload's program as well as is known.
pub type Schedule<'a> = &'a dyn Fn(&Workload) -> Result<Program, String>;

/// Options of compiling a model.
#[derive(Clone, Copy)]
pub struct CompileOptions<'a> {
    /// Cache of code and schedules.
    pub cache: &'a Cache,
    /// Whether the result is only run. If so, the memory of packed weights is released, and with it the
    /// constants of [`Compiled::fused`].
    pub for_runs: bool,
}

impl Default for CompileOptions<'_> {
    /// Options for any use of the result, with an empty cache.
    fn default() -> Self {
        CompileOptions { cache: &NO_CACHE, for_runs: false }
    }
}

/// Compiles fused steps for this machine's CPU or one of its GPUs, with schedules for a target. The target
/// may be another CPU: then the compiled model prepares constants for a library, and computes the same
/// results.
///
/// # Errors
/// If a kernel cannot be scheduled or compiled, or memory does not suffice for its constants.
pub fn compile(fused: Fused, target: &Target, schedule: Schedule) -> Result<Compiled, CompileError> {
    compile_as(fused, target, schedule, CompileOptions::default())
}

/// Compiles as [`compile`] does, with options.
///
/// # Errors
/// As [`compile`].
pub fn compile_as(
    fused: Fused,
    target: &Target,
    schedule: Schedule,
    making: CompileOptions,
) -> Result<Compiled, CompileError> {
    compile_scheduled(fused, target, Scheduling { determined: &|_| Ok(None), scheduled: &alone(schedule) }, making)
}

/// Compiles as [`compile_as`] does, but does not build the program of a kernel whose code is cached.
///
/// # Errors
/// As [`compile`].
pub(crate) fn compile_scheduled(
    fused: Fused,
    target: &Target,
    scheduling: Scheduling,
    making: CompileOptions,
) -> Result<Compiled, CompileError> {
    let code = |compiler: &mut Compiler, Scheduled { program, determined_by }: Scheduled| {
        making.cache.code(compiler, program, determined_by.as_deref())
    };
    let known = |compiler: &Compiler, text: &str| making.cache.known_code(compiler, text);
    compiled(fused, target, scheduling, Makers { known: &known, code: &code }, making.for_runs)
}

/// Compiles as [`compile`] does in a build without LLVM: with our own back end where it supports the target,
/// in a tenth of the time, to code that is about as fast.
///
/// # Errors
/// As [`compile`].
pub fn compile_quickly(fused: Fused, target: &Target, schedule: Schedule) -> Result<Compiled, CompileError> {
    let code = |compiler: &mut Compiler, scheduled: Scheduled| {
        let lowered = lower::lower(&scheduled.program);
        match compiler.is_quick() {
            true => runtime::Code::compile_without_llvm(compiler, lowered),
            false => runtime::Code::compile(compiler, lowered),
        }
    };
    let scheduling = Scheduling { determined: &|_| Ok(None), scheduled: &alone(schedule) };
    compiled(fused, target, scheduling, Makers { known: &|_, _| None, code: &code }, false)
}

/// Scheduled program of a workload.
pub(crate) struct Scheduled {
    /// Scheduled program.
    pub program: Program,
    /// Cache key: a text that determines the program, if any.
    pub determined_by: Option<String>,
}

/// Functions that schedule the programs of workloads.
#[derive(Clone, Copy)]
pub(crate) struct Scheduling<'a> {
    /// Cache key of a workload's program, available before the program is built.
    pub determined: &'a dyn Fn(&Workload) -> Result<Option<String>, String>,
    /// Scheduled program of a workload.
    pub scheduled: &'a dyn Fn(&Workload) -> Result<Scheduled, String>,
}

/// Wraps a schedule whose programs have no cache keys.
fn alone(schedule: Schedule) -> impl Fn(&Workload) -> Result<Scheduled, String> {
    move |workload| schedule(workload).map(|program| Scheduled { program, determined_by: None })
}

/// Compiler of scheduled programs.
type MakeCode<'a> =
    &'a (dyn Fn(&mut Compiler, Scheduled) -> Result<runtime::Code, tilewright_codegen::CompileError> + Sync);

/// Sources of code.
#[derive(Clone, Copy)]
struct Makers<'a> {
    /// Lookup of cached code by its program's cache key.
    known: &'a dyn Fn(&Compiler, &str) -> Option<runtime::Code>,
    /// Compiler of programs that are not cached.
    code: MakeCode<'a>,
}

/// Kernels of a model, each once.
#[derive(Default)]
struct Kernels<'a> {
    /// Number of each kernel, by its text.
    numbers: HashMap<String, usize>,
    /// Kernels with code, by their workloads' texts.
    each: Vec<(String, &'a Kernel)>,
}

impl<'a> Kernels<'a> {
    fn of(fused: &'a Fused) -> Kernels<'a> {
        let mut kernels = Kernels::default();
        for (step, _) in fused.all() {
            let Step::Kernel(kernel) = step else { continue };
            if let Entry::Vacant(place) = kernels.numbers.entry(kernel.code_name()) {
                kernels.each.push((place.key().clone(), kernel));
                place.insert(kernels.each.len() - 1);
            }
        }
        kernels
    }

    /// Scheduled program of a kernel.
    fn program(&self, at: usize, scheduling: Scheduling) -> Result<Scheduled, CompileError> {
        let (text, kernel) = &self.each[at];
        let Scheduled { mut program, determined_by } =
            (scheduling.scheduled)(&kernel.workload).map_err(|why| refuse(text, why))?;
        if let Some((_, range, along)) = kernel.open.as_ref().and_then(|open| open.each.as_ref()) {
            program = repeat(program, "each", *range, along);
        }
        Ok(Scheduled { program, determined_by: determined_by.map(|by| format!("{text} {by}")) })
    }

    /// Code of all kernels, in order.
    fn codes(
        &self,
        target: &Target,
        scheduling: Scheduling,
        makers: Makers,
    ) -> Result<Vec<runtime::Code>, CompileError> {
        let compiler = || Compiler::for_arguments(target_here(target), ArgumentAlign::Elements);
        // Loading cached code takes less time than starting another thread.
        let (own, mut codes, mut programs) = (compiler(), Vec::new(), Vec::new());
        for (at, (text, kernel)) in self.each.iter().enumerate() {
            let determined_by = (scheduling.determined)(&kernel.workload).map_err(|why| refuse(text, why))?;
            let known = determined_by.and_then(|by| (makers.known)(&own, &format!("{text} {by}")));
            if known.is_none() {
                programs.push((text, self.program(at, scheduling)?));
            }
            codes.push(known);
        }
        let made = |compiler: &mut Compiler, (text, scheduled): (&String, Scheduled)| {
            (makers.code)(compiler, scheduled).map_err(|error| refuse(text, error.to_string()))
        };
        let mut made = on_all_cores(programs, compiler, made).into_iter();
        let each = codes.into_iter().map(|known| known.map_or_else(|| made.next().expect("one of each"), Ok));
        each.collect()
    }
}

/// Error of a kernel that has no code.
fn refuse(workload: &str, why: String) -> CompileError {
    CompileError::Kernel { workload: workload.to_owned(), why }
}

fn compiled(
    mut fused: Fused,
    target: &Target,
    scheduling: Scheduling,
    makers: Makers,
    for_runs: bool,
) -> Result<Compiled, CompileError> {
    let places: Vec<Places> = fused.forms().map(Places::new).collect();
    if for_runs {
        // Libraries run items one by one.
        let groups = fused.groups(&places[0]);
        if let Some(items) = &mut fused.items {
            items.groups = groups;
        }
    }
    let kernels = Kernels::of(&fused);
    if target.gpu.is_some() {
        let lowered = |at: usize| {
            let program = kernels.program(at, scheduling)?.program;
            lower_gpu(&program).map_err(|error| refuse(&kernels.each[at].0, error.to_string()))
        };
        let made = (0..kernels.each.len()).map(lowered).collect::<Result<Vec<_>, _>>()?;
        let kept = made.iter().map(|kernel| kept_by(&kernel.program)).collect();
        let facts = KernelFacts { numbers: kernels.numbers, kept, prepared_by: vec![None; made.len()] };
        let (plan, origins, memory) = planned(&fused, &places, GPU_LINE, facts)?;
        let model = AnyModel::Gpu(Arc::new(GpuModel { plan, kernels: made, target: target.clone() }));
        return Ok(Compiled { model, fused, memory, origins, n_guessed: 0 });
    }
    let codes = kernels.codes(target, scheduling, makers)?;
    let numbers = kernels.numbers;
    let kept = codes.iter().map(|code| kept_of(code.interface())).collect();
    // Nets of other sizes may have the same weights in the same layout.
    let prepared_by = |code: &runtime::Code| fused.sized.as_ref().and_then(|_| text_of_preparation(code));
    let facts = KernelFacts { numbers, kept, prepared_by: codes.iter().map(prepared_by).collect() };
    let (plan, origins, memory) = planned(&fused, &places, 1, facts)?;
    let model = if for_runs {
        let pieces = fused.pieces.iter_mut().flat_map(|piece| &mut piece.net.values);
        fused.net.values.iter_mut().chain(pieces).for_each(|value| value.constant = None);
        mapped::let_go();
        Model::for_runs(plan, codes)?
    } else {
        Model::new(plan, codes)?
    };
    let model = AnyModel::Cpu(Arc::new(model));
    Ok(Compiled { model, fused, memory, origins, n_guessed: 0 })
}

/// Kept buffers of a program, in its order.
fn kept_by(program: &Program) -> Vec<KeptBuffer> {
    let kept = program.buffers.iter().filter(|buffer| buffer.role == Role::Kept);
    kept.map(|b| (b.name.clone(), b.dtype, b.shape.iter().map(|&d| d as usize).collect())).collect()
}

/// Kept buffers of a compiled kernel, in its order.
fn kept_of(interface: &Interface) -> Vec<KeptBuffer> {
    let kept = interface.buffers.iter().filter(|buffer| buffer.role == Role::Kept);
    kept.map(|b| (b.name.clone(), b.dtype, b.shape.iter().map(|&d| d as usize).collect())).collect()
}

/// Whether two byte strings are equal, perhaps because they share memory.
fn are_same(a: &Bytes, b: &Bytes) -> bool {
    a.len() == b.len() && (a.as_ptr() == b.as_ptr() || a == b)
}

/// Text of the code that prepares the constants of a kernel. This is the kernel's own text, except for
/// products with weights of few bits: their panels depend only on the weights and on the machine, which the
/// shapes of the kept buffers reflect.
fn prepared_by(kernel: &Kernel) -> String {
    let of_weights = match kernel.workload.structure() {
        Structure::Packed(_) => kernel.workload.with_size("m", 1),
        _ => None,
    };
    match of_weights.and_then(|workload| workload.with_epilogue(Vec::new()).ok()) {
        Some(of_weights) => of_weights.to_string(),
        None => kernel.code_name(),
    }
}

/// Text of the part of a kernel that prepares constants, with the buffers that it uses; `None` if there is no
/// such part.
fn text_of_preparation(code: &runtime::Code) -> Option<String> {
    let program = code.program();
    let is_used =
        |buffer: &&CallerBuffer| buffer.read_by.iter().chain(&buffer.written_by).any(|part| *part == Part::Prepare);
    let used = code.interface().buffers.iter().filter(is_used);
    let buffers: String = used.map(|b| format!("{} {} {:?}\n", b.name, b.dtype.name(), b.shape)).collect();
    let statements = program.prepare.iter().map(|stmt| stmt_to_string(program, stmt));
    (!program.prepare.is_empty()).then(|| statements.fold(buffers, |all, stmt| all + &stmt))
}

/// Bytes of the memory of values whose kernels assume that they have more rows, or that have a place for each
/// item of a group.
fn rooms(fused: &Fused, places: &Places) -> HashMap<ValueId, usize> {
    let mut rooms = HashMap::new();
    let mut extend = |id: ValueId, n_elements: usize| {
        let ValuePart { root, offset } = places.locate(id);
        let (value, whole) = (fused.net.value(id), fused.net.value(root));
        let room = (offset + n_elements * value.dtype.size()).next_multiple_of(whole.dtype.size());
        if room > whole.n_bytes() as usize {
            let own = rooms.entry(root).or_insert(room);
            *own = room.max(*own);
        }
    };
    for step in &fused.steps {
        match step {
            Step::Kernel(kernel) => {
                for (at, id) in kernel.inputs.iter().chain([&kernel.output]).enumerate() {
                    if let Some(n) = kernel.room(at) {
                        extend(*id, n);
                    }
                }
            }
            Step::Sequence(sequence) => {
                rooms_of_steps(fused, sequence, places).into_iter().for_each(|(id, n)| extend(id, n));
            }
            _ => {}
        }
    }
    let groups = fused.items.as_ref().and_then(|items| items.groups.as_ref());
    for root in groups.iter().flat_map(|groups| groups.values.keys()) {
        let own = rooms.entry(*root).or_default();
        *own = fused.bytes_of_group(*root).unwrap_or(0).max(*own);
    }
    rooms
}

/// Numbers of elements that the steps of a sequence assume values to have: of parts of wider rows, which end
/// in the row behind, and of what kernels read that assume that there are more rows.
fn rooms_of_steps(fused: &Fused, sequence: &Steps, places: &Places) -> Vec<(ValueId, usize)> {
    let mut rooms = Vec::new();
    let mut extend = |id: ValueId, n_elements: usize| {
        let ValuePart { root, offset } = places.locate(id);
        let n_elements = n_elements + offset / fused.net.value(root).dtype.size();
        match sequence.moving.iter().find(|moving| moving.value == root) {
            None => rooms.push((root, n_elements)),
            Some(moving) => {
                let each = (0..sequence.n_steps).map(|step| moving.at(step));
                rooms.extend(each.map(|(of, first)| (of, first as usize + n_elements)));
            }
        }
    };
    sequence.moving.iter().for_each(|moving| extend(moving.value, fused.net.value(moving.value).n_elements() as usize));
    for step in &sequence.steps {
        let Step::Kernel(kernel) = step else { continue };
        for (at, id) in kernel.inputs.iter().chain([&kernel.output]).enumerate() {
            if let Some(n) = kernel.room(at) {
                extend(*id, n);
            }
        }
    }
    rooms
}

/// Plans the memory of intermediate results, each padded to a multiple of `line` bytes; also returns the
/// value that owns each part.
pub fn lay_out(fused: &Fused, places: &Places, line: usize) -> (Vec<ValueId>, ArenaLayout) {
    let mut blocks: Vec<(ValueId, Block)> = Vec::new();
    let mut at_of: HashMap<ValueId, usize> = HashMap::new();
    let (net, rooms) = (&fused.net, rooms(fused, places));
    let mut touch = |id: ValueId, step: usize| {
        let root = places.locate(id).root;
        let is_state = net.states.iter().any(|state| state.value == root);
        let is_input = net.inputs.contains(&root) && !fused.is_packed_apart(root);
        let is_passed = is_input || places.outputs[root.0].is_some() || is_state;
        if is_passed || net.value(root).constant.is_some() {
            return;
        }
        let at = *at_of.entry(root).or_insert_with(|| {
            let n_bytes = rooms.get(&root).copied().unwrap_or(net.value(root).n_bytes() as usize);
            let block = Block { bytes: n_bytes.next_multiple_of(line), first: step, last: step };
            blocks.push((root, block));
            blocks.len() - 1
        });
        // A value with a place for each item lives as long as any item is being processed.
        let groups = fused.items.as_ref().and_then(|items| items.groups.as_ref());
        let groups = groups.filter(|groups| groups.values.contains_key(&root));
        let [first, last] = groups.map_or([step; 2], |groups| groups.turn_of(step));
        blocks[at].1.first = blocks[at].1.first.min(first);
        blocks[at].1.last = blocks[at].1.last.max(last);
    };
    // Values that vary with the size are written before the first step.
    fused.numbers().for_each(|(id, _)| touch(id, 0));
    let unpacked = net.inputs.iter().filter(|id| !fused.is_read_in_place(**id));
    unpacked.for_each(|id| touch(*id, 0));
    for (at, step) in fused.steps.iter().enumerate() {
        match step {
            Step::Kernel(kernel) => {
                let read = kernel.inputs.iter().enumerate().filter(|(at, _)| *at != 1 || kernel.apart().is_none());
                read.map(|(_, id)| id).chain([&kernel.output]).for_each(|id| touch(*id, at));
            }
            Step::Sequence(sequence) => {
                let moving: HashSet<ValueId> = sequence.moving.iter().map(|moving| moving.value).collect();
                for step in &sequence.steps {
                    let Step::Kernel(kernel) = step else { continue };
                    let own = kernel.inputs.iter().chain([&kernel.output]);
                    own.filter(|id| !moving.contains(&places.locate(**id).root)).for_each(|id| touch(*id, at));
                }
                sequence.outer_values().for_each(|id| touch(id, at));
            }
            Step::Host(node) => node.inputs.iter().flatten().chain(&node.outputs).for_each(|id| touch(*id, at)),
            Step::Append { from, .. } => touch(*from, at),
            Step::Set { from, to } => [from, to].into_iter().for_each(|id| touch(*id, at)),
            Step::While(round) | Step::Again(round) => round.carried.iter().for_each(|id| touch(*id, at)),
            Step::Part { .. } | Step::Join { .. } => {}
        }
    }
    for copy in &places.copies {
        touch(copy.from, copy.before);
        if copy.before < fused.steps.len() {
            touch(copy.to, copy.before);
        }
    }
    // A value that is live both inside a loop and before or after it is live in all iterations.
    let mut begun = Vec::new();
    for (at, step) in fused.steps.iter().enumerate() {
        match step {
            Step::While(_) => begun.push(at),
            Step::Again(_) => {
                let first = begun.pop().expect("loops end where they have begun");
                for (_, block) in &mut blocks {
                    let is_within = first <= block.first && block.last <= at;
                    if !is_within && block.first <= at && first <= block.last {
                        (block.first, block.last) = (block.first.min(first), block.last.max(at));
                    }
                }
            }
            _ => {}
        }
    }
    let memory = plan_memory(&blocks.iter().map(|(_, block)| *block).collect::<Vec<_>>());
    (blocks.into_iter().map(|(id, _)| id).collect(), memory)
}

/// Buffer that a kernel keeps: its name, its type and its shape.
type KeptBuffer = (String, DType, Vec<usize>);

struct PlanBuilder<'a> {
    fused: &'a Fused,
    places: &'a Places,
    plan: Plan,
    /// Alignment of tensors in the arena.
    line: usize,
    memory: ArenaLayout,
    /// Plan tensor of each value that owns its memory.
    tensors: HashMap<ValueId, usize>,
    kernels: KernelFacts,
    /// Kept buffers, by the preparation and the parts of constants that they were prepared from.
    prepared: HashMap<(Preparation, Vec<PartOf>), Vec<TensorSlice>>,
    origins: Vec<Option<usize>>,
    /// Guard of the steps that are being added.
    guard: Option<usize>,
    /// Memory of values in bytes, if it is more than theirs; see [`rooms`].
    rooms: HashMap<ValueId, usize>,
    /// Constants of earlier pieces.
    given: Vec<usize>,
    /// Values in the current step of a sequence: the value that each stands for, and its offset in bytes.
    moving: HashMap<ValueId, (ValueId, usize)>,
    /// Inputs that are packed in the caller's memory, each with the tensor that the caller passes.
    packed: Vec<(ValueId, usize)>,
}

/// Facts about the kernels of a plan.
struct KernelFacts {
    /// Number of each kernel, by its text.
    numbers: HashMap<String, usize>,
    /// Buffers that each kernel keeps.
    kept: Vec<Vec<KeptBuffer>>,
    /// Text of the code that prepares each kernel's buffers, if more than the kernel's own text must be
    /// compared.
    prepared_by: Vec<Option<String>>,
}

/// Text of the code that prepares buffers, and the buffers.
type Preparation = (String, Vec<KeptBuffer>);

/// Part of a constant: number of the constant, offset and length.
type PartOf = (usize, usize, usize);

/// Net of a plan, with its steps and its tensors.
type PlannedForm<'a> = (&'a Fused, Range<usize>, Range<usize>);

/// Makes the plan of a run, or of its pieces, with the origins of its steps and the largest memory plan of a
/// piece.
fn planned(
    fused: &Fused,
    places: &[Places],
    line: usize,
    kernels: KernelFacts,
) -> Result<(Plan, Vec<Option<usize>>, ArenaLayout), CompileError> {
    let mut pieces = fused.forms().zip(places);
    let (form, of_form) = pieces.next().expect("there is one");
    let mut job = PlanBuilder::new(form, of_form, line, kernels).done(0)?;
    if let Some(items) = &fused.items {
        job.plan.items = Some(items.dim.clone());
        let ports = [job.plan.ports(Place::Input), job.plan.ports(Place::Output)].concat();
        for (tensor, in_items) in ports.into_iter().zip(&items.ports) {
            job.plan.tensors[tensor].in_items = *in_items;
        }
        job.plan.together = items.groups.as_ref().map(|groups| job.together(groups));
    }
    if fused.pieces.is_empty() && fused.rows.is_none() && fused.sized.is_none() {
        return Ok((job.plan, job.origins, job.memory));
    }
    let mut made: Vec<PlannedForm> = vec![(form, 0..job.plan.steps.len(), 0..job.plan.tensors.len())];
    let mut memory = job.memory.clone();
    for (form, of_form) in pieces {
        let first = made.iter().map(|(form, ..)| form.each().count()).sum();
        let [first_step, first_tensor] = [job.plan.steps.len(), job.plan.tensors.len()];
        job = job.piece(form, of_form).done(first)?;
        made.push((form, first_step..job.plan.steps.len(), first_tensor..job.plan.tensors.len()));
        if job.memory.total > memory.total {
            memory = job.memory.clone();
        }
    }
    let PlanBuilder { mut plan, origins, .. } = job;
    if let Some(sized) = &fused.sized {
        plan.members = Some(members(&mut plan, sized, &made));
        return Ok((plan, origins, memory));
    }
    for (form, steps, _) in made {
        let most = form.open.as_ref().map_or(0, |open| open.dim.most);
        plan.pieces.push(Piece { items: form.n_items, n: form.n_rows(), most, steps });
    }
    let least = fused.pieces.last().unwrap_or(fused);
    (plan.dim, plan.appends) = (least.open.as_ref().map(|open| open.dim.clone()), least.appends());
    plan.rows.clone_from(&fused.rows);
    let ports = [plan.ports(Place::Input), plan.ports(Place::Output)].concat();
    for (tensor, axis) in ports.into_iter().zip(&fused.axes_of_rows) {
        let most = fused.n_rows();
        let of = |axis: &usize| {
            let factor = plan.tensors[tensor].shape[*axis] as i64 / most;
            (*axis, RunSize { factor, ..RunSize::constant(0) })
        };
        if let Some(open) = axis.as_ref().map(of) {
            plan.tensors[tensor].open = Some(open);
        }
    }
    Ok((plan, origins, memory))
}

/// Makes the members of a plan from its planned nets: one for each combination of sizes. Members that differ
/// only in a dimension of which their net supports any size share their steps.
fn members(plan: &mut Plan, sized: &SizedNets, made: &[PlannedForm]) -> Members {
    let of_ports = [plan.ports(Place::Input), plan.ports(Place::Output)].concat();
    let places: Vec<Place> = of_ports.iter().map(|tensor| plan.tensors[*tensor].place).collect();
    let mut each = Vec::new();
    for ((form, steps, tensors), sizes) in made.iter().zip(&sized.sizes) {
        let port = |place: &Place| {
            let own = tensors.clone().find(|tensor| plan.tensors[*tensor].place == *place);
            own.expect("invariant: each net has all inputs and outputs")
        };
        let ports: Vec<usize> = places.iter().map(port).collect();
        each.push(Member { sizes: sizes.clone(), steps: steps.clone(), ports: ports.clone() });
        let Some(dim) = form.open.as_ref().map(|open| &open.dim) else { continue };
        let opened = sized.dims.iter().position(|own| own == dim).expect("invariant: it is one of the model's");
        for size in (dim.least..dim.most).rev().filter(|size| dim.has(*size)) {
            let mut sizes = sizes.clone();
            sizes[opened] = size;
            let mut at_size = |port: &usize| {
                let of_most = &plan.tensors[*port];
                let own = PlanTensor { shape: of_most.shape_at([size, 0]), open: None, ..of_most.clone() };
                plan.tensors.push(own);
                plan.tensors.len() - 1
            };
            let ports = ports.iter().map(&mut at_size).collect();
            each.push(Member { sizes, steps: steps.clone(), ports });
        }
    }
    // Each member gives tensors the shapes of its sizes.
    for tensor in &mut plan.tensors {
        if matches!(tensor.place, Place::Input(_) | Place::Output(_)) {
            tensor.open = None;
        }
    }
    each.sort_by(|a, b| b.sizes.cmp(&a.sizes));
    Members { dims: sized.dims.clone(), each }
}

/// Type that a run uses for a value of the net.
fn dtype_of(net: &Net, id: ValueId) -> Result<DType, CompileError> {
    let value = net.value(id);
    // Integers of fewer than 8 bits are stored in a byte each.
    let stored = net.element_type(id).map_or(value.dtype.name(), |dtype| dtype.name());
    let found = DType::ALL.into_iter().find(|(_, name)| *name == stored);
    let error = || CompileError::Dtype { name: value.name.clone(), dtype: value.dtype.name() };
    found.map(|(dtype, _)| dtype).ok_or_else(error)
}

impl<'a> PlanBuilder<'a> {
    fn new(fused: &'a Fused, places: &'a Places, line: usize, kernels: KernelFacts) -> PlanBuilder<'a> {
        PlanBuilder {
            fused,
            places,
            plan: Plan {
                dim: fused.open.as_ref().map(|open| open.dim.clone()),
                second: fused.open.as_ref().and_then(|open| open.second.clone()),
                appends: fused.appends(),
                ..Plan::default()
            },
            line,
            memory: ArenaLayout::default(),
            tensors: HashMap::new(),
            kernels,
            prepared: HashMap::new(),
            origins: Vec::new(),
            guard: None,
            rooms: rooms(fused, places),
            given: Vec::new(),
            packed: Vec::new(),
            moving: HashMap::new(),
        }
    }

    /// Continues with the steps of another piece, which shares constants and states.
    fn piece(self, fused: &'a Fused, places: &'a Places) -> PlanBuilder<'a> {
        let (tensors, guard, moving, memory, packed) = Default::default();
        let given = (0..self.plan.constants.len()).collect();
        let rooms = rooms(fused, places);
        PlanBuilder { fused, places, tensors, guard, moving, memory, packed, rooms, given, ..self }
    }

    /// Plans all steps; their origins are numbered from `first` on.
    fn done(mut self, first: usize) -> Result<PlanBuilder<'a>, CompileError> {
        self.ports()?;
        self.states()?;
        self.arena()?;
        self.numbers()?;
        self.unpack_inputs()?;
        let mut copies = self.places.copies.iter().peekable();
        let conditions = conditions(self.fused, self.places);
        let (mut origin, mut begun) = (first, Vec::new());
        for (at, step) in self.fused.steps.iter().enumerate() {
            self.guard = None;
            while let Some(copy) = copies.next_if(|copy| copy.before == at) {
                let from = self.slice(copy.from)?;
                let whole = self.slice(copy.to)?;
                let to = TensorSlice { offset: whole.offset + copy.offset, n_bytes: from.n_bytes, ..whole };
                let rows = self.open_rows(copy.from, from.n_bytes);
                self.copy(from, to, rows);
            }
            self.guard = self.guard_of(&conditions[at])?;
            match step {
                Step::Kernel(kernel) => {
                    for matrix in 0..kernel.apart().unwrap_or(1) {
                        let work = self.kernel(kernel, self.number(kernel), matrix)?;
                        self.push(&kernel.origin, work, Some(origin));
                    }
                }
                Step::Sequence(sequence) => {
                    self.sequence(sequence, origin)?;
                    origin += sequence.steps.len();
                    continue;
                }
                Step::Host(node) => {
                    let work = self.host(node)?;
                    self.push(&node.origin, work, Some(origin));
                }
                Step::Append { from, to, axis } => self.append(*from, *to, *axis, origin)?,
                Step::Set { from, to } => {
                    let (from, to) = (self.slice(*from)?, self.slice(*to)?);
                    self.copy(from, to, None);
                }
                Step::While(round) => {
                    begun.push(self.plan.steps.len());
                    let truth = self.slice(round.truth)?;
                    self.push("while", Work::While { truth, end: 0 }, Some(origin));
                }
                Step::Again(_) => {
                    let to = begun.pop().expect("loops end where they have begun");
                    let here = self.plan.steps.len();
                    if let Work::While { end, .. } = &mut self.plan.steps[to].work {
                        *end = here;
                    }
                    self.push("again", Work::Again { to }, Some(origin));
                }
                Step::Part { .. } | Step::Join { .. } => {}
            }
            origin += 1;
        }
        self.guard = None;
        for copy in copies {
            let from = self.slice(copy.from)?;
            // Copies at the end go to the outputs.
            let value = self.fused.net.value(copy.from);
            let dtype = dtype_of(&self.fused.net, copy.from)?;
            let shape = value.ty().shape;
            let name = self.fused.net.value(self.fused.net.outputs[copy.offset]).name.clone();
            let to = self.plan.tensor(name, dtype, &shape, Place::Output(copy.offset));
            self.plan.tensors[to].open = self.open_axis(copy.from);
            let rows = self.open_rows(copy.from, from.n_bytes);
            let to = self.plan.whole(to);
            match self.fused.is_packed_apart(copy.from) {
                true => self.move_rows(copy.from, from, to, false),
                false => self.copy(from, to, rows),
            }
        }
        Ok(self)
    }

    /// Unpacks inputs whose open dimension is not the outermost into memory with room for the largest size.
    fn unpack_inputs(&mut self) -> Result<(), CompileError> {
        for (id, tensor) in self.packed.clone() {
            if self.fused.is_read_in_place(id) {
                continue;
            }
            let (from, to) = (self.plan.whole(tensor), self.slice(id)?);
            self.move_rows(id, from, to, true);
        }
        Ok(())
    }

    /// Moves the elements of a value whose open dimension is not the outermost between packed memory and
    /// memory with room for the largest size: one move for each index of the outer dimensions. Of rows, it
    /// moves as many as a piece has.
    fn move_rows(&mut self, id: ValueId, from: TensorSlice, to: TensorSlice, is_from_packed: bool) {
        let Some((axis, size)) = self.fused.open_behind(id) else {
            let n_outer = self.fused.n_outer_of_rows(id);
            let n_bytes = from.n_bytes / n_outer;
            for at in 0..n_outer {
                let item = |of: TensorSlice| TensorSlice { offset: of.offset + at * n_bytes, n_bytes, ..of };
                self.copy(item(from), item(to), None);
            }
            return;
        };
        let value = self.fused.net.value(id);
        let n = value.shape[..axis].iter().product::<i64>();
        let inner = value.shape[axis + 1..].iter().product::<i64>() * value.dtype.size() as i64;
        let name = value.name.clone();
        for at in 0..n {
            let of_room = RunSize::constant(at * value.shape[axis] * inner);
            let mut offsets = [size.scaled(at * inner), of_room];
            if !is_from_packed {
                offsets.reverse();
            }
            let rows = CopiedRows { n: 1, pitches: [0; 2], offsets, n_bytes: size.scaled(inner) };
            self.push(&name, Work::Move { from, to, rows }, None);
        }
    }

    /// Steps and tensors of groups of items.
    fn together(&self, groups: &Groups) -> Together {
        let steps = self.fused.steps.iter().zip(&groups.steps);
        let are_together: Vec<bool> = steps.flat_map(|(step, together)| vec![*together; step.n_parts()]).collect();
        let of_step = |origin: &Option<usize>| origin.is_some_and(|at| are_together[at]);
        let place = |(id, pitch): (&ValueId, &RunSize)| {
            let tensor = *self.tensors.get(id)?;
            matches!(self.plan.tensors[tensor].place, Place::Arena(_)).then_some((tensor, *pitch))
        };
        let mut tensors: Vec<(usize, RunSize)> = groups.values.iter().filter_map(place).collect();
        tensors.sort_unstable_by_key(|(tensor, _)| *tensor);
        Together { most: groups.most, steps: self.origins.iter().map(of_step).collect(), tensors }
    }

    /// Finds or adds the guard under which all of the given conditions hold, outermost first.
    fn guard_of(&mut self, conditions: &[BranchCondition]) -> Result<Option<usize>, CompileError> {
        let mut outer = None;
        for &(truth, holds) in conditions {
            let guard = StepCondition { truth: self.slice(truth)?, holds, outer };
            let known = self.plan.guards.iter().position(|known| *known == guard);
            outer = Some(known.unwrap_or(self.plan.guards.len()));
            if known.is_none() {
                self.plan.guards.push(guard);
            }
        }
        Ok(outer)
    }

    /// Adds a copy, if there is anything to copy.
    fn copy(&mut self, from: TensorSlice, to: TensorSlice, rows: Option<(RunSize, usize)>) {
        if from.n_bytes > 0 {
            self.push("copy", Work::Copy { from, to, rows }, None);
        }
    }

    fn push(&mut self, name: &str, work: Work, origin: Option<usize>) {
        self.plan.steps.push(runtime::PlanStep { name: name.to_owned(), work, guard: self.guard });
        self.origins.push(origin);
    }

    /// Adds the tensors that the caller passes.
    fn ports(&mut self) -> Result<(), CompileError> {
        let fused = self.fused;
        let net = &fused.net;
        // A branch that is not taken may leave a look-up out.
        let has_branches = net.nodes.iter().any(is_selection);
        for (at, &id) in net.inputs.iter().enumerate() {
            let tensor = self.tensor(id, Place::Input(at))?;
            let selects = net.selections.iter().filter(|(index, _)| *index == id && !has_branches);
            self.plan.tensors[tensor].selects_among = selects.map(|(_, n)| *n).min();
            if self.fused.is_packed_apart(id) {
                self.packed.push((id, tensor));
                self.tensors.remove(&id);
            }
        }
        for (at, place) in self.places.outputs.iter().enumerate() {
            if let Some(output) = place {
                let id = ValueId(at);
                let named = self.fused.net.outputs[*output];
                let dtype = dtype_of(&self.fused.net, named)?;
                let value = self.fused.net.value(named);
                let tensor = self.plan.tensor(value.name.clone(), dtype, &value.ty().shape, Place::Output(*output));
                self.plan.tensors[tensor].open = self.open_axis(named);
                self.tensors.insert(id, tensor);
            }
        }
        Ok(())
    }

    /// Adds the tensors that persist between runs.
    fn states(&mut self) -> Result<(), CompileError> {
        for (at, state) in self.fused.net.states.iter().enumerate() {
            let tensor = self.tensor(state.value, Place::State(at))?;
            self.plan.tensors[tensor].name.clone_from(&state.present);
        }
        Ok(())
    }

    /// Adds copies of numbers that vary with the size to where kernels read them, from a table with a row for
    /// each size.
    fn numbers(&mut self) -> Result<(), CompileError> {
        let Some(open) = &self.fused.open else { return Ok(()) };
        for (id, sizes) in self.fused.numbers() {
            let of_size = sizes.iter().find(|size| size.factor != 0).copied().unwrap_or(RunSize::constant(0));
            let dim = open.dim_of(of_size).clone();
            let of = |size: i64| RunSize { dim: of_size.dim, factor: size, ..RunSize::constant(-size * dim.least) };
            let to = self.slice(id)?;
            let value = self.fused.net.value(id);
            let dtype = dtype_of(&self.fused.net, id)?;
            let n_bytes = dtype.bytes() as usize;
            let number = |number: i64| match dtype {
                DType::F32 => (number as f32).to_le_bytes().to_vec(),
                DType::F64 => (number as f64).to_le_bytes().to_vec(),
                _ => number.to_le_bytes()[..n_bytes].to_vec(),
            };
            // Rows of consecutive numbers overlap: one table has the smallest to the largest number.
            let (table, row_at): (Vec<u8>, RunSize) = match are_counted(sizes) {
                true => {
                    let firsts = [dim.least, dim.most].map(|size| sizes[0].at(size));
                    let (first, last) = (firsts[0].min(firsts[1]), firsts[0].max(firsts[1]) + sizes.len() as i64);
                    let RunSize { factor, term, .. } = sizes[0];
                    let times = |n: i64| n * n_bytes as i64;
                    let row_at = RunSize { factor: times(factor), term: times(term - first), ..sizes[0] };
                    ((first..last).flat_map(number).collect(), row_at)
                }
                false => {
                    let all = (dim.least..=dim.most).flat_map(|size| sizes.iter().map(move |of| of.at(size)));
                    (all.flat_map(number).collect(), of((n_bytes * sizes.len()) as i64))
                }
            };
            let shape = [table.len() / n_bytes];
            self.plan.constants.push(Constant::Data(table.into()));
            let place = Place::Constant(self.plan.constants.len() - 1);
            let tensor = self.plan.tensor(format!("{}.table", value.name), dtype, &shape, place);
            let (from, row) = (self.plan.whole(tensor), (sizes.len() * n_bytes) as i64);
            let offsets = [row_at, RunSize::constant(0)];
            let rows = CopiedRows { n: 1, pitches: [0; 2], offsets, n_bytes: RunSize::constant(row) };
            self.push("copy", Work::Move { from, to, rows }, None);
        }
        Ok(())
    }

    /// Appends new elements to a state along a dimension.
    fn append(&mut self, from: ValueId, to: ValueId, axis: usize, origin: usize) -> Result<(), CompileError> {
        let net = &self.fused.net;
        let (new, all) = (net.shape(from).to_vec(), net.shape(to).to_vec());
        let of_value = |id: ValueId, n: i64| {
            let open = self.fused.open.as_ref().and_then(|open| open.axes.get(id.0)?.get(axis).copied().flatten());
            open.unwrap_or(RunSize::constant(n))
        };
        let (of_new, of_all) = (of_value(from, new[axis]), of_value(to, all[axis]));
        let row = new[axis + 1..].iter().product::<i64>() * net.value(from).dtype.size() as i64;
        let before = RunSize { factor: of_all.factor - of_new.factor, term: of_all.term - of_new.term, ..of_all };
        let rows = CopiedRows {
            n: new[..axis].iter().product::<i64>() as usize,
            pitches: [new[axis] * row, all[axis] * row].map(|n| n as usize),
            offsets: [RunSize::constant(0), before.scaled(row)],
            n_bytes: of_new.scaled(row),
        };
        let name = net.value(to).name.clone();
        let (from, to) = (self.slice(from)?, self.slice(to)?);
        self.push(&name, Work::Move { from, to, rows }, Some(origin));
        Ok(())
    }

    /// Number of rows of a value of `n_bytes` bytes, and bytes of a row, if a run determines how many there
    /// are.
    fn open_rows(&self, id: ValueId, n_bytes: usize) -> Option<(RunSize, usize)> {
        let shape = self.fused.net.shape(id);
        let (axis, size) = self.open_axis(id).filter(|(axis, _)| shape[..*axis].iter().all(|n| *n == 1))?;
        Some((size, n_bytes / shape[axis].max(1) as usize))
    }

    /// First open dimension of a value.
    fn open_axis(&self, id: ValueId) -> Option<(usize, RunSize)> {
        let axes = self.fused.open.as_ref()?.axes.get(id.0)?;
        axes.iter().enumerate().find_map(|(axis, size)| Some((axis, (*size)?)))
    }

    fn tensor(&mut self, id: ValueId, place: Place) -> Result<usize, CompileError> {
        let dtype = dtype_of(&self.fused.net, id)?;
        let value = self.fused.net.value(id);
        let mut shape = value.ty().shape;
        if matches!(place, Place::Arena(_)) {
            // Rows that this piece does not have, or items of a group, follow its own in memory.
            if let Some(n_bytes) = self.rooms.get(&id) {
                shape = vec![n_bytes / dtype.bytes() as usize];
            }
        }
        let tensor = self.plan.tensor(value.name.clone(), dtype, &shape, place);
        if matches!(place, Place::Input(_)) {
            self.plan.tensors[tensor].open = self.open_axis(id);
        }
        self.tensors.insert(id, tensor);
        Ok(tensor)
    }

    /// Lays out intermediate results.
    fn arena(&mut self) -> Result<(), CompileError> {
        let (roots, memory) = lay_out(self.fused, self.places, self.line);
        for (id, offset) in roots.iter().zip(&memory.offsets) {
            self.tensor(*id, Place::Arena(*offset))?;
        }
        self.memory = memory;
        Ok(())
    }

    /// Adds the steps of a sequence, unrolled: the work of each time step is the same, on other slices of the
    /// moving values.
    fn sequence(&mut self, sequence: &Steps, origin: usize) -> Result<(), CompileError> {
        let kernels = sequence.steps.iter().zip(origin..).filter_map(|(step, origin)| match step {
            Step::Kernel(kernel) => Some((kernel, self.number(kernel), origin)),
            _ => None,
        });
        let kernels: Vec<_> = kernels.collect();
        for at in 0..sequence.n_steps {
            for moving in &sequence.moving {
                let (of, n_elements) = moving.at(at);
                let size = self.fused.net.value(moving.value).dtype.size();
                self.moving.insert(moving.value, (of, n_elements as usize * size));
            }
            for &(kernel, number, origin) in &kernels {
                let work = self.kernel(kernel, number, 0)?;
                self.push(&kernel.origin, work, Some(origin));
            }
        }
        self.moving.clear();
        Ok(())
    }

    /// Slice of a value in the plan.
    fn slice(&mut self, id: ValueId) -> Result<TensorSlice, CompileError> {
        let mut location = self.places.locate(id);
        if let Some((of, offset)) = self.moving.get(&location.root) {
            let whole = self.places.locate(*of);
            location = ValuePart { root: whole.root, offset: whole.offset + offset + location.offset };
        }
        let n_bytes = self.fused.net.value(id).n_bytes() as usize;
        let tensor = match self.tensors.get(&location.root) {
            Some(tensor) => *tensor,
            None => {
                let constant = self.fused.net.value(location.root).constant.as_ref();
                let data = constant.expect("what is not computed is given").bytes().clone();
                let known = if self.given.is_empty() { None } else { self.given_before(&data) };
                let at = known.unwrap_or_else(|| {
                    self.plan.constants.push(Constant::Data(data));
                    self.plan.constants.len() - 1
                });
                self.tensor(location.root, Place::Constant(at))?
            }
        };
        Ok(TensorSlice { tensor, offset: location.offset, n_bytes })
    }

    /// Slice of one of the `n` matrices of an input in the caller's packed memory.
    fn packed_matrix(&mut self, id: ValueId, [matrix, n]: [i64; 2]) -> TensorSlice {
        let root = self.places.locate(id).root;
        let (_, tensor) = self.packed.iter().find(|(own, _)| *own == root).expect("invariant: it is packed");
        let whole = self.plan.tensors[*tensor].clone();
        let (axis, size) = whole.open.expect("invariant: it is open");
        let shape = whole.shape[axis..].to_vec();
        let row = (whole.n_bytes() / whole.shape[..=axis].iter().product::<usize>()) as i64;
        assert_eq!(size.divisor, 1, "invariant: inputs of a fraction of a length are unpacked");
        let n_ahead = whole.shape[..axis].iter().product::<usize>() as i64;
        assert_eq!(n_ahead, n, "invariant: it has a matrix for each product");
        let part = PlanTensor { shape, open: Some((0, size)), start: Some(size.scaled(matrix * row)), ..whole };
        let known = self.plan.tensors.iter().position(|own| *own == part);
        let at = known.unwrap_or(self.plan.tensors.len());
        if known.is_none() {
            self.plan.tensors.push(part);
        }
        self.plan.whole(at)
    }

    /// Constant of an earlier piece that has the same bytes.
    fn given_before(&self, data: &Bytes) -> Option<usize> {
        let is_same = |known: &Constant| matches!(known, Constant::Data(own) if are_same(own, data));
        self.given.iter().copied().find(|at| is_same(&self.plan.constants[*at]))
    }

    /// Finds the first constant with the same bytes as the constant `at`.
    fn first_like(&self, at: usize) -> usize {
        let Constant::Data(own) = &self.plan.constants[at] else { return at };
        let is_same = |other: &Constant| matches!(other, Constant::Data(other) if are_same(other, own));
        self.plan.constants.iter().position(is_same).unwrap_or(at)
    }

    /// Number of a kernel's code.
    fn number(&self, kernel: &Kernel) -> usize {
        self.kernels.numbers[&kernel.code_name()]
    }

    fn kernel(&mut self, kernel: &Kernel, number: usize, matrix: i64) -> Result<Work, CompileError> {
        let kept = self.kernels.kept[number].clone();
        let ids: Vec<ValueId> = kernel.inputs.iter().copied().chain([kernel.output]).collect();
        let argument = |(at, id): (usize, ValueId)| match kernel.apart() {
            Some(n) if at == 1 => Ok(self.packed_matrix(id, [matrix, n])),
            Some(n) => {
                let whole = self.slice(id)?;
                let n_bytes = whole.n_bytes / n as usize;
                Ok(TensorSlice { offset: whole.offset + n_bytes * matrix as usize, n_bytes, ..whole })
            }
            None => self.slice(id),
        };
        let mut arguments = ids.into_iter().enumerate().map(argument).collect::<Result<Vec<_>, CompileError>>()?;
        for (at, slice) in arguments.iter_mut().enumerate() {
            let PlanTensor { place, dtype, .. } = &self.plan.tensors[slice.tensor];
            if let (Place::Arena(_), Some(n)) = (place, kernel.room(at)) {
                slice.n_bytes = n * dtype.bytes() as usize;
            }
        }
        // Buffers prepared from the same constants in the same way are prepared once.
        let of_constant = |slice: &TensorSlice| match self.plan.tensors[slice.tensor].place {
            Place::Constant(at) => Some((self.first_like(at), slice.offset, slice.n_bytes)),
            _ => None,
        };
        let known: Vec<PartOf> = arguments.iter().filter_map(of_constant).collect();
        let text = self.kernels.prepared_by[number].clone();
        let preparation = (text.unwrap_or_else(|| prepared_by(kernel)), kept.clone());
        if let Some(kept) = self.prepared.get(&(preparation.clone(), known.clone())) {
            let kept = kept.clone();
            let (parts, sizes) = (vec![Part::Body], kernel.sizes());
            return Ok(Work::Kernel { kernel: number, arguments, kept, parts, all_threads: true, sizes });
        }
        let mut slices = Vec::with_capacity(kept.len());
        for (name, dtype, shape) in kept {
            let n_bytes = shape.iter().product::<usize>() * dtype.bytes() as usize;
            self.plan.constants.push(Constant::Prepared(n_bytes));
            let place = Place::Constant(self.plan.constants.len() - 1);
            let tensor = self.plan.tensor(format!("{}.{name}", kernel.origin), dtype, &shape, place);
            slices.push(self.plan.whole(tensor));
        }
        self.prepared.insert((preparation, known), slices.clone());
        let (parts, sizes) = (vec![Part::Body], kernel.sizes());
        Ok(Work::Kernel { kernel: number, arguments, kept: slices, parts, all_threads: true, sizes })
    }

    /// Makes the work of a step that is not a kernel.
    fn host(&mut self, node: &Node) -> Result<Work, CompileError> {
        match &node.kind {
            Kind::Host(host) => self.evaluated(node, &host.op),
            Kind::Call(call) => {
                let inputs = node.inputs.iter().flatten().map(|id| self.slice(*id)).collect::<Result<Vec<_>, _>>()?;
                let outputs = node.outputs.iter().map(|id| self.slice(*id)).collect::<Result<Vec<_>, _>>()?;
                Ok(Work::Host { inputs, outputs, run: runtime::Host::Call((**call).clone()) })
            }
            _ => unreachable!("host steps are of host nodes"),
        }
    }

    /// Makes the work of an operator that the reference evaluates.
    fn evaluated(&mut self, node: &Node, op: &Op) -> Result<Work, CompileError> {
        let op = op.clone();
        let net = &self.fused.net;
        // Known inputs are stored with the function; the run passes the others.
        let mut known: Vec<Option<Tensor>> = Vec::new();
        let mut types = Vec::new();
        let mut passed = Vec::new();
        for id in &node.inputs {
            let value = id.map(|id| net.value(id));
            known.push(value.and_then(|value| value.constant.clone()));
            types.push(value.map(|value| value.ty()));
            if let (Some(id), None) = (id, known.last().expect("it was pushed")) {
                passed.push(*id);
            }
        }
        let inputs = passed.into_iter().map(|id| self.slice(id)).collect::<Result<Vec<_>, _>>()?;
        let used: Vec<ValueId> = node.outputs.iter().copied().filter(|id| net.value(*id).n_bytes() > 0).collect();
        let is_used: Vec<bool> = node.outputs.iter().map(|id| net.value(*id).n_bytes() > 0).collect();
        let outputs = used.into_iter().map(|id| self.slice(id)).collect::<Result<Vec<_>, _>>()?;
        let run = move |inputs: &[&[u8]], outputs: &mut [&mut [u8]]| -> Result<(), String> {
            let mut given = inputs.iter();
            let tensors: Vec<Option<Tensor>> = known
                .iter()
                .zip(&types)
                .map(|(known, ty)| {
                    let ty = ty.clone()?;
                    known.clone().or_else(|| Tensor::new(ty, Bytes::copy_from_slice(given.next()?)))
                })
                .collect();
            let facts: Vec<Option<Fact>> =
                tensors.iter().map(|x| x.as_ref().map(|x| Fact { ty: x.ty(), value: Some(x) })).collect();
            let results = op.operation().evaluate(Inputs(&facts)).map_err(|error| error.to_string())?;
            let wanted = results.iter().zip(&is_used).filter(|(_, used)| **used).map(|(result, _)| result);
            for (result, to) in wanted.zip(outputs.iter_mut()) {
                to.copy_from_slice(result.bytes());
            }
            Ok(())
        };
        Ok(Work::Host { inputs, outputs, run: runtime::Host::Function(Arc::new(run)) })
    }
}
