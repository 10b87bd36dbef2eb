//! Verifier tests: every rule, provable accesses, and races between iterations.

mod common;

use common::{Conv, Random, conv2d, matmul, matmul_transposed, program, softmax};
use tilewright_ir::dependence::writes_are_disjoint;
use tilewright_ir::index::Ranges;
use tilewright_ir::interp::{Fault, run_limited};
use tilewright_ir::text::parse;
use tilewright_ir::verify::{VerifyError, check, verify};
use tilewright_ir::{BufferId, Cond, Expr, Index, Loop, LoopId, LoopKind, Program, Stmt};

const HEAD: &str = "program \"p\"
    buffer A: f32[127, 64] global input buffer W: f32[64] global const buffer C: f32[127, 64] global output
    buffer V: f32[127] global output
    buffer P: f32[64] global kept buffer T: f32[12, 16] local temporary buffer S: f32[64] shared temporary
    loops a, b, c, d, e ";

fn with_body(body: &str) -> Program {
    program(&format!("{HEAD} run {{ {body} }}"))
}

/// Message of the first violation, else the unproven accesses, else empty.
fn outcome(program: &Program) -> String {
    match check(program) {
        Err(e) => e.to_string(),
        Ok(unproven) => unproven.first().map(ToString::to_string).unwrap_or_default(),
    }
}

#[track_caller]
fn is(body: &str, expected: &str) {
    assert_eq!(outcome(&with_body(body)), expected, "{body}");
}

#[test]
fn operators_are_right() {
    for program in [
        matmul("f32", 17, 333, 129),
        matmul_transposed(5, 6, 7),
        conv2d(Conv { c: 3, h: 224, w: 224, k: 64, r: 7, stride: 2, pad: 3 }),
        softmax(9, 31),
    ] {
        assert_eq!(outcome(&program), "", "{program}");
    }
}

#[test]
fn names_are_valid_and_unique() {
    let mut program = with_body("");
    program.loops[1] = "a".into();
    assert_eq!(outcome(&program), "two loops or two buffers are called a");
    program.loops[1] = "8a".into();
    assert_eq!(outcome(&program), "\"8a\" is not a name");
    program.loops[1] = "A".into();
    assert_eq!(outcome(&program), "");
    program.buffers[1].name = "A".into();
    assert_eq!(outcome(&program), "two loops or two buffers are called A");
}

#[test]
fn sizes_fit() {
    let mut program = with_body("");
    for shape in [vec![0], vec![8, -1], vec![1 << 40, 1 << 40], vec![i64::MAX]] {
        program.buffers[0].shape = shape.clone();
        assert_eq!(verify(&program), Err(VerifyError::Size { buffer: "A".into(), shape }));
    }
    program.buffers[0].shape = vec![];
    assert_eq!(verify(&program), Ok(()));
}

#[test]
fn numbers_exist_and_variables_are_in_scope() {
    let mut program = with_body("");
    program.body = vec![Stmt::Alloc(BufferId(70))];
    assert_eq!(verify(&program), Err(VerifyError::UnknownBuffer { id: 70 }));
    let zero = || vec![Index::from(0), Index::from(0)];
    program.body = vec![Stmt::Store { buffer: BufferId(2), index: zero(), value: Expr::Load(BufferId(70), vec![]) }];
    assert_eq!(verify(&program), Err(VerifyError::UnknownBuffer { id: 70 }));
    let in_loop = |var, body| Stmt::For(Loop { var, extent: 1.into(), kind: LoopKind::Serial, body });
    program.body = vec![in_loop(LoopId(9), vec![])];
    assert_eq!(verify(&program), Err(VerifyError::UnknownLoop { id: 9 }));
    program.body = vec![Stmt::If { cond: Cond::Lt(Index::from(LoopId(9)), 0.into()), then: vec![], otherwise: vec![] }];
    assert_eq!(outcome(&program), "?loop9 is used outside its loop in ?loop9");
    is("for a in 8 { } V[a] = 0.0", "a is used outside its loop in a");
    is("for a in a + 1 { }", "a is used outside its loop in a + 1");
    is("for a in 8 { for b in 8 { for a in 8 { } } }", "a loop over a is inside a loop over a");
    is("for a in 8 { } for a in 8 { }", "");
    is("prefetch A[0] read", "A has 2 dimensions and is used with 1 subscripts");
}

#[test]
fn bounds_hold_at_every_open_size() {
    let of = |sizes: &str, rest: &str| outcome(&program(&format!("{HEAD} {sizes} {rest}")));
    let size = "size m = 2*e + 3 in 63";
    assert_eq!(of(size, "run { for a in 2*e + 3 { V[a] = 0.0 } }"), "");
    assert_eq!(of(size, "run { for a in 2*e + 3 { V[126 - a] = 0.0 } }"), "");
    let beyond = of(size, "run { for a in 2*e + 4 { V[a] = 0.0 } }");
    assert_eq!(beyond, "V[127] is outside V[127] at e=62, a=127");
    assert_eq!(of(size, "run { V[2*e + 2] = 0.0 }"), "");
    assert!(of(size, "run { V[2*e - 1] = 0.0 }").contains("is outside V[127] at e=0"));
    assert_eq!(of(size, "run { for e in 4 { } }"), "a loop over e is inside a loop over e");
    let in_prepare = of(size, "prepare { for a in 2*e + 3 { P[0] = 0.0 } } run { }");
    assert_eq!(in_prepare, "e is used outside its loop in 2*e + 3");
    let second = format!("{size} size m = d + 1 in 2");
    for wrong in ["size m = e in 4", "size m = 2*e + 3 in 0", "size m = 3 - e in 2", &second] {
        let expected = "the open size m has no valid values, or shares its name or its variable with another";
        assert_eq!(of(wrong, "run { }"), expected, "{wrong}");
    }
    assert_eq!(of(&format!("{size} size n = d + 1 in 2"), "run { for a in 2*e - d + 3 { V[a + d] = 0.0 } }"), "");
}

#[test]
fn divisors_and_magnitudes() {
    is("for a in 8 { V[a // 0] = 0.0 }", "divisor 0 in a // 0");
    is("for a in 8 { V[3*(a % -2)] = 0.0 }", "divisor -2 in 3*(a % -2)");
    is("for a in 8 { prefetch V[min(a, a // 0)] read }", "divisor 0 in min(a, a // 0)");
    is("for a in 1000000000 { for b in 1000000000 { if 1000000000*a < b { } } }", "1000000000*a may be too large");
    is("for a in 9223372036854775807 { }", "9223372036854775807 may be too large");
}

#[test]
fn accesses_are_within_their_buffers() {
    // Tails limited by a loop bound, a guard, a select, and both sides of a condition.
    is("for a in 11 { for b in min(12, 127 - 12*a) { V[12*a + b] = 0.0 } }", "");
    is("for a in 11 { for b in 12 { if 12*a + b < 127 { V[12*a + b] = 0.0 } } }", "");
    is("for a in 127 { V[a] = select(a < 64, W[a], W[a - 64]) }", "");
    is("for a in 127 { V[a] = select(not(a < 64), W[a - 64], W[a]) }", "");
    is("for a in 200 { if 63 < a && a < 191 { V[a - 64] = 0.0 } else { prefetch V[a] read } }", "");
    is("for a in 1000 { if 3*a < 380 { V[a] = 0.0 } }", "");
    is("for a in 1000 { for b in 100 { if a + b < 127 { V[a + b] = 0.0 } } }", "");
    is("for a in 1000 { if a == 5 { V[2*a + 3] = 0.0 } }", "");
    is("for a in 127 { V[a] = select(a < 64 && less(W[a], 0.0), 1.0, 2.0) }", "");
    // Two conditions together.
    is("for a in 1000 { for b in 1000 { if a < 60 && b < 60 { V[a + b] = 0.0 } } }", "");
    // Provable only by trying every iteration.
    is("for a in 120 { if a % 2 == 0 && a // 2 < 20 { W.x[0] = 0.0 } }".replace("W.x[0]", "V[2*a]").as_str(), "");
    is("for a in 128 { V[a] = 0.0 }", "V[127] is outside V[127] at a=127");
    is("for a in 127 { V[a] = W[a] }", "W[64] is outside W[64] at a=64");
    is("for a in 100000000 { V[a // 100000] = 0.0 }", "V[999] is outside V[127] at a=99999999");
    is("for a in 12 { for b in 12 { V[12*a + b] = 0.0 } }", "V[127] is outside V[127] at a=10, b=7");
    is("for a in 8 { V[a - 1] = 0.0 }", "V[-1] is outside V[127] at a=0");
    is("for a in 127 { if a < 126 { V[a + 2] = 0.0 } }", "V[127] is outside V[127] at a=125");
    is("for a in 300 { V[0] = select(a < 100, W[63 - a], 0.0) }", "W[-1] is outside W[64] at a=64");
    // Never reached.
    is("for a in 0 { V[a - 1000] = 0.0 }", "");
    is("for a in 10 { if 20 < a { V[a - 1000] = 0.0 } }", "");
    // Accesses under conditions on values are neither wrong nor proven.
    is(
        "for a in 128 { if less(W[0], 1.0) { V[a] = 0.0 } }",
        "cannot prove that a is within 0..127 in V, inside loops a",
    );
    is("for a in 1000 { for b in 1000 { if a % 7 == b % 7 && a // 7 < 18 { V[7*(a // 7) + b % 7] = 0.0 } } }", "");
    is(
        "for a in 10000 { for b in 10000 { if a*3 // 2 < b // 100 && 9000 < 90*b { V[a] = 0.0 } } }",
        "cannot prove that a is within 0..127 in V, inside loops a, b",
    );
}

#[test]
fn temporaries_are_allocated_once_and_in_time() {
    is("alloc A", "A is input and cannot be allocated");
    is("T[0, 0] = 1.0 alloc T", "T is used where it is not allocated");
    is("if 0 < 1 { alloc T T[0, 0] = 1.0 } V[0] = T[0, 0]", "T is used where it is not allocated");
    is("prefetch T[0, 0] read", "T is used where it is not allocated");
    is("alloc T for a in 2 { alloc T }", "T is allocated inside its own life");
    is("alloc T T[0, 0] = 1.0 alloc T T[0, 0] = 1.0", "");
    is("for a in 2 { alloc T T[0, 0] = 1.0 } for b in 2 { alloc T T[0, 0] = 1.0 }", "");
}

#[test]
fn roles_are_respected() {
    is("A[0, 0] = 1.0", "input A is written in run");
    is("W[0] += 1.0 first never", "const W is written in run");
    is("P[0] = 1.0", "");
    is("V[0] = P[0] V[1] = V[0]", "");
    let prepare = |body: &str| outcome(&program(&format!("{HEAD} prepare {{ {body} }} run {{ }}")));
    assert_eq!(prepare("for a in 64 { P[a] = W[63 - a] }"), "");
    assert_eq!(prepare("V[0] = 1.0"), "output V is written in prepare");
    assert_eq!(prepare("P[0] = A[0, 0]"), "");
    assert_eq!(prepare("P[0] = V[0]"), "output V is read in prepare");
    assert_eq!(prepare("alloc T T[0, 0] = W[0] P[0] = T[0, 0]"), "");
    let finish = |body: &str| outcome(&program(&format!("{HEAD} run {{ }} finish {{ {body} }}")));
    assert_eq!(finish("for a in 64 { V[a] = P[63 - a] }"), "");
    assert_eq!(finish("V[0] = P[0] V[0] += V[0] first never"), "");
    assert_eq!(finish("P[0] = 1.0"), "kept P is written in finish");
    assert_eq!(finish("V[0] = A[0, 0]"), "input A is read in finish");
    assert_eq!(finish("V[0] = W[0]"), "const W is read in finish");
    let both = format!("{HEAD} prepare {{ P[0] = 1.0 }} run {{ P[1] = 1.0 }}");
    assert_eq!(outcome(&program(&both)), "kept P is written both in prepare and in run");
}

#[test]
fn loops_of_special_kinds() {
    let body = "vectorized loop a contains something else than stores, updates and prefetches";
    is("vectorized a in 16 { for b in 2 { } }", body);
    is("vectorized a in 16 { if a < 3 { } }", body);
    is("vectorized a in 16 { alloc T }", body);
    is("vectorized a in 16 { V[a] = 0.0 prefetch A[a, 0] read C[a, 0] += 1.0 first a == a }", "");
    is("block.x a in 4 { block.y b in 4 { thread.x c in 4 { } } }", "");
    let taken = "loop b is bound to GPU axis 0, which does not exist or is taken by a loop around it";
    is("block.x a in 4 { for c in 2 { block.x b in 4 { } } }", taken);
    let mut program = with_body("block.x a in 4 { }");
    let Stmt::For(l) = &mut program.body[0] else { unreachable!() };
    l.kind = LoopKind::Thread(3);
    assert_eq!(verify(&program), Err(VerifyError::Axis { var: "a".into(), axis: 3 }));
}

#[test]
fn parallel_iterations_do_not_race() {
    // A reduction.
    is(
        "for a in 127 { parallel b in 64 { V[a] += A[a, b] first b == 0 } }",
        "iterations of parallel loop b race for V: V[a] and V[a]",
    );
    is(
        "for a in 8 { vectorized b in 16 { V[a] += A[a, b] first b == 0 } }",
        "iterations of vectorized loop b race for V: V[a] and V[a]",
    );
    is("parallel a in 127 { for b in 64 { V[a] += A[a, b] first b == 0 } }", "");
    is("for a in 127 { parallel b in 1 { V[a] = 0.0 } }", "");
    // A tail, overlapping tiles.
    is("parallel a in 11 { for b in min(12, 127 - 12*a) { V[12*a + b] = 0.0 } }", "");
    is(
        "parallel a in 11 { for b in min(13, 127 - 12*a) { V[12*a + b] = 0.0 } }",
        "iterations of parallel loop a race for V: V[12*a + b] and V[12*a + b]",
    );
    // Private buffers.
    is("parallel a in 8 { alloc T T[0, 0] = W[a] V[a] = T[0, 0] }", "");
    is(
        "alloc T parallel a in 8 { T[0, 0] = W[a] V[a] = T[0, 0] }",
        "iterations of parallel loop a race for T: T[0, 0] and T[0, 0]",
    );
    // One iteration writes an element that another reads or writes.
    is(
        "for b in 64 { V[b] = 0.0 } parallel a in 8 { V[a] = V[a + 1] }",
        "iterations of parallel loop a race for V: V[a] and V[a + 1]",
    );
    is("for b in 64 { V[b] = 0.0 } parallel a in 8 { V[2*a] = V[2*a + 1] }", "");
    is("parallel a in 8 { V[a] = 0.0 V[a + 3] = 0.0 }", "iterations of parallel loop a race for V: V[a] and V[a + 3]");
    is("parallel a in 8 { V[4*a] = 0.0 V[4*a + 3] = 0.0 for b in 3 { V[4*a + b] = 1.0 } }", "");
    is(
        "thread.x a in 8 { V[a] = 1.0 if less(V[0], 1.0) { } }",
        "iterations of thread.x loop a race for V: V[a] and V[0]",
    );
    // Fused loops.
    is("parallel a in 110 { for b in 12 { C[b + 12*(a // 11), a % 11] = 0.0 } }", "");
    is("parallel a in 1408 { C[a // 64, a % 64] = 0.0 }", "");
    is("parallel a in 1408 { C[a % 22, a // 22] = 0.0 }", "");
    is("parallel a in 88 { for b in 16 { C[(16*a + b) // 64, (16*a + b) % 64] = 0.0 } }", "");
    is(
        "parallel a in 1408 { C[a // 64, a % 32] = 0.0 }",
        "iterations of parallel loop a race for C: C[a // 64, a % 32] and C[a // 64, a % 32]",
    );
    // Three loops in one: the block of a layout, its row, its column.
    let blocked = "program \"p\" buffer C: f32[4, 6, 8, 2] global output loops f, i
        run { parallel f in 192 { for i in 2 { C[f // 48, (f // 8) % 6, f % 8, i] = 0.0 } } }";
    assert_eq!(outcome(&program(blocked)), "");
    // The loop with the middle stride.
    is("for a in 2 { parallel b in 4 { for c in 3 { for d in 12 { V[48*a + 12*b + d] = index(c) } } } }", "");
    is("parallel b in 4 { for a in 2 { for d in 12 { V[48*a + 12*b + d] = 0.0 } } }", "");
    is(
        "parallel a in 16 { for b in 4 { V[16*b + a] = 0.0 V[64] = 0.0 } }",
        "iterations of parallel loop a race for V: V[a + 16*b] and V[64]",
    );
}

#[test]
fn disjoint_writes_by_hand() {
    let v = |i: u32| Index::from(LoopId(i));
    let mut ranges = Ranges::default();
    for (i, extent) in [8, 4, 6].into_iter().enumerate() {
        ranges.push(LoopId(i as u32), extent.into());
    }
    let disjoint = |index: &[Index], var| writes_are_disjoint(index, LoopId(var), &ranges);
    assert!(disjoint(&[v(0).scale(24).add(&v(1).scale(6)).add(&v(2))], 0));
    assert!(disjoint(&[v(0).scale(24).add(&v(1).scale(6)).add(&v(2))], 1));
    assert!(!disjoint(&[v(0).scale(23).add(&v(1).scale(6)).add(&v(2))], 0));
    // Outer loops have the same value in both iterations.
    assert!(disjoint(&[v(1).sub(&v(0).modulo(3).scale(5))], 1));
    assert!(!disjoint(&[v(1).add(&v(2))], 1));
    assert!(disjoint(&[v(1).add(&v(2)), v(2)], 1));
    assert!(!disjoint(&[v(2)], 7));
    assert!(!disjoint(&[], 0));
}

/// Checks by trying all iterations that random tiled writes reported as disjoint are disjoint.
#[test]
fn disjointness_is_sound() {
    let mut n_disjoint = 0;
    for seed in 0..4000 {
        let random = &mut Random::new(seed);
        let extents = (0..3).map(|_| random.in_range(1, 6)).collect::<Vec<_>>();
        let mut ranges = Ranges::default();
        for (i, extent) in extents.iter().enumerate() {
            ranges.push(LoopId(i as u32), (*extent).into());
        }
        let subscripts = (0..random.in_range(1, 2)).map(|_| {
            let mut sum = Index::from(0);
            for _ in 0..random.in_range(1, 3) {
                let var = |random: &mut Random| Index::from(LoopId(random.below(3) as u32));
                let inner = var(random).scale(random.in_range(1, 4)).add(&var(random));
                let d = random.in_range(2, 4);
                let part = match random.below(4) {
                    0 => inner.floor_div(d),
                    1 => inner.modulo(d),
                    _ => var(random),
                };
                sum = sum.add(&part.scale(random.pick(&[1, 2, 3, 6, 12, -4])));
            }
            sum
        });
        let mut index = subscripts.collect::<Vec<_>>();
        if random.chance(30) {
            let (x, d) = (Index::from(LoopId(random.below(3) as u32)), random.in_range(2, 4));
            index = vec![x.floor_div(d), index.swap_remove(0), x.modulo(d)];
        }
        for var in 0..3u32 {
            if !writes_are_disjoint(&index, LoopId(var), &ranges) {
                continue;
            }
            n_disjoint += 1;
            let mut seen = std::collections::HashMap::new();
            for a in 0..extents[0] {
                for b in 0..extents[1] {
                    for c in 0..extents[2] {
                        let values = [a, b, c];
                        let at = index.iter().map(|i| i.eval(&|v| values[v.0 as usize])).collect::<Vec<_>>();
                        let iteration = values[var as usize];
                        let outer = values[..var as usize].to_vec();
                        let before = *seen.entry((outer, at)).or_insert(iteration);
                        assert_eq!(before, iteration, "seed {seed}: {index:?} {extents:?} loop {var}");
                    }
                }
            }
        }
    }
    assert!(n_disjoint > 1000, "{n_disjoint}");
}

/// Checks that the interpreter finds no fault in verified and proven programs of random guards and accesses.
#[test]
fn verification_is_sound() {
    let (mut n_proven, mut n_refuted) = (0, 0);
    for seed in 0..3000 {
        let random = &mut Random::new(seed);
        let index = |random: &mut Random| {
            let (a, b) = (random.pick(&["a", "b", "a", "c"]), random.pick(&["a", "b", "c"]));
            let (p, q, d) = (random.in_range(-2, 3), random.in_range(0, 9), random.in_range(1, 4));
            random.pick(&[
                format!("{p}*{a} + {q}"),
                format!("{p}*{a} + {b} - {q}"),
                format!("({a} + {q}) // {d}"),
                format!("({a} + {p}*{b}) % {d} + {q}"),
                format!("min({a}, {q}) + {b}"),
                format!("max({a} - {b}, {p}*{b})"),
            ])
        };
        let cond = |random: &mut Random| {
            let (x, y) = (index(random), index(random));
            random.pick(&[
                format!("{x} < {y}"),
                format!("not({x} < {y})"),
                format!("{x} == {y}"),
                format!("{x} < {y} && {y} < 20"),
                format!("not({x} == {y} && less(X[0], 0.0))"),
            ])
        };
        let (n, m) = (random.in_range(1, 9), random.in_range(1, 9));
        let extent = random.pick(&["3".to_owned(), format!("min(4, {n} - a)"), "b + 1".to_owned()]);
        let (c1, c2) = (cond(random), cond(random));
        let (i, j, k) = (index(random), index(random), index(random));
        let text = format!(
            "program \"p\" buffer X: f32[12] global input buffer Y: f32[12] global output loops a, b, c, z
            run {{ for z in 12 {{ Y[z] = 0.0 }}
            for a in {n} {{ for b in {m} {{ for c in {extent} {{
                if {c1} {{ Y[{i}] = select({c2}, X[{j}], 0.0) }} else {{ Y[{k}] += 1.0 first never }}
            }} }} }} }}"
        );
        let program = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let mut arguments = vec![vec![1.0; 12], vec![0.0; 12]];
        let result = run_limited(&program, &mut arguments, 1 << 20);
        match check(&program) {
            Ok(unproven) if unproven.is_empty() => {
                n_proven += 1;
                assert_eq!(result, Ok(()), "seed {seed}\n{program}");
            }
            Ok(_) => {}
            Err(VerifyError::OutOfBounds { .. }) => {
                n_refuted += 1;
                assert!(matches!(result, Err(Fault::OutOfBounds { .. })), "seed {seed}: {result:?}\n{program}");
            }
            Err(other) => panic!("seed {seed}: {other}\n{program}"),
        }
    }
    assert!(n_proven > 300 && n_refuted > 300, "{n_proven} {n_refuted}");
}
