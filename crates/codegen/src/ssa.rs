//! Static single assignment form, the output of the generator and the input of every back end.
//!
//! A module is one program. Types are machine-independent, except that addresses have 64 bits; a back end
//! rejects operations that it does not support. Instructions accept both scalars and vectors.

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
    /// Value of a function.
    Id
}

number! {
    /// Function of a module.
    FunctionId
}

number! {
    /// Basic block of a function; the first is the entry.
    BlockId
}

/// Address space of a pointer. Only GPUs distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressSpace {
    /// Generic address space.
    All,
    /// Global memory of a GPU.
    Global,
    /// Shared memory of a GPU block.
    Shared,
}

/// Coordinate of a GPU thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coordinate {
    /// Index of the block on an axis, 0 to 2.
    Block(u8),
    /// Index of the thread in its block on an axis, 0 to 2.
    Thread(u8),
}

/// Element type of a scalar or vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaneKind {
    /// Boolean.
    I1,
    /// 8-bit integer, for storage; arithmetic is done in wider types.
    I8,
    /// 16-bit integer, for storage, shifts and conversions only.
    I16,
    /// A 32-bit integer.
    I32,
    /// A 64-bit integer.
    I64,
    /// Pointer.
    Pointer(AddressSpace),
    /// IEEE half, for storage only.
    F16,
    /// bfloat16, for storage only.
    Bf16,
    /// An f32 number.
    F32,
    /// An f64 number.
    F64,
}

impl LaneKind {
    /// Size in bytes of a lane in memory.
    pub fn bytes(self) -> usize {
        match self {
            LaneKind::I1 | LaneKind::I8 => 1,
            LaneKind::I16 | LaneKind::F16 | LaneKind::Bf16 => 2,
            LaneKind::I32 | LaneKind::F32 => 4,
            LaneKind::I64 | LaneKind::F64 | LaneKind::Pointer(_) => 8,
        }
    }

    /// Mask of the bits of a lane.
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

/// Type: a scalar (one lane) or a vector.
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
    /// 8-bit integer.
    pub const I8: Type = Type::scalar(LaneKind::I8);
    /// A 16-bit integer.
    pub const I16: Type = Type::scalar(LaneKind::I16);
    /// A 32-bit integer.
    pub const I32: Type = Type::scalar(LaneKind::I32);
    /// A 64-bit integer.
    pub const I64: Type = Type::scalar(LaneKind::I64);
    /// Pointer in the generic address space.
    pub const POINTER: Type = Type::scalar(LaneKind::Pointer(AddressSpace::All));
    /// Pointer to global memory of a GPU.
    pub const GLOBAL: Type = Type::scalar(LaneKind::Pointer(AddressSpace::Global));
    /// Pointer to shared memory of a GPU block.
    pub const SHARED: Type = Type::scalar(LaneKind::Pointer(AddressSpace::Shared));
    /// IEEE half.
    pub const F16: Type = Type::scalar(LaneKind::F16);
    /// bfloat16.
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

    /// Scalar type of a lane.
    pub fn element(self) -> Type {
        Type::scalar(self.kind)
    }

    /// Size in bytes.
    pub fn bytes(self) -> usize {
        self.kind.bytes() * self.lanes
    }
}

/// Bit pattern of each lane of a constant.
pub type Bits = SmallVec<[u64; 2]>;

/// Constant scalar or vector.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VectorConstant {
    /// Bit pattern of each lane.
    pub bits: Bits,
    /// Bit mask of undefined lanes, which are zero in `bits`.
    pub undefined: u64,
}

/// Definition of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Def {
    /// Function parameter, by index.
    Argument(usize),
    /// Constant.
    Constant(VectorConstant),
    /// Undefined value.
    Undefined,
    /// Address of a function of the module.
    Function(FunctionId),
    /// Address of a global variable of the module, by index.
    Global(usize),
    /// Result of an instruction.
    Instruction,
}

/// Value.
#[derive(Clone, Debug)]
pub struct Value {
    /// Type of the value.
    pub ty: Type,
    /// Definition of the value.
    pub def: Def,
}

/// Rounding mode to integral values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoundingDirection {
    /// To nearest, ties to even.
    Nearest,
    /// Towards minus infinity.
    Down,
    /// Towards plus infinity.
    Up,
    /// Towards zero.
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
    /// Local variable, accessed by loads and stores only; its address does not escape.
    Variable(Type),
    /// Stack allocation of this many bytes.
    Stack(usize),
    /// Shared memory of this many bytes; a kernel has one such allocation.
    SharedMemory(usize),
    /// Coordinate of the thread in the grid, as a 32-bit integer.
    Coordinate(Coordinate),
    /// Barrier of a GPU block, with memory visibility.
    Barrier,
    /// Asynchronous copy from global to shared memory (`cp.async`): operands are destination, source and,
    /// optionally, the number of bytes to copy, beyond which zeros are written.
    Copy {
        /// Size of the copy in bytes.
        bytes: usize,
    },
    /// Commit and wait for asynchronous copies: ends a group, and waits until at most this many of the latest
    /// groups are pending.
    Wait(u8),
    /// Load from memory or of a variable.
    Load {
        /// Whether the memory is never written.
        invariant: bool,
    },
    /// Store to memory or a variable.
    Store,
    /// Address of element `index` from `base`, for elements of this type (`getelementptr`).
    Element(Type),
    /// Integer arithmetic without overflow, like the next two operations.
    Add,
    Sub,
    Mul,
    /// Integer arithmetic that wraps around.
    AddWrapping,
    SubWrapping,
    MulWrapping,
    /// Signed division, rounded towards zero.
    SignedDiv,
    SignedRem,
    UnsignedDiv,
    UnsignedRem,
    ShiftLeft,
    /// Arithmetic right shift.
    ShiftSigned,
    /// Logical right shift.
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
    /// Rounding to an integral value, which keeps the sign and NaN.
    Round(RoundingDirection),
    /// First operand with the sign of the second.
    CopySign,
    /// Minimum; NaN if either operand is NaN. For zeros of opposite signs, either zero. The first operand has
    /// the longer latency; the builder puts a value that depends on other lanes second.
    FMin,
    FMax,
    /// First operand times two to the power of the second, an integral number, rounded once; also for powers
    /// that the type does not represent. AVX-512 only, for vectors of 128, 256 or 512 bits.
    Scale,
    /// Fused multiply-add: `a · b + c`, rounded once.
    Fma,
    /// Dot products of four 8-bit integers per 32-bit lane, accumulated modulo 2^32. Operands are the
    /// accumulators and both factors, as 4, 8 or 16 lanes of 32-bit integers.
    Dot4 {
        /// Whether each factor is signed; [`Target::dot4_lanes`](tilewright_ir::Target::dot4_lanes) says
        /// which combinations a machine has instructions for.
        signed: [bool; 2],
    },
    /// Dot products of two signed 16-bit integers per lane, accumulated like [`SsaOp::Dot4`]; x86-64 only.
    Dot2,
    /// Dot products of four 8-bit integers per lane, with an unsigned and a signed factor, accumulated like
    /// [`SsaOp::Dot4`]. The sum of the first two products and that of the last two must fit 16 bits; x86-64
    /// only.
    Dot4BySums,
    /// Dot products of two bf16 numbers per lane, accumulated in f32: the upper halves first, each addition
    /// rounded once, subnormal numbers flushed to zero. Operands are the accumulators, and both factors as 4,
    /// 8 or 16 lanes of 32-bit integers; [`Target::dot2_lanes`](tilewright_ir::Target::dot2_lanes) says which
    /// machines support it.
    DotOfHalves,
    /// Conversion of 8 or 16 f32 lanes to bf16, to nearest even, as 16-bit integers; subnormal numbers are
    /// flushed to zero. Machines with [`SsaOp::DotOfHalves`] support it.
    NearestBf16,
    /// Byte permutation of two vectors of 64 bytes: each byte is selected by the low 7 bits of a byte of the
    /// first operand. All operands are 16 lanes of 32-bit integers. AVX-512 VBMI only.
    PickBytes,
    /// Rounding to TF32: 11 significant bits.
    Tf32,
    /// Load of 2 or 4 tiles of 8 rows of 16 bytes from shared memory by a warp (`ldmatrix`). Threads from 8·n
    /// on provide the addresses of the rows of tile n. The result has a lane for each tile: thread 4·g + t
    /// receives the four bytes t of row g or, if transposed, the 16-bit numbers 2·t and 2·t + 1 of column g.
    LoadTiles {
        /// Whether tiles are transposed.
        transposed: bool,
    },
    /// Tile product of a warp (`mma.sync`): 16 × 8 by 8 × 8 f32 numbers, or twice as many reduction steps of
    /// 16-bit numbers. Operands are the thread's four registers of A, two of B, and its four accumulators.
    TileProduct(LaneKind),
    /// Makes the thread's writes to shared memory visible to the async proxy, which reads it for TMA and
    /// `wgmma`.
    ProxyFence,
    /// Fence that orders the thread's registers before the following warpgroup products (`wgmma.fence`).
    GroupFence,
    /// Warpgroup product (`wgmma.mma_async`) of 64 rows by twice as many columns as a thread has
    /// accumulators. Operands are the shared memory descriptors of A and B, or four registers in place of A's
    /// for f32, then the accumulators. The result is pending until waited for.
    GroupProduct {
        /// Type of the operands: 8 reduction steps of f32, 16 of 16-bit numbers.
        factors: LaneKind,
        /// Whether A and B are MN-major.
        across: [bool; 2],
        /// Whether the product overwrites the accumulators, rather than adding to them.
        begins: bool,
    },
    /// Commits the pending products as a group (`wgmma.commit_group`).
    GroupEnd,
    /// Waits until at most this many of the latest groups of products are pending (`wgmma.wait_group`), and
    /// returns the accumulators, which must not be used while a product that changes them is pending.
    GroupWait(u8),
    /// Comparison `a < b` of floating-point numbers, false for NaN.
    FLess,
    /// Selection: the second operand if the first is true, else the third.
    Select,
    /// Truncation of an integer to fewer bits.
    Truncate,
    /// Truncation of an unsigned integer to fewer bits, with saturation.
    TruncateSaturated,
    /// Concatenation of two vectors of signed integers, truncated to half of the bits with saturation: each
    /// 16 bytes hold the lanes of 16 bytes of the first operand, then those of the second. Vectors of 512
    /// bits of 32-bit integers, or of 16-bit ones; AVX-512 only.
    PackSaturated {
        /// Whether the result is unsigned; only of 16-bit integers.
        unsigned: bool,
    },
    /// Sum of signed 16-bit integers, with saturation; vectors of 512 bits, AVX-512 only.
    AddSaturated,
    /// Sign extension.
    ExtendSigned,
    /// Zero extension.
    ExtendUnsigned,
    /// Conversion of a signed integer to floating point.
    ToReal,
    /// Conversion of a floating-point number to a signed integer: truncated and saturated, NaN to zero.
    ToInteger,
    /// Conversion of a floating-point number to a signed integer by truncation; undefined out of range.
    ToIntegerInRange,
    /// Conversion of f32 lanes to 32-bit integers; the smallest integer for NaN and out of range, as on
    /// x86-64.
    ToIntegerOrLeast {
        /// Whether to round to nearest even, rather than towards zero.
        nearest: bool,
    },
    /// Conversion between floating-point types.
    Convert,
    /// Reinterpretation of the bits as another type.
    Bitcast,
    /// Identity that hides the value's origin from optimizations.
    Opaque,
    /// Conversion of a pointer to an integer.
    Address,
    /// Broadcast of a scalar to every lane.
    Splat,
    /// Shuffle of the lanes of two concatenated vectors; a negative index is an undefined lane.
    Shuffle(Vec<i32>),
    /// Insertion of a scalar as the lane of this index.
    Insert(usize),
    /// Extraction of the lane of this index.
    Extract(usize),
    /// Masked load; lanes outside the mask are taken from the third operand.
    MaskedLoad,
    /// Masked store.
    MaskedStore,
    /// Masked load with an address for each lane.
    Gather,
    /// Masked store with an address for each lane.
    Scatter,
    /// Prefetch of an address.
    Prefetch {
        /// Whether to prefetch for a write.
        for_write: bool,
    },
    /// Call of the function that is the last operand.
    Call,
    /// Inline assembly.
    Assembly(Box<Assembly>),
    /// Phi: a value for each of these predecessors.
    Phi(Vec<BlockId>),
    /// Unconditional branch.
    Br(BlockId),
    /// Conditional branch: to the first block if the condition is true, else to the second.
    CondBr(BlockId, BlockId),
    /// Return, with the operand as the result if there is one.
    Return,
}

/// Inline assembly.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Assembly {
    /// Template in AT&T syntax.
    pub text: String,
    /// Constraints and clobbers in LLVM's syntax.
    pub constraints: Cow<'static, str>,
}

/// Operands of an instruction.
pub type InstOperands = SmallVec<[Id; 4]>;

/// Instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// Operation.
    pub op: SsaOp,
    /// Operands, in the order that the operation defines.
    pub operands: InstOperands,
    /// Result; `None` for an instruction without one.
    pub result: Option<Id>,
    /// Alignment of the accessed address in bytes; 0 if the instruction accesses no memory.
    pub align: u32,
}

/// Linkage and visibility of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linkage {
    /// External, with the C calling convention.
    Exported,
    /// External, and not interposable by another object.
    Protected,
    /// External within a library only.
    Hidden,
    /// Internal to the module.
    Internal,
    /// Declaration of a function of another module.
    Outside,
    /// Weak declaration: its address is null if no module defines it.
    Weak,
    /// Declaration of a C library function without side effects.
    Library,
}

/// CPU whose instructions a function may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cpu {
    /// CPU of the target.
    Target,
    /// Baseline of the family, and the features that exported code checks for before it runs.
    Checked,
    /// Baseline of the family.
    First,
}

/// Function parameter.
#[derive(Clone, Copy, Debug)]
pub struct FunctionParameter {
    /// Type of the parameter.
    pub ty: Type,
    /// Properties of the buffer to which the parameter points.
    pub buffer: Option<UnaliasedMemory>,
    /// Whether the parameter is a tensor map (TMA descriptor) of 128 bytes by value, rather than a pointer.
    pub is_map: bool,
}

/// Memory that no other parameter aliases.
#[derive(Clone, Copy, Debug)]
pub struct UnaliasedMemory {
    /// Size in bytes; 0 if unknown.
    pub bytes: u64,
    /// Whether the memory is read-only.
    pub is_constant: bool,
    /// Alignment in bytes.
    pub align: u64,
}

/// Function.
#[derive(Clone, Debug)]
pub struct Function {
    /// Name of the function.
    pub name: String,
    /// Visibility.
    pub linkage: Linkage,
    /// CPU whose instructions the function may use.
    pub cpu: Cpu,
    /// Block size of a GPU kernel.
    pub threads: Option<[i64; 3]>,
    /// Number of neighbouring blocks along x in a cluster of a GPU.
    pub cluster: i64,
    /// Type of the result, if any.
    pub result: Option<Type>,
    /// Parameters, which are the function's first values.
    pub parameters: Vec<FunctionParameter>,
    /// Values, by index.
    pub values: Vec<Value>,
    /// Basic blocks, the entry first; empty for a declaration.
    pub blocks: Vec<Vec<Instruction>>,
    /// Names of values, for readable output.
    pub names: Vec<(Id, String)>,
}

/// Global variable of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Global {
    /// 32-bit integer of this name, initially 0.
    Integer(String),
    /// Constant text, zero-terminated.
    Text(String),
}

/// Module: the functions of a program.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// Name of the module.
    pub name: String,
    /// Functions that the module defines or declares.
    pub functions: Vec<Function>,
    /// Global variables of the module.
    pub globals: Vec<Global>,
}

impl Function {
    /// Whether the function is only a declaration.
    pub fn is_outside(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Reachable blocks in reverse postorder with contiguous loops, so that all values but those of phis are
    /// defined before their uses.
    pub fn order(&self) -> Vec<BlockId> {
        let mut seen = vec![false; self.blocks.len()];
        let mut out = Vec::with_capacity(self.blocks.len());
        // Each block, with the number of its finished successors.
        let mut stack = vec![(BlockId::new(0), 0)];
        seen[0] = true;
        while let Some((block, done)) = stack.pop() {
            // The loop exit is visited first, so that it comes last in the reversed order.
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

    /// Lowers pointers to integers, for back ends without pointer types.
    pub fn pointers_as_integers(&mut self) {
        for value in &mut self.values {
            if let LaneKind::Pointer(_) = value.ty.kind {
                value.ty.kind = LaneKind::I64;
            }
        }
    }

    /// Lowers vectors of booleans to integer vectors of all ones or zeros, for machines without mask
    /// registers.
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
