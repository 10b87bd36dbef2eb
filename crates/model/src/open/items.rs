//! Batches of dynamic size whose items are independent and also of dynamic size.
//!
//! The net is that of one item of any size, and a run processes one item after the other. Independence is
//! verified by lowering the model for several items: each node must compute an item from that item's inputs
//! alone.

use tilewright_graph::Tensor;
use tilewright_ir::Expr;
use tilewright_ir::expr::{Cond, TreePart as Part};
use tilewright_runtime::host::RANDOM;
use tilewright_runtime::{OpenDimension, RunSize};

use super::comparison::{Probes, SizeComparison, probes};
use super::least::Least;
use super::{OpenError, OpenNet};
use crate::fuse::{Fused, Items};
use crate::net::{Kind, Line, Net, Node, Read, Sequence, Track, Value, ValueId};

/// Fewest items for which models are compared, and how many at least the most are.
const FEWEST: i64 = 2;
const MOST: i64 = 13;

/// Makes a net of any number of `items`, each with the open dimension `dim`. `lower` lowers the model for the
/// given number of items and size, with the named dimension open.
///
/// # Errors
/// As [`open`](super::open()), or if an item depends on others.
pub fn open_items<E: From<OpenError>>(
    items: &OpenDimension,
    dim: &OpenDimension,
    mut lower: impl FnMut([i64; 2], &OpenDimension) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let mut whole = super::open(dim, |size| lower([1, size], dim))?;
    let size = probes(dim, &[]).map_or(dim.most, |[size, _]| size);
    let (ports, _) = ports_of_items(items, |n| lower([n, size], items))?;
    has_items(&mut whole, items, ports)?;
    whole.clone().open_kernels()?;
    Ok(whole)
}

/// Turns a net of one item into one of any number of items.
fn has_items(whole: &mut Fused, items: &OpenDimension, ports: Vec<bool>) -> Result<(), OpenError> {
    let ids = whole.net.inputs.iter().chain(&whole.net.outputs);
    let is_one = |(id, in_items): &(&ValueId, &bool)| !**in_items || whole.net.shape(**id).first() == Some(&1);
    if let Some((id, _)) = ids.zip(&ports).find(|port| !is_one(port)) {
        let (node, name) = (whole.net.value(*id).name.clone(), items.name.clone());
        return Err(OpenError::Node { node, why: "has another form for a single item".to_owned(), name });
    }
    whole.items = Some(Items { dim: items.clone(), ports, groups: None });
    Ok(())
}

/// Makes a net with an open dimension, as [`open`](super::open()) does, with a member for each size if sizes
/// of inputs or outputs are fractions of it; if that fails and the dimension is a batch of independent items,
/// makes a net of one item.
///
/// # Errors
/// As [`open`](super::open()).
pub fn open_or_repeat<E: From<OpenError>>(
    dim: &OpenDimension,
    mut lower: impl FnMut(i64) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let refused = match super::open(dim, &mut lower) {
        Ok(made) => match made.clone().open_kernels() {
            Ok(_) if made.has_divided_ports() => return Ok(super::sized::whole(made)),
            Ok(_) => return Ok(made),
            Err(error) => error.into(),
        },
        Err(error) => error,
    };
    if dim.least < 1 {
        return Err(refused);
    }
    let Ok((ports, mut whole)) = ports_of_items(dim, &mut lower) else { return Err(refused) };
    for (id, constant) in std::mem::take(&mut whole.net.varying) {
        whole.net.values[id.0].constant = Some(constant);
    }
    let axes = whole.net.values.iter().map(|value| vec![None; value.shape.len()]).collect();
    let (sizes, numbers, longer) = Default::default();
    whole.open = Some(OpenNet { dim: dim.clone(), second: None, axes, sizes, numbers, longer });
    has_items(&mut whole, dim, ports).map_err(|_| refused)?;
    Ok(whole)
}

/// Whether each input and output of a model has a part for each item, found by comparing nets of several
/// items, and the net of one item.
fn ports_of_items<E: From<OpenError>>(
    items: &OpenDimension,
    mut lower: impl FnMut(i64) -> Result<Fused, E>,
) -> Result<(Vec<bool>, Fused), E> {
    let several = [OpenDimension { least: 1, most: items.most.max(MOST), step: 1, ..items.clone() }];
    let probes = Probes { dims: &several, at: vec![[FEWEST, MOST - FEWEST]] };
    let mut nets = probes.sizes().map(|sizes| lower(sizes[0])).collect::<Result<Vec<Fused>, E>>()?;
    let whole = nets.pop().expect("invariant: the largest is last");
    let ports = SizeComparison { probes: &probes, nets: &nets, whole: &whole }.items()?;
    let one = lower(1)?;
    Least { dims: &several, net: one.net.clone() }.require_part_of(&whole.net)?;
    Ok((ports, one))
}

impl SizeComparison<'_> {
    /// Whether each input, and then each output, has a part for each item.
    fn items(&self) -> Result<Vec<bool>, OpenError> {
        let net = &self.whole.net;
        let dim = &self.probes.dims[0];
        let refuse = |node: &str, why: &str| {
            let (node, why, name) = (node.to_owned(), why.to_owned(), dim.name.clone());
            Err(OpenError::Node { node, why, name })
        };
        self.nodes()?;
        let axes = self.axes()?;
        let (numbers, same) = self.numbers()?;
        if let Some((id, _)) = numbers.first() {
            return refuse(&self.whole.net.maker_of(*id), "computes with the number of items");
        }
        if !net.states.is_empty() {
            return refuse(&net.states[0].past, "is a past, of which each item would have its own");
        }
        let mut of_values: Vec<Option<usize>> = Vec::with_capacity(axes.len());
        for (at, open) in axes.iter().enumerate() {
            let mut found = open.iter().enumerate().filter_map(|(axis, size)| Some((axis, (*size)?)));
            of_values.push(match (found.next(), found.next()) {
                (None, _) => None,
                (Some((axis, RunSize { term: 0, .. })), None) => Some(axis),
                _ => return refuse(&self.whole.net.maker_of(ValueId(at)), "has items that are not apart"),
            });
        }
        let mut placed = Placed { net, axes: of_values, outer: vec![1; net.values.len()], n: dim.most };
        let constants = net.values.iter().enumerate().filter_map(|(at, value)| Some((at, value.constant.as_ref()?)));
        for (at, constant) in constants.chain(same.iter().map(|(id, constant)| (id.0, constant))) {
            if !placed.is_apart(ValueId(at), constant) {
                return refuse(&self.whole.net.maker_of(ValueId(at)), "computes with the number of each item");
            }
        }
        if let Some(node) = placed.place(&self.nets[0].net.nodes) {
            return refuse(&node.origin, "computes with several items");
        }
        let port = |id: &ValueId| match (placed.axes[id.0], axes[id.0].first()) {
            (None, _) => Some(false),
            (Some(0), Some(Some(RunSize { factor: 1, .. }))) => Some(true),
            _ => None,
        };
        let mut ports = Vec::new();
        for id in net.inputs.iter().chain(&net.outputs) {
            let is_fit = |in_items: &bool| *in_items || !net.outputs.contains(id);
            match port(id).filter(is_fit) {
                Some(in_items) => ports.push(in_items),
                None => return refuse(&net.value(*id).name, "has its items not as its first dimension"),
            }
        }
        Ok(ports)
    }
}

/// Positions of items in the values of a net: a dimension has `outer · n · inner` positions, of which those
/// of an item share the middle index.
struct Placed<'n> {
    net: &'n Net,
    /// Dimension of each value that has the items.
    axes: Vec<Option<usize>>,
    /// Number of times that the items repeat in the dimension.
    outer: Vec<i64>,
    /// Number of items.
    n: i64,
}

impl<'n> Placed<'n> {
    /// Places the items in the outputs of all nodes; `others` are the nodes for another number of items.
    /// Returns a node that does not compute each item from the same item of its inputs, if any.
    fn place(&mut self, others: &[Node]) -> Option<&'n Node> {
        let net: &'n Net = self.net;
        for (node, other) in net.nodes.iter().zip(others) {
            match self.outer_of(node, other) {
                Some(outer) => node.outputs.iter().for_each(|id| self.outer[id.0] = outer),
                None => return Some(node),
            }
        }
        None
    }

    fn axis_of(&self, id: ValueId) -> Option<usize> {
        self.axes[id.0]
    }

    /// Whether a constant is the same for all items, or holds indices of each item's own elements.
    fn is_apart(&self, id: ValueId, constant: &Tensor) -> bool {
        let Some(axis) = self.axis_of(id) else { return true };
        let n = self.n as usize;
        let n_outer: usize = constant.shape()[..axis].iter().product();
        let n_bytes = constant.bytes().len() / n_outer.max(1) / n;
        if n_bytes == 0 || n_outer * n * n_bytes != constant.bytes().len() {
            return n_bytes == 0;
        }
        let is_same = |outer: &[u8]| outer.chunks(n_bytes).all(|item| *item == outer[..n_bytes]);
        if constant.bytes().chunks(n * n_bytes).all(is_same) {
            return true;
        }
        let mut readers = self.net.nodes.iter().filter(|node| node.inputs.contains(&Some(id)));
        readers.all(|node| self.own_rows(node, constant, axis).is_some())
    }

    /// Number of rows of an item, if a node gathers rows and each item's indices refer to its own rows.
    fn own_rows(&self, node: &Node, numbers: &Tensor, axis: usize) -> Option<i64> {
        let Kind::Gather { axis: along, by_element: false } = node.kind else { return None };
        let from = node.input(0);
        let n_rows = (self.axis_of(from)? == along).then(|| self.net.shape(from)[along] / self.n)?;
        let n_outer: usize = numbers.shape()[..axis].iter().product();
        let all = numbers.i64s();
        let n_own = all.len() / n_outer.max(1) / self.n as usize;
        let is_own = |(at, number): (usize, &i64)| {
            let item = (at / n_own) as i64 % self.n;
            let first = all[at / (n_own * self.n as usize) * n_own * self.n as usize + at % n_own];
            (0..n_rows).contains(&first) && *number == first + item * n_rows
        };
        (node.input(0) != node.input(1) && all.iter().enumerate().all(is_own)).then_some(n_rows)
    }

    /// Number of times that the items repeat in the dimension of a node's outputs, if the node computes each
    /// item from the same item of its inputs; `other` is the node for another number of items.
    fn outer_of(&self, node: &Node, other: &Node) -> Option<i64> {
        let net = self.net;
        let inputs = || node.inputs.iter().flatten().copied();
        if inputs().chain(node.outputs.iter().copied()).all(|id| self.axis_of(id).is_none()) {
            return Some(1);
        }
        let to = *node.outputs.first()?;
        let axis = self.axis_of(to)?;
        let rank = |id: ValueId| net.shape(id).len();
        let mut outers = inputs().filter(|id| self.axis_of(*id).is_some()).map(|id| self.outer[id.0]);
        let first = outers.next().unwrap_or(1);
        if let Kind::View = node.kind {
            let from = node.input(0);
            let before = |id: ValueId, axis: usize| net.shape(id)[..axis].iter().product::<i64>();
            let all = before(from, self.axis_of(from)?) * self.outer[from.0];
            let own = before(to, axis);
            let outer = (all % own == 0).then_some(all / own)?;
            return (net.shape(to)[axis] % (outer * self.n) == 0).then_some(outer);
        }
        if let (Kind::Sequence(own), Kind::Sequence(other)) = (&node.kind, &other.kind) {
            return self.is_of_items(node, own, other).then_some(1);
        }
        (outers.all(|outer| outer == first) && self.keeps_apart(node, other, axis, rank(to))).then_some(first)
    }

    /// Whether each step of a sequence has the rows of all items, each computed from the same item's.
    fn is_of_items(&self, node: &Node, own: &Sequence, other: &Sequence) -> bool {
        let net = self.net;
        let is_step = |id: ValueId, part: ValueId, track: Option<&Track>| {
            let (whole, part) = (net.shape(id), own.body.shape(part));
            let n: i64 = part.iter().product();
            let is_row = track.is_none_or(|track| track.first % n == 0 && track.by % n == 0);
            let behind = self.axis_of(id).map(|axis| &whole[axis..]);
            is_row && part.first() == Some(&self.n) && behind == Some(part) && self.outer[id.0] == 1
        };
        let reads = own.body.inputs.iter().zip(&own.reads).all(|(part, read)| match read {
            Read::Part(input, track) => is_step(node.input(*input), *part, Some(track)),
            Read::Before { first, .. } => is_step(node.input(*first), *part, None),
        });
        let mut writes = own.body.outputs.iter().zip(&own.writes);
        let is_whole = reads && writes.all(|(part, (at, track))| is_step(node.outputs[*at], *part, Some(track)));
        let is_known = own.constants.iter().all(|(_, outer)| self.axis_of(*outer).is_none());
        let axis =
            |(own, other): (&Value, &Value)| own.shape.iter().zip(&other.shape).position(|(own, other)| own != other);
        let axes: Vec<Option<usize>> = own.body.values.iter().zip(&other.body.values).map(axis).collect();
        let n_outer = vec![1; axes.len()];
        let mut within = Placed { net: &own.body, axes, outer: n_outer, n: self.n };
        is_whole && is_known && within.place(&other.body.nodes).is_none()
    }

    /// Whether a node computes each item, along a dimension of its result, from the same item of its inputs.
    fn keeps_apart(&self, node: &Node, other: &Node, axis: usize, rank: usize) -> bool {
        let net = self.net;
        let inputs = || node.inputs.iter().flatten().copied();
        // Dimensions are counted from the last one, as in broadcasting.
        let is_at_same_place =
            |id: ValueId| self.axis_of(id).is_none_or(|own| net.shape(id).len() - own == rank - axis);
        let of_first = node.inputs.first().copied().flatten().and_then(|id| self.axis_of(id));
        let others_are_shared = || inputs().skip(1).all(|id| self.axis_of(id).is_none());
        match &node.kind {
            Kind::Map(expr) => inputs().all(is_at_same_place) && reads_no_place(expr),
            Kind::Transpose(order) => of_first == Some(order[axis]),
            Kind::Slice(parts) => of_first == Some(axis) && parts[axis] == (0, 1) && is_as_long(net, node, axis),
            Kind::Concat(along) => *along != axis && inputs().all(|id| self.axis_of(id) == Some(axis)),
            Kind::Pad(before, _) => of_first == Some(axis) && before[axis] == 0 && is_as_long(net, node, axis),
            Kind::Window(_, w) => {
                of_first == Some(axis) && (w.kernel[axis], w.strides[axis], w.before[axis]) == (1, 1, 0)
            }
            // A dimension of size 1 may be shared by all items.
            Kind::Pick(lines) => match of_first {
                Some(own) => own == axis && lines[axis] == Line::SAME && is_as_long(net, node, axis),
                None => lines[axis].factor == 0,
            },
            Kind::Reduce(_, dims) => of_first == Some(axis) && !dims.contains(&axis),
            Kind::Conv(_) | Kind::Pixels { .. } => of_first == Some(0) && axis == 0 && others_are_shared(),
            Kind::Product { heads: None, .. } => {
                // Items are rows of operand A, or products of a batch.
                let of_second = self.axis_of(node.input(1));
                let is_batch = |own: usize| own == axis && rank == 3 && axis == 0;
                of_first == Some(axis) && axis + 1 < rank && of_second.is_none_or(is_batch)
            }
            Kind::Product { heads: Some(heads), .. } => match other.kind {
                Kind::Product { heads: Some(other), .. } if heads.b == other.b => {
                    of_first.is_some() && others_are_shared()
                }
                // Items are the products of the batch, all of them.
                Kind::Product { heads: Some(_), .. } => {
                    let is_whole = [heads.of_a, heads.of_b].iter().all(|of| (of.before, of.after) == (0, 0));
                    is_whole && inputs().all(|id| self.axis_of(id).is_some())
                }
                _ => false,
            },
            Kind::Packed(_) => of_first == Some(axis) && axis == 0 && others_are_shared(),
            Kind::Gather { axis: along, by_element } => {
                let (numbers, rank) = (node.input(1), net.shape(node.input(1)).len());
                match (of_first, self.axis_of(numbers), *by_element) {
                    (Some(own), None, false) if own < *along => own == axis,
                    (Some(own), None, false) => own > *along && own + rank - 1 == axis,
                    (None, Some(own), false) => own + along == axis,
                    (Some(own), Some(of_numbers), false) => {
                        let constant = self.constant(numbers);
                        let own_rows = constant.and_then(|constant| self.own_rows(node, constant, of_numbers));
                        own == *along && own_rows.is_some() && of_numbers + along == axis
                    }
                    (Some(own), Some(other), true) => own == axis && other == axis && axis != *along,
                    _ => false,
                }
            }
            // Numbers without a key are independent of each other.
            Kind::Call(call) => call.operator.name == RANDOM.name && call.parameters.get(5) == Some(&0),
            Kind::View | Kind::Append(_) | Kind::Sequence(_) | Kind::Loop(_) | Kind::Host(_) => false,
        }
    }

    /// Elements of a value that are known before a run.
    fn constant(&self, id: ValueId) -> Option<&Tensor> {
        let of_size = || self.net.varying.iter().find(|(own, _)| *own == id).map(|(_, constant)| constant);
        self.net.value(id).constant.as_ref().or_else(of_size)
    }
}

/// Whether the first input and the output have the same size along an axis.
fn is_as_long(net: &Net, node: &Node, axis: usize) -> bool {
    net.shape(node.input(0))[axis] == net.shape(node.output())[axis]
}

/// Whether an expression uses indices only to access elements.
pub(super) fn reads_no_place(expr: &Expr) -> bool {
    let mut reads = false;
    Part::Expr(expr).walk(&mut |part| {
        reads |=
            matches!(part, Part::Expr(Expr::FromIndex(_) | Expr::Gather(..)) | Part::Cond(Cond::Lt(..) | Cond::Eq(..)));
    });
    !reads
}
