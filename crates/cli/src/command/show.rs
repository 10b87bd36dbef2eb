//! `show`: what a configuration turns into, from its schedule steps down to machine code.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Value as Json, json};
use tilewright::Choice;
use tilewright_codegen::{Argument, CompileError, Emit, Interface};
use tilewright_ir::schedule::apply_all;
use tilewright_ir::{Part, Program, Role, lower, verify};

use super::{DatabaseArgs, WorkloadArgs, check_identifier, count, make_task, nothing_recorded, tell_passed_over};
use crate::error::{OrBadInput, bad_input};
use crate::output::{message, writable, write_result, write_stdout};
use tilewright::Caches;
use tilewright::version::BUILD;

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
    /// The configuration that the template's model of the machine ranks first of a sample: for a machine that
    /// nothing was measured on
    #[arg(long, conflicts_with_all = ["config", "best"])]
    guess: bool,
    /// Template that the configuration belongs to [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// What to show
    #[arg(long, value_enum, default_value_t = What::Steps)]
    emit: What,
    /// What the names of an object's functions begin with, a C identifier [default: one made of the workload
    /// and of a hash of all that the code depends on]
    #[arg(long, value_name = "NAME")]
    prefix: Option<String>,
    /// File to write, or - [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// The forms of a program.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// Schedule steps
    Steps,
    /// The scheduled program
    Ir,
    /// The program as code is generated from it
    Lowered,
    /// Our own form between loops and machine code
    Ssa,
    /// LLVM's text after its passes
    Llvm,
    /// Assembly
    Asm,
    /// A relocatable object; needs -o
    Object,
    /// The C header of the object
    Header,
}

/// Shows a configuration.
///
/// # Errors
/// Bad input where workload, template, target or configuration do not exist.
pub fn run(args: &ShowArgs, as_json: bool) -> anyhow::Result<()> {
    if args.emit == What::Object && args.output.is_none() {
        return Err(bad_input("--emit object needs a file to write (give -o FILE)"));
    }
    if args.records.db.is_some() && !args.best {
        return Err(bad_input("--db is where the best is looked up (give --best too, or leave it out)"));
    }
    if let Some(prefix) = &args.prefix {
        if matches!(args.emit, What::Steps | What::Ir | What::Lowered) && !as_json {
            return Err(bad_input(
                "--prefix names the functions of code (give --emit object or header, or leave it out)",
            ));
        }
        check_identifier("--prefix", prefix)?;
    }
    let output = args.output.as_deref().map(|path| writable(path, "another -o")).transpose()?;
    let workload = args.of.workload()?;
    let machine = &args.of.machine;
    machine.check_threads()?;
    let target = machine.target()?;

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
    let steps = config.as_ref().map_or(Vec::new(), |config| task.steps(config));
    let scheduled = || {
        apply_all(&workload.program(), &steps)
            .map_err(|(at, why)| anyhow::anyhow!("step {} `{}`: {why}", at + 1, steps[at]))
    };
    let lowered = || -> anyhow::Result<(Program, Interface)> {
        let program = scheduled()?;
        // Once it is lowered the verifier may no longer see that iterations are independent.
        verify::verify(&program)?;
        let lowered = lower::lower(&program);
        let interface = Interface::new(&lowered, &target, machine.threads, args.prefix.as_deref())?;
        Ok((lowered, interface))
    };
    let code = |emit| -> anyhow::Result<Vec<u8>> {
        let (lowered, interface) = lowered()?;
        tilewright_codegen::export(&lowered, &target, &interface.prefix, emit).map_err(|error| match error {
            CompileError::NoLlvm { .. } => bad_input(error),
            error => error.into(),
        })
    };
    let config_json = config.as_ref().map(|config| task.space.config_to_json(config));
    let bytes = match args.emit {
        What::Steps => tilewright_ir::schedule::steps_text(&steps).into_bytes(),
        What::Ir => scheduled()?.to_string().into_bytes(),
        What::Lowered => lower::lower(&scheduled()?).to_string().into_bytes(),
        What::Ssa => code(Emit::Ssa)?,
        What::Llvm => code(Emit::LlvmOptimized)?,
        What::Asm => code(Emit::Asm)?,
        What::Object => code(Emit::Object)?,
        What::Header => {
            let threads = count(machine.threads as u64, "thread");
            let template = task.template.name;
            let made_of = config_json.as_ref().map_or_else(
                || "the untuned program".to_owned(),
                |config| format!("template {template}, configuration {config}"),
            );
            lowered()?.1.header(&[
                format!("{workload} for {}, {threads}", target.name()),
                made_of,
                format!("written by tilewright {BUILD}, whose docs/objects.md says more"),
            ])
        }
        .into_bytes(),
    };

    if config.is_none() && args.emit != What::Steps {
        message("this is the untuned program (give --best, --guess or --config for another)");
    }
    let emit = args.emit.to_possible_value().map_or(String::new(), |v| v.get_name().to_owned());
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
            "config": config_json,
            "emit": emit,
            "bytes": bytes.len(),
            "file": args.output.as_ref().map(|path| path.to_string_lossy()),
            "text": text,
            "interface": lowered().ok().map(|(_, interface)| interface_json(&interface)),
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

/// What a C program must know of the object.
fn interface_json(interface: &Interface) -> Json {
    let buffer = |b: &Argument| {
        let names = |parts: &[Part]| parts.iter().map(|part| part.name()).collect::<Vec<_>>();
        json!({
            "name": b.name,
            "dtype": b.dtype.name(),
            "shape": b.shape,
            "bytes": b.size_bytes,
            "role": Role::ALL.iter().find(|(role, _)| *role == b.role).map(|(_, name)| *name),
            "read_by": names(&b.read_by),
            "written_by": names(&b.written_by),
        })
    };
    let (kept, arguments): (Vec<&Argument>, Vec<_>) = interface.buffers.iter().partition(|b| b.role == Role::Kept);
    json!({
        "prefix": interface.prefix,
        "symbols": interface.symbols(),
        "arguments": arguments.into_iter().map(buffer).collect::<Vec<_>>(),
        "kept": kept.into_iter().map(buffer).collect::<Vec<_>>(),
        "alignment": Interface::ALIGN,
        "scratch_bytes": interface.scratch_bytes,
        "kept_bytes": interface.kept_bytes(),
        "threads": interface.n_threads,
        "cpu_features": interface.cpu_features,
        "has_prepare": interface.has(Part::Prepare),
        "has_finish": interface.has(Part::Finish),
    })
}
