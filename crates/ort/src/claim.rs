//! Choice of the parts of a graph that run here.
//!
//! A node is supported if the compiler has a kernel for it, given its types. Supported nodes are grouped into
//! maximal parts such that no path leads out of a part and back into it. A part is claimed if it is expected
//! to be faster than separate nodes: if it has enough arithmetic in products, convolutions and recurrent
//! networks, or if it saves much memory traffic between its nodes. Products between `DequantizeLinear` and
//! `QuantizeLinear` are left out unless these are claimed as well, since ONNX Runtime turns them into integer
//! products.

use std::collections::{HashMap, HashSet};

use tilewright_graph::{Bindings, Graph, Problem, Specialised, Tensor, TensorType, specialise};
use tilewright_model::{Kind, Net, import};

use crate::draft::{DraftNode, NoSessionGraph, NodeAt, Ports, SessionGraph, ValueIndex, node_at, node_of, types_of};
use crate::options::Claims;

/// Stand-ins for unknown sizes, tried in turn.
const STAND_INS: [usize; 3] = [64, 224, 1];
/// Maximum number of rounds in which unsupported nodes are left out.
const MOST_ROUNDS: usize = 32;
/// Minimum arithmetic of a part, in floating-point operations: about ten times the cost of a call.
const LEAST_FLOPS: f64 = 1e6;
/// Minimum number of bytes that a part without such arithmetic must save.
const LEAST_SAVED_BYTES: f64 = 4e6;

/// Maximum number of multiplications per step of a quantized recurrent network that is claimed for several
/// threads. On Zen 5 with two, 2026-11-29, layers with up to 262 thousand took 1.10 to 1.50 times as long in
/// ONNX Runtime 1.32, and those with a million and more 0.68 to 0.99 times; with one thread all did 0.98 to
/// 1.49 times.
const MOST_OF_STEP: usize = 1 << 19;

/// Operators whose numbers ONNX Runtime draws, by the seed that a program gives it.
const RANDOM: [&str; 6] =
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

/// Parts that run here.
#[derive(Debug, Default)]
pub struct Claim {
    /// Parts, each in the order of the graph's nodes.
    pub parts: Vec<Vec<NodeAt>>,
    /// Reasons why nodes were left out, in words.
    pub left: Vec<String>,
    /// Specialised graph of the part, if there is only one and all its sizes are known.
    pub graph: Option<Graph>,
}

/// Nodes for which there are kernels.
struct Supported {
    nodes: HashSet<NodeAt>,
    /// Types of values, with stand-ins for unknown sizes.
    types: HashMap<ValueIndex, TensorType>,
    left: Vec<String>,
    /// Specialised graph of all supported nodes, and its net.
    whole: Option<(Graph, Net)>,
}

/// Chooses the parts of a graph that run here, with kernels for this number of threads.
pub fn claim(draft: &SessionGraph, claims: Claims, threads: usize) -> Claim {
    let Supported { mut nodes, types, mut left, whole } = supported(draft);
    let n_supported = nodes.len();
    leave_quantized(draft, &mut nodes);
    if claims == Claims::Fast && threads > 1 {
        leave_slow(draft, &types, &mut nodes, &mut left);
    }
    let mut parts = Vec::new();
    for part in groups(draft, &nodes) {
        let known = whole.as_ref().filter(|_| part.len() == n_supported).map(|(_, net)| net);
        match work(draft, &part, &types, known) {
            Ok(work) if work.is_enough() || claims == Claims::All => parts.push(part),
            Ok(_) => {}
            Err(why) => left.push(why),
        }
    }
    let is_whole = parts.len() == 1 && parts[0].len() == n_supported;
    let is_fixed = |part: &[NodeAt]| draft.ports(part).inputs.iter().all(|&value| draft.fixed_shape(value).is_some());
    let graph = whole.map(|(graph, _)| graph).filter(|_| is_whole && is_fixed(&parts[0]));
    Claim { parts, left, graph }
}

/// Bindings of a part with known sizes: all constants are folded.
pub fn for_runs() -> Bindings {
    Bindings { fold_bytes: usize::MAX, ..Bindings::default() }
}

/// Whether all sizes of a graph are known.
fn has_fixed_sizes(draft: &SessionGraph) -> bool {
    (0..draft.values.len()).all(|at| draft.fixed_shape(at).is_some() || draft.values[at].declared.is_none())
}

/// Finds the nodes for which there are kernels, with the stand-ins for which there are the most such nodes.
fn supported(draft: &SessionGraph) -> Supported {
    let tried = STAND_INS[..if has_fixed_sizes(draft) { 1 } else { STAND_INS.len() }].iter();
    let mut best: Option<Supported> = None;
    for &stand_in in tried {
        let found = supported_with(draft, stand_in);
        let is_all = found.nodes.len() == draft.nodes.len();
        if best.as_ref().is_none_or(|best| found.nodes.len() > best.nodes.len()) {
            best = Some(found);
        }
        if is_all {
            break;
        }
    }
    best.expect("at least one was tried")
}

/// Declared shape of an input of a part, with a stand-in for unknown sizes; `None` without a declared shape.
/// A declared scalar may also be of unknown rank.
fn given_shape(draft: &SessionGraph, value: ValueIndex, stand_in: usize) -> Option<Vec<usize>> {
    draft.shape_with(value, stand_in).filter(|shape| !shape.is_empty())
}

fn supported_with(draft: &SessionGraph, stand_in: usize) -> Supported {
    let mut nodes: HashSet<NodeAt> = (0..draft.nodes.len()).collect();
    let mut left: Vec<String> = Vec::new();
    let name = |at: NodeAt| {
        let DraftNode { op, outputs, .. } = &draft.nodes[at];
        let output = outputs.iter().flatten().next().map_or("", |&value| &draft.values[value].name);
        format!("{op} of `{output}`")
    };
    for (at, node) in draft.nodes.iter().enumerate() {
        let of_seed = RANDOM.contains(&node.op.as_str()).then_some("its random numbers are those of a session");
        if let Some(why) = node.foreign.as_deref().or(of_seed) {
            left.push(format!("{}: {why}", name(at)));
            nodes.remove(&at);
        }
    }
    // Same bindings as for a part of known sizes, which is then specialised already.
    let bindings = if has_fixed_sizes(draft) { for_runs() } else { Bindings::default() };
    for _ in 0..MOST_ROUNDS {
        let part: Vec<NodeAt> = (0..draft.nodes.len()).filter(|at| nodes.contains(at)).collect();
        let ports = draft.ports(&part);
        let unknown: HashSet<ValueIndex> =
            ports.inputs.iter().copied().filter(|&value| given_shape(draft, value, stand_in).is_none()).collect();
        let reads_unknown = |at: &NodeAt| draft.nodes[*at].inputs.iter().flatten().any(|v| unknown.contains(v));
        let mut refused: Vec<(NodeAt, String)> = Vec::new();
        for &at in part.iter().filter(|at| reads_unknown(at)) {
            refused.push((at, "the number of dimensions of an input is not known".to_owned()));
        }
        let (mut types, mut whole) = (HashMap::new(), None);
        if refused.is_empty() {
            match draft.graph(&part, &ports, &|value| given_shape(draft, value, stand_in)) {
                Err(NoSessionGraph::Node(at, why)) => refused.push((at, why)),
                Err(NoSessionGraph::Other(why)) => {
                    left.push(why);
                    nodes.clear();
                }
                Ok(graph) => {
                    let special = specialise(&graph, &bindings);
                    types = types_of(&special.graph);
                    match imported(&special) {
                        Ok(net) => whole = Some((special.graph, net)),
                        Err(found) => refused = found,
                    }
                }
            }
        }
        if refused.is_empty() {
            return Supported { nodes, types, left, whole };
        }
        for (at, why) in refused {
            if nodes.remove(&at) {
                left.push(format!("{}: {why}", name(at)));
            }
        }
    }
    left.push("too many nodes depend on others that are left out".to_owned());
    Supported { nodes: HashSet::new(), types: HashMap::new(), left, whole: None }
}

/// Imports a specialised graph.
///
/// # Errors
/// The nodes without kernels, with reasons.
fn imported(special: &Specialised) -> Result<Net, Vec<(NodeAt, String)>> {
    let place = |problem: &Problem| Some((problem.place.as_ref().and_then(node_of)?, problem.reason.to_string()));
    if !special.problems.is_empty() {
        return Err(special.problems.iter().filter_map(place).collect());
    }
    let net = import(&special.graph, false);
    let refused = |node: &tilewright_model::Node| match &node.kind {
        Kind::Host(host) => Some((node_at(&node.origin)?, host.reason.to_string())),
        _ => None,
    };
    let refused: Vec<(NodeAt, String)> = net.nodes.iter().filter_map(refused).collect();
    if refused.is_empty() { Ok(net) } else { Err(refused) }
}

/// Leaves out nodes between quantization operators that are not taken.
fn leave_quantized(draft: &SessionGraph, nodes: &mut HashSet<NodeAt>) {
    let is_left = |at: NodeAt, op: &str, nodes: &HashSet<NodeAt>| !nodes.contains(&at) && draft.nodes[at].op == op;
    let outputs_of = |at: NodeAt| draft.nodes[at].outputs.iter().flatten().copied();
    let all = 0..draft.nodes.len();
    let dequantized: HashSet<ValueIndex> =
        all.clone().filter(|&at| is_left(at, "DequantizeLinear", nodes)).flat_map(outputs_of).collect();
    let quantized: HashSet<ValueIndex> = all
        .filter(|&at| is_left(at, "QuantizeLinear", nodes))
        .filter_map(|at| draft.nodes[at].inputs.first().copied().flatten())
        .collect();
    nodes.retain(|&at| {
        let reads = draft.nodes[at].inputs.iter().flatten().any(|value| dequantized.contains(value));
        !reads && !outputs_of(at).any(|value| quantized.contains(&value))
    });
}

/// Leaves out nodes for which ONNX Runtime has faster kernels: recurrent networks with quantized weights
/// whose steps are large enough to be divided among threads, which ONNX Runtime does better.
fn leave_slow(
    draft: &SessionGraph,
    types: &HashMap<ValueIndex, TensorType>,
    nodes: &mut HashSet<NodeAt>,
    left: &mut Vec<String>,
) {
    let n_before = nodes.len();
    let size = |node: &DraftNode, input: usize, axis: usize| -> usize {
        let ty = node.inputs.get(input).copied().flatten().and_then(|value| {
            let constant = draft.values[value].constant.as_ref();
            constant.map(Tensor::ty).or_else(|| types.get(&value))
        });
        ty.and_then(|ty| ty.shape.get(axis).copied()).unwrap_or(1)
    };
    // Batch size times the number of weights of a direction.
    let of_step = |node: &DraftNode| size(node, 0, 1) * size(node, 2, 1) * size(node, 2, 2);
    nodes.retain(|&at| {
        let node = &draft.nodes[at];
        node.op != "DynamicQuantizeLSTM" || of_step(node) <= MOST_OF_STEP
    });
    if nodes.len() < n_before {
        left.push(format!("{} DynamicQuantizeLSTM: its steps are divided among threads there", n_before - nodes.len()));
    }
}

/// Groups nodes into maximal parts, in the order of their first nodes.
fn groups(draft: &SessionGraph, nodes: &HashSet<NodeAt>) -> Vec<Vec<NodeAt>> {
    let mut grouping = Grouping::new(draft);
    for at in (0..draft.nodes.len()).filter(|at| nodes.contains(at)) {
        for before in grouping.before[at].clone() {
            if nodes.contains(&before) {
                grouping.join(before, at);
            }
        }
    }
    // Nodes that read the same value are merged as well: fewer parts mean fewer calls.
    let mut readers: HashMap<ValueIndex, NodeAt> = HashMap::new();
    for at in (0..draft.nodes.len()).filter(|at| nodes.contains(at)) {
        for &value in draft.nodes[at].inputs.iter().flatten() {
            if draft.values[value].constant.is_none() {
                let other = *readers.entry(value).or_insert(at);
                grouping.join(other, at);
            }
        }
    }
    let mut parts: Vec<Vec<NodeAt>> = grouping.members.into_iter().filter(|part| !part.is_empty()).collect();
    parts.retain(|part| nodes.contains(&part[0]));
    parts.iter_mut().for_each(|part| part.sort_unstable());
    parts.sort();
    parts
}

/// Groups of nodes, between which there are no cycles.
struct Grouping {
    /// Predecessors and successors of each node.
    before: Vec<Vec<NodeAt>>,
    after: Vec<Vec<NodeAt>>,
    /// Group of each node, and the nodes of each group.
    group: Vec<usize>,
    members: Vec<Vec<NodeAt>>,
    /// First and last node of each group.
    ends: Vec<(NodeAt, NodeAt)>,
}

impl Grouping {
    fn new(draft: &SessionGraph) -> Grouping {
        let n = draft.nodes.len();
        let producers = draft.nodes.iter().enumerate();
        let producer: HashMap<ValueIndex, NodeAt> =
            producers.flat_map(|(at, node)| node.outputs.iter().flatten().map(move |&value| (value, at))).collect();
        let (mut before, mut after) = (vec![Vec::new(); n], vec![Vec::new(); n]);
        for (at, node) in draft.nodes.iter().enumerate() {
            let mut from: Vec<NodeAt> =
                node.inputs.iter().flatten().filter_map(|value| producer.get(value).copied()).collect();
            from.sort_unstable();
            from.dedup();
            from.iter().for_each(|&other| after[other].push(at));
            before[at] = from;
        }
        let members = (0..n).map(|at| vec![at]).collect();
        Grouping { before, after, group: (0..n).collect(), members, ends: (0..n).map(|at| (at, at)).collect() }
    }

    /// Merges the groups of two nodes, unless a path leads from one to the other through a third group.
    fn join(&mut self, a: NodeAt, b: NodeAt) {
        let (a, b) = (self.group[a], self.group[b]);
        if a == b || self.has_detour(a, b) || self.has_detour(b, a) {
            return;
        }
        let (into, from) = if self.members[a].len() < self.members[b].len() { (b, a) } else { (a, b) };
        let moved = std::mem::take(&mut self.members[from]);
        moved.iter().for_each(|&at| self.group[at] = into);
        self.members[into].extend(moved);
        let ((first, last), (other_first, other_last)) = (self.ends[into], self.ends[from]);
        self.ends[into] = (first.min(other_first), last.max(other_last));
    }

    /// Whether a path leads from one group to another through a third.
    fn has_detour(&self, from: usize, to: usize) -> bool {
        let last = self.ends[to].1;
        let mut seen: HashSet<usize> = HashSet::from([from]);
        let mut next = vec![from];
        while let Some(group) = next.pop() {
            for &at in self.members[group].iter().flat_map(|&at| &self.after[at]) {
                let other = self.group[at];
                match () {
                    () if other == to && group != from => return true,
                    // Nodes come after those that they read, so no node after the last one can lead back.
                    () if other == to || self.ends[other].0 > last => {}
                    () if seen.insert(other) => next.push(other),
                    () => {}
                }
            }
        }
        false
    }
}

/// Work of a part.
#[derive(Clone, Copy, Debug)]
struct PartWork {
    flops: f64,
    saved_bytes: f64,
}

impl PartWork {
    /// Whether a part is expected to be faster here.
    fn is_enough(self) -> bool {
        self.flops >= LEAST_FLOPS || self.saved_bytes >= LEAST_SAVED_BYTES
    }
}

/// Computes the work of a part, whose net may be known already.
///
/// # Errors
/// The reason why the part has no code on its own.
fn work(
    draft: &SessionGraph,
    part: &[NodeAt],
    types: &HashMap<ValueIndex, TensorType>,
    known: Option<&Net>,
) -> Result<PartWork, String> {
    let ports = draft.ports(part);
    if ports.outputs.is_empty() {
        return Err("a part has no outputs".to_owned());
    }
    let own = if known.is_some() { None } else { Some(net_of(draft, part, &ports, types)?) };
    let net = known.or(own.as_ref()).expect("one of the two");
    for node in &net.nodes {
        if let Kind::Host(host) = &node.kind {
            return Err(format!("{} by itself: {}", node.operator(), host.reason));
        }
    }
    Ok(PartWork { flops: flops(net), saved_bytes: saved_bytes(draft, part, types) })
}

/// Makes the net of a part for inputs of these types.
fn net_of(
    draft: &SessionGraph,
    part: &[NodeAt],
    ports: &Ports,
    types: &HashMap<ValueIndex, TensorType>,
) -> Result<Net, String> {
    let shape = |value: ValueIndex| types.get(&value).map(|ty| ty.shape.clone());
    let graph = draft.graph(part, ports, &shape).map_err(|refused| match refused {
        NoSessionGraph::Node(_, why) | NoSessionGraph::Other(why) => why,
    })?;
    let special = specialise(&graph, &Bindings::default());
    match special.problems.first() {
        Some(problem) => Err(problem.to_string()),
        None => Ok(import(&special.graph, false)),
    }
}

/// Floating-point operations of products, convolutions and recurrent networks.
fn flops(net: &Net) -> f64 {
    let elements = |id| net.value(id).n_elements() as f64;
    let of_node = |node: &tilewright_model::Node| match &node.kind {
        Kind::Product { .. } => {
            2.0 * elements(node.output()) * net.shape(node.input(0)).last().copied().unwrap_or(1) as f64
        }
        Kind::Conv(_) => {
            let channels = net.shape(node.input(1)).first().copied().unwrap_or(1).max(1) as f64;
            2.0 * elements(node.output()) * elements(node.input(1)) / channels
        }
        Kind::Sequence(sequence) => sequence.n_steps as f64 * flops(&sequence.body),
        _ => 0.0,
    };
    net.nodes.iter().map(of_node).sum()
}

/// Bytes of values between a part's nodes, which would be written and read if each node ran separately.
fn saved_bytes(draft: &SessionGraph, part: &[NodeAt], types: &HashMap<ValueIndex, TensorType>) -> f64 {
    let inside = part.iter().flat_map(|&at| &draft.nodes[at].outputs).flatten();
    let read: HashSet<ValueIndex> = part.iter().flat_map(|&at| &draft.nodes[at].inputs).flatten().copied().collect();
    let bytes = |value: &ValueIndex| types.get(value).and_then(TensorType::checked_bytes).unwrap_or(0) as f64;
    inside.filter(|value| read.contains(value)).map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::DraftValue;
    use tilewright_graph::{DType, Declared, Dim};

    /// Makes a graph from nodes `operator inputs > output`, whose values are matrices of 512 by 512.
    fn draft(nodes: &str, outputs: &str) -> SessionGraph {
        let mut draft = SessionGraph { opset: 17, ..SessionGraph::default() };
        let mut names: Vec<String> = Vec::new();
        let mut value = |draft: &mut SessionGraph, name: &str| {
            names.iter().position(|known| known == name).unwrap_or_else(|| {
                names.push(name.to_owned());
                let declared = Some(Declared { dtype: DType::F32, dims: Some(vec![Dim::Size(512); 2]) });
                draft.values.push(DraftValue { name: name.to_owned(), declared, constant: None });
                names.len() - 1
            })
        };
        for line in nodes.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (call, output) = line.split_once(" > ").expect("an arrow");
            let mut words = call.split(' ');
            let op = words.next().expect("an operator").to_owned();
            let inputs = words.map(|name| Some(value(&mut draft, name))).collect();
            let outputs = vec![Some(value(&mut draft, output))];
            draft.nodes.push(DraftNode { op, inputs, outputs, ..DraftNode::default() });
        }
        draft.outputs = outputs.split(' ').map(|name| value(&mut draft, name)).collect();
        draft
    }

    #[track_caller]
    fn check(nodes: &str, outputs: &str, expected: &[&[NodeAt]]) {
        let claim = claim(&draft(nodes, outputs), Claims::Fast, 1);
        assert_eq!(claim.parts, expected, "{:?}", claim.left);
    }

    #[test]
    fn a_graph_of_known_operators_is_one_part() {
        check("MatMul x w > a\nRelu a > b\nMatMul b w > y", "y", &[&[0, 1, 2]]);
    }

    #[test]
    fn an_unknown_operator_splits_a_graph() {
        check("MatMul x w > a\nNoSuch a > b\nMatMul b w > y", "y", &[&[0], &[2]]);
        check("MatMul x w > a\nRandomNormalLike a > b\nMatMul b w > y", "y", &[&[0], &[2]]);
    }

    #[test]
    fn no_part_is_left_and_entered_again() {
        // The last product reads the first one directly, and through an unknown operator.
        check("MatMul x w > a\nNoSuch a > b\nMatMul b a > y", "y", &[&[0], &[2]]);
        // A parallel branch may join either.
        check("MatMul x w > a\nMatMul a w > c\nNoSuch a > b\nAdd c b > y", "y", &[&[0, 1]]);
    }

    #[test]
    fn little_work_is_left() {
        check("Relu x > y", "y", &[]);
        assert_eq!(claim(&draft("Relu x > y", "y"), Claims::All, 1).parts, [[0]]);
        check("Relu x > a\nNeg a > b\nExp b > c\nAbs c > d\nSqrt d > y", "y", &[&[0, 1, 2, 3, 4]]);
    }

    /// Whether no path leads out of a group and back, by reachability between all pairs of nodes.
    fn is_convex(draft: &SessionGraph, part: &[NodeAt]) -> bool {
        let n = draft.nodes.len();
        let mut reaches = vec![vec![false; n]; n];
        for (at, node) in draft.nodes.iter().enumerate() {
            for (other, of) in draft.nodes.iter().enumerate() {
                reaches[other][at] = of.outputs.iter().flatten().any(|value| node.inputs.contains(&Some(*value)));
            }
        }
        for by in 0..n {
            for from in 0..n {
                for to in 0..n {
                    reaches[from][to] |= reaches[from][by] && reaches[by][to];
                }
            }
        }
        let outside = (0..n).filter(|at| !part.contains(at));
        outside.into_iter().all(|at| !part.iter().any(|&a| reaches[a][at]) || !part.iter().any(|&b| reaches[at][b]))
    }

    #[test]
    fn parts_of_random_graphs_are_convex_and_apart() {
        let mut state = 1_u64;
        let mut below = move |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for _ in 0..200 {
            let n = 2 + below(12);
            let mut text = String::new();
            for at in 0..n {
                let op = ["MatMul", "Add", "NoSuch"][below(3)];
                let mut input = || if at == 0 { "x".to_owned() } else { format!("v{}", below(at)) };
                let (a, b) = (input(), input());
                text += &format!("{op} {a} {b} > v{at}\n");
            }
            let draft = draft(&text, &format!("v{}", n - 1));
            let nodes: HashSet<NodeAt> = (0..n).filter(|&at| draft.nodes[at].op != "NoSuch").collect();
            let parts = groups(&draft, &nodes);
            let mut all: Vec<NodeAt> = parts.concat();
            all.sort_unstable();
            let mut expected: Vec<NodeAt> = nodes.into_iter().collect();
            expected.sort_unstable();
            assert_eq!(all, expected, "{text}");
            // Parts that are convex individually may form a cycle together, so each is contracted in turn.
            let mut grouping = Grouping::new(&draft);
            for part in &parts {
                assert!(is_convex(&draft, part), "{part:?} of\n{text}");
                part.iter().for_each(|&at| grouping.group[at] = part[0]);
            }
            let group = &grouping.group;
            let edges = |at: NodeAt| grouping.after[at].iter().map(move |&to| (group[at], group[to]));
            let edges: Vec<(usize, usize)> = (0..n).flat_map(edges).filter(|(a, b)| a != b).collect();
            let mut rest: HashSet<usize> = grouping.group.iter().copied().collect();
            while let Some(&free) = rest.iter().find(|&&g| !edges.iter().any(|(a, b)| *b == g && rest.contains(a))) {
                rest.remove(&free);
            }
            assert!(rest.is_empty(), "a cycle between {rest:?} of\n{text}");
        }
    }
}
