//! Templates for GPUs: blocks of threads, tiles in shared memory and in registers.
//!
//! The limits of a device are constraints of the spaces, named by [`LIMITS`], and `registers` in templates of
//! our own. All are arithmetic, so that hardly any configuration is built in vain.

mod conv;
mod copies;
mod direct;
mod matmul;
mod model;
mod nest;
mod paper;
mod parts;
mod product;
mod rows;
mod tensor;
mod warpgroup;
mod winograd;

use super::algorithm::{self, Algorithm};
use super::{Template, TemplateSetting, constraint};
use tilewright_ir::target::Gpu;
use tilewright_search::{Constraint, Parameter};

pub use conv::GPU_CONV;
pub use copies::Copies;
pub use direct::Direct;
pub use matmul::GPU_MATMUL;
pub use nest::GPU_NEST;
pub use paper::{CONV_3_3_3, DEPTHWISE_4_4_4};
pub use parts::BlockTile;
pub use product::{Fragments, GpuProduct, Rasterization, Tiling};
pub use tensor::{GPU_CONV_MMA, GPU_MATMUL_MMA};
pub use warpgroup::GPU_MATMUL_WGMMA;
pub use winograd::GPU_WINOGRAD;

/// Algorithms for a product or a convolution on a GPU that apply, as a choice of the search.
pub const GPU_ANY: Template = Template {
    name: "gpu-any",
    text: "GPU: implicit GEMM by threads or tensor cores, Winograd's algorithm, or sums shared by threads",
    serves: |s| algorithm::is_choice(s, ALGORITHMS),
    space: |s| algorithm::space("gpu-any", s, s, ALGORITHMS),
    steps: |s, space, config| algorithm::steps(s, s, ALGORITHMS, space, config),
    estimate: Some(|s, space, config| algorithm::estimate(s, s, ALGORITHMS, space, config)),
};

/// All algorithms; the problem is the setting itself.
const ALGORITHMS: &[Algorithm<TemplateSetting>] =
    &[matmul::SIMT, tensor::MMA, warpgroup::WGMMA, winograd::WINOGRAD, nest::ROWS];

/// Names of the constraints that express a device's limits.
pub const LIMITS: [&str; 3] = ["threads", "threads_z", "shared_bytes"];

/// Returns the GPU that a setting is for.
///
/// # Panics
/// If the setting is for a CPU, which a GPU template does not serve.
fn gpu(s: &TemplateSetting) -> Gpu {
    s.target.gpu.expect("templates for GPUs serve targets that are one")
}

/// Constraints on a block's threads, in total and along z. `along` are the numbers of threads along x, y and
/// z, as expressions.
pub fn threads(s: &TemplateSetting, along: &[&str], parameters: &[Parameter]) -> Vec<Constraint> {
    let gpu = gpu(s);
    let all = constraint("threads", &format!("{} <= {}", along.join(" * "), gpu.most_threads), parameters);
    let most = gpu.most_threads_along[2];
    let third = along.get(2).filter(|_| most < gpu.most_threads);
    let third = third.map(|n| constraint("threads_z", &format!("{n} <= {most}"), parameters));
    [all].into_iter().chain(third).collect()
}

/// Constraint on a block's shared memory. `elements` are the numbers of elements in it, as expressions.
pub fn shared_bytes(s: &TemplateSetting, elements: &[impl AsRef<str>], parameters: &[Parameter]) -> Constraint {
    let (bytes, most) = (s.workload.dtype.bytes(), gpu(s).shared_bytes);
    let elements: Vec<&str> = elements.iter().map(AsRef::as_ref).collect();
    let text = format!("({}) * {bytes} <= {most}", elements.join(" + "));
    constraint("shared_bytes", &text, parameters)
}
