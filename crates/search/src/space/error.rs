//! Errors of invalid spaces, and of configurations that are not in a space.

use super::Value;

/// Advice for [`SpaceError::TooManyToEnumerate`].
const FEWER: &str = "(list fewer values, or let each constraint read fewer parameters)";

/// Reason why a space cannot be built; its declaration is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// Two parameters of the same name.
    #[error("parameter {parameter} is declared twice")]
    ParameterTwice {
        /// The name.
        parameter: String,
    },
    /// Value that is listed twice.
    #[error("parameter {parameter} lists {value} twice")]
    ValueTwice {
        /// The parameter.
        parameter: String,
        /// The value.
        value: String,
    },
    /// Domain without values.
    #[error("parameter {parameter} has no feasible value")]
    NoValues {
        /// The parameter.
        parameter: String,
    },
    /// Constraint that reads no parameter.
    #[error("constraint {constraint} reads no parameter")]
    ReadsNothing {
        /// The constraint.
        constraint: String,
    },
    /// Constraint that reads an unknown parameter.
    #[error("constraint {constraint} reads the unknown parameter {parameter}")]
    ReadsUnknown {
        /// The constraint.
        constraint: String,
        /// Parameter that it reads.
        parameter: String,
    },
    /// Constraints that no configuration satisfies.
    #[error("no configuration satisfies {}{}", predicate(constraint, text), if earlier.is_empty() { String::new() } else { format!(" together with {}", earlier.join(", ")) })]
    NothingLegal {
        /// Name of the constraint that excludes everything.
        constraint: String,
        /// Predicate of the constraint.
        text: String,
        /// Names of the constraints before it, if only all together exclude everything; else empty.
        earlier: Vec<String>,
    },
    /// Overflow of the number of combinations: 2^64 for one parameter or tied ones, 2^128 for the space.
    #[error("too many combinations of {} to number", listed(parameters))]
    TooLarge {
        /// Names of the parameters whose combinations overflow.
        parameters: Vec<String>,
    },
    /// Tied parameters with too many combinations to enumerate.
    #[error("more than {limit} combinations of {} to check against their constraints {FEWER}", listed(parameters))]
    TooManyToEnumerate {
        /// Names of the parameters.
        parameters: Vec<String>,
        /// Maximum number of combinations.
        limit: u64,
    },
}

/// Reason why JSON is not a configuration of a space; the mistake is its author's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// JSON value that is not an object.
    #[error("a configuration is an object from parameter to value, not {found}")]
    NotAnObject {
        /// JSON that was given.
        found: String,
    },
    /// Parameter that the space does not have.
    #[error("unknown parameter {parameter}; the space has {known}")]
    UnknownParameter {
        /// Name that was given.
        parameter: String,
        /// Names of the space's parameters.
        known: String,
    },
    /// Parameter without a value.
    #[error("parameter {parameter} is missing")]
    MissingParameter {
        /// The parameter.
        parameter: String,
    },
    /// Value outside the parameter's domain.
    #[error("parameter {parameter} cannot be {value}; allowed: {allowed}")]
    NotFeasible {
        /// The parameter.
        parameter: String,
        /// JSON that was given.
        value: String,
        /// Domain in words.
        allowed: String,
    },
    /// Feasible values that together violate a constraint.
    #[error("constraint {} does not hold for {}", predicate(constraint, text), assignments(values))]
    Violated {
        /// The constraint.
        constraint: String,
        /// Predicate of the constraint.
        text: String,
        /// Parameters that it reads, with their values.
        values: Vec<(String, Value)>,
    },
}

/// Name of a constraint with its predicate, unless that is its name.
fn predicate(constraint: &str, text: &str) -> String {
    if constraint == text { text.to_owned() } else { format!("{constraint} ({text})") }
}

/// Names in a line, which are not all there where they are many.
fn listed(names: &[String]) -> String {
    const MOST: usize = 10;
    let shown = names[..names.len().min(MOST)].join(", ");
    match names.len().saturating_sub(MOST) {
        0 => shown,
        n_more => format!("{shown} and {n_more} more"),
    }
}

fn assignments(values: &[(String, Value)]) -> String {
    values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ")
}
