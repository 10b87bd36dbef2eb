//! Lowering of a scheduled program to the input of code generation, as a linear pipeline of passes.

mod partition_loops;
mod promote_registers;
mod simplify;
mod skip_zeros;
mod specialize_tails;
mod start_sums;
mod unroll;

pub(crate) use promote_registers::promote_registers;
pub(crate) use simplify::simplify_block;
pub use unroll::leaves;
pub(crate) use unroll::unroll_block;

use crate::index::Ranges;
use crate::program::{Loop, Program, Stmt};
use crate::verify::{VerifyError, verify};

/// Lowering pass, by the unit that it rewrites.
#[derive(Clone, Copy)]
pub enum Pass {
    /// Rewrites each part of a program independently, given the ranges of the program's open (dynamic) sizes.
    Block(fn(Vec<Stmt>, &mut Ranges) -> Vec<Stmt>),
    /// Rewrites a whole program.
    Program(fn(Program) -> Program),
}

/// Passes with their names, in order.
pub const PASSES: [(&str, Pass); 9] = [
    ("simplify", Pass::Block(simplify::simplify_block)),
    ("specialize_tails", Pass::Block(specialize_tails::specialize_tails)),
    ("simplify", Pass::Block(simplify::simplify_block)),
    ("skip_zeros", Pass::Block(|block, _| skip_zeros::skip_zeros(block))),
    ("partition_loops", Pass::Block(partition_loops::partition_loops)),
    ("simplify", Pass::Block(simplify::simplify_block)),
    ("unroll", Pass::Block(unroll::unroll_block)),
    ("promote_registers", Pass::Program(promote_registers::promote_registers)),
    ("start_sums", Pass::Program(start_sums::start_sums)),
];

/// Maximum number of versions of the same statements that a pass creates, as code size and compile time grow
/// with each.
const MOST_VERSIONS: u32 = 16;

/// Creates up to `versions` versions of each loop of a block; `in_loop` writes them, given the ranges of the
/// enclosing loops.
fn version_loops(
    block: Vec<Stmt>,
    ranges: &mut Ranges,
    versions: u32,
    in_loop: fn(Loop, &mut Ranges, u32, &mut Vec<Stmt>),
) -> Vec<Stmt> {
    let mut out = Vec::with_capacity(block.len());
    for stmt in block {
        match stmt {
            Stmt::For(l) => in_loop(l, ranges, versions, &mut out),
            Stmt::If { cond, then, otherwise } => out.push(Stmt::If {
                cond,
                then: version_loops(then, ranges, versions, in_loop),
                otherwise: version_loops(otherwise, ranges, versions, in_loop),
            }),
            Stmt::Alloc(_)
            | Stmt::Store { .. }
            | Stmt::Update { .. }
            | Stmt::Prefetch { .. }
            | Stmt::Barrier
            | Stmt::Wait(_) => {
                out.push(stmt);
            }
        }
    }
    out
}

/// Runs all passes. The result computes the same values, has no unrolled loops, and its vectorized loops have
/// constant extents; a vectorized loop without a constant extent becomes serial.
pub fn lower(program: &Program) -> Program {
    PASSES.into_iter().fold(program.clone(), |program, (_, pass)| run_pass(program, pass))
}

/// Lowers like [`lower`] and verifies the program after each pass, which takes several times as long. For
/// tests.
///
/// # Panics
/// If a pass produces an invalid program, which is a bug in the pass that the message names.
pub fn lower_verified(program: &Program) -> Program {
    PASSES.into_iter().fold(program.clone(), |program, (name, pass)| {
        let program = run_pass(program, pass);
        match verify(&program) {
            // Independence of iterations was proven when the loop was annotated; specialized indices may keep
            // the verifier from proving it again.
            Ok(()) | Err(VerifyError::Race { .. }) => program,
            Err(e) => panic!("pass {name} left an invalid program: {e}\n{program}"),
        }
    })
}

/// Runs one pass on all parts of a program.
pub fn run_pass(program: Program, pass: Pass) -> Program {
    match pass {
        Pass::Block(pass) => {
            let mut ranges = program.ranges();
            program.map_parts(|block| pass(block, &mut ranges))
        }
        Pass::Program(pass) => pass(program),
    }
}
