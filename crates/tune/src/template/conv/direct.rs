//! Direct convolution: a register tile of output channels and pixels, the reduction inside.

use super::super::step::{
    accumulate, compute_at, fuse, inline, layout, parallel, reorder, split, stage, unroll, vectorize,
};
use super::super::{Setting, Template};
use super::{Shape, ceil_div, is_blocked};
use crate::space::{Config, Constraint, Parameter, Space, SpaceError, Value};
use tilewright_ir::Step;
use tilewright_ir::op::Epilogue;
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};

/// Loops over tiles of channels, rows and columns in any order, each computing one register tile completely.
///
/// The lanes of vectors are output channels, which wants the input's channels next to each other, or pixels of a row,
/// which reads rows as they are. Taps in the padding are left out where the position of the tile decides it.
///
/// # Source
/// The tile and the blocked layouts are those of Georganas et al., "Anatomy of High-Performance Deep Learning
/// Convolutions on SIMD Architectures" (2018), sections II-B and II-C; pixels as lanes are our addition.
pub const CONV_DIRECT: Template = Template {
    name: "conv-direct",
    text: "direct convolution: register tile of channels and pixels, channels or pixels as lanes, blocked layouts",
    operators: &["conv2d", "depthwise_conv2d", "conv2d_transpose"],
    space,
    steps,
};

/// Vectors and broadcast elements of a register tile, from `lanes`, `k_tile`, `p_tile`, `q_tile`.
fn operands(v: &[&Value]) -> (i64, i64) {
    let (k, pixels) = (v[1].int(), v[2].int() * v[3].int());
    if v[0].text() == "k" { (k, pixels) } else { (pixels, k) }
}

fn space(s: &Setting) -> Result<Space, SpaceError> {
    let shape = Shape::of(s);
    let lanes = s.target.lanes(s.workload.dtype);
    let registers = i64::from(s.target.n_vector_registers);
    let Shape { n, k, p, q, c, padded, k_group, .. } = shape;
    let blocked = is_blocked(s);
    // What one tile may cover, in vectors along the lanes and in single elements across them.
    let k_of = move |lanes_of: &str, tile: i64| if lanes_of == "k" { tile * lanes } else { tile };
    let q_of = move |lanes_of: &str, tile: i64| if lanes_of == "q" { tile * lanes } else { tile };
    let depthwise = c.is_none();
    let fits = move |v: &[&Value]| {
        let (vectors, broadcast) = operands(v);
        // A depthwise tile multiplies vectors by vectors or by elements that serve one of them.
        vectors * broadcast + vectors.min(if depthwise { 1 } else { vectors }) < registers
    };
    // Not larger than what there is, but for the last tile.
    let inside = move |v: &[&Value]| {
        let (k_tile, q_tile) = (k_of(v[0].text(), v[1].int()), q_of(v[0].text(), v[3].int()));
        (v[1].int() == 1 || k_tile < k_group + if v[0].text() == "k" { lanes } else { 1 })
            && (v[3].int() == 1 || q_tile < q + if v[0].text() == "q" { lanes } else { 1 })
    };
    let size = |v: &[&Value]| operands(v).0 * operands(v).1;
    let tiles = ["k", "q"].map(|l| {
        let mut most = 1;
        for (kt, pt, qt) in (1..=registers).flat_map(|a| (1..=4).flat_map(move |b| (1..=registers).map(move |c| (a, b, c)))) {
            let v = [Value::Text(l.into()), Value::Int(kt), Value::Int(pt.min(p)), Value::Int(qt)];
            let v: Vec<&Value> = v.iter().collect();
            if fits(&v) && inside(&v) {
                most = most.max(size(&v));
            }
        }
        most
    });
    let channel_blocks = [1, 4, 8, 16, 32, 64, 128].into_iter().filter(|&b| b == 1 || c.is_none_or(|c| b < 2 * c));
    let writes: &[&str] = if blocked { &["tile"] } else { &["tile", "scatter", "row"] };
    let parameters = vec![
        Parameter::categorical("lanes", &["k", "q"]),
        Parameter::ordinal("k_tile", 1..=k.min(registers / 2)),
        Parameter::ordinal("p_tile", 1..=p.min(4)),
        Parameter::ordinal("q_tile", 1..=q.min(registers - 2)),
        Parameter::permutation("order", &["k", "p", "q"]),
        Parameter::ordinal("c_block", channel_blocks),
        Parameter::ordinal("unroll_c", [1, 2, 4]),
        Parameter::categorical("input", if padded || !blocked { &["plain", "packed"] } else { &["plain"] }),
        Parameter::categorical("write", writes),
    ];
    let mut constraints = vec![
        Constraint::new(
            "registers",
            &format!("vectors of a tile + its operands <= {registers}"),
            &["lanes", "k_tile", "p_tile", "q_tile"],
            fits,
        ),
        Constraint::new(
            "inside",
            "a tile is not larger than the output, the last vector aside",
            &["lanes", "k_tile", "p_tile", "q_tile"],
            inside,
        ),
        Constraint::new(
            "large_tile",
            "a tile has half the vectors that fit, so that multiply-adds do not wait for each other",
            &["lanes", "k_tile", "p_tile", "q_tile"],
            move |v| 2 * size(v) >= if v[0].text() == "k" { tiles[0] } else { tiles[1] },
        ),
        Constraint::new(
            "rows_of_narrow_images",
            "several rows in a tile only where a row is at most 2 tiles",
            &["lanes", "p_tile", "q_tile"],
            move |v| v[1].int() == 1 || q <= 2 * q_of(v[0].text(), v[2].int()),
        ),
        Constraint::new(
            "rows_as_they_are",
            "pixels as lanes read rows, not blocks of channels",
            &["lanes", "c_block", "input"],
            move |v| v[0].text() == "k" || (v[1].int() == 1) || (!blocked && v[2].text() == "plain"),
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
            "unrolled_within_block",
            "unroll_c divides c_block",
            &["unroll_c", "c_block"],
            move |v| v[0].int() == 1 || (c.is_some() && v[1].int() % v[0].int() == 0),
        ),
    ];
    if depthwise {
        constraints.push(Constraint::new("no_reduction_over_c", "c_block <= lanes", &["c_block"], move |v| v[0].int() <= lanes));
    }
    if s.n_threads > 1 {
        let needed = s.n_threads as i64;
        let count = move |axis: &str, v: &[&Value]| match axis {
            "k" => ceil_div(k_group, k_of(v[1].text(), v[2].int())) * (k / k_group),
            "p" => ceil_div(p, v[3].int()),
            _ => ceil_div(q, q_of(v[1].text(), v[4].int())),
        };
        let names = ["order", "lanes", "k_tile", "p_tile", "q_tile"];
        // Small problems cannot be cut into enough tiles for every thread.
        let most = n * k_group.max(p).max(q);
        constraints.push(Constraint::new(
            "work_for_all_threads",
            &format!("the outermost tile loop has at least {} iterations", needed.min(most)),
            &names,
            move |v| n * count(&v[0].order()[0], v) >= needed.min(most).min(4),
        ));
    }
    Space::new("conv-direct", parameters, constraints)
}

fn steps(s: &Setting, space: &Space, config: &Config) -> Vec<Step> {
    let shape = Shape::of(s);
    let lanes = s.target.lanes(s.workload.dtype);
    let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
    let blocked = is_blocked(s);
    let by_channels = text("lanes") == "k";
    let (k_tile, q_tile) = if by_channels {
        (int("k_tile") * lanes, int("q_tile"))
    } else {
        (int("k_tile"), int("q_tile") * lanes)
    };
    let (p_tile, c_block) = (int("p_tile"), int("c_block"));
    let order = space.order(config, "order");
    let write = text("write");
    let channels_last = |block: i64| [Whole(0), Outer(1, block), Whole(2), Whole(3), Inner(1, block)];
    let mut steps = Vec::new();

    // Where the input is read from.
    let packed = text("input") == "packed";
    match (shape.padded, packed) {
        (true, false) => steps.push(inline("pad")),
        (true, true) => {
            steps.extend([layout("pad", &channels_last(c_block)), split("pc", c_block, "pco", "pci")]);
            steps.extend(pack("pw", &["pn", "pco", "ph"], "pci", lanes));
        }
        (false, true) => {
            steps.push(stage("X", None, "X.p", &channels_last(c_block)));
            steps.extend(pack("X.p.3", &["X.p.0", "X.p.1", "X.p.2"], "X.p.4", lanes));
        }
        (false, false) => {}
    }
    if blocked {
        if c_block > 1 {
            steps.push(layout("X.in", &channels_last(c_block)));
        }
        if by_channels {
            steps.push(layout("Y.out", &channels_last(lanes)));
            if s.workload.epilogue().contains(&Epilogue::Add) {
                steps.push(layout("R.in", &channels_last(lanes)));
            }
        }
    }

    // Tiles of the output. A row of tiles that is written at once is not cut here.
    let grouped = shape.k_group < shape.k;
    if grouped {
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
    steps.push(compute_at("acc", at));
    let (accumulate_at, column) = if by_row {
        steps.push(split("q", q_tile, "qt", "qr"));
        ("qt", "qr")
    } else {
        (at, "q")
    };

    // The reduction, outermost first: blocks of channels, taps, channels of a block; then the tile.
    let mut nest: Vec<&str> = by_row.then_some("qt").into_iter().collect();
    if shape.c.is_some() {
        steps.extend([split("c", c_block, "co", "cb"), split("cb", int("unroll_c"), "ci", "cu")]);
        nest.extend(["co", "r", "s", "ci", "cu"]);
    } else {
        nest.extend(["r", "s"]);
    }
    if by_channels {
        steps.push(split("k", lanes, "kv", "kl"));
        nest.extend(["p", column, "kv", "kl"]);
    } else {
        steps.push(split(column, lanes, "qv", "ql"));
        nest.extend(["k", "p", "qv", "ql"]);
    }
    steps.push(reorder(&nest));

    // Weights in the order of their use.
    let (k_axis, c_axis) = if s.workload.operator().name == "conv2d_transpose" { (1, 0) } else { (0, 1) };
    match shape.c {
        Some(_) if shape.k_group % k_tile == 0 || !grouped => steps.push(stage(
            "W",
            None,
            "W.p",
            &[
                Outer(k_axis, k_tile),
                Outer(c_axis, c_block),
                Whole(2),
                Whole(3),
                Inner(c_axis, c_block),
                Inner(k_axis, k_tile),
            ],
        )),
        None if by_channels => {
            steps.push(stage("W", None, "W.p", &[Outer(0, k_tile), Whole(1), Whole(2), Inner(0, k_tile)]));
        }
        _ => {}
    }

    steps.push(accumulate("acc", accumulate_at, "acc.r"));
    if by_channels {
        steps.extend([unroll("p"), unroll(column), unroll("kv"), vectorize("kl")]);
    } else {
        steps.extend([unroll("k"), unroll("p"), unroll("qv"), vectorize("ql")]);
    }
    if shape.c.is_some() {
        steps.push(unroll("cu"));
    }
    // What is padding depends on the tap; it is decided tap by tap where rows or columns of a tile are unrolled.
    if shape.padded && !packed {
        steps.push(unroll("s"));
        if p_tile > 1 {
            steps.push(unroll("r"));
        }
    }

    // The epilogue, over the lanes that its reads and writes have in a row.
    if by_channels {
        steps.push(layout("acc", &[Whole(0), Whole(2), Whole(3), Whole(1)]));
    }
    if write == "scatter" || (blocked && by_channels) {
        steps.extend([split("okr", lanes, "okv", "okl"), reorder(&["opr", row, "okv", "okl"])]);
        steps.extend([unroll("opr"), unroll(row), unroll("okv"), vectorize("okl")]);
    } else {
        steps.extend([split(row, lanes, "oqv", "oql"), split("okr", lanes, "okv", "okl")]);
        steps.push(reorder(&["opr", "okv", "oqv", "okl", "oql"]));
        steps.extend([unroll("okl"), vectorize("oql")]);
    }

    if s.n_threads > 1 {
        if shape.n > 1 {
            steps.extend([fuse("on", outer[1], "threads"), parallel("threads")]);
        } else {
            steps.push(parallel(outer[1]));
        }
        match (packed, shape.padded) {
            (true, true) => steps.push(parallel("pco")),
            (true, false) => steps.push(parallel("X.p.1")),
            (false, _) => {}
        }
    }
    steps
}

/// Copies rows of `column` into blocks of channels `channel`, a vector of pixels of every channel at a time.
pub(super) fn pack(column: &str, outer: &[&str], channel: &str, lanes: i64) -> Vec<Step> {
    let (vectors, lane) = (format!("{column}.v"), format!("{column}.l"));
    vec![
        split(column, lanes, &vectors, &lane),
        reorder(&[outer, &[&vectors, channel, &lane]].concat()),
        unroll(channel),
        vectorize(&lane),
    ]
}
