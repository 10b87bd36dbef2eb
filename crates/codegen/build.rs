//! Finds the libLLVM of the Rust toolchain and links it, if the feature `llvm` is enabled.
//!
//! `TILEWRIGHT_LIBLLVM` names another libLLVM 22 if that of the toolchain is unsuitable. Prints `libdir`,
//! which the build scripts of crates with binaries turn into an rpath, so that the binaries start without
//! `LD_LIBRARY_PATH`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Major version of LLVM for which the bindings are written.
const LLVM_MAJOR: &str = "22";

/// Advice for any failure below.
const HINT: &str = "use Rust 1.95 or a later release that still has LLVM 22 (`rustc -vV` tells), \
                    or set TILEWRIGHT_LIBLLVM to the path of a libLLVM 22";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_LLVM").is_none() {
        return;
    }
    println!("cargo::rerun-if-env-changed=TILEWRIGHT_LIBLLVM");
    println!("cargo::rerun-if-env-changed=RUSTC");
    // A documentation build links nothing, and its toolchain may have another LLVM.
    println!("cargo::rerun-if-env-changed=DOCS_RS");
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    match find() {
        Ok(library) => {
            if let Err(why) = link(&library) {
                println!("cargo::error=cannot link {}: {why}", library.display());
            }
        }
        Err(why) => println!("cargo::error={why}; {HINT}"),
    }
}

/// Path of the libLLVM to link.
fn find() -> Result<PathBuf, String> {
    if let Some(named) = env::var_os("TILEWRIGHT_LIBLLVM") {
        return match fs::canonicalize(&named) {
            Ok(path) if path.is_file() => Ok(path),
            _ => Err(format!("TILEWRIGHT_LIBLLVM names no file: {}", Path::new(&named).display())),
        };
    }
    let about = rustc(&["-vV"])?;
    let version = about.lines().find_map(|l| l.strip_prefix("LLVM version: ")).unwrap_or("unknown");
    if version.split('.').next() != Some(LLVM_MAJOR) {
        return Err(format!("this Rust toolchain has LLVM {version}, not LLVM {LLVM_MAJOR}"));
    }
    let folder = Path::new(rustc(&["--print", "sysroot"])?.trim()).join("lib");
    let entries = fs::read_dir(&folder).map_err(|e| format!("cannot read {}: {e}", folder.display()))?;
    // A linker script of a few bytes next to the library refers to it.
    entries
        .filter_map(Result::ok)
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libLLVM") && name.contains(".so")
        })
        .map(|entry| entry.path())
        .max_by_key(|path| fs::metadata(path).map_or(0, |m| m.len()))
        .ok_or_else(|| format!("this Rust toolchain has no libLLVM in {}", folder.display()))
}

fn rustc(arguments: &[&str]) -> Result<String, String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(&rustc)
        .args(arguments)
        .output()
        .map_err(|e| format!("cannot run {}: {e}", Path::new(&rustc).display()))?;
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Links a library of any file name, through a symbolic link with the name that linkers expect.
fn link(library: &Path) -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let alias = out.join("libtilewright_llvm.so");
    let _ = fs::remove_file(&alias);
    std::os::unix::fs::symlink(library, &alias).map_err(|e| format!("{}: {e}", alias.display()))?;
    let folder = library.parent().ok_or("it has no folder")?.display();
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=dylib=tilewright_llvm");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    println!("cargo::metadata=libdir={folder}");
    Ok(())
}
