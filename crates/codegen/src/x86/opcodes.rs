//! Vector instructions in use: the encoding and the memory operand of each, with Intel's names in the
//! comments. [`super::inst::Inst::constraints`] defines the constraints on their registers.

use crate::ssa::{LaneKind, Type};

/// Encoding of a vector instruction: opcode map (1 is `0F`, 2 `0F 38`, 3 `0F 3A`), mandatory prefix (0 for no
/// prefix, 1 `66`, 2 `F3`, 3 `F2`), opcode, and the W bit, which usually distinguishes f64 from f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode {
    pub map: u8,
    pub prefix: u8,
    pub opcode: u8,
    pub wide: bool,
    /// Whether only an EVEX encoding exists.
    pub evex: bool,
    /// Size of the memory operand.
    pub memory: Unit,
}

/// Size of a vector instruction's memory operand (EVEX tuple type).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Full vector width.
    Whole,
    /// Element of the vector.
    Lane,
    /// A number of bytes.
    Bytes(u8),
    /// Vector width divided by this number.
    Part(u8),
    /// Size that differs from the instruction's, so that the operand must be in a register.
    Other,
}

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

    /// Size in bytes of the memory operand of an instruction on `bytes` bytes.
    pub fn unit(self, bytes: usize, broadcast: bool) -> usize {
        let lane = if self.wide { 8 } else { 4 };
        match self.memory {
            _ if broadcast => lane,
            Unit::Bytes(n) => n.into(),
            Unit::Part(n) => bytes.max(16) / usize::from(n),
            _ if bytes < 16 => lane,
            Unit::Whole | Unit::Other => bytes,
            Unit::Lane => lane,
        }
    }
}

/// Opcodes of arithmetic for packed and scalar numbers of both widths: `vsqrtps`, `vaddps`, `vmulps`,
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
    let wide = matches!(ty.kind, LaneKind::F64);
    match ty.lanes {
        1 => opcode(1, wide as u8 + 2, code, wide).of(Unit::Lane),
        _ => opcode(1, wide as u8, code, wide),
    }
}

/// `vroundps` with an immediate, in its EVEX encoding `vrndscaleps`; for a type, packed or scalar.
pub const fn round(ty: Type) -> Opcode {
    let wide = matches!(ty.kind, LaneKind::F64);
    match ty.lanes {
        1 => opcode(3, 1, 0x0a + wide as u8, wide).of(Unit::Lane),
        _ => opcode(3, 1, 0x08 + wide as u8, wide),
    }
}

/// Arithmetic on all lanes of a register.
pub const fn packed(code: u8, kind: LaneKind) -> Opcode {
    arithmetic(code, Type { kind, lanes: 2 })
}

// Bits: `vandps`, `vandnps`, `vorps`, `vxorps`.
pub const AND: Opcode = opcode(1, 0, 0x54, false);
pub const AND_NOT: Opcode = opcode(1, 0, 0x55, false);
pub const OR: Opcode = opcode(1, 0, 0x56, false);
pub const XOR: Opcode = opcode(1, 0, 0x57, false);

// Moves: `vmovaps`, `vmovups`, `vmovss`, `vmovsd`, `vpbroadcastw`.
pub const MOVE: Opcode = opcode(1, 0, 0x28, false);
const LOAD: Opcode = opcode(1, 0, 0x10, false);
const LOAD_SINGLE: Opcode = opcode(1, 2, 0x10, false).of(Unit::Lane);
const LOAD_DOUBLE: Opcode = opcode(1, 3, 0x10, true).of(Unit::Lane);

/// Load of `bytes` bytes.
pub const fn load(bytes: usize) -> Opcode {
    match bytes {
        2 => broadcast_integer(2),
        4 => LOAD_SINGLE,
        8 => LOAD_DOUBLE,
        _ => LOAD,
    }
}

/// Store of `bytes` bytes, at least 4.
pub const fn store(bytes: usize) -> Opcode {
    Opcode { opcode: 0x11, ..load(bytes) }
}

/// Loads of lanes of `lane` bytes in a mask register: `vmovdqu8`, `vmovdqu16`, `vmovups`, `vmovupd`.
pub const fn masked_load(lane: usize) -> Opcode {
    match lane {
        1 | 2 => evex(1, 3, 0x6f, lane == 2),
        _ => evex(1, (lane == 8) as u8, 0x10, lane == 8),
    }
}

/// Stores of lanes in a mask register.
pub const fn masked_store(lane: usize) -> Opcode {
    let load = masked_load(lane);
    Opcode { opcode: if lane < 4 { 0x7f } else { 0x11 }, ..load }
}

/// Loads of lanes in a vector mask: `vmaskmovps`, `vmaskmovpd`.
pub const fn vector_masked_load(wide: bool) -> Opcode {
    opcode(2, 1, 0x2c | wide as u8, false)
}

/// Stores of lanes in a vector mask.
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

/// Comparisons that set all bits: `vpcmpeqd`, `vpcmpeqq`
pub const fn integers_equal(wide: bool) -> Opcode {
    if wide { opcode(2, 1, 0x29, true) } else { opcode(1, 1, 0x76, false) }
}

/// `vpcmpgtd`, `vpcmpgtq`
pub const fn integers_greater(wide: bool) -> Opcode {
    if wide { opcode(2, 1, 0x37, true) } else { opcode(1, 1, 0x66, false) }
}

/// Extension of integers to wider lanes, with sizes in bytes: `vpmovsxbd` and variants.
pub const fn widen(from: usize, to: usize, signed: bool) -> Opcode {
    let code = match (from, to) {
        (1, 2) => 0x20,
        (1, 4) => 0x21,
        (1, _) => 0x22,
        (2, 4) => 0x23,
        (2, _) => 0x24,
        _ => 0x25,
    };
    opcode(2, 1, if signed { code } else { code + 0x10 }, false).of(Unit::Part((to / from) as u8))
}

/// Truncation of lanes to their low bytes: `vpmovdb` and variants, whose first operand is the source.
pub const fn narrow(from: usize, to: usize) -> Opcode {
    let code = match (from, to) {
        (2, _) => 0x30,
        (4, 1) => 0x31,
        (4, _) => 0x33,
        (_, 1) => 0x32,
        (_, 2) => 0x34,
        _ => 0x35,
    };
    evex(2, 2, code, false).of(Unit::Part((from / to) as u8))
}

/// `vpmovusdb` and variants of other widths
pub const fn narrow_saturated(from: usize, to: usize) -> Opcode {
    let Opcode { opcode, .. } = narrow(from, to);
    Opcode { opcode: opcode - 0x20, ..narrow(from, to) }
}

/// `vpackssdw`, `vpacksswb`, `vpackuswb`
pub const fn pack_saturated(from: LaneKind, unsigned: bool) -> Opcode {
    let code = match (from, unsigned) {
        (LaneKind::I32, _) => 0x6b,
        (_, false) => 0x63,
        (_, true) => 0x67,
    };
    opcode(1, 1, code, false)
}

/// `vpaddsw`
pub const ADD_SATURATED: Opcode = opcode(1, 1, 0xed, false);

/// `vpaddd`, `vpaddq`
pub const fn add_integers(wide: bool) -> Opcode {
    opcode(1, 1, if wide { 0xd4 } else { 0xfe }, wide)
}

/// `vpsubd`, `vpsubq`
pub const fn subtract_integers(wide: bool) -> Opcode {
    opcode(1, 1, if wide { 0xfb } else { 0xfa }, wide)
}

/// `vpmulld`, `vpmullq`
pub const fn multiply_integers(wide: bool) -> Opcode {
    Opcode { evex: wide, ..opcode(2, 1, 0x40, wide) }
}

/// 64-bit products of the even 32-bit lanes: `vpmuludq`
pub const MULTIPLY_HALVES: Opcode = opcode(1, 1, 0xf4, true);

/// `vpminsd`, `vpmaxsd`, `vpminsq`, `vpmaxsq`
pub const fn extremum(is_max: bool, wide: bool) -> Opcode {
    Opcode { evex: wide, ..opcode(2, 1, if is_max { 0x3d } else { 0x39 }, wide) }
}

/// Sums of products of two pairs of 16-bit integers: `vpmaddwd`
pub const MULTIPLY_PAIRS: Opcode = opcode(1, 1, 0xf5, false);

/// Saturated 16-bit sums of products of two pairs of bytes, the unsigned operand first: `vpmaddubsw`
pub const MULTIPLY_BYTES: Opcode = opcode(2, 1, 0x04, false);

/// Dot products of four bytes per lane, the unsigned operand first: `vpdpbusd`, in AVX-512 or AVX-VNNI
/// encoding.
pub const fn dot(evex: bool) -> Opcode {
    Opcode { evex, ..opcode(2, 1, 0x50, false) }
}

/// Dot products of two bf16 numbers per lane: `vdpbf16ps`
pub const DOT_OF_HALVES: Opcode = evex(2, 2, 0x52, false);

/// Multiplication by a power of two: `vscalefps` or `vscalefpd`
pub const fn scale(wide: bool) -> Opcode {
    evex(2, 1, 0x2c, wide)
}

/// Rounding of f32 to bf16: `vcvtneps2bf16`
pub const NEAREST_BF16: Opcode = evex(2, 2, 0x72, false);

/// Conversion of f16 to f32: `vcvtph2ps`
pub const HALF_TO_SINGLE: Opcode = opcode(2, 1, 0x13, false).of(Unit::Part(2));
/// Conversion of f32 to f16, with the rounding mode as immediate: `vcvtps2ph`
pub const SINGLE_TO_HALF: Opcode = opcode(3, 1, 0x1d, false).of(Unit::Other);

/// Selection of bytes of two vectors by the bytes of the destination: `vpermi2b`
pub const PICK_BYTES: Opcode = evex(2, 1, 0x75, false);

/// Dot products of bytes of the same signedness: `vpdpbssd`, `vpdpbuud`
pub const fn dot_alike(signed: bool) -> Opcode {
    opcode(2, if signed { 3 } else { 0 }, 0x50, false)
}

/// Shifts of lanes of `lane` bytes by a constant: `vpsllw`, `vpslld`, `vpsllq`, and right shifts by their
/// opcode extensions.
pub const fn shift(lane: usize) -> Opcode {
    match lane {
        2 => opcode(1, 1, 0x71, false),
        4 => opcode(1, 1, 0x72, false),
        _ => opcode(1, 1, 0x73, true),
    }
}

/// `vpsraq`
pub const SHIFT_LONG_SIGNED: Opcode = evex(1, 1, 0x72, true);

/// Shifts of each lane by a separate number of bits: `vpsllvd`, `vpsrlvd`, `vpsravd` and their 64-bit
/// variants; `vpsravq` requires AVX-512.
pub const fn shift_by_lanes(number: u8, wide: bool) -> Opcode {
    match number {
        SHIFT_LEFT => opcode(2, 1, 0x47, wide),
        SHIFT_RIGHT => opcode(2, 1, 0x45, wide),
        _ => Opcode { evex: wide, ..opcode(2, 1, 0x46, wide) },
    }
}

/// Shifts of an integer by a register: `shlx`, `shrx`, `sarx`.
pub const fn shift_by(number: u8, wide: bool) -> Opcode {
    let prefix = match number {
        SHIFT_LEFT => 1,
        SHIFT_RIGHT => 3,
        _ => 2,
    };
    opcode(2, prefix, 0xf7, wide)
}

pub const SHIFT_LEFT: u8 = 6;
pub const SHIFT_RIGHT: u8 = 2;
pub const SHIFT_SIGNED: u8 = 4;

/// `vpcmpd`, `vpcmpq`, with a mask as the result
pub const fn compare_integers(wide: bool) -> Opcode {
    evex(3, 1, 0x1f, wide)
}

// Conversions: `vcvtdq2ps`, `vcvtdq2pd`, `vcvtqq2ps`, `vcvtqq2pd`.
pub const SHORT_TO_SINGLE: Opcode = opcode(1, 0, 0x5b, false).of(Unit::Other);
pub const SHORT_TO_DOUBLE: Opcode = opcode(1, 2, 0xe6, false).of(Unit::Other);
/// `vcvttps2dq`
pub const SINGLE_TO_SHORT: Opcode = opcode(1, 2, 0x5b, false);
/// `vcvtps2dq`
pub const SINGLE_TO_NEAREST: Opcode = opcode(1, 1, 0x5b, false);
// `vcvttpd2dq`, `vcvttps2qq`, `vcvttpd2qq`
pub const DOUBLE_TO_SHORT: Opcode = opcode(1, 1, 0xe6, true).of(Unit::Other);
pub const SINGLE_TO_LONG: Opcode = evex(1, 1, 0x7a, false).of(Unit::Other);
pub const DOUBLE_TO_LONG: Opcode = evex(1, 1, 0x7a, true).of(Unit::Other);
pub const LONG_TO_SINGLE: Opcode = evex(1, 0, 0x5b, true).of(Unit::Other);
pub const LONG_TO_DOUBLE: Opcode = evex(1, 2, 0xe6, true).of(Unit::Other);

/// `vcvtss2sd`, `vcvtsd2ss`, with an additional operand for the other lanes
pub const fn convert_scalar(to_double: bool) -> Opcode {
    opcode(1, if to_double { 2 } else { 3 }, 0x5a, !to_double).of(Unit::Lane)
}

/// `vcvtps2pd`, `vcvtpd2ps`
pub const fn convert_packed(to_double: bool) -> Opcode {
    opcode(1, !to_double as u8, 0x5a, !to_double).of(Unit::Other)
}

/// Conversion of an integer register of 32 bits, or of 64 if `long`, to floating point: `vcvtsi2ss`,
/// `vcvtsi2sd`
pub const fn integer_to_real(wide: bool, long: bool) -> Opcode {
    opcode(1, 2 + wide as u8, 0x2a, long).of(Unit::Lane)
}

/// Truncation of a floating-point number to an integer register: `vcvttss2si`, `vcvttsd2si`
pub const fn real_to_integer(wide: bool, long: bool) -> Opcode {
    opcode(1, 2 + wide as u8, 0x2c, long).of(Unit::Lane)
}

/// `vucomiss`, `vucomisd`, which set the flags
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
pub const INSERT_QUAD: Opcode = opcode(3, 1, 0x18, false).of(Unit::Bytes(16));
pub const EXTRACT_QUAD: Opcode = opcode(3, 1, 0x19, false).of(Unit::Bytes(16));
/// Permutation of bytes within 16 bytes, with zeros for negative indices: `vpshufb`
pub const PERMUTE_BYTES: Opcode = opcode(2, 1, 0x00, false);
pub const UNPACK_LOW_DOUBLE: Opcode = opcode(1, 1, 0x14, true);
pub const LOAD_HIGH_DOUBLE: Opcode = opcode(1, 1, 0x16, true).of(Unit::Lane);

/// Blend of lanes of `lane` bytes by a vector mask: `vpblendvb`, `vblendvps`, `vblendvpd`
pub const fn blend_by_vector(lane: usize) -> Opcode {
    let code = match lane {
        1 | 2 => 0x4c,
        4 => 0x4a,
        _ => 0x4b,
    };
    opcode(3, 1, code, false)
}

/// Blend of lanes of `lane` bytes by a mask register: `vpblendmb`, `vpblendmw`, `vblendmps`, `vblendmpd`
pub const fn blend_by_mask(lane: usize) -> Opcode {
    evex(2, 1, if lane < 4 { 0x66 } else { 0x65 }, matches!(lane, 2 | 8))
}

/// Move of an integer register to the first lane: `vmovd`, `vmovq`
pub const fn from_integer(wide: bool) -> Opcode {
    opcode(1, 1, 0x6e, wide)
}

/// Move of the first lane to an integer register: `vmovd`, `vmovq`, whose first operand is the vector.
pub const fn to_integer(wide: bool) -> Opcode {
    opcode(1, 1, 0x7e, wide)
}

/// Insertion of an integer register or memory in a lane of `lane` bytes: `vpinsrb`, `vpinsrw`, `vpinsrd`,
/// `vpinsrq`
pub const fn insert_integer(lane: usize) -> Opcode {
    let of = match lane {
        1 => opcode(3, 1, 0x20, false),
        2 => opcode(1, 1, 0xc4, false),
        _ => opcode(3, 1, 0x22, lane == 8),
    };
    of.of(Unit::Bytes(lane as u8))
}

/// Extraction of a lane of `lane` bytes to an integer register or memory: `vpextrb`, `vpextrw`, `vpextrd`,
/// `vpextrq`, whose first operand is the vector.
pub const fn extract_integer(lane: usize) -> Opcode {
    let code = match lane {
        1 => 0x14,
        2 => 0x15,
        _ => 0x16,
    };
    opcode(3, 1, code, lane == 8).of(Unit::Bytes(lane as u8))
}

/// Broadcast of an integer register: `vpbroadcastb`, `vpbroadcastw`, `vpbroadcastd`, `vpbroadcastq`
pub const fn splat_integer(lane: usize) -> Opcode {
    let code = match lane {
        1 => 0x7a,
        2 => 0x7b,
        _ => 0x7c,
    };
    evex(2, 1, code, lane == 8)
}

/// Broadcast of the first lane of `lane` bytes of a register or memory.
pub const fn broadcast_integer(lane: usize) -> Opcode {
    let code = match lane {
        1 => 0x78,
        2 => 0x79,
        4 => 0x58,
        _ => 0x59,
    };
    opcode(2, 1, code, lane == 8).of(Unit::Bytes(lane as u8))
}

/// Fused multiply-adds such as `vfmadd132ps`, by operand form and negations.
pub const fn fma(form: u8, negate_product: bool, negate_addend: bool, scalar: bool, wide: bool) -> Opcode {
    let code = 0x98 + form + 2 * negate_addend as u8 + 4 * negate_product as u8 + scalar as u8;
    opcode(2, 1, code, wide)
}

/// Operand forms of fused multiply-adds: the multiplied operands are the first and third, the second and
/// first, or the second and third.
pub const FORM_132: u8 = 0;
pub const FORM_213: u8 = 0x10;
pub const FORM_231: u8 = 0x20;

/// Instruction on masks of sixteen lanes.
const fn mask(code: u8) -> Opcode {
    opcode(1, 0, code, false)
}

/// Upper half of a mask of sixteen lanes, and concatenation of two halves: `kshiftrw`, `kunpckbw`
pub const MASK_SHIFT: Opcode = opcode(3, 1, 0x30, true);
pub const MASK_JOIN: Opcode = opcode(1, 1, 0x4b, false);

// `kmovw` from a mask or memory, to memory, from an integer, to an integer; `knotw`, `kandw`, `korw`,
// `kxorw`.
pub const MASK_LOAD: Opcode = mask(0x90);
pub const MASK_STORE: Opcode = mask(0x91);
pub const MASK_FROM_INTEGER: Opcode = mask(0x92);
pub const MASK_TO_INTEGER: Opcode = mask(0x93);
pub const MASK_NOT: Opcode = mask(0x44);
pub const MASK_AND: Opcode = mask(0x41);
pub const MASK_OR: Opcode = mask(0x45);
pub const MASK_XOR: Opcode = mask(0x47);

/// Predicates of floating-point comparisons: ordered and less, unordered, ordered.
pub const LESS: u8 = 17;
pub const UNORDERED: u8 = 3;
pub const ORDERED: u8 = 7;
