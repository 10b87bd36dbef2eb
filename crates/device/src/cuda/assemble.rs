//! Assembly of PTX to machine code.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thiserror::Error;

use crate::data::anonymous_file;
use crate::spawn::{Spawned, Stream};

/// Assembler of PTX. Trials, races and comparisons must use the same one, as code of different assemblers may
/// differ in speed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PtxAssembler {
    /// NVIDIA's program `ptxas`.
    Ptxas {
        /// Path of the program.
        path: PathBuf,
        /// Version, such as `12.9.86`.
        version: String,
    },
    /// Driver, which assembles when code is loaded.
    Driver,
}

/// Reason why PTX could not be assembled.
#[derive(Debug, Error)]
pub enum AssembleError {
    /// Refused by the assembler, as for a block with too much shared memory.
    #[error("{0}")]
    Refused(String),
    /// Timeout.
    #[error("ptxas did not finish within {MOST_SECONDS} s")]
    TooLong,
    /// Failure to run the program.
    #[error("ptxas cannot be run: {0}")]
    Io(#[from] io::Error),
}

/// Folder of CUDA's programs if they are not on the path.
const FOLDER: &str = "/usr/local/cuda/bin";
/// CPU time limit of the assembler for a module, in seconds: ten times the time of our long kernels. If the
/// worker itself were killed at a timeout, it would have to create a context anew, which takes longer.
const MOST_SECONDS: libc::rlim_t = 5;

impl PtxAssembler {
    /// Finds a `ptxas` on the path or in CUDA's folder that supports a GPU such as `sm_90a`; the driver if
    /// there is none.
    pub fn find(gpu: &str) -> PtxAssembler {
        let programs = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&programs).chain([PathBuf::from(FOLDER)]);
        let found = folders.map(|folder| folder.join("ptxas")).find_map(|path| PtxAssembler::ptxas(path, gpu));
        found.unwrap_or(PtxAssembler::Driver)
    }

    /// Program at a path, if it exists and supports a GPU.
    fn ptxas(path: PathBuf, gpu: &str) -> Option<PtxAssembler> {
        // It checks its arguments first.
        let nothing = ["--gpu-name", gpu, "/dev/null", "-o", "/dev/null"];
        let refused = Command::new(&path).args(nothing).stdin(Stdio::null()).output().ok()?.stderr;
        if String::from_utf8_lossy(&refused).contains("option 'gpu-name'") {
            return None;
        }
        let said = Command::new(&path).arg("--version").stdin(Stdio::null()).output().ok()?.stdout;
        let said = String::from_utf8_lossy(&said);
        let version = said.split_once(", V")?.1.split_whitespace().next()?.to_owned();
        Some(PtxAssembler::Ptxas { path, version })
    }

    /// Name in records of measured times.
    pub fn name(&self) -> String {
        match self {
            PtxAssembler::Ptxas { version, .. } => format!("ptxas {version}"),
            PtxAssembler::Driver => "driver".to_owned(),
        }
    }

    /// Assembles PTX for the driver to load: to machine code, or to the PTX itself if the driver
    /// assembles. A hanging assembler is killed with the calling thread.
    ///
    /// # Errors
    /// If the code is refused.
    pub fn assemble(&self, ptx: &[u8], gpu: &str) -> Result<Vec<u8>, AssembleError> {
        let PtxAssembler::Ptxas { path, .. } = self else { return Ok(ptx.to_vec()) };
        let (mut text, mut code) = (anonymous_file(c"ptx")?, anonymous_file(c"cubin")?);
        text.write_all(ptx)?;
        let place = |file: &File| Path::new("/proc/self/fd").join(file.as_raw_fd().to_string());
        let mut command = Command::new(path);
        command.args(["-O3", "--gpu-name", gpu]).arg(place(&text)).arg("-o").arg(place(&code));
        let (mut output, mut errors) = (anonymous_file(c"ptxas-output")?, anonymous_file(c"ptxas-errors")?);
        let [written, complained] = [output.try_clone()?, errors.try_clone()?].map(|file| Stream::File(file.into()));
        // SAFETY: only async-signal-safe calls are made.
        let mut child = unsafe {
            Spawned::start(&command, [Stream::Null, written, complained], || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                let most = libc::rlimit { rlim_cur: MOST_SECONDS, rlim_max: MOST_SECONDS };
                libc::setrlimit(libc::RLIMIT_CPU, &raw const most);
                Ok(())
            })
        }?;
        let (status, _) = child.wait()?;
        let made = all(&mut code)?;
        if status.success() && !made.is_empty() {
            return Ok(made);
        }
        if status.signal().is_some_and(|signal| [libc::SIGXCPU, libc::SIGKILL].contains(&signal)) {
            return Err(AssembleError::TooLong);
        }
        let said = String::from_utf8_lossy(&[all(&mut errors)?, all(&mut output)?].concat()).into_owned();
        let first = said.lines().map(str::trim).find(|line| !line.is_empty());
        Err(AssembleError::Refused(first.map_or_else(|| format!("ptxas: {status}"), str::to_owned)))
    }
}

/// Reads all of a file.
fn all(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::tests::PTX;
    use super::*;

    #[test]
    fn ptxas_assembles_in_memory() {
        // Folder into which `.ci/cuda-tools` downloads it.
        let target = std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
        let path = target.join("cuda-tools/ptxas");
        let Some(ptxas) = PtxAssembler::ptxas(path.clone(), "sm_90a") else {
            return println!("skipped: ptxas is not here: .ci/cuda-tools fetches it");
        };
        assert_eq!(PtxAssembler::ptxas(path, "sm_999"), None, "there is no such GPU");
        assert!(ptxas.name().starts_with("ptxas 1"), "{}", ptxas.name());
        let code = ptxas.assemble(PTX, "sm_90a").unwrap();
        assert!(code.starts_with(b"\x7fELF"));
        let refused = ptxas.assemble(b".version 7.0\n.target sm_80\nnonsense", "sm_90a").unwrap_err();
        assert!(refused.to_string().contains("line 3"), "{refused}");
    }

    #[test]
    fn the_driver_takes_text() {
        assert_eq!(PtxAssembler::Driver.assemble(PTX, "sm_80").unwrap(), PTX);
    }
}
