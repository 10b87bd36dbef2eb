//! Exact look-ahead: which values of a kernel's next parameter lead to some valid configuration of a problem.

use std::collections::HashMap;

use tilewright_learn::sequence::Completions;

use super::expression::Code;
use super::specification::KernelSpecification;

/// The constraints of a kernel for one problem, arranged so that each is checked as soon as all it reads is chosen.
///
/// # Cost
/// A depth-first search for some valid completion of each prefix. What later constraints read of a prefix decides whether it
/// has one, so prefixes that agree on that are searched once.
pub struct LookAhead {
    levels: Vec<Level>,
    /// The values of all names: fields, parameters, definitions.
    slots: Vec<Option<i64>>,
    /// Whether a constraint that reads no parameter fails.
    is_impossible: bool,
}

/// A parameter, and what its value decides.
struct Level {
    slot: usize,
    /// What expressions see of each legal value.
    values: Vec<i64>,
    /// Definitions that are known from here on, with their places.
    definitions: Vec<(usize, Code)>,
    /// Constraints that can be checked from here on.
    constraints: Vec<Code>,
    /// The places, filled on earlier levels, that are read on this one or later.
    frontier: Vec<usize>,
    /// By the values on the frontier: whether there is a valid completion from here.
    is_possible: HashMap<Box<[Option<i64>]>, bool>,
}

impl LookAhead {
    /// The look-ahead for a problem.
    pub fn new(kernel: &KernelSpecification, problem: &[i64]) -> LookAhead {
        LookAhead::with(kernel, problem, kernel.constraints.iter().map(|constraint| &constraint.code))
    }

    fn with<'a>(
        kernel: &KernelSpecification,
        problem: &[i64],
        constraints: impl Iterator<Item = &'a Code>,
    ) -> LookAhead {
        let n_fields = kernel.fields.len();
        let n_slots = n_fields + kernel.parameters.len() + kernel.definitions.len();
        let mut known: Vec<Option<Option<i64>>> = problem.iter().map(|&value| Some(Some(value))).collect();
        known.resize(n_slots, None);
        let mut levels: Vec<Level> = (n_fields..)
            .zip(&kernel.parameters)
            .map(|(slot, parameter)| Level {
                slot,
                values: parameter.numbers.clone(),
                definitions: Vec::new(),
                constraints: Vec::new(),
                frontier: Vec::new(),
                is_possible: HashMap::new(),
            })
            .collect();
        // By place: the level that fills it.
        let mut level_of: Vec<usize> = (0..n_slots).map(|slot| slot.saturating_sub(n_fields)).collect();
        let reads = |code: &Code| {
            let mut slots = Vec::new();
            code.reads(&mut slots);
            slots
        };
        let last = |code: &Code, level_of: &[usize]| reads(code).into_iter().map(|slot| level_of[slot]).max();
        let mut definitions = Vec::new();
        for (slot, definition) in (n_fields + kernel.parameters.len()..).zip(&kernel.definitions) {
            match definition.fold(&known) {
                Code::Constant(value) => known[slot] = Some(value),
                code => {
                    level_of[slot] = last(&code, &level_of).expect("invariant: what is not folded reads something");
                    definitions.push((slot, code));
                }
            }
        }
        let mut is_impossible = false;
        let mut wanted: Vec<usize> = Vec::new();
        for constraint in constraints {
            match constraint.fold(&known) {
                Code::Constant(value) => is_impossible |= value != Some(1),
                code => {
                    wanted.extend(reads(&code));
                    let level = last(&code, &level_of).expect("invariant: what is not folded reads something");
                    levels[level].constraints.push(code);
                }
            }
        }
        // The last definition first, since each may be read by later ones only.
        for (slot, code) in definitions.into_iter().rev() {
            if wanted.contains(&slot) {
                wanted.extend(reads(&code));
                levels[level_of[slot]].definitions.insert(0, (slot, code));
            }
        }
        for at in 0..levels.len() {
            let later = levels[at..].iter().flat_map(|level| {
                level.definitions.iter().map(|(_, code)| code).chain(&level.constraints).flat_map(reads)
            });
            let mut frontier: Vec<usize> = later.filter(|&slot| level_of[slot] < at).collect();
            frontier.sort_unstable();
            frontier.dedup();
            levels[at].frontier = frontier;
        }
        let slots = known.into_iter().map(Option::flatten).collect();
        LookAhead { levels, slots, is_impossible }
    }

    /// Whether there is a valid configuration at all.
    pub fn is_satisfiable(&mut self) -> bool {
        !self.is_impossible && self.is_possible(0)
    }

    /// Chooses a value on a level; whether the constraints that are due there hold. Earlier levels must be chosen.
    fn choose(&mut self, level: usize, value: i64) -> bool {
        let Level { slot, definitions, constraints, .. } = &self.levels[level];
        self.slots[*slot] = Some(value);
        for (slot, code) in definitions {
            self.slots[*slot] = code.evaluate(&self.slots);
        }
        constraints.iter().all(|constraint| constraint.evaluate(&self.slots) == Some(1))
    }

    /// Whether what is chosen before a level has a valid completion from there.
    fn is_possible(&mut self, level: usize) -> bool {
        let Some(at) = self.levels.get(level) else { return true };
        let key: Box<[Option<i64>]> = at.frontier.iter().map(|&slot| self.slots[slot]).collect();
        if let Some(&known) = at.is_possible.get(&key) {
            return known;
        }
        let n_values = at.values.len();
        let found = (0..n_values).any(|i| {
            let value = self.levels[level].values[i];
            self.choose(level, value) && self.is_possible(level + 1)
        });
        self.levels[level].is_possible.insert(key, found);
        found
    }
}

impl Completions for LookAhead {
    /// # Panics
    /// Where the prefix is a whole configuration or longer, or holds what is no index of a value.
    fn allowed(&mut self, prefix: &[u32]) -> Vec<bool> {
        let n_values = self.levels[prefix.len()].values.len();
        let mut holds = !self.is_impossible;
        for (level, &value) in prefix.iter().enumerate() {
            let value = self.levels[level].values[value as usize];
            holds = holds && self.choose(level, value);
        }
        if !holds {
            return vec![false; n_values];
        }
        let level = prefix.len();
        (0..n_values)
            .map(|i| {
                let value = self.levels[level].values[i];
                self.choose(level, value) && self.is_possible(level + 1)
            })
            .collect()
    }
}

impl KernelSpecification {
    /// The constraint to blame where no configuration is valid for a problem: the first that excludes everything, alone or
    /// together with those before it.
    pub fn unsatisfiable(&self, problem: &[i64]) -> Option<&str> {
        let codes = || self.constraints.iter().map(|constraint| &constraint.code);
        let is_satisfiable = |from: usize, to: usize| {
            LookAhead::with(self, problem, codes().skip(from).take(to - from)).is_satisfiable()
        };
        if is_satisfiable(0, self.constraints.len()) {
            return None;
        }
        let alone = (0..self.constraints.len()).find(|&at| !is_satisfiable(at, at + 1));
        let first = alone.or_else(|| (0..self.constraints.len()).find(|&at| !is_satisfiable(0, at + 1)));
        first.map(|at| self.constraints[at].name.as_str())
    }
}
