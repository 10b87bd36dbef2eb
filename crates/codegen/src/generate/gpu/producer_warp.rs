//! Warp-specialized kernels: a producer warp copies boxes, and consumer warpgroups multiply them.
//!
//! Each pipeline stage has two mbarriers in shared memory: the full one completes a phase when the copies'
//! bytes have arrived, the empty one when each consumer warp has arrived behind its products. A thread waits
//! for the parity of the phase, of which it keeps a bit for each stage. All stages are empty at first. A
//! stage of f32 in two parts has a third one, which completes a phase when each thread of the converter warps
//! has written its second parts and arrived: consumers wait for it too.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, section 9.7.13.15, "mbarrier"; the structure
//! is that of CUTLASS's pipelines of producers and consumers. Ours has one producer warp, not four: so
//! consumer warps have enough registers without reallocation (`setmaxnreg`). Teams that take tiles in turns
//! are those of its ping-pong kernels. Each follows the phases of the stages that the other one reads,
//! without waiting for them. A wait knows only whether a phase is odd, so it must not come two phases early:
//! an mbarrier for each team tells it when the other one has multiplied its tile.

use tilewright_ir::expr::Cond;
use tilewright_ir::gpu::tensor::WARP;
use tilewright_ir::gpu::{GpuKernel, cluster, producer_warp};
use tilewright_ir::{BufferId, Index, Loop, LoopId, LoopKind, Stmt};

use crate::CompileError;
use crate::generate::memory::PART_BYTES;
use crate::generate::{Generator, plan};
use crate::ssa::{Assembly, Compare, Id, SsaOp, Type};

/// Work of a thread at the pipeline stages.
#[derive(Clone, Copy, PartialEq)]
enum StageWork {
    /// Copies to them.
    Copies,
    /// Products of what is in them.
    Multiplies,
    /// Second parts of what is in them.
    Converts,
    /// None: another team multiplies.
    Passes,
}

/// Bytes that the threads of converter warps load together.
const CONVERTED_BYTES: i64 = producer_warp::CONVERTER_THREADS * PART_BYTES;
/// Loads of a converter thread ahead of its stores: their latencies overlap, and it has registers for them.
const LOADS_AHEAD: usize = 8;

/// Role of a thread in a warp-specialized kernel.
#[derive(Clone, Copy)]
pub struct PipelineRole {
    work: StageWork,
    /// Variable with the mbarrier phases, a bit for each pipeline stage.
    turns: Id,
    /// Variable with the stage of pending products, or less than zero.
    going_on: Id,
    /// Whether the thread says that its warp has read a stage.
    tells: Id,
    /// Address of the mbarriers of the block that it says so to.
    told: Id,
    /// Team of the thread, where several take turns.
    team: Option<Team>,
}

/// A consumer team that takes turns with others.
#[derive(Clone, Copy)]
struct Team {
    /// Number of the thread's team, of 32 bits.
    number: Id,
    /// Whether the thread speaks for its warp.
    leads: Id,
    /// Variable with the parity of the team's next turn.
    turn: Id,
    /// Whether it is the team's turn at the place being written.
    has_turn: bool,
}

impl Generator<'_> {
    /// Writes the body of a kernel for each role: for the warp that copies, for warps that convert, where
    /// there are some, and for the others.
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
        let last = self.m.int(producer_warp::n_teams(kernel) * kernel.block()[2] - 1);
        let warp = self.f.warp_of_block.unwrap_or(self.f.vars[&z].0);
        let is_beside = self.m.compare(Compare::Greater, warp, last);
        let [producer, others, end] = [0; 3].map(|_| self.m.block(self.f.id));
        let mut roles = vec![(producer, StageWork::Copies), (others, StageWork::Multiplies)];
        if self.has_converters() {
            let [beside, converters] = [0; 2].map(|_| self.m.block(self.f.id));
            self.m.cond_br(is_beside, beside, others);
            self.go_to_end(beside);
            let first = self.m.add(last, self.m.int(producer_warp::WARPS));
            let converts = self.m.compare(Compare::Greater, warp, first);
            self.m.cond_br(converts, converters, producer);
            roles.push((converters, StageWork::Converts));
        } else {
            self.m.cond_br(is_beside, producer, others);
        }
        for (block, work) in roles {
            let copies = work == StageWork::Copies;
            self.go_to_end(block);
            let team = if work == StageWork::Multiplies { self.team(is_first) } else { None };
            self.f.pipeline_role = Some(PipelineRole { work, turns, going_on, tells, told, team });
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
        if fed.work == StageWork::Copies {
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
        let passes = matches!(fed.work, StageWork::Passes | StageWork::Converts);
        let Some((n, place)) = producer_warp::products(self.program, block) else {
            let is_others = matches!(block[0], Stmt::Wait(_) | Stmt::Barrier) || self.are_copies(&block[0]);
            return Ok(usize::from(is_others || passes && !has_products(&block[0])));
        };
        let place = self.short_int(&place);
        if fed.work == StageWork::Passes {
            self.next_phase(place);
            return Ok(n);
        }
        let full = self.barrier_at(place);
        let phase = self.wait_for_turn(place, full);
        if fed.work == StageWork::Converts {
            self.second_parts(place);
            return Ok(n);
        }
        if self.has_converters() {
            let converted = self.converted(place);
            self.wait_for_phase(converted, phase);
        }
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

    /// Whether warps convert what is in the stages.
    fn has_converters(&self) -> bool {
        !self.f.matrices.in_parts.is_empty()
    }

    /// The address of the barrier that says when a stage has been converted: these follow those that say when
    /// it is empty.
    fn converted(&self, place: Id) -> Id {
        let first = self.m.int32(2 * self.tma_state().n);
        self.barrier_at(self.m.binary(SsaOp::AddWrapping, first, place))
    }

    /// Writes the second parts of the numbers in a stage, which tensor cores cut off the first ones, and says
    /// so. Both have the same place in rows that are swizzled alike.
    fn second_parts(&mut self, place: Id) {
        let stages = self.m.extend(place, Type::I64, true);
        for buffer in self.f.matrices.in_parts.clone() {
            let b = self.program.buffer(buffer);
            let all = b.size_bytes().expect("it fits shared memory") as i64;
            let stage = all / b.shape[0];
            let own = self.converter_chunk(buffer);
            let own = self.m.element(Type::I8, own, self.m.mul(stages, self.m.int(stage)));
            let offsets: Vec<i64> = (0..stage / CONVERTED_BYTES).map(|n| n * CONVERTED_BYTES).collect();
            let (ty, align) = (Type::F32.vector(PART_BYTES as usize / 4), PART_BYTES as u32);
            for offsets in offsets.chunks(LOADS_AHEAD) {
                let load = |offset: &i64| self.m.load(ty, self.bytes_from(own, *offset), align, false);
                let loaded: Vec<Id> = offsets.iter().map(load).collect();
                for (offset, numbers) in offsets.iter().zip(loaded) {
                    let rest = self.cut_off(numbers);
                    self.m.store(rest, self.bytes_from(own, all + offset), align);
                }
            }
        }
        self.m.proxy_fence();
        let converted = self.converted(place);
        self.arrive(converted);
    }

    /// The address of the first 16 bytes of a ring that a converter thread converts.
    fn converter_chunk(&mut self, buffer: BufferId) -> Id {
        let [x, y] = self.f.warp.expect("threads were mapped to warps").map(|var| self.f.vars[&var].0);
        let groups = self.f.groups.expect("threads were mapped to groups of warps");
        let warp = self.f.warp_of_block.unwrap_or(self.f.vars[&groups.warp()].0);
        let first = self.plain_pointer(buffer, &Index::from(0));
        self.hoisted(0, |g| {
            let m = &g.m;
            let of_warp = m.add(m.mul(y, m.int(WARP[0])), x);
            // Of neighbouring warps each has another remainder.
            let warp = m.binary(SsaOp::UnsignedRem, warp, m.int(producer_warp::CONVERTERS));
            let number = m.add(m.mul(warp, m.int(producer_warp::THREADS)), of_warp);
            m.element(Type::I8, first, m.mul(number, m.int(PART_BYTES)))
        })
    }

    /// Whether what is written is for threads that multiply: for all, unless warps have roles.
    pub(in crate::generate) fn multiplies(&self) -> bool {
        self.f.pipeline_role.is_none_or(|fed| fed.work == StageWork::Multiplies)
    }

    /// Whether what is written is for one of several consumer teams.
    pub(in crate::generate) fn takes_turns(&self) -> bool {
        self.f.pipeline_role.is_some_and(|fed| fed.team.is_some())
    }

    /// The thread's team, where several take turns. `leads`: whether the thread speaks for its warp.
    fn team(&mut self, leads: Id) -> Option<Team> {
        let warp = self.f.warp_of_block?;
        let n_warps = self.f.groups.expect("warps form groups").n_warps();
        let number = self.hoisted(0, |g| g.m.binary(SsaOp::UnsignedDiv, warp, g.m.int(n_warps)));
        let number = self.m.truncate(number, Type::I32);
        let turn = self.hoisted(0, |g| g.m.variable(Type::I32, 4));
        // The first team has the first turn before the other one has had any.
        self.m.store(self.m.binary(SsaOp::Xor, number, self.m.int32(1)), turn, 4);
        Some(Team { number, leads, turn, has_turn: false })
    }

    /// Writes a block whose products a team computes when it has its turn: the statements from the first to
    /// the last that have some. Returns whether it is one; a block is none whose products all stand in the
    /// loop over turns or in a condition.
    pub(in crate::generate) fn block_in_turn(&mut self, block: &[Stmt]) -> Result<bool, CompileError> {
        let Some(role @ PipelineRole { work: StageWork::Multiplies, team: Some(team), .. }) = self.f.pipeline_role
        else {
            return Ok(false);
        };
        let first = block.iter().position(has_products);
        let (Some(first), Some(last)) = (first, block.iter().rposition(has_products)) else { return Ok(false) };
        let is_around = |stmt: &Stmt| match stmt {
            Stmt::For(l) => l.kind == LoopKind::Turns,
            Stmt::If { .. } => true,
            _ => false,
        };
        if team.has_turn || first == last && is_around(&block[first]) {
            return Ok(false);
        }
        self.block(&block[..first])?;
        let phase = self.m.load(Type::I32, team.turn, 4, false);
        self.m.store(self.m.binary(SsaOp::Xor, phase, self.m.int32(1)), team.turn, 4);
        let own = self.turn_of(team.number);
        self.wait_for_phase(own, phase);
        self.f.pipeline_role = Some(PipelineRole { team: Some(Team { has_turn: true, ..team }), ..role });
        self.block(&block[first..=last])?;
        self.f.pipeline_role = Some(role);
        let next = self.turn_of(self.m.binary(SsaOp::Xor, team.number, self.m.int32(1)));
        self.effect("@$1 mbarrier.arrive.shared::cta.b64 _, [$0];", "r,b,~{memory}", &[next, team.leads]);
        self.block(&block[last + 1..])?;
        Ok(true)
    }

    /// The address of the barrier that gives a team its turn: these follow those of all places.
    fn turn_of(&self, team: Id) -> Id {
        let n = self.m.int32(self.tma_state().n_of_stage * self.tma_state().n);
        self.barrier_at(self.m.binary(SsaOp::AddWrapping, n, team))
    }

    /// Has the index of a thread along z be that in its team of the kernel's own threads.
    pub(in crate::generate) fn number_in_team(&mut self, kernel: &GpuKernel) {
        let (z, n_warps) = kernel.threads[2].expect("invariant: warps lie along z");
        let warp = self.f.vars[&z].0;
        let own = self.hoisted(0, |g| g.m.binary(SsaOp::UnsignedRem, warp, g.m.int(n_warps)));
        self.f.vars.insert(z, (own, 0));
        self.f.warp_of_block = Some(warp);
    }

    /// Writes a loop whose iterations consumer teams take in turns. A team follows the phases of the stages
    /// that others read.
    pub(in crate::generate) fn loop_in_turns(&mut self, l: &Loop, extent: &Index) -> Result<(), CompileError> {
        let role = self.f.pipeline_role.expect("consumers have a role");
        let team = role.team.expect("there are several teams").number;
        let written = plan::written_buffers(&l.body);
        self.loop_around(l, extent, |g| {
            let next = g.short_int(&Index::from(l.var).modulo(producer_warp::TEAMS));
            let is_own = g.m.compare(Compare::Equal, next, team);
            let [own, others, join] = [0; 3].map(|_| g.m.block(g.f.id));
            g.m.cond_br(is_own, own, others);
            for (block, work) in [(own, StageWork::Multiplies), (others, StageWork::Passes)] {
                g.go_to_end(block);
                g.forget_stores();
                g.f.pipeline_role = Some(PipelineRole { work, ..role });
                g.scoped(&written, |g| g.block(&l.body))?;
                g.forget_stores();
                g.m.br(join);
            }
            g.f.pipeline_role = Some(role);
            g.go_to_end(join);
            Ok(())
        })
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

    /// Waits for the thread's next turn with a place; gives its phase.
    fn wait_for_turn(&mut self, place: Id, barrier: Id) -> Id {
        let before = self.next_phase(place);
        let m = &self.m;
        let phase = m.binary(SsaOp::And, m.binary(SsaOp::ShiftUnsigned, before, place), m.int32(1));
        self.wait_for_phase(barrier, phase);
        phase
    }

    /// Goes on to a place's next phase; gives the phases of all places before.
    fn next_phase(&self, place: Id) -> Id {
        let turns = self.f.pipeline_role.expect("the thread has turns").turns;
        let m = &self.m;
        let before = m.load(Type::I32, turns, 4, false);
        m.store(m.binary(SsaOp::Xor, before, m.binary(SsaOp::ShiftLeft, m.int32(1), place)), turns, 4);
        before
    }

    /// A number of 32 bits.
    pub(in crate::generate) fn short_int(&mut self, index: &Index) -> Id {
        let value = self.int(&self.resolved(index));
        self.m.truncate(value, Type::I32)
    }
}

/// Whether a statement has products of warpgroups.
fn has_products(stmt: &Stmt) -> bool {
    let mut has = false;
    stmt.walk(&mut |s| has |= producer_warp::is_product(s));
    has
}
