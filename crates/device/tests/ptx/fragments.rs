//! Products of single warps on tensor cores.

use super::*;

/// Products of numbers with full mantissas, in two parts each, are close to those of f32, however long the
/// sums.
#[test]
fn tensor_cores_lose_little() {
    let workload = Workload::parse("matmul:m=64,n=48,k=1536").unwrap();
    let (given, expected) = with_reference(&workload);
    for template in ["gpu-matmul-mma", "gpu-matmul-wgmma"] {
        let setting =
            TemplateSetting { workload: workload.clone(), target: Target::named("sm_90a").unwrap(), n_threads: 1 };
        let task = Task::new(setting, Some(template)).unwrap();
        let kernels = lower_gpu(&task.program(&task.first_guess(0).unwrap()).unwrap()).unwrap();
        let text = ptx(&kernels, &task).unwrap();
        let got = emulator::run(&kernels, &text, &given, Order::Ascending).unwrap();
        let error = reference::relative_error(&got[2], &expected);
        println!("{template}: relative error {error:.2e}");
        assert!(error < 4e-7, "{template}: {error:.2e}");
    }
}

/// Shapes that tiles divide, and some that they do not, with operands in either order.
const PRODUCTS: [&str; 6] = [
    "matmul:m=64,n=48,k=80",
    "matmul:m=40,n=57,k=33,epilogue=bias+relu",
    "dense:m=32,n=72,k=64,epilogue=bias",
    "batch_matmul:b=2,m=32,n=40,k=48,ta=1",
    "batch_matmul:b=2,m=24,n=32,k=96,ta=1,tb=1,epilogue=add",
    "conv2d:c=8,h=9,w=11,k=32,r=3,s=3,pad=1,epilogue=bias",
];

/// Random configurations of products of 16-bit floats; `TILEWRIGHT_CONFIGS=100` takes that many of each type.
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

/// Wrong fragments are found: exchanged registers, rows for columns, another row.
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
            // Sums after, rows and columns, each as a list of registers.
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

/// No two threads of a warp access different words of one bank: instructions take no longer than their bytes
/// require.
#[test]
fn warps_read_tiles_without_conflicts() {
    let of_singles = r#"{"block_m":128,"block_n":128,"block_k":32,"warp_m":64,"warp_n":64,"vector_a":4,"vector_b":4,
        "order":"rows","unroll_k":4,"ahead":3,"copies":"async","precision":"tf32"}"#;
    for (text, config, depth) in [
        ("matmul:m=256,n=128,k=64,tf32=1", of_singles, 32),
        ("matmul:m=256,n=128,k=128,dtype=bf16", HALVES_OF_WARPS, 64),
    ] {
        let task = tiles_task(text, "sm_90a");
        // With 16-bit floats, a row takes the copies of 8 threads.
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
