//! Data file of an experiment: `data.json`, possibly compressed by gzip.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use tilewright::file::write_whole;

pub const PLAIN: &str = "data.json";
pub const PACKED: &str = "data.json.gz";

/// Name of the data file in a folder: that of the file that exists, else the plain one.
pub fn name(folder: &Path) -> &'static str {
    if folder.join(PACKED).exists() && !folder.join(PLAIN).exists() { PACKED } else { PLAIN }
}

/// Path of the data file in a folder.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(name(folder))
}

/// Reads the data file of a folder.
///
/// # Errors
/// If it does not exist or cannot be read.
pub fn read(folder: &Path) -> io::Result<Vec<u8>> {
    let bytes = fs::read(path(folder))?;
    if name(folder) == PLAIN {
        return Ok(bytes);
    }
    let mut unpacked = Vec::new();
    GzDecoder::new(&bytes[..]).read_to_end(&mut unpacked)?;
    Ok(unpacked)
}

/// Writes the data file of a folder, compressed if the present one is.
///
/// # Errors
/// If it cannot be written.
pub fn write(folder: &Path, text: &str) -> io::Result<()> {
    let packed = name(folder) == PACKED;
    write_whole(&path(folder), |file| {
        if !packed {
            return file.write_all(text.as_bytes());
        }
        let mut encoder = GzEncoder::new(file, Compression::best());
        encoder.write_all(text.as_bytes())?;
        encoder.finish().map(drop)
    })
}
