//! Finds the fastest kernel for a tensor operator by measuring on this machine, records it, and runs it.
//!
//! A [`Session`] knows where records are kept and how worker processes are started. [`Session::tune`]
//! searches, checks every candidate against an independent reference, races the leaders, and records all of
//! it; [`Session::best`] says what is recorded; [`Session::kernel`] compiles that into this process, to be
//! called on slices. With the feature `peers`, `Session::bench` measures it beside other
//! libraries.
//!
//! A candidate never runs in the caller's process but in workers, which are this same program started anew: a
//! program calls [`serve_if_worker`] first. The command `tilewright` is a shell around this crate.
//!
//! ```no_run
//! use std::time::Duration;
//! use tilewright::{Session, TuneRequest};
//!
//! fn main() -> Result<(), tilewright::Error> {
//!     tilewright::serve_if_worker();
//!     let session = Session::open("records.db")?;
//!     let request = TuneRequest { time: Some(Duration::from_secs(5)), ..TuneRequest::parse("matmul-512")? };
//!     let tuned = session.tune_quietly(&request)?;
//!     println!("{:?}", tuned.best);
//!     Ok(())
//! }
//! ```
#![forbid(unsafe_code)]

#[cfg(feature = "peers")]
pub mod bench;
mod best;
mod cache;
mod choice;
mod database;
pub mod emit;
mod error;
pub mod file;
mod import;
mod kernel;
pub mod library;
#[cfg(feature = "peers")]
mod machine;
mod place;
pub mod progress;
pub mod referee;
mod searches;
mod session;
mod status;
mod tune;
pub mod version;
pub mod words;

pub use best::{Best, CACHES, gflops, judges, known_target, target_name, trials_of};
pub use cache::{Cache, NO_CACHE};
pub use choice::{Choice, Records, Source};
pub use database::{Database, Opened, with_suffix};
pub use error::{Error, one_line};
pub use import::{MOST_THREADS, RECORDS};
pub use kernel::Kernel;
#[cfg(feature = "peers")]
pub use machine::Machine;
pub use place::{CPU, HOST, Place, target_here, target_names};
pub use searches::searches;
pub use session::{Session, serve, serve_if_worker};
pub use status::Status;
pub use tilewright_device::Caches;
pub use tilewright_ir::op::Workload;
pub use tune::command::{COMMAND, CommandRequest, is_own, parse_values};
pub use tune::finals::{EndLimits, Leader, Untuned, rank};
pub use tune::kernel::{KERNEL, KernelRequest};
pub use tune::many::{TunedMany, TunedTask, Turned};
pub use tune::recorder::{Recorder, Recording, toolchain};
pub use tune::transfer::Transfer;
pub use tune::verdict::option_of;
pub use tune::{
    Begin, DEFAULT_SEARCH, DEFAULT_TIME, Earlier, Elsewhere, Note, OnRunner, Plan, Race, SecondsIn, TuneRequest, Tuned,
    WallSeconds, earlier, errors_of, key_of_class, since_1970, start_device, task_key,
};
