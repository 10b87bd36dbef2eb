//! Child's side: loads one library, prepares one problem, and times it on request.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, FromRawFd};
use std::time::Duration;

use tilewright_device::device::RoundLength;
use tilewright_device::memory::{Bf16, F16};
use tilewright_device::{host, sample_round, sample_round_by};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::{DType, Program, Step};

use super::library::Means;
use super::model::worker::Wanted;
use super::model::{self, Area};
use super::operands::{CpuElement, OperandType, Operands};
use super::problem::PeerProblem;
use super::protocol::{ChildReply, ChildRequest};
use super::{PeerSpec, Precision, Unavailable, Variant};
use super::{clblast, crates, cublas, cudnn, im2col, mkl, onednn, openblas};

/// Library prepared for one problem.
pub(super) struct Prepared<T> {
    /// Version of the library.
    pub(super) version: String,
    /// Choices of the library, in words.
    pub(super) details: String,
    /// Core type in use, if the library has several.
    pub(super) core_type: Option<String>,
    /// Restores the data that a run overwrites to their state before a run; called before a verification.
    pub(super) load: RunFunction<T>,
    /// Runs once; always called with the operands that it was prepared with.
    pub(super) run: RunFunction<T>,
    /// Times many runs by the clock of a device, if the library works on one.
    pub(super) timed: Option<Timed>,
    /// Copies the result to the operands, if the library keeps it elsewhere; called after a verification's
    /// run.
    pub(super) store: RunFunction<T>,
}

impl<T: 'static> Prepared<T> {
    /// Makes a library whose runs read and write the operands themselves.
    pub(super) fn in_place(version: String, details: String, run: RunFunction<T>) -> Prepared<T> {
        let nothing = || -> RunFunction<T> { Box::new(|_| Ok(())) };
        Prepared { version, details, core_type: None, load: nothing(), run, timed: None, store: nothing() }
    }
}

/// Action on the operands; an error is the library's own report of a failure.
pub(super) type RunFunction<T> = Box<dyn FnMut(&mut Operands<T>) -> Result<(), Unavailable>>;

/// Function that runs this many times in a row and returns the nanoseconds.
pub(super) type Timed = Box<dyn FnMut(u32) -> Result<f64, Unavailable>>;

/// Serves one peer: requests as JSON lines on standard input, a reply to each on standard output.
///
/// Returns when standard input ends.
///
/// # Errors
///
/// If standard input or output fails, or a request cannot be understood; a library's failures are replies.
pub fn worker_main() -> io::Result<()> {
    let output = take_stdout()?;
    answer_all(io::stdin().lines(), output)
}

/// Takes standard output for the protocol and redirects its descriptor to standard error: a library that
/// prints then cannot disturb the protocol.
fn take_stdout() -> io::Result<File> {
    // SAFETY: both descriptors are open; the copy has no other owner.
    unsafe {
        let copy = libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 3);
        if copy < 0 || libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(File::from_raw_fd(copy))
    }
}

/// Replies to each request of `input`, until it ends.
fn answer_all(mut input: impl Iterator<Item = io::Result<String>>, mut output: impl Write) -> io::Result<()> {
    while let Some(line) = input.next().transpose()? {
        match serde_json::from_str(&line)? {
            ChildRequest::Version { peer } => {
                let reply = match version(&peer) {
                    Ok(version) => ChildReply::Version { version },
                    Err(unavailable) => ChildReply::Unavailable(unavailable),
                };
                answer(&mut output, &reply)?;
            }
            ChildRequest::Start { peer, workload, threads, folder, gpu, data_fd, data_offsets } => {
                let started = known(&peer).and_then(|spec| {
                    let workload = Workload::parse(&workload)
                        .map_err(|error| Unavailable::Unsupported { reason: error.to_string() })?;
                    Ok((spec, spec.problem(&workload)?, workload.program()))
                });
                let (spec, problem, program) = match started {
                    Ok(started) => started,
                    Err(unavailable) => return answer(&mut output, &ChildReply::Unavailable(unavailable)),
                };
                if spec.gpu().is_none() {
                    host::pin_thread(&host::pin_cpus(threads));
                }
                let means = Means { threads, folder, gpu };
                // SAFETY: the descriptor was opened by the parent for this process, which keeps it open until
                // it ends.
                let data = (unsafe { BorrowedFd::borrow_raw(data_fd) }, &data_offsets[..]);
                let of = (spec, problem, &program, data, &means);
                return match of.1.dtype {
                    DType::F32 => serve::<f32>(prepare, of, &mut input, &mut output),
                    DType::F64 => serve::<f64>(prepare, of, &mut input, &mut output),
                    DType::I32 => serve::<i32>(prepare_integers, of, &mut input, &mut output),
                    DType::F16 => serve::<F16>(prepare_halves, of, &mut input, &mut output),
                    DType::Bf16 => serve::<Bf16>(prepare_halves, of, &mut input, &mut output),
                    other => {
                        let reason = format!("no library is measured on {}", other.name());
                        answer(&mut output, &ChildReply::Unavailable(Unavailable::Unsupported { reason }))
                    }
                };
            }
            ChildRequest::Open { peer, model, dims, threads, folder, gpu, data_fd, inputs } => {
                // SAFETY: as above.
                let area = unsafe { BorrowedFd::borrow_raw(data_fd) }.try_clone_to_owned()?;
                let wanted = Wanted { model, dims, means: Means { threads, folder, gpu } };
                return model::worker::serve(&peer, &wanted, &Area(area.into()), &inputs, &mut input, &mut output);
            }
            early @ (ChildRequest::Round { .. } | ChildRequest::Check | ChildRequest::Run { .. }) => {
                return Err(io::Error::other(format!("{early:?} before a start")));
            }
        }
    }
    Ok(())
}

pub(super) fn answer(output: &mut impl Write, reply: &ChildReply) -> io::Result<()> {
    let mut line = serde_json::to_string(reply)?;
    line.push('\n');
    output.write_all(line.as_bytes())?;
    Ok(())
}

fn known(peer: &str) -> Result<&'static PeerSpec, Unavailable> {
    super::find(peer).ok_or_else(|| Unavailable::UnknownPeer { name: peer.to_owned() })
}

fn version(peer: &str) -> Result<String, Unavailable> {
    let Some(spec) = super::find(peer) else { return model::version(peer) };
    match spec.variant {
        Variant::OpenBlas | Variant::OpenBlasBest | Variant::Im2col => openblas::version(),
        Variant::OneDnn | Variant::OneDnnWinograd => onednn::version(),
        Variant::Mkl => mkl::version(),
        Variant::Cublas(_) => cublas::version(),
        Variant::Cudnn(_) => cudnn::version(),
        Variant::ClBlast => clblast::version(),
        Variant::Gemm => Ok(crates::GEMM_VERSION.to_owned()),
        Variant::MatrixMultiply => Ok(crates::MATRIXMULTIPLY_VERSION.to_owned()),
    }
}

/// Function that prepares a library for operands of a type.
type Prepare<T> = fn(&PeerSpec, &mut Operands<T>, &Means) -> Result<Prepared<T>, Unavailable>;

/// Serves requests, from the start request to the end of the input.
fn serve<T: OperandType>(
    prepare: Prepare<T>,
    (spec, problem, program, (data, offsets), means): (&PeerSpec, PeerProblem, &Program, (BorrowedFd, &[u64]), &Means),
    input: &mut impl Iterator<Item = io::Result<String>>,
    output: &mut impl Write,
) -> io::Result<()> {
    let tolerance = tolerance(spec, &problem, program);
    let started = Operands::<T>::new(problem, program, tolerance, data, offsets).and_then(|mut operands| {
        let mut prepared = prepare(spec, &mut operands, means)?;
        check(&mut prepared, &mut operands)?;
        Ok((operands, prepared))
    });
    let (mut operands, mut prepared) = match started {
        Ok(started) => started,
        Err(unavailable) => return answer(output, &ChildReply::Unavailable(unavailable)),
    };
    let Prepared { version, details, core_type, .. } = &prepared;
    let (version, details, core_type) = (version.clone(), details.clone(), core_type.clone());
    answer(output, &ChildReply::Ready { version, details, core_type })?;
    for line in input {
        let reply = match serde_json::from_str(&line?)? {
            ChildRequest::Round { min_time_ns, min_samples } => {
                let round = RoundLength { time: Duration::from_nanos(min_time_ns), min_samples };
                let times_ns = match &mut prepared.timed {
                    Some(timed) => samples_ns_by(timed, operands.n_bytes(), round),
                    None => samples_ns(&mut prepared.run, &mut operands, means.threads, round),
                };
                times_ns.map(|times_ns| ChildReply::Round { times_ns })
            }
            ChildRequest::Check => {
                check(&mut prepared, &mut operands).map(|relative_error| ChildReply::Checked { relative_error })
            }
            late @ (ChildRequest::Version { .. }
            | ChildRequest::Start { .. }
            | ChildRequest::Open { .. }
            | ChildRequest::Run { .. }) => {
                return Err(io::Error::other(format!("{late:?} after a start")));
            }
        };
        answer(output, &reply.unwrap_or_else(ChildReply::Unavailable))?;
    }
    Ok(())
}

/// Maximum error of a peer's result against the reference: that of a kernel that computes in the same way.
fn tolerance(spec: &PeerSpec, problem: &PeerProblem, program: &Program) -> Tolerance {
    let winograd = match spec.variant {
        Variant::OneDnnWinograd => true,
        // Their algorithms by Fourier transform round no more.
        Variant::Cudnn(_) => !problem.is_exact,
        _ => false,
    };
    // Largest tiles that libraries use.
    let steps = winograd.then(|| Step::Winograd { buffer: "acc".into(), tile: 4 });
    Tolerance::for_rounded_factors(program, steps.as_slice(), spec.precision().map_or(0.0, Precision::of_factors))
}

/// Prepares `spec`'s library for the operands' problem.
fn prepare<T: CpuElement>(
    spec: &PeerSpec,
    operands: &mut Operands<T>,
    means: &Means,
) -> Result<Prepared<T>, Unavailable> {
    let layouts = spec.layouts(&operands.problem);
    match spec.variant {
        Variant::OpenBlas | Variant::OpenBlasBest => openblas::prepare(operands, means),
        Variant::Im2col => im2col::prepare(operands, means),
        Variant::OneDnn => onednn::prepare(operands, means, layouts, onednn::ConvolutionAlgorithm::Direct),
        Variant::OneDnnWinograd => onednn::prepare(operands, means, layouts, onednn::ConvolutionAlgorithm::Winograd),
        Variant::Mkl => mkl::prepare(operands, means),
        Variant::Cublas(precision) => cublas::prepare(operands, means, precision),
        Variant::Cudnn(precision) => cudnn::prepare(operands, means, precision),
        Variant::ClBlast => clblast::prepare(operands, means),
        Variant::Gemm => crates::prepare_gemm(&operands.problem, means.threads),
        Variant::MatrixMultiply => crates::prepare_matrixmultiply(&operands.problem, means.threads),
    }
}

/// Prepares a library for products of 8-bit integers.
fn prepare_integers(
    spec: &PeerSpec,
    operands: &mut Operands<i32>,
    means: &Means,
) -> Result<Prepared<i32>, Unavailable> {
    match spec.variant {
        Variant::OneDnn => {
            onednn::prepare(operands, means, spec.layouts(&operands.problem), onednn::ConvolutionAlgorithm::Direct)
        }
        _ => panic!("a library without such products is not asked for them"),
    }
}

/// Prepares a library for 16-bit operands, which few libraries support.
fn prepare_halves<T: OperandType>(
    spec: &PeerSpec,
    operands: &mut Operands<T>,
    means: &Means,
) -> Result<Prepared<T>, Unavailable> {
    match spec.variant {
        Variant::Cublas(precision) => cublas::prepare(operands, means, precision),
        Variant::OneDnn => {
            onednn::prepare(operands, means, spec.layouts(&operands.problem), onednn::ConvolutionAlgorithm::Direct)
        }
        _ => panic!("a library without such numbers is not asked for them"),
    }
}

/// Runs once, starting from a result of NaN, and returns the relative error.
pub(super) fn check<T: OperandType>(
    prepared: &mut Prepared<T>,
    operands: &mut Operands<T>,
) -> Result<f64, Unavailable> {
    let Prepared { load, run, store, .. } = prepared;
    operands.clear_c();
    [load, run, store].into_iter().try_for_each(|step| step(operands))?;
    operands.check()
}

/// Runs a round; returns nanoseconds per run, one value for each sample.
fn samples_ns<T: OperandType>(
    run: &mut RunFunction<T>,
    operands: &mut Operands<T>,
    threads: usize,
    round: RoundLength,
) -> Result<Vec<f64>, Unavailable> {
    let (mut outcome, n_bytes) = (Ok(()), operands.n_bytes());
    let samples_ns = sample_round(round, threads, n_bytes, || {
        if outcome.is_ok() {
            outcome = run(operands);
        }
    });
    outcome.map(|()| samples_ns)
}

/// Samples runs as [`samples_ns`] does, by the clock of a device.
pub(super) fn samples_ns_by(
    timed: &mut dyn FnMut(u32) -> Result<f64, Unavailable>,
    n_bytes: u64,
    round: RoundLength,
) -> Result<Vec<f64>, Unavailable> {
    let mut failure = None;
    // After a failure, later calls return at once.
    let mut run = |n_runs: u32| match failure {
        Some(_) => f64::MAX,
        None => timed(n_runs).unwrap_or_else(|reason| {
            failure = Some(reason);
            f64::MAX
        }),
    };
    let samples_ns = sample_round_by(&mut run, round, 1, n_bytes);
    failure.map_or(Ok(samples_ns), Err)
}

/// Length of the round that decides between the ways to call a library.
pub(super) const CHOICE: RoundLength = RoundLength { time: Duration::from_millis(2), min_samples: 5 };

/// Shortest sample of a short round, in nanoseconds per run.
pub(super) fn shortest_ns<T: OperandType>(
    run: &mut RunFunction<T>,
    operands: &mut Operands<T>,
    threads: usize,
) -> Result<f64, Unavailable> {
    Ok(samples_ns(run, operands, threads, CHOICE)?.into_iter().fold(f64::INFINITY, f64::min))
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use tilewright_device::data::ReferenceData;
    use tilewright_ir::op::{Epilogue, EpilogueFunction};

    use super::*;
    use crate::gpu::{FusedEpilogue, pads};
    use crate::operands::tests::{data_of, operands_of};
    use crate::problem::LibraryProblem;

    pub(crate) fn replies(requests: &[ChildRequest]) -> Vec<ChildReply> {
        let lines = requests.iter().map(|request| Ok(serde_json::to_string(request).expect("requests print")));
        let mut output = Vec::new();
        answer_all(lines, &mut output).expect("the requests come in order");
        output
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).expect("replies parse"))
            .collect()
    }

    /// Makes a start request without data, for refusals that precede reading the data.
    fn start(peer: &str, workload: &str) -> ChildRequest {
        let (peer, workload) = (peer.to_owned(), workload.to_owned());
        let (threads, folder, gpu) = (1, None, None);
        ChildRequest::Start { peer, workload, threads, folder, gpu, data_fd: -1, data_offsets: Vec::new() }
    }

    #[test]
    fn a_peer_starts_is_timed_and_checked() {
        let text = "matmul:m=9,n=17,k=33,dtype=f64";
        let data = data_of(&Workload::parse(text).expect("the test names a workload"));
        let replies = replies(&[
            ChildRequest::Version { peer: "matrixmultiply".to_owned() },
            ChildRequest::Start {
                peer: "gemm".to_owned(),
                workload: text.to_owned(),
                threads: 1,
                folder: None,
                gpu: None,
                data_fd: data.file.as_raw_fd(),
                data_offsets: data.offsets.clone(),
            },
            ChildRequest::Round { min_time_ns: 1_000_000, min_samples: 3 },
            ChildRequest::Check,
        ]);
        let [
            ChildReply::Version { version },
            ChildReply::Ready { .. },
            ChildReply::Round { times_ns },
            ChildReply::Checked { relative_error },
        ] = &replies[..]
        else {
            panic!("{replies:?}");
        };
        assert_eq!(version, crates::MATRIXMULTIPLY_VERSION);
        assert!(times_ns.len() >= 3 && times_ns.iter().all(|&ns| ns > 0.0), "{times_ns:?}");
        assert!(*relative_error < 1e-12, "{relative_error}");
    }

    #[test]
    fn what_is_not_known_is_unavailable() {
        let check = |request: ChildRequest, part: &str| match &replies(&[request])[..] {
            [ChildReply::Unavailable(reason)] => assert!(reason.to_string().contains(part), "{reason}"),
            other => panic!("{other:?}"),
        };
        check(ChildRequest::Version { peer: "eigen".to_owned() }, "no peer is called eigen");
        check(start("eigen", "matmul:m=8,n=8,k=8"), "no peer is called eigen");
        check(start("gemm", "matmul:m=8"), "matmul needs");
        check(start("im2col-openblas", "matmul:m=8,n=8,k=8"), "convolutions");
    }

    #[test]
    fn lines_that_are_no_requests_end_a_worker() {
        for line in
            ["", "{}", "round", r#"{"start":{"peer":"gemm"}}"#, r#"{"round":{"min_time_ns":1,"min_samples":1}}"#]
        {
            let ended = answer_all(std::iter::once(Ok(line.to_owned())), Vec::new());
            assert!(ended.is_err(), "{line}");
        }
    }

    /// Small and odd sizes, so that tails, padding and leading dimensions are all tested.
    const WORKLOADS: &[&str] = &[
        "matmul:m=17,n=33,k=65",
        "matmul:m=17,n=33,k=65,dtype=f64",
        "matmul:m=1,n=33,k=65,const=b",
        "matmul:m=17,n=33,k=66,dtype=u8i8",
        "dense:m=5,n=19,k=31,const=w,dtype=i8i8",
        "matmul:m=17,n=33,k=66,dtype=bf16",
        "dense:m=5,n=19,k=31,const=w,dtype=bf16,epilogue=bias+relu",
        "conv2d:c=32,h=9,w=7,k=32,r=3,s=3,pad=1,const=w,layout=blocked,dtype=bf16",
        "conv2d:n=2,c=5,h=9,w=7,k=6,r=3,s=3,pad=1,dtype=bf16,epilogue=bias+add+relu",
        "dense:m=5,n=19,k=31,const=w",
        "batch_matmul:b=3,m=7,n=9,k=11",
        "batch_matmul:b=3,m=7,n=9,k=11,ta=1",
        "batch_matmul:b=3,m=7,n=9,k=11,tb=1",
        "batch_matmul:b=5,m=7,n=1,k=11,ta=1,tb=1",
        "conv2d:n=2,c=5,h=9,w=7,k=6,r=3,s=3,pad=1",
        "conv2d:n=2,c=5,h=9,w=7,k=6,r=3,s=3,pad=1,dtype=f64",
        "conv2d:c=3,h=11,w=13,k=17,r=5,s=3,stride=2,pad_top=2,pad_bottom=1,pad_right=3,const=w",
        "conv2d:n=2,c=8,h=10,w=7,k=5,r=1,s=1",
        "conv2d:c=8,h=10,w=7,k=5,r=1,s=1,stride=2,const=w",
        "conv2d:c=6,h=12,w=13,k=9,r=3,s=2,pad=2,dilation_h=2,dilation_w=3,groups=3",
        "conv2d:c=3,h=2,w=2,k=4,r=3,s=3,stride_w=3,pad=3,dilation=2,const=w",
        "conv2d:c=2,h=40,w=50,k=3,r=3,s=3,pad=1,const=w",
        "conv2d:n=2,c=5,h=9,w=7,k=6,r=3,s=3,pad=1,const=w,layout=blocked",
        "conv2d:c=32,h=9,w=7,k=32,r=3,s=3,pad=1,const=w,layout=blocked",
        "depthwise_conv2d:n=2,c=5,h=9,w=8,r=3,s=5,multiplier=2,stride_h=2,pad=2",
        "depthwise_conv2d:c=16,h=9,w=8,r=3,s=3,pad=1,const=w,layout=blocked",
        "conv2d_transpose:n=2,c=4,h=5,w=6,k=3,r=3,s=3,stride=2,pad=1,out_pad=1",
        "conv2d_transpose:c=8,h=5,w=6,k=16,r=4,s=3,stride_h=2,pad_left=1,const=w,layout=blocked",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,pad=1,epilogue=bias+add+relu",
        "conv2d:c=16,h=9,w=7,k=32,r=3,s=3,pad=1,const=w,layout=blocked,epilogue=bias+add+relu",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,groups=1,epilogue=add+bias+clip(-0.5;0.25)",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,epilogue=bias+sigmoid",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,epilogue=tanh",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,epilogue=relu+bias",
        "dense:m=5,n=19,k=31,epilogue=bias+gelu",
        "dense:m=5,n=19,k=31,epilogue=bias+silu",
        "dense:m=5,n=19,k=31,epilogue=leaky_relu(0.25)+linear(0.5;-1)",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,epilogue=scale+bias+leaky_relu",
        "conv2d:c=5,h=9,w=7,k=6,r=3,s=3,epilogue=hard_swish",
        "batch_matmul:b=3,m=7,n=9,k=11,epilogue=bias+add",
    ];

    /// Whether a peer may refuse the problem: it must compute any other one.
    fn may_refuse(spec: &PeerSpec, problem: &PeerProblem) -> bool {
        let steps: Vec<EpilogueFunction> = problem.epilogue.iter().map(Epilogue::function).collect();
        let lacks = [
            EpilogueFunction::Scale,
            EpilogueFunction::Mul,
            EpilogueFunction::HardSigmoid,
            EpilogueFunction::HardSwish,
        ];
        match spec.library {
            "onednn" => {
                spec.variant == Variant::OneDnnWinograd
                    || problem.dtype == DType::F64
                    || steps == [EpilogueFunction::Relu, EpilogueFunction::Bias]
                    || steps.iter().any(|step| lacks.contains(step))
            }
            "cublas" => FusedEpilogue::of("cuBLAS", &problem.epilogue).is_err(),
            // Only the library knows whether there is an algorithm.
            "cudnn" => true,
            "clblast" => {
                // Support of f64 depends on the device.
                let is_plain = problem.epilogue.is_empty() && problem.dtype == DType::F32;
                let in_groups = matches!(problem.kernel, LibraryProblem::Conv(conv) if conv.groups > 1);
                !is_plain
                    || in_groups
                    || matches!(problem.kernel, LibraryProblem::Conv(conv) if pads("it", &conv).is_err())
            }
            _ if spec.variant == Variant::Im2col => {
                let has =
                    [EpilogueFunction::Bias, EpilogueFunction::Add, EpilogueFunction::Relu, EpilogueFunction::Clip];
                steps.iter().any(|step| !has.contains(step))
            }
            _ => !problem.epilogue.is_empty(),
        }
    }

    #[test]
    fn every_peer_computes_what_it_says_it_does() {
        fn checked<T: OperandType>(
            spec: &PeerSpec,
            workload: &Workload,
            data: &ReferenceData,
            n: usize,
            prepare: Prepare<T>,
        ) -> Result<f64, Unavailable> {
            let (program, problem) = (workload.program(), spec.problem(workload)?);
            let tolerance = tolerance(spec, &problem, &program);
            let mut operands = Operands::<T>::new(problem, &program, tolerance, data.file.as_fd(), &data.offsets)?;
            let mut prepared = prepare(spec, &mut operands, &Means { threads: n, folder: None, gpu: Some(0) })?;
            // A verification starts afresh, whatever a run leaves behind.
            check(&mut prepared, &mut operands)?;
            check(&mut prepared, &mut operands)
        }
        for text in WORKLOADS {
            let workload = Workload::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let data = data_of(&workload);
            for spec in super::super::PEERS {
                let Ok(problem) = spec.problem(&workload) else { continue };
                // A GPU's libraries have no threads, and compile their kernels each time.
                let numbers_of_threads: &[usize] = if spec.gpu().is_some() { &[1] } else { &[1, 2] };
                for &threads in numbers_of_threads {
                    let checked = match problem.dtype {
                        DType::F32 => checked::<f32>(spec, &workload, &data, threads, prepare),
                        DType::F64 => checked::<f64>(spec, &workload, &data, threads, prepare),
                        DType::I32 => checked::<i32>(spec, &workload, &data, threads, prepare_integers),
                        DType::Bf16 => checked::<Bf16>(spec, &workload, &data, threads, prepare_halves),
                        other => panic!("{text}: no library is measured on {}", other.name()),
                    };
                    match checked {
                        Ok(_) => {}
                        Err(reason @ Unavailable::NotInstalled { .. }) => {
                            eprintln!("{} on {text}: skipped: {reason}", spec.name);
                        }
                        Err(reason) if may_refuse(spec, &problem) => eprintln!("{} on {text}: {reason}", spec.name),
                        Err(reason) => panic!("{} on {text} with {threads} threads: {reason}", spec.name),
                    }
                }
            }
        }
    }

    #[test]
    fn a_result_that_is_wrong_is_refused() {
        let mut operands = operands_of::<f32>("matmul:m=4,n=4,k=4");
        let forgets_to_write: RunFunction<f32> = Box::new(|_| Ok(()));
        let mut prepared = Prepared::in_place(String::new(), String::new(), forgets_to_write);
        let refused = check(&mut prepared, &mut operands);
        assert!(matches!(refused, Err(Unavailable::Wrong { .. })), "{refused:?}");
    }

    #[test]
    fn a_run_that_fails_ends_a_round() {
        let mut operands = operands_of::<f32>("matmul:m=4,n=4,k=4");
        let mut n_runs = 0;
        let mut fails: RunFunction<f32> = Box::new(move |_| {
            n_runs += 1;
            assert!(n_runs < 3, "nothing runs after a failure");
            if n_runs == 2 { Err(Unavailable::Broken { reason: "no more".to_owned() }) } else { Ok(()) }
        });
        let round = RoundLength { time: Duration::from_millis(1), min_samples: 2 };
        let refused = samples_ns(&mut fails, &mut operands, 1, round).expect_err("it fails");
        assert_eq!(refused.to_string(), "no more");
    }
}
