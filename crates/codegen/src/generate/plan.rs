//! Decisions before code generation: vectorization of loops, temporaries in registers, and the layout of
//! scratch memory.

use std::collections::{BTreeMap, BTreeSet};

use tilewright_ir::expr::{Cond, Expr, Subscript, TreePart};
use tilewright_ir::index::Ranges;
use tilewright_ir::target::{Arch, Target};
use tilewright_ir::{
    BufferId, DType, Index, Loop, LoopId, LoopKind, OpenSize, Part, Program, Role, Scope, Stmt, TensorProduct,
};

use crate::CompileError;
use crate::map::Map;

/// Alignment of scratch buffers in bytes.
pub const SCRATCH_ALIGN: u64 = 128;

/// Maximum size of a register buffer on the stack if it does not fit registers; larger ones are in the
/// scratch memory.
const MAX_STACK_BYTES: u64 = 16 << 10;

/// Maximum number of lanes; vectorized loops of more lanes run serially, as their code would repeat the same
/// vector operation.
const MAX_LANES: i64 = 4096;

/// Known values of loop variables, in unrolled code.
pub type KnownIndices = Map<LoopId, i64>;

/// Open (dynamic) sizes that a part of a program uses, with their positions among all.
pub fn used_sizes(program: &Program, part: Part) -> Vec<(usize, &OpenSize)> {
    if program.sizes.is_empty() {
        return Vec::new();
    }
    let (_, vars) = captures(program.part(part));
    program.sizes.iter().enumerate().filter(|(_, size)| vars.contains(&size.var)).collect()
}

/// Substitutes known loop variables in `index`.
pub fn resolve(index: &Index, known: &KnownIndices) -> Index {
    if known.is_empty() {
        return index.clone();
    }
    index.with_values(&|v| known.get(&v).copied())
}

/// Offset of an element in its buffer, in elements, with known loop variables substituted.
pub fn flat(program: &Program, buffer: BufferId, index: &[Index], known: &KnownIndices) -> Index {
    let (mut sum, mut stride) = (Index::from(0), 1i64);
    for (i, extent) in index.iter().zip(&program.buffer(buffer).shape).rev() {
        sum = sum.add_scaled(&resolve(i, known), stride);
        stride = stride.wrapping_mul(*extent);
    }
    sum
}

/// Consecutive lanes of a vectorized loop that form one vector value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorPiece {
    /// First lane.
    pub first: i64,
    /// Number of lanes.
    pub n: usize,
    /// Lanes of the vector type; those beyond `n` are masked off.
    pub width: usize,
}

/// Vectorization of a loop.
#[derive(Clone, Debug, PartialEq)]
pub enum Vectors {
    /// Vectors of constant lengths.
    Pieces(Vec<VectorPiece>),
    /// Vectors masked at run time against the extent.
    Masked(Vec<VectorPiece>),
    /// Scalar code, lane by lane.
    Serial,
}

/// Whether masked loads and stores cost as much as unmasked ones.
pub fn has_masks(target: &Target) -> bool {
    target.arch == Arch::X86_64 && target.vector_bits >= 512
}

/// Whether one instruction can load or store a part of a vector.
pub fn has_masked_loads(target: &Target) -> bool {
    target.arch == Arch::X86_64 && target.vector_bits >= 256
}

/// Vector width for `n` lanes: the next power of two, with masking, if that is cheap.
pub fn padded_width(target: &Target, n: usize) -> usize {
    if has_masks(target) { n.next_power_of_two() } else { n }
}

fn pieces(target: &Target, native: i64, n_lanes: i64) -> Vec<VectorPiece> {
    let mut out = Vec::new();
    let mut first = 0;
    while first < n_lanes {
        let left = n_lanes - first;
        let n = if left >= native {
            native
        } else if has_masks(target) {
            left
        } else {
            1 << left.ilog2()
        };
        out.push(VectorPiece { first, n: n as usize, width: padded_width(target, n as usize) });
        first += n;
    }
    out
}

/// Decides how a vectorized loop is executed; lane by lane on a target without vectors.
pub fn vectors(program: &Program, target: &Target, l: &Loop, extent: &Index, ranges: &Ranges) -> Vectors {
    let mut element_bytes = 0;
    if target.vector_bits == 0
        || !l.body.iter().all(|s| is_vectorizable(program, s, l.var, &mut element_bytes))
        || element_bytes == 0
    {
        return Vectors::Serial;
    }
    let native = (i64::from(target.vector_bits / 8) / element_bytes as i64).max(1);
    match extent.as_const() {
        Some(n) if n <= MAX_LANES => {
            let n_bytes = if looks_up_bytes(program, target, l) { i64::from(target.vector_bits / 8) } else { native };
            let in_bytes = n - n % n_bytes;
            let mut all = pieces(target, n_bytes, in_bytes);
            let rest = pieces(target, native, n - in_bytes);
            all.extend(rest.into_iter().map(|piece| VectorPiece { first: piece.first + in_bytes, ..piece }));
            Vectors::Pieces(all)
        }
        Some(_) => Vectors::Serial,
        None if has_masks(target) => match ranges.upper(extent) {
            Some(n) if n <= 8 * native => {
                let mut all = pieces(target, native, n);
                for piece in &mut all {
                    piece.width = piece.width.max(2);
                    piece.n = piece.width;
                }
                Vectors::Masked(all)
            }
            _ => Vectors::Serial,
        },
        None => Vectors::Serial,
    }
}

/// Whether a target picks bytes from a table of 256 that registers hold.
pub fn has_byte_tables(target: &Target) -> bool {
    target.gpu.is_none() && target.vector_bits >= 512 && target.feature("avx512vbmi") == Some(true)
}

/// Whether a loop only replaces adjacent bytes by those of a table of 256, which works on vectors of bytes.
fn looks_up_bytes(program: &Program, target: &Target, l: &Loop) -> bool {
    let is_adjacent = |index: &[Index]| {
        let Some((last, outer)) = index.split_last() else { return false };
        let rest = last.sub(&Index::from(l.var));
        !rest.uses(l.var) && !outer.iter().any(|i| i.uses(l.var))
    };
    let is_bytes = |buffer: &BufferId| program.buffer(*buffer).dtype == DType::U8;
    let looks_up = |stmt: &Stmt| {
        let Stmt::Store { buffer, index, value: Expr::Gather(table, at) } = stmt else { return false };
        let [Subscript::Value(byte)] = &at[..] else { return false };
        let Expr::Load(bytes, from) = &**byte else { return false };
        let is_table = program.buffer(*table).shape == [256] && program.buffer(*table).scope == Scope::Global;
        is_table && [buffer, table, bytes].into_iter().all(is_bytes) && is_adjacent(index) && is_adjacent(from)
    };
    has_byte_tables(target) && l.body.iter().all(looks_up)
}

fn is_vectorizable(program: &Program, stmt: &Stmt, lane: LoopId, element_bytes: &mut u64) -> bool {
    match stmt {
        Stmt::Store { index, .. } | Stmt::Update { index, .. } => {
            stmt.for_each_own_buffer(&mut |buffer| {
                let dtype = program.buffer(buffer).dtype;
                let bytes = if dtype.is_half() { dtype.bytes() } else { dtype.arithmetic().bytes() };
                *element_bytes = (*element_bytes).max(bytes);
            });
            index.iter().any(|i| i.uses(lane))
        }
        Stmt::Prefetch { .. } => true,
        Stmt::If { then, otherwise, .. } => {
            then.iter().chain(otherwise).all(|s| is_vectorizable(program, s, lane, element_bytes))
        }
        Stmt::For(_) | Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => false,
    }
}

/// Elements of a register buffer that form one SSA value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First element.
    pub first: i64,
    /// Number of elements.
    pub n: usize,
}

/// Storage of a temporary.
#[derive(Clone, Debug, PartialEq)]
pub enum TemporaryMemory {
    /// SSA values (registers), each of adjacent elements, sorted.
    Chunks(Vec<Chunk>),
    /// Stack frame of the function that allocates it.
    Stack,
    /// Scratch memory. A temporary has both offsets if versions of the same code allocate it outside and
    /// inside a parallel loop: a tail of one iteration is no loop.
    Scratch {
        /// Offset in bytes from the start, for code outside parallel loops.
        shared: Option<u64>,
        /// Offset in bytes from the start of a thread's slice, for code inside a parallel loop.
        per_thread: Option<u64>,
    },
}

/// Layout of a program's scratch memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchLayout {
    /// Size in bytes of the shared part, before the first thread's slice.
    pub shared_bytes: u64,
    /// Size in bytes of each thread's slice.
    pub per_thread_bytes: u64,
}

impl ScratchLayout {
    /// Total size in bytes for `n_threads` threads.
    pub fn bytes(&self, n_threads: usize) -> u64 {
        self.shared_bytes + self.per_thread_bytes * n_threads as u64
    }
}

/// Storage of every temporary of a program.
#[derive(Clone, Debug, Default)]
pub struct MemoryPlan {
    /// Storage by temporary.
    pub places: Map<BufferId, TemporaryMemory>,
    /// Layout of the scratch memory.
    pub scratch: ScratchLayout,
    /// bf16 copies that only dot products of pairs read, which flush subnormal numbers to zero.
    pub pairs: BTreeSet<BufferId>,
}

/// Decides the storage of a program's temporaries.
pub fn plan(program: &Program, target: &Target) -> Result<MemoryPlan, CompileError> {
    if let Arch::Gpu(_) = target.arch {
        return Err(CompileError::NotCpu { target: target.name() });
    }
    let mut plan = MemoryPlan { pairs: read_by_pairs(program, target), ..MemoryPlan::default() };
    for block in program.parts() {
        let mut walk = PlanWalk::new(program, target);
        walk.block(block);
        let PlanWalk { accesses, allocated, .. } = walk;
        let mut layout = ScratchLayout::default();
        for (buffer, allocated) in allocated {
            let b = program.buffer(buffer);
            let bytes = b.size_bytes().ok_or_else(|| CompileError::TooLarge { buffer: b.name.clone() })?;
            let place = match b.scope {
                Scope::Register => register_place(accesses.get(&buffer), bytes),
                Scope::Global
                | Scope::Local
                | Scope::Shared
                | Scope::Async
                | Scope::Bulk
                | Scope::Produced
                | Scope::Multicast => None,
            };
            let take = |end: &mut u64| {
                let offset = *end;
                *end += bytes.next_multiple_of(SCRATCH_ALIGN);
                offset
            };
            let place = place.unwrap_or_else(|| TemporaryMemory::Scratch {
                shared: allocated.outside.then(|| take(&mut layout.shared_bytes)),
                per_thread: allocated.in_parallel.then(|| take(&mut layout.per_thread_bytes)),
            });
            plan.places.insert(buffer, place);
        }
        plan.scratch.shared_bytes = plan.scratch.shared_bytes.max(layout.shared_bytes);
        plan.scratch.per_thread_bytes = plan.scratch.per_thread_bytes.max(layout.per_thread_bytes);
    }
    Ok(plan)
}

/// Finds the bf16 copies that only dot products of pairs read, if the target has instructions for these.
fn read_by_pairs(program: &Program, target: &Target) -> BTreeSet<BufferId> {
    fn read(block: &[Stmt], in_pairs: bool, pairs: &mut BTreeSet<BufferId>, others: &mut BTreeSet<BufferId>) {
        for stmt in block {
            let to = if in_pairs { &mut *pairs } else { &mut *others };
            stmt.for_each_own_read(&mut |buffer, _| to.extend([buffer]));
            let in_pairs = in_pairs || matches!(stmt, Stmt::For(l) if l.kind == LoopKind::Tensor(TensorProduct::Dot2));
            stmt.blocks().for_each(|block| read(block, in_pairs, pairs, others));
        }
    }
    if target.dot2_lanes() == 0 {
        return BTreeSet::new();
    }
    let (mut pairs, mut others) = (BTreeSet::new(), BTreeSet::new());
    program.parts().into_iter().for_each(|block| read(block, false, &mut pairs, &mut others));
    pairs.retain(|buffer| {
        let b = program.buffer(*buffer);
        b.dtype == DType::Bf16 && matches!(b.role, Role::Temporary | Role::Kept) && !others.contains(buffer)
    });
    pairs
}

/// Decides the storage of a GPU thread's private temporaries.
pub fn kernel(program: &Program, body: &[Stmt], target: &Target) -> Result<MemoryPlan, CompileError> {
    let mut walk = PlanWalk::new(program, target);
    walk.block(body);
    let mut plan = MemoryPlan::default();
    for buffer in walk.allocated.into_keys().filter(|b| !program.buffer(*b).scope.is_shared()) {
        let b = program.buffer(buffer);
        let bytes = b.size_bytes().ok_or_else(|| CompileError::TooLarge { buffer: b.name.clone() })?;
        let place = register_place(walk.accesses.get(&buffer), bytes).unwrap_or(TemporaryMemory::Stack);
        plan.places.insert(buffer, place);
    }
    Ok(plan)
}

/// Chooses registers, else the stack if the buffer is small.
fn register_place(accesses: Option<&Accesses>, bytes: u64) -> Option<TemporaryMemory> {
    match accesses {
        None => Some(TemporaryMemory::Chunks(Vec::new())),
        Some(Accesses::Constant(all)) => match chunks(all) {
            Some(chunks) => Some(TemporaryMemory::Chunks(chunks)),
            None => (bytes <= MAX_STACK_BYTES).then_some(TemporaryMemory::Stack),
        },
        Some(Accesses::Varying) => (bytes <= MAX_STACK_BYTES).then_some(TemporaryMemory::Stack),
    }
}

/// Disjoint chunks that contain every access, each the size of one of the accesses; `None` if accesses
/// overlap partially.
fn chunks(accesses: &BTreeSet<(i64, usize)>) -> Option<Vec<Chunk>> {
    let mut out: Vec<Chunk> = Vec::new();
    for &(first, n) in accesses {
        let end = first + n as i64;
        match out.last_mut() {
            Some(last) if first < last.first + last.n as i64 => {
                if first == last.first && n > last.n {
                    last.n = n;
                } else if end > last.first + last.n as i64 {
                    return None;
                }
            }
            _ => out.push(Chunk { first, n }),
        }
    }
    Some(out)
}

/// Accesses to a register buffer.
enum Accesses {
    /// Known positions: first element and number of elements.
    Constant(BTreeSet<(i64, usize)>),
    /// Positions known only at run time, or accesses from the threads of a parallel loop inside the
    /// temporary's lifetime.
    Varying,
}

struct PlanWalk<'p> {
    program: &'p Program,
    target: &'p Target,
    known: KnownIndices,
    lane: Option<(LoopId, Vectors)>,
    ranges: Ranges,
    n_parallel: usize,
    accesses: Map<BufferId, Accesses>,
    allocated: BTreeMap<BufferId, Allocations>,
}

/// Kinds of places where versions of a program's code allocate a temporary.
#[derive(Clone, Copy, Default)]
struct Allocations {
    /// Outside parallel loops.
    outside: bool,
    /// Inside a parallel loop.
    in_parallel: bool,
    /// Whether the last one so far is inside a parallel loop.
    last_in_parallel: bool,
}

impl<'p> PlanWalk<'p> {
    fn new(program: &'p Program, target: &'p Target) -> PlanWalk<'p> {
        PlanWalk {
            program,
            target,
            known: KnownIndices::default(),
            lane: None,
            ranges: program.ranges(),
            n_parallel: 0,
            accesses: Map::default(),
            allocated: BTreeMap::new(),
        }
    }

    fn block(&mut self, block: &[Stmt]) {
        for stmt in block {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::For(l) => self.enter(l),
            Stmt::If { cond, then, otherwise } => {
                cond.for_each_load(&mut |b, i| self.access(b, i));
                self.block(then);
                self.block(otherwise);
            }
            Stmt::Alloc(buffer) => {
                let all = self.allocated.entry(*buffer).or_default();
                all.last_in_parallel = self.n_parallel > 0;
                all.in_parallel |= all.last_in_parallel;
                all.outside |= !all.last_in_parallel;
            }
            Stmt::Store { .. } | Stmt::Update { .. } => {
                stmt.for_each_own_read(&mut |b, i| self.access(b, i));
                if let Some((b, i)) = stmt.own_write() {
                    self.access(b, i);
                }
            }
            Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {}
        }
    }

    fn enter(&mut self, l: &Loop) {
        let extent = self.ranges.simplify(&resolve(&l.extent, &self.known));
        match (l.kind, extent.as_const()) {
            (_, Some(n)) if n <= 0 => {}
            (LoopKind::Unrolled | LoopKind::Tensor(TensorProduct::Tma), Some(n)) => {
                for i in 0..n {
                    self.known.insert(l.var, i);
                    self.block(&l.body);
                }
                self.known.remove(&l.var);
            }
            (LoopKind::Serial | LoopKind::Vectorized, Some(1)) => {
                self.known.insert(l.var, 0);
                self.block(&l.body);
                self.known.remove(&l.var);
            }
            (kind, _) => {
                let vectors = match kind {
                    LoopKind::Vectorized => vectors(self.program, self.target, l, &extent, &self.ranges),
                    _ => Vectors::Serial,
                };
                self.ranges.push(l.var, extent);
                self.n_parallel += usize::from(kind == LoopKind::Parallel);
                match vectors {
                    Vectors::Pieces(_) | Vectors::Masked(_) => {
                        self.lane = Some((l.var, vectors));
                        self.block(&l.body);
                        self.lane = None;
                    }
                    Vectors::Serial => self.block(&l.body),
                }
                self.n_parallel -= usize::from(kind == LoopKind::Parallel);
                self.ranges.pop();
            }
        }
    }

    fn access(&mut self, buffer: BufferId, index: &[Index]) {
        let b = self.program.buffer(buffer);
        // A GPU thread keeps all its private buffers in registers, if possible.
        let is_private = b.scope == Scope::Register || b.scope == Scope::Local && self.target.gpu.is_some();
        if !is_private || b.role != Role::Temporary {
            return;
        }
        let at_home = self.allocated.get(&buffer).is_some_and(|all| all.last_in_parallel == (self.n_parallel > 0));
        let flat = flat(self.program, buffer, index, &self.known);
        let mut here = Vec::new();
        match (&self.lane, flat.as_const()) {
            (_, Some(at)) => here.push((at, 1)),
            (Some((var, vectors)), None) => {
                let stride = flat.coefficient(*var);
                let rest = flat.sub(&Index::from(*var).scale(stride));
                match (rest.as_const(), stride, vectors) {
                    (Some(at), 1, Vectors::Pieces(pieces) | Vectors::Masked(pieces)) => {
                        here.extend(pieces.iter().map(|p| (at + p.first, p.n)));
                    }
                    (Some(at), _, Vectors::Pieces(pieces)) => {
                        let lanes = pieces.iter().flat_map(|p| p.first..p.first + p.n as i64);
                        here.extend(lanes.map(|lane| (at + stride * lane, 1)));
                    }
                    // Lanes masked off at run time may be outside the buffer.
                    (Some(_), _, Vectors::Masked(_) | Vectors::Serial) | (None, ..) => {}
                }
            }
            (None, None) => {}
        }
        let all = self.accesses.entry(buffer).or_insert_with(|| Accesses::Constant(BTreeSet::new()));
        match all {
            Accesses::Constant(known) if at_home && !here.is_empty() => known.extend(here),
            _ => *all = Accesses::Varying,
        }
    }
}

/// Free variables of a block: the buffers that it uses, and the loop variables of enclosing loops.
pub fn captures(block: &[Stmt]) -> (BTreeSet<BufferId>, BTreeSet<LoopId>) {
    let (mut buffers, mut vars, mut own) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for stmt in block {
        stmt.walk(&mut |s| {
            if let Stmt::For(inner) = s {
                own.insert(inner.var);
            }
            s.for_each_own_index(&mut |i| i.for_each_var(&mut |v| vars.extend([v])));
        });
    }
    used_buffers(block, &mut buffers);
    vars.retain(|v| !own.contains(v));
    (buffers, vars)
}

/// Whether a block allocates a temporary.
pub fn allocates(block: &[Stmt], buffer: BufferId) -> bool {
    let mut found = false;
    block.iter().for_each(|stmt| stmt.walk(&mut |s| found |= matches!(s, Stmt::Alloc(b) if *b == buffer)));
    found
}

/// Collects the buffers that a block reads, writes, prefetches or allocates.
pub fn used_buffers(block: &[Stmt], buffers: &mut BTreeSet<BufferId>) {
    for stmt in block {
        stmt.walk(&mut |s| {
            s.for_each_own_buffer(&mut |b| buffers.extend([b]));
            match s {
                Stmt::Alloc(b) | Stmt::Prefetch { buffer: b, .. } => buffers.extend([*b]),
                Stmt::For(_)
                | Stmt::If { .. }
                | Stmt::Store { .. }
                | Stmt::Update { .. }
                | Stmt::Barrier
                | Stmt::Wait(_) => {}
            }
        });
    }
}

/// Buffers that a block writes.
pub fn written_buffers(block: &[Stmt]) -> BTreeSet<BufferId> {
    let mut out = BTreeSet::new();
    for stmt in block {
        stmt.walk(&mut |s| {
            if let Some((b, _)) = s.own_write() {
                out.insert(b);
            }
        });
    }
    out
}

/// Whether every load of an expression is in bounds regardless of conditions, so that it can be executed
/// speculatively.
pub fn is_safe(program: &Program, ranges: &Ranges, known: &KnownIndices, e: &Expr) -> bool {
    let mut safe = true;
    let mut check = |b: BufferId, index: &[Index], last: i64| {
        safe = safe && {
            let flat = flat(program, b, index, known);
            ranges.lower(&flat).is_some_and(|l| l >= 0) && ranges.upper(&flat).is_some_and(|u| u <= last)
        };
    };
    TreePart::Expr(e).walk(&mut |node| match node {
        TreePart::Expr(Expr::Load(b, index)) => {
            check(*b, index, program.buffer(*b).n_elements().unwrap_or(0) as i64 - 1);
        }
        // Data-dependent subscripts are clamped to their dimensions.
        TreePart::Expr(Expr::Gather(b, subscripts)) => {
            let index: Vec<Index> = subscripts.iter().map(Subscript::known).collect();
            let mut last = 0;
            let buffer = program.buffer(*b);
            for ((subscript, extent), stride) in subscripts.iter().zip(&buffer.shape).zip(buffer.strides()) {
                last += if matches!(subscript, Subscript::Index(_)) { (extent - 1) * stride } else { 0 };
            }
            check(*b, &index, last);
        }
        TreePart::Expr(_) | TreePart::Cond(_) => {}
    });
    safe
}

/// Whether a condition is the same for all lanes.
pub fn is_uniform(cond: &Cond, lane: Option<LoopId>) -> bool {
    lane.is_none_or(|lane| !cond.uses(lane))
}

/// Whether a condition may diverge within a warp with these thread variables.
pub fn parts(cond: &Cond, warp: [LoopId; 2]) -> bool {
    let mut is_of_values = false;
    TreePart::Cond(cond).walk(&mut |node| is_of_values |= matches!(node, TreePart::Cond(Cond::Less(..))));
    is_of_values || warp.iter().any(|var| cond.uses(*var))
}
