//! Vectors of integers: arithmetic, comparisons, conversions of width, dot products.

use super::super::inst::{Class, Inst, MachineOp, Reg};
use super::super::opcodes::*;
use super::{Selector, width};
use crate::ssa::{self, Compare, Id, LaneKind, SsaOp as Ssa, Type};

impl Selector<'_> {
    /// Emits the arithmetic of a vector's lanes.
    pub(super) fn lanes_of_integers_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let (a, b) = (inst.operands[0], inst.operands[1]);
        let wide = match ty.kind {
            LaneKind::I32 => false,
            LaneKind::I64 => true,
            LaneKind::I16 if matches!(inst.op, Ssa::ShiftLeft | Ssa::ShiftUnsigned | Ssa::ShiftSigned) => false,
            _ => return Err(format!("{:?} of {ty:?}", inst.op)),
        };
        let is_own = self.has_masks || !wide;
        let (op, commutes) = match inst.op {
            Ssa::ShiftLeft | Ssa::ShiftUnsigned | Ssa::ShiftSigned => return self.shift_into(d, inst, ty),
            Ssa::Sub | Ssa::SubWrapping => (subtract_integers(wide), false),
            Ssa::Mul | Ssa::MulWrapping if !is_own => return self.long_product_into(d, a, b, ty),
            Ssa::Mul | Ssa::MulWrapping => (multiply_integers(wide), true),
            Ssa::SignedMin | Ssa::SignedMax if !is_own => {
                let (a, b) = (self.reg(a)?, self.reg(b)?);
                let (less, more) = if inst.op == Ssa::SignedMin { (b, a) } else { (a, b) };
                let is_greater =
                    self.emit_new(MachineOp::Binary(integers_greater(true)), Class::Vector, &[a, b], width(ty));
                self.emit(Inst::new(MachineOp::Blend(8), d, &[is_greater, more, less], width(ty)));
                return Ok(());
            }
            Ssa::SignedMin | Ssa::SignedMax => (extremum(inst.op == Ssa::SignedMax, wide), true),
            _ => (add_integers(wide), false),
        };
        self.binary_into(d, MachineOp::Binary(op), a, b, commutes, ty)
    }

    fn shift_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let same = self.constant(inst.operands[1]).filter(|bits| bits.iter().all(|b| *b == bits[0]));
        let Some(by) = same.map(|bits| bits[0] as u8) else { return self.shift_by_lanes_into(d, inst, ty) };
        let (w, op) = (width(ty), shift(ty.kind.bytes()));
        let x = self.reg(inst.operands[0])?;
        let (op, number) = match inst.op {
            Ssa::ShiftLeft => (op, SHIFT_LEFT),
            Ssa::ShiftUnsigned => (op, SHIFT_RIGHT),
            _ if ty.kind != LaneKind::I64 => (op, SHIFT_SIGNED),
            _ if self.has_masks => (SHIFT_LONG_SIGNED, SHIFT_SIGNED),
            _ => {
                // The sign bit after the logical shift.
                let sign = self.splat_constant(1 << (63 - by), ty);
                let shifted = self.emit_new(MachineOp::Shift(op, SHIFT_RIGHT, by), Class::Vector, &[x], w);
                let turned = self.emit_new(MachineOp::Binary(XOR), Class::Vector, &[shifted, sign], w);
                self.emit(Inst::new(MachineOp::Binary(subtract_integers(true)), d, &[turned, sign], w));
                return Ok(());
            }
        };
        self.emit(Inst::new(MachineOp::Shift(op, number, by), d, &[x], w));
        Ok(())
    }

    /// Emits a shift of each lane by a separate number of bits.
    fn shift_by_lanes_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let wide = ty.kind == LaneKind::I64;
        let number = match inst.op {
            Ssa::ShiftLeft => SHIFT_LEFT,
            Ssa::ShiftUnsigned => SHIFT_RIGHT,
            _ => SHIFT_SIGNED,
        };
        let op = shift_by_lanes(number, wide);
        if ty.kind == LaneKind::I16 || op.evex && !self.has_masks {
            return Err(format!("{:?} of {ty:?} by lanes", inst.op));
        }
        self.binary_into(d, MachineOp::Binary(op), inst.operands[0], inst.operands[1], false, ty)
    }

    /// Emits 64-bit products computed from those of their halves.
    fn long_product_into(&mut self, d: Reg, a: Id, b: Id, ty: Type) -> Result<(), String> {
        let w = width(ty);
        let (a, b) = (self.reg(a)?, self.reg(b)?);
        let mut vector = |op: MachineOp, uses: &[Reg]| self.emit_new(op, Class::Vector, uses, w);
        let high = |x: Reg| (MachineOp::Shift(shift(8), SHIFT_RIGHT, 32), [x]);
        let (of_a, of_b) = (high(a), high(b));
        let (high_a, high_b) = (vector(of_a.0, &of_a.1), vector(of_b.0, &of_b.1));
        let first = vector(MachineOp::Binary(MULTIPLY_HALVES), &[high_a, b]);
        let second = vector(MachineOp::Binary(MULTIPLY_HALVES), &[high_b, a]);
        let crossed = vector(MachineOp::Binary(add_integers(true)), &[first, second]);
        let crossed = vector(MachineOp::Shift(shift(8), SHIFT_LEFT, 32), &[crossed]);
        let low = vector(MachineOp::Binary(MULTIPLY_HALVES), &[a, b]);
        self.emit(Inst::new(MachineOp::Binary(add_integers(true)), d, &[low, crossed], w));
        Ok(())
    }

    /// Emits a comparison of lanes, with a mask register or, without these, 32-bit lanes as the result.
    pub(super) fn compare_into(&mut self, d: Reg, how: Compare, [a, b]: [Id; 2]) -> Result<(), String> {
        let of = self.ty(a);
        let (wide, w) = (of.kind == LaneKind::I64, width(of));
        if !matches!(of.kind, LaneKind::I32 | LaneKind::I64) {
            return Err("a comparison of bytes".into());
        }
        let (a, b) = (self.reg(a)?, self.reg(b)?);
        if self.has_masks {
            let immediate = match how {
                Compare::Equal => 0,
                Compare::Less => 1,
                Compare::NotEqual => 4,
                Compare::Greater => 6,
            };
            self.emit(Inst::new(MachineOp::BinaryImmediate(compare_integers(wide), immediate), d, &[a, b], w));
            return Ok(());
        }
        let (op, a, b) = match how {
            Compare::Equal | Compare::NotEqual => (integers_equal(wide), a, b),
            Compare::Less => (integers_greater(wide), b, a),
            Compare::Greater => (integers_greater(wide), a, b),
        };
        let op = MachineOp::Binary(op);
        if how != Compare::NotEqual {
            return self.mask_into(d, of, op, [a, b]);
        }
        let equal = self.emit_new(op, Class::Vector, &[a, b], w);
        let all = self.splat_constant(u64::MAX, of);
        self.mask_into(d, of, MachineOp::Binary(XOR), [equal, all])
    }

    /// Emits a lane operation whose result is a mask.
    pub(super) fn mask_into(&mut self, d: Reg, of: Type, op: MachineOp, operands: [Reg; 2]) -> Result<(), String> {
        let w = width(of);
        if self.has_masks || of.kind.bytes() == 4 {
            self.emit(Inst::new(op, d, &operands, w));
            return Ok(());
        }
        let long = self.emit_new(op, Class::Vector, &operands, w);
        self.narrow_into(d, long, Type { kind: LaneKind::I64, ..of }, LaneKind::I32)
    }

    /// Emits an extension of integers to wider lanes.
    pub(super) fn widen_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let (x, w) = (inst.operands[0], width(ty));
        let of = self.ty(x);
        if of.kind == LaneKind::I1 {
            return Err("truth values as integers".into());
        }
        let op = MachineOp::Unary(widen(of.kind.bytes(), ty.kind.bytes(), inst.op == Ssa::ExtendSigned));
        // With a memory operand, it reads exactly the bytes of the lanes.
        let folded = if ty.bytes() >= 16 { self.folded_part(x) } else { None };
        let inst = match folded {
            Some(operand) => Inst { operand: Some(operand), ..Inst::new(op, d, &[], w) },
            None => {
                let x = self.reg(x)?;
                Inst::new(op, d, &[x], w)
            }
        };
        self.emit(inst);
        Ok(())
    }

    /// Emits a truncation of integers to narrower lanes.
    pub(super) fn narrow_into(&mut self, d: Reg, x: Reg, from: Type, to: LaneKind) -> Result<(), String> {
        let w = width(from);
        if self.has_masks {
            let op = narrow(from.kind.bytes(), to.bytes());
            self.emit(Inst::new(MachineOp::Narrow(op), d, &[x], w));
            return Ok(());
        }
        match (from.kind, to) {
            (LaneKind::I64, LaneKind::I32) => {
                let picks: Vec<i32> = (0..w as i32 / 8).map(|lane| 2 * lane).collect();
                self.permute_into(d, x, &picks, w, LaneKind::I32)
            }
            (LaneKind::I64, _) => {
                let short = self.virtual_register(Class::Vector, 16);
                self.narrow_into(short, x, from, LaneKind::I32)?;
                self.narrow_into(d, short, Type { kind: LaneKind::I32, ..from }, to)
            }
            (LaneKind::I32, LaneKind::I8 | LaneKind::I16) => {
                let n = to.bytes() as i32;
                let of_quad = |at: i32| if at < 4 * n { at / n * 4 + at % n } else { -1 };
                let picks: Vec<i32> = (0..w as i32)
                    .map(|at| (of_quad(at % 16), at / 16 * 16))
                    .map(|(own, quad)| if own < 0 { own } else { own + quad })
                    .collect();
                let quads = if w == 16 { d } else { self.virtual_register(Class::Vector, w) };
                self.permute_into(quads, x, &picks, w, LaneKind::I8)?;
                match (w, to) {
                    (16, _) => Ok(()),
                    (_, LaneKind::I16) => self.permute_into(d, quads, &[0, 2], w, LaneKind::I64),
                    _ => self.permute_into(d, quads, &[0, 4], w, LaneKind::I32),
                }
            }
            _ => Err("bytes of short integers".into()),
        }
    }

    /// Emits a truncation of floating-point numbers in range to integers.
    pub(super) fn whole_into(&mut self, d: Reg, x: Id, ty: Type) -> Result<(), String> {
        let of = self.ty(x);
        let op = match (of.kind, ty.kind) {
            (LaneKind::F32, LaneKind::I32) => SINGLE_TO_SHORT,
            (LaneKind::F64, LaneKind::I32) => DOUBLE_TO_SHORT,
            (LaneKind::F32, LaneKind::I64) if self.has_masks => SINGLE_TO_LONG,
            (LaneKind::F64, LaneKind::I64) if self.has_masks => DOUBLE_TO_LONG,
            _ => return Err("reals as integers".into()),
        };
        let x = self.reg(x)?;
        self.emit(Inst::new(MachineOp::Unary(op), d, &[x], width(of).max(width(ty))));
        Ok(())
    }

    /// Emits sums with dot products of four bytes per lane. For mixed signedness, the instruction takes the
    /// signed operand second, which may be in memory.
    pub(super) fn dot_into(
        &mut self,
        d: Reg,
        inst: &ssa::Instruction,
        signed: [bool; 2],
        ty: Type,
    ) -> Result<(), String> {
        let [sums, mut a, mut b] = [inst.operands[0], inst.operands[1], inst.operands[2]];
        let op = match signed {
            [false, true] | [true, false] => dot(self.has_avx512_dot),
            // The instruction can address only 16 registers.
            _ if self.has_masks => return Err("bytes of one sign".into()),
            [signed, _] => dot_alike(signed),
        };
        if signed == [true, false] {
            (a, b) = (b, a);
        }
        self.dot_with(d, op, [sums, a, b], signed[0] == signed[1], ty)
    }

    /// Emits sums with products of two factors, the second of which may be in memory.
    pub(super) fn dot_with(
        &mut self,
        d: Reg,
        op: Opcode,
        [sums, mut a, mut b]: [Id; 3],
        commutes: bool,
        ty: Type,
    ) -> Result<(), String> {
        let mut folded = if commutes { self.folded_operand(a) } else { None };
        if folded.is_some() {
            (a, b) = (b, a);
        }
        folded = folded.or_else(|| self.folded_operand(b));
        let (sums, a) = (self.reg(sums)?, self.reg(a)?);
        let inst = match folded {
            Some(operand) => {
                Inst { operand: Some(operand), ..Inst::new(MachineOp::Tied(op), d, &[sums, a], width(ty)) }
            }
            None => {
                let b = self.reg(b)?;
                Inst::new(MachineOp::Tied(op), d, &[sums, a, b], width(ty))
            }
        };
        self.emit(inst);
        Ok(())
    }
}
