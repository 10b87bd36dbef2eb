//! Autotuning of tensor operators, models, commands and kernels: measures on this machine, verifies every
//! result, keeps records, and runs the fastest kernel that it found.
//!
//! A [`Request`] names a subject and the search for it. A [`Session`] has a database of records and carries
//! out requests: [`Session::tune`] runs one to the end, [`Session::run`] takes an [`Observer`] and a flag to
//! stop it. The command `tilewright` is a shell around this crate.
//!
//! # Tune an operator and call it
//!
//! Candidates run in worker processes, which are new processes of the same program. So a program that tunes
//! calls [`serve_if_worker`] first.
//!
//! ```standalone_crate
//! use tilewright::{Request, Session};
//!
//! fn main() -> Result<(), tilewright::Error> {
//!     tilewright::serve_if_worker();
//! #   let folder = tempfile::tempdir().unwrap();
//! #   let path = folder.path().join("records.db");
//! #   let trials = 3;
//! #   /*
//!     let (path, trials) = ("records.db", 500);
//! #   */
//!     let session = Session::open(path)?;
//!     let request = Request::parse("matmul:m=16,n=32,k=8")?.trials(trials);
//!     let tuned = session.tune(&request)?;
//!     println!("{:.1} GFLOP/s", tuned.best.expect("some candidate is right").gflops);
//!
//!     let mut kernel = session.kernel(request.workload()?, 1)?;
//!     let (a, b, mut c) = (vec![1f32; 16 * 8], vec![0.5; 8 * 32], vec![0.0; 16 * 32]);
//!     kernel.run(&[&a, &b], &mut [&mut c])?;
//!     assert!(c.iter().all(|&sum| sum == 4.0));
//!     Ok(())
//! }
//! ```
//!
//! # Tune several together
//!
//! Each workload has a weight, the number of times that the whole program runs it. Time goes to the workloads
//! that are expected to reduce the total most.
//!
//! ```standalone_crate
//! use std::sync::atomic::AtomicBool;
//! use std::time::Duration;
//! use tilewright::{Request, Session, Workload};
//!
//! fn main() -> Result<(), tilewright::Error> {
//!     tilewright::serve_if_worker();
//! #   let folder = tempfile::tempdir().unwrap();
//! #   let session = Session::open(folder.path().join("records.db"))?;
//! #   let (set, time, most) = ("matmul:m=8,n=16,k=8", Duration::from_millis(600), 2);
//! #   /*
//!     let session = Session::open("records.db")?;
//!     let (set, time, most) = ("resnet18", Duration::from_secs(120), 1000);
//! #   */
//!     let workloads = Workload::parse_all(set).map_err(tilewright::Error::input)?;
//!     let tasks: Vec<(Request, f64)> =
//!         workloads.into_iter().map(|workload| (Request::new(workload).trials(most), 1.0)).collect();
//!     let tuned = session.run_together(&tasks, time, &AtomicBool::new(false), &())?;
//!     println!("together {:?} ms", tuned.whole_ms);
//!     Ok(())
//! }
//! ```
//!
//! # Tune a command
//!
//! Tune any program with parameters, by its run time or by a number that it prints.
//!
//! ```standalone_crate
//! use tilewright::{Command, Request, Session};
//!
//! fn main() -> Result<(), tilewright::Error> {
//!     tilewright::serve_if_worker();
//! #   let folder = tempfile::tempdir().unwrap();
//! #   let session = Session::open(folder.path().join("records.db"))?;
//! #   /*
//!     let session = Session::open("records.db")?;
//! #   */
//!     let command = Command::new("expr {tile} % 7").parameter("tile", "8,16,32").metric("[0-9]+");
//!     let tuned = session.tune(&Request::new(command).trials(3))?;
//!     assert_eq!(tuned.best.expect("all of them are right").config["tile"], 8);
//!     Ok(())
//! }
//! ```
//!
//! # Tune a kernel in C
//!
//! A file describes the function, its parameters and its correct result: see [`KernelFile`].
//!
//! ```no_run
//! # fn main() -> Result<(), tilewright::Error> {
//! use tilewright::{KernelFile, Request, Session};
//!
//! let kernel = KernelFile::read("product.toml".as_ref())?;
//! let tuned = Session::open("records.db")?.tune(&Request::new(kernel).trials(12))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Use a search by ask and tell
//!
//! Use the searches alone, for parameters of anything that your program measures: [`search`].
//!
//! ```
//! use std::sync::Arc;
//! use tilewright::search::{Outcome, Parameter, Space, Timing, Trial, build};
//!
//! let space = Arc::new(Space::new("cache", vec![Parameter::ordinal("kib", [64, 128, 256])], vec![])?);
//! let mut search = build("auto", &space, 0)?;
//! let mut best = f64::INFINITY;
//! for _ in 0..3 {
//!     for config in search.propose(1) {
//!         // Stands in for a measurement, in nanoseconds.
//!         let time_ns = 1000.0 / space.int(&config, "kib") as f64;
//!         best = best.min(time_ns);
//!         let outcome = Outcome::Measured(Timing::of_samples(&[time_ns], false));
//!         search.observe(&[Trial { config, outcome }]);
//!     }
//! }
//! assert_eq!(best, 1000.0 / 256.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # More
//!
//! - A kernel's arguments, with their types and memory layout: [`Kernel::arguments`].
//! - GPUs: [`Request::device`]. Whole models: crate `tilewright-model`, with an example. Many machines: crate
//!   `tilewright-fleet`.
//! - [`ErrorKind`] has the facts of errors, `#[non_exhaustive]`.
//! - This crate re-exports every type in its signatures, whichever crate of the project defines it;
//!   [`search`] is the whole crate of searches.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `llvm` | yes | LLVM's back end, for races, objects and other machines |
//! | `peers` | no | `Session::bench`, beside other libraries, two of which are compiled in |
#![forbid(unsafe_code)]

#[cfg(feature = "peers")]
pub mod bench;
mod best;
mod cache;
mod choice;
mod clock;
mod database;
mod device_spec;
mod element;
pub mod emit;
mod error;
pub mod file;
pub mod format;
mod import;
mod kernel;
pub mod library;
#[cfg(feature = "peers")]
mod machine;
pub mod npy;
mod observer;
pub mod referee;
mod request;
mod run;
mod searches;
mod session;
mod shared;
mod subject;
mod tuned;
pub mod version;

pub use best::{Best, CACHES, ParetoPoint, gflops, known_target, target_name, trials_of, validators};
pub use cache::{Cache, NO_CACHE};
pub use choice::{Answer, Choice, Determined, Records, Source};
pub use clock::since_1970;
pub use database::{Database, Opened, with_suffix};
pub use device_spec::{CPU, DeviceSpec, HOST, target_here, target_names};
pub use element::{Element, Elements, ElementsMut, bf16, f16};
pub use error::{Error, ErrorKind, Setting, one_line};
pub use import::{MOST_THREADS, RECORDS};
pub use kernel::{Argument, Kernel};
#[cfg(feature = "peers")]
pub use machine::Machine;
pub use observer::{Begin, Note, Observer, Plan, while_telling};
pub use request::{DEFAULT_SEARCH, DEFAULT_TIME, Job, OnRunner, Request, Settings};
pub use run::earlier::{Earlier, earlier, errors_of};
pub use run::finals::{Contenders, EndLimits, Leader, Untuned, rank};
pub use run::recorder::{Recorder, Recording, toolchain};
pub use run::together::{TunedMany, TunedTask, TurnEnd};
pub use run::transfer::Transfer;
pub use searches::searches;
pub use session::{Session, serve, serve_if_worker, worker_of_library};
pub use shared::{Entry, EntryKey, Pushed, STORE_VARIABLE, SharedStore, Verified, Visit};
pub use subject::command::{COMMAND, Command, Direction, parse_values};
pub use subject::kernel::{KERNEL, KernelFile};
pub use subject::own::is_own;
pub use subject::workload::{Elsewhere, key_of_class, start_device, task_key};
pub use tuned::{Race, SecondsIn, Tuned, WallSeconds};

// Types of signatures, from the crates that define them.
pub use tilewright_codegen::{CompileError, Compiler};
pub use tilewright_device::command::Metric;
pub use tilewright_device::device::WorkerCommand;
#[cfg(feature = "peers")]
pub use tilewright_device::limits::Allowed;
pub use tilewright_device::runner::Hello;
pub use tilewright_device::{Caches, Device, DeviceOptions};
pub use tilewright_formats::{Format, Recorded};
pub use tilewright_ir::op::Workload;
pub use tilewright_ir::{DType, Program, Role, Target};
#[cfg(feature = "peers")]
pub use tilewright_peers::{Layouts, PeerSpec};
pub use tilewright_runtime::{AnyModel, Code};
pub use tilewright_search as search;
pub use tilewright_search::expression::Datum;
pub use tilewright_search::{
    BoxError, Candidate, Config, Ended, ErrorClass, Event, Limits, Measure, Report, Space, Subject, Summary, Timing,
    Trial,
};
pub use tilewright_ship::{Library, Weights};
pub use tilewright_tune::record::{Exported, Imported, Validators};
pub use tilewright_tune::{EarlierTask, PassedOver, Record, Store, StoreError, Task, TaskKey, Validator, Winner};
