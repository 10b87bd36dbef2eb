//! Legal combinations of tied parameters as a decision diagram.
//!
//! Level `i` of the diagram decides the `i`-th parameter; a path from the root to the end is a legal
//! combination, and every edge stores the number of legal combinations before it, which makes counting,
//! numbering and sampling exact. What can follow a prefix depends only on the residuals of the constraints
//! still to be checked, so prefixes with equal residuals share one node. The diagram of a chain of
//! constraints over many parameters thus stays small, while a list of its combinations would not fit in
//! memory. The residual of an expression holds less than the values that it reads: for a bounded product,
//! only the product of the factors chosen so far, and nothing if one side of an `or` already holds.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use super::automaton::{Automaton, Levels, NOTHING};
use super::constraint::{Constraint, Reading};
use super::domain::CountedParameter;
use super::{SpaceError, Value};
use crate::expression::residual::ValueRange;

/// Maximum number of prefixes that the construction tries before it gives up; a few seconds' work.
const VISIT_LIMIT: u64 = 1 << 26;
/// Maximum number of values of one parameter under constraints, all of which are in memory while the diagram
/// is built.
const VALUE_LIMIT: u64 = 1 << 22;

/// Node without legal combinations, to which no edge leads.
const DEAD: u32 = 0;
/// Node after the last parameter.
const END: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Edge {
    rank: u32,
    child: u32,
    /// Number of legal combinations through the preceding edges of the node.
    before: u64,
}

/// Legal combinations of the parameters of one component.
#[derive(Debug, Clone)]
pub(super) struct Diagram {
    /// Parameters, by position in the space, in the order of the levels.
    pub(super) order: Vec<usize>,
    /// Number of legal combinations.
    pub(super) len: u64,
    /// Edges of each node, in ascending order of rank.
    edges: Vec<Box<[Edge]>>,
    root: u32,
}

impl Diagram {
    /// Builds the diagram of the parameters `members` under `constraints`, each with the positions of the
    /// parameters that it reads.
    pub(super) fn new(
        axes: &[CountedParameter],
        members: &[usize],
        constraints: &[(&Constraint, &[usize])],
    ) -> Result<Diagram, SpaceError> {
        let order = level_order(axes, members, constraints);
        let too_large = || order.iter().map(|&axis| axes[axis].name.clone()).collect();
        if order.iter().any(|&axis| axes[axis].len > VALUE_LIMIT) {
            return Err(SpaceError::TooManyToEnumerate { parameters: too_large(), limit: VALUE_LIMIT });
        }
        let mut builder = DiagramBuilder::new(axes, &order, constraints);
        if !builder.can_be_visited() {
            return Err(SpaceError::TooManyToEnumerate { parameters: too_large(), limit: VISIT_LIMIT });
        }
        let root = builder.node(0).ok_or_else(|| SpaceError::TooLarge { parameters: too_large() })?;
        Ok(builder.nodes.diagram(order, root))
    }

    /// Builds the diagram of exactly these combinations of all parameters, which are sorted, distinct and of
    /// ranks below 2^32.
    pub(super) fn of_list(combinations: &[&[u64]], n_parameters: usize) -> Diagram {
        let mut nodes = Nodes::new();
        let root = nodes.of_list(combinations, 0, n_parameters);
        nodes.diagram((0..n_parameters).collect(), root)
    }

    /// Writes the ranks of the combination with this index, which is below `len`, to the members' places in
    /// `ranks`.
    pub(super) fn write(&self, mut index: u64, ranks: &mut [u64]) {
        let mut node = self.root;
        for &axis in &self.order {
            let edges = &self.edges[node as usize];
            let edge = &edges[edges.partition_point(|edge| edge.before <= index) - 1];
            ranks[axis] = edge.rank.into();
            index -= edge.before;
            node = edge.child;
        }
    }

    /// Returns the index of the combination in `ranks`, or `None` if it is not legal.
    pub(super) fn index_of(&self, ranks: &[u64]) -> Option<u64> {
        let mut node = self.root;
        self.order.iter().try_fold(0, |index, &axis| {
            let edges = &self.edges[node as usize];
            let edge = &edges[edges.binary_search_by_key(&ranks[axis], |edge| edge.rank.into()).ok()?];
            node = edge.child;
            Some(index + edge.before)
        })
    }

    /// Adds to `found` the ranks that one of the members has in legal combinations all of whose ranks are
    /// allowed. `allowed` is by position in the space, `None` allows every rank.
    ///
    /// # Cost
    /// O(edges) up to the last restricted level.
    pub(super) fn ranks_possible(&self, axis: usize, allowed: &[Option<Vec<bool>>], found: &mut [bool]) {
        let at = self.order.iter().position(|&a| a == axis).expect("invariant: a member");
        // After the last restriction, every node leads to a legal combination.
        let depth = self.order.iter().rposition(|&a| allowed[a].is_some()).map_or(0, |last| last + 1).max(at + 1);
        let is_allowed = |level: usize, edge: &Edge| {
            allowed[self.order[level]].as_ref().is_none_or(|allowed| allowed[edge.rank as usize])
        };
        let mut levels: Vec<Vec<u32>> = vec![vec![self.root]];
        for level in 0..depth {
            let edges = levels[level].iter().flat_map(|&node| &self.edges[node as usize]);
            let mut next: Vec<u32> = edges.filter(|edge| is_allowed(level, edge)).map(|edge| edge.child).collect();
            next.sort_unstable();
            next.dedup();
            levels.push(next);
        }
        let mut alive: HashSet<u32> = levels[depth].iter().copied().collect();
        for level in (at..depth).rev() {
            let leads_on = |edge: &&Edge| is_allowed(level, edge) && alive.contains(&edge.child);
            if level == at {
                let edges = levels[level].iter().flat_map(|&node| &self.edges[node as usize]);
                edges.filter(leads_on).for_each(|edge| found[edge.rank as usize] = true);
                return;
            }
            alive = levels[level]
                .iter()
                .copied()
                .filter(|&n| self.edges[n as usize].iter().any(|e| leads_on(&e)))
                .collect();
        }
    }

    /// Replaces the members' ranks by those of a legal combination that differs in the fewest parameters, and
    /// among these by the fewest ranks.
    ///
    /// # Cost
    /// A shortest path through the diagram: O(edges) at worst, much less if a legal combination is near.
    pub(super) fn write_nearest(&self, ranks: &mut [u64]) {
        /// Cost of a changed parameter, besides the distance in ranks.
        const CHANGE: u64 = 1 << 40;
        // Each step of a path has the index of the previous one, so that the queue holds no paths.
        let mut steps: Vec<(usize, u32)> = vec![(0, 0)];
        let mut queue = BinaryHeap::from([Reverse((0u64, Reverse(0), self.root, 0))]);
        let mut closed = HashSet::new();
        while let Some(Reverse((cost, Reverse(level), node, step))) = queue.pop() {
            if !closed.insert(node) {
                continue;
            }
            if node == END {
                let mut step = step;
                for &axis in self.order.iter().rev() {
                    (step, ranks[axis]) = (steps[step].0, steps[step].1.into());
                }
                return;
            }
            let wanted = ranks[self.order[level]];
            for edge in &self.edges[node as usize] {
                let distance = wanted.abs_diff(edge.rank.into());
                let cost = cost + if distance == 0 { 0 } else { CHANGE + distance.min(CHANGE >> 16) };
                queue.push(Reverse((cost, Reverse(level + 1), edge.child, steps.len())));
                steps.push((step, edge.rank));
            }
        }
    }
}

/// Nodes of a diagram under construction; equal ones are shared.
struct Nodes {
    ids: HashMap<Box<[Edge]>, u32>,
    /// Number of legal combinations of each node.
    counts: Vec<u64>,
}

impl Nodes {
    fn new() -> Nodes {
        Nodes { ids: HashMap::new(), counts: vec![0, 1] }
    }

    /// Returns the node with these edges, through which `count` combinations lead.
    fn intern(&mut self, edges: Vec<Edge>, count: u64) -> u32 {
        if edges.is_empty() {
            return DEAD;
        }
        let fresh = self.counts.len() as u32;
        let node = *self.ids.entry(edges.into()).or_insert(fresh);
        if node == fresh {
            self.counts.push(count);
        }
        node
    }

    fn of_list(&mut self, combinations: &[&[u64]], level: usize, n_levels: usize) -> u32 {
        if level == n_levels {
            return if combinations.is_empty() { DEAD } else { END };
        }
        let mut before = 0;
        let groups = combinations.chunk_by(|a, b| a[level] == b[level]);
        let edges = groups
            .map(|group| {
                let edge =
                    Edge { rank: group[0][level] as u32, child: self.of_list(group, level + 1, n_levels), before };
                before += group.len() as u64;
                edge
            })
            .collect();
        self.intern(edges, before)
    }

    fn diagram(self, order: Vec<usize>, root: u32) -> Diagram {
        let len = self.counts[root as usize];
        let mut edges = vec![Box::default(); self.counts.len()];
        for (node, id) in self.ids {
            edges[id as usize] = node;
        }
        Diagram { order, len, edges, root }
    }
}

/// Puts the parameters of the constraints that are cheapest to complete first, so that dead prefixes end
/// early.
fn level_order(axes: &[CountedParameter], members: &[usize], constraints: &[(&Constraint, &[usize])]) -> Vec<usize> {
    let mut order: Vec<usize> = Vec::new();
    let mut open: Vec<&[usize]> = constraints.iter().map(|(_, reads)| *reads).collect();
    while !open.is_empty() {
        let missing = |reads: &[usize]| reads.iter().filter(|axis| !order.contains(axis)).copied().collect::<Vec<_>>();
        let cost = |reads: &&[usize]| missing(reads).iter().map(|&axis| (axes[axis].len as f64).log2()).sum::<f64>();
        let cheapest = (0..open.len()).min_by(|&a, &b| cost(&open[a]).total_cmp(&cost(&open[b])));
        let mut next = missing(open.swap_remove(cheapest.expect("invariant: open is not empty")));
        next.sort_by_key(|&axis| (axes[axis].len, axis));
        next.dedup();
        order.extend(next);
    }
    debug_assert_eq!(order.len(), members.len(), "a component is what its constraints read");
    order
}

struct DiagramBuilder<'a> {
    levels: Levels,
    automata: Vec<Automaton<'a>>,
    /// Automata that read each level, with the number of levels that they have read before.
    readers: Vec<Vec<(usize, usize)>>,
    /// Automata, for each level, that have read earlier ones and read this or later ones.
    open: Vec<Vec<usize>>,
    /// Nodes of each level already built, by the states of these automata.
    built: Vec<HashMap<Box<[u32]>, u32>>,
    nodes: Nodes,
    /// States of the automata after the current prefix.
    states: Vec<u32>,
}

impl<'a> DiagramBuilder<'a> {
    fn new(
        axes: &[CountedParameter],
        order: &[usize],
        constraints: &[(&'a Constraint, &[usize])],
    ) -> DiagramBuilder<'a> {
        let level_of = |axis: &usize| order.iter().position(|a| a == axis).expect("invariant: order holds all members");
        let values: Vec<Vec<Value>> =
            order.iter().map(|&a| (0..axes[a].len).map(|rank| axes[a].value(rank)).collect()).collect();
        let readings: Vec<Reading> = order.iter().map(|&a| Reading::of(&axes[a].domain)).collect();
        let mut levels = Levels { values, readings, data: Vec::new(), ranges: Vec::new() };
        let predicates: Vec<_> = constraints
            .iter()
            .map(|(constraint, reads)| (constraint.predicate(), reads.iter().map(level_of).collect::<Vec<usize>>()))
            .collect();
        if predicates.iter().any(|(predicate, arguments)| levels.is_read_by_code(predicate, arguments)) {
            let data = |(values, reading): (&Vec<Value>, &Reading)| values.iter().map(|v| reading.datum(v)).collect();
            levels.data = levels.values.iter().zip(&levels.readings).map(data).collect();
        }
        levels.ranges = levels.data.iter().map(|data| ValueRange::of(data)).collect();
        let of_each = predicates.iter().map(|(predicate, arguments)| Automaton::all_of(predicate, arguments, &levels));
        let automata: Vec<Automaton> = of_each.flatten().collect();

        let (mut readers, mut open) = (vec![Vec::new(); order.len()], vec![Vec::new(); order.len()]);
        for (id, automaton) in automata.iter().enumerate() {
            automaton.levels().enumerate().for_each(|(at, level)| readers[level].push((id, at)));
            let ends = automaton.levels().next().zip(automaton.levels().next_back());
            let (first, last) = ends.expect("invariant: an automaton reads something");
            open[first + 1..=last].iter_mut().for_each(|open| open.push(id));
        }
        DiagramBuilder {
            states: vec![Automaton::FIRST; automata.len()],
            levels,
            automata,
            readers,
            open,
            built: vec![HashMap::new(); order.len()],
            nodes: Nodes::new(),
        }
    }

    /// Whether no more than [`VISIT_LIMIT`] prefixes are to be tried, which is known before those of the
    /// level with the most are.
    fn can_be_visited(&mut self) -> bool {
        let n_values: Vec<u64> = self.levels.values.iter().map(|values| values.len() as u64).collect();
        let sum = n_values.iter().rev().try_fold(0, |sum: u64, &n| sum.checked_add(1)?.checked_mul(n));
        if sum.is_some_and(|all| all <= VISIT_LIMIT) {
            return true;
        }
        let mut n_left = VISIT_LIMIT;
        let mut reached = HashSet::from([Box::from([])]);
        for (level, n_values) in n_values.into_iter().enumerate() {
            let Some(n) = n_left.checked_sub(n_values.saturating_mul(reached.len() as u64)) else { return false };
            n_left = n;
            if level + 1 == self.open.len() {
                break;
            }
            let mut next = HashSet::new();
            for key in reached {
                self.open[level].iter().zip(&key).for_each(|(&id, &state)| self.states[id] = state);
                let before = self.before(level);
                for rank in 0..n_values as u32 {
                    if self.step(level, &before, rank) {
                        next.insert(self.key(level + 1));
                    }
                }
                self.undo(level, &before);
            }
            reached = next;
        }
        self.states.fill(Automaton::FIRST);
        true
    }

    /// States of the automata after the prefix at hand, of this length, on which depends what can follow.
    fn key(&self, level: usize) -> Box<[u32]> {
        self.open[level].iter().map(|&id| self.states[id]).collect()
    }

    /// States of the automata that read this level.
    fn before(&self, level: usize) -> Vec<u32> {
        self.readers[level].iter().map(|&(id, _)| self.states[id]).collect()
    }

    /// Takes back steps from these states.
    fn undo(&mut self, level: usize, before: &[u32]) {
        for (&(id, _), &state) in self.readers[level].iter().zip(before) {
            self.states[id] = state;
        }
    }

    /// The node for what can follow the prefix of this length; `None` where these are too many to count.
    fn node(&mut self, level: usize) -> Option<u32> {
        if level == self.built.len() {
            return Some(END);
        }
        let key = self.key(level);
        if let Some(&node) = self.built[level].get(&key) {
            return Some(node);
        }
        let mut edges = Vec::new();
        let mut count: u64 = 0;
        let before = self.before(level);
        for rank in 0..self.levels.values[level].len() as u32 {
            if !self.step(level, &before, rank) {
                continue;
            }
            let child = self.node(level + 1)?;
            if child != DEAD {
                edges.push(Edge { rank, child, before: count });
                count = count.checked_add(self.nodes.counts[child as usize])?;
            }
        }
        self.undo(level, &before);
        let node = self.nodes.intern(edges, count);
        self.built[level].insert(key, node);
        Some(node)
    }

    /// Advances the automata from the states `before` by the value with this rank; returns whether anything
    /// can follow it.
    fn step(&mut self, level: usize, before: &[u32], rank: u32) -> bool {
        self.readers[level].iter().zip(before).all(|(&(id, at), &state)| {
            self.states[id] = self.automata[id].step(at, state, rank, &self.levels);
            self.states[id] != NOTHING
        })
    }
}
