//! Dot products of four 8-bit integers a lane, in the instructions that a machine has.
//!
//! x86-64 multiplies unsigned by signed factors (`vpdpbusd`). Factors of one sign it has by turning the
//! highest bits of one of them: with `a' = a + 128`, which has no sign, `Σ a·b = Σ a'·b − 128·Σ b`, and
//! likewise for unsigned factors with `b' = b − 128`. The second sum is that of a vector alone, which all
//! rows share. Without such instructions, signed 16-bit products (`vpmaddwd`) of the even and of the odd
//! bytes are exact. All this is modulo 2^32, as the sums are.

use tilewright_ir::dot::{STEPS, factor};
use tilewright_ir::expr::{BinaryOp, Expr};
use tilewright_ir::target::{Arch, Target};
use tilewright_ir::{BufferId, DType, Index, Loop, LoopId};

use super::memory::Access;
use super::plan::Piece;
use super::value::Operand;
use super::{Generator, Lanes};
use crate::CompileError;
use crate::ssa::build::Builder;
use crate::ssa::{Id, Op, Type};

/// The highest bit of each byte.
const HIGHEST_BITS: i32 = 0x8080_8080u32 as i32;

/// The lower half of each byte.
const LOWER_HALVES: i32 = 0x0f0f_0f0f;

/// Fewest lanes of a dot product's instruction.
const LEAST_LANES: usize = 4;

/// Marks, in the key of a load, lanes that are groups of bytes.
const GROUPS: usize = 1 << 16;

impl Generator<'_> {
    /// Writes the steps of dot products, all of them at once.
    pub(super) fn dot_products(&mut self, l: &Loop, n: i64) -> Result<(), CompileError> {
        self.f.known.insert(l.var, 0);
        self.f.dot = Some((l.var, n));
        self.block(&l.body)?;
        self.f.dot = None;
        self.f.known.remove(&l.var);
        Ok(())
    }

    /// Adds the product of two factors over the first `n` steps.
    pub(super) fn dot_product(&mut self, buffer: BufferId, index: &[Index], value: &Expr, steps: LoopId, n: i64) {
        let Expr::Binary(BinaryOp::Mul, a, b) = value else { unreachable!("a dot product sums products") };
        let factors = [a, b].map(|value| factor(value).expect("a dot product multiplies elements, or halves of them"));
        let signed = factors.map(|(buffer, ..)| self.program.buffer(buffer).dtype == DType::I8);
        // What lies behind the last step of one factor is multiplied by zeros of the other.
        let [a, b] = [(0, true), (1, false)].map(|(at, has_zeros)| {
            let (buffer, index, half) = factors[at];
            let bytes = self.bytes_of_steps(buffer, index, steps, n, has_zeros);
            match half {
                None => bytes,
                Some(half) => self.half_of_bytes(bytes, half),
            }
        });
        let old = self.load(buffer, index);
        let lanes = a.lanes.max(b.lanes).max(old.lanes);
        let [sums, a, b] = [old, a, b].map(|x| self.widen(x, lanes));
        let value = dot4(&self.m, self.target, signed, sums, [a, b]);
        self.write(buffer, index, Operand { value, lanes });
    }

    /// The upper or lower four bits of each byte.
    fn half_of_bytes(&mut self, bytes: Operand, half: &Index) -> Operand {
        let lanes = bytes.lanes.max(1);
        let at = self.eval(&Expr::FromIndex(half.clone()), DType::I32);
        let m = &self.m;
        let distance = m.binary(Op::ShiftLeft, at.value, m.int32(2));
        let moved = m.binary(Op::ShiftUnsigned, bytes.value, m.splat(distance, lanes));
        let value = m.binary(Op::And, moved, m.splat(m.int32(LOWER_HALVES), lanes));
        Operand { value, lanes: bytes.lanes }
    }

    /// The first `n` steps of a factor as the bytes of 32-bit integers, then any, or zeros.
    fn bytes_of_steps(&mut self, buffer: BufferId, index: &[Index], steps: LoopId, n: i64, has_zeros: bool) -> Operand {
        let flat = self.flat(buffer, index);
        self.f.known.insert(steps, 1);
        let are_neighbours = self.flat(buffer, index) == flat.offset(1);
        self.f.known.insert(steps, 0);
        let n_elements = self.program.buffer(buffer).n_elements().unwrap_or(1) as i64;
        let is_whole = flat.terms().iter().all(|(_, c)| c % STEPS == 0) && flat.constant() % STEPS == 0;
        let may_read_all = are_neighbours && (n == STEPS || is_whole && n_elements % STEPS == 0);
        match self.access(buffer, index) {
            access @ (Access::Uniform(_) | Access::Strided { stride: STEPS, .. }) if may_read_all => {
                let Some(x) = self.whole_group(buffer, access) else {
                    return self.byte_by_byte(buffer, index, steps, n);
                };
                if n == STEPS || !has_zeros {
                    return x;
                }
                let mask = self.m.splat(self.m.int32((1 << (8 * n)) - 1), x.lanes.max(1));
                Operand { value: self.m.binary(Op::And, x.value, mask), lanes: x.lanes }
            }
            Access::Strided { stride: 1, .. } if n > 1 && !self.in_registers(buffer) => match self.f.lanes {
                Some(Lanes { piece, mask: None, .. }) if piece.width >= LEAST_LANES => {
                    self.interleaved_steps(buffer, index, steps, n, piece)
                }
                _ => self.byte_by_byte(buffer, index, steps, n),
            },
            _ => self.byte_by_byte(buffer, index, steps, n),
        }
    }

    /// Reads four neighbours for each lane; `None` where some may lie outside the buffer.
    fn whole_group(&mut self, buffer: BufferId, access: Access) -> Option<Operand> {
        let lanes = self.f.lanes;
        match access {
            Access::Uniform(_) if lanes.is_some_and(|l| l.guarded) => None,
            Access::Uniform(flat) => {
                // No other access of one element has lanes apart.
                let key = (Access::Strided { base: flat.clone(), stride: 0 }, 0);
                let value = self.cached(buffer, key, |g| {
                    let (pointer, align) = (g.pointer(buffer, &flat), g.alignment(buffer, &flat));
                    g.plain_load(buffer, Type::I32, pointer, align)
                });
                Some(Operand::scalar(value))
            }
            Access::Strided { base, stride } => {
                let piece = lanes.expect("lanes vary in a vectorized loop").piece;
                let ty = Type::I32.vector(piece.width);
                let existing = match lanes.and_then(|l| l.mask) {
                    Some(mask) => Some(self.and_existing(mask, piece)),
                    None => self.lane_mask(piece.n, piece.width),
                };
                let (pointer, align) = (self.pointer(buffer, &base), self.alignment(buffer, &base));
                let value = match existing {
                    Some(mask) => self.masked_load(ty, pointer, align, mask),
                    None => self.cached(buffer, (Access::Strided { base, stride }, piece.n | GROUPS), |g| {
                        g.plain_load(buffer, ty, pointer, align)
                    }),
                };
                Some(Operand { value, lanes: piece.width })
            }
            Access::Broken { .. } | Access::Irregular(_) => None,
        }
    }

    /// The first `n` steps, then zeros, of a factor in memory whose lanes are neighbours and whose steps lie
    /// apart: a vector for each step, interleaved.
    fn interleaved_steps(
        &mut self,
        buffer: BufferId,
        index: &[Index],
        steps: LoopId,
        n: i64,
        Piece { n: n_lanes, width, .. }: Piece,
    ) -> Operand {
        let step = |at: i64| {
            self.f.known.insert(steps, at);
            let Access::Strided { base, .. } = self.access(buffer, index) else { unreachable!("a step is no lane") };
            base
        };
        let bases: Vec<Index> = (0..n).map(step).collect();
        self.f.known.insert(steps, 0);
        let ty = self.element_type(buffer).vector(width);
        // Registers hold what comes of them alone.
        let value = self.cached(buffer, (Access::Irregular(bases.clone()), n_lanes | GROUPS), |g| {
            let row = |base: &Index| {
                let (pointer, align) = (g.pointer(buffer, base), g.alignment(buffer, base));
                match g.lane_mask(n_lanes, width) {
                    None => g.plain_load(buffer, ty, pointer, align),
                    Some(mask) => g.masked_load(ty, pointer, align, mask),
                }
            };
            let mut rows: Vec<Id> = bases.iter().map(row).collect();
            rows.resize(STEPS as usize, g.m.zero(ty));
            let in_order = |n: usize| (0..n).map(Some).collect::<Vec<_>>();
            let [first, second] = [0, 2].map(|at| g.m.shuffle(rows[at], rows[at + 1], &in_order(2 * width)));
            let all = g.m.shuffle(first, second, &in_order(4 * width));
            let places: Vec<_> = (0..width).flat_map(|lane| (0..4).map(move |at| Some(at * width + lane))).collect();
            g.m.bitcast(g.m.shuffle(all, all, &places), Type::I32.vector(width))
        });
        Operand { value, lanes: width }
    }

    /// The first `n` steps of a factor, read one by one.
    fn byte_by_byte(&mut self, buffer: BufferId, index: &[Index], steps: LoopId, n: i64) -> Operand {
        let mut all: Option<Operand> = None;
        for at in 0..n {
            self.f.known.insert(steps, at);
            let byte = self.load(buffer, index);
            let ty = Type::I32.vector(byte.lanes.max(1));
            let x = self.m.extend(byte.value, ty, false);
            let distance = self.m.splat(self.m.int32(8 * at as i32), ty.lanes);
            let x = self.m.binary(Op::ShiftLeft, x, distance);
            let value = all.map_or(x, |before| self.m.binary(Op::Or, before.value, x));
            all = Some(Operand { value, lanes: byte.lanes });
        }
        self.f.known.insert(steps, 0);
        all.expect("a loop has an iteration")
    }
}

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

/// Products of one byte after the other, as 32-bit integers.
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
