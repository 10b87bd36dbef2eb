//! Addresses of servers.

use std::fmt;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};

use super::TIMEOUT;
use crate::error::Error;

/// Default port.
const PORT: u16 = 4222;

/// Address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    pub(super) host: String,
    port: u16,
    pub(super) is_tls: bool,
}

impl ServerAddress {
    fn parse(text: &str) -> Result<ServerAddress, Error> {
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
        // An IPv6 address in brackets contains colons.
        let (host, port) = match rest.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| refuse("the port is not a number up to 65535"))?)
            }
            _ => (rest, PORT),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(refuse("there is no host"));
        }
        Ok(ServerAddress { host: host.to_owned(), port, is_tls })
    }

    /// Opens a TCP connection, before any handshake.
    ///
    /// # Errors
    /// If the connection fails, or others could read it.
    pub(super) fn connect(&self) -> Result<TcpStream, Error> {
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

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "tls" } else { "nats" };
        let (before, after) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{scheme}://{before}{}{after}:{}", self.host, self.port)
    }
}

/// Servers in the order in which they are tried; any of them suffices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Servers(pub(super) Vec<ServerAddress>);

impl Servers {
    /// Parses `nats://HOST:PORT`, or `tls://HOST:PORT` for an encrypted connection, or several separated by
    /// commas.
    ///
    /// # Errors
    /// [`Error::Address`] if the text is not an address.
    pub fn parse(text: &str) -> Result<Servers, Error> {
        text.split(',').map(ServerAddress::parse).collect::<Result<_, _>>().map(Servers)
    }
}

impl fmt::Display for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(ServerAddress::to_string).collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let check = |text: &str, expected: &str| match Servers::parse(text) {
            Ok(servers) => assert_eq!(servers.to_string(), expected),
            Err(error) => assert!(error.to_string().contains(expected), "{text}: {error}"),
        };
        check("nats://localhost", "nats://localhost:4222");
        check("tls://desk.lan:99/", "tls://desk.lan:99");
        check("127.0.0.1:7", "nats://127.0.0.1:7");
        check("nats://[::1]:7", "nats://[::1]:7");
        check("tls://[fe80::1]", "tls://[fe80::1]:4222");
        check("tls://a,tls://b:7", "tls://a:4222,tls://b:7");
        check("http://x", "neither nats:// nor tls://");
        check("nats://", "no host");
        check("nats://a,", "no host");
        check("nats://x:y", "the port is not a number up to 65535");
        check("nats://me:secret@x", "more than a host and a port");
    }
}
