//! Models with a net for each combination of sizes: the results are those of the model of these sizes,
//! regardless of earlier runs.

use std::collections::HashSet;
use std::ops::Range;

use tilewright_device::host;
use tilewright_graph::{Bindings, Graph, Tensor, evaluate, specialise};
use tilewright_model::{
    Compiled, Fused, OpenError, Runner, compile_guessed, lower, open_beside, open_or_repeat, open_sized,
};
use tilewright_runtime::{Constant, Context, OpenDimension, RunError, SharedPool};

use crate::blocks::graph_of;
use crate::common::agree;
use crate::open::{check_library_of, dim, inputs, is_near, run};

fn at(graph: &Graph, dims: &[OpenDimension], sizes: &[i64]) -> Graph {
    let dims = dims.iter().zip(sizes).map(|(dim, size)| (dim.name.clone(), *size as usize)).collect();
    let special = specialise(graph, &Bindings { dims, ..Bindings::default() });
    assert!(special.problems.is_empty(), "{sizes:?}: {}", special.problems[0]);
    special.graph
}

fn sized(graph: &Graph, dims: &[OpenDimension]) -> Result<Fused, OpenError> {
    open_sized(dims, |_| true, |sizes| Ok(lower(&at(graph, dims, sizes), false, &host::target(), 1).unwrap()))
}

/// Makes a net for any height, with one for each width, if there is such a dimension.
fn opened(graph: &Graph, dims: &[OpenDimension]) -> Result<Fused, OpenError> {
    let lowered = |sizes: &[i64]| Ok(lower(&at(graph, dims, sizes), false, &host::target(), 1).unwrap());
    match dims {
        [dim] => open_or_repeat(dim, |size| lowered(&[size])),
        _ => open_beside(dims, 0, |_| true, lowered),
    }
}

/// Checks a model at each combination of sizes, ascending and descending, some after runs at the largest
/// sizes that leave NaN in memory.
fn check(dims: &[OpenDimension], ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    check_made(&graph, sized(&graph, dims), dims);
}

/// Checks a model whose heights share steps, as [`check`] does.
fn check_opened(dims: &[OpenDimension], ports: [&str; 2], statements: &str) {
    let graph = graph_of(ports[0], ports[1], statements);
    let made = opened(&graph, dims);
    let compiled = check_made(&graph, made, dims);
    let members = compiled.model.plan().members.clone().unwrap();
    let n_widths = dims[1..].iter().map(|dim| (dim.most - dim.least) / dim.step + 1).product::<i64>();
    let steps: HashSet<Range<usize>> = members.each.iter().map(|member| member.steps.clone()).collect();
    assert_eq!(steps.len() as i64, n_widths, "heights have the same steps");
}

fn check_made(graph: &Graph, made: Result<Fused, OpenError>, dims: &[OpenDimension]) -> Compiled {
    let fused = made.unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    let model = compiled.model.cpu().unwrap();
    let members = model.plan().members.as_ref().unwrap();
    let mut context = Context::new(model, &SharedPool::new(1).unwrap()).unwrap();
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    let most: Vec<i64> = dims.iter().map(|dim| dim.most).collect();
    assert_eq!(context.member().unwrap().sizes, most, "the largest is the first");
    let largest = at(graph, dims, &most);
    let all = members.each.iter().map(|member| &member.sizes);
    for (seed, sizes) in all.clone().rev().chain(all).enumerate() {
        let set = |context: &mut Context, sizes: &[i64]| {
            dims.iter().zip(sizes).for_each(|(dim, size)| context.set_dim(&dim.name, *size).unwrap());
        };
        if seed % 3 == 0 {
            set(&mut context, &most);
            run(&mut context, &largest, &inputs(&largest, 1, Some(f64::NAN)));
        }
        set(&mut context, sizes);
        let own = at(graph, dims, sizes);
        let given = inputs(&own, seed as u64, None);
        let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
        let wanted = evaluate(&own, &named).unwrap();
        let found = run(&mut context, &own, &given);
        for (found, wanted) in found.iter().zip(&wanted) {
            assert!(is_near(found, wanted), "{sizes:?}: {:?}", agree(found, wanted));
        }
        // A runner takes sizes from the inputs.
        let values: Vec<_> = own.inputs.iter().map(|id| own.value(*id).clone()).collect();
        runner.set_all(&values.into_iter().zip(given.iter().map(|(_, x)| x.clone())).collect::<Vec<_>>()).unwrap();
        runner.run().unwrap();
        assert!(runner.outputs().iter().map(|(_, x)| x).eq(&found), "{sizes:?}: a runner makes other bits");
    }
    let before = context.member().cloned();
    for dim in dims {
        for wrong in [dim.least - 1, dim.most + 1, dim.most + dim.step, i64::MIN, i64::MAX] {
            let refused = context.set_dim(&dim.name, wrong);
            assert!(matches!(refused, Err(RunError::BadSize { most, .. }) if most == dim.most), "{wrong}");
        }
    }
    assert!(matches!(context.set_dim("other", 1), Err(RunError::NoDim { .. })));
    assert_eq!(context.member().cloned(), before);
    compiled
}

/// Network that reads lines of text: strided depthwise convolutions, a gate over the whole image, and rows of
/// scores.
const READER: &str = "
    w1 = weights[16 3 3 3]
    c1 = weights[16]
    w2 = weights[16 1 5 5]
    w3 = weights[32 16 1 1]
    c3 = weights[32]
    w4 = weights[8 32 1 1]
    w5 = weights[32 8 1 1]
    w6 = weights[32 7]
    places = numbers[1 32 -1]
    a0 = Conv[pads=1 1 1 1, strides=2 2](x, w1, c1)
    a = HardSwish(a0)
    b0 = Conv[group=16, pads=2 2 2 2, strides=2 1](a, w2)
    b = Relu(b0)
    d = Conv(b, w3, c3)
    s0 = GlobalAveragePool(d)
    s1 = Conv(s0, w4)
    s2 = Relu(s1)
    s3 = Conv(s2, w5)
    s = HardSigmoid(s3)
    e = Mul(d, s)
    p = AveragePool[kernel_shape=2 2, strides=2 2](e)
    m = MaxPool[kernel_shape=1 3, pads=0 1 0 1, strides=1 1](p)
    rows = Reshape(m, places)
    f = Transpose[perm=0 2 1](rows)
    g = MatMul(f, w6)
    y = Softmax[axis=-1](g)";

#[test]
fn widths_of_convolutions() {
    check(&[dim("width", 8, 40, 4)], ["x[1 3 8 width]", "y[1 t 7]"], READER);
}

#[test]
fn odd_widths_and_borders() {
    let statements = "
        w1 = weights[8 2 3 3]
        w2 = weights[8 8 3 3]
        wt = weights[8 4 4 4]
        a0 = Conv[auto_pad=SAME_UPPER, strides=2 2](x, w1)
        a = Relu(a0)
        b0 = Conv[pads=2 2 2 2, dilations=2 2](a, w2)
        b = Relu(b0)
        c = Concat[axis=1](a, b)
        d = MaxPool[kernel_shape=3 3, strides=2 2, ceil_mode=1, pads=1 1 1 1](b)
        e = ConvTranspose[strides=2 2, pads=1 1 1 1](b, wt)
        f = AveragePool[kernel_shape=3 3, pads=1 1 1 1](c)
        y = GlobalMaxPool(f)";
    check(&[dim("width", 5, 17, 1)], ["x[1 2 7 width]", "y[1 16 1 1], e[1 4 h w], d[1 8 u v]"], statements);
}

#[test]
fn lengths_of_frames() {
    let statements = "
        w1 = weights[8 3 5]
        w2 = weights[8 8 3]
        w3 = weights[8 1 3]
        g = weights[8]
        o = weights[8]
        a0 = Conv[pads=2 2, strides=3](x, w1)
        a = InstanceNormalization(a0, g, o)
        b0 = Conv[pads=4 4, dilations=4](a, w2)
        b = Relu(b0)
        c = Conv[pads=1 1, group=8](b, w3)
        d = Add(a, c)
        y = ReduceMean[axes=2, keepdims=0](d)";
    check(&[dim("length", 16, 40, 3)], ["x[1 3 length]", "y[1 8], d[1 8 n]"], statements);
}

/// Network that detects text: features of four scales, resized to one size, with gates over the whole image.
const DETECTOR: &str = "
    w1 = weights[24 3 3 3]
    c1 = weights[24]
    w2 = weights[16 24 2 2]
    w3 = weights[32 16 1 1]
    c3 = weights[32]
    w4 = weights[32 1 7 7]
    w5 = weights[32 32 3 3]
    w6 = weights[8 32 1 1]
    w7 = weights[32 8 1 1]
    w8 = weights[5 32 3 3]
    wt = weights[5 4 2 2]
    wu = weights[4 1 2 2]
    first = numbers[2]
    last = numbers[4]
    a0 = Conv[pads=1 1 1 1, strides=2 2](x, w1, c1)
    a = Relu(a0)
    b0 = Conv[auto_pad=SAME_UPPER](a, w2)
    b = Relu(b0)
    m = MaxPool[kernel_shape=2 2, auto_pad=SAME_UPPER](b)
    d0 = Conv(m, w3, c3)
    d = HardSwish(d0)
    e0 = Conv[pads=3 3 3 3, group=32](d, w4)
    e1 = Add(e0, d)
    s0 = ReduceMean[axes=2 3](e1)
    s1 = Conv(s0, w6)
    s2 = Relu(s1)
    s3 = Conv(s2, w7)
    s = HardSigmoid(s3)
    e = Mul(e1, s)
    f0 = Conv[pads=1 1 1 1, strides=2 2](e, w5)
    f = Relu(f0)
    all = Shape(e)
    image = Slice(all, first, last)
    channels = Shape[start=0, end=2](f)
    sizes = Concat[axis=0](channels, image)
    u = Resize[mode=nearest, coordinate_transformation_mode=asymmetric, nearest_mode=floor](f, , , sizes)
    j = Add(u, e)
    h0 = Conv[pads=1 1 1 1](j, w8)
    p = AveragePool[kernel_shape=3 3, pads=1 1 1 1, count_include_pad=1](h0)
    z = ConvTranspose[strides=2 2](p, wt)
    z1 = Relu(z)
    y = Sigmoid(z1)";

#[test]
fn heights_have_steps_in_common() {
    let ports = ["x[1 3 height width]", "y[1 1 height width], e[1 32 h w]"];
    check_opened(&[dim("height", 8, 56, 8), dim("width", 16, 32, 16)], ports, DETECTOR);
    let ports = ["x[1 3 height 24]", "y[1 1 height 24], e[1 32 h 12]"];
    check_opened(&[dim("height", 8, 136, 8)], ports, DETECTOR);
}

#[test]
fn libraries_of_heights_have_the_bits_of_runs() {
    let graph = graph_of("x[1 3 height width]", "y[1 1 height width]", DETECTOR);
    let dims = [dim("height", 8, 56, 8), dim("width", 16, 32, 16)];
    let runs = [[8, 16], [56, 32], [24, 32], [24, 16], [56, 16], [8, 32]];
    let runs = runs.map(|[height, width]| vec![("height", height), ("width", width)]);
    check_library_of(&graph, opened(&graph, &dims).unwrap(), &runs);
}

#[test]
fn heights_and_widths() {
    let statements = "
        w1 = weights[8 3 3 3]
        w2 = weights[16 8 3 3]
        w3 = weights[8 16 1 1]
        w4 = weights[4 16 3 3]
        wt = weights[4 1 2 2]
        first = numbers[2]
        last = numbers[4]
        step = numbers[1]
        a0 = Conv[pads=1 1 1 1, strides=2 2](x, w1)
        a = Relu(a0)
        b0 = Conv[pads=1 1 1 1, strides=2 2](a, w2)
        b = Relu(b0)
        t = Conv(b, w3)
        all = Shape(a)
        image = Slice(all, first, last)
        channels = Shape[start=0, end=2](t)
        sizes = Concat[axis=0](channels, image)
        u = Resize[mode=nearest, coordinate_transformation_mode=asymmetric, nearest_mode=floor](t, , , sizes)
        j = Concat[axis=1](a, u)
        h0 = Conv[pads=1 1 1 1](j, w4)
        h = Relu(h0)
        z = ConvTranspose[strides=2 2, kernel_shape=2 2](h, wt)
        y = Sigmoid(z)";
    let dims = [dim("height", 8, 24, 8), dim("width", 8, 32, 8)];
    check(&dims, ["x[1 3 height width]", "y[1 1 height width]"], statements);
}

#[test]
fn lengths_and_batches_of_recurrent_layers() {
    let statements = "
        w = weights[2 20 6]
        r = weights[2 20 5]
        b = weights[2 40]
        w2 = weights[1 15 10]
        r2 = weights[1 15 5]
        turn = numbers[0 0 -1]
        h0, _h, last = LSTM[hidden_size=5, direction=bidirectional](x, w, r, b)
        h1 = Transpose[perm=0 2 1 3](h0)
        h = Reshape(h1, turn)
        g, end = GRU[hidden_size=5](h, w2, r2)
        y = Tanh(g)";
    for dims in [vec![dim("steps", 1, 9, 1)], vec![dim("batch", 1, 4, 1)]] {
        let ports = match dims[0].name.as_str() {
            "steps" => ["x[steps 2 6]", "y[steps 1 2 5], last[2 2 5], end[1 2 5]"],
            _ => ["x[3 batch 6]", "y[3 1 batch 5], last[2 batch 5], end[1 batch 5]"],
        };
        check(&dims, ports, statements);
    }
}

#[test]
fn nets_share_their_weights() {
    let graph = graph_of("x[1 3 8 width]", "y[1 t 7]", READER);
    let n_bytes = |dim: OpenDimension| {
        let compiled = compile_guessed(sized(&graph, &[dim]).unwrap(), &host::target(), 1).unwrap();
        let constants = &compiled.model.plan().constants;
        let prepared = constants.iter().filter(|constant| matches!(constant, Constant::Prepared(_)));
        prepared.map(Constant::n_bytes).sum::<usize>()
    };
    let [few, many] = [dim("width", 36, 40, 4), dim("width", 8, 40, 4)].map(n_bytes);
    // Some of the nine widths may use another layout.
    assert!(many <= 2 * few, "{many} bytes of nine sizes, {few} of two");
}

#[test]
fn libraries_have_the_bits_of_runs() {
    let graph = graph_of("x[1 3 8 width]", "y[1 t 7]", READER);
    let dims = [dim("width", 8, 40, 4)];
    let runs = [8, 40, 24, 12, 36, 8].map(|size| vec![("width", size)]);
    check_library_of(&graph, sized(&graph, &dims).unwrap(), &runs);
}

#[test]
fn what_has_no_nets_is_refused() {
    let graph = graph_of("x[1 n]", "y[n]", "shape = numbers[-1]\ny = Reshape(x, shape)");
    let other = graph_of("x[1 2 n]", "y[2 n]", "shape = numbers[2 -1]\ny = Reshape(x, shape)");
    let mut first = true;
    let made = open_sized::<OpenError>(
        &[dim("n", 1, 2, 1)],
        |_| true,
        |sizes| {
            let graph = if std::mem::take(&mut first) { &graph } else { &other };
            Ok(lower(&at(graph, &[dim("n", 1, 2, 1)], sizes), false, &host::target(), 1).unwrap())
        },
    );
    let error = made.err().unwrap().to_string();
    assert!(error.contains("is not the same but for its sizes") && !error.contains('\n'), "{error}");
}
