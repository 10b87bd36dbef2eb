//! Tuning kernels of others: functions in C or C++ with parameters as macros.

mod t1;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::command::{FOLDER, Invocation, Metric, Options, Template, run_to_end};
use tilewright_device::device::WorkerCommand;
use tilewright_device::host;
use tilewright_device::kernel::{Argument, ENTRY, Job};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{evaluate, random_elements};
use tilewright_ir::{DType, Role};
use tilewright_tune::Space;
use tilewright_tune::expression::{self, Datum, Expression, Scope, Type};
use tilewright_tune::predict::content_hash;

use super::command::{Course, carry_out, seconds, space_of};
use super::{DEFAULT_SEARCH, Note, Tuned, Wall};
use crate::database::Database;
use crate::error::Error;

/// What the workloads of kernels begin with in records; it is their template, too.
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
];
/// Contents of the data begin at multiples of this, so that they can be mapped.
const PAGE: u64 = 4096;
/// The most elements of a buffer.
const MOST_ELEMENTS: i64 = 1 << 32;
/// Longest that the reference may take.
const REFERENCE_TIMEOUT: Duration = Duration::from_secs(600);

/// A kernel that is to be tuned, and how. Times are in seconds.
#[derive(Debug, Clone)]
pub struct KernelRequest {
    /// What its file says.
    form: Form,
    /// Where the file is: other names are relative to that.
    folder: PathBuf,
    /// Longest that the process of a candidate may take.
    pub timeout: f64,
    /// Longest that a build may take.
    pub build_timeout: f64,
    /// Time to spend in the timed runs of a candidate.
    pub min_time: f64,
    /// Bytes of data that each process may have; half the memory of the machine by default.
    pub memory_bytes: Option<u64>,
    /// CPUs on which it is run.
    pub threads: usize,
    /// Whether hopeless candidates are timed to the end.
    pub to_the_end: bool,
    /// The search, with options behind a colon.
    pub search: String,
    /// Trials to come to, those recorded by earlier runs included.
    pub trials: Option<u64>,
    /// Time for the search; a minute where trials are not given either.
    pub time: Option<f64>,
    /// Seed of the search and of the random inputs.
    pub seed: u64,
    /// Whether the leaders race at the end.
    pub race: bool,
    /// Results of another tuner whose best configurations are measured first, as far as they fit.
    pub transfer: Option<PathBuf>,
}

/// A description of a kernel as it stands in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    name: String,
    /// For readers.
    #[serde(default, rename = "about", skip_serializing)]
    _about: String,
    source: PathBuf,
    function: String,
    compiler: Option<String>,
    #[serde(default = "default_flags")]
    flags: Vec<String>,
    #[serde(default)]
    constants: BTreeMap<String, i64>,
    parameters: Vec<ParameterForm>,
    #[serde(default)]
    constraints: Vec<String>,
    arguments: Vec<ArgumentForm>,
    reference: ReferenceForm,
    #[serde(default = "default_tolerance")]
    tolerance: f64,
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
    /// Of a value that is no buffer.
    value: Option<Number>,
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

/// What a buffer holds before a run.
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

/// What says the right answer; one of these.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ReferenceForm {
    /// A function of the same arguments …
    function: Option<String>,
    /// … in another file.
    source: Option<PathBuf>,
    /// A configuration of the kernel; the first one where it names no parameter.
    configuration: Option<BTreeMap<String, toml::Value>>,
    /// A command that reads `{dir}/NAME.bin` of inputs and writes that of outputs.
    command: Option<String>,
    /// Files in NumPy's format, by the output's name.
    files: Option<BTreeMap<String, PathBuf>>,
    /// One of our operators.
    workload: Option<String>,
}

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
    /// Of a value.
    value: f64,
    role: RoleForm,
    fill: Fill,
}

impl KernelRequest {
    /// Reads the description of a kernel, ours or a T1 file of Kernel Tuner's; `path` is where it is.
    ///
    /// # Errors
    /// Where the text describes none, or one that cannot be tuned here.
    pub fn parse(text: &str, path: &Path) -> Result<KernelRequest, Error> {
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
        let request = KernelRequest {
            form,
            folder: path.parent().unwrap_or(Path::new("")).to_owned(),
            timeout: 10.0,
            build_timeout: 60.0,
            min_time: 0.01,
            memory_bytes: None,
            threads: 1,
            to_the_end: false,
            search: DEFAULT_SEARCH.to_owned(),
            trials: None,
            time: None,
            seed: 0,
            race: true,
            transfer: None,
        };
        request.compiler().map_err(named)?;
        request.space().map_err(named)?;
        request.ports().map_err(named)?;
        Ok(request)
    }

    /// The space of its configurations.
    ///
    /// # Errors
    /// Where a parameter or a constraint is none, or no configuration is left.
    pub fn space(&self) -> Result<Space, Error> {
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
        let parameters = self.form.parameters.iter().map(values).collect::<Result<Vec<_>, Error>>()?;
        space_of(KERNEL, &parameters, &self.form.constraints)
    }

    /// The compiler of its source.
    fn compiler(&self) -> Result<&str, Error> {
        let extension = self.form.source.extension().and_then(|text| text.to_str()).unwrap_or_default();
        let default = match extension {
            "c" => "cc",
            "cc" | "cpp" | "cxx" | "C" => "c++",
            "cl" => return Err(Error::input("no OpenCL device support in this build (give a C or C++ source)")),
            "cu" => return Err(Error::input("no CUDA device support in this build (give a C or C++ source)")),
            _ => {
                let source = self.form.source.display();
                return Err(Error::input(format!("{source} is no C or C++ source (.c, .cc, .cpp or .cxx)")));
            }
        };
        Ok(self.form.compiler.as_deref().unwrap_or(default))
    }

    /// The value of an expression of constants.
    fn number(&self, what: &str, number: &Number) -> Result<f64, Error> {
        let text = match number {
            Number::Int(value) => return Ok(*value as f64),
            Number::Float(value) => return Ok(*value),
            Number::Expression(text) => text,
        };
        let refuse = |why: &dyn std::fmt::Display| Error::input(format!("{what}, `{text}`: {why}"));
        let scope: Scope = self.form.constants.keys().map(|name| (name.clone(), Type::Number)).collect();
        let slots: Vec<Option<Datum>> = self.form.constants.values().map(|&value| Some(value.into())).collect();
        let code = Expression::parse(text).and_then(|expression| expression.compile(&scope));
        let value = code.map_err(|error| refuse(&error))?.0.try_evaluate(&slots).map_err(|error| refuse(&error))?;
        match value {
            Datum::Int(value) => Ok(value as f64),
            Datum::Float(value) => Ok(value),
            other => Err(refuse(&format!("{other} is no number"))),
        }
    }

    /// Its arguments.
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
            let n = match (size, value) {
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
            Ok(Port { name: name.clone(), c_type, dtype, n, value, role: form.role, fill: form.fill.clone() })
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

    /// What its records are known by: its name, and a hash of the description and of the source.
    fn workload(&self) -> String {
        let mut text = serde_json::to_vec(&self.form).expect("invariant: texts and numbers have a form in JSON");
        text.extend(fs::read(self.path(&self.form.source)).unwrap_or_default());
        let name: String = self.form.name.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
        format!("{KERNEL}:{name}-{:08x}", content_hash(&text) as u32)
    }
}

/// What stands in a C file that calls a function: the source itself, and a function of one signature.
fn wrapper(source: &Path, function: &str, ports: &[Port]) -> String {
    let argument = |(at, port): (usize, &Port)| match (port.n, port.role) {
        (None, _) => format!("*({} *)a[{at}]", port.c_type),
        (Some(_), RoleForm::In) => format!("*({} const **)a[{at}]", port.c_type),
        (Some(_), _) => format!("*({} **)a[{at}]", port.c_type),
    };
    let arguments = ports.iter().enumerate().map(argument).collect::<Vec<_>>().join(", ");
    format!(
        "#include <stdint.h>\n#include \"{}\"\n#ifdef __cplusplus\nextern \"C\"\n#endif\nvoid {ENTRY}(void **a) {{ {function}({arguments}); }}\n",
        source.display()
    )
}

/// The folder in which what all candidates have in common is.
struct Bench<'a> {
    request: &'a KernelRequest,
    worker: &'a WorkerCommand,
    folder: tempfile::TempDir,
    ports: Vec<Port>,
    memory_bytes: u64,
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
    fn compile(&self, wrapper: &Path, macros: &[String], library: &str) -> Result<Vec<String>, Error> {
        let form = &self.request.form;
        let mut words = vec![self.request.compiler()?.to_owned()];
        words.extend(form.flags.iter().cloned());
        words.extend(form.constants.iter().map(|(name, value)| format!("-D{name}={value}")));
        words.extend(macros.iter().cloned());
        words.extend(["-shared", "-fPIC", "-o", library].map(str::to_owned));
        words.push(wrapper.to_string_lossy().into_owned());
        // Libraries come last.
        let (libraries, _): (Vec<&String>, Vec<&String>) = form.flags.iter().partition(|flag| flag.starts_with("-l"));
        words.extend(libraries.into_iter().cloned());
        Ok(words)
    }

    fn run(&self, what: &str, words: Vec<String>, timeout: Duration) -> Result<Vec<u8>, Error> {
        let invocation = Invocation { words, variables: Vec::new() };
        run_to_end(&invocation, what, timeout, self.memory_bytes).map_err(Error::input)
    }

    /// What a process that calls a shared object is started with.
    fn caller(&self, job: &Path, library: &str) -> Vec<String> {
        let mut words = vec![self.worker.program.to_string_lossy().into_owned()];
        words.extend(self.worker.arguments.iter().cloned());
        words.extend(["--kernel".to_owned(), job.to_string_lossy().into_owned(), library.to_owned()]);
        words
    }

    /// What buffers hold before a run, by argument.
    fn contents(&self) -> Vec<Vec<f64>> {
        let seed = self.request.seed;
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

    /// A job on data of these contents and answers, which are of outputs, in order; without answers it gives
    /// them.
    fn job(&self, name: &str, contents: &[Vec<f64>], answers: Option<&[Vec<f64>]>) -> Result<PathBuf, Error> {
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
            let Some(n) = port.n else {
                let mut bytes = vec![0; port.dtype.bytes() as usize];
                port.dtype.write(&[port.value], &mut bytes);
                return Argument::Value(bytes);
            };
            let is_output = port.role != RoleForm::In;
            let contents_at = (!contents.is_empty()).then(|| add(contents, port.dtype));
            let answer = answers.as_mut().filter(|_| is_output).and_then(Iterator::next);
            let answer_at = answer.map(|answer| add(answer, DType::F64));
            let (name, dtype) = (port.name.clone(), port.dtype.name().to_owned());
            Argument::Buffer { name, dtype, n, contents_at, answer_at, is_output }
        });
        let arguments = arguments.collect();
        let end = data.len().next_multiple_of(PAGE as usize).max(PAGE as usize);
        data.resize(end, 0);
        let job = Job {
            arguments,
            data: self.write(&format!("{name}.data"), &data)?,
            tolerance: self.request.form.tolerance,
            min_time_ns: self.request.min_time * 1e9,
            n_threads: self.request.threads,
            is_reference,
        };
        self.write(&format!("{name}.json"), &serde_json::to_vec(&job).expect("invariant: a job has a form in JSON"))
    }

    fn outputs(&self) -> impl Iterator<Item = &Port> {
        self.ports.iter().filter(|port| port.n.is_some() && port.role != RoleForm::In)
    }

    /// What a function of the arguments computes.
    fn computed(
        &self,
        source: &Path,
        function: &str,
        macros: &[String],
        contents: &[Vec<f64>],
    ) -> Result<Vec<Vec<f64>>, Error> {
        let extension = source.extension().map_or("c".into(), |text| text.to_string_lossy());
        let text = wrapper(&self.request.path(source), function, &self.ports);
        let wrapper = self.write(&format!("reference.{extension}"), text.as_bytes())?;
        let library = self.folder.path().join("reference.so").to_string_lossy().into_owned();
        self.run("the build of the reference", self.compile(&wrapper, macros, &library)?, REFERENCE_TIMEOUT)?;
        let job = self.job("reference", contents, None)?;
        let output = self.run("the reference", self.caller(&job, &library), REFERENCE_TIMEOUT)?;
        let n_bytes = self.outputs().filter_map(|port| port.n).sum::<u64>() * DType::F64.bytes();
        // It may have written something of its own before.
        let bytes = output.len().checked_sub(n_bytes as usize).map(|from| &output[from..]);
        let bytes = bytes.ok_or_else(|| Error::failed("the reference's answer is cut off"))?;
        let mut all = bytes.as_chunks().0.iter().map(|bytes| f64::from_ne_bytes(*bytes));
        Ok(self.outputs().map(|port| all.by_ref().take(port.n.unwrap_or(0) as usize).collect()).collect())
    }

    /// Macros of a configuration: of its first one, where none is given.
    fn macros(&self, space: &Space, given: Option<&BTreeMap<String, toml::Value>>) -> Result<Vec<String>, Error> {
        let config = match given {
            Some(given) if !given.is_empty() => {
                let json = serde_json::to_value(given).expect("invariant: plain values have a form in JSON");
                let refuse = |error| Error::input(format!("the reference's configuration: {error}"));
                space.config_from_json(&json).map_err(refuse)?
            }
            _ => space.config_at(0),
        };
        let text = |value: tilewright_tune::Value| match value {
            tilewright_tune::Value::Text(text) => text,
            other => other.to_string(),
        };
        Ok(space.names().map(|name| format!("-D{name}={}", text(space.value(&config, name)))).collect())
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
            let source = reference.source.as_ref().unwrap_or(&form.source);
            let macros = if reference.source.is_some() { Vec::new() } else { self.macros(space, None)? };
            let answers = self.computed(source, function, &macros, &contents)?;
            return Ok((contents, answers));
        }
        if let Some(configuration) = &reference.configuration {
            let macros = self.macros(space, Some(configuration))?;
            let answers = self.computed(&form.source, &form.function, &macros, &contents)?;
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
                let values = port.dtype.read(&bytes);
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
        let seed = self.request.seed;
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
        let inputs: Vec<Vec<f64>> = inputs.map(|(_, contents)| contents.clone()).collect();
        let answers = evaluate(&program, &inputs, host::most_threads())
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
    } else if port.dtype == DType::U8 {
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
    Ok(port.dtype.read(data))
}

/// Tunes a kernel.
///
/// # Errors
/// Where the description or its reference does not fit, or the database cannot be written.
pub fn tune_kernel(
    request: &KernelRequest,
    database: &Database,
    worker: &WorkerCommand,
    stop: &AtomicBool,
    note: &(dyn Fn(Note) + Sync),
) -> Result<Tuned, Error> {
    let wall = Wall::new();
    let space = Arc::new(request.space()?);
    let folder = tempfile::Builder::new().prefix("tilewright-kernel-").tempdir();
    let folder = folder.map_err(Bench::failed("a folder for what candidates have in common"))?;
    let memory_bytes = request.memory_bytes.unwrap_or(host::memory_bytes().unwrap_or(8 << 30) / 2);
    let bench = Bench { request, worker, folder, ports: request.ports()?, memory_bytes };
    crate::file::read(&request.path(&request.form.source), "the kernel's source")?;
    let (contents, answers) = bench.answers(&space)?;
    let job = bench.job("kernel", &contents, Some(&answers))?;
    let extension = request.form.source.extension().map_or("c".into(), |text| text.to_string_lossy());
    let text = wrapper(&request.path(&request.form.source), &request.form.function, &bench.ports);
    let wrapper = bench.write(&format!("kernel.{extension}"), text.as_bytes())?;
    let names: Vec<&str> = space.names().chain([FOLDER]).collect();
    let library = format!("{{{FOLDER}}}/kernel.so");
    // Places for values stand in words that are quoted otherwise.
    let mut build = Vec::new();
    let marker = "\u{1}";
    for word in bench.compile(&wrapper, &[marker.to_owned()], &library)? {
        if word == marker {
            build.extend(space.names().map(|name| format!("-D{name}={{{name}}}")));
        } else {
            build.push(if word == library { word } else { Template::quoted(&word) });
        }
    }
    let run = bench.caller(&job, &library);
    let run: Vec<String> =
        run.into_iter().map(|word| if word == library { word } else { Template::quoted(&word) }).collect();
    let template = |words: Vec<String>| Template::words(&words.join(" "), &names).map_err(Error::input);
    let options = Options {
        build: Some(template(build)?),
        metric: Metric::Kernel,
        build_timeout: seconds("--build-timeout", request.build_timeout)?,
        run_timeout: seconds("--run-timeout", request.timeout)?,
        to_the_end: request.to_the_end,
        memory_bytes,
        cpus: host::pin_cpus(request.threads),
        ..Options::new(template(run)?)
    };
    let course = Course {
        search: &request.search,
        trials: request.trials,
        time: request.time.map(|time| seconds("--time", time)).transpose()?,
        seed: request.seed,
        race: request.race,
        threads: request.threads,
        transfer: request.transfer.as_deref(),
    };
    let mut tuned = carry_out(&course, request.workload(), space, options, (database, wall), stop, note)?;
    // Every candidate that is measured was right.
    tuned.verified = tuned.best.is_some();
    Ok(tuned)
}
