//! Steps of a loop: those of an iteration, between its start and end.

use std::collections::HashMap;

use tilewright_ir::op::WorkloadError;
use tilewright_runtime::HostCall;
use tilewright_runtime::host::{HostOperator, ITERATE, PUT};

use super::{Fused, Kernel, Moving, Step, Steps, fuse};
use crate::net::{Kind, Net, Node, Repeat, ValueId};
use crate::rules::{Trace, simplify};

/// Loop of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunLoop {
    /// Condition, checked before each iteration.
    pub truth: ValueId,
    /// Loop-carried values.
    pub carried: Vec<ValueId>,
    /// Tensors that collect a row from each iteration.
    pub collected: Vec<ValueId>,
    /// Number of iterations, if known.
    pub n: Option<i64>,
}

/// Makes the steps of a loop, whose values become values of the enclosing net.
pub(super) fn steps_of_loop(
    net: &mut Net,
    node: &Node,
    repeat: &Repeat,
    trace: &mut Trace,
) -> Result<Vec<Step>, WorkloadError> {
    let mut body = repeat.body.clone();
    trace.within(&node.origin, simplify(&mut body));
    let Fused { net: body, steps: of_body, trace: of_trace, .. } = fuse(body)?;
    trace.within(&node.origin, of_trace);
    let n_own = 2 + repeat.n_carried;
    let captured: HashMap<ValueId, ValueId> = (n_own..body.inputs.len())
        .map(|at| (body.inputs[at], node.inputs[at].expect("what is captured is there")))
        .collect();
    let mut ids = Vec::with_capacity(body.values.len());
    for (at, value) in body.values.iter().enumerate() {
        ids.push(captured.get(&ValueId(at)).copied().unwrap_or_else(|| {
            net.values.push(value.clone());
            ValueId(net.values.len() - 1)
        }));
    }
    let outer = |id: ValueId| ids[id.0];
    let (number, truth) = (outer(body.inputs[0]), outer(body.inputs[1]));
    let before: Vec<ValueId> = body.inputs[2..n_own].iter().map(|id| outer(*id)).collect();
    let after: Vec<ValueId> = body.outputs[1..].iter().map(|id| outer(*id)).collect();
    let (after, rows) = after.split_at(repeat.n_carried);
    let (finals, collected) = node.outputs.split_at(repeat.n_carried);
    let condition = outer(body.outputs[0]);
    let always = net.scalar(condition) == Some(1.0);
    let round = RunLoop {
        truth,
        carried: [number, truth].into_iter().chain(before.iter().copied()).collect(),
        collected: collected.to_vec(),
        n: repeat.n,
    };
    let of_body: Vec<Step> = of_body.into_iter().map(|step| renamed(step, &outer)).collect();
    let mut parents: HashMap<ValueId, ValueId> = HashMap::new();
    for step in &of_body {
        if let Step::Part { of, part, .. } = step {
            parents.insert(*part, *of);
        }
    }
    let root = |mut id: ValueId| {
        while let Some(of) = parents.get(&id) {
            id = *of;
        }
        id
    };
    let call = |operator: HostOperator, parameters: Vec<i64>, inputs: &[Option<ValueId>], outputs: &[ValueId]| {
        let call = HostCall { operator, parameters, sizes: Vec::new(), scratch_bytes: 0 };
        let inputs = inputs.iter().flatten().map(|id| Some(*id)).collect();
        let (kind, origin) = (Kind::Call(Box::new(call)), node.origin.clone());
        Step::Host(Node { kind, inputs, outputs: outputs.to_vec(), origin })
    };
    let iterate = |condition: Option<ValueId>, is_first: bool| {
        let given = [node.inputs[0], condition];
        let mut parameters: Vec<i64> = given.iter().map(|id| id.is_some().into()).collect();
        parameters.push(is_first.into());
        call(ITERATE, parameters, &given, &[number, truth])
    };
    let mut steps = Vec::new();
    for (at, &to) in before.iter().enumerate() {
        steps.push(Step::Set { from: node.input(2 + at), to });
    }
    steps.extend([iterate(node.inputs[1], true), Step::While(round.clone())]);
    steps.extend(of_body);
    for (&row, &whole) in rows.iter().zip(collected) {
        let parameters = vec![net.value(row).n_bytes() as i64, net.shape(whole)[0]];
        steps.push(call(PUT, parameters, &[Some(row), Some(number)], &[whole]));
    }
    // A loop-carried value that another update reads is copied before it is overwritten.
    let mut sets = Vec::new();
    for (&from, &to) in after.iter().zip(&before) {
        if root(from) == to && net.value(from).n_bytes() == net.value(to).n_bytes() {
            continue;
        }
        let mut from = from;
        if round.carried.contains(&root(from)) {
            net.values.push(net.value(from).clone());
            let copy = ValueId(net.values.len() - 1);
            steps.push(Step::Set { from, to: copy });
            from = copy;
        }
        sets.push(Step::Set { from, to });
    }
    steps.push(iterate(Some(condition).filter(|_| !always), false));
    steps.extend(sets);
    steps.push(Step::Again(round));
    steps.extend(before.iter().zip(finals).map(|(&of, &part)| Step::Part { of, part, offset: 0 }));
    Ok(steps)
}

/// Renames the values of a step.
fn renamed(step: Step, outer: &dyn Fn(ValueId) -> ValueId) -> Step {
    let all = |ids: Vec<ValueId>| ids.into_iter().map(outer).collect::<Vec<_>>();
    match step {
        Step::Kernel(kernel) => {
            Step::Kernel(Kernel { inputs: all(kernel.inputs.clone()), output: outer(kernel.output), ..kernel })
        }
        Step::Sequence(sequence) => {
            let moving = |moving: Moving| Moving {
                value: outer(moving.value),
                of: outer(moving.of),
                first: moving.first.map(outer),
                ..moving
            };
            Step::Sequence(Steps {
                n_steps: sequence.n_steps,
                steps: sequence.steps.into_iter().map(|step| renamed(step, outer)).collect(),
                moving: sequence.moving.into_iter().map(moving).collect(),
                nodes: sequence.nodes.iter().map(|node| node.renamed(outer)).collect(),
            })
        }
        Step::Host(node) => Step::Host(node.renamed(outer)),
        Step::Append { from, to, axis } => Step::Append { from: outer(from), to: outer(to), axis },
        Step::Set { from, to } => Step::Set { from: outer(from), to: outer(to) },
        Step::Part { of, part, offset } => Step::Part { of: outer(of), part: outer(part), offset },
        Step::Join { parts, whole } => Step::Join { parts: all(parts), whole: outer(whole) },
        Step::While(round) => Step::While(round.renamed(outer)),
        Step::Again(round) => Step::Again(round.renamed(outer)),
    }
}

impl RunLoop {
    /// Values that a loop itself reads and writes, besides those of its steps.
    pub fn values(&self) -> impl Iterator<Item = ValueId> {
        self.carried.iter().chain(&self.collected).copied()
    }

    fn renamed(self, outer: &dyn Fn(ValueId) -> ValueId) -> RunLoop {
        let all = |ids: Vec<ValueId>| ids.into_iter().map(outer).collect();
        RunLoop { truth: outer(self.truth), carried: all(self.carried), collected: all(self.collected), n: self.n }
    }
}
