//! Runtime of compiled kernels and models, independent of any search: a thread pool, aligned memory, kernel
//! calls, and plans of many kernels.
//!
//! A [`Plan`] lists the steps of a run, [`Model::new`] prepares it with its kernels and constants, and a
//! [`Context`] runs it; begin with these three. Contexts share a model and may share a [`SharedPool`]; each
//! has its own memory.

mod arena;
mod call;
mod context;
mod cores;
pub mod gpu;
pub mod host;
mod kernel_plan;
mod memory;
mod model;
mod pin;
mod plan;
pub mod pool;
pub mod shares;

pub use arena::{ArenaLayout, Block, plan_memory};
pub use call::KernelCall;
pub use context::{Context, RunError};
pub use cores::on_all_cores;
pub use gpu::GpuModel;
pub use host::{HostCall, HostOperator};
pub use memory::Aligned;
pub use model::{Address, AnyModel, BaseMemory, Code, Model, PlanError, Port};
pub use pin::{pin, pin_thread};
pub use plan::{
    Constant, CopiedRows, Host, HostFunction, Member, Members, OpenDimension, Piece, Place, Plan, PlanStep, PlanTensor,
    RunSize, Sizes, StepCondition, TensorSlice, Together, Work,
};
pub use pool::{SharedPool, ThreadPool};
