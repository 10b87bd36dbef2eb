//! f16 and bf16, which are 16-bit elements in memory and computed in f32.
//!
//! GPUs have conversion instructions for both, most CPUs for f16. On a CPU, bf16, the upper half of an f32
//! number, is a 16-bit integer, moved and rounded as such, which is exact and needs no library function.

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
    /// Whether code for this target represents elements of a type as 16-bit integers.
    pub(super) fn is_upper_half(&self, dtype: DType) -> bool {
        dtype == DType::Bf16 && self.target.gpu.is_none()
    }

    /// Converts 16-bit elements to f32.
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

    /// Rounds f32 numbers to 16-bit elements, to nearest, ties to even.
    pub(super) fn half_of(&self, x: Id, dtype: DType) -> Id {
        let lanes = self.m.type_of(x).lanes;
        match self.is_upper_half(dtype) {
            true => self.m.truncate(self.bits_of_bf16(x), Type::I16.vector(lanes)),
            false => self.m.real_to_real(x, self.value_type(dtype).vector(lanes)),
        }
    }

    /// Whether an instruction that flushes subnormal numbers may round f32 numbers to the elements of a
    /// buffer, because only dot products of pairs, which treat them as zeros, read the buffer.
    pub(super) fn serves_pairs(&self, buffer: BufferId, x: Id) -> bool {
        let lanes = self.m.type_of(x).lanes;
        self.plan.pairs.contains(&buffer) && matches!(lanes, 8 | 16) && lanes <= self.target.dot2_lanes()
    }

    /// Bits of the nearest bf16 numbers, as 32-bit integers.
    pub(super) fn bits_of_bf16(&self, x: Id) -> Id {
        let m = &self.m;
        let lanes = m.type_of(x).lanes;
        let word = |n: i32| m.splat(m.int32(n), lanes);
        let x = m.bitcast(x, Type::I32.vector(lanes));
        let is_none =
            m.compare(Compare::Greater, m.binary(SsaOp::And, x, word(single::MAGNITUDE)), word(single::INFINITY));
        // Adding half of the last kept bit, or slightly less if that bit is zero, and then dropping the lower
        // bits rounds to nearest, ties to even.
        let odd = m.binary(SsaOp::And, m.binary(SsaOp::ShiftUnsigned, x, word(16)), word(1));
        let rounded = m.binary(SsaOp::AddWrapping, x, m.binary(SsaOp::AddWrapping, odd, word(0x7fff)));
        let none = m.binary(SsaOp::Or, x, word(single::QUIET));
        m.binary(SsaOp::ShiftUnsigned, m.select(is_none, none, rounded), word(16))
    }
}
