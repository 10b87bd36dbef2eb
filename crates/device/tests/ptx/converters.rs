//! Converter warps, which write the second parts of f32 operands that TMA copied unconverted.

use super::*;

/// Workloads of f32 whose operands both lie along the sum, of whole tiles and of partial ones, with fewer
/// steps than stages and with more.
const OF_PARTS: [&str; 5] = [
    "dense:m=130,n=64,k=192,epilogue=bias+gelu",
    "dense:m=64,n=96,k=32",
    "batch_matmul:b=2,m=64,n=64,k=96,tb=1,epilogue=add",
    "dense:m=40,n=50,k=28",
    "dense:m=128,n=192,k=320,epilogue=bias+relu",
];

/// Whether warps of a kernel convert what a producer warp copies.
fn converts(task: &Task, config: &Config) -> bool {
    task.space.text(config, "copies") == "bulk"
}

/// Asserts that a kernel computes its workload on numbers with full mantissas, as accurately as f32.
fn require_close(of: (&Workload, &str), kernels: &GpuProgram, code: &str, order: Order) {
    let (workload, config) = of;
    let (given, expected) = with_reference(workload);
    let got = emulator::run(kernels, code, &given, order)
        .unwrap_or_else(|why| panic!("{workload} {config} {order:?}: {why}\n{kernels}\n{code}"));
    let most = expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    let far = |(a, b): (&f64, &f64)| a.is_nan() || (a - b).abs() > 1e-6 * most;
    if let Some(at) = got.last().unwrap().iter().zip(&expected).position(far) {
        let (got, expected) = (got.last().unwrap()[at], expected[at]);
        panic!("{workload} {config} {order:?}: element {at} is {got} instead of {expected}\n{kernels}");
    }
}

/// Converter warps make the second parts, with one producer warp and one or two teams of consumers.
#[test]
fn warps_convert_what_a_warp_copies() {
    let mut n = 0;
    each_where(&OF_PARTS, (n_each(&OF_PARTS), 3), converts, |workload, task, config, kernels, code| {
        let json = task.space.config_to_json(config).to_string();
        let kernel = &kernels.body[0];
        let abi = Abi::of(kernels, kernel, &task.setting.target);
        let n_warps = abi.n_teams * kernel.block()[2] + producer_warp::WARPS + producer_warp::CONVERTERS;
        assert_eq!((abi.n_converters, abi.block[2]), (producer_warp::CONVERTERS, n_warps), "{workload} {json}");
        assert!(code.contains(&format!(".reqntid 4, 8, {n_warps}")), "{workload} {json}\n{code}");
        assert_eq!(Abi::of(kernels, kernel, &Target::named("sm_80").unwrap()).n_converters, 0);
        let orders = if n_configs().is_some() { &ORDERS[..] } else { &ORDERS[n % 3..][..1] };
        orders.iter().for_each(|order| require_close((workload, &json), kernels, code, *order));
        n += 1;
    });
    println!("{n} configurations");
}

/// Sums of positive numbers are as accurate as those of the path through registers, without bias.
#[test]
fn second_parts_leave_no_bias() {
    let task = groups_task("dense:m=64,n=64,k=256", UNITS);
    let (mut given, _) = with_reference(&task.setting.workload);
    given.iter_mut().flatten().for_each(|x| *x = x.abs());
    let program = task.setting.workload.program();
    let inputs: Vec<_> = given.iter().take(2).cloned().collect();
    let expected = reference::evaluate(&program, &inputs, 1).unwrap().remove(0);
    for way in [
        r#""vector_a":4,"vector_b":4,"copies":"registers","ahead":1"#,
        r#""vector_a":1,"vector_b":1,"copies":"bulk","ahead":2,"producer":1"#,
    ] {
        let config =
            format!(r#"{{"block_m":64,"block_n":64,"block_k":32,"groups_m":1,"groups_n":1,"order":"rows",{way}}}"#);
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
        let got = emulator::run(&kernels, &ptx(&kernels, &task).unwrap(), &given, Order::Ascending).unwrap();
        let errors: Vec<f64> = got.last().unwrap().iter().zip(&expected).map(|(x, y)| (x - y) / y).collect();
        let bias = errors.iter().sum::<f64>() / errors.len() as f64;
        let most = errors.iter().fold(0.0, |most: f64, e| most.max(e.abs()));
        println!("{way}: bias {bias:.1e}, at most {most:.1e}");
        assert!(bias.abs() < 4e-7 && most < 1e-6, "{way}: bias {bias:.1e}, at most {most:.1e}");
    }
}

/// The emulator finds every fault in second parts, or in the waits for them, in some order.
#[test]
fn faults_in_conversions_are_found() {
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for (text, rest) in [
        ("dense:m=128,n=64,k=256", r#""block_m":128,"block_n":64,"groups_m":2,"ahead":3"#),
        ("dense:m=128,n=256,k=96", r#""block_m":64,"block_n":64,"groups_m":1,"ahead":2,"persistent":1"#),
        ("dense:m=256,n=128,k=160", r#""block_m":64,"block_n":64,"groups_m":1,"ahead":2,"persistent":1,"teams":2"#),
    ] {
        let config = format!(
            r#"{{"block_k":32,"groups_n":1,"vector_a":1,"vector_b":1,"order":"rows","copies":"bulk","producer":1,{rest}}}"#
        );
        let original = Original::of(text, &config);
        let (given, _) = with_reference(&Workload::parse(text).unwrap());
        let right = emulator::run(&original.kernels, &original.code, &given, Order::Ascending).unwrap();
        let original = Original { given, right, ..original };
        for (what, mutant) in faults_in_conversions(&original.code) {
            original.require_found(what, &mutant, &ORDERS);
            *found.entry(what).or_insert(0) += 1;
        }
    }
    println!("faults that were found: {found:?}");
}

/// Mutants of a kernel with converter warps, each with a description of its fault.
fn faults_in_conversions(code: &str) -> Vec<(&'static str, String)> {
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let changed = |change: &dyn Fn(usize, &str) -> Option<String>| -> String {
        let new = lines.iter().enumerate().map(|(at, line)| change(at, line).unwrap_or((*line).to_owned()) + "\n");
        new.collect()
    };
    let wait = "mbarrier.try_wait.parity.shared::cta.b64 ";
    // A wait is identified by the instructions after it: loads of converters, products of consumers.
    let is_before = |at: usize, what: &str| {
        let label = lines[at..].iter().find_map(|line| line.strip_prefix('@')?.split_once("bra \t"));
        let label = label.expect("a branch behind a wait").1.replace(';', ":");
        let goes_on = lines.iter().position(|line| *line == label).expect("the label that it goes to");
        let next = ["cp.async.bulk", "wgmma.", "ld.shared", "mbarrier.try_wait"];
        let next = lines[goes_on..].iter().find(|line| next.iter().any(|word| line.starts_with(word)));
        next.is_some_and(|line| line.starts_with(what))
    };
    let waits = |before: &str, change: &dyn Fn([&str; 3]) -> String| {
        changed(&|at, line| {
            let operands: Vec<&str> = line.strip_prefix(wait)?.trim_end_matches(';').split(", ").collect();
            is_before(at, before).then(|| change(operands.try_into().expect("three operands")))
        })
    };
    let passes = |[to, ..]: [&str; 3]| format!("setp.eq.b32 {to}, 0, 0;");
    let in_other_phase = |[to, place, phase]: [&str; 3]| format!("xor.b32 %q1, {phase}, 1;\n{wait}{to}, {place}, %q1;");
    let elsewhere = |[to, place, phase]: [&str; 3]| format!("{wait}{to}, {}+8], {phase};", place.trim_end_matches(']'));
    // Converters arrive after their stores, the producer after its copies.
    let is_converters = |at: usize| {
        let before = lines[..at].iter().rev();
        let mut before = before.filter(|line| line.starts_with("st.shared") || line.starts_with("cp.async.bulk"));
        before.next().is_some_and(|line| line.starts_with("st.shared"))
    };
    let arrivals = |change: &dyn Fn(&str) -> String| {
        let is_one = |at: usize, line: &str| line.starts_with("mbarrier.arrive.shared::cta.b64 _") && is_converters(at);
        changed(&|at, line| is_one(at, line).then(|| change(line)))
    };
    let counted = |n: i64| {
        let is_one = |line: &str| line.starts_with("mbarrier.init") && line.ends_with(", 64;");
        changed(&|_, line| is_one(line).then(|| line.replace(", 64;", &format!(", {n};"))))
    };
    let stores =
        |change: &dyn Fn(&str) -> String| changed(&|_, line| line.starts_with("st.shared.v4").then(|| change(line)));
    vec![
        ("copies are not awaited", waits("ld.shared", &passes)),
        ("copies of another phase", waits("ld.shared", &in_other_phase)),
        ("copies of another stage", waits("ld.shared", &elsewhere)),
        ("second parts are not awaited", waits("wgmma.", &passes)),
        ("second parts of another phase", waits("wgmma.", &in_other_phase)),
        ("second parts of another stage", waits("wgmma.", &elsewhere)),
        ("nobody says that they are there", arrivals(&|_| String::new())),
        ("another stage is said to be converted", arrivals(&|line| line.replace("];", "+8];"))),
        ("too few arrivals", counted(65)),
        ("too many arrivals", counted(63)),
        ("no fence", changed(&|at, line| (line.starts_with("fence.proxy") && is_converters(at)).then(String::new))),
        (
            "second parts elsewhere",
            stores(&|line| {
                let (address, rest) = line.split_once(']').expect("an address");
                let (base, offset) = address.split_once('+').unwrap_or((address, "0"));
                format!("{base}+{}]{rest}", offset.parse::<i64>().expect("a number") + 16)
            }),
        ),
        ("nothing is cut off", code.replace(", -8192;", ", -1;")),
        ("too much is cut off", code.replace(", -8192;", ", -65536;")),
    ]
}
