//! What a workload is run on: random inputs, and the outputs they must give.
//!
//! Made once by the tuner, in a file without a name that all workers map: inputs cannot be overwritten by a
//! candidate, and no worker computes the reference again.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use tilewright_ir::interp::Fault;
use tilewright_ir::reference::{evaluate, random_input};
use tilewright_ir::{DType, Program, Role};

/// Where mappings may begin.
const PAGE: u64 = 4096;

/// Inputs and reference outputs.
pub struct Data {
    /// The file.
    pub file: File,
    /// Where each argument's data begins: an input's contents, or an output's reference as `f64`.
    pub offsets: Vec<u64>,
}

/// Why there is no data for a workload.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file could not be written.
    #[error("cannot hold the workload's data in memory: {0}")]
    Io(#[from] io::Error),
    /// The reference cannot be computed: the operator's fault.
    #[error("the reference cannot be computed: {0}")]
    Reference(Fault),
}

impl Data {
    /// Random inputs for an untransformed program and what it makes of them, in double precision.
    ///
    /// # Errors
    /// [`DataError`] where memory does not suffice or the program reads outside its buffers.
    pub fn new(program: &Program, seed: u64, n_threads: usize) -> Result<Data, DataError> {
        let mut inputs = Vec::new();
        for (at, (_, buffer)) in program.arguments().enumerate() {
            if buffer.role != Role::Output {
                let n = buffer.n_elements().ok_or(io::ErrorKind::OutOfMemory).map_err(io::Error::from)? as usize;
                inputs.push(random_input(seed.wrapping_add(at as u64), n).collect::<Vec<f64>>());
            }
        }
        let outputs = evaluate(program, &inputs, n_threads).map_err(DataError::Reference)?;
        let mut file = anonymous_file(c"tilewright-data")?;
        let (mut offsets, mut at) = (Vec::new(), 0);
        let (mut inputs, mut outputs) = (inputs.into_iter(), outputs.into_iter());
        for (_, buffer) in program.arguments() {
            offsets.push(at);
            file.seek(io::SeekFrom::Start(at))?;
            let mut out = io::BufWriter::with_capacity(1 << 20, &file);
            let (values, as_f32) = if buffer.role == Role::Output {
                (outputs.next(), false)
            } else {
                (inputs.next(), buffer.dtype == DType::F32)
            };
            let mut n_bytes = 0u64;
            for v in values.expect("as many as arguments") {
                if as_f32 {
                    out.write_all(&(v as f32).to_ne_bytes())?;
                    n_bytes += 4;
                } else {
                    out.write_all(&v.to_ne_bytes())?;
                    n_bytes += 8;
                }
            }
            out.flush()?;
            drop(out);
            at = (at + n_bytes).next_multiple_of(PAGE);
        }
        file.set_len(at.max(PAGE))?;
        Ok(Data { file, offsets })
    }
}

/// A file in memory, inherited by child processes.
pub fn anonymous_file(name: &CStr) -> io::Result<File> {
    // SAFETY: the name is a C string; the result is a new descriptor or negative.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) }.into())
}
