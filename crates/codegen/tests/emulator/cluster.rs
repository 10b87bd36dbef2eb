//! Clusters of blocks, which access each other's shared memory.
//!
//! Each block of a cluster has a separate address window for its shared memory. Blocks run in turn, each
//! until it needs the others; the others then receive its effects.

use super::bulk::Coming;
use super::{Block, Memory, Order, Stop, Thread};

/// Distance between the windows of two blocks.
const WINDOW: u64 = 1 << 24;
/// Exceeds the number of threads of a block, to number the threads of a cluster.
pub const BLOCK: u32 = 1 << 16;

/// Effect of a block on another one of its cluster.
pub enum Sent {
    /// Arrival of a thread, numbered in the cluster, at the mbarrier at a position.
    Arrival {
        at: usize,
        who: u32,
    },
    Box(Coming),
}

/// First address of a block's shared memory, which is nonzero in a cluster.
pub fn window(n: u32, rank: u32) -> u64 {
    if n == 1 { 0 } else { u64::from(rank + 1) * WINDOW }
}

/// Rank of the block at an address of a cluster's shared memory, and the position there.
pub fn of_address(address: u64) -> (usize, usize) {
    ((address / WINDOW).saturating_sub(1) as usize, (address % WINDOW) as usize)
}

impl Block<'_> {
    /// Rank of the block in its cluster.
    pub fn rank(&self) -> u32 {
        self.place[0] % self.entry.cluster
    }

    /// Address in another block of the cluster that corresponds to an address in this block.
    pub fn place_there(&self, address: u64, rank: u64) -> Result<u64, String> {
        let n = self.entry.cluster;
        if n == 1 || rank >= u64::from(n) {
            return Err(format!("there is no block {rank} in a cluster of {n}"));
        }
        Ok(self.position(address)? as u64 + window(n, rank as u32))
    }
}

/// Timeout in emulated seconds without progress, after which a kernel is considered hanging.
const MOST_SECONDS: u32 = 20;

/// Runs the blocks of a cluster.
pub fn run(mut blocks: Vec<Block<'_>>, memory: &mut Memory, order: Order) -> Result<(), String> {
    let n_threads = blocks[0].threads.len();
    let threads: Vec<usize> = match order {
        Order::Ascending => (0..n_threads).collect(),
        Order::Descending => (0..n_threads).rev().collect(),
        Order::Strided(step) => (0..step).flat_map(|first| (first..n_threads).step_by(step)).collect(),
    };
    let mut ranks: Vec<usize> = (0..blocks.len()).collect();
    if matches!(order, Order::Descending) {
        ranks.reverse();
    }
    let (mut n_passed, mut n_seconds) = (0, 0);
    loop {
        let mut has_moved = false;
        for &rank in &ranks {
            let block = &mut blocks[rank];
            if block.is_over {
                continue;
            }
            let place = block.place;
            std::mem::swap(&mut block.memory, memory);
            let done = block.advance(&threads);
            std::mem::swap(&mut block.memory, memory);
            done.map_err(|why| format!("block {place:?}: {why}"))?;
            has_moved |= block.is_over;
            for (to, sent) in std::mem::take(&mut block.sent) {
                has_moved = true;
                let there = blocks.get_mut(to).ok_or_else(|| format!("block {place:?}: there is no block {to}"))?;
                there.receive(sent).map_err(|why| format!("block {:?}: {why}", there.place))?;
            }
        }
        // Finished threads count as arrived.
        let arrives = |t: &Thread| t.n_arrivals > n_passed || t.stop == Some(Stop::Exit);
        let waits = |t: &Thread| t.stop == Some(Stop::Cluster);
        let mut all = blocks.iter().flat_map(|block| &block.threads);
        if all.all(arrives) && blocks.iter().flat_map(|block| &block.threads).any(waits) {
            let waiting = blocks.iter_mut().flat_map(|block| &mut block.threads).filter(|t| waits(t));
            waiting.for_each(|t| t.stop = None);
            (n_passed, has_moved) = (n_passed + 1, true);
        }
        if blocks.iter().all(|block| block.is_over) {
            return Ok(());
        }
        if !has_moved {
            n_seconds += 1;
            if n_seconds > MOST_SECONDS {
                return Err("threads wait for what never comes".into());
            }
            blocks.iter_mut().for_each(Block::wait);
        }
    }
}
