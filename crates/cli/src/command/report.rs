//! `report`: the contents of a database of records as a self-contained page, or as JSON.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright::version::BUILD;
use tilewright_lab::report::{self, Facts, ModelSubject};
use tilewright_model::CompileOptions;

use super::bench_model::alone;
use super::model::{BindingArgs, InputArgs, KnownKernels, ModelArgs};
use super::{CPU, DatabaseArgs, HOST, KernelRounding, MachineArgs, count, parse_workloads};
use crate::error::bad_input;
use crate::output::{Destination, message, writable, write_result, write_result_of};

/// Arguments of `report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Workloads or sets of them, or a model, MODEL.onnx, which is run for its profile [default: all that are
    /// recorded]
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Page to write, such as report.html, or - for standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    records: DatabaseArgs,
    #[command(flatten, next_help_heading = "For a model")]
    model: OfModelArgs,
}

/// Options of running a model.
#[derive(Args, Debug)]
struct OfModelArgs {
    #[command(flatten)]
    bindings: BindingArgs,
    #[command(flatten)]
    inputs: InputArgs,
    #[command(flatten)]
    rounding: KernelRounding,
    /// Runs to take the medians of [default: 20]
    #[arg(long, value_name = "N")]
    runs: Option<usize>,
    #[command(flatten)]
    machine: MachineArgs,
}

impl OfModelArgs {
    /// Whether any option for models is given.
    fn is_given(&self) -> bool {
        !self.bindings.is_empty()
            || !self.inputs.is_empty()
            || self.rounding.exact
            || self.rounding.bf16
            || self.runs.is_some()
            || self.machine.threads != 1
            || self.machine.target != HOST
            || self.machine.device != CPU
    }
}

/// Writes the page, and with `--json` its facts.
///
/// # Errors
/// Bad input if there is no database, nothing is recorded, or the page cannot be written.
pub fn run(args: &ReportArgs, as_json: bool) -> anyhow::Result<()> {
    if args.output.is_none() && !as_json {
        return Err(bad_input("there is no file to write the page to (give -o FILE.html, or --json)"));
    }
    let output = args.output.as_deref().map(|path| writable(path, as_json, "another file with -o")).transpose()?;
    if let Some(model) = alone(&args.workloads, "told of")? {
        return of_model(args, &model, output, as_json);
    }
    if args.model.is_given() {
        let options = "--dim, --shape, --set, --input, --exact, --bf16, --runs, --threads, --target and --device";
        return Err(bad_input(format!("{options} are for a model (give MODEL.onnx)")));
    }
    let database = args.records.database()?;
    let store = database.open_existing()?;
    let mut asked = Vec::new();
    for text in &args.workloads {
        asked.extend(parse_workloads(text, KernelRounding::default())?.iter().map(ToString::to_string));
    }
    let facts = report::facts(&store, &asked).map_err(|error| database.refuse(error))?;
    let Facts { subjects, passed_over, notes } = facts;
    notes.iter().for_each(|note| message(note));
    if subjects.is_empty() {
        let of = if asked.is_empty() { String::new() } else { format!(" for {}", args.workloads.join(", ")) };
        let rejected =
            if passed_over.total() > 0 { format!(" that can be shown: {passed_over}") } else { String::new() };
        let name = database.name();
        return Err(bad_input(format!("nothing is recorded{of} in {name}{rejected} (run `tilewright tune`)")));
    }
    if passed_over.total() > 0 {
        message(&format!("of other workloads, {passed_over}"));
    }
    let json = json!({"db": database.path.to_string_lossy(), "version": BUILD, "workloads": subjects});
    let (Some(path), Some(output)) = (&args.output, output) else {
        return write_result(as_json, &json, "");
    };
    let name = path.display();
    let page = report::page(&database.name(), &subjects);
    output.write(|file| file.write_all(page.as_bytes())).with_context(|| format!("cannot write {name}"))?;
    write_result_of(&output, as_json, &json, &format!("{} in {name}", count(subjects.len() as u64, "workload")))
}

/// Writes the page about a model.
fn of_model(args: &ReportArgs, path: &Path, output: Option<Destination>, as_json: bool) -> anyhow::Result<()> {
    let OfModelArgs { bindings, inputs, rounding, runs, machine } = &args.model;
    let file = ModelArgs::new(&path.display().to_string(), bindings);
    let mut model = file.read()?;
    let given = inputs.given(&model.graph)?;
    let is_open = !file.open_texts().is_empty();
    if is_open && !given.is_empty() {
        return Err(bad_input("--input is for a model of one size (give --dim a number, or leave it out)"));
    }
    let (bound, given) = file.largest(&model.graph)?.fed(&mut model, given)?;
    let inputs = bound.inputs(&model, &given)?;
    let target = machine.place().runnable_target()?;
    let file = if is_open { file } else { bound };
    let fused = file.lowered(&model, *rounding, (&target, machine.threads))?;
    drop(model);
    let database = args.records.database()?;
    let known = KnownKernels { database: &database, records: &database.records()? };
    let compiled = file.compiled(fused, *rounding, machine, &target, known, CompileOptions::default())?;
    let facts = report::model_facts(&ModelSubject {
        name: &file.name(),
        compiled: &compiled,
        inputs: &inputs,
        target: &target,
        threads: machine.threads,
        database: &args.records.database()?,
        n_runs: runs.unwrap_or(20),
    })?;
    let json = serde_json::to_value(&facts).expect("invariant: it is numbers and text by name");
    let (Some(path), Some(output)) = (&args.output, output) else {
        return write_result(as_json, &json, "");
    };
    let name = path.display();
    let page = report::model_page(&facts);
    output.write(|file| file.write_all(page.as_bytes())).with_context(|| format!("cannot write {name}"))?;
    write_result_of(&output, as_json, &json, &format!("{} in {name}", count(facts.steps.len() as u64, "step")))
}
