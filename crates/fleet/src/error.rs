//! What goes wrong between machines.

use std::io;

/// Why something of a fleet cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was given is no address of a server.
    #[error(
        "`{given}` is no address of a NATS server: {why} (give nats://127.0.0.1:4222, or tls://HOST:4222; commas between several)"
    )]
    Address {
        /// What was given.
        given: String,
        /// Why.
        why: &'static str,
    },
    /// There is no connection.
    #[error("the NATS server {address} cannot be reached: {source} (start nats-server, or give another address)")]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// What answers is something else.
    #[error("what answers at {address} is no NATS server (give the address of one)")]
    NoServer {
        /// Where.
        address: String,
    },
    /// It would be read by others.
    #[error(
        "{address} is another machine, and the connection is not encrypted (make keys by `tilewright fleet keys`, and give tls://… with --key)"
    )]
    Plain {
        /// Where.
        address: String,
    },
    /// The server wants encryption.
    #[error("the NATS server {address} takes encrypted connections only (give tls://… with --key)")]
    TlsRequired {
        /// Where.
        address: String,
    },
    /// The server has no encryption.
    #[error(
        "the NATS server at {address} does not encrypt (start it with the configuration of `tilewright fleet keys`)"
    )]
    NoTls {
        /// Where.
        address: String,
    },
    /// The encryption failed.
    #[error("no encrypted connection to {address}: {why}{}", clock(.why))]
    Tls {
        /// Where.
        address: String,
        /// Why.
        why: String,
    },
    /// The server does not take us.
    #[error("the NATS server {address} refuses: {why} (give a key that it knows with --key)")]
    Refused {
        /// Where.
        address: String,
        /// In the server's words.
        why: String,
    },
    /// The key does not allow something.
    #[error("the key does not allow that: {why}")]
    Denied {
        /// In the server's words.
        why: String,
    },
    /// The server takes no message of this size.
    #[error("a message of {n_bytes} bytes, and the NATS server takes {most} at most (raise its max_payload)")]
    TooLarge {
        /// What it has.
        n_bytes: usize,
        /// What it may have.
        most: usize,
    },
    /// The connection has ended.
    #[error("the connection has ended: {why}")]
    Lost {
        /// Why.
        why: String,
    },
    /// A key file is none.
    #[error("{name}: {why} (give a file that `tilewright fleet keys` made)")]
    Key {
        /// The file.
        name: String,
        /// Why.
        why: String,
    },
    /// The server has no streams, or refuses one.
    #[error("the NATS server keeps no messages: {why} (start it with -js)")]
    NoStreams {
        /// Why.
        why: String,
    },
    /// A name is none.
    #[error("`{given}` is no name of a {what} (give up to 40 small letters, digits, `-` and `_`, and not `any`)")]
    Name {
        /// What was given.
        given: String,
        /// Of what.
        what: &'static str,
    },
    /// There is nobody.
    #[error(
        "no device of class `{class}` is there{others} (start one: tilewright serve --fleet {address} --class {class})"
    )]
    Nobody {
        /// The class.
        class: String,
        /// Where.
        address: String,
        /// What else there is.
        others: String,
    },
    /// What was said is not understood.
    #[error("{0}")]
    Odd(String),
}

/// What may mend a certificate that is not valid yet.
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
