//! Sums of products, evaluated by blocks of rows and columns.
//!
//! For any axes, the position in a factor is a part for the row or column plus a part for the iteration of
//! the reduction. With copies by tables of these parts, a contraction over any axes is a matrix product, and
//! so is a convolution: the product of its weights and the input elements that they multiply.
//!
//! # Source
//! Blocks and panels: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", TOMS 2008.
//! Tables of positions: Matthews, "High-performance tensor contraction without transposition", SISC 2018;
//! here, only the copies use them.

use super::{Flat, Load, ParallelNest, ReducedLoops};
use crate::interp::Fault;
use crate::reference::work::{Counter, EvaluationProgress};
use pulp::{Simd, WithSimd};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum rows, columns and reduction iterations of a block: a copied block of rows stays in a core's L2
/// cache, a panel of columns in or near L1. All are multiples of both panel widths.
const MOST_ROWS: usize = 256;
const MOST_COLUMNS: usize = 480;
const MOST_DEPTH: usize = 256;

/// Width of the widest panel of columns.
const WIDEST: usize = 24;

/// Minimum number of rows or columns that is worth the copies.
const LEAST_ROWS: usize = 4;
const LEAST_COLUMNS: usize = 8;

/// Row or column.
#[derive(Clone, Copy)]
struct FactorLine {
    /// Contribution to the position in the result.
    to: i64,
    /// Contribution to the position in the factor.
    from: i64,
}

/// Columns with the same relevant iterations of the reduction; in the others, a factor is zero.
struct ColumnGroup {
    columns: Vec<FactorLine>,
    /// Contributions of the reduction iterations to the positions in both factors.
    depth: Vec<[i64; 2]>,
}

/// Whether a nest is a matrix product large enough to be worth the copies, regardless of values.
pub(super) fn pays(nest: &ParallelNest<'_>) -> bool {
    let Some((scalar, vector)) = &nest.product else { return false };
    let [rows, columns, _] = sides(nest, scalar, vector);
    let [less, more] = [nest.n_of(&rows).min(nest.n_of(&columns)), nest.n_of(&rows).max(nest.n_of(&columns))];
    less >= LEAST_ROWS && more >= LEAST_COLUMNS
}

/// Axes of the result that occur in one factor only, in the other only, and in both.
fn sides(nest: &ParallelNest<'_>, one: &Load, other: &Load) -> [Vec<usize>; 3] {
    let parallel = nest.outer.iter().chain([&nest.across, &nest.row]).copied();
    let mut sides = [const { Vec::new() }; 3];
    for axis in parallel.filter(|axis| nest.axes[*axis].extent > 1) {
        let side = match [one, other].map(|load| load.flat.coefficients[axis] != 0) {
            [true, false] => 0,
            [false, true] => 1,
            [true, true] | [false, false] => 2,
        };
        sides[side].push(axis);
    }
    sides
}

/// Sum of products as matrix products, one for each combination of the axes common to both factors.
pub(super) struct Product<'a> {
    /// Elements of rows and of columns.
    factors: [Cow<'a, [f64]>; 2],
    /// Start of each product in the result, the rows and the columns.
    starts: Vec<[i64; 3]>,
    rows: Vec<FactorLine>,
    groups: Vec<ColumnGroup>,
}

impl<'a> Product<'a> {
    /// Converts the nest to matrix products, if that is faster.
    pub(super) fn of(nest: &ParallelNest<'_>, memory: &'a [Vec<f64>]) -> Option<Product<'a>> {
        let (scalar, vector) = nest.product.as_ref()?;
        if !matches!(nest.reduce, Some(ReducedLoops { afresh: true, .. })) {
            return None;
        }
        let [mut rows, mut columns, batch] = sides(nest, scalar, vector);
        let (mut of_rows, mut of_columns) = (scalar, vector);
        let mut grid = NonzeroGrid::of(nest, memory, of_columns, of_rows, &batch);
        if grid.is_dense() {
            if !pays(nest) {
                return None;
            }
            if nest.n_of(&columns) < nest.n_of(&rows).min(WIDEST) {
                (rows, columns, of_rows, of_columns) = (columns, rows, of_columns, of_rows);
                grid = NonzeroGrid::of(nest, memory, of_columns, of_rows, &batch);
            }
        }
        let values_of = |load: &Load| memory[load.buffer.0 as usize].as_slice();
        let line = |values: &[i64]| FactorLine { to: nest.at.part(values), from: grid.part(values) };
        let mut groups: BTreeMap<Vec<i64>, Vec<FactorLine>> = BTreeMap::new();
        if grid.is_dense() {
            groups.insert(vec![0; grid.dimensions.len()], nest.each(&columns, line));
        } else {
            nest.each(&columns, |values| groups.entry(grid.rests(values)).or_default().push(line(values)));
        }
        let mut depths: BTreeMap<Vec<i64>, Vec<[i64; 2]>> = BTreeMap::new();
        nest.each(&nest.reduction, |values| {
            let (rests, at) = grid.at(values);
            depths.entry(rests).or_default().push([of_rows.flat.part(values), at]);
        });
        let group = |(rests, columns): (Vec<i64>, Vec<FactorLine>)| ColumnGroup {
            columns,
            depth: depths.remove(&rests).unwrap_or_default(),
        };
        Some(Product {
            starts: nest.each(&batch, |values| [nest.at.at(values), of_rows.flat.at(values), grid.part(values)]),
            rows: nest.each(&rows, |values| FactorLine { to: nest.at.part(values), from: of_rows.flat.part(values) }),
            groups: groups.into_iter().map(group).collect(),
            factors: [values_of(of_rows).into(), grid.values(values_of(of_columns))],
        })
    }

    /// Computes the products.
    pub(super) fn run(&self, to: &[AtomicU64], n_threads: usize, work: &EvaluationProgress) -> Result<(), Fault> {
        let (mut n_rows, mut n_columns) = (MOST_ROWS, MOST_COLUMNS);
        let n_blocks = |group: &ColumnGroup, n_rows, n_columns| {
            self.rows.len().div_ceil(n_rows) * group.columns.len().div_ceil(n_columns)
        };
        let n_tasks = |n_rows, n_columns| {
            self.starts.len() * self.groups.iter().map(|group| n_blocks(group, n_rows, n_columns)).sum::<usize>()
        };
        // Enough tasks that no thread waits long for the last one, but none so small that copies dominate.
        while n_threads > 1 && n_tasks(n_rows, n_columns) < 4 * n_threads && n_columns > MOST_COLUMNS / 4 {
            (n_rows, n_columns) = (n_rows / 2, n_columns / 2);
        }
        // First task of each group, for each of the starts.
        let mut n_before = 0;
        let mut firsts = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            firsts.push(n_before);
            n_before += n_blocks(group, n_rows, n_columns);
        }
        work.share(n_tasks(n_rows, n_columns), n_threads, || {
            let mut space =
                ScratchBuffers { rows: Vec::new(), columns: Vec::new(), sums: Vec::new(), counter: work.counter() };
            let firsts = &firsts;
            move |task| {
                let (start, task) = (self.starts[task / n_before], task % n_before);
                let at = firsts.partition_point(|first| *first <= task) - 1;
                let (group, task) = (&self.groups[at], task - firsts[at]);
                let n_strips = self.rows.len().div_ceil(n_rows);
                let rows = self.rows.chunks(n_rows).nth(task % n_strips).expect("a strip");
                let columns = group.columns.chunks(n_columns).nth(task / n_strips).expect("a strip");
                self.block(start, [rows, columns], &group.depth, &mut space, to);
                Ok(())
            }
        })
    }

    /// Computes a block of results.
    fn block(
        &self,
        [start, of_rows, of_columns]: [i64; 3],
        [rows, columns]: [&[FactorLine]; 2],
        depth: &[[i64; 2]],
        space: &mut ScratchBuffers,
        to: &[AtomicU64],
    ) {
        let [height, width] = pulp::Arch::new().dispatch(Panels);
        let n_columns = columns.len().next_multiple_of(width);
        space.sums.clear();
        space.sums.resize(rows.len().next_multiple_of(height) * n_columns, 0.0);
        for depth in depth.chunks(MOST_DEPTH) {
            let of_factor = |at: usize| depth.iter().map(|places| places[at]).collect::<Vec<_>>();
            copy(&mut space.rows, &self.factors[0], of_rows, rows, &of_factor(0), height);
            copy(&mut space.columns, &self.factors[1], of_columns, columns, &of_factor(1), width);
            pulp::Arch::new().dispatch(PanelUpdate {
                depth: depth.len(),
                rows: &space.rows,
                columns: &space.columns,
                sums: &mut space.sums,
                n_columns,
            });
            if space.counter.add((rows.len() * columns.len() * depth.len()) as u64).is_break() {
                return;
            }
        }
        for (row, sums) in rows.iter().zip(space.sums.chunks_exact(n_columns)) {
            for (column, sum) in columns.iter().zip(sums) {
                to[(start + row.to + column.to) as usize].store(sum.to_bits(), Ordering::Relaxed);
            }
        }
    }
}

/// Grid of the nonzero elements of a factor, periodic in each dimension, as when a transposed convolution
/// spreads its input. Zeros are neither copied nor multiplied.
struct NonzeroGrid {
    dimensions: Vec<ProductDimension>,
}

struct ProductDimension {
    place: Flat,
    extent: i64,
    /// First position with values, which repeat with the period.
    first: i64,
    period: i64,
    /// Stride in elements between adjacent grid points of the compacted factor.
    stride: i64,
}

impl NonzeroGrid {
    /// Finds the grid of a factor; dense if the `other` factor has values whose product with zero is not
    /// zero.
    fn of(nest: &ParallelNest<'_>, memory: &[Vec<f64>], load: &Load, other: &Load, batch: &[usize]) -> NonzeroGrid {
        let shape = &nest.program.buffer(load.buffer).shape;
        let dense = |(place, extent): (&Flat, &i64)| ProductDimension {
            place: place.clone(),
            extent: *extent,
            first: 0,
            period: 1,
            stride: 0,
        };
        let mut dimensions: Vec<ProductDimension> = load.subscripts.iter().zip(shape).map(dense).collect();
        let values = &memory[load.buffer.0 as usize];
        let sample = values.iter().step_by(values.len() / 1024 + 1);
        let n_sampled = sample.len();
        let has_zeros = 3 * sample.filter(|x| **x == 0.0).count() >= n_sampled;
        if has_zeros && memory[other.buffer.0 as usize].iter().all(|x| x.is_finite()) {
            for (dimension, has_values) in dimensions.iter_mut().zip(places_with_values(values, shape)) {
                let mut places = has_values.iter().enumerate().filter(|(_, has)| **has).map(|(at, _)| at);
                let Some(first) = places.next() else { continue };
                let period = places.fold(0, |period, at| common_divisor(period, at - first));
                // For a single position, the period is the extent, so that no multiple of it is reached.
                let period = if period == 0 { has_values.len() } else { period } as i64;
                if batch.iter().all(|axis| dimension.place.coefficients[*axis] % period == 0) {
                    (dimension.first, dimension.period) = (first as i64 % period, period);
                }
            }
        }
        let mut stride = 1;
        for dimension in dimensions.iter_mut().rev() {
            dimension.stride = stride;
            stride *= dimension.n_places();
        }
        NonzeroGrid { dimensions }
    }

    /// Whether the grid contains all positions.
    fn is_dense(&self) -> bool {
        self.dimensions.iter().all(|d| d.period == 1)
    }

    /// Offset of these axes between grid points, in each dimension.
    fn rests(&self, values: &[i64]) -> Vec<i64> {
        self.dimensions.iter().map(|d| d.place.part(values).rem_euclid(d.period)).collect()
    }

    /// Contribution of these axes to the position in the grid, without their offsets between points.
    fn part(&self, values: &[i64]) -> i64 {
        self.dimensions.iter().map(|d| d.stride * d.place.part(values).div_euclid(d.period)).sum()
    }

    /// Offsets of other axes with which these axes reach a grid point, and the position there without the
    /// contribution of the others.
    fn at(&self, values: &[i64]) -> (Vec<i64>, i64) {
        let mut position = 0;
        let rests = self.dimensions.iter().map(|d| {
            let behind = d.place.at(values) - d.first;
            let rest = (-behind).rem_euclid(d.period);
            position += d.stride * (behind + rest) / d.period;
            rest
        });
        (rests.collect(), position)
    }

    /// Elements at the grid points.
    fn values<'v>(&self, all: &'v [f64]) -> Cow<'v, [f64]> {
        let Some((last, outer)) = self.dimensions.split_last().filter(|_| !self.is_dense()) else { return all.into() };
        let mut values = Vec::with_capacity(self.dimensions.iter().map(|d| d.n_places() as usize).product());
        for (number, line) in all.chunks_exact(last.extent as usize).enumerate() {
            let mut number = number as i64;
            let is_of_grid = outer.iter().rev().all(|d| {
                let place = number % d.extent - d.first;
                number /= d.extent;
                place % d.period == 0
            });
            if is_of_grid {
                values.extend(line.iter().skip(last.first as usize).step_by(last.period as usize));
            }
        }
        values.into()
    }
}

impl ProductDimension {
    fn n_places(&self) -> i64 {
        (self.extent - self.first + self.period - 1) / self.period
    }
}

/// Whether there is a nonzero value at each position, by dimension.
fn places_with_values(values: &[f64], shape: &[i64]) -> Vec<Vec<bool>> {
    let mut places: Vec<Vec<bool>> = shape.iter().map(|extent| vec![false; *extent as usize]).collect();
    let Some((last, outer)) = places.split_last_mut() else { return places };
    for (number, line) in values.chunks_exact(last.len()).enumerate() {
        let mut any = false;
        for (has, x) in last.iter_mut().zip(line) {
            *has |= *x != 0.0;
            any |= *x != 0.0;
        }
        let mut number = number;
        for has in outer.iter_mut().rev().filter(|_| any) {
            let extent = has.len();
            has[number % extent] = true;
            number /= extent;
        }
    }
    places
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Scratch buffers of a thread.
struct ScratchBuffers<'a> {
    rows: Vec<f64>,
    columns: Vec<f64>,
    sums: Vec<f64>,
    counter: Counter<'a>,
}

/// Copies `[depth, lines]` of a factor into panels of `width` lines, `[panels, depth, width]`, padding the
/// last one with zeros.
fn copy(out: &mut Vec<f64>, from: &[f64], start: i64, lines: &[FactorLine], depth: &[i64], width: usize) {
    out.clear();
    out.resize(lines.len().next_multiple_of(width) * depth.len(), 0.0);
    // Traversing the reduction line by line touches the same cache lines again for each line, unless the
    // reduction is dense.
    let is_dense = depth.windows(2).filter(|pair| pair[1] - pair[0] == 1).count() > depth.len() / 2;
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (panel, lines) in out.chunks_exact_mut(width * depth.len()).zip(lines.chunks(width)) {
        // Adjacent lines are copied together.
        runs.clear();
        for (at, line) in lines.iter().enumerate() {
            match runs.last_mut() {
                Some((_, end)) if line.from - lines[*end - 1].from == 1 => *end = at + 1,
                _ => runs.push((at, at + 1)),
            }
        }
        if 4 * runs.len() <= lines.len() {
            for (panel, k) in panel.chunks_exact_mut(width).zip(depth) {
                for (first, end) in &runs {
                    let at = (start + lines[*first].from + k) as usize;
                    panel[*first..*end].copy_from_slice(&from[at..at + end - first]);
                }
            }
        } else if is_dense {
            for (at, line) in lines.iter().enumerate() {
                let start = start + line.from;
                for (panel, k) in panel.chunks_exact_mut(width).zip(depth) {
                    panel[at] = from[start.wrapping_add(*k) as usize];
                }
            }
        } else {
            for (panel, k) in panel.chunks_exact_mut(width).zip(depth) {
                let start = start + k;
                for (out, line) in panel.iter_mut().zip(lines) {
                    *out = from[start.wrapping_add(line.from) as usize];
                }
            }
        }
    }
}

/// Vectors of columns per row whose results stay in registers.
const VECTORS: usize = 3;

/// Number of rows whose results fit in registers, for vectors of eight numbers and for others.
const fn n_rows(lanes: usize) -> usize {
    if lanes == 8 { 8 } else { 4 }
}

/// Rows and columns of a panel on the current CPU.
struct Panels;

impl WithSimd for Panels {
    type Output = [usize; 2];

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> [usize; 2] {
        [n_rows(S::F64_LANES), VECTORS * S::F64_LANES]
    }
}

/// `sums += rows · columns`, both in panels.
struct PanelUpdate<'a> {
    depth: usize,
    rows: &'a [f64],
    columns: &'a [f64],
    /// Sums, row by row in whole panels.
    sums: &'a mut [f64],
    n_columns: usize,
}

impl WithSimd for PanelUpdate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        if S::F64_LANES == 8 {
            self.add::<S, { n_rows(8) }>(simd);
        } else {
            self.add::<S, { n_rows(4) }>(simd);
        }
    }
}

impl PanelUpdate<'_> {
    #[inline(always)]
    fn add<S: Simd, const ROWS: usize>(self, simd: S) {
        let width = VECTORS * S::F64_LANES;
        for (at, columns) in self.columns.chunks_exact(width * self.depth).enumerate() {
            let columns = S::as_simd_f64s(columns).0.as_chunks::<VECTORS>().0;
            let strips = self.sums.chunks_exact_mut(ROWS * self.n_columns);
            for (rows, sums) in self.rows.chunks_exact(ROWS * self.depth).zip(strips) {
                let mut added = [[simd.splat_f64s(0.0); VECTORS]; ROWS];
                for (row, column) in rows.as_chunks::<ROWS>().0.iter().zip(columns) {
                    for (x, added) in row.iter().zip(&mut added) {
                        let x = simd.splat_f64s(*x);
                        for (y, sum) in column.iter().zip(added) {
                            *sum = simd.mul_add_e_f64s(x, *y, *sum);
                        }
                    }
                }
                for (added, sums) in added.iter().zip(sums.chunks_exact_mut(self.n_columns)) {
                    let sums = S::as_mut_simd_f64s(&mut sums[at * width..(at + 1) * width]).0;
                    for (added, sum) in added.iter().zip(sums) {
                        *sum = simd.add_f64s(*sum, *added);
                    }
                }
            }
        }
    }
}
