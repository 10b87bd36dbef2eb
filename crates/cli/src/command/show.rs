//! `show`: the forms of a configuration, from its schedule steps down to machine code.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright::emit::{EmittedSubject, Form};
use tilewright::{Caches, Choice};

use super::{
    DatabaseArgs, WorkloadArgs, check_identifier, count, make_task, named, nothing_recorded, tell_passed_over,
};
use crate::error::{OrBadInput, bad_input};
use crate::output::{message, writable, write_result, write_stdout};

/// Arguments of `show`.
#[derive(Args, Debug)]
pub struct ShowArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    /// Configuration as a JSON object from parameter to value [default: the untuned program]
    #[arg(long, value_name = "JSON", conflicts_with = "best")]
    config: Option<String>,
    /// The best recorded configuration
    #[arg(long)]
    best: bool,
    /// The configuration of a sample that the template's cost model ranks first: for a machine without
    /// measurements
    #[arg(long, conflicts_with_all = ["config", "best"])]
    guess: bool,
    /// Template that the configuration belongs to [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// Form to show
    #[arg(long, value_name = "EMIT", value_parser = named(&Form::ALL), default_value = Form::Steps.name())]
    emit: Form,
    /// Prefix of the names of an object's functions, a C identifier [default: made of the workload and a hash
    /// of everything that the code depends on]
    #[arg(long, value_name = "NAME")]
    prefix: Option<String>,
    /// File to write, or - [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Shows a configuration.
///
/// # Errors
/// Bad input if the workload, template, target or configuration does not exist.
pub fn run(args: &ShowArgs, as_json: bool) -> anyhow::Result<()> {
    if args.emit == Form::Object && args.output.is_none() {
        return Err(bad_input("--emit object needs a file to write (give -o FILE)"));
    }
    if args.records.db.is_some() && !args.best {
        return Err(bad_input("--db is where the best is looked up (give --best too, or leave it out)"));
    }
    if let Some(prefix) = &args.prefix {
        if !args.emit.has_names() && !as_json {
            return Err(bad_input(
                "--prefix names the functions of code (give --emit object or header, or leave it out)",
            ));
        }
        check_identifier("--prefix", prefix)?;
    }
    let output = args.output.as_deref().map(|path| writable(path, as_json, "another -o")).transpose()?;
    let workload = args.of.workload()?;
    let machine = &args.of.machine;
    machine.place().check_threads()?;
    let target = machine.place().target()?;

    let (threads, template) = (machine.threads, args.template.as_deref());
    let (task, config) = if args.best {
        let (database, name) = (args.records.database()?, target.name());
        let (best, passed_over) = database.records()?.best(&workload, &name, threads, template)?;
        let Some(best) = best else {
            let workload = workload.to_string();
            return Err(bad_input(nothing_recorded(&workload, &name, machine, Caches::Warm, &database, &passed_over)));
        };
        tell_passed_over(&workload, &passed_over);
        let choice = best.choice(&workload, &target, threads)?;
        (choice.task, Some(choice.config))
    } else if args.guess {
        let choice = Choice::guess(&workload, &target, threads, template)?;
        (choice.task, Some(choice.config))
    } else {
        let task = make_task(workload.clone(), target.clone(), threads, template)?;
        let hint = "give --config an object from parameter to value, see `space`";
        let json =
            args.config.as_ref().map(|text| serde_json::from_str::<Json>(text).or_bad_input(hint)).transpose()?;
        let config = json.map(|json| task.space.config_from_json(&json).or_bad_input("see `tilewright space`"));
        let config = config.transpose()?;
        (task, config)
    };
    let subject = EmittedSubject { task: &task, config: config.as_ref(), prefix: args.prefix.as_deref() };
    let bytes = subject.emit(args.emit)?;

    if config.is_none() && args.emit != Form::Steps {
        message("this is the untuned program (give --best, --guess or --config for another)");
    }
    if let (Some(path), Some(output)) = (&args.output, output) {
        let name = path.display();
        output.write(|file| file.write_all(&bytes)).with_context(|| format!("cannot write {name}"))?;
        message(&format!("{} written to {name}", count(bytes.len() as u64, "byte")));
    }
    if as_json {
        let text = args.output.is_none().then(|| String::from_utf8_lossy(&bytes).into_owned());
        let json = json!({
            "workload": workload.to_string(),
            "template": task.template.name,
            "target": target.name(),
            "threads": machine.threads,
            "config": config.as_ref().map(|config| task.space.config_to_json(config)),
            "emit": args.emit.name(),
            "bytes": bytes.len(),
            "file": args.output.as_ref().map(|path| path.to_string_lossy()),
            "text": text,
            "interface": subject.interface().ok(),
        });
        return write_result(true, &json, "");
    }
    if args.output.is_some() {
        return Ok(());
    }
    if bytes.is_empty() {
        message("the untuned program has no schedule steps (give --best, --guess or --config, or --emit ir)");
    }
    write_stdout(&bytes)
}
