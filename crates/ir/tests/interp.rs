//! Interpreter tests: results of small programs and every fault.

mod common;

use common::{Conv, arguments, conv2d, matmul, program, softmax};
use tilewright_ir::interp::{Fault, IterationPoint, run, run_limited};
use tilewright_ir::{Program, Stmt};

fn place(values: &[(&str, i64)]) -> IterationPoint {
    IterationPoint(values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect())
}

#[test]
fn matmul_is_the_matrix_product() {
    for (dtype, tolerance) in [("f32", 1e-5), ("f64", 1e-14)] {
        let (m, n, k) = (5, 7, 11);
        let program = matmul(dtype, m, n, k);
        let mut arguments = arguments(&program, 1);
        run(&program, &mut arguments).unwrap();
        let (m, n, k) = (m as usize, n as usize, k as usize);
        for i in 0..m {
            for j in 0..n {
                let expected = (0..k).map(|p| arguments[0][i * k + p] * arguments[1][p * n + j]).sum::<f64>();
                assert!((arguments[2][i * n + j] - expected).abs() < tolerance);
            }
        }
    }
}

#[test]
fn convolution_sees_zeros_around_the_input() {
    let program = conv2d(Conv { c: 1, h: 3, w: 3, k: 1, r: 3, stride: 1, pad: 1 });
    let x = (1..=9).map(f64::from).collect::<Vec<_>>();
    let mut arguments = vec![x, vec![1.0; 9], vec![0.5], vec![f64::NAN; 9]];
    run(&program, &mut arguments).unwrap();
    assert_eq!(arguments[3], [12.5, 21.5, 16.5, 27.5, 45.5, 33.5, 24.5, 39.5, 28.5]);
}

#[test]
fn softmax_rows_add_up_to_one() {
    let program = softmax(4, 9);
    let mut arguments = arguments(&program, 3);
    run(&program, &mut arguments).unwrap();
    for row in arguments[1].chunks(9) {
        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-6);
    }
}

/// Runs a body with buffers `X: f32[8]` (input), `Y: f32[8]` (output), `T: f32[4]` (temporary)
/// and loops i, j.
fn run_body(body: &str) -> Result<Vec<f64>, Fault> {
    let program = body_program(body);
    let mut arguments = vec![(0..8).map(|i| f64::from(i) + 0.1).collect(), vec![0.0; 8]];
    run_limited(&program, &mut arguments, 1000)?;
    Ok(arguments.swap_remove(1))
}

fn body_program(body: &str) -> Program {
    program(&format!(
        "program \"p\" buffer X: f32[8] global input buffer Y: f32[8] global output
        buffer T: f32[4] local temporary buffer W: f32[8] global kept loops i, j run {{ {body} }}"
    ))
}

fn f32s(values: [f32; 8]) -> Vec<f64> {
    values.map(f64::from).to_vec()
}

#[test]
fn every_operation_rounds_to_the_element_type() {
    let sum = run_body("for i in 8 { Y[i] = X[i] + 0.7 }").unwrap();
    assert_eq!(sum, f32s(std::array::from_fn(|i| i as f32 + 0.1 + 0.7)));
    let update = run_body("for i in 8 { for j in 3 { Y[i] += X[i] * X[j] first j == 0 } }").unwrap();
    let x: [f32; 8] = std::array::from_fn(|i| (i as f64 + 0.1) as f32);
    assert_eq!(update, f32s(std::array::from_fn(|i| x[i] * x[0] + x[i] * x[1] + x[i] * x[2])));
}

#[test]
fn functions_and_conditions() {
    let of_index = |f: fn(f64) -> f64| f32s(std::array::from_fn(|i| f(i as f64) as f32));
    type Case = (&'static str, fn(f64) -> f64);
    let cases: [Case; 14] = [
        ("index(2*i - 3)", |i| 2.0 * i - 3.0),
        ("index((i - 4) // 3)", |i| ((i - 4.0) / 3.0).floor()),
        ("index((i - 4) % 3)", |i| (i - 4.0).rem_euclid(3.0)),
        ("index(min(i, 7 - i) + max(i, 3))", |i| i.min(7.0 - i) + i.max(3.0)),
        ("exp(index(i))", |i| f64::from(i as f32).exp()),
        ("neg(abs(index(i - 4)))", |i| -(i - 4.0).abs()),
        ("sqrt(index(i))", f64::sqrt),
        ("tanh(index(i))", f64::tanh),
        ("log(index(i + 1))", |i| (i + 1.0).ln()),
        ("select(less(min(index(i), nan), 9.0), 1.0, 2.0)", |_| 2.0),
        ("select(i < 3, 1.0, 2.0)", |i| if i < 3.0 { 1.0 } else { 2.0 }),
        ("select(not(i == 3) && 1 < i, 1.0, 2.0)", |i| if i != 3.0 && i > 1.0 { 1.0 } else { 2.0 }),
        ("select(less(X[i], 4.0), 1.0, 2.0)", |i| if i < 4.0 { 1.0 } else { 2.0 }),
        ("select(i < 4, T[i], 0.0)", |i| if i < 4.0 { 5.0 } else { 0.0 }),
    ];
    for (value, expected) in cases {
        let y = run_body(&format!("alloc T for j in 4 {{ T[j] = 5.0 }} for i in 8 {{ Y[i] = {value} }}"));
        assert_eq!(y, Ok(of_index(expected)), "{value}");
    }
}

#[test]
fn the_error_function_is_accurate() {
    // Gathers from tables.
    let cases = [
        (0.0, 0.0),
        (0.1, 0.112_462_916_018_284_9),
        (0.5, 0.520_499_877_813_046_5),
        (1.0, 0.842_700_792_949_714_9),
        (2.0, 0.995_322_265_018_952_7),
        (3.5, 0.999_999_256_901_627_7),
        (-1.0, -0.842_700_792_949_714_9),
        (7.0, 1.0),
    ];
    for (x, erf) in cases {
        let program = program(&format!("program \"p\" buffer Y: f64[] global output run {{ Y[] = erf({x:?}) }}"));
        let mut arguments = vec![vec![0.0]];
        run(&program, &mut arguments).unwrap();
        assert!((arguments[0][0] - erf).abs() < 4e-15, "erf {x} = {}", arguments[0][0]);
    }
}

#[test]
fn reductions_go_on_or_start_afresh() {
    let y = run_body("for i in 8 { Y[i] = 100.0 } for i in 8 { for j in 8 { Y[i] max= X[j] first never } }");
    assert_eq!(y, Ok(f32s([100.0; 8])));
    let y = run_body("for i in 8 { for j in 8 { Y[i] min= X[j] first j == 0 } }");
    assert_eq!(y, Ok(f32s([0.1; 8])));
    let y = run_body("for i in 8 { for j in 8 { Y[i] max= X[j] first j == 4 } }");
    assert_eq!(
        y,
        Err(Fault::Undefined { buffer: "Y".into(), subscripts: vec![0], place: place(&[("i", 0), ("j", 0)]) })
    );
}

#[test]
fn loops_of_every_kind_run_and_negative_extents_do_not() {
    for kind in ["for", "parallel", "vectorized", "unrolled", "block.x", "thread.z"] {
        let y = run_body(&format!("{kind} i in 8 {{ Y[i] = X[i] for j in i - 9 {{ Y[99] = 0.0 }} }}"));
        assert_eq!(y.unwrap().len(), 8);
    }
}

#[test]
fn prefetches_do_nothing() {
    run_body("for i in 8 { prefetch X[i + 1000] read prefetch Y[i // 0] write Y[i] = X[i] }").unwrap();
}

#[test]
fn prepare_comes_first() {
    let program = program(
        "program \"p\" buffer X: f32[8] global const buffer Y: f32[8] global output
        buffer W: f32[8] global kept loops i
        prepare { for i in 8 { W[7 - i] = X[i] } } run { for i in 8 { Y[i] = W[i] } }",
    );
    let mut arguments = vec![(0..8).map(f64::from).collect(), vec![0.0; 8]];
    run(&program, &mut arguments).unwrap();
    assert_eq!(arguments[1], [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]);
}

#[test]
fn finish_comes_last() {
    let program = program(
        "program \"p\" buffer X: f32[8] global input buffer Y: f32[8] global output
        buffer K: f32[8] global kept loops i
        run { for i in 8 { K[i] = X[i] + 1.0 } } finish { for i in 8 { Y[7 - i] = K[i] } }",
    );
    let mut arguments = vec![(0..8).map(f64::from).collect(), vec![0.0; 8]];
    run(&program, &mut arguments).unwrap();
    assert_eq!(arguments[1], [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]);
}

#[test]
fn faults_say_what_and_where() {
    let fill = "for i in 8 { Y[i] = X[i] }";
    let cases = [
        ("for i in 9 { Y[i] = 0.0 }".to_owned(), "Y[8] is outside Y[8] at i=8"),
        ("for i in 8 { Y[i] = X[i - 1] }".to_owned(), "X[-1] is outside X[8] at i=0"),
        ("for i in 8 { for j in 2 { Y[i] = Y[7] } }".to_owned(), "Y[7] is read before it is written at i=0, j=0"),
        ("alloc T Y[0] = T[3]".to_owned(), "T[3] is read before it is written outside all loops"),
        ("Y[0] = T[3]".to_owned(), "T is used where it is not allocated outside all loops"),
        (
            "for i in 2 { if true { alloc T T[0] = 1.0 } Y[0] = T[0] }".to_owned(),
            "T is used where it is not allocated at i=0",
        ),
        (
            "for i in 2 { alloc T if i == 0 { T[0] = 1.0 } Y[i] = T[0] }".to_owned(),
            "T[0] is read before it is written at i=1",
        ),
        (format!("{fill} for i in 2 {{ Y[(i + 1) // 0] = 1.0 }}"), "division by zero in (i + 1) // 0 at i=0"),
        (format!("{fill} if 2 == 4 % 0 {{ }}"), "division by zero in (4) % 0 outside all loops"),
        (
            format!("{fill} for i in 3 {{ Y[9223372036854775807*i] = 1.0 }}"),
            "Y[9223372036854775807] is outside Y[8] at i=1",
        ),
        (
            format!("{fill} for i in 3 {{ if 9223372036854775807*i < 0 {{ }} }}"),
            "9223372036854775807*i overflows at i=2",
        ),
        ("for i in 7 { Y[i] = 0.0 }".to_owned(), "Y[7] is never written"),
        ("for i in 1001 { }".to_owned(), "more than 1000 loop iterations"),
        ("for i in 100 { for j in 100 { } }".to_owned(), "more than 1000 loop iterations"),
        ("Y[0, 0] = 1.0".to_owned(), "Y has 1 dimensions and is used with 2 subscripts"),
        ("Y[i] = 1.0".to_owned(), "loop variable i is used outside its loop"),
        ("for i in 8 { Y[i] = W[i] }".to_owned(), "W[0] is read before it is written at i=0"),
    ];
    for (body, expected) in cases {
        assert_eq!(run_body(&body).map_err(|f| f.to_string()), Err(expected.to_owned()), "{body}");
    }
}

/// A loop of one iteration around a statement keeps its iterations from being evaluated together.
#[test]
fn iterations_that_are_evaluated_together_give_what_they_give_in_order() {
    let statements = [
        "Y[i] = X[i] * Z[79 - i] + X[3]",
        "Y[i] += X[i] - Z[i] / X[i + 1] first never",
        "Y[i] += X[0] first i == 3",
        "Y[79 - i] min= X[i] first less(X[i], Z[i])",
        "Y[7] += X[i] * Z[i] first i == 0",
        "Y[7] max= neg(X[i]) first i == 40",
        "Y[7] += X[2*i] first never",
        "Y[i % 3] += X[i] first never",
        "if i < 65 && not(i == 30) { Y[i] = select(4 < i && less(X[i - 5], Z[i]), X[i - 5], neg(Z[i])) }",
        "if 20 < i { if less(Z[i], X[i]) { Y[7] += X[i] first never } }",
        "Y[i + 10] = abs(X[i]) + index(3*i - 40)",
        "Y[i + 11] = X[i]",
        "Y[i] = X[i - 1]",
        "Y[i] = Y[i + 1]",
        "Y[i] = W[i]",
        "W[i] += X[i] first never",
        "Y[i] = i32(X[i] * 100.0) + u8(Z[i]) * bool(X[i])",
        "Y[i] = f16(X[i]) + i8(Z[i]) - i64(X[i])",
        "Y[i] = max(min(X[i], 3.0), nan) + X[i // 2]",
        "Y[i] = X[i] + X[at(Z[i])]",
        "Y[i // 0] = X[i]",
    ];
    let special = [f64::NAN, f64::INFINITY, -0.0, 3e38, 1e-45, 255.0, -128.0, 0.5, 65535.0, f64::NEG_INFINITY];
    let numbers = |seed: usize| -> Vec<f64> {
        (0..80).map(|i| special.get(i * seed % 37).copied().unwrap_or((i * 29 % 83) as f64 / 7.0 - 5.0)).collect()
    };
    for (dtype, other) in [("f32", "f32"), ("f64", "i8"), ("f16", "bf16"), ("i32", "u8"), ("u8", "i7"), ("bool", "i16")]
    {
        for statement in statements {
            let run_inside = |inside: &str| -> Result<Vec<u64>, String> {
                let text = format!(
                    "program \"p\" buffer X: {dtype}[80] global input buffer Z: {other}[80] global input
                    buffer Y: {dtype}[80] global output buffer W: f32[80] global kept loops i, j
                    run {{ for i in 80 {{ Y[i] = 1.0 }} for i in 33 {{ W[i] = 2.0 }} for i in 70 {{ {inside} }} }}"
                );
                let mut arguments = vec![numbers(7), numbers(11), vec![0.0; 80]];
                run(&program(&text), &mut arguments).map_err(|fault| fault.to_string().replace(", j=0", ""))?;
                Ok(arguments[2].iter().map(|x| x.to_bits()).collect())
            };
            let (together, in_order) = (run_inside(statement), run_inside(&format!("for j in 1 {{ {statement} }}")));
            assert_eq!(together, in_order, "{dtype}, {other}: {statement}");
        }
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let program = matmul("f32", 2, 3, 4);
    assert_eq!(run(&program, &mut []), Err(Fault::ArgumentCount { expected: 3, got: 0 }));
    let mut short = vec![vec![0.0; 8], vec![0.0; 11], vec![0.0; 6]];
    let fault = Fault::ArgumentLength { buffer: "B".into(), expected: 12, got: 11 };
    assert_eq!(run(&program, &mut short), Err(fault));
    let huge = "program \"p\" buffer T: f64[100000, 1000000] global temporary run { alloc T }";
    let fault = Fault::TooLarge { buffer: "T".into(), shape: vec![100_000, 1_000_000] };
    assert_eq!(run(&common::program(huge), &mut []), Err(fault));
}

#[test]
fn numbers_of_another_program_are_refused() {
    let mut program = body_program("");
    program.body.push(Stmt::Alloc(tilewright_ir::BufferId(77)));
    let mut arguments = vec![vec![0.0; 8], vec![0.0; 8]];
    assert_eq!(run(&program, &mut arguments), Err(Fault::UnknownBuffer { id: 77 }));
}
