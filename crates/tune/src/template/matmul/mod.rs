//! Templates of matrix products: plain, batched, fully connected layers.

mod blocked;
mod dot;
mod factorized;

use super::algorithm::{self, Algorithm};
use super::{Template, ceil_div};
use tilewright_ir::op::Workload;
use tilewright_ir::schedule::LayoutAxis::{self, Whole};

pub use blocked::MATMUL_BLOCKED;
pub use dot::MATMUL_DOT;
pub use factorized::{GEMM_4_2_4, MATMUL_4_3_4};

/// Every algorithm that applies, as a choice of the search.
pub const MATMUL: Template = Template {
    name: "matmul",
    text: "blocks and packed panels, or scalar products along the reduction, whichever is faster",
    serves: is_product,
    space: |s| algorithm::space("matmul", s, &Product::of(&s.workload), ALGORITHMS),
    steps: |s, space, config| algorithm::steps(s, &Product::of(&s.workload), ALGORITHMS, space, config),
    estimate: Some(|s, space, config| algorithm::estimate(s, &Product::of(&s.workload), ALGORITHMS, space, config)),
};

const ALGORITHMS: &[Algorithm<Product>] = &[blocked::BLOCKED, dot::DOT];

/// Whether the stages of a workload are those of a product of matrices.
fn is_product(w: &Workload) -> bool {
    ["matmul", "batch_matmul", "dense"].contains(&w.operator().name)
}

/// A product of matrices as its operator's untransformed program has it: loops `i`, `j` and `k`, in a loop `b` where
/// there are many; where there is an epilogue, the stage `acc` is the product and loops `oi`, `oj`, `ob` finish it.
struct Product {
    /// Number of products, where there is a loop over them.
    batch: Option<i64>,
    m: i64,
    n: i64,
    k: i64,
    /// The factor of rows.
    a: Factor,
    /// The factor of columns.
    b: Factor,
    /// The buffer that is summed into.
    sum: &'static str,
    has_epilogue: bool,
}

/// One of the factors.
struct Factor {
    name: &'static str,
    /// Which of its dimensions counts rows or columns of the product.
    outer: usize,
    /// Which of its dimensions is summed over.
    k: usize,
    /// Whether the workload gives it ahead of time.
    is_constant: bool,
}

impl Product {
    fn of(w: &Workload) -> Product {
        let (a, b, output) = if w.operator().name == "dense" { ("X", "W", "Y") } else { ("A", "B", "C") };
        let is_batched = w.operator().name == "batch_matmul";
        let first = usize::from(is_batched);
        // Stored with k before the other dimension, or after it.
        let factor = |name: &'static str, k_first: bool| Factor {
            name,
            outer: first + usize::from(k_first),
            k: first + usize::from(!k_first),
            is_constant: w.constant.is_some_and(|c| c.eq_ignore_ascii_case(name)),
        };
        let (ta, tb) = match w.operator().name {
            "batch_matmul" => (w.size("ta") == 1, w.size("tb") == 1),
            "dense" => (false, true),
            _ => (false, false),
        };
        let has_epilogue = !w.epilogue().is_empty();
        Product {
            batch: is_batched.then(|| w.size("b")),
            m: w.size("m"),
            n: w.size("n"),
            k: w.size("k"),
            a: factor(a, ta),
            b: factor(b, !tb),
            sum: if has_epilogue { "acc" } else { output },
            has_epilogue,
        }
    }

    /// The loop over products, if any, then these loops.
    fn in_batch<'a>(&self, batch: &'a str, loops: &[&'a str]) -> Vec<&'a str> {
        self.batch.map(|_| batch).into_iter().chain(loops.iter().copied()).collect()
    }

    /// The layout of a copy of a factor that has these dimensions within each product.
    fn copy_layout(&self, axes: &[LayoutAxis]) -> Vec<LayoutAxis> {
        self.batch.map(|_| Whole(0)).into_iter().chain(axes.iter().copied()).collect()
    }
}

impl Factor {
    /// Whether what is summed over lies next to each other in memory.
    fn is_k_last(&self) -> bool {
        self.k > self.outer
    }
}
