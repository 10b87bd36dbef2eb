use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Loop, Program, Stmt, Target, text};
use tilewright_search::features::{KnobFeatures, N_CONTEXT_FEATURES, N_RELATION_FEATURES};

use super::*;
use crate::template::{TEMPLATES, Task, TemplateSetting};

fn program(source: &str) -> Program {
    text::parse(source).unwrap_or_else(|e| panic!("{e}\n{source}"))
}

fn matmul() -> Program {
    Workload::parse("matmul:m=8,n=8,k=8").unwrap().program()
}

/// Table of `of` for each touch, by loop and buffer in the order of the program.
fn table(contexts: &LoopContexts, of: fn(&Touch) -> f64) -> Vec<Vec<f64>> {
    contexts.loops().iter().map(|l| l.touches.iter().map(of).collect()).collect()
}

#[test]
fn contexts_of_a_matrix_product_are_those_of_the_paper() {
    let contexts = loop_contexts(&matmul());
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

/// Largest number of elements of each buffer that one run of each loop touches, by enumeration.
fn enumerate(program: &Program, contexts: &LoopContexts) -> Vec<Vec<f64>> {
    use std::collections::{BTreeMap, HashSet};
    type Elements = HashSet<Vec<i64>>;
    struct Run<'a> {
        values: Vec<i64>,
        /// Elements that the current run of each enclosing loop has touched, with the loop's index in the
        /// program.
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
    // Contexts are in the order in which loops begin.
    fn vars(stmts: &[Stmt], found: &mut Vec<LoopId>) {
        for stmt in stmts {
            if let Stmt::For(l) = stmt {
                found.push(l.var);
                vars(&l.body, found);
            } else {
                stmt.blocks().for_each(|block| vars(block, found));
            }
        }
    }
    let mut order = Vec::new();
    vars(&program.body, &mut order);
    let place = |l: &Loop| order.iter().position(|var| *var == l.var).unwrap();
    let n = contexts.loops().len();
    let mut run = Run {
        values: vec![0; program.loops.len()],
        touched: Vec::new(),
        most: vec![BTreeMap::new(); n],
        place: &place,
    };
    block(&program.body, &mut run);
    let of_loop = |(l, most): (&LoopContext, &BTreeMap<u32, f64>)| {
        l.touches.iter().map(|t| most.get(&t.buffer).copied().unwrap_or(0.0)).collect()
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
    let contexts = loop_contexts(&convolution);
    assert_eq!(table(&contexts, |t| t.count), enumerate(&convolution, &contexts));
}

#[test]
fn tiles_are_counted_as_they_are_touched() {
    let steps = "split y 4 -> yo yi shrink\nsplit x 3 -> xo xi\nreorder f yo xo c r s yi xi";
    let tiled = apply_all(&program(CONVOLUTION), &parse_steps(steps).unwrap()).unwrap();
    let contexts = loop_contexts(&tiled);
    assert_eq!(table(&contexts, |t| t.count), enumerate(&tiled, &contexts));
    assert_eq!(contexts.loops()[1].extent, 3.0);
    assert_eq!(contexts.loops()[6].extent, 4.0);
}

#[test]
fn features_say_how_loops_are_carried_out() {
    let plain = loop_contexts(&matmul()).features();
    assert_eq!(plain.len(), N_CONTEXT_FEATURES);
    let vectorized = apply_all(&matmul(), &parse_steps("reorder i k j\nvectorize j").unwrap()).unwrap();
    let vectorized = loop_contexts(&vectorized).features();
    // Length, then serial, parallel, vectorized …
    assert_eq!((plain[0], &plain[1..4]), (9.0f32.log2(), &[1.0, 0.0, 0.0][..]));
    assert_eq!(vectorized[1..4], [0.0, 0.0, 1.0]);
}

#[test]
fn a_tree_of_loops_does_not_depend_on_their_names() {
    let tree = |steps: &str| loop_contexts(&apply_all(&matmul(), &parse_steps(steps).unwrap()).unwrap()).tree();
    assert_eq!(tree("split i 4 -> a b"), tree("split i 4 -> outer inner"));
    assert_ne!(tree("split i 4 -> a b"), tree("split i 2 -> a b"));
    assert_ne!(tree("split i 4 -> a b"), tree("split i 4 -> a b\nparallel a"));
}

#[test]
fn every_candidate_has_features_of_the_same_length() {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(11);
    for workload in ["matmul:m=1,n=1,k=1", "matmul:m=37,n=41,k=5,const=a", "matmul:m=512,n=96,k=300"] {
        let workload = Workload::parse(workload).unwrap();
        let setting = TemplateSetting { workload, target: Target::named("x86-64-v4").unwrap(), n_threads: 2 };
        for template in TEMPLATES.iter().filter(|t| (t.serves)(&setting)) {
            let task = Task::new(setting.clone(), Some(template.name)).unwrap();
            let knobs = KnobFeatures::new(&task.space);
            for _ in 0..20 {
                let config = task.space.sample(&mut rng);
                assert_eq!(knobs.of(&config).len(), knobs.n_features());
                let contexts = loop_contexts(&task.program(&config).unwrap());
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
    let contexts = loop_contexts(&constant);
    assert!(contexts.features().iter().chain(&contexts.relations()).all(|x| x.is_nan()));
}
