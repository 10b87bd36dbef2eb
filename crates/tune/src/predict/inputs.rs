//! Inputs of a prediction model: the fields of a problem.

use serde_json::{Map, Value as Json, json};
use tilewright_learn::sequence::{Example, Field, FieldKind, KernelParameter, Vocabulary};

use super::data::TunedProblem;
use super::specification::{KernelSpecification, ProblemError, SpecificationError};

/// Reason why a model cannot be queried; the error is in its file or the query.
#[derive(Debug, thiserror::Error)]
pub enum InputsError {
    /// Metadata that do not describe a kernel's model.
    #[error("the model is of no kernel ({0} is missing)")]
    NoKernel(&'static str),
    /// Invalid specification in the model's file.
    #[error("the kernel specification in the model: {0}")]
    Specification(#[from] SpecificationError),
    /// Vocabulary that does not match the specification.
    #[error("the model and its kernel specification differ in {0}")]
    Differs(String),
    /// Invalid problem of the kernel.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Field that was constant in the training data, queried with another value.
    #[error("the model has learnt only from {field}={learnt}; it cannot answer for {field}={asked}")]
    Unseen {
        /// The field.
        field: String,
        /// Value in the training data.
        learnt: String,
        /// Value in the query.
        asked: String,
    },
}

/// Fields of a kernel's problems that are inputs of a model: those that vary in its training data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFields {
    /// Fields, as indices into the specification.
    fields: Vec<usize>,
    /// Value of each field that is always the same.
    fixed: Vec<Option<i64>>,
}

impl InputFields {
    /// Selects the fields that vary in these rows; all if none does.
    pub fn of(kernel: &KernelSpecification, rows: &[&TunedProblem]) -> InputFields {
        let is_fixed = |at: usize| rows.iter().all(|row| row.problem[at] == rows[0].problem[at]);
        let fixed = (0..kernel.fields.len()).map(|at| is_fixed(at).then(|| rows.first()).flatten());
        let mut fixed: Vec<Option<i64>> = fixed.enumerate().map(|(at, row)| Some(row?.problem[at])).collect();
        if fixed.iter().all(Option::is_some) {
            fixed.fill(None);
        }
        InputFields { fields: (0..fixed.len()).filter(|&at| fixed[at].is_none()).collect(), fixed }
    }

    /// Vocabulary of a model with these inputs.
    pub fn vocabulary(&self, kernel: &KernelSpecification) -> Vocabulary {
        let field = |&at: &usize| {
            let values = kernel.fields[at].values.as_ref().map(|values| values.to_vec());
            let kind = values.map_or(FieldKind::Integer, |values| FieldKind::Categorical { values });
            Field { name: kernel.fields[at].name.clone(), kind }
        };
        let parameter =
            |p: &super::ParameterSpecification| KernelParameter { name: p.name.clone(), values: p.values.to_vec() };
        Vocabulary {
            fields: self.fields.iter().map(field).collect(),
            parameters: kernel.parameters.iter().map(parameter).collect(),
        }
    }

    /// Model inputs for a problem.
    pub fn problem(&self, problem: &[i64]) -> Vec<i64> {
        self.fields.iter().map(|&at| problem[at]).collect()
    }

    /// Training example for a row: its problem and answer.
    pub fn example(&self, row: &TunedProblem) -> Example {
        Example { problem: self.problem(&row.problem), answer: row.answer.clone() }
    }

    /// Metadata of the kernel for a model's file; [`InputFields::read`] reads them back.
    pub fn describe(&self, kernel: &KernelSpecification) -> Json {
        let fixed = kernel.fields.iter().zip(&self.fixed);
        let fixed = fixed.filter_map(|(field, value)| Some((field.name.clone(), field.text((*value)?).into())));
        json!({"kernel": kernel.name, "specification": kernel.text, "fixed": fixed.collect::<Map<_, _>>()})
    }

    /// Kernel and inputs of a model with this vocabulary, from its file's metadata.
    ///
    /// # Errors
    /// [`InputsError`] if metadata and vocabulary do not match.
    pub fn read(about: &Json, vocabulary: &Vocabulary) -> Result<(KernelSpecification, InputFields), InputsError> {
        let text = about["specification"].as_str().ok_or(InputsError::NoKernel("specification"))?;
        let kernel = KernelSpecification::parse(text)?;
        let fixed = about["fixed"].as_object().ok_or(InputsError::NoKernel("fixed"))?;
        let value = |field: &super::FieldSpecification| {
            let text = fixed.get(&field.name).map(|text| text.as_str().unwrap_or_default());
            text.map(|text| field.value(text)).transpose()
        };
        let fixed = kernel.fields.iter().map(value).collect::<Result<Vec<_>, _>>()?;
        let fields = (0..fixed.len()).filter(|&at| fixed[at].is_none()).collect();
        let inputs = InputFields { fields, fixed };
        let expected = inputs.vocabulary(&kernel);
        if expected.fields != vocabulary.fields {
            return Err(InputsError::Differs("fields".into()));
        }
        if expected.parameters != vocabulary.parameters {
            return Err(InputsError::Differs("parameters".into()));
        }
        Ok((kernel, inputs))
    }

    /// Problem from values of fields; a field that is constant in the training data may be omitted.
    ///
    /// # Errors
    /// [`InputsError`] for a field that is unknown, missing or has an invalid value, or a value that the
    /// model cannot predict for.
    pub fn ask(&self, kernel: &KernelSpecification, given: &[(String, String)]) -> Result<Vec<i64>, InputsError> {
        for (name, _) in given {
            kernel.check_field(name)?;
        }
        let defaults: Vec<Option<String>> =
            kernel.fields.iter().zip(&self.fixed).map(|(field, value)| Some(field.text((*value)?))).collect();
        let problem = kernel.problem(|name| {
            let asked = given.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
            let default = || defaults[kernel.fields.iter().position(|field| field.name == name)?].as_deref();
            asked.or_else(default)
        })?;
        for ((field, &asked), fixed) in kernel.fields.iter().zip(&problem).zip(&self.fixed) {
            if let Some(learnt) = fixed.filter(|&learnt| learnt != asked) {
                let (learnt, asked) = (field.text(learnt), field.text(asked));
                return Err(InputsError::Unseen { field: field.name.clone(), learnt, asked });
            }
        }
        Ok(problem)
    }
}
