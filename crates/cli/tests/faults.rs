//! Candidates that misbehave: each costs only its own trial, with the class of its fault.

mod common;

use std::time::Duration;

use tilewright_device::device::RoundLength;
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Device, host};
use tilewright_ir::op::Workload;
use tilewright_search::{ErrorClass, Measure, Next, Outcome};

const HEADER: &str = "program \"faulty\"
buffer A: f32[16, 16] global input
buffer B: f32[16, 16] global input
buffer C: f32[16, 16] global output
buffer K: f32[16, 16] global kept
buffer T: f32[25000000000] global temporary
buffer S: f32[16] global temporary
loops i, j, k, t
";

const MATMUL: &str = "for i in 16 { for j in 16 { for k in 16 { C[i, j] += A[i, k] * B[k, j] first k == 0 } } }";

const FINISH: &str = "for i in 16 { for j in 16 { C[i, j] = K[i, j] } }";

/// Program with this body.
fn lowered(body: &str) -> ProgramSource {
    ProgramSource::Lowered(format!("{HEADER}run {{ {body} }}"))
}

/// Matrix product followed by these statements.
fn matmul_and(more: &str) -> ProgramSource {
    lowered(&format!("{MATMUL} {more}"))
}

/// Matrix product with a kept copy of B, followed by these statements.
fn prepared(more: &str) -> ProgramSource {
    let body = MATMUL.replace("B[", "K[");
    let copy = "for i in 16 { for j in 16 { K[i, j] = B[i, j] } }";
    ProgramSource::Lowered(format!("{HEADER}prepare {{ {copy} }} run {{ {body} {more} }}"))
}

/// Matrix product into a kept buffer, up to this row, with this `finish` part.
fn kept(n_rows: i64, finish: &str) -> ProgramSource {
    let body = MATMUL.replace("C[", "K[").replace("for i in 16", &format!("for i in {n_rows}"));
    ProgramSource::Lowered(format!("{HEADER}run {{ {body} }} finish {{ {finish} }}"))
}

/// Checks the outcomes of candidates, all in one batch and in small announced ones.
fn check(n_threads: usize, cases: &[(&str, ProgramSource, Option<ErrorClass>)]) {
    for batch in [cases.len(), 4] {
        check_in_batches("matmul:m=16,n=16,k=16", n_threads, cases, batch);
    }
}

fn check_in_batches(
    workload: &str,
    n_threads: usize,
    cases: &[(&str, ProgramSource, Option<ErrorClass>)],
    batch: usize,
) {
    let workload = Workload::parse(workload).unwrap();
    let mut options = common::device_options(n_threads);
    options.n_workers = 2;
    options.run_timeout = Duration::from_secs(1);
    let mut device = Device::new(workload, &host::target(), options).unwrap();
    let sources: Vec<ProgramSource> = cases.iter().map(|(_, source, _)| source.clone()).collect();
    let mut outcomes: Vec<Option<Outcome>> = vec![None; sources.len()];
    for chunk in sources.chunks(batch) {
        device.submit_sources(chunk);
    }
    loop {
        match device.next(None, Duration::from_secs(60)).unwrap() {
            Next::Done(at, measured) => {
                let before = outcomes[at as usize].replace(measured.outcome);
                assert_eq!(before, None, "{} is told once", cases[at as usize].0);
            }
            Next::Pending => {}
            Next::Idle => break,
        }
    }
    for ((name, _, expected), outcome) in cases.iter().zip(&outcomes) {
        let outcome = outcome.as_ref().unwrap_or_else(|| panic!("{name} was not measured"));
        assert_eq!(outcome.class(), *expected, "{name}: {outcome:?}");
        if let Outcome::Failed { message, .. } = outcome {
            println!("{name}: {message}");
            assert!(!message.trim().is_empty(), "{name} has a reason");
        }
    }
}

#[test]
fn every_fault_gets_its_class_and_good_candidates_are_measured() {
    use ErrorClass::*;
    let good = || ProgramSource::Steps("split i 4 -> io ii\nreorder io k ii j\nvectorize j\n".to_owned());
    check(
        1,
        &[
            ("good", good(), None),
            ("divides by zero", lowered("for i in 16 { for j in 16 { C[i, j] = A[i // 0, j] } }"), Some(RuntimeError)),
            ("takes a remainder by zero", matmul_and("C[0, 1 % 0] = 0.0"), Some(RuntimeError)),
            ("untuned", ProgramSource::Steps(String::new()), None),
            (
                "loops for ever",
                matmul_and("for t in 1000000000000000 { C[0, 0] += A[0, 0] first never }"),
                Some(RunTimeout),
            ),
            ("good after a loop", good(), None),
            ("writes far outside", matmul_and("for i in 16 { C[i + 100000000, 0] = 1.0 }"), Some(RuntimeError)),
            ("writes just behind", matmul_and("C[15, 16] = 1.0"), Some(RuntimeError)),
            ("writes just before", matmul_and("C[0, -1] = 1.0"), Some(RuntimeError)),
            ("reads far outside", matmul_and("for i in 16 { C[i, 0] = A[i + 100000000, 0] }"), Some(RuntimeError)),
            ("good after a crash", good(), None),
            ("takes 100 GB", matmul_and("alloc T T[0] = 1.0"), Some(RuntimeError)),
            ("adds what lies just behind an input", matmul_and("C[0, 0] += A[16, 0] first never"), Some(WrongAnswer)),
            ("one wrong element", matmul_and("C[3, 5] = 1000.0"), Some(WrongAnswer)),
            ("one element not written", lowered(&MATMUL.replace("for i in 16", "for i in 15")), Some(WrongAnswer)),
            ("good with something prepared", prepared(""), None),
            ("good, though it changes what it prepared", prepared("K[0, 0] = 1.0"), None),
            ("reads just behind what was prepared", prepared("C[0, 0] = K[16, 0]"), Some(WrongAnswer)),
            ("good with the same prepared", prepared(""), None),
            ("good with something to finish", kept(16, FINISH), None),
            ("nothing is finished", kept(16, ""), Some(WrongAnswer)),
            ("a kept row is not written", kept(15, FINISH), Some(WrongAnswer)),
            ("finishes outside", kept(16, &format!("{FINISH} C[16, 0] = 1.0")), Some(RuntimeError)),
            ("one element is no number", matmul_and("C[3, 5] = nan"), Some(WrongAnswer)),
            ("overwrites an input", matmul_and("A[0, 0] = 1.0"), Some(RuntimeError)),
            ("no program", ProgramSource::Lowered("program of sorts".to_owned()), Some(InstantiationError)),
            ("unknown buffer", matmul_and("D[0] = 1.0"), Some(InstantiationError)),
            ("no steps", ProgramSource::Steps("split the difference\n".to_owned()), Some(InstantiationError)),
            ("illegal step", ProgramSource::Steps("vectorize k\n".to_owned()), Some(InstantiationError)),
            ("other arguments", ProgramSource::Lowered("program \"p\" run { }".to_owned()), Some(InstantiationError)),
            ("good at the end", good(), None),
        ],
    );
}

/// A kernel for any number of rows is correct at each size that it is checked at, and writes no row beyond.
#[test]
fn families_are_checked_at_several_sizes() {
    use ErrorClass::*;
    let header = HEADER.replace("A: f32[16, 16]", "A: f32[11, 16]").replace("C: f32[16, 16]", "C: f32[11, 16]");
    let of_sizes =
        |sizes: &str, body: &str| ProgramSource::Lowered(format!("{}{sizes}run {{ {body} }}", header.trim_end()));
    let sizes = ", m.steps\nsize m = 3*m.steps + 2 in 4\n";
    let rows = |rows: &str| of_sizes(sizes, &MATMUL.replace("for i in 16", &format!("for i in {rows}")));
    let cases = [
        ("good", ProgramSource::Steps("split i 4 -> io ii shrink\nreorder io k ii j\nvectorize j\n".to_owned()), None),
        ("untuned", ProgramSource::Steps(String::new()), None),
        ("written down", rows("3*m.steps + 2"), None),
        ("always all rows", rows("11"), Some(WrongAnswer)),
        ("a row too many but for the most", rows("min(11, 3*m.steps + 3)"), Some(WrongAnswer)),
        ("a row too few at one size", rows("3*m.steps + 2 - (m.steps + 2) // 5 * 1"), Some(WrongAnswer)),
        ("of one size", of_sizes("\n", &MATMUL.replace("for i in 16", "for i in 11")), Some(InstantiationError)),
        ("of other sizes", of_sizes(&sizes.replace("in 4", "in 3"), MATMUL), Some(InstantiationError)),
    ];
    check_in_batches("matmul:m=2..11/3,n=16,k=16", 1, &cases, cases.len());
}

/// Races sources in two sittings of two rounds.
fn raced(device: &mut Device, sources: &[ProgramSource]) -> Vec<Outcome> {
    let round = RoundLength { time: Duration::from_millis(1), min_samples: 1 };
    let racers = device.race(sources, 2, 2, round).unwrap();
    racers.into_iter().map(|racer| device.end_race(racer)).collect()
}

#[test]
fn a_race_goes_on_without_those_that_fail_early_or_late() {
    let workload = Workload::parse("matmul:m=16,n=16,k=16").unwrap();
    let mut options = common::device_options(1);
    options.run_timeout = Duration::from_millis(500);
    let mut device = Device::new(workload, &host::target(), options).unwrap();
    let good = || matmul_and("");
    let sources = [
        ProgramSource::Lowered("program of sorts".to_owned()),
        good(),
        matmul_and("for t in 1000000000000000 { C[0, 0] += A[0, 0] first never }"),
        matmul_and("C[3, 5] = 1000.0"),
        good(),
    ];
    let outcomes = raced(&mut device, &sources);
    let classes: Vec<_> = outcomes.iter().map(Outcome::class).collect();
    let [instantiation, timeout, wrong] =
        [ErrorClass::InstantiationError, ErrorClass::RunTimeout, ErrorClass::WrongAnswer].map(Some);
    assert_eq!(classes, [instantiation, None, timeout, wrong, None], "{outcomes:?}");
}

#[test]
fn a_race_leaves_nothing_in_scratch_that_could_pass_for_right() {
    let workload = Workload::parse("matmul:m=16,n=16,k=16").unwrap();
    let mut device = Device::new(workload, &host::target(), common::device_options(1)).unwrap();
    let sources = [
        matmul_and("alloc S S[0] = 0.0 C[0, 0] += S[0] first never"),
        matmul_and("alloc S C[0, 0] += S[0] first never"),
    ];
    let outcomes = raced(&mut device, &sources);
    let classes: Vec<_> = outcomes.iter().map(Outcome::class).collect();
    assert_eq!(classes, [None, Some(ErrorClass::WrongAnswer)], "{outcomes:?}");
}

#[test]
fn faults_on_other_threads_are_faults_of_the_candidate() {
    if host::allowed_cpus().len() < 2 {
        eprintln!("skipped: this process has one CPU");
        return;
    }
    let good = || ProgramSource::Steps("parallel i\n".to_owned());
    check(
        2,
        &[
            ("good", good(), None),
            (
                "one thread writes far outside",
                matmul_and("parallel i in 16 { C[i * 100000000, 0] = 1.0 }"),
                Some(ErrorClass::RuntimeError),
            ),
            ("good after a crash", good(), None),
            (
                "one thread loops for ever",
                matmul_and("parallel i in 16 { for t in 1000000000000000 { C[i, 0] += A[0, 0] first never } }"),
                Some(ErrorClass::RunTimeout),
            ),
            ("good at the end", good(), None),
        ],
    );
}

#[test]
fn a_device_that_rested_in_the_middle_of_its_work_measures_on() {
    let workload = Workload::parse("matmul:m=64,n=64,k=64").unwrap();
    let mut device = Device::new(workload, &host::target(), common::device_options(1)).unwrap();
    let source = || ProgramSource::Steps("split i 4 -> io ii\nreorder io k ii j\nvectorize j\n".to_owned());
    for _ in 0..3 {
        device.submit_sources(&[source(), source(), source()]);
        device.rest();
        device.wake().unwrap();
        let measured = device.measure_sources(&[source()]).unwrap();
        assert!(matches!(measured[0].outcome, Outcome::Measured(_)), "{:?}", measured[0].outcome);
    }
}
