//! Functions in static single assignment form: what the generator writes, and every back end reads.
//!
//! A module is one program. Its types know nothing of a machine but that addresses have 64 bits; what a back
//! end has no word for it refuses. Instructions take scalars and vectors alike.

pub mod build;
mod fold;
mod share;
mod split;
mod text;
mod verify;

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::number::number;

number! {
    /// A value of a function.
    Id
}

number! {
    /// A function of a module.
    FunctionId
}

number! {
    /// A basic block of a function; the first is entered first.
    BlockId
}

/// Kind of memory that an address leads to. Only GPUs tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressSpace {
    /// Any.
    All,
    /// A GPU's main memory.
    Global,
    /// The memory that the threads of a block share.
    Shared,
}

/// A number that tells a GPU's threads apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coordinate {
    /// Index of the block on an axis, 0 to 2.
    Block(u8),
    /// Index of the thread in its block on an axis, 0 to 2.
    Thread(u8),
}

/// Kind of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaneKind {
    /// Boolean.
    I1,
    /// A byte, which is computed with as something longer.
    I8,
    /// A 16-bit integer, which is stored and shifted, and not computed with otherwise.
    I16,
    /// A 32-bit integer.
    I32,
    /// A 64-bit integer.
    I64,
    /// An address.
    Pointer(AddressSpace),
    /// A number of 16 bits, which is stored and not computed with.
    F16,
    /// The first 16 bits of an f32 number, which are stored and not computed with.
    Bf16,
    /// An f32 number.
    F32,
    /// An f64 number.
    F64,
}

impl LaneKind {
    /// Bytes of a lane in memory.
    pub fn bytes(self) -> usize {
        match self {
            LaneKind::I1 | LaneKind::I8 => 1,
            LaneKind::I16 | LaneKind::F16 | LaneKind::Bf16 => 2,
            LaneKind::I32 | LaneKind::F32 => 4,
            LaneKind::I64 | LaneKind::F64 | LaneKind::Pointer(_) => 8,
        }
    }

    /// The bits that a lane has.
    fn mask(self) -> u64 {
        match self {
            LaneKind::I1 => 1,
            LaneKind::I8 => 0xff,
            LaneKind::I16 | LaneKind::F16 | LaneKind::Bf16 => u64::from(u16::MAX),
            LaneKind::I32 | LaneKind::F32 => u64::from(u32::MAX),
            LaneKind::I64 | LaneKind::F64 | LaneKind::Pointer(_) => u64::MAX,
        }
    }
}

/// A type: lanes of a kind; one lane is a scalar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    /// Kind of each lane.
    pub kind: LaneKind,
    /// Number of lanes; 1 for a scalar.
    pub lanes: usize,
}

impl Type {
    /// Boolean.
    pub const I1: Type = Type::scalar(LaneKind::I1);
    /// A byte.
    pub const I8: Type = Type::scalar(LaneKind::I8);
    /// A 16-bit integer.
    pub const I16: Type = Type::scalar(LaneKind::I16);
    /// A 32-bit integer.
    pub const I32: Type = Type::scalar(LaneKind::I32);
    /// A 64-bit integer.
    pub const I64: Type = Type::scalar(LaneKind::I64);
    /// An address.
    pub const POINTER: Type = Type::scalar(LaneKind::Pointer(AddressSpace::All));
    /// An address of a GPU's main memory.
    pub const GLOBAL: Type = Type::scalar(LaneKind::Pointer(AddressSpace::Global));
    /// An address of the memory that the threads of a block share.
    pub const SHARED: Type = Type::scalar(LaneKind::Pointer(AddressSpace::Shared));
    /// A number of 16 bits.
    pub const F16: Type = Type::scalar(LaneKind::F16);
    /// The first 16 bits of an f32 number.
    pub const BF16: Type = Type::scalar(LaneKind::Bf16);
    /// An f32 number.
    pub const F32: Type = Type::scalar(LaneKind::F32);
    /// An f64 number.
    pub const F64: Type = Type::scalar(LaneKind::F64);

    const fn scalar(kind: LaneKind) -> Type {
        Type { kind, lanes: 1 }
    }

    /// Vector of `lanes` lanes of this scalar's kind.
    pub fn vector(self, lanes: usize) -> Type {
        Type { kind: self.kind, lanes }
    }

    /// The type of a lane.
    pub fn element(self) -> Type {
        Type::scalar(self.kind)
    }

    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        self.kind.bytes() * self.lanes
    }
}

/// The bits of each lane of a constant.
pub type Bits = SmallVec<[u64; 2]>;

/// A constant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VectorConstant {
    /// The bits of each lane.
    pub bits: Bits,
    /// The lanes that may be anything, a bit each; here they are zero.
    pub undefined: u64,
}

/// Definition of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Def {
    /// The argument of a number.
    Argument(usize),
    /// A constant.
    Constant(VectorConstant),
    /// Any bits.
    Undefined,
    /// The address of a function of the module.
    Function(FunctionId),
    /// The address of a variable of the module, by number.
    Global(usize),
    /// An instruction.
    Instruction,
}

/// A value.
#[derive(Clone, Debug)]
pub struct Value {
    /// Type of the value.
    pub ty: Type,
    /// Definition of the value.
    pub def: Def,
}

/// Directions in which numbers are rounded to whole ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoundingDirection {
    /// To the nearest one, of two to the even one.
    Nearest,
    /// To the largest one that is not larger.
    Down,
    /// To the smallest one that is not smaller.
    Up,
    /// To the one that is nearer to zero.
    Zero,
}

/// Integer comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compare {
    /// `a == b`
    Equal,
    /// `a != b`
    NotEqual,
    /// `a < b`
    Less,
    /// `a > b`
    Greater,
}

/// Operation of an instruction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SsaOp {
    /// Local variable that loads read and stores write; its address does not escape.
    Variable(Type),
    /// Stack memory of this many bytes.
    Stack(usize),
    /// Shared memory of this many bytes; a kernel has one such piece.
    SharedMemory(usize),
    /// Coordinate of the thread in the grid, as a 32-bit integer.
    Coordinate(Coordinate),
    /// Barrier of the block's threads, which then see each other's writes.
    Barrier,
    /// Asynchronous copy from a GPU's global to shared memory, from the second operand's address to the first
    /// one's; zeros replace the bytes beyond the third operand, where there is one.
    Copy {
        /// Bytes that it writes.
        bytes: usize,
    },
    /// Ends a group of the thread's asynchronous copies, and waits until at most this many of the latest
    /// groups are pending.
    Wait(u8),
    /// Reads memory or a variable.
    Load {
        /// Whether nothing ever writes there.
        invariant: bool,
    },
    /// Writes a value to memory or a variable.
    Store,
    /// The address of element `index` from `base`, of elements of a type.
    Element(Type),
    /// Integer arithmetic whose result is in range, as for the next two.
    Add,
    Sub,
    Mul,
    /// Modulo 2 to the number of bits.
    AddWrapping,
    SubWrapping,
    MulWrapping,
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
    /// Comparison of integers.
    Compare(Compare),
    FAdd,
    FSub,
    FMul,
    FDiv,
    FNeg,
    FAbs,
    Sqrt,
    /// The integer next to a number, with its sign; NaN of NaN.
    Round(RoundingDirection),
    /// The first number with the sign of the second.
    CopySign,
    /// The smaller one; NaN where one is NaN. Of zeros of both signs either one. Where both are variable, the
    /// first takes longer; the builder puts one that comes from other lanes second.
    FMin,
    FMax,
    /// `a · b + c`, rounded once.
    Fma,
    /// Dot product of four 8-bit integers of each 32-bit lane, added to a sum modulo 2^32. Operands are the
    /// sums and both factors, all of 32-bit integers, 16, 8 or 4 of them.
    Dot4 {
        /// Whether each factor is signed; [`Target::dot4_lanes`](tilewright_ir::Target::dot4_lanes) says what
        /// a machine has instructions for.
        signed: [bool; 2],
    },
    /// Dot product of two signed 16-bit integers of each lane, as with [`SsaOp::Dot4`]; x86-64 alone has it.
    Dot2,
    /// Dot product of two bf16 numbers of each lane, added to an f32 sum: that of the upper halves first,
    /// each addition rounded once, with numbers below the normal ones as zeros. Operands are the sums, and
    /// both factors as 32-bit integers, 16, 8 or 4 of them;
    /// [`Target::dot2_lanes`](tilewright_ir::Target::dot2_lanes) says which machines have it.
    DotOfHalves,
    /// The nearest bf16 numbers of 16 or 8 lanes of f32, halves to even, as 16-bit integers; zeros for
    /// numbers below the normal ones. Machines with [`SsaOp::DotOfHalves`] have it.
    NearestBf16,
    /// Bytes of two vectors of 64, picked by the low 7 bits of each byte of the first operand; all three are
    /// 16 lanes of 32-bit integers. AVX-512 VBMI alone has it.
    PickBytes,
    /// The number with the first 11 of its bits, rounded.
    Tf32,
    /// A warp's load of 2 or 4 tiles of 8 rows of 16 bytes each from shared memory (`ldmatrix`): the threads
    /// 8·n and after have the addresses of the rows of tile n, and a lane for each tile gives the thread
    /// 4·g + t the four bytes t of row g, or transposed the 16-bit numbers 2·t and 2·t + 1 of column g.
    LoadTiles {
        /// Whether it gives columns.
        transposed: bool,
    },
    /// Tile product of a warp: 16 × 8 by 8 × 8 f32 numbers, or twice as many steps of 16-bit numbers,
    /// added to four sums of each thread. Operands are its four registers of rows, two of columns, the sums.
    TileProduct(LaneKind),
    /// Makes the thread's writes to shared memory visible to the async proxy, which reads it for TMA and
    /// `wgmma`.
    ProxyFence,
    /// Orders the thread's registers ahead of the warpgroup products that follow (`wgmma.fence`).
    GroupFence,
    /// Begins a warpgroup's product of 64 rows by twice as many columns as there are sums. Operands are the
    /// descriptors of both factors in shared memory, in place of that of rows perhaps the four registers of
    /// an f32 factor, then the sums of the thread, to which it adds. The result is pending until the thread
    /// has waited for it.
    GroupProduct {
        /// Kind of the factors: 8 steps in f32, 16 of 16-bit numbers.
        factors: LaneKind,
        /// Whether the factors of rows and of columns are MN-major.
        across: [bool; 2],
        /// Whether it overwrites the sums.
        begins: bool,
    },
    /// Commits the pending products as a group (`wgmma.commit_group`).
    GroupEnd,
    /// Waits until at most this many of the latest groups of products are pending (`wgmma.wait_group`). It
    /// returns the sums, which nothing else may touch while a pending product changes them.
    GroupWait(u8),
    /// `a < b` of floating-point numbers, false for NaN.
    FLess,
    /// The second where the first holds, else the third.
    Select,
    /// The low bits of an integer.
    Truncate,
    /// The nearest integer without sign of fewer bits, of one without sign.
    TruncateSaturated,
    /// A signed integer in more bits.
    ExtendSigned,
    /// An integer without sign in more bits.
    ExtendUnsigned,
    /// A signed integer as a number.
    ToReal,
    /// Converts a floating-point number to a signed integer: truncated and saturated, NaN to zero.
    ToInteger,
    /// A number as a signed integer, towards zero, where the type holds it; else it may be any integer.
    ToIntegerInRange,
    /// f32 numbers in a vector register as 32-bit integers, the least one where no such integer is near or
    /// the number is NaN, as on x86-64.
    ToIntegerOrLeast {
        /// Whether it rounds to the nearest, of two to the even one, instead of towards zero.
        nearest: bool,
    },
    /// A number in another width.
    Convert,
    /// Reinterprets the bits as another type.
    Bitcast,
    /// Hides the value's origin from back ends.
    Opaque,
    /// An address as a number.
    Address,
    /// The scalar in every lane.
    Splat,
    /// Lanes of two vectors side by side; negative where any will do.
    Shuffle(Vec<i32>),
    /// The vector with one lane replaced.
    Insert(usize),
    /// Lane of a vector.
    Extract(usize),
    /// Reads the lanes in a mask from an address; the others are the third operand's.
    MaskedLoad,
    /// Writes the lanes of a value in a mask to an address.
    MaskedStore,
    /// Masked load, each lane from its own address.
    Gather,
    /// Masked store, each lane to its own address.
    Scatter,
    /// Brings an address near.
    Prefetch {
        /// Whether a write follows.
        for_write: bool,
    },
    /// Calls the function that is the last operand.
    Call,
    /// A machine's own instructions.
    Assembly(Box<Assembly>),
    /// A value for each of some blocks that control comes from.
    Phi(Vec<BlockId>),
    /// Goes to a block.
    Br(BlockId),
    /// Goes to the first block where the condition holds, else to the second.
    CondBr(BlockId, BlockId),
    /// Leaves the function, with the operand where it gives something.
    Return,
}

/// Instructions in a machine's own words.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Assembly {
    /// Text in AT&T syntax.
    pub text: String,
    /// Operands, results and clobbers, as LLVM writes them.
    pub constraints: Cow<'static, str>,
}

/// The operands of an instruction.
pub type InstOperands = SmallVec<[Id; 4]>;

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// Operation.
    pub op: SsaOp,
    /// Operands of the operation.
    pub operands: InstOperands,
    /// Value that results; `None` for an instruction without one.
    pub result: Option<Id>,
    /// Alignment of the address that it accesses, in bytes; 0 where it accesses none.
    pub align: u32,
}

/// Visibility of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linkage {
    /// Others may call it, by the C calling convention.
    Exported,
    /// Exported, and not replaceable by another object's function.
    Protected,
    /// Protected, and not visible outside the library that it is linked into.
    Hidden,
    /// Visible in this module only.
    Internal,
    /// Defined in another module.
    Outside,
    /// Defined in another module, or nowhere: its address is null then.
    Weak,
    /// Defined in the C library, without side effects.
    Library,
}

/// CPU that a function is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpu {
    /// CPU of the target.
    Target,
    /// The family's first, with what exported code asks for before it runs.
    Checked,
    /// The family's first.
    First,
}

/// A parameter of a function.
#[derive(Clone, Copy, Debug)]
pub struct FunctionParameter {
    /// Type of the parameter.
    pub ty: Type,
    /// Properties of the memory that it points to.
    pub buffer: Option<UnaliasedMemory>,
    /// Whether it is a tensor map of 128 bytes rather than an address.
    pub is_map: bool,
}

/// Memory that no other parameter leads to.
#[derive(Clone, Copy, Debug)]
pub struct UnaliasedMemory {
    /// Size in bytes; 0 where that is unknown.
    pub bytes: u64,
    /// Whether the memory is read-only.
    pub is_constant: bool,
    /// Alignment in bytes.
    pub align: u64,
}

/// A function.
#[derive(Clone, Debug)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// Visibility.
    pub linkage: Linkage,
    /// CPU that it is compiled for.
    pub cpu: Cpu,
    /// Threads of a block on each axis, for a GPU's kernel.
    pub threads: Option<[i64; 3]>,
    /// Neighbouring blocks along x of a GPU that form a cluster.
    pub cluster: i64,
    /// Type of the result, if any.
    pub result: Option<Type>,
    /// Parameters, the first values of the function.
    pub parameters: Vec<FunctionParameter>,
    /// Values of the function.
    pub values: Vec<Value>,
    /// Basic blocks, the entry first; empty for a declaration.
    pub blocks: Vec<Vec<Instruction>>,
    /// Names of values, for readers.
    pub names: Vec<(Id, String)>,
}

/// A variable of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Global {
    /// A 32-bit integer, by its name, that starts as 0.
    Integer(String),
    /// A constant text, with a zero behind it.
    Text(String),
}

/// The functions of a program.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// Name of the module.
    pub name: String,
    /// Functions that the module defines or declares.
    pub functions: Vec<Function>,
    /// Variables of its own.
    pub globals: Vec<Global>,
}

impl Function {
    /// Whether it is declared only.
    pub fn is_outside(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Reachable blocks, in an order in which loops are contiguous and successors of a branch come later, so
    /// that all values but those of phis are defined before they are used.
    pub fn order(&self) -> Vec<BlockId> {
        let mut seen = vec![false; self.blocks.len()];
        let mut out = Vec::with_capacity(self.blocks.len());
        // The block, and how many of its successors are done.
        let mut stack = vec![(BlockId::new(0), 0)];
        seen[0] = true;
        while let Some((block, done)) = stack.pop() {
            // Leaving a loop comes first, so that it is last in the reversed order.
            match self.successors(block).rev().nth(done) {
                Some(next) => {
                    stack.push((block, done + 1));
                    if !seen[next.at()] {
                        seen[next.at()] = true;
                        stack.push((next, 0));
                    }
                }
                None => out.push(block),
            }
        }
        out.reverse();
        out
    }

    /// Successors of a block.
    pub fn successors(&self, block: BlockId) -> impl DoubleEndedIterator<Item = BlockId> + use<> {
        let [a, b] = match self.blocks[block.at()].last().map(|last| &last.op) {
            Some(SsaOp::Br(to)) => [Some(*to), None],
            Some(SsaOp::CondBr(then, otherwise)) => [Some(*then), Some(*otherwise)],
            _ => [None; 2],
        };
        a.into_iter().chain(b)
    }

    /// Makes addresses integers, as machines have them.
    pub fn pointers_as_integers(&mut self) {
        for value in &mut self.values {
            if let LaneKind::Pointer(_) = value.ty.kind {
                value.ty.kind = LaneKind::I64;
            }
        }
    }

    /// Replaces vectors of booleans by vectors of integers, all bits set where they hold, as machines without
    /// mask registers have them.
    pub fn masks_as_integers(&mut self) {
        for value in &mut self.values {
            if value.ty.kind == LaneKind::I1 && value.ty.lanes > 1 {
                value.ty.kind = LaneKind::I32;
                if let Def::Constant(constant) = &mut value.def {
                    constant.bits.iter_mut().for_each(|b| *b *= u64::from(u32::MAX));
                }
            }
        }
    }
}
