//! A client of NATS: one connection, on which messages are sent by any thread and received by one.
//!
//! # Source
//! <https://docs.nats.io/reference/reference-protocols/nats-protocol>. It is a protocol of lines; what we use
//! of it is here, blocking, so that nothing else of this program has to know another kind of function.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use serde::Deserialize;
use serde_json::json;

use crate::error::Error;
use crate::keys::Credentials;
use crate::nkey::random_name;

/// The port where an address says none.
pub const PORT: u16 = 4222;
/// How long a connection, a handshake or a write may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A server that is silent is asked for a sign after so long …
const QUIET: Duration = Duration::from_secs(2);
/// … and given up after so long.
const DEAD: Duration = Duration::from_secs(7);
/// How often it is looked whether it is.
const LOOK: Duration = Duration::from_millis(500);
/// The largest message that is believed to be one.
const MOST_BYTES: usize = 64 << 20;

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    is_tls: bool,
}

impl Address {
    /// The address that a text names: `nats://HOST:PORT`, or `tls://HOST:PORT` for an encrypted connection.
    ///
    /// # Errors
    /// [`Error::Address`] where it names none.
    pub fn parse(text: &str) -> Result<Address, Error> {
        let refuse = |why: &'static str| Error::Address { given: text.chars().take(80).collect(), why };
        let (scheme, rest) = text.split_once("://").unwrap_or(("nats", text));
        let is_tls = match scheme {
            "nats" => false,
            "tls" => true,
            _ => return Err(refuse("it begins with neither nats:// nor tls://")),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '@']) {
            return Err(refuse("there is more than a host and a port (keys are in a file: --key)"));
        }
        // An address in brackets has colons of its own.
        let (host, port) = match rest.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| refuse("the port is none"))?),
            _ => (rest, PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(refuse("there is no host"));
        }
        Ok(Address { host: host.to_owned(), port, is_tls })
    }

    fn connect(&self) -> Result<TcpStream, Error> {
        let unreachable = |source| Error::Unreachable { address: self.to_string(), source };
        let places: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs().map_err(unreachable)?.collect();
        if !self.is_tls && places.iter().any(|place| !place.ip().is_loopback()) {
            return Err(Error::Plain { address: self.to_string() });
        }
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for place in places {
            match TcpStream::connect_timeout(&place, TIMEOUT) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = error,
            }
        }
        Err(unreachable(last))
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.is_tls { "tls" } else { "nats" };
        let (before, after) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{scheme}://{before}{}{after}:{}", self.host, self.port)
    }
}

/// A message that has come.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Message {
    /// What it is about.
    pub subject: String,
    /// Where an answer goes.
    pub reply: Option<String>,
    /// What the server says in the place of an answer, as a number: 503 where nobody listens.
    pub status: Option<u16>,
    /// What it says.
    pub payload: Vec<u8>,
}

/// What a connection has come to.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A message.
    Message(Message),
    /// The server refuses something, in its words.
    Refused(String),
    /// The connection has ended, and why.
    Lost(String),
}

/// The side of a connection that sends, for any thread.
#[derive(Clone)]
pub struct Link(Arc<Inner>);

struct Inner {
    socket: TcpStream,
    tls: Option<Mutex<ClientConnection>>,
    /// Held for the time of a message.
    sending: Mutex<()>,
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

    /// Sends a message. One that cannot be sent is lost with the connection, which says so by an event.
    pub fn publish(&self, subject: &str, reply: Option<&str>, id: Option<&str>, payload: &[u8]) {
        let reply = reply.map_or(String::new(), |reply| format!(" {reply}"));
        let mut bytes = match id {
            None => format!("PUB {subject}{reply} {}\r\n", payload.len()),
            Some(id) => {
                let head = format!("NATS/1.0\r\nNats-Msg-Id: {id}\r\n\r\n");
                format!("HPUB {subject}{reply} {} {}\r\n{head}", head.len(), head.len() + payload.len())
            }
        }
        .into_bytes();
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(b"\r\n");
        self.send_or_end(&bytes);
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

/// A connection.
pub struct Client {
    link: Link,
    events: Receiver<Event>,
    /// What came while something else was waited for.
    early: VecDeque<Event>,
    inbox: String,
    n_requests: u64,
    n_subscriptions: u64,
}

/// What a server says of itself.
#[derive(Deserialize, Default)]
struct Info {
    #[serde(default)]
    nonce: Option<String>,
    #[serde(default)]
    tls_required: bool,
}

impl Client {
    /// Connects. What is answered comes to an inbox below this name.
    ///
    /// # Errors
    /// Where the server cannot be reached, or refuses.
    pub fn connect(address: &Address, credentials: Option<&Credentials>, inbox: &str) -> Result<Client, Error> {
        let socket = address.connect()?;
        let failed = |source| Error::Unreachable { address: address.to_string(), source };
        let set = |socket: &TcpStream| {
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(TIMEOUT))?;
            socket.set_write_timeout(Some(TIMEOUT))
        };
        set(&socket).map_err(failed)?;
        // The first line is not encrypted, and says whether others are.
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') && line.len() < 1 << 16 {
            let mut byte = [0];
            (&socket).read_exact(&mut byte).map_err(failed)?;
            line.push(byte[0]);
        }
        let info = line.strip_prefix(b"INFO ").and_then(|json| serde_json::from_slice::<Info>(json).ok());
        let info = info.ok_or_else(|| Error::NoServer { address: address.to_string() })?;
        let tls = match address.is_tls {
            false if info.tls_required => return Err(Error::TlsRequired { address: address.to_string() }),
            false => None,
            true if !info.tls_required => return Err(Error::NoTls { address: address.to_string() }),
            true => Some(Mutex::new(handshake(address, credentials, &socket)?)),
        };
        let link = Link(Arc::new(Inner { socket, tls, sending: Mutex::new(()) }));
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
        let mut wire = Wire { link: link.clone(), raw: vec![0; 64 << 10], bytes: Vec::new(), at: 0 };
        loop {
            match wire.frame() {
                Ok(Some(Frame::Pong)) => break,
                Ok(Some(Frame::Refused(why))) => return Err(Error::Refused { address: address.to_string(), why }),
                Ok(Some(_)) => {}
                Ok(None) => {
                    if wire.fill().map_err(failed)? == 0 {
                        return Err(failed(io::ErrorKind::UnexpectedEof.into()));
                    }
                }
                Err(why) => return Err(Error::Refused { address: address.to_string(), why }),
            }
        }
        link.0.socket.set_read_timeout(Some(LOOK)).map_err(failed)?;
        let (sender, events) = channel();
        std::thread::Builder::new().spawn(move || wire.listen(&sender)).map_err(failed)?;
        // Answers to a connection that has ended are none to this one.
        let inbox = format!("_INBOX.{inbox}.{}", random_name());
        let mut client = Client { link, events, early: VecDeque::new(), inbox, n_requests: 0, n_subscriptions: 0 };
        client.subscribe(&format!("{}.>", client.inbox));
        Ok(client)
    }

    /// The side that sends.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Has messages of a subject come from now on.
    pub fn subscribe(&mut self, subject: &str) {
        self.n_subscriptions += 1;
        self.link.send_or_end(format!("SUB {subject} {}\r\n", self.n_subscriptions).as_bytes());
    }

    /// A subject to which an answer can come, that ends with this name.
    pub fn inbox(&self, name: &str) -> String {
        format!("{}.{name}", self.inbox)
    }

    /// What of the subject of an answer is the name that was given it.
    pub fn name_of<'a>(&self, subject: &'a str) -> Option<&'a str> {
        subject.strip_prefix(&self.inbox)?.strip_prefix('.')
    }

    /// What has come, within some time at most.
    pub fn next(&mut self, at_most: Duration) -> Option<Event> {
        if let Some(event) = self.early.pop_front() {
            return Some(event);
        }
        self.receive(at_most)
    }

    fn receive(&self, at_most: Duration) -> Option<Event> {
        match self.events.recv_timeout(at_most) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Event::Lost("the connection has ended".to_owned())),
        }
    }

    /// Asks, and waits for the answer; none where it does not come within this time. What else comes
    /// meanwhile is kept.
    ///
    /// # Errors
    /// [`Error::Lost`] where the connection ends, and [`Error::Denied`] where this may not be asked.
    pub fn request(&mut self, subject: &str, payload: &[u8], at_most: Duration) -> Result<Option<Message>, Error> {
        self.request_as(subject, None, payload, at_most)
    }

    /// The same of a message that is known by an id.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub fn request_as(
        &mut self,
        subject: &str,
        id: Option<&str>,
        payload: &[u8],
        at_most: Duration,
    ) -> Result<Option<Message>, Error> {
        self.n_requests += 1;
        let reply = self.inbox(&format!("request{}", self.n_requests));
        self.link.publish(subject, Some(&reply), id, payload);
        let until = Instant::now() + at_most;
        loop {
            match self.receive(until.saturating_duration_since(Instant::now())) {
                None => return Ok(None),
                Some(Event::Message(message)) if message.subject == reply => return Ok(Some(message)),
                Some(Event::Refused(why)) if why.contains(&format!("\"{subject}\"")) => {
                    return Err(Error::Denied { why });
                }
                Some(Event::Lost(why)) => {
                    self.early.push_back(Event::Lost(why.clone()));
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

fn handshake(
    address: &Address,
    credentials: Option<&Credentials>,
    mut socket: &TcpStream,
) -> Result<ClientConnection, Error> {
    let refuse = |why: String| Error::Tls { address: address.to_string(), why };
    let mut roots = RootCertStore::empty();
    let authority = credentials.map(|credentials| credentials.authority.as_str());
    let authority = authority.ok_or_else(|| refuse("no authority is known that vouches for it (give --key)".into()))?;
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        let certificate = certificate.map_err(|error| refuse(format!("the key's authority is none: {error}")))?;
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

/// The side of a connection that receives.
struct Wire {
    link: Link,
    raw: Vec<u8>,
    /// What has come, as far as it is not understood yet, from here on.
    bytes: Vec<u8>,
    at: usize,
}

enum Frame {
    Message(Message),
    Refused(String),
    Ping,
    Pong,
    Other,
}

impl Wire {
    /// Waits for more bytes; how many came from the system, none at the end.
    fn fill(&mut self) -> io::Result<usize> {
        let inner = &*self.link.0;
        let n = (&inner.socket).read(&mut self.raw)?;
        match &inner.tls {
            None => self.bytes.extend_from_slice(&self.raw[..n]),
            Some(tls) => {
                let mut tls = lock(tls);
                let mut encrypted = &self.raw[..n];
                while !encrypted.is_empty() {
                    tls.read_tls(&mut encrypted)?;
                    let state = tls.process_new_packets().map_err(io::Error::other)?;
                    let from = self.bytes.len();
                    self.bytes.resize(from + state.plaintext_bytes_to_read(), 0);
                    tls.reader().read_exact(&mut self.bytes[from..])?;
                }
                flush(&mut tls, &inner.socket)?;
            }
        }
        Ok(n)
    }

    /// The next frame, where it is here as a whole.
    fn frame(&mut self) -> Result<Option<Frame>, String> {
        let rest = &self.bytes[self.at..];
        let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else {
            self.bytes.drain(..self.at);
            self.at = 0;
            return Ok(None);
        };
        let line = String::from_utf8_lossy(&rest[..end]).into_owned();
        let (word, words) = line.split_once(' ').unwrap_or((&line, ""));
        let (frame, n_more) = match word.to_ascii_uppercase().as_str() {
            "MSG" | "HMSG" => {
                let odd = || format!("what a server does not say: {}", line.chars().take(80).collect::<String>());
                let words: Vec<&str> = words.split_ascii_whitespace().collect();
                let n_sizes = if word.len() == 4 { 2 } else { 1 };
                let sizes = words.len().checked_sub(n_sizes).ok_or_else(odd)?;
                let number = |at: usize| words[at].parse().ok().filter(|n| *n <= MOST_BYTES).ok_or_else(odd);
                let total: usize = number(words.len() - 1)?;
                let n_head: usize = if n_sizes == 2 { number(sizes)? } else { 0 };
                let (subject, reply) = match &words[..sizes] {
                    [subject, _] => (*subject, None),
                    [subject, _, reply] => (*subject, Some((*reply).to_owned())),
                    _ => return Err(odd()),
                };
                let from = end + 2;
                let Some(body) = rest.get(from..from + total + 2) else { return Ok(None) };
                if n_head > total {
                    return Err(odd());
                }
                let head = String::from_utf8_lossy(&body[..n_head]);
                let status = head.lines().next().and_then(|first| first.split_ascii_whitespace().nth(1)?.parse().ok());
                let payload = body[n_head..total].to_vec();
                (Frame::Message(Message { subject: subject.to_owned(), reply, status, payload }), total + 2)
            }
            "PING" => (Frame::Ping, 0),
            "PONG" => (Frame::Pong, 0),
            "-ERR" => (Frame::Refused(words.trim_matches('\'').to_owned()), 0),
            "INFO" | "+OK" => (Frame::Other, 0),
            _ => return Err(format!("what a server does not say: {}", line.chars().take(80).collect::<String>())),
        };
        self.at += end + 2 + n_more;
        Ok(Some(frame))
    }

    /// Tells what comes until the connection or the listener ends.
    fn listen(mut self, to: &Sender<Event>) {
        let (mut heard, mut asked) = (Instant::now(), false);
        let why = loop {
            let event = match self.frame() {
                Ok(Some(Frame::Message(message))) => Event::Message(message),
                Ok(Some(Frame::Refused(why))) => Event::Refused(why),
                Ok(Some(Frame::Ping)) => {
                    self.link.send_or_end(b"PONG\r\n");
                    continue;
                }
                Ok(Some(Frame::Pong | Frame::Other)) => continue,
                Err(why) => break why,
                Ok(None) => match self.fill() {
                    Ok(0) => break "the server has ended it".to_owned(),
                    Ok(_) => {
                        (heard, asked) = (Instant::now(), false);
                        continue;
                    }
                    Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
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
            if to.send(event).is_err() {
                return;
            }
        };
        let _ = self.link.0.socket.shutdown(Shutdown::Both);
        let _ = to.send(Event::Lost(why));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let check = |text: &str, expected: &str| match Address::parse(text) {
            Ok(address) => assert_eq!(address.to_string(), expected),
            Err(error) => assert!(error.to_string().contains(expected), "{text}: {error}"),
        };
        check("nats://localhost", "nats://localhost:4222");
        check("tls://desk.lan:99/", "tls://desk.lan:99");
        check("127.0.0.1:7", "nats://127.0.0.1:7");
        check("nats://[::1]:7", "nats://[::1]:7");
        check("tls://[fe80::1]", "tls://[fe80::1]:4222");
        check("http://x", "neither nats:// nor tls://");
        check("nats://", "no host");
        check("nats://x:y", "the port is none");
        check("nats://me:secret@x", "more than a host and a port");
    }

    #[test]
    fn plain_connections_stay_on_this_machine() {
        let Err(error) = Client::connect(&Address::parse("nats://192.0.2.1").unwrap(), None, "") else {
            panic!("it is refused")
        };
        assert!(matches!(error, Error::Plain { .. }), "{error}");
    }
}
