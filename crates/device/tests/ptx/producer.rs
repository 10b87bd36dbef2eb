//! Producer warps: their copies, and waits.

use super::*;

/// Workloads both of whose operands may be copied in boxes, each along the sum or across it.
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

/// Whether a kernel has a warp that only copies.
fn has_producer(task: &Task, config: &Config) -> bool {
    task.space.int(config, "producer") == 1
}

/// A warp that only copies feeds groups of warps, which do not wait for each other.
#[test]
fn a_warp_feeds_groups_of_warps() {
    let mut n = 0;
    each_where(&OF_BOXES, (n_each(&OF_BOXES), UNITS), has_producer, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config);
        let fed = &kernels.body[0];
        assert!(producer_warp::has_producer_warp(kernels, fed), "{workload} {json}\n{kernels}");
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

/// Blocks process several tiles one after the other, fewer at the end, in each order of tiles.
#[test]
fn blocks_go_through_tiles() {
    let mut n = 0;
    let n_each = n_configs().map_or(1, |n| n.div_ceil(OF_BOXES.len()));
    let is_persistent = |task: &Task, config: &Config| task.space.int(config, "persistent") == 1;
    each_where(&OF_TILES, (n_each, 3), is_persistent, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config);
        let fed = &kernels.body[0];
        let n_blocks = if task.space.int(config, "cluster") == 1 { 3 } else { 2 };
        assert!(
            producer_warp::has_producer_warp(kernels, fed) && fed.grid() == [n_blocks, 1, 1],
            "{workload} {json}\n{kernels}"
        );
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

/// The emulator finds every fault in the waits between the producer warp and the other warps.
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
        let original = Original::of(text, &config);
        let Original { kernels, code, .. } = &original;

        let lines: Vec<&str> = code.lines().map(str::trim).collect();
        // Whether a wait is the producer's: after it, copies come before products.
        let is_producers = |at: usize| {
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
        let waits = |of_producer: bool, change: &dyn Fn([&str; 3]) -> String| {
            changed(&|at, line| {
                let operands: Vec<&str> = line.strip_prefix(wait)?.trim_end_matches(';').split(", ").collect();
                (is_producers(at) == of_producer).then(|| change(operands.try_into().expect("three operands")))
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
        let arrivals = |of_producer: bool, change: &dyn Fn(&str) -> String| {
            changed(&|_, line| {
                let is_one = line.contains(arrives) && line.starts_with('@') != of_producer;
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
        // Stages are released before the products have been awaited.
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
                // They continue, so that the stage is that of the previous iteration.
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
            original.require_found(what, &mutant, &[Order::Ascending]);
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Any thread that waits for a barrier that never completes stops the kernel after four seconds: an endless
/// kernel would block the device.
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
        // The clock is first read before a second has passed.
        let why = of(&stuck);
        assert!(why.contains("stops the kernel after 5 s"), "{why}");
        let why = of(&stuck.replace("trap;", ""));
        assert!(why.contains("threads wait for what never comes"), "{rest}: {why}");
    }
}
