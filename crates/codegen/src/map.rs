//! Hash maps with a fast hash for trusted keys, not hardened against collisions.

use std::hash::{BuildHasherDefault, Hasher};

/// Hash map with a fast hash.
pub type Map<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<Mixer>>;

/// Hasher that multiplies and folds each word into the state.
#[derive(Default)]
pub struct Mixer(u64);

impl Mixer {
    fn mix(&mut self, word: u64) {
        let wide = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15_u128;
        self.0 = (wide as u64 ^ (wide >> 64) as u64).wrapping_add(0xd1b5_4a32_d192_ed03);
    }
}

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.mix(u64::from_le_bytes(word));
        }
    }

    fn write_u32(&mut self, x: u32) {
        self.mix(u64::from(x));
    }

    fn write_u64(&mut self, x: u64) {
        self.mix(x);
    }

    fn write_i64(&mut self, x: i64) {
        self.mix(x as u64);
    }

    fn write_usize(&mut self, x: usize) {
        self.mix(x as u64);
    }

    fn write_isize(&mut self, x: isize) {
        self.mix(x as u64);
    }
}
