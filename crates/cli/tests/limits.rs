//! Hopeless candidates: they are given up early, but only if something faster is known.

mod common;

use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Device, host};
use tilewright_ir::op::Workload;
use tilewright_search::{ErrorClass, Outcome};

/// Matrix product followed by half a second of sequential additions that do not change it.
const SLOW: &str = "program \"slow\"
buffer A: f32[16, 16] global input
buffer B: f32[16, 16] global input
buffer C: f32[16, 16] global output
buffer T: f32[1] global temporary
loops i, j, k, t
run {
    for i in 16 { for j in 16 { for k in 16 { C[i, j] += A[i, k] * B[k, j] first k == 0 } } }
    alloc T for t in 400000000 { T[0] += A[0, 0] first t == 0 }
}";

/// Measures sources in one batch.
fn measure(sources: &[ProgramSource], to_the_end: bool) -> Vec<Outcome> {
    let workload = Workload::parse("matmul:m=16,n=16,k=16").unwrap();
    let mut options = common::device_options(1);
    options.n_workers = 2;
    options.to_the_end = to_the_end;
    let mut device = Device::new(workload, &host::target(), options).unwrap();
    device.measure_sources(sources).unwrap().into_iter().map(|measured| measured.outcome).collect()
}

fn slow() -> ProgramSource {
    ProgramSource::Lowered(SLOW.to_owned())
}

fn fast() -> ProgramSource {
    ProgramSource::Steps(String::new())
}

#[test]
fn a_hopeless_candidate_is_given_up_beside_a_fast_one() {
    let [slow, fast] = measure(&[slow(), fast()], false).try_into().unwrap();
    assert!(fast.timing().is_some(), "{fast:?}");
    let Outcome::Failed { class: ErrorClass::RunTimeout, message } = slow else { panic!("{slow:?}") };
    assert!(message.contains("where the fastest so far took"), "{message}");
}

#[test]
fn a_slow_candidate_is_measured_where_nothing_faster_is_known() {
    let outcome = &measure(&[slow()], false)[0];
    assert!(outcome.timing().is_some_and(|timing| timing.median_ns > 0.3e9), "{outcome:?}");
}

#[test]
fn a_slow_candidate_is_measured_beside_a_fast_one_where_all_are_run_to_the_end() {
    let outcomes = measure(&[slow(), fast()], true);
    assert!(outcomes.iter().all(|outcome| outcome.timing().is_some()), "{outcomes:?}");
}
