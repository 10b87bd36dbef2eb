//! The official tests of ONNX: what is refused or wrong is listed in `tests/onnx/refused.txt`, case by case.

mod common;

use std::collections::BTreeMap;

use common::{Case, agree, cases, is_plain, no_files, read};
use tilewright_graph::{Bindings, Tensor, evaluate, onnx, specialise};

/// Evaluates a case, and specialises it as well: both must say the same of the outputs' types.
fn check(case: &Case) -> Result<(), String> {
    let model = onnx::read(&case.model, &mut no_files).map_err(|e| e.to_string())?;
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
        // Where shapes depend on values, nothing is said.
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

fn check_file(file: &str, at_least: usize) {
    let listed = String::from_utf8(read("refused.txt")).expect("text");
    let listed: Vec<&str> = listed.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let (mut passed, mut n_plain, mut refused) = (0, 0, BTreeMap::new());
    let cases = cases(file);
    for case in &cases {
        match check(case) {
            Ok(()) => {
                passed += 1;
                n_plain += usize::from(is_plain(case));
            }
            Err(why) => {
                refused.insert(case.name.as_str(), why);
            }
        }
    }
    println!("{file}: {passed} of {} pass, {n_plain} of them plain", cases.len());
    let known = |name: &str| listed.contains(&name);
    let news: Vec<String> =
        refused.iter().filter(|(name, _)| !known(name)).map(|(name, why)| format!("{name}: {why}")).collect();
    if std::env::var_os("LIST").is_some() {
        refused.iter().for_each(|(name, why)| println!("{name}: {why}"));
    }
    assert!(news.is_empty(), "{} are refused or wrong, and not listed:\n{}", news.len(), news.join("\n"));
    let mended: Vec<&str> =
        cases.iter().map(|case| case.name.as_str()).filter(|name| known(name) && !refused.contains_key(name)).collect();
    assert!(mended.is_empty(), "these pass (take them off the list): {}", mended.join(" "));
    assert!(passed >= at_least, "{passed} pass, and {at_least} did");
}

#[test]
fn single_operators_compute_what_onnx_says() {
    check_file("node.cases.gz", 500);
}

#[test]
fn small_models_compute_what_onnx_says() {
    check_file("suite.cases.gz", 80);
}
