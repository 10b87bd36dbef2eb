//! Strided loads as contiguous loads and shuffles, the dual of [`super::interleave`].
//!
//! In a vectorized loop over `k`, the loads `T[S·k + 0]`, …, `T[S·k + S−1]` of adjacent statements read the
//! same memory. They are generated together before the first statement, either from vectors that cover the
//! range (short strides) or by transposing one row per lane (long strides, and register buffers that hold a
//! row in a chunk).
//!
//! Only the range between the first and the last element that the statements read is accessed.

use std::collections::BTreeSet;

use tilewright_ir::expr::Expr;
use tilewright_ir::{Atom, BufferId, DType, Index, LoopId, Stmt};

use super::Generator;
use super::memory::LaneAddresses;
use super::plan::VectorPiece;
use crate::ssa::{Id, Type};

/// Largest stride for which every vector of a range holds enough lanes to be worth extracting them, if fewer
/// than `MIN_TRANSPOSED` loads share the vectors.
const MAX_PICKED_STRIDE: i64 = 4;

/// Minimum number of loads whose rows are transposed, which needs fewer shuffles per load.
const MIN_TRANSPOSED: usize = 4;

/// Number of statements after the first whose loads are generated with it.
const MAX_AHEAD: usize = 64;

/// Loads with the same buffer and stride: the lowest first element, and the distance of each load from it.
struct LoadGroup {
    lowest: Index,
    offsets: Vec<i64>,
}

impl Generator<'_> {
    /// Generates the strided loads of the first statement of a block, and those of later statements that
    /// share memory with them.
    pub(super) fn strided_loads(&mut self, block: &[Stmt]) {
        let Some(lanes) = self.f.lanes.filter(|l| l.mask.is_none() && l.piece.n > 1) else {
            return;
        };
        let mut wanted = Vec::new();
        for_each_sure_read(&block[0], &mut |buffer, index| wanted.push((buffer, index.to_vec())));
        for (buffer, index) in wanted {
            let is_float = matches!(self.program.buffer(buffer).dtype, DType::F32 | DType::F64);
            if !is_float || !self.may_stride(buffer, &index, lanes.var) {
                continue;
            }
            let access = self.access(buffer, &index);
            let key = (access, lanes.piece.n);
            if self.seen_load(buffer, &key).is_some() {
                continue;
            }
            let LaneAddresses::Strided { base, stride: stride @ 2.. } = key.0 else {
                continue;
            };
            let group = self.strided_group(buffer, &base, stride, lanes.piece, block);
            let Some(columns) = self.deinterleave(buffer, &group, stride, lanes.piece) else {
                continue;
            };
            for (offset, value) in group.offsets.iter().zip(columns) {
                let base = group.lowest.offset(*offset);
                self.remember_load(buffer, (LaneAddresses::Strided { base, stride }, lanes.piece.n), value);
            }
        }
    }

    /// Whether lanes may have a stride larger than one; a quick check without positions, which excludes most
    /// loads.
    fn may_stride(&self, buffer: BufferId, index: &[Index], lane: LoopId) -> bool {
        let (mut lanes_stride, mut stride) = (0i64, 1i64);
        for (i, extent) in index.iter().zip(&self.program.buffer(buffer).shape).rev() {
            for (atom, c) in i.terms() {
                match atom {
                    Atom::Var(v) if *v == lane => lanes_stride = lanes_stride.wrapping_add(c.wrapping_mul(stride)),
                    Atom::Var(_) => {}
                    compound if compound.uses(lane) => return true,
                    _ => {}
                }
            }
            stride = stride.wrapping_mul(*extent);
        }
        lanes_stride >= 2
    }

    /// Gathers the loads within less than a stride and at most a vector of the load at `base`, up to a write
    /// of the buffer.
    fn strided_group(
        &self,
        buffer: BufferId,
        base: &Index,
        stride: i64,
        piece: VectorPiece,
        block: &[Stmt],
    ) -> LoadGroup {
        let mut offsets = BTreeSet::from([0]);
        for stmt in block.iter().take(MAX_AHEAD) {
            for_each_sure_read(stmt, &mut |b, index| {
                if b != buffer {
                    return;
                }
                if let LaneAddresses::Strided { base: at, stride: s } = self.access(b, index)
                    && s == stride
                    && let Some(offset) = at.sub(base).as_const()
                {
                    offsets.insert(offset);
                }
            });
            if !matches!(stmt, Stmt::Store { .. } | Stmt::Update { .. })
                || stmt.own_write().is_some_and(|(b, _)| b == buffer)
            {
                break;
            }
        }
        let span = stride.min(piece.width as i64);
        let mut window: Vec<i64> = Vec::new();
        for offset in offsets {
            if window.first().is_some_and(|first| offset >= first + span) {
                if window.contains(&0) {
                    break;
                }
                window.clear();
            }
            window.push(offset);
        }
        let lowest = window[0];
        LoadGroup { lowest: base.offset(lowest), offsets: window.iter().map(|o| o - lowest).collect() }
    }

    /// Generates the vector of each load of a group; `None` if scalar loads are better.
    fn deinterleave(
        &mut self,
        buffer: BufferId,
        group: &LoadGroup,
        stride: i64,
        piece: VectorPiece,
    ) -> Option<Vec<Id>> {
        let n_columns = group.offsets.last().expect("a group has a load") + 1;
        if !self.in_registers(buffer) && stride <= MAX_PICKED_STRIDE && group.offsets.len() < MIN_TRANSPOSED {
            return Some(self.picked(buffer, group, stride, piece));
        }
        if group.offsets.len() < 2 || n_columns.unsigned_abs().next_power_of_two() > 2 * group.offsets.len() as u64 {
            return None;
        }
        let rows: Option<Vec<Id>> = (0..piece.n as i64)
            .map(|lane| {
                let at = group.lowest.offset(lane * stride);
                // After its last element, a row may read the first elements of another row.
                let readable = n_columns + (piece.n as i64 - 1 - lane) * stride;
                self.row(buffer, &at, n_columns as usize, readable as usize)
            })
            .collect();
        let columns = self.transpose(rows?, piece.width);
        Some(group.offsets.iter().map(|o| columns[*o as usize]).collect())
    }

    /// Extracts every `stride`-th element from each offset on from vectors that cover all of them.
    fn picked(&mut self, buffer: BufferId, group: &LoadGroup, stride: i64, piece: VectorPiece) -> Vec<Id> {
        let last_offset = group.offsets.last().expect("a group has a load");
        let (width, last) = (piece.width, (piece.n - 1) * stride as usize);
        // More than the width, as more than half of the lanes exist, at least two elements apart.
        let n_elements = last + *last_offset as usize + 1;
        let sources: Vec<(usize, Id)> = (0..n_elements.div_ceil(width))
            .map(|v| {
                // The last vector starts earlier, so that it does not end beyond the last element.
                let start = (v * width).min(n_elements - width);
                (start, self.neighbours(buffer, &group.lowest.offset(start as i64), width, width))
            })
            .collect();
        let values: Vec<Id> = sources.iter().map(|(_, value)| *value).collect();
        group
            .offsets
            .iter()
            .map(|offset| {
                let picks: Vec<Option<(usize, usize)>> = (0..width)
                    .map(|lane| {
                        let at = *offset as usize + lane * stride as usize;
                        (lane < piece.n).then(|| (at / width, at - sources[at / width].0))
                    })
                    .collect();
                self.pick(&values, &picks)
            })
            .collect()
    }

    /// Loads at least `n` adjacent elements, of which `readable` exist, in a vector whose number of lanes is
    /// a power of two.
    fn row(&mut self, buffer: BufferId, at: &Index, n: usize, readable: usize) -> Option<Id> {
        let width = n.next_power_of_two();
        if self.in_registers(buffer) {
            return self.read_neighbours(buffer, at, n, width);
        }
        Some(self.neighbours(buffer, at, if readable >= width { width } else { n }, width))
    }

    /// Transposes a matrix of which each row is a vector, into vectors of `width` lanes.
    ///
    /// Each step exchanges one bit of the vector's index (initially the row) with one bit of the lane's index
    /// (the column), with two shuffles per pair of vectors (Eklundh, "A fast computer method for matrix
    /// transposing", 1972). The order of bits is chosen so that each shuffle is one instruction on x86.
    fn transpose(&mut self, mut rows: Vec<Id>, width: usize) -> Vec<Id> {
        let ty = self.m.type_of(rows[0]);
        let n_columns = ty.lanes;
        let element = ty.element();
        rows.resize(width, self.m.undefined(ty));
        // Full vectors, formed from rows at a distance of the number of columns.
        let mut parts: Vec<Vec<Id>> =
            (0..n_columns).map(|v| rows.iter().copied().skip(v).step_by(n_columns).collect()).collect();
        let mut joined = n_columns;
        while joined < width {
            let both: Vec<Option<usize>> = (0..2 * joined).map(Some).collect();
            for part in &mut parts {
                *part = part.chunks(2).map(|pair| self.m.shuffle(pair[0], pair[1], &both)).collect();
            }
            joined *= 2;
        }
        let mut vectors: Vec<Id> = parts.into_iter().map(|part| part[0]).collect();

        let n_bits = n_columns.ilog2() as usize;
        // Unpack instructions operate within 128 bits.
        let unpacked = if element == Type::F32 { 2 } else { 1 };
        let bits = width * if element == Type::F32 { 32 } else { 64 };
        // Bit of the column that becomes each bit of the vector's index.
        let mut columns: Vec<usize> = (0..n_bits).collect();
        let mut bit = 0;
        while bit < n_bits {
            let pair = bit + 1 < n_bits;
            let below = |e: usize, at: usize| e >> at & 1;
            let with = |e: usize, at: usize, to: usize| e & !(1 << at) | to << at;
            if bit == 0 && unpacked == 2 && pair {
                // Unpack: the new bit moves to the bottom, the old lower one up, the old upper one out.
                self.exchange(&mut vectors, 0, |e, half| (below(e, 0), with(with(e, 0, below(e, 1)), 1, half)));
                self.exchange(&mut vectors, 1, |e, half| (below(e, 1), with(e, 1, half)));
                columns.swap(0, 1);
                bit = 2;
            } else if bit == unpacked && pair && bit + 2 == n_bits && bits == 512 {
                // Selection of two quarters of each: the new bit moves to the top, the old upper one down,
                // the old lower one out.
                for step in [bit, bit + 1] {
                    self.exchange(&mut vectors, step, |e, half| {
                        (below(e, bit + 1), with(with(e, bit + 1, below(e, bit)), bit, half))
                    });
                }
                bit += 2;
            } else {
                self.exchange(&mut vectors, bit, |e, half| (below(e, bit), with(e, bit, half)));
                bit += 1;
            }
        }
        let number = |column: usize| columns.iter().enumerate().map(|(v, c)| (column >> c & 1) << v).sum::<usize>();
        (0..n_columns).map(|column| vectors[number(column)]).collect()
    }

    /// Shuffles each pair of vectors whose indices differ in a bit: `source(lane, half)` returns the vector
    /// of the pair and the lane that become a lane of the lower or upper result.
    fn exchange(&mut self, vectors: &mut [Id], bit: usize, source: impl Fn(usize, usize) -> (usize, usize)) {
        let width = self.m.type_of(vectors[0]).lanes;
        for low in (0..vectors.len()).filter(|v| v >> bit & 1 == 0) {
            let high = low | 1 << bit;
            let [new_low, new_high] = [0, 1].map(|half| {
                let mask: Vec<Option<usize>> = (0..width)
                    .map(|e| {
                        let (which, lane) = source(e, half);
                        Some(which * width + lane)
                    })
                    .collect();
                self.m.shuffle(vectors[low], vectors[high], &mask)
            });
            (vectors[low], vectors[high]) = (new_low, new_high);
        }
    }

    /// Builds a vector from lanes of others, each given by the vector and the lane.
    pub(super) fn pick(&mut self, from: &[Id], picks: &[Option<(usize, usize)>]) -> Id {
        let used: BTreeSet<usize> = picks.iter().flatten().map(|(which, _)| *which).collect();
        let mut used = used.into_iter();
        let first = used.next().expect("a lane is picked");
        let second = used.next();
        let width = self.m.type_of(from[first]).lanes;
        let mask: Vec<Option<usize>> = picks
            .iter()
            .map(|pick| match *pick {
                Some((which, lane)) if which == first => Some(lane),
                Some((which, lane)) if Some(which) == second => Some(width + lane),
                _ => None,
            })
            .collect();
        let mut out = self.m.shuffle(from[first], from[second.unwrap_or(first)], &mask);
        let mut done = vec![Some(first), second];
        for next in used {
            let mask: Vec<Option<usize>> = picks
                .iter()
                .enumerate()
                .map(|(lane, pick)| match *pick {
                    Some((which, from)) if which == next => Some(width + from),
                    Some((which, _)) if done.contains(&Some(which)) => Some(lane),
                    _ => None,
                })
                .collect();
            out = self.m.shuffle(out, from[next], &mask);
            done.push(Some(next));
        }
        out
    }
}

/// Calls `visit` for the elements that a statement reads unconditionally.
fn for_each_sure_read(stmt: &Stmt, visit: &mut dyn FnMut(BufferId, &[Index])) {
    fn walk(e: &Expr, visit: &mut dyn FnMut(BufferId, &[Index])) {
        match e {
            Expr::Const(_) | Expr::FromIndex(_) | Expr::Select(..) | Expr::Gather(..) => {}
            Expr::Load(buffer, index) => visit(*buffer, index),
            Expr::Unary(_, x) | Expr::Cast(_, x) => walk(x, visit),
            Expr::Binary(_, a, b) => {
                walk(a, visit);
                walk(b, visit);
            }
        }
    }
    match stmt {
        Stmt::Store { value, .. } | Stmt::Update { value, .. } => walk(value, visit),
        Stmt::For(_) | Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {}
    }
}
