//! Tuning of users' kernels: functions in C or C++, or kernels in OpenCL C or CUDA, with parameters as
//! macros.

mod bench;
mod form;
mod reference;
mod t1;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tilewright_device::cuda::compile::CudaCompiler;
use tilewright_device::device::WorkerCommand;
use tilewright_device::host;
use tilewright_device::kernel::GpuJob;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_ir::{DType, Target};
use tilewright_search::Space;
use tilewright_search::expression::{self, Datum, ValueType};
use tilewright_tune::predict::content_hash;

use self::bench::BenchFolder;
use self::form::{
    ArgumentForm, Fill, KernelForm, Language, NumberForm, ParameterForm, RoleForm, ValuesForm, default_flags,
};
use super::command::{is_plain_name, refuse_name, space_of};
use super::files::Files;
use super::own::OwnRun;
use crate::device_spec::{CPU, DeviceSpec, HOST};
use crate::error::{Error, ErrorKind};
use crate::request::Request;

/// Prefix of kernels in records, and name of their template.
pub const KERNEL: &str = "kernel";

/// Element types of buffers, by their names in C.
const TYPES: &[(&str, DType)] = &[
    ("float", DType::F32),
    ("double", DType::F64),
    ("int", DType::I32),
    ("int32_t", DType::I32),
    ("int64_t", DType::I64),
    ("long", DType::I64),
    ("int8_t", DType::I8),
    ("signed char", DType::I8),
    ("uint8_t", DType::U8),
    ("unsigned char", DType::U8),
    // Unsigned types, of which only the bits matter, and which sizes have.
    ("uint32_t", DType::I32),
    ("unsigned int", DType::I32),
    ("uint", DType::I32),
    ("half", DType::F16),
];
/// Maximum number of elements of a buffer.
const MOST_ELEMENTS: i64 = 1 << 32;
/// Argument that makes a process a worker which calls a user's kernel.
pub const CALL: &str = "--kernel";
/// Argument that makes a process a worker which builds a user's kernel for a GPU.
pub const BUILD: &str = "--kernel-build";

/// Kernel to be tuned in C, C++, OpenCL C or CUDA, as a file describes it.
///
/// ```standalone_crate
/// use tilewright::{KernelFile, Request, Session};
///
/// fn main() -> Result<(), tilewright::Error> {
///     tilewright::serve_if_worker();
/// #   let folder = tempfile::tempdir().unwrap();
/// #   let folder = folder.path();
/// #   let session = Session::open(folder.join("records.db"))?;
/// #   /*
///     let (session, folder) = (Session::open("records.db")?, Path::new("."));
/// #   */
///     let source = "void scale(const float *x, float *y) { for (int i = 0; i < 64; i += STEP) \\
///                   for (int j = i; j < i + STEP; j++) y[j] = 2 * x[j]; }";
///     std::fs::write(folder.join("scale.c"), source).unwrap();
///     let description = r#"
///         name = "scale"
///         source = "scale.c"
///         function = "scale"
///         parameters = [{ name = "STEP", values = [1, 8] }]
///         arguments = [
///           { name = "x", type = "float", size = 64 },
///           { name = "y", type = "float", size = 64, role = "out" },
///         ]
///         reference = { configuration = { STEP = 1 } }
///     "#;
///     let kernel = KernelFile::parse(description, &folder.join("scale.toml"))?;
///     let tuned = session.tune(&Request::new(kernel).trials(2))?;
///     assert!(tuned.verified);
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone)]
pub struct KernelFile {
    /// Contents of its file.
    form: KernelForm,
    /// Folder of the file; other names are relative to it.
    folder: PathBuf,
}

/// Buffer or scalar argument of a kernel.
#[derive(Debug, Clone)]
struct KernelPort {
    name: String,
    /// C type of an element.
    c_type: String,
    dtype: DType,
    /// Number of elements of a buffer; `None` for a scalar.
    n: Option<u64>,
    /// Size in bytes of an array in the shared memory of a block, as an expression.
    shared: Option<String>,
    /// Whether it is a variable of the source, rather than an argument.
    is_variable: bool,
    /// Value of a scalar argument.
    value: f64,
    role: RoleForm,
    fill: Fill,
}

/// Whether a type has a number: integers exactly, fractions nearly.
fn holds(dtype: DType, number: f64) -> bool {
    match () {
        () if dtype.is_float() => dtype.held(number).is_finite(),
        () if dtype.is_wide() => number.fract() == 0.0 && number.abs() <= 2f64.powi(63),
        () => dtype.held(number) == number,
    }
}

impl KernelFile {
    /// Parses the description of a kernel, in our format or Kernel Tuner's T1; `path` is the location of the
    /// file.
    ///
    /// # Errors
    /// If the text describes no kernel, or one that cannot be tuned here.
    pub fn parse(text: &str, path: &Path) -> Result<KernelFile, Error> {
        let named = |error: Error| Error::input(format!("{}: {error}", path.display()));
        let form: KernelForm = match t1::is_description(text) {
            true => t1::form(text),
            false => toml::from_str(text).map_err(|error| {
                let line = error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count());
                let line = line.map_or(String::new(), |line| format!("line {line}: "));
                Error::input(format!("{line}{}", crate::error::one_line(error.message())))
            }),
        }
        .map_err(named)?;
        let mut request = KernelFile { form, folder: path.parent().unwrap_or(Path::new("")).to_owned() };
        let is_for_cpu = request.language().map_err(named)?.api().is_none();
        // Records are keyed by the description with its defaults filled in.
        request.form.flags.get_or_insert_with(|| if is_for_cpu { default_flags() } else { Vec::new() });
        request.space().map_err(named)?;
        let ports = request.ports().map_err(named)?;
        request.check_sizes(&ports).map_err(named)?;
        let tolerance = request.form.tolerance;
        if !tolerance.is_finite() || tolerance < 0.0 {
            return Err(named(Error::input(format!("tolerance is {tolerance} (give a fraction, such as 1e-4, or 0)"))));
        }
        Ok(request)
    }

    /// Whether the kernel runs on a GPU.
    pub fn is_for_gpu(&self) -> bool {
        self.language().is_ok_and(|language| language.api().is_some())
    }

    fn language(&self) -> Result<Language, Error> {
        self.form.language.map_or_else(|| Language::of(&self.form.source), Ok)
    }

    /// Resolves the device that the kernel runs on.
    fn target(&self, device: &str, threads: usize) -> Result<Target, Error> {
        let Some(api) = self.language()?.api() else { return Ok(host::target()) };
        let (word, language) = if api == GpuApi::Cuda { ("cuda", "CUDA") } else { ("opencl", "OpenCL C") };
        let device = if device == CPU { word } else { device };
        let target = DeviceSpec { device, target: HOST, threads }.target()?;
        if target.arch == Arch::Gpu(api) {
            return Ok(target);
        }
        let source = self.form.source.display();
        let kind = ErrorKind::WrongDevice { given: device.to_owned(), wanted: word };
        Err(Error::of(kind, format!("{source} is in {language}, and the device is {device}")))
    }

    /// Build and launch on a GPU; `None` for a CPU kernel.
    fn gpu(&self, target: &Target, compiler: Option<CudaCompiler>) -> Result<Option<GpuJob>, Error> {
        if self.language()?.api().is_none() {
            return Ok(None);
        }
        let form = &self.form;
        let missing = || {
            let mend = "give `grid`, the number of blocks along each axis, such as [\"N // block_size_x\"]";
            Error::input(format!("a kernel for a GPU has a grid ({mend})"))
        };
        let names = || form.parameters.iter().map(|p| &p.name).chain(form.constants.keys());
        let by_name = ["block_size_x", "block_size_y", "block_size_z"]
            .map(|name| if names().any(|known| known == name) { name.to_owned() } else { "1".to_owned() });
        Ok(Some(GpuJob {
            target: target.to_string(),
            compiler,
            source: self.path(&form.source),
            function: form.function.clone(),
            flags: form.flags.clone().unwrap_or_default(),
            constants: form.constants.iter().map(|(name, value)| (name.clone(), *value)).collect(),
            lists: form.lists.clone(),
            grid: form.grid.as_ref().ok_or_else(missing)?.texts("the grid")?,
            block: form.block.as_ref().map_or(Ok(by_name), |block| block.texts("the block"))?,
            shared_bytes: form.shared_bytes.as_ref().map(NumberForm::text),
        }))
    }

    /// Checks that sizes are expressions of defined names, and are given only where they apply.
    fn check_sizes(&self, ports: &[KernelPort]) -> Result<(), Error> {
        let form = &self.form;
        let shared: Vec<String> = ports.iter().filter_map(|port| port.shared.clone()).collect();
        if self.language()? != Language::Cuda && ports.iter().any(|port| port.is_variable) {
            return Err(Error::input("`variable` is for CUDA (other kernels take what is constant as arguments)"));
        }
        let unused = Target::named("opencl").expect("every generic name is known");
        let Some(gpu) = self.gpu(&unused, None)? else {
            let is_for_gpus = [form.grid.is_some(), form.block.is_some(), form.shared_bytes.is_some()];
            return match is_for_gpus.contains(&true) || !shared.is_empty() {
                true => Err(Error::input("grid, block, shared_bytes and local are for sources in OpenCL C or CUDA")),
                false => Ok(()),
            };
        };
        if self.language()? == Language::Cuda && !shared.is_empty() {
            return Err(Error::input("`local` is for OpenCL C (CUDA's kernels have shared_bytes)"));
        }
        if self.language()? == Language::OpenCl && (form.compiler.is_some() || form.shared_bytes.is_some()) {
            return Err(Error::input("compiler and shared_bytes are for other languages than OpenCL C"));
        }
        let types: Vec<(String, ValueType)> =
            self.values()?.into_iter().map(|(name, values)| (name, ValueType::of_all(&values))).collect();
        gpu.check(&types, &shared).map_err(Error::input)?;
        if let Some(grid) = &form.reference.grid {
            let gpu = GpuJob { grid: grid.texts("the grid of the reference")?, ..gpu.clone() };
            gpu.check(&types, &[]).map_err(|error| Error::input(format!("the reference: {error}")))?;
        }
        if let Some(block) = &form.reference.block {
            let gpu = GpuJob { block: block.texts("the block of the reference")?, ..gpu };
            gpu.check(&types, &[]).map_err(|error| Error::input(format!("the reference: {error}")))?;
        }
        Ok(())
    }

    /// Builds the space of configurations.
    ///
    /// # Errors
    /// If a parameter or a constraint is malformed, or no configuration is left.
    pub fn space(&self) -> Result<Space, Error> {
        let values = self.values()?;
        if let Some((name, _)) = values.iter().find(|(name, _)| !is_plain_name(name)) {
            return Err(refuse_name(
                name,
                "give ASCII letters, digits and _, and no word of the expressions, nor `dir`",
            ));
        }
        space_of(KERNEL, &values, &self.form.constraints)
    }

    /// Parameters, each with its values.
    fn values(&self) -> Result<Vec<(String, Vec<Datum>)>, Error> {
        let values = |parameter: &ParameterForm| {
            let name = &parameter.name;
            let values = match &parameter.values {
                ValuesForm::Numbers(numbers) => numbers.iter().copied().map(Datum::Int).collect(),
                ValuesForm::Texts(texts) => texts.iter().map(|text| Datum::from(text.as_str())).collect(),
                ValuesForm::Expression(text) => {
                    expression::list(text).map_err(|error| Error::input(format!("the values of {name}: {error}")))?
                }
            };
            // Macros have no `True`.
            let plain = |value: Datum| if let Datum::Bool(holds) = value { Datum::Int(holds.into()) } else { value };
            if self.form.constants.contains_key(name) {
                return Err(Error::input(format!("{name} is a constant and a parameter")));
            }
            Ok((name.clone(), values.into_iter().map(plain).collect::<Vec<Datum>>()))
        };
        self.form.parameters.iter().map(values).collect()
    }

    /// Evaluates an expression of constants.
    fn number(&self, what: &str, number: &NumberForm) -> Result<f64, Error> {
        let text = match number {
            NumberForm::Int(value) => return Ok(*value as f64),
            NumberForm::Float(value) => return Ok(*value),
            NumberForm::Expression(text) => text,
        };
        let refuse = |why: String| Error::input(format!("{what}, `{text}`: {why}"));
        let known = self.form.constants.iter().map(|(name, &value)| (name.clone(), value.into()));
        match expression::evaluate(text, &known.collect::<Vec<_>>()).map_err(refuse)? {
            Datum::Int(value) => Ok(value as f64),
            Datum::Float(value) => Ok(value),
            other => Err(refuse(format!("{other} is no number"))),
        }
    }

    /// Parses the arguments.
    fn ports(&self) -> Result<Vec<KernelPort>, Error> {
        let port = |form: &ArgumentForm| {
            let name = form.name.clone();
            let known = TYPES.iter().find(|(known, dtype)| *known == form.kind || dtype.name() == form.kind);
            let Some((c_type, dtype)) = known else {
                let known = TYPES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
                return Err(Error::input(format!(
                    "argument {name}: there is no type {}; there are {known}",
                    form.kind
                )));
            };
            let of = |what: &str, number: &Option<NumberForm>| {
                number.as_ref().map(|number| self.number(&format!("the {what} of argument {name}"), number)).transpose()
            };
            let (size, value) = (of("size", &form.size)?, of("value", &form.value)?);
            let shared = form.local.as_ref().map(|n| format!("({}) * {}", n.text(), dtype.bytes()));
            let n = match (size, value) {
                (None, None) if shared.is_some() => None,
                _ if shared.is_some() => {
                    return Err(Error::input(format!("argument {name}: what has a `local` has no `size` or `value`")));
                }
                (Some(size), None) if size.fract() == 0.0 && size >= 1.0 && size <= MOST_ELEMENTS as f64 => {
                    Some(size as u64)
                }
                (None, Some(_)) => None,
                (Some(size), None) => {
                    return Err(Error::input(format!("argument {name}: its size is {size}, not a number of elements")));
                }
                _ => {
                    let reason = "it has a `size`, as a buffer, or a `value`";
                    return Err(Error::input(format!("argument {name}: {reason}")));
                }
            };
            let (c_type, dtype, value) = ((*c_type).to_owned(), *dtype, value.unwrap_or(0.0));
            let is_variable = form.variable;
            if is_variable && (n.is_none() || form.role != RoleForm::In) {
                return Err(Error::input(format!("argument {name}: a variable has a `size` and the role in")));
            }
            let (role, fill) = (form.role, form.fill.clone());
            let filled = if let Fill::Number(number) = fill { number } else { 0.0 };
            if let Some(number) = [value, filled].into_iter().find(|number| !holds(dtype, *number)) {
                return Err(Error::input(format!("argument {name}: {number} is no number of type {c_type}")));
            }
            Ok(KernelPort { name: name.clone(), c_type, dtype, n, shared, is_variable, value, role, fill })
        };
        let ports = self.form.arguments.iter().map(port).collect::<Result<Vec<_>, Error>>()?;
        if !ports.iter().any(|port| port.n.is_some() && port.role != RoleForm::In) {
            return Err(Error::input("no argument has the role out or inout: the kernel would compute nothing"));
        }
        Ok(ports)
    }

    /// Path of a file that the description names.
    fn path(&self, path: &Path) -> PathBuf {
        let path = self.folder.join(path);
        path.canonicalize().unwrap_or(path)
    }

    /// Name in records: the kernel's name, and a hash of the description, of the source with the files that
    /// it includes in quotes, and of the files that the reference names.
    fn workload(&self) -> String {
        let reference = &self.form.reference;
        let mut files = Files::default();
        [Some(&self.form.source), reference.source.as_ref()].into_iter().flatten().for_each(|path| {
            files.add_source(&self.path(path));
        });
        reference.files.iter().flat_map(|files| files.values()).for_each(|path| files.add(&self.path(path)));
        let parts = (&self.form, files.hashes());
        let text = serde_json::to_vec(&parts).expect("invariant: texts and numbers have a form in JSON");
        let name: String = self.form.name.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
        format!("{KERNEL}:{name}-{:08x}", content_hash(&text) as u32)
    }
}

/// Makes the subject of a run of a kernel: everything that its candidates share is written to a folder,
/// including the results of its reference.
///
/// # Errors
/// If the description or its reference does not fit.
pub(crate) fn subject<'a>(
    kernel: &KernelFile,
    request: &'a Request,
    worker: &WorkerCommand,
) -> Result<OwnRun<'a>, Error> {
    let settings = request.settings();
    let space = Arc::new(kernel.space()?);
    let bench = BenchFolder::new(kernel, request, worker)?;
    let options = bench.options(&space)?;
    let BenchFolder { folder, target, .. } = bench;
    Ok(OwnRun::new(settings, kernel.workload(), &target, space, options).that_checks(folder))
}
