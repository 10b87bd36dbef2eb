//! Confidence intervals of the ratio of two contestants, by Wilcoxon's signed-rank test on paired log-ratios.

/// Distribution of Wilcoxon's signed-rank statistic of `n` pairs if each sign is a fair coin flip.
#[derive(Debug, Clone)]
pub(super) struct SignedRank {
    n: usize,
    /// Probability of each value, from 0 to n (n + 1) / 2.
    probabilities: Vec<f64>,
}

impl SignedRank {
    /// Distribution for no pairs.
    pub fn new() -> SignedRank {
        SignedRank { n: 0, probabilities: vec![1.0] }
    }

    /// Distribution for `n` pairs.
    pub fn of(n: usize) -> SignedRank {
        let mut law = SignedRank::new();
        (0..n).for_each(|_| law.advance());
        law
    }

    /// Adds a pair.
    ///
    /// # Cost
    /// Proportional to the square of the number of pairs.
    pub fn advance(&mut self) {
        self.n += 1;
        let n_values = self.probabilities.len();
        self.probabilities.resize(n_values + self.n, 0.0);
        for value in (0..self.probabilities.len()).rev() {
            let with_rank = if value >= self.n { self.probabilities[value - self.n] } else { 0.0 };
            self.probabilities[value] = (self.probabilities[value] + with_rank) / 2.0;
        }
    }

    /// Number of values, counted from 0, whose total probability is at most `error`.
    fn n_unlikely(&self, error: f64) -> usize {
        let mut sum = 0.0;
        let is_within = |p: &&f64| {
            sum += **p;
            sum <= error
        };
        self.probabilities.iter().take_while(is_within).count()
    }

    /// Confidence interval of the median of paired differences, one per pair: the values that the test does
    /// not reject. Each end is wrong with a probability of at most `error`, and infinite if there are too few
    /// pairs.
    ///
    /// # Panics
    /// If the number of differences differs from the number of pairs.
    pub fn interval(&self, differences: &[f64], error: f64) -> Interval {
        assert_eq!(differences.len(), self.n, "invariant: there is a difference for each pair");
        let mut averages: Vec<f64> = Vec::with_capacity(self.probabilities.len());
        for (at, one) in differences.iter().enumerate() {
            averages.extend(differences[at..].iter().map(|other| one / 2.0 + other / 2.0));
        }
        let n = averages.len();
        if n == 0 {
            return Interval { low: f64::NEG_INFINITY, middle: 0.0, high: f64::INFINITY };
        }
        let mut at = |place: usize| *averages.select_nth_unstable_by(place, f64::total_cmp).1;
        let middle = at((n - 1) / 2) / 2.0 + at(n / 2) / 2.0;
        match self.n_unlikely(error) {
            0 => Interval { low: f64::NEG_INFINITY, middle, high: f64::INFINITY },
            k => Interval { low: at(k - 1), middle, high: at(n - k) },
        }
    }
}

/// Estimate of a log-ratio between the ends of its confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Interval {
    pub low: f64,
    /// Hodges-Lehmann estimate.
    pub middle: f64,
    pub high: f64,
}

/// Rounds before the first look at the results.
const FIRST_LOOK: usize = 10;

/// Schedule of interim looks at the results, each after half as many rounds again as the previous one. Their
/// error rates add up to that of the race, however many there are: the k-th gets 1 / (k (k + 1)) of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Looks {
    /// Error rate of one question over all interim looks.
    pub error: f64,
    /// Number of looks so far.
    n: usize,
    /// Number of rounds at the last look.
    last: usize,
    next: usize,
}

impl Looks {
    pub fn new(error: f64) -> Looks {
        Looks { error, n: 0, last: 0, next: FIRST_LOOK }
    }

    /// Error rate to spend on an interim look after this many rounds; `None` if no look is due. One is always
    /// due at the end.
    pub fn look(&mut self, n_rounds: usize, is_end: bool) -> Option<f64> {
        if n_rounds == self.last || n_rounds < self.next && !is_end {
            return None;
        }
        self.n += 1;
        self.last = n_rounds;
        self.next = n_rounds + n_rounds.div_ceil(2);
        Some(self.error / (self.n * (self.n + 1)) as f64)
    }

    /// Minimum number of rounds after which a question can be answered.
    pub fn least_rounds(error: f64) -> usize {
        (1..).find(|&n| 0.5f64.powi(n) <= error / 2.0).unwrap_or(1) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distribution_is_that_of_all_signs() {
        for n in 0..=12 {
            let mut counts = vec![0u32; n * (n + 1) / 2 + 1];
            for signs in 0..1u32 << n {
                counts[(1..=n).filter(|rank| signs >> (rank - 1) & 1 == 1).sum::<usize>()] += 1;
            }
            let law = SignedRank::of(n);
            let expected: Vec<f64> = counts.iter().map(|&count| f64::from(count) / f64::from(1u32 << n)).collect();
            assert_eq!(law.probabilities, expected, "{n}");
        }
    }

    #[test]
    fn intervals_are_those_of_tables() {
        // Wilcoxon's table: for 10 pairs at 5 %, two-sided, values of 8 and less are rejected.
        let law = SignedRank::of(10);
        assert_eq!(law.n_unlikely(0.025), 9);
        let differences: Vec<f64> = (1..=10).map(f64::from).collect();
        let interval = law.interval(&differences, 0.025);
        assert_eq!(interval.middle, 5.5);
        assert!(interval.low > 2.5 && interval.low < 4.0 && interval.low + interval.high == 11.0, "{interval:?}");
        let few = SignedRank::of(5).interval(&differences[..5], 0.01);
        assert_eq!((few.low, few.middle, few.high), (f64::NEG_INFINITY, 3.0, f64::INFINITY));
        let none = SignedRank::new().interval(&[], 0.01);
        assert_eq!(none.middle, 0.0);
    }

    #[test]
    fn the_errors_of_all_looks_add_up() {
        let mut looks = Looks::new(0.01);
        let shares: Vec<f64> = (1..=1000).filter_map(|n| looks.look(n, n == 1000)).collect();
        assert!(shares.iter().sum::<f64>() <= 0.01 && shares[0] == 0.005, "{shares:?}");
        assert_eq!((shares.len(), looks.look(1000, true)), (13, None));
        assert_eq!((Looks::least_rounds(0.01), Looks::least_rounds(0.005)), (8, 9));
    }
}
