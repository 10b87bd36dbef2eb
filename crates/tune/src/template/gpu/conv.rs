//! Convolutions on GPUs as implicit GEMM: the matrix of patches exists in shared memory only.

use super::super::{Template, TemplateSetting, algorithm};
use super::matmul::SIMT;
use tilewright_ir::op::Structure;

/// Implicit GEMM: the product of the weights with patches of the input, which are gathered as they are copied
/// to shared memory.
///
/// # Source
/// Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (2014), section 3: implicit GEMM. Ours is
/// scheduled as [`super::GPU_MATMUL`]; groups are products of a batch.
pub const GPU_CONV: Template = Template {
    name: "gpu-conv",
    text: "GPU: implicit GEMM, patches gathered into shared memory, tiled as gpu-matmul",
    serves: |s| is_window(s) && (SIMT.applies)(s),
    space: |s| algorithm::space("gpu-conv", s, s, &[SIMT]),
    steps: |s, space, config| (SIMT.steps)(s, s, space, config),
    estimate: Some(|s, space, config| (SIMT.estimate)(s, s, space, config)),
};

/// Whether a workload is a convolution.
pub(super) fn is_window(s: &TemplateSetting) -> bool {
    matches!(s.workload.structure(), Structure::Window(_))
}
