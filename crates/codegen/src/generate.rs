//! Translation of a program to functions in static single assignment form: loops and statements.
//!
//! Each part of the program becomes an exported function that unpacks its arguments and calls an internal
//! function whose parameters are the buffers, so that they can be declared as non-overlapping where a back
//! end expects it.
//!
//! A serial loop is a block with a phi for its variable, a phi for each pointer that advances with it, and
//! its body, with the test at the end. Integers and pointers that depend on outer loops only are computed in
//! those loops (see [`LoopLevel`]), so loop bodies are generated with invariants hoisted and
//! strength-reduced.

mod address;
pub mod cpu;
mod deinterleave;
mod dot;
mod export;
mod ffi;
pub mod gpu;
mod half_precision;
mod interleave;
mod math;
mod memory;
mod operand;
pub mod plan;
mod range;
mod saturate;
mod table;
pub mod unit;
mod value;

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use tilewright_ir::gpu::SHARED_ALIGN;
use tilewright_ir::gpu::warpgroup::{Groups, Matrices};
use tilewright_ir::index::Ranges;
use tilewright_ir::target::Target;
use tilewright_ir::{
    BufferId, DType, Index, Loop, LoopId, LoopKind, OpenSize, Part, Program, Role, Scope, Stmt, TensorProduct,
};

use crate::CompileError;
use crate::align::{ARGUMENT_ALIGN, ArgumentAlign};
use crate::map::Map;
use crate::ssa::build::Builder;
use crate::ssa::{BlockId, Compare, Cpu, FunctionId, Id, Linkage, Module, SsaOp, Type, UnaliasedMemory};
use dot::DotSteps;
use export::{ExportChecks, ExportedFunction};
use memory::LoadKey;
use plan::{Chunk, KnownIndices, MemoryPlan, TemporaryMemory, VectorPiece, Vectors};
use unit::{CodeSegment, ProgramUnits, Units};

/// Number of stores to memory after which a basic block ends at the next statement boundary.
///
/// LLVM selects instructions block by block and compares each store with the previous ones. Packing a row of
/// 128 channels without loops takes a second to compile as one block and a tenth of that in short blocks; the
/// code is equally fast.
const MOST_STORES: usize = 8;

/// Storage of a buffer in a function.
#[derive(Clone)]
pub(super) enum Storage {
    /// Pointer to the first element.
    Pointer(Id),
    /// Values in registers, each in a variable.
    Chunks(Vec<(Chunk, Id)>),
}

/// Loop being generated, or the function itself; code hoisted out of inner loops goes to the start of
/// `header`.
pub(super) struct LoopLevel {
    pub header: BlockId,
    /// Predecessor of the loop and the loop's variable; `None` for the function itself.
    pub entered: Option<(BlockId, LoopId)>,
    /// Pointers that advance by a constant number of elements per iteration (induction variables).
    pub steps: Vec<(Id, Type, i64)>,
    pub ints: Map<Index, Id>,
    pub pointers: Map<(BufferId, Index), Id>,
    /// Pointers into operands with swizzled rows.
    pub swizzled: Map<(BufferId, Index), Id>,
    /// Elements of inputs by which lanes are divided, at positions in memory, and their reciprocals.
    pub reciprocals: Map<(BufferId, i64), [Id; 2]>,
}

/// Values already computed in this block or in a dominating one.
#[derive(Clone, Default)]
pub(super) struct ComputedValues {
    pub loads: Map<BufferId, Map<LoadKey, Id>>,
    pub splats: Map<(Id, usize), Id>,
    /// Tensor core operands already converted, by their source values.
    pub parts: Map<Id, gpu::tensor::FactorParts>,
    /// Register chunks updated in the current reduction step.
    pub updated: BTreeSet<(BufferId, i64)>,
    /// Pointers hidden from alias analysis, in a reduction step whose loads must not be merged with those of
    /// the previous step.
    pub fresh: Option<Map<Id, Id>>,
}

/// Lanes of the code being generated.
#[derive(Clone, Copy)]
pub(super) struct WrittenLanes {
    pub var: LoopId,
    pub piece: VectorPiece,
    /// Mask of the active lanes; `None` if all are active.
    pub mask: Option<Id>,
    /// Whether masked-off lanes may be out of bounds.
    pub guarded: bool,
}

/// State of the function being generated.
pub(super) struct FunctionBuilder {
    /// Function being generated; `None` before the first.
    pub id: FunctionId,
    /// Function, then the serial loops around the insertion point, outermost first.
    pub levels: Vec<LoopLevel>,
    /// Loop variables, each with the level that computes it.
    pub vars: Map<LoopId, (Id, usize)>,
    pub known: KnownIndices,
    pub storage: Map<BufferId, Storage>,
    pub ranges: Ranges,
    pub seen: ComputedValues,
    pub lanes: Option<WrittenLanes>,
    /// Number of stores to memory since the start of the current block.
    pub n_stores: usize,
    /// Thread loops of a warp along x and y, in a kernel with tile products.
    pub warp: Option<[LoopId; 2]>,
    /// Whether control flow at the insertion point may diverge within a warp.
    pub is_parted: bool,
    /// Warpgroups of the block, in a kernel with warpgroup products.
    pub groups: Option<Groups>,
    /// Operands in swizzled shared memory of warpgroup products.
    pub matrices: Matrices,
    /// Whether warpgroup products stay pending while the next iteration issues more.
    pub goes_on: bool,
    /// Whether threads issue asynchronous copies (`cp.async`).
    pub has_copies: bool,
    /// State of bulk copies, in a kernel that has them.
    pub tma: Option<gpu::bulk::TmaState>,
    /// Role of the thread, in a kernel with a producer warp.
    pub pipeline_role: Option<gpu::producer_warp::PipelineRole>,
    /// Index of the thread's warp in the block, in a kernel whose consumer teams alternate.
    pub warp_of_block: Option<Id>,
    /// Staging boxes of bulk stores, in a kernel that has them.
    pub stores: Option<gpu::store::Stores>,
    /// Dot product steps around the insertion point.
    pub dot: Option<DotSteps>,
    /// Whether this is a unit, which contains no further units.
    pub is_unit: bool,
    /// Scratch memory and runtime; `None` inside a parallel loop.
    outside: Option<(Id, Id)>,
}

/// Generator of a program's module.
pub(super) struct Generator<'p> {
    pub m: Builder,
    pub program: &'p Program,
    pub target: &'p Target,
    pub plan: &'p MemoryPlan,
    /// Kept buffers that the part being generated fills.
    filled: BTreeSet<BufferId>,
    pub f: FunctionBuilder,
    /// Units of earlier programs.
    pub units: &'p Units,
    /// Units that this program uses or defines.
    pub uses: ProgramUnits,
    /// Hash of the target, part of the names of its units.
    pub target_hash: u64,
    /// Prefix of function names, for exported ones.
    pub prefix: Option<&'p str>,
    arguments: ArgumentAlign,
    n_outlined: usize,
}

/// Symbol of a part's function, unless it is exported.
pub fn symbol(part: Part) -> &'static str {
    match part {
        Part::Prepare => "tilewright_prepare",
        Part::Body => "tilewright_run",
        Part::Finish => "tilewright_finish",
    }
}

/// Number of parameters of a part's function: buffers, scratch memory, the runtime, and open sizes if it uses
/// any.
pub(super) fn entry_parameters(sizes: &[(usize, &OpenSize)]) -> usize {
    if sizes.is_empty() { 3 } else { 4 }
}

/// Options of code generation.
#[derive(Clone, Copy, Default)]
pub struct GenerateOptions<'p> {
    /// Prefix of function names, for exported ones.
    pub prefix: Option<&'p str>,
    /// Alignment of arguments.
    pub arguments: ArgumentAlign,
    /// Whether exported functions have hidden visibility, for use within a library only.
    pub is_hidden: bool,
}

/// Generates the functions of a program's parts, and the units that are not yet known; an empty `finish` has
/// no function.
pub fn generate(
    program: &Program,
    target: &Target,
    plan: &MemoryPlan,
    units: &Units,
    options: GenerateOptions,
) -> Result<(Module, ProgramUnits), CompileError> {
    let GenerateOptions { prefix, is_hidden, .. } = options;
    let mut g = Generator::new(program, target, plan, units, options);
    let linkage = if is_hidden { Linkage::Hidden } else { Linkage::Protected };
    let guard = prefix.map(|prefix| g.guard(prefix, linkage));
    let mut parts = Vec::new();
    for part in [Part::Body, Part::Prepare, Part::Finish] {
        if guard.is_some() || part != Part::Finish || !program.finish.is_empty() {
            parts.push((part, g.part(part, guard.as_ref())?));
        }
    }
    // Tensors of open sizes have no fixed shape to check.
    if let (Some(guard), false, true) = (&guard, is_hidden, program.sizes.is_empty()) {
        g.ffi_functions(guard, &parts);
    }
    Ok((g.m.finish(), g.uses))
}

impl FunctionBuilder {
    fn new(id: FunctionId) -> FunctionBuilder {
        FunctionBuilder {
            id,
            levels: Vec::new(),
            vars: Map::default(),
            known: KnownIndices::default(),
            storage: Map::default(),
            ranges: Ranges::default(),
            seen: ComputedValues::default(),
            lanes: None,
            n_stores: 0,
            warp: None,
            is_parted: false,
            groups: None,
            matrices: Matrices::default(),
            goes_on: false,
            has_copies: true,
            tma: None,
            pipeline_role: None,
            warp_of_block: None,
            stores: None,
            dot: None,
            is_unit: false,
            outside: None,
        }
    }
}

impl<'p> Generator<'p> {
    /// Creates a generator with an empty module.
    fn new(
        program: &'p Program,
        target: &'p Target,
        plan: &'p MemoryPlan,
        units: &'p Units,
        options: GenerateOptions<'p>,
    ) -> Generator<'p> {
        let GenerateOptions { prefix, arguments, .. } = options;
        let (m, f) = (Builder::new(&program.name), FunctionBuilder::new(FunctionId::new(u32::MAX as usize)));
        let (filled, uses) = (BTreeSet::new(), ProgramUnits::default());
        let mut hasher = DefaultHasher::new();
        // Units are for CPUs only, so their names do not depend on the GPU fields.
        let Target { arch, cpu, features, vector_bits, n_vector_registers, has_fma, .. } = target;
        (arch, cpu, features, vector_bits, n_vector_registers, has_fma).hash(&mut hasher);
        (target.l1d_bytes, target.l2_bytes, target.l3_bytes).hash(&mut hasher);
        if arguments != ArgumentAlign::default() {
            arguments.hash(&mut hasher);
        }
        let target_hash = hasher.finish();
        let n_outlined = 0;
        Generator { m, program, target, plan, filled, f, units, uses, target_hash, prefix, arguments, n_outlined }
    }
}

impl Generator<'_> {
    // Functions.

    /// Generates one part: the exported function, which is returned, and the internal one.
    fn part(&mut self, part: Part, guard: Option<&ExportChecks>) -> Result<FunctionId, CompileError> {
        let (name, block) = (symbol(part), self.program.part(part));
        let ptr = Type::POINTER;
        let sizes = plan::used_sizes(self.program, part);
        let guarded = guard.map(|guard| (guard, self.guarded_entry(guard, part)));
        let exported = match guarded {
            Some((_, entry)) => entry.function,
            None => {
                let exported = self.m.function(name, Linkage::Exported, None, &vec![ptr; entry_parameters(&sizes)]);
                self.m.go_to(exported, self.m.block(exported));
                exported
            }
        };
        let [buffers, scratch, mut runtime] = [0, 1, 2].map(|i| self.m.parameter(i));
        if block.is_empty() {
            self.leave_entry(guard);
            return Ok(exported);
        }
        let mut used = BTreeSet::new();
        plan::used_buffers(block, &mut used);
        self.filled.clear();
        for s in block {
            s.walk(&mut |s| self.filled.extend(s.own_write().map(|(b, _)| b)));
        }
        let passed: Vec<BufferId> = self.program.arguments().chain(self.program.kept()).map(|(id, _)| id).collect();
        let mut parameters = Vec::new();
        let mut arguments = Vec::new();
        for buffer in used {
            let pointer = if let Some(at) = passed.iter().position(|b| *b == buffer) {
                let slot = self.m.element(ptr, buffers, self.m.int(at as i64));
                self.m.load(ptr, slot, 8, false)
            } else {
                match self.plan.places.get(&buffer) {
                    Some(TemporaryMemory::Scratch { shared: Some(offset), .. }) => {
                        self.bytes_from(scratch, *offset as i64)
                    }
                    Some(_) => continue,
                    None => return Err(self.never_allocated(buffer)),
                }
            };
            parameters.push(buffer);
            arguments.push(pointer);
        }
        if let Some((guard, entry)) = guarded {
            let aligns = parameters.iter().map(|buffer| self.buffer_align(*buffer));
            let mut checked: Vec<(Id, u64)> = arguments.iter().copied().zip(aligns).collect();
            checked.extend((!sizes.is_empty()).then(|| (self.m.parameter(3), 8)));
            runtime = self.check_pointers(guard, entry, &checked, scratch, runtime);
        }
        arguments.extend([scratch, runtime]);
        let mut types = vec![ptr; arguments.len()];
        if !sizes.is_empty() {
            let given = self.m.parameter(3);
            arguments.extend(self.open_sizes(guarded, given, &sizes));
            types.resize(arguments.len(), Type::I64);
        }
        let body = self.m.function(&format!("{name}.body"), Linkage::Internal, None, &types);
        self.m.call(body, &arguments);
        self.leave_entry(guard);
        self.enter_function(body, Linkage::Internal);
        self.f.outside = Some((self.m.parameter(parameters.len()), self.m.parameter(parameters.len() + 1)));
        self.f.ranges = self.program.ranges();
        for (at, (_, size)) in sizes.iter().enumerate() {
            self.var_parameter(parameters.len() + 2 + at, size.var);
        }
        for (at, buffer) in parameters.into_iter().enumerate() {
            self.buffer_parameter(at, buffer);
        }
        self.block(block)?;
        self.leave_function();
        Ok(exported)
    }

    /// Computes the variables of the open sizes from the sizes that a caller passes; an exported function
    /// returns if a size is invalid.
    fn open_sizes(
        &mut self,
        guarded: Option<(&ExportChecks, ExportedFunction)>,
        given: Id,
        sizes: &[(usize, &OpenSize)],
    ) -> Vec<Id> {
        let values = sizes.iter().map(|(at, size)| {
            let slot = self.m.element(Type::I64, given, self.m.int(*at as i64));
            let value = self.m.load(Type::I64, slot, 8, false);
            (*size, self.m.sub(value, self.m.int(size.least)))
        });
        let values: Vec<(&OpenSize, Id)> = values.collect();
        if let Some((_, entry)) = guarded {
            self.check_sizes(entry, &values);
        }
        let steps = |(size, above): (&OpenSize, Id)| match size.step {
            1 => above,
            step => self.m.binary(SsaOp::UnsignedDiv, above, self.m.int(step)),
        };
        values.into_iter().map(steps).collect()
    }

    pub(super) fn never_allocated(&self, buffer: BufferId) -> CompileError {
        CompileError::NeverAllocated { buffer: self.program.buffer(buffer).name.clone() }
    }

    /// Declares that a parameter is a non-overlapping buffer.
    pub(super) fn buffer_parameter(&mut self, at: usize, buffer: BufferId) {
        let b = self.program.buffer(buffer);
        let value = self.m.parameter(at);
        self.m.name(value, &b.name);
        let (bytes, is_constant) = (b.size_bytes().unwrap_or(0), self.is_constant(buffer));
        self.m.buffer_parameter(at, UnaliasedMemory { bytes, is_constant, align: self.buffer_align(buffer) });
        self.f.storage.insert(buffer, Storage::Pointer(value));
    }

    /// Declares that a parameter is the value of a loop's variable.
    pub(super) fn var_parameter(&mut self, at: usize, var: LoopId) {
        let value = self.m.parameter(at);
        self.m.name(value, self.program.loop_name(var));
        self.f.vars.insert(var, (value, 0));
    }

    /// CPU for which computing functions are compiled.
    fn cpu(&self) -> Cpu {
        if self.prefix.is_some() { Cpu::Checked } else { Cpu::Target }
    }

    /// Alignment of a buffer, in bytes.
    pub(super) fn buffer_align(&self, buffer: BufferId) -> u64 {
        let b = self.program.buffer(buffer);
        match (self.arguments, b.role) {
            _ if b.scope.is_shared() && self.target.gpu.is_some() => SHARED_ALIGN,
            (ArgumentAlign::Elements, Role::Input | Role::ConstInput | Role::Output) => b.dtype.bytes(),
            _ => ARGUMENT_ALIGN,
        }
    }

    /// Whether a buffer is not written during this part or GPU kernel.
    pub(super) fn is_constant(&self, buffer: BufferId) -> bool {
        let b = self.program.buffer(buffer);
        match b.role {
            Role::Input | Role::ConstInput => true,
            _ if b.scope == Scope::Global && self.target.gpu.is_some() => !self.filled.contains(&buffer),
            Role::Kept => !self.filled.contains(&buffer),
            Role::Output | Role::Temporary => false,
        }
    }

    /// Starts generating a function.
    fn enter_function(&mut self, function: FunctionId, linkage: Linkage) {
        self.m.define(function, linkage, self.cpu());
        let entry = self.m.block(function);
        self.f = FunctionBuilder::new(function);
        self.m.go_to(function, entry);
        self.f.levels.push(LoopLevel::new(entry, None));
    }

    /// Enters a function like [`Self::enter_function`] in the middle of another one, whose state it returns.
    pub(super) fn start_function(&mut self, function: FunctionId, linkage: Linkage) -> FunctionBuilder {
        let outer = std::mem::replace(&mut self.f, FunctionBuilder::new(function));
        self.enter_function(function, linkage);
        outer
    }

    pub(super) fn leave_function(&mut self) {
        self.m.ret();
        self.f.levels.pop().expect("the function's own level");
        assert!(self.f.levels.is_empty(), "loops nest");
    }

    // Positions.

    /// Continues at the end of a block.
    pub(super) fn go_to_end(&mut self, block: BlockId) {
        self.f.n_stores = 0;
        self.m.go_to(self.f.id, block);
    }

    /// Generates code in an outer loop or at the start of the function.
    pub(super) fn hoisted<T>(&mut self, depth: usize, write: impl FnOnce(&mut Self) -> T) -> T {
        let back = self.m.position();
        self.m.go_to_hoisted(self.f.levels[depth].header);
        let out = write(self);
        self.m.go_back(back);
        out
    }

    /// Address at a byte offset from a pointer.
    fn bytes_from(&self, pointer: Id, bytes: i64) -> Id {
        if bytes == 0 { pointer } else { self.m.element(Type::I8, pointer, self.m.int(bytes)) }
    }

    // Statements.

    pub(super) fn block(&mut self, block: &[Stmt]) -> Result<(), CompileError> {
        if self.f.is_unit || self.f.lanes.is_some() || self.f.dot.is_some() {
            return self.statements(block);
        }
        for segment in unit::segments(self.program, block, &mut self.f.ranges) {
            match segment {
                CodeSegment::Unit(range) => self.unit(&block[range])?,
                CodeSegment::Plain(range) => self.statements(&block[range])?,
            }
        }
        Ok(())
    }

    fn statements(&mut self, block: &[Stmt]) -> Result<(), CompileError> {
        if self.block_in_turn(block)? {
            return Ok(());
        }
        let mut at = 0;
        while at < block.len() {
            if self.f.n_stores >= MOST_STORES && self.target.gpu.is_none() {
                let next = self.m.block(self.f.id);
                self.m.br(next);
                self.go_to_end(next);
            }
            let n = self.turn(&block[at..])?;
            if n > 0 {
                at += n;
                continue;
            }
            let n = self.exchanged_stores(&block[at..]).max(self.saturated_stores(&block[at..]));
            if n > 0 {
                at += n;
                continue;
            }
            match self.interleaved_stores(&block[at..])?.max(self.group_products(&block[at..])?) {
                0 => {
                    self.strided_loads(&block[at..]);
                    self.stmt(&block[at])?;
                    at += 1;
                }
                n => at += n,
            }
        }
        Ok(())
    }

    fn stmt(&mut self, stmt: &Stmt) -> Result<(), CompileError> {
        match stmt {
            Stmt::For(l) => {
                let parts = self.f.warp.is_some_and(|warp| warp.iter().any(|var| l.extent.uses(*var)));
                let was_parted = self.f.is_parted;
                self.f.is_parted |= parts;
                self.for_loop(l)?;
                self.f.is_parted = was_parted;
            }
            Stmt::If { cond, then, otherwise } => {
                let varying = self.f.lanes.is_some_and(|lanes| cond.uses(lanes.var));
                let parts = self.f.warp.is_some_and(|warp| plan::parts(cond, warp));
                let was_parted = self.f.is_parted;
                self.f.is_parted |= parts;
                let cond = self.cond(cond);
                if varying {
                    self.masked_branches(cond, then, otherwise)?;
                } else {
                    self.branches(cond, then, otherwise)?;
                }
                self.f.is_parted = was_parted;
            }
            Stmt::Alloc(buffer) => self.alloc(*buffer)?,
            Stmt::Store { buffer, index, value } => self.store(*buffer, index, value),
            Stmt::Update { buffer, index, op, value, first } => self.update(*buffer, index, *op, value, first),
            Stmt::Prefetch { buffer, index, for_write } => self.prefetch(*buffer, index, *for_write),
            Stmt::Barrier => self.barrier(),
            Stmt::Wait(n) => self.wait(*n),
        }
        Ok(())
    }

    /// Waits for the other threads of a GPU block and forgets loaded values that they may have overwritten.
    fn barrier(&mut self) {
        if self.target.gpu.is_none() {
            return;
        }
        if self.f.matrices.all.iter().any(|b| !self.is_for_boxes(*b)) {
            self.m.proxy_fence();
        }
        self.m.barrier();
        let mut loads = std::mem::take(&mut self.f.seen.loads);
        loads.retain(|buffer, _| self.is_constant(*buffer));
        self.f.seen.loads = loads;
    }

    /// Generates code whose values must not be used afterwards, as another path may bypass it.
    pub(super) fn scoped<T>(&mut self, written: &BTreeSet<BufferId>, write: impl FnOnce(&mut Self) -> T) -> T {
        for buffer in written {
            self.f.seen.loads.remove(buffer);
        }
        let before = self.f.seen.clone();
        let out = write(self);
        self.f.seen = before;
        out
    }

    fn branches(&mut self, cond: Id, then: &[Stmt], otherwise: &[Stmt]) -> Result<(), CompileError> {
        match self.m.as_const_bool(cond) {
            Some(true) => return self.block(then),
            Some(false) => return self.block(otherwise),
            None => {}
        }
        let [yes, join] = [0; 2].map(|_| self.m.block(self.f.id));
        let no = if otherwise.is_empty() { join } else { self.m.block(self.f.id) };
        self.m.cond_br(cond, yes, no);
        let mut written = plan::written_buffers(then);
        written.extend(plan::written_buffers(otherwise));
        for (block, stmts) in [(yes, then), (no, otherwise)] {
            if block != join {
                self.go_to_end(block);
                self.forget_stores();
                self.scoped(&written, |g| g.block(stmts))?;
                self.forget_stores();
                self.m.br(join);
            }
        }
        self.go_to_end(join);
        Ok(())
    }

    /// Generates both branches, each for its lanes.
    fn masked_branches(&mut self, cond: Id, then: &[Stmt], otherwise: &[Stmt]) -> Result<(), CompileError> {
        let lanes = self.f.lanes.expect("a condition varies over the lanes of a vectorized loop");
        let mut written = plan::written_buffers(then);
        written.extend(plan::written_buffers(otherwise));
        for (negate, block) in [(false, then), (true, otherwise)] {
            if block.is_empty() {
                continue;
            }
            let mask = if negate { self.m.not(cond) } else { cond };
            let mask = self.both(lanes.mask, mask);
            self.f.lanes = Some(WrittenLanes { mask: Some(mask), guarded: true, ..lanes });
            self.scoped(&written, |g| g.block(block))?;
        }
        self.f.lanes = Some(lanes);
        Ok(())
    }

    /// Intersection of two masks.
    pub(super) fn both(&self, a: Option<Id>, b: Id) -> Id {
        a.map_or(b, |a| self.m.binary(SsaOp::And, a, b))
    }

    fn alloc(&mut self, buffer: BufferId) -> Result<(), CompileError> {
        let b = self.program.buffer(buffer);
        let element = self.element_type(buffer);
        let storage = match self.plan.places.get(&buffer) {
            Some(TemporaryMemory::Scratch { .. }) => return Ok(()),
            None if b.scope.is_shared() && self.f.storage.contains_key(&buffer) => return Ok(()),
            None => return Err(self.never_allocated(buffer)),
            Some(TemporaryMemory::Stack) => {
                let bytes = b.size_bytes().unwrap_or(0);
                Storage::Pointer(self.hoisted(0, |g| g.m.stack(bytes, ARGUMENT_ALIGN as u32)))
            }
            Some(TemporaryMemory::Chunks(chunks)) => {
                let slots = chunks.iter().map(|chunk| {
                    let ty = element.vector(plan::padded_width(self.target, chunk.n));
                    let slot = self.hoisted(0, |g| g.m.variable(ty, ARGUMENT_ALIGN as u32));
                    // Contents are undefined at the start of each iteration of an outer loop.
                    self.m.store(self.m.undefined(ty), slot, ARGUMENT_ALIGN as u32);
                    (*chunk, slot)
                });
                Storage::Chunks(slots.collect())
            }
        };
        self.f.storage.insert(buffer, storage);
        Ok(())
    }

    // Loops.

    fn for_loop(&mut self, l: &Loop) -> Result<(), CompileError> {
        let extent = self.f.ranges.simplify(&plan::resolve(&l.extent, &self.f.known));
        let constant = extent.as_const();
        match (l.kind, constant) {
            (_, Some(n)) if n <= 0 => Ok(()),
            (LoopKind::Serial, Some(_)) if self.box_copy(l) => Ok(()),
            (LoopKind::Serial, _) if !self.f.goes_on && self.may_go_on(l) => self.products_that_go_on(l, &extent),
            (LoopKind::Tensor(how @ (TensorProduct::Dot4 | TensorProduct::Dot2)), _)
                if self.target.gpu.is_none() && self.target.vector_bits > 0 =>
            {
                self.dot_products(l, how, &extent)
            }
            (LoopKind::Tensor(TensorProduct::Dot4 | TensorProduct::Dot2), _) => self.serial_loop(l, &extent),
            (LoopKind::Tensor(TensorProduct::Tma), Some(_)) if self.box_store(l) => Ok(()),
            (LoopKind::Unrolled | LoopKind::Tensor(TensorProduct::Tma), Some(n)) => {
                (0..n).try_for_each(|i| self.iteration(l, i))
            }
            (LoopKind::Tensor(how), _) if self.target.has_tf32() && !how.is_of_groups() => self.tile_product(l, how),
            (LoopKind::Serial | LoopKind::Vectorized, Some(1)) => self.iteration(l, 0),
            (LoopKind::Parallel, _) if self.f.outside.is_some() => self.parallel_loop(l, &extent),
            (LoopKind::Turns, _) if self.takes_turns() => self.loop_in_turns(l, &extent),
            (LoopKind::Vectorized, _) => match plan::vectors(self.program, self.target, l, &extent, &self.f.ranges) {
                Vectors::Pieces(pieces) => self.vector_loop(l, &extent, &pieces, false),
                Vectors::Masked(pieces) => self.vector_loop(l, &extent, &pieces, true),
                Vectors::Serial => self.serial_loop(l, &extent),
            },
            // Block and thread loops run sequentially on a CPU.
            (
                LoopKind::Serial
                | LoopKind::Unrolled
                | LoopKind::Parallel
                | LoopKind::Block(_)
                | LoopKind::Thread(_)
                | LoopKind::Tensor(_)
                | LoopKind::Turns,
                _,
            ) => self.serial_loop(l, &extent),
        }
    }

    /// Generates the body for one value of the variable.
    fn iteration(&mut self, l: &Loop, i: i64) -> Result<(), CompileError> {
        let outer = self.f.lanes.take();
        self.f.known.insert(l.var, i);
        self.block(&l.body)?;
        self.f.known.remove(&l.var);
        self.f.lanes = outer;
        Ok(())
    }

    pub(super) fn serial_loop(&mut self, l: &Loop, extent: &Index) -> Result<(), CompileError> {
        self.loop_around(l, extent, |g| g.block(&l.body))
    }

    /// Generates a loop; `iteration` generates its body.
    pub(super) fn loop_around(
        &mut self,
        l: &Loop,
        extent: &Index,
        write: impl FnOnce(&mut Self) -> Result<(), CompileError>,
    ) -> Result<(), CompileError> {
        let n = self.int(extent);
        let zero = self.m.int(0);
        let preheader = self.m.current_block();
        let [header, exit] = [0; 2].map(|_| self.m.block(self.f.id));
        if self.f.ranges.lower(extent).is_some_and(|n| n >= 1) {
            self.m.br(header);
        } else {
            let some = self.m.compare(Compare::Greater, n, zero);
            self.m.cond_br(some, header, exit);
        }
        self.go_to_end(header);
        let var = self.m.phi(header, Type::I64);
        self.m.name(var, self.program.loop_name(l.var));
        self.m.add_incoming(var, zero, preheader);
        self.f.levels.push(LoopLevel::new(header, Some((preheader, l.var))));
        self.forget_stores();
        self.f.vars.insert(l.var, (var, self.f.levels.len() - 1));
        self.f.ranges.push(l.var, extent.clone());
        self.scoped(&plan::written_buffers(&l.body), write)?;
        self.f.ranges.pop();
        self.f.vars.remove(&l.var);
        let level = self.f.levels.pop().expect("the loop's own level");
        self.forget_stores();
        let latch = self.m.current_block();
        for (pointer, element, step) in level.steps {
            let next = self.m.element(element, pointer, self.m.int(step));
            self.m.add_incoming(pointer, next, latch);
        }
        let next = self.m.add(var, self.m.int(1));
        self.m.add_incoming(var, next, latch);
        let more = self.m.compare(Compare::Less, next, n);
        self.m.cond_br(more, header, exit);
        self.go_to_end(exit);
        Ok(())
    }

    fn vector_loop(
        &mut self,
        l: &Loop,
        extent: &Index,
        pieces: &[VectorPiece],
        masked: bool,
    ) -> Result<(), CompileError> {
        self.f.ranges.push(l.var, extent.clone());
        let least = self.f.ranges.lower(extent).unwrap_or(0);
        let outer = self.f.lanes;
        for &piece in pieces {
            if piece.width == 1 {
                self.iteration(l, piece.first)?;
                continue;
            }
            let mut lanes = WrittenLanes { var: l.var, piece, mask: None, guarded: false };
            if !masked || least >= piece.first + piece.n as i64 {
                self.f.lanes = Some(lanes);
                self.block(&l.body)?;
                continue;
            }
            let left = extent.offset(-piece.first);
            let skip = (least <= piece.first).then(|| [0; 2].map(|_| self.m.block(self.f.id)));
            if let Some([yes, join]) = skip {
                let n = self.int(&left);
                let some = self.m.compare(Compare::Greater, n, self.m.int(0));
                self.m.cond_br(some, yes, join);
                self.go_to_end(yes);
            }
            lanes.mask = Some(self.lanes_below(&left, piece.width));
            lanes.guarded = true;
            self.f.lanes = Some(lanes);
            self.scoped(&plan::written_buffers(&l.body), |g| g.block(&l.body))?;
            if let Some([_, join]) = skip {
                self.m.br(join);
                self.go_to_end(join);
            }
        }
        self.f.lanes = outer;
        self.f.ranges.pop();
        Ok(())
    }

    /// Generates the body as a separate function and a call of the runtime.
    fn parallel_loop(&mut self, l: &Loop, extent: &Index) -> Result<(), CompileError> {
        let (scratch, runtime) = self.f.outside.expect("not inside another parallel loop");
        let (ptr, i64) = (Type::POINTER, Type::I64);
        let n = self.int(extent);
        let (used, mut vars) = plan::captures(&l.body);
        vars.remove(&l.var);
        let mut buffers = Vec::new();
        let mut own = Vec::new();
        for buffer in used {
            match (self.f.storage.get(&buffer), self.plan.places.get(&buffer)) {
                (_, Some(TemporaryMemory::Scratch { per_thread: Some(offset), .. }))
                    if plan::allocates(&l.body, buffer) =>
                {
                    own.push((buffer, *offset));
                }
                (Some(Storage::Pointer(p)), _) => buffers.push((buffer, *p)),
                (Some(Storage::Chunks(_)), _) | (None, Some(_)) => {}
                (None, None) => return Err(self.never_allocated(buffer)),
            }
        }
        let vars: Vec<LoopId> = vars.into_iter().filter(|v| self.f.vars.contains_key(v)).collect();

        // Environment: pointers, variables, scratch memory.
        let n_slots = buffers.len() + vars.len() + 1;
        let env = self.hoisted(0, |g| g.m.stack(8 * n_slots as u64, 8));
        let mut captured: Vec<(Type, Id)> = buffers.iter().map(|(_, p)| (ptr, *p)).collect();
        captured.extend(vars.iter().map(|v| (i64, self.f.vars[v].0)));
        captured.push((ptr, scratch));
        for (at, (_, value)) in captured.iter().enumerate() {
            let slot = self.m.element(i64, env, self.m.int(at as i64));
            self.m.store(*value, slot, 8);
        }

        self.n_outlined += 1;
        let name = format!("{}.{}", self.program.loop_name(l.var), self.n_outlined);
        let entry_types = [ptr, i64, i64];
        let entry = self.m.function(&format!("{name}.entry"), Linkage::Internal, None, &entry_types);

        // Runtime: context, then the function.
        let context = self.m.load(ptr, runtime, 8, false);
        let slot = self.m.element(i64, runtime, self.m.int(1));
        let parallel_for = self.m.load(ptr, slot, 8, false);
        self.m.call_pointer(parallel_for, None, &[context, self.m.function_address(entry), env, n]);
        for buffer in plan::written_buffers(&l.body) {
            self.f.seen.loads.remove(&buffer);
        }
        let after = self.m.current_block();

        let types: Vec<Type> = captured.iter().map(|(ty, _)| *ty).collect();
        let body = self.entry_of_loop(entry, &name, &types, &own);

        // The body.
        let ranges = self.f.ranges.clone();
        let known = self.f.known.clone();
        let outer = self.start_function(body, Linkage::Internal);
        self.f.ranges = ranges;
        self.f.known = known;
        let mut at = 0;
        for (buffer, _) in &buffers {
            self.buffer_parameter(at, *buffer);
            at += 1;
        }
        for var in &vars {
            self.var_parameter(at, *var);
            at += 1;
        }
        for (buffer, _) in &own {
            self.buffer_parameter(at, *buffer);
            at += 1;
        }
        self.var_parameter(at, l.var);
        self.f.ranges.push(l.var, extent.clone());
        self.block(&l.body)?;
        self.leave_function();
        self.f = outer;
        self.go_to_end(after);
        Ok(())
    }

    /// Generates the entry of a parallel loop, which reads captured values and calls the body, and returns
    /// the body's function. The last captured type is that of the scratch memory; `own` holds the buffers of
    /// a thread with their offsets in it.
    fn entry_of_loop(
        &mut self,
        entry: FunctionId,
        name: &str,
        captured: &[Type],
        own: &[(BufferId, u64)],
    ) -> FunctionId {
        self.m.define(entry, Linkage::Internal, self.cpu());
        self.m.go_to(entry, self.m.block(entry));
        let [env, iteration, thread] = [0, 1, 2].map(|i| self.m.parameter(i));
        let mut arguments = Vec::new();
        for (at, ty) in captured.iter().enumerate() {
            let slot = self.m.element(Type::I64, env, self.m.int(at as i64));
            arguments.push(self.m.load(*ty, slot, 8, false));
        }
        let scratch = arguments.pop().expect("the scratch memory is the last capture");
        let layout = self.plan.scratch;
        let slice = self.m.mul(thread, self.m.int(layout.per_thread_bytes as i64));
        let i8_slice = self.m.element(Type::I8, scratch, slice);
        let own_pointers: Vec<Id> =
            own.iter().map(|(_, offset)| self.bytes_from(i8_slice, (layout.shared_bytes + offset) as i64)).collect();
        let mut types = captured[..captured.len() - 1].to_vec();
        types.extend(own_pointers.iter().map(|_| Type::POINTER));
        types.push(Type::I64);
        arguments.extend(own_pointers);
        arguments.push(iteration);
        let body = self.m.function(name, Linkage::Internal, None, &types);
        self.m.call(body, &arguments);
        self.m.ret();
        body
    }

    /// Type of a buffer's elements.
    pub(super) fn element_type(&self, buffer: BufferId) -> Type {
        match self.program.buffer(buffer).dtype {
            DType::I8 | DType::I7 | DType::U8 | DType::Bool => Type::I8,
            DType::I16 | DType::U16 => Type::I16,
            DType::U32 => Type::I32,
            dtype => self.value_type(dtype),
        }
    }

    /// Position of an element in its buffer, simplified by the ranges of the loops.
    pub(super) fn flat(&self, buffer: BufferId, index: &[Index]) -> Index {
        let flat = plan::flat(self.program, buffer, index, &self.f.known);
        self.f.ranges.simplify(&flat)
    }

    /// Whether a buffer is held in registers.
    pub(super) fn in_registers(&self, buffer: BufferId) -> bool {
        matches!(self.program.buffer(buffer).scope, Scope::Register | Scope::Local)
            && matches!(self.f.storage.get(&buffer), Some(Storage::Chunks(_)))
    }
}

impl LoopLevel {
    fn new(header: BlockId, entered: Option<(BlockId, LoopId)>) -> LoopLevel {
        let (ints, pointers, swizzled, reciprocals) = Default::default();
        LoopLevel { header, entered, steps: Vec::new(), ints, pointers, swizzled, reciprocals }
    }
}
