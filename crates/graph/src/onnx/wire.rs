//! The wire format of protocol buffers, read in place: fields are slices of the file.

use std::cell::Cell;

use crate::ReadError;

/// Memory budget for decoding a file, in bytes beyond the file's own size; every list that is built is
/// charged, so that a small malicious file cannot take gigabytes.
pub struct Budget {
    total: usize,
    left: Cell<usize>,
}

impl Budget {
    /// Budget for a file of `n_bytes`: three times its size, and 64 MiB.
    pub fn of_file(n_bytes: usize) -> Budget {
        let total = n_bytes.saturating_mul(3).saturating_add(64 << 20);
        Budget { total, left: Cell::new(total) }
    }

    /// Charges `n_bytes` to the budget.
    ///
    /// # Errors
    /// If fewer than `n_bytes` are left.
    pub fn charge(&self, n_bytes: usize) -> Result<(), ReadError> {
        let left = self.left.get().checked_sub(n_bytes).ok_or(ReadError::TooLarge(self.total))?;
        self.left.set(left);
        Ok(())
    }
}

/// Payload of a field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Payload<'a> {
    /// Varint: an integer of variable length.
    Varint(u64),
    /// Eight bytes.
    Fixed64(u64),
    /// Four bytes.
    Fixed32(u32),
    /// Length-delimited field: a message, a string, bytes or packed numbers.
    Bytes(Message<'a>),
}

/// Field with its number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Field<'a> {
    /// Number of the field in its message.
    pub number: u32,
    /// Offset in the file.
    pub at: usize,
    /// Contents.
    pub payload: Payload<'a>,
}

/// Encoded message, a slice of the file; iterating yields its fields.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Message<'a> {
    /// Bytes not yet read.
    pub bytes: &'a [u8],
    /// Offset of the bytes in the file.
    pub at: usize,
}

impl<'a> Message<'a> {
    fn malformed(&self, what: &'static str) -> ReadError {
        ReadError::Malformed { at: self.at, what }
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], ReadError> {
        let (head, rest) = self.bytes.split_at_checked(n).ok_or_else(|| self.malformed("a field ends too early"))?;
        self.bytes = rest;
        self.at += n;
        Ok(head)
    }

    /// Reads a varint.
    ///
    /// # Errors
    /// If the varint does not end, or is longer than 64 bits.
    pub fn varint(&mut self) -> Result<u64, ReadError> {
        let mut number = 0_u64;
        for shift in (0..70).step_by(7) {
            let byte = self.take(1)?[0];
            // The tenth byte has one bit left.
            if shift == 63 && byte > 1 {
                break;
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(self.malformed("an integer is too long"))
    }

    /// Reads a field's tag and, for a length-delimited one, its length: returns the tag and the payload's
    /// bytes.
    ///
    /// # Errors
    /// If the bytes are not a field.
    pub fn head(&mut self) -> Result<(u64, usize), ReadError> {
        let at = self.at;
        let key = self.varint()?;
        let wanted = match key & 7 {
            0 => {
                self.varint()?;
                0
            }
            1 => 8,
            2 => usize::try_from(self.varint()?).map_err(|_| self.malformed("a field is too long"))?,
            5 => 4,
            _ => return Err(ReadError::Malformed { at, what: "a field has an unknown wire type" }),
        };
        Ok((key >> 3, wanted))
    }

    /// Skips `n` bytes.
    ///
    /// # Errors
    /// If fewer bytes are left.
    pub fn pass(&mut self, n: usize) -> Result<(), ReadError> {
        self.take(n).map(drop)
    }

    fn field(&mut self) -> Result<Field<'a>, ReadError> {
        let at = self.at;
        let key = self.varint()?;
        let number = u32::try_from(key >> 3).ok().filter(|&n| n > 0);
        let number = number.ok_or(ReadError::Malformed { at, what: "a field has no number" })?;
        let payload = match key & 7 {
            0 => Payload::Varint(self.varint()?),
            1 => Payload::Fixed64(u64::from_le_bytes(self.take(8)?.try_into().expect("eight bytes"))),
            2 => {
                let n = self.varint()?;
                let n = usize::try_from(n).map_err(|_| self.malformed("a field is too long"))?;
                let at = self.at;
                Payload::Bytes(Message { bytes: self.take(n)?, at })
            }
            5 => Payload::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().expect("four bytes"))),
            _ => return Err(ReadError::Malformed { at, what: "a field has an unknown wire type" }),
        };
        Ok(Field { number, at, payload })
    }
}

impl<'a> Iterator for Message<'a> {
    type Item = Result<Field<'a>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.bytes.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.bytes = &[];
        }
        Some(field)
    }
}

impl<'a> Field<'a> {
    fn wrong(&self) -> ReadError {
        ReadError::Malformed { at: self.at, what: "a field has the wrong wire type" }
    }

    /// Returns the field as a message.
    ///
    /// # Errors
    /// If the field is of another kind.
    pub fn message(&self) -> Result<Message<'a>, ReadError> {
        match self.payload {
            Payload::Bytes(message) => Ok(message),
            _ => Err(self.wrong()),
        }
    }

    /// Returns the field as text.
    ///
    /// # Errors
    /// If the field is of another kind, or not UTF-8.
    pub fn text(&self) -> Result<&'a str, ReadError> {
        let what = "a text is not UTF-8";
        std::str::from_utf8(self.message()?.bytes).map_err(|_| ReadError::Malformed { at: self.at, what })
    }

    /// Returns the field as an integer.
    ///
    /// # Errors
    /// If the field is of another kind.
    pub fn int(&self) -> Result<i64, ReadError> {
        match self.payload {
            Payload::Varint(number) => Ok(number as i64),
            _ => Err(self.wrong()),
        }
    }

    /// Returns the field as an f32.
    ///
    /// # Errors
    /// If the field is of another kind.
    pub fn float(&self) -> Result<f32, ReadError> {
        match self.payload {
            Payload::Fixed32(bits) => Ok(f32::from_bits(bits)),
            _ => Err(self.wrong()),
        }
    }

    /// Appends the field's integers, whether packed or single, to `into`.
    ///
    /// # Errors
    /// If the field has no integers, or too many.
    pub fn ints(&self, into: &mut Vec<i64>, budget: &Budget) -> Result<(), ReadError> {
        match self.payload {
            Payload::Bytes(mut packed) => {
                let n = packed.bytes.iter().filter(|&&byte| byte < 0x80).count();
                budget.charge(n * 8)?;
                into.reserve_exact(n);
                while !packed.bytes.is_empty() {
                    into.push(packed.varint()? as i64);
                }
                Ok(())
            }
            _ => {
                budget.charge(8)?;
                into.push(self.int()?);
                Ok(())
            }
        }
    }

    /// Appends the field's numbers of `size` bytes each, whether packed or single, to `into` as bytes.
    ///
    /// # Errors
    /// If the field has no numbers of that size, or too many.
    pub fn fixed(&self, size: usize, into: &mut Vec<u8>, budget: &Budget) -> Result<(), ReadError> {
        match self.payload {
            Payload::Bytes(packed) if packed.bytes.len().is_multiple_of(size) => {
                budget.charge(packed.bytes.len())?;
                into.extend_from_slice(packed.bytes);
            }
            Payload::Fixed32(bits) if size == 4 => {
                budget.charge(4)?;
                into.extend_from_slice(&bits.to_le_bytes());
            }
            Payload::Fixed64(bits) if size == 8 => {
                budget.charge(8)?;
                into.extend_from_slice(&bits.to_le_bytes());
            }
            _ => return Err(self.wrong()),
        }
        Ok(())
    }
}
