//! Random configurations of every template that serves a GPU, as PTX: an emulator runs it, and NVIDIA's
//! assembler takes it where it is here.
//!
//! `TILEWRIGHT_CONFIGS=300` makes a long run of it: so many configurations on each GPU, or with
//! `TILEWRIGHT_GPU=sm_70` on that one. By default it is one of each template for each shape, on the GPU that
//! has most for them to choose from.
#![cfg(feature = "llvm")]

#[path = "../../codegen/tests/emulator/mod.rs"]
mod emulator;
#[path = "../../codegen/tests/nvidia/mod.rs"]
mod nvidia;
mod random;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use emulator::Order;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use random::{LARGE, SHAPES, each, models_registers, n_configs};
use tilewright_codegen::{Emit, compile_gpu, emit_gpu};
use tilewright_ir::gpu::{Abi, copier};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{self, Tolerance, random_argument};
use tilewright_ir::target::{Arch, GENERIC, GpuApi};
use tilewright_ir::{GpuProgram, Program, Role, Target, interp, lower_gpu};
use tilewright_search::{Config, Constraint, Parameter, Value};
use tilewright_tune::{Setting, Task};

/// The GPUs.
fn gpus() -> Vec<&'static str> {
    let only = std::env::var("TILEWRIGHT_GPU").ok();
    let is_asked = |gpu: &&str| match &only {
        Some(only) => gpu == only,
        None => n_configs().is_some() || *gpu == "sm_90a",
    };
    let all = GENERIC.iter().filter(|generic| generic.arch == Arch::Gpu(GpuApi::Cuda));
    all.map(|generic| generic.name).filter(is_asked).collect()
}

/// Small numbers, and outputs that are none.
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

fn ptx(gpu: &GpuProgram, task: &Task) -> Result<String, String> {
    let made = compile_gpu(gpu, &task.setting.target).map_err(|why| format!("{why}\n{gpu}"))?;
    Ok(String::from_utf8(made.code).expect("PTX is text"))
}

#[test]
fn emulated_kernels_compute_the_operator() {
    for gpu in gpus() {
        each(&SHAPES, gpu, |text, task, _, kernels| {
            let program = Workload::parse(text).unwrap().program();
            let mut expected = arguments(&program);
            interp::run(&program, &mut expected).unwrap();
            let text = ptx(kernels, task)?;
            let got = emulator::run(kernels, &text, &arguments(&program), Order::Descending)
                .map_err(|why| format!("{why}\n{kernels}\n{text}"))?;
            for ((_, b), (got, expected)) in program.arguments().zip(got.iter().zip(&expected)) {
                // Sums in another order may be the next number of 16 bits.
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

/// Products of numbers with all their bits, in two parts each, are nearly those of f32, however
/// long the sums.
#[test]
fn tensor_cores_lose_little() {
    let workload = Workload::parse("matmul:m=64,n=48,k=1536").unwrap();
    let (given, expected) = with_reference(&workload);
    for template in ["gpu-matmul-mma", "gpu-matmul-wgmma"] {
        let setting = Setting { workload: workload.clone(), target: Target::named("sm_90a").unwrap(), n_threads: 1 };
        let task = Task::new(setting, Some(template)).unwrap();
        let kernels = lower_gpu(&task.program(&task.first_guess(0).unwrap()).unwrap()).unwrap();
        let text = ptx(&kernels, &task).unwrap();
        let got = emulator::run(&kernels, &text, &given, Order::Ascending).unwrap();
        let error = reference::relative_error(&got[2], &expected);
        println!("{template}: relative error {error:.2e}");
        assert!(error < 4e-7, "{template}: {error:.2e}");
    }
}

/// Shapes that tiles divide, and some that they do not, with factors in either order.
const PRODUCTS: [&str; 6] = [
    "matmul:m=64,n=48,k=80",
    "matmul:m=40,n=57,k=33,epilogue=bias+relu",
    "dense:m=32,n=72,k=64,epilogue=bias",
    "batch_matmul:b=2,m=32,n=40,k=48,ta=1",
    "batch_matmul:b=2,m=24,n=32,k=96,ta=1,tb=1,epilogue=add",
    "conv2d:c=8,h=9,w=11,k=32,r=3,s=3,pad=1,epilogue=bias",
];

/// A task whose kernels multiply tiles in tensor cores.
fn tiles_task(text: &str, gpu: &str) -> Task {
    let workload = Workload::parse(text).unwrap();
    let template = if text.starts_with("conv2d") { "gpu-conv-mma" } else { "gpu-matmul-mma" };
    Task::new(Setting { workload, target: Target::named(gpu).unwrap(), n_threads: 1 }, Some(template)).unwrap()
}

/// Random arguments of a workload and its trusted result.
fn with_reference(workload: &Workload) -> (Vec<Vec<f64>>, Vec<f64>) {
    let program = workload.program();
    let given: Vec<Vec<f64>> = program.arguments().map(|(id, _)| random_argument(&program, id, id.0.into())).collect();
    let inputs: Vec<_> = program.arguments().zip(&given).filter(|((_, b), _)| b.role != Role::Output).collect();
    let inputs = inputs.into_iter().map(|(_, values)| values.clone()).collect::<Vec<_>>();
    let expected = reference::evaluate(&program, &inputs, 1).unwrap().remove(0);
    (given, expected)
}

/// Random configurations of products of halves; `TILEWRIGHT_CONFIGS=100` takes so many of each type.
#[test]
fn tensor_cores_multiply_halves() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(16);
    for dtype in ["bf16", "f16"] {
        let mut largest: f64 = 0.0;
        let n = n_configs().unwrap_or(PRODUCTS.len());
        for at in 0..n {
            let (product, gpu) = (PRODUCTS[at % PRODUCTS.len()], ["sm_80", "sm_90a"][at / 6 % 2]);
            let task = tiles_task(&format!("{product},dtype={dtype}"), gpu);
            let config = task.space.sample(&mut rng);
            let (given, expected) = with_reference(&task.setting.workload);
            let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
            let text = ptx(&kernels, &task).unwrap();
            let why = format!("{} {}", task.setting.workload, task.space.config_to_json(&config));
            let got = emulator::run(&kernels, &text, &given, Order::Descending);
            let got = got.unwrap_or_else(|fault| panic!("{why}: {fault}\n{kernels}\n{text}"));
            let got = got.last().expect("the result comes last");
            assert!(text.contains("mma.sync.aligned.m16n8k16"), "{why}\n{text}");
            let tolerance = Tolerance::for_program(&task.setting.workload.program());
            tolerance.compare(got, &expected).unwrap_or_else(|wrong| panic!("{why}: {wrong}\n{kernels}\n{text}"));
            largest = largest.max(reference::relative_error(got, &expected));
        }
        println!("{dtype}: {n} configurations, relative error {largest:.2e} at most");
        assert!(largest < 1e-2, "{dtype}: {largest:.2e}");
    }
}

/// Exchanges two registers in a list of an instruction that begins somewhere.
fn exchanged(text: &str, at: usize, list: usize, [a, b]: [usize; 2]) -> String {
    let end = at + text[at..].find(';').unwrap();
    let open = at + text[at..end].match_indices('{').nth(list).unwrap().0 + 1;
    let close = open + text[open..].find('}').unwrap();
    let mut registers: Vec<&str> = text[open..close].split(',').map(str::trim).collect();
    registers.swap(a, b);
    format!("{}{}{}", &text[..open], registers.join(", "), &text[close..])
}

/// Wrong fragments are found: a register in the place of another, rows for columns, another row.
#[test]
fn mutants_of_fragments_are_found() {
    for dtype in ["bf16", "f16"] {
        let task = tiles_task(&format!("matmul:m=32,n=32,k=64,dtype={dtype}"), "sm_80");
        let config = r#"{"block_m":32,"block_n":32,"block_k":32,"warp_m":16,"warp_n":16,"vector_a":8,"vector_b":8,
            "order":"rows","unroll_k":2,"ahead":0,"precision":"halves"}"#;
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let text = ptx(&kernels, &task).unwrap();
        let (given, expected) = with_reference(&task.setting.workload);
        let tolerance = Tolerance::for_program(&task.setting.workload.program());
        let is_right = |text: &str| {
            let got = emulator::run(&kernels, text, &given, Order::Ascending);
            got.is_ok_and(|got| tolerance.compare(got.last().unwrap(), &expected).is_ok())
        };
        assert!(is_right(&text), "{kernels}\n{text}");
        let mut mutants = Vec::new();
        for (at, _) in text.match_indices("mma.sync") {
            // Sums after, rows, columns, each as a list of registers.
            for (list, pair) in [(0, [0, 1]), (0, [1, 2]), (1, [0, 1]), (1, [1, 2]), (1, [0, 3]), (2, [0, 1])] {
                mutants.push(exchanged(&text, at, list, pair));
            }
        }
        let (mut n_across, mut n_along) = (0, 0);
        for (at, _) in text.match_indices("ldmatrix.sync") {
            mutants.push(exchanged(&text, at, 0, [0, 1]));
            let line = &text[at..at + text[at..].find(';').unwrap()];
            let is_across = line.contains(".trans");
            n_across += usize::from(is_across);
            n_along += usize::from(!is_across);
            let turned = if is_across { line.replace(".trans", "") } else { line.replace(".shared", ".trans.shared") };
            let (head, place) = line.rsplit_once('[').unwrap();
            let place = place.trim_end_matches(']');
            let moved = match place.split_once('+') {
                Some((base, offset)) => format!("{head}[{base}+{}]", offset.parse::<u64>().unwrap() + 16),
                None => format!("{head}[{place}+16]"),
            };
            mutants.extend([turned, moved].map(|line_| text.replacen(line, &line_, 1)));
        }
        assert!(n_across > 0 && n_along > 0, "{dtype}: {n_across} loads across rows, {n_along} along\n{text}");
        let n_found = mutants.iter().filter(|mutant| !is_right(mutant)).count();
        println!("{dtype}: {n_found} of {} mutants are found", mutants.len());
        let survivor = mutants.iter().find(|mutant| is_right(mutant));
        assert_eq!(survivor, None, "{dtype}: {n_found} of {} are found", mutants.len());
    }
}

/// Tiles of 64 × 64 a warp: nothing spills, an instruction multiplies a tile of 16 steps, and all factors
/// come into registers as tiles.
#[test]
fn tensor_cores_of_halves_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("halves-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for (gpu, dtype) in ["sm_80", "sm_90a"].into_iter().flat_map(|gpu| ["bf16", "f16"].map(|dtype| (gpu, dtype))) {
        let task = tiles_task(&format!("matmul:m=4096,n=4096,k=4096,dtype={dtype}"), gpu);
        let config = task.space.config_from_json(&HALVES_OF_WARPS.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join(format!("{gpu}-{dtype}.cubin"));
        let text = ptx(&kernels, &task).unwrap();
        let made = nvidia::assemble(&ptxas, text.as_bytes(), gpu, &cubin).unwrap()["run_0"];
        let opcodes = nvidia::innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{gpu} {dtype}: {made:?}, {} instructions of which {} multiply tiles", opcodes.len(), n("HMMA.16816"));
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{gpu}: {made:?}");
        assert_eq!(n("HMMA.16816"), 2 * 4 * 8, "{gpu}: two times 16 steps, 4 x 8 tiles");
        assert_eq!(n("LDSM"), 2 * (4 + 8), "{gpu}: tiles of rows and of columns");
        assert!(!text.contains("ld.shared"), "{gpu}: no factor is loaded by itself");
        assert_eq!((n("LDGSTS"), n("LDG.")), (8, 0), "{gpu}: copies of 16 bytes");
        assert!(opcodes.len() < 3 * n("HMMA"), "{gpu}: {opcodes:?}");
    }
}

const HALVES_OF_WARPS: &str = r#"{"block_m":128,"block_n":128,"block_k":32,"warp_m":64,"warp_n":64,"vector_a":8,
    "vector_b":8,"order":"groups","unroll_k":2,"ahead":3,"copies":"async","precision":"halves"}"#;

/// Tiles of 32 × 32 a warp: nothing spills, and one instruction multiplies a tile. (Those of 64 × 32, which
/// CUTLASS takes, leave no registers for sums that begin anew in each step.)
#[test]
fn tensor_cores_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiles-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for gpu in ["sm_80", "sm_90a"] {
        let workload = Workload::parse("matmul:m=4096,n=4096,k=4096").unwrap();
        let setting = Setting { workload, target: Target::named(gpu).unwrap(), n_threads: 1 };
        let task = Task::new(setting, Some("gpu-matmul-mma")).unwrap();
        let config = task.space.config_from_json(&TILES_OF_WARPS.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join(format!("{gpu}.cubin"));
        let made = nvidia::assemble(&ptxas, ptx(&kernels, &task).unwrap().as_bytes(), gpu, &cubin).unwrap()["run_0"];
        let opcodes = nvidia::innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{gpu}: {made:?}, {} instructions of which {} multiply tiles", opcodes.len(), n("HMMA"));
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{gpu}: {made:?}");
        assert_eq!(n("HMMA"), 3 * 4 * 8, "{gpu}: three products, four times eight steps, 2 x 4 tiles");
        assert_eq!((n("LDG.E.128"), n("LDG")), (6, 6), "{gpu}: loads of four at once");
        assert!(opcodes.len() < 6 * n("HMMA"), "{gpu}: {opcodes:?}");
    }
}

const TILES_OF_WARPS: &str = r#"{"block_m":128,"block_n":64,"block_k":32,"warp_m":32,"warp_n":32,"vector_a":4,
    "vector_b":4,"order":"groups","unroll_k":4,"ahead":0,"precision":"tf32x3"}"#;

#[test]
fn kernels_assemble_as_the_model_says() {
    let Some(ptxas) = nvidia::tool("ptxas") else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("random-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for gpu in gpus() {
        let (mut n_kernels, mut n_unmodelled, mut n_modelled, mut n_more) = (0, 0, 0, 0);
        let (mut spilling, mut above) = (Vec::new(), Vec::new());
        let cubin = folder.join(format!("{gpu}.cubin"));
        let mut times = [Vec::new(), Vec::new()];
        each(&[SHAPES.as_slice(), &LARGE].concat(), gpu, |_, task, config, kernels| {
            let start = Instant::now();
            let text = ptx(kernels, task)?;
            times[0].push(start.elapsed());
            let start = Instant::now();
            let made = nvidia::assemble(&ptxas, text.as_bytes(), gpu, &cubin);
            let made = made.map_err(|why| format!("{why}\n{text}"))?;
            times[1].push(start.elapsed());
            for kernel in kernels.kernels() {
                let made = made.get(&kernel.name).ok_or_else(|| format!("no {}", kernel.name))?;
                let most = task.setting.target.gpu.as_ref().map_or(0, |gpu| gpu.shared_bytes);
                let expected = Some(kernel.shared_bytes(kernels)).filter(|bytes| *bytes <= most).unwrap_or(0);
                if made.shared_bytes != expected {
                    return Err(format!("{} shares {} bytes, not {expected}", kernel.name, made.shared_bytes));
                }
                if !models_registers(task) {
                    n_unmodelled += usize::from(made.spilled_bytes > 0);
                    continue;
                }
                n_kernels += 1;
                let (name, json) = (task.template.name, task.space.config_to_json(config));
                let said = format!("{} of {} {name} {json}: {made:?}", kernel.name, task.setting.workload);
                if made.spilled_bytes > 0 {
                    spilling.push(said.clone());
                }
                // What has no tiles in shared memory is small.
                if kernel.shared.is_empty() {
                    continue;
                }
                let Some(modelled) = modelled_registers(task, config) else { continue };
                n_modelled += 1;
                if made.registers > modelled {
                    let capped = with_registers(&text, modelled);
                    let capped = nvidia::assemble(&ptxas, capped.as_bytes(), gpu, &cubin)?[&kernel.name];
                    n_more += 1;
                    above.extend(Some(format!("{said}, modelled {modelled}")).filter(|_| capped.spilled_bytes > 0));
                }
            }
            Ok(())
        });
        println!(
            "{gpu}: of {n_kernels} kernels with a model of registers {} spill; of {n_modelled} with tiles {n_more} \
             take more than it says, and {} need more; {n_unmodelled} others spill\n{}\nneed more:\n{}",
            spilling.len(),
            above.len(),
            spilling.join("\n"),
            above.join("\n")
        );
        times.iter_mut().for_each(|times| times.sort());
        let [llvm, ptxas] = times.map(|times| times[times.len() / 2]);
        println!("{gpu}: half of the candidates take LLVM {llvm:.1?} and ptxas {ptxas:.1?} at most");
        if n_configs().is_some() {
            assert!(50 * spilling.len() <= n_kernels, "{gpu}: {} of {n_kernels} spill", spilling.len());
            assert!(50 * n_more <= n_modelled, "{gpu}: {n_more} of {n_modelled} take more registers");
        }
    }
}

/// No two threads of a warp go to one bank for different words: instructions take what their bytes take.
#[test]
fn warps_read_tiles_without_conflicts() {
    let of_singles = r#"{"block_m":128,"block_n":128,"block_k":32,"warp_m":64,"warp_n":64,"vector_a":4,"vector_b":4,
        "order":"rows","unroll_k":4,"ahead":3,"copies":"async","precision":"tf32"}"#;
    for (text, config, depth) in [
        ("matmul:m=256,n=128,k=64,tf32=1", of_singles, 32),
        ("matmul:m=256,n=128,k=128,dtype=bf16", HALVES_OF_WARPS, 64),
    ] {
        let task = tiles_task(text, "sm_90a");
        // Of halves a row takes the copies of 8 threads then.
        let config = config.replace("groups", "rows").replace("\"block_k\":32", &format!("\"block_k\":{depth}"));
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let ptx = ptx(&kernels, &task).unwrap();
        let traffic = emulator::traffic(&kernels, &ptx, &arguments(&task.setting.workload.program())).unwrap();
        for (opcode, count) in &traffic {
            println!("{text} {opcode}: {count:?}, {:.2} times the least", count.taken as f64 / count.least as f64);
        }
        assert!(traffic.keys().any(|opcode| opcode.starts_with("ldmatrix")), "{traffic:?}");
        assert!(traffic.values().all(|count| count.taken == count.least), "{traffic:?}");
    }
}

/// Shapes that blocks of groups of warps divide, and some that they do not: both factors along the sum, one,
/// and none of them.
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

/// A task for groups of four warps, on a GPU of so many units.
fn groups_task(text: &str, n_units: u32) -> Task {
    let workload = Workload::parse(text).unwrap();
    let mut target = Target::named("sm_90a").unwrap();
    target.gpu.as_mut().expect("it is a GPU").n_units = n_units;
    Task::new(Setting { workload, target, n_threads: 1 }, Some("gpu-matmul-wgmma")).unwrap()
}

/// Random configurations of a workload for groups of four warps, so many of each: the workload, its task, the
/// kernels and their code.
fn each_of_groups(texts: &[&str], n: usize, visit: impl FnMut(&Workload, &Task, &Config, &GpuProgram, &str)) {
    each_where(texts, (n, UNITS), |_, _| true, visit);
}

/// The units of an H100.
const UNITS: u32 = 132;

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

#[test]
fn groups_of_warps_multiply() {
    let mut n = 0;
    each_of_groups(&OF_GROUPS, n_of_each(), |workload, task, config, kernels, code| {
        require_right((workload, task, config), kernels, code, ORDERS[n % 3]);
        n += 1;
    });
    println!("{n} configurations");
}

const ORDERS: [Order; 3] = [Order::Ascending, Order::Descending, Order::Strided(7)];

/// A kernel for groups of warps computes what its workload does.
fn require_right(of: (&Workload, &Task, &Config), kernels: &GpuProgram, code: &str, order: Order) {
    let (workload, task, config) = of;
    let program = workload.program();
    let mut expected = arguments(&program);
    interp::run(&program, &mut expected).unwrap();
    let json = task.space.config_to_json(config);
    let got = emulator::run(kernels, code, &arguments(&program), order)
        .unwrap_or_else(|why| panic!("{workload} {json} {order:?}: {why}\n{kernels}\n{code}"));
    let (got, expected) = (got.last().unwrap(), expected.last().unwrap());
    let last = if workload.dtype.is_half() { 2.0 * workload.dtype.unit() } else { 2e-5 };
    let most = last * expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    let far = got.iter().zip(expected).position(|(a, b)| a.is_nan() || (a - b).abs() > most);
    if let Some(at) = far {
        panic!("{workload} {json} {order:?}: element {at} is {} instead of {}\n{kernels}", got[at], expected[at]);
    }
}

/// Workloads of which both factors may be copied in boxes, each along the sum or across it.
const OF_BOXES: [&str; 11] = [
    "matmul:m=70,n=100,k=68,tf32=1,epilogue=bias+relu",
    "batch_matmul:b=2,m=104,n=40,k=96,ta=1,tb=1,tf32=1",
    "batch_matmul:b=2,m=64,n=64,k=64,tb=1,tf32=1",
    "dense:m=130,n=64,k=192,tf32=1,epilogue=bias+gelu",
    "dense:m=64,n=96,k=320,tf32=1",
    "dense:m=40,n=50,k=28,tf32=1",
    "matmul:m=64,n=128,k=192,dtype=bf16",
    "matmul:m=70,n=40,k=200,dtype=bf16,epilogue=relu",
    "dense:m=128,n=72,k=128,dtype=f16,epilogue=bias",
    "batch_matmul:b=2,m=136,n=64,k=80,ta=1,dtype=bf16,epilogue=add",
    "batch_matmul:b=2,m=96,n=200,k=64,ta=1,tb=1,dtype=f16",
];

/// Whether a warp of such a kernel only copies.
fn is_fed(task: &Task, config: &Config) -> bool {
    task.space.int(config, "producer") == 1
}

/// A warp that only copies feeds groups of warps, and no others wait for each other.
#[test]
fn a_warp_feeds_groups_of_warps() {
    let mut n = 0;
    let n_each = n_configs().map_or(2, |n| n.div_ceil(OF_BOXES.len()));
    each_where(&OF_BOXES, (n_each, UNITS), is_fed, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config);
        let fed = &kernels.body[0];
        assert!(copier::has_copier(kernels, fed), "{workload} {json}\n{kernels}");
        let entry = code.split(".entry").nth(1).expect("the first kernel");
        let [all, others, of_cluster, of_warps] =
            ["bar", "mbar", "barrier.cluster", "bar.warp.sync"].map(|word| entry.matches(word).count());
        let n_expected = if task.space.int(config, "cluster") == 1 { [1, 0] } else { [0, 4] };
        assert_eq!([all - others - of_cluster - of_warps, of_cluster], n_expected, "{workload} {json}\n{code}");
        let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
        orders.iter().for_each(|order| require_right((workload, task, config), kernels, code, *order));
        n += 1;
    });
    println!("{n} configurations");
}

/// Blocks go through several tiles one after the other, fewer at the end, in each order of tiles.
#[test]
fn blocks_go_through_tiles() {
    let mut n = 0;
    let n_each = n_configs().map_or(1, |n| n.div_ceil(OF_BOXES.len()));
    let is_persistent = |task: &Task, config: &Config| task.space.int(config, "persistent") == 1;
    each_where(&OF_TILES, (n_each, 3), is_persistent, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config);
        let fed = &kernels.body[0];
        let n_blocks = if task.space.int(config, "cluster") == 1 { 3 } else { 2 };
        assert!(copier::has_copier(kernels, fed) && fed.grid() == [n_blocks, 1, 1], "{workload} {json}\n{kernels}");
        let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
        orders.iter().for_each(|order| require_right((workload, task, config), kernels, code, *order));
        n += 1;
    });
    println!("{n} configurations");
}

/// Workloads of more than three tiles.
const OF_TILES: [&str; 7] = [
    "matmul:m=130,n=192,k=64,tf32=1,epilogue=bias+gelu",
    "batch_matmul:b=2,m=64,n=64,k=64,tb=1,tf32=1",
    "dense:m=130,n=64,k=192,tf32=1,epilogue=bias+gelu",
    "dense:m=200,n=100,k=72,dtype=bf16",
    "matmul:m=250,n=136,k=200,dtype=bf16,epilogue=relu",
    "batch_matmul:b=2,m=136,n=64,k=80,ta=1,dtype=bf16,epilogue=add",
    "batch_matmul:b=2,m=96,n=200,k=64,ta=1,tb=1,dtype=f16",
];

/// Kernel that is right in every order of threads, of which mutants are made.
struct Original {
    kernels: GpuProgram,
    code: String,
    given: Vec<Vec<f64>>,
    right: Vec<Vec<f64>>,
}

impl Original {
    /// Makes the kernel of a configuration, on a GPU of three units.
    fn of(text: &str, config: &str) -> Original {
        let task = groups_task(text, 3);
        let workload = &task.setting.workload;
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let code = ptx(&kernels, &task).unwrap();
        ORDERS.iter().for_each(|order| require_right((workload, &task, &config), &kernels, &code, *order));
        let given = arguments(&workload.program());
        let right = emulator::run(&kernels, &code, &given, Order::Ascending).unwrap();
        Original { kernels, code, given, right }
    }
}

/// Whatever is wrong with how warps wait for a warp that copies, and that one for them, the emulator finds.
#[test]
fn faults_in_turns_are_found() {
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for (text, rest) in [
        ("dense:m=128,n=64,k=256,tf32=1", r#""block_k":32,"groups_m":2,"ahead":3,"in_flight":1"#),
        ("dense:m=128,n=64,k=256,tf32=1", r#""block_k":32,"groups_m":2,"ahead":3,"in_flight":0"#),
        ("matmul:m=256,n=128,k=448,dtype=bf16", r#""block_k":64,"groups_m":1,"ahead":2,"in_flight":0,"persistent":1"#),
    ] {
        let config = format!(
            r#"{{"block_m":128,"block_n":64,"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk",
            "producer":1,{rest}}}"#
        );
        let Original { kernels, code, given, right } = Original::of(text, &config);

        let lines: Vec<&str> = code.lines().map(str::trim).collect();
        // Whether a wait is the copier's: copies come behind it, where it is over, before products do.
        let is_copiers = |at: usize| {
            let label = lines[at..].iter().find_map(|line| line.strip_prefix('@')?.split_once("bra \t"));
            let label = label.expect("a branch behind a wait").1.replace(';', ":");
            let goes_on = lines.iter().position(|line| *line == label).expect("the label that it goes to");
            let mut next = lines[goes_on..].iter();
            let next = next.find(|line| line.starts_with("cp.async.bulk") || line.starts_with("wgmma"));
            next.is_some_and(|line| line.starts_with("cp.async.bulk"))
        };
        let wait = "mbarrier.try_wait.parity.shared::cta.b64 ";
        let changed = |change: &dyn Fn(usize, &str) -> Option<String>| -> String {
            let new = lines.iter().enumerate().map(|(at, line)| change(at, line).unwrap_or((*line).to_owned()) + "\n");
            new.collect()
        };
        let waits = |of_copier: bool, change: &dyn Fn([&str; 3]) -> String| {
            changed(&|at, line| {
                let operands: Vec<&str> = line.strip_prefix(wait)?.trim_end_matches(';').split(", ").collect();
                (is_copiers(at) == of_copier).then(|| change(operands.try_into().expect("three operands")))
            })
        };
        let passes = |[to, ..]: [&str; 3]| format!("setp.eq.b32 {to}, 0, 0;");
        let in_other_phase =
            |[to, place, phase]: [&str; 3]| format!("xor.b32 %q1, {phase}, 1;\n{wait}{to}, {place}, %q1;");
        let elsewhere = |[to, place, phase]: [&str; 3]| {
            let place = place.trim_end_matches(']');
            format!("{wait}{to}, {place}+8], {phase};")
        };
        let arrives = "mbarrier.arrive.shared::cta.b64 _, [";
        let arrivals = |of_copier: bool, change: &dyn Fn(&str) -> String| {
            changed(&|_, line| {
                let is_one = line.contains(arrives) && line.starts_with('@') != of_copier;
                is_one.then(|| change(line))
            })
        };
        let counted = |n: i64| {
            let n_warps = kernels.body[0].block()[2];
            changed(&|_, line| {
                let init = line.strip_prefix("mbarrier.init")?.strip_suffix(&format!(", {n_warps};"))?;
                Some(format!("mbarrier.init{init}, {};", n_warps + n))
            })
        };
        // Places are given back before products are awaited.
        let early = {
            let awaits = lines.iter().rposition(|line| line.starts_with("wgmma.wait_group.sync.aligned 0"));
            let arrives = lines.iter().position(|line| line.starts_with('@') && line.contains(arrives));
            let (awaits, arrives) = (awaits.expect("a wait"), arrives.expect("an arrival"));
            match awaits < arrives {
                true => changed(&|at, line| match at {
                    _ if at == awaits => Some(String::new()),
                    _ if at == arrives => Some(format!("{line}\n{}", lines[awaits])),
                    _ => None,
                }),
                // They go on, so that the place is that of the iteration before.
                false => code.replace("wgmma.wait_group.sync.aligned 1", "wgmma.wait_group.sync.aligned 2"),
            }
        };
        for (what, mutant) in [
            ("empty is not awaited", waits(true, &passes)),
            ("full is not awaited", waits(false, &passes)),
            ("empty in another phase", waits(true, &in_other_phase)),
            ("full in another phase", waits(false, &in_other_phase)),
            ("empty of another place", waits(true, &elsewhere)),
            ("full of another place", waits(false, &elsewhere)),
            ("nobody says that it is empty", arrivals(false, &|_| String::new())),
            ("nobody says that it is full", arrivals(true, &|_| String::new())),
            ("another place is said to be empty", arrivals(false, &|line| line.replace("];", "+8];"))),
            ("another place is said to be full", arrivals(true, &|line| line.replace("];", "+8];"))),
            ("too few arrivals", counted(1)),
            ("too many arrivals", counted(-1)),
            ("no bytes are expected", changed(&|_, line| line.contains("expect_tx").then(String::new))),
            ("empty too early", early),
        ] {
            assert_ne!(mutant.lines().map(str::trim).collect::<Vec<_>>(), lines, "{what}\n{code}");
            let got = emulator::run(&kernels, &mutant, &given, Order::Ascending);
            if let Err(why) = &got {
                println!("{what}: {}", why.lines().next().unwrap_or_default());
            }
            assert!(got.map_or(true, |got| got != right), "{what} goes unnoticed: {text} {rest}\n{mutant}");
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Threads that wait for a barrier which never comes stop the kernel after four seconds, whoever they are: a
/// kernel that goes on for ever would take the device with it.
#[test]
fn waits_that_never_end_stop_the_kernel() {
    let text = "dense:m=128,n=64,k=256,tf32=1";
    for rest in [r#""producer":1,"in_flight":1"#, r#""producer":0,"in_flight":0"#] {
        let config = format!(
            r#"{{"block_m":128,"block_n":64,"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk",
            "block_k":32,"groups_m":2,"ahead":3,{rest}}}"#
        );
        let Original { kernels, code, given, .. } = Original::of(text, &config);
        let of = |code: &str| emulator::run(&kernels, code, &given, Order::Ascending).expect_err("it never ends");
        let waits = code.matches("mbarrier.try_wait").count();
        assert_eq!((code.matches("trap;").count(), code.matches("%globaltimer").count()), (waits, waits), "{code}");
        let lines = code.lines().filter(|line| !line.contains("mbarrier.arrive"));
        let stuck: String = lines.map(|line| format!("{line}\n")).collect();
        assert_ne!(stuck, code);
        // The clock is read for the first time when a second has not passed yet.
        let why = of(&stuck);
        assert!(why.contains("stops the kernel after 5 s"), "{why}");
        let why = of(&stuck.replace("trap;", ""));
        assert!(why.contains("threads wait for what never comes"), "{rest}: {why}");
    }
}

/// Instructions that threads carry out together are `convergent` to LLVM, so that it copies none of them to
/// where only some of them come.
#[test]
fn instructions_of_several_threads_are_said_to_be() {
    let text = "dense:m=128,n=64,k=256,tf32=1";
    let config = r#"{"block_m":128,"block_n":64,"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk",
        "block_k":32,"groups_m":2,"ahead":3,"producer":1,"in_flight":1}"#;
    let Original { kernels, .. } = Original::of(text, config);
    let target = groups_task(text, 3).setting.target;
    let (code, _) = emit_gpu(&kernels, &target, Emit::LlvmOptimized).unwrap();
    let code = String::from_utf8(code).unwrap();
    // Attributes of calls, by the number that stands behind each.
    let attributes: BTreeMap<&str, &str> =
        code.lines().filter_map(|line| line.strip_prefix("attributes #")?.split_once(" = ")).collect();
    let calls: Vec<&str> = code.lines().filter(|line| line.contains(" asm sideeffect ")).collect();
    for what in ["wgmma.fence", "wgmma.mma_async", "wgmma.commit_group", "wgmma.wait_group", "mbarrier.try_wait"] {
        assert!(calls.iter().any(|call| call.contains(what)), "no {what} in {code}");
    }
    for call in calls {
        let number = call.rsplit_once('#').map(|(_, rest)| rest.split([',', ' ']).next().unwrap_or_default());
        let said = number.and_then(|number| attributes.get(number));
        assert!(said.is_some_and(|said| said.contains("convergent")), "{call}: {said:?}");
    }
}

/// Products of which each thread stores 16 bytes at once, having exchanged fragments with others.
#[test]
fn threads_exchange_what_they_store() {
    let texts = [
        "matmul:m=128,n=128,k=64,dtype=bf16,epilogue=bias+relu",
        "dense:m=64,n=256,k=64,dtype=f16,epilogue=bias",
        "batch_matmul:b=2,m=64,n=192,k=64,tb=1,dtype=bf16,epilogue=add",
    ];
    let is_wanted = |task: &Task, config: &Config| task.space.text(config, "store") == "exchanged";
    let (mut n, mut n_mutants) = (0, 0);
    each_where(&texts, (n_configs().unwrap_or(3), 2), is_wanted, |workload, task, config, kernels, code| {
        let why = format!("{workload} {}\n{code}", task.space.config_to_json(config));
        let stores: Vec<&str> = code.lines().map(str::trim).filter(|line| line.starts_with("st.global")).collect();
        assert!(!stores.is_empty() && stores.iter().all(|line| line.starts_with("st.global.v4.b32")), "{why}");
        assert_eq!(code.matches("shfl.sync").count(), 4 * stores.len(), "{why}");
        require_right((workload, task, config), kernels, code, ORDERS[n % 3]);
        n += 1;
        let given = arguments(&workload.program());
        let run = |code: &str| emulator::run(kernels, code, &given, Order::Ascending);
        let right = run(code);
        for mutant in [
            code.replace(", 1, 31, -1;", ", 2, 31, -1;"),
            code.replacen(", 2, 31, -1;", ", 4, 31, -1;", 1),
            code.replace("shfl.sync.bfly.b32", "add.s32").replace(", 31, -1;", ";"),
        ] {
            assert!(mutant != code && run(&mutant) != right, "{why}");
            n_mutants += 1;
        }
    });
    println!("{n} configurations, {n_mutants} mutants");
}

/// Workloads whose results warps may store in boxes.
const OF_STORES: [&str; 5] = [
    "matmul:m=192,n=128,k=64,dtype=bf16,epilogue=bias+relu",
    "dense:m=128,n=192,k=72,dtype=f16,epilogue=bias",
    "batch_matmul:b=2,m=128,n=192,k=64,tb=1,dtype=bf16,epilogue=add",
    "dense:m=128,n=192,k=64,tf32=1,epilogue=bias+gelu",
    "batch_matmul:b=3,m=64,n=96,k=72,tb=1,tf32=1",
];

fn stores_boxes(task: &Task, config: &Config) -> bool {
    task.space.text(config, "store") == "bulk"
}

/// Warps write boxes to shared memory without bank conflicts, from where TMA stores them.
#[test]
fn warps_store_boxes() {
    let (mut n, mut n_odd) = (0, 0);
    let n_each = n_configs().map_or(2, |n| n.div_ceil(OF_STORES.len()));
    each_where(&OF_STORES, (n_each, 3), stores_boxes, |workload, task, config, kernels, code| {
        let why = format!("{workload} {}\n{code}", task.space.config_to_json(config));
        let n_boxes = code.matches("d.global.shared::cta.tile.bulk_group").count();
        assert!(n_boxes > 0 && !code.contains("st.global"), "{why}");
        let (stores, each) = if workload.dtype.is_half() { ("stmatrix", 4) } else { ("st.shared.v2.b32", 8) };
        assert_eq!(code.matches(stores).count(), each * n_boxes, "{why}");
        let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
        orders.iter().for_each(|order| require_right((workload, task, config), kernels, code, *order));
        let traffic = emulator::traffic(kernels, code, &arguments(&workload.program())).unwrap();
        let stored: Vec<_> = traffic.iter().filter(|(opcode, _)| opcode.starts_with(stores)).collect();
        assert!(stored.iter().all(|(_, count)| count.least == count.taken) && !stored.is_empty(), "{traffic:?} {why}");
        n += 1;
        n_odd += n_boxes % 2;
    });
    println!("{n} configurations, of which {n_odd} store an odd number of boxes");
}

/// Whatever is wrong with how boxes are stored, the emulator finds in some order.
#[test]
fn faults_in_stores_are_found() {
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for (text, rest) in [
        ("matmul:m=256,n=192,k=64,dtype=bf16", r#""block_m":128,"block_n":192,"block_k":64,"groups_m":2"#),
        ("matmul:m=256,n=192,k=64,dtype=bf16", r#""block_m":64,"block_n":64,"block_k":64,"groups_m":1,"persistent":1"#),
        ("dense:m=128,n=288,k=64,tf32=1", r#""block_m":64,"block_n":96,"block_k":32,"groups_m":1,"persistent":1"#),
    ] {
        let config = format!(
            r#"{{"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","ahead":2,"copies":"bulk","producer":1,
            "store":"bulk",{rest}}}"#
        );
        let Original { kernels, code, given, right } = Original::of(text, &config);
        for (what, mutant) in faults_in_stores(&code, rest.contains("persistent")) {
            let trimmed = |code: &str| code.lines().map(str::trim).collect::<String>();
            assert_ne!(trimmed(&mutant), trimmed(&code), "{what}");
            let is_found = |order: &Order| match emulator::run(&kernels, &mutant, &given, *order) {
                Ok(got) => got != right,
                Err(why) => {
                    println!("{what}: {}", why.lines().next().unwrap_or_default());
                    true
                }
            };
            assert!(ORDERS.iter().any(is_found), "{what} goes unnoticed: {text} {rest}\n{mutant}");
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Mutants of a kernel that stores boxes, each with what is wrong. `is_again`: whether its blocks go through
/// several tiles.
fn faults_in_stores(code: &str, is_again: bool) -> Vec<(&'static str, String)> {
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let changed = |change: &dyn Fn(usize, &str) -> Option<String>| -> String {
        let new = lines.iter().enumerate().map(|(at, line)| change(at, line).unwrap_or((*line).to_owned()) + "\n");
        new.collect()
    };
    let without = |at: usize| changed(&|line, _| (line == at).then(String::new));
    let boxes = |change: &dyn Fn(&str) -> String| {
        changed(&|_, line| line.contains("global.shared::cta.tile").then(|| change(line)))
    };
    let of = |word: &str| (0..lines.len()).filter(|at| lines[*at].starts_with(word)).collect::<Vec<_>>();
    let (waits, barriers) = (of("cp.async.bulk.wait_group.read"), of("bar.warp.sync"));
    // Whether a barrier stands before a copy, not before what is written for it.
    let is_behind = |at: &usize| {
        let words = ["cp.async.bulk.tensor", "st.shared", "stmatrix"];
        let uses = lines[*at..].iter().find_map(|line| words.iter().position(|word| line.contains(word)));
        uses == Some(0)
    };
    let (behind, ahead): (Vec<usize>, Vec<usize>) = barriers.into_iter().partition(is_behind);
    let fences = behind.iter().filter_map(|at| lines[..*at].iter().rposition(|line| line.starts_with("fence.proxy")));
    let mut mutants = Vec::new();
    // The first wait finds nothing where a block has one tile.
    mutants.extend(waits.iter().skip(usize::from(!is_again)).map(|at| ("a wait is left out", without(*at))));
    mutants.extend(behind.iter().map(|at| ("a barrier behind is left out", without(*at))));
    mutants.extend(ahead.iter().map(|at| ("a barrier ahead is left out", without(*at))));
    mutants.extend(fences.map(|at| ("a fence is left out", without(at))));
    let further = |line: &str| line.replace("+0];", "+1024];").replace("+2048];", "+1024];");
    let fewer =
        code.replace("wait_group.read 1;", "wait_group.read 2;").replace("wait_group.read 0;", "wait_group.read 1;");
    mutants.extend([
        ("nothing is stored", boxes(&|_| String::new())),
        ("no group is ended", changed(&|_, line| line.contains("bulk.commit_group").then(String::new))),
        ("another box", boxes(&further)),
        ("fewer are awaited", fewer),
    ]);
    mutants
}

/// Blocks in groups of rows or of columns, of any number, compute all tiles.
#[test]
fn blocks_go_in_groups() {
    let mut seen = BTreeMap::new();
    let is_wanted = |task: &Task, config: &Config| task.space.text(config, "order").starts_with("groups_");
    let texts = ["matmul:m=250,n=256,k=64,dtype=bf16", "dense:m=128,n=512,k=64,tf32=1"];
    each_where(&texts, (n_configs().unwrap_or(6), 4), is_wanted, |workload, task, config, kernels, code| {
        require_right((workload, task, config), kernels, code, Order::Ascending);
        *seen.entry(task.space.text(config, "order")).or_insert(0) += 1;
    });
    println!("{seen:?}");
    assert!(seen.len() >= 4, "{seen:?}");
}

/// Workloads of an even number of tiles along rows or columns, whose factors lie along the sum or across it.
const OF_CLUSTERS: [&str; 5] = [
    "batch_matmul:b=2,m=128,n=64,k=64,tb=1,tf32=1",
    "dense:m=250,n=128,k=192,tf32=1,epilogue=bias+gelu",
    "matmul:m=256,n=248,k=200,dtype=bf16,epilogue=relu",
    "batch_matmul:b=2,m=256,n=128,k=80,ta=1,dtype=bf16,epilogue=add",
    "batch_matmul:b=2,m=128,n=200,k=64,ta=1,tb=1,dtype=f16",
];

/// Neighbouring blocks copy for each other what both multiply, on a GPU of an odd number of units too.
#[test]
fn blocks_of_clusters_copy_for_each_other() {
    let (mut n, mut n_persistent) = (0, 0);
    let n_each = n_configs().map_or(2, |n| n.div_ceil(OF_CLUSTERS.len()));
    let is_wanted = |task: &Task, config: &Config| task.space.int(config, "cluster") == 2;
    each_where(&OF_CLUSTERS, (n_each, 5), is_wanted, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config);
        let abi = Abi::of(kernels, &kernels.body[0], &task.setting.target);
        let [ring] = abi.shared_rings[..] else { panic!("{workload} {json}: {:?}\n{kernels}", abi.shared_rings) };
        let order = task.space.text(config, "order");
        let shared = if order == "rows" || order.starts_with("groups_of_columns") { "A.s" } else { "B.s" };
        assert_eq!(kernels.program.buffer(ring).name, shared, "{workload} {json}");
        assert!(code.contains(".reqnctapercluster 2, 1, 1") && code.contains(".multicast::cluster"), "{code}");
        let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
        orders.iter().for_each(|order| require_right((workload, task, config), kernels, code, *order));
        n += 1;
        n_persistent += task.space.int(config, "persistent");
    });
    println!("{n} configurations, of which {n_persistent} are persistent");
}

/// Whatever is wrong with how blocks of a cluster copy for each other, the emulator finds in some order.
#[test]
fn faults_in_clusters_are_found() {
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for (text, rest) in [
        ("dense:m=256,n=64,k=256,tf32=1", r#""order":"columns","block_k":32,"groups_m":2,"ahead":3,"in_flight":1"#),
        ("matmul:m=128,n=128,k=320,dtype=bf16", r#""order":"rows","block_k":64,"groups_m":1,"ahead":2,"in_flight":0"#),
        (
            "matmul:m=256,n=128,k=192,dtype=bf16",
            r#""order":"columns","block_k":64,"groups_m":1,"ahead":2,"in_flight":0,"persistent":1"#,
        ),
    ] {
        let config = format!(
            r#"{{"block_m":128,"block_n":64,"groups_n":1,"vector_a":1,"vector_b":1,"copies":"bulk","producer":1,
            "cluster":2,{rest}}}"#
        );
        let Original { kernels, code, given, right } = Original::of(text, &config);

        let lines: Vec<&str> = code.lines().map(str::trim).collect();
        let changed = |change: &dyn Fn(&str) -> Option<String>| -> String {
            lines.iter().map(|line| change(line).unwrap_or((*line).to_owned()) + "\n").collect()
        };
        // Each barrier of the cluster is an arrival and a wait.
        let barrier = |of_end: bool, instead: &str| {
            let is_one = |at: &usize| lines[*at].starts_with("barrier.cluster.arrive");
            let mut ats = (0..lines.len()).filter(is_one);
            let at = if of_end { ats.next_back() } else { ats.next() }.expect("a barrier of the cluster");
            let wait = (at..lines.len()).find(|at| lines[*at] == "barrier.cluster.wait;").expect("a wait");
            let mut lines = lines.clone();
            (lines[at], lines[wait]) = (instead, "");
            lines.join("\n")
        };
        let multicast = |change: &dyn Fn(&str) -> String| {
            changed(&|line| line.contains(".multicast::cluster").then(|| change(line)))
        };
        let arrivals = 2 * kernels.body[0].block()[2];
        let last_operand = |line: &str, last: &str| format!("{}, {last};", line.rsplit_once(',').expect("operands").0);
        for (what, mutant) in [
            ("blocks begin when they like", barrier(false, "bar.sync 0;")),
            ("blocks end when they like", barrier(true, "")),
            ("barriers are not announced", code.replace("fence.mbarrier_init.release.cluster;", "")),
            ("copies to the first block alone", multicast(&|line| last_operand(line, "1"))),
            ("copies to the second block alone", multicast(&|line| last_operand(line, "2"))),
            ("copies to a third block", multicast(&|line| last_operand(line, "7"))),
            (
                "copies to the own block",
                multicast(&|line| last_operand(line, "").replace(", ;", ";").replace(".multicast::cluster", "")),
            ),
            (
                "descriptions of the cluster's addresses",
                changed(&|line| {
                    let operands = line.strip_prefix("bfe.u64")?.strip_suffix(", 4, 14;")?;
                    Some(format!("shr.u64 {operands}, 4;"))
                }),
            ),
            (
                "the first block alone is told",
                changed(&|line| line.starts_with("mapa").then(|| last_operand(line, "0"))),
            ),
            (
                "the other block is told twice",
                changed(&|line| line.starts_with("mapa").then(|| last_operand(line, "1"))),
            ),
            (
                "readers of one block are awaited",
                changed(&|line| {
                    let init = line.strip_prefix("mbarrier.init")?.strip_suffix(&format!(", {arrivals};"))?;
                    Some(format!("mbarrier.init{init}, {};", arrivals / 2))
                }),
            ),
            ("both copy the same half", {
                let rank = lines.iter().find(|line| line.starts_with("and.b32") && line.ends_with(", 1;"));
                let rank = rank.expect("a rank");
                code.replacen(rank, &last_operand(rank, "0"), 1)
            }),
        ] {
            assert_ne!(mutant.lines().map(str::trim).collect::<Vec<_>>(), lines, "{what}\n{code}");
            let run = |order: &Order| emulator::run(&kernels, &mutant, &given, *order);
            let wrong: Vec<_> = ORDERS.iter().map(run).filter(|got| got.as_ref() != Ok(&right)).collect();
            assert!(!wrong.is_empty(), "{what} goes unnoticed: {text} {rest}\n{mutant}");
            if let Err(why) = &wrong[0] {
                println!("{what}: {} orders, {}", wrong.len(), why.lines().next().unwrap_or_default());
            }
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Whatever of their synchronization is left out, or said wrong of a factor, the emulator finds.
#[test]
fn faults_in_products_of_groups_are_found() {
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    let texts = [
        "matmul:m=64,n=64,k=128,tf32=1",
        "dense:m=64,n=64,k=128,tf32=1",
        "matmul:m=64,n=128,k=256,dtype=f16",
        "dense:m=64,n=64,k=128",
    ];
    each_of_groups(&texts, 8, |workload, task, config, kernels, code| {
        let given = arguments(&workload.program());
        let json = task.space.config_to_json(config);
        let right =
            emulator::run(kernels, code, &given, Order::Ascending).unwrap_or_else(|why| panic!("{json}: {why}"));
        let without = |word: &str| -> String {
            code.lines().filter(|line| !line.contains(word)).fold(String::new(), |all, line| all + line + "\n")
        };
        // What says at once that a box has come.
        let unasked = |line: &str| match line.trim().strip_prefix("mbarrier.try_wait.parity.shared::cta.b64") {
            Some(operands) => format!("setp.eq.b32 {}, 0, 0;\n", operands.split(',').next().unwrap_or_default().trim()),
            None => format!("{line}\n"),
        };
        let stride = ((1024_i64 >> 4) << 32) + (1 << 62) + (1 << 16);
        let across = stride - (1 << 16) + (((64 * 128) >> 4) << 16);
        let lies = [[0, 1], [0, 0], [1, 0], [1, 1]].map(|[a, b]| format!(", 1, 1, 1, {a}, {b};"));
        let otherwise = lies.iter().zip(lies.iter().cycle().skip(2)).find(|(how, _)| code.contains(*how));
        for (what, mutant) in [
            ("sums do not begin anew", code.replace(", 0, 1, 1;", ", 1, 1, 1;")),
            (
                "rows along and across the sum",
                otherwise.map_or(code.to_owned(), |(how, other)| code.replace(how, other)),
            ),
            ("another row across", code.replace(&across.to_string(), &(across + (1 << 16)).to_string())),
            ("no fence of registers", without("wgmma.fence")),
            ("no end of a set", without("wgmma.commit_group")),
            ("no wait", without("wgmma.wait_group")),
            ("no fence of memory", without("fence.proxy.async")),
            ("no barrier", without("barrier.sync").replace("bar.sync", "// ")),
            ("another stride", code.replace(&stride.to_string(), &(stride + ((1024 >> 4) << 32)).to_string())),
            ("no wait for boxes", code.lines().map(unasked).collect()),
            ("no bytes are expected", without("mbarrier.expect_tx")),
            ("no end of a group of boxes", without("mbarrier.arrive")),
        ] {
            if mutant == code {
                continue;
            }
            // The first thread makes what all use.
            let order = if what == "no barrier" { Order::Descending } else { Order::Ascending };
            let got = emulator::run(kernels, &mutant, &given, order);
            // What is multiplied of other places is no fault, and wrong.
            let is_found = got.map_or(true, |got| OF_NUMBERS.contains(&what) && got != right);
            assert!(is_found, "{what} goes unnoticed: {json}\n{mutant}");
            *found.entry(what).or_insert(0) += 1;
        }
    });
    println!("faults that were found: {found:?}");
    assert_eq!(found.len(), 12, "{found:?}");
}

/// Products that go on while the next ones are begun: the place of a ring is filled anew when they are over,
/// and nothing looks at sums before.
#[test]
fn products_in_flight_are_waited_for() {
    for (text, rest) in [
        ("dense:m=128,n=64,k=256,tf32=1", r#""block_k":32,"groups_m":2,"ahead":3"#),
        ("matmul:m=128,n=64,k=448,dtype=bf16,epilogue=relu", r#""block_k":64,"groups_m":1,"ahead":4"#),
    ] {
        let task = groups_task(text, UNITS);
        let workload = &task.setting.workload;
        let config = format!(
            r#"{{"block_m":128,"block_n":64,"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk",
            "in_flight":1,{rest}}}"#
        );
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let code = ptx(&kernels, &task).unwrap();
        let given = arguments(&workload.program());
        let mut expected = given.clone();
        interp::run(&workload.program(), &mut expected).unwrap();
        let one = "wgmma.wait_group.sync.aligned 1;";
        assert_eq!(code.matches(one).count(), 1, "{text}: one wait for all but one set\n{kernels}\n{code}");
        for order in [Order::Ascending, Order::Descending, Order::Strided(7)] {
            let got =
                emulator::run(&kernels, &code, &given, order).unwrap_or_else(|why| panic!("{text}: {why}\n{code}"));
            let (got, expected) = (got.last().unwrap(), expected.last().unwrap());
            assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 2e-2 * b.abs().max(1.0)), "{text}");
        }
        let weaker = code.replace(one, "wgmma.wait_group.sync.aligned 2;");
        let why = emulator::run(&kernels, &weaker, &given, Order::Ascending).unwrap_err();
        assert!(why.contains("a product on its way reads"), "{text}: {why}");
        let early = code.replace("wgmma.wait_group.sync.aligned 0;", one);
        let why = emulator::run(&kernels, &early, &given, Order::Ascending).unwrap_err();
        assert!(why.contains("a sum is on its way"), "{text}: {why}");
    }
}

/// Of TF32 numbers that lie across the sum, threads load the factor of rows from boxes into registers:
/// without conflicts of banks, in the places where tensor cores look for them, and before the fence.
#[test]
fn threads_load_rows_that_lie_across_the_sum() {
    for text in ["matmul:m=64,n=256,k=96,tf32=1", "batch_matmul:b=2,m=128,n=64,k=96,ta=1,tb=1,tf32=1"] {
        let config = r#"{"block_m":128,"block_n":64,"block_k":32,"groups_m":2,"groups_n":1,"vector_a":1,
            "vector_b":1,"order":"rows","precision":"tf32","ahead":2,"copies":"bulk","producer":1}"#;
        let Original { kernels, code, given, right } = Original::of(text, config);
        let traffic = emulator::traffic(&kernels, &code, &given).unwrap();
        println!("{text}: {traffic:?}");
        assert!(traffic.iter().all(|(_, count)| count.taken == count.least), "{text}: {traffic:?}");
        assert!(traffic.keys().any(|opcode| opcode.starts_with("ld.shared")), "{text}: {traffic:?}");
        // The registers of a product follow its sums.
        let exchanged = |[a, b]: [usize; 2]| -> String {
            let of_line = |line: &str| match line.split_once("}, {") {
                Some((sums, rest)) if line.contains("wgmma.mma_async") => {
                    let (rows, others) = rest.split_once('}').expect("the list ends");
                    let mut rows: Vec<&str> = rows.split(", ").collect();
                    rows.swap(a, b);
                    format!("{sums}}}, {{{}}}{others}\n", rows.join(", "))
                }
                _ => format!("{line}\n"),
            };
            code.lines().map(of_line).collect()
        };
        for registers in [[0, 1], [0, 2], [1, 3]] {
            let mutant = exchanged(registers);
            assert_ne!(mutant, code);
            let got = emulator::run(&kernels, &mutant, &given, Order::Ascending).unwrap();
            assert_ne!(got, right, "{text}: registers {registers:?} exchanged go unnoticed");
        }
        for word in ["wgmma.fence", "wgmma.wait_group"] {
            let without: Vec<&str> = code.lines().filter(|line| !line.contains(word)).collect();
            let found = emulator::run(&kernels, &without.join("\n"), &given, Order::Ascending);
            assert!(found.is_err(), "{text}: without {word}");
        }
    }
}

/// Faults that have other numbers multiplied or added.
const OF_NUMBERS: [&str; 4] =
    ["another stride", "another row across", "rows along and across the sum", "sums do not begin anew"];

/// Threads write factors into swizzled rows without conflicts of banks, those too that they transpose.
#[test]
fn factors_for_groups_are_copied_without_conflicts() {
    for (text, copies) in [
        ("dense:m=128,n=128,k=96,tf32=1", r#""vector_b":4,"copies":"registers","ahead":1"#),
        ("matmul:m=128,n=128,k=96,tf32=1", r#""vector_b":1,"copies":"registers","ahead":1"#),
        ("matmul:m=128,n=128,k=96,tf32=1", r#""vector_b":4,"copies":"registers","ahead":2"#),
        ("matmul:m=128,n=128,k=192,dtype=bf16", r#""vector_b":8,"copies":"async","ahead":3"#),
    ] {
        let task = groups_task(text, UNITS);
        let program = task.setting.workload.program();
        let (depth, vector) = if text.contains("bf16") { (64, 8) } else { (32, 4) };
        let config = format!(
            r#"{{"block_m":128,"block_n":64,"block_k":{depth},"groups_m":2,"groups_n":1,"vector_a":{vector},
            "order":"rows",{copies}}}"#
        );
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let code = ptx(&kernels, &task).unwrap();
        let traffic = emulator::traffic(&kernels, &code, &arguments(&program)).unwrap();
        println!("{text} {copies}: {traffic:?}");
        let stored: Vec<_> = traffic.iter().filter(|(opcode, _)| !opcode.starts_with("wgmma")).collect();
        assert!(
            !stored.is_empty() && stored.iter().all(|(_, count)| count.taken == count.least),
            "{text}: {traffic:?}"
        );
    }
}

/// Factors of TF32 products are rounded to the nearest on each way into shared memory: cut there, as tensor
/// cores cut what has more bits, products of positive numbers would all be too small, by 6 · 10⁻⁴.
#[test]
fn factors_for_groups_are_rounded() {
    let task = groups_task("dense:m=64,n=64,k=256,tf32=1", UNITS);
    let (mut given, _) = with_reference(&task.setting.workload);
    given.iter_mut().flatten().for_each(|x| *x = x.abs());
    let mut expected = given.clone();
    interp::run(&task.setting.workload.program(), &mut expected).unwrap();
    for way in [
        r#""vector_a":4,"vector_b":4,"copies":"registers","ahead":1"#,
        r#""vector_a":1,"vector_b":1,"copies":"registers","ahead":0"#,
        r#""vector_a":1,"vector_b":1,"copies":"bulk","ahead":3,"producer":1"#,
    ] {
        let config = format!(
            r#"{{"block_m":64,"block_n":64,"block_k":32,"groups_m":1,"groups_n":1,"order":"rows",
            "precision":"tf32",{way}}}"#
        );
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let got = emulator::run(&kernels, &ptx(&kernels, &task).unwrap(), &given, Order::Ascending).unwrap();
        let (got, expected) = (got.last().unwrap(), expected.last().unwrap());
        let errors: Vec<f64> = got.iter().zip(expected).map(|(x, y)| (x - y) / y).collect();
        let bias = errors.iter().sum::<f64>() / errors.len() as f64;
        let most = errors.iter().fold(0.0, |most: f64, e| most.max(e.abs()));
        println!("{way}: bias {bias:.1e}, at most {most:.1e}");
        assert!(bias.abs() < 2e-5 && most < 3e-4, "{way}: bias {bias:.1e}, at most {most:.1e}");
    }
}

/// A group of warps multiplies 64 rows by 256 columns: four instructions for the 128 bytes of a row, nothing
/// spills, and no instruction waits for another.
#[test]
fn groups_of_warps_are_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("groups-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    let boxes = GROUPS_OF_WARPS.replace("async", "bulk").replace(r#""vector_a":4"#, r#""vector_a":1"#);
    let both = boxes.replace(r#""vector_b":4"#, r#""vector_b":1"#);
    let of_halves = |config: &str| config.replace(r#""block_k":32"#, r#""block_k":64"#).replace("\":4", "\":8");
    let (boxes_of_halves, halves) = (of_halves(&both), of_halves(GROUPS_OF_WARPS));
    let of_registers =
        GROUPS_OF_WARPS.replace("\"ahead\":3,\"copies\":\"async\"", "\"ahead\":1,\"copies\":\"registers\"");
    let of_registers = of_registers.replace(r#""block_n":256"#, r#""block_n":128"#);
    let [in_flight, in_flight_of_halves] =
        [&both, &boxes_of_halves].map(|config| config.replace("\"copies\"", "\"in_flight\":1,\"copies\""));
    for (text, config, n_boxes) in [
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,tb=1,tf32=1", &of_registers, 0),
        ("matmul:m=4096,n=4096,k=4096,tf32=1", &of_registers, 0),
        ("dense:m=4096,n=4096,k=4096,tf32=1", &both, 2),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", &halves, 0),
        ("dense:m=4096,n=4096,k=4096,dtype=f16", &boxes_of_halves, 2),
        ("dense:m=4096,n=4096,k=4096", &of_registers, 0),
        ("dense:m=4096,n=4096,k=4096,tf32=1", &in_flight, 2),
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,ta=1,dtype=f16", &in_flight_of_halves, 2 + 4),
        // 256 columns are four rows that lie across the sum.
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", &boxes_of_halves, 1 + 4),
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,ta=1,dtype=f16", &boxes_of_halves, 2 + 4),
    ] {
        // Numbers in two parts have three products.
        let in_parts = !text.contains("tf32=1") && !text.contains("dtype");
        let n_products = if in_parts { 3 * 4 } else { 4 };
        let task = groups_task(text, UNITS);
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join("groups.cubin");
        let made =
            nvidia::assemble(&ptxas, ptx(&kernels, &task).unwrap().as_bytes(), "sm_90a", &cubin).unwrap()["run_0"];
        let opcodes = nvidia::innermost_loop(&nvdisasm, &cubin);
        let n = |word: &str| opcodes.iter().filter(|opcode| opcode.starts_with(word)).count();
        println!("{text}: {made:?}, {} instructions of which {} multiply tiles", opcodes.len(), n("HGMMA"));
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{text}: {made:?}");
        assert!(made.registers <= 240, "{text}: {made:?}");
        assert_eq!((n("HGMMA"), n("UTMALDG")), (n_products, n_boxes), "{text}: {opcodes:?}");
    }
}

/// With a producer warp, consumer warps only multiply and wait for no others: a loop of bulk copies and a
/// loop of products, neither with a barrier of the block.
#[test]
fn a_warp_that_copies_is_used_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fed-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for (text, sizes, in_flight, persistent, cluster, n_boxes, most_registers) in [
        ("dense:m=4096,n=4096,k=4096,tf32=1", "128,256,32,2", 1, 0, 1, 2, 224),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", "128,256,64,2", 1, 1, 1, 1 + 4, 224),
        ("dense:m=4096,n=4096,k=4096,dtype=f16", "256,128,64,4", 0, 1, 1, 2, 120),
        ("batch_matmul:b=1,m=4096,n=4096,k=4096,ta=1,dtype=f16", "64,256,64,1", 0, 0, 1, 1 + 4, 255),
        ("dense:m=4096,n=4096,k=4096,tf32=1", "128,256,32,2", 1, 1, 2, 2, 224),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", "128,256,64,2", 1, 1, 2, 1 + 4, 224),
        // Threads load the factor of rows.
        ("matmul:m=4096,n=4096,k=4096,tf32=1", "128,192,32,2", 0, 1, 1, 1 + 4, 168),
        ("matmul:m=4096,n=4096,k=4096,tf32=1", "128,128,32,1", 0, 1, 1, 1 + 4, 224),
    ] {
        let [block_m, block_n, block_k, groups] =
            sizes.split(',').collect::<Vec<_>>().try_into().expect("four numbers");
        let config = format!(
            r#"{{"block_m":{block_m},"block_n":{block_n},"block_k":{block_k},"groups_m":{groups},"groups_n":1,
                "vector_a":1,"vector_b":1,"order":"rows","ahead":4,"copies":"bulk","in_flight":{in_flight},
                "producer":1,"persistent":{persistent},"cluster":{cluster}}}"#
        );
        let is_of_clusters_of_halves = cluster > 1 && text.contains("dtype");
        let config_text = if is_of_clusters_of_halves {
            config.replace("\"copies\"", "\"store\":\"exchanged\",\"copies\"")
        } else {
            config
        };
        let task = groups_task(text, UNITS);
        let config = task.space.config_from_json(&config_text.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let cubin = folder.join("fed.cubin");
        let code = ptx(&kernels, &task).unwrap();
        let made = nvidia::assemble(&ptxas, code.as_bytes(), "sm_90a", &cubin);
        let made = made.unwrap_or_else(|why| panic!("{text}: {why}\n{code}"))["run_0"];
        let n = |opcodes: &[String], word: &str| opcodes.iter().filter(|op| op.starts_with(word)).count();
        let all = nvidia::loops(&nvidia::disassembled(&nvdisasm, &cubin));
        // Each box has a loop, too, over threads that ask for another one, of which there are none.
        let of = |(word, least)| {
            let found = all.iter().filter(|opcodes| n(opcodes, word) >= least).min_by_key(|all| all.len());
            found.unwrap_or_else(|| panic!("{text}: no {word} in {all:#?}"))
        };
        let [products, boxes] = [("HGMMA", 4), ("UTMALDG", n_boxes)].map(of);
        println!(
            "{text} in_flight={in_flight} persistent={persistent} cluster={cluster}: {made:?}, {} and {} instructions",
            products.len(),
            boxes.len()
        );
        assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{text}: {made:?}");
        assert!(made.registers <= most_registers, "{text}: {made:?}");
        let counts = ["HGMMA", "UTMALDG", "BAR"];
        let [rows, groups] = [block_m, groups].map(|n| n.parse::<usize>().expect("a number"));
        let n_sets = rows / 64 / groups;
        assert_eq!(counts.map(|word| n(products, word)), [4 * n_sets, 0, 0], "{text}: {products:?}");
        let n_loaded = if text.starts_with("matmul") && text.contains("tf32") { 4 * 4 * n_sets } else { 0 };
        assert_eq!(n(products, "LDS"), n_loaded, "{text}: {products:?}");
        assert_eq!(counts.map(|word| n(boxes, word)), [0, n_boxes, 0], "{text}: {boxes:?}");
        // Halves are stored 16 bytes at a time: 256 columns of two rows of a thread.
        let text_of = nvidia::disassembled(&nvdisasm, &cubin);
        let n_stores = ["STG.E.128", "STG.E ", "SHFL.BFLY"].map(|word| text_of.matches(word).count());
        let is_exchanged = config_text.contains("exchanged");
        assert!(!is_exchanged || n_stores == [16, 0, 64], "{text}: {n_stores:?}");
        // The order of rows shares those of the first factor.
        let n_multicast = boxes.iter().filter(|op| op.starts_with("UTMALDG") && op.contains("MULTICAST")).count();
        assert_eq!(n_multicast, usize::from(cluster > 1), "{text}: {boxes:?}");
    }
}

/// A warp stores a box by four instructions for tiles of halves, or eight for pairs of f32, and one of TMA's;
/// nothing else is stored, and nothing spills.
#[test]
fn boxes_are_stored_as_expected() {
    let (Some(ptxas), Some(nvdisasm)) = (nvidia::tool("ptxas"), nvidia::tool("nvdisasm")) else { return };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stores-ptx");
    std::fs::create_dir_all(&folder).unwrap();
    for (text, [block_m, block_n, block_k, groups], ahead, cluster, most_registers) in [
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", [128, 256, 64, 2], 4, 1, 224),
        ("matmul:m=4096,n=4096,k=4096,dtype=bf16", [128, 256, 64, 2], 4, 2, 224),
        ("dense:m=4096,n=4096,k=4096,dtype=f16", [256, 128, 64, 4], 3, 1, 120),
        ("dense:m=4096,n=4096,k=4096,tf32=1", [128, 256, 32, 2], 4, 1, 224),
    ] {
        let task = groups_task(text, UNITS);
        let counted = |store: &str| {
            let config = format!(
                r#"{{"block_m":{block_m},"block_n":{block_n},"block_k":{block_k},"groups_m":{groups},"groups_n":1,
                "vector_a":1,"vector_b":1,"order":"groups","ahead":{ahead},"copies":"bulk","producer":1,
                "persistent":1,"cluster":{cluster},"store":"{store}"}}"#
            );
            let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
            assert!(task.space.violated(&config).is_none(), "{text} {store}");
            let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
            let cubin = folder.join("stores.cubin");
            let code = ptx(&kernels, &task).unwrap();
            let made = nvidia::assemble(&ptxas, code.as_bytes(), "sm_90a", &cubin);
            let made = made.unwrap_or_else(|why| panic!("{text}: {why}\n{code}"))["run_0"];
            assert_eq!((made.spilled_bytes, made.local_bytes), (0, 0), "{text}: {made:?}");
            let all = nvidia::disassembled(&nvdisasm, &cubin);
            let words = ["UTMASTG", "STSM", "STS.64", " STG.E", "SHFL.BFLY", "WARPGROUP.DEPBAR", "HGMMA", ";"];
            (made.registers, words.map(|word| all.matches(word).count()))
        };
        let is_half = text.contains("dtype");
        let (registers, counts) = counted("bulk");
        let before = counted(if is_half { "exchanged" } else { "direct" });
        println!("{text} cluster={cluster}: {registers} registers, {counts:?}, without boxes {before:?}");
        let n_boxes = block_m / 64 / groups * block_n / if is_half { 64 } else { 32 };
        let expected = [n_boxes, if is_half { 4 * n_boxes } else { 0 }, if is_half { 0 } else { 8 * n_boxes }, 0, 0];
        assert_eq!(counts[..5], expected.map(|n| n as usize), "{text}: {counts:?}");
        assert_eq!(counts[5..7], before.1[5..7], "{text}: products are as they were");
        assert!(registers <= most_registers, "{text}: {registers}");
    }
}

const GROUPS_OF_WARPS: &str = r#"{"block_m":128,"block_n":256,"block_k":32,"groups_m":2,"groups_n":1,"vector_a":4,
    "vector_b":4,"order":"rows","ahead":3,"copies":"async"}"#;

/// Registers that the assembler takes where there are some, beside those that a kernel needs: it loads ahead.
const SPARE: u64 = 48;

/// Registers of a thread that the model behind the constraint `registers` allows for; `None` without such a
/// constraint.
fn modelled_registers(task: &Task, config: &Config) -> Option<u64> {
    let space = &task.space;
    let model = space.constraints().iter().find(|c| c.name == "registers" && !c.text.contains("where"))?;
    let model = model.text.split_once(" <= ").expect("it begins with the model's registers").0;
    let parameters: Vec<Parameter> =
        space.names().enumerate().map(|(at, name)| Parameter::new(name, space.domain(at).clone())).collect();
    let allows = |registers: &u64| {
        let bound = Constraint::parse("bound", &format!("{model} + {SPARE} >= {registers}"), &parameters).ok()?;
        let values: Vec<Value> = bound.parameters.iter().map(|name| space.value(config, name)).collect();
        Some(bound.holds(&values.iter().collect::<Vec<_>>()))
    };
    let all: Vec<u64> = (0..=MOST_REGISTERS).collect();
    let n_allowed = all.partition_point(|registers| allows(registers) == Some(true));
    n_allowed.checked_sub(1).map(|last| all[last])
}

/// Most registers of a thread, on any GPU.
const MOST_REGISTERS: u64 = 255;

/// Code whose kernels may have so many registers at most: they need no more where nothing spills.
fn with_registers(ptx: &str, most: u64) -> String {
    let any = ".minnctapersm 1";
    assert!(ptx.contains(any), "the assembler is left the choice");
    ptx.replace(any, &format!(".maxnreg {most}"))
}
