//! Direct convolution: a register tile of output channels and pixels, the reduction inside.

use super::super::Setting;
use super::super::model::{bandwidth, cost_of_dot4, cuts, step_cycles, write_back};
use super::super::share::{self, EACH_PART, PART, PARTS, Share};
use super::super::step::{
    accumulate, compute_at, fuse, inline, layout, parallel, peel, reorder, split, stage, stage_as, tensorize, unroll,
    vectorize,
};
use super::{Algorithm, Shape, ceil_div, in_blocks, is_blocked};
use tilewright_ir::dot::STEPS;
use tilewright_ir::op::Window;
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_ir::{DType, Step, Tensor};
use tilewright_search::{Config, Constraint, Parameter, Space, Value};

/// Loops over tiles of channels, rows and columns in any order, each computing one register tile completely.
///
/// The lanes of vectors are output channels, which wants the input's channels next to each other, or
/// pixels of a row, which reads rows as they are. Taps in the padding are left out where the position of
/// the tile decides it.
///
/// # Source
/// The tile and the blocked layouts are those of Georganas et al., "Anatomy of High-Performance Deep Learning
/// Convolutions on SIMD Architectures" (2018), sections II-B and II-C; pixels as lanes are our addition.
pub const DIRECT: Algorithm<Shape> =
    Algorithm { name: "direct", applies: |_| true, parameters, constraints, steps, estimate };

/// Constant weights from which on copying them one by one takes longer than compiling code that copies
/// vectors.
const MANY_WEIGHTS: i64 = 1 << 18;
/// Most taps of a filter that are copied together.
const MOST_TAPS: i64 = 16;

/// Most multiply-adds of unrolled code for each vector register. Beyond, compiling takes several times as
/// long and no kernel was among the fastest.
const MOST_UNROLLED: i64 = 24;
/// Most multiply-adds of unrolled code for each vector register where channels are not unrolled but padding
/// is decided tap by tap.
const MOST_FORCED: i64 = 40;
/// Vectors that a row of pixels fills at least to be worth having them as lanes: masks at its ends cost time,
/// and code for each version of a tile.
const ROW_VECTORS: i64 = 3;

/// Whether channels of a tile are padded as their turn comes, so that they stay in a cache.
fn pads_by_tile(s: &Setting, shape: &Shape, space: &Space, config: &Config) -> bool {
    let is_outermost = space.order(config, "order")[0] == "k";
    in_rows(s, shape) && shape.padded && is_outermost && Share::of(s, space, config) == Share::Nothing
}

/// Bytes of a vector that copies blocks of channels.
const LINE_BYTES: i64 = 64;

/// Dot products of neighbouring channels that take the sums, where the machine's kernels have them. The
/// channels of groups then fill vectors of results and what a dot product takes.
fn dot(s: &Setting, shape: &Shape) -> Option<Tensor> {
    let agreed = s.workload.layout().channels()[0];
    let fills = |c: i64| {
        shape.k_group % s.target.lanes(s.workload.dtype) == 0 && c % STEPS == 0 && (agreed == 1 || c % agreed == 0)
    };
    let how = match s.workload.dtype {
        _ if copied(s, shape) == Some(DType::I16) => Tensor::Dot2,
        _ if shape.has_integers => Tensor::Dot4,
        _ if shape.rounds => Tensor::Dot2,
        _ if s.workload.multiplies_bf16() && s.target.prefers_dot2() => Tensor::Dot2,
        _ => return None,
    };
    shape.c.is_some_and(|c| shape.k_group == shape.k || fills(c)).then_some(how)
}

/// Steps of the sum that one multiply-add of vectors takes.
fn steps_at_once(s: &Setting, shape: &Shape) -> i64 {
    dot(s, shape).and_then(Tensor::dot_steps).unwrap_or(1)
}

/// Element type of the copies that factors are read from, where it is another one.
fn copied(s: &Setting, shape: &Shape) -> Option<DType> {
    match shape.c {
        _ if shape.rounds => Some(DType::Bf16),
        Some(_) if shape.has_integers && s.target.widens_bytes() => Some(DType::I16),
        _ => None,
    }
}

/// Most columns of a filter whose dot products are unrolled.
const MOST_COLUMNS: i64 = 8;

/// Whether sums of integers of a depthwise convolution are taken by dot products of rows of the filter. Rows
/// of a column of the image are interleaved once for all the results that it enters.
fn in_rows(s: &Setting, shape: &Shape) -> bool {
    let [takes_blocks, gives_blocks] = in_blocks(s);
    let has_rows = shape.has_integers && shape.c.is_none() && shape.r > 1 && shape.s <= MOST_COLUMNS;
    has_rows && shape.channels == shape.k && !shape.transposed && !shape.has_prologue && takes_blocks && gives_blocks
}

/// Columns of the input that `q_tile` neighbouring results read, of a filter of `columns`.
fn columns_read(q_tile: i64, stride: i64, columns: i64) -> i64 {
    ((q_tile - 1) * stride + columns).min(q_tile * columns)
}

/// Whether channels of the input that groups see are whole blocks.
fn divides_groups(shape: &Shape, block: i64) -> bool {
    shape.k_group == shape.k || shape.c.is_some_and(|c| c % block == 0)
}

/// Whether the code of tiles decides which taps are padding: where the input is read as it is.
fn decides_padding(s: &Setting, shape: &Shape) -> bool {
    shape.padded && !shape.has_prologue && dot(s, shape).is_none() && !in_rows(s, shape)
}

/// Vectors and broadcast elements of a register tile, from `lanes`, `k_tile`, `p_tile`, `q_tile`.
fn operands(v: &[&Value]) -> (i64, i64) {
    let (k, pixels) = (v[1].int(), v[2].int() * v[3].int());
    if v[0].text() == "k" { (k, pixels) } else { (pixels, k) }
}

fn parameters(s: &Setting, shape: &Shape) -> Vec<Parameter> {
    let registers = i64::from(s.target.n_vector_registers);
    let Shape { k, p, q, c, padded, has_prologue, .. } = *shape;
    let [takes_blocks, gives_blocks] = in_blocks(s);
    let agreed = s.workload.layout().channels()[0];
    let (fours, rows) = (dot(s, shape).is_some(), in_rows(s, shape));
    let least = if rows { s.target.lanes(s.workload.dtype) } else { steps_at_once(s, shape) };
    let is_block = |&b: &i64| {
        let fits = if agreed > 1 { b == agreed } else { b == least || c.is_none_or(|c| b < 2 * c) };
        fits && b >= least && (!fours || divides_groups(shape, b))
    };
    // Blocks of two are for what has no more channels.
    let smallest = if least == 2 && c.is_some_and(|c| c <= 2) { 2 } else { 1 };
    let channel_blocks = [smallest, 4, 8, 16, 32, 64, 128].into_iter().filter(is_block);
    let is_packed = has_prologue || copied(s, shape).is_some() || fours && (padded || !takes_blocks) || rows && padded;
    let inputs: &[&str] = match (is_packed, padded || !takes_blocks) {
        (true, _) => &["packed"],
        (false, true) => &["plain", "packed"],
        (false, false) => &["plain"],
    };
    let mut parameters = vec![
        Parameter::categorical("lanes", if fours || rows { &["k"] } else { &["k", "q"] }),
        Parameter::ordinal("k_tile", 1..=k.min(registers / 2)),
        Parameter::ordinal("p_tile", 1..=p.min(4)),
        Parameter::ordinal("q_tile", 1..=q.min(registers - 2)),
        Parameter::permutation("order", &["k", "p", "q"]),
        Parameter::ordinal("c_block", channel_blocks),
        Parameter::ordinal("unroll_c", [1, 2, 4]),
        Parameter::categorical("input", inputs),
        Parameter::categorical("write", if gives_blocks { &["tile"] } else { &["tile", "scatter", "row"] }),
    ];
    if decides_padding(s, shape) {
        parameters.push(Parameter::boolean("unroll_s"));
    }
    parameters.extend(shape.work().parameter(s, cut_sum(s, shape).is_some()));
    parameters
}

/// The loop of the sum of which each thread may take a part, and its extent.
fn cut_sum(s: &Setting, shape: &Shape) -> Option<(&'static str, i64)> {
    if in_rows(s, shape) {
        return None;
    }
    let c = shape.c.unwrap_or(1);
    // Rows of a transposed convolution's filter meet inserted zeros.
    let (cut, extent) = if c >= shape.r || shape.transposed { ("c", c) } else { ("r", shape.r) };
    (extent >= s.n_threads as i64).then_some((cut, extent))
}

/// The loops over channels, rows and columns of the result, then over channels, rows and columns of the
/// filter, of the stage that sums or, where a loop of the sum is cut, of the parts.
fn loops(cut: Option<&str>) -> [&'static str; 6] {
    match cut {
        None => ["k", "p", "q", "c", "r", "s"],
        Some("c") => ["S.k", "S.p", "S.q", "S.in_part", "S.r", "S.s"],
        Some(_) => ["S.k", "S.p", "S.q", "S.c", "S.in_part", "S.s"],
    }
}

/// Number of elements of a tile size, which counts vectors where it is of lanes.
fn elements(tile: i64, is_lanes: bool, lanes: i64) -> i64 {
    if is_lanes { tile * lanes } else { tile }
}

fn constraints(s: &Setting, shape: &Shape) -> Vec<Constraint> {
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    let Shape { n, k, p, q, c, r, s: columns, k_group, .. } = *shape;
    let (decides_padding, rows) = (decides_padding(s, shape), in_rows(s, shape));
    let (fours, at_once) = (dot(s, shape).is_some(), steps_at_once(s, shape));
    let [agreed, agreed_result] = s.workload.layout().channels();
    let takes_blocks = in_blocks(s)[0];
    let depthwise = c.is_none();
    let [_, stride] = shape.stride;
    let fits = move |v: &[&Value]| {
        let (vectors, broadcast) = operands(v);
        if rows {
            // Sums and columns stay in registers beside weights and the order of interleaved rows.
            let read = v[2].int() * columns_read(v[3].int(), stride, columns);
            return vectors * (broadcast + read) + 2 <= registers;
        }
        // A depthwise tile multiplies vectors by vectors or by elements that serve one of them.
        vectors * broadcast + if depthwise { 1 } else { vectors } < registers
    };
    // Not larger than what there is, but for the last vector.
    let inside = move |v: &[&Value]| {
        let by_channels = v[0].text() == "k";
        let (k_tile, q_tile) = (elements(v[1].int(), by_channels, lanes), elements(v[3].int(), !by_channels, lanes));
        let (k_lanes, q_lanes) = if by_channels { (lanes, 1) } else { (1, lanes) };
        k_tile < k_group + k_lanes && q_tile < q + q_lanes
    };
    let size = |v: &[&Value]| operands(v).0 * operands(v).1;
    let largest = ["k", "q"].map(|lanes_of| {
        let tiles = (1..=k.min(registers / 2))
            .flat_map(|kt| (1..=p.min(4)).flat_map(move |pt| (1..=q.min(registers - 2)).map(move |qt| [kt, pt, qt])));
        let sizes = tiles.filter_map(|tile| {
            let values = [Value::Text(lanes_of.into()), Value::Int(tile[0]), Value::Int(tile[1]), Value::Int(tile[2])];
            let values: Vec<&Value> = values.iter().collect();
            (fits(&values) && inside(&values)).then(|| size(&values))
        });
        sizes.max().unwrap_or(1)
    });
    let tile = ["lanes", "k_tile", "p_tile", "q_tile"];
    let mut constraints = vec![
        Constraint::new("registers", &format!("vectors of a tile and its operands <= {registers}"), &tile, fits),
        Constraint::new("inside", "a tile is not larger than the output, the last vector aside", &tile, inside),
        Constraint::new(
            "large_tile",
            "a tile has at least half the vectors that fit, so that multiply-adds do not wait for each other",
            &tile,
            move |v| 2 * size(v) >= if v[0].text() == "k" { largest[0] } else { largest[1] },
        ),
        Constraint::new(
            "rows_of_narrow_images",
            "several rows in a tile only where a row is at most 2 tiles",
            &["lanes", "p_tile", "q_tile"],
            move |v| v[1].int() == 1 || q <= 2 * elements(v[2].int(), v[0].text() == "q", lanes),
        ),
        Constraint::new(
            "rows_as_they_are",
            "pixels as lanes read rows, not blocks of channels",
            &["lanes", "c_block", "input"],
            move |v| v[0].text() == "k" || v[1].int() == 1 || (!takes_blocks && v[2].text() == "plain"),
        ),
        Constraint::new(
            "short_rows",
            &format!("pixels are lanes only where a row fills {ROW_VECTORS} vectors or channels fill none"),
            &["lanes"],
            move |v| depthwise || v[0].text() == "k" || q >= ROW_VECTORS * lanes || k_group < lanes,
        ),
        Constraint::new(
            "row_of_tiles",
            "a row of tiles is written at once only where channels are lanes and q is the innermost tile loop",
            &["write", "lanes", "order"],
            |v| v[0].text() != "row" || v[1].text() == "k" && v[2].order().last().is_some_and(|l| l == "q"),
        ),
        Constraint::new(
            "scatter_of_channels",
            "channels are scattered only where they are lanes",
            &["write", "lanes"],
            |v| v[0].text() != "scatter" || v[1].text() == "k",
        ),
        Constraint::new(
            "code_size",
            &format!(
                "multiply-adds that are unrolled, in all versions of a tile, <= {}; where only padding unrolls them, <= {}",
                MOST_UNROLLED * registers,
                MOST_FORCED * registers
            ),
            if decides_padding {
                &["lanes", "k_tile", "p_tile", "q_tile", "unroll_c", "input", "unroll_s"]
            } else {
                &["lanes", "k_tile", "p_tile", "q_tile", "unroll_c"]
            },
            move |v| {
                // Tiles at either border of the image, those between and a smaller last one have
                // code of their own.
                let versions = |n: i64, tile: i64| ceil_div(n, tile).min(3) + i64::from(n % tile != 0 && n > 3 * tile);
                let taps = match v.get(5..7) {
                    Some([input, unroll_s]) if input.text() == "plain" => {
                        let (p_tile, q_tile) = (v[2].int(), elements(v[3].int(), v[0].text() == "q", lanes));
                        let columns = if unroll_s.text() == "true" { columns } else { 1 };
                        columns * versions(q, q_tile) * if p_tile > 1 { r * versions(p, p_tile) } else { 1 }
                    }
                    _ => 1,
                };
                let most = if v[4].int() == 1 { MOST_FORCED } else { MOST_UNROLLED } * registers;
                v[4].int() * taps == 1 || size(v) * v[4].int() * taps <= most
            },
        ),
        Constraint::new("unrolled_within_block", "unroll_c divides c_block", &["unroll_c", "c_block"], move |v| {
            v[1].int() % (v[0].int() * at_once) == 0
        }),
    ];
    if fours && k_group < k {
        constraints.push(Constraint::new(
            "tiles_of_groups",
            "vectors of a tile divide the channels of a group",
            &["k_tile"],
            move |v| k_group % (v[0].int() * lanes) == 0,
        ));
    }
    if agreed_result > 1 {
        constraints.push(Constraint::new(
            "blocks_of_result",
            "channels are lanes where the result has blocks of them",
            &["lanes"],
            |v| v[0].text() == "k",
        ));
    }
    if depthwise {
        constraints.push(Constraint::new(
            "channels_are_not_reduced",
            "c_block is 1 or the lanes of a vector, unroll_c is 1",
            &["c_block", "unroll_c"],
            move |v| [1, lanes, agreed].contains(&v[0].int()) && v[1].int() == 1,
        ));
    }
    if s.n_threads > 1 {
        let count = move |axis: &str, v: &[&Value]| {
            let by_channels = v[1].text() == "k";
            match axis {
                "k" => ceil_div(k_group, elements(v[2].int(), by_channels, lanes)) * (k / k_group),
                "p" => ceil_div(p, v[3].int()),
                _ => ceil_div(q, elements(v[4].int(), !by_channels, lanes)),
            }
        };
        // Small problems cannot be cut into enough tiles for every thread.
        let needed = (s.n_threads as i64).min(n * ceil_div(k_group, lanes).max(p));
        let work_for_all_threads = Constraint::new(
            "work_for_all_threads",
            &format!("the outermost tile loop has at least {needed} iterations"),
            &["order", "lanes", "k_tile", "p_tile", "q_tile"],
            move |v| n * count(&v[0].order()[0], v) >= needed,
        );
        constraints.push(shape.work().of_result(s, work_for_all_threads));
        if let (Some((cut, extent)), true) = (cut_sum(s, shape), shape.work().has_long_sum(s)) {
            constraints.extend(["row", "scatter"].map(|write| Share::Sum.excludes("write", write)));
            let setting = s.clone();
            let blocks_for_all_threads = Constraint::new(
                "blocks_for_all_threads",
                "blocks of channels can be shared out",
                &["c_block"],
                move |v| {
                    cut != "c"
                        || ceil_div(extent, share::part_of(&setting, extent, v[0].int())) >= setting.n_threads as i64
                },
            );
            constraints.push(Share::Sum.only(blocks_for_all_threads));
        }
    }
    constraints
}

fn steps(s: &Setting, shape: &Shape, space: &Space, config: &Config) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype);
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let by_channels = text("lanes") == "k";
    let (k_tile, q_tile) =
        if by_channels { (int("k_tile") * lanes, int("q_tile")) } else { (int("k_tile"), int("q_tile") * lanes) };
    let (p_tile, c_block) = (int("p_tile"), int("c_block"));
    let groups_fill_tiles = shape.k_group == shape.k || shape.k_group % k_tile == 0;
    let order = space.order(config, "order");
    let write = text("write");
    let share = Share::of(s, space, config);
    let cut = cut_sum(s, shape).filter(|_| share == Share::Sum);
    let (dot, at_once, rows) = (dot(s, shape), steps_at_once(s, shape), in_rows(s, shape));
    let fours = dot.is_some();
    let [k, p, q, c, r, columns] = loops(cut.map(|(cut, _)| cut));
    let sum = if cut.is_some() { PARTS } else { Window::ACC };
    let packs_weights = if shape.c.is_some() { groups_fill_tiles } else { by_channels };
    let mut steps = Vec::new();

    // Where the input is read from.
    let packed = text("input") == "packed";
    let pads_by_tile = pads_by_tile(s, shape, space, config);
    match (shape.padded, packed) {
        (true, false) => steps.push(inline(Window::PAD)),
        (true, true) if pads_by_tile => {}
        (true, true) => {
            let is_long = copied(s, shape) == Some(DType::I16);
            if is_long {
                let axes = Window::channels_last(c_block);
                steps.push(stage_as(Window::PAD, None, "X.p", &axes, copied(s, shape)));
            }
            steps.extend(if fours || rows { pad_blocks(s, shape, c_block) } else { pack_padded(s, shape, c_block) });
            if is_long && shape.channels % c_block == 0 {
                steps.extend(copy_blocks(s, "X.p.3", "X.p.4", "long"));
            } else if is_long {
                steps.extend([split("X.p.4", lanes, "X.p.v", "X.p.l"), vectorize("X.p.l")]);
            }
        }
        (false, true) => {
            let input = if is_blocked(s) { Window::KEPT_INPUT } else { Window::INPUT };
            let blocks = match s.workload.layout().channels()[0] {
                1 => Window::channels_last(c_block),
                _ => [0, 1, 2, 3, 4].map(Whole),
            };
            steps.push(stage_as(input, None, "X.p", &blocks, copied(s, shape)));
            if has_whole_blocks(s, shape, c_block) {
                steps.extend(copy_blocks(s, "X.p.3", "X.p.4", "all"));
            } else {
                steps.extend(pack("X.p.3", "X.p.4", lanes));
            }
        }
        (false, false) => {}
    }
    if is_blocked(s) {
        if c_block > 1 {
            steps.push(layout(Window::KEPT_INPUT, &Window::channels_last(c_block)));
        }
        // A group that ends inside a block of lanes would share it with the next.
        if by_channels && groups_fill_tiles && !shape.interleaved {
            steps.push(layout(Window::KEPT_OUTPUT, &Window::channels_last(lanes)));
            steps.extend(s.workload.kept_operands().iter().map(|kept| layout(kept, &Window::channels_last(lanes))));
        }
    }

    // Tiles of the output. A row of tiles that is written at once is not cut here.
    let grouped = shape.k_group < shape.k;
    if shape.interleaved {
        steps.push(split("ok", shape.k / shape.k_group, "okg", "og"));
    } else if grouped {
        steps.push(split("ok", shape.k_group, "og", "okg"));
    }
    let by_row = write == "row";
    steps.extend([split(if grouped { "okg" } else { "ok" }, k_tile, "okt", "okr"), split("op", p_tile, "opt", "opr")]);
    if !by_row {
        steps.push(split("oq", q_tile, "oqt", "oqr"));
    }
    let tile_loops = order.iter().filter_map(|axis| match axis.as_str() {
        "k" => Some("okt"),
        "p" => Some("opt"),
        _ => (!by_row).then_some("oqt"),
    });
    let outer: Vec<&str> = ["on"].into_iter().chain(grouped.then_some("og")).chain(tile_loops).collect();
    let at = *outer.last().expect("there are tile loops");
    let row = if by_row { "oq" } else { "oqr" };
    steps.push(reorder(&[&outer[..], &["okr", "opr", row]].concat()));

    // The sum of a tile stands in memory of its own, from which the epilogue reads it.
    if let Some((cut, extent)) = cut {
        let part = share::part_of(s, extent, if cut == "c" { c_block } else { 1 });
        let rest: Vec<&str> =
            ["c", "r", "s"].into_iter().filter(|l| *l != cut && (*l != "c" || shape.c.is_some())).collect();
        steps.extend(share::in_parts(Window::ACC, &["n", "k", "p", "q"], cut, &rest, part));
    }
    steps.push(compute_at(Window::ACC, at));
    if pads_by_tile {
        steps.push(compute_at(Window::PAD, "okt"));
        steps.extend(pad_blocks(s, shape, c_block));
    }
    let (accumulate_at, column) = if cut.is_some() {
        steps.push(compute_at(PARTS, at));
        (EACH_PART, q)
    } else if by_row {
        steps.push(split("q", q_tile, "qt", "qr"));
        ("qt", "qr")
    } else {
        (at, "q")
    };

    // The reduction, outermost first: blocks of channels, taps, channels of a block; then the tile.
    let mut nest: Vec<&str> = by_row.then_some("qt").into_iter().collect();
    if shape.c.is_some() {
        steps.push(split(c, c_block, "co", "cb"));
        nest.extend(["co", r, columns, "ci", "cu"]);
        if fours {
            steps.extend([split("cb", int("unroll_c") * at_once, "ci", "cr"), split("cr", at_once, "cu", "kk")]);
            nest.push("kk");
        } else {
            steps.push(split("cb", int("unroll_c"), "ci", "cu"));
        }
    } else if rows {
        steps.push(split(r, STEPS, "ro", "kk"));
        nest.extend(["ro", columns, "kk"]);
    } else {
        nest.extend([r, columns]);
    }
    if by_channels {
        steps.push(split(k, lanes, "kv", "kl"));
        nest.extend([p, column, "kv", "kl"]);
    } else {
        steps.push(split(column, lanes, "qv", "ql"));
        nest.extend([k, p, "qv", "ql"]);
    }
    steps.push(reorder(&nest));

    // Weights in the order of their use.
    let [k_axis, c_axis] = shape.weight_axes;
    match shape.c {
        Some(_) if fours => {
            let [outer, inner] =
                [(k_axis, k_tile), (c_axis, at_once)].map(|(axis, n)| (Outer(axis, n), Inner(axis, n)));
            let axes = [outer.0, inner.0, Whole(2), Whole(3), outer.1, inner.1];
            steps.push(stage_as(Window::WEIGHTS, None, "W.p", &axes, copied(s, shape)));
        }
        Some(_) if packs_weights => {
            let axes = [
                Outer(k_axis, k_tile),
                Outer(c_axis, c_block),
                Whole(2),
                Whole(3),
                Inner(c_axis, c_block),
                Inner(k_axis, k_tile),
            ];
            steps.push(stage(Window::WEIGHTS, None, "W.p", &axes));
            // Taps that lie next to each other are transposed together, where the time for it matters.
            let is_large = shape.k * shape.c.unwrap_or(1) * shape.r * shape.s >= MANY_WEIGHTS;
            if k_axis == 0 && k_tile > 1 && shape.s > 1 && (!s.workload.is_constant(Window::WEIGHTS) || is_large) {
                steps.extend([
                    split("W.p.5", lanes, "W.p.v", "W.p.l"),
                    reorder(&["W.p.0", "W.p.1", "W.p.4", "W.p.v", "W.p.2", "W.p.3", "W.p.l"]),
                    unroll("W.p.3"),
                    vectorize("W.p.l"),
                ]);
                if shape.r * shape.s <= MOST_TAPS {
                    steps.push(unroll("W.p.2"));
                }
            }
        }
        None if rows => {
            let axes = [Outer(0, k_tile), Outer(1, STEPS), Whole(2), Inner(0, k_tile), Inner(1, STEPS)];
            steps.push(stage(Window::WEIGHTS, None, "W.p", &axes));
        }
        None if packs_weights => {
            steps.push(stage(Window::WEIGHTS, None, "W.p", &[Outer(0, k_tile), Whole(1), Whole(2), Inner(0, k_tile)]));
        }
        _ => {}
    }

    steps.push(accumulate(sum, accumulate_at, "acc.r"));
    if by_channels {
        steps.extend([unroll(p), unroll(column), unroll("kv"), vectorize("kl")]);
    } else {
        steps.extend([unroll(k), unroll(p), unroll("qv"), vectorize("ql")]);
    }
    if shape.c.is_some() {
        steps.push(unroll("cu"));
    }
    if rows {
        steps.push(unroll(columns));
        // Each dot product then knows how many rows it sums.
        if shape.r > STEPS && shape.r % STEPS != 0 {
            steps.push(unroll("ro"));
        }
    }
    steps.extend(dot.or(rows.then_some(Tensor::Dot4)).map(|how| tensorize("kk", how)));
    // What is padding depends on the tap; it is decided tap by tap where rows or columns of a
    // tile are unrolled.
    if shape.padded && !packed {
        if space.flag(config, "unroll_s") {
            steps.push(unroll(columns));
        }
        if p_tile > 1 {
            steps.push(unroll(r));
        }
    }
    if cut.is_some() {
        let (along, others) = if by_channels { ("k", ["p", "q"]) } else { ("q", ["k", "p"]) };
        steps.push(split(along, lanes, "total.v", "total.l"));
        steps.push(reorder(&[others[0], others[1], "total.v", PART, "total.l"]));
        steps.extend([accumulate(Window::ACC, "total.v", "total"), vectorize("total.l")]);
        let (order, last) = if by_channels { ([0, 1, 3, 4, 2], k_tile) } else { ([0, 1, 2, 3, 4], q_tile) };
        steps.push(share::on_own_lines(s, &order, 4, last, 1));
    }

    // The epilogue, over the lanes that its reads and writes have in a row.
    if by_channels {
        steps.push(layout(Window::ACC, &[Whole(0), Whole(2), Whole(3), Whole(1)]));
    }
    if write == "scatter" || (in_blocks(s)[1] && by_channels && groups_fill_tiles) {
        steps.extend([split("okr", lanes, "okv", "okl"), reorder(&["opr", row, "okv", "okl"])]);
        steps.extend([unroll("okv"), vectorize("okl")]);
        // Lanes that are stored one by one make long code, which is no faster for being repeated.
        if write != "scatter" {
            steps.extend([unroll("opr"), unroll(row)]);
        }
    } else {
        steps.extend([split(row, lanes, "oqv", "oql"), split("okr", lanes, "okv", "okl")]);
        steps.push(reorder(&["opr", "okv", "oqv", "oql", "okl"]));
        steps.extend([unroll("okl"), vectorize("oql")]);
    }

    if share != Share::Nothing {
        if cut.is_some() {
            steps.push(parallel(EACH_PART));
            if packs_weights && !s.workload.is_constant(Window::WEIGHTS) {
                steps.extend([fuse("W.p.0", "W.p.1", "W.p.kc"), parallel("W.p.kc")]);
            }
        } else if shape.n > 1 {
            steps.extend([fuse("on", outer[1], "threads"), parallel("threads")]);
        } else {
            steps.push(parallel(outer[1]));
        }
        match (packed, shape.padded) {
            (true, true) => {
                steps.push(parallel("pco"));
                steps.extend((copied(s, shape) == Some(DType::I16)).then(|| parallel("X.p.1")));
            }
            (true, false) => steps.push(parallel("X.p.1")),
            (false, _) => {}
        }
    }
    steps
}

/// Slowdown of pixels as lanes: rows seldom begin and end where vectors do.
const LANES_OF_PIXELS: f64 = 1.12;
/// Cycles of a vector whose elements lie apart.
const APART: f64 = 3.5;
/// Instructions that interleave rows of a column.
const INTERLEAVING: i64 = 3;
/// Cycles of a vector whose elements may be zeros between those of the input.
const BETWEEN_ZEROS: f64 = 8.0;

/// Register tiles at the rate of their multiply-adds and loads, or of the weights and the input that they
/// read from whichever cache holds what the loops around return to; then what copies and stores take.
fn estimate(s: &Setting, shape: &Shape, space: &Space, config: &Config) -> f64 {
    let lanes = s.target.lanes(s.workload.dtype);
    let bytes = copied(s, shape).unwrap_or(s.workload.factors()[0]).bytes() as f64;
    let (fours, at_once, rows) = (dot(s, shape).is_some(), steps_at_once(s, shape), in_rows(s, shape));
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let by_channels = text("lanes") == "k";
    let k_tile = elements(int("k_tile"), by_channels, lanes);
    let q_tile = elements(int("q_tile"), !by_channels, lanes);
    let Shape { n, k, p, q, c, r, s: columns, stride, k_group, .. } = *shape;
    let taps = (r * columns) as f64;
    let steps = c.unwrap_or(1) as f64 * taps;
    let channels = c.map_or(k_group, |c| c) as f64;
    let order = space.order(config, "order");
    let (inner, outer) = (order[2].as_str(), order[0].as_str());
    let image = channels * (p * stride[0] * q * stride[1]) as f64 * bytes;
    let row = image / p as f64;
    let weights = k_group as f64 * steps * bytes;
    let neighbours = text("input") != "plain" && int("c_block") % lanes == 0;
    let [takes_blocks, gives_blocks] = in_blocks(s);
    let gathers = c.is_none() && by_channels && !neighbours && !takes_blocks;
    // Lanes that are pixels load what lies strides apart, or zeros in between.
    let apart = match (by_channels, shape.transposed) {
        (true, _) => 0.0,
        (false, true) => BETWEEN_ZEROS,
        (false, false) => {
            if stride[1] > 1 && text("input") == "plain" {
                APART
            } else {
                0.0
            }
        }
    };
    // Where unrolled code knows which taps of a transposed convolution meet zeros, it has none of them.
    let known = shape.transposed && by_channels && text("input") == "plain" && text("unroll_s") == "true";
    let met = if known { 1.0 / shape.axes.iter().map(|axis| axis.stride as f64).product::<f64>() } else { 1.0 };

    let mut cycles = 0.0;
    for (n_k, kt) in cuts(k_group, k_tile) {
        for (n_p, pt) in cuts(p, int("p_tile")) {
            for (n_q, qt) in cuts(q, q_tile) {
                let (vectors, broadcast) = match by_channels {
                    true => (ceil_div(kt, lanes), pt * qt),
                    false => (pt * ceil_div(qt, lanes), kt),
                };
                let slice = kt as f64 * steps * bytes;
                // Where channels do not mix, a tile reads its own alone.
                let read_channels = if c.is_none() { kt as f64 } else { channels };
                let patch =
                    ((pt - 1) * stride[0] + r) as f64 * ((qt - 1) * stride[1] + columns) as f64 * read_channels * bytes;
                // Weights stay where tiles of the image are the innermost loop; else all come by
                // again and again.
                let weights_from = if inner == "k" { weights + patch } else { slice + patch };
                let input_from = match (inner, outer) {
                    ("k", _) => patch,
                    (_, "k") => image + slice,
                    _ => row * r as f64 + weights,
                };
                let read = slice / bandwidth(s, weights_from) + patch / taps.sqrt() / bandwidth(s, input_from);
                // Where channels do not mix, every product reads an element of its own: lanes over channels
                // gather them from plane after plane.
                let gathered = if gathers { (vectors * broadcast * lanes) as f64 } else { 0.0 };
                let loads = if c.is_none() { vectors * broadcast } else { vectors } as f64;
                let step = step_cycles(s, vectors, broadcast) + gathered + apart * loads;
                let n_steps = ceil_div(c.unwrap_or(1), at_once) as f64 * taps;
                let compute = if rows {
                    let read = pt * columns_read(qt, stride[1], columns);
                    let dots = (broadcast * columns) as f64 * cost_of_dot4(s);
                    let instructions = (vectors * ceil_div(r, STEPS)) as f64 * (dots + (INTERLEAVING * read) as f64);
                    instructions / s.target.core().fmas + 10.0
                } else {
                    met * n_steps * step * if by_channels { 1.0 } else { LANES_OF_PIXELS } + 3.0 * taps + 20.0
                };
                cycles += n_k * n_p * n_q * (compute.max(read) + 0.2 * compute.min(read));
            }
        }
    }
    cycles *= (n * (k / k_group)) as f64;
    let results = (n * k * p * q) as f64;
    cycles += results
        * match (text("write").as_str(), by_channels && !gives_blocks) {
            ("scatter", _) => 1.5,
            ("tile", true) => {
                if q_tile < lanes {
                    2.0
                } else {
                    0.8
                }
            }
            ("row", _) => 0.6,
            _ => 2.0 / lanes as f64,
        };
    cycles += write_back(s, results * bytes);
    if text("input") == "packed" {
        // Rows of blocks of integers are copied as runs of bytes.
        let rate = match (fours || rows) && in_blocks(s)[0] {
            true if pads_by_tile(s, shape, space, config) => 1.0 / bandwidth(s, image),
            true => 2.0 / bandwidth(s, image),
            false => 0.6,
        };
        cycles += n as f64 * image / bytes * rate;
    }
    let count = |axis: &str| match axis {
        "k" => ceil_div(k_group, k_tile) * (k / k_group),
        "p" => ceil_div(p, int("p_tile")),
        _ => ceil_div(q, q_tile),
    };
    let n_tiles = n * ["k", "p", "q"].map(count).iter().product::<i64>();
    shape.work().of_busiest_thread(s, Share::of(s, space, config), cycles, n * count(outer), n_tiles)
}

/// Copies the stage `pad` into blocks of channels, its borders apart, so that in the middle
/// nothing is padding.
pub(super) fn pack_padded(s: &Setting, shape: &Shape, c_block: i64) -> Vec<Step> {
    let lanes = s.target.lanes(s.workload.dtype);
    let mut steps = vec![
        layout(Window::PAD, &Window::channels_last(c_block)),
        split("pc", c_block, "pco", "pci"),
        reorder(&["pn", "pco", "ph", "pw", "pci"]),
    ];
    // The zeros that a transposed convolution inserts leave no middle without padding.
    if !shape.transposed {
        for (axis, n, last, border) in borders(shape) {
            if n > 0 {
                steps.push(peel(axis, n, last, border));
                let (row, other) = if c_block > 1 { ("pci", "pw") } else { ("pw", "pci") };
                let [other, row, vectors, lane] =
                    [(other, ""), (row, ""), (row, ".v"), (row, ".l")].map(|(l, end)| format!("{l}.{border}{end}"));
                steps.push(split(&row, lanes, &vectors, &lane));
                steps.extend([reorder(&[&other, &vectors, &lane]), vectorize(&lane)]);
            }
        }
    }
    if s.workload.layout().channels()[0] > 1 {
        // Channels lie next to each other on both sides.
        steps.extend([split("pci", lanes, "pci.v", "pci.l"), vectorize("pci.l")]);
    } else {
        steps.extend(pack("pw", "pci", lanes));
    }
    steps
}

/// Copies the stage `pad` of what dot products take into blocks of channels: rows of pixels as they are where
/// the input has such blocks, its borders apart.
fn pad_blocks(s: &Setting, shape: &Shape, c_block: i64) -> Vec<Step> {
    if !has_whole_blocks(s, shape, c_block) {
        return pack_padded(s, shape, c_block);
    }
    let mut steps = vec![
        layout(Window::PAD, &Window::channels_last(c_block)),
        split("pc", c_block, "pco", "pci"),
        reorder(&["pn", "pco", "ph", "pw", "pci"]),
    ];
    for (axis, n, last, border) in borders(shape) {
        if n > 0 {
            steps.push(peel(axis, n, last, border));
            steps.extend(copy_blocks(s, &format!("pw.{border}"), &format!("pci.{border}"), border));
        }
    }
    steps.extend(copy_blocks(s, "pw", "pci", "all"));
    steps
}

/// Whether the input has channels in blocks, all of them full.
fn has_whole_blocks(s: &Setting, shape: &Shape, c_block: i64) -> bool {
    in_blocks(s)[0] && c_block > 1 && shape.channels % c_block == 0
}

/// Copies the blocks of a row of pixels as one run of elements.
fn copy_blocks(s: &Setting, column: &str, channel: &str, name: &str) -> [Step; 3] {
    let [run, vectors, lane] = ["run", "v", "l"].map(|end| format!("p.{name}.{end}"));
    let n = LINE_BYTES / s.workload.factors()[0].bytes() as i64;
    [fuse(column, channel, &run), split(&run, n, &vectors, &lane), vectorize(&lane)]
}

/// Borders of the stage `pad`: the axis, elements, whether they are its last ones, and a name.
fn borders(shape: &Shape) -> [(&'static str, i64, bool, &'static str); 4] {
    let [rows, columns] = &shape.axes;
    [
        ("ph", rows.before, false, "top"),
        ("ph", rows.after, true, "bottom"),
        ("pw", columns.before, false, "left"),
        ("pw", columns.after, true, "right"),
    ]
}

/// Copies a row of pixels into a block of channels, a vector of pixels of several channels at a time.
pub(super) fn pack(column: &str, channel: &str, lanes: i64) -> Vec<Step> {
    // As many as there are pixels, which are transposed at once: more would be more code, not more speed.
    let [vectors, lane] = ["v", "l"].map(|end| format!("{column}.{end}"));
    let [groups, of_group] = ["g", "c"].map(|end| format!("{channel}.{end}"));
    vec![
        split(column, lanes, &vectors, &lane),
        split(channel, lanes, &groups, &of_group),
        reorder(&[&vectors, &groups, &lane, &of_group]),
        unroll(&of_group),
        vectorize(&lane),
    ]
}
