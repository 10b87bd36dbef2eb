//! Products and convolutions of tensors that are quantized by their range at run time.

use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{DType, Dim, Tensor, evaluate};
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use super::{K, M, N, integers, node, port, scale, zero};
use crate::{compiled_file, read_back};

/// A NaN has no range: all results of dynamic quantization with a NaN are NaN, as in NumPy, and never zero.
#[test]
fn nan_is_not_lost_where_numbers_are_quantized_by_their_range() {
    let several = |op: &str, inputs: &str, outputs: &str| NodeFile {
        outputs: outputs.split(' ').map(str::to_owned).collect(),
        ..node(op, inputs, "")
    };
    let weights = Tensor::from_integers(DType::I8, [K, N], &integers(K * N, -125));
    let model = ModelFile {
        name: "by_range".to_owned(),
        opset: 17,
        inputs: vec![GraphPort { dtype: DType::F32, ..port("x", K) }],
        outputs: vec![GraphPort { dtype: DType::F32, ..port("y", N) }],
        weights: vec![("w".to_owned(), weights)],
        nodes: vec![
            several("DynamicQuantizeLinear", "x", "q s z"),
            node("MatMulInteger", "q w z", "sums"),
            NodeFile { attributes: vec![("to".to_owned(), Attribute::Int(1))], ..node("Cast", "sums", "f") },
            node("Mul", "f s", "y"),
        ],
        ..ModelFile::default()
    };
    let graph = read_back(&model);
    let compiled = compiled_file(&model, &host::target());
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    for at in [0, 1, 17, M * K - 1] {
        let mut numbers: Vec<f64> = (0..M * K).map(|at| (at % 23) as f64 / 7.0 - 1.0).collect();
        let finite = Tensor::from_floats(DType::F32, [M, K], &numbers);
        numbers[at] = f64::NAN;
        let x = Tensor::from_floats(DType::F32, [M, K], &numbers);
        let evaluated = evaluate(&graph, &[("x", x.clone())]).unwrap().remove(0).floats();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        for outputs in [&evaluated, &runner.outputs()[0].1.floats()] {
            assert!(outputs.iter().all(|y| y.is_nan()), "NaN at {at}: {outputs:?}");
        }
        runner.set("x", &finite).unwrap();
        runner.run().unwrap();
        assert!(runner.outputs()[0].1.floats().iter().all(|y| y.is_finite()), "none of {at} is left");
    }
}

/// Dynamically quantized convolutions over one and two dimensions, also depthwise ones and such in groups
/// with weights of 9 bits, round as often as the operators say. The range of an image that is not negative
/// begins at 0. Images of 72 channels have those that fill blocks: the ones that are read twice, and copies,
/// which change no range.
#[test]
fn dynamically_quantized_convolutions_round_as_their_operators_do() {
    for (spatial, c, width) in [(&[40][..], 32, 1), (&[6, 7], 32, 1), (&[6, 7], 72, 1), (&[6, 7], 72, 8)] {
        let known = |name: &str, tensor: Tensor| (name.to_owned(), tensor);
        let taps = vec![3; spatial.len()];
        let weights = |n_results: usize, channels: usize, step: i128| {
            let shape = [&[n_results, channels][..], &taps].concat();
            let n = shape.iter().product::<usize>() as i128;
            // Of 72 channels few have weights of 9 bits.
            let number = |at: i128| if channels == 72 && at % 1295 != 7 { at * step % 227 } else { at * step % 256 };
            Tensor::from_integers(DType::U8, shape, &(0..n).map(number).collect::<Vec<_>>())
        };
        let bias: Vec<f64> = (0..c).map(|at| f64::from((at as f32 - 11.3) / 7.0)).collect();
        let along = [&[1, c][..], &vec![1; spatial.len()]].concat();
        let image = |name: &str, c: usize| GraphPort {
            name: name.to_owned(),
            dtype: DType::F32,
            dims: [&[1, c][..], spatial].concat().into_iter().map(Dim::Size).collect(),
        };
        let ints = |numbers: &[i64]| Attribute::Ints(numbers.to_vec());
        let layer = |x: &str, at: usize, groups: i64| {
            let of = |name: &str| format!("{name}{at}");
            let [q, s, z, sums, whole, scale, scaled, y] = ["q", "s", "z", "i", "f", "m", "t", "y"].map(of);
            let outputs = vec![q.clone(), s.clone(), z.clone()];
            let attributes = vec![
                ("pads".to_owned(), ints(&vec![1; 2 * spatial.len()])),
                ("group".to_owned(), Attribute::Int(groups)),
            ];
            [
                NodeFile { outputs, ..node("DynamicQuantizeLinear", x, "") },
                NodeFile { attributes, ..node("ConvInteger", &format!("{q} w{at} {z} zw"), &sums) },
                NodeFile { attributes: vec![("to".to_owned(), Attribute::Int(1))], ..node("Cast", &sums, &whole) },
                node("Mul", &format!("{s} ws"), &scale),
                node("Mul", &format!("{whole} {scale}"), &scaled),
                node("Add", &format!("{scaled} bias"), &y),
            ]
        };
        let model = ModelFile {
            name: "dynamic".to_owned(),
            opset: 17,
            inputs: vec![image("x", 16)],
            outputs: vec![image("y2", c)],
            weights: vec![
                known("w0", weights(c, 16, 89)),
                known("w1", weights(c, width, 61)),
                known("w2", weights(c, c, 37)),
                known("bias", Tensor::from_floats(DType::F32, along, &bias)),
                scale("ws", 0.013),
                zero("zw", 100),
            ],
            nodes: [
                &layer("x", 0, 1)[..],
                &[node("Relu", "y0", "r")],
                &layer("r", 1, (c / width) as i64),
                &[node("Relu", "y1", "p")],
                &layer("p", 2, 1),
            ]
            .concat(),
            ..ModelFile::default()
        };
        let graph = read_back(&model);
        let compiled = compiled_file(&model, &host::target());
        let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
        let is_padded = labels.iter().any(|label| label.starts_with("conv2d:c=80,h=6,w=7,k=72"));
        assert!(c != 72 || width > 1 || is_padded, "{labels:?}");
        let shape = [&[1, 16][..], spatial].concat();
        let n = shape.iter().product::<usize>();
        let numbers: Vec<f64> = (0..n).map(|at| f64::from((at * 37 % 101) as f32 / 9.7 - 4.0)).collect();
        let x = Tensor::from_floats(DType::F32, shape, &numbers);
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        let expected = evaluate(&graph, &[("x", x)]).unwrap().remove(0).floats();
        assert_eq!(runner.outputs()[0].1.floats(), expected, "{spatial:?}");
    }
}
