//! Programs of fused loop nests.

use std::collections::HashMap;

use tilewright_ir::expr::{Cond, ReduceOp, Subscript};
use tilewright_ir::op::{ProgramBuilder, SizeRange, StageSpec, Workload, WorkloadError};
use tilewright_ir::{BufferId, DType, Expr, Index, Role};
use tilewright_runtime::RunSize;

use super::pixels::pixels;
use super::{Kernel, in_memory};
use crate::net::{Kind, Net, Node, ValueId, Windows};
use crate::open::loops::{OpenLoop, OpenSizes, at_once, identity_in};
use crate::rules::joined;
use crate::scalar::{self, cost};

/// Builds the program of a nest.
struct NestBuilder<'a> {
    net: &'a Net,
    /// Builder of the program; `None` while a stage is being built.
    program: Option<ProgramBuilder>,
    /// Members that compute each value.
    producers: Vec<(ValueId, usize)>,
    /// Values that are in buffers.
    buffers: Vec<(ValueId, BufferId)>,
    /// Whether all values have elements of one type.
    is_of_one_type: bool,
    /// Function for the block of adjacent channels of a value.
    block_of: &'a dyn Fn(ValueId) -> i64,
    /// Function that returns the open size of a value's dimension, if it is open.
    open: &'a dyn Fn(ValueId, usize) -> Option<(RunSize, SizeRange)>,
    /// Loops along open dimensions.
    ends: Vec<OpenLoop>,
    /// Ends of the open dimensions of values that windows or borders extend past.
    borders: HashMap<(ValueId, usize), Index>,
}

/// Makes a nest; `block_of` tells the block of adjacent channels of each image.
pub(crate) fn nest(net: &Net, members: &[usize], block_of: &dyn Fn(ValueId) -> i64) -> Result<Kernel, WorkloadError> {
    match members {
        [at] if matches!(net.nodes[*at].kind, Kind::Pixels { .. }) => pixels(net, *at, block_of),
        _ => Ok(open_nest(net, members, block_of, &|_, _| None)?.0),
    }
}

/// Makes a nest as [`nest`] does, with open dimensions, whose largest sizes are those in the net: `open`
/// returns the size and range of each. Returns the open sizes of the workload, in its order.
pub(crate) fn open_nest(
    net: &Net,
    members: &[usize],
    block_of: &dyn Fn(ValueId) -> i64,
    open: &dyn Fn(ValueId, usize) -> Option<(RunSize, SizeRange)>,
) -> Result<(Kernel, Vec<RunSize>), WorkloadError> {
    let nodes: Vec<&Node> = members.iter().map(|&at| &net.nodes[at]).collect();
    let root = *nodes.last().expect("a nest has a node");
    let producers: Vec<(ValueId, usize)> = nodes.iter().zip(members).map(|(node, &at)| (node.output(), at)).collect();
    let is_inside = |id: ValueId| producers.iter().any(|(own, _)| *own == id);
    let mut inputs: Vec<ValueId> = Vec::new();
    for id in nodes.iter().flat_map(|node| node.inputs.iter().flatten()) {
        if !is_inside(*id) && !inputs.contains(id) && net.scalar(*id).is_none() {
            inputs.push(*id);
        }
    }
    let mut constants = Vec::new();
    for (at, id) in inputs.iter().enumerate() {
        constants.extend(net.value(*id).constant.is_some().then(|| format!("i{at}")));
    }
    let mut program = ProgramBuilder::new("nest", DType::F32, constants);
    let dtype_of = |id: ValueId| net.element_type(id).expect("nests are of types that have code");
    let of_input = |(at, id): (usize, &ValueId)| {
        program.set_dtype(dtype_of(*id));
        (*id, program.input(&format!("I{at}"), &in_memory(net.shape(*id), block_of(*id))))
    };
    let buffers = inputs.iter().enumerate().map(of_input).collect();
    let all = || nodes.iter().flat_map(|node| node.inputs.iter().flatten().chain(&node.outputs));
    let is_of_one_type = all().all(|id| dtype_of(*id) == dtype_of(root.output())) && net.stays(root.output());
    let (mut sizes, mut borders) = (OpenSizes::default(), HashMap::new());
    for node in nodes.iter().filter(|node| matches!(node.kind, Kind::Window(..) | Kind::Pad(..))) {
        let from = node.input(0);
        for d in 0..net.shape(from).len() {
            if let Some((size, range)) = open(from, d) {
                borders.insert((from, d), sizes.value(size, |name| program.open_size(name, range)));
            }
        }
    }
    let (ends, program) = (Vec::new(), Some(program));
    let mut builder = NestBuilder { net, program, producers, buffers, is_of_one_type, block_of, open, ends, borders };
    for (at, node) in nodes.iter().enumerate() {
        let is_root = at + 1 == nodes.len();
        if is_root || is_staged(net, node, &nodes) {
            builder.stage(node, &format!("T{at}"), is_root);
        }
    }
    let origin = nodes.iter().map(|node| node.origin.clone()).reduce(|a, b| joined(&a, &b)).unwrap_or_default();
    let program = builder.program.expect("it is there between stages").finish();
    let (program, sizes) = sizes.with_loops(program, builder.ends);
    let workload = Workload::nest(program)?;
    let (output, members, block) = (root.output(), members.to_vec(), block_of(root.output()));
    Ok((Kernel { workload, inputs, output, origin, members, block, in_blocks: 1, open: None }, sizes))
}

/// Whether a value of a nest is computed once for all of its readers, rather than by each of them.
fn is_staged(net: &Net, node: &Node, nodes: &[&Node]) -> bool {
    let id = node.output();
    // A gathered element is looked up once.
    const LOOK_UP: usize = 4;
    let gathers = |id: &ValueId| nodes.iter().any(|n| n.output() == *id && matches!(n.kind, Kind::Gather { .. }));
    let own_cost = match &node.kind {
        Kind::Reduce(..) | Kind::Window(..) => return true,
        Kind::Map(value) => cost(value) + LOOK_UP * node.inputs.iter().flatten().filter(|id| gathers(id)).count(),
        Kind::Gather { .. } => LOOK_UP,
        _ => return false,
    };
    let n_own = net.value(id).n_elements();
    // Reads of the value, or of a view of it within the nest.
    let views = nodes.iter().filter(|n| matches!(n.kind, Kind::View) && n.input(0) == id).map(|n| n.output());
    let ids: Vec<Option<ValueId>> = views.chain([id]).map(Some).collect();
    let reads_it = |user: &&&Node| !matches!(user.kind, Kind::View) && user.inputs.iter().any(|id| ids.contains(id));
    let users: Vec<&&Node> = nodes.iter().filter(reads_it).collect();
    let is_larger =
        |user: &&&Node| net.value(user.output()).n_elements() > n_own && !matches!(user.kind, Kind::Reduce(..));
    let n_reads: usize = users
        .iter()
        .map(|user| match &user.kind {
            Kind::Map(outer) => {
                let slots: Vec<usize> = (0..user.inputs.len()).filter(|&s| ids.contains(&user.inputs[s])).collect();
                scalar::inputs(outer).iter().filter(|slot| slots.contains(slot)).count()
            }
            _ => 1,
        })
        .sum();
    own_cost > 2 && (n_reads > 1 || users.iter().any(is_larger))
}

impl NestBuilder<'_> {
    /// Computes a node into a buffer.
    fn stage(&mut self, node: &Node, name: &str, is_root: bool) {
        let role = if is_root { Role::Output } else { Role::Temporary };
        let block = (self.block_of)(node.output());
        let shape = in_memory(self.net.shape(node.output()), block);
        let names: Vec<String> = (0..shape.len()).map(|d| format!("{}{d}", name.to_lowercase())).collect();
        let axes: Vec<(&str, i64)> = names.iter().map(String::as_str).zip(shape.iter().copied()).collect();
        let rank = axes.len();
        let mut program = self.program.take().expect("it is there between stages");
        let this = &*self;
        // The loops of a reduction, with the dimensions that they are along.
        let (op, reduced): (Option<ReduceOp>, Vec<(usize, i64)>) = match &node.kind {
            Kind::Reduce(op, dims) => {
                let from = this.net.shape(node.input(0));
                (Some(*op), dims.iter().map(|&d| (d, from[d])).collect())
            }
            Kind::Window(op, windows) => {
                let long = windows.kernel.iter().copied().enumerate().filter(|(_, n)| *n > 1);
                (Some(*op), long.collect())
            }
            _ => (None, Vec::new()),
        };
        let inner_names: Vec<String> = (0..reduced.len()).map(|d| format!("{}r{d}", name.to_lowercase())).collect();
        let open = self.open;
        let of_axes = names.iter().enumerate().filter_map(|(d, name)| Some((name, open(node.output(), d)?, 1)));
        let of_inner = inner_names.iter().zip(&reduced);
        let of_inner = of_inner.filter_map(|(name, (d, _))| match node.kind {
            Kind::Reduce(..) => {
                let (size, range) = open(node.input(0), *d)?;
                let is_last = d + 1 == self.net.shape(node.input(0)).len();
                Some((name, (size, range), if is_last { at_once(range) } else { 1 }))
            }
            _ => None,
        });
        let end =
            |(name, (size, range), multiple): (&String, _, _)| OpenLoop { name: name.clone(), size, range, multiple };
        let ends: Vec<OpenLoop> = of_axes.chain(of_inner).map(end).collect();
        let inner: Vec<(&str, i64)> =
            inner_names.iter().map(String::as_str).zip(reduced.iter().map(|(_, n)| *n)).collect();
        let value = |vars: &[Index]| -> Expr {
            let (places, sums) = vars.split_at(rank);
            let out = &match places {
                [n, blocks, h, w, c] if block > 1 => vec![n.clone(), blocks.scale(block).add(c), h.clone(), w.clone()],
                // A scalar has a dimension only in memory.
                _ => places[..rank.min(this.net.shape(node.output()).len())].to_vec(),
            };
            match &node.kind {
                Kind::Reduce(..) => {
                    let mut at = out.to_vec();
                    reduced.iter().zip(sums).for_each(|((d, _), var)| at[*d] = var.clone());
                    this.element(node.input(0), &at)
                }
                Kind::Window(op, windows) => this.tap(node, windows, *op, out, &reduced, sums),
                _ => this.computed(node, out),
            }
        };
        let reduce = op.map(|op| (op, &inner[..]));
        let spec = StageSpec { name, axes: &axes, reduce, role };
        program.set_dtype(this.net.element_type(node.output()).expect("nests are of types that have code"));
        let buffer = program.stage(spec, value);
        self.program = Some(program);
        self.ends.extend(ends);
        self.buffers.push((node.output(), buffer));
    }

    /// Number of elements of a value along a dimension.
    fn end_of(&self, id: ValueId, d: usize) -> Index {
        self.borders.get(&(id, d)).cloned().unwrap_or_else(|| self.net.shape(id)[d].into())
    }

    /// Term of a window reduction for one position of the window.
    fn tap(
        &self,
        node: &Node,
        windows: &Windows,
        op: ReduceOp,
        out: &[Index],
        reduced: &[(usize, i64)],
        sums: &[Index],
    ) -> Expr {
        let (shape, extents) = (self.net.shape(node.input(0)), self.net.shape(node.output()));
        let (mut at, mut inside) = (Vec::with_capacity(out.len()), Cond::True);
        for d in 0..out.len() {
            let (stride, dilation, before) = (windows.strides[d], windows.dilations[d], windows.before[d]);
            let first = out[d].scale(stride).offset(-before);
            let place = match reduced.iter().position(|(dim, _)| *dim == d) {
                Some(tap) => first.add(&sums[tap].scale(dilation)),
                None => first,
            };
            if before > 0 {
                inside = inside.and(Cond::Lt(Index::from(-1), place.clone()));
            }
            if (extents[d] - 1) * stride + (windows.kernel[d] - 1) * dilation - before >= shape[d] {
                inside = inside.and(Cond::Lt(place.clone(), self.end_of(node.input(0), d)));
            }
            at.push(place);
        }
        let value = self.element(node.input(0), &at);
        match inside {
            Cond::True => value,
            _ => {
                let dtype = self.net.element_type(node.output()).expect("nests are of types that have code");
                Expr::Select(Box::new(inside), Box::new(value), Box::new(identity_in(op, dtype)))
            }
        }
    }

    /// Element of a value, read from a buffer or computed.
    fn element(&self, id: ValueId, at: &[Index]) -> Expr {
        let shape = self.net.shape(id);
        // Along broadcast dimensions, the only element is read.
        let missing = at.len() - shape.len().min(at.len());
        let at: Vec<Index> = shape
            .iter()
            .enumerate()
            .map(|(d, &n)| if n == 1 { Index::from(0) } else { at[d + missing].clone() })
            .collect();
        if let Some((_, buffer)) = self.buffers.iter().find(|(own, _)| *own == id) {
            let place = match (&at[..], (self.block_of)(id)) {
                ([], _) => vec![Index::from(0)],
                ([n, c, h, w], block @ 2..) => {
                    vec![n.clone(), c.floor_div(block), h.clone(), w.clone(), c.modulo(block)]
                }
                _ => at,
            };
            return Expr::Load(*buffer, place);
        }
        if let Some(x) = self.net.literal(id) {
            return x;
        }
        let (_, producer) = self.producers.iter().find(|(own, _)| *own == id).expect("a nest computes what it reads");
        let value = self.computed(&self.net.nodes[*producer], &at);
        match self.net.element_type(id) {
            // The value is computed in its own type.
            Some(dtype) if !self.is_of_one_type => Expr::cast(dtype, value),
            _ => value,
        }
    }

    /// Element of a node's result, as an expression of its inputs' elements.
    fn computed(&self, node: &Node, at: &[Index]) -> Expr {
        match &node.kind {
            Kind::Map(value) => value.map_loads(&mut |slot, _| Some(self.element(node.input(slot.0 as usize), at))),
            // Only dimensions of one element differ.
            Kind::View => {
                let mut long = at.iter().zip(self.net.shape(node.output())).filter(|(_, n)| **n != 1);
                let place = |n: &i64| match n {
                    1 => Index::from(0),
                    _ => long.next().expect("a view keeps its long dimensions").0.clone(),
                };
                let from: Vec<Index> = self.net.shape(node.input(0)).iter().map(place).collect();
                self.element(node.input(0), &from)
            }
            Kind::Transpose(order) => {
                let mut from = vec![Index::from(0); order.len()];
                order.iter().zip(at).for_each(|(&d, place)| from[d] = place.clone());
                self.element(node.input(0), &from)
            }
            Kind::Slice(parts) => {
                let from: Vec<Index> =
                    at.iter().zip(parts).map(|(place, (start, step))| place.scale(*step).offset(*start)).collect();
                self.element(node.input(0), &from)
            }
            Kind::Pick(lines) => {
                let place = |(place, line): (&Index, &crate::net::Line)| {
                    let line_at = place.scale(line.factor).offset(line.term);
                    if line.divisor == 1 { line_at } else { line_at.floor_div(line.divisor) }
                };
                let from: Vec<Index> = at.iter().zip(lines).map(place).collect();
                self.element(node.input(0), &from)
            }
            Kind::Pad(before, fill) => self.padded(node, at, before, *fill),
            Kind::Concat(axis) => self.concatenated(node, at, *axis),
            Kind::Gather { axis, by_element } => self.gathered(node, at, *axis, *by_element),
            _ => unreachable!("reductions are computed into buffers, pixels by kernels of their own"),
        }
    }

    /// Element of a tensor padded with a number.
    fn padded(&self, node: &Node, at: &[Index], before: &[i64], fill: f64) -> Expr {
        let shape = self.net.shape(node.input(0));
        let out = self.net.shape(node.output());
        let from: Vec<Index> = at.iter().zip(before).map(|(place, before)| place.offset(-before)).collect();
        let mut inside = Cond::True;
        for d in 0..from.len() {
            if before[d] > 0 {
                inside = inside.and(Cond::Lt(Index::from(-1), from[d].clone()));
            }
            if out[d] - before[d] > shape[d] {
                inside = inside.and(Cond::Lt(from[d].clone(), self.end_of(node.input(0), d)));
            }
        }
        let value = self.element(node.input(0), &from);
        Expr::Select(Box::new(inside), Box::new(value), Box::new(Expr::Const(fill)))
    }

    /// Element of a concatenation.
    fn concatenated(&self, node: &Node, at: &[Index], axis: usize) -> Expr {
        let mut end = self.net.shape(node.output())[axis];
        let mut value: Option<Expr> = None;
        for id in node.inputs.iter().flatten().rev() {
            let n = self.net.shape(*id)[axis];
            let start = end - n;
            let mut from = at.to_vec();
            from[axis] = at[axis].offset(-start);
            let own = self.element(*id, &from);
            value = Some(match value {
                None => own,
                Some(behind) => {
                    let is_own = Cond::Lt(at[axis].clone(), Index::from(end));
                    Expr::Select(Box::new(is_own), Box::new(own), Box::new(behind))
                }
            });
            end = start;
        }
        value.expect("a concat has inputs")
    }

    /// Element at a position that an index tensor gives.
    fn gathered(&self, node: &Node, at: &[Index], axis: usize, by_element: bool) -> Expr {
        let [table, numbers] = [0, 1].map(|slot| node.input(slot));
        let n = if by_element { 1 } else { self.net.shape(numbers).len() };
        let of_number = if by_element { at } else { &at[axis..axis + n] };
        let number = Subscript::Value(Box::new(self.element(numbers, of_number)));
        let known = |at: &[Index]| at.iter().cloned().map(Subscript::Index).collect::<Vec<_>>();
        let subscripts = [known(&at[..axis]), vec![number], known(&at[axis + n..])].concat();
        match self.buffers.iter().find(|(own, _)| *own == table) {
            Some((_, buffer)) => Expr::Gather(*buffer, subscripts),
            None => self.net.literal(table).expect("what is gathered from is in memory"),
        }
    }
}
