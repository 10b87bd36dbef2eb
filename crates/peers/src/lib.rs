//! Peer libraries, measured beside our kernels: OpenBLAS, oneDNN, MKL and two crates; on NVIDIA's GPUs cuBLAS
//! and cuDNN; on OpenCL devices CLBlast; and runtimes of whole models ([`ModelPeer`]).
//!
//! Each peer computes a workload in a child process of this same executable, so that a library gets its own
//! environment before it is loaded, and a peer that crashes, hangs or starts threads disturbs nothing else.
//! The caller starts every peer, then requests short rounds in any order; between rounds a child is stopped
//! by signal, because OpenMP and OpenBLAS threads spin after a call and would take CPU time from the next
//! measurement.
//!
//! A peer's time is never compared before its result has been verified.
//!
//! Peers and our kernels are measured alike: with the same data, the same reference for the whole result, the
//! same memory for operands, the same number of runs per sample and the same clock
//! ([`sample_round`](tilewright_device::sample_round)), on a GPU the device's own.
//!
//! Libraries are loaded at run time by their usual names, from a given folder or from the system's paths, so
//! that `LD_LIBRARY_PATH` chooses among several. Environment settings of a library (`OMP_…`, `OPENBLAS_…` and
//! so on) do not reach the child: it gets the settings that were measured to be best for it, see `child.rs`.

mod child;
mod clblast;
mod crates;
mod cublas;
mod cudnn;
mod gpu;
mod im2col;
mod library;
mod mkl;
mod model;
mod onednn;
mod openblas;
mod operands;
mod problem;
mod protocol;
mod rounds;
mod threads;
mod worker;

use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::data::ReferenceData;
use tilewright_device::device::RoundLength;
use tilewright_ir::op::{Layout, Structure, Window, Workload};
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_ir::{DType, Target};

use child::Child;
use problem::{LibraryProblem, PeerProblem};
use protocol::{ChildReply, ChildRequest};

pub use child::WORKER_SUBCOMMAND;
pub use model::{MODEL_PEERS, ModelPeer, ModelPeerSpec, ModelSetup};
pub use problem::Layouts;
pub use rounds::{Entrant, run_rounds, wall_samples_ns};
pub use worker::worker_main;

/// All peers that can be measured, in the order in which reports list them.
pub const PEERS: &[PeerSpec] = &[
    PeerSpec {
        name: "openblas",
        text: "OpenBLAS cblas_?gemm, with the core type it picks by itself",
        library: "openblas",
        package: Some(Package::Debian("libopenblas0-pthread")),
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::OpenBlas,
    },
    PeerSpec {
        name: "openblas-best",
        text: "OpenBLAS cblas_?gemm, with the core type (OPENBLAS_CORETYPE) that is fastest on this CPU and problem",
        library: "openblas",
        package: Some(Package::Debian("libopenblas0-pthread")),
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::OpenBlasBest,
    },
    PeerSpec {
        name: "im2col-openblas",
        text: "convolution as im2col and OpenBLAS cblas_?gemm, with the fastest core type",
        library: "openblas",
        package: Some(Package::Debian("libopenblas0-pthread")),
        computes: &[ProblemClass::Conv],
        chooses: OwnLayouts::None,
        variant: Variant::Im2col,
    },
    PeerSpec {
        name: "onednn",
        text: "oneDNN matmul and convolution, plain operands; constant weights of convolutions in its own layout",
        library: "onednn",
        package: Some(Package::Debian("libdnnl-dev")),
        computes: &[ProblemClass::Matmul, ProblemClass::Conv, ProblemClass::TransposedConv],
        chooses: OwnLayouts::ConstantFilters,
        variant: Variant::OneDnn,
    },
    PeerSpec {
        name: "onednn-packed",
        text: "oneDNN matmul, B in the layout it chooses, reordered outside the timing",
        library: "onednn",
        package: Some(Package::Debian("libdnnl-dev")),
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::Weights,
        variant: Variant::OneDnn,
    },
    PeerSpec {
        name: "onednn-blocked",
        text: "oneDNN convolution, all operands in the layouts it chooses, reordered outside the timing",
        library: "onednn",
        package: Some(Package::Debian("libdnnl-dev")),
        computes: &[ProblemClass::Conv, ProblemClass::TransposedConv],
        chooses: OwnLayouts::All,
        variant: Variant::OneDnn,
    },
    PeerSpec {
        name: "onednn-winograd",
        text: "oneDNN convolution by Winograd's algorithm, in layouts as free as the workload's",
        library: "onednn",
        package: Some(Package::Debian("libdnnl-dev")),
        computes: &[ProblemClass::Conv],
        chooses: OwnLayouts::AsWorkload,
        variant: Variant::OneDnnWinograd,
    },
    PeerSpec {
        name: "mkl",
        text: "Intel MKL cblas_?gemm",
        library: "mkl",
        package: Some(Package::Debian("libmkl-rt")),
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::Mkl,
    },
    PeerSpec {
        name: "gemm",
        text: "the Rust crate gemm",
        library: "gemm",
        package: None,
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::Gemm,
    },
    PeerSpec {
        name: "matrixmultiply",
        text: "the Rust crate matrixmultiply",
        library: "matrixmultiply",
        package: None,
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::MatrixMultiply,
    },
    PeerSpec {
        name: "cublas",
        text: "cuBLAS in the operands' type (f16 and bf16 are summed in f32), with the fastest of its calls; on a CUDA device",
        library: "cublas",
        package: Some(Package::Python("nvidia-cublas")),
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::Cublas(Precision::Full),
    },
    PeerSpec {
        name: "cublas-tf32",
        text: "the same on tensor cores that round factors to tf32",
        library: "cublas",
        package: Some(Package::Python("nvidia-cublas")),
        computes: &[ProblemClass::Matmul],
        chooses: OwnLayouts::None,
        variant: Variant::Cublas(Precision::Tf32),
    },
    PeerSpec {
        name: "cudnn",
        text: "cuDNN in the operands' precision, with the fastest of its algorithms; on a CUDA device",
        library: "cudnn",
        package: Some(Package::Python("nvidia-cudnn-cu13")),
        computes: &[ProblemClass::Conv, ProblemClass::TransposedConv],
        chooses: OwnLayouts::None,
        variant: Variant::Cudnn(Precision::Full),
    },
    PeerSpec {
        name: "cudnn-tf32",
        text: "the same on tensor cores that round factors to tf32",
        library: "cudnn",
        package: Some(Package::Python("nvidia-cudnn-cu13")),
        computes: &[ProblemClass::Conv, ProblemClass::TransposedConv],
        chooses: OwnLayouts::None,
        variant: Variant::Cudnn(Precision::Tf32),
    },
    PeerSpec {
        name: "clblast",
        text: "CLBlast gemm, and convolution as im2col and gemm; on an OpenCL device",
        library: "clblast",
        package: Some(Package::Debian("libclblast1")),
        computes: &[ProblemClass::Matmul, ProblemClass::Conv],
        chooses: OwnLayouts::None,
        variant: Variant::ClBlast,
    },
];

/// Row of [`PEERS`].
#[derive(Debug)]
pub struct PeerSpec {
    /// Name on the command line and in reports.
    pub name: &'static str,
    /// Description for help texts.
    pub text: &'static str,
    /// Name of the library; several peers may use one library.
    pub library: &'static str,
    /// Package of the library; `None` for one that is compiled in.
    pub package: Option<Package>,
    computes: &'static [ProblemClass],
    chooses: OwnLayouts,
    variant: Variant,
}

/// Package of a library; its text is the instruction to install it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Package {
    /// Debian package.
    Debian(&'static str),
    /// Python package.
    Python(&'static str),
}

impl std::fmt::Display for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Package::Debian(package) => write!(f, "Debian and Ubuntu: apt install {package}"),
            Package::Python(package) => write!(f, "pip install --target FOLDER {package}, and --peer-path FOLDER"),
        }
    }
}

/// Kind of problem; a library supports all or none of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProblemClass {
    Matmul,
    Conv,
    TransposedConv,
}

impl ProblemClass {
    /// Plural noun of the kind.
    fn text(self) -> &'static str {
        match self {
            ProblemClass::Matmul => "multiplications",
            ProblemClass::Conv => "convolutions",
            ProblemClass::TransposedConv => "transposed convolutions",
        }
    }
}

/// Tensors that a peer holds in its own layouts, transformed outside the timing.
#[derive(Clone, Copy, Debug)]
enum OwnLayouts {
    None,
    Weights,
    /// Constant weights of convolutions, as libraries expect.
    ConstantFilters,
    All,
    /// Everything that the workload allows.
    AsWorkload,
}

/// Implementation of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    OpenBlas,
    OpenBlasBest,
    Im2col,
    OneDnn,
    OneDnnWinograd,
    Mkl,
    Gemm,
    MatrixMultiply,
    Cublas(Precision),
    Cudnn(Precision),
    ClBlast,
}

/// Precision of a GPU library's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    /// Precision of the operands.
    Full,
    /// f32, with operands rounded to TF32.
    Tf32,
}

impl Precision {
    /// Relative rounding error of an operand.
    fn of_factors(self) -> f64 {
        match self {
            Precision::Full => 0.0,
            Precision::Tf32 => 1.0 / 1024.0,
        }
    }
}

impl PeerSpec {
    /// Whether the peer works on such a machine.
    pub fn runs_on(&self, target: &Target) -> bool {
        match self.gpu() {
            Some(api) => target.arch == Arch::Gpu(api),
            None => target.gpu.is_none(),
        }
    }

    /// API of a GPU library.
    fn gpu(&self) -> Option<GpuApi> {
        match self.variant {
            Variant::Cublas(_) | Variant::Cudnn(_) => Some(GpuApi::Cuda),
            Variant::ClBlast => Some(GpuApi::OpenCl),
            Variant::OpenBlas
            | Variant::OpenBlasBest
            | Variant::Im2col
            | Variant::OneDnn
            | Variant::OneDnnWinograd
            | Variant::Mkl
            | Variant::Gemm
            | Variant::MatrixMultiply => None,
        }
    }

    /// Whether the peer rounds operands to less than their type's precision.
    pub fn rounds_factors(&self) -> bool {
        self.precision() == Some(Precision::Tf32)
    }

    /// Precision of a library with selectable precision.
    fn precision(&self) -> Option<Precision> {
        match self.variant {
            Variant::Cublas(precision) | Variant::Cudnn(precision) => Some(precision),
            _ => None,
        }
    }

    /// Whether this peer computes such a workload and is compared with our kernels for it by default: either
    /// it takes activations untransformed where ours must, or both may choose their layout.
    pub fn is_rival(&self, workload: &Workload) -> bool {
        self.problem(workload).is_ok_and(|problem| self.layouts(&problem).activations == problem.free.activations)
    }

    /// Problem that the workload is for this peer.
    fn problem(&self, workload: &Workload) -> Result<PeerProblem, Unavailable> {
        if matches!(workload.structure(), Structure::Packed(_) | Structure::Nest(_)) {
            return Err(Unavailable::Unsupported { reason: "it computes no programs".to_owned() });
        }
        if matches!(workload.structure(), Structure::Contraction(c) if !c.is_dense()) {
            return Err(Unavailable::Unsupported { reason: "it has no products side by side".to_owned() });
        }
        if !workload.prologue().is_empty() {
            return Err(Unavailable::Unsupported { reason: "it has no prologues".to_owned() });
        }
        if matches!(workload.structure(), Structure::Window(Window { interleaved: true, .. })) {
            return Err(Unavailable::Unsupported { reason: "it does not interleave groups of channels".to_owned() });
        }
        if matches!(workload.structure(), Structure::Window(Window { zero_point: true, .. })) {
            return Err(Unavailable::Unsupported { reason: "it pads with zeros alone".to_owned() });
        }
        if matches!(workload.layout(), Layout::Channels { .. }) {
            return Err(Unavailable::Unsupported { reason: "it takes images as NCHW".to_owned() });
        }
        if workload.has_integer_factors() && self.variant != Variant::OneDnn {
            return Err(Unavailable::Unsupported { reason: "it is not measured on products of integers".to_owned() });
        }
        let problem = PeerProblem::of(workload);
        let class = match problem.kernel {
            LibraryProblem::Matmul(_) => ProblemClass::Matmul,
            LibraryProblem::Conv(conv) if conv.transposed => ProblemClass::TransposedConv,
            LibraryProblem::Conv(_) => ProblemClass::Conv,
        };
        if !self.computes.contains(&class) {
            let known: Vec<&str> = self.computes.iter().map(|class| class.text()).collect();
            let reason = format!("{} computes {}, not {}", self.name, known.join(" and "), class.text());
            return Err(Unavailable::Unsupported { reason });
        }
        let has_halves = match self.variant {
            Variant::Cublas(precision) => precision == Precision::Full,
            Variant::OneDnn => problem.dtype == DType::Bf16,
            _ => false,
        };
        if problem.dtype.is_half() && !has_halves {
            let reason = "it is not measured on numbers of 16 bits".to_owned();
            return Err(Unavailable::Unsupported { reason });
        }
        if self.rounds_factors() && (problem.dtype != DType::F32 || problem.is_exact) {
            let reason = "it rounds factors, of single precision without exact=1 alone".to_owned();
            return Err(Unavailable::Unsupported { reason });
        }
        Ok(problem)
    }

    /// Tensors that this peer holds in its own layouts.
    fn layouts(&self, problem: &PeerProblem) -> Layouts {
        let is_conv = matches!(problem.kernel, LibraryProblem::Conv(_));
        match self.chooses {
            OwnLayouts::None => Layouts::default(),
            OwnLayouts::Weights => Layouts { weights: true, activations: false },
            OwnLayouts::ConstantFilters => Layouts { weights: is_conv && problem.free.weights, activations: false },
            OwnLayouts::All => Layouts { weights: true, activations: true },
            OwnLayouts::AsWorkload => problem.free,
        }
    }
}

/// Finds the row of [`PEERS`] called `name`.
pub fn find(name: &str) -> Option<&'static PeerSpec> {
    PEERS.iter().find(|spec| spec.name == name)
}

/// Instructions to install the library of a variant that is not compiled in.
fn how_to_get(variant: Variant) -> String {
    match PEERS.iter().find(|spec| spec.variant == variant).and_then(|spec| spec.package) {
        Some(package @ Package::Debian(_)) => format!("{package}; or give --peer-path"),
        package => package.map_or(String::new(), |package| package.to_string()),
    }
}

/// Reason why a peer cannot be measured on a problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unavailable {
    /// Unknown name of a peer.
    UnknownPeer {
        /// Requested name.
        name: String,
    },
    /// Library that is not installed.
    NotInstalled {
        /// File name of the library.
        library: String,
        /// Instructions to install it.
        get: String,
    },
    /// Library without the needed operation.
    Unsupported {
        /// Missing operation.
        reason: String,
    },
    /// Library whose result is wrong.
    Wrong {
        /// Position and size of the errors.
        reason: String,
    },
    /// Child process that could not be started, died or did not reply.
    Broken {
        /// Cause.
        reason: String,
    },
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unavailable::UnknownPeer { name } => {
                let names: Vec<&str> =
                    PEERS.iter().map(|spec| spec.name).chain(MODEL_PEERS.iter().map(|spec| spec.name)).collect();
                write!(f, "no peer is called {name}; there are {}", names.join(", "))
            }
            Unavailable::NotInstalled { library, get } => {
                write!(f, "{library} is not installed ({get})")
            }
            Unavailable::Unsupported { reason } => write!(f, "unsupported: {reason}"),
            Unavailable::Wrong { reason } => write!(f, "wrong result: {reason}"),
            Unavailable::Broken { reason } => write!(f, "{reason}"),
        }
    }
}

impl std::error::Error for Unavailable {}

/// Workload, data and settings of peers.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    /// Workload to compute.
    pub workload: &'a Workload,
    /// Inputs, and the expected outputs.
    pub data: &'a ReferenceData,
    /// Number of threads that a peer may use.
    pub threads: usize,
    /// Folder searched for libraries, some levels deep, before the system's paths.
    pub folder: Option<&'a Path>,
    /// GPU for GPU libraries: its API and its index.
    pub gpu: Option<(GpuApi, u32)>,
}

/// Peer in its own process, which holds a workload's operands and is ready to be measured.
///
/// Between calls the process is stopped and uses no CPU time. It ends when this handle is dropped, and when
/// the *thread* that started it ends: start peers on a thread that outlives them.
#[derive(Debug)]
pub struct Peer {
    version: String,
    details: String,
    layouts: Layouts,
    work_flops: f64,
    child: Child,
}

impl Peer {
    /// Starts the peer called `name`, and verifies its result once.
    ///
    /// The child runs on the CPUs [`tilewright_device::host::pin_cpus`]`(threads)`; with a GPU library, on
    /// all CPUs, as our kernels there, since an OpenCL device may be the CPU.
    ///
    /// # Errors
    ///
    /// Any of [`Unavailable`]; none of them is a reason to stop measuring other peers.
    ///
    /// # Cost
    ///
    /// Copies the operands and runs the workload at least once. `openblas-best` and `im2col-openblas` do so
    /// for each core type that fits the CPU, time each briefly, and keep the fastest.
    pub fn start(name: &str, setup: Setup) -> Result<Peer, Unavailable> {
        let spec = find(name).ok_or_else(|| Unavailable::UnknownPeer { name: name.to_owned() })?;
        spec.problem(setup.workload)?;
        if setup.threads == 0 {
            return Err(Unavailable::Unsupported { reason: "nothing runs with 0 threads".to_owned() });
        }
        if let Some(api) = spec.gpu().filter(|api| setup.gpu.is_none_or(|(there, _)| there != *api)) {
            let reason = format!("it works with --device {} alone", Arch::Gpu(api).name());
            return Err(Unavailable::Unsupported { reason });
        }
        match spec.variant {
            Variant::OpenBlasBest | Variant::Im2col => Self::start_fastest_core_type(spec, setup),
            Variant::OpenBlas
            | Variant::OneDnn
            | Variant::OneDnnWinograd
            | Variant::Mkl
            | Variant::Gemm
            | Variant::MatrixMultiply
            | Variant::Cublas(_)
            | Variant::Cudnn(_)
            | Variant::ClBlast => Ok(Self::start_one(spec, setup, None)?.0),
        }
    }

    /// Tensors held in the peer's own layouts, transformed outside the timing.
    pub fn layouts(&self) -> Layouts {
        self.layouts
    }

    /// Version of the library.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The library's choices for this problem (core type, implementation, layout), in words.
    pub fn details(&self) -> &str {
        &self.details
    }

    /// Runs a round: a warm-up run, then samples as for a kernel in a race.
    ///
    /// Returns nanoseconds per run, one value for each sample.
    ///
    /// # Errors
    ///
    /// If the library reports a failure, or its process dies or does not reply in time.
    pub fn round(&mut self, round: RoundLength) -> Result<Vec<f64>, Unavailable> {
        round_of(&mut self.child, self.work_flops, round)
    }

    /// Runs once more and verifies the result; returns ‖out − reference‖ / ‖reference‖.
    ///
    /// # Errors
    ///
    /// If the result is wrong, and as [`round`](Self::round).
    pub fn check(&mut self) -> Result<f64, Unavailable> {
        match self.child.ask(&ChildRequest::Check, time_limit(self.work_flops, Duration::ZERO, 1))? {
            ChildReply::Checked { relative_error } => Ok(relative_error),
            other => Err(refusal(other)),
        }
    }

    /// Starts one child; also returns the core type that it uses, if the library has several.
    fn start_one(
        spec: &'static PeerSpec,
        setup: Setup,
        core_type: Option<&str>,
    ) -> Result<(Peer, Option<String>), Unavailable> {
        let mut child = Child::spawn(setup.threads, core_type)?;
        let layouts = spec.layouts(&spec.problem(setup.workload)?);
        let work_flops = setup.workload.flops();
        let request = ChildRequest::Start {
            peer: spec.name.to_owned(),
            workload: setup.workload.to_string(),
            threads: setup.threads,
            folder: setup.folder.map(Path::to_owned),
            gpu: setup.gpu.map(|(_, number)| number),
            data_fd: setup.data.file.as_raw_fd(),
            data_offsets: setup.data.offsets.clone(),
        };
        match child.ask(&request, time_limit(work_flops, Duration::ZERO, 40))? {
            ChildReply::Ready { version, details, core_type } => {
                Ok((Peer { version, details, layouts, work_flops, child }, core_type))
            }
            other => Err(refusal(other)),
        }
    }

    /// Starts OpenBLAS with each core type that fits this CPU and keeps the fastest one on this workload.
    ///
    /// The core type of the CPU's model is not always the fastest (a library that is older than the CPU falls
    /// back to a narrower one), so they are measured.
    fn start_fastest_core_type(spec: &'static PeerSpec, setup: Setup) -> Result<Peer, Unavailable> {
        let (peer, as_it_comes) = Self::start_one(spec, setup, None)?;
        let mut tried: Vec<String> = as_it_comes.into_iter().collect();
        let mut candidates = vec![(peer, f64::INFINITY)];
        for core_type in openblas::core_types() {
            // A core type that this build or this CPU lacks is ignored by the library, or crashes the child.
            if let Ok((peer, Some(used))) = Self::start_one(spec, setup, Some(core_type))
                && !tried.contains(&used)
            {
                tried.push(used);
                candidates.push((peer, f64::INFINITY));
            }
        }
        if candidates.len() > 1 {
            for _ in 0..3 {
                for (peer, best_ns) in &mut candidates {
                    if let Ok(times_ns) = peer.round(RoundLength { time: Duration::from_millis(10), min_samples: 1 }) {
                        *best_ns = times_ns.into_iter().fold(*best_ns, f64::min);
                    }
                }
            }
        }
        let (mut best, _) = candidates
            .into_iter()
            .min_by(|(_, a_ns), (_, b_ns)| a_ns.total_cmp(b_ns))
            .expect("the first candidate is always there");
        best.details = format!("{}; fastest of {}", best.details, tried.join(", "));
        Ok(best)
    }
}

/// Version of each library that [`PEERS`] and [`MODEL_PEERS`] use; `None` if it is not installed.
///
/// # Cost
///
/// Starts one short-lived process for each library loaded at run time.
pub fn versions() -> Vec<(&'static str, Option<String>)> {
    let mut versions: Vec<(&'static str, Option<String>)> = Vec::new();
    let kernels = PEERS.iter().map(|spec| (spec.name, spec.library));
    for (name, library) in kernels.chain(MODEL_PEERS.iter().map(|spec| (spec.name, spec.library))) {
        if versions.iter().any(|(known, _)| *known == library) {
            continue;
        }
        let asked = Child::spawn(1, None)
            .and_then(|mut child| child.ask(&ChildRequest::Version { peer: name.to_owned() }, Duration::from_secs(20)));
        let version = match asked {
            Ok(ChildReply::Version { version }) => Some(version),
            Ok(_) | Err(_) => None,
        };
        versions.push((library, version));
    }
    versions
}

/// Runs one round in a child.
fn round_of(child: &mut Child, flops: f64, round: RoundLength) -> Result<Vec<f64>, Unavailable> {
    let request = ChildRequest::Round { min_time_ns: round.time.as_nanos() as u64, min_samples: round.min_samples };
    match child.ask(&request, time_limit(flops, round.time, round.min_samples + 3))? {
        ChildReply::Round { times_ns } => Ok(times_ns),
        other => Err(refusal(other)),
    }
}

/// Timeout of `n_runs` runs, after which the child counts as hung: its throughput would be below 0.2 GFLOP/s.
fn time_limit(work_flops: f64, min_time: Duration, n_runs: u32) -> Duration {
    Duration::from_secs(60) + min_time + Duration::from_secs_f64(f64::from(n_runs) * work_flops / 0.2e9)
}

/// Reason given by a reply that does not answer the request.
fn refusal(reply: ChildReply) -> Unavailable {
    match reply {
        ChildReply::Unavailable(reason) => reason,
        other => Unavailable::Broken { reason: format!("its process gave an answer to another question: {other:?}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operands::tests::data_of;

    fn workload(text: &str) -> Workload {
        Workload::parse(text).expect("the test names a workload")
    }

    #[test]
    fn names_are_unique_and_findable() {
        for spec in PEERS {
            assert_eq!(find(spec.name).expect("every row is found by its name").text, spec.text);
        }
    }

    #[test]
    fn rivals_take_activations_as_our_kernels_must() {
        let check_on = |target: &str, text: &str, expected: &[&str]| {
            let (workload, target) = (workload(text), Target::named(target).expect("it is a target"));
            let rivals = PEERS.iter().filter(|spec| spec.runs_on(&target) && spec.is_rival(&workload));
            let rivals: Vec<&str> = rivals.map(|spec| spec.name).collect();
            assert_eq!(rivals, expected, "{text}");
        };
        let check = |text: &str, expected: &[&str]| check_on("x86-64-v3", text, expected);
        let multiply = ["openblas", "openblas-best", "onednn", "onednn-packed", "mkl", "gemm", "matrixmultiply"];
        check("matmul-256", &multiply);
        check("dense:m=8,n=8,k=8,const=w", &multiply);
        check("resnet18.C2", &["im2col-openblas", "onednn", "onednn-winograd"]);
        check("resnet18.C2:layout=blocked", &["onednn-blocked", "onednn-winograd"]);
        check("conv2d_transpose:c=8,h=8,w=8,k=8,r=2,s=2", &["onednn"]);
        check_on("sm_90a", "matmul-256", &["cublas", "cublas-tf32"]);
        check_on("sm_90a", "matmul-256:dtype=f64", &["cublas"]);
        check_on("sm_90a", "resnet18.C2", &["cudnn", "cudnn-tf32"]);
        check_on("sm_90a", "resnet18.C2:exact=1", &["cudnn"]);
        check_on("opencl", "matmul-256", &["clblast"]);
        check_on("opencl", "resnet18.C2", &["clblast"]);
        check_on("opencl", "resnet18.C2:layout=blocked", &[]);
    }

    #[test]
    fn only_what_a_workload_frees_is_comparable() {
        let check = |name: &str, text: &str, expected: bool| {
            let (spec, workload) = (find(name).expect("it is a peer"), workload(text));
            let problem = spec.problem(&workload).expect("it computes that");
            assert_eq!(spec.layouts(&problem) == Layouts::of(&workload), expected, "{name} on {text}");
        };
        check("onednn", "matmul-256", true);
        check("onednn-packed", "matmul-256", false);
        check("onednn", "matmul-256:const=b", false);
        check("onednn-packed", "matmul-256:const=b", true);
        check("onednn", "resnet18.C2", true);
        check("im2col-openblas", "resnet18.C2", false);
        check("onednn-blocked", "resnet18.C2", false);
        check("onednn-blocked", "resnet18.C2:layout=blocked", true);
        check("onednn-winograd", "resnet18.C2:layout=blocked", true);
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let workload = workload("matmul:m=8,n=8,k=8");
        let setup = Setup { workload: &workload, data: &data_of(&workload), threads: 1, folder: None, gpu: None };
        let refused = Peer::start("eigen", setup).expect_err("there is no such peer").to_string();
        assert!(refused.contains("eigen") && refused.contains("openblas-best"), "{refused}");
    }

    #[test]
    fn impossible_problems_are_refused_without_a_process() {
        let check = |name, threads, part: &str| {
            let workload = workload("matmul:m=8,n=8,k=8");
            let setup = Setup { workload: &workload, data: &data_of(&workload), threads, folder: None, gpu: None };
            let refused = Peer::start(name, setup).expect_err("it cannot be run");
            assert!(refused.to_string().contains(part), "{refused}");
        };
        check("gemm", 0, "0 threads");
        check("cublas", 1, "it works with --device cuda alone");
        check("clblast", 1, "it works with --device opencl alone");
        check("im2col-openblas", 1, "im2col-openblas computes convolutions, not multiplications");
    }
}
