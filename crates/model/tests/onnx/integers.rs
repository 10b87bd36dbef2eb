//! Graphs of integers: kernels, the evaluator and constant folding agree bit for bit with arithmetic written
//! here.

use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::{Bindings, DType, Dim, Graph, Tensor, evaluate, specialise};
use tilewright_ir::Target;
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::common::Case;
use crate::common::build::{Attr, single};
use crate::{check, compiled_for, device, read_back};

const SIDE: usize = 6;

/// Generator of random integers.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Draws an integer of any size, mostly of 58 bits and more.
    fn integer(&mut self, dtype: DType) -> i128 {
        let size = if self.below(4) == 0 { self.below(60) } else { self.below(6) };
        let magnitude = i128::from(self.next() >> size);
        let ends = [0, 1, -1, i128::from(i64::MIN), i128::from(i64::MAX)];
        cut(dtype, if self.below(8) == 0 { ends[self.below(5) as usize] } else { magnitude })
    }

    fn tensor(&mut self, dtype: DType, n: usize) -> Vec<i128> {
        (0..n).map(|_| self.integer(dtype)).collect()
    }
}

/// Truncates an integer to the low bits of a type.
fn cut(dtype: DType, x: i128) -> i128 {
    match dtype {
        DType::I8 => (x as i8).into(),
        DType::U8 => (x as u8).into(),
        DType::I16 => (x as i16).into(),
        DType::U16 => (x as u16).into(),
        DType::I32 => (x as i32).into(),
        DType::U32 => (x as u32).into(),
        DType::I64 => (x as i64).into(),
        DType::U64 => (x as u64).into(),
        other => unreachable!("{other} is no type of integers"),
    }
}

/// Model of a chain of nodes, with the expected results.
struct Chain {
    dtype: DType,
    model: ModelFile,
    input: Vec<i128>,
    last: String,
    values: Vec<i128>,
}

impl Chain {
    fn new(random: &mut Random, dtype: DType) -> Chain {
        let port = |name: &str, rows: usize| GraphPort {
            name: name.to_owned(),
            dtype,
            dims: vec![Dim::Size(rows), Dim::Size(SIDE)],
        };
        let model = ModelFile {
            name: "integers".to_owned(),
            opset: 17,
            inputs: vec![port("x", SIDE)],
            outputs: vec![port("y", SIDE + 1)],
            ..ModelFile::default()
        };
        let input = random.tensor(dtype, SIDE * SIDE);
        Chain { dtype, model, values: input.clone(), input, last: "x".to_owned() }
    }

    fn constant(&mut self, shape: &[usize], numbers: &[i128], dtype: DType) -> String {
        let name = format!("c{}", self.model.weights.len());
        self.model.weights.push((name.clone(), Tensor::from_integers(dtype, shape, numbers)));
        name
    }

    fn push(&mut self, op: &str, inputs: &[&str], output: &str) {
        self.model.nodes.push(NodeFile {
            op: op.to_owned(),
            inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
            outputs: vec![output.to_owned()],
            ..NodeFile::default()
        });
    }

    /// Adds a node, given its function of each element.
    fn step(&mut self, op: &str, more: &[&str], of: impl Fn(usize, i128) -> i128) {
        let (last, next) = (self.last.clone(), format!("v{}", self.model.nodes.len()));
        self.push(op, &[&[last.as_str()], more].concat(), &next);
        self.last = next;
        self.values = self.values.iter().enumerate().map(|(at, x)| cut(self.dtype, of(at, *x))).collect();
    }

    /// Adds a function of the last value and a constant tensor or number.
    fn with_known(&mut self, random: &mut Random, op: &str, of: impl Fn(i128, i128) -> i128) {
        let dtype = self.dtype;
        let is_number = random.below(2) == 0;
        let known = random.tensor(dtype, if is_number { 1 } else { SIDE * SIDE });
        let shape: &[usize] = if is_number { &[] } else { &[SIDE, SIDE] };
        let name = self.constant(shape, &known, dtype);
        self.step(op, &[&name], |at, x| of(x, known[at % known.len()]));
    }

    fn random_step(&mut self, random: &mut Random) {
        let dtype = self.dtype;
        let is_signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
        match random.below(10) {
            0 => self.with_known(random, "Add", |x, c| x + c),
            1 => self.with_known(random, "Sub", |x, c| x - c),
            2 => self.with_known(random, "Mul", i128::wrapping_mul),
            3 => self.with_known(random, "Div", |x, c| if c == 0 { 0 } else { x / c }),
            4 => self.with_known(random, "Max", i128::max),
            5 => self.with_known(random, "Min", i128::min),
            6 if is_signed => self.step("Neg", &[], |_, x| -x),
            7 if is_signed => self.step("Abs", &[], |_, x| x.abs()),
            8 => {
                let [low, high] = [0; 2].map(|_| random.integer(dtype));
                let [of_low, of_high] = [low, high].map(|bound| self.constant(&[], &[bound], dtype));
                self.step("Clip", &[&of_low, &of_high], |_, x| x.max(low).min(high));
            }
            9 => {
                let [limit, other] = [0; 2].map(|_| random.integer(dtype));
                let [of_limit, of_other] = [limit, other].map(|number| self.constant(&[], &[number], dtype));
                let (last, is) = (self.last.clone(), format!("is{}", self.model.nodes.len()));
                self.push("Greater", &[&last, &of_limit], &is);
                let next = format!("v{}", self.model.nodes.len());
                self.push("Where", &[&is, &last, &of_other], &next);
                self.last = next;
                self.values.iter_mut().filter(|x| **x <= limit).for_each(|x| *x = other);
            }
            _ => self.multiply(random),
        }
    }

    fn multiply(&mut self, random: &mut Random) {
        let known = random.tensor(self.dtype, SIDE * SIDE);
        let name = self.constant(&[SIDE, SIDE], &known, self.dtype);
        let of = |at: usize| {
            let product = |k: usize| self.values[at / SIDE * SIDE + k].wrapping_mul(known[k * SIDE + at % SIDE]);
            (0..SIDE).fold(0_i128, |sum, k| sum.wrapping_add(product(k)))
        };
        let sums: Vec<i128> = (0..SIDE * SIDE).map(of).collect();
        self.step("MatMul", &[&name], |at, _| sums[at]);
    }

    /// Pads the last value with a row of a constant in front.
    fn pad(&mut self, random: &mut Random) {
        let fill = random.integer(self.dtype);
        let borders = self.constant(&[4], &[1, 0, 0, 0], DType::I64);
        let filled = self.constant(&[], &[fill], self.dtype);
        let last = self.last.clone();
        self.push("Pad", &[&last, &borders, &filled], "y");
        self.values.splice(0..0, vec![fill; SIDE]);
    }

    fn graph(&self) -> Graph {
        read_back(&self.model)
    }

    fn tensor(&self) -> Tensor {
        Tensor::from_integers(self.dtype, [SIDE, SIDE], &self.input)
    }

    fn text(&self) -> String {
        let nodes = self.model.nodes.iter().map(|node| format!("{}({})", node.op, node.inputs.join(", ")));
        let known = self.model.weights.iter().map(|(name, x)| format!("{name} = {:?}", x.integers()));
        format!("{} {} {}", self.dtype, nodes.collect::<Vec<_>>().join(" "), known.collect::<Vec<_>>().join(" "))
    }

    fn run(&self, target: &Target) -> Vec<i128> {
        let special = specialise(&self.graph(), &Bindings::default());
        assert!(special.problems.is_empty(), "{}", special.problems[0]);
        let compiled = compiled_for(&special.graph, target).unwrap_or_else(|e| panic!("{e}: {}", self.text()));
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &self.tensor()).unwrap();
        runner.run().unwrap();
        runner.outputs()[0].1.integers()
    }

    fn evaluated(&self) -> Vec<i128> {
        let special = specialise(&self.graph(), &Bindings::default());
        evaluate(&special.graph, &[("x", self.tensor())]).unwrap()[0].integers()
    }

    fn folded(&self) -> Vec<i128> {
        let mut model = self.model.clone();
        model.inputs.clear();
        model.weights.push(("x".to_owned(), self.tensor()));
        let graph = read_back(&model);
        let special = specialise(&graph, &Bindings::default());
        special.graph.value(special.graph.outputs[0]).constant.as_ref().expect("all is known").integers()
    }
}

const TYPES: [DType; 8] =
    [DType::I64, DType::U64, DType::I32, DType::U32, DType::I16, DType::U16, DType::I8, DType::U8];

fn chains(seed: u64, each: usize) -> Vec<Chain> {
    let mut random = Random(SplitMix64::seed_from_u64(seed));
    let mut chains = Vec::new();
    for dtype in TYPES {
        for _ in 0..if dtype == DType::I64 { 3 * each } else { each } {
            let mut chain = Chain::new(&mut random, dtype);
            (0..4).for_each(|_| chain.random_step(&mut random));
            chain.pad(&mut random);
            chains.push(chain);
        }
    }
    chains
}

#[test]
fn integers_are_exact_run_evaluated_and_folded() {
    let target = host::target();
    for chain in chains(1, 3) {
        assert_eq!(chain.evaluated(), chain.values, "evaluated: {}", chain.text());
        assert_eq!(chain.folded(), chain.values, "folded: {}", chain.text());
        assert_eq!(chain.run(&target), chain.values, "run: {}", chain.text());
    }
}

#[test]
fn integers_are_exact_on_a_device() {
    let Some((target, _one)) = device() else { return };
    for chain in chains(2, 1) {
        assert_eq!(chain.run(&target), chain.values, "run: {}", chain.text());
    }
}

/// Makes a case of one operator with one output.
fn case_of(op: &str, opset: i64, attributes: &[(&str, Attr)], inputs: Vec<Tensor>, output: Tensor) -> Case {
    let given: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    let model = single(op, opset, attributes, &given, 1);
    Case { name: format!("{op} {:?}", inputs[0]), model, sets: vec![(inputs, vec![output])] }
}

/// Reductions and positions of extremes, along dimensions of all lengths, with the limits of each type.
#[test]
fn reductions_of_integers_are_exact() {
    const REDUCTIONS: [&str; 6] = ["ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare"];
    let mut random = Random(SplitMix64::seed_from_u64(9));
    for dtype in TYPES {
        for (n, by) in [(1, 1), (3, 2), (40, 3)] {
            let x = random.tensor(dtype, 2 * n * by);
            let along = |o: usize, i: usize| (0..n).map(|at| x[(o * n + at) * by + i]).collect::<Vec<i128>>();
            let columns = || (0..2 * by).map(|at| along(at / by, at % by));
            let tensor = |shape: [usize; 3], numbers: &[i128]| Tensor::from_integers(dtype, shape, numbers);
            let input = tensor([2, n, by], &x);
            for op in REDUCTIONS {
                let size = |x: i128| cut(dtype, x.abs());
                let reduced = |all: Vec<i128>| match op {
                    "ReduceMax" => all.into_iter().max().unwrap(),
                    "ReduceMin" => all.into_iter().min().unwrap(),
                    "ReduceSum" => cut(dtype, all.into_iter().sum()),
                    "ReduceL1" => cut(dtype, all.into_iter().map(size).sum()),
                    "ReduceProd" => all.into_iter().fold(1_i128, |a, b| cut(dtype, a.wrapping_mul(b))),
                    _ => cut(
                        dtype,
                        all.into_iter().fold(0_i128, |sum, x| cut(dtype, sum + cut(dtype, x.wrapping_mul(x)))),
                    ),
                };
                let wanted = tensor([2, 1, by], &columns().map(reduced).collect::<Vec<_>>());
                let case = case_of(op, 11, &[("axes", Attr::Ints(vec![1]))], vec![input.clone()], wanted);
                assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
            }
            let place = |all: Vec<i128>| all.iter().position(|x| x == all.iter().min().unwrap()).unwrap() as i128;
            let places: Vec<i128> = columns().map(place).collect();
            let wanted = Tensor::from_integers(DType::I64, [2, 1, by], &places);
            let case = case_of("ArgMin", 13, &[("axis", Attr::Int(1))], vec![input], wanted);
            assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
        }
    }
}

/// Images of integers keep all their bits if pixels are only moved.
#[test]
fn integers_are_moved_as_they_are() {
    let mut random = Random(SplitMix64::seed_from_u64(4));
    for dtype in TYPES {
        let x = random.tensor(dtype, 24);
        let tensor = |shape: [usize; 4], numbers: Vec<i128>| Tensor::from_integers(dtype, shape, &numbers);
        // Pixel `x` of three comes from `floor(x / 1.5)` of two, in rows of one.
        let wanted = x.chunks(2).flat_map(|row| [row[0], row[0], row[1]]).collect();
        let scales = Tensor::from_floats(DType::F32, [4], &[1.0, 1.0, 1.0, 1.5]);
        let attributes =
            [("coordinate_transformation_mode", Attr::Text("asymmetric")), ("nearest_mode", Attr::Text("floor"))];
        let inputs = [Some(tensor([1, 3, 4, 2], x.clone())), None, Some(scales)];
        let model = single("Resize", 13, &attributes, &inputs, 1);
        let sets = vec![(inputs.into_iter().flatten().collect(), vec![tensor([1, 3, 4, 3], wanted)])];
        let case = Case { name: format!("Resize {dtype}"), model, sets };
        assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
        // Channel `4c + 2i + j` is pixel `(i, j)` of a block of channel `c`.
        let input = tensor([1, 8, 1, 3], x.clone());
        let at = |place: usize| {
            let (c, row, column) = (place / 12, place / 6 % 2, place % 6);
            x[(4 * c + 2 * row + column % 2) * 3 + column / 2]
        };
        let wanted = tensor([1, 2, 2, 6], (0..24).map(at).collect());
        let attributes = [("blocksize", Attr::Int(2)), ("mode", Attr::Text("CRD"))];
        let case = case_of("DepthToSpace", 13, &attributes, vec![input], wanted);
        assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
    }
}

/// Matrix products plus another matrix, and slopes below zero.
#[test]
fn sums_and_slopes_of_integers_are_exact() {
    let mut random = Random(SplitMix64::seed_from_u64(6));
    for dtype in TYPES {
        let [a, b, c] = [12, 8, 2].map(|n| random.tensor(dtype, n));
        let tensor = |shape: &[usize], x: &[i128]| Tensor::from_integers(dtype, shape, x);
        let sum = |m: usize, n: usize| {
            let term = |k: usize| a[4 * m + k].wrapping_mul(b[4 * n + k]);
            cut(dtype, (0..4).fold(c[n], |sum, k| sum.wrapping_add(term(k))))
        };
        let wanted: Vec<i128> = (0..6).map(|at| sum(at / 2, at % 2)).collect();
        let inputs = vec![tensor(&[3, 4], &a), tensor(&[2, 4], &b), tensor(&[2], &c)];
        let case = case_of("Gemm", 13, &[("transB", Attr::Int(1))], inputs, tensor(&[3, 2], &wanted));
        assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
        let slope = random.tensor(dtype, 12);
        let leaky = |(x, slope): (&i128, &i128)| if *x < 0 { cut(dtype, x.wrapping_mul(*slope)) } else { *x };
        let wanted: Vec<i128> = a.iter().zip(&slope).map(leaky).collect();
        let inputs = vec![tensor(&[12], &a), tensor(&[12], &slope)];
        let case = case_of("PRelu", 16, &[], inputs, tensor(&[12], &wanted));
        assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
    }
}
