//! Warp-specialized kernels: a producer warp copies boxes, and consumer warpgroups multiply them.
//!
//! Each pipeline stage has two mbarriers in shared memory: the full one completes a phase when the copies'
//! bytes have arrived, the empty one when each consumer warp has arrived after its products. A thread waits
//! for the parity of the phase, which it keeps as a bit for each stage. All stages are initially empty. A
//! stage of f32 in two parts has a third mbarrier, which completes a phase when each thread of the converter
//! warps has written its second parts and arrived; consumers wait for it, too.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, section 9.7.13.15, "mbarrier"; the structure
//! is that of CUTLASS's producer-consumer pipelines. There is one producer warp instead of four, so that
//! consumer warps have enough registers without reallocation (`setmaxnreg`). Teams that alternate tiles
//! correspond to CUTLASS's ping-pong kernels. Each team tracks the phases of the stages that the other one
//! reads, without waiting for them. As a wait tests only the parity of a phase, it must not begin two phases
//! early: an mbarrier for each team signals that the other team has multiplied its tile.

use tilewright_ir::expr::Cond;
use tilewright_ir::gpu::tensor::WARP;
use tilewright_ir::gpu::{GpuKernel, cluster, producer_warp};
use tilewright_ir::{BufferId, Index, Loop, LoopId, LoopKind, Stmt};

use crate::CompileError;
use crate::generate::memory::PART_BYTES;
use crate::generate::{Generator, plan};
use crate::ssa::{Assembly, Compare, Id, SsaOp, Type};

/// Work of a thread on the pipeline stages.
#[derive(Clone, Copy, PartialEq)]
enum StageWork {
    /// Copies to the stages.
    Copies,
    /// Products of the operands in the stages.
    Multiplies,
    /// Computation of the second parts of the numbers in the stages.
    Converts,
    /// No work, as another team multiplies.
    Passes,
}

/// Number of bytes that the threads of converter warps load together.
const CONVERTED_BYTES: i64 = producer_warp::CONVERTER_THREADS * PART_BYTES;
/// Number of loads of a converter thread before its stores, so that their latencies overlap, limited by its
/// registers.
const LOADS_AHEAD: usize = 8;

/// Role of a thread in a warp-specialized kernel.
#[derive(Clone, Copy)]
pub struct PipelineRole {
    work: StageWork,
    /// Variable with the mbarrier phases, a bit for each pipeline stage.
    turns: Id,
    /// Variable with the stage of pending products, or a negative value.
    going_on: Id,
    /// Whether the thread signals that its warp has read a stage.
    tells: Id,
    /// Address of the mbarriers of the block to which it signals.
    told: Id,
    /// Team of the thread, if several alternate.
    team: Option<Team>,
}

/// Consumer team that alternates with others.
#[derive(Clone, Copy)]
struct Team {
    /// Index of the thread's team, a 32-bit value.
    number: Id,
    /// Whether the thread signals for its warp.
    leads: Id,
    /// Variable with the parity of the team's next turn.
    turn: Id,
    /// Whether the team has its turn at the insertion point.
    has_turn: bool,
}

impl Generator<'_> {
    /// Generates the body of a kernel for each role: the producer warp, converter warps, if any, and
    /// consumers.
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
            // The producer's first phase precedes any read.
            self.m.store(self.m.int32(if copies { -1 } else { 0 }), turns, 4);
            self.m.store(self.m.int32(-1), going_on, 4);
            let written = plan::written_buffers(&kernel.body);
            let mut done = Ok(());
            let mut write = |g: &mut Self| done = g.scoped(&written, |g| g.block(&kernel.body));
            if copies {
                // In the program, the kernel's first thread copies.
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
            // No block may end while others still arrive at its mbarriers.
            self.cluster_barrier();
        }
        Ok(())
    }

    /// Generates the part of the statements at the beginning of a block that belongs to the thread's role;
    /// returns the number of statements, or 0 if they are generated in the usual way.
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

    /// Releases the stage of pending products, if there are any and a producer warp fills the stages.
    pub(in crate::generate) fn release_what_went_on(&mut self) {
        let Some(PipelineRole { going_on, tells, .. }) = self.f.pipeline_role else { return };
        let m = &self.m;
        let place = m.load(Type::I32, going_on, 4, false);
        m.store(m.int32(-1), going_on, 4);
        let is_some = m.compare(Compare::Greater, place, m.int32(-1));
        let arrives = m.binary(SsaOp::And, tells, is_some);
        self.tell_empty(place, arrives);
    }

    /// Signals to all producers of a stage that the thread's warp has read it, if a condition holds.
    fn tell_empty(&self, place: Id, cond: Id) {
        let told = self.f.pipeline_role.expect("the thread has turns").told;
        let empty = self.barrier_from(told, self.number_of_empty(place));
        let window = if self.tma_state().cluster.is_some() { "cluster" } else { "cta" };
        let text = format!("@$1 mbarrier.arrive.shared::{window}.b64 _, [$0];");
        self.effect(&text, "r,b,~{memory}", &[empty, cond]);
    }

    /// Whether there are converter warps.
    fn has_converters(&self) -> bool {
        !self.f.matrices.in_parts.is_empty()
    }

    /// Address of the mbarrier for the conversion of a stage; these follow the empty mbarriers.
    fn converted(&self, place: Id) -> Id {
        let first = self.m.int32(2 * self.tma_state().n);
        self.barrier_at(self.m.binary(SsaOp::AddWrapping, first, place))
    }

    /// Generates the computation of the second parts of the numbers in a stage, the remainders of the first
    /// parts that tensor cores truncate, and the signal of its completion. Both parts have the same position
    /// in rows with the same swizzle.
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

    /// Address of the first 16 bytes of a buffer that a converter thread converts.
    fn converter_chunk(&mut self, buffer: BufferId) -> Id {
        let [x, y] = self.f.warp.expect("threads were mapped to warps").map(|var| self.f.vars[&var].0);
        let groups = self.f.groups.expect("threads were mapped to groups of warps");
        let warp = self.f.warp_of_block.unwrap_or(self.f.vars[&groups.warp()].0);
        let first = self.plain_pointer(buffer, &Index::from(0));
        self.hoisted(0, |g| {
            let m = &g.m;
            let of_warp = m.add(m.mul(y, m.int(WARP[0])), x);
            // Adjacent warps have different remainders.
            let warp = m.binary(SsaOp::UnsignedRem, warp, m.int(producer_warp::CONVERTERS));
            let number = m.add(m.mul(warp, m.int(producer_warp::THREADS)), of_warp);
            m.element(Type::I8, first, m.mul(number, m.int(PART_BYTES)))
        })
    }

    /// Whether the code being generated is for threads that multiply, which are all threads unless warps have
    /// roles.
    pub(in crate::generate) fn multiplies(&self) -> bool {
        self.f.pipeline_role.is_none_or(|fed| fed.work == StageWork::Multiplies)
    }

    /// Whether the code being generated is for one of several consumer teams.
    pub(in crate::generate) fn takes_turns(&self) -> bool {
        self.f.pipeline_role.is_some_and(|fed| fed.team.is_some())
    }

    /// Creates the state of the thread's team, if several alternate; `leads` says whether the thread signals
    /// for its warp.
    fn team(&mut self, leads: Id) -> Option<Team> {
        let warp = self.f.warp_of_block?;
        let n_warps = self.f.groups.expect("warps form groups").n_warps();
        let number = self.hoisted(0, |g| g.m.binary(SsaOp::UnsignedDiv, warp, g.m.int(n_warps)));
        let number = self.m.truncate(number, Type::I32);
        let turn = self.hoisted(0, |g| g.m.variable(Type::I32, 4));
        // The first team has its first turn before the other one.
        self.m.store(self.m.binary(SsaOp::Xor, number, self.m.int32(1)), turn, 4);
        Some(Team { number, leads, turn, has_turn: false })
    }

    /// Generates a block whose products a team computes in its turn, which covers the statements from the
    /// first to the last with products. Returns false, without generating the block, if all products are in
    /// the loop over turns or under a condition.
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

    /// Address of the mbarrier for a team's turn; these follow the mbarriers of all stages.
    fn turn_of(&self, team: Id) -> Id {
        let n = self.m.int32(self.tma_state().n_of_stage * self.tma_state().n);
        self.barrier_at(self.m.binary(SsaOp::AddWrapping, n, team))
    }

    /// Replaces the index of a thread along z by its index in its team.
    pub(in crate::generate) fn number_in_team(&mut self, kernel: &GpuKernel) {
        let (z, n_warps) = kernel.threads[2].expect("invariant: warps lie along z");
        let warp = self.f.vars[&z].0;
        let own = self.hoisted(0, |g| g.m.binary(SsaOp::UnsignedRem, warp, g.m.int(n_warps)));
        self.f.vars.insert(z, (own, 0));
        self.f.warp_of_block = Some(warp);
    }

    /// Generates a loop whose iterations consumer teams alternate. A team tracks the phases of the stages
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

    /// Whether a statement contains copies for the producer warp.
    fn has_copies(&self, stmt: &Stmt) -> bool {
        let mut has = false;
        stmt.walk(&mut |s| has |= s.own_write().is_some_and(|(buffer, _)| self.is_for_boxes(buffer)));
        has
    }

    /// Address of the empty mbarrier of a stage; these follow the full mbarriers.
    fn empty(&self, place: Id) -> Id {
        self.barrier_at(self.number_of_empty(place))
    }

    fn number_of_empty(&self, place: Id) -> Id {
        self.m.binary(SsaOp::AddWrapping, place, self.m.int32(self.tma_state().n))
    }

    /// Waits for the next phase of a stage; returns the phase.
    fn wait_for_turn(&mut self, place: Id, barrier: Id) -> Id {
        let before = self.next_phase(place);
        let m = &self.m;
        let phase = m.binary(SsaOp::And, m.binary(SsaOp::ShiftUnsigned, before, place), m.int32(1));
        self.wait_for_phase(barrier, phase);
        phase
    }

    /// Advances a stage to its next phase; returns the previous phases of all stages.
    fn next_phase(&self, place: Id) -> Id {
        let turns = self.f.pipeline_role.expect("the thread has turns").turns;
        let m = &self.m;
        let before = m.load(Type::I32, turns, 4, false);
        m.store(m.binary(SsaOp::Xor, before, m.binary(SsaOp::ShiftLeft, m.int32(1), place)), turns, 4);
        before
    }

    /// Evaluates an index in 32 bits.
    pub(in crate::generate) fn short_int(&mut self, index: &Index) -> Id {
        let value = self.int(&self.resolved(index));
        self.m.truncate(value, Type::I32)
    }
}

/// Whether a statement contains warpgroup products.
fn has_products(stmt: &Stmt) -> bool {
    let mut has = false;
    stmt.walk(&mut |s| has |= producer_warp::is_product(s));
    has
}
