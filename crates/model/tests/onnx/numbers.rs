//! NaN, infinities and the limits of the type in elementwise and row operators, which must agree between
//! kernels, constant folding and the reference; and the accuracy of functions.

use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Graph, Tensor, evaluate, specialise};
use tilewright_ir::Target;
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::blocks::{graph_at, graph_of};
use crate::common::Case;
use crate::common::build::{Attr, single};
use crate::{check, compiled_for, device, with_known};

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

/// Elementwise operator: its statement, its tolerance in units in the last place or, if larger, absolute, and
/// its definition.
struct Function(&'static str, f64, f64, fn(f64) -> f64);

/// Elementwise operators with their tolerances, which hold for kernels, constant folding and the reference.
const FUNCTIONS: &[Function] = &[
    Function("Abs", 0.0, 0.0, f64::abs),
    Function("Neg", 0.0, 0.0, |x| -x),
    Function("Relu", 0.0, 0.0, |x| if x < 0.0 { 0.0 } else { x }),
    Function("LeakyRelu[alpha=0.25]", 1.0, 0.0, |x| if x < 0.0 { 0.25 * x } else { x }),
    Function("Elu[alpha=1.0]", 4.0, 0.0, |x| if x < 0.0 { x.exp_m1() } else { x }),
    Function("Celu[alpha=2.0]", 4.0, 0.0, |x| if x < 0.0 { 2.0 * (x / 2.0).exp_m1() } else { x }),
    Function("Selu[alpha=1.5,gamma=1.25]", 4.0, 0.0, |x| 1.25 * if x < 0.0 { 1.5 * x.exp_m1() } else { x }),
    Function("HardSigmoid[alpha=0.25,beta=0.5]", 1.0, 0.0, |x| {
        if x.is_nan() { x } else { (0.25 * x + 0.5).clamp(0.0, 1.0) }
    }),
    // A product with the gate is NaN if the gate is zero and the value infinite.
    Function("HardSwish", 4.0, 1e-6, |x| if x == -INF { NAN } else { x * (x / 6.0 + 0.5).clamp(0.0, 1.0) }),
    Function("ThresholdedRelu[alpha=1.0]", 0.0, 0.0, |x| if x > 1.0 { x } else { 0.0 }),
    Function("Shrink[bias=0.0,lambd=0.5]", 0.0, 0.0, |x| if x.abs() > 0.5 { x } else { 0.0 }),
    Function("Sign", 0.0, 0.0, |x| if x == 0.0 || x.is_nan() { x } else { x.signum() }),
    Function("Floor", 0.0, 0.0, f64::floor),
    Function("Ceil", 0.0, 0.0, f64::ceil),
    Function("Round", 0.0, 0.0, f64::round_ties_even),
    Function("Sqrt", 0.5, 0.0, f64::sqrt),
    Function("Reciprocal", 0.5, 0.0, |x| 1.0 / x),
    Function("Exp", 2.5, 0.0, f64::exp),
    Function("Log", 2.5, 0.0, f64::ln),
    Function("Tanh", 2.5, 0.0, f64::tanh),
    Function("Erf", 2.5, 0.0, libm::erf),
    Function("Sin", 2.5, 0.0, f64::sin),
    Function("Cos", 2.5, 0.0, f64::cos),
    Function("Tan", 4.0, 0.0, f64::tan),
    Function("Asin", 1.0, 0.0, f64::asin),
    Function("Acos", 1.0, 0.0, f64::acos),
    Function("Atan", 1.0, 0.0, f64::atan),
    Function("Sinh", 4.0, 0.0, f64::sinh),
    Function("Cosh", 4.0, 0.0, f64::cosh),
    Function("Asinh", 1.0, 0.0, f64::asinh),
    Function("Acosh", 1.0, 0.0, f64::acosh),
    Function("Atanh", 1.0, 0.0, f64::atanh),
    Function("Softsign", 4.0, 0.0, |x| if x.is_infinite() { NAN } else { x / (1.0 + x.abs()) }),
    Function("Softplus", 4.0, 0.0, |x| if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() }),
    // Subnormal values may be 0.
    Function("Sigmoid", 4.0, 1.2e-38, |x| 1.0 / (1.0 + (-x).exp())),
    // A subnormal power has few digits.
    Function("Mish", 4.0, 3e-37, |x| if x == -INF { NAN } else { x * x.exp().ln_1p().min(1e3).tanh() }),
    // Below −1 the sum cancels: an error of the error function, times x.
    Function("Gelu", 4.0, 6e-7, |x| if x == -INF { NAN } else { x * 0.5 * libm::erfc(-x / 2f64.sqrt()) }),
];

/// Numbers of all magnitudes and signs, denser around 1, the limits of the type, and NaN.
fn arguments() -> Vec<f64> {
    let tiny = f64::from(f32::from_bits(1));
    let mut all =
        vec![0.0, NAN, INF, tiny, f32::MIN_POSITIVE.into(), f32::MAX.into(), 0.5, 1.0, 1.5, 2.5, 8388607.5, 1e10];
    all.extend((-1490..1280).map(|at| (f64::from(at) * 0.1).exp2() * 1.000_1));
    all.extend((0..1500).map(|at| f64::from(at) * 0.0713));
    all.extend((-100..100).map(|at| 1.0 + f64::from(at) * 1e-4));
    all.into_iter().flat_map(|x| [x, -x]).map(|x| f64::from(x as f32)).collect()
}

/// Distance in units in the last place of the expected value in f32.
fn ulps(got: f64, expected: f64) -> f64 {
    let rounded = f64::from(expected as f32);
    if got == rounded || got.is_nan() && expected.is_nan() {
        return 0.0;
    }
    let exponent = expected.abs().log2().floor().clamp(-126.0, 127.0);
    let error = (got - expected).abs() / f64::exp2(exponent - 23.0);
    if error.is_nan() { INF } else { error }
}

/// Outputs of a graph for an input `x`: by kernels, by folding `x` as a constant, and by the reference.
fn all_ways(graph: &Graph, x: &Tensor) -> [(&'static str, Vec<Tensor>); 3] {
    let special = specialise(graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    let known = specialise(&with_known(graph, "x", x), &Bindings::default());
    let run = |graph: &Graph| run(graph, x, &host::target());
    let reference = evaluate(graph, &[("x", x.clone())]).unwrap();
    [("run", run(&special.graph)), ("folded", run(&known.graph)), ("reference", reference)]
}

/// Outputs of a graph by kernels for a target, for an input `x` if the graph takes one.
fn run(graph: &Graph, x: &Tensor, target: &Target) -> Vec<Tensor> {
    let compiled = compiled_for(graph, target).unwrap_or_else(|error| panic!("{error}"));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap_or_else(|e| panic!("{e}"));
    if !graph.inputs.is_empty() {
        runner.set("x", x).unwrap();
    }
    runner.run().unwrap();
    runner.outputs().iter().map(|(_, y)| (*y).clone()).collect()
}

fn check_functions(ways: &[(&str, Vec<Tensor>)], x: &[f64]) {
    let mut wrong = Vec::new();
    for (way, outputs) in ways {
        for (Function(name, most, least, f), output) in FUNCTIONS.iter().zip(outputs) {
            let errors = output.floats().into_iter().zip(x).filter_map(|(y, &x)| {
                let expected = f(x);
                let error = ulps(y, expected);
                let is_near = (y - expected).abs() <= *least;
                (error > *most && !is_near).then_some((error, x, y, expected))
            });
            if let Some((error, x, y, expected)) = errors.reduce(|a, b| if b.0 > a.0 { b } else { a }) {
                wrong.push(format!("{name}, {way}: {y:e} of {x:e} instead of {expected:e}, {error:.1} units"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn functions(n: usize) -> Graph {
    let outputs: Vec<String> = (0..FUNCTIONS.len()).map(|at| format!("y{at}[{n}]")).collect();
    let statements = FUNCTIONS.iter().enumerate().map(|(at, Function(name, ..))| format!("y{at} = {name}(x)"));
    graph_at(22, &format!("x[{n}]"), &outputs.join(", "), &statements.collect::<Vec<_>>().join("\n"))
}

#[test]
fn functions_mean_what_they_say_up_to_the_ends_of_the_type() {
    let x = arguments();
    let tensor = Tensor::from_floats(DType::F32, vec![x.len()], &x);
    check_functions(&all_ways(&functions(x.len()), &tensor), &x);
}

/// Row operator: its statement, with `AXIS` for the dimension of the rows, and its definition for one row,
/// which yields one number, or one per element.
struct OfRows(&'static str, fn(&[f64]) -> Vec<f64>);

fn largest(row: &[f64]) -> f64 {
    let is_nan = row.iter().any(|x| x.is_nan());
    if is_nan { NAN } else { row.iter().copied().fold(-INF, f64::max) }
}

fn smallest(row: &[f64]) -> f64 {
    -largest(&row.iter().map(|x| -x).collect::<Vec<_>>())
}

fn log_of_sum(row: &[f64]) -> f64 {
    let shift = largest(row).clamp(f64::MIN, f64::MAX);
    shift + row.iter().map(|x| (x - shift).exp()).sum::<f64>().ln()
}

/// Position of the first NaN or, if there is none, of the first number equal to the extreme; with `last`, of
/// the last one.
fn place(row: &[f64], extreme: f64, last: bool) -> f64 {
    let is_it = |x: &f64| if extreme.is_nan() { x.is_nan() } else { *x == extreme };
    let found = if last { row.iter().rposition(is_it) } else { row.iter().position(is_it) };
    found.expect("an extreme is somewhere") as f64
}

const OF_ROWS: &[OfRows] = &[
    OfRows("ReduceMax[axes=AXIS]", |row| vec![largest(row)]),
    OfRows("ReduceMin[axes=AXIS]", |row| vec![smallest(row)]),
    OfRows("ReduceMean[axes=AXIS]", |row| vec![row.iter().sum::<f64>() / row.len() as f64]),
    OfRows("ReduceLogSumExp[axes=AXIS]", |row| vec![log_of_sum(row)]),
    OfRows("ReduceLogSum[axes=AXIS]", |row| vec![row.iter().sum::<f64>().ln()]),
    OfRows("ReduceL1[axes=AXIS]", |row| vec![row.iter().map(|x| x.abs()).sum()]),
    OfRows("ReduceProd[axes=AXIS]", |row| vec![row.iter().product()]),
    OfRows("Softmax[axis=AXIS]", |row| {
        let powers: Vec<f64> = row.iter().map(|x| (x - largest(row)).exp()).collect();
        powers.iter().map(|x| x / powers.iter().sum::<f64>()).collect()
    }),
    OfRows("LogSoftmax[axis=AXIS]", |row| {
        let sum = row.iter().map(|x| (x - largest(row)).exp()).sum::<f64>();
        row.iter().map(|x| x - largest(row) - sum.ln()).collect()
    }),
    OfRows("ArgMax[axis=AXIS]", |row| vec![place(row, largest(row), false)]),
    OfRows("ArgMin[axis=AXIS]", |row| vec![place(row, smallest(row), false)]),
    OfRows("ArgMax[axis=AXIS,select_last_index=1]", |row| vec![place(row, largest(row), true)]),
];

/// Operators on images of a single row.
const OF_IMAGES: &[OfRows] = &[
    OfRows("MaxPool[kernel_shape=1 9]", |row| vec![largest(row)]),
    OfRows("GlobalMaxPool", |row| vec![largest(row)]),
    OfRows("GlobalAveragePool", |row| vec![row.iter().sum::<f64>() / row.len() as f64]),
];

const N_ROWS: usize = 24;
const N_EACH: usize = 9;

/// Rows of numbers, some with NaN, infinities of one or both signs, or only these.
fn rows() -> Vec<Vec<f64>> {
    let plain = |row: usize| (0..N_EACH).map(move |at| ((row * 7 + at * 5) % 11) as f64 * 0.75 - 3.0);
    let mut rows: Vec<Vec<f64>> = (0..N_ROWS).map(|row| plain(row).collect()).collect();
    for (at, special) in [NAN, INF, -INF].into_iter().enumerate() {
        rows[at][0] = special;
        rows[3 + at][4] = special;
        rows[6 + at][8] = special;
        rows[9 + at].fill(special);
    }
    (rows[12][1], rows[12][2]) = (INF, -INF);
    (rows[13][1], rows[13][7]) = (NAN, INF);
    (rows[14][1], rows[14][7]) = (-INF, NAN);
    (rows[15][3], rows[15][6]) = (NAN, NAN);
    (rows[16][0], rows[16][8]) = (INF, INF);
    rows
}

fn near(got: f64, expected: f64) -> bool {
    got == expected || got.is_nan() && expected.is_nan() || (got - expected).abs() <= 2e-6 * expected.abs().max(1.0)
}

/// Checks a graph's outputs for rows, which are along the last dimension of the input, or the first.
fn check_rows(ways: &[(&str, Vec<Tensor>)], operators: &[&OfRows], along_first: bool) {
    let mut wrong = Vec::new();
    for (way, outputs) in ways {
        for (OfRows(name, f), output) in operators.iter().zip(outputs) {
            let numbers: Vec<f64> = match output.dtype() {
                DType::I64 => output.i64s().iter().map(|x| *x as f64).collect(),
                _ => output.floats(),
            };
            for (at, row) in rows().iter().enumerate() {
                let (expected, n) = (f(row), numbers.len() / N_ROWS);
                let got: Vec<f64> =
                    (0..n).map(|k| numbers[if along_first { k * N_ROWS + at } else { at * n + k }]).collect();
                if !got.iter().zip(&expected).all(|(got, expected)| near(*got, *expected)) {
                    wrong.push(format!("{name}, {way}: {got:?} of {row:?} instead of {expected:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Makes a graph of row operators on its input `x`; returns it with the input and the operators.
fn graph_of_rows(along_first: bool) -> (Graph, Tensor, Vec<&'static OfRows>) {
    let operators: Vec<&OfRows> =
        if along_first { OF_ROWS.iter().collect() } else { OF_ROWS.iter().chain(OF_IMAGES).collect() };
    let (axis, shape, each) = match along_first {
        true => ("0", vec![N_EACH, N_ROWS], format!("[1 {N_ROWS}]")),
        false => ("3", vec![N_ROWS, 1, 1, N_EACH], format!("[{N_ROWS} 1 1 1]")),
    };
    let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
    let sizes = format!("[{}]", sizes.join(" "));
    let name = |at: usize| format!("{}{at}", if operators[at].0.starts_with("Arg") { "ids" } else { "y" });
    let outputs: Vec<String> = (0..operators.len())
        .map(|at| format!("{}{}", name(at), if operators[at].0.contains("Softmax") { &sizes } else { &each }))
        .collect();
    let statements: Vec<String> =
        (0..operators.len()).map(|at| format!("{} = {}(x)", name(at), operators[at].0.replace("AXIS", axis))).collect();
    let graph = graph_of(&format!("x{sizes}"), &outputs.join(", "), &statements.join("\n"));
    let rows = rows();
    let numbers: Vec<f64> = match along_first {
        true => (0..N_EACH).flat_map(|k| rows.iter().map(move |row| row[k])).collect(),
        false => rows.concat(),
    };
    (graph, Tensor::from_floats(DType::F32, shape, &numbers), operators)
}

#[test]
fn operators_of_rows_keep_nan_and_infinities() {
    for along_first in [false, true] {
        let (graph, x, operators) = graph_of_rows(along_first);
        check_rows(&all_ways(&graph, &x), &operators, along_first);
    }
}

#[test]
fn a_window_at_a_place_that_is_no_number_is_none() {
    let statements = "
        image = weights[1 2 3 3]
        w = weights[4 2 1 1]
        y = DeformConv(image, w, x)";
    let graph = graph_at(19, "x[1 2 3 3]", "y[1 4 3 3]", statements);
    // The fifth window has no column, the eighth no row; the first is outside, with zeros.
    let mut places = vec![0.0; 18];
    (places[0], places[7], places[9 + 4]) = (INF, NAN, NAN);
    let x = Tensor::from_floats(DType::F32, [1, 2, 3, 3], &places);
    for (way, outputs) in all_ways(&graph, &x) {
        for (at, y) in outputs[0].floats().into_iter().enumerate() {
            assert_eq!((y.is_nan(), y == 0.0), (matches!(at % 9, 4 | 7), at % 9 == 0), "{way}: {at}");
        }
    }
}

#[test]
fn a_device_keeps_nan_and_infinities() {
    let Some((target, _one)) = device() else { return };
    let (graph, x, operators) = graph_of_rows(false);
    let special = specialise(&graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    check_rows(&[("device", run(&special.graph, &x, &target))], &operators, false);
    // The accuracy of a device's functions depends on its driver.
    let x: Vec<f64> = arguments().into_iter().filter(|x| x.abs() == 0.5 || x.is_nan()).collect();
    let tensor = Tensor::from_floats(DType::F32, vec![x.len()], &x);
    let special = specialise(&functions(x.len()), &Bindings::default());
    for (Function(name, _, _, f), y) in FUNCTIONS.iter().zip(run(&special.graph, &tensor, &target)) {
        let is_near = |(y, x): (f64, &f64)| near(y, f(*x));
        assert!(y.floats().into_iter().zip(&x).all(is_near), "{name} of {x:?}: {:?}", y.floats());
    }
}

/// A softmax subtracts the largest of rounded products: if a device fused the product and the difference,
/// powers of large numbers would be infinite and their quotients NaN.
#[test]
fn softmax_of_large_scaled_numbers_is_finite_on_a_device() {
    let Some((target, _one)) = device() else { return };
    let graph = graph_of("x[4 64]", "y[4 64]", "scale = number[0.1]\ns = Mul(x, scale)\ny = Softmax[axis=-1](s)");
    let x: Vec<f64> = (0..256).map(|at| f64::from((at * 37 % 101) as f32 * 6.7e8)).collect();
    let x = Tensor::from_floats(DType::F32, vec![4, 64], &x);
    let special = specialise(&graph, &Bindings::default());
    for row in run(&special.graph, &x, &target)[0].floats().chunks(64) {
        let sum: f64 = row.iter().sum();
        assert!((sum - 1.0).abs() < 1e-5, "the powers of a row add up to {sum}: {row:?}");
    }
}

/// NaN passes through operators in epilogues of products and convolutions.
#[test]
fn nan_passes_behind_products_and_convolutions() {
    let functions =
        ["Relu(c)", "LeakyRelu[alpha=0.25](c)", "HardSigmoid[alpha=0.25](c)", "HardSwish(c)", "Clip(c, low, high)"];
    for (x, product, y) in [
        ("x[5 8]", "w = weights[8 33]\nc = MatMul(x, w)", "y[5 33]"),
        ("x[1 4 6 6]", "w = weights[16 4 3 3]\nc = Conv[pads=1 1 1 1](x, w)", "y[1 16 6 6]"),
    ] {
        for f in functions {
            let graph = graph_of(x, y, &format!("low = number[0]\nhigh = number[6]\n{product}\ny = {f}"));
            let n = if x.starts_with("x[5") { 40 } else { 144 };
            let mut numbers: Vec<f64> = (0..n).map(|at| (at % 7) as f64 - 3.0).collect();
            (numbers[3], numbers[20]) = (NAN, INF);
            let shape = if n == 40 { vec![5, 8] } else { vec![1, 4, 6, 6] };
            let x = Tensor::from_floats(DType::F32, shape, &numbers);
            let [(_, run), _, (_, reference)] = all_ways(&graph, &x);
            let (run, reference) = (run[0].floats(), reference[0].floats());
            assert!(reference.iter().any(|y| y.is_nan()), "{f}");
            for (at, (got, expected)) in run.iter().zip(&reference).enumerate() {
                assert!(near(*got, *expected), "{product}\n{f} is {got} at {at} instead of {expected}");
            }
        }
    }
}

/// Function of two numbers.
type OfTwo = fn(f64, f64) -> f64;

/// Operators of two elements `x` and `t`, as statements that compute `y`, with their definitions.
const OF_TWO: &[(&str, OfTwo)] = &[
    ("y = Add(x, t)", |a, b| a + b),
    ("y = Sub(x, t)", |a, b| a - b),
    ("y = Mul(x, t)", |a, b| a * b),
    ("y = Div(x, t)", |a, b| a / b),
    ("y = Max(x, t)", |a, b| largest(&[a, b])),
    ("y = Min(x, t)", |a, b| smallest(&[a, b])),
    ("ten = number[10]\ny = Max(x, t, ten)", |a, b| largest(&[a, b, 10.0])),
    ("y = Pow(x, t)", f64::powf),
    ("y = Mod[fmod=1](x, t)", |a, b| a % b),
    ("one = number[1]\nc = Less(x, t)\ny = Where(c, one, x)", |a, b| if a < b { 1.0 } else { a }),
    ("one = number[1]\nc = LessOrEqual(x, t)\ny = Where(c, one, x)", |a, b| if a <= b { 1.0 } else { a }),
    ("one = number[1]\nc = GreaterOrEqual(x, t)\ny = Where(c, one, x)", |a, b| if a >= b { 1.0 } else { a }),
    ("one = number[1]\nc = Equal(x, t)\ny = Where(c, one, x)", |a, b| if a == b { 1.0 } else { a }),
    (
        "low = number[-1]\nhigh = number[1]\ns = Add(x, t)\nk = Clip(s, low, high)\nc = IsNaN(k)\ny = Where(c, high, k)",
        |a, b| {
            if (a + b).is_nan() { 1.0 } else { (a + b).clamp(-1.0, 1.0) }
        },
    ),
];

#[test]
fn operators_of_two_elements_keep_nan_and_infinities() {
    let x = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 1e30, -1e-30].map(|x| f64::from(x as f32));
    let tensor = Tensor::from_floats(DType::F32, vec![x.len(), 1], &x);
    let n = x.len();
    for (statements, f) in OF_TWO {
        let graph = graph_of(
            &format!("x[{n} 1]"),
            &format!("y[{n} {n}]"),
            &format!("t = Transpose[perm=1 0](x)\n{statements}"),
        );
        for (way, outputs) in all_ways(&graph, &tensor) {
            for (at, got) in outputs[0].floats().into_iter().enumerate() {
                let (a, b) = (x[at / n], x[at % n]);
                let expected = f64::from(f(a, b) as f32);
                assert!(
                    near(got, expected) || (got / expected - 1.0).abs() < 1e-5,
                    "{statements}, {way}: {got} of {a} and {b} instead of {expected}"
                );
            }
        }
    }
}

/// Checks a case of one operator by kernels and by C functions.
fn check_case(op: &str, attributes: &[(&str, Attr)], inputs: Vec<Tensor>, outputs: Vec<Tensor>) {
    let given: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    let model = single(op, 17, attributes, &given, outputs.len());
    let case = Case { name: op.to_owned(), model, sets: vec![(inputs, outputs)] };
    check(&case, &host::target()).unwrap_or_else(|why| panic!("{op}: {why}"));
}

/// A slope applies only below 0; division by a norm of NaN gives NaN.
#[test]
fn what_does_not_count_is_not_multiplied() {
    for dtype in [DType::F32, DType::F64] {
        let tensor = |x: &[f64]| Tensor::from_floats(dtype, [x.len()], x);
        let inputs = vec![tensor(&[2.5, -2.0, NAN, INF, 1.0]), tensor(&[NAN, 0.5, 1.0, NAN, -INF])];
        check_case("PRelu", &[], inputs, vec![tensor(&[2.5, -1.0, NAN, INF, 1.0])]);
        let of_rows = |x: &[f64]| Tensor::from_floats(dtype, [3, 2], x);
        let inputs = vec![of_rows(&[NAN, 1.0, 0.0, 0.0, 3.0, -4.0])];
        let wanted = of_rows(&[NAN, NAN, 0.0, 0.0, 0.6, -0.8]);
        check_case("LpNormalization", &[("axis", Attr::Int(1))], inputs, vec![wanted]);
    }
}

/// Double precision where few kernels support it: a recurrent network with the batch first, and windows.
#[test]
fn double_precision_is_computed_whatever_has_code() {
    let tensor = |shape: &[usize], x: &[f64]| Tensor::from_floats(DType::F64, shape, x);
    let x = [0.5, -1.0, 2.0, 0.25];
    let inputs = vec![tensor(&[1, 4, 1], &x), tensor(&[1, 1, 1], &[0.7]), tensor(&[1, 1, 1], &[-0.4])];
    let step = |h: &mut f64, x: &f64| {
        *h = (0.7 * x - 0.4 * *h).tanh();
        Some(*h)
    };
    let states: Vec<f64> = x.iter().scan(0.0, step).collect();
    let outputs = vec![tensor(&[1, 4, 1, 1], &states), tensor(&[1, 1, 1], &states[3..])];
    check_case("RNN", &[("hidden_size", Attr::Int(1)), ("layout", Attr::Int(1))], inputs, outputs);
    // Windows that extend past the image count only existing elements.
    let image = tensor(&[1, 1, 4], &[1.0, 2.0, 4.0, 9.0]);
    let windows = [("kernel_shape", Attr::Ints(vec![3])), ("pads", Attr::Ints(vec![1, 1]))];
    let means = tensor(&[1, 1, 4], &[1.5, 7.0 / 3.0, 5.0, 6.5]);
    check_case("AveragePool", &windows, vec![image.clone()], vec![means]);
    check_case("GlobalAveragePool", &[], vec![image], vec![tensor(&[1, 1, 1], &[4.0])]);
}

/// A truncated mean of 41 ones is not less than 1.
#[test]
fn means_that_are_cut_off_are_exact() {
    let x = Tensor::from_floats(DType::F32, [1, 1, 41], &[1.0; 41]);
    let statements = "m = ReduceMean[axes=-1](x)\ny = Floor(m)\np = GlobalAveragePool(x)\nz = Floor(p)
        q = AveragePool[kernel_shape=41](x)\nw = Floor(q)";
    let graph = graph_of("x[1 1 41]", "y[1 1 1], z[1 1 1], w[1 1 1]", statements);
    let graph = specialise(&graph, &Bindings::default()).graph;
    run(&graph, &x, &host::target()).iter().for_each(|found| assert_eq!(found.floats(), [1.0]));
}

/// The last digit of a quotient matters if it is truncated or compared: 41 times the inverse of 41 is less
/// than 1.
#[test]
fn quotients_that_are_cut_off_are_exact() {
    let numbers: Vec<f64> = (0..5000).map(f64::from).collect();
    let x = Tensor::from_floats(DType::F32, [5000], &numbers);
    for divisor in [3, 41, 83] {
        let statements = format!(
            "c = number[{divisor}]\nt = Div(x, c)\nu = Relu(t)\ny = Floor(u)\nids = Cast[to=7](t)
             rest = Sub(t, y)\nz = Sign(rest)"
        );
        let graph = graph_of("x[5000]", "y[5000], ids[5000], z[5000]", &statements);
        let graph = specialise(&graph, &Bindings::default()).graph;
        let found = run(&graph, &x, &host::target());
        let [floors, signs] = [0, 2].map(|at| found[at].floats());
        let integers = found[1].integers();
        for (at, n) in (0..5000).enumerate() {
            assert_eq!((floors[at], integers[at]), (f64::from(n / divisor), (n / divisor).into()), "{n} / {divisor}");
            assert_eq!(signs[at] == 0.0, n % divisor == 0, "{n} / {divisor}");
        }
    }
}
