//! The matrices that a peer multiplies, random and 64-byte aligned, and the check of its result.

use super::{Check, Dtype, MatmulProblem, Mismatch};

/// Alignment of every buffer, in bytes: a cache line, and what libraries assume for their fast paths.
const ALIGN_BYTES: usize = 64;

/// Elements of C that a check compares with the reference.
const N_SAMPLED: usize = 512;

/// An element type that peers compute with.
pub(super) trait Element: Copy + Send + Sync + 'static {
    /// The type's name in a problem.
    const DTYPE: Dtype;
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// What C holds before a check: an element that a peer forgets stays this.
    const NAN: Self;
    /// Distance from 1 to the next number.
    const EPSILON: f64;
    /// `cblas_?gemm`, ended by a zero byte.
    const CBLAS_GEMM: &[u8];
    /// `cblas_?gemv`, ended by a zero byte.
    const CBLAS_GEMV: &[u8];
    /// The crate matrixmultiply's function for this type.
    const MATRIXMULTIPLY: MatrixMultiplyFn<Self>;
    /// An odd integer below 2²⁴ in magnitude, divided by 2²⁴: exact in either type.
    fn from_odd(odd: i32) -> Self;
    /// As f64, exactly.
    fn to_f64(self) -> f64;
}

/// Signature of `matrixmultiply::sgemm` and `dgemm`.
pub(super) type MatrixMultiplyFn<T> =
    unsafe fn(usize, usize, usize, T, *const T, isize, isize, *const T, isize, isize, T, *mut T, isize, isize);

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NAN: f32 = f32::NAN;
    const EPSILON: f64 = f32::EPSILON as f64;
    const CBLAS_GEMM: &[u8] = b"cblas_sgemm\0";
    const CBLAS_GEMV: &[u8] = b"cblas_sgemv\0";
    const MATRIXMULTIPLY: MatrixMultiplyFn<f32> = matrixmultiply::sgemm;
    fn from_odd(odd: i32) -> f32 {
        odd as f32 / (1 << 24) as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Element for f64 {
    const DTYPE: Dtype = Dtype::F64;
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NAN: f64 = f64::NAN;
    const EPSILON: f64 = f64::EPSILON;
    const CBLAS_GEMM: &[u8] = b"cblas_dgemm\0";
    const CBLAS_GEMV: &[u8] = b"cblas_dgemv\0";
    const MATRIXMULTIPLY: MatrixMultiplyFn<f64> = matrixmultiply::dgemm;
    fn from_odd(odd: i32) -> f64 {
        f64::from(odd) / f64::from(1 << 24)
    }
    fn to_f64(self) -> f64 {
        self
    }
}

/// A fixed number of elements that begin at a multiple of [`ALIGN_BYTES`].
pub(super) struct Aligned<T> {
    storage: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Element> Aligned<T> {
    /// `len` elements, each what `value` gives next.
    pub(super) fn new(len: usize, mut value: impl FnMut() -> T) -> Aligned<T> {
        let spare = ALIGN_BYTES / size_of::<T>();
        let mut storage: Vec<T> = Vec::with_capacity(len + spare);
        let start = storage.as_ptr().align_offset(ALIGN_BYTES);
        assert!(start < spare, "memory of {} bytes an element can be aligned", size_of::<T>());
        storage.resize(start, T::ZERO);
        storage.extend((0..len).map(|_| value()));
        Aligned { storage, start, len }
    }
}

impl<T> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<T> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

/// A, B and C of one problem, each in its place for as long as this lives.
pub(super) struct Operands<T> {
    /// What is computed; the lengths below follow from it.
    pub(super) problem: MatmulProblem,
    /// `[b, m, k]`, or `[b, k, m]` where it is stored transposed.
    pub(super) a: Aligned<T>,
    /// `[b, k, n]`, or `[b, n, k]` where it is stored transposed.
    pub(super) b: Aligned<T>,
    /// `[b, m, n]`.
    pub(super) c: Aligned<T>,
}

impl<T: Element> Operands<T> {
    /// A and B uniform in (-1, 1), never zero; C not yet a number.
    pub(super) fn random(problem: &MatmulProblem, seed: u64) -> Operands<T> {
        let &MatmulProblem { b, m, n, k, .. } = problem;
        let mut random = Random(seed);
        // 2r + 1 − 2²⁴ for r below 2²⁴ is odd, so it is never zero, and both signs are equally likely.
        let mut value = || T::from_odd(2 * (random.next() >> 40) as i32 + 1 - (1 << 24));
        Operands {
            problem: *problem,
            a: Aligned::new(b * m * k, &mut value),
            b: Aligned::new(b * k * n, &mut value),
            c: Aligned::new(b * m * n, || T::NAN),
        }
    }

    /// Forget the last result.
    pub(super) fn clear_c(&mut self) {
        self.c.fill(T::NAN);
    }

    /// Compare C with a reference that is accumulated in f64, on sampled elements; all must be finite.
    ///
    /// The tolerance is `(8 + 2·√k)·ε·Σ|a|·|b|`: wide enough for any order of a plain or blocked sum of
    /// random terms, too narrow for inputs rounded to fewer bits.
    pub(super) fn check(&self, seed: u64) -> Result<Check, Mismatch> {
        let MatmulProblem { b: n_batch, m, n, k, .. } = self.problem;
        let (a_row, a_col) = self.problem.a_strides();
        let (b_row, b_col) = self.problem.b_strides();
        let reference = |at: usize| {
            let (batch, i, j) = (at / (m * n), at / n % m, at % n);
            let a = &self.a[batch * m * k..];
            let b = &self.b[batch * k * n..];
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for p in 0..k {
                let term = a[i * a_row + p * a_col].to_f64() * b[p * b_row + j * b_col].to_f64();
                sum += term;
                magnitude += term.abs();
            }
            (sum, (8.0 + 2.0 * (k as f64).sqrt()) * T::EPSILON * magnitude)
        };
        let mut worst_of_tolerance: f64 = 0.0;
        let mut compare = |at: usize| {
            let (expected, tolerance) = reference(at);
            let got = self.c[at].to_f64();
            let of_tolerance = (got - expected).abs() / tolerance;
            // Not `>`: what is no number must not pass.
            if of_tolerance <= 1.0 {
                worst_of_tolerance = worst_of_tolerance.max(of_tolerance);
                return Ok(());
            }
            Err(Mismatch { at: [at / (m * n), at / n % m, at % n], got: got.to_string(), expected, tolerance })
        };
        let len = n_batch * m * n;
        if let Some(at) = self.c.iter().position(|value| !value.to_f64().is_finite()) {
            compare(at)?;
        }
        let mut random = Random(seed);
        let corners = [0, n - 1, len - n, len - 1];
        let n_sampled = N_SAMPLED.min(len);
        for &at in corners.iter().take(n_sampled) {
            compare(at)?;
        }
        for _ in corners.len()..n_sampled {
            compare((random.next() % len as u64) as usize)?;
        }
        Ok(Check { n_sampled, worst_of_tolerance })
    }
}

/// SplitMix64: one addition and two multiplications a number, good enough for test data.
///
/// # Source
///
/// Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014, figure 14.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn multiplied<T: Element>(problem: MatmulProblem, from_f64: fn(f64) -> T) -> Operands<T> {
        let mut operands = Operands::<T>::random(&problem, 7);
        let MatmulProblem { m, n, k, .. } = problem;
        for at in 0..operands.c.len() {
            let (batch, i, j) = (at / (m * n), at / n % m, at % n);
            let mut sum = 0.0;
            for p in 0..k {
                let a = if problem.ta { p * m + i } else { i * k + p };
                let b = if problem.tb { j * k + p } else { p * n + j };
                sum += operands.a[batch * m * k + a].to_f64() * operands.b[batch * k * n + b].to_f64();
            }
            operands.c[at] = from_f64(sum);
        }
        operands
    }

    const PROBLEM: MatmulProblem = MatmulProblem { b: 2, m: 5, n: 7, k: 33, ta: false, tb: true, dtype: Dtype::F32 };

    #[test]
    fn operands_are_aligned_and_nonzero_with_both_signs() {
        let operands = Operands::<f32>::random(&PROBLEM, 1);
        for buffer in [&operands.a, &operands.b, &operands.c] {
            assert_eq!(buffer.as_ptr() as usize % ALIGN_BYTES, 0);
        }
        assert!(operands.a.iter().all(|&value| value != 0.0 && value.abs() < 1.0));
        assert!(operands.a.iter().any(|&value| value > 0.0) && operands.a.iter().any(|&value| value < 0.0));
    }

    #[test]
    fn a_right_result_passes_for_all_storage_orders() {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let problem = MatmulProblem { ta, tb, ..PROBLEM };
            multiplied(problem, |sum| sum as f32).check(1).expect("it is the product");
            multiplied(MatmulProblem { dtype: Dtype::F64, ..problem }, |sum| sum).check(1).expect("it is the product");
        }
    }

    #[test]
    fn a_forgotten_a_wrong_and_an_imprecise_element_are_found() {
        let mut operands = multiplied(PROBLEM, |sum| sum as f32);
        let last = operands.c.len() - 1;
        let right = operands.c[last];
        operands.c[last - 3] = f32::NAN;
        assert_eq!(operands.check(1).expect_err("one element is no number").at, [1, 4, 3]);
        let mut operands = multiplied(PROBLEM, |sum| sum as f32);
        operands.c[last] = right + 1.0;
        assert_eq!(operands.check(1).expect_err("one element is wrong").at, [1, 4, 6]);
        // What a library returns that rounds its inputs to bfloat16 (8 bits of mantissa).
        let truncated = multiplied(PROBLEM, |sum| f32::from_bits((sum as f32).to_bits() & 0xffff_0000));
        truncated.check(1).expect_err("the result has 8 bits");
    }
}
