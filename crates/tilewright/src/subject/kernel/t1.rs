//! T1 descriptions of Kernel Tuner, for kernels in C, C++, OpenCL C and CUDA.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value as Json;
use tilewright_search::expression::{self, Datum};

use super::form::{
    ArgumentForm, Axes, Fill, FillName, KernelForm, Language, NumberForm, ParameterForm, ReferenceForm, RoleForm,
};
use super::form::{ValuesForm, default_flags, default_tolerance};
use crate::error::Error;

/// T1 names of element types, with their C types.
const TYPES: &[(&str, &str)] =
    &[("int8", "int8_t"), ("uint8", "uint8_t"), ("int32", "int32_t"), ("uint32", "uint32_t"), ("int64", "int64_t")];
/// T1 names of languages.
const LANGUAGES: &[(&str, Language)] =
    &[("C", Language::C), ("C++", Language::Cpp), ("OpenCL", Language::OpenCl), ("CUDA", Language::Cuda)];
/// Name of the problem's size in expressions of sizes.
const PROBLEM: &str = "ProblemSize";

/// Description of a kernel; fields that are not named here are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct KernelDescription {
    configuration_space: T1Parameters,
    kernel_specification: Specification,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct T1Parameters {
    tuning_parameters: Vec<T1Parameter>,
    #[serde(default)]
    conditions: Vec<T1Condition>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct T1Parameter {
    name: String,
    values: Json,
    default: Option<Json>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct T1Condition {
    expression: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Specification {
    language: String,
    kernel_name: String,
    kernel_file: PathBuf,
    #[serde(default)]
    compiler_options: Vec<String>,
    #[serde(default)]
    problem_size: Json,
    #[serde(default)]
    arguments: Vec<T1Argument>,
    global_size_type: Option<String>,
    global_size: Option<Along<Json>>,
    local_size: Option<Along<Json>>,
    #[serde(default)]
    grid_div_x: Option<Vec<Json>>,
    #[serde(default)]
    grid_div_y: Option<Vec<Json>>,
    #[serde(default)]
    grid_div_z: Option<Vec<Json>>,
    shared_memory: Option<i64>,
}

/// Values along each axis.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Along<T> {
    x: Option<T>,
    y: Option<T>,
    z: Option<T>,
}

impl Along<Json> {
    fn texts(&self) -> [String; 3] {
        [&self.x, &self.y, &self.z].map(|size| size.as_ref().map_or("1".to_owned(), text))
    }
}

/// Text of an expression, which T1 may write as a number.
fn text(json: &Json) -> String {
    json.as_str().map_or_else(|| json.to_string(), str::to_owned)
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct T1Argument {
    name: Option<String>,
    #[serde(rename = "Type")]
    kind: String,
    memory_type: String,
    /// Memory in which Kernel Tuner puts the argument.
    mem_type: Option<String>,
    access_type: Option<String>,
    fill_type: Option<String>,
    fill_value: Option<f64>,
    size: Option<Json>,
}

/// Whether a text is a T1 description, rather than one of ours.
pub(super) fn is_description(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').trim_start().starts_with('{')
}

/// Parses a description. T1 has no reference: the configuration of the defaults serves as such, or the first
/// one.
pub(super) fn form(text: &str) -> Result<KernelForm, Error> {
    let wrong = |error: serde_json::Error| {
        let mend = "a T1 description has ConfigurationSpace and KernelSpecification";
        Error::input(format!("{} ({mend})", crate::error::one_line(&error.to_string())))
    };
    let description: KernelDescription = serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(wrong)?;
    let kernel = description.kernel_specification;
    let language = LANGUAGES.iter().find(|(name, _)| *name == kernel.language).map(|(_, language)| *language);
    let language = language.ok_or_else(|| {
        let known = LANGUAGES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        Error::input(format!("kernels in {} cannot be run (\"Language\" may be {known})", kernel.language))
    })?;
    let parameters: Vec<(String, Vec<Datum>)> =
        description.configuration_space.tuning_parameters.iter().map(values).collect::<Result<_, Error>>()?;
    let defaults = description.configuration_space.tuning_parameters.iter();
    let defaults = defaults.map(|parameter| Some((parameter.name.clone(), toml_of(parameter.default.as_ref()?)?)));
    let configuration = defaults.collect::<Option<_>>();
    let parameter = |(name, values): &(String, Vec<Datum>)| ParameterForm {
        name: name.clone(),
        values: ValuesForm::Expression(Datum::List(values.as_slice().into()).to_string()),
    };
    let arguments = kernel.arguments.iter().enumerate();
    let arguments =
        arguments.map(|(at, argument)| argument_form(at, argument, &kernel.problem_size, &parameters, language));
    let is_for_gpu = language.api().is_some();
    let (grid, block) = if is_for_gpu { sizes(&kernel, language, &parameters)? } else { (None, None) };
    let mut flags = if is_for_gpu { Vec::new() } else { default_flags() };
    flags.push("-Dkernel_tuner=1".to_owned());
    flags.extend(kernel.compiler_options);
    // The language of a C or C++ source is determined by its extension, as usual.
    let language = is_for_gpu.then_some(language);
    let lists = if is_for_gpu { vec![(PROBLEM.to_owned(), whole(&kernel.problem_size))] } else { Vec::new() };
    Ok(KernelForm {
        name: kernel.kernel_name.clone(),
        _about: String::new(),
        source: kernel.kernel_file,
        function: kernel.kernel_name,
        language,
        compiler: None,
        flags: Some(flags),
        constants: Default::default(),
        lists,
        grid,
        block,
        shared_bytes: kernel.shared_memory.filter(|n| *n > 0 && language == Some(Language::Cuda)).map(NumberForm::Int),
        arguments: arguments.collect::<Result<_, Error>>()?,
        parameters: parameters.iter().map(parameter).collect(),
        constraints: description.configuration_space.conditions.into_iter().map(|c| c.expression).collect(),
        reference: ReferenceForm { configuration: Some(configuration.unwrap_or_default()), ..ReferenceForm::default() },
        tolerance: default_tolerance(),
    })
}

/// Integers of a list, or a single integer.
fn whole(json: &Json) -> Vec<i64> {
    json.as_array().map_or_else(|| vec![json.clone()], Clone::clone).iter().filter_map(Json::as_i64).collect()
}

/// Grid and block. If the file gives divisors of the problem's size, or no global size, they are computed as
/// Kernel Tuner does; otherwise, from the global size.
fn sizes(
    kernel: &Specification,
    language: Language,
    parameters: &[(String, Vec<Datum>)],
) -> Result<(Option<Axes>, Option<Axes>), Error> {
    let axes = |texts: [String; 3]| Some(Axes::Several(texts.map(NumberForm::Expression).into()));
    let is_parameter = |name: &str| parameters.iter().any(|(known, _)| known == name);
    let names = ["block_size_x", "block_size_y", "block_size_z"];
    let local = match &kernel.local_size {
        Some(local) => local.texts(),
        None => names.map(|name| if is_parameter(name) { name.to_owned() } else { "1".to_owned() }),
    };
    let divisors = [&kernel.grid_div_x, &kernel.grid_div_y, &kernel.grid_div_z];
    let global = kernel.global_size.as_ref().filter(|_| divisors.iter().all(|divisors| divisors.is_none()));
    let Some(global) = global else {
        let problem = whole(&kernel.problem_size);
        if problem.is_empty() {
            return Err(Error::input("there is neither a GlobalSize nor a ProblemSize of whole numbers"));
        }
        let along = |axis: usize| {
            let Some(n) = problem.get(axis).copied() else { return "1".to_owned() };
            let by_default = || if is_parameter(names[axis]) { names[axis].to_owned() } else { "1".to_owned() };
            let divisor = divisors[axis].as_ref().map_or_else(by_default, |divisors| {
                let all = divisors.iter().map(|divisor| format!("({})", text(divisor))).collect::<Vec<_>>().join(" * ");
                if all.is_empty() { "1".to_owned() } else { all }
            });
            format!("({n} + ({divisor}) - 1) // ({divisor})")
        };
        return Ok((axes([0, 1, 2].map(along)), axes(local)));
    };
    let counts_threads = match kernel.global_size_type.as_deref() {
        None => language == Language::OpenCl,
        Some("OpenCL") => true,
        Some("CUDA") => false,
        Some(other) => {
            return Err(Error::input(format!("its GlobalSizeType is {other} (give OpenCL or CUDA)")));
        }
    };
    let mut grid = global.texts();
    if counts_threads {
        // A fraction of a block is not an integer, and is refused.
        for (grid, block) in grid.iter_mut().zip(&local) {
            *grid = format!("({grid}) / ({block})");
        }
    }
    Ok((axes(grid), axes(local)))
}

/// Values of a parameter: a list, or a text that contains one.
fn values(parameter: &T1Parameter) -> Result<(String, Vec<Datum>), Error> {
    let text = parameter.values.as_str().map_or_else(|| parameter.values.to_string(), str::to_owned);
    let values = expression::list(&text);
    let values = values.map_err(|error| Error::input(format!("the values of {}: {error}", parameter.name)))?;
    Ok((parameter.name.clone(), values))
}

fn toml_of(value: &Json) -> Option<toml::Value> {
    match value {
        Json::Number(number) => number.as_i64().map(toml::Value::Integer),
        Json::String(text) => Some(toml::Value::String(text.clone())),
        _ => None,
    }
}

fn argument_form(
    at: usize,
    argument: &T1Argument,
    problem: &Json,
    parameters: &[(String, Vec<Datum>)],
    language: Language,
) -> Result<ArgumentForm, Error> {
    let name = argument.name.clone().unwrap_or_else(|| format!("argument{}", at + 1));
    let refuse = |reason: String| Err(Error::input(format!("argument {name}: {reason}")));
    let kind = TYPES.iter().find(|(theirs, _)| *theirs == argument.kind).map_or(argument.kind.as_str(), |(_, c)| c);
    let plain = ArgumentForm {
        name: name.clone(),
        kind: kind.to_owned(),
        size: None,
        value: None,
        local: None,
        // In CUDA, constant memory is accessed by its name; in OpenCL C it is an ordinary argument.
        variable: argument.mem_type.as_deref() == Some("Constant") && language == Language::Cuda,
        role: RoleForm::In,
        fill: Fill::Default,
    };
    match argument.memory_type.as_str() {
        "Local" => {
            let n = argument.size.as_ref().map(|size| NumberForm::Expression(text(size)));
            Ok(ArgumentForm { local: Some(n.unwrap_or(NumberForm::Int(1))), ..plain })
        }
        "Scalar" => Ok(ArgumentForm { value: Some(NumberForm::Float(argument.fill_value.unwrap_or(0.0))), ..plain }),
        "Vector" => {
            let fill = match (argument.fill_type.as_deref(), argument.fill_value) {
                (Some("Random"), _) => Fill::Name(FillName::Random),
                (Some("Constant"), value) => Fill::Number(value.unwrap_or(0.0)),
                (None, _) => Fill::Default,
                (Some(other), _) => return refuse(format!("its FillType is {other} (give Constant or Random)")),
            };
            let role = match argument.access_type.as_deref() {
                Some("WriteOnly") => RoleForm::Out,
                Some("ReadWrite") => RoleForm::InOut,
                Some("ReadOnly") | None => RoleForm::In,
                Some(other) => {
                    return refuse(format!("its AccessType is {other} (give ReadOnly, WriteOnly or ReadWrite)"));
                }
            };
            let n = size(argument.size.as_ref().unwrap_or(&Json::Null), problem, parameters);
            let n = n.map_err(|error| Error::input(format!("argument {name}: its size: {error}")))?;
            Ok(ArgumentForm { size: Some(NumberForm::Int(n)), role, fill, ..plain })
        }
        other => refuse(format!("its MemoryType is {other} (give Vector, Scalar or Local)")),
    }
}

/// Number of elements: an expression of the problem's sizes and of the lists of parameters' values.
fn size(size: &Json, problem: &Json, parameters: &[(String, Vec<Datum>)]) -> Result<i64, String> {
    if let Some(n) = size.as_i64() {
        return Ok(n);
    }
    let text = size.as_str().ok_or("give a number or an expression, such as \"ProblemSize[0]\"")?;
    let sizes = Datum::List(whole(problem).into_iter().map(Datum::Int).collect());
    let lists = parameters.iter().map(|(name, values)| (name.clone(), Datum::List(values.as_slice().into())));
    let known: Vec<(String, Datum)> = std::iter::once((PROBLEM.to_owned(), sizes)).chain(lists).collect();
    match expression::evaluate(text, &known)? {
        Datum::Int(n) => Ok(n),
        Datum::Float(n) if n.fract() == 0.0 => Ok(n as i64),
        other => Err(format!("{other} is no number of elements")),
    }
}
