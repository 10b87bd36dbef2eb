//! Stores of fragments of a row, which adjacent threads exchange so that each stores 16 bytes.
//!
//! Of each eight columns of a warpgroup's tile, a thread has two adjacent ones, 4 bytes for 16-bit types. A
//! warp would store eight rows of 16 bytes, half of the smallest memory transaction. Four threads of a row
//! that hold four adjacent parts transpose them, and each stores one of the parts:
//!
//! ```text
//! thread   0  1  2  3        0  1  2  3
//! part 0   a  b  c  d        a  e  i  m
//! part 1   e  f  g  h    →   b  f  j  n
//! part 2   i  j  k  l        c  g  k  o
//! part 3   m  n  o  p        d  h  l  p
//! ```

use tilewright_ir::gpu::tensor::WARP;
use tilewright_ir::gpu::warpgroup::COLUMNS;
use tilewright_ir::{BufferId, Expr, Index, Loop, LoopKind, Stmt};

use crate::generate::plan::VectorPiece;
use crate::generate::{Generator, WrittenLanes};
use crate::ssa::{Assembly, Compare, Id, SsaOp, Type};

/// Number of exchanged parts, equal to the number of threads.
const PARTS: usize = WARP[0] as usize;
/// Number of columns of a part that a thread has.
const OWN: i64 = COLUMNS / WARP[0];
/// Number of bytes exchanged at once.
const BYTES: u64 = 4;
/// Number of bytes that a thread stores.
const STORED: u32 = 16;

impl Generator<'_> {
    /// Generates the stores of parts of a row at the beginning of a block with exchanges, and returns their
    /// number of statements; 0 if there are none.
    pub(in crate::generate) fn exchanged_stores(&mut self, block: &[Stmt]) -> usize {
        let Some([x, _]) = self.f.warp.filter(|_| self.may_exchange() && block.len() >= PARTS) else { return 0 };
        let parts: Option<Vec<_>> = block[..PARTS].iter().map(pair).collect();
        let Some(parts) = parts else { return 0 };
        let (buffer, dtype) = (parts[0].1, self.program.buffer(parts[0].1).dtype);
        let mut is_read = false;
        block[..PARTS].iter().for_each(|s| s.walk(&mut |s| s.for_each_own_read(&mut |b, _| is_read |= b == buffer)));
        let is_device = !self.program.buffer(buffer).scope.is_shared() && !self.in_registers(buffer);
        if dtype.bytes() * OWN as u64 != BYTES || !is_device || is_read || parts.iter().any(|(_, b, ..)| *b != buffer) {
            return 0;
        }
        let first = |(l, _, index, _): &(&Loop, BufferId, &[Index], &Expr)| {
            let flat = self.flat(buffer, index);
            let first = flat.sub(&Index::from(l.var));
            (!first.uses(l.var)).then(|| self.f.ranges.simplify(&first))
        };
        let Some(flats) = parts.iter().map(first).collect::<Option<Vec<Index>>>() else { return 0 };
        let of_row = flats[0].sub(&Index::from(x).scale(OWN));
        let are_next = flats.iter().zip(0..).all(|(flat, at)| flat.sub(&flats[0]).as_const() == Some(COLUMNS * at));
        let own = of_row.add(&Index::from(x).scale(COLUMNS));
        if of_row.uses(x) || !are_next || self.alignment(buffer, &own) < STORED {
            return 0;
        }
        let values = parts.iter().map(|(l, _, _, value)| self.pair_of(l, buffer, value)).collect();
        let number = self.short_int(&x.into());
        let words = self.transposed(values, number);
        let ty = Type::I32.vector(PARTS);
        let all = (0..PARTS).fold(self.m.undefined(ty), |all, at| self.m.insert(all, words[at], at));
        self.f.seen.loads.remove(&buffer);
        let pointer = self.pointer(buffer, &own);
        self.f.n_stores += 1;
        self.m.store(all, pointer, STORED);
        PARTS
    }

    /// Whether the threads of a warp are converged, in a kernel with warpgroups.
    fn may_exchange(&self) -> bool {
        self.target.has_wgmma()
            && self.f.groups.is_some()
            && !self.f.matrices.all.is_empty()
            && !self.f.is_parted
            && self.f.lanes.is_none()
    }

    /// The two adjacent elements of a part that a thread stores, as a 32-bit integer.
    fn pair_of(&mut self, l: &Loop, buffer: BufferId, value: &Expr) -> Id {
        let value = self.two_of(l, buffer, value);
        self.m.bitcast(value, Type::I32)
    }

    /// The two adjacent elements that a thread stores in a loop.
    pub(super) fn two_of(&mut self, l: &Loop, buffer: BufferId, value: &Expr) -> Id {
        let n = OWN as usize;
        self.f.ranges.push(l.var, l.extent.clone());
        let piece = VectorPiece { first: 0, n, width: n };
        let outer = self.f.lanes.replace(WrittenLanes { var: l.var, piece, mask: None, guarded: false });
        let value = self.stored(buffer, value);
        let value = self.widen(value, n);
        self.f.lanes = outer;
        self.f.ranges.pop();
        value
    }

    /// Exchanges values among four threads: thread `i` receives the `i`-th values of all.
    fn transposed(&self, mut words: Vec<Id>, number: Id) -> Vec<Id> {
        let m = &self.m;
        for distance in [1, 2] {
            let bit = m.binary(SsaOp::And, number, m.int32(distance));
            let is_second = m.compare(Compare::Greater, bit, m.int32(0));
            for first in (0..PARTS).filter(|at| at & distance as usize == 0) {
                let second = first + distance as usize;
                let sent = m.select(is_second, words[first], words[second]);
                let text = format!("shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;");
                let got = m.assembly(Assembly { text, constraints: "=r,r,~{memory}".into() }, &[sent], Type::I32);
                words[first] = m.select(is_second, got, words[first]);
                words[second] = m.select(is_second, words[second], got);
            }
        }
        words
    }
}

/// Matches a loop that stores two adjacent elements; returns it with the buffer, the subscripts and the
/// value.
fn pair(stmt: &Stmt) -> Option<(&Loop, BufferId, &[Index], &Expr)> {
    let Stmt::For(l) = stmt else { return None };
    match l.body.as_slice() {
        [Stmt::Store { buffer, index, value }]
            if l.kind == LoopKind::Vectorized && l.extent.as_const() == Some(OWN) =>
        {
            Some((l, *buffer, index, value))
        }
        _ => None,
    }
}
