//! Search spaces, templates, searches and records.
//!
//! The way through this crate: a template declares a [`Space`]; a [`Search`] proposes [`Config`]s of it and
//! is told the [`Trial`]s; [`tune`] runs the two against something that can [`Measure`]; each trial becomes a
//! [`Record`] in a [`Store`]. Nothing here compiles or runs a kernel, opens a file or reads the environment.
#![forbid(unsafe_code)]

mod error;
pub mod expression;
pub mod features;
mod importance;
mod measure;
pub mod pause;
pub mod predict;
pub mod record;
mod replay;
pub mod search;
pub mod space;
pub mod template;
pub mod transfer;
mod trial;
mod tune_loop;

pub use error::Error;
pub use importance::{Importance, importance};
pub use measure::{
    BoxError, Candidate, Conditions, Machine, Measure, Measured, Next, Queue, RaceLimits, Seconds, Standing, Subject,
};
pub use record::{Best, Judge, PassedOver, Record, RecordError, RunTime, Store, StoreError, TaskKey, Winner};
pub use replay::{AtBudget, RecordedSpace, Replay, ReplayPlan};
pub use search::{Contexts, Problem, SEARCHES, Search, SearchError};
pub use space::{Config, ConfigError, Constraint, Domain, Parameter, Product, Space, SpaceError, Value};
pub use template::{Setting, TEMPLATES, Task, TaskError, Template};
pub use transfer::{EarlierTask, Experience};
pub use trial::{ErrorClass, Limit, Limits, Outcome, Timing, Trial, is_tie, quantile};
pub use tune_loop::{Budget, Ended, Event, HeadStart, Report, Summary, Tuning, tune};
