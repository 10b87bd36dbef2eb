//! Images of open width: operators on them become those on images whose rows and columns are exchanged, as
//! kernels take any number of rows.

use std::collections::{HashMap, HashSet};

use tilewright_graph::{DType, Dim, Graph};

use super::items::reads_no_place;
use crate::net::{Convolution, Kind, Net, Node, ValueId, Windows};

/// Dimensions of images that are exchanged.
const ROWS: usize = 2;
const COLUMNS: usize = 3;
const RANK: usize = 4;

/// Whether the open dimension is the last one of an input of images or of lines, or the second of the lines
/// of a batch, such as frames of features, and no other one.
pub(crate) fn has_open_columns(graph: &Graph) -> bool {
    let Some(size) = graph.open_size else { return false };
    graph.inputs.iter().map(|id| graph.value(*id)).any(|value| {
        let (Some(ty), Some(dims)) = (&value.ty, value.declared.as_ref().and_then(|declared| declared.dims.as_ref()))
        else {
            return false;
        };
        // Other dimensions are bound to sizes.
        let named = |(dim, n): (&Dim, &usize)| matches!(dim, Dim::Named(_)) && *n == size;
        let open: Vec<usize> = (0..dims.len()).filter(|&axis| named((&dims[axis], &ty.shape[axis]))).collect();
        dims.len() > ROWS && open == [dims.len() - 1] || dims.len() == ROWS + 1 && open == [1]
    })
}

/// Exchanges rows and columns of the images that convolutions and windows read, and of what is computed of
/// them, if their width is open.
pub(crate) fn exchange_columns(net: &mut Net) {
    let nodes = std::mem::take(&mut net.nodes);
    let widths = net.open_size.into_iter().collect();
    let mut images = Images { net, exchanged: HashMap::new(), widths, makers: HashMap::new() };
    for (at, node) in nodes.iter().enumerate() {
        if let Some(kind) = images.exchanged_kind(&nodes, node) {
            images.push_exchanged(kind, node);
        } else {
            images.net.nodes.push(node.clone());
        }
        images.makers.extend(node.outputs.iter().map(|id| (*id, at)));
    }
    net.prune();
}

struct Images<'n> {
    net: &'n mut Net,
    /// Values with their rows and columns exchanged.
    exchanged: HashMap<ValueId, ValueId>,
    /// Open widths of images so far.
    widths: HashSet<i64>,
    /// Node that computes a value, among those of the net as it was.
    makers: HashMap<ValueId, usize>,
}

impl Images<'_> {
    /// Kind of the node that computes the same of exchanged images; `None` if it does not read any.
    fn exchanged_kind(&self, nodes: &[Node], node: &Node) -> Option<Kind> {
        let is_image = |id: &ValueId| self.net.shape(*id).len() == RANK;
        let mut ids = node.inputs.iter().flatten();
        if !node.outputs.iter().all(is_image)
            || !ids.any(|id| self.exchanged.contains_key(id)) && !self.begins(nodes, node)
        {
            return None;
        }
        let first = node.inputs.first().copied().flatten().filter(is_image);
        Some(match &node.kind {
            Kind::Map(expr) if reads_no_place(expr) => node.kind.clone(),
            Kind::View if self.net.shape(node.input(0)) == self.net.shape(node.output()) => Kind::View,
            Kind::Conv(conv) => {
                let Convolution { strides, dilations, before, after, .. } = conv;
                let turned = |[rows, columns]: [i64; 2]| [columns, rows];
                let [strides, dilations, before, after] = [strides, dilations, before, after].map(|of| turned(*of));
                Kind::Conv(Convolution { strides, dilations, before, after, ..conv.clone() })
            }
            Kind::Window(op, windows) => {
                let Windows { kernel, strides, dilations, before } = windows;
                let [kernel, strides, dilations, before] = [kernel, strides, dilations, before].map(|of| swapped(of));
                Kind::Window(*op, Windows { kernel, strides, dilations, before })
            }
            Kind::Pad(before, number) => Kind::Pad(swapped(before), *number),
            Kind::Pick(lines) => Kind::Pick(swapped(lines)),
            Kind::Slice(parts) if first.is_some() => Kind::Slice(swapped(parts)),
            Kind::Concat(axis) => Kind::Concat(axis_of(*axis)),
            Kind::Reduce(op, dims) => Kind::Reduce(*op, dims.iter().map(|axis| axis_of(*axis)).collect()),
            Kind::Gather { axis, by_element: false } if self.net.shape(node.input(1)).len() == 1 => {
                first?;
                Kind::Gather { axis: axis_of(*axis), by_element: false }
            }
            _ => return None,
        })
    }

    /// Whether a node looks at images of open width: the model's input or a map of it, or what other kinds of
    /// operators return.
    fn begins(&self, nodes: &[Node], node: &Node) -> bool {
        if !matches!(node.kind, Kind::Conv(_) | Kind::Window(..)) {
            return false;
        }
        let mut id = node.input(0);
        loop {
            match *self.net.shape(id) {
                [_, _, rows, columns] if rows > 1 && self.widths.contains(&columns) => return true,
                [_, _, rows, _] if rows > 1 => {}
                _ => return false,
            }
            let Some(maker) = self.makers.get(&id).map(|at| &nodes[*at]) else { return false };
            match maker.kind {
                Kind::Map(_) | Kind::View | Kind::Pad(..) => id = maker.input(0),
                _ => return false,
            }
        }
    }

    /// Adds a node that computes an exchanged image, and one that exchanges it back for other readers.
    fn push_exchanged(&mut self, kind: Kind, node: &Node) {
        let is_gather = matches!(kind, Kind::Gather { .. });
        let read = |(slot, id): (usize, &Option<ValueId>)| match id {
            Some(id) if !is_gather || slot == 0 => Some(self.of(*id, node)),
            other => *other,
        };
        let inputs = node.inputs.iter().enumerate().map(read).collect();
        let to = node.output();
        let (shape, dtype, name) =
            (swapped(self.net.shape(to)), self.net.value(to).dtype, self.net.value(to).name.clone());
        let new = self.net.add_value(&name, dtype, &shape);
        self.net.nodes.push(Node { kind, inputs, outputs: vec![new], origin: node.origin.clone() });
        self.exchanged.insert(to, new);
        if shape[ROWS] > 1 && shape[COLUMNS] > 1 {
            self.widths.insert(shape[ROWS]);
        }
        let kind = Kind::Transpose(vec![0, 1, COLUMNS, ROWS]);
        self.net.nodes.push(Node { kind, inputs: vec![Some(new)], outputs: vec![to], origin: node.origin.clone() });
    }

    /// A value with its last two dimensions exchanged, as operands of a node are.
    fn of(&mut self, id: ValueId, node: &Node) -> ValueId {
        if let Some(known) = self.exchanged.get(&id) {
            return *known;
        }
        let shape = self.net.shape(id).to_vec();
        let (dtype, name) = (self.net.value(id).dtype, self.net.value(id).name.clone());
        let new = match shape[..] {
            [] | [1] | [.., 1, 1] => return id,
            [n] => self.push(Kind::View, node, id, self.net.value(id).dtype, &[n, 1]),
            _ => {
                let rank = shape.len();
                let order: Vec<usize> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
                let turned: Vec<i64> = order.iter().map(|&axis| shape[axis]).collect();
                match self.net.numbers(id) {
                    Some(numbers) => {
                        let (rows, columns) = (shape[rank - 2] as usize, shape[rank - 1] as usize);
                        let n = rows * columns;
                        let from = |at: usize| at / n * n + at % rows * columns + at % n / rows;
                        let numbers: Vec<f32> = (0..numbers.len()).map(|at| numbers[from(at)]).collect();
                        self.net.add_constant(&name, &turned, &numbers)
                    }
                    None => self.push(Kind::Transpose(order), node, id, dtype, &turned),
                }
            }
        };
        self.exchanged.insert(id, new);
        new
    }

    fn push(&mut self, kind: Kind, node: &Node, from: ValueId, dtype: DType, shape: &[i64]) -> ValueId {
        let name = self.net.value(from).name.clone();
        let to = self.net.add_value(&name, dtype, shape);
        self.net.nodes.push(Node { kind, inputs: vec![Some(from)], outputs: vec![to], origin: node.origin.clone() });
        to
    }
}

/// List for each dimension, with rows and columns exchanged.
fn swapped<T: Clone>(of_dims: &[T]) -> Vec<T> {
    let mut swapped = of_dims.to_vec();
    swapped.swap(ROWS, COLUMNS);
    swapped
}

fn axis_of(axis: usize) -> usize {
    match axis {
        ROWS => COLUMNS,
        COLUMNS => ROWS,
        other => other,
    }
}
