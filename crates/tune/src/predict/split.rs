//! Split of problems into training and held-out ones.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::data::{TunedProblem, content_hash};

/// Share of rows that is held out.
const HELD_OUT: f64 = 0.1;

/// Unit of a random split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldOut {
    /// Single rows.
    Random,
    /// Whole groups, so that the held-out groups are unseen in training.
    ByGroup,
}

/// Splits rows into nine tenths for training and a tenth held out, both as indices.
///
/// The side of a group is decided by a hash of its name and the seed, so that it is the same in every table.
pub fn divide(rows: &[TunedProblem], split: HoldOut, seed: u64) -> (Vec<usize>, Vec<usize>) {
    match split {
        HoldOut::Random => {
            let mut places: Vec<usize> = (0..rows.len()).collect();
            places.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
            let n_held_out = (rows.len() as f64 * HELD_OUT).ceil() as usize;
            let mut kept = places.split_off(n_held_out);
            kept.sort_unstable();
            places.sort_unstable();
            (kept, places)
        }
        HoldOut::ByGroup => (0..rows.len()).partition(|&at| {
            let hash = content_hash(format!("{seed}/{}", rows[at].group).as_bytes());
            // The upper bits of a product depend on all lower ones.
            let part = (hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11) as f64 / (1u64 << 53) as f64;
            part >= HELD_OUT
        }),
    }
}
