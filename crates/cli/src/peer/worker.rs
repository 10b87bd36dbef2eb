//! The child's side: loads one library, prepares one problem, and times it whenever asked.

use std::io::Write;
use std::time::{Duration, Instant};

use tilewright_device::host;

use super::operands::{Element, Operands};
use super::protocol::{Reply, Request};
use super::{Dtype, MatmulProblem, Unavailable, Variant};
use super::{crates, onednn, openblas, os};

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
    /// One run; always called with the operands that it was prepared with.
    pub(super) run: Run<T>,
}

/// Computes C of the operands; an error is the library's own report of a failure.
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
            Request::Version { variant } => {
                let reply = match version(variant) {
                    Ok(version) => Reply::Version { version },
                    Err(unavailable) => Reply::Unavailable(unavailable),
                };
                answer(&mut output, &reply)?;
            }
            Request::Start { variant, problem, threads } => {
                host::pin_thread(&host::pin_cpus(threads));
                return match problem.dtype {
                    Dtype::F32 => serve::<f32>(variant, &problem, threads, &mut input, &mut output),
                    Dtype::F64 => serve::<f64>(variant, &problem, threads, &mut input, &mut output),
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

fn version(variant: Variant) -> Result<String, Unavailable> {
    match variant {
        Variant::OpenBlas | Variant::OpenBlasBest => openblas::version(),
        Variant::OneDnn | Variant::OneDnnPacked => onednn::version(),
        Variant::Gemm => Ok(crates::GEMM_VERSION.to_owned()),
        Variant::MatrixMultiply => Ok(crates::MATRIXMULTIPLY_VERSION.to_owned()),
    }
}

/// From the start request to the end of the input.
fn serve<T: Element>(
    variant: Variant,
    problem: &MatmulProblem,
    threads: usize,
    input: &mut impl Iterator<Item = std::io::Result<String>>,
    output: &mut impl Write,
) -> anyhow::Result<()> {
    let mut operands = Operands::<T>::random(problem, SEED);
    let prepared = match variant {
        Variant::OpenBlas | Variant::OpenBlasBest => openblas::prepare(&mut operands, threads),
        Variant::OneDnn => onednn::prepare(&mut operands, threads, onednn::Weights::Plain),
        Variant::OneDnnPacked => onednn::prepare(&mut operands, threads, onednn::Weights::Packed),
        Variant::Gemm => Ok(crates::prepare_gemm(threads)),
        Variant::MatrixMultiply => Ok(crates::prepare_matrixmultiply(threads)),
    };
    let Prepared { version, details, core_type, mut run } = match prepared {
        Ok(prepared) => prepared,
        Err(unavailable) => return answer(output, &Reply::Unavailable(unavailable)),
    };
    match check(&mut run, &mut operands) {
        Reply::Checked(_) => answer(output, &Reply::Ready { version, details, core_type })?,
        refused => return answer(output, &refused),
    }
    for line in input {
        let reply = match serde_json::from_str(&line?)? {
            Request::Round { min_time_ns, min_runs } => {
                match time_round(&mut run, &mut operands, Duration::from_nanos(min_time_ns), min_runs) {
                    Ok(times_ns) => Reply::Round { times_ns },
                    Err(error) => failure(&error),
                }
            }
            Request::Check => check(&mut run, &mut operands),
            late @ (Request::Version { .. } | Request::Start { .. }) => anyhow::bail!("{late:?} after a start"),
        };
        answer(output, &reply)?;
    }
    Ok(())
}

fn check<T: Element>(run: &mut Run<T>, operands: &mut Operands<T>) -> Reply {
    operands.clear_c();
    match run(operands) {
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
    min_time: Duration,
    min_runs: usize,
) -> anyhow::Result<Vec<f64>> {
    run(operands)?;
    let mut times_ns = Vec::new();
    let mut n_calls = 1;
    let start = Instant::now();
    while times_ns.len() < min_runs || start.elapsed() < min_time {
        let sample = Instant::now();
        for _ in 0..n_calls {
            run(operands)?;
        }
        let sample_ns = sample.elapsed().as_nanos() as f64;
        // Growing until it is long enough; the short ones before tell little and are not kept.
        if sample_ns < SHORTEST_SAMPLE_NS && n_calls < 1_000 {
            n_calls *= 2;
        } else {
            times_ns.push(sample_ns / n_calls as f64);
        }
    }
    Ok(times_ns)
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn a_peer_starts_is_timed_and_checked() {
        let problem = MatmulProblem { b: 2, m: 9, n: 17, k: 33, ta: true, tb: false, dtype: Dtype::F64 };
        let replies = replies(&[
            Request::Version { variant: Variant::MatrixMultiply },
            Request::Start { variant: Variant::Gemm, problem, threads: 1 },
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
        assert_eq!(check.n_sampled, 2 * 9 * 17);
    }

    #[test]
    fn a_result_that_is_wrong_is_refused() {
        let problem = MatmulProblem { b: 1, m: 4, n: 4, k: 4, ta: false, tb: false, dtype: Dtype::F32 };
        let mut operands = Operands::<f32>::random(&problem, SEED);
        let mut forgets_to_write: Run<f32> = Box::new(|_| Ok(()));
        let reply = check(&mut forgets_to_write, &mut operands);
        assert!(matches!(reply, Reply::Unavailable(Unavailable::Wrong(_))), "{reply:?}");
    }
}
