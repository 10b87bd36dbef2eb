//! Races of callables.

use std::ops::ControlFlow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tilewright::referee::{Rules, race_calls};

use crate::value::{self, Whole};

/// Races callables, by name, in interleaved rounds whose order is shuffled, and names the winner or declares
/// a tie; with `allow`, a relative tolerance, also reports which are slower than the first by more. An
/// exception ends the race.
///
/// The result is the dict that `tilewright race --json` prints. `time` is in seconds. All callables run in
/// this process.
#[pyfunction]
#[pyo3(signature = (callables, *, rounds=None, time=None, seed=None, allow=None))]
pub fn race<'py>(
    py: Python<'py>,
    callables: &Bound<'py, PyDict>,
    rounds: Option<Whole<usize>>,
    time: Option<f64>,
    seed: Option<Whole<u64>>,
    allow: Option<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let (mut names, mut functions) = (Vec::new(), Vec::new());
    for (name, function) in callables {
        names.push(name.extract::<String>()?);
        functions.push(function);
    }
    let seconds = |time: f64| {
        let time = Duration::try_from_secs_f64(time).ok().filter(|time| !time.is_zero());
        time.ok_or_else(|| value::refuse("time takes a number of seconds above 0"))
    };
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    let rules = Rules {
        rounds: rounds.map(|rounds| rounds.0),
        time: time.map(seconds).transpose()?,
        seed: seed.map_or_else(|| now() % 1_000_000_007, |seed| seed.0),
        allow,
    };
    let mut raised = None;
    let mut call = |at: usize| {
        if raised.is_none() {
            raised = functions[at].call0().and_then(|_| py.check_signals()).err();
        }
        if raised.is_none() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let raced = race_calls(&names, &rules, &mut call);
    match raised {
        Some(error) => Err(error),
        None => {
            let raced = raced.map_err(value::error)?;
            value::python(py, &serde_json::to_value(&raced).expect("invariant: it is numbers and text by name"))
        }
    }
}
