//! Clusters, whose blocks copy for each other.

use super::*;

/// Workloads with an even number of tiles along rows or columns, whose operands lie along the sum or across
/// it.
const OF_CLUSTERS: [&str; 5] = [
    "batch_matmul:b=2,m=128,n=64,k=64,tb=1,tf32=1",
    "dense:m=250,n=128,k=192,tf32=1,epilogue=bias+gelu",
    "matmul:m=256,n=248,k=200,dtype=bf16,epilogue=relu",
    "batch_matmul:b=2,m=256,n=128,k=80,ta=1,dtype=bf16,epilogue=add",
    "batch_matmul:b=2,m=128,n=200,k=64,ta=1,tb=1,dtype=f16",
];

/// Neighbouring blocks copy shared operands for each other, also on a GPU with an odd number of
/// multiprocessors.
#[test]
fn blocks_of_clusters_copy_for_each_other() {
    let (mut n, mut n_persistent) = (0, 0);
    let is_wanted = |task: &Task, config: &Config| task.space.int(config, "cluster") == 2;
    each_where(&OF_CLUSTERS, (n_each(&OF_CLUSTERS), 5), is_wanted, |workload, task, config, kernels, code| {
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

/// The emulator finds every fault in the copies between blocks of a cluster, in some order.
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
        let original = Original::of(text, &config);
        let Original { kernels, code, .. } = &original;

        let lines: Vec<&str> = code.lines().map(str::trim).collect();
        let changed = |change: &dyn Fn(&str) -> Option<String>| -> String {
            lines.iter().map(|line| change(line).unwrap_or((*line).to_owned()) + "\n").collect()
        };
        // Each barrier of the cluster consists of an arrival and a wait.
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
            original.require_found(what, &mutant, &ORDERS);
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}
