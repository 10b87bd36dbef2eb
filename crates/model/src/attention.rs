//! Attention in blocks: scores of a few heads, or of some of the rows of one, are computed, normalized and
//! multiplied before the next ones, so that they stay in the level 2 cache instead of going through memory.

use tilewright_ir::Target;
use tilewright_ir::op::Heads;

use crate::net::{AsHeads, Kind, Net, Node, Read, Sequence, Track, Value, ValueId};

/// Fewest rows of scores in a block, as products of fewer are slow.
const FEWEST_ROWS: i64 = 128;

/// Two products of heads, and what is computed between them from each row of scores.
struct Attention {
    /// Node of the scores: queries times keys.
    scores: usize,
    /// Nodes between the products, in order.
    between: Vec<usize>,
    /// Node of the result: weights times values.
    result: usize,
    /// Sizes of the scores: heads, rows and columns.
    sizes: [i64; 3],
}

/// Division of the scores of all heads into blocks. Blocks of the rows of one head overlap if the number of
/// rows is no multiple; rows that two have in common are computed twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    /// Heads and rows of a block.
    heads: i64,
    rows: i64,
    /// Number of blocks over the rows, and the distance between the first rows of consecutive ones.
    n: i64,
    apart: i64,
}

impl Blocks {
    /// Blocks that take a cache of `l2_bytes`; `None` if all scores fit it. A block is contiguous: of several
    /// heads, or of the rows of one.
    fn of([heads, rows, columns]: [i64; 3], l2_bytes: i64) -> Option<Blocks> {
        let of_head = rows * columns * 4;
        if heads * of_head <= l2_bytes {
            return None;
        }
        if of_head <= l2_bytes {
            let heads = Blocks::heads([heads, rows, columns], l2_bytes)?;
            return Some(Blocks { heads, rows, n: 1, apart: rows });
        }
        let n = (of_head / l2_bytes + 1).min(rows / FEWEST_ROWS);
        // The distances between all blocks are equal.
        let fits = |own: &i64| n > 1 && own * n >= rows && (rows - own) % (n - 1) == 0;
        let own = (rows / n.max(1)..rows).find(fits)?;
        Some(Blocks { heads: 1, rows: own, n, apart: (rows - own) / (n - 1) })
    }

    /// Number of heads in a block of whole heads: as many as fit a cache of `l2_bytes`, or one that does not;
    /// `None` if there are no fewer than all.
    fn heads([heads, rows, columns]: [i64; 3], l2_bytes: i64) -> Option<i64> {
        let fits = |n: &i64| heads % n == 0 && (*n == 1 || n * rows * columns * 4 <= l2_bytes);
        (1..heads).rev().find(fits)
    }

    /// Position of the part of each block in a tensor: where the first one begins, and the distances between
    /// consecutive rows and heads.
    fn track(&self, first: i64, [of_row, of_head]: [i64; 2]) -> Track {
        Track { first, by: self.apart * of_row, round: self.n, next: self.heads * of_head }
    }
}

/// Level 2 caches that scores should fit, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Level2 {
    /// Cache of one core.
    of_core: i64,
    /// Caches of as many cores as a run has threads.
    of_all: i64,
}

impl Level2 {
    pub(crate) fn new(target: &Target, threads: usize) -> Level2 {
        let of_core = target.l2_bytes as i64;
        Level2 { of_core, of_all: of_core * threads as i64 }
    }
}

/// Divides the attention of a net wherever the scores exceed the level 2 caches of as many cores as a run has
/// threads: into that of each sequence of a batch, and into blocks that fit that of one core, as threads take
/// over scores from each other. Returns the number of places.
pub(crate) fn divide_attention(net: &mut Net, l2: Level2) -> usize {
    let (mut at, mut n_divided) = (0, part_sequences(net, l2.of_all));
    while at < net.nodes.len() {
        let found = attention(net, at, l2.of_all).and_then(|found| {
            let blocks = Blocks::of(found.sizes, l2.of_core)?;
            Some((divided(net, &found, blocks)?, found))
        });
        match found {
            Some((new, found)) => {
                replace(net, &found, new);
                n_divided += 1;
            }
            None => at += 1,
        }
    }
    n_divided
}

/// Divides the attention of a model lowered at several sizes of its open dimension, the largest last, in the
/// same way in each net: into blocks of whole heads, as the rows of a head have another number at each size.
/// Returns the number of places.
pub(crate) fn divide_heads(nets: &mut [Net], l2: Level2) -> usize {
    let (mut at, mut n_divided) = (0, 0);
    while at < nets.last().map_or(0, |whole| whole.nodes.len()) {
        let of_net = |net: &Net| (at < net.nodes.len()).then(|| attention(net, at, 0)).flatten();
        let blocks = nets.last().and_then(|whole| attention(whole, at, l2.of_all)).map(|found| found.sizes);
        let heads = blocks.and_then(|sizes| Blocks::heads(sizes, l2.of_core));
        let found: Option<Vec<Attention>> = heads.and_then(|_| nets.iter().map(of_net).collect());
        let made = heads.zip(found).and_then(|(heads, found)| {
            let of_net = |(net, found): (&mut Net, &Attention)| {
                let [n_heads, rows, _] = found.sizes;
                let blocks = Blocks { heads, rows, n: 1, apart: rows };
                (n_heads % heads == 0).then(|| divided(net, found, blocks)).flatten()
            };
            let new = nets.iter_mut().zip(&found).map(of_net).collect::<Option<Vec<_>>>()?;
            Some((new, found))
        });
        match made {
            Some((new, found)) => {
                nets.iter_mut().zip(&found).zip(new).for_each(|((net, found), new)| replace(net, found, new));
                n_divided += 1;
            }
            None => at += 1,
        }
    }
    n_divided
}

/// Replaces the nodes of attention by others.
fn replace(net: &mut Net, found: &Attention, mut new: Vec<Node>) {
    for (at, node) in std::mem::take(&mut net.nodes).into_iter().enumerate() {
        match at {
            at if at == found.result => net.nodes.append(&mut new),
            at if at == found.scores || found.between.contains(&at) => {}
            _ => net.nodes.push(node),
        }
    }
}

/// Nodes between the concatenated scores of several sequences and the products of each sequence's weights.
struct Together {
    /// Node that concatenates the scores, and the nodes behind it, in order.
    concat: usize,
    between: Vec<usize>,
    /// Products of the weights, each with its sequence.
    products: Vec<(usize, i64)>,
}

/// Computes the attention of one sequence of a batch after the other, rather than the scores of all, then all
/// weights, wherever the scores of all exceed a cache of `l2_bytes`; returns the number of places.
fn part_sequences(net: &mut Net, l2_bytes: i64) -> usize {
    let mut n_parted = 0;
    let mut at = 0;
    while at < net.nodes.len() {
        let exceeds = |found: &Together| 4 * net.value(net.nodes[found.concat].output()).n_elements() > l2_bytes;
        let found = together(net, at).filter(exceeds);
        if let Some(found) = found {
            n_parted += usize::from(part(net, &found).is_some());
        }
        at += 1;
    }
    n_parted
}

/// Scores of several sequences that a node concatenates, if all that is computed of them is computed of each.
fn together(net: &Net, concat: usize) -> Option<Together> {
    let node = &net.nodes[concat];
    let n = node.inputs.len() as i64;
    let mut parts: Vec<ValueId> = node.inputs.iter().flatten().copied().collect();
    let are_alike = parts.iter().all(|part| net.shape(*part) == net.shape(parts[0]));
    parts.sort_unstable();
    parts.dedup();
    if !matches!(node.kind, Kind::Concat(0)) || n < 2 || parts.len() as i64 != n || !are_alike {
        return None;
    }
    let mut products = Vec::new();
    let between = followed(net, &net.users(), node.output(), |id, reader| {
        let node = &net.nodes[reader];
        let [from, to] = [id, node.output()].map(|id| net.shape(id));
        let is_along = from.len() == to.len() && from[0] == to[0];
        let is_divisible = from.first().is_some_and(|first| first % n == 0);
        match &node.kind {
            _ if !is_divisible => None,
            Kind::Product { .. } => {
                products.push((reader, sequence_of(node, id, n)?));
                Some(false)
            }
            Kind::View => Some(true),
            Kind::Map(_) if is_along => Some(true),
            Kind::Reduce(_, axes) if is_along && !axes.contains(&0) => Some(true),
            _ => None,
        }
    })?;
    (!between.is_empty() && !products.is_empty()).then_some(Together { concat, between, products })
}

/// Nodes that compute from a value, in order: those whose results are followed, as a function says of each
/// value and reader. `None` if it refuses one, or if a value is kept or unread.
fn followed(
    net: &Net,
    readers: &[Vec<usize>],
    from: ValueId,
    mut follows: impl FnMut(ValueId, usize) -> Option<bool>,
) -> Option<Vec<usize>> {
    let (mut between, mut inside, mut at) = (Vec::new(), vec![from], 0);
    while let Some(&id) = inside.get(at) {
        at += 1;
        if net.is_kept(id) || readers[id.0].is_empty() {
            return None;
        }
        for &reader in &readers[id.0] {
            if follows(id, reader)? && !between.contains(&reader) {
                between.push(reader);
                inside.push(net.nodes[reader].output());
            }
        }
    }
    between.sort_unstable();
    Some(between)
}

/// Sequence whose weights a product reads among those of all `n`.
fn sequence_of(node: &Node, weights: ValueId, n: i64) -> Option<i64> {
    let Kind::Product { heads: Some(AsHeads { b, of_a, .. }), .. } = node.kind else { return None };
    let is_part = !of_a.beside && of_a.before % b == 0 && of_a.before + b + of_a.after == n * b;
    (is_part && node.input(0) == weights && node.input(1) != weights).then(|| of_a.before / b)
}

/// Replaces what is computed of all sequences together by nodes for each, in the order of the sequences.
fn part(net: &mut Net, found: &Together) -> Option<()> {
    let scores = net.nodes[found.concat].inputs.clone();
    let (whole, n) = (net.nodes[found.concat].output(), scores.len() as i64);
    let producers = net.producers();
    let mut moved = found.between.clone();
    moved.push(found.concat);
    moved.extend(found.products.iter().map(|(at, _)| at));
    let mut new: Vec<Node> = Vec::new();
    for (sequence, part) in (0..).zip(scores) {
        // The scores, each of which is a view of a product's result.
        let view = producers[part?.0]?;
        let product = producers[net.nodes[view].inputs.first().copied()??.0]?;
        let is_scores = matches!((&net.nodes[view].kind, &net.nodes[product].kind), (Kind::View, Kind::Product { .. }));
        if !is_scores || moved.contains(&product) {
            return None;
        }
        new.extend([product, view].map(|at| net.nodes[at].clone()));
        moved.extend([product, view]);
        let mut own = vec![(whole, part?)];
        let known = |own: &[(ValueId, ValueId)], id| own.iter().find(|(of, _)| *of == id).map(|(_, own)| *own);
        for &at in &found.between {
            let node = net.nodes[at].clone();
            let Value { name, dtype, mut shape, .. } = net.value(node.output()).clone();
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for &id in node.inputs.iter().flatten() {
                let part = known(&own, id);
                inputs.push(Some(part.unwrap_or_else(|| of_sequence(net, id, (&shape, n), sequence, &mut new))));
            }
            shape[0] /= n;
            let output = net.add_value(&name, dtype, &shape);
            own.push((node.output(), output));
            new.push(Node { inputs, outputs: vec![output], ..node });
        }
        for (at, _) in found.products.iter().filter(|(_, of)| *of == sequence) {
            let mut node = net.nodes[*at].clone();
            node.inputs[0] = Some(known(&own, node.input(0))?);
            if let Kind::Product { heads: Some(heads), .. } = &mut node.kind {
                heads.of_a = Heads::default();
            }
            new.push(node);
        }
    }
    let first = moved.iter().copied().min()?;
    for (at, node) in std::mem::take(&mut net.nodes).into_iter().enumerate() {
        if at == first {
            net.nodes.append(&mut new);
        }
        if !moved.contains(&at) {
            net.nodes.push(node);
        }
    }
    net.sort();
    Some(())
}

/// Part of a value, which is broadcast to a shape of `n` sequences, that belongs to one.
fn of_sequence(net: &mut Net, id: ValueId, to: (&[i64], i64), sequence: i64, new: &mut Vec<Node>) -> ValueId {
    let Value { name, dtype, mut shape, .. } = net.value(id).clone();
    if shape.len() < to.0.len() || shape[0] == 1 {
        return id;
    }
    shape[0] /= to.1;
    let own = net.add_value(&name, dtype, &shape);
    let parts = (0..shape.len()).map(|d| (if d == 0 { sequence * shape[0] } else { 0 }, 1)).collect();
    new.push(Node { kind: Kind::Slice(parts), inputs: vec![Some(id)], outputs: vec![own], origin: name });
    own
}

/// Attention whose scores a node computes, if they exceed a cache of `l2_bytes`.
fn attention(net: &Net, scores: usize, l2_bytes: i64) -> Option<Attention> {
    let node = &net.nodes[scores];
    let Kind::Product { heads, .. } = node.kind else { return None };
    let sizes = last_three(net.shape(node.output()))?;
    let exceeds = 4 * sizes.iter().product::<i64>() > l2_bytes;
    if !exceeds || heads.is_some_and(|heads| heads.beside) {
        return None;
    }
    let mut result = None;
    let between = followed(net, &net.users(), node.output(), |id, reader| {
        let node = &net.nodes[reader];
        match &node.kind {
            Kind::Product { heads, .. } => {
                let of_a = heads.map_or(Heads::default(), |heads| heads.of_a);
                let is_plain = of_a == Heads::default() && last_three(net.shape(id)) == Some(sizes);
                let is_first = node.input(0) == id && node.input(1) != id;
                let is_it = is_plain && is_first && result.is_none_or(|known| known == reader);
                result = Some(reader);
                is_it.then_some(false)
            }
            Kind::Map(_) | Kind::View | Kind::Reduce(..) if is_of_rows(net, node, sizes) => Some(true),
            _ => None,
        }
    })?;
    let result = result.filter(|_| !between.is_empty())?;
    let is_f32 = |at: usize| net.nodes[at].inputs.iter().flatten().all(|id| is_f32(net.value(*id)));
    (is_f32(scores) && is_f32(result)).then_some(Attention { scores, between, result, sizes })
}

fn is_f32(value: &Value) -> bool {
    value.dtype == tilewright_graph::DType::F32
}

/// Whether a node computes each row of its result from the same row of the scores.
fn is_of_rows(net: &Net, node: &Node, sizes: [i64; 3]) -> bool {
    let shape = net.shape(node.output());
    let reduces_rows = match &node.kind {
        Kind::Reduce(_, axes) => axes[..] == [net.shape(node.input(0)).len() - 1],
        _ => true,
    };
    // Rows of all heads may be one dimension.
    let has_rows = |[heads, rows, columns]: [i64; 3]| {
        let [n_heads, of_head, n_columns] = sizes;
        [[n_heads, of_head], [1, n_heads * of_head]].contains(&[heads, rows]) && [1, n_columns].contains(&columns)
    };
    let is_view_of_rows = !matches!(node.kind, Kind::View) || net.shape(node.input(0)).last() == shape.last();
    reduces_rows && is_view_of_rows && last_three(shape).is_some_and(has_rows)
}

/// Last three dimensions of a shape whose other dimensions are 1, or all behind dimensions of 1.
fn last_three(shape: &[i64]) -> Option<[i64; 3]> {
    let (ahead, last) = shape.split_at(shape.len().saturating_sub(3));
    let mut three = [1; 3];
    three[3 - last.len()..].copy_from_slice(last);
    ahead.iter().all(|n| *n == 1).then_some(three)
}

/// Whether there may be unused memory behind a value: it is not in the memory of an input, an output, a state
/// or a concatenation.
fn may_be_longer(net: &Net, id: ValueId) -> bool {
    let (producers, readers) = (net.producers(), net.users());
    let producer = |id: ValueId| producers[id.0].map(|at| &net.nodes[at]);
    let mut root = id;
    while let Some(node) = producer(root).filter(|node| matches!(node.kind, Kind::View | Kind::Slice(_))) {
        root = node.input(0);
    }
    if !producer(root).is_some_and(|node| matches!(node.kind, Kind::Map(_) | Kind::Conv(_) | Kind::Product { .. })) {
        return false;
    }
    let mut parts = vec![root];
    let mut at = 0;
    while let Some(&id) = parts.get(at) {
        at += 1;
        if net.is_kept(id) {
            return false;
        }
        for node in readers[id.0].iter().map(|at| &net.nodes[*at]) {
            match node.kind {
                Kind::View | Kind::Slice(_) => parts.push(node.output()),
                Kind::Concat(_) | Kind::Append(_) | Kind::Loop(_) | Kind::Call(_) | Kind::Host(_) => return false,
                _ => {}
            }
        }
    }
    true
}

/// Body of a sequence while it is made, with what each block reads.
struct Body<'a> {
    net: &'a Net,
    blocks: Blocks,
    sizes: [i64; 3],
    body: Net,
    /// Values of the body by those of the net.
    own: Vec<(ValueId, ValueId)>,
    inputs: Vec<Option<ValueId>>,
    reads: Vec<Read>,
    constants: Vec<(ValueId, ValueId)>,
}

/// Nodes that compute attention in blocks.
fn divided(net: &mut Net, found: &Attention, blocks: Blocks) -> Option<Vec<Node>> {
    let [n_heads, rows, _] = found.sizes;
    let (scores, result) = (&net.nodes[found.scores], &net.nodes[found.result]);
    let (of_scores, of_result) = (product(scores), product(result));
    let mut job = Body {
        net: &*net,
        blocks,
        sizes: found.sizes,
        body: Net::default(),
        own: Vec::new(),
        inputs: Vec::new(),
        reads: Vec::new(),
        constants: Vec::new(),
    };
    let columns = *net.shape(result.output()).last()?;
    let (queries, of_a) = job.factor(scores.input(0), of_scores.1.of_a, true)?;
    let (keys, of_b) = job.factor(scores.input(1), of_scores.1.of_b, false)?;
    job.product(scores, of_scores.0, [queries, keys], [of_a, of_b], found.sizes[2]);
    for &at in &found.between {
        job.rows(&net.nodes[at])?;
    }
    let weights = job.known(result.input(0))?;
    let (values, of_b) = job.factor(result.input(1), of_result.1.of_b, false)?;
    let made = job.product(result, of_result.0, [weights, values], [Heads::default(), of_b], columns);
    let Body { mut body, inputs, reads, constants, .. } = job;
    body.outputs = vec![made];
    let writes = vec![(0, blocks.track(0, [columns, rows * columns]))];
    let n_steps = n_heads / blocks.heads * blocks.n;
    let sequence = Sequence { n_steps, body, reads, writes, constants };
    let (origin, to) = (result.origin.clone(), result.output());
    let Value { name, dtype, .. } = net.value(to).clone();
    let is_beside = of_result.1.beside;
    let whole = if is_beside { net.add_value(&name, dtype, &[n_heads, rows, columns]) } else { to };
    let kind = Kind::Sequence(Box::new(sequence));
    let mut new = vec![Node { kind, inputs, outputs: vec![whole], origin: origin.clone() }];
    if is_beside {
        let kind = Kind::Transpose(vec![1, 0, 2]);
        new.push(Node { kind, inputs: vec![Some(whole)], outputs: vec![to], origin });
    }
    Some(new)
}

/// Whether the second operand of a product is stored transposed, and the layout of the product.
fn product(node: &Node) -> (bool, AsHeads) {
    let Kind::Product { turned, heads } = node.kind else { unreachable!("invariant: it is a product") };
    let plain = AsHeads { b: 0, of_a: Heads::default(), of_b: Heads::default(), beside: false };
    (turned, heads.unwrap_or(plain))
}

impl Body<'_> {
    fn known(&self, id: ValueId) -> Option<ValueId> {
        self.own.iter().find(|(of, _)| *of == id).map(|(_, own)| *own)
    }

    /// Value of the body that is part of a value of the net.
    fn value(&mut self, id: ValueId, shape: &[i64]) -> ValueId {
        let Value { name, dtype, .. } = self.net.value(id);
        self.body.add_value(name, *dtype, shape)
    }

    /// Value of the body that stands for a value of the net.
    fn named(&mut self, id: ValueId, shape: &[i64]) -> ValueId {
        let own = self.value(id, shape);
        self.own.push((id, own));
        own
    }

    /// Input of the body: a part of a value of the net.
    fn read(&mut self, id: ValueId, shape: &[i64], track: Track) -> ValueId {
        let own = self.value(id, shape);
        self.body.inputs.push(own);
        self.reads.push(Read::Part(self.inputs.len(), track));
        self.inputs.push(Some(id));
        own
    }

    /// Operand of a product, of all rows of its heads or, if it `has_rows` of the scores, of a block's.
    fn factor(&mut self, id: ValueId, heads: Heads, has_rows: bool) -> Option<(ValueId, Heads)> {
        let (net, blocks) = (self.net, self.blocks);
        let [first, second, width] = last_three(net.shape(id))?;
        let (all, rows) = if heads.beside { (second, first) } else { (first, second) };
        if heads.before + self.sizes[0] + heads.after != all {
            return None;
        }
        let own_rows = if has_rows { blocks.rows } else { rows };
        let of_row = if heads.beside { all * width } else { width };
        let of_head = if heads.beside { width } else { rows * width };
        let moved = [if has_rows { of_row } else { 0 }, of_head];
        let track = blocks.track(heads.before * of_head, moved);
        if !heads.beside {
            let own = [blocks.heads, own_rows, width];
            return Some((self.read(id, &own[3 - net.shape(id).len()..], track), Heads::default()));
        }
        // Rows have all heads side by side, so the part of the last heads ends behind the tensor.
        let own = Heads { beside: true, before: 0, after: all - blocks.heads };
        may_be_longer(net, id).then(|| (self.read(id, &[own_rows, all, width], track), own))
    }

    fn product(
        &mut self,
        node: &Node,
        turned: bool,
        factors: [ValueId; 2],
        [of_a, of_b]: [Heads; 2],
        columns: i64,
    ) -> ValueId {
        let b = self.blocks.heads;
        let is_plain = [of_a, of_b] == [Heads::default(); 2];
        let heads = (!is_plain).then_some(AsHeads { b, of_a, of_b, beside: false });
        let own = [b, self.blocks.rows, columns];
        let output = self.named(node.output(), &own[3 - self.net.shape(node.output()).len()..]);
        let inputs = factors.map(Some).to_vec();
        let kind = Kind::Product { turned, heads };
        self.body.nodes.push(Node { kind, inputs, outputs: vec![output], origin: node.origin.clone() });
        output
    }

    /// Node between the products, on the rows of a block.
    fn rows(&mut self, node: &Node) -> Option<()> {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for id in &node.inputs {
            let id = (*id)?;
            let known = self.known(id);
            inputs.push(Some(match known {
                Some(own) => own,
                None => self.operand(id)?,
            }));
        }
        let shape = self.of_block(self.net.shape(node.output()))?;
        let output = self.named(node.output(), &shape);
        self.body.nodes.push(Node { inputs, outputs: vec![output], ..node.clone() });
        Some(())
    }

    /// Value that is computed elsewhere and broadcast to the scores.
    fn operand(&mut self, id: ValueId) -> Option<ValueId> {
        let net = self.net;
        let shape = net.shape(id);
        let [heads, rows, columns] = last_three(shape)?;
        if net.value(id).constant.is_some() && heads == 1 && rows == 1 {
            let own = self.named(id, shape);
            self.body.values[own.0].constant.clone_from(&net.value(id).constant);
            self.constants.push((own, id));
            return Some(own);
        }
        let along = |n: i64, stride: i64| if n == 1 { 0 } else { stride };
        let moved = match self.is_of_all([heads, rows]) {
            true => [columns, self.sizes[1] * columns],
            false => [along(rows, columns), along(heads, rows * columns)],
        };
        let track = self.blocks.track(0, moved);
        let shape = self.of_block(shape)?;
        let own = self.read(id, &shape, track);
        self.own.push((id, own));
        Some(own)
    }

    /// Whether a tensor has the rows of all heads as one dimension, of which those of a block are adjacent.
    fn is_of_all(&self, [heads, rows]: [i64; 2]) -> bool {
        heads == 1 && self.sizes[0] > 1 && rows == self.sizes[0] * self.sizes[1]
    }

    /// Shape of a block's part of a tensor whose last three dimensions are, or are broadcast to, the scores.
    fn of_block(&self, shape: &[i64]) -> Option<Vec<i64>> {
        let mut own = shape.to_vec();
        let n = own.len();
        let [heads, rows, _] = last_three(shape)?;
        if self.is_of_all([heads, rows]) {
            own[n - 2] = self.blocks.heads * self.blocks.rows;
            return Some(own);
        }
        let parts = [(3, self.sizes[0], self.blocks.heads), (2, self.sizes[1], self.blocks.rows)];
        for (behind, all, part) in parts {
            match n.checked_sub(behind).map(|at| &mut own[at]) {
                Some(size) if *size == all => *size = part,
                None | Some(1) => {}
                Some(_) => return None,
            }
        }
        Some(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_rows_of_all_heads() {
        const L2: i64 = 1 << 20;
        for sizes in [[12, 512, 400], [12, 256, 256], [8, 4096, 4096], [6, 1500, 1500], [12, 577, 577], [1, 1023, 9999]]
        {
            let [heads, rows, columns] = sizes;
            let blocks = Blocks::of(sizes, L2).expect("the scores exceed the cache");
            assert_eq!(heads % blocks.heads, 0, "{sizes:?}: {blocks:?}");
            assert!(blocks.apart <= blocks.rows, "{sizes:?}: {blocks:?}");
            assert_eq!((blocks.n - 1) * blocks.apart + blocks.rows, rows, "{sizes:?}: {blocks:?}");
            let fits = blocks.heads * (blocks.rows - blocks.n) * columns * 4 <= L2;
            assert!(fits || blocks.rows < 2 * FEWEST_ROWS, "{sizes:?}: {blocks:?}");
        }
        assert_eq!(Blocks::of([12, 128, 128], L2), None);
    }
}
