//! Tests of every template on shapes that no tile divides: schedules are legal, and scheduled and lowered
//! programs compute the same as the untransformed ones.

mod common;

use std::collections::{BTreeSet, HashMap, HashSet};

use common::outputs_of;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::op::Workload;
use tilewright_ir::text::parse;
use tilewright_ir::verify::VerifyError;
use tilewright_ir::{BufferId, Cond, DType, Index, LoopId, LoopKind, Program, Stmt, Target, lower, verify};
use tilewright_search::{Config, Space};
use tilewright_tune::{TEMPLATES, Task, Template, TemplateSetting};

#[test]
fn every_template_computes_the_operator_on_any_shape() {
    let shapes = [
        "matmul:m=1,n=1,k=1",
        "matmul:m=17,n=33,k=29",
        "matmul:m=8,n=64,k=16",
        "matmul:m=1,n=97,k=40",
        "matmul:m=31,n=1,k=7",
        "matmul:m=13,n=50,k=101,const=b",
        "matmul:m=37,n=41,k=5,const=a",
        "matmul:m=24,n=48,k=32,dtype=f64",
        "matmul:m=19,n=23,k=37,dtype=f64,const=b",
        "matmul:m=21,n=35,k=260,epilogue=bias+add+relu",
        "matmul:m=5,n=39,k=40,epilogue=clip(-2;3)",
        "batch_matmul:b=3,m=17,n=29,k=13",
        "batch_matmul:b=9,m=15,n=20,k=9,ta=1,epilogue=bias+relu",
        "batch_matmul:b=2,m=11,n=37,k=19,tb=1,const=b",
        "batch_matmul:b=2,m=9,n=18,k=21,ta=1,tb=1,dtype=f64,epilogue=add",
        "heads_matmul:b=3,m=17,n=29,k=13,tb=1,ha=1,hb=1,a_after=6,b_before=3,b_after=3,epilogue=linear(0.5;0)+bias",
        "heads_matmul:b=3,m=17,n=20,k=19,hb=1,hc=1,b_before=6",
        "heads_matmul:b=9,m=8,n=33,k=21,ha=1,hc=1,a_before=1,dtype=f64,epilogue=bias+add",
        "dense:m=13,n=37,k=35",
        "dense:m=1,n=40,k=33,const=w,epilogue=bias",
        "matmul:m=19,n=37,k=29,dtype=bf16",
        "batch_matmul:b=2,m=9,n=18,k=21,ta=1,tb=1,dtype=f16,epilogue=add",
        "matmul:m=13,n=37,k=35,bf16=1",
        "dense:m=1,n=40,k=33,const=w,bf16=1,epilogue=bias",
        "batch_matmul:b=2,m=9,n=18,k=21,ta=1,tb=1,bf16=1",
        "heads_matmul:b=3,m=17,n=29,k=13,tb=1,ha=1,hb=1,bf16=1,epilogue=bias",
        "matmul:m=13,n=37,k=35,dtype=u8i8",
        "matmul:m=23,n=1,k=192,dtype=i8i8,const=a",
        "dense:m=1,n=40,k=33,const=w,dtype=i8i8",
        "dense:m=9,n=40,k=33,const=w+init+dequant,dtype=u8i8,epilogue=init+dequant+quant_u8",
        "batch_matmul:b=2,m=9,n=18,k=21,ta=1,tb=1,dtype=i8i8",
        "packed_matmul:m=3,n=37,k=64,const=w+s",
        "packed_matmul:m=1,n=50,k=128,bits=8,block=64,zeros=1,epilogue=bias",
        "packed_matmul:m=1,n=70,k=160,int8=1,const=w+s",
        "packed_matmul:m=13,n=41,k=64,block=16,zeros=1,int8=1,const=w+s+z,epilogue=bias+relu",
        "packed_matmul:m=9,n=33,k=256,bits=8,block=128,int8=1",
        "packed_matmul:m=5,n=96,k=64,int8=1,const=w+s,epilogue=silu+gated(4)",
        "packed_matmul:m=1,n=64,k=32,zeros=1,epilogue=gelu+gated(4)",
        "matmul:m=7,n=96,k=31,const=b,epilogue=silu+gated(4)",
        "matmul:m=33,n=160,k=40,const=b,epilogue=gelu+gated(4)",
        "dense:m=1,n=64,k=48,const=w,epilogue=gated(4)",
    ];
    check_all(&shapes, 8, 7);
}

/// Checks odd channels, borders that are not zeros, strides, groups, depthwise channels, and all layouts.
#[test]
fn convolutions_of_integers_are_right_by_every_template() {
    let shapes = [
        "conv2d:c=19,h=7,w=6,k=18,r=3,s=3,pad=1,x_zero=1,dtype=u8i8,const=w,epilogue=init+dequant+quant_u8",
        "conv2d:c=16,h=7,w=9,k=32,r=3,s=3,pad=1,stride=2,x_zero=1,dtype=i8i8,const=w,in=c16,out=c16,\
         epilogue=dequant+add+quant_i8",
        "conv2d:c=16,h=6,w=5,k=32,r=1,s=1,dtype=u8i8,const=w,in=c16,out=c16,epilogue=init+dequant+relu+quant_u8",
        "conv2d:c=32,h=6,w=6,k=16,r=1,s=1,stride=2,dtype=u8i8,const=w,in=c4,epilogue=init+dequant",
        "conv2d:n=2,c=3,h=13,w=12,k=17,r=5,s=5,stride=2,pad=2,dtype=u8i8,const=w",
        "conv2d:c=12,h=6,w=7,k=24,r=3,s=3,pad=1,groups=3,dilation=2,x_zero=1,dtype=i8i8",
        "conv2d:c=8,h=6,w=7,k=32,r=3,s=3,pad=1,x_zero=1,dtype=u8i8,layout=blocked,epilogue=dequant+quant_u8",
        "conv2d:c=16,h=6,w=7,k=32,r=3,s=3,pad=1,groups=2,x_zero=1,dtype=u8i8,const=w,in=c8,out=c16",
        "conv2d:c=24,h=5,w=4,k=48,r=1,s=3,groups=3,dtype=u8i8,const=w,epilogue=dequant",
        "conv2d:c=16,h=7,w=7,k=32,r=3,s=3,pad=1,dtype=u8i8,const=w,layout=blocked,epilogue=dequant",
        "conv2d:c=32,h=5,w=6,k=16,r=3,s=3,pad=2,stride=2,dtype=i8i8,const=w,in=c16,out=c16",
        "conv2d:c=5,h=1,w=3,k=17,r=3,s=5,pad=3,dilation=2,dtype=u8i8,const=w,layout=blocked",
        "conv2d:c=8,h=4,w=5,k=24,r=1,s=1,pad=1,dtype=i8i8,const=w,layout=blocked",
        "conv2d:c=2,h=7,w=9,k=5,r=3,s=3,pad_left=2,pad_bottom=1,x_zero=1,dtype=i8i8,layout=blocked",
        "conv2d:c=1030,h=3,w=3,k=4,r=2,s=2,dtype=u8i8,const=w,epilogue=init+dequant+relu",
        "depthwise_conv2d:c=19,h=7,w=6,r=3,s=3,pad=1,x_zero=1,dtype=u8i8,const=w,epilogue=init+dequant+quant_u8",
        "depthwise_conv2d:c=32,h=9,w=8,r=5,s=5,stride=2,pad=2,dtype=i8i8,in=c16,out=c16,epilogue=dequant",
        "depthwise_conv2d:c=9,h=8,w=5,r=2,s=3,multiplier=2,dtype=u8i8,layout=blocked",
        "depthwise_conv2d:c=32,h=7,w=9,r=3,s=3,pad=1,x_zero=1,dtype=u8i8,const=w,in=c16,out=c16,\
         epilogue=init+dequant+quant_u8",
        "depthwise_conv2d:c=8,h=4,w=3,r=3,s=3,pad=1,x_zero=1,dtype=i8i8,const=w,in=c8,out=c8,\
         epilogue=dequant+add+quant_i8",
        "depthwise_conv2d:n=2,c=19,h=8,w=5,r=2,s=3,dilation=2,pad_top=1,dtype=i8i8,layout=blocked",
        "conv2d:c=19,h=5,w=6,k=16,r=2,s=3,pad=1,dtype=u8i8,layout=blocked",
    ];
    check_all(&shapes, 2, 8);
}

/// Checks odd channels, borders, strides and layouts; there are no dot products with groups.
#[test]
fn convolutions_of_rounded_factors_are_right_by_every_template() {
    let shapes = [
        "conv2d:c=19,h=7,w=6,k=18,r=3,s=3,pad=1,bf16=1,const=w,epilogue=bias+relu",
        "conv2d:c=16,h=7,w=9,k=32,r=3,s=3,pad=1,stride=2,bf16=1,const=w,in=c16,out=c16,epilogue=add",
        "conv2d:c=16,h=6,w=5,k=32,r=1,s=1,bf16=1,const=w,in=c16,out=c16",
        "conv2d:n=2,c=3,h=13,w=12,k=17,r=5,s=5,stride=2,pad=2,bf16=1",
        "conv2d:c=8,h=6,w=7,k=32,r=3,s=3,pad=1,bf16=1,layout=blocked,prologue=bias+relu",
        "conv2d:c=9,h=6,w=7,k=20,r=1,s=1,bf16=1,layout=blocked",
        "conv2d:c=2,h=6,w=7,k=20,r=3,s=3,pad=1,bf16=1,layout=blocked",
        "conv2d:c=12,h=6,w=7,k=24,r=3,s=3,groups=3,bf16=1",
        "conv2d:c=18,h=6,w=7,k=17,r=3,s=3,pad=1,const=w,dtype=bf16,epilogue=bias",
    ];
    check_all(&shapes, 3, 9);
}

/// Checks pointwise filters, padding, strides, groups and dilation, and the shapes that Winograd's algorithm
/// serves.
#[test]
fn prologues_are_done_inside_of_images_by_every_template() {
    let shapes = [
        "conv2d:c=19,h=7,w=7,k=18,r=1,s=1,const=w+in_scale+in_bias,prologue=scale+bias+relu,epilogue=bias+relu",
        "conv2d:n=2,c=5,h=9,w=20,k=7,r=1,s=1,prologue=bias,layout=blocked,epilogue=add",
        "conv2d:c=6,h=8,w=9,k=8,r=1,s=1,stride=2,groups=2,prologue=linear(-1;2)+relu",
        "conv2d:c=18,h=6,w=7,k=17,r=3,s=3,pad=1,const=w,dtype=f64,prologue=scale+bias+relu,epilogue=relu",
        "conv2d:c=5,h=8,w=10,k=6,r=3,s=3,dtype=f64,layout=blocked,prologue=bias+clip(-1;3)",
        "conv2d:c=18,h=6,w=7,k=17,r=3,s=3,pad=1,const=w,dtype=bf16,prologue=bias+relu,epilogue=bias",
        "conv2d:c=3,h=12,w=11,k=5,r=2,s=3,stride_w=2,dilation_h=2,pad_left=2,pad_bottom=1,prologue=bias",
        "depthwise_conv2d:c=18,h=7,w=9,r=3,s=3,pad=1,prologue=scale+bias+relu",
        "depthwise_conv2d:c=5,h=6,w=18,r=2,s=3,multiplier=2,layout=blocked,prologue=bias",
    ];
    check_all(&shapes, 4, 13);
}

/// Checks strides that are larger than the filter, that do not divide it, that differ between the axes, or
/// are as long as vectors; with padding on each side and at the end of the output, and dilation with and
/// without a common divisor with the stride.
#[test]
fn transposed_convolutions_add_up_columns_of_any_shape() {
    let shapes = [
        "c=5,h=3,w=4,k=7,r=4,s=4,stride=2,pad=1,const=w",
        "c=3,h=2,w=3,k=18,r=3,s=3,stride=2,pad=1,out_pad=1,epilogue=bias+relu,layout=blocked",
        "n=2,c=4,h=3,w=2,k=3,r=2,s=3,stride_h=5,stride_w=17,pad_top=1,pad_left=2,pad_bottom=1,out_pad_w=3",
        "c=9,h=1,w=6,k=1,r=1,s=40,stride_w=16,const=w",
        "c=2,h=2,w=2,k=4,r=3,s=4,stride_h=4,stride_w=9,dilation_h=6,dilation_w=2,dtype=f64,const=w",
        "n=2,c=3,h=3,w=3,k=16,r=5,s=2,stride_h=3,stride_w=1,dilation_w=2,layout=blocked,epilogue=bias+add",
        "c=1,h=1,w=1,k=1,r=1,s=1,stride=3,out_pad=2",
        "c=2,h=2,w=2,k=2,r=3,s=3,stride=8,pad_left=2,pad_bottom=2,epilogue=gelu,layout=blocked,const=w",
    ];
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
    for sizes in shapes {
        check_random(&format!("conv2d_transpose:{sizes}"), |name| name == "conv-col2im", 6, &mut rng);
    }
    // No tap contributes to a result, so there are no columns to add up.
    let nothing = "n=3,c=25,h=1,w=16,k=3,r=2,s=2,stride_h=2,pad_top=2,pad_left=3,pad_bottom=1,dilation_h=3";
    assert!(serving(&format!("conv2d_transpose:{nothing}")).all(|template| template.name != "conv-col2im"));
}

/// Checks random configurations of all templates that serve workloads.
fn check_all(workloads: &[&str], n_configs: usize, seed: u64) {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    workloads.iter().for_each(|text| check_random(text, |_| true, n_configs, &mut rng));
}

/// Checks random configurations of those templates that serve a workload.
fn check_random(text: &str, is_checked: fn(&str) -> bool, n_configs: usize, rng: &mut Xoshiro256PlusPlus) {
    let expected = outputs_of(&Workload::parse(text).unwrap().program(), 1.0);
    for (target, n_threads) in [("x86-64-v4", 1), ("x86-64-v3", 2), ("x86-64", 1)] {
        for template in serving(text).filter(|t| is_checked(t.name)) {
            let task = task(text, target, n_threads, template);
            for _ in 0..n_configs {
                check(&task, &task.space.sample(rng), &expected);
            }
        }
    }
}

/// Checks that a configuration's programs are legal and compute the expected results.
fn check(task: &Task, config: &Config, expected: &[Vec<f64>]) {
    let TemplateSetting { workload, target, n_threads } = &task.setting;
    let json = task.space.config_to_json(config);
    let case = format!("{workload} {} {} {n_threads} {json}", task.template.name, target.cpu);
    let scheduled = task.program(config).unwrap_or_else(|(at, e)| panic!("{case}: step {}: {e}", at + 1));
    verify::verify(&scheduled).unwrap_or_else(|e| panic!("{case}: {e}\n{scheduled}"));
    let lowered = lower::lower_verified(&scheduled);
    match verify::verify(&lowered) {
        // Specialised indices may hide that the iterations of scheduled loops are independent; this is then
        // checked by enumerating them.
        Err(VerifyError::Race { .. }) => {
            if let Some(race) = Threads::race(&lowered) {
                panic!("{case}: {race}\n{lowered}");
            }
        }
        verified => verified.unwrap_or_else(|e| panic!("{case}: {e}\n{lowered}")),
    }
    // Winograd's algorithm multiplies by thirds.
    let most = if scheduled.find_buffer("acc.u").is_some() { 1e-9 } else { 0.0 };
    let is_near =
        |got: &[Vec<f64>]| got.iter().flatten().zip(expected.iter().flatten()).all(|(a, b)| (a - b).abs() <= most);
    for (program, what) in [(&scheduled, "scheduled"), (&lowered, "lowered")] {
        assert!(is_near(&outputs_of(program, 1.0)), "{case}, {what}\n{program}");
    }
}

/// Detector of races between the iterations of parallel loops.
struct Threads<'a> {
    program: &'a Program,
    values: HashMap<LoopId, i64>,
    /// Iteration of a parallel loop, and its private temporaries.
    iteration: Option<(i64, HashSet<BufferId>)>,
    /// Accesses to each element so far.
    touched: HashMap<(BufferId, Vec<i64>), Touched>,
    race: Option<String>,
}

#[derive(Default)]
struct Touched {
    iterations: BTreeSet<i64>,
    is_written: bool,
}

impl Threads<'_> {
    /// Finds an element that one iteration of a parallel loop writes and another one accesses, if there is
    /// one.
    fn race(program: &Program) -> Option<String> {
        let (values, touched) = (HashMap::new(), HashMap::new());
        let mut threads = Threads { program, values, iteration: None, touched, race: None };
        [&program.prepare, &program.body, &program.finish].into_iter().for_each(|part| threads.block(part));
        threads.race
    }

    fn value(&self, index: &Index) -> i64 {
        index.eval(&|var| self.values[&var]).expect("indices of legal programs have values")
    }

    /// Whether a condition holds; `None` if it depends on data.
    fn holds(&self, cond: &Cond) -> Option<bool> {
        match cond {
            Cond::True => Some(true),
            Cond::Lt(a, b) => Some(self.value(a) < self.value(b)),
            Cond::Eq(a, b) => Some(self.value(a) == self.value(b)),
            Cond::Less(..) => None,
            Cond::And(a, b) => match (self.holds(a), self.holds(b)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (a, b) => a.and(b),
            },
            Cond::Not(cond) => self.holds(cond).map(|holds| !holds),
        }
    }

    fn block(&mut self, block: &[Stmt]) {
        for stmt in block {
            self.stmt(stmt);
        }
    }

    fn stmt(&mut self, stmt: &Stmt) {
        match stmt {
            Stmt::For(l) => {
                let is_shared = l.kind == LoopKind::Parallel && self.iteration.is_none();
                for at in 0..self.value(&l.extent) {
                    self.values.insert(l.var, at);
                    if is_shared {
                        self.iteration = Some((at, HashSet::new()));
                    }
                    self.block(&l.body);
                }
                if is_shared {
                    self.iteration = None;
                    self.touched.clear();
                }
            }
            Stmt::If { cond, then, otherwise } => {
                let holds = self.holds(cond);
                if holds != Some(false) {
                    self.block(then);
                }
                if holds != Some(true) {
                    self.block(otherwise);
                }
            }
            Stmt::Alloc(buffer) => {
                if let Some((_, own)) = &mut self.iteration {
                    own.insert(*buffer);
                }
            }
            _ => {
                let mut accesses: Vec<(BufferId, &[Index], bool)> = Vec::new();
                stmt.own_nodes().for_each(|node| node.for_each_load(&mut |b, index| accesses.push((b, index, false))));
                accesses.extend(stmt.own_write().map(|(buffer, index)| (buffer, index, true)));
                accesses.into_iter().for_each(|(buffer, index, writes)| self.touch(buffer, index, writes));
            }
        }
    }

    fn touch(&mut self, buffer: BufferId, index: &[Index], writes: bool) {
        let Some((at, own)) = &self.iteration else { return };
        if own.contains(&buffer) {
            return;
        }
        let (at, element) = (*at, index.iter().map(|index| self.value(index)).collect::<Vec<_>>());
        let touched = self.touched.entry((buffer, element)).or_default();
        touched.iterations.insert(at);
        touched.is_written |= writes;
        if touched.is_written && touched.iterations.len() > 1 {
            let name = &self.program.buffer(buffer).name;
            self.race = Some(format!("iterations {:?} meet in {name}{index:?}", touched.iterations));
        }
    }
}

#[test]
fn races_are_found_by_going_through_all_iterations() {
    let program = |index: &str| {
        let text = format!(
            "program \"p\" buffer x: f32[8] global input buffer y: f32[8] global output loops i, j
             run {{ parallel i in 4 {{ for j in 2 {{ y[{index}] = x[2*i + j] }} }} }}"
        );
        parse(&text).unwrap_or_else(|e| panic!("{e}"))
    };
    assert_eq!(Threads::race(&program("2*i + j")), None);
    assert!(Threads::race(&program("i + j")).is_some_and(|race| race.contains("meet in y")));
}

/// Checks a last block with fewer rows of tiles, in several images: the parallel loops are fused to one.
#[test]
fn lowering_makes_no_race_of_what_threads_share() {
    let shapes = [
        "conv2d:n=2,c=4,h=5,w=5,k=4,r=3,s=3,pad=1,dtype=f64,const=w,layout=blocked",
        "conv2d:n=2,c=9,h=7,w=6,k=5,r=3,s=3,dtype=f64,epilogue=bias+add,layout=blocked",
    ];
    check_all(&shapes, 6, 17);
}

fn setting(text: &str, target: &str, n_threads: usize) -> TemplateSetting {
    TemplateSetting { workload: Workload::parse(text).unwrap(), target: Target::named(target).unwrap(), n_threads }
}

fn task(text: &str, target: &str, n_threads: usize, template: &Template) -> Task {
    Task::new(setting(text, target, n_threads), Some(template.name)).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn serving(text: &str) -> impl Iterator<Item = &'static Template> {
    let setting = setting(text, "x86-64-v4", 1);
    TEMPLATES.iter().filter(move |t| (t.serves)(&setting))
}

/// Part of a space in which threads share this work, if there is one.
fn sharing(space: &Space, what: &str) -> Option<Space> {
    let parameter = space.names().position(|name| name == "share")?;
    let rank = (0..space.n_values(parameter)).find(|&rank| space.value_at(parameter, rank).text() == what)?;
    space.part(parameter, rank)
}

/// Workloads of every operator with small results and sums of lengths that nothing divides.
const LONG_SUMS: [&str; 16] = [
    "matmul:m=5,n=7,k=1907",
    "matmul:m=8,n=8,k=1031,const=b",
    "matmul:m=12,n=9,k=811,dtype=f64,epilogue=bias+relu",
    "matmul:m=1,n=1,k=65537",
    "dense:m=1,n=10,k=6563,epilogue=bias",
    "dense:m=3,n=4,k=5503,const=w,dtype=f64",
    "batch_matmul:b=2,m=6,n=5,k=1123,ta=1,epilogue=add",
    "batch_matmul:b=1,m=4,n=5,k=3301,tb=1,const=b",
    "conv2d:c=521,h=4,w=4,k=8,r=4,s=4",
    "conv2d:c=67,h=5,w=5,k=9,r=5,s=5,pad=1,epilogue=bias+add+relu",
    "conv2d:c=67,h=5,w=5,k=19,r=5,s=5,pad=1,const=w,layout=blocked",
    "conv2d:n=2,c=3,h=70,w=70,k=5,r=67,s=69,dtype=f64",
    "conv2d:c=512,h=8,w=8,k=4,groups=2,r=8,s=8",
    "depthwise_conv2d:c=3,h=80,w=150,r=79,s=149",
    "conv2d_transpose:c=601,h=1,w=1,k=4,r=3,s=3",
    "conv2d:c=131,h=3,w=5,k=6,r=3,s=3,pad=1,epilogue=relu",
];

/// Checks that a record keeps its meaning when its template gains an algorithm, whose parameters the record
/// lacks.
#[test]
fn records_from_before_an_algorithm_came_are_read() {
    let workload = Workload::parse("conv2d_transpose:c=64,h=8,w=8,k=32,r=4,s=4,stride=2,pad=1").unwrap();
    let setting = TemplateSetting { workload, target: Target::named("x86-64-v4").unwrap(), n_threads: 1 };
    let task = Task::new(setting, Some("conv")).unwrap();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    let mut n_read = 0;
    while n_read < 20 {
        let config = task.space.sample(&mut rng);
        let mut json = task.space.config_to_json(&config);
        let fields = json.as_object_mut().unwrap();
        fields.retain(|name, _| !["k_block", "y_tile", "pixels"].contains(&name.as_str()));
        if task.space.text(&config, "algorithm") != "col2im" {
            assert_eq!(task.space.config_from_json(&json), Ok(config));
            n_read += 1;
        }
    }
}

#[test]
fn threads_share_long_sums_of_small_results() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
    for text in LONG_SUMS {
        let expected = outputs_of(&Workload::parse(text).unwrap().program(), 1.0);
        let mut n_shared = 0;
        for (target, n_threads) in [("x86-64-v4", 2), ("x86-64", 3)] {
            for template in serving(text) {
                let task = task(text, target, n_threads, template);
                // Algorithms with few configurations are represented, too.
                let algorithm = task.space.names().position(|name| name == "algorithm");
                let n_algorithms = algorithm.map_or(1, |at| task.space.n_values(at));
                for of_algorithm in 0..n_algorithms {
                    let space = algorithm.map_or(Some((*task.space).clone()), |at| task.space.part(at, of_algorithm));
                    let Some(part) = space.and_then(|space| sharing(&space, "sum")) else { continue };
                    for _ in 0..2 {
                        check(&task, &part.sample(&mut rng), &expected);
                        n_shared += 1;
                    }
                }
            }
        }
        assert!(n_shared > 0, "{text}");
    }
}

/// Checks that the schedules for one thread are among those for two, so that a search for two threads need
/// not be worse if another thread does not help.
#[test]
fn one_thread_s_schedules_are_among_those_of_two() {
    let small = ["matmul:m=16,n=16,k=16", "dense:m=1,n=64,k=64", "conv2d:c=8,h=10,w=10,k=8,r=3,s=3,pad=1"];
    let small = small.into_iter().chain(["depthwise_conv2d:c=8,h=9,w=9,r=3,s=3", "matmul:m=1,n=1,k=1"]);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(13);
    for text in small.chain(LONG_SUMS) {
        for template in serving(text).filter(|t| t.estimate.is_some()) {
            let [one, two] = [1, 2].map(|n_threads| task(text, "x86-64-v4", n_threads, template));
            let alone = sharing(&two.space, "nothing").unwrap_or_else(|| panic!("{text} {}", template.name));
            assert_eq!(alone.size(), one.space.size(), "{text} {}", template.name);
            for _ in 0..20 {
                let config = one.space.sample(&mut rng);
                let mut json = one.space.config_to_json(&config);
                json["share"] = "nothing".into();
                if let Some(at) = two.space.names().position(|name| name == "parallel") {
                    json["parallel"] = two.space.value_at(at, 0).text().into();
                }
                let same = two.space.config_from_json(&json).unwrap_or_else(|e| panic!("{text} {json}: {e}"));
                assert_eq!(two.steps(&same), one.steps(&config), "{text} {json}");
            }
        }
    }
}

/// Checks that the model knows the cost of inserted zeros: if there are many, the first guess is the
/// algorithm without them, and no guess iterates over them.
#[test]
fn guesses_insert_few_zeros() {
    for sizes in ["c=1026,h=1,w=224,k=1,r=1,s=1024,stride_w=256", "c=256,h=10,w=10,k=64,r=5,s=5,stride=32,const=w"] {
        for target in ["x86-64-v4", "x86-64-v3"] {
            let workload = Workload::parse(&format!("conv2d_transpose:{sizes}")).unwrap();
            let setting = TemplateSetting { workload, target: Target::named(target).unwrap(), n_threads: 1 };
            let task = Task::new(setting, None).unwrap();
            let of = |config: &Config| task.space.text(config, "algorithm");
            assert_eq!(of(&task.first_guess(1).unwrap()), "col2im", "{sizes}");
            let algorithms: BTreeSet<String> = task.guesses(1).iter().map(of).collect();
            assert_eq!(algorithms, ["col2im".to_owned()].into(), "{sizes}");
        }
    }
}

/// Checks that first guesses of depthwise convolutions of bytes with strides do not take strided columns as
/// lanes, for which there are no gathering loads.
#[test]
fn guesses_load_no_strided_bytes() {
    for sizes in ["c=24,h=112,w=112,r=5,s=5,stride=2,pad=2", "c=40,h=56,w=56,r=3,s=3,stride=2,pad=1"] {
        let text = format!(
            "depthwise_conv2d:{sizes},x_zero=1,dtype=u8i8,const=w+x_zero+init+dequant+zero,\
             epilogue=init+dequant+quant_u8"
        );
        let task = task(&text, "x86-64-v4", 1, serving(&text).next().unwrap());
        let guess = task.first_guess(1).unwrap();
        assert_eq!(task.space.text(&guess, "lanes"), "k", "{sizes}: {}", task.space.config_to_json(&guess));
    }
}

/// Value of `prefetch_b` for the whole next panel.
const NEXT_PANEL: i64 = 1024;

/// Checks that first guesses of products that read weights from memory compute each sum in one or two blocks,
/// and prefetch: the tile's own panel, or the next one if several tiles of rows share it.
#[test]
fn guesses_stream_weights() {
    for sizes in ["m=1,n=2048,k=768", "m=16,n=768,k=768", "m=128,n=8192,k=768", "m=128,n=768,k=2048"] {
        let text = format!("matmul:{sizes},const=b");
        let task = task(&text, "x86-64-v4", 1, serving(&text).next().unwrap());
        let guess = task.first_guess(1).unwrap();
        let [blocks, prefetched] = ["k_blocks", "prefetch_b"].map(|name| task.space.int(&guess, name));
        let config = task.space.config_to_json(&guess);
        let fetches_next = prefetched == NEXT_PANEL && sizes.starts_with("m=128");
        let is_ahead = (fetches_next || prefetched == 8) && task.space.text(&guess, "pack_b") == "whole";
        assert!(blocks <= 2 && is_ahead, "{sizes}: {config}");
    }
}

/// Checks what follows from the slow memory of a Xeon's core: products stream weights once rather than once
/// for each block of rows, and deep layers are direct convolutions, as Winograd's algorithm reads larger
/// weights.
#[test]
fn guesses_on_xeons_read_few_weights() {
    let mut target = Target::named("x86-64-v4").unwrap();
    (target.cpu, target.l2_bytes, target.l3_bytes) = ("emeraldrapids".into(), 2 << 20, 260 << 20);
    let task = |text: &str| {
        let workload = Workload::parse(text).unwrap();
        Task::new(TemplateSetting { workload, target: target.clone(), n_threads: 1 }, None).unwrap()
    };
    for rows in ["128", "1..128"] {
        let task = task(&format!("matmul:m={rows},n=4096,k=768,const=b"));
        let guess = task.first_guess(0).unwrap();
        let config = task.space.config_to_json(&guess);
        assert_eq!((task.space.int(&guess, "m_blocks"), &*task.space.text(&guess, "pack_b")), (1, "whole"), "{config}");
        assert_eq!(task.space.int(&guess, "prefetch_b"), NEXT_PANEL, "{config}");
    }
    let layer = "conv2d:c=512,h=7,w=7,k=512,r=3,s=3,pad=1,const=w,in=c16,out=c16";
    let task = task(layer);
    assert_eq!(task.space.text(&task.first_guess(0).unwrap(), "algorithm"), "direct");
}

/// First guesses of packed products prefetch weights that come from memory a part of a panel at a time, and
/// leave whole panels and what is near to the processor.
#[test]
fn guesses_prefetch_parts_of_panels_from_memory() {
    let far = [("m=16,n=11008,k=4096", true), ("m=4,n=4096,k=11008", true)];
    let near = [("m=1,n=11008,k=4096", false), ("m=16,n=768,k=768", false)];
    for (sizes, should_prefetch) in far.into_iter().chain(near) {
        let text = format!("packed_matmul:{sizes},int8=1,const=w+s");
        let task = task(&text, "x86-64-v4", 1, serving(&text).next().unwrap());
        let guess = task.first_guess(1).unwrap();
        let config = task.space.config_to_json(&guess);
        assert_eq!(task.space.int(&guess, "prefetch") > 0, should_prefetch, "{sizes}: {config}");
    }
}

/// A setting on a CPU of this name, otherwise like `x86-64-v4`.
fn setting_on(cpu: &str, features: &str, text: &str) -> TemplateSetting {
    let generic = setting(text, "x86-64-v4", 1);
    let target = Target { cpu: cpu.to_owned(), features: features.to_owned(), ..generic.target };
    TemplateSetting { target, ..generic }
}

/// Products of 16 bits read panels in f32, unless the CPU multiplies pairs of bf16 or few rows read the
/// panels.
#[test]
fn panels_of_16_bits_are_widened_once() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    for (cpu, sizes, dtype, expected) in [
        ("emeraldrapids", "m=64", DType::Bf16, DType::F32),
        ("emeraldrapids", "m=64", DType::F16, DType::F32),
        ("emeraldrapids", "m=4", DType::Bf16, DType::Bf16),
        ("znver5", "m=64", DType::Bf16, DType::Bf16),
        ("znver5", "m=64", DType::F16, DType::F32),
    ] {
        let text = format!("matmul:{sizes},n=96,k=64,const=b,dtype={}", dtype.name());
        let task = Task::new(setting_on(cpu, "+avx512vl,+avx512bf16", &text), Some("matmul-blocked")).unwrap();
        for _ in 0..20 {
            let program = task.program(&task.space.sample(&mut rng)).unwrap();
            let copy = program.find_buffer("B.p").map(|copy| program.buffer(copy).dtype);
            assert!(copy.is_none_or(|copied| copied == expected), "{text} on {cpu}");
        }
    }
}

/// Convolutions of 16 bits read copies in f32, unless the CPU multiplies pairs of bf16.
#[test]
fn operands_of_convolutions_of_16_bits_are_widened_once() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    for (cpu, template, dtype, copied) in [
        ("emeraldrapids", "conv-direct", DType::Bf16, [DType::F32; 2]),
        ("emeraldrapids", "conv-direct", DType::F16, [DType::F32; 2]),
        ("znver5", "conv-direct", DType::Bf16, [DType::Bf16; 2]),
        ("znver5", "conv-direct", DType::F16, [DType::F32; 2]),
        ("znver5", "conv-im2col", DType::F16, [DType::F16, DType::F32]),
    ] {
        let text = format!("conv2d:c=64,h=20,w=20,k=32,r=3,s=3,pad=1,const=w,dtype={}", dtype.name());
        let task = Task::new(setting_on(cpu, "+avx512vl,+avx512bf16", &text), Some(template)).unwrap();
        for _ in 0..20 {
            let program = task.program(&task.space.sample(&mut rng)).unwrap();
            for (name, expected) in ["X.p", "W.p"].into_iter().zip(copied) {
                let copy = program.find_buffer(name).map(|copy| program.buffer(copy).dtype);
                assert!(copy.is_none_or(|copied| copied == expected), "{name} of {text} on {cpu}");
            }
            assert!(program.find_buffer("W.p").is_some(), "{text} on {cpu} reads weights as they are");
        }
    }
}

/// First guesses of transposed convolutions of 16 bits, which convert an element for each broadcast,
/// broadcast fewer than they would in f32.
#[test]
fn guesses_of_transposed_convolutions_broadcast_few_elements_of_16_bits() {
    let text = "conv2d_transpose:c=64,h=14,w=14,k=32,r=4,s=4,stride=2,pad=1,const=w";
    let pixels = |dtype: DType| {
        let text = format!("{text},dtype={}", dtype.name());
        let task = Task::new(setting_on("emeraldrapids", "+avx512vl", &text), Some("conv-col2im")).unwrap();
        task.space.int(&task.first_guess(1).unwrap(), "pixels")
    };
    for dtype in [DType::Bf16, DType::F16] {
        assert!(2 * pixels(dtype) <= pixels(DType::F32), "{}", dtype.name());
    }
}

/// Direct convolutions read the weights of a tile from one end to the other: they lie in blocks of channels,
/// for each tap of a filter those of a block, of dot products as of other sums.
#[test]
fn weights_lie_in_the_order_of_the_sum() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    for (how, at_once) in [("dtype=u8i8", 2), ("bf16=1", 1), ("dtype=f32", 1)] {
        let text = format!("conv2d:c=64,h=9,w=9,k=64,r=3,s=3,pad=1,const=w,layout=blocked,{how}");
        let template = serving(&text).find(|t| t.name == "conv-direct").unwrap();
        let task = task(&text, "x86-64-v4", 1, template);
        for _ in 0..20 {
            let config = task.space.sample(&mut rng);
            let (c_block, program) = (task.space.int(&config, "c_block"), task.program(&config).unwrap());
            let Some(weights) = program.find_buffer("W.p") else { continue };
            let shape = &program.buffer(weights).shape;
            let of_steps = shape.get(6).copied().unwrap_or(1);
            assert_eq!(shape[1..5], [64 / c_block, 3, 3, c_block / of_steps], "{how}: {shape:?}");
            assert!(of_steps >= at_once, "{how}: {shape:?}");
        }
    }
}

/// Checks blocks of weights of many bits and columns, which have more cache lines than one iteration may
/// prefetch.
#[test]
fn every_configuration_of_packed_weights_is_legal() {
    for how in ["bits=8,block=256,int8=1", "bits=8,block=256", "bits=4,block=256,int8=1", "bits=8,block=32"] {
        let text = format!("packed_matmul:m=16,n=768,k=512,const=w+s,{how}");
        for target in ["x86-64-v3", "x86-64-v4"] {
            let task = task(&text, target, 1, serving(&text).next().unwrap());
            for config in (0..task.space.size()).map(|index| task.space.config_at(index)) {
                let (made, config) = (task.program(&config), task.space.config_to_json(&config));
                assert!(made.is_ok(), "{text} on {target}: {config}: {:?}", made.err());
            }
        }
    }
}

/// Checks that results that are large enough to be shared among threads leave no choice.
#[test]
fn only_small_problems_leave_open_what_threads_share() {
    let large =
        ["matmul-256", "matmul-512", "bert.MM3", "bert.BMM1", "dense:m=1,n=1000,k=2048", "matmul:m=256,n=256,k=65536"];
    let large = large.into_iter().chain(["resnet18.C2", "resnet18.C9", "resnet18.C12", "mobilenet.DW3"]);
    for text in large {
        for template in serving(text) {
            let space = task(text, "x86-64-v4", 2, template).space;
            let at = space.names().position(|name| name == "share");
            assert!(at.is_none_or(|at| space.n_values(at) == 1), "{text}");
        }
    }
    for text in LONG_SUMS {
        for template in serving(text) {
            assert!(task(text, "x86-64-v4", 1, template).space.names().all(|name| name != "share"), "{text}");
        }
    }
}

/// Checks that products have the same parameters at every number of rows and at ranges of them, so that
/// knowledge of one carries over to every other, and that older records, which lack the parameters that only
/// few rows have, are still read.
#[test]
fn configurations_of_products_carry_over_to_every_number_of_rows() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(23);
    let sizes = ["1", "2", "4", "8", "16", "32", "48", "64", "100", "128", "256", "512", "1..512", "32..256/32"];
    let texts = ["dense:n=768,k=768,const=w,epilogue=bias", "batch_matmul:b=12,n=128,k=64,tb=1", "matmul:n=96,k=64"];
    for (text, n_threads) in texts.into_iter().flat_map(|text| [(text, 1), (text, 2)]) {
        let at = |m: &str| task(&format!("{text},m={m}"), "x86-64-v4", n_threads, &TEMPLATES[0]);
        let tasks = sizes.map(at);
        let names = |task: &Task| task.space.names().map(str::to_owned).collect::<Vec<_>>();
        for from in &tasks {
            assert_eq!(names(from), names(&tasks[0]), "{text}");
            let blocked = match from.space.names().position(|name| name == "algorithm") {
                Some(at) => from.space.part(at, 0).unwrap(),
                None => (*from.space).clone(),
            };
            let config = sharing(&blocked, "result").unwrap_or(blocked).sample(&mut rng);
            let json = from.space.config_to_json(&config);
            for to in &tasks {
                assert!(to.space.nearest_to_json(&json).is_some(), "{} from {json}", to.setting.workload);
            }
            let mut old = json;
            let only_few = ["algorithm", "tile_m", "tile_n", "tiles"];
            old.as_object_mut().unwrap().retain(|name, _| !only_few.contains(&name.as_str()));
            assert_eq!(from.space.config_from_json(&old).unwrap(), config, "{old}");
        }
    }
}

/// Checks that records of versions that shared only the result keep their meaning.
#[test]
fn configurations_that_do_not_say_what_threads_share_share_the_result() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(17);
    for text in ["matmul:m=32,n=32,k=32", "matmul:m=8,n=8,k=100000", "conv2d:c=8,h=10,w=10,k=8,r=3,s=3,pad=1"] {
        for template in serving(text).filter(|t| t.estimate.is_some()) {
            let task = task(text, "x86-64-v4", 2, template);
            let part = sharing(&task.space, "result").unwrap();
            for _ in 0..10 {
                let config = part.sample(&mut rng);
                let mut json = task.space.config_to_json(&config);
                json.as_object_mut().unwrap().remove("share").unwrap();
                assert_eq!(task.space.config_from_json(&json).unwrap(), config, "{json}");
                assert_eq!(task.space.nearest_to_json(&json).unwrap(), config, "{json}");
            }
        }
    }
}

#[test]
fn first_guesses_share_what_is_there_to_share() {
    for (text, what) in [
        ("matmul:m=8,n=8,k=1000000", "sum"),
        ("dense:m=1,n=1,k=100000", "sum"),
        ("dense:m=1,n=10,k=1000000,const=w", "sum"),
        ("matmul:m=16,n=16,k=16", "nothing"),
        ("dense:m=1,n=64,k=64", "nothing"),
        ("matmul:m=79,n=79,k=79", "result"),
    ] {
        let task = task(text, "x86-64-v4", 2, serving(text).next().unwrap());
        let guess = task.first_guess(0).unwrap();
        assert_eq!(task.space.text(&guess, "share"), what, "{text}: {}", task.space.config_to_json(&guess));
    }
}

/// Checks that weights from memory are multiplied in blocks, unless there is a single row.
#[test]
fn first_guesses_of_few_rows_are_of_the_faster_algorithm() {
    for (text, algorithm) in [
        ("dense:m=1,n=1024,k=512,const=w", "dot"),
        ("dense:m=8,n=1024,k=512,const=w", "blocked"),
        ("dense:m=12,n=768,k=768,const=w", "blocked"),
        ("dense:m=3,n=384,k=384", "dot"),
    ] {
        let task = task(text, "x86-64-v4", 1, serving(text).next().unwrap());
        let guess = task.first_guess(0).unwrap();
        assert_eq!(task.space.text(&guess, "algorithm"), algorithm, "{text}: {}", task.space.config_to_json(&guess));
    }
}

/// Checks that guesses include every algorithm, except those that the model predicts to be hopeless.
#[test]
fn guesses_are_of_every_algorithm() {
    for text in [
        "matmul:m=16,n=512,k=512",
        "resnet18.C1",
        "resnet18.C2",
        "resnet18.C3:layout=blocked",
        "resnet18.C9",
        "resnet18.C12:const=w,layout=blocked",
        "depthwise_conv2d:c=32,h=112,w=112,r=3,s=3,pad=1",
        "conv2d_transpose:c=64,h=8,w=8,k=32,r=4,s=4,stride=2,pad=1,const=w",
    ] {
        let setting = TemplateSetting {
            workload: Workload::parse(text).unwrap(),
            target: Target::named("x86-64-v4").unwrap(),
            n_threads: 1,
        };
        let task = Task::new(setting, None).unwrap();
        let Some(at) = task.space.names().position(|name| name == "algorithm") else {
            assert_eq!(task.guesses(1).len(), 16, "{text}");
            continue;
        };
        let guesses = task.guesses(1);
        for which in 0..task.space.n_values(at) {
            let n_guesses = guesses.iter().filter(|config| config.ranks()[at] == which).count();
            let n_ranked = task.space.part(at, which).unwrap().size().min(64);
            assert!(
                n_guesses >= 15.min(n_ranked as usize / 5),
                "{text}: {n_guesses} of {}",
                task.space.value_at(at, which)
            );
        }
    }
}
