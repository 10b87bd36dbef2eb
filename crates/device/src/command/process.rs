//! Users' programs as processes: each under a keeper, pinned to CPUs, with time and memory limits.

use crate::command::keeper::{now_ns, stand_between, tell_time};
use crate::command::metric::Metric;
use crate::command::program_run::{ProgramEnd, ProgramRun};
use crate::command::template::Invocation;
use crate::kernel::WorkResult;
use crate::spawn::{Spawned, Stream, beside_streams, command};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// Maximum bytes kept of a candidate's output: its end.
pub const MOST_OUTPUT: usize = 16 << 20;
/// Interval between checks for cancellation of a run.
const LOOK: Duration = Duration::from_millis(20);

/// Settings of a program's run.
pub struct ProcessSetting<'a> {
    /// CPUs that it is pinned to; any if empty.
    pub cpus: &'a [usize],
    /// Memory limit of each of its processes, in bytes of data.
    pub memory_bytes: u64,
    /// Timeout.
    pub timeout: Duration,
    /// Contents of its standard input, if any.
    pub input: Option<&'a [u8]>,
    /// Maximum bytes kept of its output: the end.
    pub most_output: usize,
    /// Metrics whose patterns are matched in output that is not kept.
    pub metrics: Vec<&'a Metric>,
    /// Whether to cancel the run.
    pub is_over: &'a dyn Fn() -> bool,
}

/// Runs a program to its end, and kills processes that it leaves behind.
pub fn run(invocation: &Invocation, setting: &ProcessSetting) -> ProgramRun {
    let started = setting.input.map(input_file).transpose();
    let started = started.map(|file| file.map_or(Stream::Null, |file| Stream::File(file.into())));
    match started.and_then(|input| Process::start(&invocation.words, &invocation.variables, input, setting)) {
        Ok(mut process) => {
            let given_up = process.until(setting, &mut |_| false);
            process.end(given_up)
        }
        Err(error) => ProgramRun::not_started(&invocation.words, error),
    }
}

/// Running program. Dropping this ends it and everything that it started.
struct Process {
    /// Keeper of the process.
    child: Spawned,
    /// Pipe on which the keeper reports the end of the program.
    told: File,
    /// Standard output and standard error.
    pipes: [Pipe; 2],
    start_ns: u64,
}

impl Process {
    fn start(
        words: &[String],
        variables: &[(String, String)],
        input: Stream,
        setting: &ProcessSetting,
    ) -> io::Result<Process> {
        let mut command = command(words)?;
        command.envs(variables.iter().cloned());
        let (told, tells) = io::pipe()?;
        let tells = beside_streams(tells.into())?;
        let tells_fd = tells.as_raw_fd();
        let cpus = cpu_set(setting.cpus);
        let memory = libc::rlimit { rlim_cur: setting.memory_bytes, rlim_max: setting.memory_bytes };
        // SAFETY: only async-signal-safe calls are made.
        let mut child = unsafe {
            Spawned::start(&command, [input, Stream::Piped, Stream::Piped], || {
                libc::setpgid(0, 0);
                stand_between(tells_fd)?;
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGXFSZ, libc::SIGXCPU] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                libc::setrlimit(libc::RLIMIT_DATA, &memory);
                if let Some(cpus) = &cpus {
                    libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), cpus);
                }
                // The program may end before this process has learned that it began.
                tell_time(tells_fd);
                Ok(())
            })
        }?;
        let mut told = File::from(OwnedFd::from(told));
        let start_ns = read_time(&mut told)?;
        let pipes = [child.stdout.take(), child.stderr.take()].map(|file| Pipe::new(file, setting));
        Ok(Process { child, told, pipes, start_ns })
    }

    /// Waits until the program ends or has written enough; returns the reason to stop waiting earlier, if
    /// any.
    fn until(&mut self, setting: &ProcessSetting, is_enough: &mut dyn FnMut(&[u8]) -> bool) -> Option<ProgramEnd> {
        loop {
            let left = setting.timeout.saturating_sub(self.elapsed());
            if left.is_zero() {
                return Some(ProgramEnd::TimedOut);
            } else if (setting.is_over)() {
                return Some(ProgramEnd::GivenUp);
            }
            let has_ended = wait(&mut self.pipes, &self.told, left.min(LOOK));
            if is_enough(&self.pipes[0].text) || has_ended {
                return None;
            }
        }
    }

    fn elapsed(&self) -> Duration {
        Duration::from_nanos(now_ns().saturating_sub(self.start_ns))
    }

    /// Ends the run; `given_up` is the reason if it was stopped early.
    fn end(mut self, given_up: Option<ProgramEnd>) -> ProgramRun {
        let mut wall_s = self.elapsed().as_secs_f64();
        let (status, cpu_s) = self.stop();
        // Ending the processes that it left behind took time, too.
        if given_up.is_none()
            && let Ok(end_ns) = read_time(&mut self.told)
        {
            wall_s = Duration::from_nanos(end_ns.saturating_sub(self.start_ns)).as_secs_f64();
        }
        self.pipes.iter_mut().for_each(Pipe::drain);
        let [output, errors] = self.pipes.each_mut().map(|pipe| std::mem::take(&mut pipe.text));
        let found_before = self.pipes.each_mut().map(|pipe| std::mem::take(&mut pipe.found_before));
        ProgramRun { end: given_up.unwrap_or(ProgramEnd::Ended(status)), wall_s, cpu_s, output, errors, found_before }
    }

    /// Ends the program and everything that it started.
    fn stop(&mut self) -> (ExitStatus, f64) {
        self.child.signal(libc::SIGTERM);
        // Where nobody is told how children end, as where SIGCHLD is ignored, it counts as a success.
        self.child.wait().unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Worker process of ours that performs one job after the other: it reads each as words in a line of JSON,
/// and replies with a [`WorkResult`].
pub struct Helper {
    process: Process,
    requests: File,
    n_taken: u64,
}

/// Result of a job of a [`Helper`].
pub struct HelperResult {
    /// Result as of a process that performed only this job.
    pub run: ProgramRun,
    /// Whether a failure may be caused by an earlier job.
    pub is_doubtful: bool,
    /// Process, if it can take further jobs.
    pub helper: Option<Helper>,
}

impl Helper {
    /// Starts a helper by this command line.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn start(words: &[String], setting: &ProcessSetting) -> io::Result<Helper> {
        let mut process = Process::start(words, &[], Stream::Piped, setting)?;
        let requests = process.child.stdin.take().expect("invariant: it was asked for");
        Ok(Helper { process, requests, n_taken: 0 })
    }

    /// Performs the job that these words describe.
    pub fn take(mut self, words: &[String], setting: &ProcessSetting) -> HelperResult {
        self.process.start_ns = now_ns();
        self.process.pipes.iter_mut().for_each(|pipe| {
            pipe.drain();
            pipe.text.clear();
        });
        let mut line = serde_json::to_vec(words).expect("invariant: words have a form in JSON");
        line.push(b'\n');
        // If the helper has ended, this is noticed below.
        let _ = self.requests.write_all(&line);
        let mut done = None;
        let given_up = self.process.until(setting, &mut |text| {
            done = WorkResult::at_end_of(text);
            done.is_some()
        });
        let (Some((done, at)), None) = (done, &given_up) else {
            return HelperResult { is_doubtful: self.n_taken > 0, run: self.process.end(given_up), helper: None };
        };
        let wall_s = self.process.elapsed().as_secs_f64();
        self.process.pipes[1].drain();
        let [mut output, errors] = self.process.pipes.each_mut().map(|pipe| std::mem::take(&mut pipe.text));
        output.truncate(at);
        let end = ProgramEnd::Ended(ExitStatus::from_raw(done.status));
        let run = ProgramRun { end, wall_s, cpu_s: 0.0, output, errors, found_before: [Vec::new(), Vec::new()] };
        self.n_taken += 1;
        HelperResult { run, is_doubtful: done.is_doubtful, helper: done.stays.then_some(self) }
    }
}

/// Creates a file with these bytes, to be read from its beginning.
fn input_file(bytes: &[u8]) -> io::Result<File> {
    use std::io::Seek;
    let mut file = crate::data::anonymous_file(c"tilewright-input")?;
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

fn cpu_set(cpus: &[usize]) -> Option<libc::cpu_set_t> {
    if cpus.is_empty() {
        return None;
    }
    // SAFETY: a set is plain data, and the numbers are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize).for_each(|&cpu| libc::CPU_SET(cpu, &mut set));
        Some(set)
    }
}

/// Reads a time written by the keeper.
fn read_time(told: &mut File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    told.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Waits for output, or for the end of a program, which is told on `told`; returns whether it has ended.
fn wait(pipes: &mut [Pipe; 2], told: &File, at_most: Duration) -> bool {
    let entry = |fd: Option<libc::c_int>| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 };
    let mut entries = [entry(pipes[0].fd()), entry(pipes[1].fd()), entry(Some(told.as_raw_fd()))];
    // SAFETY: the entries are plain data, and their number is passed with them.
    unsafe { libc::poll(entries.as_mut_ptr(), 3, at_most.as_millis().max(1) as libc::c_int) };
    for (pipe, entry) in pipes.iter_mut().zip(&entries) {
        if entry.revents != 0 {
            pipe.read();
        }
    }
    entries[2].revents != 0
}

/// Pipe of a process, and the end of the output that was read from it.
struct Pipe {
    file: Option<File>,
    text: Vec<u8>,
    most: usize,
    metrics: Vec<Metric>,
    /// Match of each metric in the output that is not kept.
    found_before: Vec<Option<String>>,
}

impl Pipe {
    fn new(file: Option<File>, setting: &ProcessSetting) -> Pipe {
        if let Some(file) = &file {
            // SAFETY: the call takes plain numbers and an open descriptor.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        }
        let metrics: Vec<Metric> = setting.metrics.iter().map(|metric| (*metric).clone()).collect();
        let found_before = vec![None; metrics.len()];
        Pipe { file, text: Vec::new(), most: setting.most_output, metrics, found_before }
    }

    fn fd(&self) -> Option<libc::c_int> {
        self.file.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Reads available output; returns whether there was any.
    fn read(&mut self) -> bool {
        let mut buffer = [0; 1 << 16];
        let Some(file) = &mut self.file else { return false };
        match file.read(&mut buffer) {
            Ok(n @ 1..) => {
                self.text.extend_from_slice(&buffer[..n]);
                if self.text.len() / 2 > self.most {
                    self.cut();
                }
                true
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            _ => {
                self.file = None;
                false
            }
        }
    }

    /// Keeps only the end of the output, from the beginning of a line if possible, and the metrics of the
    /// rest.
    fn cut(&mut self) {
        let most = self.text.len() - self.most;
        let line = self.text[..most].iter().rposition(|&byte| byte == b'\n').map_or(most, |at| at + 1);
        for (metric, before) in self.metrics.iter().zip(&mut self.found_before) {
            *before = metric.last_match(&self.text[..line]).or(before.take());
        }
        self.text.drain(..line);
    }

    /// Reads the available output without waiting for more.
    fn drain(&mut self) {
        let mut n = 0;
        while n < 64 && self.read() {
            n += 1;
        }
    }
}
