//! Relation features, comparable between loop nests of any depth (AutoTVM).

use super::context::{LoopContext, LoopContexts, Touch};
use super::{N_BUFFERS, log_scale};

/// Number of thresholds of a relation: `2, 4, 8, …`
const N_THRESHOLDS: usize = 24;

/// Number of relations: touch count against reuse ratio, and against top-down product.
const N_PAIRS: usize = 2;

/// Number of [`LoopContexts::relations`].
pub const N_RELATION_FEATURES: usize = N_BUFFERS * N_PAIRS * N_THRESHOLDS;

impl LoopContexts {
    /// Largest touch counts of each buffer of the innermost loop: at little reuse, and at few runs.
    ///
    /// [`N_RELATION_FEATURES`] numbers: for each threshold, the largest touch count of the loops `k` of the
    /// longest chain with a reuse ratio below it, then with a top-down product below it (on a logarithmic
    /// scale; 0 if there is no such loop). A missing buffer is NaN.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The loops i, j and k of a matrix product of 8 × 8 × 8 elements, which touch C, A and B.
    fn matmul() -> LoopContexts {
        let counts = [[64.0, 64.0, 64.0], [8.0, 8.0, 64.0], [1.0, 8.0, 8.0]];
        let reuses = [[8.0, 8.0, 8.0], [8.0, 8.0, 1.0], [8.0, 1.0, 1.0]];
        let context = |depth: usize| LoopContext {
            parent: depth.checked_sub(1),
            depth,
            extent: 8.0,
            kind: 0,
            top_down: 8f64.powi(depth as i32),
            bottom_up: 8f64.powi(3 - depth as i32),
            n_operations: [1, 1, 0],
            touches: (0..3)
                .map(|at| Touch { buffer: at as u32, count: counts[depth][at], reuse: reuses[depth][at], stride: 1.0 })
                .collect(),
        };
        LoopContexts::new((0..3).map(context).collect())
    }

    #[test]
    fn relations_are_the_largest_touches_below_each_threshold() {
        let relations = matmul().relations();
        assert_eq!(relations.len(), N_RELATION_FEATURES);
        let curve = |buffer: usize, pair: usize| &relations[(2 * buffer + pair) * 24..][..24];
        let log = |x: f64| log_scale(x);
        // B: reuse 8, 1, 1 with touches 64, 64, 8. Below 2 there is j's.
        assert!(curve(2, 0).iter().all(|&x| x == log(64.0)));
        // C is always reused 8 times: nothing below 2, 4 and 8.
        assert_eq!(curve(0, 0)[..4], [0.0, 0.0, 0.0, log(64.0)]);
        // A: reuse 8, 8, 1 with touches 64, 8, 8.
        assert_eq!(curve(1, 0)[..4], [log(8.0), log(8.0), log(8.0), log(64.0)]);
        // The outermost loop is run once and touches most.
        assert!((0..3).all(|buffer| curve(buffer, 1).iter().all(|&x| x == log(64.0))));
        assert!(relations[3 * 48..].iter().all(|x| x.is_nan()));
    }
}
