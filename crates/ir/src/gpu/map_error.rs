//! Reasons why a program cannot become kernels.

use thiserror::Error;

/// Reason why a program cannot become kernels. The fault of its schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MapError {
    /// A block loop inside another loop or beside other statements.
    #[error("block loop `{name}` stands inside `{around}`: block loops must be outermost, one directly in the other")]
    BlockInside {
        /// The loop.
        name: String,
        /// Kind of the loop around.
        around: String,
    },
    /// A block loop of varying extent, or a thread loop without a constant bound.
    #[error("loop `{name}` is bound to {axis}, but its extent {extent} has no constant bound (split it by a constant)")]
    Extent {
        /// The loop.
        name: String,
        /// The axis.
        axis: &'static str,
        /// Extent of the loop.
        extent: String,
    },
    /// A loop with thread loops inside that some threads leave before others.
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
    /// A condition with thread loops inside that is not about indices.
    #[error("thread loops stand under `if {cond}`, which depends on values (move the condition into the thread loops)")]
    ValueCondition {
        /// The condition.
        cond: String,
    },
    /// A private buffer that several threads use.
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
        /// The axis.
        axis: &'static str,
    },
    /// A product of tiles that no warp computes together.
    #[error("warps cannot compute the product of tiles over loop `{name}`: {why} (bind and divide loops as tiles ask)")]
    TileProduct {
        /// The loop over the steps of its sum.
        name: String,
        /// Reason why it is not such a product.
        why: &'static str,
    },
    /// A shared buffer that each thread has one of.
    #[error("`{buffer}` is shared by a block, but is allocated inside thread loop `{name}` (stage it further out)")]
    SharedInThread {
        /// The buffer.
        buffer: String,
        /// The loop.
        name: String,
    },
}
