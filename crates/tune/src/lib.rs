//! Templates, records, and the connection of both with searches.
//!
//! A tour of this crate: a [`Template`] declares the [space](tilewright_search::Space) of a workload on a
//! target; a [search](tilewright_search::Search) proposes configurations for that [`Task`]; each trial
//! becomes a [`Record`] in a [`Store`]. Nothing here compiles or runs a kernel, opens a file or reads the
//! environment.
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
