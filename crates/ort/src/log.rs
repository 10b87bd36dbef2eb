//! Lines in ONNX Runtime's log.

use std::ffi::{CString, c_int};

use crate::api::{Logger, OrtApi};
use crate::options::LogLines;

/// Level of warnings, which ONNX Runtime shows by default.
const WARNING: c_int = 2;

/// Log of a session.
#[derive(Clone, Copy)]
pub struct Log {
    api: OrtApi,
    logger: *const Logger,
    lines: LogLines,
}

// SAFETY: ONNX Runtime's loggers may be used by several threads.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl Log {
    /// Wraps the log at a pointer.
    ///
    /// # Safety
    /// The logger outlives the provider.
    pub unsafe fn new(api: OrtApi, logger: *const Logger, lines: LogLines) -> Log {
        Log { api, logger, lines }
    }

    /// Logs a problem that is not fatal for the session.
    pub fn problem(&self, message: &str) {
        if self.lines != LogLines::Off {
            self.line(message);
        }
    }

    /// Logs information.
    pub fn note(&self, message: impl FnOnce() -> String) {
        if self.lines == LogLines::All {
            self.line(&message());
        }
    }

    fn line(&self, message: &str) {
        let one_line = format!("tilewright: {}", message.replace(['\n', '\0'], " "));
        let message = CString::new(one_line).expect("it has no zero");
        // SAFETY: the logger is alive, and the strings are zero-terminated.
        let status = unsafe {
            let function = c"tilewright".as_ptr();
            self.api.log(self.logger, WARNING, message.as_ptr(), c"tilewright-ort".as_ptr(), 0, function)
        };
        // A failure to log cannot be reported either.
        let _ = self.api.check(status);
    }
}
