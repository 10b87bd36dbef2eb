//! Parts of a model, compiled and run.

use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tilewright::{Answer, CPU, Cache, Database, DeviceSpec, HOST, Records, SharedStore};
use tilewright_graph::{DType, Dim, Graph, Tensor, TensorType, specialise};
use tilewright_ir::Target;
use tilewright_model::{CompileOptions, Fused, OpenError, compile_known, lower, open, open_items};
use tilewright_runtime::shares::Share;
use tilewright_runtime::{Aligned, AnyModel, Context, Model, OpenDimension, Port};

use crate::api::{self, KernelContext, OrtApi, got};
use crate::boundary::caught;
use crate::claim::for_runs;
use crate::context::{PartContext, Wish, outline};
use crate::draft::{NoSessionGraph, NodeAt, PartDraft, SessionGraph, ValueIndex, value_at};
use crate::graph;
use crate::log::Log;
use crate::options::ProviderOptions;
use crate::shared::{ModelOfPart, PartKey};
use crate::sizes::{CodeForRun, Codes, DimensionNames, InputShape, Sizes};
use crate::threads::Loops;

/// State shared by all parts of a session.
pub struct SessionState {
    /// Functions of ONNX Runtime.
    pub api: OrtApi,
    /// Log of the session.
    pub log: Log,
    /// Options of the provider.
    pub options: ProviderOptions,
    /// Machine that kernels are for.
    pub target: Target,
    /// Number of threads that kernels are chosen for.
    pub threads: usize,
    /// Request to write a model with compiled parts.
    pub wish: Option<Wish>,
    /// End of the tuning time, set when tuning starts.
    tuned_until: OnceLock<Instant>,
    cache: Cache,
    /// Guard that logs only once that the cache cannot be written.
    said_unkept: Once,
    /// Database of records, if any.
    pub database: Option<Database>,
}

/// Knowledge about a part that is loaded from a model, or will be stored in one.
#[derive(Default)]
pub struct PartKnowledge {
    /// Cache for this part only.
    cache: Option<Cache>,
    /// Configurations of kernels.
    answers: Mutex<Vec<Answer>>,
    /// Specialised graph of a part with known sizes, until it is compiled.
    graph: Mutex<Option<Graph>>,
}

impl SessionState {
    /// Makes the state of a session with these options.
    ///
    /// # Errors
    /// If this machine is not supported, or an option names an invalid folder.
    pub fn new(api: OrtApi, log: Log, options: ProviderOptions, wish: Option<Wish>) -> Result<SessionState, String> {
        let threads = options.threads.unwrap_or_else(cpus);
        let place = DeviceSpec { device: CPU, target: HOST, threads: threads.min(cpus()) };
        let mut target = place.runnable_target().map_err(|error| error.to_string())?;
        if let Some(cpu) = &options.cpu {
            target.cpu.clone_from(cpu);
        }
        let cache = Cache::new(options.cache.as_deref()).map_err(|error| error.to_string())?;
        let database = Database::new(options.database.as_deref());
        let database = database.map_err(|why| log.problem(&format!("records are not used: {why}"))).ok();
        let shared = SharedStore::of_user(options.store.as_deref());
        let shared = shared.map_err(|why| log.problem(&why.to_string())).unwrap_or_default();
        let database = database.map(|database| database.before(shared));
        let (tuned_until, said_unkept) = (OnceLock::new(), Once::new());
        Ok(SessionState { api, log, options, target, threads, wish, tuned_until, cache, said_unkept, database })
    }

    /// Remaining time to tune kernels.
    pub fn time_to_tune(&self) -> Duration {
        let now = Instant::now();
        let time = Duration::from_secs_f64(self.options.tune_seconds);
        self.tuned_until.get_or_init(|| now + time).saturating_duration_since(now)
    }

    /// Makes the knowledge about a part of a model; entries to be stored in the new model, if requested, are
    /// collected.
    pub fn known(&self) -> PartKnowledge {
        PartKnowledge { cache: self.wish.as_ref().map(|_| self.cache.collecting()), ..PartKnowledge::default() }
    }

    /// Makes the knowledge from a context of a model.
    pub fn known_by(&self, context: PartContext) -> PartKnowledge {
        let cache = match (&self.wish, self.options.context_code) {
            (None, true) => Some(self.cache.with_entries(&context.entries)),
            _ => self.known().cache,
        };
        PartKnowledge { cache, answers: Mutex::new(context.answers), ..PartKnowledge::default() }
    }

    /// Lowers a part for inputs of these shapes.
    pub fn lower(&self, part: &PartDraft, shapes: &[InputShape]) -> Result<Fused, String> {
        self.fused(&specialised(part, shapes, None)?)
    }

    /// Lowers a specialised graph.
    fn fused(&self, graph: &Graph) -> Result<Fused, String> {
        let exact = self.options.exact;
        let mut fused = lower(graph, exact, &self.target, self.threads).map_err(|error| error.to_string())?;
        if self.options.bf16 {
            fused.round_factors(&self.target);
        }
        Ok(fused)
    }

    /// Lowers a part for inputs of these sizes.
    fn fused_for(&self, part: &PartDraft, sizes: &Sizes, known: &PartKnowledge) -> Result<Fused, NoCodeOfPart> {
        let names = part.dimension_names();
        let lowered = |shapes: &[InputShape], varying: &OpenDimension| {
            let graph = specialised(part, shapes, Some((&names, &varying.name)));
            graph.and_then(|graph| self.fused(&graph)).map_err(NoCodeOfPart)
        };
        match &sizes.open[..] {
            [dim] => open(dim, |size| lowered(&names.with(&sizes.shapes, &dim.name, size as usize), dim)),
            [dim, items] => open_items(items, dim, |[n, size], varying| {
                let shapes = names.with(&sizes.shapes, &items.name, n as usize);
                lowered(&names.with(&shapes, &dim.name, size as usize), varying)
            }),
            _ => match known.take_graph() {
                Some(graph) => self.fused(&graph).map_err(NoCodeOfPart),
                None => self.lower(part, &sizes.shapes).map_err(NoCodeOfPart),
            },
        }
    }

    /// Compiles a part for inputs of these sizes.
    fn compile(&self, part: &PartDraft, sizes: &Sizes, known: &PartKnowledge) -> Result<CompiledPart, String> {
        let start = Instant::now();
        let making = CompileOptions { cache: known.cache.as_ref().unwrap_or(&self.cache), for_runs: true };
        // The outer error may be due to records; the inner one is due to the part itself.
        let with = |records: &Records| -> Result<Result<(ModelOfPart, bool), String>, String> {
            let key = self.key(part, sizes, known, records);
            if let Some(made) = key.as_ref().and_then(PartKey::find) {
                // The graph holds constants of ONNX Runtime, which are released once the session has started.
                drop(known.take_graph());
                return Ok(Ok((made, true)));
            }
            let fused = match self.fused_for(part, sizes, known) {
                Ok(fused) => fused,
                Err(NoCodeOfPart(why)) => return Ok(Err(why)),
            };
            let compiled = compile_known(fused, &self.target, self.threads, records, making);
            *known.answers() = records.answers();
            let compiled = compiled.map_err(|error| error.to_string())?;
            let AnyModel::Cpu(model) = &compiled.model else { return Err("the target is no CPU".to_owned()) };
            let net = &compiled.fused.net;
            let at = |value| part.input_at(value);
            let place = |id| value_at(&net.value(id).name).and_then(at).ok_or("an input is none of the part's");
            let inputs = net.inputs.iter().map(|&id| place(id)).collect::<Result<Vec<usize>, _>>()?;
            let outputs: Vec<TensorType> = net.outputs.iter().map(|&id| net.value(id).ty()).collect();
            if outputs.len() != part.ports.outputs.len() {
                return Err("it has other outputs than the part".to_owned());
            }
            let made = ModelOfPart { model: Arc::clone(model), inputs, outputs, n_guessed: compiled.n_guessed };
            if let Some(key) = key {
                key.keep(&made);
            }
            Ok(Ok((made, false)))
        };
        let answers = known.answers().clone();
        let recorded = self.database.as_ref().map(|database| {
            let records = database.records().map_err(|error| error.to_string());
            records.and_then(|records| {
                let records = records.knowing(&answers);
                let compiled = with(&records);
                records.notes().iter().for_each(|note| self.log.problem(note));
                compiled
            })
        });
        let recorded = recorded.and_then(|compiled| {
            compiled.map_err(|why| self.log.problem(&format!("records are not used: {why}"))).ok()
        });
        let (made, is_shared) = recorded.map_or_else(|| with(&Records::default().knowing(&answers)), Ok)??;
        if let Some(line) = making.cache.take_damage() {
            self.log.problem(&line);
        }
        if let Some(line) = making.cache.refusal() {
            self.said_unkept.call_once(|| self.log.problem(&line));
        }
        self.log.note(|| {
            let (n, took, guessed) = (part.nodes.len(), start.elapsed().as_millis(), made.n_guessed);
            let how = if is_shared { "shared with another session" } else { "compiled" };
            format!("{n} nodes {how} for {sizes} in {took} ms, {guessed} kernels untuned")
        });
        Ok(CompiledPart { made, idle: Mutex::default() })
    }

    /// Key of a part that sessions may share; `None` if the part is stored in or loaded from a model, or if a
    /// shared store of records may change its answers unnoticed.
    fn key(&self, part: &PartDraft, sizes: &Sizes, known: &PartKnowledge, records: &Records) -> Option<PartKey> {
        if self.wish.is_some() || known.cache.is_some() || !known.answers().is_empty() {
            return None;
        }
        let state = records.state().ok()??;
        let database = self.database.as_ref().map(|database| &database.path);
        let ProviderOptions { exact, bf16, .. } = self.options;
        let settings = format!("{sizes:?} {:?} {} {exact} {bf16} {database:?} {state}", self.target, self.threads);
        Some(PartKey::new(&outline(part), settings, part.constants()))
    }
}

/// Makes the specialised graph of a part for inputs of these shapes; values that depend on the varying
/// dimension, if any, are not folded.
fn specialised(
    part: &PartDraft,
    shapes: &[InputShape],
    varying: Option<(&DimensionNames, &str)>,
) -> Result<Graph, String> {
    let shape = |value: ValueIndex| Some(shapes[part.input_at(value)?].clone());
    let graph = part.graph.graph(&part.nodes, &part.ports, &shape);
    let mut graph = graph.map_err(|refused| match refused {
        NoSessionGraph::Node(_, why) | NoSessionGraph::Other(why) => why,
    })?;
    let mut bindings = for_runs();
    if let Some((names, dim)) = varying {
        for (input, axis) in names.places(dim) {
            let id = graph.inputs[input];
            if let Some(dims) = graph.value_mut(id).declared.as_mut().and_then(|declared| declared.dims.as_mut()) {
                dims[axis] = Dim::Named(dim.into());
            }
        }
        bindings.open = Some(dim.to_owned());
        bindings.dims = names.size_of(shapes, dim).map(|size| (dim.to_owned(), size)).into_iter().collect();
    }
    let special = specialise(&graph, &bindings);
    special.problems.first().map_or(Ok(special.graph), |problem| Err(problem.to_string()))
}

impl PartKnowledge {
    /// Adds the specialised graph of a part with known sizes.
    pub fn with_graph(self, graph: Option<Graph>) -> PartKnowledge {
        PartKnowledge { graph: Mutex::new(graph), ..self }
    }

    fn take_graph(&self) -> Option<Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn answers(&self) -> MutexGuard<'_, Vec<Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of CPUs that this process may use.
fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Reason why a part has no code for sizes, regardless of records.
struct NoCodeOfPart(String);

impl From<OpenError> for NoCodeOfPart {
    fn from(error: OpenError) -> NoCodeOfPart {
        NoCodeOfPart(error.to_string())
    }
}

/// Code of a part for sizes of its inputs.
struct CompiledPart {
    made: ModelOfPart,
    /// Memory of finished runs: as many entries as runs have been active at the same time.
    idle: Mutex<Vec<RunMemory>>,
}

/// Memory of a run.
struct RunMemory {
    context: Context,
    shares: Vec<Share>,
}

impl RunMemory {
    fn new(model: &Arc<Model>, threads: usize) -> Result<RunMemory, String> {
        let context = Context::for_others(model, threads).map_err(|error| format!("no memory for a run: {error}"))?;
        Ok(RunMemory { context, shares: (0..threads).map(|_| Share::default()).collect() })
    }
}

impl CompiledPart {
    fn idle(&self) -> MutexGuard<'_, Vec<RunMemory>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Types of the part's outputs in a run at sizes of the open dimensions.
    fn outputs_at(&self, of_run: &[i64]) -> Vec<TensorType> {
        let ModelOfPart { model, outputs, .. } = &self.made;
        let mut outputs = outputs.clone();
        for (ty, port) in outputs.iter_mut().zip(model.outputs()) {
            let tensor = &model.plan().tensors[port.tensor];
            if let (Some(&size), Some((axis, open))) = (of_run.first(), tensor.open) {
                ty.shape[axis] = open.at(size) as usize;
            }
            if let (Some(&n_items), true) = (of_run.last(), tensor.in_items) {
                ty.shape[0] = n_items as usize;
            }
        }
        outputs
    }

    /// Copies inputs that are not aligned to their elements, which ONNX Runtime allows.
    ///
    /// # Errors
    /// If memory does not suffice.
    fn copies_of_unaligned(&self, inputs: &[&[u8]]) -> Result<Vec<Option<Aligned>>, String> {
        let copy = |(&at, port): (&usize, &Port)| {
            let bytes = inputs[at];
            if (bytes.as_ptr() as usize).is_multiple_of(port.align) {
                return Ok(None);
            }
            let copy = Aligned::new(bytes.len() as u64);
            let mut copy = copy.map_err(|error| format!("no memory for an input that is not aligned: {error}"))?;
            copy.bytes_mut().copy_from_slice(bytes);
            Ok(Some(copy))
        };
        self.made.inputs.iter().zip(self.made.model.inputs()).map(copy).collect()
    }
}

/// Code of a part.
enum PartCode {
    /// Code for the only possible shapes of the inputs.
    Fixed(Box<CompiledPart>),
    /// Code for the most recent sizes.
    Free(Codes<CompiledPart>),
}

/// Positions of a part's values among those of the node that represents it.
pub struct Positions {
    /// Positions of the inputs.
    pub inputs: Vec<usize>,
    /// Positions of the constants; `None` for those that ONNX Runtime does not pass.
    pub constants: Vec<Option<usize>>,
    /// Positions of the outputs.
    pub outputs: Vec<usize>,
}

/// Part of a model that runs here.
pub struct PartOfModel {
    session: Arc<SessionState>,
    draft: PartDraft,
    code: PartCode,
    known: PartKnowledge,
}

impl PartOfModel {
    /// Compiles a part, or prepares it to be compiled once its sizes are known. Constants of the draft are
    /// used only until the function returns.
    ///
    /// # Errors
    /// If there is no code for the part.
    pub fn new(
        session: &Arc<SessionState>,
        draft: &SessionGraph,
        nodes: Vec<NodeAt>,
        known: PartKnowledge,
    ) -> Result<PartOfModel, String> {
        let mut draft = PartDraft::new(draft.clone(), nodes);
        let code = match draft.fixed_shapes() {
            Some(shapes) => {
                let sizes = Sizes { shapes, open: Vec::new() };
                session.tune(&draft, &sizes.shapes);
                PartCode::Fixed(Box::new(session.compile(&draft, &sizes, &known)?))
            }
            None => PartCode::Free(Codes::new(draft.dimension_names())),
        };
        draft.forget_constants();
        Ok(PartOfModel { session: Arc::clone(session), draft, code, known })
    }

    /// Makes the context of the part, which will be stored in a model.
    pub fn context(&self) -> PartContext {
        PartContext {
            model: outline(&self.draft),
            answers: self.known.answers().clone(),
            entries: self.known.cache.as_ref().map_or(Vec::new(), Cache::entries),
            notes: Vec::new(),
        }
    }

    /// Compiled model of a part with known sizes.
    #[cfg(test)]
    pub fn model(&self) -> &Arc<Model> {
        match &self.code {
            PartCode::Fixed(compiled) => &compiled.made.model,
            PartCode::Free(_) => panic!("the sizes are not known"),
        }
    }

    /// Whether constants must be passed to each run, as the part is compiled for the sizes of runs.
    pub fn needs_constants(&self) -> bool {
        matches!(self.code, PartCode::Free(_))
    }

    /// Finds the part's values among the inputs and outputs of the node that represents it.
    ///
    /// # Errors
    /// If a value is missing.
    pub fn positions(&self, inputs: &[String], outputs: &[String]) -> Result<Positions, String> {
        let name = |value: &ValueIndex| &self.draft.graph.values[*value].name;
        let find = |list: &[String], value: &ValueIndex| list.iter().position(|other| other == name(value));
        let must = |list: &[String], value: &ValueIndex| {
            find(list, value).ok_or_else(|| format!("`{}` is not passed to the part", name(value)))
        };
        Ok(Positions {
            inputs: self.draft.ports.inputs.iter().map(|value| must(inputs, value)).collect::<Result<_, _>>()?,
            constants: self.draft.ports.constants.iter().map(|value| find(inputs, value)).collect(),
            outputs: self.draft.ports.outputs.iter().map(|value| must(outputs, value)).collect::<Result<_, _>>()?,
        })
    }

    /// Runs the part.
    ///
    /// # Errors
    /// If inputs do not match their declarations, no code can be made for their sizes, or memory does not
    /// suffice.
    ///
    /// # Safety
    /// The run is active, and its node has these positions.
    pub unsafe fn run(&self, positions: &Positions, run: *mut KernelContext) -> Result<(), String> {
        let api = &self.session.api;
        let mut shapes = Vec::with_capacity(positions.inputs.len());
        let mut inputs = Vec::with_capacity(positions.inputs.len());
        for (&at, &value) in positions.inputs.iter().zip(&self.draft.ports.inputs) {
            // SAFETY: promised by the caller.
            let (dtype, shape, bytes) = unsafe { passed(api, run, at)? };
            let declared = self.draft.graph.values[value].declared.as_ref();
            if declared.is_none_or(|declared| declared.dtype != dtype) {
                return Err(format!("`{}` has elements of type {dtype}", self.draft.graph.values[value].name));
            }
            shapes.push(shape);
            inputs.push(bytes);
        }
        match &self.code {
            PartCode::Fixed(compiled) => {
                for ((shape, &value), bytes) in shapes.iter().zip(&self.draft.ports.inputs).zip(&inputs) {
                    if self.draft.graph.fixed_shape(value).as_ref() != Some(shape) {
                        let name = &self.draft.graph.values[value].name;
                        return Err(format!("`{name}` has the shape {shape:?} of {} bytes", bytes.len()));
                    }
                }
                // SAFETY: promised by the caller.
                unsafe { self.run_compiled(compiled, &[], positions, &inputs, run) }
            }
            PartCode::Free(codes) => {
                // SAFETY: promised by the caller.
                let found = unsafe { self.compiled_for(codes, &shapes, positions, run)? };
                let Some(Ok(compiled)) = found.pending.get() else { unreachable!("it was waited for") };
                // SAFETY: promised by the caller.
                unsafe { self.run_compiled(compiled, &found.of_run, positions, &inputs, run) }
            }
        }
    }

    /// Returns the code for shapes, which is made if necessary. Only runs with the same sizes wait for it.
    ///
    /// # Errors
    /// If the code cannot be made; the next run tries again.
    ///
    /// # Safety
    /// As [`PartOfModel::run`].
    unsafe fn compiled_for(
        &self,
        codes: &Codes<CompiledPart>,
        shapes: &[InputShape],
        positions: &Positions,
        run: *mut KernelContext,
    ) -> Result<CodeForRun<CompiledPart>, String> {
        let log = &self.session.log;
        loop {
            let (found, dropped) = codes.find(shapes);
            if let Some(dropped) = dropped {
                let advice = "give free_sizes=leave where sizes keep changing";
                log.note(|| format!("code for {dropped} is dropped, as it was met least lately ({advice})"));
            }
            let mut is_made_here = false;
            let make = || {
                is_made_here = true;
                // SAFETY: promised by the caller.
                let draft = unsafe { self.with_constants(positions, run)? };
                caught(|| self.session.compile(&draft, &found.sizes, &self.known))
            };
            let outcome = found.pending.get_or_init(make).as_ref().map(|_| ()).map_err(String::clone);
            let Err(why) = outcome else {
                if is_made_here {
                    codes.supersede(&found);
                }
                return Ok(found);
            };
            if !codes.refuse(&found) {
                return Err(why);
            }
            if is_made_here {
                log.note(|| format!("there is no code for {}: {why}", found.sizes));
            }
        }
    }

    /// Makes a draft with copies of the constants that are passed to a run.
    ///
    /// # Safety
    /// As [`PartOfModel::run`].
    unsafe fn with_constants(&self, positions: &Positions, run: *mut KernelContext) -> Result<PartDraft, String> {
        let mut draft = self.draft.clone();
        for (&at, &value) in positions.constants.iter().zip(&self.draft.ports.constants) {
            let missing = || format!("constant `{}` is not passed to the part", draft.graph.values[value].name);
            // SAFETY: promised by the caller.
            let (dtype, shape, bytes) = unsafe { passed(&self.session.api, run, at.ok_or_else(missing)?)? };
            let tensor = Tensor::new(TensorType::new(dtype, shape), Bytes::copy_from_slice(bytes));
            draft.graph.values[value].constant = Some(tensor.ok_or("a constant has another size than its type")?);
        }
        Ok(draft)
    }

    /// Runs code on inputs that fit its sizes; `of_run` gives the sizes of the open dimensions.
    ///
    /// # Safety
    /// As [`PartOfModel::run`].
    unsafe fn run_compiled(
        &self,
        compiled: &CompiledPart,
        of_run: &[i64],
        positions: &Positions,
        inputs: &[&[u8]],
        run: *mut KernelContext,
    ) -> Result<(), String> {
        let api = &self.session.api;
        let mut outputs: Vec<&mut [u8]> = Vec::with_capacity(compiled.made.outputs.len());
        for (&at, ty) in positions.outputs.iter().zip(compiled.outputs_at(of_run)) {
            // SAFETY: promised by the caller.
            outputs.push(unsafe { asked(api, run, at, &ty)? });
        }
        let copies = compiled.copies_of_unaligned(inputs)?;
        let whole = compiled.made.inputs.iter().zip(&copies);
        let taken: Vec<&[u8]> = whole.map(|(&at, copy)| copy.as_ref().map_or(inputs[at], Aligned::bytes)).collect();
        let idle = compiled.idle().pop();
        let mut memory = match idle {
            Some(memory) => memory,
            None => RunMemory::new(&compiled.made.model, self.session.threads)?,
        };
        let plan = compiled.made.model.plan();
        for (dim, &size) in [&plan.dim, &plan.items].into_iter().flatten().zip(of_run) {
            memory.context.set_dim(&dim.name, size).map_err(|error| error.to_string())?;
        }
        let loops = Loops { api, run, shares: &memory.shares };
        // SAFETY: loops execute each iteration once, with thread numbers below the number of shares, and no
        // two threads have the same number at a time.
        let result = unsafe { memory.context.run_on(&loops.runtime(), &taken, &mut outputs) };
        compiled.idle().push(memory);
        result.map_err(|error| error.to_string())
    }
}

/// Address for tensors without elements, for which ONNX Runtime may return none.
#[repr(align(64))]
struct Empty([u8; 0]);

static EMPTY: Empty = Empty([]);

/// Returns type, shape and bytes of an input of a run.
///
/// # Safety
/// The run is active, and the input is not written while the bytes are in use.
unsafe fn passed<'a>(
    api: &OrtApi,
    run: *mut KernelContext,
    at: usize,
) -> Result<(DType, Vec<usize>, &'a [u8]), String> {
    // SAFETY: promised by the caller; the tensor has as many bytes as its type requires.
    unsafe {
        let value = got(api, std::ptr::null(), |out| api.input(run, at, out))?;
        if value.is_null() {
            return Err(format!("input {at} of a part is missing"));
        }
        let (dtype, shape) = graph::type_of(api, value)?.ok_or("an input is of a type that is not known")?;
        let ty = TensorType::new(dtype, shape);
        let n_bytes = ty.checked_bytes().ok_or("an input is larger than memory")?;
        let data = got(api, api::nothing(), |out| api.tensor_data(value.cast_mut(), out))?;
        let start = if n_bytes == 0 { EMPTY.0.as_ptr() } else { data.cast_const().cast() };
        Ok((dtype, ty.shape, std::slice::from_raw_parts(start, n_bytes)))
    }
}

/// Returns the bytes of an output of a run, given its type.
///
/// # Safety
/// The run is active, and the output is not used elsewhere while the bytes are in use.
unsafe fn asked<'a>(api: &OrtApi, run: *mut KernelContext, at: usize, ty: &TensorType) -> Result<&'a mut [u8], String> {
    let dims: Vec<i64> = ty.shape.iter().map(|&size| size as i64).collect();
    let n_bytes = ty.checked_bytes().ok_or("an output is larger than memory")?;
    // SAFETY: promised by the caller; ONNX Runtime allocates as many bytes as the type requires.
    unsafe {
        let value = got(api, api::nothing(), |out| api.output(run, at, dims.as_ptr(), dims.len(), out))?;
        if value.is_null() {
            return Err(format!("output {at} of a part is missing"));
        }
        let data = got(api, api::nothing(), |out| api.tensor_data(value, out))?;
        let start = if n_bytes == 0 { EMPTY.0.as_ptr().cast_mut() } else { data.cast() };
        Ok(std::slice::from_raw_parts_mut(start, n_bytes))
    }
}
