//! Padded rows of f32 operands that copies transpose on their way into shared memory.

use super::*;

/// Products of which one operand is transposed, or both, in whole tiles and in others.
const TRANSPOSED: [&str; 5] = [
    "matmul:m=64,n=96,k=64,exact=1",
    "matmul:m=37,n=41,k=70,exact=1,epilogue=bias+relu",
    "dense:m=40,n=72,k=96,exact=1",
    "batch_matmul:b=2,m=40,n=64,k=48,tb=1,exact=1",
    "conv2d:c=8,h=9,w=11,k=32,r=3,s=3,pad=1,exact=1,epilogue=bias",
];

fn threads_task(text: &str) -> Task {
    let (workload, target) = (Workload::parse(text).unwrap(), Target::named("sm_90a").unwrap());
    let template = if text.starts_with("conv2d") { "gpu-conv" } else { "gpu-matmul" };
    Task::new(TemplateSetting { workload, target, n_threads: 1 }, Some(template)).unwrap()
}

/// Configuration of steps of `depth`, with padded rows or without.
fn config_of(task: &Task, depth: i64, more: &str, pad: i64) -> Config {
    let config = format!(
        r#"{{"block_m":128,"block_n":128,"block_k":{depth},"thread_m":8,"thread_n":8,"vector_b":4,"split_k":1,
        "order":"rows","unroll_k":8,"warp_n":4,"pad":{pad},{more}}}"#
    );
    task.space.config_from_json(&config.parse().unwrap()).unwrap_or_else(|why| panic!("{config}: {why}"))
}

/// Neighbouring steps of the reduction are stored by neighbouring threads: to one bank without padding.
#[test]
fn stores_to_padded_rows_have_no_bank_conflicts() {
    let registers = r#""vector_a":4,"ahead":2,"copies":"registers""#;
    for (text, depth, more, conflicts) in [
        ("matmul:m=128,n=128,k=64,exact=1", 8, registers, 2),
        ("matmul:m=128,n=128,k=64,exact=1", 16, registers, 4),
        ("matmul:m=128,n=128,k=64,exact=1", 32, &registers.replace('2', "1"), 8),
        ("matmul:m=128,n=128,k=64,exact=1", 16, r#""vector_a":2,"ahead":1,"copies":"registers""#, 8),
        ("matmul:m=128,n=128,k=64,exact=1", 8, r#""vector_a":1,"ahead":3,"copies":"async""#, 8),
        ("dense:m=128,n=128,k=64,exact=1", 16, registers, 4),
    ] {
        let task = threads_task(text);
        let [before, padded] = [0, 1].map(|pad| {
            let kernels = lower_gpu(&task.program(&config_of(&task, depth, more, pad)).unwrap()).unwrap();
            let code = ptx(&kernels, &task).unwrap();
            emulator::traffic(&kernels, &code, &arguments(&task.setting.workload.program())).unwrap()
        });
        let vectors = ["ld.shared", "st.shared.v4", "cp.async.cg"];
        let scalars = |opcode: &str| !vectors.iter().any(|vector| opcode.starts_with(vector));
        let of_scalars = |traffic: &BTreeMap<String, emulator::Count>| {
            let counts: Vec<_> =
                traffic.iter().filter(|(opcode, _)| scalars(opcode)).map(|(_, count)| *count).collect();
            assert_eq!(counts.len(), 1, "{text} {depth} {more}: {traffic:?}");
            counts[0]
        };
        let cycles =
            |traffic: &BTreeMap<String, emulator::Count>| traffic.values().map(|count| count.taken).sum::<u64>();
        let (all, fewer) = (cycles(&before), cycles(&padded));
        println!(
            "{text} {depth} {more}: {before:?}, padded {padded:?}: {:.3} of the cycles",
            fewer as f64 / all as f64
        );
        let count = of_scalars(&before);
        assert_eq!(count.taken, conflicts * count.least, "{text} {depth} {more}: {before:?}");
        assert!(padded.values().all(|count| count.taken == count.least), "{text} {depth} {more}: {padded:?}");
        // Threads load as many vectors of 16 bytes.
        let loads = |traffic: &BTreeMap<String, emulator::Count>| traffic.get("ld.shared.v4.b32").copied();
        assert!(loads(&before).is_some() && loads(&before) == loads(&padded), "{text}: {before:?}, {padded:?}");
    }
}

/// Random configurations with padded rows compute the product in any order of threads.
#[test]
fn padded_rows_hold_their_operands() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(53);
    let mut n = 0;
    for text in TRANSPOSED {
        let task = threads_task(text);
        let workload = &task.setting.workload;
        for _ in 0..n_each(&TRANSPOSED) {
            let config = loop {
                let config = task.space.sample(&mut rng);
                if task.space.int(&config, "pad") == 1 {
                    break config;
                }
            };
            let json = task.space.config_to_json(&config);
            let program = task.program(&config).unwrap_or_else(|(at, why)| panic!("{text} {json} step {at}: {why}"));
            let kernels = lower_gpu(&program).unwrap_or_else(|why| panic!("{text} {json}: {why}\n{program}"));
            let code = ptx(&kernels, &task).unwrap();
            let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
            orders.iter().for_each(|order| require_right((workload, &task, &config), &kernels, &code, *order));
            n += 1;
        }
    }
    println!("{n} configurations");
}

/// Padded rows take no more registers, of what was fastest for 4096³ on an H100, and spill none.
#[test]
fn padded_rows_take_no_more_registers() {
    let Some(ptxas) = nvidia::tool("ptxas") else { return };
    let task = threads_task("matmul:m=4096,n=4096,k=4096,exact=1");
    let cubin = Path::new(env!("CARGO_TARGET_TMPDIR")).join("padded.cubin");
    for (block_n, depth) in [(256, 16), (128, 8)] {
        let [before, padded] = [0, 1].map(|pad| {
            let config = format!(
                r#"{{"block_m":128,"block_n":{block_n},"block_k":{depth},"thread_m":8,"thread_n":8,"vector_a":4,
                "vector_b":4,"split_k":1,"order":"columns","unroll_k":{depth},"ahead":2,"warp_n":4,
                "copies":"registers","pad":{pad}}}"#
            );
            let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
            let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
            nvidia::assemble(&ptxas, ptx(&kernels, &task).unwrap().as_bytes(), "sm_90a", &cubin).unwrap()["run_0"]
        });
        println!("{block_n} columns, steps of {depth}: {before:?}, padded {padded:?}");
        assert_eq!((padded.spilled_bytes, padded.local_bytes), (0, 0), "{padded:?}");
        assert!(padded.registers <= before.registers, "{padded:?}, {before:?} without");
    }
}
