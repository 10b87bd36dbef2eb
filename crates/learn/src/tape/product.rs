//! Matrix products.
//!
//! # Source
//! Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008). The left operand is
//! read in place: with the few columns on the right that layers have, copying it would take much of the time.

use std::array;

use pulp::{Simd, WithSimd};

use super::NumberRows;
use crate::simd::wide;

/// Number of vectors of columns whose sums stay in registers, for each of some rows.
const VECTORS: usize = 2;

/// Number of rows whose sums stay in registers, by the number of lanes of a vector.
const fn n_rows(lanes: usize) -> usize {
    if lanes == 16 { 8 } else { 6 }
}

/// Depth and rows of a block: a panel of columns stays in the L1 cache, and the rows that it is multiplied
/// with in the L2 cache.
const MOST_DEPTH: usize = 256;
const MOST_ROWS: usize = 192;

/// Right operand of products, copied in the order of access: panels of columns, `[panels, depth, width]`,
/// each padded with zeros to whole vectors.
#[derive(Debug, Clone)]
pub(super) struct PanelFactor {
    depth: usize,
    n_columns: usize,
    panels: Vec<f32>,
}

impl PanelFactor {
    /// Packs the operand of these rows.
    pub(super) fn new(rows: &NumberRows) -> PanelFactor {
        let (depth, n_columns) = (rows.n_rows(), rows.n_columns);
        let mut factor = PanelFactor { depth, n_columns, panels: Vec::new() };
        for (first, width, n) in factor.each_panel() {
            for k in 0..depth {
                factor.panels.extend_from_slice(&rows.values[k * n_columns + first..][..n]);
                factor.panels.resize(factor.panels.len() + width - n, 0.0);
            }
        }
        factor
    }

    /// Panels of the operand: the first column, the row length, and the number of columns without padding.
    fn each_panel(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let (lanes, n_columns) = (pulp::Arch::new().dispatch(LaneCount), self.n_columns);
        (0..n_columns).step_by(VECTORS * lanes).map(move |first| {
            let n = (n_columns - first).min(VECTORS * lanes);
            (first, n.next_multiple_of(lanes), n)
        })
    }
}

/// `to += left · right`, row by row.
///
/// # Panics
/// If the sizes of the operands and the result do not match.
pub(super) fn add_product(left: &[f32], right: &PanelFactor, to: &mut [f32]) {
    if to.is_empty() || left.is_empty() {
        return;
    }
    let n_rows = to.len() / right.n_columns;
    assert_eq!((n_rows * right.depth, n_rows * right.n_columns), (left.len(), to.len()), "invariant: factors fit");
    pulp::Arch::new().dispatch(PanelProduct { left, right, to });
}

/// Number of lanes of a vector on this CPU.
struct LaneCount;

impl WithSimd for LaneCount {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F32_LANES
    }
}

struct PanelProduct<'a> {
    left: &'a [f32],
    right: &'a PanelFactor,
    to: &'a mut [f32],
}

impl WithSimd for PanelProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::F32_LANES == 16 {
            self.add::<S, { n_rows(16) }>(simd);
        } else {
            self.add::<S, { n_rows(8) }>(simd);
        }
    }
}

impl PanelProduct<'_> {
    #[inline(always)]
    fn add<S: Simd, const ROWS: usize>(self, simd: S) {
        let PanelProduct { left, right: &PanelFactor { depth, n_columns, ref panels }, to } = self;
        let n_rows = to.len() / n_columns;
        for from in (0..depth).step_by(MOST_DEPTH) {
            let n_deep = (depth - from).min(MOST_DEPTH);
            for first_row in (0..n_rows).step_by(MOST_ROWS) {
                let last_row = n_rows.min(first_row + MOST_ROWS);
                for column in (0..n_columns).step_by(VECTORS * S::F32_LANES) {
                    let n = (n_columns - column).min(VECTORS * S::F32_LANES);
                    let width = n.next_multiple_of(S::F32_LANES);
                    let panel = &panels[column * depth + from * width..][..n_deep * width];
                    let mut row = first_row;
                    while row < last_row {
                        let left = &left[row * depth + from..];
                        let to = &mut to[row * n_columns + column..];
                        let tile = RegisterTile { left, depth, n_deep, panel, to, n_columns, n };
                        row += match last_row - row {
                            rest if rest >= ROWS => tile.add_any::<S, ROWS>(simd),
                            rest if rest >= 4 => tile.add_any::<S, 4>(simd),
                            rest if rest >= 2 => tile.add_any::<S, 2>(simd),
                            _ => tile.add_any::<S, 1>(simd),
                        };
                    }
                }
            }
        }
    }
}

/// Tile of some rows and a panel, accumulated in registers.
struct RegisterTile<'a> {
    /// Left operand, from its first row on.
    left: &'a [f32],
    /// Stride of the rows.
    depth: usize,
    n_deep: usize,
    panel: &'a [f32],
    to: &'a mut [f32],
    n_columns: usize,
    /// Columns of the panel.
    n: usize,
}

impl RegisterTile<'_> {
    #[inline(always)]
    fn add_any<S: Simd, const ROWS: usize>(self, simd: S) -> usize {
        if self.n > S::F32_LANES {
            self.add::<S, ROWS, VECTORS>(simd)
        } else {
            self.add::<S, ROWS, 1>(simd)
        }
        ROWS
    }

    #[inline(always)]
    fn add<S: Simd, const ROWS: usize, const N: usize>(self, simd: S) {
        let rows: [&[f32]; ROWS] = array::from_fn(|row| &self.left[row * self.depth..][..self.n_deep]);
        let panel = &S::as_simd_f32s(self.panel).0.as_chunks::<N>().0[..self.n_deep];
        let mut sums = [[simd.splat_f32s(0.0); N]; ROWS];
        for (k, columns) in panel.iter().enumerate() {
            for (row, sums) in rows.iter().zip(&mut sums) {
                let x = simd.splat_f32s(row[k]);
                for (sum, y) in sums.iter_mut().zip(columns) {
                    *sum = simd.mul_add_e_f32s(x, *y, *sum);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            let to = &mut self.to[row * self.n_columns..][..self.n];
            for (to, sum) in to.chunks_mut(S::F32_LANES).zip(sums) {
                let before = simd.partial_load_f32s(to);
                simd.partial_store_f32s(to, simd.add_f32s(before, *sum));
            }
        }
    }
}

impl NumberRows {
    /// Transposes the rows.
    pub(super) fn transposed(&self) -> NumberRows {
        /// Number of values in a cache line: whole lines are read and written.
        const BLOCK: usize = 16;
        let n_rows = self.n_rows();
        let mut values = vec![0.0; self.values.len()];
        wide(|| {
            for from_row in (0..n_rows).step_by(BLOCK) {
                let rows = from_row..n_rows.min(from_row + BLOCK);
                for from_column in (0..self.n_columns).step_by(BLOCK) {
                    for column in from_column..self.n_columns.min(from_column + BLOCK) {
                        for row in rows.clone() {
                            values[column * n_rows + row] = self.values[row * self.n_columns + column];
                        }
                    }
                }
            }
        });
        NumberRows { n_columns: n_rows, values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers whose products and sums are exact.
    fn rows(n_rows: usize, n_columns: usize, seed: usize) -> NumberRows {
        let value = |at: usize| ((at * 7 + seed) % 13) as f32 - 6.0;
        NumberRows { n_columns, values: (0..n_rows * n_columns).map(value).collect() }
    }

    #[test]
    fn products_are_those_of_the_definition() {
        let sizes = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 70];
        for (at, &n_rows) in sizes.iter().enumerate() {
            for (depth, n_columns) in sizes.iter().flat_map(|&d| sizes.map(|c| (d, c))) {
                check(n_rows, depth, n_columns, at);
            }
        }
        check(MOST_ROWS + 13, 2 * MOST_DEPTH + 5, 45, 3);
        check(3, 0, 4, 0);
    }

    #[test]
    fn columns_become_rows() {
        for (n_rows, n_columns) in [(1, 1), (16, 40), (33, 17)] {
            let of = rows(n_rows, n_columns, 2);
            let transposed = of.transposed();
            let column = |at: usize| of.values.iter().skip(at).step_by(n_columns).copied().collect::<Vec<_>>();
            assert!((0..n_columns).all(|at| transposed.row(at) == column(at)), "{n_rows} × {n_columns}");
        }
    }

    fn check(n_rows: usize, depth: usize, n_columns: usize, seed: usize) {
        let (left, right) = (rows(n_rows, depth, seed), rows(depth, n_columns, seed + 3));
        let before = rows(n_rows, n_columns, seed + 1);
        let mut found = before.clone();
        add_product(&left.values, &PanelFactor::new(&right), &mut found.values);
        for (row, column) in (0..n_rows).flat_map(|row| (0..n_columns).map(move |column| (row, column))) {
            let product: f32 =
                (0..depth).map(|k| left.values[row * depth + k] * right.values[k * n_columns + column]).sum();
            let at = row * n_columns + column;
            assert_eq!(found.values[at], before.values[at] + product, "{n_rows} × {depth} × {n_columns} at {at}");
        }
    }
}
