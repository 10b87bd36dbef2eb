//! Strided loads, in groups and single, from memory and from registers.
#![cfg(feature = "llvm")]

mod common;

use common::*;
use tilewright_codegen::{Emit, emit};
use tilewright_ir::expr::Expr;
use tilewright_ir::{DType, Program, Scope, Stmt, Target};

/// Source of the transposed tile.
#[derive(Clone, Copy, Debug)]
enum From {
    Input,
    Local,
    Register,
}

/// `Y[o, j, lane] = T[lane·pitch + first + j]` for `n` columns `j`, as adjacent stores in one vectorized
/// loop.
fn transpose(dtype: DType, from: From, n: i64, pitch: i64, first: i64, lanes: i64) -> Program {
    let mut p = program(&format!("transpose {dtype:?} {from:?} {n} of {pitch} from {first}, {lanes} lanes"));
    let x = input(&mut p, "X", dtype, &[2, lanes, pitch]);
    let y = output(&mut p, "Y", dtype, &[2, n, lanes]);
    let [o, row, c, l] = ["o", "row", "c", "l"].map(|name| p.add_loop(name));
    // From the last column to the first, as the order of statements must not matter.
    let stores = |load: &dyn Fn(i64) -> Expr| -> Vec<Stmt> {
        (0..n).rev().map(|j| store(y, &[ix(o), ix(j), ix(l)], load(first + j))).collect()
    };
    let body = match from {
        From::Input => vec![vector(l, lanes, stores(&|j| load(x, &[ix(o), ix(l), ix(j)])))],
        From::Local | From::Register => {
            let scope = if matches!(from, From::Local) { Scope::Local } else { Scope::Register };
            let t = temporary(&mut p, "T", dtype, &[lanes, pitch], scope);
            let copy = store(t, &[ix(row), ix(c)], load(x, &[ix(o), ix(row), ix(c)]));
            vec![
                Stmt::Alloc(t),
                unrolled(row, lanes, vec![vector(c, pitch, vec![copy])]),
                vector(l, lanes, stores(&|j| load(t, &[ix(l), ix(j)]))),
            ]
        }
    };
    p.body = vec![for_(o, 2, body)];
    p
}

#[test]
fn groups_of_strided_loads() {
    for (dtype, _) in dtypes() {
        for from in [From::Input, From::Local, From::Register] {
            // All numbers in one type; what differs in others is the size of a lane.
            let (ns, lanes): (&[i64], &[i64]) = match dtype {
                DType::F32 => (&[2, 3, 4, 7, 8, 13, 16, 21], &[2, 4, 8, 14, 16, 19]),
                _ => (&[3, 8, 16], &[4, 14, 16]),
            };
            for &n in ns {
                for &lanes in lanes {
                    check(&transpose(dtype, from, n, n, 0, lanes));
                }
            }
            // Columns of a wider tile, including the last one.
            for (n, pitch, first) in [(8, 32, 24), (16, 64, 16), (5, 16, 11), (12, 24, 3), (1, 16, 15)] {
                check(&transpose(dtype, from, n, pitch, first, 16));
                check(&transpose(dtype, from, n, pitch, first, 6));
            }
        }
    }
}

#[test]
fn writes_between_strided_loads_are_seen() {
    let mut p = program("write between");
    let x = input(&mut p, "X", DType::F32, &[16, 4]);
    let y = output(&mut p, "Y", DType::F32, &[4, 16]);
    let t = temporary(&mut p, "T", DType::F32, &[16, 4], Scope::Local);
    let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
    let read = |j: i64| store(y, &[ix(j), ix(l)], load(t, &[ix(l), ix(j)]));
    p.body = vec![
        Stmt::Alloc(t),
        for_(i, 16, vec![vector(l, 4, vec![store(t, &[ix(i), ix(l)], load(x, &[ix(i), ix(l)]))])]),
        vector(
            l,
            16,
            vec![
                read(0),
                add_to(t, &[ix(l), ix(1)], load(t, &[ix(l), ix(0)]), never()),
                read(1),
                store(t, &[ix(l), ix(3)], load(x, &[ix(l), ix(2)])),
                read(2),
                read(3),
            ],
        ),
    ];
    check(&p);
}

/// Number of lines of the assembly whose instruction starts with one of the names.
fn count(p: &Program, target: &str, names: &[&str]) -> usize {
    let target = Target::named(target).unwrap();
    let asm = String::from_utf8(emit(p, &target, Emit::Asm).unwrap()).unwrap();
    asm.lines().filter(|l| names.iter().any(|name| l.trim_start().starts_with(name))).count()
}

/// Instructions that move lanes.
const SHUFFLES: [&str; 10] =
    ["vunpck", "vshuf", "vperm", "vblend", "vinsert", "vextract", "vpunpck", "vmovlhps", "vmovsldup", "vmovhlps"];

#[test]
fn square_transposes_take_a_logarithm_of_shuffles() {
    for (target, n, shuffles) in [("x86-64-v4", 16, 64), ("x86-64-v3", 8, 24)] {
        for from in [From::Input, From::Register] {
            let p = transpose(DType::F32, from, n, n, 0, n);
            assert_eq!(count(&p, target, &SHUFFLES), shuffles, "{} on {target}", p.name);
            assert_eq!(count(&p, target, &["vmovss", "vgather"]), 0, "{} on {target}", p.name);
        }
    }
}
