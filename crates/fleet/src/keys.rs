//! Keys: permissions of the machines of a fleet, and certificates by which they verify the server.

use std::net::IpAddr;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::nkey::NKey;
use crate::protocol::{TASKS, VERSION, check_name, class_consumer, device_consumer, device_subject};

/// Role of a machine in a fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetRole {
    /// Tuner, which requests measurements.
    Tuner,
    /// Device, which measures candidates.
    Device,
}

/// Contents of a key file: everything that a machine needs for its connection.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Name of the machine; a device's permissions depend on it.
    pub name: String,
    /// Role of the machine.
    pub role: FleetRole,
    /// Class of a device; `None` for a tuner.
    #[serde(default)]
    pub class: Option<String>,
    /// Secret seed of the key pair.
    seed: String,
    /// Certificate of the authority that signed the server's certificate.
    pub authority: String,
}

impl std::fmt::Debug for Credentials {
    /// Formats everything but the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("name", &self.name).field("role", &self.role).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Reads a key file.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a key file.
    pub fn read(path: &Path) -> Result<Credentials, tilewright::Error> {
        let bytes = tilewright::file::read(path, "a key that `tilewright fleet keys` made")?;
        Ok(Credentials::parse(&path.display().to_string(), &bytes)?)
    }

    /// Parses the contents of a key file; `name` is its name in messages.
    ///
    /// # Errors
    /// [`Error::Key`] if the contents are not those of a key file.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Credentials, Error> {
        let refuse = |why: String| Error::Key { name: name.to_owned(), why };
        let credentials: Credentials =
            serde_json::from_slice(bytes).map_err(|error| refuse(format!("no key file: {error}")))?;
        credentials.key().map_err(|_| refuse("its seed is damaged".to_owned()))?;
        Ok(credentials)
    }

    /// Returns the key pair.
    ///
    /// # Errors
    /// [`Error::Key`] if the seed is invalid.
    pub fn key(&self) -> Result<NKey, Error> {
        let refuse = || Error::Key { name: format!("the key of {}", self.name), why: "its seed is damaged".to_owned() };
        NKey::parse(&self.seed).ok_or_else(refuse)
    }

    fn new(name: &str, role: FleetRole, class: Option<&str>, authority: &str) -> Credentials {
        Credentials {
            name: name.to_owned(),
            role,
            class: class.map(str::to_owned),
            seed: NKey::new().seed(),
            authority: authority.to_owned(),
        }
    }

    /// Subjects that the machine may publish to, and subjects that it may subscribe to.
    fn permissions(&self) -> (Vec<String>, Vec<String>) {
        let inbox = format!("_INBOX.{}.>", self.name);
        let device = &self.name;
        match self.role {
            FleetRole::Tuner => {
                let publish = [format!("tw.{VERSION}.>"), "$JS.API.>".into(), "$JS.ACK.>".into(), "_INBOX.>".into()];
                (publish.into(), vec![format!("tw.{VERSION}.>"), inbox])
            }
            FleetRole::Device => {
                let consumers = [class_consumer(self.class.as_deref().unwrap_or("default")), device_consumer(device)];
                let mut publish = vec![
                    format!("tw.{VERSION}.result.*.{device}"),
                    format!("tw.{VERSION}.started.*"),
                    format!("tw.{VERSION}.rest.*"),
                    device_subject(device),
                ];
                for consumer in consumers {
                    publish.push(format!("$JS.API.CONSUMER.MSG.NEXT.{TASKS}.{consumer}"));
                    publish.push(format!("$JS.ACK.{TASKS}.{consumer}.>"));
                }
                (publish, vec![format!("tw.{VERSION}.cancel.*"), inbox])
            }
        }
    }
}

/// Options for making a fleet's keys.
#[derive(Debug, Clone)]
pub struct KeysRequest {
    /// Names and addresses of the server.
    pub hosts: Vec<String>,
    /// Folder on the server that will contain its files, as used in its configuration.
    pub folder: String,
    /// Class of the devices.
    pub class: String,
    /// Names of the devices.
    pub devices: Vec<String>,
}

/// Generated file.
#[derive(Debug, Clone)]
pub struct KeyFile {
    /// Name of the file.
    pub name: String,
    /// Contents of the file.
    pub text: String,
    /// Description of the machine that uses the file.
    pub what: &'static str,
}

/// Whether a text is an address, or a name that certificates can have.
fn is_host(text: &str) -> bool {
    let is_label = |label: &str| {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (1..=63).contains(&label.len()) && label.chars().all(is_plain)
    };
    let labels = text.strip_prefix("*.").unwrap_or(text);
    text.parse::<IpAddr>().is_ok() || text.len() <= 253 && labels.split('.').all(is_label)
}

/// Generates a server's configuration with its certificate, and a key file for the tuner and for each device.
///
/// # Errors
/// If a name is invalid.
pub fn make_keys(request: &KeysRequest) -> Result<Vec<KeyFile>, Error> {
    check_name("class", &request.class)?;
    request.devices.iter().try_for_each(|device| check_name("device", device))?;
    if let Some(host) = request.hosts.iter().find(|host| !is_host(host)) {
        return Err(Error::Host(host.chars().take(60).collect()));
    }
    if let Some(twice) = request
        .devices
        .iter()
        .find(|name| *name == TUNER || request.devices.iter().filter(|other| other == name).count() > 1)
    {
        return Err(Error::Name { given: twice.clone(), what: "device that only one has" });
    }
    let odd = |error: rcgen::Error| Error::Odd(format!("no certificate for {}: {error}", request.hosts.join(", ")));
    let authority_key = KeyPair::generate().map_err(odd)?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    authority.distinguished_name.push(DnType::CommonName, "the authority of a Tilewright fleet");
    let authority_pem = authority.self_signed(&authority_key).map_err(odd)?.pem();
    let issuer = Issuer::new(authority, authority_key);
    let server_key = KeyPair::generate().map_err(odd)?;
    let mut server = CertificateParams::new(request.hosts.clone()).map_err(odd)?;
    server.distinguished_name.push(DnType::CommonName, "the server of a Tilewright fleet");
    let server_pem = server.signed_by(&server_key, &issuer).map_err(odd)?.pem();
    let mut all = vec![Credentials::new(TUNER, FleetRole::Tuner, None, &authority_pem)];
    let class = Some(request.class.as_str());
    all.extend(request.devices.iter().map(|name| Credentials::new(name, FleetRole::Device, class, &authority_pem)));
    let mut made = vec![
        KeyFile { name: "server.conf".into(), text: configuration(request, &all)?, what: "nats-server -c …" },
        KeyFile { name: "server.pem".into(), text: server_pem, what: "beside the configuration" },
        KeyFile {
            name: "server.key".into(),
            text: server_key.serialize_pem(),
            what: "beside the configuration, secret",
        },
    ];
    for credentials in &all {
        let what = match credentials.role {
            FleetRole::Tuner => "tilewright tune … --key, secret",
            FleetRole::Device => "tilewright serve … --key on that device, secret",
        };
        let text = serde_json::to_string_pretty(credentials).expect("invariant: texts have a form in JSON") + "\n";
        made.push(KeyFile { name: format!("{}.key", credentials.name), text, what });
    }
    Ok(made)
}

/// Writes all keys to a folder that only its owner can read; returns the paths, each with the file's user.
///
/// # Errors
/// As [`make_keys`], or if files exist already or cannot be written.
pub fn write_keys(folder: &Path, request: KeysRequest) -> Result<Vec<(String, &'static str)>, tilewright::Error> {
    let failed = |path: &Path, error| tilewright::Error::input(format!("cannot write {}: {error}", path.display()));
    std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
    let folder = folder.canonicalize().map_err(|error| failed(folder, error))?;
    let made = make_keys(&KeysRequest { folder: folder.display().to_string(), ..request })?;
    let paths: Vec<_> = made.iter().map(|made| folder.join(&made.name)).collect();
    if let Some(there) = paths.iter().find(|path| path.exists()) {
        let there = there.display();
        return Err(tilewright::Error::input(format!(
            "{there} is there already, and devices may use it (give another folder)"
        )));
    }
    for (path, made) in paths.iter().zip(&made) {
        tilewright::file::write_secret(path, made.text.as_bytes()).map_err(|error| failed(path, error))?;
    }
    Ok(paths.iter().zip(made).map(|(path, made)| (path.display().to_string(), made.what)).collect())
}

/// Name of the tuner in its credentials.
const TUNER: &str = "tuner";

/// Makes the server's configuration.
fn configuration(request: &KeysRequest, all: &[Credentials]) -> Result<String, Error> {
    let quoted = |texts: &[String]| texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", ");
    let folder = &request.folder;
    let mut text = format!(
        "# Made by `tilewright fleet keys`: start it with nats-server -c {folder}/server.conf\n\
         port: 4222\n\
         jetstream {{ store_dir: {:?} }}\n\
         tls {{ cert_file: {:?}, key_file: {:?}, timeout: 5 }}\n\
         authorization {{\n  users: [\n",
        format!("{folder}/store"),
        format!("{folder}/server.pem"),
        format!("{folder}/server.key"),
    );
    for credentials in all {
        let (publish, subscribe) = credentials.permissions();
        text += &format!(
            "    # {}\n    {{ nkey: {}, permissions: {{\n      publish: [{}],\n      subscribe: [{}]\n    }} }}\n",
            credentials.name,
            credentials.key()?.public(),
            quoted(&publish),
            quoted(&subscribe),
        );
    }
    Ok(text + "  ]\n}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_made() {
        let request = KeysRequest {
            hosts: vec!["localhost".into(), "127.0.0.1".into()],
            folder: "/srv/fleet".into(),
            class: "lab".into(),
            devices: vec!["pi1".into(), "pi2".into()],
        };
        let made = make_keys(&request).unwrap();
        let names: Vec<&str> = made.iter().map(|made| made.name.as_str()).collect();
        assert_eq!(names, ["server.conf", "server.pem", "server.key", "tuner.key", "pi1.key", "pi2.key"]);
        let pi = Credentials::parse("pi1.key", made[4].text.as_bytes()).unwrap();
        assert_eq!((pi.name.as_str(), pi.role, pi.class.as_deref()), ("pi1", FleetRole::Device, Some("lab")));
        assert!(made[0].text.contains(&pi.key().unwrap().public()) && !made[0].text.contains(&pi.seed));
        assert!(!format!("{pi:?}").contains(&pi.seed));
        let refused = |devices: &[&str]| {
            let devices = devices.iter().map(|name| (*name).to_owned()).collect();
            make_keys(&KeysRequest { devices, ..request.clone() }).unwrap_err().to_string()
        };
        assert!(refused(&["a", "a"]).contains("`a`") && refused(&["tuner"]).contains("`tuner`"));
        assert!(refused(&["a.b"]).contains("`a.b`"));
        for host in ["bad host", "", "nats://lab", "lab:4222", "a..b", "läb"] {
            let told = make_keys(&KeysRequest { hosts: vec![host.into()], ..request.clone() }).unwrap_err().to_string();
            assert!(told.starts_with(&format!("`{host}` is neither")), "{told}");
        }
        for host in ["*.lab.example.com", "::1", "pi_2"] {
            assert!(make_keys(&KeysRequest { hosts: vec![host.into()], ..request.clone() }).is_ok(), "{host}");
        }
        assert!(Credentials::parse("x", b"{}").unwrap_err().to_string().contains("tilewright fleet keys"));
    }
}
