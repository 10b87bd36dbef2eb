//! Layered graph drawing: all edges point down, with few crossings, and connected nodes are close.
//!
//! The method is Sugiyama's (1981): layers by the longest path, an order within layers by barycentres of
//! neighbours, and positions by least squares. An edge over several layers has a position in each; the edges
//! of one node share their positions.

/// Minimum gap between neighbouring nodes.
const GAP: f64 = 26.0;
/// Minimum gap between neighbours if one of them is a passing edge.
const GAP_OF_EDGES: f64 = 12.0;
/// Number of passes over all layers, to order them and to position their items.
const SWEEPS: usize = 24;

/// Layout of a graph.
#[derive(Debug)]
pub struct GraphLayout {
    /// Layer of each node, the uppermost first.
    pub layers: Vec<usize>,
    /// Horizontal centre of each node.
    pub middles: Vec<f64>,
    /// Segments of edges from one layer to the next; a segment shared by several edges is drawn once.
    pub pieces: Vec<EdgePiece>,
    /// Total width.
    pub width: f64,
    /// Number of layers.
    pub n_layers: usize,
}

/// Segment of an edge.
#[derive(Debug)]
pub struct EdgePiece {
    /// Node that the edge starts from.
    pub source: usize,
    /// End in the layer above.
    pub from: EdgeEnd,
    /// End in the layer below.
    pub to: EdgeEnd,
}

/// End of a segment.
#[derive(Debug, Clone, Copy)]
pub struct EdgeEnd {
    /// Index of the layer.
    pub layer: usize,
    /// Horizontal position.
    pub at: f64,
    /// Node at this end; `None` if the edge passes through the layer.
    pub node: Option<usize>,
}

/// Item of a layer: a node, or a passing edge.
struct LayerItem {
    layer: usize,
    width: f64,
    is_node: bool,
    above: Vec<usize>,
    below: Vec<usize>,
}

/// Lays out nodes of these widths. Every edge must go to a later node.
///
/// # Panics
/// If an edge goes to an earlier node.
pub fn layout(widths: &[f64], edges: &[(usize, usize)]) -> GraphLayout {
    let layers = layers(widths.len(), edges);
    let node = |(at, &width): (usize, &f64)| LayerItem {
        layer: layers[at],
        width,
        is_node: true,
        above: Vec::new(),
        below: Vec::new(),
    };
    let mut places: Vec<LayerItem> = widths.iter().enumerate().map(node).collect();
    let mut pieces: Vec<(usize, usize, usize)> = Vec::new();
    for source in 0..widths.len() {
        let targets: Vec<usize> = edges.iter().filter(|edge| edge.0 == source).map(|edge| edge.1).collect();
        let Some(last) = targets.iter().map(|&target| layers[target]).max() else { continue };
        // Items of the edge, one in each layer, starting with its node.
        let mut passes = vec![source];
        for layer in layers[source] + 1..last {
            places.push(LayerItem { layer, width: 0.0, is_node: false, above: Vec::new(), below: Vec::new() });
            pieces.push((source, passes[passes.len() - 1], places.len() - 1));
            passes.push(places.len() - 1);
        }
        for target in targets {
            pieces.push((source, passes[layers[target] - layers[source] - 1], target));
        }
    }
    pieces.sort_unstable();
    pieces.dedup();
    for &(_, from, to) in &pieces {
        places[from].below.push(to);
        places[to].above.push(from);
    }
    let n_layers = layers.iter().map(|layer| layer + 1).max().unwrap_or(0);
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); n_layers];
    (0..places.len()).for_each(|at| rows[places[at].layer].push(at));
    order(&places, &mut rows);
    let (middles, width) = middles(&places, &rows);
    let end = |at: usize| EdgeEnd { layer: places[at].layer, at: middles[at], node: places[at].is_node.then_some(at) };
    let pieces = pieces.into_iter().map(|(source, from, to)| EdgePiece { source, from: end(from), to: end(to) });
    GraphLayout { layers, pieces: pieces.collect(), middles: middles[..widths.len()].to_vec(), width, n_layers }
}

/// Layers by the longest path; a node without predecessors is just above the first node that needs it.
fn layers(n: usize, edges: &[(usize, usize)]) -> Vec<usize> {
    let mut layers = vec![0; n];
    let mut has_above = vec![false; n];
    let mut sorted = edges.to_vec();
    sorted.sort_unstable();
    for (from, to) in sorted {
        assert!(from < to, "an edge goes from a node to a later one");
        layers[to] = usize::max(layers[to], layers[from] + 1);
        has_above[to] = true;
    }
    for at in (0..n).filter(|&at| !has_above[at]) {
        let below = edges.iter().filter(|edge| edge.0 == at).map(|edge| layers[edge.1]);
        layers[at] = below.min().map_or(0, |layer| layer - 1);
    }
    layers
}

/// Orders layers so that few segments cross: by the barycentres of neighbours, keeping the best order of many
/// sweeps.
fn order(places: &[LayerItem], rows: &mut Vec<Vec<usize>>) {
    let mut position = vec![0.0; places.len()];
    let mut best: Option<(usize, Vec<Vec<usize>>)> = None;
    for sweep in 0..SWEEPS {
        for row in rows.iter() {
            row.iter().zip(0..).for_each(|(&at, n)| position[at] = f64::from(n));
        }
        let n_crossings = crossings(places, rows, &position);
        if best.as_ref().is_none_or(|(least, _)| n_crossings < *least) {
            best = Some((n_crossings, rows.clone()));
        }
        let is_down = sweep % 2 == 0;
        let n = rows.len();
        for step in 0..n {
            let row = &mut rows[if is_down { step } else { n - 1 - step }];
            let centre = |at: usize| {
                let neighbours = if is_down { &places[at].above } else { &places[at].below };
                let sum: f64 = neighbours.iter().map(|&other| position[other]).sum();
                if neighbours.is_empty() { position[at] } else { sum / neighbours.len() as f64 }
            };
            let mut keyed: Vec<(f64, usize)> = row.iter().map(|&at| (centre(at), at)).collect();
            keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
            *row = keyed.into_iter().map(|(_, at)| at).collect();
            row.iter().zip(0..).for_each(|(&at, n)| position[at] = f64::from(n));
        }
    }
    if let Some((_, order)) = best {
        *rows = order;
    }
}

/// Number of crossing pairs of segments.
fn crossings(places: &[LayerItem], rows: &[Vec<usize>], position: &[f64]) -> usize {
    let of_row = |row: &Vec<usize>| {
        let ends = row.iter().flat_map(|&at| places[at].below.iter().map(move |&to| (position[at], position[to])));
        let ends: Vec<(f64, f64)> = ends.collect();
        let crosses =
            |(at, a): (usize, &(f64, f64))| ends[..at].iter().filter(|b| (a.0 - b.0) * (a.1 - b.1) < 0.0).count();
        ends.iter().enumerate().map(crosses).sum::<usize>()
    };
    rows.iter().map(of_row).sum()
}

/// Positions within layers, near neighbours, with passing edges preferably straight; and the total width.
fn middles(places: &[LayerItem], rows: &[Vec<usize>]) -> (Vec<f64>, f64) {
    let distance = |a: usize, b: usize| {
        let gap = if places[a].is_node && places[b].is_node { GAP } else { GAP_OF_EDGES };
        (places[a].width + places[b].width) / 2.0 + gap
    };
    let mut middles = vec![0.0; places.len()];
    for row in rows {
        for pair in row.windows(2) {
            middles[pair[1]] = middles[pair[0]] + distance(pair[0], pair[1]);
        }
        let shift = row.last().map_or(0.0, |&last| middles[last] / 2.0);
        row.iter().for_each(|&at| middles[at] -= shift);
    }
    let pull = |a: usize, b: usize| match (places[a].is_node, places[b].is_node) {
        (false, false) => 8.0,
        (true, true) => 1.0,
        _ => 2.0,
    };
    for sweep in 0..SWEEPS {
        for step in 0..rows.len() {
            let row = &rows[if sweep % 2 == 0 { step } else { rows.len() - 1 - step }];
            let wanted = |&at: &usize| {
                let neighbours = places[at].above.iter().chain(&places[at].below);
                let pulls = neighbours.map(|&other| (pull(at, other), middles[other]));
                let (weight, sum) = pulls.fold((0.0, 0.0), |(w, s), (pull, x)| (w + pull, s + pull * x));
                if weight > 0.0 { (sum / weight, weight) } else { (middles[at], 0.1) }
            };
            let wanted: Vec<(f64, f64)> = row.iter().map(wanted).collect();
            let gaps: Vec<f64> = row.windows(2).map(|pair| distance(pair[0], pair[1])).collect();
            for (&at, x) in row.iter().zip(nearest(&wanted, &gaps)) {
                middles[at] = x;
            }
        }
    }
    let left = |at: usize| middles[at] - places[at].width / 2.0;
    let least = (0..places.len()).map(left).fold(f64::INFINITY, f64::min);
    let most = (0..places.len()).map(|at| left(at) + places[at].width).fold(f64::NEG_INFINITY, f64::max);
    middles.iter_mut().for_each(|x| *x -= least);
    (middles, (most - least).max(0.0))
}

/// Numbers closest to the wanted ones with their weights, by least squares, with these minimum distances:
/// blocks of neighbours that would be too close move together.
fn nearest(wanted: &[(f64, f64)], gaps: &[f64]) -> Vec<f64> {
    let mut ahead = 0.0;
    let mut offsets = vec![0.0];
    for gap in gaps {
        ahead += gap;
        offsets.push(ahead);
    }
    // Sums of weights and of weighted numbers, and the number of items of a block.
    let mut blocks: Vec<(f64, f64, usize)> = Vec::new();
    for (&(x, weight), offset) in wanted.iter().zip(&offsets) {
        blocks.push((weight, weight * (x - offset), 1));
        while let [.., a, b] = blocks[..]
            && a.1 / a.0 > b.1 / b.0
        {
            blocks.truncate(blocks.len() - 2);
            blocks.push((a.0 + b.0, a.1 + b.1, a.2 + b.2));
        }
    }
    let levels = blocks.iter().flat_map(|&(weight, sum, n)| std::iter::repeat_n(sum / weight, n));
    levels.zip(&offsets).map(|(level, offset)| level + offset).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    #[test]
    fn neighbours_that_come_too_near_move_together() {
        assert_eq!(nearest(&[(0.0, 1.0), (10.0, 1.0)], &[4.0]), [0.0, 10.0]);
        assert_eq!(nearest(&[(5.0, 1.0), (5.0, 1.0)], &[4.0]), [3.0, 7.0]);
        assert_eq!(nearest(&[(5.0, 3.0), (5.0, 1.0)], &[4.0]), [4.0, 8.0]);
    }

    #[test]
    fn a_branch_stands_beside_the_other() {
        // A residual block: 0 → 1 → 2 → 3, and 0 → 3 past the others.
        let found = layout(&[100.0; 4], &[(0, 1), (1, 2), (2, 3), (0, 3)]);
        assert_eq!((&found.layers[..], found.n_layers), (&[0, 1, 2, 3][..], 4));
        let passing = found.pieces.iter().filter(|piece| piece.to.node.is_none()).count();
        assert_eq!((passing, found.pieces.len()), (2, 6));
    }

    #[test]
    fn nothing_stands_on_anything_else_and_every_edge_arrives() {
        for seed in 0..200 {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let n = rng.random_range(1..40_usize);
            let widths: Vec<f64> = (0..n).map(|_| rng.random_range(20.0..300.0)).collect();
            let mut edges: Vec<(usize, usize)> = Vec::new();
            for to in 1..n {
                for _ in 0..rng.random_range(0..4) {
                    edges.push((rng.random_range(0..to), to));
                }
            }
            let found = layout(&widths, &edges);
            let (left, right) =
                (|at: usize| found.middles[at] - widths[at] / 2.0, |at: usize| found.middles[at] + widths[at] / 2.0);
            for a in 0..n {
                assert!(left(a) > -1e-6 && right(a) < found.width + 1e-6, "seed {seed}");
                for b in (0..a).filter(|&b| found.layers[a] == found.layers[b]) {
                    assert!(right(a) < left(b) || right(b) < left(a), "seed {seed}: {a} and {b}");
                }
            }
            for piece in &found.pieces {
                assert_eq!(piece.from.layer + 1, piece.to.layer, "seed {seed}");
            }
            for (from, to) in edges {
                assert!(found.layers[from] < found.layers[to]);
                let arrives = |piece: &EdgePiece| (piece.source, piece.to.node) == (from, Some(to));
                assert_eq!(found.pieces.iter().filter(|piece| arrives(piece)).count(), 1, "seed {seed}");
            }
        }
    }
}
