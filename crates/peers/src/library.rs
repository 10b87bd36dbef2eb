//! Loading of shared libraries for the rest of a child's life.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};

use libloading::os::unix;
use libloading::{Library, Symbol};

use super::Unavailable;

/// Library that stays loaded until the process ends: some libraries start threads that must not lose their
/// code.
#[derive(Clone, Copy)]
pub(super) struct Loaded(&'static Library);

impl Loaded {
    /// Opens the first of `names` found in the folder, if one is given, or by the system; `get` is the
    /// instruction to install it if none is found.
    pub(super) fn open(names: &[&str], get: &str, folder: Option<&Path>) -> Result<Loaded, Unavailable> {
        let found = folder.and_then(|folder| find(folder, names));
        for path in found.iter().map(PathBuf::as_path).chain(names.iter().map(Path::new)) {
            // SAFETY: loading runs the library's initialisers, in a process that exists for nothing else.
            match unsafe { Library::new(path) } {
                Ok(library) => return Ok(Loaded(Box::leak(Box::new(library)))),
                Err(error) => {
                    let reason = error_text(&error);
                    // The loader reports missing dependencies of a library in the same way, with their names.
                    if !reason.starts_with(&format!("{}: cannot open shared object", path.display())) {
                        return Err(Unavailable::Unsupported { reason });
                    }
                }
            }
        }
        Err(Unavailable::NotInstalled { library: names[0].to_owned(), get: get.to_owned() })
    }

    /// Loads a library that others look up by name, from the folder or the system; returns whether it was
    /// found.
    pub(super) fn open_for_all(name: &str, folder: Option<&Path>) -> bool {
        let path = folder.and_then(|folder| find(folder, &[name])).unwrap_or_else(|| PathBuf::from(name));
        // SAFETY: as above.
        let library = unsafe { unix::Library::open(Some(path), unix::RTLD_NOW | unix::RTLD_GLOBAL) };
        library.map(std::mem::forget).is_ok()
    }

    /// Function called `symbol` (ended by a zero byte) in this library or one that it depends on.
    ///
    /// # Safety
    ///
    /// `F` is a function pointer type with the function's signature.
    pub(super) unsafe fn function<F: Copy + 'static>(&self, symbol: &[u8]) -> Result<F, Unavailable> {
        // SAFETY: the caller's promise; the library is never unloaded.
        let found: Result<Symbol<'static, F>, _> = unsafe { self.0.get(symbol) };
        match found {
            Ok(function) => Ok(*function),
            Err(error) => Err(Unavailable::Unsupported { reason: error_text(&error) }),
        }
    }
}

/// Table of a library's functions: our names, their types, and the library's names.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($function:ident: $type:ty = $symbol:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $name {
            $($function: $type,)*
        }

        impl $name {
            fn of(library: Loaded) -> Result<$name, Unavailable> {
                // SAFETY: the types are those of the library's headers.
                unsafe { Ok($name { $($function: library.function($symbol.to_bytes_with_nul())?,)* }) }
            }
        }
    };
}

pub(super) use functions;

/// Maximum depth of folders searched for a library: an unpacked wheel has some at `X.data/data/lib`.
const MOST_DEPTH: usize = 6;

/// Finds the first of these names that a file in the folder or below has, with or without a version after it;
/// if there are several files, the least deep one.
pub(super) fn find(folder: &Path, names: &[&str]) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    let mut levels: Vec<Vec<PathBuf>> = Vec::new();
    while levels.len() <= MOST_DEPTH && !folders.is_empty() {
        let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort_unstable();
        // Links to folders are not followed, so that there are no cycles.
        folders = paths.iter().filter(|path| path.is_dir() && !path.is_symlink()).cloned().collect();
        levels.push(paths);
    }
    let is_called = |path: &Path, name: &str| {
        let file = path.file_name().and_then(|file| file.to_str()).and_then(|file| file.strip_prefix(name));
        file.is_some_and(|version| version.is_empty() || version.starts_with('.')) && path.is_file()
    };
    names.iter().find_map(|name| levels.iter().flatten().find(|path| is_called(path, name)).cloned())
}

/// Version in the file name of a loaded library, after this prefix.
pub(super) fn version_in_file_name(beginning: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let version = |line: &str| line.rsplit('/').next()?.strip_prefix(beginning).map(str::to_owned);
    maps.lines().find_map(version)
}

/// Resources of peers besides their operands.
pub(super) struct Means {
    /// Number of threads to use.
    pub(super) threads: usize,
    /// Folder that is searched first for libraries.
    pub(super) folder: Option<PathBuf>,
    /// Index of the device, for GPU libraries.
    pub(super) gpu: Option<u32>,
}

/// Message of the dynamic loader, without the name of the function that returned it.
fn error_text(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(loader) => loader.to_string(),
        None => {
            let text = error.to_string();
            text.strip_prefix("dlopen failed: ").unwrap_or(&text).to_owned()
        }
    }
}

/// Copies a C string that a library keeps permanently; empty for a null pointer.
///
/// # Safety
///
/// `text` is null or points to a permanent string, ended by a zero byte.
pub(super) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_its_package() {
        let Err(missing) = Loaded::open(&["libtilewright-has-no-such.so.1", "libnor-such.so"], "libnone1", None) else {
            panic!("there is no such library");
        };
        let text = missing.to_string();
        assert!(text.contains("libtilewright-has-no-such.so.1") && text.contains("libnone1"), "{text}");
    }

    #[test]
    fn names_of_files_have_versions() {
        assert_eq!(version_in_file_name("libc.so.").as_deref(), Some("6"));
        assert_eq!(version_in_file_name("libtilewright-has-no-such.so."), None);
    }

    #[test]
    fn a_folder_is_searched_before_the_system() {
        let folder = tempfile::tempdir().expect("a folder");
        let deep = folder.path().join("wheel.data/data/lib");
        std::fs::create_dir_all(&deep).expect("folders");
        let names = ["libc.so.7", "libc.so.6"];
        let open = || Loaded::open(&names, "libc6", Some(folder.path())).err().map(|error| error.to_string());
        assert_eq!(open(), None, "the system's is there");
        let fake = deep.join("libc.so.6");
        std::fs::write(&fake, "no library").expect("a file");
        let refused = open().expect("what is in the folder is no library");
        assert!(refused.contains(&fake.display().to_string()), "{refused}");
        std::fs::write(deep.join("libc.so.7"), "no library").expect("a file");
        assert_eq!(find(folder.path(), &names), Some(deep.join("libc.so.7")));
        std::fs::write(folder.path().join("libc.so.7"), "no library").expect("a file");
        assert_eq!(find(folder.path(), &names), Some(folder.path().join("libc.so.7")));
        std::fs::write(folder.path().join("libonnxruntime.so.1.32.0"), "no library").expect("a file");
        let found = find(folder.path(), &["libonnxruntime.so"]);
        assert_eq!(found, Some(folder.path().join("libonnxruntime.so.1.32.0")), "Python wheels have versions in names");
    }
}
