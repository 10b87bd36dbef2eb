//! Asynchronous copies from global to shared memory, which bypass registers and overlap with other work
//! (`cp.async`).

use tilewright_ir::expr::{Cond, Expr};
use tilewright_ir::{BufferId, Index, Role, Scope};

use crate::generate::memory::LaneAddresses;
use crate::generate::{Generator, plan};
use crate::ssa::{SsaOp, Type};

/// Valid sizes of a copy in bytes.
const BYTES: [usize; 3] = [4, 8, 16];

impl Generator<'_> {
    /// Ends a group of copies and waits for all but the last `n` groups.
    pub(in crate::generate) fn wait(&mut self, n: u8) {
        if self.target.has_async_copies() {
            if self.f.has_copies {
                self.m.wait(n);
            }
            if self.f.tma.is_some() {
                self.wait_for_boxes(n);
            }
        }
    }

    /// Issues a store to such memory as an asynchronous copy, and returns whether it is one. Elements
    /// excluded by conditions become zeros.
    pub(in crate::generate) fn copy(&mut self, buffer: BufferId, index: &[Index], value: &Expr) -> bool {
        let b = self.program.buffer(buffer);
        let in_parts = self.f.matrices.in_parts.contains(&buffer);
        if !b.scope.is_on_its_way() || !self.target.has_async_copies() || in_parts {
            return false;
        }
        assert!(!self.is_for_boxes(buffer), "what boxes fill nothing else does");
        let (dtype, each) = (b.dtype, b.dtype.bytes() as usize);
        let Some((from, at, conditions)) = element(value.without_cast(dtype)) else { return false };
        let source = self.program.buffer(from);
        let is_device = source.role != Role::Temporary || source.scope == Scope::Global;
        let lanes = self.f.lanes;
        let varies = conditions.iter().any(|(cond, _)| !plan::is_uniform(cond, lanes.map(|l| l.var)));
        if source.dtype != dtype || !is_device || varies || lanes.is_some_and(|l| l.mask.is_some()) {
            return false;
        }
        let (to, of) = (self.access(buffer, index), self.access(from, at));
        let mut copies = Vec::new();
        match (lanes, &to, &of) {
            (None, LaneAddresses::Uniform(to), LaneAddresses::Uniform(of)) => {
                copies.push((to.clone(), of.clone(), each))
            }
            (
                Some(l),
                LaneAddresses::Strided { base: to, stride: 1 },
                LaneAddresses::Strided { base: of, stride: 1 },
            ) if self.alignment(buffer, to).min(self.alignment(from, of)) as usize >= l.piece.n * each
                && BYTES.contains(&(l.piece.n * each)) =>
            {
                copies.push((to.clone(), of.clone(), l.piece.n * each));
            }
            (Some(l), ..) => {
                let [to, of] = [&to, &of].map(|access| self.lane_positions(access, l.piece.n));
                copies.extend(to.into_iter().zip(of).map(|(to, of)| (to, of, each)));
            }
            (None, ..) => return false,
        }
        if copies.iter().any(|(_, _, bytes)| !BYTES.contains(bytes)) {
            return false;
        }
        let mut all = self.m.bool(true);
        for (cond, holds) in conditions {
            let cond = self.cond(cond);
            let cond = if holds { cond } else { self.m.not(cond) };
            all = match self.m.as_const_bool(all) {
                Some(true) => cond,
                _ => self.m.binary(SsaOp::And, all, cond),
            };
        }
        let is_there = match self.m.as_const_bool(all) {
            Some(true) => None,
            // Zeros are stored.
            Some(false) => return false,
            None => Some(all),
        };
        self.f.seen.loads.remove(&buffer);
        for (to, of, bytes) in copies {
            let (to, of) = (self.pointer(buffer, &to), self.pointer(from, &of));
            let n = is_there.map(|is_there| {
                let [all, none] = [bytes as i64, 0].map(|n| self.m.integer(Type::I32, n));
                self.m.select(is_there, all, none)
            });
            self.f.n_stores += 1;
            self.m.copy(to, of, bytes, n);
        }
        true
    }
}

/// Conditions, with their required truth values.
type KnownConditions<'e> = Vec<(&'e Cond, bool)>;

/// Matches a value that is an element if conditions have the given truth values, and zero otherwise.
fn element(value: &Expr) -> Option<(BufferId, &[Index], KnownConditions<'_>)> {
    let is_zero = |e: &Expr| matches!(e, Expr::Const(x) if x.to_bits() == 0);
    match value {
        Expr::Load(from, at) => Some((*from, at, Vec::new())),
        Expr::Select(cond, a, b) if is_zero(a) != is_zero(b) => {
            let holds = is_zero(b);
            let (from, at, mut conditions) = element(if holds { a } else { b })?;
            conditions.insert(0, (cond, holds));
            Some((from, at, conditions))
        }
        _ => None,
    }
}
