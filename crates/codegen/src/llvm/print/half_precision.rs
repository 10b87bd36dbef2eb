//! Conversion of 16-bit floating-point numbers to f32 and back.
//!
//! GPUs have conversion instructions. CPUs hold f16 as 16 bits, and not all of them have a conversion
//! instruction: on others, the bits are moved and rounded as integers, which is exact and needs no library
//! function. On CPUs, bf16 numbers already are integers here.

use llvm_sys::core::*;
use llvm_sys::prelude::*;
use llvm_sys::{LLVMIntPredicate, LLVMOpcode};
use tilewright_ir::target::Arch;

use super::{LlvmPrinter, UNNAMED};
use crate::generate::cpu;
use crate::ssa::{LaneKind, Type};

/// Bits of f32 numbers.
mod single {
    pub const MAGNITUDE: u32 = 0x7fff_ffff;
    pub const INFINITY: u32 = 0x7f80_0000;
    pub const HALF: u32 = 0x3f00_0000;
    /// 2⁻²⁴, the smallest binary16.
    pub const SMALLEST: u32 = 0x3380_0000;
    /// 2⁻¹⁴, the smallest normal binary16.
    pub const SMALLEST_NORMAL: u32 = 0x3880_0000;
    /// Difference of the exponents of an f32 number and in f16.
    pub const EXPONENT: u32 = 112 << 23;
    /// Number of fraction bits that binary16 lacks.
    pub const LOST_BITS: u32 = 13;
}

/// Bits of binary16 numbers.
mod half {
    pub const SIGN: u32 = 0x8000;
    pub const MAGNITUDE: u32 = 0x7fff;
    pub const INFINITY: u32 = 0x7c00;
    pub const NONE: u32 = 0x7e00;
    pub const SMALLEST_NORMAL: u32 = 0x400;
}

impl LlvmPrinter<'_> {
    /// Converts a floating-point number to another type.
    pub(super) fn convert(&self, x: LLVMValueRef, from: Type, to: Type) -> LLVMValueRef {
        let b = self.builder;
        let is_longer = from.kind.bytes() < to.kind.bytes();
        let half = if is_longer { from } else { to };
        if half.kind.bytes() > 2 || self.target.gpu.is_some() {
            let ty = self.ty(to);
            return if is_longer {
                llvm!(LLVMBuildFPExt(b, x, ty, UNNAMED))
            } else {
                llvm!(LLVMBuildFPTrunc(b, x, ty, UNNAMED))
            };
        }
        let has_f16 = self.target.arch == Arch::Aarch64 || cpu::features(self.target).contains(&"f16c");
        let bits = LaneWords { p: self, lanes: half.lanes };
        let ty_f16 = bits.ty(llvm!(LLVMHalfTypeInContext(self.context)));
        match is_longer {
            true if has_f16 => {
                llvm!(LLVMBuildFPExt(b, LLVMBuildBitCast(b, x, ty_f16, UNNAMED), self.ty(to), UNNAMED))
            }
            false if has_f16 => {
                llvm!(LLVMBuildBitCast(b, LLVMBuildFPTrunc(b, x, ty_f16, UNNAMED), self.ty(to), UNNAMED))
            }
            true => bits.of_f16(x),
            false => bits.to_f16(x),
        }
    }
}

/// 32-bit words, one for each lane.
struct LaneWords<'p> {
    p: &'p LlvmPrinter<'p>,
    lanes: usize,
}

impl LaneWords<'_> {
    fn ty(&self, of_lane: LLVMTypeRef) -> LLVMTypeRef {
        if self.lanes == 1 { of_lane } else { llvm!(LLVMVectorType(of_lane, self.lanes as u32)) }
    }

    fn number(&self, n: u32) -> LLVMValueRef {
        let mut lanes = vec![self.p.scalar(LaneKind::I32, n.into()); self.lanes];
        if self.lanes == 1 { lanes[0] } else { llvm!(LLVMConstVector(lanes.as_mut_ptr(), lanes.len() as u32)) }
    }

    fn binary(&self, opcode: LLVMOpcode, x: LLVMValueRef, n: LLVMValueRef) -> LLVMValueRef {
        llvm!(LLVMBuildBinOp(self.p.builder, opcode, x, n, UNNAMED))
    }

    fn and(&self, x: LLVMValueRef, n: u32) -> LLVMValueRef {
        self.binary(LLVMOpcode::LLVMAnd, x, self.number(n))
    }

    fn or(&self, x: LLVMValueRef, y: LLVMValueRef) -> LLVMValueRef {
        self.binary(LLVMOpcode::LLVMOr, x, y)
    }

    fn add(&self, x: LLVMValueRef, y: LLVMValueRef) -> LLVMValueRef {
        self.binary(LLVMOpcode::LLVMAdd, x, y)
    }

    fn sub(&self, x: LLVMValueRef, n: u32) -> LLVMValueRef {
        self.binary(LLVMOpcode::LLVMSub, x, self.number(n))
    }

    fn up(&self, x: LLVMValueRef, n: u32) -> LLVMValueRef {
        self.binary(LLVMOpcode::LLVMShl, x, self.number(n))
    }

    fn down(&self, x: LLVMValueRef, n: u32) -> LLVMValueRef {
        self.binary(LLVMOpcode::LLVMLShr, x, self.number(n))
    }

    fn is_above(&self, x: LLVMValueRef, n: u32) -> LLVMValueRef {
        llvm!(LLVMBuildICmp(self.p.builder, LLVMIntPredicate::LLVMIntUGT, x, self.number(n), UNNAMED))
    }

    fn select(&self, cond: LLVMValueRef, a: LLVMValueRef, b: LLVMValueRef) -> LLVMValueRef {
        llvm!(LLVMBuildSelect(self.p.builder, cond, a, b, UNNAMED))
    }

    /// Reinterprets the bits as words or as f32.
    fn cast(&self, x: LLVMValueRef, kind: LaneKind) -> LLVMValueRef {
        llvm!(LLVMBuildBitCast(self.p.builder, x, self.ty(self.p.kind(kind)), UNNAMED))
    }

    fn words(&self, x: LLVMValueRef) -> LLVMValueRef {
        llvm!(LLVMBuildZExt(self.p.builder, x, self.ty(self.p.kind(LaneKind::I32)), UNNAMED))
    }

    fn halves(&self, x: LLVMValueRef) -> LLVMValueRef {
        llvm!(LLVMBuildTrunc(self.p.builder, x, self.ty(self.p.kind(LaneKind::I16)), UNNAMED))
    }

    /// Half of the last kept bit, or slightly less if that bit is zero. After adding it, dropping the lower
    /// bits rounds to nearest, ties to even.
    fn rounding(&self, x: LLVMValueRef, lost_bits: u32) -> LLVMValueRef {
        let odd = self.and(self.down(x, lost_bits), 1);
        self.add(odd, self.number((1 << (lost_bits - 1)) - 1))
    }

    fn of_f16(&self, x: LLVMValueRef) -> LLVMValueRef {
        let x = self.words(x);
        let magnitude = self.and(x, half::MAGNITUDE);
        let normal = self.add(self.up(magnitude, single::LOST_BITS), self.number(single::EXPONENT));
        // Twice the difference for infinity and NaN.
        let special = self.add(normal, self.number(single::EXPONENT));
        let is_special = self.is_above(magnitude, half::INFINITY - 1);
        let all = self.select(is_special, special, normal);
        // Smaller numbers are multiples of the smallest one.
        let small = llvm!(LLVMBuildSIToFP(self.p.builder, magnitude, self.ty(self.p.kind(LaneKind::F32)), UNNAMED));
        let smallest = self.cast(self.number(single::SMALLEST), LaneKind::F32);
        let small = self.cast(self.binary(LLVMOpcode::LLVMFMul, small, smallest), LaneKind::I32);
        let is_normal = self.is_above(magnitude, half::SMALLEST_NORMAL - 1);
        let all = self.select(is_normal, all, small);
        self.cast(self.or(all, self.up(self.and(x, half::SIGN), 16)), LaneKind::F32)
    }

    fn to_f16(&self, x: LLVMValueRef) -> LLVMValueRef {
        let x = self.cast(x, LaneKind::I32);
        let magnitude = self.and(x, single::MAGNITUDE);
        let rounded = self.add(magnitude, self.rounding(magnitude, single::LOST_BITS));
        let normal = self.down(self.sub(rounded, single::EXPONENT), single::LOST_BITS);
        let is_beyond = self.is_above(normal, half::INFINITY);
        let normal = self.select(is_beyond, self.number(half::INFINITY), normal);
        // Added to one half, the last bit has the value of the smallest number.
        let one_half = self.cast(self.number(single::HALF), LaneKind::F32);
        let small = self.binary(LLVMOpcode::LLVMFAdd, self.cast(magnitude, LaneKind::F32), one_half);
        let small = self.sub(self.cast(small, LaneKind::I32), single::HALF);
        let is_normal = self.is_above(magnitude, single::SMALLEST_NORMAL - 1);
        let all = self.select(is_normal, normal, small);
        let is_none = self.is_above(magnitude, single::INFINITY);
        let all = self.select(is_none, self.number(half::NONE), all);
        self.halves(self.or(all, self.and(self.down(x, 16), half::SIGN)))
    }
}
