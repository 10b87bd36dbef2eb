//! Copies of operands to shared memory: through registers, or asynchronous if the GPU supports that.

use super::super::TemplateSetting;
use super::super::step::{exact, pipeline, stream, unroll};
use super::{constraint, gpu};
use tilewright_ir::Step;
use tilewright_ir::gpu::bulk::BARRIER_BYTES;
use tilewright_search::{Config, Constraint, Domain, Parameter, Space};

/// Maximum number of copies per thread that are unrolled: the addresses of more would take too many
/// registers.
pub const AT_A_TIME: i64 = 8;

/// Bytes of the mbarriers of a pipeline stage: one that signals that it is full, and one that it is empty.
const STAGE_BARRIERS: u64 = 2 * BARRIER_BYTES;

/// Steps that split the loop over a thread's `n_loads` copies, if there are more than are unrolled, and that
/// unroll it.
fn repeated(name: &str, n_loads: i64) -> (Option<Step>, Option<Step>) {
    let [all, outer, inner] = ["o", "g", "i"].map(|part| format!("{name}.{part}"));
    match n_loads {
        ..=AT_A_TIME => (None, Some(unroll(&all))),
        _ if n_loads % AT_A_TIME == 0 => (Some(exact(&all, AT_A_TIME, &outer, &inner)), Some(unroll(&inner))),
        _ => (None, None),
    }
}

/// Whether operands may be copied asynchronously, which requires that they are not modified on the way.
fn is_possible(s: &TemplateSetting) -> bool {
    s.target.has_async_copies() && s.workload.prologue().is_empty()
}

/// Number of pipeline stages of the operands. Through registers: 0 for none, 1 for loads a step ahead, 2 with
/// double buffering in shared memory too. Asynchronous: the number of buffers, at most `most`.
pub fn ahead(s: &TemplateSetting, most: i64) -> Parameter {
    Parameter::ordinal("ahead", 0..=if is_possible(s) { most } else { 2 })
}

/// Kind of copies to shared memory; `None` if there is no choice.
pub fn way(s: &TemplateSetting) -> Option<Parameter> {
    is_possible(s).then(|| Parameter::categorical("copies", &["registers", "async"]).optional())
}

/// Constraints on the copies of both operands. `elements` is the number of elements per step in shared
/// memory, as an expression; `beside` an expression of further bytes to add, or empty; `unasked` the bytes of
/// shared memory that a block has without opting in, as it does to copy asynchronously or to pad rows.
pub fn constraints(
    s: &TemplateSetting,
    elements: &str,
    beside: &str,
    unasked: u64,
    parameters: &[Parameter],
) -> Vec<Constraint> {
    let (bytes, most) = (s.workload.dtype.bytes(), gpu(s).most_shared_bytes);
    let limit = match is_possible(s) {
        true if unasked < most => {
            let padded = if parameters.iter().any(|p| p.name == "pad") { " and pad == 0" } else { "" };
            format!("({unasked} if copies == 'registers'{padded} else {most})")
        }
        _ => unasked.to_string(),
    };
    let has_boxes = parameters.iter().any(|p| p.name == "copies" && lists(p, "bulk"));
    let barriers =
        if has_boxes { format!(" + ({STAGE_BARRIERS} * ahead if copies == 'bulk' else 0)") } else { String::new() };
    let shared = format!("max(ahead, 1) * ({elements}) * {bytes}{barriers}{beside} <= {limit}");
    let ways = is_possible(s).then(|| {
        // Asynchronous copies have at least four bytes.
        let long = if bytes < 4 { " and (copies != 'async' or min(vector_a, vector_b) >= 2)" } else { "" };
        constraint("copies", &format!("ahead <= 2 if copies == 'registers' else ahead >= 2{long}"), parameters)
    });
    [constraint("shared_bytes", &shared, parameters)].into_iter().chain(ways).collect()
}

/// Share of a step's loads that a thread holds in registers, all or none, as a factor of an expression.
pub fn in_registers(s: &TemplateSetting) -> &'static str {
    if is_possible(s) { "(min(ahead, 1) if copies == 'registers' else 0)" } else { "min(ahead, 1)" }
}

/// Whether a word is among the values of a parameter.
fn lists(parameter: &Parameter, word: &str) -> bool {
    matches!(&parameter.domain, Domain::Categorical(words) if words.iter().any(|known| known == word))
}

/// Whether a thread's copies are not loaded ahead, as a factor of an expression.
pub fn are_alone(parameters: &[Parameter]) -> &'static str {
    let has_async = parameters.iter().any(|p| p.name == "copies" && lists(p, "async"));
    if has_async { "(1 if copies == 'async' or ahead == 0 else 0)" } else { "(1 - min(ahead, 1))" }
}

/// Kind of copies of operands to shared memory, with its pipeline stages.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Copies {
    /// Copies through registers: 0 for loads where they are needed, 1 for loads a step ahead, 2 with double
    /// buffering in shared memory too.
    Registers(i64),
    /// Asynchronous copies (`cp.async`) with this many pipeline stages.
    Async(i64),
    /// Asynchronous bulk copies of boxes by one thread (TMA), where possible, with this many pipeline stages.
    Bulk(i64),
}

impl Copies {
    /// Copies that a configuration selects.
    pub fn of(space: &Space, config: &Config) -> Copies {
        let ahead = space.int(config, "ahead");
        let way = space.has("copies").then(|| space.text(config, "copies"));
        match way.as_deref() {
            Some("async") => Copies::Async(ahead),
            Some("bulk") => Copies::Bulk(ahead),
            _ => Copies::Registers(ahead),
        }
    }

    /// Number of buffers in shared memory.
    pub fn n(self) -> i64 {
        let (Copies::Registers(n) | Copies::Async(n) | Copies::Bulk(n)) = self;
        n.max(1)
    }

    /// Number of steps whose copies are in flight while one is computed.
    pub fn in_flight(self) -> i64 {
        match self {
            Copies::Registers(ahead) => ahead.min(1),
            Copies::Async(n) | Copies::Bulk(n) => n - 1,
        }
    }

    /// Number of a thread's `elements` that are held in registers for a later step.
    pub fn in_registers(self, elements: i64) -> i64 {
        if matches!(self, Copies::Registers(1..)) { elements } else { 0 }
    }

    /// Steps for an operand's copies through registers: software-pipelined, or unrolled a few at a time.
    pub fn through_registers(self, at: &str, name: &str, n_loads: i64) -> Vec<Step> {
        match self {
            Copies::Registers(ahead @ 1..) => {
                vec![pipeline(name, at, &format!("{name}.n"), ahead > 1), unroll(&format!("{name}.o"))]
            }
            Copies::Registers(_) => {
                let (divided, unrolled) = repeated(name, n_loads);
                divided.into_iter().chain(unrolled).collect()
            }
            Copies::Async(_) | Copies::Bulk(_) => Vec::new(),
        }
    }

    /// Steps for asynchronous copies in the iterations of a loop; `copies` has each buffer with its number of
    /// loads per thread. `options` are those of [`Step::Stream`]: `held`, `last`, `by_producer`, `multicast`.
    pub fn stream(self, at: &str, copies: &[(&str, i64)], options: [bool; 4]) -> Vec<Step> {
        let (Copies::Async(stages) | Copies::Bulk(stages)) = self else { return Vec::new() };
        let names: Vec<&str> = copies.iter().map(|(name, _)| *name).collect();
        let (divided, unrolled): (Vec<_>, Vec<_>) = copies.iter().map(|(name, n)| repeated(name, *n)).unzip();
        let streamed = [Some(stream(&names, at, stages, options))];
        divided.into_iter().chain(streamed).chain(unrolled).flatten().collect()
    }
}
