//! Exact integers of all types: kernels and the interpreter compared with reference arithmetic.

mod common;

use common::{bin, input, ix, kernels, load, output, program, run_bytes, store, targets, un, vector};
use tilewright_codegen::Runtime;
use tilewright_ir::expr::{BinaryOp, Cond, Expr, UnaryOp};
use tilewright_ir::interp::{MAX_ITERATIONS, run_held};
use tilewright_ir::reference::evaluate_watched;
use tilewright_ir::{BufferId, DType, Index, LoopId, LoopKind, Program};

const N: usize = 40;

/// Random numbers of splitmix64, many of which are extremes of types.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn integer(&mut self, dtype: DType) -> i128 {
        let ends = [0, 1, -1, i128::from(i64::MIN), i128::from(i64::MAX), i128::from(i32::MIN), 127, 128, 1 << 54];
        let any = i128::from(self.next() >> self.below(60));
        cut(dtype, if self.below(3) == 0 { ends[self.below(9) as usize] } else { any })
    }
}

/// Wraps an integer to a type.
fn cut(dtype: DType, x: i128) -> i128 {
    match dtype {
        DType::I8 => (x as i8).into(),
        DType::I7 => (x as i8).clamp(-64, 64).into(),
        DType::U8 => (x as u8).into(),
        DType::I16 => (x as i16).into(),
        DType::U16 => (x as u16).into(),
        DType::I32 => (x as i32).into(),
        DType::U32 => (x as u32).into(),
        DType::I64 => (x as i64).into(),
        DType::U64 => (x as u64).into(),
        other => unreachable!("{} is no type of integers", other.name()),
    }
}

/// Type in which integers of a type are computed.
fn arithmetic(dtype: DType) -> DType {
    match dtype {
        DType::U32 | DType::I64 => DType::I64,
        DType::U64 => DType::U64,
        _ => DType::I32,
    }
}

/// Literal of an integer, as the sum of two if an f64 cannot represent it.
fn literal(x: i128) -> Expr {
    let (high, low) = (x >> 32 << 32, x & 0xffff_ffff);
    match x.abs() < 1 << 53 {
        true => Expr::Const(x as f64),
        false => bin(BinaryOp::Add, Expr::Const(high as f64), Expr::Const(low as f64)),
    }
}

const BINARY: [BinaryOp; 6] =
    [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Div, BinaryOp::Min, BinaryOp::Max];

/// Random expression of buffer elements.
fn expression(random: &mut Random, dtype: DType, leaves: &[Expr], depth: u32) -> Expr {
    let leaf = |random: &mut Random| match random.below(3) {
        0 => literal(random.integer(dtype)),
        at => leaves[at as usize - 1].clone(),
    };
    if depth == 0 {
        return leaf(random);
    }
    let side = |random: &mut Random| expression(random, dtype, leaves, depth - 1);
    match random.below(10) {
        0 => un(UnaryOp::Neg, side(random)),
        1 => un(UnaryOp::Abs, side(random)),
        2 => {
            let narrow = [DType::I8, DType::U8, DType::I16, DType::U16, DType::U32][random.below(5) as usize];
            Expr::cast(if random.below(2) == 0 { narrow } else { dtype }, side(random))
        }
        3 => {
            let cond = Cond::Less(Box::new(leaves[0].clone()), Box::new(leaf(random)));
            Expr::Select(Box::new(cond), Box::new(side(random)), Box::new(side(random)))
        }
        at => {
            let op = BINARY[if at < 7 { at as usize - 3 } else { random.below(6) as usize }];
            let a = side(random);
            bin(op, a, side(random))
        }
    }
}

/// Value of an expression in an arithmetic, for given buffer elements.
fn value(e: &Expr, of: DType, elements: [i128; 2]) -> i128 {
    let inner = |e: &Expr| value(e, of, elements);
    let exact = match e {
        Expr::Const(x) => *x as i128,
        Expr::Load(b, _) => elements[b.0 as usize],
        Expr::Unary(UnaryOp::Neg, x) => -inner(x),
        Expr::Unary(_, x) => inner(x).abs(),
        Expr::Binary(op, a, b) => {
            let (a, b) = (inner(a), inner(b));
            match op {
                BinaryOp::Add => a + b,
                BinaryOp::Sub => a - b,
                BinaryOp::Mul => a.wrapping_mul(b),
                BinaryOp::Div if b == 0 => 0,
                BinaryOp::Div => a / b,
                BinaryOp::Min => a.min(b),
                _ => a.max(b),
            }
        }
        Expr::Select(cond, a, b) => {
            let Cond::Less(x, y) = &**cond else { unreachable!("conditions compare values") };
            if inner(x) < inner(y) { inner(a) } else { inner(b) }
        }
        Expr::Cast(to, x) => cut(*to, value(x, arithmetic(*to), elements)),
        _ => unreachable!("expressions are made here"),
    };
    cut(of, exact)
}

fn bytes(dtype: DType, numbers: &[i128]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()[..dtype.bytes() as usize].to_vec()).collect()
}

fn numbers(dtype: DType, bytes: &[u8]) -> Vec<i128> {
    let of = |bytes: &[u8]| {
        let mut all = [0; 16];
        all[..bytes.len()].copy_from_slice(bytes);
        cut(dtype, i128::from_le_bytes(all))
    };
    bytes.chunks(dtype.bytes() as usize).map(of).collect()
}

/// Numbers in the interpreter's held form: 64-bit integers as bit patterns.
fn held(dtype: DType, numbers: &[i128]) -> Vec<f64> {
    let of = |x: &i128| if dtype.bytes() == 8 { f64::from_bits(*x as u64) } else { *x as f64 };
    numbers.iter().map(of).collect()
}

/// Runs a program of two inputs and an output with the interpreter and all back ends.
fn check(p: &Program, dtypes: [DType; 3], inputs: [&[i128]; 2], expected: &[i128]) {
    let given = [inputs[0], inputs[1], &vec![0; expected.len()]];
    let as_held = |at: usize| held(dtypes[at], given[at]);
    let mut interpreted = vec![as_held(0), as_held(1), as_held(2)];
    run_held(p, &mut interpreted, MAX_ITERATIONS).unwrap();
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let wanted = held(dtypes[2], expected);
    assert_eq!(bits(&interpreted[2]), bits(&wanted), "interpreted: {p}");
    let go_on = |_| std::ops::ControlFlow::Continue(());
    let trusted = evaluate_watched(p, vec![as_held(0), as_held(1)], 1, &go_on).unwrap();
    assert_eq!(bits(&trusted[0]), bits(&wanted), "trusted: {p}");
    let memory: Vec<Vec<u8>> = (0..3).map(|at| bytes(dtypes[at], given[at])).collect();
    for target in targets() {
        for kernel in kernels(p, &target) {
            let after = run_bytes(p, &kernel, &memory, &Runtime::serial(), 1);
            assert_eq!(numbers(dtypes[2], &after[2]), expected, "on {target}: {p}");
        }
    }
}

fn integers() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().map(|(dtype, _)| dtype).filter(|dtype| !dtype.is_float() && *dtype != DType::Bool)
}

/// Program that computes a value for each pair of elements of two inputs.
fn elementwise(dtypes: [DType; 3], value: impl FnOnce([Expr; 2]) -> Expr, lanes: i64) -> Program {
    let mut p = program("integers");
    let [x, y] = [("x", dtypes[0]), ("y", dtypes[1])].map(|(name, dtype)| input(&mut p, name, dtype, &[N as i64]));
    let z = output(&mut p, "z", dtypes[2], &[N as i64]);
    p.loops = ["o", "l"].map(str::to_owned).to_vec();
    let (o, l) = (LoopId(0), LoopId(1));
    let at = [Index::from(o).scale(lanes).add(&Index::from(l))];
    let value = value([x, y].map(|b: BufferId| load(b, &at)));
    let inner = vector(l, lanes, vec![store(z, &at, value)]);
    p.body = vec![common::for_kind(LoopKind::Serial, o, N as i64 / lanes, vec![inner])];
    p
}

#[test]
fn expressions_are_exact_and_wrap_around() {
    let mut random = Random(1);
    for dtype in integers() {
        for round in 0..4 {
            let mut list = || (0..N).map(|_| random.integer(dtype)).collect::<Vec<_>>();
            let (x, y) = (list(), list());
            let mut e = Expr::Const(0.0);
            let p = elementwise(
                [dtype; 3],
                |leaves| {
                    e = expression(&mut random, dtype, &leaves, 3);
                    e.clone()
                },
                if round % 2 == 0 { 8 } else { 1 },
            );
            let of = |(x, y): (&i128, &i128)| cut(dtype, value(&e, arithmetic(dtype), [*x, *y]));
            let expected: Vec<i128> = x.iter().zip(&y).map(of).collect();
            check(&p, [dtype; 3], [&x, &y], &expected);
        }
    }
}

#[test]
fn quotients_do_not_trap() {
    for dtype in integers() {
        let ends = [0, 1, -1, 7, -7, i128::from(i32::MIN), i128::from(i64::MIN), i128::from(i64::MAX)];
        let x: Vec<i128> = (0..N).map(|at| cut(dtype, ends[at % 8])).collect();
        let y: Vec<i128> = (0..N).map(|at| cut(dtype, ends[at / 8])).collect();
        let quotient = |a: i128, b: i128| cut(dtype, if b == 0 { 0 } else { a / b });
        let both: Vec<i128> = x.iter().zip(&y).map(|(a, b)| quotient(*a, *b)).collect();
        for lanes in [1, 8] {
            let divide = |a: Expr, b: Expr| bin(BinaryOp::Div, a, b);
            check(&elementwise([dtype; 3], |[x, y]| divide(x, y), lanes), [dtype; 3], [&x, &y], &both);
            for by in [0, -1, 1000] {
                let expected: Vec<i128> = x.iter().map(|a| quotient(*a, cut(arithmetic(dtype), by))).collect();
                let p = elementwise([dtype; 3], |[x, _]| divide(x, literal(by)), lanes);
                check(&p, [dtype; 3], [&x, &y], &expected);
            }
        }
    }
}

#[test]
fn conversions_between_integers_keep_the_low_bits() {
    let mut random = Random(2);
    for from in integers() {
        let x: Vec<i128> = (0..N).map(|_| random.integer(from)).collect();
        for to in integers() {
            let p = elementwise([from, from, to], |[x, _]| x, 8);
            let expected: Vec<i128> = x.iter().map(|x| cut(to, *x)).collect();
            check(&p, [from, from, to], [&x, &x], &expected);
        }
    }
}

/// Checks that integers are converted to the nearest floating-point number, rounding once, and that numbers
/// are truncated to integers.
#[test]
fn conversions_to_and_from_numbers_round_once() {
    let mut random = Random(3);
    for from in integers() {
        let x: Vec<i128> = (0..N).map(|_| random.integer(from)).collect();
        let p = elementwise([from, from, DType::F32], |[x, _]| x, 8);
        let q = elementwise([from, from, DType::F64], |[x, _]| x, 8);
        let memory = [bytes(from, &x), bytes(from, &x), vec![0; 4 * N]];
        let long = [bytes(from, &x), bytes(from, &x), vec![0; 8 * N]];
        for target in targets() {
            for kernel in kernels(&p, &target) {
                let after = run_bytes(&p, &kernel, &memory, &Runtime::serial(), 1);
                let expected: Vec<u8> = x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
                assert_eq!(after[2], expected, "{} on {target}", from.name());
            }
            for kernel in kernels(&q, &target) {
                let after = run_bytes(&q, &kernel, &long, &Runtime::serial(), 1);
                let expected: Vec<u8> = x.iter().flat_map(|x| (*x as f64).to_le_bytes()).collect();
                assert_eq!(after[2], expected, "{} on {target}", from.name());
            }
        }
    }
    let numbers = [0.0, -0.5, 1.9, 3e9, 1e19, 1.8e19, 3e19, -3e19, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0];
    let given: Vec<f32> = (0..N).map(|at| numbers[at % numbers.len()]).collect();
    for to in [DType::I32, DType::I64, DType::U64] {
        let p = elementwise([DType::F32, DType::F32, to], |[x, _]| x, 8);
        let x: Vec<u8> = given.iter().flat_map(|x| x.to_le_bytes()).collect();
        let memory = [x.clone(), x, vec![0; to.bytes() as usize * N]];
        let expected = given.iter().map(|x| match to {
            DType::I32 => i128::from(*x as i32),
            DType::I64 => i128::from(*x as i64),
            _ => i128::from(*x as u64),
        });
        let expected: Vec<i128> = expected.collect();
        for target in targets() {
            for kernel in kernels(&p, &target) {
                let after = run_bytes(&p, &kernel, &memory, &Runtime::serial(), 1);
                assert_eq!(self::numbers(to, &after[2]), expected, "{} on {target}", to.name());
            }
        }
    }
}

#[test]
fn reductions_wrap_around_and_start_from_the_ends() {
    use tilewright_ir::expr::ReduceOp;
    let mut random = Random(4);
    for dtype in integers() {
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min] {
            let (m, k) = (8, 5);
            let mut p = program("reduction");
            let x = input(&mut p, "x", dtype, &[k, m]);
            input(&mut p, "y", dtype, &[1]);
            let z = output(&mut p, "z", dtype, &[m]);
            p.loops = ["s", "l"].map(str::to_owned).to_vec();
            let (s, l) = (LoopId(0), LoopId(1));
            let first = Cond::Eq(ix(s), ix(0));
            let step = common::update(z, &[ix(l)], op, load(x, &[ix(s), ix(l)]), first);
            p.body = vec![common::for_(s, k, vec![vector(l, m, vec![step])])];
            let x: Vec<i128> = (0..m * k).map(|_| random.integer(dtype)).collect();
            let column = |l: i64| (0..k).map(|s| x[(s * m + l) as usize]).collect::<Vec<_>>();
            let of = |values: Vec<i128>| match op {
                ReduceOp::Sum => values.iter().fold(0, |all: i128, x| cut(dtype, all + x)),
                ReduceOp::Product => values.iter().fold(1, |all: i128, x| cut(dtype, all.wrapping_mul(*x))),
                ReduceOp::Max => *values.iter().max().unwrap(),
                ReduceOp::Min => *values.iter().min().unwrap(),
            };
            let expected: Vec<i128> = (0..m).map(|l| of(column(l))).collect();
            check(&p, [dtype; 3], [&x, &[0]], &expected);
        }
    }
}
