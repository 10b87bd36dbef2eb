//! Dot products of four 8-bit integers or two bf16 numbers per lane, in the instructions of the target.
//!
//! x86-64 multiplies unsigned by signed factors (`vpdpbusd`). Factors of the same signedness are supported by
//! flipping the highest bits of one of them: with the unsigned `a' = a + 128`, `Σ a·b = Σ a'·b − 128·Σ b`,
//! and likewise for unsigned factors with `b' = b − 128`. The second sum depends on one vector only, which
//! all rows share. Without such instructions, signed 16-bit products (`vpmaddwd`) of the even and of the odd
//! bytes are exact; if weights have at most 7 bits, so are sums of two products in 16 bits (`vpmaddubsw`),
//! which take half as many instructions. All arithmetic is modulo 2^32, as the sums are.
//!
//! x86-64 multiplies pairs of bf16 numbers with `vdpbf16ps`. Without it, two f32 multiply-adds of the upper
//! and of the lower halves of the lanes, which are bf16 numbers, give the same result, except that subnormal
//! numbers are not flushed to zero.

use tilewright_ir::dot::{STEPS, factor};
use tilewright_ir::expr::{BinaryOp, Expr};
use tilewright_ir::target::{Arch, Target};
use tilewright_ir::{BufferId, DType, Index, Loop, LoopId, TensorProduct};

use super::memory::LaneAddresses;
use super::plan::{self, VectorPiece};
use super::value::LaneOperand;
use super::{Generator, WrittenLanes};
use crate::CompileError;
use crate::ssa::build::Builder;
use crate::ssa::{Compare, Id, SsaOp, Type};

/// Highest bit of each byte.
const HIGHEST_BITS: i32 = 0x8080_8080u32 as i32;

/// Lower half of each byte.
const LOWER_HALVES: i32 = 0x0f0f_0f0f;

/// Minimum number of lanes of a dot product instruction.
const LEAST_LANES: usize = 4;

/// Upper half of each lane.
const UPPER_HALVES: i32 = 0xffff_0000u32 as i32;

/// Mark, in the key of a load, of lanes that are groups of adjacent elements.
const GROUPS: usize = 1 << 16;

impl Generator<'_> {
    /// Generates the steps of dot products, all at once; if their number is known only at run time, with code
    /// for full products and code for fewer steps.
    pub(super) fn dot_products(&mut self, l: &Loop, how: TensorProduct, extent: &Index) -> Result<(), CompileError> {
        if let Some(n) = extent.as_const() {
            return self.products_of(l, DotSteps { var: l.var, n, given: None });
        }
        let group = how.dot_steps().expect("a loop of dot products");
        let written = plan::written_buffers(&l.body);
        let n = self.int(extent);
        let [all, fewer, join] = [0; 3].map(|_| self.m.block(self.f.id));
        let is_whole = self.m.compare(Compare::Greater, n, self.m.int(group - 1));
        self.m.cond_br(is_whole, all, fewer);
        self.go_to_end(all);
        self.scoped(&written, |g| g.products_of(l, DotSteps { var: l.var, n: group, given: None }))?;
        self.m.br(join);
        self.go_to_end(fewer);
        if self.f.ranges.lower(extent).is_none_or(|least| least < 1) {
            let some = self.m.block(self.f.id);
            let has_any = self.m.compare(Compare::Greater, n, self.m.int(0));
            self.m.cond_br(has_any, some, join);
            self.go_to_end(some);
        }
        let given = (group > 2).then(|| LeastSteps { last: extent.offset(-1), mask: self.mask_of_steps(n, group) });
        self.scoped(&written, |g| g.products_of(l, DotSteps { var: l.var, n: group - 1, given }))?;
        self.m.br(join);
        self.go_to_end(join);
        Ok(())
    }

    fn products_of(&mut self, l: &Loop, steps: DotSteps) -> Result<(), CompileError> {
        self.f.known.insert(l.var, 0);
        self.f.dot = Some(steps);
        let written = self.block(&l.body);
        self.f.dot = None;
        self.f.known.remove(&l.var);
        written
    }

    /// Mask of the first `n` of `group` steps in a lane, from one to all.
    fn mask_of_steps(&mut self, n: Id, group: i64) -> Id {
        let m = &self.m;
        let left = m.binary(SsaOp::SubWrapping, m.int32(group as i32), m.truncate(n, Type::I32));
        let bits = m.binary(SsaOp::MulWrapping, left, m.int32(32 / group as i32));
        m.binary(SsaOp::ShiftUnsigned, m.int32(-1), bits)
    }

    /// Adds the product of two factors over some steps.
    pub(super) fn dot_product(&mut self, buffer: BufferId, index: &[Index], value: &Expr, steps: &DotSteps) {
        let Expr::Binary(BinaryOp::Mul, a, b) = value else { unreachable!("a dot product sums products") };
        let factors = [a, b].map(|value| factor(value).expect("a dot product multiplies elements, or halves of them"));
        let dtypes = factors.map(|(buffer, ..)| self.program.buffer(buffer).dtype);
        let group = if dtypes[0].bytes() == 2 { 2 } else { STEPS };
        // Elements after the last step of one factor are multiplied by zeros of the other, preferably the one
        // with fewer values. For floating-point numbers, either factor may contain NaN or infinity there, so
        // both are masked.
        let is_one = |g: &Self, (buffer, index, _): (BufferId, &[Index], _)| {
            matches!(g.access(buffer, &steps.at(index, 0)), LaneAddresses::Uniform(_))
        };
        let (buffer_a, index_a, _) = factors[0];
        let b_has_fewer = is_one(self, factors[0]) && !is_one(self, factors[1]);
        let with_zeros = usize::from(b_has_fewer && self.may_read_all(buffer_a, index_a, steps, group));
        let [a, b] = [0, 1].map(|at| {
            let (buffer, index, half) = factors[at];
            let bytes = self.steps_of_factor(buffer, index, steps, group, at == with_zeros || dtypes[at].is_float());
            match half {
                None => bytes,
                Some(half) => self.half_of_bytes(bytes, half),
            }
        });
        let old = self.load(buffer, index);
        let lanes = a.lanes.max(b.lanes).max(old.lanes);
        let [sums, a, b] = [old, a, b].map(|x| self.widen(x, lanes));
        let signed = dtypes.map(|dtype| !dtype.is_unsigned());
        let value = match group {
            2 if dtypes[0] == DType::I16 => dot2_of_integers(&self.m, self.target, sums, [a, b]),
            2 => dot2(&self.m, self.target, sums, [a, b]),
            _ if self.fit_16_bits(&factors) => dot4_by_sums(&self.m, self.target, signed, sums, [a, b]),
            _ => dot4(&self.m, self.target, signed, sums, [a, b]),
        };
        self.write(buffer, index, LaneOperand { value, lanes });
    }

    /// Whether sums of two products of these factors, one of which is signed, fit 16 bits, as for bytes with
    /// 7-bit weights or with 4-bit weights.
    fn fit_16_bits(&self, factors: &[(BufferId, &[Index], Option<&Index>); 2]) -> bool {
        let [a, b] = [0, 1].map(|at| (self.program.buffer(factors[at].0).dtype, factors[at].2.is_some()));
        [(a, b), (b, a)].into_iter().any(|((unsigned, is_half), (signed, _))| {
            unsigned.is_unsigned() && (signed == DType::I7 || is_half && signed == DType::I8)
        })
    }

    /// Upper or lower four bits of each byte.
    fn half_of_bytes(&mut self, bytes: LaneOperand, half: &Index) -> LaneOperand {
        let lanes = bytes.lanes.max(1);
        let at = self.eval(&Expr::FromIndex(half.clone()), DType::I32);
        let m = &self.m;
        let distance = m.binary(SsaOp::ShiftLeft, at.value, m.int32(2));
        let moved = m.binary(SsaOp::ShiftUnsigned, bytes.value, m.splat(distance, lanes));
        let value = m.binary(SsaOp::And, moved, m.splat(m.int32(LOWER_HALVES), lanes));
        LaneOperand { value, lanes: bytes.lanes }
    }

    /// Whether the steps of a factor are adjacent, and a full group starting there lies within the buffer.
    fn may_read_all(&self, buffer: BufferId, index: &[Index], steps: &DotSteps, group: i64) -> bool {
        let [flat, second] = [0, 1].map(|at| self.flat(buffer, &steps.place(index, &Index::from(at))));
        let n_elements = self.program.buffer(buffer).n_elements().unwrap_or(1) as i64;
        let is_whole = flat.terms().iter().all(|(_, c)| c % group == 0) && flat.constant() % group == 0;
        second == flat.offset(1) && (steps.n == group || is_whole && n_elements % group == 0)
    }

    /// Reads the steps of a factor as parts of 32-bit integers, `group` per lane, followed by arbitrary
    /// elements or zeros.
    fn steps_of_factor(
        &mut self,
        buffer: BufferId,
        index: &[Index],
        steps: &DotSteps,
        group: i64,
        has_zeros: bool,
    ) -> LaneOperand {
        let may_read_all = self.may_read_all(buffer, index, steps, group);
        let (value, is_whole) = match self.access(buffer, &steps.at(index, 0)) {
            access @ (LaneAddresses::Uniform(_) | LaneAddresses::Strided { .. })
                if may_read_all && !matches!(access, LaneAddresses::Strided { stride, .. } if stride != group) =>
            {
                match self.whole_group(buffer, access) {
                    Some(x) => (x, true),
                    None => (self.one_by_one(buffer, index, steps, group), false),
                }
            }
            LaneAddresses::Strided { stride: 1, .. } if steps.n > 1 && group == STEPS && !self.in_registers(buffer) => {
                match self.f.lanes {
                    Some(WrittenLanes { piece, mask: None, .. }) if piece.width >= LEAST_LANES => {
                        (self.interleaved_steps(buffer, index, steps, piece), false)
                    }
                    _ => (self.one_by_one(buffer, index, steps, group), false),
                }
            }
            _ => (self.one_by_one(buffer, index, steps, group), false),
        };
        let mask = match &steps.given {
            Some(given) => Some(given.mask),
            None => (is_whole && steps.n < group).then(|| self.m.int32((1 << (32 / group * steps.n)) - 1)),
        };
        match mask {
            Some(mask) if has_zeros => {
                let mask = self.m.splat(mask, value.lanes.max(1));
                LaneOperand { value: self.m.binary(SsaOp::And, value.value, mask), lanes: value.lanes }
            }
            _ => value,
        }
    }

    /// Reads the group of adjacent elements of each lane; `None` if some may be outside the buffer.
    fn whole_group(&mut self, buffer: BufferId, access: LaneAddresses) -> Option<LaneOperand> {
        let lanes = self.f.lanes;
        match access {
            LaneAddresses::Uniform(_) if lanes.is_some_and(|l| l.guarded) => None,
            LaneAddresses::Uniform(flat) => {
                // Key of groups at one address, which no other access uses.
                let key = (LaneAddresses::Strided { base: flat.clone(), stride: 0 }, 0);
                let value = self.cached(buffer, key, |g| {
                    let (pointer, align) = (g.pointer(buffer, &flat), g.alignment(buffer, &flat));
                    g.plain_load(buffer, Type::I32, pointer, align)
                });
                Some(LaneOperand::scalar(value))
            }
            LaneAddresses::Strided { base, stride } => {
                let piece = lanes.expect("lanes vary in a vectorized loop").piece;
                let ty = Type::I32.vector(piece.width);
                let existing = match lanes.and_then(|l| l.mask) {
                    Some(mask) => Some(self.and_existing(mask, piece)),
                    None => self.lane_mask(piece.n, piece.width),
                };
                let (pointer, align) = (self.pointer(buffer, &base), self.alignment(buffer, &base));
                let value = match existing {
                    Some(mask) => self.masked_load(ty, pointer, align, mask),
                    None => self.cached(buffer, (LaneAddresses::Strided { base, stride }, piece.n | GROUPS), |g| {
                        g.plain_load(buffer, ty, pointer, align)
                    }),
                };
                Some(LaneOperand { value, lanes: piece.width })
            }
            LaneAddresses::Broken { .. } | LaneAddresses::Irregular(_) => None,
        }
    }

    /// Reads the steps, then zeros, of a factor in memory whose lanes are adjacent and whose steps are
    /// strided: a vector for each step, interleaved.
    fn interleaved_steps(
        &mut self,
        buffer: BufferId,
        index: &[Index],
        steps: &DotSteps,
        VectorPiece { n: n_lanes, width, .. }: VectorPiece,
    ) -> LaneOperand {
        let step = |at: i64| match self.access(buffer, &steps.at(index, at)) {
            LaneAddresses::Strided { base, .. } => base,
            _ => unreachable!("a step is no lane"),
        };
        let bases: Vec<Index> = (0..steps.n).map(step).collect();
        let ty = self.element_type(buffer).vector(width);
        // Only the interleaved result is kept in registers.
        let value = self.cached(buffer, (LaneAddresses::Irregular(bases.clone()), n_lanes | GROUPS), |g| {
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
        LaneOperand { value, lanes: width }
    }

    /// Reads the steps of a factor one by one, followed by zeros.
    fn one_by_one(&mut self, buffer: BufferId, index: &[Index], steps: &DotSteps, group: i64) -> LaneOperand {
        let mut all: Option<LaneOperand> = None;
        for at in 0..steps.n {
            let part = self.load(buffer, &steps.at(index, at));
            let ty = Type::I32.vector(part.lanes.max(1));
            let x = self.m.extend(part.value, ty, false);
            let distance = self.m.splat(self.m.int32((32 / group * at) as i32), ty.lanes);
            let x = self.m.binary(SsaOp::ShiftLeft, x, distance);
            let value = all.map_or(x, |before| self.m.binary(SsaOp::Or, before.value, x));
            all = Some(LaneOperand { value, lanes: part.lanes });
        }
        all.expect("a loop has an iteration")
    }
}

/// Dot product steps around the insertion point.
#[derive(Clone)]
pub struct DotSteps {
    var: LoopId,
    /// Number of steps read.
    n: i64,
    /// Number of steps at run time, if it is not constant.
    given: Option<LeastSteps>,
}

/// Run-time number of steps, at least one.
#[derive(Clone)]
struct LeastSteps {
    last: Index,
    /// Mask of the steps in a lane.
    mask: Id,
}

impl DotSteps {
    /// Subscripts of a step of a factor, clamped to the last step at run time.
    fn at(&self, index: &[Index], at: i64) -> Vec<Index> {
        match &self.given {
            Some(given) if at > 0 => self.place(index, &Index::from(at).smaller(&given.last)),
            _ => self.place(index, &Index::from(at)),
        }
    }

    fn place(&self, index: &[Index], step: &Index) -> Vec<Index> {
        index.iter().map(|i| i.substitute(self.var, step)).collect()
    }
}

/// Accumulates dot products of four 8-bit integers per lane in any number of 32-bit lanes.
pub fn dot4(m: &Builder, target: &Target, signed: [bool; 2], sums: Id, [a, b]: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    let own = target.dot4_lanes(signed);
    let mixed = target.dot4_lanes([false, true]);
    let signed_alone = target.dot4_lanes([true, true]);
    let has_bytes = own.max(mixed).max(signed_alone) > 0;
    let most = if has_bytes { own.max(mixed).max(signed_alone) } else { pair_lanes(target) };
    if lanes < LEAST_LANES || most == 0 {
        return by_bytes(m, signed, sums, [a, b]);
    }
    if lanes > most {
        return in_halves(m, sums, [a, b], |sums, factors| dot4(m, target, signed, sums, factors));
    }
    if lanes <= own {
        return m.dot4(signed, sums, a, b);
    }
    let zero = m.zero(Type::I32.vector(lanes));
    let turn = m.splat(m.int32(HIGHEST_BITS), lanes);
    match signed {
        _ if !has_bytes => by_pairs(m, signed, sums, [a, b]),
        // Arm's first dot product instructions require both factors signed or both unsigned.
        [false, true] if mixed == 0 => {
            // Σ a·b = Σ (a − 128)·b + 128·Σ b, where 128 is −(−128).
            let correction = m.dot4([true, true], zero, turn, b);
            let sums = m.binary(SsaOp::SubWrapping, sums, correction);
            m.dot4([true, true], sums, m.binary(SsaOp::Xor, a, turn), b)
        }
        [true, false] if mixed == 0 => {
            let correction = m.dot4([true, true], zero, a, turn);
            let sums = m.binary(SsaOp::SubWrapping, sums, correction);
            m.dot4([true, true], sums, a, m.binary(SsaOp::Xor, b, turn))
        }
        [true, true] => {
            let correction = m.dot4([false, true], zero, turn, b);
            let sums = m.binary(SsaOp::SubWrapping, sums, correction);
            m.dot4([false, true], sums, m.binary(SsaOp::Xor, a, turn), b)
        }
        _ => {
            // 128 and −128 have the same bits.
            let correction = m.dot4([false, true], zero, a, turn);
            let sums = m.binary(SsaOp::SubWrapping, sums, correction);
            m.dot4([false, true], sums, a, m.binary(SsaOp::Xor, b, turn))
        }
    }
}

/// Accumulates dot products of four 8-bit integers per lane, with an unsigned and a signed factor whose sums
/// of two products fit 16 bits.
fn dot4_by_sums(m: &Builder, target: &Target, signed: [bool; 2], sums: Id, [a, b]: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    if !target.adds_pairs_of_bytes() || lanes < LEAST_LANES {
        return dot4(m, target, signed, sums, [a, b]);
    }
    if lanes > pair_lanes(target) {
        return in_halves(m, sums, [a, b], |sums, factors| dot4_by_sums(m, target, signed, sums, factors));
    }
    let (unsigned, signed) = if signed[0] { (b, a) } else { (a, b) };
    m.dot4_by_sums(sums, unsigned, signed)
}

/// Accumulates dot products of two bf16 numbers per lane in any number of f32 lanes.
pub fn dot2(m: &Builder, target: &Target, sums: Id, [a, b]: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    let own = target.dot2_lanes();
    if own > 0 && lanes > own {
        return in_halves(m, sums, [a, b], |sums, factors| dot2(m, target, sums, factors));
    }
    if own > 0 && lanes >= LEAST_LANES {
        return m.dot_of_halves(sums, a, b);
    }
    let numbers = |x: Id| m.bitcast(x, Type::F32.vector(lanes));
    let upper = |x: Id| numbers(m.binary(SsaOp::And, x, m.splat(m.int32(UPPER_HALVES), lanes)));
    let lower = |x: Id| numbers(m.binary(SsaOp::ShiftLeft, x, m.splat(m.int32(16), lanes)));
    // Products of bf16 numbers are exact in f32.
    let add = |sums: Id, a: Id, b: Id| match target.has_fma {
        true => m.fma(a, b, sums),
        false => m.binary(SsaOp::FAdd, sums, m.binary(SsaOp::FMul, a, b)),
    };
    add(add(sums, upper(a), upper(b)), lower(a), lower(b))
}

/// Maximum number of 32-bit lanes of instructions for pairs of 16-bit integers; 0 without such instructions.
fn pair_lanes(target: &Target) -> usize {
    match target.arch {
        // Vectors of 512 bits in two AVX2 halves still have only 16 registers.
        Arch::X86_64 if target.n_vector_registers < 32 => target.vector_bits.min(256) as usize / 32,
        Arch::X86_64 => target.vector_bits as usize / 32,
        Arch::Aarch64 | Arch::Gpu(_) => 0,
    }
}

/// Accumulates dot products of two 16-bit integers per lane in any number of 32-bit lanes.
pub fn dot2_of_integers(m: &Builder, target: &Target, sums: Id, [a, b]: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    let most = pair_lanes(target);
    if most > 0 && lanes > most {
        return in_halves(m, sums, [a, b], |sums, factors| dot2_of_integers(m, target, sums, factors));
    }
    if most > 0 && lanes >= LEAST_LANES {
        return m.dot2(sums, a, b);
    }
    let sixteen = m.splat(m.int32(16), lanes);
    let upper = |x: Id| m.binary(SsaOp::ShiftSigned, x, sixteen);
    let lower = |x: Id| upper(m.binary(SsaOp::ShiftLeft, x, sixteen));
    let add = |sums: Id, a: Id, b: Id| m.binary(SsaOp::AddWrapping, sums, m.binary(SsaOp::MulWrapping, a, b));
    add(add(sums, lower(a), lower(b)), upper(a), upper(b))
}

/// Applies a function to each half of a vector.
fn in_halves(m: &Builder, sums: Id, factors: [Id; 2], of_half: impl Fn(Id, [Id; 2]) -> Id) -> Id {
    let n_lanes = m.type_of(sums).lanes;
    let half = n_lanes / 2;
    let parts = [0, half].map(|first| {
        let lanes: Vec<Option<usize>> = (first..first + half).map(Some).collect();
        let part = |x: Id| m.shuffle(x, m.undefined(m.type_of(x)), &lanes);
        of_half(part(sums), factors.map(part))
    });
    let all: Vec<Option<usize>> = (0..n_lanes).map(Some).collect();
    m.shuffle(parts[0], parts[1], &all)
}

/// Multiplies even and odd bytes as 16-bit integers, in pairs.
fn by_pairs(m: &Builder, signed: [bool; 2], sums: Id, [a, b]: [Id; 2]) -> Id {
    let ty = m.type_of(sums);
    let short = Type::I16.vector(2 * ty.lanes);
    let eight = m.splat(m.integer(Type::I16, 8), short.lanes);
    let parts = |x: Id, is_signed: bool| {
        let x = m.bitcast(x, short);
        let down = if is_signed { SsaOp::ShiftSigned } else { SsaOp::ShiftUnsigned };
        let even = m.binary(down.clone(), m.binary(SsaOp::ShiftLeft, x, eight), eight);
        [even, m.binary(down, x, eight)].map(|part| m.bitcast(part, ty))
    };
    let ([a_even, a_odd], [b_even, b_odd]) = (parts(a, signed[0]), parts(b, signed[1]));
    m.dot2(m.dot2(sums, a_even, b_even), a_odd, b_odd)
}

/// Multiplies byte after byte, as 32-bit integers.
fn by_bytes(m: &Builder, signed: [bool; 2], sums: Id, factors: [Id; 2]) -> Id {
    let lanes = m.type_of(sums).lanes;
    let bits = |n: i32| m.splat(m.int32(n), lanes);
    (0..4).fold(sums, |sums, at| {
        let byte = |x: Id, is_signed: bool| {
            let down = if is_signed { SsaOp::ShiftSigned } else { SsaOp::ShiftUnsigned };
            m.binary(down, m.binary(SsaOp::ShiftLeft, x, bits(24 - 8 * at)), bits(24))
        };
        let product = m.binary(SsaOp::MulWrapping, byte(factors[0], signed[0]), byte(factors[1], signed[1]));
        m.binary(SsaOp::AddWrapping, sums, product)
    })
}

#[cfg(all(test, feature = "llvm"))]
mod tests {
    use super::*;
    use crate::ssa::{Linkage, Module};
    use crate::{Emit, llvm, loader, x86};

    /// Targets of this machine with and without byte dot product instructions.
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

    /// Module with a function `(sums, a, b)` that adds dot products to sums in memory.
    fn module(target: &Target, signed: [bool; 2], lanes: usize) -> Module {
        let m = Builder::new("test");
        let f = m.function("f", Linkage::Exported, None, &[Type::POINTER; 3]);
        m.go_to(f, m.block(f));
        let ty = Type::I32.vector(lanes);
        let [sums, a, b] = [0, 1, 2].map(|at| m.load(ty, m.parameter(at), 1, false));
        m.store(dot4(&m, target, signed, sums, [a, b]), m.parameter(0), 1);
        m.ret();
        m.finish()
    }

    /// Code of a module from every back end, with the back end's name.
    fn codes_of(module: Module, target: &Target, lanes: usize) -> Vec<(&'static str, loader::LoadedCode)> {
        assert_eq!(module.verify(), Ok(()), "{module}");
        let (object, _) = llvm::compile(&module, target, Emit::Object).unwrap();
        let mut codes = vec![("LLVM", loader::load(&object, target.arch, &|_| None).unwrap())];
        if x86::serves(target) && 32 * lanes <= target.vector_bits as usize {
            let image = x86::compile(module, target, &|_| false).unwrap();
            codes.push(("quick", loader::place(image, &|_| None).unwrap()));
        }
        codes
    }

    fn run(code: &loader::LoadedCode, sums: &[i32], a: &[u8], b: &[u8]) -> Vec<i32> {
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
                    let codes = codes_of(module(&target, signed, lanes), &target, lanes);
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

    #[test]
    fn pairs_of_integers_are_exact_and_wrap() {
        const ENDS: [i16; 6] = [0, 1, 255, -128, i16::MAX, i16::MIN];
        for target in targets() {
            for lanes in [1, 2, 4, 8, 16] {
                let m = Builder::new("test");
                let f = m.function("f", Linkage::Exported, None, &[Type::POINTER; 3]);
                m.go_to(f, m.block(f));
                let ty = Type::I32.vector(lanes);
                let [sums, a, b] = [0, 1, 2].map(|at| m.load(ty, m.parameter(at), 1, false));
                m.store(dot2_of_integers(&m, &target, sums, [a, b]), m.parameter(0), 1);
                m.ret();
                let codes = codes_of(m.finish(), &target, lanes);
                let check = |sum: i32, a: &[i16], b: &[i16]| {
                    let products = a.iter().zip(b).map(|(a, b)| i64::from(*a) * i64::from(*b));
                    let products: Vec<i64> = products.collect();
                    let lane = |at: usize| (i64::from(sum) + products[2 * at] + products[2 * at + 1]) as i32;
                    let expected: Vec<i32> = (0..lanes).map(lane).collect();
                    let [of_a, of_b] = [a, b].map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
                    for (name, code) in &codes {
                        let got = run(code, &vec![sum; lanes], &of_a, &of_b);
                        assert_eq!(got, expected, "{name} {target} {a:?} {b:?} {sum}");
                    }
                };
                for (x, y) in ENDS.iter().flat_map(|x| ENDS.map(|y| (*x, y))) {
                    for sum in [0, i32::MAX, i32::MIN] {
                        check(sum, &vec![x; 2 * lanes], &vec![y; 2 * lanes]);
                    }
                }
                let mut state = 1u32;
                let mut short = || {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 16) as i16
                };
                for _ in 0..100 {
                    let [a, b]: [Vec<i16>; 2] = [(); 2].map(|()| (0..2 * lanes).map(|_| short()).collect());
                    check(i32::from(short()) << 12, &a, &b);
                }
            }
        }
    }

    /// Targets for pairs of bf16 numbers: with the instruction, which flushes subnormal numbers, and with
    /// multiply-adds, which do not.
    fn targets_of_pairs() -> Vec<(Target, bool)> {
        let all = targets().into_iter().map(|target| (target, false));
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vl") {
            let with = |name| Target {
                features: "+avx512vl,+avx512bf16".into(),
                cpu: "znver5".into(),
                ..Target::named(name).unwrap()
            };
            return all.chain([(with("x86-64-v4"), true), (with("x86-64-v3"), true)]).collect();
        }
        all.collect()
    }

    /// Sums of pairs computed by the interpreter.
    fn interpreted(sums: &[u32], a: &[u16], b: &[u16]) -> Vec<f32> {
        let n = sums.len();
        let text = format!(
            "program \"pairs\"\nbuffer a: bf16[{n}, 2] global input\nbuffer b: bf16[{n}, 2] global input\n\
             buffer s: f32[{n}] global input\nbuffer out: f32[{n}] global output\nloops i, k, l\nrun {{\n\
             for i in {n} {{\n out[i] = s[i]\n}}\ndot2 k in 2 {{\nfor l in {n} {{\n\
             out[l] += a[l, k] * b[l, k] first never\n}}\n}}\n}}\n"
        );
        let program = tilewright_ir::text::parse(&text).unwrap();
        let halves = |x: &[u16]| x.iter().map(|x| f64::from(f32::from_bits(u32::from(*x) << 16))).collect();
        let singles = sums.iter().map(|x| f64::from(f32::from_bits(*x))).collect();
        let mut arguments = [halves(a), halves(b), singles, vec![0.0; n]];
        tilewright_ir::interp::run(&program, &mut arguments).unwrap();
        arguments[3].iter().map(|x| *x as f32).collect()
    }

    /// Checks that results are bit-identical to the interpreter's, including NaN, infinities and subnormal
    /// numbers.
    #[test]
    fn pairs_of_bf16_are_added_as_the_interpreter_does() {
        let mut state = 1u64;
        let mut bits = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        for (target, flushes) in targets_of_pairs() {
            for lanes in [1, 2, 4, 8, 16] {
                let m = Builder::new("test");
                let f = m.function("f", Linkage::Exported, None, &[Type::POINTER; 3]);
                m.go_to(f, m.block(f));
                let [sums, a, b] = [(0, Type::F32), (1, Type::I32), (2, Type::I32)]
                    .map(|(at, ty)| m.load(ty.vector(lanes), m.parameter(at), 1, false));
                m.store(dot2(&m, &target, sums, [a, b]), m.parameter(0), 1);
                m.ret();
                let codes = codes_of(m.finish(), &target, lanes);
                for round in 0..600 {
                    // All numbers; numbers of similar magnitude, whose sums lose bits; numbers close to the
                    // smallest normal one.
                    let factor = |bits: u32| match round % 3 {
                        0 => (bits >> 16) as u16,
                        1 => (bits >> 16) as u16 & 0x80ff | 0x3f00,
                        _ => (bits >> 16) as u16 & 0x80ff | (0x1f00 + ((bits & 3) << 6)) as u16,
                    };
                    let a: Vec<u16> = (0..2 * lanes).map(|_| factor(bits())).collect();
                    let b: Vec<u16> = (0..2 * lanes).map(|_| factor(bits())).collect();
                    let sums: Vec<u32> = (0..lanes)
                        .map(|_| match round % 3 {
                            0 => bits(),
                            1 => bits() & 0x80ff_ffff | 0x3f00_0000,
                            _ => bits() & 0x80ff_ffff,
                        })
                        .collect();
                    // Vectors shorter than those of the instruction are multiplied without it.
                    if round % 3 != 1 && !(flushes && lanes >= LEAST_LANES) {
                        continue;
                    }
                    let expected = interpreted(&sums, &a, &b);
                    for (name, code) in &codes {
                        let got = run_pairs(code, &sums, &a, &b);
                        let same = |(x, y): (&f32, &f32)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
                        let all_same = got.iter().zip(&expected).all(same);
                        assert!(all_same, "{name} {target}: {a:x?} {b:x?} {sums:x?} give {got:?}, not {expected:?}");
                    }
                }
            }
        }
    }

    fn run_pairs(code: &loader::LoadedCode, sums: &[u32], a: &[u16], b: &[u16]) -> Vec<f32> {
        let [a, b] = [a, b].map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let sums: Vec<i32> = sums.iter().map(|x| x.cast_signed()).collect();
        run(code, &sums, &a, &b).into_iter().map(|x| f32::from_bits(x.cast_unsigned())).collect()
    }

    /// Checks the instructions of a target's dot products.
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
        check("cortex-a76", "", mixed, &[("sdot", 2)]);
        check("neoverse-v1", "", mixed, &[("usdot", 1)]);
        check("neoverse-v1", "", [true, false], &[("usdot", 1)]);
    }
}
