//! Features: rows of numbers of fixed length, by which a cost model sees a candidate.
//!
//! [`KnobFeatures`] describe a configuration in terms of its space, and cost next to nothing; [`Alignments`]
//! add which powers of two divide its numbers. [`ProcessFeatures`] are those of a Gaussian process.
//! [`LoopContexts`] describe what the loops of a program do, by whoever knows the program: one by one, which
//! means the same for all programs of a template ([`LoopContexts::features`]), or by relations that mean the
//! same for any nest of loops ([`LoopContexts::relations`]).

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

/// Innermost buffers that features are taken of; further ones are left out.
const N_BUFFERS: usize = 5;

/// Brings numbers of any magnitude to a common scale.
fn log_scale(x: f64) -> f32 {
    (x.signum() * (x.abs() + 1.0).log2()) as f32
}
