//! Values of parameters.

use std::fmt;

use serde::Serialize;

/// Value of one parameter. Its JSON form is the natural one: `256`, `"packed"`, `[4,4,8,8]`,
/// `["jc","pc","ic"]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// Entry of an ordinal parameter.
    Int(i64),
    /// Entry of a categorical parameter.
    Text(String),
    /// Factorization, outermost factor first.
    Factors(Vec<u64>),
    /// Permutation of named loops, outermost first.
    Order(Vec<String>),
}

impl Value {
    /// Returns the number of an ordinal value.
    ///
    /// # Panics
    /// On a value of another kind: a bug in the template, which declared another kind of parameter.
    pub fn int(&self) -> i64 {
        match self {
            Value::Int(value) => *value,
            other => panic!("invariant: ordinal value, found {other}"),
        }
    }

    /// Returns the text of a categorical value.
    ///
    /// # Panics
    /// On a value of another kind.
    pub fn text(&self) -> &str {
        match self {
            Value::Text(value) => value,
            other => panic!("invariant: categorical value, found {other}"),
        }
    }

    /// Returns the factors of a factorization, outermost first.
    ///
    /// # Panics
    /// On a value of another kind.
    pub fn factors(&self) -> &[u64] {
        match self {
            Value::Factors(value) => value,
            other => panic!("invariant: factorization value, found {other}"),
        }
    }

    /// Returns the names of a permutation, outermost first.
    ///
    /// # Panics
    /// On a value of another kind.
    pub fn order(&self) -> &[String] {
        match self {
            Value::Order(value) => value,
            other => panic!("invariant: permutation value, found {other}"),
        }
    }

    /// Returns the value in its natural JSON form.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Value::Int(value) => (*value).into(),
            Value::Text(value) => value.as_str().into(),
            Value::Factors(values) => values.as_slice().into(),
            Value::Order(names) => names.as_slice().into(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{}", self.to_json())
    }
}
