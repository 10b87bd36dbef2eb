//! Kernels of products with an open number of rows.

mod common;

use common::*;
use tilewright_codegen::{CompiledKernel, Compiler, Runtime, SCRATCH_ALIGN};
use tilewright_ir::lower::lower;
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Program, Role};

/// Register tile with an epilogue and prepacked weights.
const TILE: &str = "split oi 8 -> i.rest om shrink
split i.rest 3 -> ic ir shrink
split oj 48 -> j.rest on shrink
split j.rest 2 -> jc jr shrink
reorder ic jc jr ir om on
compute_at acc at ir
split j 16 -> jv jl shrink
split k 4 -> ko ki shrink
reorder ko ki i jv jl
stage W -> B.p 0/48 1 0%48
split B.p.1 16 -> B.p.kv B.p.kl shrink
split B.p.2 16 -> B.p.v B.p.l shrink
reorder B.p.kv B.p.v B.p.l B.p.kl
unroll B.p.kl
vectorize B.p.l
accumulate acc at ir -> C.r
vectorize jl
unroll jv
unroll i
unroll ki
split on 16 -> ov ol shrink
vectorize ol
unroll om
unroll ov";

/// Copies of both factors, shared between threads that divide the columns, with an epilogue for each block.
const SHARED: &str = "split oi 42 -> ic om shrink
split oj 64 -> jc on shrink
reorder ic jc om on
compute_at acc at jc
split i 7 -> ir im shrink
split j 32 -> jr jm shrink
split jm 16 -> jv jl shrink
split k 2 -> ko ki shrink
reorder jr ir ko ki im jv jl
stage W -> B.p 0/32 1 0%32
split B.p.1 16 -> B.p.kv B.p.kl shrink
split B.p.2 16 -> B.p.v B.p.l shrink
reorder B.p.kv B.p.v B.p.l B.p.kl
unroll B.p.kl
vectorize B.p.l
stage X at ic -> A.p 0/7 1 0%7
split A.p.1 16 -> A.p.v A.p.l shrink
reorder A.p.v A.p.l A.p.2
unroll A.p.2
vectorize A.p.l
parallel A.p.0
accumulate acc at ir -> C.r
vectorize jl
unroll jv
unroll im
unroll ki
split on 16 -> ov ol shrink
vectorize ol
parallel jr
parallel om";

/// Parallel rows, without packing.
const ROWS: &str = "split i 3 -> i.rest im shrink
split i.rest 2 -> ic ir shrink
split j 16 -> jr jl shrink
split k 3 -> ko ki shrink
reorder ic jr ir ko ki im jl
accumulate C at ir -> C.r
vectorize jl
unroll im
unroll ki
parallel ic";

/// Memory of a family's kernel, reused for each size.
struct Memory {
    arguments: Vec<Guarded>,
    kept: Vec<Guarded>,
    scratch: Guarded,
}

impl Memory {
    fn new(p: &Program, kernel: &CompiledKernel) -> Memory {
        let n_bytes = |b: &tilewright_ir::Buffer| b.size_bytes().unwrap() as usize;
        Memory {
            arguments: p.arguments().map(|(_, b)| Guarded::new(n_bytes(b))).collect(),
            kept: kernel.kept_bytes().iter().map(|b| Guarded::new(*b as usize)).collect(),
            scratch: Guarded::new(kernel.scratch_bytes(2).next_multiple_of(SCRATCH_ALIGN) as usize),
        }
    }

    /// Runs the kernel at given sizes, on a member's arguments, which are the first part of the family's
    /// buffers, followed by NaN. Returns the output's bytes.
    fn run(
        &self,
        kernel: &CompiledKernel,
        sizes: &[i64],
        p: &Program,
        given: &[Vec<u8>],
        runtime: &Runtime,
    ) -> Vec<u8> {
        for (((_, b), memory), given) in p.arguments().zip(&self.arguments).zip(given) {
            let beyond = if b.role == Role::Output { 0x5a } else { 0xff };
            let mut bytes = vec![beyond; b.size_bytes().unwrap() as usize];
            if b.role != Role::Output {
                bytes[..given.len()].copy_from_slice(given);
            }
            memory.fill(&bytes);
        }
        self.scratch.fill(&vec![0xff; self.scratch.read().len()]);
        let [arguments, kept] =
            [&self.arguments, &self.kept].map(|all| all.iter().map(Guarded::ptr).collect::<Vec<_>>());
        // SAFETY: the memory has the required sizes.
        unsafe {
            kernel.prepare(&arguments, &kept, self.scratch.ptr(), runtime);
            kernel.run_at(sizes, &arguments, &kept, self.scratch.ptr(), runtime);
        }
        let all = self.arguments.iter().chain(&self.kept).chain([&self.scratch]);
        assert!(all.into_iter().all(Guarded::is_intact), "{}: {sizes:?}: wrote around a buffer", p.name);
        self.arguments.last().expect("there is an output").read()
    }
}

fn check(text: &str, steps: &str) {
    let steps = parse_steps(steps).unwrap();
    let workload = Workload::parse(text).unwrap();
    let scheduled =
        |w: &Workload| lower(&apply_all(&w.program(), &steps).unwrap_or_else(|(at, e)| panic!("{at}: {e}")));
    let family = scheduled(&workload);
    let (_, range) = workload.open_sizes().next().unwrap();
    let up = range.values();
    for target in targets().into_iter().filter(|t| t.has_fma) {
        let mut members = Compiler::new(target.clone());
        for kernel in kernels(&family, &target) {
            let memory = Memory::new(&family, &kernel);
            for size in up.clone().chain(up.clone().rev()) {
                let member = scheduled(&workload.at(&[size]).unwrap());
                let given: Vec<Vec<u8>> = member
                    .arguments()
                    .zip(arguments(&member))
                    .map(|((_, b), values)| {
                        let mut bytes = vec![0; b.size_bytes().unwrap() as usize];
                        b.dtype.write(&values, &mut bytes);
                        bytes
                    })
                    .collect();
                let expected = match members.compile_quickly(&member) {
                    Ok(quick) => run_bytes(&member, &quick, &given, &Runtime::serial(), 1).pop().unwrap(),
                    Err(_) => run_bytes(&member, &members.compile(&member).unwrap(), &given, &Runtime::serial(), 1)
                        .pop()
                        .unwrap(),
                };
                for runtime in [Runtime::serial(), two_threads()] {
                    let out = memory.run(&kernel, &[size], &family, &given, &runtime);
                    let (inside, beyond) = out.split_at(expected.len());
                    assert!(inside == expected, "{text} on {target}: other bits than its member of {size} rows");
                    assert!(beyond.iter().all(|b| *b == 0x5a), "{text} on {target}: wrote beyond {size} rows");
                }
            }
        }
    }
}

#[test]
fn a_tile_has_the_bits_of_every_member() {
    check("dense:m=1..40,n=50,k=24,const=w,epilogue=bias+relu", TILE);
}

#[test]
fn shared_copies_have_the_bits_of_every_member() {
    check("dense:m=1..45,n=100,k=19,const=w,epilogue=bias+relu", SHARED);
}

#[test]
fn rows_in_steps_have_the_bits_of_every_member() {
    check("matmul:m=2..26/4,n=40,k=25", ROWS);
    check("matmul:m=1..13,n=33,k=9,dtype=f64", ROWS);
}

#[test]
#[should_panic(expected = "are values of")]
fn a_size_that_is_none_is_refused() {
    let family = lower(&Workload::parse("matmul:m=2..26/4,n=40,k=25").unwrap().program());
    let kernel = kernels(&family, &host()).pop().unwrap();
    Memory::new(&family, &kernel).run(&kernel, &[3], &family, &[], &Runtime::serial());
}
