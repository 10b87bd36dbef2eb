//! Why something that was asked of a device did not happen.

use tilewright_tune::ErrorClass;

/// Why a candidate came to nothing, as a class and in words.
pub struct Failure {
    /// Its class.
    pub class: ErrorClass,
    /// What there is to say.
    pub message: String,
    /// Whether that is for want of memory.
    pub lacks_memory: bool,
}

impl From<(ErrorClass, String)> for Failure {
    /// One that has nothing to do with memory.
    fn from((class, message): (ErrorClass, String)) -> Failure {
        Failure { class, message, lacks_memory: false }
    }
}
