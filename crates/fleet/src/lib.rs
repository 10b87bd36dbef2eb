//! Tuning on many machines, over NATS JetStream.
//!
//! A machine of the fleet calls [`serve`](serve()): it announces its hardware, takes tasks from the server,
//! measures candidates and sends results. A tuner uses a [`Remote`], which measures like a local device. The
//! server's state may be lost at any time: only the tuner's database is authoritative, and unfinished work is
//! sent again.
#![forbid(unsafe_code)]

pub mod devices;
mod error;
mod here;
mod jetstream;
pub mod keys;
pub mod nats;
mod nkey;
pub mod protocol;
mod remote;
mod serve;
mod tune;

use std::path::Path;
use std::time::Duration;

pub use error::Error;
pub use here::{Measures, serve_here};
pub use nats::Servers;
pub use remote::{Remote, RunRecords, strays};
pub use serve::{Here, serve};
pub use tune::{assignment, in_equal_parts, tune, tune_many};

use here::class_here;
use keys::{Credentials, FleetRole};
use nats::Client;

/// Default lease of a task: time without a heartbeat after which another device may take it.
pub const LEASE: Duration = Duration::from_secs(10);

/// Server of a fleet, and a class of its devices.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// Address of the server, or addresses of a cluster's servers.
    pub servers: Servers,
    /// Credentials, if the server requires them.
    pub credentials: Option<Credentials>,
    /// Class of the devices.
    pub class: String,
    /// Lease of a task: time without a heartbeat after which another device may take it.
    pub lease: Duration,
}

impl Fleet {
    /// Opens a fleet at a server address. The default class is that of the key, or of machines like this one.
    ///
    /// # Errors
    /// If an address, the key or the class is invalid.
    pub fn open(url: &str, key: Option<&Path>, class: Option<&str>) -> Result<Fleet, tilewright::Error> {
        let servers = Servers::parse(url)?;
        let credentials = key.map(Credentials::read).transpose()?;
        let of_key = credentials.as_ref().and_then(|credentials| credentials.class.clone());
        let class = class.map(str::to_owned).or(of_key).unwrap_or_else(class_here);
        protocol::check_name("class", &class)?;
        Ok(Fleet { servers, credentials, class, lease: LEASE })
    }

    /// Returns the lease divided by `of`. All waits are such fractions, so that tests with a short lease
    /// never wait long.
    fn part(&self, of: u32) -> Duration {
        self.lease / of
    }

    /// Interval after which a message that the server has not confirmed is sent again.
    fn resend(&self) -> Duration {
        self.part(5)
    }

    /// Connects as the given device, or as a tuner.
    fn connect(&self, device: Option<&str>) -> Result<Client, Error> {
        let credentials = self.credentials.as_ref();
        let wanted = if device.is_some() { FleetRole::Device } else { FleetRole::Tuner };
        if let Some(credentials) = credentials.filter(|credentials| credentials.role != wanted) {
            let what = if wanted == FleetRole::Device { "a device's" } else { "the tuner's" };
            return Err(Error::Key { name: credentials.name.clone(), why: format!("this key is not {what}") });
        }
        let name = device.or(credentials.map(|credentials| credentials.name.as_str())).unwrap_or("tuner");
        Client::connect(&self.servers, credentials, name)
    }

    /// Lists the devices online, of all classes, sorted by name.
    ///
    /// # Errors
    /// If the server cannot be reached or does not answer.
    pub fn devices(&self) -> Result<Vec<devices::DeviceDescription>, Error> {
        let mut client = self.connect(None)?;
        jetstream::make_streams(&mut client)?;
        // Devices that could not announce themselves without the stream do so now.
        if let Ok(there) = devices::all(&mut client)
            && !there.is_empty()
        {
            return Ok(there);
        }
        std::thread::sleep(serve::SELF_AGAIN);
        devices::all(&mut client)
    }
}
