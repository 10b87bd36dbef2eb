//! Functions in static single assignment form, as a back end of our own reads them.
//!
//! What the generator writes, and no more: see [`crate::llvm::read`].

use std::hash::{Hash, Hasher};

use crate::llvm::map::{Map, Mixer};

/// A value of a function, by number.
pub type Id = u32;

/// What a lane holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A truth value.
    I1,
    /// A 32-bit integer.
    I32,
    /// A 64-bit integer or an address.
    I64,
    /// A single-precision number.
    F32,
    /// A double-precision number.
    F64,
}

impl Kind {
    /// Bytes of a lane in memory.
    pub fn bytes(self) -> usize {
        match self {
            Kind::I1 => 1,
            Kind::I32 | Kind::F32 => 4,
            Kind::I64 | Kind::F64 => 8,
        }
    }
}

/// A type: lanes of a kind; one lane is a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    /// What each lane holds.
    pub kind: Kind,
    /// How many there are.
    pub lanes: usize,
}

impl Type {
    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        self.kind.bytes() * self.lanes
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum Def {
    /// The argument of a number.
    Argument(usize),
    /// The bits of each lane.
    Constant(Vec<u64>),
    /// Any bits.
    Undefined,
    /// A function of the module.
    Function(usize),
    /// A function outside the module, by its address.
    Outside(usize),
    /// An instruction.
    Instruction,
}

/// A value.
#[derive(Clone, Debug)]
pub struct Value {
    /// Its type.
    pub ty: Type,
    /// Where it comes from.
    pub def: Def,
}

/// Integer comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compare {
    /// `a == b`
    Equal,
    /// `a < b`
    Less,
    /// `a > b`
    Greater,
}

/// What an instruction does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// A variable that loads read and stores write; its address goes nowhere else.
    Variable(Type),
    /// So many bytes of stack memory.
    Stack(usize),
    /// Reads memory or a variable.
    Load {
        /// Whether nothing ever writes there.
        invariant: bool,
    },
    /// Writes a value to memory or a variable.
    Store,
    /// The address of element `index` from `base`, of so many bytes each.
    Element(usize),
    Add,
    Sub,
    Mul,
    /// Rounded towards zero.
    SignedDiv,
    SignedRem,
    UnsignedDiv,
    UnsignedRem,
    ShiftLeft,
    /// Shifts signs in.
    ShiftSigned,
    /// Shifts zeros in.
    ShiftUnsigned,
    And,
    Or,
    Xor,
    SignedMin,
    SignedMax,
    /// Of integers.
    Compare(Compare),
    FAdd,
    FSub,
    FMul,
    FDiv,
    FNeg,
    FAbs,
    Sqrt,
    /// The first number with the sign of the second.
    CopySign,
    /// The smaller one; the other where one is none.
    FMin,
    FMax,
    /// `a · b + c`, rounded once.
    Fma,
    /// `a < b`, false where one is none.
    FLess,
    /// The second where the first holds, else the third.
    Select,
    /// The low bits of an integer.
    Truncate,
    /// A signed integer as a number.
    ToReal,
    /// A number in another width.
    Convert,
    /// The same bits.
    Copy,
    /// Lanes of two vectors side by side; negative where any will do.
    Shuffle(Vec<i32>),
    /// The vector with one lane replaced.
    Insert(usize),
    /// One lane.
    Extract(usize),
    /// Reads the lanes in a mask from an address; the others are the third operand's.
    MaskedLoad,
    /// Writes the lanes of a value in a mask to an address.
    MaskedStore,
    /// As a masked load, each lane from its own address.
    Gather,
    /// As a masked store, each lane to its own address.
    Scatter,
    /// Brings an address near.
    Prefetch {
        /// To write there.
        for_write: bool,
    },
    /// Calls the function that is the last operand.
    Call,
    /// A value for each of some blocks that control comes from.
    Phi(Vec<usize>),
    /// Goes to a block.
    Br(usize),
    /// Goes to the first block where the condition holds, else to the second.
    CondBr(usize, usize),
    /// Leaves the function.
    Return,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// What it does.
    pub op: Op,
    /// To what.
    pub operands: Vec<Id>,
    /// The value that it gives, where it gives one.
    pub result: Option<Id>,
}

/// A function without result.
#[derive(Clone, Debug, Default)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Whether others may call it, as C functions are called.
    pub exported: bool,
    /// Its values.
    pub values: Vec<Value>,
    /// Its basic blocks, the first entered first.
    pub blocks: Vec<Vec<Instruction>>,
}

impl Function {
    /// Makes vectors of truth values vectors of integers, all bits set where they hold, as machines without mask
    /// registers have them.
    pub fn masks_as_integers(&mut self) {
        for value in &mut self.values {
            if value.ty.kind == Kind::I1 && value.ty.lanes > 1 {
                value.ty.kind = Kind::I32;
                if let Def::Constant(bits) = &mut value.def {
                    bits.iter_mut().for_each(|b| *b *= u64::from(u32::MAX));
                }
            }
        }
    }

    /// Computes once what a block computes several times, and drops choices that change nothing.
    pub fn share(&mut self) {
        let Function { values, blocks, .. } = self;
        let mut same_as: Vec<Id> = (0..values.len() as Id).collect();
        let mut variables = vec![false; values.len()];
        // Loads of no lanes but those in a mask, with the mask.
        let mut masked: Map<Id, Id> = Map::default();
        let is_zero = |id: Id| matches!(&values[id as usize].def, Def::Constant(bits) if bits.iter().all(|b| *b == 0));
        for block in blocks.iter_mut() {
            // By hash: the operation, its operands, how often memory was written before, and the value.
            let mut known: Map<u64, (Op, Vec<Id>, u32, Id)> = Map::default();
            let mut n_writes = 0;
            block.retain_mut(|inst| {
                for id in &mut inst.operands {
                    *id = same_as[*id as usize];
                }
                let Some(result) = inst.result else {
                    n_writes += match inst.op {
                        Op::Prefetch { .. } => 0,
                        Op::Store => u32::from(!variables[inst.operands[1] as usize]),
                        _ => 1,
                    };
                    return true;
                };
                let when = match inst.op {
                    Op::Variable(_) => {
                        variables[result as usize] = true;
                        return true;
                    }
                    Op::Load { .. } if variables[inst.operands[0] as usize] => return true,
                    Op::Stack(_) | Op::Phi(_) | Op::Call | Op::Copy => return true,
                    Op::Load { invariant: false } | Op::MaskedLoad | Op::Gather => n_writes,
                    _ => 0,
                };
                if let (Op::Select, [cond, a, b]) = (&inst.op, inst.operands.as_slice())
                    && masked.get(a) == Some(cond)
                    && is_zero(*b)
                {
                    same_as[result as usize] = *a;
                    return false;
                }
                let ty = values[result as usize].ty;
                let mut hasher = Mixer::default();
                (&inst.op, &inst.operands, when, ty).hash(&mut hasher);
                let hash = hasher.finish();
                match known.get(&hash) {
                    Some((op, operands, then, id))
                        if *op == inst.op
                            && *operands == inst.operands
                            && *then == when
                            && values[*id as usize].ty == ty =>
                    {
                        same_as[result as usize] = *id;
                        return false;
                    }
                    _ => {
                        known.insert(hash, (inst.op.clone(), inst.operands.clone(), when, result));
                    }
                }
                if matches!(inst.op, Op::MaskedLoad | Op::Gather) && is_zero(inst.operands[2]) {
                    masked.insert(result, inst.operands[1]);
                }
                true
            });
        }
        // Phis refer to what comes later.
        for id in blocks.iter_mut().flatten().flat_map(|inst| &mut inst.operands) {
            *id = same_as[*id as usize];
        }
    }
}
