//! Golden hashes of generated code: of the schedule, the lowered program and the machine code of
//! configurations of every template and operator, in `tests/generated.txt`.
//!
//! A commit that does not intend to change generated code leaves this file unchanged. `BLESS=1` rewrites it
//! with newly drawn configurations: read the difference, and say in the commit why code changes. Each line
//! has its configuration, so that a space which grows keeps its lines; objects are compared if LLVM is the
//! version that they were made with.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::Value as Json;
use tilewright_codegen::{Emit, emit, llvm_version, quick_code};
use tilewright_ir::op::{OPS, Workload};
use tilewright_ir::{Target, lower, lower_gpu};
use tilewright_search::Config;
use tilewright_tune::{TEMPLATES, Task, Template, TemplateSetting};

/// Targets of the code, with the number of threads; the kernels of a GPU are hashed before any code is
/// printed.
const MACHINES: [(&str, usize); 4] = [("x86-64-v4", 1), ("x86-64-v3", 2), ("sm_80", 1), (NEWEST, 1)];

/// GPU for which only the templates are tested that the one before it does not have.
const NEWEST: &str = "sm_90a";

/// Workloads of every operator whose code differs: odd sizes, element types, epilogues, kept operands,
/// layouts.
const WORKLOADS: [&str; 36] = [
    "matmul:m=64,n=96,k=128",
    "matmul:m=17,n=333,k=129",
    "matmul:m=1,n=512,k=640",
    "matmul:m=127,n=129,k=131,dtype=f64,const=b",
    "matmul:m=29,n=40,k=300,epilogue=bias+add",
    "matmul:m=1024,n=1024,k=1024,const=b",
    "matmul:m=70,n=96,k=136,tf32=1",
    "matmul:m=72,n=160,k=144,dtype=bf16",
    "matmul:m=72,n=160,k=146,dtype=u8i8",
    "dense:m=5,n=70,k=64,dtype=i8i8,const=w",
    "batch_matmul:b=3,m=31,n=37,k=11",
    "batch_matmul:b=11,m=39,n=18,k=9,ta=1,epilogue=clip(-1;2)",
    "batch_matmul:b=2,m=17,n=40,k=33,tb=1,epilogue=sigmoid",
    "batch_matmul:b=1,m=9,n=1,k=40,ta=1,tb=1,const=b,epilogue=tanh",
    "dense:m=1,n=33,k=40,epilogue=bias",
    "dense:m=37,n=35,k=29,const=w,epilogue=bias+gelu",
    "dense:m=40,n=23,k=39,dtype=f64",
    "conv2d:c=64,h=56,w=56,k=64,r=3,s=3,pad=1,const=w",
    "conv2d:c=64,h=56,w=56,k=128,r=3,s=3,stride=2,pad=1,const=w,layout=blocked",
    "conv2d:c=512,h=7,w=7,k=512,r=3,s=3,pad=1,layout=blocked,const=w",
    "conv2d:c=3,h=31,w=29,k=20,r=7,s=5,stride=2,pad=3,epilogue=bias+relu",
    "conv2d:n=2,c=17,h=13,w=14,k=19,r=3,s=3,pad=1,dilation=2,const=w",
    "conv2d:c=24,h=20,w=20,k=36,r=3,s=3,pad=1,groups=4,const=w,epilogue=bias+add+relu",
    "conv2d:c=20,h=9,w=9,k=10,r=1,s=1,dtype=f64",
    "depthwise_conv2d:c=32,h=28,w=30,r=3,s=3,pad=1,const=w",
    "depthwise_conv2d:c=9,h=17,w=19,r=5,s=3,stride=2,multiplier=2,epilogue=relu",
    "depthwise_conv2d:n=2,c=40,h=14,w=14,r=3,s=3,pad=1,layout=blocked,const=w",
    "conv2d_transpose:c=64,h=8,w=8,k=32,r=4,s=4,stride=2,pad=1,const=w",
    "conv2d_transpose:n=2,c=7,h=9,w=11,k=13,r=3,s=3,pad=1",
    "conv2d_transpose:c=20,h=6,w=5,k=18,r=3,s=2,stride_h=2,stride_w=3,layout=blocked,const=w",
    "conv2d:c=24,h=14,w=14,k=36,r=1,s=1,groups=3,interleave=1,const=w,epilogue=relu",
    "heads_matmul:b=3,m=31,n=37,k=11,tb=1,ha=1,hb=1,a_after=6,b_before=3,b_after=3,epilogue=linear(0.25;0)",
    "heads_matmul:b=3,m=19,n=11,k=37,hb=1,hc=1,b_before=6",
    "packed_matmul:m=1,n=70,k=96,const=w+s,epilogue=bias",
    "packed_matmul:m=1,n=90,k=160,int8=1,const=w+s",
    "packed_matmul:m=17,n=90,k=64,block=16,zeros=1,int8=1,const=w+s+z,epilogue=bias+relu",
];

/// Nests of other tests whose code differs.
const NESTS: [&str; 11] = [
    "add_relu",
    "softmax",
    "layer_norm",
    "max_pool",
    "global_pool",
    "transpose",
    "embedding",
    "gather_columns",
    "whole_numbers",
    "truths",
    "bytes",
];

/// Texts of all of them, without spaces, as words of a line.
fn workloads() -> Vec<String> {
    let nests = include_str!("../../../tests/nests.txt").lines().filter_map(|line| line.split_once(' '));
    let nests: Vec<&str> = nests.filter(|(name, _)| NESTS.contains(name)).map(|(_, text)| text).collect();
    assert_eq!(nests.len(), NESTS.len(), "every nest has its line");
    let word = |text: &str| match text.starts_with("nest:") {
        true => Workload::parse(text).unwrap().to_string().replace(' ', SPACE),
        false => text.to_owned(),
    };
    WORKLOADS.into_iter().chain(nests).map(word).collect()
}

/// Replacement for a space in a workload's text.
const SPACE: &str = "~";

/// Number of random configurations of each template, in addition to its first guess.
const N_RANDOM: usize = 2;

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/generated.txt")
}

/// FNV-1a hash, which is the same in every version of the toolchain.
fn hash(bytes: &[u8]) -> String {
    let mixed = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    format!("{mixed:016x}")
}

/// Tasks of a workload on a machine.
fn tasks(text: &str, (cpu, n_threads): (&str, usize)) -> Vec<Task> {
    let workload = Workload::parse(&text.replace(SPACE, " ")).unwrap();
    let setting = TemplateSetting { workload, target: Target::named(cpu).unwrap(), n_threads };
    let before = TemplateSetting { target: Target::named(MACHINES[2].0).unwrap(), ..setting.clone() };
    let is_there = |t: &&Template| cpu == NEWEST && (t.serves)(&before);
    let serving = TEMPLATES.iter().filter(|t| (t.serves)(&setting) && !is_there(t));
    // Templates other than the default may support only some shapes.
    serving.filter_map(|t| Task::new(setting.clone(), Some(t.name)).ok()).collect()
}

/// Names of the columns of a line, its configuration last.
const COLUMNS: &str = "target threads workload template steps lowered quick object config";

/// Line of the file.
struct Line<'a> {
    place: [&'a str; 4],
    steps: String,
    lowered: String,
    quick: String,
    object: String,
    config: String,
}

impl Line<'_> {
    /// Generates all forms of a configuration.
    fn of<'a>(place: [&'a str; 4], task: &Task, config: &Config, with_object: bool) -> Line<'a> {
        let json = task.space.config_to_json(config).to_string();
        let at = || format!("{place:?} {json}");
        let scheduled = task.program(config).unwrap_or_else(|(n, e)| panic!("{}: step {}: {e}", at(), n + 1));
        let target = &task.setting.target;
        if target.gpu.is_some() {
            let kernels = lower_gpu(&scheduled).unwrap_or_else(|e| panic!("{}: {e}", at()));
            let (steps, lowered) = (hash(task.steps_text(config).as_bytes()), hash(kernels.to_string().as_bytes()));
            return Line { place, steps, lowered, quick: "-".to_owned(), object: "-".to_owned(), config: json };
        }
        let lowered = lower::lower(&scheduled);
        // Some programs have no quick code.
        let quick = quick_code(&lowered, target).map_or("-".to_owned(), |code| hash(&code));
        let object =
            with_object.then(|| emit(&lowered, target, Emit::Object).unwrap_or_else(|e| panic!("{}: {e}", at())));
        Line {
            place,
            steps: hash(task.steps_text(config).as_bytes()),
            lowered: hash(lowered.to_string().as_bytes()),
            quick,
            object: object.map_or("-".to_owned(), |object| hash(&object)),
            config: json,
        }
    }

    fn print(&self) -> String {
        let Line { place, steps, lowered, quick, object, config } = self;
        format!("{} {steps} {lowered} {quick} {object} {config}", place.join(" "))
    }
}

/// Contents of the file with newly drawn configurations.
fn bless() -> String {
    let llvm = llvm_version().expect("only a build with LLVM makes the file anew");
    let mut out = format!("# LLVM {llvm}\n# {COLUMNS}\n");
    for text in &workloads() {
        for (cpu, n_threads) in MACHINES {
            for task in tasks(text, (cpu, n_threads)) {
                let rng = &mut Xoshiro256PlusPlus::seed_from_u64(n_threads as u64);
                let mut configs = Vec::from_iter(task.first_guess(0));
                configs.extend((0..N_RANDOM).map(|_| task.space.sample(rng)));
                for (at, config) in configs.iter().enumerate() {
                    let place = [cpu, &n_threads.to_string(), text, task.template.name];
                    writeln!(out, "{}", Line::of(place, &task, config, at == 0).print()).unwrap();
                }
            }
        }
    }
    out
}

#[test]
fn generated_code_is_as_it_was() {
    let bless_as = std::env::var("BLESS").unwrap_or_default();
    if bless_as == "1" {
        std::fs::write(file(), bless()).unwrap();
        return;
    }
    let before = std::fs::read_to_string(file()).expect("the file is there (BLESS=1 makes it)");
    let same_llvm = llvm_version().is_some_and(|v| before.lines().next() == Some(&format!("# LLVM {v}")));
    if !same_llvm {
        println!("skipped: objects, which another LLVM made");
    }
    let mut differences = Vec::new();
    let mut kept: Vec<String> = before.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect();
    let mut covered = BTreeSet::new();
    // Lines of one workload on a machine are consecutive.
    let mut known: ([&str; 3], Vec<Task>) = Default::default();
    for line in before.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.splitn(9, ' ');
        let mut next = || words.next().unwrap_or_else(|| panic!("a line has {COLUMNS}: {line}"));
        let place = [next(), next(), next(), next()];
        let [steps, lowered, quick, object] = [next(), next(), next(), next()].map(str::to_owned);
        let json = next();
        let [cpu, n_threads, text, template] = place;
        let machine =
            MACHINES.iter().find(|(c, n)| *c == cpu && n.to_string() == n_threads).expect("a machine of the list");
        if known.0 != [cpu, n_threads, text] {
            known = ([cpu, n_threads, text], tasks(text, *machine));
        }
        let task = known.1.iter().find(|t| t.template.name == template);
        let task = task.unwrap_or_else(|| panic!("{template} serves {text} no longer"));
        covered.insert([task.setting.workload.operator().name.to_owned(), template.to_owned()]);
        let config: Json = serde_json::from_str(json).unwrap();
        let config = task.space.config_from_json(&config).unwrap_or_else(|e| panic!("{line}: {e}"));
        let now = Line::of(place, task, &config, same_llvm && object != "-");
        let object = if same_llvm { object } else { "-".to_owned() };
        for (what, before, now) in [
            ("steps", steps, &now.steps),
            ("lowered program", lowered, &now.lowered),
            ("quick code", quick, &now.quick),
            ("object", object, &now.object),
        ] {
            if before != *now {
                differences.push(format!(
                    "the {what} of {text} --target {cpu} --threads {n_threads} --template {template} --config '{json}'"
                ));
                break;
            }
        }
        kept.push(Line { config: json.to_owned(), ..now }.print());
    }
    if bless_as == "kept" {
        assert!(same_llvm, "only a build with the LLVM of the file makes it anew");
        std::fs::write(file(), kept.join("\n") + "\n").unwrap();
        return;
    }
    assert!(
        differences.is_empty(),
        "{} changed (BLESS=kept if they are to, BLESS=1 for other configurations):\n{}",
        differences.len(),
        differences.join("\n")
    );
    for (what, at, wanted) in [
        ("operator", 0, OPS.iter().map(|op| op.name).collect::<Vec<_>>()),
        ("template", 1, TEMPLATES.iter().map(|t| t.name).collect()),
    ] {
        let missing: Vec<&str> = wanted.into_iter().filter(|name| !covered.iter().any(|c| c[at] == *name)).collect();
        assert!(missing.is_empty(), "no line of {what} {missing:?}");
    }
}
