//! Constraints of the space, as expressions.

use super::super::super::share::SharedWork;
use super::super::super::{TemplateSetting, constraint_over as over, has_value, named, none_of};
use super::super::{ReductionSizes, ceil_div, in_blocks};
use super::{columns_read_text, constants, cut_sum, decides_padding, dot, in_rows, steps_at_once};
use tilewright_search::{Constraint, Domain, Parameter, Value};

/// Maximum number of unrolled multiply-adds per vector register. Beyond it, compilation takes several times
/// as long, and no kernel was among the fastest.
const MOST_UNROLLED: i64 = 24;
/// Maximum number of unrolled multiply-adds per vector register if channels are not unrolled but padding is
/// decided tap by tap.
const MOST_FORCED: i64 = 40;
/// Minimum number of vectors in a row of pixels for pixels to be lanes: masks at its ends cost time, and code
/// for each version of a tile.
const ROW_VECTORS: i64 = 3;

/// Vectors of a register tile, as an expression.
const VECTORS: &str = "(k_tile if lanes == 'k' else p_tile * q_tile)";
/// Number of accumulators of a register tile, vectors times broadcast elements, as an expression.
const TILE: &str = "k_tile * p_tile * q_tile";

/// Constraints on the tile, on how it is read and written, on the code, and on threads.
pub(super) fn constraints(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Constraint> {
    let parameters = super::parameters(s, shape);
    let mut constraints = of_tile(s, shape, &parameters);
    constraints.extend(of_lanes(s, shape, &parameters));
    constraints.extend(of_code(s, shape, &parameters));
    constraints.extend(of_channels(s, shape, &parameters));
    if s.n_threads > 1 {
        constraints.extend(of_threads(s, shape, &parameters));
    }
    constraints
}

/// Channels and columns of a tile in elements, as expressions: tile sizes count vectors along the lanes.
fn elements(lanes: i64) -> [String; 2] {
    [
        format!("(k_tile * {lanes} if lanes == 'k' else k_tile)"),
        format!("(q_tile if lanes == 'k' else q_tile * {lanes})"),
    ]
}

/// Constraints on the sizes of a register tile.
fn of_tile(s: &TemplateSetting, shape: &ReductionSizes, parameters: &[Parameter]) -> Vec<Constraint> {
    let (lanes, registers) = (s.target.lanes(s.workload.dtype), s.target.n_vector_registers);
    let ReductionSizes { q, c, s: columns, k_group, stride: [_, stride], .. } = *shape;
    let fits = if in_rows(s, shape) {
        // Sums and columns stay in registers, besides weights and the order of interleaved rows.
        let read = columns_read_text("q_tile", stride, columns);
        format!("k_tile * (p_tile * q_tile + p_tile * {read}) + 2 <= {registers}")
    } else if c.is_none() {
        // A depthwise tile multiplies vectors by vectors or by elements that serve one of them.
        format!("{TILE} + 1 < {registers}")
    } else {
        format!("{TILE} + {VECTORS} < {registers}")
    };
    // Tiles are not larger than the extent, rounded up to whole vectors.
    let [most_k, most_q] = [k_group, q].map(|n| ceil_div(n, lanes));
    let inside =
        format!("k_tile <= {most_k} and q_tile <= {q} if lanes == 'k' else k_tile <= {k_group} and q_tile <= {most_q}");
    let tile = ["lanes", "k_tile", "p_tile", "q_tile"];
    let mut constraints = vec![over("registers", &tile, &fits, parameters), over("inside", &tile, &inside, parameters)];
    // At least half of the vectors that fit, so that multiply-adds do not wait for each other. Integers are
    // rescaled by functions whose constants take registers, too.
    let most = |lanes: &str| largest_tile(&constraints, parameters, lanes) - constants(s);
    let large = match has_value(parameters, "lanes", "q") {
        true => format!("2 * {TILE} >= ({} if lanes == 'k' else {})", most("k"), most("q")),
        false => format!("2 * {TILE} >= {}", most("k")),
    };
    constraints.push(over("large_tile", &tile, &large, parameters));
    constraints
}

/// Largest number of accumulators of a tile that these constraints allow. If they allow a tile, they allow
/// all narrower ones.
fn largest_tile(constraints: &[Constraint], parameters: &[Parameter], lanes: &str) -> i64 {
    let sizes = |name: &str| match &named(parameters, name).domain {
        Domain::Ordinal(sizes) => sizes.clone(),
        _ => panic!("invariant: {name} is a number"),
    };
    let lanes = Value::Text(lanes.into());
    let is_legal = |tile: [i64; 3]| {
        let [k, p, q] = tile.map(Value::Int);
        constraints.iter().all(|c| c.holds(&[&lanes, &k, &p, &q]))
    };
    let [k_sizes, p_sizes, q_sizes] = ["k_tile", "p_tile", "q_tile"].map(sizes);
    let mut largest = 1;
    for &k in &k_sizes {
        for &p in &p_sizes {
            let widest = q_sizes.iter().take_while(|&&q| is_legal([k, p, q])).last();
            largest = largest.max(widest.map_or(1, |q| k * p * q));
        }
    }
    largest
}

/// Constraints on reads and writes of vectors of channels or of pixels.
fn of_lanes(s: &TemplateSetting, shape: &ReductionSizes, parameters: &[Parameter]) -> Vec<Constraint> {
    let lanes = s.target.lanes(s.workload.dtype);
    let ReductionSizes { q, c, k_group, .. } = *shape;
    let [_, columns] = elements(lanes);
    let narrow = format!("p_tile == 1 or {q} <= 2 * {columns}");
    // Pixels as lanes read rows, not blocks of channels.
    let reads_rows = !in_blocks(s)[0] && has_value(parameters, "input", "plain");
    let as_they_are = format!("lanes == 'k' or c_block == 1{}", if reads_rows { " or input == 'plain'" } else { "" });
    // Pixels are lanes only if a row fills vectors or channels fill none.
    let short = match c {
        Some(_) => format!("lanes == 'k' or {q} >= {} or {k_group} < {lanes}", ROW_VECTORS * lanes),
        None => none_of(parameters, "lanes", &[]),
    };
    // A row of tiles is written at once, and channels are scattered, only if channels are lanes.
    let (by_row, scattered) = match has_value(parameters, "write", "row") {
        true => ("write != 'row' or lanes == 'k' and order[2] == 'q'", "write != 'scatter' or lanes == 'k'"),
        false => ("write == 'tile'", "write == 'tile'"),
    };
    vec![
        over("rows_of_narrow_images", &["lanes", "p_tile", "q_tile"], &narrow, parameters),
        over("rows_as_they_are", &["lanes", "c_block", "input"], &as_they_are, parameters),
        over("short_rows", &["lanes"], &short, parameters),
        over("row_of_tiles", &["write", "lanes", "order"], by_row, parameters),
        over("scatter_of_channels", &["write", "lanes"], scattered, parameters),
    ]
}

/// Constraints on the multiply-adds that are unrolled, in all versions of a tile, and on their channels.
fn of_code(s: &TemplateSetting, shape: &ReductionSizes, parameters: &[Parameter]) -> Vec<Constraint> {
    let registers = i64::from(s.target.n_vector_registers);
    let ReductionSizes { p, q, r, s: columns, .. } = *shape;
    let (decides_padding, is_dot) = (decides_padding(s, shape), dot(s, shape).is_some());
    // Tiles at either border of the image, those in between and a smaller last one have separate code.
    let versions = |n: i64, tile: &str| {
        format!("(min(ceil_div({n}, {tile}), 3) + (1 if {n} % {tile} != 0 and {n} > 3 * {tile} else 0))")
    };
    let products = if decides_padding && has_value(parameters, "input", "plain") {
        let [_, q_tile] = elements(s.target.lanes(s.workload.dtype));
        let rows = format!("({r} * {} if p_tile > 1 else 1)", versions(p, "p_tile"));
        let columns = if is_dot { columns.to_string() } else { format!("({columns} if unroll_s else 1)") };
        let taps = format!("{columns} * {} * {rows}", versions(q, &q_tile));
        let is_choice = has_value(parameters, "input", "packed");
        format!("unroll_c * {}", if is_choice { format!("({taps} if input == 'plain' else 1)") } else { taps })
    } else {
        "unroll_c".into()
    };
    let most = format!("({} if unroll_c == 1 else {})", MOST_FORCED * registers, MOST_UNROLLED * registers);
    // A tile that is not repeated has no more products than there are registers.
    let size = format!("{TILE} * {products} <= {most}");
    let within = format!("c_block % (unroll_c * {}) == 0", steps_at_once(s, shape));
    let read = ["lanes", "k_tile", "p_tile", "q_tile", "unroll_c", "input", "unroll_s"];
    let n_read = match (decides_padding, is_dot) {
        (true, false) => read.len(),
        (true, true) => read.len() - 1,
        (false, _) => read.len() - 2,
    };
    vec![
        over("code_size", &read[..n_read], &size, parameters),
        over("unrolled_within_block", &["unroll_c", "c_block"], &within, parameters),
    ]
}

/// Constraints on blocks of channels: groups of them, those of the result, and those that are not summed.
fn of_channels(s: &TemplateSetting, shape: &ReductionSizes, parameters: &[Parameter]) -> Vec<Constraint> {
    let lanes = s.target.lanes(s.workload.dtype);
    let [agreed, agreed_result] = s.workload.layout().channels();
    let mut constraints = Vec::new();
    if dot(s, shape).is_some() && shape.k_group < shape.k {
        let whole = format!("{} % (k_tile * {lanes}) == 0", shape.k_group);
        constraints.push(over("tiles_of_groups", &["k_tile"], &whole, parameters));
    }
    if agreed_result > 1 {
        constraints.push(over("blocks_of_result", &["lanes"], "lanes == 'k'", parameters));
    }
    if shape.c.is_none() {
        let text = format!("c_block in [1, {lanes}, {agreed}] and unroll_c == 1");
        constraints.push(over("channels_are_not_reduced", &["c_block", "unroll_c"], &text, parameters));
    }
    constraints
}

/// Constraints that give every thread work.
fn of_threads(s: &TemplateSetting, shape: &ReductionSizes, parameters: &[Parameter]) -> Vec<Constraint> {
    let lanes = s.target.lanes(s.workload.dtype);
    let ReductionSizes { n, k, p, q, k_group, .. } = *shape;
    let n_threads = s.n_threads as i64;
    // Small problems cannot be cut into enough tiles for every thread.
    let needed = n_threads.min(n * ceil_div(k_group, lanes).max(p));
    let [k_tile, q_tile] = elements(lanes);
    let of_channels = format!("ceil_div({k_group}, {k_tile}) * {} if order[0] == 'k'", k / k_group);
    let of_rows = format!("ceil_div({p}, p_tile) if order[0] == 'p'");
    let iterations = format!("{n} * ({of_channels} else {of_rows} else ceil_div({q}, {q_tile}))");
    let read = ["order", "lanes", "k_tile", "p_tile", "q_tile"];
    let for_all = over("work_for_all_threads", &read, &format!("{iterations} >= {needed}"), parameters);
    let mut constraints = vec![shape.work().of_result(s, for_all)];
    if let (Some((cut, extent)), true) = (cut_sum(s, shape), shape.work().has_long_sum(s)) {
        constraints.extend(["row", "scatter"].map(|write| SharedWork::Sum.excludes(parameters, "write", write)));
        // If threads share the channels, each thread has whole blocks of them.
        let part = format!("ceil_div({}, c_block) * c_block", ceil_div(extent, n_threads));
        let blocks = format!("ceil_div({extent}, {part}) >= {n_threads}");
        let blocks = if cut == "c" { blocks } else { "c_block >= 1".into() };
        constraints.push(SharedWork::Sum.only(over("blocks_for_all_threads", &["c_block"], &blocks, parameters)));
    }
    constraints
}
