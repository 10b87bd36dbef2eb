//! Machine instructions with virtual registers.

use super::encode::ConditionCode;
use super::opcodes::Opcode;
use crate::number::number;

number! {
    /// Virtual register.
    Reg
}

/// No register.
pub const NONE: Reg = Reg::new(u32::MAX as usize);

/// Register class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Integer,
    Vector,
    Mask,
}

/// Properties of a virtual register.
#[derive(Clone, Copy, Debug)]
pub struct Virtual {
    pub class: Class,
    /// Size in bytes of the contents.
    pub bytes: usize,
    /// Offset in the constant pool, for constants, which need no spill slot.
    pub pool: Option<i32>,
}

/// Base of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Register(Reg),
    /// Stack frame.
    Stack,
    /// Constants after the code.
    Pool,
}

/// Memory address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAddress {
    pub base: Base,
    /// Index register, and the base-2 logarithm of its scale.
    pub index: Option<(Reg, u8)>,
    pub disp: i32,
}

/// Memory operand of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOperand {
    pub memory: MemoryAddress,
    /// Whether the memory is broadcast to all lanes.
    pub broadcast: bool,
}

/// Operation of an instruction. `d` is its result; `u0`, `u1`, … are the registers it uses; a memory operand
/// replaces the last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MachineOp {
    /// `d ← u0`, or a load.
    Move,
    /// Memory `← u0`.
    Store,
    /// Integer `d ←` the low bytes of `u0` or of memory, of the instruction's size, extended to 64 bits.
    Extend {
        signed: bool,
    },
    /// Loads the lanes of this many bytes in mask `u0`; the others are zero or, with `u1`, those of `u1`.
    LoadMasked(usize),
    /// Stores the lanes of this many bytes of `u0` in mask `u1`.
    StoreMasked(usize),
    /// Gathers the lanes in mask `u0`, each at the element offset in `u1` from the address; the other lanes
    /// are those of `u2`. The mask is clobbered.
    Gather {
        wide: bool,
    },
    /// Stores the lanes of `u2` in mask `u0`, with the addresses of a gather. The mask is clobbered.
    Scatter {
        wide: bool,
    },
    /// `d ← u0` with integer `u1` in a lane of this many bytes.
    InsertInteger(usize, u8),
    /// Integer `d ←` a lane of this many bytes of `u0`; the higher bits are undefined.
    ExtractInteger(usize, u8),
    /// `d ←` integer `u0` and zeros.
    FromInteger {
        wide: bool,
    },
    /// `d ←` constant of the pool.
    Constant,
    /// `d ←` undefined.
    Undefined,
    /// `d ← u0 op u1`
    Binary(Opcode),
    /// `d ← op u0`
    Unary(Opcode),
    /// Binary instruction with an immediate.
    BinaryImmediate(Opcode, u8),
    /// Unary instruction with an immediate.
    UnaryImmediate(Opcode, u8),
    /// `d ←` a part of `u0`.
    StorePart(Opcode, u8),
    /// `d ←` a part of each lane of `u0`.
    Narrow(Opcode),
    /// `d ← u0` shifted, with an opcode, its extension and the number of bits.
    Shift(Opcode, u8, u8),
    /// `d ← ±u0·u1 ± u2`; memory replaces `u1` or, if `addend`, `u2`.
    Fma {
        wide: bool,
        negate_product: bool,
        negate_addend: bool,
        addend: bool,
    },
    /// `d ← op(u0, u1, u2)`, where `d` and `u0` are the same register.
    Tied(Opcode),
    /// `d ←` lanes of this many bytes of `u2` in mask `u0`, of `u1` elsewhere.
    Blend(usize),
    /// Every lane of this many bytes of `d ←` integer `u0`.
    Splat(usize),
    /// Mask `d ← u0 op u1`.
    MaskBinary(Opcode),
    /// Mask `d ←` not `u0`.
    MaskNot,
    /// Mask `d ← u0` shifted to the right.
    MaskShift(u8),
    /// Mask `d ←` the low bits of integer `u0`.
    MaskSplat,
    /// Integer `d ←` the bits of mask `u0`.
    MaskBits,
    /// Floating-point `d ←` integer `u0` of 32 bits, or of 64 if `long`.
    ToReal {
        wide: bool,
        long: bool,
    },
    /// Integer `d ←` floating-point `u0`, truncated; the smallest integer if out of range.
    FromReal {
        wide: bool,
        long: bool,
    },
    /// Integer `d ←` constant.
    Integer(i64),
    /// Integer `d ←` memory's address.
    Address,
    /// Integer `d ← u0 op u1`: `add`, `or`, `and`, `sub`, `xor` by number.
    IntegerBinary(u8),
    /// Integer operation with a constant.
    IntegerConstant(u8, i32),
    Multiply,
    MultiplyConstant(i32),
    /// Integer shift, with the opcode extension and the number of bits.
    IntegerShift(u8, u8),
    /// Integer shift of `u0` by `u1`.
    IntegerShiftBy(Opcode),
    /// Quotient or remainder of `u0` by `u1`.
    Divide {
        signed: bool,
        remainder: bool,
    },
    /// Minimum or maximum of `u0` and `u1`: `u1` if the condition holds for `u1` and `u0`.
    Choose(ConditionCode),
    /// Flags of `u0 − u1`.
    Compare,
    /// Flags of `u0` minus a constant.
    CompareConstant(i32),
    /// Flags of `u0`.
    Test,
    /// Flags of a floating-point comparison.
    CompareReals {
        wide: bool,
    },
    /// Integer `d ←` 1 if the condition holds, else 0.
    Set(ConditionCode),
    /// `d ← u0` if the condition holds, else `u1`, for any register class.
    Select(ConditionCode),
    /// Call, by index in the function's list.
    Call(usize),
    /// `d ←` a function's address.
    FunctionAddress(usize),
    Prefetch {
        for_write: bool,
    },
    Jump(usize),
    JumpIf(ConditionCode, usize),
    Return,
}

/// Instruction.
#[derive(Clone, Copy, Debug)]
pub struct Inst {
    pub op: MachineOp,
    pub def: Reg,
    pub uses: [Reg; 3],
    pub operand: Option<MemoryOperand>,
    /// Operation size in bytes.
    pub bytes: usize,
}

impl Inst {
    pub fn new(op: MachineOp, def: Reg, uses: &[Reg], bytes: usize) -> Inst {
        let mut all = [NONE; 3];
        all[..uses.len()].copy_from_slice(uses);
        Inst { op, def, uses: all, operand: None, bytes }
    }

    pub fn with(mut self, memory: MemoryAddress, broadcast: bool) -> Inst {
        self.operand = Some(MemoryOperand { memory, broadcast });
        self
    }

    /// Visits the registers that the instruction uses, including those of its address, but not a call's
    /// arguments.
    pub fn each_use(&self, mut visit: impl FnMut(Reg)) {
        self.uses.iter().copied().filter(|r| *r != NONE).for_each(&mut visit);
        if let Some(MemoryOperand { memory, .. }) = self.operand {
            if let Base::Register(r) = memory.base {
                visit(r);
            }
            if let Some((r, _)) = memory.index {
                visit(r);
            }
        }
    }

    /// Constraints on the registers of operands, for both the allocator and its checker.
    pub fn constraints(&self) -> Constraints {
        let [a, b, c] = self.uses;
        let free = Constraints::default();
        let tied = |to: Reg| Constraints { tied: Some(to).filter(|r| *r != NONE), ..free };
        let first = |to: Reg| Constraints { reads_late: true, ..tied(to) };
        match self.op {
            MachineOp::Move if self.operand.is_none() => tied(a),
            MachineOp::Fma { .. } => tied(if c == NONE { a } else { c }),
            MachineOp::IntegerConstant(..) | MachineOp::IntegerShift(..) => tied(a),
            MachineOp::Tied(_) | MachineOp::IntegerBinary(_) | MachineOp::Multiply => first(a),
            MachineOp::LoadMasked(_) => first(b),
            MachineOp::Gather { .. } => first(c),
            MachineOp::Choose(_) | MachineOp::Select(_) | MachineOp::Set(_) | MachineOp::ToReal { .. } => {
                Constraints { writes_early: true, ..free }
            }
            MachineOp::Divide { .. } => Constraints { lost: Lost::Division, ..free },
            MachineOp::Call(_) => Constraints { lost: Lost::Call, ..free },
            MachineOp::Move
            | MachineOp::Store
            | MachineOp::Extend { .. }
            | MachineOp::StoreMasked(_)
            | MachineOp::Scatter { .. } => free,
            MachineOp::InsertInteger(..)
            | MachineOp::ExtractInteger(..)
            | MachineOp::FromInteger { .. }
            | MachineOp::Constant => free,
            MachineOp::Undefined | MachineOp::FromReal { .. } => free,
            MachineOp::Binary(_)
            | MachineOp::Unary(_)
            | MachineOp::BinaryImmediate(..)
            | MachineOp::UnaryImmediate(..) => free,
            MachineOp::StorePart(..)
            | MachineOp::Narrow(_)
            | MachineOp::Shift(..)
            | MachineOp::Blend(_)
            | MachineOp::Splat(_) => free,
            MachineOp::MaskBinary(_)
            | MachineOp::MaskNot
            | MachineOp::MaskShift(_)
            | MachineOp::MaskSplat
            | MachineOp::MaskBits => free,
            MachineOp::Integer(_)
            | MachineOp::Address
            | MachineOp::IntegerShiftBy(_)
            | MachineOp::MultiplyConstant(_)
            | MachineOp::FunctionAddress(_) => free,
            MachineOp::Compare | MachineOp::CompareConstant(_) | MachineOp::Test | MachineOp::CompareReals { .. } => {
                free
            }
            MachineOp::Prefetch { .. } | MachineOp::Jump(_) | MachineOp::JumpIf(..) | MachineOp::Return => free,
        }
    }
}

/// Constraints of an instruction on the registers of its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    /// Use tied to `d`, which is assigned the same register or copied there first.
    pub tied: Option<Reg>,
    /// Whether the other uses are read after that copy, so that `d` must differ from them.
    pub reads_late: bool,
    /// Whether `d` is early-clobbered: written before all uses are read.
    pub writes_early: bool,
    /// Registers that the instruction clobbers.
    pub lost: Lost,
}

/// Clobbered registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lost {
    #[default]
    Nothing,
    /// Registers of quotient and remainder, clobbered before all operands are read.
    Division,
    /// Caller-saved registers, clobbered after all operands are read.
    Call,
}

/// Target of a call.
#[derive(Clone, Copy, Debug)]
pub enum Callee {
    /// Function of the module.
    Function(usize),
    /// Function defined by another module.
    Outside(usize),
    /// Pointer.
    Pointer(Reg),
}

/// Call.
#[derive(Clone, Debug)]
pub struct Call {
    pub callee: Callee,
    /// Integer arguments.
    pub arguments: Vec<Reg>,
    /// Floating-point arguments, at most two, instead of integers.
    pub reals: Vec<Reg>,
}

/// Function before register allocation.
#[derive(Default)]
pub struct MachineFunction {
    pub virtuals: Vec<Virtual>,
    pub parameters: Vec<Reg>,
    /// Basic blocks, in the order of the code.
    pub blocks: Vec<BasicBlock>,
    pub calls: Vec<Call>,
    /// Size in bytes of the stack memory that addresses refer to.
    pub stack_bytes: usize,
}

/// Basic block.
#[derive(Default)]
pub struct BasicBlock {
    pub insts: Vec<Inst>,
    pub successors: Vec<usize>,
    /// Loop depth.
    pub depth: usize,
    /// Whether the block is the header of an innermost loop.
    pub is_inner_loop: bool,
    /// Copies at the end of the block for the edge to one of two successors.
    pub edge_copies: Vec<(Reg, usize)>,
}
