//! Stores of boxes by TMA.

use super::*;

/// Workloads whose results warps can store in boxes.
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
    each_where(&OF_STORES, (n_each(&OF_STORES), 3), stores_boxes, |workload, task, config, kernels, code| {
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

/// The emulator finds every fault in the stores of boxes, in some order.
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
        let original = Original::of(text, &config);
        for (what, mutant) in faults_in_stores(&original.code, rest.contains("persistent")) {
            original.require_found(what, &mutant, &ORDERS);
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Mutants of a kernel that stores boxes, each with a description of its fault. `is_again`: whether its
/// blocks process several tiles.
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
    // Whether a barrier comes before a copy, but not before the data for it are written.
    let is_behind = |at: &usize| {
        let words = ["cp.async.bulk.tensor", "st.shared", "stmatrix"];
        let uses = lines[*at..].iter().find_map(|line| words.iter().position(|word| line.contains(word)));
        uses == Some(0)
    };
    let (behind, ahead): (Vec<usize>, Vec<usize>) = barriers.into_iter().partition(is_behind);
    let fences = behind.iter().filter_map(|at| lines[..*at].iter().rposition(|line| line.starts_with("fence.proxy")));
    let mut mutants = Vec::new();
    // The first wait has nothing to wait for if a block has one tile.
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
