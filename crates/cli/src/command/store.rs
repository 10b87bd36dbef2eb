//! `store`: winners that machines share, in a folder or behind an HTTP address.

use std::sync::Arc;

use clap::{Args, Subcommand};
use serde_json::json;
use tilewright::{CPU, Database, DeviceSpec, HOST, Note, Records, STORE_VARIABLE, Session, SharedStore, target_name};

use super::records::show_imported;
use super::{DatabaseArgs, count, worker_command};
use crate::error::bad_input;
use crate::output::{message, write_result};

/// Maximum number of refused winners that are listed.
const MOST_SHOWN: usize = 20;

/// Store of winners that is asked for what is not recorded here.
#[derive(Args, Debug)]
pub struct StoreArgs {
    /// Store of winners, used if there is no record here: a folder, or http://HOST/PATH; see `store`
    /// [default: that of TILEWRIGHT_STORE]
    #[arg(long, value_name = "PLACE")]
    store: Option<String>,
}

impl StoreArgs {
    /// Opens the records of the database, and the store for missing ones. Kernels of the store are verified
    /// here before their first use.
    ///
    /// # Errors
    /// Bad input if the place is invalid; and as [`Database::records`].
    pub fn records(&self, database: &Database) -> anyhow::Result<Records> {
        let database = database.clone().before(SharedStore::of_user(self.store.as_deref())?);
        Ok(match database.shared() {
            Some(_) => Session::new(database, worker_command()?).records()?,
            None => database.records()?,
        })
    }
}

/// Reports parts of a store that could not be used.
pub fn tell_notes(records: &Records) {
    records.notes().iter().for_each(|note| message(note));
}

/// Arguments of `store`.
#[derive(Args, Debug)]
pub struct StoreCommandArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Subcommand, Debug)]
enum StoreCommand {
    /// Add the winners of races held here, unless the store has one as good
    Push {
        /// Folder of the store, made where it does not exist
        place: String,
        #[command(flatten)]
        records: DatabaseArgs,
    },
    /// Import the winners of this machine into the database of records
    Pull {
        /// Folder or address of the store [default: that of TILEWRIGHT_STORE]
        place: Option<String>,
        /// Import those of all machines
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        records: DatabaseArgs,
    },
    /// Add the winners of another store that are better
    Merge {
        /// Folder or address of the other store
        from: String,
        /// Folder of the store, made where it does not exist
        place: String,
    },
    /// List winners whose times are impossible
    Verify {
        /// Folder or address of the store [default: that of TILEWRIGHT_STORE]
        place: Option<String>,
        /// Build and run those of this machine, too, and compare them with the reference
        #[arg(long)]
        run: bool,
        /// Remove what is refused
        #[arg(long)]
        remove: bool,
    },
}

/// Executes a request about a store.
///
/// # Errors
/// Bad input if the place is not a store, cannot be written, or contains implausible winners.
pub fn run(args: &StoreCommandArgs, as_json: bool) -> anyhow::Result<()> {
    match &args.command {
        StoreCommand::Push { place, records } => {
            let database = records.database()?;
            push(&SharedStore::new(place)?, database.winners()?, &database.name(), as_json)
        }
        StoreCommand::Pull { place, all, records } => pull(&*of_user(place.as_deref())?, *all, records, as_json),
        StoreCommand::Merge { from, place } => {
            let from = SharedStore::new(from)?;
            let winners = from.winners(None);
            from.take_notes().iter().for_each(|note| message(note));
            push(&SharedStore::new(place)?, winners?, &from.name(), as_json)
        }
        StoreCommand::Verify { place, run, remove } => verify(&*of_user(place.as_deref())?, *run, *remove, as_json),
    }
}

fn of_user(place: Option<&str>) -> anyhow::Result<Arc<SharedStore>> {
    let none = || bad_input(format!("no store is named (give a folder or an address, or set {STORE_VARIABLE})"));
    SharedStore::of_user(place)?.ok_or_else(none)
}

fn push(store: &SharedStore, winners: Vec<tilewright::Entry>, of: &str, as_json: bool) -> anyhow::Result<()> {
    let pushed = store.push(winners)?;
    store.take_notes().iter().for_each(|note| message(note));
    let json = json!({"read": pushed.read, "better": pushed.better, "refused": pushed.refused, "store": store.place()});
    let winners = count(pushed.read, "winner");
    write_result(
        as_json,
        &json,
        &format!("{winners} of {of}, {} of them new or better in {}", pushed.better, store.name()),
    )
}

fn pull(store: &SharedStore, all: bool, records: &DatabaseArgs, as_json: bool) -> anyhow::Result<()> {
    let database = records.database()?;
    let here = DeviceSpec { device: CPU, target: HOST, threads: 1 }.target()?;
    let machine = target_name(&here, tilewright::Caches::Warm);
    let tell = |note: Note| {
        if let Note::Message(line) = note {
            message(&line);
        }
    };
    let imported = database.pull(store, Some(machine.as_str()).filter(|_| !all), &tell);
    store.take_notes().iter().for_each(|note| message(note));
    show_imported(&imported?, tilewright::RECORDS, &store.name(), &database, as_json)
}

fn verify(store: &SharedStore, run: bool, remove: bool, as_json: bool) -> anyhow::Result<()> {
    let worker = run.then(worker_command).transpose()?;
    let found = store.verify(worker.as_ref(), remove)?;
    found.refused.iter().take(MOST_SHOWN).for_each(|line| message(line));
    let (n_refused, name) = (found.refused.len() as u64, store.name());
    if n_refused > 0 && !found.is_mended {
        let hint = "`--remove` removes them";
        return Err(bad_input(format!("{name}: {} refused ({hint})", count(n_refused, "winner"))));
    }
    let json = json!({
        "read": found.read,
        "run": found.run,
        "refused": found.refused,
        "removed": found.is_mended,
        "store": store.place(),
    });
    let ran = if run { format!(", {} run here", found.run) } else { String::new() };
    let removed = if found.is_mended { format!(", {n_refused} refused and removed") } else { String::new() };
    write_result(as_json, &json, &format!("{} of {name} read{ran}{removed}", count(found.read, "winner")))
}
