//! Plans on GPUs: constants and what is on the way stay on the device, and kernels run one after the other.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;
use tilewright_ir::gpu::{Access, GpuProgram, Kernel, lower_gpu};
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_ir::text::parse;
use tilewright_ir::{BufferId, DType, Role, Target};
use tilewright_runtime::{Constant, HostFunction, Place, Plan, Slice, Step, Work};

use super::{Cuda, Driver, Memory, OpenCl, Shape, Span, fits};

/// Why a plan does not run on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GpuError {
    /// There is no such device, or it fails.
    #[error("{target}: {why}")]
    Device {
        /// The device as a target.
        target: String,
        /// What it says.
        why: String,
    },
    /// One of its steps cannot be made ready or carried out.
    #[error("step `{step}`: {why}")]
    Step {
        /// The step.
        step: String,
        /// Why not.
        why: String,
    },
}

/// A plan with its kernels for a GPU. As many contexts as there is memory for may run it.
pub struct GpuModel {
    /// What a run does.
    pub plan: Plan,
    /// The kernels, by their numbers in the plan.
    pub kernels: Vec<GpuProgram>,
    /// The device.
    pub target: Target,
}

/// A model on a device: code, constants and memory for a run.
pub struct GpuContext(Loaded);

enum Loaded {
    OpenCl(Box<OnDevice<OpenCl>>),
    Cuda(Box<OnDevice<Cuda>>),
}

impl GpuContext {
    /// Builds the kernels and takes the constants to the device.
    ///
    /// # Errors
    /// Where there is no such device, it has not the memory, or it refuses a kernel.
    pub fn new(model: &Arc<GpuModel>) -> Result<GpuContext, GpuError> {
        let target = &model.target;
        let loaded = match model.target.arch {
            Arch::Gpu(GpuApi::OpenCl) => {
                let driver = OpenCl::new(&model.target).map_err(of_device(target))?;
                Loaded::OpenCl(Box::new(OnDevice::new(driver, Arc::clone(model))?))
            }
            Arch::Gpu(GpuApi::Cuda) => {
                let driver = Cuda::new(&model.target).map_err(of_device(target))?;
                Loaded::Cuda(Box::new(OnDevice::new(driver, Arc::clone(model))?))
            }
            _ => return Err(of_device(target)("nothing runs models for it")),
        };
        Ok(GpuContext(loaded))
    }

    /// Runs the model: takes inputs to the device, and brings outputs from there, both in the model's order
    /// and of its sizes.
    ///
    /// # Errors
    /// Where the device or a step in this process fails.
    pub fn run(&mut self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), GpuError> {
        match &mut self.0 {
            Loaded::OpenCl(loaded) => loaded.run(inputs, outputs, None),
            Loaded::Cuda(loaded) => loaded.run(inputs, outputs, None),
        }
    }

    /// As [`GpuContext::run`], each step by itself, adding to its entry the nanoseconds that it takes.
    ///
    /// # Errors
    /// As for [`GpuContext::run`].
    pub fn profile(
        &mut self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        step_ns: &mut [u64],
    ) -> Result<(), GpuError> {
        match &mut self.0 {
            Loaded::OpenCl(loaded) => loaded.run(inputs, outputs, Some(step_ns)),
            Loaded::Cuda(loaded) => loaded.run(inputs, outputs, Some(step_ns)),
        }
    }
}

/// The fault of a device.
fn of_device<E: ToString>(target: &Target) -> impl Fn(E) -> GpuError + use<E> {
    let target = target.name();
    move |why| GpuError::Device { target: target.clone(), why: why.to_string() }
}

/// The fault of a step.
fn of_step<E: ToString>(step: &Step) -> impl Fn(E) -> GpuError {
    let step = step.name.clone();
    move |why| GpuError::Step { step: step.clone(), why: why.to_string() }
}

/// What a step of the plan is here.
enum Doing<D: Driver> {
    /// These of the launches.
    Launches(Range<usize>),
    /// A function of this process, once all launches before this one are done.
    Host { before: usize, inputs: Vec<Span<Memory<D>>>, outputs: Vec<Span<Memory<D>>>, run: Arc<HostFunction> },
}

/// A model by a driver.
struct OnDevice<D: Driver> {
    driver: D,
    model: Arc<GpuModel>,
    memories: BTreeMap<Home, Arc<Memory<D>>>,
    launches: Vec<D::Launch>,
    steps: Vec<Doing<D>>,
    /// Launches between which no function of this process is called, by the first of them.
    recorded: BTreeMap<usize, (Range<usize>, D::Recorded)>,
    /// Whether a run has shown that no kernel writes outside its buffers.
    is_checked: bool,
}

/// A piece of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Home {
    Input(usize),
    Output(usize),
    Arena,
    Constant(usize),
    /// What a step has for itself.
    Scratch,
}

/// What a step has for itself in scratch memory, each with where it begins.
#[derive(Default)]
struct Own {
    temporaries: HashMap<BufferId, u64>,
    /// Arguments that do not begin where the device wants it are taken from here and back.
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

/// What makes a model ready.
struct Loader<'m, D: Driver> {
    driver: &'m D,
    model: &'m GpuModel,
    align: u64,
    scratch_bytes: u64,
    memories: BTreeMap<Home, Arc<Memory<D>>>,
    codes: HashMap<usize, D::Code>,
    copies: HashMap<String, (GpuProgram, D::Code)>,
    /// Constants that are made already.
    made: HashSet<usize>,
    launches: Vec<D::Launch>,
}

impl<D: Driver> OnDevice<D> {
    fn new(driver: D, model: Arc<GpuModel>) -> Result<OnDevice<D>, GpuError> {
        let align = driver.alignment().map_err(of_device(&model.target))?;
        let mut loader = Loader {
            driver: &driver,
            model: &model,
            align,
            scratch_bytes: 1,
            memories: BTreeMap::new(),
            codes: HashMap::new(),
            copies: HashMap::new(),
            made: HashSet::new(),
            launches: Vec::new(),
        };
        for step in &model.plan.steps {
            if let Work::Kernel { kernel, arguments, .. } = &step.work {
                loader.scratch_bytes = loader.scratch_bytes.max(loader.own(*kernel, arguments).n_bytes);
            }
        }
        let steps = model.plan.steps.iter().map(|step| loader.step(step)).collect::<Result<Vec<_>, _>>()?;
        for tensor in &model.plan.tensors {
            if let Place::Input(_) | Place::Output(_) = tensor.place {
                loader.memory(home(tensor.place)).map_err(of_device(&model.target))?;
            }
        }
        let Loader { mut memories, launches, .. } = loader;
        // What constants were made of is gone, where nothing else needs it.
        memories.retain(|home, memory| !matches!(home, Home::Constant(_)) || Arc::strong_count(memory) > 1);
        let hosts = steps.iter().filter_map(|doing| match doing {
            Doing::Host { before, .. } => Some(*before),
            Doing::Launches(_) => None,
        });
        let (mut recorded, mut next) = (BTreeMap::new(), 0);
        for end in hosts.chain([launches.len()]) {
            if next < end {
                let of = driver.record(&launches[next..end]).map_err(of_device(&model.target))?;
                recorded.insert(next, (next..end, of));
            }
            next = end;
        }
        Ok(OnDevice { driver, model, memories, launches, steps, recorded, is_checked: false })
    }

    fn run(
        &mut self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        mut step_ns: Option<&mut [u64]>,
    ) -> Result<(), GpuError> {
        let failed = of_device::<D::Error>(&self.model.target);
        for (at, bytes) in inputs.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
            if let Some(memory) = self.memories.get(&Home::Input(at)) {
                memory.write(0, bytes).map_err(&failed)?;
            }
        }
        let alone = |range: Range<usize>| match range.is_empty() {
            true => Ok(0.0),
            false => self.driver.run(&self.launches[range], 1).map_err(&failed),
        };
        let launch = |range: Range<usize>| match self.recorded.get(&range.start) {
            Some((all, recorded)) if *all == range => {
                self.driver.run_recorded(&self.launches[range], recorded).map_err(&failed)
            }
            _ => alone(range).map(drop),
        };
        let mut next = 0;
        for (at, (doing, step)) in self.steps.iter().zip(&self.model.plan.steps).enumerate() {
            match (doing, &mut step_ns) {
                (Doing::Launches(_), None) => {}
                (Doing::Launches(range), Some(step_ns)) => {
                    step_ns[at] += alone(range.clone())? as u64;
                    next = range.end;
                }
                (Doing::Host { before, inputs, outputs, run }, step_ns) => {
                    launch(next..*before)?;
                    next = *before;
                    let start = std::time::Instant::now();
                    host::<D>(inputs, outputs, &**run).map_err(of_step(step))?;
                    if let Some(step_ns) = step_ns {
                        step_ns[at] += start.elapsed().as_nanos() as u64;
                    }
                }
            }
        }
        launch(next..self.launches.len())?;
        for (at, bytes) in outputs.iter_mut().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
            if let Some(memory) = self.memories.get(&Home::Output(at)) {
                memory.read(0, bytes).map_err(&failed)?;
            }
        }
        if !self.is_checked {
            for memory in self.memories.values() {
                if !memory.is_intact().map_err(&failed)? {
                    return Err(of_device(&self.model.target)("a kernel wrote outside its buffers"));
                }
            }
            self.is_checked = true;
        }
        Ok(())
    }
}

/// Calls a function of this process on what lies on the device.
fn host<D: Driver>(inputs: &[Span<Memory<D>>], outputs: &[Span<Memory<D>>], run: &HostFunction) -> Result<(), String> {
    let room = |span: &Span<Memory<D>>| vec![0; span.n_bytes as usize];
    let mut given: Vec<Vec<u8>> = inputs.iter().map(room).collect();
    let mut made: Vec<Vec<u8>> = outputs.iter().map(room).collect();
    for (span, bytes) in inputs.iter().zip(&mut given).filter(|(span, _)| span.n_bytes > 0) {
        span.memory.read(span.at as usize, bytes).map_err(|why| why.to_string())?;
    }
    let inputs_given: Vec<&[u8]> = given.iter().map(Vec::as_slice).collect();
    let mut outputs_made: Vec<&mut [u8]> = made.iter_mut().map(Vec::as_mut_slice).collect();
    run(&inputs_given, &mut outputs_made)?;
    for (span, bytes) in outputs.iter().zip(&made).filter(|(span, _)| span.n_bytes > 0) {
        span.memory.write(span.at as usize, bytes).map_err(|why| why.to_string())?;
    }
    Ok(())
}

/// The memory that a place is in.
fn home(place: Place) -> Home {
    match place {
        Place::Input(at) => Home::Input(at),
        Place::Output(at) => Home::Output(at),
        Place::Arena(_) => Home::Arena,
        Place::Constant(at) => Home::Constant(at),
    }
}

/// Whether kernels of a program read, and whether they write, what they take.
fn accesses(kernels: &[Kernel], program: &GpuProgram) -> HashMap<BufferId, [bool; 2]> {
    let mut found = HashMap::new();
    for (id, access) in kernels.iter().flat_map(|kernel| kernel.arguments(program)) {
        let [reads, writes]: &mut [bool; 2] = found.entry(id).or_default();
        *reads |= access != Access::Write;
        *writes |= access != Access::Read;
    }
    found
}

/// The buffers that a run passes to a program, in their order.
fn passed(program: &GpuProgram) -> impl Iterator<Item = BufferId> + '_ {
    let is_passed = |id: &BufferId| !matches!(program.program.buffer(*id).role, Role::Kept | Role::Temporary);
    program.device_buffers().into_iter().filter(is_passed)
}

impl<D: Driver> Loader<'_, D> {
    /// Where in its memory a slice begins.
    fn start(&self, slice: &Slice) -> u64 {
        let start = match self.model.plan.tensors[slice.tensor].place {
            Place::Arena(offset) => offset,
            Place::Input(_) | Place::Output(_) | Place::Constant(_) => 0,
        };
        (start + slice.offset) as u64
    }

    /// What a step has for itself.
    fn own(&self, kernel: usize, arguments: &[Slice]) -> Own {
        let (program, mut own) = (&self.model.kernels[kernel], Own::default());
        for id in program.device_buffers() {
            let buffer = program.program.buffer(id);
            if buffer.role == Role::Temporary {
                let at = own.add(buffer.size_bytes().unwrap_or(u64::MAX / 2), self.align);
                own.temporaries.insert(id, at);
            }
        }
        for (id, slice) in passed(program).zip(arguments) {
            if !self.start(slice).is_multiple_of(self.align) {
                let at = own.add(slice.n_bytes as u64, self.align);
                own.moved.insert(id, at);
            }
        }
        own
    }

    /// Memory, which is there from now on, with what is known of it.
    fn memory(&mut self, home: Home) -> Result<Arc<Memory<D>>, String> {
        if let Some(memory) = self.memories.get(&home) {
            return Ok(Arc::clone(memory));
        }
        let plan = &self.model.plan;
        let of_port = |place: Place| {
            let tensor = plan.tensors.iter().find(|tensor| tensor.place == place);
            tensor.map_or(0, |tensor| tensor.n_bytes())
        };
        let n_bytes = match home {
            Home::Input(at) => of_port(Place::Input(at)) as u64,
            Home::Output(at) => of_port(Place::Output(at)) as u64,
            Home::Arena => plan.arena_bytes() as u64,
            Home::Constant(at) => plan.constants[at].n_bytes() as u64,
            Home::Scratch => self.scratch_bytes,
        };
        let memory = Arc::new(self.driver.memory(n_bytes).map_err(|why| why.to_string())?);
        if let Home::Constant(at) = home
            && let Constant::Data(data) = &plan.constants[at]
            && !data.is_empty()
        {
            memory.write(0, data).map_err(|why| why.to_string())?;
        }
        self.memories.insert(home, Arc::clone(&memory));
        Ok(memory)
    }

    fn span(&mut self, slice: &Slice) -> Result<Span<Memory<D>>, String> {
        let memory = self.memory(home(self.model.plan.tensors[slice.tensor].place))?;
        Ok(Span { memory, at: self.start(slice), n_bytes: slice.n_bytes as u64 })
    }

    fn step(&mut self, step: &Step) -> Result<Doing<D>, GpuError> {
        let start = self.launches.len();
        match &step.work {
            Work::Kernel { kernel, arguments, kept, .. } => self.kernel(*kernel, arguments, kept),
            Work::Copy { from, to } => self.span(from).and_then(|from| {
                let (to, dtype) = (self.span(to)?, self.model.plan.tensors[to.tensor].dtype);
                let launch = self.copy(&from, &to, dtype)?;
                self.launches.push(launch);
                Ok(())
            }),
            Work::Host { inputs, outputs, run } => {
                let mut spans =
                    |slices: &[Slice]| slices.iter().map(|slice| self.span(slice)).collect::<Result<Vec<_>, String>>();
                let doing = spans(inputs).and_then(|inputs| {
                    Ok(Doing::Host { before: start, inputs, outputs: spans(outputs)?, run: Arc::clone(run) })
                });
                return doing.map_err(of_step(step));
            }
        }
        .map_err(of_step(step))?;
        Ok(Doing::Launches(start..self.launches.len()))
    }

    /// Adds the launches of a kernel's step.
    fn kernel(&mut self, kernel: usize, arguments: &[Slice], kept: &[Slice]) -> Result<(), String> {
        let (model, own) = (self.model, self.own(kernel, arguments));
        let program = &model.kernels[kernel];
        if !self.codes.contains_key(&kernel) {
            let gpu = model.target.gpu.as_ref().expect("invariant: the target is a GPU");
            program.kernels().try_for_each(|kernel| fits(&Shape::of(kernel, program), gpu))?;
            let code = self.driver.build(program, &model.target).map_err(|failure| failure.message)?;
            self.codes.insert(kernel, code);
        }
        let mut spans = HashMap::new();
        let of_kept = program.device_buffers().into_iter();
        let of_kept = of_kept.filter(|id| program.program.buffer(*id).role == Role::Kept);
        for (id, slice) in of_kept.zip(kept).chain(passed(program).zip(arguments)) {
            spans.insert(id, self.span(slice)?);
        }
        for (id, at) in &own.temporaries {
            let (memory, n_bytes) =
                (self.memory(Home::Scratch)?, program.program.buffer(*id).size_bytes().unwrap_or(0));
            spans.insert(*id, Span { memory, at: *at, n_bytes });
        }
        let mut moved = Vec::new();
        for (id, at) in &own.moved {
            let memory = self.memory(Home::Scratch)?;
            let n_bytes = spans[id].n_bytes;
            if let Some(span) = spans.insert(*id, Span { memory, at: *at, n_bytes }) {
                moved.push((*id, span));
            }
        }
        let constant = |slice: &Slice| match model.plan.tensors[slice.tensor].place {
            Place::Constant(at) => Some(at),
            Place::Input(_) | Place::Output(_) | Place::Arena(_) => None,
        };
        // Steps that share what is prepared name the same constants.
        let n_new = kept.iter().filter_map(constant).filter(|at| self.made.insert(*at)).count();
        if n_new > 0 {
            let launches = self.launches_of(kernel, &program.prepare, &spans, &moved)?;
            self.driver.run(&launches, 1).map_err(|why| why.to_string())?;
        }
        let in_runs: Vec<Kernel> = program.body.iter().chain(&program.finish).cloned().collect();
        let launches = self.launches_of(kernel, &in_runs, &spans, &moved)?;
        self.launches.extend(launches);
        Ok(())
    }

    /// The launches of kernels of a program, with copies of those arguments that are moved.
    fn launches_of(
        &mut self,
        number: usize,
        kernels: &[Kernel],
        spans: &HashMap<BufferId, Span<Memory<D>>>,
        moved: &[(BufferId, Span<Memory<D>>)],
    ) -> Result<Vec<D::Launch>, String> {
        let program = &self.model.kernels[number];
        let (accesses, mut launches) = (accesses(kernels, program), Vec::new());
        let is = |id: &BufferId, at: usize| accesses.get(id).is_some_and(|access| access[at]);
        let dtype = |id: &BufferId| program.program.buffer(*id).dtype;
        for (id, from) in moved.iter().filter(|(id, _)| is(id, 0)) {
            launches.push(self.copy(from, &spans[id], dtype(id))?);
        }
        for kernel in kernels {
            let arguments = kernel.arguments(program).into_iter().map(|(id, _)| spans[&id].clone());
            let arguments: Vec<Span<Memory<D>>> = arguments.collect();
            let launch = D::launch(&self.codes[&number], kernel, program, &self.model.target, arguments);
            launches.push(launch.map_err(|failure| failure.message)?);
        }
        for (id, to) in moved.iter().filter(|(id, _)| is(id, 1)) {
            launches.push(self.copy(&spans[id], to, dtype(id))?);
        }
        Ok(launches)
    }

    /// A kernel that copies bytes, wherever they begin.
    fn copy(&mut self, from: &Span<Memory<D>>, to: &Span<Memory<D>>, dtype: DType) -> Result<D::Launch, String> {
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
        if !self.copies.contains_key(&text) {
            let program = copying(&text)?;
            let code = self.driver.build(&program, &self.model.target).map_err(|failure| failure.message)?;
            self.copies.insert(text.clone(), (program, code));
        }
        let (program, code) = &self.copies[&text];
        let arguments = [from, to].map(|span| Span::whole(span.memory.clone(), span.memory.n_bytes()));
        let launch = D::launch(code, &program.body[0], program, &self.model.target, arguments.to_vec());
        launch.map_err(|failure| failure.message)
    }
}

/// Kernels of a loop over elements.
fn copying(text: &str) -> Result<GpuProgram, String> {
    let program = parse(text).map_err(|why| why.to_string())?;
    let steps = parse_steps("split i 256 -> b t shrink\nbind b block.x\nbind t thread.x\n");
    let program = apply_all(&program, &steps.map_err(|why| why.to_string())?).map_err(|(_, why)| why.to_string())?;
    lower_gpu(&program).map_err(|why| why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Doubles each of 40 numbers.
    const DOUBLE: &str = "program \"double\"
buffer x: f32[40] global input
buffer y: f32[40] global output
loops i
run { block.x i in 2 { thread.x i in 20 { y[20*i + i] = x[20*i + i] * 2.0 } } }";

    /// A kernel whose result begins at an odd place, a function of this process, and a copy.
    fn model() -> GpuModel {
        let kernel = DOUBLE.replace("thread.x i in 20", "thread.x t in 20").replace("+ i]", "+ t]");
        let kernel = parse(&kernel.replace("loops i", "loops i, t")).unwrap();
        let mut plan = Plan::default();
        let x = plan.tensor("x", DType::F32, &[40], Place::Input(0));
        let way = plan.tensor("way", DType::F32, &[41], Place::Arena(0));
        let sums = plan.tensor("sums", DType::F32, &[40], Place::Arena(512));
        let y = plan.tensor("y", DType::F32, &[42], Place::Output(0));
        let part = |tensor, n: usize| Slice { tensor, offset: 4 * n, n_bytes: 160 };
        let add_one = |inputs: &[&[u8]], outputs: &mut [&mut [u8]]| {
            for (from, to) in inputs[0].chunks(4).zip(outputs[0].chunks_mut(4)) {
                let number = f32::from_le_bytes(from.try_into().unwrap());
                to.copy_from_slice(&(number + 1.0).to_le_bytes());
            }
            Ok(())
        };
        let double = |from, to| Work::Kernel {
            kernel: 0,
            arguments: vec![from, to],
            kept: Vec::new(),
            parts: vec![tilewright_ir::Part::Body],
            all_threads: true,
        };
        let works = [
            double(part(x, 0), part(way, 1)),
            Work::Host { inputs: vec![part(way, 1)], outputs: vec![part(sums, 0)], run: Arc::new(add_one) },
            double(part(sums, 0), part(way, 1)),
            Work::Copy { from: part(way, 1), to: part(y, 2) },
        ];
        plan.steps = works.map(|work| Step { name: "a step".to_owned(), work }).into();
        let target = Target::named("sm_90a").unwrap();
        GpuModel { plan, kernels: vec![lower_gpu(&kernel).unwrap()], target }
    }

    #[test]
    fn kernels_functions_and_copies_run_in_their_order() {
        let mut loaded = OnDevice::new(Cuda::emulated(), Arc::new(model())).unwrap();
        let numbers = |of: fn(f32) -> f32| -> Vec<u8> { (0..40).flat_map(|n| of(n as f32).to_le_bytes()).collect() };
        let (mut y, mut step_ns) = (vec![0; 168], [0; 4]);
        for _ in 0..2 {
            loaded.run(&[&numbers(|n| n)], &mut [&mut y], None).unwrap();
            assert_eq!(y[8..], numbers(|n| 4.0 * n + 2.0));
        }
        y.fill(0);
        loaded.run(&[&numbers(|n| n)], &mut [&mut y], Some(&mut step_ns)).unwrap();
        assert_eq!(y[8..], numbers(|n| 4.0 * n + 2.0));
        assert!(step_ns.iter().all(|ns| *ns > 0), "{step_ns:?}");
    }
}
