//! Winograd's algorithm on GPUs.

use super::super::algorithm::{self, Algorithm};
use super::super::step::{compute_at, inline, reorder, split, unroll, winograd};
use super::super::{Template, TemplateSetting};
use super::model::START;
use super::parts::each_thread;
use super::{GpuProduct, gpu, matmul};
use tilewright_ir::Step;
use tilewright_ir::op::{Layout, Structure, Window};
use tilewright_search::{Config, Parameter, Space};

/// Transforms of weights and data, products in tiles, and the transform of results: a kernel each.
///
/// # Source
/// The division into kernels is that of TVM's `conv2d_winograd` for CUDA: a thread transforms a tile, and the
/// products are one batch. The products are scheduled as those of [`super::GPU_MATMUL`].
pub const GPU_WINOGRAD: Template = Template {
    name: "gpu-winograd",
    text: "GPU: Winograd's F(2x2, 3x3) and F(4x4, 3x3): transforms by threads, products tiled as gpu-matmul",
    serves: |s| (WINOGRAD.applies)(s),
    space: |s| algorithm::space("gpu-winograd", s, s, &[WINOGRAD]),
    steps: |s, space, config| (WINOGRAD.steps)(s, s, space, config),
    estimate: Some(|s, space, config| (WINOGRAD.estimate)(s, s, space, config)),
};

/// Winograd's convolution as an algorithm.
pub(super) const WINOGRAD: Algorithm<TemplateSetting> = Algorithm {
    name: "winograd",
    applies: |s| s.target.gpu.is_some() && window(s).is_some(),
    parameters: |s, _| parameters(&products(s), s),
    constraints: |s, _| {
        let products = products(s);
        matmul::constraints(s, &products, &parameters(&products, s))
    },
    steps: |s, _, space, config| steps(s, space, config),
    estimate: |s, _, space, config| estimate(s, space, config),
};

/// Rows and columns of a tile of results.
const TILES: [i64; 2] = [2, 4];

/// Number of threads of a block that transforms.
const THREADS: i64 = 128;

/// Convolution to which the algorithm applies and whose rounding is accepted.
fn window(s: &TemplateSetting) -> Option<Window> {
    let w = &s.workload;
    match w.structure() {
        Structure::Window(window) if w.layout() == Layout::Nchw && !w.exact && w.has_winograd() => Some(window),
        _ => None,
    }
}

/// Products with tiles of `tile` rows and columns.
fn product(s: &TemplateSetting, tile: i64) -> GpuProduct {
    GpuProduct::of_winograd(&window(s).expect("the template serves such convolutions"), tile)
}

/// Returns the products of each of the tiles.
fn products(s: &TemplateSetting) -> [GpuProduct; 2] {
    TILES.map(|tile| product(s, tile))
}

fn parameters(products: &[GpuProduct], s: &TemplateSetting) -> Vec<Parameter> {
    [Parameter::ordinal("m", TILES)].into_iter().chain(matmul::parameters(s, products)).collect()
}

fn steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let tile = space.int(config, "m");
    let mut steps = vec![winograd(Window::ACC, tile)];
    if window(s).is_some_and(|window| window.has_pad(&s.workload)) {
        steps.push(inline(Window::PAD));
    }
    // Results, one tile per thread.
    steps.extend([
        inline(Window::ACC),
        split("op", tile, "oth", "opi"),
        split("oq", tile, "otw", "oqi"),
        reorder(&["on", "ok", "oth", "otw", "opi", "oqi"]),
    ]);
    let (bound, thread) = each_thread("results", &["on", "ok", "oth", "otw"], THREADS);
    steps.extend(bound);
    steps.push(compute_at("acc.r", &thread));
    steps.extend(["acc.r.i", "acc.r.b", "opi", "oqi"].map(unroll));
    // Data, one tile per thread.
    steps.push(reorder(&["acc.v.n", "acc.v.c", "acc.v.th", "acc.v.tw", "acc.v.a", "acc.v.b"]));
    let (bound, thread) = each_thread("data", &["acc.v.n", "acc.v.c", "acc.v.th", "acc.v.tw"], THREADS);
    steps.extend(bound);
    steps.push(compute_at("acc.d", &thread));
    steps.extend(["acc.d.a", "acc.d.j", "acc.v.a", "acc.v.b"].map(unroll));
    // Weights, one element per thread.
    for (name, loops) in [("g", ["a", "s", "k", "c"]), ("u", ["a", "b", "k", "c"])] {
        let loops = loops.map(|axis| format!("acc.{name}.{axis}"));
        steps.extend(each_thread(&format!("weights.{name}"), &loops.each_ref().map(String::as_str), THREADS).0);
    }
    steps.extend(matmul::tiling(s, space, config).steps(&product(s, tile)));
    steps
}

/// Estimated cycles: the products, and transforms bound by memory bandwidth.
fn estimate(s: &TemplateSetting, space: &Space, config: &Config) -> f64 {
    let tile = space.int(config, "m");
    let p = product(s, tile);
    let bytes = s.workload.dtype.bytes() as f64;
    let elements = p.batch.unwrap_or(1) as f64;
    let passed = elements * (p.n * (p.m + p.k) + if s.workload.is_constant("W") { 0 } else { p.m * p.k }) as f64;
    let transforms = 3.0 * START + 2.5 * passed * bytes / (20.0 * f64::from(gpu(s).n_units));
    matmul::estimate(s, &p, space, config) + transforms
}
