//! Stores of rounded numbers as bytes, four vectors at a time.
//!
//! Quantization ends with `round(x) + zero`, saturated to 8 bits. One vector of 32-bit lanes at a time takes
//! three operations after rounding: the sum and a narrowing store of two. Four vectors are packed with
//! saturation first, twice: `vpackssdw`, `vpaddsw` of the zero point, `vpackuswb`, and one permutation that
//! undoes the order in which packing within 128 bits leaves the lanes, 1.5 operations per vector.

use tilewright_ir::expr::{BinaryOp, Expr, UnaryOp};
use tilewright_ir::target::Arch;
use tilewright_ir::{BufferId, DType, Index, Loop, LoopKind, Stmt};

use super::plan::{self, VectorPiece};
use super::value::{chosen_within, rounded_and_shifted};
use super::{Generator, WrittenLanes};
use crate::ssa::{Id, SsaOp, Type};

/// Number of vectors packed into one.
const PACKED: usize = 4;
/// Lanes of a vector before packing.
const LANES: usize = 16;
/// Upper bound of numbers before conversion, which saturates in any 8-bit type; larger ones would become the
/// smallest integer.
const MOST_CONVERTED: f64 = 1_073_741_824.0;

/// A store of 16 adjacent bytes in a vectorized loop: numbers to round and an integer to add.
struct RoundedStore<'a> {
    l: &'a Loop,
    buffer: BufferId,
    index: &'a [Index],
    x: &'a Expr,
    shift: Option<&'a Expr>,
}

/// Ends of an 8-bit type.
fn ends(dtype: DType) -> Option<[f64; 2]> {
    match dtype {
        DType::U8 => Some([0.0, 255.0]),
        DType::I8 => Some([-128.0, 127.0]),
        _ => None,
    }
}

/// Operand in f32 of a cast to an 8-bit type that is clipped between the ends of the type.
fn clipped_to(inside: &Expr, to: DType) -> Option<&Expr> {
    let [low, high] = ends(to)?;
    if let Some((DType::F32, x, most)) = chosen_within(inside, to)
        && to == DType::U8
        && most == high
    {
        return Some(x);
    }
    let Expr::Cast(DType::F32, x) = inside else { return None };
    let Expr::Binary(outer, inside, second) = x.without_cast(DType::F32) else { return None };
    let Expr::Binary(inner, x, first) = inside.without_cast(DType::F32) else { return None };
    let bounds = match (inner, outer) {
        (BinaryOp::Max, BinaryOp::Min) => [first, second],
        (BinaryOp::Min, BinaryOp::Max) => [second, first],
        _ => return None,
    };
    (**bounds[0] == Expr::Const(low) && **bounds[1] == Expr::Const(high)).then(|| x.without_cast(DType::F32))
}

impl Generator<'_> {
    /// Generates the stores of rounded numbers at the beginning of a block together, and returns their number
    /// of statements; 0 if there are none.
    pub(super) fn saturated_stores(&mut self, block: &[Stmt]) -> usize {
        let is_served = plan::has_masks(self.target) && self.target.arch == Arch::X86_64;
        if !is_served || self.f.lanes.is_some() || self.f.dot.is_some() || block.len() < PACKED {
            return 0;
        }
        let stores: Option<Vec<_>> = block[..PACKED].iter().map(|stmt| self.rounded_store(stmt)).collect();
        let Some(stores) = stores else { return 0 };
        let (buffer, shift) = (stores[0].buffer, stores[0].shift);
        let mut reads_itself = false;
        stores.iter().for_each(|s| s.x.for_each_load(&mut |b, _| reads_itself |= b == buffer));
        if reads_itself || stores.iter().any(|s| s.buffer != buffer || s.shift != shift) {
            return 0;
        }
        let first = |s: &RoundedStore<'_>| {
            let flat = self.flat(buffer, s.index).sub(&Index::from(s.l.var));
            (!flat.uses(s.l.var)).then(|| self.f.ranges.simplify(&flat))
        };
        let Some(flats) = stores.iter().map(first).collect::<Option<Vec<Index>>>() else { return 0 };
        let dtype = self.program.buffer(buffer).dtype;
        let shift = shift.map(|shift| self.eval(shift, DType::I32).value);
        let wholes: Vec<Id> = stores.iter().map(|s| self.whole_numbers(s, shift, dtype)).collect();
        let all = self.packed(&wholes, shift, dtype);
        self.f.seen.loads.remove(&buffer);
        self.store_quarters(buffer, &flats, all);
        PACKED
    }

    /// Matches a vectorized loop that stores a whole vector of rounded numbers as bytes.
    fn rounded_store<'s>(&self, stmt: &'s Stmt) -> Option<RoundedStore<'s>> {
        let Stmt::For(l) = stmt else { return None };
        let [Stmt::Store { buffer, index, value: Expr::Cast(to, inside) }] = l.body.as_slice() else { return None };
        let dtype = self.program.buffer(*buffer).dtype;
        let is_whole = l.kind == LoopKind::Vectorized
            && self.f.ranges.simplify(&plan::resolve(&l.extent, &self.f.known)).as_const() == Some(LANES as i64);
        let is_elsewhere = self.in_registers(*buffer) || self.f.matrices.in_parts.contains(buffer);
        if !is_whole || *to != dtype || is_elsewhere {
            return None;
        }
        let x = clipped_to(inside, dtype)?;
        let (x, shift) = match (rounded_and_shifted(x, ends(dtype)?, Some(l.var)), x) {
            (Some((x, shift)), _) => (x, Some(shift)),
            (None, Expr::Unary(UnaryOp::Round, x)) => (x.without_cast(DType::F32), None),
            _ => return None,
        };
        Some(RoundedStore { l, buffer: *buffer, index, x, shift })
    }

    /// Evaluates the numbers of a store, rounded to 32-bit integers. NaN becomes an integer that is stored as
    /// 0: the smallest one if the type is unsigned, else minus the integer to be added.
    fn whole_numbers(&mut self, store: &RoundedStore<'_>, shift: Option<Id>, dtype: DType) -> Id {
        let l = store.l;
        self.f.ranges.push(l.var, l.extent.clone());
        let piece = VectorPiece { first: 0, n: LANES, width: LANES };
        let outer = self.f.lanes.replace(WrittenLanes { var: l.var, piece, mask: None, guarded: false });
        let x = self.rounded_next(store.x, DType::F32);
        let x = self.widen(x, LANES);
        self.f.lanes = outer;
        self.f.ranges.pop();
        let m = &self.m;
        let [most, more] = [MOST_CONVERTED, 2.0 * MOST_CONVERTED].map(|end| m.splat(m.real(Type::F32, end), LANES));
        let at_most = m.select(m.fless(most, x), most, x);
        let whole = m.real_to_int_or_least(at_most, true);
        if dtype == DType::U8 {
            return whole;
        }
        let zero = m.int32(0);
        let of_nan = shift.map_or(zero, |shift| m.binary(SsaOp::SubWrapping, zero, shift));
        m.select(m.fless(at_most, more), whole, m.splat(of_nan, LANES))
    }

    /// Packs four vectors of integers into bytes, in their order, with an integer added that is the same in
    /// all lanes.
    fn packed(&self, wholes: &[Id], shift: Option<Id>, dtype: DType) -> Id {
        let m = &self.m;
        let shift = shift.map(|shift| m.splat(m.truncate(shift, Type::I16), 2 * LANES));
        let halves = wholes.chunks(2).map(|pair| {
            let words = m.pack_saturated(pair[0], pair[1], false);
            shift.map_or(words, |shift| m.binary(SsaOp::AddSaturated, words, shift))
        });
        let halves: Vec<Id> = halves.collect();
        let bytes = m.pack_saturated(halves[0], halves[1], dtype == DType::U8);
        let quads = m.bitcast(bytes, Type::I32.vector(LANES));
        let order: Vec<Option<usize>> = (0..LANES).map(|at| Some(at % PACKED * PACKED + at / PACKED)).collect();
        m.shuffle(quads, quads, &order)
    }

    /// Stores the quarters of a vector of bytes, adjacent ones at once.
    fn store_quarters(&mut self, buffer: BufferId, flats: &[Index], all: Id) {
        let follows = |at: usize| flats[at + 1].sub(&flats[at]).as_const() == Some(LANES as i64);
        let n = match [follows(0), follows(1), follows(2)] {
            [true, true, true] => PACKED,
            [true, _, true] => 2,
            _ => 1,
        };
        for at in (0..PACKED).step_by(n) {
            let mask: Vec<Option<usize>> = (at * PACKED..(at + n) * PACKED).map(Some).collect();
            let part = if n == PACKED { all } else { self.m.shuffle(all, all, &mask) };
            let part = self.m.bitcast(part, Type::I8.vector(n * LANES));
            self.write_vector(buffer, &flats[at], part, None);
        }
    }
}
