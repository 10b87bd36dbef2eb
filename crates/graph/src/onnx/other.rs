//! Diagnosis of files that are given as models but are of another kind, or truncated.

use super::wire::Message;

/// Signatures of other file formats, each with its offset and a hint.
const KINDS: &[(usize, &[u8], &str)] = &[
    (
        0,
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer stands in its place (run `git lfs pull` where it was cloned)",
    ),
    (0, b"PK\x03\x04", "it is a ZIP archive (unpack it; one of PyTorch's is exported with torch.onnx.export)"),
    (0, b"\x1f\x8b", "it is packed with gzip (unpack it)"),
    (0, b"\x89HDF\r\n", "it is an HDF5 file, such as Keras writes (convert it with tf2onnx)"),
    (4, b"TFL3", "it is a TensorFlow Lite model (convert it with tf2onnx)"),
    (4, b"ORTM", "it is a model in ONNX Runtime's own format (give the .onnx that it was made of)"),
];

/// Beginnings of text files, in lower case and after whitespace, each with a hint.
const TEXTS: &[(&str, &str)] = &[
    ("<!doctype html", PAGE),
    ("<html", PAGE),
    ("<?xml", "it is an XML file (give the .onnx that it was made of)"),
    ("{", "it is JSON, such as a server's answer (download the file itself)"),
];
const PAGE: &str = "it is an HTML page, such as a server's answer (download the file itself)";

/// Names the format of a file that is neither a model nor an array, with a hint; `None` for unknown formats.
pub fn kind_of_other(bytes: &[u8]) -> Option<&'static str> {
    if bytes.is_empty() {
        return Some("it is empty (get it anew)");
    }
    let begins =
        |(at, beginning, _): &&(usize, &[u8], &str)| bytes.get(*at..).is_some_and(|b| b.starts_with(beginning));
    if let Some((_, _, kind)) = KINDS.iter().find(begins) {
        return Some(kind);
    }
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).trim_ascii_start();
    let begins = |(beginning, _): &&(&str, &str)| {
        text.get(..beginning.len()).is_some_and(|head| head.eq_ignore_ascii_case(beginning.as_bytes()))
    };
    TEXTS.iter().find(begins).map(|(_, kind)| *kind)
}

/// Describes a truncated model: how much of its graph is missing; `None` if it is complete.
pub fn cut_off(mut model: Message<'_>) -> Option<String> {
    let n_bytes = model.bytes.len();
    let mut is_model = false;
    while !model.bytes.is_empty() {
        let (number, wanted) = model.head().ok()?;
        is_model |= number == 1;
        if wanted > model.bytes.len() {
            let end = model.at.checked_add(wanted)?;
            let what = format!("it is cut off: its graph ends at byte {end}, and it has {n_bytes} bytes");
            return (is_model && number == 7).then(|| format!("{what} (get it anew)"));
        }
        model.pass(wanted).ok()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_at_the_front_is_answered() {
        assert_eq!(kind_of_other(b"\xef\xbb\xbf \n<HTML><head>"), Some(PAGE));
        assert_eq!(kind_of_other(b"<!DOCTYPE html>"), Some(PAGE));
        assert!(kind_of_other(b"version https://git-lfs.github.com/spec/v1\noid").unwrap().contains("git lfs pull"));
        assert!(kind_of_other(b"\x1c\0\0\0TFL3").is_some() && kind_of_other(b"").is_some());
        assert_eq!(kind_of_other(b"\x08\x08\x12\x07"), None);
        // Every file, truncated anywhere, is diagnosed without a panic.
        let model = [&[8, 8, 0x12, 2, b'm', b'e', 0x3a, 0x80, 1][..], &[0; 100]].concat();
        let said = cut_off(Message { bytes: &model, at: 0 });
        assert_eq!(
            said.as_deref(),
            Some("it is cut off: its graph ends at byte 137, and it has 109 bytes (get it anew)")
        );
        for n in 0..model.len() {
            for byte in 0..=255 {
                let mut other = model[..n].to_vec();
                other.extend([byte, 0xff, 0xff, 0xff]);
                let _ = (kind_of_other(&other), cut_off(Message { bytes: &other, at: 0 }));
            }
        }
    }
}
