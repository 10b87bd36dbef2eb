//! Tuning kernels of others: functions in C or C++, or kernels in OpenCL C or CUDA, with parameters as
//! macros.

mod t1;

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::command::{FOLDER, Invocation, Metric, Options, Template, run_to_end};
use tilewright_device::cuda::compile::Compiler;
use tilewright_device::device::WorkerCommand;
use tilewright_device::folder::Folder;
use tilewright_device::host;
use tilewright_device::kernel::{Argument, ENTRY, GpuJob, Job};
use tilewright_device::opencl;
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{evaluate_watched, random_elements};
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_ir::{DType, Role, Target};
use tilewright_search::Space;
use tilewright_search::expression::{self, Datum, Type};
use tilewright_tune::predict::content_hash;

use super::command::space_of;
use super::files::Files;
use super::own::OwnRun;
use crate::error::{Error, ErrorKind};
use crate::place::{CPU, HOST, Place};
use crate::request::{Request, Settings};

/// Prefix of kernels' workloads in records, and name of their template.
pub const KERNEL: &str = "kernel";

/// The element types of buffers, as C and we write them.
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
    // Numbers of which only the bits count, and what sizes are.
    ("uint32_t", DType::I32),
    ("unsigned int", DType::I32),
    ("uint", DType::I32),
    ("half", DType::F16),
];
/// Contents of the data begin at multiples of this, so that they can be mapped.
const PAGE: u64 = 4096;
/// The most elements of a buffer.
const MOST_ELEMENTS: i64 = 1 << 32;
/// Option of a worker process that calls a user's kernel, or builds it for a GPU.
pub const CALL: &str = "--kernel";
/// See [`CALL`].
pub const BUILD: &str = "--kernel-build";
/// Longest that a build may take, and the runs of a candidate, and the time to spend in them, if nothing else
/// is asked for.
const BUILD_TIMEOUT: Duration = Duration::from_secs(60);
const RUN_TIMEOUT: Duration = Duration::from_secs(10);
const MIN_TIME: Duration = Duration::from_millis(10);
/// Longest that the reference may take.
const REFERENCE_TIMEOUT: Duration = Duration::from_secs(600);

/// Kernel in C, C++, OpenCL C or CUDA that is to be tuned, as a file describes it.
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
    form: Form,
    /// Folder of the file; other names are relative to it.
    folder: PathBuf,
}

/// A description of a kernel as it stands in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    name: String,
    /// Comment for readers of the file.
    #[serde(default, rename = "about", skip_serializing)]
    _about: String,
    source: PathBuf,
    function: String,
    /// Language of the source; by default that of its extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    language: Option<Language>,
    compiler: Option<String>,
    flags: Option<Vec<String>>,
    #[serde(default)]
    constants: BTreeMap<String, i64>,
    /// Further names that sizes may read, each with a list.
    #[serde(skip_deserializing, skip_serializing_if = "Vec::is_empty")]
    lists: Vec<(String, Vec<i64>)>,
    /// Blocks of a kernel for a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    grid: Option<Axes>,
    /// Threads of a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<Axes>,
    /// Bytes that a launch gives the threads of a block to share.
    #[serde(skip_serializing_if = "Option::is_none")]
    shared_bytes: Option<Number>,
    parameters: Vec<ParameterForm>,
    #[serde(default)]
    constraints: Vec<String>,
    arguments: Vec<ArgumentForm>,
    reference: ReferenceForm,
    #[serde(default = "default_tolerance")]
    tolerance: f64,
}

/// Language of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Language {
    C,
    #[serde(rename = "c++")]
    Cpp,
    OpenCl,
    Cuda,
}

impl Language {
    /// Language of a source, by its extension.
    fn of(source: &Path) -> Result<Language, Error> {
        match source.extension().and_then(|text| text.to_str()).unwrap_or_default() {
            "c" => Ok(Language::C),
            "cc" | "cpp" | "cxx" | "C" => Ok(Language::Cpp),
            "cl" => Ok(Language::OpenCl),
            "cu" => Ok(Language::Cuda),
            _ => Err(Error::input(format!(
                "{} is no source in C, C++, OpenCL C or CUDA (name it .c, .cc, .cpp, .cxx, .cl or .cu, or say \
                 `language`)",
                source.display()
            ))),
        }
    }

    /// Whether it is for GPUs, and by which driver.
    fn api(self) -> Option<GpuApi> {
        match self {
            Language::C | Language::Cpp => None,
            Language::OpenCl => Some(GpuApi::OpenCl),
            Language::Cuda => Some(GpuApi::Cuda),
        }
    }
}

/// Sizes along the axes x, y and z.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, an expression of parameters and constants, or a list of up to three")]
enum Axes {
    One(Number),
    Several(Vec<Number>),
}

impl Axes {
    /// The expressions of all three.
    fn texts(&self, what: &str) -> Result<[String; 3], Error> {
        let all = match self {
            Axes::One(number) => std::slice::from_ref(number),
            Axes::Several(all) if all.len() <= 3 => all,
            Axes::Several(_) => return Err(Error::input(format!("{what} has more than three axes"))),
        };
        Ok([0, 1, 2].map(|axis| all.get(axis).map_or("1".to_owned(), Number::text)))
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ParameterForm {
    name: String,
    values: ValuesForm,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a list of numbers or of texts, or an expression that is one")]
enum ValuesForm {
    Numbers(Vec<i64>),
    Texts(Vec<String>),
    Expression(String),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArgumentForm {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    /// Elements of a buffer.
    size: Option<Number>,
    /// Value of an argument that is not a buffer.
    value: Option<Number>,
    /// Elements that the threads of a block share.
    #[serde(skip_serializing_if = "Option::is_none")]
    local: Option<Number>,
    /// Whether it is a variable of the source, as CUDA's `__constant__` makes them, rather than an argument.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    variable: bool,
    #[serde(default)]
    role: RoleForm,
    #[serde(default)]
    fill: Fill,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RoleForm {
    #[default]
    In,
    Out,
    InOut,
}

/// A number, or an expression of constants.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or an expression of constants")]
enum Number {
    Int(i64),
    Float(f64),
    Expression(String),
}

impl Number {
    /// The number as an expression.
    fn text(&self) -> String {
        match self {
            Number::Int(value) => value.to_string(),
            Number::Float(value) => value.to_string(),
            Number::Expression(text) => text.clone(),
        }
    }
}

/// Contents of a buffer before a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, \"random\" or \"index\"")]
enum Fill {
    #[default]
    Default,
    Number(f64),
    Name(FillName),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FillName {
    Random,
    Index,
}

/// Source of the right answer; one of these.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ReferenceForm {
    /// Function of the same arguments.
    function: Option<String>,
    /// Source of that function, if it is another file.
    source: Option<PathBuf>,
    /// Grid of that function on a GPU, if it differs from the kernel's.
    #[serde(skip_serializing_if = "Option::is_none")]
    grid: Option<Axes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<Axes>,
    /// A configuration of the kernel; the first one where it names no parameter.
    configuration: Option<BTreeMap<String, toml::Value>>,
    /// A command that reads `{dir}/NAME.bin` of inputs and writes that of outputs.
    command: Option<String>,
    /// Files in NumPy's format, by the output's name.
    files: Option<BTreeMap<String, PathBuf>>,
    /// Workload of one of our operators.
    workload: Option<String>,
}

/// Options of compilers for this machine's CPU; others have none by default.
fn default_flags() -> Vec<String> {
    ["-O3", "-march=native"].map(str::to_owned).into()
}

fn default_tolerance() -> f64 {
    1e-4
}

/// The elements of several buffers.
type Numbers = Vec<Vec<f64>>;

/// A buffer, or a value, of a kernel.
#[derive(Debug, Clone)]
struct Port {
    name: String,
    /// The type in C of an element.
    c_type: String,
    dtype: DType,
    /// Elements of a buffer; none of a value.
    n: Option<u64>,
    /// Bytes that the threads of a block share, as an expression.
    shared: Option<String>,
    /// Whether it is a variable of the source.
    is_variable: bool,
    /// Value of an argument that is not a buffer.
    value: f64,
    role: RoleForm,
    fill: Fill,
}

impl KernelFile {
    /// Reads the description of a kernel, ours or a T1 file of Kernel Tuner's; `path` is where it is.
    ///
    /// # Errors
    /// If the text describes none, or one that cannot be tuned here.
    pub fn parse(text: &str, path: &Path) -> Result<KernelFile, Error> {
        let named = |error: Error| Error::input(format!("{}: {error}", path.display()));
        let form: Form = match t1::is_description(text) {
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
        // Records are known by what the description says with what goes without saying.
        request.form.flags.get_or_insert_with(|| if is_for_cpu { default_flags() } else { Vec::new() });
        request.space().map_err(named)?;
        let ports = request.ports().map_err(named)?;
        request.check_sizes(&ports).map_err(named)?;
        Ok(request)
    }

    /// Whether it is for a GPU.
    pub fn is_for_gpu(&self) -> bool {
        self.language().is_ok_and(|language| language.api().is_some())
    }

    fn language(&self) -> Result<Language, Error> {
        self.form.language.map_or_else(|| Language::of(&self.form.source), Ok)
    }

    /// The device that it runs on.
    fn target(&self, device: &str, threads: usize) -> Result<Target, Error> {
        let Some(api) = self.language()?.api() else { return Ok(host::target()) };
        let (word, language) = if api == GpuApi::Cuda { ("cuda", "CUDA") } else { ("opencl", "OpenCL C") };
        let device = if device == CPU { word } else { device };
        let target = Place { device, target: HOST, threads }.target()?;
        if target.arch == Arch::Gpu(api) {
            return Ok(target);
        }
        let source = self.form.source.display();
        let kind = ErrorKind::WrongDevice { given: device.to_owned(), wanted: word };
        Err(Error::of(kind, format!("{source} is in {language}, and the device is {device}")))
    }

    /// Build and launch on a GPU; `None` where the kernel is not for one.
    fn gpu(&self, target: &Target, compiler: Option<Compiler>) -> Result<Option<GpuJob>, Error> {
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
            shared_bytes: form.shared_bytes.as_ref().map(Number::text),
        }))
    }

    /// Whether sizes are expressions of what there is, and stand where they mean something.
    fn check_sizes(&self, ports: &[Port]) -> Result<(), Error> {
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
        let types: Vec<(String, Type)> =
            self.values()?.into_iter().map(|(name, values)| (name, Type::of_all(&values))).collect();
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

    /// Makes the space of its configurations.
    ///
    /// # Errors
    /// If a parameter or a constraint is none, or no configuration is left.
    pub fn space(&self) -> Result<Space, Error> {
        space_of(KERNEL, &self.values()?, &self.form.constraints)
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
            // A macro has no `True`.
            let plain = |value: Datum| if let Datum::Bool(holds) = value { Datum::Int(holds.into()) } else { value };
            if self.form.constants.contains_key(name) {
                return Err(Error::input(format!("{name} is a constant and a parameter")));
            }
            Ok((name.clone(), values.into_iter().map(plain).collect::<Vec<Datum>>()))
        };
        self.form.parameters.iter().map(values).collect()
    }

    /// The value of an expression of constants.
    fn number(&self, what: &str, number: &Number) -> Result<f64, Error> {
        let text = match number {
            Number::Int(value) => return Ok(*value as f64),
            Number::Float(value) => return Ok(*value),
            Number::Expression(text) => text,
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
    fn ports(&self) -> Result<Vec<Port>, Error> {
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
            let of = |what: &str, number: &Option<Number>| {
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
            Ok(Port { name: name.clone(), c_type, dtype, n, shared, is_variable, value, role, fill })
        };
        let ports = self.form.arguments.iter().map(port).collect::<Result<Vec<_>, Error>>()?;
        if !ports.iter().any(|port| port.n.is_some() && port.role != RoleForm::In) {
            return Err(Error::input("no argument has the role out or inout: the kernel would compute nothing"));
        }
        Ok(ports)
    }

    /// A path that the file names.
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

/// C file that calls a function: the source itself, and a function of one signature. Shared memory of blocks
/// does not exist for it.
fn wrapper(source: &Path, function: &str, ports: &[Port]) -> String {
    let argument = |(at, port): (usize, &Port)| match (port.n, port.role) {
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

/// The folder in which what all candidates have in common is.
struct Bench<'a> {
    request: &'a KernelFile,
    settings: &'a Settings,
    worker: &'a WorkerCommand,
    target: Target,
    /// Build and launch of a kernel for a GPU.
    gpu: Option<GpuJob>,
    folder: Folder,
    ports: Vec<Port>,
    memory_bytes: u64,
    cpus: Vec<usize>,
}

impl Bench<'_> {
    fn failed(what: &str) -> impl Fn(std::io::Error) -> Error {
        move |error| Error::failed(what.to_owned()).because(error)
    }

    fn write(&self, name: &str, contents: &[u8]) -> Result<PathBuf, Error> {
        let path = self.folder.path().join(name);
        let written = crate::file::write_whole(&path, |out| out.write_all(contents));
        written.map_err(Self::failed("writing what candidates have in common"))?;
        Ok(path)
    }

    /// The words that compile a source into a shared object, without those of parameters.
    fn compile(&self, wrapper: &Path, language: Language, macros: &[String], library: &str) -> Vec<String> {
        let form = &self.request.form;
        // Those of a kernel for a GPU are not for a reference on the CPU.
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

    fn run(&self, what: &str, words: Vec<String>, timeout: Duration) -> Result<Vec<u8>, Error> {
        run_to_end(&Invocation::new(words), what, timeout, self.memory_bytes).map_err(Error::input)
    }

    /// Command of a worker process that builds the kernel of a job, or calls it.
    fn caller(&self, option: &str, job: &Path, library: &str, macros: &[String]) -> Vec<String> {
        let mut words = vec![self.worker.program.to_string_lossy().into_owned()];
        words.extend(self.worker.arguments.iter().cloned());
        words.extend([option.to_owned(), job.to_string_lossy().into_owned(), library.to_owned()]);
        words.extend(macros.iter().cloned());
        words
    }

    /// Contents of buffers before a run, by argument.
    fn contents(&self) -> Vec<Vec<f64>> {
        let seed = self.settings.seed;
        let of = |(at, port): (usize, &Port)| {
            let n = port.n.unwrap_or(0) as usize;
            let fill = match &port.fill {
                Fill::Default if port.role == RoleForm::Out => return Vec::new(),
                Fill::Default => Fill::Name(FillName::Random),
                other => other.clone(),
            };
            match fill {
                Fill::Name(FillName::Random) => random_elements(port.dtype, seed.wrapping_add(at as u64), n).collect(),
                Fill::Name(FillName::Index) => (0..n).map(|at| at as f64).collect(),
                Fill::Number(value) => vec![value; n],
                Fill::Default => unreachable!("it is replaced above"),
            }
        };
        self.ports.iter().enumerate().map(of).collect()
    }

    /// A job on data of these contents and answers, which are of outputs, in order, as they are
    /// [held](DType::held); without answers it gives them.
    fn job(
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
                return Argument::Shared(n_bytes.clone());
            }
            let Some(n) = port.n else {
                let mut bytes = vec![0; port.dtype.bytes() as usize];
                port.dtype.write(&[port.value], &mut bytes);
                return Argument::Value(bytes);
            };
            let is_output = port.role != RoleForm::In;
            let contents_at = (!contents.is_empty()).then(|| add(contents, port.dtype));
            let answer = answers.as_mut().filter(|_| is_output).and_then(Iterator::next);
            let answer_at = answer.map(|answer| add(answer, DType::F64));
            let (name, dtype, is_variable) = (port.name.clone(), port.dtype.name().to_owned(), port.is_variable);
            Argument::Buffer { name, dtype, n, contents_at, answer_at, is_output, is_variable }
        });
        let arguments = arguments.collect();
        let end = data.len().next_multiple_of(PAGE as usize).max(PAGE as usize);
        data.resize(end, 0);
        let job = Job {
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

    fn outputs(&self) -> impl Iterator<Item = &Port> {
        self.ports.iter().filter(|port| port.n.is_some() && port.role != RoleForm::In)
    }

    /// Result of a function of the arguments, in the source of the kernel where no other is given, with the
    /// parameters of a configuration.
    fn computed(
        &self,
        (source, function): (Option<&Path>, &str),
        parameters: &[(String, String)],
        contents: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, Error> {
        let language = source.map_or_else(|| self.request.language(), Language::of)?;
        let library = self.folder.path().join("reference.so").to_string_lossy().into_owned();
        let macros = |option: &str| -> Vec<String> {
            parameters.iter().map(|(name, value)| format!("{option}{name}={value}")).collect()
        };
        let path = self.request.path(source.unwrap_or(&self.request.form.source));
        let output = if language.api().is_none() {
            let text = wrapper(&path, function, &self.ports);
            let extension = if language == Language::C { "c" } else { "cc" };
            let wrapper = self.write(&format!("reference.{extension}"), text.as_bytes())?;
            // Only what is of the kernel's own source knows its parameters.
            let macros = if source.is_none() { macros("-D") } else { Vec::new() };
            let build = self.compile(&wrapper, language, &macros, &library);
            self.run("the build of the reference", build, REFERENCE_TIMEOUT)?;
            let job = self.job("reference", None, contents, None)?;
            self.run("the reference", self.caller(CALL, &job, &library, &[]), REFERENCE_TIMEOUT)?
        } else {
            let gpu = self.gpu.as_ref().filter(|_| Ok(language) == self.request.language().map_err(drop));
            let Some(gpu) = gpu else {
                return Err(Error::input("the reference is in a language that is neither C, C++ nor the kernel's"));
            };
            let reference = &self.request.form.reference;
            let axes = |given: &Option<Axes>, own: &[String; 3]| {
                given.as_ref().map_or_else(|| Ok(own.clone()), |axes| axes.texts("the reference"))
            };
            let (grid, block) = (axes(&reference.grid, &gpu.grid)?, axes(&reference.block, &gpu.block)?);
            let gpu = GpuJob { source: path, function: function.to_owned(), grid, block, ..gpu.clone() };
            let job = self.job("reference", Some(gpu), contents, None)?;
            let words = |option| self.caller(option, &job, &library, &macros(""));
            self.run("the build of the reference", words(BUILD), REFERENCE_TIMEOUT)?;
            self.run("the reference", words(CALL), REFERENCE_TIMEOUT)?
        };
        let n_bytes = self.outputs().filter_map(|port| port.n).sum::<u64>() * DType::F64.bytes();
        // It may have written something of its own before.
        let bytes = output.len().checked_sub(n_bytes as usize).map(|from| &output[from..]);
        let bytes = bytes.ok_or_else(|| Error::failed("the reference's answer is cut off"))?;
        let mut all = bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        Ok(self.outputs().map(|port| all.by_ref().take(port.n.unwrap_or(0) as usize).collect()).collect())
    }

    /// The parameters of a configuration: of the first one, where none is given.
    fn parameters(
        &self,
        space: &Space,
        given: Option<&BTreeMap<String, toml::Value>>,
    ) -> Result<Vec<(String, String)>, Error> {
        let config = match given {
            Some(given) if !given.is_empty() => {
                let json = serde_json::to_value(given).expect("invariant: plain values have a form in JSON");
                let refuse = |error| Error::input(format!("the reference's configuration: {error}"));
                space.config_from_json(&json).map_err(refuse)?
            }
            _ => space.config_at(0),
        };
        let text = |value: tilewright_search::Value| match value {
            tilewright_search::Value::Text(text) => text,
            other => other.to_string(),
        };
        Ok(space.names().map(|name| (name.to_owned(), text(space.value(&config, name)))).collect())
    }

    /// The contents of buffers and the right answers of outputs.
    fn answers(&self, space: &Space) -> Result<(Numbers, Numbers), Error> {
        let form = &self.request.form;
        let reference = &form.reference;
        let mut contents = self.contents();
        if let Some(workload) = &reference.workload {
            return self.of_workload(workload);
        }
        if let Some(function) = &reference.function {
            let parameters = self.parameters(space, None)?;
            let answers = self.computed((reference.source.as_deref(), function), &parameters, &contents)?;
            return Ok((contents, answers));
        }
        if let Some(configuration) = &reference.configuration {
            let parameters = self.parameters(space, Some(configuration))?;
            let answers = self.computed((None, &form.function), &parameters, &contents)?;
            return Ok((contents, answers));
        }
        let as_bytes = |port: &Port, values: &[f64]| {
            let mut bytes = vec![0; values.len() * port.dtype.bytes() as usize];
            port.dtype.write(values, &mut bytes);
            bytes
        };
        if let Some(command) = &reference.command {
            for (port, contents) in self.ports.iter().zip(&mut contents).filter(|(port, _)| port.n.is_some()) {
                self.write(&format!("{}.bin", port.name), &as_bytes(port, contents))?;
            }
            let template = Template::words(command, &[FOLDER]);
            let template = template.map_err(|error| Error::input(format!("the reference's command: {error}")))?;
            let words = template.with(&|_| self.folder.path().to_string_lossy().into_owned()).words;
            self.run("the reference's command", words, REFERENCE_TIMEOUT)?;
            let answer = |port: &Port| {
                let name = format!("{}.bin", port.name);
                let bytes = fs::read(self.folder.path().join(&name));
                let bytes = bytes.map_err(|error| Error::input(format!("the reference's {name}: {error}")))?;
                let values = port.dtype.read_held(&bytes);
                let n = port.n.unwrap_or(0) as usize;
                let reason = || Error::input(format!("the reference's {name} has {} elements, not {n}", values.len()));
                if values.len() == n { Ok(values) } else { Err(reason()) }
            };
            let answers = self.outputs().map(answer).collect::<Result<_, Error>>()?;
            return Ok((contents, answers));
        }
        if let Some(files) = &reference.files {
            let answer = |port: &Port| {
                let missing = || Error::input(format!("the reference has no file of {}", port.name));
                let path = self.request.path(files.get(&port.name).ok_or_else(missing)?);
                let bytes = crate::file::read(&path, "the reference")?;
                let refuse = |why: String| Error::input(format!("{}: {why}", path.display()));
                npy(&bytes, port).map_err(refuse)
            };
            let answers = self.outputs().map(answer).collect::<Result<_, Error>>()?;
            return Ok((contents, answers));
        }
        Err(Error::input(
            "the reference says nothing (give it a function, a configuration, a command, files or a workload)",
        ))
    }

    /// Contents and answers of one of our operators: buffers are its arguments, in their order.
    fn of_workload(&self, text: &str) -> Result<(Numbers, Numbers), Error> {
        let workload = Workload::parse(text).map_err(|error| Error::input(format!("the reference: {error}")))?;
        let program = workload.program();
        let theirs: Vec<_> = program.arguments().map(|(_, buffer)| buffer).collect();
        let ours: Vec<&Port> = self.ports.iter().filter(|port| port.n.is_some()).collect();
        let fits = theirs.len() == ours.len()
            && theirs.iter().zip(&ours).all(|(buffer, port)| {
                (buffer.n_elements(), buffer.dtype, buffer.role == Role::Output)
                    == (port.n, port.dtype, port.role != RoleForm::In)
            });
        if !fits {
            let list = theirs.iter().map(|buffer| {
                let role = if buffer.role == Role::Output { "out" } else { "in" };
                format!("{} ({} {}, {role})", buffer.name, buffer.n_elements().unwrap_or(0), buffer.dtype.name())
            });
            let list = list.collect::<Vec<_>>().join(", ");
            return Err(Error::input(format!("the buffers are not those of {text}, which has {list}")));
        }
        let seed = self.settings.seed;
        let contents: Vec<Vec<f64>> = self
            .ports
            .iter()
            .zip(0u64..)
            .map(|(port, at)| match (port.n, port.role) {
                (Some(n), RoleForm::In) => random_elements(port.dtype, seed.wrapping_add(at), n as usize).collect(),
                _ => Vec::new(),
            })
            .collect();
        let inputs = self.ports.iter().zip(&contents).filter(|(port, _)| port.n.is_some() && port.role == RoleForm::In);
        let held = |port: &Port, values: &[f64]| values.iter().map(|x| port.dtype.held(*x)).collect::<Vec<_>>();
        let inputs: Vec<Vec<f64>> = inputs.map(|(port, contents)| held(port, contents)).collect();
        let answers = evaluate_watched(&program, inputs, host::most_threads(), &|_| ControlFlow::Continue(()))
            .map_err(|error| Error::failed("the reference").because(error))?;
        Ok((contents, answers))
    }
}

/// The numbers of a file in NumPy's format, which has to be of a port's type and size.
fn npy(bytes: &[u8], port: &Port) -> Result<Vec<f64>, String> {
    let none = || "this is no .npy file".to_owned();
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or_else(none)?;
    let (n_before, n_header) = match rest {
        [1, _, a, b, ..] => (4, u32::from(u16::from_le_bytes([*a, *b]))),
        [2 | 3, _, a, b, c, d, ..] => (6, u32::from_le_bytes([*a, *b, *c, *d])),
        _ => return Err(none()),
    };
    let (header, data) =
        rest.get(n_before..).and_then(|rest| rest.split_at_checked(n_header as usize)).ok_or_else(none)?;
    let header = String::from_utf8_lossy(header).replace(' ', "");
    let letter = if port.dtype.is_float() {
        "f"
    } else if port.dtype.is_unsigned() {
        "u"
    } else {
        "i"
    };
    let wanted = format!("{letter}{}", port.dtype.bytes());
    if ![format!("'<{wanted}'"), format!("'|{wanted}'")].iter().any(|text| header.contains(text.as_str())) {
        return Err(format!("its elements are not of the type {}, which is <{wanted} there", port.c_type));
    }
    if header.contains("'fortran_order':True") {
        return Err("its order is Fortran's (write it with numpy.ascontiguousarray)".into());
    }
    let n = port.n.unwrap_or(0);
    if data.len() as u64 != n * port.dtype.bytes() {
        return Err(format!("it has {} elements, not {n}", data.len() as u64 / port.dtype.bytes()));
    }
    Ok(port.dtype.read_held(data))
}

/// Makes the subject of a run of a kernel: everything that its candidates have in common is written to a
/// folder, with the answers of its reference.
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
    let bench = Bench::new(kernel, request, worker)?;
    let options = bench.options(&space)?;
    let Bench { folder, target, .. } = bench;
    Ok(OwnRun::new(settings, kernel.workload(), &target, space, options).that_checks(folder))
}

impl<'a> Bench<'a> {
    /// Finds the device and the compiler.
    fn new(request: &'a KernelFile, of: &'a Request, worker: &'a WorkerCommand) -> Result<Bench<'a>, Error> {
        let settings = of.settings();
        let folder =
            Folder::new("tilewright-kernel").map_err(Bench::failed("a folder for what candidates have in common"))?;
        crate::file::read(&request.path(&request.form.source), "the kernel's source")?;
        let (language, target) = (request.language()?, request.target(of.device_name()?, settings.threads)?);
        // An OpenCL device may be the CPU, all of it.
        let takes_cpus = language == Language::OpenCl && opencl::device_of(&target).is_ok_and(|device| device.is_cpu);
        let compiler = match language {
            Language::Cuda => Some(Compiler::find(request.form.compiler.as_deref()).map_err(Error::input)?),
            Language::C | Language::Cpp | Language::OpenCl => None,
        };
        let gpu = request.gpu(&target, compiler)?;
        let memory_bytes = settings.memory_bytes.unwrap_or(match gpu.is_some() && !takes_cpus {
            // Drivers of GPUs map more than any limit.
            true => u64::MAX,
            false => host::memory_bytes().unwrap_or(8 << 30) / 2,
        });
        let cpus = if takes_cpus { host::allowed_cpus() } else { host::pin_cpus(settings.threads) };
        Ok(Bench { request, settings, worker, target, gpu, folder, ports: request.ports()?, memory_bytes, cpus })
    }

    /// Options of the commands that build and call candidates.
    fn options(&self, space: &Space) -> Result<Options, Error> {
        let (contents, answers) = self.answers(space)?;
        let job = self.job("kernel", self.gpu.clone(), &contents, Some(&answers))?;
        let (build, run) = self.templates(space, &job)?;
        let settings = self.settings;
        Ok(Options {
            build: Some(build),
            metric: Metric::Kernel,
            build_timeout: settings.build_timeout.unwrap_or(BUILD_TIMEOUT),
            run_timeout: settings.run_timeout.unwrap_or(RUN_TIMEOUT),
            to_the_end: settings.to_the_end,
            memory_bytes: self.memory_bytes,
            cpus: self.cpus.clone(),
            ..Options::new(run)
        })
    }

    /// Commands that build a candidate and call it, with places for the values of parameters.
    fn templates(&self, space: &Space, job: &Path) -> Result<(Template, Template), Error> {
        let library = format!("{{{FOLDER}}}/kernel.so");
        // Places for values stand in words that are quoted otherwise.
        let marker = "\u{1}".to_owned();
        let template = |words: Vec<String>, option: &str| {
            let places = || space.names().map(|name| format!("{option}{name}={{{name}}}")).collect::<Vec<_>>();
            let words = words.into_iter().flat_map(|word| match word == marker {
                true => places(),
                false => vec![if word == library { word } else { Template::quoted(&word) }],
            });
            let names: Vec<&str> = space.names().chain([FOLDER]).collect();
            Template::words(&words.collect::<Vec<_>>().join(" "), &names).map_err(Error::input)
        };
        let markers = std::slice::from_ref(&marker);
        // A process takes all candidates, each by the words behind its job.
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
}
