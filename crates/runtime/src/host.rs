//! Host operators: C functions for operators that no kernel computes, which runs call and libraries contain.
//!
//! Each is a file in `host/` and a row of [`HostOperator`]s. The file documents the buffers and parameters of
//! its function; `host/host.h` documents the common conventions.

use std::ffi::{c_int, c_void};
use std::fmt;

use tilewright_codegen::Runtime;
use tilewright_ir::DType;

use crate::plan::RunSize;

/// C header that the sources of all host operators include.
pub const HOST_HEADER: &str = include_str!("../host/host.h");

type HostCode = unsafe extern "C" fn(*const *mut c_void, *mut c_void, *const Runtime, *const i64) -> c_int;

/// Operator implemented as a C function.
#[derive(Clone, Copy)]
pub struct HostOperator {
    /// Name of the operator; the function is `net_host_` followed by it.
    pub name: &'static str,
    /// C source.
    pub source: &'static str,
    function: HostCode,
}

impl fmt::Debug for HostOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

macro_rules! operators {
    ($($operator:ident: $name:literal, $function:ident, $text:literal;)*) => {
        unsafe extern "C" {
            $(fn $function(_: *const *mut c_void, _: *mut c_void, _: *const Runtime, _: *const i64) -> c_int;)*
        }

        $(#[doc = $text]
        pub const $operator: HostOperator = HostOperator {
            name: $name,
            source: include_str!(concat!("../host/", $name, ".c")),
            function: $function,
        };)*
    };
}

operators! {
    BINARY: "binary", net_host_binary, "A function of two elements that kernels do not have.";
    COPY: "copy", net_host_copy, "The same bits as elements of another type.";
    COUPLING: "coupling", net_host_coupling, "Probabilities of classes, of those of their pairs.";
    CROP: "crop", net_host_crop, "Regions of an image in another size.";
    CUMULATIVE: "cumulative", net_host_cumulative, "Running sums or products.";
    DET: "det", net_host_det, "Determinants of matrices.";
    ITERATE: "iterate", net_host_iterate, "The number of an iteration, and whether it takes place.";
    MAX_POOL: "max_pool", net_host_max_pool, "The largest number of each window, and where it is.";
    MEL: "mel", net_host_mel, "Weights from frequencies to mel bands.";
    PUT: "put", net_host_put, "A row of a tensor, whose others stay as they are.";
    RANDOM: "random", net_host_random, "Random numbers.";
    ROI_ALIGN: "roi_align", net_host_roi_align, "Regions of images.";
    SCATTER: "scatter", net_host_scatter, "A tensor with updates at some places.";
    SELECT: "select", net_host_select, "One of two tensors.";
    TAKE: "take", net_host_take, "A row of a tensor.";
    TOP_K: "top_k", net_host_top_k, "The largest or smallest elements along a dimension.";
    UNARY: "unary", net_host_unary, "A function of each element that kernels do not have.";
}

/// Call of a host operator, apart from its buffers.
#[derive(Clone, Debug)]
pub struct HostCall {
    /// Operator to call.
    pub operator: HostOperator,
    /// Parameters, in the function's order.
    pub parameters: Vec<i64>,
    /// Parameters as numbers of an open dimension's size, where some depend on it; else empty.
    pub sizes: Vec<RunSize>,
    /// Scratch memory in bytes.
    pub scratch_bytes: usize,
}

impl HostCall {
    /// Code of an element type among the parameters, as in `host/host.h`.
    pub fn type_number(dtype: DType) -> i64 {
        match dtype {
            DType::F32 => 0,
            DType::F64 => 1,
            DType::F16 => 2,
            DType::Bf16 => 3,
            DType::I8 | DType::I7 => 4,
            DType::U8 => 5,
            DType::I32 => 6,
            DType::I64 => 7,
            DType::Bool => 8,
            DType::I16 => 9,
            DType::U16 => 10,
            DType::U32 => 11,
            DType::U64 => 12,
        }
    }

    /// Calls the function, with the parameters at a run's size where they depend on it.
    ///
    /// # Errors
    /// If an index among the inputs is out of bounds, or a condition selects a subgraph that does not support
    /// the sizes of its inputs.
    ///
    /// # Safety
    /// Buffers and scratch memory are as large as the parameters say, aligned to their elements, and
    /// borrowed; outputs overlap nothing. `sizes` has a number for each of the call's own.
    pub unsafe fn call(
        &self,
        buffers: &[*mut u8],
        scratch: *mut u8,
        runtime: &Runtime,
        sizes: &[i64],
    ) -> Result<(), String> {
        let parameters = if self.sizes.is_empty() { &self.parameters } else { sizes };
        let (buffers, parameters) = (buffers.as_ptr().cast(), parameters.as_ptr());
        // SAFETY: the caller's promise; the function reads as many parameters as it takes.
        match unsafe { (self.operator.function)(buffers, scratch.cast(), runtime, parameters) } {
            0 => Ok(()),
            9 => Err("a condition chooses a graph that refuses the sizes of its inputs".to_owned()),
            _ => Err("an index is outside of the tensor that it leads into".to_owned()),
        }
    }
}
