//! Places of a library's constants: in its file, or in memory that its first context fills.

use tilewright_ir::{DType, Part};
use tilewright_runtime::{Constant, Model, Place, Plan, TensorSlice, Work};

/// Constants begin at multiples of so many bytes.
const ALIGN: usize = 64;

/// Size from which on a kernel's kept buffers count as large, in per cent of their constants: packing rounds
/// up, Winograd's transformations multiply.
const LARGE_PERCENT: usize = 125;

/// Constants of fewer bytes stay as they are in the file, even if 16 bits would do for a number.
const LEAST_HALVED_BYTES: usize = 1024;

/// When a library makes what its kernels keep of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// Buffers that would be larger than the weights are made with the first context; the rest ahead.
    Small,
    /// All ahead.
    Ready,
}

impl Weights {
    /// Each with its name and what it is.
    pub const ALL: [(Weights, &str, &str); 2] = [
        (
            Weights::Small,
            "small",
            "The file is about as large as the weights, with f16 and bf16 as such; the first context makes the rest",
        ),
        (Weights::Ready, "ready", "All is in the file as kernels want it, so that the first context is there at once"),
    ];
}

/// Place of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConstantHome {
    /// Offset in the file's constants.
    File(usize),
    /// Offset in the memory that the first context fills.
    Made(usize),
}

/// The constants of a library.
pub struct Constants {
    /// Place of each constant of the plan; `None` where nothing needs it.
    homes: Vec<Option<ConstantHome>>,
    /// Constants in the file, until they are in its object.
    pub bytes: Vec<u8>,
    /// How many bytes these are.
    pub n_bytes: usize,
    /// The size of those that the first context makes.
    pub made_bytes: usize,
    /// The first bytes of these, which runs read; the rest serves to make them.
    pub kept_bytes: usize,
    /// Constants in the file that the first context widens to f32 before it makes others.
    pub widened: Vec<Widened>,
    /// The steps of the plan whose kernels make them.
    pub makers: Vec<usize>,
}

/// A constant of f32 that the file has in 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widened {
    /// Start within the file's constants, in bytes.
    pub from: usize,
    /// Start within the memory that the first context fills, in bytes.
    pub to: usize,
    /// Elements.
    pub n: usize,
    /// Whether it is of bf16, and not of f16.
    pub is_bf16: bool,
}

impl Constants {
    /// Lays the constants of a model out.
    pub fn new(model: &Model, weights: Weights) -> Constants {
        let constants = &model.plan().constants;
        let is_small = weights == Weights::Small;
        let (mut is_made, mut is_read) = (vec![false; constants.len()], vec![false; constants.len()]);
        let mut makers = Vec::new();
        for step in model.preparations().into_iter().filter(|_| is_small) {
            let (read, kept) = of_preparation(model, step);
            let size = |of: &[usize]| of.iter().map(|&at| constants[at].n_bytes()).sum::<usize>();
            if 100 * size(&kept) > LARGE_PERCENT * size(&read) {
                kept.into_iter().for_each(|at| is_made[at] = true);
                read.into_iter().for_each(|at| is_read[at] = true);
                makers.push(step);
            }
        }
        let is_of_runs = |at: &usize| model.constant_offset(*at).is_some();
        let all = || 0..constants.len();
        let is_f32 = singles(model.plan());
        let mut made = Constants {
            homes: vec![None; constants.len()],
            bytes: Vec::new(),
            n_bytes: 0,
            made_bytes: 0,
            kept_bytes: 0,
            widened: Vec::new(),
            makers,
        };
        for at in all().filter(is_of_runs) {
            made.place(model, at, is_made[at], is_small && is_f32[at]);
        }
        made.kept_bytes = made.made_bytes;
        for at in all().filter(|at| !is_of_runs(at) && is_read[*at]) {
            made.place(model, at, false, is_small && is_f32[at]);
        }
        made.n_bytes = made.bytes.len();
        made
    }

    /// Gives a constant its place: among those that are made, or in the file, in 16 bits where it may be and
    /// nothing is lost.
    fn place(&mut self, model: &Model, at: usize, is_made: bool, may_be_halved: bool) {
        let constant = &model.plan().constants[at];
        if is_made {
            self.homes[at] = Some(ConstantHome::Made(self.reserve(constant.n_bytes())));
            return;
        }
        let data = match (constant, model.constant_offset(at)) {
            (Constant::Data(data), _) => &data[..],
            (Constant::Prepared(n_bytes), Some(offset)) => &model.constants()[offset..offset + n_bytes],
            (Constant::Forgotten(_), _) => panic!("a model that forgot its data is for runs alone"),
            (Constant::Prepared(_), None) => unreachable!("what is prepared has a place"),
        };
        let from = self.bytes.len();
        match may_be_halved.then(|| halved(data)).flatten() {
            Some((half, is_bf16)) => {
                let to = self.reserve(data.len());
                self.widened.push(Widened { from, to, n: half.len() / 2, is_bf16 });
                self.bytes.extend_from_slice(&half);
                self.homes[at] = Some(ConstantHome::Made(to));
            }
            None => {
                self.bytes.extend_from_slice(data);
                self.homes[at] = Some(ConstantHome::File(from));
            }
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
    }

    /// Reserves so many bytes of the memory that the first context fills, and returns their start.
    fn reserve(&mut self, n_bytes: usize) -> usize {
        let start = self.made_bytes;
        self.made_bytes += n_bytes.next_multiple_of(ALIGN);
        start
    }

    /// Place of a slice of a constant; `None` where the slice is of another tensor, or nothing needs the
    /// constant.
    pub fn home(&self, model: &Model, slice: &TensorSlice) -> Option<ConstantHome> {
        let home = self.homes[model.constant_of(slice)?]?;
        Some(match home {
            ConstantHome::File(offset) => ConstantHome::File(offset + slice.offset),
            ConstantHome::Made(offset) => ConstantHome::Made(offset + slice.offset),
        })
    }
}

/// Tells of each constant whether all of its tensors are f32.
fn singles(plan: &Plan) -> Vec<bool> {
    let mut is_f32 = vec![true; plan.constants.len()];
    for tensor in &plan.tensors {
        if let Place::Constant(at) = tensor.place {
            is_f32[at] &= tensor.dtype == DType::F32;
        }
    }
    is_f32
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

/// Stores numbers of f32 in 16 bits each, where there are many and none loses a bit: the bytes, and whether
/// they are bf16.
fn halved(data: &[u8]) -> Option<(Vec<u8>, bool)> {
    let bits = || data.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let exact_bf16 = |bits: u32| (bits & 0xffff == 0).then_some((bits >> 16) as u16);
    let bytes_of = |half: Vec<u16>| half.into_iter().flat_map(u16::to_le_bytes).collect();
    if data.len() < LEAST_HALVED_BYTES {
        return None;
    }
    let as_f16 = bits().map(exact_f16).collect::<Option<Vec<u16>>>().map(|half| (bytes_of(half), false));
    as_f16.or_else(|| Some((bytes_of(bits().map(exact_bf16).collect::<Option<Vec<u16>>>()?), true)))
}

/// The constants that a step's kernel prepares what it keeps of, and those that this is.
fn of_preparation(model: &Model, step: usize) -> (Vec<usize>, Vec<usize>) {
    let Work::Kernel { kernel, arguments, kept, .. } = &model.plan().steps[step].work else {
        unreachable!("what prepares is a kernel")
    };
    let used = arguments.iter().zip(0..).filter(|(_, at)| model.is_used(*kernel, *at, &[Part::Prepare]));
    let read = used.filter_map(|(slice, _)| model.constant_of(slice)).collect();
    (read, kept.iter().filter_map(|slice| model.constant_of(slice)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The f32 with the value of an f16, by the definition of its fields.
    fn value(half: u16) -> f32 {
        let (exponent, fraction) = (i32::from(half >> 10 & 0x1f), f64::from(half & 0x3ff));
        let magnitude = match exponent {
            0 => fraction * 2f64.powi(-24),
            _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
        };
        (if half >> 15 == 1 { -magnitude } else { magnitude }) as f32
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
        let many = |x: f32| x.to_le_bytes().repeat(300);
        assert_eq!(halved(&many(1e30)), None);
        assert_eq!(halved(&many(2f32.powi(100))).map(|(half, is_bf16)| (half.len(), is_bf16)), Some((600, true)));
        assert_eq!(halved(&many(1.0 / 1024.0)).map(|(half, is_bf16)| (half.len(), is_bf16)), Some((600, false)));
        assert_eq!(halved(&1f32.to_le_bytes()), None);
    }
}
