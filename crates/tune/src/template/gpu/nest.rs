//! Any program of stages on a GPU: a kernel for each of them, a thread for each element.

use super::super::nest::{Builder, inlined};
use super::super::step::{accumulate, bind, exact, reorder, rfactor, split, unroll};
use super::super::{Setting, Template, ceil_div};
use super::model::START;
use super::{gpu, parts};
use crate::space::{Config, Parameter, Space, SpaceError};
use tilewright_ir::dependence::find_race;
use tilewright_ir::index::Ranges;
use tilewright_ir::{Index, LoopKind, Program, Step, Stmt};

/// A kernel for each stage whose loops nothing else is made of, and one for each that sums a part apart.
///
/// Small stages are computed where they are read. Threads next to each other compute elements next to each
/// other. Where there are few elements, each of which combines many, `along` threads combine a part of one
/// each, and a further kernel the parts.
pub const GPU_NEST: Template = Template {
    name: "gpu-nest",
    text: "GPU: each stage a kernel, each element a thread or, of long sums, a thread for each part",
    serves: |s| s.target.gpu.is_some() && all_nests(&s.workload.program()).is_some(),
    space,
    steps: |s, space, config| scheduled(s, &Choices::of(space, config)),
    estimate: Some(estimate),
};

/// Sums of fewer elements are not shared.
const LONG_SUM: i64 = 64;
/// Of so many elements each is summed by a thread of its own.
const MANY_ELEMENTS: i64 = 1 << 16;

/// A nest of loops around one assignment.
struct Nest {
    /// The buffer that it writes.
    buffer: String,
    /// Outermost first: names, extents at most, and whether threads may share the iterations.
    loops: Vec<(String, i64, bool)>,
    /// The loop along which neighbours are written.
    contiguous: Option<String>,
    /// Whether it combines values.
    reduces: bool,
    /// Loads of an iteration.
    n_reads: usize,
}

impl Nest {
    fn of(program: &Program, stmt: &Stmt) -> Option<Nest> {
        let mut ranges = Ranges::default();
        let (mut loops, mut leaf) = (Vec::new(), stmt);
        while let Stmt::For(l) = leaf {
            let free = l.extent.as_const().is_some() && find_race(l, &ranges).is_none();
            loops.push((l.var, ranges.upper(&l.extent)?, free));
            ranges.push(l.var, l.extent.clone());
            let [only] = l.body.as_slice() else { return None };
            leaf = only;
        }
        let (buffer, index) = leaf.own_write()?;
        let flat = index.iter().zip(program.buffer(buffer).strides());
        let flat = flat.fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(stride)));
        let contiguous = loops.iter().find(|(v, extent, _)| flat.coefficient(*v) == 1 && *extent > 1);
        let mut n_reads = 0;
        leaf.for_each_own_read(&mut |_, _| n_reads += 1);
        let name = |v| program.loop_name(v).to_owned();
        Some(Nest {
            buffer: program.buffer(buffer).name.clone(),
            contiguous: contiguous.map(|(v, _, _)| name(*v)),
            loops: loops.into_iter().map(|(v, extent, free)| (name(v), extent, free)).collect(),
            reduces: matches!(leaf, Stmt::Update { .. }),
            n_reads,
        })
    }

    /// Elements that threads may compute at a time.
    fn n_elements(&self) -> i64 {
        self.loops.iter().filter(|l| l.2).map(|l| l.1).product()
    }

    /// Iterations of each.
    fn n_combined(&self) -> i64 {
        self.loops.iter().filter(|l| !l.2).map(|l| l.1).product()
    }

    fn has_long_sum(&self) -> bool {
        self.reduces && self.n_combined() >= LONG_SUM && self.n_elements() < MANY_ELEMENTS
    }
}

/// The nests of a program, in order; `None` where it has something else.
fn all_nests(program: &Program) -> Option<Vec<Nest>> {
    let stmts = program.parts().into_iter().flatten().filter(|s| !matches!(s, Stmt::Alloc(_)));
    stmts.map(|s| Nest::of(program, s)).collect()
}

fn nests(program: &Program) -> Vec<Nest> {
    all_nests(program).expect("the template serves programs of nests")
}

/// What is left open.
struct Choices {
    threads: i64,
    along: i64,
    unroll: i64,
}

impl Choices {
    fn of(space: &Space, config: &Config) -> Choices {
        let int = |name: &str| if space.names().any(|n| n == name) { space.int(config, name) } else { 1 };
        Choices { threads: int("threads"), along: int("along"), unroll: int("unroll") }
    }
}

fn space(s: &Setting) -> Result<Space, SpaceError> {
    let most = i64::from(gpu(s).most_threads.min(gpu(s).most_threads_along[0]));
    let nests = nests(&inlined(s).0);
    let threads = [32, 64, 128, 256, 512, 1024].into_iter().filter(|n| *n <= most);
    let mut parameters = vec![Parameter::ordinal("threads", threads)];
    if nests.iter().any(Nest::has_long_sum) {
        parameters.push(Parameter::ordinal("along", [1, 8, 32, 128]));
    }
    if nests.iter().any(|nest| nest.reduces) {
        parameters.push(Parameter::ordinal("unroll", [1, 2, 4, 8]));
    }
    Space::new("gpu-nest", parameters, Vec::new())
}

fn scheduled(s: &Setting, choices: &Choices) -> Vec<Step> {
    let mut builder = Builder::on(inlined(s));
    for nest in nests(builder.program()).into_iter().filter(|nest| choices.along > 1 && nest.has_long_sum()) {
        // The innermost of the loops that are long enough.
        let long = nest.loops.iter().rev().find(|l| !l.2 && l.1 >= 2 * choices.along);
        if let Some((name, extent, _)) = long {
            let [outer, inner] = ["o", "i"].map(|part| format!("{name}.{part}"));
            // Neighbours to neighbouring threads, where all parts are as long.
            let (length, part) = match extent % choices.along {
                0 => (choices.along, &inner),
                _ => (ceil_div(*extent, choices.along), &outer),
            };
            let _ = builder.attempt(split(name, length, &outer, &inner))
                && builder.attempt(rfactor(&nest.buffer, part, &format!("{}.parts", nest.buffer)));
        }
    }
    for (at, nest) in nests(builder.program()).into_iter().enumerate() {
        bound(&mut builder, &nest, at, choices);
    }
    builder.finish()
}

/// Gives a nest's elements to threads.
fn bound(builder: &mut Builder, nest: &Nest, at: usize, choices: &Choices) {
    let own = format!("nest{at}");
    let (mut free, rest): (Vec<_>, Vec<_>) = nest.loops.iter().map(|l| (l.0.as_str(), l.2)).partition(|l| l.1);
    // Neighbouring threads write neighbours.
    free.sort_by_key(|l| Some(l.0) == nest.contiguous.as_deref());
    let order: Vec<&str> = free.iter().chain(&rest).map(|l| l.0).collect();
    let mut free: Vec<&str> = free.iter().map(|l| l.0).collect();
    let is_sorted = nest.loops.iter().map(|l| l.0.as_str()).eq(order.iter().copied());
    if !is_sorted && !builder.attempt(reorder(&order)) {
        free = nest.loops.iter().take_while(|l| l.2).map(|l| l.0.as_str()).collect();
    }
    if free.is_empty() {
        // One thread does all.
        let Some((name, extent, _)) = nest.loops.first() else { return };
        let [outer, inner, block, thread] = ["o", "i", "block", "thread"].map(|part| format!("{own}.{part}"));
        builder.attempt_all([
            split(name, *extent, &outer, &inner),
            exact(&outer, 1, &block, &thread),
            bind(&block, LoopKind::Block(0)),
            bind(&thread, LoopKind::Thread(0)),
        ]);
        return;
    }
    let (steps, thread) = parts::each_thread(&own, &free, choices.threads);
    builder.attempt_all(steps);
    if nest.reduces {
        builder.attempt(accumulate(&nest.buffer, &thread, &format!("{own}.sum")));
        if let Some((last, _)) = rest.last()
            && choices.unroll > 1
        {
            let (outer, inner) = (format!("{own}.uo"), format!("{own}.u"));
            let _ = builder.attempt(split(last, choices.unroll, &outer, &inner)) && builder.attempt(unroll(&inner));
        }
    }
}

/// Loads and operations of every kernel, at the rate of as many threads as there are.
fn estimate(s: &Setting, space: &Space, config: &Config) -> f64 {
    let choices = Choices::of(space, config);
    let units = f64::from(gpu(s).n_units);
    let of = |nest: &Nest| {
        let along = if nest.has_long_sum() { choices.along } else { 1 };
        let n_threads = (nest.n_elements() * along) as f64;
        let n_blocks = ceil_div(nest.n_elements() * along, choices.threads) as f64;
        let uneven = (n_blocks / units).ceil() * units / n_blocks;
        let lanes = n_threads.min(units * 128.0);
        let step = nest.n_reads as f64 * 2.0 + 1.0 + 2.0 / choices.unroll as f64;
        let latency = 20.0 * nest.n_combined() as f64 / (along * choices.unroll) as f64;
        let work = (nest.n_elements() * nest.n_combined()) as f64 * step / lanes;
        let further = if along > 1 { START + 20.0 * along as f64 } else { 0.0 };
        (work * uneven.min(4.0)).max(latency) + START + further
    };
    nests(&inlined(s).0).iter().map(of).sum()
}
