//! Convolutions on GPUs, as products with a matrix of patches that exists in shared memory alone.

use super::super::{Setting, Template};
use super::{Product, matmul};
use tilewright_ir::op::Structure;

/// The product of the weights with patches of the input, which are gathered as they are copied.
///
/// # Source
/// Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (2014), section 3: implicit GEMM. Ours is
/// scheduled as [`super::GPU_MATMUL`]; groups are products of a batch.
pub const GPU_CONV: Template = Template {
    name: "gpu-conv",
    text: "GPU: convolution as a product with patches that are gathered into shared memory, tiled as gpu-matmul",
    serves: |s| {
        let is_window = matches!(s.workload.structure(), Structure::Window(_));
        s.target.gpu.is_some() && is_window && Product::of(&s.workload).is_some()
    },
    space: |s| matmul::space("gpu-conv", s),
    steps: |s: &Setting, space, config| matmul::tiling(s, space, config).steps(&matmul::product(s)),
    estimate: Some(matmul::estimate),
};
