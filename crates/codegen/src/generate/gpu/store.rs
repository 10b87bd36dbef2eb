//! Bulk stores, in which a warp writes a box to shared memory, from where TMA copies it to an array.
//!
//! Each warp has separate staging boxes of 16 rows of 128 bytes, so that warps do not wait for each other.
//! Before it refills a box, it waits until the previous copy from the box has read it completely. Rows are
//! swizzled, as the tensor map says: the 16-byte part `n` of row `r` is at `n ^ r`. For 16-bit numbers, the
//! warp stores four 8 × 8 tiles at a time (`stmatrix`). For f32, each thread stores two adjacent numbers; in
//! odd rows, it begins two eight-column parts later, so that half a warp writes to all banks.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, sections 9.7.9.27, "cp.async.bulk.tensor",
//! and 9.7.14.5.16, "stmatrix"; the order of fence, barrier and copy is that of CUTLASS's epilogues.

use tilewright_ir::expr::Cond;
use tilewright_ir::gpu::store::{BOX_BYTES, BoxStore, SLOTS, stored};
use tilewright_ir::gpu::tensor::WARP;
use tilewright_ir::gpu::warpgroup::ROW_BYTES;
use tilewright_ir::{DType, Index, Loop, LoopId};

use super::bulk::with_coordinates;
use crate::generate::Generator;
use crate::generate::memory::PART_BYTES;
use crate::ssa::{Compare, Id, SsaOp, Type};

/// Number of bits of a byte offset in a part of a row.
const PART_BITS: i64 = PART_BYTES.trailing_zeros() as i64;
/// Number of 8 × 8 tiles that a warp stores at a time.
const TILES: usize = 4;

/// Staging boxes of a kernel's bulk stores.
#[derive(Clone, Copy)]
pub struct Stores {
    /// Address of the first warp's boxes.
    boxes: Id,
    /// Number of stores before the insertion point, on every path to it.
    n: i64,
    /// Whether there are any bulk stores.
    are_some: bool,
}

impl Stores {
    /// Creates the state of staging boxes at an address.
    pub fn new(boxes: Id) -> Stores {
        Stores { boxes, n: 0, are_some: false }
    }
}

impl Generator<'_> {
    /// Generates the bulk store of a loop; returns false if the loop is not one in this kernel.
    pub(in crate::generate) fn box_store(&mut self, l: &Loop) -> bool {
        let (Some(stores), Some(warp), Some(groups)) = (self.f.stores, self.f.warp, self.f.groups) else {
            return false;
        };
        let Ok(store) = BoxStore::of(self.program, l, warp, &self.f.ranges) else { return false };
        let Some(map) = self.tma_state().parameter(&store.map) else { return false };
        let offset = stores.n % SLOTS * BOX_BYTES;
        // Earlier stores are unknown at the first store, but were issued long before.
        let n_reading = match stores.n {
            0 => Some(0),
            n => Some(SLOTS - 1).filter(|_| n >= SLOTS),
        };
        let is_of_pairs = self.program.buffer(store.map.array).dtype == DType::F32;
        self.f.stores = Some(Stores { n: stores.n + 1, are_some: true, ..stores });
        let parts = self.parts_of(l, &store);
        if let Some(n) = n_reading {
            self.effect(&format!("cp.async.bulk.wait_group.read {n};"), "~{memory}", &[]);
            // Threads store tiles collectively.
            if is_of_pairs {
                self.warp_barrier();
            }
        }
        let number = match self.f.warp_of_block {
            Some(warp) => self.m.truncate(warp, Type::I32),
            None => self.short_int(&groups.warp().into()),
        };
        let m = &self.m;
        let own = m.binary(SsaOp::MulWrapping, number, m.int32((SLOTS * BOX_BYTES) as i32));
        let first = m.binary(SsaOp::AddWrapping, self.short(stores.boxes), own);
        match is_of_pairs {
            true => self.fill_by_pairs((first, offset), warp, &parts),
            false => self.fill_by_tiles((first, offset), warp, &parts),
        }
        self.m.proxy_fence();
        self.warp_barrier();
        self.copy_box(&store, map, (first, offset), warp);
        self.f.seen.loads.remove(&store.map.array);
        true
    }

    /// Forgets the stores before the insertion point.
    pub(in crate::generate) fn forget_stores(&mut self) {
        if let Some(stores) = &mut self.f.stores {
            stores.n = 0;
        }
    }

    /// Waits until all boxes have been read, before the block ends.
    pub(in crate::generate) fn end_stores(&self) {
        if self.f.stores.is_some_and(|stores| stores.are_some) {
            self.effect("cp.async.bulk.wait_group.read 0;", "~{memory}", &[]);
        }
    }

    /// Generates a barrier for the threads of the warp, which makes their writes visible to each other.
    fn warp_barrier(&self) {
        self.effect("bar.warp.sync 0xffffffff;", "~{memory}", &[]);
    }

    /// Numbers that a thread stores, as 32-bit values: for each eight-column part, those of its first and of
    /// its second row.
    fn parts_of(&mut self, l: &Loop, store: &BoxStore) -> Vec<[Vec<Id>; 2]> {
        let n = l.extent.as_const().unwrap_or(0);
        let mut parts = Vec::new();
        for part in 0..n {
            self.f.known.insert(l.var, part);
            parts.push(store.rows.each_ref().map(|row| self.neighbours_of(row)));
            self.f.known.remove(&l.var);
        }
        parts
    }

    /// The two adjacent elements that a thread stores, as 32-bit values.
    fn neighbours_of(&mut self, l: &Loop) -> Vec<Id> {
        let (array, _, value) = stored(l).expect("invariant: a store is in the loop");
        let value = self.two_of(l, array, value);
        match self.program.buffer(array).dtype {
            DType::F32 => [0, 1].map(|lane| self.m.bitcast(self.m.extract(value, lane), Type::I32)).to_vec(),
            _ => vec![self.m.bitcast(value, Type::I32)],
        }
    }

    /// Fills a box with 8 × 8 tiles of 16-bit numbers; each thread provides the address of a row.
    fn fill_by_tiles(&mut self, (first, offset): (Id, i64), [x, y]: [LoopId; 2], parts: &[[Vec<Id>; 2]]) {
        let lane = Index::from(y).scale(WARP[0]).add(&x.into());
        // Tiles are ordered along rows first.
        let row = lane.modulo(2 * WARP[1]);
        let [row, part] = [row, lane.floor_div(2 * WARP[1])].map(|index| self.short_int(&index));
        let own = self.swizzled(first, row, part);
        for (at, tiles) in parts.chunks(TILES / 2).enumerate() {
            let place = self.m.binary(SsaOp::Xor, own, self.m.int32(((TILES / 2 * at) as i32) << PART_BITS));
            let words: Vec<Id> = [place].into_iter().chain(tiles.iter().flatten().flatten().copied()).collect();
            let text = format!("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1, $2, $3, $4}};");
            self.effect(&text, "r,r,r,r,r,~{memory}", &words);
        }
    }

    /// Fills a box with pairs of f32 numbers.
    fn fill_by_pairs(&mut self, (first, offset): (Id, i64), [x, y]: [LoopId; 2], parts: &[[Vec<Id>; 2]]) {
        let two = Index::from(x).floor_div(2);
        let [row, part, odd_x, odd_y] =
            [y.into(), two, Index::from(x).modulo(2), Index::from(y).modulo(2)].map(|index| self.short_int(&index));
        let m = &self.m;
        let shifted = |x: Id, bits: i64| m.binary(SsaOp::ShiftLeft, x, m.int32(bits as i32));
        // Two adjacent elements are half of a 16-byte part; eight columns are two such parts.
        let own = m.binary(SsaOp::AddWrapping, self.swizzled(first, row, part), shifted(odd_x, PART_BITS - 1));
        let own = m.binary(SsaOp::Xor, own, shifted(odd_y, PART_BITS + 2));
        let is_odd = m.compare(Compare::Greater, odd_y, m.int32(0));
        for at in 0..parts.len() {
            let place = m.binary(SsaOp::Xor, own, m.int32((at as i32) << (PART_BITS + 1)));
            for row in [0, 1] {
                let [own, other] = [at, at ^ 2].map(|part| &parts[part][row]);
                let words = own.iter().zip(other).map(|(own, other)| m.select(is_odd, *other, *own));
                let words: Vec<Id> = [place].into_iter().chain(words).collect();
                let offset = offset + row as i64 * WARP[1] * ROW_BYTES;
                self.effect(&format!("st.shared.v2.b32 [$0+{offset}], {{$1, $2}};"), "r,r,r,~{memory}", &words);
            }
        }
    }

    /// Address of a part of a row in a box, where both indices are less than 16.
    fn swizzled(&self, first: Id, row: Id, part: Id) -> Id {
        let m = &self.m;
        let of_row = m.binary(SsaOp::AddWrapping, first, m.binary(SsaOp::MulWrapping, row, m.int32(ROW_BYTES as i32)));
        let number = m.binary(SsaOp::Xor, m.binary(SsaOp::And, row, m.int32(WARP[1] as i32 - 1)), part);
        m.binary(SsaOp::AddWrapping, of_row, m.binary(SsaOp::ShiftLeft, number, m.int32(PART_BITS as i32)))
    }

    /// Issues the copy of a warp's box by one of its threads.
    fn copy_box(&mut self, store: &BoxStore, map: Id, (first, offset): (Id, i64), [x, y]: [LoopId; 2]) {
        let is_zero = |var: LoopId| Cond::Eq(var.into(), 0.into());
        let is_first = self.cond(&is_zero(x).and(is_zero(y)));
        let mut coordinates: Vec<Id> = store.place.iter().map(|index| self.short_int(index)).collect();
        coordinates.reverse();
        let n = coordinates.len();
        let (list, constraints) = with_coordinates('b', n);
        let text = format!(
            "@$0 cp.async.bulk.tensor.{n}d.global.shared::cta.tile.bulk_group [$1, {{{list}}}], [$2+{offset}];"
        );
        let map = self.m.address(map);
        self.effect(&text, constraints, &[[is_first, map, first].as_slice(), &coordinates].concat());
        self.effect("@$0 cp.async.bulk.commit_group;", "b,~{memory}", &[is_first]);
    }
}
