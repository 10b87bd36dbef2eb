//! JSON as Python writes it, read incrementally: with NaN and Infinity, and without an end if a run was
//! stopped.
//!
//! Only requested parts are kept, so that a file costs no more memory than its useful contents.

use std::io::Read;

use flate2::read::MultiGzDecoder;
use serde_json::{Number, Value as Json};

use crate::read::FormatError;

/// Maximum size of a decompressed file in bytes, far above any recorded space.
pub const MOST_BYTES: u64 = 1 << 30;
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const BYTE_ORDER_MARK: &[u8] = &[0xef, 0xbb, 0xbf];
/// Maximum nesting depth.
const MOST_DEPTH: usize = 128;
/// Maximum number of bytes of a text that are kept.
const MOST_TEXT: usize = 1 << 16;

/// Reason why reading stopped.
#[derive(Debug)]
pub(crate) enum JsonFault {
    /// End of the file within a value.
    End,
    /// Malformed JSON, or a value beyond a limit.
    Problem(String),
    /// Damaged compressed data.
    Packed(std::io::Error),
    /// File beyond the size limit.
    TooLong,
    /// Contents that are not results.
    Refused(FormatError),
    /// Early end on request, because enough is known.
    Enough,
}

impl From<FormatError> for JsonFault {
    fn from(error: FormatError) -> JsonFault {
        JsonFault::Refused(error)
    }
}

/// Incremental reader of a JSON file, plain or compressed by gzip.
pub(crate) struct JsonReader<'a> {
    input: Box<dyn Read + 'a>,
    buffer: Vec<u8>,
    /// Position of the next byte in the buffer.
    at: usize,
    /// Number of bytes before the buffer.
    before: u64,
    /// Number of lines read, and the start of the current one.
    n_lines: usize,
    line_start: u64,
    depth: usize,
}

/// Returns the decompressed bytes of a file.
pub(crate) fn unpacked(file: &[u8]) -> Box<dyn Read + '_> {
    if file.starts_with(GZIP_MAGIC) { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) }
}

impl<'a> JsonReader<'a> {
    /// Makes a reader at the start of a file.
    ///
    /// # Errors
    /// If the file cannot be decompressed or has another encoding.
    pub(crate) fn new(file: &'a [u8]) -> Result<JsonReader<'a>, FormatError> {
        let (input, buffer) = (unpacked(file), Vec::with_capacity(file.len().min(1 << 16)));
        let mut reader = JsonReader { input, buffer, at: 0, before: 0, n_lines: 0, line_start: 0, depth: 0 };
        let is_other = |start: &[u8]| matches!(start, [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [0, ..] | [_, 0, ..]);
        match reader.fill() {
            Ok(()) if is_other(&reader.buffer) => {
                Err(reader.error(JsonFault::Problem("the text is UTF-16 (write it as UTF-8)".into())))
            }
            Ok(()) => {
                reader.at = if reader.buffer.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
                Ok(reader)
            }
            Err(fault) => Err(reader.error(fault)),
        }
    }

    /// Replaces the buffer by the next bytes of the file; empty at its end.
    fn fill(&mut self) -> Result<(), JsonFault> {
        self.before += self.buffer.len() as u64;
        self.at = 0;
        self.buffer.clear();
        let mut part = self.input.by_ref().take(1 << 16);
        part.read_to_end(&mut self.buffer).map_err(JsonFault::Packed)?;
        if self.before + self.buffer.len() as u64 > MOST_BYTES { Err(JsonFault::TooLong) } else { Ok(()) }
    }

    fn byte(&mut self) -> Result<Option<u8>, JsonFault> {
        if self.at == self.buffer.len() {
            self.fill()?;
        }
        Ok(self.buffer.get(self.at).copied())
    }

    fn advance(&mut self) {
        if self.buffer[self.at] == b'\n' {
            self.n_lines += 1;
            self.line_start = self.before + self.at as u64 + 1;
        }
        self.at += 1;
    }

    /// Returns the next non-blank byte without consuming it; `None` at the end. Zeros count as blanks,
    /// because a crash may leave some.
    pub(crate) fn peek(&mut self) -> Result<Option<u8>, JsonFault> {
        while let Some(byte) = self.byte()? {
            if !matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0) {
                return Ok(Some(byte));
            }
            self.advance();
        }
        Ok(None)
    }

    /// Skips the rest of the line.
    pub(crate) fn skip_line(&mut self) -> Result<(), JsonFault> {
        while let Some(byte) = self.byte()? {
            self.advance();
            if byte == b'\n' {
                break;
            }
        }
        Ok(())
    }

    fn next(&mut self) -> Result<u8, JsonFault> {
        self.peek()?.ok_or(JsonFault::End)
    }

    fn expected(&mut self, expected: &str) -> JsonFault {
        match self.next() {
            Ok(found) => JsonFault::Problem(format!("expected {expected}, found {:?}", char::from(found))),
            Err(fault) => fault,
        }
    }

    fn line_and_column(&self) -> (usize, usize) {
        (self.n_lines + 1, (self.before + self.at as u64 - self.line_start) as usize + 1)
    }

    /// Position in words.
    pub(crate) fn place(&self) -> String {
        let (line, column) = self.line_and_column();
        format!("line {line}, column {column}")
    }

    /// Makes an error of the fault, with its position.
    pub(crate) fn error(&self, fault: JsonFault) -> FormatError {
        let (line, column) = self.line_and_column();
        match fault {
            JsonFault::End => FormatError::Json { line, column, problem: "the file ends within something".into() },
            JsonFault::Problem(problem) => FormatError::Json { line, column, problem },
            JsonFault::Packed(source) => FormatError::Packed(source),
            JsonFault::TooLong => FormatError::TooLong { limit: MOST_BYTES },
            JsonFault::Refused(error) => error,
            JsonFault::Enough => unreachable!("invariant: who stops reading does not take it for an error"),
        }
    }

    /// Accepts the part read of a file that may be truncated.
    ///
    /// # Errors
    /// If reading stopped for another reason.
    pub(crate) fn as_far_as_it_goes(&self, read: Result<(), JsonFault>) -> Result<(), FormatError> {
        match read {
            Ok(()) | Err(JsonFault::End) => Ok(()),
            Err(fault) => Err(self.error(fault)),
        }
    }

    /// Reads the members of an object; `member` has to read each value.
    pub(crate) fn object(
        &mut self,
        mut member: impl FnMut(&mut Self, String) -> Result<(), JsonFault>,
    ) -> Result<(), JsonFault> {
        self.list(b'{', b'}', &mut |reader| {
            if reader.next()? != b'"' {
                return Err(reader.expected("a name in quotes or `}`"));
            }
            let name = reader.string(true)?;
            if reader.next()? != b':' {
                return Err(reader.expected("`:`"));
            }
            reader.advance();
            member(reader, name)
        })
    }

    /// Reads the items of an array; `item` has to read each one.
    pub(crate) fn array(&mut self, mut item: impl FnMut(&mut Self) -> Result<(), JsonFault>) -> Result<(), JsonFault> {
        self.list(b'[', b']', &mut item)
    }

    /// Reads the comma-separated items between brackets. A trailing comma is allowed, as in a cache that was
    /// closed by hand.
    fn list(
        &mut self,
        opening: u8,
        closing: u8,
        part: &mut dyn FnMut(&mut Self) -> Result<(), JsonFault>,
    ) -> Result<(), JsonFault> {
        if self.next()? != opening {
            return Err(self.expected(&format!("`{}`", char::from(opening))));
        }
        if self.depth == MOST_DEPTH {
            return Err(JsonFault::Problem(format!("nested more than {MOST_DEPTH} deep")));
        }
        self.advance();
        self.depth += 1;
        while self.next()? != closing {
            part(self)?;
            match self.next()? {
                b',' => self.advance(),
                other if other == closing => {}
                _ => return Err(self.expected(&format!("`,` or `{}`", char::from(closing)))),
            }
        }
        self.advance();
        self.depth -= 1;
        Ok(())
    }

    /// Skips a value.
    pub(crate) fn skip(&mut self) -> Result<(), JsonFault> {
        match self.next()? {
            b'{' => self.object(|reader, _| reader.skip()),
            b'[' => self.array(Self::skip),
            b'"' => self.string(false).map(drop),
            _ => self.word().map(drop),
        }
    }

    /// Reads a value of at most `most_parts` parts; `None` if it has more.
    pub(crate) fn value(&mut self, most_parts: usize) -> Result<Option<Json>, JsonFault> {
        let mut left = most_parts + 1;
        let value = self.parts(&mut left)?;
        Ok((left > 0).then_some(value))
    }

    fn parts(&mut self, left: &mut usize) -> Result<Json, JsonFault> {
        *left = left.saturating_sub(1);
        if *left == 0 {
            return self.skip().map(|()| Json::Null);
        }
        match self.next()? {
            b'{' => {
                let mut members = serde_json::Map::new();
                self.object(|reader, name| {
                    members.insert(name, reader.parts(left)?);
                    Ok(())
                })?;
                Ok(Json::Object(members))
            }
            b'[' => {
                let mut items = Vec::new();
                self.array(|reader| {
                    items.push(reader.parts(left)?);
                    // Parts beyond the limit are skipped, not kept.
                    if *left == 0 {
                        items.clear();
                    }
                    Ok(())
                })?;
                Ok(Json::Array(items))
            }
            b'"' => self.string(true).map(Json::String),
            _ => self.word(),
        }
    }

    /// Reads a text in quotes; empty if it is not to be kept.
    fn string(&mut self, is_kept: bool) -> Result<String, JsonFault> {
        let mut raw = vec![b'"'];
        self.advance();
        let mut is_escaped = false;
        loop {
            let byte = self.byte()?.ok_or(JsonFault::End)?;
            if byte == b'\n' {
                return Err(JsonFault::Problem("the text in quotes does not end on its line".into()));
            }
            self.advance();
            if is_kept && raw.len() < MOST_TEXT {
                raw.push(byte);
            }
            match byte {
                b'"' if !is_escaped => break,
                b'\\' => is_escaped = !is_escaped,
                _ => is_escaped = false,
            }
        }
        // Text that is not UTF-8, or is truncated, is kept as far as it can be read.
        let lossy = || String::from_utf8_lossy(raw[1..].strip_suffix(b"\"").unwrap_or(&raw[1..])).into_owned();
        Ok(serde_json::from_slice(&raw).unwrap_or_else(|_| lossy()))
    }

    /// Reads a number, or a keyword of JSON or Python. Numbers that JSON cannot represent become texts.
    fn word(&mut self) -> Result<Json, JsonFault> {
        let mut word = String::new();
        while let Some(byte) = self.byte()?
            && (byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.' | b'_'))
        {
            if word.len() < MOST_TEXT {
                word.push(char::from(byte));
            }
            self.advance();
        }
        // At the end of the file, the word may be truncated.
        if self.byte()?.is_none() && self.depth > 0 {
            return Err(JsonFault::End);
        }
        match word.as_str() {
            "true" | "True" => return Ok(true.into()),
            "false" | "False" => return Ok(false.into()),
            "null" | "None" => return Ok(Json::Null),
            "NaN" | "nan" | "Infinity" | "-Infinity" | "inf" | "-inf" => return Ok(word.into()),
            "" => return Err(self.expected("a value")),
            _ => {}
        }
        match number(&word) {
            Some(number) => Ok(number.map_or(Json::String(word), Json::Number)),
            None => {
                let begin: String = word.chars().take(20).collect();
                Err(JsonFault::Problem(format!("expected a value, found {begin:?}")))
            }
        }
    }
}

/// Parses a word as a number; the inner `None` is a number that is too large.
fn number(word: &str) -> Option<Option<Number>> {
    if !word.starts_with(|c: char| c == '-' || c.is_ascii_digit()) || !word.ends_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let whole = word.parse::<i64>().ok().filter(|&whole| whole != 0 || !word.starts_with('-')).map(Number::from);
    match whole.or_else(|| word.parse::<u64>().ok().map(Number::from)) {
        Some(whole) => Some(Some(whole)),
        None => word.parse::<f64>().ok().map(Number::from_f64),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_json() -> impl Strategy<Value = Json> {
        let number = prop_oneof![
            any::<i64>().prop_map(Json::from),
            any::<u64>().prop_map(Json::from),
            any::<f64>().prop_map(Json::from),
            (-9i32..9).prop_map(|x| Json::from(f64::from(x) / 4.0)),
        ];
        let leaf =
            prop_oneof![Just(Json::Null), any::<bool>().prop_map(Json::from), number, "\\PC{0,9}".prop_map(Json::from)];
        leaf.prop_recursive(4, 40, 5, |inner| {
            let members = prop::collection::vec(("\\PC{0,4}", inner.clone()), 0..5);
            prop_oneof![
                prop::collection::vec(inner, 0..5).prop_map(Json::from),
                members.prop_map(|members| members.into_iter().collect()),
            ]
        })
    }

    fn read(text: &[u8]) -> Option<Json> {
        let mut reader = JsonReader::new(text).ok()?;
        let value = reader.value(1000).ok()??;
        matches!(reader.peek(), Ok(None)).then_some(value)
    }

    proptest! {
        #[test]
        fn json_means_the_same_as_elsewhere(json in any_json(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&json) } else { serde_json::to_string(&json) }.unwrap();
            prop_assert_eq!(read(text.as_bytes()), Some(serde_json::from_str(&text).unwrap()));
            let mut reader = JsonReader::new(text.as_bytes()).unwrap();
            reader.skip().unwrap();
            prop_assert!(matches!(reader.peek(), Ok(None)));
        }

        #[test]
        fn what_is_json_elsewhere_is_json_here(text in "[\\[\\]{}:,\"0-9a-z.eE+ \\\\-]{0,24}") {
            if let Ok(json) = serde_json::from_str::<Json>(&text) {
                prop_assert_eq!(read(text.as_bytes()), Some(json), "{}", text);
            }
        }
    }

    #[test]
    fn what_python_writes_is_read() {
        let check = |text: &str, expected: Json| assert_eq!(read(text.as_bytes()), Some(expected), "{text}");
        check("[NaN, Infinity, -Infinity]", serde_json::json!(["NaN", "Infinity", "-Infinity"]));
        check("{\"a\": True, \"b\": None,}", serde_json::json!({"a": true, "b": null}));
        check("1e999", "1e999".into());
        check("\"\\ud800\"", "\\ud800".into());
        assert_eq!(read("\u{feff}[1]".as_bytes()), Some(serde_json::json!([1])));
        assert_eq!((read(b"[1"), read(b"[1]]"), read(b"[odd]"), read(b"")), (None, None, None, None));
    }

    #[test]
    fn little_is_kept_of_much() {
        let many = format!("[{}1]", "0,".repeat(100_000));
        let mut reader = JsonReader::new(many.as_bytes()).unwrap();
        assert!(matches!(reader.value(1000), Ok(None)));
        let long = format!("\"{}\"", "x".repeat(1 << 20));
        assert_eq!(read(long.as_bytes()).unwrap().as_str().unwrap().len(), MOST_TEXT - 1);
        let mut reader = JsonReader::new(&[0x1f, 0x8b, 8, 0]).err().unwrap();
        assert!(matches!(&mut reader, FormatError::Packed(_)));
    }
}
