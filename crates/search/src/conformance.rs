//! Conformance test: checks in one call that a search satisfies the contract of [`Search`].
//!
//! All [`SEARCHES`](crate::SEARCHES) pass it; run it on a search of your own, too:
//!
//! ```
//! use std::collections::HashSet;
//! use std::sync::Arc;
//! use tilewright_search::{Config, Search, Space, Trial, conformance};
//!
//! /// Goes through a space from its end.
//! struct Backwards {
//!     space: Arc<Space>,
//!     left: u128,
//!     seen: HashSet<Config>,
//! }
//!
//! impl Search for Backwards {
//!     fn propose(&mut self, n: usize) -> Vec<Config> {
//!         let mut batch = Vec::new();
//!         while batch.len() < n && self.left > 0 {
//!             self.left -= 1;
//!             let config = self.space.config_at(self.left);
//!             if self.seen.insert(config.clone()) {
//!                 batch.push(config);
//!             }
//!         }
//!         batch
//!     }
//!
//!     fn observe(&mut self, trials: &[Trial]) {
//!         self.seen.extend(trials.iter().map(|trial| trial.config.clone()));
//!     }
//! }
//!
//! conformance::check(|space, _seed| {
//!     Box::new(Backwards { space: space.clone(), left: space.size(), seen: HashSet::new() })
//! });
//! ```

use std::collections::HashSet;
use std::sync::Arc;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::search::{Search, build};
use crate::space::{Config, Constraint, Parameter, Space};
use crate::trial::{ErrorClass, Outcome, Timing, Trial};

/// Outcome of each configuration of a space.
type Landscape = fn(&Space, &Config) -> Outcome;

/// Tests a search on synthetic spaces and objective functions: small and huge spaces, smooth functions and
/// ones that fail everywhere. `make` builds the search for a space from a seed.
///
/// - Proposals are legal, no more than requested, and were never proposed or observed before.
/// - The same seed and the same trials give the same proposals.
/// - A search ends, permanently, once the whole space has been proposed or observed, and not before; it does
///   not wait for observations.
/// - Trials of other runs are accepted before and between proposals, even many thousands; trials of other
///   spaces are ignored.
/// - Spaces of 10¹⁵ configurations and landscapes on which everything fails do not stall it.
///
/// # Panics
/// If the search violates the contract; the message names the violation.
///
/// # Cost
/// About 10,000 proposals: test a search that learns with small models.
pub fn check(make: impl Fn(&Arc<Space>, u64) -> Box<dyn Search>) {
    let make: Maker = &make;
    small_spaces_are_exhausted(make);
    huge_spaces_do_not_stall(make);
    observed_trials_are_not_proposed(make);
    trials_between_proposals_are_not_proposed(make);
    many_trials_are_taken_note_of(make);
}

/// Tests that a search finds faster configurations than random search on a smooth objective function, as a
/// mean over `n_runs` runs of `n_trials` trials.
///
/// # Panics
/// If the search is not better; the message gives both means.
pub fn check_against_random(make: impl Fn(&Arc<Space>, u64) -> Box<dyn Search>, n_runs: u64, n_trials: usize) {
    let space = gemm();
    let mean = |make: Maker| {
        let best = |seed| {
            let trials = run(make, &space, smooth, seed, 16, n_trials);
            trials.iter().map(|trial| trial.outcome.cost()).fold(f64::INFINITY, f64::min)
        };
        (0..n_runs).map(best).sum::<f64>() / n_runs as f64
    };
    let random = mean(&|space, seed| build("random", space, seed).expect("invariant: there is random search"));
    let found = mean(&make);
    assert!(found < random, "no better than random search: {found} ns against {random} ns");
}

/// Function that makes a search for a space from a seed.
type Maker<'a> = &'a dyn Fn(&Arc<Space>, u64) -> Box<dyn Search>;

pub(crate) fn space(parameters: Vec<Parameter>, constraints: Vec<Constraint>) -> Arc<Space> {
    Arc::new(Space::new("test", parameters, constraints).expect("invariant: the spaces of the suite are sound"))
}

fn one_element() -> Arc<Space> {
    space(vec![Parameter::factorization("m", 1, 4), Parameter::ordinal("u", [16])], vec![])
}

/// 3 legal points of 27 million, tied by one constraint.
fn three_legal() -> Arc<Space> {
    let parameters = ["a", "b", "c"].map(|name| Parameter::ordinal(name, 0..300)).to_vec();
    let few = Constraint::new("few", "b = 2a, c = b + 1, a >= 147", &["a", "b", "c"], |v| {
        v[0].int() * 2 == v[1].int() && v[1].int() + 1 == v[2].int() && v[0].int() >= 147
    });
    space(parameters, vec![few])
}

fn quadrillion() -> Arc<Space> {
    let parameters = (0..5).map(|i| Parameter::ordinal(&format!("p{i}"), 0..1000)).collect();
    space(parameters, vec![])
}

/// Every kind of parameter, two of them tied; 24 · 4 · 6 configurations.
pub(crate) fn mixed() -> Arc<Space> {
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

/// Tiles of a matrix product of 1024 × 1024 × 1024.
pub(crate) fn gemm() -> Arc<Space> {
    let parameters = [("m", 4), ("k", 2), ("n", 4)].map(|(name, parts)| Parameter::factorization(name, 1024, parts));
    space(parameters.to_vec(), vec![])
}

pub(crate) fn measured(median_ns: f64) -> Outcome {
    Outcome::Measured(Timing::of_samples(&[median_ns], false))
}

fn all_fail(_: &Space, _: &Config) -> Outcome {
    Outcome::Failed { class: ErrorClass::RuntimeError, message: "crash".into() }
}

/// Equal times everywhere but in the last configuration.
fn needle(space: &Space, config: &Config) -> Outcome {
    measured(if space.index_of(config) == Some(space.size() - 1) { 1.0 } else { 1000.0 })
}

/// Slower the farther from balanced tiles; a fifth of the configurations fail.
pub(crate) fn smooth(space: &Space, config: &Config) -> Outcome {
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

fn trial(space: &Space, landscape: Landscape, config: Config) -> Trial {
    Trial { outcome: landscape(space, &config), config }
}

/// Runs a search for up to `budget` trials and checks the contract for each proposal.
pub(crate) fn run(
    make: Maker,
    space: &Arc<Space>,
    landscape: Landscape,
    seed: u64,
    batch: usize,
    budget: usize,
) -> Vec<Trial> {
    let mut search = make(space, seed);
    let mut seen = HashSet::new();
    let mut history = Vec::new();
    while history.len() < budget {
        let asked = batch.min(budget - history.len());
        let proposals = search.propose(asked);
        assert!(proposals.len() <= asked, "more proposals than were asked for: {} of {asked}", proposals.len());
        if proposals.is_empty() {
            assert_eq!(history.len() as u128, space.size(), "it ends before the space is exhausted");
            assert!(search.propose(batch).is_empty(), "it goes on after its end");
            break;
        }
        for config in &proposals {
            assert!(space.contains(config) && space.violated(config).is_none(), "an illegal proposal: {config:?}");
            assert!(seen.insert(config.clone()), "a proposal is made twice: {config:?}");
        }
        let trials: Vec<Trial> = proposals.into_iter().map(|config| trial(space, landscape, config)).collect();
        search.observe(&trials);
        history.extend(trials);
    }
    history
}

/// Runs a search twice with one seed, as [`run`] does.
fn run_twice(make: Maker, space: &Arc<Space>, landscape: Landscape, seed: u64, batch: usize, budget: usize) -> usize {
    let [trials, again] = [0; 2].map(|_| run(make, space, landscape, seed, batch, budget));
    assert_eq!(trials, again, "one seed gives different proposals");
    trials.len()
}

fn small_spaces_are_exhausted(make: Maker) {
    for (space, n) in [(one_element(), 1), (three_legal(), 3), (mixed(), 24 * 4 * 6)] {
        for landscape in [all_fail as Landscape, needle] {
            for batch in [1, 7, 1000] {
                assert_eq!(run_twice(make, &space, landscape, 1, batch, usize::MAX), n, "trials of a space of {n}");
            }
        }
    }
    let larger = space(vec![Parameter::ordinal("a", 0..40), Parameter::ordinal("b", 0..40)], vec![]);
    assert_eq!(run(make, &larger, needle, 5, 64, usize::MAX).len(), 1600, "trials of a space of 1600");
}

fn huge_spaces_do_not_stall(make: Maker) {
    let (huge, gemm) = (quadrillion(), gemm());
    for (space, landscape) in [(&huge, all_fail as Landscape), (&huge, needle), (&gemm, all_fail), (&gemm, smooth)] {
        assert_eq!(run_twice(make, space, landscape, 3, 16, 300), 300, "trials in a large space");
    }
}

fn observed_trials_are_not_proposed(make: Maker) {
    let space = mixed();
    let mut order: Vec<u128> = (0..space.size()).collect();
    rand::seq::SliceRandom::shuffle(&mut order[..], &mut Xoshiro256PlusPlus::seed_from_u64(11));
    let prior: Vec<Trial> = order[..400].iter().map(|&at| trial(&space, needle, space.config_at(at))).collect();
    let mut search = make(&space, 0);
    let foreign = Trial { config: Config::new([9, 9]), outcome: measured(1.0) };
    search.observe(&[foreign]);
    search.observe(&prior);
    let mut rest = Vec::new();
    loop {
        // Nothing is observed here, and the search must not wait for it.
        let proposals = search.propose(5);
        if proposals.is_empty() {
            break;
        }
        rest.extend(proposals);
    }
    assert_eq!(rest.len() as u128, space.size() - 400, "proposals beside 400 observed trials");
    let all: HashSet<_> = prior.iter().map(|trial| &trial.config).chain(&rest).collect();
    assert_eq!(all.len() as u128, space.size(), "an observed trial is proposed, or one twice");
}

fn trials_between_proposals_are_not_proposed(make: Maker) {
    let space = gemm();
    let (mut mine, mut others) = (make(&space, 0), make(&space, 0));
    let mut seen = HashSet::new();
    for _ in 0..20 {
        let trials = |configs: Vec<Config>| -> Vec<Trial> {
            configs.into_iter().map(|config| trial(&space, smooth, config)).collect()
        };
        let theirs = trials(others.propose(16));
        others.observe(&theirs);
        mine.observe(&theirs);
        seen.extend(theirs.into_iter().map(|trial| trial.config));
        let proposals = mine.propose(3);
        assert!(!proposals.is_empty(), "no proposal beside another's trials");
        assert!(proposals.iter().all(|config| !seen.contains(config)), "another's trial is proposed");
        others.observe(&trials(proposals.clone()));
        seen.extend(proposals);
    }
}

/// Observes more trials than a model is fitted on or a network is trained with.
fn many_trials_are_taken_note_of(make: Maker) {
    let space = gemm();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    let known: HashSet<Config> = (0..11_000).map(|_| space.sample(&mut rng)).collect();
    let mut prior: Vec<Trial> = known.iter().map(|config| trial(&space, smooth, config.clone())).collect();
    prior.sort_by(|a, b| a.config.cmp(&b.config));
    let mut search = make(&space, 0);
    search.observe(&prior);
    let proposals = search.propose(16);
    assert!(!proposals.is_empty(), "no proposal after {} trials", prior.len());
    assert!(proposals.iter().all(|config| !known.contains(config)), "one of many observed trials is proposed");
}
