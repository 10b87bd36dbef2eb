//! Products of tiles that four warps compute together in the tensor cores of NVIDIA's GPUs from sm_90a on.
//!
//! Both factors are read from shared memory. An instruction takes a description of each: where it begins, how
//! far it is from eight rows to the next eight, and that rows of 128 bytes are swizzled. It goes on while the
//! threads do something else; here they wait for the products of one place in the program together.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, sections 9.7.15.5, "Asynchronous
//! wgmma.mma_async instructions", and 9.7.15.5.1.2, "Shared Memory Matrix Layout".

use tilewright_ir::gpu::GroupProduct;
use tilewright_ir::gpu::warpgroup::{Matrix, ROW_BYTES, SWIZZLED_BYTES};
use tilewright_ir::{BufferId, Index, LoopKind, Stmt, Tensor};

use super::value::Operand;
use super::{Generator, plan};
use crate::CompileError;
use crate::ssa::{Id, Op};

/// Bytes of the parts of a row that are swizzled.
pub const PART_BYTES: i64 = 16;
/// In a description: bytes are counted in sixteens.
const UNIT_BITS: i64 = 4;
/// Where the distance from eight rows to the next stands.
const STRIDE_AT: i64 = 32;
/// Where the distance stands from what a step has in a row to what it has in the next one; where rows lie
/// along the sum it says nothing, and is 1.
const ACROSS_AT: i64 = 16;
/// Rows of 128 bytes are swizzled.
const SWIZZLED: i64 = 1 << 62;

/// The sums of a product: a buffer, and where in it each is.
type Sums = (BufferId, Vec<Vec<Index>>);

impl Generator<'_> {
    /// Writes the products of groups of warps that a block begins with, and the copies that follow, which are
    /// begun before threads wait for the products; gives the number of statements.
    pub(super) fn group_products(&mut self, block: &[Stmt]) -> Result<usize, CompileError> {
        if !self.target.has_wgmma() {
            return Ok(0);
        }
        let mut sets: Vec<Sums> = Vec::new();
        let mut products = Vec::new();
        for stmt in block {
            let Stmt::For(l) = stmt else { break };
            if l.kind != LoopKind::Tensor(Tensor::Wgmma) {
                break;
            }
            let product = GroupProduct::of(self.program, l).expect("the loop is a product of groups of warps");
            let places = product.tiles.iter().flat_map(|tile| tile.sums.1.iter().cloned()).collect();
            let set: Sums = (product.tiles[0].sums.0, places);
            let at = match sets.iter().position(|known| *known == set) {
                Some(at) => at,
                None if sets.iter().any(|known| known.0 == set.0 && known.1.iter().any(|at| set.1.contains(at))) => {
                    break;
                }
                None => {
                    sets.push(set);
                    sets.len() - 1
                }
            };
            self.f.ranges.push(l.var, l.extent.clone());
            let groups = self.f.groups.expect("threads were mapped to groups of warps");
            let position = |buffer: BufferId, index: &[Index]| plan::flat(self.program, buffer, index, &self.f.known);
            let matrices = product.matrices(self.program, groups, &self.f.ranges, &position);
            self.f.ranges.pop();
            let kind = self.element_type(product.tiles[0].rows.0).kind;
            products.push((at, kind, matrices.expect("tensor cores can read the factors")));
        }
        if products.is_empty() {
            return Ok(0);
        }
        let mut sums = Vec::new();
        for (buffer, places) in &sets {
            let of: Vec<Id> = places.iter().map(|place| self.load(*buffer, place).value).collect();
            sums.push(of);
        }
        self.on_all(&mut sums, |g, sums| g.m.group_fence(sums));
        for (at, kind, matrices) in &products {
            let described = matrices.each_ref().map(|matrix| (self.description(matrix), matrix.across.is_some()));
            let more = self.m.group_product(*kind, described, &sums[*at]);
            sums[*at] = (0..sums[*at].len()).map(|lane| self.m.extract(more, lane)).collect();
        }
        self.m.group_end();
        let copies = block[products.len()..].iter().take_while(|stmt| self.are_copies(stmt));
        let n = products.len() + copies.count();
        for stmt in &block[products.len()..n] {
            self.stmt(stmt)?;
        }
        self.on_all(&mut sums, |g, sums| g.m.group_wait(sums));
        for ((buffer, places), values) in sets.iter().zip(sums) {
            for (place, value) in places.iter().zip(values) {
                self.write(*buffer, place, Operand::scalar(value));
            }
        }
        Ok(n)
    }

    /// Whether a statement only begins copies that are on their way: they go to what no product reads.
    fn are_copies(&self, stmt: &Stmt) -> bool {
        let mut are = true;
        stmt.walk(&mut |s| {
            are &= match s {
                Stmt::For(_) | Stmt::If { .. } => true,
                Stmt::Store { buffer, .. } => self.program.buffer(*buffer).scope.is_on_its_way(),
                Stmt::Alloc(_) | Stmt::Update { .. } | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => false,
            };
            s.for_each_own_read(&mut |b, _| are &= self.is_constant(b));
        });
        are
    }

    /// Does something to all sums at once.
    fn on_all(&mut self, sums: &mut [Vec<Id>], write: impl FnOnce(&Self, &[Id]) -> Id) {
        let all = write(self, &sums.concat());
        let lanes = sums.iter_mut().flatten();
        lanes.enumerate().for_each(|(lane, sum)| *sum = self.m.extract(all, lane));
    }

    /// What an instruction takes for a factor.
    fn description(&mut self, matrix: &Matrix) -> Id {
        let bytes = self.program.buffer(matrix.buffer).dtype.bytes() as i64;
        let constant = matrix.first.constant();
        let first = self.plain_pointer(matrix.buffer, &matrix.first.offset(-constant));
        let units = self.m.binary(Op::ShiftUnsigned, self.m.address(first), self.m.int(UNIT_BITS));
        let units_of = |elements: i64| (elements * bytes) >> UNIT_BITS;
        let across = matrix.across.map_or(1, units_of);
        let others = units_of(constant) + (across << ACROSS_AT) + (units_of(matrix.stride) << STRIDE_AT) + SWIZZLED;
        self.m.binary(Op::AddWrapping, units, self.m.int(others))
    }

    /// The address of an element of a matrix, whose rows are swizzled: of the parts of row `r` the part `n`
    /// is in the place of the part `n ^ r`.
    pub(super) fn swizzled_pointer(&mut self, buffer: BufferId, flat: &Index) -> Id {
        let element = self.element_type(buffer);
        let [row, part] = [ROW_BYTES, PART_BYTES].map(|bytes| bytes / element.kind.bytes() as i64);
        let eight_rows = SWIZZLED_BYTES / element.kind.bytes() as i64;
        let (far, near) = flat.multiples(eight_rows);
        let depth = self.depth(&near);
        let key = (buffer, near);
        let base = match self.f.levels[depth].swizzled.get(&key) {
            Some(known) => *known,
            None => {
                let (at, first) = (self.int(&key.1), self.plain_pointer(buffer, &Index::from(0)));
                let base = self.hoisted(depth, |g| {
                    let m = &g.m;
                    let number = m.binary(Op::ShiftUnsigned, at, m.int(i64::from((row / part).trailing_zeros())));
                    let number = m.binary(Op::And, number, m.int(eight_rows / row * part - part));
                    m.element(element, first, m.binary(Op::Xor, at, number))
                });
                self.f.levels[depth].swizzled.insert(key, base);
                base
            }
        };
        let far = far.scale(eight_rows);
        let constant = far.constant();
        let varying = far.offset(-constant);
        let base = match varying.as_const() {
            Some(_) => base,
            None => {
                let offset = self.int(&varying);
                self.m.element(element, base, offset)
            }
        };
        if constant == 0 { base } else { self.m.element(element, base, self.m.int(constant)) }
    }

    /// Whether neighbours that are accessed at once are in one part of a row, where rows are swizzled.
    pub(super) fn are_in_part(&self, buffer: BufferId, flat: &Index, n: usize) -> bool {
        let bytes = n * self.element_type(buffer).kind.bytes();
        !self.f.matrices.contains(&buffer)
            || bytes <= PART_BYTES as usize && self.alignment(buffer, flat) as usize >= bytes
    }
}
