//! Models as kernels: the official tests of ONNX, and real networks, against what others compute of them.

#[path = "../../graph/tests/common/mod.rs"]
mod common;

use common::{Case, agree, cases, check_cases, light, no_files};
use tilewright_device::host;
use tilewright_graph::{Bindings, Graph, Reason, Tensor, Value, ValueId, onnx, specialise};
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
    check_file("node.cases.gz", 500);
}

#[test]
fn small_models_compute_what_onnx_says() {
    check_file("suite.cases.gz", 80);
}

fn check_file(file: &str, at_least: usize) {
    let n_host = check_cases(file, at_least, check);
    println!("{file}: {} by kernels alone", n_host.iter().filter(|&&n| n == 0).count());
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
