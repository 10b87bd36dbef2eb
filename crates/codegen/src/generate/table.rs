//! Table lookups in registers, for functions of 8-bit integers.

use tilewright_ir::expr::{Expr, Subscript};
use tilewright_ir::{BufferId, DType, Index};

use super::memory::LaneAddresses;
use super::value::LaneOperand;
use super::{Generator, plan};
use crate::ssa::{Id, SsaOp, Type};

impl Generator<'_> {
    /// Reads elements of a table of 256 u8 by u8 subscripts, in the arithmetic of `dtype`, or as bytes if
    /// that is u8; four registers hold the whole table. `None` for other tables, if the machine has no byte
    /// permutation, and for bytes from vectors of words.
    pub(super) fn looked_up(&mut self, table: BufferId, subscripts: &[Subscript], dtype: DType) -> Option<LaneOperand> {
        let of_table = self.program.buffer(table);
        let is_table = of_table.dtype == DType::U8 && of_table.shape == [256] && !self.in_registers(table);
        let [Subscript::Value(number)] = subscripts else { return None };
        let Expr::Load(bytes, index) = &**number else { return None };
        let is_of_bytes = self.program.buffer(*bytes).dtype == DType::U8;
        (is_table && is_of_bytes && plan::has_byte_tables(self.target)).then_some(())?;
        let words = Type::I32.vector(16);
        // One byte per lane, or four bytes, three of which are 0.
        let lanes = self.f.lanes?.piece.width;
        let number = match lanes {
            64 => self.load(*bytes, index),
            16 if dtype != DType::U8 => self.eval(number, DType::I32),
            _ => return None,
        };
        (number.lanes == lanes).then_some(())?;
        let quarters: Vec<Id> = (0..4)
            .map(|at| {
                let base = Index::from(64 * at);
                // Key of the table, which no other access uses, as its lanes have no stride.
                let key = (LaneAddresses::Strided { base: base.clone(), stride: 0 }, 0);
                self.cached(table, key, |g| {
                    let (pointer, align) = (g.pointer(table, &base), g.alignment(table, &base));
                    g.plain_load(table, words, pointer, align)
                })
            })
            .collect();
        let m = &self.m;
        let splat = |n: i32| m.splat(m.int32(n), 16);
        let at = if lanes == 64 { m.bitcast(number.value, words) } else { number.value };
        let [low, high] = [0, 2].map(|half| m.pick_bytes(at, quarters[half], quarters[half + 1]));
        // Mask of the bytes whose index is in the upper half.
        let half = m.binary(SsaOp::ShiftUnsigned, at, splat(1));
        let is_high = m.pick_bytes(half, splat(0), splat(-1));
        let differ = m.binary(SsaOp::And, m.binary(SsaOp::Xor, low, high), is_high);
        let picked = m.binary(SsaOp::Xor, low, differ);
        if lanes == 64 {
            let found = LaneOperand { value: m.bitcast(picked, m.type_of(number.value)), lanes };
            return Some(if dtype == DType::U8 { found } else { self.element(table, found, dtype) });
        }
        let found = LaneOperand { value: m.binary(SsaOp::And, picked, splat(255)), lanes };
        Some(self.convert(found, DType::I32, dtype))
    }
}
