//! Convolutions of quantized tensors, against sums of integers.

use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Graph, Tensor, evaluate, specialise};
use tilewright_ir::Target;
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use super::{integers, multiplies_bytes, node, scale, targets, zero};
use crate::{compiled_file, compiled_for, graph_of};

/// Convolutions of integers, of 72 channels, the second one in groups of `width`.
pub fn bottleneck(x: &Tensor, width: usize) -> Graph {
    let bytes = |shape: [usize; 4], step: i128| {
        let n = shape.iter().product::<usize>() as i128;
        Tensor::from_integers(DType::I8, shape, &(0..n).map(|at| at * step % 255 - 127).collect::<Vec<_>>())
    };
    let number = |x: f64| Tensor::from_floats(DType::F32, [0; 0], &[x]);
    let known = [
        ("w0", bytes([72, 16, 1, 1], 89)),
        ("w1", bytes([72, width, 3, 3], 61)),
        ("w2", bytes([16, 72, 1, 1], 37)),
        ("step", number(0.02)),
        ("less", number(1.374_13e-4)),
        ("zero", Tensor::from_integers(DType::U8, [0; 0], &[120])),
    ];
    let to_f32 = || Some(("to", Attribute::Int(1)));
    let nodes: &[crate::Node] = &[
        ("q0", "QuantizeLinear", &["x", "step", "zero"], None),
        ("i0", "ConvInteger", &["q0", "w0", "zero"], None),
        ("f0", "Cast", &["i0"], to_f32()),
        ("s0", "Mul", &["f0", "less"], None),
        ("q1", "QuantizeLinear", &["s0", "step", "zero"], None),
        ("i1", "ConvInteger", &["q1", "w1", "zero"], Some(("group", Attribute::Int(72 / width as i64)))),
        ("f1", "Cast", &["i1"], to_f32()),
        ("s1", "Mul", &["f1", "less"], None),
        ("q2", "QuantizeLinear", &["s1", "step", "zero"], None),
        ("i2", "ConvInteger", &["q2", "w2", "zero"], None),
        ("y", "Cast", &["i2"], to_f32()),
    ];
    graph_of(("x", x), ("y", &[1, 16, 5, 6]), &known, nodes)
}

/// Channels that are added to whole blocks, and groups that are merged, change no result.
#[test]
fn convolutions_of_bytes_in_groups_have_whole_blocks_of_channels() {
    let numbers: Vec<f64> = (0..16 * 7 * 8).map(|at| f64::from((at * 37 % 101) as f32 / 40.0 - 1.2)).collect();
    let x = Tensor::from_floats(DType::F32, [1, 16, 7, 8], &numbers);
    for (width, added) in [
        (1, "depthwise_conv2d:c=80,"),
        (4, "conv2d:c=80,h=7,w=8,k=80,r=3,s=3,groups=5,"),
        (8, "conv2d:c=80,h=7,w=8,k=80,r=3,s=3,groups=5,"),
        (24, "conv2d:c=96,h=7,w=8,k=96,r=3,s=3,groups=2,"),
    ] {
        let graph = bottleneck(&x, width);
        let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
        let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
        assert!(labels.iter().any(|label| label.starts_with(added)), "{labels:?}");
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        assert_eq!(runner.outputs()[0].1.floats(), evaluate(&graph, &[("x", x.clone())]).unwrap()[0].floats());
    }
}

/// Convolutions of all kinds between quantizations, padded with zero points, compared with sums of integers.
#[test]
fn convolutions_of_integers_give_what_integers_say() {
    for target in targets() {
        check_convolutions(&target, [i128::MIN, i128::MAX]);
        check_convolutions(&target, [-64, 64]);
    }
}

fn check_convolutions(target: &Target, [least_weight, most_weight]: [i128; 2]) {
    // Input channels, rows and columns, filters, their rows and columns, stride, padding and groups.
    let cases = [
        [16, 8, 9, 32, 3, 3, 1, 1, 1],
        [3, 13, 12, 16, 7, 7, 2, 3, 1],
        [32, 7, 7, 48, 1, 1, 1, 0, 1],
        [32, 9, 9, 32, 3, 3, 1, 1, 32],
        [32, 8, 8, 32, 3, 3, 2, 1, 32],
        [16, 9, 8, 16, 5, 5, 1, 2, 16],
        [16, 9, 10, 16, 7, 7, 2, 3, 16],
        [16, 6, 6, 16, 3, 3, 1, 1, 2],
        [32, 7, 6, 64, 3, 3, 2, 1, 8],
    ];
    for (at, [c, h, w, k, r, s, stride, pad, groups]) in cases.into_iter().enumerate() {
        for (dtype, is_operator) in [(DType::U8, false), (DType::I8, false), (DType::U8, true)] {
            let about = format!("case {at}, {dtype:?}, as one operator: {is_operator}, {}", target.name());
            let (least, most): (i64, i64) = if dtype == DType::U8 { (0, 255) } else { (-128, 127) };
            let x: Vec<f64> = (0..c * h * w).map(|at| ((at * 89 + 7) % 251) as f64 / 50.0 - 2.0).collect();
            let (scale, zero) = (0.02f32, least + 100);
            let bytes: Vec<i64> =
                x.iter().map(|&x| ((x as f32 / scale).round_ties_even() as i64 + zero).clamp(least, most)).collect();
            let of_group = c / groups;
            let weights = integers(k * of_group * r * s, -125).into_iter();
            let weights: Vec<i128> = weights.map(|w| w.clamp(least_weight, most_weight)).collect();
            // Behind a DequantizeLinear, weights may have negative scales, as NNCF writes them.
            let sign = |k: usize| if is_operator || !k.is_multiple_of(3) { 1.0 } else { -1.0 };
            let scales: Vec<f32> = (0..k).map(|k| sign(k) * (0.001 + 0.0001 * (k % 7) as f32)).collect();
            let bias = integers(k, -900);
            let (out_h, out_w) = ((h + 2 * pad - r) / stride + 1, (w + 2 * pad - s) / stride + 1);
            let (by, plus) = (0.3f32 * (of_group * r * s) as f32 / 30.0, least + 120);
            let mut expected = Vec::new();
            for (k, oh, ow) in (0..k * out_h * out_w).map(|at| (at / (out_h * out_w), at / out_w % out_h, at % out_w)) {
                let first = k / (cases[at][3] / groups) * of_group;
                let mut sum = bias[k] as i64;
                for (ch, i, j) in (0..of_group * r * s).map(|t| (t / (r * s), t / s % r, t % s)) {
                    let (row, column) = ((oh * stride + i).wrapping_sub(pad), (ow * stride + j).wrapping_sub(pad));
                    if row < h && column < w {
                        let weight = weights[((k * of_group + ch) * r + i) * s + j] as i64;
                        sum += (bytes[((first + ch) * h + row) * w + column] - zero) * weight;
                    }
                }
                let factor = scale * scales[k] / by;
                expected.push(((sum as f32 * factor).round_ties_even() as i64 + plus).clamp(least, most) as f64);
            }
            let floats = |numbers: &[f32]| {
                let numbers: Vec<f64> = numbers.iter().map(|&x| x.into()).collect();
                Tensor::from_floats(DType::F32, vec![numbers.len()], &numbers)
            };
            let one = |x: f32| Tensor::scalar(DType::F32, x.into());
            let point = |zero: i64| Tensor::from_integers(dtype, vec![], &[zero.into()]);
            let sums: Vec<f32> = scales.iter().map(|own| scale * own).collect();
            let known = [
                ("s", one(scale)),
                ("z", point(zero)),
                ("w", Tensor::from_integers(DType::I8, vec![k, of_group, r, s], &weights)),
                ("ws", floats(&scales)),
                ("wz", Tensor::from_integers(DType::I8, vec![k], &vec![0; k])),
                ("b", Tensor::from_integers(DType::I32, vec![k], &bias)),
                ("bs", floats(&sums)),
                ("ys", one(by)),
                ("yz", point(plus)),
            ];
            let node = |op: &str, inputs: &str, output: &str, attributes: &[(&str, Attribute)]| NodeFile {
                op: op.to_owned(),
                inputs: inputs.split(' ').map(str::to_owned).collect(),
                outputs: vec![output.to_owned()],
                attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
                ..NodeFile::default()
            };
            let windows = [
                ("strides", Attribute::Ints(vec![stride as i64; 2])),
                ("pads", Attribute::Ints(vec![pad as i64; 4])),
                ("group", Attribute::Int(groups as i64)),
            ];
            let along = [("axis", Attribute::Int(0))];
            let mut nodes = vec![node("QuantizeLinear", "x s z", "q", &[])];
            if is_operator {
                nodes.push(node("QLinearConv", "q s z w ws wz ys yz b", "y", &windows));
            } else {
                nodes.push(node("DequantizeLinear", "q s z", "a", &[]));
                nodes.push(node("DequantizeLinear", "w ws wz", "f", &along));
                nodes.push(node("DequantizeLinear", "b bs", "c", &along));
                nodes.push(node("Conv", "a f c", "o", &windows));
                nodes.push(node("QuantizeLinear", "o ys yz", "y", &[]));
            }
            let port = |name: &str, dtype: DType, dims: [usize; 4]| GraphPort {
                name: name.to_owned(),
                dtype,
                dims: dims.into_iter().map(Dim::Size).collect(),
            };
            let model = ModelFile {
                name: about.clone(),
                opset: 17,
                inputs: vec![port("x", DType::F32, [1, c, h, w])],
                outputs: vec![port("y", dtype, [1, k, out_h, out_w])],
                weights: known.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect(),
                nodes,
                ..ModelFile::default()
            };
            let compiled = compiled_file(&model, target);
            let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
            let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
            runner.set("x", &Tensor::from_floats(DType::F32, vec![1, c, h, w], &x)).unwrap();
            runner.run().unwrap();
            let found = runner.outputs()[0].1.floats();
            // If f32 is used, since it is faster, a sum may be rounded to the neighbouring step.
            let n_steps = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
            let is_near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1.0);
            let is_of = |types: &str| tasks.iter().any(|task| task.contains("conv2d") && task.contains(types));
            let is_exact = is_of("i8") || is_of("u8i7");
            let is_short = (least_weight, most_weight) == (-64, 64) && target.adds_pairs_of_bytes();
            assert_eq!(is_of("u8i7"), is_exact && is_short, "{about}: {tasks:?}");
            assert!(is_exact || !is_operator || !multiplies_bytes(target), "{about}: {tasks:?}");
            let closes = tasks.iter().any(|task| task.contains("conv2d") && task.contains("quant_"));
            assert_eq!(closes, is_exact, "{about}: {tasks:?}");
            assert!(is_near && (n_steps == 0 || !is_exact && n_steps < found.len() / 50), "{about}: {tasks:?}");
        }
    }
}

/// Depthwise convolutions of integers with per-channel scales, as NNCF writes them: both they and the
/// convolution before, which quantizes per channel, use integers.
#[test]
fn channels_of_activations_have_scales_of_their_own() {
    const C: usize = 16;
    const K: usize = 32;
    const H: usize = 6;
    // The first convolution ends with a clip at zero, or at bounds that some scales reach and some do not.
    for (dtype, high) in [(DType::U8, None), (DType::I8, None), (DType::U8, Some(2.5f32)), (DType::U8, Some(1.0))] {
        let (least, most): (i64, i64) = if dtype == DType::U8 { (0, 255) } else { (-128, 127) };
        let x = integers(C * H * H, 0);
        let (w1, w2, bias) = (integers(K * C, -125), integers(K * 9, -125), integers(K, -125));
        let (sx, sy, zx, zy) = (0.02f32, 0.15f32, 120i64, 100i64);
        let of_channel = |first: f32, k: usize| first * (1.0 + (k % 5) as f32);
        let [s1, s2, sm] = [0.0005, 0.003, 0.004].map(|first| move |k: usize| of_channel(first, k));
        let bias = |k: usize| bias[k] as f32 / 100.0;
        let mut middle = Vec::new();
        for (k, at) in (0..K * H * H).map(|at| (at / (H * H), at % (H * H))) {
            let sum: i64 = (0..C).map(|c| (x[c * H * H + at] as i64 - zx) * w1[k * C + c] as i64).sum();
            let number = (sum as f32 * (sx * s1(k)) + bias(k)).max(0.0).min(high.unwrap_or(f32::INFINITY));
            middle.push(((number / sm(k)).round_ties_even() as i64).clamp(least, most));
        }
        let mut expected = Vec::new();
        for (k, row, column) in (0..K * H * H).map(|at| (at / (H * H), at / H % H, at % H)) {
            let tap = |(i, j): (usize, usize)| {
                let (row, column) = ((row + i).wrapping_sub(1), (column + j).wrapping_sub(1));
                let is_inside = row < H && column < H;
                if is_inside { middle[(k * H + row) * H + column] * w2[k * 9 + i * 3 + j] as i64 } else { 0 }
            };
            let sum: i64 = (0..9).map(|at| tap((at / 3, at % 3))).sum();
            expected.push(((sum as f32 * (sm(k) * s2(k) / sy)).round_ties_even() as i64 + zy).clamp(0, 255));
        }
        let channels = |of: &dyn Fn(usize) -> f32| {
            Tensor::from_floats(DType::F32, vec![K], &(0..K).map(|k| of(k).into()).collect::<Vec<f64>>())
        };
        let mut weights = vec![
            ("w1".to_owned(), Tensor::from_integers(DType::I8, [K, C, 1, 1], &w1)),
            ("w2".to_owned(), Tensor::from_integers(DType::I8, [K, 1, 3, 3], &w2)),
            ("b".to_owned(), channels(&bias)),
            ("s1".to_owned(), channels(&s1)),
            ("s2".to_owned(), channels(&s2)),
            ("sm".to_owned(), channels(&sm)),
            ("zm".to_owned(), Tensor::from_integers(dtype, [K], &[0; K])),
            scale("sx", sx),
            scale("sy", sy),
            zero("zx", zx),
            zero("zy", zy),
            scale("low", 0.0),
        ];
        weights.extend(high.map(|high| scale("high", high)));
        let with = |node: NodeFile, attributes: &[(&str, Attribute)]| NodeFile {
            attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            ..node
        };
        let along = [("axis", Attribute::Int(0))];
        let windows = [("pads", Attribute::Ints(vec![1; 4])), ("group", Attribute::Int(K as i64))];
        let cut = if high.is_some() { node("Clip", "o low high", "r") } else { node("Relu", "o", "r") };
        let image = |name: &str, n: usize| GraphPort {
            name: name.to_owned(),
            dtype: DType::U8,
            dims: [1, n, H, H].into_iter().map(Dim::Size).collect(),
        };
        let model = ModelFile {
            name: "channels".to_owned(),
            opset: 17,
            inputs: vec![image("x", C)],
            outputs: vec![image("y", K)],
            weights,
            nodes: vec![
                node("DequantizeLinear", "x sx zx", "a"),
                with(node("DequantizeLinear", "w1 s1", "f"), &along),
                node("Conv", "a f b", "o"),
                cut,
                node("QuantizeLinear", "r sm zm", "q"),
                node("DequantizeLinear", "q sm zm", "d"),
                with(node("DequantizeLinear", "w2 s2", "g"), &along),
                with(node("Conv", "d g", "p"), &windows),
                node("QuantizeLinear", "p sy zy", "y"),
            ],
            ..ModelFile::default()
        };
        let compiled = compiled_file(&model, &host::target());
        let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
        if host::target().dot4_lanes([false, true]) > 0 {
            let of_integers = |task: &&String| task.contains("u8i8") && task.contains("quant_u8");
            assert_eq!(tasks.iter().filter(of_integers).count(), 2, "{tasks:?}");
        }
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &Tensor::from_integers(DType::U8, [1, C, H, H], &x)).unwrap();
        runner.run().unwrap();
        let found = runner.outputs()[0].1.i64s();
        // A non-integer bias is added in f32, where a sum may be rounded to the neighbouring step.
        let differ: Vec<(&i64, &i64)> = found.iter().zip(&expected).filter(|(a, b)| a != b).collect();
        let is_near = differ.iter().all(|(a, b)| (*a - *b).abs() <= 2) && differ.len() <= found.len() / 100;
        assert!(is_near, "{dtype:?} {high:?}: {differ:?}");
        assert!(expected.iter().any(|y| *y > zy + 20) && expected.iter().any(|y| *y < zy - 20), "{expected:?}");
    }
}
