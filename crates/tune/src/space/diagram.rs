//! The legal combinations of parameters that constraints tie together, stored as a decision diagram.
//!
//! Level `i` of the diagram decides the `i`-th parameter; a path from the root to the end is a legal combination, and
//! every edge knows how many legal combinations come before it, which makes counting, numbering and sampling exact.
//! What can follow a prefix depends only on the values that constraints still to be checked will read, so prefixes
//! that agree on those share one node. A chain of constraints over many parameters stays small that way, where a list
//! of its combinations would not fit in memory.

use std::collections::HashMap;

use super::constraint::Constraint;
use super::domain::Axis;
use super::{SpaceError, Value};

/// The most prefixes that the construction tries before it gives up; a few seconds' work.
const VISIT_LIMIT: u64 = 1 << 26;
/// The most values of one parameter under constraints, all of which are held while the diagram is built.
const VALUE_LIMIT: u64 = 1 << 22;

/// A node without legal combinations, to which no edge leads.
const DEAD: u32 = 0;
/// The node after the last parameter.
const END: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Edge {
    rank: u32,
    child: u32,
    /// Legal combinations through the edges on the left.
    before: u64,
}

/// The legal combinations of the parameters of one component.
#[derive(Debug, Clone)]
pub(super) struct Diagram {
    /// The parameters, by position in the space, in the order of the levels.
    pub(super) order: Vec<usize>,
    /// How many legal combinations there are.
    pub(super) len: u64,
    /// By node; edges in ascending order of rank.
    edges: Vec<Box<[Edge]>>,
    root: u32,
}

impl Diagram {
    /// The diagram of the parameters `members` under `constraints`, each with the positions of what it reads.
    pub(super) fn new(
        axes: &[Axis],
        members: &[usize],
        constraints: &[(&Constraint, &[usize])],
    ) -> Result<Diagram, SpaceError> {
        let order = level_order(axes, members, constraints);
        let too_large = || order.iter().map(|&axis| axes[axis].name.clone()).collect();
        if order.iter().any(|&axis| axes[axis].len > VALUE_LIMIT) {
            return Err(SpaceError::TooManyToEnumerate { parameters: too_large(), limit: VALUE_LIMIT });
        }
        let mut builder = Builder::new(axes, &order, constraints);
        let root = builder.node(0).map_err(|stop| match stop {
            Stop::Visits => SpaceError::TooManyToEnumerate { parameters: too_large(), limit: VISIT_LIMIT },
            Stop::Count => SpaceError::TooLarge { parameters: too_large() },
        })?;
        let len = builder.counts[root as usize];
        let mut edges = vec![Box::default(); builder.counts.len()];
        for (node, id) in builder.ids {
            edges[id as usize] = node;
        }
        Ok(Diagram { order, len, edges, root })
    }

    /// Writes the ranks of the combination with this index, which is below `len`, to the members' places in `ranks`.
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

    /// The index of the combination in `ranks`, or `None` where it is not legal.
    pub(super) fn index_of(&self, ranks: &[u64]) -> Option<u64> {
        let mut node = self.root;
        self.order.iter().try_fold(0, |index, &axis| {
            let edges = &self.edges[node as usize];
            let edge = &edges[edges.binary_search_by_key(&ranks[axis], |edge| edge.rank.into()).ok()?];
            node = edge.child;
            Some(index + edge.before)
        })
    }
}

/// Puts the parameters of the constraints that are cheapest to complete first, so that dead prefixes end early.
fn level_order(axes: &[Axis], members: &[usize], constraints: &[(&Constraint, &[usize])]) -> Vec<usize> {
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

enum Stop {
    Visits,
    Count,
}

struct Builder<'a> {
    /// By level: the values of its parameter.
    values: Vec<Vec<Value>>,
    /// By level: the constraints that can be checked there, with the levels that they read.
    due: Vec<Vec<(&'a Constraint, Vec<usize>)>>,
    /// By level: the earlier levels that constraints due there or later read.
    frontier: Vec<Vec<usize>>,
    /// By level: the nodes already built, by the ranks on the frontier.
    built: Vec<HashMap<Box<[u32]>, u32>>,
    /// Equal nodes are one node.
    ids: HashMap<Box<[Edge]>, u32>,
    /// By node: its legal combinations.
    counts: Vec<u64>,
    /// The prefix at hand, by level.
    prefix: Vec<u32>,
    visits: u64,
}

impl<'a> Builder<'a> {
    fn new(axes: &[Axis], order: &[usize], constraints: &[(&'a Constraint, &[usize])]) -> Builder<'a> {
        let level_of = |axis: &usize| order.iter().position(|a| a == axis).expect("invariant: order holds all members");
        let mut due = vec![Vec::new(); order.len()];
        for (constraint, reads) in constraints {
            let levels: Vec<usize> = reads.iter().map(level_of).collect();
            let last = *levels.iter().max().expect("invariant: constraints of a component read something");
            due[last].push((*constraint, levels));
        }
        let read_later =
            |level: usize, earlier: &usize| due[level..].iter().flatten().any(|(_, reads)| reads.contains(earlier));
        let frontier = (0..order.len()).map(|level| (0..level).filter(|e| read_later(level, e)).collect()).collect();
        Builder {
            values: order.iter().map(|&a| (0..axes[a].len).map(|rank| axes[a].value(rank)).collect()).collect(),
            frontier,
            due,
            built: vec![HashMap::new(); order.len()],
            ids: HashMap::new(),
            counts: vec![0, 1],
            prefix: vec![0; order.len()],
            visits: 0,
        }
    }

    /// The node for what can follow the prefix of this length.
    fn node(&mut self, level: usize) -> Result<u32, Stop> {
        if level == self.values.len() {
            return Ok(END);
        }
        let key: Box<[u32]> = self.frontier[level].iter().map(|&earlier| self.prefix[earlier]).collect();
        if let Some(&node) = self.built[level].get(&key) {
            return Ok(node);
        }
        let mut edges = Vec::new();
        let mut count: u64 = 0;
        for rank in 0..self.values[level].len() as u32 {
            self.visits += 1;
            if self.visits > VISIT_LIMIT {
                return Err(Stop::Visits);
            }
            self.prefix[level] = rank;
            if !self.holds(level) {
                continue;
            }
            let child = self.node(level + 1)?;
            if child != DEAD {
                edges.push(Edge { rank, child, before: count });
                count = count.checked_add(self.counts[child as usize]).ok_or(Stop::Count)?;
            }
        }
        let node = if edges.is_empty() {
            DEAD
        } else {
            let fresh = self.counts.len() as u32;
            let node = *self.ids.entry(edges.into()).or_insert(fresh);
            if node == fresh {
                self.counts.push(count);
            }
            node
        };
        self.built[level].insert(key, node);
        Ok(node)
    }

    fn holds(&self, level: usize) -> bool {
        self.due[level].iter().all(|(constraint, levels)| {
            let values: Vec<&Value> = levels.iter().map(|&l| &self.values[l][self.prefix[l] as usize]).collect();
            constraint.holds(&values)
        })
    }
}
