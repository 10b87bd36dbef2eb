//! Tests of schedules of products and convolutions with a dynamic number of rows.

use std::sync::Arc;

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::interp::{run, run_at};
use tilewright_ir::lower::{lower, lower_verified};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::random_argument;
use tilewright_ir::schedule::apply_all;
use tilewright_ir::text::parse;
use tilewright_ir::verify::verify;
use tilewright_ir::{LoopKind, Program, Role, Stmt, Target};
use tilewright_tune::{Task, TaskError, TemplateSetting};

const FAMILIES: [&str; 24] = [
    "dense:m=1..19,n=37,k=21,const=w,epilogue=bias+relu",
    "dense:m=1..40,n=16,k=9,const=w",
    "dense:m=3..27/4,n=33,k=40",
    "dense:m=1..21,n=20,k=12,const=w,epilogue=bias+add+gelu",
    "dense:m=1..20,n=64,k=33,const=w,epilogue=silu+gated(4)",
    "matmul:m=1..23,n=18,k=11,const=b",
    "matmul:m=2..20/2,n=40,k=8",
    "batch_matmul:b=3,m=1..13,n=9,k=10,tb=1",
    "heads_matmul:b=2,m=1..17,n=12,k=8,ha=1,hb=1,hc=1",
    "batch_matmul:b=2,m=1..13,n=16..64/16,k=10,tb=1",
    "heads_matmul:b=2,m=1..9,n=1..21,k=8,tb=1,ha=1,hb=1,epilogue=linear(0.5;0)",
    "batch_matmul:b=2,m=1..11,n=17,k=1..23",
    "heads_matmul:b=2,m=5,n=8,k=1..19,hb=1,hc=1",
    "conv2d:c=5,h=1..9,w=11,k=9,r=3,s=3,pad=1,const=w+bias,epilogue=bias+add+relu",
    "conv2d:c=16,h=4..12/4,w=6,k=20,r=1,s=1,const=w,in=c16",
    "conv2d:c=16,h=2..12/2,w=10,k=16,r=3,s=3,stride=2,pad=1,const=w,in=c16,out=c16",
    "conv2d:c=3,h=4..12/2,w=20,k=12,r=2,s=2,pad_bottom=1,pad_right=1,const=w",
    "conv2d:c=8,h=3..9/3,w=9,k=8,r=5,s=3,groups=2,stride_h=3,pad_top=2,dilation_w=2,pad_left=1",
    "conv2d:c=16,h=3..14,w=2,k=16,r=2,s=2,const=w,in=c16,out=c16",
    "conv2d:c=5,h=1..13,w=3,k=9,r=3,s=3,pad_top=1,pad_bottom=1,const=w+bias,epilogue=bias+relu",
    "depthwise_conv2d:c=16,h=1..10,w=9,r=7,s=7,pad=3,const=w+bias,in=c16,out=c16,epilogue=bias",
    "depthwise_conv2d:c=6,h=3..13/2,w=18,r=3,s=3,stride_w=2,pad=1",
    "conv2d_transpose:c=6,h=1..9,w=8,k=5,r=2,s=2,stride=2,const=w",
    "conv2d_transpose:c=16,h=2..8/2,w=5,k=16,r=3,s=3,stride=2,pad=1,out_pad=1,const=w,in=c16,out=c16,epilogue=relu",
];

/// Families with dynamic columns that dot products along the reduction also support.
const FAMILIES_OF_DOTS: [&str; 3] = [
    "batch_matmul:b=2,m=3,n=16..64/16,k=21,tb=1,epilogue=linear(0.125;0)",
    "heads_matmul:b=2,m=1,n=4..28/4,k=19,tb=1,hb=1",
    "dense:m=5,n=6..33/3,k=33",
];

/// Families that algorithms other than the direct one compute, too.
const FAMILIES_OF_ALGORITHMS: [(&str, &str); 14] = [
    ("conv2d:c=6,h=4..16/4,w=10,k=12,r=3,s=3,pad=1,const=w+bias,epilogue=bias+relu", "winograd"),
    ("conv2d:c=16,h=2..14/2,w=9,k=16,r=3,s=3,pad=1,const=w,in=c16,out=c16", "winograd"),
    ("conv2d:c=5,h=6..18/4,w=9,k=7,r=3,s=3", "winograd"),
    ("conv2d_transpose:c=6,h=4..16/4,w=9,k=1,r=2,s=2,stride=2,const=w,epilogue=sigmoid", "col2im"),
    ("conv2d_transpose:c=9,h=2..11/3,w=8,k=16,r=3,s=2,stride_h=3,stride_w=2", "col2im"),
    ("conv2d_transpose:c=5,h=1..9,w=7,k=8,r=4,s=4,stride=2,pad=1", "col2im"),
    ("conv2d_transpose:c=4,h=2..10/2,w=5,k=16,r=3,s=3,stride=2,pad=1,out_pad=1,const=w+bias,epilogue=bias", "col2im"),
    ("conv2d_transpose:c=7,h=3..15/3,w=1,k=12,r=16,s=1,stride_h=4,pad_top=6,pad_bottom=6,const=w", "col2im"),
    ("conv2d_transpose:c=3,h=1..7,w=6,k=9,r=1,s=3,stride_h=3,stride_w=2", "col2im"),
    ("conv2d_transpose:c=3,h=2..8/2,w=6,k=4,r=5,s=2,stride_h=1,stride_w=2,pad_top=2,pad_bottom=1", "col2im"),
    ("conv2d_transpose:c=3,h=2..8/2,w=6,k=4,r=3,s=2,stride=2,dilation_h=2,pad_top=1", "col2im"),
    ("conv2d_transpose:c=4,h=2..8/3,w=5,k=6,r=3,s=5,stride_h=3,stride_w=4,dilation_h=2,pad=2", "col2im"),
    ("conv2d_transpose:c=3,h=1..6,w=4,k=1,r=4,s=4,stride=4", "col2im"),
    ("conv2d_transpose:c=3,h=2..8/2,w=4,k=2,r=3,s=16,stride_h=2,stride_w=16,pad_top=1", "col2im"),
];

fn task(text: &str, target: &str, n_threads: usize, template: Option<&str>) -> Task {
    let (workload, target) = (Workload::parse(text).unwrap(), Target::named(target).unwrap());
    Task::new(TemplateSetting { workload, target, n_threads }, template).unwrap()
}

/// Marks the elements of an argument that are inside a member: those of the member's buffer of the same name,
/// in order.
fn inside(program: &Program, member: &Program, at: usize) -> Vec<bool> {
    let mut shapes = [program, member].map(|p| p.arguments().nth(at).unwrap().1.shape.clone());
    // Dimensions that are flattened to a single one in a member.
    let [whole, part] = &mut shapes;
    if whole.len() >= 4 && part[2] == 1 {
        (part[2], part[3]) = (part[3] / whole[3], whole[3]);
    }
    let n: i64 = shapes[0].iter().product();
    let is_inside = |mut element: i64| {
        shapes[0].iter().zip(&shapes[1]).rev().all(|(whole, part)| {
            let subscript = element % whole;
            element /= whole;
            subscript < *part
        })
    };
    (0..n).map(is_inside).collect()
}

/// Runs a family at a size, on inputs that are NaN beyond its rows, and its member. Returns each argument of
/// both, without the family's elements beyond the rows.
fn both(family: &Program, member: &Program, size: &[i64]) -> Vec<[Vec<f64>; 2]> {
    const FENCE: f64 = 12345.0;
    let mut small: Vec<Vec<f64>> =
        member.arguments().map(|(id, _)| random_argument(member, id, u64::from(id.0) + 1)).collect();
    let parts: Vec<Vec<bool>> = (0..small.len()).map(|at| inside(family, member, at)).collect();
    let mut large: Vec<Vec<f64>> = family
        .arguments()
        .zip(&parts)
        .zip(&small)
        .map(|(((_, buffer), part), small)| {
            let beyond = if buffer.role == Role::Output { FENCE } else { f64::NAN };
            let mut values = small.iter();
            part.iter().map(|inside| if *inside { *values.next().unwrap() } else { beyond }).collect()
        })
        .collect();
    run(member, &mut small).unwrap();
    run_at(family, size, &mut large).unwrap_or_else(|e| panic!("{size:?}: {e}\n{family}"));
    let arguments = family.arguments().zip(parts).zip(large);
    let inside = arguments.map(|(((_, buffer), part), large)| {
        let (inside, beyond): (Vec<_>, Vec<_>) = large.into_iter().zip(part).partition(|(_, inside)| *inside);
        let is_untouched = |x: f64| if buffer.role == Role::Output { x == FENCE } else { x.is_nan() };
        assert!(beyond.iter().all(|(x, _)| is_untouched(*x)), "{}: {size:?}, written beyond\n{family}", buffer.name);
        inside.into_iter().map(|(x, _)| x).collect()
    });
    inside.zip(small).map(|(family, member)| [family, member]).collect()
}

/// Every value of each dynamic size, with cycling values of the others.
fn sizes(workload: &Workload) -> Vec<Vec<i64>> {
    let values: Vec<Vec<i64>> = workload.open_sizes().map(|(_, range)| range.values().collect()).collect();
    let n = values.iter().map(Vec::len).max().unwrap();
    let at =
        |i: usize, turn: usize| values.iter().enumerate().map(|(d, all)| all[(i + d * turn) % all.len()]).collect();
    (0..n).flat_map(|i| [at(i, 0), at(i, 5)]).collect()
}

/// Checks that families give bitwise the results of the member scheduled by the same steps, at every size,
/// and neither read nor write beyond its rows, before and after lowering.
#[test]
fn families_compute_what_their_members_do_at_every_size() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(31);
    let n_configs = std::env::var("TILEWRIGHT_CONFIGS").map_or(2, |n| n.parse().unwrap());
    let of_dots = FAMILIES_OF_DOTS.into_iter().map(|text| (text, Some("matmul-dot")));
    let of_algorithms = FAMILIES_OF_ALGORITHMS.into_iter().map(|(text, algorithm)| (text, None, Some(algorithm)));
    let all = FAMILIES.into_iter().map(|text| (text, None)).chain(of_dots);
    let all = all.map(|(text, template)| (text, template, None)).chain(of_algorithms);
    for ((text, template, algorithm), n_threads) in all.flat_map(|family| [(family, 1), (family, 2)]) {
        let task = task(text, if n_threads == 1 { "x86-64-v4" } else { "x86-64-v3" }, n_threads, template);
        let workload = &task.setting.workload;
        let space = match algorithm {
            None => task.space.clone(),
            Some(name) => {
                let at = task.space.names().position(|name| name == "algorithm").unwrap();
                let mut parts =
                    (0..task.space.n_values(at)).filter_map(|which| task.space.part(at, which).map(Arc::new));
                parts.find(|part| part.text(&part.config_at(0), "algorithm") == name).unwrap()
            }
        };
        for _ in 0..n_configs {
            let config = space.sample(&mut rng);
            let steps = task.steps(&config);
            let json = task.space.config_to_json(&config);
            let scheduled = task.program(&config).unwrap_or_else(|(at, e)| panic!("{text} {json}: step {at}: {e}"));
            verify(&scheduled).unwrap_or_else(|e| panic!("{text} {json}: {e}\n{scheduled}"));
            assert_eq!(parse(&scheduled.to_string()).unwrap(), scheduled);
            let lowered = lower_verified(&scheduled);
            assert_eq!(parse(&lowered.to_string()).unwrap(), lowered);
            for size in sizes(workload) {
                let member = workload.at(&size).unwrap().program();
                let member =
                    lower(&apply_all(&member, &steps).unwrap_or_else(|(at, e)| panic!("{size:?}: step {at}: {e}")));
                for program in [&scheduled, &lowered] {
                    for [family, member] in both(program, &member, &size) {
                        assert_eq!(family, member, "{text} {json}, {size:?}\n{program}");
                    }
                }
            }
        }
    }
}

/// Checks that a family has first guesses, even if a member with a single column could be computed in another
/// way.
#[test]
fn families_have_first_guesses() {
    let of_algorithms = FAMILIES_OF_ALGORITHMS.map(|(text, _)| text);
    for text in FAMILIES.into_iter().chain(of_algorithms).chain(["matmul:m=1,n=1..8,k=256"]) {
        let task = task(text, "x86-64-v4", 1, None);
        let guesses = task.guesses(1);
        assert!(!guesses.is_empty() && guesses.iter().all(|config| task.program(config).is_ok()), "{text}");
    }
}

/// Checks that members of few rows are not charged for blocks that they do not have: each would read weights
/// that no cache holds once more.
#[test]
fn small_members_have_fewer_blocks() {
    let mut target = Target::named("x86-64-v4").unwrap();
    target.cpu = "emeraldrapids".to_owned();
    let workload = Workload::parse("matmul:m=1..512,n=1024,k=1536,const=b").unwrap();
    let task = Task::declared(TemplateSetting { workload, target, n_threads: 1 }, None).unwrap();
    let cycles = |m_blocks: i64| {
        let config = serde_json::json!({
            "mr": 14, "nv": 2, "m_blocks": m_blocks, "n_blocks": 1, "k_blocks": 1, "order": ["ic", "jc", "pc"],
            "inner": "jr-ir", "pack_a": "none", "pack_b": "whole", "unroll_k": 4, "prefetch_a": "false",
            "prefetch_b": 1024, "prefetch_c": "false",
        });
        let config = task.space.config_from_json(&config).unwrap();
        task.template.estimate.unwrap()(&task.setting, &task.space, &config)
    };
    let ratio = cycles(8) / cycles(4);
    assert!((0.9..1.2).contains(&ratio), "{ratio}");
}

/// Checks that no tile of a family is computed by loops over the remaining rows: each number of them has
/// separate code.
#[test]
fn tails_of_register_tiles_are_unrolled() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(7);
    for text in ["dense:m=1..512,n=768,k=768,const=w,epilogue=bias", "matmul:m=1..300,n=100,k=60,const=b"] {
        let task = task(text, "x86-64-v4", 1, None);
        for config in task.guesses(1).into_iter().take(4).chain((0..8).map(|_| task.space.sample(&mut rng))) {
            let lowered = lower(&task.program(&config).unwrap());
            let is_register = |b: &tilewright_ir::BufferId| lowered.buffer(*b).scope == tilewright_ir::Scope::Register;
            for s in &lowered.body {
                s.walk(&mut |s| {
                    let Stmt::For(l) = s else { return };
                    let is_open = l.extent.as_const().is_none() && l.kind == LoopKind::Serial;
                    let mut index_of_tile = false;
                    l.body.iter().for_each(|s| {
                        s.walk(&mut |s| {
                            index_of_tile |= s
                                .own_write()
                                .is_some_and(|(b, index)| is_register(&b) && index.iter().any(|i| i.uses(l.var)));
                        })
                    });
                    assert!(!(is_open && index_of_tile), "{text} {}\n{lowered}", task.space.config_to_json(&config));
                });
            }
        }
    }
}

#[test]
fn what_is_no_family_is_refused() {
    let check = |text: &str, expected: &str| {
        let error = Workload::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    };
    check("dense:m=5..5,n=3,k=4", "`m=5..5` is not accepted; expected LEAST..MOST or LEAST..MOST/STEP");
    check("dense:m=5..1,n=3,k=4", "`m=5..1` is not accepted");
    check("dense:m=0..4,n=3,k=4", "an integer from 1 to");
    check("dense:m=1..,n=3,k=4", "`m=1..` is not accepted");
    check("dense:m=1..8/2,n=3,k=4", "`m=1..8/2` is not accepted");
    check("dense:m=1..9/0,n=3,k=4", "`m=1..9/0` is not accepted");
    check("dense:m=-9223372036854775808..9223372036854775807,n=3,k=4", "is not accepted");
    check("batch_matmul:b=1..4,m=4,n=3,k=4", "`b=1..4` is not accepted; expected a number; only m, n, k of products");
    check("conv2d:n=1..4,c=3,h=8,w=8,k=4,r=3,s=3", "only m, n, k of products, and h of convolutions");
    check("dense:m=4,n=3..8,k=4,const=w", "`const=w` is not accepted");
    check("matmul:m=1..9,n=8,k=8,const=a", "`const=a` is not accepted");
    for text in ["dense:m=1..512,n=768,k=768,const=w", "dense:m=32..512/32,n=7,k=8"] {
        assert_eq!(Workload::parse(text).unwrap().to_string(), text);
    }
    let family = Workload::parse("dense:m=32..512/32,n=7,k=8").unwrap();
    assert_eq!(family.at(&[64]).unwrap().to_string(), "dense:m=64,n=7,k=8");
    assert_eq!(Workload::parse("dense:m=1..512,n=7,k=8").unwrap().anchors(), [[1], [3], [9], [23], [65], [181], [512]]);
    assert_eq!(family.anchors(), [[32], [64], [96], [128], [192], [320], [512]]);
    assert_eq!(Workload::parse("dense:m=3..4,n=7,k=8").unwrap().anchors(), [[3], [4]]);
    let [several, growing] = ["batch_matmul:b=2,m=1..4,n=16..64/16,k=8", "matmul:m=2..3,n=16..64/16,k=8"];
    assert_eq!(Workload::parse(several).unwrap().anchors(), [[1, 16], [1, 32], [3, 48], [4, 64]]);
    assert_eq!(Workload::parse(growing).unwrap().anchors(), [[2, 16], [2, 32], [3, 48], [3, 64]]);
    let flops = Workload::parse("dense:m=2..8,n=7,k=8").unwrap().flops();
    assert!((flops - 2.0 * 7.0 * 8.0 * (2.0f64 * 3.0 * 5.0 * 7.0 * 8.0).powf(0.2)).abs() < 1e-9, "{flops}");
    for wrong in [&[33][..], &[0], &[544], &[], &[32, 32]] {
        assert!(family.at(wrong).is_none() && family.program().at(wrong).is_none(), "{wrong:?}");
    }
    let setting = TemplateSetting { workload: family, target: Target::named("sm_80").unwrap(), n_threads: 1 };
    assert!(matches!(Task::new(setting, None), Err(TaskError::FamilyOnGpu { .. })));
}
