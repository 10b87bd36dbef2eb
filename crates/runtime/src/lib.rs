//! What a compiled kernel needs to run, and nothing of searching: a thread pool, aligned memory, calls.

mod call;
mod memory;
mod pin;
pub mod pool;

pub use call::Call;
pub use memory::Aligned;
pub use pin::{pin, pin_thread};
pub use pool::Pool;
