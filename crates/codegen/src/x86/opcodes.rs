//! The vector instructions in use: of each its encoding and what its memory operand holds, by Intel's names
//! in the comments. What its registers are asked for is [`super::inst::Inst::constraints`]'s to say.

use super::encode::{Opcode, Unit};
use crate::ssa::{Kind, Type};

pub const fn opcode(map: u8, prefix: u8, opcode: u8, wide: bool) -> Opcode {
    Opcode { map, prefix, opcode, wide, evex: false, memory: Unit::Whole }
}

pub const fn evex(map: u8, prefix: u8, code: u8, wide: bool) -> Opcode {
    Opcode { evex: true, ..opcode(map, prefix, code, wide) }
}

impl Opcode {
    const fn of(self, memory: Unit) -> Opcode {
        Opcode { memory, ..self }
    }

    /// Bytes of the memory operand of an instruction on `bytes` bytes.
    pub fn unit(self, bytes: usize, broadcast: bool) -> usize {
        let lane = if self.wide { 8 } else { 4 };
        match self.memory {
            _ if broadcast || bytes < 16 => lane,
            Unit::Whole | Unit::Other => bytes,
            Unit::Lane => lane,
            Unit::Quad => 16,
        }
    }
}

/// Arithmetic by its code, for packed and scalar numbers of both widths: `vsqrtps`, `vaddps`, `vmulps`,
/// `vsubps`, `vminps`, `vdivps`, `vmaxps`.
pub const SQUARE_ROOT: u8 = 0x51;
pub const ADD: u8 = 0x58;
pub const MULTIPLY: u8 = 0x59;
pub const SUBTRACT: u8 = 0x5c;
pub const MINIMUM: u8 = 0x5d;
pub const DIVIDE: u8 = 0x5e;
pub const MAXIMUM: u8 = 0x5f;
/// `vcmpps`
pub const COMPARE: u8 = 0xc2;

/// Arithmetic of a type, packed or scalar.
pub const fn arithmetic(code: u8, ty: Type) -> Opcode {
    let wide = matches!(ty.kind, Kind::F64);
    match ty.lanes {
        1 => opcode(1, wide as u8 + 2, code, wide).of(Unit::Lane),
        _ => opcode(1, wide as u8, code, wide),
    }
}

/// `vroundps` with an immediate, `vrndscaleps` where registers are longer; of a type, packed or scalar.
pub const fn round(ty: Type) -> Opcode {
    let wide = matches!(ty.kind, Kind::F64);
    match ty.lanes {
        1 => opcode(3, 1, 0x0a + wide as u8, wide).of(Unit::Lane),
        _ => opcode(3, 1, 0x08 + wide as u8, wide),
    }
}

/// Arithmetic of all lanes of a register.
pub const fn packed(code: u8, kind: Kind) -> Opcode {
    arithmetic(code, Type { kind, lanes: 2 })
}

// Bits: `vandps`, `vandnps`, `vorps`, `vxorps`.
pub const AND: Opcode = opcode(1, 0, 0x54, false);
pub const AND_NOT: Opcode = opcode(1, 0, 0x55, false);
pub const OR: Opcode = opcode(1, 0, 0x56, false);
pub const XOR: Opcode = opcode(1, 0, 0x57, false);

// Moves: `vmovaps`, `vmovups`, `vmovss`, `vmovsd`.
pub const MOVE: Opcode = opcode(1, 0, 0x28, false);
const LOAD: Opcode = opcode(1, 0, 0x10, false);
const LOAD_SINGLE: Opcode = opcode(1, 2, 0x10, false).of(Unit::Lane);
const LOAD_DOUBLE: Opcode = opcode(1, 3, 0x10, true).of(Unit::Lane);

/// Load of `bytes` bytes.
pub const fn load(bytes: usize) -> Opcode {
    match bytes {
        4 => LOAD_SINGLE,
        8 => LOAD_DOUBLE,
        _ => LOAD,
    }
}

/// Store of `bytes` bytes.
pub const fn store(bytes: usize) -> Opcode {
    Opcode { opcode: 0x11, ..load(bytes) }
}

/// Loads of lanes in a mask register: `vmovups`, `vmovupd`.
pub const fn masked_load(wide: bool) -> Opcode {
    evex(1, wide as u8, 0x10, wide)
}

/// Stores of lanes in a mask register.
pub const fn masked_store(wide: bool) -> Opcode {
    evex(1, wide as u8, 0x11, wide)
}

/// Loads of lanes in a vector: `vmaskmovps`, `vmaskmovpd`.
pub const fn vector_masked_load(wide: bool) -> Opcode {
    opcode(2, 1, 0x2c | wide as u8, false)
}

/// Stores of lanes in a vector.
pub const fn vector_masked_store(wide: bool) -> Opcode {
    opcode(2, 1, 0x2e | wide as u8, false)
}

/// `vgatherdps`
pub const fn gather(wide: bool) -> Opcode {
    evex(2, 1, 0x92, wide).of(Unit::Lane)
}

/// `vscatterdps`
pub const fn scatter(wide: bool) -> Opcode {
    evex(2, 1, 0xa2, wide).of(Unit::Lane)
}

// Integers: `vpcmpeqd`, `vpcmpgtd`, `vpmovsxdq`.
pub const INTEGERS_EQUAL: Opcode = opcode(1, 1, 0x76, false);
pub const INTEGERS_GREATER: Opcode = opcode(1, 1, 0x66, false);
/// Four integers of 32 bits as ones of 64.
pub const WIDEN_INTEGERS: Opcode = opcode(2, 1, 0x25, false);

/// `vpaddd`, `vpaddq`
pub const fn add_integers(wide: bool) -> Opcode {
    opcode(1, 1, if wide { 0xd4 } else { 0xfe }, wide)
}

/// `vpsubd`, `vpsubq`
pub const fn subtract_integers(wide: bool) -> Opcode {
    opcode(1, 1, if wide { 0xfb } else { 0xfa }, wide)
}

/// Shifts by a constant: `vpslld`, `vpsrld`, by [`SHIFT_LEFT`] and [`SHIFT_RIGHT`].
pub const fn shift(wide: bool) -> Opcode {
    opcode(1, 1, if wide { 0x73 } else { 0x72 }, wide)
}

pub const SHIFT_LEFT: u8 = 6;
pub const SHIFT_RIGHT: u8 = 2;

/// `vpcmpd`, `vpcmpq`: a mask
pub const fn compare_integers(wide: bool) -> Opcode {
    evex(3, 1, 0x1f, wide)
}

// Conversions: `vcvtdq2ps`, `vcvtqq2ps`, `vcvtqq2pd`.
pub const SHORT_TO_SINGLE: Opcode = opcode(1, 0, 0x5b, false).of(Unit::Other);
/// `vcvttps2dq`
pub const SINGLE_TO_SHORT: Opcode = opcode(1, 2, 0x5b, false);
pub const LONG_TO_SINGLE: Opcode = evex(1, 0, 0x5b, true).of(Unit::Other);
pub const LONG_TO_DOUBLE: Opcode = evex(1, 2, 0xe6, true).of(Unit::Other);

/// `vcvtss2sd`, `vcvtsd2ss`, of the other lanes' operand too
pub const fn convert_scalar(to_double: bool) -> Opcode {
    opcode(1, if to_double { 2 } else { 3 }, 0x5a, !to_double).of(Unit::Lane)
}

/// `vcvtps2pd`, `vcvtpd2ps`
pub const fn convert_packed(to_double: bool) -> Opcode {
    opcode(1, !to_double as u8, 0x5a, !to_double).of(Unit::Other)
}

/// An integer register as a number: `vcvtsi2ss`, `vcvtsi2sd`
pub const fn integer_to_real(wide: bool) -> Opcode {
    opcode(1, 2 + wide as u8, 0x2a, true).of(Unit::Lane)
}

/// `vucomiss`, `vucomisd`: flags
pub const fn compare_scalars(wide: bool) -> Opcode {
    opcode(1, wide as u8, 0x2e, wide).of(Unit::Lane)
}

// Lanes: `vbroadcastss`, `vbroadcastsd`, `vmovddup`, `vpermps`, `vpermpd`, `vpermt2ps`, `vpermt2pd`,
// `vpermilps`, `vpermilpd`, `vpermpd`, `vblendps`, `vblendpd`, `vinsertps`, `vinsertf128`, `vextractf128`,
// `vunpcklpd`, `vmovhpd`.
pub const BROADCAST_SINGLE: Opcode = opcode(2, 1, 0x18, false).of(Unit::Lane);
pub const BROADCAST_DOUBLE: Opcode = opcode(2, 1, 0x19, true).of(Unit::Lane);
pub const DUPLICATE_DOUBLE: Opcode = opcode(1, 3, 0x12, true).of(Unit::Lane);
pub const PERMUTE_SINGLE: Opcode = opcode(2, 1, 0x16, false);
pub const PERMUTE_DOUBLE: Opcode = evex(2, 1, 0x16, true);
pub const PERMUTE_TWO_SINGLE: Opcode = evex(2, 1, 0x7f, false);
pub const PERMUTE_TWO_DOUBLE: Opcode = evex(2, 1, 0x7f, true);
pub const PERMUTE_QUAD: Opcode = opcode(3, 1, 0x04, false);
pub const PERMUTE_PAIR: Opcode = opcode(3, 1, 0x05, true);
pub const PERMUTE_DOUBLE_IMMEDIATE: Opcode = opcode(3, 1, 0x01, true);
pub const BLEND_SINGLE: Opcode = opcode(3, 1, 0x0c, false);
pub const BLEND_DOUBLE: Opcode = opcode(3, 1, 0x0d, false);
pub const INSERT_SINGLE: Opcode = opcode(3, 1, 0x21, false).of(Unit::Lane);
pub const INSERT_QUAD: Opcode = opcode(3, 1, 0x18, false).of(Unit::Quad);
pub const EXTRACT_QUAD: Opcode = opcode(3, 1, 0x19, false).of(Unit::Quad);
pub const UNPACK_LOW_DOUBLE: Opcode = opcode(1, 1, 0x14, true);
pub const LOAD_HIGH_DOUBLE: Opcode = opcode(1, 1, 0x16, true).of(Unit::Lane);

/// Lanes by a vector: `vblendvps`, `vblendvpd`
pub const fn blend_by_vector(wide: bool) -> Opcode {
    opcode(3, 1, 0x4a | wide as u8, false)
}

/// Lanes by a mask register: `vblendmps`, `vblendmpd`
pub const fn blend_by_mask(wide: bool) -> Opcode {
    evex(2, 1, 0x65, wide)
}

/// An integer register in the first lane: `vmovd`, `vmovq`
pub const fn from_integer(wide: bool) -> Opcode {
    opcode(1, 1, 0x6e, wide)
}

/// An integer register in a lane: `vpinsrd`
pub const INSERT_INTEGER: Opcode = opcode(3, 1, 0x22, false);

/// An integer register in every lane: `vpbroadcastd`, `vpbroadcastq`
pub const fn splat_integer(wide: bool) -> Opcode {
    evex(2, 1, 0x7c, wide)
}

/// The first lane in every lane.
pub const fn splat_lane(wide: bool) -> Opcode {
    opcode(2, 1, 0x58 | wide as u8, wide)
}

/// Fused multiply-adds such as `vfmadd132ps`, by the form of their operands and the negations.
pub const fn fma(form: u8, negate_product: bool, negate_addend: bool, scalar: bool, wide: bool) -> Opcode {
    let code = 0x98 + form + 2 * negate_addend as u8 + 4 * negate_product as u8 + scalar as u8;
    opcode(2, 1, code, wide)
}

/// Forms of the above: the first and third operand are multiplied, the second and first, the second and
/// third.
pub const FORM_132: u8 = 0;
pub const FORM_213: u8 = 0x10;
pub const FORM_231: u8 = 0x20;

/// Instructions on masks of sixteen lanes.
const fn mask(code: u8) -> Opcode {
    opcode(1, 0, code, false)
}

// `kmovw` from a mask or memory, to memory, from an integer; `knotw`, `kandw`, `korw`, `kxorw`.
pub const MASK_LOAD: Opcode = mask(0x90);
pub const MASK_STORE: Opcode = mask(0x91);
pub const MASK_FROM_INTEGER: Opcode = mask(0x92);
pub const MASK_NOT: Opcode = mask(0x44);
pub const MASK_AND: Opcode = mask(0x41);
pub const MASK_OR: Opcode = mask(0x45);
pub const MASK_XOR: Opcode = mask(0x47);

/// Comparisons of reals: ordered and less, unordered.
pub const LESS: u8 = 17;
pub const UNORDERED: u8 = 3;
