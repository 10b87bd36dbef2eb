//! The tensors that a peer computes with, random and 64-byte aligned, and the check of its result.

use std::ops::Add;

use tilewright_ir::DType;
use tilewright_ir::op::{Epilogue, Operand};

use super::problem::{Conv, Kernel, Matmul, Problem};
use super::{Check, Mismatch};

/// Alignment of every buffer, in bytes: a cache line, and what libraries assume for their fast paths.
const ALIGN_BYTES: usize = 64;

/// Elements of the result that a check compares with the reference.
const N_SAMPLED: usize = 4096;

/// An element type that peers compute with.
pub(super) trait Element: Copy + PartialOrd + Add<Output = Self> + Send + Sync + 'static {
    /// The type's name in a problem.
    const DTYPE: DType;
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
    /// `cblas_?gemm_batch`, ended by a zero byte.
    const CBLAS_GEMM_BATCH: &[u8];
    /// `cblas_?gemv`, ended by a zero byte.
    const CBLAS_GEMV: &[u8];
    /// The crate matrixmultiply's function for this type.
    const MATRIXMULTIPLY: MatrixMultiplyFn<Self>;
    /// An odd integer below 2²⁴ in magnitude, divided by 2²⁴: exact in either type.
    fn from_odd(odd: i32) -> Self;
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// As f64, exactly.
    fn to_f64(self) -> f64;
}

/// Signature of `matrixmultiply::sgemm` and `dgemm`.
pub(super) type MatrixMultiplyFn<T> =
    unsafe fn(usize, usize, usize, T, *const T, isize, isize, *const T, isize, isize, T, *mut T, isize, isize);

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NAN: f32 = f32::NAN;
    const EPSILON: f64 = f32::EPSILON as f64;
    const CBLAS_GEMM: &[u8] = b"cblas_sgemm\0";
    const CBLAS_GEMM_BATCH: &[u8] = b"cblas_sgemm_batch\0";
    const CBLAS_GEMV: &[u8] = b"cblas_sgemv\0";
    const MATRIXMULTIPLY: MatrixMultiplyFn<f32> = matrixmultiply::sgemm;
    fn from_odd(odd: i32) -> f32 {
        odd as f32 / (1 << 24) as f32
    }
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NAN: f64 = f64::NAN;
    const EPSILON: f64 = f64::EPSILON;
    const CBLAS_GEMM: &[u8] = b"cblas_dgemm\0";
    const CBLAS_GEMM_BATCH: &[u8] = b"cblas_dgemm_batch\0";
    const CBLAS_GEMV: &[u8] = b"cblas_dgemv\0";
    const MATRIXMULTIPLY: MatrixMultiplyFn<f64> = matrixmultiply::dgemm;
    fn from_odd(odd: i32) -> f64 {
        f64::from(odd) / f64::from(1 << 24)
    }
    fn from_f64(value: f64) -> f64 {
        value
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

/// The tensors of one problem, each in its place for as long as this lives.
pub(super) struct Operands<T> {
    /// What is computed; the lengths below follow from it.
    pub(super) problem: Problem,
    /// A, `[b, m, k]` or, where it is stored transposed, `[b, k, m]`; or X, `[n, c, h, w]`.
    pub(super) a: Aligned<T>,
    /// B, `[b, k, n]` or, where it is stored transposed, `[b, n, k]`; or W, `[k, c/groups, r, s]`, of a transposed
    /// convolution `[c, k/groups, r, s]`.
    pub(super) b: Aligned<T>,
    /// The further input of each operation of the epilogue: one element a channel, or of the result's shape;
    /// empty where it has none.
    pub(super) further: Vec<Aligned<T>>,
    /// The result: C, `[b, m, n]`, or Y, `[n, k, p, q]`.
    pub(super) c: Aligned<T>,
}

impl<T: Element> Operands<T> {
    /// Inputs uniform in (-1, 1), never zero; the result not yet a number.
    pub(super) fn random(problem: &Problem, seed: u64) -> Operands<T> {
        let [a_len, b_len] = problem.input_lens();
        let shape = problem.output_shape();
        let c_len = shape.iter().product();
        let len = |step: &Epilogue| match step.operand() {
            None => 0,
            Some(Operand::Channel) => shape[problem.channel_axis()],
            Some(Operand::Element) => c_len,
        };
        let mut random = Random(seed);
        // 2r + 1 − 2²⁴ for r below 2²⁴ is odd, so it is never zero, and both signs are equally likely.
        let mut value = || T::from_odd(2 * (random.next() >> 40) as i32 + 1 - (1 << 24));
        Operands {
            a: Aligned::new(a_len, &mut value),
            b: Aligned::new(b_len, &mut value),
            further: problem.epilogue.iter().map(|step| Aligned::new(len(step), &mut value)).collect(),
            c: Aligned::new(c_len, || T::NAN),
            problem: problem.clone(),
        }
    }

    /// Forget the last result.
    pub(super) fn clear_c(&mut self) {
        self.c.fill(T::NAN);
    }

    /// Compare the result with a reference that is accumulated in f64, on sampled elements and all corners; all
    /// elements must be finite.
    ///
    /// The tolerance of a sum of K terms is `(8 + 2·√K)·ε·Σ|a|·|b|`: wide enough for any order of a plain or blocked
    /// sum of random terms and for Winograd's transformations, too narrow for inputs rounded to fewer bits.
    pub(super) fn check(&self, seed: u64) -> Result<Check, Mismatch> {
        let shape = self.problem.output_shape();
        let mut worst_of_tolerance: f64 = 0.0;
        let mut compare = |at: usize| {
            let index = index_of(at, &shape);
            let (expected, tolerance) = self.reference(at, &index);
            let got = self.c[at].to_f64();
            let of_tolerance = (got - expected).abs() / tolerance;
            // Not `>`: what is no number must not pass. A filter that lies in the padding adds up to nothing.
            if of_tolerance <= 1.0 || got == expected {
                worst_of_tolerance = worst_of_tolerance.max(of_tolerance);
                return Ok(());
            }
            Err(Mismatch { at: index, got: got.to_string(), expected, tolerance })
        };
        let len = self.c.len();
        if let Some(at) = self.c.iter().position(|value| !value.to_f64().is_finite()) {
            compare(at)?;
        }
        if len <= N_SAMPLED {
            (0..len).try_for_each(&mut compare)?;
        } else {
            let corners = corners(&shape);
            let mut random = Random(seed);
            let n_random = N_SAMPLED - corners.len();
            corners.into_iter().try_for_each(&mut compare)?;
            (0..n_random).try_for_each(|_| compare((random.next() % len as u64) as usize))?;
        }
        Ok(Check { n_sampled: N_SAMPLED.min(len), worst_of_tolerance })
    }

    /// One element of the result and how far from it a peer may be.
    fn reference(&self, at: usize, index: &[usize]) -> (f64, f64) {
        let mut sum = Sum::default();
        match self.problem.kernel {
            Kernel::Matmul(matmul) => self.matmul_element(&matmul, index, &mut sum),
            Kernel::Conv(conv) => self.conv_element(&conv, index, &mut sum),
        }
        let mut value = sum.value;
        let mut tolerance = (8.0 + 2.0 * (sum.n_terms as f64).sqrt()) * T::EPSILON * sum.magnitude;
        for (step, further) in self.problem.epilogue.iter().zip(&self.further) {
            let operand = step.operand().map(|operand| match operand {
                Operand::Channel => further[index[self.problem.channel_axis()]].to_f64(),
                Operand::Element => further[at].to_f64(),
            });
            let of = |x: f64| step.value(x, operand);
            let differs = [value - tolerance, value + tolerance].map(|x| (of(x) - of(value)).abs());
            value = of(value);
            // The functions bend little within a tolerance; libraries compute the curved ones to some units
            // in the last place.
            tolerance = 1.13 * differs[0].max(differs[1]) + 8.0 * T::EPSILON * (1.0 + value.abs());
        }
        (value, tolerance)
    }

    fn matmul_element(&self, matmul: &Matmul, index: &[usize], sum: &mut Sum) {
        let &Matmul { m, n, k, .. } = matmul;
        let &[batch, i, j] = index else { panic!("a product has three axes") };
        let ((a_row, a_col), (b_row, b_col)) = (matmul.a_strides(), matmul.b_strides());
        let (a, b) = (&self.a[batch * m * k..], &self.b[batch * k * n..]);
        for p in 0..k {
            sum.add(a[i * a_row + p * a_col].to_f64(), b[p * b_row + j * b_col].to_f64());
        }
    }

    fn conv_element(&self, conv: &Conv, index: &[usize], sum: &mut Sum) {
        let &[image, out_channel, p, q] = index else { panic!("a convolution's result has four axes") };
        let ([h, w], [r, s]) = (conv.image, conv.filter);
        let (c_group, k_group) = (conv.c / conv.groups, conv.k / conv.groups);
        let group = out_channel / k_group;
        for in_group in 0..c_group {
            let in_channel = group * c_group + in_group;
            let x = &self.a[(image * conv.c + in_channel) * h * w..][..h * w];
            let filter = if conv.transposed {
                in_channel * k_group + out_channel % k_group
            } else {
                out_channel * c_group + in_group
            };
            let filter = &self.b[filter * r * s..][..r * s];
            for (row, taps) in filter.chunks_exact(s).enumerate() {
                let Some(y) = conv.input_at(0, p, row) else { continue };
                for (column, tap) in taps.iter().enumerate() {
                    if let Some(x_at) = conv.input_at(1, q, column) {
                        sum.add(x[y * w + x_at].to_f64(), tap.to_f64());
                    }
                }
            }
        }
    }
}

/// A sum of products with what its rounding errors depend on.
#[derive(Default)]
struct Sum {
    value: f64,
    magnitude: f64,
    n_terms: usize,
}

impl Sum {
    fn add(&mut self, a: f64, b: f64) {
        let term = a * b;
        self.value += term;
        self.magnitude += term.abs();
        self.n_terms += 1;
    }
}

/// Position on each axis of element `at` of a dense tensor.
fn index_of(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (position, extent) in index.iter_mut().zip(shape).rev() {
        *position = at % extent;
        at /= extent;
    }
    index
}

/// The elements of a dense tensor that are first or last on every axis.
fn corners(shape: &[usize]) -> Vec<usize> {
    shape.iter().fold(vec![0], |corners, extent| {
        corners.iter().flat_map(|corner| [corner * extent, corner * extent + extent - 1]).collect()
    })
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
    use crate::problem::tests::{conv, matmul};
    use tilewright_ir::op::Function;

    /// C of A·B, computed one term after the other.
    fn multiplied<T: Element>(problem: &Problem, from_f64: fn(f64) -> T) -> Operands<T> {
        let Kernel::Matmul(Matmul { m, n, k, ta, tb, .. }) = problem.kernel else { panic!("it is a product") };
        let mut operands = Operands::<T>::random(problem, 7);
        for at in 0..operands.c.len() {
            let (batch, i, j) = (at / (m * n), at / n % m, at % n);
            let mut sum = 0.0;
            for p in 0..k {
                let a = if ta { p * m + i } else { i * k + p };
                let b = if tb { j * k + p } else { p * n + j };
                sum += operands.a[batch * m * k + a].to_f64() * operands.b[batch * k * n + b].to_f64();
            }
            operands.c[at] = from_f64(sum);
        }
        operands
    }

    fn product(ta: bool, tb: bool) -> Problem {
        matmul(2, 5, 7, 33, ta, tb)
    }

    #[test]
    fn operands_are_aligned_and_nonzero_with_both_signs() {
        let operands = Operands::<f32>::random(&product(false, true), 1);
        for buffer in [&operands.a, &operands.b, &operands.c] {
            assert_eq!(buffer.as_ptr() as usize % ALIGN_BYTES, 0);
        }
        assert!(operands.a.iter().all(|&value| value != 0.0 && value.abs() < 1.0));
        assert!(operands.a.iter().any(|&value| value > 0.0) && operands.a.iter().any(|&value| value < 0.0));
    }

    #[test]
    fn a_right_result_passes_for_all_storage_orders() {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            multiplied(&product(ta, tb), |sum| sum as f32).check(1).expect("it is the product");
            multiplied(&product(ta, tb), |sum| sum).check(1).expect("it is the product");
        }
    }

    #[test]
    fn a_forgotten_a_wrong_and_an_imprecise_element_are_found() {
        let problem = product(false, true);
        let mut operands = multiplied(&problem, |sum| sum as f32);
        let last = operands.c.len() - 1;
        let right = operands.c[last];
        operands.c[last - 3] = f32::NAN;
        assert_eq!(operands.check(1).expect_err("one element is no number").at, [1, 4, 3]);
        let mut operands = multiplied(&problem, |sum| sum as f32);
        operands.c[last] = right + 1.0;
        assert_eq!(operands.check(1).expect_err("one element is wrong").at, [1, 4, 6]);
        // What a library returns that rounds its inputs to bfloat16 (8 bits of mantissa).
        let truncated = multiplied(&problem, |sum| f32::from_bits((sum as f32).to_bits() & 0xffff_0000));
        truncated.check(1).expect_err("the result has 8 bits");
    }

    #[test]
    fn a_wrong_corner_of_a_large_result_is_found() {
        // All terms of this filter are one element of X times one of W.
        let problem = conv(Conv { image: [80, 90], k: 3, ..POINTWISE });
        let mut operands = Operands::<f64>::random(&problem, 3);
        for at in 0..operands.c.len() {
            operands.c[at] = operands.a[at % (80 * 90)] * operands.b[at / (80 * 90)];
        }
        let check = operands.check(1).expect("it is the product");
        assert_eq!(check.n_sampled, N_SAMPLED);
        let corner = 2 * 80 * 90 + 79 * 90;
        operands.c[corner] += 1e-3;
        assert_eq!(operands.check(1).expect_err("a corner is wrong").at, [0, 2, 79, 0]);
    }

    const POINTWISE: Conv = Conv {
        n: 1,
        c: 1,
        image: [1, 1],
        k: 1,
        filter: [1, 1],
        stride: [1, 1],
        pad_begin: [0, 0],
        pad_end: [0, 0],
        dilation: [1, 1],
        groups: 1,
        transposed: false,
    };

    #[test]
    fn convolutions_gather_and_transposed_ones_scatter() {
        // One channel, stride 2, dilation 1, a filter of two columns: Y = [x0·w0 + x1·w1, x2·w0 + x3·w1] and back.
        let row = Conv { image: [1, 4], filter: [1, 2], stride: [1, 2], ..POINTWISE };
        let check = |conv_: Conv, expected: fn(&[f64], &[f64]) -> Vec<f64>| {
            let mut operands = Operands::<f64>::random(&conv(conv_), 5);
            let expected = expected(&operands.a, &operands.b);
            operands.c.copy_from_slice(&expected);
            operands.check(1).expect("it is the sum");
        };
        check(row, |x, w| vec![x[0] * w[0] + x[1] * w[1], x[2] * w[0] + x[3] * w[1]]);
        check(Conv { pad_begin: [0, 1], pad_end: [0, 1], ..row }, |x, w| {
            vec![x[0] * w[1], x[1] * w[0] + x[2] * w[1], x[3] * w[0]]
        });
        let spread = Conv { image: [1, 2], transposed: true, ..row };
        check(spread, |x, w| vec![x[0] * w[0], x[0] * w[1], x[1] * w[0], x[1] * w[1]]);
        check(Conv { pad_begin: [0, 1], pad_end: [0, -1], ..spread }, |x, w| {
            vec![x[0] * w[1], x[1] * w[0], x[1] * w[1], 0.0]
        });
    }

    #[test]
    fn an_epilogue_is_applied_in_order() {
        let check = |epilogue: &[(Function, &[f64])], expected: fn(f64, f64, f64) -> f64| {
            let epilogue =
                epilogue.iter().map(|(f, numbers)| Epilogue::new(*f, numbers).expect("its numbers are accepted"));
            let problem = Problem { epilogue: epilogue.collect(), ..conv(Conv { k: 2, ..POINTWISE }) };
            let mut operands = Operands::<f64>::random(&problem, 5);
            for at in 0..2 {
                let further: Vec<f64> = operands.further.iter().filter_map(|f| f.get(at).copied()).collect();
                let [first, second] = [0, 1].map(|i| further.get(i).copied().unwrap_or_default());
                operands.c[at] = expected(operands.a[0] * operands.b[at], first, second);
            }
            operands.check(1).expect("it is what the epilogue says");
        };
        let [bias, relu, add] = [Function::Bias, Function::Relu, Function::Add].map(|f| (f, &[][..]));
        check(&[bias, relu, add], |y, bias, r| (y + bias).max(0.0) + r);
        check(&[add, (Function::Clip, &[-0.1, 0.1])], |y, r, _| (y + r).clamp(-0.1, 0.1));
        check(&[(Function::Scale, &[]), add], |y, scale, r| y * scale + r);
    }
}
