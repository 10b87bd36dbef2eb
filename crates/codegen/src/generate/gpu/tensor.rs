//! Tile products in the tensor cores of NVIDIA GPUs (`mma.sync`).
//!
//! A warp's instruction multiplies a tile of 16 × 8 by one of 8 × 8 f32 numbers, or of twice as many steps of
//! 16-bit numbers, with `x` along the reduction steps and `y` along rows and columns: thread `(x, y)` holds
//! the factors of rows `y` and `y + 8` and of column `y`, for the steps `x` and `x + 4`, or for the pairs of
//! steps with these indices. Its sums are those of the program.
//!
//! If a factor in shared memory has rows of which each 16 bytes belong to four threads, the warp loads its
//! tiles collectively, with one instruction for all registers (`ldmatrix`).
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, sections 9.7.14.5.6 and after, "Matrix
//! Fragments for mma.m16n8k8", and 9.7.14.5.15, "ldmatrix".

use tilewright_ir::gpu::TileProduct;
use tilewright_ir::gpu::tensor::WARP;
use tilewright_ir::{BufferId, Index, Loop, LoopId, TensorProduct};

use crate::CompileError;
use crate::generate::memory::{LaneAddresses, LoadKey};
use crate::generate::value::LaneOperand;
use crate::generate::{Generator, Storage, plan};
use crate::ssa::{Id, SsaOp, Type};

/// Number of low bits of an f32 number that a tensor core ignores.
const LOST_BITS: u32 = 13;

/// Operand converted to numbers that a tensor core multiplies.
#[derive(Clone, Copy)]
pub struct FactorParts {
    /// High part, the first 11 bits.
    first: Id,
    /// Low part, the remainder, if it is needed.
    rest: Option<Id>,
}

/// Key of a register of some elements; a single element has the usual key of a load.
fn register_key(elements: &[Index]) -> LoadKey {
    match elements {
        [at] => (LaneAddresses::Uniform(at.clone()), 0),
        all => (LaneAddresses::Irregular(all.to_vec()), 0),
    }
}

/// Tiles of 8 rows of 16 bytes, of which each thread of a warp has one register.
struct Tiles {
    buffer: BufferId,
    /// Position of the row whose address the thread provides for collective loads; threads from 8·n on
    /// provide those of tile n.
    row: Index,
    /// Whether elements are adjacent in such rows.
    in_rows: bool,
    /// Whether the rows in memory are the columns of the operand.
    transposed: bool,
    /// Elements of the thread's register of each tile, by position.
    elements: Vec<Vec<Index>>,
}

impl Generator<'_> {
    /// Generates all steps of a tile product loop.
    pub(in crate::generate) fn tile_product(&mut self, l: &Loop, how: TensorProduct) -> Result<(), CompileError> {
        let product = TileProduct::of(self.program, l, how).expect("a tensor core's loop is a product of tiles");
        let [x, y] = self.f.warp.expect("threads were mapped to warps");
        self.f.ranges.push(l.var, l.extent.clone());
        let flat = |g: &Self, buffer: BufferId, index: &[Index]| {
            g.f.ranges.simplify(&plan::flat(g.program, buffer, index, &g.f.known))
        };
        let (a, rows) = &product.rows;
        let rows = [0, 1].map(|at| flat(self, *a, &rows[at]));
        let (b, columns) = &product.columns;
        let columns = [0, 1].map(|at| flat(self, *b, &columns[at]));
        self.f.ranges.pop();
        let [a_tiles, b_tiles] = self.tiles(&product, l.var, [x, y], (rows, columns));
        let [a_parts, b_parts] = [a_tiles, b_tiles].map(|tiles| {
            self.load_tiles(&tiles);
            let registers = tiles.elements.iter().map(|elements| self.register(tiles.buffer, elements));
            let registers: Vec<Id> = registers.collect();
            registers.into_iter().map(|register| self.parts(register, how)).collect::<Vec<FactorParts>>()
        });
        let (sums, places) = &product.sums;
        let before: Vec<Id> = places.iter().map(|place| self.load(*sums, place).value).collect();
        // A tensor core truncates the product to the precision of the sum instead of rounding it, and the
        // errors of many steps accumulate. In 3xTF32, products therefore start from zero, and the sum is
        // rounded outside.
        let zero = self.m.zero(Type::F32);
        let mut all = if how == TensorProduct::Tf32x3 { vec![zero; before.len()] } else { before.clone() };
        let rest = |part: &FactorParts| part.rest.expect("both parts are there");
        let first = |part: &FactorParts| part.first;
        type Choice<'c> = &'c dyn Fn(&FactorParts) -> Id;
        let products: &[[Choice; 2]] = match how {
            TensorProduct::Tf32
            | TensorProduct::Halves
            | TensorProduct::Wgmma
            | TensorProduct::Dot4
            | TensorProduct::Dot2
            | TensorProduct::Tma => &[[&first, &first]],
            // Smallest products first.
            TensorProduct::Tf32x3 | TensorProduct::Wgmmax3 => &[[&rest, &first], [&first, &rest], [&first, &first]],
        };
        let kind = self.element_type(*a).kind;
        for [of_a, of_b] in products {
            let factors = a_parts.iter().map(of_a).chain(b_parts.iter().map(of_b));
            let sums = self.m.tile_product(kind, factors.chain(all));
            all = (0..4).map(|at| self.m.extract(sums, at)).collect();
        }
        if how == TensorProduct::Tf32x3 {
            all = before.iter().zip(all).map(|(before, more)| self.m.binary(SsaOp::FAdd, *before, more)).collect();
        }
        for (place, value) in places.iter().zip(all) {
            self.write(*sums, place, LaneOperand::scalar(value));
        }
        Ok(())
    }

    /// Tiles of both factors, given the layout of their rows and columns.
    fn tiles(
        &self,
        product: &TileProduct,
        steps: LoopId,
        [x, y]: [LoopId; 2],
        ([row, other_row], [column, other_column]): ([Index; 2], [Index; 2]),
    ) -> [Tiles; 2] {
        let simplify = |index: &Index| self.f.ranges.simplify(index);
        let distance = other_column.sub(&column).as_const().expect("columns are a fixed distance apart");
        // Column y belongs to thread y / 2, as its second one if y is odd.
        let at_column = |n: &Index| column.substitute(x, &n.floor_div(2)).add(&n.modulo(2).scale(distance));
        let at_row = |n: &Index| row.substitute(y, n);
        let own = Index::from(y);

        // A register holds adjacent steps; a thread has one register for each half of the steps.
        let half = product.steps / 2;
        let in_register = half / WARP[0];
        let of = |index: &Index, half: i64| -> Vec<Index> {
            let step = |n: i64| Index::from(x).scale(in_register).offset(half + n);
            (0..in_register).map(|n| simplify(&index.substitute(steps, &step(n)))).collect()
        };
        let of_column = at_column(&own);
        let of_a = [0, half].iter().flat_map(|half| [&row, &other_row].map(|row| of(row, *half))).collect();
        let of_b = [0, half].iter().map(|half| of(&of_column, *half)).collect();

        // Row of a tile whose address the thread provides.
        let n = Index::from(x).add(&own.modulo(2).scale(4));
        let [low, high] = [2, 4].map(|n| own.floor_div(n));
        let low = low.modulo(2);
        let is_next = |index: &Index, var: LoopId, n: i64| {
            index.coefficient(var) == n && !index.sub(&Index::from(var).scale(n)).uses(var)
        };
        let none = Index::from(0);
        let tiles = |buffer, at: &dyn Fn(&Index) -> Index, along: bool, across: bool, second: &Index, elements| {
            let (outer, inner) = if along { (&n, second.clone()) } else { (&none, n.add(second)) };
            let row = at(outer).substitute(steps, &inner);
            Tiles { buffer, row, in_rows: along || across, transposed: !along, elements }
        };
        let a_across = is_next(&row, y, 1);
        let to_other = other_row.sub(&row).as_const();
        let mut of_rows = tiles(product.rows.0, &at_row, is_next(&row, steps, 1), a_across, &high.scale(half), of_a);
        of_rows.in_rows &= to_other.is_some();
        of_rows.row = of_rows.row.add(&low.scale(to_other.unwrap_or(0)));
        let b_across = is_next(&column, x, 2) && distance == 1;
        let along = is_next(&column, steps, 1);
        let of_columns = tiles(product.columns.0, &at_column, along, b_across, &low.scale(half), of_b);
        [of_rows, of_columns]
    }

    /// Loads tiles collectively by the threads of a warp, if their layout in shared memory allows it.
    fn load_tiles(&mut self, tiles: &Tiles) {
        const ROW_BYTES: u32 = 16;
        let Tiles { buffer, row, in_rows, transposed, elements } = tiles;
        let Some(Storage::Pointer(base)) = self.f.storage.get(buffer) else { return };
        let is_shared = self.m.type_of(*base) == Type::SHARED;
        let is_half = self.program.buffer(*buffer).dtype.is_half();
        let row = self.f.ranges.simplify(row);
        let is_known = elements.iter().all(|of| self.seen_load(*buffer, &register_key(of)).is_some());
        let is_possible = is_shared && *in_rows && (is_half || !transposed);
        if !is_possible || is_known || self.alignment(*buffer, &row) < ROW_BYTES {
            return;
        }
        let pointer = self.pointer(*buffer, &row);
        let register = if is_half { Type::I32 } else { Type::F32 };
        let all = self.m.load_tiles(pointer, *transposed, register.vector(elements.len()));
        for (tile, of) in elements.iter().enumerate() {
            let value = self.m.extract(all, tile);
            self.remember_load(*buffer, register_key(of), value);
        }
    }

    /// Register that holds some elements.
    fn register(&mut self, buffer: BufferId, elements: &[Index]) -> Id {
        if let [at] = elements {
            return self.element_at(buffer, at);
        }
        let key = register_key(elements);
        if let Some(known) = self.seen_load(buffer, &key) {
            return known;
        }
        let mut all = self.m.undefined(self.element_type(buffer).vector(elements.len()));
        for (lane, at) in elements.iter().enumerate() {
            let value = self.element_at(buffer, at);
            all = self.m.insert(all, value, lane);
        }
        let register = self.m.bitcast(all, Type::I32);
        self.remember_load(buffer, key, register);
        register
    }

    /// Splits f32 numbers into their first 11 bits, rounded, and the remainders.
    pub(in crate::generate) fn both_parts(&self, numbers: Id) -> [Id; 2] {
        // Adding half of the last kept bit and clearing the lower bits rounds, except for NaN, which the
        // remainder preserves. A tensor core ignores the low bits of the remainder.
        let ty = self.m.type_of(numbers);
        let word = |bits: u32| self.m.splat(self.m.int32(bits as i32), ty.lanes);
        let bits = self.m.bitcast(numbers, Type::I32.vector(ty.lanes));
        let more = self.m.binary(SsaOp::AddWrapping, bits, word(1 << (LOST_BITS - 1)));
        let bits = self.m.binary(SsaOp::And, more, word(u32::MAX << LOST_BITS));
        let first = self.m.bitcast(bits, ty);
        [first, self.m.binary(SsaOp::FSub, numbers, first)]
    }

    /// Remainders of f32 numbers that tensor cores truncate, rounded to the bits that tensor cores use.
    pub(in crate::generate) fn cut_off(&self, numbers: Id) -> Id {
        let ty = self.m.type_of(numbers);
        let bits = self.m.bitcast(numbers, Type::I32.vector(ty.lanes));
        let kept = self.m.splat(self.m.int32((u32::MAX << LOST_BITS) as i32), ty.lanes);
        let first = self.m.bitcast(self.m.binary(SsaOp::And, bits, kept), ty);
        self.rounded_to_tf32(self.m.binary(SsaOp::FSub, numbers, first))
    }

    /// Rounds f32 numbers to the 11 bits of TF32, lane by lane.
    pub(in crate::generate) fn rounded_to_tf32(&self, numbers: Id) -> Id {
        let ty = self.m.type_of(numbers);
        if ty.lanes == 1 {
            return self.m.tf32(numbers);
        }
        let lanes = 0..ty.lanes;
        lanes.fold(numbers, |all, lane| self.m.insert(all, self.m.tf32(self.m.extract(numbers, lane)), lane))
    }

    /// Parts of a factor, computed once for all products.
    fn parts(&mut self, factor: Id, how: TensorProduct) -> FactorParts {
        if let Some(parts) = self.f.seen.parts.get(&factor) {
            return *parts;
        }
        let parts = match how {
            TensorProduct::Halves | TensorProduct::Dot4 | TensorProduct::Dot2 | TensorProduct::Tma => {
                FactorParts { first: factor, rest: None }
            }
            TensorProduct::Tf32 | TensorProduct::Wgmma => FactorParts { first: self.m.tf32(factor), rest: None },
            TensorProduct::Tf32x3 | TensorProduct::Wgmmax3 => {
                let [first, rest] = self.both_parts(factor);
                FactorParts { first, rest: Some(rest) }
            }
        };
        self.f.seen.parts.insert(factor, parts);
        parts
    }
}
