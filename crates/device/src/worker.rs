//! The worker process: builds and runs candidates, one request after the other.
//!
//! Whatever a candidate does, it does it here: a crash ends this process and nothing else, and the tuner kills it
//! when it does not answer in time.

use crate::host;
use crate::memory::{Fenced, ReadOnly};
use crate::objects::Objects;
use crate::pace::{Pace, Variation};
use crate::pool::Pool;
use crate::prepared::{self, Prepared, Recipe};
use crate::protocol::{Assignment, ClassName, Plan, Reply, Request, Source};
use crate::stopwatch::{MOST_TRIES, time_ns};
use crate::timing::{self, First, Size, Subject};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Instant;
use tilewright_codegen::{CompileError, Compiler, Kernel};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{Tolerance, relative_error};
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Buffer, DType, Program, Role, Target, lower, text, verify};
use tilewright_tune::ErrorClass;

/// Serves requests from standard input until it ends.
///
/// # Errors
/// Where the assignment or a request cannot be understood, or a stream fails: the worker is of no use then.
pub fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let mut lines = std::io::stdin().lock().lines();
    let mut worker = match Worker::assigned(lines.next()) {
        Ok(worker) => worker,
        Err(e) => {
            reply(&Reply::NotReady { reason: e.to_string() })?;
            return Err(e);
        }
    };
    reply(&Reply::Ready)?;
    for line in lines {
        let request: Request = serde_json::from_str(&line?)?;
        if let Some(answer) = worker.answer(request) {
            reply(&answer)?;
        }
    }
    Ok(())
}

fn reply(reply: &Reply) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// What is prepared and not in use is kept up to so many bytes. More would be found there again more often, but memory that
/// was never touched is dear on virtual machines: 2.3 ms a megabyte where packing one takes 0.5.
const MOST_PREPARED_BYTES: u64 = 64 << 20;

struct Worker {
    assignment: Assignment,
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<Argument>,
    pool: Pool,
    pace: Pace,
    variation: Variation,
    compiler: Compiler,
    objects: Objects,
    kernels: HashMap<u64, Built>,
    prepared: prepared::Cache,
    /// Kept buffers that bodies write, by their place among a program's; for all kernels, as each run fills them anew.
    kept: Vec<Fenced>,
    /// One for all kernels, so that its pages are there when a kernel is timed for the first time.
    scratch: Fenced,
    flush: Vec<u8>,
}

enum Argument {
    Input(Fenced),
    Output { buffer: Fenced, reference: ReadOnly },
}

impl Argument {
    fn pointer(&self) -> *mut u8 {
        match self {
            Argument::Input(buffer) | Argument::Output { buffer, .. } => buffer.pointer(),
        }
    }

    fn output(&self) -> Option<&Fenced> {
        match self {
            Argument::Input(_) => None,
            Argument::Output { buffer, .. } => Some(buffer),
        }
    }
}

struct Built {
    kernel: Kernel,
    /// How far its answers may be from the reference.
    tolerance: Tolerance,
    /// Bytes of what its body touches, but for temporaries.
    n_bytes: u64,
    /// The run in which it was checked.
    first: Option<First>,
    /// Names of the kept buffers.
    kept: Vec<String>,
    /// Its `prepare` part, where what that makes can be shared …
    recipe: Option<Recipe>,
    /// … and what it has made; none before it was run.
    prepared: Option<Rc<Prepared>>,
}

/// Where a run finds its buffers.
struct Pointers {
    arguments: Vec<*mut u8>,
    kept: Vec<*mut u8>,
}

type Failure = (ErrorClass, String);

impl Worker {
    fn assigned(line: Option<std::io::Result<String>>) -> Result<Worker, Box<dyn std::error::Error>> {
        Worker::new(serde_json::from_str(&line.ok_or("no assignment")??)?)
    }

    fn new(assignment: Assignment) -> Result<Worker, Box<dyn std::error::Error>> {
        let workload = Workload::parse(&assignment.workload)?;
        let untuned = workload.program();
        let target: Target = assignment.target.clone().into();
        // SAFETY: the descriptor was opened by the tuner for this process, which keeps it open to its end.
        let file = unsafe { BorrowedFd::borrow_raw(assignment.data_fd) };
        let mut arguments = Vec::new();
        for ((_, buffer), &offset) in untuned.arguments().zip(&assignment.data_offsets) {
            let size = buffer.size_bytes().ok_or("a buffer is too large")?;
            arguments.push(if buffer.role == Role::Output {
                let n = buffer.n_elements().and_then(|n| n.checked_mul(8)).ok_or("a buffer is too large")?;
                Argument::Output { buffer: Fenced::new(size)?, reference: ReadOnly::new(file, offset, n)? }
            } else {
                Argument::Input(Fenced::copy(file, offset, size)?)
            });
        }
        let compiler = Compiler::new(target.clone());
        // SAFETY: as above.
        let objects = unsafe { BorrowedFd::borrow_raw(assignment.objects_fd) }.try_clone_to_owned()?.into();
        let mut pool = Pool::new(assignment.n_threads, &assignment.cpus);
        let pace = Pace::new(&mut pool);
        limit_memory(assignment.memory_bytes);
        Ok(Worker {
            workload,
            untuned,
            target,
            arguments,
            pool,
            pace,
            variation: Variation::default(),
            compiler,
            objects: Objects::new(objects),
            kernels: HashMap::new(),
            prepared: prepared::Cache::new((assignment.memory_bytes / 4).min(MOST_PREPARED_BYTES)),
            kept: Vec::new(),
            scratch: Fenced::new(0)?,
            flush: Vec::new(),
            assignment,
        })
    }

    fn answer(&mut self, request: Request) -> Option<Reply> {
        let start = Instant::now();
        let timed = self.assignment.cpus.first().copied();
        let (id, result) = match request {
            Request::Drop { id } => {
                self.kernels.remove(&id);
                return None;
            }
            Request::Build { id, source, quickly } => {
                let built = catch_unwind(AssertUnwindSafe(|| self.build(&source, quickly)));
                let built = built.unwrap_or_else(|p| Err((ErrorClass::Unknown, panic_message(&*p))));
                let result = built.map(|kernel| {
                    self.kernels.insert(id, kernel);
                    Reply::Built { id, seconds: start.elapsed().as_secs_f64() }
                });
                (id, result)
            }
            // Kernels are timed where nothing else of ours runs; otherwise it is the tuner that says where this process may.
            Request::Check { id, plan } => {
                let is_alone = plan.is_some_and(|plan| plan.alone_ns > 0.0);
                (id, host::pinned(timed.filter(|_| is_alone), || self.check(id, plan.as_ref())))
            }
            Request::Run { id, plan } => (id, host::pinned(timed, || self.run(id, &plan))),
        };
        Some(result.unwrap_or_else(|(class, message)| {
            let seconds = start.elapsed().as_secs_f64();
            Reply::Failed { id, class: ClassName(class), message, seconds }
        }))
    }

    fn build(&mut self, source: &Source, quickly: bool) -> Result<Built, Failure> {
        let instantiation = |why: String| (ErrorClass::InstantiationError, why);
        let (mut program, steps) = match source {
            Source::Steps(steps) => {
                let steps = parse_steps(steps).map_err(|e| instantiation(e.to_string()))?;
                let scheduled = apply_all(&self.untuned, &steps)
                    .map_err(|(at, why)| instantiation(format!("step {} `{}`: {why}", at + 1, steps[at])))?;
                // The program before its tails and unrolled loops multiply: what lowering makes of it is lowering's to
                // keep valid.
                verify::verify(&scheduled).map_err(|e| instantiation(e.to_string()))?;
                (scheduled, steps)
            }
            Source::Lowered(program) => (text::parse(program).map_err(|e| instantiation(e.to_string()))?, Vec::new()),
        };
        let same = |a: &Program, b: &Program| {
            a.arguments()
                .map(|(_, b)| (b.dtype, &b.shape, b.role))
                .eq(b.arguments().map(|(_, b)| (b.dtype, &b.shape, b.role)))
        };
        if !same(&program, &self.untuned) {
            return Err(instantiation(format!("its arguments are not those of {}", self.workload)));
        }
        let recipe = Recipe::of(&program);
        let prepared = recipe.as_ref().and_then(|recipe| self.prepared.get(recipe));
        if prepared.is_some() {
            program.prepare.clear();
        }
        if let Source::Steps(_) = source {
            program = lower::lower(&program);
        }
        let kernel = self.compile(&program, quickly).map_err(|e| (ErrorClass::CompileErrorHost, e.to_string()))?;
        let kept = program.kept().map(|(_, b)| b.name.clone()).collect();
        let touched = prepared::touched(&program.body).into_iter().map(|b| program.buffer(b));
        let n_bytes = touched.filter(|b| b.role != Role::Temporary).filter_map(Buffer::size_bytes).sum();
        let tolerance = Tolerance::for_schedule(&self.untuned, &steps);
        Ok(Built { kernel, tolerance, n_bytes, first: None, kept, recipe, prepared })
    }

    fn compile(&mut self, program: &Program, quickly: bool) -> Result<Kernel, CompileError> {
        if quickly {
            match self.compiler.compile_quickly(program) {
                Err(CompileError::NotQuick(_)) => {}
                done => return done,
            }
        }
        self.add_objects_of_others();
        let mut kernel = self.compiler.compile(program)?;
        if let Some(object) = kernel.take_object() {
            // Others do without where there is no memory for it.
            let _ = self.objects.add(&object);
        }
        Ok(kernel)
    }

    /// Takes over what other workers have compiled since the last time.
    fn add_objects_of_others(&mut self) {
        // One that cannot be read or refers to what was forgotten is compiled anew where it is needed.
        while let Ok(Some(object)) = self.objects.next_of_others() {
            let _ = self.compiler.add(&object);
        }
    }

    /// Finds or makes the buffers of a kernel, and runs its `prepare` part where its kept buffers are not filled. What
    /// other kernels have left in them is wiped out where `wipe` says so.
    fn prepare(&mut self, id: u64, wipe: bool) -> Result<Pointers, Failure> {
        let n_threads = self.pool.n_threads();
        let built = self.kernels.get_mut(&id).ok_or((ErrorClass::Unknown, format!("no kernel {id} is kept")))?;
        let memory = |e: std::io::Error| (ErrorClass::RuntimeError, format!("allocating its buffers: {e}"));
        self.scratch.resize(built.kernel.scratch_bytes(n_threads)).map_err(memory)?;
        if built.prepared.is_none() {
            // Another one may have made it since this one was built.
            built.prepared = built.recipe.as_ref().and_then(|recipe| self.prepared.get(recipe));
        }
        let arguments: Vec<*mut u8> = self.arguments.iter().map(Argument::pointer).collect();
        let mut kept = Vec::new();
        let mut fresh = HashMap::new();
        for (at, (name, &bytes)) in built.kept.iter().zip(built.kernel.kept_bytes()).enumerate() {
            if self.kept.len() == at {
                self.kept.push(Fenced::new(0).map_err(memory)?);
            }
            kept.push(match (&built.prepared, &built.recipe) {
                (Some(prepared), Some(recipe)) if recipe.fills(name) => prepared.pointer(name),
                (None, Some(recipe)) if recipe.fills(name) => {
                    let mut buffer = self.prepared.buffer(bytes).map_err(memory)?;
                    // As for outputs: what nothing writes must not pass for zeros.
                    buffer.fill(0xFF);
                    let pointer = buffer.pointer();
                    fresh.insert(name.clone(), buffer);
                    pointer
                }
                _ => {
                    self.kept[at].resize(bytes).map_err(memory)?;
                    if wipe {
                        self.kept[at].fill(0xFF);
                    }
                    self.kept[at].pointer()
                }
            });
        }
        if built.prepared.is_none() && !kept.is_empty() {
            // SAFETY: the arguments are the workload's, which `build` has compared with the program's; kept and scratch
            // buffers have the sizes the kernel asks for; all are page-aligned.
            unsafe { built.kernel.prepare(&arguments, &kept, self.scratch.pointer(), &self.pool.runtime()) };
            if let Some(recipe) = &built.recipe {
                intact(fresh.values().chain(&self.kept).chain([&self.scratch]))?;
                let prepared = Rc::new(Prepared::new(fresh).map_err(memory)?);
                self.prepared.insert(recipe.clone(), Rc::clone(&prepared));
                built.prepared = Some(prepared);
            }
        }
        Ok(Pointers { arguments, kept })
    }

    /// Runs a kernel for the first time and compares its answer with the reference; and times it, where that tells enough
    /// or what follows belongs to it.
    fn check(&mut self, id: u64, plan: Option<&Plan>) -> Result<Reply, Failure> {
        let start = Instant::now();
        let pointers = self.prepare(id, true)?;
        // What is prepared serves other candidates too: its time says nothing about this one.
        tell(&Reply::Prepared { id })?;
        let start_of_run = Instant::now();
        // All ones is a NaN: an element that is not written cannot pass for right.
        for argument in &mut self.arguments {
            if let Argument::Output { buffer, .. } = argument {
                buffer.fill(0xFF);
            }
        }
        let built = self.kernels.get(&id).expect("it was just prepared");
        let scratch = self.scratch.pointer();
        let pace_before = self.pace.now(&mut self.pool);
        // SAFETY: as in `prepare`.
        let ns = unsafe { time(&built.kernel, &pointers, scratch, &mut self.pool, 1, 1) };
        let pace = (pace_before + self.pace.now(&mut self.pool)) / 2.0;
        let runtime = self.pool.runtime();
        // SAFETY: as above, and the body has run.
        unsafe { built.kernel.finish(&pointers.arguments, &pointers.kept, scratch, &runtime) };
        intact(self.arguments.iter().filter_map(Argument::output).chain(&self.kept).chain([&self.scratch]))?;
        let relative_error = compare(&self.untuned, &built.tolerance, &self.arguments)?;
        let took = start_of_run.elapsed();
        let first = First { ns, pace, checked_ns: took.as_nanos() as f64 };
        let is_enough = |plan: &Plan| {
            first.is_alone(plan) || timing::at_first(plan, &self.variation, first, self.size(built)).is_some()
        };
        let to_time = plan.filter(|plan| is_enough(plan));
        let checked = Reply::Checked {
            id,
            seconds: start.elapsed().as_secs_f64(),
            run_seconds: took.as_secs_f64(),
            relative_error,
            is_timed: to_time.is_some(),
        };
        self.kernels.get_mut(&id).expect("it has just run").first = Some(first);
        match to_time {
            Some(plan) => {
                tell(&checked)?;
                self.run(id, plan)
            }
            None => Ok(checked),
        }
    }

    fn size(&self, built: &Built) -> Size {
        let n_threads = self.pool.n_threads();
        Size { n_threads, n_bytes: built.n_bytes + built.kernel.scratch_bytes(n_threads) }
    }

    fn run(&mut self, id: u64, plan: &Plan) -> Result<Reply, Failure> {
        let start = Instant::now();
        let pointers = self.prepare(id, false)?;
        if plan.cold && self.flush.is_empty() {
            self.flush = vec![1; 2 * self.target.l3_bytes as usize];
        }
        let built = self.kernels.get(&id).expect("it was just prepared");
        let first = built.first.ok_or((ErrorClass::Unknown, format!("kernel {id} was never checked")))?;
        let size = self.size(built);
        let scratch = self.scratch.pointer();
        let pool = RefCell::new(&mut self.pool);
        // A second run is no cold one.
        let most_tries = if plan.cold { 1 } else { MOST_TRIES };
        let mut run = |n_runs: u32| {
            // SAFETY: as in `prepare`.
            unsafe { time(&built.kernel, &pointers, scratch, &mut pool.borrow_mut(), n_runs, most_tries) }
        };
        let flush_with = &mut self.flush;
        let mut flush = || {
            for line in flush_with.iter_mut().step_by(64) {
                *line = line.wrapping_add(1);
            }
            std::hint::black_box(&flush_with);
        };
        // Emptied caches slow down whatever runs next.
        let looks = plan.at_best_pace && !plan.cold;
        let mut pace = || if looks { self.pace.now(&mut pool.borrow_mut()) } else { 1.0 };
        let subject = Subject { run: &mut run, size, flush: &mut flush, pace: &mut pace };
        let samples = timing::sample(plan, &mut self.variation, first, subject);
        Ok(Reply::Timed {
            id,
            samples_ns: samples.ns,
            stopped_early: samples.stopped_early,
            seconds: start.elapsed().as_secs_f64(),
        })
    }
}

/// Tells the tuner what is not the last answer to its request.
fn tell(early: &Reply) -> Result<(), Failure> {
    reply(early).map_err(|e| (ErrorClass::Unknown, format!("telling the tuner: {e}")))
}

/// Nanoseconds of so many runs of a kernel in a row.
///
/// # Safety
/// As for [`Kernel::run`].
unsafe fn time(
    kernel: &Kernel,
    Pointers { arguments, kept }: &Pointers,
    scratch: *mut u8,
    pool: &mut Pool,
    n_runs: u32,
    most_tries: u32,
) -> f64 {
    let n_threads = pool.n_threads();
    let runtime = pool.runtime();
    time_ns(n_threads, most_tries, || {
        for _ in 0..n_runs {
            // SAFETY: promised by the caller.
            unsafe { kernel.run(arguments, kept, scratch, &runtime) };
        }
    })
}

/// Whether nothing was written around buffers; mends what surrounds them.
fn intact<'a>(buffers: impl Iterator<Item = &'a Fenced>) -> Result<(), Failure> {
    let broken: Vec<&Fenced> = buffers.filter(|f| !f.is_intact()).collect();
    broken.iter().for_each(|f| f.set_canaries());
    match broken.as_slice() {
        [] => Ok(()),
        _ => Err((ErrorClass::RuntimeError, "it wrote outside its buffers".to_owned())),
    }
}

/// Compares every output with its reference; the largest relative error of one as a whole.
fn compare(untuned: &Program, tolerance: &Tolerance, arguments: &[Argument]) -> Result<f64, Failure> {
    let mut largest: f64 = 0.0;
    for ((_, buffer), argument) in untuned.arguments().zip(arguments) {
        let Argument::Output { buffer: output, reference } = argument else { continue };
        let reference = reference.as_slice::<f64>();
        let compared = match buffer.dtype {
            DType::F32 => tolerance.compare(output.as_slice::<f32>(), reference),
            DType::F64 => tolerance.compare(output.as_slice::<f64>(), reference),
        };
        compared.map_err(|e| (ErrorClass::WrongAnswer, format!("{}: {e}", buffer.name)))?;
        largest = largest.max(match buffer.dtype {
            DType::F32 => relative_error(output.as_slice::<f32>(), reference),
            DType::F64 => relative_error(output.as_slice::<f64>(), reference),
        });
    }
    Ok(largest)
}

/// Limits the address space to what is used now and so much more.
fn limit_memory(more_bytes: u64) {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let used = pages.and_then(|s| s.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 4096;
    let limit = libc::rlimit { rlim_cur: used.saturating_add(more_bytes), rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure is plain data. Where the limit cannot be set the worker runs without one.
    unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    format!("the compiler panicked: {}", text.unwrap_or("no message"))
}
