//! Permutations numbered by their Lehmer code; rank 0 is the order as declared.

/// `n!`, or `None` above `u64::MAX`.
pub(super) fn count(n: usize) -> Option<u64> {
    (1..=n as u64).try_fold(1u64, u64::checked_mul)
}

/// Returns the permutation of `0..n` with this rank.
pub(super) fn unrank(n: usize, mut rank: u64) -> Vec<usize> {
    let mut left: Vec<usize> = (0..n).collect();
    (0..n)
        .rev()
        .map(|after| {
            let weight = count(after).expect("invariant: the count of the permutations fits in 64 bits");
            let position = rank / weight;
            rank %= weight;
            left.remove(position as usize)
        })
        .collect()
}

/// Returns the rank of a permutation of `0..order.len()`.
pub(super) fn rank(order: &[usize]) -> u64 {
    (0..order.len()).fold(0, |rank, i| {
        let smaller = order[i + 1..].iter().filter(|&&later| later < order[i]).count();
        rank * (order.len() - i) as u64 + smaller as u64
    })
}

/// Returns the ranks of the permutations that differ by the swap of two adjacent entries.
pub(super) fn neighbours(n: usize, rank_here: u64) -> Vec<u64> {
    let mut order = unrank(n, rank_here);
    (1..n)
        .map(|i| {
            order.swap(i - 1, i);
            let neighbour = rank(&order);
            order.swap(i - 1, i);
            neighbour
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_a_bijection() {
        for n in 1..7 {
            let mut previous = None;
            for r in 0..count(n).unwrap() {
                let order = unrank(n, r);
                assert_eq!(rank(&order), r);
                assert!(previous < Some(order.clone()), "lexicographic order");
                previous = Some(order);
            }
        }
    }

    #[test]
    fn neighbours_swap_adjacent_entries() {
        let around: Vec<_> = neighbours(3, rank(&[2, 0, 1])).into_iter().map(|r| unrank(3, r)).collect();
        assert_eq!(around, [[0, 2, 1], [2, 1, 0]]);
    }
}
