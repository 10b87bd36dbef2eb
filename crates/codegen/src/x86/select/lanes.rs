//! Lane operations: broadcasts, shuffles, insertion and extraction of scalars.

use super::super::inst::{Class, Inst, MachineOp, NONE, Reg};
use super::super::opcodes::*;
use super::{Selector, class_of, width};
use crate::ssa::{Id, LaneKind, SsaOp as Ssa, Type};

impl Selector<'_> {
    pub(super) fn splat_into(&mut self, d: Reg, x: Id, ty: Type) -> Result<(), String> {
        let w = width(ty);
        match ty.kind {
            LaneKind::F32 | LaneKind::F64 => {
                let op = broadcast(ty.kind, w);
                let folded = self.folded_operand(x);
                let inst = match folded {
                    Some(operand) => Inst { operand: Some(operand), ..Inst::new(MachineOp::Unary(op), d, &[], w) },
                    None => {
                        let x = self.reg(x)?;
                        Inst::new(MachineOp::Unary(op), d, &[x], w)
                    }
                };
                self.emit(inst);
            }
            LaneKind::Bf16 => unreachable!("there is no code for bf16 numbers that are not integers"),
            LaneKind::Pointer(_) => return Err("addresses in lanes".into()),
            LaneKind::I1 | LaneKind::I8 | LaneKind::I16 | LaneKind::F16 | LaneKind::I32 | LaneKind::I64 => {
                if let Some(operand) = self.folded_operand(x) {
                    let op = MachineOp::Unary(broadcast_integer(ty.kind.bytes()));
                    self.emit(Inst { operand: Some(operand), ..Inst::new(op, d, &[], w) });
                    return Ok(());
                }
                let mut bits = self.reg(x)?;
                if self.ty(x).kind == LaneKind::I1 {
                    let zero = self.emit_new(MachineOp::Integer(0), Class::Integer, &[], 8);
                    bits = self.emit_new(MachineOp::IntegerBinary(5), Class::Integer, &[zero, bits], 8);
                }
                let op = if ty.kind == LaneKind::I1 { MachineOp::MaskSplat } else { MachineOp::Splat(ty.kind.bytes()) };
                self.emit(Inst::new(op, d, &[bits], w));
            }
        }
        Ok(())
    }

    /// Register with lane indices for a permutation.
    pub(super) fn lanes(&mut self, picks: &[i32], bytes: usize, kind: LaneKind) -> Reg {
        let kind = if kind.bytes() == 8 { LaneKind::I64 } else { LaneKind::I32 };
        let n = bytes / kind.bytes();
        let bits: Vec<u64> = (0..n).map(|lane| picks.get(lane).map_or(0, |p| (*p).max(0) as u64)).collect();
        self.constant_register(&bits, kind)
    }

    pub(super) fn shuffle_into(&mut self, d: Reg, a: Id, b: Id, mask: &[i32], ty: Type) -> Result<(), String> {
        let from = self.ty(a);
        if class_of(from) == Class::Mask {
            return self.shuffle_masks_into(d, a, b, mask, from.lanes);
        }
        let w = width(ty).max(width(from));
        if ty.kind.bytes() < 4 && self.short_halves_into(d, a, b, mask, from, ty)? {
            return Ok(());
        }
        let n_from = from.lanes as i32;
        let n = (w / ty.kind.bytes()) as i32;
        let uses = |second: bool| mask.iter().any(|m| *m >= 0 && (*m >= n_from) == second);
        match (uses(false), uses(true)) {
            (true, true) => {}
            (_, second) => {
                let picks: Vec<i32> = mask.iter().map(|m| if second { m - n_from } else { *m }).collect();
                let x = self.reg(if second { b } else { a })?;
                return self.permute_into(d, x, &picks, w, ty.kind);
            }
        }
        let (a, b) = (self.reg(a)?, self.reg(b)?);
        let stays = |(lane, m): (usize, &i32)| *m < 0 || *m as usize % from.lanes == lane;
        if self.has_masks && ty.lanes <= from.lanes.min(16) && mask.iter().enumerate().all(stays) {
            let second: Vec<u64> = mask.iter().map(|m| u64::from(*m >= n_from)).collect();
            let k = self.constant_register(&second, LaneKind::I1);
            self.emit(Inst::new(MachineOp::Blend(ty.kind.bytes()), d, &[k, a, b], w));
            return Ok(());
        }
        if ty.kind.bytes() < 4 {
            return self.shuffle_short_into(d, [a, b], mask, from, ty);
        }
        if self.has_masks {
            let picks: Vec<i32> = mask.iter().map(|m| if *m >= n_from { m - n_from + n } else { *m }).collect();
            let picks = self.lanes(&picks, w, ty.kind);
            let op = if ty.kind.bytes() == 8 { PERMUTE_TWO_DOUBLE } else { PERMUTE_TWO_SINGLE };
            self.emit(Inst::new(MachineOp::Tied(op), d, &[a, picks, b], w));
            return Ok(());
        }
        let of_first: Vec<i32> = mask.iter().map(|m| if *m >= n_from { -1 } else { *m }).collect();
        let of_second: Vec<i32> = mask.iter().map(|m| if *m >= n_from { m - n_from } else { -1 }).collect();
        let parts = [(a, of_first), (b, of_second)];
        let mut permuted = [NONE; 2];
        for ((x, picks), out) in parts.into_iter().zip(&mut permuted) {
            *out = self.virtual_register(Class::Vector, w);
            self.permute_into(*out, x, &picks, w, ty.kind)?;
        }
        let second = mask.iter().enumerate().fold(0u8, |all, (lane, m)| all | u8::from(*m >= n_from) << lane);
        let op = if ty.kind.bytes() == 8 { BLEND_DOUBLE } else { BLEND_SINGLE };
        self.emit(Inst::new(MachineOp::BinaryImmediate(op, second), d, &permuted, w));
        Ok(())
    }

    /// Emits the upper half of a mask, or the concatenation of two halves.
    fn shuffle_masks_into(&mut self, d: Reg, a: Id, b: Id, mask: &[i32], n: usize) -> Result<(), String> {
        let are_in_order = mask.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        match (mask[0], n, mask.len()) {
            (8, 16, 8) if are_in_order => {
                let a = self.reg(a)?;
                self.emit(Inst::new(MachineOp::MaskShift(8), d, &[a], 2));
            }
            (0, 8, 16) if are_in_order => {
                let (low, high) = (self.reg(a)?, self.reg(b)?);
                self.emit(Inst::new(MachineOp::MaskBinary(MASK_JOIN), d, &[high, low], 2));
            }
            _ => return Err("a shuffle of masks".into()),
        }
        Ok(())
    }

    /// Emits a permutation of the lanes of one register.
    pub(super) fn permute_into(
        &mut self,
        d: Reg,
        x: Reg,
        picks: &[i32],
        w: usize,
        kind: LaneKind,
    ) -> Result<(), String> {
        let wide = kind.bytes() == 8;
        if picks.iter().enumerate().all(|(lane, p)| *p < 0 || *p as usize == lane) {
            self.emit(Inst::new(MachineOp::Move, d, &[x], w));
            return Ok(());
        }
        if kind.bytes() < 4 {
            let bytes = self.byte_numbers(picks, w, kind)?;
            self.emit(Inst::new(MachineOp::Binary(PERMUTE_BYTES), d, &[x, bytes], w));
            return Ok(());
        }
        let immediate = |bits: u32| {
            picks.iter().enumerate().fold(0u8, |all, (lane, p)| all | ((*p).max(0) as u8) << (lane as u32 * bits))
        };
        let inst = match (w, wide) {
            (16, false) => Inst::new(MachineOp::UnaryImmediate(PERMUTE_QUAD, immediate(2)), d, &[x], w),
            (16, true) => Inst::new(MachineOp::UnaryImmediate(PERMUTE_PAIR, immediate(1)), d, &[x], w),
            (32, true) => Inst::new(MachineOp::UnaryImmediate(PERMUTE_DOUBLE_IMMEDIATE, immediate(2)), d, &[x], w),
            _ => {
                let picks = self.lanes(picks, w, kind);
                let op = if wide { PERMUTE_DOUBLE } else { PERMUTE_SINGLE };
                Inst::new(MachineOp::Binary(op), d, &[picks, x], w)
            }
        };
        self.emit(inst);
        Ok(())
    }

    /// Emits a vector built lane by lane.
    pub(super) fn insert_into(&mut self, d: Reg, id: Id, ty: Type) -> Result<(), String> {
        let mut lanes: Vec<Option<Id>> = vec![None; ty.lanes];
        let mut at = id;
        loop {
            let inst = self.instruction(at).expect("an insertion");
            let Ssa::Insert(lane) = inst.op else { unreachable!("only insertions are followed") };
            let (into, x) = (self.same_as[inst.operands[0].at()], inst.operands[1]);
            if self.ty(x).kind == LaneKind::I1 {
                return Err("truth values as lanes".into());
            }
            lanes[lane] = lanes[lane].or(Some(x));
            at = into;
            if !(matches!(self.op_of(at), Some(Ssa::Insert(_))) && self.is_folded(at)) {
                break;
            }
        }
        let w = width(ty);
        let wide = ty.kind.bytes() == 8;
        let is_short = ty.kind.bytes() < 4;
        if !self.is_undefined(at) && is_short && w > 16 {
            return Err("short lanes of a vector".into());
        }
        if !self.is_undefined(at) && is_short && w == 16 {
            let mut whole = self.reg(at)?;
            for (lane, x) in lanes.iter().enumerate() {
                let Some(x) = *x else { continue };
                whole = self.insert_integer(whole, x, lane, ty.kind)?;
            }
            self.emit(Inst::new(MachineOp::Move, d, &[whole], w));
            return Ok(());
        }
        if !self.is_undefined(at) {
            let mut whole = self.reg(at)?;
            let set: Vec<(usize, Id)> = lanes.iter().enumerate().filter_map(|(lane, x)| x.map(|x| (lane, x))).collect();
            let last = set.len() - 1;
            for (number, (lane, x)) in set.into_iter().enumerate() {
                // A scalar is the first lane of its register.
                let filled = match lane {
                    0 if class_of(self.ty(x)) == Class::Vector => self.reg(x)?,
                    _ => {
                        let filled = self.virtual_register(Class::Vector, w);
                        self.splat_into(filled, x, ty)?;
                        filled
                    }
                };
                let to = if number == last { d } else { self.virtual_register(Class::Vector, w) };
                if self.has_masks {
                    let mut bits = vec![0; ty.lanes.max(2)];
                    bits[lane] = 1;
                    let k = self.constant_register(&bits, LaneKind::I1);
                    self.emit(Inst::new(MachineOp::Blend(ty.kind.bytes()), to, &[k, whole, filled], w));
                } else {
                    let op = if wide { BLEND_DOUBLE } else { BLEND_SINGLE };
                    self.emit(Inst::new(MachineOp::BinaryImmediate(op, 1 << lane), to, &[whole, filled], w));
                }
                whole = to;
            }
            return Ok(());
        }
        let per_quad = 16 / ty.kind.bytes();
        let n_quads = w / 16;
        let mut whole = NONE;
        let used: Vec<usize> =
            (0..n_quads).filter(|q| lanes.iter().skip(q * per_quad).take(per_quad).any(Option::is_some)).collect();
        for (number, q) in used.iter().enumerate() {
            let is_last = number + 1 == used.len();
            let quad: Vec<Option<Id>> = lanes.iter().copied().skip(q * per_quad).take(per_quad).collect();
            let part = self.quad(&quad, ty.kind)?;
            let to = if is_last { d } else { self.virtual_register(Class::Vector, w) };
            if *q == 0 {
                self.emit(Inst::new(MachineOp::Move, to, &[part], w));
            } else {
                if whole == NONE {
                    whole = self.emit_new(MachineOp::Undefined, Class::Vector, &[], w);
                }
                self.emit(Inst::new(MachineOp::BinaryImmediate(INSERT_QUAD, *q as u8), to, &[whole, part], w));
            }
            whole = to;
        }
        Ok(())
    }

    /// Builds 16 bytes from scalars.
    pub(super) fn quad(&mut self, lanes: &[Option<Id>], kind: LaneKind) -> Result<Reg, String> {
        let is_integer = !matches!(kind, LaneKind::F32 | LaneKind::F64);
        let mut whole = match lanes[0] {
            Some(x) if is_integer => {
                let x = self.reg(x)?;
                self.emit_new(MachineOp::FromInteger { wide: kind == LaneKind::I64 }, Class::Vector, &[x], 16)
            }
            Some(x) => self.reg(x)?,
            None => self.emit_new(MachineOp::Undefined, Class::Vector, &[], 16),
        };
        for (lane, x) in lanes.iter().enumerate().skip(1) {
            let Some(x) = *x else { continue };
            if is_integer {
                whole = self.insert_integer(whole, x, lane, kind)?;
                continue;
            }
            let folded = self.folded_operand(x);
            let x = if folded.is_some() { NONE } else { self.reg(x)? };
            let d = self.virtual_register(Class::Vector, 16);
            let op = match (kind, folded) {
                (LaneKind::F32, _) => MachineOp::BinaryImmediate(INSERT_SINGLE, (lane as u8) << 4),
                (_, Some(_)) => MachineOp::Binary(LOAD_HIGH_DOUBLE),
                _ => MachineOp::Binary(UNPACK_LOW_DOUBLE),
            };
            self.emit(Inst { operand: folded, ..Inst::new(op, d, &[whole, x], 16) });
            whole = d;
        }
        Ok(whole)
    }

    /// Replaces a lane of a 16-byte vector by an integer.
    fn insert_integer(&mut self, whole: Reg, x: Id, lane: usize, kind: LaneKind) -> Result<Reg, String> {
        let operand = self.folded_operand(x);
        let x = if operand.is_some() { NONE } else { self.reg(x)? };
        let d = self.virtual_register(Class::Vector, 16);
        let op = MachineOp::InsertInteger(kind.bytes(), lane as u8);
        self.emit(Inst { operand, ..Inst::new(op, d, &[whole, x], 16) });
        Ok(d)
    }

    /// Register with byte indices for a permutation of lanes within each 16 bytes.
    fn byte_numbers(&mut self, picks: &[i32], w: usize, kind: LaneKind) -> Result<Reg, String> {
        let size = kind.bytes();
        let mut bytes = vec![0x80u64; w];
        for (lane, pick) in picks.iter().enumerate().filter(|(_, pick)| **pick >= 0) {
            let from = *pick as usize * size;
            if from / 16 != lane * size / 16 {
                return Err("bytes that cross 16".into());
            }
            (0..size).for_each(|at| bytes[lane * size + at] = ((from + at) % 16) as u64);
        }
        Ok(self.constant_register(&bytes, LaneKind::I8))
    }

    /// Emits the upper half of 16 bytes, or the concatenation of two halves; returns whether the shuffle is
    /// one of these.
    fn short_halves_into(&mut self, d: Reg, a: Id, b: Id, mask: &[i32], from: Type, ty: Type) -> Result<bool, String> {
        let are_in_order = mask.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        match (from.bytes(), ty.bytes(), mask[0]) {
            (32, 16, first) if are_in_order && first as usize == ty.lanes => {
                let a = self.reg(a)?;
                self.emit(Inst::new(MachineOp::StorePart(EXTRACT_QUAD, 1), d, &[a], 32));
            }
            (16, 32, 0) if are_in_order => {
                let (low, high) = (self.reg(a)?, self.reg(b)?);
                self.emit(Inst::new(MachineOp::BinaryImmediate(INSERT_QUAD, 1), d, &[low, high], 32));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Emits a shuffle of bytes or 16-bit integers of two vectors.
    fn shuffle_short_into(
        &mut self,
        d: Reg,
        vectors: [Reg; 2],
        mask: &[i32],
        from: Type,
        ty: Type,
    ) -> Result<(), String> {
        let (w, n) = (width(ty).max(width(from)), from.lanes as i32);
        let mut parts = [NONE; 2];
        for (second, (part, x)) in parts.iter_mut().zip(vectors).enumerate() {
            let own = |m: &i32| if *m >= 0 && (*m >= n) == (second == 1) { m % n } else { -1 };
            let picks: Vec<i32> = mask.iter().map(own).collect();
            let bytes = self.byte_numbers(&picks, w, ty.kind)?;
            *part = self.emit_new(MachineOp::Binary(PERMUTE_BYTES), Class::Vector, &[x, bytes], w);
        }
        self.emit(Inst::new(MachineOp::Binary(OR), d, &parts, w));
        Ok(())
    }

    pub(super) fn extract_into(&mut self, d: Reg, to: Type, from: Id, lane: usize) -> Result<(), String> {
        // The lanes are those of the operand, even if it has the bits of a value with other lanes.
        let ty = self.ty(from);
        let from = self.same_as[from.at()];
        if class_of(ty) == Class::Mask {
            let from = self.reg(from)?;
            let bits = self.emit_new(MachineOp::MaskBits, Class::Integer, &[from], 8);
            let bits = match lane {
                0 => bits,
                _ => self.emit_new(MachineOp::IntegerShift(5, lane as u8), Class::Integer, &[bits], 8),
            };
            self.emit(Inst::new(MachineOp::IntegerConstant(4, 1), d, &[bits], 8));
            return Ok(());
        }
        let per_quad = 16 / ty.kind.bytes();
        let (q, lane) = (lane / per_quad, lane % per_quad);
        let quad = match self.quads.get(&(from, q)) {
            Some(r) => *r,
            None => {
                let whole = self.reg(from)?;
                let r = match q {
                    0 => whole,
                    _ => {
                        let d = self.virtual_register(Class::Vector, 16);
                        self.emit(Inst::new(MachineOp::StorePart(EXTRACT_QUAD, q as u8), d, &[whole], width(ty)));
                        d
                    }
                };
                self.quads.insert((from, q), r);
                r
            }
        };
        match (lane, ty.kind) {
            (_, LaneKind::I8 | LaneKind::I16 | LaneKind::F16 | LaneKind::I32 | LaneKind::I64) => {
                let op = MachineOp::ExtractInteger(ty.kind.bytes(), lane as u8);
                // A mask lane may have all bits set.
                if to.kind == LaneKind::I1 {
                    let all = self.emit_new(op, Class::Integer, &[quad], 16);
                    self.emit(Inst::new(MachineOp::IntegerConstant(4, 1), d, &[all], 8));
                } else {
                    self.emit(Inst::new(op, d, &[quad], 16));
                }
            }
            (0, _) => self.emit(Inst::new(MachineOp::Move, d, &[quad], 16)),
            (_, LaneKind::F32) => {
                self.emit(Inst::new(MachineOp::UnaryImmediate(PERMUTE_QUAD, lane as u8), d, &[quad], 16))
            }
            _ => self.emit(Inst::new(MachineOp::UnaryImmediate(PERMUTE_PAIR, lane as u8), d, &[quad], 16)),
        }
        Ok(())
    }
}

/// Instruction that broadcasts a lane to a vector.
pub fn broadcast(kind: LaneKind, width: usize) -> Opcode {
    match (kind, width) {
        (LaneKind::F32, _) => BROADCAST_SINGLE,
        (_, 16) => DUPLICATE_DOUBLE,
        _ => BROADCAST_DOUBLE,
    }
}
