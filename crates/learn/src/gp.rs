//! Gaussian process regression: predictions with a standard deviation, from few examples.

use crate::matrix::Matrix;
use crate::simd::{exp, wide};

/// Matérn kernel with ν = 5/2 and automatic relevance determination: a correlation of the distance `√Σ (rate
/// · (x − z))²` over the columns, with a rate (inverse length scale) for each group of columns.
///
/// # Source
/// Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), sections 4.2 and 5.4.
#[derive(Debug, Clone, PartialEq)]
pub struct Matern {
    /// Group of each column.
    groups: Vec<usize>,
    /// Logarithm of each group's rate, an inverse length.
    log_rates: Vec<f64>,
    /// Prior standard deviation of each of these logarithms.
    spreads: Vec<f64>,
    /// Logarithm of the ratio of the noise variance to the signal variance.
    log_noise: f64,
}

/// Prior mean of the logarithm of the noise: 5 % of the signal, up to a factor of e.
const PRIOR_LOG_NOISE: f64 = -6.0;
const PRIOR_LOG_NOISE_SPREAD: f64 = 2.0;
const LOG_NOISE_RANGE: [f64; 2] = [-9.0, 0.0];

impl Matern {
    /// Makes the kernel with prior length scales, for columns between 0 and 1, whose groups are numbered from
    /// 0. The prior standard deviation of the logarithm of a rate is 1.
    ///
    /// Columns that belong together, such as those of one category, are a group.
    pub fn new(groups: Vec<usize>) -> Matern {
        let n_groups = groups.iter().max().map_or(0, |&last| last + 1);
        let log_rates = vec![prior_log_rate(n_groups); n_groups];
        Matern { groups, log_rates, spreads: vec![1.0; n_groups], log_noise: PRIOR_LOG_NOISE }
    }

    /// Sets the prior standard deviation of the logarithm of each group's rate.
    ///
    /// # Panics
    /// If there is not one spread for each group.
    #[must_use]
    pub fn with_spreads(self, spreads: Vec<f64>) -> Matern {
        assert_eq!(spreads.len(), self.log_rates.len(), "invariant: a spread for each group");
        Matern { spreads, ..self }
    }

    /// Maximizes the marginal likelihood of these examples by coordinate search: a larger and a smaller value
    /// are tried for each parameter in turn. Further calls with more examples continue from the last values.
    ///
    /// # Panics
    /// If the rows do not have as many values as there are columns, or there is not one target for each row.
    ///
    /// # Cost
    /// O(groups · rows³).
    pub fn fit(&mut self, rows: &Matrix, targets: &[f64], step: f64) {
        assert_eq!(rows.n_rows(), targets.len(), "invariant: a target for each row");
        let targets: Vec<Option<f64>> = targets.iter().copied().map(Some).collect();
        let mut best = self.log_posterior(rows, &targets);
        for parameter in 0..=self.log_rates.len() {
            for direction in [step, -step] {
                let mut other = self.clone();
                match other.log_rates.get_mut(parameter) {
                    Some(log_rate) => *log_rate += direction,
                    None => {
                        let [least, most] = LOG_NOISE_RANGE;
                        other.log_noise = (other.log_noise + direction).clamp(least, most);
                    }
                }
                let posterior = other.log_posterior(rows, &targets);
                if posterior > best {
                    best = posterior;
                    *self = other;
                    break;
                }
            }
        }
    }

    /// Returns the logarithm of the targets' likelihood times the prior, up to a constant.
    fn log_posterior(&self, rows: &Matrix, targets: &[Option<f64>]) -> f64 {
        let mut process = GaussianProcess::new(self.clone());
        process.extend(rows.rows());
        process.log_likelihood(targets) + self.log_prior()
    }

    fn log_prior(&self) -> f64 {
        let prior = prior_log_rate(self.log_rates.len());
        let rates = self.log_rates.iter().zip(&self.spreads);
        let rates: f64 = rates.map(|(rate, spread)| ((rate - prior) / spread).powi(2)).sum();
        -0.5 * (rates + ((self.log_noise - PRIOR_LOG_NOISE) / PRIOR_LOG_NOISE_SPREAD).powi(2))
    }
}

/// Returns the rate of a length scale of half the diagonal of the unit cube: rows are neither all alike nor
/// all unrelated.
fn prior_log_rate(n_groups: usize) -> f64 {
    (2.0 / (n_groups.max(1) as f64).sqrt()).ln()
}

#[inline(always)]
fn matern(squared_distance: f64) -> f64 {
    let d = (5.0 * squared_distance).sqrt();
    (1.0 + d + d * d / 3.0) * exp((-d).max(-700.0))
}

/// Returns the square root of the rest of a diagonal element, which rounding must not reduce to 0.
fn pivot(rest: f64) -> f64 {
    rest.max(1e-12).sqrt()
}

#[inline(always)]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (a.chunks_exact(WIDTH), b.chunks_exact(WIDTH));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    let mut sums = [0.0; WIDTH];
    for (a, b) in a.zip(b) {
        for lane in 0..WIDTH {
            sums[lane] += a[lane] * b[lane];
        }
    }
    rest + sums.iter().sum::<f64>()
}

/// Gaussian process with mean 0, which is updated row by row.
///
/// The intermediate results for predicting a row depend on the known rows, not on their targets.
/// [`Candidates`] cache them and are updated by one step for each row that becomes known; and targets may
/// come later than their rows.
#[derive(Debug, Clone)]
pub struct GaussianProcess {
    kernel: Matern,
    /// Rate of each column.
    rates: Vec<f64>,
    /// Known rows, each value times its column's rate.
    rows: Vec<Vec<f64>>,
    /// Rows of the lower Cholesky factor of the correlations, each up to its diagonal.
    factor: Vec<Vec<f64>>,
}

/// Number of f64 values in a register.
const WIDTH: usize = 8;
/// Number of candidates in a block.
const N_LANES: usize = 4 * WIDTH;

/// Value of each candidate of a block, in enough registers that sums need not wait for each other.
type CandidateLanes = [[f64; WIDTH]; 4];

const ZEROS: CandidateLanes = [[0.0; WIDTH]; 4];

/// Adds to the sums of each candidate a term for each of its values and the corresponding number.
#[inline(always)]
fn sum_up(sums: &mut CandidateLanes, values: &[CandidateLanes], numbers: &[f64], add: impl Fn(f64, f64, f64) -> f64) {
    // One array for each register: an array that is indexed twice stays in memory.
    let [mut a, mut b, mut c, mut d] = *sums;
    for ([p, q, r, s], &number) in values.iter().zip(numbers) {
        for lane in 0..WIDTH {
            a[lane] = add(a[lane], p[lane], number);
            b[lane] = add(b[lane], q[lane], number);
            c[lane] = add(c[lane], r[lane], number);
            d[lane] = add(d[lane], s[lane], number);
        }
    }
    *sums = [a, b, c, d];
}

/// Rows whose targets are to be predicted, with cached intermediate results.
#[derive(Debug, Clone)]
pub struct Candidates {
    blocks: Vec<CandidateBlock>,
}

#[derive(Debug, Clone)]
struct CandidateBlock {
    /// Number of lanes in use.
    n: usize,
    /// Values of the rows, column by column, times the column's rate.
    columns: Vec<CandidateLanes>,
    /// Correlations with the known rows, divided by the factor.
    solved: Vec<CandidateLanes>,
    /// Share of the candidates' variance that the known rows explain.
    explained: CandidateLanes,
}

/// Targets of the known rows in solved form, with the maximum likelihood estimate of the signal variance.
#[derive(Debug, Clone)]
pub struct Solved {
    weights: Vec<f64>,
    standard_deviation: f64,
}

impl GaussianProcess {
    /// Process without known rows.
    pub fn new(kernel: Matern) -> GaussianProcess {
        let rates = kernel.groups.iter().map(|&group| kernel.log_rates[group].exp()).collect();
        GaussianProcess { kernel, rates, rows: Vec::new(), factor: Vec::new() }
    }

    /// Kernel of the process.
    pub fn kernel(&self) -> &Matern {
        &self.kernel
    }

    /// Returns the number of known rows.
    pub fn len(&self) -> usize {
        self.factor.len()
    }

    /// Whether no row is known.
    pub fn is_empty(&self) -> bool {
        self.factor.is_empty()
    }

    /// Appends known rows.
    ///
    /// # Panics
    /// If a row does not have as many values as there are columns.
    ///
    /// # Cost
    /// O(known rows²) for each.
    pub fn extend<'r>(&mut self, rows: impl IntoIterator<Item = &'r [f32]>) {
        let Candidates { blocks } = self.blocks(rows);
        for block in blocks {
            let n = block.n;
            let mut candidates = Candidates { blocks: vec![block] };
            for at in 0..n {
                self.update(&mut candidates);
                self.learn(&candidates, at);
            }
        }
    }

    /// Prepares rows for prediction.
    ///
    /// # Panics
    /// If a row does not have as many values as there are columns.
    ///
    /// # Cost
    /// O(known rows²) for each.
    pub fn candidates<'r>(&self, rows: impl IntoIterator<Item = &'r [f32]>) -> Candidates {
        let mut candidates = self.blocks(rows);
        self.update(&mut candidates);
        candidates
    }

    fn blocks<'r>(&self, rows: impl IntoIterator<Item = &'r [f32]>) -> Candidates {
        let mut rows = rows.into_iter().peekable();
        let mut blocks = Vec::new();
        while rows.peek().is_some() {
            let mut block =
                CandidateBlock { n: 0, columns: vec![ZEROS; self.rates.len()], solved: Vec::new(), explained: ZEROS };
            for row in rows.by_ref().take(N_LANES) {
                assert_eq!(row.len(), self.rates.len(), "invariant: a row has a value for each column");
                for ((column, x), rate) in block.columns.iter_mut().zip(row).zip(&self.rates) {
                    column[block.n / WIDTH][block.n % WIDTH] = rate * f64::from(*x);
                }
                block.n += 1;
            }
            blocks.push(block);
        }
        Candidates { blocks }
    }

    /// Appends the row of an updated candidate to the known rows.
    ///
    /// # Panics
    /// If there is no candidate at this position, or it is not updated.
    ///
    /// # Cost
    /// O(known rows).
    pub fn learn(&mut self, candidates: &Candidates, at: usize) {
        let (block, lane) = (&candidates.blocks[at / N_LANES], at % N_LANES);
        assert!(lane < block.n && block.solved.len() == self.len(), "invariant: there is such a candidate, updated");
        let of = |lanes: &CandidateLanes| lanes[lane / WIDTH][lane % WIDTH];
        let mut factor = Vec::with_capacity(self.len() + 1);
        factor.extend(block.solved.iter().map(of));
        factor.push(pivot(1.0 + self.kernel.log_noise.exp() - of(&block.explained)));
        self.factor.push(factor);
        self.rows.push(block.columns.iter().map(of).collect());
    }

    /// Updates candidates for the rows that became known since, which predictions require.
    ///
    /// # Panics
    /// If the candidates are of another process with other columns.
    ///
    /// # Cost
    /// O(known rows) for each candidate and each new row.
    pub fn update(&self, candidates: &mut Candidates) {
        wide(
            #[inline(always)]
            || {
                for block in &mut candidates.blocks {
                    self.update_block(block);
                }
            },
        );
    }

    #[inline(always)]
    fn update_block(&self, block: &mut CandidateBlock) {
        assert_eq!(block.columns.len(), self.rates.len(), "invariant: candidates are of this process");
        for at in block.solved.len()..self.len() {
            let mut squares = ZEROS;
            sum_up(&mut squares, &block.columns, &self.rows[at], |sum, x, z| sum + (x - z) * (x - z));
            let mut rest = ZEROS;
            for (rest, square) in rest.as_flattened_mut().iter_mut().zip(squares.as_flattened()) {
                *rest = matern(*square);
            }
            let (diagonal, factor) = self.factor[at].split_last().expect("invariant: it has a diagonal");
            sum_up(&mut rest, &block.solved, factor, |rest, solved, factor| rest - factor * solved);
            for (rest, explained) in rest.as_flattened_mut().iter_mut().zip(block.explained.as_flattened_mut()) {
                *rest /= diagonal;
                *explained += *rest * *rest;
            }
            block.solved.push(rest);
        }
    }

    /// Solves for targets, one for each known row in order. A missing target is replaced by the prediction of
    /// the rows before it, so that it reduces the variance around its row and changes no mean.
    ///
    /// # Panics
    /// If there is not one target for each known row.
    ///
    /// # Source
    /// Missing targets: Ginsbourger, Le Riche and Carraro (2010), the "kriging believer".
    pub fn solve(&self, targets: &[Option<f64>]) -> Solved {
        assert_eq!(targets.len(), self.len(), "invariant: a target for each known row");
        let mut weights: Vec<f64> = Vec::with_capacity(targets.len());
        wide(
            #[inline(always)]
            || {
                for (factor, target) in self.factor.iter().zip(targets) {
                    let at = weights.len();
                    weights.push(target.map_or(0.0, |target| (target - dot(&factor[..at], &weights)) / factor[at]));
                }
            },
        );
        let n_known = targets.iter().flatten().count().max(1);
        let standard_deviation = (dot(&weights, &weights) / n_known as f64).sqrt();
        Solved { weights, standard_deviation }
    }

    /// Returns the logarithm of the likelihood of targets, one for each known row in order, up to a constant.
    /// The variance of the signal is the most likely one.
    ///
    /// # Panics
    /// If there is not one target for each known row.
    fn log_likelihood(&self, targets: &[Option<f64>]) -> f64 {
        let n = targets.len() as f64;
        let log_determinant: f64 = self.factor.iter().flat_map(|factor| factor.last()).map(|x| x.ln()).sum();
        let variance = self.solve(targets).standard_deviation.powi(2);
        -0.5 * n * variance.max(f64::MIN_POSITIVE).ln() - log_determinant
    }

    /// Posterior means at the known rows, in order: the targets without noise. Missing targets count as in
    /// [`GaussianProcess::solve`].
    ///
    /// # Cost
    /// O(known rows²).
    pub fn means_of_rows(&self, targets: &Solved) -> Vec<f64> {
        let noise = self.kernel.log_noise.exp();
        // With correlations C and noise s the means are C · (C + s)⁻¹ · y = y − s · (C + s)⁻¹ · y.
        let mut rest = targets.weights.clone();
        let mut means = vec![0.0; rest.len()];
        wide(
            #[inline(always)]
            || {
                for (at, factor) in self.factor.iter().enumerate().take(rest.len()).rev() {
                    rest[at] /= factor[at];
                    let dual = rest[at];
                    for (rest, factor) in rest[..at].iter_mut().zip(factor) {
                        *rest -= dual * factor;
                    }
                    means[at] = dot(factor, &targets.weights[..=at]) - noise * dual;
                }
            },
        );
        means
    }

    /// Predictive means of updated candidates, in order. Rows that became known after the targets were solved
    /// count as missing.
    pub fn means(&self, candidates: &Candidates, targets: &Solved) -> Vec<f64> {
        let of_block = |block: &CandidateBlock| {
            let mut means = ZEROS;
            wide(
                #[inline(always)]
                || {
                    sum_up(&mut means, &block.solved, &targets.weights, |mean, solved, weight| mean + weight * solved);
                },
            );
            means.into_iter().flatten().take(block.n)
        };
        candidates.blocks.iter().flat_map(of_block).collect()
    }

    /// Predictive standard deviations of updated candidates, in order, without noise.
    pub fn standard_deviations<'c>(
        &self,
        candidates: &'c Candidates,
        targets: &Solved,
    ) -> impl Iterator<Item = f64> + use<'c> {
        let scale = targets.standard_deviation;
        let explained = candidates.blocks.iter().flat_map(|block| block.explained.as_flattened().iter().take(block.n));
        explained.map(move |explained| scale * (1.0 - explained).max(0.0).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    /// Rows whose targets depend on the first column alone.
    fn problem(n: usize, seed: u64) -> (Matrix, Vec<f64>) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let rows: Vec<[f32; 4]> = (0..n).map(|_| std::array::from_fn(|_| rng.random())).collect();
        let targets = rows.iter().map(|row| f64::from(3.0 * row[0]).sin() - 0.5).collect();
        (Matrix::from_rows(4, &rows), targets)
    }

    fn process(kernel: Matern, rows: &Matrix) -> GaussianProcess {
        let mut process = GaussianProcess::new(kernel);
        process.extend(rows.rows());
        process
    }

    /// Solves `matrix · x = right`, by elimination.
    fn eliminate(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
        let n = right.len();
        for i in 0..n {
            for j in (0..n).filter(|&j| j != i) {
                let factor = matrix[j][i] / matrix[i][i];
                let row = matrix[i].clone();
                matrix[j].iter_mut().zip(row).for_each(|(x, y)| *x -= factor * y);
                right[j] -= factor * right[i];
            }
        }
        (0..n).map(|i| right[i] / matrix[i][i]).collect()
    }

    #[test]
    fn predictions_are_those_of_the_closed_form() {
        let (rows, targets) = problem(12, 1);
        let process = process(Matern::new(vec![0, 1, 2, 2]), &rows);
        let noise = PRIOR_LOG_NOISE.exp();
        let of = |x: &[f32], z: &[f32]| {
            let squares = x.iter().zip(z).zip(&process.rates).map(|((x, z), rate)| (rate * f64::from(x - z)).powi(2));
            let d = (5.0 * squares.sum::<f64>()).sqrt();
            (1.0 + d + d * d / 3.0) * (-d).exp()
        };
        let correlations: Vec<Vec<f64>> = (0..12)
            .map(|i| (0..12).map(|j| of(rows.row(i), rows.row(j)) + if i == j { noise } else { 0.0 }).collect())
            .collect();
        let solved = process.solve(&targets.iter().copied().map(Some).collect::<Vec<_>>());
        let weights = eliminate(correlations.clone(), targets.clone());
        let variance = weights.iter().zip(&targets).map(|(w, t)| w * t).sum::<f64>() / 12.0;
        let others = problem(70, 2).0;
        let candidates = process.candidates(others.rows());
        let means = process.means(&candidates, &solved);
        let deviations = process.standard_deviations(&candidates, &solved);
        assert_eq!(means.len(), 70);
        for ((row, own_mean), own_deviation) in others.rows().zip(means).zip(deviations) {
            let to_known: Vec<f64> = rows.rows().map(|known| of(row, known)).collect();
            let mean: f64 = to_known.iter().zip(&weights).map(|(k, w)| k * w).sum();
            let explained: f64 =
                to_known.iter().zip(eliminate(correlations.clone(), to_known.clone())).map(|(k, x)| k * x).sum();
            let deviation = (variance * (1.0 - explained)).sqrt();
            assert!((own_mean - mean).abs() < 1e-8);
            assert!((own_deviation - deviation).abs() < 1e-6);
        }
        for (row, mean) in rows.rows().zip(process.means_of_rows(&solved)) {
            let expected: f64 = rows.rows().zip(&weights).map(|(known, weight)| of(row, known) * weight).sum();
            assert!((mean - expected).abs() < 1e-8);
        }
    }

    #[test]
    fn candidates_may_be_updated_and_learnt_row_by_row() {
        let (rows, targets) = problem(40, 3);
        let targets: Vec<_> = targets.into_iter().map(Some).collect();
        let kernel = Matern::new(vec![0, 1, 2, 3]);
        let mut process = GaussianProcess::new(kernel.clone());
        let others = problem(50, 4).0;
        let mut own = process.candidates(rows.rows());
        let mut early = process.candidates(others.rows());
        let mut late = early.clone();
        for at in 0..rows.n_rows() {
            process.update(&mut own);
            process.learn(&own, at);
            process.update(&mut early);
        }
        process.update(&mut late);
        let at_once = self::process(kernel, &rows);
        assert_eq!(process.factor, at_once.factor);
        let solved = process.solve(&targets);
        assert_eq!(process.means(&early, &solved), at_once.means(&late, &solved));
        let deviations = |candidates| process.standard_deviations(candidates, &solved).collect::<Vec<_>>();
        assert_eq!(deviations(&early), deviations(&late));
    }

    #[test]
    fn a_missing_target_lowers_doubt_and_changes_no_mean() {
        let (rows, targets) = problem(10, 5);
        let mut targets: Vec<_> = targets.into_iter().map(Some).collect();
        let mut process = process(Matern::new(vec![0, 1, 2, 3]), &rows);
        let mut candidates = process.candidates([&[0.5, 0.1, 0.9, 0.3][..]]);
        let mut prediction = |process: &GaussianProcess, targets: &[Option<f64>]| {
            process.update(&mut candidates);
            let solved = process.solve(targets);
            let deviation = process.standard_deviations(&candidates, &solved).next().unwrap();
            (process.means(&candidates, &solved)[0], deviation)
        };
        let (mean, doubt) = prediction(&process, &targets);
        process.extend([&[0.5, 0.1, 0.8, 0.3][..]]);
        targets.push(None);
        let (mean_after, doubt_after) = prediction(&process, &targets);
        assert!((mean_after - mean).abs() < 1e-12);
        assert!(doubt_after < 0.5 * doubt);
    }

    #[test]
    fn fitting_finds_the_column_that_matters() {
        let (rows, targets) = problem(40, 6);
        let mut kernel = Matern::new(vec![0, 1, 2, 3]);
        for _ in 0..4 {
            kernel.fit(&rows, &targets, 0.5);
        }
        assert!(kernel.log_rates[1..].iter().all(|rate| rate + 1.0 < kernel.log_rates[0]), "{kernel:?}");
        let (others, expected) = problem(200, 7);
        let error = |kernel: Matern| {
            let process = process(kernel, &rows);
            let solved = process.solve(&targets.iter().copied().map(Some).collect::<Vec<_>>());
            let candidates = process.candidates(others.rows());
            let means = process.means(&candidates, &solved);
            means.iter().zip(&expected).map(|(mean, e)| (mean - e).powi(2)).sum::<f64>()
        };
        assert!(error(kernel) < 0.3 * error(Matern::new(vec![0, 1, 2, 3])));
    }

    #[test]
    fn what_there_is_nothing_to_learn_from_does_no_harm() {
        let mut kernel = Matern::new(vec![]);
        kernel.fit(&Matrix::new(0), &[], 0.5);
        // The same row three times, and targets that are all the same.
        let rows = Matrix::from_rows(1, [[0.5f32], [0.5], [0.5]]);
        let mut kernel = Matern::new(vec![0]);
        for _ in 0..20 {
            kernel.fit(&rows, &[0.0; 3], 0.8);
        }
        let process = process(kernel, &rows);
        let candidates = process.candidates([&[0.2][..]]);
        let solved = process.solve(&[Some(0.0); 3]);
        assert_eq!(process.means(&candidates, &solved), [0.0]);
        assert!(process.standard_deviations(&candidates, &solved).all(f64::is_finite));
    }
}
