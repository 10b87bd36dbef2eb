//! Cost models and policies for searches.
//!
//! A tour of this crate: rows of features go into a [`Matrix`]; with their targets they are [`Examples`],
//! from which [`Gbt`] (boosted trees), [`Ensemble`] (bootstrapped trees) and [`Knn`] (nearest neighbours)
//! learn. A [`Forest`] classifies rows into two classes; [`TreeGru`] learns from trees of rows.
//! [`ActorCritic`] and [`Controller`] are policies, which learn from the rewards of their actions. Models of
//! [`sequence`] predict the best parameters of a kernel from its problem alone. [`Acquisition`] turns a mean
//! and a spread into a score, and [`diverse`] selects a batch by score and diversity.
//!
//! Larger targets give larger predictions. The caller knows whether large or small is better;
//! [`Acquisition`], [`diverse`] and [`metrics::average_recall`] take larger as better. Everything runs on the
//! calling thread and is determined by its arguments and a seed; only [`sequence`] reads and writes files,
//! those of its models.
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
pub use gp::{Candidates, GaussianProcess, Matern, Solved};
pub use knn::Knn;
pub use matrix::{Examples, Matrix};
pub use neural::{
    ActorCritic, ActorCriticOptions, Controller, ControllerOptions, Readout, Transition, TreeGru, TreeGruOptions,
    TreeObjective, TreeRows,
};
