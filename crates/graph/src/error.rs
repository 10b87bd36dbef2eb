//! What can be wrong with a model, each on one line: what, where, and how to mend it.

use std::fmt;

/// Why an operator cannot be had, inferred or evaluated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// What is asked for is right, and not supported here.
    #[error("{0}")]
    Unsupported(String),
    /// The model breaks a rule of the operator.
    #[error("{0}")]
    Invalid(String),
    /// The shape of an output depends on the value of an input that is not known.
    #[error("the shape of its output depends on the value of its input {}, which is known only when it runs", .0 + 1)]
    NeedsValue(usize),
    /// The shape of an output depends on what is computed.
    #[error("the shape of its output depends on the data (end the model ahead of it)")]
    ShapeOfData,
    /// A tensor would be larger than memory.
    #[error("its output would have the shape {0}, which is too large")]
    TooLarge(String),
}

impl OpError {
    /// Whether the model is right and this crate cannot do it.
    pub fn is_unsupported(&self) -> bool {
        !matches!(self, OpError::Invalid(_) | OpError::TooLarge(_))
    }
}

/// An [`OpError::Invalid`] of a formatted text.
macro_rules! invalid {
    ($($arguments:tt)*) => { $crate::OpError::Invalid(format!($($arguments)*)) };
}

/// An [`OpError::Unsupported`] of a formatted text.
macro_rules! unsupported {
    ($($arguments:tt)*) => { $crate::OpError::Unsupported(format!($($arguments)*)) };
}

pub(crate) use {invalid, unsupported};

/// Where in a model something is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The node's name, or its first output's where it has none.
    pub node: String,
    /// The operator, with its domain before it where that is not ONNX's own.
    pub operator: String,
    /// The opset of its domain that the model was written for; 0 where it names none.
    pub opset: i64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node `{}` ({}, opset {})", self.node, self.operator, self.opset)
    }
}

/// What is wrong at a place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// An operator refuses.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A dimension of an input has no size.
    #[error("dimension {axis} of input `{input}` has no size (give --dim {}=SIZE or --shape {input}={})",
        .dim.as_deref().unwrap_or("NAME"), .example)]
    Unbound {
        /// The input.
        input: String,
        /// Which of its dimensions.
        axis: usize,
        /// The dimension's name, where it has one.
        dim: Option<String>,
        /// The shape, with letters for sizes that are missing.
        example: String,
    },
    /// An input has no shape at all.
    #[error("input `{0}` has no shape (give --shape {0}=…)")]
    NoShape(String),
    /// The shape of an output depends on an input's value.
    #[error("{error}{}", set_hint(.inputs))]
    NeedsInput {
        /// What the operator says.
        error: OpError,
        /// The model's inputs that the value is computed from.
        inputs: Vec<String>,
    },
    /// An option does not fit the model.
    #[error("{0}")]
    Binding(String),
}

/// How to make known what inputs decide, where they are few.
fn set_hint(inputs: &[String]) -> String {
    match inputs {
        [] => String::new(),
        [input] => format!(" (give --set {input}=VALUE)"),
        [.., last] if inputs.len() <= 3 => format!(" (give --set NAME=VALUE for {} or {last})", inputs[0]),
        _ => String::new(),
    }
}

/// One thing that is wrong with a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The node, where it is about one.
    pub place: Option<Place>,
    /// What is wrong.
    pub reason: Reason,
}

impl Problem {
    /// The model's inputs whose values are to be known, where shapes depend on them.
    pub fn needed_inputs(&self) -> &[String] {
        match &self.reason {
            Reason::NeedsInput { inputs, .. } => inputs,
            Reason::Op(_) | Reason::Unbound { .. } | Reason::NoShape(_) | Reason::Binding(_) => &[],
        }
    }

    /// Whether the model is right and this crate cannot do it.
    pub fn is_unsupported(&self) -> bool {
        match &self.reason {
            Reason::Op(error) => error.is_unsupported(),
            Reason::NeedsInput { .. } => true,
            Reason::Unbound { .. } | Reason::NoShape(_) | Reason::Binding(_) => false,
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{place}: {}", self.reason),
            None => write!(f, "{}", self.reason),
        }
    }
}

/// Why a file is no model that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// It is not a protocol buffer, or not a whole one.
    #[error("{what} at byte {at}: the file is damaged, cut off or no ONNX model (save it anew)")]
    Malformed {
        /// Where.
        at: usize,
        /// What is wrong there.
        what: &'static str,
    },
    /// What it says takes far more memory than the file does.
    #[error("it would take more than {0} bytes of memory: the file is damaged (save it anew)")]
    TooLarge(usize),
    /// It is read, and it is no model.
    #[error("{0}")]
    NoModel(String),
    /// A tensor cannot be had.
    #[error("tensor `{name}`: {what}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// A node does not fit its graph.
    #[error("{0}")]
    Node(Box<Problem>),
}
