//! `predict query`: the likeliest parameters of a problem.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::Args;
use serde_json::{Map, Value as Json, json};
use tilewright::Caches;
use tilewright_ir::op::Workload;
use tilewright_lab::Caller;
use tilewright_lab::predict::{NOT_EXACT, ask_template, load_model, watch_look_ahead};
use tilewright_learn::sequence::Model;
use tilewright_tune::predict::{Inputs, LookAhead, records};

use super::{pair, show as tell};
use crate::command::{MachineArgs, make_task};
use crate::error::{OrBadInput, bad_input};
use crate::output::{message, table, write_result};

/// Arguments of `predict query`.
#[derive(Args, Debug)]
pub struct QueryArgs {
    /// Model that `predict train` wrote
    model: PathBuf,
    /// For a model of a kernel, the problem's fields, such as n_inputs=64,in_height=7; for one of a template,
    /// a workload
    #[arg(long, value_name = "KEY=VALUE,...|WORKLOAD")]
    problem: String,
    /// Answers to give, and width of the beam that finds them; alone, the one that is expected to be best
    #[arg(short, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    k: u16,
    #[command(flatten)]
    machine: MachineArgs,
}

/// An answer as it is shown.
struct Candidate {
    parameters: Map<String, Json>,
    probability: f64,
}

/// Shows the likeliest valid parameters.
///
/// # Errors
/// Bad input if the file is no model, the problem not one of its kernel, or no configuration valid for it.
pub fn run(args: &QueryArgs, as_json: bool) -> anyhow::Result<()> {
    let (model, about) = load_model(&args.model)?;
    match about.get("template") {
        Some(_) => of_template(args, &model, &about, as_json),
        None => of_kernel(args, &model, &about, as_json),
    }
}

fn of_kernel(args: &QueryArgs, model: &Model, about: &Json, as_json: bool) -> anyhow::Result<()> {
    if args.machine.target != "host" || args.machine.threads != 1 {
        return Err(bad_input("the model is of another compiler's kernel: --target and --threads mean nothing to it"));
    }
    let named = |error| bad_input(format!("{}: {error}", args.model.display()));
    let (kernel, inputs) = Inputs::read(about, model.vocabulary()).map_err(named)?;
    let pairs = args.problem.split(',').filter(|text| !text.trim().is_empty());
    let given = pairs.map(pair).collect::<Result<Vec<_>, _>>();
    let given = given.or_bad_input("--problem takes fields with values, such as n_inputs=64,n_outputs=32")?;
    if let Some((name, _)) = given.iter().enumerate().find_map(|(at, g)| given[..at].iter().find(|e| e.0 == g.0)) {
        return Err(bad_input(format!("--problem gives {name} twice")));
    }
    let problem = inputs.ask(&kernel, &given).or_bad_input("")?;
    // Nothing is lost where an interrupt ends the program.
    let never = AtomicBool::new(false);
    let mut look_ahead =
        LookAhead::new(&kernel, &problem).watched(watch_look_ahead(Caller { stop: &never, tell: &tell }));
    if look_ahead.is_satisfiable() == Some(false) {
        let constraint = kernel.unsatisfiable(&problem).unwrap_or("?");
        let reason = format!("constraint {constraint} leaves no valid configuration of {}", kernel.name);
        return Err(bad_input(format!("{reason} for this problem")));
    }
    let answers = model.answers(&inputs.problem(&problem), args.k.into(), Some(&mut look_ahead));
    let is_exact = look_ahead.is_exact();
    if !is_exact {
        message(NOT_EXACT);
    }
    let named = &kernel.name;
    anyhow::ensure!(
        !answers.is_empty(),
        "no valid configuration of {named} was found for this problem; there may be one"
    );
    let candidates = answers.iter().map(|answer| {
        debug_assert!(kernel.is_valid(&problem, &answer.values), "invariant: whole answers are valid");
        let parameters = kernel.parameters.iter().zip(&answer.values);
        let value = |text: &str| text.parse::<i64>().map_or_else(|_| text.into(), Json::from);
        let parameters = parameters.map(|(p, &at)| (p.name.clone(), value(&p.values[at as usize])));
        Candidate { parameters: parameters.collect(), probability: answer.log_probability.exp() }
    });
    show(&kernel.name, &candidates.collect::<Vec<_>>(), is_exact, as_json)
}

fn of_template(args: &QueryArgs, model: &Model, about: &Json, as_json: bool) -> anyhow::Result<()> {
    let template = records::read_template(about).or_bad_input("")?;
    let workload =
        Workload::parse(&args.problem).or_bad_input("the model is of a template: --problem takes a workload")?;
    args.machine.check_threads()?;
    let task = make_task(workload, args.machine.target()?, args.machine.threads, Some(template))?;
    let answers = ask_template(model, &task, Caches::Warm, args.k.into())?;
    let candidates = answers.into_iter().map(|(config, log_probability)| {
        let Json::Object(parameters) = task.space.config_to_json(&config) else {
            unreachable!("invariant: a configuration is an object")
        };
        Candidate { parameters, probability: log_probability.exp() }
    });
    show(template, &candidates.collect::<Vec<_>>(), true, as_json)
}

fn show(kernel: &str, candidates: &[Candidate], is_exact: bool, as_json: bool) -> anyhow::Result<()> {
    let json = json!({
        "kernel": kernel,
        "exact": is_exact,
        "candidates": candidates.iter().map(|candidate| json!({
            "parameters": candidate.parameters,
            "probability": candidate.probability,
            // Beams are kept to valid prefixes, so nothing else comes out.
            "valid": true,
        })).collect::<Vec<_>>(),
    });
    let names = candidates.first().map(|candidate| candidate.parameters.keys().cloned()).into_iter().flatten();
    let mut rows = vec![["probability".to_owned()].into_iter().chain(names).collect::<Vec<_>>()];
    for candidate in candidates {
        let values = candidate.parameters.values().map(|value| value.as_str().map_or(value.to_string(), str::to_owned));
        rows.push([format!("{:.4}", candidate.probability)].into_iter().chain(values).collect());
    }
    write_result(as_json, &json, &format!("{kernel}\n{}", table(&rows)))
}
