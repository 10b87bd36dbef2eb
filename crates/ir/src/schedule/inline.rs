//! Inlining a stage into its readers.

use super::Illegal;
use super::compute_at::{TakenStage, take_nest};
use super::region::reads;
use super::tree::{buffer_id, simplify_block, substituted};
use crate::dependence::writes_are_disjoint;
use crate::dtype::DType;
use crate::expr::{Expr, TreePart};
use crate::index::{Atom, Index, Ranges};
use crate::program::{BufferId, LoopId, Program, Stmt};

/// Applies [`Step::Inline`](super::Step::Inline).
pub fn inline(program: &mut Program, buffer: &str) -> Result<(), Illegal> {
    let id = buffer_id(program, buffer)?;
    let fail = |why: &str| Illegal::Buffer { buffer: buffer.to_owned(), why: why.to_owned() };
    let TakenStage { loops, leaf } = take_nest(program, id)?;
    let Stmt::Store { value, index, .. } = leaf else {
        return Err(fail("it is a reduction, which would be repeated for every read"));
    };
    if loops.iter().any(|(v, _)| !index.iter().any(|i| i.uses(*v)) && value.uses(*v)) {
        return Err(fail("its elements are written several times"));
    }
    let mut own = program.ranges();
    loops.iter().for_each(|(v, extent)| own.push(*v, extent.clone()));
    if loops.iter().any(|(v, _)| index.iter().any(|i| i.uses(*v)) && !writes_are_disjoint(&index, *v, &own)) {
        return Err(fail("several iterations of its loops write one element"));
    }
    let dtype = program.buffer(id).dtype;
    let is_of_one_type = dtype.arithmetic() == dtype && program.buffers.iter().all(|b| b.dtype == dtype);
    let is_element = !dtype.is_float() && is_element(program, &value, dtype);
    let as_element = if is_element { value.clone() } else { Expr::cast(dtype, value.clone()) };
    // If all types are the same, the value equals the stored element.
    let value_for = |s: &Stmt| {
        let mut is_plain = is_of_one_type;
        s.own_nodes().for_each(|node| {
            node.walk(&mut |node| is_plain &= !matches!(node, TreePart::Expr(Expr::Cast(..) | Expr::Gather(..))));
        });
        if is_plain { value.clone() } else { as_element.clone() }
    };
    let stored = StageAssignment { buffer: id, loops: &loops, index: &index };
    let (mut unlike, outside) = (false, program.ranges());
    let mut inlined = |s: Stmt| {
        let alone = vec![s];
        if !reads(&alone, id) {
            return alone;
        }
        let ranges = &mut outside.clone();
        simplify_block(stored.replace_reads(alone, ranges, &value_for, &mut unlike), ranges)
    };
    program.body = std::mem::take(&mut program.body).into_iter().flat_map(&mut inlined).collect();
    match unlike {
        false => Ok(()),
        true => Err(fail("it is read at subscripts of another form than it is written at")),
    }
}

/// Whether a value is already an integer of a type, or zero.
fn is_element(program: &Program, value: &Expr, dtype: DType) -> bool {
    match value {
        Expr::Load(buffer, _) => program.buffer(*buffer).dtype == dtype,
        Expr::Const(x) => x.to_bits() == 0,
        Expr::Select(_, a, b) => is_element(program, a, dtype) && is_element(program, b, dtype),
        _ => false,
    }
}

/// Assignment of a stage: the element and its value.
struct StageAssignment<'a> {
    buffer: BufferId,
    loops: &'a [(LoopId, Index)],
    index: &'a [Index],
}

impl StageAssignment<'_> {
    /// Replaces reads in a block by values; `unlike` is set if the iteration that writes an element read is
    /// not found.
    fn replace_reads(
        &self,
        block: Vec<Stmt>,
        ranges: &mut Ranges,
        value_for: &dyn Fn(&Stmt) -> Expr,
        unlike: &mut bool,
    ) -> Vec<Stmt> {
        let each = |mut s: Stmt| {
            s.each_block_mut(ranges, |inner, ranges| {
                *inner = self.replace_reads(std::mem::take(inner), ranges, value_for, unlike);
            });
            let value = value_for(&s);
            s.map_own_loads(&mut |b, index| {
                if b != self.buffer {
                    return None;
                }
                let by = self.iteration(index, ranges);
                *unlike |= by.is_none();
                let mut value = value.clone();
                value.for_each_index_mut(&mut |i| *i = substituted(i, &by.clone().unwrap_or_default()));
                Some(value)
            })
        };
        block.into_iter().map(each).collect()
    }

    /// Iteration that writes an element, as values of the loops.
    fn iteration(&self, read: &[Index], ranges: &Ranges) -> Option<Vec<(LoopId, Index)>> {
        let mut by: Vec<(LoopId, Index)> = Vec::new();
        self.index.iter().zip(read).for_each(|(written, read)| self.equate(written, read, &mut by));
        let is_plain = |i: &Index| matches!((i.terms(), i.constant()), ([(Atom::Var(_), 1)], 0));
        if self.index.iter().all(is_plain) {
            // Subscripts within the buffer are iterations of its loops.
            return Some(by);
        }
        for (v, extent) in self.loops {
            let is_within = |at: &Index| {
                ranges.lower(at).is_some_and(|l| l >= 0) && ranges.upper(&at.sub(extent)).is_some_and(|u| u < 0)
            };
            match by.iter().find(|(known, _)| known == v) {
                Some((_, at)) if is_within(at) => {}
                None if extent.as_const() == Some(1) => by.push((*v, 0.into())),
                _ => return None,
            }
        }
        let is_it = |(written, read): (&Index, &Index)| ranges.simplify(&substituted(written, &by)) == *read;
        self.index.iter().zip(read).all(is_it).then_some(by)
    }

    /// Solves for the loop variables of `written` that make it equal to `read`, term by term.
    fn equate(&self, written: &Index, read: &Index, by: &mut Vec<(LoopId, Index)>) {
        let is_known = |by: &[(LoopId, Index)], v: LoopId| by.iter().any(|(known, _)| *known == v);
        let is_taken = |by: &[(LoopId, Index)], at: &Index| by.iter().any(|(_, taken)| taken == at);
        if let ([(Atom::Var(v), 1)], 0) = (written.terms(), written.constant()) {
            if !is_known(by, *v) {
                by.push((*v, read.clone()));
            }
            return;
        }
        for (atom, c) in written.terms() {
            for (other, _) in read.terms().iter().filter(|(_, other)| other == c) {
                let at = Index::atom(other.clone());
                match (atom, other) {
                    (Atom::Var(v), _) if !is_known(by, *v) && !is_taken(by, &at) => by.push((*v, at)),
                    (Atom::FloorDiv(x, d), Atom::FloorDiv(y, e)) | (Atom::Mod(x, d), Atom::Mod(y, e)) if d == e => {
                        self.equate(x, y, by);
                    }
                    _ => {}
                }
            }
        }
    }
}
