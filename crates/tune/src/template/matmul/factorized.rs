//! Spaces of papers that consist of one factorization for each dimension.

use super::super::gpu::{self, BlockTile, Copies, Fragments, Rasterization, Tiling};
use super::super::step::{accumulate, parallel, reorder, split, unroll, vectorize};
use super::super::{Template, TemplateSetting};
use super::MatmulProduct;
use tilewright_ir::Step;
use tilewright_ir::op::{Contraction, Structure, Workload};
use tilewright_search::{Config, Parameter, Space, SpaceError};

/// Rows and columns in 4 loops each, the reduction in 2, and nothing else.
///
/// # Source
/// "Compiler-Level Matrix Multiplication Optimization for Deep Learning", section 2.2, equations 2 to 4, with
/// the values of section 5. The paper leaves open what a CPU does with the loops; here they nest as `m0 n0 m1
/// n1 k0 m2 n2 k1 m3 n3`, the columns of `n3` are vector lanes, and a tile `m3 × n3` that fits the registers
/// is kept in them; with several threads, `m0` is parallel. An epilogue is a separate pass.
///
/// On a GPU the four loops are blocks, virtual threads, threads and the elements of a thread, as in TVM's
/// schedules; the parts of both operands for a step of `k0` are in shared memory.
pub const GEMM_4_2_4: Template = Template {
    name: "gemm-4-2-4",
    text: "the G-BFS and N-A2C paper's space: factorizations of m and n into 4 and of k into 2",
    serves: |s| is_plain(&s.workload),
    space: |s| space("gemm-4-2-4", s, 2),
    steps: |s, space, config| {
        if s.target.gpu.is_some() { gpu_steps(s, space, config) } else { steps(s, space, config) }
    },
    estimate: None,
};

/// Rows and columns in 4 loops each, the reduction in 3, the products of a batch in 2.
///
/// # Source
/// "OpEvo: An Evolutionary Method for Tensor Operator Optimization", section 5. The paper's loops are those
/// of a GPU kernel. On a CPU they nest as `b0 b1 m0 n0 m1 n1 k0 m2 n2 k1 k2 m3 n3` and run as in
/// [`GEMM_4_2_4`], except that `b0` is parallel if there is a batch. On a GPU, the parts of the operands for
/// a step of `k0` are in shared memory, and for a step of `k1` in registers; `b1` is bound to threads, too.
pub const MATMUL_4_3_4: Template = Template {
    name: "matmul-4-3-4",
    text: "OpEvo's space: factorizations of m and n into 4, of k into 3, of a batch into 2",
    serves: |s| is_plain(&s.workload) || is_batched(&s.workload),
    space: |s| space("matmul-4-3-4", s, 3),
    steps: |s, space, config| {
        if s.target.gpu.is_some() { gpu_steps(s, space, config) } else { steps(s, space, config) }
    },
    estimate: None,
};

/// Whether a workload is one matrix product of floating-point numbers that are multiplied in the type in
/// which they are stored.
fn is_plain(w: &Workload) -> bool {
    let is_plain = |c: Contraction| c.batch.is_none() && !c.a.k_first && c.b.k_first;
    let is_single = !w.has_integer_factors() && !w.is_family() && w.pairs().is_none();
    is_single && matches!(w.structure(), Structure::Contraction(c) if is_plain(c))
}

/// Whether a workload is a batch of products, in any storage type.
fn is_batched(w: &Workload) -> bool {
    let has_batch = matches!(w.structure(), Structure::Contraction(Contraction { batch: Some(_), .. }));
    has_batch && !w.has_integer_factors() && !w.is_family()
}

fn space(name: &str, s: &TemplateSetting, k_parts: usize) -> Result<Space, SpaceError> {
    let p = MatmulProduct::of(s);
    let factors = |name: &str, n: i64, parts| Parameter::factorization(name, n as u64, parts);
    let mut parameters: Vec<Parameter> = p.batch.map(|b| factors("b", b, 2)).into_iter().collect();
    parameters.extend([factors("m", p.m, 4), factors("k", p.k, k_parts), factors("n", p.n, 4)]);
    let mut constraints = Vec::new();
    if s.target.gpu.is_some() {
        let along = ["n[2]", "m[2]", "b[1]"];
        constraints.extend(gpu::threads(s, if p.batch.is_some() { &along } else { &along[..2] }, &parameters));
        // The extent of a block in a dimension is the dimension divided by the number of blocks.
        let products = if p.batch.is_some() { " * b[1]" } else { "" };
        let depth = format!("({} // k[0])", p.k);
        let elements = [("m", p.m), ("n", p.n)].map(|(f, n)| format!("({n} // {f}[0]) * {depth}{products}"));
        constraints.push(gpu::shared_bytes(s, &elements, &parameters));
    }
    Space::declare(name, parameters, constraints)
}

/// Returns the schedule of a configuration on a GPU.
fn gpu_steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let factors = |name: &str| space.factors(config, name).into_iter().map(|f| f as i64).collect::<Vec<_>>();
    let tile = |f: Vec<i64>| BlockTile { strides: f[1], threads: f[2], elements: f[3] };
    let k = factors("k");
    let product = gpu::GpuProduct::of(&s.workload).expect("the template serves products");
    let columns = tile(factors("n"));
    let tiling = Tiling {
        rows: tile(factors("m")),
        warp: columns.threads,
        columns,
        products: if product.batch.is_some() { factors("b")[1] } else { 1 },
        depth: k[1..].iter().product(),
        inner: k[k.len() - 1],
        unrolled: false,
        fragments: if k.len() == 3 { Fragments::Inner } else { Fragments::None },
        split: 1,
        order: Rasterization::Rows,
        vectors: [1, 1],
        copies: Copies::Registers(0),
        lanes: false,
        shared: true,
        padded: false,
    };
    tiling.steps(&product)
}

fn steps(s: &TemplateSetting, space: &Space, config: &Config) -> Vec<Step> {
    let p = MatmulProduct::of(s);
    let factors = |name: &str| space.factors(config, name).into_iter().map(|f| f as i64).collect::<Vec<_>>();
    let (m, k, n) = (factors("m"), factors("k"), factors("n"));
    let lanes = s.target.lanes(s.workload.dtype);
    let mut steps = Vec::new();
    // Splits a loop into one for each factor, numbered from 0.
    let mut split_by = |target: &str, name: &str, factors: &[i64]| {
        let mut rest = target.to_owned();
        for at in 1..factors.len() {
            let inner = if at + 1 == factors.len() { format!("{name}{at}") } else { format!("{name}{at}.rest") };
            steps.push(split(&rest, factors[at..].iter().product(), &format!("{name}{}", at - 1), &inner));
            rest = inner;
        }
    };
    if p.batch.is_some() {
        split_by("b", "b", &factors("b"));
    }
    split_by("i", "m", &m);
    split_by("j", "n", &n);
    split_by("k", "k", &k);
    steps.push(split("n3", lanes, "n3.v", "n3.l"));
    let inner_k = &["k1", "k2"][..k.len() - 1];
    let batch: &[&str] = if p.batch.is_some() { &["b0", "b1"] } else { &[] };
    let outer = ["m0", "n0", "m1", "n1", "k0", "m2", "n2"];
    steps.push(reorder(&[batch, &outer, inner_k, &["m3", "n3.v", "n3.l"]].concat()));
    let vectors_per_row = (n[3] + lanes - 1) / lanes;
    // One register more than the tile and a row of B for the broadcast element of A.
    if m[3] * vectors_per_row + vectors_per_row < i64::from(s.target.n_vector_registers) {
        steps.extend([accumulate(p.sum, "n2", "C.r"), unroll("m3"), unroll("n3.v")]);
    }
    steps.push(vectorize("n3.l"));
    if p.has_epilogue {
        steps.extend([split("oj", lanes, "oj.v", "oj.l"), vectorize("oj.l")]);
    }
    if s.n_threads > 1 {
        let (product, epilogue) = if p.batch.is_some() { ("b0", "ob") } else { ("m0", "oi") };
        steps.push(parallel(product));
        steps.extend(p.has_epilogue.then(|| parallel(epilogue)));
    }
    steps
}
