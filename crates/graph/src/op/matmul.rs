//! Matrix products.

use super::util::{broadcast, broadcast_strides, for_each, product, strides};
use super::{Inputs, Operation, Operator, row};
use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Matrix product `[…, m, k] · […, k, n]` as `numpy.matmul` defines it: leading dimensions broadcast, and a
/// vector is a row or a column.
#[derive(Debug, Clone, Copy)]
pub struct MatMul;

/// Matrix product of integer matrices with an i32 result: inputs 2 and 3 are the zero points of the operands.
#[derive(Debug, Clone, Copy)]
pub struct MatMulInteger;

/// `alpha · A·B + beta · C`, with A and B optionally transposed; C, input 2, is optional and broadcasts to
/// `[m, n]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemm {
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of C.
    pub beta: f64,
    /// Whether A is stored transposed, `[k, m]`.
    pub transposes_a: bool,
    /// Whether B is stored transposed, `[n, k]`.
    pub transposes_b: bool,
}

pub(super) const ROWS: &[Operator] = &[
    row("MatMul", &[1, 9, 13], 2..=2, |_| Ok(MatMul.into())),
    row("MatMulInteger", &[10], 2..=4, |_| Ok(MatMulInteger.into())),
    row("Gemm", &[1, 6, 7, 9, 11, 13], 2..=3, |node| {
        // Before opset 7, broadcasting of input 2 had to be requested.
        let _ = if node.version < 7 { node.int("broadcast")? } else { None };
        Ok(Gemm {
            alpha: node.float_or("alpha", 1.0)?,
            beta: node.float_or("beta", 1.0)?,
            transposes_a: node.flag("transA", false)?,
            transposes_b: node.flag("transB", false)?,
        }
        .into())
    }),
];

/// Accumulates the matrix product of `a: [m, k]` and `b: [k, n]` into `c: [m, n]`, all row-major.
pub fn add_product([m, n, k]: [usize; 3], a: &[f64], b: &[f64], c: &mut [f64]) {
    const COLUMNS: usize = 8;
    const DEPTH: usize = 512;
    let mut panel = vec![[0.0; COLUMNS]; DEPTH.min(k)];
    for k0 in (0..k).step_by(DEPTH) {
        let depth = DEPTH.min(k - k0);
        for j in (0..n).step_by(COLUMNS) {
            let width = COLUMNS.min(n - j);
            for (to, from) in panel.iter_mut().zip(b[k0 * n..].chunks(n)).take(depth) {
                *to = [0.0; COLUMNS];
                to[..width].copy_from_slice(&from[j..j + width]);
            }
            let panel = &panel[..depth];
            let mut i = 0;
            while i < m {
                let row = |i: usize| &a[i * k + k0..i * k + k0 + depth];
                let mut store = |i: usize, sums: &[f64; COLUMNS]| {
                    c[i * n + j..i * n + j + width].iter_mut().zip(sums).for_each(|(c, sum)| *c += sum);
                };
                let mut first = [0.0; COLUMNS];
                if i + 1 < m {
                    let mut second = [0.0; COLUMNS];
                    for ((b, &x), &y) in panel.iter().zip(row(i)).zip(row(i + 1)) {
                        for l in 0..COLUMNS {
                            first[l] += x * b[l];
                            second[l] += y * b[l];
                        }
                    }
                    store(i + 1, &second);
                } else {
                    for (b, &x) in panel.iter().zip(row(i)) {
                        for l in 0..COLUMNS {
                            first[l] += x * b[l];
                        }
                    }
                }
                store(i, &first);
                i += 2;
            }
        }
    }
}

/// Sizes of a batched matrix product.
pub struct ProductShape {
    /// `[m, n, k]`.
    pub sizes: [usize; 3],
    /// Batch dimensions of the output.
    pub batch: Vec<usize>,
    /// Batch dimensions of each operand, before broadcasting.
    pub batches: [Vec<usize>; 2],
    /// Shape of the output.
    pub out: Vec<usize>,
}

/// Computes the sizes of a matrix product of operands of these shapes.
///
/// # Errors
/// If the shapes do not fit.
pub fn product_shape(a: &[usize], b: &[usize]) -> Result<ProductShape, OpError> {
    let refuse = || invalid!("matrices of shapes {a:?} and {b:?} have no product");
    let (left, right) = match (a, b) {
        ([], _) | (_, []) => return Err(refuse()),
        ([k], _) => (vec![1, *k], if b.len() == 1 { vec![b[0], 1] } else { b.to_vec() }),
        (_, [k]) => (a.to_vec(), vec![*k, 1]),
        _ => (a.to_vec(), b.to_vec()),
    };
    let ([batch_a @ .., m, k], [batch_b @ .., l, n]) = (&left[..], &right[..]) else { return Err(refuse()) };
    if k != l {
        return Err(refuse());
    }
    let batch = broadcast(&[batch_a, batch_b])?;
    let mut out = batch.clone();
    out.extend((a.len() > 1).then_some(*m));
    out.extend((b.len() > 1).then_some(*n));
    let batches = [batch_a.to_vec(), batch_b.to_vec()];
    Ok(ProductShape { sizes: [*m, *n, *k], batch, batches, out })
}

/// Adds the product of `[m, k]` and `[k, n]` to `[m, n]`, all row-major, modulo 2⁶⁴.
fn add_integer_product([_, n, k]: [usize; 3], a: &[i64], b: &[i64], c: &mut [i64]) {
    for (c, a) in c.chunks_mut(n).zip(a.chunks(k)) {
        for (&x, b) in a.iter().zip(b.chunks(n)) {
            c.iter_mut().zip(b).for_each(|(c, &y)| *c = c.wrapping_add(x.wrapping_mul(y)));
        }
    }
}

/// Truncates 64-bit integers to the low bits of a type.
fn wrapped(dtype: DType, shape: &[usize], numbers: &[i64]) -> Tensor {
    let numbers: Vec<i128> = numbers.iter().map(|&x| x.into()).collect();
    Tensor::from_integers(dtype, shape, &numbers)
}

/// Multiplies matrices, with leading dimensions that broadcast.
pub(super) fn batched_product(shape: &ProductShape, a: &[f64], b: &[f64]) -> Vec<f64> {
    batched(shape, a, b, add_product)
}

fn batched<T: Copy + Default>(
    shape: &ProductShape,
    a: &[T],
    b: &[T],
    add_product: impl Fn([usize; 3], &[T], &[T], &mut [T]),
) -> Vec<T> {
    let [m, n, k] = shape.sizes;
    let mut out = vec![T::default(); product(&shape.batch) * m * n];
    let by = [0, 1].map(|i| broadcast_strides(&shape.batches[i], &shape.batch));
    for_each(&shape.batch, [&by[0], &by[1]], |at, [i, j]| {
        let (a, b) = (&a[i * m * k..(i + 1) * m * k], &b[j * k * n..(j + 1) * k * n]);
        if m * n > 0 && k > 0 {
            add_product(shape.sizes, a, b, &mut out[at * m * n..(at + 1) * m * n]);
        }
    });
    out
}

impl Operation for MatMul {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (a, b) = (inputs.ty(0)?, inputs.ty(1)?);
        if a.dtype != b.dtype {
            return Err(invalid!("its inputs are {} and {}, and should be of one type", a.dtype, b.dtype));
        }
        Ok(vec![TensorType::new(a.dtype, product_shape(&a.shape, &b.shape)?.out)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (a, b) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let shape = product_shape(a.shape(), b.shape())?;
        if !a.dtype().is_float() {
            let numbers = batched(&shape, &a.i64s(), &b.i64s(), add_integer_product);
            return Ok(vec![wrapped(a.dtype(), &shape.out, &numbers)]);
        }
        let numbers = batched_product(&shape, &a.floats(), &b.floats());
        Ok(vec![Tensor::from_floats(a.dtype(), shape.out, &numbers)])
    }
}

/// Checks that a zero point has the type of the elements from which it is subtracted, and that there are one
/// or `n` of them.
pub(super) fn check_zero(inputs: Inputs<'_>, at: usize, dtype: DType, n: Option<usize>) -> Result<(), OpError> {
    let Some(zero) = inputs.optional(at) else { return Ok(()) };
    if zero.dtype() != dtype {
        let (own, at) = (zero.dtype(), at + 1);
        return Err(invalid!(
            "its zero point, input {at}, is {own} where the integers are {dtype} (make both one type)"
        ));
    }
    n.map_or(Ok(()), |n| check_number(inputs, at, "zero points", n))
}

/// Checks that there are one or `n` scales or zero points.
pub(super) fn check_number(inputs: Inputs<'_>, at: usize, what: &str, n: usize) -> Result<(), OpError> {
    let (found, at) = (product(inputs.shape(at)?), at + 1);
    match found == 1 || found == n {
        true => Ok(()),
        false if n == 1 => Err(invalid!("its input {at} has {found} {what}, and there is a place for one")),
        false => Err(invalid!("its input {at} has {found} {what} where there are places for 1 or {n}")),
    }
}

/// Numbers minus a zero point: a single one, or one for each position along a dimension.
pub(super) fn centred(x: &Tensor, zero: Option<&Tensor>, axis: usize) -> Result<Vec<f64>, OpError> {
    let mut numbers = x.floats();
    let Some(zero) = zero else { return Ok(numbers) };
    let zeros = zero.floats();
    if zeros.len() == 1 {
        numbers.iter_mut().for_each(|x| *x -= zeros[0]);
        return Ok(numbers);
    }
    if x.shape().get(axis) != Some(&zeros.len()) {
        return Err(invalid!("{} zero points do not fit {x:?}", zeros.len()));
    }
    let stride = strides(x.shape())[axis];
    numbers.iter_mut().enumerate().for_each(|(at, x)| *x -= zeros[at / stride % zeros.len()]);
    Ok(numbers)
}

impl Operation for MatMulInteger {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape = product_shape(inputs.shape(0)?, inputs.shape(1)?)?;
        for at in [0, 1] {
            check_zero(inputs, at + 2, inputs.fact(at)?.dtype(), Some(shape.sizes[at]))?;
        }
        Ok(vec![TensorType::new(DType::I32, shape.out)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (a, b) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let shape = product_shape(a.shape(), b.shape())?;
        let rows = a.shape().len().saturating_sub(2);
        let x = centred(a, inputs.optional_tensor(2)?, rows)?;
        let y = centred(b, inputs.optional_tensor(3)?, b.shape().len() - 1)?;
        // Sums of products of bytes are exact in f64.
        let sums: Vec<i64> = batched_product(&shape, &x, &y).into_iter().map(|sum| sum as i64).collect();
        Ok(vec![wrapped(DType::I32, &shape.out, &sums)])
    }
}

impl Gemm {
    /// Sizes `[m, n, k]` for operands of these shapes.
    ///
    /// # Errors
    /// If the inputs are not matrices whose sizes fit.
    pub fn sizes(&self, a: &[usize], b: &[usize]) -> Result<[usize; 3], OpError> {
        let (&[a0, a1], &[b0, b1]) = (a, b) else {
            return Err(invalid!("its inputs of shapes {a:?} and {b:?} are no matrices"));
        };
        let (m, k) = if self.transposes_a { (a1, a0) } else { (a0, a1) };
        let (l, n) = if self.transposes_b { (b1, b0) } else { (b0, b1) };
        if k == l { Ok([m, n, k]) } else { Err(invalid!("matrices of shapes {a:?} and {b:?} have no such product")) }
    }
}

impl Gemm {
    /// Evaluates a product of integers, modulo 2 to the power of their number of bits.
    fn evaluate_integers(&self, inputs: Inputs<'_>, ty: TensorType, sizes: [usize; 3]) -> Result<Tensor, OpError> {
        let [m, n, k] = sizes;
        let matrix = |at: usize, is_turned: bool| {
            let x = inputs.tensor(at)?;
            Ok(turned(x.i64s(), x.shape(), is_turned))
        };
        let (a, b) = (matrix(0, self.transposes_a)?, matrix(1, self.transposes_b)?);
        let mut sums = vec![0; m * n];
        if m * n * k > 0 {
            add_integer_product(sizes, &a, &b, &mut sums);
        }
        sums.iter_mut().for_each(|sum| *sum = sum.wrapping_mul(self.alpha as i64));
        if let Some(c) = inputs.optional_tensor(2)? {
            let numbers = c.i64s();
            for_each(&[m, n], [&broadcast_strides(c.shape(), &[m, n])], |at, [from]| {
                sums[at] = sums[at].wrapping_add(numbers[from].wrapping_mul(self.beta as i64));
            });
        }
        Ok(wrapped(ty.dtype, &ty.shape, &sums))
    }
}

/// Transposes a matrix if `is_turned`.
pub(super) fn turned<T: Copy>(x: Vec<T>, shape: &[usize], is_turned: bool) -> Vec<T> {
    if !is_turned {
        return x;
    }
    let (rows, columns) = (shape[0], shape[1]);
    (0..rows * columns).map(|at| x[at % rows * columns + at / rows]).collect()
}

impl Operation for Gemm {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let dtype = inputs.fact(0)?.dtype();
        let [m, n, _] = self.sizes(inputs.shape(0)?, inputs.shape(1)?)?;
        if let Some(c) = inputs.optional(2)
            && broadcast(&[c.shape(), &[m, n]])? != [m, n]
        {
            return Err(invalid!("{} does not broadcast to [{m},{n}]", c.ty));
        }
        Ok(vec![TensorType::new(dtype, [m, n])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (a, b) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let [m, n, k] = self.sizes(a.shape(), b.shape())?;
        if !ty.dtype.is_float() && self.alpha.fract() == 0.0 && self.beta.fract() == 0.0 {
            return self.evaluate_integers(inputs, ty, [m, n, k]).map(|c| vec![c]);
        }
        let left = turned(a.floats(), a.shape(), self.transposes_a);
        let mut sums = vec![0.0; m * n];
        if self.transposes_b && m == 1 {
            // Transposing the weights would not pay off.
            let b = b.floats();
            sums.iter_mut().zip(b.chunks(k.max(1))).for_each(|(sum, row)| {
                *sum = row.iter().zip(&left).map(|(x, y)| x * y).sum();
            });
        } else if m * n * k > 0 {
            add_product([m, n, k], &left, &turned(b.floats(), b.shape(), self.transposes_b), &mut sums);
        }
        sums.iter_mut().for_each(|sum| *sum *= self.alpha);
        if let Some(c) = inputs.optional_tensor(2)? {
            let numbers = c.floats();
            for_each(&[m, n], [&broadcast_strides(c.shape(), &[m, n])], |at, [from]| {
                sums[at] += self.beta * numbers[from];
            });
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &sums)])
    }
}
