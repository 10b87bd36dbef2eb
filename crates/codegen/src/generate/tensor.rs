//! Products of tiles in the tensor cores of NVIDIA's GPUs.
//!
//! A warp's instruction multiplies a tile of 16 × 8 by one of 8 × 8, with `x` along the steps of the sum and
//! `y` along rows and columns: the thread `x`, `y` brings the factors of rows `y` and `y + 8` and of column
//! `y`, of the steps `x` and `x + 4`. It has the sums that the program says it has.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, section 9.7.14.5.6, "Matrix Fragments for
//! mma.m16n8k8".

use tilewright_ir::gpu::TileProduct;
use tilewright_ir::gpu::tensor::STEPS;
use tilewright_ir::{BufferId, Index, Loop, LoopId, Tensor};

use super::memory::Access;
use super::value::Operand;
use super::{Generator, Storage, plan};
use crate::CompileError;
use crate::ssa::{Id, Op, Type};

/// Bits of a number in single precision that a tensor core does not look at.
const LOST_BITS: u32 = 13;

/// A factor as numbers that a tensor core multiplies.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Its first 11 bits.
    first: Id,
    /// What they leave, where that is wanted.
    rest: Option<Id>,
}

impl Generator<'_> {
    /// Writes all steps of a loop over a product of tiles.
    pub(super) fn tile_product(&mut self, l: &Loop, how: Tensor) -> Result<(), CompileError> {
        let product = TileProduct::of(self.program, l).expect("a tensor core's loop is a product of tiles");
        let [x, y] = self.f.warp.expect("threads were mapped to warps");
        self.f.ranges.push(l.var, l.extent.clone());
        let flat = |g: &Self, buffer: BufferId, index: &[Index]| {
            g.f.ranges.simplify(&plan::flat(g.program, buffer, index, &g.f.known))
        };
        let (a, rows) = &product.rows;
        let rows = [0, 1].map(|at| flat(self, *a, &rows[at]));
        let (b, columns) = &product.columns;
        let [first, second] = [0, 1].map(|at| flat(self, *b, &columns[at]));
        self.f.ranges.pop();
        let distance = second.sub(&first).as_const().expect("columns are a fixed distance apart");
        // Column y is that of the thread y / 2, its second one where y is odd.
        let row = Index::from(y);
        let column = first.substitute(x, &row.floor_div(2)).add(&row.modulo(2).scale(distance));
        let halves = [0, STEPS / 2];
        let at_steps =
            |g: &Self, of: &Index, half: i64| g.f.ranges.simplify(&of.substitute(l.var, &Index::from(x).offset(half)));
        let of_a: Vec<Index> =
            halves.iter().flat_map(|half| rows.each_ref().map(|row| at_steps(self, row, *half))).collect();
        let of_b = halves.map(|half| at_steps(self, &column, half));
        // Threads 8·n and after have the addresses of the rows of tile n: those of all rows for one half of
        // the steps after the other.
        let at_row = Index::from(x).add(&Index::from(y).modulo(2).scale(4));
        let [first, second] = [2, 4].map(|n| Index::from(y).floor_div(n));
        if let Some(distance) = rows[1].sub(&rows[0]).as_const() {
            let tile = rows[0].substitute(y, &at_row).add(&first.modulo(2).scale(distance));
            self.load_tiles(*a, &tile.substitute(l.var, &second.scale(halves[1])), (&tile, l.var), &of_a);
        }
        let tile = column.substitute(y, &at_row);
        self.load_tiles(*b, &tile.substitute(l.var, &first.modulo(2).scale(halves[1])), (&tile, l.var), &of_b);
        let mut part = |buffer: BufferId, at: &Index| {
            let value = self.element_at(buffer, at);
            self.parts(value, how)
        };
        let a_parts: Vec<Parts> = of_a.iter().map(|at| part(*a, at)).collect();
        let b_parts: Vec<Parts> = of_b.iter().map(|at| part(*b, at)).collect();
        let (sums, places) = &product.sums;
        let before: Vec<Id> = places.iter().map(|place| self.load(*sums, place).value).collect();
        // What a tensor core adds to a sum is cut to the sum's bits, not rounded, and the errors of many
        // steps add up: where nearly all bits count it starts from nothing, and the sum is rounded outside.
        let zero = self.m.zero(Type::F32);
        let mut all = if how == Tensor::Tf32x3 { vec![zero; before.len()] } else { before.clone() };
        let rest = |part: &Parts| part.rest.expect("both parts are there");
        let first = |part: &Parts| part.first;
        type Choice<'c> = &'c dyn Fn(&Parts) -> Id;
        let products: &[[Choice; 2]] = match how {
            Tensor::Tf32 | Tensor::Wgmma => &[[&first, &first]],
            // The smallest first.
            Tensor::Tf32x3 => &[[&rest, &first], [&first, &rest], [&first, &first]],
        };
        for [of_a, of_b] in products {
            let factors = a_parts.iter().map(of_a).chain(b_parts.iter().map(of_b));
            let sums = self.m.tile_product(factors.chain(all));
            all = (0..4).map(|at| self.m.extract(sums, at)).collect();
        }
        if how == Tensor::Tf32x3 {
            all = before.iter().zip(all).map(|(before, more)| self.m.binary(Op::FAdd, *before, more)).collect();
        }
        for (place, value) in places.iter().zip(all) {
            self.write(*sums, place, Operand::scalar(value));
        }
        Ok(())
    }

    /// Loads the elements at some positions, one of each tile of 8 rows of four neighbours along the steps,
    /// which the threads of a warp load together, each the row at `at`; where the factor lies so.
    fn load_tiles(&mut self, buffer: BufferId, at: &Index, (rows, steps): (&Index, LoopId), elements: &[Index]) {
        const ROW_BYTES: u32 = 16;
        let Some(Storage::Pointer(base)) = self.f.storage.get(&buffer) else { return };
        let is_shared = self.m.type_of(*base) == Type::SHARED;
        let lie_along = rows.coefficient(steps) == 1 && !rows.sub(&Index::from(steps)).uses(steps);
        let at = self.f.ranges.simplify(at);
        let key = |at: &Index| (Access::Uniform(at.clone()), 0);
        let is_known = elements.iter().all(|at| self.seen_load(buffer, &key(at)).is_some());
        if !is_shared || !lie_along || is_known || self.alignment(buffer, &at) < ROW_BYTES {
            return;
        }
        let pointer = self.pointer(buffer, &at);
        let tiles = self.m.load_tiles(pointer, Type::F32.vector(elements.len()));
        for (tile, at) in elements.iter().enumerate() {
            let value = self.m.extract(tiles, tile);
            self.remember_load(buffer, key(at), value);
        }
    }

    /// A factor as its parts, which are found once for all products.
    fn parts(&mut self, factor: Id, how: Tensor) -> Parts {
        if let Some(parts) = self.f.seen.parts.get(&factor) {
            return *parts;
        }
        let parts = match how {
            Tensor::Tf32 | Tensor::Wgmma => Parts { first: self.m.tf32(factor), rest: None },
            Tensor::Tf32x3 => {
                // Half of the last bit more, then no further bits: the same but for what is no number, which
                // the rest keeps. Of the rest a tensor core looks at no more than it can use.
                let word = |bits: u32| self.m.int32(bits as i32);
                let bits = self.m.bitcast(factor, Type::I32);
                let more = self.m.binary(Op::AddWrapping, bits, word(1 << (LOST_BITS - 1)));
                let bits = self.m.binary(Op::And, more, word(u32::MAX << LOST_BITS));
                let first = self.m.bitcast(bits, Type::F32);
                Parts { first, rest: Some(self.m.binary(Op::FSub, factor, first)) }
            }
        };
        self.f.seen.parts.insert(factor, parts);
        parts
    }
}
