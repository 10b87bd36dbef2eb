//! Inputs of a cost model: features of configurations, and predictions of a model of other workloads.

use std::collections::HashMap;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Examples, Gbt, GbtOptions, Matrix, Objective};

use super::{Contexts, Experience, Problem};
use crate::features::{
    KnobFeatures, LoopContexts, N_CONTEXT_FEATURES, N_RELATION_FEATURES, N_VALUE_FEATURES, value_features,
};
use crate::space::{Config, Space};

/// Maximum number of configurations whose program features are cached.
const MOST_KEPT: usize = 1 << 14;
/// Number of configurations for which the model of other workloads is evaluated.
const N_ASKED: usize = 1024;

/// Kind of features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FeatureKind {
    /// The configuration.
    Knob,
    /// Configuration, and the alignments of its numbers.
    Aligned,
    /// Loops of the configuration's program.
    Loop,
    /// Relations between the loops of its program.
    Relation,
}

/// Features by which the model of other workloads describes a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Described {
    /// Relations, which mean the same for any nest of loops, and the loops themselves, the innermost one
    /// first, which mean the same for all programs of a template.
    All,
    /// Loops of the program.
    Loop,
    /// Relations.
    Relation,
    /// Configuration of the program.
    Knob,
}

impl Described {
    /// Returns the number of features.
    fn n_features(self) -> usize {
        match self {
            Described::All => N_RELATION_FEATURES + N_CONTEXT_FEATURES,
            Described::Loop => N_CONTEXT_FEATURES,
            Described::Relation => N_RELATION_FEATURES,
            Described::Knob => N_VALUE_FEATURES,
        }
    }

    /// Returns the features of a program and of the values of its configuration.
    fn features(self, program: &LoopContexts, values: &[f32]) -> Vec<f32> {
        match self {
            Described::All => [program.relations(), program.features()].concat(),
            Described::Loop => program.features(),
            Described::Relation => program.relations(),
            Described::Knob => values.to_vec(),
        }
    }
}

/// Encoder of configurations of a problem as rows of features.
pub(super) struct View {
    kind: FeatureKind,
    knobs: KnobFeatures,
    contexts: Option<Contexts>,
    /// Model of other workloads, as trees on the features of configurations.
    prior: Option<Gbt>,
    /// Cached features of configurations whose programs were made.
    kept: HashMap<Config, Vec<f32>>,
}

/// Configurations as the input of a model.
pub(super) struct Rows {
    pub(super) features: Matrix,
    /// Prediction of the model of other workloads for each row; 0 without one.
    pub(super) base: Vec<f32>,
}

impl View {
    /// Makes the view of a problem with features of this kind, or with features of configurations if there
    /// are no programs. Trees with these options are fitted on the trials of other workloads, with the
    /// features that `described` names.
    ///
    /// # Cost
    /// If there are trials of other workloads, [`N_ASKED`] configurations are scheduled.
    pub(super) fn new(
        problem: &Problem,
        kind: FeatureKind,
        described: Described,
        trees: &GbtOptions,
        seed: u64,
    ) -> View {
        let contexts = problem.contexts.clone();
        let is_aligned = kind == FeatureKind::Aligned;
        let knobs = if is_aligned { KnobFeatures::aligned } else { KnobFeatures::new }(&problem.space);
        let prior = match (&problem.experience, &contexts) {
            (Some(experience), Some(contexts)) => {
                let global = fit_global(experience, described, trees, seed);
                Some(fit_prior((&global, described), &problem.space, contexts, &knobs, seed))
            }
            _ => None,
        };
        let kind = if contexts.is_some() { kind } else { FeatureKind::Knob };
        View { kind, knobs, contexts, prior, kept: HashMap::new() }
    }

    /// Whether there are predictions before any configuration is measured.
    pub(super) fn is_experienced(&self) -> bool {
        self.prior.is_some()
    }

    /// Whether the features of a configuration need its program.
    pub(super) fn makes_programs(&self) -> bool {
        matches!(self.kind, FeatureKind::Loop | FeatureKind::Relation)
    }

    /// Returns the number of features.
    pub(super) fn n_features(&self) -> usize {
        match self.kind {
            FeatureKind::Knob | FeatureKind::Aligned => self.knobs.n_features(),
            FeatureKind::Loop => N_CONTEXT_FEATURES,
            FeatureKind::Relation => N_RELATION_FEATURES,
        }
    }

    /// Rows of these configurations. The features of one that yields no program are missing.
    ///
    /// # Cost
    /// If features are of programs, each new configuration is scheduled.
    pub(super) fn of(&mut self, configs: &[Config]) -> Rows {
        let knobs = Matrix::from_rows(self.knobs.n_features(), configs.iter().map(|config| self.knobs.of(config)));
        let base = self.prior.as_ref().map_or_else(|| vec![0.0; configs.len()], |prior| prior.predict(&knobs));
        if !self.makes_programs() {
            return Rows { features: knobs, base };
        }
        if self.kept.len() + configs.len() > MOST_KEPT {
            self.kept.clear();
        }
        let mut features = Matrix::new(self.n_features());
        for config in configs {
            if !self.kept.contains_key(config) {
                let found = self.look_at(config);
                self.kept.insert(config.clone(), found);
            }
            features.push(&self.kept[config]);
        }
        Rows { features, base }
    }

    /// Returns the features of a configuration's program.
    fn look_at(&self, config: &Config) -> Vec<f32> {
        let features: fn(&LoopContexts) -> Vec<f32> = match self.kind {
            FeatureKind::Relation => LoopContexts::relations,
            FeatureKind::Knob | FeatureKind::Aligned | FeatureKind::Loop => LoopContexts::features,
        };
        let contexts = self.contexts.as_ref().and_then(|contexts| contexts(config));
        contexts.as_ref().map_or_else(|| vec![f32::NAN; self.n_features()], features)
    }
}

/// Fits the model of other workloads. It learns ranks within each task, since throughputs of tasks do not
/// compare; ranks do not compare across tasks either, so that there is no early stopping and all trees are
/// grown.
fn fit_global(experience: &Experience, described: Described, trees: &GbtOptions, seed: u64) -> Gbt {
    let programs = experience.contexts.iter().zip(&experience.values);
    let features = programs.map(|(program, values)| described.features(program, values));
    let rows = Matrix::from_rows(described.n_features(), features);
    let examples = Examples::new(&rows, &experience.targets).in_groups(&experience.groups);
    let trees = GbtOptions { early_stop: None, ..trees.clone() };
    Gbt::fit(&examples, &trees, seed)
        .unwrap_or_else(|error| panic!("invariant: options and targets are sound: {error}"))
}

/// Fits trees on the parameters to the other model's predictions for a sample of the space: evaluating them
/// needs no program.
fn fit_prior(
    (global, described): (&Gbt, Described),
    space: &Space,
    contexts: &Contexts,
    knobs: &KnobFeatures,
    seed: u64,
) -> Gbt {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut programs = Matrix::new(described.n_features());
    let mut rows = Matrix::new(knobs.n_features());
    for config in (0..N_ASKED).map(|_| space.sample(&mut rng)) {
        if let Some(contexts) = contexts(&config) {
            programs.push(&described.features(&contexts, &value_features(&space.config_to_json(&config))));
            rows.push(&knobs.of(&config));
        }
    }
    let options = GbtOptions { objective: Objective::SquaredError, ..GbtOptions::default() };
    let sound = |error| panic!("invariant: options and targets are sound: {error}");
    Gbt::fit(&Examples::new(&rows, &global.predict(&programs)), &options, seed).unwrap_or_else(sound)
}
