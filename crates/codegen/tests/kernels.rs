//! Generated code compared with the interpreter, on every target that this machine can run.
#![cfg(feature = "llvm")]

mod common;

use std::slice::from_ref;
use std::sync::Arc;

use common::gemm::{ALayout, Gemm};
use common::*;
use tilewright_codegen::{CompileError, Emit, Runtime, compile, emit};
use tilewright_ir::expr::{BinaryOp, Cond, Expr, ReduceOp, UnaryOp};
use tilewright_ir::op::{Contraction, FUNCTIONS, Workload};
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_ir::{Atom, DType, Index, LoopKind, Role, Scope, Stmt, Target, lower};

#[test]
fn tiled_products() {
    for (dtype, _) in dtypes() {
        for a in [ALayout::Panels, ALayout::Rows, ALayout::Plain] {
            for (parallel, prepacked) in [(false, false), (true, true)] {
                check(&Gemm { dtype, a, parallel, prepacked, prefetch: 8, ..Gemm::default() }.program());
            }
        }
    }
}

#[test]
fn tiles_of_many_shapes() {
    for (mr, nv, lanes, ku) in [(6, 2, 8, 1), (4, 3, 8, 2), (12, 2, 16, 1), (3, 1, 12, 4), (5, 2, 7, 1), (1, 1, 3, 2)] {
        let g = Gemm {
            mr,
            nv,
            lanes,
            ku,
            m: mr * 4,
            mc: mr * 2,
            n: nv * lanes * 4,
            nc: nv * lanes * 2,
            k: lanes * ku * 4,
            kc: lanes * ku * 2,
            ..Gemm::default()
        };
        check(&g.program());
    }
}

/// `C[m, n] = A[m, k] · B[k, n]` as plain loops, the innermost vectorized with `lanes` lanes, if given.
fn naive(dtype: DType, m: i64, n: i64, k: i64, lanes: Option<i64>) -> tilewright_ir::Program {
    let mut p = program(&format!("naive {m}x{n}x{k} {lanes:?}"));
    let a = input(&mut p, "A", dtype, &[m, k]);
    let b = input(&mut p, "B", dtype, &[k, n]);
    let c = output(&mut p, "C", dtype, &[m, n]);
    let [i, kk, j, lane] = ["i", "k", "j", "lane"].map(|name| p.add_loop(name));
    let first = Cond::Eq(ix(kk), ix(0));
    let body = |col: Index| {
        add_to(c, &[ix(i), col.clone()], mul(load(a, &[ix(i), ix(kk)]), load(b, &[ix(kk), col])), first.clone())
    };
    let columns = match lanes {
        None => for_(j, n, vec![body(ix(j))]),
        Some(l) => for_(j, n / l, vec![vector(lane, l, vec![body(times(l, j).add(&ix(lane)))])]),
    };
    p.body = vec![for_(i, m, vec![for_(kk, k, vec![columns])])];
    p
}

#[test]
fn naive_products() {
    for (dtype, _) in dtypes() {
        check(&naive(dtype, 5, 7, 9, None));
        check(&naive(dtype, 1, 1, 1, None));
        check(&naive(dtype, 17, 33, 12, Some(11)));
        check(&naive(dtype, 4, 64, 8, Some(16)));
        check(&naive(dtype, 3, 100, 8, Some(100)));
    }
}

#[test]
fn all_operations() {
    for (dtype, _) in dtypes() {
        for vectorized in [false, true] {
            let n = 19;
            let mut p = program(&format!("operations {vectorized}"));
            let x = input(&mut p, "X", dtype, &[n]);
            let y = input(&mut p, "Y", dtype, &[n]);
            let i = p.add_loop("i");
            let at = [ix(i)];
            let (lx, ly) = (load(x, &at), load(y, &at));
            let positive = bin(BinaryOp::Add, un(UnaryOp::Abs, lx.clone()), Expr::Const(0.01));
            let mut values: Vec<Expr> = UnaryOp::ALL
                .iter()
                .map(|(op, _)| {
                    let domain = matches!(op, UnaryOp::Log | UnaryOp::Sqrt);
                    un(*op, if domain { positive.clone() } else { lx.clone() })
                })
                .collect();
            values.extend(BinaryOp::ALL.iter().map(|(op, _)| {
                let left = if *op == BinaryOp::Pow { &positive } else { &lx };
                bin(*op, left.clone(), ly.clone())
            }));
            values.extend([2.0, 3.0, 4.0, -1.0].map(|n| bin(BinaryOp::Pow, lx.clone(), Expr::Const(n))));
            values.push(bin(BinaryOp::Sub, mul(lx.clone(), ly.clone()), lx.clone()));
            values.push(bin(BinaryOp::Sub, lx.clone(), mul(lx.clone(), ly.clone())));
            values.push(bin(BinaryOp::Add, Expr::FromIndex(times(3, i).offset(-5)), ly.clone()));
            values.push(bin(BinaryOp::Max, lx.clone(), Expr::Const(0.0)));
            values.push(Expr::Select(
                Box::new(Cond::Less(Box::new(lx.clone()), Box::new(ly.clone()))),
                Box::new(Expr::Const(1.5)),
                Box::new(lx.clone()),
            ));
            let outputs: Vec<_> = (0..values.len()).map(|o| output(&mut p, &format!("O{o}"), dtype, &[n])).collect();
            let body = outputs.iter().zip(values).map(|(o, v)| store(*o, &at, v)).collect();
            p.body = vec![if vectorized { vector(i, n, body) } else { for_(i, n, body) }];
            check(&p);
        }
    }
}

/// Checks minima and maxima of two variables, of a variable and a constant in either order, and of a row.
#[test]
fn minima_and_maxima_keep_nan() {
    for (dtype, vectorized) in dtypes().flat_map(|(dtype, _)| [(dtype, false), (dtype, true)]) {
        let mut p = program("nan");
        let x = input(&mut p, "X", dtype, &[4, 16]);
        let i = p.add_loop("i");
        let k = p.add_loop("k");
        let at = |row: i64| load(x, &[Index::from(row), ix(i)]);
        let zero_by_zero = bin(BinaryOp::Div, Expr::Const(0.0), Expr::Const(0.0));
        let is_third = Cond::Lt(Index::from(i).modulo(3), Index::from(1));
        let some = Expr::Select(Box::new(is_third), Box::new(zero_by_zero), Box::new(at(0)));
        let mut body = Vec::new();
        for (op, name) in [(BinaryOp::Min, "L"), (BinaryOp::Max, "H")] {
            let values = [
                bin(op, some.clone(), at(1)),
                bin(op, at(1), some.clone()),
                bin(op, some.clone(), Expr::Const(0.25)),
                bin(op, Expr::Const(0.25), some.clone()),
            ];
            for (number, value) in values.into_iter().enumerate() {
                let to = output(&mut p, &format!("{name}{number}"), dtype, &[16]);
                body.push(store(to, &[ix(i)], value));
            }
        }
        let y = temporary(&mut p, "Y", dtype, &[4, 16], Scope::Global);
        let rows: Vec<Stmt> = (0..4)
            .map(|row| store(y, &[Index::from(row), ix(i)], if row == 2 { some.clone() } else { at(row) }))
            .collect();
        let l = p.add_loop("l");
        let best = output(&mut p, "B", dtype, &[16]);
        let first = Cond::Eq(ix(k), Index::from(0));
        let step = Stmt::Update {
            buffer: best,
            index: vec![ix(l)],
            op: ReduceOp::Max,
            value: load(y, &[ix(k), ix(l)]),
            first,
        };
        let nest = |var, body| if vectorized { vector(var, 16, body) } else { for_(var, 16, body) };
        p.body = vec![Stmt::Alloc(y), nest(i, [body, rows].concat()), for_(k, 4, vec![nest(l, vec![step])])];
        check(&p);
    }
}

#[test]
fn every_vector_length() {
    for (dtype, _) in dtypes() {
        for lanes in 1..=33 {
            let mut p = program(&format!("length {lanes}"));
            let a = input(&mut p, "A", dtype, &[3, lanes]);
            let b = output(&mut p, "B", dtype, &[3, lanes]);
            let strided = output(&mut p, "S", dtype, &[3, lanes, 1 + lanes % 3]);
            let r = temporary(&mut p, "R", dtype, &[lanes], Scope::Register);
            let [i, l, l2, s] = ["i", "l", "l2", "s"].map(|name| p.add_loop(name));
            let doubled = |l| mul(Expr::Const(2.0), load(a, &[ix(i), ix(l)]));
            p.body = vec![for_(
                i,
                3,
                vec![
                    Stmt::Alloc(r),
                    vector(l, lanes, vec![store(r, &[ix(l)], doubled(l))]),
                    vector(l, lanes, vec![add_to(r, &[ix(l)], load(a, &[ix(i), ix(l)]), never())]),
                    vector(l2, lanes, vec![store(b, &[ix(i), ix(l2)], load(r, &[ix(l2)]))]),
                    unrolled(
                        s,
                        1 + lanes % 3,
                        vec![vector(
                            l2,
                            lanes,
                            vec![store(strided, &[ix(i), ix(l2), ix(s)], load(b, &[ix(i), ix(l2)]))],
                        )],
                    ),
                ],
            )];
            check(&p);
        }
    }
}

#[test]
fn transposing_packs() {
    for (dtype, _) in dtypes() {
        // All heights in one type; what differs in others is the size of a lane.
        for rows in (2..=16).step_by(if dtype == DType::F32 { 1 } else { 3 }) {
            for lanes in [4, 8, 16, 5, 13, 24] {
                let mut p = program(&format!("transpose {rows} {lanes}"));
                let a = input(&mut p, "A", dtype, &[rows, 3 * lanes]);
                let b = output(&mut p, "B", dtype, &[3 * lanes, rows]);
                let [o, l] = ["o", "l"].map(|name| p.add_loop(name));
                let k = times(lanes, o).add(&ix(l));
                // Backwards, as the order of the group's statements must not matter.
                let stores =
                    (0..rows).rev().map(|i| store(b, &[k.clone(), ix(i)], load(a, &[ix(i), k.clone()]))).collect();
                p.body = vec![for_(o, 3, vec![vector(l, lanes, stores)])];
                check(&p);
            }
        }
    }
}

/// Checks copies in another type whose lanes are stored one by one.
#[test]
fn converted_lanes_with_gaps() {
    for (dtype, name) in DType::ALL {
        for to in [DType::F32, DType::F64, DType::I32] {
            for lanes in [3, 8, 17] {
                let mut p = program(&format!("{lanes} lanes of {name} as {to:?}"));
                let a = input(&mut p, "A", dtype, &[2, lanes]);
                let b = output(&mut p, "B", to, &[2, lanes, 2]);
                let [i, l, s] = ["i", "l", "s"].map(|name| p.add_loop(name));
                let copy = store(b, &[ix(i), ix(l), ix(s)], load(a, &[ix(i), ix(l)]));
                p.body = vec![for_(i, 2, vec![for_(s, 2, vec![vector(l, lanes, vec![copy])])])];
                check(&p);
            }
        }
    }
}

#[test]
fn strided_loads() {
    for stride in 1..=5 {
        for lanes in [3, 8, 16, 17] {
            let mut p = program(&format!("stride {stride} {lanes}"));
            let a = input(&mut p, "A", DType::F32, &[2, (lanes - 1) * stride + 1]);
            let b = output(&mut p, "B", DType::F32, &[2, lanes]);
            let back = output(&mut p, "Back", DType::F32, &[2, lanes]);
            let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
            p.body = vec![for_(
                i,
                2,
                vec![vector(
                    l,
                    lanes,
                    vec![
                        store(b, &[ix(i), ix(l)], load(a, &[ix(i), times(stride, l)])),
                        store(back, &[ix(i), times(-1, l).offset(lanes - 1)], load(a, &[ix(i), times(stride, l)])),
                    ],
                )],
            )];
            check(&p);
        }
    }
}

/// Row of `n` elements padded with zeros, through a select whose other side is out of bounds.
fn padded(n: i64, pad: i64, lanes: Option<i64>) -> tilewright_ir::Program {
    let mut p = program(&format!("padded {n} {pad} {lanes:?}"));
    let a = input(&mut p, "A", DType::F32, &[n]);
    let b = output(&mut p, "B", DType::F32, &[2, n + 2 * pad]);
    let [row, j, lane] = ["row", "j", "lane"].map(|name| p.add_loop(name));
    let value = |at: Index| {
        let inside = Cond::Not(Box::new(Cond::Lt(at.offset(-pad), ix(0))))
            .and(Cond::Lt(at.offset(-pad), ix(n)))
            .and(Cond::Lt(ix(row), ix(1)));
        Expr::Select(
            Box::new(inside),
            Box::new(load(a, &[at.offset(-pad)])),
            Box::new(Expr::FromIndex(at.sub(&ix(100)))),
        )
    };
    let body = |at: Index| store(b, &[ix(row), at.clone()], value(at));
    let columns = match lanes {
        None => for_(j, n + 2 * pad, vec![body(ix(j))]),
        Some(l) => for_(j, (n + 2 * pad) / l, vec![vector(lane, l, vec![body(times(l, j).add(&ix(lane)))])]),
    };
    p.body = vec![for_(row, 2, vec![columns])];
    p
}

#[test]
fn selects_guard_loads() {
    check(&padded(20, 3, None));
    check(&padded(26, 3, Some(16)));
    check(&padded(26, 3, Some(8)));
    check(&padded(20, 2, Some(12)));
    check(&padded(19, 3, Some(5)));
}

#[test]
fn branches() {
    for lanes in [1, 16, 7] {
        let n = 3 * lanes;
        let mut p = program(&format!("branches {lanes}"));
        let a = input(&mut p, "A", DType::F32, &[n]);
        let b = output(&mut p, "B", DType::F32, &[n]);
        let c = output(&mut p, "C", DType::F32, &[4, n]);
        let [i, j, l] = ["i", "j", "l"].map(|name| p.add_loop(name));
        let at = times(lanes, j).add(&ix(l));
        let small = Cond::Less(Box::new(load(a, from_ref(&at))), Box::new(Expr::Const(0.25)));
        p.body = vec![
            for_(
                j,
                3,
                vec![vector(
                    l,
                    lanes,
                    vec![Stmt::If {
                        cond: small.and(Cond::Lt(at.clone(), ix(2 * lanes))),
                        then: vec![store(b, from_ref(&at), Expr::Const(1.0))],
                        otherwise: vec![store(b, from_ref(&at), un(UnaryOp::Neg, load(a, from_ref(&at))))],
                    }],
                )],
            ),
            for_(
                i,
                4,
                vec![for_(
                    j,
                    3,
                    vec![vector(
                        l,
                        lanes,
                        vec![Stmt::If {
                            cond: Cond::Eq(ix(i), ix(2)),
                            then: vec![store(c, &[ix(i), at.clone()], load(b, from_ref(&at)))],
                            otherwise: vec![store(c, &[ix(i), at.clone()], Expr::FromIndex(ix(i)))],
                        }],
                    )],
                )],
            ),
        ];
        check(&p);
    }
}

#[test]
fn reductions() {
    for (op, _) in ReduceOp::ALL {
        for lanes in [1, 16, 9] {
            let mut p = program(&format!("reduce {op:?} {lanes}"));
            let a = input(&mut p, "A", DType::F32, &[23, lanes]);
            let b = output(&mut p, "B", DType::F32, &[lanes]);
            let all = output(&mut p, "All", DType::F32, &[1]);
            let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
            p.body = vec![
                for_(
                    i,
                    23,
                    vec![vector(
                        l,
                        lanes,
                        vec![update(b, &[ix(l)], op, load(a, &[ix(i), ix(l)]), Cond::Eq(ix(i), ix(0)))],
                    )],
                ),
                // A reduction over the lanes, which must run in order.
                vector(l, lanes, vec![update(all, &[ix(0)], op, load(b, &[ix(l)]), Cond::Eq(ix(l), ix(0)))]),
            ];
            check(&p);
        }
    }
}

#[test]
fn extents_known_at_run_time() {
    // Triangular loops, with every kind of inner loop.
    for kind in [LoopKind::Serial, LoopKind::Vectorized, LoopKind::Unrolled, LoopKind::Parallel] {
        for n in [7, 40] {
            let mut p = program(&format!("triangle {kind:?} {n}"));
            let a = input(&mut p, "A", DType::F32, &[n, n]);
            let b = output(&mut p, "B", DType::F32, &[n, n]);
            let [i, j, z] = ["i", "j", "z"].map(|name| p.add_loop(name));
            let extent = ix(i).smaller(&times(2, i).offset(-3));
            p.body = vec![
                for_(i, n, vec![for_(z, n, vec![store(b, &[ix(i), ix(z)], Expr::Const(0.0))])]),
                for_(
                    i,
                    n,
                    vec![for_kind(
                        kind,
                        j,
                        extent,
                        vec![
                            store(b, &[ix(i), ix(j)], mul(load(a, &[ix(i), ix(j)]), Expr::Const(3.0))),
                            add_to(b, &[ix(i), ix(j)], load(a, &[ix(j), ix(i)]), never()),
                        ],
                    )],
                ),
            ];
            check(&p);
        }
    }
}

#[test]
fn tails_of_vectors_at_run_time() {
    for n in [1, 5, 16, 17, 31, 33, 50] {
        let mut p = program(&format!("tail {n}"));
        let a = input(&mut p, "A", DType::F32, &[n]);
        let b = output(&mut p, "B", DType::F32, &[n]);
        let c = output(&mut p, "C", DType::F32, &[n, 2]);
        let r = temporary(&mut p, "R", DType::F32, &[16], Scope::Register);
        let [j, l] = ["j", "l"].map(|name| p.add_loop(name));
        let left = Index::from(16).smaller(&ix(n).sub(&times(16, j)));
        let at = times(16, j).add(&ix(l));
        let tail = |stmt| vector(l, left.clone(), vec![stmt]);
        p.body = vec![for_(
            j,
            (n + 15) / 16,
            vec![
                Stmt::Alloc(r),
                tail(store(r, &[ix(l)], load(a, from_ref(&at)))),
                tail(add_to(r, &[ix(l)], mul(load(a, from_ref(&at)), Expr::Const(3.0)), never())),
                tail(store(b, from_ref(&at), load(r, &[ix(l)]))),
                tail(store(c, &[at.clone(), ix(1)], load(a, from_ref(&at)))),
                tail(store(c, &[at.clone(), ix(0)], load(a, &[ix(n - 1).sub(&at)]))),
            ],
        )];
        check(&p);
    }
}

#[test]
fn index_arithmetic() {
    let n = 61;
    for vectorized in [false, true] {
        for d in [1, 2, 3, 7, 8, 16, -3, -4] {
            let mut p = program(&format!("index {d} {vectorized}"));
            let q = output(&mut p, "Q", DType::F64, &[n]);
            let r = output(&mut p, "R", DType::F64, &[n]);
            let s = output(&mut p, "S", DType::F64, &[n]);
            let i = p.add_loop("i");
            let x = times(3, i).offset(-50);
            let atom = |a: Atom| Expr::FromIndex(Index::atom(a));
            let body = vec![
                store(q, &[ix(i)], atom(Atom::FloorDiv(Arc::new(x.clone()), d))),
                store(r, &[ix(i)], atom(Atom::Mod(Arc::new(x.clone()), d))),
                store(
                    s,
                    &[ix(i)],
                    Expr::FromIndex(x.smaller(&ix(i)).scale(d).add(&x.larger(&times(-1, i))).add(&ix(i).floor_div(3))),
                ),
            ];
            p.body = vec![if vectorized { vector(i, n, body) } else { for_(i, n, body) }];
            check(&p);
        }
    }
}

#[test]
fn irregular_lanes() {
    // Fused loops, in which the position of a lane is a quotient and a remainder.
    for (rows, cols, lanes) in [(6, 8, 16), (5, 7, 5), (4, 12, 16)] {
        let n = rows * cols;
        let mut p = program(&format!("fused {rows} {cols} {lanes}"));
        let a = input(&mut p, "A", DType::F32, &[rows + 1, cols + 1]);
        let b = output(&mut p, "B", DType::F32, &[rows, cols]);
        let [j, l] = ["j", "l"].map(|name| p.add_loop(name));
        let at = times(lanes, j).add(&ix(l));
        let (row, col) = (at.floor_div(cols), at.modulo(cols));
        let body = vec![store(b, &[row.clone(), col.clone()], load(a, &[row.offset(1), col]))];
        p.body = vec![for_(
            j,
            (n + lanes - 1) / lanes,
            vec![if n % lanes == 0 {
                vector(l, lanes, body)
            } else {
                vector(l, Index::from(lanes).smaller(&ix(n).sub(&times(lanes, j))), body)
            }],
        )];
        check(&p);
    }
}

#[test]
fn parallel_loops_have_memory_of_their_own() {
    let n = 24;
    let mut p = program("parallel");
    let a = input(&mut p, "A", DType::F32, &[3, n, 16]);
    let b = output(&mut p, "B", DType::F32, &[3, n, 16]);
    let shared = temporary(&mut p, "Shared", DType::F32, &[16], Scope::Global);
    let own = temporary(&mut p, "Own", DType::F32, &[40, 16], Scope::Local);
    let r = temporary(&mut p, "R", DType::F32, &[16], Scope::Register);
    let stack = temporary(&mut p, "Stack", DType::F32, &[16], Scope::Register);
    let [o, i, z, l, k] = ["o", "i", "z", "l", "k"].map(|name| p.add_loop(name));
    p.body = vec![for_(
        o,
        3,
        vec![
            Stmt::Alloc(shared),
            vector(l, 16, vec![store(shared, &[ix(l)], load(a, &[ix(o), ix(3), ix(l)]))]),
            for_kind(
                LoopKind::Parallel,
                i,
                n,
                vec![
                    Stmt::Alloc(own),
                    Stmt::Alloc(r),
                    Stmt::Alloc(stack),
                    for_(
                        k,
                        40,
                        vec![vector(l, 16, vec![store(own, &[ix(k), ix(l)], load(a, &[ix(o), ix(i), ix(l)]))])],
                    ),
                    vector(l, 16, vec![store(r, &[ix(l)], load(shared, &[ix(l)]))]),
                    for_(z, 16, vec![store(stack, &[ix(z)], load(shared, &[ix(z)]))]),
                    for_kind(
                        LoopKind::Parallel,
                        k,
                        40,
                        vec![vector(l, 16, vec![add_to(r, &[ix(l)], load(own, &[ix(k), ix(l)]), never())])],
                    ),
                    for_(z, 16, vec![add_to(stack, &[ix(z)], load(own, &[ix(z), ix(2)]), never())]),
                    vector(
                        l,
                        16,
                        vec![store(
                            b,
                            &[ix(o), ix(i), ix(l)],
                            bin(BinaryOp::Add, load(r, &[ix(l)]), load(stack, &[ix(l)])),
                        )],
                    ),
                ],
            ),
        ],
    )];
    check(&p);
    let kernel = compile(&p, &host()).unwrap();
    assert_eq!(kernel.scratch_bytes(2) - kernel.scratch_bytes(1), 40 * 16 * 4);
}

/// Checks that a temporary is a thread's own inside a parallel loop even if another version of the code, such
/// as a tail of one iteration, allocates it outside.
#[test]
fn threads_have_memory_of_their_own_beside_a_tail() {
    let n = 24;
    for is_tail_first in [false, true] {
        let mut p = program("parallel");
        let a = input(&mut p, "A", DType::F32, &[n + 1, 16]);
        let b = output(&mut p, "B", DType::F32, &[n + 1, 16]);
        let own = temporary(&mut p, "Own", DType::F32, &[40, 16], Scope::Local);
        let [i, k, l] = ["i", "k", "l"].map(|name| p.add_loop(name));
        let at = |row: Index| {
            let copy = vector(l, 16, vec![store(own, &[ix(k), ix(l)], load(a, &[row.clone(), ix(l)]))]);
            let clear = vector(l, 16, vec![store(b, &[row.clone(), ix(l)], Expr::Const(0.0))]);
            let sum = vector(l, 16, vec![add_to(b, &[row, ix(l)], load(own, &[ix(k), ix(l)]), never())]);
            vec![Stmt::Alloc(own), for_(k, 40, vec![copy]), clear, for_(k, 40, vec![sum])]
        };
        let tail = Stmt::If { cond: Cond::True, then: at(n.into()), otherwise: Vec::new() };
        p.body = vec![for_kind(LoopKind::Parallel, i, n, at(ix(i))), tail];
        if is_tail_first {
            p.body.reverse();
        }
        check(&p);
        let kernel = compile(&p, &host()).unwrap();
        assert_eq!(kernel.scratch_bytes(2) - kernel.scratch_bytes(1), 40 * 16 * 4);
    }
}

#[test]
fn sums_in_parts_do_not_depend_on_who_computes_them() {
    let steps = "split k 64 -> part in_part shrink\nreorder part i j in_part\nrfactor C part as S\n\
         split S.j 16 -> jo jl shrink\nreorder S.i jo S.in_part jl\naccumulate S at jo -> S.r\nvectorize jl\n\
         parallel S.part\nlayout S 0 1 2/48 2%48\nsplit j 16 -> total.v total.l shrink\n\
         reorder i total.v part total.l\naccumulate C at total.v -> total\nvectorize total.l\nparallel i";
    for (_, dtype) in dtypes().filter(|(dtype, _)| !dtype.is_half()) {
        let untransformed = Workload::parse(&format!("matmul:m=5,n=37,k=331,dtype={dtype}")).unwrap().program();
        let p = lower::lower(&apply_all(&untransformed, &parse_steps(steps).unwrap()).unwrap());
        check(&p);
        let arguments = arguments(&p);
        for kernel in targets().iter().flat_map(|target| kernels(&p, target)) {
            let alone = run(&p, &kernel, &arguments, &Runtime::serial(), 1);
            assert_eq!(run(&p, &kernel, &arguments, &two_threads(), 2), alone, "the same bits");
        }
    }
}

#[test]
fn kept_buffers_survive() {
    let mut p = program("kept");
    let w = buffer(&mut p, "W", DType::F32, &[8, 16], Scope::Global, Role::ConstInput);
    let y = output(&mut p, "Y", DType::F32, &[16, 8]);
    let t = buffer(&mut p, "T", DType::F32, &[16, 8], Scope::Global, Role::Kept);
    let [i, j] = ["i", "j"].map(|name| p.add_loop(name));
    p.prepare = vec![for_kind(
        LoopKind::Parallel,
        i,
        16,
        vec![for_(
            j,
            8,
            vec![
                store(t, &[ix(i), ix(j)], load(w, &[ix(j), ix(i)])),
                add_to(t, &[ix(i), ix(j)], Expr::Const(1.0), never()),
            ],
        )],
    )];
    p.body = vec![for_(i, 16, vec![vector(j, 8, vec![store(y, &[ix(i), ix(j)], load(t, &[ix(i), ix(j)]))])])];
    check(&p);
}

#[test]
fn operators_as_they_come() {
    for text in [
        "conv2d:c=4,h=9,w=7,k=6,r=3,s=2,stride_h=2,pad=1,groups=2,layout=blocked,epilogue=bias+add+clip",
        "conv2d_transpose:n=2,c=3,h=4,w=5,k=4,r=3,s=3,stride=2,pad=1,out_pad=1,epilogue=gelu",
        "depthwise_conv2d:c=3,h=8,w=8,r=3,s=3,dilation=2,multiplier=2,layout=blocked,epilogue=sigmoid",
        "batch_matmul:b=2,m=5,n=6,k=7,ta=1,tb=1,dtype=f64",
        "dense:m=3,n=9,k=5,epilogue=tanh+bias",
    ] {
        check(&Workload::parse(text).unwrap().program());
    }
}

#[test]
fn register_buffers_read_in_parts() {
    let mut p = program("parts");
    let a = input(&mut p, "A", DType::F32, &[32]);
    let b = output(&mut p, "B", DType::F32, &[32]);
    let c = output(&mut p, "C", DType::F32, &[32]);
    let r = temporary(&mut p, "R", DType::F32, &[32], Scope::Register);
    let odd = temporary(&mut p, "Odd", DType::F32, &[32], Scope::Register);
    let [l, u] = ["l", "u"].map(|name| p.add_loop(name));
    p.body = vec![
        Stmt::Alloc(r),
        Stmt::Alloc(odd),
        vector(l, 32, vec![store(r, &[ix(l)], load(a, &[ix(l)]))]),
        unrolled(u, 32, vec![add_to(r, &[ix(u)], Expr::FromIndex(ix(u)), never())]),
        unrolled(
            u,
            4,
            vec![vector(l, 8, vec![store(b, &[times(8, u).add(&ix(l))], load(r, &[times(8, u).add(&ix(l))]))])],
        ),
        // Partially overlapping accesses.
        vector(l, 32, vec![store(odd, &[ix(l)], Expr::Const(0.0))]),
        unrolled(u, 3, vec![vector(l, 8, vec![store(odd, &[times(8, u).add(&ix(l)).offset(4)], load(a, &[ix(l)]))])]),
        vector(l, 32, vec![store(c, &[ix(l)], load(odd, &[ix(l)]))]),
    ];
    check(&p);
}

#[test]
fn aliasing_is_respected_inside_a_buffer() {
    let mut p = program("shift");
    let a = input(&mut p, "A", DType::F32, &[64]);
    let b = output(&mut p, "B", DType::F32, &[64]);
    let [i, j] = ["i", "j"].map(|name| p.add_loop(name));
    p.body = vec![
        for_(i, 64, vec![store(b, &[ix(i)], load(a, &[ix(i)]))]),
        for_(
            j,
            9,
            vec![for_(
                i,
                63,
                vec![
                    store(b, &[ix(i).offset(1)], bin(BinaryOp::Add, load(b, &[ix(i)]), Expr::Const(1.0))),
                    add_to(b, &[ix(i)], load(b, &[ix(i).offset(1)]), never()),
                    store(b, &[ix(i)], mul(load(b, &[ix(i)]), Expr::Const(0.25))),
                ],
            )],
        ),
    ];
    check(&p);
}

/// Checks every epilogue function, in vectors of 16 columns and a shorter one.
#[test]
fn functions_of_epilogues() {
    // Some functions quantize integer sums to bytes.
    for spec in FUNCTIONS {
        let of_types = if spec.function.is_of_integers() { &["u8i8"][..] } else { &["f32", "f64"] };
        for dtype in of_types {
            let of_sums = !spec.function.is_of_integers() || ["init", "dequant"].contains(&spec.name);
            let before = if of_sums { "" } else { "dequant+" };
            let (n, steps) = match spec.name {
                "gated" => (64, format!("vectorize {}", Contraction::OF_PAIR)),
                _ => (21, "split oj 16 -> ov ol shrink\nvectorize ol".to_owned()),
            };
            let text = format!("dense:m=2,n={n},k=5,dtype={dtype},epilogue={before}{}", spec.name);
            let untransformed = Workload::parse(&text).unwrap().program();
            let steps = parse_steps(&steps).unwrap();
            let scheduled = apply_all(&untransformed, &steps).unwrap_or_else(|(_, e)| panic!("{text}: {e}"));
            check_on(&lower::lower(&scheduled), &host());
        }
    }
}

/// Checks lookups in a table of 256 bytes by each byte, in vectors of bytes and of words and in their tails.
#[test]
fn tables_of_bytes() {
    let table: Vec<f64> = (0..256).map(|at| f64::from((at * 89 + 7) % 256)).collect();
    for (lanes, dtype) in [(64, "u8"), (16, "u8"), (16, "f32"), (64, "f32"), (50, "u8"), (5, "f32")] {
        let n = 4 * lanes;
        let text = format!(
            "program \"table\" buffer T: u8[256] global input buffer X: u8[{n}] global input
            buffer Y: {dtype}[{n}] global output loops i, j
            run {{ for i in 4 {{ vectorized j in {lanes} {{ Y[{lanes}*i + j] = T[at(X[{lanes}*i + j])] }} }} }}"
        );
        let program = tilewright_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
        let bytes: Vec<f64> = (0..n).map(|at| f64::from((at * 37 + 3) % 256)).collect();
        let expected: Vec<f64> = bytes.iter().map(|byte| table[*byte as usize]).collect();
        let given = [table.clone(), bytes, vec![0.0; n as usize]];
        for target in targets() {
            for kernel in kernels(&program, &target) {
                let got = run(&program, &kernel, &given, &Runtime::serial(), 1);
                assert_eq!(got[2], expected, "{lanes} lanes of {dtype} on {target}");
            }
        }
    }
}

/// Checks that quotients that are rounded are those of a division, near ties and beyond all numbers.
#[test]
fn rounded_quotients_are_those_of_a_division() {
    let scales = [0.036_580_894_f32, 1.9999999, 1.0000001, 3.0, 7.3e-20, 2.5e20];
    for scale in scales {
        let mut numbers = vec![f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0, -0.0];
        for level in -129..257_i16 {
            let middle = (f32::from(level) + 0.5) * scale;
            numbers.extend([middle, middle.next_up(), middle.next_down(), middle.next_up().next_up()]);
        }
        numbers.resize(numbers.len().next_multiple_of(64), 1.0);
        let n = numbers.len();
        for divisor in ["S[0]", &format!("{scale:?}")] {
            let text = format!(
                "program \"quotients\" buffer S: f32[1] global input buffer X: f32[{n}] global input
                buffer Y: f32[{n}] global output buffer Q: u8[{n}] global output loops i, j
                run {{ for i in {} {{ vectorized j in 32 {{
                    Y[32*i + j] = round(X[32*i + j] / {divisor})
                    Q[32*i + j] = f32(select(less(0.0, round(X[32*i + j] / {divisor}) + 3.0),
                        min(round(X[32*i + j] / {divisor}) + 3.0, 255.0), 0.0))
                }} }} }}",
                n / 32
            );
            let program = tilewright_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
            let given = [vec![scale.into()], numbers.iter().map(|&x| x.into()).collect(), vec![0.0; n], vec![0.0; n]];
            let whole: Vec<f64> = numbers.iter().map(|x| f64::from((x / scale).round_ties_even())).collect();
            let bytes: Vec<f64> = whole.iter().map(|x| (x + 3.0).clamp(0.0, 255.0)).collect();
            for target in targets() {
                for kernel in kernels(&program, &target) {
                    let got = run(&program, &kernel, &given, &Runtime::serial(), 1);
                    // Quotients that are whole numbers anyway need not be those of a division.
                    let is_same = |(a, b): (&f64, &f64)| a == b || a.abs() > 1e9 && a.signum() == b.signum();
                    assert!(got[2].iter().zip(&whole).all(is_same), "by {divisor} on {target}");
                    assert_eq!(got[3], bytes, "by {divisor} on {target}");
                }
            }
        }
    }
}

/// Checks that rounded numbers in four vectors are stored as bytes together, wherever these lie: ties, both
/// ends of the type, numbers beyond all integers and NaN.
#[test]
fn four_vectors_of_rounded_numbers_become_bytes() {
    let mut numbers = vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, 3e9, -3e9, 1e5, -1e5];
    numbers.extend((numbers.len() as u8..64).map(|at| f32::from(at) * 7.5 - 220.0));
    for (name, zero, [low, high]) in [("u8", 113.0, [0.0, 255.0]), ("i8", -77.0, [-128.0, 127.0])] {
        for places in [[0, 16, 32, 48], [0, 16, 96, 112], [0, 32, 64, 96]] {
            let row = |(at, place): (usize, &usize)| {
                format!(
                    "vectorized j in 16 {{ Q[j + {place}] = {name}(f32(min(max(f32(round(X[j + {}])
                        + f32({name}(Z[0]))), {low:?}), {high:?}))) }}",
                    16 * at
                )
            };
            let text = format!(
                "program \"bytes\" buffer X: f32[64] global input buffer Z: f32[1] global input
                buffer Q: {name}[128] global output loops i, j run {{ for i in 1 {{ {} }} }}",
                places.iter().enumerate().map(row).collect::<String>()
            );
            let program = tilewright_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
            let given = [numbers.iter().map(|&x| x.into()).collect(), vec![zero], vec![0.0; 128]];
            for target in targets() {
                for kernel in kernels(&program, &target) {
                    let got = run(&program, &kernel, &given, &Runtime::serial(), 1);
                    for (at, x) in numbers.iter().enumerate() {
                        let whole = f64::from(x.round_ties_even()) + zero;
                        let expected = if x.is_nan() { 0.0 } else { whole.clamp(low, high) };
                        assert_eq!(got[2][places[at / 16] + at % 16], expected, "{x} as {name} on {target}");
                    }
                }
            }
        }
    }
}

/// Checks that every 16-bit float is read and written exactly, and that numbers in between round to nearest.
#[test]
fn halves_are_converted_exactly() {
    for (dtype, name) in dtypes().filter(|(dtype, _)| dtype.is_half()) {
        let n = 1 << 16;
        for kind in ["vectorized", "for"] {
            let text = format!(
                "program \"halves\" buffer X: {name}[{n}] global input buffer Z: f32[{n}] global input
                buffer Y: f32[{n}] global output buffer V: {name}[{n}] global output
                buffer W: f32[{n}] global output loops i, j
                run {{ for i in 4096 {{ {kind} j in 16 {{
                    Y[16*i + j] = X[16*i + j] V[16*i + j] = Z[16*i + j] W[16*i + j] = f32({name}(Z[16*i + j])) * 1.0
                }} }} }}"
            );
            let program = tilewright_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
            let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let values = dtype.read(&all);
            // The numbers, the midpoints between two of them, slightly more and less, and numbers beyond the
            // largest.
            let between: Vec<f64> = (0..n as u64)
                .map(|at| {
                    let [a, b] = [at, at + 1].map(|at| values[at.min(n as u64 - 1) as usize]);
                    let middle = if (b - a).is_finite() { (a + b) / 2.0 } else { 1.5 * a };
                    let aside = [0i32, 1, -1, 2][at as usize % 4];
                    let bits = (middle as f32).to_bits();
                    if middle == 0.0 { middle } else { f32::from_bits(bits.wrapping_add_signed(aside)).into() }
                })
                .collect();
            let nothing = vec![f64::NAN; n];
            let given = [values.clone(), between.clone(), nothing.clone(), nothing.clone(), nothing];
            let rounded: Vec<f64> = between.iter().map(|x| dtype.round(*x)).collect();
            let expected = [&values, &rounded, &rounded];
            for target in targets() {
                for kernel in kernels(&program, &target) {
                    let got = run(&program, &kernel, &given, &Runtime::serial(), 1);
                    for (got, expected) in got[2..].iter().zip(expected) {
                        let is_same = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        let wrong = got.iter().zip(expected).position(|pair| !is_same(pair));
                        let at = wrong.map(|at| (at, between[at], got[at], expected[at]));
                        assert_eq!(at, None, "{name} on {target}: element, what it was, is and should be");
                    }
                }
            }
        }
    }
}

#[test]
fn casts_round_in_between() {
    let text = "program \"casts\" buffer X: f64[24] global input buffer Y: f64[24] global output loops i, l
        run { for i in 2 { vectorized l in 12 { Y[12*i + l] = f32(X[12*i + l] * 0.1) + f64(f32(0.1)) } } }";
    check(&tilewright_ir::text::parse(text).unwrap());
}

/// Program with a value of `i` for each lane or row, with inputs of all types.
fn of_whole_numbers(of_y: &str, value: &str, is_vector: bool) -> tilewright_ir::Program {
    let kind = if is_vector { "vectorized" } else { "for" };
    let text = format!(
        "program \"{of_y} = {value}\" buffer A: i32[19] global input buffer B: i64[19] global input
        buffer C: i8[19] global input buffer D: u8[19] global input buffer E: bool[19] global input
        buffer X: f32[19] global input buffer T: f32[5, 19] global input buffer U: u8[19, 6] global input
        buffer P: i64[19] global input buffer Y: {of_y}[19] global output loops i
        run {{ {kind} i in 19 {{ Y[i] = {value} }} }}"
    );
    tilewright_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn whole_numbers() {
    for (of_y, value) in [
        ("i32", "A[i] * 3 - B[i] + C[i]"),
        ("i64", "max(min(A[i], B[i]), D[i]) + index(2*i)"),
        ("i64", "A[i] / C[i] + neg(abs(D[i]))"),
        ("i8", "A[i] * 20 + D[i]"),
        ("u8", "f32(X[i] * 700.0)"),
        ("bool", "A[i] + 3"),
        ("bool", "select(less(X[i], 0.25), 1.0, 0.0)"),
        ("bool", "select(less(B[i], A[i]) && not(less(C[i], 5.0)), 1.0, 0.0)"),
        ("f32", "select(less(0.0, E[i]), X[i], A[i])"),
        ("f32", "(1.0 - f32(E[i])) * -3.0 + X[i]"),
        ("f32", "X[i] + f32(X[i] * f32(C[i]))"),
        ("f64", "B[i] * 0.5 + D[i]"),
        ("i32", "f32(X[i] * 1e20)"),
        ("i32", "i64(f64(X[i] * 1e14))"),
        ("i32", "select(less(A[i], 2.5), B[i], 0.0)"),
        ("i64", "sqrt(D[i]) + floor(A[i])"),
        ("i8", "C[i]"),
        ("i64", "bool(A[i] - 7)"),
    ] {
        for is_vector in [false, true] {
            check(&of_whole_numbers(of_y, value, is_vector));
        }
    }
    let sums = "program \"sums\" buffer A: i32[7, 19] global input buffer C: i8[7, 19] global input
        buffer S: i32[19] global output buffer M: i8[7] global output loops i, j, k, l run {
        for i in 7 { vectorized j in 19 { S[j] += A[i, j] * C[i, j] first i == 0 } }
        for k in 7 { for l in 19 { M[k] max= C[k, l] first l == 0 } } }";
    check(&tilewright_ir::text::parse(sums).unwrap());
}

#[test]
fn elements_at_computed_places() {
    for (of_y, value) in [
        ("f32", "T[at(P[3]), i]"),
        ("f32", "T[at(P[i]), i]"),
        ("f32", "T[at(A[i]), at(P[i])] + X[i]"),
        ("f32", "T[2, at(X[i] * 30.0)]"),
        ("u8", "U[i, at(C[i])]"),
        ("u8", "U[at(U[i, at(P[i])] - 3), 2]"),
        ("f32", "select(less(0.0, X[i]), T[at(P[i] + 1000000), i], 0.0)"),
        ("f32", "select(i < 7, T[at(P[2]), i + 12], X[i])"),
        ("f32", "select(6 < i, T[at(P[i]), i - 7], X[i])"),
    ] {
        for is_vector in [false, true] {
            check(&of_whole_numbers(of_y, value, is_vector));
        }
    }
    let rows = "program \"rows\" buffer I: i64[23] global input buffer T: f32[40, 35] global input
        buffer Y: f32[23, 35] global output loops i, j run {
        parallel i in 23 { vectorized j in 35 { Y[i, j] = T[at(I[i]), j] } } }";
    check(&tilewright_ir::text::parse(rows).unwrap());
}

/// Checks that GPU programs run on a CPU, with blocks and threads in sequence, so that they can be tested
/// without a GPU.
#[test]
fn blocks_and_threads_run_in_order() {
    let gpu = "program \"gpu\" buffer A: f32[40, 50] global input buffer B: f32[50, 48] global input
        buffer C: f32[40, 48] global output buffer A.s: f32[16, 8] shared temporary
        buffer C.r: f32[16, 16, 3] register temporary
        loops by, bx, ko, a, b, ty, tx, k, j run {
        block.y by in 3 { block.x bx in 1 {
            alloc C.r
            thread.y ty in min(16, 40 - 16*by) { thread.x tx in 16 { unrolled j in 3 { C.r[ty, tx, j] = 0.0 } } }
            for ko in 7 {
                alloc A.s
                thread.y a in min(16, 40 - 16*by) { thread.x b in min(8, 50 - 8*ko) {
                    A.s[a, b] = A[16*by + a, 8*ko + b] } }
                barrier
                thread.y ty in min(16, 40 - 16*by) { thread.x tx in 16 { for k in min(8, 50 - 8*ko) {
                    unrolled j in 3 { C.r[ty, tx, j] += A.s[ty, k] * B[8*ko + k, 3*tx + j] first never } } } }
                barrier
            }
            thread.y ty in min(16, 40 - 16*by) { thread.x tx in 16 { vectorized j in 3 {
                C[16*by + ty, 3*tx + j] = C.r[ty, tx, j] } } }
        } } }";
    check(&tilewright_ir::text::parse(gpu).unwrap());
}

#[test]
fn gpus_are_refused() {
    let p = Gemm::default().program();
    let gpu = Target::named("sm_90a").unwrap();
    assert!(matches!(compile(&p, &gpu), Err(CompileError::NotHost { .. })));
    assert!(matches!(emit(&p, &gpu, Emit::Object), Err(CompileError::NotCpu { .. })));
}

#[test]
fn other_machines_are_refused() {
    let p = Gemm::default().program();
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86-64" };
    assert!(matches!(compile(&p, &Target::named(other).unwrap()), Err(CompileError::NotHost { .. })));
}

#[test]
fn text_forms() {
    let p = Gemm::default().program();
    let text = |what| String::from_utf8(emit(&p, &host(), what).unwrap()).unwrap();
    assert!(text(Emit::Llvm).contains("define void @tilewright_run("));
    assert!(!text(Emit::LlvmOptimized).contains("alloca <16 x float>"));
    assert!(text(Emit::Asm).contains("tilewright_prepare:"));
}

/// Signal that terminates a child process that runs the program once, if any.
#[cfg(target_arch = "x86_64")]
fn signal_of(p: &tilewright_ir::Program) -> Option<i32> {
    let kernel = compile(p, &host()).unwrap();
    let arguments = arguments(p);
    // SAFETY: the child only runs the kernel on its own memory, and exits without cleanup.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            run(p, &kernel, &arguments, &Runtime::serial(), 1);
            libc::_exit(0);
        }
        let mut status = 0;
        libc::waitpid(child, &mut status, 0);
        libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn division_by_zero_divides() {
    for guarded in [false, true] {
        let mut p = program("fault");
        let b = output(&mut p, "B", DType::F32, &[8]);
        let i = p.add_loop("i");
        let faulty = Index::atom(Atom::FloorDiv(Arc::new(ix(i)), 0));
        let body = store(b, &[ix(i)], Expr::FromIndex(faulty.clone()));
        let body =
            if guarded { Stmt::If { cond: Cond::Lt(ix(i), ix(0)), then: vec![body], otherwise: vec![] } } else { body };
        p.body = vec![for_(i, 8, vec![body])];
        assert_eq!(signal_of(&p), if guarded { None } else { Some(libc::SIGFPE) });
    }
}
