//! Intermediate forms of a configuration, from schedule steps down to machine code.

use serde_json::{Value as Json, json};
use tilewright_codegen::{CallerBuffer, CompileError, Emit, Interface, emit_gpu, export, opencl_c};
use tilewright_ir::gpu::{GpuProgram, lower_gpu};
use tilewright_ir::schedule::{apply_all, steps_text};
use tilewright_ir::{OpenSize, Part, Program, Role, Step, lower, verify};
use tilewright_search::Config;
use tilewright_tune::Task;

use crate::error::{Error, ErrorKind};
use crate::format::count;
use crate::version::BUILD;

/// Intermediate form of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Schedule steps.
    Steps,
    /// Scheduled program in the loop IR.
    Ir,
    /// Lowered program, from which code is generated; for a GPU, its kernels.
    Lowered,
    /// Source in OpenCL C.
    OpenCl,
    /// SSA form of our own back end.
    Ssa,
    /// LLVM IR after optimization.
    Llvm,
    /// Assembly.
    Asm,
    /// Relocatable object file.
    Object,
    /// C header of the object.
    Header,
}

impl Form {
    /// Forms with their names and descriptions.
    pub const ALL: [(Form, &str, &str); 9] = [
        (Form::Steps, "steps", "Schedule steps"),
        (Form::Ir, "ir", "The scheduled program"),
        (Form::Lowered, "lowered", "The lowered program, from which code is generated"),
        (Form::OpenCl, "opencl", "OpenCL C, for schedules of GPUs"),
        (Form::Ssa, "ssa", "SSA form of our own back end"),
        (Form::Llvm, "llvm", "LLVM's text after its passes"),
        (Form::Asm, "asm", "Assembly; PTX for NVIDIA's GPUs"),
        (Form::Object, "object", "A relocatable object; needs -o"),
        (Form::Header, "header", "The C header of the object"),
    ];

    /// Name of the form.
    pub fn name(self) -> &'static str {
        Form::ALL.iter().find(|(form, ..)| *form == self).expect("every form has a row").1
    }

    /// Whether the form contains function names.
    pub fn has_names(self) -> bool {
        !matches!(self, Form::Steps | Form::Ir | Form::Lowered | Form::OpenCl)
    }
}

/// Program to emit: a configuration of a task, or its untuned program.
pub struct EmittedSubject<'a> {
    /// The task.
    pub task: &'a Task,
    /// Configuration; `None` for the untuned program.
    pub config: Option<&'a Config>,
    /// Prefix of function names; if `None`, it is derived from the workload and a hash of everything that the
    /// code depends on.
    pub prefix: Option<&'a str>,
}

impl EmittedSubject<'_> {
    /// Emits the subject in a form.
    ///
    /// # Errors
    /// If a step is illegal or code cannot be generated; bad input if the form needs LLVM and this build
    /// lacks it.
    pub fn emit(&self, form: Form) -> Result<Vec<u8>, Error> {
        let target = &self.task.setting.target;
        let code = |emit| {
            let made = if target.gpu.is_some() {
                emit_gpu(&self.kernels()?, target, emit).map(|(code, _)| code)
            } else {
                let (lowered, interface) = self.lowered()?;
                export(&lowered, target, &interface.prefix, emit)
            };
            made.map_err(|error| match error {
                CompileError::NoLlvm { .. } | CompileError::NotGpu { .. } => Error::input(error),
                error => Error::failed(&error).because(error),
            })
        };
        Ok(match form {
            Form::Steps => steps_text(&self.steps()).into_bytes(),
            Form::Ir => self.scheduled()?.to_string().into_bytes(),
            Form::Lowered if target.gpu.is_some() => self.kernels()?.to_string().into_bytes(),
            Form::Lowered => lower::lower(&self.scheduled()?).to_string().into_bytes(),
            Form::OpenCl if target.gpu.is_none() => {
                return Err(Error::of(ErrorKind::NotForGpu, "OpenCL C is for GPUs"));
            }
            Form::OpenCl => opencl_c(&self.kernels()?, target).into_bytes(),
            Form::Ssa => code(Emit::Ssa)?,
            Form::Llvm => code(Emit::LlvmOptimized)?,
            Form::Asm => code(Emit::Asm)?,
            Form::Object => code(Emit::Object)?,
            Form::Header => self.lowered()?.1.header(&self.origin()).into_bytes(),
        })
    }

    /// Interface of the object for C programs, as JSON.
    ///
    /// # Errors
    /// As [`EmittedSubject::emit`].
    pub fn interface(&self) -> Result<Json, Error> {
        Ok(interface_json(&self.lowered()?.1))
    }

    fn steps(&self) -> Vec<Step> {
        self.config.map_or(Vec::new(), |config| self.task.steps(config))
    }

    fn scheduled(&self) -> Result<Program, Error> {
        let steps = self.steps();
        apply_all(&self.task.setting.workload.program(), &steps)
            .map_err(|(at, why)| Error::failed(format!("step {} `{}`: {why}", at + 1, steps[at])))
    }

    fn kernels(&self) -> Result<GpuProgram, Error> {
        let program = self.scheduled()?;
        verify::verify(&program).map_err(|error| Error::failed(&error).because(error))?;
        lower_gpu(&program).map_err(|error| Error::failed(&error).because(error))
    }

    fn lowered(&self) -> Result<(Program, Interface), Error> {
        let program = self.scheduled()?;
        // After lowering, the verifier may no longer see that iterations are independent.
        verify::verify(&program).map_err(|error| Error::failed(&error).because(error))?;
        let (lowered, setting) = (lower::lower(&program), &self.task.setting);
        let interface = Interface::new(&lowered, &setting.target, setting.n_threads, self.prefix);
        Ok((lowered, interface.map_err(|error| Error::failed(&error).because(error))?))
    }

    /// Origin of the code, in lines.
    fn origin(&self) -> [String; 3] {
        let (setting, template) = (&self.task.setting, self.task.template.name);
        let made_of = self.config.map(|config| self.task.space.config_to_json(config)).map_or_else(
            || "the untuned program".to_owned(),
            |config| format!("template {template}, configuration {config}"),
        );
        let threads = count(setting.n_threads as u64, "thread");
        [
            format!("{} for {}, {threads}", setting.workload, setting.target.name()),
            made_of,
            format!("written by tilewright {BUILD}, whose docs/objects.md says more"),
        ]
    }
}

/// Interface of an object for C programs, as JSON.
fn interface_json(interface: &Interface) -> Json {
    let buffer = |b: &CallerBuffer| {
        let names = |parts: &[Part]| parts.iter().map(|part| part.name()).collect::<Vec<_>>();
        json!({
            "name": b.name,
            "dtype": b.dtype.name(),
            "shape": b.shape,
            "bytes": b.size_bytes,
            "role": Role::ALL.iter().find(|(role, _)| *role == b.role).map(|(_, name)| *name),
            "read_by": names(&b.read_by),
            "written_by": names(&b.written_by),
        })
    };
    let symbols = [interface.symbols(), interface.ffi_symbols()].concat();
    let (kept, arguments): (Vec<&CallerBuffer>, Vec<_>) = interface.buffers.iter().partition(|b| b.role == Role::Kept);
    let size =
        |size: &OpenSize| json!({ "name": size.name, "least": size.least, "most": size.most(), "step": size.step });
    json!({
        "prefix": interface.prefix,
        "sizes": interface.sizes.iter().map(size).collect::<Vec<_>>(),
        "symbols": symbols,
        "arguments": arguments.into_iter().map(buffer).collect::<Vec<_>>(),
        "kept": kept.into_iter().map(buffer).collect::<Vec<_>>(),
        "alignment": Interface::ALIGN,
        "scratch_bytes": interface.scratch_bytes,
        "kept_bytes": interface.kept_bytes(),
        "threads": interface.n_threads,
        "cpu_features": interface.cpu_features,
        "has_prepare": interface.has(Part::Prepare),
        "has_finish": interface.has(Part::Finish),
    })
}
