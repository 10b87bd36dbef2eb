//! Where blocks of memory that live for a while lie in one arena.

use crate::memory::ALIGN;

/// Memory that lives from one step to another, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its size.
    pub bytes: usize,
    /// The step that writes it first.
    pub first: usize,
    /// The last step that uses it.
    pub last: usize,
}

impl Block {
    fn lives_with(&self, other: &Block) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// An arena's layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Where each block begins, a multiple of 64.
    pub offsets: Vec<usize>,
    /// The arena's size.
    pub total: usize,
    /// The largest sum of the sizes, in whole lines, of blocks that live at the same time: no layout is
    /// smaller.
    pub bound: usize,
}

/// Lays blocks out so that no two that live at the same time overlap: the largest first, each in the smallest
/// gap that it fits, else above those it lives with.
///
/// # Cost
/// Quadratic in the number of blocks; a thousand take some milliseconds.
///
/// # Source
/// Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, arXiv 2001.03288, greedy
/// by size.
pub fn plan_memory(blocks: &[Block]) -> Memory {
    let sizes: Vec<usize> = blocks.iter().map(|block| block.bytes.next_multiple_of(ALIGN)).collect();
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(sizes[at]), blocks[at].first));
    let mut offsets = vec![0usize; blocks.len()];
    // Those that have a place, by their offsets.
    let mut placed: Vec<usize> = Vec::new();
    for at in order {
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
    let total = (0..blocks.len()).map(|at| offsets[at] + sizes[at]).max().unwrap_or(0);
    Memory { offsets, total, bound: bound(blocks, &sizes) }
}

/// Most blocks begin to live where the sum is largest, so that only these steps are looked at.
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
        // As in a network: every step reads what the one before wrote.
        let blocks: Vec<Block> =
            [640, 1280, 320, 960, 64].iter().zip(0..).map(|(b, at)| block(*b, at, at + 1)).collect();
        let memory = plan_memory(&blocks);
        assert_eq!((memory.total, memory.bound), (1920, 1920));
    }

    #[test]
    fn the_smallest_gap_is_taken() {
        // Gaps of 256 and of 128 bytes at step 1; 100 bytes fit both.
        let blocks = [block(1024, 0, 1), block(256, 0, 0), block(1000, 0, 1), block(128, 0, 0), block(960, 0, 1)];
        let memory = plan_memory(&[&blocks[..], &[block(100, 1, 1)]].concat());
        assert_eq!(memory.total, memory.bound);
        assert_eq!(plan_memory(&[]), Memory::default());
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
