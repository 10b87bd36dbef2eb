//! Staging, which creates a packed copy of the part of a buffer that a loop's iteration reads.

use super::layout::{place_of, require_layout, shape_of};
use super::region::{AccessKind, Region, reads, redirect_reads, region, subtract_inside, writes};
use super::tree::{
    at_start, buffer_id, edit_loops, nest, new_buffer, new_loop, require_fits, require_open, simplify_block,
    single_loop,
};
use super::{Illegal, LayoutAxis};
use crate::dtype::DType;
use crate::expr::{Cond, Expr, Rewrite};
use crate::index::{Atom, Index, Ranges};
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt};

/// Options of a packed copy.
pub struct PackedCopy<'a> {
    /// Dimensions of the copy, outermost first.
    pub layout: &'a [LayoutAxis],
    /// Element type of the copy; `None` keeps the buffer's.
    pub dtype: Option<DType>,
    /// Whether the copy is in shared memory of a GPU block.
    pub shared: bool,
}

/// Applies [`Step::Stage`](super::Step::Stage).
pub fn stage(
    program: &mut Program,
    buffer: &str,
    at: Option<&str>,
    name: &str,
    PackedCopy { layout, dtype, shared }: PackedCopy,
) -> Result<(), Illegal> {
    let source = buffer_id(program, buffer)?;
    require_layout(program, source, layout)?;
    let loops = (0..layout.len()).map(|i| new_loop(program, &format!("{name}.{i}"))).collect::<Result<Vec<_>, _>>()?;
    let ahead = at.is_none() && program.buffer(source).role == Role::ConstInput;
    let own = program.buffer(source).dtype;
    let dtype = dtype.unwrap_or(own);
    // No arithmetic is in 16-bit floats or 8-bit integers, so copies in wider types give the same results.
    let is_longer = match own {
        DType::U8 | DType::I8 | DType::I7 => matches!(dtype, DType::I16 | DType::I32),
        own => own.is_half() && dtype == own.arithmetic(),
    };
    let cast = (dtype != own && !is_longer).then_some(dtype);
    let (scope, role) = match (ahead, shared) {
        (true, _) => (Scope::Global, Role::Kept),
        (false, true) => (Scope::Shared, Role::Temporary),
        (false, false) => (Scope::Local, Role::Temporary),
    };
    let copy = new_buffer(program, name, dtype, scope, role)?;
    let mut shape = Vec::new();
    let is_input = matches!(program.buffer(source).role, Role::Input | Role::ConstInput);
    let is_filled = is_input || is_filled(program, source);
    let serve = Serve { source, is_filled, at, copy, cast, layout, loops: &loops };
    match at {
        Some(at) => {
            let var = single_loop(program, at)?;
            require_open(program, var)?;
            edit_loops(program, var, &mut |names, mut l, ranges| {
                let mut ranges = ranges.clone();
                ranges.push(l.var, l.extent.clone());
                let served = serve.serve(names, std::mem::take(&mut l.body), &ranges)?;
                shape = served.shape;
                l.body = before_first_read(served.body, copy, served.fill);
                Ok(vec![Stmt::For(l)])
            })?;
        }
        None => {
            let block = std::mem::take(&mut program.body);
            let served = serve.serve(program, block, &program.ranges())?;
            shape = served.shape;
            if ahead {
                program.prepare.extend(served.fill);
                program.body = served.body;
            } else {
                program.body = before_first_read(served.body, copy, served.fill);
            }
        }
    }
    program.buffers[copy.0 as usize].shape = shape;
    require_fits(program, copy)
}

/// Inserts the allocation of the copy and the statements that fill it before its first read.
fn before_first_read(mut block: Vec<Stmt>, copy: BufferId, fill: Vec<Stmt>) -> Vec<Stmt> {
    let first = block.iter().position(|s| reads(std::slice::from_ref(s), copy)).unwrap_or(0);
    block.splice(first..first, [Stmt::Alloc(copy)].into_iter().chain(fill));
    block
}

struct Serve<'a> {
    source: BufferId,
    /// Whether the whole buffer is written before it is read.
    is_filled: bool,
    at: Option<&'a str>,
    copy: BufferId,
    /// Type to which each read is cast, which is the copy's type.
    cast: Option<DType>,
    layout: &'a [LayoutAxis],
    loops: &'a [LoopId],
}

/// Block that reads from the copy.
struct Served {
    /// Nest that fills the copy.
    fill: Vec<Stmt>,
    body: Vec<Stmt>,
    /// Shape of the copy.
    shape: Vec<i64>,
}

impl Serve<'_> {
    /// Makes a block read from the copy.
    fn serve(&self, names: &Program, block: Vec<Stmt>, outside: &Ranges) -> Result<Served, Illegal> {
        let name = &names.buffer(self.source).name;
        let fail = |why: String| Illegal::Buffer { buffer: name.clone(), why };
        let place = self.at.map_or("in `run`".to_owned(), |at| format!("in loop `{at}`"));
        // A buffer written completely before the first read does not change after it is copied.
        let is_read = |s: &Stmt| reads(std::slice::from_ref(s), self.source);
        let first = self.at.map_or(block.iter().position(is_read), |_| None).unwrap_or(0);
        if writes(&block[first..], self.source) {
            return Err(fail(format!("it is written {place}, so a copy would go stale")));
        }
        if !self.is_filled {
            return Err(fail("parts of it may be unwritten, and a copy would read them".to_owned()));
        }
        let block = match self.cast {
            None => block,
            Some(dtype) => without_casts(block, self.source, dtype).ok_or_else(|| {
                fail(format!("a copy of type {} would round what is read {place} without a cast", dtype.name()))
            })?,
        };
        let region = region(names, &block, self.source, AccessKind::Read, outside, &place).map_err(fail)?;
        let fill = simplify_block(self.fill(&region), &mut outside.clone());
        let body = redirect_reads(block, self.source, self.copy, &mut outside.clone(), &|index, ranges| {
            let local: Vec<Index> =
                index.iter().zip(&region.lower).map(|(e, lo)| ranges.simplify(&e.sub(lo))).collect();
            place_of(self.layout, &local, ranges)
        });
        let shape = shape_of(self.layout, &region.most);
        Ok(Served { fill, body, shape })
    }

    fn fill(&self, region: &Region) -> Vec<Stmt> {
        let rank = region.lower.len();
        let mut position = vec![Index::from(0); rank];
        let mut extents = Vec::new();
        for (axis, &var) in self.layout.iter().zip(self.loops) {
            let (d, extent, step) = match *axis {
                LayoutAxis::Whole(d) => (d, region.extent[d].clone(), 1),
                LayoutAxis::Outer(d, t) => (d, region.extent[d].offset(t - 1).floor_div(t), t),
                LayoutAxis::Inner(d, t) => {
                    let rest = subtract_inside(&region.extent[d], &position[d]);
                    let divides = region.extent[d].residue(t) == Some(0);
                    (d, if divides { t.into() } else { Index::from(t).smaller(&rest) }, 1)
                }
            };
            position[d] = position[d].add(&Index::from(var).scale(step));
            extents.push(extent);
        }
        let from = position.iter().zip(&region.lower).map(|(p, lo)| p.add(lo)).collect();
        let store = Stmt::Store {
            buffer: self.copy,
            index: self.loops.iter().map(|&v| v.into()).collect(),
            value: Expr::Load(self.source, from),
        };
        nest(self.loops.iter().zip(extents).map(|(&v, e)| (v, e, LoopKind::Serial)), vec![store])
    }
}

/// Removes the casts to a type from the loads of a buffer; `None` if a load has no such cast.
fn without_casts(block: Vec<Stmt>, buffer: BufferId, dtype: DType) -> Option<Vec<Stmt>> {
    let mut uncast = Uncast { buffer, dtype, n_casts: 0 };
    let mut n_loads = 0;
    let block = block.into_iter().map(|mut s| {
        for inner in s.blocks_mut() {
            *inner = without_casts(std::mem::take(inner), buffer, dtype)?;
        }
        s.for_each_own_read(&mut |b, _| n_loads += usize::from(b == buffer));
        Some(match s {
            Stmt::Store { buffer, index, value } => Stmt::Store { buffer, index, value: uncast.expr(&value) },
            Stmt::Update { buffer, index, op, value, first } => {
                Stmt::Update { buffer, index, op, value: uncast.expr(&value), first }
            }
            s => s,
        })
    });
    let block = block.collect::<Option<_>>()?;
    (uncast.n_casts == n_loads).then_some(block)
}

/// Rewriter that removes the casts of a buffer's loads.
struct Uncast {
    buffer: BufferId,
    dtype: DType,
    n_casts: usize,
}

impl Rewrite for Uncast {
    fn expr(&mut self, e: &Expr) -> Expr {
        match e {
            Expr::Cast(dtype, x) if *dtype == self.dtype && matches!(**x, Expr::Load(b, _) if b == self.buffer) => {
                self.n_casts += 1;
                (**x).clone()
            }
            e => e.map_parts(self),
        }
    }
}

/// Whether an unconditional statement proves that all elements of a buffer are written.
fn is_filled(program: &Program, buffer: BufferId) -> bool {
    fn search(block: &[Stmt], buffer: BufferId, shape: &[i64], ranges: &mut Ranges) -> bool {
        block.iter().any(|s| match s {
            // A loop that may be empty proves nothing.
            Stmt::For(l) if ranges.lower(&l.extent).is_none_or(|least| least < 1) => false,
            Stmt::For(l) => {
                ranges.push(l.var, l.extent.clone());
                let found = search(&l.body, buffer, shape, ranges);
                ranges.pop();
                found
            }
            Stmt::If { cond: Cond::True, then, .. } => search(then, buffer, shape, ranges),
            Stmt::If { .. } => false,
            _ => s.own_write().is_some_and(|(b, index)| b == buffer && covers(index, shape, ranges)),
        })
    }
    let shape = &program.buffer(buffer).shape;
    program.parts().into_iter().any(|b| search(b, buffer, shape, &mut program.ranges()))
}

/// Whether subscripts take all values: loops of constant extents, each in one subscript, form the digits of a
/// number. The last iteration of other loops may cover fewer elements, as their first iteration writes all.
fn covers(index: &[Index], shape: &[i64], ranges: &Ranges) -> bool {
    let mut seen: Vec<LoopId> = Vec::new();
    index.iter().zip(shape).all(|(e, &n)| {
        let mut digits = Vec::new();
        for (atom, c) in e.terms() {
            let Atom::Var(v) = atom else { return false };
            let others = ranges.loops().iter().map(|(l, _)| *l).filter(|l| !index.iter().any(|i| i.uses(*l)));
            let at_first = |extent: &Index| ranges.simplify(&at_start(extent, others)).as_const();
            let known = ranges.loops().iter().find(|(l, _)| l == v).and_then(|(_, e)| at_first(e));
            let (Some(extent), false) = (known, seen.contains(v)) else { return false };
            seen.push(*v);
            digits.push((*c, extent));
        }
        digits.sort_unstable();
        let values = digits.iter().try_fold(1i64, |n, &(c, extent)| if c == n { n.checked_mul(extent) } else { None });
        e.constant() == 0 && values == Some(n)
    })
}
