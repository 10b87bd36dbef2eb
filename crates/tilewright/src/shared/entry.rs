//! Entries of a shared store: the winners of a workload on a target with some number of threads.

use serde::{Deserialize, Serialize};
use tilewright_ir::op::Workload;
use tilewright_tune::record::RecordLine;
use tilewright_tune::{Task, TemplateSetting};

use crate::best::known_target;

/// Maximum number of winners of an entry: of templates, and of versions of their spaces.
const MOST_WINNERS: usize = 32;

/// Key of an entry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryKey {
    /// Workload, as in records.
    pub workload: String,
    /// Target and state of the caches, as in records.
    pub target: String,
    /// Number of threads.
    pub threads: u32,
}

impl EntryKey {
    fn of(line: &RecordLine) -> EntryKey {
        let record = &line.record;
        EntryKey { workload: record.workload.clone(), target: record.target.clone(), threads: record.threads }
    }

    /// Name of the entry in its target's folder.
    pub(super) fn name(&self) -> String {
        hash(&format!("{}\n{}\n{}", self.workload, self.target, self.threads))
    }

    /// Path of the entry in a store: the target's folder, two digits of the name, and the name.
    pub(super) fn path(&self) -> String {
        format!("{}/{}", folder_of(&self.target), place_of(&self.name()))
    }
}

/// Path of an entry in its target's folder.
pub(super) fn place_of(name: &str) -> String {
    format!("{}/{name}{ENDING}", &name[..2])
}

/// Ending of the names of entries.
pub(super) const ENDING: &str = ".jsonl";
/// Digits of a name.
const DIGITS: usize = 16;

/// Folder name of a target.
pub fn folder_of(target: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '@');
    let name: String = target.chars().map(|c| if plain(c) { c } else { '-' }).collect();
    // No name of a folder begins with a dot.
    if name.starts_with('.') { format!("-{name}") } else { name }
}

/// Whether this is the name of an entry.
pub(super) fn is_name(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Hash that is the same in all builds (FNV-1a), in hexadecimal digits.
fn hash(text: &str) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Winner of one template, in an entry.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Version of the template: a hash of its space for the workload.
    pub space: String,
    /// Record of the winner's trial and of its race.
    pub line: RecordLine,
}

/// Part of an entry's line that a record does not have.
#[derive(Deserialize)]
struct SpaceVersion {
    space: String,
}

#[derive(Serialize)]
struct Written<'a> {
    space: &'a str,
    #[serde(flatten)]
    line: &'a RecordLine,
}

impl Entry {
    /// Makes an entry of a record that won its race; `None` for any other record.
    ///
    /// # Cost
    /// The time of making the space.
    pub fn new(line: RecordLine) -> Option<Entry> {
        line.winner.as_ref()?;
        Some(Entry { space: space_of(&line), line })
    }

    /// Key of the entry that the winner belongs to.
    pub fn key(&self) -> EntryKey {
        EntryKey::of(&self.line)
    }

    /// Median of the race, in nanoseconds.
    pub fn median_ns(&self) -> f64 {
        self.line.winner.as_ref().map_or(f64::INFINITY, |winner| winner.median_ns)
    }

    /// Whether another winner is of the same template and version of its space.
    fn is_of_space_of(&self, other: &Entry) -> bool {
        self.space == other.space && self.line.record.template == other.line.record.template
    }

    fn to_text(&self) -> String {
        let written = Written { space: &self.space, line: &self.line };
        serde_json::to_string(&written).expect("invariant: a record consists of text, numbers and JSON")
    }

    fn parse(text: &[u8]) -> Result<Entry, String> {
        let line = RecordLine::parse(text)?;
        let SpaceVersion { space } =
            serde_json::from_slice(text).map_err(|_| "it names no version of its space".to_owned())?;
        if !is_name(&space) {
            return Err("the version of its space is malformed".to_owned());
        }
        match line.winner {
            Some(_) => Ok(Entry { space, line }),
            None => Err("it has no winner".to_owned()),
        }
    }
}

/// Version of a record's space: a hash of the whole description if the target is known, otherwise of the
/// names of its parameters.
fn space_of(line: &RecordLine) -> String {
    let record = &line.record;
    let task = || {
        let workload = Workload::parse(&record.workload).ok()?;
        let setting =
            TemplateSetting { workload, target: known_target(&record.target)?, n_threads: record.threads as usize };
        Task::new(setting, Some(&record.template)).ok()
    };
    hash(&match task() {
        Some(task) => task.space.describe().to_string(),
        None => {
            let names = record.config.as_object().into_iter().flat_map(|config| config.keys().map(String::as_str));
            names.collect::<Vec<_>>().join("\n")
        }
    })
}

/// Text of an entry's file.
pub(super) fn print(winners: &[Entry]) -> String {
    winners.iter().map(|winner| winner.to_text() + "\n").collect()
}

/// Parses an entry's file; `path` is its path in the store.
///
/// # Errors
/// If it is truncated, not an entry, or the entry of another path.
pub(super) fn parse(path: &str, text: &[u8]) -> Result<Vec<Entry>, String> {
    if !text.ends_with(b"\n") {
        return Err("it is cut off".to_owned());
    }
    let lines = text.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    let mut winners: Vec<Entry> = Vec::new();
    for (at, line) in lines.take(MOST_WINNERS).enumerate() {
        let winner = Entry::parse(line).map_err(|why| format!("line {}: {why}", at + 1))?;
        if winner.key().path() != path {
            return Err(format!("line {} is of another entry", at + 1));
        }
        winners.push(winner);
    }
    // Two keys may have the same hash; only the winners of the first one stay.
    let first = winners.first().map(Entry::key);
    winners.retain(|winner| Some(winner.key()) == first);
    if winners.is_empty() { Err("it is empty".to_owned()) } else { Ok(winners) }
}

/// Adds a winner to those of its entry if it is better than the one of its template and version; returns
/// whether it is.
pub(super) fn improve(winners: &mut Vec<Entry>, new: Entry) -> bool {
    match winners.iter_mut().find(|old| old.is_of_space_of(&new)) {
        Some(old) if old.median_ns() <= new.median_ns() => false,
        Some(old) => {
            *old = new;
            true
        }
        None => {
            winners.push(new);
            if winners.len() > MOST_WINNERS {
                let age = |winner: &Entry| winner.line.record.unix_time;
                let oldest = (0..winners.len()).min_by_key(|&at| age(&winners[at])).expect("there are some");
                winners.remove(oldest);
            }
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"space":"0123456789abcdef","workload":"matmul:m=8,n=8,k=8","target":"x86_64/a/512","template":"matmul","threads":1,"config":{"mr":4},"outcome":{"class":"no_error","median_ns":10.5,"min_ns":10.0,"spread":0.1,"n_samples":3,"stopped_early":false},"seconds":{"build":0.1,"run":0.2,"verify":0.3},"steps":"split i 4","search":"random","seed":7,"trial":0,"version":"0.1.0","toolchain":"LLVM 22","unix_time":1800000000,"winner":{"median_ns":9.5,"margin":0.02,"runner_up":{"mr":2},"gflops":107.8,"verified":true,"version":"0.1.0","toolchain":"LLVM 22","unix_time":1800000009}}"#;

    fn winner() -> Entry {
        Entry::parse(LINE.as_bytes()).unwrap()
    }

    #[test]
    fn what_is_printed_is_read() {
        let other = Entry { space: "fedcba9876543210".to_owned(), ..winner() };
        let winners = vec![winner(), other];
        assert_eq!(parse(&winner().key().path(), print(&winners).as_bytes()), Ok(winners));
    }

    #[test]
    fn names_are_the_same_in_every_build() {
        assert_eq!(winner().key().path(), "x86_64-a-512/24/24be3559c87725df.jsonl");
        assert_eq!(folder_of("../x86_64/a b/512@pi"), "-..-x86_64-a-b-512@pi");
    }

    /// Arbitrary bytes, and entries with bytes changed, truncated or doubled, give entries or a one-line
    /// error.
    #[test]
    fn any_text_is_an_entry_or_one_line() {
        let (path, whole) = (winner().key().path(), format!("{LINE}\n{LINE}\n").into_bytes());
        let mut state = 7u64;
        let mut random = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let n_cases = std::env::var("TILEWRIGHT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2000);
        for case in 0..n_cases {
            let mut text = whole.clone();
            for _ in 0..=random(3) {
                let at = random(text.len());
                match random(4) {
                    0 => text[at] = random(256) as u8,
                    1 => text.truncate(at + 1),
                    2 => text.extend_from_within(at..),
                    _ => drop(text.drain(at..(at + random(40)).min(text.len()))),
                }
                if text.is_empty() {
                    text.push(random(256) as u8);
                }
            }
            if case % 4 == 0 {
                text = (0..random(200)).map(|_| random(256) as u8).collect();
            }
            match parse(&path, &text) {
                Ok(winners) => assert!(winners.iter().all(|winner| winner.key().path() == path)),
                Err(why) => assert!(!why.chars().any(char::is_control), "{why:?}"),
            }
        }
    }
}
