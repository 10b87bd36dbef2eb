//! Transfer learning: measurements of other workloads that a search may begin with.

use crate::features::LoopContexts;

/// Programs of other workloads and their speed, as training data of a global cost model.
///
/// # Source
/// AutoTVM, section 4: the data that the global model is fitted on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Experience {
    /// Loop contexts of each program.
    pub contexts: Vec<LoopContexts>,
    /// Configuration of each program as numbers, by [`value_features`](crate::features::value_features).
    pub values: Vec<Vec<f32>>,
    /// Throughput of each program relative to the best of its task; 0 for a failure.
    pub targets: Vec<f32>,
    /// Task that each program belongs to.
    pub groups: Vec<u32>,
}

impl Experience {
    /// Whether there are no programs.
    pub fn is_empty(&self) -> bool {
        self.contexts.is_empty()
    }
}
