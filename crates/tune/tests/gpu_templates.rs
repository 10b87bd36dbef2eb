//! Tests of every GPU template on shapes that no tile divides: schedules are legal, compute the same as the
//! untransformed programs, and become kernels within the limits of the device, which compute the same in any
//! order of threads, without races.
//!
//! `TILEWRIGHT_CONFIGS=1000` makes a long run: this many configurations of each template, or with
//! `TILEWRIGHT_TEMPLATE=gpu-conv` of that one, each in three orders of threads; by default three on each
//! shape that it serves, each in one order.

mod common;

use common::{arguments, outputs_of, written};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::json;
use tilewright_ir::gpu::simt::{self, ThreadOrder};
use tilewright_ir::op::Workload;
use tilewright_ir::{Target, lower_gpu, verify};
use tilewright_search::Config;
use tilewright_tune::{TEMPLATES, Task, Template, TemplateSetting};

/// Number of random configurations of a template on a shape in plain `cargo test`.
const CONFIGS: usize = 3;

/// Orders of threads.
const ORDERS: [ThreadOrder; 3] = [ThreadOrder::Forward, ThreadOrder::Reverse, ThreadOrder::Shuffled(3)];

/// Number of configurations of each template in a long run.
fn n_asked() -> Option<usize> {
    std::env::var("TILEWRIGHT_CONFIGS").ok().map(|n| n.parse().expect("a number of configurations"))
}

/// Number of configurations of a template for each of `n_shapes` shapes.
fn n_configs(n_shapes: usize) -> usize {
    n_asked().map_or(CONFIGS, |n| n.div_ceil(n_shapes))
}

fn setting(text: &str, target: &Target) -> TemplateSetting {
    let workload = Workload::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    TemplateSetting { workload, target: target.clone(), n_threads: 1 }
}

fn named(target: &str) -> Target {
    Target::named(target).unwrap()
}

fn serving(setting: &TemplateSetting) -> impl Iterator<Item = &'static Template> {
    TEMPLATES.iter().filter(move |t| (t.serves)(setting))
}

/// Checks that a configuration's program is legal, computes the expected results, and becomes kernels that
/// fit the device and compute the same in these orders.
///
/// `expected`: results for numbers divided by `divisor`, and the maximum difference from them.
fn check(
    task: &Task,
    config: &Config,
    orders: &[ThreadOrder],
    (expected, divisor, most): (&[Vec<f64>], f64, f64),
) -> Result<(), String> {
    let steps = task.steps(config);
    let scheduled = task.program(config).map_err(|(at, e)| {
        let text = task.steps_text(config);
        format!("step {}, `{}`: {e}\n{text}", at + 1, steps[at])
    })?;
    verify::verify(&scheduled).map_err(|e| format!("{e}\n{scheduled}"))?;
    // Winograd's algorithm multiplies by thirds.
    let most = if scheduled.find_buffer("acc.u").is_some() { 1e-3 } else { most };
    let near = |(a, b): (&f64, &f64)| a == b || (a - b).abs() <= most * b.abs().max(1.0);
    let is_right = |got: &[Vec<f64>]| got.iter().flatten().zip(expected.iter().flatten()).all(near);
    if !is_right(&outputs_of(&scheduled, divisor)) {
        return Err(format!("results differ\n{scheduled}"));
    }
    let kernels = lower_gpu(&scheduled).map_err(|e| format!("{e}\n{scheduled}"))?;
    let gpu = task.setting.target.gpu.expect("the target is a GPU");
    for kernel in kernels.kernels() {
        let within = |(n, most): (i64, u32)| n <= i64::from(most);
        let fits = kernel.shared_bytes(&kernels) <= gpu.most_shared_bytes
            && kernel.n_threads() <= i64::from(gpu.most_threads)
            && kernel.block().into_iter().zip(gpu.most_threads_along).all(within)
            && kernel.grid().into_iter().zip(gpu.most_blocks_along).all(within);
        if !fits {
            let (block, grid) = (kernel.block(), kernel.grid());
            return Err(format!("{} is too large: {block:?} threads, {grid:?} blocks\n{kernels}", kernel.name));
        }
    }
    for &order in orders {
        let mut values = arguments(&scheduled, divisor);
        simt::run(&kernels, &mut values, order).map_err(|e| format!("{order:?}: {e}\n{kernels}"))?;
        if !is_right(&written(&scheduled, values)) {
            return Err(format!("results differ in order {order:?}\n{kernels}"));
        }
    }
    Ok(())
}

/// Checks first guesses and random configurations of every template that serves some of these workloads.
fn check_random(texts: &[&str], target: &Target, (divisor, most): (f64, f64)) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let settings: Vec<TemplateSetting> = texts.iter().map(|text| setting(text, target)).collect();
    let expected: Vec<Vec<Vec<f64>>> =
        settings.iter().map(|setting| outputs_of(&setting.workload.program(), divisor)).collect();
    let (mut n_checked, mut failures) = (0, Vec::new());
    let only = std::env::var("TILEWRIGHT_TEMPLATE").ok();
    for template in TEMPLATES.iter().filter(|t| only.as_ref().is_none_or(|only| only == t.name)) {
        let served = || settings.iter().zip(&expected).filter(|(setting, _)| (template.serves)(setting));
        let (n_shapes, before) = (served().count(), n_checked);
        for (setting, expected) in served() {
            let task = Task::new(setting.clone(), Some(template.name)).unwrap_or_else(|e| panic!("{e}"));
            let random = (0..n_configs(n_shapes)).map(|_| task.space.sample(&mut rng));
            for config in task.first_guess(0).into_iter().chain(random) {
                let orders = if n_asked().is_some() { &ORDERS[..] } else { &ORDERS[n_checked % 3..][..1] };
                n_checked += 1;
                if let Err(why) = check(&task, &config, orders, (expected, divisor, most)) {
                    let (text, config) = (&setting.workload, task.space.config_to_json(&config));
                    failures.push(format!("{text} {} {config}: {why}", template.name));
                }
            }
        }
        if n_shapes > 0 {
            println!("{}: {} configurations on {n_shapes} shapes", template.name, n_checked - before);
        }
    }
    let without = settings.iter().find(|setting| serving(setting).next().is_none());
    assert!(without.is_none(), "{without:?} has no template");
    let some: Vec<&String> = failures.iter().take(3).collect();
    assert!(failures.is_empty(), "{} of {n_checked} configurations fail, as\n{some:#?}", failures.len());
}

#[test]
fn products_of_any_shape_run_in_blocks_of_threads() {
    let texts = [
        "matmul:m=1,n=1,k=1",
        "matmul:m=17,n=33,k=29",
        "matmul:m=64,n=64,k=32",
        "matmul:m=37,n=41,k=131,const=a",
        "matmul:m=24,n=48,k=20,dtype=f64",
        "matmul:m=13,n=39,k=140,epilogue=bias+add+relu",
        "batch_matmul:b=3,m=17,n=29,k=13",
        "batch_matmul:b=4,m=15,n=20,k=66,ta=1,tb=1,epilogue=bias+relu",
        "heads_matmul:b=3,m=17,n=29,k=13,tb=1,ha=1,hb=1,a_after=6,b_before=3,b_after=3,epilogue=linear(0.5;0)+bias",
        "heads_matmul:b=3,m=17,n=20,k=19,hb=1,hc=1,b_before=6",
        "heads_matmul:b=2,m=8,n=33,k=21,ha=1,hc=1,a_before=1,dtype=f64,epilogue=bias+add",
        "dense:m=13,n=37,k=35,epilogue=bias",
        "matmul:m=24,n=40,k=33,dtype=bf16",
        "batch_matmul:b=2,m=16,n=24,k=32,ta=1,tb=1,dtype=f16,epilogue=bias",
    ];
    check_random(&texts, &named("sm_80"), (1.0, 0.0));
}

#[test]
fn convolutions_of_any_shape_run_in_blocks_of_threads() {
    let texts = [
        "conv2d:c=5,h=7,w=9,k=6,r=3,s=3,pad=1",
        "conv2d:n=2,c=4,h=9,w=7,k=11,r=3,s=3,stride=2,pad=1,const=w,epilogue=bias+relu",
        "conv2d:c=8,h=8,w=8,k=16,r=1,s=1",
        "conv2d:n=2,c=3,h=13,w=12,k=7,r=5,s=3,dilation=2,dtype=f64,epilogue=add",
        "conv2d:c=6,h=8,w=9,k=8,r=1,s=1,stride=2,groups=2,prologue=linear(-1;2)+relu",
        "conv2d:c=6,h=5,w=4,k=96,r=3,s=3,pad=1,groups=3,epilogue=bias",
        "conv2d:n=2,c=4,h=3,w=7,k=64,r=1,s=3,groups=2,interleave=1",
        "conv2d:c=8,h=7,w=5,k=12,r=3,s=3,pad=1,groups=4,interleave=1,epilogue=bias",
        "conv2d:c=4,h=5,w=5,k=4,r=3,s=3,groups=4,interleave=1",
        "conv2d:c=4,h=6,w=7,k=5,r=3,s=3,pad=1,prologue=scale+bias+relu",
        "depthwise_conv2d:c=6,h=9,w=8,r=3,s=3,pad=1,epilogue=relu",
        "depthwise_conv2d:n=2,c=5,h=6,w=7,r=3,s=2,stride=2",
        "depthwise_conv2d:c=3,h=6,w=8,r=2,s=3,multiplier=2",
        "depthwise_conv2d:c=7,h=5,w=11,r=3,s=3,pad=1",
        "depthwise_conv2d:n=3,c=2,h=13,w=7,r=5,s=5,pad=2,stride=2,epilogue=bias",
        "depthwise_conv2d:c=11,h=4,w=5,r=1,s=3",
        "depthwise_conv2d:c=1,h=17,w=3,r=3,s=3,epilogue=bias+relu",
        "conv2d_transpose:c=5,h=3,w=4,k=7,r=4,s=4,stride=2,pad=1,const=w",
        "conv2d:c=7,h=5,w=11,k=37,r=3,s=3,pad=1,epilogue=bias",
        "conv2d:n=2,c=3,h=11,w=13,k=5,r=3,s=3",
        "conv2d:c=2,h=6,w=17,k=3,r=3,s=3,pad=1,const=w,epilogue=bias+add+relu",
        "conv2d:c=13,h=5,w=5,k=2,r=3,s=3,pad=1",
        "conv2d:c=44,h=7,w=9,k=64,r=2,s=3,groups=2,stride=2,tf32=1",
        "conv2d:n=3,c=131,h=3,w=2,k=17,r=1,s=1",
        "conv2d:c=8,h=6,w=8,k=32,r=1,s=1,dtype=bf16,epilogue=bias+relu",
        "conv2d:n=2,c=5,h=7,w=9,k=33,r=3,s=3,pad=1,dtype=f16,const=w",
    ];
    check_random(&texts, &named("sm_80"), (1.0, 0.0));
}

/// Checks products on a CPU as an OpenCL device, which has wide vectors and memory as fast as shared memory.
#[test]
fn products_fill_the_vectors_of_a_cpu() {
    let device = Target { vector_bits: 512, ..named("opencl") };
    let texts = [
        "matmul:m=33,n=96,k=24",
        "matmul:m=40,n=64,k=19,epilogue=bias+relu",
        "matmul:m=16,n=128,k=16,dtype=f64",
        "batch_matmul:b=3,m=31,n=64,k=136,ta=1",
        "conv2d:c=8,h=8,w=8,k=9,r=1,s=1,epilogue=relu",
    ];
    check_random(&texts, &device, (1.0, 0.0));
    let task = Task::new(setting("matmul-512", &device), Some("gpu-matmul")).unwrap();
    let guess = task.space.config_to_json(&task.first_guess(0).unwrap());
    assert_eq!((&guess["lanes"], &guess["shared"]), (&16.into(), &"no".into()), "{guess}");
    let text = task.program(&task.first_guess(0).unwrap()).unwrap().to_string();
    assert!(text.contains("vectorized j.e in 16") && !text.contains("shared"), "{text}");
}

/// Checks that a block of many threads can copy a single weight.
#[test]
fn one_thread_copies_one_element() {
    let setting = setting("conv2d:c=4,h=6,w=7,k=5,r=3,s=3,pad=1", &named("sm_80"));
    let expected = outputs_of(&setting.workload.program(), 1.0);
    let task = Task::new(setting, Some("conv-4-4-4-2-2-2")).unwrap();
    let config = r#"{"k":[5,1,1,1],"p":[1,1,6,1],"q":[1,1,7,1],"c":[4,1],"r":[3,1],"s":[3,1],
        "unroll_explicit":"false","auto_unroll_max_step":0}"#;
    let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
    check(&task, &config, &ORDERS, (&expected, 1.0, 0.0)).unwrap();
}

#[test]
fn nests_of_any_kind_run_in_blocks_of_threads() {
    let nests = include_str!("../../../tests/nests.txt").lines().filter_map(|line| line.split_once(' '));
    let texts: Vec<&str> = nests.map(|(_, text)| text).filter(|text| text.starts_with("nest:")).collect();
    assert!(texts.len() > 20);
    check_random(&texts, &named("opencl"), (8.0, 1e-5));
}

/// Checks first guesses for an A100 of workloads for which one thread per result would leave most of it idle:
/// the maximum number of kernels, and the minimum number of threads of the first.
#[test]
fn first_guesses_have_threads_for_a_whole_gpu() {
    let rows = |m: i64, n: i64| {
        format!(
            "nest:buffer x0:f32[{m},{n}]global input buffer y:f32[{m},{n}]global output buffer t0:f32[{m}]global \
             temporary buffer t1:f32[{m},{n}]global temporary buffer t2:f32[{m}]global temporary loops \
             i0,i1,i2,i3,i4,i5,i6,i7 run{{alloc t0 for i0 in {m}{{for i1 in {n}{{t0[i0]max=x0[i0,i1]first i1==0}}}}\
             alloc t1 for i2 in {m}{{for i3 in {n}{{t1[i2,i3]=exp(x0[i2,i3]-t0[i2])}}}}alloc t2 for i4 in {m}{{for i5 \
             in {n}{{t2[i4]+=t1[i4,i5]first i5==0}}}}for i6 in {m}{{for i7 in {n}{{y[i6,i7]=t1[i6,i7]/t2[i6]}}}}}}"
        )
    };
    let one_row = "nest:buffer x0:f32[4096]global input buffer y:f32[4096]global output buffer t0:f32[1]global \
                   temporary buffer t1:f32[1]global temporary loops i0,i1 run{alloc t0 for i0 in 4096{t0[0]+=x0[i0]*\
                   x0[i0]first i0==0}alloc t1 t1[0]=sqrt(t0[0]*0.000244140625+1e-5)for i1 in 4096{y[i1]=x0[i1]/t1[0]}}";
    let pooling = "nest:buffer x0:f32[512,7,7]global input buffer y:f32[512]global output buffer t0:f32[512]global \
                   temporary loops i0,i1,i2,i3 run{alloc t0 for i0 in 512{for i1 in 7{for i2 in 7{t0[i0]+=\
                   x0[i0,i1,i2]first i1==0&&i2==0}}}for i3 in 512{y[i3]=t0[i3]*0.02}}";
    for (text, n_kernels, n_threads) in [
        (&rows(1024, 256), 1, 1 << 14),
        // Rows longer than shared memory, and fewer than there are compute units.
        (&rows(8, 50_000), 6, 1 << 13),
        (&one_row.to_owned(), 1, 128),
        (&pooling.to_owned(), 1, 1 << 12),
        (&"dense:m=1,n=4096,k=4096,const=w+bias,epilogue=bias+relu".to_owned(), 1, 1 << 15),
        (&"depthwise_conv2d:c=96,h=28,w=28,r=3,s=3,pad=1,const=w+bias,epilogue=bias".to_owned(), 1, 1 << 15),
    ] {
        let task = Task::new(setting(text, &Target::named("sm_80").unwrap()), None).unwrap();
        let guess = task.first_guess(0).expect("there is a guess");
        let kernels = lower_gpu(&task.program(&guess).unwrap()).unwrap();
        let of_first = kernels.body[0].grid().into_iter().product::<i64>() * kernels.body[0].n_threads();
        let config = task.space.config_to_json(&guess);
        assert!(kernels.body.len() <= n_kernels && of_first >= n_threads, "{text}\n{config}\n{kernels}");
    }
}

/// Returns the first guess of a template on an H100, as JSON.
fn guess_for_an_h100(text: &str, template: Option<&str>) -> serde_json::Value {
    let task = Task::new(setting(text, &named("sm_90a")), template).unwrap();
    task.space.config_to_json(&task.first_guess(0).expect("there is a guess"))
}

/// Checks that products that an H200 computed in 38.8 µs (1024³, TF32) and 1.04 ms (4096³) with `mma.sync`,
/// where threads took 59.7 µs and 3.0 ms, and an H100 in 0.65 ms (4096³) with `wgmma`, begin with `wgmma`;
/// those with `exact=1` begin with the best of 384 configurations: copies through registers into two buffers,
/// and fully unrolled steps.
#[test]
fn first_guesses_for_an_h100_take_tensor_cores() {
    let guess = |n: i64, flags: &str| guess_for_an_h100(&format!("matmul:m={n},n={n},k={n}{flags}"), None);
    for (n, flags) in [(1024, ""), (1024, ",tf32=1"), (4096, ",tf32=1"), (512, ",dtype=bf16")] {
        let guess = guess(n, flags);
        assert_eq!(guess["algorithm"], "wgmma", "{n}{flags}: {guess}");
    }
    // TMA copies both operands, whatever their layout.
    let across = guess(4096, ",tf32=1");
    assert_eq!((&across["copies"], &across["producer"]), (&"bulk".into(), &1.into()), "{across}");
    // Converter warps have not run on any GPU.
    let in_parts = guess_for_an_h100("dense:m=4096,n=4096,k=4096", None);
    let of = |name: &str| in_parts[name].as_str().unwrap_or_default();
    assert_eq!((of("algorithm"), of("precision"), of("copies")), ("wgmma", "tf32x3", "registers"), "{in_parts}");
    let exact = guess(4096, ",exact=1");
    let of = |name: &str| &exact[name];
    assert_eq!((of("copies"), of("ahead"), of("thread_m")), (&"registers".into(), &2.into(), &8.into()), "{exact}");
    assert_eq!((of("block_m"), of("block_n"), of("unroll_k")), (&128.into(), &256.into(), of("block_k")), "{exact}");
}

/// Checks that large half-precision products begin with the choice of CUTLASS's profiler and DeepGEMM's
/// heuristics: tiles of 128 × 256 by two warpgroups, a producer warp and at least three stages.
#[test]
fn first_guesses_of_warpgroups_are_those_of_libraries() {
    for n in [4096, 8192] {
        let guess = guess_for_an_h100(&format!("matmul:m={n},n={n},k={n},dtype=bf16"), Some("gpu-matmul-wgmma"));
        let int = |name: &str| guess[name].as_i64().unwrap_or_else(|| panic!("no {name} in {guess}"));
        let tile = [int("block_m"), int("block_n")];
        assert!(tile == [128, 256] || tile == [256, 128], "{n}: {guess}");
        assert_eq!(int("groups_m") * int("groups_n"), 2, "{n}: {guess}");
        assert!(guess["copies"] == "bulk" && int("producer") == 1 && int("ahead") >= 3, "{n}: {guess}");
        assert!(guess["store"] == "exchanged" && int("persistent") == 1, "{n}: {guess}");
    }
}

/// Checks that four warpgroups and a producer warp have at most 64 sums per thread. With 80, ptxas refuses
/// them: 96 registers are left for 544 threads, as for 640, and it needs 106. With 64 sums it needs 90.
#[test]
fn a_producer_warp_takes_registers_of_four_warps() {
    let task =
        Task::new(setting("dense:m=512,n=512,k=512,tf32=1", &named("sm_90a")), Some("gpu-matmul-wgmma")).unwrap();
    let config = |block_n: i64| {
        json!({"block_m": 256, "block_n": block_n, "block_k": 32, "groups_m": 4, "groups_n": 1, "vector_a": 1,
            "vector_b": 1, "order": "rows", "ahead": 4, "split_k": 4, "precision": "tf32", "copies": "bulk",
            "in_flight": 0, "producer": 1, "persistent": 0, "cluster": 2})
    };
    assert!(task.space.config_from_json(&config(128)).is_ok());
    let refused = task.space.config_from_json(&config(160)).unwrap_err().to_string();
    assert!(refused.contains("registers"), "{refused}");
}

/// Checks that the model of the machine ranks configurations in the order of their times on an H100
/// (2026-11-28). Given are the parameters that all configurations of a workload share, then for each one its
/// time in microseconds and its other parameters.
#[test]
fn configurations_are_ordered_as_an_h100_measured_them() {
    let boxes = json!({"block_k": 64, "groups_m": 2, "groups_n": 1, "vector_a": 1, "vector_b": 1, "ahead": 4,
        "split_k": 1, "precision": "halves", "copies": "bulk", "in_flight": 1, "producer": 1, "persistent": 1,
        "cluster": 1, "store": "direct", "order": "groups"});
    let of_tf32 = json!({"block_k": 32, "groups_m": 2, "groups_n": 1, "vector_a": 1, "vector_b": 1, "ahead": 4,
        "split_k": 1, "precision": "tf32", "copies": "bulk", "in_flight": 0, "producer": 1, "persistent": 1,
        "cluster": 2, "order": "groups"});
    let in_parts = json!({"block_m": 128, "block_n": 128, "block_k": 32, "groups_m": 2, "groups_n": 1,
        "vector_a": 4, "vector_b": 4, "ahead": 2, "split_k": 1, "precision": "tf32x3", "copies": "registers",
        "order": "groups"});
    let threads = json!({"block_m": 128, "block_n": 128, "block_k": 8, "thread_m": 8, "thread_n": 8,
        "vector_a": 4, "vector_b": 4, "split_k": 1, "order": "columns", "unroll_k": 8, "ahead": 2, "warp_n": 4,
        "copies": "registers"});
    for (workload, template, common, measured) in [
        (
            "matmul:m=4096,n=4096,k=4096,dtype=bf16",
            "gpu-matmul-wgmma",
            &boxes,
            vec![
                (180.2, json!({"block_m": 128, "block_n": 256, "store": "exchanged"})),
                (192.2, json!({"block_m": 128, "block_n": 256})),
                (206.8, json!({"block_m": 128, "block_n": 256, "persistent": 0})),
                (220.0, json!({"block_m": 128, "block_n": 128})),
                (240.8, json!({"block_m": 128, "block_n": 128, "persistent": 0})),
                (
                    291.3,
                    json!({"block_m": 128, "block_n": 128, "groups_m": 1, "groups_n": 2, "ahead": 2, "in_flight": 0,
                        "producer": 0, "persistent": 0}),
                ),
            ],
        ),
        (
            "matmul:m=512,n=512,k=512,dtype=bf16",
            "gpu-matmul-wgmma",
            &boxes,
            vec![
                (4.4, json!({"block_m": 128, "block_n": 64, "persistent": 0, "order": "rows"})),
                (6.2, json!({"block_m": 128, "block_n": 128, "persistent": 0, "order": "rows"})),
                (
                    8.7,
                    json!({"block_m": 128, "block_n": 256, "persistent": 0, "order": "columns", "cluster": 2,
                        "store": "exchanged"}),
                ),
                (10.9, json!({"block_m": 128, "block_n": 256, "persistent": 0, "order": "rows"})),
                (
                    15.8,
                    json!({"block_m": 128, "block_n": 256, "persistent": 0, "order": "rows", "vector_a": 8,
                        "vector_b": 8, "ahead": 0, "copies": "registers", "in_flight": 0, "producer": 0}),
                ),
            ],
        ),
        (
            "dense:m=4096,n=4096,k=4096,tf32=1",
            "gpu-matmul-wgmma",
            &of_tf32,
            vec![
                (338.1, json!({"block_m": 128, "block_n": 256, "order": "groups_2"})),
                (
                    416.1,
                    json!({"block_m": 128, "block_n": 128, "groups_m": 1, "groups_n": 2, "ahead": 5,
                        "order": "groups_of_columns"}),
                ),
                (
                    609.2,
                    json!({"block_m": 128, "block_n": 256, "vector_a": 4, "vector_b": 2, "ahead": 2,
                        "copies": "registers", "producer": 0, "persistent": 0, "cluster": 1,
                        "order": "groups_of_columns_4"}),
                ),
                (
                    745.1,
                    json!({"block_m": 64, "block_n": 64, "groups_m": 1, "ahead": 6, "persistent": 0,
                        "order": "groups_2"}),
                ),
            ],
        ),
        (
            "matmul:m=4096,n=4096,k=4096",
            "gpu-matmul-wgmma",
            &in_parts,
            vec![
                (1356.3, json!({})),
                (1429.3, json!({"vector_a": 1})),
                (1507.6, json!({"split_k": 4, "order": "groups_2"})),
                (2611.0, json!({"block_n": 32, "order": "groups_2"})),
            ],
        ),
        (
            "matmul:m=4096,n=4096,k=4096,exact=1",
            "gpu-matmul",
            &threads,
            vec![
                (2780.8, json!({"block_n": 256, "block_k": 16, "unroll_k": 16})),
                (2946.8, json!({"order": "groups", "warp_n": 2})),
                (3299.3, json!({"order": "groups", "ahead": 1})),
                (3549.3, json!({"block_n": 256, "thread_n": 16, "warp_n": 8, "copies": "async"})),
                (4078.9, json!({"order": "groups", "ahead": 3, "copies": "async"})),
            ],
        ),
    ] {
        let task = Task::new(setting(workload, &named("sm_90a")), Some(template)).unwrap();
        let estimate = task.template.estimate.unwrap();
        let mut last = 0.0;
        for (us, own) in measured {
            let mut config = common.clone();
            config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            let config = task.space.config_from_json(&config).unwrap_or_else(|e| panic!("{workload}, {us} µs: {e}"));
            let cycles = estimate(&task.setting, &task.space, &config);
            assert!(cycles > last, "{workload}: {us} µs, but {cycles} cycles after {last}");
            last = cycles;
        }
    }
}

/// Advice leaves a small part of what threads may do, of which all that was fastest on an H100 is a part.
#[test]
fn advice_leaves_what_an_h100_measured_fastest() {
    let fast = |rest: serde_json::Value| {
        let mut config = json!({"thread_m": 8, "thread_n": 8, "vector_a": 4, "vector_b": 4, "split_k": 1,
            "order": "columns", "ahead": 2, "warp_n": 4, "copies": "registers"});
        config.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        config
    };
    for (text, most, fastest) in [
        (
            "matmul:m=4096,n=4096,k=4096",
            0.02,
            vec![
                json!({"block_m": 128, "block_n": 256, "block_k": 16, "unroll_k": 16}),
                json!({"block_m": 128, "block_n": 128, "block_k": 8, "unroll_k": 8, "order": "groups", "warp_n": 2}),
                json!({"block_m": 128, "block_n": 128, "block_k": 8, "thread_n": 16, "unroll_k": 8, "warp_n": 8}),
            ],
        ),
        (
            "matmul:m=1024,n=1024,k=1024",
            0.02,
            vec![json!({"block_m": 128, "block_n": 128, "block_k": 8, "unroll_k": 8, "order": "groups", "warp_n": 2})],
        ),
        ("resnet18.C1", 0.25, vec![]),
        ("resnet18.C9", 0.05, vec![]),
        ("resnet18.C12", 0.05, vec![]),
    ] {
        let text = format!("{},exact=1", Workload::parse(text).unwrap());
        let task = Task::new(setting(&text, &named("sm_90a")), None).unwrap();
        let advised = task.space.advised().expect("there is advice");
        let share = advised.size() as f64 / task.space.size() as f64;
        println!("{text}: {} of {} configurations, {:.2} %", advised.size(), task.space.size(), 100.0 * share);
        assert!(share < most && advised.size() > 100, "{text}: {share}");
        assert_eq!(task.problem().space.size(), advised.size());
        for rest in fastest {
            let config = task.space.config_from_json(&fast(rest)).unwrap();
            let why = advised.violated(&config);
            assert!(why.is_none(), "{text}: {why:?} {}", task.space.config_to_json(&config));
        }
        // What was recorded before is as legal as it was.
        let narrow = fast(json!({"block_m": 32, "block_n": 32, "block_k": 8, "thread_m": 4, "thread_n": 4,
            "vector_a": 1, "vector_b": 1, "unroll_k": 1, "ahead": 0, "order": "rows"}));
        let narrow = task.space.config_from_json(&narrow);
        assert!(text.starts_with("conv") || narrow.is_ok_and(|config| !advised.contains(&config)), "{text}");
    }
    let on_opencl = Task::new(setting("matmul:m=64,n=64,k=64", &named("opencl")), None).unwrap();
    assert!(on_opencl.space.advised().is_none());
}

/// Share of the papers' spaces that is valid within 48 KiB of shared memory and 1024 threads, in tenths of a
/// per cent.
#[test]
fn limits_of_a_device_leave_so_much_of_the_papers_spaces() {
    for (text, template, size, valid) in [
        ("resnet18.C2", "conv-4-4-4-2-2-2", 90_316_800, 633),
        ("resnet18.C6", "conv-4-4-4-2-2-2", 36_864_000, 658),
        ("resnet18.C9", "conv-4-4-4-2-2-2", 9_123_840, 610),
        ("resnet18.C12", "conv-4-4-4-2-2-2", 844_800, 521),
        ("matmul-1024", "gemm-4-2-4", 899_756, 440),
        ("matmul-1024", "matmul-4-3-4", 5_398_536, 241),
    ] {
        let task = Task::new(setting(text, &named("sm_61")), Some(template)).unwrap();
        let all: u128 = (0..task.space.n_parameters()).map(|at| u128::from(task.space.n_values(at))).product();
        assert_eq!(all, size, "{text} {template}");
        // The third axis allows even fewer threads.
        let space = task.space.without(&["threads_z"]).unwrap();
        let share = space.size() as f64 / all as f64 * 1000.0;
        assert_eq!(share.round() as i64, valid, "{text} {template}: {} of {all}", space.size());
        assert!(task.space.size() <= space.size());
        assert_eq!(task.beyond_limits().unwrap().space.size(), size);
    }
}

#[test]
fn templates_serve_gpus_or_cpus() {
    for text in ["matmul:m=64,n=64,k=64", "conv2d:c=8,h=9,w=9,k=8,r=3,s=3"] {
        let names = |target: &str| serving(&setting(text, &named(target))).map(|t| t.name).collect::<Vec<_>>();
        let (cpu, gpu) = (names("x86-64-v4"), names("sm_90a"));
        assert!(cpu.iter().all(|name| !name.starts_with("gpu-")), "{cpu:?}");
        assert!(gpu[0].starts_with("gpu-"), "{gpu:?}");
        // A paper's space has the same name on CPUs and GPUs.
        assert!(cpu.iter().filter(|name| gpu.contains(name)).all(|name| name.contains("-4-")), "{cpu:?} {gpu:?}");
    }
}
