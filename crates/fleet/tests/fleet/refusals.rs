//! Connections and operations that keys and certificates do not allow.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tilewright_fleet::keys::{Credentials, KeysRequest, write_keys};
use tilewright_fleet::nats::{Client, ConnectionEvent};
use tilewright_fleet::{Error, Fleet, Servers};

use crate::broker::{Broker, version};
use crate::replay::{Device, Slow, proposals, recorded, remote};

fn keys(class: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let hosts = vec!["localhost".into(), "127.0.0.1".into()];
    let devices = vec!["pi1".into(), "pi2".into()];
    write_keys(folder.path(), KeysRequest { hosts, folder: String::new(), class: class.into(), devices }).unwrap();
    folder
}

fn key(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.key"))
}

/// Starts a server with keys, if it is installed.
fn server(folder: &Path) -> Option<(Broker, String)> {
    let broker = Broker::with(&["-c", folder.join("server.conf").to_str().unwrap()])?;
    let url = format!("tls://localhost:{}", broker.port());
    Some((broker, url))
}

fn fleet(url: &str, folder: &Path, name: &str) -> Fleet {
    let fleet = Fleet::open(url, Some(&key(folder, name)), Some("lab")).unwrap();
    Fleet { lease: Duration::from_secs(1), ..fleet }
}

#[test]
fn a_fleet_with_keys_measures() {
    let folder = keys("lab");
    let Some((_broker, url)) = server(folder.path()) else { return };
    let trial = Duration::from_millis(1);
    let _devices = ["pi1", "pi2"].map(|name| Device::start(fleet(&url, folder.path(), name), name, trial));
    let alone = proposals(&mut Slow::new(Duration::ZERO, recorded), "random", 40, 4);
    let together = proposals(&mut remote(&fleet(&url, folder.path(), "tuner"), "keys", 2), "random", 40, 4);
    assert_eq!(alone, together);
}

#[test]
fn a_server_that_encrypts_its_first_word_is_reached() {
    let Some(version) = version() else { return };
    let numbers: Vec<u32> = version.split(['v', '.']).filter_map(|part| part.parse().ok()).collect();
    if numbers < vec![2, 10, 4] {
        return println!("skipped: {version} says its first word in plain");
    }
    let folder = keys("lab");
    let path = folder.path().join("server.conf");
    let text = std::fs::read_to_string(&path).unwrap().replace("timeout: 5 }", "timeout: 5, handshake_first: true }");
    assert!(text.contains("handshake_first"));
    std::fs::write(&path, text).unwrap();
    let (broker, url) = server(folder.path()).unwrap();
    let _device = Device::start(fleet(&url, folder.path(), "pi1"), "pi1", Duration::from_millis(1));
    let alone = proposals(&mut Slow::new(Duration::ZERO, recorded), "random", 10, 2);
    assert_eq!(proposals(&mut remote(&fleet(&url, folder.path(), "tuner"), "first", 1), "random", 10, 2), alone);
    // An unencrypted client gets no answer.
    let plain = Client::connect(&Servers::parse(&broker.url()).unwrap(), None, "x");
    assert!(matches!(plain, Err(Error::NoServer { .. })));
}

#[test]
fn files_of_keys_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = keys("lab");
    for name in ["tuner", "pi1", "server"] {
        let mode = key(folder.path(), name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    let hosts = vec!["localhost".into()];
    let request = KeysRequest { hosts, folder: String::new(), class: "lab".into(), devices: vec!["pi1".into()] };
    let error = write_keys(folder.path(), request).unwrap_err().to_string();
    assert!(error.contains("is there already"), "{error}");
}

/// Error of the server for an operation of a client.
fn refusal(client: &mut Client, what: &str) -> String {
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        if let Some(ConnectionEvent::Refused(why)) = client.next(Duration::from_millis(50)) {
            return why;
        }
    }
    panic!("{what} is not refused");
}

#[test]
fn a_device_may_do_nothing_but_its_work() {
    let folder = keys("lab");
    let Some((_broker, url)) = server(folder.path()) else { return };
    // The streams exist from here on.
    drop(remote(&fleet(&url, folder.path(), "tuner"), "run", 1));
    let address = Servers::parse(&url).unwrap();
    let credentials = Credentials::read(&key(folder.path(), "pi1")).unwrap();
    let mut client = Client::connect(&address, Some(&credentials), "pi1").unwrap();
    for (what, subject) in [
        ("taking another device's task", "$JS.API.CONSUMER.MSG.NEXT.TW_TASKS.device-pi2"),
        ("taking another class's task", "$JS.API.CONSUMER.MSG.NEXT.TW_TASKS.class-desk"),
        ("taking a run's results", "$JS.API.CONSUMER.MSG.NEXT.TW_RESULTS.run"),
        ("forging a task", "tw.v1.task.lab.any.run"),
        ("forging another device's result", "tw.v1.result.run.pi2"),
        ("speaking for another device", "$KV.TW_DEVICES.pi2"),
        ("cancelling a run", "tw.v1.cancel.run"),
        ("deleting a stream", "$JS.API.STREAM.DELETE.TW_TASKS"),
        ("emptying a stream", "$JS.API.STREAM.PURGE.TW_TASKS"),
        ("making a consumer", "$JS.API.CONSUMER.DURABLE.CREATE.TW_TASKS.mine"),
        ("reading a message", "$JS.API.STREAM.MSG.GET.TW_TASKS"),
        ("acknowledging another device's task", "$JS.ACK.TW_TASKS.device-pi2.1.1.1.1.1"),
        ("answering for a tuner", "_INBOX.pi2.x.rest.0.run"),
    ] {
        client.link().publish(subject, None, None, b"{}");
        let why = refusal(&mut client, what);
        assert!(why.contains("Permissions Violation") && why.contains(subject), "{what}: {why}");
    }
    for (what, subject) in [
        ("reading results", "tw.v1.result.>"),
        ("reading tasks", "tw.v1.task.>"),
        ("reading answers to a tuner", "_INBOX.tuner.>"),
        ("reading everything", ">"),
    ] {
        client.subscribe(subject);
        let why = refusal(&mut client, what);
        assert!(why.contains("Permissions Violation for Subscription"), "{what}: {why}");
    }
}

#[test]
fn who_has_no_key_is_not_let_in() {
    let folder = keys("lab");
    let Some((broker, url)) = server(folder.path()) else { return };
    let address = Servers::parse(&url).unwrap();
    let fail = |address: &Servers, credentials: Option<&Credentials>| match Client::connect(address, credentials, "x") {
        Ok(_) => panic!("it is let in"),
        Err(error) => error,
    };
    let good = Credentials::read(&key(folder.path(), "pi1")).unwrap();
    // A key that the server does not know.
    let others = keys("lab");
    let mut other = Credentials::read(&key(others.path(), "pi1")).unwrap();
    other.authority.clone_from(&good.authority);
    assert!(matches!(fail(&address, Some(&other)), Error::Refused { .. }));
    // A server with a certificate of another authority.
    let stranger = Credentials::read(&key(others.path(), "pi1")).unwrap();
    assert!(matches!(fail(&address, Some(&stranger)), Error::Tls { .. }));
    // No key, and no encryption.
    assert!(matches!(fail(&address, None), Error::Tls { .. }));
    let plain = Servers::parse(&broker.url()).unwrap();
    assert!(matches!(fail(&plain, Some(&good)), Error::TlsRequired { .. }));
    // A server name that is not in the certificate.
    let elsewhere = Servers::parse(&format!("tls://127.0.0.2:{}", broker.port())).unwrap();
    assert!(matches!(fail(&elsewhere, Some(&good)), Error::Tls { .. } | Error::Unreachable { .. }));
    // An unencrypted server, although encryption is requested.
    let Some(open) = Broker::start() else { return };
    let address = Servers::parse(&format!("tls://localhost:{}", open.port())).unwrap();
    assert!(matches!(fail(&address, Some(&good)), Error::NoTls { .. }));
    // A device's key does not permit the operations of a tuner.
    let error = fleet(&url, folder.path(), "pi1").devices().unwrap_err().to_string();
    assert!(error.contains("not the tuner's"), "{error}");
}
