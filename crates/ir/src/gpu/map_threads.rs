//! Mapping of thread loops inside a block's loops to kernels in which each thread runs the whole body.
//!
//! A *region* is the code that a thread runs between two points where threads may have to synchronize: the
//! body of an innermost thread loop, or statements outside of thread loops, which the first thread of each
//! axis runs. The loops and conditions around regions are the same for all threads of a block. A barrier
//! separates two regions if a thread may access in one of them an element that another thread accesses in the
//! other, and one of both accesses writes.
//!
//! Halide's CUDA backend is similar: it fuses the thread loops of a block and puts a barrier between any two
//! of them. Here, barriers stand only where accesses may conflict.

use crate::dependence::{Subscripts, are_disjoint};
use crate::expr::Cond;
use crate::gpu::item::{Item, ThreadRegion, each_region, relocate};
use crate::gpu::map_error::MapError;
use crate::gpu::private::separate;
use crate::gpu::products::require_warps;
use crate::gpu::{GpuKernel, GpuProgram};
use crate::index::{Atom, Index, Ranges};
use crate::lower::{promote_registers, simplify_block, unroll_block};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Part, Program, Role, Scope, Stmt};
use crate::text::{cond_to_string, index_to_string};
use std::collections::BTreeSet;

/// Maps a scheduled program to kernels ready for code generation: unrolls the loops marked for it, with
/// guards where extents vary, and promotes small private buffers to registers.
///
/// Each outermost nest of a part becomes a kernel, of one block if it has no block loops and of one thread if
/// it has no thread loops.
pub fn lower_gpu(program: &Program) -> Result<GpuProgram, MapError> {
    let simple = program.clone().map_parts(|block| simplify_block(block, &mut Ranges::default()));
    let mut mapper = Mapper {
        tables: Program { prepare: Vec::new(), body: Vec::new(), finish: Vec::new(), ..simple.clone() },
        threads: Vec::new(),
        owned: BTreeSet::new(),
    };
    let mut out = GpuProgram::default();
    for (part, _) in Part::ALL {
        let mut nests = Vec::new();
        mapper.nests(simple.part(part), &mut nests);
        for nest in nests {
            let name = format!("{}_{}", part.name(), out.part(part).len());
            let kernel = mapper.kernel(name, nest)?;
            out.part_mut(part).push(kernel);
        }
    }
    out.program = mapper.tables;
    Ok(out)
}

/// Context of a statement in a loop nest.
#[derive(Clone)]
struct Inside {
    /// Thread axes to which enclosing loops are bound.
    axes: [bool; 3],
    /// Conditions under which a thread reaches the statement.
    guards: Vec<Cond>,
    /// Identifies an entry of a thread loop.
    region: usize,
    /// Name of the innermost enclosing thread loop.
    name: String,
}

struct Mapper {
    tables: Program,
    /// Variables of the kernels' thread axes, by axis, created when first needed.
    threads: Vec<LoopId>,
    /// Temporaries that belong to a kernel.
    owned: BTreeSet<BufferId>,
}

impl Mapper {
    /// Collects the outermost nests of a part. Buffers allocated outside of them are in device memory.
    fn nests<'a>(&mut self, block: &'a [Stmt], out: &mut Vec<&'a Stmt>) {
        for stmt in block {
            match stmt {
                Stmt::Alloc(b) => self.tables.buffers[b.0 as usize].scope = Scope::Global,
                Stmt::If { cond: Cond::True, then, .. } => self.nests(then, out),
                Stmt::Barrier | Stmt::Wait(_) | Stmt::Prefetch { .. } => {}
                Stmt::For(_) | Stmt::If { .. } | Stmt::Store { .. } | Stmt::Update { .. } => out.push(stmt),
            }
        }
    }

    fn kernel(&mut self, name: String, nest: &Stmt) -> Result<GpuKernel, MapError> {
        let mut nest = nest.clone();
        self.own_temporaries(&mut nest);
        let mut kernel = GpuKernel { name, ..GpuKernel::default() };
        let mut body = vec![nest];
        let mut ranges = Ranges::default();
        while let [Stmt::For(Loop { kind: LoopKind::Block(axis), .. })] = body.as_slice() {
            let axis = usize::from(*axis);
            let Some(Stmt::For(l)) = body.pop() else { unreachable!("the pattern has matched") };
            let extent = l.extent.as_const().ok_or_else(|| self.bad_extent(&l))?;
            kernel.blocks[axis] = Some((l.var, extent));
            ranges.push(l.var, l.extent);
            body = l.body;
        }
        let mut extents = [1; 3];
        self.extents(&body, None, &mut ranges, &mut extents)?;
        let mut made = Vec::new();
        for (axis, &extent) in extents.iter().enumerate() {
            if extent > 1 {
                let var = self.thread(axis);
                kernel.threads[axis] = Some((var, extent));
                made.push((var, extent));
            }
        }
        made.into_iter().for_each(|(var, extent)| ranges.push(var, extent.into()));
        let mut nest = NestMapping { mapper: self, extents, shared: Vec::new(), n_regions: 0 };
        let inside = Inside { axes: [false; 3], guards: Vec::new(), region: 0, name: String::new() };
        let mut items = Vec::new();
        nest.hoist(body, &inside, &mut items)?;
        kernel.shared = nest.shared;
        let threads = kernel.threads.map(|axis| axis.map(|(var, _)| var));
        separate(&mut self.tables, &mut items, threads, &ranges)?;
        place_barriers(&self.tables, &mut items, threads, &ranges);
        let mut stmts = Vec::new();
        close(items, threads, &mut stmts);
        let stmts = bound_extents(stmts, &mut ranges);
        let stmts = simplify_block(unroll_block(stmts, &mut ranges), &mut ranges);
        let with_body = Program { body: stmts, ..std::mem::take(&mut self.tables) };
        let mut promoted = promote_registers(with_body);
        kernel.body = std::mem::take(&mut promoted.body);
        self.tables = promoted;
        require_warps(&self.tables, &kernel).map_err(|(var, why)| {
            let name = self.tables.loop_name(var).to_owned();
            MapError::TileProduct { name, why }
        })?;
        Ok(kernel)
    }

    /// Returns the variable of a thread axis.
    fn thread(&mut self, axis: usize) -> LoopId {
        while self.threads.len() <= axis {
            let name = LoopKind::Thread(self.threads.len() as u8).name();
            let free = |name: &str| self.tables.find_loop(name).is_none();
            let name = if free(name) { name.to_owned() } else { new_name(name, free) };
            self.threads.push(self.tables.add_loop(name));
        }
        self.threads[axis]
    }

    /// Replaces a nest's temporaries with new ones if an earlier kernel owns the same.
    fn own_temporaries(&mut self, nest: &mut Stmt) {
        let mut allocated = BTreeSet::new();
        nest.walk(&mut |s| {
            if let Stmt::Alloc(b) = s {
                allocated.insert(*b);
            }
        });
        for old in allocated {
            let buffer = &mut self.tables.buffers[old.0 as usize];
            if buffer.scope == Scope::Global {
                buffer.scope = Scope::Local;
            }
            if self.owned.insert(old) {
                continue;
            }
            let mut copy = self.tables.buffer(old).clone();
            copy.name = new_name(&copy.name, |name| self.tables.find_buffer(name).is_none());
            let new = self.tables.add_buffer(copy);
            self.owned.insert(new);
            *nest = relocate(nest.clone(), old, new, &mut |index| index.to_vec());
        }
    }

    fn bad_extent(&self, l: &Loop) -> MapError {
        let (name, extent) = (self.tables.loop_name(l.var).to_owned(), index_to_string(&self.tables, &l.extent));
        MapError::Extent { name, axis: l.kind.name(), extent }
    }

    /// Raises the extents of thread axes to those of the thread loops in a block of statements.
    fn extents(
        &self,
        block: &[Stmt],
        around: Option<LoopId>,
        ranges: &mut Ranges,
        extents: &mut [i64; 3],
    ) -> Result<(), MapError> {
        let name_of = |var: LoopId| self.tables.loop_name(var).to_owned();
        block.iter().try_for_each(|stmt| {
            let mut around = around;
            if let Stmt::For(l) = stmt {
                around = Some(l.var);
                match l.kind {
                    LoopKind::Thread(axis) => {
                        let most = ranges.upper(&l.extent).ok_or_else(|| self.bad_extent(l))?;
                        let extent = &mut extents[usize::from(axis)];
                        *extent = most.max(*extent);
                    }
                    LoopKind::Block(_) => {
                        let around = ranges.loops().last().map_or("other statements".to_owned(), |l| name_of(l.0));
                        return Err(MapError::BlockInside { name: name_of(l.var), around });
                    }
                    LoopKind::Serial
                    | LoopKind::Parallel
                    | LoopKind::Vectorized
                    | LoopKind::Unrolled
                    | LoopKind::Tensor(_)
                    | LoopKind::Turns => {}
                }
            }
            let mut result = Ok(());
            stmt.each_block(ranges, |block, ranges| {
                if result.is_ok() {
                    result = self.extents(block, around, ranges, extents);
                }
            });
            result
        })
    }
}

/// Appends a number to the name that makes it unused.
fn new_name(name: &str, free: impl Fn(&str) -> bool) -> String {
    (1..).map(|n| format!("{name}.{n}")).find(|name| free(name)).expect("some number is free")
}

/// State of mapping one loop nest to a kernel.
struct NestMapping<'m> {
    mapper: &'m mut Mapper,
    extents: [i64; 3],
    shared: Vec<BufferId>,
    n_regions: usize,
}

impl NestMapping<'_> {
    /// Whether all threads must run a statement together, rather than each thread by itself.
    fn is_common(&self, stmt: &Stmt) -> bool {
        let mut found = false;
        stmt.walk(&mut |s| {
            found |= match s {
                Stmt::For(l) => matches!(l.kind, LoopKind::Thread(_)),
                Stmt::Alloc(b) => self.mapper.tables.buffer(*b).scope.is_shared(),
                Stmt::Wait(_) => true,
                Stmt::If { .. } | Stmt::Store { .. } | Stmt::Update { .. } | Stmt::Prefetch { .. } | Stmt::Barrier => {
                    false
                }
            }
        });
        found
    }

    /// Hoists thread loops out of the statements around them.
    fn hoist(&mut self, block: Vec<Stmt>, inside: &Inside, out: &mut Vec<Item>) -> Result<(), MapError> {
        for stmt in block {
            match stmt {
                Stmt::For(Loop { var, extent, kind: LoopKind::Thread(axis), body }) => {
                    let axis = usize::from(axis);
                    let mut inside = inside.clone();
                    inside.axes[axis] = true;
                    inside.name = self.mapper.tables.loop_name(var).to_owned();
                    self.n_regions += 1;
                    inside.region = self.n_regions;
                    let at = match self.extents[axis] {
                        ..=1 => Index::from(0),
                        _ => self.mapper.thread(axis).into(),
                    };
                    if extent.as_const() != Some(self.extents[axis]) {
                        inside.guards.push(Cond::Lt(at.clone(), extent));
                    }
                    let body = body.iter().map(|s| s.substitute(var, &at)).collect();
                    self.hoist(body, &inside, out)?;
                }
                Stmt::For(mut l) if l.body.iter().any(|s| self.is_common(s)) => {
                    if self.mapper.threads.iter().any(|&thread| l.extent.uses(thread)) {
                        let tables = &self.mapper.tables;
                        let (name, extent) = (tables.loop_name(l.var).to_owned(), index_to_string(tables, &l.extent));
                        return Err(MapError::UnevenLoop { name, extent });
                    }
                    let mut body = Vec::new();
                    self.hoist(std::mem::take(&mut l.body), inside, &mut body)?;
                    if l.kind == LoopKind::Parallel {
                        l.kind = LoopKind::Serial;
                    }
                    out.push(Item::Loop { head: l, body });
                }
                Stmt::If { cond, then, otherwise } if then.iter().chain(&otherwise).any(|s| self.is_common(s)) => {
                    self.condition(cond, then, otherwise, inside, out)?;
                }
                Stmt::Alloc(b) if self.mapper.tables.buffer(b).scope.is_shared() => {
                    if (0..3).any(|axis| inside.axes[axis] && self.extents[axis] > 1) {
                        let buffer = self.mapper.tables.buffer(b).name.clone();
                        return Err(MapError::SharedInThread { buffer, name: inside.name.clone() });
                    }
                    if !self.shared.contains(&b) {
                        self.shared.push(b);
                    }
                }
                Stmt::Alloc(b) => {
                    // An allocation does not end the current region.
                    let joins = matches!(out.last(), Some(Item::Region(last)) if last.region == inside.region);
                    out.insert(out.len() - usize::from(joins), Item::Alloc(b, inside.axes));
                }
                Stmt::Barrier => {}
                // The barrier makes each thread's arrived copies visible to all others.
                Stmt::Wait(n) => out.extend([Item::Wait(n), Item::Barrier]),
                stmt => {
                    if let Some(Item::Region(last)) = out.last_mut()
                        && last.region == inside.region
                        && last.guards == inside.guards
                    {
                        last.stmts.push(stmt);
                        continue;
                    }
                    let Inside { axes, guards, region, .. } = inside.clone();
                    out.push(Item::Region(ThreadRegion { axes, guards, region, stmts: vec![stmt] }));
                }
            }
        }
        Ok(())
    }

    /// Hoists thread loops out of a condition: parts that are uniform in the block stay around them, parts
    /// that differ between threads become guards.
    fn condition(
        &mut self,
        cond: Cond,
        then: Vec<Stmt>,
        otherwise: Vec<Stmt>,
        inside: &Inside,
        out: &mut Vec<Item>,
    ) -> Result<(), MapError> {
        let mut on_values = false;
        crate::expr::TreePart::Cond(&cond).walk(&mut |node| {
            on_values |= matches!(node, crate::expr::TreePart::Cond(Cond::Less(..)));
        });
        if on_values {
            return Err(MapError::ValueCondition { cond: cond_to_string(&self.mapper.tables, &cond) });
        }
        let varies = self.mapper.threads.iter().any(|&thread| cond.uses(thread));
        if !varies {
            let (mut yes, mut no) = (Vec::new(), Vec::new());
            self.hoist(then, inside, &mut yes)?;
            self.hoist(otherwise, inside, &mut no)?;
            out.push(Item::If { cond, then: yes, otherwise: no });
            return Ok(());
        }
        for (holds, block) in [(true, then), (false, otherwise)] {
            let mut inside = inside.clone();
            self.n_regions += 1;
            inside.region = self.n_regions;
            inside.guards.push(if holds { cond.clone() } else { Cond::Not(Box::new(cond.clone())) });
            self.hoist(block, &inside, out)?;
        }
        Ok(())
    }
}

// Barriers.

/// Access to memory that threads share.
#[derive(Clone, PartialEq)]
struct SharedMemoryAccess {
    buffer: BufferId,
    index: Vec<Index>,
    axes: [bool; 3],
    /// Enclosing loops, outermost first.
    loops: Vec<(LoopId, Index)>,
    /// Number of enclosing loops that contain both its region and the items that follow.
    n_outside: usize,
    writes: bool,
    age: Age,
}

/// Iteration of an access, relative to later accesses that may conflict with it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Age {
    /// Same iteration of all common loops.
    Same,
    /// Previous iteration of this loop.
    Before(LoopId),
    /// Unspecified earlier iteration.
    Unknown,
}

impl Age {
    /// Age after one more iteration of a loop.
    fn after(self, var: LoopId) -> Age {
        if self == Age::Same { Age::Before(var) } else { Age::Unknown }
    }
}

/// Result of following earlier accesses through a sequence of items.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BarrierPath {
    /// Earlier accesses may conflict with another thread's access in the sequence.
    Meets,
    /// A barrier ends earlier accesses.
    Waits,
    /// Earlier accesses pass the end of the sequence without a barrier.
    Passes,
}

struct Barriers<'p> {
    threads: [Option<LoopId>; 3],
    /// Block and thread loops.
    outside: &'p Ranges,
    /// Buffers that the kernel writes and that threads share.
    written: BTreeSet<BufferId>,
    /// Whether a barrier was placed in this round.
    placed: bool,
}

/// Places barriers between regions in which different threads may access the same element.
fn place_barriers(tables: &Program, items: &mut Vec<Item>, threads: [Option<LoopId>; 3], outside: &Ranges) {
    if threads.iter().all(Option::is_none) {
        return;
    }
    let mut written = BTreeSet::new();
    each_region(items, &mut |region, _| {
        for s in &region.stmts {
            s.walk(&mut |s| written.extend(s.own_write().map(|(b, _)| b)));
        }
    });
    let is_common = |b: &BufferId| {
        let buffer = tables.buffer(*b);
        buffer.role != Role::Temporary || buffer.scope == Scope::Global || buffer.scope.is_shared()
    };
    written.retain(is_common);
    let mut barriers = Barriers { threads, outside, written, placed: false };
    barriers.sequence(items, &mut Vec::new(), &mut Vec::new());
}

impl Barriers<'_> {
    /// Places the barriers of a sequence; `pending` holds the accesses since the last barrier on any path to
    /// it.
    fn sequence(
        &mut self,
        items: &mut Vec<Item>,
        loops: &mut Vec<(LoopId, Index)>,
        pending: &mut Vec<SharedMemoryAccess>,
    ) {
        let mut at = 0;
        while at < items.len() {
            match &mut items[at] {
                Item::Barrier => pending.clear(),
                Item::Alloc(..) | Item::Wait(_) => {}
                Item::Region(region) => {
                    let own = self.accesses(region, loops);
                    if own.iter().any(|b| pending.iter().any(|a| self.meet(a, b))) {
                        items.insert(at, Item::Barrier);
                        self.placed = true;
                        pending.clear();
                        at += 1;
                    }
                    own.into_iter().for_each(|access| add(pending, access));
                }
                Item::If { then, otherwise, .. } => {
                    let mut other = pending.clone();
                    self.sequence(then, loops, pending);
                    self.sequence(otherwise, loops, &mut other);
                    other.into_iter().for_each(|access| add(pending, access));
                }
                Item::Loop { head, body } => {
                    loops.push((head.var, head.extent.clone()));
                    let mut before = std::mem::take(pending);
                    // Accesses pending at the end of one iteration may conflict with the next; each round
                    // adds pending accesses or places a barrier, so the fixpoint iteration terminates.
                    loop {
                        let entered = pending.clone();
                        let placed = std::mem::take(&mut self.placed);
                        self.sequence(body, loops, pending);
                        let again = self.placed;
                        self.placed |= placed;
                        let older = |access: &SharedMemoryAccess| SharedMemoryAccess {
                            age: access.age.after(head.var),
                            ..access.clone()
                        };
                        let left: Vec<SharedMemoryAccess> = pending.iter().map(older).collect();
                        if !again && left.iter().all(|access| entered.contains(access)) {
                            break;
                        }
                        *pending = entered;
                        left.into_iter().for_each(|access| add(pending, access));
                    }
                    // After the loop, all accesses belong to the same iteration of the enclosing loops.
                    for access in std::mem::take(pending) {
                        let n_outside = access.n_outside.min(loops.len() - 1);
                        add(pending, SharedMemoryAccess { age: Age::Same, n_outside, ..access });
                    }
                    let runs = self.outside.lower(&head.extent).is_some_and(|least| least > 0);
                    let way = self.way(body, loops, &before);
                    loops.pop();
                    match way {
                        // One barrier before the loop rather than one in each iteration.
                        BarrierPath::Meets => {
                            items.insert(at, Item::Barrier);
                            self.placed = true;
                            at += 1;
                            before.clear();
                        }
                        BarrierPath::Waits if runs => before.clear(),
                        BarrierPath::Waits | BarrierPath::Passes => {}
                    }
                    before.into_iter().for_each(|access| add(pending, access));
                }
            }
            at += 1;
        }
    }

    /// Follows earlier accesses through a sequence whose barriers are already placed.
    fn way(&self, items: &[Item], loops: &mut Vec<(LoopId, Index)>, pending: &[SharedMemoryAccess]) -> BarrierPath {
        for item in items {
            let way = match item {
                Item::Barrier => BarrierPath::Waits,
                Item::Alloc(..) | Item::Wait(_) => BarrierPath::Passes,
                Item::Region(region) => {
                    let own = self.accesses(region, loops);
                    let meets = own.iter().any(|b| pending.iter().any(|a| self.meet(a, b)));
                    if meets { BarrierPath::Meets } else { BarrierPath::Passes }
                }
                Item::If { then, otherwise, .. } => {
                    match [then, otherwise].map(|branch| self.way(branch, loops, pending)) {
                        [BarrierPath::Waits, BarrierPath::Waits] => BarrierPath::Waits,
                        [BarrierPath::Meets, _] | [_, BarrierPath::Meets] => BarrierPath::Meets,
                        [BarrierPath::Waits | BarrierPath::Passes, BarrierPath::Waits | BarrierPath::Passes] => {
                            BarrierPath::Passes
                        }
                    }
                }
                Item::Loop { head, body } => {
                    loops.push((head.var, head.extent.clone()));
                    let way = self.way(body, loops, pending);
                    loops.pop();
                    let runs = self.outside.lower(&head.extent).is_some_and(|least| least > 0);
                    if way == BarrierPath::Waits && !runs { BarrierPath::Passes } else { way }
                }
            };
            if way != BarrierPath::Passes {
                return way;
            }
        }
        BarrierPath::Passes
    }

    fn accesses(&self, region: &ThreadRegion, loops: &[(LoopId, Index)]) -> Vec<SharedMemoryAccess> {
        let mut ranges = Ranges::default();
        loops.iter().for_each(|(var, extent)| ranges.push(*var, extent.clone()));
        let mut out = Vec::new();
        // Guards are conditions on indices and read no buffers.
        self.gather(&region.stmts, (region.axes, loops.len()), &mut ranges, &mut out);
        out
    }

    fn gather(&self, block: &[Stmt], of: ([bool; 3], usize), ranges: &mut Ranges, out: &mut Vec<SharedMemoryAccess>) {
        let (axes, n_outside) = of;
        for stmt in block {
            let mut visit = |buffer: BufferId, index: &[Index], writes: bool| {
                if self.written.contains(&buffer) {
                    let (index, loops) = (index.to_vec(), ranges.loops().to_vec());
                    add(out, SharedMemoryAccess { buffer, index, axes, loops, n_outside, writes, age: Age::Same });
                }
            };
            stmt.for_each_own_read(&mut |buffer, index| visit(buffer, index, false));
            if let Some((buffer, index)) = stmt.own_write() {
                visit(buffer, index, true);
            }
            stmt.each_block(ranges, |block, ranges| self.gather(block, of, ranges, out));
        }
    }

    /// Whether two accesses, at least one of them a write, may touch the same element in different threads.
    fn meet(&self, a: &SharedMemoryAccess, b: &SharedMemoryAccess) -> bool {
        if a.buffer != b.buffer || !(a.writes || b.writes) || take_turns(a, b) {
            return false;
        }
        let axes = self.threads.iter().enumerate().filter_map(|(axis, var)| Some((axis, (*var)?)));
        !axes.into_iter().all(|(axis, var)| match (a.axes[axis], b.axes[axis]) {
            // Both are run by the first thread of the axis.
            (false, false) => true,
            (true, true) => {
                let [of_a, of_b] = [a, b].map(|access| self.around(access, var));
                are_disjoint(Subscripts::new(&a.index, &of_a), Subscripts::new(&b.index, &of_b), var)
            }
            _ => false,
        })
    }

    /// Loops around an access: those over blocks first, which are the same for two threads, then the given
    /// thread axis.
    fn around(&self, access: &SharedMemoryAccess, first: LoopId) -> Ranges {
        let mut ranges = Ranges::default();
        let is_thread = |var: LoopId| self.threads.contains(&Some(var));
        let (threads, blocks): (Vec<_>, Vec<_>) = self.outside.loops().iter().partition(|(var, _)| is_thread(*var));
        let first =
            threads.iter().filter(|(var, _)| *var == first).chain(threads.iter().filter(|(var, _)| *var != first));
        let all = blocks.iter().chain(first).copied().chain(&access.loops);
        all.for_each(|(var, extent)| ranges.push(*var, extent.clone()));
        ranges
    }
}

/// Whether accesses in the same or the previous iteration touch different parts of a buffer that iterations
/// use in rotation.
fn take_turns(a: &SharedMemoryAccess, b: &SharedMemoryAccess) -> bool {
    let is_outside =
        |access: &SharedMemoryAccess, var: LoopId| access.loops[..access.n_outside].iter().any(|(v, _)| *v == var);
    let turn = |index: &Index| match index.terms() {
        [(Atom::Mod(of, n), 1)] if index.constant() == 0 => match of.terms() {
            [(Atom::Var(v), 1)] if is_outside(a, *v) && is_outside(b, *v) => Some((*v, of.constant(), *n)),
            _ => None,
        },
        _ => None,
    };
    a.index.iter().zip(&b.index).any(|(of_a, of_b)| match (turn(of_a), turn(of_b)) {
        (Some((v, x, n)), Some((w, y, m))) if (v, n) == (w, m) => match a.age {
            Age::Same => (y - x) % n != 0,
            Age::Before(var) => var == v && (y - x + 1) % n != 0,
            Age::Unknown => false,
        },
        _ => false,
    })
}

fn add(accesses: &mut Vec<SharedMemoryAccess>, access: SharedMemoryAccess) {
    if !accesses.contains(&access) {
        accesses.push(access);
    }
}

/// Emits the statements of a kernel.
fn close(items: Vec<Item>, threads: [Option<LoopId>; 3], out: &mut Vec<Stmt>) {
    let block = |items| {
        let mut block = Vec::new();
        close(items, threads, &mut block);
        block
    };
    for item in items {
        match item {
            Item::Barrier => out.push(Stmt::Barrier),
            Item::Wait(n) => out.push(Stmt::Wait(n)),
            Item::Alloc(b, _) => out.push(Stmt::Alloc(b)),
            Item::Loop { head, body } => out.push(Stmt::For(Loop { body: block(body), ..head })),
            Item::If { cond, then, otherwise } => {
                out.push(Stmt::If { cond, then: block(then), otherwise: block(otherwise) });
            }
            Item::Region(region) => {
                let absent = threads.iter().zip(region.axes).filter(|(_, is_spread)| !is_spread);
                let first = absent.filter_map(|(var, _)| Some(Cond::Eq((*var)?.into(), 0.into())));
                let cond = first.chain(region.guards).fold(Cond::True, Cond::and);
                match cond {
                    Cond::True => out.extend(region.stmts),
                    cond => out.push(Stmt::If { cond, then: region.stmts, otherwise: Vec::new() }),
                }
            }
        }
    }
}

/// Gives unrolled and vectorized loops of varying extents constant ones: the body of an unrolled loop is
/// guarded; a vectorized loop gets a guarded version beside the full one.
fn bound_extents(block: Vec<Stmt>, ranges: &mut Ranges) -> Vec<Stmt> {
    let each = |mut stmt: Stmt| {
        stmt.each_block_mut(ranges, |block, ranges| *block = bound_extents(std::mem::take(block), ranges));
        let Stmt::For(Loop { var, extent, kind: kind @ (LoopKind::Unrolled | LoopKind::Vectorized), body }) = stmt
        else {
            return stmt;
        };
        // An inner loop may have received a guard.
        let is_vector = kind == LoopKind::Vectorized && body.iter().all(Stmt::is_vectorizable);
        let kind = if is_vector { kind } else { LoopKind::Unrolled };
        let whole = |extent, kind, body| Stmt::For(Loop { var, extent, kind, body });
        let most = match extent.as_const() {
            None => ranges.upper(&extent),
            Some(_) => None,
        };
        let Some(most) = most else { return whole(extent, kind, body) };
        let guard = Stmt::If { cond: Cond::Lt(var.into(), extent.clone()), then: body.clone(), otherwise: Vec::new() };
        let guarded = whole(most.into(), LoopKind::Unrolled, vec![guard]);
        if kind == LoopKind::Unrolled {
            return guarded;
        }
        let full = whole(most.into(), kind, body);
        Stmt::If { cond: Cond::Lt(extent, most.into()), then: vec![guarded], otherwise: vec![full] }
    };
    block.into_iter().map(each).collect()
}
