//! Intermediate representation: operators as tensor expressions, the loop IR, schedule steps, lowering,
//! verifier, interpreter and text format.
//!
//! Begin with [`op::Workload`], which names an operator and its sizes and yields an untransformed
//! [`Program`]; [`schedule::apply`] rewrites it one [`schedule::Step`] at a time, without changing its
//! result; [`lower::lower`] prepares it for code generation. [`verify::verify`] checks it between passes,
//! [`interp::run`] defines its meaning, and [`text`] prints and parses it at every stage. [`gpu::lower_gpu`]
//! maps a GPU schedule to kernels.
#![forbid(unsafe_code)]

pub mod dependence;
pub mod dot;
pub mod dtype;
pub mod expr;
pub mod gpu;
mod ids;
pub mod index;
pub mod interp;
pub mod lower;
pub mod op;
pub mod program;
pub mod reference;
mod repeat;
pub mod schedule;
pub mod target;
pub mod text;
pub mod verify;

pub use dtype::DType;
pub use expr::{Cond, Expr};
pub use gpu::{GpuKernel, GpuProgram, lower_gpu};
pub use index::{Atom, Index, gcd};
pub use program::{
    Buffer, BufferId, Loop, LoopId, LoopKind, OpenSize, Part, Program, Role, Scope, Stmt, TensorProduct,
};
pub use repeat::repeat;
pub use schedule::Step;
pub use target::Target;
