//! Import of Fourier transforms, as products with the DFT matrix.

use std::f64::consts::TAU;

use tilewright_graph::DType;
use tilewright_graph::op::{Dft, Stft, axis};
use tilewright_runtime::host::MEL;

use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{input, mul};

/// Maximum number of elements of the matrix of a Fourier transform.
const MOST_OF_TRANSFORM: usize = 1 << 24;

impl NodeImport<'_> {
    /// Computes weights from frequencies to mel bands.
    pub(super) fn mel_weights(&mut self) -> Lowered {
        let (rate, low, high, to) = (self.input(2)?, self.input(3)?, self.input(4)?, self.output()?);
        [rate, low, high, to].iter().try_for_each(|id| self.need_code(*id))?;
        let parameters = vec![self.known_number(1)? as i64, self.known_number(0)? as i64];
        let shape = |job: &Self, id: ValueId| job.net.shape(id).to_vec();
        let (of_rate, of_low, of_high, out) = (shape(self, rate), shape(self, low), shape(self, high), shape(self, to));
        let rate = self.whole_map("rate", input(0), &[rate], &of_rate);
        let (low, high) = (self.double("low", low, &of_low), self.double("high", high, &of_high));
        let weights = self.value("weights", DType::F64, &out);
        self.call(MEL, parameters, 0, &[rate, low, high], &[weights]);
        self.push(Kind::Map(input(0)), &[weights], to);
        Ok(())
    }

    /// Makes the matrix of a Fourier transform of length `n`, in the precision of `like`: rows of `n_in`
    /// complex or real numbers multiplied by it yield `n_out` terms.
    fn transform(
        &mut self,
        like: ValueId,
        [n_in, parts]: [usize; 2],
        n: usize,
        [n_out, out_parts]: [usize; 2],
        is_inverse: bool,
    ) -> Lowered<ValueId> {
        let (rows, columns) = (n_in * parts, n_out * out_parts);
        let size = rows.saturating_mul(columns);
        let too_large = || NoCode::Size {
            what: "elements of the matrix of waves",
            size: i64::try_from(size).unwrap_or(i64::MAX),
            most: MOST_OF_TRANSFORM as i64,
        };
        need(size <= MOST_OF_TRANSFORM, too_large)?;
        need(n > 0, || NoCode::Form("transforms of no numbers"))?;
        let (sign, share) = if is_inverse { (1.0, 1.0 / n as f64) } else { (-1.0, 1.0) };
        let mut numbers = vec![0.0; rows * columns];
        // For real numbers, the second half of the transform is the first one reversed and conjugated.
        let n_given = if out_parts == 1 { n_in.min(n / 2 + 1) } else { n_in.min(n) };
        for t in 0..n_given {
            let times = if out_parts == 1 && t > 0 && 2 * t != n { 2.0 } else { 1.0 };
            for k in 0..n_out {
                let (sine, cosine) = (sign * TAU * ((k * t) % n) as f64 / n as f64).sin_cos();
                for part in 0..parts {
                    // A multiplication by i is a rotation by a right angle.
                    let terms = if part == 0 { [cosine, sine] } else { [-sine, cosine] };
                    for out_part in 0..out_parts {
                        numbers[(t * parts + part) * columns + k * out_parts + out_part] =
                            terms[out_part] * share * times;
                    }
                }
            }
        }
        Ok(self.real_constant("waves", like, &[rows as i64, columns as i64], &numbers))
    }

    /// Lowers a Fourier transform along a dimension to a product with a matrix.
    pub(super) fn fourier(&mut self, op: &Dft) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        self.need_real(x)?;
        let from_half = op.is_inverse && op.is_onesided;
        let out = self.net.shape(to).to_vec();
        let rank = shape.len();
        let along = match op.axis {
            Some(along) => along,
            None if self.try_input(2).is_some() => self.known_number(2)? as i64,
            None => -2,
        };
        let at = axis(along, rank)?;
        let n = match self.try_input(1) {
            Some(_) => self.known_number(1)? as usize,
            None if from_half => 2 * (shape[at] as usize).saturating_sub(1),
            None => shape[at] as usize,
        };
        let (n_in, parts) = (shape[at], shape[rank - 1]);
        let waves = self.transform(
            x,
            [n_in as usize, parts as usize],
            n,
            [out[at] as usize, out[rank - 1] as usize],
            op.is_inverse,
        )?;
        let outer: i64 = shape[..at].iter().product();
        let inner: i64 = shape[at + 1..rank - 1].iter().product();
        let x = self.viewed("apart", x, &[outer, n_in, inner, parts]);
        let x = self.step("turned", Kind::Transpose(vec![0, 2, 1, 3]), &[x], &[outer, inner, n_in, parts]);
        let x = self.viewed("rows", x, &[outer * inner, n_in * parts]);
        let found = self.matrix_product("terms", x, waves, false);
        let found = self.viewed("terms", found, &[outer, inner, out[at], out[rank - 1]]);
        let back =
            self.step("back", Kind::Transpose(vec![0, 2, 1, 3]), &[found], &[outer, out[at], inner, out[rank - 1]]);
        self.push(Kind::View, &[back], to);
        Ok(())
    }

    /// Lowers Fourier transforms of windows of a signal.
    pub(super) fn windows_of_fourier(&mut self, _: &Stft) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let shape = self.shape(0)?;
        let (batch, n, parts) = (shape[0], shape[1], shape.get(2).copied().unwrap_or(1));
        let [_, n_windows, n_out, _] = self.sizes_of(to)?;
        let step = self.known_number(1)? as i64;
        let length = match (self.try_input(3), self.try_input(2)) {
            (Some(_), _) => self.known_number(3)? as i64,
            (None, Some(window)) => self.net.value(window).n_elements(),
            (None, None) => return Err(NoCode::Missing(3)),
        };
        let places: Vec<i64> = (0..n_windows).flat_map(|w| (0..length).map(move |t| w * step + t)).collect();
        let places = self.whole_constant("places", DType::I64, &[n_windows, length], &places);
        let x = self.viewed("signal", x, &[batch, n, parts]);
        let sizes = [batch, n_windows, length, parts];
        let mut seen = self.step("windows", Kind::Gather { axis: 1, by_element: false }, &[x, places], &sizes);
        if let Some(window) = self.try_input(2) {
            self.need_same_type(window, x)?;
            let window = self.viewed("window", window, &[length, 1]);
            seen = self.step("weighed", Kind::Map(mul(input(0), input(1))), &[seen, window], &sizes);
        }
        let waves =
            self.transform(x, [length as usize, parts as usize], length as usize, [n_out as usize, 2], false)?;
        let rows = self.viewed("rows", seen, &[batch * n_windows, length * parts]);
        let found = self.matrix_product("terms", rows, waves, false);
        self.push(Kind::View, &[found], to);
        Ok(())
    }
}
