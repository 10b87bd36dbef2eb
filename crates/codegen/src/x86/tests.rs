//! Operations on integers, scalar and in lanes, compared with reference arithmetic. Each is a function of
//! three operands in memory.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

use super::*;
use crate::loader;
use crate::ssa::build::Builder;
use crate::ssa::{Compare, Id, LaneKind, SsaOp, Type};

/// Targets whose code this machine can run.
fn targets() -> Vec<Target> {
    let mut all = Vec::new();
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        all.push(Target::named("x86-64-v3").unwrap());
    }
    if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
        all.push(Target::named("x86-64-v4").unwrap());
    }
    all
}

/// Size in bytes of a target's vectors.
fn native(target: &Target) -> usize {
    target.vector_bits as usize / 8
}

/// Function `(result, operands)` that stores a value computed from operands in memory.
fn function(
    target: &Target,
    operands: &[Type],
    value: &dyn Fn(&Builder, &[Id]) -> Id,
) -> Result<loader::LoadedCode, String> {
    let m = Builder::new("test");
    let f = m.function("f", Linkage::Exported, None, &[Type::POINTER; 4]);
    m.go_to(f, m.block(f));
    let loaded: Vec<Id> =
        operands.iter().enumerate().map(|(at, ty)| m.load(*ty, m.parameter(at + 1), 1, false)).collect();
    m.store(value(&m, &loaded), m.parameter(0), 1);
    m.ret();
    let module = m.finish();
    assert_eq!(module.verify(), Ok(()), "{module}");
    let image = compile(module, target, &|_| false)?;
    Ok(loader::place(image, &|_| None).unwrap())
}

fn run(code: &loader::LoadedCode, operands: &[Vec<u8>], n_bytes: usize) -> Vec<u8> {
    const BEHIND: usize = 64;
    let mut result = vec![0xa5; n_bytes + BEHIND];
    let at = |at: usize| operands.get(at).map_or(std::ptr::null(), |bytes| bytes.as_ptr());
    // SAFETY: the function has this type, reads exactly the bytes of the operands, and writes the result.
    unsafe {
        let f: unsafe extern "C" fn(*mut u8, *const u8, *const u8, *const u8) =
            std::mem::transmute(code.symbol("f").expect("it is exported"));
        f(result.as_mut_ptr(), at(0), at(1), at(2));
    }
    let behind = result.split_off(n_bytes);
    assert!(behind.iter().all(|b| *b == 0xa5), "it writes behind its result");
    result
}

/// Random integers, a third of which are extremes of types.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn integer(&mut self) -> i128 {
        let ends = [0, 1, -1, 127, 128, -128, 255, 32767, -32768, 65535, 1 << 31, -(1 << 31), (1 << 31) - 1];
        let any = self.next();
        match any % 3 {
            0 => ends[(any >> 8) as usize % ends.len()],
            1 => i64::MIN.into(),
            _ => (self.next() as i64 >> ((any >> 8) % 60)).into(),
        }
    }
}

fn bits(kind: LaneKind) -> u32 {
    8 * kind.bytes() as u32
}

/// Low bits of a number, as a signed or unsigned number.
fn cut(kind: LaneKind, x: i128, signed: bool) -> i128 {
    let all = x & ((1 << bits(kind)) - 1);
    if signed && all >> (bits(kind) - 1) != 0 { all - (1 << bits(kind)) } else { all }
}

fn bytes(kind: LaneKind, x: i128) -> Vec<u8> {
    x.to_le_bytes()[..kind.bytes()].to_vec()
}

/// Checks an integer value against a reference for each lane, whose operands are signed; a scalar operand is
/// the same for all lanes.
fn check(operands: &[Type], result: Type, value: &dyn Fn(&Builder, &[Id]) -> Id, reference: &dyn Fn(&[i128]) -> i128) {
    let mut random = Random(SplitMix64::seed_from_u64(7));
    for target in targets() {
        // Vectors wider than registers are split into halves.
        if operands.iter().chain([&result]).any(|ty| ty.bytes() > 2 * native(&target)) {
            continue;
        }
        let code = function(&target, operands, value).unwrap_or_else(|e| panic!("{operands:?} on {target}: {e}"));
        for _ in 0..12 {
            let lanes: Vec<Vec<i128>> = operands
                .iter()
                .map(|ty| (0..ty.lanes).map(|_| cut(ty.kind, random.integer(), true)).collect())
                .collect();
            let memory: Vec<Vec<u8>> =
                lanes.iter().zip(operands).map(|(x, ty)| x.iter().flat_map(|x| bytes(ty.kind, *x)).collect()).collect();
            let of = |lane: usize| lanes.iter().map(|x| x[lane % x.len()]).collect::<Vec<_>>();
            let expected: Vec<i128> =
                (0..result.lanes).map(|lane| cut(result.kind, reference(&of(lane)), true)).collect();
            let got = run(&code, &memory, result.bytes());
            let got: Vec<i128> = got
                .chunks(result.kind.bytes())
                .map(|lane| {
                    let mut all = [0; 16];
                    all[..lane.len()].copy_from_slice(lane);
                    cut(result.kind, i128::from_le_bytes(all), true)
                })
                .collect();
            assert_eq!(got, expected, "{operands:?} to {result:?} of {lanes:?} on {target}");
        }
    }
}

/// Function of two integers.
type Function<T> = fn(i128, i128) -> T;

const LANES: [usize; 5] = [1, 2, 4, 8, 16];

fn types() -> impl Iterator<Item = Type> {
    [Type::I32, Type::I64].into_iter().flat_map(|ty| LANES.map(|n| ty.vector(n)))
}

#[test]
fn arithmetic_wraps_around() {
    let ops: [(SsaOp, Function<i128>); 11] = [
        (SsaOp::Add, |a, b| a + b),
        (SsaOp::AddWrapping, |a, b| a + b),
        (SsaOp::Sub, |a, b| a - b),
        (SsaOp::SubWrapping, |a, b| a - b),
        (SsaOp::Mul, |a, b| a.wrapping_mul(b)),
        (SsaOp::MulWrapping, |a, b| a.wrapping_mul(b)),
        (SsaOp::And, |a, b| a & b),
        (SsaOp::Or, |a, b| a | b),
        (SsaOp::Xor, |a, b| a ^ b),
        (SsaOp::SignedMin, i128::min),
        (SsaOp::SignedMax, i128::max),
    ];
    for (op, reference) in ops {
        for ty in types() {
            check(&[ty, ty], ty, &|m, x| m.binary(op.clone(), x[0], x[1]), &|x| reference(x[0], x[1]));
            check(
                &[ty],
                ty,
                &|m, x| m.binary(op.clone(), x[0], m.splat(m.integer(ty.element(), -77), ty.lanes)),
                &|x| reference(x[0], -77),
            );
        }
    }
}

#[test]
fn shifts_move_zeros_or_signs_in() {
    let shorts = [8, 16, 32].map(|n| Type::I16.vector(n));
    for ty in types().chain(shorts) {
        for by in [1, 7, 8, 15, i64::from(bits(ty.kind)) - 1] {
            let shift = |op: SsaOp| {
                move |m: &Builder, x: &[Id]| m.binary(op.clone(), x[0], m.splat(m.integer(ty.element(), by), ty.lanes))
            };
            check(&[ty], ty, &shift(SsaOp::ShiftLeft), &|x| x[0] << by);
            check(&[ty], ty, &shift(SsaOp::ShiftSigned), &|x| x[0] >> by);
            check(&[ty], ty, &shift(SsaOp::ShiftUnsigned), &|x| cut(ty.kind, x[0], false) >> by);
        }
    }
}

/// Checks shifts of each lane by a separate number of bits.
#[test]
fn shifts_may_be_by_variables() {
    for ty in types() {
        let width = i128::from(bits(ty.kind));
        let shift = |op: SsaOp| {
            move |m: &Builder, x: &[Id]| {
                let most = m.splat(m.integer(ty.element(), i64::from(bits(ty.kind)) - 1), ty.lanes);
                m.binary(op.clone(), x[0], m.binary(SsaOp::And, x[1], most))
            }
        };
        check(&[ty, ty], ty, &shift(SsaOp::ShiftLeft), &|x| x[0] << (x[1] & (width - 1)));
        check(&[ty, ty], ty, &shift(SsaOp::ShiftUnsigned), &|x| cut(ty.kind, x[0], false) >> (x[1] & (width - 1)));
        // AVX2 has no signed shifts of 64-bit lanes.
        if ty.kind == LaneKind::I32 || ty.lanes == 1 {
            check(&[ty, ty], ty, &shift(SsaOp::ShiftSigned), &|x| x[0] >> (x[1] & (width - 1)));
        }
    }
}

#[test]
fn comparisons_choose() {
    let relations: [(Compare, Function<bool>); 4] = [
        (Compare::Equal, |a, b| a == b),
        (Compare::NotEqual, |a, b| a != b),
        (Compare::Less, |a, b| a < b),
        (Compare::Greater, |a, b| a > b),
    ];
    for (how, holds) in relations {
        for ty in types() {
            let choose = |m: &Builder, x: &[Id]| m.select(m.compare(how, x[0], x[1]), x[2], x[0]);
            check(&[ty, ty, ty], ty, &choose, &|x| if holds(x[0], x[1]) { x[2] } else { x[0] });
            let small = |m: &Builder, x: &[Id]| {
                let some = m.splat(m.integer(ty.element(), 127), ty.lanes);
                let both =
                    m.binary(SsaOp::And, m.compare(how, x[0], some), m.not(m.compare(Compare::Less, x[1], x[0])));
                m.select(both, x[1], x[0])
            };
            check(&[ty, ty], ty, &small, &|x| if holds(x[0], 127) && x[1] >= x[0] { x[1] } else { x[0] });
        }
        // Comparisons of one width select between values of another.
        for n in LANES {
            for (of, ty) in [(Type::I32, Type::I64), (Type::I64, Type::I32)].map(|(a, b)| (a.vector(n), b.vector(n))) {
                let choose = |m: &Builder, x: &[Id]| m.select(m.compare(how, x[0], x[1]), x[2], m.zero(ty));
                check(&[of, of, ty], ty, &choose, &|x| if holds(x[0], x[1]) { x[2] } else { 0 });
            }
        }
    }
}

#[test]
fn quotients_are_those_of_their_width() {
    for ty in [Type::I32, Type::I64] {
        let divide = |op: SsaOp| {
            move |m: &Builder, x: &[Id]| {
                let one = m.integer(ty, 1);
                let divisor = m.binary(SsaOp::SignedMax, x[1], one);
                m.binary(op.clone(), x[0], divisor)
            }
        };
        let unsigned = |x: i128| cut(ty.kind, x, false);
        check(&[ty, ty], ty, &divide(SsaOp::SignedDiv), &|x| x[0] / x[1].max(1));
        check(&[ty, ty], ty, &divide(SsaOp::SignedRem), &|x| x[0] % x[1].max(1));
        check(&[ty, ty], ty, &divide(SsaOp::UnsignedDiv), &|x| unsigned(x[0]) / x[1].max(1));
        check(&[ty, ty], ty, &divide(SsaOp::UnsignedRem), &|x| unsigned(x[0]) % x[1].max(1));
    }
}

#[test]
fn widths_change() {
    let kinds = [Type::I8, Type::I16, Type::I32, Type::I64];
    for n in LANES {
        for (at, short) in kinds.into_iter().enumerate() {
            for long in &kinds[at + 1..] {
                let (short, long) = (short.vector(n), long.vector(n));
                check(&[short], long, &|m, x| m.extend(x[0], long, true), &|x| x[0]);
                check(&[short], long, &|m, x| m.extend(x[0], long, false), &|x| cut(short.kind, x[0], false));
                if (short.kind, long.kind) == (LaneKind::I8, LaneKind::I16) && n > 1 {
                    continue;
                }
                check(&[long], short, &|m, x| m.truncate(x[0], short), &|x| x[0]);
                // From a register, used twice.
                let twice = |m: &Builder, x: &[Id]| {
                    let cut = m.truncate(x[0], short);
                    m.binary(SsaOp::Xor, m.extend(cut, long, true), m.extend(cut, long, false))
                };
                check(&[long], long, &twice, &|x| cut(short.kind, x[0], true) ^ cut(short.kind, x[0], false));
            }
        }
    }
}

#[test]
fn scalars_fill_vectors_and_leave_them() {
    for scalar in [Type::I8, Type::I16, Type::I32, Type::I64] {
        for n in &LANES[1..] {
            let ty = scalar.vector(*n);
            check(&[scalar], ty, &|m, x| m.splat(x[0], *n), &|x| x[0]);
            let lanes = |m: &Builder, x: &[Id]| {
                // From memory, and from a register.
                let all = (0..*n).fold(m.undefined(ty), |all, lane| m.insert(all, x[lane % 2], lane));
                let last = m.extract(x[2], n - 1);
                m.insert(all, last, n / 2)
            };
            for target in targets() {
                if ty.bytes() > 2 * native(&target) {
                    continue;
                }
                let first = |m: &Builder, x: &[Id]| m.extract(x[2], 0);
                let code = function(&target, &[scalar, scalar, ty], &lanes);
                let first = function(&target, &[scalar, scalar, ty], &first).unwrap();
                // Narrow lanes can be replaced only within 16 bytes.
                let Ok(code) = code else {
                    assert!(ty.kind.bytes() < 4 && ty.bytes() > 16, "{ty:?} on {target}: {}", code.err().unwrap());
                    continue;
                };
                let memory = |from: u8, n: usize| (from..from + (n * scalar.bytes()) as u8).collect::<Vec<u8>>();
                let operands = [memory(1, 1), memory(50, 1), memory(100, *n)];
                let lane = |at: usize| match at {
                    at if at == n / 2 => operands[2][(n - 1) * scalar.bytes()..].to_vec(),
                    at => operands[at % 2].clone(),
                };
                assert_eq!(run(&code, &operands, ty.bytes()), (0..*n).flat_map(lane).collect::<Vec<u8>>(), "{ty:?}");
                assert_eq!(run(&first, &operands, scalar.bytes()), operands[2][..scalar.bytes()], "{ty:?}");
            }
        }
    }
}

/// Checks computed masks, including those of partial vectors, in which lanes beyond the type are set.
#[test]
fn masks_have_no_lanes_beyond_their_types() {
    for scalar in [Type::I8, Type::I16, Type::I32, Type::I64] {
        for n in &LANES[1..] {
            let (ty, of) = (scalar.vector(*n), Type::I32.vector(*n));
            for target in targets() {
                if ty.bytes().max(of.bytes()) > native(&target) {
                    continue;
                }
                let m = Builder::new("test");
                let f = m.function("f", Linkage::Exported, None, &[Type::POINTER; 4]);
                m.go_to(f, m.block(f));
                let numbers = m.load(of, m.parameter(1), 1, false);
                let mask = m.not(m.compare(Compare::Less, numbers, m.zero(of)));
                let otherwise = m.load(ty, m.parameter(3), 1, false);
                let x = m.masked_load(ty, m.parameter(2), 1, mask, otherwise);
                m.masked_store(x, m.parameter(0), 1, mask);
                m.ret();
                let image = match compile(m.finish(), &target, &|_| false) {
                    Ok(image) => image,
                    Err(why) => {
                        assert!(target.vector_bits < 512 && scalar.bytes() < 4, "{ty:?} on {target}: {why}");
                        continue;
                    }
                };
                let code = loader::place(image, &|_| None).unwrap();
                for chosen in [0u32, 1, 5, 0xffff, 0xaaaa] {
                    let numbers =
                        (0..*n).flat_map(|lane| (-i32::from(chosen >> lane & 1 == 0)).to_le_bytes()).collect();
                    let all: Vec<u8> = (1..=ty.bytes() as u8).collect();
                    let got = run(&code, &[numbers, all.clone(), vec![0x77; ty.bytes()]], ty.bytes());
                    let is_in = |byte: usize| chosen >> (byte / scalar.bytes()) & 1 == 1;
                    let expected: Vec<u8> =
                        all.iter().enumerate().map(|(at, x)| if is_in(at) { *x } else { 0xa5 }).collect();
                    assert_eq!(got, expected, "{ty:?} {chosen:x} on {target}");
                }
            }
        }
    }
}

/// Checks code with more values than registers, so that values of all kinds are spilled and read from memory.
#[test]
fn short_values_survive_in_memory() {
    for scalar in [Type::I8, Type::I16, Type::I32] {
        for n in [2, 4, 8] {
            let (ty, wide, many) = (scalar.vector(n), Type::I32.vector(n), 40i64);
            let value = |m: &Builder, x: &[Id]| {
                let own = |k: i64| m.binary(SsaOp::AddWrapping, x[0], m.splat(m.integer(wide.element(), k), n));
                let all: Vec<Id> =
                    (0..many).map(|k| m.opaque(if ty == wide { own(k) } else { m.truncate(own(k), ty) })).collect();
                let of = |x: Id| if ty == wide { x } else { m.extend(x, wide, true) };
                all.iter().rev().fold(m.zero(wide), |sum, x| {
                    m.binary(
                        SsaOp::AddWrapping,
                        m.binary(SsaOp::MulWrapping, sum, m.splat(m.integer(Type::I32, 3), n)),
                        of(*x),
                    )
                })
            };
            let reference = |x: &[i128]| {
                (0..i128::from(many))
                    .rev()
                    .fold(0, |sum, k| cut(LaneKind::I32, sum * 3 + cut(ty.kind, x[0] + k, true), true))
            };
            check(&[wide], wide, &value, &reference);
        }
    }
}

#[test]
fn numbers_become_integers() {
    let reals = [0.0, -0.0, 0.9, -0.9, 1.5, -2.5, 2147483520.0, -2147483648.0, -2147483904.0, 2147483648.0];
    let more = [9.223372e18, 9.2233715e18, -9.223372e18, 1e30, -1e30, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3e9];
    for target in targets() {
        for from in [Type::F32, Type::F64] {
            for to in [Type::I32, Type::I64] {
                let code = function(&target, &[from], &|m, x| m.real_to_int(x[0], to)).unwrap();
                for x in reals.into_iter().chain(more) {
                    let (memory, x) = match from.kind {
                        LaneKind::F32 => ((x as f32).to_le_bytes().to_vec(), f64::from(x as f32)),
                        _ => (x.to_le_bytes().to_vec(), x),
                    };
                    let expected = if to == Type::I32 { i64::from(x as i32) } else { x as i64 };
                    let got = run(&code, &[memory], to.bytes());
                    assert_eq!(got, expected.to_le_bytes()[..to.bytes()], "{x} as {to:?} on {target}");
                }
            }
        }
        for from in [Type::I32, Type::I64] {
            for n in LANES.into_iter().filter(|n| n * 8 <= native(&target)) {
                for to in [Type::F32, Type::F64] {
                    let code = function(&target, &[from.vector(n)], &|m, x| m.int_to_real(x[0], to.vector(n)));
                    let Ok(code) = code else {
                        assert!(target.vector_bits < 512 && from == Type::I64 && n > 1, "{from:?} {n} on {target}");
                        continue;
                    };
                    let mut random = Random(SplitMix64::seed_from_u64(3));
                    let x: Vec<i64> = (0..n).map(|_| cut(from.kind, random.integer(), true) as i64).collect();
                    let expected = |x: &i64| match to.kind {
                        LaneKind::F32 => (*x as f32).to_le_bytes().to_vec(),
                        _ => (*x as f64).to_le_bytes().to_vec(),
                    };
                    let memory = x.iter().flat_map(|x| bytes(from.kind, (*x).into())).collect();
                    let expected: Vec<u8> = x.iter().flat_map(expected).collect();
                    assert_eq!(run(&code, &[memory], n * to.bytes()), expected, "{x:?} on {target}");
                }
            }
        }
    }
}

/// Finite f16 numbers with their bits.
fn halves() -> impl Iterator<Item = (u16, f64)> {
    (0..=u16::MAX).filter(|bits| bits >> 10 & 31 < 31).map(|bits| {
        let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        let size = match exponent {
            0 => fraction * 2f64.powi(-24),
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        };
        (bits, if sign == 1 { -size } else { size })
    })
}

#[test]
fn f16_numbers_are_f32_numbers_and_the_nearest_of_these() {
    let all: Vec<(u16, f64)> = halves().collect();
    // Positive numbers, the largest last, followed by the one that stands for infinity.
    let known: Vec<(u16, f64)> =
        all.iter().copied().filter(|(bits, _)| *bits < 0x8000).chain([(0x7c00, 65536.0)]).collect();
    let nearest = |x: f64| {
        let at = known.partition_point(|(_, size)| *size < x.abs()).min(known.len() - 1);
        let (below, above) = (known[at.max(1) - 1], known[at]);
        let is_even = |bits: u16| bits.is_multiple_of(2);
        let (to_below, to_above) = (x.abs() - below.1, above.1 - x.abs());
        let takes_above = to_above < to_below || to_above == to_below && is_even(above.0);
        (if takes_above { above.0 } else { below.0 }) | (x.is_sign_negative() as u16) << 15
    };
    for target in targets() {
        for n in LANES {
            let widened = function(&target, &[Type::F16.vector(n)], &|m, x| m.real_to_real(x[0], Type::F32.vector(n)));
            let narrowed = function(&target, &[Type::F32.vector(n)], &|m, x| m.real_to_real(x[0], Type::F16.vector(n)));
            let (Ok(widened), Ok(narrowed)) = (widened, narrowed) else { panic!("{n} lanes on {target}") };
            for of_lanes in all.chunks_exact(n).step_by(7) {
                let memory = of_lanes.iter().flat_map(|(bits, _)| bits.to_le_bytes()).collect();
                let expected: Vec<u8> = of_lanes.iter().flat_map(|(_, x)| (*x as f32).to_le_bytes()).collect();
                assert_eq!(run(&widened, &[memory], 4 * n), expected, "{of_lanes:?} on {target}");
                // Halfway to the next number, slightly less, and slightly more.
                for step in [0.5f32, 0.499, 0.501, 0.0] {
                    let between = |x: f64| (x + f64::from(step) * (x.abs() / 1024.0).max(2f64.powi(-24))) as f32;
                    let x: Vec<f32> = of_lanes.iter().map(|(_, x)| between(*x)).collect();
                    let memory = x.iter().flat_map(|x| x.to_le_bytes()).collect();
                    let expected: Vec<u8> = x.iter().flat_map(|x| nearest(f64::from(*x)).to_le_bytes()).collect();
                    assert_eq!(run(&narrowed, &[memory], 2 * n), expected, "{x:?} on {target}");
                }
            }
        }
    }
}
