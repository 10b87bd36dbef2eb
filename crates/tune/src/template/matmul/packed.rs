//! Matrix products with block-quantized weights.

use super::super::model::{bandwidth, far_rates};
use super::super::step::{
    accumulate, compute_at, parallel, prefetch, reorder, rfactor, split, stage, tensorize, unroll, vectorize,
};
use super::super::{Template, TemplateSetting, ceil_div, constraint_over};
use super::finished_vectors;
use tilewright_ir::dot::STEPS;
use tilewright_ir::op::{Packed, Structure};
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::schedule::{LINE_BYTES, MOST_PREFETCHED_LINES};
use tilewright_ir::{Step, TensorProduct};
use tilewright_search::{Config, Parameter, Space, SpaceError};

/// Register tiles of sums over panels of packed weights, unpacked in registers.
///
/// Loops: the tiles `ir jr` in either order, the blocks of the sum `kb`, then the sum of a block in a
/// separate tile, whose results are scaled and added to the tile of the result. In panels of `nr` columns,
/// the elements of a dot product are contiguous, and so are the scales.
pub const PACKED: Template = Template {
    name: "packed",
    text: "register tile over panels of packed weights, unpacked in registers; unrolling, prefetch, threads",
    serves: |s| s.target.gpu.is_none() && matches!(s.workload.structure(), Structure::Packed(_)),
    space,
    steps,
    estimate: Some(estimate),
};

fn packed(s: &TemplateSetting) -> Packed {
    let Structure::Packed(p) = s.workload.structure() else { panic!("{} has no packed weights", s.workload) };
    p
}

/// Number of groups of eight, or of four, reduction steps in a block.
fn groups_of_block(p: &Packed) -> i64 {
    p.block / (STEPS * p.weights_per_byte())
}

/// Maximum number of vectors of columns of a tile.
const MOST_VECTORS: i64 = 8;

/// Whether registers hold a tile: the sums of a block and in total, the weights of a row and temporaries for
/// unpacking them.
fn fits(s: &TemplateSetting, mr: i64, nv: i64) -> bool {
    2 * mr * nv + nv + 2 < i64::from(s.target.n_vector_registers)
}

/// Number of vectors of columns of a panel: as many as the widest tile of one row has, for any number of
/// rows, so that programs for different numbers of rows read the same weights. Panels consist of whole tiles.
fn panel(s: &TemplateSetting, p: &Packed) -> i64 {
    let vectors = ceil_div(p.n, s.target.lanes(s.workload.dtype));
    let widths = std::iter::successors(Some(MOST_VECTORS), |&nv| (nv > 1).then_some(nv / 2));
    widths.into_iter().find(|&nv| fits(s, 1, nv) && nv < 2 * vectors).unwrap_or(1)
}

/// Cache lines of a block of weights for `nv` vectors of columns, in panels of `width` vectors.
fn lines_of_block(s: &TemplateSetting, p: &Packed, nv: i64, width: i64) -> i64 {
    let at_once = if p.rounds { STEPS } else { 1 };
    let rows = p.block / (p.weights_per_byte() * at_once);
    let bytes = nv * s.target.lanes(s.workload.dtype) * at_once;
    // The rows of a tile are contiguous if it is a whole panel.
    if nv == width { ceil_div(rows * bytes, LINE_BYTES) } else { rows * ceil_div(bytes, LINE_BYTES) }
}

fn space(s: &TemplateSetting) -> Result<Space, SpaceError> {
    let p = packed(s);
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    // A tile consists of whole pairs.
    let of_pair = s.workload.pairs().map_or(1, |part| 2 * part);
    let (most_rows, width) = (p.m.min(8), panel(s, &p));
    let widths: Vec<i64> = (1..=width).filter(|nv| width % nv == 0 && nv * lanes % of_pair == 0).collect();
    let tiles = (1..=most_rows).flat_map(|mr| widths.iter().map(move |nv| (mr, *nv)));
    let legal = tiles.filter(|&(mr, nv)| fits(s, mr, nv)).map(|(mr, nv)| mr * nv);
    let enough = legal.max().unwrap_or(1).min(registers / 8);
    let mut parameters = vec![
        Parameter::ordinal("mr", 1..=most_rows),
        Parameter::ordinal("nv", widths.iter().copied()),
        Parameter::categorical("inner", if p.m == 1 { &["jr-ir"] } else { &["jr-ir", "ir-jr"] }),
        Parameter::ordinal("unroll", [1, 2, 4, 8].into_iter().filter(|n| *n <= groups_of_block(&p))),
        Parameter::ordinal("prefetch", [0, 1, 2, 4, 8]),
    ];
    if s.n_threads > 1 {
        parameters.push(Parameter::categorical("parallel", if p.m == 1 { &["jr"] } else { &["jr", "ir"] }));
    }
    let in_registers = format!("2 * mr * nv + nv + 2 < {registers} and mr * nv >= {enough}");
    let mut constraints = vec![constraint_over("registers", &["mr", "nv"], &in_registers, &parameters)];
    if s.n_threads > 1 {
        // The outer loop over tiles is the parallel one.
        let outer = match p.m {
            1 => "inner == 'jr-ir'",
            _ => "inner == 'jr-ir' if parallel == 'jr' else inner == 'ir-jr'",
        };
        constraints.push(constraint_over("tiles_in_parallel", &["parallel", "inner"], outer, &parameters));
    }
    let few = |nv: &&i64| lines_of_block(s, &p, **nv, width) <= MOST_PREFETCHED_LINES;
    if !widths.iter().all(|nv| few(&nv)) {
        let with_few = widths.iter().filter(few).map(|nv| format!(" or nv == {nv}")).collect::<String>();
        let legal = format!("prefetch == 0{with_few}");
        constraints.push(constraint_over("prefetches", &["nv", "prefetch"], &legal, &parameters));
    }
    Space::declare("packed", parameters, constraints)
}

/// Estimated cycles of a tile of `mr` rows and `nv` vectors of columns, were all it reads in the first cache.
fn tile_cycles(s: &TemplateSetting, p: &Packed, space: &Space, config: &Config, mr: i64) -> f64 {
    let int = |name: &str| space.int(config, name) as f64;
    let core = s.target.core();
    let (rows, nv, unroll) = (mr as f64, int("nv"), int("unroll"));
    let sums = rows * nv;
    let unpack = if p.rounds { 1.5 * nv } else { 3.0 * nv };
    let step = (sums / core.fmas).max((rows + nv) / core.loads).max((sums + unpack + rows + nv) / core.issues);
    let steps = (p.block / if p.rounds { STEPS } else { 1 }) as f64;
    // Short bodies begin a round often, long ones take long to fetch and decode.
    let rounds = groups_of_block(p) as f64 * (1.0 / unroll + unroll / 4.0);
    let lines = lines_of_block(s, p, space.int(config, "nv"), panel(s, p)) as f64 + nv;
    let prefetches = if int("prefetch") > 0.0 { lines } else { 0.0 };
    let scaling = 2.0 * sums / core.fmas + nv + 2.0 + rounds + prefetches / core.loads;
    (p.k / p.block) as f64 * (steps * step.max(core.sum_latency / 2.0) + scaling) + 20.0 + 3.0 * sums
}

/// Share of the time of reading a tile of weights for the first time that computing does not hide. The
/// processor reads whole panels ahead by itself. Of a panel's part, as all but tiles of one row have, it has
/// to be told where weights come from main memory: measured on a Zen 5 (2026-11-29, 403d31ff), 16 × 11008 ×
/// 4096, tiles of 4 × 2, with distances of 0, 1, 2, 4, 8: 460, 647, 649, 654, 659 GOP/s.
fn share_in_the_way(s: &TemplateSetting, p: &Packed, space: &Space, config: &Config, from: f64) -> f64 {
    let ahead = space.int(config, "prefetch") as f64;
    let [of_l3, of_memory] = far_rates(s);
    match (space.int(config, "nv") < panel(s, p), ahead > 0.0) {
        (true, true) => 0.15 + 0.15 / ahead,
        (true, false) if from <= of_memory => 1.0,
        (true, false) if from <= of_l3 => 0.4,
        _ => 0.2,
    }
}

/// Estimated cycles of the busiest thread.
fn estimate(s: &TemplateSetting, space: &Space, config: &Config) -> f64 {
    let p = packed(s);
    let int = |name: &str| space.int(config, name);
    let (mr, nr) = (int("mr"), int("nv") * s.target.lanes(s.workload.dtype));
    let n_blocks = p.k / p.block;
    let columns = ceil_div(ceil_div(p.n, nr), s.n_threads as i64);
    let of_columns = |n: i64| (p.k * n * p.bits / 8 + 4 * n_blocks * n) as f64;
    let of_rows = |rows: i64| (rows * p.k * if p.rounds { 1 } else { 4 }) as f64;
    let (full, rest) = (p.m / mr, p.m % mr);
    let passes = full + i64::from(rest > 0);
    let tile = |rows: i64| tile_cycles(s, &p, space, config, rows);
    let compute = full as f64 * tile(mr) + if rest > 0 { tile(rest) } else { 0.0 };

    // The operand of the outer loop stays near, the other one passes by.
    let weights = of_columns(nr);
    let (first, again, a_from) = match space.text(config, "inner") == "jr-ir" && passes > 1 {
        true => (1, passes - 1, of_rows(p.m) + weights),
        false => (passes, 0, of_rows(mr) + weights),
    };
    let near = again as f64 * weights / bandwidth(s, weights + of_rows(mr)) + of_rows(p.m) / bandwidth(s, a_from);
    let busy = compute.max(near) + 0.2 * compute.min(near);
    let rate = bandwidth(s, of_columns(p.n));
    // Prefetches of the last blocks go beyond the tile.
    let far = first as f64 * weights / rate * (1.0 + int("prefetch") as f64 / n_blocks as f64);
    let share = share_in_the_way(s, &p, space, config, rate);
    let column = (busy + share * far).max(far + 0.2 * busy);
    columns as f64 * column + 2.0 * (p.m * p.k) as f64 / 16.0
}

/// Steps of a reduction of rows of blocks of A, lane by lane, which are then combined.
fn by_lanes(name: &str, loops: [&str; 3], partial: &str, lanes: i64) -> Vec<Step> {
    let [row, block, step] = loops;
    let [outer, lane, blocks, own] = ["o", "l", "t", "s"].map(|part| format!("{name}.{part}"));
    let of = |l: &str| format!("{partial}.{l}");
    vec![
        split(step, lanes, &outer, &lane),
        rfactor(name, &lane, partial),
        split(block, lanes, &blocks, &own),
        reorder(&[row, &blocks, &lane, &own]),
        compute_at(partial, &blocks),
        reorder(&[&of(block), &of(&outer), &of(&lane)]),
        accumulate(partial, &of(block), &format!("{partial}.r")),
        vectorize(&of(&lane)),
        accumulate(name, &blocks, &format!("{name}.r")),
        unroll(&lane),
        vectorize(&own),
    ]
}

/// Steps that round A to 8 bits.
fn rounding(s: &TemplateSetting, p: &Packed) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype).min(p.block);
    let mut steps = by_lanes(Packed::MOST, ["mi", "mb", "mk"], "a.part", lanes);
    for (block, inner) in [("sb", "sl"), ("vb", "vl")] {
        steps.extend([split(block, lanes, &format!("{block}.o"), inner), vectorize(inner)]);
    }
    steps.extend([split("qk", lanes, "qo", "ql"), vectorize("ql")]);
    steps.extend(by_lanes(Packed::ROW_SUM, ["zi", "zb", "zk"], "a.terms", lanes));
    if s.n_threads > 1 && p.m * p.k >= 1 << 16 {
        steps.extend(["mi", "si", "vi", "qi", "zi"].map(parallel));
    }
    steps
}

fn steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let p = packed(s);
    let w = &s.workload;
    let lanes = s.target.lanes(w.dtype);
    let (mr, nr) = (space.int(config, "mr"), space.int(config, "nv") * lanes);
    let tiles = if space.text(config, "inner") == "jr-ir" { ["jr", "ir"] } else { ["ir", "jr"] };
    let sum = p.sum(w);
    let mut steps = if p.rounds { rounding(s, &p) } else { Vec::new() };

    // Tiles of the result, which hold its sums.
    let [i, j, kb] = Packed::SUM;
    let (rows, columns) = if w.is_plain() {
        steps.extend([split(i, mr, "ir", "im"), split(j, nr, "jr", "jm")]);
        ("im", "jm")
    } else {
        let [oi, oj] = Packed::FINISH;
        steps.extend([split(oi, mr, "ir", "om"), split(oj, nr / w.pairs().map_or(1, |part| 2 * part), "jr", "on")]);
        steps.push(reorder(&[tiles[0], tiles[1], "om", "on"]));
        steps.push(compute_at(sum, tiles[1]));
        (i, j)
    };
    steps.push(split(columns, lanes, "jv", "jl"));
    let inside = [kb, rows, "jv", "jl"];
    steps.push(reorder(&if w.is_plain() { [&tiles[..], &inside].concat() } else { inside.to_vec() }));

    // The sums of a block.
    let [pi, pj, _, po, ph, pk] = Packed::LOOPS;
    steps.push(compute_at(Packed::PART, kb));
    steps.push(split(pj, lanes, "pv", "pl"));
    steps.push(split(po, space.int(config, "unroll"), "pg", "pu"));
    steps.push(reorder(&["pg", "pu", ph, pk, pi, "pv", "pl"]));

    let width = panel(s, &p) * lanes;
    let plain = [Outer(1, width), Whole(0), Inner(1, width)];
    if p.rounds {
        let in_fours = [Outer(1, width), Outer(0, STEPS), Inner(1, width), Inner(0, STEPS)];
        steps.push(stage("W", None, "W.p", &in_fours));
        steps.extend([split("W.p.2", lanes, "W.v", "W.l"), unroll("W.p.3"), vectorize("W.l")]);
    }
    let others = ["W", "S", "Z"].into_iter().skip(usize::from(p.rounds));
    for scales in others.filter(|name| *name != "Z" || p.has_zeros) {
        let [name, l, v] = ["p", "l", "v"].map(|part| format!("{scales}.{part}"));
        steps.push(stage(scales, None, &name, &plain));
        steps.extend([split(&format!("{name}.2"), lanes, &v, &l), vectorize(&l)]);
    }

    steps.push(accumulate(Packed::PART, kb, "part.r"));
    steps.push(accumulate(sum, tiles[1], "C.r"));
    steps.extend([vectorize("jl"), vectorize("pl")]);
    steps.extend(["jv", rows, "pv", pi, ph, "pu"].map(unroll));
    if p.rounds {
        steps.push(tensorize(pk, TensorProduct::Dot4));
    } else {
        steps.push(unroll(pk));
    }
    let ahead = space.int(config, "prefetch");
    if ahead > 0 {
        let staged = ["W.p", "S.p", "Z.p"].into_iter().filter(|name| *name != "Z.p" || p.has_zeros);
        steps.extend(staged.map(|name| prefetch(name, kb, ahead)));
    }
    if !w.is_plain() {
        let (vectors, of_vectors) = finished_vectors("on", w.pairs(), lanes);
        steps.extend(of_vectors);
        steps.extend(["om", vectors].map(unroll));
    }
    if s.n_threads > 1 {
        steps.push(parallel(tiles[0]));
    }
    steps
}
