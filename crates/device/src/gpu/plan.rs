//! Execution of plans on GPUs: constants and intermediate tensors stay on the device.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;
use tilewright_codegen::{Runtime, opencl_c};
use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_runtime::gpu::{self, GpuModel, Home, Launches};
use tilewright_runtime::{Aligned, Constant, Host, PlanStep, TensorSlice, Work, on_all_cores};

use super::{Cuda, Driver, DriverMemory, GuardedSpan, KeptCode, LaunchShape, OpenCl, fits};

/// Reason why a plan cannot run on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GpuError {
    /// Device that is missing or fails.
    #[error("{target}: {why}")]
    Device {
        /// Target of the device.
        target: String,
        /// Message of the driver.
        why: String,
    },
    /// Step that cannot be prepared or executed.
    #[error("step `{step}`: {why}")]
    Step {
        /// The step.
        step: String,
        /// Reason.
        why: String,
    },
}

/// Model loaded on a device, with its code, constants and memory.
pub struct GpuContext(LoadedStep);

enum LoadedStep {
    OpenCl(Box<ModelOnDevice<OpenCl>>),
    Cuda(Box<ModelOnDevice<Cuda>>),
}

impl GpuContext {
    /// Compiles the kernels, or loads them from the cache, and copies the constants to the device.
    ///
    /// # Errors
    /// If there is no such device, it has too little memory, or it refuses a kernel.
    pub fn new(model: &Arc<GpuModel>, kept: &dyn KeptCode) -> Result<GpuContext, GpuError> {
        let target = &model.target;
        let loaded = match model.target.arch {
            Arch::Gpu(GpuApi::OpenCl) => {
                let driver = OpenCl::new(&model.target).map_err(of_device(target))?;
                LoadedStep::OpenCl(Box::new(ModelOnDevice::new(driver, Arc::clone(model), kept)?))
            }
            Arch::Gpu(GpuApi::Cuda) => {
                let driver = Cuda::new(&model.target).map_err(of_device(target))?;
                LoadedStep::Cuda(Box::new(ModelOnDevice::new(driver, Arc::clone(model), kept)?))
            }
            _ => return Err(of_device(target)("nothing runs models for it")),
        };
        Ok(GpuContext(loaded))
    }

    /// Runs the model: copies inputs to the device and outputs back, both in the model's order.
    ///
    /// # Errors
    /// If the device or a step in this process fails.
    pub fn run(&mut self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), GpuError> {
        match &mut self.0 {
            LoadedStep::OpenCl(loaded) => loaded.run(inputs, outputs, None),
            LoadedStep::Cuda(loaded) => loaded.run(inputs, outputs, None),
        }
    }

    /// Runs the model step by step, and adds the nanoseconds of each step to its entry.
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
            LoadedStep::OpenCl(loaded) => loaded.run(inputs, outputs, Some(step_ns)),
            LoadedStep::Cuda(loaded) => loaded.run(inputs, outputs, Some(step_ns)),
        }
    }
}

/// OpenCL sources of a model's programs whose code is not cached; empty for other devices.
///
/// # Errors
/// If there is no such device.
pub fn missing_sources(model: &GpuModel, kept: &dyn KeptCode) -> Result<Vec<String>, GpuError> {
    let target = &model.target;
    if target.arch != Arch::Gpu(GpuApi::OpenCl) {
        return Ok(Vec::new());
    }
    let driver = OpenCl::new(target).map_err(of_device(target))?;
    let all = Launches::new(model, driver.alignment().map_err(of_device(target))?);
    let numbers: BTreeSet<usize> = all.preparations.iter().chain(&all.launches).map(|launch| launch.program).collect();
    let sources = numbers.into_iter().map(|number| opencl_c(all.program(number), target));
    Ok(sources.filter(|source| !driver.is_kept(source, kept)).collect())
}

/// Makes the error of a device.
fn of_device<E: ToString>(target: &Target) -> impl Fn(E) -> GpuError + use<E> {
    let target = target.name();
    move |why| GpuError::Device { target: target.clone(), why: why.to_string() }
}

/// Makes the error of a step.
fn of_step<E: ToString>(step: &PlanStep) -> impl Fn(E) -> GpuError {
    let step = step.name.clone();
    move |why| GpuError::Step { step: step.clone(), why: why.to_string() }
}

/// Executable form of a step of the plan.
enum Doing<D: Driver> {
    /// Launches on the device, by index.
    Launches(Range<usize>),
    /// Function of this process, called once all earlier launches are done.
    Host {
        before: usize,
        inputs: Vec<GuardedSpan<DriverMemory<D>>>,
        outputs: Vec<GuardedSpan<DriverMemory<D>>>,
        run: Host,
    },
}

/// Model on a driver's device.
struct ModelOnDevice<D: Driver> {
    driver: D,
    model: Arc<GpuModel>,
    memories: BTreeMap<Home, Arc<DriverMemory<D>>>,
    launches: Vec<D::Launch>,
    steps: Vec<Doing<D>>,
    /// Recorded launches between calls of this process's functions, by the index of the first launch.
    recorded: BTreeMap<usize, (Range<usize>, D::Recorded)>,
    /// Whether a run has shown that no kernel writes outside its buffers.
    is_checked: bool,
}

/// Preparation of a model for the device.
struct Loader<'m, D: Driver> {
    driver: &'m D,
    model: &'m GpuModel,
    launches: &'m Launches<'m>,
    memories: BTreeMap<Home, Arc<DriverMemory<D>>>,
    codes: HashMap<usize, D::Code>,
}

impl<D: Driver> ModelOnDevice<D> {
    fn new(driver: D, model: Arc<GpuModel>, kept: &dyn KeptCode) -> Result<ModelOnDevice<D>, GpuError> {
        let align = driver.alignment().map_err(of_device(&model.target))?;
        let all = Launches::new(&model, align);
        let (memories, codes) = (BTreeMap::new(), codes(&driver, &model, &all, kept)?);
        let mut loader = Loader { driver: &driver, model: &model, launches: &all, memories, codes };
        let preparations = loader.launches(&all.preparations)?;
        if !preparations.is_empty() {
            driver.run(&preparations, 1).map_err(of_device(&model.target))?;
        }
        drop(preparations);
        let launches = loader.launches(&all.launches)?;
        let steps = model.plan.steps.iter().zip(&all.steps);
        let steps = steps.map(|(step, range)| loader.step(step, range.clone())).collect::<Result<Vec<_>, _>>()?;
        for tensor in 0..model.plan.tensors.len() {
            if let home @ (Home::Input(_) | Home::Output(_)) = all.span(&model.plan.whole(tensor)).home {
                loader.memory(home).map_err(of_device(&model.target))?;
            }
        }
        let mut memories = loader.memories;
        // Memory of original constants is released unless something else needs it.
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
        Ok(ModelOnDevice { driver, model, memories, launches, steps, recorded, is_checked: false })
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
                    host::<D>(inputs, outputs, run).map_err(of_step(step))?;
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

/// Code of each program that is launched, built on all cores.
fn codes<D: Driver>(
    driver: &D,
    model: &GpuModel,
    all: &Launches,
    kept: &dyn KeptCode,
) -> Result<HashMap<usize, D::Code>, GpuError> {
    let target = &model.target;
    let gpu = target.gpu.as_ref().expect("invariant: the target is a GPU");
    // With the first step that launches it, to name in an error.
    let launches = all.preparations.iter().chain(&all.launches).rev();
    let steps: BTreeMap<usize, usize> = launches.map(|launch| (launch.program, launch.step)).collect();
    let build = |(): &mut (), (number, step): (usize, usize)| {
        let program = all.program(number);
        let fitting = program.kernels().try_for_each(|kernel| fits(&LaunchShape::of(kernel, program, target), gpu));
        let code = fitting.and_then(|()| driver.build(program, target, kept).map_err(|failure| failure.message));
        Ok((number, code.map_err(of_step(&model.plan.steps[step]))?))
    };
    on_all_cores(steps.into_iter().collect(), || (), build).into_iter().collect()
}

/// Calls a function of this process on data of the device.
fn host<D: Driver>(
    inputs: &[GuardedSpan<DriverMemory<D>>],
    outputs: &[GuardedSpan<DriverMemory<D>>],
    run: &Host,
) -> Result<(), String> {
    let say = |error: std::io::Error| error.to_string();
    let room = |span: &GuardedSpan<DriverMemory<D>>| Aligned::new(span.n_bytes).map_err(say);
    let mut given = inputs.iter().map(room).collect::<Result<Vec<_>, _>>()?;
    let mut made = outputs.iter().map(room).collect::<Result<Vec<_>, _>>()?;
    for (span, memory) in inputs.iter().zip(&mut given).filter(|(span, _)| span.n_bytes > 0) {
        span.memory.read(span.at as usize, memory.bytes_mut()).map_err(|why| why.to_string())?;
    }
    match run {
        Host::Function(run) => {
            let given: Vec<&[u8]> = given.iter().map(Aligned::bytes).collect();
            let mut made: Vec<&mut [u8]> = made.iter_mut().map(Aligned::bytes_mut).collect();
            run(&given, &mut made)?;
        }
        Host::Call(call) => {
            let scratch = Aligned::new(call.scratch_bytes as u64).map_err(say)?;
            let buffers: Vec<*mut u8> = given.iter().chain(&made).map(Aligned::pointer).collect();
            // SAFETY: all memory is as large as the step says, begins at a line, and is borrowed.
            unsafe { call.call(&buffers, scratch.pointer(), &Runtime::serial(), &[])? };
        }
    }
    for (span, memory) in outputs.iter().zip(&made).filter(|(span, _)| span.n_bytes > 0) {
        span.memory.write(span.at as usize, memory.bytes()).map_err(|why| why.to_string())?;
    }
    Ok(())
}

impl<D: Driver> Loader<'_, D> {
    /// Memory of a home, allocated and initialised at its first use.
    fn memory(&mut self, home: Home) -> Result<Arc<DriverMemory<D>>, String> {
        if let Some(memory) = self.memories.get(&home) {
            return Ok(Arc::clone(memory));
        }
        let memory = self.driver.memory(self.launches.memory_bytes(home)).map_err(|why| why.to_string())?;
        let memory = Arc::new(memory);
        if let Home::Constant(at) = home
            && let Constant::Data(data) = &self.model.plan.constants[at]
            && !data.is_empty()
        {
            memory.write(0, data).map_err(|why| why.to_string())?;
        }
        self.memories.insert(home, Arc::clone(&memory));
        Ok(memory)
    }

    fn span(&mut self, span: &gpu::Span) -> Result<GuardedSpan<DriverMemory<D>>, String> {
        Ok(GuardedSpan { memory: self.memory(span.home)?, at: span.at, n_bytes: span.n_bytes })
    }

    fn launches(&mut self, of: &[gpu::Launch]) -> Result<Vec<D::Launch>, GpuError> {
        let model = self.model;
        of.iter().map(|launch| self.launch(launch).map_err(of_step(&model.plan.steps[launch.step]))).collect()
    }

    fn launch(&mut self, launch: &gpu::Launch) -> Result<D::Launch, String> {
        let (target, program) = (&self.model.target, self.launches.program(launch.program));
        let spans = launch.arguments.iter().map(|span| self.span(span)).collect::<Result<Vec<_>, _>>()?;
        let made = D::launch(&self.codes[&launch.program], self.launches.kernel_of(launch), program, target, spans);
        made.map_err(|failure| failure.message)
    }

    /// Makes the executable form of a step from its launches.
    fn step(&mut self, step: &PlanStep, launches: Range<usize>) -> Result<Doing<D>, GpuError> {
        let Work::Host { inputs, outputs, run } = &step.work else { return Ok(Doing::Launches(launches)) };
        let all = self.launches;
        let mut spans = |slices: &[TensorSlice]| {
            let spans = slices.iter().map(|slice| self.span(&all.span(slice))).collect::<Result<Vec<_>, _>>();
            spans.map_err(of_step(step))
        };
        let (inputs, outputs) = (spans(inputs)?, spans(outputs)?);
        Ok(Doing::Host { before: launches.start, inputs, outputs, run: run.clone() })
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Display;
    use std::sync::Mutex;

    use super::*;
    use tilewright_ir::text::parse;
    use tilewright_ir::{DType, lower_gpu};
    use tilewright_runtime::{Place, Plan};

    /// Program that doubles each of 40 numbers.
    const DOUBLE: &str = "program \"double\"
buffer x: f32[40] global input
buffer y: f32[40] global output
loops i
run { block.x i in 2 { thread.x i in 20 { y[20*i + i] = x[20*i + i] * 2.0 } } }";

    /// Model of a kernel whose result begins at an unaligned offset, a function of this process, and a copy.
    fn model() -> GpuModel {
        let kernel = DOUBLE.replace("thread.x i in 20", "thread.x t in 20").replace("+ i]", "+ t]");
        let kernel = parse(&kernel.replace("loops i", "loops i, t")).unwrap();
        let mut plan = Plan::default();
        let x = plan.tensor("x", DType::F32, &[40], Place::Input(0));
        let way = plan.tensor("way", DType::F32, &[41], Place::Arena(0));
        let sums = plan.tensor("sums", DType::F32, &[40], Place::Arena(512));
        let y = plan.tensor("y", DType::F32, &[42], Place::Output(0));
        let part = |tensor, n: usize| TensorSlice { tensor, offset: 4 * n, n_bytes: 160 };
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
            sizes: Vec::new(),
        };
        let works = [
            double(part(x, 0), part(way, 1)),
            Work::Host {
                inputs: vec![part(way, 1)],
                outputs: vec![part(sums, 0)],
                run: Host::Function(Arc::new(add_one)),
            },
            double(part(sums, 0), part(way, 1)),
            Work::Copy { from: part(way, 1), to: part(y, 2), rows: None },
        ];
        plan.steps = works.map(|work| PlanStep { name: "a step".to_owned(), work, guard: None }).into();
        let target = Target::named("sm_90a").unwrap();
        GpuModel { plan, kernels: vec![lower_gpu(&kernel).unwrap()], target }
    }

    #[test]
    fn kernels_functions_and_copies_run_in_their_order() {
        let mut loaded = ModelOnDevice::new(Cuda::emulated(), Arc::new(model()), &()).unwrap();
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

    /// Code in memory, by the texts that determine it.
    #[derive(Default)]
    struct InMemory(Mutex<HashMap<String, Vec<u8>>>);

    fn key(determined_by: &[&dyn Display]) -> String {
        determined_by.iter().map(ToString::to_string).collect()
    }

    impl KeptCode for InMemory {
        fn find(&self, determined_by: &[&dyn Display]) -> Option<Vec<u8>> {
            self.0.lock().unwrap().get(&key(determined_by)).cloned()
        }

        fn keep(&self, determined_by: &[&dyn Display], code: &[u8]) {
            self.0.lock().unwrap().insert(key(determined_by), code.to_vec());
        }
    }

    #[test]
    fn code_that_is_kept_is_used_and_what_is_gone_made_again() {
        let kept = InMemory::default();
        let numbers = |of: fn(f32) -> f32| -> Vec<u8> { (0..40).flat_map(|n| of(n as f32).to_le_bytes()).collect() };
        let check = || {
            let mut loaded = ModelOnDevice::new(Cuda::emulated(), Arc::new(model()), &kept).unwrap();
            let mut y = vec![0; 168];
            loaded.run(&[&numbers(|n| n)], &mut [&mut y], None).unwrap();
            assert_eq!(y[8..], numbers(|n| 4.0 * n + 2.0));
            kept.0.lock().unwrap().clone()
        };
        let first = check();
        // A kernel, and the copies of data at offsets that a device does not accept as arguments.
        assert_eq!(first.len(), 3);
        assert_eq!(check(), first);
        // Missing code is built again.
        let gone = first.keys().next().unwrap();
        kept.0.lock().unwrap().remove(gone);
        assert_eq!(check(), first);
    }
}
