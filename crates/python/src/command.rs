//! Command that the wheel installs: the project's command, with our own back end.

#![forbid(unsafe_code)]

fn main() -> tilewright_cli::ExitCode {
    tilewright_cli::main()
}
