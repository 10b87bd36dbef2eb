//! T1 descriptions, as of Kernel Tuner, of kernels in C and C++.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value as Json;
use tilewright_tune::expression::{self, Datum, Expression, Scope, Type};

use super::{ArgumentForm, Fill, FillName, Form, Number, ParameterForm, ReferenceForm, RoleForm, ValuesForm};
use super::{default_flags, default_tolerance};
use crate::error::Error;

/// How element types are called there, and in C.
const TYPES: &[(&str, &str)] = &[("int8", "int8_t"), ("uint8", "uint8_t"), ("int32", "int32_t"), ("int64", "int64_t")];
/// What sizes call the size of the problem.
const PROBLEM: &str = "ProblemSize";

/// What such a file says of a kernel; fields that are not named here are for others.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Description {
    configuration_space: Parameters,
    kernel_specification: Specification,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Parameters {
    tuning_parameters: Vec<Parameter>,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Parameter {
    name: String,
    values: Json,
    default: Option<Json>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Condition {
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
    arguments: Vec<Argument>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Argument {
    name: Option<String>,
    #[serde(rename = "Type")]
    kind: String,
    memory_type: String,
    access_type: Option<String>,
    fill_type: Option<String>,
    fill_value: Option<f64>,
    size: Option<Json>,
}

/// Whether a text is one of these descriptions, not one of ours.
pub(super) fn is_description(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').trim_start().starts_with('{')
}

/// What a description says. It has no reference: that is the configuration of its defaults, or the first one.
pub(super) fn form(text: &str) -> Result<Form, Error> {
    let wrong = |error: serde_json::Error| {
        let mend = "a T1 description has ConfigurationSpace and KernelSpecification";
        Error::input(format!("{} ({mend})", crate::error::one_line(&error.to_string())))
    };
    let description: Description = serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(wrong)?;
    let kernel = description.kernel_specification;
    if !["C", "C++"].contains(&kernel.language.as_str()) {
        let reason = format!("no {} device support in this build", kernel.language);
        return Err(Error::input(format!("{reason} (give a kernel in C or C++, and \"Language\": \"C\")")));
    }
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
    let arguments = arguments.map(|(at, argument)| argument_form(at, argument, &kernel.problem_size, &parameters));
    let mut flags = default_flags();
    flags.push("-Dkernel_tuner=1".to_owned());
    flags.extend(kernel.compiler_options);
    Ok(Form {
        name: kernel.kernel_name.clone(),
        _about: String::new(),
        source: kernel.kernel_file,
        function: kernel.kernel_name,
        compiler: None,
        flags,
        constants: Default::default(),
        arguments: arguments.collect::<Result<_, Error>>()?,
        parameters: parameters.iter().map(parameter).collect(),
        constraints: description.configuration_space.conditions.into_iter().map(|c| c.expression).collect(),
        reference: ReferenceForm { configuration: Some(configuration.unwrap_or_default()), ..ReferenceForm::default() },
        tolerance: default_tolerance(),
    })
}

/// The values of a parameter: a list, or a text that writes one.
fn values(parameter: &Parameter) -> Result<(String, Vec<Datum>), Error> {
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
    argument: &Argument,
    problem: &Json,
    parameters: &[(String, Vec<Datum>)],
) -> Result<ArgumentForm, Error> {
    let name = argument.name.clone().unwrap_or_else(|| format!("argument{}", at + 1));
    let refuse = |reason: String| Err(Error::input(format!("argument {name}: {reason}")));
    let kind = TYPES.iter().find(|(theirs, _)| *theirs == argument.kind).map_or(argument.kind.as_str(), |(_, c)| c);
    let plain = ArgumentForm {
        name: name.clone(),
        kind: kind.to_owned(),
        size: None,
        value: None,
        role: RoleForm::In,
        fill: Fill::Default,
    };
    match argument.memory_type.as_str() {
        "Scalar" => Ok(ArgumentForm { value: Some(Number::Float(argument.fill_value.unwrap_or(0.0))), ..plain }),
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
            Ok(ArgumentForm { size: Some(Number::Int(n)), role, fill, ..plain })
        }
        other => refuse(format!("its MemoryType is {other} (give Vector or Scalar)")),
    }
}

/// A number of elements: an expression of the problem's sizes and of the lists of parameters' values.
fn size(size: &Json, problem: &Json, parameters: &[(String, Vec<Datum>)]) -> Result<i64, String> {
    if let Some(n) = size.as_i64() {
        return Ok(n);
    }
    let text = size.as_str().ok_or("give a number or an expression, such as \"ProblemSize[0]\"")?;
    let sizes = problem.as_array().cloned().unwrap_or_else(|| vec![problem.clone()]);
    let sizes = Datum::List(sizes.iter().filter_map(Json::as_i64).map(Datum::Int).collect());
    let lists = parameters.iter().map(|(name, values)| (name.clone(), Datum::List(values.as_slice().into())));
    let known: Vec<(String, Datum)> = std::iter::once((PROBLEM.to_owned(), sizes)).chain(lists).collect();
    let scope: Scope = known.iter().map(|(name, _)| (name.clone(), Type::List)).collect();
    let slots: Vec<Option<Datum>> = known.into_iter().map(|(_, list)| Some(list)).collect();
    let code = Expression::parse(text).and_then(|expression| expression.compile(&scope));
    let value = code.map_err(|error| error.to_string())?.0.try_evaluate(&slots).map_err(|error| error.to_string())?;
    match value {
        Datum::Int(n) => Ok(n),
        Datum::Float(n) if n.fract() == 0.0 => Ok(n as i64),
        other => Err(format!("{other} is no number of elements")),
    }
}
