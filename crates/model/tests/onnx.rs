//! Models as kernels: the official tests of ONNX, and real networks, against what others compute of them.

#[path = "../../graph/tests/common/mod.rs"]
mod common;

use common::{Case, agree, cases, check_cases, light, no_files};
use tilewright_device::host;
use tilewright_graph::onnx::{ModelFile, NodeFile, Port};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Graph, Reason, Tensor, Value, ValueId, evaluate, onnx, specialise};
use tilewright_ir::Program;
use tilewright_ir::op::Workload;
use tilewright_model::{CompileError, Compiled, Runner, Step, compile_quickly, lower};
use tilewright_runtime::Threads;
use tilewright_tune::{Setting, Task};

/// What the model of the machine guesses, for one thread.
fn guess(workload: &Workload) -> Result<Program, String> {
    let setting = Setting { workload: workload.clone(), target: host::target(), n_threads: 1 };
    let task = Task::new(setting, None).map_err(|e| e.to_string())?;
    let config = task.first_guess(0).unwrap_or_else(|| task.space.config_at(0));
    task.program(&config).map_err(|(at, why)| format!("step {at}: {why}"))
}

fn compiled(graph: &Graph) -> Result<Compiled, CompileError> {
    let fused = lower(graph).map_err(|e| CompileError::Kernel { workload: String::new(), why: e.to_string() })?;
    compile_quickly(fused, &host::target(), &guess)
}

/// A graph in which an input is known.
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

/// The inputs whose values shapes depend on.
fn needed(reason: &Reason) -> &[String] {
    match reason {
        Reason::NeedsInput { inputs, .. } => inputs,
        _ => &[],
    }
}

/// Runs a case with kernels; how many operators had none. Nothing where shapes depend on data, or elements
/// are of a type that runs do not have.
fn check(case: &Case) -> Result<Option<usize>, String> {
    let model = onnx::read(&case.model, &mut no_files).map_err(|e| e.to_string())?;
    let names: Vec<String> = model.graph.inputs.iter().map(|&id| model.graph.value(id).name.clone()).collect();
    let mut n_host = 0;
    for (inputs, outputs) in &case.sets {
        let given: Vec<(&String, &Tensor)> = names.iter().zip(inputs).collect();
        let shapes: Vec<_> = given.iter().map(|(name, x)| ((*name).clone(), x.shape().to_vec())).collect();
        let mut graph = model.graph.clone();
        let special = loop {
            let is_there = |name: &String| graph.inputs.iter().any(|&id| graph.value(id).name == *name);
            let shapes = shapes.iter().filter(|(name, _)| is_there(name)).cloned().collect();
            let special = specialise(&graph, &Bindings { shapes, ..Bindings::default() });
            let wanted: Vec<String> = special.problems.iter().flat_map(|p| needed(&p.reason).to_vec()).collect();
            let Some((name, x)) = given.iter().find(|(name, _)| wanted.contains(name) && is_there(name)) else {
                break special;
            };
            graph = with_known(&graph, name, x);
        };
        match special.problems.first() {
            None => {}
            Some(problem) if problem.is_unsupported() => return Ok(None),
            Some(problem) => return Err(problem.to_string()),
        }
        let compiled = match compiled(&special.graph) {
            Err(CompileError::Dtype { .. }) => return Ok(None),
            compiled => compiled.map_err(|e| e.to_string())?,
        };
        n_host += compiled.fused.steps.iter().filter(|step| matches!(step, Step::Host(_))).count();
        let mut runner = Runner::new(&compiled, &Threads::new(1).unwrap()).map_err(|e| e.to_string())?;
        for (name, x) in given {
            if compiled.fused.net.inputs.iter().any(|id| compiled.fused.net.value(*id).name == *name) {
                runner.set(name, x).map_err(|e| e.to_string())?;
            }
        }
        // Twice: what a run leaves behind must not matter to the next.
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
    check_file("node.cases.gz", 500, 770);
}

#[test]
fn small_models_compute_what_onnx_says() {
    check_file("suite.cases.gz", 80, 95);
}

fn check_file(file: &str, at_least: usize, by_kernels: usize) {
    let n_host = check_cases(file, at_least, check);
    let found = n_host.iter().filter(|&&n| n == 0).count();
    assert!(found >= by_kernels, "{file}: {found} by kernels alone, and {by_kernels} were");
}

#[test]
fn real_networks_compute_what_onnx_runtime_does_in_few_kernels() {
    // Kernels, and bytes on the way for each of the least that there must be room for.
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
        let mut runner = Runner::new(&compiled, &Threads::new(2).unwrap()).unwrap();
        let (input, x) = light::input_of(&light::with_weights(&special.graph));
        runner.set(&input, &x).unwrap();
        runner.run().unwrap();
        light::check(name, &runner.outputs()[0].1.floats(), &wanted[*name], 1e-4);
    }
}

/// Numbers of either sign, the same ones each time.
fn weights(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    let of = |at: usize| ((at * 37 + shape.len() * 11) % 23) as f64 / 23.0 - 0.4;
    Tensor::from_floats(DType::F32, shape, &(0..n).map(of).collect::<Vec<_>>())
}

fn whole(shape: &[usize], numbers: &[i64]) -> Tensor {
    let numbers: Vec<i128> = numbers.iter().map(|&n| n.into()).collect();
    Tensor::from_integers(DType::I64, shape, &numbers)
}

/// A node's name, operator, inputs, and an attribute where it has one.
type Node<'a> = (&'a str, &'a str, &'a [&'a str], Option<(&'a str, Attribute)>);

/// Checks what nodes make of the numbers of six tokens, `ids: [1, 6]`, in `y: [1, 6, 8]`, and how many
/// kernels that takes; nothing else may run.
fn check_tokens(known: &[(&str, Tensor)], nodes: &[Node], ids: [i64; 6], n_kernels: usize) {
    let port = |name: &str, dtype: DType, dims: &[usize]| {
        let dims = dims.iter().map(|&n| Dim::Size(n)).collect();
        Port { name: name.to_owned(), dtype, dims }
    };
    let mut model = ModelFile {
        name: "tokens".to_owned(),
        opset: 17,
        inputs: vec![port("ids", DType::I64, &[1, 6])],
        outputs: vec![port("y", DType::F32, &[1, 6, 8])],
        weights: known.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect(),
        nodes: Vec::new(),
    };
    for (name, op, inputs, attribute) in nodes {
        model.nodes.push(NodeFile {
            op: (*op).to_owned(),
            inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
            outputs: vec![(*name).to_owned()],
            attributes: attribute.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        });
    }
    let graph = onnx::read(&onnx::write(&model).into(), &mut no_files).expect("a model").graph;
    let compiled = compiled(&specialise(&graph, &Bindings::default()).graph).unwrap_or_else(|e| panic!("{e}"));
    let of_step = |step: &Step| match step {
        Step::Kernel(_) => Some(true),
        Step::Host(_) => Some(false),
        Step::Part { .. } | Step::Join { .. } => None,
    };
    let steps: Vec<bool> = compiled.fused.steps.iter().filter_map(of_step).collect();
    assert_eq!(steps, vec![true; n_kernels]);
    let given = [("ids", whole(&[1, 6], &ids))];
    let mut runner = Runner::new(&compiled, &Threads::new(1).unwrap()).unwrap();
    runner.set("ids", &given[0].1).unwrap();
    runner.run().unwrap();
    let wanted = evaluate(&graph, &given).unwrap();
    agree(&runner.outputs()[0].1, &wanted[0]).unwrap_or_else(|what| panic!("{what}"));
}

/// Rows are looked up, and queries, keys and values are one product, whose heads nothing moves.
#[test]
fn attention_is_five_kernels() {
    let perm = |order: [i64; 4]| Some(("perm", Attribute::Ints(order.to_vec())));
    let known = [
        ("table", weights(&[11, 8])),
        ("wq", weights(&[8, 8])),
        ("wk", weights(&[8, 8])),
        ("wv", weights(&[8, 8])),
        ("bq", weights(&[8])),
        ("scale", weights(&[1])),
        ("heads", whole(&[4], &[1, 6, 2, 4])),
        ("rows", whole(&[3], &[1, 6, 8])),
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
    check_tokens(&known, nodes, [3, 10, 0, -1, -11, 7], 5);
}

/// Whatever the numbers are: what is none of the places has no 1 in its row.
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
    check_tokens(&known, nodes, [3, 0, 4, 5, -1, 1_000_000_000_000], 1);
}
