//! Constraints of the space, as expressions.

use super::super::super::share::SharedWork;
use super::super::super::{TemplateSetting, constraint_over as over, has_value, none_of};
use super::super::{FEW_ROWS, MatmulProduct};
use super::{NEXT_PANEL, PACK_A, most_tile, n_blocks, parallel_loops};
use tilewright_ir::schedule::{LINE_BYTES, MOST_PREFETCHED_LINES};
use tilewright_search::{Constraint, Parameter, Value};

/// Constraints on the tile, on blocks in caches, on copies, on sums and on threads.
pub(super) fn constraints(s: &TemplateSetting, p: &MatmulProduct) -> Vec<Constraint> {
    let parameters = super::parameters(s, p);
    let mut constraints = of_tile(s, p, &parameters);
    constraints.extend(of_caches(s, p, &parameters));
    constraints.extend(of_copies(s, p, &parameters));
    constraints.extend(of_sums(s, p, &parameters));
    if s.n_threads > 1 {
        constraints.extend(of_threads(s, p, &parameters));
    }
    constraints
}

/// Rows of a block, as an expression.
fn rows(m: i64) -> String {
    format!("min(ceil_div(ceil_div({m}, mr), m_blocks) * mr, {m})")
}

/// Columns of a block, as an expression.
fn columns(n: i64, lanes: i64) -> String {
    format!("min(ceil_div(ceil_div({n}, nv * {lanes}), n_blocks) * nv * {lanes}, {n})")
}

/// Steps of the reduction in a block, as an expression; see [`super::k_block_of`].
fn depth(p: &MatmulProduct) -> String {
    let (k, unrolled) = (p.k, 8 * p.steps_at_once());
    format!("({k} if k_blocks == 1 else ceil_div(ceil_div({k}, k_blocks), {unrolled}) * {unrolled})")
}

/// Constraints on the register tile, which leaves registers for a row of B and one element of A.
fn of_tile(s: &TemplateSetting, p: &MatmulProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let (registers, lanes) = (i64::from(s.target.n_vector_registers), s.target.lanes(s.workload.dtype));
    let tile = ["mr", "nv"];
    let fits = format!("mr * nv + nv < {registers}");
    // Loads per step: mr elements of A and nv vectors of B for mr * nv multiply-adds. A core does two loads
    // and two multiply-adds per cycle, and with fewer than 4 rows the second-level cache is too slow.
    let reuse = format!("mr >= {} and 10 * (mr + nv) <= 7 * mr * nv", p.m.min(4));
    let reuse = format!("{} < {FEW_ROWS} or {} <= {lanes} or {reuse}", p.m, p.n);
    let reuse = over("tile_reuse", &tile, &reuse, parameters);
    let (most_rows, most_vectors) = most_tile(s, p);
    // A tile consists of whole pairs.
    let fits = match p.pairs {
        Some(columns) => format!("{fits} and nv * {lanes} % {} == 0", 2 * columns),
        None => fits,
    };
    let registers_of = |text: &str| over("registers", &tile, text, parameters);
    let legal = [registers_of(&fits), reuse.clone()];
    let tiles = (1..=most_rows).flat_map(|mr| (1..=most_vectors).map(move |nv| [mr, nv]));
    let is_legal = |tile: &[i64; 2]| {
        let [mr, nv] = tile.map(Value::Int);
        legal.iter().all(|c| c.holds(&[&mr, &nv]))
    };
    let enough = tiles.filter(is_legal).map(|[mr, nv]| mr * nv).max().unwrap_or(1).min(registers / 2);
    vec![registers_of(&format!("{fits} and mr * nv >= {enough}")), reuse]
}

/// Constraints that keep blocks in the caches that they are read from.
fn of_caches(s: &TemplateSetting, p: &MatmulProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let (m, n, k, bytes, lanes) = (p.m, p.n, p.k, p.factor_bytes, s.target.lanes(s.workload.dtype));
    let (l2, l3) = (s.target.l2_bytes as i64, s.target.l3_bytes as i64);
    let depth = depth(p);
    // B stays unpacked only if it fits into twice the L2 cache or serves few rows.
    let plain_b =
        format!("{} or {m} <= 128 or {n} * {k} * {bytes} <= {}", none_of(parameters, "pack_b", &["none"]), 2 * l2);
    let a_block = format!("{m} <= 64 or {} * {depth} * {bytes} <= {l2}", rows(m));
    let b_panel = format!("{m} < {FEW_ROWS} or nv * {lanes} * {depth} * {bytes} <= {}", l2 / 4);
    let b_block = format!("pack_b != 'block' or {} * {depth} * {bytes} <= {}", columns(n, lanes), l3 / 2);
    vec![
        over("plain_b_in_l2", &["pack_b"], &plain_b, parameters),
        over("a_block_in_l2", &["m_blocks", "mr", "k_blocks"], &a_block, parameters),
        over("b_panel_in_l2", &["nv", "k_blocks"], &b_panel, parameters),
        over("b_block_in_l3", &["n_blocks", "nv", "k_blocks", "pack_b"], &b_block, parameters),
    ]
}

/// Constraints on copies of blocks and on prefetches.
fn of_copies(s: &TemplateSetting, p: &MatmulProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let (m, n, bytes, lanes) = (p.m, p.n, p.factor_bytes, s.target.lanes(s.workload.dtype));
    let unless_a_is = |ways: &[&str], condition: &str| {
        let others: Vec<&str> = PACK_A.iter().copied().filter(|way| !ways.contains(way)).collect();
        match ways.iter().any(|way| has_value(parameters, "pack_a", way)) {
            true => format!("{} or {condition}", none_of(parameters, "pack_a", &others)),
            false => condition.into(),
        }
    };
    // A block of B is packed outside the loop over blocks of rows, or there is one such block.
    let b_once = "pack_b != 'block' or m_blocks == 1 or order[2] == 'ic' or k_blocks == 1 and order[1] == 'ic' and \
                  order[2] == 'pc'";
    // A block of A is packed for at least 256 columns, or once.
    let for_enough = format!("order[2] == 'jc' or {} >= {}", columns(n, lanes), n.min(256));
    // The next rows of A are prefetched once per block, if they are not packed.
    let lines = match p.a.is_k_last() {
        true => format!("mr * ceil_div({} * {bytes}, {LINE_BYTES})", depth(p)),
        false => format!("{} * ceil_div(mr * {bytes}, {LINE_BYTES})", depth(p)),
    };
    let prefetch = match has_value(parameters, "pack_a", "none") {
        true => {
            format!("not prefetch_a or pack_a == 'none' and inner == 'ir-jr' and {lines} <= {MOST_PREFETCHED_LINES}")
        }
        false => "not prefetch_a".into(),
    };
    // Rows of A are interleaved only if a tile has more than one.
    let plain: &[&str] = if p.a.is_k_last() { &["none", "rows"] } else { &["none"] };
    let interleaved = unless_a_is(plain, &format!("mr > 1 or {m} == 1"));
    let prefetched = ["prefetch_a", "pack_a", "inner", "mr", "k_blocks"];
    let mut constraints = vec![
        over("b_packed_once", &["pack_b", "order", "m_blocks", "k_blocks"], b_once, parameters),
        over(
            "a_packed_for_enough",
            &["pack_a", "order", "n_blocks", "nv"],
            &unless_a_is(&["none"], &for_enough),
            parameters,
        ),
        over("prefetch_of_rows", &prefetched, &prefetch, parameters),
        over("panels_of_rows", &["pack_a", "mr"], &interleaved, parameters),
    ];
    if super::can_prefetch_panel(s, p) {
        constraints.extend(of_next_panel(s, p, parameters));
    }
    constraints
}

/// Constraints on prefetching the next panel of B: several tiles of rows share a panel, and have not many
/// more steps than there are lines.
fn of_next_panel(s: &TemplateSetting, p: &MatmulProduct, parameters: &[Parameter]) -> [Constraint; 2] {
    let (lanes, bytes) = (s.target.lanes(s.workload.dtype), p.steps_at_once() * p.factor_bytes);
    let n_tiles = format!("ceil_div({}, mr)", rows(p.m));
    let lines = format!("unroll_k * ceil_div(nv * {lanes} * {bytes}, {LINE_BYTES})");
    let tiles = format!("prefetch_b != {NEXT_PANEL} or {n_tiles} >= 4 and {n_tiles} <= 2 * {lines}");
    let loops = format!("prefetch_b != {NEXT_PANEL} or pack_b == 'whole' and inner == 'jr-ir'");
    [
        over("panels_prefetched_in_order", &["prefetch_b", "pack_b", "inner"], &loops, parameters),
        over("panels_prefetched_by_tiles", &["prefetch_b", "mr", "m_blocks", "nv", "unroll_k"], &tiles, parameters),
    ]
}

/// Constraints on sums that an epilogue finishes, or that threads share.
fn of_sums(s: &TemplateSetting, p: &MatmulProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let can_share_sum = p.work().has_long_sum(s);
    let mut constraints = Vec::new();
    if p.has_epilogue {
        // The epilogue finishes single tiles only if k is in one block; blocks of k are not the outermost
        // ones if an epilogue follows them.
        let (of_tile, of_block) = ("epilogue != 'tile' or k_blocks == 1", "k_blocks == 1 or order[0] != 'pc'");
        let of_result = [
            over("sums_of_tile", &["epilogue", "k_blocks"], of_tile, parameters),
            over("sums_of_block", &["order", "k_blocks"], of_block, parameters),
        ];
        // An epilogue that follows the parts of a sum follows all blocks.
        constraints.extend(of_result.map(|c| if can_share_sum { SharedWork::Sum.except(c) } else { c }));
        constraints.extend(can_share_sum.then(|| SharedWork::Sum.excludes(parameters, "epilogue", "block")));
    }
    if can_share_sum && !p.b.is_constant {
        // Each thread packs the data that it reads.
        constraints.push(SharedWork::Sum.excludes(parameters, "pack_b", "whole"));
    }
    constraints
}

/// Constraints on the loop that threads share.
fn of_threads(s: &TemplateSetting, p: &MatmulProduct, parameters: &[Parameter]) -> Vec<Constraint> {
    let (m, n, lanes, batch) = (p.m, p.n, s.target.lanes(s.workload.dtype), p.batch.unwrap_or(1));
    // Small problems cannot be cut into enough blocks for every thread.
    let most_blocks = n_blocks(m, 16).chain(n_blocks(n, 4 * lanes)).max().unwrap_or(1).max(batch);
    let needed = most_blocks.min(s.n_threads as i64);
    // The loop over tiles of columns runs in parallel only as the outer one of a block.
    let outer = match has_value(parameters, "parallel", "jr") {
        true => "parallel != 'jr' or inner == 'jr-ir'".into(),
        false => none_of(parameters, "parallel", &[]),
    };
    let iterations = parallel_loops(s, p).iter().map(|&threads| {
        let n_iterations = match threads {
            "b" => batch.to_string(),
            "ic" => "m_blocks".into(),
            "jc" => "n_blocks".into(),
            _ => format!("ceil_div(ceil_div({n}, nv * {lanes}), n_blocks)"),
        };
        format!("parallel == '{threads}' and {n_iterations} >= {needed}")
    });
    let for_all = iterations.collect::<Vec<_>>().join(" or ");
    let of_result = [
        over("tiles_in_parallel", &["parallel", "inner"], &outer, parameters),
        over("work_for_all_threads", &["parallel", "m_blocks", "n_blocks", "nv"], &for_all, parameters),
    ];
    let mut constraints: Vec<Constraint> = of_result.map(|c| p.work().of_result(s, c)).into();
    if p.work().is_choice(s) {
        constraints.push(SharedWork::Result.owns(parameters, "parallel", parallel_loops(s, p)[0]));
    }
    constraints
}
