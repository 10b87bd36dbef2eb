//! Errors of spaces that cannot be built, and of configurations that are not in a space.

use super::Value;

/// Reason for which a space cannot be built. All of these are the template's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// Two parameters have one name.
    #[error("parameter {parameter} is declared twice")]
    ParameterTwice {
        /// The name.
        parameter: String,
    },
    /// A list of values holds one of them twice.
    #[error("parameter {parameter} lists {value} twice")]
    ValueTwice {
        /// The parameter.
        parameter: String,
        /// The value.
        value: String,
    },
    /// A feasible set is empty.
    #[error("parameter {parameter} has no feasible value")]
    NoValues {
        /// The parameter.
        parameter: String,
    },
    /// A constraint reads no parameter.
    #[error("constraint {constraint} reads no parameter")]
    ReadsNothing {
        /// The constraint.
        constraint: String,
    },
    /// A constraint reads a parameter that the space does not have.
    #[error("constraint {constraint} reads the unknown parameter {parameter}")]
    ReadsUnknown {
        /// The constraint.
        constraint: String,
        /// Parameter that it reads.
        parameter: String,
    },
    /// The constraints leave nothing.
    #[error("no configuration satisfies {constraint} ({text}){}", if earlier.is_empty() { String::new() } else { format!(" together with {}", earlier.join(", ")) })]
    NothingLegal {
        /// Constraint that excludes everything.
        constraint: String,
        /// The predicate.
        text: String,
        /// Constraints before it, if it excludes everything only together with them.
        earlier: Vec<String>,
    },
    /// The number of combinations does not fit: 2^64 for one parameter or tied ones, 2^128 for the space.
    #[error("too many combinations of {}", parameters.join(", "))]
    TooLarge {
        /// The parameters whose combinations are too many.
        parameters: Vec<String>,
    },
    /// Parameters tied by constraints have too many combinations to try.
    #[error("more than {limit} combinations of {} to check against their constraints", parameters.join(", "))]
    TooManyToEnumerate {
        /// The parameters.
        parameters: Vec<String>,
        /// The most that are tried.
        limit: u64,
    },
}

/// Reason for which something is not a configuration of a space. All of these are the fault of whoever wrote
/// it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A value that is not a JSON object.
    #[error("a configuration is an object from parameter to value, not {found}")]
    NotAnObject {
        /// The JSON found.
        found: String,
    },
    /// A parameter that the space does not have.
    #[error("unknown parameter {parameter}; the space has {known}")]
    UnknownParameter {
        /// The name found.
        parameter: String,
        /// The names there are.
        known: String,
    },
    /// A parameter without a value.
    #[error("parameter {parameter} is missing")]
    MissingParameter {
        /// The parameter.
        parameter: String,
    },
    /// A value outside the feasible set.
    #[error("parameter {parameter} cannot be {value}; allowed: {allowed}")]
    NotFeasible {
        /// The parameter.
        parameter: String,
        /// The JSON found.
        value: String,
        /// The feasible set in words.
        allowed: String,
    },
    /// Feasible values that a constraint excludes together.
    #[error("constraint {constraint} ({text}) does not hold for {}", assignments(values))]
    Violated {
        /// The constraint.
        constraint: String,
        /// The predicate.
        text: String,
        /// Parameters that it read, with their values.
        values: Vec<(String, Value)>,
    },
}

fn assignments(values: &[(String, Value)]) -> String {
    values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ")
}
