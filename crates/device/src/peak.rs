//! The most a CPU can do: independent multiply-adds on registers.

use crate::host;
use std::time::{Duration, Instant};
use tilewright_codegen::CompileError;
use tilewright_ir::expr::{BinaryOp, Expr, ReduceOp};
use tilewright_ir::{Buffer, Cond, DType, Index, Loop, LoopKind, Program, Role, Scope, Stmt, Target};
use tilewright_runtime::Pool;

/// Reason why the peak is unknown.
#[derive(Debug, thiserror::Error)]
pub enum PeakError {
    /// Failure to generate code.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The system refuses threads.
    #[error("no {n_threads} threads: {refused}")]
    Threads {
        /// Threads asked for.
        n_threads: usize,
        /// Error of the system.
        refused: std::io::Error,
    },
}

/// Multiply-adds that each vector register gets in one run.
const ROUNDS: i64 = 100_000;

/// Measures the peak of `n_threads` threads, in GFLOP/s: the fastest of some hundred runs of sums of vectors
/// in registers, with enough independent chains to hide the latency.
///
/// # Errors
/// Where the target is not one that this process can run, code generation fails or the system refuses
/// threads.
pub fn gflops(target: &Target, dtype: DType, n_threads: usize) -> Result<f64, PeakError> {
    // Whole numbers have no multiply-add: nothing that is computed of them is faster than singles, and halves
    // are computed as such.
    let dtype = if dtype == DType::F64 { dtype } else { DType::F32 };
    let lanes = target.lanes(dtype);
    // Two units of four cycles each have eight under way, and each that is late delays its own sum for good:
    // some more keep them busy. Two registers hold the factors. Without a fused instruction all sums share
    // one product: more of them would count multiplications that do not take place.
    let n_registers = i64::from(target.n_vector_registers);
    let sums = if target.has_fma { (n_registers - 4).min(24) } else { n_registers / 2 - 4 };
    let kernel = tilewright_codegen::compile(&program(dtype, sums, lanes, n_threads as i64), target)?;
    // Ones of f32; as f64 no less a plain number.
    let mut x = vec![1.0f32; 128];
    let mut out = vec![0.0f64; (n_threads as i64 * sums * lanes) as usize + 64];
    let mut scratch = vec![0u8; kernel.scratch_bytes(n_threads) as usize + 128];
    let aligned = |p: *mut u8| p.wrapping_add(p.align_offset(128));
    let arguments = [aligned(x.as_mut_ptr().cast()), aligned(out.as_mut_ptr().cast())];
    let scratch = aligned(scratch.as_mut_ptr());
    let cpus = host::pin_cpus(n_threads);
    let mut pool = Pool::new(n_threads, &cpus).map_err(|refused| PeakError::Threads { n_threads, refused })?;
    let fastest = host::pinned(cpus.first().copied(), || {
        let runtime = pool.runtime();
        let (begin, mut fastest) = (Instant::now(), f64::INFINITY);
        while begin.elapsed() < Duration::from_millis(60) {
            let start = Instant::now();
            // SAFETY: both buffers are at least as large as the program's, and aligned to more than 64 bytes.
            unsafe { kernel.run(&arguments, &[], scratch, &runtime) };
            fastest = fastest.min(start.elapsed().as_nanos() as f64);
        }
        fastest
    });
    let flops = 2.0 * (ROUNDS * sums * lanes) as f64 * n_threads as f64;
    Ok(flops / fastest)
}

/// `out[t, s, l] = Σ_rounds x[0] · x[l]`, in registers.
fn program(dtype: DType, sums: i64, lanes: i64, n_threads: i64) -> Program {
    let buffer = |name: &str, shape: Vec<i64>, scope, role| Buffer { name: name.into(), dtype, shape, scope, role };
    let mut p = Program { name: "peak".into(), ..Program::default() };
    let x = p.add_buffer(buffer("x", vec![lanes], Scope::Global, Role::Input));
    let out = p.add_buffer(buffer("out", vec![n_threads, sums, lanes], Scope::Global, Role::Output));
    let sum = p.add_buffer(buffer("sum", vec![sums, lanes], Scope::Register, Role::Temporary));
    let [t, round, l] = ["t", "round", "l"].map(|name| p.add_loop(name));
    let each = |make: &dyn Fn(Index) -> Stmt| -> Vec<Stmt> {
        (0..sums)
            .map(|s| {
                Stmt::For(Loop { var: l, extent: lanes.into(), kind: LoopKind::Vectorized, body: vec![make(s.into())] })
            })
            .collect()
    };
    let begin = each(&|s| Stmt::Store { buffer: sum, index: vec![s, l.into()], value: Expr::Const(0.0) });
    let add = each(&|s| Stmt::Update {
        buffer: sum,
        index: vec![s, l.into()],
        op: ReduceOp::Sum,
        value: Expr::binary(BinaryOp::Mul, Expr::Load(x, vec![0.into()]), Expr::Load(x, vec![l.into()])),
        first: Cond::Not(Box::new(Cond::True)),
    });
    let end = each(&|s| Stmt::Store {
        buffer: out,
        index: vec![t.into(), s.clone(), l.into()],
        value: Expr::Load(sum, vec![s, l.into()]),
    });
    let rounds = Stmt::For(Loop { var: round, extent: ROUNDS.into(), kind: LoopKind::Serial, body: add });
    let body = [Stmt::Alloc(sum)].into_iter().chain(begin).chain([rounds]).chain(end).collect();
    let kind = if n_threads > 1 { LoopKind::Parallel } else { LoopKind::Serial };
    p.body = vec![Stmt::For(Loop { var: t, extent: n_threads.into(), kind, body })];
    p
}
