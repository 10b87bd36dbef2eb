//! Elementwise operations fused into an operator, applied to each result before it is stored (epilogue) or to
//! each input element when it is read (prologue).

use crate::dtype::DType;
use crate::expr::{BinaryOp, Expr, UnaryOp};
use crate::interp::{apply_binary, apply_unary};
use crate::program::BufferId;
use std::f64::consts::FRAC_1_SQRT_2;
use std::fmt;

/// Elementwise function, possibly with an additional operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EpilogueFunction {
    /// x + bias\[channel\]
    Bias,
    /// x + R, an operand of the result's shape (residual connection).
    Add,
    /// max(x, 0)
    Relu,
    /// min(max(x, low), high)
    Clip,
    /// 1 / (1 + e⁻ˣ)
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// x · (1 + erf(x / √2)) / 2
    Gelu,
    /// x · scale\[channel\]
    Scale,
    /// x · M, an operand of the result's shape.
    Mul,
    /// a·x + b
    Linear,
    /// x if positive, else slope · x.
    LeakyRelu,
    /// min(max(a·x + b, 0), 1)
    HardSigmoid,
    /// x · min(max(a·x + b, 0), 1)
    HardSwish,
    /// x · sigmoid(x)
    Silu,
    /// x + init\[channel\] on integer accumulators: an integer bias.
    Init,
    /// x · dequant\[channel\], from integer accumulators to f32.
    Dequant,
    /// round(x) + zero point, ties to even, saturated to u8.
    QuantU8,
    /// round(x) + zero point, ties to even, saturated to i8.
    QuantI8,
    /// min(max(round(x), low), high), ties to even, kept in f32: intermediate quantization.
    Round,
    /// x + a·Q + b, with a u8 operand Q of the result's shape: a quantized residual connection.
    AddU8,
    /// x · y, where x and y are columns of one product (a gated linear unit); groups of columns of x and y
    /// alternate.
    Gated,
}

impl EpilogueFunction {
    /// Whether the function applies to integer accumulators only.
    pub fn is_of_integers(self) -> bool {
        let of_integers =
            [EpilogueFunction::Init, EpilogueFunction::Dequant, EpilogueFunction::QuantU8, EpilogueFunction::QuantI8];
        of_integers.contains(&self) || self == EpilogueFunction::AddU8
    }
}

/// Kind of operand that a function reads in addition to `x`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Vector with an element for each channel or column of the result.
    Channel,
    /// Tensor of the result's shape.
    Element,
    /// Scalar: an input of one element.
    One,
    /// Value of the paired column of the same product, which is not an input.
    Pair,
}

/// Row of the table of elementwise functions.
pub struct FunctionSpec {
    /// Function that the row describes.
    pub function: EpilogueFunction,
    /// Name in a workload's text.
    pub name: &'static str,
    /// One-line formula in terms of `x` and the parameters.
    pub text: &'static str,
    /// Parameters of the function, with their defaults.
    pub numbers: &'static [(&'static str, f64)],
    /// Whether the function accepts these numbers.
    accepts: fn([f64; 2]) -> bool,
    /// Kind and name of the additional operand, if any.
    pub operand: Option<(Operand, &'static str)>,
    /// Builds the value from an element of the result, an element of the additional operand (ignored if there
    /// is no operand) and the numbers.
    value: fn(Expr, Expr, [f64; 2]) -> Expr,
}

/// Default row, for a function without an additional operand.
const PLAIN: FunctionSpec = FunctionSpec {
    function: EpilogueFunction::Relu,
    name: "relu",
    text: "max(x, 0)",
    numbers: &[],
    accepts: |_| true,
    operand: None,
    value: |x, _, _| max(x, 0.0),
};

/// Table of the elementwise functions.
pub const FUNCTIONS: &[FunctionSpec] = &[
    FunctionSpec {
        function: EpilogueFunction::Bias,
        name: "bias",
        text: "x + bias[channel]",
        operand: Some((Operand::Channel, "bias")),
        value: |x, bias, _| add(x, bias),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Add,
        name: "add",
        text: "x + R[…], of the result's shape: a residual connection",
        operand: Some((Operand::Element, "R")),
        value: |x, r, _| add(x, r),
        ..PLAIN
    },
    PLAIN,
    FunctionSpec {
        function: EpilogueFunction::Clip,
        name: "clip",
        text: "min(max(x, low), high)",
        numbers: &[("low", 0.0), ("high", 6.0)],
        accepts: |[low, high]| low < high,
        value: |x, _, [low, high]| min(max(x, low), high),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Sigmoid,
        name: "sigmoid",
        text: "1 / (1 + exp(-x))",
        value: |x, _, _| sigmoid(x),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Tanh,
        name: "tanh",
        text: "tanh(x)",
        value: |x, _, _| Expr::unary(UnaryOp::Tanh, x),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Gelu,
        name: "gelu",
        text: "x * (1 + erf(x / sqrt(2))) / 2",
        value: |x, _, _| {
            let erf = Expr::unary(UnaryOp::Erf, mul(x.clone(), Expr::Const(FRAC_1_SQRT_2)));
            mul(mul(Expr::Const(0.5), x), add(Expr::Const(1.0), erf))
        },
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Scale,
        name: "scale",
        text: "x * scale[channel]",
        operand: Some((Operand::Channel, "scale")),
        value: |x, scale, _| mul(x, scale),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Mul,
        name: "mul",
        text: "x * M[…], of the result's shape: a gate",
        operand: Some((Operand::Element, "M")),
        value: |x, m, _| mul(x, m),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Linear,
        name: "linear",
        text: "factor * x + term",
        numbers: &[("factor", 1.0), ("term", 0.0)],
        value: |x, _, [factor, term]| linear(x, factor, term),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::LeakyRelu,
        name: "leaky_relu",
        text: "max(x, 0) + slope * min(x, 0)",
        numbers: &[("slope", 0.01)],
        value: |x, _, [slope, _]| add(max(x.clone(), 0.0), mul(Expr::Const(slope), min(x, 0.0))),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::HardSigmoid,
        name: "hard_sigmoid",
        text: "min(max(factor * x + term, 0), 1)",
        numbers: &[("factor", 0.2), ("term", 0.5)],
        value: |x, _, [factor, term]| hard_sigmoid(x, factor, term),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::HardSwish,
        name: "hard_swish",
        text: "x * min(max(factor * x + term, 0), 1)",
        numbers: &[("factor", 1.0 / 6.0), ("term", 0.5)],
        value: |x, _, [factor, term]| mul(x.clone(), hard_sigmoid(x, factor, term)),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Silu,
        name: "silu",
        text: "x * sigmoid(x)",
        value: |x, _, _| mul(x.clone(), sigmoid(x)),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Init,
        name: "init",
        text: "x + init[channel], of integers",
        operand: Some((Operand::Channel, "init")),
        value: |x, init, _| cast(DType::I32, add(x, init)),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Dequant,
        name: "dequant",
        text: "x * dequant[channel], of integers, in f32",
        operand: Some((Operand::Channel, "dequant")),
        value: |x, factor, _| cast(DType::F32, mul(cast(DType::F32, x), factor)),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::QuantU8,
        name: "quant_u8",
        text: "round(x) + zero, ties to even, saturated to u8",
        operand: Some((Operand::One, "zero")),
        value: |x, zero, _| quantized(x, zero, DType::U8, [0.0, 255.0]),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::QuantI8,
        name: "quant_i8",
        text: "round(x) + zero, ties to even, saturated to i8",
        operand: Some((Operand::One, "zero")),
        value: |x, zero, _| quantized(x, zero, DType::I8, [-128.0, 127.0]),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Round,
        name: "round",
        text: "min(max(round(x), low), high), ties to even: quantized on the way",
        numbers: &[("low", -128.0), ("high", 127.0)],
        accepts: |[low, high]| low < high,
        value: |x, _, [low, high]| min(max(Expr::unary(UnaryOp::Round, x), low), high),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::AddU8,
        name: "add_u8",
        text: "x + factor * Q[…] + term, of u8 of the result's shape, to sums of integers: a quantized residual",
        numbers: &[("factor", 1.0), ("term", 0.0)],
        operand: Some((Operand::Element, "Q")),
        value: |x, q, [factor, term]| add(x, linear(cast(DType::F32, q), factor, term)),
        ..PLAIN
    },
    FunctionSpec {
        function: EpilogueFunction::Gated,
        name: "gated",
        text: "x * y of products in pairs: so many columns of x, then those of y, in turns; the result has those of x",
        numbers: &[("columns", 16.0)],
        accepts: |[columns, _]| [4.0, 8.0, 16.0, 32.0, 64.0].contains(&columns),
        operand: Some((Operand::Pair, "y")),
        value: |x, y, _| mul(x, y),
    },
];

fn cast(dtype: DType, x: Expr) -> Expr {
    Expr::Cast(dtype, Box::new(x))
}

/// Quantizes to an integer type that holds the values between the bounds. The zero point is of the same type,
/// so that code generation can add integers.
fn quantized(x: Expr, zero: Expr, dtype: DType, [low, high]: [f64; 2]) -> Expr {
    let zero = cast(DType::F32, cast(dtype, zero));
    let shifted = cast(DType::F32, add(Expr::unary(UnaryOp::Round, x), zero));
    cast(dtype, cast(DType::F32, min(max(shifted, low), high)))
}

fn add(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Add, a, b)
}

fn mul(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Mul, a, b)
}

fn max(x: Expr, low: f64) -> Expr {
    Expr::binary(BinaryOp::Max, x, Expr::Const(low))
}

fn min(x: Expr, high: f64) -> Expr {
    Expr::binary(BinaryOp::Min, x, Expr::Const(high))
}

/// Line through a point. Without a term, nothing is added: an addition that follows then fuses with the
/// product.
fn linear(x: Expr, factor: f64, term: f64) -> Expr {
    let product = mul(x, Expr::Const(factor));
    if term == 0.0 { product } else { add(product, Expr::Const(term)) }
}

fn hard_sigmoid(x: Expr, factor: f64, term: f64) -> Expr {
    min(max(linear(x, factor, term), 0.0), 1.0)
}

fn sigmoid(x: Expr) -> Expr {
    let power = Expr::unary(UnaryOp::Exp, Expr::unary(UnaryOp::Neg, x));
    Expr::binary(BinaryOp::Div, Expr::Const(1.0), add(Expr::Const(1.0), power))
}

/// Elementwise operation: a function with the values of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epilogue {
    function: EpilogueFunction,
    /// Parameters of the function, then zeros.
    numbers: [f64; 2],
}

impl Epilogue {
    /// Maximum number of operations of one epilogue; some operations duplicate their operand.
    const MOST: usize = 12;

    /// Creates an operation with these parameters, or with the defaults if `numbers` is empty.
    ///
    /// `None` if the function does not accept the numbers.
    pub fn new(function: EpilogueFunction, numbers: &[f64]) -> Option<Epilogue> {
        let spec = spec_of(function);
        let given: Vec<f64> = match numbers {
            [] => spec.numbers.iter().map(|(_, default)| *default).collect(),
            numbers => numbers.to_vec(),
        };
        let mut numbers = [0.0; 2];
        if given.len() != spec.numbers.len() || !given.iter().all(|x| x.is_finite()) {
            return None;
        }
        // Adding zero turns a negative zero into a positive one.
        numbers.iter_mut().zip(given).for_each(|(number, given)| *number = given + 0.0);
        (spec.accepts)(numbers).then_some(Epilogue { function, numbers })
    }

    /// Function of the operation.
    pub fn function(&self) -> EpilogueFunction {
        self.function
    }

    /// Values of the parameters.
    pub fn numbers(&self) -> &[f64] {
        &self.numbers[..self.spec().numbers.len()]
    }

    /// Replaces scales and summands by a half, as a representative of all values. Zero and one stay, as they
    /// cost no operation.
    pub(super) fn alike(&self) -> Epilogue {
        match self.function {
            EpilogueFunction::Round => Epilogue::new(EpilogueFunction::Round, &[]).expect("defaults are accepted"),
            EpilogueFunction::Linear | EpilogueFunction::LeakyRelu | EpilogueFunction::AddU8 => {
                let numbers = self.numbers.map(|x| if [0.0, 1.0].contains(&x) { x } else { 0.5 });
                Epilogue { numbers, ..*self }
            }
            _ => *self,
        }
    }

    /// Kind of the additional operand, if any.
    pub fn operand(&self) -> Option<Operand> {
        Some(self.spec().operand?.0)
    }

    fn spec(&self) -> &'static FunctionSpec {
        spec_of(self.function)
    }

    /// Group size in columns, if the epilogue [gates](EpilogueFunction::Gated) columns by others.
    pub fn pairs_of(list: &[Epilogue]) -> Option<i64> {
        let gate = list.iter().find(|operation| operation.function == EpilogueFunction::Gated)?;
        Some(gate.numbers[0] as i64)
    }

    /// Parses `a+b+…`; the error describes the expected text.
    pub(super) fn parse_list(text: &str) -> Result<Vec<Epilogue>, String> {
        let list = text.split('+').map(|word| Epilogue::parse(word.trim())).collect::<Option<Vec<_>>>();
        let list = list.ok_or_else(|| {
            let form = |spec: &FunctionSpec| match spec.numbers {
                [] => spec.name.to_owned(),
                numbers => {
                    let names: Vec<&str> = numbers.iter().map(|(name, _)| *name).collect();
                    format!("{0} or {0}({1})", spec.name, names.join(";"))
                }
            };
            format!("{}, joined by +", FUNCTIONS.iter().map(form).collect::<Vec<_>>().join(", "))
        })?;
        Epilogue::check_list(&list).map(|()| list)
    }

    /// Checks that these operations can form an epilogue; the error describes the expected list.
    pub(super) fn check_list(list: &[Epilogue]) -> Result<(), String> {
        match list.len() <= Epilogue::MOST {
            true => Ok(()),
            false => Err(format!("at most {} operations", Epilogue::MOST)),
        }
    }

    /// Element type of the result of these operations on sums of a type; the error describes the expected
    /// list.
    pub(super) fn result_of(sums: DType, list: &[Epilogue]) -> Result<DType, String> {
        let mut dtype = sums;
        for epilogue in list {
            dtype = match (epilogue.function, dtype) {
                (EpilogueFunction::Init, DType::I32) => DType::I32,
                (EpilogueFunction::Dequant, DType::I32) => DType::F32,
                (EpilogueFunction::QuantU8, DType::F32) if !sums.is_float() => DType::U8,
                (EpilogueFunction::QuantI8, DType::F32) if !sums.is_float() => DType::I8,
                (EpilogueFunction::Gated, _) if !sums.is_float() => return Err("no pairs of integers".to_owned()),
                (function, _) if sums.is_float() && function.is_of_integers() => {
                    return Err("functions of floating-point numbers".to_owned());
                }
                (
                    EpilogueFunction::Init
                    | EpilogueFunction::Dequant
                    | EpilogueFunction::QuantU8
                    | EpilogueFunction::QuantI8,
                    _,
                )
                | (_, DType::I32 | DType::U8 | DType::I8) => {
                    return Err("init, dequant, other functions, quant_u8 or quant_i8, in this order".to_owned());
                }
                (_, dtype) => dtype,
            };
        }
        Ok(dtype)
    }

    /// Element type of the additional operand for sums of a type.
    pub(super) fn operand_dtype(&self, sums: DType) -> DType {
        match self.function {
            EpilogueFunction::Init => DType::I32,
            EpilogueFunction::AddU8 => DType::U8,
            _ if sums.is_float() => sums,
            _ => DType::F32,
        }
    }

    /// Text that [`Epilogue::parse_list`] parses.
    pub(super) fn list_to_string(list: &[Epilogue]) -> String {
        list.iter().map(Epilogue::to_string).collect::<Vec<_>>().join("+")
    }

    /// Parses a prologue, in the syntax of [`Epilogue::parse_list`].
    pub(super) fn parse_prologue(text: &str) -> Result<Vec<Epilogue>, String> {
        let list = Epilogue::parse_list(text)?;
        Epilogue::check_prologue(&list).map(|()| list)
    }

    /// Checks that these operations can form a prologue; the error describes the expected list.
    pub(super) fn check_prologue(list: &[Epilogue]) -> Result<(), String> {
        let is_of_result = |operand| matches!(operand, Some(Operand::Element | Operand::Pair));
        if list.iter().any(|operation| is_of_result(operation.operand())) {
            let names = FUNCTIONS.iter().filter(|spec| !is_of_result(spec.operand.map(|(kind, _)| kind)));
            let names: Vec<&str> = names.map(|spec| spec.name).collect();
            return Err(format!("{}, which read nothing of the result's shape", names.join(", ")));
        }
        Epilogue::check_list(list)
    }

    /// Additional operands of a prologue, in the form of [`Epilogue::operands`].
    pub fn prologue_operands(list: &[Epilogue]) -> Vec<(usize, String, Operand)> {
        let operands = Epilogue::operands(list).into_iter();
        operands.map(|(at, name, kind)| (at, format!("in_{name}"), kind)).collect()
    }

    /// Additional operands of these operations in argument order: per-channel operands, then the others. Each
    /// has the index of its operation, its name and its kind.
    pub fn operands(list: &[Epilogue]) -> Vec<(usize, String, Operand)> {
        let mut operands: Vec<(usize, String, Operand)> = Vec::new();
        for (at, epilogue) in list.iter().enumerate() {
            if let Some((kind, name)) = epilogue.spec().operand.filter(|(kind, _)| *kind != Operand::Pair) {
                let earlier = list[..at].iter().filter(|other| other.function == epilogue.function).count();
                let name = if earlier == 0 { name.to_owned() } else { format!("{name}{}", earlier + 1) };
                operands.push((at, name, kind));
            }
        }
        operands.sort_by_key(|(.., kind)| *kind == Operand::Element);
        operands
    }

    fn parse(word: &str) -> Option<Epilogue> {
        let (name, numbers) = match word.split_once('(') {
            None => (word, None),
            Some((name, numbers)) => (name, Some(numbers.strip_suffix(')')?)),
        };
        let spec = FUNCTIONS.iter().find(|spec| spec.name == name)?;
        let Some(numbers) = numbers else { return Epilogue::new(spec.function, &[]) };
        let numbers: Vec<f64> = numbers.split(';').map(|text| text.trim().parse().ok()).collect::<Option<_>>()?;
        Epilogue::new(spec.function, &numbers)
    }

    /// Applies the operation to a value; `operand` is the element of the additional operand, if any.
    pub(super) fn apply(&self, x: Expr, operand: Option<Expr>) -> Expr {
        (self.spec().value)(x, operand.unwrap_or(Expr::Const(0.0)), self.numbers)
    }

    /// Evaluates the operation on a number; `operand` is the element of the additional operand, if any.
    pub fn value(&self, x: f64, operand: Option<f64>) -> f64 {
        fn value(expr: &Expr, loaded: [f64; 2]) -> f64 {
            match expr {
                Expr::Const(x) => *x,
                Expr::Load(b, _) => loaded[b.0 as usize],
                Expr::Unary(op, x) => apply_unary(*op, value(x, loaded)),
                Expr::Binary(op, a, b) => apply_binary(*op, value(a, loaded), value(b, loaded)),
                Expr::Cast(dtype, x) => dtype.round(value(x, loaded)),
                Expr::Gather(..) | Expr::FromIndex(_) | Expr::Select(..) => {
                    unreachable!("functions are made of arithmetic alone")
                }
            }
        }
        let load = |buffer| Expr::Load(BufferId(buffer), Vec::new());
        value(&self.apply(load(0), Some(load(1))), [x, operand.unwrap_or(0.0)])
    }
}

fn spec_of(function: EpilogueFunction) -> &'static FunctionSpec {
    FUNCTIONS.iter().find(|spec| spec.function == function).expect("every function has a row")
}

impl fmt::Display for Epilogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.spec().name)?;
        if self.numbers().iter().eq(self.spec().numbers.iter().map(|(_, default)| default)) {
            return Ok(());
        }
        let numbers: Vec<String> = self.numbers().iter().map(f64::to_string).collect();
        write!(f, "({})", numbers.join(";"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_has_one_row_and_one_text() {
        for (at, spec) in FUNCTIONS.iter().enumerate() {
            assert!(FUNCTIONS[..at].iter().all(|other| (other.function, other.name) != (spec.function, spec.name)));
            let plain = Epilogue::new(spec.function, &[]).expect("its own numbers are accepted");
            assert_eq!(plain.to_string(), spec.name);
            let other = |change: fn(f64) -> f64| {
                let numbers: Vec<f64> = spec.numbers.iter().map(|(_, default)| change(*default)).collect();
                Epilogue::new(spec.function, &numbers)
            };
            // Numbers of columns must be powers of two.
            let other = if spec.name == "gated" { other(|x| 2.0 * x) } else { other(|x| x + 0.1 / 3.0) };
            let other = other.expect("numbers near its own are accepted");
            for epilogue in [plain, other] {
                assert_eq!(Epilogue::parse(&epilogue.to_string()), Some(epilogue));
            }
        }
        assert_eq!(Epilogue::parse("clip(0;6)"), Epilogue::parse("clip"));
        for text in
            ["", "clip(", "clip(1)", "clip(2;1)", "clip(0;nan)", "relu()", "relu(1)", "leaky_relu(0.1;0.2)", "gated(5)"]
        {
            assert_eq!(Epilogue::parse(text), None, "{text}");
        }
    }

    #[test]
    fn operands_have_names_of_their_own_and_channels_come_first() {
        let list = Epilogue::parse_list("add+bias+relu+add+scale+bias").unwrap();
        let operands: Vec<_> = Epilogue::operands(&list).into_iter().map(|(at, name, _)| (at, name)).collect();
        let expected = [(1, "bias"), (4, "scale"), (5, "bias2"), (0, "R"), (3, "R2")];
        assert_eq!(operands, expected.map(|(at, name)| (at, name.to_owned())));
    }

    /// Checks numeric values against the definitions.
    #[test]
    fn functions_have_the_values_of_their_definitions() {
        let is = |text: &str, x: f64, operand: f64, expected: f64| {
            let value = Epilogue::parse(text).unwrap().value(x, Some(operand));
            assert!((value - expected).abs() < 1e-15, "{text} of {x}: {value} instead of {expected}");
        };
        is("bias", 2.0, 3.0, 5.0);
        is("add", 2.0, 3.0, 5.0);
        is("scale", 2.0, 3.0, 6.0);
        is("mul", 2.0, 3.0, 6.0);
        is("linear(2;3)", 4.0, 0.0, 11.0);
        is("relu", -2.0, 0.0, 0.0);
        is("leaky_relu", -2.0, 0.0, -0.02);
        is("leaky_relu(0.5)", 3.0, 0.0, 3.0);
        is("clip", 7.0, 0.0, 6.0);
        is("hard_sigmoid", 1.0, 0.0, 0.7);
        is("hard_sigmoid", -3.0, 0.0, 0.0);
        is("hard_swish", 1.0, 0.0, 2.0 / 3.0);
        is("hard_swish", 4.0, 0.0, 4.0);
        is("sigmoid", 0.0, 0.0, 0.5);
        is("silu", 1.0, 0.0, 1.0 / (1.0 + (-1f64).exp()));
        is("tanh", 0.5, 0.0, 0.5f64.tanh());
        is("round", 2.5, 0.0, 2.0);
        is("round(-3;4)", 9.0, 0.0, 4.0);
        is("add_u8(0.5;1)", 2.0, 6.0, 6.0);
        is("gated", 2.0, 3.0, 6.0);
        let zero = Epilogue::parse("linear(2;0)").unwrap().value(-0.0, None);
        assert!(zero.is_sign_negative(), "a term of zero is not added");
        // The normal distribution's share below one standard deviation.
        is("gelu", 1.0, 0.0, 0.841_344_746_068_542_9);
    }
}
