//! Errors in a model, each on one line: what, where, and how to mend it.

use std::fmt;

use crate::Dim;

/// Reason why an operator cannot be imported, inferred or evaluated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// A valid request that is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// The model breaks a rule of the operator.
    #[error("{0}")]
    Invalid(String),
    /// The shape of an output depends on the value of an input that is not known.
    #[error("the shape of its output depends on the value of its input {}, which is known only when it runs", .0 + 1)]
    NeedsValue(usize),
    /// An output whose shape depends on computed values.
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

/// Place in a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The node's name, or its first output's where it has none.
    pub node: String,
    /// Operator, with its domain unless that is ONNX's own.
    pub operator: String,
    /// The opset of its domain that the model was written for; 0 where it names none.
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
    /// An operator refuses.
    #[error(transparent)]
    Op(#[from] OpError),
    /// Sizes of inputs are missing.
    #[error("{} (give all, such as{})", .0.missing(), .0.options())]
    Unbound(Unbound),
    /// The shape of an output depends on an input's value.
    #[error("{error}{}", set_hint(.inputs))]
    NeedsInput {
        /// Error of the operator.
        error: OpError,
        /// The model's inputs that the value is computed from.
        inputs: Vec<String>,
    },
    /// An option does not fit the model.
    #[error("{0}")]
    Binding(String),
}

/// Inputs that lack sizes, each with its dimensions, or none where not even their number is known; those that
/// have a size have it here.
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

    /// Named dimensions that would have to be bound, each with 1: of inputs whose other dimensions are known.
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

    /// Shapes of those inputs that names alone do not bind, with 1 for each size that is missing.
    pub fn shapes(&self) -> Vec<(&str, Vec<usize>)> {
        let size = |dim: &Dim| if let Dim::Size(size) = dim { *size } else { 1 };
        let sizes = |dims: &Option<Vec<Dim>>| dims.as_ref().map_or(vec![1], |dims| dims.iter().map(size).collect());
        let inputs = self.0.iter().filter(|(_, dims)| needs_shape(dims.as_deref()));
        inputs.map(|(input, dims)| (input.as_str(), sizes(dims))).collect()
    }

    /// Options that bind all of them, as a shell takes them.
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

/// Whether only a whole shape binds an input.
fn needs_shape(dims: Option<&[Dim]>) -> bool {
    dims.is_none_or(|dims| dims.contains(&Dim::Unknown))
}

/// Hint to set the inputs on whose values a shape depends, where they are few.
fn set_hint(inputs: &[String]) -> String {
    match inputs {
        [] => String::new(),
        [input] => format!(" (give --set {input}=VALUE)"),
        [.., last] if inputs.len() <= 3 => format!(" (give --set NAME=VALUE for {} or {last})", inputs[0]),
        _ => String::new(),
    }
}

/// A problem of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The node, where it is about one.
    pub place: Option<Place>,
    /// Reason of the problem.
    pub reason: Reason,
}

impl Problem {
    /// Inputs of the model whose values must be known, where shapes depend on them.
    pub fn needed_inputs(&self) -> &[String] {
        match &self.reason {
            Reason::NeedsInput { inputs, .. } => inputs,
            Reason::Op(_) | Reason::Unbound(_) | Reason::Binding(_) => &[],
        }
    }

    /// Whether the model is right and this crate cannot do it.
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

/// Nodes of one operator that are refused for the same reason.
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

/// Sorts problems of nodes by operator and reason, in the order of their first nodes.
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

/// Tells problems in one text: a single one with its node, several by kind with counts.
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

/// Reason why a file is not a usable model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Bytes that are not a complete protocol buffer.
    #[error("{what} at byte {at}: the file is damaged, cut off or no ONNX model (save it anew)")]
    Malformed {
        /// Offset in the file.
        at: usize,
        /// Reason.
        what: &'static str,
    },
    /// Contents that take far more memory than the file.
    #[error("it would take more than {0} bytes of memory: the file is damaged (save it anew)")]
    TooLarge(usize),
    /// A readable file that is not a model.
    #[error("{0}")]
    NoModel(String),
    /// A tensor cannot be had.
    #[error("tensor `{name}`: {what}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Reason.
        what: String,
    },
    /// A node does not fit its graph.
    #[error("{0}")]
    Node(Box<Problem>),
}
