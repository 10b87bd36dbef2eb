//! Register tiles of direct convolutions: instructions of the innermost loop.
#![cfg(feature = "llvm")]

mod common;

use common::*;
use tilewright_codegen::{Emit, emit};
use tilewright_ir::expr::{Cond, Expr};
use tilewright_ir::{DType, Index, Program, Scope, Stmt, Target};

#[derive(Clone, Copy, Debug)]
struct Tile {
    pixels: i64,
    vectors: i64,
    lanes: i64,
    stride: i64,
    /// Whether a condition around the updates skips rows above and below the image.
    skip_rows: bool,
}

const CHANNELS: i64 = 5;

/// Row of `pixels` of a 3×3 convolution, with all output channels of a tile in registers and kernel columns
/// unrolled.
fn convolution(t: Tile) -> Program {
    let Tile { pixels, vectors, lanes, stride, skip_rows } = t;
    let mut p = program(&format!("{t:?}"));
    let width = (pixels - 1) * stride + 3;
    let x = input(&mut p, "X", DType::F32, &[CHANNELS, 4, width]);
    let w = input(&mut p, "W", DType::F32, &[CHANNELS, 3, 3, vectors * lanes]);
    let y = output(&mut p, "Y", DType::F32, &[4, pixels, vectors * lanes]);
    let acc = temporary(&mut p, "Acc", DType::F32, &[pixels, vectors * lanes], Scope::Register);
    let [h, c, r, s, px, v, l] = ["h", "c", "r", "s", "px", "v", "l"].map(|name| p.add_loop(name));
    let channel = times(lanes, v).add(&ix(l));
    let tile = |stmt: Stmt| unrolled(px, pixels, vec![unrolled(v, vectors, vec![vector(l, lanes, vec![stmt])])]);
    let row: Index = ix(h).add(&ix(r)).offset(-1);
    let update = |row: Index| {
        let pixel = load(x, &[ix(c), row, times(stride, px).add(&ix(s))]);
        add_to(acc, &[ix(px), channel.clone()], mul(pixel, load(w, &[ix(c), ix(r), ix(s), channel.clone()])), never())
    };
    let updates = if skip_rows {
        let inside = Cond::Not(Box::new(Cond::Lt(row.clone(), ix(0)))).and(Cond::Lt(row.clone(), ix(4)));
        Stmt::If { cond: inside, then: vec![unrolled(s, 3, vec![tile(update(row))])], otherwise: vec![] }
    } else {
        unrolled(s, 3, vec![tile(update(ix(r)))])
    };
    p.body = vec![for_(
        h,
        4,
        vec![
            Stmt::Alloc(acc),
            tile(store(acc, &[ix(px), channel.clone()], Expr::Const(0.0))),
            for_(c, CHANNELS, vec![for_(r, 3, vec![updates])]),
            tile(store(y, &[ix(h), ix(px), channel.clone()], load(acc, &[ix(px), channel.clone()]))),
        ],
    )];
    p
}

/// Tiles that fill the registers of an AVX-512 and of an AVX2 machine: lanes, pixels, vectors.
const TILES: [(&str, i64, i64, i64); 5] = [
    ("x86-64-v4", 16, 14, 2),
    ("x86-64-v4", 16, 28, 1),
    ("x86-64-v4", 16, 6, 4),
    ("x86-64-v3", 8, 6, 2),
    ("x86-64-v3", 8, 4, 3),
];

fn tiles() -> impl Iterator<Item = (&'static str, Tile)> {
    TILES.iter().flat_map(|&(target, lanes, pixels, vectors)| {
        [(1, false), (2, false), (1, true)]
            .map(|(stride, skip_rows)| (target, Tile { pixels, vectors, lanes, stride, skip_rows }))
    })
}

#[test]
fn convolution_tiles() {
    for (_, tile) in tiles() {
        check(&convolution(tile));
    }
}

#[test]
fn accumulators_stay_in_registers() {
    for (target, tile) in tiles() {
        let p = convolution(tile);
        let asm = String::from_utf8(emit(&p, &Target::named(target).unwrap(), Emit::Asm).unwrap()).unwrap();
        let count = |what: &dyn Fn(&str) -> bool| asm.lines().filter(|l| what(l.trim_start())).count() as i64;
        assert_eq!(count(&|l| l.contains("mm") && l.contains("(%rsp)")), 0, "spills of {} on {target}:\n{asm}", p.name);
        // Each tap of the kernel loads a pixel and a vector of weights once.
        let products = count(&|l| l.starts_with("vfmadd"));
        let pixels = count(&|l| l.starts_with("vbroadcastss") || l.contains("{1to16}"));
        assert_eq!(products, 3 * tile.pixels * tile.vectors, "products of {} on {target}:\n{asm}", p.name);
        assert_eq!(pixels, 3 * tile.pixels, "pixels of {} on {target}:\n{asm}", p.name);
    }
}
