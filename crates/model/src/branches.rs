//! Steps that only one branch of an `If` needs, and the conditions under which they run.

use tilewright_runtime::host::SELECT;

use crate::fuse::{Fused, Step};
use crate::net::{Kind, Node, ValueId};
use crate::value_memory::Places;

/// Boolean value, and the truth value that it must have.
pub type BranchCondition = (ValueId, bool);

/// Conditions that all readers of a value have in common, outermost first; `None` before any reader is known.
type Need = Option<Vec<BranchCondition>>;

/// Keeps the conditions that two needs have in common.
fn join(need: &mut Need, other: &[BranchCondition]) {
    match need {
        None => *need = Some(other.to_vec()),
        Some(need) => {
            let n_common = need.iter().zip(other).take_while(|(a, b)| a == b).count();
            need.truncate(n_common);
        }
    }
}

/// Finds the conditions under which the result of each step is used, outermost first; empty for unconditional
/// steps.
pub fn conditions(fused: &Fused, places: &Places) -> Vec<Vec<BranchCondition>> {
    let mut needs: Vec<Need> = vec![None; fused.net.values.len()];
    let root = |id: ValueId| places.locate(id).root.0;
    fused.net.outputs.iter().for_each(|id| needs[root(*id)] = Some(Vec::new()));
    let mut all = vec![Vec::new(); fused.steps.len()];
    for (at, step) in fused.steps.iter().enumerate().rev() {
        let (reads, writes) = uses(step);
        let mut own = None;
        if let Step::Again(round) = step {
            // The results of the last iteration are needed, and therefore those of all iterations before it.
            for id in round.values() {
                if let Some(need) = &needs[root(id)] {
                    join(&mut own, need);
                }
            }
            let own = own.unwrap_or_default();
            round.values().for_each(|id| needs[root(id)] = Some(own.clone()));
            all[at] = own;
            continue;
        }
        for id in writes {
            if let Some(need) = &needs[root(id)] {
                join(&mut own, need);
            }
        }
        let own = own.unwrap_or_default();
        for (id, condition) in reads {
            let inner: Vec<BranchCondition> = own.iter().copied().chain(condition).collect();
            join(&mut needs[root(id)], &inner);
        }
        all[at] = own;
    }
    all
}

/// Lists the values that a step reads, each with the condition under which it is read, and the values that
/// the step computes.
fn uses(step: &Step) -> (Vec<(ValueId, Option<BranchCondition>)>, Vec<ValueId>) {
    let always = |ids: Vec<ValueId>| ids.into_iter().map(|id| (id, None)).collect();
    match step {
        Step::Kernel(kernel) => (always(kernel.inputs.clone()), vec![kernel.output]),
        Step::Sequence(sequence) => {
            let (mut reads, mut writes) = (Vec::new(), Vec::new());
            for step in &sequence.steps {
                let (of_step, made) = uses(step);
                reads.extend(of_step.into_iter().map(|(id, _)| id));
                writes.extend(made);
            }
            reads.extend(sequence.moving.iter().flat_map(|moving| moving.first.into_iter().chain([moving.of])));
            writes.extend(sequence.moving.iter().map(|moving| moving.of));
            (always(reads), writes)
        }
        Step::Host(node) if is_selection(node) => {
            let truth = node.input(0);
            let reads =
                vec![(truth, None), (node.input(1), Some((truth, true))), (node.input(2), Some((truth, false)))];
            (reads, node.outputs.clone())
        }
        Step::Host(node) => (always(node.inputs.iter().flatten().copied().collect()), node.outputs.clone()),
        Step::Append { from, to, .. } | Step::Set { from, to } => (always(vec![*from]), vec![*to]),
        Step::While(round) => (always(vec![round.truth]), round.carried.clone()),
        Step::Again(round) => (always(vec![round.truth]), Vec::new()),
        Step::Part { .. } => (Vec::new(), Vec::new()),
        Step::Join { parts, whole } => (always(parts.clone()), vec![*whole]),
    }
}

/// Whether a node selects the results of one of two branches.
pub fn is_selection(node: &Node) -> bool {
    matches!(&node.kind, Kind::Call(call) if call.operator.name == SELECT.name)
}
