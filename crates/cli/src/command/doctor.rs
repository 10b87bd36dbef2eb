//! `doctor`: what was found on this machine.

use serde_json::json;
use tilewright::Machine;

use crate::output::write_result;

/// Shows the CPU, its measured peak, LLVM and the peer libraries.
///
/// # Errors
/// Where standard output fails. What cannot be found is reported, not an error.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    let machine = Machine::here();
    write_result(as_json, &json!(machine), &machine.to_string())
}
