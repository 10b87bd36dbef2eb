//! Plan with all features: slices, prepared constants, a copy, and a step in this process.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::Arc;

use bytes::Bytes;
use tilewright_codegen::{ArgumentAlign, Compiler, host_arch};
use tilewright_ir::{DType, Part, Target, lower_gpu, text};
use tilewright_runtime::{
    Code, Constant, GpuModel, Host, Model, OpenDimension, Place, Plan, PlanError, PlanStep, RunSize, TensorSlice, Work,
};

/// Program `Y = X + 2·W`, with two copies of `W` in a kept buffer.
const ADD: &str = r#"
program "add twice"
buffer X: f32[33] global input
buffer W: f32[33] global const
buffer Y: f32[33] global output
buffer K: f32[2,33] global kept
loops i, j, k
prepare { parallel k in 2 { for i in 33 { K[k,i] = W[i] } } }
run { parallel j in 33 { Y[j] = X[j] + (K[0,j] + K[1,j]) } }
"#;

/// Program `Y = 3·X`.
const TRIPLE: &str = r#"
program "triple"
buffer X: f32[66] global input
buffer Y: f32[66] global output
loops i
run { vectorized i in 66 { Y[i] = X[i] * 3 } }
"#;

/// Program `Y = 3·X` with an open number of rows.
const TRIPLE_ROWS: &str = r#"
program "triple rows"
buffer X: f32[8,4] global input
buffer Y: f32[8,4] global output
loops steps, i, j
size rows = 2*steps + 2 in 4
run { for i in 2*steps + 2 { vectorized j in 4 { Y[i,j] = X[i,j] * 3 } } }
"#;

/// Makes a model of `n_steps` steps, each of which triples its input, from `x[rows, 4]` to `y[rows, 4]`, for
/// 1 to 8 rows; for an odd number, the kernel computes one more.
pub fn open_model(n_steps: usize) -> Result<Model, PlanError> {
    let mut plan =
        Plan { dim: Some(OpenDimension { name: "rows".to_owned(), least: 1, most: 8, step: 1 }), ..Plan::default() };
    let rows = RunSize { factor: 1, ..RunSize::constant(0) };
    let mut ports = Vec::new();
    for (name, place) in [("x", Place::Input(0)), ("y", Place::Output(0))] {
        let tensor = plan.tensor(name, DType::F32, &[8, 4], place);
        plan.tensors[tensor].open = Some((0, rows));
        ports.push(plan.whole(tensor));
    }
    let [from, to] = [0, 128].map(|offset| plan.tensor("between", DType::F32, &[8, 4], Place::Arena(offset)));
    let mut between = [plan.whole(from), plan.whole(to)];
    let copy = |from, to| Work::Copy { from, to, rows: Some((rows, 16)) };
    let mut works = vec![copy(ports[0], between[0])];
    for _ in 0..n_steps {
        works.push(Work::Kernel {
            kernel: 0,
            arguments: between.to_vec(),
            kept: vec![],
            parts: vec![Part::Body],
            all_threads: true,
            sizes: vec![RunSize { multiple: 2, ..rows }],
        });
        between.reverse();
    }
    works.push(copy(between[0], ports[1]));
    plan.steps.extend(works.into_iter().map(|work| PlanStep { name: "step".to_owned(), work, guard: None }));
    let mut compiler = Compiler::for_arguments(target(), ArgumentAlign::Elements);
    let code = Code::compile(&mut compiler, text::parse(TRIPLE_ROWS).unwrap()).unwrap();
    Model::new(plan, vec![code])
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

pub fn target() -> Target {
    match host_arch() {
        Some(tilewright_ir::target::Arch::X86_64) => Target::named("x86-64-v3").unwrap(),
        _ => Target::named("aarch64").unwrap(),
    }
}

pub fn codes() -> Vec<Code> {
    let mut compiler = Compiler::for_arguments(target(), ArgumentAlign::Elements);
    let programs = [ADD, TRIPLE].map(|program| text::parse(program).unwrap());
    programs.map(|program| Code::compile(&mut compiler, program).unwrap()).into()
}

/// Makes the model for a GPU, with blocks of one thread.
pub fn gpu_model(on_host: bool, target: &Target) -> GpuModel {
    let programs = [ADD, TRIPLE].map(|program| {
        let program = program.replace("parallel", "block.x").replace("vectorized", "block.x");
        lower_gpu(&text::parse(&program).unwrap()).unwrap()
    });
    GpuModel { plan: plan(on_host), kernels: programs.into(), target: target.clone() }
}

/// Makes a plan from `x[33]` to `y[66]`: both halves of a tensor are `x + 2·w`, each with its own weights;
/// the whole is tripled, and then reversed if `on_host`, else copied.
pub fn plan(on_host: bool) -> Plan {
    let mut plan = Plan::default();
    let f32s = |plan: &mut Plan, name: &str, n, place| plan.tensor(name, DType::F32, &[n], place);
    let x = f32s(&mut plan, "x", 33, Place::Input(0));
    let y = f32s(&mut plan, "y", 66, Place::Output(0));
    let halves = f32s(&mut plan, "halves", 66, Place::Arena(0));
    let tripled = f32s(&mut plan, "tripled", 66, Place::Arena(512));
    for half in 0..2 {
        let weights: Vec<f32> = (0..33).map(|i| (i + half) as f32).collect();
        plan.constants.push(Constant::Data(Bytes::from(bytes(&weights))));
        plan.constants.push(Constant::Prepared(66 * 4));
        let w = f32s(&mut plan, "w", 33, Place::Constant(2 * half));
        let k = f32s(&mut plan, "k", 66, Place::Constant(2 * half + 1));
        let part = TensorSlice { tensor: halves, offset: half * 33 * 4, n_bytes: 33 * 4 };
        let arguments = vec![plan.whole(x), plan.whole(w), part];
        let (kept, parts) = (vec![plan.whole(k)], vec![Part::Body]);
        let work = Work::Kernel { kernel: 0, arguments, kept, parts, all_threads: true, sizes: Vec::new() };
        plan.steps.push(PlanStep { name: format!("half {half}"), work, guard: None });
    }
    let arguments = vec![plan.whole(halves), plan.whole(tripled)];
    let (kept, parts, sizes) = (vec![], vec![Part::Body], vec![]);
    let work = Work::Kernel { kernel: 1, arguments, kept, parts, all_threads: false, sizes };
    plan.steps.push(PlanStep { name: "triple".to_owned(), work, guard: None });
    let (from, to) = (plan.whole(tripled), plan.whole(y));
    let work = if on_host {
        let run = Arc::new(|inputs: &[&[u8]], outputs: &mut [&mut [u8]]| {
            for (to, from) in outputs[0].chunks_exact_mut(4).zip(inputs[0].chunks_exact(4).rev()) {
                to.copy_from_slice(from);
            }
            Ok(())
        });
        Work::Host { inputs: vec![from], outputs: vec![to], run: Host::Function(run) }
    } else {
        Work::Copy { from, to, rows: None }
    };
    plan.steps.push(PlanStep { name: "last".to_owned(), work, guard: None });
    plan
}

pub fn model(on_host: bool) -> Arc<Model> {
    Arc::new(Model::new(plan(on_host), codes()).unwrap())
}

pub fn expected(x: &[f32], on_host: bool) -> Vec<f32> {
    let half = |half: usize| x.iter().enumerate().map(move |(i, x)| 3.0 * (x + 2.0 * (i + half) as f32));
    let mut all: Vec<f32> = half(0).chain(half(1)).collect();
    if on_host {
        all.reverse();
    }
    all
}
