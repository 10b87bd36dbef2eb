//! Interpreter of kernels, which computes the results of concurrent threads and finds races.
//!
//! [`run`] executes kernels, blocks, and the threads between two barriers one after the other, in the given
//! [`ThreadOrder`]. For each element in shared and device memory, it records the last writer and reader. In
//! any order, it therefore finds
//! - races: an element that one thread writes and another one reads or writes, with no barrier between if
//!   both are of one block, or in the same kernel if they are of different blocks;
//! - elements of asynchronous copies ([`Scope::Async`]) that any thread reads or writes before the copying
//!   thread has waited for their arrival;
//! - barriers that only some threads of a block reach;
//! - all faults that [`interp`](crate::interp) finds: accesses out of bounds, reads of elements never written
//!   (also in shared and private memory), and elements of outputs that are never written.
//!
//! Without races, values are bit-identical to those of [`interp`](crate::interp).

use crate::gpu::{GpuKernel, GpuProgram};
use crate::interp::{
    CompiledBlock, CompiledCondition, Fault, Interpreter, Linear, MAX_ITERATIONS, Memory, ProgramCompiler, Stopped,
    StoreRounding, check_length, check_written, defined_in, hold, list, release, subscripts_of, undefined,
};
use crate::program::{Buffer, BufferId, LoopId, Program, Role, Scope, Stmt};
use crate::text::cond_to_string;
use std::collections::VecDeque;
use std::fmt;
use thiserror::Error;

/// Order in which blocks, and threads between barriers, are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadOrder {
    /// Ascending, each thread until its next barrier.
    Forward,
    /// Descending, each thread until its next barrier.
    Reverse,
    /// Random order from this seed, drawn anew for each statement that all threads reach in lockstep.
    Shuffled(u64),
}

/// Position of a thread: its block in the grid and its index in the block, as x, y, z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Index of the block in the grid.
    pub block: [u32; 3],
    /// Index of the thread in its block.
    pub thread: [u32; 3],
}

impl fmt::Display for Thread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [block, thread] = [self.block, self.thread].map(|place| list(&place.map(i64::from)));
        write!(f, "thread ({thread}) of block ({block})")
    }
}

/// Kind of conflict between accesses of two threads to an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Both write the element.
    Writes,
    /// The first thread writes the element, the second reads it.
    ReadAfterWrite,
    /// The first thread reads the element, the second writes it.
    WriteAfterRead,
    /// The second thread reads or writes the element while the first thread's asynchronous copy to it may
    /// still be in flight.
    OnItsWay,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Conflict::Writes => "both write it",
            Conflict::ReadAfterWrite => "one writes what the other reads",
            Conflict::WriteAfterRead => "one reads what the other writes",
            Conflict::OnItsWay => "what the first one copies there is still on its way",
        })
    }
}

/// Reason why running the kernels on these arguments is undefined; a fault of the kernels, except for
/// [`SimtFault::Arguments`].
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SimtFault {
    /// Data race: unsynchronized accesses of two threads to an element.
    #[error("kernel {kernel}: {buffer}[{}] is raced for by {first} and {second}: {conflict}", list(subscripts))]
    Race {
        /// The kernel's name.
        kernel: String,
        /// The buffer's name.
        buffer: String,
        /// Subscripts of the element.
        subscripts: Box<[i64]>,
        /// Thread of the earlier access.
        first: Thread,
        /// Thread of the later access.
        second: Thread,
        /// Kind of conflict.
        conflict: Conflict,
    },
    /// Barrier divergence: a barrier that only some threads of a block reach.
    #[error("kernel {kernel}: {first} and {second} do not reach the same barriers, as {what} differs for them")]
    Divergence {
        /// The kernel's name.
        kernel: String,
        /// Condition, or loop extent, in which the threads differ.
        what: String,
        /// Thread on one path.
        first: Thread,
        /// Thread on the other path.
        second: Thread,
    },
    /// Fault of a single thread, of a kind that CPU programs have as well.
    #[error("kernel {kernel}, {thread}: {fault}")]
    Fault {
        /// The kernel's name.
        kernel: String,
        /// Thread that fails.
        thread: Thread,
        /// Kind of fault.
        fault: Box<Fault>,
    },
    /// Arguments that do not match the program, or outputs left unwritten.
    #[error(transparent)]
    Arguments(#[from] Fault),
}

/// Runs a GPU program on its arguments, like [`interp::run`](crate::interp::run) for programs.
///
/// # Errors
/// [`SimtFault`]; the outputs are then unspecified.
///
/// # Cost
/// Some 10 million simple updates a second.
pub fn run(gpu: &GpuProgram, arguments: &mut [Vec<f64>], order: ThreadOrder) -> Result<(), SimtFault> {
    hold(&gpu.program, arguments);
    run_held(gpu, arguments, order)?;
    release(&gpu.program, arguments);
    Ok(())
}

/// Runs a GPU program like [`run`], on arguments [held](crate::DType::held) as in
/// [`interp::run_held`](crate::interp::run_held).
///
/// # Errors
/// See [`run`].
pub fn run_held(gpu: &GpuProgram, arguments: &mut [Vec<f64>], order: ThreadOrder) -> Result<(), SimtFault> {
    let program = &gpu.program;
    let expected = program.arguments().count();
    if arguments.len() != expected {
        return Err(Fault::ArgumentCount { expected, got: arguments.len() }.into());
    }
    let mut memory = Watched::of(gpu)?;
    for ((id, buffer), argument) in program.arguments().zip(arguments.iter()) {
        check_length(buffer, argument.len())?;
        if buffer.role != Role::Output {
            memory.common[id.0 as usize] = argument.iter().map(|x| defined_in(buffer.dtype, *x)).collect();
        }
    }
    let mut random = OrderSeed(match order {
        ThreadOrder::Shuffled(seed) => seed,
        ThreadOrder::Forward | ThreadOrder::Reverse => 0,
    });
    let mut left = MAX_ITERATIONS;
    for kernel in gpu.kernels() {
        memory = run_kernel(program, kernel, memory, order, &mut random, &mut left)?;
    }
    for ((id, buffer), argument) in program.arguments().zip(arguments) {
        if buffer.role == Role::Output {
            *argument = std::mem::take(&mut memory.common[id.0 as usize]);
            check_written(buffer, argument)?;
        }
    }
    Ok(())
}

/// Random number generator splitmix64.
struct OrderSeed(u64);

impl OrderSeed {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ x >> 31) % n as u64) as usize
    }
}

/// Last accesses to an element. Epochs are the intervals between barriers, numbered across all blocks and
/// kernels; threads are numbered across all blocks of a kernel.
#[derive(Clone, Copy, Default)]
struct Mark {
    written: u64,
    writer: u32,
    read: u64,
    reader: u32,
    /// Whether other threads have read the element in the same epoch.
    others_read: bool,
    /// Whether threads of other blocks have read the element in the same kernel.
    other_blocks_read: bool,
    /// Whether the last write is an asynchronous copy still in flight.
    on_its_way: bool,
}

/// Memory that holds a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BufferMemory {
    /// Read only.
    Constant,
    Device,
    Shared,
    /// Shared memory filled by asynchronous copies: a value arrives once its thread has waited for it.
    Async,
    Private,
}

/// Memory with a record of the last accesses.
struct Watched {
    places: Vec<BufferMemory>,
    /// Contents that threads share, by buffer.
    common: Vec<Vec<f64>>,
    marks: Vec<Vec<Mark>>,
    /// Private contents, by thread of the block and then by buffer.
    private: Vec<Vec<f64>>,
    /// Groups of elements of pending asynchronous copies, by thread of the block, oldest first; the last
    /// group is still open.
    groups: Vec<VecDeque<Vec<(u32, usize)>>>,
    n_threads: usize,
    block: usize,
    thread: usize,
    epoch: u64,
    /// First epoch of the kernel.
    began: u64,
    /// First race: buffer, element, earlier thread, kind of conflict.
    race: Option<(u32, usize, u32, Conflict)>,
}

impl Watched {
    fn of(gpu: &GpuProgram) -> Result<Watched, Fault> {
        let program = &gpu.program;
        let place_of = |b: &Buffer| match (b.role, b.scope) {
            (Role::Input | Role::ConstInput, _) => BufferMemory::Constant,
            (Role::Output | Role::Kept, _) | (Role::Temporary, Scope::Global) => BufferMemory::Device,
            (Role::Temporary, Scope::Shared) => BufferMemory::Shared,
            (Role::Temporary, Scope::Async | Scope::Bulk | Scope::Produced | Scope::Multicast) => BufferMemory::Async,
            (Role::Temporary, Scope::Local | Scope::Register) => BufferMemory::Private,
        };
        let places: Vec<BufferMemory> = program.buffers.iter().map(place_of).collect();
        let mut watched = Watched {
            common: vec![Vec::new(); places.len()],
            marks: vec![Vec::new(); places.len()],
            private: Vec::new(),
            groups: Vec::new(),
            n_threads: 1,
            block: 0,
            thread: 0,
            epoch: 1,
            began: 1,
            race: None,
            places,
        };
        for (at, buffer) in program.buffers.iter().enumerate() {
            if watched.places[at] == BufferMemory::Device {
                watched.renew(at, buffer)?;
            }
        }
        Ok(watched)
    }

    /// Resets a buffer to unwritten.
    fn renew(&mut self, at: usize, buffer: &Buffer) -> Result<(), Fault> {
        self.common[at] = undefined(buffer)?;
        self.marks[at] = vec![Mark::default(); self.common[at].len()];
        Ok(())
    }

    fn me(&self) -> u32 {
        (self.block * self.n_threads + self.thread) as u32
    }

    /// Index of the thread's private copy of a buffer.
    fn own(&self, buffer: u32) -> usize {
        self.thread * self.places.len() + buffer as usize
    }

    /// Whether a thread belongs to another block.
    fn is_outside(&self, other: u32) -> bool {
        let first = self.block * self.n_threads;
        !(first..first + self.n_threads).contains(&(other as usize))
    }

    /// Whether an access of another thread in an epoch, to device memory or to the block's shared memory, may
    /// be concurrent with the current one.
    fn is_beside(&self, is_device: bool, epoch: u64, other: u32) -> bool {
        epoch == self.epoch && other != self.me() || is_device && epoch >= self.began && self.is_outside(other)
    }

    fn note(&mut self, buffer: u32, at: usize, other: u32, conflict: Conflict) {
        self.race.get_or_insert((buffer, at, other, conflict));
    }
}

impl Memory for Watched {
    fn read(&mut self, buffer: u32, at: usize) -> Option<f64> {
        let id = buffer as usize;
        let is_device = match self.places[id] {
            BufferMemory::Private => return self.private[self.own(buffer)].get(at).copied(),
            BufferMemory::Constant => return self.common[id].get(at).copied(),
            BufferMemory::Device => true,
            BufferMemory::Shared | BufferMemory::Async => false,
        };
        let value = *self.common[id].get(at)?;
        let mut mark = self.marks[id][at];
        if mark.on_its_way {
            self.note(buffer, at, mark.writer, Conflict::OnItsWay);
        }
        if self.is_beside(is_device, mark.written, mark.writer) {
            self.note(buffer, at, mark.writer, Conflict::ReadAfterWrite);
        }
        let (me, epoch, is_old) = (self.me(), self.epoch, mark.read < self.began);
        mark.other_blocks_read = is_device && !is_old && (mark.other_blocks_read || self.is_outside(mark.reader));
        mark.others_read = mark.read == epoch && (mark.others_read || mark.reader != me);
        (mark.read, mark.reader) = (epoch, me);
        self.marks[id][at] = mark;
        Some(value)
    }

    fn write(&mut self, buffer: u32, at: usize, value: f64) -> Option<()> {
        let id = buffer as usize;
        let place = self.places[id];
        let own = self.own(buffer);
        let values = if place == BufferMemory::Private { &mut self.private[own] } else { &mut self.common[id] };
        *values.get_mut(at)? = value;
        if matches!(place, BufferMemory::Private | BufferMemory::Constant) {
            return Some(());
        }
        let (mark, is_device) = (self.marks[id][at], place == BufferMemory::Device);
        if mark.on_its_way {
            self.note(buffer, at, mark.writer, Conflict::OnItsWay);
        }
        if self.is_beside(is_device, mark.written, mark.writer) {
            self.note(buffer, at, mark.writer, Conflict::Writes);
        }
        let others = mark.others_read && mark.read == self.epoch
            || mark.other_blocks_read && mark.read >= self.began && is_device;
        if others || self.is_beside(is_device, mark.read, mark.reader) {
            self.note(buffer, at, mark.reader, Conflict::WriteAfterRead);
        }
        let (me, on_its_way) = (self.me(), place == BufferMemory::Async);
        let new = &mut self.marks[id][at];
        (new.written, new.writer, new.on_its_way) = (self.epoch, me, on_its_way);
        if on_its_way {
            let groups = &mut self.groups[self.thread];
            match groups.back_mut() {
                Some(last) => last.push((buffer, at)),
                None => groups.push_back(vec![(buffer, at)]),
            }
        }
        Some(())
    }

    fn allocate(&mut self, buffer: u32, n: usize) {
        if self.places[buffer as usize] == BufferMemory::Private {
            let own = self.own(buffer);
            self.private.allocate(own as u32, n);
        }
    }

    fn free(&mut self, buffer: u32) {
        if self.places[buffer as usize] == BufferMemory::Private {
            let own = self.own(buffer);
            self.private.free(own as u32);
        }
    }

    fn wait(&mut self, n: u8) {
        let groups = &mut self.groups[self.thread];
        if groups.is_empty() {
            groups.push_back(Vec::new());
        }
        let n_there = groups.len().saturating_sub(usize::from(n));
        for (buffer, at) in groups.drain(..n_there).flatten() {
            let mark = &mut self.marks[buffer as usize][at];
            (mark.on_its_way, mark.written) = (false, self.epoch);
        }
        groups.push_back(Vec::new());
    }
}

/// Piece of a kernel's body.
enum BodyPiece {
    /// Code that each thread runs independently.
    Each(CompiledBlock),
    /// Loop that all threads run in lockstep, with barriers inside.
    Loop {
        var: LoopId,
        extent: Linear,
        /// Whether the extent may differ between threads.
        varies: bool,
        body: Vec<BodyPiece>,
    },
    If {
        test: CompiledCondition,
        varies: bool,
        text: String,
        then: Vec<BodyPiece>,
        otherwise: Vec<BodyPiece>,
    },
    Barrier,
}

fn has_barrier(stmt: &Stmt) -> bool {
    let mut found = false;
    stmt.walk(&mut |s| found |= *s == Stmt::Barrier);
    found
}

/// Splits a body at barriers and waits; with small pieces, also wherever all threads could synchronize.
fn pieces(
    compiler: &mut ProgramCompiler,
    program: &Program,
    block: &[Stmt],
    threads: &[LoopId],
    small: bool,
) -> Result<Vec<BodyPiece>, Fault> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < block.len() {
        let stmt = &block[at];
        let varies = match stmt {
            Stmt::For(l) => threads.iter().any(|&thread| l.extent.uses(thread)),
            _ => true,
        };
        at += 1;
        match stmt {
            Stmt::Barrier => out.push(BodyPiece::Barrier),
            Stmt::For(l) if has_barrier(stmt) || small && !varies => {
                let extent = compiler.linear(&l.extent)?;
                compiler.bound.push(l.var);
                let body = pieces(compiler, program, &l.body, threads, small)?;
                compiler.bound.pop();
                out.push(BodyPiece::Loop { var: l.var, extent, varies, body });
            }
            Stmt::If { cond, then, otherwise } if has_barrier(stmt) => {
                let mut reads = false;
                cond.for_each_load(&mut |_, _| reads = true);
                let varies = reads || threads.iter().any(|&thread| cond.uses(thread));
                let (test, text) = (compiler.condition(cond)?, cond_to_string(program, cond));
                let then = pieces(compiler, program, then, threads, small)?;
                let otherwise = pieces(compiler, program, otherwise, threads, small)?;
                out.push(BodyPiece::If { test, varies, text, then, otherwise });
            }
            _ => {
                let start = at - 1;
                while !small && block.get(at).is_some_and(|next| !has_barrier(next)) {
                    at += 1;
                }
                out.push(BodyPiece::Each(compiler.block(&block[start..at])?));
            }
        }
    }
    Ok(out)
}

fn run_kernel(
    program: &Program,
    kernel: &GpuKernel,
    mut memory: Watched,
    order: ThreadOrder,
    random: &mut OrderSeed,
    left: &mut u64,
) -> Result<Watched, SimtFault> {
    let [grid, block] = [kernel.grid(), kernel.block()];
    let (n_blocks, n_threads) = (grid.iter().product::<i64>() as usize, kernel.n_threads() as usize);
    memory.n_threads = n_threads;
    memory.private = vec![Vec::new(); program.buffers.len() * n_threads];
    memory.groups = vec![VecDeque::new(); n_threads];
    memory.epoch += 1;
    memory.began = memory.epoch;
    let [of_blocks, of_threads] = [kernel.blocks, kernel.threads].map(|axes| {
        let known = axes.iter().enumerate().filter_map(|(axis, var)| Some((axis, var.as_ref()?.0)));
        known.collect::<Vec<(usize, LoopId)>>()
    });
    let mut compiler = ProgramCompiler::new(program, StoreRounding::ToElementType);
    compiler.bound = of_blocks.iter().chain(&of_threads).map(|(_, var)| *var).collect();
    let threads: Vec<LoopId> = of_threads.iter().map(|(_, var)| *var).collect();
    let small = matches!(order, ThreadOrder::Shuffled(_));
    let body = pieces(&mut compiler, program, &kernel.body, &threads, small)?;
    let active = compiler.bound.iter().map(|var| var.0).collect();
    let mut machine = Interpreter::new(program, &compiler.sources, memory, *left);
    machine.active = active;
    let places = (0..n_threads).map(|at| place_in(block, at)).collect();
    let mut running = RunningKernel {
        program,
        kernel,
        machine,
        of_threads,
        places,
        grid,
        order,
        random,
        turns: (0..n_threads).collect(),
    };
    let mut blocks: Vec<usize> = (0..n_blocks).collect();
    arrange(&mut blocks, order, running.random);
    for at in blocks {
        let place = place_in(grid, at);
        for (axis, var) in &of_blocks {
            running.machine.vars[var.0 as usize] = place[*axis];
        }
        running.machine.memory.block = at;
        running.machine.memory.epoch += 1;
        for buffer in &kernel.shared {
            let id = buffer.0 as usize;
            running.machine.memory.renew(id, &program.buffers[id])?;
        }
        running.machine.memory.private.iter_mut().for_each(Vec::clear);
        running.machine.memory.groups.iter_mut().for_each(VecDeque::clear);
        running.pieces(&body)?;
    }
    *left = running.machine.left;
    Ok(running.machine.memory)
}

/// Coordinates of a linear index, x fastest.
fn place_in(extents: [i64; 3], at: usize) -> [i64; 3] {
    let at = at as i64;
    [at % extents[0], at / extents[0] % extents[1], at / (extents[0] * extents[1])]
}

fn arrange(turns: &mut [usize], order: ThreadOrder, random: &mut OrderSeed) {
    match order {
        ThreadOrder::Forward => {}
        ThreadOrder::Reverse => turns.reverse(),
        ThreadOrder::Shuffled(_) => (1..turns.len()).for_each(|i| turns.swap(i, random.below(i + 1))),
    }
}

/// Running kernel.
struct RunningKernel<'a> {
    program: &'a Program,
    kernel: &'a GpuKernel,
    machine: Interpreter<'a, Watched>,
    of_threads: Vec<(usize, LoopId)>,
    /// Coordinates of each thread in its block.
    places: Vec<[i64; 3]>,
    grid: [i64; 3],
    order: ThreadOrder,
    random: &'a mut OrderSeed,
    turns: Vec<usize>,
}

impl RunningKernel<'_> {
    fn thread(&self, number: u32) -> Thread {
        let number = number as usize;
        let n_threads = self.places.len();
        let [block, thread] = [place_in(self.grid, number / n_threads), self.places[number % n_threads]];
        Thread { block: block.map(|at| at as u32), thread: thread.map(|at| at as u32) }
    }

    fn kernel_name(&self) -> String {
        self.kernel.name.clone()
    }

    fn pieces(&mut self, pieces: &[BodyPiece]) -> Result<(), SimtFault> {
        pieces.iter().try_for_each(|piece| self.piece(piece))
    }

    fn piece(&mut self, piece: &BodyPiece) -> Result<(), SimtFault> {
        match piece {
            BodyPiece::Barrier => self.machine.memory.epoch += 1,
            BodyPiece::Each(block) => {
                let mut turns = std::mem::take(&mut self.turns);
                turns.sort_unstable();
                arrange(&mut turns, self.order, self.random);
                turns.iter().try_for_each(|&thread| {
                    self.become_thread(thread);
                    let done = self.machine.open_block(block);
                    self.after(done)
                })?;
                self.turns = turns;
            }
            BodyPiece::Loop { var, extent, varies, body } => {
                let name = |of: &Self| format!("the extent of loop {}", of.program.loop_name(*var));
                let n = self.alike(*varies, name, |machine| machine.linear(extent))?.max(0);
                let spent = self.machine.spend(n as u64);
                self.after(spent)?;
                self.machine.active.push(var.0);
                for i in 0..n {
                    self.machine.vars[var.0 as usize] = i;
                    self.pieces(body)?;
                }
                self.machine.active.pop();
            }
            BodyPiece::If { test, varies, text, then, otherwise } => {
                let holds = self.alike(*varies, |_| text.clone(), |machine| machine.condition(test))?;
                self.pieces(if holds { then } else { otherwise })?;
            }
        }
        Ok(())
    }

    fn become_thread(&mut self, thread: usize) {
        self.machine.memory.thread = thread;
        for (axis, var) in &self.of_threads {
            self.machine.vars[var.0 as usize] = self.places[thread][*axis];
        }
    }

    /// Evaluates a value that must be the same for all threads, as barriers depend on it.
    fn alike<T: PartialEq>(
        &mut self,
        varies: bool,
        what: impl FnOnce(&Self) -> String,
        evaluate: impl Fn(&mut Interpreter<Watched>) -> T,
    ) -> Result<T, SimtFault> {
        let of_thread = |running: &mut Self, thread: usize| {
            running.become_thread(thread);
            let value = evaluate(&mut running.machine);
            let checked = running.machine.check();
            running.after(checked).map(|()| value)
        };
        let value = of_thread(self, 0)?;
        let first = self.machine.memory.me();
        for thread in 1..if varies { self.places.len() } else { 1 } {
            if of_thread(self, thread)? != value {
                let second = self.machine.memory.me();
                let (kernel, what) = (self.kernel_name(), what(self));
                let (first, second) = (self.thread(first), self.thread(second));
                return Err(SimtFault::Divergence { kernel, what, first, second });
            }
        }
        Ok(value)
    }

    /// Translates the result of running a thread, or the race that it caused, into a fault.
    fn after(&mut self, done: Result<(), Stopped>) -> Result<(), SimtFault> {
        if let Some((buffer, at, other, conflict)) = self.machine.memory.race {
            let b = self.program.buffer(BufferId(buffer));
            return Err(SimtFault::Race {
                kernel: self.kernel_name(),
                buffer: b.name.clone(),
                subscripts: subscripts_of(&b.shape, at).into(),
                first: self.thread(other),
                second: self.thread(self.machine.memory.me()),
                conflict,
            });
        }
        match done {
            Ok(()) => Ok(()),
            Err(Stopped) => {
                let thread = self.thread(self.machine.memory.me());
                Err(SimtFault::Fault { kernel: self.kernel_name(), thread, fault: Box::new(self.machine.take_fault()) })
            }
        }
    }
}
