//! Constants of f32 that are stored losslessly in 8 or 16 bits per element in a file.

/// Minimum size in bytes of a constant that is narrowed.
const LEAST_BYTES: usize = 1024;

/// Maximum magnitude of an integer that a scale turns into an element: that of u8 minus a zero point.
const MOST: f32 = 255.0;

/// Form of the elements of a narrowed constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NarrowForm {
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// u8; each plus the smallest integer of its scale, times that scale.
    Levels {
        /// Number of scales.
        n_scales: usize,
        /// Number of adjacent elements with one scale; the following ones have the next scale, and after the
        /// last scale the first one again.
        n_each: usize,
    },
}

/// Narrowed constant.
#[derive(Debug, PartialEq)]
pub struct Narrowed {
    /// Form of its elements.
    pub form: NarrowForm,
    /// Elements in that form; levels are preceded by their scales and as many smallest integers, all as f32.
    pub bytes: Vec<u8>,
}

/// Stores the elements of an f32 tensor in fewer bits, if there are many and all are exact.
pub fn narrowed(data: &[u8], shape: &[usize]) -> Option<Narrowed> {
    if data.len() < LEAST_BYTES {
        return None;
    }
    levels(data, shape).or_else(|| halved(data))
}

/// Narrows f32 elements to 16 bits each.
fn halved(data: &[u8]) -> Option<Narrowed> {
    let bits = || data.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let exact_bf16 = |bits: u32| (bits & 0xffff == 0).then_some((bits >> 16) as u16);
    let of = |form, half: Vec<u16>| Narrowed { form, bytes: half.into_iter().flat_map(u16::to_le_bytes).collect() };
    let as_f16 = bits().map(exact_f16).collect::<Option<Vec<u16>>>().map(|half| of(NarrowForm::F16, half));
    as_f16.or_else(|| Some(of(NarrowForm::Bf16, bits().map(exact_bf16).collect::<Option<Vec<u16>>>()?)))
}

/// Finds the f16 with the value of an f32 of these bits.
fn exact_f16(bits: u32) -> Option<u16> {
    let (sign, exponent, fraction) = ((bits >> 16) & 0x8000, (bits >> 23) & 0xff, bits & 0x7f_ffff);
    let cut = |bits: u32, n: u32| (bits & ((1 << n) - 1) == 0).then_some(bits >> n);
    let magnitude = match exponent {
        0 => (fraction == 0).then_some(0)?,
        // Subnormal numbers of f16 are normal ones of f32.
        103..=112 => cut(fraction | 1 << 23, 126 - exponent)?,
        113..=142 => (exponent - 112) << 10 | cut(fraction, 13)?,
        255 => 0x7c00 | cut(fraction, 13)?,
        _ => return None,
    };
    u16::try_from(sign | magnitude).ok()
}

/// Narrows f32 elements to integers with a scale: one of the tensor, or one of each position of a dimension.
fn levels(data: &[u8], shape: &[usize]) -> Option<Narrowed> {
    let numbers: Vec<f32> = data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let of_dimension = |axis: usize| (shape[axis], shape[axis + 1..].iter().product());
    let n_dimensions = if shape.iter().product::<usize>() == numbers.len() { shape.len() } else { 0 };
    let all = std::iter::once((1, numbers.len())).chain((0..n_dimensions).map(of_dimension));
    // With more scales, 16 bits per element take no more space.
    let mut few = all.filter(|(n_scales, _)| (1..numbers.len() / 8).contains(n_scales));
    few.find_map(|(n_scales, n_each)| levels_along(&numbers, n_scales, n_each))
}

fn levels_along(numbers: &[f32], n_scales: usize, n_each: usize) -> Option<Narrowed> {
    let (mut scales, mut leasts) = (Vec::with_capacity(n_scales), Vec::with_capacity(n_scales));
    let mut levels = vec![0; numbers.len()];
    for at in 0..n_scales {
        let places = || (at * n_each..numbers.len()).step_by(n_scales * n_each).flat_map(|first| first..first + n_each);
        let own: Vec<f32> = places().map(|place| numbers[place]).collect();
        let (scale, least) = scale_of(&own)?;
        places().zip(&own).for_each(|(place, x)| levels[place] = ((x / scale).round() - least) as u8);
        scales.push(scale);
        leasts.push(least);
    }
    let head = scales.into_iter().chain(leasts).flat_map(f32::to_le_bytes);
    Some(Narrowed { form: NarrowForm::Levels { n_scales, n_each }, bytes: head.chain(levels).collect() })
}

/// Finds a scale of which all of these numbers are integer multiples, rounded once, and the smallest of the
/// integers; `None` if they do not fit in a byte.
fn scale_of(numbers: &[f32]) -> Option<(f32, f32)> {
    let magnitudes = numbers.iter().map(|x| x.abs()).filter(|x| *x > 0.0);
    let nearest = magnitudes.reduce(f32::min).unwrap_or(1.0);
    let is_product = |x: &f32, scale: f32| {
        // A level has no negative zero.
        let integer = (x / scale).round() + 0.0;
        integer.abs() <= MOST && (integer * scale).to_bits() == x.to_bits()
    };
    // The number nearest to zero is a multiple too; its rounding leaves the scale's last bit undetermined.
    let scales = (1..=MOST as u32).flat_map(|integer| {
        let scale = (f64::from(nearest) / f64::from(integer)) as f32;
        [scale, scale.next_up(), scale.next_down()]
    });
    let fits = |scale: &f32| scale.is_normal() && numbers.iter().all(|x| is_product(x, *scale));
    let scale = scales.into_iter().find(fits)?;
    let integers = || numbers.iter().map(|x| (x / scale).round());
    let (least, most) = (integers().reduce(f32::min)?, integers().reduce(f32::max)?);
    (most - least <= MOST).then_some((scale, least))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of an f16 as f32, by the definition of its fields.
    fn value(half: u16) -> f32 {
        let (exponent, fraction) = (i32::from(half >> 10 & 0x1f), f64::from(half & 0x3ff));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-24),
            _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
        };
        (if half >> 15 == 1 { -magnitude } else { magnitude }) as f32
    }

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    #[test]
    fn all_numbers_of_f16_and_no_others_are_halved() {
        for half in 0..=u16::MAX {
            let (sign, fraction) = (u32::from(half >> 15) << 31, u32::from(half & 0x3ff) << 13);
            let is_special = half & 0x7c00 == 0x7c00;
            let bits = if is_special { sign | 0x7f80_0000 | fraction } else { value(half).to_bits() };
            assert_eq!(exact_f16(bits), Some(half), "{half:#x}");
            assert_eq!(exact_f16(bits ^ 1), None, "{half:#x}");
        }
        let others = [65536.0, 2f32.powi(-25), 1.5 * 2f32.powi(-24), 1.0 + 2f32.powi(-11), f32::MIN_POSITIVE, 1e30];
        others.into_iter().for_each(|x| assert_eq!(exact_f16(x.to_bits()), None, "{x}"));
        let many = |x: f32| bytes(&[x; 300]);
        assert_eq!(halved(&many(1e30)), None);
        let form = |x: f32| halved(&many(x)).map(|narrowed| (narrowed.bytes.len(), narrowed.form));
        assert_eq!(form(2f32.powi(100)), Some((600, NarrowForm::Bf16)));
        assert_eq!(form(1.0 / 1024.0), Some((600, NarrowForm::F16)));
        assert_eq!(narrowed(&1f32.to_le_bytes(), &[1]), None);
    }

    /// Integers with a scale of the tensor, of rows, of columns and of a dimension between, and numbers
    /// without a scale.
    #[test]
    fn products_of_integers_with_scales_are_levels() {
        let shape = [24, 20, 32];
        let scale = |at: usize| 0.013 * (1.0 + at as f32 / 7.0);
        let integer = |at: usize| (at * 37 % 251) as f32 - 130.0;
        for (n_scales, n_each) in [(1, 24 * 20 * 32), (24, 20 * 32), (20, 32), (32, 1)] {
            let own = |at: usize| scale(at / n_each % n_scales);
            let mut numbers: Vec<f32> = (0..24 * 20 * 32).map(|at| integer(at) * own(at)).collect();
            let found = narrowed(&bytes(&numbers), &shape).expect("they are levels");
            assert_eq!(found.form, NarrowForm::Levels { n_scales, n_each });
            let (head, levels) = found.bytes.split_at(8 * n_scales);
            let head: Vec<f32> = head.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let back = levels.iter().enumerate().map(|(at, level)| {
                let of = at / n_each % n_scales;
                (f32::from(*level) + head[n_scales + of]) * head[of]
            });
            assert!(back.zip(&numbers).all(|(x, y)| x.to_bits() == y.to_bits()));
            // A single differing bit prevents it, and so does an integer beyond a byte, or a negative zero.
            for other in [numbers[777].next_up(), 300.0 * own(777), -0.0, f32::NAN] {
                let was = std::mem::replace(&mut numbers[777], other);
                assert_eq!(narrowed(&bytes(&numbers), &shape), None, "{other}");
                numbers[777] = was;
            }
        }
    }
}
