//! Test data of a workload: random inputs and reference outputs.
//!
//! The tuner makes them once, in a memory file that all workers map: candidates cannot overwrite inputs, and
//! no worker computes the reference again.

use crate::host;
use crate::limits;
use crate::memory::{Bf16, F16, Fenced, ReadOnly};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use tilewright_ir::interp::Fault;
use tilewright_ir::reference::{
    Mismatch, Tolerance, Watch, evaluate_watched, random_argument_on, relative_error_of, squared,
};
use tilewright_ir::{DType, Program, Role};

/// Alignment of mappings.
const PAGE: u64 = 4096;

/// Inputs and reference outputs.
pub struct ReferenceData {
    /// Memory file with the data.
    pub file: File,
    /// Offset of each argument's data: an input's contents, or an output's reference in `f64`,
    /// [held](DType::held).
    pub offsets: Vec<u64>,
}

/// Reason why there are no test data for a workload.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// Failure to create or write the file.
    #[error("cannot hold the workload's data in memory: {0}{advice}", advice = limits::advice(.0))]
    Io(#[from] io::Error),
    /// Reference that cannot be computed, a bug of the operator.
    #[error("the reference cannot be computed: {0}")]
    Reference(Fault),
    /// Reference results without any number, which cannot be compared.
    #[error("on random inputs no element of the result is a number, so that no kernel can be verified")]
    NoNumber,
    /// Cancelled by the watcher.
    #[error("the reference was given up")]
    GivenUp,
}

impl ReferenceData {
    /// Makes random inputs for an untransformed program, and its reference results in `f64`; `watch` receives
    /// the progress, and may cancel.
    ///
    /// # Errors
    /// [`DataError`] if memory does not suffice or the program reads outside its buffers.
    pub fn new(program: &Program, seed: u64, n_threads: usize, watch: &Watch) -> Result<ReferenceData, DataError> {
        let file = anonymous_file(c"tilewright-data")?;
        let (mut inputs, mut offsets, mut end) = (Vec::new(), Vec::new(), 0u64);
        let mut outputs_at = Vec::new();
        for (at, (id, buffer)) in program.arguments().enumerate() {
            let n = buffer.n_elements().ok_or(io::ErrorKind::OutOfMemory).map_err(io::Error::from)?;
            offsets.push(end);
            let n_bytes = if buffer.role == Role::Output {
                outputs_at.push((end, buffer.dtype));
                n * DType::F64.bytes()
            } else {
                let mut values = random_argument_on(program, id, seed.wrapping_add(at as u64), n_threads);
                write_on(&file, end, buffer.dtype, &values, n_threads)?;
                if buffer.dtype.is_wide() {
                    values.iter_mut().for_each(|x| *x = buffer.dtype.held(*x));
                }
                inputs.push(values);
                n * buffer.dtype.bytes()
            };
            end = (end + n_bytes).next_multiple_of(PAGE);
        }
        file.set_len(end.max(PAGE))?;
        let outputs = evaluate_watched(program, inputs, n_threads, watch).map_err(|fault| match fault {
            Fault::GivenUp => DataError::GivenUp,
            fault => DataError::Reference(fault),
        })?;
        for (values, (at, dtype)) in outputs.into_iter().zip(outputs_at) {
            if dtype.is_float() && values.iter().all(|x| x.is_nan()) {
                return Err(DataError::NoNumber);
            }
            write_on(&file, at, DType::F64, &values, n_threads)?;
        }
        Ok(ReferenceData { file, offsets })
    }

    /// Size of the data in bytes.
    pub fn n_bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |file| file.len())
    }
}

/// Minimum number of elements written by a thread: fewer take less time than starting a thread.
const LEAST_WRITTEN: usize = 1 << 16;

/// Writes values as numbers of a type, divided among this many threads.
fn write_on(file: &File, start: u64, dtype: DType, values: &[f64], n_threads: usize) -> io::Result<()> {
    let n = values.len().div_ceil(n_threads.max(1)).max(LEAST_WRITTEN);
    let part = |at: usize, values: &[f64]| write(file, start + (at * n) as u64 * dtype.bytes(), dtype, values);
    std::thread::scope(|scope| {
        let parts = values.chunks(n).enumerate();
        let threads: Vec<_> = parts.map(|(at, values)| scope.spawn(move || part(at, values))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("invariant: it does not panic"))
    })
}

/// Writes values as numbers of a type.
fn write(file: &File, start: u64, dtype: DType, values: &[f64]) -> io::Result<()> {
    const AT_A_TIME: usize = 1 << 16;
    let n_bytes = dtype.bytes() as usize;
    let mut bytes = vec![0; AT_A_TIME.min(values.len()) * n_bytes];
    for (values, part) in values.chunks(AT_A_TIME).zip(0..) {
        let bytes = &mut bytes[..values.len() * n_bytes];
        match dtype {
            DType::F32 => {
                let numbers = bytes.as_chunks_mut().0.iter_mut();
                numbers.zip(values).for_each(|(out, x)| *out = (*x as f32).to_ne_bytes());
            }
            DType::F64 => {
                let numbers = bytes.as_chunks_mut().0.iter_mut();
                numbers.zip(values).for_each(|(out, x)| *out = x.to_ne_bytes());
            }
            DType::Bf16 => {
                for (out, x) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    let bits = (*x as f32).to_bits();
                    // Inputs usually need no rounding, and checking that is faster than rounding.
                    let upper = (bits >> 16) as u16;
                    if f64::from(f32::from_bits(u32::from(upper) << 16)) == *x {
                        *out = upper.to_ne_bytes();
                    } else {
                        dtype.write(&[*x], out);
                    }
                }
            }
            other => other.write(values, bytes),
        }
        file.write_all_at(bytes, start + part * (AT_A_TIME * n_bytes) as u64)?;
    }
    Ok(())
}

/// Argument of a workload, mapped into a process that runs it.
pub enum BoundArgument {
    /// Read only.
    Input(Fenced),
    /// Output, with its reference.
    Output {
        /// Buffer for the result.
        buffer: Fenced,
        /// Reference in `f64`, [held](DType::held).
        reference: ReadOnly,
    },
}

impl BoundArgument {
    /// Maps all arguments of an untransformed program, from the [`ReferenceData`] of another process.
    ///
    /// # Errors
    /// If memory does not suffice.
    pub fn all(program: &Program, file: BorrowedFd, offsets: &[u64]) -> io::Result<Vec<BoundArgument>> {
        let too_large = || io::Error::other("a buffer is too large");
        let arguments = program.arguments().zip(offsets).map(|((_, buffer), &offset)| {
            let size = buffer.size_bytes().ok_or_else(too_large)?;
            if buffer.role != Role::Output {
                return Ok(BoundArgument::Input(Fenced::copy(file, offset, size)?));
            }
            let n = buffer.n_elements().and_then(|n| n.checked_mul(DType::F64.bytes())).ok_or_else(too_large)?;
            Ok(BoundArgument::Output { buffer: Fenced::new(size)?, reference: ReadOnly::new(file, offset, n)? })
        });
        arguments.collect()
    }
}

/// Minimum number of elements compared by a thread: fewer take less time than starting a thread.
const PART: usize = 1 << 18;

/// Compares a whole result with the reference, on all CPUs that this thread may use; returns the relative
/// error ‖out − reference‖ / ‖reference‖.
///
/// # Errors
/// If an element is further off than the tolerance.
pub fn compare(dtype: DType, tolerance: &Tolerance, out: &Fenced, reference: &ReadOnly) -> Result<f64, Mismatch> {
    let reference = reference.as_slice::<f64>();
    match dtype {
        DType::F32 => compare_parts(tolerance, out.as_slice::<f32>(), reference),
        DType::F64 => compare_parts(tolerance, out.as_slice::<f64>(), reference),
        DType::F16 => compare_parts(tolerance, out.as_slice::<F16>(), reference),
        DType::Bf16 => compare_parts(tolerance, out.as_slice::<Bf16>(), reference),
        wide if wide.is_wide() => compare_wide(wide, tolerance, &wide.read_held(out.as_slice::<u8>()), reference),
        other => compare_parts(tolerance, &other.read(out.as_slice::<u8>()), reference),
    }
}

/// Compares 64-bit integers by their integer difference: different ones may be equal as doubles.
fn compare_wide(dtype: DType, tolerance: &Tolerance, out: &[f64], reference: &[f64]) -> Result<f64, Mismatch> {
    let mut wrong: Option<Mismatch> = None;
    let (mut numbers, mut expected) = (Vec::with_capacity(out.len()), Vec::with_capacity(out.len()));
    for (at, (got, wanted)) in out.iter().zip(reference).enumerate() {
        let [x, r] = [*got, *wanted].map(|held| dtype.whole(held));
        let error = (x - r).unsigned_abs() as f64;
        numbers.push(x as f64);
        expected.push(r as f64);
        if error > tolerance.abs + tolerance.rel * (r as f64).abs() {
            let one = Mismatch { n_wrong: 1, first: at, got: x as f64, expected: r as f64, max_error: error };
            wrong = Some(wrong.map_or(one, |before| before.and(one)));
        }
    }
    wrong.map_or_else(|| Ok(relative_error_of([squared(&numbers, &expected)])), Err)
}

fn compare_parts<T: Copy + Into<f64> + Sync>(
    tolerance: &Tolerance,
    out: &[T],
    reference: &[f64],
) -> Result<f64, Mismatch> {
    let part = |out: &[T], reference: &[f64]| (tolerance.compare(out, reference).err(), squared(out, reference));
    // The standard library's way of counting CPUs opens files, which is forbidden in a process that ran a
    // user's code.
    let n_threads = host::allowed_cpus().len().min(out.len() / PART).max(1);
    let n = out.len().div_ceil(n_threads).max(1);
    let compared: Vec<(Option<Mismatch>, [f64; 2])> = if n_threads == 1 {
        vec![part(out, reference)]
    } else {
        std::thread::scope(|scope| {
            let parts = out.chunks(n).zip(reference.chunks(n));
            let start = |(out, reference)| {
                let thread = std::thread::Builder::new().spawn_scoped(scope, move || part(out, reference));
                thread.map_err(|_| part(out, reference))
            };
            let threads: Vec<_> = parts.map(start).collect();
            let end = |thread: std::thread::ScopedJoinHandle<_>| thread.join().expect("invariant: it does not panic");
            threads.into_iter().map(|thread| thread.map_or_else(|done| done, end)).collect()
        })
    };
    let mismatches = compared.iter().enumerate().filter_map(|(at, (mismatch, _))| {
        mismatch.map(|mismatch| Mismatch { first: at * n + mismatch.first, ..mismatch })
    });
    match mismatches.reduce(Mismatch::and) {
        Some(mismatch) => Err(mismatch),
        None => Ok(relative_error_of(compared.iter().map(|(_, squared)| *squared))),
    }
}

/// Creates a memory file that child processes inherit.
pub fn anonymous_file(name: &CStr) -> io::Result<File> {
    // SAFETY: the name is a C string; the result is a new descriptor or negative.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), 0) };
    if fd < 0 {
        let refusal = io::Error::last_os_error();
        return Err(match refusal.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => io::Error::new(
                refusal.kind(),
                format!("{refusal} (a security profile, such as a container's, forbids it: allow memfd_create)"),
            ),
            _ => refusal,
        });
    }
    // SAFETY: the descriptor is open and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) }.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::denied::{SystemCall, without};

    #[test]
    fn a_result_in_parts_is_compared_as_in_one() {
        let tolerance = Tolerance { abs: 0.0, rel: 1e-3 };
        let n = 4 * PART + 5;
        let reference: Vec<f64> = (0..n).map(|i| 1.0 + (i % 7) as f64).collect();
        let mut out: Vec<f64> = reference.iter().map(|x| x * 1.0001).collect();
        let error = compare_parts(&tolerance, &out, &reference).unwrap();
        assert!((error - 1e-4).abs() < 1e-9, "{error}");
        for at in [PART + 1, n - 1, n - 2] {
            out[at] = 100.0;
        }
        let wrong = compare_parts(&tolerance, &out, &reference).unwrap_err();
        let expected = tolerance.compare(&out, &reference).unwrap_err();
        assert_eq!(wrong, expected);
        assert_eq!((wrong.n_wrong, wrong.first), (3, PART + 1));
    }

    #[test]
    fn bf16_is_written_as_its_row_has_it() {
        let odd =
            [0.1, -0.1, 1.0 + 1.0 / 256.0, 1e-40, 3.4e38, 1e300, f64::NAN, f64::INFINITY, -0.0, 0.0, 1.5, -2.5e-5];
        let file = anonymous_file(c"test").unwrap();
        write(&file, 0, DType::Bf16, &odd).unwrap();
        let (mut written, mut expected) = ([0; 2 * 12], [0; 2 * 12]);
        file.read_exact_at(&mut written, 0).unwrap();
        DType::Bf16.write(&odd, &mut expected);
        assert_eq!(written, expected);
    }

    #[test]
    fn data_are_the_same_whatever_number_of_threads_makes_them() {
        let bytes = |workload: &str, n_threads: usize| {
            let program = tilewright_ir::op::Workload::parse(workload).unwrap().program();
            let data = ReferenceData::new(&program, 3, n_threads, &|_| std::ops::ControlFlow::Continue(())).unwrap();
            let mut bytes = vec![0; data.n_bytes() as usize];
            data.file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        for workload in
            ["matmul:m=700,n=300,k=299,dtype=bf16", "matmul:m=301,n=240,k=640", "dense:m=9,n=70,k=64,dtype=u8i8"]
        {
            assert!(bytes(workload, 1) == bytes(workload, 3), "{workload}");
        }
    }

    #[test]
    fn integers_of_64_bits_that_doubles_do_not_tell_apart_differ() {
        let exact = Tolerance { abs: 0.0, rel: 0.0 };
        let [of_i64, of_u64] = [[i64::MAX as u64, -1_i64 as u64, 5], [u64::MAX, 1 << 63, 5]];
        for (dtype, bits) in [(DType::I64, of_i64), (DType::U64, of_u64)] {
            let reference = bits.map(f64::from_bits);
            assert_eq!(compare_wide(dtype, &exact, &reference, &reference), Ok(0.0));
            let mut out = reference;
            out[0] = f64::from_bits(bits[0] - 1);
            out[2] = f64::from_bits(bits[2] - 1);
            let wrong = compare_wide(dtype, &exact, &out, &reference).unwrap_err();
            assert_eq!((wrong.n_wrong, wrong.first, wrong.max_error), (2, 0, 1.0));
            let next = Tolerance { abs: 1.0, rel: 0.0 };
            assert!(compare_wide(dtype, &next, &out, &reference).is_ok());
        }
    }

    #[test]
    fn a_machine_that_forbids_files_in_memory_is_told_of() {
        let refused = without(SystemCall::MemoryFile, || anonymous_file(c"test").map_err(DataError::from));
        let Some(refused) = refused else { return eprintln!("skipped: this system has no filters for calls") };
        let message = refused.expect_err("it is forbidden").to_string();
        assert!(message.contains("Operation not permitted") && message.contains("allow memfd_create"), "{message}");
    }
}
