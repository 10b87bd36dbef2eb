//! Random configurations of every template that serves a GPU.
//!
//! `TILEWRIGHT_CONFIGS=300` sets their number on each GPU; by default, one of each template for each shape.
#![allow(dead_code)]

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::op::Workload;
use tilewright_ir::{GpuProgram, Target, lower_gpu};
use tilewright_search::Config;
use tilewright_tune::{TEMPLATES, Task, TemplateSetting};

/// Small shapes that no tile divides, and some that tiles divide.
pub const SHAPES: [&str; 15] = [
    "matmul:m=17,n=33,k=29",
    "matmul:m=32,n=64,k=16",
    "matmul:m=40,n=24,k=33,tf32=1",
    "matmul:m=13,n=20,k=41,const=b,epilogue=bias+add+relu",
    "matmul:m=40,n=24,k=33,dtype=bf16",
    "dense:m=32,n=64,k=48,dtype=bf16,epilogue=bias",
    "batch_matmul:b=2,m=24,n=16,k=40,ta=1,tb=1,dtype=f16",
    "batch_matmul:b=2,m=11,n=19,k=9,tb=1,epilogue=add",
    "conv2d:c=5,h=7,w=9,k=7,r=3,s=3,pad=1,epilogue=bias+gelu",
    "conv2d:n=2,c=4,h=8,w=8,k=8,r=1,s=1,stride=2",
    "conv2d:c=8,h=9,w=11,k=32,r=3,s=3,pad=1,tf32=1,const=w,epilogue=bias+relu",
    "conv2d:c=44,h=7,w=9,k=64,r=2,s=3,groups=2,stride=2",
    "conv2d:c=8,h=9,w=11,k=32,r=3,s=3,pad=1,dtype=f16,epilogue=bias+relu",
    "depthwise_conv2d:c=5,h=7,w=8,r=3,s=3,pad=1",
    "nest:buffer x:f32[7,19] global input buffer y:f32[7,19] global output loops i,j
     run {for i in 7 {for j in 19 {y[i,j] = tanh(x[i,j])}}}",
];

/// Large shapes, for which only the validity of the code is tested.
pub const LARGE: [&str; 3] = ["matmul-1024", "resnet18.C2", "resnet18.C12"];

/// Minimum number of configurations on each GPU, if set.
pub fn n_configs() -> Option<usize> {
    std::env::var("TILEWRIGHT_CONFIGS").ok().map(|n| n.parse().expect("a number of configurations"))
}

/// Whether a template's space has a model of registers; the spaces of publications have none, and may need
/// many.
pub fn models_registers(task: &Task) -> bool {
    task.space.constraints().iter().any(|c| c.name.starts_with("registers"))
}

/// Checks kernels of random configurations for a GPU, each with its workload's text and its task.
pub fn each(texts: &[&str], gpu: &str, mut check: impl FnMut(&str, &Task, &Config, &GpuProgram) -> Result<(), String>) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(31);
    let (mut n, mut failures) = (0, Vec::new());
    let mut of_templates: BTreeMap<&str, usize> = BTreeMap::new();
    let tasks = texts.iter().flat_map(|text| {
        let workload = Workload::parse(text).unwrap();
        let setting = TemplateSetting { workload, target: Target::named(gpu).unwrap(), n_threads: 1 };
        let serving = TEMPLATES.iter().filter(|t| (t.serves)(&setting));
        serving.map(|t| (*text, Task::new(setting.clone(), Some(t.name)).unwrap())).collect::<Vec<_>>()
    });
    let tasks: Vec<(&str, Task)> = tasks.collect();
    let n_of_each = n_configs().map_or(1, |n| n.div_ceil(tasks.len()));
    for (text, task) in &tasks {
        for _ in 0..n_of_each {
            let config = task.space.sample(&mut rng);
            n += 1;
            *of_templates.entry(task.template.name).or_default() += 1;
            let program = task.program(&config).map_err(|(at, why)| format!("step {}: {why}", at + 1));
            let kernels = program.and_then(|p| lower_gpu(&p).map_err(|why| format!("{why}\n{p}")));
            if let Err(why) = kernels.and_then(|kernels| check(text, task, &config, &kernels)) {
                let json = task.space.config_to_json(&config);
                failures.push(format!("{text} {} {gpu} {json}\n{why}", task.template.name));
            }
        }
    }
    let first = failures.first().map_or("", String::as_str);
    assert!(failures.is_empty(), "{} of {n} configurations fail; the first:\n{first}", failures.len());
    let of_templates: Vec<String> = of_templates.iter().map(|(name, n)| format!("{name} {n}")).collect();
    println!("{n} configurations for {gpu}: {}", of_templates.join(", "));
}
