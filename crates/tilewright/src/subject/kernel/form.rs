//! File format of a kernel's description.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tilewright_ir::target::GpuApi;

use crate::error::Error;

/// Description of a kernel as written in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KernelForm {
    pub(super) name: String,
    /// Comment for readers of the file.
    #[serde(default, rename = "about", skip_serializing)]
    pub(super) _about: String,
    pub(super) source: PathBuf,
    pub(super) function: String,
    /// Language of the source; by default that of its extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) language: Option<Language>,
    pub(super) compiler: Option<String>,
    pub(super) flags: Option<Vec<String>>,
    #[serde(default)]
    pub(super) constants: BTreeMap<String, i64>,
    /// Further names that sizes may use, each with a list of values.
    #[serde(skip_deserializing, skip_serializing_if = "Vec::is_empty")]
    pub(super) lists: Vec<(String, Vec<i64>)>,
    /// Grid of a GPU kernel, in blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grid: Option<Axes>,
    /// Size of a block, in threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) block: Option<Axes>,
    /// Dynamic shared memory of a block, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shared_bytes: Option<NumberForm>,
    pub(super) parameters: Vec<ParameterForm>,
    #[serde(default)]
    pub(super) constraints: Vec<String>,
    pub(super) arguments: Vec<ArgumentForm>,
    pub(super) reference: ReferenceForm,
    #[serde(default = "default_tolerance")]
    pub(super) tolerance: f64,
}

/// Language of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Language {
    C,
    #[serde(rename = "c++")]
    Cpp,
    OpenCl,
    Cuda,
}

impl Language {
    /// Language of a source, by its extension.
    pub(super) fn of(source: &Path) -> Result<Language, Error> {
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

    /// GPU API that runs the language; `None` for the CPU.
    pub(super) fn api(self) -> Option<GpuApi> {
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
pub(super) enum Axes {
    One(NumberForm),
    Several(Vec<NumberForm>),
}

impl Axes {
    /// Expressions of all three.
    pub(super) fn texts(&self, what: &str) -> Result<[String; 3], Error> {
        let all = match self {
            Axes::One(number) => std::slice::from_ref(number),
            Axes::Several(all) if all.len() <= 3 => all,
            Axes::Several(_) => return Err(Error::input(format!("{what} has more than three axes"))),
        };
        Ok([0, 1, 2].map(|axis| all.get(axis).map_or("1".to_owned(), NumberForm::text)))
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ParameterForm {
    pub(super) name: String,
    pub(super) values: ValuesForm,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a list of numbers or of texts, or an expression that is one")]
pub(super) enum ValuesForm {
    Numbers(Vec<i64>),
    Texts(Vec<String>),
    Expression(String),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ArgumentForm {
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: String,
    /// Number of elements of a buffer.
    pub(super) size: Option<NumberForm>,
    /// Value of a scalar argument.
    pub(super) value: Option<NumberForm>,
    /// Number of elements in the shared memory of a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) local: Option<NumberForm>,
    /// Whether it is a variable of the source, as CUDA's `__constant__` makes them, rather than an argument.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) variable: bool,
    #[serde(default)]
    pub(super) role: RoleForm,
    #[serde(default)]
    pub(super) fill: Fill,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RoleForm {
    #[default]
    In,
    Out,
    InOut,
}

/// Number, or an expression of constants.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, or an expression of constants")]
pub(super) enum NumberForm {
    Int(i64),
    Float(f64),
    Expression(String),
}

impl NumberForm {
    /// The number as an expression.
    pub(super) fn text(&self) -> String {
        match self {
            NumberForm::Int(value) => value.to_string(),
            NumberForm::Float(value) => value.to_string(),
            NumberForm::Expression(text) => text.clone(),
        }
    }
}

/// Contents of a buffer before a run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number, \"random\" or \"index\"")]
pub(super) enum Fill {
    #[default]
    Default,
    Number(f64),
    Name(FillName),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FillName {
    Random,
    Index,
}

/// Source of the expected result; exactly one of the alternatives is given.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ReferenceForm {
    /// Function with the same arguments.
    pub(super) function: Option<String>,
    /// Source of that function, if it is another file.
    pub(super) source: Option<PathBuf>,
    /// Grid of that function on a GPU, if it differs from the kernel's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) grid: Option<Axes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) block: Option<Axes>,
    /// Configuration of the kernel; the first one if no parameter is named.
    pub(super) configuration: Option<BTreeMap<String, toml::Value>>,
    /// Command that reads `{dir}/NAME.bin` for inputs and writes it for outputs.
    pub(super) command: Option<String>,
    /// Files in NumPy's format, by the output's name.
    pub(super) files: Option<BTreeMap<String, PathBuf>>,
    /// Workload of one of our operators.
    pub(super) workload: Option<String>,
}

/// Default compiler options for this machine's CPU; other devices have none.
pub(super) fn default_flags() -> Vec<String> {
    ["-O3", "-march=native"].map(str::to_owned).into()
}

pub(super) fn default_tolerance() -> f64 {
    1e-4
}
