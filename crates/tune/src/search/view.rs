//! What a cost model sees of configurations, and what a model of other workloads expects of them.

use std::collections::HashMap;

use tilewright_learn::{Examples, Gbt, GbtOptions, Matrix};

use super::{Contexts, Problem};
use crate::features::{KnobFeatures, LoopContexts, N_CONTEXT_FEATURES, N_RELATION_FEATURES};
use crate::space::Config;
use crate::transfer::Experience;

/// Configurations whose programs are remembered, at most.
const MOST_KEPT: usize = 1 << 14;

/// What features are taken of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FeatureKind {
    /// The configuration.
    Knob,
    /// The loops of its program.
    Loop,
    /// Relations between the loops of its program.
    Relation,
}

/// Turns configurations of a problem into rows of features.
pub(super) struct View {
    kind: FeatureKind,
    knobs: KnobFeatures,
    contexts: Option<Contexts>,
    /// The model of other workloads.
    global: Option<Gbt>,
    /// What was found of configurations whose programs were made.
    kept: HashMap<Config, (Vec<f32>, f32)>,
}

/// Configurations as a model takes them.
pub(super) struct Rows {
    pub(super) features: Matrix,
    /// What the model of other workloads predicts for each; 0 without one.
    pub(super) base: Vec<f32>,
}

impl View {
    /// The view of a problem with features of this kind, or of configurations where there are no programs. Trees with these
    /// options are fitted on what is known of other workloads.
    pub(super) fn new(problem: &Problem, kind: FeatureKind, trees: &GbtOptions, seed: u64) -> View {
        let contexts = problem.contexts.clone();
        let experience = problem.experience.as_deref().filter(|_| contexts.is_some());
        View {
            kind: if contexts.is_some() { kind } else { FeatureKind::Knob },
            knobs: KnobFeatures::new(&problem.space),
            contexts,
            global: experience.map(|experience| fit_global(experience, trees, seed)),
            kept: HashMap::new(),
        }
    }

    /// Whether something is known of configurations before any of them is measured.
    pub(super) fn is_experienced(&self) -> bool {
        self.global.is_some()
    }

    /// Whether a look at a configuration takes its program.
    pub(super) fn makes_programs(&self) -> bool {
        self.kind != FeatureKind::Knob || self.global.is_some()
    }

    /// The number of features.
    pub(super) fn n_features(&self) -> usize {
        match self.kind {
            FeatureKind::Knob => self.knobs.n_features(),
            FeatureKind::Loop => N_CONTEXT_FEATURES,
            FeatureKind::Relation => N_RELATION_FEATURES,
        }
    }

    /// The rows of these configurations. The features of one that makes no program are missing.
    ///
    /// # Cost
    /// Where features are of programs, or there is a model of other workloads, each new configuration is scheduled.
    pub(super) fn of(&mut self, configs: &[Config]) -> Rows {
        let mut rows = Rows { features: Matrix::new(self.n_features()), base: Vec::with_capacity(configs.len()) };
        if !self.makes_programs() {
            configs.iter().for_each(|config| rows.features.push(&self.knobs.of(config)));
            rows.base.resize(configs.len(), 0.0);
            return rows;
        }
        if self.kept.len() + configs.len() > MOST_KEPT {
            self.kept.clear();
        }
        for config in configs {
            if !self.kept.contains_key(config) {
                let found = self.look_at(config);
                self.kept.insert(config.clone(), found);
            }
            let (features, base) = &self.kept[config];
            rows.features.push(features);
            rows.base.push(*base);
        }
        rows
    }

    /// The features of a configuration and what the model of other workloads predicts for it.
    fn look_at(&self, config: &Config) -> (Vec<f32>, f32) {
        let contexts = self.contexts.as_ref().and_then(|contexts| contexts(config));
        let of_program = |features: fn(&LoopContexts) -> Vec<f32>, n_features| {
            contexts.as_ref().map_or_else(|| vec![f32::NAN; n_features], features)
        };
        let relations = || of_program(LoopContexts::relations, N_RELATION_FEATURES);
        let features = match self.kind {
            FeatureKind::Knob => self.knobs.of(config),
            FeatureKind::Loop => of_program(LoopContexts::features, N_CONTEXT_FEATURES),
            FeatureKind::Relation => relations(),
        };
        let base = self.global.as_ref().map_or(0.0, |global| {
            let rows = Matrix::from_rows(N_RELATION_FEATURES, [relations()]);
            global.predict(&rows)[0]
        });
        (features, base)
    }
}

/// The model of other workloads: relations mean the same for any program, and ranks within a task compare.
fn fit_global(experience: &Experience, trees: &GbtOptions, seed: u64) -> Gbt {
    let rows = Matrix::from_rows(N_RELATION_FEATURES, experience.contexts.iter().map(LoopContexts::relations));
    let examples = Examples::new(&rows, &experience.targets).in_groups(&experience.groups);
    Gbt::fit(&examples, trees, seed).unwrap_or_else(|error| panic!("invariant: options and targets are sound: {error}"))
}
