//! Bulk copies of boxes to shared memory by TMA, which one thread issues.
//!
//! A copy is complete when the number of bytes that an mbarrier in shared memory expects has arrived. Each
//! pipeline stage has an mbarrier, and each group of copies uses the next one: its copies add to the expected
//! bytes, its end is the only arrival, and waiting for the group means waiting for that phase of the
//! mbarrier.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, sections 9.7.9.27, "cp.async.bulk.tensor",
//! and 9.7.13.15, "mbarrier".

use std::borrow::Cow;

use tilewright_ir::expr::Cond;
use tilewright_ir::gpu::bulk::{BARRIER_BYTES, BoxCopy, TensorMap};
use tilewright_ir::gpu::producer_warp::TEAMS;
use tilewright_ir::gpu::{GpuKernel, cluster};
use tilewright_ir::{BufferId, Loop};

use crate::generate::Generator;
use crate::ssa::{Assembly, Compare, Id, SsaOp, Type};

/// Timeout of a wait for an mbarrier in nanoseconds, thousands of times as long as a copy.
const LONGEST_WAIT: i64 = 4_000_000_000;

/// Code generation state of a kernel with bulk copies.
#[derive(Clone)]
pub struct TmaState {
    /// Tensor maps, with the parameters that pass them.
    maps: Vec<(TensorMap, Id)>,
    /// Address of the first mbarrier.
    barriers: Id,
    /// Number of pipeline stages.
    pub(in crate::generate) n: i32,
    /// Number of mbarriers of each stage.
    pub(in crate::generate) n_of_stage: i32,
    /// Variable with the number of waits of the thread.
    n_waits: Id,
    /// Whether the thread issues copies.
    is_first: Id,
    /// State of the block in its cluster, if any.
    pub(in crate::generate) cluster: Option<Cluster>,
}

/// Operands of a TMA instruction with `n` coordinates after three other operands: the list of the
/// coordinates, and LLVM's constraints, with `first` for the first operand.
pub(super) fn with_coordinates(first: char, n: usize) -> (String, String) {
    let list: Vec<String> = (3..3 + n).map(|at| format!("${at}")).collect();
    (list.join(", "), format!("{first},l,r{},~{{memory}}", ",r".repeat(n)))
}

impl TmaState {
    /// Parameter that passes a tensor map.
    pub(super) fn parameter(&self, map: &TensorMap) -> Option<Id> {
        self.maps.iter().find(|(known, _)| known == map).map(|(_, parameter)| *parameter)
    }
}

/// Multicast state of a block in a cluster, whose producer warps copy for each other.
#[derive(Clone)]
pub struct Cluster {
    /// Rank of the block, a 32-bit value.
    rank: Id,
    /// Buffers of which each block copies half of every box, for all blocks.
    shared: Vec<BufferId>,
}

/// Mask of all blocks of a cluster.
const ALL_BLOCKS: u32 = (1 << cluster::BLOCKS) - 1;

impl Generator<'_> {
    /// Prepares box copies, with the mbarriers of `n` pipeline stages from this address on. `arrivals` holds
    /// the number of arrivals that complete a phase of each mbarrier of a stage: of the copies, of the
    /// consumer warps of a team, and of the converter threads, if any. `shared` holds the buffers that blocks
    /// of a cluster fill for each other.
    pub(in crate::generate) fn begin_boxes(
        &mut self,
        kernel: &GpuKernel,
        maps: Vec<(TensorMap, Id)>,
        barriers: Id,
        n: i32,
        mut arrivals: Vec<i64>,
        shared: Vec<BufferId>,
    ) {
        let threads = kernel.threads.iter().flatten().filter(|(_, extent)| *extent > 1);
        let is_first = threads.fold(Cond::True, |all, (var, _)| all.and(Cond::Eq((*var).into(), 0.into())));
        let mut is_first = self.cond(&is_first);
        if let Some(warp) = self.f.warp_of_block {
            is_first = self.m.binary(SsaOp::And, is_first, self.m.compare(Compare::Equal, warp, self.m.int(0)));
        }
        let n_waits = self.hoisted(0, |g| g.m.variable(Type::I32, 4));
        self.m.store(self.m.int32(0), n_waits, 4);
        let block = kernel.blocks[0].filter(|_| !shared.is_empty());
        let cluster = block.map(|(block, _)| {
            let number = self.short_int(&block.into());
            Cluster { rank: self.m.binary(SsaOp::And, number, self.m.int32(cluster::BLOCKS as i32 - 1)), shared }
        });
        let n_team = arrivals.get(1).copied().filter(|_| self.f.warp_of_block.is_some());
        let is_in_cluster = cluster.is_some();
        if let (Some(n_readers), true) = (arrivals.get_mut(1), is_in_cluster) {
            *n_readers *= cluster::BLOCKS;
        }
        self.f.tma =
            Some(TmaState { maps, barriers, n, n_of_stage: arrivals.len() as i32, n_waits, is_first, cluster });
        self.only_if(is_first, |g| {
            let of_stages = arrivals.into_iter().flat_map(|of_stage| std::iter::repeat_n(of_stage, n as usize));
            let of_teams = n_team.into_iter().flat_map(|of_team| std::iter::repeat_n(of_team, TEAMS as usize));
            for (at, arrivals) in (0..).zip(of_stages.chain(of_teams)) {
                let barrier = g.barrier_at(g.m.int32(at));
                g.effect(&format!("mbarrier.init.shared::cta.b64 [$0], {arrivals};"), "r,~{memory}", &[barrier]);
            }
            g.m.proxy_fence();
            if is_in_cluster {
                g.effect("fence.mbarrier_init.release.cluster;", "~{memory}", &[]);
            }
        });
        match is_in_cluster {
            true => self.cluster_barrier(),
            false => self.m.barrier(),
        }
    }

    /// Generates a barrier for all threads of the cluster, which makes their writes visible to each other.
    pub(in crate::generate) fn cluster_barrier(&self) {
        self.effect("barrier.cluster.arrive;", "~{memory}", &[]);
        self.effect("barrier.cluster.wait;", "~{memory}", &[]);
    }

    /// Generates code that runs if a condition holds.
    pub(in crate::generate) fn only_if(&mut self, cond: Id, write: impl FnOnce(&mut Self)) {
        let [yes, join] = [0; 2].map(|_| self.m.block(self.f.id));
        self.m.cond_br(cond, yes, join);
        self.go_to_end(yes);
        write(self);
        self.m.br(join);
        self.go_to_end(join);
    }

    pub(in crate::generate) fn effect(&self, text: &str, constraints: impl Into<Cow<'static, str>>, operands: &[Id]) {
        self.m.assembly_effect(Assembly { text: text.to_owned(), constraints: constraints.into() }, operands);
    }

    /// Address in shared memory in 32 bits, for instructions without an LLVM intrinsic.
    pub(in crate::generate) fn short(&self, pointer: Id) -> Id {
        self.m.truncate(self.m.address(pointer), Type::I32)
    }

    pub(in crate::generate) fn tma_state(&self) -> &TmaState {
        self.f.tma.as_ref().expect("the kernel copies boxes")
    }

    /// Address of the first mbarrier.
    pub(in crate::generate) fn barriers(&self) -> Id {
        self.short(self.tma_state().barriers)
    }

    /// Address of the mbarrier of a pipeline stage.
    pub(in crate::generate) fn barrier_at(&self, place: Id) -> Id {
        self.barrier_from(self.barriers(), place)
    }

    /// Address of the mbarrier of a pipeline stage, given the address of the first one.
    pub(in crate::generate) fn barrier_from(&self, first: Id, place: Id) -> Id {
        let m = &self.m;
        m.binary(SsaOp::AddWrapping, first, m.binary(SsaOp::MulWrapping, place, m.int32(BARRIER_BYTES as i32)))
    }

    /// Issues the box copy of a nest; false if the nest is not a box copy.
    pub(in crate::generate) fn box_copy(&mut self, nest: &Loop) -> bool {
        if self.f.tma.is_none() {
            return false;
        }
        let Some(copy) = BoxCopy::of(self.program, nest, &self.f.matrices, &self.f.ranges) else { return false };
        let cluster = self.tma_state().cluster.as_ref().filter(|cluster| cluster.shared.contains(&copy.to));
        let half = cluster.map(|cluster| (cluster.rank, copy.half(self.program).expect("the cluster shares boxes")));
        let copied = half.as_ref().map_or(&copy.map, |(_, half)| &half.first.map);
        let Some(map) = self.tma_state().parameter(copied) else { return false };
        let place = self.short_int(&copy.first[0]);
        let mut coordinates: Vec<Id> = copy.place.iter().map(|index| self.short_int(index)).collect();
        let flat = self.flat(copy.to, &copy.first);
        let to = self.plain_pointer(copy.to, &flat);
        self.f.seen.loads.remove(&copy.to);
        let (mut to, barrier) = (self.short(to), self.barrier_at(place));
        if let Some((rank, half)) = &half {
            let m = &self.m;
            let moved = |from: Id, by: i64| {
                m.binary(SsaOp::AddWrapping, from, m.binary(SsaOp::MulWrapping, *rank, m.int32(by as i32)))
            };
            coordinates[half.dimension] = moved(coordinates[half.dimension], half.extent);
            to = moved(to, half.first.bytes(self.program));
        }
        coordinates.reverse();
        // The other block sends as many bytes as it receives.
        let bytes = self.m.int32(copy.bytes(self.program) as i32);
        let expect = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;";
        self.effect(expect, "r,r,~{memory}", &[barrier, bytes]);
        let n = coordinates.len();
        let (list, constraints) = with_coordinates('r', n);
        let (multicast, mask) = match half {
            Some(_) => (".multicast::cluster", format!(", {ALL_BLOCKS}")),
            None => ("", String::new()),
        };
        let text = format!(
            "cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast} [$0], [$1, {{{list}}}], [$2]{mask};"
        );
        let map = self.m.address(map);
        self.effect(&text, constraints, &[[to, map, barrier].as_slice(), &coordinates].concat());
        true
    }

    /// Ends a group of box copies and waits for all but the last `n` groups.
    pub(in crate::generate) fn wait_for_boxes(&mut self, n: u8) {
        let TmaState { n: n_places, n_waits, is_first, .. } = *self.tma_state();
        let m = &self.m;
        let n_places = m.int32(n_places);
        let ended = m.load(Type::I32, n_waits, 4, false);
        m.store(m.binary(SsaOp::AddWrapping, ended, m.int32(1)), n_waits, 4);
        self.only_if(is_first, |g| {
            let place = g.m.binary(SsaOp::UnsignedRem, ended, n_places);
            let barrier = g.barrier_at(place);
            g.arrive(barrier);
        });
        let m = &self.m;
        let awaited = m.binary(SsaOp::SubWrapping, ended, m.int32(n.into()));
        let is_there = m.compare(Compare::Greater, awaited, m.int32(-1));
        self.only_if(is_there, |g| {
            let m = &g.m;
            let barrier = g.barrier_at(m.binary(SsaOp::UnsignedRem, awaited, n_places));
            let phase = m.binary(SsaOp::And, m.binary(SsaOp::UnsignedDiv, awaited, n_places), m.int32(1));
            g.wait_for_phase(barrier, phase);
        });
    }

    /// Arrives at an mbarrier.
    pub(in crate::generate) fn arrive(&self, barrier: Id) {
        self.effect("mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}", &[barrier]);
    }

    /// Waits for the end of an mbarrier phase with the given parity. A timeout stops the kernel with an
    /// error, as the process would otherwise lose the device.
    pub(in crate::generate) fn wait_for_phase(&mut self, barrier: Id, phase: Id) {
        let since = self.hoisted(0, |g| g.m.variable(Type::I64, 8));
        self.m.store(self.m.int(0), since, 8);
        let [again, late, stuck, done] = [0; 4].map(|_| self.m.block(self.f.id));
        self.m.br(again);
        self.go_to_end(again);
        let text = "mbarrier.try_wait.parity.shared::cta.b64 $0, [$1], $2;".to_owned();
        let wait = Assembly { text, constraints: "=b,r,r,~{memory}".into() };
        let has_come = self.m.assembly(wait, &[barrier, phase], Type::I1);
        self.m.cond_br(has_come, done, late);
        self.go_to_end(late);
        let m = &self.m;
        let clock = Assembly { text: "mov.u64 $0, %globaltimer;".to_owned(), constraints: "=l".into() };
        let now = m.assembly(clock, &[], Type::I64);
        let before = m.load(Type::I64, since, 8, false);
        let is_first = m.compare(Compare::Equal, before, m.int(0));
        let began = m.select(is_first, now, before);
        m.store(began, since, 8);
        let is_stuck = m.compare(Compare::Greater, m.binary(SsaOp::SubWrapping, now, began), m.int(LONGEST_WAIT));
        m.cond_br(is_stuck, stuck, again);
        self.go_to_end(stuck);
        self.effect("trap;", "", &[]);
        self.m.br(again);
        self.go_to_end(done);
    }

    /// Whether only box copies fill a buffer.
    pub(in crate::generate) fn is_for_boxes(&self, buffer: BufferId) -> bool {
        self.f.tma.is_some() && self.program.buffer(buffer).scope.is_tma()
    }
}
