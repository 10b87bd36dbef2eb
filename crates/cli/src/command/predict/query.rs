//! `predict query`: the likeliest parameters of a problem.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::Args;
use serde_json::json;
use tilewright_ir::op::Workload;
use tilewright_lab::Caller;
use tilewright_lab::predict::load_model;
use tilewright_lab::predict::query::{Answers, ask_kernel, ask_workload};
use tilewright_tune::TemplateSetting;
use tilewright_tune::predict::records;

use super::{pair, show as tell};
use crate::command::MachineArgs;
use crate::error::{OrBadInput, bad_input};
use crate::output::write_result;

/// Arguments of `predict query`.
#[derive(Args, Debug)]
pub struct QueryArgs {
    /// Model that `predict train` wrote
    model: PathBuf,
    /// Problem: for a model of a kernel its fields, such as n_inputs=64,in_height=7; for one of a template, a
    /// workload
    #[arg(long, value_name = "KEY=VALUE,...|WORKLOAD")]
    problem: String,
    /// Answers to give, and width of the beam that finds them; alone, the one that is expected to be best
    #[arg(short, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    k: u16,
    #[command(flatten)]
    machine: MachineArgs,
}

/// Shows the likeliest valid parameters.
///
/// # Errors
/// Bad input if the file is not a model, the problem is not one of its kernel, or no configuration is valid
/// for it.
pub fn run(args: &QueryArgs, as_json: bool) -> anyhow::Result<()> {
    let (model, about) = load_model(&args.model)?;
    let (machine, width) = (&args.machine, args.k.into());
    let answers = if about.get("template").is_some() {
        let template = records::read_template(&about).or_bad_input("")?;
        let workload =
            Workload::parse(&args.problem).or_bad_input("the model is of a template: --problem takes a workload")?;
        machine.place().check_threads()?;
        let setting = TemplateSetting { workload, target: machine.place().target()?, n_threads: machine.threads };
        ask_workload(&model, template, setting, width)?
    } else {
        if machine.target != "host" || machine.threads != 1 {
            let what = "the model is of another compiler's kernel: --target and --threads mean nothing to it";
            return Err(bad_input(what));
        }
        let pairs = args.problem.split(',').filter(|text| !text.trim().is_empty());
        let given = pairs.map(pair).collect::<Result<Vec<_>, _>>();
        let given = given.or_bad_input("--problem takes fields with values, such as n_inputs=64,n_outputs=32")?;
        let is_first = |at: usize| given[..at].iter().all(|earlier| earlier.0 != given[at].0);
        if let Some(at) = (0..given.len()).find(|&at| !is_first(at)) {
            return Err(bad_input(format!("--problem gives {} twice", given[at].0)));
        }
        // Nothing is lost if an interrupt ends the program.
        let never = AtomicBool::new(false);
        let caller = Caller { stop: &never, tell: &tell };
        ask_kernel(&args.model, &model, &about, &given, width, caller)?
    };
    show(&answers, as_json)
}

fn show(answers: &Answers, as_json: bool) -> anyhow::Result<()> {
    let Answers { kernel, is_exact, candidates } = answers;
    let json = json!({
        "kernel": kernel,
        "exact": is_exact,
        "candidates": candidates.iter().map(|candidate| json!({
            "parameters": candidate.parameters,
            "probability": candidate.probability,
            // Beams are restricted to valid prefixes, so that all answers are valid.
            "valid": true,
        })).collect::<Vec<_>>(),
    });
    write_result(as_json, &json, &answers.text())
}
