//! Products of few rows or few columns as scalar products along the reduction.

use super::super::algorithm::{self, Algorithm};
use super::super::model::{bandwidth, cuts, step_cycles};
use super::super::step::{accumulate, compute_at, parallel, reorder, rfactor, split, unroll, vectorize};
use super::super::{Setting, Template, ceil_div};
use super::{Product, is_product};
use crate::space::{Config, Constraint, Parameter, Space};
use tilewright_ir::Step;

/// Scalar products of a tile of rows with a tile of columns: the reduction's neighbours are vector lanes, each of which
/// sums what it meets, and the lanes are added up at the end.
///
/// Both factors are read where they lie. With few rows or columns a packed panel is not read often enough to be worth its
/// copy.
pub const MATMUL_DOT: Template = Template {
    name: "matmul-dot",
    text: "scalar products along the reduction: register tile, partial sums in the lanes of vectors, threads",
    serves: |w| is_product(w) && applies(&Product::of(w)),
    space: |s| algorithm::space("matmul-dot", s, &Product::of(&s.workload), &[DOT]),
    steps: |s, space, config| steps(s, &Product::of(&s.workload), space, config),
    estimate: Some(|s, space, config| estimate(s, &Product::of(&s.workload), space, config)),
};

/// It as one of several algorithms.
pub const DOT: Algorithm<Product> = Algorithm { name: "dot", applies, parameters, constraints, steps, estimate };

/// With more rows and columns than this, packed panels win.
const MOST_OF_FEWER: i64 = 64;

/// Rows or columns of a tile.
const TILES: [i64; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

fn applies(p: &Product) -> bool {
    // A factor of one column or row lies along the reduction in any case.
    let lies_along = |is_k_last: bool, n: i64| is_k_last || n == 1;
    p.m.min(p.n) <= MOST_OF_FEWER && lies_along(p.a.is_k_last(), p.m) && lies_along(p.b.is_k_last(), p.n)
}

fn tiles(n: i64) -> impl Iterator<Item = i64> {
    TILES.into_iter().filter(move |&t| t <= n)
}

fn parameters(s: &Setting, p: &Product) -> Vec<Parameter> {
    // With one row or column there is nothing that the inner loop returns to.
    let tile_loops: &[&str] = match (p.m, p.n) {
        (1, _) => &["jr-ir"],
        (_, 1) => &["ir-jr"],
        _ => &["jr-ir", "ir-jr"],
    };
    let mut parameters = vec![
        Parameter::ordinal("tile_m", tiles(p.m)),
        Parameter::ordinal("tile_n", tiles(p.n)),
        Parameter::categorical("tiles", tile_loops),
        Parameter::ordinal("unroll_k", [1, 2, 4]),
    ];
    if s.n_threads > 1 {
        parameters
            .push(Parameter::categorical("parallel", if p.batch.is_some() { &["b", "tiles"] } else { &["tiles"] }));
    }
    parameters
}

fn constraints(s: &Setting, p: &Product) -> Vec<Constraint> {
    let (m, n) = (p.m, p.n);
    let registers = i64::from(s.target.n_vector_registers);
    let mut constraints = vec![Constraint::new(
        "tile_in_registers",
        &format!("tile_m * tile_n + min(tile_m, tile_n) < {registers}"),
        &["tile_m", "tile_n"],
        move |v| {
            let (tm, tn) = (v[0].int(), v[1].int());
            tm * tn + tm.min(tn) < registers
        },
    )];
    if s.n_threads > 1 {
        let (batch, n_threads) = (p.batch.unwrap_or(1), s.n_threads as i64);
        constraints.push(Constraint::new(
            "tiles_for_all_threads",
            "the parallel loop has an iteration for every thread, where one of the loops has",
            &["parallel", "tiles", "tile_m", "tile_n"],
            move |v| {
                let outer = if v[1].text() == "ir-jr" { ceil_div(m, v[2].int()) } else { ceil_div(n, v[3].int()) };
                let iterations = if v[0].text() == "b" { batch } else { outer };
                iterations >= m.max(n).max(batch).min(n_threads)
            },
        ));
    }
    constraints
}

/// Tiles at the rate of their multiply-adds and loads, or of the factor that passes by for each tile of the other.
fn estimate(s: &Setting, p: &Product, space: &Space, config: &Config) -> f64 {
    let int = |name: &str| space.int(config, name);
    let row = p.k as f64 * s.workload.dtype.bytes() as f64;
    let steps = ceil_div(p.k, s.target.lanes(s.workload.dtype)) as f64;
    let rows_outside = space.text(config, "tiles") == "ir-jr";
    let (n_kept, n_passing) = if rows_outside { (p.m, p.n) } else { (p.n, p.m) };
    let mut cycles = n_kept as f64 * row / bandwidth(s, n_kept as f64 * row);
    for (n_m, rows) in cuts(p.m, int("tile_m")) {
        for (n_n, columns) in cuts(p.n, int("tile_n")) {
            let (of_a, of_b) = (rows as f64 * row, columns as f64 * row);
            let (kept, passing) = if rows_outside { (of_a, of_b) } else { (of_b, of_a) };
            let read = kept / bandwidth(s, kept + passing) + passing / bandwidth(s, n_passing as f64 * row + kept);
            let compute = steps * step_cycles(columns, rows) + 20.0 + 6.0 * (rows * columns) as f64;
            cycles += n_m * n_n * (compute.max(read) + 0.2 * compute.min(read));
        }
    }
    cycles * p.batch.unwrap_or(1) as f64
}

fn steps(s: &Setting, p: &Product, space: &Space, config: &Config) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype);
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let (tile_m, tile_n) = (int("tile_m"), int("tile_n"));
    let [outer, inner] = if text("tiles") == "ir-jr" { ["ir", "jr"] } else { ["jr", "ir"] };

    let mut steps = vec![split("k", lanes, "ko", "kl"), rfactor(p.sum, "kl", "P")];
    // The loops over a tile, of the sums and of what finishes them.
    let (rows, columns) = if p.has_epilogue {
        steps.extend([split("oi", tile_m, "ir", "om"), split("oj", tile_n, "jr", "on")]);
        steps.push(reorder(&p.in_batch("ob", &[outer, inner, "om", "on"])));
        steps.push(compute_at(p.sum, inner));
        ("i", "j")
    } else {
        steps.extend([split("i", tile_m, "ir", "im"), split("j", tile_n, "jr", "jm")]);
        steps.push(reorder(&p.in_batch("b", &[outer, inner, "im", "jm", "kl"])));
        ("im", "jm")
    };
    steps.push(compute_at("P", inner));
    steps.push(split("P.ko", int("unroll_k"), "P.k", "P.ki"));
    steps.push(reorder(&["P.k", "P.ki", "P.i", "P.j", "P.kl"]));
    steps.push(accumulate("P", inner, "P.r"));
    steps.push(vectorize("P.kl"));
    steps.extend(["P.ki", "P.i", "P.j"].map(unroll));

    // Sums of neighbours are finished together: their lanes are transposed, then added.
    let along_columns = tile_n >= tile_m;
    let (one, together) = if along_columns { (rows, columns) } else { (columns, rows) };
    steps.extend([reorder(&[one, together, "kl"]), accumulate(p.sum, one, "C.r")]);
    steps.extend([unroll("kl"), vectorize(together)]);
    if p.has_epilogue {
        let [one, together] = if along_columns { ["om", "on"] } else { ["on", "om"] };
        steps.extend([reorder(&[one, together]), vectorize(together)]);
    }
    if s.n_threads > 1 {
        let batch = if p.has_epilogue { "ob" } else { "b" };
        steps.push(parallel(if text("parallel") == "b" { batch } else { outer }));
    }
    steps
}
