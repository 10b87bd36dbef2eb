//! Channels padded to whole blocks, where depthwise convolutions of integers need them.

use std::collections::{BTreeMap, BTreeSet};

use tilewright_graph::{DType, Tensor};

use crate::net::{Kind, Net, Node, ValueId};

/// Multiple of channels that images in blocks have on all CPUs.
const BLOCK: i64 = 16;

/// Least number of channels per channel that is added.
const LEAST_PER_ADDED: i64 = 4;

/// Adds channels of zeros to images that depthwise convolutions of integers read or write, up to whole
/// blocks, if all operations around can have them: those that compute the images, and those that read them,
/// of which convolutions have weights of 0 for what was added.
pub(super) fn pad_channels(net: &mut Net) -> usize {
    if net.open_size.is_some() {
        return 0;
    }
    let (producers, readers) = (net.producers(), net.readers());
    let mut is_seen = vec![false; net.values.len()];
    let mut regions = Vec::new();
    for node in &net.nodes {
        let Some(n_channels) = odd_channels(net, node) else { continue };
        if is_seen[node.output().0] {
            continue;
        }
        let images = Images { net, n_channels, producers: &producers, readers: &readers };
        let region = images.around(node.output());
        is_seen[node.output().0] = true;
        if let Some(region) = region {
            region.iter().for_each(|id| is_seen[id.0] = true);
            regions.push((n_channels, region));
        }
    }
    regions.iter().for_each(|(n_channels, region)| pad(net, *n_channels, region));
    regions.len()
}

/// Number of channels of a depthwise convolution of integers, if blocks would be left with a few.
fn odd_channels(net: &Net, node: &Node) -> Option<i64> {
    let n_channels = net.shape(node.output()).get(1).copied()?;
    let added = in_blocks(n_channels) - n_channels;
    let is_odd = added > 0 && added * LEAST_PER_ADDED <= n_channels;
    (is_odd && is_depthwise(net, node) && net.value(node.input(1)).dtype == DType::I8).then_some(n_channels)
}

/// Number of channels in whole blocks.
fn in_blocks(n_channels: i64) -> i64 {
    (n_channels + BLOCK - 1) / BLOCK * BLOCK
}

fn is_depthwise(net: &Net, node: &Node) -> bool {
    let Kind::Conv(conv) = &node.kind else { return false };
    let n_channels = net.shape(node.output())[1];
    let is_plain = !conv.transposed && !conv.interleaved;
    is_plain && conv.groups == n_channels && net.shape(node.input(0))[1] == n_channels
}

fn is_dense(node: &Node) -> bool {
    matches!(&node.kind, Kind::Conv(conv) if conv.groups == 1 && !conv.transposed)
}

/// Images of a number of channels.
struct Images<'a> {
    net: &'a Net,
    n_channels: i64,
    producers: &'a [Option<usize>],
    readers: &'a [Vec<usize>],
}

impl Images<'_> {
    /// Images that must get channels together with one of them; `None` if one of these cannot.
    fn around(&self, first: ValueId) -> Option<BTreeSet<ValueId>> {
        let (mut found, mut left) = (BTreeSet::new(), vec![first]);
        while let Some(id) = left.pop() {
            if !found.insert(id) {
                continue;
            }
            let is_inner = !self.net.outputs.contains(&id) && self.is_image(id);
            let producer = &self.net.nodes[self.producers[id.0].filter(|_| is_inner)?];
            left.extend(self.beside(producer)?);
            for &reader in &self.readers[id.0] {
                let node = &self.net.nodes[reader];
                let is_end = is_dense(node) && node.input(0) == id && !node.inputs[1..].contains(&Some(id));
                if !is_end {
                    left.extend(self.beside(node)?);
                } else if self.net.value(node.input(1)).constant.is_none() {
                    return None;
                }
            }
        }
        Some(found)
    }

    fn is_image(&self, id: ValueId) -> bool {
        matches!(*self.net.shape(id), [_, c, _, _] if c == self.n_channels)
    }

    /// Images of a node that have the channels of its result; `None` if it cannot have more of them.
    fn beside(&self, node: &Node) -> Option<Vec<ValueId>> {
        let net = self.net;
        let is_constant = |id: ValueId| net.value(id).constant.is_some();
        let [.., output] = node.outputs[..] else { return None };
        let all = |inputs: &[ValueId]| inputs.iter().copied().chain([output]).collect::<Vec<_>>();
        let inputs: Vec<ValueId> = node.inputs.iter().copied().collect::<Option<_>>()?;
        let along = |id: ValueId| along(net, node, id, self.n_channels);
        let of_channels = |id: &ValueId| net.value(*id).n_elements() == 1 || along(*id).is_some();
        match &node.kind {
            Kind::Conv(_) => {
                let are_known = inputs[1..].iter().all(|id| is_constant(*id));
                let fits = inputs[2..].iter().all(of_channels) && (is_dense(node) || is_depthwise(net, node));
                let images = if is_dense(node) { vec![output] } else { all(&inputs[..1]) };
                (are_known && fits && self.is_image(output)).then_some(images)
            }
            Kind::Map(_) => {
                let (images, others): (Vec<ValueId>, Vec<ValueId>) =
                    inputs.iter().partition(|id| self.is_image(**id) && !is_constant(**id));
                let is_alike = |id: &ValueId| match along(*id) {
                    Some(_) => is_constant(*id),
                    None => self.is_broadcast(*id),
                };
                others.iter().all(is_alike).then(|| all(&images))
            }
            Kind::Window(_, windows) if windows.kernel[1] == 1 && windows.strides[1] == 1 => Some(all(&inputs)),
            Kind::Reduce(_, dims) if dims.iter().all(|d| *d >= 2) => Some(all(&inputs)),
            Kind::Gather { axis: 0, by_element: false } => {
                let is_table = net.shape(inputs[0]).len() == 1 && is_constant(inputs[0]);
                is_table.then(|| all(&inputs[1..]))
            }
            _ => None,
        }
    }

    /// Whether an operand of a map is the same for all channels.
    fn is_broadcast(&self, id: ValueId) -> bool {
        let shape = self.net.shape(id);
        shape.len().checked_sub(3).is_none_or(|at| shape[at] == 1)
    }
}

/// Dimension of the channels of a node's operand that has an element for each of them.
fn along(net: &Net, node: &Node, id: ValueId, n_channels: i64) -> Option<usize> {
    let shape = net.shape(id);
    let at = match (shape.len(), &node.kind) {
        (1, Kind::Conv(_)) => 0,
        (rank, _) => rank.checked_sub(3)?,
    };
    (shape[at] == n_channels && net.value(id).n_elements() == n_channels).then_some(at)
}

/// Adds channels to images, and to the constants of the nodes that compute and read them.
fn pad(net: &mut Net, n_channels: i64, region: &BTreeSet<ValueId>) {
    let n_padded = in_blocks(n_channels);
    let mut made = BTreeMap::new();
    for at in 0..net.nodes.len() {
        let node = net.nodes[at].clone();
        let is_of = |id: Option<ValueId>| id.is_some_and(|id| region.contains(&id));
        let (is_result, reads) = (is_of(node.outputs.first().copied()), is_of(node.inputs.first().copied().flatten()));
        let is_conv = matches!(node.kind, Kind::Conv(_));
        if !(is_result || is_conv && reads) {
            continue;
        }
        for slot in 0..node.inputs.len() {
            let id = node.input(slot);
            if net.value(id).constant.is_none() || matches!(node.kind, Kind::Gather { .. }) {
                continue;
            }
            let is_weights = is_conv && slot == 1;
            let mut sizes = net.shape(id).to_vec();
            if is_weights {
                sizes[0] = if is_result { n_padded } else { sizes[0] };
                sizes[1] = if reads && is_dense(&node) { n_padded } else { sizes[1] };
            } else if let (true, Some(dim)) = (is_result, along(net, &node, id, n_channels)) {
                sizes[dim] = n_padded;
            }
            if sizes != net.shape(id) {
                let new =
                    *made.entry((id, sizes)).or_insert_with_key(|(id, sizes)| padded(net, *id, sizes, !is_weights));
                net.nodes[at].inputs[slot] = Some(new);
            }
        }
        let is_depthwise = is_result && is_depthwise(net, &node);
        if let (Kind::Conv(conv), true) = (&mut net.nodes[at].kind, is_depthwise) {
            conv.groups = n_padded;
        }
    }
    region.iter().for_each(|id| net.values[id.0].shape[1] = n_padded);
}

/// Adds a constant of larger sizes, with zeros behind the elements of another one, or its last elements
/// repeated.
fn padded(net: &mut Net, id: ValueId, sizes: &[i64], repeats: bool) -> ValueId {
    let value = net.value(id).clone();
    let from = value.constant.as_ref().expect("invariant: only constants are padded");
    let width = from.bytes().len() / from.n_elements();
    let n = sizes.iter().product::<i64>() as usize;
    let mut bytes = vec![0; n * width];
    for (at, to) in bytes.chunks_mut(width).enumerate() {
        let (mut rest, mut place, mut stride, mut is_behind) = (at as i64, 0, 1, false);
        for (own, size) in value.shape.iter().zip(sizes).rev() {
            let index = rest % size;
            is_behind |= index >= *own;
            place += index.min(own - 1) * stride;
            (rest, stride) = (rest / size, stride * own);
        }
        if repeats || !is_behind {
            to.copy_from_slice(&from.bytes()[place as usize * width..][..width]);
        }
    }
    let new = net.add_value(&value.name, value.dtype, sizes);
    net.values[new.0].constant = Tensor::new(net.value(new).ty(), bytes.into());
    new
}
