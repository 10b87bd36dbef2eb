//! Builder of functions: one method per instruction, with constant folding.
//!
//! Methods take a shared reference, so that calls can be nested like expressions; instructions are emitted in
//! the order of the calls.

use std::cell::RefCell;

use smallvec::smallvec;

use super::{
    Assembly, Bits, BlockId, Compare, Coordinate, Cpu, Def, Function, FunctionId, FunctionParameter, Global, Id,
    InstOperands, Instruction, LaneKind, Linkage, Module, SsaOp, Type, UnaliasedMemory, Value, VectorConstant, fold,
};
use crate::map::Map;

/// Module under construction, with an insertion point.
pub struct Builder(RefCell<State>);

/// Insertion point.
#[derive(Clone, Copy)]
pub struct Position {
    function: FunctionId,
    block: BlockId,
    part: Part,
}

/// Sections of a block's instructions, each in emission order.
#[derive(Clone, Copy)]
enum Part {
    /// Instructions hoisted out of the loop that the block begins.
    Hoisted,
    /// Other instructions.
    Rest,
}

struct State {
    module: Module,
    /// Drafts of the functions.
    drafts: Vec<Draft>,
    at: Position,
}

/// Function under construction.
#[derive(Default)]
struct Draft {
    blocks: Vec<DraftBlock>,
    /// Predecessors and values of each phi.
    phis: Map<Id, (Vec<BlockId>, InstOperands)>,
    /// Values that are not results of instructions.
    fixed: Map<(Type, Def), Id>,
    /// Values moved from other lanes of a vector, which takes some cycles.
    moved: Map<Id, ()>,
}

#[derive(Default)]
struct DraftBlock {
    /// Phis of the block; the newest comes first in the code.
    phis: Vec<Id>,
    hoisted: Vec<Instruction>,
    rest: Vec<Instruction>,
}

impl State {
    fn function(&mut self) -> &mut Function {
        &mut self.module.functions[self.at.function.at()]
    }

    fn draft(&mut self) -> &mut Draft {
        &mut self.drafts[self.at.function.at()]
    }

    fn get(&self, id: Id) -> &Value {
        &self.module.functions[self.at.function.at()].values[id.at()]
    }

    fn value(&mut self, ty: Type, def: Def) -> Id {
        let values = &mut self.function().values;
        values.push(Value { ty, def });
        Id::new(values.len() - 1)
    }

    /// Returns the unique value of a type and definition that is not the result of an instruction.
    fn fixed(&mut self, ty: Type, def: Def) -> Id {
        let key = (ty, def);
        if let Some(id) = self.draft().fixed.get(&key) {
            return *id;
        }
        let id = self.value(ty, key.1.clone());
        self.draft().fixed.insert(key, id);
        id
    }

    fn push(&mut self, instruction: Instruction) {
        let Position { block, part, .. } = self.at;
        let block = &mut self.draft().blocks[block.at()];
        match part {
            Part::Hoisted => block.hoisted.push(instruction),
            Part::Rest => block.rest.push(instruction),
        }
    }
}

impl Builder {
    /// Creates an empty module.
    pub fn new(name: &str) -> Builder {
        let module = Module { name: name.to_owned(), ..Module::default() };
        // No valid position until a function is added.
        let at = Position { function: FunctionId::new(u32::MAX as usize), block: BlockId::new(0), part: Part::Rest };
        Builder(RefCell::new(State { module, drafts: Vec::new(), at }))
    }

    /// Finishes the module.
    pub fn finish(self) -> Module {
        let State { mut module, drafts, .. } = self.0.into_inner();
        for (function, draft) in module.functions.iter_mut().zip(drafts) {
            let Draft { blocks, mut phis, .. } = draft;
            let whole = |block: DraftBlock| {
                if block.phis.is_empty() && block.hoisted.is_empty() {
                    return block.rest;
                }
                let mut all = Vec::with_capacity(block.phis.len() + block.hoisted.len() + block.rest.len());
                all.extend(block.phis.into_iter().rev().map(|phi| {
                    let (from, operands) = phis.remove(&phi).expect("each phi stands in one block");
                    Instruction { op: SsaOp::Phi(from), operands, result: Some(phi), align: 0 }
                }));
                all.extend(block.hoisted);
                all.extend(block.rest);
                all
            };
            function.blocks = blocks.into_iter().map(whole).collect();
        }
        module
    }

    // Constants.

    fn fixed(&self, ty: Type, def: Def) -> Id {
        self.0.borrow_mut().fixed(ty, def)
    }

    fn constant(&self, ty: Type, bits: Bits) -> Id {
        self.fixed(ty, Def::Constant(VectorConstant { bits, undefined: 0 }))
    }

    /// Integer constant of a type.
    pub fn integer(&self, ty: Type, v: i64) -> Id {
        self.constant(ty, smallvec![v as u64 & ty.kind.mask()])
    }

    /// 64-bit integer constant.
    pub fn int(&self, v: i64) -> Id {
        self.integer(Type::I64, v)
    }

    /// 32-bit integer constant.
    pub fn int32(&self, v: i32) -> Id {
        self.integer(Type::I32, v.into())
    }

    /// Boolean constant.
    pub fn bool(&self, v: bool) -> Id {
        self.integer(Type::I1, v.into())
    }

    /// Value of a boolean constant; `None` if it is not constant.
    pub fn as_const_bool(&self, v: Id) -> Option<bool> {
        match self.0.borrow().get(v) {
            Value { ty: Type::I1, def: Def::Constant(c) } => Some(c.bits[0] != 0),
            _ => None,
        }
    }

    /// Floating-point constant.
    pub fn real(&self, ty: Type, v: f64) -> Id {
        self.constant(ty, smallvec![fold::real_bits(ty.kind, v)])
    }

    /// Undefined value.
    pub fn undefined(&self, ty: Type) -> Id {
        self.fixed(ty, Def::Undefined)
    }

    /// Zero of any type.
    pub fn zero(&self, ty: Type) -> Id {
        self.constant(ty, smallvec![0; ty.lanes])
    }

    /// Constant vector of integers.
    pub fn integers(&self, element: Type, lanes: impl ExactSizeIterator<Item = i64>) -> Id {
        let ty = element.vector(lanes.len());
        self.constant(ty, lanes.map(|v| v as u64 & ty.kind.mask()).collect())
    }

    /// Type of a value.
    pub fn type_of(&self, v: Id) -> Type {
        self.0.borrow().get(v).ty
    }

    // Functions.

    /// Adds a function.
    pub fn function(&self, name: &str, linkage: Linkage, result: Option<Type>, parameters: &[Type]) -> FunctionId {
        let state = &mut *self.0.borrow_mut();
        let value = |(at, ty): (usize, &Type)| Value { ty: *ty, def: Def::Argument(at) };
        state.module.functions.push(Function {
            name: name.to_owned(),
            linkage,
            cpu: Cpu::Target,
            threads: None,
            cluster: 1,
            result,
            parameters: parameters
                .iter()
                .map(|ty| FunctionParameter { ty: *ty, buffer: None, is_map: false })
                .collect(),
            values: parameters.iter().enumerate().map(value).collect(),
            blocks: Vec::new(),
            names: Vec::new(),
        });
        state.drafts.push(Draft::default());
        FunctionId::new(state.module.functions.len() - 1)
    }

    /// Finds the function of a name, or declares it.
    pub fn declare(&self, name: &str, linkage: Linkage, result: Option<Type>, parameters: &[Type]) -> FunctionId {
        let known = self.0.borrow().module.functions.iter().position(|f| f.name == name);
        known.map_or_else(|| self.function(name, linkage, result, parameters), FunctionId::new)
    }

    /// Sets the visibility of a function, and the CPU for which it is compiled.
    pub fn define(&self, function: FunctionId, linkage: Linkage, cpu: Cpu) {
        let f = &mut self.0.borrow_mut().module.functions[function.at()];
        (f.linkage, f.cpu) = (linkage, cpu);
    }

    /// Marks a function as a GPU kernel of this block size, with clusters of `cluster` neighbouring blocks
    /// along x.
    pub fn kernel(&self, function: FunctionId, threads: [i64; 3], cluster: i64) {
        let f = &mut self.0.borrow_mut().module.functions[function.at()];
        (f.threads, f.cluster) = (Some(threads), cluster);
    }

    /// Parameter of the current function.
    pub fn parameter(&self, at: usize) -> Id {
        Id::new(at)
    }

    /// Sets the properties of the buffer that a parameter points to.
    pub fn buffer_parameter(&self, at: usize, buffer: UnaliasedMemory) {
        self.0.borrow_mut().function().parameters[at].buffer = Some(buffer);
    }

    /// Marks a parameter as a tensor map (TMA descriptor).
    pub fn map_parameter(&self, at: usize) {
        self.0.borrow_mut().function().parameters[at].is_map = true;
    }

    /// Names a value for readable output.
    pub fn name(&self, v: Id, name: &str) {
        self.0.borrow_mut().function().names.push((v, name.to_owned()));
    }

    /// Address of a function.
    pub fn function_address(&self, function: FunctionId) -> Id {
        self.fixed(Type::POINTER, Def::Function(function))
    }

    /// Adds a global 32-bit integer, initially zero, and returns its index.
    pub fn global(&self, name: &str) -> usize {
        let globals = &mut self.0.borrow_mut().module.globals;
        globals.push(Global::Integer(name.to_owned()));
        globals.len() - 1
    }

    /// Finds or adds a constant text, and returns its index as a global.
    pub fn text(&self, text: &str) -> usize {
        let globals = &mut self.0.borrow_mut().module.globals;
        let known = globals.iter().position(|global| matches!(global, Global::Text(known) if known == text));
        known.unwrap_or_else(|| {
            globals.push(Global::Text(text.to_owned()));
            globals.len() - 1
        })
    }

    /// Address of a global variable.
    pub fn global_address(&self, global: usize) -> Id {
        self.fixed(Type::POINTER, Def::Global(global))
    }

    // Blocks and positions.

    /// Appends a block to a function.
    pub fn block(&self, function: FunctionId) -> BlockId {
        let blocks = &mut self.0.borrow_mut().drafts[function.at()].blocks;
        blocks.push(DraftBlock::default());
        BlockId::new(blocks.len() - 1)
    }

    /// Block of the insertion point.
    pub fn current_block(&self) -> BlockId {
        self.0.borrow().at.block
    }

    /// Insertion point.
    pub fn position(&self) -> Position {
        self.0.borrow().at
    }

    /// Restores an insertion point.
    pub fn go_back(&self, to: Position) {
        self.0.borrow_mut().at = to;
    }

    /// Moves the insertion point to the end of a block.
    pub fn go_to(&self, function: FunctionId, block: BlockId) {
        self.go_back(Position { function, block, part: Part::Rest });
    }

    /// Moves the insertion point after the phis of a block, and after the instructions hoisted there before.
    pub fn go_to_hoisted(&self, block: BlockId) {
        let at = &mut self.0.borrow_mut().at;
        (at.block, at.part) = (block, Part::Hoisted);
    }

    fn run(&self, op: SsaOp, operands: InstOperands, align: u32) {
        self.0.borrow_mut().push(Instruction { op, operands, result: None, align });
    }

    fn give(&self, op: SsaOp, operands: InstOperands, ty: Type, align: u32) -> Id {
        let state = &mut *self.0.borrow_mut();
        let id = state.value(ty, Def::Instruction);
        state.push(Instruction { op, operands, result: Some(id), align });
        id
    }

    /// Adds an instruction like [`Self::give`], or folds it if all operands are constants.
    fn compute(&self, op: SsaOp, operands: InstOperands, ty: Type) -> Id {
        let folded = {
            let state = self.0.borrow();
            fold::fold(&op, ty, operands.iter().map(|id| state.get(*id)))
        };
        match folded {
            Some(def) => self.fixed(ty, def),
            None => self.give(op, operands, ty, 0),
        }
    }

    /// Emits an unconditional branch.
    pub fn br(&self, to: BlockId) {
        self.run(SsaOp::Br(to), smallvec![], 0);
    }

    /// Emits a conditional branch.
    pub fn cond_br(&self, cond: Id, then: BlockId, otherwise: BlockId) {
        self.run(SsaOp::CondBr(then, otherwise), smallvec![cond], 0);
    }

    /// Returns from the function.
    pub fn ret(&self) {
        self.run(SsaOp::Return, smallvec![], 0);
    }

    /// Returns a value from the function.
    pub fn ret_value(&self, v: Id) {
        self.run(SsaOp::Return, smallvec![v], 0);
    }

    /// Adds a phi to a block.
    pub fn phi(&self, block: BlockId, ty: Type) -> Id {
        let state = &mut *self.0.borrow_mut();
        let id = state.value(ty, Def::Instruction);
        let draft = state.draft();
        draft.blocks[block.at()].phis.push(id);
        draft.phis.insert(id, Default::default());
        id
    }

    /// Adds an incoming value to a phi.
    pub fn add_incoming(&self, phi: Id, value: Id, from: BlockId) {
        let state = &mut *self.0.borrow_mut();
        let (blocks, values) = state.draft().phis.get_mut(&phi).expect("it is a phi of this function");
        blocks.push(from);
        values.push(value);
    }

    // Memory.

    /// Allocates a local variable, accessed by loads and stores only.
    pub fn variable(&self, ty: Type, align: u32) -> Id {
        self.give(SsaOp::Variable(ty), smallvec![], Type::POINTER, align)
    }

    /// Allocates stack memory.
    pub fn stack(&self, bytes: u64, align: u32) -> Id {
        self.give(SsaOp::Stack(bytes as usize), smallvec![], Type::POINTER, align)
    }

    /// Allocates shared memory of a GPU block.
    pub fn shared_memory(&self, bytes: u64, align: u32) -> Id {
        self.give(SsaOp::SharedMemory(bytes as usize), smallvec![], Type::SHARED, align)
    }

    /// Coordinate of the thread in the grid, as a 64-bit integer.
    pub fn coordinate(&self, coordinate: Coordinate) -> Id {
        let short = self.give(SsaOp::Coordinate(coordinate), smallvec![], Type::I32, 0);
        self.extend(short, Type::I64, false)
    }

    /// Emits a barrier of a GPU block.
    pub fn barrier(&self) {
        self.run(SsaOp::Barrier, smallvec![], 0);
    }

    /// Emits an asynchronous copy of `bytes` bytes to shared memory; with `n`, only the first `n` bytes are
    /// copied, and zeros written for the others.
    pub fn copy(&self, to: Id, from: Id, bytes: usize, n: Option<Id>) {
        self.run(SsaOp::Copy { bytes }, [to, from].into_iter().chain(n).collect(), bytes as u32);
    }

    /// Ends a group of copies, and waits until at most `n` of the latest groups are pending.
    pub fn wait(&self, n: u8) {
        self.run(SsaOp::Wait(n), smallvec![], 0);
    }

    /// Loads tiles from shared memory by a warp (`ldmatrix`), one for each lane of the type.
    pub fn load_tiles(&self, row: Id, transposed: bool, ty: Type) -> Id {
        self.give(SsaOp::LoadTiles { transposed }, smallvec![row], ty, 16)
    }

    /// Loads from memory; `invariant` promises that the memory is never written.
    pub fn load(&self, ty: Type, from: Id, align: u32, invariant: bool) -> Id {
        self.give(SsaOp::Load { invariant }, smallvec![from], ty, align)
    }

    /// Stores to memory.
    pub fn store(&self, value: Id, to: Id, align: u32) {
        self.run(SsaOp::Store, smallvec![value, to], align);
    }

    /// Address of element `index` from `base`.
    pub fn element(&self, element: Type, base: Id, index: Id) -> Id {
        let lanes = self.type_of(index).lanes;
        self.give(SsaOp::Element(element), smallvec![base, index], self.type_of(base).vector(lanes), 0)
    }

    /// Reads the lanes in a mask; the others are `otherwise`.
    pub fn masked_load(&self, ty: Type, from: Id, align: u32, mask: Id, otherwise: Id) -> Id {
        self.give(SsaOp::MaskedLoad, smallvec![from, mask, otherwise], ty, align)
    }

    /// Writes the lanes in a mask.
    pub fn masked_store(&self, value: Id, to: Id, align: u32, mask: Id) {
        self.run(SsaOp::MaskedStore, smallvec![value, to, mask], align);
    }

    /// Reads each lane in a mask from its own address; the others are `otherwise`.
    pub fn masked_gather(&self, ty: Type, from: Id, align: u32, mask: Id, otherwise: Id) -> Id {
        self.give(SsaOp::Gather, smallvec![from, mask, otherwise], ty, align)
    }

    /// Writes each lane in a mask to its own address.
    pub fn masked_scatter(&self, value: Id, to: Id, align: u32, mask: Id) {
        self.run(SsaOp::Scatter, smallvec![value, to, mask], align);
    }

    /// Prefetches an address.
    pub fn prefetch(&self, pointer: Id, for_write: bool) {
        self.run(SsaOp::Prefetch { for_write }, smallvec![pointer], 0);
    }

    // Arithmetic.

    /// Emits an operation with two operands of the result's type.
    pub fn binary(&self, op: SsaOp, a: Id, b: Id) -> Id {
        let is_late = matches!(op, SsaOp::FMin | SsaOp::FMax) && self.0.borrow_mut().draft().moved.contains_key(&a);
        let (a, b) = if is_late { (b, a) } else { (a, b) };
        self.compute(op, smallvec![a, b], self.type_of(a))
    }

    /// Emits an operation with one operand of the result's type.
    pub fn unary(&self, op: SsaOp, x: Id) -> Id {
        self.compute(op, smallvec![x], self.type_of(x))
    }

    /// Integer `a + b`
    pub fn add(&self, a: Id, b: Id) -> Id {
        self.binary(SsaOp::Add, a, b)
    }

    /// Integer `a − b`
    pub fn sub(&self, a: Id, b: Id) -> Id {
        self.binary(SsaOp::Sub, a, b)
    }

    /// Integer `a · b`
    pub fn mul(&self, a: Id, b: Id) -> Id {
        self.binary(SsaOp::Mul, a, b)
    }

    /// `a · b + c`, rounded once.
    pub fn fma(&self, a: Id, b: Id, c: Id) -> Id {
        self.compute(SsaOp::Fma, smallvec![a, b, c], self.type_of(a))
    }

    /// Accumulates dot products of four 8-bit integers per lane: see [`SsaOp::Dot4`].
    pub fn dot4(&self, signed: [bool; 2], sums: Id, a: Id, b: Id) -> Id {
        self.compute(SsaOp::Dot4 { signed }, smallvec![sums, a, b], self.type_of(sums))
    }

    /// Accumulates dot products of two signed 16-bit integers per lane: see [`SsaOp::Dot2`].
    pub fn dot2(&self, sums: Id, a: Id, b: Id) -> Id {
        self.compute(SsaOp::Dot2, smallvec![sums, a, b], self.type_of(sums))
    }

    /// Accumulates dot products of four 8-bit integers per lane whose sums of two products fit 16 bits: see
    /// [`SsaOp::Dot4BySums`].
    pub fn dot4_by_sums(&self, sums: Id, unsigned: Id, signed: Id) -> Id {
        self.compute(SsaOp::Dot4BySums, smallvec![sums, unsigned, signed], self.type_of(sums))
    }

    /// Accumulates dot products of two bf16 numbers per lane: see [`SsaOp::DotOfHalves`].
    pub fn dot_of_halves(&self, sums: Id, a: Id, b: Id) -> Id {
        self.compute(SsaOp::DotOfHalves, smallvec![sums, a, b], self.type_of(sums))
    }

    /// Rounds to the nearest bf16 numbers, as 16-bit integers: see [`SsaOp::NearestBf16`].
    pub fn nearest_bf16(&self, x: Id) -> Id {
        self.compute(SsaOp::NearestBf16, smallvec![x], Type::I16.vector(self.type_of(x).lanes))
    }

    /// Selects bytes of two vectors of 64 bytes by indices: see [`SsaOp::PickBytes`].
    pub fn pick_bytes(&self, indices: Id, first: Id, second: Id) -> Id {
        self.compute(SsaOp::PickBytes, smallvec![indices, first, second], self.type_of(indices))
    }

    /// Rounds to TF32: 11 significant bits.
    pub fn tf32(&self, x: Id) -> Id {
        self.compute(SsaOp::Tf32, smallvec![x], Type::F32)
    }

    /// Emits a tile product of a warp (`mma.sync`), and returns the thread's new accumulators. `operands` are
    /// its registers of A and B, and the old accumulators.
    pub fn tile_product(&self, factors: LaneKind, operands: impl Iterator<Item = Id>) -> Id {
        self.compute(SsaOp::TileProduct(factors), operands.collect(), Type::F32.vector(4))
    }

    /// Makes the thread's writes to shared memory visible to [`Self::group_product`].
    pub fn proxy_fence(&self) {
        self.run(SsaOp::ProxyFence, smallvec![], 0);
    }

    /// Emits a fence before warpgroup products, and returns the accumulators for them.
    pub fn group_fence(&self, sums: &[Id]) -> Id {
        self.give(SsaOp::GroupFence, sums.into(), Type::F32.vector(sums.len()), 0)
    }

    /// Emits a warpgroup product of A and B, given by descriptors, or A by four registers. `across` says
    /// whether each is MN-major; `begins` says whether the accumulators are overwritten.
    pub fn group_product(
        &self,
        factors: LaneKind,
        rows: &[Id],
        columns: Id,
        across: [bool; 2],
        sums: &[Id],
        begins: bool,
    ) -> Id {
        let operands = rows.iter().copied().chain([columns]).chain(sums.iter().copied()).collect();
        self.give(SsaOp::GroupProduct { factors, across, begins }, operands, Type::F32.vector(sums.len()), 0)
    }

    /// Commits pending warpgroup products as a group.
    pub fn group_end(&self) {
        self.run(SsaOp::GroupEnd, smallvec![], 0);
    }

    /// Waits until at most `n` groups of warpgroup products are pending, and returns the accumulators.
    pub fn group_wait(&self, n: u8, sums: &[Id]) -> Id {
        self.give(SsaOp::GroupWait(n), sums.into(), Type::F32.vector(sums.len()), 0)
    }

    /// Compares integers.
    pub fn compare(&self, how: Compare, a: Id, b: Id) -> Id {
        let lanes = self.type_of(a).lanes;
        self.compute(SsaOp::Compare(how), smallvec![a, b], Type::I1.vector(lanes))
    }

    /// `a < b` for floating-point numbers, false if either is NaN.
    pub fn fless(&self, a: Id, b: Id) -> Id {
        let lanes = self.type_of(a).lanes;
        self.compute(SsaOp::FLess, smallvec![a, b], Type::I1.vector(lanes))
    }

    /// Selects `a` if the condition is true, else `b`.
    pub fn select(&self, cond: Id, a: Id, b: Id) -> Id {
        self.compute(SsaOp::Select, smallvec![cond, a, b], self.type_of(a))
    }

    /// Logical negation.
    pub fn not(&self, x: Id) -> Id {
        let lanes = self.type_of(x).lanes;
        let all = self.splat(self.bool(true), lanes);
        self.binary(SsaOp::Xor, x, all)
    }

    /// Converts a signed integer to floating point.
    pub fn int_to_real(&self, x: Id, ty: Type) -> Id {
        self.compute(SsaOp::ToReal, smallvec![x], ty)
    }

    /// Converts a floating-point number to a signed integer: see [`SsaOp::ToInteger`].
    pub fn real_to_int(&self, x: Id, ty: Type) -> Id {
        self.compute(SsaOp::ToInteger, smallvec![x], ty)
    }

    /// Converts a floating-point number in range to a signed integer: see [`SsaOp::ToIntegerInRange`].
    pub fn real_to_int_in_range(&self, x: Id, ty: Type) -> Id {
        self.compute(SsaOp::ToIntegerInRange, smallvec![x], ty)
    }

    /// Converts f32 numbers to 32-bit integers: see [`SsaOp::ToIntegerOrLeast`].
    pub fn real_to_int_or_least(&self, x: Id, nearest: bool) -> Id {
        self.compute(SsaOp::ToIntegerOrLeast { nearest }, smallvec![x], Type::I32.vector(self.type_of(x).lanes))
    }

    /// Truncates an unsigned integer with saturation: see [`SsaOp::TruncateSaturated`].
    pub fn truncate_saturated(&self, x: Id, ty: Type) -> Id {
        self.compute(SsaOp::TruncateSaturated, smallvec![x], ty)
    }

    /// Packs two vectors of signed integers with saturation: see [`SsaOp::PackSaturated`].
    pub fn pack_saturated(&self, a: Id, b: Id, unsigned: bool) -> Id {
        let from = self.type_of(a);
        let half = if from.kind == LaneKind::I32 { Type::I16 } else { Type::I8 };
        self.compute(SsaOp::PackSaturated { unsigned }, smallvec![a, b], half.vector(2 * from.lanes))
    }

    /// Extends an integer to more bits.
    pub fn extend(&self, x: Id, ty: Type, is_signed: bool) -> Id {
        self.compute(if is_signed { SsaOp::ExtendSigned } else { SsaOp::ExtendUnsigned }, smallvec![x], ty)
    }

    /// Converts a pointer to an integer.
    pub fn address(&self, pointer: Id) -> Id {
        self.give(SsaOp::Address, smallvec![pointer], Type::I64, 0)
    }

    /// Truncates an integer to its low bits.
    pub fn truncate(&self, x: Id, ty: Type) -> Id {
        self.compute(SsaOp::Truncate, smallvec![x], ty)
    }

    /// Reinterprets the bits as another type.
    pub fn bitcast(&self, x: Id, ty: Type) -> Id {
        if self.type_of(x) == ty {
            return x;
        }
        self.compute(SsaOp::Bitcast, smallvec![x], ty)
    }

    /// Converts a floating-point number to another width.
    pub fn real_to_real(&self, x: Id, ty: Type) -> Id {
        self.compute(SsaOp::Convert, smallvec![x], ty)
    }

    /// Hides the value's origin from optimizations.
    pub fn opaque(&self, x: Id) -> Id {
        self.give(SsaOp::Opaque, smallvec![x], self.type_of(x), 0)
    }

    // Vectors.

    /// Extracts a lane of a vector.
    pub fn extract(&self, v: Id, lane: usize) -> Id {
        let x = self.compute(SsaOp::Extract(lane), smallvec![v], self.type_of(v).element());
        self.moved_from(x, lane)
    }

    /// Replaces a lane of a vector.
    pub fn insert(&self, v: Id, x: Id, lane: usize) -> Id {
        self.compute(SsaOp::Insert(lane), smallvec![v, x], self.type_of(v))
    }

    /// Selects lanes of two concatenated vectors; `None` lanes are undefined.
    pub fn shuffle(&self, a: Id, b: Id, mask: &[Option<usize>]) -> Id {
        let ty = self.type_of(a).vector(mask.len());
        let first = mask[0].unwrap_or(0);
        let mask = mask.iter().map(|lane| lane.map_or(-1, |l| l as i32)).collect();
        let x = self.compute(SsaOp::Shuffle(mask), smallvec![a, b], ty);
        self.moved_from(x, first)
    }

    /// Records that the first lane of a value comes from lane `lane` of a vector.
    fn moved_from(&self, x: Id, lane: usize) -> Id {
        if lane > 0 {
            self.0.borrow_mut().draft().moved.insert(x, ());
        }
        x
    }

    /// Broadcasts a scalar to `n` lanes.
    pub fn splat(&self, x: Id, n: usize) -> Id {
        if n == 1 {
            return x;
        }
        let Value { ty, def } = self.0.borrow().get(x).clone();
        let ty = ty.vector(n);
        match def {
            Def::Constant(c) => self.constant(ty, smallvec![c.bits[0]; n]),
            Def::Undefined => self.undefined(ty),
            _ => self.give(SsaOp::Splat, smallvec![x], ty, 0),
        }
    }

    // Calls.

    /// Calls a function of the module; returns its result, if any.
    pub fn call(&self, function: FunctionId, arguments: &[Id]) -> Option<Id> {
        let result = self.0.borrow().module.functions[function.at()].result;
        let callee = self.function_address(function);
        self.call_pointer(callee, result, arguments)
    }

    /// Calls through a pointer.
    pub fn call_pointer(&self, callee: Id, result: Option<Type>, arguments: &[Id]) -> Option<Id> {
        let operands = arguments.iter().copied().chain([callee]).collect();
        match result {
            Some(ty) => Some(self.give(SsaOp::Call, operands, ty, 0)),
            None => {
                self.run(SsaOp::Call, operands, 0);
                None
            }
        }
    }

    /// Emits inline assembly with a result and side effects.
    pub fn assembly(&self, assembly: Assembly, operands: &[Id], result: Type) -> Id {
        self.give(SsaOp::Assembly(Box::new(assembly)), operands.into(), result, 0)
    }

    /// Emits inline assembly without a result.
    pub fn assembly_effect(&self, assembly: Assembly, operands: &[Id]) {
        self.run(SsaOp::Assembly(Box::new(assembly)), operands.into(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_have_last_what_crosses_lanes() {
        let b = Builder::new("test");
        let f = b.function("f", Linkage::Internal, None, &[Type::F32.vector(4), Type::F32]);
        b.go_to(f, b.block(f));
        let (v, x) = (b.parameter(0), b.parameter(1));
        let [first, last] = [0, 3].map(|lane| b.extract(v, lane));
        let [low, high] = [0, 2].map(|lane| b.shuffle(v, v, &[Some(lane), Some(lane + 1)]));
        let of = [(last, x), (first, x), (x, last), (last, first), (high, low), (low, high)];
        for (a, c) in of {
            b.binary(SsaOp::FMax, a, c);
        }
        b.binary(SsaOp::FSub, last, x);
        let function = b.finish().functions.remove(0);
        let operands: Vec<(Id, Id)> = function.blocks[0][4..].iter().map(|i| (i.operands[0], i.operands[1])).collect();
        let expected = [(x, last), (first, x), (x, last), (first, last), (low, high), (low, high), (last, x)];
        assert_eq!(operands, expected);
    }

    #[test]
    fn hoisted_code_stands_before_what_was_written_first() {
        let b = Builder::new("test");
        let f = b.function("f", Linkage::Internal, None, &[Type::POINTER, Type::I64]);
        let [entry, header] = [0; 2].map(|_| b.block(f));
        b.go_to(f, entry);
        b.br(header);
        b.go_to(f, header);
        let [i, p] = [Type::I64, Type::POINTER].map(|ty| b.phi(header, ty));
        b.add_incoming(i, b.int(0), entry);
        b.add_incoming(p, b.parameter(0), entry);
        b.store(b.int(1), p, 8);
        let back = b.position();
        b.go_to_hoisted(header);
        let twice = b.add(i, i);
        b.go_back(back);
        b.store(twice, p, 8);
        b.add_incoming(i, twice, header);
        b.add_incoming(p, p, header);
        b.br(header);
        let module = b.finish();
        let text = module.to_string();
        let body: Vec<&str> = text.lines().skip_while(|l| *l != "b1:").collect();
        let expected = [
            "b1:",
            "    v3: ptr = Phi b0: v0, b1: v3",
            "    v2: i64 = Phi b0: i64 0, b1: v6",
            "    v6: i64 = Add v2, v2",
            "    Store i64 1, v3, align 8",
            "    Store v6, v3, align 8",
            "    Br b1",
            "}",
        ];
        assert_eq!(body, expected, "{text}");
    }
}
