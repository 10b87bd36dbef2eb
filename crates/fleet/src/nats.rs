//! NATS client: a connection on which any thread can send and one thread receives.
//!
//! # Source
//! Implements the required part of the line-based protocol with blocking functions, so that the program needs
//! no async runtime: <https://docs.nats.io/reference/reference-protocols/nats-protocol>.

mod address;
mod wire;

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use serde_json::json;

use crate::error::Error;
use crate::keys::Credentials;
use crate::nkey::{random, random_name};
use address::ServerAddress;
use wire::{Frame, ServerInfo, WireParser};

pub use address::Servers;

/// Timeout of a connection, a handshake or a write.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Time without a first message after which the server is assumed to encrypt that message, too.
const FIRST_WORD: Duration = Duration::from_secs(2);
/// Silence after which a ping is sent to the server.
const QUIET: Duration = Duration::from_secs(2);
/// Silence after which a server counts as dead.
const DEAD: Duration = Duration::from_secs(7);
/// Interval of the checks for silence.
const LOOK: Duration = Duration::from_millis(500);
/// Maximum total size of messages that wait to be read; the connection of a slower reader is closed, as
/// servers do.
const MOST_WAITING: usize = 64 << 20;
/// Approximate size of a message without its payload, in bytes.
const OF_MESSAGE: usize = 128;
/// Time before the second attempt to connect, and maximum time between two attempts.
const FIRST_TRY: Duration = Duration::from_millis(100);
const MOST_BETWEEN_TRIES: Duration = Duration::from_secs(5);

/// Schedule of reconnections with exponential backoff and jitter.
#[derive(Debug)]
pub struct Retry {
    n_failed: u32,
    at: Instant,
}

impl Retry {
    /// Makes a schedule whose first attempt is immediate.
    pub fn at_once() -> Retry {
        Retry { n_failed: 0, at: Instant::now() }
    }

    /// Time until the next attempt.
    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Schedules the next attempt after a failure.
    pub fn failed(&mut self) {
        let most = FIRST_TRY.saturating_mul(1 << self.n_failed.min(16)).min(MOST_BETWEEN_TRIES);
        let [byte] = random();
        // Random time between half of the interval and all of it.
        self.at = Instant::now() + most.mul_f64(0.5 + f64::from(byte) / 510.0);
        self.n_failed += 1;
    }
}

/// Received message.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReceivedMessage {
    /// Subject of the message.
    pub subject: String,
    /// Subject for a reply.
    pub reply: Option<String>,
    /// Status instead of a reply, such as 503 for no responders.
    pub status: Option<u16>,
    /// Contents of the message.
    pub payload: Vec<u8>,
}

/// Event of a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum ConnectionEvent {
    /// Received message.
    Message(ReceivedMessage),
    /// Error message of the server.
    Refused(String),
    /// End of the connection, with the reason.
    Lost(String),
}

impl ConnectionEvent {
    /// Approximate number of bytes that the event takes while it waits.
    fn weight(&self) -> usize {
        match self {
            ConnectionEvent::Message(message) => OF_MESSAGE + message.subject.len() + message.payload.len(),
            ConnectionEvent::Refused(why) => OF_MESSAGE + why.len(),
            ConnectionEvent::Lost(_) => 0,
        }
    }
}

/// Sending side of a connection, shared by threads.
#[derive(Clone)]
pub struct Link(Arc<Inner>);

struct Inner {
    socket: TcpStream,
    tls: Option<Mutex<ClientConnection>>,
    /// Held while a message is sent.
    sending: Mutex<()>,
    /// Maximum payload that the server accepts.
    max_payload: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let _turn = lock(&self.0.sending);
        match &self.0.tls {
            None => (&self.0.socket).write_all(bytes),
            Some(tls) => {
                let mut tls = lock(tls);
                tls.writer().write_all(bytes)?;
                flush(&mut tls, &self.0.socket)
            }
        }
    }

    /// Maximum payload that the server accepts, in bytes.
    pub fn max_payload(&self) -> usize {
        self.0.max_payload.load(Ordering::Relaxed)
    }

    /// Sends a message; returns false without sending it if it exceeds the server's limit, which would end
    /// the connection. If sending fails, the message is lost with the connection, whose end is reported as an
    /// event.
    pub fn publish(&self, subject: &str, reply: Option<&str>, id: Option<&str>, payload: &[u8]) -> bool {
        let head = id.map_or(String::new(), |id| format!("NATS/1.0\r\nNats-Msg-Id: {id}\r\n\r\n"));
        let total = head.len() + payload.len();
        if total > self.max_payload() {
            return false;
        }
        let reply = reply.map_or(String::new(), |reply| format!(" {reply}"));
        let mut bytes = match id {
            None => format!("PUB {subject}{reply} {total}\r\n"),
            Some(_) => format!("HPUB {subject}{reply} {} {total}\r\n{head}", head.len()),
        }
        .into_bytes();
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(b"\r\n");
        self.send_or_end(&bytes);
        true
    }

    fn send_or_end(&self, bytes: &[u8]) {
        if self.send(bytes).is_err() {
            let _ = self.0.socket.shutdown(Shutdown::Both);
        }
    }
}

fn flush(tls: &mut ClientConnection, mut socket: &TcpStream) -> io::Result<()> {
    while tls.wants_write() {
        tls.write_tls(&mut socket)?;
    }
    Ok(())
}

/// Connection to a server.
pub struct Client {
    link: Link,
    events: Receiver<ConnectionEvent>,
    /// Events received while waiting for another one.
    early: VecDeque<ConnectionEvent>,
    /// Total size of received events that have not been read.
    waiting: Arc<AtomicUsize>,
    inbox: String,
    n_requests: u64,
    n_subscriptions: u64,
}

impl Client {
    /// Connects to the first server that accepts. Replies are received on inboxes with this prefix.
    ///
    /// # Errors
    /// If no server accepts: the error of the first one that answered, if any.
    pub fn connect(servers: &Servers, credentials: Option<&Credentials>, inbox: &str) -> Result<Client, Error> {
        let mut why: Option<Error> = None;
        for address in &servers.0 {
            match Client::to(address, servers.0.len() == 1, credentials, inbox) {
                Ok(client) => return Ok(client),
                Err(error) if why.as_ref().is_none_or(|why| matches!(why, Error::Unreachable { .. })) => {
                    why = Some(error);
                }
                Err(_) => {}
            }
        }
        Err(why.expect("invariant: there is an address"))
    }

    /// Connects to a server; `is_only` tells whether it is the only one.
    fn to(
        address: &ServerAddress,
        is_only: bool,
        credentials: Option<&Credentials>,
        inbox: &str,
    ) -> Result<Client, Error> {
        let socket = address.connect()?;
        let failed = |source| Error::Unreachable { address: address.to_string(), source };
        let set = |socket: &TcpStream| {
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(FIRST_WORD))?;
            socket.set_write_timeout(Some(TIMEOUT))
        };
        set(&socket).map_err(failed)?;
        // The first line is usually not encrypted, and tells whether the others are.
        let mut parser = WireParser::default();
        let info = first_word(&socket, &mut parser, address)?;
        socket.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
        let tls = match (address.is_tls, &info) {
            (false, None) => return Err(Error::NoServer { address: address.to_string() }),
            (false, Some(info)) if info.tls_required => {
                return Err(Error::TlsRequired { address: address.to_string() });
            }
            (false, Some(_)) => None,
            (true, Some(info)) if !info.tls_required && !info.tls_available => {
                return Err(Error::NoTls { address: address.to_string() });
            }
            // Unencrypted data after the first line is invalid, or may be injected.
            (true, _) if !parser.is_empty() => return Err(Error::NoServer { address: address.to_string() }),
            (true, _) => Some(Mutex::new(handshake(address, credentials, &socket)?)),
        };
        socket.set_read_timeout(Some(LOOK)).map_err(failed)?;
        let max_payload = AtomicUsize::new(info.as_ref().map_or(0, |info| info.max_payload));
        let link = Link(Arc::new(Inner { socket, tls, sending: Mutex::new(()), max_payload }));
        let waiting = Arc::default();
        let mut wire =
            Wire { link: link.clone(), is_only, raw: vec![0; 64 << 10], parser, waiting: Arc::clone(&waiting) };
        let info = match info {
            Some(info) => info,
            None => wire.wait_for(address, |frame| match frame {
                Frame::Info(info) => Some(info),
                _ => None,
            })?,
        };
        let mut hello = json!({
            "verbose": false, "pedantic": false, "lang": "rust", "version": tilewright::version::BUILD,
            "protocol": 1, "headers": true, "no_responders": true, "name": "tilewright",
        });
        if let Some(credentials) = credentials {
            let key = credentials.key()?;
            hello["nkey"] = json!(key.public());
            hello["sig"] = json!(key.sign(&info.nonce.unwrap_or_default()));
        }
        link.send(format!("CONNECT {hello}\r\nPING\r\n").as_bytes()).map_err(failed)?;
        wire.wait_for(address, |frame| (frame == Frame::Pong).then_some(()))?;
        let (sender, events) = channel();
        std::thread::Builder::new().spawn(move || wire.listen(&sender)).map_err(failed)?;
        // The inbox is unique, so that replies to an earlier connection are not mistaken for replies to this
        // one.
        let inbox = format!("_INBOX.{inbox}.{}", random_name());
        let early = VecDeque::new();
        let mut client = Client { link, events, early, waiting, inbox, n_requests: 0, n_subscriptions: 0 };
        client.subscribe(&format!("{}.>", client.inbox));
        Ok(client)
    }

    /// Sending side of the connection.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Subscribes to a subject.
    pub fn subscribe(&mut self, subject: &str) {
        self.n_subscriptions += 1;
        self.link.send_or_end(format!("SUB {subject} {}\r\n", self.n_subscriptions).as_bytes());
    }

    /// Makes an inbox subject for replies that ends with this name.
    pub fn inbox(&self, name: &str) -> String {
        format!("{}.{name}", self.inbox)
    }

    /// Name with which an inbox subject was made; `None` for other subjects.
    pub fn name_of<'a>(&self, subject: &'a str) -> Option<&'a str> {
        subject.strip_prefix(&self.inbox)?.strip_prefix('.')
    }

    /// Waits for the next event, up to `at_most`.
    pub fn next(&mut self, at_most: Duration) -> Option<ConnectionEvent> {
        let event = self.early.pop_front().or_else(|| self.receive(at_most))?;
        self.waiting.fetch_sub(event.weight(), Ordering::Relaxed);
        Some(event)
    }

    fn receive(&self, at_most: Duration) -> Option<ConnectionEvent> {
        match self.events.recv_timeout(at_most) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(ConnectionEvent::Lost("the connection has ended".to_owned())),
        }
    }

    /// Sends a request and waits for the reply; `None` on timeout. Other events are kept for
    /// [`Client::next`].
    ///
    /// # Errors
    /// [`Error::Lost`] if the connection ends, [`Error::Denied`] if the request is not permitted, and
    /// [`Error::TooLarge`] if the server does not accept a message of this size.
    pub fn request(
        &mut self,
        subject: &str,
        payload: &[u8],
        at_most: Duration,
    ) -> Result<Option<ReceivedMessage>, Error> {
        self.request_as(subject, None, payload, at_most)
    }

    /// Sends a request with a message id, by which the server recognises duplicates.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn request_as(
        &mut self,
        subject: &str,
        id: Option<&str>,
        payload: &[u8],
        at_most: Duration,
    ) -> Result<Option<ReceivedMessage>, Error> {
        self.n_requests += 1;
        let reply = self.inbox(&format!("request{}", self.n_requests));
        if !self.link.publish(subject, Some(&reply), id, payload) {
            return Err(Error::TooLarge { n_bytes: payload.len(), most: self.link.max_payload() });
        }
        let until = Instant::now() + at_most;
        loop {
            let event = self.receive(until.saturating_duration_since(Instant::now()));
            let weight = event.as_ref().map_or(0, ConnectionEvent::weight);
            let is_asked_for = |why: &str| why.contains(&format!("\"{subject}\""));
            match event {
                None => return Ok(None),
                Some(ConnectionEvent::Message(message)) if message.subject == reply => {
                    self.waiting.fetch_sub(weight, Ordering::Relaxed);
                    return Ok(Some(message));
                }
                Some(ConnectionEvent::Refused(why)) if is_asked_for(&why) => {
                    self.waiting.fetch_sub(weight, Ordering::Relaxed);
                    return Err(Error::Denied { why });
                }
                Some(ConnectionEvent::Lost(why)) => {
                    self.early.push_back(ConnectionEvent::Lost(why.clone()));
                    return Err(Error::Lost { why });
                }
                Some(event) => self.early.push_back(event),
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.link.0.socket.shutdown(Shutdown::Both);
    }
}

/// Reads the first message of a server; `None` if it waits for an encrypted connection.
fn first_word(
    mut socket: &TcpStream,
    parser: &mut WireParser,
    address: &ServerAddress,
) -> Result<Option<ServerInfo>, Error> {
    let mut raw = [0; 4096];
    loop {
        match parser.frame() {
            Ok(Some(Frame::Info(info))) => return Ok(Some(info)),
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return Err(Error::NoServer { address: address.to_string() }),
        }
        match socket.read(&mut raw) {
            Ok(0) => return Err(Error::NoServer { address: address.to_string() }),
            Ok(n) => parser.push(&raw[..n]),
            Err(error) if is_silence(&error) && parser.is_empty() => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(Error::Unreachable { address: address.to_string(), source }),
        }
    }
}

/// Whether an error is a timeout.
fn is_silence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn handshake(
    address: &ServerAddress,
    credentials: Option<&Credentials>,
    mut socket: &TcpStream,
) -> Result<ClientConnection, Error> {
    let refuse = |why: String| Error::Tls { address: address.to_string(), why };
    let mut roots = RootCertStore::empty();
    let authority = credentials.map(|credentials| credentials.authority.as_str());
    let authority = authority.ok_or_else(|| refuse("no authority is known that vouches for it (give --key)".into()))?;
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        let certificate = certificate
            .map_err(|error| refuse(format!("the certificate of the key's authority is invalid: {error}")))?;
        roots.add(certificate).map_err(|error| refuse(error.to_string()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| refuse(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(address.host.clone()).map_err(|error| refuse(error.to_string()))?;
    let mut tls = ClientConnection::new(Arc::new(config), name).map_err(|error| refuse(error.to_string()))?;
    tls.set_buffer_limit(None);
    while tls.is_handshaking() {
        tls.complete_io(&mut socket).map_err(|error| refuse(error.to_string()))?;
    }
    Ok(tls)
}

/// Receiving side of a connection.
struct Wire {
    link: Link,
    /// Whether the server is the only one.
    is_only: bool,
    raw: Vec<u8>,
    parser: WireParser,
    /// Total size of events that have not been read.
    waiting: Arc<AtomicUsize>,
}

impl Wire {
    /// Waits for more bytes; returns the number received from the system, 0 at the end.
    fn fill(&mut self) -> io::Result<usize> {
        let inner = &*self.link.0;
        let n = (&inner.socket).read(&mut self.raw)?;
        match &inner.tls {
            None => self.parser.push(&self.raw[..n]),
            Some(tls) => {
                let mut tls = lock(tls);
                let mut encrypted = &self.raw[..n];
                while !encrypted.is_empty() {
                    tls.read_tls(&mut encrypted)?;
                    let state = tls.process_new_packets().map_err(io::Error::other)?;
                    let mut plain = vec![0; state.plaintext_bytes_to_read()];
                    tls.reader().read_exact(&mut plain)?;
                    self.parser.push(&plain);
                }
                flush(&mut tls, &inner.socket)?;
            }
        }
        Ok(n)
    }

    /// Waits for an expected frame during the handshake; an error of the server ends the wait.
    fn wait_for<T>(&mut self, address: &ServerAddress, of: impl Fn(Frame) -> Option<T>) -> Result<T, Error> {
        let failed = |source| Error::Unreachable { address: address.to_string(), source };
        let until = Instant::now() + TIMEOUT;
        loop {
            match self.parser.frame() {
                Ok(Some(Frame::Refused(why))) | Err(why) => {
                    return Err(Error::Refused { address: address.to_string(), why });
                }
                Ok(Some(frame)) => {
                    self.heed(&frame);
                    if let Some(found) = of(frame) {
                        return Ok(found);
                    }
                }
                Ok(None) => match self.fill() {
                    Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                    Ok(_) => {}
                    Err(error) if is_silence(&error) => {}
                    Err(error) => return Err(failed(error)),
                },
            }
            if Instant::now() > until {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
        }
    }

    /// Handles a frame that concerns only the connection.
    fn heed(&self, frame: &Frame) {
        match frame {
            Frame::Ping => self.link.send_or_end(b"PONG\r\n"),
            Frame::Info(info) => self.link.0.max_payload.store(info.max_payload, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Forwards received events until the connection or the receiver ends.
    fn listen(mut self, to: &Sender<ConnectionEvent>) {
        let (mut heard, mut asked) = (Instant::now(), false);
        let mut refusal = None;
        let why = loop {
            let event = match self.parser.frame() {
                Ok(Some(Frame::Message(message))) => ConnectionEvent::Message(message),
                Ok(Some(Frame::Refused(why))) => {
                    refusal = Some(why.clone());
                    ConnectionEvent::Refused(why)
                }
                // If there are other servers, the connection can move to one now; else it stays until the
                // server ends it.
                Ok(Some(Frame::Info(ServerInfo { ldm: true, .. }))) if !self.is_only => {
                    break "it is being shut down".to_owned();
                }
                Ok(Some(frame)) => {
                    self.heed(&frame);
                    continue;
                }
                Err(why) => break why,
                Ok(None) => match self.fill() {
                    Ok(0) => {
                        let why = refusal.map_or(String::new(), |why| format!(": {why}"));
                        break format!("the server has ended it{why}");
                    }
                    Ok(_) => {
                        (heard, asked) = (Instant::now(), false);
                        continue;
                    }
                    Err(error) if is_silence(&error) => {
                        if heard.elapsed() > DEAD {
                            break "the server is silent".to_owned();
                        }
                        if heard.elapsed() > QUIET && !std::mem::replace(&mut asked, true) {
                            self.link.send_or_end(b"PING\r\n");
                        }
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => break error.to_string(),
                },
            };
            let weight = event.weight();
            if self.waiting.fetch_add(weight, Ordering::Relaxed) + weight > MOST_WAITING {
                break "messages come faster than they are taken".to_owned();
            }
            if to.send(event).is_err() {
                return;
            }
        };
        let _ = self.link.0.socket.shutdown(Shutdown::Both);
        let _ = to.send(ConnectionEvent::Lost(why));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;

    use super::*;

    /// Starts a server that accepts one connection, sends this information, and continues with `go_on`.
    fn fake(info: &'static str, go_on: impl FnOnce(BufReader<TcpStream>, TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("nats://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            socket.write_all(format!("INFO {info}\r\n").as_bytes()).unwrap();
            let mut lines = BufReader::new(socket.try_clone().unwrap());
            wait_for_line(&mut lines, "PING");
            go_on(lines, socket);
        });
        address
    }

    fn wait_for_line(lines: &mut BufReader<TcpStream>, expected: &str) {
        let mut line = String::new();
        while !line.starts_with(expected) {
            line.clear();
            assert!(lines.read_line(&mut line).unwrap() > 0, "{expected} does not come");
        }
    }

    fn connect(servers: &str) -> Result<Client, Error> {
        Client::connect(&Servers::parse(servers).unwrap(), None, "test")
    }

    fn event(client: &mut Client) -> ConnectionEvent {
        client.next(Duration::from_secs(10)).expect("something comes")
    }

    /// Address at which no server listens.
    fn nowhere() -> String {
        format!("nats://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
    }

    #[test]
    fn plain_connections_stay_on_this_machine() {
        assert!(matches!(connect("nats://192.0.2.1"), Err(Error::Plain { .. })));
    }

    #[test]
    fn the_first_server_that_takes_us_is_used() {
        let good = || {
            fake("{}", |mut lines, mut socket| {
                socket.write_all(b"PONG\r\n").unwrap();
                wait_for_line(&mut lines, "PUB");
            })
        };
        let bad = || fake("{}", |_, mut socket| socket.write_all(b"-ERR 'Authorization Violation'\r\n").unwrap());
        for others in [vec![], vec![nowhere()], vec![nowhere(), bad()], vec![bad()]] {
            let all = [others, vec![good(), nowhere()]].concat().join(",");
            assert!(connect(&all).unwrap().link().publish("x", None, None, b""), "{all}");
        }
        assert!(matches!(connect(&nowhere()), Err(Error::Unreachable { .. })));
        // The error of a server that answers is more informative.
        let all = [nowhere(), bad(), nowhere()].join(",");
        assert!(matches!(connect(&all), Err(Error::Refused { why, .. }) if why == "Authorization Violation"));
        // A server of another kind.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"220 mail\r\n"));
        assert!(matches!(connect(&address), Err(Error::NoServer { .. })));
    }

    #[test]
    fn why_a_server_ends_a_connection_is_told() {
        let server = fake("{}", |_, mut socket| socket.write_all(b"PONG\r\n-ERR 'Slow Consumer'\r\n").unwrap());
        let mut client = connect(&server).unwrap();
        assert_eq!(event(&mut client), ConnectionEvent::Refused("Slow Consumer".into()));
        let ConnectionEvent::Lost(why) = event(&mut client) else { panic!("it ends") };
        assert!(why.contains("Slow Consumer") || why.contains("reset"), "{why}");
    }

    #[test]
    fn a_server_that_asks_is_answered_and_one_that_is_silent_is_asked() {
        let server = fake("{}", |mut lines, mut socket| {
            socket.write_all(b"PONG\r\nPING\r\n").unwrap();
            wait_for_line(&mut lines, "PONG");
            wait_for_line(&mut lines, "PING");
            socket.write_all(b"MSG a 1 0\r\n\r\n").unwrap();
        });
        assert!(matches!(event(&mut connect(&server).unwrap()), ConnectionEvent::Message(_)));
    }

    #[test]
    fn who_has_another_server_leaves_one_that_is_shut_down() {
        let server = || {
            fake("{}", |mut lines, mut socket| {
                socket.write_all(b"PONG\r\nINFO {\"ldm\":true}\r\nMSG a 1 0\r\n\r\n").unwrap();
                let _ = lines.read_line(&mut String::new());
            })
        };
        assert!(matches!(event(&mut connect(&server()).unwrap()), ConnectionEvent::Message(_)));
        let mut client = connect(&format!("{},{}", server(), nowhere())).unwrap();
        assert_eq!(event(&mut client), ConnectionEvent::Lost("it is being shut down".into()));
    }

    #[test]
    fn what_is_too_large_for_a_server_is_not_sent() {
        let server = fake("{\"max_payload\":100}", |mut lines, mut socket| {
            socket.write_all(b"PONG\r\n").unwrap();
            wait_for_line(&mut lines, "PUB a 100");
            socket.write_all(b"INFO {\"max_payload\":101}\r\nMSG b 1 0\r\n\r\n").unwrap();
            wait_for_line(&mut lines, "HPUB a 28 101");
            socket.write_all(b"MSG b 1 0\r\n\r\n").unwrap();
        });
        let mut client = connect(&server).unwrap();
        assert!(!client.link().publish("a", None, None, &[0; 101]));
        let refused = client.request("a", &[0; 101], Duration::ZERO);
        assert!(matches!(refused, Err(Error::TooLarge { n_bytes: 101, most: 100 })));
        assert!(client.link().publish("a", None, None, &[b'.'; 100]));
        assert!(matches!(event(&mut client), ConnectionEvent::Message(_)));
        // The header counts towards the size.
        assert!(!client.link().publish("a", None, Some("1"), &[b'.'; 74]));
        assert!(client.link().publish("a", None, Some("1"), &[b'.'; 73]));
        assert!(matches!(event(&mut client), ConnectionEvent::Message(_)));
    }

    #[test]
    fn who_is_slower_than_what_comes_is_cut_off() {
        let server = fake("{}", |_, mut socket| {
            socket.write_all(b"PONG\r\n").unwrap();
            let message = [&b"MSG a 1 1048576\r\n"[..], &[b'.'; 1 << 20], b"\r\n"].concat();
            while socket.write_all(&message).is_ok() {}
        });
        let mut client = connect(&server).unwrap();
        // Messages are received although no thread reads them.
        while client.waiting.load(Ordering::Relaxed) < MOST_WAITING {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut n = 0;
        while let ConnectionEvent::Message(_) = event(&mut client) {
            n += 1;
        }
        assert!((n << 20) <= MOST_WAITING && n > 60, "{n}");
    }

    #[test]
    fn tries_become_rarer() {
        let mut retry = Retry::at_once();
        assert_eq!(retry.left(), Duration::ZERO);
        for at_most in [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000] {
            retry.failed();
            let left = retry.left().as_millis();
            assert!(left <= at_most && left + 20 >= at_most / 2, "{left} of {at_most}");
        }
    }
}
