//! Whole models: from a graph of operators to few kernels, a memory plan, and runs.
//!
//! [`lower`] reduces the graph's many operators to few kinds ([`import`]), simplifies them ([`simplify`]) and
//! fuses them into kernels ([`fuse`]); a [`Trace`] records these rewrites. [`laid_out`] chooses the layouts
//! of images, and [`compile`] adds code and memory. [`Fused::without_code`] lists operators without code and
//! the reason ([`NoCode`]): these run as the reference evaluates them.
//!
//! ```no_run
//! use tilewright::{CPU, Database, HOST, DeviceSpec};
//! use tilewright_graph::{Bindings, DType, Tensor, specialise};
//! use tilewright_model::{CompileOptions, Runner, compile_known, lower, read_model};
//! use tilewright_runtime::SharedPool;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = read_model("model.onnx".as_ref())?;
//! // Names of dimensions that the file leaves open, with their sizes.
//! let bindings = Bindings { dims: vec![("batch".to_owned(), 4)], ..Bindings::default() };
//! let special = specialise(&model.graph, &bindings);
//! assert!(special.problems.is_empty(), "{:?}", special.problems);
//!
//! // With the best kernels on record, and the first guesses of others.
//! let target = DeviceSpec { device: CPU, target: HOST, threads: 1 }.runnable_target()?;
//! let fused = lower(&special.graph, false, &target, 1)?;
//! let records = Database::new(None)?.records()?;
//! let compiled = compile_known(fused, &target, 1, &records, CompileOptions::default())?;
//!
//! let mut runner = Runner::new(&compiled, &SharedPool::new(1)?)?;
//! runner.set("x", &Tensor::from_floats(DType::F32, [4, 3], &[0.5; 12]))?;
//! runner.run()?;
//! for (name, tensor) in runner.outputs() {
//!     println!("{name}: {:?}", tensor.floats());
//! }
//! # Ok(())
//! # }
//! ```

mod attention;
#[cfg(feature = "peers")]
pub mod bench;
mod branches;
mod caches;
mod compile;
mod dynamic;
mod epilogue;
mod fuse;
mod half_precision;
mod import;
mod inputs;
mod jumps;
mod layouts;
mod net;
mod no_code;
pub mod npy;
mod open;
mod profile;
mod quantized;
mod rules;
mod runner;
mod scalar;
mod schedule;
mod value_memory;
mod whole;

pub use caches::CachesOfKernels;
pub use compile::{CompileError, CompileOptions, Compiled, Schedule, compile, compile_as, compile_quickly, lay_out};
pub use dynamic::{PartOptions, PartRunner};
pub use fuse::{Fused, Items, Kernel, Moving, RunLoop, SizedNets, Step, Steps, fuse, lower};
pub use half_precision::count_halves;
pub use import::import;
pub use inputs::{Given, all_inputs, feed, named_dims, read_model, weights_beside};
pub use layouts::Costs;
pub use net::{AsHeads, Convolution, Evaluated, Kind, Line, Net, Node, Read, Sequence, Track, Value, ValueId, Windows};
pub use no_code::NoCode;
pub use open::{
    DecoderDims, MOST_NETS, OpenError, OpenNet, PieceSizes, n_combinations, open, open_beside, open_both, open_decoder,
    open_items, open_or_repeat, open_pieces, open_sized,
};
pub use profile::{Outline, ProfiledStep, WithoutCode, profile_table};
pub use rules::{Applied, Trace, rule_names, simplify};
pub use runner::{RunError, Runner};
pub use schedule::{LayoutPurpose, compile_guessed, compile_known, laid_out};
pub use value_memory::{Copy, Places, ValuePart};
pub use whole::{ConfiguredModel, Whole, settle};
