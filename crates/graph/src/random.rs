//! Random numbers that are reproducible on every machine and in every version.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{DType, Tensor, TensorType};

/// Generator splitmix64 (Steele, Lea and Flood 2014).
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Seeds a generator.
    pub fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// Returns the next 64 bits.
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform number in `low..high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (self.bits() >> 40) as f64 / f64::from(1 << 24) * (high - low)
    }

    /// Uniform number in `0..1` that an f32 represents.
    pub(crate) fn unit(&mut self) -> f64 {
        self.between(0.0, 1.0)
    }

    /// Uniform number in `0..1`.
    pub(crate) fn unit_double(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Two numbers of the standard normal distribution.
    pub(crate) fn normal_pair(&mut self) -> [f64; 2] {
        let radius = (-2.0 * (1.0 - self.unit_double()).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.unit_double();
        [radius * angle.cos(), radius * angle.sin()]
    }

    /// Random f32 tensor, uniform in `low..high`.
    ///
    /// # Panics
    /// If the number of elements overflows.
    pub fn tensor(&mut self, shape: impl Into<Vec<usize>>, low: f64, high: f64) -> Tensor {
        let ty = TensorType::new(DType::F32, shape);
        let numbers = (0..ty.n_elements()).flat_map(|_| (self.between(low, high) as f32).to_le_bytes());
        let bytes = numbers.collect::<Vec<u8>>().into();
        Tensor::new(ty, bytes).expect("as many numbers as the shape takes")
    }

    /// Random input for a model: floats uniform in -1..1; integers are all 1, as they may be indices, masks
    /// or lengths.
    pub fn input(&mut self, ty: &TensorType) -> Tensor {
        let number = |_| if ty.dtype.is_float() { self.between(-1.0, 1.0) } else { 1.0 };
        let numbers: Vec<f64> = (0..ty.n_elements()).map(number).collect();
        Tensor::from_floats(ty.dtype, ty.shape.clone(), &numbers)
    }
}

/// Key of the random numbers that a model gives a seed.
pub(crate) fn key_of_seed(seed: u32) -> u64 {
    SplitMix64::new(seed.into()).bits()
}

/// Key of random numbers without a seed: another one in each call and each process.
pub(crate) fn fresh_key() -> u64 {
    static FIRST: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    static N_CALLS: AtomicU64 = AtomicU64::new(0);
    SplitMix64::new(FIRST.wrapping_add(N_CALLS.fetch_add(1, Ordering::Relaxed))).bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_from_the_seed_alone() {
        // The first outputs of splitmix64 from the seed 1234567, as published.
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!([random.bits(), random.bits()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
        let x = SplitMix64::new(3).tensor([4, 5], -2.0, 6.0).floats();
        assert!(x.iter().all(|x| (-2.0..6.0).contains(x)) && x.iter().any(|&x| x < 0.0) && x.iter().any(|&x| x > 4.0));
        let ones = SplitMix64::new(3).input(&TensorType::new(DType::I64, [2]));
        assert_eq!(ones, Tensor::vector(&[1, 1]));
    }
}
