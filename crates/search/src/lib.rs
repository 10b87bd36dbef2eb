//! Autotuning: spaces, searches, and the loop that measures.
//!
//! A [`Space`] holds parameters and the constraints between them; a [`Search`] proposes [`Config`]s from it
//! and observes the [`Trial`]s; [`Tuning`] connects a search to anything that can [`Measure`]. Nothing here
//! depends on the meaning of a configuration: compiler flags, the tiles of a kernel, the options of a server.
//! Nothing here opens a file, starts a process or reads the environment.
//!
//! # Ask and tell
//!
//! A program that measures by itself asks a search for configurations and tells it their outcomes:
//!
//! ```
//! use std::sync::Arc;
//! use tilewright_search::{Constraint, Outcome, Parameter, Space, Timing, Trial, build};
//!
//! let parameters = vec![Parameter::ordinal("tile", [4, 8, 16, 32, 64]), Parameter::ordinal("unroll", 1..9)];
//! let divides = Constraint::parse("divides", "tile % unroll == 0", &parameters)?;
//! let space = Arc::new(Space::new("kernel", parameters, vec![divides])?);
//!
//! // Stands in for a measurement, in nanoseconds.
//! let time_ns = |tile: i64, unroll: i64| 100.0 + (tile - 32).abs() as f64 + 3.0 * (unroll - 4).abs() as f64;
//!
//! let mut search = build("auto", &space, 1)?;
//! let mut best_ns = f64::INFINITY;
//! for _ in 0..space.size() {
//!     for config in search.propose(1) {
//!         let [tile, unroll] = ["tile", "unroll"].map(|name| space.int(&config, name));
//!         let time_ns = time_ns(tile, unroll);
//!         best_ns = best_ns.min(time_ns);
//!         let outcome = Outcome::Measured(Timing::of_samples(&[time_ns], false));
//!         search.observe(&[Trial { config, outcome }]);
//!     }
//! }
//! assert_eq!(best_ns, 100.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`SEARCHES`] lists the searches with their papers and options; [`conformance`] tests one of your own. A
//! [`RecordedSpace`] replays measured outcomes, so that searches are compared without a device;
//! [`importance`] estimates which parameters matter, [`expected_gain`] what further trials may gain, and
//! [`belief`] which unmeasured configurations are promising.
#![forbid(unsafe_code)]

mod belief;
pub mod conformance;
mod error;
pub mod expression;
pub mod features;
mod flat_outcome;
mod importance;
mod log_costs;
mod measure;
mod objectives;
mod other_costs;
mod outlook;
pub mod pause;
mod replay;
mod search;
pub mod space;
mod trial;
mod tune_loop;

pub use belief::{Belief, Promise, belief};
pub use error::Error;
pub use flat_outcome::FlatOutcome;
pub use importance::{Importance, LEAST_TRIALS, importance};
pub use measure::{
    BoxError, Candidate, Conditions, Describe, Measure, Measured, MeasuringTraits, Next, Queue, RaceLimits, Seconds,
    Standing, Subject,
};
pub use objectives::{Chebyshev, pareto_set};
pub use other_costs::{CostError, OtherCosts};
pub use outlook::expected_gain;
pub use replay::{AtBudget, RecordedSpace, Replay, ReplayPlan};
pub use search::{
    Contexts, Experience, Problem, SEARCHES, Search, SearchError, SearchOption, SearchRow, blind_option, build,
    most_experience,
};
pub use space::{Config, ConfigError, Constraint, Domain, ListedProduct, Parameter, Space, SpaceError, Value};
pub use trial::{ErrorClass, Limit, Limits, Outcome, Timing, Trial, is_tie, quantile};
pub use tune_loop::{Budget, Ended, Event, HeadStart, Report, Summary, Tuning};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadMe;
