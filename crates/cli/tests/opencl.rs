//! Kernels on any available OpenCL device; the printed code in a simulator that detects errors.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_codegen::opencl_c;
use tilewright_device::opencl::{self, OpenClDevice};
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Device, DeviceOptions};
use tilewright_ir::gpu::{GpuProgram, lower_gpu};
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{DType, Stmt, Target};
use tilewright_search::{ErrorClass, Outcome};
use tilewright_tune::{TEMPLATES, Task, TemplateSetting};

/// First device; prints why a test is skipped if there is none.
fn device() -> Option<OpenClDevice> {
    let found = opencl::device(0);
    if let Err(why) = &found {
        eprintln!("skipped: {why}");
    }
    found.ok()
}

/// Measures sources of a workload on a device.
fn measured(device: &OpenClDevice, workload: &str, sources: &[ProgramSource], run_timeout: Duration) -> Vec<Outcome> {
    let options = DeviceOptions { run_timeout, n_workers: 2, ..common::device_options(1) };
    let workload = Workload::parse(workload).unwrap();
    let mut device = Device::new(workload, &device.target, options).unwrap();
    device.measure_sources(sources).unwrap().into_iter().map(|measured| measured.outcome).collect()
}

/// Product by tiles: copies in shared memory, sums in registers.
const TILES: &str = "split i 16 -> io ii shrink
split j 16 -> jo ji shrink
split k 8 -> ko ki shrink
reorder io jo ko ii ji ki
stage A at ko -> A.s 0 1 shared
stage B at ko -> B.s 0 1 shared
accumulate C at jo -> C.r
bind A.s.0 thread.y
bind A.s.1 thread.x
bind B.s.0 thread.y
bind B.s.1 thread.x
bind io block.y
bind jo block.x
bind ii thread.y
bind ji thread.x
";

/// Schedule that reads directly from main memory, with the elements of a thread as a vector.
const VECTORS: &str = "split i 8 -> io ii shrink
split j 4 -> jo ji shrink
reorder io jo ii k ji
bind io block.x
bind ii thread.y
bind jo thread.x
vectorize ji
";

/// Schedules of all kinds give the correct result, and are timed.
#[test]
fn schedules_are_right_on_a_device() {
    let Some(device) = device() else { return };
    let steps = |text: &str| ProgramSource::Steps(text.to_owned());
    let elementwise = "nest:buffer x:f32[37,96] global input buffer y:f32[37,96] global output loops i,j \
                       run{for i in 37{for j in 96{y[i,j]=0.5*x[i,j]*(1.0+erf(x[i,j]*0.7071067811865475))+tanh(exp(x[i,j]))}}}";
    let halves = "nest:buffer x:f16[32,64] global input buffer y:f16[32,64] global output loops i,j \
                  run{for i in 32{for j in 64{y[i,j]=x[i,j]*3.0+1.0}}}";
    // Loops of elementwise functions are one loop.
    let by_threads = "split i0 32 -> b t\nsplit t 4 -> to ti\nbind b block.x\nbind to thread.x\n";
    let mut cases = vec![
        ("matmul:m=64,n=64,k=32", vec![steps(TILES), steps(VECTORS), steps("")]),
        ("matmul:m=37,n=29,k=19", vec![steps(TILES), steps(VECTORS)]),
        (elementwise, vec![steps(by_threads), steps(&format!("{by_threads}vectorize ti\n"))]),
        (halves, vec![steps(by_threads), steps(&format!("{by_threads}vectorize ti\n"))]),
    ];
    if device.target.gpu.is_some_and(|gpu| gpu.has_f64) {
        cases.push(("matmul:m=37,n=29,k=19,dtype=f64", vec![steps(TILES), steps(VECTORS)]));
    }
    for (workload, sources) in cases {
        for (source, outcome) in sources.iter().zip(measured(&device, workload, &sources, Duration::from_secs(30))) {
            assert!(matches!(outcome, Outcome::Measured(_)), "{workload}, {source:?}: {outcome:?}");
        }
    }
}

#[test]
fn every_fault_gets_its_class_and_good_candidates_are_measured() {
    use ErrorClass::*;
    let Some(device) = device() else { return };
    if !device.is_cpu {
        return eprintln!("skipped: {} is no CPU, and what faults do to its driver nobody knows", device.name);
    }
    let matmul = "block.x i in 16 { thread.x j in 16 { for k in 16 { C[i, j] += A[i, k] * B[k, j] first k == 0 } } }";
    let program = |body: &str| {
        ProgramSource::Lowered(format!(
            "program \"faulty\"
buffer A: f32[16, 16] global input
buffer B: f32[16, 16] global input
buffer C: f32[16, 16] global output
buffer S: f32[100000000] shared temporary
buffer T: f32[4611686018427387904] local temporary
loops i, j, k, t
run {{ {body} }}"
        ))
    };
    let and = |more: &str| program(&format!("{matmul} {more}"));
    let cases = [
        ("good", program(matmul), None),
        ("writes far outside", and("block.x i in 16 { C[i + 100000000, 0] = 1.0 }"), Some(RuntimeError)),
        ("writes just behind", and("block.x i in 1 { C[16, 0] = 1.0 }"), Some(RuntimeError)),
        ("writes just before", and("block.x i in 1 { C[0, -1] = 1.0 }"), Some(RuntimeError)),
        ("good after a crash", program(matmul), None),
        (
            "loops for ever",
            and("block.x i in 1 { for t in 1000000000 { for k in 1000000000 { C[0, 0] += A[0, 0] first never } } }"),
            Some(RunTimeout),
        ),
        ("no code", and("block.x i in 2 { alloc T T[i + 1] = 1.0 C[0, 0] = T[i + 1] }"), Some(CompileErrorDevice)),
        (
            "a block too large",
            and("block.x i in 1 { thread.x j in 100000000 { C[0, 0] = 1.0 } }"),
            Some(InstantiationError),
        ),
        (
            "shared memory too large",
            and("block.x i in 1 { alloc S thread.x j in 16 { S[j] = 1.0 } thread.x k in 16 { C[0, k] = S[15 - k] } }"),
            Some(InstantiationError),
        ),
        ("one wrong element", and("block.x i in 1 { C[3, 5] = 1000.0 }"), Some(WrongAnswer)),
        ("one element not written", program(&matmul.replace("j in 16", "j in 15")), Some(WrongAnswer)),
        ("no program", ProgramSource::Lowered("program of sorts".to_owned()), Some(InstantiationError)),
        ("good at the end", program(matmul), None),
    ];
    let sources: Vec<ProgramSource> = cases.iter().map(|(_, source, _)| source.clone()).collect();
    let outcomes = measured(&device, "matmul:m=16,n=16,k=16", &sources, Duration::from_secs(5));
    for ((name, _, expected), outcome) in cases.iter().zip(outcomes) {
        assert_eq!(outcome.class(), *expected, "{name}: {outcome:?}");
    }
}

/// Kernels of a schedule.
fn kernels(workload: &str, steps: &str) -> GpuProgram {
    let steps = parse_steps(steps).unwrap();
    let program = apply_all(&Workload::parse(workload).unwrap().program(), &steps);
    lower_gpu(&program.unwrap_or_else(|(at, why)| panic!("step `{}`: {why}", steps[at]))).unwrap()
}

/// Findings of the simulator on kernels, each run separately, on numbers that are all one.
fn findings(program: &GpuProgram, folder: &Path) -> String {
    let code = opencl_c(program, &Target::named("opencl").unwrap());
    std::fs::write(folder.join("kernels.cl"), code).unwrap();
    let mut said = String::new();
    for kernel in program.kernels() {
        let [groups, group] = [kernel.grid(), kernel.block()];
        let line = |sizes: [i64; 3]| sizes.map(|n| n.to_string()).join(" ");
        let items = [0, 1, 2].map(|axis| groups[axis] * group[axis]);
        let mut simulation = format!("kernels.cl\n{}\n{}\n{}\n\n", kernel.name, line(items), line(group));
        for (id, _) in kernel.arguments(program) {
            let buffer = program.program.buffer(id);
            let ty = match buffer.dtype {
                DType::F32 => "float",
                DType::F64 => "double",
                DType::I64 => "long",
                DType::U64 => "ulong",
                DType::I16 => "short",
                DType::I32 => "int",
                DType::U32 => "uint",
                DType::U16 | DType::F16 | DType::Bf16 => "ushort",
                DType::I8 | DType::I7 | DType::U8 | DType::Bool => "char",
            };
            simulation += &format!("<size={} {ty} fill=1>\n", buffer.size_bytes().unwrap());
        }
        let file = folder.join("kernel.sim");
        std::fs::write(&file, simulation).unwrap();
        // It mistakes three-bit integers, which its compiler makes of masks, for eight-bit ones: code is left
        // unoptimised.
        let checks = ["--data-races", "--uninitialized", "--build-options", "-cl-opt-disable"];
        let output = Command::new("oclgrind-kernel").args(checks).arg(&file).current_dir(folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        said += &String::from_utf8_lossy(&output.stderr);
        said += &String::from_utf8_lossy(&output.stdout);
    }
    said
}

#[test]
fn a_simulator_finds_no_fault_in_what_is_printed() {
    if common::tool("oclgrind-kernel").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (workload, steps) in
        [("matmul:m=32,n=32,k=16", TILES), ("matmul:m=37,n=29,k=19", TILES), ("matmul:m=37,n=29,k=19", VECTORS)]
    {
        assert_eq!(findings(&kernels(workload, steps), folder.path()), "", "{workload}\n{steps}");
    }
    // It would report one.
    let mut faulty = kernels("matmul:m=32,n=32,k=16", TILES);
    for kernel in &mut faulty.body {
        kernel.body = without_barriers(std::mem::take(&mut kernel.body));
    }
    assert_ne!(findings(&faulty, folder.path()), "");
}

/// Random configurations of every template, including those of publications: with `TILEWRIGHT_CONFIGS=60`
/// that many for each shape, otherwise one of each template.
#[test]
fn a_simulator_finds_no_fault_in_random_configurations() {
    if common::tool("oclgrind-kernel").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Limits of a simulated device.
    let mut target = Target::named("opencl").unwrap();
    let gpu = target.gpu.as_mut().unwrap();
    (gpu.shared_bytes, gpu.most_shared_bytes) = (32 << 10, 32 << 10);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    let n_configs: usize = std::env::var("TILEWRIGHT_CONFIGS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let mut n_checked = 0;
    for text in [
        "matmul:m=17,n=19,k=13,epilogue=bias+relu",
        "batch_matmul:b=2,m=8,n=12,k=16",
        "conv2d:c=3,h=7,w=6,k=5,r=3,s=3,pad=1",
        "depthwise_conv2d:c=4,h=8,w=8,r=3,s=3,pad=1",
        // A softmax and a layer normalization.
        "nest:buffer x:f32[5,37] global input buffer m:f32[5] global temporary buffer e:f32[5,37] global temporary \
         buffer s:f32[5] global temporary buffer y:f32[5,37] global output loops i,j,k,l,n,o,p,q \
         run{alloc m for i in 5{for j in 37{m[i] max= x[i,j] first j==0}} \
         alloc e for k in 5{for l in 37{e[k,l]=exp(x[k,l]-m[k])}} \
         alloc s for n in 5{for o in 37{s[n] += e[n,o] first o==0}} \
         for p in 5{for q in 37{y[p,q]=e[p,q]/s[p]}}}",
        "nest:buffer x:f32[3,16] global input buffer g:f32[16] global const buffer m:f32[3] global temporary \
         buffer v:f32[3] global temporary buffer y:f32[3,16] global output loops i,j,k,l,p,q \
         run{alloc m for i in 3{for j in 16{m[i] += x[i,j]*0.0625 first j==0}} \
         alloc v for k in 3{for l in 16{v[k] += (x[k,l]-m[k])*(x[k,l]-m[k]) first l==0}} \
         for p in 3{for q in 16{y[p,q]=(x[p,q]-m[p])/sqrt(v[p]*0.0625+1e-5)*g[q]}}}",
    ] {
        let setting =
            TemplateSetting { workload: Workload::parse(text).unwrap(), target: target.clone(), n_threads: 1 };
        let serving: Vec<_> = TEMPLATES.iter().filter(|template| (template.serves)(&setting)).collect();
        for template in &serving {
            let task = Task::new(setting.clone(), Some(template.name)).unwrap();
            for config in (0..n_configs.div_ceil(serving.len())).map(|_| task.space.sample(&mut rng)) {
                n_checked += 1;
                let kernels = lower_gpu(&task.program(&config).unwrap()).unwrap();
                let name = format!("{text} {} {}", template.name, task.space.config_to_json(&config));
                assert_eq!(findings(&kernels, folder.path()), "", "{name}\n{}", opencl_c(&kernels, &target));
            }
        }
    }
    println!("{n_checked} configurations without a finding");
}

/// Records of a device, after a run with these arguments.
fn tuned(workload: &str, db: &Path, more: &[&str]) -> serde_json::Value {
    let of = ["tune", workload, "--device", "opencl", "--no-race", "--time", "60", "--db", common::text(db)];
    let tuned = common::run_json(&[&of[..], more].concat());
    assert!(tuned["target"].as_str().unwrap().starts_with("opencl/"), "{tuned}");
    assert_eq!(tuned["errors"], serde_json::json!({}), "{tuned}");
    tuned
}

#[test]
fn nests_are_tuned_on_a_device() {
    if device().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let nests = include_str!("../../../tests/nests.txt").lines().filter_map(|line| line.split_once(' '));
    for (name, text) in nests.filter(|(name, _)| ["softmax", "layer_norm"].contains(name)) {
        let tuned = tuned(text, &folder.path().join(name), &["--trials", "3"]);
        assert_eq!((&tuned["trials"], &tuned["verified"]), (&3.into(), &true.into()), "{tuned}");
    }
}

/// A run is killed and resumed: nothing is measured twice, and all results are correct.
#[test]
fn a_search_on_a_device_is_resumed() {
    if device().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (db, workload) = (folder.path().join("records.db"), "matmul:m=24,n=20,k=28");
    let first = tuned(workload, &db, &["--trials", "2"]);
    let second = tuned(workload, &db, &["--trials", "3"]);
    assert_eq!((&first["trials"], &second["trials"], &second["new_trials"]), (&2.into(), &3.into(), &1.into()));
    assert_eq!(common::recorded(&db).len(), 3);
    // In the middle of its work.
    let endless = ["tune", workload, "--device", "opencl", "--time", "600", "--db", common::text(&db)];
    let mut killed = common::command(&endless).spawn().unwrap();
    let start = std::time::Instant::now();
    while common::recorded(&db).len() < 5 && killed.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(120), "two more are measured");
        std::thread::sleep(Duration::from_millis(50));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let before = common::recorded(&db);
    let n_all = before.len() + 2;
    let third = tuned(workload, &db, &["--trials", &n_all.to_string()]);
    assert_eq!((&third["trials"], &third["new_trials"]), (&n_all.into(), &2.into()));
    assert!(common::recorded(&db).is_superset(&before));
    let best = ["best", workload, "--device", "opencl", "--json", "--db", common::text(&db)];
    let best = common::run(&best);
    assert!(best.status.success(), "{}", common::stderr(&best));
}

/// CLBlast computes on the same device as our kernel, and is compared if it is installed. That it computes
/// convolutions, too, is a test of peers; here its kernels would be compiled once more.
#[test]
fn a_library_is_measured_beside_the_recorded_kernel() {
    if device().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let workload = "matmul:m=24,n=20,k=28";
    tuned(workload, &db, &["--trials", "1"]);
    let bench = ["bench", "--device", "opencl", "--rounds", "2", "--json", "--db", common::text(&db)];
    let output = common::run(&[&bench, &[workload][..]].concat());
    let said = common::stderr(&output);
    let all: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|why| panic!("{why}: {said}"));
    let (theirs, ours): (Vec<_>, Vec<_>) =
        all["rows"].as_array().unwrap().iter().partition(|row| row["impl"] == "clblast");
    assert_eq!(ours.len(), 1, "{all}");
    if theirs.is_empty() {
        let left_out = said.lines().find(|line| line.contains("clblast")).unwrap_or_else(|| panic!("{said}"));
        let missing = "libclblast.so.1 is not installed (Debian and Ubuntu: apt install libclblast1";
        assert!(left_out.contains(missing), "{said}");
        return eprintln!("skipped: {left_out}");
    }
    assert_eq!(theirs.len(), 1, "{all}: {said}");
    for row in theirs {
        assert!(row["comparable"] == true && row["relative_error"].as_f64().unwrap() < 1e-5, "{row}");
        assert!(row["ms_median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn devices_that_are_not_there_are_bad_input() {
    for (device, why) in [("opencl:99", ""), ("vulkan", "give cpu, opencl"), ("opencl:x", "give cpu, opencl")] {
        let output = common::run(&["tune", "matmul-256", "--device", device]);
        assert_eq!(output.status.code(), Some(2), "{device}");
        let said = common::stderr(&output);
        assert!(said.contains(device) && said.contains(why) && said.trim_end().lines().count() == 1, "{said}");
    }
}

fn without_barriers(block: Vec<Stmt>) -> Vec<Stmt> {
    let mut left = block;
    left.retain(|stmt| *stmt != Stmt::Barrier);
    for stmt in &mut left {
        stmt.blocks_mut().for_each(|block| *block = without_barriers(std::mem::take(block)));
    }
    left
}

/// A worker compiles the valid sources of a list into a cache.
#[test]
fn code_is_compiled_by_other_processes() {
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let kernel = |name: &str| format!("__kernel void {name}(__global float *x) {{ x[get_global_id(0)] = 1.0f; }}");
    let sources = serde_json::to_string(&[kernel("a"), "nonsense".to_owned(), kernel("b")]).unwrap();
    let run = |folder: &Path, target: &str| {
        let arguments = ["worker", "--gpu-code", common::text(folder), target];
        let mut child = common::command(&arguments).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(sources.as_bytes()).unwrap();
        child.wait().unwrap().success()
    };
    assert!(run(folder.path(), &device.target.to_string()));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    assert!(!run(folder.path(), "nothing"));
}

/// The script that measures a GPU's rows processes only a part of them, continues after a row that fails, and
/// reports the device and its state.
#[test]
fn rows_of_a_gpu_are_measured_one_by_one() {
    if device().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/gpu");
    let mut command = Command::new("bash");
    command.arg(script).args(["opencl", "1"]).env("TILEWRIGHT", common::TILEWRIGHT);
    command.env("POCL_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/pocl")).env("COPY_BITS", "12");
    // Two rows per part, by their maximum times; the last one has a template for other devices.
    command.env("LIMIT", "54").env("PART", "2").env("FOLDER", folder.path());
    command.env("ROWS", "a b nosuch matmul:m=16,n=16,k=16+gpu-matmul-wgmma");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let expected = [
        "part 2 of 2, 54 s at most each",
        "device   opencl:0: ",
        "memory: ",
        "== nosuch\nfailed: see ",
        "error: unknown workload `nosuch`",
        "== matmul:m=16,n=16,k=16+gpu-matmul-wgmma\nwinner ",
        "\ntilewright ",
        "ceiling: f32 ",
        "failed: nosuch\n",
    ];
    let mut rest = &*said;
    for part in expected {
        let at = rest.find(part).unwrap_or_else(|| panic!("no `{part}` in its turn: {said}"));
        rest = &rest[at + part.len()..];
    }
    assert!(!said.contains("== a\n") && rest.is_empty(), "{said}");
}

/// The sets of rows for a card that is available for fifteen minutes run as they are, with tiny sizes: a row
/// prints its result, and rows for other devices are skipped.
#[test]
fn sets_of_rows_run_on_a_device() {
    if device().is_none() {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/gpu");
    let run = |settings: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("bash");
        command.arg(&script).args(["opencl", "1"]).env("TILEWRIGHT", common::TILEWRIGHT);
        command.env("POCL_CACHE_DIR", concat!(env!("CARGO_TARGET_TMPDIR"), "/pocl")).env("COPY_BITS", "12");
        command.env("FOLDER", folder.path()).envs(settings.iter().copied());
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    // An endless kernel costs one trial; a sample prints what it recorded, however little.
    let tiny = "matmul:m=16,n=16,k=16";
    let sampled = format!("{tiny}+gpu-matmul");
    let (status, said) = run(&[("SET", "second"), ("RATE", tiny), ("BEYOND", &sampled), ("MOST", "2")]);
    assert_eq!(status, Some(0), "{said}");
    for part in [
        "part 1 to 1 of 1, 480 s",
        "== hang@\nwinner ",
        "3 run_timeout",
        "six trials, of which half never end",
        "== rate@matmul:m=16,n=16,k=16\n",
        "== profile@",
        "== beyond@matmul:m=16,n=16,k=16+gpu-matmul\n",
        " recorded, ",
    ] {
        assert!(said.contains(part), "no `{part}` in {said}");
    }
    let (status, said) = run(&[("SET", "first"), ("SIZES", "16 16"), ("PART", "1"), ("LIMIT", "120")]);
    assert_eq!(status, Some(0), "{said}");
    for part in ["== unproven@matmul:m=16,n=16,k=16,dtype=bf16\n\n", "== sample@dense:", "ceiling: bf16 "] {
        assert!(said.contains(part), "no `{part}` in {said}");
    }
    let (status, said) = run(&[("SET", "nothing")]);
    assert_eq!((status, said.as_str()), (Some(2), ""));
}
