//! Common subexpression elimination.

use std::hash::{Hash, Hasher};

use super::{Def, Function, Id, InstOperands, SsaOp};
use crate::map::{Map, Mixer};

impl Function {
    /// Eliminates common subexpressions within blocks, and selects of equal values.
    pub fn share(&mut self) {
        let Function { values, blocks, .. } = self;
        let mut same_as: Vec<Id> = (0..values.len()).map(Id::new).collect();
        let mut variables = vec![false; values.len()];
        // Masked loads, with their masks.
        let mut masked: Map<Id, Id> = Map::default();
        let is_zero = |id: Id| matches!(&values[id.at()].def, Def::Constant(c) if c.bits.iter().all(|b| *b == 0));
        for block in blocks.iter_mut() {
            // Operation, operands, number of preceding memory writes, and value, by hash.
            let mut known: Map<u64, (SsaOp, InstOperands, u32, Id)> = Map::default();
            let mut n_writes = 0;
            block.retain_mut(|inst| {
                for id in &mut inst.operands {
                    *id = same_as[id.at()];
                }
                let Some(result) = inst.result else {
                    n_writes += match inst.op {
                        SsaOp::Prefetch { .. } => 0,
                        SsaOp::Store => u32::from(!variables[inst.operands[1].at()]),
                        _ => 1,
                    };
                    return true;
                };
                let when = match inst.op {
                    SsaOp::Variable(_) => {
                        variables[result.at()] = true;
                        return true;
                    }
                    SsaOp::Load { .. } if variables[inst.operands[0].at()] => return true,
                    SsaOp::Stack(_)
                    | SsaOp::Phi(_)
                    | SsaOp::Call
                    | SsaOp::Bitcast
                    | SsaOp::Opaque
                    | SsaOp::Assembly(_) => return true,
                    SsaOp::GroupFence | SsaOp::GroupProduct { .. } | SsaOp::GroupWait(_) => return true,
                    SsaOp::Load { invariant: false } | SsaOp::MaskedLoad | SsaOp::Gather => n_writes,
                    _ => 0,
                };
                if let (SsaOp::Select, [cond, a, b]) = (&inst.op, inst.operands.as_slice())
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
                if matches!(inst.op, SsaOp::MaskedLoad | SsaOp::Gather) && is_zero(inst.operands[2]) {
                    masked.insert(result, inst.operands[1]);
                }
                true
            });
        }
        // Phis may refer to later values.
        for id in blocks.iter_mut().flatten().flat_map(|inst| &mut inst.operands) {
            *id = same_as[id.at()];
        }
    }
}
