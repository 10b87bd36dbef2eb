//! Builder thread of a worker.

use super::store::{Built, KernelStore, NumberedKernels};
use super::{Build, Failure};
use crate::objects::Objects;
use crate::prepared::{self, Recipe};
use crate::protocol::{ProgramSource, Reply, WorkerRequest};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tilewright_codegen::{CompileError, CompiledKernel, Compiler};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Buffer, Program, Role, Step, Stmt, Target, lower, text, verify};
use tilewright_search::ErrorClass;

/// Trivial program for testing whether a worker works at all.
pub const PROBE: &str = "program \"probe\"
buffer X: f32[16] global output
loops i
run { for i in 16 { X[i] = 1.0 } }";

pub struct CpuBuilder {
    workload: Workload,
    untuned: Program,
    compiler: Compiler,
    objects: Objects,
    store: Arc<KernelStore>,
}

impl CpuBuilder {
    /// Makes a builder of a workload's kernels for a target, which `store` keeps.
    pub fn new(workload: Workload, target: Target, objects: Objects, store: Arc<KernelStore>) -> CpuBuilder {
        let untuned = workload.program();
        CpuBuilder { workload, untuned, compiler: Compiler::new(target), objects, store }
    }

    /// Builds the trivial program in the way that candidates are built.
    ///
    /// # Errors
    /// Reason why the machine cannot do this, and how to mend that.
    pub fn probe(&mut self) -> Result<CompiledKernel, String> {
        let program = text::parse(PROBE).expect("invariant: the probe parses");
        self.compile(&program, true).map_err(|e| match e {
            CompileError::Object(_) => {
                format!("{e} (a security profile, such as a container's, forbids it: allow executable memory)")
            }
            e => e.to_string(),
        })
    }

    fn build(&mut self, source: &ProgramSource, quickly: bool) -> Result<Built, Failure> {
        let (mut program, steps) = scheduled(&self.workload, &self.untuned, source)?;
        let recipe = Recipe::of(&program);
        let prepared = recipe.as_ref().and_then(|recipe| self.store.prepared().get(recipe));
        if prepared.is_some() {
            program.prepare.clear();
        }
        if let ProgramSource::Steps(_) = source {
            program = lower::lower(&program);
        }
        let kernel = self.compile(&program, quickly)?;
        let kept = program.kept().map(|(_, b)| b.name.clone()).collect();
        let touched = prepared::touched(&program.body).into_iter().map(|b| program.buffer(b));
        let n_bytes = touched.filter(|b| b.role != Role::Temporary).filter_map(Buffer::size_bytes).sum();
        let tolerance = Tolerance::for_schedule(&self.untuned, &steps);
        let prepared = prepared.map_or_else(OnceLock::new, OnceLock::from);
        let is_parallel = program.body.iter().any(Stmt::has_parallel_loop);
        Ok(Built { kernel, tolerance, is_parallel, n_bytes, kept, recipe, prepared, first: OnceLock::new() })
    }

    fn compile(&mut self, program: &Program, quickly: bool) -> Result<CompiledKernel, CompileError> {
        if quickly {
            match self.compiler.compile_quickly(program) {
                Err(CompileError::NotQuick(_)) => {}
                done => return done,
            }
        }
        self.add_objects_of_others();
        let mut kernel = self.compiler.compile(program)?;
        if let Some(object) = kernel.take_object() {
            // Other workers do without it if there is not enough memory.
            let _ = self.objects.add(&object);
        }
        Ok(kernel)
    }

    /// Loads the objects that other workers have compiled since the last call.
    fn add_objects_of_others(&mut self) {
        // An object that cannot be read, or refers to a dropped one, is compiled anew when needed.
        while let Ok(Some(object)) = self.objects.next_of_others() {
            let _ = self.compiler.add(&object);
        }
    }
}

impl Build for CpuBuilder {
    fn answer(&mut self, request: WorkerRequest) -> Option<Reply> {
        let store = Arc::clone(&self.store);
        answer(request, &store.kernels, |source, quickly| self.build(source, quickly))
    }
}

/// Builds or drops a kernel as requested; returns the final reply, if any.
pub fn answer<B>(
    request: WorkerRequest,
    kernels: &NumberedKernels<B>,
    build: impl FnOnce(&ProgramSource, bool) -> Result<B, Failure>,
) -> Option<Reply> {
    let start = Instant::now();
    let (id, result) = match request {
        WorkerRequest::Build { id, source, quickly } => {
            let built = catch_unwind(AssertUnwindSafe(|| build(&source, quickly)));
            let built = built.unwrap_or_else(|p| Err((ErrorClass::Unknown, panic_message(&*p)).into()));
            let result = built.map(|built| {
                kernels.insert(id, built);
                Reply::Built { id, seconds: start.elapsed().as_secs_f64() }
            });
            (id, result)
        }
        WorkerRequest::Drop { id } => {
            kernels.remove(id);
            return None;
        }
        WorkerRequest::Check { .. } | WorkerRequest::Run { .. } => unreachable!("another thread tests"),
    };
    Some(result.unwrap_or_else(|failure: Failure| failure.reply(id, start)))
}

/// Schedules the program of a source; returns it with its steps.
///
/// # Errors
/// If the source is not a valid program, or not one of this workload.
pub fn scheduled(
    workload: &Workload,
    untuned: &Program,
    source: &ProgramSource,
) -> Result<(Program, Vec<Step>), Failure> {
    let instantiation = |why: String| Failure::from((ErrorClass::InstantiationError, why));
    let (program, steps) = match source {
        ProgramSource::Steps(steps) => {
            let steps = parse_steps(steps).map_err(|e| instantiation(e.to_string()))?;
            let scheduled = apply_all(untuned, &steps)
                .map_err(|(at, why)| instantiation(format!("step {} `{}`: {why}", at + 1, steps[at])))?;
            // The program before its tails and unrolled loops multiply: lowering is responsible for keeping
            // it valid.
            verify::verify(&scheduled).map_err(|e| instantiation(e.to_string()))?;
            (scheduled, steps)
        }
        ProgramSource::Lowered(program) => {
            (text::parse(program).map_err(|e| instantiation(e.to_string()))?, Vec::new())
        }
    };
    // Each program may count the steps of a size by a different loop.
    let same_sizes = |a: &Program, b: &Program| {
        let of = |p: &Program| p.sizes.iter().map(|size| (size.least, size.step, size.n_values)).collect::<Vec<_>>();
        of(a) == of(b)
    };
    let same = |a: &Program, b: &Program| {
        a.arguments()
            .map(|(_, b)| (b.dtype, &b.shape, b.role))
            .eq(b.arguments().map(|(_, b)| (b.dtype, &b.shape, b.role)))
    };
    if !same(&program, untuned) || !same_sizes(&program, untuned) {
        return Err(instantiation(format!("its arguments are not those of {workload}")));
    }
    Ok((program, steps))
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    format!("the compiler panicked: {}", text.unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::anonymous_file;
    use crate::denied::{SystemCall, without};
    use crate::host;
    use crate::prepared::PreparedCache;
    use rand::SeedableRng;
    use rand_xoshiro::Xoshiro256PlusPlus;
    use tilewright_tune::{Task, TemplateSetting};

    fn probe() -> Result<CompiledKernel, String> {
        let workload = Workload::parse("matmul:m=1,n=1,k=1").unwrap();
        let objects = Objects::new(anonymous_file(c"test").unwrap());
        CpuBuilder::new(workload, host::target(), objects, Arc::new(KernelStore::new(PreparedCache::new(0)))).probe()
    }

    /// Number of mappings of code in this process without a backing file, and their bytes.
    fn mappings_of_code() -> (usize, u64) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let code = maps.lines().filter(|line| line.contains(" r-xp 00000000 00:00 0"));
        let bytes = code.clone().map(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(start, 16).unwrap()
        });
        (code.count(), bytes.sum())
    }

    #[test]
    fn code_that_no_trial_has_used_for_long_goes() {
        let workload = Workload::parse("matmul:m=64,n=64,k=64").unwrap();
        let setting = TemplateSetting { workload: workload.clone(), target: host::target(), n_threads: 1 };
        let task = Task::new(setting, None).unwrap();
        let objects = Objects::new(anonymous_file(c"test").unwrap());
        let mut builder =
            CpuBuilder::new(workload, host::target(), objects, Arc::new(KernelStore::new(PreparedCache::new(0))));
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
        for id in 0..600 {
            let source = ProgramSource::Steps(task.steps_text(&task.space.sample(&mut rng)));
            let reply = builder.answer(WorkerRequest::Build { id, source, quickly: true });
            assert!(matches!(reply, Some(Reply::Built { .. })), "{reply:?}");
            builder.answer(WorkerRequest::Drop { id });
        }
        let (n_mappings, bytes) = mappings_of_code();
        // Those kept for later programs, and a few of tests that run in parallel.
        assert!(n_mappings < 300 && bytes < 16 << 20, "{n_mappings} mappings of {bytes} bytes");
    }

    #[test]
    fn a_machine_that_forbids_fresh_code_is_told_of() {
        assert!(probe().is_ok());
        let Some(refused) = without(SystemCall::ExecutableMemory, probe) else {
            return eprintln!("skipped: this system has no filters for calls");
        };
        let reason = refused.err().expect("it is forbidden");
        assert!(reason.contains("Operation not permitted") && reason.contains("allow executable memory"), "{reason}");
    }
}
