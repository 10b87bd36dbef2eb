//! Start of child processes that are set up by code of ours before their program runs, without the handlers
//! of `pthread_atfork`. `Command` of the standard library runs them where it has such code (`pre_exec`):
//! those of OpenBLAS wait for threads that compute, for ever at times, and end the threads of a caller's
//! NumPy.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString, c_char, c_int, c_long};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr;

unsafe extern "C" {
    static mut environ: *const *const c_char;
}

/// Standard stream of a child.
pub enum Stream {
    /// `/dev/null`.
    Null,
    /// Pipe to or from this process.
    Piped,
    /// Open file.
    File(OwnedFd),
}

impl Stream {
    /// Opens the child's end, and this process's end of a pipe.
    fn open(self, is_input: bool) -> io::Result<(OwnedFd, Option<File>)> {
        let (child, own) = match self {
            Stream::Null => (nothing()?, None),
            Stream::File(file) => (file, None),
            Stream::Piped => {
                let (reader, writer) = io::pipe()?;
                let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
                let (child, own) = if is_input { (reader, writer) } else { (writer, reader) };
                (child, Some(File::from(own)))
            }
        };
        Ok((beside_streams(child)?, own))
    }
}

/// Child process. Dropping this neither ends it nor waits for it.
#[derive(Debug)]
pub struct Spawned {
    id: libc::pid_t,
    /// Result of [`Spawned::wait`], or the number of its error.
    ended: Option<Result<(ExitStatus, f64), c_int>>,
    /// Pipe to its standard input, if asked for.
    pub stdin: Option<File>,
    /// Pipe from its standard output, if asked for.
    pub stdout: Option<File>,
    /// Pipe from its standard error, if asked for.
    pub stderr: Option<File>,
}

impl Spawned {
    /// Starts the program of a command, with the command's arguments, environment (unless it is cleared) and
    /// folder, and with these standard streams; all else that the command holds is not used. `set_up` runs in
    /// the child, after everything else but the program itself. As with the standard library, the mask of
    /// signals is this process's, and SIGPIPE ends the program.
    ///
    /// # Errors
    /// If the system refuses the process, `set_up` fails, or the program cannot be run.
    ///
    /// # Safety
    /// `set_up` makes only async-signal-safe calls, and neither allocates nor panics.
    pub unsafe fn start(
        command: &Command,
        streams: [Stream; 3],
        mut set_up: impl FnMut() -> io::Result<()>,
    ) -> io::Result<Spawned> {
        let image = Image::new(command)?;
        let pointers = [pointers(&image.arguments), pointers(&image.environment)];
        let [stdin, stdout, stderr] = streams;
        let ((child_in, stdin), (child_out, stdout)) = (stdin.open(true)?, stdout.open(false)?);
        let (child_err, stderr) = stderr.open(false)?;
        let fds = [&child_in, &child_out, &child_err].map(AsRawFd::as_raw_fd);
        let (mut refusal, reports) = io::pipe()?;
        let reports = beside_streams(reports.into())?;
        // SAFETY: the child makes only async-signal-safe calls, and does not return from here.
        let id = unsafe {
            let id = fork();
            if id == 0 {
                let error = image.run(&pointers, fds, &mut set_up);
                let errno = error.raw_os_error().unwrap_or(libc::EINVAL).to_ne_bytes();
                libc::write(reports.as_raw_fd(), errno.as_ptr().cast(), errno.len());
                libc::_exit(1);
            }
            id
        };
        if id < 0 {
            return Err(io::Error::last_os_error());
        }
        // The child's are the only ones from here on.
        drop((reports, child_in, child_out, child_err));
        let mut spawned = Spawned { id, ended: None, stdin, stdout, stderr };
        let mut errno = [0; size_of::<c_int>()];
        // The pipe is closed when the program runs.
        if refusal.read_exact(&mut errno).is_err() {
            return Ok(spawned);
        }
        let _ = spawned.wait();
        Err(io::Error::from_raw_os_error(c_int::from_ne_bytes(errno)))
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.id.cast_unsigned()
    }

    /// Sends a signal, unless the process has been waited for.
    pub fn signal(&self, signal: c_int) {
        if self.ended.is_none() {
            // SAFETY: the call takes plain numbers; the process is a child that has not been waited for, so
            // that its id is not reused.
            unsafe { libc::kill(self.id, signal) };
        }
    }

    /// Waits for the process to end; returns its status, and the seconds of CPU time that it and those that
    /// it waited for took.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn wait(&mut self) -> io::Result<(ExitStatus, f64)> {
        self.ended.get_or_insert_with(|| end_of(self.id)).map_err(io::Error::from_raw_os_error)
    }
}

/// Waits for a child to end; returns its status and the seconds of CPU time that it took, or the number of
/// the error.
fn end_of(id: libc::pid_t) -> Result<(ExitStatus, f64), c_int> {
    let mut status = 0;
    // SAFETY: the structures are plain data that the call writes.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        while libc::wait4(id, &raw mut status, 0, &raw mut usage) < 0 {
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) | None => {}
                Some(errno) => return Err(errno),
            }
        }
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok((ExitStatus::from_raw(status), seconds(usage.ru_utime) + seconds(usage.ru_stime)))
}

/// Copies this process as `fork` does, without the handlers that others have registered with the C library;
/// returns 0 in the copy, whose only thread is the calling one.
///
/// # Safety
/// As after `fork` in a process with threads, the copy may make only async-signal-safe calls until it runs a
/// program.
pub unsafe fn fork() -> libc::pid_t {
    let none: c_long = 0;
    // SAFETY: without flags, the copy shares no memory with this process.
    unsafe { libc::syscall(libc::SYS_clone, c_long::from(libc::SIGCHLD), none, none, none, none) as libc::pid_t }
}

/// Command of a program and its arguments.
///
/// # Errors
/// If one of them holds a zero byte: a `Command` has replaced it when it is asked for it.
pub fn command(words: &[String]) -> io::Result<Command> {
    if words.iter().any(|word| word.contains('\0')) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "nul byte found in provided data"));
    }
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    Ok(command)
}

/// Opens `/dev/null`, to be read and written.
fn nothing() -> io::Result<OwnedFd> {
    // SAFETY: the path ends with a zero, and nothing else owns the descriptor.
    unsafe {
        match libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) {
            -1 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Moves a descriptor to a number at which no standard stream will be.
pub fn beside_streams(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > libc::STDERR_FILENO { Ok(fd) } else { fd.try_clone() }
}

/// Program as the system takes it, prepared before the process exists.
struct Image {
    arguments: Vec<CString>,
    environment: Vec<CString>,
    folder: Option<CString>,
}

impl Image {
    fn new(command: &Command) -> io::Result<Image> {
        let text = |text: &OsStr| CString::new(text.as_bytes());
        let arguments = [command.get_program()].into_iter().chain(command.get_args()).map(text);
        let mut variables: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => variables.insert(name.to_owned(), value.to_owned()),
                None => variables.remove(name),
            };
        }
        let variable = |(name, value): (OsString, OsString)| {
            CString::new([name.into_vec(), b"=".to_vec(), value.into_vec()].concat())
        };
        Ok(Image {
            arguments: arguments.collect::<Result<_, _>>()?,
            environment: variables.into_iter().map(variable).collect::<Result<_, _>>()?,
            folder: command.get_current_dir().map(|folder| text(folder.as_os_str())).transpose()?,
        })
    }

    /// Makes this process run the program; returns the reason if it does not.
    ///
    /// # Safety
    /// The process is a copy made by [`fork`], and `pointers` are those to the arguments and the environment.
    unsafe fn run(
        &self,
        pointers: &[Vec<*const c_char>; 2],
        fds: [RawFd; 3],
        set_up: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Error {
        // SAFETY: the calls take plain numbers, and texts and lists that end with a zero; none of them
        // allocates or locks.
        unsafe {
            for (stream, fd) in (0..).zip(fds) {
                if libc::dup2(fd, stream) < 0 {
                    return io::Error::last_os_error();
                }
            }
            if let Some(folder) = &self.folder
                && libc::chdir(folder.as_ptr()) < 0
            {
                return io::Error::last_os_error();
            }
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            if let Err(error) = set_up() {
                return error;
            }
            // The program is looked for on the path that it gets.
            environ = pointers[1].as_ptr();
            libc::execvp(pointers[0][0], pointers[0].as_ptr());
            io::Error::last_os_error()
        }
    }
}

/// Pointers to texts, with a null pointer behind them.
fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChildProcess;
    use crate::command::{CommandTemplate, Metric, sample};
    use crate::cuda::PtxAssembler;
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        /// Number of times that a handler of `pthread_atfork` ran in this thread.
        static N_HANDLED: Cell<u32> = const { Cell::new(0) };
    }

    /// Output of a program, once it has ended.
    fn output(program: &Command) -> io::Result<String> {
        // SAFETY: nothing is set up.
        let mut child = unsafe { Spawned::start(program, [Stream::Null, Stream::Piped, Stream::Null], || Ok(())) }?;
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text)?;
        assert!(child.wait()?.0.success());
        Ok(text)
    }

    #[test]
    fn no_way_to_start_a_process_runs_handlers() {
        extern "C" fn prepare() {
            N_HANDLED.set(N_HANDLED.get() + 1);
        }
        // SAFETY: the handler only counts, and the child only exits.
        unsafe {
            assert_eq!(libc::pthread_atfork(Some(prepare), None, None), 0);
            let child = libc::fork();
            if child == 0 {
                libc::_exit(0);
            }
            libc::waitpid(child, ptr::null_mut(), 0);
        }
        assert_eq!(N_HANDLED.get(), 1, "the handler is registered");
        drop(ChildProcess::start(Command::new("cat"), |_: Option<u32>| true).unwrap());
        let invocation = CommandTemplate::words("true", &[]).unwrap().with(&|_| String::new());
        sample(&invocation, "true", &Metric::Wall, &[], Duration::from_secs(20), &|| false).unwrap();
        assert!(crate::runner::look("false").is_err());
        let refuses = PtxAssembler::Ptxas { path: "false".into(), version: String::new() };
        assert_eq!(refuses.assemble(b"", "sm_80").unwrap_err().to_string(), "ptxas: exit status: 1");
        assert_eq!(N_HANDLED.get(), 1);
    }

    #[test]
    fn commands_are_those_of_the_standard_library() {
        let words = ["sh", "-c", "echo $0 $1 $A ${HOME-none}; pwd", "x y", "z"].map(str::to_owned);
        let mut shell = command(&words).unwrap();
        shell.env("A", "b").env_remove("HOME").current_dir("/usr");
        assert_eq!(output(&shell).unwrap(), "x y z b none\n/usr\n");
        // As `Command` does: on the path of the child, and a script without `#!` by a shell.
        let folder = crate::folder::Folder::new("tilewright-spawn").unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "echo $1").unwrap();
        let refused = output(&Command::new(&script)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&script, mode).unwrap();
        assert_eq!(output(Command::new("script").arg("1").env("PATH", folder.path())).unwrap(), "1\n");
        for (program, kind) in [("no such program", io::ErrorKind::NotFound), ("a\0b", io::ErrorKind::InvalidInput)] {
            let refused = command(&[program.to_owned()]).and_then(|program| output(&program));
            assert_eq!(refused.unwrap_err().kind(), kind, "{program:?}");
        }
    }
}
