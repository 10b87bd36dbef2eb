//! Relations between the features of loops, which mean the same however many loops there are.

use super::context::{LoopContext, LoopContexts, Touch};
use super::{N_BUFFERS, log_scale};

/// Thresholds of a relation: `2, 4, 8, …`
const N_THRESHOLDS: usize = 24;

/// Touch count against reuse ratio and against top-down product.
const N_PAIRS: usize = 2;

/// The length of [`LoopContexts::relations`].
pub const N_RELATION_FEATURES: usize = N_BUFFERS * N_PAIRS * N_THRESHOLDS;

impl LoopContexts {
    /// For each buffer of the innermost loop, the largest touch count: at little reuse, and at few runs.
    ///
    /// [`N_RELATION_FEATURES`] numbers: over the loops `k` of the longest chain, the largest touch count (on
    /// a logarithmic scale; 0 without one) with a reuse ratio, then with a top-down product, below each
    /// threshold. A missing buffer is NaN.
    ///
    /// # Source
    /// AutoTVM, section 4 and appendix A.2.2: `R_t = max over k with Z_kj < β_t of Z_ki` with `β_t = 2^t`.
    pub fn relations(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(N_RELATION_FEATURES);
        for &buffer in self.innermost_buffers().iter().take(N_BUFFERS) {
            let points = || self.chain().filter_map(|l| Some((l, l.touch(buffer)?)));
            let pairs: [fn(&LoopContext, &Touch) -> f64; N_PAIRS] = [|_, touch| touch.reuse, |l, _| l.top_down];
            for below in pairs {
                let mut largest = [0.0f64; N_THRESHOLDS];
                for (l, touch) in points() {
                    // The first threshold above the value.
                    let from = (0..N_THRESHOLDS).find(|&t| below(l, touch) < (2u64 << t) as f64);
                    largest[from.unwrap_or(N_THRESHOLDS)..].iter_mut().for_each(|x| *x = x.max(touch.count));
                }
                out.extend(largest.map(log_scale));
            }
        }
        out.resize(N_RELATION_FEATURES, f32::NAN);
        out
    }
}
