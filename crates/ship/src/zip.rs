//! ZIP files for wheels, and the hashes that wheels list.

use data_encoding::BASE64URL_NOPAD;
use flate2::Crc;

/// Makes a ZIP file of uncompressed files. Equal files give equal bytes.
pub fn zip<'f>(files: impl Iterator<Item = (&'f str, &'f [u8])>) -> Vec<u8> {
    let (mut out, mut directory, mut n_files) = (Vec::new(), Vec::new(), 0u16);
    for (name, bytes) in files {
        let mut crc = Crc::new();
        crc.update(bytes);
        let n_bytes = bytes.len() as u32;
        // Version 2.0, no flags, stored, the earliest date of the format.
        let mut common = Vec::new();
        [20u16, 0, 0, 0, 0x21].iter().for_each(|field| common.extend(field.to_le_bytes()));
        [crc.sum(), n_bytes, n_bytes].iter().for_each(|field| common.extend(field.to_le_bytes()));
        common.extend((name.len() as u16).to_le_bytes());
        common.extend(0u16.to_le_bytes());
        let at = out.len() as u32;
        out.extend(b"PK\x03\x04");
        out.extend(&common);
        out.extend(name.as_bytes());
        out.extend(bytes);
        // Made on Unix, as a file readable by everybody.
        directory.extend(b"PK\x01\x02\x14\x03");
        directory.extend(&common);
        [0u16, 0, 0].iter().for_each(|field| directory.extend(field.to_le_bytes()));
        directory.extend((0o100_644u32 << 16).to_le_bytes());
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
        n_files += 1;
    }
    let at = out.len() as u32;
    out.extend(&directory);
    out.extend(b"PK\x05\x06\0\0\0\0");
    [n_files, n_files].iter().for_each(|field| out.extend(field.to_le_bytes()));
    out.extend((directory.len() as u32).to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend(0u16.to_le_bytes());
    out
}

/// SHA-256 in the form of wheels: base64url without padding.
pub fn wheel_hash(bytes: &[u8]) -> String {
    BASE64URL_NOPAD.encode(&sha256(bytes))
}

/// First 32 bits of the fractional parts of the first primes' roots: of square roots, then of cube roots.
fn constants() -> ([u32; 8], [u32; 64]) {
    let mut primes = (2u64..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    let primes: Vec<u64> = primes.by_ref().take(64).collect();
    // The root of p·2^(32·degree), whose low half is the fraction; computed bit by bit, in integers.
    let fraction = |p: u64, degree: u32| {
        let target = u128::from(p) << (32 * degree);
        let root = (0..36).rev().fold(0u128, |root, bit| {
            let next = root | 1 << bit;
            if next.pow(degree) <= target { next } else { root }
        });
        root as u32
    };
    (std::array::from_fn(|at| fraction(primes[at], 2)), std::array::from_fn(|at| fraction(primes[at], 3)))
}

/// SHA-256, FIPS 180-4.
fn sha256(bytes: &[u8]) -> [u8; 32] {
    let (mut state, round_constants) = constants();
    let mut padded = bytes.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((8 * bytes.len() as u64).to_be_bytes());
    for block in padded.chunks_exact(64) {
        let mut words = [0u32; 64];
        for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
            *word = u32::from_be_bytes(bytes.try_into().expect("four bytes"));
        }
        for at in 16..64 {
            let (a, b) = (words[at - 15], words[at - 2]);
            let a = a.rotate_right(7) ^ a.rotate_right(18) ^ a >> 3;
            let b = b.rotate_right(17) ^ b.rotate_right(19) ^ b >> 10;
            words[at] = words[at - 16].wrapping_add(a).wrapping_add(words[at - 7]).wrapping_add(b);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for (word, constant) in words.iter().zip(&round_constants) {
            let s = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = e & f ^ !e & g;
            let first = [s, choice, *constant, *word].iter().fold(h, |sum, x| sum.wrapping_add(*x));
            let s = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let second = s.wrapping_add(a & b ^ a & c ^ b & c);
            (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(first), c, b, a, first.wrapping_add(second));
        }
        for (sum, x) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *sum = sum.wrapping_add(x);
        }
    }
    let mut out = [0; 32];
    out.chunks_exact_mut(4).zip(state).for_each(|(out, word)| out.copy_from_slice(&word.to_be_bytes()));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_the_standards() {
        // FIPS 180-4's examples, and the empty text.
        for (text, expected) in [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
        ] {
            assert_eq!(data_encoding::HEXLOWER.encode(&sha256(text.as_bytes())), expected, "{text}");
        }
        assert_eq!(wheel_hash(b"abc"), "ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0");
    }
}
