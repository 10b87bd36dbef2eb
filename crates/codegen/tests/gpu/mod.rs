//! Handwritten GPU kernels.

use std::slice::from_ref;

use tilewright_ir::expr::{Cond, Expr};
use tilewright_ir::gpu::{GpuKernel, GpuProgram};
use tilewright_ir::{BufferId, DType, Index, LoopId, Scope, Stmt};

use crate::common::*;

/// Matrix product `[m, k] · [k, n]`, with one tile of the result per block.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub m: i64,
    pub n: i64,
    pub k: i64,
    /// Tile of a block: rows, columns, and reduction steps in shared memory at a time.
    pub block: [i64; 3],
    /// Tile of a thread.
    pub thread: [i64; 2],
    /// Number of adjacent elements loaded and stored at once.
    pub vector: i64,
}

impl Product {
    pub fn threads(&self) -> [i64; 2] {
        [self.block[0] / self.thread[0], self.block[1] / self.thread[1]]
    }

    pub fn program(&self) -> GpuProgram {
        let Product { m, n, k, block: [bm, bn, bk], thread: [tm, tn], vector: w } = *self;
        let [ny, nx] = self.threads();
        let n_threads = ny * nx;
        let mut p = program(&format!("{self:?}"));
        let a = input(&mut p, "A", DType::F32, &[m, k]);
        let b = input(&mut p, "B", DType::F32, &[k, n]);
        let c = output(&mut p, "C", DType::F32, &[m, n]);
        let a_shared = temporary(&mut p, "As", DType::F32, &[bk, bm], Scope::Shared);
        let b_shared = temporary(&mut p, "Bs", DType::F32, &[bk, bn], Scope::Shared);
        let sums = temporary(&mut p, "sums", DType::F32, &[tm, tn], Scope::Register);
        let rows = temporary(&mut p, "rows", DType::F32, &[tm], Scope::Register);
        let columns = temporary(&mut p, "columns", DType::F32, &[tn], Scope::Register);
        let [by, bx, t] = ["by", "bx", "t"].map(|name| p.add_loop(name));
        let [ko, ki, i, j, l, copy] = ["ko", "ki", "i", "j", "l", "copy"].map(|name| p.add_loop(name));
        let (ty, tx) = (ix(t).floor_div(nx), ix(t).modulo(nx));

        // A thread's rows and columns: pieces of vector size, at a stride of the pieces of all threads.
        let place =
            |at: &Index, thread: &Index, n: i64| at.floor_div(w).scale(n * w).add(&thread.scale(w)).add(&at.modulo(w));
        let each = |var: LoopId, n: i64, f: &dyn Fn(Index) -> Vec<Stmt>| {
            let pieces = times(w, var).add(&ix(l));
            unrolled(var, n / w, vec![vector(l, w, f(pieces))])
        };
        // Copy of elements to shared memory, vector by vector, divided among the threads.
        let bring = |n_rows: i64, n_columns: i64, f: &dyn Fn(Index, Index) -> Stmt| {
            let n_vectors = n_rows * n_columns / w;
            let at = ix(t).add(&times(n_threads, copy));
            let row = at.floor_div(n_columns / w);
            let column = at.modulo(n_columns / w).scale(w).add(&ix(l));
            let one = vec![vector(l, w, vec![f(row, column)])];
            let body = if n_vectors % n_threads == 0 {
                one
            } else {
                vec![Stmt::If { cond: Cond::Lt(at, ix(n_vectors)), then: one, otherwise: vec![] }]
            };
            unrolled(copy, (n_vectors + n_threads - 1) / n_threads, body)
        };
        let [row_0, column_0] = [times(bm, by), times(bn, bx)];
        let zeroed = |buffer: BufferId, shape: [i64; 2], at: [Index; 2]| {
            let inside = |at: &Index, extent: i64| Cond::Lt(at.clone(), ix(extent));
            let loaded = load(buffer, &at);
            if w > 1 {
                return loaded;
            }
            let cond = inside(&at[0], shape[0]).and(inside(&at[1], shape[1]));
            Expr::Select(Box::new(cond), Box::new(loaded), Box::new(Expr::Const(0.0)))
        };
        let bring_a = bring(bm, bk, &|row, column| {
            let at = [row_0.add(&row), times(bk, ko).add(&column)];
            store(a_shared, &[column, row], zeroed(a, [m, k], at))
        });
        let bring_b = bring(bk, bn, &|row, column| {
            let at = [times(bk, ko).add(&row), column_0.add(&column)];
            store(b_shared, &[row, column], zeroed(b, [k, n], at))
        });
        let reduce = unrolled(
            ki,
            bk,
            vec![
                each(i, tm, &|at| vec![store(rows, from_ref(&at), load(a_shared, &[ix(ki), place(&at, &ty, ny)]))]),
                each(j, tn, &|at| vec![store(columns, from_ref(&at), load(b_shared, &[ix(ki), place(&at, &tx, nx)]))]),
                unrolled(
                    i,
                    tm,
                    vec![each(j, tn, &|at| {
                        let product = mul(load(rows, &[ix(i)]), load(columns, from_ref(&at)));
                        vec![add_to(sums, &[ix(i), at], product, never())]
                    })],
                ),
            ],
        );
        let write = unrolled(
            i,
            tm,
            vec![each(j, tn, &|at| {
                let (row, column) = (row_0.add(&place(&ix(i), &ty, ny)), column_0.add(&place(&at, &tx, nx)));
                let stored = store(c, &[row.clone(), column.clone()], load(sums, &[ix(i), at]));
                if w > 1 {
                    return vec![stored];
                }
                let cond = Cond::Lt(row, ix(m)).and(Cond::Lt(column, ix(n)));
                vec![Stmt::If { cond, then: vec![stored], otherwise: vec![] }]
            })],
        );
        let body = vec![
            Stmt::Alloc(sums),
            unrolled(i, tm, vec![each(j, tn, &|at| vec![store(sums, &[ix(i), at], Expr::Const(0.0))])]),
            for_(
                ko,
                (k + bk - 1) / bk,
                vec![bring_a, bring_b, Stmt::Barrier, Stmt::Alloc(rows), Stmt::Alloc(columns), reduce, Stmt::Barrier],
            ),
            write,
        ];
        let up = |x: i64, by: i64| (x + by - 1) / by;
        let kernel = GpuKernel {
            name: "product".into(),
            blocks: [Some((bx, up(n, bn))), Some((by, up(m, bm))), None],
            threads: [Some((t, n_threads)), None, None],
            shared: vec![a_shared, b_shared],
            body,
        };
        GpuProgram { program: p, body: vec![kernel], ..GpuProgram::default() }
    }
}
