//! `show`: what a configuration turns into, from its schedule steps down to machine code.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Value as Json, json};
use tilewright_codegen::{Argument, CompileError, Emit, Interface};
use tilewright_ir::schedule::apply_all;
use tilewright_ir::{Part, Program, Role, lower, verify};
use tilewright_tune::PassedOver;

use super::{DatabaseArgs, WorkloadArgs, known_best, make_task, nothing_recorded};
use crate::error::{OrBadInput, bad_input, one_line};
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
        if !Interface::is_prefix(prefix) {
            let hint = "give letters, digits and underscores, no digit first";
            return Err(bad_input(format!("--prefix `{}` is no C identifier ({hint})", one_line(prefix))));
        }
    }
    let output = args.output.as_deref().map(|path| writable(path, "another -o")).transpose()?;
    let workload = args.of.workload()?;
    let machine = &args.of.machine;
    machine.check_threads()?;
    let target = machine.target()?;

    let mut template = args.template.clone();
    let config: Option<Json> = if args.best {
        let database = args.records.database()?;
        let (name, target, threads) = (workload.to_string(), target.name(), machine.threads as u32);
        let (best, passed_over) = match database.open_to_read()? {
            Some(store) => known_best(&store, &workload, &target, threads, template.as_deref())
                .map_err(|error| database.refuse(error))?,
            None => (None, PassedOver::default()),
        };
        let nothing = || bad_input(nothing_recorded(&name, &target, machine, Caches::Warm, &database, &passed_over));
        let best = best.ok_or_else(nothing)?;
        template = Some(best.template);
        Some(best.config)
    } else {
        let parse = |text: &String| {
            serde_json::from_str(text).or_bad_input("give --config an object from parameter to value, see `space`")
        };
        args.config.as_ref().map(parse).transpose()?
    };

    let task = make_task(workload.clone(), target.clone(), machine.threads, template.as_deref())?;
    let config = match &config {
        Some(json) => Some(task.space.config_from_json(json).or_bad_input("see `tilewright space`")?),
        None if args.guess => {
            let guess = task.first_guess(0);
            Some(guess.ok_or_else(|| bad_input(format!("template {} guesses nothing", task.template.name)))?)
        }
        None => None,
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
            let threads = super::count(machine.threads as u64, "thread");
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
        message(&format!("{} written to {name}", super::count(bytes.len() as u64, "byte")));
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
