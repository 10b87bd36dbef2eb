//! Peer libraries, measured beside our kernels: OpenBLAS, oneDNN and the crates `gemm` and `matrixmultiply`.
//!
//! Each peer computes C`[b, m, n]` = A`[b, m, k]` · B`[b, k, n]`, row-major, in a child process of this same
//! executable, so that a library can be given its own environment before it loads, and so that a peer that
//! crashes, hangs or starts threads disturbs nothing else. The caller starts every peer, then asks for short
//! rounds in any order; between rounds a child is stopped by signal, because OpenMP and OpenBLAS threads
//! spin after a call and would take the CPU from whatever is measured next.
//!
//! A peer is never compared before its result has been checked against a reference.
//!
//! Libraries are loaded at run time by their usual names, so `LD_LIBRARY_PATH` chooses among several. Settings
//! in the environment that belong to a library (`OMP_…`, `OPENBLAS_…`, `ONEDNN_…` and so on) do not reach the
//! child: it gets those that were measured to be best for it, see [`child`].

mod child;
mod crates;
mod library;
mod onednn;
mod openblas;
mod operands;
mod os;
mod protocol;
mod worker;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use child::Child;
use protocol::{Reply, Request};

pub use child::WORKER_SUBCOMMAND;
pub use worker::worker_main;

/// Every peer that can be measured, in the order in which reports list them.
pub const PEERS: &[PeerSpec] = &[
    PeerSpec {
        name: "openblas",
        text: "OpenBLAS cblas_?gemm, with the core type it picks by itself",
        library: "openblas",
        package: Some("libopenblas0-pthread"),
        prepacked_b: false,
        variant: Variant::OpenBlas,
    },
    PeerSpec {
        name: "openblas-best",
        text: "OpenBLAS cblas_?gemm, with the core type (OPENBLAS_CORETYPE) that is fastest on this CPU and problem",
        library: "openblas",
        package: Some("libopenblas0-pthread"),
        prepacked_b: false,
        variant: Variant::OpenBlasBest,
    },
    PeerSpec {
        name: "onednn",
        text: "oneDNN matmul primitive, plain row-major operands",
        library: "onednn",
        package: Some("libdnnl-dev"),
        prepacked_b: false,
        variant: Variant::OneDnn,
    },
    PeerSpec {
        name: "onednn-packed",
        text: "oneDNN matmul primitive, B in the layout it chooses, reordered outside the timing",
        library: "onednn",
        package: Some("libdnnl-dev"),
        prepacked_b: true,
        variant: Variant::OneDnnPacked,
    },
    PeerSpec {
        name: "gemm",
        text: "the Rust crate gemm",
        library: "gemm",
        package: None,
        prepacked_b: false,
        variant: Variant::Gemm,
    },
    PeerSpec {
        name: "matrixmultiply",
        text: "the Rust crate matrixmultiply",
        library: "matrixmultiply",
        package: None,
        prepacked_b: false,
        variant: Variant::MatrixMultiply,
    },
];

/// One row of [`PEERS`].
#[derive(Debug)]
pub struct PeerSpec {
    /// Name on the command line and in reports.
    pub name: &'static str,
    /// What it is, for help texts.
    pub text: &'static str,
    /// Name of the library; several peers may use one library.
    pub library: &'static str,
    /// Debian package that brings the library; `None` for what is compiled in.
    pub package: Option<&'static str>,
    /// Whether B is held in the peer's own layout, transformed outside the timing (to be compared with
    /// `const=b` kernels only).
    pub prepacked_b: bool,
    variant: Variant,
}

/// How a peer is run; what the parent tells its child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Variant {
    OpenBlas,
    OpenBlasBest,
    OneDnn,
    OneDnnPacked,
    Gemm,
    MatrixMultiply,
}

/// The row of [`PEERS`] called `name`.
pub fn find(name: &str) -> Option<&'static PeerSpec> {
    PEERS.iter().find(|spec| spec.name == name)
}

/// The Debian package that brings a variant's library; nothing for what is compiled in.
fn package_of(variant: Variant) -> &'static str {
    PEERS.iter().find(|spec| spec.variant == variant).and_then(|spec| spec.package).unwrap_or_default()
}

/// Element type of a [`MatmulProblem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point.
    F64,
}

/// C`[b, m, n]` = A`[b, m, k]` · B`[b, k, n]`, all dense and row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatmulProblem {
    /// Number of independent multiplications, each with its own A and B; 1 for a plain matmul.
    pub b: usize,
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// A is stored transposed, `[b, k, m]`.
    pub ta: bool,
    /// B is stored transposed, `[b, n, k]`.
    pub tb: bool,
    /// Element type of A, B and C.
    pub dtype: Dtype,
}

impl MatmulProblem {
    /// Floating-point operations of one run: a multiplication and an addition for each of b·m·n·k terms.
    pub fn work_flops(&self) -> f64 {
        2.0 * self.b as f64 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Whether no extent is zero and no operand exceeds what one allocation may have.
    fn is_addressable(&self) -> bool {
        let &MatmulProblem { b, m, n, k, .. } = self;
        let addressable = |rows: usize, columns: usize| {
            [b, rows, columns, size_of::<f64>()]
                .iter()
                .try_fold(1_usize, |bytes, &factor| bytes.checked_mul(factor))
                .is_some_and(|bytes| bytes > 0 && bytes < isize::MAX as usize)
        };
        addressable(m, k) && addressable(k, n) && addressable(m, n)
    }

    /// Row and column stride, in elements, of A as an `[m, k]` matrix.
    fn a_strides(&self) -> (usize, usize) {
        if self.ta { (1, self.m) } else { (self.k, 1) }
    }

    /// Row and column stride, in elements, of B as a `[k, n]` matrix.
    fn b_strides(&self) -> (usize, usize) {
        if self.tb { (1, self.k) } else { (self.n, 1) }
    }
}

/// Why a peer cannot be measured on a problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unavailable {
    /// No row of [`PEERS`] has this name.
    UnknownPeer {
        /// The name asked for.
        name: String,
    },
    /// The library is not installed.
    NotInstalled {
        /// File name of the library.
        library: String,
        /// Debian package that brings it.
        package: String,
    },
    /// The library is there but does not offer what is needed.
    Unsupported {
        /// What is missing.
        reason: String,
    },
    /// The library computed something else than the problem.
    Wrong(Mismatch),
    /// The child process could not be started, died or did not answer.
    Broken {
        /// What happened.
        reason: String,
    },
}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unavailable::UnknownPeer { name } => {
                let names: Vec<&str> = PEERS.iter().map(|spec| spec.name).collect();
                write!(f, "no peer is called {name}; there are {}", names.join(", "))
            }
            Unavailable::NotInstalled { library, package } => {
                write!(f, "{library} is not installed (Debian and Ubuntu: apt install {package})")
            }
            Unavailable::Unsupported { reason } => write!(f, "unsupported: {reason}"),
            Unavailable::Wrong(mismatch) => write!(f, "{mismatch}"),
            Unavailable::Broken { reason } => write!(f, "{reason}"),
        }
    }
}

impl std::error::Error for Unavailable {}

/// An element of C that is outside the tolerance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Position, `[b, m, n]`.
    pub at: [usize; 3],
    /// The peer's value, as text since it may be no number.
    pub got: String,
    /// The reference, accumulated in f64.
    pub expected: f64,
    /// Largest difference allowed.
    pub tolerance: f64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Mismatch { at: [b, i, j], got, expected, tolerance } = self;
        write!(f, "wrong result at [{b}, {i}, {j}]: {got} instead of {expected} ± {tolerance:e}")
    }
}

/// Outcome of a check that passed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Elements compared with the reference; all others were looked at for being finite.
    pub n_sampled: usize,
    /// Largest error seen, as a fraction of the tolerance.
    pub worst_of_tolerance: f64,
}

/// A peer that runs in its own process, holds a problem's operands and is ready to be measured.
///
/// Between calls the process is stopped and takes no CPU time. It ends when this is dropped, and when the
/// *thread* that started it ends: start peers on a thread that outlives them.
#[derive(Debug)]
pub struct Peer {
    spec: &'static PeerSpec,
    version: String,
    details: String,
    problem: MatmulProblem,
    child: Child,
}

impl Peer {
    /// Start the peer called `name` on `problem` with `threads` threads, and check its result once.
    ///
    /// The child runs on the CPUs [`tilewright_device::host::pin_cpus`]`(threads)`.
    ///
    /// # Errors
    ///
    /// Any of [`Unavailable`]; none of them is a reason to stop measuring the others.
    ///
    /// # Cost
    ///
    /// Fills the operands and runs the multiplication at least once. `openblas-best` does so for each core
    /// type that fits the CPU, times each briefly, and keeps the fastest.
    pub fn start(name: &str, problem: &MatmulProblem, threads: usize) -> Result<Peer, Unavailable> {
        let spec = find(name).ok_or_else(|| Unavailable::UnknownPeer { name: name.to_owned() })?;
        if threads == 0 || !problem.is_addressable() {
            let reason = format!("no process holds {problem:?} with {threads} threads");
            return Err(Unavailable::Unsupported { reason });
        }
        match spec.variant {
            Variant::OpenBlasBest => Self::start_fastest_core_type(spec, problem, threads),
            Variant::OpenBlas | Variant::OneDnn | Variant::OneDnnPacked | Variant::Gemm | Variant::MatrixMultiply => {
                Ok(Self::start_one(spec, problem, threads, None)?.0)
            }
        }
    }

    /// The row of [`PEERS`] this was started from.
    pub fn spec(&self) -> &'static PeerSpec {
        self.spec
    }

    /// Version of the library.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What the library chose for this problem (core type, implementation, layout), in words.
    pub fn details(&self) -> &str {
        &self.details
    }

    /// One round: a warm-up run, then runs until `min_time` has passed and at least three were made.
    ///
    /// Returns nanoseconds per run, in order. Where a run takes less than 2 µs each value is the mean over
    /// as many runs as take that long, since the clock itself costs 50 ns.
    ///
    /// # Errors
    ///
    /// When the library reports a failure, or its process dies or does not answer in time.
    pub fn round(&mut self, min_time: Duration) -> anyhow::Result<Vec<f64>> {
        self.round_of(min_time, 3)
    }

    /// Run once more and check the result.
    ///
    /// # Errors
    ///
    /// When the result is wrong, and as [`round`](Self::round).
    pub fn check(&mut self) -> anyhow::Result<Check> {
        let limit = time_limit(&self.problem, Duration::ZERO, 1);
        match self.child.ask(&Request::Check, limit)? {
            Reply::Checked(check) => Ok(check),
            Reply::Unavailable(reason) => Err(reason.into()),
            other => Err(unexpected(&other)),
        }
    }

    fn round_of(&mut self, min_time: Duration, min_runs: usize) -> anyhow::Result<Vec<f64>> {
        let request = Request::Round { min_time_ns: min_time.as_nanos() as u64, min_runs };
        match self.child.ask(&request, time_limit(&self.problem, min_time, min_runs + 1))? {
            Reply::Round { times_ns } => Ok(times_ns),
            Reply::Unavailable(reason) => Err(reason.into()),
            other => Err(unexpected(&other)),
        }
    }

    /// Start one child; returns also the core type it uses, where the library has such a thing.
    fn start_one(
        spec: &'static PeerSpec,
        problem: &MatmulProblem,
        threads: usize,
        core_type: Option<&str>,
    ) -> Result<(Peer, Option<String>), Unavailable> {
        let broken = |error: anyhow::Error| Unavailable::Broken { reason: format!("{error:#}") };
        let mut child = Child::spawn(threads, core_type).map_err(broken)?;
        let request = Request::Start { variant: spec.variant, problem: *problem, threads };
        match child.ask(&request, time_limit(problem, Duration::ZERO, 8)).map_err(broken)? {
            Reply::Ready { version, details, core_type } => {
                Ok((Peer { spec, version, details, problem: *problem, child }, core_type))
            }
            Reply::Unavailable(reason) => Err(reason),
            other => Err(broken(unexpected(&other))),
        }
    }

    /// Start OpenBLAS with each core type that fits this CPU and keep the fastest on this problem.
    ///
    /// Core types that a CPU model suggests are not always the fastest (a library that is older than the CPU
    /// falls back to a narrow one), so they are measured.
    fn start_fastest_core_type(
        spec: &'static PeerSpec,
        problem: &MatmulProblem,
        threads: usize,
    ) -> Result<Peer, Unavailable> {
        let (peer, as_it_comes) = Self::start_one(spec, problem, threads, None)?;
        let mut tried: Vec<String> = as_it_comes.into_iter().collect();
        let mut candidates = vec![(peer, f64::INFINITY)];
        for core_type in openblas::core_types() {
            // A core type that this build or this CPU lacks is ignored by the library, or kills the child.
            if let Ok((peer, Some(used))) = Self::start_one(spec, problem, threads, Some(core_type))
                && !tried.contains(&used)
            {
                tried.push(used);
                candidates.push((peer, f64::INFINITY));
            }
        }
        if candidates.len() > 1 {
            for _ in 0..3 {
                for (peer, best_ns) in &mut candidates {
                    if let Ok(times_ns) = peer.round_of(Duration::from_millis(10), 1) {
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

/// Version of each library that [`PEERS`] uses, `None` where it is not installed.
///
/// # Cost
///
/// Starts one short-lived process for each library that is loaded at run time.
pub fn versions() -> Vec<(&'static str, Option<String>)> {
    let mut versions: Vec<(&'static str, Option<String>)> = Vec::new();
    for spec in PEERS {
        if versions.iter().any(|(library, _)| *library == spec.library) {
            continue;
        }
        let asked = Child::spawn(1, None)
            .and_then(|mut child| child.ask(&Request::Version { variant: spec.variant }, Duration::from_secs(20)));
        let version = match asked {
            Ok(Reply::Version { version }) => Some(version),
            Ok(_) | Err(_) => None,
        };
        versions.push((spec.library, version));
    }
    versions
}

/// How long `n_runs` runs may take before the child counts as hung: they would be slower than 0.2 GFLOP/s.
fn time_limit(problem: &MatmulProblem, min_time: Duration, n_runs: usize) -> Duration {
    Duration::from_secs(60) + min_time + Duration::from_secs_f64(n_runs as f64 * problem.work_flops() / 0.2e9)
}

fn unexpected(reply: &Reply) -> anyhow::Error {
    anyhow::anyhow!("the peer's process gave an answer that does not fit the question: {reply:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_findable() {
        for spec in PEERS {
            assert_eq!(find(spec.name).expect("every row is found by its name").variant, spec.variant);
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let problem = MatmulProblem { b: 1, m: 1, n: 1, k: 1, ta: false, tb: false, dtype: Dtype::F32 };
        let refused = Peer::start("mkl", &problem, 1).expect_err("there is no such peer").to_string();
        assert!(refused.contains("mkl") && refused.contains("openblas-best"), "{refused}");
    }

    #[test]
    fn impossible_problems_are_refused_without_a_process() {
        let check = |b, m, n, k, threads| {
            let problem = MatmulProblem { b, m, n, k, ta: false, tb: false, dtype: Dtype::F32 };
            let refused = Peer::start("gemm", &problem, threads).expect_err("it cannot be held");
            assert!(matches!(refused, Unavailable::Unsupported { .. }), "{refused}");
        };
        check(1, 0, 8, 8, 1);
        check(0, 8, 8, 8, 1);
        check(1, 1 << 40, 1 << 40, 1, 1);
        check(1, 8, 8, 8, 0);
    }
}
