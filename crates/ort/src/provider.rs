//! Provider of a session.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::api::{Api, ComputeInfo, Ep, EpApi, FusionOptions, Graph, KernelContext, NONE, Node, Status, SupportInfo};
use crate::api::{VERSION, got, nothing};
use crate::boundary::{caught, guarded};
use crate::claim::claim;
use crate::graph::{ports_of, read};
use crate::options::FreeSizes;
use crate::part::{Part, Positions, Session};

/// Name by which sessions ask for the provider.
pub const NAME: &CStr = c"TilewrightExecutionProvider";

/// Provider of a session.
#[repr(C)]
pub struct Provider {
    ep: Ep,
    functions: EpApi,
    /// Surroundings of parts; without them nothing is claimed.
    session: Option<Arc<Session>>,
    api: Api,
    /// Parts that were claimed, until they are compiled.
    claimed: Mutex<Vec<Part>>,
    /// Whether a graph had parts: only one of a session has, since ONNX Runtime 1.23 gives the parts of
    /// several the same names.
    has_claimed: AtomicBool,
}

impl Provider {
    /// A provider; without surroundings it claims nothing.
    pub fn new(api: Api, session: Option<Session>) -> Provider {
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
        Provider { ep, functions, session, api, claimed: Mutex::default(), has_claimed: AtomicBool::new(false) }
    }

    /// Claims parts of a graph.
    ///
    /// # Safety
    /// Both are ONNX Runtime's.
    unsafe fn claim(&self, graph: *const Graph, info: *mut SupportInfo) -> Result<(), String> {
        let (api, Some(session)) = (&self.api, &self.session) else { return Ok(()) };
        // SAFETY: promised by the caller.
        let is_nested = !unsafe { got(api, null(), |out| api.parent(graph, out))? }.is_null();
        if is_nested || self.has_claimed.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Whatever goes wrong here, ONNX Runtime can run the graph.
        let outcome = caught(|| {
            // SAFETY: the graph lives until this function has returned, and the draft not as long.
            let found = unsafe { read(api, graph)? };
            // ONNX Runtime 1.23 names no parents.
            if found.reads_outside {
                return Ok(());
            }
            let claim = claim(&found.draft, session.options.claim);
            for why in &claim.left {
                session.log.note(|| format!("left to ONNX Runtime: {why}"));
            }
            for nodes in claim.parts {
                let part = match caught(|| Part::new(session, &found.draft, nodes)) {
                    Ok(part) => part,
                    Err(why) => {
                        session.log.problem(&format!("a part is left to ONNX Runtime: {why}"));
                        continue;
                    }
                };
                if part.needs_constants() && session.options.free_sizes == FreeSizes::Leave {
                    session.log.note(|| format!("{} nodes of free sizes are left to ONNX Runtime", part.nodes().len()));
                    continue;
                }
                let nodes: Vec<*const Node> = part.nodes().iter().map(|&at| found.nodes[at]).collect();
                let options = FusionOptions { version: VERSION, drops_constants: !part.needs_constants() };
                // SAFETY: the nodes are those of the graph.
                api.check(unsafe { self.functions.fuse(info, nodes.as_ptr(), nodes.len(), &options) })?;
                self.has_claimed.store(true, Ordering::Relaxed);
                session.log.note(|| format!("{} of {} nodes run here", nodes.len(), found.nodes.len()));
                self.claimed.lock().unwrap_or_else(PoisonError::into_inner).push(part);
            }
            drop(found.draft);
            // Whoever still holds a constant would read what ONNX Runtime may have given back.
            assert_eq!(Arc::strong_count(&found.mark), 1, "no part keeps constants of ONNX Runtime");
            Ok(())
        });
        outcome.or_else(|why| {
            session.log.problem(&format!("the model is left to ONNX Runtime: {why}"));
            Ok(())
        })
    }

    /// The claimed part that a fused node stands for.
    ///
    /// # Safety
    /// The node is ONNX Runtime's.
    unsafe fn computed(&self, node: *const Node) -> Result<Computed, String> {
        // SAFETY: promised by the caller.
        let [inputs, outputs] = unsafe { ports_of(&self.api, node)? };
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |part: &Part| part.output_names().iter().all(|name| outputs.iter().any(|other| other == name));
        let at = claimed.iter().position(is_it).ok_or("a part is to be compiled that was not claimed")?;
        let part = claimed.swap_remove(at);
        let positions = part.positions(&inputs, &outputs)?;
        let info = ComputeInfo { version: VERSION, create_state, compute, release_state };
        Ok(Computed { info, api: self.api, part, positions })
    }
}

/// Compiled part with its place in the session.
#[repr(C)]
struct Computed {
    info: ComputeInfo,
    api: Api,
    part: Part,
    positions: Positions,
}

unsafe extern "C" fn get_name(_: *const Ep) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn get_capability(ep: *mut Ep, graph: *const Graph, info: *mut SupportInfo) -> *mut Status {
    // SAFETY: ONNX Runtime passes a provider that `create_ep` made.
    let provider = unsafe { &*ep.cast::<Provider>() };
    // SAFETY: the graph and the collector are ONNX Runtime's.
    guarded(&provider.api, || unsafe { provider.claim(graph, info) })
}

unsafe extern "C" fn compile(
    ep: *mut Ep,
    _graphs: *const *const Graph,
    nodes: *const *const Node,
    n: usize,
    out: *mut *mut ComputeInfo,
    _contexts: *mut *mut Node,
) -> *mut Status {
    // SAFETY: ONNX Runtime passes a provider that `create_ep` made.
    let provider = unsafe { &*ep.cast::<Provider>() };
    guarded(&provider.api, || {
        let mut all = Vec::with_capacity(n);
        for at in 0..n {
            // SAFETY: there are so many nodes, each for a claimed part.
            all.push(Box::new(unsafe { provider.computed(*nodes.add(at))? }));
        }
        for (at, computed) in all.into_iter().enumerate() {
            // SAFETY: there is room for so many.
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
            // SAFETY: they are those that `compile` made, each given back once.
            drop(unsafe { Box::from_raw((*infos.add(at)).cast::<Computed>()) });
        }
        Ok(())
    });
    let _ = provider.api.check(status);
}

unsafe extern "C" fn create_state(_: *mut ComputeInfo, _: *mut c_void, out: *mut *mut c_void) -> *mut Status {
    // SAFETY: there is room for the pointer. Runs have no state of their own: they may be many at a time.
    unsafe { *out = nothing() };
    nothing()
}

unsafe extern "C" fn compute(info: *mut ComputeInfo, _: *mut c_void, run: *mut KernelContext) -> *mut Status {
    // SAFETY: ONNX Runtime passes a part that `compile` made.
    let computed = unsafe { &*info.cast::<Computed>() };
    // SAFETY: the run is one of the node that the positions are of.
    guarded(&computed.api, || unsafe { computed.part.run(&computed.positions, run) })
}

unsafe extern "C" fn release_state(_: *mut ComputeInfo, _: *mut c_void) {}
