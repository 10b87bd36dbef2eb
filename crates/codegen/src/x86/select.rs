//! Instruction selection, from values to machine instructions with virtual registers.
//!
//! A single pass over the blocks in code order. Values that only form an operand of one instruction (an
//! address, a load or broadcast used once, a negated factor) are not emitted at their definition but folded
//! into that instruction.

mod integer;
mod integer_lanes;
mod lanes;
mod vector;

use std::collections::HashMap;

use super::CpuFeatures;
use super::encode::ConditionCode;
use super::inst::{
    Base, BasicBlock, Call, Callee, Class, Inst, MachineFunction, MachineOp, MemoryAddress, MemoryOperand, NONE, Reg,
    Virtual,
};
use super::opcodes::{AND, MASK_AND, widen};
use crate::ssa::{self, BlockId, Def, Id, LaneKind, SsaOp as Ssa, Type};

/// Constant pool of a module, without duplicates.
#[derive(Default)]
pub struct ConstantPool {
    pub bytes: Vec<u8>,
    known: HashMap<Vec<u8>, i32>,
}

impl ConstantPool {
    /// Offset of these bytes in the pool, aligned to their number; they are added if new.
    pub fn place(&mut self, bytes: &[u8]) -> i32 {
        if let Some(at) = self.known.get(bytes) {
            return *at;
        }
        let align = bytes.len().next_power_of_two().min(64);
        self.bytes.resize(self.bytes.len().next_multiple_of(align), 0);
        let at = self.bytes.len() as i32;
        self.bytes.extend_from_slice(bytes);
        self.known.insert(bytes.to_vec(), at);
        at
    }
}

/// Selects the instructions of a function; `outside` says by index which functions are external.
pub fn select(
    f: &ssa::Function,
    machine: CpuFeatures,
    outside: &[bool],
    pool: &mut ConstantPool,
) -> Result<MachineFunction, String> {
    let order = f.order();
    let mut place = vec![usize::MAX; f.blocks.len()];
    order.iter().enumerate().for_each(|(at, b)| place[b.at()] = at);
    let n = f.values.len();
    if f.values.iter().any(|value| value.ty.kind == LaneKind::Bf16) {
        return Err("bf16 numbers that are not integers".into());
    }
    let mut s = Selector {
        f,
        has_masks: machine.has_masks,
        has_avx512_dot: machine.has_avx512_dot,
        outside,
        pool,
        out: MachineFunction::default(),
        n_uses: vec![0; n],
        def_at: vec![None; n],
        user_at: vec![None; n],
        splat_width: vec![0; n],
        regs: vec![NONE; n],
        stack_at: HashMap::new(),
        same_as: (0..n).map(Id::new).collect(),
        n_stores: Vec::new(),
        place,
        outer_loops: Vec::new(),
        constants: HashMap::new(),
        quads: HashMap::new(),
        at: (0, 0),
        block: BasicBlock::default(),
    };
    s.prepare();
    s.find_loops(&order);
    for (at, b) in order.iter().enumerate() {
        s.block(at, *b)?;
    }
    s.place_constants();
    Ok(s.out)
}

/// Region in which a constant is set: before an outermost loop, or in a block outside of loops.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ConstantRegion {
    Loop(usize),
    Block(usize),
}

struct Selector<'f> {
    f: &'f ssa::Function,
    has_masks: bool,
    has_avx512_dot: bool,
    outside: &'f [bool],
    pool: &'f mut ConstantPool,
    out: MachineFunction,
    n_uses: Vec<u32>,
    /// Block and position of each value's instruction, and of its last user.
    def_at: Vec<Option<(usize, usize)>>,
    user_at: Vec<Option<(usize, usize)>>,
    /// Size in bytes of the widest vector to which each scalar is broadcast.
    splat_width: Vec<usize>,
    /// Virtual register of each value.
    regs: Vec<Reg>,
    /// Offset of each stack allocation.
    stack_at: HashMap<Id, usize>,
    /// Value of which each value is an alias.
    same_as: Vec<Id>,
    /// Number of instructions that may write memory before each instruction, by block.
    n_stores: Vec<Vec<u32>>,
    /// Position of each block.
    place: Vec<usize>,
    /// First position of the outermost loop around each position.
    outer_loops: Vec<Option<usize>>,
    constants: HashMap<(i32, usize, ConstantRegion), Reg>,
    /// 16-byte parts of vectors extracted in this block.
    quads: HashMap<(Id, usize), Reg>,
    at: (usize, usize),
    block: BasicBlock,
}

/// Register size in bytes for values of a type.
fn width(ty: Type) -> usize {
    ty.bytes().max(16)
}

fn class_of(ty: Type) -> Class {
    match ty {
        Type { kind: LaneKind::F32 | LaneKind::F64, .. } => Class::Vector,
        Type { lanes: 1, .. } => Class::Integer,
        Type { kind: LaneKind::I1, .. } => Class::Mask,
        _ => Class::Vector,
    }
}

impl Selector<'_> {
    // Analyses before selection.

    fn prepare(&mut self) {
        for (b, block) in self.f.blocks.iter().enumerate() {
            let mut n_stores = 0;
            let mut before = Vec::with_capacity(block.len() + 1);
            for (i, inst) in block.iter().enumerate() {
                before.push(n_stores);
                let is_variable = |id: &Id| matches!(self.op_of(*id), Some(Ssa::Variable(_)));
                n_stores += match inst.op {
                    Ssa::Store => u32::from(!is_variable(&inst.operands[1])),
                    Ssa::MaskedStore | Ssa::Scatter | Ssa::Call => 1,
                    _ => 0,
                };
                if let Some(result) = inst.result {
                    self.def_at[result.at()] = Some((b, i));
                }
                for id in &inst.operands {
                    self.n_uses[id.at()] += 1;
                    self.user_at[id.at()] = Some((b, i));
                }
            }
            before.push(n_stores);
            self.n_stores.push(before);
        }
        for id in (0..self.f.values.len()).map(Id::new) {
            if let Some(x) = self.splat_of(id)
                && width(self.ty(id)) <= self.native()
            {
                self.splat_width[x.at()] = self.splat_width[x.at()].max(width(self.ty(id)));
            }
        }
    }

    /// Register with a scalar in all lanes, if it was loaded with a broadcast.
    fn loaded_splat(&self, id: Id) -> Option<Reg> {
        let x = self.splat_of(id).filter(|_| width(self.ty(id)) <= self.native())?;
        let is_variable = |id: Id| matches!(self.op_of(id), Some(Ssa::Variable(_)));
        let is_load = matches!(self.instruction(x), Some(inst) if matches!(inst.op, Ssa::Load { .. }) && !is_variable(inst.operands[0]))
            && class_of(self.ty(x)) == Class::Vector;
        (is_load && !self.is_folded(x) && self.regs[x.at()] != NONE).then(|| self.regs[x.at()])
    }

    fn find_loops(&mut self, order: &[BlockId]) {
        let mut loops: Vec<(usize, usize)> = Vec::new();
        for (at, b) in order.iter().enumerate() {
            for s in self.f.successors(*b) {
                if self.place[s.at()] <= at {
                    loops.push((self.place[s.at()], at));
                }
            }
        }
        for (at, b) in order.iter().enumerate() {
            let around = loops.iter().filter(|(from, to)| (*from..=*to).contains(&at));
            self.outer_loops.push(around.clone().map(|(from, _)| *from).min());
            let is_inner = |(from, to): &(usize, usize)| *from == at && !loops.iter().any(|(f, t)| f > from && t <= to);
            self.out.blocks.push(BasicBlock {
                depth: around.count(),
                is_inner_loop: loops.iter().any(is_inner),
                successors: self.f.successors(*b).map(|s| self.place[s.at()]).collect(),
                ..BasicBlock::default()
            });
        }
    }

    /// Size in bytes of the machine's vectors.
    fn native(&self) -> usize {
        if self.has_masks { 64 } else { 32 }
    }

    fn ty(&self, id: Id) -> Type {
        self.f.values[id.at()].ty
    }

    fn instruction(&self, id: Id) -> Option<&ssa::Instruction> {
        let (b, i) = self.def_at[id.at()]?;
        Some(&self.f.blocks[b][i])
    }

    /// Operation that defines a value; known for values before the current instruction.
    fn op_of(&self, id: Id) -> Option<&Ssa> {
        self.instruction(id).map(|inst| &inst.op)
    }

    fn constant(&self, id: Id) -> Option<&[u64]> {
        match &self.f.values[id.at()].def {
            Def::Constant(c) => Some(&c.bits),
            _ => None,
        }
    }

    fn integer(&self, id: Id) -> Option<i64> {
        let bits = self.constant(id)?;
        let ty = self.ty(id);
        (ty.lanes == 1 && class_of(ty) == Class::Integer).then(|| match ty.kind {
            LaneKind::I32 => i64::from(bits[0] as i32),
            _ => bits[0] as i64,
        })
    }

    fn is_zero(&self, id: Id) -> bool {
        self.constant(id).is_some_and(|bits| bits.iter().all(|b| *b == 0))
    }

    fn is_undefined(&self, id: Id) -> bool {
        self.f.values[id.at()].def == Def::Undefined
    }

    // Folding.

    /// Only use of a value, if it is in the same block.
    fn only_user(&self, id: Id) -> Option<(usize, usize)> {
        let (b, _) = self.def_at[id.at()]?;
        let (block, i) = self.user_at[id.at()]?;
        (self.n_uses[id.at()] == 1 && block == b).then_some((block, i))
    }

    /// Scalar that is broadcast to a vector.
    fn splat_of(&self, id: Id) -> Option<Id> {
        let inst = self.instruction(id)?;
        (inst.op == Ssa::Splat).then(|| inst.operands[0])
    }

    /// Whether an instruction accepts narrow integers from memory as well as from registers.
    fn takes_short_memory(op: &Ssa) -> bool {
        matches!(op, Ssa::ExtendSigned | Ssa::ExtendUnsigned | Ssa::Splat | Ssa::Insert(_))
    }

    /// Whether a value is folded into its use instead of being emitted at its definition.
    fn is_folded(&self, id: Id) -> bool {
        let Some(inst) = self.instruction(id) else { return false };
        match &inst.op {
            // Lane addresses belong to the instruction that accesses them.
            Ssa::Element(_) => self.ty(id).lanes > 1 || self.integer(inst.operands[1]).is_some(),
            Ssa::Stack(_) => true,
            Ssa::Insert(_) | Ssa::Splat | Ssa::Compare(_) | Ssa::FNeg => self.only_user(id).is_some(),
            Ssa::FLess => self.ty(id).lanes == 1 && self.only_user(id).is_some(),
            Ssa::Load { invariant } => {
                let Some((block, user)) = self.final_user(id) else { return false };
                let (_, at) = self.def_at[id.at()].expect("it has an instruction");
                let is_variable = matches!(self.op_of(inst.operands[0]), Some(Ssa::Variable(_)));
                let n_stores = &self.n_stores[block];
                let takes_it = || match class_of(self.ty(id)) {
                    Class::Vector => true,
                    Class::Integer if self.ty(id).bytes() < 8 => {
                        let (_, first) = self.user_at[id.at()].expect("it has a user");
                        Selector::takes_short_memory(&self.f.blocks[block][first].op)
                    }
                    Class::Integer | Class::Mask => false,
                };
                !is_variable && takes_it() && (*invariant || n_stores[at] == n_stores[user])
            }
            _ => false,
        }
    }

    /// Instruction into which a value used once is finally folded, through instructions that are folded
    /// themselves.
    fn final_user(&self, id: Id) -> Option<(usize, usize)> {
        let (block, at) = self.only_user(id)?;
        let user = &self.f.blocks[block][at];
        match (&user.op, user.result) {
            (Ssa::Insert(_) | Ssa::Splat | Ssa::FNeg, Some(result)) if self.only_user(result).is_some() => {
                self.final_user(result)
            }
            // Copies for phis are emitted at the end of the block.
            (Ssa::Phi(_), _) => None,
            _ => Some((block, at)),
        }
    }

    /// Folds a value to a memory operand of an instruction on its type, if possible.
    fn folded_operand(&mut self, asked: Id) -> Option<MemoryOperand> {
        self.folded_of(asked, 16)
    }

    /// Folds a value to a memory operand of an instruction that reads exactly its lanes.
    fn folded_part(&mut self, id: Id) -> Option<MemoryOperand> {
        self.folded_of(id, 0)
    }

    fn folded_of(&mut self, asked: Id, least_bytes: usize) -> Option<MemoryOperand> {
        let id = self.same_as[asked.at()];
        if !self.is_folded(id) {
            return None;
        }
        let ty = self.ty(id);
        let (load, broadcast) = match self.splat_of(id) {
            Some(x) if self.has_masks && self.is_folded(x) && ty.kind.bytes() >= 4 && ty == self.ty(asked) => (x, true),
            Some(_) => return None,
            None => (id, false),
        };
        let inst = self.instruction(load)?;
        if !matches!(inst.op, Ssa::Load { .. }) || !(broadcast || ty.lanes == 1 || ty.bytes() >= least_bytes) {
            return None;
        }
        let pointer = inst.operands[0];
        let memory = self.address(pointer).ok()?;
        Some(MemoryOperand { memory, broadcast })
    }

    /// Memory address of a pointer.
    fn address(&mut self, pointer: Id) -> Result<MemoryAddress, String> {
        let mut at = self.same_as[pointer.at()];
        let mut disp = 0i64;
        loop {
            let inst = match self.instruction(at) {
                Some(inst) if self.is_folded(at) => inst,
                _ => break,
            };
            match inst.op {
                Ssa::Element(element) => {
                    let (base, index) = (inst.operands[0], inst.operands[1]);
                    let index = self.integer(index).expect("folded elements have constant numbers");
                    disp += index * element.bytes() as i64;
                    at = self.same_as[base.at()];
                }
                Ssa::Stack(_) => {
                    let disp = i32::try_from(disp + self.stack_at[&at] as i64).map_err(|_| "stack")?;
                    return Ok(MemoryAddress { base: Base::Stack, index: None, disp });
                }
                _ => break,
            }
        }
        let base = self.reg(at)?;
        match i32::try_from(disp) {
            Ok(disp) => Ok(MemoryAddress { base: Base::Register(base), index: None, disp }),
            Err(_) => {
                let far = self.emit_new(MachineOp::Integer(disp), Class::Integer, &[], 8);
                Ok(MemoryAddress { base: Base::Register(base), index: Some((far, 0)), disp: 0 })
            }
        }
    }

    // Registers.

    fn virtual_register(&mut self, class: Class, bytes: usize) -> Reg {
        self.out.virtuals.push(Virtual { class, bytes, pool: None });
        Reg::new(self.out.virtuals.len() - 1)
    }

    fn register_of(&mut self, ty: Type) -> Reg {
        let class = class_of(ty);
        self.virtual_register(class, if class == Class::Vector { ty.bytes().max(2) } else { 8 })
    }

    fn emit(&mut self, inst: Inst) {
        self.block.insts.push(inst);
    }

    fn emit_new(&mut self, op: MachineOp, class: Class, uses: &[Reg], bytes: usize) -> Reg {
        let d = self.virtual_register(class, bytes);
        self.emit(Inst::new(op, d, uses, bytes));
        d
    }

    fn region(&self) -> ConstantRegion {
        let at = self.place[self.at.0];
        self.outer_loops[at].map_or(ConstantRegion::Block(at), ConstantRegion::Loop)
    }

    /// Register with a constant of the pool, set before the outermost loop.
    fn pooled(&mut self, bytes: &[u8], class: Class) -> Reg {
        let at = self.pool.place(bytes);
        let key = (at, bytes.len(), self.region());
        if let Some(r) = self.constants.get(&key) {
            return *r;
        }
        let r = self.virtual_register(class, bytes.len());
        self.out.virtuals[r.at()].pool = Some(at);
        self.constants.insert(key, r);
        r
    }

    fn constant_register(&mut self, bits: &[u64], kind: LaneKind) -> Reg {
        if kind == LaneKind::I1 {
            let bits = bits.iter().enumerate().fold(0u16, |all, (lane, b)| all | ((*b as u16) << lane));
            return self.pooled(&bits.to_le_bytes(), Class::Mask);
        }
        let bytes = constant_bytes(bits, kind);
        self.pooled(&bytes, Class::Vector)
    }

    /// Vector constant with the same bits in every lane.
    fn splat_constant(&mut self, bits: u64, ty: Type) -> Reg {
        let lanes = width(ty) / ty.kind.bytes();
        self.constant_register(&vec![bits; lanes], ty.kind)
    }

    /// Register of a value, which is emitted now if it was folded.
    fn reg(&mut self, id: Id) -> Result<Reg, String> {
        let id = self.same_as[id.at()];
        let ty = self.ty(id);
        match &self.f.values[id.at()].def {
            Def::Constant(c) => match class_of(ty) {
                Class::Integer => {
                    let value = self.integer(id).expect("a scalar");
                    Ok(self.emit_new(MachineOp::Integer(value), Class::Integer, &[], 8))
                }
                Class::Vector | Class::Mask => Ok(self.constant_register(&c.bits, ty.kind)),
            },
            Def::Undefined => {
                let d = self.register_of(ty);
                self.emit(Inst::new(MachineOp::Undefined, d, &[], width(ty)));
                Ok(d)
            }
            Def::Function(f) if self.outside[f.at()] => Err("address of a function outside the module".into()),
            Def::Function(f) => Ok(self.emit_new(MachineOp::FunctionAddress(f.at()), Class::Integer, &[], 8)),
            Def::Global(_) => Err("a variable of the module".into()),
            Def::Argument(_) => Ok(self.regs[id.at()]),
            Def::Instruction => {
                if self.regs[id.at()] == NONE {
                    if !self.is_folded(id) {
                        return Err("a value used before it is set".into());
                    }
                    if let Some(splat) = self.loaded_splat(id) {
                        return Ok(splat);
                    }
                    return self.write_out(id);
                }
                Ok(self.regs[id.at()])
            }
        }
    }

    /// Emits a folded value to a new register.
    fn write_out(&mut self, id: Id) -> Result<Reg, String> {
        let f = self.f;
        let (b, i) = self.def_at[id.at()].expect("folded values have instructions");
        let inst = &f.blocks[b][i];
        match inst.op {
            Ssa::Element(_) | Ssa::Stack(_) => {
                let memory = self.address(id)?;
                let d = self.virtual_register(Class::Integer, 8);
                self.emit(Inst::new(MachineOp::Address, d, &[], 8).with(memory, false));
                Ok(d)
            }
            _ => {
                let d = self.register_of(self.ty(id));
                self.value_into(d, id, inst)?;
                Ok(d)
            }
        }
    }

    // Blocks.

    fn block(&mut self, at: usize, b: BlockId) -> Result<(), String> {
        self.quads.clear();
        self.block = std::mem::take(&mut self.out.blocks[at]);
        self.at = (b.at(), 0);
        if at == 0 {
            self.parameters();
        }
        let f = self.f;
        for inst in &f.blocks[b.at()] {
            self.instruction_at(b, inst)?;
            self.at.1 += 1;
        }
        self.out.blocks[at] = std::mem::take(&mut self.block);
        Ok(())
    }

    fn parameters(&mut self) {
        for id in 0..self.f.values.len() {
            if let Def::Argument(number) = self.f.values[id].def {
                let r = self.virtual_register(Class::Integer, 8);
                self.regs[id] = r;
                assert_eq!(number, self.out.parameters.len(), "arguments come in order");
                self.out.parameters.push(r);
            }
        }
        // Variables and phis have registers from the start.
        for block in &self.f.blocks {
            for inst in block {
                let Some(result) = inst.result else { continue };
                match inst.op {
                    Ssa::Variable(ty) => self.regs[result.at()] = self.register_of(ty),
                    Ssa::Phi(_) => self.regs[result.at()] = self.register_of(self.ty(result)),
                    Ssa::Stack(bytes) => {
                        self.stack_at.insert(result, self.out.stack_bytes);
                        self.out.stack_bytes += bytes.next_multiple_of(64);
                    }
                    _ => {}
                }
            }
        }
    }

    fn instruction_at(&mut self, b: BlockId, inst: &ssa::Instruction) -> Result<(), String> {
        let is_long = |id: &Id| match class_of(self.ty(*id)) {
            Class::Integer => false,
            // Lane addresses are never in a register.
            Class::Vector => self.ty(*id).bytes() > self.native() && !matches!(self.op_of(*id), Some(Ssa::Element(_))),
            Class::Mask => self.ty(*id).lanes > 16,
        };
        if inst.result.iter().chain(&inst.operands).any(is_long) {
            return Err("vectors that are too long".into());
        }
        match &inst.op {
            Ssa::Variable(_) | Ssa::Stack(_) | Ssa::Phi(_) => return Ok(()),
            Ssa::Store => return self.store(inst),
            Ssa::MaskedStore => return self.masked_store(inst),
            Ssa::Scatter => return self.scatter(inst),
            Ssa::Prefetch { for_write } => {
                let memory = self.address(inst.operands[0])?;
                self.emit(Inst::new(MachineOp::Prefetch { for_write: *for_write }, NONE, &[], 0).with(memory, false));
                return Ok(());
            }
            Ssa::Call => return self.call(inst),
            Ssa::Br(to) => {
                self.copies(b, *to, false)?;
                self.emit(Inst::new(MachineOp::Jump(self.place[to.at()]), NONE, &[], 0));
                return Ok(());
            }
            Ssa::CondBr(then, otherwise) => return self.branch(b, inst.operands[0], *then, *otherwise),
            Ssa::Return if inst.operands.is_empty() => {
                self.emit(Inst::new(MachineOp::Return, NONE, &[], 0));
                return Ok(());
            }
            Ssa::Bitcast | Ssa::Opaque => {
                let result = inst.result.expect("copies give values");
                let from = self.same_as[inst.operands[0].at()];
                if class_of(self.ty(result)) != class_of(self.ty(from)) {
                    return self.move_bits(result, from);
                }
                // The source, if folded, is emitted here, as the user refers to this value.
                if self.is_folded(from) {
                    self.regs[result.at()] = self.reg(from)?;
                } else {
                    self.same_as[result.at()] = from;
                }
                return Ok(());
            }
            _ => {}
        }
        let result = inst.result.ok_or_else(|| format!("{:?}", inst.op))?;
        if self.is_folded(result) || self.n_uses[result.at()] == 0 {
            return Ok(());
        }
        if let Some(same) = self.renamed(result, inst)? {
            self.regs[result.at()] = same;
            return Ok(());
        }
        if let (Ssa::Load { .. }, w @ 1.., Class::Vector) =
            (&inst.op, self.splat_width[result.at()], class_of(self.ty(result)))
            && !matches!(self.op_of(inst.operands[0]), Some(Ssa::Variable(_)))
        {
            // A broadcast load costs the same as a scalar load.
            let d = self.virtual_register(Class::Vector, w);
            let memory = self.address(inst.operands[0])?;
            let op = lanes::broadcast(self.ty(result).kind, w);
            self.emit(Inst::new(MachineOp::Unary(op), d, &[], w).with(memory, false));
            self.regs[result.at()] = d;
            return Ok(());
        }
        let d = self.register_of(self.ty(result));
        self.value_into(d, result, inst)?;
        self.regs[result.at()] = d;
        Ok(())
    }

    /// Moves bits between register classes.
    fn move_bits(&mut self, result: Id, from: Id) -> Result<(), String> {
        let (ty, of) = (self.ty(result), self.ty(from));
        let op = match (class_of(of), class_of(ty)) {
            (Class::Integer, Class::Vector) if ty.bytes() >= 4 => MachineOp::FromInteger { wide: ty.bytes() == 8 },
            (Class::Vector, Class::Integer) if ty.bytes() >= 4 => MachineOp::ExtractInteger(ty.bytes(), 0),
            _ => return Err("bits moved between kinds of registers".into()),
        };
        let x = self.reg(from)?;
        let d = self.register_of(ty);
        self.emit(Inst::new(op, d, &[x], 16));
        self.regs[result.at()] = d;
        Ok(())
    }

    /// Register that already holds an instruction's result.
    fn renamed(&mut self, id: Id, inst: &ssa::Instruction) -> Result<Option<Reg>, String> {
        if let Some(splat) = self.loaded_splat(id) {
            return Ok(Some(splat));
        }
        Ok(match &inst.op {
            Ssa::Extract(0) if [id, inst.operands[0]].iter().all(|x| class_of(self.ty(*x)) == Class::Vector) => {
                Some(self.reg(inst.operands[0])?)
            }
            Ssa::Shuffle(mask)
                if class_of(self.ty(inst.operands[0])) != Class::Integer
                    && mask.iter().enumerate().all(|(lane, m)| *m < 0 || *m as usize == lane)
                    && mask.len() <= self.ty(inst.operands[0]).lanes =>
            {
                Some(self.reg(inst.operands[0])?)
            }
            _ => None,
        })
    }

    fn branch(&mut self, b: BlockId, cond: Id, then: BlockId, otherwise: BlockId) -> Result<(), String> {
        if let Some(cond) = self.constant(cond) {
            // The other branch is never taken; its blocks stay.
            let to = if cond[0] != 0 { then } else { otherwise };
            self.copies(b, to, false)?;
            self.emit(Inst::new(MachineOp::Jump(self.place[to.at()]), NONE, &[], 0));
            return Ok(());
        }
        let condition = self.flags(cond)?;
        self.copies(b, then, true)?;
        self.copies(b, otherwise, true)?;
        self.emit(Inst::new(MachineOp::JumpIf(condition, self.place[then.at()]), NONE, &[], 0));
        self.emit(Inst::new(MachineOp::Jump(self.place[otherwise.at()]), NONE, &[], 0));
        Ok(())
    }

    /// Sets the flags for a boolean, and returns the condition code under which it is true.
    fn flags(&mut self, cond: Id) -> Result<ConditionCode, String> {
        let cond = self.same_as[cond.at()];
        if self.is_folded(cond) {
            let inst = self.instruction(cond).expect("folded values have instructions");
            let (op, a, b) = (inst.op.clone(), inst.operands[0], *inst.operands.last().expect("two operands"));
            match op {
                Ssa::Compare(how) => {
                    let bytes = self.compared_bytes(a)?;
                    let constant = self.integer(b).and_then(|c| i32::try_from(c).ok());
                    let a = self.reg(a)?;
                    match constant {
                        Some(c) => self.emit(Inst::new(MachineOp::CompareConstant(c), NONE, &[a], bytes)),
                        None => {
                            let b = self.reg(b)?;
                            self.emit(Inst::new(MachineOp::Compare, NONE, &[a, b], bytes));
                        }
                    }
                    return Ok(integer::condition(how));
                }
                Ssa::FLess => {
                    let wide = self.ty(a).kind == LaneKind::F64;
                    let (a, b) = (self.reg(a)?, self.reg(b)?);
                    self.emit(Inst::new(MachineOp::CompareReals { wide }, NONE, &[b, a], 16));
                    return Ok(ConditionCode::Above);
                }
                _ => {}
            }
        }
        let cond = self.reg(cond)?;
        self.emit(Inst::new(MachineOp::Test, NONE, &[cond], 8));
        Ok(ConditionCode::NotEqual)
    }

    /// Sets the phis of a successor, without changing the flags.
    fn copies(&mut self, b: BlockId, to: BlockId, is_one_of_two: bool) -> Result<(), String> {
        let f = self.f;
        let phis: Vec<(Id, Id)> = f.blocks[to.at()]
            .iter()
            .filter_map(|inst| match &inst.op {
                Ssa::Phi(from) => {
                    let at = from.iter().position(|from| *from == b)?;
                    Some((inst.result?, inst.operands[at]))
                }
                _ => None,
            })
            .collect();
        for &(phi, value) in &phis {
            let d = self.regs[phi.at()];
            let value = self.same_as[value.at()];
            if value == phi {
                continue;
            }
            self.copy_into(d, value)?;
            let from = *self.block.insts.last().expect("just written");
            let mut reads_another = false;
            from.each_use(|r| reads_another |= r != d && phis.iter().any(|(other, _)| self.regs[other.at()] == r));
            if reads_another {
                return Err("phis that exchange values".into());
            }
            if is_one_of_two {
                self.block.edge_copies.push((d, self.place[to.at()]));
            }
        }
        Ok(())
    }

    /// Emits one instruction that moves a value to a register.
    fn copy_into(&mut self, d: Reg, value: Id) -> Result<(), String> {
        let ty = self.ty(value);
        let bytes = if class_of(ty) == Class::Vector { width(ty) } else { 8 };
        if self.is_undefined(value) {
            self.emit(Inst::new(MachineOp::Undefined, d, &[], bytes));
        } else if let Some(value) = self.integer(value) {
            self.emit(Inst::new(MachineOp::Integer(value), d, &[], 8));
        } else if class_of(ty) == Class::Integer
            && self.is_folded(value)
            && self.op_of(value).is_some_and(|op| !matches!(op, Ssa::Compare(_) | Ssa::FLess))
        {
            let memory = self.address(value)?;
            self.emit(Inst::new(MachineOp::Address, d, &[], 8).with(memory, false));
        } else if self.constant(value).is_some() && class_of(ty) == Class::Vector {
            let bits = self.constant(value).expect("a constant").to_vec();
            let at = self.pool.place(&constant_bytes(&bits, ty.kind));
            let memory = MemoryAddress { base: Base::Pool, index: None, disp: at };
            let op = if bits.iter().all(|b| *b == 0) { MachineOp::Constant } else { MachineOp::Move };
            let inst = Inst::new(op, d, &[], ty.bytes());
            self.emit(if op == MachineOp::Move { inst.with(memory, false) } else { inst });
        } else {
            let from = self.reg(value)?;
            self.emit(Inst::new(MachineOp::Move, d, &[from], bytes));
        }
        Ok(())
    }

    // Memory and calls.

    fn store(&mut self, inst: &ssa::Instruction) -> Result<(), String> {
        let (value, to) = (self.same_as[inst.operands[0].at()], inst.operands[1]);
        if matches!(self.op_of(to), Some(Ssa::Variable(_))) {
            return self.copy_into(self.regs[to.at()], value);
        }
        let ty = self.ty(value);
        if ty.kind == LaneKind::I1 {
            return Err("truth values in memory".into());
        }
        let value = self.reg(value)?;
        let memory = self.address(to)?;
        self.emit(Inst::new(MachineOp::Store, NONE, &[value], ty.bytes()).with(memory, false));
        Ok(())
    }

    fn masked_store(&mut self, inst: &ssa::Instruction) -> Result<(), String> {
        let (value, to, mask) = (inst.operands[0], inst.operands[1], inst.operands[2]);
        let ty = self.ty(value);
        let (value, mask) = (self.reg(value)?, self.memory_mask(mask, ty)?);
        let memory = self.address(to)?;
        let op = MachineOp::StoreMasked(ty.kind.bytes());
        self.emit(Inst::new(op, NONE, &[value, mask], width(ty)).with(memory, false));
        Ok(())
    }

    /// Mask for lanes of `lane_bytes` bytes.
    fn mask(&mut self, id: Id, lane_bytes: usize) -> Result<Reg, String> {
        let mask = self.reg(id)?;
        if self.has_masks || lane_bytes == 4 {
            return Ok(mask);
        }
        let ty = self.ty(id);
        let lanes = Type { kind: LaneKind::I32, ..ty };
        if lane_bytes == 8 {
            let bytes = (ty.lanes * lane_bytes).max(16);
            return Ok(self.emit_new(MachineOp::Unary(widen(4, 8, true)), Class::Vector, &[mask], bytes));
        }
        let narrowed = self.virtual_register(Class::Vector, 16);
        self.narrow_into(narrowed, mask, lanes, if lane_bytes == 1 { LaneKind::I8 } else { LaneKind::I16 })?;
        Ok(narrowed)
    }

    /// Mask for memory operations, in which lanes beyond the type must not be set. The mask of a partial
    /// vector is computed as that of a whole one and may have such lanes, which are cleared.
    fn memory_mask(&mut self, id: Id, ty: Type) -> Result<Reg, String> {
        let (lane, lanes) = (ty.kind.bytes(), self.ty(id).lanes);
        if !self.has_masks && lane < 4 {
            return Err("short lanes in a mask".into());
        }
        let mask = self.mask(id, lane)?;
        if ty.bytes() >= 16 || self.constant(id).is_some() {
            return Ok(mask);
        }
        if self.has_masks {
            let existing = self.constant_register(&vec![1; lanes], LaneKind::I1);
            return Ok(self.emit_new(MachineOp::MaskBinary(MASK_AND), Class::Mask, &[mask, existing], 2));
        }
        let mut existing = vec![u64::MAX; lanes];
        existing.resize(16 / lane, 0);
        let existing = self.constant_register(&existing, if lane == 8 { LaneKind::I64 } else { LaneKind::I32 });
        Ok(self.emit_new(MachineOp::Binary(AND), Class::Vector, &[mask, existing], 16))
    }

    /// Base address of lanes, their offsets, and a copy of the mask, which will be clobbered.
    fn lane_addresses(&mut self, pointers: Id, mask: Id, ty: Type) -> Result<(MemoryAddress, Reg, Reg), String> {
        if !self.has_masks {
            return Err("gathered lanes".into());
        }
        let f = self.f;
        let (b, i) = self.def_at[pointers.at()].ok_or("one address for all lanes")?;
        let inst = &f.blocks[b][i];
        let (Ssa::Element(element), [base, numbers]) = (&inst.op, inst.operands.as_slice()) else {
            return Err("addresses of lanes".into());
        };
        if element.bytes() != ty.kind.bytes() || self.ty(*numbers).kind != LaneKind::I32 || ty.kind.bytes() < 4 {
            return Err("far addresses of lanes".into());
        }
        let memory = self.address(*base)?;
        if memory.index.is_some() {
            return Err("a far address of lanes".into());
        }
        let numbers = self.reg(*numbers)?;
        let mask = self.memory_mask(mask, ty)?;
        let (class, bytes) = (self.out.virtuals[mask.at()].class, self.out.virtuals[mask.at()].bytes);
        let mask = self.emit_new(MachineOp::Move, class, &[mask], bytes);
        Ok((memory, numbers, mask))
    }

    fn scatter(&mut self, inst: &ssa::Instruction) -> Result<(), String> {
        let ty = self.ty(inst.operands[0]);
        let (memory, numbers, mask) = self.lane_addresses(inst.operands[1], inst.operands[2], ty)?;
        let value = self.reg(inst.operands[0])?;
        let op = MachineOp::Scatter { wide: ty.kind.bytes() == 8 };
        self.emit(Inst::new(op, NONE, &[mask, numbers, value], width(ty)).with(memory, false));
        Ok(())
    }

    fn call(&mut self, inst: &ssa::Instruction) -> Result<(), String> {
        let (callee, arguments) = inst.operands.split_last().expect("a callee");
        let mut call = Call { callee: Callee::Function(0), arguments: Vec::new(), reals: Vec::new() };
        for argument in arguments {
            let r = self.reg(*argument)?;
            match class_of(self.ty(*argument)) {
                Class::Integer => call.arguments.push(r),
                Class::Vector if arguments.len() <= 2 && call.arguments.is_empty() => call.reals.push(r),
                _ => return Err("arguments of a call".into()),
            }
        }
        call.callee = match &self.f.values[callee.at()].def {
            Def::Function(f) if self.outside[f.at()] => Callee::Outside(f.at()),
            Def::Function(f) => Callee::Function(f.at()),
            _ => Callee::Pointer(self.reg(*callee)?),
        };
        let d = match inst.result {
            Some(result) => {
                self.regs[result.at()] = self.register_of(self.ty(result));
                self.regs[result.at()]
            }
            None => NONE,
        };
        self.out.calls.push(call);
        self.emit(Inst::new(MachineOp::Call(self.out.calls.len() - 1), d, &[], 16));
        Ok(())
    }

    /// Sets each constant before the outermost loop that uses it, or at the start of its block.
    fn place_constants(&mut self) {
        let mut at: Vec<(usize, i32, usize, Reg)> = Vec::new();
        for ((pool, _, region), r) in &self.constants {
            let (block, place) = match *region {
                ConstantRegion::Block(b) => (b, 0),
                ConstantRegion::Loop(header) => {
                    let from = (0..header).rev().find(|b| self.out.blocks[*b].successors.contains(&header));
                    let block = from.unwrap_or(0);
                    let insts = &self.out.blocks[block].insts;
                    // Constants are set before the flags.
                    let sets_flags = |i: &Inst| {
                        matches!(
                            i.op,
                            MachineOp::Compare
                                | MachineOp::CompareConstant(_)
                                | MachineOp::Test
                                | MachineOp::CompareReals { .. }
                        )
                    };
                    let jumps = insts.iter().any(|i| matches!(i.op, MachineOp::JumpIf(..)));
                    let place = if jumps { insts.iter().rposition(sets_flags).unwrap_or(0) } else { insts.len() - 1 };
                    (block, place)
                }
            };
            at.push((block, *pool, place, *r));
        }
        at.sort_unstable_by_key(|(block, pool, place, _)| (*block, std::cmp::Reverse(*place), *pool));
        for (block, _, place, r) in at {
            let bytes = self.out.virtuals[r.at()].bytes;
            self.out.blocks[block].insts.insert(place, Inst::new(MachineOp::Constant, r, &[], bytes));
        }
    }
}

fn constant_bytes(bits: &[u64], kind: LaneKind) -> Vec<u8> {
    bits.iter().flat_map(|b| b.to_le_bytes()[..kind.bytes()].to_vec()).collect()
}
