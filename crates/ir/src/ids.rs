//! Typed indices of loop variables and buffers.

/// Index of a loop variable. Clones of a loop may share an index if they are disjoint; nested loops never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoopId(pub u32);

/// Index of a buffer in its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);
