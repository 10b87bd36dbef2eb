//! Matrix products of warpgroups: four warps whose tensor cores read operands from shared memory (`wgmma`).
//!
//! A warpgroup multiplies a tile of 64 rows by one of up to 256 columns. Each warp has 16 of the rows; for
//! each 8 columns, a thread holds the fragment of a [`TileProduct`]. A schedule therefore divides rows and
//! columns, and marks the loop over the steps:
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
//! Each operand is a [`SharedMatrix`] in shared memory, in rows of 128 bytes along the reduction (K-major);
//! f16 and bf16 may also be MN-major. Operand A of an f32 product that is not K-major reaches the tensor
//! cores through registers, which threads load, so that its 64 rows may lie in any order. For operands of
//! `wgmmax3`, shared memory holds the first 11 bits of each number and, after all of these, the remainders; a
//! store to such a buffer writes both.

use super::GpuKernel;
use super::tensor::{self, TileProduct, WARP};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Scope, Stmt, TensorProduct};

/// Number of warps of a warpgroup, adjacent along z.
pub const WARPS: i64 = 4;
/// Number of rows of a warpgroup's tile (the m of `wgmma`).
pub const ROWS: i64 = 64;
/// Maximum number of columns of a tile (the n of `wgmma`), a multiple of [`COLUMNS`].
pub const MOST_COLUMNS: i64 = 256;
/// Number of columns that one fragment of a tile covers.
pub const COLUMNS: i64 = 8;
/// Size in bytes of a row of an operand in shared memory.
pub const ROW_BYTES: i64 = 128;
/// Size in bytes of eight rows, the alignment of an operand. All writers store the 16-byte chunk `n` of row
/// `r` at `n ^ r` (the 128-byte swizzle), so that rows lie in different banks.
pub const SWIZZLED_BYTES: i64 = 8 * ROW_BYTES;

/// Warpgroup product as one thread sees it: two rows, each with the thread's columns of all parts of the
/// tile.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupProduct {
    /// Fragments, one for each eight columns.
    pub tiles: Vec<TileProduct>,
    /// Kind of the product.
    how: TensorProduct,
}

/// Operands of a warpgroup product.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpgroupFactors {
    /// Operand A.
    pub rows: RowFactor,
    /// Operand B, in shared memory.
    pub columns: SharedMatrix,
}

/// Operand A of a warpgroup product.
#[derive(Clone, Debug, PartialEq)]
pub enum RowFactor {
    /// Operand that tensor cores read from shared memory.
    Shared(SharedMatrix),
    /// Operand that threads load from a buffer into registers: positions of a thread's two rows, as functions
    /// of the reduction loop.
    Loaded(BufferId, [Index; 2]),
}

impl WarpgroupFactors {
    /// Buffers of operands A and B.
    pub fn buffers(&self) -> [BufferId; 2] {
        let (RowFactor::Shared(SharedMatrix { buffer, .. }) | RowFactor::Loaded(buffer, _)) = &self.rows;
        [*buffer, self.columns.buffer]
    }

    /// Whether operand A is loaded into registers.
    pub fn are_rows_loaded(&self) -> bool {
        matches!(self.rows, RowFactor::Loaded(..))
    }
}

/// Layout of an operand in shared memory, as `wgmma` matrix descriptors encode it.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedMatrix {
    /// Buffer in shared memory.
    pub buffer: BufferId,
    /// Position of the first element, which is the same for all threads of the warpgroup.
    pub first: Index,
    /// Stride in elements between groups of eight rows of 128 bytes. These are rows or columns of the tile in
    /// a K-major operand, reduction steps in an MN-major one.
    pub stride: i64,
    /// Stride in elements between the 128-byte rows of one reduction step in an MN-major operand; `None` for
    /// a K-major one.
    pub across: Option<i64>,
}

/// Arrangement of a block's threads in warpgroups.
#[derive(Clone, Copy, Debug)]
pub struct Groups {
    axes: [LoopId; 3],
    n_warps: i64,
}

impl Groups {
    /// Finds the warpgroups of a block's threads; `None` if the threads do not form any.
    pub fn of(threads: &[Option<(LoopId, i64)>; 3]) -> Option<Groups> {
        let [x, y] = tensor::warp(threads)?;
        let (z, n_warps) = threads[2].filter(|(_, n)| n % WARPS == 0)?;
        Some(Groups { axes: [x, y, z], n_warps })
    }

    /// Variable of the warp's index in its block.
    pub fn warp(&self) -> LoopId {
        self.axes[2]
    }

    /// Number of warps of a block.
    pub fn n_warps(&self) -> i64 {
        self.n_warps
    }
}

impl GroupProduct {
    /// Recognizes a warpgroup product: the loop's body is loops over parts, rows and columns, unrolled or
    /// not.
    ///
    /// # Errors
    /// The reason why the loop is not such a product.
    pub fn of(program: &Program, l: &Loop, how: TensorProduct) -> Result<GroupProduct, &'static str> {
        let updates = tensor::updates(program, l, MOST_COLUMNS / COLUMNS, how)?;
        if updates.is_empty() || updates.len() as i64 > 4 * MOST_COLUMNS / COLUMNS {
            return Err("four warps have 8 to 256 columns of a tile");
        }
        let tiles = updates.chunks(4).map(|tile| TileProduct::of_updates(program, l, tile, how));
        let tiles: Vec<TileProduct> = tiles.collect::<Result<_, _>>()?;
        let is_same =
            |t: &TileProduct| (t.sums.0, &t.rows, t.columns.0) == (tiles[0].sums.0, &tiles[0].rows, tiles[0].columns.0);
        if !tiles.iter().all(is_same) {
            return Err("all columns of a tile are multiplied by the same two rows");
        }
        if [tiles[0].rows.0, tiles[0].columns.0].iter().any(|b| !program.buffer(*b).scope.is_shared()) {
            return Err("four warps together multiply what is in shared memory (stage it as shared)");
        }
        Ok(GroupProduct { tiles, how })
    }

    /// Number of columns of the tile.
    pub fn n_columns(&self) -> i64 {
        self.tiles.len() as i64 * COLUMNS
    }

    /// Layouts of operands A and B, given the positions of elements in buffers.
    ///
    /// # Errors
    /// The reason why tensor cores cannot read them.
    pub fn factors(
        &self,
        program: &Program,
        groups: Groups,
        ranges: &Ranges,
        position: &dyn Fn(BufferId, &[Index]) -> Index,
    ) -> Result<WarpgroupFactors, &'static str> {
        let of = |buffer: BufferId, index: &[Index]| ranges.simplify(&position(buffer, index));
        let lines_of = |buffer: BufferId| {
            let dtype = program.buffer(buffer).dtype;
            let in_row = ROW_BYTES / dtype.bytes() as i64;
            let TileProduct { var: steps, steps: n_steps, .. } = self.tiles[0];
            Lines { buffer, in_row, is_half: dtype.is_half(), groups, steps, n_steps, ranges }
        };
        let (a, rows) = &self.tiles[0].rows;
        let rows = rows.each_ref().map(|index| of(*a, index));
        let of_rows = lines_of(*a);
        let rows = match self.how == TensorProduct::Wgmma && !of_rows.is_half && !of_rows.is_next(&rows[0]) {
            true if rows.iter().all(|row| of_rows.along(row, groups.axes[0], WARP[0], &|_| 0)) => {
                RowFactor::Loaded(*a, rows)
            }
            true => return Err("rows of a tile differ along thread.x"),
            false => RowFactor::Shared(of_rows.rows(&rows)?),
        };
        let b = self.tiles[0].columns.0;
        let columns: Vec<[Index; 2]> =
            self.tiles.iter().map(|t| t.columns.1.each_ref().map(|index| of(b, index))).collect();
        Ok(WarpgroupFactors { rows, columns: lines_of(b).columns(&columns)? })
    }

    /// Checks that the warpgroups of a kernel can compute the product together.
    pub(super) fn require_group(
        &self,
        program: &Program,
        kernel: &GpuKernel,
        ranges: &Ranges,
    ) -> Result<(), &'static str> {
        let groups = Groups::of(&kernel.threads);
        let groups = groups.ok_or("thread.z has no multiple of the 4 warps that multiply together")?;
        let position = |buffer: BufferId, index: &[Index]| {
            let strides = program.buffer(buffer).strides();
            index.iter().zip(&strides).fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(*stride)))
        };
        let Matrices { in_parts, .. } = Matrices::of(program, kernel);
        for buffer in self.factors(program, groups, ranges, &position)?.buffers() {
            let is_whole = |bytes: u64| bytes.is_multiple_of(SWIZZLED_BYTES as u64);
            let before = kernel.shared_sizes(program).take_while(|(b, _)| *b != buffer);
            if !is_whole(before.map(|(_, bytes)| bytes.unwrap_or(0)).sum()) {
                return Err("what is in shared memory before a matrix has no multiple of 1,024 bytes");
            }
            let b = program.buffer(buffer);
            let has_parts = b.scope == Scope::Shared || b.scope.is_produced();
            if in_parts.contains(&buffer) && !(has_parts && is_whole(b.size_bytes().unwrap_or(0))) {
                return Err("factors in two parts pass through registers or are fed, into multiples of 1,024 bytes");
            }
        }
        if kernel.body.iter().any(|stmt| reads_outside(stmt, &in_parts)) {
            return Err("what is in shared memory in two parts nothing reads but tensor cores");
        }
        Ok(())
    }
}

/// Rows and columns of an operand in shared memory, as positions of their elements in terms of the threads
/// and of the reduction loop.
struct Lines<'r> {
    buffer: BufferId,
    /// Number of elements in a row of 128 bytes.
    in_row: i64,
    is_half: bool,
    groups: Groups,
    steps: LoopId,
    n_steps: i64,
    ranges: &'r Ranges,
}

impl Lines<'_> {
    fn at(&self, index: &Index, var: LoopId, n: i64) -> Index {
        self.ranges.simplify(&index.substitute(var, &n.into()))
    }

    /// Whether the index at each of the first `n` values of a variable has the given distance from that at
    /// the first value.
    fn along(&self, index: &Index, var: LoopId, n: i64, distance: &dyn Fn(i64) -> i64) -> bool {
        let first = self.at(index, var, 0);
        (1..n).all(|i| self.at(index, var, i).sub(&first).as_const() == Some(distance(i)))
    }

    /// Whether, in each warpgroup, the given warp has this distance from the first one.
    fn is_warp_apart(&self, index: &Index, warp: i64, distance: i64) -> bool {
        let Groups { axes: [_, _, z], n_warps } = self.groups;
        (0..n_warps / WARPS).all(|group| {
            let [first, other] = [0, warp].map(|n| self.at(index, z, WARPS * group + n));
            self.ranges.simplify(&other.sub(&first)).as_const() == Some(distance)
        })
    }

    /// Whether the reduction steps of a line are adjacent in memory.
    fn is_next(&self, line: &Index) -> bool {
        self.along(line, self.steps, self.n_steps, &|n| n)
    }

    /// Whether each reduction step of a line lies in a separate row.
    fn is_across(&self, line: &Index) -> bool {
        self.is_half && self.along(line, self.steps, self.n_steps, &|n| n * self.in_row)
    }

    /// Matrix of a tile's rows, of which a thread has two.
    fn rows(&self, [row, other_row]: &[Index; 2]) -> Result<SharedMatrix, &'static str> {
        let Groups { axes: [x, y, z], n_warps } = self.groups;
        let to_other = self.at(other_row, z, 0).sub(&self.at(row, z, 0)).as_const();
        let to_other = to_other.ok_or("its rows are not a fixed distance apart")?;
        let is_across = self.is_across(row);
        let to_next = if is_across { 1 } else { self.in_row };
        // Divisions by the elements of a row are known for a fixed warp.
        let are_of_warp = |warp: i64| {
            let [own, other] = [row, other_row].map(|index| self.at(index, z, warp));
            self.along(&own, x, WARP[0], &|_| 0)
                && self.along(&own, y, WARP[1], &|n| n * to_next)
                && other.sub(&own).as_const() == Some(to_other)
        };
        let are_rows = (0..n_warps).all(are_of_warp)
            && (1..WARPS).all(|warp| self.is_warp_apart(row, warp, 2 * warp * to_other))
            && (!is_across || to_other == WARP[1]);
        if !are_rows {
            return Err("the rows of a tile do not lie one after the other, each of 128 bytes, 16 for each warp");
        }
        self.matrix(row, is_across, if is_across { 8 * self.in_row } else { to_other })
    }

    /// Matrix of a tile's columns, of which a thread has two of each part.
    fn columns(&self, columns: &[[Index; 2]]) -> Result<SharedMatrix, &'static str> {
        let [x, y, _] = self.groups.axes;
        let column = &columns[0][0];
        let is_across = self.is_across(column);
        let to_next = if is_across { 1 } else { self.in_row };
        let from_column = |index: &Index| index.sub(column).as_const();
        // Number of parts that are adjacent, and the distance between groups of them.
        let together = if is_across { self.in_row / COLUMNS } else { 1 };
        let apart = columns.get(together as usize).map_or(Some(8 * self.in_row), |[next, _]| from_column(next));
        let apart = apart.ok_or("its columns are not a fixed distance apart")?;
        let are_columns = columns.iter().zip(0..).all(|([first, second], part)| {
            let at = part / together * apart + part % together * COLUMNS;
            from_column(first) == Some(at) && from_column(second) == Some(at + to_next)
        });
        let are_columns = are_columns
            && self.along(column, x, WARP[0], &|n| 2 * n * to_next)
            && self.along(column, y, WARP[1], &|_| 0)
            && (1..WARPS).all(|warp| self.is_warp_apart(column, warp, 0));
        if !are_columns {
            return Err("the columns of a tile do not lie one after the other, each of 128 bytes, for all warps");
        }
        self.matrix(column, is_across, apart)
    }

    /// Returns the matrix that begins with this line. `apart` is the distance in elements from eight lines to
    /// the next eight or, in an MN-major operand, between rows of one step.
    fn matrix(&self, line: &Index, is_across: bool, apart: i64) -> Result<SharedMatrix, &'static str> {
        let Groups { axes: [x, y, z], n_warps } = self.groups;
        let (buffer, in_row, n_steps) = (self.buffer, self.in_row, self.n_steps);
        let eight_rows = 8 * in_row;
        if !(is_across || self.is_next(line)) || apart <= 0 || apart % eight_rows != 0 {
            return Err("the steps of a row do not lie next to each other, and eight rows in 1,024 bytes");
        }
        let line = [x, y, self.steps].iter().fold(line.clone(), |line, var| self.at(&line, *var, 0));
        // The first of the four warps determines where the matrix begins.
        let group = Index::from(z).floor_div(WARPS).scale(WARPS);
        let first = self.ranges.simplify(&line.substitute(z, &group));
        let (stride, across) = if is_across { (eight_rows, Some(apart)) } else { (apart, None) };
        // Divisions by the elements of a row are known for a fixed warpgroup.
        let mut of_groups = (0..n_warps / WARPS).map(|group| self.at(&line, z, WARPS * group).residue(eight_rows));
        let residue = of_groups.next().flatten();
        match residue.filter(|residue| of_groups.all(|other| other == Some(*residue))) {
            Some(0) => Ok(SharedMatrix { buffer, first, stride, across }),
            Some(at) if !is_across && at % n_steps == 0 && at + n_steps <= in_row => {
                Ok(SharedMatrix { buffer, first, stride, across })
            }
            _ => Err("a matrix does not begin at one of the parts of a row (unroll the loops over steps in it)"),
        }
    }
}

/// Buffers in shared memory that a kernel's warpgroup products read.
#[derive(Clone, Debug, Default)]
pub struct Matrices {
    /// All operands.
    pub all: Vec<BufferId>,
    /// Operands of 3xTF32 products, which hold each number in two parts: all high parts, then all low parts.
    pub in_parts: Vec<BufferId>,
}

impl Matrices {
    /// Finds the operands of a kernel in shared memory.
    pub fn of(program: &Program, kernel: &GpuKernel) -> Matrices {
        Matrices {
            all: factors(program, kernel, &TensorProduct::is_of_groups),
            in_parts: factors(program, kernel, &|how| how == TensorProduct::Wgmmax3),
        }
    }
}

/// Shared buffers that tensor cores read directly in products of the kinds that `is` accepts.
fn factors(program: &Program, kernel: &GpuKernel, is: &dyn Fn(TensorProduct) -> bool) -> Vec<BufferId> {
    let mut found = Vec::new();
    for stmt in &kernel.body {
        stmt.walk(&mut |stmt| {
            if let Stmt::For(l) = stmt
                && let LoopKind::Tensor(how) = l.kind
                && is(how)
            {
                stmt.walk(&mut |inner| {
                    inner.for_each_own_read(&mut |b, _| {
                        if program.buffer(b).scope.is_shared() && !found.contains(&b) {
                            found.push(b);
                        }
                    });
                });
            }
        });
    }
    found.sort_unstable();
    found
}

/// Whether anything other than warpgroup products reads one of these buffers.
pub(super) fn reads_outside(stmt: &Stmt, buffers: &[BufferId]) -> bool {
    if let Stmt::For(l) = stmt
        && let LoopKind::Tensor(how) = l.kind
        && how.is_of_groups()
    {
        return false;
    }
    let mut reads = false;
    stmt.for_each_own_read(&mut |b, _| reads |= buffers.contains(&b));
    let mut inside: Vec<&Stmt> = Vec::new();
    match stmt {
        Stmt::For(l) => inside.extend(&l.body),
        Stmt::If { then, otherwise, .. } => inside.extend(then.iter().chain(otherwise)),
        _ => {}
    }
    reads || inside.into_iter().any(|stmt| reads_outside(stmt, buffers))
}
