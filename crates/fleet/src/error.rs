//! Errors between machines.

use std::io;

/// Reason why a fleet cannot do something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid address of a server.
    #[error(
        "`{given}` is no address of a NATS server: {why} (give nats://127.0.0.1:4222, or tls://HOST:4222; commas between several)"
    )]
    Address {
        /// Text that was given.
        given: String,
        /// Reason.
        why: &'static str,
    },
    /// A failed connection.
    #[error("the NATS server {address} cannot be reached: {source} (start nats-server, or give another address)")]
    Unreachable {
        /// Address of the server.
        address: String,
        /// Reason.
        source: io::Error,
    },
    /// An answer that is not a NATS server's.
    #[error("what answers at {address} is no NATS server (give the address of one)")]
    NoServer {
        /// Address of the server.
        address: String,
    },
    /// An unencrypted connection to another machine.
    #[error(
        "{address} is another machine, and the connection is not encrypted (make keys by `tilewright fleet keys`, and give tls://… with --key)"
    )]
    Plain {
        /// Address of the server.
        address: String,
    },
    /// The server wants encryption.
    #[error("the NATS server {address} takes encrypted connections only (give tls://… with --key)")]
    TlsRequired {
        /// Address of the server.
        address: String,
    },
    /// The server has no encryption.
    #[error(
        "the NATS server at {address} does not encrypt (start it with the configuration of `tilewright fleet keys`)"
    )]
    NoTls {
        /// Address of the server.
        address: String,
    },
    /// The encryption failed.
    #[error("no encrypted connection to {address}: {why}{}", clock(.why))]
    Tls {
        /// Address of the server.
        address: String,
        /// Reason.
        why: String,
    },
    /// The server does not take us.
    #[error("the NATS server {address} refuses: {why} (give a key that it knows with --key)")]
    Refused {
        /// Address of the server.
        address: String,
        /// Reason, in the server's words.
        why: String,
    },
    /// The key does not allow something.
    #[error("the key does not allow that: {why}")]
    Denied {
        /// Reason, in the server's words.
        why: String,
    },
    /// The server takes no message of this size.
    #[error("a message of {n_bytes} bytes, and the NATS server takes {most} at most (raise its max_payload)")]
    TooLarge {
        /// Bytes of the message.
        n_bytes: usize,
        /// Most bytes that the server takes.
        most: usize,
    },
    /// The connection has ended.
    #[error("the connection has ended: {why}")]
    Lost {
        /// Reason.
        why: String,
    },
    /// An invalid key file.
    #[error("{name}: {why} (give a file that `tilewright fleet keys` made)")]
    Key {
        /// The file.
        name: String,
        /// Reason.
        why: String,
    },
    /// The server has no streams, or refuses one.
    #[error("the NATS server keeps no messages: {why} (start it with -js)")]
    NoStreams {
        /// Reason.
        why: String,
    },
    /// An invalid name.
    #[error("`{given}` is no name of a {what} (give up to 40 small letters, digits, `-` and `_`, and not `any`)")]
    Name {
        /// Text that was given.
        given: String,
        /// Kind of thing that is named.
        what: &'static str,
    },
    /// A class without devices.
    #[error(
        "no device of class `{class}` is there{others} (start one: tilewright serve --fleet {address} --class {class})"
    )]
    Nobody {
        /// The class.
        class: String,
        /// Address of the server.
        address: String,
        /// Other devices or classes.
        others: String,
    },
    /// An answer that is not understood.
    #[error("{0}")]
    Odd(String),
}

/// Advice on a certificate that is not valid yet, or no longer.
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
