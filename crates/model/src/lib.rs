//! Whole models: from a graph of operators to few kernels, a memory plan, and runs.
//!
//! [`lower`] brings the graph's many operators down to few kinds ([`import`]), rewrites them into fewer
//! ([`simplify`]) and makes kernels of them ([`fuse`]); [`laid_out`] has images lie as is best for these, and
//! [`compile`] gives them code and memory. What has no code runs as the reference evaluates it.

mod attention;
#[cfg(feature = "peers")]
pub mod bench;
mod branches;
mod caches;
mod compile;
mod composite;
mod decompose;
mod embedding;
mod epilogue;
mod fuse;
mod halves;
mod heads;
mod host;
mod import;
mod inputs;
mod jumps;
mod layouts;
mod net;
pub mod npy;
mod place;
mod products;
mod profile;
mod quantized;
mod recurrent;
mod runner;
mod sampled;
mod scalar;
mod schedule;
mod simplify;
mod trees;
mod whole;

pub use caches::CachesOfKernels;
pub use compile::{CompileError, Compiled, Making, Schedule, compile, compile_as, compile_quickly, lay_out};
pub use fuse::{Fused, Kernel, Moving, Step, Steps, fuse, lower};
pub use halves::count_halves;
pub use import::import;
pub use inputs::{Given, all_inputs, feed, named_dims, read_model, weights_beside};
pub use layouts::Costs;
pub use net::{AsHeads, Convolution, Kind, Line, Net, Node, Read, Sequence, Track, Value, ValueId, Windows};
pub use place::{Copy, Location, Places};
pub use profile::{Outline, ProfiledStep, profile_table};
pub use runner::{RunError, Runner};
pub use schedule::{Layouts, compile_guessed, compile_known, laid_out};
pub use simplify::simplify;
pub use whole::{Choices, Whole, settle};
