//! Promotes small temporaries to registers.
//!
//! A tile passed from one stage to the next inside the loops over tiles is a temporary in local memory. If
//! every subscript is constant after unrolling, and vectors are always written and read as a whole or read in
//! halves, its elements can be values in registers, like those of an accumulator.

use crate::index::Index;
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt, TensorProduct};
use std::collections::BTreeMap;

/// Maximum size of a promoted temporary; no register file holds larger ones.
const MOST_BYTES: u64 = 4096;

/// Promotes temporaries to registers, in a program without unrolled loops.
pub fn promote_registers(mut program: Program) -> Program {
    let is_candidate = |id: &BufferId| {
        let b = program.buffer(*id);
        b.role == Role::Temporary && b.scope == Scope::Local && b.size_bytes().is_some_and(|n| n <= MOST_BYTES)
    };
    let candidates: Vec<BufferId> = (0..program.buffers.len() as u32).map(BufferId).filter(is_candidate).collect();
    if candidates.is_empty() {
        return program;
    }
    let uses = candidates.iter().map(|id| (*id, Uses::default())).collect();
    let mut walk = AccessWalk { program: &program, lanes: None, n_concurrent: 0, uses };
    for part in program.parts() {
        walk.block(part);
    }
    for (id, uses) in walk.uses {
        if uses.are_vectors() {
            program.buffers[id.0 as usize].scope = Scope::Register;
        }
    }
    program
}

/// Accesses to a temporary.
#[derive(Default)]
struct Uses {
    /// First element and number of elements of each write.
    writes: Vec<(i64, i64)>,
    /// First element and number of elements of each read.
    reads: Vec<(i64, i64)>,
    /// Number of concurrent loops around the last allocation of the temporary.
    allocated_in: usize,
    /// Whether some access has a position known only at run time, or is by a thread other than the allocating
    /// one.
    varies: bool,
}

impl Uses {
    /// Whether any two writes cover the same or disjoint elements, and every read covers one write or half of
    /// it.
    fn are_vectors(mut self) -> bool {
        self.writes.sort_unstable();
        self.writes.dedup();
        let is_one = |&(first, n): &(i64, i64)| {
            let holds = |w: &&(i64, i64)| w.0 <= first && first + n <= w.0 + w.1;
            self.writes.iter().find(holds).is_some_and(|w| 2 * n >= w.1)
        };
        !self.varies && self.writes.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0) && self.reads.iter().all(is_one)
    }
}

struct AccessWalk<'p> {
    program: &'p Program,
    /// Enclosing vectorized loop, and its extent if it is constant.
    lanes: Option<(LoopId, Option<i64>)>,
    /// Number of enclosing loops whose iterations run concurrently in different threads.
    n_concurrent: usize,
    uses: BTreeMap<BufferId, Uses>,
}

impl AccessWalk<'_> {
    fn block(&mut self, block: &[Stmt]) {
        for stmt in block {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        // Loops of collective warp stores are unrolled.
        if let Stmt::For(l) = stmt
            && l.kind == LoopKind::Tensor(TensorProduct::Tma)
            && let Some(n) = l.extent.as_const()
        {
            let at = |i: i64| l.body.iter().map(move |s| s.substitute(l.var, &Index::from(i)));
            (0..n).flat_map(at).for_each(|s| self.stmt(&s));
            return;
        }
        if let Stmt::Alloc(buffer) = stmt
            && let Some(uses) = self.uses.get_mut(buffer)
        {
            uses.allocated_in = self.n_concurrent;
        }
        stmt.for_each_own_read(&mut |buffer, index| self.access(buffer, index, false));
        if let Some((buffer, index)) = stmt.own_write() {
            self.access(buffer, index, true);
        }
        let (outer, concurrent) = (self.lanes, self.n_concurrent);
        if let Stmt::For(l) = stmt {
            match l.kind {
                LoopKind::Vectorized => self.lanes = Some((l.var, l.extent.as_const())),
                LoopKind::Parallel | LoopKind::Block(_) | LoopKind::Thread(_) => self.n_concurrent += 1,
                LoopKind::Serial | LoopKind::Unrolled | LoopKind::Tensor(_) | LoopKind::Turns => {}
            }
        }
        stmt.blocks().for_each(|b| self.block(b));
        (self.lanes, self.n_concurrent) = (outer, concurrent);
    }

    fn access(&mut self, buffer: BufferId, index: &[Index], writes: bool) {
        let Some(uses) = self.uses.get_mut(&buffer) else { return };
        let strides = self.program.buffer(buffer).strides();
        let at = index.iter().zip(strides).fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(stride)));
        let vector = |(var, n): (LoopId, Option<i64>)| Some((at.sub(&Index::from(var)).as_const()?, n?));
        match at.as_const().map(|first| (first, 1)).or_else(|| self.lanes.and_then(vector)) {
            Some(access) if uses.allocated_in == self.n_concurrent => {
                if writes { &mut uses.writes } else { &mut uses.reads }.push(access);
            }
            _ => uses.varies = true,
        }
    }
}
