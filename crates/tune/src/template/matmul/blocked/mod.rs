//! Matrix products by blocks: blocks for the caches, packed panels, a register tile.

mod constraints;
mod steps;

use super::super::algorithm::{self, Algorithm};
use super::super::model::{bandwidth, cost_of_dot4, cuts, is_meshed, step_cycles};
use super::super::share::{self, SharedWork};
use super::super::{Template, TemplateSetting};
use super::{FEW_ROWS, MatmulProduct, ceil_div, is_cold, is_product_on_cpu, of_members};
use tilewright_search::{Config, Parameter, Space};

/// Multi-level tiling around a register tile of `mr × nv` vectors.
///
/// Loops: the products of a batch, then the three block loops `ic jc pc` in any order, then the tiles `ir jr`
/// of a block, then the reduction `ko ki`, then the tile `im jv jl`. Parameters give the number of blocks
/// rather than their size, so that blocks are balanced at any size and threads get equal shares. An epilogue
/// finishes a tile in registers, or a block of sums in the cache.
///
/// # Source
/// The loop structure is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
/// (2008), except that the order of the block loops and the packing are left to the search.
pub const MATMUL_BLOCKED: Template = Template {
    name: "matmul-blocked",
    text: "cache blocks in any order, packed or plain operands, register tile, unrolling, prefetch, threads",
    serves: |s| is_product_on_cpu(s),
    space: |s| algorithm::space("matmul-blocked", s, &MatmulProduct::of(s), &[BLOCKED]),
    steps: |s, space, config| steps::steps(s, &MatmulProduct::of(s), space, config),
    estimate: Some(|s, space, config| of_members(s, |s, p| estimate(s, p, space, config))),
};

/// Blocked product as an algorithm.
pub const BLOCKED: Algorithm<MatmulProduct> = Algorithm {
    name: "blocked",
    applies: |_| true,
    parameters,
    constraints: constraints::constraints,
    steps: steps::steps,
    estimate,
};

/// Possible numbers of blocks of a dimension.
const N_BLOCKS: [i64; 16] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128];

/// Copies of blocks of A.
const PACK_A: &[&str] = &["none", "rows", "panels"];

/// Value of `prefetch_b`, a number of steps ahead, for the whole next panel of B, of which each tile of rows
/// prefetches a part.
const NEXT_PANEL: i64 = 1024;

/// Number of batch products per thread from which on no parallel loops inside a product are needed.
const PRODUCTS_PER_THREAD: i64 = 4;

/// Rows or columns of a block of whole tiles: `n` cut into about `blocks` equal parts.
fn block_of(n: i64, tile: i64, blocks: i64) -> i64 {
    ceil_div(ceil_div(n, tile), blocks) * tile
}

/// Steps of the reduction in a block, a multiple of the unroll factor if there is more than one block.
fn k_block_of(p: &MatmulProduct, blocks: i64) -> i64 {
    if blocks == 1 { p.k } else { ceil_div(ceil_div(p.k, blocks), 8 * p.steps_at_once()) * 8 * p.steps_at_once() }
}

/// Numbers of blocks that leave blocks of at least `least`.
fn n_blocks(n: i64, least: i64) -> impl Iterator<Item = i64> {
    N_BLOCKS.into_iter().filter(move |&b| b == 1 || n / b >= least)
}

/// Rows of the largest tile, and vectors of its columns.
fn most_tile(s: &TemplateSetting, p: &MatmulProduct) -> (i64, i64) {
    let vectors = ceil_div(p.n, s.target.lanes(s.workload.dtype));
    (p.m.min(i64::from(s.target.n_vector_registers) / 2), vectors.min(if p.m < 4 { 8 } else { 6 }))
}

/// Whether there are so few rows that the other operand is streamed and read once.
fn streams(p: &MatmulProduct) -> bool {
    p.m < FEW_ROWS
}

/// Whether the tiles of rows that share a panel of B may each prefetch a part of the next one.
fn can_prefetch_panel(s: &TemplateSetting, p: &MatmulProduct) -> bool {
    is_cold(s, p) && !streams(p)
}

/// Loops that may be parallel.
fn parallel_loops(s: &TemplateSetting, p: &MatmulProduct) -> &'static [&'static str] {
    match p.batch {
        None => &["ic", "jc", "jr"],
        Some(b) if b < PRODUCTS_PER_THREAD * s.n_threads as i64 => &["b", "ic", "jc", "jr"],
        Some(_) => &["b"],
    }
}

fn parameters(s: &TemplateSetting, p: &MatmulProduct) -> Vec<Parameter> {
    let (m, n, k) = (p.m, p.n, p.k);
    let lanes = s.target.lanes(s.workload.dtype);
    let (most_rows, most_vectors) = most_tile(s, p);
    // Deep blocks of a streamed operand would stride through it.
    let (least_k, most_k) = if streams(p) { (4, 64) } else { (128, 1024) };
    let [least_k, most_k] = [least_k, most_k].map(|steps| steps * p.steps_at_once());
    // Numbers of blocks include ones that give blocks of any useful depth, however long the reduction.
    let by_depth = std::iter::successors(Some(most_k), |&d| (d > least_k).then_some(d / 2)).map(|d| ceil_div(k, d));
    let mut k_blocks: Vec<i64> = n_blocks(k, least_k).chain(by_depth.filter(|&b| k / b >= least_k)).collect();
    k_blocks.sort_unstable();
    k_blocks.dedup();
    // The lanes of a transposed B are strided, and a batch is packed product by product unless it is packed
    // ahead of time.
    let mut pack_b = vec!["block"];
    pack_b.extend((!p.b.is_k_last() && p.dot.is_none() && p.copied.is_none()).then_some("none"));
    pack_b.extend((p.batch.is_none() || p.b.is_constant).then_some("whole"));
    // Dynamic columns and reductions end at a size known at run time, in a tail of each block.
    let [_, has_open_columns, has_open_sum] = p.open.map(|step| step.is_some());
    let n_blocks_of_n: Vec<i64> = if has_open_columns { vec![1] } else { n_blocks(n, 4 * lanes).collect() };
    let mut unrolled = vec![1, 2, 4];
    let mut pack_a = PACK_A;
    if has_open_sum {
        (k_blocks, unrolled, pack_a) = (vec![1], vec![1], &["none"]);
    }
    // The elements of a dot product are adjacent along the reduction.
    if p.dot.is_some() && !p.a.is_k_last() {
        pack_a = &["panels"];
    } else if p.copied.is_some() {
        pack_a = &PACK_A[1..];
    }
    let mut steps_ahead = vec![0, 4, 8];
    steps_ahead.extend(can_prefetch_panel(s, p).then_some(NEXT_PANEL));
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
        Parameter::ordinal("prefetch_b", steps_ahead),
    ];
    // The sums that an epilogue reads are in registers or in the cache.
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

/// Blocks of rows, columns and steps of the reduction.
#[derive(Clone, Copy)]
struct BlockSizes {
    rows: i64,
    columns: i64,
    depth: i64,
}

/// Whether one of the loops of an order is outside another one.
fn is_before(order: &[String], outer: &str, inner: &str) -> bool {
    let position = |l: &str| order.iter().position(|o| o == l);
    position(outer) < position(inner)
}

/// Estimated cycles of the busiest thread.
fn estimate(s: &TemplateSetting, p: &MatmulProduct, space: &Space, config: &Config) -> f64 {
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let (mr, nr) = (int("mr"), int("nv") * s.target.lanes(s.workload.dtype));
    // Blocks of a family's rows are as high at all sizes, and small sizes have fewer of them.
    let row_blocks =
        if p.m == p.most_rows { int("m_blocks") } else { ceil_div(p.m, block_of(p.most_rows, mr, int("m_blocks"))) };
    let blocks = BlockSizes { rows: row_blocks, columns: int("n_blocks"), depth: int("k_blocks") };
    let each = |n: i64| ceil_div(n, s.n_threads as i64);
    let (mut own, mut of_own, mut n_begins) = (*p, blocks, 1);
    let share = SharedWork::of(s, space, config);
    match share {
        SharedWork::Nothing => {}
        SharedWork::Sum => (own.k, of_own.depth) = (share::part_of_product(s, p.k).min(p.k), each(blocks.depth)),
        SharedWork::Result => {
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

/// Cycles of register tiles with those of packing the operands, or of reading them where they are.
fn with_copies(cycles: f64, p: &MatmulProduct, blocks: BlockSizes, space: &Space, config: &Config) -> f64 {
    let text = |name: &str| space.text(config, name);
    let order = space.order(config, "order");
    let repeats = |of: &str, n_blocks: i64, over: &str| {
        let depth_of = |l: &str| order.iter().position(|o| o == l).unwrap_or(0);
        let again = depth_of(over) < depth_of(of) || depth_of(over) < depth_of("pc");
        if again { n_blocks as f64 } else { 1.0 }
    };
    let (a_elements, b_elements) = ((p.m * p.k) as f64, (p.n * p.k) as f64);
    let cycles = cycles
        + match text("pack_a").as_str() {
            // Rows along the reduction are read as fast as copies of them.
            "none" if p.multiplies_bytes() && p.a.is_k_last() => 0.0,
            "none" => 0.05 * cycles,
            "rows" => 0.5 * a_elements * repeats("ic", blocks.columns, "jc"),
            _ => 1.0 * a_elements * repeats("ic", blocks.columns, "jc"),
        };
    cycles
        + match text("pack_b").as_str() {
            // Rows of B are pages apart.
            "none" => 0.1 * cycles,
            "whole" if p.b.is_constant => 0.0,
            _ => 0.5 * b_elements * repeats("jc", blocks.rows, "ic"),
        }
}

/// Estimated cycles: register tiles, bound by their multiply-adds and loads or by reading the panels from the
/// cache that holds what the enclosing loops reuse; then loading the sums again for later blocks of the
/// reduction, packing, and the first read of B, which overlaps with the rest the more the earlier it is
/// prefetched.
fn of_one_thread(s: &TemplateSetting, p: &MatmulProduct, blocks: BlockSizes, space: &Space, config: &Config) -> f64 {
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
    // Products of bytes were fitted anew. Another hyperthread of the core may take turns with loads: tiles
    // with few of them lose least.
    let multiplies_bytes = p.multiplies_bytes();
    let (cost, per_load, overlap) = if multiplies_bytes { (cost_of_dot4(s), 0.02, 0.1) } else { (1.0, 0.0, 0.2) };
    // Each panel of B is read once for each tile of rows, the first time from the memory level that holds B.
    let is_copied = text("pack_b") == "block";
    let again = if is_copied { 1.0 } else { 1.0 - 1.0 / ceil_div(m, mr) as f64 };
    let mut cycles = 0.0;
    for (n_k, steps) in cuts(k, depth as i64) {
        let (steps, at_once) = (steps as f64, ceil_div(steps, p.steps_at_once()) as f64);
        for (n_m, rows) in cuts(m, mr) {
            for (n_n, columns) in cuts(n, nr) {
                let (a, b) = (rows as f64 * steps * bytes, columns as f64 * steps * bytes);
                // The operand of the outer tile loop stays in a near cache; that of the inner one is streamed
                // in whole blocks.
                let (a_from, b_from) = if rows_inside { (a_block + b, a + b) } else { (a + b, b_block + a) };
                let read = a / bandwidth(s, a_from) + again * b / bandwidth(s, b_from);
                let vectors = ceil_div(columns, lanes);
                let loads = per_load * (vectors + rows) as f64;
                let step = cost * step_cycles(s, vectors, rows) + loads + 1.0 / int("unroll_k") as f64;
                let compute = at_once * step + 20.0 + 3.0 * (rows * vectors) as f64;
                cycles += n_k * n_m * n_n * (compute.max(read) + overlap * compute.min(read));
            }
        }
    }
    cycles = with_copies(cycles, p, blocks, space, config);
    let order = space.order(config, "order");
    let (a_elements, b_elements) = ((m * k) as f64, (n * k) as f64);
    let is_inside = |blocks: &str| order.iter().take_while(|l| *l != "pc").any(|l| l == blocks);
    let sums = if is_inside("ic") { rows } else { m as f64 } * if is_inside("jc") { columns } else { n as f64 };
    let sum_bytes = s.workload.dtype.bytes() as f64;
    let n_again = (ceil_div(k, depth as i64) - 1) as f64;
    // An epilogue of a block reads the sums once more.
    let n_again = n_again + f64::from(u8::from(multiplies_bytes && p.has_epilogue && text("epilogue") == "block"));
    cycles += n_again * 2.0 * (m * n) as f64 * sum_bytes / bandwidth(s, sums * sum_bytes);
    // Blocks of columns each stream A, which overlaps with the rest as far as prefetching by the CPU goes.
    let a_bytes = a_elements * bytes;
    if multiplies_bytes && is_meshed(s) && is_before(&order, "jc", "ic") && a_bytes > 0.7 * s.target.l2_bytes as f64 {
        cycles += 0.25 * (blocks.columns - 1) as f64 * a_bytes / bandwidth(s, a_bytes);
    }
    let b_bytes = b_elements * bytes;
    let is_cold = is_cold(s, p);
    if is_cold || !is_copied {
        // Between two runs, the data of other kernels evict B.
        let from = if is_cold { f64::INFINITY } else { b_bytes };
        let mut first = b_bytes / bandwidth(s, from);
        // Blocks of rows each stream a block of B, or all of it, which costs little without a mesh.
        let streamed = if is_before(&order, "ic", "jc") { b_bytes } else { b_block };
        if streamed > 0.7 * s.target.l2_bytes as f64 && !is_copied && is_meshed(s) {
            first += (blocks.rows - 1) as f64 * b_bytes / bandwidth(s, streamed);
        }
        let in_the_way = match int("prefetch_b") {
            _ if is_copied => 0.8,
            NEXT_PANEL => 0.1,
            steps => 0.8 - 0.075 * steps as f64,
        };
        cycles = cycles.max(first) + in_the_way * cycles.min(first);
    }
    cycles * p.batch.unwrap_or(1) as f64
}
