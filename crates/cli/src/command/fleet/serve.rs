//! `serve` and `fleet`: devices of a fleet, and keys for one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, Subcommand};
use serde_json::json;
use tilewright::CPU;
use tilewright_fleet::keys::{KeysRequest, write_keys};
use tilewright_fleet::{Measures, devices};

use crate::command::fleet_args::FleetArgs;
use crate::command::{on_interrupt, worker_command};
use crate::output::{message, table, write_result};

/// Arguments of `serve`.
#[derive(Args, Debug)]
pub struct ServeArgs {
    #[command(flatten)]
    at: FleetArgs,
    /// Class of interchangeable machines [default: that of the key, or made from the machine's properties]
    #[arg(long, value_name = "NAME")]
    class: Option<String>,
    /// Serve for a device without a compiler, through a runner that this command starts: 'ssh pi ./tw-run';
    /// see `runner`
    #[arg(long, value_name = "COMMAND")]
    runner: Option<String>,
    /// Serve for a GPU of this machine: cuda, cuda:1, opencl or opencl:1; see `doctor`
    #[arg(long, value_name = "DEVICE", default_value = CPU, conflicts_with = "runner")]
    device: String,
}

/// Serves until interrupted.
///
/// # Errors
/// Bad input if an argument does not fit; failure if the server cannot be reached.
pub fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    on_interrupt(move || stopping.store(true, Ordering::Relaxed))?;
    let fleet = args.at.fleet(args.class.as_deref())?;
    let measures = match &args.runner {
        Some(command) => Measures::Runner(command),
        None if args.device == CPU => Measures::Cpus,
        None => Measures::Gpu(&args.device),
    };
    Ok(tilewright_fleet::serve_here(&fleet, &worker_command()?, measures, &stop, &|line| message(&line))?)
}

/// Arguments of `fleet`.
#[derive(Args, Debug)]
pub struct FleetCommandArgs {
    #[command(flatten)]
    at: FleetArgs,
    #[command(subcommand)]
    command: Option<FleetCommand>,
}

#[derive(Subcommand, Debug)]
enum FleetCommand {
    /// Make a server's configuration with its certificate, and keys for a tuner and devices
    Keys(KeysArgs),
}

#[derive(Args, Debug)]
struct KeysArgs {
    /// Folder for the files, which nobody else may read
    #[arg(short, long, value_name = "FOLDER")]
    output: PathBuf,
    /// Names or addresses under which the server is reached, besides this machine's own
    #[arg(long, value_name = "HOST[,HOST...]", value_delimiter = ',')]
    host: Vec<String>,
    /// Class of the devices
    #[arg(long, value_name = "NAME", default_value = "lab")]
    class: String,
    /// Names of the devices
    #[arg(long, value_name = "NAME[,NAME...]", value_delimiter = ',', default_value = "device-1")]
    devices: Vec<String>,
}

/// Lists devices, or makes keys.
///
/// # Errors
/// Bad input if an argument does not fit; failure if the server cannot be reached.
pub fn run(args: &FleetCommandArgs, as_json: bool) -> anyhow::Result<()> {
    if let Some(FleetCommand::Keys(args)) = &args.command {
        return keys(args, as_json);
    }
    let found = args.at.fleet(None)?.devices().map_err(tilewright::Error::from)?;
    write_result(as_json, &json!({"devices": found}), &table(&devices::rows(&found)))
}

fn keys(args: &KeysArgs, as_json: bool) -> anyhow::Result<()> {
    let hosts = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into_iter().chain(args.host.clone()).collect();
    let (class, devices) = (args.class.clone(), args.devices.clone());
    let made = write_keys(&args.output, KeysRequest { hosts, folder: String::new(), class, devices })?;
    let text: String = made.iter().map(|(path, what)| format!("{path}: {what}\n")).collect();
    let files: Vec<_> = made.iter().map(|(path, what)| json!({"file": path, "use": what})).collect();
    write_result(as_json, &json!({"files": files}), &text)
}
