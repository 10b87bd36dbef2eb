//! Starts integer sums at what is added to them afterwards.
//!
//! A quantized product adds an integer per channel to its sums. Integer addition wraps, so the order does not
//! matter: if every use of a sum in registers adds the same number, the sum starts there, and no instruction
//! is left for the addition.
//!
//! ```text
//! sum[0, l] = 0.0                              sum[0, l] = bias[l]
//! for k in 64 { sum[0, l] += … }          →    for k in 64 { sum[0, l] += … }
//! y[l] = f(i32(sum[0, l] + bias[l]))           y[l] = f(sum[0, l])
//! ```

use crate::dtype::DType;
use crate::expr::{BinaryOp, Expr, ReduceOp, Rewrite, TreePart};
use crate::index::Index;
use crate::lower::simplify::never;
use crate::program::{Buffer, BufferId, Loop, LoopId, LoopKind, Program, Role, Scope, Stmt};
use std::collections::BTreeMap;

/// Starts sums at what is added to them, in a program without unrolled loops whose small temporaries are in
/// registers.
pub fn start_sums(mut program: Program) -> Program {
    let buffers = std::mem::take(&mut program.buffers);
    let mut program = program.map_parts(|block| start_block(block, &buffers));
    program.buffers = buffers;
    program
}

fn start_block(block: Vec<Stmt>, buffers: &[Buffer]) -> Vec<Stmt> {
    let inside = |stmt| match stmt {
        Stmt::For(l) => Stmt::For(Loop { body: start_block(l.body, buffers), ..l }),
        Stmt::If { cond, then, otherwise } => {
            Stmt::If { cond, then: start_block(then, buffers), otherwise: start_block(otherwise, buffers) }
        }
        other => other,
    };
    let block: Vec<Stmt> = block.into_iter().map(inside).collect();
    let sums = Sums::of(&block, buffers);
    let starts = sums.starts();
    if starts.is_empty() { block } else { block.into_iter().map(|stmt| sums.started(stmt, &starts)).collect() }
}

/// Elements of a buffer in registers: the first one, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Vector {
    buffer: BufferId,
    first: i64,
    n_lanes: i64,
}

impl Vector {
    fn overlaps(self, other: Vector) -> bool {
        let ends = [self, other].map(|v| v.first + v.n_lanes);
        self.buffer == other.buffer && self.first < ends[1] && other.first < ends[0]
    }
}

/// Load of an input in a vectorized loop, or outside one.
#[derive(Clone)]
struct Term {
    input: BufferId,
    index: Vec<Index>,
    lane: Option<LoopId>,
}

impl Term {
    /// Same load in another vectorized loop.
    fn along(&self, lane: Option<LoopId>) -> Expr {
        let index = match (self.lane, lane) {
            (Some(from), Some(to)) => self.index.iter().map(|i| i.substitute(from, &Index::from(to))).collect(),
            _ => self.index.clone(),
        };
        Expr::Load(self.input, index)
    }
}

/// Accesses of the statements of a block to a vector.
#[derive(Default)]
struct Accesses {
    /// Number of stores of zeros.
    n_zeros: usize,
    copied_from: Vec<Vector>,
    copied_to: Vec<Vector>,
    /// Terms that readers add.
    terms: Vec<Term>,
}

/// Order of the accesses to a buffer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Zeros are stored, or sums of another buffer.
    Start,
    /// Terms of the sums are added.
    Sum,
    /// Sums are read.
    Read,
}

/// Integer sums of a block that live in registers.
struct Sums<'p> {
    buffers: &'p [Buffer],
    /// Stage that the accesses to each buffer allocated in the block have reached; none if some access is
    /// none of these, or in another order.
    stages: BTreeMap<BufferId, Option<Stage>>,
    vectors: BTreeMap<Vector, Accesses>,
}

/// Store that is a statement of its own, or alone in a vectorized loop.
fn single_store(stmt: &Stmt) -> Option<(Option<&Loop>, BufferId, &[Index], &Expr)> {
    let (lanes, store) = match stmt {
        Stmt::For(l) if l.kind == LoopKind::Vectorized => (Some(l), l.body.as_slice()),
        other => (None, std::slice::from_ref(other)),
    };
    match store {
        [Stmt::Store { buffer, index, value }] => Some((lanes, *buffer, index, value)),
        _ => None,
    }
}

impl<'p> Sums<'p> {
    fn of(block: &[Stmt], buffers: &'p [Buffer]) -> Sums<'p> {
        let is_sum = |id: &BufferId| {
            let b = &buffers[id.0 as usize];
            b.scope == Scope::Register && b.dtype == DType::I32
        };
        let allocated = block.iter().filter_map(|stmt| match stmt {
            Stmt::Alloc(id) => Some(*id).filter(is_sum),
            _ => None,
        });
        let stages: BTreeMap<_, _> = allocated.map(|id| (id, Some(Stage::Start))).collect();
        let mut sums = Sums { buffers, stages, vectors: BTreeMap::new() };
        if !sums.stages.is_empty() {
            block.iter().for_each(|stmt| sums.visit(stmt));
        }
        sums
    }

    fn reach(&mut self, buffer: BufferId, stage: Stage) {
        if let Some(reached) = self.stages.get_mut(&buffer) {
            *reached = reached.filter(|reached| *reached <= stage).map(|_| stage);
        }
    }

    fn exclude(&mut self, buffer: BufferId) {
        if let Some(reached) = self.stages.get_mut(&buffer) {
            *reached = None;
        }
    }

    /// Vector of sums that an access covers, in a vectorized loop or outside one.
    fn vector(&self, buffer: BufferId, index: &[Index], lanes: Option<&Loop>) -> Option<Vector> {
        self.stages.get(&buffer)?;
        let strides = self.buffers[buffer.0 as usize].strides();
        let at = index.iter().zip(strides).fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(stride)));
        let (first, n_lanes) = match lanes {
            None => (at, 1),
            Some(l) => (at.sub(&Index::from(l.var)), l.extent.as_const()?),
        };
        Some(Vector { buffer, first: first.as_const()?, n_lanes })
    }

    fn visit(&mut self, stmt: &Stmt) {
        let Some((lanes, buffer, index, value)) = single_store(stmt) else {
            return stmt.walk(&mut |s| self.visit_nested(s));
        };
        let value = value.without_cast(DType::I32);
        match (self.vector(buffer, index, lanes), value) {
            (Some(written), Expr::Const(0.0)) => {
                self.reach(buffer, Stage::Start);
                self.vectors.entry(written).or_default().n_zeros += 1;
                return;
            }
            (Some(to), Expr::Load(b, i)) if let Some(from) = self.vector(*b, i, lanes) => {
                self.reach(from.buffer, Stage::Read);
                self.reach(buffer, Stage::Start);
                self.vectors.entry(from).or_default().copied_to.push(to);
                self.vectors.entry(to).or_default().copied_from.push(from);
                return;
            }
            _ => self.exclude(buffer),
        }
        self.visit_value(TreePart::Expr(value), lanes);
    }

    /// Visits a nested statement, which may only add to sums.
    fn visit_nested(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::Update { buffer, op: ReduceOp::Sum, first, .. } if *first == never() => {
                self.reach(*buffer, Stage::Sum);
            }
            _ => stmt.own_write().into_iter().for_each(|(buffer, _)| self.exclude(buffer)),
        }
        stmt.own_nodes().for_each(|node| node.for_each_buffer(&mut |b| self.exclude(b)));
    }

    /// Visits a value that a statement of the block stores.
    fn visit_value(&mut self, node: TreePart<'_>, lanes: Option<&Loop>) {
        match node {
            TreePart::Expr(value) if let Some((sum, _, term)) = self.sum_and_term(value, lanes) => {
                self.reach(sum.buffer, Stage::Read);
                self.vectors.entry(sum).or_default().terms.push(term);
                return;
            }
            TreePart::Expr(Expr::Load(buffer, _) | Expr::Gather(buffer, _)) => self.exclude(*buffer),
            _ => {}
        }
        node.children().for_each(|child| self.visit_value(child, lanes));
    }

    /// Matches the addition of a vector of sums, also returned as a load, and an input, one number for each
    /// lane or for all.
    fn sum_and_term<'e>(&self, value: &'e Expr, lanes: Option<&Loop>) -> Option<(Vector, &'e Expr, Term)> {
        let Expr::Cast(DType::I32, sum) = value else { return None };
        let Expr::Binary(BinaryOp::Add, a, b) = &**sum else { return None };
        let [a, b] = [a, b].map(|part| part.without_cast(DType::I32));
        [(a, b), (b, a)].into_iter().find_map(|(sum, term)| {
            let (Expr::Load(buffer, at), Expr::Load(input, index)) = (sum, term) else { return None };
            let added = &self.buffers[input.0 as usize];
            let is_input = matches!(added.role, Role::Input | Role::ConstInput) && added.dtype == DType::I32;
            let term = Term { input: *input, index: index.clone(), lane: lanes.map(|l| l.var) };
            Some((self.vector(*buffer, at, lanes)?, sum, term)).filter(|_| is_input)
        })
    }

    /// Terms at which sums can start, by the vector that starts at zero and by the one that is read.
    fn starts(&self) -> BTreeMap<Vector, Term> {
        let mut starts = BTreeMap::new();
        for (&sum, of_sum) in &self.vectors {
            let last = match of_sum.copied_to.as_slice() {
                [to] if of_sum.terms.is_empty() => *to,
                _ => sum,
            };
            let of_last = &self.vectors[&last];
            let is_sum = of_sum.n_zeros == 1 && of_sum.copied_from.is_empty() && of_last.copied_to.is_empty();
            let is_only = last == sum || of_last.n_zeros == 0 && of_last.copied_from == [sum];
            let Some((term, others)) = of_last.terms.split_first() else { continue };
            let is_same = others.iter().all(|other| other.along(term.lane) == term.along(term.lane));
            if is_sum && is_only && is_same && [sum, last].iter().all(|v| self.is_known(*v)) {
                starts.extend([(sum, term.clone()), (last, term.clone())]);
            }
        }
        starts
    }

    /// Whether all accesses to the buffer are known, and none covers a part of the vector.
    fn is_known(&self, vector: Vector) -> bool {
        self.stages[&vector.buffer].is_some() && self.vectors.keys().all(|v| *v == vector || !v.overlaps(vector))
    }

    /// Rewrites a statement of the block: stores of zeros become the terms, which readers no longer add.
    fn started(&self, stmt: Stmt, starts: &BTreeMap<Vector, Term>) -> Stmt {
        let Some((lanes, buffer, index, value)) = single_store(&stmt) else { return stmt };
        let written = self.vector(buffer, index, lanes).and_then(|v| starts.get(&v));
        let value = match written {
            Some(term) if *value.without_cast(DType::I32) == Expr::Const(0.0) => term.along(lanes.map(|l| l.var)),
            _ => Started { sums: self, lanes, starts }.expr(value),
        };
        let store = Stmt::Store { buffer, index: index.to_vec(), value };
        match lanes {
            Some(l) => Stmt::For(Loop { var: l.var, extent: l.extent.clone(), kind: l.kind, body: vec![store] }),
            None => store,
        }
    }
}

/// Rewriter of values that read sums.
struct Started<'s> {
    sums: &'s Sums<'s>,
    lanes: Option<&'s Loop>,
    starts: &'s BTreeMap<Vector, Term>,
}

impl Rewrite for Started<'_> {
    fn expr(&mut self, value: &Expr) -> Expr {
        match self.sums.sum_and_term(value, self.lanes) {
            Some((vector, sum, _)) if self.starts.contains_key(&vector) => sum.clone(),
            _ => value.map_parts(self),
        }
    }
}
