//! What trees see of a problem.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{FieldKind, Vocabulary};

/// A number made of a problem's fields, by their places in the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Column {
    /// The field itself.
    Number(usize),
    /// The largest power of two that divides it, at most 64: what unrolled and vectorized code asks for.
    PowerOfTwo(usize),
    /// The product of two fields: areas and volumes.
    Product(usize, usize),
    /// The product of all fields: the work to do.
    Work,
    /// Whether a name is this one.
    Is(usize, i64),
}

/// The numbers that trees see: those that tell the training problems apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Columns {
    columns: Vec<Column>,
    /// The places of the integer fields.
    integers: Vec<usize>,
}

impl Columns {
    /// Chooses the columns: none that is constant over these problems, none that is the same as another.
    pub(super) fn new<'a>(vocabulary: &Vocabulary, problems: impl Iterator<Item = &'a [i64]> + Clone) -> Columns {
        let (mut integers, mut columns) = (Vec::new(), Vec::new());
        for (at, field) in vocabulary.fields.iter().enumerate() {
            match &field.kind {
                FieldKind::Integer => integers.push(at),
                FieldKind::Categorical { values } => {
                    columns.extend((0..values.len() as i64).map(|v| Column::Is(at, v)))
                }
            }
        }
        columns.extend(integers.iter().map(|&at| Column::Number(at)));
        columns.extend(integers.iter().map(|&at| Column::PowerOfTwo(at)));
        let pairs = integers.iter().enumerate().flat_map(|(i, &a)| integers[i + 1..].iter().map(move |&b| (a, b)));
        columns.extend(pairs.map(|(a, b)| Column::Product(a, b)));
        columns.push(Column::Work);
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

    /// The number of columns.
    pub(super) fn len(&self) -> usize {
        self.columns.len()
    }

    /// Whether they can be made of so many fields.
    pub(super) fn fit(&self, n_fields: usize) -> bool {
        let fits = |column: &Column| match *column {
            Column::Number(at) | Column::PowerOfTwo(at) | Column::Is(at, _) => at < n_fields,
            Column::Product(a, b) => a.max(b) < n_fields,
            Column::Work => true,
        };
        self.columns.iter().all(fits) && self.integers.iter().all(|&at| at < n_fields)
    }

    /// The columns of a problem.
    pub(super) fn row(&self, problem: &[i64]) -> Vec<f32> {
        self.columns.iter().map(|&column| self.value(column, problem)).collect()
    }

    fn value(&self, column: Column, problem: &[i64]) -> f32 {
        match column {
            Column::Number(at) => problem[at] as f32,
            Column::PowerOfTwo(at) => (1u64 << problem[at].trailing_zeros().min(6)) as f32,
            Column::Product(a, b) => problem[a] as f32 * problem[b] as f32,
            Column::Work => self.integers.iter().map(|&at| problem[at].max(1) as f32).product(),
            Column::Is(at, value) => f32::from(problem[at] == value),
        }
    }
}
