//! Evaluation of many iterations of an innermost loop at once, where all accesses of its only statement are
//! affine in the loop variable: each operation is then evaluated for all of them before the next one.
//!
//! Results and faults are those of the iterations in order. What could differ is not evaluated in this way,
//! and where an access would be a fault, the iterations are run one by one.

use super::{
    AS_IS, CompiledBlock, CompiledExpr, CompiledOp, CompiledTest, ElementAccess, Interpreter, Linear, Memory,
    Nonlinear, Rounds, Stopped, TO_F32, apply_binary, apply_unary, is_undefined, whole_binary, whole_unary,
};
use crate::dtype::DType;
use crate::expr::{BinaryOp, ReduceOp};

/// Maximum number of iterations that are evaluated at once, whose values fit the nearest cache.
const MOST: usize = 64;

/// Minimum number of iterations for which this is faster.
const FEWEST: i64 = 3;

/// Consecutive iterations of a loop.
#[derive(Clone, Copy)]
struct Iterations {
    var: u32,
    first: i64,
    n: usize,
}

impl Iterations {
    /// Some of the iterations.
    fn part(self, from: usize, n: usize) -> Iterations {
        Iterations { first: self.first + from as i64, n, ..self }
    }
}

/// Maximal runs of equal elements: value, position and length of each.
fn runs(elements: &[bool]) -> impl Iterator<Item = (bool, usize, usize)> {
    let mut from = 0;
    elements.chunk_by(|a, b| a == b).map(move |run| {
        from += run.len();
        (run[0], from - run.len(), run.len())
    })
}

/// Whether integers of an arithmetic are computed in 64 bits: the low bits of all results are exact.
fn is_narrow(dtype: DType) -> bool {
    !dtype.is_float() && !dtype.is_wide()
}

/// Wraps an integer like [`DType::wrap`].
fn wrap(dtype: DType, x: i64) -> i64 {
    match dtype {
        DType::I32 => i64::from(x as i32),
        DType::U8 => i64::from(x as u8),
        DType::I8 => i64::from(x as i8),
        _ => dtype.wrap(x.into()) as i64,
    }
}

/// Wraps integers.
fn wrap_all(dtype: DType, all: &mut [i64]) {
    all.iter_mut().for_each(|x| *x = wrap(dtype, *x));
}

/// Combines integers of at most 32 bits.
fn combine(op: BinaryOp, a: i64, b: i64, dtype: DType) -> i64 {
    let exact = match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Min => a.min(b),
        BinaryOp::Max => a.max(b),
        _ => whole_binary(op, a.into(), b.into(), dtype) as i64,
    };
    wrap(dtype, exact)
}

/// Result of an update of an element, rounded.
#[inline]
fn updated(op: ReduceOp, old: f64, value: f64, rounds: Rounds) -> f64 {
    match rounds.each.is_float() {
        true => rounds.of(apply_binary(op.combine(), old, value)),
        false => wrap(rounds.last, combine(op.combine(), old as i64, value as i64, rounds.each)) as f64,
    }
}

/// Combines a sum with values, in order; where one starts, the sum is the identity.
fn fold(op: ReduceOp, sum: &mut f64, (values, starts): (&[f64], &[bool]), identity: f64, rounds: Rounds) {
    let is_plain = (op, rounds.last) == (ReduceOp::Sum, DType::F32) && !starts[1..].contains(&true);
    if is_plain {
        *sum = values.iter().fold(*sum, |sum, value| f64::from((sum + value) as f32));
        return;
    }
    for (value, starts) in values.iter().zip(starts) {
        *sum = updated(op, if *starts { identity } else { *sum }, *value, rounds);
    }
}

impl Linear {
    /// Whether it is affine in a variable.
    fn is_affine(&self, var: u32) -> bool {
        self.rest.iter().all(|(part, _)| !part.uses(var))
    }

    fn uses(&self, var: u32) -> bool {
        self.terms.iter().any(|(own, _)| *own == var) || !self.is_affine(var)
    }

    /// Coefficient of a variable.
    fn coefficient(&self, var: u32) -> i64 {
        self.terms.iter().filter(|(own, _)| *own == var).map(|(_, c)| c).sum()
    }
}

impl Nonlinear {
    fn uses(&self, var: u32) -> bool {
        match self {
            Nonlinear::FloorDiv(x, _) | Nonlinear::Mod(x, _) => x.uses(var),
            Nonlinear::Min(a, b) | Nonlinear::Max(a, b) => a.uses(var) || b.uses(var),
        }
    }
}

impl ElementAccess {
    fn is_affine(&self, var: u32) -> bool {
        self.dims.iter().all(|dim| dim.index.is_affine(var))
    }
}

impl CompiledTest {
    /// Whether it is evaluated for many iterations at once and reads no element of a buffer that is written.
    fn is_batchable(&self, var: u32, written: u32) -> bool {
        match self {
            CompiledTest::Constant(_) | CompiledTest::IsZero(_) => true,
            CompiledTest::Lt(a, b) | CompiledTest::Eq(a, b) => a.is_affine(var) && b.is_affine(var),
            CompiledTest::Less(rounds, sides) => {
                let is_side = |x: &CompiledExpr| x.is_batchable(var, written, rounds.each);
                !rounds.last.is_wide() && is_side(&sides.0) && is_side(&sides.1)
            }
            CompiledTest::And(sides) => sides.0.is_batchable(var, written) && sides.1.is_batchable(var, written),
            CompiledTest::Not(test) => test.is_batchable(var, written),
        }
    }
}

impl CompiledExpr {
    /// Whether it is evaluated for many iterations at once and reads no element of a buffer that is written.
    fn is_batchable(&self, var: u32, written: u32, each: DType) -> bool {
        let is_part = |x: &CompiledExpr| x.is_batchable(var, written, each);
        let has_code = each.is_float() || is_narrow(each);
        has_code
            && match self {
                CompiledExpr::Const(_) => true,
                CompiledExpr::Load(access) => {
                    access.buffer != written && !access.dtype.is_wide() && access.is_affine(var)
                }
                CompiledExpr::Gather(_) => false,
                CompiledExpr::FromIndex(index) => index.is_affine(var),
                CompiledExpr::Unary(_, x) => is_part(x),
                CompiledExpr::Binary(_, sides) => is_part(&sides.0) && is_part(&sides.1),
                CompiledExpr::Select(parts) => {
                    parts.0.is_batchable(var, written) && is_part(&parts.1) && is_part(&parts.2)
                }
                CompiledExpr::Cast(rounds, x) => !rounds.last.is_wide() && x.is_batchable(var, written, rounds.each),
            }
    }
}

impl CompiledBlock {
    /// Whether a loop with this body can be run many iterations at once.
    pub(super) fn is_batchable(&self, var: u32) -> bool {
        let [op] = &self.ops[..] else { return false };
        let is_stored = |to: &ElementAccess, value: &CompiledExpr, rounds: Rounds| {
            !rounds.last.is_wide() && to.is_affine(var) && value.is_batchable(var, to.buffer, rounds.each)
        };
        self.allocs.is_empty()
            && match op {
                CompiledOp::If { test, then, otherwise } => {
                    let reads_no_element = |to: u32| test.is_batchable(var, to) && otherwise.ops.is_empty();
                    then.written().is_some_and(reads_no_element) && then.is_batchable(var)
                }
                CompiledOp::Store { to, value, rounds } => is_stored(to, value, *rounds),
                CompiledOp::Update { to, value, first, rounds, .. } => {
                    is_stored(to, value, *rounds) && first.is_batchable(var, to.buffer)
                }
                _ => false,
            }
    }

    /// Buffer that the only statement writes.
    fn written(&self) -> Option<u32> {
        match &self.ops[..] {
            [CompiledOp::If { then, .. }] => then.written(),
            [CompiledOp::Store { to, .. } | CompiledOp::Update { to, .. }] => Some(to.buffer),
            _ => None,
        }
    }
}

impl<M: Memory> Interpreter<'_, M> {
    /// Runs the iterations of a loop whose body is [batchable](CompiledBlock::is_batchable).
    pub(super) fn batches(&mut self, var: u32, extent: i64, body: &CompiledBlock) -> Result<(), Stopped> {
        let mut first = 0;
        while first < extent {
            let n = (extent - first).min(MOST as i64) as usize;
            self.iterations(body, Iterations { var, first, n })?;
            first += n as i64;
        }
        Ok(())
    }

    /// Runs some iterations at once, or one by one if they are few or one would be a fault.
    fn iterations(&mut self, body: &CompiledBlock, all: Iterations) -> Result<(), Stopped> {
        if all.n as i64 >= FEWEST
            && let Some(done) = self.at_once(&body.ops[0], all)
        {
            return done;
        }
        // A fault that was found is found again, with its place.
        self.fault = None;
        (all.first..all.first + all.n as i64).try_for_each(|i| {
            self.vars[all.var as usize] = i;
            self.block(body)
        })
    }

    /// Runs iterations of a statement at once; `None`, with nothing written, if one may be a fault.
    fn at_once(&mut self, op: &CompiledOp, all: Iterations) -> Option<Result<(), Stopped>> {
        match op {
            CompiledOp::If { test, then, .. } => {
                let mut holds = [false; MOST];
                self.tests(test, all, &mut holds[..all.n])?;
                let done = runs(&holds[..all.n])
                    .filter(|run| run.0)
                    .try_for_each(|(_, from, n)| self.iterations(then, all.part(from, n)));
                Some(done)
            }
            CompiledOp::Store { to, value, rounds } => {
                let mut values = [0.0; MOST];
                self.values(value, *rounds, all, &mut values[..all.n])?;
                let (at, step) = self.positions(to, all)?;
                Some(self.write_all(to, (at, step), all, &values[..all.n]))
            }
            CompiledOp::Update { to, op, value, first, rounds } => {
                let (mut values, mut starts) = ([0.0; MOST], [false; MOST]);
                let (values, starts) = (&mut values[..all.n], &mut starts[..all.n]);
                self.values(value, Rounds { last: rounds.each, ..*rounds }, all, values)?;
                self.tests(first, all, starts)?;
                let positions = self.positions(to, all)?;
                Some(self.update_all(to, positions, (*op, *rounds), all, (values, starts)))
            }
            _ => None,
        }
    }

    /// Writes values to consecutive places of a statement.
    fn write_all(
        &mut self,
        to: &ElementAccess,
        (mut at, step): (i64, i64),
        all: Iterations,
        values: &[f64],
    ) -> Result<(), Stopped> {
        for (lane, value) in values.iter().enumerate() {
            if self.memory.write(to.buffer, at as usize, *value).is_none() {
                self.vars[all.var as usize] = all.first + lane as i64;
                self.out_of_bounds(to);
                return Err(Stopped);
            }
            at += step;
        }
        Ok(())
    }

    /// Reads the elements that a statement updates.
    fn read_all(
        &mut self,
        to: &ElementAccess,
        (mut at, step): (i64, i64),
        all: Iterations,
        out: &mut [f64],
    ) -> Result<(), Stopped> {
        if self.memory.read_all(to.buffer, at, step, out).is_some() && !out.iter().any(|x| is_undefined(*x)) {
            return Ok(());
        }
        for (lane, x) in out.iter_mut().enumerate() {
            self.vars[all.var as usize] = all.first + lane as i64;
            *x = self.read(to, at as usize);
            if is_undefined(*x) {
                self.undefined(to);
            }
            self.check()?;
            at += step;
        }
        Ok(())
    }

    /// Combines elements with values, in order; an update that starts does not read its element.
    fn update_all(
        &mut self,
        to: &ElementAccess,
        (at, step): (i64, i64),
        (op, rounds): (ReduceOp, Rounds),
        all: Iterations,
        (values, starts): (&mut [f64], &[bool]),
    ) -> Result<(), Stopped> {
        let identity = match rounds.each.is_float() {
            true => op.identity(),
            false => rounds.each.literal(op.identity()) as f64,
        };
        // One element is read and written once.
        if step == 0 {
            let mut sum = [identity];
            if !starts[0] {
                self.read_all(to, (at, 0), all.part(0, 1), &mut sum)?;
            }
            fold(op, &mut sum[0], (values, starts), identity, rounds);
            return self.write_all(to, (at, 0), all, &sum);
        }
        let mut old = [identity; MOST];
        for (_, from, n) in runs(starts).filter(|run| !run.0) {
            let part = &mut old[from..from + n];
            self.read_all(to, (at + from as i64 * step, step), all.part(from, n), part)?;
        }
        let old = &old[..all.n];
        match (op, rounds.last) {
            (ReduceOp::Sum, DType::F32) => {
                old.iter().zip(&mut *values).for_each(|(old, new)| *new = f64::from((old + *new) as f32));
            }
            _ => old.iter().zip(&mut *values).for_each(|(old, new)| *new = updated(op, *old, *new, rounds)),
        }
        self.write_all(to, (at, step), all, values)
    }

    /// Value of an index in the first iteration, and its rise in each; `None` if one does not exist.
    fn affine(&mut self, index: &Linear, all: Iterations) -> Option<(i64, i64)> {
        self.vars[all.var as usize] = all.first;
        let (first, step) = (index.eval(&self.vars)?, index.coefficient(all.var));
        first.checked_add(step.checked_mul(all.n as i64 - 1)?)?;
        Some((first, step))
    }

    /// Position of an access in the first iteration, and its rise in each; `None` if one is out of bounds.
    fn positions(&mut self, access: &ElementAccess, all: Iterations) -> Option<(i64, i64)> {
        let (mut at, mut step) = (access.base, 0);
        for dim in &*access.dims {
            let (first, rise) = self.affine(&dim.index, all)?;
            let last = first + rise * (all.n as i64 - 1);
            if first as u64 >= dim.extent || last as u64 >= dim.extent {
                return None;
            }
            at += first * dim.stride;
            step += rise * dim.stride;
        }
        Some((at, step))
    }

    /// Reads elements; `None` if one is not there or was never written.
    fn loads(&mut self, access: &ElementAccess, all: Iterations, out: &mut [f64]) -> Option<()> {
        let (at, step) = self.positions(access, all)?;
        self.memory.read_all(access.buffer, at, step, out)?;
        (!out.iter().any(|x| is_undefined(*x))).then_some(())
    }

    /// Evaluates a condition.
    fn tests(&mut self, test: &CompiledTest, all: Iterations, out: &mut [bool]) -> Option<()> {
        match test {
            CompiledTest::Constant(holds) => out.fill(*holds),
            CompiledTest::IsZero(var) if *var == all.var => {
                out.fill(false);
                out[0] = all.first == 0;
            }
            CompiledTest::IsZero(var) => out.fill(self.vars[*var as usize] == 0),
            CompiledTest::Lt(a, b) | CompiledTest::Eq(a, b) => {
                let is_less = matches!(test, CompiledTest::Lt(..));
                let ((a, of_a), (b, of_b)) = (self.affine(a, all)?, self.affine(b, all)?);
                for (lane, holds) in (0..).zip(out) {
                    let (a, b) = (a + of_a * lane, b + of_b * lane);
                    *holds = if is_less { a < b } else { a == b };
                }
            }
            CompiledTest::Less(rounds, sides) => {
                let (mut a, mut b) = ([0.0; MOST], [0.0; MOST]);
                self.values(&sides.0, *rounds, all, &mut a[..all.n])?;
                self.values(&sides.1, *rounds, all, &mut b[..all.n])?;
                out.iter_mut().zip(a.iter().zip(&b)).for_each(|(holds, (a, b))| *holds = a < b);
            }
            CompiledTest::And(sides) => {
                let mut holds = [false; MOST];
                self.tests(&sides.0, all, &mut holds[..all.n])?;
                for (holds, from, n) in runs(&holds[..all.n]) {
                    let out = &mut out[from..from + n];
                    match holds {
                        true => self.tests(&sides.1, all.part(from, n), out)?,
                        false => out.fill(false),
                    }
                }
            }
            CompiledTest::Not(test) => {
                self.tests(test, all, out)?;
                out.iter_mut().for_each(|holds| *holds = !*holds);
            }
        }
        Some(())
    }

    /// Evaluates a value like [`Interpreter::value`].
    fn values(
        &mut self,
        node: &CompiledExpr,
        Rounds { each, last }: Rounds,
        all: Iterations,
        out: &mut [f64],
    ) -> Option<()> {
        match each {
            DType::F64 => self.numbers::<AS_IS>(node, all, out)?,
            DType::F32 => self.numbers::<TO_F32>(node, all, out)?,
            _ => {
                let mut integers = [0; MOST];
                let integers = &mut integers[..all.n];
                self.integers(node, each, all, integers)?;
                wrap_all(last, integers);
                out.iter_mut().zip(integers).for_each(|(x, integer)| *x = *integer as f64);
                return Some(());
            }
        }
        if last != each {
            out.iter_mut().for_each(|x| *x = last.round(*x));
        }
        Some(())
    }

    /// Evaluates the side that a condition selects, `of` the iterations that select it alone.
    fn select<T>(
        &mut self,
        parts: &(CompiledTest, CompiledExpr, CompiledExpr),
        all: Iterations,
        out: &mut [T],
        of: impl Fn(&mut Self, &CompiledExpr, Iterations, &mut [T]) -> Option<()>,
    ) -> Option<()> {
        let (test, a, b) = parts;
        let mut holds = [false; MOST];
        self.tests(test, all, &mut holds[..all.n])?;
        runs(&holds[..all.n]).try_for_each(|(holds, from, n)| {
            of(self, if holds { a } else { b }, all.part(from, n), &mut out[from..from + n])
        })
    }

    /// Evaluates a floating-point number.
    fn numbers<const EACH: u8>(&mut self, node: &CompiledExpr, all: Iterations, out: &mut [f64]) -> Option<()> {
        match node {
            CompiledExpr::Const(x) => out.fill(*x),
            CompiledExpr::Load(access) => {
                self.loads(access, all, out)?;
                if access.dtype.arithmetic() == DType::F32 {
                    return Some(());
                }
            }
            CompiledExpr::FromIndex(index) => {
                let (first, step) = self.affine(index, all)?;
                for (lane, x) in (0..).zip(out.iter_mut()) {
                    let i = first + step * lane;
                    *x = if EACH == TO_F32 { f64::from(i as f32) } else { i as f64 };
                }
            }
            CompiledExpr::Unary(op, x) => {
                self.numbers::<EACH>(x, all, out)?;
                out.iter_mut().for_each(|x| *x = apply_unary(*op, *x));
            }
            CompiledExpr::Binary(op, sides) => {
                self.numbers::<EACH>(&sides.0, all, out)?;
                let mut other = [0.0; MOST];
                self.numbers::<EACH>(&sides.1, all, &mut other[..all.n])?;
                let pairs = out.iter_mut().zip(&other);
                match op {
                    BinaryOp::Add => pairs.for_each(|(a, b)| *a += b),
                    BinaryOp::Mul => pairs.for_each(|(a, b)| *a *= b),
                    _ => pairs.for_each(|(a, b)| *a = apply_binary(*op, *a, *b)),
                }
            }
            CompiledExpr::Select(parts) => self.select(parts, all, out, Self::numbers::<EACH>)?,
            CompiledExpr::Cast(rounds, x) => self.values(x, *rounds, all, out)?,
            CompiledExpr::Gather(_) => return None,
        }
        if EACH == TO_F32 {
            out.iter_mut().for_each(|x| *x = f64::from(*x as f32));
        }
        Some(())
    }

    /// Evaluates an integer of at most 32 bits.
    fn integers(&mut self, node: &CompiledExpr, each: DType, all: Iterations, out: &mut [i64]) -> Option<()> {
        let take = |dtype: DType, held: &[f64], out: &mut [i64]| match dtype.is_float() {
            true => out.iter_mut().zip(held).for_each(|(x, held)| *x = each.whole(each.held(*held)) as i64),
            false => {
                out.iter_mut().zip(held).for_each(|(x, held)| *x = *held as i64);
                wrap_all(each, out);
            }
        };
        match node {
            CompiledExpr::Const(x) => out.fill(each.literal(*x) as i64),
            CompiledExpr::Load(access) => {
                let mut held = [0.0; MOST];
                self.loads(access, all, &mut held[..all.n])?;
                take(access.dtype, &held, out);
            }
            CompiledExpr::FromIndex(index) => {
                let (first, step) = self.affine(index, all)?;
                (0..).zip(out.iter_mut()).for_each(|(lane, x)| *x = first + step * lane);
                wrap_all(each, out);
            }
            CompiledExpr::Unary(op, x) => {
                self.integers(x, each, all, out)?;
                out.iter_mut().for_each(|x| *x = whole_unary(*op, (*x).into(), each) as i64);
            }
            CompiledExpr::Binary(op, sides) => {
                self.integers(&sides.0, each, all, out)?;
                let mut other = [0; MOST];
                self.integers(&sides.1, each, all, &mut other[..all.n])?;
                out.iter_mut().zip(&other).for_each(|(a, b)| *a = combine(*op, *a, *b, each));
            }
            CompiledExpr::Select(parts) => {
                self.select(parts, all, out, |job, x, some, out| job.integers(x, each, some, out))?;
            }
            CompiledExpr::Cast(rounds, x) => {
                let mut held = [0.0; MOST];
                self.values(x, *rounds, all, &mut held[..all.n])?;
                take(rounds.last, &held, out);
            }
            CompiledExpr::Gather(_) => return None,
        }
        Some(())
    }
}
