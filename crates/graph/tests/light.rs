//! Topologies of nine real networks with generated weights, compared with ONNX Runtime.
//!
//! Four of them take some seconds; set `TILEWRIGHT_ALL_MODELS=1` to evaluate all nine.

mod common;

use std::collections::HashMap;
use std::time::Instant;

use common::{cases, light, no_files};
use tilewright_graph::{Bindings, evaluate, onnx, specialise, summarise};

#[test]
fn real_networks_compute_what_onnx_runtime_does() {
    let all = std::env::var_os("TILEWRIGHT_ALL_MODELS").is_some();
    let wanted = light::answers();
    let mut n_evaluated = 0;
    // Published GFLOP of convolutions and products.
    let known = HashMap::from([
        ("bvlc_alexnet", 1.31),
        ("densenet121", 5.67),
        ("inception_v1", 2.86),
        ("inception_v2", 4.04),
        ("resnet50", 8.18),
        ("shufflenet", 0.249),
        ("squeezenet", 0.698),
        ("vgg19", 39.3),
        ("zfnet512", 2.96),
    ]);
    for case in cases("light.cases.gz") {
        let model = onnx::read(&case.model, &mut no_files).expect("a model");
        // Weights are not folded: they take hundreds of megabytes.
        let special = specialise(&model.graph, &Bindings { fold_bytes: 1 << 8, ..Bindings::default() });
        assert!(special.problems.is_empty(), "{}: {}", case.name, special.problems[0]);
        let gflop = summarise(&special.graph).flops() as f64 / 1e9;
        assert!((gflop / known[case.name.as_str()] - 1.0).abs() < 0.01, "{}: {gflop} GFLOP", case.name);
        if !all && !["inception_v1", "resnet50", "shufflenet", "squeezenet"].contains(&case.name.as_str()) {
            continue;
        }
        let Some(wanted) = wanted.get(case.name.as_str()) else { panic!("{} is not in light.txt", case.name) };
        let start = Instant::now();
        let graph = light::with_weights(&special.graph);
        let (name, x) = light::input_of(&graph);
        let y = evaluate(&graph, &[(&name, x)]).unwrap_or_else(|e| panic!("{}: {e}", case.name))[0].floats();
        println!("{}: {:.2} GFLOP in {:.1} s", case.name, gflop, start.elapsed().as_secs_f64());
        light::check(&case.name, &y, wanted, 1e-4);
        n_evaluated += 1;
    }
    assert_eq!(n_evaluated, if all { 9 } else { 4 });
}
