//! Beam search over sequence outputs.

use std::cmp::Ordering;

/// Constraint on decoding: the valid completions of a prefix, for a problem.
pub trait Completions {
    /// Whether some valid answer begins with this prefix and each value of the next parameter. The result
    /// must be exact: after a false positive, a search may end without an answer.
    fn allowed(&mut self, prefix: &[u32]) -> Vec<bool>;
}

/// Decoded answer of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct LikelyAnswer {
    /// Index of each parameter's value.
    pub values: Vec<u32>,
    /// Natural logarithm of the probability that the model assigns.
    pub log_probability: f64,
}

/// Predictor of the next parameter of many prefixes at once.
pub(super) trait Decoder {
    /// Returns the logarithms of the probabilities of the next parameter's values, one row for each prefix.
    ///
    /// Prefixes come in the order of a search: first the empty one, then in each call prefixes that are one
    /// longer than the previous ones. `parents` are the indices, among the previous prefixes, of those that
    /// the new ones extend.
    fn next(&mut self, prefixes: &[LikelyAnswer], parents: &[usize]) -> Vec<f32>;
}

/// Prefix on the beam.
struct Prefix {
    answer: LikelyAnswer,
    /// Position among the previous prefixes.
    parent: usize,
    /// Whether a valid answer begins with the prefix.
    valid: bool,
    /// Whether an unconstrained beam of the same width would hold the prefix.
    unconstrained: bool,
}

/// Returns the most likely complete answers that a beam of this width finds; `sizes` are the numbers of
/// values.
///
/// With completions, the unconstrained beam is tracked as well: a prefix that is dropped makes room for one
/// that is more likely now but may lead to less, and so a constrained beam alone can lose valid answers that
/// an unconstrained one of the same width finds. Those are kept first.
pub(super) fn search(
    decoder: &mut dyn Decoder,
    sizes: &[usize],
    width: usize,
    mut completions: Option<&mut dyn Completions>,
) -> Vec<LikelyAnswer> {
    let root = LikelyAnswer { values: Vec::new(), log_probability: 0.0 };
    let mut beam = vec![Prefix { answer: root, parent: 0, valid: true, unconstrained: completions.is_some() }];
    for &size in sizes {
        let (prefixes, parents): (Vec<LikelyAnswer>, Vec<usize>) =
            beam.iter().map(|p| (p.answer.clone(), p.parent)).unzip();
        let next = decoder.next(&prefixes, &parents);
        let mut candidates = Vec::with_capacity(next.len());
        for (parent, (prefix, next)) in beam.iter().zip(next.chunks_exact(size)).enumerate() {
            let allowed = match &mut completions {
                Some(completions) if prefix.valid => completions.allowed(&prefix.answer.values),
                _ => vec![prefix.valid; size],
            };
            assert_eq!(allowed.len(), size, "invariant: completions speak of every value");
            for ((value, &log_probability), valid) in (0..).zip(next).zip(allowed) {
                if valid || prefix.unconstrained {
                    let values = prefix.answer.values.iter().copied().chain([value]).collect();
                    let log_probability = prefix.answer.log_probability + f64::from(log_probability);
                    let answer = LikelyAnswer { values, log_probability };
                    candidates.push(Prefix { answer, parent, valid, unconstrained: prefix.unconstrained });
                }
            }
        }
        candidates.sort_by(|a, b| likelier(&a.answer, &b.answer));
        let (mut n_valid, mut n_unconstrained) = (0, 0);
        for candidate in &mut candidates {
            n_valid += usize::from(candidate.valid);
            n_unconstrained += usize::from(candidate.unconstrained);
            candidate.valid &= n_valid <= width || candidate.unconstrained && n_unconstrained <= width;
            candidate.unconstrained &= n_unconstrained <= width;
        }
        candidates.retain(|candidate| candidate.valid || candidate.unconstrained);
        beam = candidates;
        if beam.is_empty() {
            return Vec::new();
        }
    }
    beam.retain(|prefix| prefix.valid);
    // Stable: within both kinds the most likely stay first.
    beam.sort_by_key(|prefix| !prefix.unconstrained);
    beam.truncate(width);
    let mut answers: Vec<LikelyAnswer> = beam.into_iter().map(|prefix| prefix.answer).collect();
    answers.sort_by(likelier);
    answers
}

/// Index of the answer that is expected to be best, if these are all possible answers. Average accuracy and
/// perfect prediction have equal weight: each correct parameter counts as one, and all of them together as
/// the number of parameters.
///
/// # Source
/// Kumar and Byrne, "Minimum Bayes-risk decoding for statistical machine translation" (2004).
pub(super) fn expected_best(answers: &[LikelyAnswer]) -> Option<usize> {
    let probabilities: Vec<f64> = answers.iter().map(|answer| answer.log_probability.exp()).collect();
    let expected = |answer: &LikelyAnswer| -> f64 {
        let right = |other: &LikelyAnswer| {
            let n_right = answer.values.iter().zip(&other.values).filter(|(a, b)| a == b).count();
            if n_right == answer.values.len() { 2 * n_right } else { n_right }
        };
        answers.iter().zip(&probabilities).map(|(other, probability)| probability * right(other) as f64).sum()
    };
    let scores: Vec<f64> = answers.iter().map(expected).collect();
    // Among equals the first, which is the most likely.
    (0..answers.len()).rev().max_by(|&a, &b| scores[a].total_cmp(&scores[b]))
}

/// Orders the more likely answer first; among equals, the one with the smaller values.
fn likelier(a: &LikelyAnswer, b: &LikelyAnswer) -> Ordering {
    b.log_probability.total_cmp(&a.log_probability).then_with(|| a.values.cmp(&b.values))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    /// Model in which the hash of a prefix determines its probabilities.
    struct Hashed {
        sizes: Vec<usize>,
        seed: u64,
        previous: Vec<Vec<u32>>,
    }

    impl Hashed {
        fn row(&self, prefix: &[u32]) -> Vec<f32> {
            let size = self.sizes[prefix.len()];
            let weight = |value: usize| {
                let numbers = prefix.iter().copied().chain([value as u32]);
                let mixed = numbers
                    .fold(self.seed, |h, v| (h ^ u64::from(v + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (h >> 29));
                // Few levels, so that there are ties.
                ((mixed >> 40) % 5 + 1) as f32
            };
            let weights: Vec<f32> = (0..size).map(weight).collect();
            let sum: f32 = weights.iter().sum();
            weights.iter().map(|w| (w / sum).ln()).collect()
        }
    }

    impl Decoder for Hashed {
        fn next(&mut self, prefixes: &[LikelyAnswer], parents: &[usize]) -> Vec<f32> {
            for (prefix, &parent) in prefixes.iter().zip(parents) {
                if let Some((_, before)) = prefix.values.split_last() {
                    assert_eq!(self.previous[parent], before, "a prefix extends its parent");
                }
            }
            self.previous = prefixes.iter().map(|p| p.values.clone()).collect();
            prefixes.iter().flat_map(|p| self.row(&p.values)).collect()
        }
    }

    struct Listed(BTreeSet<Vec<u32>>, Vec<usize>);

    impl Completions for Listed {
        fn allowed(&mut self, prefix: &[u32]) -> Vec<bool> {
            let begins = |value: u32| {
                let begun: Vec<u32> = prefix.iter().copied().chain([value]).collect();
                self.0.iter().any(|answer| answer.starts_with(&begun))
            };
            (0..self.1[prefix.len()] as u32).map(begins).collect()
        }
    }

    /// Every answer and its probability.
    fn enumerate(model: &Hashed) -> BTreeMap<Vec<u32>, f64> {
        let mut answers = BTreeMap::from([(Vec::new(), 0.0)]);
        for &size in &model.sizes {
            let extend = |(prefix, p): (Vec<u32>, f64)| {
                let row = model.row(&prefix);
                (0..size)
                    .map(move |v| ([prefix.as_slice(), &[v as u32]].concat(), p + f64::from(row[v])))
                    .collect::<Vec<_>>()
            };
            answers = answers.into_iter().flat_map(extend).collect();
        }
        answers
    }

    /// Model of two parameters; the second one's probabilities depend on the first one's value.
    struct TwoSteps([f32; 3], [[f32; 3]; 3]);

    impl Decoder for TwoSteps {
        fn next(&mut self, prefixes: &[LikelyAnswer], _parents: &[usize]) -> Vec<f32> {
            let row = |prefix: &LikelyAnswer| prefix.values.first().map_or(self.0, |&value| self.1[value as usize]);
            prefixes.iter().flat_map(|prefix| row(prefix).map(f32::ln)).collect()
        }
    }

    /// A valid first value 2 must not be crowded out of the beam by the invalid value 1, as in an
    /// unconstrained beam.
    #[test]
    fn what_an_unconstrained_beam_finds_is_not_crowded_out() {
        let mut model = TwoSteps([0.45, 0.3, 0.25], [[0.7, 0.28, 0.02], [0.34, 0.33, 0.33], [0.98, 0.01, 0.01]]);
        let found = |answers: Vec<LikelyAnswer>| answers.into_iter().map(|a| a.values).collect::<Vec<_>>();
        assert_eq!(found(search(&mut model, &[3, 3], 2, None)), [[0, 0], [0, 1]]);
        let valid = [0, 2].iter().flat_map(|&first| (0..3).map(move |second| vec![first, second])).collect();
        let mut completions = Listed(valid, vec![3, 3]);
        assert_eq!(found(search(&mut model, &[3, 3], 2, Some(&mut completions))), [[0, 0], [0, 1]]);
        assert_eq!(found(search(&mut model, &[3, 3], 3, Some(&mut completions))), [[0, 0], [2, 0], [0, 1]]);
    }

    #[test]
    fn the_best_answer_agrees_with_many() {
        let best = |answers: &[(&[u32], f64)]| {
            let answer =
                |(values, p): &(&[u32], f64)| LikelyAnswer { values: values.to_vec(), log_probability: p.ln() };
            expected_best(&answers.iter().map(answer).collect::<Vec<_>>())
        };
        assert_eq!(best(&[]), None);
        // Expected score of the first: 3 · 0.3 and as much for the whole; of the others: 3 · 0.2 + 2 · 2 ·
        // 0.2 and 3 · 0.2.
        let others: [(&[u32], f64); 3] = [(&[1, 1, 0], 0.2), (&[1, 1, 2], 0.2), (&[1, 1, 3], 0.2)];
        assert_eq!(best(&[&[(&[0, 0, 1][..], 0.3)], &others[..]].concat()), Some(1));
        assert_eq!(best(&[&[(&[0, 0, 1][..], 0.7)], &others[..]].concat()), Some(0));
        // Fewer parameters, but more often the whole: 2 · 0.39 and as much against 2 · 0.3 + 0.2 and 2 · 0.3.
        assert_eq!(best(&[(&[0, 0], 0.39), (&[1, 1], 0.3), (&[1, 2], 0.2)]), Some(0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn beams_are_valid_distinct_sorted_and_lose_nothing(
            sizes in prop::collection::vec(1usize..4, 1..5),
            width in 1usize..30,
            seed: u64,
            share_valid in 0u64..=4,
        ) {
            let mut model = Hashed { sizes: sizes.clone(), seed, previous: Vec::new() };
            let all = enumerate(&model);
            let mut lottery = seed;
            let mut valid = BTreeSet::new();
            for answer in all.keys() {
                lottery = lottery.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if lottery >> 62 < share_valid {
                    valid.insert(answer.clone());
                }
            }
            let mut completions = Listed(valid.clone(), sizes.clone());
            let free = search(&mut model, &sizes, width, None);
            let bound = search(&mut model, &sizes, width, Some(&mut completions));
            for answers in [&free, &bound] {
                prop_assert!(answers.is_sorted_by(|a, b| likelier(a, b) == Ordering::Less), "{answers:?}");
                for answer in answers {
                    prop_assert!((answer.log_probability - all[&answer.values]).abs() < 1e-9);
                }
            }
            prop_assert_eq!(free.len(), width.min(all.len()));
            prop_assert_eq!(bound.len(), width.min(valid.len()));
            prop_assert!(bound.iter().all(|a| valid.contains(&a.values)));
            for answer in free.iter().filter(|a| valid.contains(&a.values)) {
                prop_assert!(bound.contains(answer), "{:?} is lost", answer);
            }
            // A beam as wide as the number of answers is an enumeration.
            let everything = search(&mut model, &sizes, all.len(), Some(&mut completions));
            let found: BTreeSet<Vec<u32>> = everything.iter().map(|a| a.values.clone()).collect();
            prop_assert_eq!(found, valid);
        }
    }
}
