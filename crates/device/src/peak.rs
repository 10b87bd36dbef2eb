//! The most a CPU can do: independent multiply-adds on registers.

use crate::host;
use crate::pool::Pool;
use crate::tile::Tile;
use std::time::{Duration, Instant};
use tilewright_codegen::CompileError;
use tilewright_ir::{DType, Target};

/// Multiply-adds that each vector register gets in one run.
const ROUNDS: i64 = 20_000;

/// Measured peak in GFLOP/s of `n_threads` threads: 16 independent sums a thread, of vectors that stay in registers,
/// the fastest of some hundred runs.
///
/// # Errors
/// Where the target is not one that this process can run, or code generation fails.
pub fn gflops(target: &Target, dtype: DType, n_threads: usize) -> Result<f64, CompileError> {
    let lanes = target.lanes(dtype);
    // A multiply and an add where there is no fused instruction need a register more for the product.
    let sums = i64::from(target.n_vector_registers) / 2 - if target.has_fma { 0 } else { 4 };
    let tile = Tile { dtype, rows: sums, vectors: 1, lanes, factors: 1, depth: 1, rounds: ROUNDS };
    let kernel = tilewright_codegen::compile(&tile.program(n_threads as i64), target)?;
    let [mut a, mut b] = [(); 2].map(|()| vec![1.0f64; 64]);
    let mut out = vec![0.0f64; (n_threads as i64 * sums * lanes) as usize + 64];
    let mut scratch = vec![0u8; kernel.scratch_bytes(n_threads) as usize + 128];
    let aligned = |p: *mut u8| p.wrapping_add(p.align_offset(128));
    let arguments = [a.as_mut_ptr().cast(), b.as_mut_ptr().cast(), out.as_mut_ptr().cast()].map(aligned);
    let scratch = aligned(scratch.as_mut_ptr());
    let (all_cpus, cpus) = (host::allowed_cpus(), host::pin_cpus(n_threads));
    host::pin_thread(&cpus[..1.min(cpus.len())]);
    let mut pool = Pool::new(n_threads, &cpus);
    let runtime = pool.runtime();
    let (begin, mut fastest) = (Instant::now(), f64::INFINITY);
    while begin.elapsed() < Duration::from_millis(60) {
        let start = Instant::now();
        // SAFETY: all buffers are at least as large as the program's, and aligned to more than 64 bytes.
        unsafe { kernel.run(&arguments, &[], scratch, &runtime) };
        fastest = fastest.min(start.elapsed().as_nanos() as f64);
    }
    host::pin_thread(&all_cpus);
    let flops = 2.0 * (tile.n_updates() * lanes) as f64 * n_threads as f64;
    Ok(flops / fastest)
}
