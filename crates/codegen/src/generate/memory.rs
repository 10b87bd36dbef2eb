//! Loads and stores of scalars, of contiguous, strided and scattered lanes, and of register chunks.

use tilewright_ir::dependence::reduced;
use tilewright_ir::expr::Subscript;
use tilewright_ir::{Atom, BufferId, DType, Index, LoopId};

use super::operand::LaneOperand;
use super::plan::{self, Chunk, VectorPiece};
use super::{ARGUMENT_ALIGN, Generator, Storage, WrittenLanes};
use crate::ssa::{Id, Type};

/// Size in bytes of a swizzled chunk of a row, in operands of warpgroup products.
pub const PART_BYTES: i64 = 16;

/// Addresses of a vector's lanes in a buffer.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum LaneAddresses {
    /// All lanes at one address.
    Uniform(Index),
    /// Lane `i` at `base + stride·i`.
    Strided { base: Index, stride: i64 },
    /// Lane `i` at `base + stride·i` if `i < at`, else at `then + stride·i`, for lanes that continue in
    /// another row.
    Broken { base: Index, stride: i64, at: Index, then: Box<Index>, all: Vec<Index> },
    /// Each lane at its own address.
    Irregular(Vec<Index>),
}

impl LaneAddresses {
    /// Shifts the access by `n` elements.
    fn offset(self, n: i64) -> LaneAddresses {
        match self {
            LaneAddresses::Uniform(flat) => LaneAddresses::Uniform(flat.offset(n)),
            LaneAddresses::Strided { base, stride } => LaneAddresses::Strided { base: base.offset(n), stride },
            LaneAddresses::Broken { base, stride, at, then, all } => {
                let (then, all) = (Box::new(then.offset(n)), all.iter().map(|flat| flat.offset(n)).collect());
                LaneAddresses::Broken { base: base.offset(n), stride, at, then, all }
            }
            LaneAddresses::Irregular(all) => LaneAddresses::Irregular(all.iter().map(|flat| flat.offset(n)).collect()),
        }
    }
}

impl Generator<'_> {
    /// Addresses of an access's lanes.
    pub(super) fn access(&self, buffer: BufferId, index: &[Index]) -> LaneAddresses {
        let flat = self.flat(buffer, index);
        let Some(lanes) = self.f.lanes.filter(|l| flat.uses(l.var)) else {
            return LaneAddresses::Uniform(flat);
        };
        let VectorPiece { first, n, .. } = lanes.piece;
        let strided = |flat: &Index| {
            let stride = flat.coefficient(lanes.var);
            let rest = flat.sub(&Index::from(lanes.var).scale(stride));
            (!rest.uses(lanes.var)).then(|| LaneAddresses::Strided { base: rest.offset(stride * first), stride })
        };
        if let Some(access) = strided(&flat) {
            return access;
        }
        let position = |lane: i64| self.f.ranges.simplify(&flat.substitute(lanes.var, &Index::from(first + lane)));
        let all: Vec<Index> = (0..n as i64).map(position).collect();
        let steps: Vec<Option<i64>> = all.windows(2).map(|w| w[1].sub(&w[0]).as_const()).collect();
        let last = n as i64 - 1;
        if let Some(stride) = steps[0] {
            let before = 1 + steps.iter().take_while(|s| **s == Some(stride)).count();
            if before == n {
                return LaneAddresses::Strided { base: all[0].clone(), stride };
            }
            if steps[before..].iter().all(|s| *s == Some(stride)) {
                let then = all[n - 1].offset(-stride * last).into();
                return LaneAddresses::Broken {
                    base: all[0].clone(),
                    stride,
                    at: Index::from(before as i64),
                    then,
                    all,
                };
            }
        }
        // A vector may be a part of a row, for example of a panel that several tiles share.
        if let Some(access) = strided(&reduced(&flat, &self.f.ranges)) {
            return access;
        }
        let mut row = None;
        match slope(&flat, lanes.var, &mut row).zip(row) {
            // At most one row ends within `n` lanes.
            Some((stride, (x, d))) if d >= n as i64 => {
                let x = x.substitute(lanes.var, &Index::from(first));
                let at = self.f.ranges.simplify(&Index::from(d).sub(&x.modulo(d)));
                LaneAddresses::Broken {
                    base: all[0].clone(),
                    stride,
                    at,
                    then: all[n - 1].offset(-stride * last).into(),
                    all,
                }
            }
            _ => LaneAddresses::Irregular(all),
        }
    }

    /// Known alignment of an address, in bytes.
    pub(super) fn alignment(&self, buffer: BufferId, flat: &Index) -> u32 {
        let bits = flat.terms().iter().fold(flat.constant(), |bits, (_, c)| bits | c);
        let bytes = self.program.buffer(buffer).dtype.bytes();
        let known = if bits == 0 { ARGUMENT_ALIGN } else { bytes << bits.trailing_zeros().min(8) };
        // The parts of a matrix row are permuted.
        let most = if self.f.matrices.all.contains(&buffer) { PART_BYTES as u64 } else { u64::MAX };
        known.min(self.buffer_align(buffer)).min(most) as u32
    }

    /// Constant mask of the existing lanes of a piece; `None` if all exist.
    pub(super) fn lane_mask(&self, n: usize, width: usize) -> Option<Id> {
        (n < width).then(|| self.m.integers(Type::I1, (0..width).map(|lane| i64::from(lane < n))))
    }

    /// Reads the element of each lane.
    pub(super) fn load(&mut self, buffer: BufferId, index: &[Index]) -> LaneOperand {
        let element = self.element_type(buffer);
        let lanes = self.f.lanes;
        match self.access(buffer, index) {
            LaneAddresses::Uniform(flat) => {
                if self.in_registers(buffer) {
                    return LaneOperand::scalar(self.read_chunk(buffer, &flat, 1, 1));
                }
                let guarded = lanes.is_some_and(|l| l.guarded);
                let flat = if guarded { self.inside(buffer, &flat) } else { flat };
                LaneOperand::scalar(self.element_at(buffer, &flat))
            }
            LaneAddresses::Strided { base, stride: 1 } => {
                let WrittenLanes { piece, mask, .. } = lanes.expect("lanes vary in a vectorized loop");
                if self.in_registers(buffer) {
                    let value = self.read_chunk(buffer, &base, piece.n, piece.width);
                    return LaneOperand { value, lanes: piece.width };
                }
                let Some(mask) = mask else {
                    let value = self.neighbours(buffer, &base, piece.n, piece.width);
                    return LaneOperand { value, lanes: piece.width };
                };
                let pointer = self.pointer(buffer, &base);
                let align = self.alignment(buffer, &base);
                let mask = self.and_existing(mask, piece);
                let ty = element.vector(piece.width);
                LaneOperand { value: self.masked_load(ty, pointer, align, mask), lanes: piece.width }
            }
            access => {
                let WrittenLanes { piece, mask, .. } = lanes.expect("lanes vary in a vectorized loop");
                let value = match mask.filter(|_| !self.in_registers(buffer)) {
                    Some(mask) => {
                        let mask = self.and_existing(mask, piece);
                        self.scattered(buffer, &access, piece, Some(mask))
                    }
                    None => {
                        self.cached(buffer, (access.clone(), piece.n), |g| g.scattered(buffer, &access, piece, None))
                    }
                };
                LaneOperand { value, lanes: piece.width }
            }
        }
    }

    /// Reads the element at a position in memory.
    pub(super) fn element_at(&mut self, buffer: BufferId, flat: &Index) -> Id {
        let element = self.element_type(buffer);
        self.cached(buffer, (LaneAddresses::Uniform(flat.clone()), 0), |g| {
            let pointer = g.pointer(buffer, flat);
            let align = g.alignment(buffer, flat);
            g.plain_load(buffer, element, pointer, align)
        })
    }

    /// Reads the element of each lane at data-dependent subscripts.
    pub(super) fn gather(&mut self, buffer: BufferId, subscripts: &[Subscript]) -> LaneOperand {
        let (shape, strides) = {
            let b = self.program.buffer(buffer);
            (b.shape.clone(), b.strides())
        };
        // Offset in elements from the position of the known subscripts.
        let mut offset: Option<LaneOperand> = None;
        for ((subscript, extent), stride) in subscripts.iter().zip(shape).zip(strides) {
            let Subscript::Value(value) = subscript else { continue };
            let number = self.eval(value, DType::I64);
            let n = number.lanes.max(1);
            let whole = |g: &Self, v: i64| g.m.splat(g.m.int(v), n);
            let is_behind = self.compare(false, number.value, whole(self, 0));
            let from_end = self.m.add(number.value, whole(self, extent));
            let place = self.m.select(is_behind, from_end, number.value);
            let place = self.clamped(place, whole(self, 0), whole(self, extent - 1));
            let here = LaneOperand { value: self.m.mul(place, whole(self, stride)), lanes: number.lanes };
            offset = Some(match offset {
                None => here,
                Some(before) => {
                    let n = before.lanes.max(here.lanes);
                    let (a, b) = (self.widen(before, n), self.widen(here, n));
                    LaneOperand { value: self.m.add(a, b), lanes: n }
                }
            });
        }
        let offset = offset.expect("a gathered element has a computed place");
        let index: Vec<Index> = subscripts.iter().map(Subscript::known).collect();
        let (element, align) = (self.element_type(buffer), element_align(self, buffer));
        let access = self.access(buffer, &index);
        if let (0, LaneAddresses::Strided { base, stride: 1 }) = (offset.lanes, &access) {
            let WrittenLanes { piece, mask, .. } = self.f.lanes.expect("lanes vary in a vectorized loop");
            let pointer = self.pointer(buffer, base);
            let pointer = self.m.element(element, pointer, offset.value);
            let mask = match mask {
                Some(mask) => Some(self.and_existing(mask, piece)),
                None => self.lane_mask(piece.n, piece.width),
            };
            let ty = element.vector(piece.width);
            let value = match mask {
                None => self.plain_load(buffer, ty, pointer, align),
                Some(mask) => self.masked_load(ty, pointer, align, mask),
            };
            return LaneOperand { value, lanes: piece.width };
        }
        let is_guarded = self.f.lanes.is_some_and(|l| l.guarded || l.mask.is_some());
        let last = self.program.buffer(buffer).n_elements().unwrap_or(1).max(1) as i64 - 1;
        let at = |g: &mut Self, flat: &Index, offset: Id| {
            let first = g.pointer(buffer, &Index::from(0));
            let known = g.int(flat);
            let mut at = g.m.add(known, offset);
            if is_guarded {
                at = g.clamped(at, g.m.int(0), g.m.int(last));
            }
            let pointer = g.m.element(element, first, at);
            g.plain_load(buffer, element, pointer, align)
        };
        if let (0, LaneAddresses::Uniform(flat)) = (offset.lanes, &access) {
            return LaneOperand::scalar(at(self, flat, offset.value));
        }
        let WrittenLanes { piece, .. } = self.f.lanes.expect("lanes vary in a vectorized loop");
        let mut out = self.m.undefined(element.vector(piece.width));
        for (lane, flat) in self.lane_positions(&access, piece.n).into_iter().enumerate() {
            let own = if offset.lanes == 0 { offset.value } else { self.m.extract(offset.value, lane) };
            let x = at(self, &flat, own);
            out = self.m.insert(out, x, lane);
        }
        LaneOperand { value: out, lanes: piece.width }
    }

    /// Reads lanes that are not contiguous; with a mask, only those in it.
    fn scattered(&mut self, buffer: BufferId, access: &LaneAddresses, piece: VectorPiece, mask: Option<Id>) -> Id {
        let element = self.element_type(buffer);
        let ty = element.vector(piece.width);
        let in_registers = self.in_registers(buffer);
        if let LaneAddresses::Broken { base, stride: 1, at, then, .. } = access
            && plan::has_masked_loads(self.target)
            && !in_registers
        {
            let [before, after] = self.sides(at, piece, mask);
            let align = element_align(self, buffer);
            let [base, then] = [base, then].map(|flat| self.pointer(buffer, flat));
            let first = self.masked_load(ty, base, align, before);
            return self.m.masked_load(ty, then, align, after, first);
        }
        if let (LaneAddresses::Broken { base, stride: 0, at, then, .. }, None, false) = (access, mask, in_registers) {
            let before = self.lanes_below(at, piece.width);
            let [first, second] = [base, then].map(|flat| {
                let pointer = self.pointer(buffer, flat);
                let x = self.plain_load(buffer, element, pointer, element_align(self, buffer));
                self.m.splat(x, piece.width)
            });
            return self.m.select(before, first, second);
        }
        let vectorized = match access {
            LaneAddresses::Broken { .. } => plan::has_masked_loads(self.target),
            LaneAddresses::Uniform(_) | LaneAddresses::Strided { .. } | LaneAddresses::Irregular(_) => false,
        };
        if (mask.is_some() || vectorized) && !in_registers {
            let pointers = self.lane_pointers(buffer, access, piece);
            let mask = mask.or_else(|| self.lane_mask(piece.n, piece.width));
            let mask = mask.unwrap_or_else(|| self.m.splat(self.m.bool(true), piece.width));
            let otherwise = self.m.zero(ty);
            return self.m.masked_gather(ty, pointers, element_align(self, buffer), mask, otherwise);
        }
        let mut out = self.m.undefined(ty);
        for (lane, flat) in self.lane_positions(access, piece.n).into_iter().enumerate() {
            let x = if in_registers {
                self.read_chunk(buffer, &flat, 1, 1)
            } else {
                let pointer = self.pointer(buffer, &flat);
                let align = self.alignment(buffer, &flat);
                self.plain_load(buffer, element, pointer, align)
            };
            out = self.m.insert(out, x, lane);
        }
        out
    }

    /// Masks of the lanes before a break and from it on, each within the given mask.
    fn sides(&mut self, at: &Index, piece: VectorPiece, mask: Option<Id>) -> [Id; 2] {
        let mask = mask.or_else(|| self.lane_mask(piece.n, piece.width));
        let before = self.lanes_below(at, piece.width);
        [before, self.m.not(before)].map(|side| self.both(mask, side))
    }

    /// Mask of the lanes whose index is below a limit.
    pub(super) fn lanes_below(&mut self, limit: &Index, width: usize) -> Id {
        let fits = |bound: Option<i64>| bound.is_some_and(|b| i32::try_from(b).is_ok());
        // Narrow integers are compared in one instruction.
        let limit = if fits(self.f.ranges.lower(limit)) && fits(self.f.ranges.upper(limit)) {
            limit.clone()
        } else {
            limit.smaller(&Index::from(width as i64)).larger(&Index::from(0))
        };
        let limit = self.int(&limit);
        let limit = self.m.truncate(limit, Type::I32);
        let numbers = self.m.integers(Type::I32, (0..width).map(|lane| lane as i64));
        self.compare(false, numbers, self.m.splat(limit, width))
    }

    /// Writes the element of each lane.
    pub(super) fn write(&mut self, buffer: BufferId, index: &[Index], value: LaneOperand) {
        let access = self.access(buffer, index);
        self.f.seen.loads.remove(&buffer);
        if !self.f.matrices.in_parts.contains(&buffer) {
            // Tensor cores that read shared memory truncate operands with too many bits.
            let is_cut = self.f.matrices.all.contains(&buffer) && self.program.buffer(buffer).dtype == DType::F32;
            let value = if is_cut { LaneOperand { value: self.rounded_to_tf32(value.value), ..value } } else { value };
            return self.write_at(buffer, access, value);
        }
        let behind = self.program.buffer(buffer).n_elements().expect("it fits shared memory") as i64;
        let places = [access.clone(), access.offset(behind)];
        for (place, part) in places.into_iter().zip(self.both_parts(value.value)) {
            self.write_at(buffer, place, LaneOperand { value: part, ..value });
        }
    }

    fn write_at(&mut self, buffer: BufferId, access: LaneAddresses, value: LaneOperand) {
        match access {
            LaneAddresses::Uniform(flat) => {
                assert!(value.lanes == 0, "a store in a vectorized loop varies over the lanes");
                if self.in_registers(buffer) {
                    return self.write_chunk(buffer, &flat, value.value, 1);
                }
                self.f.n_stores += 1;
                let pointer = self.pointer(buffer, &flat);
                let align = self.alignment(buffer, &flat);
                self.m.store(value.value, pointer, align);
            }
            LaneAddresses::Strided { base, stride: 1 } => {
                let WrittenLanes { piece, mask, .. } = self.f.lanes.expect("lanes vary in a vectorized loop");
                let value = self.widen(value, piece.width);
                if self.in_registers(buffer) {
                    let value = match mask {
                        None => value,
                        Some(mask) => {
                            let old = self.read_chunk(buffer, &base, piece.n, piece.width);
                            self.m.select(mask, value, old)
                        }
                    };
                    return self.write_chunk(buffer, &base, value, piece.n);
                }
                let mask = match mask {
                    Some(mask) => Some(self.and_existing(mask, piece)),
                    None => self.lane_mask(piece.n, piece.width),
                };
                self.write_vector(buffer, &base, value, mask);
            }
            access => {
                let WrittenLanes { piece, mask, .. } = self.f.lanes.expect("lanes vary in a vectorized loop");
                let value = self.widen(value, piece.width);
                if let LaneAddresses::Broken { base, stride: 1, at, then, .. } = &access
                    && plan::has_masked_loads(self.target)
                    && !self.in_registers(buffer)
                {
                    let sides = self.sides(at, piece, mask);
                    self.f.n_stores += 2;
                    for (flat, side) in [base, then].into_iter().zip(sides) {
                        let pointer = self.pointer(buffer, flat);
                        let align = element_align(self, buffer);
                        self.m.masked_store(value, pointer, align, side);
                    }
                    return;
                }
                if let Some(mask) = mask.filter(|_| !self.in_registers(buffer)) {
                    let pointers = self.lane_pointers(buffer, &access, piece);
                    let mask = self.and_existing(mask, piece);
                    self.m.masked_scatter(value, pointers, element_align(self, buffer), mask);
                    return;
                }
                for (lane, flat) in self.lane_positions(&access, piece.n).into_iter().enumerate() {
                    let mut x = self.m.extract(value, lane);
                    if self.in_registers(buffer) {
                        if let Some(mask) = mask {
                            let old = self.read_chunk(buffer, &flat, 1, 1);
                            let takes_part = self.m.extract(mask, lane);
                            x = self.m.select(takes_part, x, old);
                        }
                        self.write_chunk(buffer, &flat, x, 1);
                    } else {
                        self.f.n_stores += 1;
                        let pointer = self.pointer(buffer, &flat);
                        let align = self.alignment(buffer, &flat);
                        self.m.store(x, pointer, align);
                    }
                }
            }
        }
    }

    /// Writes adjacent elements.
    pub(super) fn write_vector(&mut self, buffer: BufferId, base: &Index, value: Id, mask: Option<Id>) {
        self.f.n_stores += 1;
        let n_lanes = self.m.type_of(value).lanes;
        assert!(self.are_in_part(buffer, base, n_lanes), "vectors lie in parts of a matrix's rows");
        let pointer = self.pointer(buffer, base);
        let align = self.alignment(buffer, base);
        match mask {
            None => {
                self.m.store(value, pointer, align);
            }
            Some(mask) => self.m.masked_store(value, pointer, align, mask),
        }
    }

    pub(super) fn and_existing(&self, mask: Id, piece: VectorPiece) -> Id {
        match self.lane_mask(piece.n, piece.width) {
            None => mask,
            Some(existing) => self.both(Some(mask), existing),
        }
    }

    /// Clamps a position to the buffer.
    fn inside(&self, buffer: BufferId, flat: &Index) -> Index {
        let last = self.program.buffer(buffer).n_elements().unwrap_or(1).max(1) as i64 - 1;
        self.f.ranges.simplify(&flat.smaller(&Index::from(last)).larger(&Index::from(0)))
    }

    pub(super) fn cached(&mut self, buffer: BufferId, key: LoadKey, load: impl FnOnce(&mut Self) -> Id) -> Id {
        if let Some(v) = self.seen_load(buffer, &key) {
            return v;
        }
        let v = load(self);
        self.remember_load(buffer, key, v);
        v
    }

    /// Value loaded before, if it is still valid.
    pub(super) fn seen_load(&self, buffer: BufferId, key: &LoadKey) -> Option<Id> {
        self.f.seen.loads.get(&buffer)?.get(key).copied()
    }

    /// Records a loaded value for later uses.
    pub(super) fn remember_load(&mut self, buffer: BufferId, key: LoadKey, value: Id) {
        self.f.seen.loads.entry(buffer).or_default().insert(key, value);
    }

    /// Reads the first `n` of `width` adjacent elements.
    pub(super) fn neighbours(&mut self, buffer: BufferId, base: &Index, n: usize, width: usize) -> Id {
        let element = self.element_type(buffer);
        assert!(self.are_in_part(buffer, base, width), "vectors lie in parts of a matrix's rows");
        self.cached(buffer, (LaneAddresses::Strided { base: base.clone(), stride: 1 }, n), |g| {
            let pointer = g.pointer(buffer, base);
            let align = g.alignment(buffer, base);
            let ty = element.vector(width);
            match g.lane_mask(n, width) {
                None => g.plain_load(buffer, ty, pointer, align),
                Some(mask) => g.masked_load(ty, pointer, align, mask),
            }
        })
    }

    pub(super) fn plain_load(&self, buffer: BufferId, ty: Type, pointer: Id, align: u32) -> Id {
        self.m.load(ty, pointer, align, self.is_constant(buffer))
    }

    pub(super) fn masked_load(&self, ty: Type, pointer: Id, align: u32, mask: Id) -> Id {
        self.m.masked_load(ty, pointer, align, mask, self.m.zero(ty))
    }

    /// Address of each lane.
    fn lane_pointers(&mut self, buffer: BufferId, access: &LaneAddresses, piece: VectorPiece) -> Id {
        assert!(!self.f.matrices.all.contains(&buffer), "lanes do not scatter over a matrix");
        let element = self.element_type(buffer);
        let width = piece.width;
        // Machines have instructions for 32-bit offsets from one address.
        let is_short = self.program.buffer(buffer).n_elements().is_some_and(|n| n <= i32::MAX as u64);
        let ty = if is_short { Type::I32 } else { Type::I64 };
        let short = |g: &mut Self, index: &Index| {
            let x = g.int(index);
            if is_short { g.m.truncate(x, ty) } else { x }
        };
        let multiples = |g: &Self, stride: i64| g.m.integers(ty, (0..width).map(|lane| lane as i64 * stride));
        match access {
            LaneAddresses::Strided { base, stride } => {
                let pointer = self.pointer(buffer, base);
                self.m.element(element, pointer, multiples(self, *stride))
            }
            LaneAddresses::Uniform(flat) => {
                let pointer = self.pointer(buffer, flat);
                self.m.splat(pointer, width)
            }
            LaneAddresses::Broken { base, stride, at, then, .. } => {
                let pointer = self.pointer(buffer, base);
                let before = self.lanes_below(at, width);
                let jump = short(self, &then.sub(base));
                let jump = self.m.splat(jump, width);
                let steps = multiples(self, *stride);
                let steps = self.m.select(before, steps, self.m.add(steps, jump));
                self.m.element(element, pointer, steps)
            }
            LaneAddresses::Irregular(all) => {
                let mut v = self.m.undefined(ty.vector(width));
                for (lane, flat) in all.iter().enumerate() {
                    let at = short(self, flat);
                    v = self.m.insert(v, at, lane);
                }
                let base = self.pointer(buffer, &Index::from(0));
                self.m.element(element, base, v)
            }
        }
    }

    /// Position of each lane.
    pub(super) fn lane_positions(&self, access: &LaneAddresses, n: usize) -> Vec<Index> {
        let lanes = 0..n as i64;
        match access {
            LaneAddresses::Uniform(flat) => lanes.map(|_| flat.clone()).collect(),
            LaneAddresses::Strided { base, stride } => lanes.map(|lane| base.offset(stride * lane)).collect(),
            LaneAddresses::Broken { all, .. } | LaneAddresses::Irregular(all) => all.clone(),
        }
    }

    // Register chunks.

    /// Chunk that holds some adjacent elements, its slot, and the position of their start in it.
    fn chunk(&self, buffer: BufferId, flat: &Index, n: usize) -> (Chunk, Id, usize) {
        let Some(Storage::Chunks(chunks)) = self.f.storage.get(&buffer) else {
            panic!("{} is held in registers", self.program.buffer(buffer).name);
        };
        let at = flat.as_const().expect("positions in register chunks are constant");
        let (chunk, slot) = chunks[chunks.partition_point(|(c, _)| c.first <= at) - 1];
        let start = (at - chunk.first) as usize;
        assert!(start + n <= chunk.n, "a chunk contains every access that it was planned for");
        (chunk, slot, start)
    }

    /// Reads adjacent elements like [`Generator::neighbours`] from a register buffer; `None` if no chunk
    /// holds all of them.
    pub(super) fn read_neighbours(&mut self, buffer: BufferId, at: &Index, n: usize, width: usize) -> Option<Id> {
        let Some(Storage::Chunks(chunks)) = self.f.storage.get(&buffer) else { return None };
        let first = at.as_const()?;
        let (chunk, _) = chunks[chunks.partition_point(|(c, _)| c.first <= first).checked_sub(1)?];
        if first + n as i64 > chunk.first + chunk.n as i64 {
            return None;
        }
        let value = self.read_chunk(buffer, at, n, width);
        (self.m.type_of(value).lanes == width).then_some(value)
    }

    fn read_chunk(&mut self, buffer: BufferId, flat: &Index, n: usize, width: usize) -> Id {
        let (chunk, slot, start) = self.chunk(buffer, flat, n);
        let whole_width = plan::padded_width(self.target, chunk.n);
        let ty = self.element_type(buffer).vector(whole_width);
        let whole = self.m.load(ty, slot, ARGUMENT_ALIGN as u32, false);
        if n == chunk.n {
            whole
        } else if width == 1 {
            self.m.extract(whole, start)
        } else {
            let mask: Vec<Option<usize>> = (0..width).map(|lane| (lane < n).then_some(start + lane)).collect();
            self.m.shuffle(whole, whole, &mask)
        }
    }

    fn write_chunk(&mut self, buffer: BufferId, flat: &Index, value: Id, n: usize) {
        let (chunk, slot, start) = self.chunk(buffer, flat, n);
        let whole_width = plan::padded_width(self.target, chunk.n);
        let ty = self.element_type(buffer).vector(whole_width);
        let new = if n == chunk.n {
            value
        } else {
            let whole = self.m.load(ty, slot, ARGUMENT_ALIGN as u32, false);
            if n == 1 {
                self.m.insert(whole, value, start)
            } else {
                let wide: Vec<Option<usize>> = (0..whole_width).map(|lane| (lane < n).then_some(lane)).collect();
                let value = self.m.shuffle(value, value, &wide);
                let blend: Vec<Option<usize>> = (0..whole_width)
                    .map(|lane| {
                        let inside = (start..start + n).contains(&lane);
                        Some(if inside { whole_width + lane - start } else { lane })
                    })
                    .collect();
                self.m.shuffle(whole, value, &blend)
            }
        };
        self.m.store(new, slot, ARGUMENT_ALIGN as u32);
    }
}

/// Key of a load of a buffer: the lanes' positions, and their number (0 for a scalar).
pub type LoadKey = (LaneAddresses, usize);

/// Increment of an index from lane to lane within a row, if it is constant. Rows end where `x`, which
/// increases by one per lane, reaches a multiple of `d`; `row` receives both.
fn slope(index: &Index, lane: LoopId, row: &mut Option<(Index, i64)>) -> Option<i64> {
    index.terms().iter().try_fold(0, |sum, (atom, c)| {
        let of_atom = match atom {
            Atom::Var(v) => i64::from(*v == lane),
            Atom::FloorDiv(x, d) | Atom::Mod(x, d) => match slope(x, lane, row)? {
                0 => 0,
                1 if *d > 0 && !x.sub(&Index::from(lane)).uses(lane) => {
                    let d = *d;
                    *row = Some(match row.take() {
                        None => (x.as_ref().clone(), d),
                        Some((y, e)) if y == **x && (d % e == 0 || e % d == 0) => (y, d.min(e)),
                        Some(_) => return None,
                    });
                    i64::from(matches!(atom, Atom::Mod(..)))
                }
                _ => return None,
            },
            Atom::Min(a, b) | Atom::Max(a, b) if !a.uses(lane) && !b.uses(lane) => 0,
            Atom::Min(..) | Atom::Max(..) => return None,
        };
        Some(sum + c * of_atom)
    })
}

fn element_align(g: &Generator<'_>, buffer: BufferId) -> u32 {
    g.program.buffer(buffer).dtype.bytes() as u32
}
