//! The vector instructions in use, by their encodings.

use super::encode::Opcode;
use crate::ssa::{Kind, Type};

pub const fn opcode(map: u8, prefix: u8, opcode: u8, wide: bool) -> Opcode {
    Opcode { map, prefix, opcode, wide, evex: false }
}

pub const fn evex(map: u8, prefix: u8, opcode: u8, wide: bool) -> Opcode {
    Opcode { map, prefix, opcode, wide, evex: true }
}

/// Arithmetic of a type, packed or scalar.
pub fn arithmetic(code: u8, ty: Type) -> Opcode {
    let wide = ty.kind == Kind::F64;
    let prefix = u8::from(wide) + if ty.lanes == 1 { 2 } else { 0 };
    opcode(1, prefix, code, wide)
}

/// Arithmetic of all lanes of a register.
pub fn packed(code: u8, kind: Kind) -> Opcode {
    opcode(1, u8::from(kind == Kind::F64), code, kind == Kind::F64)
}

pub const AND: Opcode = opcode(1, 0, 0x54, false);
pub const AND_NOT: Opcode = opcode(1, 0, 0x55, false);
pub const OR: Opcode = opcode(1, 0, 0x56, false);
pub const XOR: Opcode = opcode(1, 0, 0x57, false);
pub const INTEGERS_EQUAL: Opcode = opcode(1, 1, 0x76, false);
pub const INTEGERS_GREATER: Opcode = opcode(1, 1, 0x66, false);
/// Four integers of 32 bits as ones of 64.
pub const WIDEN_INTEGERS: Opcode = opcode(2, 1, 0x25, false);
pub const BROADCAST_SINGLE: Opcode = opcode(2, 1, 0x18, false);
pub const BROADCAST_DOUBLE: Opcode = opcode(2, 1, 0x19, true);
pub const DUPLICATE_DOUBLE: Opcode = opcode(1, 3, 0x12, true);
pub const PERMUTE_SINGLE: Opcode = opcode(2, 1, 0x16, false);
pub const PERMUTE_DOUBLE: Opcode = evex(2, 1, 0x16, true);
pub const PERMUTE_TWO_SINGLE: Opcode = evex(2, 1, 0x7f, false);
pub const PERMUTE_TWO_DOUBLE: Opcode = evex(2, 1, 0x7f, true);
pub const PERMUTE_QUAD: Opcode = opcode(3, 1, 0x04, false);
pub const PERMUTE_PAIR: Opcode = opcode(3, 1, 0x05, true);
pub const PERMUTE_DOUBLE_IMMEDIATE: Opcode = opcode(3, 1, 0x01, true);
pub const BLEND_SINGLE: Opcode = opcode(3, 1, 0x0c, false);
pub const BLEND_DOUBLE: Opcode = opcode(3, 1, 0x0d, false);
pub const INSERT_SINGLE: Opcode = opcode(3, 1, 0x21, false);
pub const INSERT_QUAD: Opcode = opcode(3, 1, 0x18, false);
pub const EXTRACT_QUAD: Opcode = opcode(3, 1, 0x19, false);
pub const UNPACK_LOW_DOUBLE: Opcode = opcode(1, 1, 0x14, true);
pub const LOAD_HIGH_DOUBLE: Opcode = opcode(1, 1, 0x16, true);

/// Comparisons of reals: ordered and less, unordered.
pub const LESS: u8 = 17;
pub const UNORDERED: u8 = 3;
