//! Constant folding.

use tilewright_ir::DType;

use super::{Compare, Def, LaneKind, SsaOp, Type, Value, VectorConstant};

/// Bit pattern of a floating-point number.
pub fn real_bits(kind: LaneKind, v: f64) -> u64 {
    let half = |dtype: DType| {
        let mut bytes = [0; 2];
        dtype.write(&[dtype.round(v)], &mut bytes);
        u64::from(u16::from_le_bytes(bytes))
    };
    match kind {
        LaneKind::F16 => half(DType::F16),
        LaneKind::Bf16 => half(DType::Bf16),
        LaneKind::F32 => u64::from((v as f32).to_bits()),
        _ => v.to_bits(),
    }
}

fn real(kind: LaneKind, bits: u64) -> f64 {
    match kind {
        LaneKind::F16 => DType::F16.read(&bits.to_le_bytes()[..2])[0],
        LaneKind::Bf16 => DType::Bf16.read(&bits.to_le_bytes()[..2])[0],
        LaneKind::F32 => f64::from(f32::from_bits(bits as u32)),
        _ => f64::from_bits(bits),
    }
}

fn signed(kind: LaneKind, bits: u64) -> i64 {
    match kind {
        LaneKind::I1 => -(bits as i64 & 1),
        LaneKind::I8 => i64::from(bits as i8),
        LaneKind::I16 => i64::from(bits as i16),
        LaneKind::I32 => i64::from(bits as i32),
        _ => bits as i64,
    }
}

/// Folds an operation if all its operands are constants and determine the result.
pub fn fold<'v>(op: &SsaOp, ty: Type, operands: impl Iterator<Item = &'v Value> + Clone) -> Option<Def> {
    if operands.clone().any(|v| !matches!(v.def, Def::Constant(_) | Def::Undefined)) {
        return None;
    }
    let operands: Vec<&Value> = operands.collect();
    let kind = operands.first()?.ty.kind;
    if let SsaOp::Insert(_) | SsaOp::Extract(_) | SsaOp::Shuffle(_) = op {
        let n = operands[0].ty.lanes;
        return Some(constant((0..ty.lanes).map(|at| match op {
            SsaOp::Insert(lane) if *lane == at => lane_of(operands[1], 0),
            SsaOp::Insert(_) => lane_of(operands[0], at),
            SsaOp::Extract(lane) => lane_of(operands[0], *lane),
            SsaOp::Shuffle(mask) => {
                usize::try_from(mask[at]).ok().and_then(|from| lane_of(operands[from / n], from % n))
            }
            _ => unreachable!("one of the three"),
        })));
    }
    if operands.iter().any(|v| v.def == Def::Undefined) {
        return None;
    }
    let lanes: Option<Vec<Option<u64>>> = (0..ty.lanes)
        .map(|at| {
            let lane = |operand: &&Value| lane_of(operand, if operand.ty.lanes == 1 { 0 } else { at });
            let lanes: Option<Vec<u64>> = operands.iter().map(lane).collect();
            match lanes {
                Some(lanes) => Some(Some(scalar(op, kind, ty.kind, &lanes)? & ty.kind.mask())),
                None => of_undefined(op).map(|v| v.map(|v| v & ty.kind.mask())),
            }
        })
        .collect();
    lanes.map(|lanes| constant(lanes.into_iter()))
}

/// Result of lanes with an undefined operand: undefined (`Some(None)`) if every result is possible, or a
/// number that some choice of the operand gives.
fn of_undefined(op: &SsaOp) -> Option<Option<u64>> {
    Some(match op {
        SsaOp::Compare(Compare::Equal | Compare::NotEqual) => None,
        SsaOp::Add | SsaOp::AddWrapping | SsaOp::Sub | SsaOp::Xor | SsaOp::Bitcast | SsaOp::Truncate => None,
        SsaOp::Compare(_) | SsaOp::And | SsaOp::Mul | SsaOp::ToReal => Some(0),
        SsaOp::Or => Some(u64::MAX),
        _ => return Option::None,
    })
}

/// Bits of a lane; `None` if undefined.
fn lane_of(v: &Value, at: usize) -> Option<u64> {
    match &v.def {
        Def::Constant(c) if c.undefined >> at & 1 == 0 => Some(c.bits[at]),
        _ => None,
    }
}

/// Constant with the given lanes.
fn constant(lanes: impl ExactSizeIterator<Item = Option<u64>> + Clone) -> Def {
    assert!(lanes.len() <= 64, "a bit says of each lane whether it may be anything");
    let undefined = lanes.clone().enumerate().fold(0, |all, (at, lane)| all | u64::from(lane.is_none()) << at);
    if undefined.count_ones() as usize == lanes.len() {
        return Def::Undefined;
    }
    Def::Constant(VectorConstant { bits: lanes.map(|lane| lane.unwrap_or(0)).collect(), undefined })
}

/// Evaluates an operation on scalars; `None` if it is not folded.
fn scalar(op: &SsaOp, kind: LaneKind, to: LaneKind, x: &[u64]) -> Option<u64> {
    Some(match op {
        SsaOp::FAdd | SsaOp::FSub | SsaOp::FMul | SsaOp::FDiv => arithmetic(op, kind, x[0], x[1]),
        SsaOp::FNeg => x[0] ^ 1 << (kind.bytes() * 8 - 1),
        SsaOp::FLess => (real(kind, x[0]) < real(kind, x[1])).into(),
        SsaOp::Select => x[if x[0] != 0 { 1 } else { 2 }],
        SsaOp::Truncate | SsaOp::ExtendUnsigned => x[0],
        SsaOp::ExtendSigned => signed(kind, x[0]) as u64,
        SsaOp::ToInteger | SsaOp::ToIntegerInRange if to == LaneKind::I32 => (real(kind, x[0]) as i32) as u64,
        SsaOp::ToInteger | SsaOp::ToIntegerInRange => (real(kind, x[0]) as i64) as u64,
        SsaOp::ToReal if to == LaneKind::F32 => u64::from((signed(kind, x[0]) as f32).to_bits()),
        SsaOp::ToReal => (signed(kind, x[0]) as f64).to_bits(),
        SsaOp::Convert => real_bits(to, real(kind, x[0])),
        SsaOp::Bitcast if kind.bytes() == to.bytes() => x[0],
        _ => integer(op, kind, x[0], *x.get(1)?)?,
    })
}

/// Evaluates an operation on integers; `None` if the result is undefined or the operation is not folded.
fn integer(op: &SsaOp, kind: LaneKind, a: u64, b: u64) -> Option<u64> {
    let [x, y] = [a, b].map(|v| signed(kind, v));
    Some(match op {
        SsaOp::Add | SsaOp::AddWrapping => a.wrapping_add(b),
        SsaOp::Sub | SsaOp::SubWrapping => a.wrapping_sub(b),
        SsaOp::Mul | SsaOp::MulWrapping => a.wrapping_mul(b),
        SsaOp::SignedDiv => x.checked_div(y)? as u64,
        SsaOp::SignedRem => x.checked_rem(y)? as u64,
        SsaOp::UnsignedDiv => a.checked_div(b)?,
        SsaOp::UnsignedRem => a.checked_rem(b)?,
        SsaOp::ShiftLeft => a.checked_shl(u32::try_from(b).ok()?)?,
        SsaOp::ShiftSigned => x.checked_shr(u32::try_from(b).ok()?)? as u64,
        SsaOp::ShiftUnsigned => a.checked_shr(u32::try_from(b).ok()?)?,
        SsaOp::And => a & b,
        SsaOp::Or => a | b,
        SsaOp::Xor => a ^ b,
        SsaOp::Compare(how) => match how {
            Compare::Equal => a == b,
            Compare::NotEqual => a != b,
            Compare::Less => x < y,
            Compare::Greater => x > y,
        }
        .into(),
        _ => return None,
    })
}

/// Evaluates an operation on floating-point numbers; NaN operands are kept, and a new NaN is positive.
fn arithmetic(op: &SsaOp, kind: LaneKind, a: u64, b: u64) -> u64 {
    let [x, y] = [a, b].map(|v| real(kind, v));
    if let Some(none) = [x, y].into_iter().find(|v| v.is_nan()) {
        return real_bits(kind, none);
    }
    // f64 has more than twice the bits of f32, so rounding to f64 first does not change the result.
    let v = match op {
        SsaOp::FAdd => x + y,
        SsaOp::FSub => x - y,
        SsaOp::FMul => x * y,
        _ => x / y,
    };
    real_bits(kind, if v.is_nan() { f64::NAN } else { v })
}

#[cfg(test)]
mod tests {
    use super::super::build::Builder;
    use super::super::{Function, Id, Linkage};
    use super::*;

    /// Builds a function of a single block, and returns its last value.
    fn last(write: impl FnOnce(&Builder) -> Id) -> (Function, Value) {
        let b = Builder::new("test");
        let f = b.function("f", Linkage::Internal, None, &[Type::I64]);
        b.go_to(f, b.block(f));
        let id = write(&b);
        let f = b.finish().functions.remove(0);
        let value = f.values[id.at()].clone();
        (f, value)
    }

    #[track_caller]
    fn check(write: impl FnOnce(&Builder) -> Id, expected: &[u64]) {
        let (f, value) = last(write);
        let Def::Constant(constant) = value.def else { panic!("{value:?} is no constant") };
        assert_eq!(constant.bits.as_slice(), expected);
        assert!(f.blocks[0].is_empty(), "nothing is computed at run time");
    }

    #[test]
    fn constants_fold_while_they_are_written() {
        check(|b| b.mul(b.int(-3), b.int(5)), &[-15i64 as u64]);
        check(|b| b.binary(SsaOp::AddWrapping, b.int32(i32::MAX), b.int32(1)), &[0x8000_0000]);
        check(|b| b.binary(SsaOp::ShiftSigned, b.int32(-8), b.int32(1)), &[0xffff_fffc]);
        check(|b| b.compare(Compare::Less, b.int32(-1), b.int32(0)), &[1]);
        check(|b| b.not(b.bool(true)), &[0]);
        let lanes = |b: &Builder| b.integers(Type::I64, [1, 2, 3, 4].into_iter());
        check(|b| b.add(b.splat(b.int(10), 4), lanes(b)), &[11, 12, 13, 14]);
        check(|b| b.shuffle(lanes(b), b.undefined(Type::I64.vector(4)), &[Some(3), None, Some(7)]), &[4, 0, 0]);
        check(|b| b.insert(b.undefined(Type::I64.vector(2)), b.int(7), 1), &[0, 7]);
        check(
            |b| b.select(b.integers(Type::I1, [0, 1].into_iter()), b.splat(b.int(1), 2), b.splat(b.int(2), 2)),
            &[2, 1],
        );
        // Undefined lanes stay undefined if possible.
        let some = |b: &Builder| b.insert(b.undefined(Type::I64.vector(2)), b.int(7), 1);
        check(|b| b.compare(Compare::Equal, some(b), b.splat(b.int(0), 2)), &[0, 0]);
        check(|b| b.binary(SsaOp::Or, some(b), b.splat(b.int(0), 2)), &[u64::MAX, 7]);
        let third = f64::from_bits(0x3fd5_5555_5555_5555);
        check(|b| b.binary(SsaOp::FDiv, b.real(Type::F64, 1.0), b.real(Type::F64, 3.0)), &[third.to_bits()]);
        check(|b| b.real_to_real(b.real(Type::F64, third), Type::F32), &[u64::from((1f32 / 3.0).to_bits())]);
        check(|b| b.unary(SsaOp::FNeg, b.real(Type::F32, 0.0)), &[0x8000_0000]);
        check(|b| b.binary(SsaOp::FDiv, b.real(Type::F32, 0.0), b.real(Type::F32, 0.0)), &[0x7fc0_0000]);
    }

    #[test]
    fn what_is_not_known_is_computed() {
        let is_computed = |write: fn(&Builder) -> Id| assert_eq!(last(write).1.def, Def::Instruction);
        is_computed(|b| b.add(b.parameter(0), b.int(0)));
        is_computed(|b| b.binary(SsaOp::SignedDiv, b.int(1), b.int(0)));
        is_computed(|b| b.binary(SsaOp::SignedDiv, b.int(1), b.opaque(b.int(0))));
        assert_eq!(last(|b| b.shuffle(b.int(1), b.int(2), &[None, None])).1.def, Def::Undefined);
    }
}
