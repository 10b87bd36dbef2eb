//! Spaces of AutoTVM's templates for GPUs other than that of its direct convolution.

use super::super::{Template, TemplateSetting};
use super::{BlockTile, Direct, shared_bytes, threads};
use tilewright_ir::Step;
use tilewright_ir::op::{Layout, Structure, Window};
use tilewright_search::{Config, Parameter, Space, SpaceError};

/// Depthwise convolution: channels, rows and columns of the output in 4 loops each, and unrolling.
///
/// # Source
/// TVM's `depthwise_conv2d_nchw` for CUDA (topi, AutoTVM's template). As there, the loops are blocks, virtual
/// threads, threads and elements of a thread, and the input and the weights of a block are in shared memory.
/// We read them from there in each multiplication, without copies in registers, and support one output
/// channel per input channel.
pub const DEPTHWISE_4_4_4: Template = Template {
    name: "depthwise-4-4-4",
    text: "GPU: AutoTVM's depthwise convolution: factorizations of outputs into 4, shared memory, unrolling",
    serves: |s| s.target.gpu.is_some() && plain_window(s).is_some_and(|w| w.depthwise && w.k == w.c),
    space: depthwise_space,
    steps: depthwise_steps,
    estimate: None,
};

/// Direct convolution without shared memory: channels, rows and columns of the output in 3 loops each,
/// vectors, unrolling.
///
/// # Source
/// TVM's spatial packing for Mali (topi/mali, described in "Optimizing Mobile Deep Learning on ARM GPU with
/// TVM", 2018), the AutoTVM paper's template for the T860: blocks, threads and elements of a thread, which
/// are vectors along columns. We pad the input in advance, and leave it and the weights in their layouts.
pub const CONV_3_3_3: Template = Template {
    name: "conv-3-3-3",
    text: "GPU: AutoTVM's convolution without shared memory: factorizations of outputs into 3, vectors, unrolling",
    serves: |s| {
        let is_direct = |w: Window| !w.depthwise && !w.transposed && w.groups == 1;
        s.target.gpu.is_some() && plain_window(s).is_some_and(is_direct)
    },
    space: unshared_space,
    steps: unshared_steps,
    estimate: None,
};

/// Maximum number of elements of a thread along an axis of [`CONV_3_3_3`], as in TVM's template.
const MOST_ALONG: i64 = 16;
/// Maximum number of elements of a thread in total, so that they stay in registers.
const MOST_ELEMENTS: i64 = 128;

/// Convolution of floating-point numbers in the layouts that its caller provides.
fn plain_window(s: &TemplateSetting) -> Option<Window> {
    match s.workload.structure() {
        _ if s.workload.has_integer_factors() => None,
        Structure::Window(window) if s.workload.layout() == Layout::Nchw => Some(window),
        _ => None,
    }
}

fn window(s: &TemplateSetting) -> Window {
    plain_window(s).expect("the template serves convolutions")
}

/// Factorizations of the output's channels, rows and columns.
fn factorizations(w: &Window, parts: usize) -> Vec<Parameter> {
    let [p, q] = w.program_axes().map(|axis| axis.output);
    let of_axis = |(name, n): (&str, i64)| Parameter::factorization(name, n as u64, parts);
    [("k", w.k), ("p", p), ("q", q)].map(of_axis).into()
}

fn factors(space: &Space, config: &Config, name: &str) -> Vec<i64> {
    space.factors(config, name).into_iter().map(|f| f as i64).collect()
}

fn depthwise_space(s: &TemplateSetting) -> Result<Space, SpaceError> {
    let window = window(s);
    let mut parameters = factorizations(&window, 4);
    parameters
        .extend([Parameter::boolean("unroll_explicit"), Parameter::ordinal("auto_unroll_max_step", [0, 256, 1500])]);
    // The extent of a block in a dimension is the dimension divided by the number of blocks.
    let [rows, columns] = [("p", 0), ("q", 1)].map(|(name, at)| {
        let axis = window.program_axes()[at];
        format!("(({} // {name}[0] - 1) * {} + {})", axis.output, axis.stride, axis.reach())
    });
    let [r, taps] = window.axes.map(|axis| axis.filter);
    let channels = format!("({} // k[0])", window.k);
    let elements = [format!("{channels} * {rows} * {columns}"), format!("{channels} * {}", r * taps)];
    let mut constraints = threads(s, &["q[2]", "p[2]", "k[2]"], &parameters);
    constraints.push(shared_bytes(s, &elements, &parameters));
    Space::declare("depthwise-4-4-4", parameters, constraints)
}

fn depthwise_steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let window = window(s);
    let [r, taps] = window.axes.map(|axis| axis.filter);
    let tile = |name: &str| {
        let f = factors(space, config, name);
        BlockTile { strides: f[1], threads: f[2], elements: f[3] }
    };
    let explicit = space.flag(config, "unroll_explicit");
    let direct = Direct {
        tiles: ["k", "p", "q"].map(tile),
        inner: [1, r, taps],
        is_shared: true,
        most_unrolled: if explicit { space.int(config, "auto_unroll_max_step") } else { 0 },
        lanes: false,
    };
    direct.steps(&s.workload, &window)
}

fn unshared_space(s: &TemplateSetting) -> Result<Space, SpaceError> {
    let mut parameters = factorizations(&window(s), 3);
    parameters.extend([Parameter::boolean("unroll"), Parameter::boolean("vectorize")]);
    let each = ["k", "p", "q"].map(|name| format!("{name}[2] <= {MOST_ALONG}")).join(" and ");
    let all = format!("{each} and k[2] * p[2] * q[2] <= {MOST_ELEMENTS}");
    let mut constraints = threads(s, &["q[1]", "p[1]", "k[1]"], &parameters);
    constraints.push(super::constraint("elements", &all, &parameters));
    Space::declare("conv-3-3-3", parameters, constraints)
}

fn unshared_steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let tile = |name: &str| {
        let f = factors(space, config, name);
        BlockTile { strides: 1, threads: f[1], elements: f[2] }
    };
    let tiles = ["k", "p", "q"].map(tile);
    let of_thread: i64 = tiles.iter().map(|tile| tile.elements).product();
    let window = window(s);
    let [r, taps] = window.axes.map(|axis| axis.filter);
    let direct = Direct {
        tiles,
        inner: [1, r, taps],
        is_shared: false,
        most_unrolled: of_thread * if space.flag(config, "unroll") { r * taps } else { 1 },
        lanes: space.flag(config, "vectorize"),
    };
    direct.steps(&s.workload, &window)
}
