//! Database of records.

use std::path::PathBuf;

use pyo3::prelude::*;
use serde_json::{Value as Json, json};
use tilewright::{Caches, Database, Note, Session, SharedStore, Workload, is_own, target_name};
use tilewright_device::host;

use crate::run::Worker;
use crate::value::{self, Threads};

/// Database of records: that of the command `tilewright`, or a file.
#[pyclass(frozen, module = "tilewright")]
pub struct Records {
    database: Database,
}

#[pymethods]
impl Records {
    #[new]
    #[pyo3(signature = (file=None))]
    fn new(file: Option<PathBuf>) -> PyResult<Records> {
        Ok(Records { database: Database::new(file.as_deref()).map_err(value::error)? })
    }

    /// Path of the file, which need not exist yet.
    #[getter]
    fn file(&self) -> PathBuf {
        self.database.path.clone()
    }

    fn __repr__(&self) -> String {
        format!("Records({})", self.database.name())
    }

    /// Tasks with records: a dict for each combination of workload, target, template and number of threads.
    fn tasks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let tasks = py.detach(|| -> Result<Vec<Json>, tilewright::Error> {
            let Some(store) = self.database.open_to_read()? else { return Ok(Vec::new()) };
            let tasks = store.tasks().map_err(|error| self.database.refuse(error))?;
            let task = tasks.into_iter().map(|key| {
                json!({"workload": key.workload, "target": key.target, "template": key.template, "threads": key.threads})
            });
            Ok(task.collect())
        });
        value::python(py, &tasks.map_err(value::error)?.into())
    }

    /// Best record of a workload, a command or a kernel for this machine; None without records.
    #[pyo3(signature = (workload, *, threads=Threads(1), template=None))]
    fn best<'py>(
        &self,
        py: Python<'py>,
        workload: &str,
        threads: Threads,
        template: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let best = py.detach(|| {
            if is_own(workload) {
                return Session::new(self.database.clone(), Worker::none()).best_own(
                    workload,
                    &host::target(),
                    threads.0,
                );
            }
            let workload = Workload::parse(workload).map_err(tilewright::Error::input)?;
            let target = target_name(&host::target(), Caches::Warm);
            let database = self.database.clone().before(SharedStore::of_user(None)?);
            Ok(database.records()?.best(&workload, &target, threads.0, template)?.0)
        });
        let best = best.map_err(value::error)?;
        value::python(py, &serde_json::to_value(best).expect("invariant: it is numbers and texts by name"))
    }

    /// All recorded trials as dicts, or those of one workload if its name is given.
    #[pyo3(signature = (workload=None))]
    fn trials<'py>(&self, py: Python<'py>, workload: Option<&str>) -> PyResult<Bound<'py, PyAny>> {
        let name = workload.map(|text| Workload::parse(text).map_or(text.to_owned(), |known| known.to_string()));
        let trials = py.detach(|| -> Result<Vec<Json>, tilewright::Error> {
            let Some(store) = self.database.open_to_read()? else { return Ok(Vec::new()) };
            let mut trials = Vec::new();
            let each = store.each_line(&mut |line| {
                if name.as_ref().is_none_or(|name| *name == line.record.workload) {
                    trials.push(serde_json::to_value(&line.record)?);
                }
                Ok(())
            });
            each.map_err(|error| self.database.refuse(error))?;
            Ok(trials)
        });
        value::python(py, &trials.map_err(value::error)?.into())
    }

    /// Adds the records of a file: JSON lines of this tool, or a format of another tuner. Returns how many
    /// were read, and how many are new.
    fn add<'py>(&self, py: Python<'py>, file: PathBuf) -> PyResult<Bound<'py, PyAny>> {
        let mut notes = std::sync::Mutex::new(Vec::new());
        let added = py.detach(|| {
            self.database.import_any(Some(&file), None, &|note: Note| {
                if let (Note::Message(line), Ok(mut notes)) = (note, notes.lock()) {
                    notes.push(line);
                }
            })
        });
        let (imported, format) = added.map_err(value::error)?;
        let notes = std::mem::take(notes.get_mut().expect("no thread of it panicked"));
        let (read, new) = (imported.read, imported.new);
        value::python(py, &json!({"read": read, "new": new, "format": format, "notes": notes}))
    }
}
