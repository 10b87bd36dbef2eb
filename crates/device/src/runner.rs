//! Runners: remote devices without a compiler, on which a C program, the [`SOURCE`], runs kernels. It is
//! started by a command of the user, such as `ssh pi ./tw-run`, and receives requests in frames on its
//! standard input.

use crate::child::describe;
use crate::command::{CommandTemplate, TemplateError};
use crate::spawn::{Spawned, Stream, command};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GENERIC};
use tilewright_search::Conditions;

/// C source of the runner, which any C compiler can build.
pub const SOURCE: &str = include_str!("runner/tw-run.c");

/// Version of the protocol.
const PROTOCOL: &str = "1";
/// Timeout for the runner's first message; starting it, perhaps over a network, counts too.
const HELLO: Duration = Duration::from_secs(30);
/// Timeout for every other answer except that to a run.
pub(crate) const ANSWER: Duration = Duration::from_secs(60);
/// Maximum size of a valid reply in bytes.
const MOST_BYTES: u64 = 1 << 36;
/// Size of a frame's header in bytes.
const HEAD: usize = 16;

/// Request to a runner; the numbers are those in the C source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Ask {
    Hello = 1,
    Limit,
    Buffer,
    Upload,
    Fill,
    Download,
    Code,
    Run,
    State,
}

/// Reason why a runner did not serve a request.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// An invalid command.
    #[error("`{command}` is not a command: {reason}")]
    Command {
        /// The command.
        command: String,
        /// Reason.
        reason: String,
    },
    /// Process that ended or never started.
    #[error("the runner is gone: {0}")]
    Gone(String),
    /// Timeout of a reply.
    #[error("the runner did not answer within {} s", .0.as_secs_f64())]
    Silent(Duration),
    /// Kernel killed by a signal.
    #[error("{}", describe(ExitStatus::from_raw(*.0)))]
    Signal(i32),
    /// Kernel that did not end in time.
    #[error("its runs did not come to an end in time")]
    Late,
    /// Kernel that wrote outside its buffers.
    #[error("it wrote outside its buffers")]
    Fence,
    /// Lack of memory, or a request beyond the limit.
    #[error("the device has no memory for it, or not that much may be used")]
    NoMemory,
    /// Refusal by the runner.
    #[error("the runner refuses: {0}")]
    Refused(String),
    /// Program that is not a runner, or one of another version.
    #[error("the command starts no runner of this version: {0} (compile what `tilewright runner` writes)")]
    NotThis(String),
}

impl RunnerError {
    /// Whether its process has ended, or cannot be used any more.
    pub(crate) fn is_end(&self) -> bool {
        !matches!(self, RunnerError::Fence | RunnerError::NoMemory | RunnerError::Refused(_))
    }
}

/// Greeting of a runner: its device.
#[derive(Debug, Clone)]
pub struct Hello {
    /// Target of the device, with the CPU's name if known.
    pub target: Target,
    /// CPU features beyond the family's baseline, by LLVM's names.
    pub features: Vec<String>,
    /// CPU as described by its system.
    pub cpu: String,
    /// Number of CPUs that it may use.
    pub cores: usize,
    /// Memory of the machine in bytes.
    pub memory_bytes: u64,
    /// Whether it is emulated, so that its times are meaningless.
    pub is_emulated: bool,
    pub(crate) page_bytes: u64,
    pub(crate) code_at: u64,
    pub(crate) code_bytes: u64,
    pub(crate) functions: HashMap<String, u64>,
}

impl Hello {
    /// Parses the lines of a runner's greeting.
    fn parse(text: &str) -> Result<Hello, RunnerError> {
        let values: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
        let get = |key: &str| values.get(key).copied().unwrap_or_default();
        let missing = |key: &str| RunnerError::NotThis(format!("it does not say its {key}"));
        let number = |key: &str| get(key).parse::<u64>().map_err(|_| missing(key));
        if get("protocol") != PROTOCOL {
            return Err(RunnerError::NotThis(format!("it speaks protocol {}", get("protocol"))));
        }
        let features: Vec<String> = get("features").split_whitespace().map(str::to_owned).collect();
        let arch = Arch::ALL.iter().find(|(_, name)| *name == get("arch"));
        let arch = arch.map(|(arch, _)| *arch).filter(|arch| matches!(arch, Arch::X86_64 | Arch::Aarch64));
        let arch = arch.ok_or_else(|| RunnerError::NotThis(format!("there is no code for {}", get("arch"))))?;
        let target = target_of(arch, get("implementer"), get("part"), &features);
        let functions = text.lines().filter_map(|line| line.split_once('@'));
        let functions = functions.filter_map(|(name, at)| Some((name.to_owned(), at.parse().ok()?))).collect();
        let page_bytes = number("page")?;
        if !page_bytes.is_power_of_two() {
            return Err(missing("page"));
        }
        let cpu = if get("cpu").is_empty() { target.cpu.clone() } else { get("cpu").to_owned() };
        Ok(Hello {
            target,
            features,
            cpu,
            cores: (number("cores")? as usize).max(1),
            memory_bytes: number("memory")?,
            is_emulated: get("emulated") == "1",
            page_bytes,
            code_at: number("code")?,
            code_bytes: number("code_bytes")?,
            functions,
        })
    }

    /// Reason why code for a target does not run on the device; `None` if it does.
    pub fn obstacle(&self, target: &Target) -> Option<String> {
        if target.arch != self.target.arch {
            return Some(format!("it is {}, and not {}", self.target.arch.name(), target.arch.name()));
        }
        let needed = target.features.split(',').filter_map(|feature| feature.strip_prefix('+'));
        let needed = needed.filter(|_| target.arch == Arch::Aarch64);
        let lacking = needed.filter(|feature| !self.features.iter().any(|has| has == feature));
        let lacking: Vec<&str> = lacking.collect();
        (!lacking.is_empty()).then(|| format!("it lacks {}", lacking.join(", ")))
    }
}

/// Parses the lines in which a runner reports its machine's conditions.
pub(crate) fn conditions(lines: &[u8]) -> Conditions {
    let text = String::from_utf8_lossy(lines);
    let values: HashMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let thousandth = |key: &str| values.get(key)?.parse::<f64>().ok().filter(|n| n.is_finite()).map(|n| n / 1e3);
    Conditions { device: None, frequency_mhz: thousandth("khz"), temperature_c: thousandth("millicelsius") }
}

/// Arm's implementer code.
const ARM: &str = "0x41";

/// Predefined target of a CPU, or the best one that it supports.
fn target_of(arch: Arch, implementer: &str, part: &str, features: &[String]) -> Target {
    let has = |names: &[&str]| names.iter().all(|name| features.iter().any(|feature| feature == name));
    let generic = match arch {
        Arch::X86_64 if has(&["avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512cd"]) => "x86-64-v4",
        Arch::X86_64 if has(&["avx2", "fma", "bmi2"]) => "x86-64-v3",
        Arch::X86_64 => "x86-64",
        Arch::Aarch64 | Arch::Gpu(_) => "aarch64",
    };
    let known = GENERIC.iter().find(|generic| implementer == ARM && generic.part.is_some_and(|known| known == part));
    known.map_or_else(|| Target::named(generic).expect("every generic name is known"), |known| known.target())
}

/// Process of a runner.
pub(crate) struct RunnerProcess {
    child: Spawned,
    stdin: File,
    answers: Receiver<io::Result<RunnerAnswer>>,
    /// Last line printed by the runner, or by the command that starts it.
    said: Arc<Mutex<String>>,
    hello: Hello,
}

/// Reply: a status, a number, and a payload.
type RunnerAnswer = (u32, u32, Vec<u8>);

impl RunnerProcess {
    /// Starts a runner by a command, without a shell.
    ///
    /// # Errors
    /// [`RunnerError`] if it does not start, or is not a runner.
    pub fn start(command: &str) -> Result<RunnerProcess, RunnerError> {
        let unfit = |reason: String| RunnerError::Command { command: command.to_owned(), reason };
        let words = CommandTemplate::words(command, &[]).map_err(|why| match why {
            TemplateError::Shell { found, .. } => {
                unfit(format!("`{found}` is for a shell (quote it, or give sh -c '…')"))
            }
            why => unfit(why.to_string()),
        })?;
        let words = words.with(&|_| String::new()).words;
        let mut child = spawn(&words).map_err(|why| unfit(why.to_string()))?;
        let stdin = child.stdin.take().expect("standard input is piped");
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (stdout, stderr) = (stdout.expect("it is piped"), stderr.expect("it is piped"));
        let said = Arc::<Mutex<String>>::default();
        let saying = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok).filter(|line| !line.trim().is_empty()) {
                *saying.lock().unwrap_or_else(PoisonError::into_inner) = line.trim().to_owned();
            }
        });
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            while sender.send(read_answer(&mut stdout)).is_ok() {}
        });
        let hello = Hello {
            target: Target::named("aarch64").expect("it is known"),
            features: Vec::new(),
            cpu: String::new(),
            cores: 1,
            memory_bytes: 0,
            is_emulated: false,
            page_bytes: 4096,
            code_at: 0,
            code_bytes: 0,
            functions: HashMap::new(),
        };
        let mut runner = RunnerProcess { child, stdin, answers, said, hello };
        let text = runner.ask(Ask::Hello, 0, &[], HELLO)?;
        runner.hello = Hello::parse(&String::from_utf8_lossy(&text))?;
        Ok(runner)
    }

    /// Greeting of the runner.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Sends a request, and returns the payload of the reply.
    ///
    /// # Errors
    /// [`RunnerError`]; if that [is the end](RunnerError::is_end), the runner has to be restarted.
    pub fn ask(&mut self, what: Ask, number: u32, payload: &[u8], within: Duration) -> Result<Vec<u8>, RunnerError> {
        let head = [(what as u32).to_le_bytes(), number.to_le_bytes()].concat();
        let head = [head, (payload.len() as u64).to_le_bytes().to_vec()].concat();
        let sent = self.stdin.write_all(&head).and_then(|()| self.stdin.write_all(payload));
        // Its last output says more than the broken pipe.
        let _ = sent.and_then(|()| self.stdin.flush());
        let (status, number, bytes) = match self.answers.recv_timeout(within) {
            Ok(Ok(answer)) => answer,
            Err(RecvTimeoutError::Timeout) => return Err(RunnerError::Silent(within)),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => return Err(RunnerError::Gone(self.last_words())),
        };
        match status {
            0 => Ok(bytes),
            1 => Err(RunnerError::Signal(number.cast_signed())),
            2 => Err(RunnerError::Late),
            3 => Err(RunnerError::Fence),
            4 => Err(RunnerError::NoMemory),
            5 => Err(RunnerError::Refused(String::from_utf8_lossy(&bytes).into_owned())),
            _ => Err(RunnerError::NotThis("what it answers is not understood".to_owned())),
        }
    }

    /// Describes the end of its process, and its last output.
    fn last_words(&mut self) -> String {
        self.child.signal(libc::SIGKILL);
        let status = self.child.wait().map_or_else(|unknown| unknown.to_string(), |(status, _)| describe(status));
        // Its output is still on the way.
        std::thread::sleep(Duration::from_millis(20));
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if said.is_empty() { status } else { format!("{status}: {said}") }
    }
}

impl Drop for RunnerProcess {
    fn drop(&mut self) {
        self.child.signal(libc::SIGKILL);
        let _ = self.child.wait();
    }
}

fn read_answer(from: &mut impl Read) -> io::Result<RunnerAnswer> {
    let mut head = [0; HEAD];
    from.read_exact(&mut head)?;
    let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let n_bytes = u64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
    if n_bytes > MOST_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    // Allocates only as much memory as is received, not as the header claims.
    if from.take(n_bytes).read_to_end(&mut bytes)? as u64 != n_bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((word(0), word(4), bytes))
}

/// Starts a process that ends with this one, and leaves Ctrl-C to this one.
fn spawn(words: &[String]) -> io::Result<Spawned> {
    // SAFETY: only async-signal-safe calls are made.
    unsafe {
        Spawned::start(&command(words)?, [Stream::Piped, Stream::Piped, Stream::Piped], || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::signal(libc::SIGINT, libc::SIG_IGN);
            Ok(())
        })
    }
}

/// Starts a runner, and returns its greeting.
///
/// # Errors
/// [`RunnerError`] if it does not start, or is not a runner.
pub fn look(command: &str) -> Result<Hello, RunnerError> {
    Ok(RunnerProcess::start(command)?.hello.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use std::process::Command;

    /// Runner compiled with this compiler, started by a command that may have more words; `None` if either is
    /// not installed.
    fn made(compiler: &str, emulator: &str) -> Option<(Folder, String)> {
        for tool in [compiler, emulator] {
            if !tool.is_empty() && Command::new(tool).arg("--version").output().is_err() {
                println!("skipped: no `{tool}`");
                return None;
            }
        }
        let folder = Folder::new("tilewright-runner").unwrap();
        let source = folder.path().join("tw-run.c");
        std::fs::write(&source, SOURCE).unwrap();
        let program = folder.path().join("tw-run");
        let options = ["-O2", "-static", "-pthread", "-o"];
        let made = Command::new(compiler).args(options).arg(&program).arg(&source).arg("-lm").output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let command = format!("{emulator} {}", program.display());
        Some((folder, command))
    }

    /// Runs machine code with a buffer, a page of scratch memory, and 0.2 s.
    fn end_of(runner: &mut RunnerProcess, code: &[u8]) -> Result<Vec<u8>, RunnerError> {
        let page = runner.hello.page_bytes as usize;
        let mut payload = (page as u64).to_le_bytes().to_vec();
        payload.extend(code);
        payload.resize(8 + page, 0);
        runner.ask(Ask::Code, 0, &payload, ANSWER)?;
        for number in [0, 1] {
            runner.ask(Ask::Buffer, number, &4096u64.to_le_bytes(), ANSWER)?;
        }
        let mut payload = Vec::new();
        [0, 200_000_000, 0].iter().for_each(|n: &u64| payload.extend(n.to_le_bytes()));
        [1, 2, 3, 1, 2, 0, 0, 1].iter().for_each(|n: &u32| payload.extend(n.to_le_bytes()));
        runner.ask(Ask::Run, 0, &payload, ANSWER)
    }

    /// Checks how code ends: a return, a store to address 0, an invalid instruction, an infinite loop, and a
    /// store before the first byte of the buffer.
    fn check(compiler: &str, emulator: &str, codes: [&[u8]; 5]) {
        let Some((_folder, command)) = made(compiler, emulator) else { return };
        let ends = codes.map(|code| end_of(&mut RunnerProcess::start(&command).unwrap(), code));
        let [returned, stored, illegal, forever, outside] = &ends;
        assert!(matches!(returned, Ok(samples) if samples.len() == 24), "{returned:?}");
        assert!(matches!(stored, Err(RunnerError::Signal(libc::SIGSEGV))), "{stored:?}");
        assert!(matches!(illegal, Err(RunnerError::Signal(libc::SIGILL))), "{illegal:?}");
        assert!(matches!(forever, Err(RunnerError::Late)), "{forever:?}");
        assert!(matches!(outside, Err(RunnerError::Fence)), "{outside:?}");
        assert_eq!(ends.map(|end| end.is_err_and(|why| why.is_end())), [false, true, true, true, false]);
    }

    #[test]
    fn what_ends_a_kernel_is_told_here() {
        if cfg!(not(target_arch = "x86_64")) {
            return println!("skipped: this is machine code for x86-64");
        }
        let stored = [0x31, 0xC0, 0x88, 0x00, 0xC3];
        let outside = [0x48, 0x8B, 0x07, 0xC6, 0x40, 0xFF, 0x00, 0xC3];
        check("cc", "", [&[0xC3], &stored, &[0x0F, 0x0B], &[0xEB, 0xFE], &outside]);
        let Some((_folder, command)) = made("cc", "") else { return };
        // Division by zero.
        let divided =
            end_of(&mut RunnerProcess::start(&command).unwrap(), &[0x31, 0xC9, 0x31, 0xC0, 0x31, 0xD2, 0xF7, 0xF1]);
        assert!(matches!(divided, Err(RunnerError::Signal(libc::SIGFPE))), "{divided:?}");
    }

    #[test]
    fn what_ends_a_kernel_is_told_on_arm() {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let (back, stored) = (words(&[0xD65F_03C0]), words(&[0xD280_0001, 0xF900_003F, 0xD65F_03C0]));
        let outside = words(&[0xF940_0001, 0x381F_F03F, 0xD65F_03C0]);
        let codes = [&back[..], &stored, &words(&[0]), &words(&[0x1400_0000]), &outside];
        check("aarch64-linux-gnu-gcc", "qemu-aarch64", codes);
    }

    #[test]
    fn memory_has_a_limit_and_inputs_are_read_only() {
        let Some((_folder, command)) = made("cc", "") else { return };
        let mut runner = RunnerProcess::start(&command).unwrap();
        runner.ask(Ask::Limit, 0, &(8u64 << 20).to_le_bytes(), ANSWER).unwrap();
        let mut buffer = |number, n_bytes: u64| runner.ask(Ask::Buffer, number, &n_bytes.to_le_bytes(), ANSWER);
        assert!(buffer(0, 1 << 20).is_ok());
        for n_bytes in [8 << 20, u64::MAX] {
            assert!(matches!(buffer(1, n_bytes), Err(RunnerError::NoMemory)), "{n_bytes}");
        }
        // Refused buffers are not counted, and neither are released ones.
        assert!((0..20).all(|_| buffer(0, 2 << 20).is_ok()) && buffer(2, 100).is_ok());
        assert!(matches!(buffer(256, 1), Err(RunnerError::Refused(_))));
        runner.ask(Ask::Upload, 2, &[7; 100], ANSWER).unwrap();
        assert_eq!(runner.ask(Ask::Download, 2, &[], ANSWER).unwrap(), [7; 100]);
        let filled = runner.ask(Ask::Fill, 2, &[1], ANSWER);
        assert!(matches!(filled, Err(RunnerError::Signal(libc::SIGSEGV))), "{filled:?}");
    }

    #[test]
    fn a_device_says_how_it_is() {
        let warm = Conditions { device: None, frequency_mhz: Some(1500.0), temperature_c: Some(61.5) };
        assert_eq!(conditions(b"khz=1500000\nmillicelsius=61500\n"), warm);
        assert_eq!(conditions(b"khz=\nmore"), Conditions::default());
        let Some((_folder, command)) = made("cc", "") else { return };
        let said = RunnerProcess::start(&command).unwrap().ask(Ask::State, 0, &[], ANSWER).unwrap();
        let here = crate::host::conditions(0);
        let has_frequency = std::path::Path::new("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").exists();
        assert_eq!(conditions(&said).frequency_mhz.is_some(), has_frequency);
        assert_eq!(conditions(&said).temperature_c.is_some(), here.temperature_c.is_some());
    }

    #[test]
    fn devices_are_known_by_what_they_say() {
        let of = |lines: &str| {
            let all = format!("protocol=1\n{lines}\npage=4096\ncores=4\nmemory=1\ncode=4096\ncode_bytes=1\nexpf@7");
            Hello::parse(&all)
        };
        let board = of("arch=aarch64\nimplementer=0x41\npart=0xd08\nfeatures=neon").unwrap();
        assert_eq!((board.target.cpu.as_str(), board.functions["expf"]), ("cortex-a72", 7));
        assert_eq!(board.obstacle(&Target::named("cortex-a53").unwrap()), None);
        let obstacle = |name: &str| board.obstacle(&Target::named(name).unwrap()).unwrap();
        assert_eq!(obstacle("cortex-a76"), "it lacks fullfp16, dotprod");
        assert_eq!(obstacle("x86-64"), "it is aarch64, and not x86_64");
        // Another implementer's core with the same number is not Arm's.
        assert_eq!(of("arch=aarch64\nimplementer=0x61\npart=0xd08").unwrap().target.cpu, "generic");
        assert_eq!(of("arch=x86_64\nfeatures=fpu avx2 fma bmi2").unwrap().target.cpu, "x86-64-v3");
        for lines in ["arch=riscv64", "arch=opencl", "features=neon"] {
            assert!(matches!(of(lines), Err(RunnerError::NotThis(_))), "{lines}");
        }
    }
}
