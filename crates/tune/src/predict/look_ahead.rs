//! Look-ahead for constrained decoding: the values of the next parameter that can still lead to a valid
//! configuration.

use std::collections::HashMap;
use std::ops::ControlFlow;

use tilewright_learn::sequence::Completions;
use tilewright_search::expression::residual::{ValueRange, residual};
use tilewright_search::expression::{Datum, ResolvedExpression};

use super::specification::KernelSpecification;

/// Maximum number of choices that all queries together may try while they are exact; some seconds' work.
const MOST_STEPS: u64 = 1 << 24;
/// Maximum number of choices of a query once [`MOST_STEPS`] are spent.
const LEAST_STEPS: u64 = 256;
/// Maximum number of values that are cached for prefixes; some hundred megabytes.
const MOST_REMEMBERED: usize = 1 << 23;
/// Overhead of caching a prefix, besides its values.
const COST_OF_PREFIX: usize = 4;
/// Number of choices between two calls of the observer.
const WATCH_EVERY: u64 = 1 << 12;

/// Observer of a search: receives the number of choices tried, and may stop it.
type ChoiceWatch<'a> = dyn FnMut(u64) -> ControlFlow<()> + 'a;

/// Constraints of a kernel for one problem, each checked as soon as all parameters that it reads are chosen.
///
/// The look-ahead is exact unless that would take too long or too much memory: then a value counts as
/// possible until it is known not to be. Complete configurations are valid in any case, but a prefix may lead
/// to none. [`LookAhead::is_exact`] tells whether it was exact.
pub struct LookAhead<'a> {
    levels: Vec<ParameterLevel>,
    /// Values of all names: fields, parameters, definitions.
    slots: Vec<Option<Datum>>,
    /// Whether a constraint that reads no parameter fails.
    is_impossible: bool,
    effort: Effort<'a>,
}

/// Cost of the queries so far.
struct Effort<'a> {
    n_steps: u64,
    /// Number of steps at which the current query is given up.
    limit: u64,
    n_remembered: usize,
    is_exact: bool,
    is_stopped: bool,
    watch: Option<Box<ChoiceWatch<'a>>>,
}

impl Effort<'_> {
    /// Counts a choice; returns whether the query continues.
    fn step(&mut self) -> bool {
        self.n_steps += 1;
        if self.n_steps.is_multiple_of(WATCH_EVERY)
            && let Some(watch) = &mut self.watch
        {
            self.is_stopped |= watch(self.n_steps).is_break();
        }
        !self.is_stopped && self.n_steps < self.limit
    }

    /// Begins a query.
    fn ask(&mut self) {
        let left = MOST_STEPS.saturating_sub(self.n_steps);
        self.limit = self.n_steps + (left / 2).max(LEAST_STEPS);
    }
}

/// Parameter, with the definitions and constraints that its value decides.
struct ParameterLevel {
    slot: usize,
    /// Legal values, as expressions see them.
    values: Vec<Datum>,
    /// Definitions that are known from here on, with their slots.
    definitions: Vec<(usize, ResolvedExpression)>,
    /// Constraints that can be checked from here on.
    constraints: Vec<ResolvedExpression>,
    /// Partial results of earlier levels that this one or later ones read, as expressions of earlier slots.
    frontier: Vec<ResolvedExpression>,
    /// Whether a valid completion exists from here, by the values of the frontier.
    is_possible: HashMap<Box<[Option<Datum>]>, bool>,
}

impl ParameterLevel {
    fn codes(&self) -> impl Iterator<Item = &ResolvedExpression> {
        self.definitions.iter().map(|(_, code)| code).chain(&self.constraints)
    }
}

impl<'a> LookAhead<'a> {
    /// Look-ahead for a problem.
    pub fn new(kernel: &KernelSpecification, problem: &[i64]) -> LookAhead<'a> {
        LookAhead::with(kernel, problem, kernel.constraints.iter().map(|constraint| &constraint.code))
    }

    /// Sets an observer that can stop the look-ahead. Once stopped, the look-ahead accepts any prefix that is
    /// not known to be impossible.
    pub fn watched(mut self, watch: impl FnMut(u64) -> ControlFlow<()> + 'a) -> LookAhead<'a> {
        self.effort.watch = Some(Box::new(watch));
        self
    }

    /// Whether all answers so far were exact.
    pub fn is_exact(&self) -> bool {
        self.effort.is_exact
    }

    fn with<'c>(
        kernel: &KernelSpecification,
        problem: &[i64],
        constraints: impl Iterator<Item = &'c ResolvedExpression>,
    ) -> LookAhead<'a> {
        let n_fields = kernel.fields.len();
        let n_slots = n_fields + kernel.parameters.len() + kernel.definitions.len();
        let given = kernel.fields.iter().zip(problem).map(|(field, &value)| Some(Some(field.datum(value))));
        let mut known: Vec<Option<Option<Datum>>> = given.collect();
        known.resize(n_slots, None);
        let mut levels: Vec<ParameterLevel> = (n_fields..)
            .zip(&kernel.parameters)
            .map(|(slot, parameter)| ParameterLevel {
                slot,
                values: parameter.data.clone(),
                definitions: Vec::new(),
                constraints: Vec::new(),
                frontier: Vec::new(),
                is_possible: HashMap::new(),
            })
            .collect();
        // For each slot, the level that fills it, and its possible range.
        let mut level_of: Vec<usize> = (0..n_slots).map(|slot| slot.saturating_sub(n_fields)).collect();
        let mut ranges: Vec<Option<ValueRange>> = vec![None; n_slots];
        for level in &levels {
            ranges[level.slot] = ValueRange::of(&level.values);
        }
        let reads = |code: &ResolvedExpression| {
            let mut slots = Vec::new();
            code.reads(&mut slots);
            slots
        };
        let last =
            |code: &ResolvedExpression, level_of: &[usize]| reads(code).into_iter().map(|slot| level_of[slot]).max();
        let mut definitions = Vec::new();
        for (slot, definition) in (n_fields + kernel.parameters.len()..).zip(&kernel.definitions) {
            match definition.fold(&known) {
                ResolvedExpression::Constant(value) => known[slot] = Some(value.ok()),
                code => {
                    level_of[slot] = last(&code, &level_of).expect("invariant: what is not folded reads something");
                    ranges[slot] = ValueRange::of_code(&code, &ranges);
                    definitions.push((slot, code));
                }
            }
        }
        let mut is_impossible = false;
        let mut wanted: Vec<usize> = Vec::new();
        for constraint in constraints.map(|constraint| constraint.fold(&known)).flat_map(ResolvedExpression::conjuncts)
        {
            match constraint {
                ResolvedExpression::Constant(value) => is_impossible |= !value.is_ok_and(|value| value.holds()),
                code => {
                    wanted.extend(reads(&code));
                    let level = last(&code, &level_of).expect("invariant: what is not folded reads something");
                    levels[level].constraints.push(code);
                }
            }
        }
        // Last definition first, since only later ones can read a definition.
        for (slot, code) in definitions.into_iter().rev() {
            if wanted.contains(&slot) {
                wanted.extend(reads(&code));
                levels[level_of[slot]].definitions.insert(0, (slot, code));
            }
        }
        for at in 0..levels.len() {
            let codes = || levels[at..].iter().flat_map(ParameterLevel::codes);
            let mut places: Vec<usize> = codes().flat_map(reads).filter(|&slot| level_of[slot] < at).collect();
            places.sort_unstable();
            places.dedup();
            let mut frontier = Vec::new();
            codes().for_each(|code| residual(code, &|slot| level_of[slot] < at, &ranges, &mut frontier));
            // Partial results that are no fewer than the slots they are computed from merge no more prefixes.
            if frontier.len() >= places.len() {
                frontier = places.into_iter().map(ResolvedExpression::Slot).collect();
            }
            levels[at].frontier = frontier;
        }
        let slots = known.into_iter().map(Option::flatten).collect();
        let effort = Effort { n_steps: 0, limit: 0, n_remembered: 0, is_exact: true, is_stopped: false, watch: None };
        LookAhead { levels, slots, is_impossible, effort }
    }

    /// Whether any valid configuration exists; `None` if deciding that would take too long.
    pub fn is_satisfiable(&mut self) -> Option<bool> {
        if self.is_impossible {
            return Some(false);
        }
        self.ask(0)
    }

    /// Chooses a value on a level; returns whether the constraints that are decided there hold. Earlier
    /// levels must be chosen.
    fn choose(&mut self, level: usize, value: Datum) -> bool {
        let ParameterLevel { slot, definitions, constraints, .. } = &self.levels[level];
        self.slots[*slot] = Some(value);
        for (slot, code) in definitions {
            self.slots[*slot] = code.evaluate(&self.slots);
        }
        constraints.iter().all(|constraint| constraint.holds(&self.slots))
    }

    /// Queries as [`LookAhead::is_possible`] does, with a new limit.
    fn ask(&mut self, level: usize) -> Option<bool> {
        self.effort.ask();
        let known = self.is_possible(level);
        self.effort.is_exact &= known.is_some();
        known
    }

    /// Whether the choices before a level have a valid completion; `None` if the search was given up.
    fn is_possible(&mut self, level: usize) -> Option<bool> {
        let Some(at) = self.levels.get(level) else { return Some(true) };
        let key: Box<[Option<Datum>]> = at.frontier.iter().map(|code| code.evaluate(&self.slots)).collect();
        if let Some(&known) = at.is_possible.get(&key) {
            return Some(known);
        }
        let mut found = false;
        for i in 0..at.values.len() {
            if !self.effort.step() {
                return None;
            }
            let value = self.levels[level].values[i].clone();
            if self.choose(level, value) && self.is_possible(level + 1)? {
                found = true;
                break;
            }
        }
        if self.effort.n_remembered < MOST_REMEMBERED {
            self.effort.n_remembered += key.len() + COST_OF_PREFIX;
            self.levels[level].is_possible.insert(key, found);
        }
        Some(found)
    }
}

impl Completions for LookAhead<'_> {
    /// # Panics
    /// If the prefix is a complete configuration or longer, or contains an invalid index.
    fn allowed(&mut self, prefix: &[u32]) -> Vec<bool> {
        let n_values = self.levels[prefix.len()].values.len();
        let mut holds = !self.is_impossible;
        for (level, &value) in prefix.iter().enumerate() {
            let value = self.levels[level].values[value as usize].clone();
            holds = holds && self.choose(level, value);
        }
        if !holds {
            return vec![false; n_values];
        }
        let level = prefix.len();
        (0..n_values)
            .map(|i| {
                let value = self.levels[level].values[i].clone();
                self.choose(level, value) && self.ask(level + 1).unwrap_or(true)
            })
            .collect()
    }
}

impl KernelSpecification {
    /// Constraint that makes a problem unsatisfiable: the first that excludes everything, alone or together
    /// with those before it. `None` if some configuration is valid, or if that could not be decided.
    pub fn unsatisfiable(&self, problem: &[i64]) -> Option<&str> {
        let codes = || self.constraints.iter().map(|constraint| &constraint.code);
        let is_excluded = |from: usize, to: usize| {
            LookAhead::with(self, problem, codes().skip(from).take(to - from)).is_satisfiable() == Some(false)
        };
        if !is_excluded(0, self.constraints.len()) {
            return None;
        }
        let alone = (0..self.constraints.len()).find(|&at| is_excluded(at, at + 1));
        let first = alone.or_else(|| (0..self.constraints.len()).find(|&at| is_excluded(0, at + 1)));
        first.map(|at| self.constraints[at].name.as_str())
    }
}
