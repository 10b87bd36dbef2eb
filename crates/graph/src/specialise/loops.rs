//! Specialisation of loops: they are folded if all inputs are constant, unrolled if they are short or must
//! be, and else kept with a subgraph of concrete types.

use bytes::Bytes;

use super::{Specialiser, Varies, pruned, sources, within};
use crate::error::{invalid, unsupported};
use crate::evaluate::check_types;
use crate::op::{Body, Fact, Inputs, Loop, Operation, no_tensor, stacking};
use crate::{DType, Graph, Node, OpError, Problem, Reason, Tensor, TensorType, Value, ValueId};

/// Number of iterations up to which a loop is always unrolled.
const SHORT: i64 = 8;
/// Maximum number of nodes, over all iterations, of a longer loop that is unrolled.
const FEW_NODES: usize = 256;
/// Maximum number of nodes, and of iterations, of a loop that must be unrolled.
const MOST_NODES: usize = 1 << 14;

/// Subgraph of a loop with concrete types, which are the same in each iteration.
struct Fixed {
    graph: Graph,
    /// Indices, among all captured inputs, of those that it reads.
    kept: Vec<usize>,
    /// Types of its outputs.
    types: Vec<TensorType>,
    /// Condition after an iteration, if it is constant.
    goes_on: Option<bool>,
}

/// Type of an input, and its elements if they are known.
type KnownInput = Option<(TensorType, Option<Tensor>)>;

impl Specialiser {
    /// Lowers a loop; returns the values that replace its outputs.
    pub(super) fn repeated(
        &mut self,
        old: &Graph,
        op: &Loop,
        node: &Node,
        inputs: &[Option<ValueId>],
    ) -> Result<Vec<Option<ValueId>>, Reason> {
        let known: Vec<KnownInput> = inputs
            .iter()
            .map(|id| {
                let value = self.graph.value((*id)?);
                Some((value.ty.clone()?, value.constant.clone()))
            })
            .collect();
        let facts: Vec<Option<Fact<'_>>> =
            known.iter().map(|known| known.as_ref().map(|(ty, value)| Fact { ty, value: value.as_ref() })).collect();
        let given = Inputs(&facts);
        let texts: Vec<_> = inputs.iter().map(|id| self.graph.value((*id)?).texts.as_ref()).collect();
        node.op.texts(&texts)?;
        let (most, begins) = (op.most(given)?, op.begins(given)?);
        let is_sequence = |id: &ValueId| self.graph.value(*id).parts.is_some();
        // Sequences differ from iteration to iteration.
        let fixed = match inputs.iter().flatten().any(is_sequence) {
            true => Err(no_tensor()),
            false => self.fixed(op, &facts),
        };
        if let Err(error @ OpError::Invalid(_)) = fixed {
            return Err(error.into());
        }
        let goes_on = fixed.as_ref().ok().and_then(|fixed| fixed.goes_on);
        let n = match (most, begins, goes_on) {
            (_, Some(false), _) | (Some(Some(0)), ..) => Some(0),
            (Some(_), Some(true), Some(false)) => Some(1),
            (Some(Some(n)), Some(true), Some(true)) => Some(n),
            (Some(None), Some(true), Some(true)) => {
                return Err(
                    invalid!("it never ends: nothing says how often it repeats, and its condition holds").into()
                );
            }
            _ => None,
        };
        let is_read = |at: usize| {
            let output = node.outputs.get(at).copied().flatten();
            output.is_some_and(|id| !old.value(id).users.is_empty() || old.outputs.contains(&id))
        };
        let n_outputs = op.body.graph.outputs.len() - 1;
        let collects = (op.n_carried..n_outputs).any(is_read);
        if n == Some(0) {
            return Ok(self.none(op, &fixed?.types, inputs));
        }
        let varies = self.graph.varies(inputs).any();
        if let (Ok(_), false, Some(tensors)) = (&fixed, varies, self.folded(op, given, &known, n, collects)) {
            return Ok(tensors?.into_iter().map(|tensor| Some(self.constant(tensor))).collect());
        }
        // Unrolling can end only if the number of iterations is bounded, or the condition is computed in each
        // iteration. As many iterations as the open dimension is long stay a loop.
        let is_open = n.is_some_and(|n| n > 1 && self.graph.open_size == Some(n as usize));
        let is_bounded = most.flatten().is_some() || (most.is_some() && goes_on.is_none());
        let may_end = begins == Some(true) && is_bounded && !is_open;
        if may_end {
            let must = fixed.is_err() || self.unrolls || n.is_none() && collects;
            if let Some(outputs) = self.unrolled(op, inputs, most.flatten(), must)? {
                return Ok(outputs);
            }
        }
        let fixed = fixed.map_err(|error| {
            let unrolled = format!("iterations that differ are unrolled, {MOST_NODES} nodes at most");
            let mend = "let all have the same shapes, or end it after a known number";
            unsupported!("{error}; {unrolled}, and it is not known how many these are, or too many ({mend})")
        })?;
        if n.is_none() && collects {
            let error = unsupported!(
                "what it collects has as many rows as it has iterations, which are known only when it runs \
                 (let their number be known, or carry a tensor with room for the most)"
            );
            let inputs = inputs[0].map_or(Vec::new(), |id| sources(&self.graph, id));
            return Err(Reason::NeedsInput { error, inputs });
        }
        Ok(self.kept(old, op, node, inputs, fixed, n)?)
    }

    pub(super) fn constant(&mut self, tensor: Tensor) -> ValueId {
        let ty = Some(tensor.ty().clone());
        self.graph.add_value(Value { ty, constant: Some(tensor), ..Value::default() })
    }

    /// Outputs of a loop without iterations.
    fn none(&mut self, op: &Loop, types: &[TensorType], inputs: &[Option<ValueId>]) -> Vec<Option<ValueId>> {
        let mut outputs = inputs[2..2 + op.n_carried].to_vec();
        for ty in &types[1 + op.n_carried..] {
            let none = TensorType::new(ty.dtype, [&[0], &ty.shape[..]].concat());
            let tensor = Tensor::new(none, Bytes::new()).expect("no elements are no bytes");
            outputs.push(Some(self.constant(tensor)));
        }
        outputs
    }

    /// Outputs of a loop whose inputs are all known, if the outputs are small and no large tensor is read.
    fn folded(
        &self,
        op: &Loop,
        given: Inputs<'_>,
        known: &[KnownInput],
        n: Option<i64>,
        collects: bool,
    ) -> Option<Result<Vec<Tensor>, OpError>> {
        let is_small = |ty: &TensorType| ty.checked_bytes().is_some_and(|n| n <= self.fold_bytes);
        let is_known = known.iter().flatten().all(|(ty, value)| value.is_some() && is_small(ty));
        let n_rows = if collects { n? } else { 1 };
        let is_few = n_rows as u64 <= self.fold_bytes as u64;
        if !is_known || !is_few {
            return None;
        }
        match op.evaluate(given) {
            Ok(tensors) => tensors.iter().all(|tensor| is_small(tensor.ty())).then_some(Ok(tensors)),
            Err(OpError::Unsupported(_)) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Makes the subgraph of a loop whose iterations all have the same types.
    fn fixed(&self, op: &Loop, facts: &[Option<Fact<'_>>]) -> Result<Fixed, OpError> {
        let body = &op.body.graph;
        let mut job =
            Specialiser { takes_both: self.takes_both, unrolls: self.unrolls, ..Specialiser::new(self.fold_bytes) };
        job.graph.name.clone_from(&body.name);
        let mut map: Vec<Option<ValueId>> = vec![None; body.values().len()];
        let mut types = op.own_types();
        for at in 2..2 + op.n_carried {
            types.push(Inputs(facts).ty(at)?.clone());
        }
        for (&id, ty) in body.inputs.iter().zip(&types) {
            let value = Value { name: body.value(id).name.clone(), ty: Some(ty.clone()), ..Value::default() };
            let new = job.graph.add_value(value);
            job.graph.inputs.push(new);
            map[id.0 as usize] = Some(new);
        }
        // The condition holds within an iteration.
        let holds = Tensor::from_integers(DType::Bool, types[1].shape.clone(), &vec![1; types[1].n_elements()]);
        map[body.inputs[1].0 as usize] = Some(job.constant(holds));
        let mut kept = Vec::new();
        for (at, (&id, fact)) in body.inputs[types.len()..].iter().zip(op.body.captured(facts)).enumerate() {
            let fact = fact.ok_or_else(|| invalid!("its graph reads a value that does not exist"))?;
            let (name, ty) = (body.value(id).name.clone(), Some(fact.ty.clone()));
            let new = job.graph.add_value(Value { name, ty, constant: fact.value.cloned(), ..Value::default() });
            map[id.0 as usize] = Some(new);
            if fact.value.is_none() {
                job.graph.inputs.push(new);
                kept.push(at);
            }
        }
        job.walk(body, &mut map);
        for &id in &body.outputs {
            match job.mapped(body, &mut map, id) {
                Some(new) if job.graph.value(new).parts.is_some() => return Err(no_tensor()),
                Some(new) => job.graph.outputs.push(new),
                None => {
                    let problem = job.problems.into_iter().next();
                    return Err(problem.map_or_else(|| invalid!("its graph lacks an output"), within));
                }
            }
        }
        let graph = pruned(&job.graph);
        let gives: Vec<TensorType> = graph.outputs.iter().map(|id| graph.ty(*id).clone()).collect();
        if gives[0].dtype != DType::Bool || gives[0].checked_len() != Some(1) {
            return Err(invalid!("its graph gives {} as condition, which is not one truth", gives[0]));
        }
        for (at, (before, after)) in types[2..].iter().zip(&gives[1..]).enumerate() {
            check_carried(op, at, before, after)?;
            if before != after {
                return Err(unsupported!("its {} is {before} and becomes {after}", op.what(at)));
            }
        }
        let goes_on = graph.value(graph.outputs[0]).constant.as_ref().map(|truth| truth.integers()[0] != 0);
        Ok(Fixed { graph, kept, types: gives, goes_on })
    }

    /// Unrolls a loop as long as it is known to continue. `None` if that is not known, or there are too many
    /// iterations; with `must`, more are allowed.
    fn unrolled(
        &mut self,
        op: &Loop,
        inputs: &[Option<ValueId>],
        most: Option<i64>,
        must: bool,
    ) -> Result<Option<Vec<Option<ValueId>>>, Reason> {
        let (n_nodes, n_problems) = (self.graph.nodes().len(), self.problems.len());
        let n_collected = op.body.graph.outputs.len() - 1 - op.n_carried;
        let mut carried = inputs[2..2 + op.n_carried].to_vec();
        let mut rows: Vec<Vec<Option<ValueId>>> = vec![Vec::new(); n_collected];
        let own = op.own_types();
        for iteration in 0.. {
            let n_new = self.graph.nodes().len() - n_nodes;
            let is_affordable = match must {
                true => n_new <= MOST_NODES && iteration <= MOST_NODES as i64,
                false => iteration < SHORT || n_new <= FEW_NODES && iteration <= FEW_NODES as i64,
            };
            if !is_affordable || iteration == 1 && !must && self.is_too_long(n_new, most) {
                return Ok(None);
            }
            let number = self.constant(Tensor::from_integers(DType::I64, own[0].shape.clone(), &[iteration.into()]));
            let holds = self.constant(Tensor::from_integers(DType::Bool, own[1].shape.clone(), &[1]));
            let mut given = vec![Some(number), Some(holds)];
            given.extend(carried.iter().copied().chain(op.body.captured(inputs)));
            let outputs = self.inline(&op.body.graph, &given);
            if self.problems.len() > n_problems || outputs.contains(&None) {
                let problem = self.problems.drain(n_problems..).next();
                return Err(
                    problem.map_or_else(|| invalid!("its graph lacks an output").into(), in_iteration(iteration))
                );
            }
            for (at, (before, after)) in carried.iter().zip(&outputs[1..]).enumerate() {
                let ty = |id: &Option<ValueId>| self.graph.value(id.expect("it is there")).ty.as_ref();
                match (ty(before), ty(after)) {
                    (Some(before), Some(after)) => check_carried(op, at, before, after)?,
                    (None, None) => {}
                    _ => return Err(no_tensor().into()),
                }
            }
            carried.copy_from_slice(&outputs[1..=op.n_carried]);
            rows.iter_mut().zip(&outputs[1 + op.n_carried..]).for_each(|(rows, row)| rows.push(*row));
            let condition = self.graph.value(outputs[0].expect("it is there"));
            let condition = condition.constant.as_ref().map(|truth| truth.integers().first() == Some(&1));
            match condition {
                _ if most == Some(iteration + 1) => break,
                Some(true) => {}
                Some(false) => break,
                None => return Ok(None),
            }
        }
        for rows in rows {
            let place = crate::Place { node: String::new(), operator: "Loop".to_owned(), opset: 0 };
            let whole = self.inline(&stacking(rows.len(), &place), &rows);
            if let Some(problem) = self.problems.drain(n_problems..).next() {
                return Err(invalid!("rows of what it collects differ: {}", problem.reason).into());
            }
            carried.extend(whole);
        }
        Ok(Some(carried))
    }

    /// Whether a loop that need not be unrolled has too many nodes to be, given the number of nodes of an
    /// iteration.
    fn is_too_long(&self, n_nodes: usize, most: Option<i64>) -> bool {
        most.is_some_and(|most| most > SHORT && n_nodes.saturating_mul(most as usize) > FEW_NODES)
    }

    /// Keeps a loop, with its subgraph of concrete types.
    fn kept(
        &mut self,
        old: &Graph,
        op: &Loop,
        node: &Node,
        inputs: &[Option<ValueId>],
        fixed: Fixed,
        n: Option<i64>,
    ) -> Result<Vec<Option<ValueId>>, OpError> {
        let captured = op.body.captured(inputs);
        let n_own = 2 + op.n_carried;
        let mut given = inputs[..n_own].to_vec();
        given.extend(fixed.kept.iter().map(|&at| captured[at]));
        let captures = (n_own..given.len()).collect();
        let mut types: Vec<TensorType> = fixed.types[1..=op.n_carried].to_vec();
        // If their number is unknown, the rows are not read.
        let rows = |ty: &TensorType| {
            TensorType::new(
                ty.dtype,
                [&[usize::try_from(n.unwrap_or(0)).unwrap_or(usize::MAX)], &ty.shape[..]].concat(),
            )
        };
        types.extend(fixed.types[1 + op.n_carried..].iter().map(rows));
        check_types(&types, node.outputs.len())?;
        let varies = self.graph.varies(&given).any();
        let varies = Varies { shape: varies, elements: varies };
        let outputs = types.into_iter().enumerate().map(|(at, ty)| {
            let id = node.outputs.get(at).copied().flatten()?;
            if n.is_none() && at >= op.n_carried {
                return None;
            }
            let (name, declared) = (old.value(id).name.clone(), old.value(id).declared.clone());
            Some(self.graph.add_value(Value { name, declared, ty: Some(ty), varies, ..Value::default() }))
        });
        let outputs: Vec<Option<ValueId>> = outputs.collect();
        let op = Loop { body: Body { graph: Box::new(fixed.graph), captures }, n_carried: op.n_carried };
        let place = node.place.clone();
        self.graph.add_node(Node { op: op.into(), place, inputs: given, outputs: outputs.clone() });
        Ok(outputs)
    }
}

/// Checks that a carried value keeps its element type.
fn check_carried(op: &Loop, at: usize, before: &TensorType, after: &TensorType) -> Result<(), OpError> {
    match before.dtype == after.dtype {
        true => Ok(()),
        false => Err(invalid!("its {} is {}, and becomes {} (cast it)", op.what(at), before.dtype, after.dtype)),
    }
}

/// Attributes a problem in a loop's subgraph to an iteration.
fn in_iteration(iteration: i64) -> impl Fn(Problem) -> Reason {
    move |problem| match within(problem) {
        OpError::Invalid(what) => invalid!("in iteration {iteration}: {what}").into(),
        OpError::Unsupported(what) => unsupported!("in iteration {iteration}: {what}").into(),
        error => error.into(),
    }
}
