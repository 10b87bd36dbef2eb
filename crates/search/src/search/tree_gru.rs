//! Tree-structured GRU over the loops of a program as the cost model, simulated annealing on its predictions.

use tilewright_learn::{Matrix, Readout, TreeGru, TreeGruOptions, TreeObjective, TreeRows};

use super::annealing::{self, Annealing, CostModel, targets};
use super::{Contexts, Problem, SearchOption, SearchRow};
use crate::features::{N_TREE_FEATURES, UnitFeatures};
use crate::space::Config;

/// Memory slots that loops are scattered into.
const N_SLOTS: usize = 4;

pub(super) const ROW: SearchRow = SearchRow {
    name: "tree_gru",
    text: "simulated annealing on a recursive network over the loops of the program, which learns from all trials so far",
    paper: "AutoTVM, algorithm 1 and section 4 (context-encoded TreeGRU)",
    transfers: false,
    options: &[
        SearchOption { name: "objective", default: "rank", text: "what the network minimizes: rank or regression" },
        SearchOption {
            name: "readout",
            default: "slots",
            text: "what it predicts from: slots (all loops, scattered into memory slots) or roots (the outermost loops)",
        },
        SearchOption {
            name: "width",
            default: "64",
            text: "width of a node's embedding and of the network's state, 1 to 1024; 128 in the paper",
        },
        SearchOption { name: "updates", default: "20", text: "gradient steps before each batch" },
        annealing::BATCH,
        annealing::EPSILON,
        annealing::DIVERSITY,
        SearchOption { default: "32", ..annealing::CHAINS },
        SearchOption {
            default: "50",
            text: "steps of the annealing, at most; unless given, at most 32 where programs are made, since the paper's 500 take seconds for each batch",
            ..annealing::STEPS
        },
    ],
    make: |problem, seed, options| {
        let trees = Trees::new(problem);
        let objective = match options.choice("objective", &["rank", "regression"])? {
            0 => TreeObjective::Rank,
            _ => TreeObjective::Regression,
        };
        let readout = match options.choice("readout", &["slots", "roots"])? {
            0 => Readout::Slots(N_SLOTS),
            _ => Readout::Roots,
        };
        let width = options.number("width", 1..=1024)?;
        let network =
            TreeGruOptions { n_embedding: width, n_hidden: width, objective, readout, ..TreeGruOptions::default() };
        let model = Recursive {
            network: TreeGru::new(trees.n_features(), &network, seed),
            n_updates: options.number("updates", 0..=1_000_000)?,
            trees,
            known: Vec::new(),
            fitness: Vec::new(),
        };
        Ok(Box::new(Annealing::new(model, &problem.space, seed, options)?))
    },
};

/// TreeGRU, which continues training from fit to fit.
struct Recursive {
    network: TreeGru,
    n_updates: usize,
    trees: Trees,
    /// Trees of all trials.
    known: Vec<TreeRows>,
    fitness: Vec<f64>,
}

impl CostModel for Recursive {
    fn observe(&mut self, config: &Config, fitness: f64) {
        self.known.push(self.trees.of(config));
        self.fitness.push(fitness);
    }

    fn fit(&mut self, _: u64) {
        self.network.fit(&self.known, &targets(&self.fitness), self.n_updates);
    }

    fn score(&mut self, configs: &[Config]) -> Vec<f64> {
        let trees: Vec<TreeRows> = configs.iter().map(|config| self.trees.of(config)).collect();
        self.network.predict(&trees).into_iter().map(f64::from).collect()
    }

    fn makes_programs(&self) -> bool {
        matches!(self.trees, Trees::Loops(_))
    }
}

/// Source of the tree that the network reads for a configuration.
enum Trees {
    /// Loops of the configuration's program; an empty tree if it yields no program.
    Loops(Contexts),
    /// Features of configurations that are not programs: a sequence of the parameters, each with its number
    /// and features.
    Parameters { features: UnitFeatures, groups: Vec<usize>, n_parameters: usize, width: usize },
}

impl Trees {
    fn new(problem: &Problem) -> Trees {
        if let Some(contexts) = &problem.contexts {
            return Trees::Loops(contexts.clone());
        }
        let features = UnitFeatures::new(&problem.space);
        let (groups, n_parameters) = (features.parameters(), problem.space.n_parameters());
        let width_of = |parameter| groups.iter().filter(|&&group| group == parameter).count();
        let width = (0..n_parameters).map(width_of).max().unwrap_or(0);
        Trees::Parameters { features, groups, n_parameters, width }
    }

    /// Returns the number of features of a node.
    fn n_features(&self) -> usize {
        match self {
            Trees::Loops(_) => N_TREE_FEATURES,
            Trees::Parameters { n_parameters, width, .. } => n_parameters + width,
        }
    }

    fn of(&self, config: &Config) -> TreeRows {
        match self {
            Trees::Loops(contexts) => match contexts(config) {
                Some(contexts) => contexts.tree(),
                None => TreeRows::chain(Matrix::new(self.n_features())),
            },
            Trees::Parameters { features, groups, n_parameters, .. } => {
                let mut rows = vec![vec![0.0; self.n_features()]; *n_parameters];
                rows.iter_mut().enumerate().for_each(|(parameter, row)| row[parameter] = 1.0);
                let mut n_written = vec![*n_parameters; *n_parameters];
                for (x, &parameter) in features.of(config).into_iter().zip(groups) {
                    rows[parameter][n_written[parameter]] = x;
                    n_written[parameter] += 1;
                }
                TreeRows::chain(Matrix::from_rows(self.n_features(), rows))
            }
        }
    }
}
