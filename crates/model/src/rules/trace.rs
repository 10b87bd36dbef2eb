//! Trace of the passes that turn a graph into the steps of a run.

use tilewright::format::{grouped, table};
use tilewright_graph::Graph;

use super::Rule;
use crate::net::Net;

/// Pass that changed the net.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Name of the rule, or of another pass.
    pub rule: &'static str,
    /// Node whose body was rewritten; `None` for the model itself.
    pub within: Option<String>,
    /// Number of places that changed; 1 for a pass over all nodes.
    pub n_changes: usize,
    /// Number of nodes before and after.
    pub nodes: [usize; 2],
}

/// Passes that changed the net, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace(pub Vec<Applied>);

impl Trace {
    /// Applies a rule; returns the number of changes.
    pub(super) fn apply(&mut self, (rule, rewrite): Rule, net: &mut Net) -> usize {
        let before = net.nodes.len();
        let n_changes = rewrite(net);
        if n_changes > 0 {
            self.0.push(Applied { rule, within: None, n_changes, nodes: [before, net.nodes.len()] });
        }
        n_changes
    }

    /// Records a pass over all nodes.
    pub(crate) fn pass(&mut self, rule: &'static str, before: usize, after: usize) {
        self.0.push(Applied { rule, within: None, n_changes: 1, nodes: [before, after] });
    }

    /// Records a pass that rewrites a graph, if it changed anything, that is, returned another graph.
    pub(crate) fn graph_pass(&mut self, rule: &'static str, before: &Graph, after: &Graph) {
        if !std::ptr::eq(before, after) {
            self.pass(rule, before.nodes().len(), after.nodes().len());
        }
    }

    /// Records the passes over the body of one of the model's nodes.
    pub(crate) fn within(&mut self, node: &str, body: Trace) {
        self.0.extend(body.0.into_iter().map(|applied| Applied { within: Some(node.to_owned()), ..applied }));
    }

    /// Formats one line per pass: its name, the number of changes, and the numbers of nodes before and after.
    pub fn text(&self) -> String {
        let row = |Applied { rule, within, n_changes, nodes: [before, after] }: &Applied| {
            let within = within.as_ref().map_or(String::new(), |node| format!(" in {node}"));
            let nodes = format!("{} → {} nodes", grouped(*before), grouped(*after));
            vec![format!("  {rule}{within}"), format!("{}×", grouped(*n_changes)), nodes]
        };
        table(&self.0.iter().map(row).collect::<Vec<_>>())
    }
}
