//! Evolutionary search whose mutations follow the topology of each parameter.

use rand_xoshiro::Xoshiro256PlusPlus;

use super::population::{GENERATION, Parents, Population, SELECTION, START};
use super::walk::q_random_walk;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::space::Config;
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "opevo",
    text: "recombines the best configurations and mutates each parameter by a random walk on its own topology",
    paper: "OpEvo, algorithm 1",
    transfers: false,
    options: &[
        SearchOption { name: "parents", default: "8", text: "size of the population, at least 1" },
        GENERATION,
        SELECTION,
        START,
        SearchOption {
            name: "q",
            default: "0.2",
            text: "probability of each further step of a walk, 0 to 0.99; 0.5 in the paper",
        },
    ],
    make: |Problem { space, .. }, seed, options| {
        let population = Population::new(space, seed, options.number("parents", 1..=1_000_000)?, options)?;
        Ok(Box::new(OpEvo { population, q: options.number("q", 0.0..=0.99)? }))
    },
};

/// Top configurations as parents, one parent for each parameter, walks as mutations.
///
/// # Source
/// OpEvo, algorithm 1, with its λ = 8; `generation=8,selection=fitness,q=0.5,start=random` are the paper's.
/// By default we differ in that children are bred from all known trials, not 8 at a time; in selection by
/// rank, which the scale of the times does not change; in q, since 0.5 changes most parameters of a child at
/// once; and in the first configurations, which are spread over the space. A child that is illegal or not new
/// is mutated again; after several illegal mutations it becomes the nearest legal configuration.
struct OpEvo {
    population: Population,
    q: f64,
}

impl Search for OpEvo {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let OpEvo { population, q } = self;
        population.propose(n, |breeding| {
            let n_parameters = breeding.n_parameters();
            let inherit = |parents: &Parents<'_>, rng: &mut Xoshiro256PlusPlus| {
                Config::new((0..n_parameters).map(|at| parents.select(rng).ranks()[at]).collect::<Vec<_>>())
            };
            breeding.children(breeding.n_children, inherit, |space, heir, rng| {
                let walk = |(parameter, &rank)| q_random_walk(space, parameter, rank, *q, rng);
                Config::new(heir.ranks().iter().enumerate().map(walk).collect::<Vec<_>>())
            })
        })
    }

    fn observe(&mut self, trials: &[Trial]) {
        self.population.observe(trials);
    }
}
