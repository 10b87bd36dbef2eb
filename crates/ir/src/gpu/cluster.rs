//! Thread block clusters: neighbouring blocks whose producer warps fill shared memory for each other (TMA
//! multicast).
//!
//! In the program, each block fills the pipeline stages of buffers of the scope `multicast` for itself, as
//! with the scope `fed`. Two neighbouring blocks along x that copy the same box may halve the work:
//!
//! ```text
//! block 2·w                              block 2·w + 1
//!   copy A[2·w] to A.s of this block       copy A[2·w + 1] to A.s of this block
//!   copy half of B to B.s of both          copy the other half of B to B.s of both
//! ```
//!
//! [`shared_rings`] determines the buffers for which blocks do so. On other GPUs, and in kernels without such
//! buffers, `multicast` means the same as `fed`.

use super::bulk::BoxCopy;
use super::warpgroup::Matrices;
use super::{GpuKernel, GpuProgram, producer_warp};
use crate::expr::Cond;
use crate::index::{Atom, Index, Ranges};
use crate::program::{BufferId, LoopId, LoopKind, Program, Scope, Stmt, TensorProduct};

/// Number of blocks in a cluster, neighbours along x.
pub const BLOCKS: i64 = 2;

/// Buffers that the blocks of a cluster multicast because every copy to them is the same in both blocks.
/// Empty unless the [producer warps](producer_warp::has_producer_warp) of both run the same sequence of
/// copies and products.
pub fn shared_rings(gpu: &GpuProgram, kernel: &GpuKernel) -> Vec<BufferId> {
    let Some((block, n)) = kernel.blocks[0].filter(|(_, n)| n % BLOCKS == 0) else { return Vec::new() };
    let program = &gpu.program;
    let are_multicast = kernel.shared.iter().all(|b| program.buffer(*b).scope == Scope::Multicast);
    if !are_multicast || !producer_warp::has_producer_warp(gpu, kernel) {
        return Vec::new();
    }
    let n_loops = program.loops.len() as u32;
    let [cluster, rank] = [n_loops, n_loops + 1].map(LoopId);
    let mut ranges = kernel.ranges();
    ranges.push(cluster, (n / BLOCKS).into());
    ranges.push(rank, BLOCKS.into());
    let matrices = Matrices::of(program, kernel);
    let mut pair = BlockPair { program, matrices, block, cluster, rank, shared: kernel.shared.clone() };
    if pair.are_alike(&kernel.body, &mut ranges) { pair.shared } else { Vec::new() }
}

/// Two neighbouring blocks, and the buffers that they may fill for each other.
struct BlockPair<'p> {
    program: &'p Program,
    /// Buffers that warpgroups multiply.
    matrices: Matrices,
    /// Variable of the block index along x: the cluster's index times [`BLOCKS`], plus the rank in the
    /// cluster.
    block: LoopId,
    cluster: LoopId,
    rank: LoopId,
    /// Buffers for which all copies so far are the same in both blocks.
    shared: Vec<BufferId>,
}

impl BlockPair<'_> {
    /// Whether both blocks run the same sequence of copies and products, stage by stage.
    fn are_alike(&mut self, block: &[Stmt], ranges: &mut Ranges) -> bool {
        block.iter().all(|stmt| {
            if let Stmt::For(l) = stmt
                && let Some(copy) = BoxCopy::of(self.program, l, &self.matrices, ranges)
            {
                let is_same = copy.place.iter().chain(&copy.first[1..]).all(|index| self.is_same(index, ranges));
                if !is_same || copy.half(self.program).is_none() {
                    self.shared.retain(|b| *b != copy.to);
                }
                return self.is_same(&copy.first[0], ranges);
            }
            if !self.is_about_stages(stmt) {
                return true;
            }
            let is_same = match stmt {
                Stmt::For(l) if matches!(l.kind, LoopKind::Tensor(how) if how != TensorProduct::Tma) => {
                    let products = producer_warp::products(self.program, std::slice::from_ref(stmt));
                    return products.is_some_and(|(_, stage)| self.is_same(&stage, ranges));
                }
                Stmt::For(l) => self.is_same(&l.extent, ranges),
                Stmt::If { cond, .. } => self.holds_alike(cond, ranges),
                _ => true,
            };
            let mut are = is_same;
            stmt.each_block(ranges, |block, ranges| are = are && self.are_alike(block, ranges));
            are
        })
    }

    /// Whether a statement contains copies or products.
    fn is_about_stages(&self, stmt: &Stmt) -> bool {
        let mut is = false;
        stmt.walk(&mut |s| {
            is |= s.own_write().is_some_and(|(b, _)| self.program.buffer(b).scope.is_tma())
                || matches!(s, Stmt::For(l) if matches!(l.kind, LoopKind::Tensor(how) if how != TensorProduct::Tma));
        });
        is
    }

    /// Whether an index has the same value in both blocks.
    fn is_same(&self, index: &Index, ranges: &Ranges) -> bool {
        !self.by_cluster(index, ranges).uses(self.rank)
    }

    /// Whether a condition holds in both blocks or in neither.
    fn holds_alike(&self, cond: &Cond, ranges: &Ranges) -> bool {
        match cond {
            Cond::True => true,
            // An even number is less than another even number if and only if its odd successor is.
            Cond::Lt(a, b) => {
                let distance = self.by_cluster(&a.sub(b), ranges);
                let is_less = halved(&distance, ranges).map(|(half, _)| half).unwrap_or(distance);
                !is_less.uses(self.rank)
            }
            Cond::Eq(a, b) => self.is_same(&a.sub(b), ranges),
            Cond::Not(cond) => self.holds_alike(cond, ranges),
            Cond::And(a, b) => self.holds_alike(a, ranges) && self.holds_alike(b, ranges),
            Cond::Less(..) => false,
        }
    }

    /// Rewrites an index in terms of cluster and rank, removing the rank from quotients by even numbers and
    /// from the high digits of remainders.
    fn by_cluster(&self, index: &Index, ranges: &Ranges) -> Index {
        let number = Index::from(self.cluster).scale(BLOCKS).add(&self.rank.into());
        index.substitute(self.block, &number).rewrite(&mut |atom| match atom {
            Atom::FloorDiv(x, d) if *d > 0 && d % BLOCKS == 0 => {
                halved(x, ranges).map(|(half, _)| half.floor_div(d / BLOCKS))
            }
            Atom::Mod(x, d) if *d > 0 && d % BLOCKS == 0 => {
                halved(x, ranges).map(|(half, odd)| half.modulo(d / BLOCKS).scale(BLOCKS).add(&odd))
            }
            Atom::Var(_) | Atom::FloorDiv(..) | Atom::Mod(..) | Atom::Min(..) | Atom::Max(..) => None,
        })
    }
}

/// Quotient and remainder of an index by [`BLOCKS`], if its terms determine them.
fn halved(index: &Index, ranges: &Ranges) -> Option<(Index, Index)> {
    let (half, odd) = index.multiples(BLOCKS);
    let is_rest = ranges.lower(&odd)? >= 0 && ranges.upper(&odd)? < BLOCKS;
    is_rest.then_some((half, odd))
}
