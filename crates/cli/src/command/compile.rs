//! `compile`: a kernel as a library for C, Rust or Python programs, which need nothing of ours to use it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use bytes::Bytes;
use clap::{Args, ValueEnum};
use serde_json::json;
use tilewright::version::BUILD;
use tilewright_codegen::{ArgumentAlign, CompileError, Compiler};
use tilewright_ir::{DType, Program, Role, lower, verify};
use tilewright_model::npy::read_npy;
use tilewright_runtime::{Code, Model};
use tilewright_ship::{File, Library, ShipError};
use tilewright_tune::PassedOver;

use super::model::{BindingArgs, ModelArgs};
use super::{DatabaseArgs, WorkloadArgs, check_template, count, known_best, make_task, read_file};
use crate::error::{OrBadInput, bad_input, one_line};
use crate::output::{message, write_result};

/// Arguments of `compile`.
#[derive(Args, Debug)]
pub struct CompileArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    #[command(flatten)]
    bindings: BindingArgs,
    /// Folder to write to, made where it is not there
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    #[command(flatten)]
    pub form: FormArgs,
    /// What a constant input is: a .npy file, or its elements as they lie in memory
    #[arg(long = "constant", value_name = "NAME=FILE")]
    constants: Vec<String>,
    /// Only the best of this template [default: of all templates]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// As what a library is written.
#[derive(Args, Debug)]
pub struct FormArgs {
    /// As what to write it
    #[arg(long = "as", value_enum, default_value_t = Form::C)]
    form: Form,
    /// Name of the library, a C identifier, with which all its functions begin [default: one made of what is
    /// compiled]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

/// The forms of a library.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Header, source and an archive of the kernels
    C,
    /// A shared library; needs `cc`
    So,
    /// A crate; needs `cc`
    Rust,
    /// A wheel; needs `cc`
    Python,
}

/// Compiles the best that is recorded, or the first guess where nothing is.
///
/// # Errors
/// Bad input where the workload does not exist, its constants are not given, or the folder cannot be written;
/// where `cc` is needed and fails.
pub fn run(args: &CompileArgs, as_json: bool) -> anyhow::Result<()> {
    if ModelArgs::is_model(&args.of.workload) {
        return compile_model(args, as_json);
    }
    args.bindings.refuse(&args.of.workload)?;
    let workload = args.of.workload()?;
    let machine = &args.of.machine;
    let target = machine.runnable_target()?;
    let mut template = args.template.clone();
    template.as_deref().map_or(Ok(()), check_template)?;
    let database = args.records.database()?;
    let (text, threads) = (workload.to_string(), machine.threads as u32);
    let (best, _) = match database.open_to_read()? {
        Some(store) => known_best(&store, &workload, &target.name(), threads, template.as_deref())
            .map_err(|error| database.refuse(error))?,
        None => (None, PassedOver::default()),
    };
    if let Some(best) = &best {
        template = Some(best.template.clone());
    }
    let task = make_task(workload, target.clone(), machine.threads, template.as_deref())?;
    let config = match &best {
        Some(best) => task.space.config_from_json(&best.config).or_bad_input("the space has changed: tune it again")?,
        None => {
            message(&format!(
                "nothing is recorded for {text}: this is the first guess (`tilewright tune` finds better)"
            ));
            let name = task.template.name;
            task.first_guess(0).ok_or_else(|| bad_input(format!("template {name} guesses nothing (tune it first)")))?
        }
    };
    let program = task.program(&config).map_err(|(at, why)| anyhow::anyhow!("step {}: {why}", at + 1))?;
    verify::verify(&program)?;
    let lowered = lower::lower(&program);
    let constants = constants(&args.constants, &lowered)?;
    let mut compiler = Compiler::for_arguments(target.clone(), ArgumentAlign::Elements);
    let code = Code::compile(&mut compiler, lowered)?;
    let plan = code.plan(&|name| constants.iter().find(|(known, _)| known == name).map(|(_, data)| data.clone()));
    let model = Model::new(plan, vec![code])?;
    let config = task.space.config_to_json(&config);
    let origin = [
        format!("{text} for {}, {}", target.name(), count(machine.threads as u64, "thread")),
        format!("template {}, configuration {config}", task.template.name),
        format!("made by tilewright {BUILD}"),
    ];
    let library = args.form.library(&text, &model, &target, machine.threads, &origin)?;
    let files = args.form.write(&library, &args.output)?;
    let folder = args.output.display();
    message(&format!("{} written to {folder}", count(files.len() as u64, "file")));
    let json = json!({
        "workload": text,
        "name": library.name(),
        "template": task.template.name,
        "config": config,
        "recorded": best.is_some(),
        "files": files,
        "library": library.build(),
    });
    let lines: String = files.iter().map(|file| format!("{file}\n")).collect();
    write_result(as_json, &json, &lines)
}

/// Compiles a model with the best kernels that are recorded.
fn compile_model(args: &CompileArgs, as_json: bool) -> anyhow::Result<()> {
    if let Some(constant) = args.constants.first() {
        return Err(bad_input(format!("--constant {constant}: a model has its constants (leave it out)")));
    }
    let machine = &args.of.machine;
    let (target, file) = (machine.runnable_target()?, ModelArgs::new(&args.of.workload, &args.bindings));
    let (compiled, n_guessed) = file.compiled(args.of.exact, machine, &args.records)?;
    let stem = Path::new(&args.of.workload).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let origin = [
        format!("{stem} for {}, {}", target.name(), count(machine.threads as u64, "thread")),
        format!("made by tilewright {BUILD}"),
    ];
    let library = args.form.library(&stem, &compiled.model, &target, machine.threads, &origin)?;
    let files = args.form.write(&library, &args.output)?;
    message(&format!("{} written to {}", count(files.len() as u64, "file"), args.output.display()));
    let json = json!({
        "model": file.name(),
        "name": library.name(),
        "untuned_kernels": n_guessed,
        "files": files,
        "library": library.build(),
    });
    let lines: String = files.iter().map(|file| format!("{file}\n")).collect();
    write_result(as_json, &json, &lines)
}

impl FormArgs {
    /// The library of a model, named after a text where no name is given.
    ///
    /// # Errors
    /// Bad input where the name is no identifier or the model cannot be shipped.
    pub fn library<'m>(
        &self,
        text: &str,
        model: &'m Model,
        target: &tilewright_ir::Target,
        n_threads: usize,
        origin: &[String],
    ) -> anyhow::Result<Library<'m>> {
        let name = self.name.clone().unwrap_or_else(|| name_of(text));
        Library::new(&name, model, target, n_threads, origin).map_err(|error| match error {
            ShipError::Name(name) => {
                let hint = "give letters, digits and underscores, no digit first";
                bad_input(format!("--name `{}` is no C identifier ({hint})", one_line(&name)))
            }
            ShipError::Host(_) | ShipError::TooLarge(_) | ShipError::Compile(CompileError::NoLlvm { .. }) => {
                bad_input(error)
            }
            ShipError::Compile(_) => error.into(),
        })
    }

    /// Writes a library to a folder, and says which files there are now.
    ///
    /// # Errors
    /// Bad input where the folder cannot be written or there is no `cc`; where it fails.
    pub fn write(&self, library: &Library, folder: &Path) -> anyhow::Result<Vec<String>> {
        let files = match self.form {
            Form::C => library.c_files(),
            Form::So => {
                let mut files = library.shared_files();
                files.push(File { path: format!("lib{}.so", library.name()), bytes: shared(library)? });
                files
            }
            Form::Rust => library.crate_files(compiled(library, &library.object_arguments())?),
            Form::Python => vec![library.wheel(shared(library)?)],
        };
        files.iter().map(|file| write_file(folder, file)).collect()
    }
}

fn shared(library: &Library) -> anyhow::Result<Vec<u8>> {
    compiled(library, &library.shared_arguments())
}

/// What a C compiler makes of a library.
fn compiled(library: &Library, arguments: &[String]) -> anyhow::Result<Vec<u8>> {
    let folder = tempfile::tempdir().context("cannot make a folder for the C compiler")?;
    for file in library.c_files().iter().chain([&library.version_script()]) {
        write_file(folder.path(), file)?;
    }
    let output = Command::new("cc").args(arguments).current_dir(folder.path()).output().map_err(|error| {
        bad_input(format!("cannot run `cc`: {error} (install a C compiler, or give --as c, which needs none)"))
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let reason = said.lines().find(|line| line.contains("error")).or(said.lines().next()).unwrap_or("");
        anyhow::bail!("`cc` failed: {} ({})", one_line(reason), output.status);
    }
    let made = arguments.last().map(OsString::from).unwrap_or_default();
    fs::read(folder.path().join(made)).context("cannot read what `cc` made")
}

fn write_file(folder: &Path, file: &File) -> anyhow::Result<String> {
    let path = folder.join(&file.path);
    let cannot = |error| bad_input(format!("cannot write {}: {error} (give another -o)", path.display()));
    fs::create_dir_all(path.parent().unwrap_or(folder)).map_err(cannot)?;
    tilewright::file::write_whole(&path, |out| out.write_all(&file.bytes)).map_err(cannot)?;
    Ok(path.display().to_string())
}

/// A name for the library of a workload.
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

/// The constants of a program, which are all given.
fn constants(given: &[String], program: &Program) -> anyhow::Result<Vec<(String, Bytes)>> {
    let mut rest: Vec<(&str, &str)> = Vec::new();
    for pair in given {
        let hint = || bad_input(format!("--constant `{}` is no name and file (give NAME=FILE)", one_line(pair)));
        rest.push(pair.split_once('=').ok_or_else(hint)?);
    }
    let mut found = Vec::new();
    let names: Vec<&str> =
        program.arguments().filter(|(_, b)| b.role == Role::ConstInput).map(|(_, b)| b.name.as_str()).collect();
    for (_, b) in program.arguments().filter(|(_, b)| b.role == Role::ConstInput) {
        let at = rest.iter().position(|(name, _)| name.eq_ignore_ascii_case(&b.name)).ok_or_else(|| {
            bad_input(format!(
                "{} is constant (give --constant {}=FILE, or leave const= out of the workload)",
                b.name, b.name
            ))
        })?;
        let (_, file) = rest.remove(at);
        let data = read_file(Path::new(file), "a .npy file or one of bare elements")?;
        let n_bytes = b.size_bytes().unwrap_or(0) as usize;
        let data = elements(data, b.dtype, &b.shape, n_bytes).map_err(|why| bad_input(format!("{file}: {why}")))?;
        found.push((b.name.clone(), data));
    }
    match rest.first() {
        None => Ok(found),
        Some((name, _)) if names.is_empty() => {
            Err(bad_input(format!("--constant {name}: the workload has no constants (const= says which it has)")))
        }
        Some((name, _)) => {
            Err(bad_input(format!("--constant {name}: the workload's constants are {}", names.join(", "))))
        }
    }
}

/// The elements of a file, which is numpy's or nothing but elements.
fn elements(file: Vec<u8>, dtype: DType, shape: &[i64], n_bytes: usize) -> Result<Bytes, String> {
    let file = Bytes::from(file);
    if file.starts_with(b"\x93NUMPY") {
        let tensor = read_npy(&file).map_err(|error| error.to_string())?;
        let is_shape = tensor.shape().iter().map(|extent| *extent as i64).eq(shape.iter().copied());
        if !is_shape || tensor.dtype().to_string() != dtype.name() {
            return Err(format!("it holds {} (give {}{shape:?})", tensor.ty(), dtype.name()));
        }
        return Ok(tensor.bytes().clone());
    }
    if file.len() != n_bytes {
        let given = count(file.len() as u64, "byte");
        return Err(format!("it has {given} (give a .npy file, or the {n_bytes} bytes of {}{shape:?})", dtype.name()));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_named_after_workloads() {
        let name = name_of("matmul:m=64,n=64,k=64,const=b,epilogue=bias+relu");
        assert_eq!(name, "matmul_m64_n64_k64_constb_epiloguebias_relu");
    }

    #[test]
    fn elements_come_bare_or_in_numpys_files() {
        let bare: Vec<u8> = (0..8).collect();
        let read = |file: Vec<u8>| elements(file, DType::F32, &[2], 8);
        assert_eq!(read(bare.clone()).unwrap(), bare);
        let with = |dtype: &str, shape: &str| {
            let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}");
            let mut file = b"\x93NUMPY\x01\x00".to_vec();
            file.extend((header.len() as u16).to_le_bytes());
            file.extend(header.as_bytes());
            file.extend(&bare);
            read(file)
        };
        assert_eq!(with("<f4", "(2,)").unwrap(), bare);
        assert_eq!(with("<f8", "(1,)").unwrap_err(), "it holds f64[1] (give f32[2])");
        assert_eq!(with("<f4", "(1, 2)").unwrap_err(), "it holds f32[1,2] (give f32[2])");
        assert!(read(b"\x93NUMPY\x01\x00\xff".to_vec()).is_err());
        assert!(read(vec![0; 7]).unwrap_err().contains("7 bytes"));
    }
}
