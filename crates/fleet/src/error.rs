//! Errors of a fleet.

use std::io;

/// Reason why a fleet operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid address of a server.
    #[error(
        "`{given}` is no address of a NATS server: {why} (give nats://127.0.0.1:4222, or tls://HOST:4222; commas between several)"
    )]
    Address {
        /// Text that was given.
        given: String,
        /// Reason.
        why: &'static str,
    },
    /// Failed connection.
    #[error("the NATS server {address} cannot be reached: {source} (start nats-server, or give another address)")]
    Unreachable {
        /// Address of the server.
        address: String,
        /// Reason.
        source: io::Error,
    },
    /// Reply that is not a NATS server's.
    #[error("the server at {address} is not a NATS server (give the address of one)")]
    NoServer {
        /// Address of the server.
        address: String,
    },
    /// Unencrypted connection to another machine, which is not allowed.
    #[error(
        "{address} is another machine, and the connection is not encrypted (make keys by `tilewright fleet keys`, and give tls://… with --key)"
    )]
    Plain {
        /// Address of the server.
        address: String,
    },
    /// Server that requires encryption, addressed without it.
    #[error("the NATS server {address} takes encrypted connections only (give tls://… with --key)")]
    TlsRequired {
        /// Address of the server.
        address: String,
    },
    /// Server without encryption, although the address requires it.
    #[error(
        "the NATS server at {address} does not encrypt (start it with the configuration of `tilewright fleet keys`)"
    )]
    NoTls {
        /// Address of the server.
        address: String,
    },
    /// Failed TLS handshake.
    #[error("no encrypted connection to {address}: {why}{}", clock(.why))]
    Tls {
        /// Address of the server.
        address: String,
        /// Reason.
        why: String,
    },
    /// Failed authentication.
    #[error("the NATS server {address} refuses: {why} (give a key that it knows with --key)")]
    Refused {
        /// Address of the server.
        address: String,
        /// Message of the server.
        why: String,
    },
    /// Operation that the key's permissions do not allow.
    #[error("the key does not allow that: {why}")]
    Denied {
        /// Message of the server.
        why: String,
    },
    /// Message beyond the server's size limit.
    #[error("a message of {n_bytes} bytes, and the NATS server takes {most} at most (raise its max_payload)")]
    TooLarge {
        /// Size of the message in bytes.
        n_bytes: usize,
        /// Limit in bytes.
        most: usize,
    },
    /// Lost connection.
    #[error("the connection has ended: {why}")]
    Lost {
        /// Reason.
        why: String,
    },
    /// Invalid key file.
    #[error("{name}: {why} (give a file that `tilewright fleet keys` made)")]
    Key {
        /// Name of the file.
        name: String,
        /// Reason.
        why: String,
    },
    /// Server without JetStream, or one that cannot create a stream.
    #[error("the NATS server keeps no messages: {why} (start it with -js)")]
    NoStreams {
        /// Reason.
        why: String,
    },
    /// Invalid name.
    #[error("`{given}` is not a name of a {what} (give up to 40 small letters, digits, `-` and `_`, and not `any`)")]
    Name {
        /// Text that was given.
        given: String,
        /// Kind of name.
        what: &'static str,
    },
    /// Invalid name of a server's host.
    #[error(
        "`{0}` is neither a host's name nor an address (give it as in lab.example.com or 10.0.0.7, without a port)"
    )]
    Host(String),
    /// Class without online devices.
    #[error(
        "no device of class `{class}` is there{others} (start one: tilewright serve --fleet {address} --class {class})"
    )]
    Nobody {
        /// Name of the class.
        class: String,
        /// Address of the server.
        address: String,
        /// Other devices or classes that are online.
        others: String,
    },
    /// Malformed reply.
    #[error("{0}")]
    Odd(String),
}

/// Hint for a certificate that is not valid yet, or has expired.
fn clock(why: &str) -> &'static str {
    if why.contains("NotValidYet") || why.contains("Expired") { "; this machine's clock is wrong: set it" } else { "" }
}

impl From<Error> for tilewright::Error {
    fn from(error: Error) -> tilewright::Error {
        match error {
            Error::Lost { .. } | Error::Unreachable { .. } | Error::Nobody { .. } => tilewright::Error::failed(error),
            error => tilewright::Error::input(error),
        }
    }
}
