//! Reasons why a node of a graph has no code.

use tilewright_graph::{DType, OpError};

/// Result of a lowering.
pub(crate) type Lowered<T = ()> = Result<T, NoCode>;

/// Reason why a node has no code: no lowering of its operator supports it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoCode {
    /// Operator without a lowering.
    #[error("no lowering knows the operator")]
    Operator,
    /// Unsupported element type of a value.
    #[error("`{value}` is {dtype}, and there is code for {takes}{}", cast_hint(*.dtype, .takes))]
    Type {
        /// Name of the value.
        value: String,
        /// Type of its elements.
        dtype: DType,
        /// Supported types.
        takes: &'static str,
    },
    /// Two values whose element types differ but must be equal.
    #[error("`{}` is {}, but `{}` is {} (put a Cast ahead of one)", .0.0, .0.1, .1.0, .1.1)]
    Mixed((String, DType), (String, DType)),
    /// Unsupported rank of a value.
    #[error("`{value}` has {rank} dimensions, and there is code for {takes}")]
    Rank {
        /// Name of the value.
        value: String,
        /// Rank of the value.
        rank: usize,
        /// Supported operands.
        takes: &'static str,
    },
    /// Unsupported shape or attribute, described in words.
    #[error("there is no code for {0}")]
    Form(&'static str),
    /// Size above the supported limit.
    #[error("{what} are {size}, and there is code for up to {most}")]
    Size {
        /// Description of the things counted, in the plural.
        what: &'static str,
        /// Number of them.
        size: i64,
        /// Limit.
        most: i64,
    },
    /// Value that must be constant.
    #[error("`{0}` is known only when the model runs (make it a constant of the model)")]
    Unknown(String),
    /// Missing input that the lowering needs, by index.
    #[error("its input {} is left out, and there is code only with it", .0 + 1)]
    Missing(usize),
    /// Further output that is used, by index.
    #[error("its output {} is read, and there is code for the first alone", .0 + 1)]
    Output(usize),
    /// Output that is unused or has no elements.
    #[error("its output has no elements, or is not used")]
    Unread,
    /// Operand without elements.
    #[error("`{0}` has no elements")]
    Empty(String),
    /// Error of the operator for what is known of its inputs.
    #[error(transparent)]
    Op(#[from] OpError),
}

/// Hint to cast, if the operator has code for another numeric type.
fn cast_hint(dtype: DType, takes: &str) -> &'static str {
    if dtype.is_float() || takes.contains("f32") { " (put a Cast ahead of it)" } else { "" }
}

/// Checks a condition that a lowering relies on.
pub(crate) fn need(holds: bool, otherwise: impl FnOnce() -> NoCode) -> Lowered {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// Lowerings to try one after another.
pub(crate) trait Otherwise<T> {
    /// Tries another, more general lowering if this one failed. If both fail, the reason of the other one is
    /// kept, unless that does not know the operator at all.
    fn otherwise(self, other: impl FnOnce() -> Lowered<T>) -> Lowered<T>;
}

impl<T> Otherwise<T> for Lowered<T> {
    fn otherwise(self, other: impl FnOnce() -> Lowered<T>) -> Lowered<T> {
        let Err(first) = self else { return self };
        other().map_err(|second| if second == NoCode::Operator { first } else { second })
    }
}
