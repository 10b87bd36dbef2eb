//! Tests of the template of nests: every configuration is legal and computes the nest, and first guesses are
//! vectorized.

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::expr::ReduceOp;
use tilewright_ir::index::Ranges;
use tilewright_ir::op::Workload;
use tilewright_ir::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt, Target, interp, lower, verify};
use tilewright_search::Config;
use tilewright_tune::{Task, TemplateSetting};

/// Nests of the tests, by name.
fn nests() -> impl Iterator<Item = (&'static str, Workload)> {
    let lines = include_str!("../../../tests/nests.txt").lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| {
        let (name, text) = line.split_once(' ').expect("a name, then the workload");
        (name, Workload::parse(text).unwrap_or_else(|e| panic!("{name}: {e}")))
    })
}

fn task(workload: Workload, target: &str, n_threads: usize) -> Task {
    let label = workload.label();
    Task::new(TemplateSetting { workload, target: Target::named(target).unwrap(), n_threads }, None)
        .unwrap_or_else(|e| panic!("{label}: {e}"))
}

fn output(program: &Program) -> Vec<f64> {
    let of = |(id, b): (tilewright_ir::BufferId, &tilewright_ir::Buffer)| {
        let n = b.n_elements().unwrap() as usize;
        match b.role {
            Role::Output => vec![0.0; n],
            _ if !b.dtype.is_float() => {
                (0..n).map(|i| b.dtype.round(((i * 7 + id.0 as usize * 3) % 11) as f64 - 5.0)).collect()
            }
            _ => (0..n).map(|i| ((i * 7 + id.0 as usize * 3) % 11) as f64 / 8.0 - 0.5).collect(),
        }
    };
    let mut arguments: Vec<Vec<f64>> = program.arguments().map(of).collect();
    interp::run(program, &mut arguments).unwrap_or_else(|fault| panic!("{fault}\n{program}"));
    let at = program.arguments().position(|(_, b)| b.role == Role::Output).unwrap();
    arguments.swap_remove(at)
}

fn check(name: &str, task: &Task, config: &Config, expected: &[f64]) {
    let case = format!("{name} on {}, {}", task.setting.target.cpu, task.space.config_to_json(config));
    let scheduled = task.program(config).unwrap_or_else(|(at, e)| panic!("{case}: step {}: {e}", at + 1));
    verify::verify(&scheduled).unwrap_or_else(|e| panic!("{case}: {e}\n{scheduled}"));
    let lowered = lower::lower_verified(&scheduled);
    for program in [&scheduled, &lowered] {
        for (at, (got, expected)) in output(program).iter().zip(expected).enumerate() {
            let close = got == expected || (got - expected).abs() <= 1e-5 * (1.0 + expected.abs());
            assert!(close, "{case}: element {at} is {got} instead of {expected}\n{program}");
        }
    }
}

#[test]
fn every_configuration_computes_the_nest() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    for (name, workload) in nests() {
        let expected = output(&workload.program());
        for (target, n_threads) in [("x86-64-v4", 1), ("x86-64-v3", 2), ("x86-64", 3)] {
            let task = task(workload.clone(), target, n_threads);
            let guess = task.first_guess(0).expect("there is a guess");
            for config in [guess].into_iter().chain((0..6).map(|_| task.space.sample(&mut rng))) {
                check(name, &task, &config, &expected);
            }
        }
    }
}

/// Number of loops of this kind in the program of the first guess.
fn n_guessed(name: &str, n_threads: usize, kind: LoopKind) -> usize {
    n_guessed_of(nests().find(|(n, _)| *n == name).unwrap().1, n_threads, kind)
}

fn n_guessed_of(workload: Workload, n_threads: usize, kind: LoopKind) -> usize {
    let task = task(workload, "x86-64-v4", n_threads);
    let program = task.program(&task.first_guess(0).unwrap()).unwrap();
    let mut n = 0;
    program.body.iter().for_each(|s| s.walk(&mut |s| n += usize::from(matches!(s, Stmt::For(l) if l.kind == kind))));
    n
}

#[test]
fn guesses_use_vectors_and_threads() {
    for (name, _) in nests().filter(|(name, _)| !["scalar"].contains(name)) {
        assert!(n_guessed(name, 1, LoopKind::Vectorized) > 0, "{name}");
    }
    // Each of four stages, and the halves of the lanes of two.
    assert!(n_guessed("softmax", 1, LoopKind::Vectorized) >= 4);
    let (_, softmax) = nests().find(|(name, _)| *name == "softmax").unwrap();
    let softmax = task(softmax, "x86-64-v4", 1);
    let program = softmax.program(&softmax.first_guess(0).unwrap()).unwrap();
    let rows = program.body.iter().filter(|s| matches!(s, Stmt::For(_))).count();
    assert_eq!(rows, 1, "all stages are in the loop over rows\n{program}");
    assert_eq!(n_guessed("slice", 2, LoopKind::Parallel), 0);
    let (_, softmax) = nests().find(|(name, _)| *name == "softmax").unwrap();
    let longer = softmax.to_string().replace("33", "3300");
    assert_eq!(n_guessed_of(Workload::parse(&longer).unwrap(), 2, LoopKind::Parallel), 1);
}

/// Checks that loops add to registers, though no loop over rows is around them.
#[test]
fn guesses_keep_sums_in_registers() {
    for name in ["sum_all", "sum_columns"] {
        let (_, workload) = nests().find(|(n, _)| *n == name).unwrap();
        let task = task(workload, "x86-64-v4", 1);
        let program = task.program(&task.first_guess(0).unwrap()).unwrap();
        let mut n_added = 0;
        program.body.iter().for_each(|s| {
            s.walk(&mut |s| {
                let Stmt::For(l) = s else { return };
                let is_step = l.kind == LoopKind::Serial && l.extent.as_const() != Some(1);
                l.body.iter().filter(|_| is_step).for_each(|s| {
                    s.walk(&mut |s| {
                        let Stmt::Update { buffer, index, .. } = s else { return };
                        let is_moved = index.iter().any(|i| i.uses(l.var));
                        let scope = program.buffer(*buffer).scope;
                        assert!(is_moved || scope == Scope::Register, "{name}\n{program}");
                        n_added += usize::from(!is_moved);
                    });
                });
            });
        });
        assert!(n_added > 0, "{name}\n{program}");
    }
}

/// Maximum number of values that a program adds sequentially into one element.
fn longest_sum(program: &Program) -> i64 {
    fn walk(program: &Program, block: &[Stmt], around: &mut Vec<(LoopId, i64)>, ranges: &mut Ranges, most: &mut i64) {
        for stmt in block {
            match stmt {
                Stmt::For(l) => {
                    around.push((l.var, ranges.upper(&l.extent).expect("sizes are known")));
                    ranges.push(l.var, l.extent.clone());
                    walk(program, &l.body, around, ranges, most);
                    ranges.pop();
                    around.pop();
                }
                Stmt::If { then, otherwise, .. } => {
                    walk(program, then, around, ranges, most);
                    walk(program, otherwise, around, ranges, most);
                }
                Stmt::Update { buffer, index, op: ReduceOp::Sum, .. } => {
                    // Inside the allocation of the element, each iteration of a loop that does not move it
                    // adds to it.
                    let made = allocated_in(program, *buffer);
                    let inside = around.iter().skip_while(|(var, _)| made.contains(var));
                    let n = inside.filter(|(var, _)| !index.iter().any(|i| i.uses(*var))).map(|(_, n)| n).product();
                    *most = (*most).max(n);
                }
                _ => {}
            }
        }
    }
    let mut most = 0;
    walk(program, &program.body, &mut Vec::new(), &mut Ranges::default(), &mut most);
    most
}

/// Loops in which a buffer is allocated anew.
fn allocated_in(program: &Program, buffer: BufferId) -> Vec<LoopId> {
    fn find(block: &[Stmt], buffer: BufferId) -> Option<Vec<LoopId>> {
        block.iter().find_map(|stmt| match stmt {
            Stmt::Alloc(b) if *b == buffer => Some(Vec::new()),
            Stmt::For(l) => find(&l.body, buffer).map(|inner| [vec![l.var], inner].concat()),
            _ => None,
        })
    }
    find(&program.body, buffer).unwrap_or_default()
}

/// Checks sums of blocks of channels, of rows, of all elements, and of a prime number of elements.
#[test]
fn no_configuration_adds_up_many_numbers_in_one_place() {
    let sum = |shape: &[i64], kept: &[usize]| {
        let list = |of: &dyn Fn(usize) -> String, at: &[usize]| at.iter().map(|d| of(*d)).collect::<Vec<_>>().join(",");
        let all: Vec<usize> = (0..shape.len()).collect();
        let reduced: Vec<usize> = all.iter().copied().filter(|d| !kept.contains(d)).collect();
        let out = if kept.is_empty() { "1".to_owned() } else { list(&|d| shape[d].to_string(), kept) };
        let at = if kept.is_empty() { "0".to_owned() } else { list(&|d| format!("i{d}"), kept) };
        let first: Vec<String> = reduced.iter().map(|d| format!("i{d}==0")).collect();
        let mut body = format!("y[{at}]+=x[{}]first {}", list(&|d| format!("i{d}"), &all), first.join("&&"));
        for d in kept.iter().chain(&reduced).rev() {
            body = format!("for i{d} in {}{{{body}}}", shape[*d]);
        }
        let loops = list(&|d| format!("i{d}"), &all);
        let sizes = list(&|d| shape[d].to_string(), &all);
        let text = format!(
            "nest:buffer x:f32[{sizes}]global input buffer y:f32[{out}]global output loops {loops} run{{{body}}}"
        );
        Workload::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    };
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    for (shape, kept) in [
        (vec![2, 40, 50, 16], vec![0, 3]),
        (vec![2003, 16], vec![1]),
        (vec![3, 200, 130], vec![0]),
        (vec![200_003], vec![]),
        (vec![3000, 3, 7], vec![]),
    ] {
        let workload = sum(&shape, &kept);
        let expected = output(&workload.program());
        for target in ["x86-64-v4", "x86-64"] {
            let task = task(workload.clone(), target, 2);
            let guess = task.first_guess(0).expect("there is a guess");
            for config in [guess].into_iter().chain((0..4).map(|_| task.space.sample(&mut rng))) {
                check(&format!("{shape:?}"), &task, &config, &expected);
                let program = task.program(&config).unwrap();
                let n = longest_sum(&program);
                assert!(n <= 1024, "{n} of {shape:?}, {}\n{program}", task.space.config_to_json(&config));
            }
        }
    }
}
