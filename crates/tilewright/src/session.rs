//! Session: a database of records, and the measurement of candidates by workers.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tilewright_device::device::WorkerCommand;
use tilewright_device::{Caches, host, kernel};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;

use crate::best::{Best, target_name};
use crate::cache::{GPU_CODE, compile_into};
use crate::choice::Records;
use crate::database::Database;
use crate::error::Error;
use crate::kernel::Kernel;
use crate::observer::Observer;
use crate::request::Request;
use crate::run::run;
use crate::run::together::{TunedMany, run_together};
use crate::subject::kernel::{BUILD, CALL};
use crate::subject::own::best_own;
use crate::subject::workload::Elsewhere;
use crate::tuned::Tuned;

/// Argument with which a program is started as a worker.
const WORKER: &str = "--tilewright-worker";

/// Serves as a worker and exits, if this process was started as one. A program that tunes must call this
/// first, as its workers are processes of the same program.
pub fn serve_if_worker() {
    let first = std::env::args_os().nth(1);
    if first.as_deref() == Some(OsStr::new(WORKER)) {
        let more: Vec<_> = std::env::args_os().skip(2).collect();
        std::process::exit(i32::from(!serve(&more)));
    }
    #[cfg(feature = "peers")]
    if first.as_deref() == Some(OsStr::new(tilewright_peers::WORKER_SUBCOMMAND)) {
        std::process::exit(i32::from(tilewright_peers::worker_main().is_err()));
    }
}

/// Serves as a worker, by the arguments after the one that marks a worker process; returns whether it
/// succeeded. `--kernel JOB LIBRARY` calls one of the user's kernels, `--kernel-build` builds it; without a
/// library, the worker serves any number of kernels. `--gpu-code FOLDER TARGET` compiles programs from
/// standard input into a cache.
pub fn serve(arguments: &[OsString]) -> bool {
    let write = |path: &Path, bytes: &[u8]| crate::file::write_whole(path, |out| out.write_all(bytes));
    match arguments {
        [option, job] if option == CALL || option == BUILD => {
            kernel::stay(Path::new(job), if option == BUILD { Some(&write) } else { None })
        }
        [option, job, library, more @ ..] if option == CALL || option == BUILD => {
            let (job, library) = (Path::new(job), Path::new(library));
            let more: Vec<String> = more.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            if option == CALL { kernel::serve(job, library, &more) } else { kernel::build(job, library, &more, &write) }
        }
        [option, folder, target] if option == GPU_CODE => {
            compile_into(Path::new(folder), &target.to_string_lossy(), std::io::stdin().lock()).is_ok()
        }
        _ => tilewright_device::worker::serve().is_ok(),
    }
}

/// Command that starts workers of a library loaded by any program: a Python interpreter (this program, if it
/// is one) that loads the library and calls its function `function`, which calls [`serve`].
///
/// # Errors
/// If there is no such file.
pub fn worker_of_library(library: &Path, function: &str) -> std::io::Result<WorkerCommand> {
    let library = std::fs::canonicalize(library)?;
    let is_python = |program: &Path| program.file_name().is_some_and(|name| name.as_bytes().starts_with(b"python"));
    let program = std::env::current_exe().ok().filter(|program| is_python(program));
    let load = "import ctypes, sys; sys.exit(getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])())";
    let library = library.to_str().ok_or_else(|| std::io::Error::other("its name is no text"))?;
    let arguments = ["-I", "-S", "-c", load, library, function].map(str::to_owned);
    Ok(WorkerCommand { program: program.unwrap_or_else(|| "python3".into()), arguments: arguments.into() })
}

/// Session: a database of records, and the command that starts workers.
#[derive(Debug, Clone)]
pub struct Session {
    database: Database,
    worker: WorkerCommand,
}

impl Session {
    /// Makes a session whose workers are started by this command.
    pub fn new(database: Database, worker: WorkerCommand) -> Session {
        Session { database, worker }
    }

    /// Opens a session that keeps its records in this file and uses this program as its workers: see
    /// [`serve_if_worker`].
    ///
    /// # Errors
    /// If the name is empty, the path of this program is unknown, or this process is itself a worker,
    /// whose program did not begin with [`serve_if_worker`].
    pub fn open(database: impl AsRef<Path>) -> Result<Session, Error> {
        if std::env::args_os().nth(1).as_deref() == Some(OsStr::new(WORKER)) {
            // Without this, each worker would start workers of its own, without end.
            return Err(Error::failed(
                "this process is a worker, but opens a session: call `tilewright::serve_if_worker()` first in `main`",
            ));
        }
        let program = std::env::current_exe()
            .map_err(|error| Error::failed("the path of this program is unknown").because(error))?;
        let worker = WorkerCommand { program, arguments: vec![WORKER.to_owned()] };
        Ok(Session::new(Database::new(Some(database.as_ref()))?, worker))
    }

    /// Database of the records.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// Records of the database, for choosing kernels; entries of shared stores are verified by workers first.
    ///
    /// # Errors
    /// As [`Database::records`].
    pub fn records(&self) -> Result<Records, Error> {
        Ok(self.database.records()?.checked_by(self.worker.clone()))
    }

    /// Command that starts a worker.
    pub fn worker(&self) -> &WorkerCommand {
        &self.worker
    }

    /// Executes a request: searches, verifies, records, and races the best candidates. When `stop` is raised
    /// the run ends early but orderly; the run raises it itself if records cannot be written.
    ///
    /// # Errors
    /// If the request does not fit, the database cannot be written, or workers do not start.
    pub fn run(&self, request: &Request, stop: &AtomicBool, observer: &dyn Observer) -> Result<Tuned, Error> {
        run(request, None, &self.database, &self.worker, stop, observer)
    }

    /// Executes a request for a workload, as [`Session::run`] does, with candidates measured elsewhere, such
    /// as on a fleet.
    ///
    /// # Errors
    /// As [`Session::run`], and if the measuring side cannot be reached.
    pub fn run_at<'a>(
        &self,
        place: Elsewhere<'a>,
        request: &'a Request,
        stop: &AtomicBool,
        observer: &dyn Observer,
    ) -> Result<Tuned, Error> {
        run(request, Some(place), &self.database, &self.worker, stop, observer)
    }

    /// Executes a request to its end, without an observer.
    ///
    /// # Errors
    /// As [`Session::run`], and if records are lost.
    pub fn tune(&self, request: &Request) -> Result<Tuned, Error> {
        let mut tuned = self.run(request, &AtomicBool::new(false), &())?;
        tuned.lost.take().map_or(Ok(tuned), Err)
    }

    /// Finds the best record of a user's command or kernel on a machine, by its name in records; `None` if
    /// nothing is recorded.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn best_own(&self, name: &str, target: &Target, threads: usize) -> Result<Option<Best>, Error> {
        best_own(&self.database, name, target, threads)
    }

    /// Tunes workloads together, such as those of a model, in a time that includes starts and races. Each
    /// comes with its weight: the number of times that the whole program runs it. First each has a turn,
    /// however long all of these take; then each turn of some 2 s goes to the workload from which the total
    /// is expected to gain most. Workloads with records continue from them.
    ///
    /// The time and the trials of a request limit what is spent on its workload.
    /// [`Note::Turn`](crate::Note::Turn) reports the workload of a turn, [`Observer::turned`] the progress of
    /// the total.
    ///
    /// # Errors
    /// As [`Session::run`], and if a workload is repeated, a request is for none, or a weight is not above 0.
    pub fn run_together(
        &self,
        tasks: &[(Request, f64)],
        time: Duration,
        stop: &AtomicBool,
        observer: &dyn Observer,
    ) -> Result<TunedMany, Error> {
        run_together(tasks, time, &self.database, &self.worker, stop, observer)
    }

    /// Finds the best recorded result of a workload for this machine and this many threads; `None` if nothing
    /// is recorded.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn best(&self, workload: &Workload, threads: usize) -> Result<Option<Best>, Error> {
        self.best_on(workload, &host::target(), threads, Caches::Warm)
    }

    /// Finds the best recorded result, as [`Session::best`] does, for some target.
    ///
    /// # Errors
    /// As [`Session::best`].
    pub fn best_on(
        &self,
        workload: &Workload,
        target: &Target,
        threads: usize,
        caches: Caches,
    ) -> Result<Option<Best>, Error> {
        Ok(self.database.records()?.best(workload, &target_name(target, caches), threads, None)?.0)
    }

    /// Compiles the best recorded kernel of a workload into this process.
    ///
    /// # Errors
    /// If nothing is recorded, or it cannot be compiled.
    pub fn kernel(&self, workload: &Workload, threads: usize) -> Result<Kernel, Error> {
        let best = self.best(workload, threads)?.ok_or_else(|| {
            let name = self.database.name();
            Error::input(format!("nothing is recorded of {workload} with {threads} threads in {name} (tune it first)"))
        })?;
        Kernel::new(workload, &best, threads)
    }
}
