//! Templates, records, and transfer: the parts of tuning that know operators and schedules.
//!
//! Begin with [`Template`], which declares the [space](tilewright_search::Space) of a workload on a target. A
//! [search](tilewright_search::Search) proposes configurations of that [`Task`]; each trial becomes a
//! [`Record`] in a [`Store`], an SQLite database. Nothing here compiles or runs a kernel, opens a file or
//! reads the environment.
#![forbid(unsafe_code)]

mod error;
mod loops;
pub mod predict;
pub mod record;
pub mod template;
pub mod transfer;

pub use error::Error;
pub use loops::loop_contexts;
pub use record::{BestRecord, PassedOver, Record, RecordError, RunTime, Store, StoreError, TaskKey, Validator, Winner};
pub use template::{TEMPLATES, Task, TaskError, Template, TemplateSetting};
pub use transfer::EarlierTask;
