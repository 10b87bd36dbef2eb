//! The functions of an exported object: they check what they are given before any code of the kernel runs.
//!
//! The functions that the object exports are compiled for the family's first CPU, so that they can say that the CPU at
//! hand lacks something. Nothing else can be seen from outside, and no other object can put a function of its own in
//! the place of one of them.

use llvm_sys::LLVMOpcode::{LLVMAnd, LLVMOr};
use tilewright_ir::{Part, Stmt};

use super::api::{INT_EQ, INT_GT, INT_LT, INT_NE, Value};
use super::cpu;
use super::generate::Generator;
use crate::export::{ALIGN, BAD_POINTER, CPU_UNSUPPORTED, OK, function_name, supported_name};

/// What the exported functions have in common.
pub(super) struct Guard<'p> {
    prefix: &'p str,
    /// Says 1 where the CPU will do, else 2.
    cpu: Value,
    /// What runs a parallel loop where the caller has no threads for it.
    in_order: Value,
}

/// A function that a part becomes, being written.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub function: Value,
    /// Where a runtime of its own has room, if there is something to run by it.
    runtime: Option<Value>,
}

/// The answers of the function that looks at the CPU; before its first call a variable holds 0.
const SUPPORTED: i32 = 1;

impl<'p> Generator<'p> {
    /// Writes what the exported functions use, and the one that says whether the CPU will do.
    pub(super) fn guard(&mut self, prefix: &'p str) -> Guard<'p> {
        let guard = Guard { prefix, cpu: self.cpu_function(), in_order: self.in_order_function() };
        let supported = self.entry_function(&supported_name(prefix), false);
        let answer = self.m.call(guard.cpu, self.m.i32, &[], &[]);
        let is_supported = self.m.icmp(INT_EQ, answer, self.m.int32(SUPPORTED));
        self.m.ret_value(self.m.select(is_supported, self.m.int32(1), self.m.int32(0)));
        self.m.make_protected(supported);
        guard
    }

    /// Has a function compiled for the family's first CPU with what [`cpu::check`] asks for, laid out for the target.
    pub(super) fn checked_cpu(&self, function: Value) {
        let features: Vec<String> = cpu::features(self.target).iter().map(|name| format!("+{name}")).collect();
        for (name, value) in [
            ("target-cpu", cpu::baseline(self.target.arch)),
            ("tune-cpu", cpu::tuned_for(self.target)),
            ("target-features", &features.join(",")),
        ] {
            self.m.add_attribute(function, self.m.string_attribute(name, value));
        }
    }

    /// Begins a function for the family's first CPU.
    fn entry_function(&mut self, name: &str, has_arguments: bool) -> Value {
        let parameters = [self.m.ptr; 3];
        let function = self.m.function(name, self.m.i32, &parameters[..if has_arguments { 3 } else { 0 }], false);
        self.begin(function);
        function
    }

    fn begin(&mut self, function: Value) {
        self.m.add_attribute(function, self.m.attribute("nounwind", 0));
        for (name, value) in [("target-cpu", cpu::baseline(self.target.arch)), ("target-features", "")] {
            self.m.add_attribute(function, self.m.string_attribute(name, value));
        }
        let entry = self.m.block(function);
        self.go_to_end(entry);
    }

    /// Looks at the CPU once, as that may take as long as a small kernel: a virtual machine's host answers.
    fn cpu_function(&mut self) -> Value {
        let i32 = self.m.i32;
        let function = self.m.function("tilewright_cpu", i32, &[], true);
        self.begin(function);
        let Some(text) = cpu::check(self.target) else {
            self.m.ret_value(self.m.int32(SUPPORTED));
            return function;
        };
        let answer = self.m.variable("tilewright_cpu.answer", i32);
        let [ask, done] = [0; 2].map(|_| self.m.block(function));
        let before = self.m.load(i32, answer, 4);
        self.m.cond_br(self.m.icmp(INT_EQ, before, self.m.int32(0)), ask, done);
        self.go_to_end(done);
        self.m.ret_value(before);
        self.go_to_end(ask);
        let constraints = "={ax},~{bx},~{cx},~{dx},~{dirflag},~{fpsr},~{flags}";
        let found = self.m.assembly(&text, constraints, i32, &[], &[]);
        self.m.store(found, answer, 4);
        self.m.ret_value(found);
        function
    }

    /// Runs the iterations of a parallel loop in order, as thread 0.
    fn in_order_function(&mut self) -> Value {
        let (ptr, i64, void) = (self.m.ptr, self.m.i64, self.m.void);
        let function = self.m.function("tilewright_in_order", void, &[ptr, ptr, ptr, i64], true);
        self.begin(function);
        let entry = self.m.current_block();
        let [body, env, n] = [1, 2, 3].map(|at| self.m.parameter(function, at));
        let [iteration, end] = [0; 2].map(|_| self.m.block(function));
        let [zero, one] = [0, 1].map(|i| self.m.int(i));
        self.m.cond_br(self.m.icmp(INT_GT, n, zero), iteration, end);
        self.go_to_end(iteration);
        let i = self.m.phi(i64);
        let body_type = self.m.function_type(void, &[ptr, i64, i64]);
        self.m.call_pointer(body_type, body, &[env, i, zero]);
        let next = self.m.add(i, one);
        self.m.add_incoming(i, zero, entry);
        self.m.add_incoming(i, next, iteration);
        self.m.cond_br(self.m.icmp(INT_LT, next, n), iteration, end);
        self.go_to_end(end);
        self.m.ret();
        function
    }

    /// Begins the function that a part becomes, and returns from it where the CPU will not do.
    pub(super) fn guarded_entry(&mut self, guard: &Guard, part: Part) -> Entry {
        let function = self.entry_function(&function_name(guard.prefix, part), true);
        self.m.make_protected(function);
        let is_parallel = self.program.part(part).iter().any(Stmt::has_parallel_loop);
        let runtime = is_parallel.then(|| self.m.alloca(self.m.array(self.m.ptr, 2), 8));
        let answer = self.m.call(guard.cpu, self.m.i32, &[], &[]);
        let is_supported = self.m.icmp(INT_EQ, answer, self.m.int32(SUPPORTED));
        self.leave_unless(function, is_supported, CPU_UNSUPPORTED);
        Entry { function, runtime }
    }

    /// Returns from an exported function where a buffer that it uses, or the scratch memory, is null or not aligned;
    /// gives the runtime, where there is none that of this thread alone.
    pub(super) fn check_pointers(
        &mut self,
        guard: &Guard,
        entry: Entry,
        buffers: &[Value],
        scratch: Value,
        runtime: Value,
    ) -> Value {
        let (ptr, null) = (self.m.ptr, self.m.zero(self.m.ptr));
        let scratch = (self.plan.scratch.bytes(1) > 0).then_some(scratch);
        let (mut bits, mut is_bad) = (self.m.int(0), self.m.bool(false));
        for pointer in buffers.iter().copied().chain(scratch) {
            bits = self.m.binary(LLVMOr, bits, self.m.address(pointer));
            is_bad = self.m.binary(LLVMOr, is_bad, self.m.icmp(INT_EQ, pointer, null));
        }
        let low = self.m.binary(LLVMAnd, bits, self.m.int(ALIGN as i64 - 1));
        is_bad = self.m.binary(LLVMOr, is_bad, self.m.icmp(INT_NE, low, self.m.int(0)));
        let is_good = self.m.not(is_bad);
        self.leave_unless(entry.function, is_good, BAD_POINTER);
        let Some(own) = entry.runtime else { return runtime };
        // The context, then the function.
        self.m.store(null, own, 8);
        self.m.store(guard.in_order, self.m.element(ptr, own, self.m.int(1)), 8);
        self.m.select(self.m.icmp(INT_EQ, runtime, null), own, runtime)
    }

    /// Returns with a code where a condition does not hold.
    fn leave_unless(&mut self, function: Value, condition: Value, code: i32) {
        let [on, out] = [0; 2].map(|_| self.m.block(function));
        self.m.cond_br(condition, on, out);
        self.go_to_end(out);
        self.m.ret_value(self.m.int32(code));
        self.go_to_end(on);
    }

    /// Returns from the function that a part becomes.
    pub(super) fn leave_entry(&mut self, guard: Option<&Guard>) {
        match guard {
            Some(_) => self.m.ret_value(self.m.int32(OK)),
            None => self.m.ret(),
        }
    }
}
