//! Decoders that attend to inputs of open length, such as an encoder's states, beside a past.

use std::path::Path;
use std::process::Command;

use tilewright::library::{Form, Weights, library, write_library};
use tilewright_device::host;
use tilewright_graph::{Bindings, Graph, Tensor, evaluate, specialise};
use tilewright_model::{
    DecoderDims, Fused, OpenError, PieceSizes, Runner, compile_guessed, lower, open_both, open_decoder,
};
use tilewright_runtime::{Aligned, Context, OpenDimension, RunError, SharedPool};

use crate::blocks::graph_at;
use crate::open::{inputs, is_near};

/// Attention over a past, and then over an encoder's keys, an input with heads ahead of their length, with
/// values that are computed of its states, whose mean is added.
fn graph() -> Graph {
    graph_with("v = MatMul(states, w)")
}

/// Graph of such attention with values computed by a statement.
fn graph_with(values: &str) -> Graph {
    let statements = STATEMENTS.replace("VALUES", values);
    graph_at(
        17,
        "input_ids[batch tokens], past_key_values.0.key[batch 2 past 4], keys[batch 2 length 4], \
         states[batch length 8], seen[batch length]",
        "y[batch tokens 8], present.0.key[batch 2 total 4]",
        &statements,
    )
}

const STATEMENTS: &str = "embed = weights[37 8]
         x = Gather(embed, input_ids)
         heads = numbers[0 0 2 4]
         x4 = Reshape(x, heads)
         q = Transpose[perm=0 2 1 3](x4)
         present.0.key = Concat[axis=2](past_key_values.0.key, q)
         turned = Transpose[perm=0 1 3 2](present.0.key)
         scores = MatMul(q, turned)
         shares = Softmax[axis=-1](scores)
         mixed = MatMul(shares, present.0.key)
         w = weights[8 8]
         VALUES
         v4 = Reshape(v, heads)
         values = Transpose[perm=0 2 1 3](v4)
         turned1 = Transpose[perm=0 1 3 2](keys)
         scores1 = MatMul(mixed, turned1)
         all = number[1.0]
         hidden = Sub(all, seen)
         far = number[-3.0]
         bias = Mul(hidden, far)
         axes = numbers[1 2]
         mask = Unsqueeze(bias, axes)
         masked = Add(scores1, mask)
         shares1 = Softmax[axis=-1](masked)
         mixed1 = MatMul(shares1, values)
         back = Transpose[perm=0 2 1 3](mixed1)
         together = numbers[0 0 8]
         rows = Reshape(back, together)
         mean = ReduceMean[axes=1](states)
         y = Add(rows, mean)";

fn dim(name: &str, least: i64, most: i64) -> OpenDimension {
    OpenDimension { name: name.to_owned(), least, most, step: 1 }
}

/// Graph at sizes of its dimensions.
fn at(graph: &Graph, [batch, tokens, past, length]: [i64; 4]) -> Graph {
    let sizes = [("batch", batch), ("tokens", tokens), ("past", past), ("length", length)];
    let dims = sizes.into_iter().map(|(name, n)| (name.to_owned(), n as usize)).collect();
    let [open, second] = ["past", "length"].map(|name| Some(name.to_owned()));
    let special = specialise(graph, &Bindings { dims, open, second, ..Bindings::default() });
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    special.graph
}

fn lowered(graph: &Graph, sizes: [i64; 4]) -> Result<Fused, OpenError> {
    Ok(lower(&at(graph, sizes), false, &host::target(), 1).unwrap())
}

fn runner_of(fused: Result<Fused, OpenError>) -> Runner {
    let fused = fused.unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap()
}

/// Compares a run with the reference.
fn check(runner: &mut Runner, graph: &Graph, sizes: [i64; 4]) {
    let own = at(graph, sizes);
    let given = inputs(&own, sizes.iter().sum::<i64>() as u64, None);
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap_or_else(|error| panic!("{sizes:?}: {error}")));
    runner.run().unwrap();
    let named: Vec<(&str, Tensor)> = given.iter().map(|(name, x)| (name.as_str(), x.clone())).collect();
    let wanted = evaluate(&own, &named).unwrap();
    for ((name, found), wanted) in runner.outputs().iter().zip(&wanted) {
        assert!(is_near(found, wanted), "{sizes:?}, {name}: {found:?}, and should be {wanted:?}");
    }
}

#[test]
fn a_length_of_inputs_is_open_beside_a_past() {
    let graph = graph();
    let (past, length) = (dim("past", 0, 23), dim("length", 1, 40));
    let made = open_both(&past, Some(&length), |past, length| lowered(&graph, [1, 1, past, length]));
    let mut runner = runner_of(made);
    // The length is the largest until it is set.
    runner.set_dim("past", 3).unwrap();
    check(&mut runner, &graph, [1, 1, 3, 40]);
    for (past, length) in [(0, 1), (23, 40), (0, 40), (23, 1), (7, 16), (8, 17), (1, 39), (22, 2), (5, 31)] {
        runner.set_dim("past", past).unwrap();
        runner.set_dim("length", length).unwrap();
        check(&mut runner, &graph, [1, 1, past, length]);
    }
    for (name, size) in [("length", 0), ("length", 41), ("past", 24)] {
        let refused = runner.set_dim(name, size);
        let is_size = |error: &tilewright_model::RunError| {
            matches!(error, tilewright_model::RunError::Run(RunError::BadSize { .. }))
        };
        assert!(refused.as_ref().is_err_and(is_size), "{name}={size}: {refused:?}");
    }
    // Refused sizes change nothing.
    check(&mut runner, &graph, [1, 1, 5, 31]);
}

/// Ranges of equal sizes are told apart.
#[test]
fn both_dimensions_may_have_the_same_sizes() {
    let graph = graph();
    let (past, length) = (dim("past", 1, 32), dim("length", 1, 32));
    let mut runner = runner_of(open_both(&past, Some(&length), |past, length| lowered(&graph, [1, 1, past, length])));
    for (past, length) in [(1, 32), (32, 1), (9, 4), (4, 9), (32, 32)] {
        runner.set_dim("past", past).unwrap();
        runner.set_dim("length", length).unwrap();
        check(&mut runner, &graph, [1, 1, past, length]);
    }
}

#[test]
fn a_dimension_of_both_lengths_is_refused() {
    let graph = graph_at(
        17,
        "input_ids[batch tokens], past_key_values.0.key[batch 1 past 8], states[batch 1 length 8]",
        "y[batch 1 1 8], present.0.key[batch 1 total 8]",
        "embed = weights[37 8]
         x = Gather(embed, input_ids)
         axis = numbers[1]
         k = Unsqueeze(x, axis)
         present.0.key = Concat[axis=2](past_key_values.0.key, k)
         both = Concat[axis=2](states, present.0.key)
         y = ReduceMax[axes=2](both)",
    );
    let (past, length) = (dim("past", 0, 23), dim("length", 1, 40));
    let made = open_both(&past, Some(&length), |past, length| lowered(&graph, [1, 1, past, length]));
    let error = made.expect_err("it is refused").to_string();
    assert!(error.contains("`both` has a size without a factor and a term"), "{error}");
}

/// Rows of several texts, each at the room of the longest, are multiplied apart, or lie behind each other
/// once their dimension comes first.
#[test]
fn products_of_several_texts_have_rows_of_both_lengths() {
    let graph = graph();
    let (past, length) = (dim("past", 0, 23), dim("length", 1, 40));
    for batch in [2, 5] {
        let made = open_both(&past, Some(&length), |past, length| lowered(&graph, [batch, 1, past, length]));
        let mut runner = runner_of(made);
        for (past, length) in [(0, 1), (23, 40), (3, 17), (8, 16), (22, 2)] {
            runner.set_dim("past", past).unwrap();
            runner.set_dim("length", length).unwrap();
            check(&mut runner, &graph, [batch, 1, past, length]);
        }
    }
}

fn of_decoder(graph: &Graph, sizes: PieceSizes) -> Result<Fused, OpenError> {
    lowered(graph, [sizes.items.unwrap_or(1), sizes.rows.unwrap_or(1), sizes.past, sizes.second.unwrap()])
}

/// Several tokens and several texts have nets of their own, each for any length of the inputs.
#[test]
fn tokens_and_texts_go_beside_both_lengths() {
    let graph = graph_with("v = Neg(states)");
    let (past, length, batch) = (dim("past", 0, 23), dim("length", 1, 40), dim("batch", 1, 2));
    for items in [None, Some(&batch)] {
        let dims = DecoderDims { past: &past, second: Some(&length), items, rows: Some(("tokens", &[1, 3])) };
        let mut runner = runner_of(open_decoder(dims, |sizes| of_decoder(&graph, sizes)));
        for (n_texts, tokens, past, length) in
            [(1, 3, 0, 40), (1, 1, 3, 7), (2, 3, 5, 8), (2, 1, 23, 40), (1, 3, 21, 1), (2, 3, 0, 33)]
        {
            if items.is_some() {
                runner.set_dim("batch", n_texts).unwrap();
            } else if n_texts > 1 {
                continue;
            }
            for (name, size) in [("tokens", tokens), ("past", past), ("length", length)] {
                runner.set_dim(name, size).unwrap();
            }
            check(&mut runner, &graph, [n_texts, tokens, past, length]);
        }
    }
}

/// Thousandths of the results of three texts, each after inputs of another length.
fn texts(context: &mut Context) -> Vec<i64> {
    let mut all = Vec::new();
    for length in [5, 40, 1] {
        let eighths = |by: i64, of: i64| (0..8 * length).map(move |i| ((by * i + length) % of) as f32 / 8.0 - 0.5);
        let bytes = |numbers: &mut dyn Iterator<Item = f32>| numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let (keys, states) = (bytes(&mut eighths(7, 11)), bytes(&mut eighths(5, 13)));
        let seen = bytes(&mut (0..length).map(|i| if i % 4 == 3 { 0.0 } else { 1.0 }));
        context.rewind(0).unwrap();
        context.set_dim("length", length).unwrap();
        let mut at = 0;
        for n in [3, 1, 1] {
            let ids: Vec<u8> = (at..at + n).flat_map(|at| ((3 * at + length) % 37).to_le_bytes()).collect();
            let given = [&ids, &keys, &states, &seen].map(|bytes| {
                let mut memory = Aligned::new(bytes.len() as u64).unwrap();
                memory.bytes_mut().copy_from_slice(bytes);
                memory
            });
            let mut made = Aligned::new(8 * 4 * n as u64).unwrap();
            context.set_dim("tokens", n).unwrap();
            context.run(&given.each_ref().map(Aligned::bytes), &mut [made.bytes_mut()]).unwrap();
            let numbers = made.bytes().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            all.extend(numbers.map(|y| (1000.0 * y).round() as i64));
            at += n;
        }
    }
    all
}

/// Checks the thousandths that a program prints.
fn check_program(command: &mut Command, expected: &[i64]) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {} {}", done.status, String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).unwrap();
    let found: Vec<i64> = text.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let is_near = |(x, y): (&i64, &i64)| (x - y).abs() <= 1;
    assert!(found.len() == expected.len() && found.iter().zip(expected).all(is_near), "{found:?}, {expected:?}");
}

#[test]
fn libraries_take_lengths_beside_a_past() {
    let graph = graph();
    let (past, length) = (dim("past", 0, 23), dim("length", 1, 40));
    let dims = DecoderDims { past: &past, second: Some(&length), items: None, rows: Some(("tokens", &[1, 3])) };
    let fused = open_decoder(dims, |sizes| of_decoder(&graph, sizes)).unwrap_or_else(|error| panic!("{error}"));
    let compiled = compile_guessed(fused, &host::target(), 1).unwrap_or_else(|error| panic!("{error}"));
    let mut context = Context::new(compiled.model.cpu().unwrap(), &SharedPool::new(1).unwrap()).unwrap();
    let expected = texts(&mut context);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("beside-{}", std::process::id()));
    let made =
        library("decoder", &compiled.model, &host::target(), 1, Weights::Small, &["lengths".to_owned()]).unwrap();
    let source = |name: &str| format!("{}/tests/onnx/beside/{name}", env!("CARGO_MANIFEST_DIR"));

    let c = folder.join("c");
    std::fs::create_dir_all(&c).unwrap();
    write_library(&made, Form::C, &c).unwrap();
    let words = "-std=c99 -Wall -Wextra -Werror -O1 decoder.c decoder_kernels.a -I. -lm -lpthread -o main";
    check_program(Command::new("cc").current_dir(&c).arg(source("main.c")).args(words.split_whitespace()), &[]);
    check_program(&mut Command::new(c.join("main")), &expected);

    let (of_crate, program) = (folder.join("decoder"), folder.join("program"));
    std::fs::create_dir_all(&of_crate).unwrap();
    write_library(&made, Form::Rust, &of_crate).unwrap();
    std::fs::create_dir_all(program.join("src")).unwrap();
    let manifest = "[package]\nname = \"texts\"\nversion = \"0.1.0\"\nedition = \"2021\"\n\n[dependencies]\n\
                    decoder = { path = \"../decoder\" }\n\n[workspace]\n";
    std::fs::write(program.join("Cargo.toml"), manifest).unwrap();
    std::fs::copy(source("main.rs"), program.join("src/main.rs")).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--offline"]).current_dir(&program).env("CARGO_TARGET_DIR", folder.join("target"));
    check_program(cargo.env("RUSTFLAGS", "-D warnings").env_remove("CARGO_ENCODED_RUSTFLAGS"), &[]);
    check_program(&mut Command::new(folder.join("target/debug/texts")), &expected);

    // `.ci/tvm-ffi` fetches NumPy, too.
    let packages = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("tvm-ffi");
    let path = format!("{}:{}", folder.join("wheel").display(), packages.display());
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", &path);
    let has_numpy = Command::new("python3").args(["-c", "import numpy"]).env("PYTHONPATH", &path).output();
    if has_numpy.is_ok_and(|done| done.status.success()) {
        write_library(&made, Form::Python, &folder).unwrap();
        let wheel = folder.join(format!("decoder-0.1.0-py3-none-manylinux2014_{}.whl", std::env::consts::ARCH));
        // A wheel is a folder of modules once it is unpacked.
        let mut unpack = Command::new("python3");
        check_program(unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(folder.join("wheel")), &[]);
        check_program(python.arg(source("main.py")), &expected);
    } else {
        eprintln!("skipped: there is no NumPy for Python");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
