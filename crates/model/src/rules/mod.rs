//! Rules that rewrite a net to fewer operations before it is lowered to kernels.
//!
//! A rule is a function from a net to the number of places that it changed; [`PASSES`] lists all rules in
//! order, with their names. No rule changes the results of a net. The driver records the rules that changed
//! something in a [`Trace`].

mod affine;
mod channels;
mod heads;
mod identities;
mod maps;
mod moves;
mod products;
mod rows;
mod sequences;
mod shuffles;
mod strided;
mod trace;
mod views;

use tilewright_ir::Expr;

use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{self, input, substitute};

pub(crate) use channels::n_merged;
pub(crate) use maps::merged;
pub use trace::{Applied, Trace};

/// Name of a rule, and the function that applies it wherever possible and returns the number of changes.
type Rule = (&'static str, fn(&mut Net) -> usize);

/// Stage of rewriting.
enum RewritingStage {
    /// Rules to repeat until none changes anything, with [`DROP_VIEWS`] between rounds.
    Repeat(&'static [Rule]),
    /// A rule to apply once.
    Once(Rule),
}

/// Rule that is applied between the others, since views separate operations that other rules match.
const DROP_VIEWS: Rule = ("drop_views", views::drop_views);

/// Rules that bring operations together.
const JOINING: &[Rule] = &[
    ("drop_identities", identities::drop_identities),
    ("join_parts", identities::join_parts),
    ("sink_views", views::sink_views),
    ("merge_maps", maps::merge_maps),
    ("fold_affine", affine::fold_affine),
    ("turn_products", products::turn_products),
    ("scale_fewer", products::scale_fewer),
    ("share_operands", products::share_operands),
    ("look_up_rows", rows::look_up),
    ("sink_moves", moves::sink_moves),
];

/// Rule that is applied before those that would convert bytes to numbers before they move.
const JOIN_PIXELS: Rule = ("join_pixels", shuffles::join_pixels);

const INTERLEAVE_GROUPS: Rule = ("interleave_groups", shuffles::interleave_groups);

/// All rules, in the order in which a net is rewritten.
const PASSES: &[RewritingStage] = &[
    RewritingStage::Once(JOIN_PIXELS),
    RewritingStage::Repeat(JOINING),
    RewritingStage::Once(INTERLEAVE_GROUPS),
    RewritingStage::Once(DROP_VIEWS),
    RewritingStage::Once(("split_sequences", sequences::split_sequences)),
    RewritingStage::Once(DROP_VIEWS),
    RewritingStage::Once(("turn_sequences", sequences::turn_sequences)),
    // After all scales have been folded into the matrices.
    RewritingStage::Once(("join_products", products::join_products)),
    RewritingStage::Repeat(JOINING),
    RewritingStage::Once(INTERLEAVE_GROUPS),
    RewritingStage::Once(DROP_VIEWS),
    RewritingStage::Once(("read_heads", heads::read_heads)),
    RewritingStage::Once(("write_heads", heads::write_heads)),
    RewritingStage::Repeat(JOINING),
    RewritingStage::Once(INTERLEAVE_GROUPS),
    RewritingStage::Once(DROP_VIEWS),
    // Numbers that have been quantized before they move, too.
    RewritingStage::Once(JOIN_PIXELS),
    // After the last rule that reads a number of channels.
    RewritingStage::Once(("pad_channels", channels::pad_channels)),
    RewritingStage::Once(("merge_groups", channels::merge_groups)),
];

/// Maximum number of rounds of repeated rules. A round processes chains of any length completely; a model of
/// a few thousand nodes takes fewer than ten rounds.
const MOST_ROUNDS: usize = 100;

/// Names of all rules, without repetition.
pub fn rule_names() -> Vec<&'static str> {
    let mut names = vec![DROP_VIEWS.0];
    for pass in PASSES {
        let rules = match pass {
            RewritingStage::Repeat(rules) => rules,
            RewritingStage::Once(rule) => std::slice::from_ref(rule),
        };
        names.extend(rules.iter().map(|(name, _)| *name));
    }
    names.sort_unstable();
    names.dedup();
    names
}

/// Rewrites a net by all rules to a fixed point; returns the rules that changed it.
pub fn simplify(net: &mut Net) -> Trace {
    let mut trace = Trace::default();
    for pass in PASSES {
        match pass {
            RewritingStage::Once(rule) => trace.apply(*rule, net),
            RewritingStage::Repeat(rules) => {
                trace.apply(DROP_VIEWS, net);
                repeat(rules, net, &mut trace);
                0
            }
        };
    }
    trace
}

/// Applies rules in turn until none changes anything.
fn repeat(rules: &[Rule], net: &mut Net, trace: &mut Trace) {
    for _ in 0..MOST_ROUNDS {
        let n_changes: usize = rules.iter().map(|rule| trace.apply(*rule, net)).sum();
        if n_changes == 0 {
            return;
        }
        trace.apply(DROP_VIEWS, net);
    }
    // The net of the last round is valid even then.
    debug_assert!(false, "the rules undo each other");
}

/// Maximum number of operations of a merged map.
pub(crate) const MOST_COST: usize = 400;

/// Producers and readers of a net's values, counted once and updated as nodes change.
struct Links {
    /// Number of reads of each value, the net's outputs included.
    n_uses: Vec<usize>,
    /// Node that computes each value.
    producers: Vec<Option<usize>>,
}

impl Links {
    fn of(net: &Net) -> Links {
        Links { n_uses: net.n_uses(), producers: net.producers() }
    }

    /// Adds the reads of a node.
    fn enter(&mut self, node: &Node) {
        for id in node.inputs.iter().flatten() {
            self.n_uses.resize(self.n_uses.len().max(id.0 + 1), 0);
            self.n_uses[id.0] += 1;
        }
    }

    /// Removes the reads of a node.
    fn leave(&mut self, node: &Node) {
        node.inputs.iter().flatten().for_each(|id| self.n_uses[id.0] -= 1);
    }

    /// Replaces a node by others, if given; returns the nodes in its place.
    fn exchange(&mut self, node: Node, new: Option<Vec<Node>>) -> Vec<Node> {
        let Some(new) = new else { return vec![node] };
        self.leave(&node);
        new.iter().for_each(|node| self.enter(node));
        new
    }

    /// Sets the node at an index as the producer of its outputs.
    fn place(&mut self, node: &Node, at: usize) {
        for id in &node.outputs {
            self.producers.resize(self.producers.len().max(id.0 + 1), None);
            self.producers[id.0] = Some(at);
        }
    }
}

/// Whether a node is a product or a convolution, or a map of such.
fn comes_from_anchor(net: &Net, is_of_anchor: &[bool], node: &Node) -> bool {
    match &node.kind {
        Kind::Conv(_) | Kind::Product { .. } | Kind::Packed(_) => true,
        Kind::Map(_) => {
            let n_own = net.value(node.output()).n_elements();
            let mut whole = node.inputs.iter().flatten().filter(|id| net.value(**id).n_elements() == n_own);
            whole.any(|id| is_of_anchor[id.0])
        }
        _ => false,
    }
}

/// Joins the names of the model's nodes that two nodes come from.
pub(crate) fn joined(a: &str, b: &str) -> String {
    if a == b || b.split(" + ").any(|part| part == a) { b.to_owned() } else { format!("{a} + {b}") }
}

/// Removes inputs that a map does not read.
pub(crate) fn drop_unread(node: &mut Node) {
    let Kind::Map(value) = &node.kind else { return };
    let read = scalar::inputs(value);
    let kept: Vec<usize> = (0..node.inputs.len()).filter(|slot| read.contains(slot)).collect();
    // A map that reads no input keeps one, for the shape.
    if kept.len() == node.inputs.len() || kept.is_empty() {
        return;
    }
    let value = substitute(value, &|at| input(kept.iter().position(|&slot| slot == at).expect("it is read")));
    node.inputs = kept.iter().map(|&slot| node.inputs[slot]).collect();
    node.kind = Kind::Map(value);
}

/// Numbers of an expression for each channel of an anchor's result; `None` unless it is a constant or
/// literal.
fn by_channel(net: &Net, node: &Node, e: &Expr, out: &[i64], axis: usize) -> Option<Vec<f64>> {
    let n = out[axis] as usize;
    match e {
        Expr::Const(x) => Some(vec![*x; n]),
        Expr::Load(slot, _) => {
            let id = node.inputs[slot.0 as usize]?;
            let shape = net.shape(id);
            let missing = out.len().checked_sub(shape.len())?;
            let is_along = shape.iter().enumerate().all(|(d, &n)| n == 1 || d + missing == axis);
            let numbers = net.numbers(id).filter(|_| is_along)?;
            let one = |c: usize| f64::from(numbers[if numbers.len() == 1 { 0 } else { c }]);
            Some((0..n).map(one).collect())
        }
        _ => None,
    }
}

/// Only reader of a value; `None` if there are several.
pub(crate) fn only_user(net: &Net, users: &[Vec<usize>], id: ValueId) -> Option<usize> {
    let &[user] = &users[id.0][..] else { return None };
    (!net.outputs.contains(&id)).then_some(user)
}

/// Replaces each node for which `of` returns nodes; while `of` runs, the net contains only the nodes before
/// the current one. Returns the number of nodes replaced.
fn replace_each(net: &mut Net, of: fn(&mut Net, &Links, &Node) -> Option<Vec<Node>>) -> usize {
    let (mut links, mut n_replaced) = (Links::of(net), 0);
    for node in std::mem::take(&mut net.nodes) {
        let new = of(net, &links, &node);
        n_replaced += usize::from(new.is_some());
        for node in links.exchange(node, new) {
            links.place(&node, net.nodes.len());
            net.nodes.push(node);
        }
    }
    n_replaced
}
