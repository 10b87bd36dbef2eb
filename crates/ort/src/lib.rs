//! Execution provider of ONNX Runtime: a library that the stock wheel loads, and that runs parts of a model
//! as Tilewright's kernels.
//!
//! ONNX Runtime calls [`CreateEpFactories`](factory) when the library is registered, asks the factory for a
//! [`provider`] when a session starts, and gives that the session's graph. [`graph`] reads it, [`claim`]
//! says which parts run here, [`part`] compiles and runs one, for [`sizes`] that runs bring where it has free
//! ones, [`tune`] has its kernels tuned where that is asked for, and [`context`] makes nodes of a model of
//! compiled parts. Everything else stays with ONNX Runtime.
//!
//! [`api`] declares what is used of its C interface. Nothing unwinds across that ([`boundary`]), and no file
//! of a model is read: graphs come through the interface.

mod api;
mod boundary;
mod claim;
mod context;
mod draft;
mod factory;
mod graph;
mod log;
mod name;
mod options;
mod part;
mod provider;
mod sizes;
mod threads;
mod tune;
