//! `tune --command`, `tune --kernel`: the user's programs and kernels.

use tilewright::{KernelFile, Request, Session, Tuned, while_telling};

use super::tune_args::TuneArgs;
use super::worker_command;
use crate::error::bad_input;
use crate::interrupts::{Interrupts, remark};
use crate::output::{digits, duration, message, write_result};
use crate::progress::Shown;
use crate::summary;

/// Makes the request for a user's command or kernel.
fn request(args: &TuneArgs) -> anyhow::Result<Request> {
    let own = &args.own;
    if let Some(command) = &own.command {
        let request = args.request(own.command(command)?).threads(args.own_threads()?);
        return Ok(request.run_timeout(own.timeout.or(args.run_timeout)));
    }
    let path = own.kernel.as_ref().ok_or_else(|| bad_input("neither --command nor --kernel is given"))?;
    let kernel = while_telling(message, || KernelFile::read(path))?;
    let (threads, device) = args.own_place(kernel.is_for_gpu())?;
    Ok(args.request(kernel).threads(threads).device(device))
}

/// Tunes a user's command or kernel.
///
/// # Errors
/// Bad input if an argument does not fit; failure if no candidate is correct or records are lost.
pub fn run(args: &TuneArgs, as_json: bool) -> anyhow::Result<()> {
    let session = Session::new(args.records.database()?, worker_command()?);
    let interrupts = Interrupts::watch()?;
    let request = request(args)?;
    let objectives = request.objectives()?;
    let (metric, is_one) = (objectives.leading().clone(), !objectives.is_several());
    let show = move |ns: f64| if metric.is_time() { duration(ns) } else { digits(metric.value(ns)) };
    let shown = Shown::of_own(show.clone(), &args.search, args.seed, interrupts.concerned());
    let tuned = session.run(&request, &interrupts.stop, &shown);
    shown.finish();
    tell(tuned?, &show, !args.no_race && is_one, as_json)
}

/// Prints the result of a run.
fn tell(mut tuned: Tuned, show: &dyn Fn(f64) -> String, may_race: bool, as_json: bool) -> anyhow::Result<()> {
    remark(&tuned);
    let lost = tuned.lost.take().map(anyhow::Error::from);
    let failure = summary::failure(&tuned);
    if failure.is_none() || as_json {
        let json = serde_json::to_value(&tuned).expect("invariant: it is numbers and text by name");
        write_result(as_json, &json, &summary::own(&tuned, show, may_race))?;
    }
    lost.or(failure).map_or(Ok(()), Err)
}
