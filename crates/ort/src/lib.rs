//! Execution provider for ONNX Runtime: a library that the stock wheel loads, and that runs parts of a model
//! with Tilewright's kernels.
//!
//! ONNX Runtime calls [`CreateEpFactories`](factory) when the library is registered, asks the factory for a
//! [`provider`] when a session starts, and passes it the session's graph. [`graph`] reads the graph,
//! [`claim`] chooses the parts to run here, and [`part`] compiles and runs a part; [`sizes`] handles
//! dimensions that are open until a run. Sessions of one process [share](shared) parts. [`tune`] tunes the
//! kernels on request, and [`context`] makes the nodes that represent compiled parts in a model. All other
//! nodes stay with ONNX Runtime.
//!
//! [`api`] declares the subset of its C interface that is used. No panic unwinds across that interface
//! ([`boundary`]), and no model file is read: graphs are passed through the interface.

mod api;
mod boundary;
mod claim;
mod context;
mod draft;
mod factory;
mod graph;
mod log;
#[cfg(test)]
mod many_threads;
mod name;
mod options;
mod part;
mod provider;
mod shared;
mod sizes;
mod threads;
mod tune;
