//! Knob features: a configuration by its parameters alone, without its program.

use std::sync::Arc;

use super::Alignments;
use crate::space::{Config, Domain, Space, Value};

/// Maximum number of values of a parameter whose features are tabulated.
const MAX_TABLE: u64 = 1 << 14;

/// Encoder of the configurations of one space as feature vectors.
///
/// Numbers in order are encoded as numbers, a factorization as its factors, other categories as a one-hot
/// vector, and a permutation as the position of each of its names. [`KnobFeatures::aligned`] adds the
/// alignments of ordinals.
#[derive(Debug, Clone)]
pub struct KnobFeatures {
    space: Arc<Space>,
    parameters: Vec<Knob>,
    alignments: Option<Alignments>,
    n_features: usize,
}

#[derive(Debug, Clone)]
struct Knob {
    name: String,
    n_features: usize,
    /// Features of all values in order of rank; empty if there are too many values.
    table: Vec<f32>,
}

impl KnobFeatures {
    /// Encoder for a space.
    ///
    /// # Cost
    /// O(values of each parameter).
    pub fn new(space: &Arc<Space>) -> KnobFeatures {
        let ranks = vec![0; space.n_parameters()];
        let knob = |(parameter, name): (usize, &str)| {
            let (domain, is_ordered) = (space.domain(parameter), space.is_ordered(parameter));
            let mut table = Vec::new();
            if space.n_values(parameter) <= MAX_TABLE {
                let any = Config::new(ranks.clone());
                for rank in 0..space.n_values(parameter) {
                    write(domain, is_ordered, &space.value(&any.with(parameter, rank), name), &mut table);
                }
            }
            Knob { name: name.to_owned(), n_features: if is_ordered { 1 } else { width(domain) }, table }
        };
        let parameters: Vec<Knob> = space.names().enumerate().map(knob).collect();
        let n_features = parameters.iter().map(|knob| knob.n_features).sum();
        KnobFeatures { space: Arc::clone(space), parameters, alignments: None, n_features }
    }

    /// Encoder for a space that appends its [`Alignments`].
    pub fn aligned(space: &Arc<Space>) -> KnobFeatures {
        let (knobs, alignments) = (KnobFeatures::new(space), Alignments::new(space));
        let n_features = knobs.n_features + alignments.n_features();
        KnobFeatures { alignments: Some(alignments), n_features, ..knobs }
    }

    /// Length of a feature vector.
    pub fn n_features(&self) -> usize {
        self.n_features
    }

    /// Feature vector of a configuration of the space.
    pub fn of(&self, config: &Config) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.n_features);
        for (parameter, knob) in self.parameters.iter().enumerate() {
            if knob.table.is_empty() {
                let (domain, is_ordered) = (self.space.domain(parameter), self.space.is_ordered(parameter));
                write(domain, is_ordered, &self.space.value(config, &knob.name), &mut out);
            } else {
                let rank = config.ranks()[parameter] as usize;
                out.extend_from_slice(&knob.table[rank * knob.n_features..][..knob.n_features]);
            }
        }
        if let Some(alignments) = &self.alignments {
            alignments.write(config, &mut out);
        }
        out
    }
}

fn width(domain: &Domain) -> usize {
    match domain {
        Domain::Factorization { parts, .. } => *parts,
        Domain::Ordinal(_) => 1,
        Domain::Categorical(values) => values.len(),
        Domain::Permutation(names) => names.len(),
    }
}

fn write(domain: &Domain, is_ordered: bool, value: &Value, out: &mut Vec<f32>) {
    match domain {
        Domain::Categorical(_) if is_ordered => {
            out.push(value.text().parse().expect("invariant: ordered categories are numbers"));
        }
        Domain::Factorization { .. } => out.extend(value.factors().iter().map(|&factor| factor as f32)),
        Domain::Ordinal(_) => out.push(value.int() as f32),
        Domain::Categorical(values) => out.extend(values.iter().map(|v| f32::from(u8::from(v == value.text())))),
        Domain::Permutation(names) => {
            let position = |name| value.order().iter().position(|other| other == name);
            out.extend(names.iter().map(|name| position(name).expect("invariant: an order holds each name") as f32));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Parameter;

    #[test]
    fn knobs_are_numbers_factors_positions_and_one_hot() {
        let space = Space::new(
            "knobs",
            vec![
                Parameter::ordinal("unroll", [1, 4, 16]),
                Parameter::factorization("tile", 12, 3),
                Parameter::categorical("pack", &["none", "rows", "panels"]),
                Parameter::permutation("order", &["i", "j", "k"]),
                // Too many values for a table.
                Parameter::factorization("large", 1 << 40, 6),
            ],
            vec![],
        )
        .unwrap();
        let json = serde_json::json!({
            "unroll": 16, "tile": [2, 1, 6], "pack": "rows", "order": ["k", "i", "j"], "large": [1, 1024, 1024, 1024, 1024, 1],
        });
        let features = KnobFeatures::new(&Arc::new(space.clone())).of(&space.config_from_json(&json).unwrap());
        let expected = [16.0, 2.0, 1.0, 6.0, 0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0, 1024.0, 1024.0, 1024.0, 1024.0, 1.0];
        assert_eq!(features, expected);
    }

    #[test]
    fn alignments_follow_the_parameters() {
        let parameters = vec![Parameter::ordinal("tile", [32, 48, 64]), Parameter::categorical("pack", &["a", "b"])];
        let space = Arc::new(Space::new("aligned", parameters, vec![]).unwrap());
        let (knobs, aligned) = (KnobFeatures::new(&space), KnobFeatures::aligned(&space));
        let config = Config::new([2, 1]);
        assert_eq!(knobs.of(&config), [64.0, 0.0, 1.0]);
        assert_eq!(aligned.of(&config), [64.0, 0.0, 1.0, 1.0]);
        assert_eq!((knobs.n_features(), aligned.n_features()), (3, 4));
    }
}
