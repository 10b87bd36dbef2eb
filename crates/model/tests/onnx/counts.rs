//! Parts of models whose shapes depend on the data, with any number of rows.

use tilewright::Records;
use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Tensor, evaluate, specialise};
use tilewright_model::{CompileOptions, PartOptions, PartRunner};
use tilewright_runtime::SharedPool;

use crate::blocks::{graph_at, graph_of};
use crate::common::agree;
use crate::open::is_near;

/// Rows whose number depends on the data pass a product, a convolution and a normalization, and as the
/// elements of a signal another convolution: after two different numbers, each has one kernel for any number,
/// and another one if there are more rows than it has room for.
#[test]
fn counts_of_the_data_share_kernels() {
    const ROWS: usize = 130;
    let statements = "
        w1 = weights[300 256]
        w2 = weights[8 4 3 3]
        g = weights[300]
        o = weights[300]
        w3 = weights[96 256 3]
        order = numbers[-1 4 8 8]
        first = numbers[0]
        found = NonZero(keep)
        places = Transpose[perm=1 0](found)
        rows = GatherND(x, places)
        a0 = Gemm[transB=1](rows, w1)
        a = Relu(a0)
        y = LayerNormalization(a, g, o)
        images = Reshape(rows, order)
        z = Conv[pads=1 1 1 1](images, w2)
        lines = Transpose[perm=1 0](rows)
        signal = Unsqueeze(lines, first)
        s = Conv[pads=1 2](signal, w3)";
    let graph = graph_of(&format!("x[{ROWS} 256], keep[{ROWS}]"), "y[n 300], z[n 8 8 8], s[1 96 m]", statements);
    let part = specialise(&graph, &Bindings::default()).dynamic.unwrap();
    let (pool, records) = (SharedPool::new(1).unwrap(), Records::default());
    let making = CompileOptions::default();
    let options = PartOptions { target: &host::target(), pool: &pool, threads: 1, records: &records, making };
    let mut runner = PartRunner::new(&part, options);
    let x: Vec<f64> = (0..ROWS * 256).map(|at| ((at * 37) % 101) as f64 / 50.0 - 1.0).collect();
    let mut n_compiled = Vec::new();
    for (seed, n) in [20, 33, 64, 1, 0, 50, 7, 130, 2, 129, 100, 3, 0, 63].into_iter().enumerate() {
        let keep: Vec<f64> = (0..ROWS).map(|at| f64::from(u8::from((at * 7 + seed) % ROWS < n))).collect();
        let given = [Tensor::from_floats(DType::F32, [ROWS, 256], &x), Tensor::from_floats(DType::F32, [ROWS], &keep)];
        let named: Vec<(&str, Tensor)> = ["x", "keep"].into_iter().zip(given.iter().cloned()).collect();
        let ahead = evaluate(&part.ahead, &named).unwrap();
        let wanted = part.evaluate(&ahead).unwrap();
        let found = runner.run(&ahead).unwrap();
        for ((name, found), (_, wanted)) in found.iter().zip(&wanted) {
            assert_eq!(found.ty(), wanted.ty(), "{name}");
            assert!(n == 0 || is_near(found, wanted), "{n} {name}: {:?}", agree(found, wanted));
        }
        n_compiled.push(runner.n_compiled());
    }
    let (first, last) = (n_compiled[0], n_compiled[n_compiled.len() - 1]);
    assert!(first >= 1 && n_compiled[2..7] == [n_compiled[2]; 5] && n_compiled[7..] == [last; 7], "{n_compiled:?}");
}

/// Edges of a graph network without those from a node to itself, with one of each node's own behind them.
const EDGES: &str = "
    zero = integer[0]
    one = integer[1]
    last = numbers[1]
    none = number[0.0]
    full = number[1.0]
    from = Gather(ids, zero)
    to = Gather(ids, one)
    same = Equal(from, to)
    differ = Not(same)
    found = NonZero(differ)
    turned = Transpose[perm=1 0](found)
    kept = Squeeze(turned, last)
    edges = Gather[axis=1](ids, kept)
    loops = integers[2 7]
    all = Concat[axis=1](edges, loops)
    a = Gather(all, zero)
    b = Gather(all, one)
    rows = Gather(x, a)
    gate = Sigmoid(rows)
    sent = Mul(rows, gate)
    wide = Shape(sent)
    column = Unsqueeze(b, last)
    places = Expand(column, wide)
    zeros = Mul(x, none)
    y = ScatterElements[reduction=add](zeros, places, sent)
    n = Shape(b)
    ones = Expand(full, n)
    first = Gather[axis=1](zeros, zero)
    degrees = ScatterElements[reduction=add](first, b, ones)";

/// Rows that a condition chooses, and whose results are added up by index, are all rows: the shapes are known
/// then. Where that would make a difference, the graph is divided.
#[test]
fn chosen_rows_that_are_added_up_are_all_rows() {
    let special = |sizes: &[(&str, usize)], inputs: &str, outputs: &str, statements: &str| {
        let graph = graph_at(18, inputs, outputs, statements);
        let dims = sizes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        let open = sizes.first().map(|(name, _)| (*name).to_owned());
        let special = specialise(&graph, &Bindings { dims, open, most_conditions: usize::MAX, ..Bindings::default() });
        (graph, special)
    };
    let experts = "
        zero = integer[0]
        one = integer[1]
        last = numbers[1]
        none = number[0.0]
        w = weights[7 7]
        is_chosen = Greater(shares, none)
        found = NonZero(is_chosen)
        which = Gather(found, zero)
        token = Gather(found, one)
        places = Unsqueeze(token, last)
        rows = GatherND(x, places)
        made = MatMul(rows, w)
        places2 = Transpose[perm=1 0](found)
        share = GatherND(shares, places2)
        column = Unsqueeze(share, last)
        parts = Mul(made, column)
        zeros = Mul(x, none)
        y = ScatterND[reduction=add](zeros, places, parts)
        is_more = Greater(x, none)
        more = NonZero(is_more)
        cells = Transpose[perm=1 0](more)
        cell = GatherND(x, cells)
        square = Mul(cell, cell)
        r = ScatterND(x, cells, square)
        least = ReduceMin[keepdims=0](square)";
    let edges = |n: usize| (vec![("e", n)], "x[7 4], ids[2 e]", "y[7 4], degrees[7]", EDGES);
    for (sizes, inputs, outputs, statements) in [
        edges(1),
        edges(9),
        (vec![], "x[5 7], shares[2 5]", "y[5 7], r[5 7], least", experts),
        (vec![("t", 4)], "x[t 7], shares[2 t]", "y[t 7]", experts),
    ] {
        let (graph, special) = special(&sizes, inputs, outputs, statements);
        assert!(special.problems.is_empty(), "{}", special.problems[0]);
        for seed in 0..3 {
            let given = crate::open::inputs(&special.graph, seed, None);
            let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
            let [found, wanted] = [&special.graph, &graph].map(|graph| evaluate(graph, &named).unwrap());
            found.iter().zip(&wanted).for_each(|(found, wanted)| agree(found, wanted).unwrap());
        }
    }
    for (outputs, statements) in [
        ("sent[n 4]", EDGES.to_owned()),
        ("mean", format!("{EDGES}\nmean = ReduceMean[keepdims=0](sent)")),
        ("counted[1]", format!("{EDGES}\nmany = Shape[start=1](found)\ncounted = Neg(many)")),
        ("top[2 4]", format!("{EDGES}\nk = numbers[2]\ntop, at = TopK[axis=0](sent, k)")),
    ] {
        let (_, special) = special(&[], "x[7 4], ids[2 9]", outputs, &statements);
        assert!(special.dynamic.is_some(), "{outputs}");
    }
}
