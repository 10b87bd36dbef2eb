//! `compile`: a kernel as a library for C, Rust or Python programs, which do not depend on Tilewright.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright::library::{Form, Weights, library, library_name, write_library};
use tilewright::version::BUILD;
use tilewright::{Caches, Source};
use tilewright_ir::{Program, Target};
use tilewright_model::npy::read_constants;
use tilewright_model::{CompileOptions, WithoutCode};
use tilewright_runtime::AnyModel;

use super::model::{BindingArgs, KnownKernels, ModelArgs};
use super::store::{StoreArgs, tell_notes};
use super::{CacheArgs, DatabaseArgs, WorkloadArgs, check_template, count, named, tell_passed_over};
use crate::error::{bad_input, one_line};
use crate::output::{message, write_result};

/// Arguments of `compile`.
#[derive(Args, Debug)]
pub struct CompileArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    #[command(flatten)]
    bindings: BindingArgs,
    /// Folder to write to, created if missing
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Form of the library
    #[arg(long = "as", value_name = "FORM", value_parser = named(&Form::ALL), default_value = "c")]
    form: Form,
    /// Storage of packed weights
    #[arg(long, value_name = "WAY", value_parser = named(&Weights::ALL), default_value = "small")]
    weights: Weights,
    /// Name of the library, a C identifier, the prefix of all its functions [default: made of what is
    /// compiled]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// File of a constant input: .npy, or raw elements as in memory
    #[arg(long = "constant", value_name = "NAME=FILE")]
    constants: Vec<String>,
    /// Template whose best configuration is compiled [default: all templates]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// Compile the part of a model ahead of nodes whose shapes depend on the data, such as those behind
    /// NonMaxSuppression; its outputs are the tensors that these nodes read
    #[arg(long)]
    ahead: bool,
    #[command(flatten)]
    records: DatabaseArgs,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    cache: CacheArgs,
}

/// Compiles the best recorded kernel of a workload or model, or the first guess if none is recorded.
///
/// # Errors
/// Bad input if the workload does not exist, its constants are not given, or the folder cannot be written;
/// failure if `cc` is needed and fails.
pub fn run(args: &CompileArgs, as_json: bool) -> anyhow::Result<()> {
    if ModelArgs::is_model(&args.of.workload) {
        return compile_model(args, as_json);
    }
    args.bindings.refuse(&args.of.workload)?;
    if args.ahead {
        return Err(bad_input(format!("--ahead is for models, not for {} (leave it out)", args.of.workload)));
    }
    let workload = args.of.workload()?;
    library_name(args.name.as_deref(), args.form, &workload.to_string())?;
    let machine = &args.of.machine;
    let (target, threads) = (machine.place().code_target()?, machine.threads);
    let template = args.template.as_deref();
    template.map_or(Ok(()), check_template)?;
    let records = args.store.records(&args.records.database()?)?;
    let (choice, passed_over) = records.choose(&workload, &target, threads, Caches::Warm, template)?;
    tell_notes(&records);
    let text = workload.to_string();
    let guessed = match choice.source {
        Source::Recorded(_) => {
            tell_passed_over(&workload, &passed_over);
            None
        }
        Source::Guessed => Some("nothing is recorded for"),
        Source::Outdated => Some("the space has changed since something was recorded for"),
    };
    if let Some(why) = guessed {
        message(&format!("{why} {text}: this is the first guess (`tilewright tune` finds better)"));
    }
    let model = choice.model(&constants(&args.constants, &workload.program())?)?;
    let template = choice.task.template.name;
    let config = choice.task.space.config_to_json(&choice.config);
    let made_of = [format!("template {template}, configuration {config}")];
    let json = json!({"workload": text, "template": template, "config": config, "recorded": guessed.is_none()});
    args.write(&text, &model, &target, &made_of, json, as_json)
}

/// Compiles a model with the best recorded kernels.
fn compile_model(args: &CompileArgs, as_json: bool) -> anyhow::Result<()> {
    if let Some(constant) = args.constants.first() {
        return Err(bad_input(format!("--constant {constant}: a model has its constants (leave it out)")));
    }
    if let Some(template) = &args.template {
        let why = "each kernel of a model has a template of its own (leave it out)";
        return Err(bad_input(format!("--template {}: {why}", one_line(template))));
    }
    let stem = Path::new(&args.of.workload).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    library_name(args.name.as_deref(), args.form, &stem)?;
    let machine = &args.of.machine;
    let (target, file) = (machine.place().code_target()?, ModelArgs::new(&args.of.workload, &args.bindings));
    let file = if args.ahead { file.ahead() } else { file };
    let fused = file.lowered(&file.read()?, args.of.rounding, (&target, args.of.machine.threads))?;
    if let Some(node) = fused.without_code().next() {
        let WithoutCode { node, operator, reason } = node;
        let hint = "replace it in the model, `check` lists all without code; or `run` the model here";
        let why = format!("node {node} ({operator}) has no code for a library: {reason} ({hint})");
        return Err(bad_input(one_line(&why)));
    }
    let database = args.records.database()?;
    let records = args.store.records(&database)?;
    let compiled = args.cache.with(|cache| {
        let making = CompileOptions { cache, for_runs: false };
        file.compiled(
            fused,
            args.of.rounding,
            machine,
            &target,
            KnownKernels { database: &database, records: &records },
            making,
        )
    })?;
    let json = json!({"model": file.name(), "untuned_kernels": compiled.n_guessed});
    args.write(&stem, &compiled.model, &target, &[], json, as_json)
}

impl CompileArgs {
    /// Writes the library of a model, named after `text` if no name is given; reports the written files and
    /// other facts.
    fn write(
        &self,
        text: &str,
        model: &AnyModel,
        target: &Target,
        made_of: &[String],
        mut json: Json,
        as_json: bool,
    ) -> anyhow::Result<()> {
        let threads = self.of.machine.threads;
        let on = if target.gpu.is_some() { String::new() } else { format!(", {}", count(threads as u64, "thread")) };
        let mut origin = vec![format!("{text} for {}{on}", target.name())];
        origin.extend_from_slice(made_of);
        origin.push(format!("made by tilewright {BUILD}"));
        let name = library_name(self.name.as_deref(), self.form, text)?;
        let library = library(&name, model, target, threads, self.weights, &origin)?;
        let files = write_library(&library, self.form, &self.output)?;
        message(&format!("{} written to {}", count(files.len() as u64, "file"), self.output.display()));
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        json["name"] = json!(library.name());
        json["files"] = json!(files);
        json["library"] = library.build().clone();
        write_result(as_json, &json, &files.join("\n"))
    }
}

/// Reads the constants of a program, all of which must be given.
fn constants(given: &[String], program: &Program) -> anyhow::Result<Vec<(String, Bytes)>> {
    let pair = |pair: &String| {
        let hint = || bad_input(format!("--constant `{}` is not a name and a file (give NAME=FILE)", one_line(pair)));
        let (name, file) = pair.split_once('=').ok_or_else(hint)?;
        Ok((name.to_owned(), PathBuf::from(file)))
    };
    let given = given.iter().map(pair).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(read_constants(&given, program, "--constant")?)
}
