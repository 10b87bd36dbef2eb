//! Interpreter, which defines the meaning of a program.
//!
//! [`run`] executes `prepare`, the body and `finish`, each once. Every loop runs its iterations in order,
//! regardless of its kind; a loop with an extent below one has no iterations. Prefetches, barriers and waits
//! do nothing.

mod batch;

use crate::dot;
use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, Subscript, UnaryOp};
use crate::index::{Atom, Index};
use crate::program::{Buffer, BufferId, LoopId, LoopKind, Program, Role, Stmt, TensorProduct};
use crate::text::index_to_string;
use std::fmt;
use thiserror::Error;

/// Maximum number of loop iterations of [`run`], which take minutes.
pub const MAX_ITERATIONS: u64 = 1 << 33;

/// Maximum number of elements of a buffer (2 GiB).
pub const MAX_ELEMENTS: u64 = 1 << 28;

/// Values of the loop variables around a point of the program, outermost first.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct IterationPoint(pub Vec<(String, i64)>);

impl fmt::Display for IterationPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("outside all loops");
        }
        f.write_str("at ")?;
        for (i, (name, value)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Joins numbers with commas.
pub(crate) fn list(values: &[i64]) -> String {
    values.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}

/// Reason why running a program on these arguments is undefined: an error of the program, or of the caller
/// for the variants about arguments and sizes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// Access out of bounds.
    #[error("{buffer}[{}] is outside {buffer}[{}] {place}", list(subscripts), list(shape))]
    OutOfBounds {
        /// The buffer's name.
        buffer: String,
        /// The subscripts of the access.
        subscripts: Vec<i64>,
        /// The buffer's extents.
        shape: Vec<i64>,
        /// Location in the program.
        place: IterationPoint,
    },
    /// Read of an element not written since its buffer was allocated.
    #[error("{buffer}[{}] is read before it is written {place}", list(subscripts))]
    Undefined {
        /// The buffer's name.
        buffer: String,
        /// The subscripts of the read.
        subscripts: Vec<i64>,
        /// Location in the program.
        place: IterationPoint,
    },
    /// Access to a temporary that is not allocated.
    #[error("{buffer} is used where it is not allocated {place}")]
    NotAllocated {
        /// The buffer's name.
        buffer: String,
        /// Location in the program.
        place: IterationPoint,
    },
    /// Element of an output that the program left unwritten.
    #[error("{buffer}[{}] is never written", list(subscripts))]
    NotWritten {
        /// The buffer's name.
        buffer: String,
        /// Subscripts of the first such element.
        subscripts: Vec<i64>,
    },
    /// Division by zero in an index.
    #[error("division by zero in {index} {place}")]
    DivisionByZero {
        /// The index.
        index: String,
        /// Location in the program.
        place: IterationPoint,
    },
    /// Overflow of an index beyond 64 bits.
    #[error("{index} overflows {place}")]
    Overflow {
        /// The index.
        index: String,
        /// Location in the program.
        place: IterationPoint,
    },
    /// Evaluation cancelled by its observer.
    #[error("the evaluation was given up")]
    GivenUp,
    /// Evaluation that exceeds the maximum number of iterations.
    #[error("more than {limit} loop iterations")]
    TooLong {
        /// Maximum number of iterations.
        limit: u64,
    },
    /// Buffer with more than [`MAX_ELEMENTS`] elements, or with a negative extent.
    #[error("{buffer}[{}] cannot be held in memory", list(shape))]
    TooLarge {
        /// The buffer's name.
        buffer: String,
        /// The buffer's extents.
        shape: Vec<i64>,
    },
    /// Wrong number of arguments.
    #[error("the program takes {expected} arguments, {got} were given")]
    ArgumentCount {
        /// Number of arguments of the program.
        expected: usize,
        /// Number given.
        got: usize,
    },
    /// Argument of the wrong size.
    #[error("argument {buffer} has {expected} elements, {got} were given")]
    ArgumentLength {
        /// The argument's name.
        buffer: String,
        /// Number of elements of the argument.
        expected: u64,
        /// Number given.
        got: usize,
    },
    /// Sizes outside the ranges of the program's open (dynamic) sizes.
    #[error("the program has no sizes {sizes:?}")]
    Sizes {
        /// Values given.
        sizes: Vec<i64>,
    },
    /// Reference to a buffer that the program does not have.
    #[error("there is no buffer with number {id}")]
    UnknownBuffer {
        /// The number.
        id: u32,
    },
    /// Loop variable used outside its loop.
    #[error("loop variable {name} is used outside its loop")]
    Unbound {
        /// Name of the loop variable.
        name: String,
    },
    /// Access with too few or too many subscripts.
    #[error("{buffer} has {rank} dimensions and is used with {n_subscripts} subscripts")]
    Rank {
        /// The buffer's name.
        buffer: String,
        /// Number of its dimensions.
        rank: usize,
        /// Number of subscripts given.
        n_subscripts: usize,
    },
}

/// Runs a program on its arguments, in the order of [`Program::arguments`], outputs included.
///
/// Initial contents of outputs are ignored; on success, outputs hold the results. Arguments are numbers and
/// are rounded to their element type; see [`run_held`] for 64-bit integers that an f64 cannot represent.
///
/// # Errors
/// [`Fault`]; the outputs are then unspecified.
///
/// # Cost
/// Some 80 million multiply-adds a second in loops that are evaluated together, else some 20 million.
pub fn run(program: &Program, arguments: &mut [Vec<f64>]) -> Result<(), Fault> {
    run_limited(program, arguments, MAX_ITERATIONS)
}

/// Runs a program like [`run`], with a limit on the total number of loop iterations; 16 elements allocated
/// count as one.
///
/// # Errors
/// See [`run`]; [`Fault::TooLong`] beyond the limit.
pub fn run_limited(program: &Program, arguments: &mut [Vec<f64>], limit: u64) -> Result<(), Fault> {
    hold(program, arguments);
    run_held(program, arguments, limit)?;
    release(program, arguments);
    Ok(())
}

/// Converts numbers to [held](DType::held) elements.
pub(crate) fn hold(program: &Program, arguments: &mut [Vec<f64>]) {
    for ((_, buffer), argument) in program.arguments().zip(arguments) {
        argument.iter_mut().for_each(|x| *x = buffer.dtype.held(*x));
    }
}

/// Converts held elements to numbers.
pub(crate) fn release(program: &Program, arguments: &mut [Vec<f64>]) {
    for ((_, buffer), argument) in program.arguments().zip(arguments).filter(|((_, b), _)| b.dtype.is_wide()) {
        argument.iter_mut().for_each(|x| *x = buffer.dtype.number(*x));
    }
}

/// Runs a program like [`run_limited`], on [held](DType::held) arguments. One 64-bit integer is reserved: its
/// bit pattern marks an element as never written.
///
/// # Errors
/// See [`run_limited`].
pub fn run_held(program: &Program, arguments: &mut [Vec<f64>], limit: u64) -> Result<(), Fault> {
    run_parts(program, arguments, limit)?;
    for ((_, buffer), argument) in program.arguments().zip(arguments).filter(|((_, b), _)| b.role == Role::Output) {
        check_written(buffer, argument)?;
    }
    Ok(())
}

/// Runs a program like [`run`], with a value for each of its open (dynamic) sizes. Elements of outputs
/// outside these sizes keep their values.
///
/// # Errors
/// See [`run`]; [`Fault::Sizes`] for a value outside the range of its size.
pub fn run_at(program: &Program, sizes: &[i64], arguments: &mut [Vec<f64>]) -> Result<(), Fault> {
    let member = program.at(sizes).ok_or_else(|| Fault::Sizes { sizes: sizes.to_vec() })?;
    hold(&member, arguments);
    let before = arguments.to_vec();
    run_parts(&member, arguments, MAX_ITERATIONS)?;
    for (argument, before) in arguments.iter_mut().zip(before) {
        let unwritten = argument.iter_mut().zip(before).filter(|(x, _)| is_undefined(**x));
        unwritten.for_each(|(x, before)| *x = before);
    }
    release(&member, arguments);
    Ok(())
}

/// Runs the parts of a program, which may leave elements of outputs unwritten.
fn run_parts(program: &Program, arguments: &mut [Vec<f64>], limit: u64) -> Result<(), Fault> {
    let mut memory = vec![Vec::new(); program.buffers.len()];
    let expected = program.arguments().count();
    if arguments.len() != expected {
        return Err(Fault::ArgumentCount { expected, got: arguments.len() });
    }
    for ((id, buffer), argument) in program.arguments().zip(arguments.iter()) {
        memory[id.0 as usize] = match buffer.role {
            Role::Output => undefined(buffer)?,
            _ => argument.iter().map(|x| defined_in(buffer.dtype, *x)).collect(),
        };
        check_length(buffer, argument.len())?;
    }
    for (id, buffer) in program.kept() {
        memory[id.0 as usize] = undefined(buffer)?;
    }
    let mut left = limit;
    for block in program.parts() {
        memory = run_block(program, block, memory, StoreRounding::ToElementType, &mut left).map_err(
            |fault| match fault {
                Fault::TooLong { .. } => Fault::TooLong { limit },
                other => other,
            },
        )?;
    }
    for ((id, buffer), argument) in program.arguments().zip(arguments) {
        if buffer.role == Role::Output {
            *argument = std::mem::take(&mut memory[id.0 as usize]);
        }
    }
    Ok(())
}

pub(crate) fn check_length(buffer: &Buffer, got: usize) -> Result<(), Fault> {
    let expected = n_elements(buffer)? as u64;
    if got as u64 == expected {
        Ok(())
    } else {
        Err(Fault::ArgumentLength { buffer: buffer.name.clone(), expected, got })
    }
}

pub(crate) fn check_written(buffer: &Buffer, values: &[f64]) -> Result<(), Fault> {
    match values.iter().position(|x| is_undefined(*x)) {
        None => Ok(()),
        Some(at) => {
            Err(Fault::NotWritten { buffer: buffer.name.clone(), subscripts: subscripts_of(&buffer.shape, at) })
        }
    }
}

/// Subscripts of the element at a row-major position.
pub(crate) fn subscripts_of(shape: &[i64], mut at: usize) -> Vec<i64> {
    let mut subscripts = vec![0; shape.len()];
    for (s, &extent) in subscripts.iter_mut().zip(shape).rev() {
        *s = (at % extent.max(1) as usize) as i64;
        at /= extent.max(1) as usize;
    }
    subscripts
}

fn n_elements(buffer: &Buffer) -> Result<usize, Fault> {
    buffer
        .n_elements()
        .filter(|n| *n <= MAX_ELEMENTS)
        .map(|n| n as usize)
        .ok_or_else(|| Fault::TooLarge { buffer: buffer.name.clone(), shape: buffer.shape.clone() })
}

/// Contents of an unwritten buffer.
pub(crate) fn undefined(buffer: &Buffer) -> Result<Vec<f64>, Fault> {
    Ok(vec![f64::from_bits(UNDEFINED); n_elements(buffer)?])
}

/// Bits of a NaN that no operation yields, the mark of elements never written.
const UNDEFINED: u64 = 0x7ff8_5ca1_ab1e_0001;

pub(crate) fn is_undefined(x: f64) -> bool {
    x.to_bits() == UNDEFINED
}

/// Normalizes a NaN with any payload to the default NaN.
pub(crate) fn defined(x: f64) -> f64 {
    if x.is_nan() { f64::NAN } else { x }
}

/// Normalizes a NaN with any payload to the default NaN, for float types only.
pub(crate) fn defined_in(dtype: DType, x: f64) -> f64 {
    if dtype.is_float() { defined(x) } else { x }
}

/// Evaluates a unary function in an integer arithmetic.
fn whole_unary(op: UnaryOp, x: i128, dtype: DType) -> i128 {
    match op {
        UnaryOp::Neg => dtype.wrap(-x),
        UnaryOp::Abs => dtype.wrap(x.abs()),
        UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => x,
        _ => dtype.whole(dtype.held(apply_unary(op, x as f64))),
    }
}

/// Evaluates a binary function in an integer arithmetic.
fn whole_binary(op: BinaryOp, a: i128, b: i128, dtype: DType) -> i128 {
    let exact = match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        // The product of two unsigned 64-bit numbers may exceed i128, but its low bits are correct.
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Div => a.checked_div(b).unwrap_or(0),
        BinaryOp::Min => a.min(b),
        BinaryOp::Max => a.max(b),
        BinaryOp::Pow => dtype.whole(dtype.held((a as f64).powf(b as f64))),
        BinaryOp::Nibble => a >> (4 * b.clamp(0, 1)) & 15,
    };
    dtype.wrap(exact)
}

/// Evaluates a unary function in `f64`.
pub fn apply_unary(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Exp => x.exp(),
        UnaryOp::Expm1 => x.exp_m1(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Log1p => x.ln_1p(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Erf => erf(x),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::Round => x.round_ties_even(),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
    }
}

/// Evaluates a binary function in `f64`.
#[inline]
pub fn apply_binary(op: BinaryOp, a: f64, b: f64) -> f64 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        // The comparison is false if the second operand is NaN.
        BinaryOp::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        BinaryOp::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        BinaryOp::Pow => a.powf(b),
        BinaryOp::Nibble => (a as i64 >> (4 * (b as i64).clamp(0, 1)) & 15) as f64,
    }
}

/// Error function, by the series `erf x = 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1·3·…·(2n+1))`.
///
/// All terms have the same sign, so nothing cancels; beyond 6 the value is 1 to the last bit of an `f64`.
fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-17 {
        odd += 2.0;
        term *= 2.0 * x * x / odd;
        sum += term;
    }
    (std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum).clamp(-1.0, 1.0)
}

/// Whether operations round to the element type of the destination buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreRounding {
    ToElementType,
    /// Integers are rounded as in the program; floating-point numbers are not rounded.
    None,
}

/// Adds the product of two bf16 numbers to an f32 sum, rounding once; subnormal numbers are flushed to zero.
fn add_of_pair(sum: f64, a: f64, b: f64) -> f64 {
    let flushed = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
    let [sum, a, b] = [sum, a, b].map(|x| flushed(x as f32));
    let rounded = a.mul_add(b, sum);
    // The test for subnormal results follows rounding to the precision of normal numbers.
    let exact = f64::from(a) * f64::from(b) + f64::from(sum);
    let least = f64::from(f32::MIN_POSITIVE) * (1.0 - 2f64.powi(-25));
    f64::from(if exact.abs() < least { 0f32.copysign(rounded) } else { rounded })
}

/// Whether a value is rounded to f32 even in a mode without rounding: the result of arithmetic, or an integer
/// that f32 may not represent, with an explicit cast to f32. Sums that are converted to integers depend on
/// this rounding.
pub(crate) fn rounds_to_single(program: &Program, value: &Expr) -> bool {
    let Expr::Cast(DType::F32, x) = value else { return false };
    match &**x {
        Expr::Binary(..) => true,
        Expr::Load(b, _) => {
            let dtype = program.buffers.get(b.0 as usize).map(|b| b.dtype);
            dtype.is_some_and(|dtype| !dtype.is_float() && dtype.bytes() >= 4)
        }
        _ => false,
    }
}

/// Runs statements on the given memory, indexed by buffer; the memory of an unallocated buffer is empty.
/// Deducts iterations from `left`.
pub(crate) fn run_block(
    program: &Program,
    block: &[Stmt],
    memory: Vec<Vec<f64>>,
    rounding: StoreRounding,
    left: &mut u64,
) -> Result<Vec<Vec<f64>>, Fault> {
    let mut compiler = ProgramCompiler::new(program, rounding);
    let block = compiler.block(block)?;
    let mut machine = Interpreter::new(program, &compiler.sources, memory, *left);
    let done = machine.block(&block);
    *left = machine.left;
    match done {
        Ok(()) => Ok(machine.memory),
        Err(Stopped) => Err(machine.take_fault()),
    }
}

/// Memory that a machine reads and writes, by buffer.
pub(crate) trait Memory {
    /// Reads an element; `None` if it does not exist, as while the buffer is not allocated.
    fn read(&mut self, buffer: u32, at: usize) -> Option<f64>;
    /// Reads elements `step` apart; `None` if one does not exist.
    fn read_all(&mut self, buffer: u32, at: i64, step: i64, out: &mut [f64]) -> Option<()> {
        (0..).zip(out).try_for_each(|(lane, x)| {
            *x = self.read(buffer, (at + lane * step) as usize)?;
            Some(())
        })
    }
    /// Writes an element; `None` if it does not exist.
    fn write(&mut self, buffer: u32, at: usize, value: f64) -> Option<()>;
    /// Allocates `n` unwritten elements for a buffer.
    fn allocate(&mut self, buffer: u32, n: usize);
    /// Frees a buffer's elements.
    fn free(&mut self, buffer: u32);
    /// See [`Stmt::Wait`].
    fn wait(&mut self, _n: u8) {}
}

impl Memory for Vec<Vec<f64>> {
    #[inline]
    fn read(&mut self, buffer: u32, at: usize) -> Option<f64> {
        self[buffer as usize].get(at).copied()
    }

    fn read_all(&mut self, buffer: u32, at: i64, step: i64, out: &mut [f64]) -> Option<()> {
        let from = &self[buffer as usize];
        match step {
            0 => out.fill(*from.get(at as usize)?),
            1 => out.copy_from_slice(from.get(at as usize..at as usize + out.len())?),
            _ => {
                for (lane, x) in (0..).zip(out) {
                    *x = *from.get((at + lane * step) as usize)?;
                }
            }
        }
        Some(())
    }

    #[inline]
    fn write(&mut self, buffer: u32, at: usize, value: f64) -> Option<()> {
        self[buffer as usize].get_mut(at).map(|element| *element = value)
    }

    fn allocate(&mut self, buffer: u32, n: usize) {
        let values = &mut self[buffer as usize];
        values.clear();
        values.resize(n, f64::from_bits(UNDEFINED));
    }

    fn free(&mut self, buffer: u32) {
        self[buffer as usize].clear();
    }
}

/// Compiled index, with numbered loop variables.
pub(crate) struct Linear {
    constant: i64,
    terms: Box<[(u32, i64)]>,
    /// Divisions, remainders, minima and maxima with their coefficients.
    rest: Box<[(Nonlinear, i64)]>,
    /// Whether terms and constant are few and small enough that their sum cannot overflow for variables below
    /// 2⁴⁰.
    is_small: bool,
    /// Terms of a small sum of at most two terms, a fast path for the usual case.
    two: Option<[(u32, i64); 2]>,
    /// Index of the source expression, for messages.
    source: u32,
}

enum Nonlinear {
    FloorDiv(Box<Linear>, i64),
    Mod(Box<Linear>, i64),
    Min(Box<Linear>, Box<Linear>),
    Max(Box<Linear>, Box<Linear>),
}

impl Linear {
    #[inline]
    fn eval(&self, vars: &[i64]) -> Option<i64> {
        match self.two {
            Some([(a, ca), (b, cb)]) => Some(self.constant + ca * vars[a as usize] + cb * vars[b as usize]),
            None => self.eval_slow(vars),
        }
    }

    fn eval_slow(&self, vars: &[i64]) -> Option<i64> {
        let mut sum = self.constant;
        for &(var, c) in &*self.terms {
            let var = vars[var as usize];
            sum = if self.is_small { sum + var * c } else { sum.checked_add(var.checked_mul(c)?)? };
        }
        for (part, c) in &*self.rest {
            let value = match part {
                Nonlinear::FloorDiv(x, d @ 1..) => x.eval(vars)?.div_euclid(*d),
                Nonlinear::FloorDiv(x, d) => floor_div(x.eval(vars)?, *d)?,
                Nonlinear::Mod(x, d @ 1..) => x.eval(vars)?.rem_euclid(*d),
                Nonlinear::Mod(x, d) => {
                    let x = x.eval(vars)?;
                    x.checked_sub(floor_div(x, *d)?.checked_mul(*d)?)?
                }
                Nonlinear::Min(a, b) => a.eval(vars)?.min(b.eval(vars)?),
                Nonlinear::Max(a, b) => a.eval(vars)?.max(b.eval(vars)?),
            };
            sum = sum.checked_add(value.checked_mul(*c)?)?;
        }
        Some(sum)
    }
}

pub(crate) fn floor_div(a: i64, b: i64) -> Option<i64> {
    let (q, r) = (a.checked_div(b)?, a.checked_rem(b)?);
    Some(if r != 0 && ((r < 0) != (b < 0)) { q - 1 } else { q })
}

/// Subscript that varies with loop variables.
struct LoopSubscript {
    /// Position of the dimension.
    at: usize,
    index: Linear,
    extent: u64,
    stride: i64,
}

struct ElementAccess {
    buffer: u32,
    dtype: DType,
    dims: Box<[LoopSubscript]>,
    /// Constant subscripts, with zeros for those that vary, and the position they yield.
    constant: Box<[i64]>,
    base: i64,
}

enum CompiledExpr {
    Const(f64),
    Load(ElementAccess),
    Gather(Box<IndirectAccess>),
    FromIndex(Linear),
    Unary(UnaryOp, Box<CompiledExpr>),
    Binary(BinaryOp, Box<(CompiledExpr, CompiledExpr)>),
    Select(Box<(CompiledTest, CompiledExpr, CompiledExpr)>),
    Cast(Rounds, Box<CompiledExpr>),
}

/// Access with data-dependent subscripts: the access with zeros in these dimensions, and for each of them the
/// value, extent and stride.
struct IndirectAccess {
    access: ElementAccess,
    values: Vec<(CompiledExpr, i64, i64)>,
    rounds: Rounds,
}

/// Types to which a value is rounded.
#[derive(Clone, Copy)]
struct Rounds {
    /// Type after each operation.
    each: DType,
    /// Type of the result.
    last: DType,
}

impl Rounds {
    /// Rounds the result of an operation on floating-point numbers.
    #[inline]
    fn of(self, x: f64) -> f64 {
        match self.last {
            DType::F64 => x,
            DType::F32 => f64::from(x as f32),
            last => last.round(self.each.round(x)),
        }
    }
}

enum CompiledTest {
    Constant(bool),
    Lt(Linear, Linear),
    Eq(Linear, Linear),
    /// Test of a variable for zero, the usual condition of an update.
    IsZero(u32),
    Less(Rounds, Box<(CompiledExpr, CompiledExpr)>),
    And(Box<(CompiledTest, CompiledTest)>),
    Not(Box<CompiledTest>),
}

/// Compiled condition, with numbered loop variables.
pub(crate) struct CompiledCondition(CompiledTest);

enum CompiledOp {
    For {
        var: u32,
        extent: Linear,
        body: CompiledBlock,
        is_downwards: bool,
        /// Whether many iterations are evaluated at once.
        is_batched: bool,
    },
    If {
        test: CompiledTest,
        then: CompiledBlock,
        otherwise: CompiledBlock,
    },
    Alloc(u32),
    Store {
        to: ElementAccess,
        value: CompiledExpr,
        rounds: Rounds,
    },
    Update {
        to: ElementAccess,
        op: ReduceOp,
        value: CompiledExpr,
        first: CompiledTest,
        rounds: Rounds,
    },
    /// Sum with the product of two bf16 numbers, as in dot products of pairs.
    AddOfPair {
        to: ElementAccess,
        factors: Box<[CompiledExpr; 2]>,
    },
    Wait(u8),
}

pub(crate) struct CompiledBlock {
    ops: Vec<CompiledOp>,
    /// Temporaries freed at the end of the block.
    allocs: Vec<u32>,
}

pub(crate) struct ProgramCompiler<'a> {
    program: &'a Program,
    rounding: StoreRounding,
    /// Loops around the compiled statements.
    pub bound: Vec<LoopId>,
    pub sources: Vec<Index>,
    /// Whether the current statements are in a loop over pairs of bf16 numbers.
    in_pairs: bool,
}

impl ProgramCompiler<'_> {
    /// Creates a compiler outside of all loops.
    pub fn new(program: &Program, rounding: StoreRounding) -> ProgramCompiler<'_> {
        ProgramCompiler { program, rounding, bound: Vec::new(), sources: Vec::new(), in_pairs: false }
    }

    pub fn block(&mut self, stmts: &[Stmt]) -> Result<CompiledBlock, Fault> {
        let mut block = CompiledBlock { ops: Vec::new(), allocs: Vec::new() };
        for stmt in stmts {
            let op = match stmt {
                Stmt::For(l) => {
                    let extent = self.linear(&l.extent)?;
                    if l.var.0 as usize >= self.program.loops.len() {
                        return Err(Fault::Unbound { name: crate::text::loop_name(self.program, l.var) });
                    }
                    self.bound.push(l.var);
                    let is_pair = l.kind == LoopKind::Tensor(TensorProduct::Dot2)
                        && self.rounding == StoreRounding::ToElementType
                        && !dot::adds_to_integers(self.program, &l.body);
                    let was_in_pairs = self.in_pairs;
                    self.in_pairs |= is_pair;
                    let body = self.block(&l.body)?;
                    self.in_pairs = was_in_pairs;
                    self.bound.pop();
                    let is_batched = body.is_batchable(l.var.0);
                    CompiledOp::For { var: l.var.0, extent, body, is_downwards: is_pair, is_batched }
                }
                Stmt::If { cond, then, otherwise } => CompiledOp::If {
                    test: self.test(cond)?,
                    then: self.block(then)?,
                    otherwise: self.block(otherwise)?,
                },
                Stmt::Alloc(b) => {
                    self.buffer(*b)?;
                    block.allocs.push(b.0);
                    CompiledOp::Alloc(b.0)
                }
                Stmt::Store { buffer, index, value } => CompiledOp::Store {
                    to: self.access(*buffer, index)?,
                    value: self.node(value)?,
                    rounds: self.rounds(self.buffer(*buffer)?.dtype),
                },
                Stmt::Update { buffer, index, value: Expr::Binary(BinaryOp::Mul, a, b), .. } if self.in_pairs => {
                    let factors = Box::new([self.node(a)?, self.node(b)?]);
                    CompiledOp::AddOfPair { to: self.access(*buffer, index)?, factors }
                }
                Stmt::Update { buffer, index, op, value, first } => CompiledOp::Update {
                    to: self.access(*buffer, index)?,
                    op: *op,
                    value: self.node(value)?,
                    first: self.test(first)?,
                    rounds: self.rounds(self.buffer(*buffer)?.dtype),
                },
                Stmt::Wait(n) => CompiledOp::Wait(*n),
                Stmt::Prefetch { .. } | Stmt::Barrier => continue,
            };
            block.ops.push(op);
        }
        Ok(block)
    }

    fn buffer(&self, id: BufferId) -> Result<&Buffer, Fault> {
        self.program.buffers.get(id.0 as usize).ok_or(Fault::UnknownBuffer { id: id.0 })
    }

    fn rounds(&self, dtype: DType) -> Rounds {
        match self.rounding {
            StoreRounding::None if dtype.is_float() => Rounds { each: DType::F64, last: DType::F64 },
            StoreRounding::None | StoreRounding::ToElementType => Rounds { each: dtype.arithmetic(), last: dtype },
        }
    }

    /// Compiles an index inside the current loops.
    pub fn linear(&mut self, index: &Index) -> Result<Linear, Fault> {
        let (mut terms, mut rest) = (Vec::new(), Vec::new());
        for (atom, c) in index.terms() {
            let part = match atom {
                Atom::Var(v) => {
                    if !self.bound.contains(v) {
                        return Err(Fault::Unbound { name: crate::text::loop_name(self.program, *v) });
                    }
                    terms.push((v.0, *c));
                    continue;
                }
                Atom::FloorDiv(x, d) => Nonlinear::FloorDiv(Box::new(self.linear(x)?), *d),
                Atom::Mod(x, d) => Nonlinear::Mod(Box::new(self.linear(x)?), *d),
                Atom::Min(a, b) => Nonlinear::Min(Box::new(self.linear(a)?), Box::new(self.linear(b)?)),
                Atom::Max(a, b) => Nonlinear::Max(Box::new(self.linear(a)?), Box::new(self.linear(b)?)),
            };
            rest.push((part, *c));
        }
        let small = |c: i64, bits: u32| c.unsigned_abs() < 1 << bits;
        let is_small = small(index.constant(), 61) && terms.len() <= 4 && terms.iter().all(|(_, c)| small(*c, 20));
        let two = match terms.as_slice() {
            _ if !rest.is_empty() || !is_small => None,
            [] => Some([(0, 0), (0, 0)]),
            [a] => Some([*a, (0, 0)]),
            [a, b] => Some([*a, *b]),
            _ => None,
        };
        self.sources.push(index.clone());
        let source = self.sources.len() as u32 - 1;
        Ok(Linear { constant: index.constant(), terms: terms.into(), rest: rest.into(), is_small, two, source })
    }

    fn access(&mut self, id: BufferId, index: &[Index]) -> Result<ElementAccess, Fault> {
        let buffer = self.buffer(id)?;
        let (strides, shape, dtype) = (buffer.strides(), buffer.shape.clone(), buffer.dtype);
        if shape.len() != index.len() {
            return Err(Fault::Rank { buffer: buffer.name.clone(), rank: shape.len(), n_subscripts: index.len() });
        }
        let (mut dims, mut constant, mut base) = (Vec::new(), vec![0; index.len()], 0i64);
        for (at, ((i, stride), extent)) in index.iter().zip(strides).zip(shape).enumerate() {
            match i.as_const() {
                Some(c) if (0..extent).contains(&c) => {
                    constant[at] = c;
                    base = base.wrapping_add(c.wrapping_mul(stride));
                }
                _ => dims.push(LoopSubscript { at, index: self.linear(i)?, extent: extent.max(0) as u64, stride }),
            }
        }
        Ok(ElementAccess { buffer: id.0, dtype, dims: dims.into(), constant: constant.into(), base })
    }

    fn node(&mut self, e: &Expr) -> Result<CompiledExpr, Fault> {
        Ok(match e {
            Expr::Const(x) => CompiledExpr::Const(defined(*x)),
            Expr::Load(b, index) => CompiledExpr::Load(self.access(*b, index)?),
            Expr::Gather(b, subscripts) => {
                let known: Vec<Index> = subscripts.iter().map(Subscript::known).collect();
                let access = self.access(*b, &known)?;
                let mut values = Vec::new();
                let buffer = self.program.buffer(*b);
                for ((subscript, extent), stride) in subscripts.iter().zip(&buffer.shape).zip(buffer.strides()) {
                    if let Subscript::Value(value) = subscript {
                        values.push((self.node(value)?, *extent, stride));
                    }
                }
                let rounds = Rounds { each: DType::I64, last: DType::I64 };
                CompiledExpr::Gather(Box::new(IndirectAccess { access, values, rounds }))
            }
            Expr::FromIndex(i) => CompiledExpr::FromIndex(self.linear(i)?),
            Expr::Unary(op, x) => CompiledExpr::Unary(*op, Box::new(self.node(x)?)),
            Expr::Binary(op, a, b) => CompiledExpr::Binary(*op, Box::new((self.node(a)?, self.node(b)?))),
            Expr::Select(c, a, b) => CompiledExpr::Select(Box::new((self.test(c)?, self.node(a)?, self.node(b)?))),
            Expr::Cast(dtype, x) => {
                let mut rounds = self.rounds(*dtype);
                if rounds_to_single(self.program, e) {
                    rounds.last = DType::F32;
                }
                CompiledExpr::Cast(rounds, Box::new(self.node(x)?))
            }
        })
    }

    pub fn condition(&mut self, cond: &Cond) -> Result<CompiledCondition, Fault> {
        self.test(cond).map(CompiledCondition)
    }

    fn test(&mut self, cond: &Cond) -> Result<CompiledTest, Fault> {
        Ok(match cond {
            Cond::True => CompiledTest::Constant(true),
            Cond::Lt(a, b) => CompiledTest::Lt(self.linear(a)?, self.linear(b)?),
            Cond::Eq(a, b) => {
                let (a, b) = (self.linear(a)?, self.linear(b)?);
                match (&*a.terms, &*b.terms) {
                    (&[(var, 1)], []) if a.rest.is_empty() && b.rest.is_empty() && a.constant == b.constant => {
                        CompiledTest::IsZero(var)
                    }
                    _ => CompiledTest::Eq(a, b),
                }
            }
            Cond::Less(a, b) => {
                let sides = Box::new((self.node(a)?, self.node(b)?));
                let dtype = Expr::arithmetic_of([a, b], &|b| self.program.buffer(b).dtype);
                CompiledTest::Less(self.rounds(dtype.unwrap_or(DType::F64)), sides)
            }
            Cond::And(a, b) => CompiledTest::And(Box::new((self.test(a)?, self.test(b)?))),
            Cond::Not(c) => match self.test(c)? {
                CompiledTest::Constant(c) => CompiledTest::Constant(!c),
                c => CompiledTest::Not(Box::new(c)),
            },
        })
    }
}

/// Marker that the interpreter has stopped with a fault.
pub(crate) struct Stopped;

/// Mode without rounding.
const AS_IS: u8 = 0;
/// Mode that rounds to f32, a fast path for the usual case.
const TO_F32: u8 = 1;

pub(crate) struct Interpreter<'a, M> {
    program: &'a Program,
    sources: &'a [Index],
    /// Values of the loop variables, by id.
    pub vars: Vec<i64>,
    /// Loops being run, outermost first.
    pub active: Vec<u32>,
    pub memory: M,
    limit: u64,
    pub left: u64,
    /// Fault set by evaluating functions, whose return value is then unused.
    fault: Option<Box<Fault>>,
}

impl<'a, M: Memory> Interpreter<'a, M> {
    /// Creates an interpreter outside all loops that may run `limit` iterations.
    pub fn new(program: &'a Program, sources: &'a [Index], memory: M, limit: u64) -> Interpreter<'a, M> {
        Interpreter {
            program,
            sources,
            // One additional element, as an index without variables reads the first.
            vars: vec![0; program.loops.len() + 1],
            active: Vec::new(),
            memory,
            limit,
            left: limit,
            fault: None,
        }
    }

    /// Takes the fault that stopped the interpreter.
    pub fn take_fault(&mut self) -> Fault {
        *self.fault.take().expect("a machine stops with a fault")
    }

    /// Runs a block.
    pub fn block(&mut self, block: &CompiledBlock) -> Result<(), Stopped> {
        self.open_block(block)?;
        for b in &block.allocs {
            self.memory.free(*b);
        }
        Ok(())
    }

    /// Runs a block without freeing its allocations.
    pub fn open_block(&mut self, block: &CompiledBlock) -> Result<(), Stopped> {
        block.ops.iter().try_for_each(|op| self.op(op))
    }

    fn op(&mut self, op: &CompiledOp) -> Result<(), Stopped> {
        match op {
            CompiledOp::For { var, extent, body, is_downwards, is_batched } => {
                let extent = self.linear(extent);
                self.check()?;
                let extent = extent.max(0);
                self.spend(extent as u64)?;
                self.active.push(*var);
                let outer = self.vars[*var as usize];
                if *is_batched {
                    self.batches(*var, extent, body)?;
                } else {
                    for i in 0..extent {
                        self.vars[*var as usize] = if *is_downwards { extent - 1 - i } else { i };
                        self.block(body)?;
                    }
                }
                self.vars[*var as usize] = outer;
                self.active.pop();
            }
            CompiledOp::If { test, then, otherwise } => {
                let holds = self.test(test);
                self.check()?;
                self.block(if holds { then } else { otherwise })?;
            }
            CompiledOp::Alloc(b) => {
                let buffer = &self.program.buffers[*b as usize];
                match n_elements(buffer) {
                    Ok(n) => {
                        // Filling the buffer is charged as iterations.
                        self.spend(n as u64 / 16)?;
                        self.memory.allocate(*b, n);
                    }
                    Err(fault) => {
                        self.stop(fault);
                        return Err(Stopped);
                    }
                }
            }
            CompiledOp::AddOfPair { to, factors } => {
                let [a, b] = factors.each_ref().map(|x| self.node::<TO_F32>(x));
                let at = self.locate(to);
                self.check()?;
                let old = self.read(to, at);
                if is_undefined(old) {
                    self.undefined(to);
                }
                self.check()?;
                self.write(to, at, add_of_pair(old, a, b))?;
            }
            CompiledOp::Wait(n) => self.memory.wait(*n),
            CompiledOp::Store { to, value, rounds } => {
                let value = self.value(value, *rounds);
                let at = self.locate(to);
                self.check()?;
                self.write(to, at, value)?;
            }
            CompiledOp::Update { to, op, value, first, rounds } => {
                let Rounds { each, last } = *rounds;
                let value = self.value(value, Rounds { each, last: each });
                let first = self.test(first);
                let at = self.locate(to);
                self.check()?;
                let is_whole = !each.is_float();
                let old = match first {
                    true if is_whole => each.held_whole(each.literal(op.identity())),
                    true => op.identity(),
                    false => self.read(to, at),
                };
                if !first && is_undefined(old) {
                    self.undefined(to);
                }
                self.check()?;
                if is_whole {
                    let old = if first { each.whole(old) } else { last.whole(old) };
                    let new = whole_binary(op.combine(), old, each.whole(value), each);
                    return self.write(to, at, last.held_whole(new));
                }
                self.write(to, at, rounds.of(apply_binary(op.combine(), old, value)))?;
            }
        }
        Ok(())
    }

    /// Reads an element; sets a fault and returns an arbitrary value if it does not exist.
    #[inline]
    fn read(&mut self, access: &ElementAccess, at: usize) -> f64 {
        match self.memory.read(access.buffer, at) {
            Some(value) => value,
            None => self.out_of_bounds(access) as f64,
        }
    }

    #[inline]
    fn write(&mut self, access: &ElementAccess, at: usize, value: f64) -> Result<(), Stopped> {
        self.memory.write(access.buffer, at, value).ok_or_else(|| {
            self.out_of_bounds(access);
            Stopped
        })
    }

    /// Deducts from the remaining iterations.
    pub fn spend(&mut self, n: u64) -> Result<(), Stopped> {
        match self.left.checked_sub(n) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.stop(Fault::TooLong { limit: self.limit });
                Err(Stopped)
            }
        }
    }

    #[inline]
    /// Checks that no fault has ended the evaluation.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.fault.is_some() { Err(Stopped) } else { Ok(()) }
    }

    #[inline]
    pub fn linear(&mut self, index: &Linear) -> i64 {
        index.eval(&self.vars).unwrap_or_else(|| self.bad_index(index))
    }

    /// Computes the position of an access in its buffer; sets a fault and returns an arbitrary position if it
    /// is out of bounds.
    #[inline]
    fn locate(&mut self, access: &ElementAccess) -> usize {
        let mut at = access.base;
        for dim in &*access.dims {
            let i = self.linear(&dim.index);
            if i as u64 >= dim.extent {
                return self.out_of_bounds(access);
            }
            at += i * dim.stride;
        }
        at as usize
    }

    #[inline]
    fn load(&mut self, access: &ElementAccess) -> f64 {
        let at = self.locate(access);
        // After a fault, the position is arbitrary.
        let value = self.read(access, at);
        if is_undefined(value) {
            self.undefined(access);
        }
        value
    }

    fn gather(&mut self, gather: &IndirectAccess) -> f64 {
        let mut at = self.locate(&gather.access) as i64;
        for (value, extent, stride) in &gather.values {
            let number = gather.rounds.last.whole(self.value(value, gather.rounds)) as i64;
            at += stride * Subscript::place(number, *extent);
        }
        // After a fault, the position is arbitrary.
        self.read(&gather.access, at as usize)
    }

    /// Evaluates a value, rounding each operation to the type `each` and the result to the type `last`.
    #[inline]
    fn value(&mut self, node: &CompiledExpr, Rounds { each, last }: Rounds) -> f64 {
        let value = match each {
            DType::F64 => self.node::<AS_IS>(node),
            DType::F32 => self.node::<TO_F32>(node),
            _ => {
                let whole = self.whole(node, each);
                return last.held_whole(whole);
            }
        };
        if last == each { value } else { last.round(value) }
    }

    /// Evaluates a floating-point number.
    fn node<const EACH: u8>(&mut self, node: &CompiledExpr) -> f64 {
        // Integers are rounded exactly once.
        let number = |dtype: DType, held: f64| match EACH {
            _ if !dtype.is_wide() => held,
            TO_F32 => f64::from(dtype.whole(held) as f32),
            _ => dtype.number(held),
        };
        let value = match node {
            CompiledExpr::Const(x) => *x,
            CompiledExpr::Load(access) => number(access.dtype, self.load(access)),
            CompiledExpr::Gather(gather) => number(gather.access.dtype, self.gather(gather)),
            CompiledExpr::FromIndex(i) => match EACH {
                TO_F32 => f64::from(self.linear(i) as f32),
                _ => self.linear(i) as f64,
            },
            CompiledExpr::Unary(op, x) => apply_unary(*op, self.node::<EACH>(x)),
            CompiledExpr::Binary(op, sides) => {
                let a = self.node::<EACH>(&sides.0);
                apply_binary(*op, a, self.node::<EACH>(&sides.1))
            }
            CompiledExpr::Select(parts) => {
                let (test, a, b) = &**parts;
                return if self.test(test) { self.node::<EACH>(a) } else { self.node::<EACH>(b) };
            }
            CompiledExpr::Cast(rounds, x) => number(rounds.last, self.value(x, *rounds)),
        };
        if EACH == TO_F32 { f64::from(value as f32) } else { value }
    }

    /// Evaluates an integer.
    fn whole(&mut self, node: &CompiledExpr, each: DType) -> i128 {
        let integer = |dtype: DType, held: f64| match dtype.is_float() {
            true => each.whole(each.held(held)),
            false => each.wrap(dtype.whole(held)),
        };
        match node {
            CompiledExpr::Const(x) => each.literal(*x),
            CompiledExpr::Load(access) => integer(access.dtype, self.load(access)),
            CompiledExpr::Gather(gather) => integer(gather.access.dtype, self.gather(gather)),
            CompiledExpr::FromIndex(i) => each.wrap(self.linear(i).into()),
            CompiledExpr::Unary(op, x) => whole_unary(*op, self.whole(x, each), each),
            CompiledExpr::Binary(op, sides) => {
                let a = self.whole(&sides.0, each);
                whole_binary(*op, a, self.whole(&sides.1, each), each)
            }
            CompiledExpr::Select(parts) => {
                let (test, a, b) = &**parts;
                if self.test(test) { self.whole(a, each) } else { self.whole(b, each) }
            }
            CompiledExpr::Cast(rounds, x) => integer(rounds.last, self.value(x, *rounds)),
        }
    }

    /// Whether a condition holds.
    pub fn condition(&mut self, condition: &CompiledCondition) -> bool {
        self.test(&condition.0)
    }

    fn test(&mut self, test: &CompiledTest) -> bool {
        match test {
            CompiledTest::Constant(c) => *c,
            CompiledTest::IsZero(var) => self.vars[*var as usize] == 0,
            CompiledTest::Lt(a, b) => self.linear(a) < self.linear(b),
            CompiledTest::Eq(a, b) => self.linear(a) == self.linear(b),
            CompiledTest::Less(rounds, sides) => {
                let (a, b) = (self.value(&sides.0, *rounds), self.value(&sides.1, *rounds));
                let dtype = rounds.last;
                if dtype.is_wide() { dtype.whole(a) < dtype.whole(b) } else { a < b }
            }
            CompiledTest::And(sides) => self.test(&sides.0) && self.test(&sides.1),
            CompiledTest::Not(c) => !self.test(c),
        }
    }

    fn place(&self) -> IterationPoint {
        IterationPoint(
            self.active.iter().map(|v| (self.program.loops[*v as usize].clone(), self.vars[*v as usize])).collect(),
        )
    }

    /// Keeps the first fault of a statement.
    fn stop(&mut self, fault: Fault) {
        self.fault.get_or_insert(Box::new(fault));
    }

    #[cold]
    fn bad_index(&mut self, index: &Linear) -> i64 {
        let source = &self.sources[index.source as usize];
        let (by_zero, index, place) =
            (divides_by_zero(source, &self.vars), index_to_string(self.program, source), self.place());
        self.stop(if by_zero { Fault::DivisionByZero { index, place } } else { Fault::Overflow { index, place } });
        0
    }

    fn subscripts(&self, access: &ElementAccess) -> Vec<i64> {
        let mut all = access.constant.to_vec();
        access.dims.iter().for_each(|d| all[d.at] = d.index.eval(&self.vars).unwrap_or(0));
        all
    }

    #[cold]
    fn out_of_bounds(&mut self, access: &ElementAccess) -> usize {
        let Buffer { name, shape, .. } = &self.program.buffers[access.buffer as usize];
        let subscripts = self.subscripts(access);
        let inside = subscripts.iter().zip(shape).all(|(i, extent)| (0..*extent).contains(i));
        let (buffer, place) = (name.clone(), self.place());
        self.stop(if inside {
            Fault::NotAllocated { buffer, place }
        } else {
            Fault::OutOfBounds { buffer, subscripts, shape: shape.clone(), place }
        });
        0
    }

    #[cold]
    fn undefined(&mut self, access: &ElementAccess) {
        let buffer = self.program.buffers[access.buffer as usize].name.clone();
        self.stop(Fault::Undefined { buffer, subscripts: self.subscripts(access), place: self.place() });
    }
}

fn divides_by_zero(index: &Index, vars: &[i64]) -> bool {
    let value_of = |v: LoopId| vars[v.0 as usize];
    index.terms().iter().any(|(atom, _)| match atom {
        Atom::Var(_) => false,
        Atom::FloorDiv(x, d) | Atom::Mod(x, d) => divides_by_zero(x, vars) || (*d == 0 && x.eval(&value_of).is_some()),
        Atom::Min(a, b) | Atom::Max(a, b) => divides_by_zero(a, vars) || divides_by_zero(b, vars),
    })
}
