//! Training data: rows of features and their targets.

use crate::LearnError;

/// Feature matrix `[n_rows, n_columns]`, row-major. NaN is a missing value.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    data: Vec<f32>,
    n_rows: usize,
    n_columns: usize,
}

impl Matrix {
    /// Makes a matrix without rows.
    pub fn new(n_columns: usize) -> Matrix {
        Matrix { data: Vec::new(), n_rows: 0, n_columns }
    }

    /// Makes a matrix of these rows.
    ///
    /// # Panics
    /// If a row does not have `n_columns` values.
    pub fn from_rows<R: AsRef<[f32]>>(n_columns: usize, rows: impl IntoIterator<Item = R>) -> Matrix {
        let mut matrix = Matrix::new(n_columns);
        rows.into_iter().for_each(|row| matrix.push(row.as_ref()));
        matrix
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If the row does not have [`Matrix::n_columns`] values.
    pub fn push(&mut self, row: &[f32]) {
        assert_eq!(row.len(), self.n_columns, "invariant: a row has a value for each column");
        self.data.extend_from_slice(row);
        self.n_rows += 1;
    }

    /// Returns the number of rows.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Returns the number of columns.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// Row at an index.
    pub fn row(&self, at: usize) -> &[f32] {
        &self.data[at * self.n_columns..][..self.n_columns]
    }

    /// Rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        (0..self.n_rows).map(|at| self.row(at))
    }
}

/// Training examples: features with targets.
#[derive(Debug, Clone, Copy)]
pub struct Examples<'a> {
    /// The features.
    pub features: &'a Matrix,
    /// Target of each row; finite.
    pub targets: &'a [f32],
    /// Prediction of a base model for each row, which the new model corrects; empty for none.
    pub base: &'a [f32],
    /// Group of each row; rows of different groups are not ranked against each other. Empty for a single
    /// group.
    pub groups: &'a [u32],
}

impl<'a> Examples<'a> {
    /// Examples of a single group, without a base model.
    pub fn new(features: &'a Matrix, targets: &'a [f32]) -> Examples<'a> {
        Examples { features, targets, base: &[], groups: &[] }
    }

    /// Sets the predictions of another model, to which the new one learns the correction.
    ///
    /// # Source
    /// Transfer in AutoTVM, section 4: a global model of earlier workloads plus a local one of the current
    /// workload.
    pub fn on_top_of(self, base: &'a [f32]) -> Examples<'a> {
        Examples { base, ..self }
    }

    /// Sets groups, such as workloads, whose targets are not comparable: rows are ranked within their group
    /// only.
    pub fn in_groups(self, groups: &'a [u32]) -> Examples<'a> {
        Examples { groups, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), LearnError> {
        let n_rows = self.features.n_rows();
        let lengths = [
            ("targets", self.targets.len(), false),
            ("base predictions", self.base.len(), true),
            ("groups", self.groups.len(), true),
        ];
        for (what, found, optional) in lengths {
            if found != n_rows && !(optional && found == 0) {
                return Err(LearnError::Length { what, n_rows, found });
            }
        }
        for (what, values) in [("target", self.targets), ("base prediction", self.base)] {
            if let Some(row) = values.iter().position(|v| !v.is_finite()) {
                return Err(LearnError::NotFinite { what, row, value: values[row] });
            }
        }
        Ok(())
    }
}
