//! Helpers of the templates' tests.

use tilewright_ir::{Buffer, BufferId, Program, Role, interp};

/// Small numbers for a program's arguments; floating-point ones are divided by `divisor`. With 1 they are
/// integers, whose sums are exact in any order.
pub fn arguments(program: &Program, divisor: f64) -> Vec<Vec<f64>> {
    let of = |(id, b): (BufferId, &Buffer)| {
        let n = b.n_elements().unwrap() as usize;
        let whole = |i: usize| ((i * 7 + id.0 as usize * 3) % 11) as f64 - 5.0;
        match b.role {
            Role::Output => vec![0.0; n],
            _ if b.dtype.is_float() => (0..n).map(|i| whole(i) / divisor).collect(),
            _ => (0..n).map(|i| b.dtype.round(whole(i))).collect(),
        }
    };
    program.arguments().map(of).collect()
}

/// Returns the arguments that a program writes.
pub fn written(program: &Program, arguments: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let is_output = program.arguments().map(|(_, b)| b.role == Role::Output);
    arguments.into_iter().zip(is_output).filter(|(_, is_output)| *is_output).map(|(a, _)| a).collect()
}

/// Runs a program on such arguments and returns its outputs.
pub fn outputs_of(program: &Program, divisor: f64) -> Vec<Vec<f64>> {
    let mut arguments = arguments(program, divisor);
    interp::run(program, &mut arguments).unwrap_or_else(|fault| panic!("{fault}\n{program}"));
    written(program, arguments)
}
