//! Fleets: devices of other machines, and this machine as a device. Refused without the feature `fleet`.

#[cfg(feature = "fleet")]
mod serve;
#[cfg(feature = "fleet")]
mod tune;

#[cfg(feature = "fleet")]
pub use serve::{FleetCommandArgs, ServeArgs, run, serve};
#[cfg(feature = "fleet")]
pub use tune::on_fleet;

/// Refuses to tune on a fleet.
///
/// # Errors
/// Bad input always.
#[cfg(not(feature = "fleet"))]
pub fn on_fleet(
    _: &super::tune_args::TuneArgs,
    _class: &str,
    _: Vec<tilewright::Request>,
    _whole: Option<std::time::Duration>,
    _as_json: bool,
) -> anyhow::Result<()> {
    Err(crate::error::bad_input("this build measures on no fleet (build it with the feature `fleet`)"))
}
