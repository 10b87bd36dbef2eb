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
//! use tilewright::{Request, Session};
//!
//! fn main() -> Result<(), tilewright::Error> {
//!     tilewright::serve_if_worker();
//!     let session = Session::open("records.db")?;
//!     let request = Request::parse("matmul-512")?.time(Duration::from_secs(5));
//!     let tuned = session.tune(&request)?;
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
mod clock;
mod database;
mod element;
pub mod emit;
mod error;
pub mod file;
mod import;
mod kernel;
pub mod library;
#[cfg(feature = "peers")]
mod machine;
mod observer;
mod place;
pub mod progress;
pub mod referee;
mod request;
mod run;
mod searches;
mod session;
mod status;
mod subject;
mod tuned;
pub mod version;
pub mod words;

pub use best::{Best, CACHES, gflops, judges, known_target, target_name, trials_of};
pub use cache::{Cache, NO_CACHE};
pub use choice::{Choice, Records, Source};
pub use clock::since_1970;
pub use database::{Database, Opened, with_suffix};
pub use element::{Element, Elements, ElementsMut, bf16, f16};
pub use error::{Error, one_line};
pub use import::{MOST_THREADS, RECORDS};
pub use kernel::{Argument, Kernel};
#[cfg(feature = "peers")]
pub use machine::Machine;
pub use observer::{Begin, Note, Observer, Plan};
pub use place::{CPU, HOST, Place, target_here, target_names};
pub use request::{DEFAULT_SEARCH, DEFAULT_TIME, Job, OnRunner, Request, Settings};
pub use run::earlier::{Earlier, earlier, errors_of};
pub use run::finals::{Contenders, EndLimits, Leader, Untuned, rank};
pub use run::recorder::{Recorder, Recording, toolchain};
pub use run::together::{TunedMany, TunedTask, Turned};
pub use run::transfer::Transfer;
pub use searches::searches;
pub use session::{Session, serve, serve_if_worker};
pub use status::Status;
pub use subject::command::{COMMAND, Command, parse_values};
pub use subject::kernel::{KERNEL, KernelFile};
pub use subject::own::is_own;
pub use subject::workload::{Elsewhere, key_of_class, start_device, task_key};
pub use tilewright_device::Caches;
pub use tilewright_ir::op::Workload;
pub use tuned::verdict::option_of;
pub use tuned::{Race, SecondsIn, Tuned, WallSeconds};
