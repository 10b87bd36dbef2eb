//! Bulk stores of boxes, which a warp writes to shared memory and the GPU's TMA unit copies to an array.
//!
//! A loop marked `tma` iterates over the eight-column parts of a warp's fragment of a product's tile, which
//! has 16 rows of 128 bytes. In each part, a thread has two adjacent elements in each of two rows:
//!
//! ```text
//! thread.z w in 4 {
//!   thread.y y in 8 {
//!     thread.x x in 4 {
//!       tma t in 8 {
//!         unrolled i in 2 {
//!           vectorized j in 2 { C[16*w + 8*i + y, 8*t + 2*x + j] = C.r[16*w + 8*i + y, 8*t + 2*x + j] }
//!         }
//!       }
//!     }
//!   }
//! }
//! ```
//!
//! Such a loop only says what each thread stores. On sm_90a, in kernels with a [producer
//! warp](super::producer_warp), each warp has [`SLOTS`] staging boxes in shared memory after all buffers;
//! elsewhere, the loop is unrolled.

use super::bulk::TensorMap;
use super::tensor::{self, WARP};
use super::warpgroup::{COLUMNS, ROW_BYTES, ROWS, SWIZZLED_BYTES, WARPS};
use super::{GpuKernel, GpuProgram, producer_warp};
use crate::dtype::DType;
use crate::expr::Expr;
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Role, Scope, Stmt, TensorProduct};

/// Number of staging boxes of a warp in shared memory: one is filled while the other is stored.
pub const SLOTS: i64 = 2;
/// Number of rows of a staging box.
pub const BOX_ROWS: i64 = ROWS / WARPS;
/// Size in bytes of a staging box.
pub const BOX_BYTES: i64 = BOX_ROWS * ROW_BYTES;
/// Required divisor of the strides in bytes of all dimensions of an array but the last.
const LEAST_BYTES: i64 = 16;

/// Bulk store of a warp's box.
#[derive(Clone, Debug, PartialEq)]
pub struct BoxStore {
    /// Subscripts of the box's first element in the array.
    pub place: Vec<Index>,
    /// Array and box, as a TMA descriptor.
    pub map: TensorMap,
    /// Loops over two adjacent elements, one loop for each of a thread's two rows, each around a store.
    pub rows: [Loop; 2],
}

/// Number of eight-column parts in a row of 128 bytes.
pub fn parts(dtype: DType) -> i64 {
    ROW_BYTES / (COLUMNS * dtype.bytes() as i64)
}

/// Checks that a loop stores the parts of a warp's fragment.
///
/// # Errors
/// The reason why the loop is not such a store.
pub fn check(program: &Program, l: &Loop) -> Result<(), &'static str> {
    nest(program, l).map(drop)
}

/// Finds the loops over two adjacent elements of a thread's two rows, each around a store, and the array.
fn nest(program: &Program, l: &Loop) -> Result<([Loop; 2], BufferId), &'static str> {
    let n_of = |l: &Loop| l.extent.as_const();
    let rows: Vec<Stmt> = match l.body.as_slice() {
        [Stmt::For(rows)] if n_of(rows) == Some(BOX_ROWS / WARP[1]) => {
            let of = |at: i64| rows.body.iter().map(move |s| s.substitute(rows.var, &Index::from(at)));
            of(0).chain(of(1)).collect()
        }
        all => all.to_vec(),
    };
    let neighbours = |stmt: Stmt| match stmt {
        Stmt::For(l) if n_of(&l) == Some(WARP[1] / WARP[0]) && stored(&l).is_some() => Some(l),
        _ => None,
    };
    let rows: Option<Vec<Loop>> = rows.into_iter().map(neighbours).collect();
    let rows: Option<[Loop; 2]> = rows.and_then(|rows| rows.try_into().ok());
    let rows = rows.ok_or("two rows of two neighbours that are stored stand in it")?;
    let arrays = rows.each_ref().map(|l| stored(l).map(|(buffer, ..)| buffer));
    let [Some(array), other] = arrays else { unreachable!("the loops are around stores") };
    let a = program.buffer(array);
    if other != Some(array) || a.role == Role::Temporary && a.scope != Scope::Global {
        return Err("what it stores to is no array in the device's memory");
    }
    if !matches!(a.dtype, DType::F32 | DType::F16 | DType::Bf16) {
        return Err("numbers of f32, f16 or bf16 are stored so");
    }
    if n_of(l) != Some(parts(a.dtype)) {
        return Err("its parts of eight columns are not 128 bytes");
    }
    Ok((rows, array))
}

/// Store that is the only statement of a loop: buffer, subscripts and value.
pub fn stored(l: &Loop) -> Option<(BufferId, &[Index], &Expr)> {
    match l.body.as_slice() {
        [Stmt::Store { buffer, index, value }] => Some((*buffer, index, value)),
        _ => None,
    }
}

impl BoxStore {
    /// Recognizes the box that a warp stores; `x` and `y` are the variables of its threads.
    ///
    /// # Errors
    /// The reason why the loop is not such a store.
    pub fn of(program: &Program, l: &Loop, [x, y]: [LoopId; 2], ranges: &Ranges) -> Result<BoxStore, &'static str> {
        let (rows, array) = nest(program, l)?;
        let a = program.buffer(array);
        let bytes = a.dtype.bytes() as i64;
        if a.shape.len() < 2 {
            return Err("what it stores to has no rows");
        }
        if a.strides().iter().rev().skip(1).any(|stride| stride * bytes % LEAST_BYTES != 0) {
            return Err("rows of what it stores to do not begin at multiples of 16 bytes");
        }
        let mut ranges = ranges.clone();
        [l, &rows[0], &rows[1]].iter().for_each(|l| ranges.push(l.var, l.extent.clone()));
        let inside = [l.var, rows[0].var, x, y];
        let indices = rows.each_ref().map(|row| stored(row).expect("invariant: a store is in it").1);
        let first = |i: &Index| inside.iter().fold(i.clone(), |i, var| i.substitute(*var, &0.into()));
        let place: Vec<Index> = indices[0].iter().map(|i| ranges.simplify(&first(i))).collect();
        let mut extents = vec![1; place.len()];
        for (index, (row, at)) in indices.into_iter().zip(rows.iter().zip(0..)) {
            let columns = [(l.var, COLUMNS), (x, WARP[1] / WARP[0]), (row.var, 1)];
            let along = columns.iter().fold(Index::from(0), |sum, (var, n)| sum.add(&Index::from(*var).scale(*n)));
            let across = Index::from(y).offset(WARP[1] * at);
            for (dimension, (i, first)) in index.iter().zip(&place).enumerate() {
                let beyond = i.sub(first);
                let is = |expected: &Index| ranges.simplify(&beyond.sub(expected)).as_const() == Some(0);
                let extent = match dimension + 1 == place.len() {
                    true if is(&along) => ROW_BYTES / bytes,
                    false if is(&across) => BOX_ROWS,
                    false if is(&Index::from(0)) => 1,
                    _ => return Err("the threads of a warp do not store rows of a box"),
                };
                if at > 0 && extents[dimension] != extent {
                    return Err("the threads of a warp do not store rows of a box");
                }
                extents[dimension] = extent;
            }
        }
        if extents[..place.len() - 1].iter().filter(|n| **n == BOX_ROWS).count() != 1 {
            return Err("the threads of a warp do not store 16 rows");
        }
        Ok(BoxStore { place, map: TensorMap { array, extents, swizzled: true, rounded: false }, rows })
    }
}

/// Whether a statement is a loop over the parts of such a box.
fn is_store(stmt: &Stmt) -> Option<&Loop> {
    match stmt {
        Stmt::For(l) if l.kind == LoopKind::Tensor(TensorProduct::Tma) => Some(l),
        _ => None,
    }
}

/// Bytes of shared memory for the staging boxes of all warps of a kernel, aligned to [`SWIZZLED_BYTES`]; 0
/// without bulk stores.
pub fn staged_bytes(kernel: &GpuKernel) -> u64 {
    let mut stores = false;
    kernel.body.iter().for_each(|stmt| stmt.walk(&mut |s| stores |= is_store(s).is_some()));
    let n_warps = (producer_warp::n_teams(kernel) * kernel.block()[2]) as u64;
    if stores { n_warps * (SLOTS * BOX_BYTES) as u64 } else { 0 }
}

/// Offset of the staging boxes in shared memory, after `bytes` of other buffers.
pub fn place(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(SWIZZLED_BYTES as u64).unwrap_or(u64::MAX)
}

/// Tensor maps of all bulk stores of a kernel.
pub(super) fn maps(gpu: &GpuProgram, kernel: &GpuKernel) -> Vec<TensorMap> {
    let mut found = Vec::new();
    if let Some(warp) = tensor::warp(&kernel.threads) {
        gather(&gpu.program, &kernel.body, warp, &mut kernel.ranges(), &mut found);
    }
    found
}

fn gather(program: &Program, block: &[Stmt], warp: [LoopId; 2], ranges: &mut Ranges, out: &mut Vec<TensorMap>) {
    for stmt in block {
        if let Some(l) = is_store(stmt) {
            let store = BoxStore::of(program, l, warp, ranges);
            out.extend(store.map(|store| store.map).ok().filter(|map| !out.contains(map)));
            continue;
        }
        stmt.each_block(ranges, |block, ranges| gather(program, block, warp, ranges, out));
    }
}
