//! Models compiled to kernels: the official tests of ONNX, and real networks, compared with results of other
//! implementations.

#[path = "../../../graph/tests/common/mod.rs"]
mod common;

mod attention;
mod blocks;
mod counts;
mod decoders;
mod encoders;
mod experts;
mod half_precision;
mod integers;
mod lengths;
mod libraries;
mod loops;
mod no_code;
mod noise;
mod numbers;
mod open;
mod packed;
mod qoperators;
mod quantized;
mod random;
mod rules;
mod sized;
mod trees;
mod types;
mod volumes;
mod wide_weights;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{Case, agree, cases, check_cases, light, no_files};
use tilewright::{Cache, Database, Records};
use tilewright_device::{host, opencl};
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Graph, Tensor, Value, ValueId, evaluate, onnx, specialise};
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Target};
use tilewright_model::{
    CompileError, CompileOptions, Compiled, Costs, Fused, Kind, Outline, ProfiledStep, Runner, Step, compile_known,
    compile_quickly, lower,
};
use tilewright_runtime::SharedPool;
use tilewright_tune::{Task, TemplateSetting};

/// Program of the machine model's guess for one thread, made once for all tests.
fn guess(workload: &Workload, target: &Target) -> Result<Program, String> {
    static KNOWN: Mutex<BTreeMap<String, Program>> = Mutex::new(BTreeMap::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let name = format!("{} {workload}", target.name());
    if let Some(program) = known().get(&name) {
        return Ok(program.clone());
    }
    let setting = TemplateSetting { workload: workload.clone(), target: target.clone(), n_threads: 1 };
    let task = Task::new(setting, None).map_err(|e| e.to_string())?;
    let config = task.first_guess(0).unwrap_or_else(|| task.space.config_at(0));
    let program = task.program(&config).map_err(|(at, why)| format!("step {at}: {why}"))?;
    known().insert(name, program.clone());
    Ok(program)
}

fn compiled(graph: &Graph) -> Result<Compiled, CompileError> {
    compiled_as(graph, false)
}

fn compiled_as(graph: &Graph, exact: bool) -> Result<Compiled, CompileError> {
    compiled_with(graph, exact, &host::target())
}

fn compiled_for(graph: &Graph, target: &Target) -> Result<Compiled, CompileError> {
    compiled_with(graph, false, target)
}

fn compiled_with(graph: &Graph, exact: bool, target: &Target) -> Result<Compiled, CompileError> {
    let fused = lower(graph, exact, target, 1)
        .map_err(|e| CompileError::Kernel { workload: String::new(), why: e.to_string() })?;
    compile_quickly(fused, target, &|workload| guess(workload, target))
}

/// First OpenCL device, which one test uses at a time, as PoCL's compiler is not thread-safe. Without a
/// device, prints why the test is skipped.
fn device() -> Option<(Target, MutexGuard<'static, ()>)> {
    static ONE: Mutex<()> = Mutex::new(());
    // Searching for devices is not thread-safe either.
    let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    match opencl::device(0) {
        Ok(device) => Some((device.target, one)),
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}

/// Copies a graph with an input made constant.
fn with_known(graph: &Graph, name: &str, tensor: &Tensor) -> Graph {
    let mut new = Graph::default();
    for (_, value) in graph.values() {
        let constant = if value.name == name { Some(tensor.clone()) } else { value.constant.clone() };
        let (ty, producer) = (value.ty.clone().or(constant.as_ref().map(|x| x.ty().clone())), None);
        new.add_value(Value { constant, ty, producer, users: Vec::new(), ..value.clone() });
    }
    let is_known = |id: &&ValueId| graph.value(**id).name == name;
    new.inputs = graph.inputs.iter().filter(|id| !is_known(id)).copied().collect();
    new.outputs.clone_from(&graph.outputs);
    for (_, node) in graph.nodes() {
        new.add_node(node.clone());
    }
    new
}

/// Inputs by name.
type Given = Vec<(String, Tensor)>;

/// Compiles a case for inputs in order; returns the model with the inputs that it takes. `None` if shapes
/// depend on data, or an element type is not supported by runs.
fn compiled_case(case: &Case, inputs: &[Tensor], target: &Target) -> Result<Option<(Compiled, Given)>, String> {
    let model = onnx::read(&case.model, &mut no_files).map_err(|e| e.to_string())?;
    let names = model.graph.inputs.iter().map(|&id| model.graph.value(id).name.clone());
    let mut given: Given = names.zip(inputs.iter().cloned()).collect();
    let mut graph = model.graph.clone();
    let special = loop {
        let is_there = |name: &String| graph.inputs.iter().any(|&id| graph.value(id).name == *name);
        let known = given.iter().filter(|(name, _)| is_there(name));
        let shapes = known.map(|(name, x)| (name.clone(), x.shape().to_vec())).collect();
        let special = specialise(&graph, &Bindings { shapes, ..Bindings::default() });
        let wanted: Vec<&String> = special.problems.iter().flat_map(|p| p.needed_inputs()).collect();
        let Some((name, x)) = given.iter().find(|(name, _)| wanted.contains(&name) && is_there(name)) else {
            break special;
        };
        graph = with_known(&graph, name, x);
    };
    match special.problems.first() {
        None => {}
        Some(problem) if problem.is_unsupported() => return Ok(None),
        Some(problem) => return Err(problem.to_string()),
    }
    // Results of bf16 are compared to about two digits, so the model's own rounding steps are computed.
    let exact = case.sets.iter().flat_map(|(_, outputs)| outputs).any(|x| x.dtype() == DType::Bf16);
    let compiled = match compiled_with(&special.graph, exact, target) {
        Err(CompileError::Dtype { .. }) => return Ok(None),
        compiled => compiled.map_err(|e| e.to_string())?,
    };
    given.retain(|(name, _)| compiled.fused.net.inputs.iter().any(|id| compiled.fused.net.value(*id).name == *name));
    Ok(Some((compiled, given)))
}

/// Runs a model on these inputs by kernels and by the evaluator; returns both results of each output, with
/// the compiled model.
fn by_both(about: &str, model: bytes::Bytes, inputs: &[Option<Tensor>]) -> (Compiled, Vec<(Tensor, Tensor)>) {
    let inputs: Vec<Tensor> = inputs.iter().flatten().cloned().collect();
    let graph = onnx::read(&model, &mut no_files).unwrap().graph;
    let names: Vec<String> = graph.inputs.iter().map(|&id| graph.value(id).name.clone()).collect();
    let named: Vec<(&str, Tensor)> = names.iter().map(String::as_str).zip(inputs.iter().cloned()).collect();
    let expected = evaluate(&graph, &named).unwrap();
    let case = Case { name: about.to_owned(), model, sets: Vec::new() };
    let (compiled, given) = compiled_case(&case, &inputs, &host::target()).unwrap().expect("a case with code");
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    let found = runner.outputs().into_iter().map(|(_, x)| x);
    (compiled, found.zip(expected).collect())
}

/// Runs a case with kernels; returns the number of operators without code. `None` if [`compiled_case`]
/// returns `None`.
fn check(case: &Case, target: &Target) -> Result<Option<usize>, String> {
    let mut n_host = 0;
    for (inputs, outputs) in &case.sets {
        let Some((compiled, given)) = compiled_case(case, inputs, target)? else { return Ok(None) };
        for node in compiled.fused.without_code() {
            println!("{}: {node}", case.name);
            n_host += 1;
        }
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).map_err(|e| e.to_string())?;
        given.iter().try_for_each(|(name, x)| runner.set(name, x)).map_err(|e| e.to_string())?;
        // Twice, as the data that a run leaves behind must not affect the next.
        for _ in 0..2 {
            runner.run().map_err(|e| e.to_string())?;
            for (at, ((_, found), wanted)) in runner.outputs().iter().zip(outputs).enumerate() {
                agree(found, wanted).map_err(|what| format!("output {} {what}", at + 1))?;
            }
        }
    }
    Ok(Some(n_host))
}

#[test]
fn single_operators_compute_what_onnx_says() {
    check_file("node.cases.gz", 500, 1499);
}

/// Operators compute the same with AVX2: lane by lane if it lacks vector instructions.
#[test]
fn single_operators_need_no_avx512() {
    let target = Target::named("x86-64-v3").expect("a target");
    let is_runnable = cfg!(target_arch = "x86_64") && host::target().vector_bits >= target.vector_bits;
    if !is_runnable {
        return println!("skipped: this machine is not x86-64 with AVX2");
    }
    check_cases("node.cases.gz", 500, |case| check(case, &target));
}

#[test]
fn small_models_compute_what_onnx_says() {
    check_file("suite.cases.gz", 80, 112);
}

#[test]
fn trees_machines_and_scalers_compute_what_onnx_runtime_does() {
    check_file("ml.cases.gz", 130, 145);
}

fn check_file(file: &str, at_least: usize, by_kernels: usize) {
    let n_host = check_cases(file, at_least, |case| check(case, &host::target()));
    let found = n_host.iter().filter(|&&n| n == 0).count();
    assert!(found >= by_kernels, "{file}: {found} by kernels alone, and {by_kernels} were");
}

#[test]
fn real_networks_compute_what_onnx_runtime_does_in_few_kernels() {
    // Maximum number of kernels, and maximum ratio of the arena's size to its lower bound.
    let most = [("shufflenet", 60, 1.05), ("squeezenet", 32, 1.05)];
    let wanted = light::answers();
    for case in cases("light.cases.gz") {
        let Some((name, most_kernels, most_memory)) = most.iter().find(|(name, ..)| *name == case.name) else {
            continue;
        };
        let model = onnx::read(&case.model, &mut no_files).expect("a model");
        let special = specialise(&model.graph, &Bindings { fold_bytes: 1 << 8, ..Bindings::default() });
        let compiled = compiled(&light::with_weights(&special.graph)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let n_kernels = compiled.fused.steps.iter().filter(|step| matches!(step, Step::Kernel(_))).count();
        assert!(n_kernels <= *most_kernels, "{name}: {n_kernels} kernels");
        assert!(compiled.memory.total as f64 <= compiled.memory.bound as f64 * most_memory, "{name}");
        let mut runner = Runner::new(&compiled, &SharedPool::new(2).unwrap()).unwrap();
        let (input, x) = light::input_of(&light::with_weights(&special.graph));
        runner.set(&input, &x).unwrap();
        runner.run().unwrap();
        light::check(name, &runner.outputs()[0].1.floats(), &wanted[*name], 1e-4);
    }
}

/// Deterministic numbers of either sign.
fn weights(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    let of = |at: usize| ((at * 37 + shape.len() * 11) % 23) as f64 / 23.0 - 0.4;
    Tensor::from_floats(DType::F32, shape, &(0..n).map(of).collect::<Vec<_>>())
}

fn whole(shape: &[usize], numbers: &[i64]) -> Tensor {
    let numbers: Vec<i128> = numbers.iter().map(|&n| n.into()).collect();
    Tensor::from_integers(DType::I64, shape, &numbers)
}

/// Node: name, operator, inputs, and an attribute, if any.
type Node<'a> = (&'a str, &'a str, &'a [&'a str], Option<(&'a str, Attribute)>);

/// Makes a graph of nodes with one input, with the type of the given tensor, and one output.
fn graph_of(input: (&str, &Tensor), output: (&str, &[usize]), known: &[(&str, Tensor)], nodes: &[Node]) -> Graph {
    let port = |name: &str, dtype: DType, dims: &[usize]| {
        let dims = dims.iter().map(|&n| Dim::Size(n)).collect();
        GraphPort { name: name.to_owned(), dtype, dims }
    };
    let mut model = ModelFile {
        name: "nodes".to_owned(),
        opset: 17,
        inputs: vec![port(input.0, input.1.dtype(), input.1.shape())],
        outputs: vec![port(output.0, DType::F32, output.1)],
        weights: known.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect(),
        ..ModelFile::default()
    };
    for (name, op, inputs, attribute) in nodes {
        model.nodes.push(NodeFile {
            op: (*op).to_owned(),
            inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
            outputs: vec![(*name).to_owned()],
            attributes: attribute.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            ..NodeFile::default()
        });
    }
    read_back(&model)
}

/// Graph of a model that is written to a file and read again.
pub fn read_back(model: &ModelFile) -> Graph {
    onnx::read(&onnx::write(model).into(), &mut no_files).unwrap_or_else(|error| panic!("{error}")).graph
}

/// Compiles a model as it is read from its file; it must have no problems.
pub fn compiled_file(model: &ModelFile, target: &Target) -> Compiled {
    let (special, name) = (specialise(&read_back(model), &Bindings::default()), &model.name);
    assert!(special.problems.is_empty(), "{name}: {:?}", special.problems);
    compiled_for(&special.graph, target).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Checks the result `y: [n, 6, 8]` of nodes for sequences of six tokens, `ids: [n, 6]`, and the number of
/// kernels; nothing else may run.
fn check_tokens(known: &[(&str, Tensor)], nodes: &[Node], ids: &[i64], n_kernels: usize) {
    let n = ids.len() / 6;
    let given = [("ids", whole(&[n, 6], ids))];
    let graph = graph_of(("ids", &given[0].1), ("y", &[n, 6, 8]), known, nodes);
    let compiled = compiled(&specialise(&graph, &Bindings::default()).graph).unwrap_or_else(|e| panic!("{e}"));
    let of_step = |step: &Step| match step {
        Step::Kernel(_) => Some(true),
        Step::Sequence(_) | Step::Host(_) | Step::Set { .. } | Step::While(_) | Step::Again(_) => Some(false),
        Step::Append { .. } | Step::Part { .. } | Step::Join { .. } => None,
    };
    let steps: Vec<bool> = compiled.fused.steps.iter().filter_map(of_step).collect();
    assert_eq!(steps, vec![true; n_kernels]);
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("ids", &given[0].1).unwrap();
    runner.run().unwrap();
    let wanted = evaluate(&graph, &given).unwrap();
    agree(&runner.outputs()[0].1, &wanted[0]).unwrap_or_else(|what| panic!("{what}"));
}

/// Rows are gathered, and queries, keys and values are one product, whose heads are used in place.
#[test]
fn attention_is_five_kernels() {
    check_attention(&[3, 10, 0, -1, -11, 7], 5);
}

/// Each sequence has two products of its own; all share the other kernels.
#[test]
fn attention_of_several_sequences_moves_nothing() {
    check_attention(&[3, 10, 0, -1, -11, 7, 1, 2, 3, 4, 5, 6, 9, 8, 7, 6, 5, 4], 3 + 2 * 3);
}

fn check_attention(ids: &[i64], n_kernels: usize) {
    with_attention(ids.len() as i64 / 6, |known, nodes| check_tokens(known, nodes, ids, n_kernels));
}

/// Calls a function with the constants and nodes of attention with two heads over `n` sequences of six
/// tokens.
fn with_attention<T>(n: i64, of: impl FnOnce(&[(&str, Tensor)], &[Node]) -> T) -> T {
    let perm = |order: [i64; 4]| Some(("perm", Attribute::Ints(order.to_vec())));
    let known = [
        ("table", weights(&[11, 8])),
        ("wq", weights(&[8, 8])),
        ("wk", weights(&[8, 8])),
        ("wv", weights(&[8, 8])),
        ("bq", weights(&[8])),
        ("scale", weights(&[1])),
        ("heads", whole(&[4], &[n, 6, 2, 4])),
        ("rows", whole(&[3], &[n, 6, 8])),
    ];
    let nodes: &[Node] = &[
        ("x", "Gather", &["table", "ids"], None),
        ("q0", "MatMul", &["x", "wq"], None),
        ("q1", "Add", &["q0", "bq"], None),
        ("q2", "Reshape", &["q1", "heads"], None),
        ("q3", "Transpose", &["q2"], perm([0, 2, 1, 3])),
        ("q", "Mul", &["q3", "scale"], None),
        ("k0", "MatMul", &["x", "wk"], None),
        ("k1", "Reshape", &["k0", "heads"], None),
        ("k", "Transpose", &["k1"], perm([0, 2, 3, 1])),
        ("v0", "MatMul", &["x", "wv"], None),
        ("v1", "Reshape", &["v0", "heads"], None),
        ("v", "Transpose", &["v1"], perm([0, 2, 1, 3])),
        ("scores", "MatMul", &["q", "k"], None),
        ("shares", "Softmax", &["scores"], None),
        ("sums", "MatMul", &["shares", "v"], None),
        ("turned", "Transpose", &["sums"], perm([0, 2, 1, 3])),
        ("y", "Reshape", &["turned", "rows"], None),
    ];
    of(&known, nodes)
}

/// Indices expanded to rows scatter rows of updates, in C; indices out of range are errors.
#[test]
fn rows_are_scattered_as_a_whole() {
    let known = [("x", weights(&[11, 8])), ("u", weights(&[6, 8])), ("rows", whole(&[2], &[6, 8]))];
    let nodes: &[Node] = &[
        ("index", "Expand", &["ids", "rows"], None),
        ("y", "ScatterElements", &["x", "index", "u"], Some(("reduction", Attribute::Text("add".to_owned())))),
    ];
    let ids = whole(&[6, 1], &[3, 10, 0, -1, 3, 7]);
    let graph = graph_of(("ids", &ids), ("y", &[11, 8]), &known, nodes);
    let compiled = compiled(&specialise(&graph, &Bindings::default()).graph).unwrap_or_else(|e| panic!("{e}"));
    let width = |step: &Step| match step {
        Step::Host(node) => match &node.kind {
            Kind::Call(call) => Some(call.parameters[3]),
            _ => None,
        },
        _ => None,
    };
    assert_eq!(compiled.fused.steps.iter().filter_map(width).collect::<Vec<_>>(), [8]);
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("ids", &ids).unwrap();
    runner.run().unwrap();
    agree(&runner.outputs()[0].1, &evaluate(&graph, &[("ids", ids)]).unwrap()[0]).unwrap_or_else(|e| panic!("{e}"));
    for outside in [11, -12] {
        runner.set("ids", &whole(&[6, 1], &[0, 0, 0, 0, 0, outside])).unwrap();
        assert!(runner.run().unwrap_err().to_string().contains("an index is outside"));
    }
}

/// Numbers of an input that select rows of weights are refused where they select none, in whatever shape they
/// are; negative ones count from the end.
#[test]
fn indices_that_select_no_row_are_refused() {
    let known = [("table", weights(&[5, 8])), ("column", whole(&[2], &[4, 1]))];
    let nodes: &[Node] = &[
        ("ids.column", "Reshape", &["ids", "column"], None),
        ("ids.int", "Cast", &["ids.column"], Some(("to", Attribute::Int(6)))),
        ("y", "Gather", &["table", "ids.int"], None),
    ];
    let ids = whole(&[4], &[0, 4, -5, -1]);
    let graph = graph_of(("ids", &ids), ("y", &[4, 1, 8]), &known, nodes);
    let compiled = compiled(&specialise(&graph, &Bindings::default()).graph).unwrap_or_else(|e| panic!("{e}"));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("ids", &ids).unwrap();
    runner.run().unwrap();
    agree(&runner.outputs()[0].1, &evaluate(&graph, &[("ids", ids)]).unwrap()[0]).unwrap_or_else(|e| panic!("{e}"));
    for outside in [5, -6] {
        runner.set("ids", &whole(&[4], &[0, 1, outside, 2])).unwrap();
        let told = runner.run().unwrap_err().to_string();
        assert_eq!(told, format!("`ids` has the index {outside}, and it selects among 5 (give -5 to 4)"));
    }
}

/// Holds for any indices: an index out of range has no 1 in its row.
#[test]
fn one_hot_rows_times_a_matrix_are_looked_up() {
    let known = [
        ("table", weights(&[5, 8])),
        ("column", whole(&[3], &[1, 6, 1])),
        ("places", whole(&[1, 1, 5], &[0, 1, 2, 3, 4])),
    ];
    let nodes: &[Node] = &[
        ("numbers", "Reshape", &["ids", "column"], None),
        ("is", "Equal", &["numbers", "places"], None),
        ("rows", "Cast", &["is"], Some(("to", Attribute::Int(1)))),
        ("y", "MatMul", &["rows", "table"], None),
    ];
    check_tokens(&known, nodes, &[3, 0, 4, 5, -1, 1_000_000_000_000], 1);
}

/// Every index selects the only row, also within a larger kernel.
#[test]
fn a_table_of_one_row_is_looked_up() {
    let known = [("table", weights(&[1, 8])), ("bias", weights(&[8])), ("shape", whole(&[3], &[1, 6, 8]))];
    let nodes: &[Node] = &[
        ("rows", "Gather", &["table", "ids"], None),
        ("sum", "Add", &["rows", "bias"], None),
        ("y", "Reshape", &["sum", "shape"], None),
    ];
    check_tokens(&known, nodes, &[0, -1, 0, 0, -1, 0], 1);
}

/// A matrix times each matrix of a batch is one convolution; for batches that broadcast, the matrix is
/// repeated.
#[test]
fn products_with_matrices_in_common_are_kernels() {
    let x = weights(&[3, 5, 4]);
    let known = [("left", weights(&[6, 5])), ("batch", weights(&[2, 1, 7, 6]))];
    let nodes: &[Node] = &[("each", "MatMul", &["left", "x"], None), ("y", "MatMul", &["batch", "each"], None)];
    check_images(&graph_of(("x", &x), ("y", &[2, 3, 7, 4]), &known, nodes), &x, 4);
}

/// Assignment to a slice is a kernel, fused with its neighbours.
#[test]
fn assignments_to_slices_are_kernels() {
    let x = weights(&[2, 4, 5, 3]);
    // Of each of two matrices, rows 1 and 2, and columns from the second last on.
    let places: Vec<i64> = [0, 1]
        .into_iter()
        .flat_map(|n| [1, 2].into_iter().flat_map(move |row| [-2, -1].into_iter().flat_map(move |c| [n, row, c])))
        .collect();
    let known = [("places", whole(&[2, 2, 2, 3], &places)), ("new", weights(&[2, 2, 2, 3]))];
    let nodes: &[Node] = &[
        ("twice", "Add", &["new", "new"], None),
        ("assigned", "ScatterND", &["x", "places", "twice"], None),
        ("y", "Relu", &["assigned"], None),
    ];
    check_images(&graph_of(("x", &x), ("y", &[2, 4, 5, 3]), &known, nodes), &x, 1);
}

/// Halves of an image and results computed from them are written directly to their concatenation, without a
/// copy.
#[test]
fn parts_of_an_image_that_stay_together_are_not_copied() {
    let x = weights(&[1, 3, 8, 8]);
    let known = [
        ("wa", weights(&[8, 3, 1, 1])),
        ("wb", weights(&[4, 4, 3, 3])),
        ("wy", weights(&[2, 12, 1, 1])),
        ("zero", whole(&[1], &[0])),
        ("four", whole(&[1], &[4])),
        ("eight", whole(&[1], &[8])),
        ("axis", whole(&[1], &[1])),
    ];
    let ints = |name: &'static str, numbers: &[i64]| Some((name, Attribute::Ints(numbers.to_vec())));
    let nodes: &[Node] = &[
        ("all", "Conv", &["x", "wa"], None),
        ("first", "Slice", &["all", "zero", "four", "axis"], None),
        ("second", "Slice", &["all", "four", "eight", "axis"], None),
        ("more", "Conv", &["second", "wb"], ints("pads", &[1, 1, 1, 1])),
        ("together", "Concat", &["first", "second", "more"], Some(("axis", Attribute::Int(1)))),
        ("y", "Conv", &["together", "wy"], None),
    ];
    check_images(&graph_of(("x", &x), ("y", &[1, 2, 8, 8]), &known, nodes), &x, 3);
}

/// Checks the result of a graph for `x`, with this number of kernels, and without copies or other steps.
fn check_images(graph: &Graph, x: &Tensor, n_kernels: usize) {
    let compiled = compiled(&specialise(graph, &Bindings::default()).graph).unwrap_or_else(|e| panic!("{e}"));
    let outline = Outline::of(&compiled.fused);
    let counts = (outline.n_kernels, outline.without_code.len(), outline.n_copies);
    assert_eq!(counts, (n_kernels, 0, 0));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", x).unwrap();
    runner.run().unwrap();
    check_near(&runner.outputs()[0].1, &evaluate(graph, &[("x", x.clone())]).unwrap()[0], 1e-5);
}

/// Makes a network with every kind of step on images; returns its input and the graph.
fn network_of_images() -> (Tensor, Graph) {
    let x = weights(&[1, 3, 14, 14]);
    let ints = |name: &'static str, numbers: &[i64]| Some((name, Attribute::Ints(numbers.to_vec())));
    let known = [
        ("ws", weights(&[32, 3, 3, 3])),
        ("bs", weights(&[32])),
        ("wd", weights(&[32, 1, 3, 3])),
        ("wa", weights(&[16, 32, 1, 1])),
        ("wb", weights(&[32, 32, 1, 1])),
        ("we", weights(&[48, 48, 1, 1])),
        ("wg", weights(&[48, 8, 1, 1])),
        ("wz", weights(&[32, 48, 3, 3])),
        ("wy", weights(&[10, 32, 1, 1])),
    ];
    let nodes: &[Node] = &[
        ("s0", "Conv", &["x", "ws", "bs"], None),
        ("s", "Relu", &["s0"], None),
        ("d0", "Conv", &["s", "wd"], Some(("group", Attribute::Int(32)))),
        ("d", "Relu", &["d0"], None),
        ("p", "MaxPool", &["d"], ints("kernel_shape", &[2, 2])),
        ("a", "Conv", &["p", "wa"], None),
        ("b", "Conv", &["p", "wb"], None),
        ("j", "Concat", &["a", "b"], Some(("axis", Attribute::Int(1)))),
        ("e", "Conv", &["j", "we"], None),
        ("r0", "Add", &["e", "j"], None),
        ("r", "Relu", &["r0"], None),
        ("h", "Conv", &["r", "wg"], Some(("group", Attribute::Int(6)))),
        ("z0", "Conv", &["h", "wz"], None),
        ("z", "Sigmoid", &["z0"], None),
        ("g", "GlobalAveragePool", &["z"], None),
        ("y", "Conv", &["g", "wy"], None),
    ];
    let graph = graph_of(("x", &x), ("y", &[1, 10, 1, 1]), &known, nodes);
    (x, specialise(&graph, &Bindings::default()).graph)
}

/// Layouts minimise the total cost of kernels and conversions; the results do not change.
#[test]
fn layouts_are_those_that_are_cheapest_together() {
    let (x, graph) = network_of_images();
    let target = host::target();
    let plain = lower(&graph, false, &host::target(), 1).unwrap();
    let answer = |fused: &Fused| {
        let compiled = compile_quickly(fused.clone(), &target, &|workload| guess(workload, &target)).unwrap();
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        runner.outputs()[0].1.clone()
    };
    let wanted = answer(&plain);
    let laid_out = |of_conversion: f64, of_blocks: f64| {
        // A convolution costs less the more of its images are in blocks; other kernels cost the same.
        let cost = |workload: &Workload| match workload.layout().channels() {
            _ if workload.label().starts_with("nest:copy") => Some(of_conversion),
            [input, output] => Some(10.0 - of_blocks * (f64::from(input > 1) + f64::from(output > 1))),
        };
        plain.clone().laid_out(16, Costs { expected: &cost, measured: &|_| None }, true).unwrap()
    };
    let layouts =
        |fused: &Fused| -> Vec<[i64; 2]> { fused.tasks().iter().map(|(w, _)| w.layout().channels()).collect() };

    // Blocks everywhere except at the ends and around the convolution in groups of 8, which has no choice:
    // one conversion before it; the kernel after it reads plain channels without a conversion.
    let fused = laid_out(2.0, 3.0);
    assert_eq!(fused.n_conversions(), 1);
    let of_convolutions: Vec<[i64; 2]> = layouts(&fused).into_iter().filter(|sides| *sides != [1, 1]).collect();
    let both = [16, 16];
    assert_eq!(of_convolutions, [[1, 16], both, both, both, both, [1, 16]]);
    check_near(&answer(&fused), &wanted, 1e-5);

    // Conversions that cost more than they save are left out.
    let fused = laid_out(100.0, 3.0);
    assert_eq!(fused.n_conversions(), 0);
    check_near(&answer(&fused), &wanted, 1e-5);
    let fused = laid_out(1.0, -1.0);
    assert_eq!((fused.n_conversions(), layouts(&fused)), (0, layouts(&plain)));
}

/// Layouts are chosen once for the same model, machine and records: cached layouts lead to the same steps,
/// and new records lead to a new choice.
#[test]
fn chosen_layouts_are_kept() {
    let (_, graph) = network_of_images();
    let target = host::target();
    let plain = lower(&graph, false, &target, 1).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(Some(&folder.path().join("cache"))).unwrap();
    let n_kept = || {
        let names = std::fs::read_dir(folder.path().join("cache")).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with("text-")).count()
    };
    let layouts = |records: &Records, threads: usize| -> Vec<String> {
        let making = CompileOptions { cache: &cache, for_runs: false };
        let compiled = compile_known(plain.clone(), &target, threads, records, making).unwrap();
        compiled.fused.tasks().iter().map(|(workload, _)| workload.to_string()).collect()
    };
    let chosen = layouts(&Records::default(), 1);
    assert_eq!(n_kept(), 1);
    assert_eq!(layouts(&Records::default(), 1), chosen);
    assert_eq!(n_kept(), 1);
    layouts(&Records::default(), 2);
    assert_eq!(n_kept(), 2, "other threads, another choice");

    let database = Database::new(Some(&folder.path().join("records.db"))).unwrap();
    let records = || database.records().unwrap();
    assert_eq!(layouts(&records(), 1), chosen);
    assert_eq!(n_kept(), 2, "no database is as good as no records");
    let record = include_str!("../../../tune/tests/data/records-v1.jsonl").lines().next().unwrap();
    database.import(Cursor::new(record), "a record", &()).unwrap();
    assert_eq!(layouts(&records(), 1), chosen, "a record of something else");
    assert_eq!(n_kept(), 3, "records may say more");
}

/// A convolution that reads blocks and writes plain channels costs as much as the slower variant that keeps
/// the layout, unless it was measured itself.
#[test]
fn convolutions_change_layouts_where_that_is_cheaper_than_a_conversion() {
    let x = weights(&[1, 32, 6, 6]);
    let known = [("wa", weights(&[32, 32, 1, 1])), ("wb", weights(&[32, 32, 1, 1])), ("wg", weights(&[32, 8, 1, 1]))];
    let nodes: &[Node] = &[
        ("a", "Conv", &["x", "wa"], None),
        ("b", "Conv", &["a", "wb"], None),
        ("y", "Conv", &["b", "wg"], Some(("group", Attribute::Int(4)))),
    ];
    let graph = graph_of(("x", &x), ("y", &[1, 32, 6, 6]), &known, nodes);
    let plain = lower(&specialise(&graph, &Bindings::default()).graph, false, &host::target(), 1).unwrap();
    let cost = |of_conversion: f64| {
        move |workload: &Workload| match workload.layout().channels() {
            _ if workload.label().starts_with("nest:copy") => Some(of_conversion),
            [input, output] => Some(10.0 - 3.0 * (f64::from(input > 1) + f64::from(output > 1))),
        }
    };
    let layouts = |costs: Costs| -> (usize, Vec<[i64; 2]>) {
        let fused = plain.clone().laid_out(16, costs, true).unwrap();
        let tasks = fused.tasks().into_iter().filter(|(w, _)| !w.label().starts_with("nest"));
        (fused.n_conversions(), tasks.map(|(w, _)| w.layout().channels()).collect())
    };
    let (cheap, dear) = (cost(2.0), cost(5.0));
    let unknown = |_: &Workload| None;
    let (converted, changed) = ((1, vec![[1, 16], [16, 16], [1, 1]]), (0, vec![[1, 16], [16, 1], [1, 1]]));
    assert_eq!(layouts(Costs { expected: &cheap, measured: &unknown }), converted);
    assert_eq!(layouts(Costs { expected: &dear, measured: &unknown }), changed);
    // This choice is the cheapest of those for which everything was measured.
    let measured = |workload: &Workload| dear(workload).filter(|_| workload.layout().channels() != [16, 1]);
    assert_eq!(layouts(Costs { expected: &dear, measured: &measured }), converted);
}

/// A constant image that a convolution adds to its result is stored in the layout of the result.
#[test]
fn constant_images_are_in_the_layout_of_what_they_are_added_to() {
    let x = weights(&[1, 32, 6, 6]);
    let known =
        [("wa", weights(&[32, 32, 1, 1])), ("places", weights(&[1, 32, 6, 6])), ("wb", weights(&[16, 32, 1, 1]))];
    let nodes: &[Node] = &[
        ("a", "Conv", &["x", "wa"], None),
        ("placed", "Add", &["a", "places"], None),
        ("y", "Conv", &["placed", "wb"], None),
    ];
    let graph = graph_of(("x", &x), ("y", &[1, 16, 6, 6]), &known, nodes);
    let (special, target) = (specialise(&graph, &Bindings::default()).graph, host::target());
    let cost = |workload: &Workload| Some(if workload.layout().channels() == [1, 16] { 1.0 } else { 10.0 });
    let plain = lower(&special, false, &target, 1).unwrap();
    let fused = plain.laid_out(16, Costs { expected: &cost, measured: &cost }, false).unwrap();
    let adds_in_blocks =
        |workload: &Workload| workload.layout().channels()[1] == 16 && workload.to_string().contains("epilogue=add");
    assert!(fused.tasks().iter().any(|(workload, _)| adds_in_blocks(workload)), "{:?}", fused.tasks());
    let compiled = compile_quickly(fused, &target, &|workload| guess(workload, &target)).unwrap();
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", &x).unwrap();
    runner.run().unwrap();
    check_near(&runner.outputs()[0].1, &evaluate(&special, &[("x", x)]).unwrap()[0], 1e-5);
}

/// Returns the value of a graph's only output, and the profile of its steps.
fn answer(graph: &Graph, target: &Target, name: &str, x: &Tensor) -> (Tensor, Vec<ProfiledStep>) {
    let compiled = compiled_for(graph, target).unwrap_or_else(|e| panic!("{e}"));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap_or_else(|e| panic!("{e}"));
    runner.set(name, x).unwrap();
    // Twice, as the data that a run leaves behind must not affect the next.
    runner.run().unwrap();
    let first = runner.outputs();
    let steps = compiled.profile(&mut runner, 1).unwrap();
    assert_eq!(first[0].1, runner.outputs()[0].1, "the same in each run");
    (first[0].1.clone(), steps)
}

/// Checks that two results differ by no more than a fraction of the largest number.
fn check_near(found: &Tensor, wanted: &Tensor, tolerance: f64) {
    assert_eq!(found.ty(), wanted.ty());
    let (found, wanted) = (found.floats(), wanted.floats());
    let largest = wanted.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    for (at, (x, y)) in found.iter().zip(&wanted).enumerate() {
        assert!((x - y).abs() <= tolerance * largest, "{x} at {at}, and should be {y}");
    }
}

/// Parts of a tensor begin at offsets that no device accepts for an argument, and one operator has no code.
#[test]
fn a_small_network_runs_on_a_device() {
    let Some((target, _one)) = device() else { return };
    let pads = Some(("pads", Attribute::Ints(vec![1; 4])));
    let along = |axis: i64| Some(("axis", Attribute::Int(axis)));
    let known = [
        ("w1", weights(&[5, 3, 3, 3])),
        ("w2", weights(&[7, 5, 1, 1])),
        ("w3", weights(&[6, 12, 3, 3])),
        ("w4", weights(&[9, 11])),
    ];
    let nodes: &[Node] = &[
        ("a", "Conv", &["x", "w1"], pads.clone()),
        ("b", "Relu", &["a"], None),
        ("c", "Conv", &["b", "w2"], None),
        ("both", "Concat", &["b", "c"], along(1)),
        ("d", "Conv", &["both", "w3"], pads),
        ("angles", "Atan", &["d"], None),
        ("more", "MatMul", &["angles", "w4"], None),
        ("y", "Softmax", &["more"], along(-1)),
    ];
    let x = weights(&[1, 3, 9, 9]);
    let graph = graph_of(("x", &x), ("y", &[1, 6, 9, 11]), &known, nodes);
    let special = specialise(&graph, &Bindings::default()).graph;
    let (found, steps) = answer(&special, &target, "x", &x);
    let kinds: Vec<&str> = steps.iter().map(|step| step.kind).collect();
    assert!(kinds.contains(&"host") && kinds.iter().filter(|kind| **kind == "kernel").count() >= 5, "{kinds:?}");
    assert!(steps.iter().all(|step| step.us > 0.0), "all of it takes time");
    check_near(&found, &answer(&special, &host::target(), "x", &x).0, 1e-4);
    check_near(&found, &evaluate(&graph, &[("x", x)]).unwrap()[0], 1e-4);
}

#[test]
fn a_real_network_computes_on_a_device_what_it_does_on_the_cpu() {
    let Some((target, _one)) = device() else { return };
    let case = cases("light.cases.gz").into_iter().find(|case| case.name == "squeezenet").expect("it is among them");
    let model = onnx::read(&case.model, &mut no_files).expect("a model");
    let special = specialise(&model.graph, &Bindings { fold_bytes: 1 << 8, ..Bindings::default() });
    let graph = light::with_weights(&special.graph);
    let (input, x) = light::input_of(&graph);
    let (found, _) = answer(&graph, &target, &input, &x);
    light::check("squeezenet", &found.floats(), &light::answers()["squeezenet"], 1e-4);
    check_near(&found, &answer(&graph, &host::target(), &input, &x).0, 1e-4);
}

/// Runs some of the official cases; the number skipped between two can be set.
#[test]
fn operators_compute_on_a_device_what_onnx_says() {
    let Some((target, _one)) = device() else { return };
    let every: usize = std::env::var("TILEWRIGHT_EVERY").ok().and_then(|n| n.parse().ok()).unwrap_or(61);
    let at = Cell::new(0_usize);
    let n_host = check_cases("node.cases.gz", 500 / every, |case| {
        at.set(at.get() + 1);
        if at.get().is_multiple_of(every) { check(case, &target) } else { Ok(None) }
    });
    assert!(n_host.contains(&0), "some are kernels alone");
}
