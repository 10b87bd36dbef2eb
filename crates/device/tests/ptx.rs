//! Random configurations of every template that serves a GPU, as PTX: an emulator runs it, and NVIDIA's
//! assembler takes it where it is here.
//!
//! `TILEWRIGHT_CONFIGS=300` makes a long run of it: so many configurations of each template on each GPU; one
//! by default, on the newest GPU.
#![cfg(feature = "llvm")]

#[path = "../../codegen/tests/emulator/mod.rs"]
mod emulator;
#[path = "../../codegen/tests/nvidia/mod.rs"]
mod nvidia;

use std::path::Path;

use emulator::Order;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_codegen::compile_gpu;
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{self, random_argument};
use tilewright_ir::{GpuProgram, Program, Role, Target, interp, lower_gpu};
use tilewright_tune::{Setting, TEMPLATES, Task};

const GPUS: [&str; 4] = ["sm_61", "sm_70", "sm_80", "sm_90a"];

/// Small shapes that nothing divides, and some that tiles divide.
const SHAPES: [&str; 9] = [
    "matmul:m=17,n=33,k=29",
    "matmul:m=32,n=64,k=16",
    "matmul:m=40,n=24,k=33,tf32=1",
    "matmul:m=13,n=20,k=41,const=b,epilogue=bias+add+relu",
    "batch_matmul:b=2,m=11,n=19,k=9,tb=1,epilogue=add",
    "conv2d:c=5,h=7,w=9,k=7,r=3,s=3,pad=1,epilogue=bias+gelu",
    "conv2d:n=2,c=4,h=8,w=8,k=8,r=1,s=1,stride=2",
    "depthwise_conv2d:c=5,h=7,w=8,r=3,s=3,pad=1",
    "nest:buffer x:f32[7,19] global input buffer y:f32[7,19] global output loops i,j
     run {for i in 7 {for j in 19 {y[i,j] = tanh(x[i,j])}}}",
];

/// Large shapes, of which no more is asked than that their code is right for a GPU.
const LARGE: [&str; 3] = ["matmul-1024", "resnet18.C2", "resnet18.C12"];

/// How many configurations, and on which GPUs.
fn extent() -> (usize, &'static [&'static str]) {
    match std::env::var("TILEWRIGHT_CONFIGS") {
        Ok(n) => (n.parse().expect("a number of configurations"), &GPUS),
        Err(_) => (1, &GPUS[3..]),
    }
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

/// Checks kernels of random configurations for a GPU, each with its workload's text and its task.
fn each(texts: &[&str], gpu: &str, mut check: impl FnMut(&str, &Task, &GpuProgram) -> Result<(), String>) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(31);
    let (mut n, mut failures) = (0, Vec::new());
    for text in texts {
        let workload = Workload::parse(text).unwrap();
        let setting = Setting { workload, target: Target::named(gpu).unwrap(), n_threads: 1 };
        for template in TEMPLATES.iter().filter(|t| (t.serves)(&setting)) {
            let task = Task::new(setting.clone(), Some(template.name)).unwrap();
            for _ in 0..extent().0 {
                let config = task.space.sample(&mut rng);
                n += 1;
                let program = task.program(&config).map_err(|(at, why)| format!("step {}: {why}", at + 1));
                let kernels = program.and_then(|p| lower_gpu(&p).map_err(|why| format!("{why}\n{p}")));
                if let Err(why) = kernels.and_then(|kernels| check(text, &task, &kernels)) {
                    let json = task.space.config_to_json(&config);
                    failures.push(format!("{text} {} {gpu} {json}\n{why}", template.name));
                }
            }
        }
    }
    let first = failures.first().map_or("", String::as_str);
    assert!(failures.is_empty(), "{} of {n} configurations fail; the first:\n{first}", failures.len());
    println!("{n} configurations for {gpu}");
}

fn ptx(gpu: &GpuProgram, task: &Task) -> Result<String, String> {
    let made = compile_gpu(gpu, &task.setting.target).map_err(|why| format!("{why}\n{gpu}"))?;
    Ok(String::from_utf8(made.code).expect("PTX is text"))
}

#[test]
fn emulated_kernels_compute_the_operator() {
    for gpu in extent().1 {
        each(&SHAPES, gpu, |text, task, kernels| {
            let program = Workload::parse(text).unwrap().program();
            let mut expected = arguments(&program);
            interp::run(&program, &mut expected).unwrap();
            let text = ptx(kernels, task)?;
            let got = emulator::run(kernels, &text, &arguments(&program), Order::Descending)
                .map_err(|why| format!("{why}\n{kernels}\n{text}"))?;
            for ((_, b), (got, expected)) in program.arguments().zip(got.iter().zip(&expected)) {
                let most = 2e-5 * expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
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

/// Products of numbers with all their bits, in two parts each, are nearly those of single precision, however
/// long the sums.
#[test]
fn tensor_cores_lose_little() {
    let workload = Workload::parse("matmul:m=64,n=48,k=1536").unwrap();
    let program = workload.program();
    let setting = Setting { workload, target: Target::named("sm_90a").unwrap(), n_threads: 1 };
    let task = Task::new(setting, Some("gpu-matmul-mma")).unwrap();
    let kernels = lower_gpu(&task.program(&task.first_guess(0).unwrap()).unwrap()).unwrap();
    let given: Vec<Vec<f64>> = program.arguments().map(|(id, _)| random_argument(&program, id, id.0.into())).collect();
    let expected = reference::evaluate(&program, &given[..2], 1).unwrap();
    let text = ptx(&kernels, &task).unwrap();
    let got = emulator::run(&kernels, &text, &given, Order::Ascending).unwrap();
    let error = reference::relative_error(&got[2], &expected[0]);
    println!("relative error {error:.2e}");
    assert!(error < 4e-7, "{error:.2e}");
}

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
    for gpu in extent().1 {
        let (mut n_kernels, mut n_spilling) = (0, 0);
        each(&[SHAPES.as_slice(), &LARGE].concat(), gpu, |_, task, kernels| {
            let text = ptx(kernels, task)?;
            let made = nvidia::assemble(&ptxas, text.as_bytes(), gpu, &folder.join(format!("{gpu}.cubin")));
            let made = made.map_err(|why| format!("{why}\n{text}"))?;
            for kernel in kernels.kernels() {
                let made = made.get(&kernel.name).ok_or_else(|| format!("no {}", kernel.name))?;
                let most = task.setting.target.gpu.as_ref().map_or(0, |gpu| gpu.shared_bytes);
                let expected = Some(kernel.shared_bytes(kernels)).filter(|bytes| *bytes <= most).unwrap_or(0);
                if made.shared_bytes != expected {
                    return Err(format!("{} shares {} bytes, not {expected}", kernel.name, made.shared_bytes));
                }
                n_kernels += 1;
                n_spilling += usize::from(made.spilled_bytes > 0);
            }
            Ok(())
        });
        println!("{gpu}: {n_kernels} kernels, {n_spilling} of which spill");
    }
}

/// No two threads of a warp go to one bank for different words: instructions take what their bytes take.
#[test]
fn warps_read_tiles_without_conflicts() {
    let workload = Workload::parse("matmul:m=256,n=128,k=64,tf32=1").unwrap();
    let (program, target) = (workload.program(), Target::named("sm_90a").unwrap());
    let task = Task::new(Setting { workload, target, n_threads: 1 }, Some("gpu-matmul-mma")).unwrap();
    let config = r#"{"block_m":128,"block_n":128,"block_k":32,"warp_m":64,"warp_n":64,"vector_a":4,"vector_b":4,
        "order":"rows","unroll_k":4,"ahead":3,"copies":"async","precision":"tf32"}"#;
    let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
    let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
    let text = ptx(&kernels, &task).unwrap();
    let traffic = emulator::traffic(&kernels, &text, &arguments(&program)).unwrap();
    for (opcode, count) in &traffic {
        println!("{opcode}: {count:?}, {:.2} times the least", count.taken as f64 / count.least as f64);
    }
    assert!(traffic.keys().any(|opcode| opcode.starts_with("ldmatrix")), "{traffic:?}");
    assert!(traffic.values().all(|count| count.taken == count.least), "{traffic:?}");
}
