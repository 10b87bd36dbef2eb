//! Passes the version of the sources to the library.

use std::env;
use std::path::Path;
use std::process::Command;

/// Sources of the program, as git names them from the root of the checkout.
const SOURCES: [&str; 4] = ["Cargo.lock", "Cargo.toml", ":(glob)crates/*/Cargo.toml", ":(glob)crates/*/src/**"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    let build = source().map_or(version.clone(), |source| format!("{version}+{source}"));
    println!("cargo::rustc-env=TILEWRIGHT_BUILD={build}");
}

/// Commit, and a number for uncommitted changes; `None` if this is no checkout of the project.
fn source() -> Option<String> {
    let own = Path::new(&env::var_os("CARGO_MANIFEST_DIR")?).canonicalize().ok()?;
    let root = own.parent()?.parent()?.to_owned();
    let git = |arguments: &[&str]| {
        // The checkout may be in use: its index is not touched.
        let out = Command::new("git").arg("--no-optional-locks").arg("-C").arg(&root).args(arguments).output().ok()?;
        out.status.success().then_some(out.stdout)
    };
    let line = |arguments: &[&str]| Some(String::from_utf8(git(arguments)?).ok()?.trim().to_owned());
    // A copy of the sources may lie in another project's checkout.
    if Path::new(&line(&["rev-parse", "--show-toplevel"])?).canonicalize().ok()? != root {
        return None;
    }
    let commit = line(&["rev-parse", "--short=9", "HEAD"])?;
    // Whatever moves HEAD adds a line to its log. Changes of sources cause a rebuild of most of this anyway.
    let log = root.join(line(&["rev-parse", "--git-path", "logs/HEAD"])?);
    let members = line(&["ls-files", ":(glob)crates/*/Cargo.toml"])?;
    let sources = members.lines().map(|manifest| root.join(manifest).with_file_name("src"));
    for path in sources.chain([log, root.join("Cargo.lock"), root.join("Cargo.toml")]).filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let changes = git(&[&["diff", "--binary", "HEAD", "--"][..], &SOURCES].concat())?;
    Some(if changes.is_empty() { format!("g{commit}") } else { format!("g{commit}.d{:08x}", fnv1a(&changes)) })
}

fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
