//! Block-quantized weights of 2, 4 or 8 bits with a scale per block, as in operators of ONNX Runtime's
//! domain. Several numbers share a byte, the first in its lowest bits.

use super::util::{around, axis, product, size};
use super::{Import, Inputs, Operation, Operator};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Matrix product with block-quantized weights: `A · ((W − zero_points) · scales)ᵀ + bias`, with A `[…, k]`
/// and W `[n, k]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatMulNBits {
    /// Number of columns of the result, rows of the weights.
    pub n: usize,
    /// Inner dimension: columns of A and of the weights.
    pub k: usize,
    /// Bits and block size of the weights.
    pub blocks: ScaledBlocks,
    /// Whether blocks of A are quantized to 8 bits dynamically (`accuracy_level` 4), if the zero points are
    /// integers.
    pub rounds: bool,
}

/// Slices of a block-quantized table, dequantized, chosen by the indices of input 1. An index out of range
/// yields zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherBlockQuantized {
    /// Bits and block size of the table.
    pub blocks: ScaledBlocks,
    /// Dimension that blocks extend along.
    pub quantize_axis: i64,
    /// Dimension that the indices refer to.
    pub gather_axis: i64,
}

/// Block quantization: bits of a number, and numbers that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaledBlocks {
    /// Bits of a number.
    pub bits: usize,
    /// Number of elements of a block.
    pub size: usize,
}

const DOMAIN: &str = "com.microsoft";

pub(super) const ROWS: &[Operator] = &[
    Operator {
        domain: DOMAIN,
        name: "MatMulNBits",
        since: &[1],
        n_inputs: 3..=6,
        import: |node| {
            let needed = |name: &str| -> Result<usize, OpError> {
                size(node.int(name)?.ok_or_else(|| invalid!("its attribute `{name}` is missing"))?)
            };
            if node.int_or("weight_prepacked", 0)? != 0 {
                return Err(unsupported!("weights packed for CUDA are not supported (give them as they are)"));
            }
            let rounds = match node.int_or("accuracy_level", 0)? {
                0..=3 => false,
                4 => true,
                level => return Err(invalid!("accuracy_level={level} is not one of 0 to 4")),
            };
            let blocks = ScaledBlocks::import(node, needed("block_size")?)?;
            Ok(MatMulNBits { n: needed("N")?, k: needed("K")?, blocks, rounds }.into())
        },
    },
    Operator {
        domain: DOMAIN,
        name: "GatherBlockQuantized",
        since: &[1],
        n_inputs: 3..=4,
        import: |node| {
            let blocks = ScaledBlocks::import(node, size(node.int_or("block_size", 128)?)?)?;
            let (quantize_axis, gather_axis) = (node.int_or("quantize_axis", 1)?, node.int_or("gather_axis", 0)?);
            Ok(GatherBlockQuantized { blocks, quantize_axis, gather_axis }.into())
        },
    },
];

impl ScaledBlocks {
    fn import(node: &Import, size: usize) -> Result<ScaledBlocks, OpError> {
        let bits = node.int_or("bits", 4)?;
        if ![2, 4, 8].contains(&bits) {
            return Err(invalid!("bits={bits} is not 2, 4 or 8"));
        }
        if size < 16 || !size.is_power_of_two() {
            return Err(invalid!("block_size={size} is no power of two from 16 on"));
        }
        Ok(ScaledBlocks { bits: bits as usize, size })
    }

    /// Number of bytes that `n` numbers take.
    fn bytes(&self, n: usize) -> usize {
        (n * self.bits).div_ceil(8)
    }

    /// Default zero point of weights without zero points: the middle of the range.
    pub fn middle(&self) -> u8 {
        1 << (self.bits - 1)
    }

    /// Unpacks the first `n` numbers of each row of `row_bytes` bytes.
    pub fn unpacked(&self, bytes: &[u8], row_bytes: usize, n: usize) -> Vec<u8> {
        if self.bits == 8 && row_bytes == n {
            return bytes.to_vec();
        }
        let each = 8 / self.bits;
        let mask = ((1_u16 << self.bits) - 1) as u8;
        let number = |row: &[u8], at: usize| row[at / each] >> (self.bits * (at % each)) & mask;
        bytes.chunks(row_bytes.max(1)).flat_map(|row| (0..n).map(move |at| number(row, at))).collect()
    }
}

/// Checks that a shape is one of these.
fn check_shape(found: &[usize], what: &str, at: usize, wanted: &[&[usize]]) -> Result<(), OpError> {
    if wanted.contains(&found) {
        return Ok(());
    }
    let text = crate::tensor::shape_text;
    let wanted: Vec<String> = wanted.iter().map(|shape| text(shape)).collect();
    Err(invalid!("its {what}, input {}, have shape {}, and should have {}", at + 1, text(found), wanted.join(" or ")))
}

/// An error for known scales that are no numbers. Those of weights in blocks may be 0 or negative.
pub(super) fn check_block_scales(inputs: Inputs<'_>, at: usize) -> Result<(), OpError> {
    let Some(scales) = inputs.fact(at)?.value else { return Ok(()) };
    match scales.floats().into_iter().find(|scale| !scale.is_finite()) {
        None => Ok(()),
        Some(scale) => Err(invalid!("its input {} has a scale of {scale} (quantize the model again)", at + 1)),
    }
}

/// Checks that an optional input has one of these types.
fn check_type(inputs: Inputs<'_>, at: usize, wanted: &[DType]) -> Result<(), OpError> {
    match inputs.optional(at) {
        Some(fact) if !wanted.contains(&fact.dtype()) => {
            let wanted: Vec<&str> = wanted.iter().map(|dtype| dtype.name()).collect();
            Err(invalid!("its input {} is {}, and should be {}", at + 1, fact.dtype(), wanted.join(" or ")))
        }
        _ => Ok(()),
    }
}

/// Constant weights of a [`MatMulNBits`], unpacked.
#[derive(Debug, Clone)]
pub struct PackedWeights {
    /// Quantized weights `[n, k]`, unsigned.
    pub numbers: Vec<u8>,
    /// Scales `[n, blocks]`.
    pub scales: Vec<f32>,
    /// Zero points `[n, blocks]`.
    pub zeros: Vec<f32>,
    /// Index of the block of each column.
    pub block_of: Vec<usize>,
}

impl MatMulNBits {
    /// Number of blocks in a row of weights.
    pub fn n_blocks(&self) -> usize {
        self.k.div_ceil(self.blocks.size)
    }

    /// Whether A is quantized to 8 bits with these inputs: zero points are integers, and blocks consist of
    /// neighbouring columns.
    pub fn rounds_with(&self, inputs: Inputs<'_>) -> bool {
        let has_whole_zeros = inputs.optional(3).is_none_or(|zeros| zeros.dtype() == DType::U8);
        self.rounds && has_whole_zeros && inputs.optional(4).is_none()
    }

    /// Whether the weights tensor, input 1, has no elements although the node's sizes require some; such
    /// weights count as zeros.
    pub fn is_empty(&self, inputs: Inputs<'_>) -> Result<bool, OpError> {
        let whole = [self.n, self.n_blocks(), self.blocks.bytes(self.blocks.size)];
        let shape = inputs.shape(1)?;
        let fits = shape.len() == 3 && shape.iter().zip(whole).all(|(found, whole)| *found == 0 || *found == whole);
        Ok(fits && shape.contains(&0) && !whole.contains(&0))
    }

    /// Unpacks the weights; they must be constants.
    ///
    /// # Errors
    /// If the weights are not constant, or a block index is invalid.
    pub fn weights(&self, inputs: Inputs<'_>) -> Result<PackedWeights, OpError> {
        let (n, n_blocks, blocks) = (self.n, self.n_blocks(), &self.blocks);
        let numbers = blocks.unpacked(inputs.tensor(1)?.bytes(), n_blocks * blocks.bytes(blocks.size), self.k);
        let single = |tensor: &Tensor| tensor.floats().into_iter().map(|x| x as f32).collect::<Vec<f32>>();
        let zeros = match inputs.optional_tensor(3)? {
            None => vec![f32::from(blocks.middle()); n * n_blocks],
            Some(zeros) if zeros.dtype() == DType::U8 => {
                blocks.unpacked(zeros.bytes(), blocks.bytes(n_blocks), n_blocks).into_iter().map(f32::from).collect()
            }
            Some(zeros) => single(zeros),
        };
        let block_of = match inputs.optional_i64s(4)? {
            None => (0..self.k).map(|k| k / blocks.size).collect(),
            Some(groups) => {
                let group = |&group: &i64| usize::try_from(group).ok().filter(|group| *group < n_blocks);
                let wrong = || invalid!("its input 5 has indices that are none of {n_blocks} blocks");
                groups[..self.k].iter().map(group).collect::<Option<_>>().ok_or_else(wrong)?
            }
        };
        Ok(PackedWeights { numbers, scales: single(inputs.tensor(2)?), zeros, block_of })
    }
}

impl PackedWeights {
    /// Dequantized weights `[n, k]`, each operation rounded to f32.
    pub fn singles(&self) -> Vec<f32> {
        let k = self.block_of.len();
        let n = self.numbers.len().checked_div(k).unwrap_or(0);
        let n_blocks = self.scales.len().checked_div(n).unwrap_or(0);
        let number = |(at, x): (usize, &u8)| {
            let block = at / k * n_blocks + self.block_of[at % k];
            (f32::from(*x) - self.zeros[block]) * self.scales[block]
        };
        self.numbers.iter().enumerate().map(number).collect()
    }
}

/// Quantizes a block to 8 bits symmetrically, as [`MatMulNBits`] does for a block of A: returns the scale and
/// the integers.
///
/// The scale is `max |x| / 127` and numbers are multiplied by `127 / max |x|`, each rounded to f32, as ONNX
/// Runtime does on x86-64. If that quotient exceeds f32, as for zeros, all integers are 0.
pub fn rounded_block(block: &[f64]) -> (f64, impl Iterator<Item = f64> + '_) {
    let largest = block.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let most = if block.iter().any(|x| x.is_nan()) { f64::NAN } else { largest };
    let (scale, inverse) = (most as f32 / 127.0, 127.0 / most as f32);
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    let rounded = block.iter().map(move |x| {
        let x = (*x as f32 * inverse).round_ties_even();
        if x.is_nan() { 0.0 } else { f64::from(x.clamp(-127.0, 127.0)) }
    });
    (f64::from(scale), rounded)
}

impl Operation for MatMulNBits {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let a = inputs.ty(0)?;
        if !matches!(a.dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Err(invalid!("its input 1 is {}, and should be f32, f16 or bf16", a.dtype));
        }
        if a.shape.last() != Some(&self.k) {
            let shape = crate::tensor::shape_text(&a.shape);
            return Err(invalid!("its input 1 has shape {shape}, and should have K={} columns", self.k));
        }
        let (n, n_blocks, blocks) = (self.n, self.n_blocks(), &self.blocks);
        check_type(inputs, 1, &[DType::U8])?;
        for at in [2, 5] {
            check_type(inputs, at, &[a.dtype])?;
        }
        check_type(inputs, 3, &[DType::U8, a.dtype])?;
        check_type(inputs, 4, &[DType::I32])?;
        if !self.is_empty(inputs)? {
            let shape = [n, n_blocks, blocks.bytes(blocks.size)];
            check_shape(inputs.shape(1)?, "weights", 1, &[&shape])?;
            check_shape(inputs.shape(2)?, "scales", 2, &[&[n, n_blocks], &[n * n_blocks]])?;
            check_block_scales(inputs, 2)?;
            if let Some(zeros) = inputs.optional(3) {
                let each = if zeros.dtype() == DType::U8 { blocks.bytes(n_blocks) } else { n_blocks };
                check_shape(zeros.shape(), "zero points", 3, &[&[n, each], &[n * each]])?;
            }
            if let Some(groups) = inputs.optional(4) {
                check_shape(groups.shape(), "blocks of columns", 4, &[&[self.k], &[n_blocks * blocks.size]])?;
            }
        }
        if let Some(bias) = inputs.optional(5) {
            check_shape(bias.shape(), "numbers to add", 5, &[&[n]])?;
        }
        let mut shape = a.shape.clone();
        shape.last_mut().into_iter().for_each(|last| *last = n);
        Ok(vec![TensorType::new(a.dtype, shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (n, k, n_blocks) = (self.n, self.k, self.n_blocks());
        let mut sums = vec![0.0; ty.n_elements()];
        if !self.is_empty(inputs)? && k > 0 && n > 0 {
            let a = inputs.tensor(0)?.floats();
            let PackedWeights { numbers, scales, zeros, block_of } = self.weights(inputs)?;
            let rounds = self.rounds_with(inputs);
            for (row, sums) in a.chunks(k).zip(sums.chunks_mut(n)) {
                let mut row = row.to_vec();
                let mut of_blocks = vec![1.0; n_blocks];
                if rounds {
                    for (block, scale) in row.chunks_mut(self.blocks.size).zip(&mut of_blocks) {
                        let own = block.to_vec();
                        let (own_scale, rounded) = rounded_block(&own);
                        *scale = own_scale;
                        block.iter_mut().zip(rounded).for_each(|(x, rounded)| *x = rounded);
                    }
                }
                for (j, sum) in sums.iter_mut().enumerate() {
                    let mut parts = vec![0.0; n_blocks];
                    for (at, x) in row.iter().enumerate() {
                        let block = block_of[at];
                        parts[block] += x * f64::from(numbers[j * k + at] as f32 - zeros[j * n_blocks + block]);
                    }
                    let part = |block: usize| parts[block] * of_blocks[block] * f64::from(scales[j * n_blocks + block]);
                    *sum = (0..n_blocks).map(part).sum();
                }
            }
        }
        if let Some(bias) = inputs.optional_tensor(5)? {
            let bias = bias.floats();
            sums.iter_mut().enumerate().for_each(|(at, sum)| *sum += bias[at % n]);
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &sums)])
    }
}

/// Table of a [`GatherBlockQuantized`] with its dimensions as numbers, not as bytes.
struct GatherTable {
    shape: Vec<usize>,
    of_scales: Vec<usize>,
    quantize_axis: usize,
    gather_axis: usize,
}

impl GatherBlockQuantized {
    fn table(&self, inputs: Inputs<'_>) -> Result<GatherTable, OpError> {
        let data = inputs.ty(0)?;
        let mut shape = data.shape.clone();
        let [quantize_axis, gather_axis] =
            [axis(self.quantize_axis, shape.len())?, axis(self.gather_axis, shape.len())?];
        let last = shape.len() - 1;
        match data.dtype {
            DType::U8 if gather_axis != 0 || quantize_axis == 0 => {
                return Err(invalid!("gather_axis is 0 and quantize_axis another where its input 1 is u8"));
            }
            DType::U8 => shape[last] *= 8 / self.blocks.bits,
            DType::I4 | DType::U4 => {}
            other => return Err(unsupported!("its input 1 is {other}, and should be u8, i4 or u4")),
        }
        let mut of_scales = shape.clone();
        of_scales[quantize_axis] = shape[quantize_axis].div_ceil(self.blocks.size);
        Ok(GatherTable { shape, of_scales, quantize_axis, gather_axis })
    }

    /// Dequantizes the whole table, each operation rounded to f32; returns its shape and elements.
    ///
    /// # Errors
    /// If the table is not constant.
    pub fn numbers(&self, inputs: Inputs<'_>) -> Result<(Vec<usize>, Vec<f32>), OpError> {
        let GatherTable { shape, of_scales, quantize_axis, .. } = self.table(inputs)?;
        let data = inputs.tensor(0)?;
        let whole = |tensor: &Tensor, shape: &[usize]| -> Vec<f32> {
            let last = shape.last().copied().unwrap_or(1);
            match tensor.dtype() {
                DType::U8 => {
                    let numbers = self.blocks.unpacked(tensor.bytes(), self.blocks.bytes(last), last);
                    numbers.into_iter().map(f32::from).collect()
                }
                _ => tensor.floats().into_iter().map(|x| x as f32).collect(),
            }
        };
        let numbers = whole(data, &shape);
        let scales: Vec<f64> = inputs.tensor(2)?.floats();
        let middle = if data.dtype() == DType::U8 { f32::from(self.blocks.middle()) } else { 0.0 };
        let zeros = inputs.optional_tensor(3)?.map(|zeros| whole(zeros, &of_scales));
        let (_, n, inner) = around(&shape, quantize_axis);
        let n_blocks = of_scales[quantize_axis];
        let block = |at: usize| (at / (n * inner) * n_blocks + at / inner % n / self.blocks.size) * inner + at % inner;
        let number = |(at, x): (usize, &f32)| {
            let zero = zeros.as_ref().map_or(middle, |zeros| zeros[block(at)]);
            (x - zero) * scales[block(at)] as f32
        };
        Ok((shape, numbers.iter().enumerate().map(number).collect()))
    }
}

impl Operation for GatherBlockQuantized {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let GatherTable { shape, of_scales, gather_axis, .. } = self.table(inputs)?;
        let dtype = inputs.fact(2)?.dtype();
        check_type(inputs, 2, &[DType::F32, DType::F16, DType::Bf16])?;
        check_type(inputs, 1, &[DType::I32, DType::I64])?;
        check_shape(inputs.shape(2)?, "scales", 2, &[&of_scales])?;
        check_block_scales(inputs, 2)?;
        if let Some(zeros) = inputs.optional(3) {
            let of_data = inputs.fact(0)?.dtype();
            check_type(inputs, 3, &[of_data])?;
            let mut wanted = of_scales;
            if of_data == DType::U8 {
                wanted.last_mut().into_iter().for_each(|last| *last = self.blocks.bytes(*last));
            }
            check_shape(zeros.shape(), "zero points", 3, &[&wanted])?;
        }
        let out = [&shape[..gather_axis], inputs.shape(1)?, &shape[gather_axis + 1..]].concat();
        Ok(vec![TensorType::new(dtype, out)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let gather_axis = self.table(inputs)?.gather_axis;
        let (shape, numbers) = self.numbers(inputs)?;
        let (outer, n, inner) = around(&shape, gather_axis);
        let indices = inputs.tensor(1)?.i64s();
        let mut found = Vec::with_capacity(product(&ty.shape));
        for o in 0..outer {
            for &index in &indices {
                let place = if index < 0 { index.saturating_add(n as i64) } else { index };
                match usize::try_from(place).ok().filter(|place| *place < n) {
                    Some(place) => {
                        let start = (o * n + place) * inner;
                        found.extend(numbers[start..start + inner].iter().map(|x| f64::from(*x)));
                    }
                    None => found.resize(found.len() + inner, 0.0),
                }
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &found)])
    }
}
