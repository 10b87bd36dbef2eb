//! Constraints as deterministic automata, which read the values of a prefix level by level.
//!
//! The state of an automaton is the residual of its constraint once the values of the prefix are known: for
//! an expression, the expression with these values folded in. Prefixes with equal residuals are equivalent.
//! Each transition is computed once.

use std::collections::HashMap;

use super::Value;
use super::constraint::{Guard, Predicate, Reading};
use crate::expression::residual::{ValueRange, reduced, regrouped};
use crate::expression::{Datum, ResolvedExpression};

/// State after which nothing is legal.
pub(super) const NOTHING: u32 = 0;
/// State after which everything is legal.
pub(super) const ANYTHING: u32 = 1;
/// Number of states after which everything is decided.
const N_DECIDED: u32 = 2;
/// Transition that is not computed yet.
const UNKNOWN: u32 = u32::MAX;

/// Values of the parameter of each level.
pub(super) struct Levels {
    pub(super) values: Vec<Vec<Value>>,
    /// Form in which expressions read the values.
    pub(super) readings: Vec<Reading>,
    /// Values as expressions see them; empty if there are no expressions.
    pub(super) data: Vec<Vec<Datum>>,
    /// Intervals of these values, where they are integers.
    pub(super) ranges: Vec<Option<ValueRange>>,
}

/// Residual of a constraint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Rest {
    /// Expression whose slots are levels.
    Code(ResolvedExpression),
    /// Ranks, by level, of the values that a function reads.
    Ranks(Vec<u32>),
}

/// States in which an automaton may be when it reads a level.
struct LevelStates {
    level: usize,
    /// Residual of each state except the first two.
    states: Vec<Rest>,
    ids: HashMap<Rest, u32>,
    /// Transitions of each of these states, by rank of the level's value; empty before the first is computed.
    next: Vec<Vec<u32>>,
}

impl LevelStates {
    fn new(level: usize) -> LevelStates {
        LevelStates { level, states: Vec::new(), ids: HashMap::new(), next: Vec::new() }
    }

    fn intern(&mut self, rest: Rest) -> u32 {
        if let Some(&id) = self.ids.get(&rest) {
            return id;
        }
        let id = N_DECIDED + self.states.len() as u32;
        self.states.push(rest.clone());
        self.ids.insert(rest, id);
        self.next.push(Vec::new());
        id
    }
}

/// Automaton of a constraint, or of a part of one that is an expression.
pub(super) struct Automaton<'a> {
    /// Guards around the constraint, with their levels.
    guards: Vec<(usize, &'a Guard)>,
    predicate: &'a Predicate,
    /// Levels of the predicate's arguments.
    arguments: Vec<usize>,
    /// Stages of the levels that are read, in ascending order.
    stages: Vec<LevelStates>,
}

impl<'a> Automaton<'a> {
    /// State before the first value.
    pub(super) const FIRST: u32 = N_DECIDED;

    /// The automata of a predicate over the values of these levels.
    pub(super) fn all_of(predicate: &'a Predicate, arguments: &[usize], levels: &Levels) -> Vec<Automaton<'a>> {
        let (mut predicate, mut arguments, mut guards) = (predicate, arguments, Vec::new());
        while let Predicate::Guarded(guard, guarded) = predicate {
            guards.push((arguments[0], guard));
            (predicate, arguments) = (guarded, &arguments[1..]);
        }
        let automaton = |read: Vec<usize>, first: Rest| {
            let mut read: Vec<usize> = guards.iter().map(|(level, _)| *level).chain(read).collect();
            read.sort_unstable();
            read.dedup();
            // A predicate that reads nothing is decided by the first value.
            let read = if read.is_empty() { vec![0] } else { read };
            let mut stages: Vec<LevelStates> = read.into_iter().map(LevelStates::new).collect();
            stages[0].intern(first);
            Automaton { guards: guards.clone(), predicate, arguments: arguments.to_vec(), stages }
        };
        match levels.code(predicate, arguments) {
            None => vec![automaton(arguments.to_vec(), Rest::Ranks(Vec::new()))],
            Some(code) => {
                let parts = code.moved(&|place| arguments[place]).conjuncts().into_iter();
                parts.map(|part| automaton(part.all_reads(), Rest::Code(regrouped(&part, &levels.ranges)))).collect()
            }
        }
    }

    /// Returns the levels that the automaton reads, in ascending order.
    pub(super) fn levels(&self) -> impl DoubleEndedIterator<Item = usize> {
        self.stages.iter().map(|stage| stage.level)
    }

    /// State after the value with this rank; `at` is the number of levels read before.
    pub(super) fn step(&mut self, at: usize, state: u32, rank: u32, levels: &Levels) -> u32 {
        if state < N_DECIDED {
            return state;
        }
        let stage = &mut self.stages[at];
        let row = &mut stage.next[(state - N_DECIDED) as usize];
        row.resize(levels.values[stage.level].len(), UNKNOWN);
        if row[rank as usize] != UNKNOWN {
            return row[rank as usize];
        }
        let next = self.advance(at, state, rank, levels);
        self.stages[at].next[(state - N_DECIDED) as usize][rank as usize] = next;
        next
    }

    fn advance(&mut self, at: usize, state: u32, rank: u32, levels: &Levels) -> u32 {
        let level = self.stages[at].level;
        let value = &levels.values[level][rank as usize];
        if self.guards.iter().any(|(of, guard)| *of == level && !guard.applies(value)) {
            return ANYTHING;
        }
        let decided = |holds: bool| if holds { ANYTHING } else { NOTHING };
        let is_last = at + 1 == self.stages.len();
        let rest = match &self.stages[at].states[(state - N_DECIDED) as usize] {
            Rest::Code(code) => {
                let datum = || levels.data[level][rank as usize].clone();
                if is_last {
                    let mut slots = vec![None; level + 1];
                    slots[level] = Some(datum());
                    return decided(code.holds(&slots));
                }
                let mut known = vec![None; levels.data.len()];
                known[level] = Some(Some(datum()));
                let code = reduced(code.fold(&known), &levels.ranges);
                match code.all_reads()[..] {
                    [] if code.holds(&[]) => return ANYTHING,
                    [] if self.guards.iter().all(|(of, _)| *of <= level) => return NOTHING,
                    // With guards left, the constraint may turn out not to apply.
                    [] => Rest::Code(ResolvedExpression::Constant(Ok(Datum::Bool(false)))),
                    [..] => Rest::Code(code),
                }
            }
            Rest::Ranks(ranks) => {
                let ranks: Vec<u32> = ranks.iter().copied().chain([rank]).collect();
                if is_last {
                    return decided(self.holds(&ranks, levels));
                }
                Rest::Ranks(ranks)
            }
        };
        self.stages[at + 1].intern(rest)
    }

    /// Whether the predicate holds for the values of these ranks, by stage.
    fn holds(&self, ranks: &[u32], levels: &Levels) -> bool {
        let value = |level: &usize| {
            let at = self.levels().position(|of| of == *level).expect("invariant: it reads its arguments");
            &levels.values[*level][ranks[at] as usize]
        };
        self.predicate.holds(&self.arguments.iter().map(value).collect::<Vec<_>>())
    }
}

impl Levels {
    /// Expression of a predicate over the values at these levels; `None` if it is a function.
    fn code<'a>(&self, predicate: &'a Predicate, arguments: &[usize]) -> Option<&'a ResolvedExpression> {
        let Predicate::Expression(code, own) = predicate else { return None };
        // The values of a parameter in one algorithm may all be numbers even if those of all algorithms are
        // not.
        let is_same = arguments.iter().zip(&**own).all(|(&level, own)| self.readings[level] == *own);
        is_same.then_some(code)
    }

    /// Whether a predicate over the values at these levels is an expression.
    pub(super) fn is_read_by_code(&self, predicate: &Predicate, arguments: &[usize]) -> bool {
        match predicate {
            Predicate::Guarded(_, guarded) => self.is_read_by_code(guarded, &arguments[1..]),
            _ => self.code(predicate, arguments).is_some(),
        }
    }
}
