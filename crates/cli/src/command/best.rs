//! `best`: the best recorded configuration, without delay: it starts neither the code generator nor a worker.

use clap::Args;
use serde_json::json;

use super::store::{StoreArgs, tell_notes};
use super::{ColdArgs, DatabaseArgs, WorkloadArgs, check_template, nothing_recorded, tell_passed_over, worker_command};
use crate::output::{digits, duration, write_result};
use crate::summary::pareto;
use tilewright::{Session, target_name};

/// Arguments of `best`.
#[derive(Args, Debug)]
pub struct BestArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    /// Template whose best is shown [default: all templates]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    #[command(flatten)]
    cold: ColdArgs,
    #[command(flatten)]
    records: DatabaseArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// Shows the best record of a user's command or kernel.
fn own(args: &BestArgs, as_json: bool) -> anyhow::Result<()> {
    let (name, threads) = (&args.of.workload, args.of.machine.threads);
    let database = args.records.database()?;
    let session = Session::new(database.clone(), worker_command()?);
    let target = args.of.machine.place().target()?;
    let best = session.best_own(name, &target, threads)?;
    let json = json!({
        "workload": name,
        "found": best.is_some(),
        "best": best,
        "target": target_name(&target, tilewright::Caches::Warm),
        "threads": threads,
        "db": database.path.to_string_lossy(),
    });
    let text = match best {
        None => format!("nothing is recorded for {name} with {threads} threads in {}\n", database.name()),
        Some(best) => {
            let value = best.value.map_or(duration(best.median_ns), digits);
            let rank = best.rank();
            let set = pareto(&best.pareto);
            format!("{name}: {value} ({rank})\n{}\n{}{set}", best.config, best.commands.unwrap_or_default())
        }
    };
    write_result(as_json, &json, &text)
}

/// Shows the best recorded configuration.
///
/// # Errors
/// Bad input if the workload does not exist, or the file is not a database.
pub fn run(args: &BestArgs, as_json: bool) -> anyhow::Result<()> {
    let machine = &args.of.machine;
    if tilewright::is_own(&args.of.workload) {
        return own(args, as_json);
    }
    let workload = args.of.workload()?;
    machine.place().check_threads()?;
    if let Some(template) = &args.template {
        check_template(template)?;
    }
    let target = target_name(&machine.place().target()?, args.cold.caches());
    let database = args.records.database()?;
    let name = workload.to_string();
    let threads = machine.threads;
    let records = args.store.records(&database)?;
    let (best, passed_over) = records.best(&workload, &target, threads, args.template.as_deref())?;
    tell_notes(&records);
    if best.is_some() {
        tell_passed_over(&workload, &passed_over);
    }
    let json = json!({
        "workload": name,
        "found": best.is_some(),
        "best": best,
        "target": target,
        "threads": threads,
        "db": database.path.to_string_lossy(),
        "imported": best.as_ref().is_some_and(|best| best.is_imported),
        "passed_over": passed_over,
    });
    let text = match best {
        None => nothing_recorded(&name, &target, machine, args.cold.caches(), &database, &passed_over),
        Some(best) => format!("{name} on {target}: {}", best.text()),
    };
    write_result(as_json, &json, &text)
}
