//! Signal processing: window functions, Fourier transforms, mel filter banks; and `Det`.

use super::util::{around, axis, check_rank, size};
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Window function `a₀ + a₁·cos(2πn/N) + a₂·cos(4πn/N)` (`HannWindow`, `HammingWindow`, `BlackmanWindow`) of
/// the size in input 0.
#[derive(Debug, Clone, Copy)]
pub struct CosineWindow {
    /// Coefficients of the cosines of 0, 1 and 2 periods.
    pub factors: [f64; 3],
    /// Whether the window is periodic, rather than symmetric.
    pub is_periodic: bool,
    /// Element type of the result.
    pub dtype: DType,
}

/// Discrete Fourier transform along a dimension. Inputs 1 and 2, each optional, are the transform's length
/// and, from opset 20 on, the dimension. Real and imaginary parts are the last dimension.
#[derive(Debug, Clone, Copy)]
pub struct Dft {
    /// Dimension of the attribute (before opset 20).
    pub axis: Option<i64>,
    /// Whether the transform is the inverse one.
    pub is_inverse: bool,
    /// Whether only the non-redundant half of a real input's spectrum is returned.
    pub is_onesided: bool,
}

/// Short-time Fourier transform: frame step, window and frame length are inputs 1 to 3.
#[derive(Debug, Clone, Copy)]
pub struct Stft {
    /// Whether only the non-redundant half of a real input's spectrum is returned.
    pub is_onesided: bool,
}

/// Filter bank matrix from DFT bins to mel bands. Inputs: number of bands, DFT length, sample rate, lowest
/// and highest frequency in Hz.
#[derive(Debug, Clone, Copy)]
pub struct MelWeightMatrix {
    /// Element type of the result.
    pub dtype: DType,
}

/// Determinants of the square matrices in the last two dimensions.
#[derive(Debug, Clone, Copy)]
pub struct Det;

fn dtype(node: &Import) -> Result<DType, OpError> {
    DType::from_onnx(node.int_or("output_datatype", 1)?).map_err(|name| unsupported!("elements of type {name}"))
}

fn window(node: &Import, factors: [f64; 3]) -> Result<Op, OpError> {
    Ok(CosineWindow { factors, is_periodic: node.flag("periodic", true)?, dtype: dtype(node)? }.into())
}

pub(super) const ROWS: &[Operator] = &[
    row("HannWindow", &[17], 1..=1, |node| window(node, [0.5, -0.5, 0.0])),
    row("HammingWindow", &[17], 1..=1, |node| window(node, [25.0 / 46.0, -21.0 / 46.0, 0.0])),
    row("BlackmanWindow", &[17], 1..=1, |node| window(node, [0.42, -0.5, 0.08])),
    row("DFT", &[17, 20], 1..=3, |node| {
        let axis = if node.version < 20 { Some(node.int_or("axis", 1)?) } else { None };
        Ok(Dft { axis, is_inverse: node.flag("inverse", false)?, is_onesided: node.flag("onesided", false)? }.into())
    }),
    row("STFT", &[17], 2..=4, |node| Ok(Stft { is_onesided: node.flag("onesided", true)? }.into())),
    row("MelWeightMatrix", &[17], 5..=5, |node| Ok(MelWeightMatrix { dtype: dtype(node)? }.into())),
    row("Det", &[11, 22], 1..=1, |_| Ok(Det.into())),
];

/// Returns the only element of an input.
fn number(x: &Tensor) -> Result<i64, OpError> {
    match x.i64s()[..] {
        [number] => Ok(number),
        _ => Err(invalid!("{x:?} is not one number")),
    }
}

impl Operation for CosineWindow {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![TensorType::new(self.dtype, [size(number(inputs.tensor(0)?)?)?])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let n = size(number(inputs.tensor(0)?)?)?;
        let period = if self.is_periodic { n as f64 } else { n as f64 - 1.0 };
        let at = |i: usize| {
            let angle = std::f64::consts::TAU * i as f64 / period;
            self.factors[0] + self.factors[1] * angle.cos() + self.factors[2] * (2.0 * angle).cos()
        };
        Ok(vec![Tensor::from_floats(self.dtype, [n], &(0..n).map(at).collect::<Vec<_>>())])
    }
}

/// Transforms complex numbers, computing `n_out` terms by the definition.
fn transform(x: &[(f64, f64)], n: usize, n_out: usize, is_inverse: bool) -> Vec<(f64, f64)> {
    let sign = if is_inverse { 1.0 } else { -1.0 };
    let term = |k: usize| {
        let mut sum = (0.0, 0.0);
        for (t, &(re, im)) in x.iter().take(n).enumerate() {
            let angle = sign * std::f64::consts::TAU * ((k * t) % n) as f64 / n as f64;
            let (sine, cosine) = angle.sin_cos();
            sum.0 += re * cosine - im * sine;
            sum.1 += re * sine + im * cosine;
        }
        if is_inverse { (sum.0 / n as f64, sum.1 / n as f64) } else { sum }
    };
    (0..n_out).map(term).collect()
}

impl Dft {
    /// Returns the dimension, the transform's length, the number of its terms, and the number of parts of
    /// each.
    fn sizes(&self, inputs: Inputs<'_>) -> Result<(usize, usize, usize, usize), OpError> {
        let shape = inputs.shape(0)?;
        check_rank(shape, 2)?;
        let along = match self.axis {
            Some(axis) => axis,
            None => inputs.optional_tensor(2)?.map_or(Ok(-2), number)?,
        };
        let at = axis(along, shape.len())?;
        let parts = shape[shape.len() - 1];
        if at == shape.len() - 1 || !(1..=2).contains(&parts) {
            return Err(invalid!("numbers of shape {shape:?} have no transform along dimension {at}"));
        }
        let back_from_half = self.is_inverse && self.is_onesided;
        let n = match inputs.optional_tensor(1)? {
            Some(n) => size(number(n)?)?,
            None if back_from_half => 2 * shape[at].saturating_sub(1),
            None => shape[at],
        };
        let n_out = if self.is_onesided && !self.is_inverse { n / 2 + 1 } else { n };
        Ok((at, n, n_out, if back_from_half { 1 } else { 2 }))
    }
}

impl Operation for Dft {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (at, _, n_out, parts) = self.sizes(inputs)?;
        let mut ty = inputs.ty(0)?.clone();
        ty.shape[at] = n_out;
        let last = ty.shape.len() - 1;
        ty.shape[last] = parts;
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (at, n, n_out, parts) = self.sizes(inputs)?;
        let x = inputs.tensor(0)?;
        let numbers = x.floats();
        let given = x.shape()[x.shape().len() - 1];
        let (outer, n_in, inner) = around(&x.shape()[..x.shape().len() - 1], at);
        let mut out = vec![0.0; ty.n_elements()];
        for o in 0..outer {
            for i in 0..inner {
                let place = |k: usize| ((o * n_in + k) * inner + i) * given;
                let number = |k: usize| (numbers[place(k)], if given == 2 { numbers[place(k) + 1] } else { 0.0 });
                let mut signal: Vec<(f64, f64)> = (0..n_in.min(n)).map(number).collect();
                if parts == 1 {
                    // The other half is this one reversed and conjugated.
                    signal.truncate(n / 2 + 1);
                    signal.resize(n / 2 + 1, (0.0, 0.0));
                    for k in n / 2 + 1..n {
                        let (re, im) = signal[n - k];
                        signal.push((re, -im));
                    }
                }
                for (k, (re, im)) in transform(&signal, n, n_out, self.is_inverse).into_iter().enumerate() {
                    let to = ((o * n_out + k) * inner + i) * parts;
                    out[to] = re;
                    if parts == 2 {
                        out[to + 1] = im;
                    }
                }
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

impl Stft {
    /// Returns the number of signals, their length, and the parts of each number: 1 if real, 2 if complex.
    ///
    /// Exporters leave out the last dimension of real signals, and ONNX Runtime accepts that.
    fn signals(shape: &[usize]) -> Result<[usize; 3], OpError> {
        match *shape {
            [batch, n] => Ok([batch, n, 1]),
            [batch, n, parts @ (1 | 2)] => Ok([batch, n, parts]),
            _ => Err(invalid!("a signal of shape {shape:?} should be [batch, length] or [batch, length, 1 or 2]")),
        }
    }

    /// Returns the step, the window's length, the number of windows, and the number of terms of each.
    fn sizes(&self, inputs: Inputs<'_>) -> Result<(usize, usize, usize, usize), OpError> {
        let [_, n, _] = Stft::signals(inputs.shape(0)?)?;
        let step = size(number(inputs.tensor(1)?)?)?;
        let length = match (inputs.optional_tensor(3)?, inputs.optional(2)) {
            (Some(length), _) => size(number(length)?)?,
            (None, Some(window)) => window.ty.n_elements(),
            (None, None) => return Err(invalid!("it has neither a window nor a length")),
        };
        if step == 0 || length == 0 || length > n || inputs.optional(2).is_some_and(|w| w.shape() != [length]) {
            return Err(invalid!("windows of {length} at steps of {step} do not fit a signal of {n}"));
        }
        Ok((step, length, (n - length) / step + 1, if self.is_onesided { length / 2 + 1 } else { length }))
    }
}

impl Operation for Stft {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (_, _, n_windows, n_out) = self.sizes(inputs)?;
        let ty = inputs.ty(0)?;
        Ok(vec![TensorType::new(ty.dtype, [ty.shape[0], n_windows, n_out, 2])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (step, length, n_windows, n_out) = self.sizes(inputs)?;
        let x = inputs.tensor(0)?;
        let [batch, n, parts] = Stft::signals(x.shape())?;
        let numbers = x.floats();
        let window = inputs.optional_tensor(2)?.map_or_else(|| vec![1.0; length], Tensor::floats);
        let mut out = Vec::with_capacity(ty.n_elements());
        for b in 0..batch {
            for w in 0..n_windows {
                let number = |t: usize| {
                    let at = (b * n + w * step + t) * parts;
                    (window[t] * numbers[at], if parts == 2 { window[t] * numbers[at + 1] } else { 0.0 })
                };
                let signal: Vec<(f64, f64)> = (0..length).map(number).collect();
                out.extend(transform(&signal, length, n_out, false).into_iter().flat_map(|(re, im)| [re, im]));
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

impl Operation for MelWeightMatrix {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (n_bands, length) = (size(number(inputs.tensor(0)?)?)?, size(number(inputs.tensor(1)?)?)?);
        Ok(vec![TensorType::new(self.dtype, [length / 2 + 1, n_bands])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (n_rows, n_bands) = (ty.shape[0], ty.shape[1]);
        let (length, rate) = (number(inputs.tensor(1)?)? as f64, number(inputs.tensor(2)?)? as f64);
        let one = |at: usize| Ok(inputs.tensor(at)?.floats().first().copied().unwrap_or(0.0));
        let mel = |hertz: f64| 2595.0 * (hertz / 700.0).ln_1p() / std::f64::consts::LN_10;
        let (low, high) = (mel(one(3)?), mel(one(4)?));
        let step = (high - low) / (n_bands as f64 + 2.0);
        let bin = |k: usize| {
            let hertz = 700.0 * ((k as f64 * step + low) / 2595.0 * std::f64::consts::LN_10).exp_m1();
            ((length + 1.0) * hertz / rate).floor().max(0.0) as usize
        };
        let mut out = vec![0.0; ty.n_elements()];
        for band in 0..n_bands {
            let (left, centre, right) = (bin(band), bin(band + 1), bin(band + 2));
            if right > n_rows {
                return Err(invalid!("the highest frequency is beyond the transform"));
            }
            let mut set = |row: usize, x: f64| {
                if row < n_rows {
                    out[row * n_bands + band] = x;
                }
            };
            if left == centre {
                set(centre, 1.0);
            } else {
                (left..=centre).for_each(|j| set(j, (j - left) as f64 / (centre - left) as f64));
            }
            (centre..right).for_each(|j| set(j, (right - j) as f64 / (right - centre) as f64));
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

impl Operation for Det {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        match ty.shape[..] {
            [ref outer @ .., n, m] if n == m => Ok(vec![TensorType::new(ty.dtype, outer)]),
            _ => Err(invalid!("{ty} are no square matrices")),
        }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let n = x.shape()[x.shape().len() - 1];
        let numbers = x.floats();
        let det = |at: usize| {
            let mut a = numbers[at * n * n..(at + 1) * n * n].to_vec();
            let mut det = 1.0;
            for k in 0..n {
                let best = (k..n).max_by(|&i, &j| a[i * n + k].abs().total_cmp(&a[j * n + k].abs())).unwrap_or(k);
                if a[best * n + k] == 0.0 {
                    return 0.0;
                }
                if best != k {
                    (0..n).for_each(|j| a.swap(k * n + j, best * n + j));
                    det = -det;
                }
                det *= a[k * n + k];
                for i in k + 1..n {
                    let factor = a[i * n + k] / a[k * n + k];
                    (k..n).for_each(|j| a[i * n + j] -= factor * a[k * n + j]);
                }
            }
            det
        };
        let out: Vec<f64> = (0..ty.n_elements()).map(det).collect();
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}
