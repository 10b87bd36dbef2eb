//! The Rust crates `gemm` and `matrixmultiply`, compiled in.

use super::MatmulProblem;
use super::operands::{Element, Operands};
use super::worker::Prepared;

/// Version of the crate `gemm`; a test compares it with the lock file.
pub(super) const GEMM_VERSION: &str = "0.19.0";

/// Version of the crate `matrixmultiply`; a test compares it with the lock file.
pub(super) const MATRIXMULTIPLY_VERSION: &str = "0.3.11";

/// The crate `gemm`; more than one thread through rayon, at its own discretion.
pub(super) fn prepare_gemm<T: Element>(threads: usize) -> Prepared<T> {
    let parallelism = if threads > 1 { gemm::Parallelism::Rayon(threads) } else { gemm::Parallelism::None };
    Prepared {
        version: GEMM_VERSION.to_owned(),
        details: String::new(),
        core_type: None,
        run: Box::new(move |operands| {
            for_each_matrix(operands, |problem, a, b, c| {
                let (a_row, a_col) = problem.a_strides();
                let (b_row, b_col) = problem.b_strides();
                // SAFETY: the strides keep within m·k, k·n and m·n elements; C is apart from A and B.
                unsafe {
                    gemm::gemm(
                        problem.m,
                        problem.n,
                        problem.k,
                        c,
                        1,
                        problem.n as isize,
                        false,
                        a,
                        a_col as isize,
                        a_row as isize,
                        b,
                        b_col as isize,
                        b_row as isize,
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
    }
}

/// The crate `matrixmultiply`; its threads come from `MATMUL_NUM_THREADS`: one, two or four.
pub(super) fn prepare_matrixmultiply<T: Element>(threads: usize) -> Prepared<T> {
    let details = match threads {
        3 => "it uses 2 threads".to_owned(),
        5.. => "it uses 4 threads".to_owned(),
        _ => String::new(),
    };
    Prepared {
        version: MATRIXMULTIPLY_VERSION.to_owned(),
        details,
        core_type: None,
        run: Box::new(|operands| {
            for_each_matrix(operands, |problem, a, b, c| {
                let (a_row, a_col) = problem.a_strides();
                let (b_row, b_col) = problem.b_strides();
                // SAFETY: the strides keep within m·k, k·n and m·n elements; C is apart from A and B.
                unsafe {
                    T::MATRIXMULTIPLY(
                        problem.m,
                        problem.k,
                        problem.n,
                        T::ONE,
                        a,
                        a_row as isize,
                        a_col as isize,
                        b,
                        b_row as isize,
                        b_col as isize,
                        T::ZERO,
                        c,
                        problem.n as isize,
                        1,
                    );
                }
            });
            Ok(())
        }),
    }
}

/// Call `multiply` with each multiplication's A, B and C, one after the other.
fn for_each_matrix<T>(operands: &mut Operands<T>, multiply: impl Fn(&MatmulProblem, *const T, *const T, *mut T)) {
    let problem = operands.problem;
    let MatmulProblem { b: n_batch, m, n, k, .. } = problem;
    for batch in 0..n_batch {
        let a = &operands.a[batch * m * k..(batch + 1) * m * k];
        let b = &operands.b[batch * k * n..(batch + 1) * k * n];
        let c = &mut operands.c[batch * m * n..(batch + 1) * m * n];
        multiply(&problem, a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::Dtype;

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let lock = include_str!("../../../../Cargo.lock");
        for (name, version) in [("gemm", GEMM_VERSION), ("matrixmultiply", MATRIXMULTIPLY_VERSION)] {
            assert!(lock.contains(&format!("name = \"{name}\"\nversion = \"{version}\"")), "{name} {version}");
        }
    }

    #[test]
    fn both_compute_the_product() {
        fn check<T: Element>(problem: MatmulProblem, mut prepared: Prepared<T>) {
            let mut operands = Operands::<T>::random(&problem, 3);
            (prepared.run)(&mut operands).expect("nothing can fail");
            operands.check(5).expect("it is the product");
        }
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            for dtype in [Dtype::F32, Dtype::F64] {
                for (b, m, n, k) in [(1, 17, 33, 129), (3, 1, 40, 20), (2, 8, 1, 5)] {
                    let problem = MatmulProblem { b, m, n, k, ta, tb, dtype };
                    match dtype {
                        Dtype::F32 => {
                            check::<f32>(problem, prepare_gemm(1));
                            check::<f32>(problem, prepare_matrixmultiply(1));
                        }
                        Dtype::F64 => {
                            check::<f64>(problem, prepare_gemm(2));
                            check::<f64>(problem, prepare_matrixmultiply(2));
                        }
                    }
                }
            }
        }
    }
}
