//! Verifier of functions: each value is defined once, before its uses, and operands have the types that their
//! operations require.

use super::{BlockId, Def, Function, Id, Instruction, LaneKind, Module, SsaOp, Type};

impl Module {
    /// Checks all functions.
    ///
    /// # Errors
    /// A description of the error and its location if a function is malformed, which is a bug of the
    /// generator.
    pub fn verify(&self) -> Result<(), String> {
        let defined = self.functions.iter().filter(|f| !f.is_outside());
        defined.into_iter().try_for_each(|f| f.verify().map_err(|why| format!("{}: {why}", f.name)))
    }
}

impl Function {
    fn verify(&self) -> Result<(), String> {
        let order = self.order();
        let dominators = self.dominators(&order);
        // Block and position of each value's instruction.
        let mut given: Vec<Option<(BlockId, usize)>> = vec![None; self.values.len()];
        for &block in &order {
            for (at, instruction) in self.blocks[block.at()].iter().enumerate() {
                if let Some(id) = instruction.result
                    && given[id.at()].replace((block, at)).is_some()
                {
                    return Err(format!("v{} is given twice", id.at()));
                }
            }
        }
        let dominates = |a: BlockId, mut b: BlockId| {
            while b != a && b.at() != 0 {
                b = dominators[b.at()];
            }
            a == b
        };
        for &block in &order {
            let instructions = &self.blocks[block.at()];
            for (at, instruction) in instructions.iter().enumerate() {
                let wrong = |why: &str| format!("b{}, {:?}: {why}", block.at(), instruction.op);
                let is_last = at + 1 == instructions.len();
                if is_last != matches!(instruction.op, SsaOp::Br(_) | SsaOp::CondBr(..) | SsaOp::Return) {
                    return Err(wrong("a block ends where control leaves it, and nowhere else"));
                }
                for (operand, id) in instruction.operands.iter().enumerate() {
                    if self.values[id.at()].def != Def::Instruction {
                        continue;
                    }
                    let Some((from, place)) = given[id.at()] else { return Err(wrong("a value that nothing gives")) };
                    let reaches = match &instruction.op {
                        SsaOp::Phi(blocks) => dominates(from, blocks[operand]),
                        _ if from == block => place < at,
                        _ => dominates(from, block),
                    };
                    if !reaches {
                        return Err(wrong(&format!("v{} is not given on every way here", id.at())));
                    }
                }
                if !self.has_fitting_types(instruction) {
                    return Err(wrong("types that do not fit"));
                }
            }
        }
        Ok(())
    }

    /// Immediate dominator of each block; the first block is its own.
    ///
    /// Source: Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm" (2001).
    fn dominators(&self, order: &[BlockId]) -> Vec<BlockId> {
        let first = BlockId::new(0);
        let mut number = vec![usize::MAX; self.blocks.len()];
        order.iter().enumerate().for_each(|(n, b)| number[b.at()] = n);
        let mut before: Vec<Vec<BlockId>> = vec![Vec::new(); self.blocks.len()];
        for &b in order {
            self.successors(b).for_each(|next| before[next.at()].push(b));
        }
        let mut closest: Vec<Option<BlockId>> = vec![None; self.blocks.len()];
        closest[0] = Some(first);
        let mut changed = true;
        while changed {
            changed = false;
            for &b in &order[1..] {
                let mut ways = before[b.at()].iter().copied().filter(|p| closest[p.at()].is_some());
                let way = ways.next().expect("control comes from somewhere");
                let common = ways.fold(way, |mut x, mut y| {
                    while x != y {
                        let late = if number[x.at()] > number[y.at()] { &mut x } else { &mut y };
                        *late = closest[late.at()].expect("it comes earlier");
                    }
                    x
                });
                changed |= closest[b.at()].replace(common) != Some(common);
            }
        }
        closest.into_iter().map(|b| b.unwrap_or(first)).collect()
    }

    fn has_fitting_types(&self, instruction: &Instruction) -> bool {
        let Instruction { op, operands, result, .. } = instruction;
        let of = |id: &Id| self.values[id.at()].ty;
        let x: Vec<Type> = operands.iter().map(of).collect();
        let to = result.as_ref().map(of);
        match (op, x.as_slice(), to) {
            (SsaOp::Call, [.., callee], _) => *callee == Type::POINTER,
            (SsaOp::Assembly(_), ..) => true,
            (SsaOp::Phi(from), values, Some(to)) => from.len() == values.len() && values.iter().all(|ty| *ty == to),
            (SsaOp::Br(_), [], None) => true,
            (SsaOp::CondBr(..), [cond], None) => *cond == Type::I1,
            (SsaOp::Return, [], None) => self.result.is_none(),
            (SsaOp::Return, [value], None) => self.result == Some(*value),
            _ => [memory_fits, arithmetic_fits, tensor_cores_fit, lanes_fit].iter().any(|fits| fits(op, &x, to)),
        }
    }
}

fn is_real(ty: Type) -> bool {
    matches!(ty.kind, LaneKind::F32 | LaneKind::F64)
}

fn is_integer(ty: Type) -> bool {
    matches!(ty.kind, LaneKind::I1 | LaneKind::I8 | LaneKind::I16 | LaneKind::I32 | LaneKind::I64)
}

fn is_address(ty: Type) -> bool {
    matches!(ty.kind, LaneKind::Pointer(_)) && ty.lanes == 1
}

/// Whether a type is a mask for lanes of another type.
fn masks(mask: Type, lanes: Type) -> bool {
    mask == Type::I1.vector(lanes.lanes)
}

/// Whether a memory or synchronization instruction has valid types.
fn memory_fits(op: &SsaOp, x: &[Type], to: Option<Type>) -> bool {
    let are_addresses = |ty: Type, lanes: Type| matches!(ty.kind, LaneKind::Pointer(_)) && ty.lanes == lanes.lanes;
    match (op, x, to) {
        (SsaOp::Variable(_) | SsaOp::Stack(_), [], Some(to)) => to == Type::POINTER,
        (SsaOp::SharedMemory(_), [], Some(to)) => to == Type::SHARED,
        (SsaOp::Coordinate(_), [], Some(to)) => to == Type::I32,
        (SsaOp::Barrier | SsaOp::Wait(_) | SsaOp::ProxyFence | SsaOp::GroupEnd, [], None) => true,
        (SsaOp::Copy { bytes: 4 | 8 | 16 }, [to, from, n @ ..], None) => {
            (*to, *from) == (Type::SHARED, Type::GLOBAL) && matches!(n, [] | [Type::I32])
        }
        (SsaOp::Load { .. }, [from], Some(_)) => is_address(*from),
        (SsaOp::Store, [_, to], None) => is_address(*to),
        (SsaOp::Element(_), [base, index], Some(to)) => {
            is_address(*base) && is_integer(*index) && to == base.vector(index.lanes)
        }
        (SsaOp::MaskedLoad, [from, mask, other], Some(to)) => is_address(*from) && masks(*mask, to) && *other == to,
        (SsaOp::MaskedStore, [lanes, to, mask], None) => is_address(*to) && masks(*mask, *lanes),
        (SsaOp::Gather, [from, mask, other], Some(to)) => are_addresses(*from, to) && masks(*mask, to) && *other == to,
        (SsaOp::Scatter, [lanes, to, mask], None) => are_addresses(*to, *lanes) && masks(*mask, *lanes),
        (SsaOp::Prefetch { .. }, [to], None) => is_address(*to),
        _ => false,
    }
}

/// Whether a lane-wise arithmetic or dot product instruction has valid types.
fn arithmetic_fits(op: &SsaOp, x: &[Type], to: Option<Type>) -> bool {
    match (op, x, to) {
        (
            SsaOp::Add | SsaOp::AddWrapping | SsaOp::Sub | SsaOp::Mul | SsaOp::And | SsaOp::Or | SsaOp::Xor,
            [a, b],
            Some(to),
        )
        | (SsaOp::SubWrapping | SsaOp::MulWrapping, [a, b], Some(to))
        | (SsaOp::ShiftLeft | SsaOp::ShiftSigned | SsaOp::ShiftUnsigned, [a, b], Some(to))
        | (SsaOp::SignedDiv | SsaOp::SignedRem | SsaOp::UnsignedDiv | SsaOp::UnsignedRem, [a, b], Some(to))
        | (SsaOp::SignedMin | SsaOp::SignedMax, [a, b], Some(to)) => is_integer(to) && *a == to && *b == to,
        (SsaOp::Compare(_), [a, b], Some(to)) => !is_real(*a) && a == b && masks(to, *a),
        (SsaOp::FLess, [a, b], Some(to)) => is_real(*a) && a == b && masks(to, *a),
        (SsaOp::FAdd | SsaOp::FSub | SsaOp::FMul | SsaOp::FDiv, _, Some(to))
        | (SsaOp::FNeg | SsaOp::FAbs | SsaOp::Sqrt | SsaOp::Round(_) | SsaOp::CopySign, _, Some(to))
        | (SsaOp::FMin | SsaOp::FMax | SsaOp::Scale | SsaOp::Fma, _, Some(to)) => {
            let n = match op {
                SsaOp::FNeg | SsaOp::FAbs | SsaOp::Sqrt | SsaOp::Round(_) => 1,
                SsaOp::Fma => 3,
                _ => 2,
            };
            is_real(to) && x.len() == n && x.iter().all(|ty| *ty == to)
        }
        (SsaOp::Dot4 { .. } | SsaOp::Dot2 | SsaOp::Dot4BySums, [sums, a, b], Some(to)) => {
            to.kind == LaneKind::I32 && matches!(to.lanes, 4 | 8 | 16) && [sums, a, b].iter().all(|ty| **ty == to)
        }
        (SsaOp::DotOfHalves, [sums, a, b], Some(to)) => {
            let factors = Type::I32.vector(to.lanes);
            to.kind == LaneKind::F32 && matches!(to.lanes, 4 | 8 | 16) && (*sums, *a, *b) == (to, factors, factors)
        }
        (SsaOp::NearestBf16, [a], Some(to)) => {
            matches!(to.lanes, 8 | 16) && (*a, to) == (Type::F32.vector(to.lanes), Type::I16.vector(to.lanes))
        }
        (SsaOp::PickBytes, all, Some(to)) => {
            to == Type::I32.vector(16) && all.len() == 3 && all.iter().all(|ty| *ty == to)
        }
        _ => false,
    }
}

/// Whether a tensor core instruction has valid types.
fn tensor_cores_fit(op: &SsaOp, x: &[Type], to: Option<Type>) -> bool {
    match (op, x, to) {
        (SsaOp::LoadTiles { .. }, [from], Some(to)) => {
            *from == Type::SHARED && to.kind.bytes() == 4 && matches!(to.lanes, 2 | 4)
        }
        (SsaOp::Tf32, [a], Some(to)) => (*a, to) == (Type::F32, Type::F32),
        (SsaOp::TileProduct(kind), all, Some(to)) if all.len() == 10 => {
            let factor = if *kind == LaneKind::F32 { Type::F32 } else { Type::I32 };
            let fits = |(at, ty): (usize, &Type)| *ty == if at < 6 { factor } else { Type::F32 };
            all.iter().enumerate().all(fits) && to == Type::F32.vector(4)
        }
        (SsaOp::GroupFence | SsaOp::GroupWait(_), sums, Some(to)) => {
            sums.iter().all(|ty| *ty == Type::F32) && to == Type::F32.vector(sums.len())
        }
        (SsaOp::GroupProduct { factors, across, .. }, all, Some(to)) if all.len() > to.lanes => {
            let (described, sums) = all.split_at(all.len() - to.lanes);
            let is_loaded = *described == [Type::I32, Type::I32, Type::I32, Type::I32, Type::I64];
            (*described == [Type::I64; 2] || is_loaded && *factors == LaneKind::F32)
                && (matches!(factors, LaneKind::F16 | LaneKind::Bf16)
                    || *factors == LaneKind::F32 && *across == [false; 2])
                && sums.iter().all(|ty| *ty == Type::F32)
                && to == Type::F32.vector(sums.len())
        }
        _ => false,
    }
}

/// Whether an instruction that selects, converts or moves lanes has valid types.
fn lanes_fit(op: &SsaOp, x: &[Type], to: Option<Type>) -> bool {
    let is_number = |ty: Type| is_real(ty) || matches!(ty.kind, LaneKind::F16 | LaneKind::Bf16);
    match (op, x, to) {
        (SsaOp::Select, [cond, a, b], Some(to)) => (*cond == Type::I1 || masks(*cond, to)) && *a == to && *b == to,
        (SsaOp::ToIntegerOrLeast { .. }, [a], Some(to)) => a.kind == LaneKind::F32 && to == Type::I32.vector(a.lanes),
        (SsaOp::Truncate | SsaOp::TruncateSaturated, [a], Some(to)) => {
            is_integer(*a) && is_integer(to) && a.lanes == to.lanes
        }
        (SsaOp::PackSaturated { unsigned }, [a, b], Some(to)) => {
            let of = [(Type::I32.vector(16), Type::I16.vector(32)), (Type::I16.vector(32), Type::I8.vector(64))];
            a == b && of.contains(&(*a, to)) && !(*unsigned && a.kind == LaneKind::I32)
        }
        (SsaOp::AddSaturated, [a, b], Some(to)) => *a == to && *b == to && to == Type::I16.vector(32),
        (SsaOp::ExtendSigned | SsaOp::ExtendUnsigned, [a], Some(to)) => {
            is_integer(*a) && is_integer(to) && a.lanes == to.lanes && a.kind.bytes() < to.kind.bytes()
        }
        (SsaOp::ToInteger | SsaOp::ToIntegerInRange, [a], Some(to)) => {
            is_real(*a) && is_integer(to) && a.lanes == to.lanes
        }
        (SsaOp::ToReal, [a], Some(to)) => is_integer(*a) && is_real(to) && a.lanes == to.lanes,
        (SsaOp::Convert, [a], Some(to)) => is_number(*a) && is_number(to) && a.lanes == to.lanes,
        (SsaOp::Bitcast, [a], Some(to)) => a.bytes() == to.bytes(),
        (SsaOp::Opaque, [a], Some(to)) => *a == to,
        (SsaOp::Address, [a], Some(to)) => is_address(*a) && to == Type::I64,
        (SsaOp::Splat, [a], Some(to)) => *a == to.element(),
        (SsaOp::Shuffle(mask), [a, b], Some(to)) => {
            a == b && to == a.vector(mask.len()) && mask.iter().all(|lane| *lane < 2 * a.lanes as i32)
        }
        (SsaOp::Insert(lane), [into, a], Some(to)) => *into == to && *a == to.element() && *lane < to.lanes,
        (SsaOp::Extract(lane), [from], Some(to)) => to == from.element() && *lane < from.lanes,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use tilewright_ir::op::Workload;
    use tilewright_ir::{Target, lower};

    use super::super::Linkage;
    use super::super::build::Builder;
    use super::*;
    use crate::Generated;
    use crate::generate::unit::Units;

    #[test]
    fn what_is_generated_is_well_formed() {
        for text in [
            "matmul:m=17,n=33,k=9,epilogue=bias+gelu",
            "conv2d:c=3,h=9,w=11,k=5,r=3,s=3,stride=2,pad=1,epilogue=relu",
            "conv2d_transpose:c=4,h=5,w=5,k=3,r=4,s=4,stride=2,pad=1,dtype=f64",
        ] {
            let program = lower::lower(&Workload::parse(text).unwrap().program());
            for (target, prefix) in [("x86-64-v4", None), ("x86-64-v3", Some("k")), ("aarch64", None)] {
                let target = Target::named(target).unwrap();
                let options = crate::GenerateOptions { prefix, ..crate::GenerateOptions::default() };
                let module = Generated::of(&program, &target, &Units::default(), options).unwrap().module;
                assert_eq!(module.verify(), Ok(()), "{text} on {target}: {module}");
            }
        }
    }

    #[test]
    fn what_is_malformed_is_seen() {
        let check = |write: fn(&Builder, super::super::FunctionId, BlockId), expected: &str| {
            let b = Builder::new("test");
            let f = b.function("f", Linkage::Internal, None, &[Type::POINTER, Type::I1]);
            let entry = b.block(f);
            b.go_to(f, entry);
            write(&b, f, entry);
            let why = b.finish().verify().unwrap_err();
            assert!(why.contains(expected), "{why}");
        };
        check(|b, _, _| b.store(b.int(1), b.int(2), 8), "a block ends");
        check(
            |b, _, _| {
                b.store(b.int(1), b.int(2), 8);
                b.ret();
            },
            "types that do not fit",
        );
        check(
            |b, f, _| {
                let [yes, join] = [0; 2].map(|_| b.block(f));
                b.cond_br(b.parameter(1), yes, join);
                b.go_to(f, yes);
                let x = b.load(Type::I64, b.parameter(0), 8, false);
                b.br(join);
                b.go_to(f, join);
                b.store(x, b.parameter(0), 8);
                b.ret();
            },
            "not given on every way",
        );
    }
}
