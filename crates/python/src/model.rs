//! ONNX models that Python calls on arrays.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tilewright::{CPU, Cache, Database, DeviceSpec, Error, HOST, SharedStore, one_line};
use tilewright_graph::{Bindings, Graph, Problem, Reason, problems_text, specialise};
use tilewright_model::{CompileOptions, ValueId, compile_known, lower, read_model};
use tilewright_runtime::AnyModel;

use crate::contexts::{ContextPool, Signature};
use crate::value::{self, Threads, Whole};

/// Interval of checks for an interrupt while Python waits for a model.
const WAIT: Duration = Duration::from_millis(50);

/// Note on an option that has no effect.
const NO_BF16: &str = "bf16=True changes nothing: this CPU has no products of bf16 that are faster than those of f32";

/// Model to load, with options.
struct ModelRequest {
    file: PathBuf,
    bindings: Bindings,
    /// Shapes of the arrays that inputs are bound to, by name.
    bound_shapes: Vec<(String, Vec<usize>)>,
    threads: usize,
    exact: bool,
    bf16: bool,
    db: Option<PathBuf>,
    store: Option<String>,
}

/// Model with memory and threads, and its inputs and outputs.
struct LoadedModel {
    contexts: ContextPool,
    inputs: Vec<Signature>,
    outputs: Vec<Signature>,
    n_untuned: usize,
    /// Messages about a store that could not be used, or an option that has no effect.
    notes: Vec<String>,
}

impl ModelRequest {
    /// Checks that arrays have the shapes of the inputs that are bound to them, as far as these are known.
    fn check_bound(&self, graph: &Graph) -> Result<(), String> {
        for (name, found) in &self.bound_shapes {
            let Some((_, value)) = graph.values().find(|(_, value)| value.name == *name) else { continue };
            let given = self.bindings.shapes.iter().rfind(|(of, _)| of == name).map(|(_, shape)| shape.clone());
            let declared = || self.bindings.bound(value.declared.as_ref()?.dims.as_ref()?).ok();
            let default = value.constant.as_ref().map(|constant| constant.shape().to_vec());
            if let Some(shape) = given.or(default).or_else(declared).filter(|shape| shape != found) {
                return Err(format!("values: {name} is an array of shape {found:?}, and the input has {shape:?}"));
            }
        }
        Ok(())
    }

    fn load(&self) -> Result<LoadedModel, Error> {
        let input = |what: &dyn std::fmt::Display| {
            Error::input(format!("{}: {}", self.file.display(), in_python(&one_line(&what.to_string()))))
        };
        if self.exact && self.bf16 {
            return Err(input(&"exact=True and bf16=True exclude each other (give one of them)"));
        }
        let graph = read_model(&self.file)?.graph;
        self.check_bound(&graph).map_err(|why| input(&why))?;
        let special = specialise(&graph, &self.bindings);
        drop(graph);
        match &special.problems[..] {
            [] => {}
            problems => return Err(input(&told(problems))),
        }
        let target = DeviceSpec { device: CPU, target: HOST, threads: self.threads }.runnable_target()?;
        let mut fused = lower(&special.graph, self.exact, &target, self.threads).map_err(|error| input(&error))?;
        drop(special);
        if self.bf16 {
            fused.round_factors(&target);
        }
        let no_bf16 = (self.bf16 && !target.prefers_dot2()).then(|| NO_BF16.to_owned());
        let store = SharedStore::of_user(self.store.as_deref())?;
        let records = Database::new(self.db.as_deref())?.before(store).records()?;
        let failed = |what: &dyn std::fmt::Display| Error::failed(format!("{}: {what}", self.file.display()));
        let cache = Cache::new(None)?;
        let making = CompileOptions { cache: &cache, for_runs: true };
        let compiled = compile_known(fused, &target, self.threads, &records, making).map_err(|error| failed(&error))?;
        let AnyModel::Cpu(model) = &compiled.model else { unreachable!("it is for this machine's CPU") };
        let net = &compiled.fused.net;
        let argument = |id: &ValueId| {
            let value = net.value(*id);
            (value.name.clone(), value.dtype.name(), value.ty().shape)
        };
        let inputs = net.inputs.iter().map(argument).collect();
        let outputs = net.outputs.iter().map(argument).collect();
        let notes = records.notes().into_iter().chain(no_bf16).collect();
        let contexts = ContextPool::new(model, self.threads);
        let contexts = contexts.map_err(|error| failed(&format!("no memory or threads for a run: {error}")))?;
        Ok(LoadedModel { contexts, inputs, outputs, n_untuned: compiled.n_guessed, notes })
    }
}

/// Formats problems as one text: those to be fixed first, or all that are unsupported.
fn told(problems: &[Problem]) -> String {
    match problems.iter().find(|problem| !problem.is_unsupported()) {
        Some(Problem { reason: Reason::Unbound(unbound), .. }) => {
            let list = |pairs: Vec<String>| format!("{{{}}}", pairs.join(", "));
            let (dims, shapes) = (unbound.dims(), unbound.shapes());
            let dims: Vec<String> = dims.iter().map(|(name, size)| format!("{name:?}: {size}")).collect();
            let shapes: Vec<String> = shapes.iter().map(|(name, shape)| format!("{name:?}: {shape:?}")).collect();
            let named = [("dims", dims), ("shapes", shapes)].into_iter().filter(|(_, pairs)| !pairs.is_empty());
            let keywords: Vec<String> = named.map(|(keyword, pairs)| format!("{keyword}={}", list(pairs))).collect();
            format!("{} (give all, such as {})", unbound.missing(), keywords.join(", "))
        }
        Some(problem) => problem.to_string(),
        None => problems_text(problems),
    }
}

/// Replaces the command's options in a message's hints by those of `tilewright.load`.
fn in_python(text: &str) -> String {
    let options = [("--dim ", "dims"), ("--shape ", "shapes"), ("--set ", "values")];
    let (mut out, mut rest) = (String::new(), text);
    let next = |rest: &str| options.iter().filter_map(|of| Some((rest.find(of.0)?, *of))).min();
    while let Some((start, (option, keyword))) = next(rest) {
        out += &rest[..start];
        rest = &rest[start + option.len()..];
        let ends = [" or --", " for ", " does not fit", " out)", ": ", ")"].iter().filter_map(|end| rest.find(end));
        let (binding, behind) = rest.split_at(ends.min().unwrap_or(rest.len()));
        let (name, value) = binding.rsplit_once('=').unwrap_or((binding, "…"));
        let value = if keyword == "shapes" { format!("[{value}]") } else { value.to_owned() };
        out += &format!("{keyword}={{\"{name}\": {value}}}");
        rest = behind;
    }
    out + rest
}

/// Runs work in a separate thread, so that an interrupt of Python need not wait for it. After an interrupt,
/// the thread continues, and its result is dropped.
fn interruptible<T: Send + 'static>(py: Python, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let (sender, mut receiver) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("tilewright".to_owned());
    let thread = thread.spawn(move || {
        let _ = sender.send(work());
    });
    thread.map_err(|error| PyRuntimeError::new_err(format!("a thread: {error}")))?;
    loop {
        // A receiver can be used by one thread at a time.
        let receiver = &mut receiver;
        match py.detach(move || receiver.recv_timeout(WAIT)) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("loading ended with a bug of tilewright"));
            }
        }
    }
}

/// ONNX model in this process, with the best recorded kernels, or the machine model's guesses, compiled for
/// this machine.
#[pyclass(frozen, module = "tilewright")]
pub struct Model {
    file: PathBuf,
    loaded: LoadedModel,
}

#[pymethods]
impl Model {
    #[new]
    #[pyo3(signature = (file, *, dims=Vec::new(), shapes=Vec::new(), values=Vec::new(), threads=Threads(1), exact=false, bf16=false, db=None, store=None))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        py: Python,
        file: PathBuf,
        dims: Vec<(String, Whole<usize>)>,
        shapes: Vec<(String, Vec<Whole<usize>>)>,
        values: Vec<(String, String, Option<Vec<usize>>)>,
        threads: Threads,
        exact: bool,
        bf16: bool,
        db: Option<PathBuf>,
        store: Option<String>,
    ) -> PyResult<Model> {
        let dims = dims.into_iter().map(|(name, size)| (name, size.0)).collect();
        let shape = |shape: Vec<Whole<usize>>| shape.into_iter().map(|size| size.0).collect();
        let shapes = shapes.into_iter().map(|(name, sizes)| (name, shape(sizes))).collect();
        let bound_shapes = values.iter().filter_map(|(name, _, shape)| Some((name.clone(), shape.clone()?))).collect();
        let values = values.into_iter().map(|(name, numbers, _)| (name, numbers)).collect();
        let (fold_bytes, most_conditions) = (usize::MAX, usize::MAX);
        let bindings = Bindings { dims, shapes, values, fold_bytes, most_conditions, ..Bindings::default() };
        let threads = threads.0;
        let request = ModelRequest { file: file.clone(), bindings, bound_shapes, threads, exact, bf16, db, store };
        let loaded = interruptible(py, move || request.load())?.map_err(value::error)?;
        value::warn(py, &loaded.notes)?;
        Ok(Model { file, loaded })
    }

    /// File of the model.
    #[getter]
    fn file(&self) -> &Path {
        &self.file
    }

    /// Name, element type and shape of each input.
    #[getter]
    fn inputs(&self) -> Vec<Signature> {
        self.loaded.inputs.clone()
    }

    /// Name, element type and shape of each output.
    #[getter]
    fn outputs(&self) -> Vec<Signature> {
        self.loaded.outputs.clone()
    }

    /// Number of distinct kernels without records, whose configurations the machine model guessed.
    #[getter]
    fn n_untuned(&self) -> usize {
        self.loaded.n_untuned
    }

    /// Computes outputs from inputs, all of them the bytes of arrays in memory order.
    fn run(
        &self,
        py: Python,
        inputs: Vec<PyReadonlyArray1<u8>>,
        mut outputs: Vec<PyReadwriteArray1<u8>>,
    ) -> PyResult<()> {
        self.loaded.contexts.run(py, &inputs, &mut outputs)
    }
}
