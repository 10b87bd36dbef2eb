//! Integers, addresses and booleans.

use super::super::encode::ConditionCode;
use super::super::inst::{Base, Class, Inst, MachineOp, MemoryAddress, NONE, Reg};
use super::super::opcodes::{AND, COMPARE, ORDERED, Opcode, SHIFT_LEFT, SHIFT_RIGHT, SHIFT_SIGNED, packed, shift_by};
use super::{Selector, width};
use crate::ssa::{self, Compare, Id, LaneKind, SsaOp as Ssa, Type};

/// Condition code of a relation after an integer comparison.
pub(super) fn condition(how: Compare) -> ConditionCode {
    match how {
        Compare::Equal => ConditionCode::Equal,
        Compare::NotEqual => ConditionCode::NotEqual,
        Compare::Less => ConditionCode::Less,
        Compare::Greater => ConditionCode::Greater,
    }
}

impl Selector<'_> {
    pub(super) fn integer_into(&mut self, d: Reg, id: Id, inst: &ssa::Instruction) -> Result<(), String> {
        let operand = |at: usize| inst.operands[at];
        let constant = |s: &Self, at: usize| s.integer(operand(at)).and_then(|c| i32::try_from(c).ok());
        let plain = |op: MachineOp, uses: &[Reg]| Inst::new(op, d, uses, 8);
        let ty = self.ty(id);
        match &inst.op {
            Ssa::Load { .. } if matches!(self.op_of(operand(0)), Some(Ssa::Variable(_))) => {
                self.emit(plain(MachineOp::Move, &[self.regs[operand(0).at()]]));
            }
            Ssa::Load { .. } => {
                if ty.kind == LaneKind::I1 {
                    return Err("truth values in memory".into());
                }
                let memory = self.address(operand(0))?;
                let op = if ty.bytes() == 8 { MachineOp::Move } else { MachineOp::Extend { signed: false } };
                self.emit(Inst::new(op, d, &[], ty.bytes()).with(memory, false));
            }
            Ssa::Element(element) => {
                let memory = self.address(operand(0))?;
                if self.ty(operand(1)).kind != LaneKind::I64 {
                    return Err("a short number of an element".into());
                }
                let index = self.reg(operand(1))?;
                let memory = match (memory.index, element.bytes()) {
                    (None, bytes @ (1 | 2 | 4 | 8)) => {
                        MemoryAddress { index: Some((index, bytes.trailing_zeros() as u8)), ..memory }
                    }
                    _ => return Err("an element's size".into()),
                };
                self.emit(plain(MachineOp::Address, &[]).with(memory, false));
            }
            // The low bits of results depend only on the low bits of operands.
            Ssa::Add
            | Ssa::Sub
            | Ssa::And
            | Ssa::Or
            | Ssa::Xor
            | Ssa::Mul
            | Ssa::AddWrapping
            | Ssa::SubWrapping
            | Ssa::MulWrapping => {
                let op = match inst.op {
                    Ssa::AddWrapping => &Ssa::Add,
                    Ssa::SubWrapping => &Ssa::Sub,
                    Ssa::MulWrapping => &Ssa::Mul,
                    _ => &inst.op,
                };
                let mut operands = [0, 1];
                if self.integer(operand(0)).is_some() && *op != Ssa::Sub {
                    operands = [1, 0];
                }
                let c = constant(self, operands[1]);
                let a = self.reg(operand(operands[0]))?;
                let number = match op {
                    Ssa::Add => 0,
                    Ssa::Or => 1,
                    Ssa::And => 4,
                    Ssa::Sub => 5,
                    _ => 6,
                };
                match (c, op) {
                    (Some(c), Ssa::Add) => {
                        let memory = MemoryAddress { base: Base::Register(a), index: None, disp: c };
                        self.emit(plain(MachineOp::Address, &[]).with(memory, false));
                    }
                    (Some(c), Ssa::Mul) => self.emit(plain(MachineOp::MultiplyConstant(c), &[a])),
                    (Some(c), _) => self.emit(plain(MachineOp::IntegerConstant(number, c), &[a])),
                    (None, Ssa::Add) => {
                        let b = self.reg(operand(operands[1]))?;
                        let memory = MemoryAddress { base: Base::Register(a), index: Some((b, 0)), disp: 0 };
                        self.emit(plain(MachineOp::Address, &[]).with(memory, false));
                    }
                    (None, op) => {
                        let op = if *op == Ssa::Mul { MachineOp::Multiply } else { MachineOp::IntegerBinary(number) };
                        let b = self.reg(operand(operands[1]))?;
                        self.emit(plain(op, &[a, b]));
                    }
                }
            }
            Ssa::ShiftLeft | Ssa::ShiftSigned | Ssa::ShiftUnsigned => {
                let bytes = self.compared_bytes(operand(0))?;
                let a = self.reg(operand(0))?;
                let Some(by) = constant(self, 1) else {
                    let number = match inst.op {
                        Ssa::ShiftLeft => SHIFT_LEFT,
                        Ssa::ShiftUnsigned => SHIFT_RIGHT,
                        _ => SHIFT_SIGNED,
                    };
                    let by = self.reg(operand(1))?;
                    self.emit(Inst::new(MachineOp::IntegerShiftBy(shift_by(number, bytes == 8)), d, &[a, by], bytes));
                    return Ok(());
                };
                let number = match inst.op {
                    Ssa::ShiftLeft => 4,
                    Ssa::ShiftUnsigned => 5,
                    _ => 7,
                };
                self.emit(Inst::new(MachineOp::IntegerShift(number, by as u8), d, &[a], bytes));
            }
            Ssa::SignedDiv | Ssa::SignedRem | Ssa::UnsignedDiv | Ssa::UnsignedRem => {
                let signed = matches!(inst.op, Ssa::SignedDiv | Ssa::SignedRem);
                let remainder = matches!(inst.op, Ssa::SignedRem | Ssa::UnsignedRem);
                let bytes = self.compared_bytes(operand(0))?;
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(Inst::new(MachineOp::Divide { signed, remainder }, d, &[a, b], bytes));
            }
            Ssa::SignedMin | Ssa::SignedMax => {
                let condition = if inst.op == Ssa::SignedMin { ConditionCode::Less } else { ConditionCode::Greater };
                let bytes = self.compared_bytes(operand(0))?;
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(Inst::new(MachineOp::Choose(condition), d, &[a, b], bytes));
            }
            Ssa::Truncate if ty.kind == LaneKind::I1 => {
                let a = self.reg(operand(0))?;
                self.emit(plain(MachineOp::IntegerConstant(4, 1), &[a]));
            }
            Ssa::Truncate | Ssa::Address => {
                let a = self.reg(operand(0))?;
                self.emit(plain(MachineOp::Move, &[a]));
            }
            Ssa::Convert => {
                let half = self.virtual_register(Class::Vector, 16);
                self.half_into(half, operand(0))?;
                self.emit(Inst::new(MachineOp::ExtractInteger(4, 0), d, &[half], 16));
            }
            Ssa::ExtendSigned | Ssa::ExtendUnsigned => self.extend_into(d, inst)?,
            Ssa::ToInteger | Ssa::ToIntegerInRange => self.cut_off_into(d, inst, ty)?,
            Ssa::Extract(lane) => self.extract_into(d, ty, operand(0), *lane)?,
            Ssa::Compare(_) | Ssa::FLess => {
                let condition = self.comparison(inst)?;
                self.emit(plain(MachineOp::Set(condition), &[]));
            }
            Ssa::Select => {
                let (a, b) = (self.reg(operand(1))?, self.reg(operand(2))?);
                let condition = self.flags(operand(0))?;
                self.emit(plain(MachineOp::Select(condition), &[a, b]));
            }
            other => return Err(format!("{other:?} of integers")),
        }
        Ok(())
    }

    /// Operation size in bytes of an instruction that depends on all bits of an integer; higher bits in
    /// registers are undefined.
    pub(super) fn compared_bytes(&self, id: Id) -> Result<usize, String> {
        match self.ty(id).kind {
            // The higher bits are zero.
            LaneKind::I1 | LaneKind::I64 => Ok(8),
            LaneKind::I32 => Ok(4),
            _ => Err("arithmetic of bytes".into()),
        }
    }

    fn extend_into(&mut self, d: Reg, inst: &ssa::Instruction) -> Result<(), String> {
        let (x, signed) = (inst.operands[0], inst.op == Ssa::ExtendSigned);
        let of = self.ty(x);
        if of.kind == LaneKind::I1 {
            let a = self.reg(x)?;
            match signed {
                false => self.emit(Inst::new(MachineOp::Move, d, &[a], 8)),
                true => {
                    let zero = self.emit_new(MachineOp::Integer(0), Class::Integer, &[], 8);
                    self.emit(Inst::new(MachineOp::IntegerBinary(5), d, &[zero, a], 8));
                }
            }
            return Ok(());
        }
        let op = MachineOp::Extend { signed };
        let inst = match self.folded_operand(x) {
            Some(operand) => Inst { operand: Some(operand), ..Inst::new(op, d, &[], of.bytes()) },
            None => {
                let a = self.reg(x)?;
                Inst::new(op, d, &[a], of.bytes())
            }
        };
        self.emit(inst);
        Ok(())
    }

    /// Converts a floating-point number to an integer. The machine's conversion returns the smallest integer
    /// for NaN and out of range.
    fn cut_off_into(&mut self, d: Reg, inst: &ssa::Instruction, ty: Type) -> Result<(), String> {
        let of = self.ty(inst.operands[0]);
        let (wide, long) = (of.kind == LaneKind::F64, ty.kind == LaneKind::I64);
        if !matches!(ty.kind, LaneKind::I32 | LaneKind::I64) {
            return Err("numbers as bytes".into());
        }
        let op = MachineOp::FromReal { wide, long };
        let mut x = self.reg(inst.operands[0])?;
        if inst.op == Ssa::ToIntegerInRange {
            self.emit(Inst::new(op, d, &[x], 16));
            return Ok(());
        }
        x = self.number_or_zero(x, of);
        let least = self.emit_new(op, Class::Integer, &[x], 16);
        // The largest integer is the complement of the smallest one.
        let beyond = if long { 2f64.powi(63) } else { 2f64.powi(31) };
        let below = if wide { beyond.next_down().to_bits() } else { u64::from((beyond as f32).next_down().to_bits()) };
        let below = self.constant_register(&[below], of.kind);
        self.emit(Inst::new(MachineOp::CompareReals { wide }, NONE, &[x, below], 16));
        let is_beyond = self.emit_new(MachineOp::Set(ConditionCode::Above), Class::Integer, &[], 8);
        let zero = self.emit_new(MachineOp::Integer(0), Class::Integer, &[], 8);
        let complement = self.emit_new(MachineOp::IntegerBinary(5), Class::Integer, &[zero, is_beyond], 8);
        self.emit(Inst::new(MachineOp::IntegerBinary(6), d, &[least, complement], 8));
        Ok(())
    }

    /// Replaces NaN by zero.
    fn number_or_zero(&mut self, x: Reg, ty: Type) -> Reg {
        let (w, compare) = (width(ty), packed(COMPARE, ty.kind));
        if self.has_masks {
            let compare = MachineOp::BinaryImmediate(Opcode { evex: true, ..compare }, ORDERED);
            let is_number = self.emit_new(compare, Class::Mask, &[x, x], w);
            let zero = self.splat_constant(0, ty);
            return self.emit_new(MachineOp::Blend(ty.kind.bytes()), Class::Vector, &[is_number, zero, x], w);
        }
        let is_number = self.emit_new(MachineOp::BinaryImmediate(compare, ORDERED), Class::Vector, &[x, x], w);
        self.emit_new(MachineOp::Binary(AND), Class::Vector, &[is_number, x], w)
    }

    /// Sets the flags with a comparison that is not folded.
    pub(super) fn comparison(&mut self, inst: &ssa::Instruction) -> Result<ConditionCode, String> {
        let (a, b) = (inst.operands[0], inst.operands[1]);
        let of = self.ty(a);
        match inst.op {
            Ssa::Compare(how) => {
                let bytes = self.compared_bytes(a)?;
                let (a, b) = (self.reg(a)?, self.reg(b)?);
                self.emit(Inst::new(MachineOp::Compare, NONE, &[a, b], bytes));
                Ok(condition(how))
            }
            _ => {
                let (a, b) = (self.reg(a)?, self.reg(b)?);
                self.emit(Inst::new(MachineOp::CompareReals { wide: of.kind == LaneKind::F64 }, NONE, &[b, a], 16));
                Ok(ConditionCode::Above)
            }
        }
    }
}
