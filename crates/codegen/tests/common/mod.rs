//! Helpers of the tests and the example, for building programs by hand and running kernels on guarded memory.
#![allow(dead_code)]

pub mod gemm;

use std::ffi::c_void;

use tilewright_codegen::{ArgumentAlign, CompiledKernel, Compiler, Runtime, SCRATCH_ALIGN, host_cpu, llvm_version};
use tilewright_ir::expr::{BinaryOp, Cond, Expr, ReduceOp, UnaryOp};
use tilewright_ir::reference::random_argument;
use tilewright_ir::target::Arch;
use tilewright_ir::{Buffer, BufferId, DType, Index, Loop, LoopId, LoopKind, Program, Role, Scope, Stmt, Target};

/// Converts a loop variable or constant to an index.
pub fn ix(x: impl Into<Index>) -> Index {
    x.into()
}

/// `c · var`
pub fn times(c: i64, var: LoopId) -> Index {
    Index::from(var).scale(c)
}

pub fn load(b: BufferId, index: &[Index]) -> Expr {
    Expr::Load(b, index.to_vec())
}

pub fn bin(op: BinaryOp, a: Expr, b: Expr) -> Expr {
    Expr::binary(op, a, b)
}

pub fn un(op: UnaryOp, a: Expr) -> Expr {
    Expr::unary(op, a)
}

pub fn mul(a: Expr, b: Expr) -> Expr {
    bin(BinaryOp::Mul, a, b)
}

pub fn store(b: BufferId, index: &[Index], value: Expr) -> Stmt {
    Stmt::Store { buffer: b, index: index.to_vec(), value }
}

pub fn never() -> Cond {
    Cond::Not(Box::new(Cond::True))
}

pub fn add_to(b: BufferId, index: &[Index], value: Expr, first: Cond) -> Stmt {
    update(b, index, ReduceOp::Sum, value, first)
}

pub fn update(b: BufferId, index: &[Index], op: ReduceOp, value: Expr, first: Cond) -> Stmt {
    Stmt::Update { buffer: b, index: index.to_vec(), op, value, first }
}

pub fn for_kind(kind: LoopKind, var: LoopId, extent: impl Into<Index>, body: Vec<Stmt>) -> Stmt {
    Stmt::For(Loop { var, extent: extent.into(), kind, body })
}

pub fn for_(var: LoopId, extent: impl Into<Index>, body: Vec<Stmt>) -> Stmt {
    for_kind(LoopKind::Serial, var, extent, body)
}

pub fn vector(var: LoopId, extent: impl Into<Index>, body: Vec<Stmt>) -> Stmt {
    for_kind(LoopKind::Vectorized, var, extent, body)
}

pub fn unrolled(var: LoopId, extent: impl Into<Index>, body: Vec<Stmt>) -> Stmt {
    for_kind(LoopKind::Unrolled, var, extent, body)
}

pub fn program(name: &str) -> Program {
    Program { name: name.into(), ..Program::default() }
}

pub fn buffer(p: &mut Program, name: &str, dtype: DType, shape: &[i64], scope: Scope, role: Role) -> BufferId {
    p.add_buffer(Buffer { name: name.into(), dtype, shape: shape.to_vec(), scope, role })
}

pub fn input(p: &mut Program, name: &str, dtype: DType, shape: &[i64]) -> BufferId {
    buffer(p, name, dtype, shape, Scope::Global, Role::Input)
}

pub fn output(p: &mut Program, name: &str, dtype: DType, shape: &[i64]) -> BufferId {
    buffer(p, name, dtype, shape, Scope::Global, Role::Output)
}

pub fn temporary(p: &mut Program, name: &str, dtype: DType, shape: &[i64], scope: Scope) -> BufferId {
    buffer(p, name, dtype, shape, scope, Role::Temporary)
}

/// Floating-point element types, with their names.
pub fn dtypes() -> impl Iterator<Item = (DType, &'static str)> {
    DType::ALL.into_iter().filter(|(dtype, _)| dtype.is_float())
}

/// Target of the test machine.
pub fn host() -> Target {
    // A build without LLVM does not know the CPU's name.
    let (cpu, features) = host_cpu().unwrap_or_else(level);
    let has = |f: &str| features.split(',').any(|x| x == f);
    let (vector_bits, n_vector_registers, has_fma) = if cfg!(target_arch = "aarch64") {
        (128, 32, true)
    } else if has("+avx512f") && has("+avx512vl") && has("+avx512dq") && has("+avx512bw") {
        (512, 32, true)
    } else if has("+avx2") && has("+fma") {
        (256, 16, true)
    } else {
        (128, 16, false)
    };
    Target {
        arch: if cfg!(target_arch = "aarch64") { Arch::Aarch64 } else { Arch::X86_64 },
        cpu,
        features,
        vector_bits,
        n_vector_registers,
        has_fma,
        l1d_bytes: 48 << 10,
        l2_bytes: 1 << 20,
        l3_bytes: 32 << 20,
        gpu: None,
    }
}

/// x86-64 level of this machine, with the features that [`host`] checks.
fn level() -> (String, String) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512vl") {
        return ("x86-64-v4".into(), "+avx512f,+avx512vl,+avx512dq,+avx512bw,+avx2,+fma".into());
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return ("x86-64-v3".into(), "+avx2,+fma".into());
    }
    ("x86-64".into(), String::new())
}

/// Targets whose code this machine can run.
pub fn targets() -> Vec<Target> {
    let host = host();
    let mut all = vec![host.clone()];
    if host.arch == Arch::X86_64 {
        for (name, bits) in [("x86-64", 128), ("x86-64-v3", 256), ("x86-64-v4", 512)] {
            if host.vector_bits >= bits {
                all.push(Target::named(name).unwrap());
            }
        }
        if host.vector_bits == 256 {
            // Code for 512 bits in two halves, including masked tails.
            all.push(Target { vector_bits: 512, ..Target::named("x86-64-v3").unwrap() });
        }
    }
    all
}

/// Memory that ends, up to its alignment, at an inaccessible page.
pub struct Guarded {
    mapping: *mut u8,
    len: usize,
    start: *mut u8,
    bytes: usize,
}

const PAGE: usize = 4096;
const CANARY: u8 = 0xa5;

impl Guarded {
    pub fn new(bytes: usize) -> Guarded {
        Guarded::with(bytes, bytes.next_multiple_of(64))
    }

    /// Allocates memory at a multiple of `align` bytes, but not of a larger power of two.
    pub fn barely_aligned(bytes: usize, align: usize) -> Guarded {
        let rounded = bytes.next_multiple_of(align);
        Guarded::with(bytes, if rounded.is_multiple_of(2 * align) { rounded + align } else { rounded })
    }

    fn with(bytes: usize, rounded: usize) -> Guarded {
        let len = rounded.next_multiple_of(PAGE) + 2 * PAGE;
        // SAFETY: this creates a new mapping, whose first and last page are then made inaccessible.
        unsafe {
            let mapping = libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert!(mapping != libc::MAP_FAILED);
            let mapping = mapping.cast::<u8>();
            let start = mapping.add(len - PAGE - rounded);
            std::ptr::write_bytes(mapping, CANARY, len);
            libc::mprotect(mapping.cast(), PAGE, libc::PROT_NONE);
            libc::mprotect(mapping.add(len - PAGE).cast(), PAGE, libc::PROT_NONE);
            Guarded { mapping, len, start, bytes }
        }
    }

    pub fn ptr(&self) -> *mut u8 {
        self.start
    }

    /// Whether nothing was written around the memory.
    pub fn is_intact(&self) -> bool {
        // SAFETY: the range lies between the first and the last page.
        unsafe {
            let readable = std::slice::from_raw_parts(self.mapping.add(PAGE), self.len - 2 * PAGE);
            let at = self.start as usize - self.mapping as usize - PAGE;
            readable[..at].iter().chain(&readable[at + self.bytes..]).all(|b| *b == CANARY)
        }
    }

    pub fn fill(&self, bytes: &[u8]) {
        // SAFETY: the slice covers the memory, to which there are no other references.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }.copy_from_slice(bytes);
    }

    pub fn read(&self) -> Vec<u8> {
        // SAFETY: the slice covers the memory, which is not written in the meantime.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }.to_vec()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping.
        unsafe { libc::munmap(self.mapping.cast(), self.len) };
    }
}

/// Simple generator of numbers in -1..1.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 40) as f64 / (1u64 << 23) as f64) - 1.0
    }
}

/// Arguments of a program: random inputs, and outputs filled with NaN.
pub fn arguments(p: &Program) -> Vec<Vec<f64>> {
    let mut numbers = Numbers(7);
    p.arguments()
        .map(|(id, b)| {
            let n = b.n_elements().unwrap() as usize;
            match b.role {
                Role::Output => vec![f64::NAN; n],
                _ if !b.dtype.is_float() => random_argument(p, id, u64::from(id.0)),
                _ => (0..n).map(|_| f64::from(numbers.next() as f32)).collect(),
            }
        })
        .collect()
}

/// Runtime with two threads, which alternate iterations.
pub fn two_threads() -> Runtime {
    unsafe extern "C" fn run(
        _: *mut c_void,
        body: unsafe extern "C" fn(*mut c_void, i64, i64),
        env: *mut c_void,
        n: i64,
    ) {
        let env = env as usize;
        std::thread::scope(|s| {
            for thread in 0..2 {
                s.spawn(move || {
                    for i in (thread..n).step_by(2) {
                        // SAFETY: the kernel passed both the function and its environment.
                        unsafe { body(env as *mut c_void, i, thread) };
                    }
                });
            }
        });
    }
    Runtime { context: std::ptr::null_mut(), parallel_for: run }
}

/// Runs a kernel on guarded memory and returns all arguments afterwards.
pub fn run(
    p: &Program,
    kernel: &CompiledKernel,
    arguments: &[Vec<f64>],
    runtime: &Runtime,
    n_threads: usize,
) -> Vec<Vec<f64>> {
    let dtypes = || p.arguments().map(|(_, b)| b.dtype);
    let in_memory = |(dtype, values): (DType, &Vec<f64>)| {
        let mut bytes = vec![0; values.len() * dtype.bytes() as usize];
        dtype.write(values, &mut bytes);
        bytes
    };
    let arguments: Vec<Vec<u8>> = dtypes().zip(arguments).map(in_memory).collect();
    let after = run_bytes(p, kernel, &arguments, runtime, n_threads);
    dtypes().zip(&after).map(|(dtype, bytes)| dtype.read(bytes)).collect()
}

/// Runs a kernel like [`run`], on arguments given as bytes.
pub fn run_bytes(
    p: &Program,
    kernel: &CompiledKernel,
    arguments: &[Vec<u8>],
    runtime: &Runtime,
    n_threads: usize,
) -> Vec<Vec<u8>> {
    let held: Vec<Guarded> = p
        .arguments()
        .zip(arguments)
        .map(|((_, b), bytes)| {
            let n_bytes = b.size_bytes().unwrap() as usize;
            let memory = match kernel.argument_align() {
                ArgumentAlign::Lines => Guarded::new(n_bytes),
                ArgumentAlign::Elements => Guarded::barely_aligned(n_bytes, b.dtype.bytes() as usize),
            };
            memory.fill(bytes);
            memory
        })
        .collect();
    let kept: Vec<Guarded> = kernel.kept_bytes().iter().map(|b| Guarded::new(*b as usize)).collect();
    let scratch = Guarded::new((kernel.scratch_bytes(n_threads)).next_multiple_of(SCRATCH_ALIGN) as usize);
    let pointers: Vec<*mut u8> = held.iter().map(Guarded::ptr).collect();
    let kept_pointers: Vec<*mut u8> = kept.iter().map(Guarded::ptr).collect();
    // SAFETY: the memory has the required sizes.
    unsafe {
        kernel.prepare(&pointers, &kept_pointers, scratch.ptr(), runtime);
        kernel.run(&pointers, &kept_pointers, scratch.ptr(), runtime);
        kernel.finish(&pointers, &kept_pointers, scratch.ptr(), runtime);
    }
    assert!(held.iter().all(Guarded::is_intact), "{}: wrote around an argument", p.name);
    assert!(kept.iter().chain([&scratch]).all(Guarded::is_intact), "{}: wrote around a temporary", p.name);
    held.iter().map(Guarded::read).collect()
}

/// Compares a kernel's arguments with expected ones.
pub fn compare(p: &Program, target: &Target, got: &[Vec<f64>], expected: &[Vec<f64>]) {
    for (((_, b), got), expected) in p.arguments().zip(got).zip(expected) {
        let tolerance = match b.dtype {
            DType::F64 => 1e-12,
            DType::F32 => 2e-5,
            // Distance to the next number.
            halves => 2.0 * halves.unit(),
        };
        let scale = expected.iter().filter(|x| x.is_finite()).fold(1.0, |m: f64, x| m.max(x.abs()));
        for (i, (g, e)) in got.iter().zip(expected).enumerate() {
            let same = g == e || (g - e).abs() <= tolerance * scale || (g.is_nan() && e.is_nan());
            assert!(same, "{} on {target}: {}[{i}] is {g}, not {e}", p.name, b.name);
        }
    }
}

/// Compares the kernel with the interpreter on every target that this machine can run, on one thread and on
/// two.
pub fn check(p: &Program) {
    let expected = interpreted(p);
    for target in targets() {
        check_kernels(p, &target, &kernels(p, &target), &expected);
    }
}

pub fn check_on(p: &Program, target: &Target) {
    check_kernels(p, target, &kernels(p, target), &interpreted(p));
}

/// Checks a program like [`check_on`], on arguments aligned to their elements only.
pub fn check_barely_aligned(p: &Program, target: &Target) {
    let kernels = kernels_of(p, Compiler::for_arguments(target.clone(), ArgumentAlign::Elements));
    check_kernels(p, target, &kernels, &interpreted(p));
}

/// Arguments after the interpreter ran the program on them.
fn interpreted(p: &Program) -> Vec<Vec<f64>> {
    let mut expected = arguments(p);
    tilewright_ir::interp::run(p, &mut expected).unwrap_or_else(|e| panic!("{}: {e}", p.name));
    expected
}

fn check_kernels(p: &Program, target: &Target, kernels: &[CompiledKernel], expected: &[Vec<f64>]) {
    let arguments = arguments(p);
    for kernel in kernels {
        compare(p, target, &run(p, kernel, &arguments, &Runtime::serial(), 1), expected);
        compare(p, target, &run(p, kernel, &arguments, &two_threads(), 2), expected);
    }
}

/// Kernels of a program compiled by LLVM and, if it supports the target, by the fast back end.
pub fn kernels(p: &Program, target: &Target) -> Vec<CompiledKernel> {
    kernels_of(p, Compiler::new(target.clone()))
}

fn kernels_of(p: &Program, mut compiler: Compiler) -> Vec<CompiledKernel> {
    let target = compiler.target().clone();
    let mut kernels = Vec::new();
    if llvm_version().is_some() {
        kernels.push(compiler.compile(p).unwrap_or_else(|e| panic!("{} on {target}: {e}", p.name)));
    }
    if compiler.is_quick() {
        kernels.push(compiler.compile_without_llvm(p).unwrap_or_else(|e| panic!("{} on {target}: {e}", p.name)));
    }
    kernels
}

/// Program without a loop, which computes `n` sums, eight at a time.
pub fn row_of_sums(n: i64) -> Program {
    let mut p = program(&format!("a row of {n} sums"));
    let a = input(&mut p, "A", DType::F32, &[n]);
    let b = output(&mut p, "B", DType::F32, &[n]);
    let r = temporary(&mut p, "R", DType::F32, &[8], Scope::Register);
    let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
    let at = times(8, i).add(&ix(l));
    let sum = |x: Expr, y: Expr| bin(BinaryOp::Add, x, y);
    let add = store(r, &[ix(l)], sum(load(r, &[ix(l)]), load(a, std::slice::from_ref(&at))));
    let write = store(b, std::slice::from_ref(&at), load(r, &[ix(l)]));
    let clear = store(r, &[ix(l)], Expr::Const(0.0));
    p.body = vec![
        Stmt::Alloc(r),
        vector(l, 8, vec![clear]),
        unrolled(i, n / 8, vec![vector(l, 8, vec![add]), vector(l, 8, vec![write])]),
    ];
    p
}
