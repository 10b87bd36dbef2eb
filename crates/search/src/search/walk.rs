//! Distribution of the q-random walk over the values of a parameter.

use rand::RngExt;
use rand::seq::IndexedRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::space::Space;

/// Draws the end of a random walk from `rank` that with probability `q`, which is below 1, moves to a
/// neighbour, each with equal probability, and stops otherwise. At a value without neighbours the walk stays.
///
/// # Source
/// OpEvo, section 4.3: the end points are distributed as `(1 − q)(I − qW)⁻¹`, W being the uniform random
/// walk.
pub(super) fn q_random_walk(
    space: &Space,
    parameter: usize,
    mut rank: u64,
    q: f64,
    rng: &mut Xoshiro256PlusPlus,
) -> u64 {
    while rng.random_bool(q) {
        match space.rank_neighbours(parameter, rank).choose(rng) {
            Some(&neighbour) => rank = neighbour,
            None => break,
        }
    }
    rank
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;
    use crate::space::Parameter;

    /// Computes the row of `(1 − q)(I − qW)⁻¹` for one start, by summing its series.
    fn closed_form(space: &Space, start: u64, q: f64) -> Vec<f64> {
        let n = space.n_values(0) as usize;
        let mut at = vec![0.0; n];
        at[start as usize] = 1.0;
        let mut ends = vec![0.0; n];
        for _ in 0..200 {
            let mut next = vec![0.0; n];
            for (rank, mass) in at.iter().enumerate() {
                ends[rank] += (1.0 - q) * mass;
                let around = space.rank_neighbours(0, rank as u64);
                around.iter().for_each(|&v| next[v as usize] += q * mass / around.len() as f64);
            }
            at = next;
        }
        ends
    }

    #[test]
    fn end_points_are_distributed_as_the_closed_form() {
        let space = Space::new("walk", vec![Parameter::factorization("f", 8, 3)], vec![]).unwrap();
        assert_eq!(space.size(), 10);
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        for q in [0.3, 0.5, 0.8] {
            for start in 0..10 {
                let expected = closed_form(&space, start, q);
                assert!((expected.iter().sum::<f64>() - 1.0).abs() < 1e-9, "total mass 1");
                let n_walks = 20_000;
                let mut counts = [0.0; 10];
                for _ in 0..n_walks {
                    counts[q_random_walk(&space, 0, start, q, &mut rng) as usize] += 1.0;
                }
                let expected = expected.iter().map(|p| p * f64::from(n_walks));
                let chi_square: f64 = counts.iter().zip(expected).map(|(c, e)| (c - e) * (c - e) / e).sum();
                // The 99.99 % quantile of 9 degrees of freedom; the seed is fixed.
                assert!(chi_square < 33.7, "q {q}, start {start}: chi-square {chi_square}");
            }
        }
    }

    #[test]
    fn a_walk_without_anywhere_to_go_stays() {
        let space = Space::new("walk", vec![Parameter::ordinal("one", [7])], vec![]).unwrap();
        assert_eq!(q_random_walk(&space, 0, 0, 0.99, &mut Xoshiro256PlusPlus::seed_from_u64(1)), 0);
    }
}
