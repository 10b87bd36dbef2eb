//! Every row of [`SEARCHES`]: seeds, starts, options. Tests that take long are in `tests/searches.rs`.

use std::sync::Arc;

#[path = "../../tests/quick/mod.rs"]
mod quick;

use super::*;
use crate::conformance::{self, gemm, measured, mixed, smooth, space};
use crate::space::{Domain, Parameter};
use quick::quick;

fn maker(text: &'static str) -> impl Fn(&Arc<Space>, u64) -> Box<dyn Search> {
    move |space, seed| build(text, space, seed).unwrap()
}

#[test]
fn the_seed_decides_the_proposals() {
    for row in SEARCHES {
        let of_seed = |seed| conformance::run(&maker(quick(row.name)), &gemm(), smooth, seed, 16, 500);
        assert_eq!(of_seed(7), of_seed(7), "{}", row.name);
        assert!(row.name == "grid" || of_seed(7) != of_seed(8), "{}", row.name);
    }
}

/// Fractions are texts in a space, and their order counts as that of integers does.
#[test]
fn fractions_are_searched_like_integers() {
    let bowl = |_: &Space, config: &Config| {
        let off = |(&rank, aim): (&u64, u64)| rank.abs_diff(aim).pow(2);
        measured(1.0 + config.ranks().iter().zip([9, 2, 5]).map(off).sum::<u64>() as f64)
    };
    let of = |values: &str| {
        let parameter = |name| Parameter::of_data(name, &crate::expression::list(values).unwrap());
        space(["a", "b", "c"].map(parameter).to_vec(), vec![])
    };
    let (integers, fractions) = (of("[2**i for i in range(12)]"), of("[2**i / 16 for i in range(12)]"));
    assert!(matches!(fractions.domain(0), Domain::Categorical(texts) if texts[..2] == ["0.0625", "0.125"]));
    for row in SEARCHES {
        let proposals = |space| conformance::run(&maker(quick(row.name)), space, bowl, 3, 4, 60);
        assert_eq!(proposals(&fractions), proposals(&integers), "{}", row.name);
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
    for name in ["opevo", "nose", "genetic", "lfbo"] {
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
    for text in ["gbt", "gbt:features=knob", "gbt:features=aligned", "nose:features=aligned", "gbt:batch=8", "random"] {
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
    let prior = conformance::run(&maker("random"), &space, smooth, 3, 16, 400);
    // The last of several equally fast trials.
    let fastest = prior.iter().rev().min_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost())).unwrap();
    let mut search = build("simulated_annealing", &space, 0).unwrap();
    search.observe(&prior);
    let neighbours = space.neighbours(&fastest.config);
    assert!(search.propose(4).iter().all(|config| neighbours.contains(config)));
}

#[test]
fn the_read_me_has_a_row_for_each_search() {
    let rows: Vec<&str> = include_str!("../../README.md").lines().filter(|line| line.starts_with("| `")).collect();
    let expected = |row: &SearchRow| {
        let paper = if row.paper.is_empty() { "–" } else { row.paper };
        format!("| `{}` | {paper} |", row.name)
    };
    assert_eq!(rows.len(), SEARCHES.len());
    for (found, row) in rows.iter().zip(SEARCHES) {
        assert!(found.starts_with(&expected(row)), "{found}");
    }
}

fn refused(text: &str, expected: &str) {
    let error = build(text, &gemm(), 0).err().expect(text);
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
    refused("lfbo:quantile=1", "search lfbo: quantile cannot be 1; it is a number from 0.001 to 0.999");
    refused("nose:features=loop", "search nose: features cannot be loop; it is knob or aligned");
    refused("gbfs:start=x", "search gbfs: start cannot be x; it is untiled or random");
}
