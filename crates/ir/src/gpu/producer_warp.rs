//! A producer warp that only copies, beside consumer warpgroups that only multiply (warp specialization).
//!
//! In the program, the pipeline stages of buffers of the scope `fed` are filled and read like those of the
//! scope `bulk`: there are no additional threads, and iterations run in order. If [`has_producer_warp`]
//! holds, producer and consumers may each proceed through the stages at their own pace:
//!
//! ```text
//! for k in 8 {                           for k in 8 {                    for k in 8 {
//!   wait 1                                 wait until place is empty       wait until place is full
//!   barrier                           →    copy boxes to k % 3             multiply k % 3
//!   multiply k % 3                         tell when it is full            tell that it is empty
//!   if k + 2 < 8 { copy to (k + 2) % 3 } }                               }
//! }
//! ```
//!
//! No barrier of the whole block remains, and copies run ahead by the number of stages. The code generator
//! moves the copies to the producer warp; for other kernels and targets, `fed` means the same as `bulk`.
//!
//! A kernel whose body is a loop of the kind `turns` has [`TEAMS`] consumer teams, each with the threads of
//! the program, which alternate iterations (ping-pong). The producer warp copies for all teams in program
//! order, so that one team multiplies while another one stores:
//!
//! ```text
//! producer  copy tile 0   copy tile 1       copy tile 2       copy tile 3
//! team 0                  multiply tile 0   store tile 0      multiply tile 2
//! team 1                                    multiply tile 1   store tile 1
//! ```
//!
//! For operands of `wgmmax3`, the producer copies the f32 numbers unchanged, which tensor cores truncate to
//! the first part. [`CONVERTERS`] converter warps compute the second part, an additional step of each stage:
//!
//! ```text
//! wait until place is full
//! write what tensor cores cut off
//! tell that it is converted
//! ```

use super::bulk::{self, BoxCopy};
use super::warpgroup::{self, Groups, Matrices};
use super::{BufferUse, GpuKernel, GpuProgram, tensor};
use crate::expr::Cond;
use crate::index::{Index, Ranges};
use crate::program::{LoopId, LoopKind, Program, Stmt};

/// Number of producer warps, which follow the kernel's own warps along z.
pub const WARPS: i64 = 1;
/// Number of threads of the producer warps.
pub const THREADS: i64 = tensor::WARP[0] * tensor::WARP[1];
/// Number of consumer teams in kernels whose teams alternate iterations.
pub const TEAMS: i64 = 2;
/// Number of converter warps, which follow the producer warp. Together, producer and converter warps have the
/// registers of four warps, which the producer warp has alone in other kernels.
pub const CONVERTERS: i64 = 2;
/// Number of threads of the converter warps. At 16 bytes per thread, they cover eight rows of a matrix.
pub const CONVERTER_THREADS: i64 = CONVERTERS * THREADS;

/// Number of consumer teams of a kernel with a producer warp.
pub fn n_teams(kernel: &GpuKernel) -> i64 {
    match kernel.body.as_slice() {
        [Stmt::For(l)] if l.kind == LoopKind::Turns => TEAMS,
        _ => 1,
    }
}

/// Whether a producer warp can perform the copies of a kernel, which requires the following:
/// - All its shared memory is of the scopes `fed` and `multicast`, filled by bulk copies and read by
///   warpgroup products alone.
/// - The kernel reads nothing that it writes to device memory, so that barriers protect the pipeline stages
///   only.
/// - The n-th products read the n-th copies, and no copy overwrites their stage in between.
pub fn has_producer_warp(gpu: &GpuProgram, kernel: &GpuKernel) -> bool {
    let program = &gpu.program;
    let are_fed = kernel.shared.iter().all(|b| program.buffer(*b).scope.is_produced());
    let is_shared = |access: BufferUse| access == BufferUse::ReadWrite;
    if !are_fed
        || Groups::of(&kernel.threads).is_none()
        || bulk::all_maps(gpu, kernel, &[]).is_empty()
        || kernel.arguments(gpu).iter().any(|(_, access)| is_shared(*access))
        || kernel.body.iter().any(|stmt| warpgroup::reads_outside(stmt, &kernel.shared))
    {
        return false;
    }
    let mut ranges = kernel.ranges();
    let threads: Vec<LoopId> = kernel.threads.iter().flatten().map(|(var, _)| *var).collect();
    let matrices = Matrices::of(program, kernel);
    let Some(uses) = uses(program, &kernel.body, (&matrices, &threads), &mut ranges) else { return false };
    let values = threads.iter().map(|var| (*var, 0)).collect();
    let mut turns = CopyTrace { values, copied: Vec::new(), n_read: 0 };
    turns.follow(&uses).is_some() && turns.are_over()
}

/// Copies into one pipeline stage at the beginning of a block of statements: the number of statements, and
/// the stage.
pub fn copies(program: &Program, block: &[Stmt], matrices: &Matrices, ranges: &Ranges) -> Option<(usize, Index)> {
    let place_of = |stmt: &Stmt| match stmt {
        Stmt::For(l) => BoxCopy::of(program, l, matrices, ranges).map(|copy| copy.first[0].clone()),
        _ => None,
    };
    let place = block.first().and_then(place_of)?;
    Some((block.iter().take_while(|stmt| place_of(stmt).as_ref() == Some(&place)).count(), place))
}

/// Warpgroup products of one pipeline stage at the beginning of a block of statements: the number of
/// statements, and the stage.
pub fn products(program: &Program, block: &[Stmt]) -> Option<(usize, Index)> {
    let place_of = |stmt: &Stmt| {
        if !is_product(stmt) {
            return None;
        }
        let mut places: Vec<Index> = Vec::new();
        stmt.walk(&mut |s| {
            s.for_each_own_read(&mut |b, index| {
                if program.buffer(b).scope.is_produced() && places.last() != index.first() {
                    places.push(index[0].clone());
                }
            });
        });
        places.pop().filter(|_| places.is_empty())
    };
    let place = block.first().and_then(place_of)?;
    Some((block.iter().take_while(|stmt| place_of(stmt).as_ref() == Some(&place)).count(), place))
}

/// Whether a statement is a warpgroup product.
pub fn is_product(stmt: &Stmt) -> bool {
    matches!(stmt, Stmt::For(l) if matches!(l.kind, LoopKind::Tensor(how) if how.is_of_groups()))
}

/// Access of a kernel to pipeline stages, in program order.
enum StageUse<'k> {
    Copy(Index),
    Read(Index),
    Loop(LoopId, i64, Vec<StageUse<'k>>),
    If(&'k Cond, Vec<StageUse<'k>>),
}

impl StageUse<'_> {
    fn reads(&self) -> bool {
        match self {
            StageUse::Copy(_) => false,
            StageUse::Read(_) => true,
            StageUse::Loop(_, _, uses) | StageUse::If(_, uses) => uses.iter().any(StageUse::reads),
        }
    }
}

/// Lists the accesses of a block; `None` if a statement's products read several stages, or if some threads do
/// not reach them.
fn uses<'k>(
    program: &Program,
    block: &'k [Stmt],
    of: (&Matrices, &[LoopId]),
    ranges: &mut Ranges,
) -> Option<Vec<StageUse<'k>>> {
    let (matrices, threads) = of;
    let mut out = Vec::new();
    let mut at = 0;
    while at < block.len() {
        if let Some((n, place)) = copies(program, &block[at..], matrices, ranges) {
            out.push(StageUse::Copy(place));
            at += n;
            continue;
        }
        if let Some((n, place)) = products(program, &block[at..]) {
            out.push(StageUse::Read(place));
            at += n;
            continue;
        }
        let stmt = &block[at];
        at += 1;
        match stmt {
            Stmt::For(_) if is_product(stmt) => return None,
            Stmt::For(l) => {
                let inside = ranges.inside(l.var, &l.extent, |ranges| uses(program, &l.body, of, ranges))?;
                if !inside.is_empty() {
                    out.push(StageUse::Loop(l.var, l.extent.as_const()?, inside));
                }
            }
            Stmt::If { cond, then, otherwise } => {
                let [then, otherwise] = [then, otherwise].map(|block| uses(program, block, of, ranges));
                let (then, otherwise) = (then?, otherwise?);
                let varies = threads.iter().any(|var| cond.uses(*var));
                if !otherwise.is_empty() || varies && then.iter().any(StageUse::reads) {
                    return None;
                }
                if !then.is_empty() {
                    out.push(StageUse::If(cond, then));
                }
            }
            Stmt::Alloc(_)
            | Stmt::Store { .. }
            | Stmt::Update { .. }
            | Stmt::Prefetch { .. }
            | Stmt::Barrier
            | Stmt::Wait(_) => {}
        }
    }
    Some(out)
}

/// Replay of copies and products in program order.
struct CopyTrace {
    /// Values of the enclosing loops; thread indices are those of the first thread, which copies.
    values: Vec<(LoopId, i64)>,
    /// Pipeline stages that were copied to, in order.
    copied: Vec<i64>,
    /// Number of those copies that products have read.
    n_read: usize,
}

impl CopyTrace {
    /// Replays the accesses; `None` if the n-th products do not read the stage of the n-th copies, or if that
    /// cannot be determined.
    fn follow(&mut self, uses: &[StageUse]) -> Option<()> {
        uses.iter().try_for_each(|one| match one {
            StageUse::Copy(place) => {
                let place = self.value(place)?;
                self.copied.push(place);
                Some(())
            }
            StageUse::Read(place) => {
                let place = self.value(place)?;
                let (first, later) = self.copied.get(self.n_read..)?.split_first()?;
                self.n_read += 1;
                (*first == place && !later.contains(&place)).then_some(())
            }
            StageUse::Loop(var, n, uses) => (0..*n).try_for_each(|i| {
                self.values.push((*var, i));
                let done = self.follow(uses);
                self.values.pop();
                done
            }),
            StageUse::If(cond, uses) => match self.holds(cond) {
                Some(true) => self.follow(uses),
                Some(false) => Some(()),
                // Statements that only some blocks run must be balanced on their own.
                None => {
                    self.are_over().then_some(())?;
                    self.follow(uses)?;
                    self.are_over().then_some(())
                }
            },
        })
    }

    /// Whether products have read all copies.
    fn are_over(&self) -> bool {
        self.n_read == self.copied.len()
    }

    fn value(&self, index: &Index) -> Option<i64> {
        index.with_values(&|var| self.values.iter().find(|(v, _)| *v == var).map(|(_, n)| *n)).as_const()
    }

    fn holds(&self, cond: &Cond) -> Option<bool> {
        match cond {
            Cond::True => Some(true),
            Cond::Lt(a, b) => Some(self.value(a)? < self.value(b)?),
            Cond::Eq(a, b) => Some(self.value(a)? == self.value(b)?),
            Cond::Not(cond) => self.holds(cond).map(|holds| !holds),
            Cond::And(a, b) => match [self.holds(a), self.holds(b)] {
                [Some(true), Some(true)] => Some(true),
                [Some(false), _] | [_, Some(false)] => Some(false),
                [None, _] | [_, None] => None,
            },
            Cond::Less(..) => None,
        }
    }
}
