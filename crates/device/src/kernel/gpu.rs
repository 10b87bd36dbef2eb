//! Users' kernels for GPUs, compiled by one process and run by another.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_search::ErrorClass;
use tilewright_search::expression::{Datum, Expression, ValueType, VariableNames, evaluate};

use super::{KernelJob, ProcessArgument, ProcessBuffer, ProcessResult, compare, is_hopeless, unknown, write_outputs};
use crate::cuda::compile::{CudaCompileError, CudaCompiler, CudaSource, WriteFile, entry_of};
use crate::failure::Failure;
use crate::gpu::{
    Cuda, Driver, DriverMemory, GuardedSpan, KernelArgument, LaunchShape, OpenCl, fits, keep_compiled_in, of_device,
};
use crate::interference::Variation;
use crate::protocol::{Caches, TimingPlan};
use crate::timing::{self, First, KernelDemands, TimedKernel};

/// Kernel for a GPU in a source file. Sizes are expressions of the parameters, constants and lists.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuJob {
    /// Target of the device.
    pub target: String,
    /// Compiler for CUDA C++; `None` for OpenCL C, which the driver compiles.
    pub compiler: Option<CudaCompiler>,
    /// Path of the source.
    pub source: PathBuf,
    /// Name of the function.
    pub function: String,
    /// Compiler options.
    pub flags: Vec<String>,
    /// Names defined as macros in addition to the parameters.
    pub constants: Vec<(String, i64)>,
    /// Lists that expressions of sizes may read, by name.
    pub lists: Vec<(String, Vec<i64>)>,
    /// Number of blocks along x, y and z.
    pub grid: [String; 3],
    /// Number of threads per block along x, y and z.
    pub block: [String; 3],
    /// Dynamic shared memory of a block in bytes, an expression; `None` for none.
    pub shared_bytes: Option<String>,
}

/// Parameters among words: those of the form `name=value`.
pub(super) fn parameters(words: &[String]) -> Vec<(String, String)> {
    words.iter().filter_map(|word| word.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect()
}

impl GpuJob {
    /// Checks that all sizes, and the further ones in `shared`, are valid expressions.
    ///
    /// # Errors
    /// If one is not, with its name and the reason.
    pub fn check(&self, parameters: &[(String, ValueType)], shared: &[String]) -> Result<(), String> {
        let scope = self.names().map(|(name, value)| (name, ValueType::of_all(&[value])));
        let scope: VariableNames = scope.chain(parameters.iter().cloned()).collect();
        let of = |what: &'static str| move |text| (what, text);
        let axes = self.grid.iter().map(of("the grid")).chain(self.block.iter().map(of("the block")));
        for (what, text) in axes.chain(self.shared_bytes.iter().chain(shared).map(of("the shared memory"))) {
            Expression::parse(text)
                .and_then(|expression| expression.compile(&scope))
                .map_err(|error| format!("{what}, `{text}`: {error}"))?;
        }
        Ok(())
    }

    /// Names that expressions of sizes may read, besides parameters.
    fn names(&self) -> impl Iterator<Item = (String, Datum)> {
        let constants = self.constants.iter().map(|(name, value)| (name.clone(), Datum::Int(*value)));
        let list = |values: &Vec<i64>| Datum::List(values.iter().copied().map(Datum::Int).collect());
        constants.chain(self.lists.iter().map(move |(name, values)| (name.clone(), list(values))))
    }

    /// Evaluates a size, which must be an integer.
    fn size(&self, what: &str, text: &str, parameters: &[(String, String)]) -> Result<i64, Failure> {
        let value = |text: &String| match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(number), _) => Datum::Int(number),
            (_, Ok(number)) => Datum::Float(number),
            _ => Datum::from(text.as_str()),
        };
        let known = self.names().chain(parameters.iter().map(|(name, text)| (name.clone(), value(text))));
        let refuse = |why: String| Failure::from((ErrorClass::InstantiationError, format!("{what}, `{text}`: {why}")));
        match evaluate(text, &known.collect::<Vec<_>>()).map_err(refuse)? {
            Datum::Int(n) if n >= 0 => Ok(n),
            Datum::Float(n) if n >= 0.0 && n.fract() == 0.0 => Ok(n as i64),
            other => Err(refuse(format!("{other} is no number of them"))),
        }
    }

    fn shape(&self, parameters: &[(String, String)]) -> Result<LaunchShape, Failure> {
        let axes = |what: &str, texts: &[String; 3]| -> Result<[i64; 3], Failure> {
            let mut sizes = [1; 3];
            for (size, text) in sizes.iter_mut().zip(texts) {
                *size = self.size(what, text, parameters)?;
            }
            match sizes.contains(&0) {
                true => Err((ErrorClass::InstantiationError, format!("{what} is empty: {sizes:?}")).into()),
                false => Ok(sizes),
            }
        };
        let (grid, block) = (axes("the grid", &self.grid)?, axes("the block", &self.block)?);
        let shared = self.shared_bytes.as_ref().map(|text| self.size("the shared memory", text, parameters));
        let shared_bytes = shared.transpose()?.unwrap_or(0) as u64;
        Ok(LaunchShape { name: self.function.clone(), grid, block, shared_bytes })
    }

    fn target(&self) -> Result<Target, Failure> {
        self.target.parse().map_err(|why| (ErrorClass::Unknown, format!("its target: {why}")).into())
    }

    /// Source with its parameters as macros, prepended to the text: as compiler options, they would apply to
    /// headers, too.
    fn text(&self, parameters: &[(String, String)], grid: [i64; 3]) -> Result<String, Failure> {
        let source = fs::read_to_string(&self.source).map_err(unknown(&self.source.to_string_lossy()))?;
        let constants = self.constants.iter().map(|(name, value)| (name.as_str(), value.to_string()));
        let parameters = parameters.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let grid = ["grid_size_x", "grid_size_y", "grid_size_z"].into_iter().zip(grid.map(|n| n.to_string()));
        let all = constants.chain(parameters).chain(grid);
        let macros: String = all.map(|(name, value)| format!("#define {name} {value}\n")).collect();
        let name = self.source.file_name().map_or("kernel".into(), |name| name.to_string_lossy());
        Ok(format!("{macros}#line 1 \"{name}\"\n{source}"))
    }
}

/// Drivers in use by a process; starting one takes longer than a kernel.
pub(super) struct Drivers {
    /// Folder of compiled code, shared by processes.
    folder: PathBuf,
    opencl: Option<OpenCl>,
    cuda: Option<Cuda>,
}

impl Drivers {
    /// Drivers for a process that serves the job of this file.
    pub(super) fn of(job: &Path) -> Drivers {
        Drivers { folder: folder_of(job).to_owned(), opencl: None, cuda: None }
    }

    fn opencl(&mut self, target: &Target) -> Result<&OpenCl, Failure> {
        if self.opencl.is_none() {
            keep_compiled_in(Some(&self.folder));
            self.opencl = Some(OpenCl::new(target).map_err(no_driver::<OpenCl>)?);
        }
        Ok(self.opencl.as_ref().expect("invariant: it was made above"))
    }

    fn cuda(&mut self, target: &Target) -> Result<&Cuda, Failure> {
        if self.cuda.is_none() {
            keep_compiled_in(None);
            self.cuda = Some(Cuda::new(target).map_err(no_driver::<Cuda>)?);
        }
        Ok(self.cuda.as_ref().expect("invariant: it was made above"))
    }
}

/// Builds the kernel of a job into a file, by `write`. The words are its parameters, as `name=value`.
pub(super) fn build(
    job: &KernelJob,
    drivers: &mut Drivers,
    into: &Path,
    words: &[String],
    write: WriteFile,
) -> Result<(), Failure> {
    let parameters = &parameters(words);
    let Some(gpu) = &job.gpu else { return Err((ErrorClass::Unknown, "there is nothing to build".to_owned()).into()) };
    let (shape, target) = (gpu.shape(parameters)?, gpu.target()?);
    // A kernel that cannot run need not be built.
    fits(&shape, target.gpu.as_ref().expect("invariant: the target is a GPU"))
        .map_err(|why| (ErrorClass::InstantiationError, why))?;
    let text = gpu.text(parameters, shape.grid)?;
    let refused = |why: String| Failure::from((ErrorClass::CompileErrorDevice, why));
    let code = match &gpu.compiler {
        None => {
            let mut options = gpu.flags.join(" ");
            let beside = folder_of(&gpu.source).display().to_string();
            // These options cannot be quoted.
            if !beside.contains(char::is_whitespace) {
                options += &format!(" -I{beside}");
            }
            drivers.opencl(&target)?.compiled(&text, &options)?
        }
        Some(compiler) => {
            let unit = CudaSource { text: &text, path: &gpu.source, flags: &gpu.flags, gpu: &target.cpu };
            let code = compiler.compile(&unit, into, write).map_err(|why| match why {
                CudaCompileError::Refused(why) => refused(why),
                other => (ErrorClass::InstantiationError, other.to_string()).into(),
            })?;
            entry_of(&code, &gpu.function).map_err(refused)?;
            code
        }
    };
    write(into, &code).map_err(unknown("its code"))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Run of a compiled kernel.
pub(super) struct GpuRun<'a> {
    /// Job with arguments and data.
    pub job: &'a KernelJob,
    /// GPU part of the job.
    pub gpu: &'a GpuJob,
    /// Values of the parameters.
    pub parameters: &'a [(String, String)],
    /// Time of the best candidate in nanoseconds, if any, for pruning.
    pub leading_ns: Option<f64>,
}

/// Failure to start a driver.
fn no_driver<D: Driver>(error: D::Error) -> Failure {
    Failure { class: ErrorClass::Unknown, ..of_device::<D>(error) }
}

impl GpuRun<'_> {
    /// Runs the job, as [`super::serve`] does.
    pub fn carry_out(
        &self,
        drivers: &mut Drivers,
        built: &Path,
        buffers: Vec<Option<ProcessBuffer>>,
    ) -> Result<Option<ProcessResult>, Failure> {
        let code = fs::read(built).map_err(unknown("its code"))?;
        let (mut shape, target) = (self.gpu.shape(self.parameters)?, self.gpu.target()?);
        match target.arch {
            Arch::Gpu(GpuApi::OpenCl) => self.on(drivers.opencl(&target)?, &target, &code, &shape, buffers),
            Arch::Gpu(GpuApi::Cuda) => {
                shape.name = entry_of(&code, &shape.name).map_err(|why| (ErrorClass::CompileErrorDevice, why))?;
                self.on(drivers.cuda(&target)?, &target, &code, &shape, buffers)
            }
            Arch::Gpu(GpuApi::AmdGpu) | Arch::X86_64 | Arch::Aarch64 => {
                Err((ErrorClass::Unknown, format!("nothing runs kernels of others for {}", target.name())).into())
            }
        }
    }

    fn on<D: Driver>(
        &self,
        driver: &D,
        target: &Target,
        code: &[u8],
        shape: &LaunchShape,
        mut buffers: Vec<Option<ProcessBuffer>>,
    ) -> Result<Option<ProcessResult>, Failure> {
        let code = driver.load(code)?;
        let mut memories: Vec<Option<Arc<DriverMemory<D>>>> = Vec::new();
        for buffer in &buffers {
            let argument = buffer.as_ref().filter(|buffer| !buffer.is_variable);
            let memory = argument.map(|buffer| driver.memory(buffer.memory.n_bytes())).transpose();
            memories.push(memory.map_err(of_device::<D>)?.map(Arc::new));
        }
        for buffer in buffers.iter().flatten().filter(|buffer| buffer.is_variable) {
            D::write_variable(&code, buffer.name, buffer.memory.as_slice::<u8>()).map_err(|failure| Failure {
                message: format!("variable {}: {}", buffer.name, failure.message),
                ..failure
            })?;
        }
        let mut arguments = Vec::new();
        for (argument, memory) in self.job.arguments.iter().zip(&memories) {
            arguments.push(match (argument, memory) {
                (ProcessArgument::Buffer { is_variable: true, .. }, _) => continue,
                (ProcessArgument::Value(bytes), _) => KernelArgument::Value(bytes.clone()),
                (ProcessArgument::Shared(text), _) => {
                    KernelArgument::Shared(self.gpu.size("the shared memory", text, self.parameters)? as usize)
                }
                (ProcessArgument::Buffer { .. }, Some(memory)) => {
                    GuardedSpan::whole(memory.clone(), memory.n_bytes()).into()
                }
                (ProcessArgument::Buffer { .. }, None) => unreachable!("every buffer has its memory"),
            });
        }
        let gpu = target.gpu.as_ref().expect("invariant: the target is a GPU");
        let launch = D::launch_own(&code, shape, gpu, arguments);
        let launches = [launch?];
        D::warm_up(&launches[0]).map_err(of_device::<D>)?;
        // Warming up may have written to the buffers, whose contents are restored.
        let pairs =
            || memories.iter().zip(&buffers).filter_map(|(memory, buffer)| Some((memory.as_ref()?, buffer.as_ref()?)));
        for (memory, buffer) in pairs() {
            memory.write(0, buffer.memory.as_slice::<u8>()).map_err(of_device::<D>)?;
        }
        let first_ns = driver.run(&launches, 1).map_err(of_device::<D>)?;
        let mut found = Vec::new();
        for (memory, buffer) in pairs() {
            if !memory.is_intact().map_err(of_device::<D>)? {
                return Err(fault("it wrote outside its buffers, beside", buffer));
            }
            let mut bytes = vec![0; buffer.memory.n_bytes() as usize];
            memory.read(0, &mut bytes).map_err(of_device::<D>)?;
            if !buffer.is_output && bytes != buffer.memory.as_slice::<u8>() {
                return Err(fault("it wrote into its input", buffer));
            }
            found.push(bytes);
        }
        for (buffer, bytes) in buffers.iter_mut().flatten().zip(found) {
            if buffer.is_output {
                buffer.memory.bytes_mut().copy_from_slice(&bytes);
            }
        }
        if self.job.is_reference {
            return write_outputs(&buffers);
        }
        let relative_error = compare(&buffers, self.job.tolerance)?;
        let samples_ns = match is_hopeless(first_ns, self.leading_ns) {
            true => vec![first_ns],
            false => self.samples(driver, &launches, first_ns)?,
        };
        for (memory, buffer) in memories.iter().zip(&buffers).filter_map(|(m, b)| Some((m.as_ref()?, b.as_ref()?))) {
            if !memory.is_intact().map_err(of_device::<D>)? {
                return Err(fault("it wrote outside its buffers, beside", buffer));
            }
        }
        Ok(Some(ProcessResult::Timed { samples_ns, relative_error }))
    }

    fn samples<D: Driver>(&self, driver: &D, launches: &[D::Launch], first_ns: f64) -> Result<Vec<f64>, Failure> {
        let plan = TimingPlan {
            min_time_ns: self.job.min_time_ns,
            min_samples: 1,
            // The verifying run was alone.
            alone_ns: f64::INFINITY,
            leading_ns: None,
            caches: Caches::Warm,
            at_best_pace: false,
        };
        // The first failure ends sampling: later calls return at once.
        let failure = RefCell::new(None);
        let mut run = |n_runs: u32| {
            // Not a match: its borrow would last until the failure is kept.
            if failure.borrow().is_some() {
                return f64::MAX;
            }
            driver.run(launches, n_runs).unwrap_or_else(|why| {
                failure.borrow_mut().get_or_insert(of_device::<D>(why));
                f64::MAX
            })
        };
        let first = First { ns: first_ns, pace: 1.0, checked_ns: first_ns };
        let subject = TimedKernel {
            run: &mut run,
            size: KernelDemands { n_threads: 1, n_bytes: 0 },
            flush: &mut || 0.0,
            pace: &mut || 1.0,
        };
        let samples = timing::sample(&plan, &mut Variation::default(), first, subject).ns;
        failure.into_inner().map_or(Ok(samples), Err)
    }
}

fn fault(what: &str, buffer: &ProcessBuffer) -> Failure {
    (ErrorClass::RuntimeError, format!("{what} {}", buffer.name)).into()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::data::anonymous_file;
    use crate::memory::{Fenced, ReadOnly};
    use tilewright_ir::DType;

    /// Program that multiplies 64 numbers by another one, in two blocks of 32 threads; `FROM` is the address
    /// that it reads.
    const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry _Z5scalePKiPii(
	.param .u64 .ptr .global .align 64 scale_param_0,
	.param .u64 .ptr .global .align 64 scale_param_1,
	.param .u32 scale_param_2
)
.reqntid 32, 1, 1
{
	.reg .b32 %r<7>;
	.reg .b64 %rd<5>;
	ld.param.b64 %rd1, [scale_param_0];
	ld.param.b64 %rd2, [scale_param_1];
	ld.param.b32 %r6, [scale_param_2];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	shl.b32 %r3, %r2, 5;
	add.s32 %r4, %r3, %r1;
	mul.wide.u32 %rd3, %r4, 4;
	add.s64 %rd4, %rd1, %rd3;
	ld.global.b32 %r5, [%rd4];
	mul.lo.s32 %r5, %r5, %r6;
	add.s64 %rd4, TO, %rd3;
	st.global.b32 [%rd4], %r5;
	ret;
}
";

    /// Runs the kernel in an emulator, with `factor` (3 is correct) and `grid` blocks.
    fn outcome(to: &str, factor: i32, grid: &str) -> Result<Option<ProcessResult>, Failure> {
        outcome_with(to, factor, grid, None)
    }

    /// Runs, as [`outcome`] does, a source with a variable of this name.
    fn outcome_with(
        to: &str,
        factor: i32,
        grid: &str,
        variable: Option<&'static str>,
    ) -> Result<Option<ProcessResult>, Failure> {
        let gpu = GpuJob {
            target: Target::named("sm_80").unwrap().to_string(),
            compiler: None,
            source: "scale.cu".into(),
            function: "scale".to_owned(),
            flags: Vec::new(),
            constants: vec![("N".to_owned(), 64)],
            lists: Vec::new(),
            grid: [grid.to_owned(), "1".to_owned(), "1".to_owned()],
            block: ["block_size_x".to_owned(), "1".to_owned(), "1".to_owned()],
            shared_bytes: None,
        };
        let file = anonymous_file(c"test").unwrap();
        let answers: Vec<u8> = (0..64).flat_map(|at| (f64::from(at) * 3.0).to_ne_bytes()).collect();
        file.write_all_at(&answers, 0).unwrap();
        let mut memory = Fenced::new(256).unwrap();
        for (bytes, at) in memory.bytes_mut().chunks_mut(4).zip(0i32..) {
            bytes.copy_from_slice(&at.to_ne_bytes());
        }
        let mut output = Fenced::new(256).unwrap();
        output.fill(0xFF);
        let answer = ReadOnly::new(file.as_fd(), 0, 512).unwrap();
        let buffers = vec![
            Some(ProcessBuffer {
                name: "in",
                dtype: DType::I32,
                memory,
                answer: None,
                is_output: false,
                is_variable: false,
            }),
            Some(ProcessBuffer {
                name: "out",
                dtype: DType::I32,
                memory: output,
                answer: Some(answer),
                is_output: true,
                is_variable: false,
            }),
            None,
            variable.map(|name| ProcessBuffer {
                name,
                dtype: DType::I32,
                memory: Fenced::new(256).unwrap(),
                answer: None,
                is_output: false,
                is_variable: true,
            }),
        ];
        let buffer = |is_output, is_variable| ProcessArgument::Buffer {
            name: String::new(),
            dtype: "i32".to_owned(),
            n: 64,
            contents_at: None,
            answer_at: None,
            is_output,
            is_variable,
        };
        let arguments =
            [buffer(false, false), buffer(true, false), ProcessArgument::Value(factor.to_ne_bytes().to_vec())];
        let variables = variable.map(|_| buffer(false, true));
        let job = KernelJob {
            arguments: arguments.into_iter().chain(variables).collect(),
            data: PathBuf::new(),
            tolerance: 0.0,
            min_time_ns: 1e6,
            n_threads: 1,
            is_reference: false,
            gpu: Some(gpu.clone()),
        };
        let parameters = parameters(&["block_size_x=32".to_owned()]);
        let target = gpu.target()?;
        let code = PTX.replace("TO", to).into_bytes();
        let mut shape = gpu.shape(&parameters)?;
        shape.name = entry_of(&code, &shape.name).unwrap();
        let run = GpuRun { job: &job, gpu: &gpu, parameters: &parameters, leading_ns: None };
        run.on(&Cuda::emulated(), &target, &code, &shape, buffers)
    }

    #[test]
    fn kernels_of_others_run_on_nvidias_driver() {
        match outcome("%rd2", 3, "N // block_size_x").unwrap() {
            Some(ProcessResult::Timed { samples_ns, relative_error }) => {
                assert!(!samples_ns.is_empty() && relative_error == 0.0, "{samples_ns:?} {relative_error}");
            }
            other => panic!("{other:?}"),
        }
        assert!(outcome_with("%rd2", 3, "2", Some("table")).is_ok());
        let Failure { class, message: why, .. } = outcome_with("%rd2", 3, "2", Some("none")).unwrap_err();
        assert!(class == ErrorClass::CompileErrorDevice && why.starts_with("variable none: "), "{class}: {why}");
        let fails = |to: &str, factor: i32, grid: &str, class: ErrorClass, words: &str| {
            let failure = outcome(to, factor, grid).unwrap_err();
            assert!(failure.class == class && failure.message.contains(words), "{failure:?}");
        };
        fails("%rd2", 2, "2", ErrorClass::WrongAnswer, "out: 63 elements are wrong");
        fails("%rd1", 3, "2", ErrorClass::RuntimeError, "it wrote into its input in");
        fails("%rd2", 3, "3", ErrorClass::RuntimeError, "it wrote outside its buffers, beside out");
        fails("%rd2", 3, "100", ErrorClass::RuntimeError, "CUDA_ERROR_ILLEGAL_ADDRESS");
        fails("%rd2", 3, "block_size_x // 64", ErrorClass::InstantiationError, "the grid is empty: [0, 1, 1]");
        fails("%rd2", 3, "N / 48", ErrorClass::InstantiationError, "the grid, `N / 48`: ");
    }

    #[test]
    fn parameters_are_macros_in_the_text() {
        let job = GpuJob {
            target: String::new(),
            compiler: None,
            source: Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"),
            function: String::new(),
            flags: Vec::new(),
            constants: vec![("N".to_owned(), 8)],
            lists: vec![("ProblemSize".to_owned(), vec![6, 7])],
            grid: ["ProblemSize[1]", "N", "1"].map(str::to_owned),
            block: ["b", "1", "1"].map(str::to_owned),
            shared_bytes: Some("4 * b".to_owned()),
        };
        let parameters = parameters(&["b=16".to_owned(), "type=float4".to_owned(), "123.5".to_owned()]);
        let shape = job.shape(&parameters).unwrap();
        assert_eq!((shape.grid, shape.block, shape.shared_bytes), ([7, 8, 1], [16, 1, 1], 64));
        let text = job.text(&parameters, shape.grid).unwrap();
        let begins = "#define N 8\n#define b 16\n#define type float4\n#define grid_size_x 7\n#define grid_size_y 8\n\
                      #define grid_size_z 1\n#line 1 \"Cargo.toml\"\n[package]";
        assert!(text.starts_with(begins), "{text}");
    }
}
