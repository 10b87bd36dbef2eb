//! Reasons why a program cannot be mapped to GPU kernels.

use thiserror::Error;

/// Reason why a program cannot be mapped to GPU kernels, an error of the schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MapError {
    /// Block loop inside another kind of loop, or beside other statements.
    #[error("block loop `{name}` stands inside `{around}`: block loops must be outermost, one directly in the other")]
    BlockInside {
        /// The loop.
        name: String,
        /// Kind of the loop around.
        around: String,
    },
    /// Block loop of varying extent, or thread loop without a constant bound.
    #[error("loop `{name}` is bound to {axis}, but its extent {extent} has no constant bound (split it by a constant)")]
    Extent {
        /// The loop.
        name: String,
        /// The axis.
        axis: &'static str,
        /// Extent of the loop.
        extent: String,
    },
    /// Loop around thread loops whose extent differs between threads, so that they would reach barriers
    /// unevenly.
    #[error(
        "loop `{name}` has thread loops inside, but runs {extent} times, which differs from thread to thread \
         (move it outside of the thread loop around it)"
    )]
    UnevenLoop {
        /// The loop.
        name: String,
        /// Extent of the loop.
        extent: String,
    },
    /// Condition on values around thread loops.
    #[error("thread loops stand under `if {cond}`, which depends on values (move the condition into the thread loops)")]
    ValueCondition {
        /// The condition.
        cond: String,
    },
    /// Private buffer whose elements several threads access.
    #[error(
        "threads share `{buffer}`, which is in {scope} memory: {subscripts} do not keep those of {axis} apart \
         (stage it as shared, or lay it out by thread)"
    )]
    NotSeparable {
        /// The buffer.
        buffer: String,
        /// Scope of the buffer.
        scope: &'static str,
        /// Subscripts of accesses.
        subscripts: String,
        /// Thread axis.
        axis: &'static str,
    },
    /// Tile product that no tensor core instruction can compute.
    #[error("warps cannot compute the product of tiles over loop `{name}`: {why} (bind and divide loops as tiles ask)")]
    TileProduct {
        /// Loop over the reduction steps.
        name: String,
        /// Reason why the loop is not a tile product.
        why: &'static str,
    },
    /// Shared buffer allocated inside a thread loop.
    #[error("`{buffer}` is shared by a block, but is allocated inside thread loop `{name}` (stage it further out)")]
    SharedInThread {
        /// The buffer.
        buffer: String,
        /// Thread loop around the allocation.
        name: String,
    },
}
