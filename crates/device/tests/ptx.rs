//! Random configurations of every template that serves a GPU, as PTX: an emulator runs it, and NVIDIA's
//! assembler, if installed, compiles it.
//!
//! `TILEWRIGHT_CONFIGS=300` makes a long run: that many configurations on each GPU, or with
//! `TILEWRIGHT_GPU=sm_70` on that one. By default, one of each template for each shape, on the GPU with the
//! most choices.
#![cfg(feature = "llvm")]

#[path = "../../codegen/tests/emulator/mod.rs"]
mod emulator;
#[path = "../../codegen/tests/nvidia/mod.rs"]
mod nvidia;
mod random;

#[path = "ptx/clusters.rs"]
mod clusters;
#[path = "ptx/converters.rs"]
mod converters;
#[path = "ptx/fragments.rs"]
mod fragments;
#[path = "ptx/functions.rs"]
mod functions;
#[path = "ptx/groups.rs"]
mod groups;
#[path = "ptx/instructions.rs"]
mod instructions;
#[path = "ptx/padded.rs"]
mod padded;
#[path = "ptx/producer.rs"]
mod producer;
#[path = "ptx/stores.rs"]
mod stores;
#[path = "ptx/teams.rs"]
mod teams;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use emulator::Order;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use random::{LARGE, SHAPES, each, models_registers, n_configs};
use tilewright_codegen::{Emit, compile_gpu, emit_gpu};
use tilewright_ir::gpu::{Abi, producer_warp};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{self, Tolerance, random_argument};
use tilewright_ir::target::{Arch, GENERIC, GpuApi};
use tilewright_ir::{GpuProgram, Program, Role, Target, interp, lower_gpu};
use tilewright_search::{Config, Constraint, Parameter, Value};
use tilewright_tune::{Task, TemplateSetting};

/// GPUs to test.
fn gpus() -> Vec<&'static str> {
    let only = std::env::var("TILEWRIGHT_GPU").ok();
    let is_asked = |gpu: &&str| match &only {
        Some(only) => gpu == only,
        None => n_configs().is_some() || *gpu == "sm_90a",
    };
    let all = GENERIC.iter().filter(|generic| generic.arch == Arch::Gpu(GpuApi::Cuda));
    all.map(|generic| generic.name).filter(is_asked).collect()
}

/// Arguments of small numbers, with outputs of NaN.
fn arguments(program: &Program) -> Vec<Vec<f64>> {
    let values = program.arguments().map(|(id, b)| {
        let n = b.n_elements().unwrap() as usize;
        match b.role {
            Role::Output => vec![f64::NAN; n],
            _ => (0..n).map(|i| ((i * 7 + id.0 as usize * 3) % 11) as f64 / 4.0 - 1.25).collect(),
        }
    });
    values.collect()
}

/// Such arguments after the program of a workload, which the interpreter runs once for all tests.
fn computed(workload: &Workload) -> Arc<Vec<Vec<f64>>> {
    static COMPUTED: Mutex<BTreeMap<String, Arc<Vec<Vec<f64>>>>> = Mutex::new(BTreeMap::new());
    let text = workload.to_string();
    if let Some(done) = COMPUTED.lock().unwrap().get(&text) {
        return done.clone();
    }
    let program = workload.program();
    let mut done = arguments(&program);
    interp::run(&program, &mut done).unwrap();
    COMPUTED.lock().unwrap().entry(text).or_insert(Arc::new(done)).clone()
}

fn ptx(gpu: &GpuProgram, task: &Task) -> Result<String, String> {
    let made = compile_gpu(gpu, &task.setting.target).map_err(|why| format!("{why}\n{gpu}"))?;
    Ok(String::from_utf8(made.code).expect("PTX is text"))
}

#[test]
fn emulated_kernels_compute_the_operator() {
    for gpu in gpus() {
        each(&SHAPES, gpu, |text, task, _, kernels| {
            let workload = Workload::parse(text).unwrap();
            let (program, expected) = (workload.program(), computed(&workload));
            let text = ptx(kernels, task)?;
            let got = emulator::run(kernels, &text, &arguments(&program), Order::Descending)
                .map_err(|why| format!("{why}\n{kernels}\n{text}"))?;
            for ((_, b), (got, expected)) in program.arguments().zip(got.iter().zip(&*expected)) {
                // Sums in another order may round to the next 16-bit number.
                let last = if b.dtype.is_half() { 2.0 * b.dtype.unit() } else { 2e-5 };
                let most = last * expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
                let far = got.iter().zip(expected).position(|(a, b)| a.is_nan() || (a - b).abs() > most);
                if let Some(at) = far {
                    let (name, got, expected) = (&b.name, got[at], expected[at]);
                    return Err(format!("{name}: element {at} is {got} instead of {expected}\n{kernels}\n{text}"));
                }
            }
            Ok(())
        });
    }
}

/// Task whose kernels multiply tiles on tensor cores.
fn tiles_task(text: &str, gpu: &str) -> Task {
    let workload = Workload::parse(text).unwrap();
    let template = if text.starts_with("conv2d") { "gpu-conv-mma" } else { "gpu-matmul-mma" };
    Task::new(TemplateSetting { workload, target: Target::named(gpu).unwrap(), n_threads: 1 }, Some(template)).unwrap()
}

/// Random arguments of a workload, with its trusted result.
fn with_reference(workload: &Workload) -> (Vec<Vec<f64>>, Vec<f64>) {
    let program = workload.program();
    let given: Vec<Vec<f64>> = program.arguments().map(|(id, _)| random_argument(&program, id, id.0.into())).collect();
    let inputs: Vec<_> = program.arguments().zip(&given).filter(|((_, b), _)| b.role != Role::Output).collect();
    let inputs = inputs.into_iter().map(|(_, values)| values.clone()).collect::<Vec<_>>();
    let expected = reference::evaluate(&program, &inputs, 1).unwrap().remove(0);
    (given, expected)
}

/// Exchanges two registers in a register list of the instruction at an offset.
fn exchanged(text: &str, at: usize, list: usize, [a, b]: [usize; 2]) -> String {
    let end = at + text[at..].find(';').unwrap();
    let open = at + text[at..end].match_indices('{').nth(list).unwrap().0 + 1;
    let close = open + text[open..].find('}').unwrap();
    let mut registers: Vec<&str> = text[open..close].split(',').map(str::trim).collect();
    registers.swap(a, b);
    format!("{}{}{}", &text[..open], registers.join(", "), &text[close..])
}

const HALVES_OF_WARPS: &str = r#"{"block_m":128,"block_n":128,"block_k":32,"warp_m":64,"warp_n":64,"vector_a":8,
    "vector_b":8,"order":"groups","unroll_k":2,"ahead":3,"copies":"async","precision":"halves"}"#;

/// Shapes that blocks of groups of warps divide, and some that they do not: with both operands along the sum,
/// one, and neither.
const OF_GROUPS: [&str; 15] = [
    "matmul:m=64,n=96,k=64,tf32=1",
    "matmul:m=128,n=256,k=128,tf32=1",
    "matmul:m=70,n=33,k=45,tf32=1,epilogue=bias+relu",
    "batch_matmul:b=2,m=64,n=64,k=64,tb=1,tf32=1",
    "batch_matmul:b=2,m=96,n=40,k=96,ta=1,tf32=1",
    "dense:m=130,n=64,k=192,tf32=1,epilogue=bias+gelu",
    "matmul:m=64,n=96,k=96",
    "matmul:m=70,n=33,k=45,epilogue=bias+relu",
    "batch_matmul:b=2,m=96,n=64,k=64,ta=1,tb=1,epilogue=add",
    "matmul:m=64,n=128,k=192,dtype=bf16",
    "matmul:m=70,n=36,k=45,dtype=f16,epilogue=bias+relu",
    "dense:m=128,n=72,k=128,dtype=f16,epilogue=bias",
    "dense:m=64,n=96,k=320,tf32=1",
    "batch_matmul:b=2,m=136,n=64,k=80,ta=1,dtype=bf16,epilogue=add",
    "batch_matmul:b=2,m=96,n=200,k=64,ta=1,tb=1,dtype=f16",
];

/// Task for groups of four warps, on a GPU of `n_units` multiprocessors.
fn groups_task(text: &str, n_units: u32) -> Task {
    let workload = Workload::parse(text).unwrap();
    let mut target = Target::named("sm_90a").unwrap();
    target.gpu.as_mut().expect("it is a GPU").n_units = n_units;
    Task::new(TemplateSetting { workload, target, n_threads: 1 }, Some("gpu-matmul-wgmma")).unwrap()
}

/// Visits `n` random configurations of each workload for groups of four warps: the workload, its task, the
/// kernels and their code.
fn each_of_groups(texts: &[&str], n: usize, visit: impl FnMut(&Workload, &Task, &Config, &GpuProgram, &str)) {
    each_where(texts, (n, UNITS), |_, _| true, visit);
}

/// Number of multiprocessors of an H100.
const UNITS: u32 = 132;

/// Number of configurations of each workload that a test takes.
fn n_each(texts: &[&str]) -> usize {
    n_configs().map_or(2, |n| n.div_ceil(texts.len()))
}

/// Visits some configurations, on a GPU of `n_units` multiprocessors.
fn each_where(
    texts: &[&str],
    (n, n_units): (usize, u32),
    is_wanted: impl Fn(&Task, &Config) -> bool,
    mut visit: impl FnMut(&Workload, &Task, &Config, &GpuProgram, &str),
) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(47);
    for text in texts {
        let task = groups_task(text, n_units);
        let workload = task.setting.workload.clone();
        for _ in 0..n {
            let config = loop {
                let config = task.space.sample(&mut rng);
                if is_wanted(&task, &config) {
                    break config;
                }
            };
            let json = task.space.config_to_json(&config);
            let program = task.program(&config).unwrap_or_else(|(at, why)| panic!("{text} {json} step {at}: {why}"));
            let kernels = lower_gpu(&program).unwrap_or_else(|why| panic!("{text} {json}: {why}\n{program}"));
            let code = ptx(&kernels, &task).unwrap();
            visit(&workload, &task, &config, &kernels, &code);
        }
    }
}

/// Number of configurations of each shape to test.
fn n_of_each() -> usize {
    n_configs().map_or(4, |n| n.div_ceil(OF_GROUPS.len()))
}

const ORDERS: [Order; 3] = [Order::Ascending, Order::Descending, Order::Strided(7)];

/// Asserts that a kernel for groups of warps computes its workload.
fn require_right(of: (&Workload, &Task, &Config), kernels: &GpuProgram, code: &str, order: Order) {
    let (workload, task, config) = of;
    let (given, expected) = (arguments(&workload.program()), computed(workload));
    let json = task.space.config_to_json(config);
    let got = emulator::run(kernels, code, &given, order)
        .unwrap_or_else(|why| panic!("{workload} {json} {order:?}: {why}\n{kernels}\n{code}"));
    let (got, expected) = (got.last().unwrap(), expected.last().unwrap());
    let last = if workload.dtype.is_half() { 2.0 * workload.dtype.unit() } else { 2e-5 };
    let most = last * expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    let far = got.iter().zip(expected).position(|(a, b)| a.is_nan() || (a - b).abs() > most);
    if let Some(at) = far {
        panic!("{workload} {json} {order:?}: element {at} is {} instead of {}\n{kernels}", got[at], expected[at]);
    }
}

/// Kernel that is correct in every order of threads, from which mutants are made.
struct Original {
    /// Workload and configuration.
    name: String,
    kernels: GpuProgram,
    code: String,
    given: Vec<Vec<f64>>,
    right: Vec<Vec<f64>>,
}

impl Original {
    /// Makes the kernel of a configuration, on a GPU of three multiprocessors.
    fn of(text: &str, config: &str) -> Original {
        let name = format!("{text} {config}");
        let task = groups_task(text, 3);
        let workload = &task.setting.workload;
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let code = ptx(&kernels, &task).unwrap();
        ORDERS.iter().for_each(|order| require_right((workload, &task, &config), &kernels, &code, *order));
        let given = arguments(&workload.program());
        let right = emulator::run(&kernels, &code, &given, Order::Ascending).unwrap();
        Original { name, kernels, code, given, right }
    }

    /// Asserts that a mutant's code differs, and is wrong in one of these orders of threads.
    #[track_caller]
    fn require_found(&self, what: &str, mutant: &str, orders: &[Order]) {
        let Original { name, kernels, code, given, right } = self;
        assert!(!mutant.lines().map(str::trim).eq(code.lines().map(str::trim)), "{what}\n{code}");
        let is_found = |order: &Order| match emulator::run(kernels, mutant, given, *order) {
            Ok(got) => got != *right,
            Err(why) => {
                println!("{what}: {}", why.lines().next().unwrap_or_default());
                true
            }
        };
        assert!(orders.iter().any(is_found), "{what} goes unnoticed: {name}\n{mutant}");
    }
}
