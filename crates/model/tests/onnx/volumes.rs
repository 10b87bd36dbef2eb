//! Three-dimensional convolutions, compared with the reference evaluator.

use tilewright_graph::{DType, Tensor};

use crate::by_both;
use crate::common::build::{Attr, single};

fn elements(shape: &[usize], step: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    Tensor::from_floats(DType::F32, shape, &(0..n).map(|at| (at * step % 23) as f64 / 9.7 - 1.1).collect::<Vec<_>>())
}

/// Convolutions with depth become convolutions of planes, those along only the depth convolutions of columns.
#[test]
fn volumes_are_convolved_by_planes() {
    // Images, channels, image, filters, their size, strides, dilations, borders and groups.
    type Case3 = (usize, usize, [usize; 3], usize, [usize; 3], [i64; 3], [i64; 3], [i64; 6], usize);
    let cases: [Case3; 7] = [
        (1, 16, [6, 9, 8], 32, [3, 3, 3], [1; 3], [1; 3], [1; 6], 1),
        (2, 3, [7, 8, 9], 8, [3, 3, 3], [2, 2, 1], [1; 3], [1, 0, 1, 0, 1, 1], 1),
        (1, 8, [9, 7, 6], 4, [2, 3, 1], [3, 1, 2], [2, 1, 1], [0, 1, 0, 3, 1, 0], 2),
        (2, 6, [8, 5, 4], 6, [3, 3, 3], [1; 3], [1; 3], [1; 6], 6),
        (1, 16, [4, 8, 8], 16, [1, 3, 3], [2, 1, 1], [1; 3], [0, 1, 1, 0, 1, 1], 1),
        (2, 16, [9, 6, 5], 24, [3, 1, 1], [2, 1, 1], [1; 3], [1, 0, 0, 1, 0, 0], 1),
        (1, 5, [3, 4, 4], 7, [1, 1, 1], [1; 3], [1; 3], [0; 6], 1),
    ];
    for (n, c, image, m, kernel, strides, dilations, pads, groups) in cases {
        for has_bias in [false, true] {
            let x = elements(&[&[n, c], &image[..]].concat(), 37);
            let w = elements(&[&[m, c / groups], &kernel[..]].concat(), 61);
            let attributes = [
                ("strides", Attr::Ints(strides.to_vec())),
                ("dilations", Attr::Ints(dilations.to_vec())),
                ("pads", Attr::Ints(pads.to_vec())),
                ("group", Attr::Int(groups as i64)),
            ];
            let bias = has_bias.then(|| elements(&[m], 5));
            let about = format!("{c} channels of {image:?} by {m} filters of {kernel:?} in {groups} groups");
            let tasks = check("Conv", &attributes, &[Some(x), Some(w), bias], &about);
            let has_windows = kernel != [1; 3];
            assert_eq!(tasks.iter().any(|task| task.contains("conv2d:")), has_windows, "{about}: {tasks:?}");
        }
    }
}

/// Transposed convolutions whose windows do not overlap become products, others do not.
#[test]
fn elements_that_become_blocks_are_one_product() {
    // Images, channels, image, filters of a group, strides, which are the windows' size, and groups.
    type Blocks = (usize, usize, &'static [usize], usize, &'static [i64], usize);
    let cases: [Blocks; 4] = [
        (1, 8, &[3, 4, 5], 4, &[2, 2, 2], 1),
        (2, 6, &[3, 4, 5], 2, &[1, 3, 2], 2),
        (2, 8, &[4, 5], 3, &[2, 3], 4),
        (1, 4, &[9], 2, &[4], 2),
    ];
    for (n, c, image, m, strides, groups) in cases {
        let kernel: Vec<usize> = strides.iter().map(|&n| n as usize).collect();
        let x = elements(&[&[n, c], image].concat(), 37);
        let w = elements(&[&[c, m], &kernel[..]].concat(), 61);
        let attributes = [("strides", Attr::Ints(strides.to_vec())), ("group", Attr::Int(groups as i64))];
        let about = format!("{c} channels of {image:?} in blocks of {kernel:?} in {groups} groups");
        let tasks = check("ConvTranspose", &attributes, &[Some(x), Some(w), Some(elements(&[m * groups], 5))], &about);
        assert_eq!(tasks.iter().filter(|task| task.contains("matmul:")).count(), 1, "{about}: {tasks:?}");
    }
    let pads = ("pads", Attr::Ints(vec![1, 0, 0, 0, 0, 0]));
    let inputs = [Some(elements(&[1, 4, 3, 4, 5], 37)), Some(elements(&[4, 2, 2, 2, 2], 61))];
    check("ConvTranspose", &[("strides", Attr::Ints(vec![2; 3])), pads], &inputs, "blocks that are cut off");
}

/// Checks an operator, and returns the workloads of its kernels.
fn check(op: &str, attributes: &[(&str, Attr)], inputs: &[Option<Tensor>], about: &str) -> Vec<String> {
    let (compiled, mut results) = by_both(about, single(op, 17, attributes, inputs, 1), inputs);
    let (found, expected) = results.remove(0);
    assert_eq!(found.ty(), expected.ty(), "{about}");
    let (found, expected) = (found.floats(), expected.floats());
    let most = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let error = found.iter().zip(&expected).fold(0.0f64, |error, (x, y)| error.max((x - y).abs()));
    assert!(error <= 2e-5 * most, "{about}: an error of {error} of {most}");
    compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect()
}
