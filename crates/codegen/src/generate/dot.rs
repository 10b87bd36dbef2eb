//! Dot products of four 8-bit integers a lane, in the instructions that a machine has.
//!
//! x86-64 multiplies unsigned by signed factors (`vpdpbusd`). Factors of one sign it has by turning the highest
//! bits of one of them: with `a' = a + 128`, which has no sign, `Σ a·b = Σ a'·b − 128·Σ b`, and likewise for
//! unsigned factors with `b' = b − 128`. The second sum is that of a vector alone, which all rows share. Without
//! such instructions, signed 16-bit products (`vpmaddwd`) of the even and of the odd bytes are exact. All this is
//! modulo 2^32, as the sums are.

use tilewright_ir::target::{Arch, Target};

use crate::ssa::build::Builder;
use crate::ssa::{Id, Op, Type};

/// The highest bit of each byte.
const HIGHEST_BITS: i32 = 0x8080_8080u32 as i32;

/// Fewest lanes of a dot product's instruction.
const LEAST_LANES: usize = 4;

/// Adds dot products of four 8-bit integers a lane to 32-bit sums, for any number of lanes.
pub fn dot4(m: &Builder, target: &Target, signed: [bool; 2], sums: Id, [a, b]: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    let own = target.dot4_lanes(signed);
    let mixed = target.dot4_lanes([false, true]);
    let pairs = match target.arch {
        // AVX2 in two halves has 512 bits as well, and 16 registers.
        Arch::X86_64 if target.n_vector_registers < 32 => target.vector_bits.min(256) as usize / 32,
        Arch::X86_64 => target.vector_bits as usize / 32,
        Arch::Aarch64 | Arch::Gpu(_) => 0,
    };
    let has_bytes = own.max(mixed) > 0;
    let most = if has_bytes { own.max(mixed) } else { pairs };
    if lanes < LEAST_LANES || most == 0 {
        return by_bytes(m, signed, sums, [a, b]);
    }
    if lanes > most {
        return in_halves(m, target, signed, sums, [a, b]);
    }
    if lanes <= own {
        return m.dot4(signed, sums, a, b);
    }
    let zero = m.zero(Type::I32.vector(lanes));
    let turn = m.splat(m.int32(HIGHEST_BITS), lanes);
    match signed {
        _ if !has_bytes => by_pairs(m, signed, sums, [a, b]),
        [true, true] => {
            let correction = m.dot4([false, true], zero, turn, b);
            let sums = m.binary(Op::SubWrapping, sums, correction);
            m.dot4([false, true], sums, m.binary(Op::Xor, a, turn), b)
        }
        _ => {
            // The bits of 128 are those of −128.
            let correction = m.dot4([false, true], zero, a, turn);
            let sums = m.binary(Op::SubWrapping, sums, correction);
            m.dot4([false, true], sums, a, m.binary(Op::Xor, b, turn))
        }
    }
}

/// Two halves of a vector, each by itself.
fn in_halves(m: &Builder, target: &Target, signed: [bool; 2], sums: Id, factors: [Id; 2]) -> Id {
    let ty = m.type_of(sums);
    let half = ty.lanes / 2;
    let parts = [0, half].map(|first| {
        let lanes: Vec<Option<usize>> = (first..first + half).map(Some).collect();
        let part = |x: Id| m.shuffle(x, m.undefined(ty), &lanes);
        dot4(m, target, signed, part(sums), factors.map(part))
    });
    let all: Vec<Option<usize>> = (0..ty.lanes).map(Some).collect();
    m.shuffle(parts[0], parts[1], &all)
}

/// Even and odd bytes as 16-bit integers, which are multiplied in pairs.
fn by_pairs(m: &Builder, signed: [bool; 2], sums: Id, [a, b]: [Id; 2]) -> Id {
    let ty = m.type_of(sums);
    let short = Type::I16.vector(2 * ty.lanes);
    let eight = m.splat(m.integer(Type::I16, 8), short.lanes);
    let parts = |x: Id, is_signed: bool| {
        let x = m.bitcast(x, short);
        let down = if is_signed { Op::ShiftSigned } else { Op::ShiftUnsigned };
        let even = m.binary(down.clone(), m.binary(Op::ShiftLeft, x, eight), eight);
        [even, m.binary(down, x, eight)].map(|part| m.bitcast(part, ty))
    };
    let ([a_even, a_odd], [b_even, b_odd]) = (parts(a, signed[0]), parts(b, signed[1]));
    m.dot2(m.dot2(sums, a_even, b_even), a_odd, b_odd)
}

/// One byte after the other, as 32-bit integers.
fn by_bytes(m: &Builder, signed: [bool; 2], sums: Id, factors: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    let bits = |n: i32| m.splat(m.int32(n), lanes);
    (0..4).fold(sums, |sums, at| {
        let byte = |x: Id, is_signed: bool| {
            let down = if is_signed { Op::ShiftSigned } else { Op::ShiftUnsigned };
            m.binary(down, m.binary(Op::ShiftLeft, x, bits(24 - 8 * at)), bits(24))
        };
        let product = m.binary(Op::MulWrapping, byte(factors[0], signed[0]), byte(factors[1], signed[1]));
        m.binary(Op::AddWrapping, sums, product)
    })
}

#[cfg(all(test, feature = "llvm"))]
mod tests {
    use super::*;
    use crate::ssa::{Linkage, Module};
    use crate::{Emit, llvm, loader, x86};

    /// Targets of this machine with and without what multiplies bytes.
    fn targets() -> Vec<Target> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let named =
                |name: &str, features: &str| Target { features: features.into(), ..Target::named(name).unwrap() };
            let has_vnni = is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vl");
            let choices = [
                (true, named("x86-64", "")),
                (is_x86_feature_detected!("avx2"), named("x86-64-v3", "")),
                (is_x86_feature_detected!("avx512bw"), named("x86-64-v4", "")),
                (has_vnni, named("x86-64-v4", "+avx512vl,+avx512vnni")),
                (has_vnni, named("x86-64-v3", "+avx512vl,+avx512vnni")),
                (is_x86_feature_detected!("avxvnni"), named("x86-64-v3", "+avxvnni")),
                (is_x86_feature_detected!("avxvnniint8"), named("x86-64-v3", "+avxvnni,+avxvnniint8")),
            ];
            all.extend(choices.into_iter().filter_map(|(has, target)| has.then_some(target)));
        }
        #[cfg(target_arch = "aarch64")]
        {
            all.push(Target::named("aarch64").unwrap());
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Target::named("cortex-a76").unwrap());
            }
        }
        all
    }

    /// The function `(sums, a, b)` that adds dot products to sums in memory.
    fn module(target: &Target, signed: [bool; 2], lanes: usize) -> Module {
        let m = Builder::new("test");
        let f = m.function("f", Linkage::Exported, None, &[Type::POINTER; 3]);
        m.go_to(f, m.block(f));
        let ty = Type::I32.vector(lanes);
        let [sums, a, b] = [0, 1, 2].map(|at| m.load(ty, m.parameter(at), 1, false));
        m.store(dot4(&m, target, signed, sums, [a, b]), m.parameter(0), 1);
        m.ret();
        let module = m.finish();
        assert_eq!(module.verify(), Ok(()), "{module}");
        module
    }

    /// The function as every back end makes it, with the back end's name.
    fn codes(target: &Target, signed: [bool; 2], lanes: usize) -> Vec<(&'static str, loader::Code)> {
        let (object, _) = llvm::compile(&module(target, signed, lanes), target, Emit::Object).unwrap();
        let mut codes = vec![("LLVM", loader::load(&object, target.arch, &|_| None).unwrap())];
        if x86::serves(target) && 32 * lanes <= target.vector_bits as usize {
            let image = x86::compile(module(target, signed, lanes), target, &|_| None).unwrap();
            codes.push(("quick", loader::place(&image.bytes, image.code_len, image.symbols).unwrap()));
        }
        codes
    }

    fn run(code: &loader::Code, sums: &[i32], a: &[u8], b: &[u8]) -> Vec<i32> {
        let mut sums = sums.to_vec();
        // SAFETY: the function has this type, and reads and writes as many bytes as the slices have.
        unsafe {
            let f: unsafe extern "C" fn(*mut i32, *const u8, *const u8) =
                std::mem::transmute(code.symbol("f").expect("it is exported"));
            f(sums.as_mut_ptr(), a.as_ptr(), b.as_ptr());
        }
        sums
    }

    fn expected(signed: [bool; 2], sum: i32, a: &[u8], b: &[u8]) -> i32 {
        let value = |x: u8, is_signed: bool| if is_signed { i64::from(x as i8) } else { i64::from(x) };
        let products = a.iter().zip(b).map(|(a, b)| value(*a, signed[0]) * value(*b, signed[1]));
        (i64::from(sum) + products.sum::<i64>()) as i32
    }

    #[test]
    fn dot_products_are_exact_and_wrap() {
        const ENDS: [u8; 6] = [0, 1, 127, 128, 129, 255];
        for target in targets() {
            for signed in [[false, true], [true, false], [true, true], [false, false]] {
                for lanes in [1, 2, 4, 8, 16] {
                    let codes = codes(&target, signed, lanes);
                    let mut state = 1u32;
                    let mut byte = |all: bool| {
                        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        let x = (state >> 24) as u8;
                        if all { x } else { ENDS[usize::from(x) % ENDS.len()] }
                    };
                    let check = |sums: Vec<i32>, a: Vec<u8>, b: Vec<u8>| {
                        let lane = |at: usize| expected(signed, sums[at], &a[4 * at..][..4], &b[4 * at..][..4]);
                        let all: Vec<i32> = (0..lanes).map(lane).collect();
                        for (name, code) in &codes {
                            let got = run(code, &sums, &a, &b);
                            assert_eq!(got, all, "{name} {target} {signed:?} {a:?} {b:?} {sums:?}");
                        }
                    };
                    for (x, y) in ENDS.iter().flat_map(|x| ENDS.map(|y| (*x, y))) {
                        for sum in [0, i32::MAX, i32::MIN, i32::MIN + 1] {
                            check(vec![sum; lanes], vec![x; 4 * lanes], vec![y; 4 * lanes]);
                        }
                    }
                    for round in 0..200 {
                        let mut bytes = || (0..4 * lanes).map(|_| byte(round % 2 == 0)).collect::<Vec<u8>>();
                        let sums = bytes().chunks(4).map(|c| i32::from_le_bytes(c.try_into().unwrap())).collect();
                        check(sums, bytes(), bytes());
                    }
                }
            }
        }
    }

    /// Instructions that a target's dot products consist of.
    #[test]
    fn machines_use_their_own_instructions() {
        let check = |name: &str, features: &str, signed: [bool; 2], expected: &[(&str, usize)]| {
            let own = Target::named(name).unwrap();
            let features = if features.is_empty() { own.features.clone() } else { features.to_owned() };
            let target = Target { features, ..own };
            let module = module(&target, signed, target.vector_bits as usize / 32);
            let text = String::from_utf8(llvm::compile(&module, &target, Emit::Asm).unwrap().0).unwrap();
            for (word, n) in expected {
                assert_eq!(text.matches(word).count(), *n, "{target} {signed:?}: {word} in {text}");
            }
        };
        let (mixed, both, none) = ([false, true], [true, true], [false, false]);
        check("x86-64-v4", "+avx512vl,+avx512vnni", mixed, &[("vpdpbusd", 1), ("zmm", 5)]);
        check("x86-64-v4", "+avx512vl,+avx512vnni", both, &[("vpdpbusd", 2)]);
        check("x86-64-v4", "", mixed, &[("vpdp", 0), ("vpmaddwd", 2)]);
        check("x86-64-v3", "", both, &[("vpmaddwd", 2)]);
        check("x86-64-v3", "+avxvnni", mixed, &[("{vex}", 1), ("vpdpbusd", 1)]);
        check("x86-64-v3", "+avxvnni,+avxvnniint8", both, &[("vpdpbssd", 1)]);
        check("x86-64-v3", "+avxvnni,+avxvnniint8", none, &[("vpdpbuud", 1)]);
        check("cortex-a76", "", both, &[("sdot", 1)]);
        check("cortex-a76", "", none, &[("udot", 1)]);
        check("neoverse-v1", "", mixed, &[("usdot", 1)]);
        check("neoverse-v1", "", [true, false], &[("usdot", 1)]);
    }
}
