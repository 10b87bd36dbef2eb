//! C libraries of the official tests' models: every model that runs can be shipped, with bitwise equal
//! results.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use tilewright::library::{Form, Weights, library, write_library};
use tilewright_graph::{Tensor, TensorType};

use super::*;
use crate::common::build::{Attr, declared, field, model, node};

/// Expected results of a library, to be compared with the concatenated bytes of its outputs.
pub(super) struct Expected {
    case: String,
    /// Outputs of the case.
    outputs: Vec<Tensor>,
    /// Outputs of a run in this process.
    run: Vec<Tensor>,
}

/// Program that calls one library after the other, each twice, on inputs in files.
const MAIN: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *fill(FILE *file, size_t bytes) {
    void *to = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!to || (bytes && file && fread(to, 1, bytes, file) != bytes)) exit(2);
    return to;
}

#define CALL(N) do { \
    FILE *in = fopen(#N ".in", "rb"), *out = fopen(#N ".out", "wb"); \
    void *inputs[16], *outputs[16]; \
    N##_context *context; \
    if (!in || !out || N##_inputs() > 16 || N##_outputs() > 16 || N##_create(NULL, &context)) exit(3); \
    for (size_t i = 0; i < N##_inputs(); i++) inputs[i] = fill(in, N##_input(i)->bytes); \
    for (size_t i = 0; i < N##_outputs(); i++) outputs[i] = fill(NULL, N##_output(i)->bytes); \
    for (int times = 0; times < 2; times++) { \
        int code = N##_run(context, (const void *const *)inputs, outputs); \
        if (code) { fprintf(stderr, "%s: %s\n", #N, N##_message(code)); exit(4); } \
    } \
    for (size_t i = 0; i < N##_outputs(); i++) fwrite(outputs[i], 1, N##_output(i)->bytes, out); \
    for (size_t i = 0; i < N##_inputs(); i++) free(inputs[i]); \
    for (size_t i = 0; i < N##_outputs(); i++) free(outputs[i]); \
    N##_destroy(context); \
    fclose(in); \
    fclose(out); \
} while (0)
"#;

/// Writes the library of a case into a folder, with its inputs; `None` if the case cannot run, an error if
/// only the library fails.
pub(super) fn write_case(case: &Case, name: &str, folder: &Path) -> Result<Option<Expected>, String> {
    let Some((inputs, outputs)) = case.sets.first() else { return Ok(None) };
    let Some((compiled, given)) = compiled_case(case, inputs, &host::target())? else { return Ok(None) };
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).map_err(|e| e.to_string())?;
    given.iter().try_for_each(|(name, x)| runner.set(name, x)).map_err(|e| e.to_string())?;
    runner.run().map_err(|e| e.to_string())?;
    let run = runner.outputs().into_iter().map(|(_, tensor)| tensor).collect();
    let made = library(name, &compiled.model, &host::target(), 1, Weights::Small, &[]);
    write_library(&made.map_err(|e| e.to_string())?, Form::C, folder).map_err(|e| e.to_string())?;
    let bytes: Vec<u8> = runner
        .inputs()
        .flat_map(|(input, _)| {
            let (_, x) = given.iter().find(|(name, _)| name == input).expect("every input is given");
            x.bytes().to_vec()
        })
        .collect();
    fs::write(folder.join(format!("{name}.in")), bytes).map_err(|e| e.to_string())?;
    Ok(Some(Expected { case: case.name.clone(), outputs: outputs.clone(), run }))
}

/// Splits concatenated bytes into tensors of these types.
fn tensors(bytes: &[u8], types: &[&TensorType]) -> Vec<Tensor> {
    let mut rest = bytes;
    let mut next = |ty: &&TensorType| {
        let (own, after) = rest.split_at(ty.checked_bytes().expect("it fits memory"));
        rest = after;
        Tensor::new((*ty).clone(), own.to_vec().into()).expect("as many bytes as its type takes")
    };
    types.iter().map(&mut next).collect()
}

/// Builds one program from libraries, runs it, and returns the errors in their outputs.
pub(super) fn wrong_outputs(folder: &Path, expected: &[(String, Expected)]) -> Vec<String> {
    let mut main = String::new();
    expected.iter().for_each(|(name, _)| writeln!(main, "#include \"{name}.h\"").unwrap());
    main += MAIN;
    main += "int main(void) {\n";
    expected.iter().for_each(|(name, _)| writeln!(main, "    CALL({name});").unwrap());
    main += "    return 0;\n}\n";
    fs::write(folder.join("main.c"), main).unwrap();
    let files = expected.iter().flat_map(|(name, _)| [format!("{name}.c"), format!("{name}_kernels.a")]);
    let flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-std=c11", "-ffp-contract=off", "-o", "main", "main.c"];
    let mut cc = Command::new("cc");
    cc.current_dir(folder).args(flags).args(files).args(["-lm", "-lpthread"]);
    let output = cc.output().expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new("./main").current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{:?} {}", output.status, String::from_utf8_lossy(&output.stderr));
    let mut wrong = Vec::new();
    for (name, expected) in expected {
        let bytes = fs::read(folder.join(format!("{name}.out"))).unwrap();
        let found = tensors(&bytes, &expected.run.iter().map(Tensor::ty).collect::<Vec<_>>());
        for (at, (found, wanted)) in found.iter().zip(&expected.outputs).enumerate() {
            let near = agree(found, wanted).err();
            let same = (*found != expected.run[at]).then(|| "is not as in a run".to_owned());
            wrong.extend(near.or(same).map(|what| format!("{}: output {} {what}", expected.case, at + 1)));
        }
    }
    wrong
}

/// Some of the supported cases of two files; the number skipped between two can be set.
#[test]
fn what_runs_is_shipped_in_c() {
    let every: usize = std::env::var("TILEWRIGHT_EVERY").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    if tilewright_codegen::llvm_version().is_none() {
        println!("skipped: no LLVM");
        return;
    }
    let listed = common::refused();
    let all: Vec<Case> = ["node.cases.gz", "suite.cases.gz"].iter().flat_map(|file| cases(file)).collect();
    let chosen: Vec<&Case> = all.iter().filter(|case| !listed.contains(&case.name)).step_by(every).collect();
    let (mut wrong, mut refused, mut n_shipped) = (Vec::new(), Vec::new(), 0);
    for (at, batch) in chosen.chunks(50).enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let mut expected = Vec::new();
        for (case, number) in batch.iter().zip(0..) {
            let name = format!("m{at}_{number}");
            match write_case(case, &name, folder.path()) {
                Ok(found) => expected.extend(found.map(|found| (name, found))),
                Err(why) if why.contains("has no kernel") => refused.push(format!("{}: {why}", case.name)),
                Err(why) => wrong.push(format!("{}: {why}", case.name)),
            }
        }
        n_shipped += expected.len();
        wrong.extend(wrong_outputs(folder.path(), &expected));
    }
    refused.iter().for_each(|why| println!("{why}"));
    println!("{n_shipped} shipped, {} refused, {} wrong", refused.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(refused.is_empty(), "{} of {} are refused", refused.len(), chosen.len());
}

/// Model in which `y` is `2x` if `c` and `d` hold, `−x` if only `c` does, and else `x` with a 7 at position
/// `i`, plus 1.
fn of_two_graphs() -> bytes::Bytes {
    let graph =
        |nodes: Vec<Vec<u8>>, output: &str| -> Vec<u8> { [nodes.concat(), field(12, field(1, output))].concat() };
    let doubled = graph(vec![node("Add", &["x", "x"], &["p"], &[])], "p");
    let negated = graph(vec![node("Neg", &["x"], &["q"], &[])], "q");
    let branches = |then: Vec<u8>, otherwise: Vec<u8>| {
        [("then_branch", Attr::Graph(then)), ("else_branch", Attr::Graph(otherwise))]
    };
    let inner = graph(vec![node("If", &["d"], &["r"], &branches(doubled, negated))], "r");
    let seven = Tensor::from_floats(DType::F32, [1], &[7.0]);
    let one = Tensor::from_floats(DType::F32, [1], &[1.0]);
    let scattered = graph(
        vec![
            node("Constant", &[], &["u"], &[("value", Attr::Tensor(seven))]),
            node("Constant", &[], &["n"], &[("value", Attr::Tensor(one))]),
            node("ScatterElements", &["x", "i", "u"], &["s"], &[("axis", Attr::Int(0))]),
            node("Add", &["s", "n"], &["t"], &[]),
        ],
        "t",
    );
    let mut all = node("If", &["c"], &["y"], &branches(inner, scattered));
    let inputs = [("c", DType::Bool, 1), ("d", DType::Bool, 1), ("x", DType::F32, 4), ("i", DType::I64, 1)];
    all.extend(inputs.into_iter().flat_map(|(name, dtype, n)| field(11, declared(name, dtype, &[n]))));
    model(17, [all, field(12, declared("y", DType::F32, &[4]))].concat())
}

/// Model with sizes that fit only one of two subgraphs: `y` is `x` reshaped to 3 numbers if `c` holds, else
/// to 4, its actual size.
fn of_one_graph() -> bytes::Bytes {
    let graph = |nodes: Vec<u8>| [nodes, field(12, field(1, "p"))].concat();
    let reshaped = |n: i128| {
        let shape = Tensor::from_integers(DType::I64, [1], &[n]);
        let known = node("Constant", &[], &["s"], &[("value", Attr::Tensor(shape))]);
        graph([known, node("Reshape", &["x", "s"], &["p"], &[])].concat())
    };
    let branches = [("then_branch", Attr::Graph(reshaped(3))), ("else_branch", Attr::Graph(reshaped(4)))];
    let mut all = node("If", &["c"], &["y"], &branches);
    let inputs = [("c", DType::Bool, &[1][..]), ("x", DType::F32, &[2, 2])];
    all.extend(inputs.into_iter().flat_map(|(name, dtype, shape)| field(11, declared(name, dtype, shape))));
    model(17, [all, field(12, declared("y", DType::F32, &[4]))].concat())
}

/// If a subgraph does not support the sizes of its inputs, runs that select it fail.
#[test]
fn sizes_may_fit_one_of_two_graphs() {
    let folder = tempfile::tempdir().unwrap();
    let x = [1.0, -2.0, 3.0, 0.5];
    for c in [0, 1] {
        let inputs = vec![Tensor::from_integers(DType::Bool, [1], &[c]), Tensor::from_floats(DType::F32, [2, 2], &x)];
        let sets = vec![(inputs, vec![Tensor::from_floats(DType::F32, [4], &x)])];
        let case = Case { name: c.to_string(), model: of_one_graph(), sets };
        if c == 1 {
            let why = check(&case, &host::target()).unwrap_err();
            assert!(why.contains("refuses the sizes"), "{why}");
            continue;
        }
        assert_eq!(check(&case, &host::target()), Ok(Some(0)));
        if tilewright_codegen::llvm_version().is_some() {
            let expected = write_case(&case, "m", folder.path()).unwrap().unwrap();
            assert_eq!(wrong_outputs(folder.path(), &[("m".to_owned(), expected)]), Vec::<String>::new());
        }
    }
}

/// Steps of the subgraph that is not selected neither run nor fail.
#[test]
fn one_of_two_graphs_runs() {
    let x = [1.0, -2.0, 3.0, 0.5];
    let sets = [
        ([1, 1, 9], Some(x.map(|x| 2.0 * x))),
        ([1, 0, 9], Some(x.map(|x| -x))),
        ([0, 1, 2], Some([2.0, -1.0, 8.0, 1.5])),
        ([0, 0, 9], None),
    ];
    let truth = |n: i128| Tensor::from_integers(DType::Bool, [1], &[n]);
    let folder = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    for (at, ([c, d, i], y)) in sets.into_iter().enumerate() {
        let floats = |x: [f64; 4]| Tensor::from_floats(DType::F32, [4], &x);
        let inputs = vec![truth(c), truth(d), floats(x), Tensor::from_integers(DType::I64, [1], &[i])];
        let outputs: Vec<Tensor> = y.into_iter().map(floats).collect();
        let case = Case { name: format!("{c} {d} {i}"), model: of_two_graphs(), sets: vec![(inputs, outputs)] };
        let name = format!("m{at}");
        if y.is_none() || tilewright_codegen::llvm_version().is_none() {
            let checked = check(&case, &host::target()).err().map(|why| why.contains("outside"));
            assert_eq!(checked, y.is_none().then_some(true));
            continue;
        }
        assert_eq!(check(&case, &host::target()), Ok(Some(0)), "{}", case.name);
        expected.push((name.clone(), write_case(&case, &name, folder.path()).unwrap().unwrap()));
    }
    if !expected.is_empty() {
        assert_eq!(wrong_outputs(folder.path(), &expected), Vec::<String>::new());
    }
}
