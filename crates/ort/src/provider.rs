//! Provider of a session.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::api::{
    Attribute, ComputeInfo, EditorApi, Ep, EpApi, FusionOptions, Graph, INT, KernelContext, NONE, OrtApi,
};
use crate::api::{Node, Status, SupportInfo, TEXT, VERSION, got, nothing, text};
use crate::boundary::{caught, guarded};
use crate::claim::claim;
use crate::context::{DOMAIN, OPERATOR, PartContext, Wish, draft_of, read_beside};
use crate::draft::{NodeAt, SessionGraph};
use crate::graph::{ContextNode, ReadGraph, ports_of, read, without_end};
use crate::name::NAME;
use crate::options::FreeSizes;
use crate::part::{PartOfModel, Positions, SessionState};

/// Provider of a session.
#[repr(C)]
pub struct Provider {
    ep: Ep,
    functions: EpApi,
    /// State of the session; without it nothing is claimed.
    session: Option<Arc<SessionState>>,
    api: OrtApi,
    /// Parts that were claimed, until they are compiled.
    claimed: Mutex<Vec<Claimed>>,
    /// File of the model; empty if it has none.
    file: OnceLock<PathBuf>,
    /// Whether parts of a graph were claimed already. Only one graph of a session may have parts, since ONNX
    /// Runtime 1.23 gives the parts of several graphs the same names.
    has_claimed: AtomicBool,
}

/// Claimed part, as reported to ONNX Runtime.
struct Claimed {
    /// Names of the part's outputs.
    outputs: Vec<String>,
    /// Part, or the reason why there is no code for it.
    part: Result<PartOfModel, String>,
}

impl Provider {
    /// Makes a provider; without a session state, it claims nothing.
    pub fn new(api: OrtApi, session: Option<SessionState>) -> Provider {
        let ep = Ep {
            version: VERSION,
            get_name,
            get_capability,
            compile,
            release_compute_infos: release_computes,
            unused: NONE,
        };
        let session = session.map(Arc::new);
        let functions = EpApi::of(&api);
        let (claimed, has_claimed) = (Mutex::default(), AtomicBool::new(false));
        Provider { ep, functions, session, api, claimed, file: OnceLock::new(), has_claimed }
    }

    /// Claims parts of a graph.
    ///
    /// # Safety
    /// Both pointers are valid, from ONNX Runtime.
    unsafe fn claim(&self, graph: *const Graph, info: *mut SupportInfo) -> Result<(), String> {
        let (api, Some(session)) = (&self.api, &self.session) else { return Ok(()) };
        // SAFETY: promised by the caller.
        let is_nested = !unsafe { got(api, null(), |out| api.parent(graph, out))? }.is_null();
        if is_nested || self.has_claimed.load(Ordering::Relaxed) {
            return Ok(());
        }
        // If anything fails here, ONNX Runtime can still run the graph.
        let outcome = caught(|| {
            // SAFETY: the graph lives until this function returns, and the draft is dropped before that.
            let found = unsafe { read(api, graph)? };
            // ONNX Runtime 1.23 does not report parents.
            if found.reads_outside {
                return Ok(());
            }
            let _ = self.file.set(found.file.clone());
            let parts = if found.contexts.is_empty() { chosen(session, &found.draft) } else { given(session, &found) };
            for (nodes, part) in parts {
                let needs_constants = part.as_ref().is_ok_and(PartOfModel::needs_constants);
                // A model with compiled parts must keep their constants.
                let drops_constants = !needs_constants && session.wish.is_none();
                let pointers: Vec<*const Node> = nodes.iter().map(|&at| found.nodes[at]).collect();
                let options = FusionOptions { version: VERSION, drops_constants };
                // SAFETY: the nodes belong to the graph.
                api.check(unsafe { self.functions.fuse(info, pointers.as_ptr(), pointers.len(), &options) })?;
                self.has_claimed.store(true, Ordering::Relaxed);
                session.log.note(|| format!("{} of {} nodes run here", nodes.len(), found.nodes.len()));
                let outputs = found.draft.ports(&nodes).outputs;
                let outputs = outputs.into_iter().map(|value| found.draft.values[value].name.clone()).collect();
                self.claimed.lock().unwrap_or_else(PoisonError::into_inner).push(Claimed { outputs, part });
            }
            drop(found.draft);
            // A part that still held a constant would read memory that ONNX Runtime may release.
            assert_eq!(Arc::strong_count(&found.mark), 1, "no part keeps constants of ONNX Runtime");
            Ok(())
        });
        outcome.or_else(|why| {
            session.log.problem(&format!("the model is left to ONNX Runtime: {why}"));
            Ok(())
        })
    }

    /// Returns the claimed part that a fused node represents.
    ///
    /// # Safety
    /// The node is a valid node of ONNX Runtime.
    unsafe fn computed(&self, node: *const Node) -> Result<Computed, String> {
        // SAFETY: promised by the caller.
        let [inputs, outputs] = unsafe { ports_of(&self.api, node)? };
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |part: &Claimed| part.outputs.iter().all(|name| outputs.contains(name));
        let at = claimed.iter().position(is_it).ok_or("a part is to be compiled that was not claimed")?;
        let part = claimed.swap_remove(at).part?;
        let positions = part.positions(&inputs, &outputs)?;
        let info = ComputeInfo { version: VERSION, create_state, compute, release_state };
        Ok(Computed { info, api: self.api, part, positions })
    }

    /// Makes the node that represents a fused node in a model with compiled parts.
    ///
    /// # Safety
    /// The node is a valid node of ONNX Runtime.
    unsafe fn context(&self, wish: &Wish, node: *const Node, part: &PartOfModel) -> Result<*mut Node, String> {
        let api = &self.api;
        // SAFETY: promised by the caller.
        let ([inputs, outputs], name) = unsafe {
            let name = got(api, null(), |out| api.node_name(node, out))?;
            (ports_of(api, node)?, text(name))
        };
        let context = part.context().to_bytes();
        let content = match wish.is_embedded {
            true => context,
            false => wish.write_beside(self.file.get().map_or(Path::new(""), |file| file), &name, &context)?.into(),
        };
        let texts = [
            ("ep_cache_context", content.as_slice()),
            ("source", NAME.to_bytes()),
            ("ep_sdk_version", env!("CARGO_PKG_VERSION").as_bytes()),
            ("partition_name", name.as_bytes()),
        ];
        let mut attributes = NewAttributes { api, all: Vec::new() };
        attributes.int("main_context", 1)?;
        attributes.int("embed_mode", i64::from(wish.is_embedded))?;
        for (attribute, text) in texts {
            attributes.text(attribute, text)?;
        }
        let c_text = |text: &str| CString::new(text).map_err(|_| "a name has a zero in it".to_owned());
        let all = |names: &[String]| names.iter().map(|name| c_text(name)).collect::<Result<Vec<_>, _>>();
        let pointers = |names: &[CString]| names.iter().map(|name| name.as_ptr()).collect::<Vec<_>>();
        let (inputs, outputs, name) = (all(&inputs)?, all(&outputs)?, c_text(&format!("{}{name}", wish.prefix))?);
        let (inputs, outputs) = (pointers(&inputs), pointers(&outputs));
        let editor = EditorApi::of(api).ok_or("this ONNX Runtime makes no models")?;
        let (operator, domain) = (c_text(OPERATOR)?, c_text(DOMAIN)?);
        let (n, list) = (attributes.all.len(), attributes.all.as_mut_ptr());
        // SAFETY: the strings are zero-terminated, and the lists have the given lengths; everything is
        // copied.
        got(api, nothing(), |out| unsafe {
            let (inputs, outputs) = ((inputs.as_ptr(), inputs.len()), (outputs.as_ptr(), outputs.len()));
            let (operator, domain, name) = (operator.as_ptr(), domain.as_ptr(), name.as_ptr());
            editor.create_node(operator, domain, name, inputs.0, inputs.1, outputs.0, outputs.1, list, n, out)
        })
    }
}

/// Attributes of a node under construction.
struct NewAttributes<'a> {
    api: &'a OrtApi,
    all: Vec<*mut Attribute>,
}

impl NewAttributes<'_> {
    fn int(&mut self, name: &str, value: i64) -> Result<(), String> {
        self.push(name, std::ptr::from_ref(&value).cast(), 1, INT)
    }

    fn text(&mut self, name: &str, text: &[u8]) -> Result<(), String> {
        self.push(name, text.as_ptr().cast(), text.len(), TEXT)
    }

    /// Adds an attribute of `len` elements, which are copied.
    fn push(&mut self, name: &str, data: *const c_void, len: usize, kind: c_int) -> Result<(), String> {
        let len =
            c_int::try_from(len).map_err(|_| format!("{name} has more than 2 GiB (give ep.context_embed_mode=0)"))?;
        let name = CString::new(name).expect("invariant: names here have no zero");
        // SAFETY: `data` has `len` elements.
        let make = |out| unsafe { self.api.create_attribute(name.as_ptr(), data, len, kind, out) };
        self.all.push(got(self.api, nothing(), make)?);
        Ok(())
    }
}

impl Drop for NewAttributes<'_> {
    fn drop(&mut self) {
        // SAFETY: the attributes were made here, and the nodes that use them have copies.
        self.all.drain(..).for_each(|attribute| unsafe { self.api.release_attribute(attribute) });
    }
}

/// Chooses and compiles the parts of a graph that run here; returns each with its nodes.
fn chosen(session: &Arc<SessionState>, draft: &SessionGraph) -> Vec<(Vec<NodeAt>, Result<PartOfModel, String>)> {
    let mut claim = claim(draft, session.options.claim, session.threads);
    for why in &claim.left {
        session.log.note(|| format!("left to ONNX Runtime: {why}"));
    }
    let mut parts = Vec::new();
    for nodes in claim.parts {
        let known = session.known().with_graph(claim.graph.take());
        match caught(|| PartOfModel::new(session, draft, nodes.clone(), known)) {
            Ok(part) if part.needs_constants() && session.options.free_sizes == FreeSizes::Leave => {
                session.log.note(|| format!("{} nodes of free sizes are left to ONNX Runtime", nodes.len()));
            }
            Ok(part) => parts.push((nodes, Ok(part))),
            Err(why) => session.log.problem(&format!("a part is left to ONNX Runtime: {why}")),
        }
    }
    parts
}

/// Loads the parts of a graph that were compiled earlier. An unusable part is claimed all the same, since no
/// other provider can run it, and fails when it is compiled.
fn given(session: &Arc<SessionState>, found: &ReadGraph) -> Vec<(Vec<NodeAt>, Result<PartOfModel, String>)> {
    let part = |node: &ContextNode| {
        let name = String::from_utf8_lossy(without_end(&node.content));
        let beside = if node.is_embedded { None } else { Some(read_beside(&found.file, &name)?) };
        let context = PartContext::from_bytes(beside.as_deref().unwrap_or(&node.content))?;
        context.notes.iter().for_each(|note| session.log.problem(note));
        let draft = draft_of(&context.model, &found.draft)?;
        let nodes = (0..draft.nodes.len()).collect();
        PartOfModel::new(session, &draft, nodes, session.known_by(context))
    };
    found.contexts.iter().map(|node| (vec![node.at], caught(|| part(node)))).collect()
}

/// Compiled part with its place in the session.
#[repr(C)]
struct Computed {
    info: ComputeInfo,
    api: OrtApi,
    part: PartOfModel,
    positions: Positions,
}

unsafe extern "C" fn get_name(_: *const Ep) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn get_capability(ep: *mut Ep, graph: *const Graph, info: *mut SupportInfo) -> *mut Status {
    // SAFETY: ONNX Runtime passes a provider that `create_ep` made.
    let provider = unsafe { &*ep.cast::<Provider>() };
    // SAFETY: the graph and the collector are valid, from ONNX Runtime.
    guarded(&provider.api, || unsafe { provider.claim(graph, info) })
}

unsafe extern "C" fn compile(
    ep: *mut Ep,
    _graphs: *const *const Graph,
    nodes: *const *const Node,
    n: usize,
    out: *mut *mut ComputeInfo,
    contexts: *mut *mut Node,
) -> *mut Status {
    // SAFETY: ONNX Runtime passes a provider that `create_ep` made.
    let provider = unsafe { &*ep.cast::<Provider>() };
    guarded(&provider.api, || {
        let mut all = Vec::with_capacity(n);
        for at in 0..n {
            // SAFETY: the list has the given number of nodes, each for a claimed part.
            all.push(Box::new(unsafe { provider.computed(*nodes.add(at))? }));
        }
        let wish = provider.session.as_ref().and_then(|session| session.wish.as_ref());
        if let Some(wish) = wish.filter(|_| !contexts.is_null()) {
            for (at, computed) in all.iter().enumerate() {
                // SAFETY: there is room for all nodes, which ONNX Runtime owns from then on.
                unsafe { *contexts.add(at) = provider.context(wish, *nodes.add(at), &computed.part)? };
            }
        }
        for (at, computed) in all.into_iter().enumerate() {
            // SAFETY: there is room for all of them.
            unsafe { *out.add(at) = Box::into_raw(computed).cast() };
        }
        Ok(())
    })
}

unsafe extern "C" fn release_computes(ep: *mut Ep, infos: *mut *mut ComputeInfo, n: usize) {
    // SAFETY: ONNX Runtime passes a provider that `create_ep` made.
    let provider = unsafe { &*ep.cast::<Provider>() };
    let status = guarded(&provider.api, || {
        for at in 0..n {
            // SAFETY: the parts were made by `compile`, and each is released once.
            drop(unsafe { Box::from_raw((*infos.add(at)).cast::<Computed>()) });
        }
        Ok(())
    });
    let _ = provider.api.check(status);
}

unsafe extern "C" fn create_state(_: *mut ComputeInfo, _: *mut c_void, out: *mut *mut c_void) -> *mut Status {
    // SAFETY: there is room for the pointer. There is no state per node, as several runs may be active at a
    // time.
    unsafe { *out = nothing() };
    nothing()
}

unsafe extern "C" fn compute(info: *mut ComputeInfo, _: *mut c_void, run: *mut KernelContext) -> *mut Status {
    // SAFETY: ONNX Runtime passes a part that `compile` made.
    let computed = unsafe { &*info.cast::<Computed>() };
    // SAFETY: the run belongs to the node with these positions.
    guarded(&computed.api, || unsafe { computed.part.run(&computed.positions, run) })
}

unsafe extern "C" fn release_state(_: *mut ComputeInfo, _: *mut c_void) {}
