//! Searches to ask and tell.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use tilewright_search::{ErrorClass, Outcome, SEARCHES, Timing, Trial};

use crate::space::Space;
use crate::value;

/// A search over a space: `ask` it what to measure, and `tell` it what became of that.
///
/// `name` is one of `searches()`, with its options behind a colon, such as `"genetic:population=50"`. What is
/// proposed follows from the seed and from what was told. Nothing is proposed that is not legal, and nothing
/// twice. `ask(1)` each time finds most with least; a larger number is for what is measured side by side.
/// Results are made small, or great with `maximize`.
#[pyclass(frozen, module = "tilewright")]
pub struct Search {
    space: Py<Space>,
    name: String,
    maximize: bool,
    search: Mutex<Box<dyn tilewright_search::Search>>,
}

#[pymethods]
impl Search {
    #[new]
    #[pyo3(signature = (name, space, seed=0, *, maximize=false))]
    fn new(name: &str, space: Bound<Space>, seed: u64, maximize: bool) -> PyResult<Search> {
        let search = tilewright_search::build(name, &space.get().space, seed).map_err(value::refuse)?;
        Ok(Search { space: space.unbind(), name: name.to_owned(), maximize, search: Mutex::new(search) })
    }

    /// The space.
    #[getter]
    fn space(&self, py: Python) -> Py<Space> {
        self.space.clone_ref(py)
    }

    /// The name, with options.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// At most `n` configurations to measure, none of which was proposed or told before; none once the whole
    /// space was.
    #[pyo3(signature = (n=1))]
    fn ask<'py>(&self, py: Python<'py>, n: usize) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let configs = py.detach(|| {
            let mut search = self.search.lock().unwrap_or_else(PoisonError::into_inner);
            let mut configs = search.propose(n);
            // Fewer are no sign of the end.
            while !configs.is_empty() && configs.len() < n {
                let more = search.propose(n - configs.len());
                if more.is_empty() {
                    break;
                }
                configs.extend(more);
            }
            configs
        });
        configs.iter().map(|config| self.space.get().dict(py, config)).collect()
    }

    /// Takes note of what became of a configuration, whoever proposed it: its time or another metric, a
    /// number of 0 or above in whatever unit, or a `Failure`.
    fn tell(&self, py: Python, config: &Bound<PyAny>, result: &Bound<PyAny>) -> PyResult<()> {
        let trial = Trial { config: self.space.get().config(config)?, outcome: outcome(result, self.maximize)? };
        py.detach(|| self.search.lock().unwrap_or_else(PoisonError::into_inner).observe(&[trial]));
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Search({:?}, {} configurations)", self.name, self.space.get().space.size())
    }
}

/// Outcome of a configuration, from Python.
fn outcome(result: &Bound<PyAny>, maximize: bool) -> PyResult<Outcome> {
    if let Ok(kind) = result.getattr("kind") {
        let kind: String = kind.extract()?;
        let class = ErrorClass::from_name(&kind).ok_or_else(|| {
            let known = ErrorClass::ALL.map(ErrorClass::name).join(", ");
            value::refuse(format!("there is no failure of the kind {kind:?}; there are {known}"))
        })?;
        return Ok(Outcome::Failed { class, message: result.str()?.to_string() });
    }
    let cost = result.extract::<f64>().ok().and_then(|value| Timing::cost_of(value, maximize));
    let cost = cost.ok_or_else(|| {
        let found = result.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string());
        let mend = "tell a number of 0 or above, or Failure(\"runtime_error\") for a failure";
        value::refuse(format!("{found} is no result: {mend}"))
    })?;
    Ok(Outcome::Measured(Timing::of_samples(&[cost], false)))
}

/// Every search with what it does and its options.
#[pyfunction]
pub fn searches(py: Python) -> PyResult<Bound<PyAny>> {
    let row = |row: &tilewright_search::SearchRow| {
        let options = row.options.iter().map(|o| json!({"name": o.name, "default": o.default, "text": o.text}));
        json!({"name": row.name, "text": row.text, "paper": row.paper, "options": options.collect::<Vec<_>>()})
    };
    value::python(py, &SEARCHES.iter().map(row).collect())
}
