//! Loading a shared library for the rest of a child's life.

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};

use libloading::os::unix;
use libloading::{Library, Symbol};

use super::Unavailable;

/// A library that stays loaded until the process ends: some start threads that must not lose their code.
#[derive(Clone, Copy)]
pub(super) struct Loaded(&'static Library);

impl Loaded {
    /// The first of `names` that is in the folder, if one is given, or else that the system finds; `get`
    /// says how to get it where none is installed.
    pub(super) fn open(names: &[&str], get: &str, folder: Option<&Path>) -> Result<Loaded, Unavailable> {
        let found = folder.and_then(|folder| find(folder, names));
        for path in found.iter().map(PathBuf::as_path).chain(names.iter().map(Path::new)) {
            // SAFETY: loading runs the library's initialisers, in a process that exists for nothing else.
            match unsafe { Library::new(path) } {
                Ok(library) => return Ok(Loaded(Box::leak(Box::new(library)))),
                Err(error) => {
                    let reason = error_text(&error);
                    // The loader says the same of a library's own dependencies, with their names.
                    if !reason.starts_with(&format!("{}: cannot open shared object", path.display())) {
                        return Err(Unavailable::Unsupported { reason });
                    }
                }
            }
        }
        Err(Unavailable::NotInstalled { library: names[0].to_owned(), get: get.to_owned() })
    }

    /// Loads a library that others look for by its name; whether it is in the folder, or the system finds it.
    pub(super) fn open_for_all(name: &str, folder: Option<&Path>) -> bool {
        let path = folder.and_then(|folder| find(folder, &[name])).unwrap_or_else(|| PathBuf::from(name));
        // SAFETY: as above.
        let library = unsafe { unix::Library::open(Some(path), unix::RTLD_NOW | unix::RTLD_GLOBAL) };
        library.map(std::mem::forget).is_ok()
    }

    /// The function called `symbol` (ended by a zero byte) here or in a library that this one needs.
    ///
    /// # Safety
    ///
    /// `F` is a function pointer type with the function's own signature.
    pub(super) unsafe fn function<F: Copy + 'static>(&self, symbol: &[u8]) -> Result<F, Unavailable> {
        // SAFETY: the caller's promise; the library is never unloaded.
        let found: Result<Symbol<'static, F>, _> = unsafe { self.0.get(symbol) };
        match found {
            Ok(function) => Ok(*function),
            Err(error) => Err(Unavailable::Unsupported { reason: error_text(&error) }),
        }
    }
}

/// A table of a library's functions: what they are called here, their types, and what the library calls them.
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

/// Depth of folders in which a library is looked for: a wheel that is unpacked holds some at
/// `X.data/data/lib`.
const MOST_DEPTH: usize = 6;

/// The first of these names that a file in the folder or below has, with or without a version behind it; of
/// several files the one least deep.
pub(super) fn find(folder: &Path, names: &[&str]) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    let mut levels: Vec<Vec<PathBuf>> = Vec::new();
    while levels.len() <= MOST_DEPTH && !folders.is_empty() {
        let entries = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort_unstable();
        // Links are files here and no folders, so that none leads around in a circle.
        folders = paths.iter().filter(|path| path.is_dir() && !path.is_symlink()).cloned().collect();
        levels.push(paths);
    }
    let is_called = |path: &Path, name: &str| {
        let file = path.file_name().and_then(|file| file.to_str()).and_then(|file| file.strip_prefix(name));
        file.is_some_and(|version| version.is_empty() || version.starts_with('.')) && path.is_file()
    };
    names.iter().find_map(|name| levels.iter().flatten().find(|path| is_called(path, name)).cloned())
}

/// The version that the file of a loaded library has in its name, behind such a beginning.
pub(super) fn version_in_file_name(beginning: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let version = |line: &str| line.rsplit('/').next()?.strip_prefix(beginning).map(str::to_owned);
    maps.lines().find_map(version)
}

/// Means of peers besides their operands.
pub(super) struct Means {
    /// Threads to use.
    pub(super) threads: usize,
    /// Folder in which libraries are looked for first.
    pub(super) folder: Option<PathBuf>,
    /// The number of the device, for libraries for GPUs.
    pub(super) gpu: Option<u32>,
}

/// Message of the dynamic loader, without the name of the function that was called to get it.
fn error_text(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(loader) => loader.to_string(),
        None => {
            let text = error.to_string();
            text.strip_prefix("dlopen failed: ").unwrap_or(&text).to_owned()
        }
    }
}

/// A C string that a library keeps for ever, or nothing for a null pointer.
///
/// # Safety
///
/// `text` is null or points to a string, ended by a zero byte, that stays.
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
