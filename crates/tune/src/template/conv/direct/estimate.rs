//! Analytical cost model of direct convolution, in cycles.

use super::super::super::TemplateSetting;
use super::super::super::model::{bandwidth, cost_of_dot4, cuts, step_cycles, write_back};
use super::super::super::share::SharedWork;
use super::super::{ReductionSizes, ceil_div, in_blocks};
use super::{columns_read, constants, copied, dot, elements, in_rows, pads_by_tile, skips_padding, steps_at_once};
use tilewright_ir::dot::STEPS;
use tilewright_ir::op::WindowAxis;
use tilewright_search::{Config, Space};

/// Slowdown of pixels as lanes: rows seldom begin and end where vectors do.
const LANES_OF_PIXELS: f64 = 1.12;
/// Cycles of loading a vector of strided elements.
const APART: f64 = 3.5;
/// Cycles of loading a vector of strided bytes, which no instruction gathers (Emerald Rapids, 24 channels of
/// 112 × 112 by 5 × 5 filters of stride 2: 900 µs, where channels as lanes take 130).
const BYTES_APART: f64 = 20.0;
/// Number of instructions that interleave rows of a column.
const INTERLEAVING: i64 = 3;
/// Cycles of loading a vector that may contain inserted zeros between elements of the input.
const BETWEEN_ZEROS: f64 = 8.0;
/// Slowdown of several unrolled channels if the last vector of a large tile is not full: vectors of two
/// widths share broadcast elements, for which LLVM spills sums to the stack (f32 of Zen 5: 1.65 to 1.8).
const SPILLED: f64 = 1.7;
/// Additional cycles of rescaling an accumulator if accumulators and constants together exceed the registers:
/// LLVM then spills the accumulators (1.2 on Zen 5, residual sums of 64 channels).
const RESCALED_LATE: f64 = 1.2;

/// Estimated cycles: register tiles, bound by their multiply-adds and loads or by reading the weights and the
/// input from the cache that holds what the enclosing loops reuse; then copies and stores.
pub(super) fn estimate(s: &TemplateSetting, shape: &ReductionSizes, space: &Space, config: &Config) -> f64 {
    let model = CycleFacts::of(s, shape, space, config);
    let ReductionSizes { n, k, p, q, k_group, .. } = *shape;
    let mut cycles = 0.0;
    for (n_k, kt) in cuts(k_group, model.k_tile) {
        for (n_p, pt) in cuts(p, model.p_tile) {
            for (n_q, qt) in cuts(q, model.q_tile) {
                let (compute, read) = (model.computing([kt, pt, qt]), model.reading([kt, pt, qt]));
                cycles += n_k * n_p * n_q * (compute.max(read) + 0.2 * compute.min(read));
            }
        }
    }
    cycles *= (n * (k / k_group)) as f64;
    cycles += (n * k * p * q) as f64 * model.writing();
    cycles += write_back(s, (n * k * p * q) as f64 * model.bytes);
    if model.is_packed {
        cycles += n as f64 * model.image / model.bytes * model.packing();
    }
    let count = |axis: &str| match axis {
        "k" => ceil_div(k_group, model.k_tile) * (k / k_group),
        "p" => ceil_div(p, model.p_tile),
        _ => ceil_div(q, model.q_tile),
    };
    let n_tiles = n * ["k", "p", "q"].map(count).iter().product::<i64>();
    let n_iterations = n * count(&model.order[0]);
    shape.work().of_busiest_thread(s, SharedWork::of(s, space, config), cycles, n_iterations, n_tiles)
}

/// Share of the taps of an axis that lie in the input.
fn inside(axis: &WindowAxis) -> f64 {
    let taps = |at: i64| (0..axis.filter).map(move |tap| at * axis.stride - axis.before + tap * axis.dilation);
    let n = (0..axis.output).flat_map(taps).filter(|at| (0..axis.input).contains(at)).count();
    n as f64 / (axis.output * axis.filter) as f64
}

/// Properties of a configuration that its cycles depend on.
struct CycleFacts<'a> {
    s: &'a TemplateSetting,
    shape: &'a ReductionSizes,
    lanes: i64,
    /// Size in bytes of an element of an operand as it is read.
    bytes: f64,
    by_channels: bool,
    /// Channels, rows and columns of a tile.
    k_tile: i64,
    p_tile: i64,
    q_tile: i64,
    /// Loops over tiles, the outermost first.
    order: Vec<String>,
    write: String,
    /// Whether the input is copied, and whether by tiles.
    is_packed: bool,
    pads_by_tile: bool,
    /// Whether dot products take rows of a filter.
    rows: bool,
    /// Number of channels summed for an element of the result, and size in bytes of the channels of an image.
    channels: f64,
    image: f64,
    /// Whether several channels of the sum are unrolled.
    unrolls_channels: bool,
    /// Whether vectors gather channels from plane after plane.
    gathers: bool,
    /// Cycles of loading a vector of strided pixels.
    apart: f64,
    /// Distances between the rows, and between the columns, to which a tap of the filter contributes: strides
    /// of a transposed convolution in code that leaves out zeros, else 1.
    met_apart: [i64; 2],
    /// Share of the reduction steps that are computed.
    met: f64,
}

impl<'a> CycleFacts<'a> {
    fn of(s: &'a TemplateSetting, shape: &'a ReductionSizes, space: &Space, config: &Config) -> CycleFacts<'a> {
        let (int, text) = (|name: &str| space.int(config, name), |name: &str| space.text(config, name));
        let lanes = s.target.lanes(s.workload.dtype);
        let bytes = copied(s, shape).unwrap_or(s.workload.factors()[0]).bytes() as f64;
        let (by_channels, is_packed) = (text("lanes") == "k", text("input") == "packed");
        let channels = shape.c.map_or(shape.k_group, |c| c) as f64;
        let ReductionSizes { p, q, stride, .. } = *shape;
        // Unrolled code leaves out the taps of a transposed convolution that meet zeros, if all tiles begin
        // with the same taps.
        let strides = shape.axes.map(|axis| axis.stride);
        let begins_alike = int("q_tile") % strides[1] == 0 || int("q_tile") >= q;
        let is_known = shape.transposed && by_channels && !is_packed && text("unroll_s") == "true" && begins_alike;
        let inputs = shape.axes.iter().map(|axis| axis.input).product::<i64>();
        let read = if is_known { inputs } else { p * stride[0] * q * stride[1] };
        let has_neighbours = is_packed && int("c_block") % lanes == 0;
        CycleFacts {
            s,
            shape,
            lanes,
            bytes,
            by_channels,
            k_tile: elements(int("k_tile"), by_channels, lanes),
            p_tile: int("p_tile"),
            q_tile: elements(int("q_tile"), !by_channels, lanes),
            order: space.order(config, "order"),
            write: text("write"),
            is_packed,
            pads_by_tile: pads_by_tile(s, shape, space, config),
            rows: in_rows(s, shape),
            channels,
            image: channels * read as f64 * bytes,
            unrolls_channels: int("unroll_c") > 1,
            gathers: shape.c.is_none() && by_channels && !has_neighbours && !in_blocks(s)[0],
            // Lanes that are pixels load strided elements, or zeros in between.
            apart: match (by_channels, shape.transposed) {
                (false, true) => BETWEEN_ZEROS,
                (false, false) if stride[1] > 1 && shape.c.is_none() && bytes < 2.0 => BYTES_APART,
                (false, false) if stride[1] > 1 && !is_packed => APART,
                _ => 0.0,
            },
            met_apart: if is_known { strides } else { [1, 1] },
            met: match is_known {
                true => 1.0 / strides[0] as f64,
                false if !is_packed && skips_padding(s, shape) => shape.axes.iter().map(inside).product(),
                false => 1.0,
            },
        }
    }

    /// Cycles of the multiply-adds of a tile of these channels, rows and columns.
    fn computing(&self, [kt, pt, qt]: [i64; 3]) -> f64 {
        let ReductionSizes { c, r, s: columns, stride, .. } = *self.shape;
        let (vectors, broadcast) = match self.by_channels {
            true => (ceil_div(kt, self.lanes), pt * ceil_div(qt, self.met_apart[1])),
            false => (pt * ceil_div(qt, self.lanes), kt),
        };
        if self.rows {
            let read = pt * columns_read(qt, stride[1], columns);
            let dots = (broadcast * columns) as f64 * cost_of_dot4(self.s);
            let instructions = (vectors * ceil_div(r, STEPS)) as f64 * (dots + (INTERLEAVING * read) as f64);
            return instructions / self.s.target.core().fmas + 10.0;
        }
        // In a depthwise convolution every product reads a separate element of the input: lanes over channels
        // gather them from plane after plane.
        let gathered = if self.gathers { (vectors * broadcast * self.lanes) as f64 } else { 0.0 };
        let loads = if c.is_none() { vectors * broadcast } else { vectors } as f64;
        let is_large = 4 * vectors * broadcast >= 3 * i64::from(self.s.target.n_vector_registers);
        let spills = self.by_channels && self.unrolls_channels && is_large && kt % self.lanes != 0;
        let slowdown = if spills { SPILLED } else { 1.0 };
        let step = slowdown * step_cycles(self.s, vectors, broadcast) + gathered + self.apart * loads;
        let taps = (r * columns) as f64;
        let n_steps = ceil_div(c.unwrap_or(1), steps_at_once(self.s, self.shape)) as f64 * taps;
        let steps = self.met * n_steps * step * if self.by_channels { 1.0 } else { LANES_OF_PIXELS };
        steps + self.spilling(vectors, broadcast) + 3.0 * taps + 20.0
    }

    /// Cycles of spilling the accumulators of a tile while functions rescale them.
    fn spilling(&self, vectors: i64, broadcast: i64) -> f64 {
        let held = vectors * broadcast + vectors + constants(self.s);
        let is_spilled = constants(self.s) > 0 && held > i64::from(self.s.target.n_vector_registers);
        if is_spilled { RESCALED_LATE * (vectors * broadcast) as f64 } else { 0.0 }
    }

    /// Cycles of reading the weights and the input of a tile of these channels, rows and columns.
    fn reading(&self, [kt, pt, qt]: [i64; 3]) -> f64 {
        let ReductionSizes { p, c, r, s: columns, stride, k_group, .. } = *self.shape;
        let taps = (r * columns) as f64;
        let steps = c.unwrap_or(1) as f64 * taps;
        let (row, weights) = (self.image / p as f64, k_group as f64 * steps * self.bytes);
        let (inner, outer) = (self.order[2].as_str(), self.order[0].as_str());
        let slice = kt as f64 * steps * self.bytes * if self.met_apart[0] > 1 { self.met } else { 1.0 };
        // In a depthwise convolution a tile reads its own channels only.
        let channels = if c.is_none() { kt as f64 } else { self.channels };
        let along =
            |n: i64, axis: usize, taps: i64| ceil_div((n - 1) * stride[axis] + taps, self.met_apart[axis]) as f64;
        let patch = along(pt, 0, r) * along(qt, 1, columns) * channels * self.bytes;
        // Weights stay in cache if tiles of the image are the innermost loop; otherwise all are read again
        // and again.
        let weights_from = if inner == "k" { weights + patch } else { slice + patch };
        let input_from = match (inner, outer) {
            ("k", _) => patch,
            (_, "k") => self.image + slice,
            _ => row * r as f64 + weights,
        };
        slice / bandwidth(self.s, weights_from) + patch / taps.sqrt() / bandwidth(self.s, input_from)
    }

    /// Cycles of writing a result.
    fn writing(&self) -> f64 {
        match (self.write.as_str(), self.by_channels && !in_blocks(self.s)[1]) {
            ("scatter", _) => 1.5,
            ("tile", true) if self.q_tile < self.lanes => 2.0,
            ("tile", true) => 0.8,
            ("row", _) => 0.6,
            _ => 2.0 / self.lanes as f64,
        }
    }

    /// Cycles of copying an element of the input.
    fn packing(&self) -> f64 {
        // Rows of blocks of integers are copied as runs of bytes.
        match (dot(self.s, self.shape).is_some() || self.rows) && in_blocks(self.s)[0] {
            true if self.pads_by_tile => 1.0 / bandwidth(self.s, self.image),
            true => 2.0 / bandwidth(self.s, self.image),
            false => 0.6,
        }
    }
}
