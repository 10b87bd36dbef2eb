//! Libraries for GPUs: operands on a device, and the choice of the fastest way to call a library there.
//!
//! Everything is as for our kernels there: data, reference, memory between canaries, and timing. The runs of
//! a sample are timed by the device; on NVIDIA's GPUs they are one graph.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use tilewright_device::cuda::{self, CudaError};
use tilewright_device::guarded::{DeviceMemory, GuardedMemory};
use tilewright_device::opencl::{self, CPU_PACKAGE, LOADER_PACKAGE, OpenClError};
use tilewright_ir::op::{Epilogue, EpilogueFunction};

use super::Unavailable;
use super::library::Means;
use super::operands::{OperandType, Operands};
use super::problem::ConvProblem;
use super::worker::{CHOICE, Prepared, check, samples_ns_by};

impl From<CudaError> for Unavailable {
    fn from(error: CudaError) -> Unavailable {
        match error {
            CudaError::NoDriver { .. } => Unavailable::NotInstalled {
                library: "libcuda.so.1".to_owned(),
                get: "NVIDIA's driver, in Debian the package libcuda1".to_owned(),
            },
            other => Unavailable::Broken { reason: other.to_string() },
        }
    }
}

impl From<OpenClError> for Unavailable {
    fn from(error: OpenClError) -> Unavailable {
        let missing = |library: &str, package: &str| Unavailable::NotInstalled {
            library: library.to_owned(),
            get: format!("Debian and Ubuntu: apt install {package}"),
        };
        match error {
            OpenClError::NoLoader => missing("OpenCL's loader", LOADER_PACKAGE),
            OpenClError::NoDevices => missing("the driver of an OpenCL device", CPU_PACKAGE),
            other => Unavailable::Broken { reason: other.to_string() },
        }
    }
}

/// Context of a driver, with the interface that libraries for its devices need.
pub(super) trait DriverContext: Sized + 'static {
    /// Allocation of the driver.
    type Whole: DeviceMemory<Error = Self::Error>;
    /// Error of the driver.
    type Error;

    /// Opens a context on the device with this index.
    fn on(number: u32) -> Result<Self, Self::Error>;
    /// Allocates `n_bytes` undefined bytes.
    fn memory(&self, n_bytes: u64) -> Result<GuardedMemory<Self::Whole>, Self::Error>;
    /// Pointer to memory, in the form that libraries take.
    fn pointer(memory: &GuardedMemory<Self::Whole>) -> *mut c_void;
    /// Runs `put` `n_times`; returns nanoseconds of the device.
    fn timed(&self, n_times: u32, put: &Put) -> Result<f64, Unavailable>;
    /// Waits until all submitted work is done.
    fn finish(&self) -> Result<(), Self::Error>;
}

impl DriverContext for cuda::CudaContext {
    type Whole = cuda::Allocation;
    type Error = CudaError;

    fn on(number: u32) -> Result<cuda::CudaContext, CudaError> {
        cuda::CudaContext::new(number)
    }

    fn memory(&self, n_bytes: u64) -> Result<cuda::CudaMemory, CudaError> {
        cuda::CudaMemory::new(self, n_bytes)
    }

    fn pointer(memory: &cuda::CudaMemory) -> *mut c_void {
        std::ptr::without_provenance_mut(memory.address() as usize)
    }

    fn timed(&self, n_times: u32, put: &Put) -> Result<f64, Unavailable> {
        cuda::record(self, n_times, || put())
    }

    fn finish(&self) -> Result<(), CudaError> {
        self.finish()
    }
}

impl DriverContext for opencl::OpenClContext {
    type Whole = opencl::Buffers;
    type Error = OpenClError;

    fn on(number: u32) -> Result<opencl::OpenClContext, OpenClError> {
        opencl::OpenClContext::new(&opencl::device(number as usize)?)
    }

    fn memory(&self, n_bytes: u64) -> Result<opencl::OpenClMemory, OpenClError> {
        opencl::OpenClMemory::new(self, n_bytes)
    }

    fn pointer(memory: &opencl::OpenClMemory) -> *mut c_void {
        memory.handle()
    }

    fn timed(&self, n_times: u32, put: &Put) -> Result<f64, Unavailable> {
        opencl::timed(self, n_times, || put())
    }

    fn finish(&self) -> Result<(), OpenClError> {
        self.finish()
    }
}

/// Operands on a device.
pub(super) struct DeviceOperands<C: DriverContext> {
    pub(super) context: C,
    a: GuardedMemory<C::Whole>,
    b: GuardedMemory<C::Whole>,
    /// Further inputs, by operation of the epilogue.
    further: Vec<Option<GuardedMemory<C::Whole>>>,
    c: GuardedMemory<C::Whole>,
}

/// Function that submits the calls of one run to the context's stream or queue.
pub(super) type Put = Rc<dyn Fn() -> Result<(), Unavailable>>;

/// Way to call a library.
pub(super) struct QueuedCall {
    /// Name in reports.
    pub(super) name: String,
    pub(super) put: Put,
}

impl<C: DriverContext> DeviceOperands<C>
where
    Unavailable: From<C::Error>,
{
    /// Copies the operands to the requested device.
    pub(super) fn new<T: OperandType>(
        operands: &Operands<T>,
        means: &Means,
    ) -> Result<Rc<DeviceOperands<C>>, Unavailable> {
        let context = C::on(means.gpu.unwrap_or(0))?;
        let copy = |bytes: &[u8]| -> Result<GuardedMemory<C::Whole>, C::Error> {
            let memory = context.memory(bytes.len() as u64)?;
            memory.write(0, bytes)?;
            Ok(memory)
        };
        let further = operands.further.iter().map(|input| Some(input.bytes()).filter(|bytes| !bytes.is_empty()));
        Ok(Rc::new(DeviceOperands {
            a: copy(operands.a.bytes())?,
            b: copy(operands.b.bytes())?,
            further: further.map(|bytes| bytes.map(copy).transpose()).collect::<Result<_, _>>()?,
            c: context.memory(operands.c.bytes().len() as u64)?,
            context,
        }))
    }

    /// Pointers to A or X, B or W, and C or Y.
    pub(super) fn pointers(&self) -> [*mut c_void; 3] {
        [&self.a, &self.b, &self.c].map(C::pointer)
    }

    /// Pointer to the further input of an operation of the epilogue.
    pub(super) fn further(&self, at: usize) -> *mut c_void {
        C::pointer(self.further[at].as_ref().expect("the operation has a further input"))
    }

    /// Chooses the fastest of `ways` whose result is correct.
    pub(super) fn fastest<T: OperandType>(
        self: &Rc<Self>,
        ways: Vec<QueuedCall>,
        operands: &mut Operands<T>,
        version: &str,
    ) -> Result<Prepared<T>, Unavailable> {
        let (n_ways, n_bytes) = (ways.len(), operands.n_bytes());
        let mut refused = Unavailable::Unsupported { reason: "it has no way to compute this".to_owned() };
        let mut timed: Vec<(QueuedCall, f64)> = Vec::new();
        for way in ways {
            match self.shortest_ns(&way.put, n_bytes) {
                Ok(ns) => timed.push((way, ns)),
                Err(reason) => refused = reason,
            }
        }
        timed.sort_by(|(_, a_ns), (_, b_ns)| a_ns.total_cmp(b_ns));
        let mut wrong = String::new();
        for (way, _) in timed {
            let details = format!("{}, fastest of {n_ways}{wrong}", way.name);
            let mut prepared = self.prepared(&way.put, version, details);
            match check(&mut prepared, operands) {
                Ok(_) => return Ok(prepared),
                Err(reason) => {
                    wrong += &format!(", {} was wrong", way.name);
                    refused = reason;
                }
            }
        }
        Err(refused)
    }

    /// Shortest sample of a short round, in nanoseconds per run.
    fn shortest_ns(&self, put: &Put, n_bytes: u64) -> Result<f64, Unavailable> {
        // Initialisation at a library's first call must not be part of a sample.
        self.run_once(put)?;
        let mut timed = |n| self.context.timed(n, put);
        let samples_ns = samples_ns_by(&mut timed, n_bytes, CHOICE)?;
        Ok(samples_ns.into_iter().fold(f64::INFINITY, f64::min))
    }

    fn prepared<T: OperandType>(self: &Rc<Self>, put: &Put, version: &str, details: String) -> Prepared<T> {
        let [for_load, for_run, for_timed, for_store] = std::array::from_fn(|_| self.clone());
        let (run, timed) = (put.clone(), put.clone());
        Prepared {
            load: Box::new(move |_| Ok(for_load.c.fill(0xFF)?)),
            timed: Some(Box::new(move |n| for_timed.context.timed(n, &timed))),
            store: Box::new(move |operands| {
                let DeviceOperands { a, b, further, c, .. } = &*for_store;
                for memory in [a, b, c].into_iter().chain(further.iter().flatten()) {
                    if !memory.is_intact()? {
                        return Err(Unavailable::Wrong { reason: "it wrote outside its buffers".to_owned() });
                    }
                }
                Ok(c.read(0, operands.c.bytes_mut())?)
            }),
            ..Prepared::in_place(version.to_owned(), details, Box::new(move |_| for_run.run_once(&run)))
        }
    }

    /// Runs once, to the end. A run with an error is repeated: some libraries report only then what went
    /// wrong before.
    fn run_once(&self, put: &Put) -> Result<(), Unavailable> {
        put().or_else(|_| put())?;
        Ok(self.context.finish()?)
    }
}

/// Epilogue that libraries for GPUs can fuse: a bias by channel, an addend of the result's shape, and a ReLU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FusedEpilogue {
    /// Index of the epilogue's operation that adds by channel.
    pub(super) bias: Option<usize>,
    /// Index of the operation that adds element by element.
    pub(super) addend: Option<usize>,
    pub(super) relu: bool,
}

impl FusedEpilogue {
    pub(super) fn of(library: &str, epilogue: &[Epilogue]) -> Result<FusedEpilogue, Unavailable> {
        let mut fused = FusedEpilogue::default();
        for (at, step) in epilogue.iter().enumerate() {
            match step.function() {
                EpilogueFunction::Bias if fused.bias.is_none() && !fused.relu => fused.bias = Some(at),
                EpilogueFunction::Add if fused.addend.is_none() && !fused.relu => fused.addend = Some(at),
                EpilogueFunction::Relu if !fused.relu => fused.relu = true,
                _ => {
                    let reason = format!("{library} has no such epilogue as {step} here");
                    return Err(Unavailable::Unsupported { reason });
                }
            }
        }
        Ok(fused)
    }
}

/// Padding above and below, and to the left and right, which is equal on both sides. A padding row or column
/// that no filter reaches does no harm.
pub(super) fn pads(library: &str, conv: &ConvProblem) -> Result<[usize; 2], Unavailable> {
    // In a transposed convolution, filters move over the result.
    let (large, small) = if conv.transposed { (conv.output(), conv.image) } else { (conv.image, conv.output()) };
    let fits = |axis: usize| {
        let reach = conv.dilation[axis] * (conv.filter[axis] - 1) + 1;
        let rest = (large[axis] + 2 * conv.pad_begin[axis]).checked_sub(reach);
        rest.is_some_and(|rest| rest / conv.stride[axis] + 1 == small[axis])
    };
    if fits(0) && fits(1) {
        return Ok(conv.pad_begin);
    }
    Err(Unavailable::Unsupported { reason: format!("{library} has as many zeros on one side as on the other") })
}

/// Converts sizes to a library's integers.
pub(super) fn sizes<const N: usize>(sizes: [usize; N]) -> Result<[c_int; N], Unavailable> {
    let mut converted = [0; N];
    for (to, size) in converted.iter_mut().zip(sizes) {
        let too_large = |_| Unavailable::Unsupported { reason: "it takes sizes below 2^31".to_owned() };
        *to = c_int::try_from(size).map_err(too_large)?;
    }
    Ok(converted)
}

#[cfg(test)]
mod tests {
    use tilewright_ir::op::Workload;

    use super::*;
    use crate::problem::{LibraryProblem, PeerProblem};

    #[test]
    fn epilogues_are_what_libraries_can_do_or_refused() {
        let check = |epilogue: &str, expected: Option<FusedEpilogue>| {
            let text = format!("dense:m=2,n=3,k=5,epilogue={epilogue}");
            let workload = Workload::parse(&text).expect("the test names a workload");
            assert_eq!(FusedEpilogue::of("it", workload.epilogue()).ok(), expected, "{epilogue}");
        };
        check("relu", Some(FusedEpilogue { relu: true, ..FusedEpilogue::default() }));
        check("bias+add+relu", Some(FusedEpilogue { bias: Some(0), addend: Some(1), relu: true }));
        check("add+bias", Some(FusedEpilogue { bias: Some(1), addend: Some(0), relu: false }));
        check("relu+bias", None);
        check("bias+gelu", None);
    }

    #[test]
    fn zeros_on_one_side_are_as_many_as_on_the_other() {
        let check = |text: &str, expected: Option<[usize; 2]>| {
            let workload = Workload::parse(text).expect("the test names a workload");
            let LibraryProblem::Conv(conv) = PeerProblem::of(&workload).kernel else {
                panic!("{text} is a convolution")
            };
            assert_eq!(pads("it", &conv).ok(), expected, "{text}");
        };
        check("conv2d:c=3,h=9,w=7,k=4,r=3,s=3,pad=1", Some([1, 1]));
        check("conv2d:c=3,h=9,w=7,k=4,r=3,s=3,pad_top=1", None);
        check("conv2d:c=3,h=9,w=7,k=4,r=3,s=3,pad_bottom=1", None);
        // With an even size, every other row is reached.
        check("conv2d:c=3,h=8,w=8,k=4,r=3,s=3,stride=2,pad_top=1,pad_left=1", Some([1, 1]));
        check("conv2d_transpose:c=4,h=5,w=6,k=3,r=3,s=3,stride=2,pad=1,out_pad=1", Some([1, 1]));
        check("conv2d_transpose:c=4,h=5,w=6,k=3,r=3,s=3,stride=2,pad_top=1", Some([1, 0]));
    }

    #[test]
    fn sizes_that_libraries_do_not_take_are_refused() {
        assert_eq!(sizes([3, 5]), Ok([3, 5]));
        assert!(sizes([1 << 31]).is_err());
    }
}
