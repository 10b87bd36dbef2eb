//! Direct convolution: a register tile of output channels and pixels, the reduction inside.

mod constraints;
mod estimate;
mod pack;
mod steps;

use super::super::TemplateSetting;
use super::super::share::SharedWork;
use super::{Algorithm, ReductionSizes, in_blocks};
use tilewright_ir::dot::STEPS;
use tilewright_ir::op::{Epilogue, Operand};
use tilewright_ir::{DType, TensorProduct};
use tilewright_search::{Config, Parameter, Space};

pub use pack::{pack, pack_padded};

/// Loops over tiles of channels, rows and columns in any order, each computing one register tile completely.
///
/// Vector lanes are output channels, which requires contiguous input channels, or pixels of a row, which
/// reads rows without a copy. Taps in the padding are left out if the position of the tile determines them.
///
/// # Source
/// The tile and the blocked layouts are those of Georganas et al., "Anatomy of High-Performance Deep Learning
/// Convolutions on SIMD Architectures" (2018), sections II-B and II-C; pixels as lanes are our addition.
pub const DIRECT: Algorithm<ReductionSizes> = Algorithm {
    name: "direct",
    applies: |_| true,
    parameters,
    constraints: constraints::constraints,
    steps: steps::steps,
    estimate: estimate::estimate,
};

/// Whether the channels of a tile are padded just before their use, so that they stay in a cache.
fn pads_by_tile(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> bool {
    let is_outermost = space.order(config, "order")[0] == "k";
    in_rows(s, shape) && shape.padded && is_outermost && SharedWork::of(s, space, config) == SharedWork::Nothing
}

/// Dot product instruction over adjacent channels, if the machine's kernels have one. The channels of a group
/// then fill whole vectors of results and whole dot products.
fn dot(s: &TemplateSetting, shape: &ReductionSizes) -> Option<TensorProduct> {
    let agreed = s.workload.layout().channels()[0];
    let fills = |c: i64| {
        shape.k_group % s.target.lanes(s.workload.dtype) == 0 && c % STEPS == 0 && (agreed == 1 || c % agreed == 0)
    };
    let how = match s.workload.dtype {
        _ if s.widens_bytes() => TensorProduct::Dot2,
        _ if shape.has_integers => TensorProduct::Dot4,
        _ if shape.rounds => TensorProduct::Dot2,
        _ if s.workload.multiplies_bf16() && s.target.prefers_dot2() => TensorProduct::Dot2,
        _ => return None,
    };
    shape.c.is_some_and(|c| shape.k_group == shape.k || fills(c)).then_some(how)
}

/// Number of reduction steps of one vector multiply-add.
fn steps_at_once(s: &TemplateSetting, shape: &ReductionSizes) -> i64 {
    dot(s, shape).and_then(TensorProduct::dot_steps).unwrap_or(1)
}

/// Vector registers of the constants with which functions rescale sums of integers, besides the factors of
/// channels. With fewer than 32 registers, sums are spilled either way.
fn constants(s: &TemplateSetting) -> i64 {
    if s.workload.dtype.is_float() || s.target.n_vector_registers < 32 {
        return 0;
    }
    let of = |function: &Epilogue| function.numbers().len() + usize::from(function.operand() == Some(Operand::One));
    s.workload.epilogue().iter().map(of).sum::<usize>() as i64
}

/// Element type of the operands' copies, if it differs from that of the operands.
fn copied(s: &TemplateSetting, shape: &ReductionSizes) -> Option<DType> {
    match shape.c {
        _ if shape.rounds => Some(DType::Bf16),
        Some(_) if s.widens_bytes() => Some(DType::I16),
        Some(_) if s.workload.dtype.is_half() && dot(s, shape).is_none() => Some(DType::F32),
        _ => None,
    }
}

/// Whether copies of the operands have wider elements.
fn widens(s: &TemplateSetting, shape: &ReductionSizes) -> bool {
    matches!(copied(s, shape), Some(DType::I16 | DType::F32))
}

/// Maximum number of columns of a filter whose dot products are unrolled.
const MOST_COLUMNS: i64 = 8;

/// Whether a depthwise convolution of integers uses dot products over rows of the filter, with the channels
/// of a block as vector lanes. Rows of an image column are interleaved once for all results that it
/// contributes to.
fn in_rows(s: &TemplateSetting, shape: &ReductionSizes) -> bool {
    let [takes_blocks, gives_blocks] = in_blocks(s);
    let agreed = s.workload.layout().channels()[0];
    if agreed > 1 && agreed % s.target.lanes(s.workload.dtype) != 0 {
        return false;
    }
    let has_rows = shape.has_integers && shape.c.is_none() && shape.r > 1 && shape.s <= MOST_COLUMNS;
    has_rows && shape.channels == shape.k && !shape.transposed && !shape.has_prologue && takes_blocks && gives_blocks
}

/// Number of input columns that `q_tile` adjacent results read, for a filter of `columns` columns.
fn columns_read(q_tile: i64, stride: i64, columns: i64) -> i64 {
    ((q_tile - 1) * stride + columns).min(q_tile * columns)
}

/// [`columns_read`] as an expression.
fn columns_read_text(q_tile: &str, stride: i64, columns: i64) -> String {
    format!("min(({q_tile} - 1) * {stride} + {columns}, {q_tile} * {columns})")
}

/// Whether the input channels of a group are whole blocks.
fn divides_groups(shape: &ReductionSizes, block: i64) -> bool {
    shape.k_group == shape.k || shape.c.is_some_and(|c| c % block == 0)
}

/// Whether the tile code decides which taps are padding, which it does if the input is not copied.
fn decides_padding(s: &TemplateSetting, shape: &ReductionSizes) -> bool {
    let may_skip = dot(s, shape).is_none() && copied(s, shape).is_none() || skips_padding(s, shape);
    shape.padded && !shape.has_prologue && may_skip && !in_rows(s, shape)
}

/// Whether dot products of integers may leave out taps in the padding, for blocks of channels that are read
/// without a copy. They always do so tap by tap, so that no dot product depends on a condition.
fn skips_padding(s: &TemplateSetting, shape: &ReductionSizes) -> bool {
    let is_plain = shape.has_integers && dot(s, shape).is_some() && in_blocks(s)[0] && copied(s, shape).is_none();
    is_plain && shape.padded && !shape.has_prologue && !shape.zero_point && !shape.transposed
}

fn parameters(s: &TemplateSetting, shape: &ReductionSizes) -> Vec<Parameter> {
    let registers = i64::from(s.target.n_vector_registers);
    let ReductionSizes { k, p, q, c, padded, has_prologue, open_rows, .. } = *shape;
    let [takes_blocks, gives_blocks] = in_blocks(s);
    let agreed = s.workload.layout().channels()[0];
    let (fours, rows) = (dot(s, shape).is_some(), in_rows(s, shape));
    let least = if rows { s.target.lanes(s.workload.dtype) } else { steps_at_once(s, shape) };
    let is_block = |&b: &i64| {
        let fits = if agreed > 1 { b == agreed } else { b == least || c.is_none_or(|c| b < 2 * c) };
        fits && b >= least && (!fours || divides_groups(shape, b))
    };
    // Blocks of two are for inputs with no more channels.
    let smallest = if least == 2 && c.is_some_and(|c| c <= 2) { 2 } else { 1 };
    let channel_blocks = [smallest, 4, 8, 16, 32, 64, 128].into_iter().filter(is_block);
    let copies_dots = fours && (padded && !skips_padding(s, shape) || !takes_blocks);
    let is_packed = has_prologue || copied(s, shape).is_some() || copies_dots || rows && padded;
    let inputs: &[&str] = match (is_packed, padded || !takes_blocks) {
        (true, _) => &["packed"],
        (false, true) => &["plain", "packed"],
        (false, false) => &["plain"],
    };
    let mut parameters = vec![
        Parameter::categorical("lanes", if fours || rows { &["k"] } else { &["k", "q"] }),
        Parameter::ordinal("k_tile", 1..=k.min(registers / 2)),
        Parameter::ordinal("p_tile", 1..=if open_rows.is_some() && q > 1 { 1 } else { p.min(4) }),
        Parameter::ordinal("q_tile", 1..=q.min(registers - 2)),
        Parameter::permutation("order", &["k", "p", "q"]),
        Parameter::ordinal("c_block", channel_blocks),
        Parameter::ordinal("unroll_c", [1, 2, 4]),
        Parameter::categorical("input", inputs),
        Parameter::categorical("write", if gives_blocks { &["tile"] } else { &["tile", "scatter", "row"] }),
    ];
    if decides_padding(s, shape) && !fours {
        parameters.push(Parameter::boolean("unroll_s"));
    }
    parameters.extend(shape.work().parameter(s, cut_sum(s, shape).is_some()));
    parameters
}

/// Reduction loop that threads may share, and its extent.
fn cut_sum(s: &TemplateSetting, shape: &ReductionSizes) -> Option<(&'static str, i64)> {
    if in_rows(s, shape) {
        return None;
    }
    let c = shape.c.unwrap_or(1);
    // Rows of a transposed convolution's filter meet inserted zeros.
    let (cut, extent) = if c >= shape.r || shape.transposed { ("c", c) } else { ("r", shape.r) };
    (extent >= s.n_threads as i64).then_some((cut, extent))
}

/// Returns the loops over channels, rows and columns of the result, then over channels, rows and columns of
/// the filter, of the stage that sums or, if a reduction loop is cut, of the parts.
fn loops(cut: Option<&str>) -> [&'static str; 6] {
    match cut {
        None => ["k", "p", "q", "c", "r", "s"],
        Some("c") => ["S.k", "S.p", "S.q", "S.in_part", "S.r", "S.s"],
        Some(_) => ["S.k", "S.p", "S.q", "S.c", "S.in_part", "S.s"],
    }
}

/// Number of elements of a tile size, which counts vectors along the lanes.
fn elements(tile: i64, is_lanes: bool, lanes: i64) -> i64 {
    if is_lanes { tile * lanes } else { tile }
}
