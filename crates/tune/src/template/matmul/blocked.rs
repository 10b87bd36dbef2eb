//! Matrix products by blocks: blocks for the caches, packed panels, a register tile.

use super::super::algorithm::{self, Algorithm};
use super::super::model::{bandwidth, cost_of_dot4, cuts, step_cycles};
use super::super::share::{self, Share};
use super::super::step::{
    accumulate, compute_at, parallel, prefetch, reorder, split, stage_as, tensorize, unroll, vectorize,
};
use super::super::{Setting, Template};
use super::{FEW_ROWS, Factor, Product, ceil_div, is_product_on_cpu, of_members};
use tilewright_ir::schedule::LayoutAxis::{self, Inner, Outer, Whole};
use tilewright_ir::{Step, Tensor};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Multi-level tiling around a register tile of `mr × nv` vectors.
///
/// Loops: the products of a batch, then the three block loops `ic jc pc` in any order, then the tiles `ir jr`
/// of a block, then the reduction `ko ki`, then the tile `im jv jl`. Blocks are given by their number rather
/// than their size, so that they come out balanced at any size, and so that threads get equal shares. An
/// epilogue finishes a tile in registers, or a block of sums in the cache.
///
/// # Source
/// The loop structure is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
/// (2008), with the order of the block loops, what is packed and where left to the search.
pub const MATMUL_BLOCKED: Template = Template {
    name: "matmul-blocked",
    text: "cache blocks in any order, packed or plain operands, register tile, unrolling, prefetch, threads",
    serves: |s| is_product_on_cpu(s),
    space: |s| algorithm::space("matmul-blocked", s, &Product::of(s), &[BLOCKED]),
    steps: |s, space, config| steps(s, &Product::of(s), space, config),
    estimate: Some(|s, space, config| of_members(s, |s| estimate(s, &Product::of(s), space, config))),
};

/// Blocked product as an algorithm.
pub const BLOCKED: Algorithm<Product> =
    Algorithm { name: "blocked", applies: |_| true, parameters, constraints, steps, estimate };

/// Blocks that a dimension may be cut into.
const N_BLOCKS: [i64; 16] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128];

/// Copies of blocks of A.
const PACK_A: &[&str] = &["none", "rows", "panels"];

/// Bytes of a cache line on every supported machine.
const LINE_BYTES: i64 = 64;
/// More lines than this take longer to ask for than a tile takes to compute.
const MOST_LINES: i64 = 128;

/// Products of a batch for each thread from which on a product needs no parallel loops inside.
const PRODUCTS_PER_THREAD: i64 = 4;

/// Rows or columns of a block of whole tiles: `n` cut into about `blocks` equal parts.
fn block_of(n: i64, tile: i64, blocks: i64) -> i64 {
    ceil_div(ceil_div(n, tile), blocks) * tile
}

/// Steps of the reduction in a block, a multiple of the unrolling where there is more than one block.
fn k_block_of(p: &Product, blocks: i64) -> i64 {
    if blocks == 1 { p.k } else { ceil_div(ceil_div(p.k, blocks), 8 * p.steps_at_once()) * 8 * p.steps_at_once() }
}

/// Numbers of blocks that leave blocks of at least `least`.
fn n_blocks(n: i64, least: i64) -> impl Iterator<Item = i64> {
    N_BLOCKS.into_iter().filter(move |&b| b == 1 || n / b >= least)
}

/// Rows of the largest tile, and vectors of its columns.
fn most_tile(s: &Setting, p: &Product) -> (i64, i64) {
    let vectors = ceil_div(p.n, s.target.lanes(s.workload.dtype));
    (p.m.min(i64::from(s.target.n_vector_registers) / 2), vectors.min(if p.m < 4 { 8 } else { 6 }))
}

/// Whether there are so few rows that the other factor is read once and streamed.
fn streams(p: &Product) -> bool {
    p.m < FEW_ROWS
}

/// Loops that threads may share.
fn parallel_loops(s: &Setting, p: &Product) -> &'static [&'static str] {
    match p.batch {
        None => &["ic", "jc", "jr"],
        Some(b) if b < PRODUCTS_PER_THREAD * s.n_threads as i64 => &["b", "ic", "jc", "jr"],
        Some(_) => &["b"],
    }
}

fn parameters(s: &Setting, p: &Product) -> Vec<Parameter> {
    let (m, n, k) = (p.m, p.n, p.k);
    let lanes = s.target.lanes(s.workload.dtype);
    let (most_rows, most_vectors) = most_tile(s, p);
    // Deep blocks of what is streamed would stride through it.
    let (least_k, most_k) = if streams(p) { (4, 64) } else { (128, 1024) };
    let [least_k, most_k] = [least_k, most_k].map(|steps| steps * p.steps_at_once());
    // However long the reduction, there are numbers of blocks that leave blocks of any useful depth.
    let by_depth = std::iter::successors(Some(most_k), |&d| (d > least_k).then_some(d / 2)).map(|d| ceil_div(k, d));
    let mut k_blocks: Vec<i64> = n_blocks(k, least_k).chain(by_depth.filter(|&b| k / b >= least_k)).collect();
    k_blocks.sort_unstable();
    k_blocks.dedup();
    // The lanes of a transposed B lie apart, and a batch is packed product by product unless that
    // is done ahead.
    let mut pack_b = vec!["block"];
    pack_b.extend((!p.b.is_k_last() && p.dot.is_none() && p.copied.is_none()).then_some("none"));
    pack_b.extend((p.batch.is_none() || p.b.is_constant).then_some("whole"));
    // Open columns and sums end where a run says, in a tail of each block.
    let [has_open_columns, has_open_sum] = p.is_open;
    let n_blocks_of_n: Vec<i64> = if has_open_columns { vec![1] } else { n_blocks(n, 4 * lanes).collect() };
    let mut unrolled = vec![1, 2, 4];
    let mut pack_a = PACK_A;
    if has_open_sum {
        (k_blocks, unrolled, pack_a) = (vec![1], vec![1], &["none"]);
    }
    // What a dot product takes are neighbours along the sum.
    if p.dot.is_some() && !p.a.is_k_last() {
        pack_a = &["panels"];
    } else if p.copied.is_some() {
        pack_a = &PACK_A[1..];
    }
    let mut parameters = vec![
        Parameter::ordinal("mr", 1..=most_rows),
        Parameter::ordinal("nv", 1..=most_vectors),
        Parameter::ordinal("m_blocks", n_blocks(m, 16)),
        Parameter::ordinal("n_blocks", n_blocks_of_n),
        Parameter::ordinal("k_blocks", k_blocks),
        Parameter::permutation("order", &["jc", "pc", "ic"]),
        Parameter::categorical("inner", &["jr-ir", "ir-jr"]),
        Parameter::categorical("pack_a", pack_a),
        Parameter::categorical("pack_b", &pack_b),
        Parameter::ordinal("unroll_k", unrolled),
        Parameter::boolean("prefetch_a"),
        Parameter::ordinal("prefetch_b", [0, 4, 8]),
    ];
    // What an epilogue reads is in registers or in the cache.
    parameters.push(match p.has_epilogue {
        false => Parameter::boolean("prefetch_c"),
        true => Parameter::categorical("epilogue", &["tile", "block"]),
    });
    if s.n_threads > 1 {
        parameters.push(Parameter::categorical("parallel", parallel_loops(s, p)));
    }
    parameters.extend(p.work().parameter_at_any_size(s));
    parameters
}

fn constraints(s: &Setting, p: &Product) -> Vec<Constraint> {
    let (m, n, k) = (p.m, p.n, p.k);
    let (own, lanes, bytes) = (*p, s.target.lanes(s.workload.dtype), p.factor_bytes);
    let registers = i64::from(s.target.n_vector_registers);
    let streams = streams(p);
    let (l2, l3) = (s.target.l2_bytes as i64, s.target.l3_bytes as i64);
    let (most_rows, most_vectors) = most_tile(s, p);
    // A tile leaves registers for a row of B and one element of A.
    let fits = move |mr: i64, nv: i64| mr * nv + nv < registers;
    // Loads a step: mr elements of A and nv vectors of B for mr * nv multiply-adds. Two loads go with two of
    // them a cycle, and a row count below 4 asks more of the second-level cache than it gives.
    let reuses = move |mr: i64, nv: i64| streams || n <= lanes || (mr >= 4.min(m) && 10 * (mr + nv) <= 7 * mr * nv);
    let largest = (1..=most_rows)
        .flat_map(|mr| (1..=most_vectors).map(move |nv| (mr, nv)))
        .filter(|&(mr, nv)| fits(mr, nv) && reuses(mr, nv));
    let enough = largest.map(|(mr, nv)| mr * nv).max().unwrap_or(1).min(registers / 2);
    let a_k_last = p.a.is_k_last();
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
                rows.min(m) * k_block_of(&own, v[2].int()) * bytes <= l2 || m <= 64
            },
        ),
        Constraint::new(
            "b_panel_in_l2",
            "columns of a tile * k block * element <= L2 / 4",
            &["nv", "k_blocks"],
            move |v| v[0].int() * lanes * k_block_of(&own, v[1].int()) * bytes <= l2 / 4 || streams,
        ),
        Constraint::new(
            "b_block_in_l3",
            "columns of B in a block * k block * element <= L3 / 2, where it is packed by blocks",
            &["n_blocks", "nv", "k_blocks", "pack_b"],
            move |v| {
                let columns = block_of(n, v[1].int() * lanes, v[0].int()).min(n);
                v[3].text() != "block" || columns * k_block_of(&own, v[2].int()) * bytes <= l3 / 2
            },
        ),
        Constraint::new(
            "b_packed_once",
            "a block of B is packed outside the loop over blocks of rows, or there is one such block",
            &["pack_b", "order", "m_blocks", "k_blocks"],
            move |v| {
                let mut after_rows = v[1].order().iter().skip_while(|l| *l != "ic").skip(1);
                v[0].text() != "block" || v[2].int() == 1 || after_rows.all(|l| l == "pc" && v[3].int() == 1)
            },
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
            "prefetch_of_rows",
            &format!(
                "the next rows of A are prefetched once a block, where they are not packed and <= {MOST_LINES} lines"
            ),
            &["prefetch_a", "pack_a", "inner", "mr", "k_blocks"],
            move |v| {
                let (rows, depth) = (v[3].int().min(m), k_block_of(&own, v[4].int()));
                let (lines, length) = if a_k_last { (rows, depth) } else { (depth, rows) };
                let lines = lines * ceil_div(length * bytes, LINE_BYTES);
                v[0].text() == "false" || v[1].text() == "none" && v[2].text() == "ir-jr" && lines <= MOST_LINES
            },
        ),
        Constraint::new(
            "panels_of_rows",
            "rows of A are interleaved only where a tile has more than one",
            &["pack_a", "mr"],
            move |v| v[0].text() == "none" || a_k_last && v[0].text() == "rows" || v[1].int() > 1 || m == 1,
        ),
    ];
    let can_share_sum = p.work().has_long_sum(s);
    if p.has_epilogue {
        let of_sums = [
            Constraint::new(
                "sums_of_tile",
                "the epilogue finishes a tile only where k is in one block",
                &["epilogue", "k_blocks"],
                |v| v[0].text() != "tile" || v[1].int() == 1,
            ),
            Constraint::new(
                "sums_of_block",
                "blocks of k are not the outermost ones where an epilogue follows them",
                &["order", "k_blocks"],
                |v| v[1].int() == 1 || v[0].order().first().is_none_or(|l| l != "pc"),
            ),
        ];
        // An epilogue that follows the parts of a sum follows all blocks.
        constraints.extend(of_sums.map(|c| if can_share_sum { Share::Sum.except(c) } else { c }));
        constraints.extend(can_share_sum.then(|| Share::Sum.excludes("epilogue", "block")));
    }
    if can_share_sum && !p.b.is_constant {
        // Threads pack what they read.
        constraints.push(Share::Sum.excludes("pack_b", "whole"));
    }
    if s.n_threads > 1 {
        // Small problems cannot be cut into enough blocks for every thread.
        let batch = p.batch.unwrap_or(1);
        let most_blocks = n_blocks(m, 16).chain(n_blocks(n, 4 * lanes)).max().unwrap_or(1).max(batch);
        let needed = most_blocks.min(s.n_threads as i64);
        let tiles_in_parallel = Constraint::new(
            "tiles_in_parallel",
            "the loop over tiles of columns runs in parallel only as the outer one of a block",
            &["parallel", "inner"],
            |v| v[0].text() != "jr" || v[1].text() == "jr-ir",
        );
        let work_for_all_threads = Constraint::new(
            "work_for_all_threads",
            &format!("the parallel loop has at least {needed} iterations"),
            &["parallel", "m_blocks", "n_blocks", "nv"],
            move |v| {
                let columns = v[3].int() * lanes;
                let iterations = match v[0].text() {
                    "b" => batch,
                    "ic" => v[1].int(),
                    "jc" => v[2].int(),
                    _ => block_of(n, columns, v[2].int()) / columns,
                };
                iterations >= needed
            },
        );
        let of_result = [tiles_in_parallel, work_for_all_threads];
        constraints.extend(of_result.map(|c| p.work().of_result(s, c)));
        constraints.extend(p.work().is_choice(s).then(|| Share::Result.owns("parallel", parallel_loops(s, p)[0])));
    }
    constraints
}

/// Loops over rows or columns that are those of the epilogue, which compute what it reads inside them.
#[derive(Clone, Copy)]
enum Finished {
    /// No fusion: the product is computed first, or there is no epilogue.
    Whole,
    /// Over blocks.
    Blocks,
    /// Over tiles.
    Tiles,
}

/// The loops of one dimension of the result, cut into blocks of tiles.
struct Axis {
    /// Steps that split the loops of the last stage, before it is fused with the one that sums.
    last: Vec<Step>,
    /// Steps that split the loops of the stage that sums, thereafter.
    sum: Vec<Step>,
    /// The loop over a tile.
    inside: &'static str,
    /// The loop of the epilogue over what it finishes at a time.
    finish: &'static str,
}

impl Axis {
    /// `names`: the product's loop, the epilogue's, and those over blocks, tiles, and elements of a tile.
    fn new(finished: Finished, names: [&'static str; 5], tile: i64, block: i64) -> Axis {
        let [product, epilogue, blocks, tiles, elements] = names;
        let (rest, finish) = (format!("{product}.rest"), if epilogue == "oi" { "om" } else { "on" });
        match finished {
            Finished::Whole => Axis {
                last: vec![],
                sum: vec![split(product, tile, &rest, elements), split(&rest, block, blocks, tiles)],
                inside: elements,
                finish: epilogue,
            },
            Finished::Blocks => Axis {
                last: vec![split(epilogue, tile * block, blocks, finish)],
                sum: vec![split(product, tile, tiles, elements)],
                inside: elements,
                finish,
            },
            Finished::Tiles => Axis {
                last: vec![split(epilogue, tile, &rest, finish), split(&rest, block, blocks, tiles)],
                sum: vec![],
                inside: product,
                finish,
            },
        }
    }
}

/// Blocks of rows, columns and steps of the reduction.
#[derive(Clone, Copy)]
struct Blocks {
    rows: i64,
    columns: i64,
    depth: i64,
}

/// Estimated cycles of the busiest thread.
fn estimate(s: &Setting, p: &Product, space: &Space, config: &Config) -> f64 {
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let blocks = Blocks { rows: int("m_blocks"), columns: int("n_blocks"), depth: int("k_blocks") };
    let (mr, nr) = (int("mr"), int("nv") * s.target.lanes(s.workload.dtype));
    let each = |n: i64| ceil_div(n, s.n_threads as i64);
    let (mut own, mut of_own, mut n_begins) = (*p, blocks, 1);
    let share = Share::of(s, space, config);
    match share {
        Share::Nothing => {}
        Share::Sum => (own.k, of_own.depth) = (share::part_of_product(s, p.k).min(p.k), each(blocks.depth)),
        Share::Result => {
            let (parallel, order) = (text("parallel"), space.order(config, "order"));
            if parallel == "b" {
                own.batch = p.batch.map(each);
            } else {
                let number = |l: &String| match l.as_str() {
                    "ic" => blocks.rows,
                    "jc" => blocks.columns,
                    _ => blocks.depth,
                };
                let outside = order.iter().take_while(|l| **l != parallel);
                n_begins = p.batch.unwrap_or(1) * outside.map(number).product::<i64>();
            }
            let (rows, columns) = (block_of(p.m, mr, blocks.rows), block_of(p.n, nr, blocks.columns));
            match parallel.as_str() {
                "ic" => (own.m, of_own.rows) = (p.m.min(each(blocks.rows) * rows), each(blocks.rows)),
                "jc" => (own.n, of_own.columns) = (p.n.min(each(blocks.columns) * columns), each(blocks.columns)),
                "jr" => own.n = p.n.min(blocks.columns * each(columns / nr) * nr),
                _ => {}
            }
        }
    }
    of_one_thread(s, &own, of_own, space, config) + share::overhead(s, share, n_begins, p.work().elements())
}

/// Register tiles at the rate of their multiply-adds and loads, or of the panels that they read from
/// whichever cache holds what the loops around return to; then packing.
fn of_one_thread(s: &Setting, p: &Product, blocks: Blocks, space: &Space, config: &Config) -> f64 {
    let (m, n, k) = (p.m, p.n, p.k);
    let lanes = s.target.lanes(s.workload.dtype);
    let bytes = p.factor_bytes as f64;
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let (mr, nr) = (int("mr"), int("nv") * lanes);
    let rows = block_of(m, mr, blocks.rows).min(m) as f64;
    let columns = block_of(n, nr, blocks.columns).min(n) as f64;
    let depth = k_block_of(p, blocks.depth).min(k) as f64;
    let (a_block, b_block) = (rows * depth * bytes, columns * depth * bytes);
    let rows_inside = text("inner") == "jr-ir";
    let cost = if p.dot == Some(Tensor::Dot4) { cost_of_dot4(s) } else { 1.0 };
    let mut cycles = 0.0;
    for (n_k, steps) in cuts(k, depth as i64) {
        let (steps, at_once) = (steps as f64, ceil_div(steps, p.steps_at_once()) as f64);
        for (n_m, rows) in cuts(m, mr) {
            for (n_n, columns) in cuts(n, nr) {
                let (a, b) = (rows as f64 * steps * bytes, columns as f64 * steps * bytes);
                // The operand of the outer tile loop stays near; that of the inner one passes by in whole
                // blocks.
                let (a_from, b_from) = if rows_inside { (a_block + b, a + b) } else { (a + b, b_block + a) };
                let read = a / bandwidth(s, a_from) + b / bandwidth(s, b_from);
                let vectors = ceil_div(columns, lanes);
                let compute = at_once * cost * step_cycles(s, vectors, rows) + 20.0 + 3.0 * (rows * vectors) as f64;
                cycles += n_k * n_m * n_n * (compute.max(read) + 0.2 * compute.min(read));
            }
        }
    }
    let order = space.order(config, "order");
    let repeats = |of: &str, n_blocks: i64, over: &str| {
        let depth_of = |l: &str| order.iter().position(|o| o == l).unwrap_or(0);
        let again = depth_of(over) < depth_of(of) || depth_of(over) < depth_of("pc");
        if again { n_blocks as f64 } else { 1.0 }
    };
    let (a_elements, b_elements) = ((m * k) as f64, (n * k) as f64);
    cycles += match text("pack_a").as_str() {
        "none" => 0.05 * cycles,
        "rows" => 0.5 * a_elements * repeats("ic", blocks.columns, "jc"),
        _ => 1.0 * a_elements * repeats("ic", blocks.columns, "jc"),
    };
    cycles += match text("pack_b").as_str() {
        // Rows of B lie pages apart.
        "none" => 0.1 * cycles,
        "whole" if p.b.is_constant => 0.0,
        _ => 0.5 * b_elements * repeats("jc", blocks.rows, "ic"),
    };
    cycles * p.batch.unwrap_or(1) as f64
}

fn steps(s: &Setting, p: &Product, space: &Space, config: &Config) -> Vec<Step> {
    let share = Share::of(s, space, config);
    if share != Share::Sum {
        let threads = if share == Share::Result { space.text(config, "parallel") } else { String::new() };
        return product(s, p, &threads, space.int(config, "k_blocks"), space, config);
    }
    let (before, parts, after) = p.in_parts(s);
    let blocks_of_part = ceil_div(space.int(config, "k_blocks"), s.n_threads as i64);
    [before, product(s, &parts, "", blocks_of_part, space, config), after].concat()
}

/// The schedule of a product, in which `threads` names the loop that they share, if any.
fn product(s: &Setting, p: &Product, threads: &str, k_blocks: i64, space: &Space, config: &Config) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype);
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let (mr, nr) = (int("mr"), int("nv") * lanes);
    let k_block = k_block_of(p, k_blocks);
    let k_in_blocks = k_block < p.k;
    let [batch, row, column, k] = p.loops;

    // Loops over blocks and tiles, outermost first.
    let order = space.order(config, "order");
    let mut loops: Vec<&str> = order.iter().map(String::as_str).filter(|l| k_in_blocks || *l != "pc").collect();
    loops.extend(if text("inner") == "jr-ir" { ["jr", "ir"] } else { ["ir", "jr"] });
    let tile = loops[loops.len() - 1];
    let position = |l: &str| loops.iter().position(|o| *o == l);
    let innermost = |blocks: &'static str| if position("pc") > position(blocks) { "pc" } else { blocks };

    // Loops of the epilogue, inside the last of which it finds the sums it reads.
    let n_finished = match p.has_epilogue {
        false => 0,
        true if text("epilogue") == "tile" => loops.len(),
        true => position("pc").unwrap_or(loops.len() - 2),
    };
    let finished = |blocks: &str, tiles: &str| {
        let is_outside = |l: &str| position(l).is_some_and(|at| at < n_finished);
        match (is_outside(tiles), is_outside(blocks)) {
            (true, _) => Finished::Tiles,
            (false, true) => Finished::Blocks,
            (false, false) => Finished::Whole,
        }
    };
    let row_blocks = block_of(p.m, mr, int("m_blocks")) / mr;
    let column_blocks = block_of(p.n, nr, int("n_blocks")) / nr;
    let rows = Axis::new(finished("ic", "ir"), [row, "oi", "ic", "ir", "im"], mr, row_blocks);
    let columns = Axis::new(finished("jc", "jr"), [column, "oj", "jc", "jr", "jm"], nr, column_blocks);
    let mut steps = Vec::new();
    if n_finished > 0 {
        steps.extend(rows.last.iter().chain(&columns.last).cloned());
        steps.push(reorder(&p.in_batch("ob", &[&loops[..n_finished], &[rows.finish, columns.finish]].concat())));
        steps.push(compute_at(p.sum, loops[n_finished - 1]));
    }
    steps.extend(rows.sum.iter().chain(&columns.sum).cloned());
    steps.push(split(columns.inside, lanes, "jv", "jl"));
    if k_in_blocks {
        steps.push(split(k, k_block, "pc", "kb"));
    }
    let (block, at_once) = (if k_in_blocks { "kb" } else { k }, p.steps_at_once());
    let mut inside = vec!["ko", "ki", rows.inside, "jv", "jl"];
    if p.dot.is_some() {
        steps.extend([split(block, int("unroll_k") * at_once, "ko", "kr"), split("kr", at_once, "ki", "kk")]);
        inside.insert(2, "kk");
    } else {
        steps.push(split(block, int("unroll_k"), "ko", "ki"));
    }
    let sum = [&loops[n_finished..], &inside].concat();
    steps.push(reorder(&if n_finished == 0 { p.in_batch(batch, &sum) } else { sum }));

    // Copies made outside the parallel loop are shared and made by all threads.
    let shared = |at: Option<&str>| match at {
        _ if threads.is_empty() => false,
        None => true,
        // The loop over products is outside all others.
        Some(at) => threads != "b" && position(at) < position(threads),
    };
    let pack_b = text("pack_b");
    if pack_b != "none" {
        let at = (pack_b == "block").then(|| innermost("jc"));
        steps.extend(pack(p, &p.b, "B.p", at, nr, lanes));
        if shared(at) {
            let outermost = if at.is_none() { 0 } else { usize::from(p.batch.is_some()) };
            steps.push(parallel(&format!("B.p.{outermost}")));
        }
    }
    let pack_a = text("pack_a");
    if pack_a != "none" {
        let at = innermost("ic");
        let [panel, k] = [0, 1].map(|axis| format!("A.p.{}", axis + usize::from(p.batch.is_some())));
        let mut outermost = &panel;
        if pack_a == "rows" && p.a.is_k_last() {
            steps.extend(copy_rows(p, at, mr, lanes));
        } else {
            steps.extend(pack(p, &p.a, "A.p", Some(at), mr, lanes));
            // Rows of a transposed A lie interleaved as they are; read to their ends they come as fast
            // as memory gives.
            if pack_a == "rows" {
                steps.push(reorder(&[&k, &panel]));
                outermost = &k;
            }
        }
        if shared(Some(at)) {
            steps.push(parallel(outermost));
        }
    }

    steps.push(accumulate(p.sum, tile, "C.r"));
    steps.push(vectorize("jl"));
    steps.extend(["jv", rows.inside, "ki"].map(unroll));
    steps.extend(p.dot.map(|how| tensorize("kk", how)));
    // With an epilogue there is no such choice, even for parts of sums that it follows later.
    if space.has("prefetch_c") && space.flag(config, "prefetch_c") {
        steps.push(prefetch(p.sum, tile, 0));
    }
    if space.flag(config, "prefetch_a") {
        steps.push(prefetch(p.a.name, "ir", 1));
    }
    if int("prefetch_b") > 0 {
        let read = if pack_b == "none" { p.b.name } else { "B.p" };
        steps.push(prefetch(read, "ko", int("prefetch_b")));
    }
    if p.has_epilogue {
        steps.extend([split(columns.finish, lanes, "ov", "ol"), vectorize("ol")]);
        if n_finished == loops.len() {
            steps.extend([rows.finish, "ov"].map(unroll));
        }
    }
    if !threads.is_empty() {
        let batch = if n_finished > 0 { "ob" } else { batch };
        steps.push(parallel(if threads == "b" { batch } else { threads }));
        // Where threads share the work on a block they share its epilogue.
        if p.has_epilogue && threads != "b" && position(threads) >= Some(n_finished) {
            steps.push(parallel(rows.finish));
        }
    }
    steps
}

/// Copies panels of `width` rows or columns of a factor, step by step of the reduction.
fn pack(p: &Product, factor: &Factor, name: &str, at: Option<&str>, width: i64, lanes: i64) -> Vec<Step> {
    if p.dot.is_some() {
        return pack_in_groups(p, factor, name, at, width, lanes);
    }
    let axes = [Outer(factor.outer, width), Whole(factor.k), Inner(factor.outer, width)];
    let [k, element] = [1, 2].map(|axis| format!("{name}.{}", axis + usize::from(p.batch.is_some())));
    let [v, l] = ["v", "l"].map(|part| format!("{name}.{part}"));
    let mut steps = vec![stage_as(factor.name, at, name, &p.copy_layout(factor, &axes), p.copied)];
    if !factor.is_k_last() {
        steps.extend([split(&element, lanes, &v, &l), unroll(&v), vectorize(&l)]);
    } else if width < 2 * lanes {
        // Loads along rows; the panel's stores interleave them.
        steps.extend([split(&k, lanes, &v, &l), reorder(&[&v, &l, &element]), unroll(&element), vectorize(&l)]);
    } else {
        // Squares of vectors, transposed between loads along rows and stores along the panel.
        let [kv, kl] = ["kv", "kl"].map(|part| format!("{name}.{part}"));
        steps.extend([split(&k, lanes, &kv, &kl), split(&element, lanes, &v, &l)]);
        steps.extend([reorder(&[&kv, &v, &l, &kl]), unroll(&kl), vectorize(&l)]);
    }
    steps
}

/// Copies panels of `width` rows or columns of a factor, in which the steps that a dot product takes are
/// neighbours.
fn pack_in_groups(p: &Product, factor: &Factor, name: &str, at: Option<&str>, width: i64, lanes: i64) -> Vec<Step> {
    let n = p.steps_at_once();
    let axes = [Outer(factor.outer, width), Outer(factor.k, n), Inner(factor.outer, width), Inner(factor.k, n)];
    let [element, step] = [2, 3].map(|axis| format!("{name}.{}", axis + usize::from(p.batch.is_some())));
    let mut steps = vec![stage_as(factor.name, at, name, &p.copy_layout(factor, &axes), p.copied)];
    if factor.is_k_last() {
        steps.push(vectorize(&step));
    } else {
        // Loads along rows; the panel's stores interleave them.
        let [v, l] = ["v", "l"].map(|part| format!("{name}.{part}"));
        steps.extend([split(&element, lanes, &v, &l), unroll(&step), vectorize(&l)]);
    }
    steps
}

/// Copies blocks of `mr` rows of the first factor as they are.
fn copy_rows(p: &Product, at: &str, mr: i64, lanes: i64) -> Vec<Step> {
    let axes: [LayoutAxis; 3] = [Outer(p.a.outer, mr), Inner(p.a.outer, mr), Whole(p.a.k)];
    let k = format!("A.p.{}", 2 + usize::from(p.batch.is_some()));
    vec![
        stage_as(p.a.name, Some(at), "A.p", &p.copy_layout(&p.a, &axes), p.copied),
        split(&k, lanes, "A.p.v", "A.p.l"),
        vectorize("A.p.l"),
    ]
}
