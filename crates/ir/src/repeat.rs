//! Batching, which repeats a program for each element of an additional outermost dimension of dynamic extent.

use crate::expr::{Cond, Expr, Rewrite, Subscript};
use crate::index::Index;
use crate::op::SizeRange;
use crate::program::{BufferId, Loop, LoopKind, OpenSize, Program, Role, Stmt};

/// Adds a batch dimension: repeats the body of a program for each element of a new outermost dimension of
/// some of its arguments, such as the images of a batch. The extent is an open size, whose value is given for
/// each run.
///
/// `along` says for each argument, in order, whether it has the dimension; other arguments are shared by all
/// repetitions. The preparation of the program runs once.
///
/// # Panics
/// If `along` does not match the arguments, or if the program has a `finish` part. Callers must not repeat a
/// program that converts the layout of an output, or one with an output that all repetitions would write.
pub fn repeat(mut program: Program, name: &str, range: SizeRange, along: &[bool]) -> Program {
    let arguments: Vec<BufferId> = program.arguments().map(|(id, _)| id).collect();
    assert_eq!(arguments.len(), along.len(), "invariant: an answer for each argument");
    assert!(program.finish.is_empty(), "invariant: outputs are written by the body");
    let is_along = |id: &BufferId| arguments.iter().zip(along).any(|(own, along)| own == id && *along);
    let outputs = program.arguments().filter(|(_, buffer)| buffer.role == Role::Output);
    assert!(outputs.map(|(id, _)| id).all(|id| is_along(&id)), "invariant: each repetition has its own outputs");
    let new_loop = |program: &mut Program, name: &str| {
        let taken = |name: &String| program.find_loop(name).is_some();
        let names = (0..).map(|n| if n == 0 { name.to_owned() } else { format!("{name}{n}") });
        let free = names.into_iter().find(|name| !taken(name)).expect("there is always another number");
        program.add_loop(free)
    };
    let (steps, var) = (new_loop(&mut program, &format!("{name}.steps")), new_loop(&mut program, name));
    let n_values = (range.most - range.least) / range.step + 1;
    let size = OpenSize { name: name.to_owned(), var: steps, least: range.least, step: range.step, n_values };
    arguments.iter().filter(|id| is_along(id)).for_each(|id| {
        program.buffers[id.0 as usize].shape.insert(0, range.most);
    });
    let mut moved = Moved { is_along: &is_along, ahead: var.into() };
    let body = std::mem::take(&mut program.body).into_iter().map(|stmt| moved.stmt(stmt)).collect();
    program.body = vec![Stmt::For(Loop { var, extent: size.index(), kind: LoopKind::Serial, body })];
    program.sizes.push(size);
    program
}

/// Rewriter that prepends a subscript to the accesses of some buffers.
struct Moved<'a> {
    is_along: &'a dyn Fn(&BufferId) -> bool,
    ahead: Index,
}

impl Moved<'_> {
    fn place(&self, buffer: BufferId, index: Vec<Index>) -> Vec<Index> {
        let ahead = Some(self.ahead.clone()).filter(|_| (self.is_along)(&buffer));
        ahead.into_iter().chain(index).collect()
    }

    fn block(&mut self, block: Vec<Stmt>) -> Vec<Stmt> {
        block.into_iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt(&mut self, stmt: Stmt) -> Stmt {
        match stmt {
            Stmt::For(l) => Stmt::For(Loop { body: self.block(l.body), ..l }),
            Stmt::If { cond, then, otherwise } => {
                Stmt::If { cond: self.cond(&cond), then: self.block(then), otherwise: self.block(otherwise) }
            }
            Stmt::Store { buffer, index, value } => {
                Stmt::Store { buffer, index: self.place(buffer, index), value: self.expr(&value) }
            }
            Stmt::Update { buffer, index, op, value, first } => {
                let first: Cond = self.cond(&first);
                Stmt::Update { buffer, index: self.place(buffer, index), op, value: self.expr(&value), first }
            }
            Stmt::Prefetch { buffer, index, for_write } => {
                Stmt::Prefetch { buffer, index: self.place(buffer, index), for_write }
            }
            stmt @ (Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_)) => stmt,
        }
    }
}

impl Rewrite for Moved<'_> {
    fn expr(&mut self, expr: &Expr) -> Expr {
        match expr {
            Expr::Load(buffer, index) => Expr::Load(*buffer, self.place(*buffer, index.clone())),
            Expr::Gather(buffer, subscripts) => {
                let ahead = Some(Subscript::Index(self.ahead.clone())).filter(|_| (self.is_along)(buffer));
                let own = subscripts.iter().map(|subscript| match subscript {
                    Subscript::Index(index) => Subscript::Index(index.clone()),
                    Subscript::Value(value) => Subscript::Value(Box::new(self.expr(value))),
                });
                let own: Vec<Subscript> = own.collect();
                Expr::Gather(*buffer, ahead.into_iter().chain(own).collect())
            }
            other => other.map_parts(self),
        }
    }
}
