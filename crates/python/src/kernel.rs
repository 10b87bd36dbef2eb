//! Kernels that Python calls on arrays.

use std::path::PathBuf;

use bytes::Bytes;
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tilewright::{Caches, Database, SharedStore, Source, Workload};
use tilewright_device::host;
use tilewright_ir::Role;
use tilewright_runtime::Port;

use crate::contexts::{ContextPool, Signature};
use crate::value::{self, Threads};

/// Kernel in this process: the best recorded configuration, or the machine model's guess, compiled for this
/// machine.
#[pyclass(frozen, module = "tilewright")]
pub struct Kernel {
    workload: String,
    contexts: ContextPool,
    inputs: Vec<Signature>,
    outputs: Vec<Signature>,
    /// Recorded seconds per run.
    time: Option<f64>,
}

/// Checks that all constants of a workload are given, with the right sizes.
fn checked(workload: &Workload, mut given: Vec<(String, Vec<u8>)>) -> PyResult<Vec<(String, Bytes)>> {
    let program = workload.program();
    let mut found = Vec::new();
    for (_, wanted) in program.arguments().filter(|(_, buffer)| buffer.role == Role::ConstInput) {
        let name = &wanted.name;
        let at = given.iter().position(|(known, _)| known.eq_ignore_ascii_case(name)).ok_or_else(|| {
            value::refuse(format!("{name} is constant (give constants={{\"{name}\": array}}, or leave const= out)"))
        })?;
        let (_, bytes) = given.remove(at);
        let n_bytes = wanted.size_bytes().unwrap_or(0);
        if bytes.len() as u64 != n_bytes {
            let reason = format!("{name} has {n_bytes} bytes of {}, not {}", wanted.dtype.name(), bytes.len());
            return Err(value::refuse(reason));
        }
        found.push((name.clone(), Bytes::from(bytes)));
    }
    match given.first() {
        None => Ok(found),
        Some((name, _)) => Err(value::refuse(format!("{name} is no constant of {workload} (`const=` says which are)"))),
    }
}

#[pymethods]
impl Kernel {
    #[new]
    #[pyo3(signature = (workload, *, threads=Threads(1), db=None, constants=Vec::new(), store=None))]
    fn new(
        py: Python,
        workload: &str,
        threads: Threads,
        db: Option<PathBuf>,
        constants: Vec<(String, Vec<u8>)>,
        store: Option<String>,
    ) -> PyResult<Kernel> {
        let (workload, threads) = (Workload::parse(workload).map_err(value::refuse)?, threads.0);
        let constants = checked(&workload, constants)?;
        let made = || -> Result<_, tilewright::Error> {
            let database = Database::new(db.as_deref())?.before(SharedStore::of_user(store.as_deref())?);
            let records = database.records()?;
            let (choice, _) = records.choose(&workload, &host::target(), threads, Caches::Warm, None)?;
            let model = choice.model(&constants)?.cpu().cloned().expect("invariant: it is for this machine's CPU");
            Ok((choice.source, model, records.notes()))
        };
        let (source, model, notes) = py.detach(made).map_err(value::error)?;
        value::warn(py, &notes)?;
        let cannot = |error| PyRuntimeError::new_err(format!("no memory or threads for {workload}: {error}"));
        let argument = |port: &Port| {
            let tensor = &model.plan().tensors[port.tensor];
            (tensor.name.clone(), tensor.dtype.name(), tensor.shape.clone())
        };
        let inputs = model.inputs().iter().map(argument).collect();
        let outputs = model.outputs().iter().map(argument).collect();
        let contexts = ContextPool::new(&model, threads).map_err(cannot)?;
        let time = if let Source::Recorded(ns) = source { Some(ns / 1e9) } else { None };
        Ok(Kernel { workload: workload.to_string(), contexts, inputs, outputs, time })
    }

    /// Workload that the kernel computes.
    #[getter]
    fn workload(&self) -> &str {
        &self.workload
    }

    /// Name, element type and shape of each input.
    #[getter]
    fn inputs(&self) -> Vec<Signature> {
        self.inputs.clone()
    }

    /// Name, element type and shape of each output.
    #[getter]
    fn outputs(&self) -> Vec<Signature> {
        self.outputs.clone()
    }

    /// Measured seconds per run; None for a guess.
    #[getter]
    fn time(&self) -> Option<f64> {
        self.time
    }

    /// Computes outputs from inputs, all of them the bytes of arrays in memory order.
    fn run(
        &self,
        py: Python,
        inputs: Vec<PyReadonlyArray1<u8>>,
        mut outputs: Vec<PyReadwriteArray1<u8>>,
    ) -> PyResult<()> {
        self.contexts.run(py, &inputs, &mut outputs)
    }
}
