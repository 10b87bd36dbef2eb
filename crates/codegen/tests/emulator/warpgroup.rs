//! Warpgroup products, with operands in shared memory.
//!
//! Threads must fence the operands that they wrote to shared memory, which must not change until the product
//! is complete. Registers of sums and of operand A must not be accessed between a fence and the wait.

use super::{Block, FENCED, Factor, Group, Instruction, Operand, Stop, Thread, list};
use std::collections::{BTreeSet, VecDeque};

/// Number of threads of a warpgroup.
pub const GROUP: usize = 128;
/// Number of rows of a product.
const ROWS: usize = 64;
/// Number of bytes of each row and column in a product.
const BYTES: usize = 32;

/// Pending products of a warpgroup, by group, oldest first; the last group is open.
pub struct Products {
    sets: VecDeque<Vec<Product>>,
    /// Registers that the products change.
    registers: BTreeSet<usize>,
}

impl Default for Products {
    fn default() -> Products {
        Products { sets: VecDeque::from([Vec::new()]), registers: BTreeSet::new() }
    }
}

impl Products {
    pub fn is_over(&self) -> bool {
        self.sets.iter().all(Vec::is_empty)
    }

    /// Whether a pending product reads some of the 16 bytes at a position.
    pub fn read(&self, place: usize) -> bool {
        let factors = self.sets.iter().flatten().flat_map(|product| &product.factors);
        let mut places = factors.filter_map(|factor| match factor {
            Held::Shared(_, places, _) => Some(places),
            Held::Loaded(_) => None,
        });
        places.any(|places| places.binary_search(&place).is_ok())
    }
}

/// Pending product.
struct Product {
    text: String,
    factor: Factor,
    sums: Vec<usize>,
    /// Registers of operand A.
    loaded: Vec<usize>,
    /// Whether the product adds to the old sums.
    adds: bool,
    /// Operands A and B.
    factors: [Held; 2],
}

/// Operand of a product.
enum Held {
    /// Operand in shared memory: its descriptor, the positions in order, and the bytes there.
    Shared(Matrix, Vec<usize>, Vec<u8>),
    /// Operand in registers: the steps of each row.
    Loaded(Vec<Vec<f64>>),
}

/// Descriptor of an operand in shared memory.
#[derive(Clone, Copy)]
struct Matrix {
    first: u64,
    /// Stride in bytes between groups of eight rows of 128 bytes.
    stride: u64,
    /// Stride in bytes between the 128-byte rows of a step, for an MN-major operand.
    across: Option<u64>,
    n: usize,
}

impl Matrix {
    fn of(description: u64, n: usize, is_across: bool) -> Result<Matrix, String> {
        let [first, between, stride] = [0, 16, 32].map(|at| (description >> at & 0x3fff) << 4);
        let fields = 0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3 << 62;
        let is_known = description & !fields == 0 && description >> 62 == 1 && first & 0x380 == 0;
        let fits = match is_across {
            false => between == 16 && (stride > 0 || n <= 8),
            // A line of 64 numbers begins at a row.
            true => between % 1024 == 0 && (between > 0 || n <= 64) && stride > 0 && first % 128 == 0,
        };
        if !is_known || !fits || stride % 1024 != 0 {
            return Err(format!("{description:#x} describes no matrix in swizzled rows of 128 bytes"));
        }
        Ok(Matrix { first, stride, across: is_across.then_some(between), n })
    }

    /// Positions of 16-byte units, swizzled by the row index in the address. Units of a row or column of the
    /// tile are consecutive; for an MN-major operand, those of a step.
    fn places(self) -> Vec<usize> {
        let Matrix { first, stride, across, n } = self;
        let place = |row: u64, from: u64| {
            let address = first + row / 8 * stride + row % 8 * 128 + from;
            (address ^ (address >> 7 & 7) << 4) as usize
        };
        let parts = |n_bytes: usize| (0..n_bytes as u64 / 16).map(|part| 16 * part);
        match across {
            None => (0..n as u64).flat_map(|line| parts(BYTES).map(move |part| place(line, part))).collect(),
            Some(across) => {
                let of_step = |step| parts(2 * n).map(move |at| place(step, at / 128 * across + at % 128));
                (0..BYTES as u64 / 2).flat_map(of_step).collect()
            }
        }
    }

    /// Contents by rows or columns of the tile, from the bytes of all positions.
    fn lines(self, bytes: &[u8]) -> Vec<Vec<u8>> {
        match self.across {
            None => bytes.chunks(BYTES).map(<[u8]>::to_vec).collect(),
            Some(_) => {
                let of_line =
                    |line: usize| bytes.chunks(2 * self.n).flat_map(move |step| &step[2 * line..2 * line + 2]);
                (0..self.n).map(|line| of_line(line).copied().collect()).collect()
            }
        }
    }
}

/// Rows of an operand in registers of a warpgroup: thread `32·w + 4·g + t` holds steps `t` and `t + 4` of
/// rows `16·w + g` and `16·w + g + 8`, rows first.
fn rows_of(threads: &[Thread], loaded: &[usize], factor: Factor) -> Vec<Vec<f64>> {
    let mut rows = vec![vec![0.0; BYTES / 4]; ROWS];
    for (number, t) in threads.iter().enumerate() {
        let (warp, lane) = (number / 32, number % 32);
        for (at, register) in loaded.iter().enumerate() {
            let (row, step) = (16 * warp + lane / 4 + 8 * (at % 2), lane % 4 + 4 * (at / 2));
            rows[row][step] = factor.numbers(t.registers[*register] as u32)[0];
        }
    }
    rows
}

fn registers(operand: &Operand, visit: &mut dyn FnMut(usize)) {
    match operand {
        Operand::Register(at) => visit(*at),
        Operand::List(all) => all.iter().for_each(|operand| registers(operand, visit)),
        Operand::At(base, _) => registers(base, visit),
        Operand::In(base, all) => {
            registers(base, visit);
            all.iter().for_each(|operand| registers(operand, visit));
        }
        Operand::Number(_)
        | Operand::Shared(_)
        | Operand::Special(_)
        | Operand::Parameter(_)
        | Operand::Label(_)
        | Operand::Sink => {}
    }
}

impl Block<'_> {
    /// Records a thread's own accesses to registers.
    pub fn touch(&self, t: &mut Thread, instruction: &Instruction) -> Result<(), String> {
        let group = &self.groups[(self.number(t) as usize - 1) / GROUP];
        let mut taken = None;
        for operand in &instruction.operands {
            registers(operand, &mut |at| {
                t.touched[at] = t.n_steps;
                taken = taken.or(group.registers.contains(&at).then_some(at));
            });
        }
        match taken {
            None => Ok(()),
            Some(_) => Err(format!("{}: a sum is on its way", instruction.text)),
        }
    }

    /// Records that a thread wrote to shared memory.
    pub fn wrote(&mut self, t: &mut Thread, to: usize, n: usize) {
        let me = self.number(t);
        self.writers[to..to + n].fill(me);
        t.unfenced.push((to, n));
    }

    /// Executes a collective instruction of a warpgroup.
    pub fn group(&mut self, number: usize, threads: &mut [Thread]) -> Result<(), String> {
        let first = threads[0].stop;
        let Some(Stop::Group(at)) = first else { return Err(format!("four warps part: the first is at {first:?}")) };
        if threads.len() != GROUP || threads.iter().any(|t| t.stop != first) {
            return Err("four warps part before what they do together".into());
        }
        let entry = self.entry;
        let instruction = &entry.code[at];
        let fail = |why: String| format!("{}: {why}", instruction.text);
        let super::Code::Group(what) = instruction.code else { return Err(fail("not for four warps".into())) };
        match what {
            Group::Fence => threads.iter_mut().for_each(|t| t.fenced = Some(t.n_steps)),
            Group::Product { n_columns, factor } => {
                let product = self.begin(number, threads, instruction, n_columns, factor).map_err(fail)?;
                let group = &mut self.groups[number];
                group.registers.extend(product.sums.iter().chain(&product.loaded));
                group.sets.back_mut().expect("a set is open").push(product);
            }
            Group::End => self.groups[number].sets.push_back(Vec::new()),
            Group::Wait => {
                let left = self.value(&threads[0], &instruction.operands[0]) as usize;
                while self.groups[number].sets.len() > left + 1 {
                    for product in self.groups[number].sets.pop_front().unwrap_or_default() {
                        self.finish(threads, &product)?;
                    }
                }
                let group = &mut self.groups[number];
                let all = group.sets.iter().flatten();
                group.registers = all.flat_map(|p| p.sums.iter().chain(&p.loaded).copied()).collect();
            }
        }
        threads.iter_mut().for_each(|t| t.stop = None);
        Ok(())
    }

    fn begin(
        &self,
        number: usize,
        threads: &[Thread],
        instruction: &Instruction,
        n_columns: usize,
        factor: Factor,
    ) -> Result<Product, String> {
        let [to, rows, columns, Operand::Number(adds @ 0..2), Operand::Number(1), Operand::Number(1), how @ ..] =
            instruction.operands.as_slice()
        else {
            return Err("operands".into());
        };
        let across = match (factor, how) {
            (Factor::Tf32, []) => [false; 2],
            (Factor::Bf16 | Factor::F16, [Operand::Number(a @ 0..2), Operand::Number(b @ 0..2)]) => [*a == 1, *b == 1],
            _ => return Err("how the factors lie".into()),
        };
        let mut sums = Vec::new();
        list(to).iter().for_each(|operand| registers(operand, &mut |at| sums.push(at)));
        if sums.len() != n_columns / 2 || sums.iter().collect::<BTreeSet<_>>().len() != sums.len() {
            return Err(format!("{} sums of a thread for {n_columns} columns", sums.len()));
        }
        let mut loaded = Vec::new();
        if let Operand::List(all) = rows {
            all.iter().for_each(|operand| registers(operand, &mut |at| loaded.push(at)));
            if loaded.len() != 4 || factor != Factor::Tf32 {
                return Err("rows are four registers of TF32 numbers".into());
            }
        }
        for t in threads {
            let Some(fenced) = t.fenced else { return Err("no fence stands before".into()) };
            if sums.iter().chain(&loaded).any(|at| t.touched[*at] > fenced) {
                return Err(format!("thread {:?} has used a register since its last fence", t.place));
            }
        }
        let others = self.groups[number].sets.iter().flatten().filter(|p| p.sums != sums);
        if others.flat_map(|p| &p.sums).any(|at| sums.contains(at)) {
            return Err("a sum is one of another product on its way".into());
        }
        let describe = |operand: &Operand, n: usize, is_across: bool| {
            let description = self.value(&threads[0], operand);
            if threads.iter().any(|t| self.value(t, operand) != description) {
                return Err("threads describe different matrices".to_owned());
            }
            let matrix = Matrix::of(description, n, is_across)?;
            for place in matrix.places() {
                if self.boxes.are_coming(place, 16) {
                    return Err(format!("what comes to {place} is still on its way"));
                }
                let who = self.writers.get(place..place + 16).ok_or("a matrix is outside of shared memory")?;
                if let Some(who) = who.iter().find(|who| **who > 0) {
                    let lacks = if who & FENCED == 0 { "made no fence" } else { "nobody has waited for it" };
                    return Err(format!("thread {} wrote to {place}, and {lacks}", (who & !FENCED) - 1));
                }
            }
            let mut places = matrix.places();
            places.sort_unstable();
            for place in &places {
                let Some((barrier, phase)) = self.boxes.released.get(&(place / 16)) else { continue };
                if threads.iter().any(|t| t.seen.get(barrier) < Some(phase)) {
                    return Err(format!("not all have waited for who wrote to {place}"));
                }
            }
            Ok(Held::Shared(matrix, places, self.read(matrix)))
        };
        let rows = match rows {
            Operand::List(_) => Held::Loaded(rows_of(threads, &loaded, factor)),
            rows => describe(rows, ROWS, across[0])?,
        };
        let factors = [rows, describe(columns, n_columns, across[1])?];
        Ok(Product { text: instruction.text.clone(), factor, sums, loaded, adds: *adds == 1, factors })
    }

    fn read(&self, matrix: Matrix) -> Vec<u8> {
        matrix.places().into_iter().flat_map(|place| self.shared[place..place + 16].iter().copied()).collect()
    }

    /// Writes the sums of a product. Thread `32·w + 4·g + t` has the fragment of a warp's tile product for
    /// columns from `8·n` and rows from `16·w` on.
    fn finish(&self, threads: &mut [Thread], product: &Product) -> Result<(), String> {
        let Product { text, factor, sums, adds, factors, .. } = product;
        let is_changed = |held: &Held| matches!(held, Held::Shared(matrix, _, bytes) if self.read(*matrix) != *bytes);
        if factors.iter().any(is_changed) {
            return Err(format!("{text}: a factor changed while it was multiplied"));
        }
        let [rows, columns] = factors.each_ref().map(|held| -> Vec<Vec<f64>> {
            let (matrix, bytes) = match held {
                Held::Shared(matrix, _, bytes) => (matrix, bytes),
                Held::Loaded(rows) => return rows.clone(),
            };
            let word = |word: &[u8]| factor.numbers(u32::from_le_bytes(word.try_into().expect("four bytes")));
            matrix.lines(bytes).iter().map(|line| line.chunks(4).flat_map(word).collect()).collect()
        });
        for (number, t) in threads.iter_mut().enumerate() {
            let (warp, lane) = (number / 32, number % 32);
            for (at, register) in sums.iter().enumerate() {
                let row = &rows[16 * warp + lane / 4 + 8 * (at / 2 % 2)];
                let column = &columns[8 * (at / 4) + 2 * (lane % 4) + at % 2];
                let before = if *adds { f64::from(f32::from_bits(t.registers[*register] as u32)) } else { 0.0 };
                let products: f64 = row.iter().zip(column).map(|(a, b)| a * b).sum();
                t.registers[*register] = super::cut(before + products).to_bits().into();
            }
        }
        Ok(())
    }
}
