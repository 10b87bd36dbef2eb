//! Memory planning: layout of blocks with limited lifetimes in an arena.

use crate::memory::ALIGN;

/// Block of memory that is live over a range of steps, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Size in bytes.
    pub bytes: usize,
    /// First step that writes it.
    pub first: usize,
    /// Last step that uses it.
    pub last: usize,
}

impl Block {
    fn lives_with(&self, other: &Block) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Layout of an arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArenaLayout {
    /// Offset of each block in bytes, a multiple of 64.
    pub offsets: Vec<usize>,
    /// Size of the arena in bytes.
    pub total: usize,
    /// Lower bound of the size: the largest sum of blocks live at the same time, each padded to cache lines.
    pub bound: usize,
}

/// Budget of a layout, in comparisons of two blocks: some tens of milliseconds.
const COMPARISONS: usize = 20_000_000;
/// Maximum number of orders that are tried.
const ORDERS: usize = 200;

/// Lays blocks out so that no two that are live at the same time overlap: each goes into the smallest gap
/// that fits, or above the blocks it overlaps in time. Several orders are tried until one meets the lower
/// bound: by size; by breadth (the total size live at the same time, largest first); then these orders with
/// the blocks at the end of the arena moved forward.
///
/// # Cost
/// Quadratic in the number of blocks for each order; fewer orders are tried for many blocks.
///
/// # Source
/// Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, arXiv 2001.03288, greedy
/// by size and by breadth.
pub fn plan_memory(blocks: &[Block]) -> ArenaLayout {
    let sizes: Vec<usize> = blocks.iter().map(|block| block.bytes.next_multiple_of(ALIGN)).collect();
    let bound = bound(blocks, &sizes);
    let mut by_size: Vec<usize> = (0..blocks.len()).collect();
    by_size.sort_by_key(|&at| (std::cmp::Reverse(sizes[at]), blocks[at].first));
    let mut best = ArenaLayout { offsets: place(blocks, &sizes, &by_size), total: 0, bound };
    best.total = end(&best.offsets, &sizes);
    if best.total == bound {
        return best;
    }
    let n_orders = (COMPARISONS / blocks.len().pow(2)).min(ORDERS);
    for mut order in [by_breadth(blocks, &sizes, &by_size), by_size] {
        for _ in 0..n_orders / 2 {
            let offsets = place(blocks, &sizes, &order);
            let total = end(&offsets, &sizes);
            // Blocks at the end of the arena get better places the earlier they come.
            let is_last = |at: &usize| offsets[*at] + sizes[*at] == total;
            let last = order.iter().position(is_last).unwrap_or_default();
            let at = order.remove(last);
            order.insert(last / 2, at);
            if total < best.total {
                best = ArenaLayout { offsets, total, bound };
            }
            if best.total == bound {
                return best;
            }
        }
    }
    best
}

/// Orders blocks by breadth: first those live at the step with the largest total size, and so on; for each
/// step by size.
fn by_breadth(blocks: &[Block], sizes: &[usize], by_size: &[usize]) -> Vec<usize> {
    let mut steps: Vec<(usize, usize)> = Vec::with_capacity(blocks.len());
    for block in blocks {
        let alive = by_size.iter().filter(|&&at| blocks[at].first <= block.first && block.first <= blocks[at].last);
        steps.push((alive.map(|&at| sizes[at]).sum(), block.first));
    }
    steps.sort_unstable_by_key(|&(sum, step)| (std::cmp::Reverse(sum), step));
    steps.dedup();
    let mut is_taken = vec![false; blocks.len()];
    let mut order = Vec::with_capacity(blocks.len());
    for (_, step) in steps {
        for &at in by_size {
            if !is_taken[at] && blocks[at].first <= step && step <= blocks[at].last {
                is_taken[at] = true;
                order.push(at);
            }
        }
    }
    order
}

/// Offsets of the blocks when they are laid out in this order.
fn place(blocks: &[Block], sizes: &[usize], order: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0usize; blocks.len()];
    // Blocks that have been placed, by offset.
    let mut placed: Vec<usize> = Vec::new();
    for &at in order {
        let (mut end, mut best) = (0usize, None::<(usize, usize)>);
        for &other in placed.iter().filter(|&&other| blocks[other].lives_with(&blocks[at])) {
            let gap = offsets[other].saturating_sub(end);
            if gap >= sizes[at] && best.is_none_or(|(least, _)| gap < least) {
                best = Some((gap, end));
            }
            end = end.max(offsets[other] + sizes[other]);
        }
        offsets[at] = best.map_or(end, |(_, offset)| offset);
        let rank = placed.partition_point(|&other| offsets[other] <= offsets[at]);
        placed.insert(rank, at);
    }
    offsets
}

/// End of the last block.
fn end(offsets: &[usize], sizes: &[usize]) -> usize {
    offsets.iter().zip(sizes).map(|(offset, size)| offset + size).max().unwrap_or(0)
}

/// Computes the lower bound: the largest sum of the sizes of blocks live at the same time.
fn bound(blocks: &[Block], sizes: &[usize]) -> usize {
    let mut changes: Vec<(usize, bool, usize)> = Vec::with_capacity(2 * blocks.len());
    for (block, size) in blocks.iter().zip(sizes) {
        changes.push((block.first, true, *size));
        changes.push((block.last + 1, false, *size));
    }
    // Ends come before beginnings.
    changes.sort_unstable();
    let (mut alive, mut most) = (0, 0);
    for (_, begins, size) in changes {
        alive = if begins { alive + size } else { alive - size };
        most = most.max(alive);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(bytes: usize, first: usize, last: usize) -> Block {
        Block { bytes, first, last }
    }

    #[test]
    fn chains_need_two_neighbours() {
        // As in a network: every step reads the result of the previous one.
        let blocks: Vec<Block> =
            [640, 1280, 320, 960, 64].iter().zip(0..).map(|(b, at)| block(*b, at, at + 1)).collect();
        let memory = plan_memory(&blocks);
        assert_eq!((memory.total, memory.bound), (1920, 1920));
    }

    #[test]
    fn the_smallest_gap_is_taken() {
        // Gaps of 256 and 128 bytes at step 1; 100 bytes fit both.
        let blocks = [block(1024, 0, 1), block(256, 0, 0), block(1000, 0, 1), block(128, 0, 0), block(960, 0, 1)];
        let memory = plan_memory(&[&blocks[..], &[block(100, 1, 1)]].concat());
        assert_eq!(memory.total, memory.bound);
        assert_eq!(plan_memory(&[]), ArenaLayout::default());
        assert_eq!(plan_memory(&[block(0, 0, 3)]).total, 0);
    }

    proptest! {
        #[test]
        fn what_lives_at_the_same_time_overlaps_nowhere(
            given in prop::collection::vec((0usize..3000, 0usize..40, 0usize..12), 0..60)
        ) {
            let blocks: Vec<Block> = given.iter().map(|&(bytes, first, n)| block(bytes, first, first + n)).collect();
            let memory = plan_memory(&blocks);
            prop_assert!(memory.total >= memory.bound);
            let mut bound = 0;
            for step in 0..60 {
                let alive: Vec<usize> =
                    (0..blocks.len()).filter(|&at| blocks[at].first <= step && step <= blocks[at].last).collect();
                bound = bound.max(alive.iter().map(|&at| blocks[at].bytes.next_multiple_of(ALIGN)).sum());
                let mut ranges: Vec<(usize, usize)> =
                    alive.iter().map(|&at| (memory.offsets[at], memory.offsets[at] + blocks[at].bytes)).collect();
                ranges.retain(|(start, end)| start < end);
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                prop_assert!(ranges.iter().all(|(start, end)| start % ALIGN == 0 && *end <= memory.total));
            }
            prop_assert_eq!(memory.bound, bound);
        }
    }
}
