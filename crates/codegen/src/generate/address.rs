//! Integer expressions and addresses, hoisted to the outermost possible loop.

use tilewright_ir::{Atom, BufferId, Index};

use super::{Generator, Storage};
use crate::ssa::{Compare, Id, SsaOp};

/// Whether evaluating an index divides by zero.
fn faults(index: &Index) -> bool {
    index.terms().iter().any(|(atom, _)| match atom {
        Atom::Var(_) => false,
        Atom::FloorDiv(x, d) | Atom::Mod(x, d) => *d == 0 || faults(x),
        Atom::Min(a, b) | Atom::Max(a, b) => faults(a) || faults(b),
    })
}

impl Generator<'_> {
    /// Innermost level whose variable an index uses.
    pub(super) fn depth(&self, index: &Index) -> usize {
        let mut depth = 0;
        index.for_each_var(&mut |v| {
            let (_, level) =
                self.f.vars.get(&v).unwrap_or_else(|| panic!("loop variable {} is bound", self.program.loop_name(v)));
            depth = depth.max(*level);
        });
        depth
    }

    /// Splits an index into the terms computed at a level and the rest.
    fn split(&self, index: &Index, depth: usize) -> (Index, Index) {
        let (mut here, mut outer) = (Index::from(0), Index::from(index.constant()));
        for (atom, c) in index.terms() {
            let term = Index::atom(atom.clone());
            let side = if self.depth(&term) == depth { &mut here } else { &mut outer };
            *side = side.add(&term.scale(*c));
        }
        (here, outer)
    }

    /// Evaluates an index that does not depend on the lane, as `i64`.
    pub(super) fn int(&mut self, index: &Index) -> Id {
        if let Some(c) = index.as_const() {
            return self.m.int(c);
        }
        if faults(index) {
            // Not hoisted, as it must not fault if a condition guards it.
            return self.sum(index);
        }
        let depth = self.depth(index);
        if let Some(v) = self.f.levels[depth].ints.get(index) {
            return *v;
        }
        let (here, outer) = self.split(index, depth);
        let value = match (outer.terms().is_empty(), outer.constant()) {
            (true, 0) => self.hoisted(depth, |g| g.sum(&here)),
            (true, c) => {
                let here = self.int(&here);
                self.hoisted(depth, |g| g.m.add(here, g.m.int(c)))
            }
            (false, _) => {
                let (outer, here) = (self.int(&outer), self.int(&here));
                self.hoisted(depth, |g| g.m.add(outer, here))
            }
        };
        self.f.levels[depth].ints.insert(index.clone(), value);
        value
    }

    /// Generates the sum at the insertion point.
    fn sum(&mut self, index: &Index) -> Id {
        let mut sum = None;
        for (atom, c) in index.terms() {
            let v = self.atom(atom);
            let v = if *c == 1 { v } else { self.m.mul(v, self.m.int(*c)) };
            sum = Some(sum.map_or(v, |s| self.m.add(s, v)));
        }
        match (sum, index.constant()) {
            (None, c) => self.m.int(c),
            (Some(s), 0) => s,
            (Some(s), c) => self.m.add(s, self.m.int(c)),
        }
    }

    fn atom(&mut self, atom: &Atom) -> Id {
        match atom {
            Atom::Var(v) => self.f.vars[v].0,
            Atom::FloorDiv(x, d) => self.division(x, *d).0,
            Atom::Mod(x, d) => self.division(x, *d).1,
            Atom::Min(a, b) | Atom::Max(a, b) => {
                let op = if matches!(atom, Atom::Min(..)) { SsaOp::SignedMin } else { SsaOp::SignedMax };
                let (a, b) = (self.int(a), self.int(b));
                self.m.binary(op, a, b)
            }
        }
    }

    /// Quotient, rounded towards minus infinity, and remainder.
    fn division(&mut self, x: &Index, d: i64) -> (Id, Id) {
        let value = self.int(x);
        if d > 0 && d.count_ones() == 1 {
            let shift = self.m.int(i64::from(d.trailing_zeros()));
            return (
                self.m.binary(SsaOp::ShiftSigned, value, shift),
                self.m.binary(SsaOp::And, value, self.m.int(d - 1)),
            );
        }
        if d > 0 && self.f.ranges.lower(x).is_some_and(|l| l >= 0) {
            let d = self.m.int(d);
            return (self.m.binary(SsaOp::UnsignedDiv, value, d), self.m.binary(SsaOp::UnsignedRem, value, d));
        }
        // Division by zero has the machine's behaviour.
        let divisor = if d == 0 { self.m.opaque(self.m.int(0)) } else { self.m.int(d) };
        let quotient = self.m.binary(SsaOp::SignedDiv, value, divisor);
        let remainder = self.m.binary(SsaOp::SignedRem, value, divisor);
        let zero = self.m.int(0);
        // Truncation rounded up if the signs of the remainder and the divisor differ.
        let up = if d > 0 {
            self.m.compare(Compare::Less, remainder, zero)
        } else {
            self.m.compare(Compare::Less, zero, remainder)
        };
        let less = self.m.sub(quotient, self.m.int(1));
        let more = self.m.add(remainder, divisor);
        (self.m.select(up, less, quotient), self.m.select(up, more, remainder))
    }

    /// Address of an element whose position does not depend on the lane.
    pub(super) fn pointer(&mut self, buffer: BufferId, flat: &Index) -> Id {
        if self.f.matrices.all.contains(&buffer) {
            return self.swizzled_pointer(buffer, flat);
        }
        self.plain_pointer(buffer, flat)
    }

    /// Pointer to an element whose address is not swizzled.
    pub(super) fn plain_pointer(&mut self, buffer: BufferId, flat: &Index) -> Id {
        let varying = flat.offset(-flat.constant());
        let base = self.partial_pointer(buffer, &varying);
        let base = match self.f.seen.fresh.as_ref().map(|fresh| fresh.get(&base)) {
            None => base,
            Some(Some(fresh)) => *fresh,
            Some(None) => {
                let fresh = self.m.opaque(base);
                self.f.seen.fresh.get_or_insert_default().insert(base, fresh);
                fresh
            }
        };
        match flat.constant() {
            0 => base,
            c => self.m.element(self.element_type(buffer), base, self.m.int(c)),
        }
    }

    /// Address of an element at a position without a constant summand.
    fn partial_pointer(&mut self, buffer: BufferId, varying: &Index) -> Id {
        if varying.terms().is_empty() {
            return match &self.f.storage[&buffer] {
                Storage::Pointer(p) => *p,
                Storage::Chunks(_) => panic!("{} is held in registers", self.program.buffer(buffer).name),
            };
        }
        let element = self.element_type(buffer);
        if faults(varying) {
            let base = self.partial_pointer(buffer, &Index::from(0));
            let offset = self.sum(varying);
            return self.m.element(element, base, offset);
        }
        let depth = self.depth(varying);
        let key = (buffer, varying.clone());
        if let Some(p) = self.f.levels[depth].pointers.get(&key) {
            return *p;
        }
        let (here, outer) = self.split(varying, depth);
        let base = self.partial_pointer(buffer, &outer);
        let pointer = match (self.f.levels[depth].entered, here.terms()) {
            (Some((preheader, var)), [(Atom::Var(v), step)]) if *v == var => {
                let phi = self.m.phi(self.f.levels[depth].header, self.m.type_of(base));
                self.m.add_incoming(phi, base, preheader);
                self.f.levels[depth].steps.push((phi, element, *step));
                phi
            }
            _ => {
                let offset = self.int(&here);
                self.hoisted(depth, |g| g.m.element(element, base, offset))
            }
        };
        self.f.levels[depth].pointers.insert(key, pointer);
        pointer
    }

    /// `a == b` or `a < b` for integers or vectors of integers.
    pub(super) fn compare(&self, equal: bool, a: Id, b: Id) -> Id {
        self.m.compare(if equal { Compare::Equal } else { Compare::Less }, a, b)
    }
}
