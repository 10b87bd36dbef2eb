//! Tests of the models' contract: they learn, rank correctly, take any input, and are reproducible.

use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::metrics::{average_recall, kendall_tau, r_squared};
use tilewright_learn::{
    EarlyStop, Ensemble, Examples, Gbt, GbtOptions, Knn, LearnError, Matrix, Objective, diverse, diversity,
};

const REGRESSION: GbtOptions = GbtOptions {
    objective: Objective::SquaredError,
    n_trees: 100,
    max_depth: 4,
    max_leaves: usize::MAX,
    learning_rate: 0.2,
    min_child_weight: 1.0,
    lambda: 1.0,
    gamma: 0.0,
    row_fraction: 1.0,
    column_fraction: 1.0,
    max_bins: 64,
    early_stop: None,
};

fn ranking() -> GbtOptions {
    GbtOptions { objective: Objective::PairwiseRank { n_pairs: 8 }, ..REGRESSION }
}

/// Rows of numbers from 0 to 1, the first of which interact in the target; with `missing`, a fifth of them is
/// missing.
fn problem(n: usize, missing: bool, seed: u64) -> (Matrix, Vec<f32>) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let (mut features, mut targets) = (Matrix::new(8), Vec::new());
    for _ in 0..n {
        let mut row: [f32; 8] = std::array::from_fn(|_| rng.random());
        if missing && rng.random_bool(0.2) {
            row[1] = f32::NAN;
        }
        let second = if row[1].is_nan() { 0.3 } else { row[1] };
        targets.push((6.0 * row[0]).sin() + 3.0 * second * row[2] - row[3] * row[3]);
        features.push(&row);
    }
    (features, targets)
}

#[test]
fn regression_learns_a_function_with_interactions_and_missing_values() {
    for missing in [false, true] {
        let (features, targets) = problem(2000, missing, 1);
        let (unseen, expected) = problem(1000, missing, 2);
        let model = Gbt::fit(&Examples::new(&features, &targets), &REGRESSION, 0).unwrap();
        let r2 = r_squared(&model.predict(&unseen), &expected);
        assert!(r2 > 0.97, "R² {r2} with missing values: {missing}");
    }
}

#[test]
fn ranking_orders_whatever_the_scale_of_the_targets() {
    let (features, targets) = problem(1500, false, 3);
    let (unseen, expected) = problem(500, false, 4);
    let stretched: Vec<f32> = targets.iter().map(|t| (3.0 * t).exp()).collect();
    let plain = Gbt::fit(&Examples::new(&features, &targets), &ranking(), 0).unwrap().predict(&unseen);
    let model = Gbt::fit(&Examples::new(&features, &stretched), &ranking(), 0).unwrap();
    assert_eq!(model.predict(&unseen), plain, "only the order of targets counts");
    let tau = kendall_tau(&plain, &expected);
    assert!(tau > 0.85, "Kendall's τ {tau}");
    assert!(average_recall(&plain, &expected, 64) > 0.6);
}

#[test]
fn groups_are_not_compared_with_each_other() {
    // Every target of the second group is above all of the first, by a feature that identifies the group.
    let (features, mut targets) = problem(600, false, 5);
    let groups: Vec<u32> = (0..600).map(|row| row % 2).collect();
    let with_group = Matrix::from_rows(9, features.rows().zip(&groups).map(|(row, &g)| [row, &[g as f32]].concat()));
    targets.iter_mut().zip(&groups).for_each(|(t, &g)| *t += 100.0 * g as f32);
    let of = |examples: Examples| Gbt::fit(&examples, &ranking(), 0).unwrap().predict(&with_group);
    let gap = |scores: &[f32]| {
        let of_group = |g: u32| scores.iter().zip(&groups).filter(move |(_, h)| g == **h).map(|(s, _)| s);
        of_group(1).sum::<f32>() / 300.0 - of_group(0).sum::<f32>() / 300.0
    };
    let (together, apart) =
        (of(Examples::new(&with_group, &targets)), of(Examples::new(&with_group, &targets).in_groups(&groups)));
    assert!(gap(&together) > 3.0, "one group: gap {}", gap(&together));
    assert!(gap(&apart).abs() < 0.5, "two groups: gap {}", gap(&apart));
    for group in 0..2 {
        let of_group = |values: &[f32]| -> Vec<f32> {
            values.iter().zip(&groups).filter(|(_, g)| **g == group).map(|(v, _)| *v).collect()
        };
        assert!(kendall_tau(&of_group(&apart), &of_group(&targets)) > 0.9);
    }
}

#[test]
fn a_local_model_corrects_a_global_one() {
    let (features, targets) = problem(1000, false, 6);
    let shifted: Vec<f32> = targets.iter().zip(features.rows()).map(|(t, row)| t + 0.5 * row[7]).collect();
    let (unseen, expected) = problem(500, false, 7);
    let expected: Vec<f32> = expected.iter().zip(unseen.rows()).map(|(t, row)| t + 0.5 * row[7]).collect();
    for options in [REGRESSION, ranking()] {
        let global = Gbt::fit(&Examples::new(&features, &targets), &options, 0).unwrap();
        let few = Matrix::from_rows(8, features.rows().take(100));
        let base = global.predict(&few);
        let local = Gbt::fit(&Examples::new(&few, &shifted[..100]).on_top_of(&base), &options, 0).unwrap();
        let alone = Gbt::fit(&Examples::new(&few, &shifted[..100]), &options, 0).unwrap();
        let both: Vec<f32> = global.predict(&unseen).iter().zip(local.predict(&unseen)).map(|(g, l)| g + l).collect();
        let tau = |scores: &[f32]| kendall_tau(scores, &expected);
        let (global, both, alone) = (tau(&global.predict(&unseen)), tau(&both), tau(&alone.predict(&unseen)));
        assert!(both > global && both > alone + 0.05, "both {both}, global {global}, local alone {alone}");
    }
}

#[test]
fn base_predictions_count_for_as_much_as_they_agree() {
    let (features, targets) = problem(200, false, 6);
    let (_, others) = problem(200, false, 7);
    for options in [REGRESSION, ranking()] {
        let weight = |base: &[f32]| {
            let examples = Examples::new(&features, &targets).on_top_of(base);
            Gbt::weight_of_base(&examples, &options, 0).unwrap()
        };
        let base = |own: f32, other: f32| -> Vec<f32> {
            targets.iter().zip(&others).map(|(target, noise)| own * target + other * noise).collect()
        };
        let (agreeing, mixed, unrelated) = (weight(&base(1.0, 0.0)), weight(&base(1.0, 1.0)), weight(&base(0.0, 1.0)));
        assert!(agreeing > 0.9, "{agreeing}");
        assert!(mixed < 0.9 * agreeing && mixed > unrelated, "{agreeing}, {mixed}, {unrelated}");
        assert!(unrelated < 0.3, "{unrelated}");
        assert_eq!(weight(&base(-1.0, 0.0)), 0.0, "what is the wrong way round is left out");
        let nothing = Matrix::new(8);
        assert_eq!(Gbt::weight_of_base(&Examples::new(&nothing, &[]).on_top_of(&[]), &options, 0), Ok(1.0));
    }
}

#[test]
fn options_bound_what_is_fitted() {
    let (features, targets) = problem(500, false, 8);
    let examples = Examples::new(&features, &targets);
    let distinct = |options: &GbtOptions| {
        let mut scores = Gbt::fit(&examples, options, 0).unwrap().predict(&features);
        scores.sort_unstable_by(f32::total_cmp);
        scores.dedup();
        scores.len()
    };
    let one = GbtOptions { n_trees: 1, max_depth: 6, ..REGRESSION };
    assert!(distinct(&one) > 32);
    assert_eq!(distinct(&GbtOptions { max_leaves: 5, ..one.clone() }), 5);
    assert_eq!(distinct(&GbtOptions { max_depth: 2, ..one.clone() }), 4);
    assert!(distinct(&GbtOptions { min_child_weight: 100.0, ..one.clone() }) <= 5);
    assert_eq!(distinct(&GbtOptions { gamma: 1e6, ..one.clone() }), 1);
    // A model that may use a tenth of the columns has one of eight in each tree.
    let narrow = Gbt::fit(&examples, &GbtOptions { column_fraction: 0.1, n_trees: 1, max_depth: 1, ..REGRESSION }, 0);
    let scores = narrow.unwrap().predict(&features);
    let used = |c: usize| {
        let (low, high): (Vec<_>, Vec<_>) = features.rows().zip(&scores).partition(|(_, s)| **s == scores[0]);
        let most = |rows: &[(&[f32], &f32)]| rows.iter().map(|(row, _)| row[c]).fold(f32::MIN, f32::max);
        let least = |rows: &[(&[f32], &f32)]| rows.iter().map(|(row, _)| row[c]).fold(f32::MAX, f32::min);
        most(&low) < least(&high) || most(&high) < least(&low)
    };
    assert_eq!((0..8).filter(|&c| used(c)).count(), 1);
    let stop = EarlyStop { patience: 5, plan_size: 32 };
    let stopped = Gbt::fit(&examples, &GbtOptions { early_stop: Some(stop), n_trees: 400, ..ranking() }, 0).unwrap();
    assert!((1..400).contains(&stopped.n_trees()), "{} trees", stopped.n_trees());
}

#[test]
fn bad_input_is_refused_with_its_reason() {
    let features = Matrix::from_rows(1, [[1.0], [2.0]]);
    let fit = |examples: Examples, options: &GbtOptions| Gbt::fit(&examples, options, 0).map(|_| ()).unwrap_err();
    let targets = [1.0, 2.0];
    assert_eq!(
        fit(Examples::new(&features, &targets[..1]), &REGRESSION).to_string(),
        "2 rows of features, but 1 targets"
    );
    assert_eq!(
        fit(Examples::new(&features, &[1.0, f32::INFINITY]), &REGRESSION),
        LearnError::NotFinite { what: "target", row: 1, value: f32::INFINITY }
    );
    let base = [0.0; 3];
    assert!(matches!(
        fit(Examples::new(&features, &targets).on_top_of(&base), &REGRESSION),
        LearnError::Length { what: "base predictions", .. }
    ));
    for options in [
        GbtOptions { max_depth: 13, ..REGRESSION },
        GbtOptions { max_leaves: 1, ..REGRESSION },
        GbtOptions { max_bins: 256, ..REGRESSION },
        GbtOptions { learning_rate: f32::NAN, ..REGRESSION },
        GbtOptions { row_fraction: 0.0, ..REGRESSION },
        GbtOptions { objective: Objective::PairwiseRank { n_pairs: 0 }, ..REGRESSION },
    ] {
        assert!(matches!(fit(Examples::new(&features, &targets), &options), LearnError::BadOption { .. }));
    }
    assert!(Ensemble::fit(&Examples::new(&features, &targets), &REGRESSION, 0, 0).is_err());
}

#[test]
fn models_of_nothing_predict_nothing() {
    let (none, some) = (Matrix::new(2), Matrix::from_rows(2, [[1.0, 2.0]]));
    for options in [REGRESSION, ranking()] {
        let model = Gbt::fit(&Examples::new(&none, &[]), &options, 0).unwrap();
        assert_eq!((model.predict(&some), model.predict(&none)), (vec![0.0], vec![]));
        let ensemble = Ensemble::fit(&Examples::new(&none, &[]), &options, 5, 0).unwrap();
        assert_eq!(ensemble.predict(&some)[0].standard_deviation, 0.0);
    }
    assert_eq!(Knn::new(9, 2).predict(&some), [0.0]);
}

#[test]
fn an_ensemble_is_less_certain_where_it_knows_less() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(9);
    // Many rows below 0.5, few above.
    let xs: Vec<f32> =
        (0..300).map(|i| if i < 290 { 0.5 * rng.random::<f32>() } else { 0.5 + 0.5 * rng.random::<f32>() }).collect();
    let targets: Vec<f32> = xs.iter().map(|x| (12.0 * x).sin() + 0.1 * rng.random::<f32>()).collect();
    let features = Matrix::from_rows(1, xs.iter().map(|x| [*x]));
    let ensemble = Ensemble::fit(&Examples::new(&features, &targets), &REGRESSION, 5, 1).unwrap();
    let spread = |from: f32| {
        let rows = Matrix::from_rows(1, (0..100).map(|i| [from + 0.005 * i as f32]));
        ensemble.predict(&rows).iter().map(|p| p.standard_deviation).sum::<f32>() / 100.0
    };
    assert!(spread(0.5) > 2.0 * spread(0.0), "known {}, unknown {}", spread(0.0), spread(0.5));
}

/// Weighted nearest neighbours, computed by the definition.
fn naive_knn(known: &[(Vec<f32>, f32)], row: &[f32], k: usize) -> f64 {
    let distance = |z: &[f32]| -> f64 {
        let term = |x: f32, z: f32| match (x.is_nan(), z.is_nan()) {
            (true, true) => 0.0,
            (false, false) if x == z => 0.0,
            (false, false) => f64::from((x - z).abs()) / (f64::from(x.abs()) + f64::from(z.abs())),
            _ => 1.0,
        };
        row.iter().zip(z).map(|(x, z)| term(*x, *z)).sum()
    };
    let mut near: Vec<(f64, f64)> = known.iter().map(|(z, y)| (distance(z), f64::from(*y))).collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    let exact: Vec<f64> = near.iter().filter(|(d, _)| *d == 0.0).map(|(_, y)| *y).collect();
    if !exact.is_empty() {
        return exact.iter().sum::<f64>() / exact.len() as f64;
    }
    near.truncate(k);
    near.iter().map(|(d, y)| y / d).sum::<f64>() / near.iter().map(|(d, _)| 1.0 / d).sum::<f64>()
}

/// Numbers that occur in configurations, and special floating-point values.
fn any_value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => (-8i32..64).prop_map(|v| v as f32),
        2 => any::<f32>(),
        1 => Just(f32::NAN),
        1 => prop_oneof![Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(f32::MAX), Just(-0.0), Just(1e-40)],
    ]
}

fn any_rows(n_columns: usize) -> impl Strategy<Value = Vec<(Vec<f32>, f32)>> {
    let target = prop_oneof![(0i32..4).prop_map(|v| v as f32), -1e30f32..1e30];
    prop::collection::vec((prop::collection::vec(any_value(), n_columns), target), 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_rows_can_be_learnt(rows in any_rows(5), seed: u64, depth in 1usize..6, rank: bool) {
        let features = Matrix::from_rows(5, rows.iter().map(|(row, _)| row));
        let targets: Vec<f32> = rows.iter().map(|(_, target)| *target).collect();
        let options = GbtOptions {
            max_depth: depth, n_trees: 10, lambda: 0.0, min_child_weight: 0.0, max_bins: 7,
            objective: if rank { Objective::PairwiseRank { n_pairs: 3 } } else { Objective::SquaredError },
            row_fraction: 0.8, column_fraction: 0.6,
            ..REGRESSION
        };
        let examples = Examples::new(&features, &targets);
        let scores = Gbt::fit(&examples, &options, seed).unwrap().predict(&features);
        prop_assert!(scores.iter().all(|s| s.is_finite()), "{scores:?}");
        prop_assert_eq!(&scores, &Gbt::fit(&examples, &options, seed).unwrap().predict(&features));
        // The prediction of a row is the same alone and among others.
        for (row, score) in rows.iter().zip(&scores) {
            let alone = Gbt::fit(&examples, &options, seed).unwrap().predict(&Matrix::from_rows(5, [&row.0]));
            prop_assert_eq!(alone[0], *score);
        }
    }

    #[test]
    fn deep_trees_remember_rows_that_differ(targets in prop::collection::vec(-100f32..100.0, 2..40)) {
        let features = Matrix::from_rows(2, (0..targets.len()).map(|i| [1.0, if i == 0 { f32::NAN } else { i as f32 }]));
        let options = GbtOptions {
            n_trees: 60, max_depth: 10, learning_rate: 1.0, lambda: 0.0, min_child_weight: 0.0, max_bins: 64, ..REGRESSION
        };
        let scores = Gbt::fit(&Examples::new(&features, &targets), &options, 0).unwrap().predict(&features);
        for (score, target) in scores.iter().zip(&targets) {
            prop_assert!((score - target).abs() < 0.05, "{score} for {target}");
        }
    }

    #[test]
    fn nearest_neighbours_match_the_definition(
        known in prop::collection::vec((prop::collection::vec(any_small(), 3), -10f32..10.0), 1..30),
        rows in prop::collection::vec(prop::collection::vec(any_small(), 3), 1..10),
    ) {
        let mut knn = Knn::new(known.len(), 3);
        known.iter().for_each(|(row, target)| knn.push(row, *target));
        let predicted = knn.predict(&Matrix::from_rows(3, &rows));
        for (row, predicted) in rows.iter().zip(predicted) {
            let expected = naive_knn(&known, row, known.len());
            prop_assert!((f64::from(predicted) - expected).abs() < 1e-3, "{predicted}, not {expected}");
        }
    }

    #[test]
    fn only_the_k_nearest_count_as_the_definition_has_it(
        known in prop::collection::vec((prop::collection::vec(0.1f32..100.0, 3), -10f32..10.0), 1..30),
        rows in prop::collection::vec(prop::collection::vec(0.1f32..100.0, 3), 1..10),
        k in 1usize..12,
    ) {
        let mut knn = Knn::new(k, 3);
        known.iter().for_each(|(row, target)| knn.push(row, *target));
        for (row, predicted) in rows.iter().zip(knn.predict(&Matrix::from_rows(3, &rows))) {
            let expected = naive_knn(&known, row, k);
            prop_assert!((f64::from(predicted) - expected).abs() < 1e-3, "{predicted}, not {expected}");
        }
    }

    #[test]
    fn any_rows_have_neighbours(rows in any_rows(4), k in 1usize..12) {
        let mut knn = Knn::new(k, 4);
        rows.iter().for_each(|(row, target)| knn.push(row, *target));
        let features = Matrix::from_rows(4, rows.iter().map(|(row, _)| row));
        let (low, high) = rows.iter().fold((f32::MAX, f32::MIN), |(l, h), (_, t)| (l.min(*t), h.max(*t)));
        for score in knn.predict(&features) {
            prop_assert!((low..=high).contains(&score), "{score} is not within {low} and {high}");
        }
    }

    #[test]
    fn a_greedy_batch_is_near_the_best(
        candidates in prop::collection::vec((0f64..4.0, prop::collection::vec(0u64..3, 3)), 1..9),
        n in 0usize..5, alpha in 0f64..3.0,
    ) {
        let (scores, components): (Vec<f64>, Vec<Vec<u64>>) = candidates.into_iter().unzip();
        let batch = diverse(&scores, &components, n, alpha);
        let size = n.min(scores.len());
        prop_assert_eq!(batch.len(), size);
        prop_assert_eq!(batch.iter().collect::<std::collections::HashSet<_>>().len(), size);
        let worth = |batch: &[usize]| diversity(&scores, &components, alpha, batch);
        let subsets = (0u32..1 << scores.len()).filter(|bits| bits.count_ones() as usize == size);
        let best = subsets
            .map(|bits| worth(&(0..scores.len()).filter(|i| bits >> i & 1 == 1).collect::<Vec<_>>()))
            .fold(f64::MIN, f64::max);
        prop_assert!(worth(&batch) >= (1.0 - (-1f64).exp()) * best - 1e-9, "{} of {best}", worth(&batch));
        // Each choice is the best one given those before it.
        for at in 0..size {
            let with = |i: usize| worth(&[&batch[..at], &[i]].concat());
            let best = (0..scores.len()).filter(|i| !batch[..at].contains(i)).map(with).fold(f64::MIN, f64::max);
            prop_assert!(with(batch[at]) >= best - 1e-9);
        }
    }
}

/// Numbers whose distances do not depend on rounding.
fn any_small() -> impl Strategy<Value = f32> {
    prop_oneof![8 => (-8i32..64).prop_map(|v| v as f32), 1 => Just(f32::NAN)]
}

#[test]
fn variety_counts_when_scores_are_close() {
    let scores = [1.0, 0.99, 0.5];
    let components = [[1, 1], [1, 1], [2, 2]];
    assert_eq!(diverse(&scores, &components, 2, 0.0), [0, 1]);
    assert_eq!(diverse(&scores, &components, 2, 1.0), [0, 2]);
    assert_eq!(diverse(&[f64::NAN, 0.0], &components[..2], 2, 1.0), [1, 0]);
}

#[test]
fn only_the_nearest_count() {
    let mut knn = Knn::new(2, 1);
    for (x, y) in [(1.0, 10.0), (2.0, 20.0), (50.0, 1000.0)] {
        knn.push(&[x], y);
    }
    // Distances 0.2 and 1/7 make weights 5 and 7.
    let predicted = knn.predict(&Matrix::from_rows(1, [[1.5], [2.0]]));
    assert!((predicted[0] - (5.0 * 10.0 + 7.0 * 20.0) / 12.0).abs() < 1e-4);
    assert_eq!(predicted[1], 20.0);
}
