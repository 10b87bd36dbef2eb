//! OpenBLAS through its C interface.
//!
//! # Source
//!
//! Signatures and constants from `cblas.h` of OpenBLAS 0.3.21.

use std::ffi::{c_char, c_int};
use std::time::Instant;

use super::library::{Loaded, text};
use super::operands::{Element, Operands};
use super::worker::{Prepared, Run};
use super::{MatmulProblem, Unavailable, Variant};

const CBLAS_ROW_MAJOR: c_int = 101;
const CBLAS_NO_TRANS: c_int = 111;
const CBLAS_TRANS: c_int = 112;

/// `openblas_get_parallel`: built without threads.
const SEQUENTIAL: c_int = 0;

type GetText = unsafe extern "C" fn() -> *const c_char;
type GetInt = unsafe extern "C" fn() -> c_int;
type SetInt = unsafe extern "C" fn(c_int);
type Gemm<T> = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    T,
    *const T,
    c_int,
    *const T,
    c_int,
    T,
    *mut T,
    c_int,
);
type Gemv<T> = unsafe extern "C" fn(c_int, c_int, c_int, c_int, T, *const T, c_int, *const T, c_int, T, *mut T, c_int);

/// Values of `OPENBLAS_CORETYPE` worth trying on this CPU: those for its vector width, and the next narrower.
pub(super) fn core_types() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            &["SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS", "HASWELL", "ZEN"]
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            &["HASWELL", "ZEN"]
        } else {
            &["SANDYBRIDGE", "NEHALEM"]
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        &["NEOVERSEN1", "NEOVERSEN2", "NEOVERSEV1", "CORTEXA57", "ARMV8"]
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        &[]
    }
}

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    Ok(Info::of(load()?)?.version)
}

/// Load OpenBLAS and choose how to call it for the operands' problem.
///
/// Where C is a row or a column, `gemv` computes it too; the faster of the two is taken, as a careful caller
/// of the library does. Batches are one call after the other, each with all threads.
pub(super) fn prepare<T: Element>(operands: &mut Operands<T>, threads: usize) -> Result<Prepared<T>, Unavailable> {
    let problem = operands.problem;
    if [problem.m, problem.n, problem.k].iter().any(|&extent| c_int::try_from(extent).is_err()) {
        return Err(Unavailable::Unsupported { reason: "OpenBLAS takes sizes below 2^31".to_owned() });
    }
    let library = load()?;
    let info = Info::of(library)?;
    if info.parallel == SEQUENTIAL && threads > 1 {
        let reason = format!("this build of OpenBLAS {} has one thread only", info.version);
        return Err(Unavailable::Unsupported { reason });
    }
    // SAFETY: the signatures are those of cblas.h.
    let (gemm, gemv, threads_used) = unsafe {
        library.function::<SetInt>(b"openblas_set_num_threads\0")?(threads as c_int);
        let threads_used = library.function::<GetInt>(b"openblas_get_num_threads\0")?();
        let gemm = library.function::<Gemm<T>>(T::CBLAS_GEMM)?;
        let gemv = library.function::<Gemv<T>>(T::CBLAS_GEMV)?;
        (gemm, gemv, threads_used)
    };
    let mut run = call_gemm(gemm);
    let mut called = "gemm";
    if problem.m == 1 || problem.n == 1 {
        let mut as_gemv = call_gemv(gemv);
        if shortest_ns(&mut as_gemv, operands)? < shortest_ns(&mut run, operands)? {
            run = as_gemv;
            called = "gemv";
        }
    }
    Ok(Prepared {
        version: info.version,
        details: format!("core {}, {called}, threads {threads_used}", info.core_type),
        core_type: Some(info.core_type),
        run,
    })
}

fn load() -> Result<Loaded, Unavailable> {
    let package = super::package_of(Variant::OpenBlas);
    Loaded::open(&["libopenblas.so.0", "libopenblas.so", "libopenblas.dylib"], package)
}

/// What the library says of itself.
struct Info {
    version: String,
    core_type: String,
    parallel: c_int,
}

impl Info {
    fn of(library: Loaded) -> Result<Info, Unavailable> {
        // SAFETY: the signatures are those of cblas.h; the strings are static in the library.
        let (config, core_type, parallel) = unsafe {
            let config = text(library.function::<GetText>(b"openblas_get_config\0")?());
            let core_type = text(library.function::<GetText>(b"openblas_get_corename\0")?());
            (config, core_type, library.function::<GetInt>(b"openblas_get_parallel\0")?())
        };
        if config.contains("USE64BITINT") {
            let reason = "this build of OpenBLAS takes 64-bit integers".to_owned();
            return Err(Unavailable::Unsupported { reason });
        }
        // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH …"; very old builds leave the first word out.
        let version = config.trim_start_matches("OpenBLAS").split_whitespace().next().unwrap_or("unknown");
        Ok(Info { version: version.to_owned(), core_type, parallel })
    }
}

/// Leading dimension and flag of a row-major matrix with these strides (row, column).
fn order((row, col): (usize, usize), transposed: bool) -> (c_int, c_int) {
    if transposed { (col as c_int, CBLAS_TRANS) } else { (row as c_int, CBLAS_NO_TRANS) }
}

fn call_gemm<T: Element>(gemm: Gemm<T>) -> Run<T> {
    Box::new(move |operands| {
        let problem = operands.problem;
        let MatmulProblem { m, n, k, .. } = problem;
        let (lda, trans_a) = order(problem.a_strides(), problem.ta);
        let (ldb, trans_b) = order(problem.b_strides(), problem.tb);
        for batch in 0..problem.b {
            let a = &operands.a[batch * m * k..(batch + 1) * m * k];
            let b = &operands.b[batch * k * n..(batch + 1) * k * n];
            let c = &mut operands.c[batch * m * n..(batch + 1) * m * n];
            // SAFETY: each slice has as many elements as sizes and leading dimensions reach.
            unsafe {
                gemm(
                    CBLAS_ROW_MAJOR,
                    trans_a,
                    trans_b,
                    m as c_int,
                    n as c_int,
                    k as c_int,
                    T::ONE,
                    a.as_ptr(),
                    lda,
                    b.as_ptr(),
                    ldb,
                    T::ZERO,
                    c.as_mut_ptr(),
                    n as c_int,
                );
            }
        }
        Ok(())
    })
}

/// For m = 1 the row C = A·B is Bᵀ times A as a vector; for n = 1 the column C is A times B as a vector.
fn call_gemv<T: Element>(gemv: Gemv<T>) -> Run<T> {
    Box::new(move |operands| {
        let MatmulProblem { b: n_batch, m, n, k, ta, tb, .. } = operands.problem;
        let c_is_row = m == 1;
        for batch in 0..n_batch {
            let a = &operands.a[batch * m * k..(batch + 1) * m * k];
            let b = &operands.b[batch * k * n..(batch + 1) * k * n];
            let c = &mut operands.c[batch * m * n..(batch + 1) * m * n];
            // The matrix as it lies in memory, whether gemv shall transpose it, and the vector.
            let (matrix, rows, columns, transpose, vector) = match (c_is_row, ta, tb) {
                (true, _, false) => (b, k, n, true, a),
                (true, _, true) => (b, n, k, false, a),
                (false, false, _) => (a, m, k, false, b),
                (false, true, _) => (a, k, m, true, b),
            };
            // SAFETY: the matrix has rows · columns elements; the vectors have as many as it has on that side.
            unsafe {
                gemv(
                    CBLAS_ROW_MAJOR,
                    if transpose { CBLAS_TRANS } else { CBLAS_NO_TRANS },
                    rows as c_int,
                    columns as c_int,
                    T::ONE,
                    matrix.as_ptr(),
                    columns as c_int,
                    vector.as_ptr(),
                    1,
                    T::ZERO,
                    c.as_mut_ptr(),
                    1,
                );
            }
        }
        Ok(())
    })
}

/// The shortest of ten runs after one to warm up.
fn shortest_ns<T>(run: &mut Run<T>, operands: &mut Operands<T>) -> Result<f64, Unavailable> {
    let mut shortest_ns = f64::INFINITY;
    for attempt in 0..=10 {
        let start = Instant::now();
        run(operands).map_err(|error| Unavailable::Broken { reason: format!("{error:#}") })?;
        if attempt > 0 {
            shortest_ns = shortest_ns.min(start.elapsed().as_nanos() as f64);
        }
    }
    Ok(shortest_ns)
}
