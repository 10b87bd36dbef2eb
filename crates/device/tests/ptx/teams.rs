//! Consumer teams that take tiles in turns (ping-pong).

use super::*;

/// Workloads of more than three tiles, with one step of the sum, with as many as there are stages, and with
/// more.
const OF_TEAMS: [&str; 6] = [
    "matmul:m=130,n=192,k=64,tf32=1,epilogue=bias+gelu",
    "dense:m=256,n=100,k=72,dtype=bf16",
    "matmul:m=256,n=384,k=320,dtype=bf16,epilogue=relu",
    "dense:m=256,n=192,k=192,tf32=1,epilogue=bias",
    "batch_matmul:b=3,m=128,n=64,k=80,ta=1,dtype=bf16,epilogue=add",
    "batch_matmul:b=2,m=128,n=200,k=64,ta=1,tb=1,dtype=f16",
];

/// Teams of warpgroups take tiles in turns, copied for both by one warp.
#[test]
fn teams_take_tiles_in_turns() {
    let (mut n, mut n_odd) = (0, 0);
    let takes_turns = |task: &Task, config: &Config| task.space.int(config, "teams") == 2;
    each_where(&OF_TEAMS, (n_each(&OF_TEAMS), 3), takes_turns, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config);
        let kernel = &kernels.body[0];
        let abi = Abi::of(kernels, kernel, &task.setting.target);
        let n_beside = producer_warp::WARPS + abi.n_converters;
        let expected = (2, 2 * kernel.block()[2] + n_beside);
        assert_eq!((abi.n_teams, abi.block[2]), expected, "{workload} {json}\n{kernels}");
        assert!(code.contains(&format!(".reqntid 4, 8, {}", abi.block[2])), "{workload} {json}\n{code}");
        let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
        orders.iter().for_each(|order| require_right((workload, task, config), kernels, code, *order));
        n += 1;
        n_odd += usize::from(kernels.to_string().contains("turns round in 3"));
    });
    println!("{n} configurations, of which {n_odd} have three rounds");
}

/// The emulator finds every fault in the turns of teams, in some order.
#[test]
fn faults_in_teams_are_found() {
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for (text, rest) in [
        // With three stages and seven steps, a team finds stages in both phases.
        ("matmul:m=256,n=384,k=448,dtype=bf16", r#""block_m":64,"block_n":64,"block_k":64,"groups_m":1,"ahead":3"#),
        (
            "dense:m=256,n=320,k=96,tf32=1",
            r#""block_m":128,"block_n":64,"block_k":32,"groups_m":2,"ahead":2,"in_flight":0"#,
        ),
        (
            "matmul:m=256,n=384,k=192,dtype=bf16",
            r#""block_m":64,"block_n":64,"block_k":64,"groups_m":1,"ahead":3,"in_flight":1,"store":"bulk""#,
        ),
    ] {
        let config = format!(
            r#"{{"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk","producer":1,
            "persistent":1,"teams":2,{rest}}}"#
        );
        let original = Original::of(text, &config);
        for (what, mutant) in faults_in_teams(&original.code, original.kernels.body[0].block()[2]) {
            original.require_found(what, &mutant, &ORDERS);
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Mutants of a kernel whose teams of `n_warps` warps take turns, each with a description of its fault.
fn faults_in_teams(code: &str, n_warps: i64) -> Vec<(&'static str, String)> {
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let operands = |line: &str, what: &str| -> Option<Vec<String>> {
        let rest = line.strip_prefix(what)?.trim().trim_end_matches(';');
        Some(rest.split(", ").map(str::to_owned).collect())
    };
    let address = |line: &str| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned());
    // Mbarriers are distinguished by their offset in shared memory; the teams' are the last two.
    let offset = |register: &str| {
        let added = lines.iter().filter_map(|line| operands(line, "add.s32"));
        added.into_iter().find(|added| added[0] == register).map(|added| added[2].clone())
    };
    let inits: Vec<usize> = (0..lines.len()).filter(|at| lines[*at].starts_with("mbarrier.init")).collect();
    let own = &inits[inits.len() - 2..];
    let first = offset(&address(lines[own[0]]).expect("an address")).expect("an offset");
    let is_turns = |line: &str| address(line).and_then(|register| offset(&register)).as_ref() == Some(&first);
    let changed = |change: &dyn Fn(usize, &str) -> Option<String>| -> String {
        let new = lines.iter().enumerate().map(|(at, line)| change(at, line).unwrap_or((*line).to_owned()) + "\n");
        new.collect()
    };
    let wait = "mbarrier.try_wait.parity.shared::cta.b64 ";
    let waits = |change: &dyn Fn(&[String]) -> String| {
        changed(&|_, line| operands(line, wait).filter(|_| is_turns(line)).map(|operands| change(&operands)))
    };
    let arrivals = |change: &dyn Fn(&str) -> String| {
        let is_one = |line: &str| line.contains("mbarrier.arrive.shared::cta.b64 _") && is_turns(line);
        changed(&|_, line| is_one(line).then(|| change(line)))
    };
    let counted = |n: i64| {
        let text = |line: &str| Some(format!("{}, {n};", line.rsplit_once(", ")?.0));
        changed(&|at, line| if own.contains(&at) { text(line) } else { None })
    };
    let is_followed = |line: &str| operands(line, "xor.b32").is_some_and(|x| x[0] == x[1]);
    let mask = (n_warps - 1).to_string();
    let of_block =
        |line: &str| operands(line, "and.b32").filter(|x| x[2] == mask).map(|x| (x[0].clone(), x[1].clone()));
    let z = lines.iter().find_map(|line| operands(line, "mov.u32").filter(|x| x[1] == "%tid.z"));
    let z = z.expect("an index along z").swap_remove(0);
    vec![
        ("a turn is not awaited", waits(&|x| format!("setp.eq.b32 {}, 0, 0;", x[0]))),
        ("a turn in another phase", {
            waits(&|x| format!("xor.b32 %q1, {}, 1;\n{wait}{}, {}, %q1;", x[2], x[0], x[1]))
        }),
        ("another turn is awaited", waits(&|x| format!("{wait}{}, {}, {};", x[0], x[1].replace(']', "+8]"), x[2]))),
        ("nobody is told of a turn", arrivals(&|_| String::new())),
        ("another one is told", arrivals(&|line| line.replace("];", "+8];"))),
        ("too few arrivals", counted(n_warps + 1)),
        ("too many arrivals", counted(n_warps - 1)),
        ("stages of the other team are not followed", changed(&|_, line| is_followed(line).then(String::new))),
        ("warps are numbered in the block", {
            let counts_on = |line: &str| of_block(line).filter(|(_, from)| *from == z);
            changed(&|_, line| counts_on(line).map(|(to, from)| format!("mov.b32 {to}, {from};")))
        }),
    ]
}
