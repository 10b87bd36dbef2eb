//! The loop IR: buffers and a tree of statements.

use crate::dtype::DType;
use crate::expr::{Cond, Expr, ReduceOp, TreePart};
pub use crate::ids::{BufferId, LoopId};
use crate::index::{Index, Ranges};

/// Memory that a buffer lives in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Main memory.
    Global,
    /// Memory private to a thread, meant to stay in cache: packed copies.
    Local,
    /// Registers: every subscript is constant after unrolling and vectorizing, else it falls
    /// back to the stack.
    Register,
    /// GPU memory shared by the threads of a block.
    Shared,
    /// Shared memory that threads fill by asynchronous copies (`cp.async`): an element is there once the
    /// thread has waited for it, see [`Stmt::Wait`].
    Async,
    /// Shared memory that one thread fills for the whole block by bulk copies: on a GPU with TMA a box of an
    /// array at once, see [`BoxCopy`](crate::gpu::bulk::BoxCopy).
    Bulk,
    /// Shared memory that, on a GPU with TMA, a producer warp fills by bulk copies, see
    /// [`producer_warp`](crate::gpu::producer_warp).
    Produced,
    /// Shared memory as `Produced` that, where two neighbouring blocks along x copy the same, their producer
    /// warps fill for each other (TMA multicast), see [`cluster`](crate::gpu::cluster).
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

    /// Whether the threads of a GPU's block share it.
    pub fn is_shared(self) -> bool {
        matches!(self, Scope::Shared | Scope::Async) || self.is_tma()
    }

    /// Whether stores arrive only once they are waited for (asynchronous copies).
    pub fn is_on_its_way(self) -> bool {
        self == Scope::Async || self.is_tma()
    }

    /// Whether one thread fills the memory for the whole block, by bulk copies.
    pub fn is_tma(self) -> bool {
        self == Scope::Bulk || self.is_produced()
    }

    /// Whether a producer warp fills the memory where a GPU has TMA.
    pub fn is_produced(self) -> bool {
        matches!(self, Scope::Produced | Scope::Multicast)
    }
}

/// Relation of a buffer to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Read-only argument.
    Input,
    /// Read-only argument that stays the same from run to run (pre-packed weights are copies of one).
    ConstInput,
    /// Argument that the program writes completely.
    Output,
    /// Lives between the parts of the program: filled by `prepare` from inputs, or by the body for `finish`.
    Kept,
    /// Temporary: it exists from its `alloc` statement to the end of that block.
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

/// A dense row-major array. A packed layout is a shape of more dimensions.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Unique in the program.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first; the last dimension is contiguous.
    pub shape: Vec<i64>,
    /// Memory that holds the buffer.
    pub scope: Scope,
    /// Relation to the caller.
    pub role: Role,
}

impl Buffer {
    /// Number of elements; `None` where it does not fit.
    pub fn n_elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, &e| n.checked_mul(u64::try_from(e).ok()?))
    }

    /// Size in bytes; `None` where it does not fit.
    pub fn size_bytes(&self) -> Option<u64> {
        self.n_elements()?.checked_mul(self.dtype.bytes()).filter(|&b| b <= i64::MAX as u64)
    }

    /// Elements between neighbours in each dimension.
    pub fn strides(&self) -> Vec<i64> {
        let mut strides = vec![1i64; self.shape.len()];
        for d in (1..self.shape.len()).rev() {
            strides[d - 1] = strides[d].wrapping_mul(self.shape[d]);
        }
        strides
    }
}

/// Execution of a loop's iterations: in order, in parallel, as lanes, or on a GPU's axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoopKind {
    /// Sequential.
    Serial,
    /// Spread over the threads of the pool.
    Parallel,
    /// Lanes of vector operations.
    Vectorized,
    /// Repeated in the code.
    Unrolled,
    /// GPU block axis 0 to 2.
    Block(u8),
    /// GPU thread axis 0 to 2.
    Thread(u8),
    /// Sequential, or the steps of a tile product that the threads of a warp compute together in a tensor
    /// core, where there is one: see [`TileProduct`](crate::gpu::TileProduct). Of [`TensorProduct::Dot4`] and
    /// [`TensorProduct::Dot2`], the steps of dot products, as a CPU computes them. Of [`TensorProduct::Tma`],
    /// the parts of a box that a warp stores.
    Tensor(TensorProduct),
}

/// Kind of tensor core product, with sums in f32, or of a CPU's dot product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorProduct {
    /// Factors are rounded to 11 bits.
    Tf32,
    /// Products of f32 as sums of two TF32 numbers, of whose four products the three largest are added
    /// (3xTF32): nearly as exact as f32.
    Tf32x3,
    /// Products of a warpgroup, with factors in shared memory: see
    /// [`GroupProduct`](crate::gpu::GroupProduct). Factors are f16, bf16, or f32 rounded to TF32.
    Wgmma,
    /// Warpgroup product of f32 as sums of two parts, as with [`TensorProduct::Tf32x3`]: both parts of each
    /// factor are in shared memory.
    Wgmmax3,
    /// Factors have 16 bits and are multiplied as they are.
    Halves,
    /// No tensor core's: dot products of four 8-bit integers, which CPUs add to 32-bit sums in one
    /// instruction: see [`dot`](crate::dot).
    Dot4,
    /// No tensor core's: dot products of two bf16 numbers, added to f32 sums likewise, or of two 16-bit
    /// integers, added to 32-bit sums.
    Dot2,
    /// No product: a store of a warp's part of a tile, which TMA carries out: see
    /// [`BoxStore`](crate::gpu::store::BoxStore).
    Tma,
}

impl TensorProduct {
    /// Steps of the sum that a dot product takes at a time; `None` of a tensor core's product.
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

    /// Whether four warps multiply together.
    pub fn is_of_groups(self) -> bool {
        matches!(self, TensorProduct::Wgmma | TensorProduct::Wgmmax3)
    }
}

impl LoopKind {
    /// Every kind with its keyword in the text format.
    pub const ALL: [(LoopKind, &'static str); 18] = [
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
    ];

    /// The keyword in the text format.
    pub fn name(self) -> &'static str {
        LoopKind::ALL.iter().find(|(k, _)| *k == self).expect("every kind is listed").1
    }
}

/// A loop over `0..extent`.
#[derive(Clone, Debug, PartialEq)]
pub struct Loop {
    /// Loop variable.
    pub var: LoopId,
    /// Number of iterations, may mention outer variables; none where negative.
    pub extent: Index,
    /// Execution of the iterations.
    pub kind: LoopKind,
    /// Statements of an iteration.
    pub body: Vec<Stmt>,
}

/// A statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Stmt {
    /// A loop.
    For(Loop),
    /// `then` where the condition holds, else `otherwise`.
    If {
        /// The condition.
        cond: Cond,
        /// Done where it holds.
        then: Vec<Stmt>,
        /// Done where it does not.
        otherwise: Vec<Stmt>,
    },
    /// Starts the life of a temporary, with undefined contents; it ends with the enclosing block.
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
        /// Reduced-into buffer.
        buffer: BufferId,
        /// Subscripts, one for each dimension.
        index: Vec<Index>,
        /// Operation that combines the old value with the new one.
        op: ReduceOp,
        /// Value to combine with the element.
        value: Expr,
        /// Holds in the first iteration of the reduction, which starts from the identity.
        /// `Not(True)` never holds.
        first: Cond,
    },
    /// Asks the hardware to bring an element's cache line near; has no effect on values, out of
    /// bounds included.
    Prefetch {
        /// Buffer read or written soon.
        buffer: BufferId,
        /// Subscripts, one for each dimension.
        index: Vec<Index>,
        /// Whether it will be written.
        for_write: bool,
    },
    /// Waits until all threads of a GPU block have arrived, and sees their writes. Where iterations run in
    /// order it does nothing.
    Barrier,
    /// Ends a group of the thread's [asynchronous](Scope::is_on_its_way) copies (`cp.async.commit_group`),
    /// and waits until at most this many of the latest groups are pending (`cp.async.wait_group`). Where
    /// iterations run in order it does nothing.
    Wait(u8),
}

/// A part of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// Fills kept buffers from inputs.
    Prepare,
    /// The work itself.
    Body,
    /// Makes the outputs of kept buffers.
    Finish,
}

impl Part {
    /// Every part with its word in the text format, in the order in which they run.
    pub const ALL: [(Part, &'static str); 3] =
        [(Part::Prepare, "prepare"), (Part::Body, "run"), (Part::Finish, "finish")];

    /// The word in the text format.
    pub fn name(self) -> &'static str {
        Part::ALL.iter().find(|(p, _)| *p == self).expect("every part is listed").1
    }
}

/// Size that is known when a program runs and not before, such as the number of rows of a product.
///
/// Loops may run as far as it says, and subscripts may have it as a summand. Buffers have the shape that they
/// need at the most, whatever the size, so that nothing but extents depends on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OpenSize {
    /// Name of the size, as in a workload's text; unique in the program.
    pub name: String,
    /// Variable that counts from 0 in steps of the size, in scope everywhere in the body like that of a loop
    /// around it.
    pub var: LoopId,
    /// Smallest value.
    pub least: i64,
    /// Distance of neighbouring values.
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

    /// The value of its variable at a size, where it is one of the values.
    pub fn steps_to(&self, size: i64) -> Option<i64> {
        let steps = size.checked_sub(self.least)?.checked_div(self.step)?;
        ((0..self.n_values).contains(&steps) && self.least + steps * self.step == size).then_some(steps)
    }
}

/// A program: buffers, and what runs before, in and after each measured run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The workload's name.
    pub name: String,
    /// Buffers, by [`BufferId`]. Arguments come first, in the order of the call.
    pub buffers: Vec<Buffer>,
    /// Names of the loop variables, by [`LoopId`]; unique.
    pub loops: Vec<String>,
    /// Sizes that the caller of a run gives, in their order.
    pub sizes: Vec<OpenSize>,
    /// Runs once for given inputs, outside the timing, and fills [`Role::Kept`] buffers.
    pub prepare: Vec<Stmt>,
    /// Runs each time.
    pub body: Vec<Stmt>,
    /// Runs after the body, outside the timing, and turns what that left in [`Role::Kept`]
    /// buffers into outputs.
    pub finish: Vec<Stmt>,
}

impl Program {
    /// The buffer of an id.
    ///
    /// # Panics
    /// If the id is of another program.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// The name of a loop variable.
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

    /// Adds a loop variable. The name must be new.
    pub fn add_loop(&mut self, name: impl Into<String>) -> LoopId {
        self.loops.push(name.into());
        LoopId(self.loops.len() as u32 - 1)
    }

    /// The ranges at the outermost place of a part: of the open sizes.
    pub fn ranges(&self) -> Ranges {
        Ranges::of_sizes(self.sizes.iter().map(|size| (size.var, size.n_values)))
    }

    /// The program at one value of each open size, in order, on the same buffers; `None` where a value is
    /// none of its size's.
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

    /// The buffers that the caller passes, in order: inputs and outputs.
    pub fn arguments(&self) -> impl Iterator<Item = (BufferId, &Buffer)> {
        self.with_role(|r| matches!(r, Role::Input | Role::ConstInput | Role::Output))
    }

    /// The buffers that live between the parts.
    pub fn kept(&self) -> impl Iterator<Item = (BufferId, &Buffer)> {
        self.with_role(|r| r == Role::Kept)
    }

    /// The statements of a part.
    pub fn part(&self, part: Part) -> &Vec<Stmt> {
        match part {
            Part::Prepare => &self.prepare,
            Part::Body => &self.body,
            Part::Finish => &self.finish,
        }
    }

    /// The statements of a part, to change.
    pub fn part_mut(&mut self, part: Part) -> &mut Vec<Stmt> {
        match part {
            Part::Prepare => &mut self.prepare,
            Part::Body => &mut self.body,
            Part::Finish => &mut self.finish,
        }
    }

    /// The parts in the order in which they run.
    pub fn parts(&self) -> [&Vec<Stmt>; 3] {
        Part::ALL.map(|(part, _)| self.part(part))
    }

    /// The program with each part rewritten.
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
    /// The blocks directly inside.
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

    /// The blocks directly inside, to change.
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

    /// Calls `visit` for the blocks directly inside, with the loops around them: those given, and this one
    /// where it is one.
    pub fn each_block<'a>(&'a self, ranges: &mut Ranges, mut visit: impl FnMut(&'a [Stmt], &mut Ranges)) {
        match self {
            Stmt::For(l) => ranges.inside(l.var, &l.extent, |ranges| visit(&l.body, ranges)),
            _ => self.blocks().for_each(|block| visit(block, ranges)),
        }
    }

    /// Visits the blocks as [`Stmt::each_block`] does, for changing them.
    pub fn each_block_mut(&mut self, ranges: &mut Ranges, mut visit: impl FnMut(&mut Vec<Stmt>, &mut Ranges)) {
        match self {
            Stmt::For(l) => ranges.inside(l.var, &l.extent, |ranges| visit(&mut l.body, ranges)),
            _ => self.blocks_mut().for_each(|block| visit(block, ranges)),
        }
    }

    /// Whether a vectorized loop may hold it: a plain assignment, or an unrolled loop of such.
    pub fn is_vectorizable(&self) -> bool {
        match self {
            Stmt::Store { .. } | Stmt::Update { .. } | Stmt::Prefetch { .. } => true,
            Stmt::For(l) => l.kind == LoopKind::Unrolled && l.body.iter().all(Stmt::is_vectorizable),
            Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => false,
        }
    }

    /// Calls `visit` for this statement and all inside it, outermost first.
    pub fn walk<'a>(&'a self, visit: &mut dyn FnMut(&'a Stmt)) {
        visit(self);
        for block in self.blocks() {
            for s in block {
                s.walk(visit);
            }
        }
    }

    /// Whether it is a parallel loop or has one inside.
    pub fn has_parallel_loop(&self) -> bool {
        let mut found = false;
        self.walk(&mut |s| found |= matches!(s, Stmt::For(l) if l.kind == LoopKind::Parallel));
        found
    }

    /// The statement with every index in it (extents, conditions, subscripts) rewritten.
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

    /// The statement with a loop variable replaced.
    pub fn substitute(&self, var: LoopId, by: &Index) -> Stmt {
        self.map_index(&mut |i| i.substitute(var, by))
    }

    /// Whether a loop variable occurs in it.
    pub fn uses(&self, var: LoopId) -> bool {
        let mut used = false;
        self.walk(&mut |s| {
            s.for_each_own_index(&mut |i| used |= i.uses(var));
        });
        used
    }

    /// The values and conditions of this statement itself, not of statements inside it, in the order of their
    /// evaluation.
    pub fn own_nodes(&self) -> impl Iterator<Item = TreePart<'_>> {
        let (a, b) = match self {
            Stmt::If { cond, .. } => (Some(TreePart::Cond(cond)), None),
            Stmt::Store { value, .. } => (Some(TreePart::Expr(value)), None),
            Stmt::Update { value, first, .. } => (Some(TreePart::Expr(value)), Some(TreePart::Cond(first))),
            Stmt::For(_) | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => (None, None),
        };
        a.into_iter().chain(b)
    }

    /// Calls `visit` for the indices of this statement itself, not of statements inside it.
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

    /// Calls `change` for the indices of this statement itself, not of statements inside it.
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

    /// Calls `visit` for every buffer element this statement itself reads, but for those that are gathered,
    /// which nothing writes.
    ///
    /// The old value that an update combines with counts as read.
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

    /// The statement with some loads of its own (not of statements inside it) replaced.
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

    /// The buffer element this statement itself writes.
    pub fn own_write(&self) -> Option<(BufferId, &[Index])> {
        match self {
            Stmt::Store { buffer, index, .. } | Stmt::Update { buffer, index, .. } => Some((*buffer, index)),
            Stmt::For(_) | Stmt::If { .. } | Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {
                None
            }
        }
    }
}
