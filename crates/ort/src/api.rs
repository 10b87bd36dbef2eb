//! Functions of ONNX Runtime's C interface that this library uses, and structures of it that this library
//! fills in.
//!
//! The interface is a table of function pointers that grows at its end: a function keeps its slot in all
//! releases after the one that introduced it. Everything used here exists since version 23 of the interface
//! (ONNX Runtime 1.23), which is the version requested. A test compares slots and structures with the crate
//! `ort-sys`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

/// Version of the interface.
pub const VERSION: u32 = 23;

/// Declares opaque types of ONNX Runtime.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])* #[repr(C)] pub struct $name { _private: [u8; 0] })*
    };
}

opaque! {
    /// Error of a failed call; a null pointer means success.
    Status,
    /// Graph of a session, or a part of one.
    Graph,
    /// Node of a graph.
    Node,
    /// Value of a graph: its name, type and, for an initializer, elements.
    ValueInfo,
    /// Attribute of a node.
    Attribute,
    /// Tensor, or another kind of value that a session passes.
    Value,
    /// Type of a value.
    TypeInfo,
    /// Element type and shape of a tensor.
    TensorInfo,
    /// List of pairs of strings.
    Pairs,
    /// Options of a session.
    SessionOptions,
    /// Log of a session.
    Logger,
    /// Device that a provider may run on.
    HardwareDevice,
    /// Device together with the factory of a provider for it.
    EpDevice,
    /// Collector of the parts of a graph that a provider claims.
    SupportInfo,
    /// Run of a fused node: its inputs and outputs.
    KernelContext,
}

/// Kind of value that is a tensor.
pub const TENSOR: c_int = 1;
/// Kind of device that is a CPU.
pub const CPU: c_int = 0;
/// Error code of a failure of a provider.
pub const EP_FAIL: c_int = 11;
/// Kind of attribute that is an integer.
pub const INT: c_int = 1;
/// Kind of attribute that is a string, or bytes.
pub const TEXT: c_int = 5;
/// Error code of bad input.
pub const INVALID_ARGUMENT: c_int = 2;

/// Function that runs a piece of a loop.
pub type LoopPiece = unsafe extern "C" fn(data: *mut c_void, index: usize);

/// Table of functions.
#[derive(Clone, Copy)]
pub struct OrtApi {
    table: *const *const c_void,
}

// SAFETY: the table is constant for as long as the process lives.
unsafe impl Send for OrtApi {}
// SAFETY: as above.
unsafe impl Sync for OrtApi {}

/// Declares functions by their slots, as methods, and lists them for the test.
macro_rules! functions {
    ($of:ident, $list:ident: $($slot:literal $method:ident = $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?;)*) => {
        impl $of {
            $(
                /// Calls the function of this name.
                ///
                /// # Safety
                /// As ONNX Runtime's documentation requires: pointers are valid, and point to values of the
                /// kind that their names state.
                #[allow(clippy::too_many_arguments, reason = "ONNX Runtime's functions take so many")]
                pub unsafe fn $method(&self, $($arg: $ty),*) $(-> $ret)? {
                    type Function = unsafe extern "C" fn($($ty),*) $(-> $ret)?;
                    // SAFETY: the table has a function of this type in this slot.
                    let function = unsafe { std::mem::transmute::<*const c_void, Function>(*self.table.add($slot)) };
                    // SAFETY: promised by the caller.
                    unsafe { function($($arg),*) }
                }
            )*
        }

        #[cfg(test)]
        pub(crate) const $list: &[(&str, usize)] = &[$((stringify!($name), $slot)),*];
    };
}

functions! { OrtApi, SLOTS:
    0 create_status = CreateStatus(code: c_int, message: *const c_char) -> *mut Status;
    2 error_message = GetErrorMessage(status: *const Status) -> *const c_char;
    51 tensor_data = GetTensorMutableData(value: *mut Value, out: *mut *mut c_void) -> *mut Status;
    55 as_tensor = CastTypeInfoToTensorInfo(info: *const TypeInfo, out: *mut *const TensorInfo) -> *mut Status;
    56 kind_of = GetOnnxTypeFromTypeInfo(info: *const TypeInfo, out: *mut c_int) -> *mut Status;
    60 element_type = GetTensorElementType(info: *const TensorInfo, out: *mut c_int) -> *mut Status;
    61 rank = GetDimensionsCount(info: *const TensorInfo, out: *mut usize) -> *mut Status;
    62 dims = GetDimensions(info: *const TensorInfo, out: *mut i64, rank: usize) -> *mut Status;
    63 dim_names = GetSymbolicDimensions(info: *const TensorInfo, out: *mut *const c_char, rank: usize) -> *mut Status;
    65 tensor_info = GetTensorTypeAndShape(value: *const Value, out: *mut *mut TensorInfo) -> *mut Status;
    90 input = KernelContext_GetInput(run: *const KernelContext, at: usize, out: *mut *const Value) -> *mut Status;
    91 output = KernelContext_GetOutput(run: *mut KernelContext, at: usize, dims: *const i64, rank: usize,
                                        out: *mut *mut Value) -> *mut Status;
    93 release_status = ReleaseStatus(status: *mut Status);
    99 release_tensor_info = ReleaseTensorTypeAndShapeInfo(info: *mut TensorInfo);
    211 create_attribute = CreateOpAttr(name: *const c_char, data: *const c_void, len: c_int, kind: c_int,
                                        out: *mut *mut Attribute) -> *mut Status;
    212 release_attribute = ReleaseOpAttr(attribute: *mut Attribute);
    247 log = Logger_LogMessage(logger: *const Logger, level: c_int, message: *const c_char, file: *const c_char,
                                line: c_int, function: *const c_char) -> *mut Status;
    272 read_attribute = ReadOpAttr(attribute: *const Attribute, kind: c_int, data: *mut c_void, len: usize,
                                    out: *mut usize) -> *mut Status;
    274 parallel_for = KernelContext_ParallelFor(run: *const KernelContext, piece: LoopPiece, total: usize,
                                                 n_batches: usize, data: *mut c_void) -> *mut Status;
    289 value_name = GetValueInfoName(value: *const ValueInfo, out: *mut *const c_char) -> *mut Status;
    290 value_type = GetValueInfoTypeInfo(value: *const ValueInfo, out: *mut *const TypeInfo) -> *mut Status;
    291 editor_api = GetModelEditorApi() -> *const *const c_void;
    298 pairs = GetKeyValuePairs(pairs: *const Pairs, keys: *mut *const *const c_char,
                                 values: *mut *const *const c_char, n: *mut usize);
    300 release_pairs = ReleaseKeyValuePairs(pairs: *mut Pairs);
    307 device_type = HardwareDevice_Type(device: *const HardwareDevice) -> c_int;
    317 ep_api = GetEpApi() -> *const *const c_void;
    326 initializer = ValueInfo_GetInitializerValue(value: *const ValueInfo, out: *mut *const Value) -> *mut Status;
    331 is_constant = ValueInfo_IsConstantInitializer(value: *const ValueInfo, out: *mut bool) -> *mut Status;
    332 is_from_outside = ValueInfo_IsFromOuterScope(value: *const ValueInfo, out: *mut bool) -> *mut Status;
    334 model_path = Graph_GetModelPath(graph: *const Graph, out: *mut *const c_char) -> *mut Status;
    336 n_opsets = Graph_GetNumOperatorSets(graph: *const Graph, out: *mut usize) -> *mut Status;
    337 opsets = Graph_GetOperatorSets(graph: *const Graph, domains: *mut *const c_char, versions: *mut i64,
                                       n: usize) -> *mut Status;
    340 n_outputs = Graph_GetNumOutputs(graph: *const Graph, out: *mut usize) -> *mut Status;
    341 outputs = Graph_GetOutputs(graph: *const Graph, out: *mut *const ValueInfo, n: usize) -> *mut Status;
    344 n_nodes = Graph_GetNumNodes(graph: *const Graph, out: *mut usize) -> *mut Status;
    345 nodes = Graph_GetNodes(graph: *const Graph, out: *mut *const Node, n: usize) -> *mut Status;
    346 parent = Graph_GetParentNode(graph: *const Graph, out: *mut *const Node) -> *mut Status;
    349 node_name = Node_GetName(node: *const Node, out: *mut *const c_char) -> *mut Status;
    350 operator = Node_GetOperatorType(node: *const Node, out: *mut *const c_char) -> *mut Status;
    351 domain = Node_GetDomain(node: *const Node, out: *mut *const c_char) -> *mut Status;
    353 n_node_inputs = Node_GetNumInputs(node: *const Node, out: *mut usize) -> *mut Status;
    354 node_inputs = Node_GetInputs(node: *const Node, out: *mut *const ValueInfo, n: usize) -> *mut Status;
    355 n_node_outputs = Node_GetNumOutputs(node: *const Node, out: *mut usize) -> *mut Status;
    356 node_outputs = Node_GetOutputs(node: *const Node, out: *mut *const ValueInfo, n: usize) -> *mut Status;
    357 n_captured = Node_GetNumImplicitInputs(node: *const Node, out: *mut usize) -> *mut Status;
    358 captured = Node_GetImplicitInputs(node: *const Node, out: *mut *const ValueInfo, n: usize) -> *mut Status;
    359 n_attributes = Node_GetNumAttributes(node: *const Node, out: *mut usize) -> *mut Status;
    360 attributes = Node_GetAttributes(node: *const Node, out: *mut *const Attribute, n: usize) -> *mut Status;
    363 attribute_kind = OpAttr_GetType(attribute: *const Attribute, out: *mut c_int) -> *mut Status;
    364 attribute_name = OpAttr_GetName(attribute: *const Attribute, out: *mut *const c_char) -> *mut Status;
    365 n_subgraphs = Node_GetNumSubgraphs(node: *const Node, out: *mut usize) -> *mut Status;
    379 session_entries = GetSessionOptionsConfigEntries(options: *const SessionOptions, out: *mut *mut Pairs)
        -> *mut Status;
}

/// Message of a failed call, from ONNX Runtime.
pub type OrtFailure = String;

/// Returns a value that a function writes through a pointer.
///
/// # Errors
/// If the function fails.
pub fn got<T>(api: &OrtApi, empty: T, call: impl FnOnce(*mut T) -> *mut Status) -> Result<T, OrtFailure> {
    let mut out = empty;
    let status = call(&mut out);
    api.check(status)?;
    Ok(out)
}

impl OrtApi {
    /// Returns the function table of the process's ONNX Runtime; `None` if it is older than 1.23.
    ///
    /// # Safety
    /// `base` is the pointer that ONNX Runtime passed.
    pub unsafe fn of(base: *const OrtApiBase) -> Option<OrtApi> {
        // SAFETY: promised by the caller.
        let table = unsafe { ((*base).get_api)(VERSION) };
        (!table.is_null()).then_some(OrtApi { table })
    }

    /// Converts a status to a result, and releases it.
    ///
    /// # Errors
    /// The message of a status that is not a success.
    pub fn check(&self, status: *mut Status) -> Result<(), OrtFailure> {
        if status.is_null() {
            return Ok(());
        }
        // SAFETY: the status came from a function of this table, and is owned here.
        let message = unsafe {
            let message = text(self.error_message(status));
            self.release_status(status);
            message
        };
        Err(message)
    }

    /// Returns a list whose length one function returns, and whose elements another one writes.
    ///
    /// # Errors
    /// If one of the functions fails.
    pub fn list<T: Copy>(
        &self,
        empty: T,
        count: impl FnOnce(*mut usize) -> *mut Status,
        fill: impl FnOnce(*mut T, usize) -> *mut Status,
    ) -> Result<Vec<T>, OrtFailure> {
        let mut list = vec![empty; got(self, 0, count)?];
        self.check(fill(list.as_mut_ptr(), list.len()))?;
        Ok(list)
    }
}

/// Copies the string at a pointer; empty if it is null.
///
/// # Safety
/// The pointer is null, or points to a zero-terminated string.
pub unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Access to the function tables.
#[repr(C)]
pub struct OrtApiBase {
    /// Returns the table of a version; null if the version is not supported.
    pub get_api: unsafe extern "C" fn(version: u32) -> *const *const c_void,
    /// Returns the version of ONNX Runtime.
    pub get_version: unsafe extern "C" fn() -> *const c_char,
}

/// Options of a fused node.
#[repr(C)]
pub struct FusionOptions {
    /// Version of the interface.
    pub version: u32,
    /// Whether constants are excluded from the inputs of the fused node.
    pub drops_constants: bool,
}

/// Functions for providers.
#[derive(Clone, Copy)]
pub struct EpApi {
    table: *const *const c_void,
}

// SAFETY: as for `OrtApi`.
unsafe impl Send for EpApi {}
// SAFETY: as for `OrtApi`.
unsafe impl Sync for EpApi {}

functions! { EpApi, EP_SLOTS:
    0 create_device = CreateEpDevice(factory: *mut EpFactory, device: *const HardwareDevice, metadata: *const Pairs,
                                     options: *const Pairs, out: *mut *mut EpDevice) -> *mut Status;
    2 fuse = EpGraphSupportInfo_AddNodesToFuse(info: *mut SupportInfo, nodes: *const *const Node, n: usize,
                                               options: *const FusionOptions) -> *mut Status;
}

impl EpApi {
    /// Returns the function table for providers.
    pub fn of(api: &OrtApi) -> EpApi {
        // SAFETY: the function takes no arguments.
        EpApi { table: unsafe { api.ep_api() } }
    }
}

/// Functions that make models.
#[derive(Clone, Copy)]
pub struct EditorApi {
    table: *const *const c_void,
}

functions! { EditorApi, EDITOR_SLOTS:
    6 create_node = CreateNode(operator: *const c_char, domain: *const c_char, name: *const c_char,
                               inputs: *const *const c_char, n_inputs: usize, outputs: *const *const c_char,
                               n_outputs: usize, attributes: *mut *mut Attribute, n_attributes: usize,
                               out: *mut *mut Node) -> *mut Status;
}

impl EditorApi {
    /// Returns the function table for making models; `None` if ONNX Runtime is built without it.
    pub fn of(api: &OrtApi) -> Option<EditorApi> {
        // SAFETY: the function takes no arguments.
        let table = unsafe { api.editor_api() };
        (!table.is_null()).then_some(EditorApi { table })
    }
}

/// Factory of providers, as ONNX Runtime sees it.
#[repr(C)]
pub struct EpFactory {
    /// Version of the interface.
    pub version: u32,
    /// Name of the provider.
    pub get_name: unsafe extern "C" fn(*const EpFactory) -> *const c_char,
    /// Vendor of the provider.
    pub get_vendor: unsafe extern "C" fn(*const EpFactory) -> *const c_char,
    /// Selects the devices that the provider can run on from those available.
    pub get_supported_devices: unsafe extern "C" fn(
        *mut EpFactory,
        *const *const HardwareDevice,
        usize,
        *mut *mut EpDevice,
        usize,
        *mut usize,
    ) -> *mut Status,
    /// Makes a provider for a session.
    pub create_ep: unsafe extern "C" fn(
        *mut EpFactory,
        *const *const HardwareDevice,
        *const *const Pairs,
        usize,
        *const SessionOptions,
        *const Logger,
        *mut *mut Ep,
    ) -> *mut Status,
    /// Releases a provider.
    pub release_ep: unsafe extern "C" fn(*mut EpFactory, *mut Ep),
    /// Number of the vendor; 0 for none.
    pub get_vendor_id: unsafe extern "C" fn(*const EpFactory) -> u32,
    /// Version of the provider.
    pub get_version: unsafe extern "C" fn(*const EpFactory) -> *const c_char,
    /// Checks compiled models for compatibility; not used.
    pub validate: *const c_void,
    /// Makes an allocator; null selects the CPU's.
    pub create_allocator:
        unsafe extern "C" fn(*mut EpFactory, *const c_void, *const Pairs, *mut *mut c_void) -> *mut Status,
    /// Releases an allocator.
    pub release_allocator: unsafe extern "C" fn(*mut EpFactory, *mut c_void),
    /// Makes an object that copies between devices; null if nothing has to be copied.
    pub create_data_transfer: unsafe extern "C" fn(*mut EpFactory, *mut *mut c_void) -> *mut Status,
    /// Whether the provider supports streams.
    pub is_stream_aware: unsafe extern "C" fn(*const EpFactory) -> bool,
    /// Makes a stream; null for none.
    pub create_sync_stream:
        unsafe extern "C" fn(*mut EpFactory, *const c_void, *const Pairs, *mut *mut c_void) -> *mut Status,
}

/// Provider of a session, as ONNX Runtime sees it. Null functions are optional.
#[repr(C)]
pub struct Ep {
    /// Version of the interface.
    pub version: u32,
    /// Name of the provider.
    pub get_name: unsafe extern "C" fn(*const Ep) -> *const c_char,
    /// Claims parts of a graph.
    pub get_capability: unsafe extern "C" fn(*mut Ep, *const Graph, *mut SupportInfo) -> *mut Status,
    /// Compiles claimed parts.
    pub compile: unsafe extern "C" fn(
        *mut Ep,
        *const *const Graph,
        *const *const Node,
        usize,
        *mut *mut ComputeInfo,
        *mut *mut Node,
    ) -> *mut Status,
    /// Releases compiled parts.
    pub release_compute_infos: unsafe extern "C" fn(*mut Ep, *mut *mut ComputeInfo, usize),
    /// Optional functions for the data layout, the layout of each operator, options at run time, the start
    /// and end of a run, an allocator, a stream, and the compatibility of compiled models.
    pub unused: [*const c_void; 8],
}

/// Compiled part, as ONNX Runtime sees it.
#[repr(C)]
pub struct ComputeInfo {
    /// Version of the interface.
    pub version: u32,
    /// Makes a state.
    pub create_state: unsafe extern "C" fn(*mut ComputeInfo, *mut c_void, *mut *mut c_void) -> *mut Status,
    /// Runs the part.
    pub compute: unsafe extern "C" fn(*mut ComputeInfo, *mut c_void, *mut KernelContext) -> *mut Status,
    /// Releases a state.
    pub release_state: unsafe extern "C" fn(*mut ComputeInfo, *mut c_void),
}

/// Null pointers for optional functions.
pub const NONE: [*const c_void; 8] = [null(); 8];

/// Returns a null pointer of any type.
pub fn nothing<T>() -> *mut T {
    null_mut()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// Lists the slots of fields of a table declared by another crate.
    macro_rules! slots_of {
        ($table:ty: $($name:ident)*) => {
            &[$((stringify!($name), offset_of!($table, $name) / size_of::<usize>())),*]
        };
    }

    /// Slots of the functions in the table of `ort-sys`.
    const OTHERS: &[(&str, usize)] = slots_of!(ort_sys::OrtApi:
        CreateStatus GetErrorMessage GetTensorMutableData CastTypeInfoToTensorInfo GetOnnxTypeFromTypeInfo
        GetTensorElementType GetDimensionsCount GetDimensions GetSymbolicDimensions GetTensorTypeAndShape
        KernelContext_GetInput KernelContext_GetOutput ReleaseStatus ReleaseTensorTypeAndShapeInfo
        CreateOpAttr ReleaseOpAttr Logger_LogMessage ReadOpAttr KernelContext_ParallelFor GetValueInfoName GetValueInfoTypeInfo
        GetModelEditorApi GetKeyValuePairs ReleaseKeyValuePairs HardwareDevice_Type GetEpApi ValueInfo_GetInitializerValue
        ValueInfo_IsConstantInitializer ValueInfo_IsFromOuterScope Graph_GetModelPath Graph_GetNumOperatorSets Graph_GetOperatorSets
        Graph_GetNumOutputs Graph_GetOutputs Graph_GetNumNodes Graph_GetNodes Graph_GetParentNode
        Node_GetName Node_GetOperatorType Node_GetDomain Node_GetNumInputs Node_GetInputs Node_GetNumOutputs Node_GetOutputs
        Node_GetNumImplicitInputs Node_GetImplicitInputs Node_GetNumAttributes Node_GetAttributes OpAttr_GetType OpAttr_GetName Node_GetNumSubgraphs
        GetSessionOptionsConfigEntries);

    #[test]
    fn functions_have_the_slots_that_others_know() {
        assert_eq!(SLOTS, OTHERS);
        assert_eq!(EDITOR_SLOTS, slots_of!(ort_sys::OrtModelEditorApi: CreateNode));
        assert_eq!(EP_SLOTS, [("CreateEpDevice", 0), ("EpGraphSupportInfo_AddNodesToFuse", 2)]);
        assert_eq!(size_of::<OrtApiBase>(), size_of::<ort_sys::OrtApiBase>());
        assert_eq!(offset_of!(OrtApiBase, get_api), offset_of!(ort_sys::OrtApiBase, GetApi));
    }
}
