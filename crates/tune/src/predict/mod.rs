//! Prediction of good parameters for untuned problems, learned from tuned ones.
//!
//! A [`KernelSpecification`] defines a kernel's problems and parameters; [`read_rows`] reads tuned problems,
//! from which a sequence model learns through [`InputFields`]; [`LookAhead`] restricts its predictions to
//! valid configurations. For Tilewright's own records, where spaces replace specifications, see [`records`].

mod data;
mod inputs;
mod look_ahead;
mod metrics;
pub mod records;
mod specification;
mod split;

pub use data::{TrainingTableError, TunedProblem, content_hash, read_rows};
pub use inputs::{InputFields, InputsError};
pub use look_ahead::LookAhead;
pub use metrics::{Score, score};
pub use specification::{
    ConstraintSpecification, FieldSpecification, KernelSpecification, ParameterSpecification, ProblemError,
    SpecificationError,
};
pub use split::{HoldOut, divide};
pub use tilewright_search::expression::ExpressionError;

/// Formats `n` with the noun `thing`, in the singular for 1.
fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}
