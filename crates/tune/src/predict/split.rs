//! Division of problems into those for training and those held out.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::data::{TunedProblem, content_hash};

/// The share of rows that is held out.
const HELD_OUT: f64 = 0.1;

/// Division of rows into those to keep and those held out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldOut {
    /// Each row by chance.
    Random,
    /// Each group by chance, so that no group is on both sides: for a claim about unseen groups.
    ByGroup,
}

/// Divides rows into those to keep, nine in ten, and those held out, by their places.
///
/// A hash of its name and the seed decides about a group, so that it is on the same side in every table.
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
