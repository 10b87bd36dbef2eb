//! Failures of requests to a device, as error classes.

use tilewright_codegen::CompileError;
use tilewright_search::ErrorClass;

/// Failure of a candidate: its error class and a description.
#[derive(Debug)]
pub struct Failure {
    /// Class of the failure.
    pub class: ErrorClass,
    /// Description of the failure.
    pub message: String,
    /// Whether the cause is a lack of memory.
    pub lacks_memory: bool,
    /// Whether the device itself failed, whatever runs on it.
    pub is_of_device: bool,
}

impl From<CompileError> for Failure {
    fn from(error: CompileError) -> Failure {
        Failure {
            class: ErrorClass::CompileErrorHost,
            message: error.to_string(),
            lacks_memory: matches!(error, CompileError::NoMemory(_)),
            is_of_device: false,
        }
    }
}

impl From<(ErrorClass, String)> for Failure {
    /// A failure caused neither by a lack of memory nor by the device.
    fn from((class, message): (ErrorClass, String)) -> Failure {
        Failure { class, message, lacks_memory: false, is_of_device: false }
    }
}
