//! Trusted results: what an untransformed program yields in `f64`, whatever its element types.
//!
//! [`evaluate`] knows nothing of schedules or code generation. It recognises the nests that operators produce (loops of
//! constant extent around one store or update) and evaluates them row by row, some rows at a time on each thread, with
//! the reduction outside the row, past zeros that were inserted into an operand; whatever has another form
//! runs through the interpreter, slowly but all the same.
//! [`Tolerance`] says how far a kernel's result may be from the trusted one, [`random_input`] makes the data that the
//! tolerance is argued for.

mod inserted;
mod nest;
mod tolerance;

use crate::interp::{self, Fault, Rounding};
use crate::program::{Program, Role, Stmt};

pub use tolerance::{Mismatch, Tolerance, random_input, relative_error};

/// Evaluates a program: `inputs` are its inputs in argument order, the result its outputs in argument order.
///
/// Every operation is carried out in `f64`, and sums in an order of their own.
///
/// # Errors
/// As [`interp::run`]; a fault names one of the iterations that have it, not always the first.
///
/// # Cost
/// Memory for every buffer in `f64`. On each thread some 3 to 5 thousand million multiply-adds a second in nests of the
/// matrix product's kind, some hundred million operations a second in others.
pub fn evaluate(program: &Program, inputs: &[Vec<f64>], n_threads: usize) -> Result<Vec<Vec<f64>>, Fault> {
    let mut memory = vec![Vec::new(); program.buffers.len()];
    let mut given = inputs.iter();
    let expected = program.arguments().filter(|(_, b)| b.role != Role::Output).count();
    if inputs.len() != expected {
        return Err(Fault::ArgumentCount { expected, got: inputs.len() });
    }
    for (id, buffer) in program.arguments().chain(program.kept()) {
        memory[id.0 as usize] = if matches!(buffer.role, Role::Output | Role::Kept) {
            interp::undefined(buffer)?
        } else {
            let input = given.next().expect("as many inputs as the program has");
            interp::check_length(buffer, input.len())?;
            input.iter().map(|x| interp::defined(*x)).collect()
        };
    }
    let mut left = interp::MAX_ITERATIONS;
    for block in program.parts() {
        let mut allocated = Vec::new();
        for stmt in block {
            if let Stmt::Alloc(id) = stmt {
                let buffer = program.buffers.get(id.0 as usize).ok_or(Fault::UnknownBuffer { id: id.0 })?;
                memory[id.0 as usize] = interp::undefined(buffer)?;
                allocated.push(*id);
            } else if let Some(sum) = inserted::Inserted::of(program, stmt, &memory) {
                sum.run(&mut memory, n_threads.max(1));
            } else if let Some(nest) = nest::Nest::of(program, stmt, &memory) {
                nest.run(&mut memory, n_threads.max(1))?;
            } else {
                let block = std::slice::from_ref(stmt);
                memory = interp::run_block(program, block, memory, Rounding::None, &mut left)?;
            }
        }
        for id in allocated {
            memory[id.0 as usize] = Vec::new();
        }
    }
    let outputs = program.arguments().filter(|(_, b)| b.role == Role::Output).map(|(id, buffer)| {
        let values = std::mem::take(&mut memory[id.0 as usize]);
        interp::check_written(buffer, &values)?;
        Ok(values)
    });
    outputs.collect()
}
