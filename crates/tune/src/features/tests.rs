use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Loop, Program, Stmt, Target, text};

use super::*;
use crate::space::{Parameter, Space};
use crate::template::{Setting, TEMPLATES, Task};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::sync::Arc;

fn program(source: &str) -> Program {
    text::parse(source).unwrap_or_else(|e| panic!("{e}\n{source}"))
}

fn matmul() -> Program {
    Workload::parse("matmul:m=8,n=8,k=8").unwrap().program()
}

/// By loop and buffer, in the order of the program: what `of` says of the touch.
fn table(contexts: &LoopContexts, of: fn(&Touch) -> f64) -> Vec<Vec<f64>> {
    contexts.loops().iter().map(|l| l.touches.iter().map(of).collect()).collect()
}

#[test]
fn contexts_of_a_matrix_product_are_those_of_the_paper() {
    let contexts = LoopContexts::of(&matmul());
    // Columns: C, A, B. Rows: i, j, k.
    assert_eq!(table(&contexts, |t| t.count), [[64.0, 64.0, 64.0], [8.0, 8.0, 64.0], [1.0, 8.0, 8.0]]);
    assert_eq!(table(&contexts, |t| t.reuse), [[8.0, 8.0, 8.0], [8.0, 8.0, 1.0], [8.0, 1.0, 1.0]]);
    assert_eq!(table(&contexts, |t| t.stride), [[8.0, 8.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 8.0]]);
    let of = |f: fn(&LoopContext) -> f64| contexts.loops().iter().map(f).collect::<Vec<_>>();
    assert_eq!(of(|l| l.top_down), [1.0, 8.0, 64.0]);
    assert_eq!(of(|l| l.bottom_up), [512.0, 64.0, 8.0]);
    assert!(contexts.loops().iter().all(|l| l.n_operations == [1, 1, 0]));
    assert_eq!(contexts.chain().count(), 3);
}

#[test]
fn relations_are_the_largest_touches_below_each_threshold() {
    let relations = LoopContexts::of(&matmul()).relations();
    assert_eq!(relations.len(), N_RELATION_FEATURES);
    let curve = |buffer: usize, pair: usize| &relations[(2 * buffer + pair) * 24..][..24];
    let log = |x: f64| log_scale(x);
    // B: reuse 8, 1, 1 with touches 64, 64, 8. Below 2 there is j's.
    assert!(curve(2, 0).iter().all(|&x| x == log(64.0)));
    // C is always reused 8 times: nothing below 2, 4 and 8.
    assert_eq!(curve(0, 0)[..4], [0.0, 0.0, 0.0, log(64.0)]);
    // A: reuse 8, 8, 1 with touches 64, 8, 8.
    assert_eq!(curve(1, 0)[..4], [log(8.0), log(8.0), log(8.0), log(64.0)]);
    // The outermost loop is run once and touches most.
    assert!((0..3).all(|buffer| curve(buffer, 1).iter().all(|&x| x == log(64.0))));
    assert!(relations[3 * 48..].iter().all(|x| x.is_nan()));
}

/// Elements that one run of each loop touches of each buffer, at most, by enumeration.
fn enumerate(program: &Program, contexts: &LoopContexts) -> Vec<Vec<f64>> {
    use std::collections::{BTreeMap, HashSet};
    type Elements = HashSet<Vec<i64>>;
    struct Run<'a> {
        values: Vec<i64>,
        /// What the present run of each loop around has touched, with the loop's place in the program.
        touched: Vec<(usize, BTreeMap<u32, Elements>)>,
        most: Vec<BTreeMap<u32, f64>>,
        place: &'a dyn Fn(&Loop) -> usize,
    }
    fn block(stmts: &[Stmt], run: &mut Run) {
        for s in stmts {
            match s {
                Stmt::For(l) => {
                    let values = run.values.clone();
                    let extent = l.extent.eval(&|v| values[v.0 as usize]).unwrap();
                    run.touched.push(((run.place)(l), BTreeMap::new()));
                    for i in 0..extent {
                        run.values[l.var.0 as usize] = i;
                        block(&l.body, run);
                    }
                    let (at, touched) = run.touched.pop().unwrap();
                    for (buffer, elements) in touched {
                        let most = run.most[at].entry(buffer).or_default();
                        *most = most.max(elements.len() as f64);
                    }
                }
                Stmt::If { .. } => s.blocks().for_each(|b| block(b, run)),
                _ => {
                    let values = run.values.clone();
                    let mut touch = |buffer: tilewright_ir::BufferId, index: &[tilewright_ir::Index]| {
                        let element: Vec<i64> =
                            index.iter().map(|i| i.eval(&|v| values[v.0 as usize]).unwrap()).collect();
                        for (_, touched) in &mut run.touched {
                            touched.entry(buffer.0).or_default().insert(element.clone());
                        }
                    };
                    if let Some((buffer, index)) = s.own_write() {
                        touch(buffer, index);
                    }
                    s.for_each_own_read(&mut touch);
                }
            }
        }
    }
    let place = |l: &Loop| contexts.loops().iter().position(|c| c.var == l.var).unwrap();
    let n = contexts.loops().len();
    let mut run = Run {
        values: vec![0; program.loops.len()],
        touched: Vec::new(),
        most: vec![BTreeMap::new(); n],
        place: &place,
    };
    block(&program.body, &mut run);
    let of_loop = |(l, most): (&LoopContext, &BTreeMap<u32, f64>)| {
        l.touches.iter().map(|t| most.get(&t.buffer.0).copied().unwrap_or(0.0)).collect()
    };
    contexts.loops().iter().zip(&run.most).map(of_loop).collect()
}

const CONVOLUTION: &str = "program \"conv\"
    buffer X: f32[4, 11, 11] global input
    buffer W: f32[6, 4, 3, 3] global const
    buffer Y: f32[6, 9, 9] global output
    loops f, y, x, c, r, s
    run { for f in 6 { for y in 9 { for x in 9 { for c in 4 { for r in 3 { for s in 3 {
        Y[f, y, x] += X[c, y + r, x + s] * W[f, c, r, s] first c + r + s == 0
    } } } } } } }";

#[test]
fn overlapping_windows_are_counted_once() {
    let convolution = program(CONVOLUTION);
    let contexts = LoopContexts::of(&convolution);
    assert_eq!(table(&contexts, |t| t.count), enumerate(&convolution, &contexts));
}

#[test]
fn tiles_are_counted_as_they_are_touched() {
    let steps = "split y 4 -> yo yi shrink\nsplit x 3 -> xo xi\nreorder f yo xo c r s yi xi";
    let tiled = apply_all(&program(CONVOLUTION), &parse_steps(steps).unwrap()).unwrap();
    let contexts = LoopContexts::of(&tiled);
    assert_eq!(table(&contexts, |t| t.count), enumerate(&tiled, &contexts));
    assert_eq!(contexts.loops()[1].extent, 3.0);
    assert_eq!(contexts.loops()[6].extent, 4.0);
}

#[test]
fn features_say_how_loops_are_carried_out() {
    let plain = LoopContexts::of(&matmul()).features();
    assert_eq!(plain.len(), N_CONTEXT_FEATURES);
    let vectorized = apply_all(&matmul(), &parse_steps("reorder i k j\nvectorize j").unwrap()).unwrap();
    let vectorized = LoopContexts::of(&vectorized).features();
    // Length, then serial, parallel, vectorized …
    assert_eq!((plain[0], &plain[1..4]), (log_scale(8.0), &[1.0, 0.0, 0.0][..]));
    assert_eq!(vectorized[1..4], [0.0, 0.0, 1.0]);
}

#[test]
fn a_tree_of_loops_does_not_depend_on_their_names() {
    let tree = |steps: &str| LoopContexts::of(&apply_all(&matmul(), &parse_steps(steps).unwrap()).unwrap()).tree();
    assert_eq!(tree("split i 4 -> a b"), tree("split i 4 -> outer inner"));
    assert_ne!(tree("split i 4 -> a b"), tree("split i 2 -> a b"));
    assert_ne!(tree("split i 4 -> a b"), tree("split i 4 -> a b\nparallel a"));
}

#[test]
fn every_candidate_has_features_of_the_same_length() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
    for workload in ["matmul:m=1,n=1,k=1", "matmul:m=37,n=41,k=5,const=a", "matmul:m=512,n=96,k=300"] {
        let workload = Workload::parse(workload).unwrap();
        let setting = Setting { workload, target: Target::named("x86-64-v4").unwrap(), n_threads: 2 };
        for template in TEMPLATES.iter().filter(|t| (t.serves)(&setting)) {
            let task = Task::new(setting.clone(), Some(template.name)).unwrap();
            let knobs = KnobFeatures::new(&task.space);
            for _ in 0..20 {
                let config = task.space.sample(&mut rng);
                assert_eq!(knobs.of(&config).len(), knobs.n_features());
                let contexts = LoopContexts::of(&task.program(&config).unwrap());
                let (features, relations) = (contexts.features(), contexts.relations());
                assert_eq!((features.len(), relations.len()), (N_CONTEXT_FEATURES, N_RELATION_FEATURES));
                assert!(features.iter().chain(&relations).all(|x| !x.is_infinite()));
                // One run of a loop touches no more than it makes accesses, and an outer loop no less than an
                // inner one.
                for l in contexts.loops() {
                    for touch in &l.touches {
                        assert!(touch.count >= 1.0 && touch.reuse >= 1.0, "{l:?}");
                        let outer = l.parent.and_then(|at| contexts.loops()[at].touch(touch.buffer));
                        assert!(l.parent.is_none() || outer.is_some_and(|o| o.count >= touch.count), "{l:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_program_without_loops_has_no_contexts() {
    let constant = program(
        "program \"constant\" buffer Y: f32[1] global output
        loops i
        run { Y[0] = 1.0 }",
    );
    let contexts = LoopContexts::of(&constant);
    assert!(contexts.features().iter().chain(&contexts.relations()).all(|x| x.is_nan()));
}

#[test]
fn knobs_are_numbers_factors_positions_and_one_hot() {
    let space = Space::new(
        "knobs",
        vec![
            Parameter::ordinal("unroll", [1, 4, 16]),
            Parameter::factorization("tile", 12, 3),
            Parameter::categorical("pack", &["none", "rows", "panels"]),
            Parameter::permutation("order", &["i", "j", "k"]),
            // Too many values for a table.
            Parameter::factorization("large", 1 << 40, 6),
        ],
        vec![],
    )
    .unwrap();
    let json = serde_json::json!({
        "unroll": 16, "tile": [2, 1, 6], "pack": "rows", "order": ["k", "i", "j"], "large": [1, 1024, 1024, 1024, 1024, 1],
    });
    let features = KnobFeatures::new(&Arc::new(space.clone())).of(&space.config_from_json(&json).unwrap());
    let expected = [16.0, 2.0, 1.0, 6.0, 0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0, 1024.0, 1024.0, 1024.0, 1024.0, 1.0];
    assert_eq!(features, expected);
}
