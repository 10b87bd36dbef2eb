//! Helpers of this crate's tests: handwritten operators and random programs.
#![allow(dead_code)]

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng, SeedableRng};
use tilewright_ir::expr::{BinaryOp, ReduceOp, Subscript, UnaryOp};
use tilewright_ir::reference::random_input;
use tilewright_ir::text::parse;
use tilewright_ir::{
    Atom, Buffer, BufferId, Cond, DType, Expr, Index, Loop, LoopId, LoopKind, Program, Role, Scope, Stmt,
};

/// Random number generator with a seed.
pub struct Random(SplitMix64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(SplitMix64::seed_from_u64(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws a number in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn in_range(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as usize) as i64
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
}

/// Parses a valid program.
#[track_caller]
pub fn program(text: &str) -> Program {
    parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// `C[i, j] += A[i, k] · B[k, j]`
pub fn matmul(dtype: &str, m: i64, n: i64, k: i64) -> Program {
    program(&format!(
        "program \"matmul:m={m},n={n},k={k}\"
        buffer A: {dtype}[{m}, {k}] global input
        buffer B: {dtype}[{k}, {n}] global const
        buffer C: {dtype}[{m}, {n}] global output
        loops i, j, k
        run {{ for i in {m} {{ for j in {n} {{ for k in {k} {{ C[i, j] += A[i, k] * B[k, j] first k == 0 }} }} }} }}"
    ))
}

/// Matrix product with the right operand transposed.
pub fn matmul_transposed(m: i64, n: i64, k: i64) -> Program {
    program(&format!(
        "program \"matmul:m={m},n={n},k={k},tb=1\"
        buffer A: f32[{m}, {k}] global input
        buffer B: f32[{n}, {k}] global const
        buffer C: f32[{m}, {n}] global output
        loops i, j, k
        run {{ for i in {m} {{ for j in {n} {{ for k in {k} {{ C[i, j] += A[i, k] * B[j, k] first k == 0 }} }} }} }}"
    ))
}

/// Sizes of a convolution.
#[derive(Clone, Copy)]
pub struct Conv {
    pub c: i64,
    pub h: i64,
    pub w: i64,
    pub k: i64,
    pub r: i64,
    pub stride: i64,
    pub pad: i64,
}

/// Convolution with padding as a separate stage, bias and relu.
pub fn conv2d(Conv { c, h, w, k, r, stride, pad }: Conv) -> Program {
    let (hp, wp) = (h + 2 * pad, w + 2 * pad);
    let (p, q) = ((hp - r) / stride + 1, (wp - r) / stride + 1);
    program(&format!(
        "program \"conv2d\"
        buffer X: f32[1, {c}, {h}, {w}] global input
        buffer W: f32[{k}, {c}, {r}, {r}] global const
        buffer bias: f32[{k}] global input
        buffer Y: f32[1, {k}, {p}, {q}] global output
        buffer X.pad: f32[1, {c}, {hp}, {wp}] global temporary
        buffer acc: f32[1, {k}, {p}, {q}] global temporary
        loops n, c, h, w, k, p, q, r, s
        run {{
            alloc X.pad
            for n in 1 {{ for c in {c} {{ for h in {hp} {{ for w in {wp} {{
                X.pad[n, c, h, w] = select({pad_1} < h && h < {h_end} && {pad_1} < w && w < {w_end},
                                           X[n, c, h - {pad}, w - {pad}], 0.0)
            }} }} }} }}
            alloc acc
            for n in 1 {{ for k in {k} {{ for p in {p} {{ for q in {q} {{ for c in {c} {{ for r in {r} {{ for s in {r} {{
                acc[n, k, p, q] += X.pad[n, c, {stride}*p + r, {stride}*q + s] * W[k, c, r, s]
                    first c == 0 && r == 0 && s == 0
            }} }} }} }} }} }} }}
            for n in 1 {{ for k in {k} {{ for p in {p} {{ for q in {q} {{
                Y[n, k, p, q] = max(acc[n, k, p, q] + bias[k], 0.0)
            }} }} }} }}
        }}",
        pad_1 = pad - 1,
        h_end = pad + h,
        w_end = pad + w,
    ))
}

/// Softmax of the rows of a matrix: max and sum reductions, `exp`, several stages.
pub fn softmax(m: i64, n: i64) -> Program {
    program(&format!(
        "program \"softmax\"
        buffer X: f32[{m}, {n}] global input
        buffer Y: f32[{m}, {n}] global output
        buffer most: f32[{m}] global temporary
        buffer e: f32[{m}, {n}] global temporary
        buffer total: f32[{m}] global temporary
        loops i, j
        run {{
            alloc most
            for i in {m} {{ for j in {n} {{ most[i] max= X[i, j] first j == 0 }} }}
            alloc e
            for i in {m} {{ for j in {n} {{ e[i, j] = exp(X[i, j] - most[i]) }} }}
            alloc total
            for i in {m} {{ for j in {n} {{ total[i] += e[i, j] first j == 0 }} }}
            for i in {m} {{ for j in {n} {{ Y[i, j] = e[i, j] / total[i] }} }}
        }}"
    ))
}

/// Random arguments, outputs included.
pub fn arguments(program: &Program, seed: u64) -> Vec<Vec<f64>> {
    let fill = |(i, (_, b)): (usize, (BufferId, &Buffer))| match b.role {
        Role::Output => vec![0.0; b.n_elements().unwrap() as usize],
        _ => random_input(seed + i as u64, b.n_elements().unwrap() as usize).collect(),
    };
    program.arguments().enumerate().map(fill).collect()
}

/// Selects the arguments that are inputs (or outputs).
pub fn only(program: &Program, arguments: &[Vec<f64>], outputs: bool) -> Vec<Vec<f64>> {
    let with_role = program.arguments().zip(arguments).filter(|((_, b), _)| (b.role == Role::Output) == outputs);
    with_role.map(|(_, a)| a.clone()).collect()
}

/// Program of arbitrary statements, which prints and parses but is seldom valid.
pub fn nonsense(random: &mut Random) -> Program {
    let name = |random: &mut Random, i: usize| {
        let words =
            ["i", "true", "never", "min", "max", "for", "first", "run", "not", "A.b", "_x1", "select", "inf", "in"];
        format!("{}{}", random.pick(&words), if random.chance(30) { format!(".{i}") } else { "_".repeat(i) })
    };
    let mut program = Program {
        name: random.pick(&["matmul:m=8", "", "a \"quoted\" \\ name", "line\nbreak\t\u{7f}", "größer"]).to_owned(),
        loops: (0..1 + random.below(6)).map(|i| name(random, i)).collect(),
        ..Program::default()
    };
    program.loops.sort();
    program.loops.dedup();
    for i in 0..1 + random.below(5) {
        let shape = (0..random.below(4)).map(|_| random.in_range(-2, 100)).collect();
        program.buffers.push(Buffer {
            name: name(random, i),
            dtype: random.pick(&DType::ALL).0,
            shape,
            scope: random.pick(&Scope::ALL).0,
            role: random.pick(&Role::ALL).0,
        });
    }
    program.buffers.sort_by(|a, b| a.name.cmp(&b.name));
    program.buffers.dedup_by(|a, b| a.name == b.name);
    let depth = if random.chance(30) { 2 } else { 0 };
    let mut make = Nonsense { n_loops: program.loops.len(), n_buffers: program.buffers.len(), random };
    program.prepare = make.block(depth);
    program.body = make.block(4);
    program.finish = make.block(depth);
    program
}

pub struct Nonsense<'a> {
    pub n_loops: usize,
    pub n_buffers: usize,
    pub random: &'a mut Random,
}

impl Nonsense<'_> {
    fn block(&mut self, depth: usize) -> Vec<Stmt> {
        let n = if depth == 0 { 0 } else { self.random.below(4) };
        (0..n).map(|_| self.stmt(depth - 1)).collect()
    }

    fn var(&mut self) -> LoopId {
        LoopId(self.random.below(self.n_loops) as u32)
    }

    fn buffer(&mut self) -> BufferId {
        BufferId(self.random.below(self.n_buffers) as u32)
    }

    fn stmt(&mut self, depth: usize) -> Stmt {
        match self.random.below(8) {
            0 | 1 => Stmt::For(Loop {
                var: self.var(),
                extent: self.index(2),
                kind: self.random.pick(&LoopKind::ALL).0,
                body: self.block(depth),
            }),
            2 => Stmt::If { cond: self.cond(3), then: self.block(depth), otherwise: self.block(depth) },
            3 => Stmt::Alloc(self.buffer()),
            4 => Stmt::Store { buffer: self.buffer(), index: self.subscripts(), value: self.expr(4) },
            5 => Stmt::Update {
                buffer: self.buffer(),
                index: self.subscripts(),
                op: self.random.pick(&ReduceOp::ALL).0,
                value: self.expr(4),
                first: if self.random.chance(30) { Cond::Not(Box::new(Cond::True)) } else { self.cond(2) },
            },
            6 => Stmt::Barrier,
            _ => Stmt::Prefetch { buffer: self.buffer(), index: self.subscripts(), for_write: self.random.chance(50) },
        }
    }

    fn subscripts(&mut self) -> Vec<Index> {
        (0..self.random.below(4)).map(|_| self.index(3)).collect()
    }

    fn number(&mut self) -> i64 {
        match self.random.below(12) {
            0 => i64::MIN,
            1 => i64::MAX,
            2 => 0,
            3 => -1,
            _ => self.random.in_range(-100, 100),
        }
    }

    /// Random index from the constructors, without overflow.
    pub fn index(&mut self, depth: usize) -> Index {
        let mut sum = Index::from(self.number());
        for _ in 0..self.random.below(3) {
            let divisor = match self.random.below(11) {
                0 => 0,
                1 => self.random.in_range(-5, -1),
                2 => i64::MIN,
                3 => i64::MAX,
                _ => self.random.in_range(1, 9),
            };
            let part = match if depth == 0 { 0 } else { self.random.below(6) } {
                0 | 1 => Index::from(self.var()),
                2 => self.index(depth - 1).floor_div(divisor),
                3 => self.index(depth - 1).modulo(divisor),
                4 => self.index(depth - 1).smaller(&self.index(depth - 1)),
                _ => self.index(depth - 1).larger(&self.index(depth - 1)),
            };
            let factor = if part.constant() == 0 && part.terms().iter().all(|(_, c)| *c == 1) {
                self.number()
            } else {
                self.random.in_range(-1, 1)
            };
            let fits = |c: i64| c.checked_mul(factor).is_some_and(|c| c.checked_abs().is_some_and(|c| c < 1 << 60));
            let same = |atom: &Atom| sum.terms().iter().any(|(a, _)| a == atom);
            let small = sum.constant().unsigned_abs() < 1 << 60 || part.constant() == 0;
            if small
                && fits(part.constant())
                && part.terms().iter().all(|(a, c)| !same(a) && c.checked_mul(factor).is_some())
            {
                sum = sum.add(&part.scale(factor));
            }
        }
        sum
    }

    fn expr(&mut self, depth: usize) -> Expr {
        let constants = [0.0, 1.0, -1.5, 1e300, 1e-300, 0.1, f64::INFINITY, f64::NEG_INFINITY, f64::MIN_POSITIVE, 3e16];
        match if depth == 0 { self.random.below(3) } else { self.random.below(10) } {
            0 => Expr::Const(self.random.pick(&constants)),
            1 => Expr::Load(self.buffer(), self.subscripts()),
            2 => Expr::FromIndex(self.index(2)),
            3 => Expr::unary(self.random.pick(&UnaryOp::ALL).0, self.expr(depth - 1)),
            4 => {
                let (a, b) = (self.expr(depth - 1), self.expr(depth - 1));
                Expr::Select(Box::new(self.cond(depth - 1)), Box::new(a), Box::new(b))
            }
            5 => {
                let mut subscripts: Vec<Subscript> = self.subscripts().into_iter().map(Subscript::Index).collect();
                let at = self.random.below(subscripts.len().max(1));
                if let Some(subscript) = subscripts.get_mut(at) {
                    *subscript = Subscript::Value(Box::new(self.expr(depth - 1)));
                    return Expr::Gather(self.buffer(), subscripts);
                }
                self.expr(depth - 1)
            }
            6 => Expr::cast(self.random.pick(&DType::ALL).0, self.expr(depth - 1)),
            _ => Expr::binary(self.random.pick(&BinaryOp::ALL).0, self.expr(depth - 1), self.expr(depth - 1)),
        }
    }

    fn cond(&mut self, depth: usize) -> Cond {
        match if depth == 0 { self.random.below(3) } else { self.random.below(7) } {
            0 => Cond::True,
            1 => Cond::Lt(self.index(2), self.index(1)),
            2 => Cond::Eq(self.index(1), self.index(2)),
            3 => Cond::Less(Box::new(self.expr(depth - 1)), Box::new(self.expr(depth - 1))),
            4 => Cond::Not(Box::new(self.cond(depth - 1))),
            _ => Cond::And(Box::new(self.cond(depth - 1)), Box::new(self.cond(depth - 1))),
        }
    }
}
