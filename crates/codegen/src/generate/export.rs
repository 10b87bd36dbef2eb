//! Wrapper functions of an exported object, which check their arguments before any code of the kernel runs.
//!
//! Wrappers are compiled for the family's baseline CPU, so that they can report missing CPU features. All
//! other symbols are internal, and other objects cannot interpose the exported ones.

use tilewright_ir::{OpenSize, Part, Stmt};

use super::{Generator, cpu, entry_parameters, plan};
use crate::export::{ALIGN, BAD_POINTER, BAD_SIZE, CPU_UNSUPPORTED, OK, function_name, supported_name};
use crate::ssa::{Assembly, Compare, Cpu, FunctionId, Id, Linkage, SsaOp, Type};

/// Functions that all exported functions use for their checks.
pub(super) struct ExportChecks<'p> {
    pub prefix: &'p str,
    /// Linkage of the wrapper functions.
    pub linkage: Linkage,
    /// Function that returns 1 if the CPU is supported, else 2.
    cpu: FunctionId,
    /// Function that runs a parallel loop sequentially if the caller provides no threads.
    in_order: FunctionId,
}

/// Function of a part, being generated.
#[derive(Clone, Copy)]
pub(super) struct ExportedFunction {
    pub function: FunctionId,
    /// Stack memory for a runtime structure, if a parallel loop needs one.
    runtime: Option<Id>,
}

/// Result of the function that checks the CPU; before its first call, the cached result is 0.
const SUPPORTED: i32 = 1;

impl<'p> Generator<'p> {
    /// Generates the functions that the exported ones use, and the exported one that reports whether the CPU
    /// is supported.
    pub(super) fn guard(&mut self, prefix: &'p str, linkage: Linkage) -> ExportChecks<'p> {
        let guard = ExportChecks { prefix, linkage, cpu: self.cpu_function(), in_order: self.in_order_function() };
        self.begin(&supported_name(prefix), linkage, Some(Type::I32), &[]);
        let is_supported = self.is_supported(&guard);
        self.m.ret_value(self.m.select(is_supported, self.m.int32(1), self.m.int32(0)));
        guard
    }

    /// Begins a function for the family's baseline CPU.
    pub(super) fn begin(
        &mut self,
        name: &str,
        linkage: Linkage,
        result: Option<Type>,
        parameters: &[Type],
    ) -> FunctionId {
        let function = self.m.function(name, linkage, result, parameters);
        self.m.define(function, linkage, Cpu::First);
        let entry = self.m.block(function);
        self.m.go_to(function, entry);
        function
    }

    fn is_supported(&self, guard: &ExportChecks) -> Id {
        let answer = self.m.call(guard.cpu, &[]).expect("it answers");
        self.m.compare(Compare::Equal, answer, self.m.int32(SUPPORTED))
    }

    /// Generates a function that checks the CPU once, as the check may take as long as a small kernel: in a
    /// virtual machine, the hypervisor emulates CPUID.
    fn cpu_function(&mut self) -> FunctionId {
        let function = self.begin("tilewright_cpu", Linkage::Internal, Some(Type::I32), &[]);
        let Some(text) = cpu::check(self.target) else {
            self.m.ret_value(self.m.int32(SUPPORTED));
            return function;
        };
        let answer = self.m.global_address(self.m.global("tilewright_cpu.answer"));
        let [ask, done] = [0; 2].map(|_| self.m.block(function));
        let before = self.m.load(Type::I32, answer, 4, false);
        self.m.cond_br(self.m.compare(Compare::Equal, before, self.m.int32(0)), ask, done);
        self.m.go_to(function, done);
        self.m.ret_value(before);
        self.m.go_to(function, ask);
        let constraints = "={ax},~{bx},~{cx},~{dx},~{dirflag},~{fpsr},~{flags}";
        let found = self.m.assembly(Assembly { text, constraints: constraints.into() }, &[], Type::I32);
        self.m.store(found, answer, 4);
        self.m.ret_value(found);
        function
    }

    /// Generates a function that runs the iterations of a parallel loop in order, as thread 0.
    fn in_order_function(&mut self) -> FunctionId {
        let (ptr, i64) = (Type::POINTER, Type::I64);
        let function = self.begin("tilewright_in_order", Linkage::Internal, None, &[ptr, ptr, ptr, i64]);
        let entry = self.m.current_block();
        let [body, env, n] = [1, 2, 3].map(|at| self.m.parameter(at));
        let [iteration, end] = [0; 2].map(|_| self.m.block(function));
        let [zero, one] = [0, 1].map(|i| self.m.int(i));
        self.m.cond_br(self.m.compare(Compare::Greater, n, zero), iteration, end);
        self.m.go_to(function, iteration);
        let i = self.m.phi(iteration, i64);
        self.m.call_pointer(body, None, &[env, i, zero]);
        let next = self.m.add(i, one);
        self.m.add_incoming(i, zero, entry);
        self.m.add_incoming(i, next, iteration);
        self.m.cond_br(self.m.compare(Compare::Less, next, n), iteration, end);
        self.m.go_to(function, end);
        self.m.ret();
        function
    }

    /// Begins the function of a part, with a return if the CPU is not supported.
    pub(super) fn guarded_entry(&mut self, guard: &ExportChecks, part: Part) -> ExportedFunction {
        let name = function_name(guard.prefix, part);
        let n = entry_parameters(&plan::used_sizes(self.program, part));
        let function = self.begin(&name, guard.linkage, Some(Type::I32), &vec![Type::POINTER; n]);
        let is_parallel = self.program.part(part).iter().any(Stmt::has_parallel_loop);
        let runtime = is_parallel.then(|| self.m.stack(16, 8));
        let is_supported = self.is_supported(guard);
        self.leave_unless(function, is_supported, CPU_UNSUPPORTED);
        ExportedFunction { function, runtime }
    }

    /// Generates a return from an exported function if a buffer that it uses, or the scratch memory, is null
    /// or not aligned to the given bytes. Returns the caller's runtime or, if that is null, one that runs
    /// loops on this thread.
    pub(super) fn check_pointers(
        &mut self,
        guard: &ExportChecks,
        entry: ExportedFunction,
        buffers: &[(Id, u64)],
        scratch: Id,
        runtime: Id,
    ) -> Id {
        let (ptr, null) = (Type::POINTER, self.m.zero(Type::POINTER));
        let scratch = (self.plan.scratch.bytes(1) > 0).then_some((scratch, ALIGN));
        let mut is_bad = self.m.bool(false);
        // Bitwise or of all addresses with the same required alignment.
        let mut bits: Vec<(u64, Id)> = Vec::new();
        for (pointer, align) in buffers.iter().copied().chain(scratch) {
            let at = bits.iter().position(|(of, _)| *of == align).unwrap_or_else(|| {
                bits.push((align, self.m.int(0)));
                bits.len() - 1
            });
            bits[at].1 = self.m.binary(SsaOp::Or, bits[at].1, self.m.address(pointer));
            is_bad = self.m.binary(SsaOp::Or, is_bad, self.m.compare(Compare::Equal, pointer, null));
        }
        for (align, bits) in bits {
            let low = self.m.binary(SsaOp::And, bits, self.m.int(align as i64 - 1));
            is_bad = self.m.binary(SsaOp::Or, is_bad, self.m.compare(Compare::NotEqual, low, self.m.int(0)));
        }
        let is_good = self.m.not(is_bad);
        self.leave_unless(entry.function, is_good, BAD_POINTER);
        let Some(own) = entry.runtime else { return runtime };
        // Context, then function.
        self.m.store(null, own, 8);
        let function = self.m.element(ptr, own, self.m.int(1));
        self.m.store(self.m.function_address(guard.in_order), function, 8);
        self.m.select(self.m.compare(Compare::Equal, runtime, null), own, runtime)
    }

    /// Generates a return from an exported function if a size is not a valid value, given the difference of
    /// each size from its least value.
    pub(super) fn check_sizes(&mut self, entry: ExportedFunction, sizes: &[(&OpenSize, Id)]) {
        let mut is_good = self.m.bool(true);
        for (size, above) in sizes {
            let most = self.m.int(size.most() - size.least);
            let in_range =
                [(self.m.int(0), *above), (*above, most)].map(|(a, b)| self.m.compare(Compare::Greater, a, b));
            let rest = self.m.binary(SsaOp::UnsignedRem, *above, self.m.int(size.step));
            let is_between = self.m.compare(Compare::NotEqual, rest, self.m.int(0));
            for is_bad in in_range.into_iter().chain([is_between]) {
                is_good = self.m.binary(SsaOp::And, is_good, self.m.not(is_bad));
            }
        }
        self.leave_unless(entry.function, is_good, BAD_SIZE);
    }

    /// Generates a return with a code if a condition does not hold.
    fn leave_unless(&mut self, function: FunctionId, condition: Id, code: i32) {
        let [on, out] = [0; 2].map(|_| self.m.block(function));
        self.m.cond_br(condition, on, out);
        self.m.go_to(function, out);
        self.m.ret_value(self.m.int32(code));
        self.m.go_to(function, on);
    }

    /// Generates the return from the function of a part.
    pub(super) fn leave_entry(&mut self, guard: Option<&ExportChecks>) {
        match guard {
            Some(_) => self.m.ret_value(self.m.int32(OK)),
            None => self.m.ret(),
        }
    }
}
