//! Values whose last digit decides: what becomes of them is cut off or compared.

use tilewright_graph::op::{Binary, Unary};
use tilewright_graph::{Graph, Node, Op, ValueId};

/// Values that are looked at, at most.
const MOST: usize = 64;

/// Use of a value by a node.
enum Use {
    /// The result jumps where the value hardly changes.
    Jumps,
    /// The result is as near as the value is.
    Follows,
    /// The result is of many values, or unknown.
    Ends,
}

fn use_of(graph: &Graph, node: &Node) -> Use {
    let is_float = |id: &ValueId| graph.ty(*id).dtype.is_float();
    match &node.op {
        Op::Unary(Unary::Ceil | Unary::Floor | Unary::Round | Unary::Sign) => Use::Jumps,
        Op::Unary(_) | Op::Binary(_) | Op::Cast(_) if !node.outputs.iter().flatten().all(is_float) => Use::Jumps,
        Op::Binary(Binary::Mod { .. }) => Use::Jumps,
        Op::Unary(_) | Op::Binary(_) | Op::Cast(_) | Op::Variadic(_) | Op::Clip(_) | Op::Where(_) => Use::Follows,
        Op::Concat(_) | Op::Expand(_) | Op::Flatten(_) | Op::Reshape(_) | Op::Slice(_) | Op::Split(_) => Use::Follows,
        Op::Squeeze(_) | Op::Tile(_) | Op::Transpose(_) | Op::Unsqueeze(_) => Use::Follows,
        _ => Use::Ends,
    }
}

/// Whether a value decides where another one jumps, by way of functions of elements and of moves.
pub fn decides(graph: &Graph, id: ValueId) -> bool {
    let mut seen = vec![id];
    let mut at = 0;
    while at < seen.len() && seen.len() <= MOST {
        for &user in &graph.value(seen[at]).users {
            let node = graph.node(user);
            match use_of(graph, node) {
                Use::Jumps => return true,
                Use::Follows => {
                    let new: Vec<ValueId> =
                        node.outputs.iter().flatten().filter(|id| !seen.contains(id)).copied().collect();
                    seen.extend(new);
                }
                Use::Ends => {}
            }
        }
        at += 1;
    }
    false
}
