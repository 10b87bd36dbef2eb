//! Libraries of compiled models, written to folders in the form of a language.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tilewright_codegen::{CompileError, Interface, host_arch};
use tilewright_device::cuda::PtxAssembler;
use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_runtime::{AnyModel, GpuModel};
use tilewright_ship::{File, ShipError};
pub use tilewright_ship::{Library, Weights};

use crate::error::{Error, ErrorKind, Setting, one_line};
use crate::file::write_into_folder;

/// Form of a library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// C: a header, a source file and an archive of kernels.
    C,
    /// Shared library.
    Shared,
    /// Rust crate.
    Rust,
    /// Python wheel.
    Python,
}

impl Form {
    /// Forms with their names and descriptions.
    pub const ALL: [(Form, &str, &str); 4] = [
        (Form::C, "c", "Header, source and an archive of the kernels"),
        (Form::Shared, "so", "A shared library; needs `cc`"),
        (Form::Rust, "rust", "A crate; needs `cc`"),
        (Form::Python, "python", "A wheel; needs `cc`"),
    ];

    /// Kind of thing that has this name already, so that a library of this form cannot; `None` if it can.
    fn taken(self, name: &str) -> Option<&'static str> {
        let is_in = |words: &str| words.split_whitespace().any(|word| word == name);
        match self {
            _ if is_in(SYSTEM_LIBRARIES) => Some("a library of the system"),
            Form::Rust if is_in(RUST_NAMES) => Some("a word or a crate of Rust"),
            Form::Python if is_in(PYTHON_NAMES) => Some("a word of Python or a module that the package imports"),
            _ => None,
        }
    }
}

/// Names that linkers find in the system's folders.
const SYSTEM_LIBRARIES: &str = "c cuda dl m OpenCL pthread rt";
/// Names that a crate cannot have: keywords, and crates that every program may use.
const RUST_NAMES: &str = include_str!("library/rust_names.txt");
/// Names that a package cannot have: keywords, and the modules that the package imports.
const PYTHON_NAMES: &str = include_str!("library/python_names.txt");

/// Makes the library of a model compiled for a target, with a name from [`library_name`]. `origin` describes
/// the model's source in a few lines.
///
/// # Errors
/// Bad input if the model cannot be shipped.
pub fn library(
    name: &str,
    model: &AnyModel,
    target: &Target,
    n_threads: usize,
    weights: Weights,
    origin: &[String],
) -> Result<Library, Error> {
    let made = match model {
        AnyModel::Cpu(model) => Library::new(name, model, target, n_threads, weights, origin),
        AnyModel::Gpu(_) if weights == Weights::Ready => {
            let why = "on a GPU each context makes what its kernels keep of weights";
            return Err(Error::setting(Setting::Weights, format!(" ready is for CPUs: {why} (leave it out)")));
        }
        AnyModel::Gpu(model) => for_gpu(name, model, origin),
    };
    made.map_err(|error| match error {
        ShipError::Host(_) => {
            let hint = "replace its operator in the model, `check` lists those without code; or `run` the model here";
            Error::input(format!("{} ({hint})", one_line(&error.to_string())))
        }
        ShipError::Name(_)
        | ShipError::TooLarge(_)
        | ShipError::Device(_)
        | ShipError::Compile(CompileError::NoLlvm { .. }) => Error::input(one_line(&error.to_string())),
        ShipError::Compile(_) | ShipError::Assemble(_) => Error::failed(&error).because(error),
    })
}

/// Makes the library of a model for a GPU, with machine code if an assembler for PTX is installed.
fn for_gpu(name: &str, model: &GpuModel, origin: &[String]) -> Result<Library, ShipError> {
    let is_cuda = model.target.arch == Arch::Gpu(GpuApi::Cuda);
    let assembler = if is_cuda { PtxAssembler::find(&model.target.cpu) } else { PtxAssembler::Driver };
    let assemble = |ptx: &[u8]| match assembler {
        PtxAssembler::Driver => Ok(None),
        PtxAssembler::Ptxas { .. } => {
            assembler.assemble(ptx, &model.target.cpu).map(Some).map_err(|error| error.to_string())
        }
    };
    Library::for_gpu(name, model, &assemble, origin)
}

/// Writes a library to a folder, and returns the paths of the files.
///
/// # Errors
/// Bad input if the folder cannot be written or there is no `cc`; failure if `cc` fails.
pub fn write_library(library: &Library, form: Form, folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let files = match form {
        Form::C => library.c_files(),
        Form::Shared => {
            let mut files = library.shared_files();
            files.push(File { path: format!("lib{}.so", library.name()), bytes: shared(library)? });
            files
        }
        Form::Rust => library.crate_files(compiled(library, &library.object_arguments())?),
        Form::Python => vec![library.wheel(shared(library)?)],
    };
    files.iter().map(|file| write_file(folder, file)).collect()
}

fn shared(library: &Library) -> Result<Vec<u8>, Error> {
    compiled(library, &library.shared_arguments())
}

/// Compiles a library with a C compiler.
fn compiled(library: &Library, arguments: &[String]) -> Result<Vec<u8>, Error> {
    let cannot = |what: &str, error: std::io::Error| Error::failed(what).because(error);
    let folder = tempfile::tempdir().map_err(|error| cannot("cannot make a folder for the C compiler", error))?;
    for file in library.c_files().iter().chain([&library.version_script()]) {
        write_file(folder.path(), file)?;
    }
    let compiler = match library.arch() {
        arch if host_arch() == Some(arch) => "cc".to_owned(),
        arch => format!("{}-linux-gnu-gcc", arch.name()),
    };
    let output = Command::new(&compiler).args(arguments).current_dir(folder.path()).output().map_err(|error| {
        let hint = "install a C compiler of this name";
        Error::of(ErrorKind::NoCompiler, format!("cannot run `{compiler}`: {error} ({hint})"))
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let reason = said.lines().find(|line| line.contains("error")).or(said.lines().next()).unwrap_or("");
        return Err(Error::failed(format!("`{compiler}` failed: {} ({})", one_line(reason), output.status)));
    }
    let made = arguments.last().map(OsString::from).unwrap_or_default();
    fs::read(folder.path().join(made)).map_err(|error| cannot("cannot read what `cc` made", error))
}

fn write_file(folder: &Path, file: &File) -> Result<PathBuf, Error> {
    let path = folder.join(&file.path);
    let written = write_into_folder(&path, &file.bytes);
    written.map_err(|error| Error::of(ErrorKind::Unwritable, format!("cannot write {}: {error}", path.display())))?;
    Ok(path)
}

/// Name for the library of a workload or model in a form: the given one, or one derived from `text`.
///
/// # Errors
/// Bad input where it is not a C identifier, or the form cannot have it.
pub fn library_name(name: Option<&str>, form: Form, text: &str) -> Result<String, Error> {
    let made = name.map_or_else(|| name_of(text), str::to_owned);
    if Interface::is_prefix(&made) {
        return match form.taken(&made) {
            None => Ok(made),
            Some(what) => Err(Error::setting(Setting::Name, format!(" `{made}` is {what} (give another)"))),
        };
    }
    let rules = "letters, digits and underscores, no digit first";
    Err(match name {
        Some(name) => {
            let reason = format!(" `{}` is not a C identifier (give {rules})", one_line(name));
            Error::setting(Setting::Name, reason)
        }
        None => {
            let reason = format!("`{text}` makes no C identifier to name the library with");
            Error::of(ErrorKind::NoName, one_line(&reason))
        }
    })
}

/// Derives a name for the library of a workload.
fn name_of(text: &str) -> String {
    let mut name = String::new();
    for c in text.chars().filter(|c| *c != '=') {
        match c {
            _ if c.is_ascii_alphanumeric() => name.push(c.to_ascii_lowercase()),
            _ if name.ends_with('_') || name.is_empty() => {}
            _ => name.push('_'),
        }
    }
    name.trim_end_matches('_').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_named_after_workloads() {
        let name = name_of("matmul:m=64,n=64,k=64,const=b,epilogue=bias+relu");
        assert_eq!(name, "matmul_m64_n64_k64_constb_epiloguebias_relu");
        let library_name = |name, text| library_name(name, Form::C, text);
        assert_eq!(library_name(None, "my-net").unwrap(), "my_net");
        assert_eq!(library_name(Some("net3d"), "3d-net").unwrap(), "net3d");
        for text in ["3d-net", "模型", ""] {
            assert!(library_name(None, text).unwrap_err().to_string().contains("makes no C identifier"), "{text}");
        }
        assert!(library_name(Some("3d"), "net").unwrap_err().to_string().contains("the name `3d`"));
    }

    #[test]
    fn libraries_have_names_that_their_language_can_say() {
        let check = |name: &str, refused: &[Form]| {
            for (form, ..) in Form::ALL {
                let found = [library_name(Some(name), form, "net"), library_name(None, form, name)];
                for found in found {
                    assert_eq!(found.is_err(), refused.contains(&form), "{name} {form:?}");
                    let told = found.map_or_else(|error| error.to_string(), |_| "(give another)".to_owned());
                    assert!(told.ends_with("(give another)"), "{told}");
                }
            }
        };
        check("class", &[Form::Python]);
        check("numpy", &[Form::Python]);
        check("self", &[Form::Rust]);
        check("core", &[Form::Rust]);
        check("while", &[Form::Rust, Form::Python]);
        check("m", &Form::ALL.map(|(form, ..)| form));
        check("int", &[]);
    }
}
