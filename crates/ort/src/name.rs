//! Name of the execution provider.

use std::ffi::CStr;

/// Name by which sessions ask for the provider.
pub const NAME: &CStr = c"TilewrightExecutionProvider";
