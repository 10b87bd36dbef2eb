//! Feature vectors that describe a candidate to a cost model.
//!
//! [`KnobFeatures`] describe a configuration by its parameters, at almost no cost; [`Alignments`] add the
//! powers of two that divide its numbers. [`ProcessFeatures`] are the inputs of a Gaussian process.
//! [`LoopContexts`] describe the loops of a program, and are filled in by the caller that knows the program:
//! as one vector, comparable between programs of one template ([`LoopContexts::features`]), or as relations
//! comparable between any loop nests ([`LoopContexts::relations`]).

mod alignment;
mod context;
mod knob;
mod process;
mod relation;
mod unit;
mod values;

pub use alignment::Alignments;
pub use context::{LoopContext, LoopContexts, N_CONTEXT_FEATURES, N_TREE_FEATURES, Touch};
pub use knob::KnobFeatures;
pub use process::ProcessFeatures;
pub use relation::N_RELATION_FEATURES;
pub use unit::UnitFeatures;
pub use values::{N_VALUE_FEATURES, value_features};

/// Maximum number of innermost buffers that features describe; further ones are left out.
const N_BUFFERS: usize = 5;

/// Maps numbers of any magnitude to a common logarithmic scale.
fn log_scale(x: f64) -> f32 {
    (x.signum() * (x.abs() + 1.0).log2()) as f32
}
