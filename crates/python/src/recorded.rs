//! Recorded spaces: measurements of a space, by this or other tools, on which searches can be replayed.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pyo3::prelude::*;
use serde_json::json;
use tilewright_formats::{name_of, read};
use tilewright_search::{AtBudget, Outcome, RecordedSpace, ReplayPlan};

use crate::space::Space;
use crate::value::{self, Threads, Whole};

/// Interval of checks for an interrupt of Python.
const LOOK: Duration = Duration::from_millis(50);

/// Recorded space; `open_recorded` reads one from a file of a format that `tilewright formats` lists.
#[pyclass(frozen, module = "tilewright")]
pub struct Recorded {
    recorded: RecordedSpace,
    space: Py<Space>,
    task: String,
}

/// Reads a recorded space. If the file has several tasks, `task` selects one, by its number or a part of its
/// text; `description` is the T1 file of T4 results.
#[pyfunction]
#[pyo3(signature = (file, *, task=None, description=None))]
pub fn open_recorded(
    py: Python,
    file: PathBuf,
    task: Option<String>,
    description: Option<PathBuf>,
) -> PyResult<Recorded> {
    let refuse = |error: &dyn std::fmt::Display| value::refuse(format!("{}: {error}", file.display()));
    let results = || -> PyResult<(RecordedSpace, String)> {
        let of_file = |path: &PathBuf, what: &str| tilewright::file::read(path, what).map_err(value::error);
        let description = description.as_ref().map(|path| of_file(path, "a T1 description")).transpose()?;
        let bytes = of_file(&file, "results of a tuner")?;
        let read = read(&name_of(&file), &bytes, description.as_deref(), None).map_err(|error| refuse(&error))?;
        let results = read.task(task.as_deref()).map_err(|error| refuse(&error))?;
        let recorded = results.space(&name_of(&file)).map_err(|error| refuse(&error))?;
        let notes = read.notes.iter().chain(recorded.notes()).cloned().collect();
        Ok((recorded.with_notes(notes), results.task.to_string()))
    };
    let (recorded, task) = py.detach(results)?;
    let space = Py::new(py, Space::of_json(recorded.space().clone()))?;
    Ok(Recorded { recorded, space, task })
}

#[pymethods]
impl Recorded {
    /// Space whose configurations are recorded.
    #[getter]
    fn space(&self, py: Python) -> Py<Space> {
        self.space.clone_ref(py)
    }

    /// Task that was tuned.
    #[getter]
    fn task(&self) -> &str {
        &self.task
    }

    /// Oddities of the file, one line each.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.recorded.notes().to_vec()
    }

    /// Number of configurations that were measured successfully.
    #[getter]
    fn n_valid(&self) -> usize {
        self.recorded.n_valid()
    }

    /// Best recorded time in seconds.
    #[getter]
    fn optimum(&self) -> Option<f64> {
        self.recorded.optimum_ns().map(|ns| ns / 1e9)
    }

    fn __len__(&self) -> usize {
        self.recorded.len()
    }

    fn __repr__(&self) -> String {
        format!("Recorded({}: {} configurations)", self.task, self.recorded.len())
    }

    /// Time of a configuration in seconds, or the kind of its failure.
    fn outcome<'py>(&self, config: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = config.py();
        let json = match self.recorded.outcome(&self.space.get().config(config)?) {
            Outcome::Measured(timing) => json!(timing.median_ns / 1e9),
            Outcome::Failed { class, .. } => json!(class.name()),
        };
        value::python(py, &json)
    }

    /// Runs a search several times, and returns for each budget the fraction of the optimum that each run has
    /// reached: the optimum's time divided by the best time found.
    #[pyo3(signature = (search, budgets, repeats, seed, batch, threads))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn replay<'py>(
        &self,
        py: Python<'py>,
        search: String,
        budgets: Vec<Whole<u64, 1>>,
        repeats: Whole<usize, 1>,
        seed: Whole<u64>,
        batch: Whole<usize, 1>,
        threads: Threads,
    ) -> PyResult<Bound<'py, PyAny>> {
        if budgets.is_empty() {
            return Err(value::refuse("there is no budget (give a number of trials, such as 100)"));
        }
        let plan = ReplayPlan {
            search,
            budgets: budgets.into_iter().map(|budget| budget.0).collect(),
            n_repeats: repeats.0,
            seed: seed.0,
            batch: batch.0,
            n_threads: threads.0,
            guesses: Vec::new(),
        };
        let stop = AtomicBool::new(false);
        let replay = std::thread::scope(|scope| {
            let working = scope.spawn(|| self.recorded.replay_until(&plan, &stop));
            while !working.is_finished() {
                py.detach(|| std::thread::sleep(LOOK));
                if let Err(interrupt) = py.check_signals() {
                    stop.store(true, Ordering::Relaxed);
                    py.detach(|| working.join().map(drop)).ok();
                    return Err(interrupt);
                }
            }
            let replay = working.join().map_err(|_| value::refuse("the replay ended with a bug of tilewright"))?;
            replay.map_err(value::refuse)
        })?;
        let at = |at: &AtBudget| json!({"budget": at.budget, "mean": at.mean(), "std": at.std(), "runs": at.fractions});
        let budgets: Vec<_> = replay.budgets.iter().map(at).collect();
        value::python(py, &json!({"budgets": budgets, "overhead_ms": replay.overhead_ms_per_evaluation}))
    }
}
