//! Products of warpgroups.

use super::*;

#[test]
fn groups_of_warps_multiply() {
    let mut n = 0;
    each_of_groups(&OF_GROUPS, n_of_each(), |workload, task, config, kernels, code| {
        require_right((workload, task, config), kernels, code, ORDERS[n % 3]);
        n += 1;
    });
    println!("{n} configurations");
}

/// Instructions that threads execute together are `convergent` in LLVM, so that it does not copy them to
/// places that only some of the threads reach.
#[test]
fn instructions_of_several_threads_are_said_to_be() {
    let text = "dense:m=128,n=64,k=256,tf32=1";
    let config = r#"{"block_m":128,"block_n":64,"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk",
        "block_k":32,"groups_m":2,"ahead":3,"producer":1,"in_flight":1}"#;
    let Original { kernels, .. } = Original::of(text, config);
    let target = groups_task(text, 3).setting.target;
    let (code, _) = emit_gpu(&kernels, &target, Emit::LlvmOptimized).unwrap();
    let code = String::from_utf8(code).unwrap();
    // Attributes of calls, by attribute number.
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

/// Products whose threads each store 16 bytes at once, after exchanging fragments with others.
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

/// The emulator finds every missing synchronization, and every wrong description of an operand.
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
        // Reports a box as complete immediately.
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
            // The first thread initialises what all threads use.
            let order = if what == "no barrier" { Order::Descending } else { Order::Ascending };
            let got = emulator::run(kernels, &mutant, &given, order);
            // Multiplying data of other places is not a fault, but gives a wrong result.
            let is_found = got.map_or(true, |got| OF_NUMBERS.contains(&what) && got != right);
            assert!(is_found, "{what} goes unnoticed: {json}\n{mutant}");
            *found.entry(what).or_insert(0) += 1;
        }
    });
    println!("faults that were found: {found:?}");
    assert_eq!(found.len(), 12, "{found:?}");
}

/// Products that continue while the next ones are started: a stage of the ring is refilled only when they
/// have finished, and no instruction reads the sums before.
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
        let (given, expected) = (arguments(&workload.program()), computed(workload));
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

/// For TF32 operands that lie across the sum, threads load the operand of rows from boxes into registers:
/// without bank conflicts, at the positions that tensor cores expect, and before the fence.
#[test]
fn threads_load_rows_that_lie_across_the_sum() {
    for text in ["matmul:m=64,n=256,k=96,tf32=1", "batch_matmul:b=2,m=128,n=64,k=96,ta=1,tb=1,tf32=1"] {
        let config = r#"{"block_m":128,"block_n":64,"block_k":32,"groups_m":2,"groups_n":1,"vector_a":1,
            "vector_b":1,"order":"rows","precision":"tf32","ahead":2,"copies":"bulk","producer":1}"#;
        let Original { kernels, code, given, right, .. } = Original::of(text, config);
        let traffic = emulator::traffic(&kernels, &code, &given).unwrap();
        println!("{text}: {traffic:?}");
        assert!(traffic.iter().all(|(_, count)| count.taken == count.least), "{text}: {traffic:?}");
        assert!(traffic.keys().any(|opcode| opcode.starts_with("ld.shared")), "{text}: {traffic:?}");
        // The registers of a product follow those of its sums.
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

/// Faults that multiply or add other numbers.
const OF_NUMBERS: [&str; 4] =
    ["another stride", "another row across", "rows along and across the sum", "sums do not begin anew"];

/// Threads write operands into swizzled rows without bank conflicts, including those that they transpose.
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

/// Operands of TF32 products are rounded to nearest on each path into shared memory: if tensor cores
/// truncated the extra bits, products of positive numbers would all be too small, by 6 · 10⁻⁴.
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
