//! Loop IR: buffers and a tree of statements.

use crate::dtype::DType;
use crate::expr::{Cond, Expr, ReduceOp, TreePart};
pub use crate::ids::{BufferId, LoopId};
use crate::index::{Index, Ranges};
use crate::op::SizeRange;

/// Memory space of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Main memory.
    Global,
    /// Thread-private memory, meant to stay in cache, as for packed copies.
    Local,
    /// Registers, if all subscripts are constant after unrolling and vectorizing; else the buffer is spilled
    /// to the stack.
    Register,
    /// Shared memory of a GPU block.
    Shared,
    /// Shared memory filled by asynchronous copies of all threads (`cp.async`): a thread may read an element
    /// after waiting for it, see [`Stmt::Wait`].
    Async,
    /// Shared memory filled by bulk copies that one thread issues for the block: with TMA, a box of an array
    /// at once, see [`BoxCopy`](crate::gpu::bulk::BoxCopy).
    Bulk,
    /// Shared memory filled by the bulk copies of a producer warp, on a GPU with TMA; see
    /// [`producer_warp`](crate::gpu::producer_warp).
    Produced,
    /// Shared memory filled as [`Scope::Produced`] and, if two neighbouring blocks along x copy the same
    /// data, by multicast from each other's producer warps; see [`cluster`](crate::gpu::cluster).
    Multicast,
}

impl Scope {
    /// Every scope with its name in the text format.
    pub const ALL: [(Scope, &'static str); 8] = [
        (Scope::Global, "global"),
        (Scope::Local, "local"),
        (Scope::Register, "register"),
        (Scope::Shared, "shared"),
        (Scope::Async, "async"),
        (Scope::Bulk, "bulk"),
        (Scope::Produced, "fed"),
        (Scope::Multicast, "multicast"),
    ];

    /// Whether the scope is shared memory of a GPU block.
    pub fn is_shared(self) -> bool {
        matches!(self, Scope::Shared | Scope::Async) || self.is_tma()
    }

    /// Whether stores are asynchronous, and visible only after a wait.
    pub fn is_on_its_way(self) -> bool {
        self == Scope::Async || self.is_tma()
    }

    /// Whether bulk copies, issued by one thread, fill the memory.
    pub fn is_tma(self) -> bool {
        self == Scope::Bulk || self.is_produced()
    }

    /// Whether a producer warp fills the memory, on a GPU with TMA.
    pub fn is_produced(self) -> bool {
        matches!(self, Scope::Produced | Scope::Multicast)
    }
}

/// Role of a buffer in the interface of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Read-only argument.
    Input,
    /// Read-only argument that is constant across runs, such as weights; copies of it can be packed in
    /// `prepare`.
    ConstInput,
    /// Argument of which the program writes all elements.
    Output,
    /// Buffer that lives across the parts of the program, filled by `prepare` from inputs or by the body for
    /// `finish`.
    Kept,
    /// Temporary, which lives from its `alloc` statement to the end of the enclosing block.
    Temporary,
}

impl Role {
    /// Every role with its name in the text format.
    pub const ALL: [(Role, &'static str); 5] = [
        (Role::Input, "input"),
        (Role::ConstInput, "const"),
        (Role::Output, "output"),
        (Role::Kept, "kept"),
        (Role::Temporary, "temporary"),
    ];
}

/// Dense row-major array. A packed layout is a shape with more dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Name, unique in the program.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first; the last dimension is contiguous.
    pub shape: Vec<i64>,
    /// Memory space.
    pub scope: Scope,
    /// Role in the program's interface.
    pub role: Role,
}

impl Buffer {
    /// Number of elements; `None` on overflow.
    pub fn n_elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, &e| n.checked_mul(u64::try_from(e).ok()?))
    }

    /// Size in bytes; `None` on overflow.
    pub fn size_bytes(&self) -> Option<u64> {
        self.n_elements()?.checked_mul(self.dtype.bytes()).filter(|&b| b <= i64::MAX as u64)
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> Vec<i64> {
        let mut strides = vec![1i64; self.shape.len()];
        for d in (1..self.shape.len()).rev() {
            strides[d - 1] = strides[d].wrapping_mul(self.shape[d]);
        }
        strides
    }
}

/// Kind of a loop: the execution of its iterations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoopKind {
    /// Sequential execution.
    Serial,
    /// Parallel execution on the threads of the pool.
    Parallel,
    /// Execution as lanes of vector instructions.
    Vectorized,
    /// Sequential execution, with the body repeated in the code.
    Unrolled,
    /// Execution by the blocks along a GPU axis: 0 to 2 for x, y and z.
    Block(u8),
    /// Execution by the threads along a GPU axis: 0 to 2 for x, y and z.
    Thread(u8),
    /// Execution by tensor instructions if the target has them, else sequential. The iterations are the
    /// reduction steps of a tile product on tensor cores, see [`TileProduct`](crate::gpu::TileProduct), or of
    /// a CPU's dot product for [`TensorProduct::Dot4`] and [`TensorProduct::Dot2`]; for
    /// [`TensorProduct::Tma`], they are the parts of a box that a warp stores.
    Tensor(TensorProduct),
    /// Sequential execution, or alternation of iterations between the consumer teams of a kernel with a
    /// producer warp (ping-pong): see [`producer_warp`](crate::gpu::producer_warp).
    Turns,
}

/// Kind of tensor instruction: a tensor core product with f32 accumulators, a CPU's dot product, or a bulk
/// store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorProduct {
    /// `mma.sync` on TF32: operands are rounded to 11 significant bits.
    Tf32,
    /// Three `mma.sync` on TF32 for an f32 product (3xTF32): each operand is the sum of two TF32 numbers, and
    /// the smallest of the four products is omitted. Nearly as exact as f32.
    Tf32x3,
    /// Warpgroup product (`wgmma`) with operands in shared memory, see
    /// [`GroupProduct`](crate::gpu::GroupProduct). Operands are f16, bf16, or f32 rounded to TF32.
    Wgmma,
    /// Warpgroup product of f32 in 3xTF32, as [`TensorProduct::Tf32x3`]: shared memory holds both parts of
    /// each operand.
    Wgmmax3,
    /// `mma.sync` on f16 or bf16.
    Halves,
    /// CPU dot products of four 8-bit integers, each added to a 32-bit accumulator by one instruction: see
    /// [`dot`](crate::dot).
    Dot4,
    /// CPU dot products of two bf16 numbers, added to f32 accumulators, or of two 16-bit integers, added to
    /// 32-bit accumulators.
    Dot2,
    /// Bulk store of a warp's fragment by TMA: see [`BoxStore`](crate::gpu::store::BoxStore).
    Tma,
}

impl TensorProduct {
    /// Reduction steps of one dot product instruction; `None` for other kinds.
    pub fn dot_steps(self) -> Option<i64> {
        match self {
            TensorProduct::Dot4 => Some(4),
            TensorProduct::Dot2 => Some(2),
            TensorProduct::Tf32
            | TensorProduct::Tf32x3
            | TensorProduct::Wgmma
            | TensorProduct::Wgmmax3
            | TensorProduct::Halves
            | TensorProduct::Tma => None,
        }
    }

    /// Whether the kind is a warpgroup product.
    pub fn is_of_groups(self) -> bool {
        matches!(self, TensorProduct::Wgmma | TensorProduct::Wgmmax3)
    }
}

impl LoopKind {
    /// Every kind with its keyword in the text format.
    pub const ALL: [(LoopKind, &'static str); 19] = [
        (LoopKind::Serial, "for"),
        (LoopKind::Parallel, "parallel"),
        (LoopKind::Vectorized, "vectorized"),
        (LoopKind::Unrolled, "unrolled"),
        (LoopKind::Block(0), "block.x"),
        (LoopKind::Block(1), "block.y"),
        (LoopKind::Block(2), "block.z"),
        (LoopKind::Thread(0), "thread.x"),
        (LoopKind::Thread(1), "thread.y"),
        (LoopKind::Thread(2), "thread.z"),
        (LoopKind::Tensor(TensorProduct::Tf32), "tf32"),
        (LoopKind::Tensor(TensorProduct::Tf32x3), "tf32x3"),
        (LoopKind::Tensor(TensorProduct::Wgmma), "wgmma"),
        (LoopKind::Tensor(TensorProduct::Wgmmax3), "wgmmax3"),
        (LoopKind::Tensor(TensorProduct::Halves), "halves"),
        (LoopKind::Tensor(TensorProduct::Dot4), "dot4"),
        (LoopKind::Tensor(TensorProduct::Dot2), "dot2"),
        (LoopKind::Tensor(TensorProduct::Tma), "tma"),
        (LoopKind::Turns, "turns"),
    ];

    /// Keyword in the text format.
    pub fn name(self) -> &'static str {
        LoopKind::ALL.iter().find(|(k, _)| *k == self).expect("every kind is listed").1
    }
}

/// Loop over `0..extent`.
#[derive(Clone, Debug, PartialEq)]
pub struct Loop {
    /// Loop variable.
    pub var: LoopId,
    /// Number of iterations; may depend on outer variables. A loop of negative extent has no iterations.
    pub extent: Index,
    /// Execution of the iterations.
    pub kind: LoopKind,
    /// Statements of an iteration.
    pub body: Vec<Stmt>,
}

/// Statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Stmt {
    /// A loop.
    For(Loop),
    /// Runs `then` if the condition holds, else `otherwise`.
    If {
        /// The condition.
        cond: Cond,
        /// Statements executed if the condition holds.
        then: Vec<Stmt>,
        /// Statements executed if the condition does not hold.
        otherwise: Vec<Stmt>,
    },
    /// Allocation of a temporary with undefined contents, which lives until the end of the enclosing block.
    Alloc(BufferId),
    /// `buffer[index] = value`
    Store {
        /// Written buffer.
        buffer: BufferId,
        /// Subscripts, one for each dimension.
        index: Vec<Index>,
        /// Value to store.
        value: Expr,
    },
    /// `buffer[index] = op(first ? identity : buffer[index], value)`
    Update {
        /// Buffer reduced into.
        buffer: BufferId,
        /// Subscripts, one for each dimension.
        index: Vec<Index>,
        /// Operation that combines the old value with the new one.
        op: ReduceOp,
        /// Value to combine with the element.
        value: Expr,
        /// Condition for the first iteration of the reduction, in which the identity replaces the old value.
        /// `Not(True)` never holds.
        first: Cond,
    },
    /// Prefetch of an element's cache line, without effect on values; may be out of bounds.
    Prefetch {
        /// Buffer read or written soon.
        buffer: BufferId,
        /// Subscripts, one for each dimension.
        index: Vec<Index>,
        /// Whether the line will be written.
        for_write: bool,
    },
    /// Barrier: waits until all threads of a GPU block have arrived, and makes their writes visible. No
    /// effect in sequential execution.
    Barrier,
    /// Commit and wait for [asynchronous](Scope::is_on_its_way) copies: ends a group of the thread's copies
    /// (`cp.async.commit_group`), and waits until at most this many of the latest groups are pending
    /// (`cp.async.wait_group`). No effect in sequential execution.
    Wait(u8),
}

/// Part of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Preparation, run once: fills kept buffers from inputs, for example with packed weights.
    Prepare,
    /// Body, executed in each run.
    Body,
    /// Completion, after the body: converts kept buffers to outputs.
    Finish,
}

impl Part {
    /// Parts with their keywords in the text format, in execution order.
    pub const ALL: [(Part, &'static str); 3] =
        [(Part::Prepare, "prepare"), (Part::Body, "run"), (Part::Finish, "finish")];

    /// Keyword in the text format.
    pub fn name(self) -> &'static str {
        Part::ALL.iter().find(|(p, _)| *p == self).expect("every part is listed").1
    }
}

/// Open (dynamic) size, whose value is given for each run, such as the number of rows of a product.
///
/// Loop extents may depend on an open size, and subscripts may have it as a summand. Buffers have the shape
/// for the largest value, so that shapes do not depend on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpenSize {
    /// Name of the size, as in a workload's text; unique in the program.
    pub name: String,
    /// Variable that counts the size's steps from 0, in scope everywhere in the body like that of an
    /// enclosing loop.
    pub var: LoopId,
    /// Smallest value.
    pub least: i64,
    /// Step between neighbouring values.
    pub step: i64,
    /// Number of values.
    pub n_values: i64,
}

impl OpenSize {
    /// Largest value.
    pub fn most(&self) -> i64 {
        self.least + self.step * (self.n_values - 1)
    }

    /// The size as an index.
    pub fn index(&self) -> Index {
        Index::from(self.var).scale(self.step).offset(self.least)
    }

    /// Value of the variable for a size; `None` if the size is not in the range.
    pub fn steps_to(&self, size: i64) -> Option<i64> {
        let steps = size.checked_sub(self.least)?.checked_div(self.step)?;
        ((0..self.n_values).contains(&steps) && self.least + steps * self.step == size).then_some(steps)
    }
}

/// Program: buffers, and statements for the preparation, the measured run and the completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The workload's name.
    pub name: String,
    /// Buffers, by [`BufferId`]. Arguments come first, in the order of a call.
    pub buffers: Vec<Buffer>,
    /// Names of the loop variables, by [`LoopId`]; unique.
    pub loops: Vec<String>,
    /// Open (dynamic) sizes in the order in which a caller gives them.
    pub sizes: Vec<OpenSize>,
    /// Statements run once for given inputs, outside the timing; they fill [`Role::Kept`] buffers.
    pub prepare: Vec<Stmt>,
    /// Statements of the timed run.
    pub body: Vec<Stmt>,
    /// Statements run after the body, outside the timing; they convert [`Role::Kept`] buffers to outputs.
    pub finish: Vec<Stmt>,
}

impl Program {
    /// Buffer of an id.
    ///
    /// # Panics
    /// If the id belongs to another program.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// Name of a loop variable.
    pub fn loop_name(&self, id: LoopId) -> &str {
        &self.loops[id.0 as usize]
    }

    /// Finds a loop variable by name.
    pub fn find_loop(&self, name: &str) -> Option<LoopId> {
        self.loops.iter().position(|n| n == name).map(|i| LoopId(i as u32))
    }

    /// Finds a buffer by name.
    pub fn find_buffer(&self, name: &str) -> Option<BufferId> {
        self.buffers.iter().position(|b| b.name == name).map(|i| BufferId(i as u32))
    }

    /// Adds a buffer.
    pub fn add_buffer(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }

    /// Adds an open (dynamic) size, and returns its value.
    pub fn open_size(&mut self, name: &str, range: SizeRange) -> Index {
        let SizeRange { least, most, step } = range;
        let var = self.add_loop(format!("{name}.steps"));
        let size = OpenSize { name: name.to_owned(), var, least, step, n_values: (most - least) / step + 1 };
        self.sizes.push(size.clone());
        size.index()
    }

    /// Adds a loop variable. The name must be new.
    pub fn add_loop(&mut self, name: impl Into<String>) -> LoopId {
        self.loops.push(name.into());
        LoopId(self.loops.len() as u32 - 1)
    }

    /// Ranges outside all loops, which are those of the open sizes.
    pub fn ranges(&self) -> Ranges {
        Ranges::of_sizes(self.sizes.iter().map(|size| (size.var, size.n_values)))
    }

    /// Program with a fixed value for each open size, in order, on the same buffers; `None` if a value is not
    /// in its size's range.
    pub fn at(&self, sizes: &[i64]) -> Option<Program> {
        if sizes.len() != self.sizes.len() {
            return None;
        }
        let mut at = self.clone();
        for (size, value) in std::mem::take(&mut at.sizes).iter().zip(sizes) {
            let steps = Index::from(size.steps_to(*value)?);
            at = at.map_parts(|block| block.iter().map(|s| s.substitute(size.var, &steps)).collect());
        }
        Some(at)
    }

    /// Buffers that the caller passes, in order: inputs and outputs.
    pub fn arguments(&self) -> impl Iterator<Item = (BufferId, &Buffer)> {
        self.with_role(|r| matches!(r, Role::Input | Role::ConstInput | Role::Output))
    }

    /// Buffers that live between the parts.
    pub fn kept(&self) -> impl Iterator<Item = (BufferId, &Buffer)> {
        self.with_role(|r| r == Role::Kept)
    }

    /// Statements of a part.
    pub fn part(&self, part: Part) -> &Vec<Stmt> {
        match part {
            Part::Prepare => &self.prepare,
            Part::Body => &self.body,
            Part::Finish => &self.finish,
        }
    }

    /// Statements of a part, mutable.
    pub fn part_mut(&mut self, part: Part) -> &mut Vec<Stmt> {
        match part {
            Part::Prepare => &mut self.prepare,
            Part::Body => &mut self.body,
            Part::Finish => &mut self.finish,
        }
    }

    /// Statements of all parts, in execution order.
    pub fn parts(&self) -> [&Vec<Stmt>; 3] {
        Part::ALL.map(|(part, _)| self.part(part))
    }

    /// Rewrites each part with `f`.
    pub fn map_parts(mut self, mut f: impl FnMut(Vec<Stmt>) -> Vec<Stmt>) -> Program {
        for (part, _) in Part::ALL {
            let block = self.part_mut(part);
            *block = f(std::mem::take(block));
        }
        self
    }

    fn with_role(&self, keep: impl Fn(Role) -> bool) -> impl Iterator<Item = (BufferId, &Buffer)> {
        self.buffers.iter().enumerate().filter(move |(_, b)| keep(b.role)).map(|(i, b)| (BufferId(i as u32), b))
    }
}

impl Stmt {
    /// Blocks directly inside this statement.
    pub fn blocks(&self) -> impl Iterator<Item = &Vec<Stmt>> {
        let (a, b) = match self {
            Stmt::For(l) => (Some(&l.body), None),
            Stmt::If { then, otherwise, .. } => (Some(then), Some(otherwise)),
            Stmt::Alloc(_)
            | Stmt::Store { .. }
            | Stmt::Update { .. }
            | Stmt::Prefetch { .. }
            | Stmt::Barrier
            | Stmt::Wait(_) => (None, None),
        };
        a.into_iter().chain(b)
    }

    /// Blocks directly inside this statement, mutable.
    pub fn blocks_mut(&mut self) -> impl Iterator<Item = &mut Vec<Stmt>> {
        let (a, b) = match self {
            Stmt::For(l) => (Some(&mut l.body), None),
            Stmt::If { then, otherwise, .. } => (Some(then), Some(otherwise)),
            Stmt::Alloc(_)
            | Stmt::Store { .. }
            | Stmt::Update { .. }
            | Stmt::Prefetch { .. }
            | Stmt::Barrier
            | Stmt::Wait(_) => (None, None),
        };
        a.into_iter().chain(b)
    }

    /// Calls `visit` for the blocks directly inside, with the ranges of the enclosing loops, including this
    /// statement.
    pub fn each_block<'a>(&'a self, ranges: &mut Ranges, mut visit: impl FnMut(&'a [Stmt], &mut Ranges)) {
        match self {
            Stmt::For(l) => ranges.inside(l.var, &l.extent, |ranges| visit(&l.body, ranges)),
            _ => self.blocks().for_each(|block| visit(block, ranges)),
        }
    }

    /// Mutable variant of [`Stmt::each_block`].
    pub fn each_block_mut(&mut self, ranges: &mut Ranges, mut visit: impl FnMut(&mut Vec<Stmt>, &mut Ranges)) {
        match self {
            Stmt::For(l) => ranges.inside(l.var, &l.extent, |ranges| visit(&mut l.body, ranges)),
            _ => self.blocks_mut().for_each(|block| visit(block, ranges)),
        }
    }

    /// Whether a vectorized loop may contain the statement, which must be an assignment or an unrolled loop
    /// of assignments.
    pub fn is_vectorizable(&self) -> bool {
        match self {
            Stmt::Store { .. } | Stmt::Update { .. } | Stmt::Prefetch { .. } => true,
            Stmt::For(l) => l.kind == LoopKind::Unrolled && l.body.iter().all(Stmt::is_vectorizable),
            Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => false,
        }
    }

    /// Calls `visit` for this statement and all nested ones, outermost first.
    pub fn walk<'a>(&'a self, visit: &mut dyn FnMut(&'a Stmt)) {
        visit(self);
        for block in self.blocks() {
            for s in block {
                s.walk(visit);
            }
        }
    }

    /// Whether the statement is or contains a parallel loop.
    pub fn has_parallel_loop(&self) -> bool {
        let mut found = false;
        self.walk(&mut |s| found |= matches!(s, Stmt::For(l) if l.kind == LoopKind::Parallel));
        found
    }

    /// Rewrites every index in the statement (extents, conditions, subscripts).
    pub fn map_index(&self, f: &mut dyn FnMut(&Index) -> Index) -> Stmt {
        let block = |b: &Vec<Stmt>, f: &mut dyn FnMut(&Index) -> Index| b.iter().map(|s| s.map_index(f)).collect();
        match self {
            Stmt::For(l) => Stmt::For(Loop { var: l.var, extent: f(&l.extent), kind: l.kind, body: block(&l.body, f) }),
            Stmt::If { cond, then, otherwise } => {
                Stmt::If { cond: cond.map_index(f), then: block(then, f), otherwise: block(otherwise, f) }
            }
            Stmt::Alloc(b) => Stmt::Alloc(*b),
            Stmt::Barrier => Stmt::Barrier,
            Stmt::Wait(n) => Stmt::Wait(*n),
            Stmt::Store { buffer, index, value } => {
                Stmt::Store { buffer: *buffer, index: index.iter().map(&mut *f).collect(), value: value.map_index(f) }
            }
            Stmt::Update { buffer, index, op, value, first } => Stmt::Update {
                buffer: *buffer,
                index: index.iter().map(&mut *f).collect(),
                op: *op,
                value: value.map_index(f),
                first: first.map_index(f),
            },
            Stmt::Prefetch { buffer, index, for_write } => {
                Stmt::Prefetch { buffer: *buffer, index: index.iter().map(&mut *f).collect(), for_write: *for_write }
            }
        }
    }

    /// Substitutes an index for a loop variable.
    pub fn substitute(&self, var: LoopId, by: &Index) -> Stmt {
        self.map_index(&mut |i| i.substitute(var, by))
    }

    /// Whether a loop variable occurs in the statement.
    pub fn uses(&self, var: LoopId) -> bool {
        let mut used = false;
        self.walk(&mut |s| {
            s.for_each_own_index(&mut |i| used |= i.uses(var));
        });
        used
    }

    /// Values and conditions of this statement itself, without nested statements, in evaluation order.
    pub fn own_nodes(&self) -> impl Iterator<Item = TreePart<'_>> {
        let (a, b) = match self {
            Stmt::If { cond, .. } => (Some(TreePart::Cond(cond)), None),
            Stmt::Store { value, .. } => (Some(TreePart::Expr(value)), None),
            Stmt::Update { value, first, .. } => (Some(TreePart::Expr(value)), Some(TreePart::Cond(first))),
            Stmt::For(_) | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => (None, None),
        };
        a.into_iter().chain(b)
    }

    /// Calls `visit` for the indices of this statement itself, without nested statements.
    pub fn for_each_own_index(&self, visit: &mut dyn FnMut(&Index)) {
        match self {
            Stmt::For(l) => visit(&l.extent),
            Stmt::Store { index, .. } | Stmt::Update { index, .. } | Stmt::Prefetch { index, .. } => {
                index.iter().for_each(&mut *visit);
            }
            Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => {}
        }
        self.own_nodes().for_each(|node| node.for_each_index(visit));
    }

    /// Calls `change` for the indices of this statement itself, without nested statements.
    pub fn for_each_own_index_mut(&mut self, change: &mut dyn FnMut(&mut Index)) {
        match self {
            Stmt::For(l) => change(&mut l.extent),
            Stmt::If { cond, .. } => cond.for_each_index_mut(change),
            Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => {}
            Stmt::Store { index, value, .. } => {
                index.iter_mut().for_each(&mut *change);
                value.for_each_index_mut(change);
            }
            Stmt::Update { index, value, first, .. } => {
                index.iter_mut().for_each(&mut *change);
                value.for_each_index_mut(change);
                first.for_each_index_mut(change);
            }
            Stmt::Prefetch { index, .. } => index.iter_mut().for_each(change),
        }
    }

    /// Calls `visit` for every buffer element that this statement itself reads, except by gathers, whose
    /// buffers are never written.
    ///
    /// The old value of an update counts as read.
    pub fn for_each_own_read<'a>(&'a self, visit: &mut dyn FnMut(BufferId, &'a [Index])) {
        self.own_nodes().for_each(|node| node.for_each_load(visit));
        if let Stmt::Update { buffer, index, .. } = self {
            visit(*buffer, index);
        }
    }

    /// Calls `visit` for the buffer of every element that this statement itself reads or writes.
    pub fn for_each_own_buffer(&self, visit: &mut dyn FnMut(BufferId)) {
        self.own_nodes().for_each(|node| node.for_each_buffer(visit));
        if let Some((buffer, _)) = self.own_write() {
            visit(buffer);
        }
    }

    /// Replaces loads of this statement itself, without nested statements, for which `f` returns a value.
    pub fn map_own_loads(self, f: &mut dyn FnMut(BufferId, &[Index]) -> Option<Expr>) -> Stmt {
        match self {
            Stmt::If { cond, then, otherwise } => Stmt::If { cond: cond.map_loads(f), then, otherwise },
            Stmt::Store { buffer, index, value } => Stmt::Store { buffer, index, value: value.map_loads(f) },
            Stmt::Update { buffer, index, op, value, first } => {
                Stmt::Update { buffer, index, op, value: value.map_loads(f), first: first.map_loads(f) }
            }
            Stmt::For(_) | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => self,
        }
    }

    /// Buffer element that this statement itself writes.
    pub fn own_write(&self) -> Option<(BufferId, &[Index])> {
        match self {
            Stmt::Store { buffer, index, .. } | Stmt::Update { buffer, index, .. } => Some((*buffer, index)),
            Stmt::For(_) | Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {
                None
            }
        }
    }
}
