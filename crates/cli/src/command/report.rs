//! `report`: what a database of records tells, as one page that needs nothing else, or as JSON.

mod facts;
mod page;

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::json;

use super::{DatabaseArgs, count, parse_workloads};
use crate::error::bad_input;
use crate::output::{message, writable, write_result, write_result_of};
use tilewright::version::BUILD;

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
    let (subjects, passed_over) = facts::subjects(&store, &asked).map_err(|error| database.refuse(error))?;
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
    let page = page::html(&database.name(), &subjects);
    output.write(|file| file.write_all(page.as_bytes())).with_context(|| format!("cannot write {name}"))?;
    write_result_of(&output, as_json, &json, &format!("{} in {name}", count(subjects.len() as u64, "workload")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::seq::IndexedRandom;
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;
    use rusqlite::Connection;
    use serde_json::Value as Json;
    use tilewright_tune::Judge;
    use tilewright_tune::Store;

    const NUMBERS: [f64; 12] = [0.0, 5e-324, 1e-300, 1e-9, 1.0, 3e5, 1e18, 1e154, 1e300, f64::MAX, -1.0, -1e308];
    const COUNTS: [u64; 7] = [0, 1, 600, 1_800_000_000, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX];

    /// A line of records with numbers that are possible in JSON, whether or not anything ever took so long.
    fn line(rng: &mut Xoshiro256PlusPlus, config: u64) -> String {
        let mut number = || *NUMBERS.choose(rng).expect("there are some");
        let outcome = match number() < 1e-200 {
            true => json!({"class": "wrong_answer", "message": "m"}),
            false => json!({"class": "no_error", "median_ns": number(), "min_ns": number(), "spread": number(),
                "n_samples": 3, "stopped_early": false}),
        };
        let seconds = json!({"build": number(), "run": number(), "verify": number()});
        let (elapsed_s, median_ns, margin, gflops) = (number(), number(), number(), number());
        let mut count = || *COUNTS.choose(rng).expect("there are some");
        let (unix_time, start_unix_ms, trial, raced) = (count(), count(), count(), count());
        let search = ["random", "gbt"][rng.random_range(0..2)];
        let mut line = json!({
            "workload": "matmul:m=8,n=8,k=8", "target": "x86-64", "template": "matmul", "threads": 1,
            "config": {"mr": config}, "outcome": outcome, "seconds": seconds, "steps": "",
            "search": search, "seed": rng.random_range(0..3u64), "trial": trial,
            "version": "0.1.0", "toolchain": "LLVM 22", "unix_time": unix_time,
        });
        if rng.random_bool(0.7) {
            line["run"] = json!({"start_unix_ms": start_unix_ms, "elapsed_s": elapsed_s});
        }
        if rng.random_bool(0.1) {
            line["winner"] = json!({"median_ns": median_ns, "margin": margin, "runner_up": null, "gflops": gflops,
                "verified": true, "version": "0.1.0", "toolchain": "LLVM 22", "unix_time": raced});
        }
        line.to_string()
    }

    #[test]
    fn no_number_that_can_be_imported_is_too_much() {
        let mut n_imported = 0;
        for seed in 0..200 {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
            let mut store = Store::new(Connection::open_in_memory().unwrap()).unwrap();
            for config in 0..rng.random_range(1..12) {
                // What is refused is not believed.
                n_imported += store
                    .import(line(&mut rng, config).as_bytes(), &mut |line| Ok((line, 0.0)))
                    .map_or(0, |imported| imported.new);
            }
            let (subjects, _) = facts::subjects(&store, &[]).unwrap();
            let page = page::html("r.db", &subjects);
            assert!(page.len() < 200_000, "seed {seed}: {} bytes", page.len());
            serde_json::to_value(&subjects).map(|json: Json| json.to_string()).unwrap();
            store.best("matmul:m=8,n=8,k=8", "x86-64", 1, None, &|_| Judge::default()).unwrap();
            store.export(&mut std::io::sink()).unwrap();
        }
        assert!(n_imported > 100, "only {n_imported} records were imported");
    }
}
