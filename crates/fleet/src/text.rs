//! Bytes as text: what keys, signatures and stored messages are written in.

use std::fmt::Write;

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const BASE32: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

/// Digits of so many bits each, without filling.
fn digits(bytes: &[u8], bits: u32, alphabet: &[u8]) -> String {
    let (mut text, mut buffer, mut n) = (String::new(), 0u32, 0);
    for byte in bytes {
        (buffer, n) = (buffer << 8 | u32::from(*byte), n + 8);
        while n >= bits {
            n -= bits;
            text.push(char::from(alphabet[(buffer >> n) as usize & (alphabet.len() - 1)]));
        }
        buffer &= (1 << n) - 1;
    }
    if n > 0 {
        text.push(char::from(alphabet[(buffer << (bits - n)) as usize & (alphabet.len() - 1)]));
    }
    text
}

/// Decodes digits of `bits` bits each; leftover bits are dropped.
fn bytes_of(text: &str, bits: u32, alphabet: &[u8]) -> Option<Vec<u8>> {
    let (mut bytes, mut buffer, mut n) = (Vec::new(), 0u32, 0);
    for digit in text.trim_end_matches('=').bytes() {
        let value = alphabet.iter().position(|known| *known == digit)? as u32;
        (buffer, n) = (buffer << bits | value, n + bits);
        if n >= 8 {
            n -= 8;
            bytes.push((buffer >> n) as u8);
        }
        buffer &= (1 << n) - 1;
    }
    Some(bytes)
}

/// Base 64 as addresses have it, without filling: of signatures.
pub fn base64url(bytes: &[u8]) -> String {
    digits(bytes, 6, BASE64).replace('+', "-").replace('/', "_")
}

/// Decodes base 64.
pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    bytes_of(text, 6, BASE64)
}

/// Base 32 without filling: of keys.
pub fn base32(bytes: &[u8]) -> String {
    digits(bytes, 5, BASE32)
}

/// Decodes base 32.
pub fn from_base32(text: &str) -> Option<Vec<u8>> {
    bytes_of(text, 5, BASE32)
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The check sum of keys: CRC-16/XMODEM.
pub fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_the_standards() {
        for (bytes, text) in [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!((base64url(bytes.as_bytes()).as_str(), from_base64(text).unwrap()), (text, bytes.into()));
        }
        assert_eq!(base64url(&[0xfb, 0xff]), "-_8");
        assert_eq!(from_base64("Zg==").unwrap(), b"f");
        for (bytes, text) in [("f", "MY"), ("fo", "MZXQ"), ("foobar", "MZXW6YTBOI")] {
            assert_eq!((base32(bytes.as_bytes()).as_str(), from_base32(text).unwrap()), (text, bytes.into()));
        }
        assert_eq!(from_base32("M!"), None);
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(hex(&[0, 0xab]), "00ab");
    }
}
