//! The default matmul template: blocks for the caches, packed panels, a register tile.

use super::step::{accumulate, parallel, prefetch, reorder, split, stage, unroll, vectorize};
use super::{Setting, Template};
use crate::space::{Config, Constraint, Parameter, Space, SpaceError};
use tilewright_ir::Step;
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};

/// Multi-level tiling around a register tile of `mr × nv` vectors.
///
/// Loops: the three block loops `ic jc pc` in any order, then the tiles `ir jr` of a block, then the reduction
/// `ko ki`, then the tile `im jv jl`. Blocks are given by their number rather than their size, so that they come out
/// balanced at any size, and so that threads get equal shares.
///
/// # Source
/// The loop structure is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008),
/// with the order of the block loops, what is packed and where left to the search.
pub const MATMUL_BLOCKED: Template = Template {
    name: "matmul-blocked",
    text: "cache blocks in any order, packed or plain operands, register tile, unrolling, prefetch, threads",
    operators: &["matmul"],
    space,
    steps,
};

/// Blocks that a dimension may be cut into.
const N_BLOCKS: [i64; 16] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128];

fn ceil_div(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

/// Rows or columns of a block of whole tiles: `n` cut into about `blocks` equal parts.
fn block_of(n: i64, tile: i64, blocks: i64) -> i64 {
    ceil_div(ceil_div(n, tile), blocks) * tile
}

/// Steps of the reduction in a block, a multiple of the unrolling where there is more than one block.
fn k_block_of(k: i64, blocks: i64) -> i64 {
    if blocks == 1 { k } else { (ceil_div(k, blocks) + 7) / 8 * 8 }
}

/// Numbers of blocks that leave blocks of at least `least`.
fn n_blocks(n: i64, least: i64) -> impl Iterator<Item = i64> {
    N_BLOCKS.into_iter().filter(move |&b| b == 1 || n / b >= least)
}

fn space(s: &Setting) -> Result<Space, SpaceError> {
    let (m, n, k) = (s.workload.size("m"), s.workload.size("n"), s.workload.size("k"));
    let (lanes, bytes) = (s.target.lanes(s.workload.dtype), s.workload.dtype.bytes() as i64);
    let registers = i64::from(s.target.n_vector_registers);
    let streams = m < 8;
    let (l2, l3) = (s.target.l2_bytes as i64, s.target.l3_bytes as i64);
    let most_rows = m.min(registers / 2);
    let most_vectors = ceil_div(n, lanes).min(if m < 4 { 8 } else { 6 });
    // A tile leaves registers for a row of B and one element of A.
    let fits = move |mr: i64, nv: i64| mr * nv + nv < registers;
    // Loads a step: mr elements of A and nv vectors of B for mr * nv multiply-adds. Two loads go with two of them a
    // cycle, and a row count below 4 asks more of the second-level cache than it gives.
    let reuses = move |mr: i64, nv: i64| streams || n <= lanes || (mr >= 4.min(m) && 10 * (mr + nv) <= 7 * mr * nv);
    let largest = (1..=most_rows)
        .flat_map(|mr| (1..=most_vectors).map(move |nv| (mr, nv)))
        .filter(|&(mr, nv)| fits(mr, nv) && reuses(mr, nv));
    let enough = largest.map(|(mr, nv)| mr * nv).max().unwrap_or(1).min(registers / 2);
    // With few rows B is read once and streamed; deep blocks would stride through it.
    let (least_k, most_k) = if streams { (4, 64) } else { (128, 1024) };
    // However long the reduction, there are numbers of blocks that leave blocks of any useful depth.
    let by_depth = std::iter::successors(Some(most_k), |&d| (d > least_k).then_some(d / 2)).map(|d| ceil_div(k, d));
    let mut k_blocks: Vec<i64> = n_blocks(k, least_k).chain(by_depth.filter(|&b| k / b >= least_k)).collect();
    k_blocks.sort_unstable();
    k_blocks.dedup();
    let mut parameters = vec![
        Parameter::ordinal("mr", 1..=most_rows),
        Parameter::ordinal("nv", 1..=most_vectors),
        Parameter::ordinal("m_blocks", n_blocks(m, 16)),
        Parameter::ordinal("n_blocks", n_blocks(n, 4 * lanes)),
        Parameter::ordinal("k_blocks", k_blocks),
        Parameter::permutation("order", &["jc", "pc", "ic"]),
        Parameter::categorical("inner", &["jr-ir", "ir-jr"]),
        Parameter::categorical("pack_a", &["none", "rows", "panels"]),
        Parameter::categorical("pack_b", &["none", "block", "whole"]),
        Parameter::ordinal("unroll_k", [1, 2, 4]),
        Parameter::ordinal("prefetch_b", [0, 4, 8]),
        Parameter::boolean("prefetch_c"),
    ];
    let mut constraints = vec![
        Constraint::new(
            "registers",
            &format!("mr * nv + nv < {registers} and mr * nv >= {enough}"),
            &["mr", "nv"],
            move |v| fits(v[0].int(), v[1].int()) && v[0].int() * v[1].int() >= enough,
        ),
        Constraint::new(
            "tile_reuse",
            "mr >= 4 and mr + nv <= 0.7 * mr * nv, where the matrices have as many rows and vectors",
            &["mr", "nv"],
            move |v| reuses(v[0].int(), v[1].int()),
        ),
        Constraint::new(
            "plain_b_in_l2",
            "B is left as it is only where it fits twice L2 or serves few rows",
            &["pack_b"],
            move |v| v[0].text() != "none" || m <= 128 || n * k * bytes <= 2 * l2,
        ),
        Constraint::new(
            "a_block_in_l2",
            "rows of A in a block * k block * element <= L2",
            &["m_blocks", "mr", "k_blocks"],
            move |v| {
                let rows = block_of(m, v[1].int(), v[0].int());
                rows.min(m) * k_block_of(k, v[2].int()) * bytes <= l2 || m <= 64
            },
        ),
        Constraint::new(
            "b_panel_in_l2",
            "columns of a tile * k block * element <= L2 / 4",
            &["nv", "k_blocks"],
            move |v| v[0].int() * lanes * k_block_of(k, v[1].int()) * bytes <= l2 / 4 || streams,
        ),
        Constraint::new(
            "b_block_in_l3",
            "columns of B in a block * k block * element <= L3 / 2, where it is packed by blocks",
            &["n_blocks", "nv", "k_blocks", "pack_b"],
            move |v| {
                let columns = block_of(n, v[1].int() * lanes, v[0].int()).min(n);
                v[3].text() != "block" || columns * k_block_of(k, v[2].int()) * bytes <= l3 / 2
            },
        ),
        Constraint::new(
            "b_packed_once",
            "a block of B is packed outside the loop over blocks of rows, or there is one such block",
            &["pack_b", "order", "m_blocks"],
            move |v| v[0].text() != "block" || v[2].int() == 1 || v[1].order().last().is_some_and(|l| l == "ic"),
        ),
        Constraint::new(
            "a_packed_for_enough",
            "a block of A is packed for at least 256 columns, or once",
            &["pack_a", "order", "n_blocks", "nv"],
            move |v| {
                let order = v[1].order();
                let position = |l: &str| order.iter().position(|o| o == l);
                let repeated = position("jc") < position("ic") || position("jc") < position("pc");
                v[0].text() == "none" || !repeated || block_of(n, v[3].int() * lanes, v[2].int()).min(n) >= n.min(256)
            },
        ),
        Constraint::new(
            "prefetch_of_packed",
            "B is prefetched only where it is packed",
            &["prefetch_b", "pack_b"],
            |v| v[0].int() == 0 || v[1].text() != "none",
        ),
        Constraint::new(
            "panels_of_rows",
            "rows of A are interleaved only where a tile has more than one",
            &["pack_a", "mr"],
            |v| v[0].text() != "panels" || v[1].int() > 1,
        ),
    ];
    if s.n_threads > 1 {
        // Small problems cannot be cut into enough blocks for every thread.
        let most_blocks = n_blocks(m, 16).chain(n_blocks(n, 4 * lanes)).max().unwrap_or(1);
        let needed = most_blocks.min(s.n_threads as i64);
        parameters.push(Parameter::categorical("parallel", &["ic", "jc", "jr"]));
        constraints.push(Constraint::new(
            "tiles_in_parallel",
            "the loop over tiles of columns runs in parallel only as the outer one of a block",
            &["parallel", "inner"],
            |v| v[0].text() != "jr" || v[1].text() == "jr-ir",
        ));
        constraints.push(Constraint::new(
            "work_for_all_threads",
            &format!("the parallel loop has at least {needed} iterations"),
            &["parallel", "m_blocks", "n_blocks", "nv"],
            move |v| {
                let columns = v[3].int() * lanes;
                let iterations = match v[0].text() {
                    "ic" => v[1].int(),
                    "jc" => v[2].int(),
                    _ => block_of(n, columns, v[2].int()) / columns,
                };
                iterations >= needed
            },
        ));
    }
    Space::new("matmul-blocked", parameters, constraints)
}

fn steps(s: &Setting, space: &Space, config: &Config) -> Vec<Step> {
    let (m, n, k) = (s.workload.size("m"), s.workload.size("n"), s.workload.size("k"));
    let lanes = s.target.lanes(s.workload.dtype);
    let int = |name: &str| space.int(config, name);
    let (mr, nr) = (int("mr"), int("nv") * lanes);
    let mb = block_of(m, mr, int("m_blocks")) / mr;
    let nb = block_of(n, nr, int("n_blocks")) / nr;
    let kb = k_block_of(k, int("k_blocks"));
    let order = space.order(config, "order");
    let position = |l: &str| order.iter().position(|o| o == l).expect("the order holds every block loop");
    let later = |a: &'static str, b: &'static str| if position(a) > position(b) { a } else { b };
    let [tile_outer, tile] = if space.text(config, "inner") == "jr-ir" { ["jr", "ir"] } else { ["ir", "jr"] };
    let mut steps = vec![
        split("i", mr, "it", "im"),
        split("it", mb, "ic", "ir"),
        split("j", nr, "jt", "jn"),
        split("jt", nb, "jc", "jr"),
        split("jn", lanes, "jv", "jl"),
        split("k", kb, "pc", "kb"),
        split("kb", int("unroll_k"), "ko", "ki"),
        reorder(&[&order[0], &order[1], &order[2], tile_outer, tile, "ko", "ki", "im", "jv", "jl"]),
    ];
    // Copies made outside the parallel loop are shared and made by all threads.
    let threads = if s.n_threads > 1 { space.text(config, "parallel") } else { String::new() };
    let depth = |l: &str| if l == "jr" || l == "ir" { 3 + usize::from(l == tile) } else { position(l) };
    let shared = |at: Option<&str>| !threads.is_empty() && at.is_none_or(|at| depth(at) < depth(&threads));
    let pack_b = space.text(config, "pack_b");
    if pack_b != "none" {
        let at = (pack_b == "block").then(|| later("jc", "pc"));
        steps.extend([
            stage("B", at, "B.p", &[Outer(1, nr), Whole(0), Inner(1, nr)]),
            split("B.p.2", lanes, "B.p.v", "B.p.l"),
            unroll("B.p.v"),
            vectorize("B.p.l"),
        ]);
        if shared(at) {
            steps.push(parallel("B.p.0"));
        }
    }
    let pack_a = space.text(config, "pack_a");
    let a_at = later("ic", "pc");
    match pack_a.as_str() {
        "rows" => steps.extend([
            stage("A", Some(a_at), "A.p", &[Outer(0, mr), Inner(0, mr), Whole(1)]),
            split("A.p.2", lanes, "A.p.v", "A.p.l"),
            vectorize("A.p.l"),
        ]),
        "panels" => steps.extend([
            stage("A", Some(a_at), "A.p", &[Outer(0, mr), Whole(1), Inner(0, mr)]),
            split("A.p.1", lanes, "A.p.v", "A.p.l"),
            reorder(&["A.p.v", "A.p.l", "A.p.2"]),
            unroll("A.p.2"),
            vectorize("A.p.l"),
        ]),
        _ => {}
    }
    if pack_a != "none" && shared(Some(a_at)) {
        steps.push(parallel("A.p.0"));
    }
    steps.push(accumulate("C", tile, "C.r"));
    steps.extend(["jl"].map(vectorize));
    steps.extend(["jv", "im", "ki"].map(unroll));
    if space.flag(config, "prefetch_c") {
        steps.push(prefetch("C", tile, 0));
    }
    if int("prefetch_b") > 0 {
        steps.push(prefetch("B.p", "ko", int("prefetch_b")));
    }
    if !threads.is_empty() {
        steps.push(parallel(&threads));
    }

    steps
}
