//! Measurement of candidates on real machines: worker processes, timing, verification, GPUs and remote
//! runners. It is the only part of the tuner that touches the machine.
//!
//! Begin with [`Device`], which measures candidates of one workload in worker processes; [`worker::serve`] is
//! such a process. [`host::target`] describes this machine, and [`peak::gflops`] measures its peak speed.

mod child;
pub mod command;
pub mod cuda;
pub mod data;
#[cfg(test)]
mod denied;
pub mod device;
mod failure;
pub mod folder;
pub mod gpu;
pub mod guarded;
pub mod host;
mod interference;
pub mod kernel;
pub mod limits;
pub mod mapped;
pub mod memory;
mod objects;
pub mod opencl;
pub mod peak;
mod prepared;
pub mod protocol;
pub mod runner;
pub mod sandbox;
mod spawn;
mod stopwatch;
mod timing;
pub mod worker;
mod workers;

pub use child::ChildProcess;
pub use device::{Device, DeviceError, DeviceOptions};
pub use protocol::Caches;
pub use stopwatch::{MOST_TRIES, time_ns};
pub use timing::{sample_round, sample_round_by};
