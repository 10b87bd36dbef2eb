//! Constraints: named predicates over some of a space's parameters.

use std::fmt;
use std::sync::Arc;

use super::{Domain, Parameter, Value};
use crate::expression::{self, Datum, Expression, ExpressionError, ResolvedExpression, ValueType, VariableNames};

type ConfigTest = dyn Fn(&[&Value]) -> bool + Send + Sync;

/// Predicate over the values of some parameters.
#[derive(Clone)]
pub(super) enum Predicate {
    Function(Arc<ConfigTest>),
    /// Expression; the slots that it reads are the indices of the parameters.
    Expression(Arc<ResolvedExpression>, Arc<[Reading]>),
    /// Predicate over all values but the first, which has to hold only if the guard applies to the first
    /// value.
    Guarded(Guard, Arc<Predicate>),
}

/// Condition on the value of a categorical parameter under which a constraint applies.
#[derive(Clone)]
pub(super) struct Guard {
    value: String,
    /// Whether the constraint applies to this value alone, or to all others.
    to_it: bool,
}

impl Guard {
    pub(super) fn applies(&self, value: &Value) -> bool {
        (value.text() == self.value) == self.to_it
    }
}

impl Predicate {
    pub(super) fn holds(&self, values: &[&Value]) -> bool {
        match self {
            Predicate::Function(holds) => holds(values),
            Predicate::Guarded(guard, guarded) => !guard.applies(values[0]) || guarded.holds(&values[1..]),
            Predicate::Expression(code, readings) => {
                let data = values.iter().zip(&**readings).map(|(value, reading)| Some(reading.datum(value)));
                code.holds(&data.collect::<Vec<_>>())
            }
        }
    }
}

/// Form in which expressions read the texts of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    Text,
    Number,
    Boolean,
    List,
}

impl Reading {
    /// Form for a domain: texts that are all numbers, all booleans or all lists are read as such.
    pub(super) fn of(domain: &Domain) -> Reading {
        let Domain::Categorical(texts) = domain else { return Reading::Text };
        let is_number = |text: &String| text.parse::<f64>().is_ok_and(f64::is_finite);
        if texts.iter().all(|text| boolean(text).is_some()) {
            Reading::Boolean
        } else if texts.iter().all(is_number) {
            Reading::Number
        } else if texts.iter().all(|text| text.starts_with('[') && expression::list(text).is_ok()) {
            Reading::List
        } else {
            Reading::Text
        }
    }

    /// Value as expressions see it.
    pub(super) fn datum(self, value: &Value) -> Datum {
        let list = |items: Vec<Datum>| Datum::List(items.into());
        match (value, self) {
            (Value::Int(number), _) => Datum::Int(*number),
            (Value::Text(text), Reading::Boolean) => Datum::Bool(boolean(text).unwrap_or(false)),
            (Value::Text(text), Reading::Number) => match text.parse() {
                Ok(number) => Datum::Int(number),
                Err(_) => Datum::Float(text.parse().unwrap_or(f64::NAN)),
            },
            (Value::Text(text), Reading::List) => list(expression::list(text).unwrap_or_default()),
            (Value::Text(text), Reading::Text) => text.as_str().into(),
            (Value::Factors(factors), _) => list(factors.iter().map(|&factor| Datum::Int(factor as i64)).collect()),
            (Value::Order(names), _) => list(names.iter().map(|name| name.as_str().into()).collect()),
        }
    }

    fn kind(self, domain: &Domain) -> ValueType {
        match (domain, self) {
            (Domain::Ordinal(_), _) | (_, Reading::Number) => ValueType::Number,
            (_, Reading::Boolean) => ValueType::Boolean,
            (_, Reading::List) => ValueType::List,
            (Domain::Categorical(texts), Reading::Text) => ValueType::Category(texts.as_slice().into()),
            (Domain::Factorization { .. } | Domain::Permutation(_), Reading::Text) => ValueType::List,
        }
    }
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "True" => Some(true),
        "false" | "False" => Some(false),
        _ => None,
    }
}

/// Predicate that every legal configuration satisfies, with a name for error messages.
#[derive(Clone)]
pub struct Constraint {
    /// Name, unique within its space, for example `registers`.
    pub name: String,
    /// Predicate as text, for example `mr * nr / 16 + mr <= 32`.
    pub text: String,
    /// Names of the parameters that it reads, in the order in which the predicate takes their values.
    pub parameters: Vec<String>,
    /// Whether it is advice: configurations that violate it are legal, but hardly the best, and no search
    /// proposes them.
    pub is_advice: bool,
    predicate: Predicate,
}

impl Constraint {
    /// Makes a constraint over `parameters`; `holds` takes their values in that order and must depend on
    /// nothing else.
    ///
    /// ```
    /// # use tilewright_search::Constraint;
    /// Constraint::new("registers", "mr * nr <= 24", &["mr", "nr"], |v| v[0].int() * v[1].int() <= 24);
    /// ```
    pub fn new(
        name: &str,
        text: &str,
        parameters: &[&str],
        holds: impl Fn(&[&Value]) -> bool + Send + Sync + 'static,
    ) -> Constraint {
        let parameters = parameters.iter().map(|name| name.to_string()).collect();
        let predicate = Predicate::Function(Arc::new(holds));
        Constraint { name: name.into(), text: text.into(), parameters, is_advice: false, predicate }
    }

    /// Parses a constraint from an expression over some of these parameters. Factorizations and permutations
    /// are lists in it. Categorical values that are all numbers, all `true` and `false`, or all lists such as
    /// `[1, 2]` are read as such.
    ///
    /// ```
    /// # use tilewright_search::{Constraint, Parameter};
    /// let parameters = [Parameter::ordinal("tile", [8, 16, 32]), Parameter::ordinal("t", 1..=8)];
    /// let constraint = Constraint::parse("fits", "tile * t <= 64", &parameters).unwrap();
    /// assert_eq!(constraint.parameters, ["tile", "t"]);
    /// ```
    ///
    /// # Errors
    /// If the text is not a condition over these parameters; the error has the position.
    pub fn parse(name: &str, text: &str, parameters: &[Parameter]) -> Result<Constraint, ExpressionError> {
        let (code, readings) = compiled(text, parameters)?;
        let mut reads = Vec::new();
        code.reads(&mut reads);
        reads.sort_unstable();
        reads.dedup();
        let code = code.moved(&|slot| reads.binary_search(&slot).expect("invariant: all that is read is listed"));
        Ok(Constraint {
            name: name.into(),
            text: text.into(),
            parameters: reads.iter().map(|&slot| parameters[slot].name.clone()).collect(),
            is_advice: false,
            predicate: Predicate::Expression(code.into(), reads.iter().map(|&slot| readings[slot]).collect()),
        })
    }

    /// Parses a constraint that is declared over all of these parameters, even if the expression does not
    /// need some of them at these sizes. The same parameters are then tied at all sizes, and a space numbers
    /// its configurations in the same order.
    ///
    /// # Errors
    /// If the text is not an expression over these parameters.
    pub fn parse_over(name: &str, text: &str, parameters: &[Parameter]) -> Result<Constraint, ExpressionError> {
        let (code, readings) = compiled(text, parameters)?;
        Ok(Constraint {
            name: name.into(),
            text: text.into(),
            parameters: parameters.iter().map(|parameter| parameter.name.clone()).collect(),
            is_advice: false,
            predicate: Predicate::Expression(code.into(), readings.into()),
        })
    }

    /// The constraint as [advice](Constraint::is_advice).
    pub fn into_advice(self) -> Constraint {
        Constraint { is_advice: true, ..self }
    }

    /// Advice as a constraint that is none.
    pub(super) fn into_law(self) -> Constraint {
        Constraint { is_advice: false, ..self }
    }

    /// The constraint as a function of all values that it reads.
    #[cfg(test)]
    pub(super) fn as_function(&self) -> Constraint {
        let predicate = self.predicate.clone();
        Constraint { predicate: Predicate::Function(Arc::new(move |v| predicate.holds(v))), ..self.clone() }
    }

    /// Predicate over the values of [`Constraint::parameters`].
    pub(super) fn predicate(&self) -> &Predicate {
        &self.predicate
    }

    /// Restricts the constraint to configurations in which a categorical parameter has this value; elsewhere
    /// it holds.
    pub fn only_where(mut self, parameter: &str, value: &str) -> Constraint {
        self.text = format!("{}, where {parameter} = {value}", self.text);
        self.guarded(parameter, Guard { value: value.into(), to_it: true })
    }

    /// Restricts the constraint to configurations in which a categorical parameter has another value;
    /// elsewhere it holds.
    pub fn except_where(mut self, parameter: &str, value: &str) -> Constraint {
        self.text = format!("{}, except where {parameter} = {value}", self.text);
        self.guarded(parameter, Guard { value: value.into(), to_it: false })
    }

    fn guarded(mut self, parameter: &str, guard: Guard) -> Constraint {
        self.parameters.insert(0, parameter.into());
        self.predicate = Predicate::Guarded(guard, Arc::new(self.predicate));
        self
    }

    /// Whether the predicate holds for these values of [`Constraint::parameters`].
    pub fn holds(&self, values: &[&Value]) -> bool {
        self.predicate.holds(values)
    }
}

/// Compiles a condition whose slots are these parameters.
fn compiled(text: &str, parameters: &[Parameter]) -> Result<(ResolvedExpression, Vec<Reading>), ExpressionError> {
    let readings: Vec<Reading> = parameters.iter().map(|parameter| Reading::of(&parameter.domain)).collect();
    let kinds = parameters.iter().zip(&readings);
    let scope: VariableNames =
        kinds.map(|(parameter, reading)| (parameter.name.clone(), reading.kind(&parameter.domain))).collect();
    Ok((Expression::parse(text)?.compile_condition(&scope)?, readings))
}

impl fmt::Debug for Constraint {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "Constraint({}: {})", self.name, self.text)
    }
}
