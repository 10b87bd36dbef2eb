//! Selection of vector and mask operations, and of floating-point scalars.

use super::super::inst::NONE;
use super::super::inst::{Class, Inst, MachineOp, Reg};
use super::super::opcodes::*;
use super::{Selector, class_of, width};
use crate::ssa::{self, Id, LaneKind, RoundingDirection, SsaOp as Ssa, Type};

impl Selector<'_> {
    /// Emits the instructions that compute a value.
    pub(super) fn value_into(&mut self, d: Reg, id: Id, inst: &ssa::Instruction) -> Result<(), String> {
        let ty = self.ty(id);
        let operand = |at: usize| inst.operands[at];
        if class_of(ty) == Class::Integer {
            return self.integer_into(d, id, inst);
        }
        let w = width(ty);
        match &inst.op {
            Ssa::Load { .. } => {
                let from = operand(0);
                if matches!(self.op_of(from), Some(Ssa::Variable(_))) {
                    self.emit(Inst::new(MachineOp::Move, d, &[self.regs[from.at()]], w));
                } else {
                    let memory = self.address(from)?;
                    self.emit(Inst::new(MachineOp::Move, d, &[], ty.bytes()).with(memory, false));
                }
            }
            Ssa::MaskedLoad => {
                let (from, mask, otherwise) = (operand(0), operand(1), operand(2));
                let op = MachineOp::LoadMasked(ty.kind.bytes());
                let mask = self.memory_mask(mask, ty)?;
                let is_merged = !self.is_zero(otherwise) && !self.is_undefined(otherwise);
                let memory = self.address(from)?;
                match (is_merged, self.has_masks) {
                    (false, _) => self.emit(Inst::new(op, d, &[mask], w).with(memory, false)),
                    (true, true) => {
                        let otherwise = self.reg(otherwise)?;
                        self.emit(Inst::new(op, d, &[mask, otherwise], w).with(memory, false));
                    }
                    (true, false) => {
                        let otherwise = self.reg(otherwise)?;
                        let loaded = self.virtual_register(Class::Vector, w);
                        self.emit(Inst::new(op, loaded, &[mask], w).with(memory, false));
                        self.emit(Inst::new(MachineOp::Blend(ty.kind.bytes()), d, &[mask, otherwise, loaded], w));
                    }
                }
            }
            Ssa::Gather => {
                let (memory, numbers, mask) = self.lane_addresses(operand(0), operand(1), ty)?;
                let otherwise = self.reg(operand(2))?;
                let op = MachineOp::Gather { wide: ty.kind.bytes() == 8 };
                self.emit(Inst::new(op, d, &[mask, numbers, otherwise], w).with(memory, false));
            }
            Ssa::FAdd | Ssa::FMul | Ssa::FSub | Ssa::FDiv => {
                let code = match inst.op {
                    Ssa::FAdd => ADD,
                    Ssa::FMul => MULTIPLY,
                    Ssa::FSub => SUBTRACT,
                    _ => DIVIDE,
                };
                let commutes = matches!(inst.op, Ssa::FAdd | Ssa::FMul);
                self.binary_into(d, MachineOp::Binary(arithmetic(code, ty)), operand(0), operand(1), commutes, ty)?;
            }
            Ssa::FMin | Ssa::FMax => self.extremum_into(d, inst, ty)?,
            Ssa::Scale => {
                let (x, n) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(Inst::new(MachineOp::Binary(scale(ty.kind.bytes() == 8)), d, &[x, n], w));
            }
            Ssa::Fma => self.fma_into(d, inst, ty)?,
            Ssa::FNeg | Ssa::FAbs => {
                let sign = 1u64 << (ty.kind.bytes() * 8 - 1);
                let (op, bits) = if inst.op == Ssa::FNeg { (XOR, sign) } else { (AND, sign - 1) };
                let x = self.reg(operand(0))?;
                let bits = self.splat_constant(bits, ty);
                self.emit(Inst::new(MachineOp::Binary(op), d, &[x, bits], w));
            }
            Ssa::CopySign => {
                let sign = 1u64 << (ty.kind.bytes() * 8 - 1);
                let (x, s) = (self.reg(operand(0))?, self.reg(operand(1))?);
                let bits = self.splat_constant(sign, ty);
                let x = self.emit_new(MachineOp::Binary(AND_NOT), Class::Vector, &[bits, x], w);
                let s = self.emit_new(MachineOp::Binary(AND), Class::Vector, &[s, bits], w);
                self.emit(Inst::new(MachineOp::Binary(OR), d, &[x, s], w));
            }
            Ssa::Sqrt => {
                let x = self.reg(operand(0))?;
                let op = arithmetic(SQUARE_ROOT, ty);
                // The scalar instruction has an additional operand for the other lanes.
                let inst = if ty.lanes == 1 {
                    Inst::new(MachineOp::Binary(op), d, &[x, x], w)
                } else {
                    Inst::new(MachineOp::Unary(op), d, &[x], w)
                };
                self.emit(inst);
            }
            Ssa::Round(how) => {
                // Bit 3 suppresses exceptions.
                let how = 8 + match how {
                    RoundingDirection::Nearest => 0,
                    RoundingDirection::Down => 1,
                    RoundingDirection::Up => 2,
                    RoundingDirection::Zero => 3,
                };
                let (x, op) = (self.reg(operand(0))?, round(ty));
                self.emit(match ty.lanes {
                    1 => Inst::new(MachineOp::BinaryImmediate(op, how), d, &[x, x], w),
                    _ => Inst::new(MachineOp::UnaryImmediate(op, how), d, &[x], w),
                });
            }
            Ssa::ToIntegerInRange => self.whole_into(d, operand(0), ty)?,
            Ssa::ToIntegerOrLeast { nearest } => {
                let x = self.reg(operand(0))?;
                let op = if *nearest { SINGLE_TO_NEAREST } else { SINGLE_TO_SHORT };
                self.emit(Inst::new(MachineOp::Unary(op), d, &[x], w));
            }
            Ssa::TruncateSaturated if self.has_masks => {
                let from = self.ty(operand(0));
                let x = self.reg(operand(0))?;
                let op = narrow_saturated(from.kind.bytes(), ty.kind.bytes());
                self.emit(Inst::new(MachineOp::Narrow(op), d, &[x], width(from)));
            }
            Ssa::PackSaturated { unsigned } => {
                let op = pack_saturated(self.ty(operand(0)).kind, *unsigned);
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(Inst::new(MachineOp::Binary(op), d, &[a, b], w));
            }
            Ssa::AddSaturated => {
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(Inst::new(MachineOp::Binary(ADD_SATURATED), d, &[a, b], w));
            }
            Ssa::ExtendSigned | Ssa::ExtendUnsigned => self.widen_into(d, inst, ty)?,
            Ssa::Truncate => {
                let x = self.reg(operand(0))?;
                self.narrow_into(d, x, self.ty(operand(0)), ty.kind)?;
            }
            Ssa::FLess => {
                let of = self.ty(operand(0));
                let op = Opcode { evex: self.has_masks, ..packed(COMPARE, of.kind) };
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.mask_into(d, of, MachineOp::BinaryImmediate(op, LESS), [a, b])?;
            }
            Ssa::Compare(how) => self.compare_into(d, *how, [operand(0), operand(1)])?,
            Ssa::Select if self.ty(operand(0)).lanes > 1 => {
                if class_of(ty) == Class::Mask {
                    return Err("a choice of masks".into());
                }
                let (k, a, b) = (self.mask(operand(0), ty.kind.bytes())?, self.reg(operand(1))?, self.reg(operand(2))?);
                self.emit(Inst::new(MachineOp::Blend(ty.kind.bytes()), d, &[k, b, a], w));
            }
            Ssa::Select => {
                if class_of(ty) == Class::Mask {
                    return Err("a choice of masks".into());
                }
                let (a, b) = (self.reg(operand(1))?, self.reg(operand(2))?);
                let condition = self.flags(operand(0))?;
                self.emit(Inst::new(MachineOp::Select(condition), d, &[a, b], w));
            }
            Ssa::ToReal => self.real_into(d, operand(0), ty)?,
            Ssa::Convert if self.ty(operand(0)).kind == LaneKind::F16 => self.half_as_single_into(d, operand(0), ty)?,
            Ssa::Convert => {
                let from = self.ty(operand(0));
                if ty.kind == LaneKind::F16 {
                    return self.half_into(d, operand(0));
                }
                let x = self.reg(operand(0))?;
                let to_double = ty.kind == LaneKind::F64;
                if ty.lanes == 1 {
                    self.emit(Inst::new(MachineOp::Binary(convert_scalar(to_double)), d, &[x, x], 16));
                } else {
                    self.emit(Inst::new(MachineOp::Unary(convert_packed(to_double)), d, &[x], w.max(width(from))));
                }
            }
            Ssa::Add
            | Ssa::AddWrapping
            | Ssa::Sub
            | Ssa::SubWrapping
            | Ssa::Mul
            | Ssa::MulWrapping
            | Ssa::SignedMin
            | Ssa::SignedMax
            | Ssa::ShiftLeft
            | Ssa::ShiftUnsigned
            | Ssa::ShiftSigned
                if class_of(ty) == Class::Vector =>
            {
                self.lanes_of_integers_into(d, inst, ty)?;
            }
            Ssa::Dot4 { signed } => self.dot_into(d, inst, *signed, ty)?,
            Ssa::DotOfHalves => self.dot_with(d, DOT_OF_HALVES, [operand(0), operand(1), operand(2)], true, ty)?,
            Ssa::Dot2 => {
                let (sums, a, b) = (self.reg(operand(0))?, self.reg(operand(1))?, self.reg(operand(2))?);
                let products = self.emit_new(MachineOp::Binary(MULTIPLY_PAIRS), Class::Vector, &[a, b], w);
                self.emit(Inst::new(MachineOp::Binary(add_integers(false)), d, &[sums, products], w));
            }
            Ssa::Dot4BySums => {
                let (sums, unsigned) = (self.reg(operand(0))?, self.reg(operand(1))?);
                // Memory operands cannot be broadcast to lanes narrower than 32 bits.
                let signed = self.folded_operand(operand(2)).filter(|signed| !signed.broadcast);
                let pairs = match signed {
                    Some(signed) => {
                        let d = self.virtual_register(Class::Vector, w);
                        let op = MachineOp::Binary(MULTIPLY_BYTES);
                        self.emit(Inst { operand: Some(signed), ..Inst::new(op, d, &[unsigned], w) });
                        d
                    }
                    None => {
                        let signed = self.reg(operand(2))?;
                        self.emit_new(MachineOp::Binary(MULTIPLY_BYTES), Class::Vector, &[unsigned, signed], w)
                    }
                };
                let ones = self.splat_constant(0x1_0001, ty);
                let products = self.emit_new(MachineOp::Binary(MULTIPLY_PAIRS), Class::Vector, &[pairs, ones], w);
                self.emit(Inst::new(MachineOp::Binary(add_integers(false)), d, &[sums, products], w));
            }
            Ssa::NearestBf16 => {
                let x = self.reg(operand(0))?;
                self.emit(Inst::new(MachineOp::Unary(NEAREST_BF16), d, &[x], width(self.ty(operand(0)))));
            }
            Ssa::PickBytes => {
                let (indices, a, b) = (self.reg(operand(0))?, self.reg(operand(1))?, self.reg(operand(2))?);
                self.emit(Inst::new(MachineOp::Tied(PICK_BYTES), d, &[indices, a, b], w));
            }
            Ssa::And | Ssa::Or | Ssa::Xor if class_of(ty) == Class::Vector => {
                let op = match inst.op {
                    Ssa::And => AND,
                    Ssa::Or => OR,
                    _ => XOR,
                };
                self.binary_into(d, MachineOp::Binary(op), operand(0), operand(1), false, ty)?;
            }
            Ssa::And | Ssa::Or | Ssa::Xor => {
                let all = self.constant(operand(1)).is_some_and(|bits| bits.iter().all(|b| *b == 1));
                let a = self.reg(operand(0))?;
                if inst.op == Ssa::Xor && all {
                    self.emit(Inst::new(MachineOp::MaskNot, d, &[a], 2));
                } else {
                    let b = self.reg(operand(1))?;
                    let op = match inst.op {
                        Ssa::And => MASK_AND,
                        Ssa::Or => MASK_OR,
                        _ => MASK_XOR,
                    };
                    self.emit(Inst::new(MachineOp::MaskBinary(op), d, &[a, b], 2));
                }
            }
            Ssa::Splat => self.splat_into(d, operand(0), ty)?,
            Ssa::Shuffle(mask) => self.shuffle_into(d, operand(0), operand(1), mask, ty)?,
            Ssa::Insert(_) => self.insert_into(d, id, ty)?,
            Ssa::Extract(lane) => self.extract_into(d, ty, operand(0), *lane)?,
            other => return Err(format!("{other:?} of {ty:?}")),
        }
        Ok(())
    }

    pub(super) fn binary_into(
        &mut self,
        d: Reg,
        op: MachineOp,
        a: Id,
        b: Id,
        commutes: bool,
        ty: Type,
    ) -> Result<(), String> {
        let (mut a, mut b) = (a, b);
        let may_fold = !matches!(op, MachineOp::Binary(AND | AND_NOT | OR | XOR));
        let mut folded = if may_fold { self.folded_operand(b) } else { None };
        if folded.is_none() && commutes && may_fold {
            folded = self.folded_operand(a);
            if folded.is_some() {
                (a, b) = (b, a);
            }
        }
        let a = self.reg(a)?;
        let inst = match folded {
            Some(operand) => Inst { operand: Some(operand), ..Inst::new(op, d, &[a], width(ty)) },
            None => {
                let b = self.reg(b)?;
                Inst::new(op, d, &[a, b], width(ty))
            }
        };
        self.emit(inst);
        Ok(())
    }

    /// Emits a minimum or maximum. The machine's instruction returns the second operand if either is NaN,
    /// which is correct if the second is NaN or the first is known not to be.
    pub(super) fn extremum_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let op = MachineOp::Binary(arithmetic(if inst.op == Ssa::FMin { MINIMUM } else { MAXIMUM }, ty));
        let (a, b) = (inst.operands[0], inst.operands[1]);
        let is_number = |bits: &[u64]| match ty.kind {
            LaneKind::F32 => bits.iter().all(|b| !f32::from_bits(*b as u32).is_nan()),
            _ => bits.iter().all(|b| !f64::from_bits(*b).is_nan()),
        };
        let w = width(ty);
        if self.constant(a).is_some_and(is_number) {
            return self.binary_into(d, op, a, b, false, ty);
        }
        if self.constant(b).is_some_and(is_number) {
            return self.binary_into(d, op, b, a, false, ty);
        }
        let (a, b) = (self.reg(a)?, self.reg(b)?);
        let least = self.emit_new(op, Class::Vector, &[a, b], w);
        if self.has_masks {
            let compare = Opcode { evex: true, ..packed(COMPARE, ty.kind) };
            let none = self.emit_new(MachineOp::BinaryImmediate(compare, UNORDERED), Class::Mask, &[a, a], w);
            self.emit(Inst::new(MachineOp::Blend(ty.kind.bytes()), d, &[none, least, a], w));
        } else {
            // A lane with all bits set is NaN.
            let none = self.emit_new(
                MachineOp::BinaryImmediate(packed(COMPARE, ty.kind), UNORDERED),
                Class::Vector,
                &[a, a],
                w,
            );
            self.emit(Inst::new(MachineOp::Binary(OR), d, &[least, none], w));
        }
        Ok(())
    }

    pub(super) fn fma_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let mut operands = [inst.operands[0], inst.operands[1], inst.operands[2]];
        let mut negated = [false; 3];
        for (id, negated) in operands.iter_mut().zip(&mut negated) {
            let of = self.same_as[id.at()];
            if let Some(Ssa::FNeg) = self.op_of(of)
                && self.is_folded(of)
            {
                *id = self.instruction(of).expect("a negation").operands[0];
                *negated = true;
            }
        }
        let [mut a, mut b, c] = operands;
        let [wide, negate_product, negate_addend] = [ty.kind == LaneKind::F64, negated[0] ^ negated[1], negated[2]];
        let op = |addend| MachineOp::Fma { wide, negate_product, negate_addend, addend };
        let w = width(ty);
        // A scalar operation has the width of the scalar.
        let bytes = if ty.lanes == 1 { ty.bytes() } else { w };
        let mut folded = self.folded_operand(b);
        if folded.is_none() {
            folded = self.folded_operand(a);
            if folded.is_some() {
                (a, b) = (b, a);
            }
        }
        let inst = if let Some(operand) = folded {
            let (a, c) = (self.reg(a)?, self.reg(c)?);
            Inst { operand: Some(operand), ..Inst::new(op(false), d, &[a, NONE, c], bytes) }
        } else if let Some(operand) = self.folded_operand(c) {
            let (a, b) = (self.reg(a)?, self.reg(b)?);
            Inst { operand: Some(operand), ..Inst::new(op(true), d, &[a, b], bytes) }
        } else {
            let (a, b, c) = (self.reg(a)?, self.reg(b)?, self.reg(c)?);
            Inst::new(op(false), d, &[a, b, c], bytes)
        };
        self.emit(inst);
        Ok(())
    }

    /// Emits a conversion of f16 numbers to f32.
    fn half_as_single_into(&mut self, d: Reg, x: Id, ty: Type) -> Result<(), String> {
        if ty.kind != LaneKind::F32 {
            return Err("f16 numbers as f64".into());
        }
        let op = MachineOp::Unary(HALF_TO_SINGLE);
        if ty.lanes == 1 {
            let bits = self.reg(x)?;
            let half = self.emit_new(MachineOp::FromInteger { wide: false }, Class::Vector, &[bits], 16);
            self.emit(Inst::new(op, d, &[half], 16));
            return Ok(());
        }
        // With a memory operand, it reads exactly the bytes of the lanes.
        let folded = if ty.bytes() >= 16 { self.folded_part(x) } else { None };
        let inst = match folded {
            Some(operand) => Inst { operand: Some(operand), ..Inst::new(op, d, &[], width(ty)) },
            None => {
                let x = self.reg(x)?;
                Inst::new(op, d, &[x], width(ty))
            }
        };
        self.emit(inst);
        Ok(())
    }

    /// Emits a conversion to f16, to nearest, ties to even, in a vector register.
    pub(super) fn half_into(&mut self, d: Reg, x: Id) -> Result<(), String> {
        let from = self.ty(x);
        if from.kind != LaneKind::F32 {
            return Err("f64 numbers as f16".into());
        }
        let x = self.reg(x)?;
        self.emit(Inst::new(MachineOp::StorePart(SINGLE_TO_HALF, 0), d, &[x], width(from)));
        Ok(())
    }

    pub(super) fn real_into(&mut self, d: Reg, x: Id, ty: Type) -> Result<(), String> {
        let from = self.ty(x);
        let wide = ty.kind == LaneKind::F64;
        if from.lanes == 1 {
            let long = self.compared_bytes(x)? == 8;
            let x = self.reg(x)?;
            self.emit(Inst::new(MachineOp::ToReal { wide, long }, d, &[x], 16));
            return Ok(());
        }
        let op = match (from.kind, wide) {
            (LaneKind::I32, false) => SHORT_TO_SINGLE,
            (LaneKind::I32, true) => SHORT_TO_DOUBLE,
            (LaneKind::I64, false) if self.has_masks => LONG_TO_SINGLE,
            (LaneKind::I64, true) if self.has_masks => LONG_TO_DOUBLE,
            _ => return Err("integers as reals".into()),
        };
        let x = self.reg(x)?;
        self.emit(Inst::new(MachineOp::Unary(op), d, &[x], width(from).max(width(ty))));
        Ok(())
    }
}
