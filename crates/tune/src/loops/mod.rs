//! Loop contexts of a program, as features of a cost model: the operations and the buffer accesses of each
//! loop.

use tilewright_ir::expr::{BinaryOp, Expr};
use tilewright_ir::{Atom, BufferId, Index, Loop, LoopId, LoopKind, Program, Stmt};
use tilewright_search::features::{LoopContext, LoopContexts, Touch};

/// Extracts the contexts of all loops in the `run` part of a program, which should be scheduled but not
/// lowered, as lowering unrolls and splits loops.
///
/// # Cost
/// O(accesses · depth).
///
/// # Source
/// AutoTVM, appendix A.2.1. We differ in that a touch count is the size of the box that an access covers, so
/// that the windows of a convolution, which overlap, are not counted more than once; the public
/// implementation's product of extents is an upper bound of it. Nest level and counts of operations are from
/// that implementation.
pub fn loop_contexts(program: &Program) -> LoopContexts {
    let strides = program.buffers.iter().map(|b| b.strides()).collect();
    let mut walk = Walk {
        program,
        strides,
        extents: vec![0; program.loops.len()],
        depth_of: vec![usize::MAX; program.loops.len()],
        stack: Vec::new(),
        vars: Vec::new(),
        loops: Vec::new(),
    };
    walk.block(&program.body);
    LoopContexts::new(walk.loops)
}

/// Returns the number of a kind of loop: those of tensor cores, which models do not distinguish, come last.
fn number_of(kind: LoopKind) -> usize {
    LoopKind::ALL.iter().position(|(other, _)| *other == kind).expect("every kind is listed")
}

/// Traversal of a program, loop by loop.
struct Walk<'a> {
    program: &'a Program,
    /// Strides of each buffer.
    strides: Vec<Vec<i64>>,
    /// Extent of each loop variable visited so far.
    extents: Vec<i64>,
    /// Position of each variable on the stack; `usize::MAX` if it is not on the stack.
    depth_of: Vec<usize>,
    /// Loops around the current statement, as indices into the contexts.
    stack: Vec<usize>,
    /// Variable of each loop visited so far, and its context.
    vars: Vec<LoopId>,
    loops: Vec<LoopContext>,
}

impl Walk<'_> {
    fn block(&mut self, block: &[Stmt]) {
        for stmt in block {
            match stmt {
                Stmt::For(l) => self.enter(l),
                Stmt::If { .. } => stmt.blocks().for_each(|inner| self.block(inner)),
                Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {}
                Stmt::Store { value, .. } => {
                    let mut n = [0; 3];
                    count_operations(value, &mut n);
                    self.leaf(stmt, n);
                }
                Stmt::Update { value, op, .. } => {
                    let mut n = [0; 3];
                    count_operations(value, &mut n);
                    n[class_of(op.combine())] += 1;
                    self.leaf(stmt, n);
                }
            }
        }
    }

    fn enter(&mut self, l: &Loop) {
        let var = l.var.0 as usize;
        let extent = self.bounds(&l.extent).1.max(0);
        let parent = self.stack.last().copied();
        let top_down = parent.map_or(1.0, |at| self.loops[at].top_down * self.loops[at].extent);
        self.extents[var] = extent;
        self.depth_of[var] = self.stack.len();
        self.stack.push(self.loops.len());
        self.vars.push(l.var);
        self.loops.push(LoopContext {
            parent,
            depth: self.stack.len() - 1,
            extent: extent as f64,
            kind: number_of(l.kind),
            top_down,
            bottom_up: extent as f64,
            n_operations: [0; 3],
            touches: Vec::new(),
        });
        self.block(&l.body);
        let at = self.stack.pop().expect("invariant: the loop was entered");
        self.depth_of[var] = usize::MAX;
        if let Some(parent) = parent {
            let through = self.loops[parent].extent * self.loops[at].bottom_up;
            self.loops[parent].bottom_up = self.loops[parent].bottom_up.max(through);
        }
    }

    /// Adds the operations and accesses of a statement to every loop around it.
    fn leaf(&mut self, stmt: &Stmt, n_operations: [u32; 3]) {
        for &at in &self.stack {
            self.loops[at].n_operations.iter_mut().zip(n_operations).for_each(|(sum, n)| *sum += n);
        }
        if let Some((buffer, index)) = stmt.own_write() {
            self.access(buffer, index);
        }
        // An update reads the element that it writes, which adds no access.
        let written = stmt.own_write();
        stmt.for_each_own_read(&mut |buffer, index| {
            if written != Some((buffer, index)) {
                self.access(buffer, index);
            }
        });
    }

    fn access(&mut self, buffer: BufferId, index: &[Index]) {
        let shape = &self.program.buffer(buffer).shape;
        let mut accesses = 1.0;
        // By dimension: number of combinations of the variables that occur in its subscript, from the current
        // loop inwards.
        let mut combinations = vec![1.0f64; index.len()];
        for depth in (0..self.stack.len()).rev() {
            let at = self.stack[depth];
            let (var, extent) = (self.vars[at], self.loops[at].extent);
            accesses *= extent;
            let (mut count, mut stride) = (1.0, 0.0);
            for (d, subscript) in index.iter().enumerate() {
                let slope = slope(subscript, var);
                if slope != 0.0 {
                    combinations[d] *= extent;
                    stride += slope * self.strides[buffer.0 as usize][d] as f64;
                }
                // Both bound the number of values that the subscript takes.
                let box_ = (self.span(subscript, depth) as f64 + 1.0).min(shape[d] as f64);
                count *= combinations[d].min(box_);
            }
            let touches = &mut self.loops[at].touches;
            match touches.iter_mut().find(|touch| touch.buffer == buffer.0) {
                None => touches.push(Touch { buffer: buffer.0, count, reuse: accesses / count.max(1.0), stride }),
                Some(touch) => {
                    // Accesses by several statements are mostly to the same elements; the largest stands for
                    // all.
                    let all = (touch.reuse * touch.count).max(accesses);
                    touch.count = touch.count.max(count);
                    touch.reuse = all / touch.count.max(1.0);
                    if stride.abs() > touch.stride.abs() {
                        touch.stride = stride;
                    }
                }
            }
        }
    }

    /// Upper bound on the change of a value while the loops from `depth` inwards run and the others stand
    /// still.
    fn span(&self, e: &Index, depth: usize) -> i64 {
        let of_atom = |atom: &Atom| match atom {
            Atom::Var(var) => {
                let moves = (depth..usize::MAX).contains(&self.depth_of[var.0 as usize]);
                if moves { (self.extents[var.0 as usize] - 1).max(0) } else { 0 }
            }
            Atom::FloorDiv(x, d) => {
                let span = self.span(x, depth);
                // A span that is not a multiple of the divisor may cross one more boundary.
                span / (*d).max(1) + i64::from(span % (*d).max(1) != 0)
            }
            Atom::Mod(x, d) => self.span(x, depth).min((d - 1).max(0)),
            Atom::Min(a, b) | Atom::Max(a, b) => self.span(a, depth).max(self.span(b, depth)),
        };
        let terms = e.terms().iter().map(|(atom, c)| c.saturating_abs().saturating_mul(of_atom(atom)));
        terms.fold(0, i64::saturating_add)
    }

    /// Bounds of a value over all values of its variables.
    fn bounds(&self, e: &Index) -> (i64, i64) {
        let of_atom = |atom: &Atom| match atom {
            Atom::Var(var) => (0, (self.extents[var.0 as usize] - 1).max(0)),
            Atom::FloorDiv(x, d) => {
                let (low, high) = self.bounds(x);
                (low.div_euclid((*d).max(1)), high.div_euclid((*d).max(1)))
            }
            Atom::Mod(_, d) => (0, (d - 1).max(0)),
            Atom::Min(a, b) => {
                let (a, b) = (self.bounds(a), self.bounds(b));
                (a.0.min(b.0), a.1.min(b.1))
            }
            Atom::Max(a, b) => {
                let (a, b) = (self.bounds(a), self.bounds(b));
                (a.0.max(b.0), a.1.max(b.1))
            }
        };
        e.terms().iter().fold((e.constant(), e.constant()), |sum, (atom, c)| {
            let (low, high) = of_atom(atom);
            let (low, high) = if *c < 0 { (high, low) } else { (low, high) };
            (sum.0.saturating_add(low.saturating_mul(*c)), sum.1.saturating_add(high.saturating_mul(*c)))
        })
    }
}

/// Coefficient of a variable in an index; divided inside a division, and the larger one of two alternatives.
fn slope(e: &Index, var: LoopId) -> f64 {
    let of_atom = |atom: &Atom| match atom {
        Atom::Var(v) => f64::from(u8::from(*v == var)),
        Atom::FloorDiv(x, d) => slope(x, var) / (*d).max(1) as f64,
        Atom::Mod(x, _) => slope(x, var),
        Atom::Min(a, b) | Atom::Max(a, b) => {
            let (a, b) = (slope(a, var), slope(b, var));
            if b.abs() > a.abs() { b } else { a }
        }
    };
    e.terms().iter().map(|(atom, c)| *c as f64 * of_atom(atom)).sum()
}

/// Index of the class in which an operation is counted.
fn class_of(op: BinaryOp) -> usize {
    match op {
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Min | BinaryOp::Max | BinaryOp::Nibble => 0,
        BinaryOp::Mul => 1,
        BinaryOp::Div | BinaryOp::Pow => 2,
    }
}

fn count_operations(e: &Expr, n: &mut [u32; 3]) {
    match e {
        Expr::Const(_) | Expr::Load(..) | Expr::Gather(..) | Expr::FromIndex(_) => {}
        Expr::Unary(_, x) => {
            n[2] += 1;
            count_operations(x, n);
        }
        Expr::Cast(_, x) => count_operations(x, n),
        Expr::Binary(op, a, b) => {
            n[class_of(*op)] += 1;
            count_operations(a, n);
            count_operations(b, n);
        }
        Expr::Select(_, a, b) => {
            count_operations(a, n);
            count_operations(b, n);
        }
    }
}

#[cfg(test)]
mod tests;
