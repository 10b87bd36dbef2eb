//! Whole models on other runtimes: ONNX Runtime and OpenVINO, each through its C interface, and PyTorch, for
//! which a Python program translates a model's operators.
//!
//! As for kernel libraries, a runtime works in a child process that is stopped by signal between rounds, so
//! that threads which spin after a run disturb nothing.

pub(super) mod onnxruntime;
pub(super) mod openvino;
pub(super) mod pytorch;
pub(super) mod worker;

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tilewright_device::data::anonymous_file;
use tilewright_device::device::RoundLength;
use tilewright_graph::{DType, Tensor, TensorType};
use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_runtime::Aligned;

use self::onnxruntime::ExecutionProvider;
use super::child::Child;
use super::protocol::{ChildReply, ChildRequest};
use super::{Unavailable, refusal, round_of, time_limit};

/// All runtimes that models can be measured on, in the order in which reports list them.
pub const MODEL_PEERS: &[ModelPeerSpec] = &[
    ModelPeerSpec {
        name: "onnxruntime",
        text: "ONNX Runtime, all optimizations; its threads spin between operators and runs, as it comes",
        library: "onnxruntime",
        engine: Engine::OnnxRuntime { spins: true },
    },
    ModelPeerSpec {
        name: "onnxruntime-parked",
        text: "the same with threads that sleep instead (session.intra_op.allow_spinning=0), on several threads",
        library: "onnxruntime",
        engine: Engine::OnnxRuntime { spins: false },
    },
    ModelPeerSpec {
        name: "openvino",
        text: "OpenVINO on the CPU, one stream, f32",
        library: "openvino",
        engine: Engine::OpenVino,
    },
    ModelPeerSpec {
        name: "onnxruntime-cuda",
        text: "ONNX Runtime with its provider for CUDA, all optimizations; what that lacks runs on the CPU",
        library: "onnxruntime-gpu",
        engine: Engine::OnnxRuntimeCuda,
    },
    ModelPeerSpec {
        name: "pytorch",
        text: "PyTorch, each operator by itself, on the CPU or a CUDA device",
        library: "torch",
        engine: Engine::PyTorch(pytorch::Mode::Eager),
    },
    ModelPeerSpec {
        name: "pytorch-compiled",
        text: "the same compiled by torch.compile, on a CUDA device replayed as one graph",
        library: "torch",
        engine: Engine::PyTorch(pytorch::Mode::Compiled),
    },
];

/// Row of [`MODEL_PEERS`].
#[derive(Debug)]
pub struct ModelPeerSpec {
    /// Name on the command line and in reports.
    pub name: &'static str,
    /// Description for help texts.
    pub text: &'static str,
    /// Python package that contains the library, and its name; several rows may use the same one.
    pub library: &'static str,
    engine: Engine,
}

/// Runtime, and its setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    OnnxRuntime { spins: bool },
    OnnxRuntimeCuda,
    OpenVino,
    PyTorch(pytorch::Mode),
}

impl ModelPeerSpec {
    /// Whether the runtime works on such a machine.
    pub fn runs_on(&self, target: &Target) -> bool {
        match self.engine {
            Engine::OnnxRuntimeCuda => target.arch == Arch::Gpu(GpuApi::Cuda),
            Engine::OnnxRuntime { .. } | Engine::OpenVino => target.gpu.is_none(),
            Engine::PyTorch(_) => target.gpu.is_none() || target.arch == Arch::Gpu(GpuApi::Cuda),
        }
    }

    /// Whether the row differs from the other rows with this many threads.
    pub fn is_of_its_own(&self, threads: usize) -> bool {
        threads > 1 || self.engine != Engine::OnnxRuntime { spins: false }
    }
}

/// Finds the row of [`MODEL_PEERS`] called `name`.
///
/// # Errors
///
/// If there is no such row.
pub fn find(name: &str) -> Result<&'static ModelPeerSpec, Unavailable> {
    MODEL_PEERS.iter().find(|spec| spec.name == name).ok_or_else(|| Unavailable::UnknownPeer { name: name.to_owned() })
}

/// Model and settings of a runtime.
#[derive(Clone, Copy, Debug)]
pub struct ModelSetup<'a> {
    /// File of the model; its weights may be in files beside it.
    pub model: &'a Path,
    /// Sizes of named dimensions, for runtimes that do not take them from the inputs.
    pub dims: &'a [(String, usize)],
    /// Inputs by name; their shapes are the same in all runs.
    pub inputs: &'a [(String, Tensor)],
    /// Number of operations of a run, as far as known, which determines its timeout.
    pub flops: f64,
    /// Number of threads that the runtime may use.
    pub threads: usize,
    /// Folder searched for the runtime's library, some levels deep, before the system's paths.
    pub folder: Option<&'a Path>,
    /// Index of the device, for GPU runtimes; the first by default.
    pub gpu: Option<u32>,
}

/// Model in a runtime, in its own process, ready to be run and measured.
///
/// Between calls the process is stopped. It ends when this handle is dropped, and when the *thread* that
/// started it ends.
#[derive(Debug)]
pub struct ModelPeer {
    version: String,
    details: String,
    flops: f64,
    area: Area,
    child: Child,
}

impl ModelPeer {
    /// Loads a model into the runtime called `name` and runs it once.
    ///
    /// # Errors
    ///
    /// Any of [`Unavailable`]; none of them is a reason to stop measuring other runtimes.
    pub fn start(name: &str, setup: ModelSetup<'_>) -> Result<ModelPeer, Unavailable> {
        let spec = find(name)?;
        if setup.threads == 0 {
            return Err(Unavailable::Unsupported { reason: "nothing runs with 0 threads".to_owned() });
        }
        let area = Area::new().map_err(broken)?;
        let inputs = area.put_all(0, setup.inputs).map_err(broken)?;
        let mut child = Child::spawn(setup.threads, None)?;
        let request = ChildRequest::Open {
            peer: spec.name.to_owned(),
            model: setup.model.to_owned(),
            dims: setup.dims.to_vec(),
            threads: setup.threads,
            folder: setup.folder.map(Path::to_owned),
            gpu: setup.gpu,
            data_fd: area.0.as_raw_fd(),
            inputs,
        };
        match child.ask(&request, START_LIMIT + time_limit(setup.flops, Duration::ZERO, 3))? {
            ChildReply::Ready { version, details, .. } => {
                Ok(ModelPeer { version, details, flops: setup.flops, area, child })
            }
            other => Err(refusal(other)),
        }
    }

    /// Version of the runtime.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Description of the runtime's settings for the model.
    pub fn details(&self) -> &str {
        &self.details
    }

    /// Runs the model on these inputs, which later rounds use as well; returns its outputs, in the model's
    /// order.
    ///
    /// # Errors
    ///
    /// If the runtime reports a failure, or its process dies or does not reply in time.
    pub fn run(&mut self, inputs: &[(String, Tensor)]) -> Result<Vec<Tensor>, Unavailable> {
        let inputs = self.area.put_all(0, inputs).map_err(broken)?;
        match self.child.ask(&ChildRequest::Run { inputs }, time_limit(self.flops, Duration::ZERO, 1))? {
            ChildReply::Outputs { outputs } => {
                outputs.iter().map(|place| self.area.get(place)).collect::<io::Result<_>>().map_err(broken)
            }
            other => Err(refusal(other)),
        }
    }

    /// Runs a round: a warm-up run, then samples by wall-clock time. Returns nanoseconds per run, one value
    /// for each sample.
    ///
    /// # Errors
    ///
    /// As [`ModelPeer::run`].
    pub fn round(&mut self, round: RoundLength) -> Result<Vec<f64>, Unavailable> {
        round_of(&mut self.child, self.flops, round)
    }
}

/// Timeout for loading a model.
const START_LIMIT: Duration = Duration::from_secs(240);

fn broken(error: io::Error) -> Unavailable {
    Unavailable::Broken { reason: format!("tensors do not reach its process: {error}") }
}

/// Version of a runtime's library.
pub(super) fn version(peer: &str) -> Result<String, Unavailable> {
    match find(peer)?.engine {
        Engine::OnnxRuntime { spins } => onnxruntime::version(ExecutionProvider::Cpu { spins }),
        Engine::OnnxRuntimeCuda => onnxruntime::version(ExecutionProvider::Cuda),
        Engine::OpenVino => openvino::version(),
        Engine::PyTorch(_) => pytorch::version(),
    }
}

/// Instructions to install the library that a Python package contains.
fn get(package: &str) -> String {
    format!("pip download --no-deps {package}, unzip it and give the folder as --peer-path")
}

/// Copies a tensor's elements to memory aligned for runtimes.
fn aligned(tensor: &Tensor) -> Result<Aligned, Unavailable> {
    let memory = Aligned::new(tensor.bytes().len() as u64).map_err(broken)?;
    // SAFETY: the new memory has as many bytes.
    unsafe { memory.pointer().copy_from_nonoverlapping(tensor.bytes().as_ptr(), tensor.bytes().len()) };
    Ok(memory)
}

/// Copies a runtime's tensor.
///
/// # Safety
///
/// `data` points to the elements of a tensor of this type and shape.
unsafe fn tensor_at(dtype: DType, dims: Vec<i64>, data: *const c_void) -> Result<Tensor, Unavailable> {
    let unsupported = || Unavailable::Unsupported { reason: format!("an output has the shape {dims:?}") };
    let shape = dims.iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<_>, _>>().map_err(|_| unsupported())?;
    let ty = TensorType::new(dtype, shape);
    let bytes = match ty.checked_bytes().ok_or_else(unsupported)? {
        0 => Bytes::new(),
        // SAFETY: the caller's promise.
        n => Bytes::copy_from_slice(unsafe { std::slice::from_raw_parts(data.cast(), n) }),
    };
    Ok(Tensor::new(ty, bytes).expect("it has as many bytes as its type takes"))
}

/// Position of a tensor in an [`Area`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    /// ONNX number of the element type.
    dtype: i32,
    shape: Vec<usize>,
    at: u64,
}

impl StoredTensor {
    /// Offset at which the next tensor may begin.
    fn end(&self, n_bytes: usize) -> u64 {
        (self.at + n_bytes as u64).next_multiple_of(64)
    }
}

/// Memory shared by a child and its parent, for inputs and outputs.
#[derive(Debug)]
pub(super) struct Area(pub(super) File);

impl Area {
    fn new() -> io::Result<Area> {
        anonymous_file(c"tilewright-model").map(Area)
    }

    /// Writes tensors one after the other.
    pub(super) fn put_all(&self, mut at: u64, tensors: &[(String, Tensor)]) -> io::Result<Vec<StoredTensor>> {
        let put = |(name, tensor): &(String, Tensor)| {
            self.0.write_all_at(tensor.bytes(), at)?;
            let (dtype, shape) = (tensor.dtype().to_onnx(), tensor.shape().to_vec());
            let place = StoredTensor { name: name.clone(), dtype, shape, at };
            at = place.end(tensor.bytes().len());
            Ok(place)
        };
        tensors.iter().map(put).collect()
    }

    /// Reads a tensor.
    pub(super) fn get(&self, place: &StoredTensor) -> io::Result<Tensor> {
        let dtype =
            DType::from_onnx(place.dtype.into()).map_err(|name| io::Error::other(format!("elements {name}")))?;
        let ty = TensorType::new(dtype, place.shape.clone());
        let n_bytes = ty.checked_bytes().ok_or_else(|| io::Error::other("a tensor is too large"))?;
        let mut bytes = vec![0; n_bytes];
        self.0.read_exact_at(&mut bytes, place.at)?;
        Ok(Tensor::new(ty, bytes.into()).expect("it has as many bytes as its type takes"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use tilewright_graph::networks::NETWORKS;
    use tilewright_graph::{Agreement, Bindings, SplitMix64, bind_inputs, evaluate, onnx};

    use super::*;
    use crate::worker::tests::replies;

    /// File of a network, random inputs, and the expected outputs.
    fn network(name: &str, seed: u64) -> (tempfile::NamedTempFile, Vec<(String, Tensor)>, Vec<Tensor>) {
        let network = NETWORKS.iter().find(|row| row.name == name).expect("a network");
        let bytes = onnx::write(&network.build(0));
        let mut file = tempfile::Builder::new().suffix(".onnx").tempfile().expect("a file");
        file.write_all(&bytes).expect("the file takes it");
        let graph = onnx::read(&bytes.into(), &mut |_| Err("no file".to_owned())).expect("a model").graph;
        let dims = if name == "lstm" { vec![("steps".to_owned(), 3)] } else { vec![] };
        let values = bind_inputs(&graph, &Bindings { dims, ..Bindings::default() }).expect("inputs");
        let mut random = SplitMix64::new(seed);
        let mut input = |value: &tilewright_graph::Value| random.input(value.ty.as_ref().expect("it is bound"));
        let inputs: Vec<_> = values.iter().map(|value| (value.name.clone(), input(value))).collect();
        let named: Vec<(&str, Tensor)> = inputs.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        let wanted = evaluate(&graph, &named).expect("it computes");
        (file, inputs, wanted)
    }

    #[test]
    fn runtimes_compute_networks() {
        let folder = std::env::var_os("TILEWRIGHT_PEER_PATH").map(PathBuf::from);
        for (spec, name) in MODEL_PEERS.iter().flat_map(|spec| ["dqn", "lstm"].map(|name| (spec, name))) {
            let ((file, first, _), (_, inputs, wanted)) = (network(name, 1), network(name, 2));
            let area = Area::new().expect("memory");
            let threads = if spec.name == "onnxruntime" { 1 } else { 2 };
            let replies = replies(&[
                ChildRequest::Open {
                    peer: spec.name.to_owned(),
                    model: file.path().to_owned(),
                    dims: vec![("steps".to_owned(), 3)],
                    threads,
                    folder: folder.clone(),
                    gpu: None,
                    data_fd: area.0.as_raw_fd(),
                    inputs: area.put_all(0, &first).expect("memory takes it"),
                },
                ChildRequest::Round { min_time_ns: 1_000_000, min_samples: 3 },
                // Both inputs are at the same offset; the first were read when the model was opened.
                ChildRequest::Run { inputs: area.put_all(0, &inputs).expect("memory takes it") },
            ]);
            let [ChildReply::Ready { version, .. }, ChildReply::Round { times_ns }, ChildReply::Outputs { outputs }] =
                &replies[..]
            else {
                let [ChildReply::Unavailable(reason @ Unavailable::NotInstalled { .. })] = &replies[..] else {
                    panic!("{} on {name}: {replies:?}", spec.name)
                };
                eprintln!("skipped: {}: {reason}; the test looks in TILEWRIGHT_PEER_PATH", spec.name);
                continue;
            };
            assert!(!version.is_empty() && times_ns.len() >= 3 && times_ns.iter().all(|&ns| ns > 0.0), "{replies:?}");
            let found: Vec<Tensor> = outputs.iter().map(|place| area.get(place).expect("it is there")).collect();
            let agreement = Agreement::of_all(&found, &wanted);
            assert!(agreement.is_some_and(|a| a.max_error < 1e-4), "{} on {name}: {agreement:?}", spec.name);
        }
    }

    #[test]
    fn what_cannot_be_opened_is_said() {
        let check = |name: &str, threads: usize, part: &str| {
            let (model, folder, gpu) = (Path::new("x.onnx"), None, None);
            let setup = ModelSetup { model, dims: &[], inputs: &[], flops: 0.0, threads, folder, gpu };
            let refused = ModelPeer::start(name, setup).expect_err("it cannot be opened").to_string();
            assert!(refused.contains(part), "{refused}");
        };
        check("tensorrt", 1, "there are openblas");
        check("openvino", 0, "0 threads");
    }

    #[test]
    fn tensors_come_back_as_they_went() {
        let area = Area::new().expect("memory");
        let tensors = [
            ("x".to_owned(), Tensor::from_floats(DType::F32, [3], &[1.0, f64::NAN, -0.0])),
            ("none".to_owned(), Tensor::from_floats(DType::F64, [0, 2], &[])),
            ("flag".to_owned(), Tensor::scalar(DType::Bool, 1.0)),
        ];
        let places = area.put_all(64, &tensors).expect("memory takes it");
        for (place, (name, tensor)) in places.iter().zip(&tensors) {
            let back = area.get(place).expect("it is there");
            assert_eq!((&place.name, back.ty(), back.bytes()), (name, tensor.ty(), tensor.bytes()));
        }
    }
}
