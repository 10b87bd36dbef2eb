//! Emission of a function after register allocation.
//!
//! Frame layout: the caller's frame pointer, callee-saved registers, then, aligned to a cache line, call
//! arguments, stack memory, and spilled values.

use std::collections::HashMap;

use super::encode::{
    Assembler, ConditionCode, EncodedBase, EncodedMemory, Extra, Label, RAX, RBP, RBX, RCX, RDI, RDX, RSI, RSP, Rm,
    VectorOperands,
};
use super::inst::{self, Callee, Class, Inst, MachineFunction, MachineOp, MemoryAddress, NONE, Reg, Virtual};
use super::opcodes::*;
use super::regalloc::{INTEGER_SCRATCH, Location, MASK_SCRATCH, Registers};

/// Registers of the first integer arguments.
const ARGUMENTS: [u8; 6] = [RDI, RSI, RDX, RCX, 8, 9];
/// Callee-saved registers.
const CALLEE_SAVED: [u8; 5] = [RBX, 12, 13, 14, 15];

/// Emits a function.
pub fn emit(
    asm: &mut Assembler,
    f: &MachineFunction,
    places: &[Location],
    registers: &Registers,
    has_masks: bool,
    pool: &[u8],
) {
    let mut e = Emitter {
        asm,
        f,
        places,
        registers,
        has_masks,
        pool,
        stack_offset: 0,
        slots: HashMap::new(),
        saved: Vec::new(),
        labels: Vec::new(),
    };
    e.function();
}

struct Emitter<'f> {
    asm: &'f mut Assembler,
    f: &'f MachineFunction,
    places: &'f [Location],
    registers: &'f Registers,
    has_masks: bool,
    pool: &'f [u8],
    /// Offset of the function's stack memory.
    stack_offset: i32,
    /// Stack offsets of spilled values.
    slots: HashMap<Reg, i32>,
    saved: Vec<u8>,
    labels: Vec<Label>,
}

impl Emitter<'_> {
    fn function(&mut self) {
        let n_stack_arguments = self.f.calls.iter().map(|c| c.arguments.len().saturating_sub(6)).max().unwrap_or(0);
        let mut frame = (n_stack_arguments * 8).next_multiple_of(64);
        self.stack_offset = frame as i32;
        frame += self.f.stack_bytes;
        // Widest first, so that all are aligned.
        let mut widest: HashMap<Reg, usize> = HashMap::new();
        for (v, place) in self.places.iter().enumerate() {
            if let Location::Memory(slot) = place
                && self.f.virtuals[v].pool.is_none()
            {
                let bytes = widest.entry(*slot).or_insert(8);
                *bytes = (*bytes).max(self.f.virtuals[v].bytes.next_power_of_two());
            }
        }
        let mut all: Vec<(usize, Reg)> = widest.into_iter().map(|(v, bytes)| (bytes, v)).collect();
        all.sort_unstable_by_key(|(bytes, v)| (std::cmp::Reverse(*bytes), *v));
        for (bytes, v) in all {
            self.slots.insert(v, frame as i32);
            frame += bytes;
        }
        // Reads of a short value may extend beyond it.
        frame += if self.slots.is_empty() { 0 } else { 64 };
        let integer = |r: u8| {
            self.places
                .iter()
                .zip(&self.f.virtuals)
                .any(|(p, v)| *p == Location::Register(r) && v.class == Class::Integer)
        };
        self.saved = CALLEE_SAVED.into_iter().filter(|r| integer(*r)).collect();
        self.asm.push(RBP);
        self.asm.move_register(RBP, RSP);
        for r in &self.saved {
            self.asm.push(*r);
        }
        if frame > 0 || !self.f.calls.is_empty() {
            self.asm.with_constant(4, RSP, -64, true);
            if frame > 0 {
                self.asm.with_constant(5, RSP, frame.next_multiple_of(64) as i32, true);
            }
        }
        self.parameters();
        self.labels = self.f.blocks.iter().map(|_| self.asm.label()).collect();
        for (b, block) in self.f.blocks.iter().enumerate() {
            if block.is_inner_loop {
                self.asm.align(32);
            }
            self.asm.bind(self.labels[b]);
            let mut at = 0;
            while at < block.insts.len() {
                let inst = &block.insts[at];
                at += 1;
                match inst.op {
                    MachineOp::JumpIf(condition, then) => {
                        let Some(Inst { op: MachineOp::Jump(otherwise), .. }) = block.insts.get(at) else {
                            unreachable!("a jump follows each conditional one")
                        };
                        at += 1;
                        if then == b + 1 {
                            self.asm.jump_if(condition.not(), self.labels[*otherwise]);
                        } else {
                            self.asm.jump_if(condition, self.labels[then]);
                            self.jump(b, *otherwise);
                        }
                    }
                    MachineOp::Jump(to) => self.jump(b, to),
                    MachineOp::Return => self.leave(),
                    _ => self.inst(inst),
                }
            }
        }
        self.asm.resolve_labels();
    }

    fn jump(&mut self, from: usize, to: usize) {
        if to != from + 1 {
            self.asm.jump(self.labels[to]);
        }
    }

    fn leave(&mut self) {
        self.zero_upper();
        let n = self.saved.len() as i32;
        self.asm.lea(RSP, EncodedMemory { base: EncodedBase::Register(RBP), index: None, disp: -8 * n });
        for r in self.saved.iter().rev() {
            self.asm.pop(*r);
        }
        self.asm.pop(RBP);
        self.asm.code.push(0xc3);
    }

    /// Emits `vzeroupper`, as SSE code is slow while the upper halves of registers are in use.
    fn zero_upper(&mut self) {
        self.asm.code.extend([0xc5, 0xf8, 0x77]);
    }

    // Places.

    fn place(&self, v: Reg) -> Location {
        self.places[v.at()]
    }

    /// Address of a spilled value.
    fn slot(&self, v: Reg) -> EncodedMemory {
        if let Some(at) = self.f.virtuals[v.at()].pool {
            return EncodedMemory { base: EncodedBase::Pool, index: None, disp: at };
        }
        let Location::Memory(slot) = self.place(v) else { unreachable!("it has no register") };
        EncodedMemory { base: EncodedBase::Register(RSP), index: None, disp: self.slots[&slot] }
    }

    /// Register of an integer, which is loaded into a scratch register if it is spilled.
    fn integer(&mut self, v: Reg, scratch: usize) -> u8 {
        match self.place(v) {
            Location::Register(r) => r,
            _ => {
                let from = self.slot(v);
                self.asm.load(INTEGER_SCRATCH[scratch], from);
                INTEGER_SCRATCH[scratch]
            }
        }
    }

    fn integer_rm(&self, v: Reg) -> Rm {
        match self.place(v) {
            Location::Register(r) => Rm::Register(r),
            _ => Rm::Memory(self.slot(v)),
        }
    }

    /// Register that an instruction writes.
    fn destination(&self, v: Reg) -> u8 {
        match (self.place(v), self.f.virtuals[v.at()].class) {
            (Location::Register(r), _) => r,
            (Location::Memory(_), Class::Integer) => INTEGER_SCRATCH[0],
            (Location::Memory(_), Class::Vector) => self.registers.vector_scratch()[0],
            (Location::Memory(_), Class::Mask) => MASK_SCRATCH[0],
            (Location::Nowhere, _) => unreachable!("what is written has a place"),
        }
    }

    /// Stores a scratch register that was written to a spilled value.
    fn written(&mut self, v: Reg) {
        if !matches!(self.place(v), Location::Memory(_)) {
            return;
        }
        let (to, from) = (self.slot(v), self.destination(v));
        let Virtual { class, bytes, .. } = self.f.virtuals[v.at()];
        match class {
            Class::Integer => self.asm.store(to, from, 8),
            Class::Vector => self.store_vector(to, from, bytes),
            Class::Mask => self.asm.vector(MASK_STORE, mask_operands(from, 0, Rm::Memory(to), 16)),
        }
    }

    fn address(&mut self, memory: MemoryAddress) -> EncodedMemory {
        let base = match memory.base {
            inst::Base::Register(v) => EncodedBase::Register(self.integer(v, 0)),
            inst::Base::Stack => {
                return EncodedMemory {
                    base: EncodedBase::Register(RSP),
                    index: None,
                    disp: memory.disp + self.stack_offset,
                };
            }
            inst::Base::Pool => EncodedBase::Pool,
        };
        let index = memory.index.map(|(v, log_scale)| (self.integer(v, 1), log_scale));
        EncodedMemory { base, index, disp: memory.disp }
    }

    // Vectors.

    fn move_vector(&mut self, to: u8, from: u8, bytes: usize) {
        if to != from {
            self.plain(MOVE, [to, 0], Rm::Register(from), bytes, None);
        }
    }

    fn load_vector(&mut self, to: u8, from: EncodedMemory, bytes: usize) {
        self.plain(load(bytes), [to, 0], Rm::Memory(from), bytes, None);
    }

    fn store_vector(&mut self, to: EncodedMemory, from: u8, bytes: usize) {
        match bytes {
            2 => self.plain(extract_integer(2), [from, 0], Rm::Memory(to), 16, Some(0)),
            _ => self.plain(store(bytes), [from, 0], Rm::Memory(to), bytes, None),
        }
    }

    fn plain(&mut self, op: Opcode, [reg, vvvv]: [u8; 2], rm: Rm, bytes: usize, immediate: Option<u8>) {
        let o = VectorOperands {
            reg,
            vvvv,
            rm,
            width: bytes.max(16) as u8,
            unit: op.unit(bytes, false) as u8,
            extra: Extra::default(),
            immediate,
        };
        self.asm.vector(op, o);
    }

    /// Register of a vector, which is loaded into a scratch register if it is spilled.
    fn vector(&mut self, v: Reg, scratch: usize) -> u8 {
        match self.place(v) {
            Location::Register(r) => r,
            _ => {
                let (from, bytes) = (self.slot(v), self.f.virtuals[v.at()].bytes);
                let to = self.registers.vector_scratch()[scratch];
                self.load_vector(to, from, bytes);
                to
            }
        }
    }

    fn vector_rm(&self, v: Reg) -> Rm {
        match self.place(v) {
            Location::Register(r) => Rm::Register(r),
            _ => Rm::Memory(self.slot(v)),
        }
    }

    /// Last operand: memory, or the register that memory would replace.
    fn last(&mut self, inst: &Inst, at: usize) -> (Rm, Extra) {
        match inst.operand {
            Some(operand) => {
                let address = self.address(operand.memory);
                (Rm::Memory(address), Extra { broadcast: operand.broadcast, ..Extra::default() })
            }
            None => (self.vector_rm(inst.uses[at]), Extra::default()),
        }
    }

    fn mask(&mut self, v: Reg, scratch: usize) -> u8 {
        match self.place(v) {
            Location::Register(r) => r,
            _ => {
                let from = self.slot(v);
                let to = MASK_SCRATCH[scratch];
                self.asm.vector(MASK_LOAD, mask_operands(to, 0, Rm::Memory(from), 16));
                to
            }
        }
    }

    fn inst(&mut self, inst: &Inst) {
        match inst.op {
            MachineOp::Undefined => {}
            MachineOp::Move => self.move_(inst),
            MachineOp::Constant => self.constant(inst),
            MachineOp::Store => {
                let (v, operand) = (inst.uses[0], inst.operand.expect("an address"));
                if self.f.virtuals[v.at()].class == Class::Integer {
                    // The address occupies one of the two scratch registers.
                    let mut to = self.address(operand.memory);
                    if to.index.is_some() && matches!(self.place(v), Location::Memory(_)) {
                        self.asm.lea(INTEGER_SCRATCH[0], to);
                        to = EncodedMemory { base: EncodedBase::Register(INTEGER_SCRATCH[0]), index: None, disp: 0 };
                    }
                    let from = self.integer(v, 1);
                    self.asm.store(to, from, inst.bytes);
                } else {
                    let from = self.vector(v, 0);
                    let to = self.address(operand.memory);
                    self.store_vector(to, from, inst.bytes);
                }
            }
            MachineOp::LoadMasked(lane) if !self.has_masks => {
                let mask = self.vector(inst.uses[0], 1);
                let d = self.destination(inst.def);
                let (rm, _) = self.last(inst, 1);
                self.plain(vector_masked_load(lane == 8), [d, mask], rm, inst.bytes, None);
                self.written(inst.def);
            }
            MachineOp::StoreMasked(lane) if !self.has_masks => {
                let from = self.vector(inst.uses[0], 0);
                let mask = self.vector(inst.uses[1], 1);
                let (rm, _) = self.last(inst, 2);
                self.plain(vector_masked_store(lane == 8), [from, mask], rm, inst.bytes, None);
            }
            MachineOp::Blend(lane) if !self.has_masks => {
                let mask = self.vector(inst.uses[0], 0);
                let otherwise = self.vector(inst.uses[1], 1);
                let (rm, _) = self.last(inst, 2);
                let d = self.destination(inst.def);
                self.plain(blend_by_vector(lane), [d, otherwise], rm, inst.bytes, Some(mask << 4));
                self.written(inst.def);
            }
            MachineOp::LoadMasked(lane) => {
                let d = self.destination(inst.def);
                let zero = inst.uses[1] == NONE;
                if !zero {
                    self.bring(d, inst.uses[1], inst.bytes);
                }
                let mask = self.mask(inst.uses[0], 0);
                let (rm, _) = self.last(inst, 1);
                let extra = Extra { mask, zero, broadcast: false };
                self.vector_with(masked_load(lane), [d, 0], rm, inst.bytes, extra, None);
                self.written(inst.def);
            }
            MachineOp::StoreMasked(lane) => {
                let from = self.vector(inst.uses[0], 0);
                let mask = self.mask(inst.uses[1], 0);
                let (rm, _) = self.last(inst, 2);
                let extra = Extra { mask, ..Extra::default() };
                self.vector_with(masked_store(lane), [from, 0], rm, inst.bytes, extra, None);
            }
            MachineOp::Gather { wide } => {
                let d = self.destination(inst.def);
                self.bring(d, inst.uses[2], inst.bytes);
                let numbers = self.vector(inst.uses[1], 1);
                self.lanes(inst, gather(wide), d, numbers);
                self.written(inst.def);
            }
            MachineOp::Scatter { wide } => {
                let value = self.vector(inst.uses[2], 0);
                let numbers = self.vector(inst.uses[1], 1);
                self.lanes(inst, scatter(wide), value, numbers);
            }
            MachineOp::FromInteger { wide } => {
                let from = self.integer(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.plain(from_integer(wide), [d, 0], Rm::Register(from), 16, None);
                self.written(inst.def);
            }
            MachineOp::InsertInteger(bytes, lane) => {
                let rm = match inst.operand {
                    Some(operand) => Rm::Memory(self.address(operand.memory)),
                    None => Rm::Register(self.integer(inst.uses[1], 0)),
                };
                let into = self.vector(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.plain(insert_integer(bytes), [d, into], rm, 16, Some(lane));
                self.written(inst.def);
            }
            MachineOp::ExtractInteger(bytes, lane) => {
                let from = self.vector(inst.uses[0], 0);
                let d = self.destination(inst.def);
                match lane {
                    0 => self.plain(to_integer(bytes == 8), [from, 0], Rm::Register(d), 16, None),
                    _ => self.plain(extract_integer(bytes), [from, 0], Rm::Register(d), 16, Some(lane)),
                }
                self.written(inst.def);
            }
            MachineOp::Binary(op) => self.binary(inst, op, None),
            MachineOp::BinaryImmediate(op, immediate) => self.binary(inst, op, Some(immediate)),
            MachineOp::Unary(op) => self.unary(inst, op, None),
            MachineOp::UnaryImmediate(op, immediate) => self.unary(inst, op, Some(immediate)),
            MachineOp::StorePart(op, immediate) => {
                let from = self.vector(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.plain(op, [from, 0], Rm::Register(d), inst.bytes, Some(immediate));
                self.written(inst.def);
            }
            MachineOp::Narrow(op) => {
                let from = self.vector(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.plain(op, [from, 0], Rm::Register(d), inst.bytes, None);
                self.written(inst.def);
            }
            MachineOp::Shift(op, number, by) => {
                let from = self.vector(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.plain(op, [number, d], Rm::Register(from), inst.bytes, Some(by));
                self.written(inst.def);
            }
            MachineOp::Fma { wide, negate_product, negate_addend, addend } => {
                let is_scalar = inst.bytes < 16;
                self.fma(inst, addend, |form| fma(form, negate_product, negate_addend, is_scalar, wide));
            }
            MachineOp::Tied(op) => {
                let d = self.destination(inst.def);
                self.bring(d, inst.uses[0], inst.bytes);
                let middle = self.vector(inst.uses[1], 1);
                let (rm, extra) = self.last(inst, 2);
                self.vector_with(op, [d, middle], rm, inst.bytes, extra, None);
                self.written(inst.def);
            }
            MachineOp::Blend(lane) => {
                let d = self.destination(inst.def);
                let mask = self.mask(inst.uses[0], 0);
                let otherwise = self.vector(inst.uses[1], 1);
                let (rm, extra) = self.last(inst, 2);
                self.vector_with(blend_by_mask(lane), [d, otherwise], rm, inst.bytes, Extra { mask, ..extra }, None);
                self.written(inst.def);
            }
            MachineOp::Splat(lane) => {
                let from = self.integer(inst.uses[0], 0);
                let d = self.destination(inst.def);
                if self.has_masks {
                    self.plain(splat_integer(lane), [d, 0], Rm::Register(from), inst.bytes, None);
                } else {
                    self.plain(from_integer(lane == 8), [d, 0], Rm::Register(from), 16, None);
                    self.plain(broadcast_integer(lane), [d, 0], Rm::Register(d), inst.bytes, None);
                }
                self.written(inst.def);
            }
            MachineOp::MaskBinary(op) => {
                let (a, b) = (self.mask(inst.uses[0], 0), self.mask(inst.uses[1], 1));
                let d = self.destination(inst.def);
                self.asm.vector(op, mask_operands(d, a, Rm::Register(b), 32));
                self.written(inst.def);
            }
            MachineOp::MaskNot => {
                let a = self.mask(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.asm.vector(MASK_NOT, mask_operands(d, 0, Rm::Register(a), 16));
                self.written(inst.def);
            }
            MachineOp::MaskShift(by) => {
                let a = self.mask(inst.uses[0], 0);
                let d = self.destination(inst.def);
                let operands = mask_operands(d, 0, Rm::Register(a), 16);
                self.asm.vector(MASK_SHIFT, VectorOperands { immediate: Some(by), ..operands });
                self.written(inst.def);
            }
            MachineOp::MaskSplat => {
                let a = self.integer(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.asm.vector(MASK_FROM_INTEGER, mask_operands(d, 0, Rm::Register(a), 16));
                self.written(inst.def);
            }
            MachineOp::MaskBits => {
                let a = self.mask(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.asm.vector(MASK_TO_INTEGER, mask_operands(d, 0, Rm::Register(a), 16));
                self.written(inst.def);
            }
            MachineOp::ToReal { wide, long } => {
                let d = self.destination(inst.def);
                self.plain(XOR, [d, d], Rm::Register(d), 16, None);
                let from = self.integer(inst.uses[0], 0);
                self.plain(integer_to_real(wide, long), [d, d], Rm::Register(from), 16, None);
                self.written(inst.def);
            }
            MachineOp::FromReal { wide, long } => {
                let from = self.vector(inst.uses[0], 0);
                let d = self.destination(inst.def);
                self.plain(real_to_integer(wide, long), [d, 0], Rm::Register(from), 16, None);
                self.written(inst.def);
            }
            MachineOp::CompareReals { wide } => {
                let a = self.vector(inst.uses[0], 0);
                let b = self.vector(inst.uses[1], 1);
                self.plain(compare_scalars(wide), [a, 0], Rm::Register(b), 16, None);
            }
            MachineOp::Call(number) => self.call(inst, number),
            MachineOp::Jump(_) | MachineOp::JumpIf(..) | MachineOp::Return => unreachable!("written with their blocks"),
            _ => self.integer_inst(inst),
        }
    }

    fn vector_with(
        &mut self,
        op: Opcode,
        [reg, vvvv]: [u8; 2],
        rm: Rm,
        bytes: usize,
        extra: Extra,
        immediate: Option<u8>,
    ) {
        let width = bytes.max(16) as u8;
        let unit = op.unit(bytes, extra.broadcast) as u8;
        self.asm.vector(op, VectorOperands { reg, vvvv, rm, width, unit, extra, immediate });
    }

    /// Emits a gather or scatter, whose address has a vector index.
    fn lanes(&mut self, inst: &Inst, op: Opcode, reg: u8, numbers: u8) {
        let lane = if op.wide { 8 } else { 4 };
        let EncodedMemory { base, disp, .. } = self.address(inst.operand.expect("an address").memory);
        let index = Some((numbers, if op.wide { 3 } else { 2 }));
        let rm = Rm::Memory(EncodedMemory { base, index, disp });
        let mask = self.mask(inst.uses[0], 0);
        let extra = Extra { mask, ..Extra::default() };
        // The fifth bit of the index is in the field of other instructions' second operand.
        let vvvv = numbers & 16;
        let width = inst.bytes as u8;
        self.asm.vector(op, VectorOperands { reg, vvvv, rm, width, unit: lane, extra, immediate: None });
    }

    /// Moves a vector to a register.
    fn bring(&mut self, to: u8, v: Reg, bytes: usize) {
        match self.place(v) {
            Location::Register(r) => self.move_vector(to, r, bytes),
            _ => {
                let (from, bytes) = (self.slot(v), self.f.virtuals[v.at()].bytes);
                self.load_vector(to, from, bytes);
            }
        }
    }

    fn move_(&mut self, inst: &Inst) {
        let class = self.f.virtuals[inst.def.at()].class;
        let d = self.destination(inst.def);
        if let Some(operand) = inst.operand {
            let from = self.address(operand.memory);
            match class {
                Class::Integer => self.asm.load(d, from),
                Class::Vector => self.load_vector(d, from, inst.bytes),
                Class::Mask => unreachable!("masks are not loaded"),
            }
            return self.written(inst.def);
        }
        let from = inst.uses[0];
        if self.place(from) == self.place(inst.def) && self.f.virtuals[from.at()].pool.is_none() {
            return;
        }
        match (class, self.place(inst.def), self.place(from)) {
            // The value is stored from its register.
            (Class::Vector, Location::Memory(_), Location::Register(r)) => {
                let (to, bytes) = (self.slot(inst.def), self.f.virtuals[inst.def.at()].bytes);
                self.store_vector(to, r, bytes);
            }
            (Class::Integer, Location::Memory(_), Location::Register(r)) => {
                let to = self.slot(inst.def);
                self.asm.store(to, r, 8);
            }
            (Class::Vector, ..) => {
                self.bring(d, from, inst.bytes);
                self.written(inst.def);
            }
            (Class::Integer, _, Location::Register(r)) => self.asm.move_register(d, r),
            (Class::Integer, ..) => {
                let from = self.slot(from);
                self.asm.load(d, from);
                self.written(inst.def);
            }
            (Class::Mask, ..) => {
                let a = self.mask(from, 0);
                self.asm.vector(MASK_LOAD, mask_operands(d, 0, Rm::Register(a), 16));
                self.written(inst.def);
            }
        }
    }

    fn constant(&mut self, inst: &Inst) {
        let Virtual { class, bytes, pool } = self.f.virtuals[inst.def.at()];
        match (pool, self.place(inst.def)) {
            // Uses read the constant from the pool.
            (Some(_), Location::Memory(_) | Location::Nowhere) => return,
            (Some(at), Location::Register(d)) => {
                let from = EncodedMemory { base: EncodedBase::Pool, index: None, disp: at };
                if class == Class::Mask {
                    self.asm.vector(MASK_LOAD, mask_operands(d, 0, Rm::Memory(from), 16));
                } else if self.pool[at as usize..at as usize + bytes].iter().any(|b| *b != 0) {
                    self.load_vector(d, from, bytes);
                } else {
                    self.zero(d);
                }
                return;
            }
            (None, _) => {}
        }
        let d = self.destination(inst.def);
        self.zero(d);
        self.written(inst.def);
    }

    /// Zeroes a whole register, as writing a part clears the rest.
    fn zero(&mut self, d: u8) {
        let bytes = if d >= 16 { 64 } else { 16 };
        self.plain(XOR, [d, d], Rm::Register(d), bytes, None);
    }

    fn binary(&mut self, inst: &Inst, op: Opcode, immediate: Option<u8>) {
        let a = self.vector(inst.uses[0], 0);
        let (rm, extra) = self.last(inst, 1);
        let d = self.destination(inst.def);
        self.vector_with(op, [d, a], rm, inst.bytes, extra, immediate);
        self.written(inst.def);
    }

    fn unary(&mut self, inst: &Inst, op: Opcode, immediate: Option<u8>) {
        let (mut rm, extra) = self.last(inst, 0);
        // The operand of a conversion has a different width than its result.
        if op.memory == Unit::Other && inst.operand.is_none() {
            rm = Rm::Register(self.vector(inst.uses[0], 0));
        }
        let d = self.destination(inst.def);
        self.vector_with(op, [d, 0], rm, inst.bytes, extra, immediate);
        self.written(inst.def);
    }

    fn fma(&mut self, inst: &Inst, addend: bool, op: impl Fn(u8) -> Opcode) {
        let [form132, form213, form231] = [FORM_132, FORM_213, FORM_231].map(op);
        let d = self.destination(inst.def);
        let [a, b, c] = inst.uses;
        let is_in = |e: &Self, v: Reg| v != NONE && e.place(v) == Location::Register(d);
        let (form, vvvv, rm, extra) = if inst.operand.is_some() && addend {
            let (first, second) = if is_in(self, b) { (b, a) } else { (a, b) };
            self.bring(d, first, inst.bytes);
            let second = self.vector(second, 1);
            let (rm, extra) = self.last(inst, 2);
            (form213, second, rm, extra)
        } else if inst.operand.is_some() {
            if is_in(self, a) && !is_in(self, c) {
                let c = self.vector(c, 1);
                let (rm, extra) = self.last(inst, 1);
                (form132, c, rm, extra)
            } else {
                self.bring(d, c, inst.bytes);
                let a = self.vector(a, 1);
                let (rm, extra) = self.last(inst, 1);
                (form231, a, rm, extra)
            }
        } else {
            let in_register = |e: &Self, v: Reg| matches!(e.place(v), Location::Register(_));
            if !is_in(self, c) && (is_in(self, a) || is_in(self, b)) {
                let other = if is_in(self, a) { b } else { a };
                if in_register(self, c) && !in_register(self, other) {
                    let c = self.vector(c, 1);
                    (form132, c, self.vector_rm(other), Extra::default())
                } else {
                    let other = self.vector(other, 1);
                    (form213, other, self.vector_rm(c), Extra::default())
                }
            } else {
                self.bring(d, c, inst.bytes);
                let (a, b) = if in_register(self, a) { (a, b) } else { (b, a) };
                let a = self.vector(a, 1);
                (form231, a, self.vector_rm(b), Extra::default())
            }
        };
        self.vector_with(form, [d, vvvv], rm, inst.bytes, extra, None);
        self.written(inst.def);
    }

    // Integers.

    fn integer_inst(&mut self, inst: &Inst) {
        let d = if inst.def == NONE { 0 } else { self.destination(inst.def) };
        let [a, b, _] = inst.uses;
        let wide = inst.bytes == 8;
        match inst.op {
            MachineOp::Integer(value) => self.asm.move_constant(d, value),
            MachineOp::Address => {
                let from = self.address(inst.operand.expect("an address").memory);
                match from {
                    EncodedMemory { base: EncodedBase::Register(r), index: None, disp: 0 } => {
                        self.asm.move_register(d, r)
                    }
                    _ => self.asm.lea(d, from),
                }
            }
            MachineOp::FunctionAddress(number) => self.asm.address_of(d, number),
            MachineOp::Extend { signed } => {
                let from = match inst.operand {
                    Some(operand) => Rm::Memory(self.address(operand.memory)),
                    None => Rm::Register(self.integer(a, 0)),
                };
                self.asm.extend(d, from, inst.bytes, signed);
            }
            MachineOp::IntegerBinary(number) => {
                self.bring_integer(d, a);
                self.asm.integer(&[number << 3 | 3], d, self.integer_rm(b), true, &[]);
            }
            MachineOp::IntegerConstant(number, value) => {
                self.bring_integer(d, a);
                self.asm.with_constant(number, d, value, true);
            }
            MachineOp::Multiply => {
                self.bring_integer(d, a);
                self.asm.integer(&[0x0f, 0xaf], d, self.integer_rm(b), true, &[]);
            }
            MachineOp::MultiplyConstant(value) => {
                self.asm.integer(&[0x69], d, self.integer_rm(a), true, &value.to_le_bytes());
            }
            MachineOp::IntegerShift(number, by) => {
                self.bring_integer(d, a);
                self.asm.integer(&[0xc1], number, Rm::Register(d), wide, &[by]);
            }
            MachineOp::IntegerShiftBy(op) => {
                let (from, by) = (self.integer(a, 0), self.integer(b, 1));
                self.plain(op, [d, by], Rm::Register(from), 16, None);
            }
            MachineOp::Divide { signed, remainder } => {
                self.bring_integer(RAX, a);
                match (signed, wide) {
                    (true, true) => self.asm.code.extend([0x48, 0x99]),
                    (true, false) => self.asm.code.push(0x99),
                    (false, _) => self.asm.code.extend([0x31, 0xd2]),
                }
                self.asm.integer(&[0xf7], if signed { 7 } else { 6 }, self.integer_rm(b), wide, &[]);
                self.asm.move_register(d, if remainder { RDX } else { RAX });
            }
            MachineOp::Choose(condition) => {
                self.bring_integer(d, a);
                let b = self.integer(b, 1);
                self.asm.integer(&[0x3b], b, Rm::Register(d), wide, &[]);
                self.asm.integer(&[0x0f, 0x40 | condition as u8], d, Rm::Register(b), true, &[]);
            }
            MachineOp::Compare => {
                let a = self.integer(a, 0);
                self.asm.integer(&[0x3b], a, self.integer_rm(b), wide, &[]);
            }
            MachineOp::CompareConstant(value) => {
                let a = self.integer(a, 0);
                self.asm.with_constant(7, a, value, wide);
            }
            MachineOp::Test => {
                let a = self.integer(a, 0);
                self.asm.integer(&[0x85], a, Rm::Register(a), true, &[]);
            }
            MachineOp::Set(condition) => {
                // A REX prefix makes the low byte of every register accessible.
                self.asm.code.extend([0x40 | d >> 3, 0x0f, 0x90 | condition as u8, 0xc0 | d & 7]);
                self.asm.integer(&[0x0f, 0xb6], d, Rm::Register(d), true, &[]);
            }
            MachineOp::Select(condition) => self.select(inst, condition, d),
            MachineOp::Prefetch { for_write } => {
                let to = self.address(inst.operand.expect("an address").memory);
                let code = if for_write { 0x0d } else { 0x18 };
                self.asm.integer(&[0x0f, code], 1, Rm::Memory(to), false, &[]);
            }
            other => unreachable!("{other:?} is written elsewhere"),
        }
        if inst.def != NONE {
            self.written(inst.def);
        }
    }

    fn select(&mut self, inst: &Inst, condition: ConditionCode, d: u8) {
        let [a, b, _] = inst.uses;
        if self.f.virtuals[inst.def.at()].class == Class::Integer {
            self.bring_integer(d, b);
            self.asm.integer(&[0x0f, 0x40 | condition as u8], d, self.integer_rm(a), true, &[]);
            return;
        }
        let done = self.asm.label();
        self.bring(d, a, inst.bytes);
        self.asm.jump_if(condition, done);
        self.bring(d, b, inst.bytes);
        self.asm.bind(done);
    }

    fn bring_integer(&mut self, to: u8, v: Reg) {
        match self.place(v) {
            Location::Register(r) => self.asm.move_register(to, r),
            _ => {
                let from = self.slot(v);
                self.asm.load(to, from);
            }
        }
    }

    // Calls.

    fn call(&mut self, inst: &Inst, number: usize) {
        let f = self.f;
        let call = &f.calls[number];
        for (at, v) in call.arguments.iter().enumerate().skip(ARGUMENTS.len()) {
            let from = self.integer(*v, 0);
            let disp = (at - ARGUMENTS.len()) as i32 * 8;
            self.asm.store(EncodedMemory { base: EncodedBase::Register(RSP), index: None, disp }, from, 8);
        }
        let mut moves = Vec::new();
        let mut loads = Vec::new();
        let mut targets: Vec<(Reg, u8)> = call.arguments.iter().copied().zip(ARGUMENTS).collect();
        if let Callee::Pointer(pointer) = call.callee {
            targets.push((pointer, RAX));
        }
        for (v, to) in targets {
            match self.place(v) {
                Location::Register(r) => moves.push((r, to)),
                _ => loads.push((self.slot(v), to)),
            }
        }
        self.move_all(moves);
        for (from, to) in loads {
            self.asm.load(to, from);
        }
        if let [first, second] = call.reals[..] {
            // Uses a vector register that holds neither value; no other vector register is live.
            let spare = if self.place(first) == Location::Register(2) { 3 } else { 2 };
            self.bring(spare, second, 16);
            self.bring(0, first, 16);
            self.move_vector(1, spare, 16);
        } else if let [real] = call.reals[..] {
            self.bring(0, real, 16);
        }
        match call.callee {
            Callee::Function(number) => self.asm.call(number),
            Callee::Pointer(_) => {
                self.zero_upper();
                self.asm.code.extend([0xff, 0xd0]);
            }
            Callee::Outside(number) => {
                self.zero_upper();
                self.asm.call_outside(number);
            }
        }
        if inst.def != NONE {
            match self.place(inst.def) {
                Location::Register(d) => self.move_vector(d, 0, 16),
                _ => {
                    let (to, bytes) = (self.slot(inst.def), self.f.virtuals[inst.def.at()].bytes);
                    self.store_vector(to, 0, bytes);
                }
            }
        }
    }

    /// Performs parallel moves between registers.
    fn move_all(&mut self, mut moves: Vec<(u8, u8)>) {
        moves.retain(|(from, to)| from != to);
        while let Some(&(first, to)) = moves.first() {
            // A move whose target no other move reads.
            match moves.iter().position(|(_, to)| moves.iter().all(|(from, _)| from != to)) {
                Some(at) => {
                    let (from, to) = moves.remove(at);
                    self.asm.move_register(to, from);
                }
                None => {
                    self.asm.integer(&[0x87], first, Rm::Register(to), true, &[]);
                    moves.remove(0);
                    for (from, _) in &mut moves {
                        *from = match *from {
                            r if r == to => first,
                            r if r == first => to,
                            r => r,
                        };
                    }
                    moves.retain(|(from, to)| from != to);
                }
            }
        }
    }

    fn parameters(&mut self) {
        let f = self.f;
        let mut moves = Vec::new();
        for (v, from) in f.parameters.iter().zip(ARGUMENTS) {
            match self.place(*v) {
                Location::Register(to) => moves.push((from, to)),
                Location::Memory(_) => {
                    let to = self.slot(*v);
                    self.asm.store(to, from, 8);
                }
                Location::Nowhere => {}
            }
        }
        self.move_all(moves);
        for (at, v) in f.parameters.iter().enumerate().skip(ARGUMENTS.len()) {
            let disp = 16 + (at - ARGUMENTS.len()) as i32 * 8;
            let from = EncodedMemory { base: EncodedBase::Register(RBP), index: None, disp };
            match self.place(*v) {
                Location::Register(to) => self.asm.load(to, from),
                Location::Memory(_) => {
                    self.asm.load(INTEGER_SCRATCH[1], from);
                    let to = self.slot(*v);
                    self.asm.store(to, INTEGER_SCRATCH[1], 8);
                }
                Location::Nowhere => {}
            }
        }
    }
}

fn mask_operands(reg: u8, vvvv: u8, rm: Rm, width: u8) -> VectorOperands {
    VectorOperands { reg, vvvv, rm, width, unit: 1, extra: Extra::default(), immediate: None }
}
