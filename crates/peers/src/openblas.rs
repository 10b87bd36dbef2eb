//! OpenBLAS through its C interface.
//!
//! # Source
//!
//! Signatures and constants from `cblas.h` of OpenBLAS 0.3.21.

use std::ffi::{c_char, c_int};
use std::path::Path;

use super::library::{Loaded, Means, text};
use super::operands::{CpuElement, Operands};
use super::problem::Matmul;
use super::threads::{LoopThreads, SharedPointers};
use super::worker::{Prepared, RunFunction, shortest_ns};
use super::{Unavailable, Variant};

const CBLAS_ROW_MAJOR: c_int = 101;
const CBLAS_NO_TRANS: c_int = 111;
const CBLAS_TRANS: c_int = 112;

/// `openblas_get_parallel`: built without threads.
const SEQUENTIAL: c_int = 0;

type GetText = unsafe extern "C" fn() -> *const c_char;
type GetInt = unsafe extern "C" fn() -> c_int;
type SetInt = unsafe extern "C" fn(c_int);
pub(super) type BlasGemm<T> = unsafe extern "C" fn(
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
type GemmBatch<T> = unsafe extern "C" fn(
    c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const c_int,
    *const T,
    *const *const T,
    *const c_int,
    *const *const T,
    *const c_int,
    *const T,
    *const *mut T,
    *const c_int,
    c_int,
    *const c_int,
);
type Gemv<T> = unsafe extern "C" fn(c_int, c_int, c_int, c_int, T, *const T, c_int, *const T, c_int, T, *mut T, c_int);

/// Values of `OPENBLAS_CORETYPE` worth trying on this CPU: those for its vector width, and the next narrower
/// one.
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
    Ok(Info::of(load(None)?)?.version)
}

/// Loads OpenBLAS and chooses the fastest way to call it for the operands' problem, as a careful caller
/// would:
///
/// - `gemm` for one multiplication after the other, each with all threads,
/// - `gemv`, if C is a row or a column,
/// - for a batch on several threads, one-threaded calls of `gemm` from as many threads,
/// - for a batch, `gemm_batch`, if this version of the library has it.
pub(super) fn prepare<T: CpuElement>(operands: &mut Operands<T>, means: &Means) -> Result<Prepared<T>, Unavailable> {
    let matmul = operands.problem.multiplication_only()?;
    let blas = Blas::<T>::load(means, &[matmul.m, matmul.n, matmul.k])?;
    multiply(&blas, matmul, operands, means.threads)
}

/// Prepares a product with any library that has the BLAS interface.
pub(super) fn multiply<T: CpuElement>(
    blas: &Blas<T>,
    matmul: Matmul,
    operands: &mut Operands<T>,
    threads: usize,
) -> Result<Prepared<T>, Unavailable> {
    let mut ways: Vec<WayMaker<'_, T>> =
        vec![Box::new(|| ThreadedCall { name: "gemm".to_owned(), threads, run: call_gemm(blas.gemm, matmul) })];
    if matmul.m == 1 || matmul.n == 1 {
        ways.push(Box::new(|| ThreadedCall { name: "gemv".to_owned(), threads, run: call_gemv(blas.gemv, matmul) }));
    }
    if matmul.b > 1 {
        if let Some(gemm_batch) = blas.gemm_batch {
            ways.push(Box::new(move || ThreadedCall {
                name: "gemm_batch".to_owned(),
                threads,
                run: call_gemm_batch(gemm_batch, matmul),
            }));
        }
        if threads > 1 {
            ways.push(Box::new(|| {
                let run = call_gemm_side_by_side(blas.gemm, matmul, threads);
                ThreadedCall { name: format!("gemm on {threads} threads of ours"), threads: 1, run }
            }));
        }
    }
    blas.fastest(ways, operands, threads)
}

/// Way to call the library.
pub(super) struct ThreadedCall<T> {
    /// Name in reports.
    pub(super) name: String,
    /// Number of threads that the library starts in each call.
    pub(super) threads: usize,
    pub(super) run: RunFunction<T>,
}

/// Function that prepares a way when it is tried: threads of one way must not wait while another is timed.
pub(super) type WayMaker<'a, T> = Box<dyn FnOnce() -> ThreadedCall<T> + 'a>;

/// Functions of the library for one element type.
pub(super) struct Blas<T> {
    info: Info,
    set_threads: SetInt,
    get_threads: GetInt,
    pub(super) gemm: BlasGemm<T>,
    gemm_batch: Option<GemmBatch<T>>,
    gemv: Gemv<T>,
}

impl<T: CpuElement> Blas<T> {
    /// Loads OpenBLAS, able to use this many threads; `extents` are all sizes that will be passed to it.
    pub(super) fn load(means: &Means, extents: &[usize]) -> Result<Blas<T>, Unavailable> {
        let library = load(means.folder.as_deref())?;
        let info = Info::of(library)?;
        // SAFETY: the signature is that of cblas.h.
        let parallel = unsafe { library.function::<GetInt>(b"openblas_get_parallel\0")?() };
        if parallel == SEQUENTIAL && means.threads > 1 {
            let reason = format!("this build of OpenBLAS {} has one thread only", info.version);
            return Err(Unavailable::Unsupported { reason });
        }
        Blas::of(library, info, [b"openblas_set_num_threads\0", b"openblas_get_num_threads\0"], extents)
    }

    /// Wraps a library with its functions that set and get the number of threads.
    pub(super) fn of(
        library: Loaded,
        info: Info,
        [set_threads, get_threads]: [&[u8]; 2],
        extents: &[usize],
    ) -> Result<Blas<T>, Unavailable> {
        if extents.iter().any(|&extent| c_int::try_from(extent).is_err()) {
            return Err(Unavailable::Unsupported { reason: "it takes sizes below 2^31".to_owned() });
        }
        // SAFETY: the signatures are those of cblas.h; that of gemm_batch, which was added later, is the same
        // as MKL's.
        unsafe {
            Ok(Blas {
                info,
                set_threads: library.function(set_threads)?,
                get_threads: library.function(get_threads)?,
                gemm: library.function(T::CBLAS_GEMM)?,
                gemm_batch: library.function(T::CBLAS_GEMM_BATCH).ok(),
                gemv: library.function(T::CBLAS_GEMV)?,
            })
        }
    }

    /// Chooses the fastest of `ways`, of which there is at least one.
    pub(super) fn fastest(
        &self,
        ways: Vec<WayMaker<'_, T>>,
        operands: &mut Operands<T>,
        n_threads: usize,
    ) -> Result<Prepared<T>, Unavailable> {
        let is_choice = ways.len() > 1;
        let mut best: Option<(ThreadedCall<T>, f64)> = None;
        for make in ways {
            let mut way = make();
            self.use_threads(way.threads);
            let time_ns = if is_choice { shortest_ns(&mut way.run, operands, n_threads)? } else { 0.0 };
            if best.as_ref().is_none_or(|(_, best_ns)| time_ns < *best_ns) {
                best = Some((way, time_ns));
            }
        }
        let (ThreadedCall { name, threads, run }, _) = best.expect("a library can be called in some way");
        self.use_threads(threads);
        // SAFETY: the function has no parameters.
        let threads_used = unsafe { (self.get_threads)() };
        let core = self.info.core_type.as_ref().map_or(String::new(), |core| format!("core {core}, "));
        let details = format!("{core}{name}, threads {threads_used}");
        Ok(Prepared {
            core_type: self.info.core_type.clone(),
            ..Prepared::in_place(self.info.version.clone(), details, run)
        })
    }

    fn use_threads(&self, threads: usize) {
        // SAFETY: the function takes a plain number.
        unsafe { (self.set_threads)(threads as c_int) };
    }
}

fn load(folder: Option<&Path>) -> Result<Loaded, Unavailable> {
    let get = super::how_to_get(Variant::OpenBlas);
    Loaded::open(&["libopenblas.so.0", "libopenblas.so", "libopenblas.dylib"], &get, folder)
}

/// Version of the library, as it reports itself.
pub(super) struct Info {
    pub(super) version: String,
    /// Core type, if there are several to choose from.
    pub(super) core_type: Option<String>,
}

impl Info {
    fn of(library: Loaded) -> Result<Info, Unavailable> {
        // SAFETY: the signatures are those of cblas.h; the strings are static in the library.
        let (config, core_type) = unsafe {
            let config = text(library.function::<GetText>(b"openblas_get_config\0")?());
            let core_type = text(library.function::<GetText>(b"openblas_get_corename\0")?());
            (config, core_type)
        };
        if config.contains("USE64BITINT") {
            let reason = "this build of OpenBLAS takes 64-bit integers".to_owned();
            return Err(Unavailable::Unsupported { reason });
        }
        // "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH …"; very old builds leave the first word out.
        let version = config.trim_start_matches("OpenBLAS").split_whitespace().next().unwrap_or("unknown");
        Ok(Info { version: version.to_owned(), core_type: Some(core_type) })
    }
}

/// `gemm` of row-major matrices, C = A·B.
pub(super) struct GemmCall {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Leading dimension of A, and whether it is stored transposed.
    pub(super) a: (usize, bool),
    /// Leading dimension of B, and whether it is stored transposed.
    pub(super) b: (usize, bool),
    /// Leading dimension of C.
    pub(super) ldc: usize,
}

impl GemmCall {
    fn of(matmul: &Matmul) -> GemmCall {
        let &Matmul { m, n, k, ta, tb, .. } = matmul;
        GemmCall { m, n, k, a: (if ta { m } else { k }, ta), b: (if tb { k } else { n }, tb), ldc: n }
    }

    /// # Safety
    ///
    /// The matrices have all elements within the sizes and leading dimensions; no other code accesses C.
    pub(super) unsafe fn call<T: CpuElement>(&self, gemm: BlasGemm<T>, a: *const T, b: *const T, c: *mut T) {
        let ([m, n, k, lda, ldb, ldc], [trans_a, trans_b]) = self.arguments();
        // SAFETY: the caller's promise.
        unsafe { gemm(CBLAS_ROW_MAJOR, trans_a, trans_b, m, n, k, T::ONE, a, lda, b, ldb, T::ZERO, c, ldc) };
    }

    fn arguments(&self) -> ([c_int; 6], [c_int; 2]) {
        let sizes = [self.m, self.n, self.k, self.a.0, self.b.0, self.ldc].map(|size| size as c_int);
        (sizes, [self.a.1, self.b.1].map(|transposed| if transposed { CBLAS_TRANS } else { CBLAS_NO_TRANS }))
    }
}

fn call_gemm<T: CpuElement>(gemm: BlasGemm<T>, matmul: Matmul) -> RunFunction<T> {
    let call = GemmCall::of(&matmul);
    Box::new(move |operands| {
        for batch in 0..matmul.b {
            let [a, b, c] = matrices(operands, &matmul, batch);
            // SAFETY: each slice has all elements within the sizes and leading dimensions.
            unsafe { call.call(gemm, a, b, c.cast_mut()) };
        }
        Ok(())
    })
}

fn call_gemm_side_by_side<T: CpuElement>(gemm: BlasGemm<T>, matmul: Matmul, threads: usize) -> RunFunction<T> {
    let call = GemmCall::of(&matmul);
    let mut threads = LoopThreads::new(threads);
    Box::new(move |operands| {
        let all: Vec<_> = (0..matmul.b).map(|batch| SharedPointers(matrices(operands, &matmul, batch))).collect();
        threads.for_each(matmul.b, |batch, _| {
            let [a, b, c] = all[batch].get();
            // SAFETY: as above; every multiplication has its own C.
            unsafe { call.call(gemm, a, b, c.cast_mut()) };
        });
        Ok(())
    })
}

fn call_gemm_batch<T: CpuElement>(gemm_batch: GemmBatch<T>, matmul: Matmul) -> RunFunction<T> {
    let ([m, n, k, lda, ldb, ldc], [trans_a, trans_b]) = GemmCall::of(&matmul).arguments();
    Box::new(move |operands| {
        let all: Vec<_> = (0..matmul.b).map(|batch| matrices(operands, &matmul, batch)).collect();
        let a: Vec<_> = all.iter().map(|matrices| matrices[0]).collect();
        let b: Vec<_> = all.iter().map(|matrices| matrices[1]).collect();
        let c: Vec<_> = all.iter().map(|matrices| matrices[2].cast_mut()).collect();
        // SAFETY: one group, so each of the group's arrays has one element; there are as many matrices as its
        // size, each with all elements within the sizes and leading dimensions.
        unsafe {
            gemm_batch(
                CBLAS_ROW_MAJOR,
                &trans_a,
                &trans_b,
                &m,
                &n,
                &k,
                &T::ONE,
                a.as_ptr(),
                &lda,
                b.as_ptr(),
                &ldb,
                &T::ZERO,
                c.as_ptr(),
                &ldc,
                1,
                &(matmul.b as c_int),
            );
        }
        Ok(())
    })
}

/// Pointers to A, B and C of one multiplication of the batch.
fn matrices<T: CpuElement>(operands: &mut Operands<T>, matmul: &Matmul, batch: usize) -> [*const T; 3] {
    let &Matmul { m, n, k, .. } = matmul;
    let a = operands.a[batch * m * k..(batch + 1) * m * k].as_ptr();
    let b = operands.b[batch * k * n..(batch + 1) * k * n].as_ptr();
    let c = operands.c[batch * m * n..(batch + 1) * m * n].as_mut_ptr();
    [a, b, c.cast_const()]
}

/// Makes a call of `gemv`. For m = 1 the row C = A·B is Bᵀ times the vector A; for n = 1 the column C is A
/// times the vector B.
fn call_gemv<T: CpuElement>(gemv: Gemv<T>, matmul: Matmul) -> RunFunction<T> {
    let Matmul { b: n_batch, m, n, k, ta, tb } = matmul;
    let c_is_row = m == 1;
    // Matrix as stored in memory, and whether gemv must transpose it.
    let (rows, columns, transpose) = match (c_is_row, ta, tb) {
        (true, _, false) => (k, n, true),
        (true, _, true) => (n, k, false),
        (false, false, _) => (m, k, false),
        (false, true, _) => (k, m, true),
    };
    Box::new(move |operands| {
        for batch in 0..n_batch {
            let [a, b, c] = matrices(operands, &matmul, batch);
            let (matrix, vector) = if c_is_row { (b, a) } else { (a, b) };
            // SAFETY: the matrix has rows · columns elements; the vectors have the matching lengths.
            unsafe {
                gemv(
                    CBLAS_ROW_MAJOR,
                    if transpose { CBLAS_TRANS } else { CBLAS_NO_TRANS },
                    rows as c_int,
                    columns as c_int,
                    T::ONE,
                    matrix,
                    columns as c_int,
                    vector,
                    1,
                    T::ZERO,
                    c.cast_mut(),
                    1,
                );
            }
        }
        Ok(())
    })
}
