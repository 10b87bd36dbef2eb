//! Tensors that a peer computes with: the workload's data, in memory like that of our kernels, and the same
//! verification of the result.

use std::marker::PhantomData;
use std::os::fd::BorrowedFd;

use tilewright_device::data::{BoundArgument, compare};
use tilewright_device::memory::{Bf16, F16, Fenced, Plain, ReadOnly};
use tilewright_ir::op::Epilogue;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::{DType, Program};

use super::Unavailable;
use super::problem::PeerProblem;

/// Element type of operands.
pub(super) trait OperandType: Plain + Send + Sync + 'static {
    /// Name of the type in a problem.
    const DTYPE: DType;
}

impl OperandType for f32 {
    const DTYPE: DType = DType::F32;
}

impl OperandType for f64 {
    const DTYPE: DType = DType::F64;
}

/// Sums of products of integers; the operands, which have a shorter type, are accessed only by their
/// addresses.
impl OperandType for i32 {
    const DTYPE: DType = DType::I32;
}

impl OperandType for F16 {
    const DTYPE: DType = DType::F16;
}

impl OperandType for Bf16 {
    const DTYPE: DType = DType::Bf16;
}

/// Element type that peers on CPUs compute with.
pub(super) trait CpuElement: OperandType + PartialOrd + std::ops::Add<Output = Self> {
    /// Number zero.
    const ZERO: Self;
    /// Number one.
    const ONE: Self;
    /// `cblas_?gemm`, ended by a zero byte.
    const CBLAS_GEMM: &[u8];
    /// `cblas_?gemm_batch`, ended by a zero byte.
    const CBLAS_GEMM_BATCH: &[u8];
    /// `cblas_?gemv`, ended by a zero byte.
    const CBLAS_GEMV: &[u8];
    /// Returns the crate gemm's function for this type and this processor.
    fn gemm() -> GemmFn<Self>;
    /// Function of the crate matrixmultiply for this type.
    const MATRIXMULTIPLY: MatrixMultiplyFn<Self>;
    /// Rounds to the nearest value.
    fn from_f64(value: f64) -> Self;
}

/// Signature of the crate gemm's functions: sizes; the result with its strides, column stride first, and
/// whether it is accumulated to; both operands with their strides; factors of result and product;
/// conjugations; parallelism.
pub(super) type GemmFn<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    gemm_common::Parallelism,
);

/// Signature of `matrixmultiply::sgemm` and `dgemm`.
pub(super) type MatrixMultiplyFn<T> =
    unsafe fn(usize, usize, usize, T, *const T, isize, isize, *const T, isize, isize, T, *mut T, isize, isize);

impl CpuElement for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const CBLAS_GEMM: &[u8] = b"cblas_sgemm\0";
    const CBLAS_GEMM_BATCH: &[u8] = b"cblas_sgemm_batch\0";
    const CBLAS_GEMV: &[u8] = b"cblas_sgemv\0";
    const MATRIXMULTIPLY: MatrixMultiplyFn<f32> = matrixmultiply::sgemm;
    fn gemm() -> GemmFn<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
    fn from_f64(value: f64) -> f32 {
        value as f32
    }
}

impl CpuElement for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const CBLAS_GEMM: &[u8] = b"cblas_dgemm\0";
    const CBLAS_GEMM_BATCH: &[u8] = b"cblas_dgemm_batch\0";
    const CBLAS_GEMV: &[u8] = b"cblas_dgemv\0";
    const MATRIXMULTIPLY: MatrixMultiplyFn<f64> = matrixmultiply::dgemm;
    fn gemm() -> GemmFn<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
    fn from_f64(value: f64) -> f64 {
        value
    }
}

/// Elements in memory like that of our kernels: fenced, aligned, in huge pages if available.
pub(super) struct FencedElements<T> {
    memory: Fenced,
    element: PhantomData<T>,
}

impl<T: Plain> FencedElements<T> {
    /// Makes `len` zeros.
    ///
    /// # Panics
    /// If memory is insufficient: this process is the peer's, and `bench` continues without it.
    pub(super) fn zeros(len: usize) -> FencedElements<T> {
        let n_bytes = (len * size_of::<T>()) as u64;
        FencedElements::of(
            Fenced::new(n_bytes).unwrap_or_else(|error| panic!("no memory for {n_bytes} bytes: {error}")),
        )
    }

    fn of(memory: Fenced) -> FencedElements<T> {
        FencedElements { memory, element: PhantomData }
    }

    /// Address of the first element, whatever its type.
    pub(super) fn address(&self) -> *mut u8 {
        self.memory.pointer()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.as_slice()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}

impl<T: Plain> std::ops::Deref for FencedElements<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.memory.as_slice()
    }
}

impl<T: Plain> std::ops::DerefMut for FencedElements<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len();
        // SAFETY: the memory belongs to this object, which is borrowed mutably, has `len` elements, and any
        // bits are a valid element.
        unsafe { std::slice::from_raw_parts_mut(self.memory.pointer().cast(), len) }
    }
}

/// Tensors of one workload, at fixed addresses as long as this lives.
pub(super) struct Operands<T> {
    /// Problem to compute.
    pub(super) problem: PeerProblem,
    /// A, `[b, m, k]` or, if it is stored transposed, `[b, k, m]`; or X, `[n, c, h, w]`. Read-only, as all
    /// inputs.
    pub(super) a: FencedElements<T>,
    /// B, `[b, k, n]` or, if it is stored transposed, `[b, n, k]`; or W, `[k, c/groups, r, s]`, of a
    /// transposed convolution `[c, k/groups, r, s]`.
    pub(super) b: FencedElements<T>,
    /// Further input of each operation of the epilogue: one element per channel, or of the result's shape;
    /// empty if the operation has none.
    pub(super) further: Vec<FencedElements<T>>,
    /// Result: C, `[b, m, n]`, or Y, `[n, k, p, q]`.
    pub(super) c: FencedElements<T>,
    reference: ReadOnly,
    tolerance: Tolerance,
}

impl<T: OperandType> Operands<T> {
    /// Maps the arguments of a problem's untransformed program, from data of another process.
    ///
    /// # Errors
    /// [`Unavailable::Broken`] if memory does not suffice.
    pub(super) fn new(
        problem: PeerProblem,
        program: &Program,
        tolerance: Tolerance,
        data: BorrowedFd,
        offsets: &[u64],
    ) -> Result<Operands<T>, Unavailable> {
        let no_memory = |error| Unavailable::Broken { reason: format!("no memory for its operands: {error}") };
        let (mut inputs, mut result) = (Vec::new(), None);
        for argument in BoundArgument::all(program, data, offsets).map_err(no_memory)? {
            match argument {
                BoundArgument::Input(buffer) => inputs.push(FencedElements::of(buffer)),
                BoundArgument::Output { buffer, reference } => result = Some((FencedElements::of(buffer), reference)),
            }
        }
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next().expect("operators have these inputs");
        let (a, b) = (next(), next());
        let mut further: Vec<FencedElements<T>> = problem.epilogue.iter().map(|_| FencedElements::zeros(0)).collect();
        Epilogue::operands(&problem.epilogue).into_iter().for_each(|(at, ..)| further[at] = next());
        let (c, reference) = result.expect("operators have a result");
        Ok(Operands { problem, a, b, further, c, reference, tolerance })
    }

    /// Total size in bytes.
    pub(super) fn n_bytes(&self) -> u64 {
        [&self.a, &self.b, &self.c].into_iter().chain(&self.further).map(|elements| elements.memory.n_bytes()).sum()
    }

    /// Erases the last result: all ones is a NaN, so that an element that is not written cannot pass for
    /// correct.
    pub(super) fn clear_c(&mut self) {
        self.c.memory.fill(0xFF);
    }

    /// Compares the whole result with the reference; returns ‖out − reference‖ / ‖reference‖.
    ///
    /// # Errors
    /// [`Unavailable::Wrong`] if an element is further off than rounding explains.
    pub(super) fn check(&self) -> Result<f64, Unavailable> {
        if !self.c.memory.is_intact() {
            return Err(Unavailable::Wrong { reason: "it wrote outside its buffers".to_owned() });
        }
        compare(T::DTYPE, &self.tolerance, &self.c.memory, &self.reference)
            .map_err(|mismatch| Unavailable::Wrong { reason: mismatch.to_string() })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::ops::ControlFlow;
    use std::os::fd::AsFd;

    use tilewright_device::data::ReferenceData;
    use tilewright_ir::op::Workload;

    use super::*;

    /// Data of a workload.
    pub(crate) fn data_of(workload: &Workload) -> ReferenceData {
        ReferenceData::new(&workload.program(), 1, 2, &|_| ControlFlow::Continue(())).expect("it is small")
    }

    /// Operands of a workload that libraries support.
    pub(crate) fn operands_of<T: OperandType>(text: &str) -> Operands<T> {
        let workload = Workload::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let (program, data) = (workload.program(), data_of(&workload));
        let problem = PeerProblem::of(&workload);
        let tolerance = Tolerance::for_program(&program);
        Operands::new(problem, &program, tolerance, data.file.as_fd(), &data.offsets).expect("it is small")
    }

    #[test]
    fn a_forgotten_and_a_wrong_element_and_one_outside_are_found() {
        let mut operands = operands_of::<f32>("matmul:m=2,n=2,k=2");
        operands.clear_c();
        assert!(operands.check().is_err());
        let (a, b) = (&operands.a, &operands.b);
        let product: Vec<f32> =
            (0..4).map(|at| a[at / 2 * 2] * b[at % 2] + a[at / 2 * 2 + 1] * b[2 + at % 2]).collect();
        operands.c.copy_from_slice(&product);
        assert!(operands.check().expect("it is the product") < 1e-6);
        operands.c[3] += 0.01;
        let wrong = operands.check().expect_err("the last element is wrong").to_string();
        assert!(wrong.contains("1 elements are wrong, first number 3"), "{wrong}");
        operands.c[3] = product[3];
        // SAFETY: the byte after the buffer is accessible.
        unsafe { *operands.c.memory.pointer().add(16) = 0 };
        let outside = operands.check().expect_err("something is written outside").to_string();
        assert!(outside.contains("outside"), "{outside}");
    }
}
