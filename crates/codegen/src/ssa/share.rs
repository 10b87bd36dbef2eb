//! Common subexpression elimination.

use std::hash::{Hash, Hasher};

use super::{Def, Function, Id, Op, Operands};
use crate::map::{Map, Mixer};

impl Function {
    /// Eliminates common subexpressions within blocks, and drops choices that change nothing.
    pub fn share(&mut self) {
        let Function { values, blocks, .. } = self;
        let mut same_as: Vec<Id> = (0..values.len()).map(Id::new).collect();
        let mut variables = vec![false; values.len()];
        // Loads of no lanes but those in a mask, with the mask.
        let mut masked: Map<Id, Id> = Map::default();
        let is_zero = |id: Id| matches!(&values[id.at()].def, Def::Constant(c) if c.bits.iter().all(|b| *b == 0));
        for block in blocks.iter_mut() {
            // By hash: the operation, its operands, how often memory was written before, and the value.
            let mut known: Map<u64, (Op, Operands, u32, Id)> = Map::default();
            let mut n_writes = 0;
            block.retain_mut(|inst| {
                for id in &mut inst.operands {
                    *id = same_as[id.at()];
                }
                let Some(result) = inst.result else {
                    n_writes += match inst.op {
                        Op::Prefetch { .. } => 0,
                        Op::Store => u32::from(!variables[inst.operands[1].at()]),
                        _ => 1,
                    };
                    return true;
                };
                let when = match inst.op {
                    Op::Variable(_) => {
                        variables[result.at()] = true;
                        return true;
                    }
                    Op::Load { .. } if variables[inst.operands[0].at()] => return true,
                    Op::Stack(_) | Op::Phi(_) | Op::Call | Op::Bitcast | Op::Opaque | Op::Assembly(_) => return true,
                    Op::GroupFence | Op::GroupProduct { .. } | Op::GroupWait(_) => return true,
                    Op::Load { invariant: false } | Op::MaskedLoad | Op::Gather => n_writes,
                    _ => 0,
                };
                if let (Op::Select, [cond, a, b]) = (&inst.op, inst.operands.as_slice())
                    && masked.get(a) == Some(cond)
                    && is_zero(*b)
                {
                    same_as[result.at()] = *a;
                    return false;
                }
                let ty = values[result.at()].ty;
                let mut hasher = Mixer::default();
                (&inst.op, &inst.operands, when, ty).hash(&mut hasher);
                let hash = hasher.finish();
                match known.get(&hash) {
                    Some((op, operands, then, id))
                        if *op == inst.op
                            && *operands == inst.operands
                            && *then == when
                            && values[id.at()].ty == ty =>
                    {
                        same_as[result.at()] = *id;
                        return false;
                    }
                    _ => {
                        known.insert(hash, (inst.op.clone(), inst.operands.clone(), when, result));
                    }
                }
                if matches!(inst.op, Op::MaskedLoad | Op::Gather) && is_zero(inst.operands[2]) {
                    masked.insert(result, inst.operands[1]);
                }
                true
            });
        }
        // Phis refer to what comes later.
        for id in blocks.iter_mut().flatten().flat_map(|inst| &mut inst.operands) {
            *id = same_as[id.at()];
        }
    }
}
