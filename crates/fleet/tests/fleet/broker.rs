//! NATS server for a test, with its store in a separate folder.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::port::free_port;

/// Program of the server that tests use: `TILEWRIGHT_NATS_SERVER`, or the installed one. The variable allows
/// tests against another version.
fn program() -> Option<PathBuf> {
    let given = std::env::var_os("TILEWRIGHT_NATS_SERVER").map(PathBuf::from);
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = || std::env::split_paths(&paths).map(|folder| folder.join("nats-server")).find(|path| path.is_file());
    given.or_else(found).or_else(|| Some(PathBuf::from("/usr/sbin/nats-server")).filter(|path| path.is_file()))
}

/// Version of the server; `None`, with a message, if it is not installed.
pub fn version() -> Option<String> {
    let Some(program) = program() else {
        eprintln!("skipped: there is no nats-server (apt-get install nats-server)");
        return None;
    };
    let said = Command::new(&program).arg("--version").output().unwrap().stdout;
    Some(String::from_utf8_lossy(&said).trim().to_owned())
}

/// Running server, killed on drop.
pub struct Broker {
    program: PathBuf,
    folder: TempDir,
    host: &'static str,
    port: u16,
    more: Vec<String>,
    child: Option<Child>,
}

impl Broker {
    /// Starts a server on loopback; `None`, with a message, if it is not installed.
    pub fn start() -> Option<Broker> {
        Broker::with(&[])
    }

    /// Starts a server on all addresses of this machine, for use in a separate network namespace.
    pub fn open() -> Option<Broker> {
        Broker::on("0.0.0.0", &[])
    }

    /// Starts a server on loopback with further arguments.
    pub fn with(more: &[&str]) -> Option<Broker> {
        Broker::on("127.0.0.1", more)
    }

    fn on(host: &'static str, more: &[&str]) -> Option<Broker> {
        version()?;
        let program = program()?;
        let port = free_port();
        let folder = tempfile::tempdir().unwrap();
        let more = more.iter().map(|word| (*word).to_owned()).collect();
        let mut broker = Broker { program, folder, host, port, more, child: None };
        broker.begin();
        Some(broker)
    }

    /// Starts the server, and waits until it answers.
    pub fn begin(&mut self) {
        let mut command = Command::new(&self.program);
        command.args(["-a", self.host, "-p", &self.port.to_string()]);
        if self.more.is_empty() {
            // A configuration file names the store itself.
            command.args(["-js", "-sd"]).arg(self.store());
        }
        command.args(&self.more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(Instant::now() < until, "the server does not start");
            std::thread::sleep(Duration::from_millis(20));
            // The server exits if its port is not free yet.
            if child.try_wait().unwrap().is_some() {
                child = command.spawn().unwrap();
            }
        }
        self.child = Some(child);
    }

    /// Tells the server to send its clients elsewhere, and to exit.
    pub fn shut_down(&self) {
        let id = self.child.as_ref().expect("it runs").id().to_string();
        assert!(Command::new("kill").args(["-USR2", &id]).status().unwrap().success());
    }

    /// Kills the server, as a power failure would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Folder of the server's messages.
    pub fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Folder for other files of the test.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}
