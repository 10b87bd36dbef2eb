//! Test bench of a kernel: the folder shared by all candidates, and the commands that build and call them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tilewright_device::command::{CommandOptions, CommandTemplate, FOLDER, Invocation, Metric, run_to_end};
use tilewright_device::cuda::compile::CudaCompiler;
use tilewright_device::device::WorkerCommand;
use tilewright_device::folder::Folder;
use tilewright_device::kernel::{ENTRY, GpuJob, KernelJob, ProcessArgument};
use tilewright_device::{host, opencl};
use tilewright_ir::{DType, Target};
use tilewright_search::Space;

use super::form::{Language, RoleForm, default_flags};
use super::{BUILD, CALL, KernelFile, KernelPort};
use crate::error::Error;
use crate::request::{Request, Settings};

/// Alignment of the contents of the data, so that they can be mapped.
const PAGE: u64 = 4096;
/// Default timeouts of a build and of a candidate's runs, and default minimum time of these runs.
const BUILD_TIMEOUT: Duration = Duration::from_secs(60);
const RUN_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_TIME: Duration = Duration::from_millis(10);

/// Folder of everything that candidates share.
pub(super) struct BenchFolder<'a> {
    pub(super) request: &'a KernelFile,
    pub(super) settings: &'a Settings,
    pub(super) worker: &'a WorkerCommand,
    pub(super) target: Target,
    /// Build and launch of a kernel for a GPU.
    pub(super) gpu: Option<GpuJob>,
    pub(super) folder: Folder,
    pub(super) ports: Vec<KernelPort>,
    pub(super) memory_bytes: u64,
    pub(super) cpus: Vec<usize>,
}

impl<'a> BenchFolder<'a> {
    /// Finds the device and the compiler.
    pub(super) fn new(
        request: &'a KernelFile,
        of: &'a Request,
        worker: &'a WorkerCommand,
    ) -> Result<BenchFolder<'a>, Error> {
        let settings = of.settings();
        let folder = Folder::new("tilewright-kernel")
            .map_err(BenchFolder::failed("a folder for what candidates have in common"))?;
        crate::file::read(&request.path(&request.form.source), "the kernel's source")?;
        let (language, target) = (request.language()?, request.target(of.device_name()?, settings.threads)?);
        // An OpenCL device may be the CPU, which uses all of its cores.
        let takes_cpus = language == Language::OpenCl && opencl::device_of(&target).is_ok_and(|device| device.is_cpu);
        let compiler = match language {
            Language::Cuda => Some(CudaCompiler::find(request.form.compiler.as_deref()).map_err(Error::input)?),
            Language::C | Language::Cpp | Language::OpenCl => None,
        };
        let gpu = request.gpu(&target, compiler)?;
        let memory_bytes = settings.memory_bytes.unwrap_or(match gpu.is_some() && !takes_cpus {
            // Drivers of GPUs map more address space than any limit allows.
            true => u64::MAX,
            false => host::memory_bytes().unwrap_or(8 << 30) / 2,
        });
        let cpus = if takes_cpus { host::allowed_cpus() } else { host::pin_cpus(settings.threads) };
        Ok(BenchFolder { request, settings, worker, target, gpu, folder, ports: request.ports()?, memory_bytes, cpus })
    }

    /// Options of the commands that build and call candidates.
    pub(super) fn options(&self, space: &Space) -> Result<CommandOptions, Error> {
        let (contents, answers) = self.answers(space)?;
        let job = self.job("kernel", self.gpu.clone(), &contents, Some(&answers))?;
        let (build, run) = self.templates(space, &job)?;
        let settings = self.settings;
        Ok(CommandOptions {
            build: Some(build),
            objectives: Metric::Kernel.into(),
            build_timeout: settings.build_timeout.unwrap_or(BUILD_TIMEOUT),
            run_timeout: settings.run_timeout.unwrap_or(RUN_TIMEOUT),
            to_the_end: settings.to_the_end,
            memory_bytes: self.memory_bytes,
            cpus: self.cpus.clone(),
            ..CommandOptions::new(run)
        })
    }

    /// Commands that build a candidate and call it, with placeholders for the values of parameters.
    pub(super) fn templates(&self, space: &Space, job: &Path) -> Result<(CommandTemplate, CommandTemplate), Error> {
        let library = format!("{{{FOLDER}}}/kernel.so");
        // Placeholders are inserted into words that are quoted otherwise.
        let marker = "\u{1}".to_owned();
        let template = |words: Vec<String>, option: &str| {
            let places = || space.names().map(|name| format!("{option}{name}={{{name}}}")).collect::<Vec<_>>();
            let words = words.into_iter().flat_map(|word| match word == marker {
                true => places(),
                false => vec![if word == library { word } else { CommandTemplate::quoted(&word) }],
            });
            let names: Vec<&str> = space.names().chain([FOLDER]).collect();
            CommandTemplate::words(&words.collect::<Vec<_>>().join(" "), &names).map_err(Error::input)
        };
        let markers = std::slice::from_ref(&marker);
        // One process serves all candidates, each given by the words after its job.
        let n_words = self.worker.arguments.len() + 3;
        let words = |option: &str, macros: &[String]| {
            let template = template(self.caller(option, job, &library, macros), "");
            template.map(|template| template.staying_after(n_words))
        };
        if self.gpu.is_some() {
            return Ok((words(BUILD, markers)?, words(CALL, markers)?));
        }
        let (form, language) = (&self.request.form, self.request.language()?);
        let extension = if language == Language::C { "c" } else { "cc" };
        let text = wrapper(&self.request.path(&form.source), &form.function, &self.ports);
        let wrapper = self.write(&format!("kernel.{extension}"), text.as_bytes())?;
        let build = template(self.compile(&wrapper, language, markers, &library), "-D")?;
        Ok((build, words(CALL, &[])?))
    }

    pub(super) fn failed(what: &str) -> impl Fn(std::io::Error) -> Error {
        move |error| Error::failed(what.to_owned()).because(error)
    }

    pub(super) fn write(&self, name: &str, contents: &[u8]) -> Result<PathBuf, Error> {
        let path = self.folder.path().join(name);
        let written = crate::file::write_whole(&path, |out| out.write_all(contents));
        written.map_err(Self::failed("writing what candidates have in common"))?;
        Ok(path)
    }

    /// Words that compile a source into a shared object, without those of parameters.
    pub(super) fn compile(&self, wrapper: &Path, language: Language, macros: &[String], library: &str) -> Vec<String> {
        let form = &self.request.form;
        // The options of a GPU kernel do not apply to a reference on the CPU.
        let (compiler, flags) = match self.gpu {
            None => (form.compiler.as_deref(), form.flags.clone().unwrap_or_default()),
            Some(_) => (None, default_flags()),
        };
        let default = if language == Language::C { "cc" } else { "c++" };
        let mut words = vec![compiler.unwrap_or(default).to_owned()];
        words.extend(flags.iter().cloned());
        words.extend(form.constants.iter().map(|(name, value)| format!("-D{name}={value}")));
        words.extend(macros.iter().cloned());
        words.extend(["-shared", "-fPIC", "-o", library].map(str::to_owned));
        words.push(wrapper.to_string_lossy().into_owned());
        // Libraries come last.
        words.extend(flags.into_iter().filter(|flag| flag.starts_with("-l")));
        words
    }

    pub(super) fn run(&self, what: &str, words: Vec<String>, timeout: Duration) -> Result<Vec<u8>, Error> {
        run_to_end(&Invocation::new(words), what, timeout, self.memory_bytes).map_err(Error::input)
    }

    /// Command of a worker process that builds the kernel of a job, or calls it.
    pub(super) fn caller(&self, option: &str, job: &Path, library: &str, macros: &[String]) -> Vec<String> {
        let mut words = vec![self.worker.program.to_string_lossy().into_owned()];
        words.extend(self.worker.arguments.iter().cloned());
        words.extend([option.to_owned(), job.to_string_lossy().into_owned(), library.to_owned()]);
        words.extend(macros.iter().cloned());
        words
    }

    /// Makes a job with these contents of buffers and these expected results of outputs, in order, as
    /// [held](DType::held); without expected results, the job returns the outputs.
    pub(super) fn job(
        &self,
        name: &str,
        gpu: Option<GpuJob>,
        contents: &[Vec<f64>],
        answers: Option<&[Vec<f64>]>,
    ) -> Result<PathBuf, Error> {
        let mut data: Vec<u8> = Vec::new();
        let mut add = |values: &[f64], dtype: DType| {
            let at = (data.len() as u64).next_multiple_of(PAGE);
            data.resize(at as usize + values.len() * dtype.bytes() as usize, 0);
            dtype.write(values, &mut data[at as usize..]);
            at
        };
        let is_reference = answers.is_none();
        let mut answers = answers.map(|answers| answers.iter());
        let arguments = self.ports.iter().zip(contents).map(|(port, contents)| {
            if let Some(n_bytes) = &port.shared {
                return ProcessArgument::Shared(n_bytes.clone());
            }
            let Some(n) = port.n else {
                let mut bytes = vec![0; port.dtype.bytes() as usize];
                port.dtype.write(&[port.value], &mut bytes);
                return ProcessArgument::Value(bytes);
            };
            let is_output = port.role != RoleForm::In;
            let contents_at = (!contents.is_empty()).then(|| add(contents, port.dtype));
            let answer = answers.as_mut().filter(|_| is_output).and_then(Iterator::next);
            let answer_at = answer.map(|answer| add(answer, DType::F64));
            let (name, dtype, is_variable) = (port.name.clone(), port.dtype.name().to_owned(), port.is_variable);
            ProcessArgument::Buffer { name, dtype, n, contents_at, answer_at, is_output, is_variable }
        });
        let arguments = arguments.collect();
        let end = data.len().next_multiple_of(PAGE as usize).max(PAGE as usize);
        data.resize(end, 0);
        let job = KernelJob {
            arguments,
            data: self.write(&format!("{name}.data"), &data)?,
            tolerance: self.request.form.tolerance,
            min_time_ns: self.settings.min_time.unwrap_or(MIN_TIME).as_secs_f64() * 1e9,
            n_threads: self.settings.threads,
            is_reference,
            gpu,
        };
        self.write(&format!("{name}.json"), &serde_json::to_vec(&job).expect("invariant: a job has a form in JSON"))
    }
}

/// C file that calls a function: the source itself, and a wrapper with a fixed signature. Shared memory of
/// blocks has no argument in it.
pub(super) fn wrapper(source: &Path, function: &str, ports: &[KernelPort]) -> String {
    let argument = |(at, port): (usize, &KernelPort)| match (port.n, port.role) {
        (None, _) => format!("*({} *)a[{at}]", port.c_type),
        (Some(_), RoleForm::In) => format!("*({} const **)a[{at}]", port.c_type),
        (Some(_), _) => format!("*({} **)a[{at}]", port.c_type),
    };
    let ports = ports.iter().enumerate().filter(|(_, port)| port.shared.is_none());
    let arguments = ports.map(argument).collect::<Vec<_>>().join(", ");
    format!(
        "#include <stdint.h>\n#include \"{}\"\n#ifdef __cplusplus\nextern \"C\"\n#endif\nvoid {ENTRY}(void **a) {{ {function}({arguments}); }}\n",
        source.display()
    )
}
