//! Models compiled with the best configurations of their kernels that are known.

use std::cell::Cell;

use tilewright::{Choice, Records};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;

use crate::compile::{CompileError, Compiled, compile};
use crate::fuse::Fused;

/// Compiles fused steps with the best kernels that are recorded; those that are not are guessed.
///
/// # Errors
/// As [`compile`], and where records cannot be read.
pub fn compile_known(
    fused: Fused,
    target: &Target,
    threads: usize,
    records: &Records,
) -> Result<Compiled, CompileError> {
    let (caches, n_guessed) = (fused.caches(target), Cell::new(0));
    let schedule = |workload: &Workload| {
        let (choice, _) = records.choose(workload, target, threads, caches, None).map_err(|error| error.to_string())?;
        n_guessed.set(n_guessed.get() + usize::from(!choice.is_recorded()));
        choice.program().map_err(|error| error.to_string())
    };
    let compiled = compile(fused, target, &schedule)?;
    Ok(Compiled { n_guessed: n_guessed.get(), ..compiled })
}

/// The same with a guess for every kernel, whatever is recorded: the model before it is tuned.
///
/// # Errors
/// As [`compile`].
pub fn compile_guessed(fused: Fused, target: &Target, threads: usize) -> Result<Compiled, CompileError> {
    let n_guessed = fused.tasks().len();
    let schedule = |workload: &Workload| {
        let choice = Choice::guess(workload, target, threads, None).map_err(|error| error.to_string())?;
        choice.program().map_err(|error| error.to_string())
    };
    Ok(Compiled { n_guessed, ..compile(fused, target, &schedule)? })
}
