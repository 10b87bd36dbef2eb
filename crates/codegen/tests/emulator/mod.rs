//! Emulator of PTX on the CPU, for the instructions that generated kernels use, with checked memory.
//!
//! The threads of a block run sequentially from barrier to barrier, in a given order. Accesses out of bounds,
//! misaligned accesses, and barriers that only some threads reach are errors. The parser rejects unsupported
//! instructions.
//!
//! Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7.

#![allow(dead_code)]

mod arithmetic;
pub mod bulk;
mod cluster;
mod parse;
mod store;
mod warpgroup;

use std::collections::{BTreeMap, HashMap, VecDeque};

use tilewright_ir::gpu::Abi;
use tilewright_ir::{DType, GpuProgram, Role, Target};

pub use parse::read;

/// Maximum number of instructions of a thread, beyond which it is considered hanging.
const MOST_STEPS: u64 = 200_000_000;

/// Number of threads of a warp.
const WARP: usize = 32;

/// Flag in the writer of a byte: the writer has since executed a fence.
const FENCED: u32 = 1 << 31;

/// Address of the first buffer, and distance between buffers.
const BUFFER_DISTANCE: u64 = 1 << 36;

/// First address of a thread's local memory in the generic address space.
const LOCAL: u64 = 1 << 20;

/// Kernel.
pub struct Entry {
    pub name: String,
    /// Number of threads of a block on each axis.
    pub threads: [u32; 3],
    /// Number of neighbouring blocks along x that form a cluster.
    pub cluster: u32,
    /// Size in bytes of the static shared memory of a block.
    pub shared_bytes: usize,
    /// Size in bytes of a thread's local memory.
    pub local_bytes: usize,
    n_registers: usize,
    /// Whether each parameter is a byte array rather than a number.
    parameters: Vec<bool>,
    code: Vec<Instruction>,
}

/// Special registers of a thread.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Special {
    Thread(usize),
    Block(usize),
    Threads(usize),
    Blocks(usize),
    /// Clock in nanoseconds.
    Time,
}

#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Register(usize),
    Number(u64),
    /// Offset in the block's shared memory.
    Shared(u64),
    Special(Special),
    List(Vec<Operand>),
    /// Memory at an address plus an offset.
    At(Box<Operand>, i64),
    /// Element of an array at coordinates.
    In(Box<Operand>, Vec<Operand>),
    Parameter(usize),
    /// Position in the code.
    Label(usize),
    Sink,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Space {
    Parameter,
    Global,
    Shared,
    Local,
    Any,
}

/// Type: a letter (`u`, `s`, `b`, `f`, `p`, `h` for the upper half of a number, or `v` for two adjacent
/// numbers) and its number of bits.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ty {
    kind: char,
    bits: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rounding {
    None,
    /// Rounding to the nearest integer; the following variants round down, up and towards zero.
    Nearest,
    Down,
    Up,
    Zero,
}

#[derive(Clone, Debug, PartialEq)]
enum Code {
    Load(Space, Ty),
    Store(Space, Ty),
    Move(Ty),
    /// Operation on two or three values, named by the word before the first dot.
    Compute(Compute, Ty),
    /// Operation in f32 whose operands except the last have another type.
    Mixed(Compute, Ty),
    /// Upper half of a product.
    High(Ty),
    /// Full product, with an optional addition.
    Wide(Ty),
    Compare(Relation, Ty),
    Choose(Ty),
    Convert {
        to: Ty,
        from: Ty,
        rounding: Rounding,
    },
    /// Combination of two numbers to a register.
    Pair {
        to: Ty,
        from: Ty,
    },
    Funnel {
        left: bool,
    },
    Permute,
    Field(Ty),
    /// Rounding to TF32.
    Tf32,
    /// Tile product of a warp, with 16 rows and 8 columns.
    TileProduct(Factor),
    /// Load of 8 × 8 tiles of 16-bit numbers by a warp, optionally transposed.
    LoadTiles {
        n: usize,
        transposed: bool,
    },
    /// Exchange of 32-bit values with threads of the warp whose index differs by an xor mask.
    Exchange,
    /// Store of this many 8 × 8 tiles of 16-bit numbers.
    StoreTiles(usize),
    /// Barrier of a warp.
    WarpBarrier,
    /// Start of a box copy from shared memory to an array of this many dimensions.
    BoxStore(usize),
    /// End of a group of such copies.
    EndStores,
    /// Wait until all but the last such groups have read shared memory.
    WaitForStores,
    /// Start of a copy from global to shared memory.
    Copy,
    /// End of a group of copies.
    EndCopies,
    /// Wait for all but the last groups of copies.
    WaitForCopies,
    /// Fence that makes the thread's writes to shared memory visible to the async proxy.
    ProxyFence,
    /// Operation of a warpgroup.
    Group(Group),
    /// Operation on an mbarrier.
    Barriers(bulk::Barriers),
    /// Start of a box copy from an array of this many dimensions, and whether it is multicast to a cluster.
    BoxCopy(usize, bool),
    /// Fence that makes the mbarriers initialized by the thread visible to other blocks of the cluster.
    BarrierFence,
    /// Arrival at the cluster barrier, followed by the wait for all threads of the cluster.
    ArriveInCluster,
    WaitForCluster,
    /// Address in the shared memory of another block of the cluster.
    PlaceThere,
    Branch,
    Barrier,
    Return,
    Trap,
}

/// Operation of warpgroup products.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Group {
    /// Fence that orders registers before the following products.
    Fence,
    /// Start of a product of 64 rows and this many columns.
    Product { n_columns: usize, factor: Factor },
    /// End of a group of products.
    End,
    /// Wait for all but the last groups of products.
    Wait,
}

/// Element type of tensor core operands, whose tiles have 32 bytes along the reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Factor {
    /// 32-bit numbers, of which the first 19 bits are used.
    Tf32,
    Bf16,
    F16,
}

impl Factor {
    /// Decodes the numbers in a register.
    fn numbers(self, bits: u32) -> Vec<f64> {
        let halves = |dtype: DType| dtype.read(&bits.to_le_bytes());
        match self {
            // Bits after the first 11 significant ones are ignored.
            Factor::Tf32 => vec![f32::from_bits(bits & !0x1fff).into()],
            Factor::Bf16 => halves(DType::Bf16),
            Factor::F16 => halves(DType::F16),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Compute {
    Add,
    Sub,
    Mul,
    MulAdd,
    Div,
    Rem,
    Min,
    Max,
    /// NaN if either operand is NaN.
    MinOrNan,
    /// NaN if either operand is NaN.
    MaxOrNan,
    Neg,
    Abs,
    And,
    Or,
    Xor,
    Not,
    ShiftLeft,
    ShiftRight,
    Sqrt,
    Reciprocal,
    CopySign,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Relation {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    /// Test for NaN among the operands.
    Unordered,
    /// Relation that also holds if an operand is NaN.
    OrUnordered(&'static Relation),
}

#[derive(Clone, Debug)]
struct Instruction {
    /// Predicate, and the truth value for which the instruction runs.
    guard: Option<(usize, bool)>,
    code: Code,
    operands: Vec<Operand>,
    text: String,
}

impl Instruction {
    fn opcode(&self) -> &str {
        self.text.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default()
    }
}

/// Truncates a sum as tensor cores do, instead of rounding it: products of 1,024 steps on an H200 had errors
/// of that size.
fn cut(exact: f64) -> f32 {
    match exact as f32 {
        larger if f64::from(larger).abs() > exact.abs() => f32::from_bits(larger.to_bits() - 1),
        nearest => nearest,
    }
}

/// Elements of an operand list.
fn list(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::List(all) => all,
        one => std::slice::from_ref(one),
    }
}

/// Global memory, with buffers far apart.
#[derive(Default)]
pub struct Memory {
    buffers: Vec<Vec<u8>>,
    /// Counts of shared memory traffic, if enabled.
    pub traffic: Option<Traffic>,
}

/// Accesses of a kernel's warps to shared memory, by opcode.
#[derive(Default)]
pub struct Traffic {
    pub counts: BTreeMap<String, Count>,
    /// Addresses of a warp's accesses since the last barrier, by warp, instruction, and number of previous
    /// executions by the thread.
    open: HashMap<(usize, usize, u32), Vec<(u64, usize)>>,
    visits: HashMap<(usize, usize), u32>,
}

/// Counts of one kind of access.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Count {
    /// Number of warp instructions.
    pub instructions: u64,
    /// Number of cycles without bank conflicts, at most 128 bytes each.
    pub least: u64,
    /// Number of cycles with bank conflicts.
    pub taken: u64,
}

/// Number of banks of shared memory, of 4-byte words.
const BANKS: u64 = 32;

impl Traffic {
    fn note(&mut self, thread: usize, at: usize, address: u64, n: usize) {
        let visit = self.visits.entry((thread, at)).or_insert(0);
        self.open.entry((thread / WARP, at, *visit)).or_default().push((address, n));
        *visit += 1;
    }

    /// Adds up the recorded accesses at a barrier, after which no thread adds to them.
    fn close(&mut self, entry: &Entry) {
        self.visits.clear();
        for ((_, at, _), accesses) in self.open.drain() {
            let count = self.counts.entry(entry.code[at].opcode().to_owned()).or_default();
            count.instructions += 1;
            let bytes = accesses[0].1.max(4);
            for part in accesses.chunks(128 / bytes) {
                count.least += 1;
                let mut words: Vec<u64> =
                    part.iter().flat_map(|(first, n)| *first / 4..(first + *n as u64).div_ceil(4)).collect();
                words.sort_unstable();
                words.dedup();
                let of_bank = |bank| words.iter().filter(|word| *word % BANKS == bank).count() as u64;
                count.taken += (0..BANKS).map(of_bank).max().unwrap_or(0);
            }
        }
    }
}

impl Memory {
    /// Adds a buffer and returns its address.
    pub fn add(&mut self, bytes: Vec<u8>) -> u64 {
        self.buffers.push(bytes);
        self.buffers.len() as u64 * BUFFER_DISTANCE
    }

    /// Bytes of the buffer at an address.
    pub fn buffer(&self, address: u64) -> &[u8] {
        &self.buffers[(address / BUFFER_DISTANCE) as usize - 1]
    }

    /// Bytes at an address; `None` if they are not in a single buffer.
    pub fn at(&mut self, address: u64, n: usize) -> Option<&mut [u8]> {
        let buffer = self.buffers.get_mut(((address / BUFFER_DISTANCE) as usize).checked_sub(1)?)?;
        let first = (address % BUFFER_DISTANCE) as usize;
        buffer.get_mut(first..first.checked_add(n)?)
    }
}

/// Runs kernels, compiled to PTX, on arguments, and returns the arguments afterwards.
///
/// # Errors
/// A description of the error.
pub fn run(gpu: &GpuProgram, ptx: &str, arguments: &[Vec<f64>], order: Order) -> Result<Vec<Vec<f64>>, String> {
    run_in(&mut Memory::default(), gpu, ptx, arguments, order)
}

/// Counts the shared memory traffic of all kernels.
///
/// # Errors
/// A description of the error.
pub fn traffic(gpu: &GpuProgram, ptx: &str, arguments: &[Vec<f64>]) -> Result<BTreeMap<String, Count>, String> {
    let mut memory = Memory { traffic: Some(Traffic::default()), ..Memory::default() };
    run_in(&mut memory, gpu, ptx, arguments, Order::Ascending)?;
    Ok(memory.traffic.unwrap_or_default().counts)
}

fn run_in(
    memory: &mut Memory,
    gpu: &GpuProgram,
    ptx: &str,
    arguments: &[Vec<f64>],
    order: Order,
) -> Result<Vec<Vec<f64>>, String> {
    let p = &gpu.program;
    let mut values = arguments.iter();
    let mut addresses = vec![0; p.buffers.len()];
    for id in gpu.device_buffers() {
        let b = p.buffer(id);
        let mut bytes = vec![0xff; b.size_bytes().expect("it fits") as usize];
        if matches!(b.role, Role::Input | Role::ConstInput | Role::Output) {
            b.dtype.write(values.next().expect("a value for each argument, which come first"), &mut bytes);
        }
        addresses[id.0 as usize] = memory.add(bytes);
    }
    let entries = read(ptx)?;
    // The launch contract is the same for all GPUs with these instructions.
    let copies_boxes = Target::named("sm_90a").expect("a GPU of NVIDIA's");
    for (kernel, entry) in gpu.kernels().zip(&entries) {
        let abi = Abi::of(gpu, kernel, &copies_boxes);
        let is_plain = entry.n_parameters() == abi.buffers.len();
        let threads = if is_plain { kernel.block() } else { abi.block };
        if entry.name != kernel.name || entry.threads.map(i64::from) != threads {
            return Err(format!("{} stands where {} should", entry.name, kernel.name));
        }
        let mut passed: Vec<u64> = abi.buffers.iter().map(|(id, _)| addresses[id.0 as usize]).collect();
        for map in abi.maps.into_iter().take(entry.n_parameters() - passed.len()) {
            passed.push(bulk::Map::of(p, &map, addresses[map.array.0 as usize]).pass(memory));
        }
        let whole = abi.shared_bytes as usize;
        let asked = if entry.shared_bytes == 0 { whole } else { 0 };
        if entry.shared_bytes + asked != whole {
            return Err(format!("{} shares {} bytes instead of {whole}", entry.name, entry.shared_bytes));
        }
        entry.run(memory, abi.grid.map(|n| n as u32), asked, &passed, order)?;
    }
    Ok(p.arguments().map(|(id, b)| b.dtype.read(memory.buffer(addresses[id.0 as usize]))).collect())
}

/// Order in which the threads of a block run between barriers.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    Ascending,
    Descending,
    /// Threads at this stride, then those in between.
    Strided(usize),
}

/// Reason why a thread stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stop {
    Exit,
    /// Barrier, at this instruction.
    Barrier(usize),
    /// Collective instruction of the warp.
    Warp(usize),
    /// Collective instruction of the warpgroup.
    Group(usize),
    /// Polling of an mbarrier that has not completed its phase.
    Again,
    /// Wait for the threads of the cluster.
    Cluster,
}

struct Thread {
    place: [u32; 3],
    registers: Vec<u64>,
    local: Vec<u8>,
    at: usize,
    n_steps: u64,
    stop: Option<Stop>,
    /// Copies in flight, by group, oldest first; the last group is open. Each copy is a position in shared
    /// memory with the bytes.
    copies: VecDeque<Vec<(usize, Vec<u8>)>>,
    /// Writes to shared memory since the thread's last fence: positions and bytes.
    unfenced: Vec<(usize, usize)>,
    /// Writes fenced since the thread's last arrival at an mbarrier.
    unreleased: Vec<(usize, usize)>,
    /// Completed phases that the thread observed in waits for mbarriers, by position.
    seen: BTreeMap<usize, u64>,
    /// Step of the last access to each register, and of the last fence for products.
    touched: Vec<u64>,
    fenced: Option<u64>,
    /// Number of the thread's arrivals at the cluster barrier, and of its waits there.
    n_arrivals: u64,
    n_waits: u64,
    /// Number of finished groups of copies to arrays.
    n_stores: usize,
}

struct Block<'m> {
    entry: &'m Entry,
    /// Global memory, while the block runs.
    memory: Memory,
    shared: Vec<u8>,
    /// First address of the block's shared memory.
    window: u64,
    threads: Vec<Thread>,
    is_over: bool,
    /// Effects on other blocks of the cluster, with their ranks.
    sent: Vec<(usize, cluster::Sent)>,
    /// Writer of each byte, as its index plus one, until it has executed a fence followed by a barrier.
    writers: Vec<u32>,
    /// Writes fenced since the last barrier: positions and bytes.
    fenced: Vec<(usize, usize)>,
    /// Pending products, by warpgroup.
    groups: Vec<warpgroup::Products>,
    boxes: bulk::Boxes,
    /// Pending copies to arrays.
    stores: Vec<store::Pending>,
    /// Clock in nanoseconds, which advances while all threads wait.
    clock: u64,
    place: [u32; 3],
    grid: [u32; 3],
    arguments: &'m [u64],
}

impl Entry {
    /// Runs the kernel on a grid of blocks; `shared_bytes` is the dynamic shared memory of the launch.
    ///
    /// # Errors
    /// A description of the error, with the instruction.
    pub fn run(
        &self,
        memory: &mut Memory,
        grid: [u32; 3],
        shared_bytes: usize,
        arguments: &[u64],
        order: Order,
    ) -> Result<(), String> {
        if arguments.len() != self.parameters.len() {
            return Err(format!("{} takes {} arguments", self.name, self.parameters.len()));
        }
        if !grid[0].is_multiple_of(self.cluster) {
            return Err(format!("{} blocks along x are no clusters of {}", grid[0], self.cluster));
        }
        for z in 0..grid[2] {
            for y in 0..grid[1] {
                for x in (0..grid[0]).step_by(self.cluster as usize) {
                    let places = (0..self.cluster).map(|rank| [x + rank, y, z]);
                    let blocks = places.map(|place| Block::new(self, shared_bytes, place, grid, arguments)).collect();
                    cluster::run(blocks, memory, order).map_err(|why| format!("{}, {why}", self.name))?;
                }
            }
        }
        Ok(())
    }

    /// Number of parameters.
    pub fn n_parameters(&self) -> usize {
        self.parameters.len()
    }

    /// Whether a parameter is a tensor map rather than a number.
    pub fn is_map(&self, parameter: usize) -> bool {
        self.parameters[parameter]
    }

    /// Number of occurrences of each opcode.
    pub fn opcodes(&self) -> BTreeMap<String, usize> {
        let mut out = BTreeMap::new();
        for instruction in &self.code {
            *out.entry(instruction.opcode().to_owned()).or_insert(0) += 1;
        }
        out
    }
}

impl<'m> Block<'m> {
    fn new(entry: &'m Entry, asked_bytes: usize, place: [u32; 3], grid: [u32; 3], arguments: &'m [u64]) -> Block<'m> {
        let [nx, ny, nz] = entry.threads;
        let threads = (0..nx * ny * nz).map(|i| Thread {
            place: [i % nx, i / nx % ny, i / nx / ny],
            // Unwritten registers hold NaN.
            registers: vec![u32::MAX.into(); entry.n_registers],
            local: vec![0xff; entry.local_bytes],
            at: 0,
            n_steps: 0,
            stop: None,
            copies: VecDeque::from([Vec::new()]),
            unfenced: Vec::new(),
            unreleased: Vec::new(),
            seen: BTreeMap::new(),
            touched: vec![0; entry.n_registers],
            fenced: None,
            n_arrivals: 0,
            n_waits: 0,
            n_stores: 0,
        });
        let threads: Vec<Thread> = threads.collect();
        let has_groups = entry.code.iter().any(|i| matches!(i.code, Code::Group(_)));
        let groups = threads.chunks(warpgroup::GROUP).filter(|_| has_groups);
        let n_bytes = entry.shared_bytes + asked_bytes;
        Block {
            entry,
            memory: Memory::default(),
            // Unwritten shared memory holds a conspicuous value.
            shared: vec![0xff; n_bytes],
            window: cluster::window(entry.cluster, place[0] % entry.cluster),
            groups: groups.map(|_| warpgroup::Products::default()).collect(),
            threads,
            is_over: false,
            sent: Vec::new(),
            writers: vec![0; n_bytes],
            fenced: Vec::new(),
            boxes: bulk::Boxes::default(),
            stores: Vec::new(),
            clock: 1,
            place,
            grid,
            arguments,
        }
    }
}

/// Nanoseconds by which the clock advances while all threads wait.
const SECOND: u64 = 1_000_000_000;

impl Block<'_> {
    /// Advances the clock by a second, so that polling threads poll again.
    fn wait(&mut self) {
        self.clock += SECOND;
        self.threads.iter_mut().filter(|t| t.stop == Some(Stop::Again)).for_each(|t| t.stop = None);
    }

    /// Runs the block until it finishes or needs other blocks of its cluster.
    fn advance(&mut self, order: &[usize]) -> Result<(), String> {
        let mut threads = std::mem::take(&mut self.threads);
        let done = self.advance_threads(&mut threads, order);
        self.threads = threads;
        done
    }

    fn advance_threads(&mut self, threads: &mut [Thread], order: &[usize]) -> Result<(), String> {
        loop {
            loop {
                for &i in order {
                    while threads[i].stop.is_none() {
                        self.go(&mut threads[i])?;
                    }
                }
                let mut is_over = true;
                // Threads may wait for others, one of which polls again.
                let are_ready = |threads: &[Thread], is_one: &dyn Fn(Stop) -> bool| {
                    threads.iter().any(|t| t.stop.is_some_and(is_one))
                        && threads.iter().all(|t| t.stop != Some(Stop::Again))
                };
                for warp in threads.chunks_mut(WARP) {
                    if are_ready(warp, &|stop| matches!(stop, Stop::Warp(_))) {
                        is_over = false;
                        self.warp(warp)?;
                    }
                }
                for (number, group) in threads.chunks_mut(warpgroup::GROUP).enumerate() {
                    if are_ready(group, &|stop| matches!(stop, Stop::Group(_))) {
                        is_over = false;
                        self.group(number, group)?;
                    }
                }
                if threads.iter().any(|t| t.stop == Some(Stop::Again)) {
                    if is_over && !self.boxes.have_changed() {
                        return Ok(());
                    }
                    is_over = false;
                    threads.iter_mut().filter(|t| t.stop == Some(Stop::Again)).for_each(|t| t.stop = None);
                }
                if is_over {
                    break;
                }
            }
            if let Some(traffic) = &mut self.memory.traffic {
                traffic.close(self.entry);
            }
            if threads.iter().all(|t| t.stop == Some(Stop::Exit)) {
                if self.groups.iter().any(|group| !group.is_over()) {
                    return Err("products are still on their way at the end".into());
                }
                if !self.stores.is_empty() {
                    return Err("a copy to an array may still read shared memory at the end".into());
                }
                self.is_over = true;
                return self.boxes.require_rest();
            }
            if threads.iter().any(|t| t.stop == Some(Stop::Cluster)) {
                return Ok(());
            }
            Self::together(threads)?;
            threads.iter_mut().for_each(|t| t.unreleased.clear());
            self.boxes.released.clear();
            for (to, n) in std::mem::take(&mut self.fenced) {
                self.writers[to..to + n].iter_mut().filter(|who| **who & FENCED != 0).for_each(|who| *who = 0);
            }
        }
    }

    /// Executes a collective instruction of a warp.
    fn warp(&mut self, threads: &mut [Thread]) -> Result<(), String> {
        let first = threads[0].stop;
        let Some(Stop::Warp(at)) = first else { return Err(format!("a warp parts: its first thread is at {first:?}")) };
        if threads.len() != WARP || threads.iter().any(|t| t.stop != first) {
            return Err("a warp parts before what it does together".into());
        }
        let entry = self.entry;
        let instruction = &entry.code[at];
        match (&instruction.code, instruction.operands.as_slice()) {
            (Code::TileProduct(factor), [to, rows, columns, sums]) => {
                self.tile_product(threads, *factor, [to, rows, columns, sums]);
            }
            // All threads of the warp must take part.
            (
                Code::Exchange,
                [to, from, Operand::Number(distance @ 1..32), Operand::Number(31), Operand::Number(all)],
            ) if *all as u32 == u32::MAX => {
                let before: Vec<u64> = threads.iter().map(|t| self.value(t, from)).collect();
                for (lane, t) in threads.iter_mut().enumerate() {
                    Self::set(t, to, before[lane ^ *distance as usize]);
                }
            }
            (Code::LoadTiles { n, transposed }, [to, from]) => {
                self.load_tiles(threads, (*n, *transposed), to, from)
                    .map_err(|why| format!("{}: {why}", instruction.text))?;
            }
            (Code::StoreTiles(n), [to, from]) => {
                self.store_tiles(threads, *n, to, from).map_err(|why| format!("{}: {why}", instruction.text))?;
            }
            (Code::WarpBarrier, [Operand::Number(all)]) if *all as u32 == u32::MAX => self.in_warp(threads),
            _ => return Err(format!("operands: {}", instruction.text)),
        }
        threads.iter_mut().for_each(|t| t.stop = None);
        Ok(())
    }

    /// Executes a tile product. Thread `4·g + t` holds the factors of rows `g` and `g + 8` and of column `g`,
    /// at positions `t` and `t + 4` along the reduction, and the sums of these rows and of columns `2·t` and
    /// `2·t + 1`.
    fn tile_product(&self, threads: &mut [Thread], factor: Factor, [to, rows, columns, sums]: [&Operand; 4]) {
        let bits = |t: &Thread, of: &Operand, at: usize| self.value(t, &list(of)[at]) as u32;
        let mut results = vec![[0f32; 4]; WARP];
        for (lane, result) in results.iter_mut().enumerate() {
            for (at, sum) in result.iter_mut().enumerate() {
                let (row, column) = (lane / 4 + 8 * (at / 2), 2 * (lane % 4) + at % 2);
                let products = (0..8).map(|k| {
                    let of_row = bits(&threads[4 * (row % 8) + k % 4], rows, row / 8 + 2 * (k / 4));
                    let of_column = bits(&threads[4 * column + k % 4], columns, k / 4);
                    let pairs = factor.numbers(of_row).into_iter().zip(factor.numbers(of_column));
                    pairs.map(|(a, b)| a * b).sum::<f64>()
                });
                let before = f32::from_bits(bits(&threads[lane], sums, at));
                *sum = cut(f64::from(before) + products.sum::<f64>());
            }
        }
        for (t, result) in threads.iter_mut().zip(results) {
            list(to).iter().zip(result).for_each(|(operand, x)| Self::set(t, operand, x.to_bits().into()));
        }
    }

    /// Loads tiles: thread `4·g + t` receives numbers `2·t` and `2·t + 1` of row `g`, or of column `g`, of
    /// each tile. Threads from `8·n` on provide the addresses of the rows of tile `n`.
    fn load_tiles(
        &mut self,
        threads: &mut [Thread],
        (n, transposed): (usize, bool),
        to: &Operand,
        from: &Operand,
    ) -> Result<(), String> {
        for tile in 0..n {
            let mut rows = Vec::new();
            for t in &mut threads[8 * tile..8 * tile + 8] {
                let address = self.address(t, from)?;
                self.note(t, address, 16);
                rows.push(self.bytes(t, Space::Shared, address, 16)?.to_vec());
            }
            let number = |row: usize, column: usize| [rows[row][2 * column], rows[row][2 * column + 1]];
            for (lane, t) in threads.iter_mut().enumerate() {
                let (g, first) = (lane / 4, 2 * (lane % 4));
                let [a, b] = [first, first + 1].map(|k| if transposed { number(k, g) } else { number(g, k) });
                Self::set(t, &list(to)[tile], u32::from_le_bytes([a[0], a[1], b[0], b[1]]).into());
            }
        }
        Ok(())
    }

    /// Resumes threads that wait for each other.
    fn together(threads: &mut [Thread]) -> Result<(), String> {
        let first = threads[0].stop;
        if let (Some(Stop::Barrier(_)), true) = (first, threads.iter().all(|t| t.stop == first)) {
            threads.iter_mut().for_each(|t| t.stop = None);
            return Ok(());
        }
        let others = threads.iter().find(|t| t.stop != first).map(|t| (t.place, t.stop));
        Err(format!("threads part: the first at {first:?}, another at {others:?}"))
    }

    /// Runs one thread until it stops.
    fn go(&mut self, t: &mut Thread) -> Result<(), String> {
        let entry = self.entry;
        loop {
            let Some(instruction) = entry.code.get(t.at) else { return Err("the code ends without a return".into()) };
            let at = t.at;
            t.at += 1;
            t.n_steps += 1;
            if t.n_steps > MOST_STEPS {
                return Err(format!("thread {:?} does not come to an end", t.place));
            }
            if let Some((predicate, value)) = instruction.guard
                && (t.registers[predicate] != 0) != value
            {
                continue;
            }
            if !self.groups.is_empty() && !matches!(instruction.code, Code::Group(_)) {
                self.touch(t, instruction)?;
            }
            match &instruction.code {
                Code::Group(_) => {
                    t.stop = Some(Stop::Group(at));
                    return Ok(());
                }
                Code::Barrier => {
                    t.stop = Some(Stop::Barrier(at));
                    return Ok(());
                }
                Code::TileProduct(_)
                | Code::LoadTiles { .. }
                | Code::StoreTiles(_)
                | Code::WarpBarrier
                | Code::Exchange => {
                    t.stop = Some(Stop::Warp(at));
                    return Ok(());
                }
                Code::Return => {
                    t.stop = Some(Stop::Exit);
                    return Ok(());
                }
                Code::Trap => {
                    let seconds = self.clock / SECOND;
                    return Err(format!("thread {:?} stops the kernel after {seconds} s", t.place));
                }
                Code::Branch => match instruction.operands[0] {
                    Operand::Label(to) => t.at = to,
                    _ => return Err(format!("no label: {}", instruction.text)),
                },
                _ => {
                    self.step(t, instruction)
                        .map_err(|why| format!("thread {:?}, {}: {why}", t.place, instruction.text))?;
                    if t.stop.is_some() {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn value(&self, t: &Thread, operand: &Operand) -> u64 {
        match operand {
            Operand::Register(at) => t.registers[*at],
            Operand::Number(n) => *n,
            Operand::Shared(at) => self.window + at,
            Operand::Special(Special::Time) => self.clock,
            Operand::Special(special) => u64::from(match special {
                Special::Thread(axis) => t.place[*axis],
                Special::Block(axis) => self.place[*axis],
                Special::Threads(axis) => self.entry.threads[*axis],
                Special::Blocks(axis) => self.grid[*axis],
                Special::Time => unreachable!("it has more bits"),
            }),
            Operand::Parameter(at) => self.arguments[*at],
            other => panic!("{other:?} has no value"),
        }
    }

    fn set(t: &mut Thread, operand: &Operand, value: u64) {
        match operand {
            Operand::Register(at) => t.registers[*at] = value,
            Operand::Sink => {}
            other => panic!("{other:?} cannot be written"),
        }
    }

    /// Bytes at an address in an address space.
    fn bytes<'b>(
        &'b mut self,
        t: &'b mut Thread,
        space: Space,
        address: u64,
        n: usize,
    ) -> Result<&'b mut [u8], String> {
        if !address.is_multiple_of(n as u64) {
            return Err(format!("address {address:#x} is no multiple of {n}"));
        }
        let part = |memory: &'b mut [u8], first: u64| memory.get_mut(first as usize..(first as usize).checked_add(n)?);
        let found = match space {
            Space::Shared => address.checked_sub(self.window).and_then(|first| part(&mut self.shared, first)),
            Space::Local => address.checked_sub(LOCAL).and_then(|first| part(&mut t.local, first)),
            Space::Any if address < BUFFER_DISTANCE => {
                address.checked_sub(LOCAL).and_then(|first| part(&mut t.local, first))
            }
            Space::Global | Space::Any => self.memory.at(address, n),
            Space::Parameter => None,
        };
        found.ok_or_else(|| format!("{n} bytes at {address:#x} are outside of {space:?} memory"))
    }

    /// Records an access to shared memory by a thread's current instruction.
    fn note(&mut self, t: &Thread, address: u64, n: usize) {
        let number = self.number(t) as usize - 1;
        if let Some(traffic) = &mut self.memory.traffic {
            traffic.note(number, t.at - 1, address, n);
        }
    }

    /// Index of a thread in its block, plus one.
    fn number(&self, t: &Thread) -> u32 {
        let ([nx, ny, _], [x, y, z]) = (self.entry.threads, t.place);
        x + nx * (y + ny * z) + 1
    }

    /// Position of an address in the block's shared memory.
    fn position(&self, address: u64) -> Result<usize, String> {
        let position = address.checked_sub(self.window).filter(|at| *at < self.shared.len() as u64);
        Ok(position.ok_or_else(|| format!("{address:#x} is outside of the block's shared memory"))? as usize)
    }

    fn address(&self, t: &Thread, operand: &Operand) -> Result<u64, String> {
        match operand {
            Operand::At(base, offset) => Ok(self.value(t, base).wrapping_add_signed(*offset)),
            other => Err(format!("{other:?} is no place in memory")),
        }
    }

    fn step(&mut self, t: &mut Thread, instruction: &Instruction) -> Result<(), String> {
        let x = &instruction.operands;
        match &instruction.code {
            Code::Load(Space::Parameter, _) => match &x[1] {
                Operand::At(base, 0) => {
                    let value = self.value(t, base);
                    Self::set(t, &x[0], value);
                }
                _ => return Err("a part of a parameter".into()),
            },
            Code::Copy => {
                let [to, from, bytes, rest @ ..] = x.as_slice() else { return Err("operands are missing".into()) };
                let (bytes, to, from) = (self.value(t, bytes) as usize, self.address(t, to)?, self.address(t, from)?);
                let position = self.position(to)?;
                let n = rest.first().map_or(bytes, |n| self.value(t, n) as usize);
                if !matches!(bytes, 4 | 8 | 16) || n > bytes {
                    return Err(format!("a copy of {n} of {bytes} bytes"));
                }
                // A copy of zero bytes reads nothing.
                let mut value = if n == 0 { Vec::new() } else { self.bytes(t, Space::Global, from, bytes)?.to_vec() };
                value.truncate(n);
                value.resize(bytes, 0);
                self.note(t, to, bytes);
                self.bytes(t, Space::Shared, to, bytes)?;
                t.copies.back_mut().expect("there is an open group").push((position, value));
            }
            Code::EndCopies => t.copies.push_back(Vec::new()),
            Code::WaitForCopies => {
                let left = self.value(t, &x[0]) as usize;
                while t.copies.len() > left + 1 {
                    for (to, value) in t.copies.pop_front().unwrap_or_default() {
                        self.shared[to..to + value.len()].copy_from_slice(&value);
                        self.wrote(t, to, value.len());
                    }
                }
            }
            Code::Barriers(what) => self.barriers(t, *what, x)?,
            Code::BoxStore(n) => self.store_box(t, *n, x)?,
            Code::EndStores => self.end_stores(t),
            Code::WaitForStores => {
                let left = self.value(t, &x[0]) as usize;
                self.wait_for_stores(t, left)?;
            }
            Code::BoxCopy(n, is_multicast) => self.begin_box(t, (*n, *is_multicast), x)?,
            Code::BarrierFence => {
                let me = self.number(t);
                self.boxes.announce(me);
            }
            Code::ArriveInCluster => t.n_arrivals += 1,
            Code::WaitForCluster => {
                t.n_waits += 1;
                if t.n_waits != t.n_arrivals {
                    return Err("the thread has not arrived before it waits".into());
                }
                t.stop = Some(Stop::Cluster);
            }
            Code::PlaceThere => {
                let (place, rank) = (self.value(t, &x[1]), self.value(t, &x[2]));
                let there = self.place_there(place, rank)?;
                Self::set(t, &x[0], there);
            }
            Code::ProxyFence => {
                let me = self.number(t);
                self.boxes.fence(me);
                for (to, n) in std::mem::take(&mut t.unfenced) {
                    self.writers[to..to + n].iter_mut().filter(|who| **who == me).for_each(|who| *who |= FENCED);
                    self.fenced.push((to, n));
                    t.unreleased.push((to, n));
                }
            }
            Code::Load(space, ty) => {
                let to = list(&x[0]);
                let (each, address) = (ty.bits as usize / 8, self.address(t, &x[1])?);
                if *space == Space::Shared {
                    self.note(t, address, each * to.len());
                    let position = self.position(address)?;
                    if self.boxes.are_coming(position, each * to.len()) {
                        return Err(format!("what comes to {position} is still on its way"));
                    }
                }
                let bytes = self.bytes(t, *space, address, each * to.len())?.to_vec();
                for (operand, bytes) in to.iter().zip(bytes.chunks(each)) {
                    let mut word = [0; 8];
                    word[..each].copy_from_slice(bytes);
                    Self::set(t, operand, arithmetic::extended(u64::from_le_bytes(word), *ty));
                }
            }
            Code::Store(space, ty) => {
                let from = list(&x[1]);
                let (each, address) = (ty.bits as usize / 8, self.address(t, &x[0])?);
                if *space == Space::Shared {
                    self.note(t, address, each * from.len());
                }
                let words: Vec<u64> = from.iter().map(|operand| self.value(t, operand)).collect();
                if *space == Space::Shared && !self.groups.is_empty() {
                    self.bytes(t, *space, address, each * from.len())?;
                    let position = self.position(address)?;
                    self.wrote(t, position, each * from.len());
                }
                let bytes = self.bytes(t, *space, address, each * from.len())?;
                for (bytes, word) in bytes.chunks_mut(each).zip(words) {
                    bytes.copy_from_slice(&word.to_le_bytes()[..each]);
                }
            }
            Code::Move(ty) => match (&x[0], &x[1]) {
                (Operand::List(to), from) => {
                    let (value, each) = (self.value(t, from), ty.bits / to.len() as u32);
                    for (at, operand) in to.iter().enumerate() {
                        Self::set(t, operand, arithmetic::low(value >> (each * at as u32), each));
                    }
                }
                (to, Operand::List(from)) => {
                    let each = ty.bits / from.len() as u32;
                    let parts = from.iter().enumerate();
                    let value = parts.fold(0, |all, (at, operand)| {
                        all | arithmetic::low(self.value(t, operand), each) << (each * at as u32)
                    });
                    Self::set(t, to, value);
                }
                (to, from) => {
                    let value = arithmetic::low(self.value(t, from), ty.bits);
                    Self::set(t, to, value);
                }
            },
            code => {
                let values: Vec<u64> = x[1..].iter().map(|operand| self.value(t, operand)).collect();
                Self::set(t, &x[0], arithmetic::compute(code, &values)?);
            }
        }
        Ok(())
    }
}
