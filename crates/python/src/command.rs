//! The command that the wheel brings: that of the project, with the back end of our own.

#![forbid(unsafe_code)]

fn main() -> tilewright_cli::ExitCode {
    tilewright_cli::main()
}
