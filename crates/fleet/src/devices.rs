//! Devices of a fleet: their descriptions, and the list of those present.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::jetstream::last_of_each;
use crate::nats::Client;
use crate::protocol::{DEVICES, Finding, VERSION};

/// Description of a device, as it announces itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceDescription {
    /// The version of the protocol that it speaks.
    pub protocol: String,
    /// Name of the device.
    pub device: String,
    /// Class of tasks that it takes.
    pub class: String,
    /// The text of its target.
    #[serde(default)]
    pub target: String,
    /// The version of its program, and its compiler.
    #[serde(default)]
    pub version: String,
    /// Compiler of its kernels.
    #[serde(default)]
    pub toolchain: String,
    /// Number of cores.
    #[serde(default)]
    pub cores: usize,
    /// Memory in bytes.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Measured peak of a core in f32, in 10⁹ operations a second.
    #[serde(default)]
    pub peak_gflops: Option<f64>,
    /// Times of the kernels that all devices measure (anchors), in nanoseconds.
    #[serde(default)]
    pub anchors_ns: Vec<f64>,
    /// The frequency that its first core has, in megahertz, and its temperature in degrees Celsius.
    #[serde(default)]
    pub frequency_mhz: Option<f64>,
    /// The temperature of its warmest zone.
    #[serde(default)]
    pub temperature_c: Option<f64>,
    /// Whether its times mean nothing, as those of an emulator.
    #[serde(default)]
    pub is_emulated: bool,
    /// Sandbox of its candidates.
    #[serde(default)]
    pub sandbox: String,
    /// Current work.
    #[serde(default)]
    pub doing: Option<String>,
    /// Candidates that it has measured.
    #[serde(default)]
    pub n_trials: u64,
}

impl DeviceDescription {
    /// Makes a description that has the names only.
    pub fn named(device: &str, class: &str) -> DeviceDescription {
        DeviceDescription {
            protocol: VERSION.to_owned(),
            device: device.to_owned(),
            class: class.to_owned(),
            target: String::new(),
            version: tilewright::version::BUILD.to_owned(),
            toolchain: String::new(),
            cores: 1,
            memory_bytes: None,
            peak_gflops: None,
            anchors_ns: Vec::new(),
            frequency_mhz: None,
            temperature_c: None,
            is_emulated: false,
            sandbox: String::new(),
            doing: None,
            n_trials: 0,
        }
    }

    /// Takes over how it was when it measured something, where that is known.
    pub fn heed(&mut self, finding: &Finding) {
        if let Finding::Trial { conditions, .. } = finding {
            self.frequency_mhz = conditions.frequency_mhz.or(self.frequency_mhz);
            self.temperature_c = conditions.temperature_c.or(self.temperature_c);
        }
    }

    /// Reason why it cannot be used, if any.
    pub fn obstacle(&self) -> Option<String> {
        (self.protocol != VERSION).then(|| format!("not usable: speaks {}", self.protocol))
    }
}

/// Lists the devices present, by name.
///
/// # Errors
/// If the server does not answer.
pub fn all(client: &mut Client) -> Result<Vec<DeviceDescription>, Error> {
    let said = last_of_each(client, DEVICES)?;
    Ok(said.iter().filter_map(|json| serde_json::from_slice(json).ok()).collect())
}

/// Lists the devices that can be used.
///
/// # Errors
/// As [`all`].
pub fn listed(client: &mut Client) -> Result<Vec<DeviceDescription>, Error> {
    let mut devices = all(client)?;
    devices.retain(|device| device.obstacle().is_none());
    Ok(devices)
}

/// A table of devices, for people.
pub fn rows(devices: &[DeviceDescription]) -> Vec<Vec<String>> {
    let head = ["device", "class", "machine", "cores", "GFLOP/s a core", "MHz", "°C", "trials", "at"];
    let head = head.map(str::to_owned).to_vec();
    let row = |device: &DeviceDescription| {
        let machine = device.target.split(':').next().unwrap_or_default();
        let emulated = if device.is_emulated { ", emulated" } else { "" };
        let whole = |n: Option<f64>| n.map_or(String::new(), |n| format!("{n:.0}"));
        let doing = device.obstacle().or_else(|| device.doing.clone()).unwrap_or_else(|| "idle".to_owned());
        vec![
            device.device.clone(),
            device.class.clone(),
            format!("{machine}{emulated}"),
            device.cores.to_string(),
            device.peak_gflops.map_or(String::new(), tilewright::format::digits),
            whole(device.frequency_mhz),
            whole(device.temperature_c),
            device.n_trials.to_string(),
            doing,
        ]
    };
    std::iter::once(head).chain(devices.iter().map(row)).collect()
}

/// Waits, up to `at_most`, until there is a device of a class; returns all of the class.
///
/// # Errors
/// [`Error::Nobody`] if there is none, and as [`all`].
pub fn wait_for(
    client: &mut Client,
    class: &str,
    address: &str,
    at_most: Duration,
) -> Result<Vec<DeviceDescription>, Error> {
    let until = std::time::Instant::now() + at_most;
    loop {
        let (of_class, others): (Vec<_>, Vec<_>) = listed(client)?.into_iter().partition(|d| d.class == class);
        if !of_class.is_empty() {
            return Ok(of_class);
        }
        if std::time::Instant::now() > until {
            let mut classes: Vec<String> = others.into_iter().map(|device| device.class).collect();
            classes.sort();
            classes.dedup();
            let others = if classes.is_empty() { String::new() } else { format!(", only of {}", classes.join(", ")) };
            return Err(Error::Nobody { class: class.to_owned(), address: address.to_owned(), others });
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
