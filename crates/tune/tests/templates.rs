//! Every template on shapes that divide nothing: schedules are legal, and scheduled and lowered programs compute what
//! the untransformed ones do.

use std::collections::BTreeSet;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Role, Target, interp, lower, verify};
use tilewright_tune::{Config, Setting, TEMPLATES, Task};

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
        check(text, |_| true, 12, &mut rng);
    }
}

/// Strides above the filter, that the filter is no multiple of, unlike along the two axes, as long as vectors; with padding
/// on each side and at the end of the output, dilation with and without a divisor in common with the stride.
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
        check(&format!("conv2d_transpose:{sizes}"), |name| name == "conv-col2im", 6, &mut rng);
    }
}

/// Checks random configurations of those templates that serve a workload.
fn check(text: &str, is_checked: fn(&str) -> bool, n_configs: usize, rng: &mut Xoshiro256PlusPlus) {
    let workload = Workload::parse(text).unwrap();
    let expected = outputs(&workload.program());
    for (target, n_threads) in [("x86-64-v4", 1), ("x86-64-v3", 2), ("x86-64", 1)] {
        let target = Target::named(target).unwrap();
        for template in TEMPLATES.iter().filter(|t| (t.serves)(&workload) && is_checked(t.name)) {
            let setting = Setting { workload: workload.clone(), target: target.clone(), n_threads };
            let task = Task::new(setting, Some(template.name)).unwrap_or_else(|e| panic!("{text}: {e}"));
            for _ in 0..n_configs {
                let config = task.space.sample(rng);
                let json = task.space.config_to_json(&config);
                let case = format!("{text} {} {} {json}", template.name, target.cpu);
                let scheduled = task.program(&config).unwrap_or_else(|(at, e)| panic!("{case}: step {}: {e}", at + 1));
                verify::verify(&scheduled).unwrap_or_else(|e| panic!("{case}: {e}\n{scheduled}"));
                let lowered = lower::lower_verified(&scheduled);
                verify::verify(&lowered).unwrap_or_else(|e| panic!("{case}: {e}\n{lowered}"));
                assert_eq!(outputs(&scheduled), expected, "{case}, scheduled\n{scheduled}");
                assert_eq!(outputs(&lowered), expected, "{case}, lowered\n{lowered}");
            }
        }
    }
}

/// A record keeps its meaning where an algorithm comes to its template later: it lacks that one's own parameters.
#[test]
fn records_from_before_an_algorithm_came_are_read() {
    let workload = Workload::parse("conv2d_transpose:c=64,h=8,w=8,k=32,r=4,s=4,stride=2,pad=1").unwrap();
    let setting = Setting { workload, target: Target::named("x86-64-v4").unwrap(), n_threads: 1 };
    let task = Task::new(setting, Some("conv")).unwrap();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
    let mut n_read = 0;
    while n_read < 20 {
        let config = task.space.sample(&mut rng);
        let mut json = task.space.config_to_json(&config);
        let fields = json.as_object_mut().unwrap();
        fields.retain(|name, _| !["k_block", "y_tile", "pixels"].contains(&name.as_str()));
        match task.space.text(&config, "algorithm").as_str() {
            "col2im" => {
                let refused = task.space.config_from_json(&json).unwrap_err().to_string();
                assert!(refused.ends_with("is missing"), "{refused}");
            }
            _ => {
                assert_eq!(task.space.config_from_json(&json), Ok(config));
                n_read += 1;
            }
        }
    }
}

/// The model sees what inserted zeros cost: where there are many, the first guess is the algorithm without them, and no
/// guess is one that walks over them.
#[test]
fn guesses_insert_few_zeros() {
    for sizes in ["c=1026,h=1,w=224,k=1,r=1,s=1024,stride_w=256", "c=256,h=10,w=10,k=64,r=5,s=5,stride=32,const=w"] {
        for target in ["x86-64-v4", "x86-64-v3"] {
            let workload = Workload::parse(&format!("conv2d_transpose:{sizes}")).unwrap();
            let setting = Setting { workload, target: Target::named(target).unwrap(), n_threads: 1 };
            let task = Task::new(setting, None).unwrap();
            let of = |config: &Config| task.space.text(config, "algorithm");
            assert_eq!(of(&task.first_guess(1).unwrap()), "col2im", "{sizes}");
            let algorithms: BTreeSet<String> = task.guesses(1).iter().map(of).collect();
            assert_eq!(algorithms, ["col2im".to_owned()].into(), "{sizes}");
        }
    }
}
