//! Operators: ONNX names, import of attributes, shape inference and evaluation of each.
//!
//! A row of [`OPERATORS`] imports an ONNX operator of any version as an [`Op`], with its attributes
//! normalised to the newest version. Shape inference and evaluation are its implementation of [`Operation`].

// Numeric code reads several lists by one index.
#![allow(clippy::needless_range_loop)]

mod attention;
mod attributes;
mod cast;
mod control;
mod conv;
mod einsum;
mod elementwise;
mod experts;
mod gather;
mod grouped;
mod loss;
mod matmul;
mod movement;
mod norm;
mod packed;
mod pool;
mod quantize;
mod random;
mod recurrent;
mod reduce;
mod repeat;
mod resize;
mod sample;
mod select;
mod sequence;
mod shape;
mod signal;
mod trees;
mod util;
mod window;

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

pub use attention::*;
pub use attributes::{Attribute, Attributes, Import};
pub use cast::*;
pub use control::*;
pub use conv::*;
pub use einsum::*;
pub use elementwise::*;
pub use experts::*;
pub use gather::*;
pub use grouped::*;
pub use loss::*;
pub use matmul::*;
pub use movement::*;
pub use norm::*;
pub use packed::*;
pub use pool::*;
pub use quantize::*;
pub use random::*;
pub use recurrent::*;
pub use reduce::*;
pub use repeat::*;
pub use resize::*;
pub use sample::*;
pub use select::*;
pub use sequence::Sequence;
pub(crate) use sequence::{Elements, Item, no_tensor};
pub use shape::*;
pub use signal::*;
pub use trees::*;
pub use util::axis;
pub use window::{AutoPad, Geometry, WindowAttributes};

/// Row of the table of ONNX operators: a name with its versions, and the import.
#[derive(Debug)]
pub struct Operator {
    /// Domain; ONNX's own is empty.
    pub domain: &'static str,
    /// Name in ONNX.
    pub name: &'static str,
    /// Opset versions in which the operator changed, beginning with the first supported one.
    pub since: &'static [i64],
    /// Number of inputs.
    pub n_inputs: RangeInclusive<usize>,
    /// Import function: makes the operator of a node's attributes.
    pub import: fn(&Import) -> Result<Op, OpError>,
}

/// Makes a row of ONNX's own domain.
const fn row(
    name: &'static str,
    since: &'static [i64],
    n_inputs: RangeInclusive<usize>,
    import: fn(&Import) -> Result<Op, OpError>,
) -> Operator {
    Operator { domain: "", name, since, n_inputs, import }
}

/// Unlimited number of inputs.
const ANY: usize = usize::MAX;

/// Supported ONNX operators, one slice per module.
pub const OPERATORS: &[&[Operator]] = &[
    attention::ROWS,
    cast::ROWS,
    control::ROWS,
    conv::ROWS,
    einsum::ROWS,
    elementwise::ROWS,
    experts::ROWS,
    gather::ROWS,
    grouped::ROWS,
    loss::ROWS,
    matmul::ROWS,
    movement::ROWS,
    norm::ROWS,
    packed::ROWS,
    pool::ROWS,
    quantize::ROWS,
    random::ROWS,
    recurrent::ROWS,
    reduce::ROWS,
    repeat::ROWS,
    resize::ROWS,
    sample::ROWS,
    select::ROWS,
    sequence::ROWS,
    shape::ROWS,
    signal::ROWS,
];

/// Row of a supported operator; `None` for an unknown name.
pub fn find(domain: &str, name: &str) -> Option<&'static Operator> {
    OPERATORS.iter().flat_map(|rows| rows.iter()).find(|row| row.name == name && row.domain == domain)
}

/// Knowledge of an operator's input during inference: its type, and its value if it is constant.
#[derive(Debug, Clone, Copy)]
pub struct Fact<'a> {
    /// Type of the input.
    pub ty: &'a TensorType,
    /// Elements, if the input is constant.
    pub value: Option<&'a Tensor>,
}

impl<'a> Fact<'a> {
    /// Dimensions of the input.
    pub fn shape(&self) -> &'a [usize] {
        &self.ty.shape
    }

    /// Type of its elements.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }
}

/// Inputs of an operator, in its order; `None` for omitted optional inputs.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a>(pub &'a [Option<Fact<'a>>]);

impl<'a> Inputs<'a> {
    /// Number of inputs, omitted ones included.
    pub fn n_inputs(&self) -> usize {
        self.0.len()
    }

    /// Optional input; `None` if it is omitted.
    pub fn optional(&self, at: usize) -> Option<Fact<'a>> {
        self.0.get(at).copied().flatten()
    }

    /// Required input.
    ///
    /// # Errors
    /// If the input is missing.
    pub fn fact(&self, at: usize) -> Result<Fact<'a>, OpError> {
        self.optional(at).ok_or_else(|| invalid!("its input {} is missing", at + 1))
    }

    /// Type of an input.
    ///
    /// # Errors
    /// If the input is missing.
    pub fn ty(&self, at: usize) -> Result<&'a TensorType, OpError> {
        Ok(self.fact(at)?.ty)
    }

    /// Dimensions of an input.
    ///
    /// # Errors
    /// If the input is missing.
    pub fn shape(&self, at: usize) -> Result<&'a [usize], OpError> {
        Ok(self.fact(at)?.shape())
    }

    /// Elements of an input.
    ///
    /// # Errors
    /// If the input is missing, or its elements are not known yet.
    pub fn tensor(&self, at: usize) -> Result<&'a Tensor, OpError> {
        self.fact(at)?.value.ok_or(OpError::NeedsValue(at))
    }

    /// Elements of an optional input; `None` if it is omitted.
    ///
    /// # Errors
    /// If the elements are not known yet.
    pub fn optional_tensor(&self, at: usize) -> Result<Option<&'a Tensor>, OpError> {
        self.optional(at).map(|fact| fact.value.ok_or(OpError::NeedsValue(at))).transpose()
    }

    /// Elements of an optional input as integers; `None` if it is omitted.
    ///
    /// # Errors
    /// If the elements are not known yet.
    pub fn optional_i64s(&self, at: usize) -> Result<Option<Vec<i64>>, OpError> {
        Ok(self.optional_tensor(at)?.map(Tensor::i64s))
    }
}

/// Semantics of an operator: type inference and evaluation.
pub trait Operation: Debug {
    /// Infers the types of all outputs, including those that the node omits.
    ///
    /// # Errors
    /// If inputs do not fit or are not supported, or required values are not known.
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError>;

    /// Evaluates all outputs, including those that the node omits. The value of every input must be known.
    /// Floating-point arithmetic is f64, rounded to the output's type at the end; integers are exact.
    ///
    /// # Errors
    /// As [`Operation::infer`].
    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError>;
}

macro_rules! ops {
    ($($name:ident: $text:literal,)*) => {
        /// Operator of a node, with its attributes normalised to the newest opset.
        #[derive(Debug, Clone)]
        #[non_exhaustive]
        pub enum Op {
            $(#[doc = $text] $name($name),)*
        }

        impl Op {
            /// Semantics of the operator.
            pub fn operation(&self) -> &dyn Operation {
                match self {
                    $(Op::$name(operation) => operation,)*
                }
            }
        }

        $(impl From<$name> for Op {
            fn from(operation: $name) -> Op {
                Op::$name(operation)
            }
        })*
    };
}

ops! {
    AffineGrid: "Coordinates of an affine map.",
    Attention: "Scaled dot-product attention.",
    BatchNormalization: "Channels scaled and moved by statistics.",
    Binary: "A function of two tensors, element by element.",
    BitCast: "The same bits as another type.",
    Cast: "Another element type.",
    CenterCropPad: "Cut or padded around the centre.",
    Clip: "Kept between bounds.",
    Col2Im: "Sums of overlapping blocks.",
    Compress: "Slices for which a condition holds.",
    Concat: "Tensors one behind the other.",
    ConstantOfShape: "One number everywhere.",
    Conv: "Convolution.",
    CosineWindow: "A window of signal processing.",
    ConvInteger: "Convolution of integers with zero points.",
    ConvTranspose: "Transposed convolution.",
    Cumulative: "Running sums or products.",
    DepthToSpace: "Channels to places.",
    DequantizeLinear: "Integers as multiples of a scale.",
    Det: "Determinants.",
    Dft: "Discrete Fourier transform.",
    Dropout: "Nothing, at inference.",
    DynamicQuantizeLinear: "Numbers as 8 bits, by a scale of their range.",
    Einsum: "Sums of products by indices.",
    Expand: "Repeated along dimensions of size 1.",
    Experts: "Networks of which each token passes through a few.",
    EyeLike: "Ones on a diagonal.",
    Flatten: "Two dimensions.",
    Gather: "Slices by index.",
    GatherBlockQuantized: "Slices of a table of few bits by index.",
    GatherElements: "Elements by index.",
    GatherNd: "Slices by index tuples.",
    Gemm: "A matrix product with a matrix added.",
    GlobalPool: "One number of each channel.",
    GridSample: "Samples of an image at coordinates.",
    GroupNormalization: "Groups of channels normalised.",
    GroupQueryAttention: "Attention in groups of heads, with a cache.",
    If: "One of two graphs.",
    InstanceNormalization: "Channels of each image normalised.",
    KeyMask: "Numbers added for keys that an attention does not see.",
    LayerNormalization: "The last dimensions normalised.",
    LpNormalization: "Divided by the norm along a dimension.",
    Loop: "A graph that repeats.",
    Lrn: "Divided by the neighbouring channels' energy.",
    MatMul: "Products of matrices.",
    MatMulInteger: "Products of integer matrices with zero points.",
    MatMulNBits: "Products with weights of few bits.",
    MaxUnpool: "Numbers back where a pool found them.",
    MeanVarianceNormalization: "Mean 0 and variance 1.",
    MelWeightMatrix: "From frequencies to mel bands.",
    NegativeLogLikelihoodLoss: "The loss of labels, of logarithms.",
    NonMaxSuppression: "Boxes that overlap no better one.",
    NonZero: "Where elements are not 0.",
    OneHot: "A place of each index.",
    Pad: "Borders added.",
    PairwiseCoupling: "Probabilities of classes, of those of their pairs.",
    Pool: "The maximum, mean or norm of each window.",
    QLinearConv: "Convolution of quantized numbers.",
    QLinearMatMul: "Product of quantized matrices.",
    QuantizeLinear: "Multiples of a scale as integers.",
    Random: "Random numbers.",
    Range: "Numbers with equal steps.",
    Recurrent: "RNN, GRU or LSTM.",
    Reduce: "One number of many.",
    ArgReduce: "Where the largest or smallest is.",
    Reshape: "The same elements in another shape.",
    Resize: "An image in another size.",
    ReverseSequence: "The beginnings of sequences reversed.",
    RmsNormalization: "Divided by the root of the mean square.",
    RoiAlign: "Pooled regions.",
    RotaryEmbedding: "Pairs turned by their position.",
    ScatterElements: "Elements replaced by index.",
    ScatterNd: "Slices replaced by index tuples.",
    Scan: "A graph for each place of a dimension.",
    Select: "One of two tensors, by a truth.",
    Sequence: "Tensors in a sequence.",
    Shape: "The dimensions of a tensor.",
    Size: "The number of elements.",
    Slice: "A part of each dimension.",
    Softmax: "Exponentials that add up to 1, their logarithms, or the place of the largest.",
    SoftmaxCrossEntropyLoss: "The loss of labels, of scores.",
    SpaceToDepth: "Places to channels.",
    Split: "Parts one behind the other.",
    Squeeze: "Dimensions of size 1 left out.",
    Stft: "Fourier transforms of windows.",
    TensorScatter: "A cache with new entries.",
    Tile: "Repeated.",
    TopK: "The largest or smallest.",
    TreeEnsemble: "Decision trees, whose weights are combined.",
    Transpose: "Dimensions in another order.",
    Trilu: "A triangle of each matrix.",
    Unary: "A function of each element.",
    Unique: "Each value once.",
    Unknown: "An operator that is not supported.",
    Unsqueeze: "Dimensions of size 1 put in.",
    Variadic: "A function of any number of tensors, element by element.",
    Where: "One of two tensors, element by element.",
}

impl Op {
    /// `Identity` operator.
    pub fn identity() -> Op {
        Op::Unary(Unary::Identity)
    }
}

/// String table: tensors of strings hold indices into such a list.
pub type Texts = Arc<[String]>;

impl Op {
    /// String table of the outputs, given those of the inputs: operators that only move elements keep the
    /// table.
    ///
    /// # Errors
    /// If the operator would compute with the indices of strings, or mix several string tables.
    pub fn texts(&self, inputs: &[Option<&Texts>]) -> Result<Option<Texts>, OpError> {
        if inputs.iter().all(Option::is_none) {
            return Ok(None);
        }
        let (moved, others) = match self {
            Op::Unary(Unary::Identity)
            | Op::Expand(_)
            | Op::Flatten(_)
            | Op::Gather(_)
            | Op::GatherElements(_)
            | Op::GatherNd(_)
            | Op::Reshape(_)
            | Op::Slice(_)
            | Op::Squeeze(_)
            | Op::Tile(_)
            | Op::Transpose(_)
            | Op::Unsqueeze(_) => inputs.split_at(1),
            Op::Where(_) if inputs[0].is_none() => (&inputs[1..], &inputs[..0]),
            Op::Concat(_) => (inputs, &inputs[..0]),
            _ => (&inputs[..0], inputs),
        };
        match moved {
            [first, rest @ ..] if rest.iter().all(|texts| texts == first) && others.iter().all(Option::is_none) => {
                Ok(first.cloned())
            }
            _ => Err(unsupported!("texts are only moved, and not computed with (give the model numbers)")),
        }
    }
}
