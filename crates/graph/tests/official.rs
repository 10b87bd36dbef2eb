//! Official tests of ONNX; unsupported and wrong cases are listed in `tests/onnx/refused.txt`.

mod common;

use common::{Case, agree, cases, check_cases, no_files, refused};
use tilewright_graph::{Bindings, Tensor, evaluate, onnx, specialise};

/// Evaluates a case, and also specialises it: both must agree on the outputs' types.
fn check(case: &Case) -> Result<(), String> {
    let model = onnx::read(&case.model, &mut no_files).map_err(|e| e.to_string())?;
    if model.graph.is_random() {
        return Err("its random numbers are its own".to_owned());
    }
    let names: Vec<String> = model.graph.inputs.iter().map(|&id| model.graph.value(id).name.clone()).collect();
    for (inputs, outputs) in &case.sets {
        let given: Vec<(&str, Tensor)> = names.iter().map(String::as_str).zip(inputs.iter().cloned()).collect();
        let found = evaluate(&model.graph, &given).map_err(|e| e.to_string())?;
        if found.len() != outputs.len() {
            return Err(format!("{} outputs, and {} should be there", found.len(), outputs.len()));
        }
        for (at, (found, wanted)) in found.iter().zip(outputs).enumerate() {
            agree(found, wanted).map_err(|what| format!("output {} {what}", at + 1))?;
        }
        let shapes = names.iter().cloned().zip(inputs.iter().map(|x| x.shape().to_vec())).collect();
        let special = specialise(&model.graph, &Bindings { shapes, ..Bindings::default() });
        // If shapes depend on values, types are not compared.
        if special.problems.is_empty() {
            let types: Vec<_> = special.graph.outputs.iter().map(|&id| special.graph.ty(id).clone()).collect();
            let wanted: Vec<_> = outputs.iter().map(|x| x.ty().clone()).collect();
            if types != wanted {
                return Err(format!("inferred {types:?}, and it should be {wanted:?}"));
            }
            let fits = evaluate(&special.graph, &given).map_err(|e| format!("specialised: {e}"))?;
            if fits != found {
                return Err("specialised, it gives something else".to_owned());
            }
        } else if special.problems.iter().any(|problem| !problem.is_unsupported()) {
            return Err(format!("specialised: {}", special.problems[0]));
        }
    }
    Ok(())
}

/// Checks that cases listed as refused are refused.
fn check_refused(file: &str) {
    let listed = refused();
    let mut mended = Vec::new();
    for case in cases(file).into_iter().filter(|case| listed.contains(&case.name)) {
        match check(&case) {
            Ok(()) => mended.push(case.name),
            Err(why) => println!("{}: {why}", case.name),
        }
    }
    assert!(mended.is_empty(), "these pass (take them off the list): {}", mended.join(" "));
}

#[test]
fn single_operators_compute_what_onnx_says() {
    check_cases("node.cases.gz", 500, |case| check(case).map(Some));
}

#[test]
fn small_models_compute_what_onnx_says() {
    check_cases("suite.cases.gz", 80, |case| check(case).map(Some));
}

#[test]
fn trees_machines_and_scalers_compute_what_onnx_runtime_does() {
    check_cases("ml.cases.gz", 130, |case| check(case).map(Some));
}

#[test]
fn what_is_listed_is_refused() {
    ["node.cases.gz", "suite.cases.gz", "ml.cases.gz"].iter().for_each(|file| check_refused(file));
}
