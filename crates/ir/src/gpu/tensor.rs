//! Tile products computed by tensor cores.
//!
//! Tensor cores multiply a tile of 16 rows by one of 8 columns, 8 reduction steps at a time, or 16 for 16-bit
//! operands. Each of the 32 threads of a warp has four sums: thread `(x, y)` of 4 × 8 has rows `y` and
//! `y + 8` of columns `2·x` and `2·x + 1`. A schedule therefore divides rows and columns, binds `x` and `y`,
//! and marks the loop over the steps:
//!
//! ```text
//! thread.y y in 8 {
//!   thread.x x in 4 {
//!     tf32x3 k in 8 {
//!       unrolled i in 2 {
//!         unrolled j in 2 { C.r[8*i + y, 2*x + j] += A.s[8*i + y, k] * B.s[k, 2*x + j] first never }
//!       }
//!     }
//!   }
//! }
//! ```
//!
//! Such a loop only says what each thread computes. The code generator decides which operand elements each
//! thread of the warp loads.

use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, Program, Stmt, TensorProduct};

/// Size in bytes of a tile along the reduction.
const STEP_BYTES: i64 = 32;

/// Reduction steps of one instruction (the k of `mma.sync`) for operands of a type.
pub fn steps(dtype: DType) -> i64 {
    STEP_BYTES / dtype.bytes() as i64
}

/// Layout of a warp's threads: 4 along x, 8 along y.
pub const WARP: [i64; 2] = [4, 8];

/// Tile product of a warp as one thread sees it: its fragments, and the loop over the reduction steps.
#[derive(Clone, Debug, PartialEq)]
pub struct TileProduct {
    /// Variable of the loop over the reduction steps.
    pub var: LoopId,
    /// Number of reduction steps, the loop's extent.
    pub steps: i64,
    /// Accumulators of the thread, row by row: two columns of two rows.
    pub sums: (BufferId, [Vec<Index>; 4]),
    /// Elements of operand A: of the thread's two rows.
    pub rows: (BufferId, [Vec<Index>; 2]),
    /// Elements of operand B: of the thread's two columns.
    pub columns: (BufferId, [Vec<Index>; 2]),
}

impl TileProduct {
    /// Recognizes a tile product: the loop's body is loops over rows and columns, unrolled or not.
    ///
    /// # Errors
    /// The reason why the loop is not such a product.
    pub fn of(program: &Program, l: &Loop, how: TensorProduct) -> Result<TileProduct, &'static str> {
        TileProduct::of_updates(program, l, &updates(program, l, 2, how)?, how)
    }

    /// Recognizes the product in a loop with these updates.
    pub(super) fn of_updates(
        program: &Program,
        l: &Loop,
        updates: &[Update],
        how: TensorProduct,
    ) -> Result<TileProduct, &'static str> {
        let [a, b, c, d] = updates else {
            return Err("a thread has two rows and two columns of a tensor core's tile");
        };
        let in_order = [a, b, c, d].map(Update::clone);
        let swapped = in_order.clone().map(Update::swapped);
        let is_tile = |[a, b, c, d]: &[Update; 4]| {
            [b, c, d].iter().all(|u| u.buffers == a.buffers)
                && (&a.row, &c.row, &a.column, &b.column) == (&b.row, &d.row, &c.column, &d.column)
        };
        let updates = [in_order, swapped].into_iter().find(is_tile);
        let updates = updates.ok_or("it is no product of two rows and two columns")?;
        let [a, b, c, _] = &updates;
        let (sums, rows, columns) = a.buffers;
        let factor = factor(program, a, how)?;
        if updates.iter().any(|u| u.sum.iter().any(|i| i.uses(l.var))) {
            return Err("a sum has one place for all steps");
        }
        Ok(TileProduct {
            var: l.var,
            steps: steps(factor),
            sums: (sums, updates.each_ref().map(|u| u.sum.clone())),
            rows: (rows, [a.row.clone(), c.row.clone()]),
            columns: (columns, [a.column.clone(), b.column.clone()]),
        })
    }

    /// Checks that the threads of a warp can compute the product together.
    pub(super) fn require_warp(
        &self,
        x: LoopId,
        y: LoopId,
        program: &Program,
        ranges: &Ranges,
    ) -> Result<(), &'static str> {
        let uses = |index: &[Index], var: LoopId| index.iter().any(|i| ranges.simplify(i).uses(var));
        if self.rows.1.iter().any(|index| uses(index, x)) {
            return Err("factors of rows differ along thread.x");
        }
        if self.columns.1.iter().any(|index| uses(index, y)) {
            return Err("factors of columns differ along thread.y");
        }
        let [first, second] = &self.columns.1;
        let strides = program.buffer(self.columns.0).strides();
        let flat = |index: &[Index]| {
            index.iter().zip(&strides).fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(*stride)))
        };
        match ranges.simplify(&flat(second).sub(&flat(first))).as_const() {
            Some(_) => Ok(()),
            None => Err("a thread's two columns are not a fixed distance apart"),
        }
    }
}

/// Update of one sum by the product of a factor of its row and a factor of its column.
#[derive(Clone)]
pub(super) struct Update {
    buffers: (BufferId, BufferId, BufferId),
    sum: Vec<Index>,
    row: Vec<Index>,
    column: Vec<Index>,
}

impl Update {
    /// Exchanges the two factors, for programs that write the column's factor first.
    fn swapped(self) -> Update {
        let Update { buffers: (sum, first, second), sum: index, row, column } = self;
        Update { buffers: (sum, second, first), sum: index, row: column, column: row }
    }
}

/// Element types of the factors of a kind of tensor core product.
fn factors(how: TensorProduct) -> &'static [DType] {
    match how {
        TensorProduct::Tf32 | TensorProduct::Tf32x3 | TensorProduct::Wgmmax3 => &[DType::F32],
        TensorProduct::Halves => &[DType::F16, DType::Bf16],
        TensorProduct::Wgmma => &[DType::F32, DType::F16, DType::Bf16],
        TensorProduct::Dot4 | TensorProduct::Dot2 | TensorProduct::Tma => &[],
    }
}

/// Lists the updates of a loop over steps, inner loops unrolled, each of at most `most` iterations.
pub(super) fn updates(program: &Program, l: &Loop, most: i64, how: TensorProduct) -> Result<Vec<Update>, &'static str> {
    let require_steps = |of: &[DType]| match of {
        _ if of.iter().any(|dtype| l.extent.as_const() == Some(steps(*dtype))) => Ok(()),
        [first, ..] if first.is_half() => Err("a tensor core takes 16 steps of a sum of halves at a time"),
        _ => Err("a tensor core takes 8 steps of a sum at a time"),
    };
    require_steps(factors(how))?;
    let mut updates = Vec::new();
    repeat(&l.body, most, &mut updates)?;
    require_steps(&[factor(program, updates.first().ok_or(NO_PRODUCT)?, how)?])?;
    Ok(updates)
}

/// Checks that tensor cores can compute an update as `how`, and returns the type of its factors.
fn factor(program: &Program, update: &Update, how: TensorProduct) -> Result<DType, &'static str> {
    let (sums, rows, columns) = update.buffers;
    let dtype_of = |b: BufferId| program.buffers.get(b.0 as usize).map(|b| b.dtype);
    let [of_rows, of_columns, of_sums] = [rows, columns, sums].map(dtype_of);
    let fits = |dtype: &DType| factors(how).contains(dtype) && of_columns == of_rows && of_sums == Some(DType::F32);
    of_rows.filter(fits).ok_or(match how {
        TensorProduct::Halves => "the factors of this product are halves of one type, and its sums in single precision",
        TensorProduct::Wgmma => {
            "the factors of this product are of one type, halves or in single precision as its sums"
        }
        TensorProduct::Tf32
        | TensorProduct::Tf32x3
        | TensorProduct::Wgmmax3
        | TensorProduct::Dot4
        | TensorProduct::Dot2
        | TensorProduct::Tma => "the factors and sums of this product are in single precision",
    })
}

const NO_PRODUCT: &str = "only sums of products of two elements each, begun before, may stand in it";

fn repeat(block: &[Stmt], most: i64, out: &mut Vec<Update>) -> Result<(), &'static str> {
    for stmt in block {
        match stmt {
            Stmt::For(l) => {
                let n = l.extent.as_const().filter(|n| (0..=most).contains(n));
                let n = n.ok_or("a loop inside has more iterations than an instruction has rows or columns")?;
                for at in 0..n {
                    let body: Vec<Stmt> = l.body.iter().map(|s| s.substitute(l.var, &Index::from(at))).collect();
                    repeat(&body, most, out)?;
                }
            }
            Stmt::Update { buffer, index, op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, a, b), first } => {
                let (Expr::Load(a, row), Expr::Load(b, column)) = (&**a, &**b) else { return Err(NO_PRODUCT) };
                if *first != Cond::Not(Box::new(Cond::True)) {
                    return Err(NO_PRODUCT);
                }
                let (sum, row, column) = (index.clone(), row.clone(), column.clone());
                out.push(Update { buffers: (*buffer, *a, *b), sum, row, column });
            }
            Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Store { .. } | Stmt::Update { .. } => return Err(NO_PRODUCT),
            Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => return Err(NO_PRODUCT),
        }
    }
    Ok(())
}

/// Variables of a warp's threads along x and y; `None` if the block's threads are not arranged as [`WARP`].
pub fn warp(threads: &[Option<(LoopId, i64)>; 3]) -> Option<[LoopId; 2]> {
    match threads {
        [Some((x, nx)), Some((y, ny)), _] if [*nx, *ny] == WARP => Some([*x, *y]),
        _ => None,
    }
}
