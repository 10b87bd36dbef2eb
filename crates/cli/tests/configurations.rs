//! Random configurations of every template: each compiles and gives the correct result.
//!
//! `TILEWRIGHT_CONFIGS=300` makes a long run: that many configurations of each template and matmul, and three
//! times as many convolutions; a few by default.

mod common;

use std::time::Duration;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_codegen::{Emit, emit};
use tilewright_device::device::RoundLength;
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Device, host};
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::apply_all;
use tilewright_ir::{Target, lower};
use tilewright_search::{Config, Outcome};
use tilewright_tune::{TEMPLATES, Task, TaskError, Template, TemplateSetting};

/// Shapes that no tile divides, and the number of threads.
const CASES: [(&str, usize); 45] = [
    ("matmul:m=1,n=1,k=1", 1),
    ("matmul:m=1,n=1,k=257", 1),
    ("matmul:m=257,n=1,k=3", 1),
    ("matmul:m=3,n=257,k=1,dtype=f64", 1),
    ("matmul:m=17,n=333,k=129", 2),
    ("matmul:m=1,n=512,k=640", 1),
    ("matmul:m=64,n=3,k=64,const=a", 1),
    ("matmul:m=31,n=33,k=35", 2),
    ("matmul:m=100,n=100,k=100,const=b", 1),
    ("matmul:m=127,n=129,k=131,dtype=f64,const=b", 2),
    ("matmul:m=96,n=48,k=1009", 1),
    ("matmul:m=5,n=1000,k=7,const=b", 2),
    ("matmul:m=29,n=40,k=300,epilogue=bias+add", 2),
    ("matmul:m=13,n=39,k=17,dtype=f64,epilogue=relu", 1),
    ("batch_matmul:b=3,m=31,n=37,k=11", 2),
    ("batch_matmul:b=11,m=39,n=18,k=9,ta=1,epilogue=clip(-1;2)", 2),
    ("batch_matmul:b=2,m=17,n=40,k=33,tb=1,epilogue=sigmoid", 1),
    ("batch_matmul:b=1,m=9,n=1,k=40,ta=1,tb=1,const=b,epilogue=tanh", 1),
    ("dense:m=1,n=33,k=40,epilogue=bias", 1),
    ("dense:m=37,n=35,k=29,const=w,epilogue=bias+gelu", 2),
    ("dense:m=40,n=23,k=39,dtype=f64", 1),
    ("matmul:m=33,n=47,k=129,dtype=bf16", 2),
    ("batch_matmul:b=2,m=17,n=40,k=33,tb=1,dtype=f16,epilogue=bias+relu", 1),
    ("dense:m=37,n=35,k=29,const=w,dtype=bf16,epilogue=bias+gelu", 2),
    ("conv2d:c=19,h=9,w=11,k=34,r=3,s=3,pad=1,dtype=f16,const=w,epilogue=bias", 2),
    ("matmul:m=33,n=47,k=129,bf16=1", 2),
    ("dense:m=3,n=70,k=67,const=w,bf16=1,epilogue=bias+gelu", 1),
    ("batch_matmul:b=2,m=17,n=40,k=33,tb=1,bf16=1", 1),
    ("conv2d:c=19,h=9,w=11,k=32,r=3,s=3,pad=1,bf16=1,const=w,out=c16,epilogue=bias", 2),
    ("conv2d:c=32,h=9,w=11,k=34,r=1,s=1,bf16=1,const=w,in=c16", 1),
    ("matmul:m=33,n=47,k=130,dtype=u8i8", 2),
    ("matmul:m=3,n=70,k=67,dtype=i8i8,const=b", 1),
    ("matmul:m=21,n=1,k=192,dtype=u8i8", 2),
    ("matmul:m=7,n=1,k=64,dtype=i8i8,const=a,epilogue=dequant+bias", 1),
    ("dense:m=37,n=35,k=29,const=w,dtype=u8i8", 1),
    ("dense:m=37,n=70,k=40,const=w,dtype=u8i8,epilogue=init+dequant+quant_u8", 1),
    ("matmul:m=19,n=33,k=64,dtype=i8i8,epilogue=dequant+relu+quant_i8", 2),
    ("matmul:m=5,n=47,k=63,dtype=u8i8,epilogue=dequant+bias+gelu", 1),
    ("dense:m=37,n=35,k=29,const=w,dtype=u8i7", 1),
    ("batch_matmul:b=2,m=17,n=40,k=33,ta=1,tb=1,dtype=i8i8", 2),
    // Shapes whose sum threads may share.
    ("matmul:m=8,n=9,k=1031,const=b,epilogue=relu", 2),
    ("dense:m=1,n=10,k=6563", 2),
    ("batch_matmul:b=2,m=6,n=5,k=1123,ta=1,dtype=f64", 2),
    ("conv2d:c=67,h=5,w=5,k=19,r=5,s=5,pad=1,layout=blocked,epilogue=bias+add", 2),
    ("depthwise_conv2d:c=3,h=80,w=150,r=79,s=149", 2),
];

/// Number of random configurations of each template for one convolution.
const CONFIGS_OF_CONVOLUTION: usize = 3;

/// Number of configurations to test.
fn n_configs() -> usize {
    std::env::var("TILEWRIGHT_CONFIGS").map_or(3, |n| n.parse().expect("a number of configurations"))
}

/// Targets: this machine, and an older one if this machine runs its code.
fn targets() -> Vec<Target> {
    let mut targets = vec![host::target()];
    #[cfg(target_arch = "x86_64")]
    {
        targets.extend(Target::named("x86-64"));
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            targets.extend(Target::named("x86-64-v3"));
        }
        // AVX-512 without dot products of bytes.
        if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
            targets.extend(Target::named("x86-64-v4"));
        }
    }
    targets
}

fn templates(setting: &TemplateSetting) -> impl Iterator<Item = &'static Template> {
    TEMPLATES.iter().filter(|t| (t.serves)(setting))
}

/// Tally of the configurations measured so far.
#[derive(Default)]
struct Tally {
    /// Command of the runner on which they run; `None` for this machine.
    runner: Option<String>,
    n_measured: usize,
    failures: Vec<String>,
}

impl Tally {
    /// Measures `n_configs` random configurations of each task, all for the same setting.
    fn measure(&mut self, setting: &TemplateSetting, tasks: &[Task], n_configs: usize, rng: &mut Xoshiro256PlusPlus) {
        let mut configs: Vec<(&Task, Config)> = Vec::new();
        for task in tasks {
            let mut sampled: Vec<Config> = (0..n_configs).map(|_| task.space.sample(rng)).collect();
            sampled.sort();
            sampled.dedup();
            configs.extend(sampled.into_iter().map(|config| (task, config)));
        }
        let TemplateSetting { workload, target, n_threads } = setting;
        let mut options = common::device_options(*n_threads);
        options.min_time = Duration::from_micros(100);
        // Slow builds on a busy machine are not failures.
        options.build_timeout = Duration::from_secs(60);
        options.run_timeout = Duration::from_secs(60);
        options.to_the_end = true;
        options.runner.clone_from(&self.runner);
        let is_here = self.runner.is_none();
        let mut device = Device::new(workload.clone(), target, options).unwrap();
        let mut note = |at: usize, outcome: Outcome| {
            self.n_measured += 1;
            if let Outcome::Failed { class, message } = outcome {
                let (task, config) = &configs[at];
                let config = task.space.config_to_json(config);
                self.failures.push(format!(
                    "{class}: {message}\nrepro: tilewright show '{workload}' --threads {n_threads} --target {} \
                     --template {} --config '{config}' --emit ir",
                    target.cpu, task.template.name
                ));
            }
        };
        // Measured as in a search, which may run other code than a race.
        let sources: Vec<ProgramSource> =
            configs.iter().map(|(task, config)| ProgramSource::Steps(task.steps_text(config))).collect();
        let measured = device.measure_sources(&sources).unwrap();
        measured.into_iter().enumerate().for_each(|(at, measured)| note(at, measured.outcome));
        if !is_here {
            return;
        }
        let raced =
            device.race(&sources, 1, 1, RoundLength { time: Duration::from_micros(100), min_samples: 1 }).unwrap();
        raced.into_iter().enumerate().for_each(|(at, racer)| note(at, device.end_race(racer)));
    }

    /// Measures at least [`n_configs`] configurations of products of a kind, and as many of convolutions, on
    /// alternating targets.
    fn measure_kind(&mut self, targets: &[Target], is_of_kind: fn(&Workload) -> bool) {
        let rng = &mut Xoshiro256PlusPlus::seed_from_u64(41);
        // The last two cases are convolutions.
        let products = CASES[..CASES.len() - 2].iter().map(|(text, n)| (Workload::parse(text).unwrap(), *n));
        let products: Vec<_> = products.filter(|(workload, _)| is_of_kind(workload)).collect();
        for is_product in [true, false] {
            let (before, mut at) = (self.n_measured, 0);
            while self.n_measured < before + n_configs() {
                let (product, n_threads) = products[at % products.len()].clone();
                let workload = if is_product { product } else { convolution(rng, is_of_kind) };
                let setting = TemplateSetting { workload, target: targets[at % targets.len()].clone(), n_threads };
                let tasks = all_tasks(&setting, self);
                self.measure(&setting, &tasks, CONFIGS_OF_CONVOLUTION, rng);
                at += 1;
            }
        }
    }

    /// # Panics
    /// If any configuration failed.
    fn finish(self) {
        let Tally { n_measured, failures, .. } = self;
        assert!(failures.is_empty(), "{} of {n_measured} failed\n{}", failures.len(), failures.join("\n"));
        println!("{n_measured} measurements of configurations gave right answers");
    }
}

/// Runs blocks and threads one after the other: a CPU computes the same as kernels for GPUs.
///
/// A long run also tests products of 1024³.
#[test]
fn schedules_for_gpus_give_right_answers_here() {
    let is_long = std::env::var("TILEWRIGHT_CONFIGS").is_ok();
    let product = if is_long { "matmul-1024" } else { "matmul:m=128,n=160,k=96" };
    let texts = [product, "conv2d:c=17,h=13,w=11,k=40,r=3,s=3,pad=1,epilogue=bias+relu"];
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(41);
    let mut tally = Tally::default();
    for text in texts {
        let workload = Workload::parse(text).unwrap();
        let gpu = TemplateSetting { workload: workload.clone(), target: Target::named("sm_80").unwrap(), n_threads: 1 };
        let tasks: Vec<Task> = templates(&gpu).map(|t| Task::new(gpu.clone(), Some(t.name)).unwrap()).collect();
        assert!(tasks.len() > 2, "{text}");
        let here = TemplateSetting { workload, target: host::target(), n_threads: 1 };
        tally.measure(&here, &tasks, n_configs(), &mut rng);
    }
    tally.finish();
}

#[test]
fn random_configurations_give_right_answers() {
    let n_cpus = host::allowed_cpus().len();
    let mut tally = Tally::default();
    for (seed, (text, n_threads)) in CASES.into_iter().enumerate() {
        let n_threads = n_threads.min(n_cpus);
        let workload = Workload::parse(text).unwrap();
        for target in targets() {
            let setting = TemplateSetting { workload: workload.clone(), target: target.clone(), n_threads };
            let task = |template: &Template| Task::new(setting.clone(), Some(template.name)).unwrap();
            let tasks: Vec<Task> = templates(&setting).map(task).collect();
            tally.measure(&setting, &tasks, n_configs(), &mut Xoshiro256PlusPlus::seed_from_u64(seed as u64));
        }
    }
    tally.finish();
}

/// Tasks of all templates for a setting, as far as they exist.
fn all_tasks(setting: &TemplateSetting, tally: &mut Tally) -> Vec<Task> {
    let mut tasks = Vec::new();
    for (at, template) in templates(setting).enumerate() {
        match Task::new(setting.clone(), Some(template.name)) {
            Ok(task) => tasks.push(task),
            // Templates other than the default may support only some shapes.
            Err(TaskError::Space(_) | TaskError::TooLarge { .. }) if at > 0 => {}
            Err(e) => tally.failures.push(format!("{} {}: {e}", setting.workload, template.name)),
        }
    }
    tasks
}

/// Cross-compiled kernels run on another machine, which an emulator replaces: at least this many
/// configurations of products, and as many of convolutions.
#[test]
fn kernels_for_arm_give_right_answers_under_an_emulator() {
    let folder = tempfile::tempdir().unwrap();
    if common::make_arm_runner(folder.path()).is_none() {
        return;
    }
    let runner = format!("qemu-aarch64 -cpu max {}", folder.path().join("tw-run").display());
    let mut tally = Tally { runner: Some(runner), ..Tally::default() };
    let names = ["cortex-a53", "cortex-a72", "cortex-a76", "neoverse-n1", "neoverse-v1", "aarch64"];
    tally.measure_kind(&names.map(|name| Target::named(name).unwrap()), |_| true);
    tally.finish();
}

/// CPUs without dot products of bytes multiply them as 16-bit integers: at least this many configurations of
/// integer products, and as many of convolutions.
#[test]
fn integers_without_dot_products_give_right_answers() {
    let mut targets = targets();
    targets.retain(|target| target.dot4_lanes([false, true]) == 0);
    if targets.is_empty() {
        println!("code for older machines does not run here");
        return;
    }
    let mut tally = Tally::default();
    tally.measure_kind(&targets, Workload::has_integer_factors);
    tally.finish();
}

/// Rows of a transposed operand are loaded as vectors and transposed in registers, not gathered lane by lane.
#[test]
fn transposed_operands_are_packed_by_vectors() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    for text in ["dense:m=16,n=192,k=64", "batch_matmul:b=2,m=64,n=128,k=64,tb=1"] {
        let workload = Workload::parse(text).unwrap();
        let target = Target::named("x86-64-v4").unwrap();
        let setting = TemplateSetting { workload: workload.clone(), target: target.clone(), n_threads: 1 };
        let task = Task::new(setting, Some("matmul-blocked")).unwrap();
        for _ in 0..6 {
            let config = task.space.sample(&mut rng);
            let scheduled = apply_all(&workload.program(), &task.steps(&config)).unwrap();
            let asm = emit(&lower::lower(&scheduled), &target, Emit::Asm).unwrap();
            let asm = String::from_utf8(asm).unwrap();
            let lone = asm.lines().filter(|l| ["vinsertps", "vgather"].iter().any(|i| l.trim_start().starts_with(i)));
            assert_eq!(lone.count(), 0, "{text} {}", task.space.config_to_json(&config));
        }
    }
}

/// Random convolution of a kind, with most sizes not divided by any tile.
fn convolution(rng: &mut Xoshiro256PlusPlus, is_of_kind: fn(&Workload) -> bool) -> Workload {
    loop {
        let size = |rng: &mut Xoshiro256PlusPlus| {
            // Small sizes, ordinary ones, and those next to the sizes of vectors and tiles.
            let most = *[4, 20, 40].choose(rng).expect("there are some");
            rng.random_range(1..=most)
        };
        let operator =
            *["conv2d", "conv2d", "conv2d", "depthwise_conv2d", "conv2d_transpose"].choose(rng).expect("some");
        let mut text = format!("{operator}:n={}", *[1, 1, 1, 2, 3].choose(rng).expect("some"));
        let mut set = |key: &str, value: i64| text += &format!(",{key}={value}");
        let groups = if operator == "conv2d" && rng.random_bool(0.2) { rng.random_range(2..=4) } else { 1 };
        // Channels in blocks, if neighbouring operators agreed on that.
        let block = *[1, 1, 1, 4, 8, 16].choose(rng).expect("some");
        let of_groups = |n: i64| (n + groups * block - 1) / (groups * block) * (groups * block);
        set("c", of_groups(size(rng)));
        match operator {
            "conv2d" => {
                set("k", of_groups(size(rng)));
                set("groups", groups);
                set("interleave", i64::from(groups > 1 && rng.random_bool(0.5)));
            }
            "depthwise_conv2d" => set("multiplier", *[1, 1, 2, 3].choose(rng).expect("some")),
            _ => set("k", of_groups(size(rng))),
        }
        let (h, w) = (size(rng), size(rng));
        set("h", h);
        set("w", w);
        // The kinds in networks, and then any other one.
        if rng.random_bool(0.5) {
            let filter = *[1, 3, 3, 5].choose(rng).expect("some");
            for (key, value) in [("r", filter), ("s", filter), ("stride", rng.random_range(1..=2)), ("pad", filter / 2)]
            {
                set(key, value);
            }
        } else {
            for key in ["r", "s"] {
                set(key, rng.random_range(1..=5));
            }
            // Larger than the filter for transposed convolutions, where most results then meet no tap.
            let strides = if operator == "conv2d_transpose" { [1, 2, 3, 9] } else { [1, 1, 2, 3] };
            for (key, values) in [
                ("stride_h", strides),
                ("stride_w", strides),
                ("dilation_h", [1, 1, 2, 3]),
                ("dilation_w", [1, 1, 2, 3]),
            ] {
                set(key, *values.choose(rng).expect("some"));
            }
            for key in ["pad_top", "pad_left", "pad_bottom", "pad_right"] {
                set(key, *[0, 0, 1, 2, 3].choose(rng).expect("some"));
            }
        }
        let is_integer = operator != "conv2d_transpose" && rng.random_bool(0.3);
        let sides = ["in", "out"].map(|side| format!("{side}=c{block}"));
        let layouts: &[(&str, f64)] =
            if block > 1 { &[(&sides[0], 0.7), (&sides[1], 0.7)] } else { &[("layout=blocked", 0.4)] };
        for (attribute, probability) in
            [("dtype=f64", 0.2), ("dtype=bf16", 0.1), ("const=w", 0.5)].iter().chain(layouts)
        {
            if is_integer && attribute.starts_with("dtype") {
                continue;
            }
            if rng.random_bool(*probability) {
                text += &format!(",{attribute}");
            }
        }
        let plain = &["", "", "bias", "relu", "bias+relu", "bias+add+relu", "add+clip(-1;2)", "gelu"][..];
        let of_integers = &["", "init", "init+dequant+quant_u8", "dequant+add+relu+quant_i8", "init+dequant+bias"][..];
        let epilogues = if is_integer { of_integers } else { plain };
        if is_integer {
            let types = [",dtype=u8i8", ",dtype=i8i8", ",dtype=u8i7"];
            text += types.choose(rng).expect("some");
            // Refused and omitted if nothing is padded. Padding with zeros may be skipped.
            let padded = format!("{text},x_zero=1");
            text = if rng.random_bool(0.5) && Workload::parse(&padded).is_ok() { padded } else { text };
        }
        match *epilogues.choose(rng).expect("some") {
            "" => {}
            epilogue => text += &format!(",epilogue={epilogue}"),
        }
        // If the filter does not fit, or the output is empty, another convolution is drawn.
        if let Ok(workload) = Workload::parse(&text)
            && is_of_kind(&workload)
        {
            return workload;
        }
    }
}

#[test]
fn templates_of_convolutions_give_right_answers_on_any_shape() {
    let n_cpus = host::allowed_cpus().len();
    let mut tally = Tally::default();
    for seed in 0..3 * n_configs() as u64 {
        let rng = &mut Xoshiro256PlusPlus::seed_from_u64(seed);
        let workload = convolution(rng, |_| true);
        let n_threads = rng.random_range(1..=2).min(n_cpus);
        let target = targets().choose(rng).expect("there is this machine").clone();
        let setting = TemplateSetting { workload, target, n_threads };
        let tasks = all_tasks(&setting, &mut tally);
        tally.measure(&setting, &tasks, CONFIGS_OF_CONVOLUTION, rng);
    }
    tally.finish();
}
