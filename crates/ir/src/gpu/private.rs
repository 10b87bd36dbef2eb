//! Privatization, which reduces buffers allocated once for all threads of a block to the elements of one
//! thread.
//!
//! An accumulator that lives across a loop with barriers is allocated outside of the thread loops, with
//! subscripts such as `[ty, tx, i, j]` or `[8*ty + i, tx + 16*j]`. Each thread accesses only the elements
//! with its thread index as a digit of a subscript; dropping that digit leaves the thread's own buffer.

use std::collections::BTreeSet;

use crate::gpu::item::{Item, each_region, relocate};
use crate::gpu::map_error::MapError;
use crate::index::{Atom, Index, Ranges, gcd};
use crate::program::{BufferId, LoopId, LoopKind, Program, Scope, Stmt};
use crate::text::index_to_string;

/// Gives each thread its slice of every buffer that is allocated outside of the thread loops that use it.
///
/// `outside` holds the loops over blocks and threads.
pub(super) fn separate(
    tables: &mut Program,
    items: &mut [Item],
    threads: [Option<LoopId>; 3],
    outside: &Ranges,
) -> Result<(), MapError> {
    let mut allocated = Vec::new();
    allocations(items, &mut allocated);
    for (buffer, at) in allocated {
        for (axis, var) in threads.iter().enumerate() {
            if let Some(var) = var
                && !at[axis]
            {
                let uses = uses(items, buffer, axis, outside);
                if uses.iter().any(|u| u.is_spread) {
                    slice(tables, items, buffer, *var, axis, &uses)?;
                }
            }
        }
    }
    Ok(())
}

fn allocations(items: &[Item], out: &mut Vec<(BufferId, [bool; 3])>) {
    for item in items {
        match item {
            Item::Alloc(b, axes) if !out.iter().any(|(known, _)| known == b) => out.push((*b, *axes)),
            Item::Loop { body, .. } => allocations(body, out),
            Item::If { then, otherwise, .. } => {
                allocations(then, out);
                allocations(otherwise, out);
            }
            Item::Alloc(..) | Item::Region(_) | Item::Barrier | Item::Wait(_) => {}
        }
    }
}

/// Access to a private buffer.
#[derive(Clone)]
struct PrivateAccess {
    index: Vec<Index>,
    ranges: Ranges,
    /// Whether the region is distributed over the axis, rather than run by its first thread.
    is_spread: bool,
}

fn uses(items: &mut [Item], buffer: BufferId, axis: usize, outside: &Ranges) -> Vec<PrivateAccess> {
    fn gather(block: &[Stmt], buffer: BufferId, is_spread: bool, ranges: &mut Ranges, out: &mut Vec<PrivateAccess>) {
        for stmt in block {
            let mut visit = |b: BufferId, index: &[Index]| {
                let is_known = |u: &PrivateAccess| {
                    u.index == index && u.is_spread == is_spread && u.ranges.loops() == ranges.loops()
                };
                if b == buffer && !out.iter().any(is_known) {
                    out.push(PrivateAccess { index: index.to_vec(), ranges: ranges.clone(), is_spread });
                }
            };
            stmt.for_each_own_read(&mut visit);
            if let Some((b, index)) = stmt.own_write() {
                visit(b, index);
            }
            stmt.each_block(ranges, |block, ranges| gather(block, buffer, is_spread, ranges, out));
        }
    }
    let mut out = Vec::new();
    each_region(items, &mut |region, loops| {
        let mut ranges = outside.clone();
        loops.loops().iter().for_each(|(var, extent)| ranges.push(*var, extent.clone()));
        gather(&region.stmts, buffer, region.axes[axis], &mut ranges, &mut out);
    });
    out
}

/// Digit of a subscript `high + weight·thread + low`, where `low < weight` and all terms of `high` are
/// multiples of `base`.
#[derive(Clone)]
struct Digit {
    /// Thread index, or a digit of it.
    thread: Atom,
    weight: i64,
    /// Divisor of `high`; `None` if there is no `high`.
    base: Option<i64>,
}

impl Digit {
    /// Finds the thread's digit in a subscript, the same in all uses. `all` holds all digits of the thread
    /// index.
    fn of(thread: &Atom, all: &[Atom], dimension: usize, uses: &[PrivateAccess]) -> Option<Digit> {
        let weight_in = |index: &Index| index.terms().iter().find(|(atom, _)| atom == thread).map_or(0, |(_, c)| *c);
        let mut weights = uses.iter().filter(|u| u.is_spread).map(|u| weight_in(&u.index[dimension]));
        let weight = weights.next().filter(|w| *w > 0)?;
        if !weights.all(|w| w == weight) {
            return None;
        }
        let others = |u: &PrivateAccess| {
            let terms = u.index[dimension].terms().to_vec();
            terms.into_iter().filter(|(atom, _)| atom != thread).collect::<Vec<_>>()
        };
        let high = uses.iter().flat_map(others).map(|(_, c)| c.abs()).filter(|c| *c >= weight);
        let base = high.reduce(gcd);
        let digit = Digit { thread: thread.clone(), weight, base };
        uses.iter().all(|u| digit.fits(&u.index[dimension], u, all)).then_some(digit)
    }

    fn fits(&self, subscript: &Index, of: &PrivateAccess, all: &[Atom]) -> bool {
        let (_, low) = self.parts(subscript);
        let within = |e: &Index, most: i64| {
            of.ranges.lower(e).is_some_and(|least| least >= 0) && of.ranges.upper(e).is_some_and(|u| u < most)
        };
        let mut is_used_elsewhere = false;
        Index::atom(self.thread.clone()).for_each_var(&mut |var| {
            is_used_elsewhere |= subscript.terms().iter().any(|(atom, _)| !all.contains(atom) && atom.uses(var));
        });
        let thread = Index::atom(self.thread.clone()).scale(self.weight);
        let below_base = self.base.is_none_or(|base| {
            // A region that the first thread runs accesses that thread's digit.
            within(&if of.is_spread { low.add(&thread) } else { low.clone() }, base)
        });
        !is_used_elsewhere && within(&low, self.weight) && below_base
    }

    /// Splits a subscript into `high` divided by the base, and `low`.
    fn parts(&self, subscript: &Index) -> (Index, Index) {
        let constant = subscript.constant();
        let base = self.base.unwrap_or(i64::MAX);
        let mut high = Index::from(if self.base.is_some() { constant.div_euclid(base) } else { 0 });
        let mut low = Index::from(if self.base.is_some() { constant.rem_euclid(base) } else { constant });
        for (atom, c) in subscript.terms().iter().filter(|(atom, _)| *atom != self.thread) {
            let term = Index::atom(atom.clone());
            if c.abs() >= self.weight {
                high = high.add(&term.scale(c / base));
            } else {
                low = low.add(&term.scale(*c));
            }
        }
        (high, low)
    }

    /// Removes the digit from a subscript.
    fn without(&self, subscript: &Index) -> Index {
        let (high, low) = self.parts(subscript);
        high.scale(self.weight).add(&low)
    }

    /// Extent of the dimension without the digit.
    fn extent(&self, extent: i64) -> i64 {
        match self.base {
            Some(base) => (extent + base - 1) / base * self.weight,
            None => self.weight,
        }
    }
}

fn slice(
    tables: &mut Program,
    items: &mut [Item],
    id: BufferId,
    var: LoopId,
    axis: usize,
    uses: &[PrivateAccess],
) -> Result<(), MapError> {
    let buffer = tables.buffer(id);
    let Some(digits) = digits(var, buffer.shape.len(), uses) else {
        let text = |u: &PrivateAccess| {
            let subscripts: Vec<String> = u.index.iter().map(|i| index_to_string(tables, i)).collect();
            format!("[{}]", subscripts.join(", "))
        };
        let mut subscripts: Vec<String> = uses.iter().map(text).collect();
        subscripts.dedup();
        // Two subscripts suffice for the message.
        if subscripts.len() > 2 {
            subscripts.drain(1..subscripts.len() - 1);
        }
        return Err(MapError::NotSeparable {
            buffer: buffer.name.clone(),
            scope: Scope::ALL.iter().find(|(scope, _)| *scope == buffer.scope).expect("every scope is listed").1,
            subscripts: subscripts.join(" and "),
            axis: LoopKind::Thread(axis as u8).name(),
        });
    };
    digits.into_iter().for_each(|(dimension, digit)| without(tables, items, id, dimension, &digit));
    Ok(())
}

/// Finds the digits of a thread index among the subscripts, each in a single dimension: the index itself, or
/// quotients and remainders that together distinguish all threads. The last dimension comes first; if a
/// dimension has several digits, each applies to the subscript that remains after removing the previous ones.
fn digits(var: LoopId, rank: usize, uses: &[PrivateAccess]) -> Option<Vec<(usize, Digit)>> {
    let whole = [Atom::Var(var)];
    let find = |atom: &Atom, all: &[Atom], uses: &[PrivateAccess]| {
        (0..rank).find_map(|d| Some((d, Digit::of(atom, all, d, uses)?)))
    };
    if let Some(digit) = find(&whole[0], &whole, uses) {
        return Some(vec![digit]);
    }
    let spread = || uses.iter().filter(|u| u.is_spread);
    let mut atoms: Vec<Atom> = Vec::new();
    for (atom, _) in spread().flat_map(|u| &u.index).flat_map(|subscript| subscript.terms()) {
        if atom.uses(var) && !atoms.contains(atom) {
            atoms.push(atom.clone());
        }
    }
    if !tell_apart(&atoms, var, spread().next()?) {
        return None;
    }
    let mut uses = uses.to_vec();
    let mut digits = Vec::new();
    for atom in &atoms {
        let (dimension, digit) = find(atom, &atoms, &uses)?;
        for place in uses.iter_mut().map(|u| &mut u.index[dimension]) {
            *place = digit.without(place);
        }
        digits.push((dimension, digit));
    }
    digits.sort_by_key(|(dimension, _)| std::cmp::Reverse(*dimension));
    Some(digits)
}

/// Whether each value of a variable gives these atoms a distinct combination of values.
fn tell_apart(atoms: &[Atom], var: LoopId, of: &PrivateAccess) -> bool {
    let Some(last) = of.ranges.upper(&var.into()) else { return false };
    let values = |n: i64| -> Option<Vec<i64>> {
        atoms.iter().map(|atom| Index::atom(atom.clone()).substitute(var, &n.into()).as_const()).collect()
    };
    let mut seen = BTreeSet::new();
    (0..=last).all(|n| values(n).is_some_and(|values| seen.insert(values)))
}

/// Removes a digit from every use of a buffer.
fn without(tables: &mut Program, items: &mut [Item], id: BufferId, dimension: usize, digit: &Digit) {
    let buffer = tables.buffer(id);
    let extent = digit.extent(buffer.shape[dimension]);
    // A dimension that consists of the digit alone is dropped, unless it is the only one.
    let drops = digit.base.is_none() && digit.weight == 1 && buffer.shape.len() > 1;
    let shape = &mut tables.buffers[id.0 as usize].shape;
    if drops {
        shape.remove(dimension);
    } else {
        shape[dimension] = extent;
    }
    let mut place = |index: &[Index]| {
        let mut index = index.to_vec();
        if drops {
            index.remove(dimension);
        } else {
            index[dimension] = digit.without(&index[dimension]);
        }
        index
    };
    each_region(items, &mut |region, _| {
        let stmts = std::mem::take(&mut region.stmts);
        region.stmts = stmts.into_iter().map(|s| relocate(s, id, id, &mut place)).collect();
    });
}
