//! Products of tiles that four warps compute together, of factors that tensor cores read from shared memory
//! by themselves.
//!
//! Four warps multiply a tile of 64 rows by one of up to 256 columns. Each has 16 of the rows, and its
//! threads have of these, and of each 8 columns, what they have of a [`TileProduct`]. So a schedule divides
//! rows and columns, and marks the loop over the steps:
//!
//! ```text
//! thread.z w in 4 {
//!   thread.y y in 8 {
//!     thread.x x in 4 {
//!       wgmma k in 8 {
//!         unrolled t in 16 {
//!           unrolled i in 2 {
//!             unrolled j in 2 {
//!               C.r[16*w + 8*i + y, 8*t + 2*x + j] += A.s[16*w + 8*i + y, k] * B.s[8*t + 2*x + j, k]
//!             }
//!           }
//!         }
//!       }
//!     }
//!   }
//! }
//! ```
//!
//! Each factor is a [`Matrix`] in shared memory, in rows of 128 bytes.

use super::tensor::{self, TileProduct, WARP};
use super::{GpuProgram, Kernel};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Stmt, Tensor};

/// Warps that compute a product together: threads next to each other along z.
pub const WARPS: i64 = 4;
/// Rows of a tile.
pub const ROWS: i64 = 64;
/// Columns of a tile at most, a multiple of [`COLUMNS`].
pub const MOST_COLUMNS: i64 = 256;
/// Columns of the parts of a tile.
pub const COLUMNS: i64 = 8;
/// Bytes of a row of a matrix.
pub const ROW_BYTES: i64 = 128;
/// Bytes of eight rows, which a matrix begins at a multiple of. The tensor cores take the 16 bytes `n` of row
/// `r` of these for the 16 bytes `n ^ r`, and so do all who write them: then rows lie in different banks.
pub const SWIZZLED_BYTES: i64 = 8 * ROW_BYTES;

/// What one thread computes of such a product: the same rows with each eight columns.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupProduct {
    /// Its parts, each of two columns.
    pub tiles: Vec<TileProduct>,
}

/// How a factor lies in shared memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Its buffer.
    pub buffer: BufferId,
    /// The position of its first element, which is the same for all threads of the four warps.
    pub first: Index,
    /// Elements from eight of its rows, or columns, to the next eight.
    pub stride: i64,
}

/// The threads of a block, in groups of four warps.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    axes: [LoopId; 3],
    n_warps: i64,
}

impl Groups {
    /// Those of a kernel, where its threads are in such groups.
    pub fn of(threads: &[Option<(LoopId, i64)>; 3]) -> Option<Groups> {
        let [x, y] = tensor::warp(threads)?;
        let (z, n_warps) = threads[2].filter(|(_, n)| n % WARPS == 0)?;
        Some(Groups { axes: [x, y, z], n_warps })
    }
}

impl GroupProduct {
    /// That of a loop whose body is loops over parts, rows and columns, or what they are once they are
    /// repeated.
    ///
    /// # Errors
    /// In which way it is none.
    pub fn of(program: &Program, l: &Loop) -> Result<GroupProduct, &'static str> {
        let updates = tensor::updates(l, MOST_COLUMNS / COLUMNS, Tensor::Wgmma)?;
        if updates.is_empty() || updates.len() as i64 > 4 * MOST_COLUMNS / COLUMNS {
            return Err("four warps have 8 to 256 columns of a tile");
        }
        let tiles = updates.chunks(4).map(|tile| TileProduct::of_updates(program, l, tile, Tensor::Wgmma));
        let tiles: Vec<TileProduct> = tiles.collect::<Result<_, _>>()?;
        let is_same =
            |t: &TileProduct| (t.sums.0, &t.rows, t.columns.0) == (tiles[0].sums.0, &tiles[0].rows, tiles[0].columns.0);
        if !tiles.iter().all(is_same) {
            return Err("all columns of a tile are multiplied by the same two rows");
        }
        if [tiles[0].rows.0, tiles[0].columns.0].iter().any(|b| !program.buffer(*b).scope.is_shared()) {
            return Err("four warps together multiply what is in shared memory (stage it as shared)");
        }
        Ok(GroupProduct { tiles })
    }

    /// Columns of the tile.
    pub fn n_columns(&self) -> i64 {
        self.tiles.len() as i64 * COLUMNS
    }

    /// How the factors of rows and of columns lie, where positions in buffers are these.
    ///
    /// # Errors
    /// In which way tensor cores cannot read them.
    pub fn matrices(
        &self,
        program: &Program,
        groups: Groups,
        ranges: &Ranges,
        position: &dyn Fn(BufferId, &[Index]) -> Index,
    ) -> Result<[Matrix; 2], &'static str> {
        let Groups { axes: [x, y, z], n_warps } = groups;
        let steps = self.tiles[0].var;
        let of = |buffer: BufferId, index: &[Index]| ranges.simplify(&position(buffer, index));
        let at = |index: &Index, var: LoopId, n: i64| ranges.simplify(&index.substitute(var, &n.into()));
        // In each group of warps, from one warp to another.
        let from_first = |index: &Index, warp: i64, distance: i64| {
            (0..n_warps / WARPS).all(|group| {
                let [first, other] = [0, warp].map(|n| at(index, z, WARPS * group + n));
                ranges.simplify(&other.sub(&first)).as_const() == Some(distance)
            })
        };
        let along = |index: &Index, var: LoopId, n: i64, distance: &dyn Fn(i64) -> i64| {
            let first = at(index, var, 0);
            (1..n).all(|i| at(index, var, i).sub(&first).as_const() == Some(distance(i)))
        };

        let (a, rows) = &self.tiles[0].rows;
        let [row, other_row] = rows.each_ref().map(|index| of(*a, index));
        let to_next = other_row.sub(&row).as_const().ok_or("its rows are not a fixed distance apart")?;
        let bytes = |buffer: BufferId| program.buffer(buffer).dtype.bytes() as i64;
        let in_row = ROW_BYTES / bytes(*a);
        let are_rows = along(&row, x, WARP[0], &|_| 0)
            && along(&row, y, WARP[1], &|n| n * in_row)
            && (1..WARPS).all(|warp| from_first(&row, warp, 2 * warp * to_next));
        if !are_rows {
            return Err("the rows of a tile do not lie one after the other, each of 128 bytes, 16 for each warp");
        }
        let b = self.tiles[0].columns.0;
        let columns: Vec<[Index; 2]> =
            self.tiles.iter().map(|t| t.columns.1.each_ref().map(|index| of(b, index))).collect();
        let column = &columns[0][0];
        let in_column = ROW_BYTES / bytes(b);
        let from_column = |index: &Index| index.sub(column).as_const();
        let of_parts = columns.get(1).map_or(Some(8 * in_column), |[next, _]| from_column(next));
        let of_parts = of_parts.ok_or("its columns are not a fixed distance apart")?;
        let are_columns = columns.iter().zip(0..).all(|([first, second], part)| {
            from_column(first) == Some(part * of_parts) && from_column(second) == Some(part * of_parts + in_column)
        });
        let are_columns = are_columns
            && along(column, x, WARP[0], &|n| 2 * n * in_column)
            && along(column, y, WARP[1], &|_| 0)
            && (1..WARPS).all(|warp| from_first(column, warp, 0));
        if !are_columns {
            return Err("the columns of a tile do not lie one after the other, each of 128 bytes, for all warps");
        }
        let matrix = |buffer: BufferId, line: &Index, stride: i64| {
            let eight_rows = SWIZZLED_BYTES / bytes(buffer);
            let n_steps = self.tiles[0].steps;
            if !along(line, steps, n_steps, &|n| n) || stride <= 0 || stride % eight_rows != 0 {
                return Err("the steps of a row do not lie next to each other, and eight rows in 1,024 bytes");
            }
            // The first of the four warps says where it begins.
            let group = Index::from(z).floor_div(WARPS).scale(WARPS);
            let first = line.substitute(z, &group);
            let first = [(x, 0), (y, 0), (steps, 0)].iter().fold(first, |line, (var, n)| at(&line, *var, *n));
            match first.residue(eight_rows) {
                Some(at) if at % n_steps == 0 && at + n_steps <= ROW_BYTES / bytes(buffer) => {
                    Ok(Matrix { buffer, first, stride })
                }
                _ => Err("a matrix does not begin at one of the parts of a row (unroll the loops over steps in it)"),
            }
        };
        Ok([matrix(*a, &row, to_next)?, matrix(b, column, of_parts)?])
    }

    /// Whether groups of warps of a kernel may compute it together.
    pub(super) fn require_group(
        &self,
        program: &Program,
        kernel: &Kernel,
        ranges: &Ranges,
    ) -> Result<(), &'static str> {
        let groups = Groups::of(&kernel.threads);
        let groups = groups.ok_or("thread.z has no multiple of the 4 warps that multiply together")?;
        let position = |buffer: BufferId, index: &[Index]| {
            let strides = program.buffer(buffer).strides();
            index.iter().zip(&strides).fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(*stride)))
        };
        for Matrix { buffer, .. } in self.matrices(program, groups, ranges, &position)? {
            let before = kernel.shared.iter().take_while(|b| **b != buffer);
            let sizes = before.map(|b| program.buffer(*b).size_bytes().unwrap_or(0) as i64);
            if sizes.sum::<i64>() % SWIZZLED_BYTES != 0 {
                return Err("what is in shared memory before a matrix has no multiple of 1,024 bytes");
            }
        }
        Ok(())
    }
}

/// The buffers of a kernel that four warps read together.
pub fn matrices(gpu: &GpuProgram, kernel: &Kernel) -> Vec<BufferId> {
    let mut found = Vec::new();
    for stmt in &kernel.body {
        stmt.walk(&mut |stmt| {
            if let Stmt::For(l) = stmt
                && l.kind == LoopKind::Tensor(Tensor::Wgmma)
                && let Ok(product) = GroupProduct::of(&gpu.program, l)
            {
                found.extend([product.tiles[0].rows.0, product.tiles[0].columns.0]);
            }
        });
    }
    found.sort_unstable();
    found.dedup();
    found
}
