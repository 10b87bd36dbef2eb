//! The search space of "Compiler-Level Matrix Multiplication Optimization for Deep Learning" (G-BFS and N-A2C).

use super::step::{accumulate, parallel, reorder, split, unroll, vectorize};
use super::{Setting, Template};
use crate::space::{Config, Parameter, Space, SpaceError};
use tilewright_ir::Step;

/// Rows and columns in 4 loops each, the reduction in 2, and nothing else.
///
/// # Source
/// Section 2.2, equations 2 to 4, with the values of section 5. The paper leaves open what a CPU does with the
/// loops; here they nest as `m0 n0 m1 n1 k0 m2 n2 k1 m3 n3`, the columns of `n3` are vector lanes, and a tile
/// `m3 × n3` that fits the registers is kept in them; with several threads `m0` is spread over them.
pub const GEMM_4_2_4: Template = Template {
    name: "gemm-4-2-4",
    text: "the G-BFS and N-A2C paper's space: factorizations of m and n into 4 and of k into 2",
    operators: &["matmul"],
    space,
    steps,
};

fn space(s: &Setting) -> Result<Space, SpaceError> {
    let factors = |name: &str, parts| Parameter::factorization(name, s.workload.size(name) as u64, parts);
    Space::new("gemm-4-2-4", vec![factors("m", 4), factors("k", 2), factors("n", 4)], vec![])
}

fn steps(s: &Setting, space: &Space, config: &Config) -> Vec<Step> {
    let factors = |name: &str| space.factors(config, name).into_iter().map(|f| f as i64).collect::<Vec<_>>();
    let (m, k, n) = (factors("m"), factors("k"), factors("n"));
    let lanes = s.target.lanes(s.workload.dtype);
    let mut steps = vec![
        split("i", m[1] * m[2] * m[3], "m0", "m1.rest"),
        split("m1.rest", m[2] * m[3], "m1", "m2.rest"),
        split("m2.rest", m[3], "m2", "m3"),
        split("j", n[1] * n[2] * n[3], "n0", "n1.rest"),
        split("n1.rest", n[2] * n[3], "n1", "n2.rest"),
        split("n2.rest", n[3], "n2", "n3"),
        split("k", k[1], "k0", "k1"),
        split("n3", lanes, "n3.v", "n3.l"),
        reorder(&["m0", "n0", "m1", "n1", "k0", "m2", "n2", "k1", "m3", "n3.v", "n3.l"]),
    ];
    let vectors_per_row = (n[3] + lanes - 1) / lanes;
    // One register more than the tile and a row of B for the broadcast element of A.
    if m[3] * vectors_per_row + vectors_per_row < i64::from(s.target.n_vector_registers) {
        steps.extend([accumulate("C", "n2", "C.r"), unroll("m3"), unroll("n3.v")]);
    }
    steps.push(vectorize("n3.l"));
    if s.n_threads > 1 {
        steps.push(parallel("m0"));
    }
    steps
}
