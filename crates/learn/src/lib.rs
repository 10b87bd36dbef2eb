//! Cost models and policies for searches.
//!
//! The way through this crate: rows of features go into a [`Matrix`]; with their targets they are
//! [`Examples`], which [`Gbt`] (boosted trees), [`Ensemble`] (bootstrapped trees) and [`Knn`] (nearest
//! neighbours) learn from; a [`Forest`] tells two classes of rows apart; [`TreeGru`] learns from trees of
//! rows instead. [`ActorCritic`] and [`Controller`] are policies, which learn from the rewards of what they
//! did. Models of [`sequence`] write the best parameters of a kernel down from its problem alone.
//! [`Acquisition`] turns a mean and a spread into a score, and [`diverse`] chooses a batch by score and
//! variety.
//!
//! Larger targets give larger predictions. Which end is the better one, the caller knows; [`Acquisition`],
//! [`diverse`] and [`metrics::average_recall`] take larger as better. Everything runs on the calling thread
//! and follows from its arguments and a seed; [`sequence`] alone reads and writes files, those of its models.
#![forbid(unsafe_code)]

mod acquisition;
mod diversity;
mod ensemble;
mod error;
mod gbt;
mod gp;
mod knn;
mod matrix;
pub mod metrics;
mod neural;
pub mod sequence;
mod simd;
mod tape;

pub use acquisition::Acquisition;
pub use diversity::{diverse, diversity};
pub use ensemble::{Ensemble, Prediction};
pub use error::LearnError;
pub use gbt::{EarlyStop, Forest, Gbt, GbtOptions, Leaves, Objective};
pub use gp::{Candidates, GaussianProcess, Kernel, Solved};
pub use knn::Knn;
pub use matrix::{Examples, Matrix};
pub use neural::{
    ActorCritic, ActorCriticOptions, Controller, ControllerOptions, Readout, Transition, TreeGru, TreeGruOptions,
    TreeObjective, TreeRows,
};
