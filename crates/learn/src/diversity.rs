//! Selection of batches with high scores and high diversity.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashSet};

/// Objective of a batch: `Σ score + alpha · Σ_j |distinct values of component j|`.
///
/// # Source
/// AutoTVM, equation 3, with scores (larger is better) instead of negated costs.
pub fn diversity<C: AsRef<[u64]>>(scores: &[f64], components: &[C], alpha: f64, batch: &[usize]) -> f64 {
    let values = |&i: &usize| components[i].as_ref().iter().copied().enumerate();
    let covered: HashSet<(usize, u64)> = batch.iter().flat_map(values).collect();
    batch.iter().map(|&i| scores[i]).sum::<f64>() + alpha * covered.len() as f64
}

/// Selects at most `n` candidates, best first, greedily to maximize [`diversity`].
///
/// A candidate consists of its score and the values of its components. As the objective is submodular, the
/// batch is worth at least 1 − 1/e of the best one of its size if no score is negative. Among equals the
/// first is taken; NaN counts as −∞.
///
/// # Panics
/// If there is not one list of components for each score.
///
/// # Cost
/// Near O(candidates · components + n · log candidates): a gain is recomputed only if it may still be the
/// largest.
///
/// # Source
/// The greedy algorithm of Nemhauser, Wolsey and Fisher (1978) with the lazy evaluation of Minoux (1978).
pub fn diverse<C: AsRef<[u64]>>(scores: &[f64], components: &[C], n: usize, alpha: f64) -> Vec<usize> {
    assert_eq!(scores.len(), components.len(), "invariant: components for each score");
    let mut covered: HashSet<(usize, u64)> = HashSet::new();
    let gain = |candidate: usize, covered: &HashSet<(usize, u64)>| {
        let values = components[candidate].as_ref().iter().copied().enumerate();
        let new = values.filter(|value| !covered.contains(value)).count();
        let score = if scores[candidate].is_nan() { f64::NEG_INFINITY } else { scores[candidate] };
        score + alpha * new as f64
    };
    let mut heap: BinaryHeap<Offer> =
        (0..scores.len()).map(|candidate| Offer { gain: gain(candidate, &covered), candidate, round: 0 }).collect();
    let mut batch = Vec::with_capacity(n.min(scores.len()));
    while batch.len() < n {
        let Some(offer) = heap.pop() else { break };
        if offer.round == batch.len() {
            covered.extend(components[offer.candidate].as_ref().iter().copied().enumerate());
            batch.push(offer.candidate);
        } else {
            // Gains only fall as the batch grows, so a stale one is an upper bound.
            heap.push(Offer { gain: gain(offer.candidate, &covered), round: batch.len(), ..offer });
        }
    }
    batch
}

/// Gain of a candidate over the batch as it was in some round.
struct Offer {
    gain: f64,
    candidate: usize,
    round: usize,
}

impl Ord for Offer {
    fn cmp(&self, other: &Offer) -> Ordering {
        self.gain.total_cmp(&other.gain).then(other.candidate.cmp(&self.candidate))
    }
}

impl PartialOrd for Offer {
    fn partial_cmp(&self, other: &Offer) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Offer {
    fn eq(&self, other: &Offer) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Offer {}
