//! Devices of a fleet: their descriptions, and the list of those online.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::jetstream::last_of_each;
use crate::nats::Client;
use crate::protocol::{DEVICES, Finding, VERSION};

/// Description that a device announces of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceDescription {
    /// Protocol version.
    pub protocol: String,
    /// Name of the device.
    pub device: String,
    /// Class of the device, which selects its tasks.
    pub class: String,
    /// Target as text.
    #[serde(default)]
    pub target: String,
    /// Version of the device's program.
    #[serde(default)]
    pub version: String,
    /// Compiler of the device's kernels.
    #[serde(default)]
    pub toolchain: String,
    /// Number of cores.
    #[serde(default)]
    pub cores: usize,
    /// Memory in bytes.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Measured f32 peak of a core, in GFLOP/s.
    #[serde(default)]
    pub peak_gflops: Option<f64>,
    /// Times of the anchors, kernels that all devices measure, in nanoseconds.
    #[serde(default)]
    pub anchors_ns: Vec<f64>,
    /// Current frequency of the first core, in MHz.
    #[serde(default)]
    pub frequency_mhz: Option<f64>,
    /// Temperature of the warmest zone, in degrees Celsius.
    #[serde(default)]
    pub temperature_c: Option<f64>,
    /// Whether the device is emulated, so that its times are meaningless.
    #[serde(default)]
    pub is_emulated: bool,
    /// Sandboxing mechanisms for candidates.
    #[serde(default)]
    pub sandbox: String,
    /// Current work, in words.
    #[serde(default)]
    pub doing: Option<String>,
    /// Number of candidates measured so far.
    #[serde(default)]
    pub n_trials: u64,
}

impl DeviceDescription {
    /// Makes a description with names only.
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

    /// Updates frequency and temperature from a result, if known.
    pub fn heed(&mut self, finding: &Finding) {
        if let Finding::Trial { conditions, .. } = finding {
            self.frequency_mhz = conditions.frequency_mhz.or(self.frequency_mhz);
            self.temperature_c = conditions.temperature_c.or(self.temperature_c);
        }
    }

    /// Reason why the device cannot be used; `None` if it can.
    pub fn obstacle(&self) -> Option<String> {
        (self.protocol != VERSION).then(|| format!("not usable: speaks {}", self.protocol))
    }
}

/// Lists the devices online, sorted by name.
///
/// # Errors
/// If the server does not answer.
pub fn all(client: &mut Client) -> Result<Vec<DeviceDescription>, Error> {
    let said = last_of_each(client, DEVICES)?;
    Ok(said.iter().filter_map(|json| serde_json::from_slice(json).ok()).collect())
}

/// Lists the usable devices.
///
/// # Errors
/// As [`all`].
pub fn listed(client: &mut Client) -> Result<Vec<DeviceDescription>, Error> {
    let mut devices = all(client)?;
    devices.retain(|device| device.obstacle().is_none());
    Ok(devices)
}

/// Formats devices as the rows of a table.
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

/// Waits, up to `at_most`, until a device of a class is online; returns all of the class.
///
/// # Errors
/// [`Error::Nobody`] if no device comes online in time, or as [`all`].
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
