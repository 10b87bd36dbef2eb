//! Trusted results of untransformed programs: floating-point numbers are computed in `f64` regardless of
//! their types, with the ranges of these types; integers are exact.
//!
//! [`evaluate`] is independent of schedules and code generation. It recognizes the nests that operators
//! produce (loops of constant extent around one store or update). Matrix products are evaluated by blocks,
//! other nests row by row, several rows at a time on each thread, with the reduction outside the row. Factors
//! that are expressions are evaluated in advance. Statements of any other form run in the slow interpreter.
//! [`Tolerance`] bounds the difference of a kernel's result from the trusted one, for the data of
//! [`random_input`].

mod factors;
mod nest;
mod tolerance;
mod work;

use crate::dtype::DType;
use crate::interp::{self, Fault, StoreRounding};
use crate::program::{Program, Role, Stmt};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use work::EvaluationProgress;

pub use tolerance::{
    Mismatch, Tolerance, random_argument, random_argument_on, random_elements, random_input, relative_error,
    relative_error_of, squared,
};
pub use work::Watch;

/// Evaluates a program on its inputs and returns its outputs, each in argument order.
///
/// Every floating-point operation is computed in `f64`; the order of summation is unspecified.
///
/// # Errors
/// See [`interp::run`]; a fault names one of the iterations in which it occurs, not always the first.
///
/// # Cost
/// Memory for every buffer in `f64`. Matrix products reach a third (a convolution of 118 billion
/// multiply-adds) to a half (a product of 4096³) of the threads' peak `f64` vector throughput, including data
/// movement and startup (Zen 4, two threads, 2026-11-25). Other sums of products, which are memory-bound,
/// reach some 3 to 5 billion multiply-adds per second on each thread, and anything else some hundred million
/// operations per second.
pub fn evaluate(program: &Program, inputs: &[Vec<f64>], n_threads: usize) -> Result<Vec<Vec<f64>>, Fault> {
    let role = |role: fn(Role) -> bool| program.arguments().filter(move |(_, b)| role(b.role)).map(|(_, b)| b.dtype);
    let mut inputs = inputs.to_vec();
    for (values, dtype) in inputs.iter_mut().zip(role(|role| role != Role::Output)).filter(|(_, d)| d.is_wide()) {
        values.iter_mut().for_each(|x| *x = dtype.held(*x));
    }
    let mut outputs = evaluate_watched(program, inputs, n_threads, &|_| ControlFlow::Continue(()))?;
    for (values, dtype) in outputs.iter_mut().zip(role(|role| role == Role::Output)).filter(|(_, d)| d.is_wide()) {
        values.iter_mut().for_each(|x| *x = dtype.number(*x));
    }
    Ok(outputs)
}

/// Evaluates a program on [held](DType::held) elements. `watch` is called with the progress from time to
/// time, from any thread, and may cancel the evaluation.
///
/// # Errors
/// See [`evaluate`]; [`Fault::GivenUp`] if cancelled.
pub fn evaluate_watched(
    program: &Program,
    inputs: Vec<Vec<f64>>,
    n_threads: usize,
    watch: &Watch,
) -> Result<Vec<Vec<f64>>, Fault> {
    let program = &*factors::factors_ahead(program);
    let mut memory = vec![Vec::new(); program.buffers.len()];
    let expected = program.arguments().filter(|(_, b)| b.role != Role::Output).count();
    if inputs.len() != expected {
        return Err(Fault::ArgumentCount { expected, got: inputs.len() });
    }
    let mut given = inputs.into_iter();
    for (id, buffer) in program.arguments().chain(program.kept()) {
        memory[id.0 as usize] = if matches!(buffer.role, Role::Output | Role::Kept) {
            interp::undefined(buffer)?
        } else {
            let mut input = given.next().expect("as many inputs as the program has");
            interp::check_length(buffer, input.len())?;
            input.iter_mut().for_each(|x| *x = interp::defined_in(buffer.dtype, *x));
            input
        };
    }
    let work = EvaluationProgress::new(work_of_nests(program), watch);
    let mut left = interp::MAX_ITERATIONS;
    for block in program.parts() {
        let mut allocated = Vec::new();
        for stmt in block {
            if let Stmt::Alloc(id) = stmt {
                let buffer = program.buffers.get(id.0 as usize).ok_or(Fault::UnknownBuffer { id: id.0 })?;
                memory[id.0 as usize] = interp::undefined(buffer)?;
                allocated.push(*id);
            } else if let Some(nest) = nest::ParallelNest::of(program, stmt, &memory) {
                nest.run(&mut memory, n_threads.max(1), &work)?;
                if work.is_over() {
                    return Err(Fault::GivenUp);
                }
                limit(program, stmt, &mut memory);
            } else {
                let block = std::slice::from_ref(stmt);
                memory = interp::run_block(program, block, memory, StoreRounding::None, &mut left)?;
                limit(program, stmt, &mut memory);
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

/// Replaces values written by a statement by infinity if they are beyond the range of their type: the trusted
/// result has a higher precision than the type, but the same range.
fn limit(program: &Program, stmt: &Stmt, memory: &mut [Vec<f64>]) {
    let mut written = BTreeSet::new();
    stmt.walk(&mut |s| written.extend(s.own_write().map(|(buffer, _)| buffer)));
    for id in written {
        let dtype = program.buffer(id).dtype;
        if !dtype.is_float() || dtype == DType::F64 {
            continue;
        }
        for x in &mut memory[id.0 as usize] {
            // Every type can represent numbers of this magnitude.
            if x.abs() > 6e4 && dtype.round(*x).is_infinite() {
                *x = dtype.round(*x);
            }
        }
    }
}

/// Cost of [`evaluate`] for a program, in multiply-adds of a matrix product.
pub fn work(program: &Program) -> f64 {
    work_of_nests(&factors::factors_ahead(program))
}

fn work_of_nests(program: &Program) -> f64 {
    let mut densities = vec![1.0; program.buffers.len()];
    let mut sum = 0.0;
    for nest in program.parts().into_iter().flatten().filter_map(|stmt| nest::ParallelNest::parse(program, stmt)) {
        sum += nest.work(&densities);
        let (written, density) = nest.density();
        densities[written.0 as usize] = density;
    }
    sum
}
