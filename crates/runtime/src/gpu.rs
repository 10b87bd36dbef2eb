//! GPU plans as data: kernel launches in order, with their arguments.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;

use bytes::Bytes;
use tilewright_codegen::CallerBuffer;
use tilewright_ir::gpu::{BufferUse, GpuKernel, GpuProgram, lower_gpu};
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::text::parse;
use tilewright_ir::{Buffer, BufferId, DType, Part, Role, Target};

use crate::kernel_plan::plan_of_kernel;
use crate::plan::{Place, Plan, TensorSlice, Work};

/// Alignment, in bytes, of tensors in the arena, which suffices for memory ranges on every known GPU.
pub const GPU_LINE: usize = 512;

/// Plan with its kernels for a GPU. Several contexts may run it, if memory suffices.
pub struct GpuModel {
    /// Plan of a run.
    pub plan: Plan,
    /// Kernels, by their index in the plan.
    pub kernels: Vec<GpuProgram>,
    /// Target device.
    pub target: Target,
}

impl GpuModel {
    /// Makes the model of a single program, with a plan like that of [`crate::Code::plan`].
    pub fn of_program(program: GpuProgram, target: &Target, constant: &dyn Fn(&str) -> Option<Bytes>) -> GpuModel {
        let uses = Part::ALL.map(|(part, _)| (part, accesses(program.part(part), &program)));
        let argument = |(id, b): (BufferId, &Buffer)| {
            let by = |writes: bool| {
                let used = uses.iter().filter(|(_, uses)| uses.get(&id).is_some_and(|[_, is]| *is == writes));
                used.map(|(part, _)| *part).collect()
            };
            let (name, shape, size_bytes) = (b.name.clone(), b.shape.clone(), b.size_bytes().unwrap_or(0));
            CallerBuffer {
                name,
                dtype: b.dtype,
                shape,
                size_bytes,
                role: b.role,
                read_by: by(false),
                written_by: by(true),
            }
        };
        let buffers: Vec<CallerBuffer> =
            program.program.arguments().chain(program.program.kept()).map(argument).collect();
        let has = |part: Part| !program.part(part).is_empty();
        let plan = plan_of_kernel(&program.program.name, &buffers, &has, GPU_LINE, constant);
        GpuModel { plan, kernels: vec![program], target: target.clone() }
    }
}

/// Allocation of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Home {
    /// Caller's input with this index.
    Input(usize),
    /// Caller's output with this index.
    Output(usize),
    /// Arena of the plan.
    Arena,
    /// Scratch memory, which each step reuses.
    Scratch,
    /// Constant of the plan.
    Constant(usize),
}

/// Range of an allocation, as an argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Allocation that contains it.
    pub home: Home,
    /// Offset in that memory, in bytes.
    pub at: u64,
    /// Number of bytes.
    pub n_bytes: u64,
}

/// Kernel launch with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Index of the plan's step that it belongs to.
    pub step: usize,
    /// Index of its program, for [`Launches::program`].
    pub program: usize,
    /// Index of the kernel among all of the program.
    pub kernel: usize,
    /// Arguments, in the order of [`GpuKernel::arguments`].
    pub arguments: Vec<Span>,
}

/// Launches of a whole plan.
pub struct Launches<'m> {
    model: &'m GpuModel,
    /// Alignment of arguments, in bytes.
    align: u64,
    scratch_bytes: u64,
    /// Constants that have been prepared already.
    made: HashSet<usize>,
    /// Numbers of copy kernels, by their text; they follow the numbers of the model's kernels.
    numbers: HashMap<String, usize>,
    copies: Vec<GpuProgram>,
    /// Launches that prepare constants, run once.
    pub preparations: Vec<Launch>,
    /// Launches of a run, in order; steps in functions of this process have none.
    pub launches: Vec<Launch>,
    /// Range of launches for each step of the plan; empty, at its position, for a function of this process.
    pub steps: Vec<Range<usize>>,
}

/// Offsets of a step's buffers in scratch memory.
#[derive(Default)]
struct Own {
    temporaries: HashMap<BufferId, u64>,
    /// Offsets of copies of arguments that are not aligned as the device requires.
    moved: HashMap<BufferId, u64>,
    n_bytes: u64,
}

impl Own {
    fn add(&mut self, n_bytes: u64, align: u64) -> u64 {
        let at = self.n_bytes;
        self.n_bytes = (at + n_bytes).next_multiple_of(align);
        at
    }
}

impl<'m> Launches<'m> {
    /// Makes the launches of a model on a device that requires arguments aligned to `align` bytes.
    pub fn new(model: &'m GpuModel, align: u64) -> Launches<'m> {
        let mut all = Launches {
            model,
            align,
            scratch_bytes: 1,
            made: HashSet::new(),
            numbers: HashMap::new(),
            copies: Vec::new(),
            preparations: Vec::new(),
            launches: Vec::new(),
            steps: Vec::new(),
        };
        for (at, step) in model.plan.steps.iter().enumerate() {
            let start = all.launches.len();
            match &step.work {
                Work::Kernel { kernel, arguments, kept, parts, .. } => all.kernel(at, *kernel, arguments, kept, parts),
                Work::Copy { from, to, .. } => {
                    let launch = all.copy(at, all.span(from), all.span(to), model.plan.tensors[to.tensor].dtype);
                    all.launches.push(launch);
                }
                // Models for a GPU have no open sizes.
                Work::Move { .. } | Work::Host { .. } => {}
                Work::While { .. } | Work::Again { .. } => unreachable!("a GPU's plan has no loops"),
            }
            all.steps.push(start..all.launches.len());
        }
        all
    }

    /// Program with a number: one of the model's kernels, or a generated copy kernel.
    pub fn program(&self, number: usize) -> &GpuProgram {
        let n = self.model.kernels.len();
        if number < n { &self.model.kernels[number] } else { &self.copies[number - n] }
    }

    /// Kernel of a launch.
    pub fn kernel_of(&self, launch: &Launch) -> &GpuKernel {
        let kernel = self.program(launch.program).kernels().nth(launch.kernel);
        kernel.expect("invariant: a launch is of a kernel of its program")
    }

    /// Size of an allocation in bytes.
    pub fn memory_bytes(&self, home: Home) -> u64 {
        let plan = &self.model.plan;
        let of_port = |place: Place| {
            let tensor = plan.tensors.iter().find(|tensor| tensor.place == place);
            tensor.map_or(0, |tensor| tensor.n_bytes()) as u64
        };
        match home {
            Home::Input(at) => of_port(Place::Input(at)),
            Home::Output(at) => of_port(Place::Output(at)),
            Home::Arena => plan.arena_bytes() as u64,
            Home::Constant(at) => plan.constants[at].n_bytes() as u64,
            Home::Scratch => self.scratch_bytes,
        }
    }

    /// Location of a slice in device memory.
    pub fn span(&self, slice: &TensorSlice) -> Span {
        let (home, start) = match self.model.plan.tensors[slice.tensor].place {
            Place::Input(at) => (Home::Input(at), 0),
            Place::Output(at) => (Home::Output(at), 0),
            Place::Arena(offset) => (Home::Arena, offset),
            Place::Constant(at) => (Home::Constant(at), 0),
            Place::State(_) => unreachable!("models for GPUs have no states"),
        };
        Span { home, at: (start + slice.offset) as u64, n_bytes: slice.n_bytes as u64 }
    }

    /// Lays out a step's scratch memory.
    fn own(&mut self, program: &GpuProgram, arguments: &[TensorSlice]) -> Own {
        let mut own = Own::default();
        for id in program.device_buffers() {
            let buffer = program.program.buffer(id);
            if buffer.role == Role::Temporary {
                let at = own.add(buffer.size_bytes().unwrap_or(u64::MAX / 2), self.align);
                own.temporaries.insert(id, at);
            }
        }
        for ((id, _), slice) in program.program.arguments().zip(arguments) {
            if !self.span(slice).at.is_multiple_of(self.align) {
                let at = own.add(slice.n_bytes as u64, self.align);
                own.moved.insert(id, at);
            }
        }
        self.scratch_bytes = self.scratch_bytes.max(own.n_bytes);
        own
    }

    /// Adds the launches of a kernel's step.
    fn kernel(&mut self, step: usize, number: usize, arguments: &[TensorSlice], kept: &[TensorSlice], parts: &[Part]) {
        let (plan, program) = (&self.model.plan, &self.model.kernels[number]);
        let own = self.own(program, arguments);
        let slices = program.program.kept().zip(kept).chain(program.program.arguments().zip(arguments));
        let mut spans: HashMap<BufferId, Span> = slices.map(|((id, _), slice)| (id, self.span(slice))).collect();
        for (&id, &at) in &own.temporaries {
            let n_bytes = program.program.buffer(id).size_bytes().unwrap_or(0);
            spans.insert(id, Span { home: Home::Scratch, at, n_bytes });
        }
        // In the order of the table, so that equal plans have equal launches.
        let mut moved = Vec::new();
        for id in own.moved.keys().copied().collect::<BTreeSet<_>>() {
            let span = spans.get_mut(&id).expect("invariant: what is moved is an argument");
            moved.push((id, *span));
            *span = Span { home: Home::Scratch, at: own.moved[&id], n_bytes: span.n_bytes };
        }
        let constant = |slice: &TensorSlice| match plan.tensors[slice.tensor].place {
            Place::Constant(at) => Some(at),
            Place::Input(_) | Place::Output(_) | Place::Arena(_) | Place::State(_) => None,
        };
        // Steps that share prepared buffers refer to the same constants.
        let n_new = kept.iter().filter_map(constant).filter(|at| self.made.insert(*at)).count();
        if n_new > 0 && !parts.contains(&Part::Prepare) {
            let launches = self.launches_of((step, number), &[Part::Prepare], &spans, &moved);
            self.preparations.extend(launches);
        }
        let launches = self.launches_of((step, number), parts, &spans, &moved);
        self.launches.extend(launches);
    }

    /// Makes the launches of parts of a program, with copies of unaligned arguments.
    fn launches_of(
        &mut self,
        (step, number): (usize, usize),
        parts: &[Part],
        spans: &HashMap<BufferId, Span>,
        moved: &[(BufferId, Span)],
    ) -> Vec<Launch> {
        let program = &self.model.kernels[number];
        let mut launches = Vec::new();
        let uses = accesses(parts.iter().flat_map(|part| program.part(*part)), program);
        let is = |id: &BufferId, at: usize| uses.get(id).is_some_and(|access| access[at]);
        let dtype = |id: &BufferId| program.program.buffer(*id).dtype;
        for (id, from) in moved.iter().filter(|(id, _)| is(id, 0)) {
            launches.push(self.copy(step, *from, spans[id], dtype(id)));
        }
        let of_parts = |part: &Part| {
            let ahead = Part::ALL.iter().take_while(|(other, _)| other != part);
            let first: usize = ahead.map(|(part, _)| program.part(*part).len()).sum();
            (first..).zip(program.part(*part))
        };
        for (at, kernel) in parts.iter().flat_map(of_parts) {
            let arguments = kernel.arguments(program).into_iter().map(|(id, _)| spans[&id]).collect();
            launches.push(Launch { step, program: number, kernel: at, arguments });
        }
        for (id, to) in moved.iter().filter(|(id, _)| is(id, 1)) {
            launches.push(self.copy(step, spans[id], *to, dtype(id)));
        }
        launches
    }

    /// Makes a launch that copies bytes, regardless of alignment.
    fn copy(&mut self, step: usize, from: Span, to: Span, dtype: DType) -> Launch {
        let is_words = [from.at, to.at, from.n_bytes].iter().all(|n| n.is_multiple_of(4));
        let dtype = if is_words { DType::I32 } else { dtype };
        let [source, target, n] = [from.at, to.at, from.n_bytes].map(|n| n / dtype.bytes());
        let text = format!(
            "program \"copy\"\nbuffer from: {0}[{1}] global input\nbuffer to: {0}[{2}] global output\nloops i\n\
             run {{ for i in {n} {{ to[i + {target}] = from[i + {source}] }} }}",
            dtype.name(),
            source + n,
            target + n,
        );
        let whole = |span: Span| Span { at: 0, n_bytes: self.memory_bytes(span.home), ..span };
        let arguments = [from, to].map(whole).to_vec();
        let next = self.model.kernels.len() + self.copies.len();
        let program = *self.numbers.entry(text).or_insert_with_key(|text| {
            self.copies.push(copying(text));
            next
        });
        Launch { step, program, kernel: 0, arguments }
    }
}

/// Whether the kernels of a program read, and whether they write, each argument.
fn accesses<'k>(
    kernels: impl IntoIterator<Item = &'k GpuKernel>,
    program: &GpuProgram,
) -> HashMap<BufferId, [bool; 2]> {
    let mut found = HashMap::new();
    for (id, access) in kernels.into_iter().flat_map(|kernel| kernel.arguments(program)) {
        let [reads, writes]: &mut [bool; 2] = found.entry(id).or_default();
        *reads |= access != BufferUse::Write;
        *writes |= access != BufferUse::Read;
    }
    found
}

/// Makes a program that copies elements in a loop.
fn copying(text: &str) -> GpuProgram {
    const WHAT: &str = "invariant: what copies elements is a program that GPUs run";
    let steps = parse_steps("split i 256 -> b t shrink\nbind b block.x\nbind t thread.x\n").expect(WHAT);
    lower_gpu(&apply_all(&parse(text).expect(WHAT), &steps).expect(WHAT)).expect(WHAT)
}
