//! Vectors of a fused loop over the pixels of an image, which extend from one row into the next.
#![cfg(feature = "llvm")]

mod common;

use common::*;
use tilewright_codegen::{Emit, emit};
use tilewright_ir::expr::{Cond, Expr};
use tilewright_ir::{DType, Index, Program, Target};

/// 3×3 stencil over `[images, height, width]`, of every `stride`-th pixel, with fused loops over all pixels.
///
/// Reads of `pad` pixels around the image are guarded; without padding the image is larger by two instead.
fn stencil(images: i64, height: i64, width: i64, stride: i64, pad: i64, lanes: i64) -> Program {
    let mut p = program(&format!("stencil {images}x{height}x{width} by {stride}, pad {pad}, {lanes} lanes"));
    let (rows, columns) = (height * stride + 2 - 2 * pad, width * stride + 2 - 2 * pad);
    let x = input(&mut p, "X", DType::F32, &[images, rows, columns]);
    let bias = input(&mut p, "Bias", DType::F32, &[images * height]);
    let y = output(&mut p, "Y", DType::F32, &[images, height, width]);
    let [j, l, r, s] = ["j", "l", "r", "s"].map(|name| p.add_loop(name));
    let at = times(lanes, j).add(&ix(l));
    let (image, row, column) = (at.floor_div(height * width), at.floor_div(width).modulo(height), at.modulo(width));
    let (from_row, from_column) =
        (row.scale(stride).add(&ix(r)).offset(-pad), column.scale(stride).add(&ix(s)).offset(-pad));
    let not_below = |i: &Index, least: i64| Cond::Not(Box::new(Cond::Lt(i.clone(), ix(least))));
    let inside = not_below(&from_row, 0)
        .and(Cond::Lt(from_row.clone(), ix(rows)))
        .and(not_below(&from_column, 0))
        .and(Cond::Lt(from_column.clone(), ix(columns)));
    let value = load(x, &[image.clone(), from_row, from_column]);
    let value =
        if pad == 0 { value } else { Expr::Select(Box::new(inside), Box::new(value), Box::new(Expr::Const(0.0))) };
    let to = [image, row, column];
    let n = images * height * width;
    let [first, second] = [
        store(y, &to, load(bias, &[at.floor_div(width)])),
        add_to(y, &to, mul(value, Expr::FromIndex(times(3, r).add(&ix(s)).offset(1))), never()),
    ];
    let extent = if n % lanes == 0 { ix(lanes) } else { Index::from(lanes).smaller(&ix(n).sub(&times(lanes, j))) };
    let start = vector(l, extent.clone(), vec![first]);
    let step = vector(l, extent, vec![second]);
    p.body = vec![for_(j, (n + lanes - 1) / lanes, vec![start, for_(r, 3, vec![for_(s, 3, vec![step])])])];
    p
}

#[test]
fn vectors_across_the_ends_of_rows() {
    for (images, height, width) in [(1, 6, 16), (2, 5, 7), (3, 4, 12), (2, 8, 28), (1, 3, 56), (2, 4, 4)] {
        for (stride, pad) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
            for lanes in [2, 4, 8, 16] {
                check(&stencil(images, height, width, stride, pad, lanes));
            }
        }
    }
}

#[test]
fn a_break_costs_no_division_a_lane() {
    // 16 lanes in rows of 28 pixels have at most one break, wherever the vector starts.
    let asm = |target: &str| {
        let p = stencil(1, 8, 28, 1, 0, 16);
        String::from_utf8(emit(&p, &Target::named(target).unwrap(), Emit::Asm).unwrap()).unwrap()
    };
    for target in ["x86-64-v3", "x86-64-v4"] {
        let asm = asm(target);
        let moved =
            asm.lines().filter(|l| ["vinsert", "vgather"].iter().any(|i| l.trim_start().starts_with(i))).count();
        assert_eq!(moved, 0, "{target}:\n{asm}");
    }
}
