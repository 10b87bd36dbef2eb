//! Name of the execution provider.

use std::ffi::CStr;

/// Name by which sessions select the provider.
pub const NAME: &CStr = c"TilewrightExecutionProvider";
