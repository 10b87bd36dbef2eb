//! NATS wire format: lines, some of them followed by a payload.

use serde::Deserialize;

use super::ReceivedMessage;

/// Maximum length of a line; the longest valid lines are a server's facts about a large cluster.
const MOST_LINE: usize = 1 << 20;
/// Maximum size of a message.
const MOST_BYTES: usize = 64 << 20;
/// Capacity of the buffer that is retained.
const ROOM: usize = 256 << 10;

/// `INFO`: facts about a server, sent at the beginning and when they change.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServerInfo {
    /// Nonce to be signed by the client.
    #[serde(default)]
    pub nonce: Option<String>,
    /// Whether connections must be encrypted.
    #[serde(default)]
    pub tls_required: bool,
    /// Whether connections may be encrypted.
    #[serde(default)]
    pub tls_available: bool,
    /// Maximum payload in bytes.
    #[serde(default = "usual_payload")]
    pub max_payload: usize,
    /// Whether the server is shutting down and wants its clients to reconnect elsewhere (lame duck mode).
    #[serde(default)]
    pub ldm: bool,
}

/// Default maximum payload, for servers that do not state theirs.
fn usual_payload() -> usize {
    1 << 20
}

/// Frame sent by a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message(ReceivedMessage),
    /// Error message of the server.
    Refused(String),
    /// Facts about the server.
    Info(ServerInfo),
    /// Ping.
    Ping,
    /// Pong.
    Pong,
    /// Acknowledgement.
    Ok,
}

/// Parser of received bytes.
#[derive(Debug, Default)]
pub struct WireParser {
    bytes: Vec<u8>,
    /// Offset of the first byte that has not been parsed.
    at: usize,
    /// Offset up to which the buffer was searched for a line end.
    looked: usize,
}

impl WireParser {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether all received bytes have been parsed.
    pub fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// Takes the next frame, if it is complete.
    ///
    /// # Errors
    /// If the bytes are not a frame; the connection is then unusable.
    pub fn frame(&mut self) -> Result<Option<Frame>, String> {
        let Some((frame, end)) = self.look()? else {
            self.bytes.drain(..self.at);
            (self.looked, self.at) = (self.looked.saturating_sub(self.at), 0);
            if self.bytes.len() < ROOM {
                self.bytes.shrink_to(ROOM);
            }
            return Ok(None);
        };
        (self.at, self.looked) = (end, end);
        Ok(Some(frame))
    }

    /// Parses the next frame; returns it with its end.
    fn look(&mut self) -> Result<Option<(Frame, usize)>, String> {
        let from = self.looked.max(self.at);
        let Some(end) = self.bytes[from..].windows(2).position(|two| two == b"\r\n").map(|at| from + at) else {
            // The last byte may be the first one of the line end.
            self.looked = self.bytes.len().saturating_sub(1).max(self.at);
            if self.bytes.len() - self.at > MOST_LINE {
                return Err(odd(&self.bytes[self.at..]));
            }
            return Ok(None);
        };
        let line = &self.bytes[self.at..end];
        let odd = || odd(line);
        if line.len() > MOST_LINE {
            return Err(odd());
        }
        self.looked = end;
        let text = std::str::from_utf8(line).map_err(|_| odd())?;
        let (word, rest) = text.split_once([' ', '\t']).unwrap_or((text, ""));
        let rest = rest.trim();
        let frame = match word.to_ascii_uppercase().as_str() {
            kind @ ("MSG" | "HMSG") => return message(kind == "HMSG", rest, &self.bytes, end + 2).map_err(|()| odd()),
            "PING" => Frame::Ping,
            "PONG" => Frame::Pong,
            "+OK" => Frame::Ok,
            "-ERR" => Frame::Refused(rest.trim_matches('\'').to_owned()),
            "INFO" => Frame::Info(serde_json::from_str(rest).map_err(|_| odd())?),
            _ => return Err(odd()),
        };
        Ok(Some((frame, end + 2)))
    }
}

/// Error text for a malformed line.
fn odd(line: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(&line[..line.len().min(80)]).escape_debug().collect();
    format!("what a server does not say: {text}")
}

/// Parses a message from the arguments of its line, with the payload from offset `from` on; returns it with
/// its end, or `None` if it is incomplete.
fn message(has_head: bool, said: &str, bytes: &[u8], from: usize) -> Result<Option<(Frame, usize)>, ()> {
    let words: Vec<&str> = said.split_ascii_whitespace().collect();
    let n_sizes = if has_head { 2 } else { 1 };
    let (names, sizes) = words.split_at(words.len().checked_sub(n_sizes).ok_or(())?);
    let sizes = sizes.iter().map(|size| size.parse().ok().filter(|n: &usize| *n <= MOST_BYTES).ok_or(()));
    let sizes = sizes.collect::<Result<Vec<usize>, ()>>()?;
    let (n_head, total) = if has_head { (sizes[0], sizes[1]) } else { (0, sizes[0]) };
    let (subject, reply) = match names {
        [subject, _] => (*subject, None),
        [subject, _, reply] => (*subject, Some((*reply).to_owned())),
        _ => return Err(()),
    };
    if n_head > total {
        return Err(());
    }
    let Some(body) = bytes.get(from..from + total + 2) else { return Ok(None) };
    if &body[total..] != b"\r\n" {
        return Err(());
    }
    let head = String::from_utf8_lossy(&body[..n_head]);
    let status = head.lines().next().and_then(|first| first.split_ascii_whitespace().nth(1)?.parse().ok());
    let payload = body[n_head..total].to_vec();
    Ok(Some((
        Frame::Message(ReceivedMessage { subject: subject.to_owned(), reply, status, payload }),
        from + total + 2,
    )))
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    /// Parses bytes that arrive in parts; returns all frames, and the error that ended them, if any.
    fn frames<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Option<String>) {
        let (mut parser, mut found) = (WireParser::default(), Vec::new());
        for part in parts {
            parser.push(part);
            loop {
                match parser.frame() {
                    Ok(Some(frame)) => found.push(frame),
                    Ok(None) => break,
                    Err(why) => return (found, Some(why)),
                }
            }
            assert!(parser.bytes.capacity() <= 2 * ROOM, "what is understood is forgotten");
        }
        (found, None)
    }

    fn message(subject: &str, reply: Option<&str>, status: Option<u16>, payload: &[u8]) -> Frame {
        let (subject, reply) = (subject.to_owned(), reply.map(str::to_owned));
        Frame::Message(ReceivedMessage { subject, reply, status, payload: payload.to_vec() })
    }

    #[test]
    fn what_a_server_says_is_understood() {
        let said = b"INFO {\"nonce\":\"n\",\"max_payload\":7,\"ldm\":true,\"more\":[1]} \r\nPING\r\n+OK\r\nPONG\r\n\
            MSG a.b 1 3\r\n\r\n!\r\nmsg\ta 2  in.1 0\r\n\r\n\
            HMSG a 1 r 12 14\r\nNATS/1.0\r\n\r\nhi\r\nHMSG a 1 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n\
            -ERR 'Permissions Violation for Publish to \"x\"'\r\n";
        let info = ServerInfo {
            nonce: Some("n".into()),
            tls_required: false,
            tls_available: false,
            max_payload: 7,
            ldm: true,
        };
        let expected = [
            Frame::Info(info),
            Frame::Ping,
            Frame::Ok,
            Frame::Pong,
            message("a.b", None, None, b"\r\n!"),
            message("a", Some("in.1"), None, b""),
            message("a", Some("r"), None, b"hi"),
            message("a", None, Some(503), b""),
            Frame::Refused("Permissions Violation for Publish to \"x\"".into()),
        ];
        assert_eq!(frames([&said[..]].into_iter()), (expected.to_vec(), None));
        assert_eq!(frames(said.chunks(1)), (expected.to_vec(), None));
    }

    #[test]
    fn what_no_server_says_ends_a_connection() {
        for said in [
            "HELLO\r\n",
            "INFO x\r\n",
            "MSG a\r\n",
            "MSG a 1 x\r\n",
            "MSG a 1 -1\r\n",
            "MSG a 1 99999999999999999999\r\n",
            "MSG a 1 100000000\r\n",
            "MSG a b c d 1\r\n",
            "MSG a 1 2\r\nxyz\r\n",
            "HMSG a 1 5 4\r\n",
            "HMSG 5 4\r\n",
            "\u{e9}\r\n",
        ] {
            let (found, why) = frames([said.as_bytes()].into_iter());
            assert!(found.is_empty() && why.is_some_and(|why| why.starts_with("what a server")), "{said:?}");
        }
        let mut parser = WireParser::default();
        let mut n_bytes = 0;
        while parser.frame().is_ok() {
            parser.push(&[b'x'; 1000]);
            n_bytes += 1000;
        }
        assert!((MOST_LINE..MOST_LINE + 2000).contains(&n_bytes), "a line without an end: {n_bytes}");
    }

    /// Pieces of a server's messages.
    const PIECES: [&str; 20] = [
        "MSG ",
        "HMSG ",
        "PING",
        "-ERR '",
        "INFO {",
        "}",
        "\r\n",
        "\r\n",
        "\r",
        " ",
        "a.b",
        "_INBOX.x",
        "NATS/1.0 404\r\n\r\n",
        "\"max_payload\":",
        "PING\r\n",
        "+OK\r\n",
        "INFO {\"ldm\":true}\r\n",
        "MSG a 1 2\r\nhi\r\n",
        "MSG a 1 r 0\r\n\r\n",
        "HMSG a 1 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
    ];

    fn random_bytes(rng: &mut Xoshiro256PlusPlus) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..rng.random_range(0..24) {
            match rng.random_range(0..5) {
                0 => bytes.extend((0..rng.random_range(0..12)).map(|_| rng.random::<u8>())),
                1 => bytes.extend(rng.random_range(0..40).to_string().bytes()),
                2 => bytes.extend((rng.random::<u64>() >> rng.random_range(0..64)).to_string().bytes()),
                _ => bytes.extend(PIECES[rng.random_range(0..PIECES.len())].bytes()),
            }
        }
        bytes
    }

    /// Set `TILEWRIGHT_CASES=1000000` for a long run.
    #[test]
    fn any_bytes_are_frames_or_the_end() {
        let n_cases = std::env::var("TILEWRIGHT_CASES").map_or(20_000, |n| n.parse().expect("a number of cases"));
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
        let (mut n_frames, mut n_ends) = (0, 0);
        for _ in 0..n_cases {
            let bytes = random_bytes(&mut rng);
            let at_once = frames([&bytes[..]].into_iter());
            // The division into packets must not matter.
            let n = rng.random_range(1..20);
            assert_eq!(frames(bytes.chunks(n)), at_once, "{n}: {bytes:?}");
            n_frames += at_once.0.len();
            n_ends += usize::from(at_once.1.is_some());
        }
        println!("{n_cases} byte strings: {n_frames} frames, {n_ends} ends");
        assert!(n_frames > n_cases / 100 && n_ends > n_cases / 10);
    }
}
