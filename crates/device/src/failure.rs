//! Failures of requests to a device, as error classes.

use tilewright_search::ErrorClass;

/// Failure of a candidate: its error class and a description.
pub struct Failure {
    /// Class of the failure.
    pub class: ErrorClass,
    /// Description of the failure.
    pub message: String,
    /// Whether the cause is a lack of memory.
    pub lacks_memory: bool,
}

impl From<(ErrorClass, String)> for Failure {
    /// A failure not caused by a lack of memory.
    fn from((class, message): (ErrorClass, String)) -> Failure {
        Failure { class, message, lacks_memory: false }
    }
}
