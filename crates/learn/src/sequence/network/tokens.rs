//! Network inputs: a time step for each field of a problem.

use serde::{Deserialize, Serialize};

use super::super::{Encoding, FieldKind, Vocabulary};
use crate::tape::NumberRows;

/// Number of powers of two that distinguish numbers: whether they reach them, and whether they are multiples.
const N_SIZES: usize = 12;
const N_DIVISORS: usize = 6;

/// Encoding of problems as steps of numbers.
///
/// A field that is constant in all training problems has no step. Every step has a token for each value of
/// its field in training and one for all others. With [`Encoding::Numeric`], so that unseen numbers are
/// meaningful, a number also has: its logarithm, which powers of two it reaches, which powers of two divide
/// it, the logarithm of its odd part, and the logarithms of its products with all other numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Tokens {
    encoding: Encoding,
    steps: Vec<VaryingField>,
}

/// Field that varies.
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

    /// Whether the tokens can be computed from `n_fields` fields.
    pub(super) fn fit(&self, n_fields: usize) -> bool {
        !self.steps.is_empty() && self.steps.iter().all(|step| step.field < n_fields)
    }

    /// Returns the number of steps.
    pub(super) fn n_steps(&self) -> usize {
        self.steps.len()
    }

    /// Returns the number of values per step.
    pub(super) fn width(&self) -> usize {
        self.n_tokens() + self.n_numbers()
    }

    /// Largest number of tokens of a field, including that for unseen values.
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
