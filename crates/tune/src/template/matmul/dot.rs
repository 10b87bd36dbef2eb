//! Matrix products with few rows or few columns, as dot products along the reduction.

use super::super::algorithm::{self, Algorithm};
use super::super::model::{bandwidth, cuts, near_bytes, step_cycles};
use super::super::share::{self, SharedWork};
use super::super::step::{accumulate, compute_at, parallel, reorder, rfactor, split, tensorize, unroll, vectorize};
use super::super::{Template, TemplateSetting, ceil_div, constraint_over, none_of};
use super::{MatmulProduct, is_cold, is_product_on_cpu};
use tilewright_ir::dot::STEPS;
use tilewright_ir::{DType, Step, TensorProduct};
use tilewright_search::{Config, Constraint, Parameter, Space};

/// Dot products of a tile of rows with a tile of columns: vector lanes run along the reduction, each
/// accumulates a partial sum, and the lanes are added up at the end.
///
/// Both operands are read in place. With few rows or columns, a packed panel is not read often enough to be
/// worth the copy.
pub const MATMUL_DOT: Template = Template {
    name: "matmul-dot",
    text: "dot products along the reduction: register tile, partial sums in the lanes of vectors, threads",
    serves: |s| is_product_on_cpu(s) && applies(&MatmulProduct::of(s)),
    space: |s| algorithm::space("matmul-dot", s, &MatmulProduct::of(s), &[DOT]),
    steps: |s, space, config| steps(s, &MatmulProduct::of(s), space, config),
    estimate: Some(|s, space, config| estimate(s, &MatmulProduct::of(s), space, config)),
};

/// Dot product algorithm.
pub const DOT: Algorithm<MatmulProduct> = Algorithm { name: "dot", applies, parameters, constraints, steps, estimate };

/// Maximum number of rows or columns, whichever is smaller; beyond it packed panels are faster.
const MOST_OF_FEWER: i64 = 64;

/// Rows or columns of a tile.
const TILES: [i64; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// Bytes of the widest vector.
const MOST_BYTES: i64 = 64;

/// Whether operands are multiplied without conversion to a copy: in f32 or a type that is converted to it, or
/// the bytes of a single column in whole vectors.
fn multiplies_as_read(p: &MatmulProduct) -> bool {
    let fits = !p.multiplies_bytes() || (p.n == 1 && !p.is_family() && p.k % MOST_BYTES == 0);
    fits && !matches!(p.copied, Some(DType::Bf16 | DType::I16))
}

fn applies(p: &MatmulProduct) -> bool {
    // An operand of one column or row is contiguous along the reduction in any case.
    let lies_along = |is_k_last: bool, n: i64| is_k_last || n == 1;
    // Of the dynamic sizes, columns may be in whole tiles.
    let (is_whole, n_few) = match p.open {
        [None, None, None] => (true, p.m.min(p.n)),
        [None, Some(_), None] => (true, p.m),
        _ => (false, 0),
    };
    multiplies_as_read(p)
        && p.pairs.is_none()
        && is_whole
        && n_few <= MOST_OF_FEWER
        && lies_along(p.a.is_k_last(), p.m)
        && lies_along(p.b.is_k_last(), p.n)
}

/// Whether the algorithm applies to a product for some, though not all, of its dynamic numbers of rows.
pub fn applies_to_few_rows(p: &MatmulProduct) -> bool {
    multiplies_as_read(p) && p.pairs.is_none() && (p.b.is_k_last() || p.n == 1)
}

fn tiles(n: i64) -> impl Iterator<Item = i64> {
    TILES.into_iter().filter(move |&t| t <= n)
}

/// Loops that may be parallel.
fn parallel_loops(p: &MatmulProduct) -> &'static [&'static str] {
    if p.batch.is_some() { &["b", "tiles"] } else { &["tiles"] }
}

fn parameters(s: &TemplateSetting, p: &MatmulProduct) -> Vec<Parameter> {
    let mut parameters = vec![
        Parameter::ordinal("tile_m", tiles(p.m)),
        Parameter::ordinal("tile_n", tiles(p.n).filter(|tile| p.open[1].is_none_or(|step| step % tile == 0))),
        Parameter::categorical("tiles", &["jr-ir", "ir-jr"]),
        Parameter::ordinal("unroll_k", [1, 2, 4]),
    ];
    if s.n_threads > 1 {
        parameters.push(Parameter::categorical("parallel", parallel_loops(p)));
    }
    parameters.extend(p.work().parameter_at_any_size(s));
    parameters
}

fn constraints(s: &TemplateSetting, p: &MatmulProduct) -> Vec<Constraint> {
    let parameters = parameters(s, p);
    let over = |name: &str, reads: &[&str], text: &str| constraint_over(name, reads, text, &parameters);
    let (m, n) = (p.m, p.n);
    let in_registers = format!("tile_m * tile_n + min(tile_m, tile_n) < {}", s.target.n_vector_registers);
    // With one row or one column, the inner loop reuses nothing.
    let tiles = match (m, n) {
        (1, _) => "tiles == 'jr-ir'".to_owned(),
        (_, 1) => "tiles == 'ir-jr'".to_owned(),
        _ => none_of(&parameters, "tiles", &[]),
    };
    let mut constraints = vec![
        over("tile_in_registers", &["tile_m", "tile_n"], &in_registers),
        over("tiles_of_a_vector", &["tiles"], &tiles),
    ];
    if s.n_threads > 1 {
        let (batch, n_threads) = (p.batch.unwrap_or(1), s.n_threads as i64);
        // One iteration for every thread, if one of the loops has as many.
        let needed = m.max(n).max(batch).min(n_threads);
        let outer = format!("ceil_div({m}, tile_m) if tiles == 'ir-jr' else ceil_div({n}, tile_n)");
        let iterations = match p.batch {
            Some(batch) => format!("{batch} if parallel == 'b' else {outer}"),
            None => outer,
        };
        let reads = ["parallel", "tiles", "tile_m", "tile_n"];
        let for_all = over("tiles_for_all_threads", &reads, &format!("({iterations}) >= {needed}"));
        constraints.push(p.work().of_result(s, for_all));
        constraints.extend(
            p.work().is_choice(s).then(|| SharedWork::Result.owns(&parameters, "parallel", parallel_loops(p)[0])),
        );
    }
    constraints
}

/// Estimated cycles of the busiest thread.
fn estimate(s: &TemplateSetting, p: &MatmulProduct, space: &Space, config: &Config) -> f64 {
    let each = |n: i64| ceil_div(n, s.n_threads as i64);
    // A thread takes whole tiles of rows or columns.
    let tiles = |n: i64, tile: &str| n.min(each(ceil_div(n, space.int(config, tile))) * space.int(config, tile));
    let share = SharedWork::of(s, space, config);
    let mut own = *p;
    match share {
        SharedWork::Nothing => {}
        SharedWork::Sum => own.k = share::part_of_product(s, p.k).min(p.k),
        SharedWork::Result if space.text(config, "parallel") == "b" => own.batch = p.batch.map(each),
        SharedWork::Result if space.text(config, "tiles") == "ir-jr" => own.m = tiles(p.m, "tile_m"),
        SharedWork::Result => own.n = tiles(p.n, "tile_n"),
    }
    let n_begins = match share {
        SharedWork::Result if space.text(config, "parallel") == "tiles" => p.batch.unwrap_or(1),
        _ => 1,
    };
    of_one_thread(s, &own, space, config) + share::overhead(s, share, n_begins, p.work().elements())
}

/// Cycles for the sum of one result over the lanes of its vector, for each halving of the lanes.
///
/// Six results of 16 lanes take 20 shuffles and 16 additions, which wait for each other as often as lanes are
/// halved. Fitted to tiles of 2 to 24 results with sums of 64 and 512 terms on an Emerald Rapids (2026-11-30,
/// bea50905): 8 to 12 cycles a result of 16 lanes, 5 in tiles of a single row.
const END_CYCLES: f64 = 2.25;

/// Estimated cycles: tiles, bound by their multiply-adds and loads or by streaming one operand for each tile
/// of the other; then reading what the second cache does not hold.
fn of_one_thread(s: &TemplateSetting, p: &MatmulProduct, space: &Space, config: &Config) -> f64 {
    let int = |name: &str| space.int(config, name);
    let (bytes, at_once) = if p.multiplies_bytes() { (1, STEPS) } else { (s.workload.dtype.bytes() as i64, 1) };
    let row = (p.k * bytes) as f64;
    let lanes = s.target.lanes(s.workload.dtype);
    let steps = ceil_div(p.k, lanes * at_once) as f64;
    let end = END_CYCLES * (lanes as f64).log2();
    let rows_outside = space.text(config, "tiles") == "ir-jr";
    let (n_kept, n_passing, tile) = if rows_outside { (p.m, p.n, "tile_m") } else { (p.n, p.m, "tile_n") };
    let near = |bytes: f64| bandwidth(s, bytes.min(near_bytes(s)));
    let mut cycles = n_kept as f64 * row / near(n_kept as f64 * row);
    for (n_m, rows) in cuts(p.m, int("tile_m")) {
        for (n_n, columns) in cuts(p.n, int("tile_n")) {
            let (of_a, of_b) = (rows as f64 * row, columns as f64 * row);
            let (kept, passing) = if rows_outside { (of_a, of_b) } else { (of_b, of_a) };
            let read = kept / near(kept + passing) + passing / near(n_passing as f64 * row + kept);
            let compute = steps * step_cycles(s, columns, rows) + 20.0 + end * (rows * columns) as f64;
            cycles += n_m * n_n * (compute.max(read) + 0.2 * compute.min(read));
        }
    }
    let far = far_cycles(s, p, row, [n_passing, ceil_div(n_kept, int(tile))]);
    // The fewer rows multiply each line, the more lines are on their way at once; of configurations that wait
    // for memory alone, the one with the least work is first.
    let in_the_way = (0.8 * (1.0 - 1.0 / p.m.min(p.n) as f64)).max(0.01);
    (cycles.max(far) + in_the_way * cycles.min(far)) * p.batch.unwrap_or(1) as f64
}

/// Cycles for reading rows of `row` bytes from beyond the second cache: those of both operands, then the
/// passing ones again in each further pass. The cache keeps a part of what is streamed again and again.
fn far_cycles(s: &TemplateSetting, p: &MatmulProduct, row: f64, [n_passing, n_passes]: [i64; 2]) -> f64 {
    let beyond = |bytes: f64| (bytes - near_bytes(s)).max(0.0) / bandwidth(s, bytes);
    let first = match is_cold(s, p) {
        true => p.n as f64 * row / bandwidth(s, f64::INFINITY),
        false => beyond((p.m + p.n) as f64 * row),
    };
    first + beyond(n_passing as f64 * row) * (n_passes - 1) as f64
}

fn steps(s: &TemplateSetting, p: &MatmulProduct, space: &Space, config: &Config) -> Vec<Step> {
    let share = SharedWork::of(s, space, config);
    if share != SharedWork::Sum {
        let threads = if share == SharedWork::Result { space.text(config, "parallel") } else { String::new() };
        return product(s, p, &threads, space, config);
    }
    let (before, parts, after) = p.in_parts(s);
    [before, product(s, &parts, "", space, config), after].concat()
}

/// Schedule of a product; `threads` names the parallel loop, if any.
fn product(s: &TemplateSetting, p: &MatmulProduct, threads: &str, space: &Space, config: &Config) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype);
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let (tile_m, tile_n) = (int("tile_m"), int("tile_n"));
    let [outer, inner] = if text("tiles") == "ir-jr" { ["ir", "jr"] } else { ["jr", "ir"] };
    let [b, i, j, k] = p.loops;
    // The lanes' sums have the loops of the sums.
    let [lanes_i, lanes_j] = [i, j].map(|l| format!("P.{l}"));

    let of_bytes = p.multiplies_bytes();
    let mut steps = if of_bytes { vec![split(k, STEPS, "kq", "k4")] } else { Vec::new() };
    let vectors = if of_bytes { "kq" } else { k };
    steps.extend([split(vectors, lanes, "ko", "kl"), rfactor(p.sum, "kl", "P")]);
    // Loops over a tile, of the sums and of the epilogue.
    let (rows, columns) = if p.has_epilogue {
        steps.extend([split("oi", tile_m, "ir", "om"), split("oj", tile_n, "jr", "on")]);
        steps.push(reorder(&p.in_batch("ob", &[outer, inner, "om", "on"])));
        steps.push(compute_at(p.sum, inner));
        (i, j)
    } else {
        steps.extend([split(i, tile_m, "ir", "im"), split(j, tile_n, "jr", "jm")]);
        steps.push(reorder(&p.in_batch(b, &[outer, inner, "im", "jm", "kl"])));
        ("im", "jm")
    };
    steps.push(compute_at("P", inner));
    steps.push(split("P.ko", int("unroll_k"), "P.k", "P.ki"));
    let fours: &[&str] = if of_bytes { &["P.k4"] } else { &[] };
    steps.push(reorder(&[&["P.k", "P.ki"], fours, &[&lanes_i, &lanes_j, "P.kl"]].concat()));
    steps.push(accumulate("P", inner, "P.r"));
    steps.push(vectorize("P.kl"));
    steps.extend(["P.ki", &lanes_i, &lanes_j].map(unroll));
    steps.extend(fours.iter().map(|four| tensorize(four, TensorProduct::Dot4)));

    // Sums of adjacent results are finished together: their lanes are transposed, then added.
    let along_columns = tile_n >= tile_m;
    let (one, together) = if along_columns { (rows, columns) } else { (columns, rows) };
    steps.extend([reorder(&[one, together, "kl"]), accumulate(p.sum, one, "C.r")]);
    steps.extend([unroll("kl"), vectorize(together)]);
    if p.has_epilogue {
        let [one, together] = if along_columns { ["om", "on"] } else { ["on", "om"] };
        steps.extend([reorder(&[one, together]), vectorize(together)]);
    }
    if !threads.is_empty() {
        let batch = if p.has_epilogue { "ob" } else { b };
        steps.push(parallel(if threads == "b" { batch } else { outer }));
    }
    steps
}
