//! Operators with weights of 2, 4 or 8 bits, compared with sums of the unpacked weights.

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Tensor, evaluate, specialise};
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::{compiled_for, read_back};

pub(crate) type Random = rand_xoshiro::Xoshiro256PlusPlus;

/// Random model of one node, with the expected results for its only input.
pub(crate) struct Drawn {
    pub text: String,
    pub file: ModelFile,
    pub input: (&'static str, Tensor),
    pub expected: Vec<f64>,
}

pub(crate) fn port(name: &str, dtype: DType, shape: &[usize]) -> GraphPort {
    GraphPort { name: name.to_owned(), dtype, dims: shape.iter().map(|&d| Dim::Size(d)).collect() }
}

/// Packs rows of numbers, the first one in the lowest bits of a byte.
pub(crate) fn packed(rows: &[Vec<i64>], bits: u32) -> Vec<i128> {
    let each = (8 / bits) as usize;
    let byte = |numbers: &[i64]| numbers.iter().rev().fold(0, |byte, x| byte << bits | i128::from(*x));
    rows.iter().flat_map(|row| row.chunks(each).map(byte)).collect()
}

pub(crate) fn of_node(
    op: &str,
    inputs: &[&str],
    attributes: &[(&str, i64)],
    given: GraphPort,
    out: &[usize],
) -> ModelFile {
    let node = NodeFile {
        name: "packed".to_owned(),
        domain: "com.microsoft".to_owned(),
        op: op.to_owned(),
        inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
        outputs: vec!["y".to_owned()],
        attributes: attributes.iter().map(|(name, x)| ((*name).to_owned(), Attribute::Int(*x))).collect(),
    };
    ModelFile {
        name: "packed".to_owned(),
        opset: 21,
        domains: vec![("com.microsoft".to_owned(), 1)],
        inputs: vec![given],
        outputs: vec![port("y", DType::F32, out)],
        nodes: vec![node],
        ..ModelFile::default()
    }
}

pub(crate) fn singles(random: &mut Random, n: usize, most: f32) -> Vec<f64> {
    (0..n).map(|_| f64::from(random.random_range(-most..most))).collect()
}

/// Rounds a block to 8-bit integers times a scale, in f32 as in ONNX Runtime on x86-64.
fn rounded(block: &[f64]) -> Vec<f64> {
    let most = block.iter().fold(0.0f32, |most, x| most.max((*x as f32).abs()));
    let inverse = if most == 0.0 { 0.0 } else { 127.0 / most };
    block.iter().map(|x| f64::from((*x as f32 * inverse).round_ties_even()) * f64::from(most / 127.0)).collect()
}

fn product(seed: u64) -> Drawn {
    let random = &mut Random::seed_from_u64(seed);
    let bits: u32 = *[2, 4, 4, 8].choose(random).unwrap();
    let block: usize = *[16, 32, 64, 128, 256].choose(random).unwrap();
    let m: usize = *[1, 3, 16, 21].choose(random).unwrap();
    let k = if random.random_bool(0.5) { block * random.random_range(1..4) } else { random.random_range(1..200) };
    let n = random.random_range(1..70);
    let (n_blocks, most) = (k.div_ceil(block), 1i64 << bits);
    let mut draw = |rows: usize, columns: usize| -> Vec<Vec<i64>> {
        (0..rows).map(|_| (0..columns).map(|_| random.random_range(0..most)).collect()).collect()
    };
    let (weights, zeros) = (draw(n, n_blocks * block), draw(n, n_blocks));
    let scales = singles(random, n * n_blocks, 0.3);
    let mut x = singles(random, m * k, 1.0);
    // A row of zeros has no scale. Of the other two numbers, ONNX Runtime rounds the smaller to 64.
    match seed % 5 {
        0 => x[..k].fill(0.0),
        1 => x.iter_mut().zip([1.6666666, 3.3333333]).for_each(|(x, own)| *x = f64::from(own as f32)),
        _ => {}
    }
    let level = *[0, 1, 4, 4].choose(random).unwrap();
    let kind = random.random_range(0..3);
    let mut zero: Vec<Vec<f64>> = zeros.iter().map(|row| row.iter().map(|&x| x as f64).collect()).collect();
    let mut inputs = vec!["x", "w", "s"];
    let mut constants = vec![
        ("w".to_owned(), {
            let numbers = packed(&weights, bits);
            Tensor::from_integers(DType::U8, [n, n_blocks, block * bits as usize / 8], &numbers)
        }),
        ("s".to_owned(), Tensor::from_floats(DType::F32, [n, n_blocks], &scales)),
    ];
    match kind {
        0 => zero.iter_mut().flatten().for_each(|zero| *zero = (most / 2) as f64),
        1 => {
            inputs.push("z");
            let width = (n_blocks * bits as usize).div_ceil(8);
            constants.push(("z".to_owned(), Tensor::from_integers(DType::U8, [n, width], &packed(&zeros, bits))));
        }
        _ => {
            inputs.push("z");
            zero.iter_mut().flatten().for_each(|zero| *zero += 0.25);
            let all = zero.concat();
            constants.push(("z".to_owned(), Tensor::from_floats(DType::F32, [n, n_blocks], &all)));
        }
    }
    let mut block_of: Vec<usize> = (0..k).map(|at| at / block).collect();
    let has_groups = random.random_bool(0.2);
    if has_groups {
        block_of.iter_mut().for_each(|block| *block = random.random_range(0..n_blocks));
        inputs.resize(4, if kind == 0 { "" } else { "z" });
        inputs.push("g");
        let groups: Vec<i128> = block_of.iter().map(|&block| block as i128).collect();
        constants.push(("g".to_owned(), Tensor::from_integers(DType::I32, [k], &groups)));
    }
    let mut bias = vec![0.0; n];
    if random.random_bool(0.4) {
        bias = singles(random, n, 1.0);
        inputs.resize(5, "");
        inputs.push("c");
        constants.push(("c".to_owned(), Tensor::from_floats(DType::F32, [n], &bias)));
    }
    let is_rounded = level == 4 && kind < 2 && !has_groups;
    let mut expected = Vec::new();
    for row in x.chunks(k) {
        let row = if is_rounded { row.chunks(block).flat_map(rounded).collect() } else { row.to_vec() };
        for (j, bias) in bias.iter().enumerate() {
            let term = |at: usize| {
                let block = block_of[at];
                row[at] * (weights[j][at] as f64 - zero[j][block]) * scales[j * n_blocks + block]
            };
            expected.push((0..k).map(term).sum::<f64>() + bias);
        }
    }
    let attributes = [
        ("K", k as i64),
        ("N", n as i64),
        ("bits", i64::from(bits)),
        ("block_size", block as i64),
        ("accuracy_level", level),
    ];
    let text = format!("m={m} n={n} k={k} bits={bits} block={block} zeros {kind} groups {has_groups} level {level}");
    let mut file = of_node("MatMulNBits", &inputs, &attributes, port("x", DType::F32, &[m, k]), &[m, n]);
    file.weights = constants;
    Drawn { text, file, input: ("x", Tensor::from_floats(DType::F32, [m, k], &x)), expected }
}

fn slices(seed: u64) -> Drawn {
    let random = &mut Random::seed_from_u64(seed);
    let dtype = *[DType::U8, DType::U8, DType::U4, DType::I4].choose(random).unwrap();
    let bits: u32 = if dtype == DType::U8 { *[2, 4, 8].choose(random).unwrap() } else { 4 };
    let block: usize = *[16, 32].choose(random).unwrap();
    let rows: usize = random.random_range(1..20);
    let width = block * random.random_range(1..4) - 8 * random.random_range(0..2);
    // Slices of columns, and blocks along columns, only if numbers do not share bytes.
    let is_turned = dtype != DType::U8 && random.random_bool(0.4);
    let [n_blocks, n_slices] = if is_turned { [rows.div_ceil(block), width] } else { [width.div_ceil(block), rows] };
    let (scale_rows, scale_columns) = if is_turned { (n_blocks, width) } else { (rows, n_blocks) };
    let least: i64 = if dtype == DType::I4 { -8 } else { 0 };
    let mut draw = |rows: usize, columns: usize| -> Vec<Vec<i64>> {
        let range = least..least + (1 << bits);
        (0..rows).map(|_| (0..columns).map(|_| random.random_range(range.clone())).collect()).collect()
    };
    let (numbers, mut zeros) = (draw(rows, width), draw(scale_rows, scale_columns));
    let scales = singles(random, scale_rows * scale_columns, 0.3);
    let tensor = |numbers: &[Vec<i64>]| match dtype {
        DType::U8 => {
            let width = (numbers[0].len() * bits as usize).div_ceil(8);
            Tensor::from_integers(dtype, [numbers.len(), width], &packed(numbers, bits))
        }
        _ => {
            let all: Vec<i128> = numbers.concat().into_iter().map(i128::from).collect();
            Tensor::from_integers(dtype, [numbers.len(), numbers[0].len()], &all)
        }
    };
    let mut constants = vec![
        ("w".to_owned(), tensor(&numbers)),
        ("s".to_owned(), Tensor::from_floats(DType::F32, [scale_rows, scale_columns], &scales)),
    ];
    let mut inputs = vec!["w", "x", "s"];
    if random.random_bool(0.5) {
        inputs.push("z");
        constants.push(("z".to_owned(), tensor(&zeros)));
    } else {
        let middle = if dtype == DType::U8 { 1 << (bits - 1) } else { 0 };
        zeros.iter_mut().flatten().for_each(|zero| *zero = middle);
    }
    let n = n_slices as i64;
    let indices: Vec<i64> = (0..5).map(|_| random.random_range(-n - 1..n + 1)).chain([n, -n - 1, i64::MIN]).collect();
    let number = |i: usize, j: usize| {
        let [a, b] = if is_turned { [i / block, j] } else { [i, j / block] };
        (numbers[i][j] - zeros[a][b]) as f64 * scales[a * scale_columns + b]
    };
    let place = |index: i64| {
        let place = if index < 0 { index.saturating_add(n) } else { index };
        usize::try_from(place).ok().filter(|place| *place < n_slices)
    };
    let expected: Vec<f64> = match is_turned {
        false => {
            let row = |index: &i64| (0..width).map(|j| place(*index).map_or(0.0, |i| number(i, j))).collect::<Vec<_>>();
            indices.iter().flat_map(row).collect()
        }
        true => {
            let row = |i: usize| indices.iter().map(|index| place(*index).map_or(0.0, |j| number(i, j))).collect();
            (0..rows).flat_map(|i| -> Vec<f64> { row(i) }).collect()
        }
    };
    let mut attributes = vec![
        ("block_size", block as i64),
        ("gather_axis", i64::from(is_turned)),
        ("quantize_axis", i64::from(!is_turned) - 2 * i64::from(seed.is_multiple_of(3))),
    ];
    attributes.extend((dtype == DType::U8).then_some(("bits", i64::from(bits))));
    let out = if is_turned { [rows, indices.len()] } else { [indices.len(), width] };
    let mut file = of_node("GatherBlockQuantized", &inputs, &attributes, port("x", DType::I64, &[indices.len()]), &out);
    file.weights = constants;
    let text = format!("{dtype} bits={bits} block={block} [{rows}, {width}] turned {is_turned}");
    Drawn { text, file, input: ("x", Tensor::vector(&indices)), expected }
}

/// Products with bitsandbytes' levels: two in a byte, the first in its upper half, and blocks of all weights,
/// whose scales are their largest magnitudes.
fn levels(seed: u64) -> Drawn {
    // The other levels of FP4 are these with a minus.
    const NF4: [f64; 16] = [
        -1.0,
        -0.6961928,
        -0.52507305,
        -0.3949175,
        -0.28444138,
        -0.18477343,
        -0.091050036,
        0.0,
        0.0795803,
        0.1609302,
        0.2461123,
        0.33791524,
        0.44070983,
        0.562617,
        0.72295684,
        1.0,
    ];
    const FP4: [f64; 8] = [0.0, 1.0 / 192.0, 2.0 / 3.0, 1.0, 1.0 / 3.0, 0.5, 1.0 / 6.0, 0.25];
    let random = &mut Random::seed_from_u64(seed);
    let is_nf4 = seed.is_multiple_of(2);
    let block: usize = *[16, 32, 64].choose(random).unwrap();
    let [m, n, k] = [5usize, 9, 90].map(|most| random.random_range(1..most));
    let which: Vec<usize> = (0..n * k).map(|_| random.random_range(0..16)).collect();
    let (most, x) = (singles(random, (n * k).div_ceil(block), 1.0), singles(random, m * k, 1.0));
    let level = |at: usize| match (is_nf4, at < 8) {
        (true, _) => NF4[at],
        (false, true) => FP4[at],
        (false, false) => -FP4[at - 8],
    };
    let weight = |at: usize| level(which[at]) * most[at / block];
    let sum = |row: &[f64], j: usize| row.iter().enumerate().map(|(i, x)| x * weight(j * k + i)).sum::<f64>();
    let expected = x.chunks(k).flat_map(|row| (0..n).map(|j| sum(row, j)).collect::<Vec<_>>()).collect();
    let bytes: Vec<i128> = which.chunks(2).map(|pair| (pair[0] * 16 + pair.get(1).unwrap_or(&7)) as i128).collect();
    let attributes =
        [("K", k as i64), ("N", n as i64), ("block_size", block as i64), ("quant_type", i64::from(is_nf4))];
    let mut file = of_node("MatMulBnb4", &["x", "w", "s"], &attributes, port("x", DType::F32, &[m, k]), &[m, n]);
    file.weights = vec![
        ("w".to_owned(), Tensor::from_integers(DType::U8, [bytes.len()], &bytes)),
        ("s".to_owned(), Tensor::from_floats(DType::F32, [most.len()], &most)),
    ];
    let text = format!("nf4 {is_nf4} m={m} n={n} k={k} block={block}");
    Drawn { text, file, input: ("x", Tensor::from_floats(DType::F32, [m, k], &x)), expected }
}

/// Products with weights behind a `DequantizeLinear` in blocks. Quantizers give the weight of the largest
/// magnitude the least level: scales have either sign, and are 0 where a block is.
fn blocked(seed: u64) -> Drawn {
    let random = &mut Random::seed_from_u64(seed);
    let dtype = *[DType::I4, DType::U4, DType::I8, DType::U8].choose(random).unwrap();
    let block: usize = *[16, 32].choose(random).unwrap();
    let (m, n) = (random.random_range(1..5), random.random_range(1..40));
    let k = block * random.random_range(1..4) - random.random_range(0..3);
    let n_blocks = k.div_ceil(block);
    let least = if matches!(dtype, DType::I4 | DType::I8) { -8 } else { 0 };
    let mut draw = |n: usize| -> Vec<i128> { (0..n).map(|_| random.random_range(least..least + 16)).collect() };
    let (weights, mut zeros) = (draw(n * k), draw(n * n_blocks));
    let has_zeros = random.random_bool(0.5);
    zeros.iter_mut().for_each(|zero| *zero *= i128::from(has_zeros));
    let (mut scales, x) = (singles(random, n * n_blocks, 0.3), singles(random, m * k, 1.0));
    scales[0] = 0.0;
    let weight =
        |i: usize, j: usize| (weights[i * n + j] - zeros[i / block * n + j]) as f64 * scales[i / block * n + j];
    let sum = |row: &[f64], j: usize| row.iter().enumerate().map(|(i, x)| x * weight(i, j)).sum::<f64>();
    let sums: Vec<f64> = x.chunks(k).flat_map(|row| (0..n).map(|j| sum(row, j)).collect::<Vec<_>>()).collect();
    // Rows of the weights may be results, by the product or by a node, and the product may add a bias.
    let (is_gemm, is_turned) = (random.random_bool(0.5), random.random_bool(0.5));
    let has_turn = if is_gemm { random.random_bool(0.3) } else { is_turned };
    let bias = singles(random, n, 1.0);
    let expected = (0..m * n).map(|at| sums[at] + if is_gemm { bias[at % n] } else { 0.0 }).collect();
    let turned = |shape: [usize; 2]| if is_turned { [shape[1], shape[0]] } else { shape };
    let place = |[rows, columns]: [usize; 2], at: usize| match is_turned {
        true => at % rows * columns + at / rows,
        false => at,
    };
    let integers = |shape: [usize; 2], all: &[i128]| {
        let all: Vec<i128> = (0..all.len()).map(|at| all[place(shape, at)]).collect();
        Tensor::from_integers(dtype, turned(shape), &all)
    };
    let attributes = [("axis", i64::from(is_turned)), ("block_size", block as i64)];
    let given = port("x", DType::F32, &[m, k]);
    let inputs = if has_zeros { &["w", "s", "z"][..] } else { &["w", "s"] };
    let mut file = of_node("DequantizeLinear", inputs, &attributes, given, &[m, n]);
    file.nodes[0].domain = String::new();
    file.nodes[0].outputs = vec!["d".to_owned()];
    let node = |op: &str, inputs: &[&str], output: &str| NodeFile {
        op: op.to_owned(),
        inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
        outputs: vec![output.to_owned()],
        ..NodeFile::default()
    };
    file.nodes.extend(has_turn.then(|| node("Transpose", &["d"], "t")));
    let b = if has_turn { "t" } else { "d" };
    let mut product = if is_gemm { node("Gemm", &["x", b, "c"], "y") } else { node("MatMul", &["x", b], "y") };
    if is_gemm {
        product.attributes = vec![("transB".to_owned(), Attribute::Int(i64::from(is_turned != has_turn)))];
        file.weights.push(("c".to_owned(), Tensor::from_floats(DType::F32, [n], &bias)));
    }
    file.nodes.push(product);
    let (of_scales, scales) = ([n_blocks, n], &scales);
    let scales: Vec<f64> = (0..n_blocks * n).map(|at| scales[place(of_scales, at)]).collect();
    file.weights.push(("w".to_owned(), integers([k, n], &weights)));
    file.weights.push(("s".to_owned(), Tensor::from_floats(DType::F32, turned(of_scales), &scales)));
    if has_zeros {
        file.weights.push(("z".to_owned(), integers(of_scales, &zeros)));
    }
    let form = format!("gemm {is_gemm} turned {is_turned} by a node {has_turn}");
    let text = format!("{dtype} m={m} n={n} k={k} block={block} zeros {has_zeros} {form}");
    Drawn { text, file, input: ("x", Tensor::from_floats(DType::F32, [m, k], &x)), expected }
}

pub(crate) fn check(drawn: Drawn) {
    let Drawn { text, file, input: (name, input), expected } = drawn;
    let graph = read_back(&file);
    let special = specialise(&graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{text}: {}", special.problems[0]);
    let compiled = compiled_for(&special.graph, &host::target()).unwrap_or_else(|error| panic!("{text}: {error}"));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set(name, &input).unwrap();
    runner.run().unwrap();
    let most = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let reference = evaluate(&special.graph, &[(name, input)]).unwrap();
    for (who, found) in [("kernels", runner.outputs()[0].1.floats()), ("reference", reference[0].floats())] {
        assert_eq!(found.len(), expected.len(), "{text}");
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!((found - expected).abs() <= 2e-6 * most, "{text}, {who}: {found} and not {expected} at {at}");
        }
    }
}

#[test]
fn products_with_packed_weights_are_sums_of_what_was_packed() {
    (0..60).map(product).for_each(check);
}

#[test]
fn slices_of_packed_tables_are_what_was_packed() {
    (0..40).map(slices).for_each(check);
}

#[test]
fn weights_are_levels_of_a_table() {
    (0..12).map(levels).for_each(check);
}

#[test]
fn scales_of_blocks_have_any_sign() {
    (0..48).map(blocked).for_each(check);
}

/// Few rows read weights that are an eighth of f32's bytes.
#[test]
fn weights_in_blocks_stay_packed() {
    let target = host::target();
    let has_dots = target.dot4_lanes([false, true]) > 0 || target.widens_bytes();
    for drawn in (0..24).map(blocked) {
        let graph = read_back(&drawn.file);
        let graph = specialise(&graph, &Bindings { fold_bytes: 0, ..Bindings::default() }).graph;
        let compiled = compiled_for(&graph, &target).unwrap();
        let is_packed = compiled.steps().iter().any(|step| step.workload.starts_with("packed_matmul"));
        assert_eq!(is_packed, has_dots, "{}", drawn.text);
    }
}

/// Models whose weights are not those that attributes speak of.
#[test]
fn wrong_packing_is_refused_with_its_node() {
    let bytes = |shape: &[usize]| Tensor::from_integers(DType::U8, shape, &vec![3; shape.iter().product()]);
    let numbers = |shape: &[usize], x: f64| Tensor::from_floats(DType::F32, shape, &vec![x; shape.iter().product()]);
    let whole = [("K", 64), ("N", 8), ("bits", 4), ("block_size", 32)];
    let with = |name: &str, x: i64| {
        let mut all = whole.to_vec();
        all.iter_mut().filter(|(own, _)| *own == name).for_each(|own| own.1 = x);
        all
    };
    let (w, s) = (bytes(&[8, 2, 16]), numbers(&[8, 2], 0.5));
    type Case<'a> = (Vec<(&'a str, i64)>, Vec<Tensor>, &'a str);
    let cases: Vec<Case> = vec![
        (with("block_size", 24), vec![w.clone(), s.clone()], "block_size=24 is no power of two"),
        (with("block_size", 8), vec![w.clone(), s.clone()], "block_size=8 is no power of two"),
        (with("bits", 3), vec![w.clone(), s.clone()], "bits=3 is not 2, 4 or 8"),
        (with("K", 65), vec![w.clone(), s.clone()], "should have K=65 columns"),
        (whole.to_vec(), vec![bytes(&[8, 2, 15]), s.clone()], "input 2, have shape [8,2,15]"),
        (whole.to_vec(), vec![w.clone(), numbers(&[8, 3], 0.5)], "input 3, have shape [8,3]"),
        (whole.to_vec(), vec![w.clone(), numbers(&[8, 2], f64::NAN)], "a scale of NaN"),
        (whole.to_vec(), vec![w.clone(), s.clone(), bytes(&[8, 2])], "input 4, have shape [8,2]"),
        (
            whole.iter().copied().chain([("accuracy_level", 7)]).collect(),
            vec![w.clone(), s.clone()],
            "accuracy_level=7",
        ),
        (whole.iter().copied().chain([("weight_prepacked", 1)]).collect(), vec![w, s], "packed for CUDA"),
    ];
    for (attributes, constants, expected) in cases {
        let names = ["x", "w", "s", "z"];
        let given = port("x", DType::F32, &[2, 64]);
        let mut file = of_node("MatMulNBits", &names[..=constants.len()], &attributes, given, &[2, 8]);
        file.weights = names[1..].iter().map(|&name| name.to_owned()).zip(constants).collect();
        let graph = read_back(&file);
        let special = specialise(&graph, &Bindings::default());
        let problem = special.problems.first().map(ToString::to_string).unwrap_or_default();
        assert!(problem.contains(expected) && problem.contains("packed"), "{expected}: {problem}");
    }
}
