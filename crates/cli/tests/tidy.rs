//! Rules about the repository that the compiler does not check: dependencies between crates, use of the
//! system, links, widths, beginnings of docs.

use std::fs;
use std::path::{Path, PathBuf};

/// Every crate by its folder, with the crates of this workspace that it depends on.
const EDGES: &[(&str, &[&str])] = &[
    ("ir", &[]),
    ("codegen", &["ir"]),
    ("graph", &[]),
    ("learn", &[]),
    ("search", &["learn"]),
    ("tune", &["ir", "learn", "search"]),
    ("formats", &["search", "tune"]),
    ("runtime", &["ir", "codegen"]),
    ("ship", &["ir", "codegen", "runtime"]),
    ("device", &["ir", "codegen", "search", "tune", "runtime"]),
    ("peers", &["ir", "graph", "search", "device", "runtime"]),
    ("tilewright", &["ir", "codegen", "search", "tune", "formats", "device", "runtime", "ship", "peers"]),
    ("model", &["ir", "codegen", "graph", "search", "tune", "device", "runtime", "peers", "tilewright"]),
    (
        "lab",
        &["ir", "learn", "search", "tune", "formats", "device", "runtime", "graph", "peers", "model", "tilewright"],
    ),
    ("fleet", &["ir", "search", "tune", "device", "tilewright"]),
    (
        "cli",
        &[
            "fleet",
            "ir",
            "codegen",
            "graph",
            "learn",
            "search",
            "tune",
            "formats",
            "device",
            "runtime",
            "tilewright",
            "peers",
            "model",
            "lab",
        ],
    ),
    ("ort", &["ir", "codegen", "graph", "runtime", "tilewright", "model"]),
    ("python", &["ir", "search", "formats", "device", "runtime", "graph", "tilewright", "model", "cli"]),
];

/// Crates that may name LLVM's crates in their manifests.
const WITH_LLVM: &[&str] = &["codegen"];

/// Folders in which `unsafe` is allowed: generated code, devices, and C interfaces of others.
const WITH_UNSAFE: &[&str] = &["crates/codegen/", "crates/device/", "crates/ort/", "crates/runtime/", "crates/peers/"];

/// Folders whose code may open files, start processes and read the environment.
const WITH_SYSTEM: &[&str] =
    &["crates/device/", "crates/tilewright/", "crates/peers/", "crates/lab/", "crates/fleet/", "crates/cli/"];

/// Only file that writes files: it writes them completely or not at all, and replaces nothing but files.
const WITH_WRITING: &str = "crates/tilewright/src/file.rs";

/// File in which a worker writes to one of the system's own files, which no user can lose.
const OF_THE_SYSTEM: &str = "crates/device/src/worker.rs";

/// Calls that write, replace or create files.
const WRITING: &[&str] = &["fs::write", "fs::rename", "fs::copy", "File::create", "File::options", "OpenOptions"];

/// Maximum number of columns of a line of Markdown or of a comment.
const MOST_COLUMNS: usize = 110;

/// Beginnings of docs, public or not, that do not name the thing: rustdoc shows each doc separately.
const NAMELESS: &[&str] = &[
    "What", "Where", "Which", "Who", "Whose", "Whom", "It", "Its", "That", "Those", "They", "Them", "One", "The same",
    "So many", "So much", "So long", "…",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Paths in a folder, sorted.
fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    paths
}

/// Files below a folder with this ending.
fn files_below(folder: &Path, ending: &str) -> Vec<PathBuf> {
    list(folder).into_iter().fold(Vec::new(), |mut found, path| {
        if path.is_dir() {
            found.extend(files_below(&path, ending));
        } else if path.extension().is_some_and(|e| e == ending) {
            found.push(path);
        }
        found
    })
}

/// Path from the root, with slashes.
fn name_of(path: &Path) -> String {
    let relative = path.strip_prefix(root()).unwrap_or(path);
    relative.components().map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

/// Folders of the crates, by name.
fn crates() -> Vec<(String, PathBuf)> {
    let folders = list(&root().join("crates")).into_iter().filter(|p| p.join("Cargo.toml").is_file());
    folders.map(|p| (p.file_name().expect("a folder has a name").to_string_lossy().into_owned(), p)).collect()
}

/// Packages that a manifest depends on, in any section.
fn dependencies(manifest: &str) -> Vec<String> {
    let (mut found, mut inside) = (Vec::new(), false);
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            inside = section.ends_with("dependencies");
            // `[dependencies.name]`
            found.extend(section.split_once("dependencies.").map(|(_, name)| name.to_owned()));
        } else if inside && !line.starts_with('#') {
            let name = line.split(['.', '=', ' ']).next().unwrap_or("");
            found.extend((!name.is_empty()).then(|| name.to_owned()));
        }
    }
    found
}

/// Line numbers and lines of Rust source, without comments, strings and a module of tests at the end.
fn code_lines(source: &str) -> Vec<(usize, String)> {
    let before_tests = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or(source);
    let lines = before_tests.lines().enumerate().map(|(at, line)| {
        let mut code = String::new();
        let (mut quoted, mut escaped) = (false, false);
        for (i, c) in line.char_indices() {
            match c {
                '"' if !escaped => quoted = !quoted,
                '/' if !quoted && line[i..].starts_with("//") => break,
                _ if !quoted => code.push(c),
                _ => {}
            }
            escaped = c == '\\' && !escaped;
        }
        (at + 1, code)
    });
    lines.collect()
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == word)
}

/// Line numbers and first lines of doc comments, without the marks.
fn docs(source: &str) -> Vec<(usize, &str)> {
    let parts = |line| ["///", "//!"].into_iter().find_map(|mark| Some((mark, str::strip_prefix(line, mark)?)));
    let mut before = None;
    let lines = source.lines().enumerate().filter_map(|(at, line)| {
        let doc = parts(line.trim_start()).filter(|(_, text)| !text.starts_with('/'));
        let is_first = doc.map(|(mark, _)| mark) != std::mem::replace(&mut before, doc.map(|(mark, _)| mark));
        doc.filter(|_| is_first).map(|(_, text)| (at + 1, text.trim()))
    });
    lines.collect()
}

/// Whether a doc begins with one of [`NAMELESS`].
fn is_nameless(doc: &str) -> bool {
    let goes_on = |rest: &str| rest.starts_with(|c: char| c.is_alphanumeric() || c == '-');
    NAMELESS.iter().any(|beginning| doc.strip_prefix(beginning).is_some_and(|rest| !goes_on(rest)))
}

#[track_caller]
fn assert_none(offences: &[String]) {
    assert!(offences.is_empty(), "{}\nrepro: cargo test -p tilewright-cli --test tidy", offences.join("\n"));
}

/// Package in the folder of this name.
fn package(folder: &str) -> String {
    if folder == "tilewright" { folder.to_owned() } else { format!("tilewright-{folder}") }
}

#[test]
fn crates_depend_on_what_the_table_says() {
    let mut offences = Vec::new();
    for (name, folder) in crates() {
        let Some((_, allowed)) = EDGES.iter().find(|(n, _)| *n == name) else {
            offences.push(format!("crates/{name} has no row in the table of edges"));
            continue;
        };
        let dependencies = dependencies(&read(&folder.join("Cargo.toml")));
        for unused in allowed.iter().filter(|allowed| !dependencies.iter().any(|d| package(allowed) == *d)) {
            offences.push(format!("the table of edges lets {name} depend on {unused}, which it does not"));
        }
        for dependency in dependencies {
            let ours = dependency.strip_prefix("tilewright-").or((dependency == "tilewright").then_some("tilewright"));
            if let Some(ours) = ours
                && !allowed.contains(&ours)
            {
                offences.push(format!("crates/{name}/Cargo.toml: {name} must not depend on {ours}"));
            }
            if (dependency.starts_with("llvm") || dependency == "inkwell") && !WITH_LLVM.contains(&name.as_str()) {
                offences.push(format!("crates/{name}/Cargo.toml: only codegen links LLVM, not {name} ({dependency})"));
            }
        }
    }
    assert_none(&offences);
}

#[test]
fn unsafe_stands_where_it_may() {
    let mut offences = Vec::new();
    for path in files_below(&root().join("crates"), "rs") {
        let name = name_of(&path);
        if WITH_UNSAFE.iter().any(|allowed| name.starts_with(allowed)) {
            continue;
        }
        for (at, line) in code_lines(&read(&path)).iter().filter(|(_, line)| has_word(line, "unsafe")) {
            offences.push(format!("{name}:{at}: `unsafe` outside {}: {}", WITH_UNSAFE.join(", "), line.trim()));
        }
    }
    assert_none(&offences);
}

#[test]
fn the_system_is_used_where_it_may() {
    let mut offences = Vec::new();
    for (crate_name, folder) in crates() {
        if WITH_SYSTEM.contains(&format!("crates/{crate_name}/").as_str()) {
            continue;
        }
        let sources = files_below(&folder.join("src"), "rs");
        for path in sources {
            for (at, line) in code_lines(&read(&path)) {
                // Constants such as the architecture do not read the environment.
                let line = line.replace("std::env::consts", "");
                let named = ["fs", "process", "env"]
                    .into_iter()
                    .find(|m| line.contains(&format!("std::{m}")) || line.contains("std::{") && has_word(&line, m));
                if let Some(module) = named {
                    offences.push(format!("{}:{at}: {crate_name} must not use std::{module}", name_of(&path)));
                }
            }
        }
    }
    assert_none(&offences);
}

#[test]
fn files_are_written_the_one_way() {
    let mut offences = Vec::new();
    let sources = crates().into_iter().flat_map(|(_, folder)| files_below(&folder.join("src"), "rs"));
    for path in sources.filter(|path| ![WITH_WRITING, OF_THE_SYSTEM].contains(&name_of(path).as_str())) {
        for (at, line) in code_lines(&read(&path)) {
            if let Some(call) = WRITING.iter().find(|call| line.contains(*call)) {
                offences.push(format!("{}:{at}: {call} outside {WITH_WRITING} (use write_whole)", name_of(&path)));
            }
        }
    }
    let own = code_lines(&read(&root().join(WITH_WRITING)));
    assert!(own.iter().any(|(_, line)| line.contains(WRITING[5])), "{WITH_WRITING} writes files");
    assert_none(&offences);
}

#[test]
fn docs_begin_with_the_thing_that_they_name() {
    let mut offences = Vec::new();
    for path in crates().iter().flat_map(|(_, folder)| files_below(folder, "rs")) {
        let source = read(&path);
        let found = docs(&source).into_iter().filter(|(_, doc)| is_nameless(doc));
        offences.extend(found.map(|(at, doc)| format!("{}:{at} begins with no noun or verb: {doc}", name_of(&path))));
    }
    assert_none(&offences);
}

/// Pages in the root and below `docs`.
fn pages() -> Vec<PathBuf> {
    let in_root = list(&root()).into_iter().filter(|p| p.extension().is_some_and(|e| e == "md"));
    in_root.chain(files_below(&root().join("docs"), "md")).collect()
}

#[test]
fn lines_of_prose_are_narrow() {
    let pages = pages().into_iter().filter(|page| !name_of(page).starts_with("docs/results/"));
    let mut offences = Vec::new();
    for path in pages.chain(files_below(&root().join("crates"), "rs")) {
        let name = name_of(&path);
        let is_prose = |line: &str| name.ends_with(".md") || line.trim_start().starts_with("//");
        for (at, line) in read(&path).lines().enumerate() {
            let n_columns = line.chars().count();
            if n_columns > MOST_COLUMNS && is_prose(line) {
                offences.push(format!("{name}:{}: {n_columns} columns, {MOST_COLUMNS} at most", at + 1));
            }
        }
    }
    assert_none(&offences);
}

#[test]
fn links_in_the_docs_lead_somewhere() {
    let mut offences = Vec::new();
    for page in pages() {
        let text = read(&page);
        for (at, line) in text.lines().enumerate() {
            let targets = line.match_indices("](").filter_map(|(i, _)| line[i + 2..].split(')').next());
            for target in targets.filter(|t| !t.contains("://") && !t.starts_with("mailto:")) {
                let file = target.split(['#', ' ']).next().unwrap_or("");
                let folder = page.parent().expect("a page is in a folder");
                if !file.is_empty() && !folder.join(file).exists() {
                    offences.push(format!("{}:{}: there is no {target}", name_of(&page), at + 1));
                }
            }
        }
    }
    assert_none(&offences);
}

#[test]
fn manifests_and_lines_are_read_as_they_are() {
    let manifest = "[package]\nname = \"x\"\n[dependencies]\na.workspace = true\nb = { path = \"..\" }\n\
                    [dependencies.c]\nversion = \"1\"\n[dev-dependencies]\n# d = \"1\"\ne = \"1\"\n[lints]\nf = 1\n";
    assert_eq!(dependencies(manifest), ["a", "b", "c", "e"]);
    let docs = docs("//! It.\n//! Its.\n\n  /// One-sided.\n/// What.\nfn f() {}\n//// Where\n/// The same.\n//! …\n");
    assert_eq!(docs, [(1, "It."), (4, "One-sided."), (8, "The same."), (9, "…")]);
    assert!(docs.iter().map(|(_, doc)| is_nameless(doc)).eq([true, false, true, true]));
    let lines = code_lines("let x = \"unsafe\"; // unsafe\nunsafe_code\nunsafe {\n#[cfg(test)]\nmod tests {\nunsafe");
    let with: Vec<usize> = lines.iter().filter(|(_, l)| has_word(l, "unsafe")).map(|(at, _)| *at).collect();
    assert_eq!(with, [3]);
}
