//! Loading a shared library for the rest of a child's life.

use std::ffi::{CStr, c_char};

use libloading::{Library, Symbol};

use super::Unavailable;

/// A library that stays loaded until the process ends: some start threads that must not lose their code.
#[derive(Clone, Copy)]
pub(super) struct Loaded(&'static Library);

impl Loaded {
    /// The first of `names` that can be loaded; `package` is named where none is installed.
    pub(super) fn open(names: &[&str], package: &str) -> Result<Loaded, Unavailable> {
        for name in names {
            // SAFETY: loading runs the library's initialisers, in a process that exists for nothing else.
            match unsafe { Library::new(*name) } {
                Ok(library) => return Ok(Loaded(Box::leak(Box::new(library)))),
                Err(error) => {
                    let reason = error_text(&error);
                    // The loader says the same of a library's own dependencies, with their names.
                    if !reason.starts_with(&format!("{name}: cannot open shared object")) {
                        return Err(Unavailable::Unsupported { reason });
                    }
                }
            }
        }
        Err(Unavailable::NotInstalled { library: names[0].to_owned(), package: package.to_owned() })
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

/// What the dynamic loader said, without the name of the function that was called to hear it.
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
        let Err(missing) = Loaded::open(&["libtilewright-has-no-such.so.1", "libnor-such.so"], "libnone1") else {
            panic!("there is no such library");
        };
        let text = missing.to_string();
        assert!(text.contains("libtilewright-has-no-such.so.1") && text.contains("libnone1"), "{text}");
    }
}
