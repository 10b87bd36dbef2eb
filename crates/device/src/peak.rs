//! Peak throughput of a CPU, measured by independent multiply-adds on registers.

use crate::host;
use std::time::{Duration, Instant};
use tilewright_codegen::CompileError;
use tilewright_ir::expr::{BinaryOp, Expr, ReduceOp};
use tilewright_ir::op::Workload;
use tilewright_ir::{Buffer, Cond, DType, Index, Loop, LoopKind, Program, Role, Scope, Stmt, Target, TensorProduct};
use tilewright_runtime::ThreadPool;

/// Reason why the peak could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum PeakError {
    /// Failure to generate code.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Failure to start threads.
    #[error("no {n_threads} threads: {refused}")]
    Threads {
        /// Number of threads asked for.
        n_threads: usize,
        /// Error of the system.
        refused: std::io::Error,
    },
}

/// Arithmetic whose peak is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeakKind {
    /// Multiply-adds in f32.
    F32,
    /// Multiply-adds in f64.
    F64,
    /// Dot products of four 8-bit integers, the first ones unsigned, with 32-bit accumulators; on machines
    /// that widen, of 7-bit weights, or of pairs of 16-bit integers.
    Dot4,
    /// Dot products of two bf16 numbers with f32 accumulators.
    Dot2,
}

impl PeakKind {
    /// Every kind with its name.
    pub const ALL: [(PeakKind, &'static str); 4] =
        [(PeakKind::F32, "f32"), (PeakKind::F64, "f64"), (PeakKind::Dot4, "dot4"), (PeakKind::Dot2, "dot2")];

    /// Arithmetic that bounds a workload on a target. For integers, only products are faster than f32; f16,
    /// and bf16 unless its products are faster, are computed in f32.
    pub fn of(workload: &Workload, target: &Target) -> PeakKind {
        match workload.dtype {
            _ if workload.multiplies_bytes() => PeakKind::Dot4,
            _ if workload.multiplies_bf16() && target.prefers_dot2() => PeakKind::Dot2,
            DType::F64 => PeakKind::F64,
            _ => PeakKind::F32,
        }
    }

    /// Name in reports.
    pub fn name(self) -> &'static str {
        PeakKind::ALL.iter().find(|(kind, _)| *kind == self).expect("every kind is listed").1
    }

    /// Type of the sums.
    fn dtype(self) -> DType {
        match self {
            PeakKind::F32 | PeakKind::Dot2 => DType::F32,
            PeakKind::F64 => DType::F64,
            PeakKind::Dot4 => DType::I32,
        }
    }

    /// Number of multiply-adds of a lane in one instruction.
    fn steps(self, target: &Target) -> i64 {
        self.products(target).and_then(TensorProduct::dot_steps).unwrap_or(1)
    }

    /// Dot products of this kind, if any.
    fn products(self, target: &Target) -> Option<TensorProduct> {
        match self {
            PeakKind::F32 | PeakKind::F64 => None,
            PeakKind::Dot4 if target.widens_bytes() && !target.adds_pairs_of_bytes() => Some(TensorProduct::Dot2),
            PeakKind::Dot4 => Some(TensorProduct::Dot4),
            PeakKind::Dot2 => Some(TensorProduct::Dot2),
        }
    }

    /// Types of the operands.
    fn factors(self, target: &Target) -> [DType; 2] {
        match self {
            PeakKind::F32 | PeakKind::F64 => [self.dtype(); 2],
            PeakKind::Dot4 if target.adds_pairs_of_bytes() => [DType::U8, DType::I7],
            PeakKind::Dot4 if target.widens_bytes() => [DType::I16; 2],
            PeakKind::Dot4 => [DType::U8, DType::I8],
            PeakKind::Dot2 => [DType::Bf16; 2],
        }
    }
}

/// Number of additions to each vector register in one run.
const ROUNDS: i64 = 100_000;

/// Measures the peak of `n_threads` threads in GFLOP/s (for integers in 10⁹ operations per second): the best
/// of some hundred runs of multiply-adds on registers, with enough independent chains to hide the latency.
///
/// # Errors
/// If the target is not one that this process can run, code generation fails or the system refuses
/// threads.
pub fn gflops(target: &Target, kind: PeakKind, n_threads: usize) -> Result<f64, PeakError> {
    let lanes = target.lanes(kind.dtype());
    // Two units with a latency of four cycles have eight operations in flight, and a late one delays its own
    // sum for good: some more sums keep the units busy. Two registers hold the operands. Without a fused
    // instruction all sums share one product: more of them would count multiplications that do not take
    // place.
    let n_registers = i64::from(target.n_vector_registers);
    let sums = if target.has_fma { (n_registers - 4).min(24) } else { n_registers / 2 - 4 };
    let kernel = tilewright_codegen::compile(&program((kind, target), sums, lanes, n_threads as i64), target)?;
    // Ones in f32; read as f64 they are ordinary numbers, too, and as bytes not all equal.
    let (mut x, mut y) = (vec![1.0f32; 128], vec![1.0f32; 128]);
    let mut out = vec![0.0f64; (n_threads as i64 * sums * lanes) as usize + 64];
    let mut scratch = vec![0u8; kernel.scratch_bytes(n_threads) as usize + 128];
    let aligned = |p: *mut u8| p.wrapping_add(p.align_offset(128));
    let arguments = [x.as_mut_ptr().cast(), y.as_mut_ptr().cast(), out.as_mut_ptr().cast()].map(aligned);
    let scratch = aligned(scratch.as_mut_ptr());
    let cpus = host::pin_cpus(n_threads);
    let mut pool = ThreadPool::new(n_threads, &cpus).map_err(|refused| PeakError::Threads { n_threads, refused })?;
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
    let flops = 2.0 * (ROUNDS * sums * lanes * kind.steps(target)) as f64 * n_threads as f64;
    Ok(flops / fastest)
}

/// `out[t, s, l] = Σ_rounds Σ_k x[k] · y[l, k]`, in registers.
fn program((kind, target): (PeakKind, &Target), sums: i64, lanes: i64, n_threads: i64) -> Program {
    let buffer =
        |name: &str, dtype, shape: Vec<i64>, scope, role| Buffer { name: name.into(), dtype, shape, scope, role };
    let mut p = Program { name: "peak".into(), ..Program::default() };
    let (dtype, steps) = (kind.dtype(), kind.steps(target));
    let factors = kind.factors(target);
    let x = p.add_buffer(buffer("x", factors[0], vec![steps], Scope::Global, Role::Input));
    let y = p.add_buffer(buffer("y", factors[1], vec![lanes, steps], Scope::Global, Role::Input));
    let out = p.add_buffer(buffer("out", dtype, vec![n_threads, sums, lanes], Scope::Global, Role::Output));
    let sum = p.add_buffer(buffer("sum", dtype, vec![sums, lanes], Scope::Register, Role::Temporary));
    let [t, round, l, k] = ["t", "round", "l", "k"].map(|name| p.add_loop(name));
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
        value: Expr::binary(BinaryOp::Mul, Expr::Load(x, vec![k.into()]), Expr::Load(y, vec![l.into(), k.into()])),
        first: Cond::Not(Box::new(Cond::True)),
    });
    let end = each(&|s| Stmt::Store {
        buffer: out,
        index: vec![t.into(), s.clone(), l.into()],
        value: Expr::Load(sum, vec![s, l.into()]),
    });
    let kind_of_steps = kind.products(target).map_or(LoopKind::Serial, LoopKind::Tensor);
    let add = vec![Stmt::For(Loop { var: k, extent: steps.into(), kind: kind_of_steps, body: add })];
    let rounds = Stmt::For(Loop { var: round, extent: ROUNDS.into(), kind: LoopKind::Serial, body: add });
    let body = [Stmt::Alloc(sum)].into_iter().chain(begin).chain([rounds]).chain(end).collect();
    let kind = if n_threads > 1 { LoopKind::Parallel } else { LoopKind::Serial };
    p.body = vec![Stmt::For(Loop { var: t, extent: n_threads.into(), kind, body })];
    p
}
