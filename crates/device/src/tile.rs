//! Programs that keep a register tile of sums busy, as fast kernels do.

use tilewright_ir::expr::{BinaryOp, Expr, ReduceOp};
use tilewright_ir::{Buffer, Cond, DType, Index, Loop, LoopKind, Program, Role, Scope, Stmt};

/// `out[thread, i, j, l] = Σ_rounds Σ_k a[k, i mod factors] · b[k, j, l]`, the sums in registers.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    pub dtype: DType,
    /// Extent of i.
    pub rows: i64,
    /// Extent of j.
    pub vectors: i64,
    /// Extent of l.
    pub lanes: i64,
    /// Elements of `a` for each k.
    pub factors: i64,
    /// Extent of k; where it is 1, what is loaded stays in registers too.
    pub depth: i64,
    pub rounds: i64,
}

impl Tile {
    /// Multiply-adds of vectors that a thread makes.
    pub fn n_updates(&self) -> i64 {
        self.rows * self.vectors * self.depth * self.rounds
    }

    /// The program, each thread with all of the work. Arguments are a, b and out.
    pub fn program(&self, n_threads: i64) -> Program {
        let Tile { dtype, rows, vectors, lanes, factors, depth, rounds } = *self;
        let buffer = |name: &str, shape: Vec<i64>, scope, role| Buffer { name: name.into(), dtype, shape, scope, role };
        let mut p = Program { name: "tile".into(), ..Program::default() };
        let a = p.add_buffer(buffer("a", vec![depth, factors], Scope::Global, Role::Input));
        let b = p.add_buffer(buffer("b", vec![depth, vectors, lanes], Scope::Global, Role::Input));
        let out = p.add_buffer(buffer("out", vec![n_threads, rows, vectors, lanes], Scope::Global, Role::Output));
        let sum = p.add_buffer(buffer("sum", vec![rows, vectors, lanes], Scope::Register, Role::Temporary));
        let [t, round, k, l] = ["t", "round", "k", "l"].map(|name| p.add_loop(name));
        let each = |make: &dyn Fn(i64, Index) -> Stmt| -> Vec<Stmt> {
            let tile = (0..rows).flat_map(|i| (0..vectors).map(move |j| (i, j)));
            tile.map(|(i, j)| {
                let body = vec![make(i, j.into())];
                Stmt::For(Loop { var: l, extent: lanes.into(), kind: LoopKind::Vectorized, body })
            })
            .collect()
        };
        let begin =
            each(&|i, j| Stmt::Store { buffer: sum, index: vec![i.into(), j, l.into()], value: Expr::Const(0.0) });
        let add = each(&|i, j| Stmt::Update {
            buffer: sum,
            index: vec![i.into(), j.clone(), l.into()],
            op: ReduceOp::Sum,
            value: Expr::binary(
                BinaryOp::Mul,
                Expr::Load(a, vec![k.into(), (i % factors).into()]),
                Expr::Load(b, vec![k.into(), j, l.into()]),
            ),
            first: Cond::Not(Box::new(Cond::True)),
        });
        let end = each(&|i, j| Stmt::Store {
            buffer: out,
            index: vec![t.into(), i.into(), j.clone(), l.into()],
            value: Expr::Load(sum, vec![i.into(), j, l.into()]),
        });
        let serial =
            |var, extent: i64, body| Stmt::For(Loop { var, extent: extent.into(), kind: LoopKind::Serial, body });
        let rounds = serial(round, rounds, vec![serial(k, depth, add)]);
        let body = [Stmt::Alloc(sum)].into_iter().chain(begin).chain([rounds]).chain(end).collect();
        let kind = if n_threads > 1 { LoopKind::Parallel } else { LoopKind::Serial };
        p.body = vec![Stmt::For(Loop { var: t, extent: n_threads.into(), kind, body })];
        p
    }
}
