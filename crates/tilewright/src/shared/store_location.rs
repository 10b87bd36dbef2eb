//! Locations of shared stores: folders, and folders served by HTTP.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::Duration;

use ureq::Agent;

use crate::error::{Error, one_line};

/// Timeout of a server's answer, the connection included.
const PATIENCE: Duration = Duration::from_secs(3);
/// Maximum number of redirections that are followed.
const MOST_REDIRECTIONS: u32 = 3;
/// Status of a file that a server does not have.
const NOT_FOUND: u16 = 404;
/// Status of a file that a server withholds; storage services also return it for missing files.
const FORBIDDEN: u16 = 403;

/// Place of a store.
#[derive(Debug, Clone)]
pub(super) enum StoreLocation {
    Folder(PathBuf),
    /// Address without a slash at its end.
    Http(String, Agent),
}

impl StoreLocation {
    /// Parses a location.
    ///
    /// # Errors
    /// Bad input if it is empty, or an address of another kind than `http://`.
    pub(super) fn parse(text: &str) -> Result<StoreLocation, Error> {
        let refuse = |why: &str| Error::input(format!("store `{}`: {why}", one_line(text)));
        if let Some(rest) = text.strip_prefix("http://") {
            if rest.trim_matches('/').is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
                return Err(refuse("this is no address (give http://HOST/PATH)"));
            }
            let config = Agent::config_builder()
                .timeout_global(Some(PATIENCE))
                .http_status_as_error(false)
                .max_redirects(MOST_REDIRECTIONS)
                .user_agent("tilewright")
                .build();
            return Ok(StoreLocation::Http(text.trim_end_matches('/').to_owned(), config.into()));
        }
        if text.starts_with("https://") {
            return Err(refuse("connections are not encrypted (give http://, or a folder)"));
        }
        match text.is_empty() {
            true => Err(refuse("the name is empty (give a folder, or http://HOST/PATH)")),
            false => Ok(StoreLocation::Folder(text.into())),
        }
    }

    /// Reads a file of at most `most_bytes` bytes; `None` if it does not exist.
    ///
    /// # Errors
    /// If the file cannot be read, is truncated, or is larger.
    pub(super) fn read(&self, path: &str, most_bytes: u64) -> Result<Option<Vec<u8>>, String> {
        match self {
            StoreLocation::Folder(folder) => {
                let file = match File::open(folder.join(path)) {
                    Ok(file) => file,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(format!("cannot read {path}: {error}")),
                };
                let mut bytes = Vec::new();
                let read = file.take(most_bytes + 1).read_to_end(&mut bytes);
                read.map_err(|error| format!("cannot read {path}: {error}"))?;
                match bytes.len() as u64 > most_bytes {
                    true => Err(format!("{path} has more than {most_bytes} bytes")),
                    false => Ok(Some(bytes)),
                }
            }
            StoreLocation::Http(address, agent) => {
                let failed = |why: ureq::Error| format!("cannot read {path}: {}", one_line(&why.to_string()));
                let mut response = agent.get(format!("{address}/{path}")).call().map_err(failed)?;
                match response.status().as_u16() {
                    200 => response.body_mut().with_config().limit(most_bytes).read_to_vec().map(Some).map_err(failed),
                    NOT_FOUND | FORBIDDEN => Ok(None),
                    status => Err(format!("cannot read {path}: the server answers {status}")),
                }
            }
        }
    }

    /// Names of the files in a folder of the store; empty if the folder does not exist.
    pub(super) fn names_in(folder: &std::path::Path) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        entries.map(name).collect()
    }
}

impl fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreLocation::Folder(folder) => f.write_str(&one_line(&folder.display().to_string())),
            StoreLocation::Http(address, _) => f.write_str(&one_line(address)),
        }
    }
}
