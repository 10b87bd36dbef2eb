//! Computation graphs of ONNX models: import, shape and value inference, reference evaluation.
//!
//! [`onnx::read`] makes a [`Model`] from a file's bytes; [`specialise`] binds its symbolic dimensions and
//! inputs, infers all shapes and folds constants, so that every tensor has a concrete type; [`evaluate`]
//! computes a graph in f64, as the reference for compiled models. Begin with these three functions, or with
//! [`OPERATORS`], the table of supported operators: a row imports an operator as an [`op::Operation`], which
//! infers and evaluates it.

mod agreement;
mod dtype;
mod error;
mod evaluate;
mod float8;
mod graph;
pub mod networks;
pub mod onnx;
pub mod op;
mod random;
mod specialise;
mod summary;
mod tensor;

pub use agreement::Agreement;
pub use dtype::DType;
pub use error::{OpError, Place, Problem, ReadError, Reason, Refused, Unbound, problems_text, refused};
pub use evaluate::{EvaluateError, NodeEvaluator, evaluate};
pub use float8::Float8;
pub use graph::{Declared, Dim, Graph, Model, Node, NodeId, Value, ValueId};
pub use op::{OPERATORS, Op};
pub use random::SplitMix64;
pub use specialise::{
    Bindings, DynamicPart, Specialised, Varies, bind_inputs, derived_dims, specialise, with_both_branches,
};
pub use summary::{CountedOperation, ModelSummary, count_operators, summarise};
pub use tensor::{Tensor, TensorType};
