//! Experience with other problems that a search may begin with.

use crate::features::LoopContexts;

/// Programs of other workloads and how fast they were, for a model that predicts programs of any.
///
/// # Source
/// AutoTVM, section 4: the data that the global model is fitted on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Experience {
    /// The loops of each program.
    pub contexts: Vec<LoopContexts>,
    /// The configuration of each program as numbers, as [`value_features`](crate::features::value_features)
    /// has them.
    pub values: Vec<Vec<f32>>,
    /// The throughput of each program as a share of the best one of its task; 0 for a failure.
    pub targets: Vec<f32>,
    /// The task of each program.
    pub groups: Vec<u32>,
}

impl Experience {
    /// Whether it teaches nothing.
    pub fn is_empty(&self) -> bool {
        self.contexts.is_empty()
    }
}
