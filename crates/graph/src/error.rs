//! Errors in a model, each on one line: the problem, its location, and how to fix it.

use std::fmt;

use crate::Dim;

/// Reason why an operator cannot be imported, inferred or evaluated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// Valid ONNX that this crate does not implement.
    #[error("{0}")]
    Unsupported(String),
    /// Model error: a rule of the operator's specification is broken.
    #[error("{0}")]
    Invalid(String),
    /// Shape inference needs the value of this input (its index), which is not a constant.
    #[error("the shape of its output depends on the value of its input {}, which is known only when it runs", .0 + 1)]
    NeedsValue(usize),
    /// Output shape that depends on computed values, as of `NonZero`; such shapes are not supported.
    #[error("the shape of its output depends on the data (end the model ahead of it)")]
    ShapeOfData,
    /// Tensor whose size in bytes does not fit memory.
    #[error("its output would have the shape {0}, which is too large")]
    TooLarge(String),
}

impl OpError {
    /// Whether the model is valid and only this crate's support is missing.
    pub fn is_unsupported(&self) -> bool {
        !matches!(self, OpError::Invalid(_) | OpError::TooLarge(_))
    }
}

/// Makes an [`OpError::Invalid`] with a formatted message.
macro_rules! invalid {
    ($($arguments:tt)*) => { $crate::OpError::Invalid(format!($($arguments)*)) };
}

/// Makes an [`OpError::Unsupported`] with a formatted message.
macro_rules! unsupported {
    ($($arguments:tt)*) => { $crate::OpError::Unsupported(format!($($arguments)*)) };
}

pub(crate) use {invalid, unsupported};

/// Location of a node in a model, for error messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Name of the node, or of its first output if the node is unnamed.
    pub node: String,
    /// Operator, with its domain unless that is ONNX's own.
    pub operator: String,
    /// Version of the operator's domain that the model imports; 0 if the model does not import it.
    pub opset: i64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node `{}` ({}, opset {})", self.node, self.operator, self.opset)
    }
}

/// Reason of a problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Error of an operator.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Inputs with dimensions that no binding gives a size.
    #[error("{} (give all, such as{})", .0.missing(), .0.options())]
    Unbound(Unbound),
    /// Output shape that depends on the value of an input.
    #[error("{error}{}", set_hint(.inputs))]
    NeedsInput {
        /// Error of the operator.
        error: OpError,
        /// Model inputs that the value is computed from.
        inputs: Vec<String>,
    },
    /// Binding that does not fit the model: of an unknown name, or of a wrong size.
    #[error("{0}")]
    Binding(String),
}

/// Inputs with unbound dimensions, by name. The dimensions are `None` if not even the rank is known; those
/// with a size are [`Dim::Size`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unbound(pub Vec<(String, Option<Vec<Dim>>)>);

impl Unbound {
    /// Names every size that is missing, each once.
    pub fn missing(&self) -> String {
        let mut missing: Vec<String> = Vec::new();
        for (input, dims) in &self.0 {
            let Some(dims) = dims else {
                missing.push(format!("the shape of `{input}`"));
                continue;
            };
            for (axis, dim) in dims.iter().enumerate() {
                match dim {
                    Dim::Size(_) => {}
                    Dim::Named(name) if missing.contains(name) => {}
                    Dim::Named(name) => missing.push(name.clone()),
                    Dim::Unknown => missing.push(format!("dimension {axis} of `{input}`")),
                }
            }
        }
        format!("sizes of inputs are missing: {}", missing.join(", "))
    }

    /// Named dimensions to bind, each with the size 1 as a suggestion. Inputs that need a whole shape are
    /// left out (see [`Unbound::shapes`]).
    pub fn dims(&self) -> Vec<(&str, usize)> {
        let mut names: Vec<(&str, usize)> = Vec::new();
        for dim in self.0.iter().filter(|(_, dims)| !needs_shape(dims.as_deref())).flat_map(|(_, dims)| dims).flatten()
        {
            if let Dim::Named(name) = dim
                && !names.iter().any(|(known, _)| known == name)
            {
                names.push((name, 1));
            }
        }
        names
    }

    /// Shapes to bind for inputs with unnamed dimensions or of unknown rank, with 1 for each unknown size.
    pub fn shapes(&self) -> Vec<(&str, Vec<usize>)> {
        let size = |dim: &Dim| if let Dim::Size(size) = dim { *size } else { 1 };
        let sizes = |dims: &Option<Vec<Dim>>| dims.as_ref().map_or(vec![1], |dims| dims.iter().map(size).collect());
        let inputs = self.0.iter().filter(|(_, dims)| needs_shape(dims.as_deref()));
        inputs.map(|(input, dims)| (input.as_str(), sizes(dims))).collect()
    }

    /// Command-line options that bind all of them, quoted for a shell.
    fn options(&self) -> String {
        let quoted = |text: &str| {
            let is_plain = |c: char| c.is_alphanumeric() || "_@%+=:,./-".contains(c);
            if text.chars().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
        };
        let sizes = |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let dims = self.dims().into_iter().map(|(name, size)| format!(" --dim {}={size}", quoted(name)));
        let shapes = self.shapes().into_iter();
        dims.chain(shapes.map(|(input, shape)| format!(" --shape {}={}", quoted(input), sizes(&shape)))).collect()
    }
}

/// Whether an input can be bound only by its whole shape.
fn needs_shape(dims: Option<&[Dim]>) -> bool {
    dims.is_none_or(|dims| dims.contains(&Dim::Unknown))
}

/// Hint to set the inputs on whose values a shape depends, if they are few.
fn set_hint(inputs: &[String]) -> String {
    match inputs {
        [] => String::new(),
        [input] => format!(" (give --set {input}=VALUE)"),
        [.., last] if inputs.len() <= 3 => format!(" (give --set NAME=VALUE for {} or {last})", inputs[0]),
        _ => String::new(),
    }
}

/// Error in a model, with the node where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Location of the node; `None` for errors of the model's inputs or bindings.
    pub place: Option<Place>,
    /// Reason of the problem.
    pub reason: Reason,
}

impl Problem {
    /// Model inputs whose values must be bound to constants, as shapes depend on them.
    pub fn needed_inputs(&self) -> &[String] {
        match &self.reason {
            Reason::NeedsInput { inputs, .. } => inputs,
            Reason::Op(_) | Reason::Unbound(_) | Reason::Binding(_) => &[],
        }
    }

    /// Whether the model is valid and only this crate's support is missing.
    pub fn is_unsupported(&self) -> bool {
        match &self.reason {
            Reason::Op(error) => error.is_unsupported(),
            Reason::NeedsInput { .. } => true,
            Reason::Unbound(_) | Reason::Binding(_) => false,
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

/// Group of nodes with the same operator that are rejected for the same reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Operator, with its domain unless that is ONNX's own.
    pub operator: String,
    /// The reason.
    pub reason: String,
    /// Names of the nodes, in the model's order.
    pub nodes: Vec<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.nodes.len();
        match self.operator.rsplit_once('.') {
            Some((domain, name)) => write!(f, "{n} × {name} (domain {domain})"),
            None => write!(f, "{n} × {}", self.operator),
        }
    }
}

/// Groups node errors by operator and reason, in the order of their first nodes.
pub fn refused(problems: &[Problem]) -> Vec<Refused> {
    let mut kinds: Vec<Refused> = Vec::new();
    for problem in problems {
        let Some(place) = &problem.place else { continue };
        let (operator, reason) = (&place.operator, problem.reason.to_string());
        let known = kinds.iter_mut().find(|kind| kind.operator == *operator && kind.reason == reason);
        match known {
            Some(kind) => kind.nodes.push(place.node.clone()),
            None => kinds.push(Refused { operator: operator.clone(), reason, nodes: vec![place.node.clone()] }),
        }
    }
    kinds
}

/// Formats problems as one message: a single one with its node, several grouped by kind with counts.
pub fn problems_text(problems: &[Problem]) -> String {
    if let [problem] = problems {
        return problem.to_string();
    }
    let kinds = refused(problems);
    let mut reasons: Vec<&str> = Vec::new();
    for kind in &kinds {
        if !reasons.contains(&kind.reason.as_str()) {
            reasons.push(&kind.reason);
        }
    }
    let of_reason = |reason: &&str| {
        let alike: Vec<String> = kinds.iter().filter(|kind| kind.reason == **reason).map(Refused::to_string).collect();
        format!("{}: {reason}", alike.join(", "))
    };
    let elsewhere = problems.iter().filter(|problem| problem.place.is_none()).map(Problem::to_string);
    elsewhere.chain(reasons.iter().map(of_reason)).collect::<Vec<_>>().join("; ")
}

/// Reason why a file cannot be read as a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Invalid protocol buffer.
    #[error("{what} at byte {at}: the file is damaged, cut off or not an ONNX model (save it anew)")]
    Malformed {
        /// Offset in the file.
        at: usize,
        /// Reason.
        what: &'static str,
    },
    /// Model whose decoded form would exceed the memory budget of [`read`](crate::onnx::read); the number is
    /// that budget in bytes.
    #[error("it would take more than {0} bytes of memory: the file is damaged (save it anew)")]
    TooLarge(usize),
    /// Valid protocol buffer that is not an ONNX model, or another kind of file.
    #[error("{0}")]
    NoModel(String),
    /// Tensor whose elements cannot be read.
    #[error("tensor `{name}`: {what}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Reason.
        what: String,
    },
    /// Node that breaks a rule of its operator, or of the graph.
    #[error("{0}")]
    Node(Box<Problem>),
}
