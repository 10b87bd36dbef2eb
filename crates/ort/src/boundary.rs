//! Boundary to C: converts results to ONNX Runtime's status, and stops panics.

use std::ffi::{CString, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::api::{EP_FAIL, OrtApi, Status, nothing};

/// Runs work for a call of ONNX Runtime; a panic is reported as a failure.
pub fn guarded(api: &OrtApi, work: impl FnOnce() -> Result<(), String>) -> *mut Status {
    guarded_as(api, EP_FAIL, work)
}

/// Runs work as [`guarded`] does, with this error code for failures.
pub fn guarded_as(api: &OrtApi, code: c_int, work: impl FnOnce() -> Result<(), String>) -> *mut Status {
    match caught(work) {
        Ok(()) => nothing(),
        Err(message) => {
            let message = CString::new(message.replace('\0', " ")).expect("it has no zero");
            // SAFETY: the message is zero-terminated, and is copied.
            unsafe { api.create_status(code, message.as_ptr()) }
        }
    }
}

/// Runs work; a panic becomes an error with its message.
pub fn caught<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("of no known kind");
        Err(format!("a bug of tilewright: {text}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(caught(|| Ok(3)), Ok(3));
        assert_eq!(caught::<()>(|| Err("no".to_owned())), Err("no".to_owned()));
        assert_eq!(caught::<()>(|| panic!("at {}", 7)), Err("a bug of tilewright: at 7".to_owned()));
        assert_eq!(caught::<()>(|| panic!("here")), Err("a bug of tilewright: here".to_owned()));
    }
}
