//! Gaussian processes: predictions with a spread, from few examples.

use crate::matrix::Matrix;

/// The correlation of two rows: the Matérn function with ν = 5/2 of their distance, which is `√Σ (rate · (x − z))²` over the
/// columns. Each group of columns has its own rate, so that the ones that matter can be told from the others.
///
/// # Source
/// Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), sections 4.2 and 5.4.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// The group of each column.
    groups: Vec<usize>,
    /// The logarithm of each group's rate, an inverse length.
    log_rates: Vec<f64>,
    /// The logarithm of the variance of the noise over that of the signal.
    log_noise: f64,
}

/// A noise of 5 % of the signal, give or take a factor of e.
const PRIOR_LOG_NOISE: f64 = -6.0;
const PRIOR_LOG_NOISE_SPREAD: f64 = 2.0;
const LOG_NOISE_RANGE: [f64; 2] = [-9.0, 0.0];
/// Rates are known to a factor of e.
const PRIOR_LOG_RATE_SPREAD: f64 = 1.0;

/// Rows that are updated side by side, so that the factor is read once for all of them.
const BLOCK_ROWS: usize = 16;

impl Kernel {
    /// The kernel before anything is known, for columns between 0 and 1 whose groups are numbered from 0 on.
    ///
    /// Columns that belong together, such as those of one category, are a group.
    pub fn new(groups: Vec<usize>) -> Kernel {
        let n_groups = groups.iter().max().map_or(0, |&last| last + 1);
        let log_rates = vec![prior_log_rate(n_groups); n_groups];
        Kernel { groups, log_rates, log_noise: PRIOR_LOG_NOISE }
    }

    /// Makes these examples more likely, by trying a larger and a smaller value for one parameter after the other. To be
    /// called again as examples come in; each call goes on from the last.
    ///
    /// # Panics
    /// Where the rows have not as many values as there are columns, or the targets are not one for each row.
    ///
    /// # Cost
    /// O(groups · rows³).
    pub fn fit(&mut self, rows: &Matrix, targets: &[f64], step: f64) {
        assert_eq!(rows.n_columns(), self.groups.len(), "invariant: a row has a value for each column");
        assert_eq!(rows.n_rows(), targets.len(), "invariant: a target for each row");
        let pairs: Vec<(&[f32], &[f32])> =
            (0..rows.n_rows()).flat_map(|i| (0..i).map(move |j| (rows.row(i), rows.row(j)))).collect();
        let mut squares = vec![vec![0.0; pairs.len()]; self.log_rates.len()];
        for (column, &group) in self.groups.iter().enumerate() {
            let of_pair = pairs.iter().map(|(x, z)| f64::from(x[column] - z[column]).powi(2));
            squares[group].iter_mut().zip(of_pair).for_each(|(sum, square)| *sum += square);
        }
        let mut distances = vec![0.0; pairs.len()];
        for (squares, weight) in squares.iter().zip(self.weights()) {
            distances.iter_mut().zip(squares).for_each(|(d, square)| *d += weight * square);
        }
        let mut likelihood = Likelihood { targets, factor: vec![0.0; targets.len().pow(2)] };
        let mut best = likelihood.log_posterior(self, &distances);
        let mut changed = distances.clone();
        for parameter in 0..=squares.len() {
            for direction in [step, -step] {
                let mut other = self.clone();
                match squares.get(parameter) {
                    Some(squares) => {
                        other.log_rates[parameter] += direction;
                        let gain = other.weights()[parameter] - self.weights()[parameter];
                        let sums = distances.iter().zip(squares).map(|(d, square)| (d + gain * square).max(0.0));
                        changed.iter_mut().zip(sums).for_each(|(changed, sum)| *changed = sum);
                    }
                    None => {
                        let [least, most] = LOG_NOISE_RANGE;
                        other.log_noise = (other.log_noise + direction).clamp(least, most);
                        changed.copy_from_slice(&distances);
                    }
                }
                let posterior = likelihood.log_posterior(&other, &changed);
                if posterior > best {
                    best = posterior;
                    *self = other;
                    std::mem::swap(&mut distances, &mut changed);
                    break;
                }
            }
        }
    }

    /// The squared rate of each group.
    fn weights(&self) -> Vec<f64> {
        self.log_rates.iter().map(|log_rate| (2.0 * log_rate).exp()).collect()
    }

    fn log_prior(&self) -> f64 {
        let prior = prior_log_rate(self.log_rates.len());
        let rates: f64 = self.log_rates.iter().map(|r| ((r - prior) / PRIOR_LOG_RATE_SPREAD).powi(2)).sum();
        -0.5 * (rates + ((self.log_noise - PRIOR_LOG_NOISE) / PRIOR_LOG_NOISE_SPREAD).powi(2))
    }
}

/// A length of half the diagonal of the unit cube: neither are all rows alike, nor is each one alone.
fn prior_log_rate(n_groups: usize) -> f64 {
    (2.0 / (n_groups.max(1) as f64).sqrt()).ln()
}

fn matern(squared_distance: f64) -> f64 {
    let d = (5.0 * squared_distance).sqrt();
    (1.0 + d + d * d / 3.0) * (-d).exp()
}

/// How likely targets are under a kernel.
struct Likelihood<'a> {
    targets: &'a [f64],
    /// Space for the lower Cholesky factor of the correlations.
    factor: Vec<f64>,
}

impl Likelihood<'_> {
    /// The logarithm of the likelihood times the prior, up to a constant, for these squared distances of all pairs. The
    /// variance of the signal is the most likely one.
    fn log_posterior(&mut self, kernel: &Kernel, squared_distances: &[f64]) -> f64 {
        let n = self.targets.len();
        let diagonal = 1.0 + kernel.log_noise.exp();
        let mut log_determinant = 0.0;
        let mut solved = Vec::with_capacity(n);
        let mut pairs = squared_distances.iter();
        for i in 0..n {
            let (above, row) = self.factor.split_at_mut(i * n);
            for j in 0..i {
                let correlation = pairs.next().map_or(0.0, |&d| matern(d));
                let other = &above[j * n..][..=j];
                row[j] = (correlation - dot(&row[..j], &other[..j])) / other[j];
            }
            row[i] = pivot(diagonal - dot(&row[..i], &row[..i]));
            log_determinant += row[i].ln();
            solved.push((self.targets[i] - dot(&row[..i], &solved)) / row[i]);
        }
        let variance = dot(&solved, &solved) / n.max(1) as f64;
        -0.5 * n as f64 * variance.max(f64::MIN_POSITIVE).ln() - log_determinant + kernel.log_prior()
    }
}

/// The root of what is left on the diagonal, which rounding must not bring to 0.
fn pivot(rest: f64) -> f64 {
    rest.max(1e-12).sqrt()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    let mut sums = [0.0; LANES];
    for (a, b) in a.zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    rest + sums.iter().sum::<f64>()
}

/// A Gaussian process with mean 0, which learns row by row.
///
/// What it takes to predict a row depends on the known rows, not on their targets. So a [`Candidate`] keeps it, and is
/// updated by one step for each row that becomes known; and targets may come later than their rows.
#[derive(Debug, Clone)]
pub struct GaussianProcess {
    kernel: Kernel,
    /// The squared rate of each column.
    weights: Vec<f64>,
    rows: Matrix,
    /// The rows of the lower Cholesky factor of the correlations, each to its diagonal.
    factor: Vec<Vec<f64>>,
}

/// A row whose target is to be predicted.
#[derive(Debug, Clone)]
pub struct Candidate {
    row: Vec<f32>,
    /// Its correlations with the known rows, divided by the factor.
    solved: Vec<f64>,
    /// The share of its variance that the known rows explain.
    explained: f64,
}

impl Candidate {
    /// A candidate for a process that knows nothing yet, or that it is to be updated for.
    pub fn new(row: Vec<f32>) -> Candidate {
        Candidate { row, solved: Vec::new(), explained: 0.0 }
    }
}

/// Targets of the known rows as a process takes them, with the most likely variance of the signal.
#[derive(Debug, Clone)]
pub struct Solved {
    weights: Vec<f64>,
    standard_deviation: f64,
}

impl GaussianProcess {
    /// A process that knows no rows.
    pub fn new(kernel: Kernel) -> GaussianProcess {
        let of_group = kernel.weights();
        let weights: Vec<f64> = kernel.groups.iter().map(|&group| of_group[group]).collect();
        let rows = Matrix::new(weights.len());
        GaussianProcess { kernel, weights, rows, factor: Vec::new() }
    }

    /// What correlates the rows.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// The number of known rows.
    pub fn len(&self) -> usize {
        self.factor.len()
    }

    /// Whether no row is known.
    pub fn is_empty(&self) -> bool {
        self.factor.is_empty()
    }

    /// Makes a row known.
    ///
    /// # Panics
    /// Where the row has not as many values as there are columns.
    ///
    /// # Cost
    /// O(known rows²).
    pub fn push(&mut self, row: &[f32]) {
        let mut candidate = [Candidate::new(row.to_vec())];
        self.update(&mut candidate);
        let [Candidate { mut solved, explained, .. }] = candidate;
        solved.push(pivot(1.0 + self.kernel.log_noise.exp() - explained));
        self.factor.push(solved);
        self.rows.push(row);
    }

    /// Makes candidates ready to be predicted, given the rows that became known since the last update.
    ///
    /// # Panics
    /// Where a candidate has not as many values as there are columns.
    ///
    /// # Cost
    /// O(known rows) for each candidate and each new row.
    pub fn update<'c>(&self, candidates: impl IntoIterator<Item = &'c mut Candidate>) {
        let mut candidates: Vec<&mut Candidate> = candidates.into_iter().collect();
        for block in candidates.chunks_mut(BLOCK_ROWS) {
            let first = block.iter().map(|candidate| candidate.solved.len()).min().unwrap_or(0);
            for (at, factor) in self.factor.iter().enumerate().skip(first) {
                for candidate in block.iter_mut().filter(|candidate| candidate.solved.len() == at) {
                    let correlation = self.correlation(&candidate.row, self.rows.row(at));
                    let solved = (correlation - dot(&factor[..at], &candidate.solved)) / factor[at];
                    candidate.explained += solved * solved;
                    candidate.solved.push(solved);
                }
            }
        }
    }

    fn correlation(&self, x: &[f32], z: &[f32]) -> f64 {
        let squares = x.iter().zip(z).zip(&self.weights).map(|((x, z), weight)| weight * f64::from(x - z).powi(2));
        matern(squares.sum())
    }

    /// Prepares targets, one for each known row in order. A target that is missing is taken to be what the rows before
    /// predict, so that it lowers the spread around its row and changes no mean.
    ///
    /// # Panics
    /// Where there is not one target for each known row.
    ///
    /// # Source
    /// Missing targets: Ginsbourger, Le Riche and Carraro (2010), the "kriging believer".
    pub fn solve(&self, targets: &[Option<f64>]) -> Solved {
        assert_eq!(targets.len(), self.len(), "invariant: a target for each known row");
        let mut weights: Vec<f64> = Vec::with_capacity(targets.len());
        for (factor, target) in self.factor.iter().zip(targets) {
            let at = weights.len();
            weights.push(target.map_or(0.0, |target| (target - dot(&factor[..at], &weights)) / factor[at]));
        }
        let n_known = targets.iter().flatten().count().max(1);
        let standard_deviation = (dot(&weights, &weights) / n_known as f64).sqrt();
        Solved { weights, standard_deviation }
    }

    /// What the process believes of the known rows themselves, in order: their targets without the noise. Missing targets count
    /// as in [`GaussianProcess::solve`].
    ///
    /// # Cost
    /// O(known rows²).
    pub fn means_of_rows(&self, targets: &Solved) -> Vec<f64> {
        let noise = self.kernel.log_noise.exp();
        // With correlations C and noise s the means are C · (C + s)⁻¹ · y = y − s · (C + s)⁻¹ · y.
        let mut rest = targets.weights.clone();
        let mut means = vec![0.0; rest.len()];
        for (at, factor) in self.factor.iter().enumerate().take(rest.len()).rev() {
            rest[at] /= factor[at];
            let dual = rest[at];
            rest[..at].iter_mut().zip(factor).for_each(|(rest, factor)| *rest -= dual * factor);
            means[at] = dot(factor, &targets.weights[..=at]) - noise * dual;
        }
        means
    }

    /// The mean of an updated candidate's prediction. Rows that became known after the targets were solved count as missing.
    pub fn mean(&self, candidate: &Candidate, targets: &Solved) -> f64 {
        let n = targets.weights.len().min(candidate.solved.len());
        dot(&candidate.solved[..n], &targets.weights[..n])
    }

    /// The standard deviation of an updated candidate's prediction, noise aside.
    pub fn standard_deviation(&self, candidate: &Candidate, targets: &Solved) -> f64 {
        targets.standard_deviation * (1.0 - candidate.explained).max(0.0).sqrt()
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

    fn process(kernel: Kernel, rows: &Matrix) -> GaussianProcess {
        let mut process = GaussianProcess::new(kernel);
        rows.rows().for_each(|row| process.push(row));
        process
    }

    /// The solution of `matrix · x = right`, by elimination.
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
        let process = process(Kernel::new(vec![0, 1, 2, 2]), &rows);
        let noise = PRIOR_LOG_NOISE.exp();
        let of = |x: &[f32], z: &[f32]| process.correlation(x, z);
        let correlations: Vec<Vec<f64>> = (0..12)
            .map(|i| (0..12).map(|j| of(rows.row(i), rows.row(j)) + if i == j { noise } else { 0.0 }).collect())
            .collect();
        let solved = process.solve(&targets.iter().copied().map(Some).collect::<Vec<_>>());
        let weights = eliminate(correlations.clone(), targets.clone());
        let variance = weights.iter().zip(&targets).map(|(w, t)| w * t).sum::<f64>() / 12.0;
        for row in problem(5, 2).0.rows() {
            let mut candidate = [Candidate::new(row.to_vec())];
            process.update(&mut candidate);
            let to_known: Vec<f64> = rows.rows().map(|known| of(row, known)).collect();
            let mean: f64 = to_known.iter().zip(&weights).map(|(k, w)| k * w).sum();
            let explained: f64 =
                to_known.iter().zip(eliminate(correlations.clone(), to_known.clone())).map(|(k, x)| k * x).sum();
            let deviation = (variance * (1.0 - explained)).sqrt();
            assert!((process.mean(&candidate[0], &solved) - mean).abs() < 1e-8);
            assert!((process.standard_deviation(&candidate[0], &solved) - deviation).abs() < 1e-6);
        }
        for (row, mean) in rows.rows().zip(process.means_of_rows(&solved)) {
            let expected: f64 = rows.rows().zip(&weights).map(|(known, weight)| of(row, known) * weight).sum();
            assert!((mean - expected).abs() < 1e-8);
        }
    }

    #[test]
    fn candidates_may_be_updated_row_by_row() {
        let (rows, targets) = problem(30, 3);
        let targets: Vec<_> = targets.into_iter().map(Some).collect();
        let mut process = GaussianProcess::new(Kernel::new(vec![0, 1, 2, 3]));
        let new = |row: &[f32]| Candidate::new(row.to_vec());
        let mut early: Vec<Candidate> = problem(40, 4).0.rows().map(new).collect();
        let mut late = early.clone();
        for row in rows.rows() {
            process.push(row);
            process.update(&mut early[..7]);
        }
        process.update(&mut early);
        process.update(&mut late);
        let solved = process.solve(&targets);
        for (early, late) in early.iter().zip(&late) {
            assert_eq!(process.mean(early, &solved), process.mean(late, &solved));
            assert_eq!(early.explained, late.explained);
        }
    }

    #[test]
    fn a_missing_target_lowers_doubt_and_changes_no_mean() {
        let (rows, targets) = problem(10, 5);
        let mut targets: Vec<_> = targets.into_iter().map(Some).collect();
        let mut process = process(Kernel::new(vec![0, 1, 2, 3]), &rows);
        let mut candidate = [Candidate::new(vec![0.5, 0.1, 0.9, 0.3])];
        process.update(&mut candidate);
        let before = process.solve(&targets);
        let (mean, doubt) = (process.mean(&candidate[0], &before), process.standard_deviation(&candidate[0], &before));
        process.push(&[0.5, 0.1, 0.8, 0.3]);
        targets.push(None);
        process.update(&mut candidate);
        let after = process.solve(&targets);
        assert!((process.mean(&candidate[0], &after) - mean).abs() < 1e-12);
        assert!(process.standard_deviation(&candidate[0], &after) < 0.5 * doubt);
    }

    #[test]
    fn fitting_finds_the_column_that_matters() {
        let (rows, targets) = problem(40, 6);
        let mut kernel = Kernel::new(vec![0, 1, 2, 3]);
        for _ in 0..4 {
            kernel.fit(&rows, &targets, 0.5);
        }
        assert!(kernel.log_rates[1..].iter().all(|rate| rate + 1.0 < kernel.log_rates[0]), "{kernel:?}");
        let (others, expected) = problem(200, 7);
        let error = |kernel: Kernel| {
            let process = process(kernel, &rows);
            let solved = process.solve(&targets.iter().copied().map(Some).collect::<Vec<_>>());
            let mut candidates: Vec<Candidate> = others.rows().map(|row| Candidate::new(row.to_vec())).collect();
            process.update(&mut candidates);
            candidates.iter().zip(&expected).map(|(c, e)| (process.mean(c, &solved) - e).powi(2)).sum::<f64>()
        };
        assert!(error(kernel) < 0.3 * error(Kernel::new(vec![0, 1, 2, 3])));
    }

    #[test]
    fn what_there_is_nothing_to_learn_from_does_no_harm() {
        let mut kernel = Kernel::new(vec![]);
        kernel.fit(&Matrix::new(0), &[], 0.5);
        // The same row three times, and targets that are all the same.
        let rows = Matrix::from_rows(1, [[0.5f32], [0.5], [0.5]]);
        let mut kernel = Kernel::new(vec![0]);
        for _ in 0..20 {
            kernel.fit(&rows, &[0.0; 3], 0.8);
        }
        let process = process(kernel, &rows);
        let mut candidate = [Candidate::new(vec![0.2])];
        process.update(&mut candidate);
        let solved = process.solve(&[Some(0.0); 3]);
        assert_eq!(process.mean(&candidate[0], &solved), 0.0);
        assert!(process.standard_deviation(&candidate[0], &solved).is_finite());
    }
}
