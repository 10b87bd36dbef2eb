//! Options that name a fleet.

use std::path::PathBuf;

use clap::Args;

/// Address and credentials of a fleet.
#[derive(Args, Debug)]
pub struct FleetArgs {
    /// NATS server of a fleet, or several with commas: nats://127.0.0.1:4222 on this machine, tls://HOST:4222
    /// on another
    #[arg(long = "fleet", id = "url", value_name = "URL")]
    pub url: Option<String>,
    /// Key file written by `fleet keys`
    #[arg(long, value_name = "FILE", requires = "url")]
    pub key: Option<PathBuf>,
}

#[cfg(feature = "fleet")]
impl FleetArgs {
    /// Connects to the fleet, for the devices of a class.
    ///
    /// # Errors
    /// Bad input if the address, the key or the class is not valid.
    pub fn fleet(&self, class: Option<&str>) -> anyhow::Result<tilewright_fleet::Fleet> {
        let url =
            self.url.as_deref().ok_or_else(|| crate::error::bad_input("there is no server (give --fleet URL)"))?;
        Ok(tilewright_fleet::Fleet::open(url, self.key.as_deref(), class)?)
    }
}
