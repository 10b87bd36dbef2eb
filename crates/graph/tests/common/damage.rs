//! Random and damaged files, and checks of the memory that reading them takes.

use std::fs;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Memory that a reader may take for any file, in addition to four times the file's size.
const ALWAYS: u64 = 64 << 20;
/// Number of files whose memory is checked together.
const BATCH: usize = 500;

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|n| n.parse().ok())
}

/// Reads a number of kilobytes from this process's status, in bytes.
fn status(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Reads random files from `make`, and checks that none takes more memory than four times its size plus a
/// constant. `usual` is their number; set `TILEWRIGHT_CASES=1000000` for a long run, `TILEWRIGHT_SEED=…` for
/// other files.
///
/// # Panics
/// If a file takes more.
pub fn read_many(usual: usize, make: impl Fn(&mut Xoshiro256PlusPlus) -> Vec<u8>, read: impl Fn(Vec<u8>)) {
    let n_cases = from_environment("TILEWRIGHT_CASES").map_or(usual, |n| n as usize);
    let seed = from_environment("TILEWRIGHT_SEED").unwrap_or(1);
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    // The address space is measured, whose peak is known, as untouched memory counts, too.
    let before = status("VmSize");
    let mut largest = 0;
    for case in 0..n_cases {
        let file = make(&mut random);
        largest = largest.max(file.len() as u64);
        read(file);
        if case % BATCH == BATCH - 1 || case + 1 == n_cases {
            let grown = status("VmPeak").zip(before).map(|(peak, before)| peak.saturating_sub(before));
            let most = 4 * largest + ALWAYS;
            assert!(
                grown.is_none_or(|grown| grown <= most),
                "{grown:?} bytes for files of {largest} by case {case}\nrepro: TILEWRIGHT_SEED={seed}"
            );
        }
    }
}

/// Mutates a file: changes, truncates, repeats or removes a few parts.
pub fn mutated(file: &[u8], random: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for _ in 0..random.random_range(1..5) {
        if bytes.is_empty() {
            break;
        }
        let at = random.random_range(0..bytes.len());
        match random.random_range(0..6) {
            0 => bytes.truncate(at),
            1 => bytes[at] = random.random(),
            2 => bytes[at] ^= 1 << random.random_range(0..8),
            3 => {
                let part = bytes[at..(at + random.random_range(0..40)).min(bytes.len())].to_vec();
                let to = random.random_range(0..bytes.len());
                bytes.splice(to..to, part);
            }
            4 => {
                // A varint that is large, or negative.
                let large: &[u8] = [
                    &[0xff, 0xff, 0xff, 0xff, 0x0f][..],
                    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
                    &[0x80, 0x80, 0x80, 0x80, 0x80, 0x20],
                ][random.random_range(0..3)];
                bytes.splice(at..at + 1, large.iter().copied());
            }
            _ => {
                bytes.drain(at..(at + random.random_range(0..10)).min(bytes.len()));
            }
        }
    }
    bytes
}
