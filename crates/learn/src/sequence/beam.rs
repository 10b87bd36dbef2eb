//! Beam search over answers.

/// What may come next, for one problem.
pub trait Completions {
    /// For each value of the parameter after this prefix, whether some valid whole answer begins so. It has to be exact: where it says yes
    /// too often, a search may end with no answer.
    fn allowed(&mut self, prefix: &[u32]) -> Vec<bool>;
}

/// An answer of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// For each parameter the index of its value.
    pub values: Vec<u32>,
    /// The natural logarithm of the probability that the model gives it.
    pub log_probability: f64,
}

/// What predicts the next parameter of many prefixes at once.
pub(super) trait Decoder {
    /// The logarithms of the probabilities of the next parameter's values, one row for each prefix.
    ///
    /// Prefixes come in the order of a search: first the empty one, then each time prefixes that are one longer than the previous ones.
    /// `parents` are the places, among the previous prefixes, of those that the new ones extend.
    fn next(&mut self, prefixes: &[Answer], parents: &[usize]) -> Vec<f32>;
}

/// The likeliest whole answers that a beam of this width finds; `sizes` are the numbers of values.
pub(super) fn search(
    decoder: &mut dyn Decoder,
    sizes: &[usize],
    width: usize,
    mut completions: Option<&mut dyn Completions>,
) -> Vec<Answer> {
    let mut beam = vec![Answer { values: Vec::new(), log_probability: 0.0 }];
    let mut parents = vec![0];
    for &size in sizes {
        let next = decoder.next(&beam, &parents);
        let mut candidates = Vec::with_capacity(next.len());
        for (parent, (prefix, next)) in beam.iter().zip(next.chunks_exact(size)).enumerate() {
            let allowed = completions.as_mut().map(|c| c.allowed(&prefix.values));
            if let Some(allowed) = &allowed {
                assert_eq!(allowed.len(), size, "invariant: completions speak of every value");
            }
            let value_allowed = |value: usize| allowed.as_ref().is_none_or(|allowed| allowed[value]);
            let values = next.iter().enumerate().filter(|(value, _)| value_allowed(*value));
            candidates.extend(values.map(|(value, &p)| (prefix.log_probability + f64::from(p), parent, value as u32)));
        }
        // Prefixes of equal length order like their parents and then their values, so ties follow from the answers alone.
        let by_values = |parent: usize| &beam[parent].values;
        candidates.sort_by(|a, b| {
            b.0.total_cmp(&a.0).then_with(|| by_values(a.1).cmp(by_values(b.1))).then_with(|| a.2.cmp(&b.2))
        });
        candidates.truncate(width);
        parents = candidates.iter().map(|(_, parent, _)| *parent).collect();
        beam = candidates
            .iter()
            .map(|&(log_probability, parent, value)| {
                let values = beam[parent].values.iter().copied().chain([value]).collect();
                Answer { values, log_probability }
            })
            .collect();
        if beam.is_empty() {
            break;
        }
    }
    beam
}
