//! Factorizations: ordered tuples of positive integers with a given product, numbered without a table.
//!
//! A factorization of `n = Π p^a` into `d` parts is one composition of each exponent `a` into `d` parts, so
//! its rank is a mixed-radix number whose digits are the ranks of the compositions. Compositions are ranked
//! in descending lexicographic order through the combinatorial number system; rank 0 is `[n, 1, …, 1]`, no
//! tiling.

/// Prime powers of a number: `(prime, exponent)` in ascending order of the prime.
#[derive(Debug, Clone)]
pub(super) struct Primes(Vec<(u64, u32)>);

impl Primes {
    /// Returns the prime powers of `n`, which is at least 1, by trial division: O(√n).
    pub(super) fn of(mut n: u64) -> Primes {
        let mut powers = Vec::new();
        let mut prime = 2;
        while prime <= n / prime {
            let exponent = strip(&mut n, prime);
            if exponent > 0 {
                powers.push((prime, exponent));
            }
            prime += 1;
        }
        if n > 1 {
            powers.push((n, 1));
        }
        Primes(powers)
    }

    /// Returns the prime powers, in ascending order of the prime.
    pub(super) fn powers(&self) -> &[(u64, u32)] {
        &self.0
    }

    /// Number of factorizations into `parts`: Π C(a + parts − 1, parts − 1); `None` above `u64::MAX`.
    pub(super) fn count(&self, parts: usize) -> Option<u64> {
        self.0.iter().try_fold(1u64, |count, &(_, a)| count.checked_mul(compositions(a, parts)?))
    }

    /// Returns the factors of the factorization with this rank.
    pub(super) fn unrank(&self, parts: usize, mut rank: u64) -> Vec<u64> {
        let mut factors = vec![1; parts];
        for &(prime, a) in self.0.iter().rev() {
            let radix = radix(a, parts);
            for (factor, exponent) in factors.iter_mut().zip(composition(a, parts, rank % radix)) {
                *factor *= prime.pow(exponent);
            }
            rank /= radix;
        }
        factors
    }

    /// Returns the rank of these factors, or `None` if their product is another number.
    pub(super) fn rank(&self, factors: &[u64]) -> Option<u64> {
        let mut rest = factors.to_vec();
        let mut rank = 0;
        for &(prime, a) in &self.0 {
            // Zero is divisible by a prime infinitely often.
            let exponents: Vec<u32> = rest.iter_mut().map(|f| if *f == 0 { 0 } else { strip(f, prime) }).collect();
            if exponents.iter().sum::<u32>() != a {
                return None;
            }
            rank = rank * radix(a, factors.len()) + composition_rank(a, &exponents);
        }
        rest.iter().all(|&factor| factor == 1).then_some(rank)
    }

    /// Returns the ranks of the factorizations that differ by one prime factor moved from one part to
    /// another.
    pub(super) fn neighbours(&self, parts: usize, rank: u64) -> Vec<u64> {
        let mut neighbours = Vec::new();
        let mut weight = 1;
        for &(_, a) in self.0.iter().rev() {
            let radix = radix(a, parts);
            let digit = rank / weight % radix;
            let mut exponents = composition(a, parts, digit);
            for from in 0..parts {
                for to in (0..parts).filter(|&to| to != from) {
                    if exponents[from] == 0 {
                        continue;
                    }
                    exponents[from] -= 1;
                    exponents[to] += 1;
                    neighbours.push(rank - digit * weight + composition_rank(a, &exponents) * weight);
                    exponents[from] += 1;
                    exponents[to] -= 1;
                }
            }
            weight *= radix;
        }
        neighbours
    }
}

/// Divides `n` by `prime` as often as possible and returns the number of divisions.
fn strip(n: &mut u64, prime: u64) -> u32 {
    let mut exponent = 0;
    while n.is_multiple_of(prime) {
        *n /= prime;
        exponent += 1;
    }
    exponent
}

/// C(n, k), or `None` above `u64::MAX`. Every partial product is itself a binomial coefficient below the
/// result.
fn binomial(n: u64, k: u64) -> Option<u64> {
    (0..k.min(n - k)).try_fold(1u64, |c, i| u64::try_from(u128::from(c) * u128::from(n - i) / u128::from(i + 1)).ok())
}

/// Number of compositions of `a` into `parts` non-negative parts.
fn compositions(a: u32, parts: usize) -> Option<u64> {
    binomial(u64::from(a) + parts as u64 - 1, u64::from(a))
}

/// [`compositions`] in a space whose size has been checked.
fn radix(a: u32, parts: usize) -> u64 {
    compositions(a, parts).expect("invariant: the count of the whole factorization fits in 64 bits")
}

/// Number of compositions that come before those that leave `rest` to the `parts` parts on the right.
fn before(rest: u32, parts: usize) -> u64 {
    if rest == 0 { 0 } else { radix(rest - 1, parts + 1) }
}

fn composition_rank(a: u32, exponents: &[u32]) -> u64 {
    let mut rest = a;
    let right = (1..exponents.len()).rev();
    exponents.iter().zip(right).fold(0, |rank, (exponent, right)| {
        rest -= exponent;
        rank + before(rest, right)
    })
}

fn composition(a: u32, parts: usize, mut rank: u64) -> Vec<u32> {
    let mut rest = a;
    let mut exponents = Vec::with_capacity(parts);
    for right in (1..parts).rev() {
        let left_over = (0..=rest).rev().find(|&r| before(r, right) <= rank).expect("invariant: before(0) is 0");
        rank -= before(left_over, right);
        exponents.push(rest - left_over);
        rest = left_over;
    }
    exponents.push(rest);
    exponents
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn check(n: u64, parts: usize, expected: u64) {
        let primes = Primes::of(n);
        assert_eq!(primes.count(parts), Some(expected), "factorization({n}, {parts})");
        if expected < 100_000 {
            let all: HashSet<Vec<u64>> = (0..expected).map(|rank| primes.unrank(parts, rank)).collect();
            assert_eq!(all.len() as u64, expected);
            assert!(all.iter().all(|factors| factors.iter().product::<u64>() == n));
        }
    }

    #[test]
    fn counts_are_products_of_binomials() {
        check(1, 4, 1);
        check(7, 1, 1);
        check(512, 4, 220);
        check(1024, 4, 286);
        check(2048, 2, 12);
        check(56, 4, 80);
        check(1009, 3, 3);
        check((1 << 30) * 243, 6, 324_632 * 252);
        assert_eq!(Primes::of(1 << 60).count(1 << 40), None);
    }

    #[test]
    fn rank_zero_is_no_tiling() {
        assert_eq!(Primes::of(360).unrank(4, 0), [360, 1, 1, 1]);
    }

    #[test]
    fn neighbours_move_one_prime() {
        let primes = Primes::of(12);
        let rank = primes.rank(&[6, 2]).unwrap();
        let mut around: Vec<_> = primes.neighbours(2, rank).into_iter().map(|rank| primes.unrank(2, rank)).collect();
        around.sort();
        assert_eq!(around, [[2, 6], [3, 4], [12, 1]]);
    }

    #[test]
    fn other_products_have_no_rank() {
        let primes = Primes::of(12);
        for factors in [[3, 5], [0, 12], [12, 2], [6, 1]] {
            assert_eq!(primes.rank(&factors), None, "{factors:?}");
        }
    }

    proptest! {
        #[test]
        fn unrank_is_the_inverse_of_rank(n in 1u64..1 << 40, parts in 1usize..7, seed: u64) {
            let primes = Primes::of(n);
            let rank = seed % primes.count(parts).unwrap();
            let factors = primes.unrank(parts, rank);
            prop_assert_eq!(factors.iter().product::<u64>(), n);
            prop_assert_eq!(primes.rank(&factors), Some(rank));
            for neighbour in primes.neighbours(parts, rank) {
                prop_assert!(primes.neighbours(parts, neighbour).contains(&rank));
            }
        }
    }
}
