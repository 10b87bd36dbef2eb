//! Evaluation of a loop nest row by row, or by blocks if it is a matrix product.

mod product;

use super::work::{Counter, EvaluationProgress};
use crate::dtype::DType;
use crate::expr::{self, BinaryOp, Cond, Expr, ReduceOp, UnaryOp};
use crate::index::{Atom, Index, Ranges};
use crate::interp::{
    Fault, IterationPoint, apply_binary, apply_unary, defined, floor_div, is_undefined, rounds_to_single,
};
use crate::program::{Buffer, BufferId, LoopId, Program, Stmt};
use product::Product;
use std::sync::atomic::{AtomicU64, Ordering};

/// Elements of a row evaluated at a time: 2 KiB.
const CHUNK: usize = 256;

/// Rows evaluated together, so that a block of their shared factor stays in cache.
const ROWS: usize = 64;

/// Iterations of the innermost reduction evaluated per pass over the rows: 128 KiB of the shared factor.
const DEPTH: usize = 64;

/// Costs of an iteration of a nest evaluated row by row, in iterations of a matrix product: for a sum of
/// products, and for other nests.
const WORK_OF_PRODUCT: u64 = 6;
const WORK_OF_OTHERS: u64 = 24;

/// Loops of constant extent around one store or update, whose iterations may run in any order.
pub(super) struct ParallelNest<'a> {
    program: &'a Program,
    axes: Vec<LoopAxis>,
    to: BufferId,
    /// Position of the written element.
    at: Flat,
    /// Reduction that combines the values; `None` for a store.
    reduce: Option<ReducedLoops>,
    value: ReferenceExpr,
    /// Buffers that the value reads.
    reads: Vec<BufferId>,
    /// Axis along the row; an axis without a variable if the nest has no suitable one.
    row: usize,
    /// Axis across the rows that are evaluated together.
    across: usize,
    /// Axes that choose the rows.
    outer: Vec<usize>,
    /// Axes of the reduction, the innermost last.
    reduction: Vec<usize>,
    /// Factors of a sum of products, if the first is constant along the row.
    product: Option<(Load, Load)>,
}

struct LoopAxis {
    /// Loop variable in the nest's indices.
    var: Option<LoopId>,
    extent: usize,
    /// Loop variable of the program to which the axis contributes, and by how much.
    counts: Option<(LoopId, i64)>,
}

#[derive(Clone, Copy)]
struct ReducedLoops {
    op: ReduceOp,
    /// Whether the reduction starts from the identity rather than from the stored value.
    afresh: bool,
}

/// `constant + Σ coefficient · axis`
#[derive(Clone)]
struct Flat {
    constant: i64,
    coefficients: Vec<i64>,
}

impl Flat {
    fn at(&self, values: &[i64]) -> i64 {
        self.constant + self.part(values)
    }

    /// Sum of the terms of these axes alone.
    fn part(&self, values: &[i64]) -> i64 {
        self.coefficients.iter().zip(values).map(|(c, v)| c * v).sum()
    }

    /// Smallest and largest value.
    fn range(&self, axes: &[LoopAxis]) -> (i128, i128) {
        let mut range = (i128::from(self.constant), i128::from(self.constant));
        for (c, axis) in self.coefficients.iter().zip(axes) {
            let last = i128::from(*c) * (axis.extent as i128 - 1);
            range = (range.0 + last.min(0), range.1 + last.max(0));
        }
        range
    }
}

/// Subscript or side of a condition.
enum Sub {
    Flat(Flat),
    /// Index with divisions, remainders, minima or maxima.
    Other(Index),
}

#[derive(Clone)]
struct Load {
    buffer: BufferId,
    flat: Flat,
    subscripts: Vec<Flat>,
}

enum ReferenceExpr {
    Const(f64),
    /// Load that is within its buffer for all values of the axes.
    Load(Load),
    /// Load whose subscripts are checked at evaluation.
    CheckedLoad(BufferId, Vec<Sub>),
    FromIndex(Sub),
    /// Value rounded to f32.
    Single(Box<ReferenceExpr>),
    Unary(UnaryOp, Box<ReferenceExpr>),
    Binary(BinaryOp, Box<(ReferenceExpr, ReferenceExpr)>),
    Select(Box<(ReferenceTest, ReferenceExpr, ReferenceExpr)>),
}

enum ReferenceTest {
    True,
    Lt(Sub, Sub),
    Eq(Sub, Sub),
    Less(Box<(ReferenceExpr, ReferenceExpr)>),
    And(Box<(ReferenceTest, ReferenceTest)>),
    Not(Box<ReferenceTest>),
}

impl<'a> ParallelNest<'a> {
    /// Parses a statement as a nest whose possible reads are all of written elements.
    pub(super) fn of(program: &'a Program, stmt: &Stmt, memory: &[Vec<f64>]) -> Option<ParallelNest<'a>> {
        let nest = ParallelNest::parse(program, stmt)?;
        if !program.buffer(nest.to).dtype.is_float() && !nest.is_copy() && nest.most(memory) >= 2f64.powi(31) {
            return None;
        }
        let is_known = |id: &BufferId| {
            let values = memory.get(id.0 as usize);
            *id != nest.to && values.is_some_and(|v| !v.is_empty() && !v.iter().any(|x| is_undefined(*x)))
        };
        (!memory[nest.to.0 as usize].is_empty() && nest.reads.iter().all(is_known)).then_some(nest)
    }

    /// Parses a statement as a nest.
    pub(super) fn parse(program: &'a Program, stmt: &Stmt) -> Option<ParallelNest<'a>> {
        let mut axes = Vec::new();
        let mut inner = stmt;
        while let Stmt::For(l) = inner {
            let [only] = l.body.as_slice() else { return None };
            let extent = usize::try_from(l.extent.as_const()?).ok()?;
            if axes.iter().any(|a: &LoopAxis| a.var == Some(l.var)) || extent > 1 << 40 {
                return None;
            }
            axes.push(LoopAxis { var: Some(l.var), extent, counts: Some((l.var, 1)) });
            inner = only;
        }
        let split = split_divided(program, &mut axes, inner);
        let inner = split.as_ref().unwrap_or(inner);
        let (to, index, value, update) = match inner {
            Stmt::Store { buffer, index, value } => (*buffer, index, value, None),
            Stmt::Update { buffer, index, op, value, first } => (*buffer, index, value, Some((*op, first))),
            Stmt::For(_) | Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {
                return None;
            }
        };
        if !is_exact(program, program.buffers.get(to.0 as usize)?.dtype, value, update.is_some()) {
            return None;
        }
        let build = NestReader { program, axes: &axes };
        let at = build.element(to, index)?.flat;
        let (parallel, mut reduction): (Vec<usize>, Vec<usize>) =
            (0..axes.len()).filter(|a| axes[*a].extent != 1).partition(|a| at.coefficients[*a] != 0);
        if !is_injective(&at, &axes, &parallel) {
            return None;
        }
        let reduce = match update {
            None if reduction.is_empty() => None,
            None => return None,
            Some((op, Cond::Not(c))) if **c == Cond::True => Some(ReducedLoops { op, afresh: false }),
            Some((op, first)) => {
                let mut zero = Vec::new();
                zero_axes(first, &axes, &mut zero)?;
                zero.retain(|a| axes[*a].extent != 1);
                zero.sort_unstable();
                zero.dedup();
                if zero != reduction {
                    return None;
                }
                Some(ReducedLoops { op, afresh: true })
            }
        };
        let mut reads = Vec::new();
        value.for_each_load(&mut |id, _| reads.push(id));
        reads.sort_unstable();
        reads.dedup();
        let value = build.node(value)?;
        reduction.sort_by_key(|a| axes[*a].extent);
        // Dummy axis without a variable, for roles that no axis of the nest can take.
        axes.push(LoopAxis { var: None, extent: 1, counts: None });
        let stand_in = axes.len() - 1;
        let mut nest = ParallelNest {
            program,
            axes,
            to,
            at,
            reduce,
            value,
            reads,
            row: stand_in,
            across: stand_in,
            outer: parallel,
            reduction,
            product: None,
        };
        nest.arrange();
        Some(nest)
    }

    /// Whether elements are copied unchanged.
    fn is_copy(&self) -> bool {
        let (ReferenceExpr::Load(Load { buffer, .. }) | ReferenceExpr::CheckedLoad(buffer, _)) = &self.value else {
            return false;
        };
        self.reduce.is_none() && self.program.buffer(*buffer).dtype == self.program.buffer(self.to).dtype
    }

    /// Upper bound of the magnitudes of all intermediate values of an element.
    fn most(&self, memory: &[Vec<f64>]) -> f64 {
        let (value, on_the_way) = self.value.most(memory, &self.axes);
        let n = self.n_of(&self.reduction) as f64;
        on_the_way.max(match self.reduce {
            None => value,
            Some(ReducedLoops { op: ReduceOp::Max | ReduceOp::Min, .. }) => value,
            Some(ReducedLoops { op: ReduceOp::Sum, afresh: true }) => value * n,
            Some(ReducedLoops { op: ReduceOp::Product, afresh: true }) => value.max(1.0).powf(n),
            Some(ReducedLoops { op: ReduceOp::Sum | ReduceOp::Product, afresh: false }) => f64::INFINITY,
        })
    }

    /// Chooses the axes along and across the rows.
    fn arrange(&mut self) {
        let mut loads = Vec::new();
        self.value.loads(&mut loads);
        // Short rows are expensive, and so are loads that are neither contiguous nor constant along the row.
        let cost = |axis: usize| {
            let jumps = loads.iter().filter(|l| !matches!(l.flat.coefficients[axis], 0 | 1)).count();
            16 * CHUNK / self.axes[axis].extent.clamp(1, CHUNK) + CHUNK * jumps
        };
        if let Some(row) = self.outer.iter().copied().rev().min_by_key(|a| cost(*a)) {
            self.row = row;
        }
        self.product = match (&self.value, self.reduce) {
            (ReferenceExpr::Binary(BinaryOp::Mul, sides), Some(ReducedLoops { op: ReduceOp::Sum, .. })) => {
                match &**sides {
                    (ReferenceExpr::Load(a), ReferenceExpr::Load(b)) => {
                        let same = |l: &Load| l.flat.coefficients[self.row] == 0;
                        if same(a) {
                            Some((a.clone(), b.clone()))
                        } else if same(b) {
                            Some((b.clone(), a.clone()))
                        } else {
                            None
                        }
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        self.outer.retain(|a| *a != self.row);
        let shared = |axis: usize| self.product.as_ref().is_some_and(|(_, v)| v.flat.coefficients[axis] == 0);
        if let Some(across) = self.outer.iter().copied().max_by_key(|a| (shared(*a), self.axes[*a].extent)) {
            self.across = across;
        }
        self.outer.retain(|a| *a != self.across);
    }

    /// Number of combined values of these axes.
    fn n_of(&self, axes: &[usize]) -> usize {
        axes.iter().map(|a| self.axes[*a].extent).product()
    }

    /// Collects the results of `of` over all values of these axes, the last axis innermost, with all other
    /// axes at zero.
    fn each<T>(&self, axes: &[usize], mut of: impl FnMut(&[i64]) -> T) -> Vec<T> {
        let mut values = vec![0; self.axes.len()];
        let n = self.n_of(axes);
        let each = (0..n).map(|_| {
            let result = of(&values);
            for a in axes.iter().rev() {
                values[*a] += 1;
                if values[*a] < self.axes[*a].extent as i64 {
                    break;
                }
                values[*a] = 0;
            }
            result
        });
        each.collect()
    }

    /// Cost of the nest in multiply-adds of a matrix product; `densities` holds the share of nonzero elements
    /// of each buffer.
    pub(super) fn work(&self, densities: &[f64]) -> f64 {
        let n = self.axes.iter().map(|a| a.extent as f64).product::<f64>();
        let Some((a, b)) = &self.product else { return n * WORK_OF_OTHERS as f64 };
        let density = densities[a.buffer.0 as usize].min(densities[b.buffer.0 as usize]);
        let is_blocked = density < 1.0 || product::pays(self);
        n * density * if is_blocked { 1.0 } else { WORK_OF_PRODUCT as f64 }
    }

    /// Buffer that the nest writes, and an estimate of the share of its nonzero elements from the form of the
    /// value: every n-th element if a condition on a remainder selects them.
    pub(super) fn density(&self) -> (BufferId, f64) {
        fn of(test: &ReferenceTest) -> f64 {
            match test {
                ReferenceTest::And(sides) => of(&sides.0) * of(&sides.1),
                ReferenceTest::Eq(Sub::Other(index), _) => match index.terms() {
                    [(Atom::Mod(_, divisor), _)] => 1.0 / *divisor as f64,
                    _ => 1.0,
                },
                _ => 1.0,
            }
        }
        let density = match &self.value {
            ReferenceExpr::Select(parts) if matches!(parts.2, ReferenceExpr::Const(0.0)) => of(&parts.0),
            _ => 1.0,
        };
        (self.to, density)
    }

    /// Evaluates the nest, unless the evaluation is cancelled.
    pub(super) fn run(
        &self,
        memory: &mut [Vec<f64>],
        n_threads: usize,
        work: &EvaluationProgress,
    ) -> Result<(), Fault> {
        if self.axes.iter().any(|a| a.extent == 0) {
            return Ok(());
        }
        let to = std::mem::take(&mut memory[self.to.0 as usize]);
        let to = to.into_iter().map(|x| AtomicU64::new(x.to_bits())).collect::<Vec<_>>();
        let result = match Product::of(self, memory) {
            Some(product) => product.run(&to, n_threads, work),
            None => self.run_rows(memory, &to, n_threads, work),
        };
        memory[self.to.0 as usize] = to.into_iter().map(|x| f64::from_bits(x.into_inner())).collect();
        result
    }

    /// Evaluates the nest row by row.
    fn run_rows(
        &self,
        memory: &[Vec<f64>],
        to: &[AtomicU64],
        n_threads: usize,
        work: &EvaluationProgress,
    ) -> Result<(), Fault> {
        let (n_rows, n_columns) = (self.axes[self.across].extent, self.axes[self.row].extent);
        let n_outer = self.n_of(&self.outer);
        let n_chunks = n_columns.div_ceil(CHUNK);
        // Enough tasks that no thread waits long for the last one.
        let wanted = (8 * n_threads).div_ceil(n_outer * n_chunks);
        let rows = n_rows.div_ceil(wanted).clamp(1, ROWS);
        let n_strips = n_rows.div_ceil(rows);
        work.share(n_outer * n_chunks * n_strips, n_threads, || {
            let mut worker = NestWorker {
                nest: self,
                memory,
                counter: work.counter(),
                values: vec![0; self.axes.len()],
                sums: Vec::new(),
                packed: Vec::new(),
                spare: Vec::new(),
            };
            move |task| {
                let (mut outer, strip) = (task / n_strips, task % n_strips);
                let chunk = outer % n_chunks;
                outer /= n_chunks;
                for a in self.outer.iter().rev() {
                    worker.values[*a] = (outer % self.axes[*a].extent) as i64;
                    outer /= self.axes[*a].extent;
                }
                let tile = RowsTile {
                    row: strip * rows,
                    n_rows: rows.min(n_rows - strip * rows),
                    column: chunk * CHUNK,
                    n_columns: CHUNK.min(n_columns - chunk * CHUNK),
                };
                worker.tile(tile, to)
            }
        })
    }
}

/// Whether different values of the axes are different elements, because each stride exceeds the range of all
/// smaller ones.
fn is_injective(at: &Flat, axes: &[LoopAxis], parallel: &[usize]) -> bool {
    let mut strides =
        parallel.iter().map(|a| (at.coefficients[*a].unsigned_abs(), axes[*a].extent)).collect::<Vec<_>>();
    strides.sort_unstable();
    let mut reach = 0u64;
    strides.into_iter().all(|(stride, extent)| {
        let passes = stride > reach;
        reach = reach.saturating_add(stride.saturating_mul(extent.saturating_sub(1) as u64));
        passes
    })
}

/// Splits axes that appear in divisions, if the divisor divides the extent, so that the indices become
/// linear. Returns the statement in terms of the new axes, if there are any.
///
/// Groups of channels have this form: for 32 channels, `k // 8` numbers four groups.
fn split_divided(program: &Program, axes: &mut Vec<LoopAxis>, stmt: &Stmt) -> Option<Stmt> {
    let mut split: Option<Stmt> = None;
    let mut n_vars = program.loops.len() as u32;
    loop {
        let stmt = split.as_ref().unwrap_or(stmt);
        let mut found = None;
        stmt.for_each_own_index(&mut |index| {
            for (atom, _) in index.terms() {
                let (Atom::FloorDiv(x, d) | Atom::Mod(x, d)) = atom else { continue };
                let ([(Atom::Var(v), 1)], 0, 2..) = (x.terms(), x.constant(), *d) else { continue };
                let divides =
                    |a: &LoopAxis| a.var == Some(*v) && a.extent > *d as usize && a.extent.is_multiple_of(*d as usize);
                found = found.or(axes.iter().position(divides).map(|at| (at, *v, *d)));
            }
        });
        let Some((at, var, divisor)) = found else { return split };
        let parts = [LoopId(n_vars), LoopId(n_vars + 1)];
        n_vars += 2;
        let LoopAxis { extent, counts, .. } = axes[at];
        let times = |factor: i64| counts.map(|(v, by)| (v, by * factor));
        let outer = LoopAxis { var: Some(parts[0]), extent: extent / divisor as usize, counts: times(divisor) };
        let inner = LoopAxis { var: Some(parts[1]), extent: divisor as usize, counts };
        axes.splice(at..=at, [outer, inner]);
        let mut ranges = Ranges::default();
        axes.iter().for_each(|a| ranges.push(a.var.expect("an axis of a loop"), (a.extent as i64).into()));
        let whole = Index::from(parts[0]).scale(divisor).add(&parts[1].into());
        split = Some(stmt.map_index(&mut |i| ranges.simplify(&i.substitute(var, &whole))));
    }
}

/// Collects the axes of a conjunction of conditions `axis == 0`; `None` for other conditions.
fn zero_axes(cond: &Cond, axes: &[LoopAxis], zero: &mut Vec<usize>) -> Option<()> {
    match cond {
        Cond::True => Some(()),
        Cond::And(a, b) => {
            zero_axes(a, axes, zero)?;
            zero_axes(b, axes, zero)
        }
        Cond::Eq(a, b) => {
            let difference = a.sub(b);
            // A sum of axes, which are never negative, is zero if and only if all are.
            let is_sum = difference.constant() == 0 && difference.terms().iter().all(|(_, c)| *c > 0);
            let is_negated = difference.constant() == 0 && difference.terms().iter().all(|(_, c)| *c < 0);
            if difference.terms().is_empty() || !(is_sum || is_negated) {
                return None;
            }
            difference.terms().iter().try_for_each(|(atom, _)| {
                let Atom::Var(var) = atom else { return None };
                zero.push(axes.iter().position(|a| a.var == Some(*var))?);
                Some(())
            })
        }
        Cond::Lt(..) | Cond::Less(..) | Cond::Not(_) => None,
    }
}

struct NestReader<'a> {
    program: &'a Program,
    axes: &'a [LoopAxis],
}

/// Whether a value for a buffer of this type needs no rounding: integers stay integers as long as they are
/// small (see [`ParallelNest::most`]), and the trusted evaluation does not round floating-point numbers.
/// Values of 64-bit integer types are only copied.
fn is_exact(program: &Program, to: DType, value: &Expr, is_reduced: bool) -> bool {
    let dtype_of = |b: &BufferId| program.buffers.get(b.0 as usize).map(|b| b.dtype);
    let is_wide = |dtype: DType| dtype.is_float() || dtype == DType::I32;
    // A plain copy stays within the type.
    if !is_reduced && matches!(value, Expr::Load(b, _) if dtype_of(b) == Some(to)) {
        return true;
    }
    let mut has_floats = false;
    let mut is_exact = true;
    expr::TreePart::Expr(value).walk(&mut |node| match node {
        expr::TreePart::Expr(Expr::Const(x)) => has_floats |= x.fract() != 0.0,
        expr::TreePart::Expr(Expr::Load(b, _)) => {
            has_floats |= dtype_of(b).is_none_or(DType::is_float);
            is_exact &= !dtype_of(b).is_some_and(DType::is_wide);
        }
        expr::TreePart::Expr(Expr::Gather(..)) => is_exact = false,
        // Comparisons are computed in their own arithmetic, in which constants may have other values.
        expr::TreePart::Cond(Cond::Less(a, b)) => {
            let own = Expr::arithmetic_of([a, b], &|b| dtype_of(&b).unwrap_or(DType::F64));
            is_exact &= own.is_none_or(|dtype| dtype.is_float());
        }
        expr::TreePart::Expr(Expr::Unary(op, _)) => {
            has_floats |= !matches!(op, UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round)
        }
        expr::TreePart::Expr(Expr::Binary(op, ..)) => has_floats |= matches!(op, BinaryOp::Div | BinaryOp::Pow),
        expr::TreePart::Expr(e @ Expr::Cast(dtype, _)) => {
            is_exact &= is_wide(*dtype) && dtype.is_float() == to.is_float() || is_small_integer(program, e);
        }
        expr::TreePart::Expr(Expr::FromIndex(_) | Expr::Select(..)) | expr::TreePart::Cond(_) => {}
    });
    is_exact && (to.is_float() || is_wide(to) && !has_floats)
}

/// Whether a value is a cast to i32 of an element or nibble that i32 can represent.
fn is_small_integer(program: &Program, value: &Expr) -> bool {
    let Expr::Cast(DType::I32, x) = value else { return false };
    match &**x {
        Expr::Load(b, _) => program
            .buffers
            .get(b.0 as usize)
            .is_some_and(|b| !b.dtype.is_float() && (b.dtype.bytes() < 4 || b.dtype == DType::I32)),
        Expr::Binary(BinaryOp::Nibble, ..) => true,
        _ => false,
    }
}

impl NestReader<'_> {
    /// `None` if a variable does not belong to the nest.
    fn sub(&self, index: &Index) -> Option<Sub> {
        let mut known = true;
        index.for_each_var(&mut |v| known &= self.axes.iter().any(|a| a.var == Some(v)));
        if !known {
            return None;
        }
        if index.terms().iter().any(|(a, _)| !matches!(a, Atom::Var(_))) {
            return Some(Sub::Other(index.clone()));
        }
        let flat = Flat {
            constant: index.constant(),
            // One additional coefficient for the dummy axis.
            coefficients: self.axes.iter().map(|a| a.var.map_or(0, |v| index.coefficient(v))).chain([0]).collect(),
        };
        let (low, high) = flat.range(self.axes);
        // The interpreter handles overflow.
        (low.abs().max(high.abs()) < 1 << 60).then_some(Sub::Flat(flat))
    }

    /// Creates a load that is always within its buffer.
    fn element(&self, id: BufferId, index: &[Index]) -> Option<Load> {
        let buffer = self.program.buffers.get(id.0 as usize)?;
        if buffer.shape.len() != index.len() {
            return None;
        }
        let mut position = Flat { constant: 0, coefficients: vec![0; self.axes.len() + 1] };
        let mut subscripts = Vec::with_capacity(index.len());
        for ((e, extent), stride) in index.iter().zip(&buffer.shape).zip(buffer.strides()) {
            let Some(Sub::Flat(flat)) = self.sub(e) else { return None };
            let (low, high) = flat.range(self.axes);
            if low < 0 || high >= i128::from(*extent) {
                return None;
            }
            position.constant += stride * flat.constant;
            for (sum, c) in position.coefficients.iter_mut().zip(&flat.coefficients) {
                *sum += stride * c;
            }
            subscripts.push(flat);
        }
        Some(Load { buffer: id, flat: position, subscripts })
    }

    fn node(&self, e: &Expr) -> Option<ReferenceExpr> {
        Some(match e {
            Expr::Const(x) => ReferenceExpr::Const(defined(*x)),
            Expr::Load(b, index) => match self.element(*b, index) {
                Some(load) => ReferenceExpr::Load(load),
                None if self.program.buffers.get(b.0 as usize)?.shape.len() == index.len() => {
                    ReferenceExpr::CheckedLoad(*b, index.iter().map(|i| self.sub(i)).collect::<Option<_>>()?)
                }
                None => return None,
            },
            // Gathers are left to the interpreter: see `is_exact`.
            Expr::Gather(..) => return None,
            Expr::FromIndex(i) => ReferenceExpr::FromIndex(self.sub(i)?),
            Expr::Unary(op, x) => ReferenceExpr::Unary(*op, Box::new(self.node(x)?)),
            Expr::Binary(op, a, b) => ReferenceExpr::Binary(*op, Box::new((self.node(a)?, self.node(b)?))),
            Expr::Select(c, a, b) => ReferenceExpr::Select(Box::new((self.test(c)?, self.node(a)?, self.node(b)?))),
            Expr::Cast(_, x) if rounds_to_single(self.program, e) => ReferenceExpr::Single(Box::new(self.node(x)?)),
            // Any other cast has no effect: see `is_exact`.
            Expr::Cast(_, x) => self.node(x)?,
        })
    }

    fn test(&self, cond: &Cond) -> Option<ReferenceTest> {
        Some(match cond {
            Cond::True => ReferenceTest::True,
            Cond::Lt(a, b) => ReferenceTest::Lt(self.sub(a)?, self.sub(b)?),
            Cond::Eq(a, b) => ReferenceTest::Eq(self.sub(a)?, self.sub(b)?),
            Cond::Less(a, b) => ReferenceTest::Less(Box::new((self.node(a)?, self.node(b)?))),
            Cond::And(a, b) => ReferenceTest::And(Box::new((self.test(a)?, self.test(b)?))),
            Cond::Not(c) => ReferenceTest::Not(Box::new(self.test(c)?)),
        })
    }
}

impl ReferenceExpr {
    /// Upper bounds of the magnitudes of a value and of its intermediate values.
    fn most(&self, memory: &[Vec<f64>], axes: &[LoopAxis]) -> (f64, f64) {
        let of = |buffer: BufferId| {
            let values = memory.get(buffer.0 as usize).map_or(&[][..], Vec::as_slice);
            values.iter().fold(0.0, |most, x| x.abs().max(most))
        };
        let (value, parts) = match self {
            ReferenceExpr::Const(x) => (x.abs(), 0.0),
            ReferenceExpr::Load(load) => (of(load.buffer), 0.0),
            ReferenceExpr::CheckedLoad(buffer, _) => (of(*buffer), 0.0),
            ReferenceExpr::FromIndex(Sub::Flat(flat)) => {
                let (low, high) = flat.range(axes);
                (low.abs().max(high.abs()) as f64, 0.0)
            }
            // Nonlinear indices as integer values are left to the interpreter.
            ReferenceExpr::FromIndex(Sub::Other(_)) => (f64::INFINITY, 0.0),
            ReferenceExpr::Single(x) | ReferenceExpr::Unary(_, x) => x.most(memory, axes),
            ReferenceExpr::Binary(op, sides) => {
                let ((a, on_a), (b, on_b)) = (sides.0.most(memory, axes), sides.1.most(memory, axes));
                let value = match op {
                    BinaryOp::Add | BinaryOp::Sub => a + b,
                    BinaryOp::Mul => a * b,
                    BinaryOp::Min | BinaryOp::Max => a.max(b),
                    BinaryOp::Nibble => 15.0,
                    BinaryOp::Div | BinaryOp::Pow => f64::INFINITY,
                };
                (value, on_a.max(on_b))
            }
            ReferenceExpr::Select(parts) => {
                let ((a, on_a), (b, on_b)) = (parts.1.most(memory, axes), parts.2.most(memory, axes));
                (a.max(b), on_a.max(on_b).max(parts.0.most(memory, axes)))
            }
        };
        (value, parts.max(value))
    }

    /// Gathers the loads whose positions are linear in the axes.
    fn loads<'n>(&'n self, loads: &mut Vec<&'n Load>) {
        match self {
            ReferenceExpr::Load(l) => loads.push(l),
            ReferenceExpr::Const(_) | ReferenceExpr::CheckedLoad(..) | ReferenceExpr::FromIndex(_) => {}
            ReferenceExpr::Single(x) | ReferenceExpr::Unary(_, x) => x.loads(loads),
            ReferenceExpr::Binary(_, sides) => {
                sides.0.loads(loads);
                sides.1.loads(loads);
            }
            ReferenceExpr::Select(parts) => {
                parts.1.loads(loads);
                parts.2.loads(loads);
            }
        }
    }
}

impl ReferenceTest {
    /// Upper bound of the magnitudes of the condition's intermediate values.
    fn most(&self, memory: &[Vec<f64>], axes: &[LoopAxis]) -> f64 {
        match self {
            ReferenceTest::True | ReferenceTest::Lt(..) | ReferenceTest::Eq(..) => 0.0,
            ReferenceTest::Less(sides) => sides.0.most(memory, axes).1.max(sides.1.most(memory, axes).1),
            ReferenceTest::And(sides) => sides.0.most(memory, axes).max(sides.1.most(memory, axes)),
            ReferenceTest::Not(c) => c.most(memory, axes),
        }
    }
}

/// Range of rows and columns.
#[derive(Clone, Copy)]
struct RowsTile {
    row: usize,
    n_rows: usize,
    column: usize,
    n_columns: usize,
}

/// Part of a row: `len` columns from the first.
#[derive(Clone, Copy)]
struct ColumnSpan {
    column: usize,
    len: usize,
}

/// Values that change by a constant step from column to column.
#[derive(Clone, Copy)]
struct SteppedValues {
    first: i64,
    step: i64,
}

impl SteppedValues {
    fn at(self, x: usize) -> i64 {
        self.first + self.step * x as i64
    }
}

type NestResult<T = ()> = Result<T, Box<Fault>>;

struct NestWorker<'a> {
    nest: &'a ParallelNest<'a>,
    memory: &'a [Vec<f64>],
    counter: Counter<'a>,
    /// Values of the axes; the row axis is kept at zero.
    values: Vec<i64>,
    /// Results of the tile.
    sums: Vec<f64>,
    /// Contiguous copy of a block of a factor.
    packed: Vec<f64>,
    /// Buffers for reuse.
    spare: Vec<Vec<f64>>,
}

impl NestWorker<'_> {
    fn tile(&mut self, tile: RowsTile, to: &[AtomicU64]) -> NestResult {
        let nest = self.nest;
        let n = tile.n_columns;
        let mut sums = std::mem::take(&mut self.sums);
        sums.clear();
        sums.resize(tile.n_rows * n, 0.0);
        let step = nest.at.coefficients[nest.row];
        for (r, sums) in sums.chunks_exact_mut(n).enumerate() {
            let first = self.start(&nest.at, tile, r);
            match nest.reduce {
                None => {}
                Some(ReducedLoops { op, afresh: true }) => sums.fill(op.identity()),
                Some(ReducedLoops { afresh: false, .. }) => {
                    for (x, sum) in sums.iter_mut().enumerate() {
                        let old = f64::from_bits(to[(first + x as i64 * step) as usize].load(Ordering::Relaxed));
                        if is_undefined(old) {
                            return Err(self.undefined(tile.column + x));
                        }
                        *sum = old;
                    }
                }
            }
        }
        match &nest.product {
            Some((scalar, vector)) => self.sum_products(scalar, vector, tile, &mut sums),
            None => self.general(tile, &mut sums)?,
        }
        for (r, sums) in sums.chunks_exact(n).enumerate() {
            let first = self.start(&nest.at, tile, r);
            for (x, sum) in sums.iter().enumerate() {
                to[(first + x as i64 * step) as usize].store(sum.to_bits(), Ordering::Relaxed);
            }
        }
        self.sums = sums;
        Ok(())
    }

    /// Position of a tile's row, at its first column and the start of the reduction.
    fn start(&mut self, flat: &Flat, tile: RowsTile, row: usize) -> i64 {
        let nest = self.nest;
        nest.reduction.iter().for_each(|a| self.values[*a] = 0);
        self.values[nest.across] = (tile.row + row) as i64;
        flat.at(&self.values) + flat.coefficients[nest.row] * tile.column as i64
    }

    /// Advances these axes to the next iteration; false, with all at zero, after the last one.
    fn advance(&mut self, axes: &[usize]) -> bool {
        axes.iter().rev().any(|a| {
            self.values[*a] += 1;
            let more = self.values[*a] < self.nest.axes[*a].extent as i64;
            if !more {
                self.values[*a] = 0;
            }
            more
        })
    }

    /// `sums += scalar · vector` over the reduction.
    fn sum_products(&mut self, scalar: &Load, vector: &Load, tile: RowsTile, sums: &mut [f64]) {
        let nest = self.nest;
        let n = tile.n_columns;
        let (scalars, vectors) = (&*self.memory[scalar.buffer.0 as usize], &*self.memory[vector.buffer.0 as usize]);
        let (axis, outer) = match nest.reduction.split_last() {
            Some((last, outer)) => (*last, outer),
            None => (nest.axes.len() - 1, &[][..]),
        };
        let along = |l: &Load, a: usize| l.flat.coefficients[a];
        let (step, depth) = (along(vector, nest.row), nest.axes[axis].extent);
        let (scalar_across, vector_across) = (along(scalar, nest.across), along(vector, nest.across));
        let mut packed = std::mem::take(&mut self.packed);
        self.values[nest.across] = tile.row as i64;
        nest.reduction.iter().for_each(|a| self.values[*a] = 0);
        loop {
            for k in (0..depth).step_by(DEPTH) {
                let n_k = DEPTH.min(depth - k);
                self.values[axis] = k as i64;
                let scalar_at = scalar.flat.at(&self.values);
                let vector_at = vector.flat.at(&self.values) + step * tile.column as i64;
                for (r, sums) in sums.chunks_exact_mut(n).enumerate() {
                    let at = vector_at + vector_across * r as i64;
                    let (block, at, stride) = if step == 1 || n == 1 {
                        (vectors, at as usize, along(vector, axis))
                    } else {
                        if r == 0 || vector_across != 0 {
                            pack(&mut packed, vectors, at, [along(vector, axis), step], [n_k, n]);
                        }
                        (&*packed, 0, n as i64)
                    };
                    let factor = |k: usize| {
                        scalars[(scalar_at + scalar_across * r as i64 + along(scalar, axis) * k as i64) as usize]
                    };
                    let row = |k: usize| &block[(at as i64 + stride * k as i64) as usize..][..n];
                    let mut k = 0;
                    while k + 4 <= n_k {
                        let factors = [factor(k), factor(k + 1), factor(k + 2), factor(k + 3)];
                        add_products(sums, factors, [row(k), row(k + 1), row(k + 2), row(k + 3)]);
                        k += 4;
                    }
                    while k < n_k {
                        add_products(sums, [factor(k)], [row(k)]);
                        k += 1;
                    }
                }
                if self.counter.add(WORK_OF_PRODUCT * (n_k * sums.len()) as u64).is_break() {
                    return;
                }
            }
            self.values[axis] = 0;
            if !self.advance(outer) {
                break;
            }
        }
        self.packed = packed;
    }

    /// Evaluates any value and any reduction.
    fn general(&mut self, tile: RowsTile, sums: &mut [f64]) -> NestResult {
        let nest = self.nest;
        let span = ColumnSpan { column: tile.column, len: tile.n_columns };
        nest.reduction.iter().for_each(|a| self.values[*a] = 0);
        let mut values = self.take(span.len);
        for (r, sums) in sums.chunks_exact_mut(span.len).enumerate() {
            self.values[nest.across] = (tile.row + r) as i64;
            loop {
                if self.counter.add(WORK_OF_OTHERS * span.len as u64).is_break() {
                    return Ok(());
                }
                let Some(ReducedLoops { op, .. }) = nest.reduce else {
                    self.node(&nest.value, span, sums)?;
                    break;
                };
                self.node(&nest.value, span, &mut values)?;
                combine(op.combine(), sums, &values);
                if !self.advance(&nest.reduction) {
                    break;
                }
            }
        }
        self.spare.push(values);
        Ok(())
    }

    /// Takes a buffer with arbitrary contents.
    fn take(&mut self, len: usize) -> Vec<f64> {
        let mut values = self.spare.pop().unwrap_or_default();
        values.resize(len, 0.0);
        values
    }

    /// Evaluates a node for the columns of a span.
    fn node(&mut self, node: &ReferenceExpr, span: ColumnSpan, out: &mut [f64]) -> NestResult {
        match node {
            ReferenceExpr::Const(x) => out.fill(*x),
            ReferenceExpr::Load(load) => {
                let step = load.flat.coefficients[self.nest.row];
                let at = load.flat.at(&self.values) + step * span.column as i64;
                let values = &self.memory[load.buffer.0 as usize];
                match step {
                    0 => out.fill(values[at as usize]),
                    1 => out.copy_from_slice(&values[at as usize..][..span.len]),
                    _ => {
                        for (x, out) in out.iter_mut().enumerate() {
                            *out = values[(at + step * x as i64) as usize];
                        }
                    }
                }
            }
            ReferenceExpr::CheckedLoad(buffer, subs) => self.checked_load(*buffer, subs, span, out)?,
            ReferenceExpr::FromIndex(sub) => {
                for (x, out) in out.iter_mut().enumerate() {
                    *out = self.sub(sub, span.column + x)? as f64;
                }
            }
            ReferenceExpr::Single(x) => {
                self.node(x, span, out)?;
                for x in out {
                    *x = f64::from(*x as f32);
                }
            }
            ReferenceExpr::Unary(op, x) => {
                self.node(x, span, out)?;
                for x in out {
                    *x = apply_unary(*op, *x);
                }
            }
            ReferenceExpr::Binary(op, sides) => {
                self.node(&sides.0, span, out)?;
                let mut right = self.take(span.len);
                self.node(&sides.1, span, &mut right)?;
                combine(*op, out, &right);
                self.spare.push(right);
            }
            ReferenceExpr::Select(parts) => {
                let (test, a, b) = &**parts;
                let mut x = 0;
                let holds = self.test(test, span)?;
                while x < span.len {
                    let chosen = holds[x];
                    let len = holds[x..].iter().position(|h| *h != chosen).unwrap_or(span.len - x);
                    let part = ColumnSpan { column: span.column + x, len };
                    self.node(if chosen { a } else { b }, part, &mut out[x..x + len])?;
                    x += len;
                }
            }
        }
        Ok(())
    }

    fn checked_load(&mut self, id: BufferId, subs: &[Sub], span: ColumnSpan, out: &mut [f64]) -> NestResult {
        let Buffer { shape, .. } = self.nest.program.buffer(id);
        let values = &self.memory[id.0 as usize];
        let (mut first, mut step, mut inside) = (0i64, 0i64, true);
        for (sub, extent) in subs.iter().zip(shape) {
            // Values that are linear along the row lie between those at its ends.
            let Some(line) = self.line(sub, span) else {
                inside = false;
                break;
            };
            inside &= line.at(0) >= 0 && line.at(0) < *extent;
            inside &= line.at(span.len - 1) >= 0 && line.at(span.len - 1) < *extent;
            (first, step) = (first * extent + line.first, step.wrapping_mul(*extent).wrapping_add(line.step));
            if !inside {
                break;
            }
        }
        if inside && step == 1 {
            out.copy_from_slice(&values[first as usize..][..span.len]);
            return Ok(());
        }
        if inside {
            for (x, out) in out.iter_mut().enumerate() {
                *out = values[(first + step * x as i64) as usize];
            }
            return Ok(());
        }
        for (x, out) in out.iter_mut().enumerate() {
            let mut at = 0;
            for (sub, extent) in subs.iter().zip(shape) {
                let i = self.sub(sub, span.column + x)?;
                if !(0..*extent).contains(&i) {
                    return Err(self.out_of_bounds(id, subs, span.column + x));
                }
                at = at * extent + i;
            }
            *out = values[at as usize];
        }
        Ok(())
    }

    #[cold]
    fn out_of_bounds(&self, id: BufferId, subs: &[Sub], column: usize) -> Box<Fault> {
        let Buffer { name, shape, .. } = self.nest.program.buffer(id);
        match subs.iter().map(|s| self.sub(s, column)).collect::<NestResult<_>>() {
            Err(fault) => fault,
            Ok(subscripts) => Box::new(Fault::OutOfBounds {
                buffer: name.clone(),
                subscripts,
                shape: shape.clone(),
                place: self.place(column),
            }),
        }
    }

    /// Values of an index in a span, if it is linear along the row.
    fn line(&self, sub: &Sub, span: ColumnSpan) -> Option<SteppedValues> {
        let Sub::Flat(flat) = sub else { return None };
        let step = flat.coefficients[self.nest.row];
        Some(SteppedValues { first: flat.at(&self.values) + step * span.column as i64, step })
    }

    /// Compares two indices in a span.
    fn compare(&self, a: &Sub, b: &Sub, span: ColumnSpan, holds: impl Fn(i64, i64) -> bool) -> NestResult<Vec<bool>> {
        match (self.line(a, span), self.line(b, span)) {
            (Some(a), Some(b)) => Ok((0..span.len).map(|x| holds(a.at(x), b.at(x))).collect()),
            _ => {
                let (a, b) = (self.subs(a, span)?, self.subs(b, span)?);
                Ok(a.into_iter().zip(b).map(|(a, b)| holds(a, b)).collect())
            }
        }
    }

    /// Values of an index in a span.
    fn subs(&self, sub: &Sub, span: ColumnSpan) -> NestResult<Vec<i64>> {
        let of_index = match (self.line(sub, span), sub) {
            (Some(line), _) => Some((0..span.len).map(|x| line.at(x)).collect()),
            (None, Sub::Other(index)) => self.eval_all(index, span),
            (None, Sub::Flat(_)) => None,
        };
        // If a column has no value, evaluation column by column finds it.
        let one_by_one = || (0..span.len).map(|x| self.sub(sub, span.column + x)).collect();
        of_index.map_or_else(one_by_one, Ok)
    }

    /// Evaluates an index with divisions, remainders, minima or maxima; `None` if it has no value in some
    /// column.
    fn eval_all(&self, index: &Index, span: ColumnSpan) -> Option<Vec<i64>> {
        let mut sums = vec![index.constant(); span.len];
        for (atom, c) in index.terms() {
            let values = match atom {
                Atom::Var(v) => {
                    let axis = self.nest.axes.iter().position(|a| a.var == Some(*v)).expect("it is of the nest");
                    let (first, step) = match axis == self.nest.row {
                        true => (span.column as i64, 1),
                        false => (self.values[axis], 0),
                    };
                    (0..span.len as i64).map(|x| first + step * x).collect()
                }
                Atom::FloorDiv(x, d) => {
                    let mut values = self.eval_all(x, span)?;
                    values.iter_mut().try_for_each(|x| {
                        *x = floor_div(*x, *d)?;
                        Some(())
                    })?;
                    values
                }
                Atom::Mod(x, d) => {
                    let mut values = self.eval_all(x, span)?;
                    values.iter_mut().try_for_each(|x| {
                        *x -= floor_div(*x, *d)?.checked_mul(*d)?;
                        Some(())
                    })?;
                    values
                }
                Atom::Min(a, b) | Atom::Max(a, b) => {
                    let (mut values, others) = (self.eval_all(a, span)?, self.eval_all(b, span)?);
                    let is_min = matches!(atom, Atom::Min(..));
                    for (x, y) in values.iter_mut().zip(others) {
                        *x = if is_min { y.min(*x) } else { y.max(*x) };
                    }
                    values
                }
            };
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum = value.checked_mul(*c)?.checked_add(*sum)?;
            }
        }
        Some(sums)
    }

    /// Evaluates a condition at each element of a span.
    fn test(&mut self, test: &ReferenceTest, span: ColumnSpan) -> NestResult<Vec<bool>> {
        match test {
            ReferenceTest::True => Ok(vec![true; span.len]),
            ReferenceTest::Lt(a, b) => self.compare(a, b, span, |a, b| a < b),
            ReferenceTest::Eq(a, b) => self.compare(a, b, span, |a, b| a == b),
            ReferenceTest::Less(sides) => {
                let (mut a, mut b) = (self.take(span.len), self.take(span.len));
                self.node(&sides.0, span, &mut a)?;
                self.node(&sides.1, span, &mut b)?;
                let holds = a.iter().zip(&b).map(|(a, b)| a < b).collect();
                self.spare.extend([a, b]);
                Ok(holds)
            }
            ReferenceTest::And(sides) => {
                let mut holds = self.test(&sides.0, span)?;
                // The right side is evaluated only in columns where the left side holds.
                let mut x = 0;
                while let Some(from) = holds[x..].iter().position(|h| *h).map(|n| x + n) {
                    let len = holds[from..].iter().position(|h| !*h).unwrap_or(span.len - from);
                    let right = self.test(&sides.1, ColumnSpan { column: span.column + from, len })?;
                    holds[from..from + len].copy_from_slice(&right);
                    x = from + len;
                }
                Ok(holds)
            }
            ReferenceTest::Not(c) => {
                let mut holds = self.test(c, span)?;
                holds.iter_mut().for_each(|h| *h = !*h);
                Ok(holds)
            }
        }
    }

    /// Value of an index in a column.
    #[inline]
    fn sub(&self, sub: &Sub, column: usize) -> NestResult<i64> {
        match sub {
            Sub::Flat(flat) => Ok(flat.at(&self.values) + flat.coefficients[self.nest.row] * column as i64),
            Sub::Other(index) => self.eval(index, column).map_err(|by_zero| {
                let (index, place) = (crate::text::index_to_string(self.nest.program, index), self.place(column));
                Box::new(if by_zero {
                    Fault::DivisionByZero { index, place }
                } else {
                    Fault::Overflow { index, place }
                })
            }),
        }
    }

    /// Evaluates an index in a column; the error says whether it is a division by zero.
    fn eval(&self, index: &Index, column: usize) -> Result<i64, bool> {
        let mut sum = index.constant();
        for (atom, c) in index.terms() {
            let value = match atom {
                Atom::Var(v) => {
                    let axis = self.nest.axes.iter().position(|a| a.var == Some(*v)).expect("it is of the nest");
                    if axis == self.nest.row { column as i64 } else { self.values[axis] }
                }
                Atom::FloorDiv(_, 0) | Atom::Mod(_, 0) => return Err(true),
                Atom::FloorDiv(x, d) => floor_div(self.eval(x, column)?, *d).ok_or(false)?,
                Atom::Mod(x, d) => {
                    let x = self.eval(x, column)?;
                    x - floor_div(x, *d).and_then(|q| q.checked_mul(*d)).ok_or(false)?
                }
                Atom::Min(a, b) => self.eval(a, column)?.min(self.eval(b, column)?),
                Atom::Max(a, b) => self.eval(a, column)?.max(self.eval(b, column)?),
            };
            sum = value.checked_mul(*c).and_then(|term| sum.checked_add(term)).ok_or(false)?;
        }
        Ok(sum)
    }

    fn place(&self, column: usize) -> IterationPoint {
        let mut named: Vec<(LoopId, i64)> = Vec::new();
        for (i, (axis, value)) in self.nest.axes.iter().zip(&self.values).enumerate() {
            let value = if i == self.nest.row { column as i64 } else { *value };
            let Some((var, by)) = axis.counts else { continue };
            match named.iter_mut().find(|(v, _)| *v == var) {
                Some((_, sum)) => *sum += by * value,
                None => named.push((var, by * value)),
            }
        }
        IterationPoint(named.into_iter().map(|(v, value)| (self.nest.program.loop_name(v).to_owned(), value)).collect())
    }

    /// Fault of an update that combines a value with an unwritten element.
    fn undefined(&self, column: usize) -> Box<Fault> {
        let buffer = self.nest.program.buffer(self.nest.to);
        let at = self.nest.at.at(&self.values) + self.nest.at.coefficients[self.nest.row] * column as i64;
        Box::new(Fault::Undefined {
            buffer: buffer.name.clone(),
            subscripts: crate::interp::subscripts_of(&buffer.shape, at as usize),
            place: self.place(column),
        })
    }
}

/// Copies `[n_k, n]` elements with these strides into a contiguous block.
fn pack(packed: &mut Vec<f64>, from: &[f64], at: i64, strides: [i64; 2], [n_k, n]: [usize; 2]) {
    packed.resize(n_k * n, 0.0);
    // Memory is traversed forwards, with the smaller stride in the inner loop.
    if strides[0].abs() >= strides[1].abs() {
        for k in 0..n_k {
            for x in 0..n {
                packed[k * n + x] = from[(at + strides[0] * k as i64 + strides[1] * x as i64) as usize];
            }
        }
    } else {
        for x in 0..n {
            for k in 0..n_k {
                packed[k * n + x] = from[(at + strides[0] * k as i64 + strides[1] * x as i64) as usize];
            }
        }
    }
}

/// `sums += Σ factor · row`; all rows have the length of the sums.
fn add_products<const N: usize>(sums: &mut [f64], factors: [f64; N], rows: [&[f64]; N]) {
    let rows = rows.map(|row| &row[..sums.len()]);
    for x in 0..sums.len() {
        let mut products = factors[0] * rows[0][x];
        for k in 1..N {
            products += factors[k] * rows[k][x];
        }
        sums[x] += products;
    }
}

/// `left = op(left, right)`
fn combine(op: BinaryOp, left: &mut [f64], right: &[f64]) {
    macro_rules! with {
        ($op:expr) => {
            for (a, b) in left.iter_mut().zip(right) {
                *a = apply_binary($op, *a, *b);
            }
        };
    }
    match op {
        BinaryOp::Add => with!(BinaryOp::Add),
        BinaryOp::Sub => with!(BinaryOp::Sub),
        BinaryOp::Mul => with!(BinaryOp::Mul),
        BinaryOp::Div => with!(BinaryOp::Div),
        BinaryOp::Min => with!(BinaryOp::Min),
        BinaryOp::Max => with!(BinaryOp::Max),
        BinaryOp::Pow => with!(BinaryOp::Pow),
        BinaryOp::Nibble => with!(BinaryOp::Nibble),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interp::undefined;
    use crate::text::parse;

    /// Checks the nest of a program's only statement, with inputs `X` and `Y`: its axes along and across the
    /// rows, and whether it is a sum of products; `None` if it is left to the interpreter.
    fn check(buffers: &str, nest: &str, expected: Option<(&str, &str, bool)>) {
        let text = format!("program \"p\" {buffers} loops i, j, k, l run {{ {nest} }}");
        let program = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let memory = program.buffers.iter().map(|b| match b.name.as_str() {
            "O" => undefined(b).unwrap(),
            _ => vec![1.0; b.n_elements().unwrap() as usize],
        });
        let nest = ParallelNest::of(&program, &program.body[0], &memory.collect::<Vec<_>>());
        let name = |axis: usize, n: &ParallelNest<'_>| {
            n.axes[axis].counts.map_or("", |(v, _)| program.loop_name(v)).to_owned()
        };
        let got = nest.map(|n| (name(n.row, &n), name(n.across, &n), n.product.is_some()));
        assert_eq!(got, expected.map(|(row, across, product)| (row.into(), across.into(), product)), "{text}");
    }

    #[test]
    fn rows_are_chosen_so_that_loads_are_contiguous() {
        let matmul = |x: &str, y: &str| {
            format!("for i in 40 {{ for j in 50 {{ for k in 60 {{ O[i, j] += {x} * {y} first k == 0 }} }} }}")
        };
        let o = "buffer O: f32[40, 50] global output";
        let buffers = format!("{o} buffer X: f32[40, 60] global input buffer Y: f32[60, 50] global input");
        check(&buffers, &matmul("X[i, k]", "Y[k, j]"), Some(("j", "i", true)));
        check(&buffers, &matmul("Y[k, j]", "X[i, k]"), Some(("j", "i", true)));
        let buffers = format!("{o} buffer X: f32[60, 40] global input buffer Y: f32[50, 60] global input");
        check(&buffers, &matmul("X[k, i]", "Y[j, k]"), Some(("i", "j", true)));
        check(&buffers, &matmul("exp(X[k, i])", "Y[j, k]"), Some(("i", "j", false)));
        let conv = "for i in 8 { for j in 9 { for k in 5 { for l in 3 { O[i, j] += X[k, j + l] * Y[i, 3*k + l]
            first k == 0 && l == 0 } } } }";
        let buffers = "buffer O: f32[8, 9] global output buffer X: f32[5, 11] global input
            buffer Y: f32[8, 15] global input";
        check(buffers, conv, Some(("j", "i", true)));
    }

    #[test]
    fn groups_of_channels_are_axes() {
        let buffers = "buffer O: f32[8, 40] global output buffer X: f32[4, 42] global input
            buffer Y: f32[8, 3] global input";
        let nest = "for i in 8 { for j in 40 { for k in 3 { O[i, j] += X[i // 2, j + k] * Y[i, k] first k == 0 } } }";
        check(buffers, nest, Some(("j", "i", true)));
        let nest = "for i in 8 { for j in 40 { for k in 12 { O[i, j] += X[k // 3, j + k % 3] * Y[i, k % 3]
            first k == 0 } } }";
        check(buffers, nest, Some(("j", "i", true)));
    }

    #[test]
    fn other_statements_are_left_to_the_interpreter() {
        let buffers = "buffer O: f32[8, 8] global output buffer X: f32[8] global input";
        check(buffers, "for i in 8 { for j in 8 { O[i, j] = X[j] } }", Some(("j", "i", false)));
        for nest in [
            "for i in 8 { for j in i { O[i, j] = X[j] } }",
            "for i in 8 { for j in 8 { O[i, j] = O[i, j] } }",
            "for i in 8 { for j in 8 { O[i, 0] = X[j] } }",
            "for i in 8 { for j in 8 { O[i, 0] += X[j] first j == 1 } }",
            "for i in 8 { for j in 8 { O[i, 0] += X[j] first i == 0 } }",
            "for i in 4 { for j in 4 { O[0, i + j] = X[j] } }",
            "for i in 9 { for j in 8 { O[i, j] = X[j] } }",
            "for i in 8 { if i < 3 { } }",
        ] {
            check(buffers, nest, None);
        }
    }
}
