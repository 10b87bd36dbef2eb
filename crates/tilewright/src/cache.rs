//! On-disk cache of code, schedules and estimates.
//!
//! An entry is a file whose name is a hash of all that determines its content: the kind of content, the build
//! of this program and of LLVM, and the request. It holds a checksum of name and content. An entry that is
//! damaged, truncated, another user's or unreadable counts as missing, and failures to write are ignored: the
//! cache affects nothing but time. Several processes may use it at once.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, DirBuilder, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::process::geteuid;
use tilewright_codegen::{CompileError, Compiler, llvm_version};
use tilewright_device::device::WorkerCommand;
use tilewright_device::gpu::{KeptCode, OpenCl, missing_sources};
use tilewright_device::host;
use tilewright_ir::{Program, lower, text};
use tilewright_runtime::{AnyModel, Code};
use tilewright_search::BoxError;

use crate::error::{Error, Setting};
use crate::file::write_passing;
use crate::version::BUILD;

/// Beginning of each entry.
const MAGIC: &[u8] = b"tilewright cache 1\n";
/// Bytes of a checksum.
const SUM_BYTES: usize = 16;
/// Maximum size of an entry in bytes; a larger file is not an entry of ours.
const MOST_ENTRY_BYTES: u64 = 64 << 20;
/// Size of code in bytes from which on it is not cached, so that its entry stays within the maximum.
const MOST_CODE_BYTES: usize = MOST_ENTRY_BYTES as usize - 4096;
/// Total size in bytes beyond which the least recently used entries are removed: code of some thousand
/// kernels.
const MOST_BYTES: u64 = 256 << 20;
/// Share of [`MOST_BYTES`] that remains after a removal.
const KEPT: f64 = 0.8;
/// Maximum lag of an entry's recorded time of use.
const LAG: Duration = Duration::from_secs(3600);

/// Cache in a folder, or a disabled one.
#[derive(Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    /// Additional entries held in memory, by name.
    given: BTreeMap<String, Vec<u8>>,
    /// Entries used so far, if they are collected.
    used: Option<Mutex<BTreeMap<String, Vec<u8>>>>,
    most_bytes: u64,
    has_grown: AtomicBool,
    /// Error that kept an entry from being written.
    refused: Mutex<Option<io::Error>>,
    /// Number of entries found that were damaged or another user's.
    n_damaged: AtomicUsize,
}

/// Disabled cache.
pub static NO_CACHE: Cache = Cache::within(None, 0);

impl Cache {
    const fn within(folder: Option<PathBuf>, most_bytes: u64) -> Cache {
        Cache {
            folder,
            given: BTreeMap::new(),
            used: None,
            most_bytes,
            has_grown: AtomicBool::new(false),
            refused: Mutex::new(None),
            n_damaged: AtomicUsize::new(0),
        }
    }

    /// Opens the cache in a folder, which is created if missing; by default in the user's cache folder. The
    /// cache is disabled if the user has no such folder.
    ///
    /// # Errors
    /// Bad input if the given folder is not a folder or cannot be created.
    pub fn new(given: Option<&Path>) -> Result<Cache, Error> {
        let absolute = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|p| p.is_absolute());
        let of_user = || absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
        if given.is_some_and(|folder| folder.as_os_str().is_empty()) {
            return Err(Error::setting(Setting::Cache, ": the name of a folder is empty (give a path)"));
        }
        let folder = given.map_or_else(|| Some(of_user()?.join("tilewright")), |given| Some(given.to_owned()));
        let make = |folder: &Path| DirBuilder::new().recursive(true).mode(0o700).create(folder);
        match (folder.as_deref().map(make), given) {
            (Some(Err(error)), Some(given)) => {
                let hint = "give a folder that can be written";
                Err(Error::setting(Setting::Cache, format!(" {}: {error} ({hint})", given.display())))
            }
            (Some(Ok(())), _) => Ok(Cache::within(folder, MOST_BYTES)),
            (Some(Err(_)) | None, _) => Ok(Cache::within(None, 0)),
        }
    }

    /// Cache in the same folder that also collects the entries it returns or stores, for moving them
    /// elsewhere.
    #[must_use]
    pub fn collecting(&self) -> Cache {
        let mut cache = Cache::within(self.folder.clone(), self.most_bytes);
        cache.used = Some(Mutex::default());
        cache
    }

    /// Collected entries as bytes, for [`Cache::with_entries`].
    pub fn entries(&self) -> Vec<u8> {
        let used = self.used.as_ref().map(|used| used.lock().unwrap_or_else(PoisonError::into_inner));
        let mut bytes = Vec::new();
        for (name, content) in used.iter().flat_map(|used| used.iter()) {
            for part in [name.as_bytes(), content] {
                bytes.extend((part.len() as u64).to_le_bytes());
                bytes.extend_from_slice(part);
            }
        }
        bytes
    }

    /// Cache in the same folder with additional entries. Their code is executed unchecked, so their source
    /// must be trusted. Invalid bytes yield no entries.
    #[must_use]
    pub fn with_entries(&self, mut bytes: &[u8]) -> Cache {
        let mut part = || {
            let (len, rest) = bytes.split_first_chunk()?;
            let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
            bytes = rest;
            Some(part.to_vec())
        };
        let mut cache = Cache::within(self.folder.clone(), self.most_bytes);
        cache.given = std::iter::from_fn(|| Some((String::from_utf8(part()?).ok()?, part()?))).collect();
        cache
    }

    /// Whether entries are collected.
    pub fn is_collecting(&self) -> bool {
        self.used.is_some()
    }

    /// Whether lookups have any effect: there is a folder or a given entry, or entries are collected.
    fn is_asked(&self) -> bool {
        self.folder.is_some() || self.used.is_some() || !self.given.is_empty()
    }

    /// Reason why entries could not be written, if any.
    pub fn refusal(&self) -> Option<String> {
        let refused = self.refused.lock().ok()?;
        let folder = self.folder.as_ref()?.display();
        refused.as_ref().map(|error| format!("compiled kernels could not be kept in {folder}: {error}"))
    }

    /// Message about damaged entries found since the last call, if any.
    pub fn take_damage(&self) -> Option<String> {
        let folder = self.folder.as_ref()?.display();
        match self.n_damaged.swap(0, Ordering::Relaxed) {
            0 => None,
            n => Some(format!("{n} compiled kernels in {folder} were damaged or another user's (they are made anew)")),
        }
    }

    /// Code of a scheduled program, from the cache or by [`Code::compile`]. With `determined_by`, a text that
    /// determines the program, [`Cache::known_code`] finds the code later. Code that is shared with others is
    /// not kept.
    ///
    /// # Errors
    /// As [`Code::compile`].
    pub fn code(
        &self,
        compiler: &mut Compiler,
        program: Program,
        determined_by: Option<&str>,
    ) -> Result<Code, CompileError> {
        if !self.is_asked() {
            return Code::compile(compiler, lower::lower(&program));
        }
        let Some(llvm) = llvm_version() else { return self.quick_code(compiler, &program, determined_by) };
        let arguments = format!("{:?}", compiler.arguments());
        let program = lower::lower(&program);
        let name = name("object", &[&llvm, compiler.target(), &arguments, &program]);
        if let Some(object) = self.get(&name)
            && let Ok(code) = Code::load(compiler, program.clone(), &object)
        {
            return Ok(code);
        }
        let object = compiler.object(&program)?;
        self.put(&name, &object);
        Code::load(compiler, program, &object)
    }

    /// Cached code of the program that a text determines. It is found without the program, which takes longer
    /// to read than the code takes to load. Only code of our own back end is kept in this form.
    pub fn known_code(&self, compiler: &Compiler, determined_by: &str) -> Option<Code> {
        match self.is_asked() && llvm_version().is_none() {
            true => self.kept_code(compiler, determined_by),
            false => None,
        }
    }

    fn kept_code(&self, compiler: &Compiler, determined_by: &str) -> Option<Code> {
        code_of(compiler, &self.get(&quick_name(compiler, determined_by))?)
    }

    /// Code of a scheduled program, from the cache or by our own back end.
    fn quick_code(
        &self,
        compiler: &mut Compiler,
        program: &Program,
        determined_by: Option<&str>,
    ) -> Result<Code, CompileError> {
        let text = program.to_string();
        let determined_by = determined_by.unwrap_or(&text);
        if let Some(known) = self.kept_code(compiler, determined_by) {
            return Ok(known);
        }
        let lowered = lower::lower(program);
        // If our back end cannot compile the program, the error is the compiler's.
        let Ok(made) = compiler.quick_object(&lowered) else { return Code::compile(compiler, lowered) };
        let header = header_of(program);
        let head = header.to_string();
        if text::parse(&text).is_err() || text::parse(&head).is_err() {
            return Code::compile(compiler, lowered);
        }
        let len = |text: &str| (text.len() as u64).to_le_bytes();
        let parts = [&len(&head)[..], head.as_bytes(), &len(&text), text.as_bytes(), &made];
        self.put(&quick_name(compiler, determined_by), &parts.concat());
        Code::load_quick(compiler, header, text, &made)
    }

    /// Program determined by these texts in their order, from the cache or from `make`.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn program<E>(
        &self,
        determined_by: &[&dyn Display],
        make: impl FnOnce() -> Result<Program, E>,
    ) -> Result<Program, E> {
        if !self.is_asked() {
            return make();
        }
        let name = name("program", determined_by);
        let known = self.get(&name).and_then(|bytes| text::parse(std::str::from_utf8(&bytes).ok()?).ok());
        if let Some(program) = known {
            return Ok(program);
        }
        let program = make()?;
        let text = program.to_string();
        match text::parse(&text) {
            // Returned in the form that later runs read, so that their code is the same.
            Ok(again) if again.to_string() == text => {
                self.put(&name, text.as_bytes());
                Ok(again)
            }
            _ => Ok(program),
        }
    }

    /// Text determined by these texts, from the cache or from `make`.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn text<E>(
        &self,
        determined_by: &[&dyn Display],
        make: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        if !self.is_asked() {
            return make();
        }
        let name = name("text", determined_by);
        if let Some(known) = self.get(&name).and_then(|bytes| String::from_utf8(bytes).ok()) {
            return Ok(known);
        }
        make().inspect(|text| self.put(&name, text.as_bytes()))
    }

    /// Number determined by these texts, from the cache or from `make`; `None` if `make` returns none.
    pub fn number(&self, determined_by: &[&dyn Display], make: impl FnOnce() -> Option<f64>) -> Option<f64> {
        if !self.is_asked() {
            return make();
        }
        let name = name("number", determined_by);
        let known = self.get(&name).and_then(|bytes| bytes.try_into().ok());
        known.map(f64::from_le_bytes).or_else(|| {
            let number = make();
            number.inspect(|number| self.put(&name, &number.to_le_bytes()))
        })
    }

    /// Compiles the kernels of a model for an OpenCL device that are not cached yet, in processes on all
    /// CPUs, because some drivers compile one program at a time per process. Kernels that fail are compiled
    /// again by the process that runs the model.
    pub fn fill(&self, model: &AnyModel, worker: &WorkerCommand) {
        let (Some(folder), AnyModel::Gpu(model)) = (&self.folder, model) else { return };
        let mut sources = missing_sources(model, self).unwrap_or_default();
        let n_processes = host::allowed_cpus().len().min(sources.len());
        if n_processes < 2 {
            return;
        }
        // Shares of about equal work, judged by the lengths.
        sources.sort_by_key(|source| Reverse(source.len()));
        let share = |at: usize| sources.iter().skip(at).step_by(n_processes).collect::<Vec<_>>();
        let started = (0..n_processes).filter_map(|at| {
            let mut command = process::Command::new(&worker.program);
            command.args(&worker.arguments).arg(GPU_CODE).arg(folder).arg(model.target.to_string());
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().ok()?;
            let input = child.stdin.take().expect("invariant: it is piped");
            // If the process has died, its share is compiled when the model runs.
            let _ = serde_json::to_writer(input, &share(at));
            Some(child)
        });
        let started: Vec<process::Child> = started.collect();
        for mut child in started {
            let _ = child.wait();
        }
        self.has_grown.store(true, Ordering::Relaxed);
    }

    /// Content of an entry; `None` if it is missing or damaged.
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        if let Some(content) = self.given.get(name) {
            return Some(content.clone());
        }
        let file = File::open(self.folder.as_ref()?.join(name)).ok()?;
        let content = Self::content(&file, name);
        self.n_damaged.fetch_add(usize::from(content.is_none()), Ordering::Relaxed);
        self.collect(name, content.as_deref()?);
        content
    }

    /// Collects a used entry, if entries are collected.
    fn collect(&self, name: &str, content: &[u8]) {
        if let Some(used) = &self.used {
            used.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), content.to_vec());
        }
    }

    /// Content of an entry's file; `None` unless it is intact and only the user can write it.
    fn content(file: &File, name: &str) -> Option<Vec<u8>> {
        let about = file.metadata().ok()?;
        // The code is executed, so no other user may have been able to write it.
        let is_ours = about.is_file() && about.uid() == geteuid().as_raw() && about.mode() & 0o022 == 0;
        if !is_ours || about.len() > MOST_ENTRY_BYTES {
            return None;
        }
        let mut bytes = Vec::with_capacity(about.len() as usize);
        file.take(MOST_ENTRY_BYTES).read_to_end(&mut bytes).ok()?;
        let (sum, content) = bytes.strip_prefix(MAGIC)?.split_at_checked(SUM_BYTES)?;
        if sum != checksum(name, content) {
            return None;
        }
        let now = SystemTime::now();
        if about.modified().is_ok_and(|used| now.duration_since(used).is_ok_and(|age| age > LAG)) {
            // If this is not permitted, the entry is removed earlier than it should be.
            let _ = file.set_modified(now);
        }
        bytes.drain(..MAGIC.len() + SUM_BYTES);
        Some(bytes)
    }

    fn put(&self, name: &str, content: &[u8]) {
        self.collect(name, content);
        let Some(folder) = &self.folder else { return };
        let sum = checksum(name, content);
        match write_passing(&folder.join(name), &[MAGIC, &sum[..], content].concat()) {
            Ok(()) => self.has_grown.store(true, Ordering::Relaxed),
            Err(error) => {
                if let Ok(mut refused) = self.refused.lock() {
                    refused.get_or_insert(error);
                }
            }
        }
    }

    /// Removes the least recently used entries if the total size exceeds the maximum.
    fn evict(&self) -> Option<()> {
        let files = fs::read_dir(self.folder.as_ref()?).ok()?.filter_map(|entry| {
            let entry = entry.ok()?;
            let about = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            let is_entry = KINDS.iter().any(|kind| entry.file_name().to_string_lossy().starts_with(kind));
            is_entry.then(|| Some((about.modified().ok()?, about.blocks() * 512, entry.path())))?
        });
        let mut files: Vec<(SystemTime, u64, PathBuf)> = files.collect();
        let mut bytes: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        if bytes > self.most_bytes {
            files.sort();
            let kept = (KEPT * self.most_bytes as f64) as u64;
            for (_, of_file, path) in files {
                if bytes <= kept {
                    break;
                }
                // Another process may have removed it already.
                let _ = fs::remove_file(path);
                bytes -= of_file;
            }
        }
        Some(())
    }
}

/// Machine code of GPUs.
impl KeptCode for Cache {
    fn find(&self, determined_by: &[&dyn Display]) -> Option<Vec<u8>> {
        self.folder.as_ref()?;
        self.get(&name("binary", determined_by))
    }

    fn keep(&self, determined_by: &[&dyn Display], code: &[u8]) {
        if self.folder.is_some() && code.len() < MOST_CODE_BYTES {
            self.put(&name("binary", determined_by), code);
        }
    }
}

/// Option of a worker that compiles a device's code into a cache: see [`compile_into`].
pub(crate) const GPU_CODE: &str = "--gpu-code";

/// Compiles OpenCL C, a JSON list of texts, for the device of a target, into the cache in a folder. A text
/// that the compiler refuses is left out.
///
/// # Errors
/// If the folder, the target or the list is invalid, or there is no such device.
pub(crate) fn compile_into(folder: &Path, target: &str, sources: impl Read) -> Result<(), BoxError> {
    let cache = Cache::new(Some(folder))?;
    let driver = OpenCl::new(&target.parse()?)?;
    let sources: Vec<String> = serde_json::from_reader(sources)?;
    for source in &sources {
        let _ = driver.kept(source, &cache);
    }
    Ok(())
}

impl Drop for Cache {
    fn drop(&mut self) {
        if *self.has_grown.get_mut() {
            self.evict();
        }
    }
}

/// Prefixes of the entries' names.
const KINDS: [&str; 6] = ["object-", "quick-", "program-", "text-", "number-", "binary-"];

/// Name of an entry of this kind whose content is determined by these values.
fn name(kind: &str, determined_by: &[&dyn Display]) -> String {
    let texts: Vec<String> = determined_by.iter().map(ToString::to_string).collect();
    let when_changed = when_changed();
    let parts = [kind, BUILD, &when_changed].into_iter().chain(texts.iter().map(String::as_str));
    let parts: Vec<&[u8]> = parts.map(str::as_bytes).collect();
    let digits: String = hash(&parts).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{kind}-{digits}")
}

/// Name of code of our own back end.
fn quick_name(compiler: &Compiler, determined_by: &str) -> String {
    name("quick", &[compiler.target(), &format!("{:?}", compiler.arguments()), &determined_by])
}

/// Program without its statements: its name, buffers, sizes, and the variables that sizes use.
fn header_of(program: &Program) -> Program {
    let (name, buffers, loops) = (program.name.clone(), program.buffers.clone(), program.loops.clone());
    let sizes = program.sizes.clone();
    Program { name, buffers, loops, sizes, prepare: Vec::new(), body: Vec::new(), finish: Vec::new() }
}

/// Loads code of our own back end from an entry's content: the header and the text of its scheduled program,
/// each preceded by its length, and the machine code.
fn code_of(compiler: &Compiler, mut bytes: &[u8]) -> Option<Code> {
    let mut part = || {
        let (len, rest) = bytes.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        bytes = rest;
        std::str::from_utf8(part).ok()
    };
    let (header, text) = (text::parse(part()?).ok()?, part()?.to_owned());
    Code::load_quick(compiler, header, text, bytes).ok()
}

/// Build time of this program if no commit identifies its sources; otherwise empty.
fn when_changed() -> String {
    let changed = || std::env::current_exe().ok()?.metadata().ok()?.modified().ok();
    if BUILD.contains(".d") { format!("{:?}", changed()) } else { String::new() }
}

/// Hash of 128 bits, so that collisions do not occur in practice. If a compiler's standard library hashes
/// differently, the cache starts empty.
fn hash(parts: &[&[u8]]) -> [u8; SUM_BYTES] {
    let mut sum = [0; SUM_BYTES];
    for (salt, half) in sum.chunks_exact_mut(8).enumerate() {
        let mut hasher = DefaultHasher::new();
        hasher.write_usize(salt);
        for part in parts {
            hasher.write_usize(part.len());
            hasher.write(part);
        }
        half.copy_from_slice(&hasher.finish().to_le_bytes());
    }
    sum
}

/// Checksum of an entry, which guards against accidental damage only. A session reads megabytes of entries,
/// and [`hash`] would take longer than everything else. Each step multiplies a word into 128 bits and joins
/// the halves, so that its high bits reach the low bits of the sum as well.
fn checksum(name: &str, content: &[u8]) -> [u8; SUM_BYTES] {
    const FACTORS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f];
    let begin = hash(&[name.as_bytes(), &content.len().to_le_bytes()]);
    let (halves, _) = begin.as_chunks::<8>();
    let mut halves = [0, 1].map(|at| u64::from_le_bytes(halves[at]));
    let mut add = |word: [u8; 8]| {
        for (half, factor) in halves.iter_mut().zip(FACTORS) {
            let product = u128::from(*half ^ u64::from_le_bytes(word)) * u128::from(factor);
            *half = product as u64 ^ (product >> 64) as u64;
        }
    };
    let (words, rest) = content.as_chunks::<8>();
    words.iter().copied().for_each(&mut add);
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    add(last);
    let mut sum = [0; SUM_BYTES];
    for (bytes, half) in sum.chunks_exact_mut(8).zip(halves) {
        bytes.copy_from_slice(&half.to_le_bytes());
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;
    use tilewright_codegen::{ArgumentAlign, Interface};
    use tilewright_runtime::{Context, Model, SharedPool};

    fn entries(folder: &Path) -> Vec<PathBuf> {
        let mut entries: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries
    }

    fn program(at: usize) -> Program {
        let text = format!(
            "program \"p\"\nbuffer X: f32[16] global output\nloops i\nrun {{ for i in 16 {{ X[i] = {at}.0 }} }}"
        );
        text::parse(&text).unwrap()
    }

    /// Looks up a program of the cache, making it if it is missing; returns whether it was there.
    fn asked(cache: &Cache, at: usize) -> bool {
        let mut made = false;
        let found = cache.program::<Infallible>(&[&at], || {
            made = true;
            Ok(program(at))
        });
        assert_eq!(found.unwrap().to_string(), program(at).to_string());
        !made
    }

    #[test]
    fn what_was_made_is_found_by_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = [0; 2].map(|_| Cache::new(Some(&folder.path().join("a/b"))).unwrap());
        assert_eq!(
            [asked(&first, 1), asked(&second, 1), asked(&second, 2), asked(&first, 2)],
            [false, true, false, true]
        );
        assert_eq!(first.number(&[&"x"], || Some(0.1)), Some(0.1));
        assert_eq!(second.number(&[&"x"], || unreachable!("it is known")), Some(0.1));
        assert_eq!(second.number(&[&"y"], || None), None);
        assert!(first.refusal().is_none() && second.refusal().is_none());
        assert!(!asked(&NO_CACHE, 1));
    }

    #[test]
    fn entries_go_elsewhere() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path())).unwrap();
        asked(&cache, 1);
        for here in [&cache, &NO_CACHE] {
            let collecting = here.collecting();
            let (is_known, _) = (asked(&collecting, 1), asked(&collecting, 2));
            assert_eq!(is_known, here.folder.is_some());
            let bytes = collecting.entries();
            let there = NO_CACHE.with_entries(&bytes);
            assert_eq!([1, 2, 3].map(|at| asked(&there, at)), [true, true, false]);
            for len in (0..bytes.len()).step_by(7) {
                asked(&NO_CACHE.with_entries(&bytes[..len]), 1);
            }
        }
    }

    #[test]
    fn code_of_gpus_is_kept_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = [0; 2].map(|_| Cache::new(Some(folder.path())).unwrap());
        let of: [&dyn Display; 2] = [&"driver 1", &"source"];
        assert_eq!(first.find(&of), None);
        first.keep(&of, b"code");
        assert_eq!(second.find(&of).as_deref(), Some(&b"code"[..]));
        assert_eq!(second.find(&[&"driver 2", &"source"]), None);
        // An entry above the maximum size is not written.
        second.keep(&[&"large"], &vec![0; MOST_CODE_BYTES]);
        assert_eq!(entries(folder.path()).len(), 1);
        let entry = entries(folder.path()).remove(0);
        fs::write(&entry, &fs::read(&entry).unwrap()[..30]).unwrap();
        assert_eq!(second.find(&of), None);
        NO_CACHE.keep(&of, b"code");
        assert_eq!(NO_CACHE.find(&of), None);
    }

    #[test]
    fn a_checksum_shows_every_change() {
        let content: Vec<u8> = (1..62).collect();
        let sum = checksum("a", &content);
        let mut seen = std::collections::HashSet::from([sum, checksum("b", &content)]);
        for at in 0..content.len() {
            for bit in 0..8 {
                let mut changed = content.clone();
                changed[at] ^= 1 << bit;
                assert!(seen.insert(checksum("a", &changed)), "bit {bit} of byte {at}");
            }
            assert!(seen.insert(checksum("a", &content[..at])), "the first {at} bytes");
            let swapped = [&content[at..], &content[..at]].concat();
            assert!(at == 0 || seen.insert(checksum("a", &swapped)), "turned by {at} bytes");
        }
        let zeros = [0; 40];
        assert!((0..40).all(|len| seen.insert(checksum("a", &zeros[..len])) || len == 0));
    }

    #[test]
    fn what_is_damaged_or_anothers_is_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path())).unwrap();
        asked(&cache, 1);
        let entry = entries(folder.path()).remove(0);
        let whole = fs::read(&entry).unwrap();
        let mut damaged: Vec<Vec<u8>> = (0..whole.len()).step_by(7).map(|len| whole[..len].to_vec()).collect();
        damaged.extend((0..whole.len()).step_by(5).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            bytes
        }));
        damaged.push([&whole[..], b"more"].concat());
        for bytes in damaged {
            fs::write(&entry, &bytes).unwrap();
            assert!(!asked(&cache, 1), "{} bytes", bytes.len());
            assert!(cache.take_damage().is_some_and(|line| line.starts_with("1 compiled kernels")));
            assert!(asked(&cache, 1), "it is whole again");
            assert_eq!(cache.take_damage(), None);
        }
        // Content of another key, under this entry's name.
        asked(&cache, 2);
        let other = entries(folder.path()).into_iter().find(|path| *path != entry).unwrap();
        fs::copy(&other, &entry).unwrap();
        assert!(!asked(&cache, 1));
        for mode in [0o666, 0o622] {
            fs::set_permissions(&entry, fs::Permissions::from_mode(mode)).unwrap();
            assert!(!asked(&cache, 1), "others may write it");
        }
        fs::remove_file(&entry).unwrap();
        fs::create_dir(&entry).unwrap();
        assert!(!asked(&cache, 1) && cache.refusal().is_some_and(|why| why.contains("could not be kept")));
    }

    #[test]
    fn code_of_our_own_back_end_is_kept_for_such_machines() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path())).unwrap();
        let host = host::target();
        let code = |target: &tilewright_ir::Target| {
            let mut compiler = Compiler::for_arguments(target.clone(), ArgumentAlign::Elements);
            cache.quick_code(&mut compiler, &program(1), None).unwrap()
        };
        let result = |code: Code| {
            let model = Model::new(code.plan(&|_| None), vec![code]).unwrap();
            let (model, mut output) = (Arc::new(model), [0; 64]);
            Context::new(&model, &SharedPool::new(1).unwrap()).unwrap().run(&[], &mut [&mut output]).unwrap();
            output
        };
        let first = result(code(&host));
        assert_eq!(first, [[0, 0, 0x80, 0x3f]; 16].concat()[..]);
        let Some(entry) = entries(folder.path()).pop() else { return println!("skipped: no back end for {host}") };
        let whole = fs::read(&entry).unwrap();
        fs::write(&entry, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(result(code(&host)), first);
        assert_eq!(fs::read(&entry).unwrap(), whole, "it is made anew");
        assert_eq!(result(code(&host)), first);
        let other = tilewright_ir::Target { l3_bytes: host.l3_bytes + 1, ..host.clone() };
        assert_eq!((result(code(&other)), entries(folder.path()).len()), (first, 2));
    }

    #[test]
    fn code_is_found_by_what_determines_its_program() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path())).unwrap();
        let mut compiler = Compiler::for_arguments(host::target(), ArgumentAlign::Elements);
        let open = "program \"open\"\nbuffer X: f32[8,4] global output\nloops steps, i, j\n\
            size rows = 2*steps + 2 in 4\nrun { for i in 2*steps + 2 { for j in 4 { X[i,j] = 3.0 } } }";
        for (by, program) in [("the first", program(1)), ("the second", text::parse(open).unwrap())] {
            assert!(cache.kept_code(&compiler, by).is_none());
            let made = cache.quick_code(&mut compiler, &program, Some(by)).unwrap();
            let Some(known) = cache.kept_code(&compiler, by) else {
                return println!("skipped: no back end for {}", compiler.target());
            };
            let lowered = lower::lower(&program);
            let interface = Interface::new(&lowered, compiler.target(), 1, Some(Compiler::PREFIX)).unwrap();
            assert_eq!([known.interface(), made.interface()], [&interface; 2]);
            assert_eq!(known.program().to_string(), lowered.to_string());
            let text = program.to_string();
            assert!(cache.kept_code(&compiler, &text).is_none(), "the program is not what its code is kept by");
        }
        for entry in entries(folder.path()) {
            fs::write(&entry, &fs::read(&entry).unwrap()[..200]).unwrap();
        }
        assert!(cache.kept_code(&compiler, "the first").is_none());
    }

    #[test]
    fn entries_that_were_not_used_for_longest_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let new = |most_bytes| Cache::within(Some(folder.path().to_owned()), most_bytes);
        let day = |at: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 * (1 + at));
        let cache = new(u64::MAX);
        for at in 0..10 {
            asked(&cache, at);
            let path = folder.path().join(name("program", &[&at]));
            File::open(path).unwrap().set_modified(day(at as u64)).unwrap();
        }
        // Used again, so that it stays.
        assert!(asked(&cache, 0));
        fs::write(folder.path().join("something of the user's"), [0; 100_000]).unwrap();
        drop(cache);
        assert_eq!(entries(folder.path()).len(), 11);
        // Each kind of entry makes room.
        let kinds = KINDS.map(|kind| folder.path().join(format!("{kind}of long ago")));
        for path in &kinds {
            fs::write(path, "").unwrap();
            File::open(path).unwrap().set_modified(day(0)).unwrap();
        }
        let bytes = fs::metadata(folder.path().join(name("program", &[&0]))).unwrap().blocks() * 512;
        let cache = new(5 * bytes);
        asked(&cache, 10);
        drop(cache);
        let cache = new(u64::MAX);
        let there: Vec<usize> = (0..11).filter(|at| asked(&cache, *at)).collect();
        assert_eq!(there, [0, 8, 9, 10]);
        assert!(kinds.iter().all(|path| !path.exists()));
        assert!(folder.path().join("something of the user's").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_does_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(
            Cache::new(Some(&file)).is_err_and(|error| error.to_string().contains("give a folder that can be written"))
        );
        let gone = folder.path().join("gone");
        let cache = Cache::new(Some(&gone)).unwrap();
        fs::remove_dir(&gone).unwrap();
        assert!(!asked(&cache, 1) && !asked(&cache, 1));
        assert!(cache.refusal().is_some());
    }
}
