//! The Rust crates `gemm` and `matrixmultiply`, compiled in.

use super::Unavailable;
use super::operands::{CpuElement, Operands};
use super::problem::{Matmul, PeerProblem};
use super::worker::Prepared;

/// Version of the crate `gemm`; a test compares it with the lock file.
pub(super) const GEMM_VERSION: &str = "0.19.0";

/// Version of the crate `matrixmultiply`; a test compares it with the lock file.
pub(super) const MATRIXMULTIPLY_VERSION: &str = "0.3.11";

/// Prepares the crate `gemm`; it uses more than one thread through rayon, at its own discretion.
pub(super) fn prepare_gemm<T: CpuElement>(problem: &PeerProblem, threads: usize) -> Result<Prepared<T>, Unavailable> {
    let matmul = problem.multiplication_only()?;
    let parallelism = match threads {
        0 | 1 => gemm_common::Parallelism::None,
        _ => gemm_common::Parallelism::Rayon(threads),
    };
    let (a_row, a_col) = matmul.a_strides();
    let (b_row, b_col) = matmul.b_strides();
    let gemm = T::gemm();
    Ok(Prepared::in_place(
        GEMM_VERSION.to_owned(),
        String::new(),
        Box::new(move |operands| {
            for_each_matrix(operands, &matmul, |a, b, c| {
                // Its kernels prefer column-major results, as the crate's front end knows, which otherwise
                // only dispatches on the type: for row-major ones it computes the transposed product, Cᵀ =
                // Bᵀ·Aᵀ.
                let rows = (matmul.m, c, 1, matmul.n, (a, a_col, a_row), (b, b_col, b_row), matmul.n);
                let columns = (matmul.n, c, matmul.n, 1, (b, b_row, b_col), (a, a_row, a_col), matmul.m);
                let (m, c, c_col, c_row, left, right, n) = if matmul.n > 1 { columns } else { rows };
                // SAFETY: the strides stay within m·k, k·n and m·n elements; C does not overlap A and B.
                unsafe {
                    gemm(
                        m,
                        n,
                        matmul.k,
                        c,
                        c_col as isize,
                        c_row as isize,
                        false,
                        left.0,
                        left.1 as isize,
                        left.2 as isize,
                        right.0,
                        right.1 as isize,
                        right.2 as isize,
                        T::ZERO,
                        T::ONE,
                        false,
                        false,
                        false,
                        parallelism,
                    );
                }
            });
            Ok(())
        }),
    ))
}

/// Prepares the crate `matrixmultiply`; its threads come from `MATMUL_NUM_THREADS`: one, two or four.
pub(super) fn prepare_matrixmultiply<T: CpuElement>(
    problem: &PeerProblem,
    threads: usize,
) -> Result<Prepared<T>, Unavailable> {
    let matmul = problem.multiplication_only()?;
    let details = match threads {
        3 => "it uses 2 threads".to_owned(),
        5.. => "it uses 4 threads".to_owned(),
        _ => String::new(),
    };
    let (a_row, a_col) = matmul.a_strides();
    let (b_row, b_col) = matmul.b_strides();
    Ok(Prepared::in_place(
        MATRIXMULTIPLY_VERSION.to_owned(),
        details,
        Box::new(move |operands| {
            for_each_matrix(operands, &matmul, |a, b, c| {
                // SAFETY: the strides stay within m·k, k·n and m·n elements; C does not overlap A and B.
                unsafe {
                    T::MATRIXMULTIPLY(
                        matmul.m,
                        matmul.k,
                        matmul.n,
                        T::ONE,
                        a,
                        a_row as isize,
                        a_col as isize,
                        b,
                        b_row as isize,
                        b_col as isize,
                        T::ZERO,
                        c,
                        matmul.n as isize,
                        1,
                    );
                }
            });
            Ok(())
        }),
    ))
}

/// Calls `multiply` with each multiplication's A, B and C, one after the other.
fn for_each_matrix<T: CpuElement>(
    operands: &mut Operands<T>,
    matmul: &Matmul,
    multiply: impl Fn(*const T, *const T, *mut T),
) {
    let &Matmul { b: n_batch, m, n, k, .. } = matmul;
    for batch in 0..n_batch {
        let a = &operands.a[batch * m * k..(batch + 1) * m * k];
        let b = &operands.b[batch * k * n..(batch + 1) * k * n];
        let c = &mut operands.c[batch * m * n..(batch + 1) * m * n];
        multiply(a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let lock = include_str!("../../../Cargo.lock");
        for (name, version) in [("gemm-f32", GEMM_VERSION), ("matrixmultiply", MATRIXMULTIPLY_VERSION)] {
            assert!(lock.contains(&format!("name = \"{name}\"\nversion = \"{version}\"")), "{name} {version}");
        }
    }
}
