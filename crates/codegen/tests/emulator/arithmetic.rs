//! Arithmetic of instructions on register bits.

use tilewright_ir::DType;

use super::{Code, Compute, Relation, Rounding, Ty};

/// Low bits of a value.
pub fn low(x: u64, bits: u32) -> u64 {
    if bits >= 64 { x } else { x & ((1 << bits) - 1) }
}

/// Extends a value of a type to a wider register, with its sign if the type is signed.
pub fn extended(x: u64, ty: Ty) -> u64 {
    if ty.kind == 's' { signed(x, ty.bits) as u64 } else { low(x, ty.bits) }
}

fn signed(x: u64, bits: u32) -> i64 {
    (x << (64 - bits)) as i64 >> (64 - bits)
}

/// Decodes the bits of a floating-point type.
pub fn real(x: u64, ty: Ty) -> f64 {
    match (ty.kind, ty.bits) {
        ('f', 32) => f64::from(f32::from_bits(x as u32)),
        ('f', 64) => f64::from_bits(x),
        ('f', 16) => DType::F16.read(&x.to_le_bytes()[..2])[0],
        ('h', 16) => DType::Bf16.read(&x.to_le_bytes()[..2])[0],
        other => panic!("{other:?} is no floating-point type"),
    }
}

/// Encodes a number, rounded to nearest, ties to even.
pub fn bits_of(x: f64, ty: Ty) -> u64 {
    match (ty.kind, ty.bits) {
        ('f', 32) => u64::from((x as f32).to_bits()),
        ('f', 64) => x.to_bits(),
        ('f' | 'h', 16) => {
            let dtype = if ty.kind == 'f' { DType::F16 } else { DType::Bf16 };
            let mut bytes = [0; 2];
            dtype.write(&[dtype.round(x)], &mut bytes);
            u16::from_le_bytes(bytes).into()
        }
        other => panic!("{other:?} is no floating-point type"),
    }
}

/// Evaluates an arithmetic instruction.
pub fn compute(code: &Code, x: &[u64]) -> Result<u64, String> {
    Ok(match code {
        Code::Compute(what, ty) if ty.kind == 'f' => floating(*what, *ty, x),
        // Two adjacent numbers.
        Code::Compute(what, ty) if ty.kind == 'v' => {
            let [lower, upper] = [0, 32].map(|at| x.iter().map(|x| x >> at & 0xffff_ffff).collect::<Vec<_>>());
            let one = |x: &[u64]| floating(*what, Ty { kind: 'f', bits: 32 }, x);
            one(&upper) << 32 | one(&lower)
        }
        Code::Compute(what, ty) => low(integer(*what, *ty, x)?, ty.bits),
        Code::Mixed(what, from) => {
            let single = Ty { kind: 'f', bits: 32 };
            let mut x = x.to_vec();
            let n = x.len() - 1;
            x[..n].iter_mut().for_each(|x| *x = convert(single, *from, Rounding::None, *x));
            floating(*what, single, &x)
        }
        Code::High(ty) => {
            let product = if ty.kind == 's' {
                (i128::from(signed(x[0], ty.bits)) * i128::from(signed(x[1], ty.bits))) as u128
            } else {
                u128::from(low(x[0], ty.bits)) * u128::from(low(x[1], ty.bits))
            };
            low((product >> ty.bits) as u64, ty.bits)
        }
        Code::Wide(ty) => {
            let product = extended(x[0], *ty).wrapping_mul(extended(x[1], *ty));
            low(product.wrapping_add(x.get(2).copied().unwrap_or(0)), 2 * ty.bits)
        }
        Code::Compare(how, ty) => u64::from(holds(*how, *ty, x[0], x[1])),
        Code::Choose(ty) => low(if x[2] != 0 { x[0] } else { x[1] }, ty.bits),
        Code::Convert { to, from, rounding } => convert(*to, *from, *rounding, x[0]),
        // The first operand is the upper half.
        Code::Pair { to, from } => {
            let [upper, lower] = [x[0], x[1]].map(|x| convert(*to, *from, Rounding::None, x));
            upper << 16 | lower
        }
        Code::Tf32 => tf32(x[0] as u32).into(),
        Code::Funnel { left } => {
            let both = low(x[1], 32) << 32 | low(x[0], 32);
            let by = (x[2] & 31) as u32;
            if *left { (both << by) >> 32 } else { low(both >> by, 32) }
        }
        Code::Permute => {
            let all = low(x[1], 32) << 32 | low(x[0], 32);
            (0..4).fold(0, |out, at| {
                let selector = x[2] >> (4 * at) & 15;
                let byte = all >> (8 * (selector & 7)) & 255;
                let byte = if selector & 8 == 0 { byte } else { (byte >> 7) * 255 };
                out | byte << (8 * at)
            })
        }
        Code::Field(ty) => {
            let field = low(x[0], ty.bits) >> (x[1] & 255);
            let length = (x[2] & 255) as u32;
            match (length, ty.kind) {
                (0, _) => 0,
                (n, 's') if n < ty.bits => low(signed(field, n) as u64, ty.bits),
                (n, _) => low(field, n.min(ty.bits)),
            }
        }
        other => return Err(format!("{other:?} computes nothing")),
    })
}

fn floating(what: Compute, ty: Ty, x: &[u64]) -> u64 {
    let sign = 1 << (ty.bits - 1);
    match what {
        Compute::Neg => return low(x[0] ^ sign, ty.bits),
        Compute::Abs => return low(x[0], ty.bits) & !sign,
        // Sign of the first operand with the magnitude of the second.
        Compute::CopySign => return x[0] & sign | low(x[1], ty.bits) & !sign,
        _ => {}
    }
    // Computes with three numbers in their own precision, to avoid double rounding.
    macro_rules! compute {
        ($numbers:expr) => {{
            let [a, b, c] = $numbers;
            match what {
                Compute::Add => a + b,
                Compute::Sub => a - b,
                Compute::Mul => a * b,
                Compute::MulAdd => a.mul_add(b, c),
                Compute::Div => a / b,
                Compute::Min => a.min(b),
                Compute::Max => a.max(b),
                Compute::MinOrNan if a.is_nan() || b.is_nan() => a + b,
                Compute::MaxOrNan if a.is_nan() || b.is_nan() => a + b,
                Compute::MinOrNan => a.min(b),
                Compute::MaxOrNan => a.max(b),
                Compute::Sqrt => a.sqrt(),
                Compute::Reciprocal => 1.0 / a,
                other => panic!("{other:?} of floating-point numbers"),
            }
        }};
    }
    if ty.bits == 32 {
        let value: f32 = compute!([0, 1, 2].map(|at| f32::from_bits(x.get(at).copied().unwrap_or(0) as u32)));
        return u64::from(value.to_bits());
    }
    let value = compute!([0, 1, 2].map(|at| x.get(at).map_or(0.0, |x| real(*x, ty))));
    bits_of(value, ty)
}

fn integer(what: Compute, ty: Ty, x: &[u64]) -> Result<u64, String> {
    let is_signed = ty.kind == 's';
    let of = |at: usize| extended(x[at], ty);
    let both = || (of(0) as i64, of(1) as i64);
    Ok(match what {
        Compute::Add => of(0).wrapping_add(of(1)),
        Compute::Sub => of(0).wrapping_sub(of(1)),
        Compute::Mul => of(0).wrapping_mul(of(1)),
        Compute::MulAdd => of(0).wrapping_mul(of(1)).wrapping_add(of(2)),
        Compute::Div | Compute::Rem if of(1) == 0 => return Err("division by zero".into()),
        Compute::Div if is_signed => both().0.wrapping_div(both().1) as u64,
        Compute::Rem if is_signed => both().0.wrapping_rem(both().1) as u64,
        Compute::Div => of(0) / of(1),
        Compute::Rem => of(0) % of(1),
        Compute::Min if is_signed => both().0.min(both().1) as u64,
        Compute::Max if is_signed => both().0.max(both().1) as u64,
        Compute::Min => of(0).min(of(1)),
        Compute::Max => of(0).max(of(1)),
        Compute::Neg => of(0).wrapping_neg(),
        Compute::Abs => (of(0) as i64).unsigned_abs(),
        Compute::And => of(0) & of(1),
        Compute::Or => of(0) | of(1),
        Compute::Xor => of(0) ^ of(1),
        Compute::Not if ty.kind == 'p' => u64::from(x[0] == 0),
        Compute::Not => !of(0),
        Compute::ShiftLeft => of(0).checked_shl(low(x[1], 32) as u32).unwrap_or(0),
        Compute::ShiftRight if is_signed => ((of(0) as i64) >> low(x[1], 32).min(63)) as u64,
        Compute::ShiftRight => of(0).checked_shr(low(x[1], 32) as u32).unwrap_or(0),
        Compute::Sqrt | Compute::Reciprocal | Compute::CopySign | Compute::MinOrNan | Compute::MaxOrNan => {
            return Err("of whole numbers".into());
        }
    })
}

fn holds(how: Relation, ty: Ty, a: u64, b: u64) -> bool {
    use std::cmp::Ordering;
    let order = match ty.kind {
        'f' => real(a, ty).partial_cmp(&real(b, ty)),
        's' => Some((extended(a, ty) as i64).cmp(&(extended(b, ty) as i64))),
        _ => Some(extended(a, ty).cmp(&extended(b, ty))),
    };
    match (how, order) {
        (Relation::Unordered, ordering) => ordering.is_none(),
        (Relation::OrUnordered(_), None) => true,
        (Relation::OrUnordered(how), _) => holds(*how, ty, a, b),
        (_, None) => false,
        (Relation::Equal, Some(o)) => o == Ordering::Equal,
        (Relation::NotEqual, Some(o)) => o != Ordering::Equal,
        (Relation::Less, Some(o)) => o == Ordering::Less,
        (Relation::LessEqual, Some(o)) => o != Ordering::Greater,
        (Relation::Greater, Some(o)) => o == Ordering::Greater,
        (Relation::GreaterEqual, Some(o)) => o != Ordering::Less,
    }
}

/// Whether a type is a floating-point type.
fn is_real(ty: Ty) -> bool {
    matches!(ty.kind, 'f' | 'h')
}

fn convert(to: Ty, from: Ty, rounding: Rounding, x: u64) -> u64 {
    match (is_real(from), is_real(to)) {
        (false, false) => low(extended(x, from), to.bits),
        (false, true) => {
            let whole = extended(x, from);
            match (from.kind, to.bits) {
                ('s', 32) => u64::from((whole as i64 as f32).to_bits()),
                (_, 32) => u64::from((whole as f32).to_bits()),
                ('s', _) => bits_of(whole as i64 as f64, to),
                _ => bits_of(whole as f64, to),
            }
        }
        (true, is_real) => {
            let value = real(x, from);
            let value = match rounding {
                Rounding::None => value,
                Rounding::Nearest => value.round_ties_even(),
                Rounding::Down => value.floor(),
                Rounding::Up => value.ceil(),
                Rounding::Zero => value.trunc(),
            };
            if is_real {
                return bits_of(value, to);
            }
            let value = match (to.kind, to.bits) {
                ('s', 32) => i64::from(value as i32) as u64,
                ('s', 64) => value as i64 as u64,
                ('s', 16) => i64::from(value as i16) as u64,
                ('s', 8) => i64::from(value as i8) as u64,
                (_, 64) => value as u64,
                (_, bits) => (value as u64).min(low(u64::MAX, bits)),
            };
            low(value, to.bits)
        }
    }
}

/// Rounds f32 to the 11 bits of TF32, to nearest, ties away from zero (`cvt.rna.tf32`).
pub fn tf32(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() { 0x7fff_ffff } else { bits.wrapping_add(0x1000) & 0xffff_e000 }
}
