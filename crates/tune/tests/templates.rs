//! Every template on shapes that divide nothing: schedules are legal, and scheduled and lowered programs compute what
//! the untransformed ones do.

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Role, Target, interp, lower, verify};
use tilewright_tune::{Setting, TEMPLATES, Task};

/// Runs a program on small whole numbers, which no order of summation rounds.
fn outputs(program: &Program) -> Vec<Vec<f64>> {
    let mut arguments: Vec<Vec<f64>> = program
        .arguments()
        .map(|(id, b)| {
            let n = b.n_elements().unwrap() as usize;
            match b.role {
                Role::Output => vec![0.0; n],
                _ => (0..n).map(|i| ((i * 7 + id.0 as usize * 3) % 11) as f64 - 5.0).collect(),
            }
        })
        .collect();
    interp::run(program, &mut arguments).unwrap_or_else(|fault| panic!("{fault}\n{program}"));
    let written = program.arguments().map(|(_, b)| b.role == Role::Output);
    arguments.into_iter().zip(written).filter(|(_, w)| *w).map(|(a, _)| a).collect()
}

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
        "dense:m=13,n=37,k=35",
        "dense:m=1,n=40,k=33,const=w,epilogue=bias",
    ];
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    for text in shapes {
        let workload = Workload::parse(text).unwrap();
        let expected = outputs(&workload.program());
        for (target, n_threads) in [("x86-64-v4", 1), ("x86-64-v3", 2), ("x86-64", 1)] {
            let target = Target::named(target).unwrap();
            for template in TEMPLATES.iter().filter(|t| (t.serves)(&workload)) {
                let setting = Setting { workload: workload.clone(), target: target.clone(), n_threads };
                let task = Task::new(setting, Some(template.name)).unwrap_or_else(|e| panic!("{text}: {e}"));
                for _ in 0..12 {
                    let config = task.space.sample(&mut rng);
                    let json = task.space.config_to_json(&config);
                    let case = format!("{text} {} {} {json}", template.name, target.cpu);
                    let scheduled =
                        task.program(&config).unwrap_or_else(|(at, e)| panic!("{case}: step {}: {e}", at + 1));
                    verify::verify(&scheduled).unwrap_or_else(|e| panic!("{case}: {e}\n{scheduled}"));
                    let lowered = lower::lower_verified(&scheduled);
                    verify::verify(&lowered).unwrap_or_else(|e| panic!("{case}: {e}\n{lowered}"));
                    assert_eq!(outputs(&scheduled), expected, "{case}, scheduled\n{scheduled}");
                    assert_eq!(outputs(&lowered), expected, "{case}, lowered\n{lowered}");
                }
            }
        }
    }
}
