//! `report`: what a database of records tells, as one page that needs nothing else, or as JSON.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright::version::BUILD;
use tilewright_lab::report::{self, Facts};

use super::{DatabaseArgs, count, parse_workloads};
use crate::error::bad_input;
use crate::output::{message, writable, write_result, write_result_of};

/// Arguments of `report`.
#[derive(Args, Debug)]
pub struct ReportArgs {
    /// Workloads or sets of them [default: all that are recorded]
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Page to write, such as report.html, or - for standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Writes the page, and with `--json` what it tells.
///
/// # Errors
/// Bad input where there is no database, nothing is recorded, or the page cannot be written.
pub fn run(args: &ReportArgs, as_json: bool) -> anyhow::Result<()> {
    if args.output.is_none() && !as_json {
        return Err(bad_input("there is no file to write the page to (give -o FILE.html, or --json)"));
    }
    let output = args.output.as_deref().map(|path| writable(path, "another file with -o")).transpose()?;
    let database = args.records.database()?;
    let store = database
        .open_to_read()?
        .ok_or_else(|| bad_input(format!("there is no database {} (give one with --db)", database.name())))?;
    let mut asked = Vec::new();
    for text in &args.workloads {
        asked.extend(parse_workloads(text, false)?.iter().map(ToString::to_string));
    }
    let facts = report::facts(&store, &asked).map_err(|error| database.refuse(error))?;
    let Facts { subjects, passed_over, notes } = facts;
    notes.iter().for_each(|note| message(note));
    if subjects.is_empty() {
        let of = if asked.is_empty() { String::new() } else { format!(" for {}", args.workloads.join(", ")) };
        let doubted =
            if passed_over.total() > 0 { format!(" that can be shown: {passed_over}") } else { String::new() };
        let name = database.name();
        return Err(bad_input(format!("nothing is recorded{of} in {name}{doubted} (run `tilewright tune`)")));
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
