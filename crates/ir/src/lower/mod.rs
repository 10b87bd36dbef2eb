//! From a scheduled program to one that code generation takes as it is: one straight list of passes.

mod simplify;
mod specialize_tails;
mod unroll;

use crate::program::{Program, Stmt};
use crate::verify::{VerifyError, verify};

/// A pass: its name, and what it makes of a block.
type Pass = (&'static str, fn(Vec<Stmt>) -> Vec<Stmt>);

/// The passes, in order.
pub const PASSES: [Pass; 5] = [
    ("simplify", simplify::simplify),
    ("specialize_tails", specialize_tails::specialize_tails),
    ("simplify", simplify::simplify),
    ("unroll", unroll::unroll),
    ("simplify", simplify::simplify),
];

/// Runs all passes. The result computes the same, has no unrolled loops left, and its vectorized loops have constant
/// extents; a loop that could not be brought to a constant extent has become serial.
///
/// # Panics
/// In debug builds, where a pass leaves an invalid program: a bug in the pass it names.
pub fn lower(program: &Program) -> Program {
    let mut out = program.clone();
    for (name, pass) in PASSES {
        out = run_pass(out, pass);
        if cfg!(debug_assertions) {
            match verify(&out) {
                // That iterations are independent was proven when the loop was annotated; the verifier may no longer
                // see it in specialised indices.
                Ok(()) | Err(VerifyError::Race { .. }) => {}
                Err(e) => panic!("pass {name} left an invalid program: {e}\n{out}"),
            }
        }
    }
    out
}

/// Runs one pass on all parts of a program.
pub fn run_pass(program: Program, pass: fn(Vec<Stmt>) -> Vec<Stmt>) -> Program {
    program.map_parts(pass)
}
