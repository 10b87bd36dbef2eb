//! Warp-specialized kernels: a producer warp copies boxes, and consumer warpgroups multiply them.
//!
//! Each pipeline stage has two mbarriers in shared memory: the full one completes a phase when the copies'
//! bytes have arrived, the empty one when each consumer warp has arrived behind its products. A thread waits
//! for the parity of the phase, of which it keeps a bit for each stage. All stages are empty at first.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, section 9.7.13.15, "mbarrier"; the structure
//! is that of CUTLASS's pipelines of producers and consumers. Ours has one producer warp, not four: so
//! consumer warps have enough registers without reallocation (`setmaxnreg`).

use tilewright_ir::expr::Cond;
use tilewright_ir::gpu::{GpuKernel, cluster, producer_warp};
use tilewright_ir::{Index, LoopId, Stmt};

use crate::CompileError;
use crate::generate::{Generator, plan};
use crate::ssa::{Assembly, Compare, Id, SsaOp, Type};

/// Role of a thread in a warp-specialized kernel.
#[derive(Clone, Copy)]
pub struct PipelineRole {
    /// Whether it copies rather than multiplies.
    copies: bool,
    /// Variable with the mbarrier phases, a bit for each pipeline stage.
    turns: Id,
    /// Variable with the stage of pending products, or less than zero.
    going_on: Id,
    /// Whether the thread says that its warp has read a stage.
    tells: Id,
    /// Address of the mbarriers of the block that it says so to.
    told: Id,
}

impl Generator<'_> {
    /// Writes the body of a kernel twice, for the warp that copies and for the others.
    pub(in crate::generate) fn warp_specialized_kernel(&mut self, kernel: &GpuKernel) -> Result<(), CompileError> {
        let threads: Vec<LoopId> = kernel.threads.iter().flatten().map(|(var, _)| *var).collect();
        let [x, y, z] = threads[..] else { unreachable!("warps lie along the third axis") };
        let is_zero = |var: LoopId| Cond::Eq(var.into(), 0.into());
        let is_first = self.cond(&is_zero(x).and(is_zero(y)));
        let (mut tells, mut told) = (is_first, self.barriers());
        if self.tma_state().cluster.is_some() {
            // One thread for each block of the cluster.
            let tell = Cond::Lt(x.into(), cluster::BLOCKS.into()).and(is_zero(y));
            tells = self.cond(&tell);
            let rank = self.short_int(&Index::from(x).modulo(cluster::BLOCKS));
            let text = "mapa.shared::cluster.u32 $0, $1, $2;".to_owned();
            told = self.m.assembly(Assembly { text, constraints: "=r,r,r".into() }, &[told, rank], Type::I32);
        }
        let [turns, going_on] = [0; 2].map(|_| self.hoisted(0, |g| g.m.variable(Type::I32, 4)));
        let last = self.m.int(kernel.block()[2] - 1);
        let is_producer = self.m.compare(Compare::Greater, self.f.vars[&z].0, last);
        let [producer, others, end] = [0; 3].map(|_| self.m.block(self.f.id));
        self.m.cond_br(is_producer, producer, others);
        for (block, copies) in [(producer, true), (others, false)] {
            self.go_to_end(block);
            self.f.pipeline_role = Some(PipelineRole { copies, turns, going_on, tells, told });
            // Who copies has the first turn before anybody has read.
            self.m.store(self.m.int32(if copies { -1 } else { 0 }), turns, 4);
            self.m.store(self.m.int32(-1), going_on, 4);
            let written = plan::written_buffers(&kernel.body);
            let mut done = Ok(());
            let mut write = |g: &mut Self| done = g.scoped(&written, |g| g.block(&kernel.body));
            if copies {
                // The kernel's first thread does so in the program.
                self.f.known.extend(threads.iter().map(|var| (*var, 0)));
                self.only_if(is_first, write);
                self.f.known.retain(|var, _| !threads.contains(var));
            } else {
                write(self);
                self.end_stores();
            }
            done?;
            self.m.br(end);
        }
        self.go_to_end(end);
        self.f.pipeline_role = None;
        if self.tma_state().cluster.is_some() {
            // No block ends whose barriers others still arrive at.
            self.cluster_barrier();
        }
        Ok(())
    }

    /// Writes what the thread is there for of what a block begins with; gives the number of statements, or
    /// none where that is written as elsewhere.
    pub(in crate::generate) fn turn(&mut self, block: &[Stmt]) -> Result<usize, CompileError> {
        let Some(fed) = self.f.pipeline_role else { return Ok(0) };
        if fed.copies {
            let found = producer_warp::copies(self.program, block, &self.f.matrices, &self.f.ranges);
            let Some((n, place)) = found else { return Ok(usize::from(!self.has_copies(&block[0]))) };
            let place = self.short_int(&place);
            let empty = self.empty(place);
            self.wait_for_turn(place, empty);
            for stmt in &block[..n] {
                let is_begun = matches!(stmt, Stmt::For(l) if self.box_copy(l));
                assert!(is_begun, "invariant: what is told of its array is known");
            }
            let full = self.barrier_at(place);
            self.arrive(full);
            return Ok(n);
        }
        let Some((n, place)) = producer_warp::products(self.program, block) else {
            let is_others = matches!(block[0], Stmt::Wait(_) | Stmt::Barrier) || self.are_copies(&block[0]);
            return Ok(usize::from(is_others));
        };
        let place = self.short_int(&place);
        let full = self.barrier_at(place);
        self.wait_for_turn(place, full);
        let mut at = 0;
        while at < n {
            at += self.group_products(&block[at..n])?;
        }
        if self.f.goes_on {
            self.release_what_went_on();
            self.m.store(place, fed.going_on, 4);
        } else {
            self.tell_empty(place, fed.tells);
        }
        Ok(n)
    }

    /// Gives the place back whose products went on, where there are some and a warp feeds the rings.
    pub(in crate::generate) fn release_what_went_on(&mut self) {
        let Some(PipelineRole { going_on, tells, .. }) = self.f.pipeline_role else { return };
        let m = &self.m;
        let place = m.load(Type::I32, going_on, 4, false);
        m.store(m.int32(-1), going_on, 4);
        let is_some = m.compare(Compare::Greater, place, m.int32(-1));
        let arrives = m.binary(SsaOp::And, tells, is_some);
        self.tell_empty(place, arrives);
    }

    /// Says that the thread's warp has read a place, where a condition holds, to all who copy there.
    fn tell_empty(&self, place: Id, cond: Id) {
        let told = self.f.pipeline_role.expect("the thread has turns").told;
        let empty = self.barrier_from(told, self.number_of_empty(place));
        let window = if self.tma_state().cluster.is_some() { "cluster" } else { "cta" };
        let text = format!("@$1 mbarrier.arrive.shared::{window}.b64 _, [$0];");
        self.effect(&text, "r,b,~{memory}", &[empty, cond]);
    }

    /// Whether what is written is for a warp that does nothing but copy.
    pub(in crate::generate) fn only_copies(&self) -> bool {
        self.f.pipeline_role.is_some_and(|fed| fed.copies)
    }

    /// Whether a statement has copies for a warp that does nothing else.
    fn has_copies(&self, stmt: &Stmt) -> bool {
        let mut has = false;
        stmt.walk(&mut |s| has |= s.own_write().is_some_and(|(buffer, _)| self.is_for_boxes(buffer)));
        has
    }

    /// The address of the barrier that says when a place is empty: these follow those that say when it is
    /// full.
    fn empty(&self, place: Id) -> Id {
        self.barrier_at(self.number_of_empty(place))
    }

    fn number_of_empty(&self, place: Id) -> Id {
        self.m.binary(SsaOp::AddWrapping, place, self.m.int32(self.tma_state().n))
    }

    /// Waits for the thread's next turn with a place.
    fn wait_for_turn(&mut self, place: Id, barrier: Id) {
        let turns = self.f.pipeline_role.expect("the thread has turns").turns;
        let m = &self.m;
        let before = m.load(Type::I32, turns, 4, false);
        m.store(m.binary(SsaOp::Xor, before, m.binary(SsaOp::ShiftLeft, m.int32(1), place)), turns, 4);
        let phase = m.binary(SsaOp::And, m.binary(SsaOp::ShiftUnsigned, before, place), m.int32(1));
        self.wait_for_phase(barrier, phase);
    }

    /// A number of 32 bits.
    pub(in crate::generate) fn short_int(&mut self, index: &Index) -> Id {
        let value = self.int(&self.resolved(index));
        self.m.truncate(value, Type::I32)
    }
}
