//! The child's side: loads one library, prepares one problem, and times it whenever asked.

use std::io::Write;
use std::time::{Duration, Instant};

use tilewright_device::{MOST_TRIES, host, time_ns};
use tilewright_ir::DType;
use tilewright_ir::op::Workload;

use super::operands::{Element, Operands};
use super::problem::Problem;
use super::protocol::{Reply, Request};
use super::{PeerSpec, Unavailable, Variant};
use super::{crates, im2col, onednn, openblas, os};

/// Seed of the operands and of the choice of elements that a check looks at.
const SEED: u64 = 0x7469_6c65;

/// A call shorter than this is timed together with others.
const SHORTEST_SAMPLE_NS: f64 = 2_000.0;

/// A library made ready for one problem.
pub(super) struct Prepared<T> {
    /// Version of the library.
    pub(super) version: String,
    /// What it chose, in words.
    pub(super) details: String,
    /// Core type in use, for a library that has several.
    pub(super) core_type: Option<String>,
    /// Brings what a run overwrites, and nothing else, into the state before a run; before a check.
    pub(super) load: Run<T>,
    /// One run; always called with the operands that it was prepared with.
    pub(super) run: Run<T>,
    /// Brings the result into the operands, where the library keeps it elsewhere; after a check's run.
    pub(super) store: Run<T>,
}

impl<T: 'static> Prepared<T> {
    /// A library whose run reads and writes the operands themselves.
    pub(super) fn in_place(version: String, details: String, run: Run<T>) -> Prepared<T> {
        Prepared { version, details, core_type: None, load: Box::new(|_| Ok(())), run, store: Box::new(|_| Ok(())) }
    }
}

/// Does something with the operands; an error is the library's own report of a failure.
pub(super) type Run<T> = Box<dyn FnMut(&mut Operands<T>) -> anyhow::Result<()>>;

/// Serve one peer: requests as JSON lines on standard input, an answer to each on standard output.
///
/// Returns when standard input ends.
///
/// # Errors
///
/// When standard input or output fails, or a request cannot be understood; a library's failures are replies.
pub fn worker_main() -> anyhow::Result<()> {
    os::end_with_parent();
    let output = os::take_stdout()?;
    answer_all(std::io::stdin().lines(), output)
}

/// Answer each request of `input`, until it ends.
fn answer_all(mut input: impl Iterator<Item = std::io::Result<String>>, mut output: impl Write) -> anyhow::Result<()> {
    while let Some(line) = input.next().transpose()? {
        match serde_json::from_str(&line)? {
            Request::Version { peer } => {
                let reply = match known(&peer).and_then(version) {
                    Ok(version) => Reply::Version { version },
                    Err(unavailable) => Reply::Unavailable(unavailable),
                };
                answer(&mut output, &reply)?;
            }
            Request::Start { peer, workload, threads } => {
                let started = known(&peer).and_then(|spec| {
                    let workload = Workload::parse(&workload)
                        .map_err(|error| Unavailable::Unsupported { reason: error.to_string() })?;
                    Ok((spec, spec.problem(&workload)?))
                });
                let (spec, problem) = match started {
                    Ok(started) => started,
                    Err(unavailable) => return answer(&mut output, &Reply::Unavailable(unavailable)),
                };
                host::pin_thread(&host::pin_cpus(threads));
                return match problem.dtype {
                    DType::F32 => serve::<f32>(spec, &problem, threads, &mut input, &mut output),
                    DType::F64 => serve::<f64>(spec, &problem, threads, &mut input, &mut output),
                    other => {
                        let reason = format!("no library is measured on {}", other.name());
                        answer(&mut output, &Reply::Unavailable(Unavailable::Unsupported { reason }))
                    }
                };
            }
            early @ (Request::Round { .. } | Request::Check) => anyhow::bail!("{early:?} before a start"),
        }
    }
    Ok(())
}

fn answer(output: &mut impl Write, reply: &Reply) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(reply)?;
    line.push('\n');
    output.write_all(line.as_bytes())?;
    Ok(())
}

fn known(peer: &str) -> Result<&'static PeerSpec, Unavailable> {
    super::find(peer).ok_or_else(|| Unavailable::UnknownPeer { name: peer.to_owned() })
}

fn version(spec: &PeerSpec) -> Result<String, Unavailable> {
    match spec.variant {
        Variant::OpenBlas | Variant::OpenBlasBest | Variant::Im2col => openblas::version(),
        Variant::OneDnn | Variant::OneDnnWinograd => onednn::version(),
        Variant::Gemm => Ok(crates::GEMM_VERSION.to_owned()),
        Variant::MatrixMultiply => Ok(crates::MATRIXMULTIPLY_VERSION.to_owned()),
    }
}

/// From the start request to the end of the input.
fn serve<T: Element>(
    spec: &PeerSpec,
    problem: &Problem,
    threads: usize,
    input: &mut impl Iterator<Item = std::io::Result<String>>,
    output: &mut impl Write,
) -> anyhow::Result<()> {
    let mut operands = Operands::<T>::random(problem, SEED);
    let mut prepared = match prepare(spec, &mut operands, threads) {
        Ok(prepared) => prepared,
        Err(unavailable) => return answer(output, &Reply::Unavailable(unavailable)),
    };
    match check(&mut prepared, &mut operands) {
        Reply::Checked(_) => {
            let Prepared { version, details, core_type, .. } = &prepared;
            let (version, details, core_type) = (version.clone(), details.clone(), core_type.clone());
            answer(output, &Reply::Ready { version, details, core_type })?;
        }
        refused => return answer(output, &refused),
    }
    for line in input {
        let reply = match serde_json::from_str(&line?)? {
            Request::Round { min_time_ns, min_runs } => {
                let min_time = Duration::from_nanos(min_time_ns);
                match time_round(&mut prepared.run, &mut operands, threads, min_time, min_runs) {
                    Ok(times_ns) => Reply::Round { times_ns },
                    Err(error) => failure(&error),
                }
            }
            Request::Check => check(&mut prepared, &mut operands),
            late @ (Request::Version { .. } | Request::Start { .. }) => anyhow::bail!("{late:?} after a start"),
        };
        answer(output, &reply)?;
    }
    Ok(())
}

/// Make `spec`'s library ready for the operands' problem.
pub(super) fn prepare<T: Element>(
    spec: &PeerSpec,
    operands: &mut Operands<T>,
    threads: usize,
) -> Result<Prepared<T>, Unavailable> {
    match spec.variant {
        Variant::OpenBlas | Variant::OpenBlasBest => openblas::prepare(operands, threads),
        Variant::Im2col => im2col::prepare(operands, threads),
        Variant::OneDnn => {
            onednn::prepare(operands, threads, spec.layouts(&operands.problem), onednn::Algorithm::Direct)
        }
        Variant::OneDnnWinograd => {
            onednn::prepare(operands, threads, spec.layouts(&operands.problem), onednn::Algorithm::Winograd)
        }
        Variant::Gemm => crates::prepare_gemm(&operands.problem, threads),
        Variant::MatrixMultiply => crates::prepare_matrixmultiply(&operands.problem, threads),
    }
}

/// Run once, from a result that is no number, and compare.
pub(super) fn check<T: Element>(prepared: &mut Prepared<T>, operands: &mut Operands<T>) -> Reply {
    let Prepared { load, run, store, .. } = prepared;
    operands.clear_c();
    match [load, run, store].into_iter().try_for_each(|step| step(operands)) {
        Ok(()) => match operands.check(SEED) {
            Ok(check) => Reply::Checked(check),
            Err(mismatch) => Reply::Unavailable(Unavailable::Wrong(mismatch)),
        },
        Err(error) => failure(&error),
    }
}

fn failure(error: &anyhow::Error) -> Reply {
    Reply::Unavailable(Unavailable::Broken { reason: format!("{error:#}") })
}

/// Nanoseconds per run, in order: one run to warm up, then until both minima are reached.
fn time_round<T>(
    run: &mut Run<T>,
    operands: &mut Operands<T>,
    threads: usize,
    min_time: Duration,
    min_runs: usize,
) -> anyhow::Result<Vec<f64>> {
    run(operands)?;
    let mut times_ns = Vec::new();
    let mut n_calls = 1;
    let start = Instant::now();
    while times_ns.len() < min_runs || start.elapsed() < min_time {
        let mut outcome = Ok(());
        let sample_ns = time_ns(threads, MOST_TRIES, || {
            outcome = (0..n_calls).try_for_each(|_| run(operands));
        });
        outcome?;
        // Growing until it is long enough; the short ones before tell little and are not kept.
        if sample_ns < SHORTEST_SAMPLE_NS && n_calls < 1_000 {
            n_calls *= 2;
        } else {
            times_ns.push(sample_ns / n_calls as f64);
        }
    }
    Ok(times_ns)
}

/// The shortest of ten runs after one to warm up, in nanoseconds.
pub(super) fn shortest_ns<T>(run: &mut Run<T>, operands: &mut Operands<T>) -> Result<f64, Unavailable> {
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

#[cfg(test)]
mod tests {
    use tilewright_ir::op::{Epilogue, Function};

    use super::super::problem::tests::matmul;
    use super::*;

    fn replies(requests: &[Request]) -> Vec<Reply> {
        let lines = requests.iter().map(|request| Ok(serde_json::to_string(request).expect("requests print")));
        let mut output = Vec::new();
        answer_all(lines, &mut output).expect("the requests come in order");
        output
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).expect("replies parse"))
            .collect()
    }

    fn start(peer: &str, workload: &str) -> Request {
        Request::Start { peer: peer.to_owned(), workload: workload.to_owned(), threads: 1 }
    }

    #[test]
    fn a_peer_starts_is_timed_and_checked() {
        let replies = replies(&[
            Request::Version { peer: "matrixmultiply".to_owned() },
            start("gemm", "matmul:m=9,n=17,k=33,dtype=f64"),
            Request::Round { min_time_ns: 0, min_runs: 3 },
            Request::Check,
        ]);
        let [Reply::Version { version }, Reply::Ready { .. }, Reply::Round { times_ns }, Reply::Checked(check)] =
            &replies[..]
        else {
            panic!("{replies:?}");
        };
        assert_eq!(version, crates::MATRIXMULTIPLY_VERSION);
        assert!(times_ns.len() == 3 && times_ns.iter().all(|&ns| ns > 0.0), "{times_ns:?}");
        assert_eq!(check.n_sampled, 9 * 17);
    }

    #[test]
    fn what_is_not_known_is_unavailable() {
        let check = |request: Request, part: &str| match &replies(&[request])[..] {
            [Reply::Unavailable(reason)] => assert!(reason.to_string().contains(part), "{reason}"),
            other => panic!("{other:?}"),
        };
        check(Request::Version { peer: "mkl".to_owned() }, "no peer is called mkl");
        check(start("mkl", "matmul:m=8,n=8,k=8"), "no peer is called mkl");
        check(start("gemm", "matmul:m=8"), "matmul needs");
        check(start("im2col-openblas", "matmul:m=8,n=8,k=8"), "convolutions");
    }

    #[test]
    fn lines_that_are_no_requests_end_a_worker() {
        for line in ["", "{}", "round", r#"{"start":{"peer":"gemm"}}"#, r#"{"round":{"min_time_ns":1,"min_runs":1}}"#] {
            let ended = answer_all(std::iter::once(Ok(line.to_owned())), Vec::new());
            assert!(ended.is_err(), "{line}");
        }
    }

    /// Small and odd, so that tails, paddings and leading dimensions are all in play.
    const WORKLOADS: &[&str] = &[
        "matmul:m=17,n=33,k=65",
        "matmul:m=17,n=33,k=65,dtype=f64",
        "matmul:m=1,n=33,k=65,const=b",
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

    /// What a peer may refuse, with a reason: all else that it says it computes, it must.
    fn may_refuse(spec: &PeerSpec, problem: &Problem) -> bool {
        let steps: Vec<Function> = problem.epilogue.iter().map(Epilogue::function).collect();
        let lacks = [Function::Scale, Function::Mul, Function::HardSigmoid, Function::HardSwish];
        match spec.library {
            "onednn" => {
                spec.variant == Variant::OneDnnWinograd
                    || problem.dtype == DType::F64
                    || steps == [Function::Relu, Function::Bias]
                    || steps.iter().any(|step| lacks.contains(step))
            }
            _ if spec.variant == Variant::Im2col => {
                let has = [Function::Bias, Function::Add, Function::Relu, Function::Clip];
                steps.iter().any(|step| !has.contains(step))
            }
            _ => !problem.epilogue.is_empty(),
        }
    }

    #[test]
    fn every_peer_computes_what_it_says_it_does() {
        fn checked<T: Element>(spec: &PeerSpec, problem: &Problem, threads: usize) -> Reply {
            let mut operands = Operands::<T>::random(problem, SEED);
            match prepare(spec, &mut operands, threads) {
                Ok(mut prepared) => {
                    // Whatever a run leaves behind, a check begins afresh.
                    check(&mut prepared, &mut operands);
                    check(&mut prepared, &mut operands)
                }
                Err(unavailable) => Reply::Unavailable(unavailable),
            }
        }
        for spec in super::super::PEERS {
            for text in WORKLOADS {
                let workload = Workload::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
                let Ok(problem) = spec.problem(&workload) else { continue };
                for threads in [1, 2] {
                    let reply = match problem.dtype {
                        DType::F32 => checked::<f32>(spec, &problem, threads),
                        DType::F64 => checked::<f64>(spec, &problem, threads),
                        other => panic!("{text}: no library is measured on {}", other.name()),
                    };
                    match reply {
                        Reply::Checked(check) => assert!(check.n_sampled > 0),
                        Reply::Unavailable(reason @ Unavailable::NotInstalled { .. }) => {
                            eprintln!("{} on {text}: skipped: {reason}", spec.name);
                        }
                        Reply::Unavailable(reason) if may_refuse(spec, &problem) => {
                            eprintln!("{} on {text}: {reason}", spec.name);
                        }
                        other => panic!("{} on {text} with {threads} threads: {other:?}", spec.name),
                    }
                }
            }
        }
    }

    #[test]
    fn a_result_that_is_wrong_is_refused() {
        let mut operands = Operands::<f32>::random(&matmul(1, 4, 4, 4, false, false), SEED);
        let forgets_to_write: Run<f32> = Box::new(|_| Ok(()));
        let mut prepared = Prepared::in_place(String::new(), String::new(), forgets_to_write);
        let reply = check(&mut prepared, &mut operands);
        assert!(matches!(reply, Reply::Unavailable(Unavailable::Wrong(_))), "{reply:?}");
    }
}
