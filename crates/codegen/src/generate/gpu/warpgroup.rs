//! Warpgroup products in the tensor cores of NVIDIA GPUs from sm_90a on (`wgmma`).
//!
//! Operands are read from shared memory. An instruction takes a descriptor of each: its address, the distance
//! between groups of eight rows, and the 128-byte swizzle. If threads load operand A, it takes four registers
//! instead, with the layout of `mma.sync`: thread `(x, y)` has the steps `x` and `x + 4` of both of its rows.
//! Products are asynchronous; the threads wait for consecutive products together or, in a loop, for those of
//! the previous iteration.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7, sections 9.7.15.5, "Asynchronous
//! wgmma.mma_async instructions", and 9.7.15.5.1.2, "Shared Memory Matrix Layout".

use tilewright_ir::gpu::GroupProduct;
use tilewright_ir::gpu::tensor::WARP;
use tilewright_ir::gpu::warpgroup::{ROW_BYTES, RowFactor, SWIZZLED_BYTES, SharedMatrix, WarpgroupFactors};
use tilewright_ir::{BufferId, Index, Loop, LoopId, LoopKind, Stmt, TensorProduct};

use crate::CompileError;
use crate::generate::memory::PART_BYTES;
use crate::generate::value::LaneOperand;
use crate::generate::{Generator, plan};
use crate::ssa::{Id, SsaOp, Type};

/// Logarithm of the unit of a matrix descriptor, 16 bytes.
const UNIT_BITS: i64 = 4;
/// Mask of the bits of a shared memory address that a matrix descriptor contains.
const OF_BLOCK: i64 = (1 << 18) - 1;
/// First bit of the distance between groups of eight rows in a matrix descriptor.
const STRIDE_AT: i64 = 32;
/// First bit of the distance between a step's rows of 128 bytes in a matrix descriptor; ignored for K-major
/// operands, which have 1.
const ACROSS_AT: i64 = 16;
/// Flag of the 128-byte swizzle in a matrix descriptor.
const SWIZZLED: i64 = 1 << 62;

/// Sums of a product: a buffer, and the subscripts of each.
type Sums = (BufferId, Vec<Vec<Index>>);
/// Index of a product's set, its loop over steps, and its operands.
type SetAndFactors = (usize, LoopId, WarpgroupFactors);

impl Generator<'_> {
    /// Generates the warpgroup products at the beginning of a block, and the copies that follow, which are
    /// issued before threads wait for the products; returns the number of statements.
    pub(in crate::generate) fn group_products(&mut self, block: &[Stmt]) -> Result<usize, CompileError> {
        let Some(Stmt::For(Loop { kind: LoopKind::Tensor(how), .. })) = block.first() else { return Ok(0) };
        if !self.target.has_wgmma() || !how.is_of_groups() {
            return Ok(0);
        }
        let (sets, products) = self.sets_of_products(block, *how);
        // A tensor core truncates the product to the precision of the sum instead of rounding it. In 3xTF32,
        // products therefore start from zero, and the sum is rounded outside.
        let begins_anew = *how == TensorProduct::Wgmmax3;
        let undefined = self.m.undefined(Type::F32);
        let mut sums: Vec<Vec<Id>> = Vec::new();
        for (buffer, places) in &sets {
            let of = |place: &Vec<Index>| if begins_anew { undefined } else { self.load(*buffer, place).value };
            sums.push(places.iter().map(of).collect());
        }
        // Registers that products read are written before the fence.
        let loaded: Vec<Option<[Id; 4]>> =
            products.iter().map(|(_, steps, factors)| self.loaded_rows(*steps, &factors.rows)).collect();
        self.on_all(&mut sums, |g, sums| g.m.group_fence(sums));
        // Parts to multiply, smallest products first.
        let parts: &[[bool; 2]] =
            if begins_anew { &[[true, false], [false, true], [false, false]] } else { &[[false; 2]] };
        let mut is_begun = vec![!begins_anew; sets.len()];
        for are_rest in parts {
            for ((at, _, factors), loaded) in products.iter().zip(&loaded) {
                let WarpgroupFactors { rows, columns } = factors;
                let kind = self.element_type(columns.buffer).kind;
                let (rows, rows_across) = match (rows, loaded) {
                    (RowFactor::Shared(rows), _) => (vec![self.description(rows, are_rest[0])], rows.across.is_some()),
                    (RowFactor::Loaded(..), loaded) => (loaded.iter().flatten().copied().collect(), false),
                };
                let across = [rows_across, columns.across.is_some()];
                let columns = self.description(columns, are_rest[1]);
                let begins = !std::mem::replace(&mut is_begun[*at], true);
                let more = self.m.group_product(kind, &rows, columns, across, &sums[*at], begins);
                sums[*at] = (0..sums[*at].len()).map(|lane| self.m.extract(more, lane)).collect();
            }
        }
        self.m.group_end();
        let copies = block[products.len()..].iter().take_while(|stmt| self.are_copies(stmt));
        let n = products.len() + copies.count();
        for stmt in &block[products.len()..n] {
            self.stmt(stmt)?;
        }
        let left = u8::from(self.f.goes_on);
        self.on_all(&mut sums, |g, sums| g.m.group_wait(left, sums));
        for ((buffer, places), values) in sets.iter().zip(sums) {
            for (place, mut value) in places.iter().zip(values) {
                if begins_anew {
                    let before = self.load(*buffer, place).value;
                    value = self.m.binary(SsaOp::FAdd, before, value);
                }
                self.write(*buffer, place, LaneOperand::scalar(value));
            }
        }
        Ok(n)
    }

    /// Collects the warpgroup products at the beginning of a block, in order: the sums of each set, and the
    /// set and operands of each product.
    fn sets_of_products(&mut self, block: &[Stmt], how: TensorProduct) -> (Vec<Sums>, Vec<SetAndFactors>) {
        let (mut sets, mut products): (Vec<Sums>, Vec<SetAndFactors>) = (Vec::new(), Vec::new());
        for stmt in block {
            let Stmt::For(l) = stmt else { break };
            if l.kind != LoopKind::Tensor(how) {
                break;
            }
            let product = GroupProduct::of(self.program, l, how).expect("the loop is a product of groups of warps");
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
            let factors = product.factors(self.program, groups, &self.f.ranges, &position);
            self.f.ranges.pop();
            products.push((at, l.var, factors.expect("tensor cores can read the factors")));
        }
        (sets, products)
    }

    /// Loads the factors of a thread's two rows into registers, for a product whose operand A threads load.
    fn loaded_rows(&mut self, steps: LoopId, rows: &RowFactor) -> Option<[Id; 4]> {
        let RowFactor::Loaded(buffer, rows) = rows else { return None };
        let [x, _] = self.f.warp.expect("threads were mapped to warps");
        Some([0, 1, 2, 3].map(|at| {
            let (row, half) = (&rows[at % 2], at as i64 / 2);
            let step = Index::from(x).offset(half * WARP[0]);
            let element = self.f.ranges.simplify(&row.substitute(steps, &step));
            let number = self.element_at(*buffer, &element);
            self.m.bitcast(number, Type::I32)
        }))
    }

    /// Sums and sets of the products in a loop that begins with a wait for copies.
    fn sets_in(&mut self, l: &Loop) -> (Vec<Sums>, Vec<SetAndFactors>) {
        self.f.ranges.push(l.var, l.extent.clone());
        let found = self.sets_of_products(&l.body[2..], TensorProduct::Wgmma);
        self.f.ranges.pop();
        found
    }

    /// Whether the products of an iteration may stay pending while the next iteration issues its own: the
    /// loop only waits for copies, multiplies, and issues copies, by one thread, to stages that neither this
    /// iteration nor the previous one reads. (After its wait for the copies, and the barrier there, all
    /// threads have waited for the products of the iteration before the previous one.)
    pub(in crate::generate) fn may_go_on(&mut self, l: &Loop) -> bool {
        let [Stmt::Wait(_), Stmt::Barrier, body @ ..] = l.body.as_slice() else { return false };
        let is_product =
            |stmt: &&Stmt| matches!(stmt, Stmt::For(Loop { kind: LoopKind::Tensor(TensorProduct::Wgmma), .. }));
        let n = body.iter().take_while(is_product).count();
        if n == 0 || self.f.tma.is_none() || !self.multiplies() {
            return false;
        }
        // The next iteration overwrites registers that pending products may still read.
        let found = self.sets_in(l).1;
        if found.len() != n || found.iter().any(|(_, _, factors)| factors.are_rows_loaded()) {
            return false;
        }
        let (products, copies) = body.split_at(n);
        // Distance of an access's stage from that of the iteration.
        let ahead = |buffer: BufferId, index: &[Index]| {
            let b = self.program.buffer(buffer);
            let stages = b.shape[0];
            let of = |i: i64| Some((index[0].substitute(l.var, &i.into()).as_const()? - i).rem_euclid(stages));
            let first = of(0)?;
            (self.is_for_boxes(buffer) && (1..stages).all(|i| of(i) == Some(first))).then_some((first, stages))
        };
        let mut are = copies.iter().all(|stmt| self.are_copies(stmt));
        for stmt in products {
            stmt.walk(&mut |s| {
                s.for_each_own_read(&mut |b, index| {
                    let is_factor = self.f.matrices.all.contains(&b);
                    are &= !is_factor || ahead(b, index).is_some_and(|(place, _)| place == 0);
                });
            });
        }
        for stmt in copies {
            stmt.walk(&mut |s| {
                if let Some((b, index)) = s.own_write() {
                    are &= ahead(b, index).is_some_and(|(place, stages)| (1..stages - 1).contains(&place));
                }
            });
        }
        are
    }

    /// Generates such a loop, after which threads wait for the products of its last iteration.
    pub(in crate::generate) fn products_that_go_on(&mut self, l: &Loop, extent: &Index) -> Result<(), CompileError> {
        self.f.goes_on = true;
        self.serial_loop(l, extent)?;
        self.f.goes_on = false;
        let (all, _) = self.sets_in(l);
        let mut sums: Vec<Vec<Id>> = Vec::new();
        for (buffer, places) in &all {
            sums.push(places.iter().map(|place| self.load(*buffer, place).value).collect());
        }
        self.on_all(&mut sums, |g, sums| g.m.group_wait(0, sums));
        self.release_what_went_on();
        for ((buffer, places), values) in all.iter().zip(sums) {
            for (place, value) in places.iter().zip(values) {
                self.write(*buffer, place, LaneOperand::scalar(value));
            }
        }
        Ok(())
    }

    /// Whether a statement only issues asynchronous copies, whose destinations no pending product reads.
    pub(in crate::generate) fn are_copies(&self, stmt: &Stmt) -> bool {
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

    /// Applies an instruction to all sums at once.
    fn on_all(&mut self, sums: &mut [Vec<Id>], write: impl FnOnce(&Self, &[Id]) -> Id) {
        let all = write(self, &sums.concat());
        let lanes = sums.iter_mut().flatten();
        lanes.enumerate().for_each(|(lane, sum)| *sum = self.m.extract(all, lane));
    }

    /// Generates the descriptor of an operand or, for `is_rest`, of its low parts.
    fn description(&mut self, matrix: &SharedMatrix, is_rest: bool) -> Id {
        let b = self.program.buffer(matrix.buffer);
        let bytes = b.dtype.bytes() as i64;
        let behind = b.n_elements().filter(|_| is_rest).unwrap_or(0) as i64;
        let constant = matrix.first.constant() + behind;
        let first = self.plain_pointer(matrix.buffer, &matrix.first.offset(-matrix.first.constant()));
        let mut address = self.m.address(first);
        if self.f.tma.as_ref().is_some_and(|boxes| boxes.cluster.is_some()) {
            // Higher bits distinguish the blocks of a cluster.
            address = self.m.binary(SsaOp::And, address, self.m.int(OF_BLOCK));
        }
        let units = self.m.binary(SsaOp::ShiftUnsigned, address, self.m.int(UNIT_BITS));
        let units_of = |elements: i64| (elements * bytes) >> UNIT_BITS;
        let across = matrix.across.map_or(1, units_of);
        let others = units_of(constant) + (across << ACROSS_AT) + (units_of(matrix.stride) << STRIDE_AT) + SWIZZLED;
        self.m.binary(SsaOp::AddWrapping, units, self.m.int(others))
    }

    /// Address of an element of a matrix with swizzled rows: part `n` of row `r` is stored at part `n ^ r`.
    pub(in crate::generate) fn swizzled_pointer(&mut self, buffer: BufferId, flat: &Index) -> Id {
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
                    let number = m.binary(SsaOp::ShiftUnsigned, at, m.int(i64::from((row / part).trailing_zeros())));
                    let number = m.binary(SsaOp::And, number, m.int(eight_rows / row * part - part));
                    m.element(element, first, m.binary(SsaOp::Xor, at, number))
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

    /// Whether adjacent elements of one access lie in the same part of a row, if rows are swizzled.
    pub(in crate::generate) fn are_in_part(&self, buffer: BufferId, flat: &Index, n: usize) -> bool {
        let bytes = n * self.element_type(buffer).kind.bytes();
        !self.f.matrices.all.contains(&buffer)
            || bytes <= PART_BYTES as usize && self.alignment(buffer, flat) as usize >= bytes
    }
}
