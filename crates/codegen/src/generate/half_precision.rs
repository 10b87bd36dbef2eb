//! f16 and bf16: 16-bit elements in memory, computed with in f32.
//!
//! GPUs convert them by instructions, and f16 most CPUs do. bf16, the upper half of an f32 number, is an
//! integer of 16 bits on a CPU, moved and rounded as such: that is exact, and needs no function of a library.

use tilewright_ir::{BufferId, DType};

use super::Generator;
use crate::ssa::{Compare, Id, SsaOp, Type};

/// Bits of an f32 number.
mod single {
    pub const MAGNITUDE: i32 = 0x7fff_ffff;
    pub const INFINITY: i32 = 0x7f80_0000;
    pub const QUIET: i32 = 1 << 22;
}

impl Generator<'_> {
    /// Whether elements of a type are integers of 16 bits to the code of this target.
    pub(super) fn is_upper_half(&self, dtype: DType) -> bool {
        dtype == DType::Bf16 && self.target.gpu.is_none()
    }

    /// Elements of 16 bits in f32.
    pub(super) fn widened_half(&self, x: Id, dtype: DType) -> Id {
        let lanes = self.m.type_of(x).lanes;
        let single = Type::F32.vector(lanes);
        if !self.is_upper_half(dtype) {
            return self.m.real_to_real(x, single);
        }
        let word = self.m.extend(x, Type::I32.vector(lanes), false);
        let word = self.m.binary(SsaOp::ShiftLeft, word, self.m.splat(self.m.int32(16), lanes));
        self.m.bitcast(word, single)
    }

    /// Numbers in f32 as elements of 16 bits: the nearest ones, of two as near the even one.
    pub(super) fn half_of(&self, x: Id, dtype: DType) -> Id {
        let lanes = self.m.type_of(x).lanes;
        match self.is_upper_half(dtype) {
            true => self.m.truncate(self.bits_of_bf16(x), Type::I16.vector(lanes)),
            false => self.m.real_to_real(x, self.value_type(dtype).vector(lanes)),
        }
    }

    /// Whether an instruction rounds f32 numbers to the elements of a buffer: it gives zeros for numbers
    /// below the normal ones, which dot products of pairs take them for.
    pub(super) fn serves_pairs(&self, buffer: BufferId, x: Id) -> bool {
        let lanes = self.m.type_of(x).lanes;
        self.plan.pairs.contains(&buffer) && matches!(lanes, 8 | 16) && lanes <= self.target.dot2_lanes()
    }

    /// The bits of the nearest bf16 numbers, as integers of 32 bits.
    pub(super) fn bits_of_bf16(&self, x: Id) -> Id {
        let m = &self.m;
        let lanes = m.type_of(x).lanes;
        let word = |n: i32| m.splat(m.int32(n), lanes);
        let x = m.bitcast(x, Type::I32.vector(lanes));
        let is_none =
            m.compare(Compare::Greater, m.binary(SsaOp::And, x, word(single::MAGNITUDE)), word(single::INFINITY));
        // Half of the last bit that is kept, or a little less where that bit is zero: once it is added,
        // leaving away the bits behind rounds to the nearest, halves to even.
        let odd = m.binary(SsaOp::And, m.binary(SsaOp::ShiftUnsigned, x, word(16)), word(1));
        let rounded = m.binary(SsaOp::AddWrapping, x, m.binary(SsaOp::AddWrapping, odd, word(0x7fff)));
        let none = m.binary(SsaOp::Or, x, word(single::QUIET));
        m.binary(SsaOp::ShiftUnsigned, m.select(is_none, none, rounded), word(16))
    }
}
