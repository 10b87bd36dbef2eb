//! Matrix product with block-quantized weights of 4 or 8 bits, which have a scale per block of the reduction.

use super::builder::{ElementOps, ProgramBuilder};
use super::{NamedAxes, Operator, OperatorSize, StageSpec, Structure, Workload, WorkloadError};
use crate::dot::STEPS;
use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, UnaryOp};
use crate::index::Index;
use crate::program::{BufferId, Program, Role};

/// `C[m, n] = Σ_k A[m, k] · (W[k, n] − zero) · S[k / block, n]`, all row-major.
///
/// Two 4-bit weights share a byte: byte `4·o + i` of a column holds step `8·o + i` in its lower half and step
/// `8·o + 4 + i` in its upper half. The zero point is the middle of the value range, or `Z[k / block, n]`
/// with `zeros=1`.
///
/// With `int8=1`, each row of a block of A is first quantized to 8 bits: `s = max |a| / 127` and
/// `round(a · (127 / max |a|))`, in f32; if that quotient exceeds f32 ([`Packed::LEAST`]), the row is 0.
pub const PACKED_MATMUL: Operator = Operator {
    name: "packed_matmul",
    text: "C[m, n] = sum over k of A[m, k] * (W[k, n] - zero) * S[k / block, n], W of few bits",
    sizes: &[
        OperatorSize::new("m", "rows of A and C"),
        OperatorSize::new("n", "columns of W and C"),
        OperatorSize::new("k", "columns of A, rows of W; a multiple of the block"),
        OperatorSize { most: 8, ..OperatorSize::new("bits", "bits of W: 4 or 8").or(4) },
        OperatorSize {
            most: 256,
            ..OperatorSize::new("block", "steps of the sum with a common scale: a power of two from 16").or(32)
        },
        OperatorSize::flag("zeros", "whether each block of a column has a zero point"),
        OperatorSize::flag("int8", "whether rows of blocks of A are rounded to 8 bits"),
    ],
    constants: &["w", "s", "z"],
    has_layout: false,
    has_prologue: false,
    has_inexact: |_| false,
    check,
    structure,
};

/// Sizes of a product with block-quantized weights, before its epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Rows of A and C.
    pub m: i64,
    /// Columns of W and C.
    pub n: i64,
    /// Columns of A, the reduction.
    pub k: i64,
    /// Bits of a weight.
    pub bits: i64,
    /// Block size: reduction steps that share a scale.
    pub block: i64,
    /// Whether each block has a separate zero point.
    pub has_zeros: bool,
    /// Whether A is quantized to 8 bits dynamically.
    pub rounds: bool,
}

fn check(w: &Workload) -> Result<(), WorkloadError> {
    let wrong = |key: &str, expected: String| {
        let value = w.size(key).to_string();
        Err(WorkloadError::Value { key: key.to_owned(), value, expected })
    };
    let (bits, block, k) = (w.size("bits"), w.size("block"), w.size("k"));
    if bits != 4 && bits != 8 {
        return wrong("bits", "4 or 8".to_owned());
    }
    if block < 16 || block.count_ones() != 1 {
        return wrong("block", "a power of two from 16 to 256".to_owned());
    }
    if k % block != 0 {
        return wrong("k", format!("a multiple of the block, {block}"));
    }
    if w.dtype != DType::F32 || w.has_integer_factors() {
        let (key, value) = ("dtype".to_owned(), w.dtype_name().to_owned());
        return Err(WorkloadError::Value { key, value, expected: "f32 of packed_matmul".to_owned() });
    }
    Ok(())
}

fn structure(w: &Workload) -> Structure {
    let [m, n, k, bits, block] = ["m", "n", "k", "bits", "block"].map(|name| w.size(name));
    let [has_zeros, rounds] = ["zeros", "int8"].map(|name| w.size(name) == 1);
    Structure::Packed(Packed { m, n, k, bits, block, has_zeros, rounds })
}

fn load(buffer: BufferId, index: &[Index]) -> Expr {
    Expr::Load(buffer, index.to_vec())
}

fn mul(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Mul, a, b)
}

/// Rounds an intermediate value to f32.
fn single(x: Expr) -> Expr {
    Expr::cast(DType::F32, x)
}

impl Packed {
    /// Least magnitude of f32 by which 127 can be divided in f32. Blocks of A whose numbers are all smaller
    /// are quantized to 0.
    pub const LEAST: f32 = f32::from_bits(0x02fe_0001);
    /// Stage of the products summed over a block, before scaling.
    pub const PART: &'static str = "part";
    /// Stage of A quantized to 8 bits.
    pub const ROUNDED: &'static str = "a.round";
    /// Stage of the largest magnitude in each block of a row of A.
    pub const MOST: &'static str = "a.most";
    /// Stage of the sum of each block of a row of A, in quantized form.
    pub const ROW_SUM: &'static str = "a.sum";
    /// Loops of the stage [`PART`](Packed::PART): rows, columns, blocks, then groups of eight (or four)
    /// steps, halves of bytes, and the steps of a dot product instruction.
    pub const LOOPS: [&'static str; 6] = ["pi", "pj", "pb", "po", "ph", "pk"];
    /// Loops of the stage that sums the blocks: rows, columns, blocks.
    pub const SUM: [&'static str; 3] = ["i", "j", "kb"];
    /// Loops of the epilogue stage: rows, columns.
    pub const FINISH: [&'static str; 2] = ["oi", "oj"];

    /// Number of weights packed in a byte.
    pub fn weights_per_byte(&self) -> i64 {
        8 / self.bits
    }

    /// Default zero point of weights without explicit zero points.
    pub fn middle(&self) -> f64 {
        f64::from(1 << (self.bits - 1))
    }

    /// Name of the buffer that accumulates the product: the output, or the stage before the epilogue.
    pub fn sum(&self, w: &Workload) -> &'static str {
        if w.is_plain() { "C" } else { "acc" }
    }

    /// Adds stages for quantized A, for the scale of each block of a row, and for the sum of each block, with
    /// which the weights' zero point is subtracted.
    fn rounded_rows(&self, p: &mut ProgramBuilder, a: BufferId) -> [BufferId; 3] {
        let &Packed { m, k, block, .. } = self;
        let n_blocks = k / block;
        let load_a = |at: &[Index]| Expr::Load(a, vec![at[0].clone(), at[1].scale(block).add(&at[2])]);
        let blocks = |i: &'static str, kb: &'static str| [(i, m), (kb, n_blocks)];
        fn spec<'a>(name: &'a str, axes: NamedAxes<'a>) -> StageSpec<'a> {
            StageSpec { name, axes, reduce: None, role: Role::Temporary }
        }
        let axes = blocks("mi", "mb");
        let reduce = Some((ReduceOp::Max, &[("mk", block)][..]));
        let most = StageSpec { name: Packed::MOST, axes: &axes, reduce, role: Role::Temporary };
        let most = p.stage(most, |at| Expr::unary(UnaryOp::Abs, load_a(at)));
        let [of_scale, of_inverse] = [blocks("si", "sb"), blocks("vi", "vb")];
        let scale = p.stage(spec("a.scale", &of_scale), |at| {
            single(Expr::binary(BinaryOp::Div, load(most, at), Expr::Const(127.0)))
        });
        let inverse = p.stage(spec("a.inverse", &of_inverse), |at| {
            let least = Expr::Const(f64::from(Packed::LEAST));
            let is_none = Cond::Less(Box::new(load(most, at)), Box::new(least));
            let inverse = Expr::binary(BinaryOp::Div, Expr::Const(127.0), load(most, at));
            single(Expr::Select(Box::new(is_none), Box::new(Expr::Const(0.0)), Box::new(single(inverse))))
        });
        p.set_dtype(DType::I8);
        let axes = [("qi", m), ("qb", n_blocks), ("qk", block)];
        let rounded = p.stage(spec(Packed::ROUNDED, &axes), |at| {
            let multiple = single(mul(load_a(at), load(inverse, &at[..2])));
            Expr::cast(DType::I8, single(Expr::unary(UnaryOp::Round, multiple)))
        });
        p.set_dtype(DType::F32);
        let (axes, reduce) = (blocks("zi", "zb"), Some((ReduceOp::Sum, &[("zk", block)][..])));
        let sums = StageSpec { name: Packed::ROW_SUM, axes: &axes, reduce, role: Role::Temporary };
        let by = if self.has_zeros { -1.0 } else { -self.middle() };
        let sums = p.stage(sums, |at| mul(single(load(rounded, at)), Expr::Const(by)));
        [rounded, scale, sums]
    }

    pub(super) fn program(&self, w: &Workload) -> Program {
        let &Packed { m, n, k, block, .. } = self;
        let (n_blocks, each) = (k / block, self.weights_per_byte());
        let mut p = w.builder();
        p.set_dtype(DType::F32);
        let a = p.input("A", &[m, k]);
        p.set_dtype(DType::U8);
        let weights = p.input("W", &[k / each, n]);
        p.set_dtype(DType::F32);
        let scales = p.input("S", &[n_blocks, n]);
        let zeros = self.has_zeros.then(|| p.input("Z", &[n_blocks, n]));
        let n_results = n / w.sums_per_element();
        let operands = ElementOps::new(&mut p, w, n_results, &[m, n_results]);
        let of_a = |at: &[Index]| vec![at[0].clone(), at[1].scale(block).add(&at[2])];

        let of_rows = self.rounds.then(|| self.rounded_rows(&mut p, a));

        // The sum of each block.
        let [pi, pj, pb, po, ph, pk] = Packed::LOOPS;
        let axes = [(pi, m), (pj, n), (pb, n_blocks)];
        let inside = [(po, block / (STEPS * each)), (ph, each), (pk, STEPS)];
        let reduce = Some((ReduceOp::Sum, &inside[..]));
        p.set_dtype(if self.rounds { DType::I32 } else { DType::F32 });
        let part = StageSpec { name: Packed::PART, axes: &axes, reduce, role: Role::Temporary };
        let part = p.stage(part, |at| {
            let [i, j, kb, o, h, s] = [0, 1, 2, 3, 4, 5].map(|d| at[d].clone());
            let inside = o.scale(STEPS * each).add(&h.scale(STEPS)).add(&s);
            let row = kb.scale(block / each).add(&o.scale(STEPS)).add(&s);
            let byte = Expr::Load(weights, vec![row, j.clone()]);
            let weight = match each {
                1 => byte,
                _ => Expr::binary(BinaryOp::Nibble, byte, Expr::FromIndex(h)),
            };
            match of_rows {
                Some([rounded, ..]) => mul(Expr::Load(rounded, vec![i, kb, inside]), weight),
                None => {
                    let zero = zeros.map_or(Expr::Const(self.middle()), |zeros| load(zeros, &[kb.clone(), j]));
                    let weight = Expr::binary(BinaryOp::Sub, Expr::cast(DType::I32, weight), zero);
                    mul(Expr::Load(a, of_a(&[i, kb, inside])), weight)
                }
            }
        });

        // Their sum.
        let plain = w.is_plain();
        p.set_dtype(DType::F32);
        let axes = [("i", m), ("j", n)];
        let reduce = Some((ReduceOp::Sum, &[("kb", n_blocks)][..]));
        let role = if plain { Role::Output } else { Role::Temporary };
        let sum = p.stage(StageSpec { name: self.sum(w), axes: &axes, reduce, role }, |at| {
            let of_column = [at[2].clone(), at[1].clone()];
            let scale = load(scales, &of_column);
            let Some([_, of_row, row_sum]) = of_rows else { return mul(load(part, at), scale) };
            let of_block = [at[0].clone(), at[2].clone()];
            let row_sum = load(row_sum, &of_block);
            let row_sum = zeros.map_or(row_sum.clone(), |zeros| mul(row_sum, load(zeros, &of_column)));
            let centred = Expr::binary(BinaryOp::Add, single(load(part, at)), row_sum);
            mul(centred, single(mul(scale, load(of_row, &of_block))))
        });
        if !plain {
            operands.finish(&mut p, sum, "C");
        }
        p.finish()
    }
}
