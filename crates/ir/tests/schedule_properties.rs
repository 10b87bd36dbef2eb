//! Random programs with random legal steps: results stay the same after every step and after lowering.
//!
//! `TILEWRIGHT_CASES=20000` selects a long run, `TILEWRIGHT_SEED=…` repeats a run. A failure is shrunk and
//! printed as a case for `tests/golden`.

mod sources;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use sources::{SOURCES, difference, outputs, reversed, tolerance};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use tilewright_ir::schedule::{LayoutAxis, Tail, apply, parse_steps};
use tilewright_ir::{LoopKind, Program, Role, Scope, Step, Stmt, lower, text, verify};

/// Number of cases of one run in plain `cargo test`, which take about a second for both runs.
const CASES: u32 = 150;
const FIXED_SEED: u64 = 1;
/// Maximum number of interpreter iterations; a step that exceeds it is skipped.
const LONGEST: u64 = 400_000;

/// Numbers that choose a step for any program; small numbers choose simple steps, for shrinking.
type Draw = [u16; 6];

#[derive(Clone, Debug)]
struct Case {
    source: String,
    draws: Vec<Draw>,
}

fn cases() -> impl Strategy<Value = Case> {
    let matmul = (1..14i64, 1..14i64, 1..12i64, 0..4usize).prop_map(|(m, n, k, which)| {
        let more = ["", ",const=b", ",dtype=f64", ",dtype=f64,const=a"][which];
        format!("matmul:m={m},n={n},k={k}{more}")
    });
    // Programs with movable stages come first and are drawn more often.
    let others: Vec<usize> = (0..SOURCES.len()).filter(|&at| SOURCES[at].name != "conv").collect();
    let which = prop_oneof![0..5usize, prop::sample::select(others)];
    let other = (which, prop::array::uniform3(1..12i64), any::<bool>()).prop_map(|(at, sizes, wide)| {
        let source = &SOURCES[at];
        let given: Vec<String> = source.sizes.iter().zip(sizes).map(|(name, n)| format!("{name}={n}")).collect();
        format!("{}:{}{}", source.name, given.join(","), if wide { ",dtype=f64" } else { "" })
    });
    // Extents are derived from the padded operand, so that the window fits.
    let conv = (
        1..3i64,
        1..6i64,
        1..5i64,
        1..4i64,
        1..3i64,
        1..3i64,
        0..3i64,
        (0..6i64, 0..5i64),
        (any::<bool>(), any::<bool>()),
    )
        .prop_map(|(n, c, k, r, stride, dilation, pad, (h, w), (constant, wide))| {
            let reach = dilation * (r - 1) + 1;
            let [h, w] = [h, w].map(|more| (reach - 2 * pad).max(1) + more);
            format!(
                "conv:n={n},c={c},h={h},w={w},k={k},r={r},stride={stride},dilation={dilation},pad={pad},constant={}{}",
                i64::from(constant),
                if wide { ",dtype=f64" } else { "" }
            )
        });
    // Convolutions for Winograd's filtering.
    let conv_3x3 =
        (1..3i64, 1..4i64, 3..8i64, 3..8i64, 1..4i64, 0..2i64, any::<bool>()).prop_map(|(n, c, h, w, k, pad, wide)| {
            let dtype = if wide { ",dtype=f64" } else { "" };
            format!("conv:n={n},c={c},h={h},w={w},k={k},r=3,stride=1,dilation=1,pad={pad},constant={}{dtype}", c % 2)
        });
    let transposed = (
        (1..3i64, 1..4i64, 1..4i64, 1..4i64, 1..5i64),
        (1..5i64, 1..5i64, 1..6i64, 1..4i64, 1..4i64, 1..3i64),
        (0..2i64, any::<bool>(), any::<bool>()),
    )
        .prop_map(|((n, c, h, w, k), (r, s, stride_h, stride_w, dilation_h, dilation_w), (pad, constant, wide))| {
            // Padding above and to the left only, so that an output remains.
            let pad = if r > 2 * pad && s > 2 * pad { pad } else { 0 };
            format!(
                "conv2d_transpose:n={n},c={c},h={h},w={w},k={k},r={r},s={s},stride_h={stride_h},stride_w={stride_w},\
                 dilation_h={dilation_h},dilation_w={dilation_w},pad={pad}{}{}",
                if constant { ",const=w" } else { "" },
                if wide { ",dtype=f64" } else { "" }
            )
        });
    let source = prop_oneof![3 => matmul, 9 => other, 2 => conv, 2 => conv_3x3, 2 => transposed];
    (source, prop::collection::vec(any::<Draw>(), 0..18)).prop_map(|(source, draws)| Case { source, draws })
}

/// Loop of a program, and its position.
struct Place {
    name: String,
    extent: Option<i64>,
    /// Loops perfectly nested inside, outermost first.
    nested: Vec<String>,
    innermost: bool,
    reads: Vec<u32>,
    updates: Vec<u32>,
}

fn places(program: &Program) -> Vec<Place> {
    let mut found: Vec<Place> = Vec::new();
    for s in program.parts().into_iter().flatten() {
        s.walk(&mut |s| {
            let Stmt::For(l) = s else { return };
            let (mut nested, mut body) = (Vec::new(), &l.body);
            while let [Stmt::For(inner)] = body.as_slice() {
                nested.push(program.loop_name(inner.var).to_owned());
                body = &inner.body;
            }
            let (mut reads, mut updates) = (Vec::new(), Vec::new());
            s.walk(&mut |s| {
                s.for_each_own_read(&mut |b, _| reads.push(b.0));
                if let Stmt::Update { buffer, .. } = s {
                    updates.push(buffer.0);
                }
            });
            let innermost = !l.body.iter().any(|s| s.blocks().next().is_some());
            let name = program.loop_name(l.var).to_owned();
            found.push(Place { name, extent: l.extent.as_const(), nested, innermost, reads, updates });
        });
    }
    found
}

/// Layout chosen by numbers, for a buffer of `rank` dimensions.
fn layout_of(rank: usize, d: usize, e: usize) -> Vec<LayoutAxis> {
    let mut layout: Vec<LayoutAxis> = Vec::new();
    for dim in 0..rank {
        let tile = [4, 2, 3, 8, 5, 1, 16, 7][(e >> (3 * dim).min(13)) % 8] as i64;
        let at = (d >> (4 * dim).min(12)) % (layout.len() + 1);
        if (d >> (4 * dim + 2).min(14)).is_multiple_of(2) {
            layout.insert(at, LayoutAxis::Whole(dim));
        } else {
            layout.insert(at, LayoutAxis::Outer(dim, tile));
            let inner = at + 1 + (e >> dim) % (layout.len() - at);
            layout.insert(inner, LayoutAxis::Inner(dim, tile));
        }
    }
    layout
}

/// Step chosen by numbers; loops and buffers are mostly suitable ones.
fn choose(program: &Program, draw: Draw, number: usize) -> Option<Step> {
    let [kind, a, b, c, d, e] = draw.map(usize::from);
    let all = places(program);
    // One loop in eight is arbitrary.
    let among = |n: usize, fits: &dyn Fn(&Place) -> bool| -> Option<&Place> {
        let fitting: Vec<&Place> = all.iter().filter(|p| n % 8 == 7 || fits(p)).collect();
        fitting.get((n / 8) % fitting.len().max(1)).copied()
    };
    let any_loop = |n: usize| among(n, &|_| true).map(|p| p.name.clone());
    let buffer = |n: usize, fits: &dyn Fn(u32) -> bool| -> Option<u32> {
        let fitting: Vec<u32> = (0..program.buffers.len() as u32).filter(|&b| n % 8 == 7 || fits(b)).collect();
        fitting.get((n / 8) % fitting.len().max(1)).copied()
    };
    let name_of = |b: u32| program.buffers[b as usize].name.clone();
    let role_of = |b: u32| program.buffers[b as usize].role;
    let new = |letter: &str| format!("{letter}{number}");
    Some(match kind % 121 {
        0..22 => {
            let target = among(a, &|p| p.extent != Some(1))?;
            let factor = match b % 8 {
                0 => 2,
                1 => 4,
                2 => 3,
                3 => 8,
                4 => 5,
                5 => target.extent.unwrap_or(7),
                6 => 1,
                _ => (c % 20) as i64,
            };
            let tail = [Tail::Exact, Tail::Shrink, Tail::Shrink, Tail::Guard][d % 4];
            Step::Split { target: target.name.clone(), factor, tail, outer: new("o"), inner: new("l") }
        }
        22..38 => {
            let outer = among(a, &|p| !p.nested.is_empty())?;
            let mut loops: Vec<String> = [&outer.name].into_iter().chain(&outer.nested).cloned().collect();
            loops.truncate(2 + b % 4);
            let mut mixed = Vec::new();
            let mut numbers = [c, d, e].into_iter().cycle();
            while !loops.is_empty() {
                mixed.push(loops.remove((loops.len() - 1).min(numbers.next()? % loops.len())));
            }
            if b % 16 == 15 {
                mixed.extend(any_loop(e));
            }
            Step::Reorder { loops: mixed }
        }
        38..44 => {
            let outer = among(a, &|p| !p.nested.is_empty())?;
            let inner = if b % 8 == 7 { any_loop(c)? } else { outer.nested.first()?.clone() };
            Step::Fuse { outer: outer.name.clone(), inner, fused: new("f") }
        }
        44..52 => Step::Vectorize { target: among(a, &|p| p.innermost)?.name.clone() },
        52..58 => Step::Unroll { target: any_loop(a)? },
        58..64 => Step::Parallel { target: any_loop(a)? },
        64..67 => Step::Bind { target: any_loop(a)?, axis: LoopKind::ALL[4 + b % 6].0 },
        67..77 => {
            let buffer = buffer(a, &|b| all.iter().any(|p| p.reads.contains(&b)))?;
            let at = if b % 5 == 0 { None } else { Some(among(c, &|p| p.reads.contains(&buffer))?.name.clone()) };
            let layout = layout_of(program.buffers[buffer as usize].shape.len(), d, e);
            Step::Stage { buffer: name_of(buffer), at, name: new("S"), layout, dtype: None, shared: kind >= 60000 }
        }
        77..86 => {
            let buffer = buffer(a, &|b| all.iter().any(|p| p.updates.contains(&b)))?;
            let at = among(b, &|p| p.updates.contains(&buffer))?.name.clone();
            Step::Accumulate { buffer: name_of(buffer), at, name: new("R") }
        }
        86..94 => {
            let buffer = buffer(a, &|b| role_of(b) == Role::Temporary)?;
            let at = among(b, &|p| p.reads.contains(&buffer))?.name.clone();
            Step::ComputeAt { buffer: name_of(buffer), at }
        }
        94..96 => Step::Inline { buffer: name_of(buffer(a, &|b| role_of(b) == Role::Temporary)?) },
        96..99 => {
            let buffer = buffer(a, &|b| matches!(role_of(b), Role::Temporary | Role::Kept))?;
            let layout = layout_of(program.buffers[buffer as usize].shape.len(), d, e);
            Step::Layout { buffer: name_of(buffer), layout }
        }
        99..103 => {
            let stage = buffer(a, &|b| role_of(b) != Role::Input && role_of(b) != Role::ConstInput)?;
            let read = buffer(b, &|_| true)?;
            Step::Reindex { stage: name_of(stage), buffer: name_of(read), name: new("I") }
        }
        103..107 => {
            let stage = buffer(a, &|b| all.iter().any(|p| p.updates.contains(&b)))?;
            match c % 3 {
                0 => Step::Col2im { buffer: name_of(stage), block: [1, 2, 3, 4][b % 4], taps_last: d % 2 == 0 },
                _ => Step::Winograd { buffer: name_of(stage), tile: [2, 4, 4, 3][b % 4] },
            }
        }
        107..111 => {
            let stage = buffer(a, &|b| all.iter().any(|p| p.updates.contains(&b)))?;
            let target = among(b, &|p| p.updates.contains(&stage))?.name.clone();
            Step::Rfactor { stage: name_of(stage), target, name: new("P") }
        }
        118.. => {
            let stage = buffer(a, &|b| role_of(b) != Role::Input && role_of(b) != Role::ConstInput)?;
            let target =
                if c % 2 == 0 { among(b, &|p| p.updates.contains(&stage))?.name.clone() } else { any_loop(b)? };
            Step::Pad { stage: name_of(stage), target, multiple: [2, 4, 3, 16][d % 4] }
        }
        111..115 => {
            let target = among(a, &|_| true)?.name.clone();
            Step::Peel { target, iterations: (b % 3) as i64 + 1, last: c % 2 == 0, suffix: format!("peeled{d}") }
        }
        _ => {
            let buffer = buffer(a, &|_| true)?;
            let at = among(b, &|p| p.reads.contains(&buffer) || p.updates.contains(&buffer))?.name.clone();
            match d % 2 == 0 && role_of(buffer) == Role::Temporary {
                true if program.buffers[buffer as usize].scope == Scope::Shared && c % 3 > 0 => {
                    let (stages, held) = ((c % 3) as i64 + 1, c % 5 == 0);
                    let (last, fed, multicast) = (c % 2 == 0, d % 4 == 0, d % 8 == 0);
                    Step::Stream { buffers: vec![name_of(buffer)], at, stages, held, last, by_producer: fed, multicast }
                }
                true => Step::Pipeline { buffer: name_of(buffer), at, name: new("N"), twice: c % 2 == 0 },
                false => {
                    // Any of the loops, most of which are not inside the other.
                    let inside = (0..c % 3).filter_map(|n| any_loop(c + 8 * n)).collect();
                    Step::Prefetch { buffer: name_of(buffer), at, ahead: (c % 4) as i64, inside }
                }
            }
        }
    })
}

/// Numbers of legal steps and of tries, by the step's first word.
static TRIED: Mutex<BTreeMap<String, (u64, u64)>> = Mutex::new(BTreeMap::new());

fn check(case: &Case) -> Result<(), TestCaseError> {
    let mut steps: Vec<Step> = Vec::new();
    let checked = catch_unwind(AssertUnwindSafe(|| check_steps(case, &mut steps)));
    let why = match checked {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(why)) => why,
        Err(panic) => match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(panic) => panic.downcast::<&str>().map_or("a panic".to_owned(), |text| (*text).to_owned()),
        },
    };
    let lines: String = steps.iter().map(|s| format!("{s}\n")).collect();
    Err(TestCaseError::fail(format!("{why}\n--- program\n{}\n--- steps\n{lines}", case.source)))
}

fn check_steps(case: &Case, steps: &mut Vec<Step>) -> Result<(), String> {
    let source = sources::program(&case.source);
    verify::verify(&source).map_err(|e| e.to_string())?;
    let expected = outputs(&source, LONGEST).expect("sources are small");
    let same = |program: &Program, steps: &[Step], what: &str| -> Result<bool, String> {
        let Some(got) = outputs(program, LONGEST) else { return Ok(false) };
        match difference(&got, &expected, tolerance(&case.source, steps)) {
            None => Ok(true),
            Some(how) => Err(format!("{what}: {how}\n{program}")),
        }
    };
    let mut program = source;
    for (number, draw) in case.draws.iter().enumerate() {
        let Some(step) = choose(&program, *draw, number) else { continue };
        let line = step.to_string();
        match parse_steps(&line) {
            Ok(read) if read == [step.clone()] => {}
            read => return Err(format!("`{line}` is read as {read:?}")),
        }
        let word = line.split(' ').next().unwrap_or("").to_owned();
        let count = |legal| {
            let mut tried = TRIED.lock().expect("no panic inside");
            let (n_legal, n_tries) = tried.entry(word.clone()).or_default();
            *n_legal += u64::from(legal);
            *n_tries += 1;
        };
        steps.push(step);
        let next = match apply(&program, steps.last().expect("just pushed")) {
            Ok(next) => next,
            Err(why) => {
                count(false);
                let why = why.to_string();
                if why.contains('\n') || why.len() > 400 {
                    return Err(format!("not one clear line: {why}"));
                }
                steps.pop();
                continue;
            }
        };
        count(true);
        verify::verify(&next).map_err(|e| format!("{e}\n{next}"))?;
        let printed = next.to_string();
        match text::parse(&printed) {
            Ok(read) if read == next => {}
            read => return Err(format!("the text is read as {read:?}\n{printed}")),
        }
        if same(&next, steps, "scheduled")? {
            program = next;
        } else {
            steps.pop();
        }
    }
    same(&reversed(&program), steps, "with parallel and vectorized loops reversed")?;
    let lowered = lower::lower_verified(&program);
    let valid = match verify::verify(&lowered) {
        // Specialized indices may hide the independence proven before; a run with reversed loops checks it.
        Err(verify::VerifyError::Race { .. }) => verify::verify(&one_after_the_other(&lowered)),
        other => other,
    };
    valid.map_err(|e| format!("lowered: {e}\n{lowered}"))?;
    let mut odd = None;
    for s in lowered.parts().into_iter().flatten() {
        s.walk(&mut |s| match s {
            Stmt::For(l) if l.kind == LoopKind::Unrolled => odd = Some("unrolled loop left"),
            Stmt::For(l) if l.kind == LoopKind::Vectorized && l.extent.as_const().is_none() => {
                odd = Some("vectorized loop of unknown extent left")
            }
            _ => {}
        });
    }
    if let Some(odd) = odd {
        return Err(format!("lowered: {odd}\n{lowered}"));
    }
    same(&lowered, steps, "lowered")?;
    same(&reversed(&lowered), steps, "lowered, with parallel and vectorized loops reversed")?;
    Ok(())
}

/// Returns the program with all loops serial.
fn one_after_the_other(program: &Program) -> Program {
    fn block(stmts: &[Stmt]) -> Vec<Stmt> {
        let serial = |s: &Stmt| {
            let mut s = s.clone();
            if let Stmt::For(l) = &mut s {
                l.kind = LoopKind::Serial;
            }
            s.blocks_mut().for_each(|b| *b = block(b));
            s
        };
        stmts.iter().map(serial).collect()
    }
    program.clone().map_parts(|stmts| block(&stmts))
}

/// Reads a number from the environment.
fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is not a number")))
}

fn run(seed: u64, cases_wanted: u32) -> Result<(), String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        Config { cases: cases_wanted, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    runner.run(&cases(), |case| check(&case)).map_err(|e| match e {
        TestError::Fail(why, _) | TestError::Abort(why) => format!(
            "{why}\nrepro: TILEWRIGHT_SEED={seed} TILEWRIGHT_CASES={cases_wanted} \
             cargo test -p tilewright-ir --test schedule_properties"
        ),
    })
}

#[test]
fn legal_steps_change_nothing_that_is_computed() {
    // Panics inside a case are caught, and reported once shrunk.
    let (this, default) = (std::thread::current().id(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() != this {
            default(info);
        }
    }));
    let n = from_environment("TILEWRIGHT_CASES").map(|n| n as u32);
    let seed = from_environment("TILEWRIGHT_SEED");
    let result = match seed {
        Some(seed) => run(seed, n.unwrap_or(CASES)),
        None => run(FIXED_SEED, CASES).and_then(|()| run(RandomState::new().hash_one(()), n.unwrap_or(CASES))),
    };
    drop(std::panic::take_hook());
    if let Err(why) = result {
        panic!("{why}");
    }
    for (word, (legal, tried)) in &*TRIED.lock().expect("no panic inside") {
        println!("{word}: {legal} of {tried} legal");
        // A short run need not have a legal step of each kind.
        assert!(*legal > 0 || n.is_none() || seed.is_some(), "no {word} step was legal");
    }
}

/// Names, most of them valid, some of them keywords of the syntax.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[A-Za-z_][A-Za-z0-9_.]{0,5}", 1 => "at|shared|ahead|split|shrink|guard", 3 => "i|j|k|A|B|C"]
}

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![4 => -2..20i64, 1 => any::<i64>(), 1 => (0..63u32).prop_map(|bit| 1 << bit)]
}

fn any_axis() -> impl Strategy<Value = LayoutAxis> {
    prop_oneof![
        (0..3usize).prop_map(LayoutAxis::Whole),
        (0..3usize, number()).prop_map(|(d, t)| LayoutAxis::Outer(d, t)),
        (0..3usize, number()).prop_map(|(d, t)| LayoutAxis::Inner(d, t)),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let tail = prop::sample::select(vec![Tail::Exact, Tail::Shrink, Tail::Guard]);
    let at = prop::option::of(name());
    prop_oneof![
        (name(), number(), tail, name(), name()).prop_map(|(target, factor, tail, outer, inner)| Step::Split {
            target,
            factor,
            tail,
            outer,
            inner
        }),
        (name(), name(), name()).prop_map(|(outer, inner, fused)| Step::Fuse { outer, inner, fused }),
        prop::collection::vec(name(), 1..5).prop_map(|loops| Step::Reorder { loops }),
        name().prop_map(|target| Step::Vectorize { target }),
        name().prop_map(|target| Step::Unroll { target }),
        name().prop_map(|target| Step::Parallel { target }),
        (name(), 4..10usize).prop_map(|(target, at)| Step::Bind { target, axis: LoopKind::ALL[at].0 }),
        (name(), at, name(), prop::collection::vec(any_axis(), 0..5), any::<bool>()).prop_map(
            |(buffer, at, name, layout, shared)| Step::Stage { buffer, at, name, layout, dtype: None, shared }
        ),
        (name(), name(), name()).prop_map(|(buffer, at, name)| Step::Accumulate { buffer, at, name }),
        (name(), name()).prop_map(|(buffer, at)| Step::ComputeAt { buffer, at }),
        name().prop_map(|buffer| Step::Inline { buffer }),
        (name(), prop::collection::vec(any_axis(), 0..5)).prop_map(|(buffer, layout)| Step::Layout { buffer, layout }),
        (name(), name(), name()).prop_map(|(stage, buffer, name)| Step::Reindex { stage, buffer, name }),
        (name(), name(), number()).prop_map(|(stage, target, multiple)| Step::Pad { stage, target, multiple }),
        (name(), name(), name()).prop_map(|(stage, target, name)| Step::Rfactor { stage, target, name }),
        (name(), number()).prop_map(|(buffer, tile)| Step::Winograd { buffer, tile }),
        (name(), number(), any::<bool>()).prop_map(|(buffer, block, taps_last)| Step::Col2im {
            buffer,
            block,
            taps_last
        }),
        (name(), name(), number(), prop::collection::vec(name(), 0..3))
            .prop_map(|(buffer, at, ahead, inside)| Step::Prefetch { buffer, at, ahead, inside }),
        (name(), name(), name(), any::<bool>()).prop_map(|(buffer, at, name, twice)| Step::Pipeline {
            buffer,
            at,
            name,
            twice
        }),
        (prop::collection::vec(name(), 1..3), name(), number(), any::<[bool; 4]>()).prop_map(
            |(buffers, at, stages, [held, last, fed, multicast])| Step::Stream {
                buffers,
                at,
                stages,
                held,
                last,
                by_producer: fed,
                multicast,
            },
        ),
        (name(), number(), any::<bool>(), name()).prop_map(|(target, iterations, last, suffix)| Step::Peel {
            target,
            iterations,
            last,
            suffix
        }),
    ]
}

/// Applies the legal steps and checks that nothing panics and that every intermediate program is valid.
fn apply_legal(steps: &[Step]) -> Result<(), TestCaseError> {
    let mut program = sources::program("matmul:m=3,n=4,k=5");
    for step in steps {
        if let Ok(next) = apply(&program, step) {
            verify::verify(&next).map_err(|e| TestCaseError::fail(format!("{step}: {e}\n{next}")))?;
            program = next;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(Config { cases: 1000, failure_persistence: None, ..Config::default() })]

    #[test]
    fn steps_print_and_parse(steps in prop::collection::vec(any_step(), 0..8)) {
        let text: String = steps.iter().map(|s| format!("{s}\n")).collect();
        prop_assert_eq!(parse_steps(&text), Ok(steps.clone()), "{}", text);
        apply_legal(&steps)?;
    }

    #[test]
    fn no_text_makes_the_step_parser_panic(
        words in prop::collection::vec(
            prop_oneof![
                name(),
                number().prop_map(|n| n.to_string()),
                "->|at|ahead|0/4|1%4|/|%|0/|%3|shared|#|\n",
                "split|fuse|reorder|vectorize|unroll|parallel|bind|stage|accumulate|compute_at|inline|layout|reindex|as|rfactor|winograd|col2im|channels|taps|prefetch|stream|in",
                "\\PC{0,4}",
            ],
            0..20,
        )
    ) {
        let text = words.join(" ");
        if let Ok(steps) = parse_steps(&text) {
            let printed: String = steps.iter().map(|s| format!("{s}\n")).collect();
            prop_assert_eq!(parse_steps(&printed), Ok(steps.clone()), "{}", text);
            apply_legal(&steps)?;
        }
    }
}
