//! Quantized models of 8-bit integers: products surrounded by quantization become integer products, and
//! operators that only move elements move integers.
//!
//! [`graph::in_bytes`] rewrites a graph before it is imported; a product of two dequantized operands then
//! becomes `MatMulInteger` (a convolution `ConvInteger`), `Add` of an integer bias, `Cast` and `Mul`, as in
//! dynamically quantized models. [`product`] imports these four as one product, whose sums are converted
//! before they are stored, and [`epilogue`] makes it store 8-bit integers if all readers quantize its result.

pub mod epilogue;
pub mod graph;
mod packed;
mod price;
mod product;
mod split;

/// Whether all elements of 8-bit weights are from −64 to 64. Sums of two of their products with bytes then
/// fit 16 bits.
pub fn has_7_bits(weights: &tilewright_graph::Tensor) -> bool {
    weights.bytes().iter().all(|x| (-64..=64).contains(&x.cast_signed()))
}

#[cfg(test)]
mod tests {
    use tilewright_graph::{DType, Tensor};

    use super::has_7_bits;

    #[test]
    fn seven_bits_end_at_64() {
        let check = |weights: &[i128], expected: bool| {
            let tensor = Tensor::from_integers(DType::I8, [weights.len()], weights);
            assert_eq!(has_7_bits(&tensor), expected, "{weights:?}");
        };
        check(&[-64, 0, 64], true);
        check(&[65], false);
        check(&[-65], false);
        check(&[-128], false);
    }
}
