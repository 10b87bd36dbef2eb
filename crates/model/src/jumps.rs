//! Values at discontinuities: their rounding decides the result, as they are truncated or compared.

use tilewright_graph::op::{Binary, Unary};
use tilewright_graph::{Graph, Node, Op, ValueId};

/// Maximum number of values that are examined.
const MOST: usize = 64;

/// Use of a value by a node.
enum ValueUse {
    /// The result may jump for a small change of the value.
    Jumps,
    /// The result changes as little as the value does.
    Follows,
    /// The result depends on many values, or the operator is unknown.
    Ends,
}

fn use_of(graph: &Graph, node: &Node) -> ValueUse {
    let is_float = |id: &ValueId| graph.ty(*id).dtype.is_float();
    match &node.op {
        Op::Unary(Unary::Ceil | Unary::Floor | Unary::Round | Unary::Sign) => ValueUse::Jumps,
        Op::Unary(_) | Op::Binary(_) | Op::Cast(_) if !node.outputs.iter().flatten().all(is_float) => ValueUse::Jumps,
        Op::Binary(Binary::Mod { .. }) => ValueUse::Jumps,
        Op::Unary(_) | Op::Binary(_) | Op::Cast(_) | Op::Variadic(_) | Op::Clip(_) | Op::Where(_) => ValueUse::Follows,
        Op::Concat(_) | Op::Expand(_) | Op::Flatten(_) | Op::Reshape(_) | Op::Slice(_) | Op::Split(_) => {
            ValueUse::Follows
        }
        Op::Squeeze(_) | Op::Tile(_) | Op::Transpose(_) | Op::Unsqueeze(_) => ValueUse::Follows,
        _ => ValueUse::Ends,
    }
}

/// Whether a value reaches a discontinuous function, such as a comparison, through elementwise functions and
/// moves alone.
pub fn decides(graph: &Graph, id: ValueId) -> bool {
    let mut seen = vec![id];
    let mut at = 0;
    while at < seen.len() && seen.len() <= MOST {
        for &user in &graph.value(seen[at]).users {
            let node = graph.node(user);
            match use_of(graph, node) {
                ValueUse::Jumps => return true,
                ValueUse::Follows => {
                    let new: Vec<ValueId> =
                        node.outputs.iter().flatten().filter(|id| !seen.contains(id)).copied().collect();
                    seen.extend(new);
                }
                ValueUse::Ends => {}
            }
        }
        at += 1;
    }
    false
}
