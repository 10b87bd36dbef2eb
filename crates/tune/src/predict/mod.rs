//! Prediction of the parameters of untuned problems from tuned ones.
//!
//! A [`KernelSpecification`] says what a kernel's problems and parameters are; [`read_rows`] reads tuned
//! problems, which a sequence model learns from through [`InputFields`], and [`LookAhead`] keeps the model's
//! answers to valid ones. The same is done with Tilewright's own records, whose spaces take the place of a
//! specification: [`records`].

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

/// `n` things, in the singular where it is one.
fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}
