//! Parts of models whose shapes depend on the data, with any number of rows.

use tilewright::Records;
use tilewright_device::host;
use tilewright_graph::{Bindings, DType, Tensor, evaluate, specialise};
use tilewright_model::{CompileOptions, PartOptions, PartRunner};
use tilewright_runtime::SharedPool;

use crate::blocks::graph_of;
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
