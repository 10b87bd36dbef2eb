//! Searches with an ask-and-tell interface.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::json;
use tilewright_search::{ErrorClass, Outcome, SEARCHES, Timing, Trial};

use crate::space::Space;
use crate::value::{self, Whole};

/// Search over a space: `ask` returns configurations to measure, and `tell` takes their results.
///
/// `name` is one of `searches()`, with its options behind a colon, such as `"genetic:population=50"`. The
/// proposals depend on the seed and on the results told; each is legal, and none is repeated. `ask(1)` each
/// time needs the fewest trials; a larger number is for configurations that are measured in parallel. Results
/// are minimised, or maximised with `maximize`.
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
    #[pyo3(signature = (name, space, seed=Whole(0), *, maximize=false))]
    fn new(name: &str, space: Bound<Space>, seed: Whole<u64>, maximize: bool) -> PyResult<Search> {
        let search = tilewright_search::build(name, &space.get().space, seed.0).map_err(value::refuse)?;
        Ok(Search { space: space.unbind(), name: name.to_owned(), maximize, search: Mutex::new(search) })
    }

    /// Space that is searched.
    #[getter]
    fn space(&self, py: Python) -> Py<Space> {
        self.space.clone_ref(py)
    }

    /// Name of the search, with options.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Up to `n` configurations to measure, none of which was proposed or told before; empty once the space
    /// is exhausted.
    #[pyo3(signature = (n=Whole(1)))]
    fn ask<'py>(&self, py: Python<'py>, n: Whole<usize>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let n = n.0;
        let configs = py.detach(|| {
            let mut search = self.search.lock().unwrap_or_else(PoisonError::into_inner);
            let mut configs = search.propose(n);
            // Fewer than `n` do not mean that the space is exhausted.
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

    /// Records the result of a configuration, proposed by this search or not: its time or another metric, a
    /// number of 0 or above in any unit, or a `Failure`.
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
        let found = value::repr(result);
        let mend = "tell a number of 0 or above, or Failure(\"runtime_error\") for a failure";
        value::refuse(format!("{found} is no result: {mend}"))
    })?;
    Ok(Outcome::Measured(Timing::of_samples(&[cost], false)))
}

/// All searches with their descriptions and options.
#[pyfunction]
pub fn searches(py: Python) -> PyResult<Bound<PyAny>> {
    let row = |row: &tilewright_search::SearchRow| {
        let options = row.options.iter().map(|o| json!({"name": o.name, "default": o.default, "text": o.text}));
        json!({"name": row.name, "text": row.text, "paper": row.paper, "options": options.collect::<Vec<_>>()})
    };
    value::python(py, &SEARCHES.iter().map(row).collect())
}
