//! Strided stores of adjacent statements that together fill memory without gaps, as interleaved vector
//! stores.
//!
//! In a vectorized loop over `k`, the stores `P[S·k + 0] = a`, …, `P[S·k + S−1] = z` become `S` vector stores
//! of shuffled values instead of `S` stores per lane.

use std::collections::BTreeSet;

use tilewright_ir::dot::is_factor;
use tilewright_ir::{BufferId, DType, Expr, Index, Stmt};

use super::Generator;
use super::memory::LaneAddresses;
use super::plan::{self, VectorPiece};
use super::value::LaneOperand;
use crate::CompileError;
use crate::ssa::{Id, SsaOp, Type};

/// Smallest odd factor for which a number of rows is padded to the next power of two for transposition, with
/// the rest masked off.
const MIN_PADDED: usize = 7;

/// Largest stride; larger groups are stored lane by lane.
const MAX_STRIDE: i64 = 64;

impl Generator<'_> {
    /// Generates the group of stores at the beginning of a block, and returns its number of statements; 0 if
    /// there is no such group.
    pub(super) fn interleaved_stores(&mut self, block: &[Stmt]) -> Result<usize, CompileError> {
        let (Some(lanes), Some(Stmt::Store { buffer, index, .. })) = (self.f.lanes, block.first()) else {
            return Ok(0);
        };
        let dtype = self.program.buffer(*buffer).dtype;
        let is_moved = is_factor(dtype) || self.is_upper_half(dtype);
        let is_computed_so = matches!(dtype, DType::F32 | DType::F64);
        if lanes.mask.is_some() || self.in_registers(*buffer) || self.f.matrices.in_parts.contains(buffer) {
            return Ok(0);
        }
        if !is_computed_so && !is_moved {
            return Ok(0);
        }
        let LaneAddresses::Strided { base, stride } = self.access(*buffer, index) else {
            return Ok(0);
        };
        let n = stride as usize;
        if !(2..=MAX_STRIDE).contains(&stride) || block.len() < n {
            return Ok(0);
        }
        let Some(group) = self.group(*buffer, &base, stride, &block[..n]) else {
            return Ok(0);
        };
        let (width, n_lanes) = (lanes.piece.width, lanes.piece.n);
        if n.is_multiple_of(2) && self.is_upper_half(dtype) {
            self.store_pairs(*buffer, &group, &block[..n], lanes.piece);
            return Ok(n);
        }
        let mut rows = vec![None; n];
        for (stmt, offset) in block.iter().zip(&group.offsets) {
            if let Stmt::Store { value, .. } = stmt {
                let value = match value {
                    // Integers are moved without widening.
                    Expr::Load(from, at) if is_moved && self.program.buffer(*from).dtype == dtype => {
                        self.load(*from, at)
                    }
                    _ if is_moved => return Ok(0),
                    value => self.eval(value, dtype),
                };
                rows[*offset] = Some(self.widen(value, width));
            }
        }
        let mut rows: Vec<Id> = rows.into_iter().map(|v| v.expect("the offsets cover the group")).collect();
        self.f.seen.loads.remove(buffer);
        if plan::has_masks(self.target) && n >> n.trailing_zeros() >= MIN_PADDED {
            let nothing = self.m.undefined(self.m.type_of(rows[0]));
            rows.resize(n.next_power_of_two(), nothing);
            self.store_groups(*buffer, &group.start, &rows, n, lanes.piece);
            return Ok(n);
        }
        let mut left = n * n_lanes;
        for (at, value) in self.interleave(&rows, width).into_iter().enumerate() {
            let here = left.min(width);
            if here > 0 {
                let mask = self.lane_mask(here, width);
                self.write_vector(*buffer, &group.start.offset((at * width) as i64), value, mask);
            }
            left -= here;
        }
        Ok(n)
    }

    /// Stores rows of bf16 numbers; two of them form a row of 32-bit words.
    fn store_pairs(&mut self, buffer: BufferId, group: &StoreGroup, block: &[Stmt], piece: VectorPiece) {
        let mut halves = vec![None; block.len()];
        for (stmt, offset) in block.iter().zip(&group.offsets) {
            let Stmt::Store { value, .. } = stmt else { continue };
            let word = match self.is_move(value, DType::Bf16) {
                true => {
                    let x = self.eval(value, DType::Bf16);
                    LaneOperand { value: self.m.extend(x.value, Type::I32.vector(x.lanes.max(1)), false), ..x }
                }
                false => {
                    let x = self.eval(value, DType::F32);
                    let bits = match self.serves_pairs(buffer, x.value) {
                        true => self.m.extend(self.m.nearest_bf16(x.value), Type::I32.vector(x.lanes), false),
                        false => self.bits_of_bf16(x.value),
                    };
                    LaneOperand { value: bits, ..x }
                }
            };
            halves[*offset] = Some(self.widen(word, piece.width));
        }
        let halves: Vec<Id> = halves.into_iter().map(|v| v.expect("the offsets cover the group")).collect();
        let up = self.m.splat(self.m.int32(16), piece.width);
        let pair = |pair: &[Id]| self.m.binary(SsaOp::Or, pair[0], self.m.binary(SsaOp::ShiftLeft, pair[1], up));
        let words: Vec<Id> = halves.chunks(2).map(pair).collect();
        self.f.seen.loads.remove(&buffer);
        let mut left = words.len() * piece.n;
        for (at, value) in self.interleave(&words, piece.width).into_iter().enumerate() {
            let here = left.min(piece.width);
            if here > 0 {
                let mask = self.lane_mask(here, piece.width);
                self.write_vector(buffer, &group.start.offset((2 * at * piece.width) as i64), value, mask);
            }
            left -= here;
        }
    }

    /// Stores the first `n` rows, lane after lane.
    fn store_groups(&mut self, buffer: BufferId, start: &Index, rows: &[Id], n: usize, piece: VectorPiece) {
        let (group, width) = (rows.len(), piece.width);
        let all = self.interleave(rows, width);
        for lane in 0..piece.n {
            let mut done = 0;
            while done < n {
                let at = lane * group + done;
                let here = (n - done).min(width - at % width);
                let part = group.min(width);
                let mut value = all[at / width];
                if part < width {
                    let mask: Vec<Option<usize>> = (0..part).map(|e| Some(at % width + e)).collect();
                    value = self.m.shuffle(value, value, &mask);
                }
                let mask = self.lane_mask(here, part);
                self.write_vector(buffer, &start.offset((lane * n + done) as i64), value, mask);
                done += here;
            }
        }
    }

    /// Checks that the statements are stores of one group, and finds its start.
    fn group(&self, buffer: BufferId, base: &Index, stride: i64, block: &[Stmt]) -> Option<StoreGroup> {
        let mut relative = Vec::new();
        for stmt in block {
            let Stmt::Store { buffer: b, index, value } = stmt else { return None };
            let LaneAddresses::Strided { base: at, stride: s } = self.access(buffer, index) else { return None };
            let mut reads_itself = false;
            value.for_each_load(&mut |b, _| reads_itself |= b == buffer);
            if *b != buffer || s != stride || reads_itself {
                return None;
            }
            relative.push(at.sub(base).as_const()?);
        }
        let least = *relative.iter().min()?;
        let distinct: BTreeSet<i64> = relative.iter().copied().collect();
        let complete = distinct.len() as i64 == stride && distinct.last() == Some(&(least + stride - 1));
        complete.then(|| StoreGroup {
            start: base.offset(least),
            offsets: relative.iter().map(|r| (r - least) as usize).collect(),
        })
    }

    /// Interleaves rows: `out[k·S + s] = rows[s][k]`, split into vectors of the width of the rows.
    fn interleave(&mut self, rows: &[Id], width: usize) -> Vec<Id> {
        match rows.len() {
            1 => rows.to_vec(),
            n if n % 2 == 0 => {
                let half = |odd: usize| -> Vec<Id> { rows.iter().copied().skip(odd).step_by(2).collect() };
                let (even, odd) = (self.interleave(&half(0), width), self.interleave(&half(1), width));
                let low: Vec<Option<usize>> = (0..width).map(|e| Some(e / 2 + e % 2 * width)).collect();
                let high: Vec<Option<usize>> = (width..2 * width).map(|e| Some(e / 2 + e % 2 * width)).collect();
                even.into_iter()
                    .zip(odd)
                    .flat_map(|(a, b)| [self.m.shuffle(a, b, &low), self.m.shuffle(a, b, &high)])
                    .collect()
            }
            n => (0..n)
                .map(|at| {
                    let picks: Vec<Option<(usize, usize)>> =
                        (at * width..(at + 1) * width).map(|e| Some((e % n, e / n))).collect();
                    self.pick(rows, &picks)
                })
                .collect(),
        }
    }
}

/// Stores that together fill a range of a buffer.
struct StoreGroup {
    /// First element of the range.
    start: Index,
    /// Position of each store's first lane from the start.
    offsets: Vec<usize>,
}
