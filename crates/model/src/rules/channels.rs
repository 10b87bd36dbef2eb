//! Channels and groups of channels in whole blocks, in networks of integers.

use std::collections::BTreeMap;

use tilewright_graph::{DType, Tensor};
use tilewright_ir::expr::ReduceOp;
use tilewright_ir::index::gcd;

use crate::net::{Kind, Net, Node, ValueId};

/// Multiple of channels that images in blocks have on all CPUs.
const BLOCK: i64 = 16;

/// Least number of channels per channel that is added, by what gains from it: dense convolutions, depthwise
/// ones, which gain more, and others in groups, which gain most.
const LEAST_PER_ADDED: [i64; 3] = [8, 4, 3];

/// Maximum number of groups of a convolution that are merged to one: of so many products one is of use, which
/// is still faster than integers without dot products.
const MOST_MERGED: i64 = 4;

/// Adds channels to images up to whole blocks, if all operations around can have them: those that compute the
/// images, and those that read them, of which convolutions have weights of 0 for what was added. These are
/// images around convolutions of integers, or around depthwise ones in networks of integers. Where
/// convolutions read channels twice, for weights of 9 bits, the second ones are among the added channels.
///
/// Added channels are copies of others, so that the least and the largest number of an image stay the same.
/// Groups are copied as a whole.
pub(super) fn pad_channels(net: &mut Net) -> usize {
    if net.open_size.is_some() {
        return 0;
    }
    let (producers, readers) = (net.producers(), net.readers());
    let mut is_seen = vec![false; net.values.len()];
    let mut regions = Vec::new();
    for node in &net.nodes {
        let Some(id) = seed(net, node) else { continue };
        let n_channels = net.shape(id)[1];
        if is_seen[id.0] {
            continue;
        }
        let images = Images { net, n_channels, producers: &producers, readers: &readers };
        is_seen[id.0] = true;
        if let Some(region) = images.around(id).and_then(|sizes| images.region(sizes)) {
            region.sizes.keys().for_each(|id| is_seen[id.0] = true);
            regions.push(region);
        }
    }
    regions.iter().for_each(|region| pad(net, region));
    if !regions.is_empty() {
        // Gathers through which nothing is read any more.
        net.prune();
    }
    regions.len()
}

/// Merges groups of convolutions of integers until the channels of a group are whole blocks, with weights of
/// 0 between the channels of different groups: what dot products multiply in vain costs less than integers
/// without them.
pub(super) fn merge_groups(net: &mut Net) -> usize {
    (0..net.nodes.len()).filter(|&at| merged_in_place(net, at).is_some()).count()
}

/// Number of groups that are merged to one, if groups of so many outputs and inputs are no whole blocks.
pub(crate) fn n_merged(outputs: i64, inputs: i64) -> Option<i64> {
    let fits = |n: &i64| [outputs, inputs].iter().all(|channels| n * channels % BLOCK == 0);
    (2..=MOST_MERGED).find(fits).filter(|_| inputs > 1 && !fits(&1))
}

/// Rewrites a convolution in groups to one in fewer groups.
fn merged_in_place(net: &mut Net, at: usize) -> Option<()> {
    let node = &net.nodes[at];
    let Kind::Conv(conv) = &node.kind else { return None };
    (has_integer_weights(net, node) && conv.groups > 1 && !conv.transposed && !conv.interleaved).then_some(())?;
    let value = net.value(node.input(1)).clone();
    let weights = value.constant.as_ref()?;
    let [n_outputs, inputs, ..] = value.shape[..] else { return None };
    let outputs = n_outputs / conv.groups;
    let n = n_merged(outputs, inputs).filter(|n| conv.groups % n == 0)?;
    let area: i64 = value.shape[2..].iter().product();
    let filter = (inputs * area) as usize;
    let mut bytes = vec![0; weights.bytes().len() * n as usize];
    for (k, of_filter) in weights.bytes().chunks(filter).enumerate() {
        let place = (k * n as usize + k / outputs as usize % n as usize) * filter;
        bytes[place..][..filter].copy_from_slice(of_filter);
    }
    let mut shape = value.shape.clone();
    shape[1] *= n;
    let new = net.add_bytes(&value.name, value.dtype, &shape, bytes);
    let node = &mut net.nodes[at];
    node.inputs[1] = Some(new);
    let Kind::Conv(conv) = &mut node.kind else { return None };
    conv.groups /= n;
    Some(())
}

/// Image from which a region of images to pad may begin: the result of a convolution of integers or of a
/// depthwise one, or the operand of a gather of channels.
fn seed(net: &Net, node: &Node) -> Option<ValueId> {
    if net.shape(node.output()).len() != 4 {
        return None;
    }
    match &node.kind {
        Kind::Conv(_) => (has_integer_weights(net, node) || is_depthwise(net, node)).then(|| node.output()),
        _ => gathered_channels(net, node).map(|_| node.input(0)),
    }
}

/// Channels that a gather with constant places takes from an image.
fn gathered_channels(net: &Net, node: &Node) -> Option<Vec<usize>> {
    let Kind::Gather { axis: 1, by_element: false } = node.kind else { return None };
    let places = net.value(node.input(1)).constant.as_ref()?;
    let n_channels = *net.shape(node.input(0)).get(1)?;
    (net.shape(node.input(0)).len() == 4 && places.shape().len() == 1).then_some(())?;
    places.i64s().into_iter().map(|at| (0..n_channels).contains(&at).then_some(at as usize)).collect()
}

/// Number of channels of which a convolution in groups takes multiples, besides blocks: a group, or as many
/// as are merged.
fn multiple_of_groups(net: &Net, node: &Node) -> i64 {
    let width = group_width(net, node).unwrap_or(1);
    let n = n_merged(width, width).filter(|_| has_integer_weights(net, node));
    width * n.unwrap_or(1)
}

/// Whether an operand holds weights of integers.
fn has_integer_weights(net: &Net, node: &Node) -> bool {
    matches!(node.kind, Kind::Conv(_)) && net.value(node.input(1)).dtype == DType::I8
}

/// Channels of a group of a convolution whose groups have as many outputs as inputs: 1 if it is depthwise.
fn group_width(net: &Net, node: &Node) -> Option<i64> {
    let Kind::Conv(conv) = &node.kind else { return None };
    let n_channels = net.shape(node.output())[1];
    let is_plain = !conv.transposed && !conv.interleaved && conv.groups > 1;
    (is_plain && net.shape(node.input(0))[1] == n_channels).then(|| n_channels / conv.groups)
}

fn is_depthwise(net: &Net, node: &Node) -> bool {
    group_width(net, node) == Some(1)
}

/// Gain of a convolution from images in blocks, as a place in [`LEAST_PER_ADDED`].
fn gain(net: &Net, node: &Node) -> usize {
    match group_width(net, node) {
        Some(1) => 1,
        Some(_) if has_integer_weights(net, node) => 2,
        _ => 0,
    }
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

/// Values that get channels together.
struct Region {
    n_channels: i64,
    /// Dimension of the channels of each value, and the number of its elements per channel there.
    sizes: BTreeMap<ValueId, (usize, i64)>,
    /// Channel that each channel is equal to, the added ones included.
    sources: Vec<usize>,
    through: Through,
}

/// Convolutions that read channels of an image through a gather: the image, and for each of its channels the
/// one of the gather; `None` for those that they do not read.
type Through = BTreeMap<usize, (ValueId, Vec<Option<usize>>)>;

impl Images<'_> {
    /// Values that must get channels together with one of them, as [`Region::sizes`]; `None` if one of these
    /// cannot.
    fn around(&self, first: ValueId) -> Option<BTreeMap<ValueId, (usize, i64)>> {
        let (mut found, mut left) = (BTreeMap::new(), vec![first]);
        while let Some(id) = left.pop() {
            if found.contains_key(&id) {
                continue;
            }
            let dim = if self.is_image(id) { 1 } else { self.channels_of_vector(id)? };
            found.insert(id, (dim, 1));
            let is_inner = !self.net.outputs.contains(&id) && self.net.value(id).constant.is_none();
            let producer = &self.net.nodes[self.producers[id.0].filter(|_| is_inner)?];
            left.extend(self.beside(producer)?);
            for &reader in &self.readers[id.0] {
                let node = &self.net.nodes[reader];
                if let Some(list) = self.list_of_extremes(node) {
                    found.insert(list, (0, self.net.value(list).n_elements() / self.n_channels));
                } else if !self.is_end(id, node)? {
                    left.extend(self.beside(node)?);
                }
            }
        }
        Some(found)
    }

    /// Whether a reader of an image takes added channels without having them in its result; `None` if it
    /// would have to, but cannot.
    fn is_end(&self, id: ValueId, node: &Node) -> Option<bool> {
        let is_first = node.input(0) == id && !node.inputs[1..].contains(&Some(id));
        match &node.kind {
            Kind::Conv(_) if is_dense(node) && is_first => {
                self.net.value(node.input(1)).constant.is_some().then_some(true)
            }
            Kind::Reduce(op, dims) if dims.contains(&1) => is_extreme(*op).then_some(true),
            _ => Some(is_first && gathered_channels(self.net, node).is_some()),
        }
    }

    /// All elements of an image as a list, if only their least or largest is read.
    fn list_of_extremes(&self, node: &Node) -> Option<ValueId> {
        let list = node.output();
        let is_list = matches!(node.kind, Kind::View) && *self.net.shape(list) == [self.net.value(list).n_elements()];
        let mut users = self.readers[list.0].iter().map(|&at| &self.net.nodes[at].kind);
        let are_extremes = users.all(|kind| matches!(kind, Kind::Reduce(op, _) if is_extreme(*op)));
        (is_list && self.is_image(node.input(0)) && are_extremes && !self.net.outputs.contains(&list)).then_some(list)
    }

    /// Dimension of the channels of a computed value with a number for each.
    fn channels_of_vector(&self, id: ValueId) -> Option<usize> {
        let at = self.net.shape(id).iter().position(|d| *d == self.n_channels)?;
        (self.net.value(id).n_elements() == self.n_channels).then_some(at)
    }

    /// Region of images, with the channels to add; `None` if there is nothing to gain.
    fn region(&self, sizes: BTreeMap<ValueId, (usize, i64)>) -> Option<Region> {
        let net = self.net;
        let readers: Vec<usize> = sizes.keys().flat_map(|id| &self.readers[id.0]).copied().collect();
        let own: Vec<usize> = (0..self.n_channels as usize).collect();
        let gathers = readers.iter().filter_map(|&at| Some((at, gathered_channels(net, &net.nodes[at])?))).collect();
        let producers = sizes.keys().filter_map(|id| self.producers[id.0]);
        let mut around: Vec<&Node> = producers.chain(readers).map(|at| &net.nodes[at]).collect();
        let convs = around.iter().filter(|node| matches!(node.kind, Kind::Conv(_)) && self.is_image(node.output()));
        let unit = convs.clone().fold(BLOCK, |unit, node| {
            let own = multiple_of_groups(net, node);
            unit / gcd(unit, own) * own
        });
        let least = LEAST_PER_ADDED[convs.clone().map(|node| gain(net, node)).max().unwrap_or(0)];
        // Channels that are read twice are no whole groups.
        let has_groups = convs.clone().any(|node| group_width(net, node).is_some_and(|width| width > 1));
        let all_through = self.all_through(&gathers, &own).filter(|(_, through)| !has_groups && !through.is_empty());
        let padded_through = all_through.and_then(|(sources, through)| {
            Some((self.padded(sources.len(), unit, LEAST_PER_ADDED[1])?, sources, through))
        });
        let (n_padded, mut sources, mut through) = match padded_through {
            Some(padded) => padded,
            None => (self.padded(own.len(), unit, least)?, own, Through::new()),
        };
        around.extend(through.keys().map(|at| &net.nodes[*at]));
        around.iter().any(|node| has_integer_weights(net, node)).then_some(())?;
        // The last groups as a whole, in order.
        let n_own = self.n_channels as usize;
        sources.extend(n_own - (n_padded - sources.len())..n_own);
        through.values_mut().for_each(|(_, from)| from.resize(n_padded, None));
        Some(Region { n_channels: self.n_channels, sizes, sources, through })
    }

    /// Number of channels of images with this many of use, made a multiple of another number; `None` if there
    /// are too few channels per channel that is added.
    fn padded(&self, n_channels: usize, multiple: i64, least_per_added: i64) -> Option<usize> {
        let padded = n_channels.next_multiple_of(multiple as usize);
        let added = padded as i64 - self.n_channels;
        (added > 0 && added * least_per_added <= self.n_channels).then_some(padded)
    }

    /// Channels of the images with those that are read again through gathers, as [`Region::sources`], and the
    /// convolutions that do, as [`Region::through`]; `None` if a gather has other readers.
    fn all_through(&self, gathers: &BTreeMap<usize, Vec<usize>>, own: &[usize]) -> Option<(Vec<usize>, Through)> {
        let (mut sources, mut through) = (own.to_vec(), BTreeMap::new());
        for (&at, places) in gathers {
            let [image, gathered] = [self.net.nodes[at].input(0), self.net.nodes[at].output()];
            (!self.net.outputs.contains(&gathered)).then_some(())?;
            for &reader in &self.readers[gathered.0] {
                through.insert(reader, (image, self.read_through(places, gathered, reader, &mut sources)?));
            }
        }
        Some((sources, through))
    }

    /// Column of the weights of a convolution that reads gathered channels for each channel of the image, to
    /// which copies of those that it reads again are added; `None` if the reader is no such convolution.
    fn read_through(
        &self,
        places: &[usize],
        gathered: ValueId,
        reader: usize,
        sources: &mut Vec<usize>,
    ) -> Option<Vec<Option<usize>>> {
        let node = &self.net.nodes[reader];
        let is_first = node.input(0) == gathered && !node.inputs[1..].contains(&Some(gathered));
        (is_dense(node) && is_first).then_some(())?;
        let weights = self.net.value(node.input(1)).constant.as_ref()?;
        let is_read = columns_in_use(weights);
        let mut from = vec![None; sources.len()];
        for (column, &place) in places.iter().enumerate().filter(|(column, _)| is_read[*column]) {
            let is_free = |at: &usize| sources[*at] == place && from[*at].is_none();
            let at = (0..sources.len()).find(is_free).unwrap_or_else(|| {
                sources.push(place);
                sources.len() - 1
            });
            from.resize(sources.len(), None);
            from[at] = Some(column);
        }
        Some(from)
    }

    fn is_image(&self, id: ValueId) -> bool {
        matches!(*self.net.shape(id), [_, c, _, _] if c == self.n_channels)
    }

    /// Values of a node that have the channels of its result; `None` if it cannot have more of them.
    fn beside(&self, node: &Node) -> Option<Vec<ValueId>> {
        let net = self.net;
        let is_constant = |id: ValueId| net.value(id).constant.is_some();
        let [.., output] = node.outputs[..] else { return None };
        let all = |inputs: &[ValueId]| inputs.iter().copied().chain([output]).collect::<Vec<_>>();
        let inputs: Vec<ValueId> = node.inputs.iter().copied().collect::<Option<_>>()?;
        let along = |id: ValueId| along(net, node, id, self.n_channels);
        let of_channels = |id: &ValueId| net.value(*id).n_elements() == 1 || along(*id).is_some();
        let is_computed = |id: &ValueId| along(*id).is_some() && !is_constant(*id);
        match &node.kind {
            Kind::Conv(_) => {
                let fits = inputs[2..].iter().all(of_channels) && (is_dense(node) || group_width(net, node).is_some());
                let mut images: Vec<ValueId> = inputs[2..].iter().copied().filter(is_computed).collect();
                images.extend((!is_dense(node)).then_some(inputs[0]));
                (is_constant(inputs[1]) && fits && self.is_image(output)).then(|| all(&images))
            }
            Kind::Map(_) if self.is_image(output) => {
                let (mut images, others): (Vec<ValueId>, Vec<ValueId>) =
                    inputs.iter().partition(|id| self.is_image(**id) && !is_constant(**id));
                images.extend(others.iter().copied().filter(is_computed));
                others.iter().all(|id| along(*id).is_some() || self.is_broadcast(*id)).then(|| all(&images))
            }
            Kind::Map(_) => {
                let vectors: Vec<ValueId> = inputs.iter().copied().filter(is_computed).collect();
                inputs.iter().all(of_channels).then(|| all(&vectors))
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

/// Whether a reduction finds the least or the largest element.
fn is_extreme(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Min | ReduceOp::Max)
}

/// Whether each input channel of constant weights `[outputs, inputs, …]` has one that is not 0.
fn columns_in_use(weights: &Tensor) -> Vec<bool> {
    let (numbers, n_columns) = (weights.floats(), weights.shape()[1]);
    let area: usize = weights.shape()[2..].iter().product();
    let mut is_read = vec![false; n_columns];
    numbers.iter().enumerate().for_each(|(at, x)| is_read[at / area % n_columns] |= *x != 0.0);
    is_read
}

/// Dimension of the channels of a node's operand that has an element for each of them.
fn along(net: &Net, node: &Node, id: ValueId, n_channels: i64) -> Option<usize> {
    let (shape, rank) = (net.shape(id), net.shape(node.output()).len());
    let at = match (shape.len(), &node.kind) {
        (1, Kind::Conv(_)) => 0,
        // A map of vectors, in which the channels are the last of as many dimensions as the result has.
        (own, Kind::Map(_)) if rank != 4 => {
            let of_result = net.shape(node.output()).iter().position(|d| *d == n_channels)?;
            (of_result + own).checked_sub(rank)?
        }
        (own, _) => own.checked_sub(3)?,
    };
    (shape.get(at) == Some(&n_channels) && net.value(id).n_elements() == n_channels).then_some(at)
}

/// Adds channels to images, and to the constants of the nodes that compute and read them.
fn pad(net: &mut Net, region: &Region) {
    let Region { n_channels, sizes, sources, through } = region;
    let copies: Vec<Option<usize>> = sources.iter().copied().map(Some).collect();
    let own: Vec<Option<usize>> = (0..sources.len()).map(|at| (at < *n_channels as usize).then_some(at)).collect();
    let mut made = BTreeMap::new();
    for at in 0..net.nodes.len() {
        let node = net.nodes[at].clone();
        let is_of = |id: Option<ValueId>| id.is_some_and(|id| sizes.contains_key(&id));
        let is_result = is_of(node.outputs.first().copied());
        let is_conv = matches!(node.kind, Kind::Conv(_));
        let reads = is_conv && is_dense(&node) && is_of(node.inputs.first().copied().flatten());
        let is_moved = matches!(node.kind, Kind::View | Kind::Gather { .. });
        if is_moved || !(is_result || reads || through.contains_key(&at)) {
            continue;
        }
        for slot in 0..node.inputs.len() {
            let mut id = node.input(slot);
            if net.value(id).constant.is_none() {
                continue;
            }
            let mut taken = |net: &mut Net, id: ValueId, dim: usize, from: &[Option<usize>]| {
                *made.entry((id, dim, from.to_vec())).or_insert_with(|| with_channels(net, id, dim, from))
            };
            match is_conv && slot == 1 {
                true => {
                    if let Some((_, from)) = through.get(&at) {
                        id = taken(net, id, 1, from);
                    } else if reads {
                        id = taken(net, id, 1, &own);
                    }
                    if is_result {
                        id = taken(net, id, 0, &copies);
                    }
                }
                false => {
                    if let (true, Some(dim)) = (is_result, along(net, &node, id, *n_channels)) {
                        id = taken(net, id, dim, &copies);
                    }
                }
            }
            net.nodes[at].inputs[slot] = Some(id);
        }
        if let Some((image, _)) = through.get(&at) {
            net.nodes[at].inputs[0] = Some(*image);
        }
        let width = group_width(net, &node).filter(|_| is_result);
        if let (Kind::Conv(conv), Some(width)) = (&mut net.nodes[at].kind, width) {
            conv.groups = sources.len() as i64 / width;
        }
    }
    sizes.iter().for_each(|(id, (dim, each))| net.values[id.0].shape[*dim] = sources.len() as i64 * each);
}

/// Adds a constant whose elements along a dimension are those of another one at these places, or zeros.
fn with_channels(net: &mut Net, id: ValueId, dim: usize, from: &[Option<usize>]) -> ValueId {
    let value = net.value(id).clone();
    let tensor = value.constant.as_ref().expect("invariant: only constants get channels");
    let mut shape = value.shape.clone();
    let inside = shape[dim + 1..].iter().product::<i64>() as usize * (tensor.bytes().len() / tensor.n_elements());
    let own = shape[dim] as usize;
    shape[dim] = from.len() as i64;
    let mut bytes = Vec::with_capacity(tensor.bytes().len() / own * from.len());
    for outer in tensor.bytes().chunks(own * inside) {
        for place in from {
            match place {
                Some(place) => bytes.extend_from_slice(&outer[place * inside..][..inside]),
                None => bytes.resize(bytes.len() + inside, 0),
            }
        }
    }
    net.add_bytes(&value.name, value.dtype, &shape, bytes)
}
