//! Libraries for NVIDIA's GPUs: operands on a device, and which way to call a library is fastest there.
//!
//! All is as for our kernels there: data, reference, memory between canaries, and what takes the time. Runs
//! that make a sample are one graph, timed by the device from the beginning of the first to the end of the
//! last.

use std::ffi::{c_int, c_void};
use std::rc::Rc;

use tilewright_device::cuda::{Context, CudaError, Memory, record};
use tilewright_ir::op::{Epilogue, Function};

use super::Unavailable;
use super::library::Means;
use super::operands::{Element, Operands};
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

/// Operands on a device.
pub(super) struct OnDevice {
    pub(super) context: Context,
    a: Memory,
    b: Memory,
    /// By operation of the epilogue.
    further: Vec<Option<Memory>>,
    c: Memory,
}

impl OnDevice {
    /// The operands on the device that is meant.
    pub(super) fn new<T: Element>(operands: &Operands<T>, means: &Means) -> Result<Rc<OnDevice>, Unavailable> {
        let context = Context::new(means.gpu.unwrap_or(0))?;
        let copy = |bytes: &[u8]| -> Result<Memory, CudaError> {
            let memory = Memory::new(&context, bytes.len() as u64)?;
            memory.write(0, bytes)?;
            Ok(memory)
        };
        let further = operands.further.iter().map(|input| Some(input.bytes()).filter(|bytes| !bytes.is_empty()));
        Ok(Rc::new(OnDevice {
            a: copy(operands.a.bytes())?,
            b: copy(operands.b.bytes())?,
            further: further.map(|bytes| bytes.map(copy).transpose()).collect::<Result<_, _>>()?,
            c: Memory::new(&context, operands.c.bytes().len() as u64)?,
            context,
        }))
    }

    /// A or X, B or W, and C or Y.
    pub(super) fn pointers(&self) -> [*mut c_void; 3] {
        [&self.a, &self.b, &self.c].map(pointer)
    }

    /// The further input of an operation of the epilogue.
    pub(super) fn further(&self, at: usize) -> *mut c_void {
        pointer(self.further[at].as_ref().expect("the operation has a further input"))
    }
}

/// An address of a device, as libraries take it.
pub(super) fn pointer(memory: &Memory) -> *mut c_void {
    std::ptr::without_provenance_mut(memory.address() as usize)
}

/// Puts what one run calls into the context's stream.
pub(super) type Put = Rc<dyn Fn() -> Result<(), Unavailable>>;

/// A way to call a library.
pub(super) struct Way {
    /// In words.
    pub(super) name: String,
    pub(super) put: Put,
}

/// The fastest of `ways` whose result is right.
pub(super) fn fastest<T: Element>(
    on_device: &Rc<OnDevice>,
    ways: Vec<Way>,
    operands: &mut Operands<T>,
    version: &str,
) -> Result<Prepared<T>, Unavailable> {
    let (n_ways, n_bytes) = (ways.len(), operands.n_bytes());
    let mut refused = Unavailable::Unsupported { reason: "it has no way to compute this".to_owned() };
    let mut timed: Vec<(Way, f64)> = Vec::new();
    for way in ways {
        match shortest_ns(on_device, &way.put, n_bytes) {
            Ok(ns) => timed.push((way, ns)),
            Err(reason) => refused = reason,
        }
    }
    timed.sort_by(|(_, a_ns), (_, b_ns)| a_ns.total_cmp(b_ns));
    let mut wrong = String::new();
    for (way, _) in timed {
        let details = format!("{}, fastest of {n_ways}{wrong}", way.name);
        let mut prepared = prepared(on_device, &way.put, version, details);
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

/// The shortest sample of a short round, in nanoseconds a run.
fn shortest_ns(on_device: &OnDevice, put: &Put, n_bytes: u64) -> Result<f64, Unavailable> {
    // What a library makes ready when it is called first is not to be part of a graph.
    run_once(on_device, put)?;
    let mut timed = |n| record(&on_device.context, n, || put());
    let samples_ns = samples_ns_by(&mut timed, n_bytes, CHOICE)?;
    Ok(samples_ns.into_iter().fold(f64::INFINITY, f64::min))
}

fn prepared<T: Element>(on_device: &Rc<OnDevice>, put: &Put, version: &str, details: String) -> Prepared<T> {
    let [for_load, for_run, for_timed, for_store] = std::array::from_fn(|_| on_device.clone());
    let (run, timed) = (put.clone(), put.clone());
    Prepared {
        load: Box::new(move |_| Ok(for_load.c.fill(0xFF)?)),
        timed: Some(Box::new(move |n| record(&for_timed.context, n, || timed()))),
        store: Box::new(move |operands| {
            let OnDevice { a, b, further, c, .. } = &*for_store;
            for memory in [a, b, c].into_iter().chain(further.iter().flatten()) {
                if !memory.is_intact()? {
                    return Err(Unavailable::Wrong { reason: "it wrote outside its buffers".to_owned() });
                }
            }
            Ok(c.read(0, operands.c.bytes_mut())?)
        }),
        ..Prepared::in_place(version.to_owned(), details, Box::new(move |_| run_once(&for_run, &run)))
    }
}

/// One run, to its end. Where it is refused, it is asked for again: some libraries tell then what went wrong
/// before.
fn run_once(on_device: &OnDevice, put: &Put) -> Result<(), Unavailable> {
    put().or_else(|_| put())?;
    Ok(on_device.context.finish()?)
}

/// What libraries for GPUs do to a result on its way out: they add one input by channel and one of the
/// result's shape, and then leave away what is negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fused {
    /// Which operation of the epilogue adds by channel.
    pub(super) bias: Option<usize>,
    /// Which adds element by element.
    pub(super) addend: Option<usize>,
    pub(super) relu: bool,
}

impl Fused {
    pub(super) fn of(library: &str, epilogue: &[Epilogue]) -> Result<Fused, Unavailable> {
        let mut fused = Fused::default();
        for (at, step) in epilogue.iter().enumerate() {
            match step.function() {
                Function::Bias if fused.bias.is_none() && !fused.relu => fused.bias = Some(at),
                Function::Add if fused.addend.is_none() && !fused.relu => fused.addend = Some(at),
                Function::Relu if !fused.relu => fused.relu = true,
                _ => {
                    let reason = format!("{library} has no such epilogue as {step} here");
                    return Err(Unavailable::Unsupported { reason });
                }
            }
        }
        Ok(fused)
    }
}

/// Sizes as a library takes them.
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

    #[test]
    fn epilogues_are_what_libraries_can_do_or_refused() {
        let check = |epilogue: &str, expected: Option<Fused>| {
            let text = format!("dense:m=2,n=3,k=5,epilogue={epilogue}");
            let workload = Workload::parse(&text).expect("the test names a workload");
            assert_eq!(Fused::of("it", workload.epilogue()).ok(), expected, "{epilogue}");
        };
        check("relu", Some(Fused { relu: true, ..Fused::default() }));
        check("bias+add+relu", Some(Fused { bias: Some(0), addend: Some(1), relu: true }));
        check("add+bias", Some(Fused { bias: Some(1), addend: Some(0), relu: false }));
        check("relu+bias", None);
        check("bias+gelu", None);
    }

    #[test]
    fn sizes_that_libraries_do_not_take_are_refused() {
        assert_eq!(sizes([3, 5]), Ok([3, 5]));
        assert!(sizes([1 << 31]).is_err());
    }
}
