//! Subgraphs that repeat: `Loop` and `Scan`.

use bytes::Bytes;

use super::{ANY, row};
use super::{Binary, Body, Concat, Fact, Gather, Import, Inputs, Op, Operation, Operator, Transpose, Unsqueeze, axis};
use crate::error::{Place, invalid, unsupported};
use crate::evaluate::run;
use crate::specialise::infer_graph;
use crate::{DType, Graph, Node, OpError, Tensor, TensorType, Value, ValueId};

/// Maximum number of iterations in the evaluation of a loop.
const MOST_EVALUATED: i64 = 1 << 20;

/// `Loop`: repeats a subgraph. Input 0, optional, is the maximum number of iterations; input 1, optional, the
/// initial condition; the other inputs are the initial values of the loop-carried variables.
///
/// Inputs of the subgraph: the iteration number, the condition, the loop-carried variables, and captured
/// values. Its outputs: the next condition, the updated variables, and values that are stacked along a new
/// first dimension over all iterations.
#[derive(Debug, Clone)]
pub struct Loop {
    /// Subgraph of an iteration.
    pub body: Body,
    /// Number of loop-carried variables.
    pub n_carried: usize,
}

/// Dimension that a scan iterates over.
#[derive(Debug, Clone, Copy)]
pub struct ScanDimension {
    /// Index of the dimension; negative counts from the end.
    pub axis: i64,
    /// Whether iteration goes from the end to the beginning.
    pub is_reverse: bool,
}

/// `Scan`: runs a subgraph for each slice of the last inputs along a dimension; the inputs before these are
/// the initial values of the loop-carried variables.
///
/// Inputs of the subgraph: the loop-carried variables, the slices, and captured values. Its outputs: the
/// updated variables, and values that are stacked over all iterations.
#[derive(Debug, Clone)]
pub struct Scan {
    /// Subgraph of an iteration.
    pub body: Body,
    /// Number of loop-carried variables.
    pub n_carried: usize,
    /// Dimension of each scanned input.
    pub inputs: Vec<ScanDimension>,
    /// Dimension along which each scanned output is stacked.
    pub outputs: Vec<ScanDimension>,
    /// Whether all inputs have a leading batch dimension, and input 0 is the lengths of the sequences, as
    /// before opset 9.
    pub by_batch: bool,
}

pub(super) const ROWS: &[Operator] = &[
    row("Loop", &[1, 11, 13, 16, 19, 21, 23, 24, 25], 0..=ANY, |node| Ok(Loop::import(node)?.into())),
    row("Scan", &[8, 9, 11, 16, 19, 21, 23, 24, 25], 1..=ANY, |node| Ok(Scan::import(node)?.into())),
];

/// Checks that the numbers of a subgraph's inputs and outputs match those of its node.
fn check_ports(node: &Import, body: &Body, n_in: usize, n_ahead: usize, n_carried: usize) -> Result<(), OpError> {
    let (takes, gives) = (body.graph.inputs.len() - body.captures.len(), body.graph.outputs.len());
    if takes != n_in {
        return Err(invalid!("its graph has {takes} inputs, and should have {n_in}, as the node's inputs say"));
    }
    if gives < n_ahead + n_carried {
        let least = n_ahead + n_carried;
        return Err(invalid!("its graph has {gives} outputs, and should have {least} or more, as its inputs say"));
    }
    if node.n_outputs > gives - n_ahead {
        return Err(invalid!("it has {} outputs, and its graph gives {}", node.n_outputs, gives - n_ahead));
    }
    Ok(())
}

impl Loop {
    fn import(node: &Import) -> Result<Loop, OpError> {
        let body = node.body("body")?;
        let n_carried = node.given.len() - 2;
        check_ports(node, &body, 2 + n_carried, 1, n_carried)?;
        if let Some(at) = (2..node.given.len()).find(|&at| !node.has_input(at)) {
            return Err(invalid!("its input {} is missing", at + 1));
        }
        Ok(Loop { body, n_carried })
    }

    /// Maximum number of iterations: `None` if it is not constant, `Some(None)` if there is no bound.
    ///
    /// # Errors
    /// If the number does not have exactly one element.
    pub fn most(&self, inputs: Inputs<'_>) -> Result<Option<Option<i64>>, OpError> {
        let Some(fact) = inputs.optional(0) else { return Ok(Some(None)) };
        if fact.ty.checked_len() != Some(1) || fact.dtype().is_float() {
            return Err(invalid!("its number of iterations {} is not one integer", fact.ty));
        }
        Ok(fact.value.map(|value| Some(value.i64s()[0].max(0))))
    }

    /// Whether the first iteration is executed; `None` if the condition is not constant.
    ///
    /// # Errors
    /// If the condition does not have exactly one element.
    pub fn begins(&self, inputs: Inputs<'_>) -> Result<Option<bool>, OpError> {
        let Some(fact) = inputs.optional(1) else { return Ok(Some(true)) };
        if fact.ty.checked_len() != Some(1) || fact.dtype() != DType::Bool {
            return Err(invalid!("its condition {} is not one truth", fact.ty));
        }
        Ok(fact.value.map(|value| value.integers()[0] != 0))
    }

    /// Types of the iteration number and of the condition as the subgraph declares them: scalars, or vectors
    /// of one element.
    pub fn own_types(&self) -> Vec<TensorType> {
        let graph = &self.body.graph;
        let ty = |(at, dtype): (usize, DType)| {
            let value = graph.value(graph.inputs[at]);
            let declared = value.declared.as_ref().and_then(|declared| Some(declared.dims.as_ref()?.len()));
            let rank = value.ty.as_ref().map(|ty| ty.shape.len()).or(declared);
            TensorType::new(dtype, vec![1; rank.unwrap_or(0).min(1)])
        };
        [(0, DType::I64), (1, DType::Bool)].map(ty).to_vec()
    }

    /// Name of an output of the node in messages: first the carried values, then the collected ones.
    pub(crate) fn what(&self, at: usize) -> String {
        match at.checked_sub(self.n_carried) {
            None => format!("carried value {}", at + 1),
            Some(at) => format!("collected output {}", at + 1),
        }
    }
}

/// Makes a graph of a single node, with its inputs and outputs.
fn alone(op: Op, n_inputs: usize, n_outputs: usize, given: impl Fn(usize) -> bool) -> Graph {
    let mut graph = Graph::default();
    graph.inputs = (0..n_inputs).map(|_| graph.add_value(Value::default())).collect();
    graph.outputs = (0..n_outputs).map(|_| graph.add_value(Value::default())).collect();
    let inputs = graph.inputs.iter().enumerate().map(|(at, id)| given(at).then_some(*id)).collect();
    let outputs = graph.outputs.iter().map(|id| Some(*id)).collect();
    let place = Place { node: String::new(), operator: "Loop".to_owned(), opset: 0 };
    graph.add_node(Node { op, place, inputs, outputs });
    graph
}

/// Facts about the inputs of a subgraph whose node omits some: the omitted ones are never read.
pub(super) fn with_all<'a>(inputs: &[Option<Fact<'a>>], none: &'a TensorType) -> Vec<Option<Fact<'a>>> {
    inputs.iter().map(|fact| Some(fact.unwrap_or(Fact { ty: none, value: None }))).collect()
}

/// Elements of inputs, all of which must be known.
pub(super) fn known(inputs: &[Option<Fact<'_>>]) -> Result<Vec<Option<Tensor>>, OpError> {
    let tensor = |(at, fact): (usize, &Option<Fact<'_>>)| match fact {
        None => Ok(None),
        Some(fact) => fact.value.cloned().map(Some).ok_or(OpError::NeedsValue(at)),
    };
    inputs.iter().enumerate().map(tensor).collect()
}

/// Evaluates the subgraph of a node.
pub(super) fn carry_out(graph: &Graph, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, OpError> {
    run(graph, inputs).map_err(|error| error.reason().cloned().unwrap_or_else(|| invalid!("{error}")))
}

/// Stacks rows along a new first dimension.
fn stacked(rows: &[Tensor], ty: &TensorType) -> Result<Tensor, OpError> {
    if let Some(other) = rows.iter().find(|row| row.ty() != ty) {
        return Err(invalid!("what it collects is {ty} at first and {} later, and should be alike", other.ty()));
    }
    let bytes: Vec<u8> = rows.iter().flat_map(|row| row.bytes().iter().copied()).collect();
    let whole = TensorType::new(ty.dtype, [&[rows.len()], &ty.shape[..]].concat());
    Tensor::new(whole, Bytes::from(bytes)).ok_or_else(|| invalid!("what it collects does not fit memory"))
}

impl Operation for Loop {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let given = |at: usize| inputs.optional(at).is_some();
        let graph = alone(self.clone().into(), inputs.n_inputs(), self.body.graph.outputs.len() - 1, given);
        infer_graph(&graph, &with_all(inputs.0, &TensorType::new(DType::Bool, [])))
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let all = known(inputs.0)?;
        let most = self.most(inputs)?.flatten().unwrap_or(i64::MAX);
        let mut holds = self.begins(inputs)?.unwrap_or(true);
        let present = |at: usize| all[at].clone().ok_or_else(|| invalid!("its input {} is missing", at + 1));
        let mut carried = (2..2 + self.n_carried).map(present).collect::<Result<Vec<_>, _>>()?;
        let captured = self.body.captures.iter().map(|&at| present(at)).collect::<Result<Vec<_>, _>>()?;
        let n_collected = self.body.graph.outputs.len() - 1 - self.n_carried;
        let mut rows: Vec<Vec<Tensor>> = vec![Vec::new(); n_collected];
        let own = self.own_types();
        let mut iteration = 0;
        while holds && iteration < most {
            if iteration >= MOST_EVALUATED {
                return Err(unsupported!("it does not end within {MOST_EVALUATED} iterations, which is the most"));
            }
            let number = Tensor::from_integers(DType::I64, own[0].shape.clone(), &[iteration.into()]);
            let condition = Tensor::from_integers(DType::Bool, own[1].shape.clone(), &[1]);
            let given = [number, condition].into_iter().chain(carried.iter().cloned()).chain(captured.iter().cloned());
            let mut given = carry_out(&self.body.graph, given.collect())?;
            rows.iter_mut().zip(given.drain(1 + self.n_carried..)).for_each(|(rows, row)| rows.push(row));
            holds = given[0].integers().first().is_some_and(|holds| *holds != 0);
            for (at, (before, after)) in carried.iter_mut().zip(given.drain(1..)).enumerate() {
                if before.dtype() != after.dtype() {
                    let (what, to) = (self.what(at), after.dtype());
                    return Err(invalid!("its {what} is {}, and becomes {to} (cast it)", before.dtype()));
                }
                *before = after;
            }
            iteration += 1;
        }
        let mut outputs = carried;
        if rows.first().is_some_and(Vec::is_empty) {
            // Without rows, the type follows only from the graph.
            let types = self.infer(inputs)?;
            let none = |ty: &TensorType| Tensor::new(ty.clone(), Bytes::new()).ok_or(OpError::ShapeOfData);
            outputs.extend(types[self.n_carried..].iter().map(none).collect::<Result<Vec<_>, _>>()?);
            return Ok(outputs);
        }
        for rows in &rows {
            outputs.push(stacked(rows, rows[0].ty())?);
        }
        Ok(outputs)
    }
}

impl Scan {
    fn import(node: &Import) -> Result<Scan, OpError> {
        let body = node.body("body")?;
        let by_batch = node.version < 9;
        let n_scanned = node.int("num_scan_inputs")?.ok_or_else(|| invalid!("it has no num_scan_inputs"))?;
        let n_given = node.given.len() - usize::from(by_batch);
        let n_scanned = usize::try_from(n_scanned).ok().filter(|n| (1..=n_given).contains(n));
        let n_scanned =
            n_scanned.ok_or_else(|| invalid!("num_scan_inputs is not in 1 to {n_given}, the number of its inputs"))?;
        let n_carried = n_given - n_scanned;
        check_ports(node, &body, n_given, 0, n_carried)?;
        if by_batch && node.has_input(0) {
            return Err(unsupported!("lengths of its sequences are not supported (leave them out)"));
        }
        if let Some(at) = (usize::from(by_batch)..node.given.len()).find(|&at| !node.has_input(at)) {
            return Err(invalid!("its input {} is missing", at + 1));
        }
        let of = |what: &str, n: usize| {
            let list = |name: &str| {
                let list = node.ints(name)?.unwrap_or_else(|| vec![0; n]);
                if list.len() == n { Ok(list) } else { Err(invalid!("{name} has {} numbers, and not {n}", list.len())) }
            };
            let directions = match by_batch {
                true if what == "scan_input" => list("directions")?,
                true => vec![0; n],
                false => list(&format!("{what}_directions"))?,
            };
            let axes = if by_batch { vec![0; n] } else { list(&format!("{what}_axes"))? };
            let along = |(axis, direction): (i64, i64)| match direction {
                0 | 1 => Ok(ScanDimension { axis, is_reverse: direction == 1 }),
                _ => Err(invalid!("{what}_directions has {direction}, and should have 0 and 1")),
            };
            axes.into_iter().zip(directions).map(along).collect::<Result<Vec<_>, _>>()
        };
        let n_collected = body.graph.outputs.len() - n_carried;
        let (inputs, outputs) = (of("scan_input", n_scanned)?, of("scan_output", n_collected)?);
        Ok(Scan { body, n_carried, inputs, outputs, by_batch })
    }

    /// Makes an equivalent graph with a [`Loop`], for inputs of these types, one for each input of the node.
    ///
    /// # Errors
    /// If dimensions do not fit.
    pub(crate) fn graph(&self, inputs: &[Option<Fact<'_>>], place: &Place) -> Result<Graph, OpError> {
        let mut draft = GraphDraft { graph: Graph::default(), place };
        draft.graph.inputs = inputs.iter().map(|_| draft.graph.add_value(Value::default())).collect();
        let ids = draft.graph.inputs.clone();
        let shape = |at: usize| inputs[at].map(|fact| fact.shape()).ok_or_else(|| invalid!("an input is missing"));
        draft.graph.outputs = match self.by_batch {
            true => {
                let n_own = 1 + self.n_carried + self.inputs.len();
                let batch = *shape(1)?.first().ok_or_else(|| invalid!("its input 2 has no batch"))?;
                for at in 1..n_own {
                    if shape(at)?.first() != Some(&batch) {
                        return Err(invalid!("its input {} is of another batch than {batch}", at + 1));
                    }
                }
                if batch == 0 {
                    return Err(unsupported!("its batch is empty"));
                }
                let mut parts = vec![Vec::new(); self.body.graph.outputs.len()];
                for at in 0..batch {
                    let number = draft.number(at as i64);
                    let of_one = |&id: &ValueId| draft.node(Gather { axis: 0 }.into(), &[id, number]);
                    let own: Vec<ValueId> = ids[1..n_own].iter().map(of_one).collect();
                    let captured = self.body.captures.iter().map(|&at| ids[at]).collect();
                    let shapes = (1..n_own).map(|at| Ok(&shape(at)?[1..])).collect::<Result<Vec<_>, OpError>>()?;
                    let outputs = self.one(&mut draft, own, captured, &shapes, None)?;
                    for (parts, output) in parts.iter_mut().zip(outputs) {
                        parts.push(Some(draft.node(Unsqueeze { axes: Some(vec![0]) }.into(), &[output])));
                    }
                }
                parts.into_iter().map(|parts| draft.join(parts)).collect()
            }
            false => {
                let n_own = self.n_carried + self.inputs.len();
                let captured = self.body.captures.iter().map(|&at| ids[at]).collect();
                let shapes = (0..n_own).map(shape).collect::<Result<Vec<_>, _>>()?;
                self.one(&mut draft, ids[..n_own].to_vec(), captured, &shapes, Some(inputs))?
            }
        };
        Ok(draft.graph)
    }

    /// Adds the loop for one sequence to a graph, and returns its outputs. Facts about the graph's inputs, if
    /// given, determine the ranks of outputs, which are needed to stack along any dimension but the first.
    fn one(
        &self,
        draft: &mut GraphDraft<'_>,
        own: Vec<ValueId>,
        captured: Vec<ValueId>,
        shapes: &[&[usize]],
        facts: Option<&[Option<Fact<'_>>]>,
    ) -> Result<Vec<ValueId>, OpError> {
        let mut n = None;
        for (at, along) in self.inputs.iter().enumerate() {
            let shape = shapes[self.n_carried + at];
            let found = shape[axis(along.axis, shape.len())?];
            if *n.get_or_insert(found) != found {
                let what = invalid!("its scanned inputs are of {} and {found} places, and should be alike", n.unwrap());
                return Err(what);
            }
        }
        let n = n.unwrap_or(0) as i64;
        let (carried, scanned) = own.split_at(self.n_carried);
        let body = self.body_of_loop(draft.place, n)?;
        let mut inputs = vec![Some(draft.number(n)), None];
        inputs.extend(carried.iter().chain(scanned).chain(&captured).map(|id| Some(*id)));
        let captures = (2 + self.n_carried..inputs.len()).collect();
        let op = Loop { body: Body { graph: Box::new(body), captures }, n_carried: self.n_carried };
        let outputs: Vec<ValueId> =
            self.body.graph.outputs.iter().map(|_| draft.graph.add_value(Value::default())).collect();
        let place = draft.place.clone();
        draft.graph.add_node(Node {
            op: op.into(),
            place,
            inputs,
            outputs: outputs.iter().map(|id| Some(*id)).collect(),
        });
        let (states, collected) = outputs.split_at(self.n_carried);
        let mut all = states.to_vec();
        let ranks: Option<Vec<usize>> = match facts {
            Some(facts) if self.outputs.iter().any(|along| along.axis != 0) => {
                let mut so_far = draft.graph.clone();
                so_far.outputs = collected.to_vec();
                Some(infer_graph(&so_far, facts)?.iter().map(|ty| ty.shape.len()).collect())
            }
            _ => None,
        };
        for (at, (&id, along)) in collected.iter().zip(&self.outputs).enumerate() {
            let mut id = id;
            if along.is_reverse {
                let places = draft.constant(Tensor::vector(&(0..n).rev().collect::<Vec<_>>()));
                id = draft.node(Gather { axis: 0 }.into(), &[id, places]);
            }
            if let Some(ranks) = ranks.as_ref().filter(|_| along.axis != 0) {
                let to = axis(along.axis, ranks[at])?;
                let order = (1..=to).chain([0]).chain(to + 1..ranks[at]).map(|from| from as i64).collect();
                id = draft.node(Transpose { order: Some(order) }.into(), &[id]);
            }
            all.push(id);
        }
        Ok(all)
    }

    /// Makes the graph of the loop: the body, preceded by slices at the position of each iteration.
    fn body_of_loop(&self, place: &Place, n: i64) -> Result<Graph, OpError> {
        let mut draft = GraphDraft { graph: Graph::default(), place };
        let n_captured = self.body.captures.len();
        let n_inputs = 2 + self.n_carried + self.inputs.len() + n_captured;
        draft.graph.inputs = (0..n_inputs).map(|_| draft.graph.add_value(Value::default())).collect();
        let ids = draft.graph.inputs.clone();
        let mut given = ids[2..2 + self.n_carried].to_vec();
        let mut from_end = None;
        for (along, &id) in self.inputs.iter().zip(&ids[2 + self.n_carried..]) {
            let at = match along.is_reverse {
                false => ids[0],
                true => *from_end.get_or_insert_with(|| {
                    let last = draft.number(n - 1);
                    draft.node(Op::Binary(Binary::Sub), &[last, ids[0]])
                }),
            };
            given.push(draft.node(Gather { axis: along.axis }.into(), &[id, at]));
        }
        given.extend(&ids[n_inputs - n_captured..]);
        let outputs = draft.put(&self.body.graph, &given);
        let goes_on = draft.constant(Tensor::from_integers(DType::Bool, [], &[1]));
        draft.graph.outputs = [goes_on].into_iter().chain(outputs).collect();
        Ok(draft.graph)
    }
}

impl Operation for Scan {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let none = TensorType::new(DType::Bool, []);
        infer_graph(&self.graph(inputs.0, &nowhere())?, &with_all(inputs.0, &none))
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let none = Tensor::from_integers(DType::Bool, [], &[0]);
        let given = known(inputs.0)?.into_iter().map(|tensor| tensor.unwrap_or_else(|| none.clone())).collect();
        carry_out(&self.graph(inputs.0, &nowhere())?, given)
    }
}

/// Place of nodes that occur in no message.
pub(super) fn nowhere() -> Place {
    Place { node: String::new(), operator: "Scan".to_owned(), opset: 0 }
}

/// Graph under construction whose nodes all come from one node of a model.
pub(crate) struct GraphDraft<'a> {
    /// Subgraph of the iterations.
    pub graph: Graph,
    /// Location of the node, for error messages.
    pub place: &'a Place,
}

impl GraphDraft<'_> {
    pub(super) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let ty = Some(tensor.ty().clone());
        self.graph.add_value(Value { ty, constant: Some(tensor), ..Value::default() })
    }

    pub(super) fn number(&mut self, number: i64) -> ValueId {
        self.constant(Tensor::from_integers(DType::I64, [], &[number.into()]))
    }

    pub(super) fn node(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.join_by(op, inputs.iter().map(|id| Some(*id)).collect())
    }

    pub(super) fn join_by(&mut self, op: Op, inputs: Vec<Option<ValueId>>) -> ValueId {
        let name = format!("{}.value{}", self.place.node, self.graph.values().len());
        let output = self.graph.add_value(Value { name, ..Value::default() });
        self.graph.add_node(Node { op, place: self.place.clone(), inputs, outputs: vec![Some(output)] });
        output
    }

    /// Adds a node of two outputs.
    pub(super) fn pair(&mut self, op: Op, inputs: &[ValueId]) -> [ValueId; 2] {
        let outputs = [0, 1].map(|_| self.graph.add_value(Value::default()));
        let [inputs, of_node] = [inputs, &outputs].map(|ids| ids.iter().map(|id| Some(*id)).collect());
        self.graph.add_node(Node { op, place: self.place.clone(), inputs, outputs: of_node });
        outputs
    }

    /// Concatenates tensors.
    fn join(&mut self, parts: Vec<Option<ValueId>>) -> ValueId {
        self.join_by(Concat { axis: 0 }.into(), parts)
    }

    /// Inlines another graph with the given inputs, and returns its outputs.
    fn put(&mut self, graph: &Graph, given: &[ValueId]) -> Vec<ValueId> {
        let mut map: Vec<ValueId> = Vec::with_capacity(graph.values().len());
        for (id, value) in graph.values() {
            let known = graph.inputs.iter().position(|input| *input == id).map(|at| given[at]);
            let added = || Value { producer: None, users: Vec::new(), ..value.clone() };
            map.push(known.unwrap_or_else(|| self.graph.add_value(added())));
        }
        let moved = |ids: &[Option<ValueId>]| ids.iter().map(|id| id.map(|id| map[id.0 as usize])).collect();
        for (_, node) in graph.nodes() {
            let (inputs, outputs) = (moved(&node.inputs), moved(&node.outputs));
            self.graph.add_node(Node { op: node.op.clone(), place: node.place.clone(), inputs, outputs });
        }
        graph.outputs.iter().map(|id| map[id.0 as usize]).collect()
    }
}

/// Makes a graph that stacks its inputs.
pub(crate) fn stacking(n: usize, place: &Place) -> Graph {
    let mut draft = GraphDraft { graph: Graph::default(), place };
    draft.graph.inputs = (0..n).map(|_| draft.graph.add_value(Value::default())).collect();
    let rows = draft.graph.inputs.clone();
    let rows = rows.iter().map(|&id| Some(draft.node(Unsqueeze { axes: Some(vec![0]) }.into(), &[id]))).collect();
    draft.graph.outputs = vec![draft.join(rows)];
    draft.graph
}
