//! Conformance: every row of [`SEARCHES`] on synthetic spaces and landscapes.

use std::collections::HashSet;
use std::sync::Arc;

use super::*;
use crate::space::{Constraint, Parameter};
use crate::trial::{ErrorClass, Outcome, Timing};

/// A search for tests: those with cost models learn and anneal only as long as it takes to see that they do,
/// and networks are small.
fn quick(name: &'static str) -> &'static str {
    match name {
        "gbt" => "gbt:steps=20,batch=32",
        "tree_gru" => "tree_gru:width=8,steps=2,chains=8,updates=1,batch=64",
        "na2c" => "na2c:width=8",
        "rnn_controller" => "rnn_controller:width=8",
        _ => name,
    }
}

/// Evolutionary searches with the operators of their papers, whose generations have a fixed size.
const AS_IN_THE_PAPERS: [&str; 3] = [
    "genetic:population=50,generation=47,selection=fitness,start=random,crossover=one_point,mutation=0.1,steps=0",
    "opevo:generation=8,selection=fitness,q=0.5,start=random",
    "nose:population=30,generation=9,selection=fitness,start=random,crossover=one_point,mutation=0.3,steps=0,mutant=other",
];

type Landscape = fn(&Space, &Config) -> Outcome;

fn space(parameters: Vec<Parameter>, constraints: Vec<Constraint>) -> Arc<Space> {
    Arc::new(Space::new("test", parameters, constraints).unwrap())
}

fn one_element() -> Arc<Space> {
    space(vec![Parameter::factorization("m", 1, 4), Parameter::ordinal("u", [16])], vec![])
}

/// 3 legal points of 27 million, tied by one constraint.
fn three_legal() -> Arc<Space> {
    let parameters = ["a", "b", "c"].map(|name| Parameter::ordinal(name, 0..300)).to_vec();
    let holds = |v: &[&crate::space::Value]| v[0].int() * 2 == v[1].int() && v[1].int() + 1 == v[2].int();
    let few =
        Constraint::new("few", "b = 2a, c = b + 1, a >= 147", &["a", "b", "c"], move |v| holds(v) && v[0].int() >= 147);
    space(parameters, vec![few])
}

fn quadrillion() -> Arc<Space> {
    let parameters = (0..5).map(|i| Parameter::ordinal(&format!("p{i}"), 0..1000)).collect();
    space(parameters, vec![])
}

fn mixed() -> Arc<Space> {
    let parameters = vec![
        Parameter::permutation("order", &["i", "j", "k", "l"]),
        Parameter::categorical("pack", &["none", "a", "b"]),
        Parameter::factorization("m", 12, 2),
        Parameter::boolean("unroll"),
    ];
    let tied = Constraint::new("tied", "unroll or pack = none", &["unroll", "pack"], |v| {
        v[0].text() == "true" || v[1].text() == "none"
    });
    space(parameters, vec![tied])
}

fn gemm() -> Arc<Space> {
    let parameters = [("m", 4), ("k", 2), ("n", 4)].map(|(name, parts)| Parameter::factorization(name, 1024, parts));
    space(parameters.to_vec(), vec![])
}

fn measured(median_ns: f64) -> Outcome {
    Outcome::Measured(Timing { median_ns, min_ns: median_ns, spread: 0.0, n_samples: 1, stopped_early: false })
}

fn all_fail(_: &Space, _: &Config) -> Outcome {
    Outcome::Failed { class: ErrorClass::RuntimeError, message: "crash".into() }
}

/// Outcomes that are alike except for that of the last configuration.
fn needle(space: &Space, config: &Config) -> Outcome {
    measured(if space.index_of(config) == Some(space.size() - 1) { 1.0 } else { 1000.0 })
}

/// The farther from balanced tiles, the slower; a fifth of the configurations fail.
fn smooth(space: &Space, config: &Config) -> Outcome {
    if config.ranks().iter().sum::<u64>() % 5 == 4 {
        return all_fail(space, config);
    }
    let off = |name, targets: &[f64]| -> f64 {
        let factors = space.factors(config, name);
        factors.iter().zip(targets).map(|(&f, target)| ((f as f64).log2() - target).powi(2)).sum()
    };
    let off = off("m", &[3.0, 2.0, 2.0, 3.0]) + off("k", &[7.0, 3.0]) + off("n", &[1.0, 3.0, 2.0, 4.0]);
    measured(1e6 * (1.0 + off / 10.0))
}

/// Runs a search for up to `budget` trials and checks what every search promises.
fn run(text: &str, space: &Arc<Space>, landscape: Landscape, seed: u64, batch: usize, budget: usize) -> Vec<Trial> {
    let mut search = build(text, space, seed).unwrap();
    let mut seen = HashSet::new();
    let mut history = Vec::new();
    while history.len() < budget {
        let proposals = search.propose(batch.min(budget - history.len()));
        assert!(proposals.len() <= batch, "{text}: too many proposals");
        if proposals.is_empty() {
            assert_eq!(history.len() as u128, space.size(), "{text}: stopped before the space was exhausted");
            assert!(search.propose(batch).is_empty(), "{text}: exhausted for good");
            break;
        }
        for config in &proposals {
            assert!(space.violated(config).is_none() && space.contains(config), "{text}: illegal {config:?}");
            assert!(seen.insert(config.clone()), "{text}: {config:?} proposed twice");
        }
        let trials: Vec<Trial> =
            proposals.into_iter().map(|config| Trial { outcome: landscape(space, &config), config }).collect();
        search.observe(&trials);
        history.extend(trials);
    }
    history
}

fn best(trials: &[Trial]) -> f64 {
    trials.iter().map(|trial| trial.outcome.cost()).fold(f64::INFINITY, f64::min)
}

#[test]
fn small_spaces_are_exhausted() {
    let spaces = [(one_element(), 1), (three_legal(), 3), (mixed(), 24 * 4 * 6)];
    for text in SEARCHES.iter().map(|row| quick(row.name)).chain(AS_IN_THE_PAPERS) {
        for (space, n) in &spaces {
            for landscape in [all_fail as Landscape, needle] {
                for batch in [1, 7, 1000] {
                    let trials = run(text, space, landscape, 1, batch, usize::MAX);
                    assert_eq!(trials.len(), *n, "{text}");
                    assert_eq!(run(text, space, landscape, 1, batch, usize::MAX), trials, "{text}: same seed");
                }
            }
        }
    }
}

#[test]
fn huge_spaces_and_hopeless_landscapes_do_not_stall() {
    for row in SEARCHES {
        for (space, landscape) in
            [(quadrillion(), all_fail as Landscape), (quadrillion(), needle), (gemm(), all_fail), (gemm(), smooth)]
        {
            let [trials, again] = [0; 2].map(|_| run(quick(row.name), &space, landscape, 3, 16, 300));
            assert_eq!((trials.len(), &trials), (300, &again), "{}", row.name);
        }
    }
}

#[test]
fn a_large_space_is_exhausted_quickly() {
    for row in SEARCHES {
        let space = space(vec![Parameter::ordinal("a", 0..40), Parameter::ordinal("b", 0..40)], vec![]);
        assert_eq!(run(quick(row.name), &space, needle, 5, 64, usize::MAX).len(), 1600, "{}", row.name);
    }
}

#[test]
fn the_seed_decides_the_proposals() {
    for row in SEARCHES {
        let of_seed = |seed| run(quick(row.name), &gemm(), smooth, seed, 16, 500);
        assert_eq!(of_seed(7), of_seed(7), "{}", row.name);
        assert!(row.name == "grid" || of_seed(7) != of_seed(8), "{}", row.name);
    }
}

#[test]
fn observed_trials_are_never_proposed() {
    for row in SEARCHES {
        let space = mixed();
        let prior: Vec<Trial> = run("random", &space, needle, 11, 16, 400);
        let mut search = build(quick(row.name), &space, 0).unwrap();
        let foreign = Trial { config: Config::new([9, 9]), outcome: measured(1.0) };
        search.observe(&[foreign]);
        search.observe(&prior);
        let mut rest = Vec::new();
        loop {
            // Nothing is observed here: a search must not wait for it either.
            let proposals = search.propose(5);
            if proposals.is_empty() {
                break;
            }
            rest.extend(proposals);
        }
        assert_eq!(rest.len() as u128, space.size() - 400, "{}", row.name);
        let all: HashSet<_> = prior.iter().map(|trial| &trial.config).chain(&rest).collect();
        assert_eq!(all.len() as u128, space.size(), "{}", row.name);
    }
}

#[test]
fn trials_observed_between_proposals_are_not_proposed() {
    for row in SEARCHES {
        let space = gemm();
        let mut mine = build(quick(row.name), &space, 0).unwrap();
        let mut others = build(quick(row.name), &space, 0).unwrap();
        let mut seen = HashSet::new();
        for _ in 0..20 {
            let proposals = others.propose(16);
            let trials: Vec<_> =
                proposals.into_iter().map(|config| Trial { outcome: smooth(&space, &config), config }).collect();
            others.observe(&trials);
            mine.observe(&trials);
            seen.extend(trials.into_iter().map(|trial| trial.config));
            let proposals = mine.propose(3);
            assert!(!proposals.is_empty() && proposals.iter().all(|config| !seen.contains(config)), "{}", row.name);
            others.observe(
                &proposals.iter().map(|c| Trial { outcome: smooth(&space, c), config: c.clone() }).collect::<Vec<_>>(),
            );
            seen.extend(proposals);
        }
    }
}

#[test]
fn guided_searches_beat_random_on_a_smooth_landscape() {
    let space = gemm();
    let mean = |text: &str| (0..12).map(|seed| best(&run(text, &space, smooth, seed, 16, 600))).sum::<f64>() / 12.0;
    let random = mean("random");
    for text in
        ["auto", "gbfs", "genetic", "gbfs:start=random", "simulated_annealing", "gbt:steps=100", "opevo", "nose"]
            .into_iter()
            .chain(AS_IN_THE_PAPERS)
    {
        assert!(mean(text) < random, "{text}: {} against {random}", mean(text));
    }
}

/// As above, with fewer runs, since these think for milliseconds a trial.
#[test]
fn neural_searches_beat_random_on_a_smooth_landscape() {
    let space = gemm();
    let mean = |text: &str| (0..5).map(|seed| best(&run(text, &space, smooth, seed, 16, 300))).sum::<f64>() / 5.0;
    let random = mean("random");
    for text in ["na2c", "rnn_controller", "tree_gru:steps=20,updates=5"] {
        assert!(mean(text) < random, "{text}: {} against {random}", mean(text));
    }
}

#[test]
fn random_is_uniform_over_the_legal_configurations() {
    let space = mixed();
    let mut counts = vec![0u32; space.size() as usize];
    let n_draws = 200 * counts.len() as u64;
    for seed in 0..n_draws {
        let first = build("random", &space, seed).unwrap().propose(1);
        counts[space.index_of(&first[0]).unwrap() as usize] += 1;
    }
    let expected = 200.0;
    let chi_square: f64 = counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum();
    let degrees = counts.len() as f64 - 1.0;
    // Mean and standard deviation of the chi-square distribution are n and √(2n).
    assert!((chi_square - degrees).abs() < 5.0 * (2.0 * degrees).sqrt(), "chi-square {chi_square} of {degrees}");
}

/// The paper's first configurations are independent draws. Spread ones lie far apart: of many first pairs
/// none are neighbours.
#[test]
fn a_population_begins_spread_or_at_random() {
    let space = space((0..4).map(|at| Parameter::ordinal(&format!("p{at}"), 0..3)).collect(), vec![]);
    for name in ["opevo", "nose", "genetic"] {
        let n_near = |start: &str| {
            let is_near = |seed: &u64| {
                let first = build(&format!("{name}:start={start}"), &space, *seed).unwrap().propose(2);
                space.neighbours(&first[0]).contains(&first[1])
            };
            (0..300).filter(is_near).count()
        };
        // A configuration has 4 to 8 neighbours among the other 80, 5⅓ on average.
        assert!((8..36).contains(&n_near("random")), "{name}: {} of 300", n_near("random"));
        assert_eq!(n_near("spread"), 0, "{name}");
    }
}

#[test]
fn another_value_is_never_the_old_one() {
    use rand::SeedableRng;
    let space = space((0..8).map(|at| Parameter::boolean(&format!("p{at}"))).collect(), vec![]);
    let mutated = |text: &str| {
        let (row, options) = row(text).unwrap();
        let mutation = genetic::Mutation::new(&Options::parse(row, options).unwrap()).unwrap();
        let mut rng = rand_xoshiro::Xoshiro256PlusPlus::seed_from_u64(1);
        let child = |_| mutation.mutate(&space, &Config::new([0; 8]), &mut rng).ranks().iter().sum::<u64>();
        (0..100).map(child).collect::<Vec<_>>()
    };
    assert!(mutated("nose:mutation=1,steps=0,mutant=other").iter().all(|&n_changed| n_changed == 8));
    let n_changed = mutated("nose:mutation=1,steps=0").iter().sum::<u64>();
    assert!((300..500).contains(&n_changed), "{n_changed} of 800: half of them keep a value of two");
}

#[test]
fn a_search_says_what_it_does_not_see_and_how_much_it_learns_from() {
    assert_eq!(blind_option("gbt:features=loop"), Ok(Some("features")));
    for text in ["gbt", "gbt:features=knob", "gbt:batch=8", "random"] {
        assert_eq!(blind_option(text), Ok(None), "{text}");
    }
    assert!(blind_option("gbt:feature=loop").is_err());
    assert_eq!(most_experience("gbt:experience=30000"), Ok(Some(30_000)));
    assert_eq!((most_experience("gbt"), most_experience("auto")), (Ok(Some(4096)), Ok(None)));
}

#[test]
fn gbfs_starts_untiled_and_goes_to_neighbours() {
    let space = gemm();
    let mut search = build("gbfs", &space, 0).unwrap();
    let start = search.propose(16);
    assert_eq!(start, [Config::new([0, 0, 0])]);
    assert_eq!(space.factors(&start[0], "m"), [1024, 1, 1, 1]);
    search.observe(&[Trial { config: start[0].clone(), outcome: measured(1.0) }]);
    let next = search.propose(16);
    assert_eq!(next.len(), 5);
    assert!(next.iter().all(|config| space.neighbours(&start[0]).contains(config)));
}

#[test]
fn a_walk_begins_at_the_best_of_earlier_trials() {
    let space = gemm();
    let prior = run("random", &space, smooth, 3, 16, 400);
    // The last of several as fast.
    let fastest = prior.iter().rev().min_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost())).unwrap();
    let mut search = build("simulated_annealing", &space, 0).unwrap();
    search.observe(&prior);
    let neighbours = space.neighbours(&fastest.config);
    assert!(search.propose(4).iter().all(|config| neighbours.contains(config)));
}

/// More than a model is fitted on or a network trained with.
#[test]
fn a_search_goes_on_from_many_thousand_trials() {
    let space = gemm();
    let prior = run("random", &space, smooth, 3, 1000, 10_000);
    let known: HashSet<&Config> = prior.iter().map(|trial| &trial.config).collect();
    for row in SEARCHES {
        let mut search = build(quick(row.name), &space, 0).unwrap();
        search.observe(&prior);
        let proposals = search.propose(16);
        assert!(!proposals.is_empty() && proposals.iter().all(|config| !known.contains(config)), "{}", row.name);
    }
}

fn refused(text: &str, expected: &str) {
    let error = build(text, &one_element(), 0).err().expect(text);
    assert_eq!(error.to_string(), expected);
}

#[test]
fn bad_searches_are_refused_with_what_there_is() {
    let known: Vec<&str> = SEARCHES.iter().map(|row| row.name).collect();
    refused("annealing", &format!("unknown search annealing; there are {}", known.join(", ")));
    refused(
        "genetic:pop=3",
        "search genetic has no option pop; it has population, generation, selection, start, crossover, mutation, steps, mutant",
    );
    refused("grid:x=1", "search grid has no option x; it has none");
    refused("genetic:population", "search genetic: population is not one option=value");
    refused("genetic:population=9,population=8", "search genetic: population=8 is not one option=value");
    refused("genetic:population=1", "search genetic: population cannot be 1; it is a number from 2 to 1000000");
    refused("genetic:crossover=x", "search genetic: crossover cannot be x; it is uniform or one_point");
    refused("opevo:selection=x", "search opevo: selection cannot be x; it is rank or fitness");
    refused("genetic:mutation=NaN", "search genetic: mutation cannot be NaN; it is a number from 0 to 1");
    refused("opevo:q=1", "search opevo: q cannot be 1; it is a number from 0 to 0.99");
    refused("nose:k=0", "search nose: k cannot be 0; it is a number from 1 to 1000000");
    refused("gbt:acquisition=ei", "search gbt: acquisition cannot be ei; it is mean where bootstrap is 1");
    refused("gbt:learning_rate=0", "search gbt: learning_rate cannot be 0; it is a number from 0.01 to 1");
    refused("gbfs:start=x", "search gbfs: start cannot be x; it is untiled or random");
}
