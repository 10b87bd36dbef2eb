//! NATS keys (nkeys): Ed25519 key pairs as text, and signatures by them.
//!
//! # Source
//! The text is base 32 of a prefix for the kind of key, the key, and a checksum of both:
//! <https://github.com/nats-io/nkeys>.

use data_encoding::{BASE32_NOPAD, BASE64URL_NOPAD, HEXLOWER};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{Ed25519KeyPair, KeyPair};

/// Prefix bytes of a seed, shown as `S`, and of a user's public key, shown as `U`.
const SEED: u8 = 18 << 3;
const USER: u8 = 20 << 3;

/// Key pair of a user.
pub struct NKey {
    pair: Ed25519KeyPair,
    seed: [u8; 32],
}

impl NKey {
    /// Makes a new key.
    ///
    /// # Panics
    /// If the system has no random bytes.
    pub fn new() -> NKey {
        NKey::of_seed(random())
    }

    fn of_seed(seed: [u8; 32]) -> NKey {
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).expect("invariant: any 32 bytes are a seed");
        NKey { pair, seed }
    }

    /// Parses the text of a user's seed; `None` if it is invalid.
    pub fn parse(text: &str) -> Option<NKey> {
        let bytes = BASE32_NOPAD.decode(text.trim().as_bytes()).ok()?;
        let (bytes, sum) = bytes.split_last_chunk::<2>()?;
        let (prefix, seed) = bytes.split_first_chunk::<2>()?;
        let is_user = *prefix == [SEED | USER >> 5, USER << 3];
        (is_user && crc16(bytes) == u16::from_le_bytes(*sum)).then_some(NKey::of_seed(seed.try_into().ok()?))
    }

    /// Seed as text, which is secret.
    pub fn seed(&self) -> String {
        with_sum(&[&[SEED | USER >> 5, USER << 3], &self.seed[..]].concat())
    }

    /// Public key as text.
    pub fn public(&self) -> String {
        with_sum(&[&[USER], self.pair.public_key().as_ref()].concat())
    }

    /// Signs a text, and returns the signature as text.
    pub fn sign(&self, what: &str) -> String {
        BASE64URL_NOPAD.encode(self.pair.sign(what.as_bytes()).as_ref())
    }
}

impl Default for NKey {
    fn default() -> NKey {
        NKey::new()
    }
}

fn with_sum(bytes: &[u8]) -> String {
    BASE32_NOPAD.encode(&[bytes, &crc16(bytes).to_le_bytes()].concat())
}

/// Checksum of keys: CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 })
    })
}

/// Returns random bytes of the system.
///
/// # Panics
/// If the system has none.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).expect("the system has random bytes");
    bytes
}

/// Makes a random name of 128 bits.
pub fn random_name() -> String {
    HEXLOWER.encode(&random::<16>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_sum_is_the_standard_one() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
    }

    #[test]
    fn keys_are_those_of_the_nats_tools() {
        // First key of RFC 8032, in the format of the tool `nsc`.
        let seed: [u8; 32] = HEXLOWER
            .decode(b"9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
            .unwrap()
            .try_into()
            .unwrap();
        let key = NKey::of_seed(seed);
        assert_eq!(
            (key.seed().as_str(), key.public().as_str()),
            (
                "SUAJ2YNRTXX72WTAXKCEV5ES5QWMIRCJYVUXWMTJDFYDXLADDSXH6YALCA",
                "UDLVVGABQKYQVN6VJP7NHSLEA45A5YLS6PNKMIZFV4BBU2HXA5IRUVAL",
            )
        );
    }

    #[test]
    fn keys_are_read_as_they_are_written() {
        let key = NKey::new();
        assert!(key.seed().starts_with("SU") && key.seed().len() == 58, "{}", key.seed());
        assert!(key.public().starts_with('U') && key.public().len() == 56, "{}", key.public());
        let again = NKey::parse(&format!("{}\n", key.seed())).unwrap();
        assert_eq!((again.public(), again.sign("x")), (key.public(), key.sign("x")));
        let mut wrong = key.seed();
        wrong.replace_range(10..11, if &wrong[10..11] == "A" { "B" } else { "A" });
        assert!(NKey::parse(&wrong).is_none() && NKey::parse(&key.public()).is_none() && NKey::parse("").is_none());
    }
}
