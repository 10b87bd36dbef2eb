//! Network inputs: a time step for each field of a problem.

use serde::{Deserialize, Serialize};

use super::super::{Encoding, FieldKind, Vocabulary};
use crate::tape::NumberRows;

/// Numbers are told apart by these powers of two: whether they reach them, and whether they are multiples.
const N_SIZES: usize = 12;
const N_DIVISORS: usize = 6;

/// Encoding of problems as steps of numbers.
///
/// A field that is the same in all training problems is no step. Every step has a token for each value that
/// its field had in training and one for all others. With [`Encoding::Numeric`], a number also has, so that
/// unseen ones mean something: its logarithm, which powers of two it reaches, which powers of two divide it,
/// the logarithm of its odd part, and the logarithms of its products with all other numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Tokens {
    encoding: Encoding,
    steps: Vec<VaryingField>,
}

/// A field that varies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct VaryingField {
    field: usize,
    integer: bool,
    /// Values of the field in training, ascending.
    values: Vec<i64>,
}

impl Tokens {
    pub(super) fn new<'a>(
        encoding: Encoding,
        vocabulary: &Vocabulary,
        problems: impl Iterator<Item = &'a [i64]> + Clone,
    ) -> Tokens {
        let step = |field: usize| {
            let mut values: Vec<i64> = problems.clone().map(|problem| problem[field]).collect();
            values.sort_unstable();
            values.dedup();
            VaryingField { field, integer: vocabulary.fields[field].kind == FieldKind::Integer, values }
        };
        let mut steps: Vec<VaryingField> = (0..vocabulary.fields.len()).map(step).collect();
        if steps.iter().any(|step| step.values.len() > 1) {
            steps.retain(|step| step.values.len() > 1);
        }
        Tokens { encoding, steps }
    }

    /// Whether they can be made of so many fields.
    pub(super) fn fit(&self, n_fields: usize) -> bool {
        !self.steps.is_empty() && self.steps.iter().all(|step| step.field < n_fields)
    }

    /// The number of steps.
    pub(super) fn n_steps(&self) -> usize {
        self.steps.len()
    }

    /// The numbers of a step.
    pub(super) fn width(&self) -> usize {
        self.n_tokens() + self.n_numbers()
    }

    /// The tokens of the field that has most, that for unseen values included.
    fn n_tokens(&self) -> usize {
        1 + self.steps.iter().map(|step| step.values.len()).max().unwrap_or(0)
    }

    fn n_numbers(&self) -> usize {
        match self.encoding {
            Encoding::OneHot => 0,
            Encoding::Numeric => 2 + N_SIZES + N_DIVISORS + self.steps.len(),
        }
    }

    /// Problems as steps: the first step of all, then the second.
    pub(super) fn rows(&self, problems: &[&[i64]]) -> NumberRows {
        let mut rows = NumberRows { n_columns: self.width(), values: Vec::new() };
        for step in &self.steps {
            for problem in problems {
                let value = problem[step.field];
                let mut token = vec![0.0; self.n_tokens()];
                token[step.values.binary_search(&value).map_or(0, |at| at + 1)] = 1.0;
                rows.values.extend(token);
                match self.encoding {
                    Encoding::OneHot => {}
                    Encoding::Numeric if step.integer => self.push_numbers(problem, value, &mut rows.values),
                    Encoding::Numeric => rows.values.resize(rows.values.len() + self.n_numbers(), 0.0),
                }
            }
        }
        rows
    }

    fn push_numbers(&self, problem: &[i64], value: i64, to: &mut Vec<f32>) {
        let scale = N_SIZES as f32;
        let log = |value: i64| (value.max(0) as f32 + 1.0).log2() / scale;
        let n_twos = value.trailing_zeros();
        to.extend([log(value), log(value >> n_twos.min(63))]);
        to.extend((0..N_SIZES).map(|n| f32::from(value >= 1 << n)));
        to.extend((1..=N_DIVISORS as u32).map(|n| f32::from(n_twos >= n)));
        let product = |step: &VaryingField| if step.integer { log(value) + log(problem[step.field]) } else { 0.0 };
        to.extend(self.steps.iter().map(|step| product(step) / 2.0));
    }
}
