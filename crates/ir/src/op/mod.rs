//! Operators, which are tensor expressions with named sizes, and the text of workloads.

mod alias;
mod batch_matmul;
mod builder;
mod contraction;
mod conv2d;
mod conv2d_transpose;
mod dense;
mod depthwise_conv2d;
mod epilogue;
mod heads_matmul;
mod matmul;
mod nest;
mod packed_matmul;
mod structure;
mod window;
mod workload;

pub use alias::ALIASES;
pub use batch_matmul::BATCH_MATMUL;
pub use builder::{NamedAxes, ProgramBuilder, StageSpec};
pub use conv2d::CONV2D;
pub use conv2d_transpose::CONV2D_TRANSPOSE;
pub use dense::DENSE;
pub use depthwise_conv2d::DEPTHWISE_CONV2D;
pub use epilogue::{Epilogue, EpilogueFunction, FUNCTIONS, FunctionSpec, Operand};
pub use heads_matmul::HEADS_MATMUL;
pub use matmul::MATMUL;
pub use nest::{NEST, Nest, NestError};
pub use packed_matmul::{PACKED_MATMUL, Packed};
pub use structure::{Contraction, Factor, Heads, Structure, Window, WindowAxis};
pub(crate) use window::unpad;
pub use workload::{Layout, SizeRange, Workload, WorkloadError};

/// Named size of an operator, such as `m`.
#[derive(Clone, Copy, Debug)]
pub struct OperatorSize {
    /// Key in a workload's text.
    pub name: &'static str,
    /// Description in a few words.
    pub text: &'static str,
    /// Default value; `None` if the size is required.
    pub default: Option<i64>,
    /// Smallest value accepted.
    pub least: i64,
    /// Largest value accepted.
    pub most: i64,
    /// Key that sets all sizes with the same shorthand to one value, as `stride` sets both strides.
    pub shorthand: Option<&'static str>,
}

impl OperatorSize {
    /// Largest value of a size, chosen so that sums of products of two sizes stay within 63 bits.
    const MOST: i64 = 1 << 30;

    const fn new(name: &'static str, text: &'static str) -> OperatorSize {
        OperatorSize { name, text, default: None, least: 1, most: OperatorSize::MOST, shorthand: None }
    }

    const fn or(self, default: i64) -> OperatorSize {
        OperatorSize { default: Some(default), ..self }
    }

    /// Flag of value zero or one, by default zero.
    const fn flag(name: &'static str, text: &'static str) -> OperatorSize {
        OperatorSize { default: Some(0), least: 0, most: 1, ..OperatorSize::new(name, text) }
    }

    /// Count of any value, by default zero.
    const fn count(name: &'static str, text: &'static str) -> OperatorSize {
        OperatorSize { least: 0, ..OperatorSize::new(name, text).or(0) }
    }

    /// Returns the value if it is accepted.
    fn accept(&self, n: i64) -> Option<i64> {
        (self.least..=self.most).contains(&n).then_some(n)
    }

    /// Describes the accepted values, for messages.
    fn expected(&self) -> String {
        format!("an integer from {} to {}", self.least, self.most)
    }

    const fn of(shorthand: &'static str, default: i64, name: &'static str, text: &'static str) -> OperatorSize {
        OperatorSize { least: default, shorthand: Some(shorthand), ..OperatorSize::new(name, text).or(default) }
    }
}

/// Row of the table of operators.
pub struct Operator {
    /// Name in a workload's text.
    pub name: &'static str,
    /// One-line description of the computation.
    pub text: &'static str,
    /// Sizes, in canonical order.
    pub sizes: &'static [OperatorSize],
    /// Inputs that may be constant (`const=…`), by their lower-case names.
    pub constants: &'static [&'static str],
    /// Whether templates may choose the layouts of its activations (`layout=blocked`).
    pub has_layout: bool,
    /// Whether elementwise operations may be fused into reads of the first input (`prologue=…`).
    pub has_prologue: bool,
    /// Whether an algorithm for a workload, such as Winograd's, rounds more than the operator as written.
    pub has_inexact: fn(&Workload) -> bool,
    /// Checks that sizes, each within its range, are consistent with each other.
    pub check: fn(&Workload) -> Result<(), WorkloadError>,
    /// Structure of the computation before its epilogue, from which the untransformed program and the
    /// information for templates and libraries are derived.
    pub structure: fn(&Workload) -> Structure,
}

/// Operators are equal if their names are, which are unique.
impl PartialEq for Operator {
    fn eq(&self, other: &Operator) -> bool {
        self.name == other.name
    }
}

/// Table of operators.
pub const OPS: &[Operator] = &[
    matmul::MATMUL,
    batch_matmul::BATCH_MATMUL,
    heads_matmul::HEADS_MATMUL,
    dense::DENSE,
    packed_matmul::PACKED_MATMUL,
    conv2d::CONV2D,
    depthwise_conv2d::DEPTHWISE_CONV2D,
    conv2d_transpose::CONV2D_TRANSPOSE,
    nest::NEST,
];
