//! Features of a problem for trees.

use std::collections::{BTreeSet, HashSet};

use serde::{Deserialize, Serialize};

use super::{Encoding, FieldKind, Vocabulary};

/// Number derived from a problem's fields, given by their indices in the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum DerivedNumber {
    /// Value of the field.
    Number(usize),
    /// Largest power of two that divides the field, at most 64, which matters for unrolled and vectorized
    /// code.
    PowerOfTwo(usize),
    /// Product of two fields: areas and volumes.
    Product(usize, usize),
    /// Product of all fields: the amount of work.
    Work,
    /// Whether a category, or a number with few values, equals this one.
    Is(usize, i64),
}

/// Columns that trees see: those that distinguish the training problems.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Columns {
    columns: Vec<DerivedNumber>,
    /// Indices of the fields that are seen as numbers.
    integers: Vec<usize>,
}

impl Columns {
    /// Chooses the columns, without ones that are constant over these problems or equal to another.
    pub(super) fn new<'a>(
        encoding: Encoding,
        vocabulary: &Vocabulary,
        problems: impl Iterator<Item = &'a [i64]> + Clone,
    ) -> Columns {
        let (mut integers, mut columns) = (Vec::new(), Vec::new());
        for (at, field) in vocabulary.fields.iter().enumerate() {
            match (&field.kind, encoding) {
                (FieldKind::Categorical { values }, _) => {
                    columns.extend((0..values.len() as i64).map(|v| DerivedNumber::Is(at, v)))
                }
                (FieldKind::Integer, Encoding::Numeric) => integers.push(at),
                (FieldKind::Integer, Encoding::OneHot) => {
                    let seen: BTreeSet<i64> = problems.clone().map(|problem| problem[at]).collect();
                    columns.extend(seen.into_iter().map(|v| DerivedNumber::Is(at, v)));
                }
            }
        }
        columns.extend(integers.iter().map(|&at| DerivedNumber::Number(at)));
        columns.extend(integers.iter().map(|&at| DerivedNumber::PowerOfTwo(at)));
        let pairs = integers.iter().enumerate().flat_map(|(i, &a)| integers[i + 1..].iter().map(move |&b| (a, b)));
        columns.extend(pairs.map(|(a, b)| DerivedNumber::Product(a, b)));
        columns.push(DerivedNumber::Work);
        let mut chosen = Columns { columns: Vec::new(), integers };
        let mut seen = HashSet::new();
        for column in columns {
            let values: Vec<u32> = problems.clone().map(|p| chosen.value(column, p).to_bits()).collect();
            if values.iter().any(|v| *v != values[0]) && seen.insert(values) {
                chosen.columns.push(column);
            }
        }
        chosen
    }

    /// Returns the number of columns.
    pub(super) fn len(&self) -> usize {
        self.columns.len()
    }

    /// Whether the columns can be computed from `n_fields` fields.
    pub(super) fn fit(&self, n_fields: usize) -> bool {
        let fits = |column: &DerivedNumber| match *column {
            DerivedNumber::Number(at) | DerivedNumber::PowerOfTwo(at) | DerivedNumber::Is(at, _) => at < n_fields,
            DerivedNumber::Product(a, b) => a.max(b) < n_fields,
            DerivedNumber::Work => true,
        };
        self.columns.iter().all(fits) && self.integers.iter().all(|&at| at < n_fields)
    }

    /// Returns the columns of a problem.
    pub(super) fn row(&self, problem: &[i64]) -> Vec<f32> {
        self.columns.iter().map(|&column| self.value(column, problem)).collect()
    }

    /// Sizes are spread over orders of magnitude and trees draw thresholds evenly, so all but names are
    /// logarithms.
    fn value(&self, column: DerivedNumber, problem: &[i64]) -> f32 {
        let log = |size: f32| (size.max(0.0) + 1.0).log2();
        match column {
            DerivedNumber::Number(at) => log(problem[at] as f32),
            DerivedNumber::PowerOfTwo(at) => problem[at].trailing_zeros().min(6) as f32,
            DerivedNumber::Product(a, b) => log(problem[a] as f32 * problem[b] as f32),
            DerivedNumber::Work => log(self.integers.iter().map(|&at| problem[at].max(1) as f32).product()),
            DerivedNumber::Is(at, value) => f32::from(problem[at] == value),
        }
    }
}
