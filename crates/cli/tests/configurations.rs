//! Random configurations of every template on shapes that nothing divides: each compiles and gives the right answer.
//!
//! `TILEWRIGHT_CONFIGS=300` sets how many of each template and shape; a few by default.

mod common;

use std::ops::ControlFlow;
use std::time::Duration;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_device::{Device, host};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_tune::{Config, Measure, Outcome, Setting, TEMPLATES, Task};

/// Shapes and the number of threads.
const CASES: [(&str, usize); 12] = [
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
];

/// This machine as it is, and as an older one where it runs that one's code.
fn targets() -> Vec<Target> {
    let mut targets = vec![host::target()];
    #[cfg(target_arch = "x86_64")]
    {
        targets.extend(Target::named("x86-64"));
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            targets.extend(Target::named("x86-64-v3"));
        }
    }
    targets
}

#[test]
fn random_configurations_give_right_answers() {
    let n_configs = std::env::var("TILEWRIGHT_CONFIGS").map_or(4, |n| n.parse().expect("a number of configurations"));
    let n_cpus = host::allowed_cpus().len();
    let mut failures = Vec::new();
    let mut n_measured = 0;
    for (seed, (text, n_threads)) in CASES.into_iter().enumerate() {
        let n_threads = n_threads.min(n_cpus);
        let workload = Workload::parse(text).unwrap();
        let templates = || TEMPLATES.iter().filter(|t| t.operators.contains(&workload.operator().name));
        for (target, template) in targets().into_iter().flat_map(|target| templates().map(move |t| (target.clone(), t)))
        {
            let setting = Setting { workload: workload.clone(), target, n_threads };
            let task = Task::new(setting, Some(template.name)).unwrap();
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed as u64);
            let mut configs: Vec<Config> = (0..n_configs).map(|_| task.space.sample(&mut rng)).collect();
            configs.sort();
            configs.dedup();
            let mut options = common::device_options(n_threads);
            options.min_time = Duration::from_micros(100);
            let steps = task.clone();
            let mut device =
                Device::new(workload.clone(), &task.setting.target, options, move |config| steps.steps(config))
                    .unwrap();
            let mut done = |at: usize, measured: tilewright_tune::Measured| {
                n_measured += 1;
                if let Outcome::Failed { class, message } = measured.outcome {
                    let config = task.space.config_to_json(&configs[at]);
                    failures.push(format!(
                        "{class}: {message}\nrepro: tilewright show {text} --threads {n_threads} --target {} \
                         --template {} --config '{config}' --emit ir",
                        task.setting.target.cpu, template.name
                    ));
                }
                ControlFlow::Continue(())
            };
            device.measure(&configs, None, &mut done).unwrap();
        }
    }
    assert!(failures.is_empty(), "{} of {n_measured} failed\n{}", failures.len(), failures.join("\n"));
    println!("{n_measured} configurations gave right answers");
}
