//! Kernel specifications in TOML: the problems and parameters of a kernel, and its valid configurations.

use std::collections::HashSet;
use std::sync::Arc;

use serde::Deserialize;
use tilewright_search::expression::{
    Datum, Expression, ExpressionError, ResolvedExpression, Slash, ValueType, VariableNames, is_name,
};

/// Reason why a text is not a kernel specification; the error is its author's.
#[derive(Debug, thiserror::Error)]
pub enum SpecificationError {
    /// Text that is not TOML, or not of the expected structure.
    #[error("{}{reason}", .line.map_or(String::new(), |line| format!("line {line}: ")))]
    Form {
        /// Line number of the error, from 1, if known.
        line: Option<usize>,
        /// Reason.
        reason: String,
    },
    /// List that must not be empty.
    #[error("there are no {0}")]
    Empty(&'static str),
    /// Name that is invalid in expressions.
    #[error("{name:?} cannot be a name (give letters, digits and _, and no word of the expressions)")]
    Name {
        /// The name.
        name: String,
    },
    /// Name that is used twice.
    #[error("{name} is declared twice")]
    Twice {
        /// The name.
        name: String,
    },
    /// Invalid list of values: empty, with a repeated value, or with numbers and texts mixed.
    #[error("the values of {name} must be distinct, at least one, and all numbers or all texts")]
    Values {
        /// Name of the field or the parameter.
        name: String,
    },
    /// Invalid expression.
    #[error("{place}, {error}")]
    Expression {
        /// Location of the expression.
        place: String,
        /// Reason.
        error: ExpressionError,
    },
    /// Constraint whose expression is not a condition.
    #[error("constraint {name} is {found}, not a condition")]
    NoCondition {
        /// The constraint.
        name: String,
        /// Type of the expression.
        found: ValueType,
    },
}

/// Reason why something is not a problem of a kernel; the error is the user's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// Field that the kernel does not have, or that is computed.
    #[error("{kernel} has no field {name} to be given; there are {known}")]
    Unknown {
        /// The kernel.
        kernel: String,
        /// The name.
        name: String,
        /// Names of the fields that must be given.
        known: String,
    },
    /// Missing field.
    #[error("field {name} is missing; {kernel} has {known}")]
    Missing {
        /// The kernel.
        kernel: String,
        /// The name.
        name: String,
        /// Names of the fields that must be given.
        known: String,
    },
    /// Invalid value of a field.
    #[error("field {name} cannot be {value:?}; it is {expected}")]
    Value {
        /// The field.
        name: String,
        /// The value.
        value: String,
        /// Valid values.
        expected: String,
    },
    /// Computed field whose expression is undefined.
    #[error("field {name}, which is computed, has no value for this problem")]
    Undefined {
        /// The field.
        name: String,
    },
}

/// Field of a problem.
#[derive(Debug, Clone)]
pub struct FieldSpecification {
    /// Name of the field, and of a column of the data unless it is computed.
    pub name: String,
    /// Values of a categorical field; `None` for an integer field.
    pub values: Option<Arc<[String]>>,
    /// Expression over the preceding fields, if the field is computed.
    expression: Option<ResolvedExpression>,
}

/// Parameter of a kernel.
#[derive(Debug, Clone)]
pub struct ParameterSpecification {
    /// Name of the parameter, and of a column of the data.
    pub name: String,
    /// Legal values as text, in order.
    pub values: Arc<[String]>,
    /// Values as expressions see them, by legal value.
    pub(super) data: Vec<Datum>,
}

/// Predicate that valid configurations satisfy.
#[derive(Debug, Clone)]
pub struct ConstraintSpecification {
    /// Name for error messages.
    pub name: String,
    /// Predicate as text.
    pub text: String,
    pub(super) code: ResolvedExpression,
}

/// Specification of a kernel: the fields of its problems, its parameters with their values, and the
/// constraints on its configurations.
///
/// Expressions can read the fields, the parameters and earlier definitions, whose values are passed in one
/// list in that order. The language is that of [`tilewright_search::expression`], except that `/` rounds
/// down.
#[derive(Debug, Clone)]
pub struct KernelSpecification {
    /// Name of the kernel.
    pub name: String,
    /// Fields of a problem.
    pub fields: Vec<FieldSpecification>,
    /// Parameters, in the order in which a model predicts them.
    pub parameters: Vec<ParameterSpecification>,
    /// The constraints.
    pub constraints: Vec<ConstraintSpecification>,
    /// Columns of the data that can group rows, for splits by group.
    pub groups: Vec<String>,
    /// Source text.
    pub text: String,
    pub(super) definitions: Vec<ResolvedExpression>,
    equivalence: Vec<ResolvedExpression>,
}

/// Specification as written in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpecificationForm {
    name: String,
    /// Comment for readers of the file.
    #[serde(default, rename = "about")]
    _about: String,
    fields: Vec<FieldForm>,
    parameters: Vec<ParameterEntry>,
    #[serde(default)]
    definitions: Vec<NamedForm>,
    #[serde(default)]
    constraints: Vec<NamedForm>,
    #[serde(default)]
    equivalence: Vec<String>,
    #[serde(default)]
    groups: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FieldForm {
    name: String,
    values: Option<Vec<String>>,
    is: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParameterEntry {
    name: String,
    values: Values,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a list of numbers, or of texts")]
enum Values {
    Numbers(Vec<i64>),
    Texts(Vec<String>),
}

/// Definition or constraint, as written in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedForm {
    name: String,
    is: String,
    /// Comment for readers of the file.
    #[serde(default, rename = "about")]
    _about: String,
}

impl KernelSpecification {
    /// Parses a specification.
    ///
    /// # Errors
    /// [`SpecificationError`].
    pub fn parse(text: &str) -> Result<KernelSpecification, SpecificationError> {
        let form: SpecificationForm = toml::from_str(text).map_err(|error| SpecificationError::Form {
            line: error.span().map(|span| 1 + text[..span.start.min(text.len())].matches('\n').count()),
            reason: error.message().to_owned(),
        })?;
        if form.fields.is_empty() || form.parameters.is_empty() {
            let what = if form.fields.is_empty() { "fields" } else { "parameters" };
            return Err(SpecificationError::Empty(what));
        }
        let mut scope = VariableNames::new();
        let mut fields = Vec::new();
        for FieldForm { name, values, is } in form.fields {
            let computed = is.map(|text| compile(&format!("field {name}"), &text, &scope)).transpose()?;
            let values = values.map(|values| distinct(&name, values)).transpose()?;
            let kind = match (&values, &computed) {
                (Some(_), Some(_)) => return Err(SpecificationError::Values { name }),
                (Some(values), None) => ValueType::Category(values.clone()),
                (None, Some((_, kind))) => kind.clone(),
                (None, None) => ValueType::Number,
            };
            declare(&mut scope, &name, kind.clone())?;
            // A computed category has the values of the field it comes from.
            let values = if let ValueType::Category(values) = kind { Some(values) } else { None };
            fields.push(FieldSpecification { name, values, expression: computed.map(|(code, _)| code) });
        }
        let mut parameters = Vec::new();
        for ParameterEntry { name, values } in form.parameters {
            let (texts, numbers) = match values {
                Values::Numbers(numbers) => (numbers.iter().map(i64::to_string).collect(), Some(numbers)),
                Values::Texts(texts) => (texts, None),
            };
            let values = distinct(&name, texts)?;
            let kind = if numbers.is_some() { ValueType::Number } else { ValueType::Category(values.clone()) };
            declare(&mut scope, &name, kind)?;
            let data = match numbers {
                Some(numbers) => numbers.into_iter().map(Datum::from).collect(),
                None => values.iter().map(|text| Datum::from(text.as_str())).collect(),
            };
            parameters.push(ParameterSpecification { name, values, data });
        }
        let mut definitions = Vec::new();
        for NamedForm { name, is, .. } in form.definitions {
            let (code, kind) = compile(&format!("definition {name}"), &is, &scope)?;
            declare(&mut scope, &name, kind)?;
            definitions.push(code);
        }
        let mut constraints: Vec<ConstraintSpecification> = Vec::new();
        for NamedForm { name, is, .. } in form.constraints {
            let (code, kind) = compile(&format!("constraint {name}"), &is, &scope)?;
            if kind != ValueType::Boolean {
                return Err(SpecificationError::NoCondition { name, found: kind });
            }
            if constraints.iter().any(|earlier| earlier.name == name) {
                return Err(SpecificationError::Twice { name });
            }
            constraints.push(ConstraintSpecification { name, text: is, code });
        }
        let of_equivalence = |(at, text): (usize, &String)| compile(&format!("equivalence {}", at + 1), text, &scope);
        let equivalence = form.equivalence.iter().enumerate().map(of_equivalence);
        let equivalence = equivalence.map(|compiled| compiled.map(|(code, _)| code)).collect::<Result<_, _>>()?;
        let (name, groups, text) = (form.name, form.groups, text.to_owned());
        Ok(KernelSpecification { name, fields, parameters, constraints, groups, text, definitions, equivalence })
    }

    /// Fields that are given rather than computed.
    pub fn given_fields(&self) -> impl Iterator<Item = &FieldSpecification> {
        self.fields.iter().filter(|field| field.expression.is_none())
    }

    fn known_fields(&self) -> String {
        self.given_fields().map(|field| field.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Makes a problem from values of fields: one number for each field.
    ///
    /// # Errors
    /// [`ProblemError`].
    pub fn problem<'a>(&self, given: impl Fn(&str) -> Option<&'a str>) -> Result<Vec<i64>, ProblemError> {
        let mut problem: Vec<i64> = Vec::with_capacity(self.fields.len());
        for field in &self.fields {
            let name = field.name.clone();
            problem.push(match &field.expression {
                Some(code) => {
                    let slots: Vec<_> = self.fields.iter().zip(&problem).map(|(f, &v)| Some(f.datum(v))).collect();
                    let value = code.evaluate(&slots).and_then(|value| field.number(&value));
                    value.ok_or(ProblemError::Undefined { name })?
                }
                None => match given(&field.name) {
                    Some(text) => field.value(text)?,
                    None => {
                        let (kernel, known) = (self.name.clone(), self.known_fields());
                        return Err(ProblemError::Missing { kernel, name, known });
                    }
                },
            });
        }
        Ok(problem)
    }

    /// Checks that a name is that of a given field.
    ///
    /// # Errors
    /// [`ProblemError::Unknown`].
    pub fn check_field(&self, name: &str) -> Result<(), ProblemError> {
        if self.given_fields().any(|field| field.name == name) {
            return Ok(());
        }
        let (kernel, name, known) = (self.name.clone(), name.to_owned(), self.known_fields());
        Err(ProblemError::Unknown { kernel, name, known })
    }

    /// Constraints that a configuration, as indices of values, violates for a problem.
    pub fn violated(&self, problem: &[i64], answer: &[u32]) -> impl Iterator<Item = &ConstraintSpecification> {
        let slots = self.slots(problem, answer);
        self.constraints.iter().filter(move |constraint| !constraint.code.holds(&slots))
    }

    /// Whether a configuration, as indices of values, is valid for a problem.
    pub fn is_valid(&self, problem: &[i64], answer: &[u32]) -> bool {
        self.violated(problem, answer).next().is_none()
    }

    /// Canonical form of a configuration: two forms are equal if and only if the configurations yield the
    /// same kernel for a problem.
    pub fn canonical(&self, problem: &[i64], answer: &[u32]) -> Vec<Option<Datum>> {
        if self.equivalence.is_empty() {
            return answer.iter().map(|&value| Some(i64::from(value).into())).collect();
        }
        let slots = self.slots(problem, answer);
        self.equivalence.iter().map(|code| code.evaluate(&slots)).collect()
    }

    fn slots(&self, problem: &[i64], answer: &[u32]) -> Vec<Option<Datum>> {
        let values = self.parameters.iter().zip(answer).map(|(p, &value)| p.data[value as usize].clone());
        let fields = self.fields.iter().zip(problem).map(|(field, &value)| field.datum(value));
        let mut slots: Vec<Option<Datum>> = fields.chain(values).map(Some).collect();
        for definition in &self.definitions {
            slots.push(definition.evaluate(&slots));
        }
        slots
    }
}

impl FieldSpecification {
    /// Parses a value of the field to its number.
    ///
    /// # Errors
    /// [`ProblemError::Value`].
    pub fn value(&self, text: &str) -> Result<i64, ProblemError> {
        let (found, expected) = match &self.values {
            Some(values) => (values.iter().position(|v| v == text).map(|at| at as i64), values.join(", ")),
            None => {
                let whole = text.trim_end_matches('0').strip_suffix('.').filter(|whole| whole.parse::<i64>().is_ok());
                let hint = whole.map_or(String::new(), |whole| format!(" (write {whole})"));
                (text.parse().ok(), format!("a whole number{hint}"))
            }
        };
        found.ok_or_else(|| ProblemError::Value { name: self.name.clone(), value: text.into(), expected })
    }

    /// Value of the field, as expressions see it.
    pub(super) fn datum(&self, value: i64) -> Datum {
        match &self.values {
            Some(_) => self.text(value).as_str().into(),
            None => value.into(),
        }
    }

    /// Number that represents the value of an expression, if it is one of the field.
    fn number(&self, datum: &Datum) -> Option<i64> {
        match (&self.values, datum) {
            (Some(values), Datum::Text(text)) => values.iter().position(|value| **value == **text).map(|at| at as i64),
            _ => datum.int(),
        }
    }

    /// Formats a value of the field.
    pub fn text(&self, value: i64) -> String {
        match &self.values {
            Some(values) => usize::try_from(value).ok().and_then(|at| values.get(at)).map_or("?", |v| v).to_owned(),
            None => value.to_string(),
        }
    }
}

fn distinct(name: &str, values: Vec<String>) -> Result<Arc<[String]>, SpecificationError> {
    let mut seen = HashSet::new();
    if values.is_empty() || !values.iter().all(|value| seen.insert(value)) {
        return Err(SpecificationError::Values { name: name.into() });
    }
    Ok(values.into())
}

fn declare(scope: &mut VariableNames, name: &str, kind: ValueType) -> Result<(), SpecificationError> {
    if !is_name(name) {
        return Err(SpecificationError::Name { name: name.into() });
    }
    if scope.iter().any(|(known, _)| known == name) {
        return Err(SpecificationError::Twice { name: name.into() });
    }
    scope.push((name.into(), kind));
    Ok(())
}

fn compile(
    place: &str,
    text: &str,
    scope: &VariableNames,
) -> Result<(ResolvedExpression, ValueType), SpecificationError> {
    let compiled = Expression::parse_with(text, Slash::RoundsDown).and_then(|expression| expression.compile(scope));
    compiled.map_err(|error| SpecificationError::Expression { place: place.into(), error })
}
