//! Program of the command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    tilewright_cli::main()
}
