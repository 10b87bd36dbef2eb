//! Integers, addresses and truth values.

use super::super::encode::Condition;
use super::super::inst::{Base, Inst, Memory, NONE, Op, Reg};
use super::Selector;
use crate::ssa::{self, Compare, Id, Kind, Op as Ssa};

impl Selector<'_> {
    pub(super) fn integer_into(&mut self, d: Reg, id: Id, inst: &ssa::Instruction) -> Result<(), String> {
        let operand = |at: usize| inst.operands[at];
        let constant = |s: &Self, at: usize| s.integer(operand(at)).and_then(|c| i32::try_from(c).ok());
        let plain = |op: Op, uses: &[Reg]| Inst::new(op, d, uses, 8);
        match &inst.op {
            Ssa::Load { .. } => {
                if matches!(self.op_of(operand(0)), Some(Ssa::Variable(_))) || self.ty(id).bytes() != 8 {
                    return Err("a load of integers".into());
                }
                let memory = self.address(operand(0))?;
                self.emit(plain(Op::Move, &[]).with(memory, false));
            }
            Ssa::Element(element) => {
                let memory = self.address(operand(0))?;
                let index = self.reg(operand(1))?;
                let memory = match (memory.index, element.bytes()) {
                    (None, bytes @ (1 | 2 | 4 | 8)) => {
                        Memory { index: Some((index, bytes.trailing_zeros() as u8)), ..memory }
                    }
                    _ => return Err("an element's size".into()),
                };
                self.emit(plain(Op::Address, &[]).with(memory, false));
            }
            Ssa::Add | Ssa::Sub | Ssa::And | Ssa::Or | Ssa::Xor | Ssa::Mul => {
                let mut operands = [0, 1];
                if self.integer(operand(0)).is_some() && inst.op != Ssa::Sub {
                    operands = [1, 0];
                }
                let c = constant(self, operands[1]);
                let a = self.reg(operand(operands[0]))?;
                let number = match inst.op {
                    Ssa::Add => 0,
                    Ssa::Or => 1,
                    Ssa::And => 4,
                    Ssa::Sub => 5,
                    _ => 6,
                };
                match (c, &inst.op) {
                    (Some(c), Ssa::Add) => {
                        let memory = Memory { base: Base::Register(a), index: None, disp: c };
                        self.emit(plain(Op::Address, &[]).with(memory, false));
                    }
                    (Some(c), Ssa::Mul) => self.emit(plain(Op::MultiplyConstant(c), &[a])),
                    (Some(c), _) => self.emit(plain(Op::IntegerConstant(number, c), &[a])),
                    (None, Ssa::Add) => {
                        let b = self.reg(operand(operands[1]))?;
                        let memory = Memory { base: Base::Register(a), index: Some((b, 0)), disp: 0 };
                        self.emit(plain(Op::Address, &[]).with(memory, false));
                    }
                    (None, op) => {
                        let op = if *op == Ssa::Mul { Op::Multiply } else { Op::IntegerBinary(number) };
                        let b = self.reg(operand(operands[1]))?;
                        self.emit(plain(op, &[a, b]));
                    }
                }
            }
            Ssa::ShiftLeft | Ssa::ShiftSigned | Ssa::ShiftUnsigned => {
                let by = constant(self, 1).ok_or("a shift by a variable")?;
                let number = match inst.op {
                    Ssa::ShiftLeft => 4,
                    Ssa::ShiftUnsigned => 5,
                    _ => 7,
                };
                let a = self.reg(operand(0))?;
                self.emit(plain(Op::IntegerShift(number, by as u8), &[a]));
            }
            Ssa::SignedDiv | Ssa::SignedRem | Ssa::UnsignedDiv | Ssa::UnsignedRem => {
                let signed = matches!(inst.op, Ssa::SignedDiv | Ssa::SignedRem);
                let remainder = matches!(inst.op, Ssa::SignedRem | Ssa::UnsignedRem);
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(plain(Op::Divide { signed, remainder }, &[a, b]));
            }
            Ssa::SignedMin | Ssa::SignedMax => {
                let condition = if inst.op == Ssa::SignedMin { Condition::Less } else { Condition::Greater };
                let (a, b) = (self.reg(operand(0))?, self.reg(operand(1))?);
                self.emit(plain(Op::Choose(condition), &[a, b]));
            }
            Ssa::Truncate => {
                let a = self.reg(operand(0))?;
                self.emit(plain(Op::Move, &[a]));
            }
            Ssa::Compare(_) | Ssa::FLess => {
                let condition = self.comparison(inst)?;
                self.emit(plain(Op::Set(condition), &[]));
            }
            Ssa::Select => {
                let (a, b) = (self.reg(operand(1))?, self.reg(operand(2))?);
                let condition = self.flags(operand(0))?;
                self.emit(plain(Op::Select(condition), &[a, b]));
            }
            other => return Err(format!("{other:?} of integers")),
        }
        Ok(())
    }

    /// Sets the flags by a comparison that is not folded.
    pub(super) fn comparison(&mut self, inst: &ssa::Instruction) -> Result<Condition, String> {
        let (a, b) = (inst.operands[0], inst.operands[1]);
        let of = self.ty(a);
        match inst.op {
            Ssa::Compare(how) => {
                if of.kind != Kind::I64 {
                    return Err("a comparison of short integers".into());
                }
                let (a, b) = (self.reg(a)?, self.reg(b)?);
                self.emit(Inst::new(Op::Compare, NONE, &[a, b], 8));
                Ok(match how {
                    Compare::Equal => Condition::Equal,
                    Compare::NotEqual => Condition::NotEqual,
                    Compare::Less => Condition::Less,
                    Compare::Greater => Condition::Greater,
                })
            }
            _ => {
                let (a, b) = (self.reg(a)?, self.reg(b)?);
                self.emit(Inst::new(Op::CompareReals { wide: of.kind == Kind::F64 }, NONE, &[b, a], 16));
                Ok(Condition::Above)
            }
        }
    }
}
