//! Quantized models of 8-bit integers: products surrounded by quantization become integer products, and
//! operators that only move elements move integers.
//!
//! [`graph::in_bytes`] rewrites a graph before it is imported; a product of two factors that stand for
//! numbers is then `MatMulInteger` (a convolution `ConvInteger`), `Add` of a bias in integers, `Cast` and
//! `Mul`, as dynamic quantization writes it. [`product`] imports these four as one product, whose sums are
//! converted before they are stored, and [`epilogue`] has it store bytes where these are what is read.

pub mod epilogue;
pub mod graph;
mod packed;
mod price;
mod product;
mod split;
