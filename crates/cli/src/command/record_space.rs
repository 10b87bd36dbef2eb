//! `record-space`: measures a whole space, a sample of it or listed configurations, and writes the outcome of
//! each.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright::format::seconds;
use tilewright_device::Device;
use tilewright_lab::record_space::{Extent, MOST, RecordingRequest, read_configs, record};
use tilewright_search::Config;
use tilewright_tune::Task;

use super::{DatabaseArgs, WorkloadArgs, make_task, read_file, worker_command};
use crate::error::{OrBadInput, bad_input};
use crate::interrupts::Interrupts;
use crate::output::{check_apart, message, writable, write_result, write_result_of};

/// Arguments of `record-space`.
#[derive(Args, Debug)]
pub struct RecordSpaceArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    /// Template whose space is measured [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// File to write, T4 results for `replay`, compressed if it ends in .gz [default: none, only records]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Number of configurations: a random sample if the space has more
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MOST))]
    max: Option<u64>,
    /// File of configurations to measure in place of a sample, in its order: JSON objects from parameter to
    /// value, one a line, or a JSON list of them
    #[arg(long, value_name = "FILE", conflicts_with = "max")]
    configs: Option<PathBuf>,
    /// Include configurations beyond a GPU's limits, as papers do; each is an instantiation_error
    #[arg(long)]
    beyond_limits: bool,
    /// Timeout of the runs of a configuration, which is then recorded as a run_timeout [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    run_timeout: Option<Duration>,
    /// Seed of the sample and of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Measures a space; existing records count, whichever search made them.
///
/// # Errors
/// Bad input if an argument does not fit, the file or the database given cannot be written, or the space is
/// too large; failure if workers do not start or records cannot be written.
pub fn run(args: &RecordSpaceArgs, as_json: bool) -> anyhow::Result<()> {
    let workload = args.of.workload()?;
    Device::check_memory(&workload).or_bad_input("")?;
    let machine = &args.of.machine;
    machine.warn_of_limits();
    let mut task = make_task(workload, machine.place().runnable_target()?, machine.threads, args.template.as_deref())?;
    if args.beyond_limits && task.setting.target.gpu.is_none() {
        return Err(bad_input("--beyond-limits is for GPUs (leave it out)"));
    }
    if args.beyond_limits {
        task = task.beyond_limits().or_bad_input("leave out --beyond-limits")?;
    }
    let listed = args.configs.as_deref().map(|path| read_listed(path, &task)).transpose()?;
    let extent = match (&listed, args.max) {
        (Some(configs), _) => Extent::Listed(configs),
        (None, Some(n)) => Extent::Sample(n),
        (None, None) => Extent::All,
    };
    let output = args.output.as_deref().map(|path| writable(path, as_json, "another file with -o")).transpose()?;
    let database = args.records.database()?;
    if let Some((path, place)) = args.output.as_deref().zip(output.as_ref()) {
        // The file need not exist yet.
        check_apart(path, place, &[&database.path], "another file with -o")?;
    }
    let opened = database.open_to_write()?;
    opened.warning.iter().for_each(|warning| message(warning));
    let interrupts = Interrupts::watch()?;
    let request = RecordingRequest { task: &task, extent, seed: args.seed, run_timeout: args.run_timeout };
    let worker = worker_command()?;
    let recorded = interrupts.listen(|caller| record(request, opened, &worker, caller))?;
    if let (Some(path), Some(output)) = (&args.output, &output) {
        let is_packed = path.extension().is_some_and(|ending| ending == "gz");
        output
            .write(|file| recorded.write(file, is_packed))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let mut json = recorded.json();
    json["file"] = json!(args.output.as_ref().map(|path| path.to_string_lossy()));
    json["db"] = json!(database.path.to_string_lossy());
    let mut text = recorded.summary();
    text += &format!("\nrecords  {}", database.name());
    if let Some(path) = &args.output {
        text += &format!("\nfile     {}", path.display());
    }
    match output {
        Some(output) => write_result_of(&output, as_json, &json, &text),
        None => write_result(as_json, &json, &text),
    }
}

/// Reads a file of configurations.
fn read_listed(path: &Path, task: &Task) -> anyhow::Result<Vec<Config>> {
    let bytes = read_file(path, "a file of configurations")?;
    let name = path.display().to_string();
    let text = str::from_utf8(&bytes).map_err(|error| bad_input(format!("{name}: {error} (give a file of JSON)")))?;
    Ok(read_configs(text, &name, &task.space)?)
}
