//! Specialisation of operators on sequences: the tensors of each sequence are known, so that no sequences
//! remain.

use super::{Specialiser, facts_of, may_fold};
use crate::evaluate::check_types;
use crate::op::{Elements, Inputs, Item, Op, Unary, no_tensor};
use crate::{Graph, Node, OpError, Place, Tensor, TensorType, Value, ValueId};

impl Specialiser {
    /// Replaces a node that reads or makes a sequence by its results. Returns whether the node is such a one.
    pub(super) fn sequence(
        &mut self,
        old: &Graph,
        node: &Node,
        inputs: &[Option<ValueId>],
        map: &mut [Option<ValueId>],
    ) -> Result<bool, OpError> {
        let new = match &node.op {
            Op::Sequence(op) => {
                let item = |id: &ValueId| match &self.graph.value(*id).parts {
                    Some(parts) => Item::Many(parts.clone()),
                    None => Item::One(*id),
                };
                let items: Vec<Option<Item<ValueId>>> = inputs.iter().map(|id| id.as_ref().map(item)).collect();
                match op.of(&items, &mut Parts { job: self, place: &node.place })? {
                    Item::One(id) => Some(id),
                    Item::Many(parts) => {
                        let name = node.outputs.first().copied().flatten().map(|id| old.value(id).name.clone());
                        let name = name.unwrap_or_default();
                        Some(self.graph.add_value(Value { name, parts: Some(parts), ..Value::default() }))
                    }
                }
            }
            op => {
                let is_sequence = |id: &&ValueId| self.graph.value(**id).parts.is_some();
                match (op, inputs.iter().flatten().find(is_sequence)) {
                    (_, None) => return Ok(false),
                    (Op::Unary(Unary::Identity), found) => found.copied(),
                    (_, Some(_)) => return Err(no_tensor()),
                }
            }
        };
        if let Some(Some(output)) = node.outputs.first() {
            map[output.0 as usize] = new;
        }
        Ok(true)
    }
}

/// Access to the tensors of a graph that is being specialised.
struct Parts<'a> {
    job: &'a mut Specialiser,
    /// Place of the node on sequences.
    place: &'a Place,
}

impl Elements for Parts<'_> {
    type Element = ValueId;

    fn ty(&self, of: &ValueId) -> Result<TensorType, OpError> {
        self.job.graph.value(*of).ty.clone().ok_or_else(no_tensor)
    }

    fn known(&self, of: &ValueId) -> Option<Tensor> {
        self.job.graph.value(*of).constant.clone()
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        self.job.constant(tensor)
    }

    fn computed(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let facts = facts_of(&self.job.graph, &inputs);
        let types = op.operation().infer(Inputs(&facts))?;
        check_types(&types, 1)?;
        let varies = self.job.varies(&op, &inputs);
        let is_known = facts.iter().all(|fact| fact.is_some_and(|fact| fact.value.is_some()));
        let is_small = types[0].checked_bytes().is_some_and(|n| n <= self.job.fold_bytes);
        let name = self.place.node.clone();
        if is_known && is_small && may_fold(&op, Inputs(&facts), &types, varies) {
            let constant = Some(op.operation().evaluate(Inputs(&facts))?.remove(0));
            let ty = Some(types[0].clone());
            return Ok(self.job.graph.add_value(Value { name, ty, constant, varies, ..Value::default() }));
        }
        let ty = types.into_iter().next();
        let new = self.job.graph.add_value(Value { name, ty, varies, ..Value::default() });
        let place = self.place.clone();
        self.job.graph.add_node(Node { op, place, inputs, outputs: vec![Some(new)] });
        Ok(new)
    }
}
