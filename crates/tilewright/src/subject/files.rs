//! Files on which a user's program depends; records are keyed by their content, too.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tilewright_device::command::CommandOptions;
use tilewright_tune::predict::content_hash;

use crate::format::count;

/// Endings of programs that an interpreter runs.
const SCRIPTS: [&str; 18] = [
    "awk", "bash", "jar", "jl", "js", "lua", "mjs", "php", "pl", "py", "R", "r", "rb", "sh", "so", "tcl", "wasm", "zsh",
];
/// Maximum bytes of a file that are hashed; the length of a longer file is hashed as well.
const MOST_BYTES: u64 = 64 << 20;
/// Maximum number of files that [`Files::line`] names.
const MOST_NAMED: usize = 4;
/// Maximum number of files that a source may include, at any depth.
const MOST_INCLUDED: usize = 1000;

/// Files with hashes of their contents, in the order in which they are named, each once.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<(PathBuf, u64)>);

impl Files {
    /// Files that commands depend on: the programs, scripts among their words, and files that a build command
    /// names. Build products, and other files that commands read or write, are not included.
    pub fn of_commands(options: &CommandOptions) -> Files {
        let mut files = Files::default();
        for (what, template) in options.templates() {
            let words = template.constant_words();
            files.add_program(&words);
            for (at, word) in words.iter().enumerate() {
                let is_output = at > 0 && matches!(words[at - 1].as_deref(), Some("-o" | ">" | ">>"));
                for path in word.iter().filter(|_| !is_output).flat_map(|word| paths(word)) {
                    if what == "build" || is_program(path) {
                        files.add(path);
                    }
                }
            }
        }
        files
    }

    /// Adds the program that the first of some words starts, located as the system does it.
    fn add_program(&mut self, words: &[Option<String>]) {
        let Some(Some(program)) = words.first() else { return };
        if program.contains('/') {
            return self.add(Path::new(program));
        }
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| is_executable(path));
        found.iter().for_each(|path| self.add(path));
    }

    /// Adds a C-like source file, with the files that it includes in quotes.
    pub fn add_source(&mut self, path: &Path) {
        let mut left = vec![path.to_owned()];
        let mut n_read = 0;
        while let Some(path) = left.pop().filter(|_| n_read < MOST_INCLUDED) {
            n_read += 1;
            let n_before = self.0.len();
            self.add(&path);
            let Some(text) = (self.0.len() > n_before).then(|| fs::read(&path).ok()).flatten() else { continue };
            let folder = path.parent().unwrap_or(Path::new(""));
            let text = String::from_utf8_lossy(&text);
            left.extend(text.lines().filter_map(included).map(|name| folder.join(name)));
        }
    }

    /// Adds a file, if it exists.
    pub fn add(&mut self, path: &Path) {
        let Ok(path) = path.canonicalize() else { return };
        if path.is_file()
            && !self.0.iter().any(|(known, _)| *known == path)
            && let Some(hash) = hash_of(&path)
        {
            self.0.push((path, hash));
        }
    }

    /// Hashes of the files' contents, independent of their names.
    pub fn hashes(&self) -> Vec<u64> {
        self.0.iter().map(|(_, hash)| *hash).collect()
    }

    /// Names of the files, in one line.
    pub fn line(&self) -> String {
        if self.0.is_empty() {
            return "records are of these texts".to_owned();
        }
        let here = std::env::current_dir().and_then(|here| here.canonicalize()).unwrap_or_default();
        let name = |(path, _): &(PathBuf, u64)| path.strip_prefix(&here).unwrap_or(path).display().to_string();
        let mut names: Vec<String> = self.0.iter().take(MOST_NAMED).map(name).collect();
        if let Some(n_more @ 1..) = self.0.len().checked_sub(MOST_NAMED) {
            names.push(count(n_more as u64, "file") + " more");
        }
        let names = names.join(", ");
        format!("records are of these texts and of what is in {names}")
    }
}

/// Paths that a word may name: the word itself, and the text after `=` or `@` in it.
fn paths(word: &str) -> impl Iterator<Item = &Path> {
    let value = word.split_once(['=', '@']).map(|(_, value)| value);
    std::iter::once(word).chain(value).filter(|word| !word.is_empty()).map(Path::new)
}

/// File that a line includes in quotes.
fn included(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
    rest.trim_start().strip_prefix('"')?.split('"').next()
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Whether a file is executable, rather than data that a program reads or writes.
fn is_program(path: &Path) -> bool {
    let is_script = path.extension().is_some_and(|ending| SCRIPTS.iter().any(|known| ending == *known));
    is_executable(path) || path.is_file() && (is_script || begins_as_script(path))
}

fn begins_as_script(path: &Path) -> bool {
    let mut start = [0; 2];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok_and(|()| start == *b"#!")
}

fn hash_of(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    let n_bytes = file.metadata().ok()?.len();
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    if n_bytes > MOST_BYTES {
        bytes.extend(n_bytes.to_le_bytes());
    }
    Some(content_hash(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_what_it_includes_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, text: &str| fs::write(path(name), text).unwrap();
        write("k.c", "#include <stdio.h>\n # include \"a.h\"\n#include \"none.h\"\nint x;\n");
        write("a.h", "#include \"b.h\"\n#include \"a.h\"\n");
        write("b.h", "#include \"k.c\"\n");
        let hashes = || {
            let mut files = Files::default();
            files.add_source(&path("k.c"));
            files.hashes()
        };
        let before = hashes();
        assert_eq!((before.len(), hashes()), (3, before.clone()));
        write("b.h", "#define B 2\n");
        assert_ne!(hashes(), before);
    }
}
