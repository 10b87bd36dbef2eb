//! Blocks of well-known networks as exporters write them, at a small scale: the results and the number of
//! their kernels.

use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Graph, SplitMix64, Tensor, evaluate, onnx, specialise};
use tilewright_model::{Runner, lower};
use tilewright_runtime::SharedPool;

use crate::common::{agree, no_files};
use crate::{compiled, whole};

/// Parses a text such as `name[1 2 3]`.
fn named(text: &str) -> (&str, Vec<&str>) {
    let (name, list) = text.split_once('[').unwrap_or((text, "]"));
    (name.trim(), list.trim_end_matches(']').split_whitespace().collect())
}

fn numbers<T: std::str::FromStr>(list: &[&str]) -> Vec<T> {
    list.iter().map(|n| n.parse().unwrap_or_else(|_| panic!("{n} is no number of that kind"))).collect()
}

/// Makes a constant of a statement: `weights[2 3]` of that shape, `numbers[2 3]` a list of integers,
/// `integers[2 3]` small ones in that shape, `bytes[2 3]` and `zeros[2 3]` of 8 bits, `scales[2]`,
/// `integer[1]`, `number[0.5]`, `singles[2 3]` and `single[1]` integers of 32 bits, `angles[cos 4]` cosines
/// of positions, or `causal[4]`, true at and below the diagonal.
fn constant(text: &str, seed: u64) -> Tensor {
    let (kind, list) = named(text);
    match kind {
        "weights" => SplitMix64::new(seed).tensor(numbers::<usize>(&list), -0.6, 0.6),
        "numbers" => whole(&[list.len()], &numbers(&list)),
        "integers" => {
            let shape = numbers::<usize>(&list);
            let n = shape.iter().product::<usize>() as i64;
            whole(&shape, &(0..n).map(|at| at * 5 % 7).collect::<Vec<_>>())
        }
        "integer" => whole(&[], &numbers(&list)),
        "bytes" | "zeros" => {
            let shape = numbers::<usize>(&list);
            let n = shape.iter().product::<usize>() as i128;
            let byte = |at: i128| if kind == "zeros" { 0 } else { at * 37 % 251 - 125 };
            Tensor::from_integers(DType::I8, shape, &(0..n).map(byte).collect::<Vec<_>>())
        }
        "scales" => SplitMix64::new(seed).tensor(numbers::<usize>(&list), 0.002, 0.006),
        "singles" => Tensor::from_integers(DType::I32, [list.len()], &numbers(&list)),
        "single" => Tensor::from_integers(DType::I32, [], &numbers(&list)),
        "angles" => {
            let half = list[1].parse().expect("half a head");
            let [cosines, sines] = crate::attention::tables(64, half);
            if list[0] == "cos" { cosines } else { sines }
        }
        "number" => Tensor::from_floats(DType::F32, vec![], &numbers(&list)),
        "causal" => {
            let n = numbers::<usize>(&list)[0];
            let is_seen = (0..n * n).map(|at| i128::from(at % n <= at / n)).collect::<Vec<_>>();
            Tensor::from_integers(DType::Bool, vec![1, 1, n, n], &is_seen)
        }
        _ => panic!("{kind} is no constant"),
    }
}

/// Parses an attribute `name=value`: integers, a number with a decimal point, or words.
fn attribute(text: &str) -> (String, Attribute) {
    let (name, value) = text.trim().split_once('=').expect("an attribute has a value");
    let words: Vec<&str> = value.split(' ').collect();
    let is_list = words.len() > 1 || ["axes", "kernel_shape", "perm", "shape", "strides", "dilations"].contains(&name);
    let value = if words.iter().all(|word| word.parse::<i64>().is_ok()) {
        if is_list { Attribute::Ints(numbers(&words)) } else { Attribute::Int(value.parse().expect("an integer")) }
    } else if is_list && words.iter().all(|word| word.parse::<f32>().is_ok()) {
        Attribute::Floats(numbers(&words))
    } else if name == "activations" {
        Attribute::Texts(words.iter().map(|&word| word.to_owned()).collect())
    } else if let Ok(number) = value.parse() {
        Attribute::Float(number)
    } else {
        Attribute::Text(value.to_owned())
    };
    (name.to_owned(), value)
}

fn names(list: &str) -> Vec<String> {
    list.split(',').map(|name| name.trim().to_owned()).collect()
}

/// Makes the graph of statements, one per line: `a, b = Operator[name=value, …](x, y)`, optionally with a
/// domain before the operator, or `w = weights[2 3]`. Inputs and outputs are given as `x[1 2 3], …`; inputs
/// whose name begins with `ids` are integers.
pub(crate) fn graph_of(inputs: &str, outputs: &str, statements: &str) -> Graph {
    graph_at(17, inputs, outputs, statements)
}

/// Makes the graph of statements in a version of the operators.
pub(crate) fn graph_at(opset: i64, inputs: &str, outputs: &str, statements: &str) -> Graph {
    let file = file_of(opset, inputs, outputs, statements);
    onnx::read(&file, &mut no_files).unwrap_or_else(|error| panic!("{error}")).graph
}

/// Makes the model file of statements in a version of the operators.
pub(crate) fn file_of(opset: i64, inputs: &str, outputs: &str, statements: &str) -> bytes::Bytes {
    let ports = |list: &str| -> Vec<GraphPort> {
        let port = |text: &str| {
            let (name, sizes) = named(text);
            let dtype = match name {
                _ if name.starts_with("ids") || name == "input_ids" || name == "attention_mask" => DType::I64,
                _ if name.starts_with("lengths") => DType::I32,
                _ => DType::F32,
            };
            let dim = |size: &&str| size.parse().map_or_else(|_| Dim::Named((*size).to_owned()), Dim::Size);
            GraphPort { name: name.to_owned(), dtype, dims: sizes.iter().map(dim).collect() }
        };
        list.split(',').map(port).collect()
    };
    let (inputs, outputs) = (ports(inputs), ports(outputs));
    let name = "block".to_owned();
    let domains = vec![("com.microsoft".to_owned(), 1)];
    let mut model = ModelFile { name, opset, domains, inputs, outputs, ..ModelFile::default() };
    for line in statements.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (results, call) = line.split_once(" = ").unwrap_or_else(|| panic!("`{line}` is no statement"));
        match call.split_once('(') {
            None => model.weights.push((results.to_owned(), constant(call, model.weights.len() as u64))),
            Some((operator, arguments)) => {
                let (op, _) = named(operator);
                let attributes = operator.split_once('[').map_or("", |(_, list)| list.trim_end_matches(']'));
                let attributes = attributes.split(',').filter(|text| !text.is_empty()).map(attribute).collect();
                let inputs = names(arguments.trim_end_matches(')'));
                let inputs = if inputs == [""] { Vec::new() } else { inputs };
                let (domain, op) = op.rsplit_once('.').unwrap_or(("", op));
                model.nodes.push(NodeFile {
                    domain: domain.to_owned(),
                    op: op.to_owned(),
                    inputs,
                    outputs: names(results),
                    attributes,
                    ..NodeFile::default()
                });
            }
        }
    }
    onnx::write(&model).into()
}

/// Checks the results of kernels for statements, and that there are at most this many kernels and copies, and
/// no other steps. Returns the number of kernels.
fn check(inputs: &str, outputs: &str, statements: &str, (most_kernels, most_copies): (usize, usize)) -> usize {
    let graph = graph_of(inputs, outputs, statements);
    let special = specialise(&graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    let compiled = compiled(&special.graph).unwrap_or_else(|error| panic!("{error}"));
    let steps: Vec<String> =
        compiled.steps().iter().map(|step| format!("{} {} {}", step.kind, step.name, step.label)).collect();
    let n_steps = |kind: &str| steps.iter().filter(|step| step.starts_with(kind)).count();
    let found = (n_steps("kernel"), n_steps("copy"), n_steps("host"));
    assert!(
        found.0 <= most_kernels && found.1 <= most_copies && found.2 == 0,
        "{found:?} kernels, copies and operators without code:\n{}",
        steps.join("\n")
    );
    let mut random = SplitMix64::new(7);
    let given = |id: &tilewright_graph::ValueId| {
        let value = special.graph.value(*id);
        let ty = value.ty.clone().expect("inputs have types");
        let x = match ty.dtype {
            DType::I64 => whole(&ty.shape, &(0..ty.n_elements() as i64).map(|at| at * 3 % 7).collect::<Vec<_>>()),
            DType::I32 => Tensor::from_integers(ty.dtype, ty.shape.clone(), &[1, 3]),
            _ => random.input(&ty),
        };
        (value.name.as_str(), x)
    };
    let given: Vec<(&str, Tensor)> = special.graph.inputs.iter().map(given).collect();
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    let wanted = evaluate(&graph, &given).unwrap();
    // Twice, as the data that a run leaves behind must not affect the next.
    for _ in 0..2 {
        runner.run().unwrap();
        for ((name, found), wanted) in runner.outputs().iter().zip(&wanted) {
            agree_nearly(found, wanted).unwrap_or_else(|what| panic!("{name} {what}"));
        }
    }
    found.0
}

/// Checks that two tensors agree, relative to the largest number for small ones.
fn agree_nearly(found: &Tensor, wanted: &Tensor) -> Result<(), String> {
    let largest = wanted.floats().iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let is_near = |(x, y): (f64, f64)| (x - y).abs() <= 1e-5 * largest;
    match found.ty() == wanted.ty() && found.floats().into_iter().zip(wanted.floats()).all(is_near) {
        true => Ok(()),
        false => agree(found, wanted),
    }
}

/// Gates by sigmoids and error functions; a product with other readers is not computed twice, and columns
/// that do not fill vectors are not paired.
#[test]
fn a_gate_and_what_it_gates_are_one_product() {
    const PRODUCTS: &str = "
        gate = weights[16 32]
        up = weights[16 32]
        g = MatMul(x, gate)
        u = MatMul(x, up)
    ";
    const SILU: &str = "
        s = Sigmoid(g)
        a = Mul(g, s)
        h = Mul(a, u)
    ";
    const GELU: &str = "
        root = number[1.4142135]
        one = number[1.0]
        half = number[0.5]
        e0 = Div(g, root)
        e1 = Erf(e0)
        e2 = Add(e1, one)
        e3 = Mul(g, e2)
        e4 = Mul(e3, half)
        h = Mul(u, e4)
    ";
    const DOWN: &str = "
        down = weights[32 16]
        y = MatMul(h, down)
    ";
    for gate in [SILU, GELU] {
        for shape in ["[1 6 16]", "[1 1 16]", "[37 16]"] {
            check(&format!("x{shape}"), &format!("y{shape}"), &format!("{PRODUCTS}{gate}{DOWN}"), (2, 0));
        }
    }
    let read_twice = format!("{PRODUCTS}{SILU}z = Relu(u){DOWN}");
    check("x[6 16]", "y[6 16], z[6 32]", &read_twice, (4, 0));
    let narrow = format!("{PRODUCTS}{SILU}{DOWN}").replace("32", "20");
    check("x[6 16]", "y[6 16]", &narrow, (3, 0));
}

/// Splits a product `NAME_p[1 6 16]` into two heads of eight.
const HEADS: &str = "
    of_heads = numbers[1 6 2 8]
    of_rows = numbers[1 6 16]
";

#[test]
fn a_block_of_gpt_2() {
    let statements = "
        g1 = weights[16]
        b1 = weights[16]
        w1 = weights[16 48]
        c1 = weights[48]
        root = number[2.828427]
        seen = causal[6]
        least = number[-10000.0]
        w2 = weights[16 16]
        c2 = weights[16]
        g2 = weights[16]
        b2 = weights[16]
        w3 = weights[16 32]
        c3 = weights[32]
        half = number[0.5]
        one = number[1.0]
        three = number[3.0]
        cube = number[0.044715]
        pi = number[0.797885]
        w4 = weights[32 16]
        c4 = weights[16]
        n1 = LayerNormalization[axis=-1](x, g1, b1)
        p0 = MatMul(n1, w1)
        p1 = Add(p0, c1)
        q0, k0, v0 = Split[axis=-1](p1)
        q1 = Reshape(q0, of_heads)
        q = Transpose[perm=0 2 1 3](q1)
        k1 = Reshape(k0, of_heads)
        k = Transpose[perm=0 2 3 1](k1)
        v1 = Reshape(v0, of_heads)
        v = Transpose[perm=0 2 1 3](v1)
        s0 = MatMul(q, k)
        s1 = Div(s0, root)
        s2 = Where(seen, s1, least)
        s = Softmax[axis=-1](s2)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=0 2 1 3](a0)
        a2 = Reshape(a1, of_rows)
        a3 = MatMul(a2, w2)
        a4 = Add(a3, c2)
        r = Add(a4, x)
        n2 = LayerNormalization[axis=-1](r, g2, b2)
        f0 = MatMul(n2, w3)
        f = Add(f0, c3)
        e0 = Pow(f, three)
        e1 = Mul(e0, cube)
        e2 = Add(f, e1)
        e3 = Mul(e2, pi)
        e4 = Tanh(e3)
        e5 = Add(e4, one)
        e6 = Mul(f, e5)
        e = Mul(e6, half)
        o0 = MatMul(e, w4)
        o1 = Add(o0, c4)
        y = Add(r, o1)";
    check("x[1 6 16]", "y[1 6 16]", &format!("{HEADS}{statements}"), (10, 0));
}

#[test]
fn the_beginning_and_the_end_of_a_vision_transformer() {
    let statements = "
        w1 = weights[16 3 4 4]
        c1 = weights[16]
        flat = numbers[1 16 4]
        class = weights[1 1 16]
        places = weights[1 5 16]
        g = weights[16]
        b = weights[16]
        first = integer[0]
        w2 = weights[10 16]
        c2 = weights[10]
        p0 = Conv[strides=4 4, kernel_shape=4 4](x, w1, c1)
        p1 = Reshape(p0, flat)
        p2 = Transpose[perm=0 2 1](p1)
        t0 = Concat[axis=1](class, p2)
        t = Add(t0, places)
        n = LayerNormalization[axis=-1](t, g, b)
        c = Gather[axis=1](n, first)
        y = Gemm[transB=1](c, w2, c2)";
    check("x[1 3 8 8]", "y[1 10]", statements, (5, 1));
}

#[test]
fn attention_with_rotary_embeddings() {
    let statements = "
        wq = weights[16 16]
        wk = weights[16 16]
        wv = weights[16 16]
        wo = weights[16 16]
        cos = weights[1 1 6 8]
        sin = weights[1 1 6 8]
        begin = numbers[0]
        half = numbers[4]
        end = numbers[8]
        axis = numbers[3]
        scale = number[0.353553]
        q0 = MatMul(x, wq)
        q1 = Reshape(q0, of_heads)
        q2 = Transpose[perm=0 2 1 3](q1)
        k0 = MatMul(x, wk)
        k1 = Reshape(k0, of_heads)
        k2 = Transpose[perm=0 2 1 3](k1)
        v0 = MatMul(x, wv)
        v1 = Reshape(v0, of_heads)
        v = Transpose[perm=0 2 1 3](v1)
        qa = Slice(q2, begin, half, axis)
        qb = Slice(q2, half, end, axis)
        qc = Neg(qb)
        qd = Concat[axis=-1](qc, qa)
        qe = Mul(q2, cos)
        qf = Mul(qd, sin)
        q = Add(qe, qf)
        ka = Slice(k2, begin, half, axis)
        kb = Slice(k2, half, end, axis)
        kc = Neg(kb)
        kd = Concat[axis=-1](kc, ka)
        ke = Mul(k2, cos)
        kf = Mul(kd, sin)
        k3 = Add(ke, kf)
        k = Transpose[perm=0 1 3 2](k3)
        s0 = MatMul(q, k)
        s1 = Mul(s0, scale)
        s = Softmax[axis=-1](s1)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=0 2 1 3](a0)
        a2 = Reshape(a1, of_rows)
        y = MatMul(a2, wo)";
    check("x[1 6 16]", "y[1 6 16]", &format!("{HEADS}{statements}"), (17, 0));
}

#[test]
fn a_gated_network_behind_a_root_mean_square() {
    let statements = "
        two = number[2.0]
        small = number[0.000001]
        one = number[1.0]
        g = weights[16]
        wg = weights[16 24]
        wu = weights[16 24]
        wd = weights[24 16]
        p = Pow(x, two)
        m0 = ReduceMean[axes=-1, keepdims=1](p)
        m1 = Add(m0, small)
        m2 = Sqrt(m1)
        m = Div(one, m2)
        n0 = Mul(x, m)
        n = Mul(g, n0)
        a0 = MatMul(n, wg)
        a1 = Sigmoid(a0)
        a = Mul(a0, a1)
        b = MatMul(n, wu)
        h = Mul(a, b)
        d = MatMul(h, wd)
        y = Add(x, d)";
    check("x[1 6 16]", "y[1 6 16]", statements, (4, 0));
}

#[test]
fn attention_of_groups_of_queries() {
    let statements = "
        wq = weights[16 16]
        wk = weights[16 8]
        wv = weights[16 8]
        of_one = numbers[1 6 1 8]
        axis = numbers[2]
        spread = numbers[1 1 2 6 8]
        of_both = numbers[1 2 6 8]
        scale = number[0.353553]
        q0 = MatMul(x, wq)
        q1 = Reshape(q0, of_heads)
        q = Transpose[perm=0 2 1 3](q1)
        k0 = MatMul(x, wk)
        k1 = Reshape(k0, of_one)
        k2 = Transpose[perm=0 2 1 3](k1)
        k3 = Unsqueeze(k2, axis)
        k4 = Expand(k3, spread)
        k5 = Reshape(k4, of_both)
        k = Transpose[perm=0 1 3 2](k5)
        v0 = MatMul(x, wv)
        v1 = Reshape(v0, of_one)
        v2 = Transpose[perm=0 2 1 3](v1)
        v3 = Unsqueeze(v2, axis)
        v4 = Expand(v3, spread)
        v = Reshape(v4, of_both)
        s0 = MatMul(q, k)
        s1 = Mul(s0, scale)
        s = Softmax[axis=-1](s1)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=0 2 1 3](a0)
        y = Reshape(a1, of_rows)";
    check("x[1 6 16]", "y[1 6 16]", &format!("{HEADS}{statements}"), (10, 0));
}

#[test]
fn a_block_of_convnext() {
    let statements = "
        wd = weights[8 1 7 7]
        cd = weights[8]
        g = weights[8]
        b = weights[8]
        w1 = weights[8 32]
        c1 = weights[32]
        root = number[1.414214]
        one = number[1.0]
        half = number[0.5]
        w2 = weights[32 8]
        c2 = weights[8]
        gamma = weights[8]
        d = Conv[group=8, pads=3 3 3 3, kernel_shape=7 7](x, wd, cd)
        t = Transpose[perm=0 2 3 1](d)
        n = LayerNormalization[axis=-1](t, g, b)
        f0 = MatMul(n, w1)
        f = Add(f0, c1)
        e0 = Div(f, root)
        e1 = Erf(e0)
        e2 = Add(e1, one)
        e3 = Mul(f, e2)
        e = Mul(e3, half)
        o0 = MatMul(e, w2)
        o1 = Add(o0, c2)
        o2 = Mul(gamma, o1)
        o = Transpose[perm=0 3 1 2](o2)
        y = Add(x, o)";
    check("x[1 8 6 6]", "y[1 8 6 6]", statements, (6, 0));
}

#[test]
fn squeeze_and_excite_with_hard_functions() {
    let statements = "
        w1 = weights[16 8 1 1]
        c1 = weights[16]
        wd = weights[16 1 3 3]
        ws = weights[4 16 1 1]
        cs = weights[4]
        we = weights[16 4 1 1]
        ce = weights[16]
        w2 = weights[8 16 1 1]
        a0 = Conv(x, w1, c1)
        a = HardSwish(a0)
        d0 = Conv[group=16, pads=1 1 1 1](a, wd)
        d1 = HardSigmoid[alpha=0.166667, beta=0.5](d0)
        d = Mul(d0, d1)
        s0 = GlobalAveragePool(d)
        s1 = Conv(s0, ws, cs)
        s2 = Relu(s1)
        s3 = Conv(s2, we, ce)
        s = HardSigmoid[alpha=0.166667, beta=0.5](s3)
        e = Mul(d, s)
        o = Conv(e, w2)
        y = Add(x, o)";
    check("x[1 8 6 6]", "y[1 8 6 6]", statements, (7, 0));
}

#[test]
fn a_pyramid_of_features() {
    let statements = "
        w1 = weights[8 6 1 1]
        w2 = weights[8 12 1 1]
        w3 = weights[8 8 3 3]
        sizes = numbers[1 8 8 8]
        a = Conv(x, w1)
        b0 = Conv(z, w2)
        b = Resize[mode=nearest, coordinate_transformation_mode=asymmetric, nearest_mode=floor](b0, , , sizes)
        s = Add(a, b)
        o0 = Conv[pads=1 1 1 1](s, w3)
        o = Relu(o0)
        y = Concat[axis=1](o, b)";
    check("x[1 6 8 8], z[1 12 4 4]", "y[1 16 8 8]", statements, (4, 0));
}

#[test]
fn a_head_of_yolo() {
    let statements = "
        w = weights[14 8 1 1]
        c = weights[14]
        apart = numbers[1 2 7 4 4]
        grid = weights[1 1 4 4 2]
        sizes = weights[1 2 1 1 2]
        two = number[2.0]
        stride = number[8.0]
        parts = numbers[2 2 3]
        flat = numbers[1 32 7]
        h0 = Conv(x, w, c)
        h1 = Reshape(h0, apart)
        h2 = Transpose[perm=0 1 3 4 2](h1)
        h = Sigmoid(h2)
        a0, b0, d = Split[axis=4](h, parts)
        a1 = Mul(a0, two)
        a2 = Add(a1, grid)
        a = Mul(a2, stride)
        b1 = Mul(b0, two)
        b2 = Pow(b1, two)
        b = Mul(b2, sizes)
        o = Concat[axis=4](a, b, d)
        y = Reshape(o, flat)";
    check("x[1 8 4 4]", "y[1 32 7]", statements, (6, 0));
}

#[test]
fn depth_to_space_as_an_operator_and_as_moves() {
    let statements = "
        w = weights[12 4 3 3]
        apart = numbers[1 3 2 2 5 5]
        whole = numbers[1 3 10 10]
        a0 = Conv[pads=1 1 1 1](x, w)
        a1 = DepthToSpace[blocksize=2, mode=CRD](a0)
        b1 = Reshape(a0, apart)
        b2 = Transpose[perm=0 1 4 2 5 3](b1)
        b = Reshape(b2, whole)
        d = Add(a1, b)
        y = Tanh(d)";
    check("x[1 4 5 5]", "y[1 3 10 10]", statements, (4, 0));
}

#[test]
fn a_skip_of_a_u_net() {
    let statements = "
        w1 = weights[8 3 3 3]
        w2 = weights[16 8 3 3]
        wt = weights[16 8 2 2]
        w3 = weights[4 16 3 3]
        a0 = Conv[pads=1 1 1 1](x, w1)
        a = Relu(a0)
        p = MaxPool[kernel_shape=2 2, strides=2 2](a)
        b0 = Conv[pads=1 1 1 1](p, w2)
        b = Relu(b0)
        u = ConvTranspose[strides=2 2, kernel_shape=2 2](b, wt)
        j = Concat[axis=1](a, u)
        o = Conv[pads=1 1 1 1](j, w3)
        y = Sigmoid(o)";
    check("x[1 3 8 8]", "y[1 4 8 8]", statements, (5, 0));
}

#[test]
fn attention_with_relative_places() {
    let statements = "
        wq = weights[16 16]
        wk = weights[16 16]
        wv = weights[16 16]
        table = weights[7 2]
        buckets = integers[6 6]
        front = numbers[0]
        q0 = MatMul(x, wq)
        q1 = Reshape(q0, of_heads)
        q = Transpose[perm=0 2 1 3](q1)
        k0 = MatMul(x, wk)
        k1 = Reshape(k0, of_heads)
        k = Transpose[perm=0 2 3 1](k1)
        v0 = MatMul(x, wv)
        v1 = Reshape(v0, of_heads)
        v = Transpose[perm=0 2 1 3](v1)
        b0 = Gather(table, buckets)
        b1 = Transpose[perm=2 0 1](b0)
        b = Unsqueeze(b1, front)
        s0 = MatMul(q, k)
        s1 = Add(s0, b)
        s = Softmax[axis=-1](s1)
        a0 = MatMul(s, v)
        a1 = Transpose[perm=0 2 1 3](a0)
        y = Reshape(a1, of_rows)";
    check("x[1 6 16]", "y[1 6 16]", &format!("{HEADS}{statements}"), (4, 0));
}

#[test]
fn windows_of_swin_behind_a_roll() {
    let statements = "
        two = numbers[2]
        begin = numbers[0]
        end = numbers[9]
        rows = numbers[1]
        columns = numbers[2]
        apart = numbers[1 2 4 2 4 6]
        windows = numbers[4 16 6]
        w = weights[6 6]
        back = numbers[1 2 2 4 4 6]
        image = numbers[1 8 8 6]
        a0 = Slice(x, two, end, rows)
        a1 = Slice(x, begin, two, rows)
        a = Concat[axis=1](a0, a1)
        b0 = Slice(a, two, end, columns)
        b1 = Slice(a, begin, two, columns)
        b = Concat[axis=2](b0, b1)
        c0 = Reshape(b, apart)
        c1 = Transpose[perm=0 1 3 2 4 5](c0)
        c = Reshape(c1, windows)
        d = MatMul(c, w)
        k = Transpose[perm=0 2 1](c)
        s0 = MatMul(d, k)
        s = Softmax[axis=-1](s0)
        o0 = MatMul(s, d)
        o1 = Reshape(o0, back)
        o2 = Transpose[perm=0 1 3 2 4 5](o1)
        o = Reshape(o2, image)
        y = Add(x, o)";
    check("x[1 8 8 6]", "y[1 8 8 6]", statements, (10, 2));
}

#[test]
fn convolutions_at_several_dilations() {
    let statements = "
        w1 = weights[4 6 1 1]
        w2 = weights[4 6 3 3]
        w3 = weights[4 6 3 3]
        wt = weights[12 3 3 3]
        a0 = Conv(x, w1)
        a = Relu(a0)
        b0 = Conv[pads=2 2 2 2, dilations=2 2](x, w2)
        b = Relu(b0)
        c0 = Conv[pads=3 3 3 3, dilations=3 3](x, w3)
        c = Relu(c0)
        j = Concat[axis=1](a, b, c)
        y = ConvTranspose[strides=2 2, pads=1 1 1 1, output_padding=1 1](j, wt)";
    check("x[1 6 7 7]", "y[1 3 14 14]", statements, (4, 0));
}

#[test]
fn norms_of_instances_and_leaks_by_channel() {
    let statements = "
        w1 = weights[8 3 3 3]
        g = weights[8]
        b = weights[8]
        w2 = weights[8 8 3 3]
        slope = weights[8 1 1]
        a0 = Conv[pads=1 1 1 1](x, w1)
        a1 = InstanceNormalization(a0, g, b)
        a = LeakyRelu[alpha=0.2](a1)
        d = Conv[pads=1 1 1 1](a, w2)
        y = PRelu(d, slope)";
    check("x[1 3 6 6]", "y[1 8 6 6]", statements, (4, 0));
}

#[test]
fn a_tagger_of_both_directions() {
    let statements = "
        table = weights[7 6]
        w = weights[2 20 6]
        r = weights[2 20 5]
        b = weights[2 40]
        turn = numbers[9 1 10]
        wo = weights[10 4]
        co = weights[4]
        e = Gather(table, ids)
        h0, _h, _c = LSTM[hidden_size=5, direction=bidirectional](e, w, r, b)
        h1 = Transpose[perm=0 2 1 3](h0)
        h = Reshape(h1, turn)
        o0 = MatMul(h, wo)
        o = Add(o0, co)
        y = LogSoftmax[axis=-1](o)";
    check("ids[9 1]", "y[9 1 4]", statements, (16, 0));
}

#[test]
fn a_gated_unit_that_resets_behind_its_product() {
    let statements = "
        w = weights[1 15 6]
        r = weights[1 15 5]
        b = weights[1 30]
        h0, last = GRU[hidden_size=5, linear_before_reset=1](x, w, r, b, , first)
        axis = numbers[1]
        h = Squeeze(h0, axis)
        y = Tanh(h)";
    check("x[9 1 6], first[1 1 5]", "y[9 1 5], last[1 1 5]", statements, (6, 1));
}

#[test]
fn a_block_of_a_conformer() {
    let statements = "
        g1 = weights[8]
        b1 = weights[8]
        w1 = weights[8 16]
        w2 = weights[16 8]
        half = number[0.5]
        g2 = weights[8]
        b2 = weights[8]
        wp = weights[16 8 1]
        cp = weights[16]
        wd = weights[8 1 5]
        gn = weights[8]
        bn = weights[8]
        mn = weights[8]
        wo = weights[8 8 1]
        n1 = LayerNormalization[axis=-1](x, g1, b1)
        f0 = MatMul(n1, w1)
        f1 = Sigmoid(f0)
        f2 = Mul(f0, f1)
        f3 = MatMul(f2, w2)
        f4 = Mul(f3, half)
        r = Add(x, f4)
        n2 = LayerNormalization[axis=-1](r, g2, b2)
        t = Transpose[perm=0 2 1](n2)
        p = Conv(t, wp, cp)
        pa, pb = Split[axis=1](p)
        pc = Sigmoid(pb)
        pd = Mul(pa, pc)
        d0 = Conv[group=8, pads=2 2](pd, wd)
        v = Mul(mn, mn)
        d1 = BatchNormalization(d0, gn, bn, mn, v)
        d2 = Sigmoid(d1)
        d = Mul(d1, d2)
        o0 = Conv(d, wo)
        o = Transpose[perm=0 2 1](o0)
        y = Add(r, o)";
    check("x[1 10 8]", "y[1 10 8]", statements, (9, 0));
}

#[test]
fn layers_that_differ_by_learned_numbers_are_one_task() {
    let statements = "
        v = weights[8 8 3 3]
        w = weights[8 8 3 3]
        fv = number[0.65]
        tv = number[-0.1]
        fw = number[1.3]
        tw = number[0.2]
        a0 = Conv[pads=1 1 1 1](x, v)
        a1 = Relu(a0)
        a2 = Mul(a1, fv)
        a = Add(a2, tv)
        b0 = Conv[pads=1 1 1 1](a, w)
        b1 = Relu(b0)
        b2 = Mul(b1, fw)
        y = Add(b2, tw)";
    let (x, y) = ("x[1 8 6 7]", "y[1 8 6 7]");
    assert_eq!(check(x, y, statements, (2, 0)), 2);
    let fused =
        lower(&specialise(&graph_of(x, y, statements), &Bindings::default()).graph, false, &crate::host::target(), 1)
            .unwrap();
    assert_eq!(fused.tasks().iter().map(|(_, n)| *n).collect::<Vec<_>>(), [2], "{:?}", fused.tasks());
}

/// Cells, directions, batches and lengths of sequences, with first states, clipping and peepholes.
#[test]
fn recurrent_networks_of_all_kinds_and_lengths() {
    for batch in [1, 2] {
        for direction in ["forward", "reverse", "bidirectional"] {
            for (cell, gates, more) in [
                ("RNN", 1, ""),
                ("GRU", 3, ""),
                ("GRU", 3, ", linear_before_reset=1"),
                ("LSTM", 4, ""),
                ("LSTM", 4, ", input_forget=1, clip=0.4"),
                ("com.microsoft.LSTM", 4, ""),
            ] {
                let n_kernels = [1, 2, 3, 5].map(|steps| {
                    println!("{cell} {direction}{more}: {steps} steps, batch {batch}");
                    check_recurrent((cell, gates, more), direction, (batch, ""), steps)
                });
                assert_eq!(n_kernels[2], n_kernels[3], "a longer sequence has no more kernels");
            }
        }
    }
}

/// All activations, with their parameters.
#[test]
fn recurrent_networks_have_activations_of_their_own() {
    let parameters = "activation_alpha=0.3 0.5 0.25 0.75, activation_beta=0.4 0.125 2.0";
    for (cell, names) in [
        (("LSTM", 4), "HardSigmoid Softsign Affine Sigmoid ScaledTanh LeakyRelu"),
        (("LSTM", 4), "Sigmoid Softplus Elu Tanh ThresholdedRelu Relu"),
        (("GRU", 3), "HardSigmoid LeakyRelu Sigmoid Affine"),
    ] {
        println!("{cell:?} of {names}");
        let more = format!(", activations={names}, {parameters}");
        check_recurrent((cell.0, cell.1, &more), "bidirectional", (2, ""), 4);
    }
}

/// 8-bit weights are multiplied as integers with the levels of inputs and states, if they fit i8 after
/// subtraction of their zero points; otherwise rounded numbers are multiplied.
#[test]
fn dynamically_quantized_lstms_multiply_integers() {
    let has_dots = crate::host::target().dot4_lanes([false, true]) > 0;
    for (direction, n) in [("reverse", 1), ("bidirectional", 2)] {
        for (zeros, scales, is_of_integers) in [("zeros", "", true), ("zeros", " 20", true), ("bytes", "", false)] {
            let statements = format!(
                "w = bytes[{n} 6 20]
                r = bytes[{n} 5 20]
                b = weights[{n} 40]
                sw = scales[{n}{scales}]
                sr = scales[{n}{scales}]
                z = {zeros}[{n}{scales}]
                y, h, c = com.microsoft.DynamicQuantizeLSTM[hidden_size=5, direction={direction}]\
                (x, w, r, b, , first, before, , sw, z, sr, z)"
            );
            println!("{statements}");
            let inputs = format!("x[4 2 6], first[{n} 2 5], before[{n} 2 5]");
            let outputs = format!("y[4 {n} 2 5], h[{n} 2 5], c[{n} 2 5]");
            check(&inputs, &outputs, &statements, (50, 10));
            let graph = graph_of(&inputs, &outputs, &statements);
            let compiled = compiled(&specialise(&graph, &Bindings::default()).graph).unwrap();
            let tasks: Vec<String> = compiled.steps().into_iter().map(|step| step.workload).collect();
            let multiplies = tasks.iter().any(|task| task.contains("dtype=u8i8"));
            assert_eq!(multiplies, is_of_integers && has_dots, "{tasks:?}");
        }
    }
}

/// After the end of a sequence, states stay constant, and the outputs of steps are zero.
#[test]
fn sequences_of_a_batch_have_lengths() {
    for cell in [("RNN", 1, ""), ("GRU", 3, ""), ("GRU", 3, ", linear_before_reset=1"), ("LSTM", 4, "")] {
        for steps in [3, 4] {
            println!("{cell:?}: {steps} steps");
            check_recurrent(cell, "bidirectional", (2, "lengths"), steps);
        }
    }
    check_recurrent(("com.microsoft.LSTM", 4, ""), "forward", (2, "lengths"), 4);
}

fn check_recurrent(
    (cell, gates, more): (&str, i64, &str),
    direction: &str,
    (batch, lengths): (i64, &str),
    steps: i64,
) -> usize {
    let n = if direction == "bidirectional" { 2 } else { 1 };
    let (state, rows) = (format!("[{n} {batch} 5]"), gates * 5);
    let (peepholes, before, cells, c) = match cell.ends_with("LSTM") {
        true => (", before, peeps", format!(", before{state}"), format!(", c{state}"), ", c"),
        false => ("", String::new(), String::new(), ""),
    };
    let statements = format!(
        "w = weights[{n} {rows} 3]
        r = weights[{n} {rows} 5]
        b = weights[{n} {}]
        peeps = weights[{n} 15]
        y, h{c} = {cell}[hidden_size=5, direction={direction}{more}](x, w, r, b, {lengths}, first{peepholes})
        _all, last = {cell}[hidden_size=5, direction={direction}{more}](x, w, r, , {lengths})",
        2 * rows
    );
    let of_lengths = if lengths.is_empty() { String::new() } else { format!(", {lengths}[{batch}]") };
    let inputs = format!("x[{steps} {batch} 3], first{state}{before}{of_lengths}");
    let outputs = format!("y[{steps} {n} {batch} 5], h{state}{cells}, last{state}");
    check(&inputs, &outputs, &statements, (40, 10))
}
