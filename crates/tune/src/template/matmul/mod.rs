//! Templates of matrix products: plain, batched, fully connected layers.

mod blocked;
mod dot;
mod factorized;
mod packed;

use super::algorithm::{self, Algorithm};
use super::model::near_bytes;
use super::share::{self, EACH_PART, PART, PARTS, ShareableWork};
use super::step::{accumulate, compute_at, parallel, reorder, split, vectorize};
use super::{Template, TemplateSetting, ceil_div};
use tilewright_ir::op::{self, Contraction, Structure};
use tilewright_ir::schedule::LayoutAxis::{self, Whole};
use tilewright_ir::{DType, Step, TensorProduct};
use tilewright_search::{Parameter, Space, SpaceError};

pub use blocked::MATMUL_BLOCKED;
pub use dot::MATMUL_DOT;
pub use factorized::{GEMM_4_2_4, MATMUL_4_3_4};
pub use packed::PACKED;

/// Matrix product algorithms that apply, as a choice of the search.
pub const MATMUL: Template = Template {
    name: "matmul",
    text: "cache blocks and packed panels, or dot products along the reduction, whichever is faster",
    serves: |s| is_product_on_cpu(s),
    space,
    steps: |s, space, config| algorithm::steps(s, &MatmulProduct::of(s), ALGORITHMS, space, config),
    estimate: Some(|s, space, config| {
        // A member may have a choice of algorithms that its family does not have.
        let chosen = algorithm::chosen(&MatmulProduct::of(s), ALGORITHMS, space, config);
        of_members(s, |s, p| (chosen.estimate)(s, p, space, config))
    }),
};

const ALGORITHMS: &[Algorithm<MatmulProduct>] = &[blocked::BLOCKED, dot::DOT];

/// Returns the space of [`MATMUL`], which has the same parameters at every number of rows: those of dot
/// products are fixed to one value if there are too many rows, so that configurations carry over from size to
/// size.
fn space(s: &TemplateSetting) -> Result<Space, SpaceError> {
    let p = MatmulProduct::of(s);
    let (mut parameters, constraints) = algorithm::declarations(s, &p, ALGORITHMS);
    if !dot::applies_to_few_rows(&p) {
        return Space::declare("matmul", parameters, constraints);
    }
    if !algorithm::is_choice(&p, ALGORITHMS) {
        parameters.insert(0, Parameter::categorical(algorithm::CHOICE, &[blocked::BLOCKED.name]));
        let of_dot = (dot::DOT.parameters)(s, &p);
        let held = of_dot.iter().filter(|d| parameters.iter().all(|p| p.name != d.name)).map(algorithm::held);
        let held: Vec<Parameter> = held.collect();
        parameters.extend(held);
    }
    // Records of many rows lack the parameters that only dot products have.
    let of_blocked = (blocked::BLOCKED.parameters)(s, &p);
    for parameter in parameters.iter_mut().filter(|p| of_blocked.iter().all(|b| b.name != p.name)) {
        parameter.optional = true;
    }
    Space::declare("matmul", parameters, constraints)
}

/// Geometric mean of an estimate over representative members of a family; for any other workload, its
/// estimate.
fn of_members(s: &TemplateSetting, estimate: impl Fn(&TemplateSetting, &MatmulProduct) -> f64) -> f64 {
    let whole = MatmulProduct::of(s);
    if !s.workload.is_family() {
        return estimate(s, &whole);
    }
    let anchors = s.workload.anchors();
    let members = anchors.iter().filter_map(|sizes| s.workload.at(sizes));
    let logs = members.map(|workload| {
        let s = TemplateSetting { workload, ..s.clone() };
        let member = MatmulProduct { most_rows: whole.m, ..MatmulProduct::of(&s) };
        estimate(&s, &member).ln()
    });
    (logs.sum::<f64>() / anchors.len() as f64).exp()
}

/// Loop of an epilogue around the vectors of a loop over its columns, or of pairs of them, and the steps that
/// make these.
fn finished_vectors(columns: &str, pairs: Option<i64>, lanes: i64) -> (&str, Vec<Step>) {
    match pairs {
        None => ("ov", vec![split(columns, lanes, "ov", "ol"), vectorize("ol")]),
        Some(_) => (columns, vec![vectorize(Contraction::OF_PAIR)]),
    }
}

/// Whether a setting is a product of matrices on a CPU.
fn is_product_on_cpu(s: &TemplateSetting) -> bool {
    s.target.gpu.is_none() && matches!(s.workload.structure(), Structure::Contraction(_))
}

/// Number of rows below which the other operand is streamed and read once.
const FEW_ROWS: i64 = 8;

/// Whether B is given before the first run and is gone from the near caches at the next.
fn is_cold(s: &TemplateSetting, p: &MatmulProduct) -> bool {
    p.b.is_constant && (p.n * p.k * p.factor_bytes) as f64 > near_bytes(s)
}

/// Matrix product: that of a [`Contraction`], or one that computes partial sums.
#[derive(Clone, Copy)]
struct MatmulProduct {
    /// Loops over products, rows, columns and the sum.
    loops: [&'static str; 4],
    /// Number of products, if there is a loop over them.
    batch: Option<i64>,
    /// Number of rows; the maximum if it is dynamic.
    m: i64,
    /// Number of rows of which blocks are parts: for a member of a family, the maximum.
    most_rows: i64,
    /// Steps between possible numbers of rows, of columns and of terms of a sum, if these are dynamic.
    open: [Option<i64>; 3],
    n: i64,
    k: i64,
    /// Operand of the rows.
    a: MatmulFactor,
    /// Operand of the columns.
    b: MatmulFactor,
    /// Buffer of the sums.
    sum: &'static str,
    has_epilogue: bool,
    /// Number of columns of each part of a pair, if the epilogue combines pairs.
    pairs: Option<i64>,
    /// Size in bytes of an operand's element.
    factor_bytes: i64,
    /// Dot product instruction over adjacent elements of the reduction, if the machine's kernels have one.
    dot: Option<TensorProduct>,
    /// Element type of the operands' copies, if it differs. Operands are then read from copies only.
    copied: Option<DType>,
}

/// Operand of a product.
#[derive(Clone, Copy)]
struct MatmulFactor {
    name: &'static str,
    /// Dimension over products, if there is a batch.
    batch: usize,
    /// Dimension over rows or columns of the product.
    outer: usize,
    /// Dimension that is summed over.
    k: usize,
    /// Whether the operand is given ahead of time.
    is_constant: bool,
}

impl MatmulProduct {
    /// Whether kernels add up dot products of four bytes.
    fn multiplies_bytes(&self) -> bool {
        self.dot == Some(TensorProduct::Dot4)
    }

    fn of(s: &TemplateSetting) -> MatmulProduct {
        let w = &s.workload;
        let Structure::Contraction(contraction) = w.structure() else { panic!("{w} is no product of matrices") };
        let Contraction { batch, m, n, k, a, b, .. } = contraction;
        let factor = |factor: op::Factor| {
            // Dimensions come as the batch and the two others, or the batch comes between these.
            let (batch, first, second) = match (batch, factor.heads.beside) {
                (None, _) => (0, 0, 1),
                (Some(_), false) => (0, 1, 2),
                (Some(_), true) => (1, 0, 2),
            };
            let (outer, k) = if factor.k_first { (second, first) } else { (first, second) };
            MatmulFactor { name: factor.name, batch, outer, k, is_constant: w.is_constant(factor.name) }
        };
        let (a, b, sum) = (factor(a), factor(b), contraction.sum(w));
        let factor_bytes = w.factors()[0].bytes() as i64;
        let (has_epilogue, pairs) = (!w.is_plain(), w.pairs());
        // With few rows, packed data are read once, and wider integers take longer to read.
        let widens = s.widens_bytes() && m >= FEW_ROWS;
        let dot = match w.factors() {
            _ if widens => Some(TensorProduct::Dot2),
            _ if w.has_integer_factors() => Some(TensorProduct::Dot4),
            _ if w.takes_bf16() => Some(TensorProduct::Dot2),
            [DType::Bf16, _] if s.target.prefers_dot2() => Some(TensorProduct::Dot2),
            _ => None,
        };
        // Converting numbers of 16 bits for each multiply-add takes longer than copies, unless few rows read
        // the packed data once.
        let copied = match w.dtype {
            _ if widens => Some(DType::I16),
            _ if w.takes_bf16() => Some(DType::Bf16),
            DType::F16 | DType::Bf16 if m >= FEW_ROWS && dot.is_none() => Some(DType::F32),
            _ => None,
        };
        let factor_bytes = copied.map_or(factor_bytes, |dtype| dtype.bytes() as i64);
        let open = ["m", "n", "k"].map(|size| w.open_sizes().find(|(name, _)| *name == size).map(|(_, r)| r.step));
        let loops = Contraction::LOOPS;
        MatmulProduct {
            loops,
            batch,
            m,
            most_rows: m,
            open,
            n,
            k,
            a,
            b,
            sum,
            has_epilogue,
            pairs,
            factor_bytes,
            dot,
            copied,
        }
    }

    /// Number of reduction steps of one vector multiply-add.
    fn steps_at_once(&self) -> i64 {
        self.dot.and_then(TensorProduct::dot_steps).unwrap_or(1)
    }

    /// Whether a size is dynamic.
    fn is_family(&self) -> bool {
        self.open.iter().any(Option::is_some)
    }

    /// Work that threads may share.
    fn work(&self) -> ShareableWork {
        let (results, has_whole_sums) = (self.batch.unwrap_or(1), self.is_family() || self.pairs.is_some());
        ShareableWork { results, rows: self.m, columns: self.n, sum: self.k, has_whole_sums }
    }

    /// Product that computes partial sums, one part for each thread: the steps that derive it from this one,
    /// the product, and the steps that add up the parts once it is scheduled.
    fn in_parts(&self, s: &TemplateSetting) -> (Vec<Step>, MatmulProduct, Vec<Step>) {
        let lanes = s.target.lanes(s.workload.dtype);
        let [b, i, j, k] = self.loops;
        let result = self.in_batch(b, &[i, j]);
        let part = share::part_of_product(s, self.k);
        let before = share::in_parts(self.sum, &result, k, &[], part);
        let loops = ["S.b", "S.i", "S.j", "S.in_part"];
        let parts = MatmulProduct { loops, k: part, sum: PARTS, has_epilogue: false, ..*self };

        let order: Vec<usize> = (0..=result.len()).collect();
        let mut after = vec![parallel(EACH_PART), share::on_own_lines(s, &order, result.len(), self.n, 1)];
        // One vector of results at a time, if there is an epilogue that continues from it.
        let columns = if self.has_epilogue { "oj" } else { j };
        after.push(split(columns, lanes, "total.v", "total.l"));
        if self.has_epilogue {
            after.extend([compute_at(self.sum, "total.v"), reorder(&[PART, j]), vectorize(j)]);
        } else {
            after.push(reorder(&self.in_batch(b, &[i, "total.v", PART, "total.l"])));
        }
        after.extend([accumulate(self.sum, "total.v", "total"), vectorize("total.l")]);
        if self.work().elements() >= share::MANY_RESULTS {
            after.push(parallel(if self.has_epilogue { "oi" } else { i }));
        }
        (before, parts, after)
    }

    /// Number of columns of sums per iteration of the epilogue's loop over columns.
    fn sums_at_once(&self) -> i64 {
        self.pairs.map_or(1, |columns| 2 * columns)
    }

    /// Returns the loop over products, if any, then these loops.
    fn in_batch<'a>(&self, batch: &'a str, loops: &[&'a str]) -> Vec<&'a str> {
        self.batch.map(|_| batch).into_iter().chain(loops.iter().copied()).collect()
    }

    /// Layout of a copy of an operand that has these dimensions within each product.
    fn copy_layout(&self, factor: &MatmulFactor, axes: &[LayoutAxis]) -> Vec<LayoutAxis> {
        self.batch.map(|_| Whole(factor.batch)).into_iter().chain(axes.iter().copied()).collect()
    }
}

impl MatmulFactor {
    /// Whether the operand is contiguous along the reduction.
    fn is_k_last(&self) -> bool {
        self.k > self.outer
    }
}
