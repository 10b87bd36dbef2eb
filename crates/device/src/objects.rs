//! Exchange of compiled objects among workers, so that shared code is compiled once.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// Total size in bytes beyond which no object is added: by then, it contains the code that a search still
/// needs.
const MOST_BYTES: u64 = 64 << 20;
/// Size of the header of an object: its length, and the process that made it.
const HEADER_BYTES: u64 = 8;

/// Append-only memory file of objects; only the last may be incomplete, while it is being written.
pub struct Objects {
    file: File,
    /// Offset of the next object to be read.
    at: u64,
}

/// Sets a file to append mode, so that writes of several processes do not interleave.
///
/// # Errors
/// If the system refuses.
pub fn make_appending(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the call takes a number.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Objects {
    /// Opens the objects in a shared file.
    pub fn new(file: File) -> Objects {
        Objects { file, at: 0 }
    }

    /// Appends an object.
    ///
    /// # Errors
    /// If there is not enough memory for it.
    pub fn add(&mut self, object: &[u8]) -> io::Result<()> {
        if self.file.metadata()?.len() + object.len() as u64 > MOST_BYTES {
            return Ok(());
        }
        let mut record = Vec::with_capacity(HEADER_BYTES as usize + object.len());
        record.extend((object.len() as u32).to_le_bytes());
        record.extend(std::process::id().to_le_bytes());
        record.extend(object);
        // In one write, so that records of other processes come before or after.
        self.file.write_all(&record)
    }

    /// Reads the next object appended by another process, if any.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn next_of_others(&mut self) -> io::Result<Option<Vec<u8>>> {
        let end = self.file.metadata()?.len();
        while self.at + HEADER_BYTES <= end {
            let mut header = [0; HEADER_BYTES as usize];
            self.file.read_exact_at(&mut header, self.at)?;
            let [length, process] =
                [0, 4].map(|i| u32::from_le_bytes(header[i..i + 4].try_into().expect("four bytes")));
            let start = self.at + HEADER_BYTES;
            if start + u64::from(length) > end {
                break;
            }
            self.at = start + u64::from(length);
            if process != std::process::id() {
                let mut object = vec![0; length as usize];
                self.file.read_exact_at(&mut object, start)?;
                return Ok(Some(object));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::anonymous_file;

    fn record(process: u32, object: &[u8]) -> Vec<u8> {
        [&(object.len() as u32).to_le_bytes()[..], &process.to_le_bytes()[..], object].concat()
    }

    #[test]
    fn those_of_others_come_in_order_and_complete() {
        let mut file = anonymous_file(c"test").unwrap();
        make_appending(&file).unwrap();
        let mut objects = Objects::new(file.try_clone().unwrap());
        let other = std::process::id() + 1;
        assert_eq!(objects.next_of_others().unwrap(), None);
        file.write_all(&record(other, b"one")).unwrap();
        objects.add(b"own").unwrap();
        file.write_all(&record(other, b"")).unwrap();
        let late = record(other, b"another");
        file.write_all(&late[..10]).unwrap();
        assert_eq!(objects.next_of_others().unwrap().as_deref(), Some(&b"one"[..]));
        assert_eq!(objects.next_of_others().unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(objects.next_of_others().unwrap(), None);
        file.write_all(&late[10..]).unwrap();
        assert_eq!(objects.next_of_others().unwrap().as_deref(), Some(&b"another"[..]));
        assert_eq!(objects.next_of_others().unwrap(), None);
    }

    #[test]
    fn the_file_does_not_grow_for_ever() {
        let file = anonymous_file(c"test").unwrap();
        make_appending(&file).unwrap();
        let mut objects = Objects::new(file.try_clone().unwrap());
        let object = vec![0; 20 << 20];
        (0..5).for_each(|_| objects.add(&object).unwrap());
        assert!(file.metadata().unwrap().len() <= MOST_BYTES);
    }
}
