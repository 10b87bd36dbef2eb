//! Tolerances, the largest allowed errors of a result against the trusted one, and the test data for which
//! they are derived.

use crate::dot::is_factor;
use crate::dtype::{DType, RandomSize};
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, Subscript, TreePart, UnaryOp};
use crate::index::Ranges;
use crate::program::{Buffer, BufferId, Program, Role, Stmt, TensorProduct};
use crate::schedule::{Step, winograd};
use thiserror::Error;

/// Tolerance of a result: `x` agrees with the trusted `r` if `|x − r| ≤ abs + rel·|r|`.
///
/// The bounds hold for inputs of [`random_input`]: magnitudes in `[0.5, 1.5)` with random signs.
///
/// A sum of `K` products of two such inputs is a random walk: the products have the root mean square
/// `σ = 1.08`, partial sums after `k` steps are of the order `σ√k`, and the `K` roundings, each of at most
/// `u` times a partial sum (`u = 2⁻²⁴` for `f32`), are practically independent. Their sum has a standard
/// deviation of about `0.4·u·σ·K`; in a result whose partial sums happen to be six times as large as usual,
/// of at most `3.5·u·σ·K`. Six standard deviations of that, rounded up, give `abs = 24·u·σ·K`, which no
/// kernel reaches by rounding alone, in any order of summation; fewer roundings, as with several partial sums
/// or fused multiply-adds, only make the bound safer. In contrast, a missing product is an error of at least
/// `0.25`: at `K = 65536` in `f32`, `abs` is `0.10`, so a single such element is detected.
///
/// For programs of several stages, [`Tolerance::for_program`] propagates magnitudes and bounds from stage to
/// stage by the usual rules; sums of values that are not symmetric about zero grow with `K` instead of `√K`,
/// and so do the bounds.
///
/// Winograd's minimal filtering ([`Step::Winograd`]) computes results as differences of larger numbers, which
/// [`Tolerance::for_schedule`] takes into account. Let `w` be the size of the products in the worst result of
/// a tile (94 for tiles of 4 × 4 in units of `σ`, compared to 3 for direct convolution). The sums over
/// `C = K / 9` channels then have an error with a standard deviation of `0.4·u·σ·w·C`, and the roundings of
/// the three transforms, some four of the full size in each, one of `3.7·u·σ·w·√C`. As a result combines many
/// sums, an unusually large one has little influence: twelve standard deviations are the bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute part.
    pub abs: f64,
    /// Part relative to the trusted value.
    pub rel: f64,
}

/// Errors of a wrong result: their number, the first one, and the largest error.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("{n_wrong} elements are wrong, first number {first}: {got} instead of {expected}; largest error {max_error}")]
pub struct Mismatch {
    /// Number of wrong elements.
    pub n_wrong: usize,
    /// Row-major index of the first wrong element.
    pub first: usize,
    /// Value computed at `first`.
    pub got: f64,
    /// Trusted value at `first`.
    pub expected: f64,
    /// Largest absolute error; NaN if any error is NaN.
    pub max_error: f64,
}

impl Mismatch {
    /// Merges two mismatches; `later` covers elements after those of `self`.
    pub fn and(self, later: Mismatch) -> Mismatch {
        let is_nan = self.max_error.is_nan() || later.max_error.is_nan();
        let max_error = if is_nan { f64::NAN } else { self.max_error.max(later.max_error) };
        Mismatch { n_wrong: self.n_wrong + later.n_wrong, max_error, ..self }
    }
}

impl Tolerance {
    /// Tolerance for all outputs of a program, from the extents of its reductions and its element types.
    pub fn for_program(program: &Program) -> Tolerance {
        Tolerance::for_schedule(program, &[])
    }

    /// Tolerance for a program scheduled by these steps.
    pub fn for_schedule(program: &Program, steps: &[Step]) -> Tolerance {
        // TF32 has ten bits after the leading one, rounded to nearest.
        let how = |step: &Step| if let Step::Tensorize { how, .. } = step { Some(*how) } else { None };
        let of_halves = program.buffers.iter().any(|b| b.dtype.is_half());
        let rounded = steps.iter().filter_map(how).map(|how| match how {
            TensorProduct::Tf32x3
            | TensorProduct::Halves
            | TensorProduct::Wgmmax3
            | TensorProduct::Dot4
            | TensorProduct::Dot2
            | TensorProduct::Tma => 0.0,
            TensorProduct::Wgmma if of_halves => 0.0,
            TensorProduct::Tf32 | TensorProduct::Wgmma => 1.0 / 2048.0,
        });
        Tolerance::for_rounded_factors(program, steps, rounded.fold(0.0, f64::max))
    }

    /// Tolerance for inputs that are rounded by up to `rel` of their value before multiplication; 2⁻¹⁰ for
    /// TF32 operands, which tensor cores truncate after ten bits.
    pub fn for_rounded_factors(program: &Program, steps: &[Step], rel: f64) -> Tolerance {
        let filtered = |step: &Step| match step {
            Step::Winograd { buffer, tile } => Some((program.buffers.iter().position(|b| b.name == *buffer)?, *tile)),
            _ => None,
        };
        let inputs = |role| matches!(role, Role::Input | Role::ConstInput);
        let input = |dtype| ValueStatistics { rel, ..ValueStatistics::of_input(dtype) };
        let mut walk = ErrorWalk {
            program,
            sizes: program.buffers.iter().map(|b| inputs(b.role).then(|| input(b.dtype))).collect(),
            ranges: program.ranges(),
            filtered: steps.iter().filter_map(filtered).collect(),
        };
        program.parts().into_iter().for_each(|block| walk.block(block));
        let mut tolerance = Tolerance { abs: 0.0, rel: 0.0 };
        let outputs = program.buffers.iter().zip(&walk.sizes).filter(|(b, _)| b.role == Role::Output);
        for (buffer, size) in outputs {
            let size = size.unwrap_or(ValueStatistics::of_input(buffer.dtype));
            // Roundings of the trusted result itself are significant compared with those of an `f64` kernel.
            let of_reference = if buffer.dtype == DType::F64 { 2.0 } else { 1.0 };
            tolerance.abs = tolerance.abs.max(size.abs * of_reference);
            tolerance.rel = tolerance.rel.max(size.rel * of_reference + 4.0 * buffer.dtype.unit());
        }
        tolerance
    }

    /// Compares a result with the trusted one. NaN agrees only with NaN.
    ///
    /// # Errors
    /// [`Mismatch`] if an element does not agree.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn compare<T: Copy + Into<f64>>(&self, out: &[T], reference: &[f64]) -> Result<(), Mismatch> {
        assert_eq!(out.len(), reference.len(), "a result has as many elements as the trusted one");
        // Nearly every element agrees, so a loop without branches, which compiles to vector code, skips parts
        // without mismatches.
        const PART: usize = 1024;
        let mut mismatch: Option<Mismatch> = None;
        for (at, (out, reference)) in out.chunks(PART).zip(reference.chunks(PART)).enumerate() {
            let agrees = |got: f64, expected: f64| (got - expected).abs() <= self.abs + self.rel * expected.abs();
            let close = out.iter().zip(reference).fold(true, |all, (&got, &expected)| {
                all & agrees(got.into(), expected) & (expected.abs() < f64::INFINITY)
            });
            if !close {
                self.compare_part(out, reference, at * PART, &mut mismatch);
            }
        }
        mismatch.map_or(Ok(()), Err)
    }

    fn compare_part<T: Copy + Into<f64>>(
        &self,
        out: &[T],
        reference: &[f64],
        start: usize,
        mismatch: &mut Option<Mismatch>,
    ) {
        for (i, (got, &expected)) in (start..).zip(out.iter().zip(reference)) {
            let got: f64 = (*got).into();
            let error = (got - expected).abs();
            let is_same = got == expected || got.is_nan() && expected.is_nan();
            if is_same || error <= self.abs + self.rel * expected.abs() && expected.is_finite() {
                continue;
            }
            let m = mismatch.get_or_insert(Mismatch { n_wrong: 0, first: i, got, expected, max_error: 0.0 });
            m.n_wrong += 1;
            if m.max_error.is_nan() || error.is_nan() || error > m.max_error {
                m.max_error = if m.max_error.is_nan() { f64::NAN } else { error };
            }
        }
    }
}

/// Relative error of a whole result: ‖out − reference‖₂ / ‖reference‖₂.
///
/// # Panics
/// If the lengths differ.
pub fn relative_error<T: Copy + Into<f64>>(out: &[T], reference: &[f64]) -> f64 {
    relative_error_of([squared(out, reference)])
}

/// Relative error of a whole result from the [squared](squared) errors and norms of its parts.
pub fn relative_error_of(parts: impl IntoIterator<Item = [f64; 2]>) -> f64 {
    let [error, norm] = parts.into_iter().fold([0.0; 2], |[e, n], [error, norm]| [e + error, n + norm]);
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// Squared error ‖out − reference‖₂² and squared norm ‖reference‖₂² of a part of a result.
///
/// # Panics
/// If the lengths differ.
pub fn squared<T: Copy + Into<f64>>(out: &[T], reference: &[f64]) -> [f64; 2] {
    assert_eq!(out.len(), reference.len(), "a result has as many elements as the trusted one");
    // Independent sums and parts of equal length make the loop vectorizable.
    const SUMS: usize = 8;
    let (mut errors, mut norms) = ([0.0; SUMS], [0.0; SUMS]);
    let squares = |got: T, expected: f64| {
        let got = got.into();
        let is_same = got == expected || got.is_nan() && expected.is_nan();
        let error = if is_same { 0.0 } else { got - expected };
        (error * error, if expected.is_finite() { expected * expected } else { 0.0 })
    };
    let ((parts, rest), (of, of_rest)) = (out.as_chunks::<SUMS>(), reference.as_chunks::<SUMS>());
    for (out, reference) in parts.iter().zip(of) {
        for at in 0..SUMS {
            let (error, norm) = squares(out[at], reference[at]);
            errors[at] += error;
            norms[at] += norm;
        }
    }
    for (at, (&got, &expected)) in rest.iter().zip(of_rest).enumerate() {
        let (error, norm) = squares(got, expected);
        errors[at] += error;
        norms[at] += norm;
    }
    [errors.iter().sum(), norms.iter().sum()]
}

/// Random values for an input: magnitudes in `[0.5, 1.5)` with random signs, so that no product vanishes and
/// sums stay small.
///
/// Every value is exact in `f32`, and the product of two is exact in `f64`. The same seed gives the same
/// values; the first `n` do not depend on `n`.
///
/// # Source
/// The generator is splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
/// generators", OOPSLA 2014.
pub fn random_input(seed: u64, n: usize) -> impl ExactSizeIterator<Item = f64> {
    random_elements(DType::F32, seed, n)
}

/// Seeded [random values](DType::random) of an element type.
pub fn random_elements(dtype: DType, seed: u64, n: usize) -> impl ExactSizeIterator<Item = f64> {
    (0..n).map(move |at| dtype.random(random_bits(seed, at)))
}

/// Random values for an input of a program: [`random_elements`], or, if the input is a subscript of a gather,
/// valid indices over the whole gathered input.
pub fn random_argument(program: &Program, id: BufferId, seed: u64) -> Vec<f64> {
    random_argument_on(program, id, seed, 1)
}

/// Random values equal to those of [`random_argument`], generated on `n_threads` threads.
pub fn random_argument_on(program: &Program, id: BufferId, seed: u64, n_threads: usize) -> Vec<f64> {
    let buffer = program.buffer(id);
    let n = buffer.n_elements().unwrap_or(0) as usize;
    let dtype = buffer.dtype;
    if is_factor(dtype) && is_multiplied(program, id) {
        let row = row_of(&buffer.shape);
        return filled(n, n_threads, |at| dtype.read(&[factor(row, seed, at)])[0]);
    }
    if dtype == DType::F32
        && let Some(half) = rounded_factor(program, id)
    {
        return filled(n, n_threads, |at| half.random(random_bits(seed, at)));
    }
    if dtype == DType::F32 && scales_sums(program, id) {
        return filled(n, n_threads, |at| small(random_bits(seed, at), dtype.random(random_bits(seed, at))));
    }
    match n_places(program, id).filter(|_| !dtype.is_float()) {
        Some(places) => filled(n, n_threads, |at| dtype.round((random_bits(seed, at) % places) as f64)),
        None => filled(n, n_threads, |at| dtype.random(random_bits(seed, at))),
    }
}

/// Computes `n` values on `n_threads` threads.
fn filled(n: usize, n_threads: usize, value: impl Fn(usize) -> f64 + Sync) -> Vec<f64> {
    let mut values = vec![0.0; n];
    let part = n.div_ceil(n_threads.max(1)).max(1);
    let fill = |start: usize, part: &mut [f64]| {
        part.iter_mut().zip(start..).for_each(|(x, at)| *x = value(at));
    };
    std::thread::scope(|scope| {
        let mut parts = values.chunks_mut(part).zip((0..).step_by(part));
        let own = parts.next();
        for (part, start) in parts {
            scope.spawn(move || fill(start, part));
        }
        if let Some((part, start)) = own {
            fill(start, part);
        }
    });
    values
}

/// Number of elements of a row of extreme values: a row of a matrix, or the elements of one channel of an
/// image or filter.
fn row_of(shape: &[i64]) -> usize {
    let row = match shape.iter().position(|n| *n > 1) {
        Some(first) if shape.len() > 3 => shape[first + 1..].iter().product(),
        _ => shape.last().copied().unwrap_or(1),
    };
    row.max(1) as usize
}

/// Whether a value is an element of a buffer, possibly under a condition.
fn holds(value: &Expr, id: BufferId) -> bool {
    match value {
        Expr::Load(b, _) => *b == id,
        Expr::Select(_, a, b) => holds(a, id) || holds(b, id),
        _ => false,
    }
}

/// 16-bit type to which elements of an f32 buffer, or of a copy of it, are rounded before they are multiplied
/// and summed. Inputs of that type make the rounding exact.
fn rounded_factor(program: &Program, id: BufferId) -> Option<DType> {
    let rounds = |factor: &Expr| match factor {
        Expr::Cast(dtype, x) if dtype.is_half() && holds(x, id) => Some(*dtype),
        _ => None,
    };
    let (mut found, mut copies) = (None, Vec::new());
    for stmt in program.parts().into_iter().flatten() {
        stmt.walk(&mut |stmt| match stmt {
            Stmt::Update { op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, a, b), .. } => {
                found = found.or(rounds(a)).or(rounds(b));
            }
            Stmt::Store { buffer, value, .. } if *buffer != id && holds(value, id) => copies.push(*buffer),
            _ => {}
        });
    }
    let of_copy = |copy: BufferId| match program.buffer(copy).dtype {
        dtype if dtype.is_half() => is_multiplied(program, copy).then_some(dtype),
        _ => rounded_factor(program, copy),
    };
    found.or_else(|| copies.into_iter().find_map(of_copy))
}

/// Whether elements of a buffer, or of a copy of it, are factors of summed products.
fn is_multiplied(program: &Program, id: BufferId) -> bool {
    let is_it = |factor: &Expr| holds(factor, id);
    let mut copies = Vec::new();
    let mut found = false;
    for stmt in program.parts().into_iter().flatten() {
        stmt.walk(&mut |stmt| {
            if let Stmt::Update { op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, a, b), .. } = stmt {
                found |= is_it(a) || is_it(b);
            }
            if let Stmt::Store { buffer, value, .. } = stmt
                && is_it(value)
            {
                copies.push(*buffer);
            }
        });
    }
    found || copies.into_iter().any(|copy| copy != id && is_multiplied(program, copy))
}

/// Whether elements of a buffer multiply sums of integers.
fn scales_sums(program: &Program, id: BufferId) -> bool {
    let is_sum = |x: &Expr| match x {
        Expr::Load(b, _) => program.buffer(*b).dtype == DType::I32,
        Expr::Cast(dtype, _) => *dtype == DType::I32,
        _ => false,
    };
    let mut found = false;
    let mut visit = |node: TreePart| {
        if let TreePart::Expr(Expr::Binary(BinaryOp::Mul, sum, factor)) = node
            && let (Expr::Cast(DType::F32, sum), Expr::Load(b, _)) = (&**sum, &**factor)
        {
            found |= *b == id && is_sum(sum);
        }
    };
    for stmt in program.parts().into_iter().flatten() {
        stmt.walk(&mut |stmt| stmt.own_nodes().for_each(|node| node.walk(&mut visit)));
    }
    found
}

/// Returns a number less than one sixteenth, often much less, so that most sums of bytes scaled by it fit in
/// a byte.
fn small(bits: u64, x: f64) -> f64 {
    DType::F32.round(x * 0.5f64.powi(4 + (bits % 16) as i32))
}

/// Byte of a factor at a position, in rows of `row` elements. Most are random; some rows and columns consist
/// of extreme values of one sign, to detect sums that saturate in between.
fn factor(row: usize, seed: u64, at: usize) -> u8 {
    // Largest unsigned byte, largest signed byte, smallest signed byte, zero.
    const ENDS: [u8; 4] = [0xff, 0x7f, 0x80, 0];
    match (at / row % 8, at % row % 8) {
        (line @ 0..4, _) => ENDS[line],
        (_, line @ 4..8) => ENDS[line - 4],
        _ => random_bits(seed, at) as u8,
    }
}

/// Number of valid positions for the values of a buffer that is a subscript of a gather.
fn n_places(program: &Program, id: BufferId) -> Option<u64> {
    fn is_of(value: &Expr, id: BufferId) -> bool {
        match value {
            Expr::Load(b, _) => *b == id,
            Expr::Cast(dtype, x) => !dtype.is_float() && is_of(x, id),
            _ => false,
        }
    }
    let mut least: Option<u64> = None;
    let mut visit = |node: TreePart| {
        if let TreePart::Expr(Expr::Gather(from, subscripts)) = node {
            let of_each = subscripts.iter().zip(&program.buffer(*from).shape);
            let places = of_each.filter_map(|(subscript, extent)| match subscript {
                Subscript::Value(value) if is_of(value, id) => Some(*extent as u64),
                Subscript::Value(_) | Subscript::Index(_) => None,
            });
            least = least.into_iter().chain(places).min();
        }
    };
    for stmt in program.parts().into_iter().flatten() {
        stmt.walk(&mut |stmt| stmt.own_nodes().for_each(|node| node.walk(&mut visit)));
    }
    least
}

fn random_bits(seed: u64, at: usize) -> u64 {
    let mut z = seed.wrapping_add((at as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Ratio of the largest random value to the root mean square that is practically never exceeded.
const PEAK: f64 = 6.0;

/// Statistics of the values of a buffer or an expression.
#[derive(Clone, Copy)]
struct ValueStatistics {
    /// Root mean square.
    rms: f64,
    /// Whether the values are symmetric about zero and independent, so that their sums are random walks.
    symmetric: bool,
    /// Absolute part of the error bound.
    abs: f64,
    /// Relative part of the error bound.
    rel: f64,
}

impl ValueStatistics {
    /// Statistics of a random input.
    fn of_input(dtype: DType) -> ValueStatistics {
        let RandomSize { rms, is_symmetric, .. } = dtype.random_size();
        ValueStatistics { rms, symmetric: is_symmetric, abs: 0.0, rel: 0.0 }
    }

    /// Adds the error of rounding to a type: an inexact integer may be off by one.
    fn rounded_to(self, dtype: DType) -> ValueStatistics {
        if dtype.is_float() || self.error() == 0.0 { self } else { ValueStatistics { abs: self.abs + 1.0, ..self } }
    }

    /// Combines both statistics to cover either value.
    fn or(self, other: ValueStatistics) -> ValueStatistics {
        ValueStatistics {
            rms: self.rms.max(other.rms),
            symmetric: self.symmetric && other.symmetric,
            abs: self.abs.max(other.abs),
            rel: self.rel.max(other.rel),
        }
    }

    /// Total error at the largest values.
    fn error(self) -> f64 {
        self.abs + self.rel * PEAK * self.rms
    }
}

struct ErrorWalk<'a> {
    program: &'a Program,
    /// Statistics of each buffer; `None` before it is written.
    sizes: Vec<Option<ValueStatistics>>,
    ranges: Ranges,
    /// Buffers computed by minimal filtering (Winograd), with their tile sizes.
    filtered: Vec<(usize, i64)>,
}

impl ErrorWalk<'_> {
    fn dtype(&self, buffer: usize) -> DType {
        self.program.buffers.get(buffer).map_or(DType::F32, |b| b.dtype)
    }

    fn block(&mut self, block: &[Stmt]) {
        for stmt in block {
            match stmt {
                Stmt::For(l) => {
                    self.ranges.push(l.var, l.extent.clone());
                    self.block(&l.body);
                    self.ranges.pop();
                }
                Stmt::If { then, otherwise, .. } => {
                    self.block(then);
                    self.block(otherwise);
                }
                Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {}
                Stmt::Store { buffer, value, .. } => {
                    let dtype = self.dtype(buffer.0 as usize);
                    let mut size = self.expr(value, dtype.unit()).rounded_to(dtype);
                    // Values exact in f32 are exact in the 16-bit types, too: see `random_argument`.
                    let is_on_the_way = self
                        .program
                        .buffers
                        .get(buffer.0 as usize)
                        .is_some_and(|b| b.role == Role::Temporary && dtype.is_half());
                    if is_on_the_way && size.error() > 0.0 {
                        size.rel += dtype.unit();
                    }
                    let is_rounded = matches!(value, Expr::Cast(DType::F32, _)) && dtype == DType::F32;
                    if (!dtype.is_float() || is_rounded) && self.is_exact(value) {
                        (size.abs, size.rel) = (0.0, 0.0);
                    }
                    self.written(buffer.0 as usize, size);
                }
                Stmt::Update { buffer, index, op, value, first } => {
                    let dtype = self.dtype(buffer.0 as usize);
                    let u = dtype.unit();
                    let mut size = self.expr(value, u).rounded_to(dtype);
                    let mut n = 1.0;
                    for (var, extent) in self.ranges.loops() {
                        if !index.iter().any(|i| i.uses(*var)) {
                            n *= self.ranges.upper(extent).unwrap_or(1).max(1) as f64;
                        }
                    }
                    if *op == ReduceOp::Product {
                        let rel = n * (size.rel + size.abs / size.rms.max(f64::MIN_POSITIVE) + 2.0 * u);
                        size = ValueStatistics { rms: size.rms.powf(n), abs: 0.0, rel, ..size };
                    }
                    if *op == ReduceOp::Sum {
                        let growth = self.filtered.iter().filter(|(b, _)| *b == buffer.0 as usize);
                        let growth = growth.filter_map(|&(_, tile)| growth_of_filtering(tile, n)).fold(1.0, f64::max);
                        size = sum(size, n, u, growth);
                    }
                    let goes_on = *first == Cond::Not(Box::new(Cond::True));
                    if let (true, Some(old)) = (goes_on, self.sizes.get(buffer.0 as usize).copied().flatten()) {
                        size = add(size, old, u);
                    }
                    self.written(buffer.0 as usize, size);
                }
            }
        }
    }

    fn written(&mut self, buffer: usize, size: ValueStatistics) {
        if let Some(known) = self.sizes.get_mut(buffer) {
            *known = Some(known.map_or(size, |k| k.or(size)));
        }
    }

    /// Ratio of an expression's largest value to its root mean square.
    fn peak(&self, expr: &Expr) -> f64 {
        let buffer = match expr {
            Expr::Const(_) => return 1.0,
            Expr::Load(b, _) | Expr::Gather(b, _) => self.program.buffers.get(b.0 as usize),
            _ => None,
        };
        match buffer {
            Some(Buffer { role: Role::Input | Role::ConstInput, dtype, .. }) => {
                dtype.random_size().most / dtype.random_size().rms
            }
            _ => PEAK,
        }
    }

    /// Whether a value does not depend on the precision of evaluation: each step is exact, or explicitly
    /// rounded to f32, as in the quantization of sums. A sum, product or quotient of two f32 numbers computed
    /// in f64 and rounded to f32 is correctly rounded.
    fn is_exact(&self, expr: &Expr) -> bool {
        let is_short = |e: &Expr| match e {
            Expr::Load(b, _) => {
                let is_held = |dtype: DType| dtype == DType::F32 || !dtype.is_float() && !dtype.is_wide();
                let error =
                    self.sizes.get(b.0 as usize).copied().flatten().map_or(f64::INFINITY, ValueStatistics::error);
                error == 0.0 && is_held(self.dtype(b.0 as usize))
            }
            e => self.is_exact(e),
        };
        match expr {
            Expr::Const(x) => f64::from(*x as f32) == *x,
            Expr::Load(..) => is_short(expr),
            Expr::Cast(DType::F32 | DType::I32, x) => match &**x {
                Expr::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div, a, b) => {
                    is_short(a) && is_short(b)
                }
                x => self.is_exact(x),
            },
            Expr::Cast(dtype, x) => !dtype.is_float() && self.is_exact(x),
            Expr::Unary(UnaryOp::Round | UnaryOp::Neg | UnaryOp::Abs, x) => self.is_exact(x),
            Expr::Binary(BinaryOp::Min | BinaryOp::Max, a, b) => self.is_exact(a) && self.is_exact(b),
            Expr::Select(is, a, b) => {
                let is_known = match &**is {
                    Cond::Less(a, b) => self.is_exact(a) && self.is_exact(b),
                    _ => false,
                };
                is_known && self.is_exact(a) && self.is_exact(b)
            }
            _ => false,
        }
    }

    fn expr(&self, expr: &Expr, u: f64) -> ValueStatistics {
        if let Some(x) = logistic_argument(expr) {
            // The slope is at most 1/4, regardless of the magnitude of the exponential.
            let abs = 0.25 * self.expr(x, u).error().min(4.0) + 8.0 * u;
            return ValueStatistics { rms: 1.0, symmetric: false, abs, rel: 4.0 * u };
        }
        if let Some((x, slope)) = swish_argument(expr) {
            let x = self.expr(x, u);
            return ValueStatistics {
                symmetric: false,
                abs: slope * x.error() + 8.0 * u * PEAK * x.rms,
                rel: 8.0 * u,
                ..x
            };
        }
        if let Some(x) = gelu_argument(expr) {
            // The slope is at most 1.13, although the error of the separate factors would suggest more.
            let x = self.expr(x, u);
            return ValueStatistics {
                symmetric: false,
                abs: 1.13 * x.error() + 8.0 * u * PEAK * x.rms,
                rel: 8.0 * u,
                ..x
            };
        }
        match expr {
            Expr::Const(x) => {
                let rms = if x.is_finite() { x.abs() } else { 0.0 };
                ValueStatistics { rms, symmetric: rms == 0.0, abs: 0.0, rel: u }
            }
            Expr::Load(b, _) | Expr::Gather(b, _) => {
                self.sizes.get(b.0 as usize).copied().flatten().unwrap_or(ValueStatistics::of_input(DType::F32))
            }
            Expr::FromIndex(i) => {
                let most = |b: Option<i64>| b.map_or(1024.0, |b| (b as f64).abs());
                let rms = most(self.ranges.upper(i)).max(most(self.ranges.lower(i)));
                ValueStatistics { rms, symmetric: false, abs: 0.0, rel: u }
            }
            Expr::Unary(op, x) => unary(*op, self.expr(x, u), u),
            Expr::Binary(op, a, b) => {
                let (left, right) = (self.expr(a, u), self.expr(b, u));
                match op {
                    BinaryOp::Add | BinaryOp::Sub => add(left, right, u),
                    BinaryOp::Mul => ValueStatistics {
                        rms: left.rms * right.rms,
                        symmetric: (left.symmetric || right.symmetric) && a != b,
                        abs: self.peak(a) * left.rms * right.abs + self.peak(b) * right.rms * left.abs,
                        rel: left.rel + right.rel + 2.0 * u,
                    },
                    // Divisors are assumed not to be close to zero.
                    BinaryOp::Div => {
                        let divisor = right.rms.max(f64::MIN_POSITIVE);
                        ValueStatistics {
                            rms: left.rms / divisor,
                            symmetric: left.symmetric,
                            abs: PEAK * left.abs / divisor,
                            rel: left.rel + right.rel + PEAK * right.abs / divisor + 2.0 * u,
                        }
                    }
                    BinaryOp::Min | BinaryOp::Max => ValueStatistics { symmetric: false, ..left.or(right) },
                    BinaryOp::Nibble => ValueStatistics { rms: 9.0, symmetric: false, abs: 0.0, rel: 0.0 },
                    // The relative error of the base is multiplied by the exponent, the error of the exponent
                    // by the base's logarithm.
                    BinaryOp::Pow => {
                        let exponent = right.rms.max(1.0) * if matches!(**b, Expr::Const(_)) { 1.0 } else { PEAK };
                        let base = left.rms.max(f64::MIN_POSITIVE);
                        let rel = exponent * (left.rel + left.abs / base) + base.ln().abs().max(1.0) * right.error();
                        ValueStatistics {
                            rms: base.powf(right.rms),
                            symmetric: false,
                            abs: PEAK * left.abs,
                            rel: rel + 8.0 * u,
                        }
                    }
                }
            }
            Expr::Select(_, a, b) => self.expr(a, u).or(self.expr(b, u)),
            Expr::Cast(dtype, x) => self.expr(x, dtype.unit()).rounded_to(*dtype),
        }
    }
}

/// Matches `x · g(x)`, where `g` is the logistic function or piecewise linear from 0 to 1; returns `x` and
/// the largest slope.
fn swish_argument(expr: &Expr) -> Option<(&Expr, f64)> {
    let Expr::Binary(BinaryOp::Mul, x, gate) = expr else { return None };
    if logistic_argument(gate).is_some_and(|argument| argument == &**x) {
        return Some((x, 1.1));
    }
    let Expr::Binary(BinaryOp::Min, above, one) = &**gate else { return None };
    let Expr::Binary(BinaryOp::Max, sum, zero) = &**above else { return None };
    let Expr::Binary(BinaryOp::Add, product, term) = &**sum else { return None };
    let Expr::Binary(BinaryOp::Mul, same, _) = &**product else { return None };
    let (Expr::Const(term), true) = (&**term, same == x) else { return None };
    // Where the gate g is the line factor·x + term, the slope is 2·g − term.
    let slope = 1f64.max(term.abs()).max((2.0 - term).abs());
    (**one == Expr::Const(1.0) && **zero == Expr::Const(0.0)).then_some((x, slope))
}

/// Matches `1 / (1 + exp(neg(x)))` and returns `x`.
fn logistic_argument(expr: &Expr) -> Option<&Expr> {
    let Expr::Binary(BinaryOp::Div, one, divisor) = expr else { return None };
    let Expr::Binary(BinaryOp::Add, one_more, power) = &**divisor else { return None };
    let Expr::Unary(UnaryOp::Exp, negated) = &**power else { return None };
    let Expr::Unary(UnaryOp::Neg, x) = &**negated else { return None };
    [one, one_more].iter().all(|e| ***e == Expr::Const(1.0)).then_some(&**x)
}

/// Matches `(0.5 · x) · (1 + erf(x · 1/√2))` and returns `x`.
fn gelu_argument(expr: &Expr) -> Option<&Expr> {
    let Expr::Binary(BinaryOp::Mul, half, share) = expr else { return None };
    let Expr::Binary(BinaryOp::Mul, factor, x) = &**half else { return None };
    let Expr::Binary(BinaryOp::Add, one, erf) = &**share else { return None };
    let Expr::Unary(UnaryOp::Erf, scaled) = &**erf else { return None };
    let Expr::Binary(BinaryOp::Mul, same, scale) = &**scaled else { return None };
    let constants = [(factor, 0.5), (one, 1.0), (scale, std::f64::consts::FRAC_1_SQRT_2)];
    (x == same && constants.iter().all(|(e, value)| ***e == Expr::Const(*value))).then_some(&**x)
}

fn add(a: ValueStatistics, b: ValueStatistics, u: f64) -> ValueStatistics {
    let rms = a.rms + b.rms;
    ValueStatistics {
        rms,
        symmetric: a.symmetric && b.symmetric,
        // Cancellation does not remove the operands' errors.
        abs: a.error() + b.error() + u * PEAK * rms,
        rel: 2.0 * u,
    }
}

/// Factor of a plain sum's error bound, which is [`SUM`]` · u·√n` times its size.
const SUM: f64 = 24.0;

/// Ratio of the bound of a sum of `n` products, computed by minimal filtering with such tiles, to that of a
/// plain sum.
fn growth_of_filtering(tile: i64, n: f64) -> Option<f64> {
    let n_channels = n / 9.0;
    let deviation = winograd::size_of_products(tile)? * (0.4 * n_channels + 3.7 * n_channels.sqrt());
    Some(12.0 * deviation / (SUM * n))
}

/// Statistics of a sum of `n` values: `√n` times their size if they are symmetric, else `n` times. Its
/// rounding errors are up to `roundings` times those of a plain sum.
fn sum(x: ValueStatistics, n: f64, u: f64, roundings: f64) -> ValueStatistics {
    let growth = if x.symmetric { n.sqrt() } else { n };
    let spread = if x.symmetric { PEAK * n.sqrt() } else { n };
    let rms = growth * x.rms;
    ValueStatistics {
        rms,
        symmetric: x.symmetric,
        abs: spread * (x.abs + x.rel * x.rms) + roundings * SUM * u * n.sqrt() * rms,
        rel: x.rel + 4.0 * u,
    }
}

fn unary(op: UnaryOp, x: ValueStatistics, u: f64) -> ValueStatistics {
    match op {
        UnaryOp::Neg => x,
        UnaryOp::Abs => ValueStatistics { symmetric: false, ..x },
        // An absolute error of the argument is a relative error of the value. Subnormal values lose digits.
        UnaryOp::Exp => {
            ValueStatistics { rms: x.rms.min(60.0).exp(), symmetric: false, abs: 1e-37, rel: x.error() + 4.0 * u }
        }
        UnaryOp::Expm1 => {
            let power = unary(UnaryOp::Exp, x, u);
            ValueStatistics { symmetric: false, abs: power.abs + x.error(), ..power }
        }
        // Arguments are assumed not to be close to −1.
        UnaryOp::Log1p => ValueStatistics { rms: x.rms.ln_1p(), symmetric: false, abs: x.error(), rel: 4.0 * u },
        UnaryOp::Log => {
            let rms = 1.0 + x.rms.max(f64::MIN_POSITIVE).ln().abs();
            let abs = PEAK * (x.abs / x.rms.max(f64::MIN_POSITIVE) + x.rel) + 4.0 * u * rms;
            ValueStatistics { rms, symmetric: false, abs, rel: 4.0 * u }
        }
        UnaryOp::Sqrt => {
            let rms = x.rms.sqrt();
            let abs = PEAK * x.abs / rms.max(f64::MIN_POSITIVE);
            ValueStatistics { rms, symmetric: false, abs, rel: x.rel + 2.0 * u }
        }
        // An inexact argument may be on the other side of a step.
        UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => {
            let abs = if x.error() == 0.0 { 0.0 } else { 1.0 + x.error() };
            ValueStatistics { rms: x.rms + 1.0, symmetric: false, abs, rel: 0.0 }
        }
        UnaryOp::Sin | UnaryOp::Cos => {
            let is_odd = op == UnaryOp::Sin;
            ValueStatistics {
                rms: 1.0,
                symmetric: x.symmetric && is_odd,
                abs: x.error().min(2.0) + 4.0 * u,
                rel: 4.0 * u,
            }
        }
        // The slope is at most 2/√π.
        UnaryOp::Tanh | UnaryOp::Erf => ValueStatistics {
            rms: x.rms.min(1.0),
            symmetric: x.symmetric,
            abs: std::f64::consts::FRAC_2_SQRT_PI * x.error().min(2.0) + 8.0 * u,
            rel: 4.0 * u,
        },
    }
}
