//! What is done to each element of a result before it is stored.

use crate::expr::{BinaryOp, Expr, UnaryOp};
use std::f64::consts::FRAC_1_SQRT_2;
use std::fmt;

/// One operation of an epilogue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Epilogue {
    /// Adds `bias[k]`, an input of its own, by output channel or column.
    Bias,
    /// Adds `R`, an input of the output's shape: a residual connection.
    Add,
    /// max(x, 0)
    Relu,
    /// min(max(x, low), high)
    Clip {
        /// Smallest result.
        low: f64,
        /// Largest result.
        high: f64,
    },
    /// 1 / (1 + e⁻ˣ)
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
    /// x · (1 + erf(x / √2)) / 2
    Gelu,
}

impl Epilogue {
    /// `clip` without bounds.
    const CLIP: Epilogue = Epilogue::Clip { low: 0.0, high: 6.0 };

    const NAMES: [(Epilogue, &'static str); 7] = [
        (Epilogue::Bias, "bias"),
        (Epilogue::Add, "add"),
        (Epilogue::Relu, "relu"),
        (Epilogue::CLIP, "clip"),
        (Epilogue::Sigmoid, "sigmoid"),
        (Epilogue::Tanh, "tanh"),
        (Epilogue::Gelu, "gelu"),
    ];

    /// Operations of one epilogue, which repeat their operand, at most.
    const MOST: usize = 8;

    /// Reads `a+b+…`; the error says what is expected.
    pub(super) fn parse_list(text: &str) -> Result<Vec<Epilogue>, String> {
        let list = text.split('+').map(|word| Epilogue::parse(word.trim())).collect::<Option<Vec<_>>>();
        let list = list.ok_or_else(|| {
            let names: Vec<&str> = Epilogue::NAMES.iter().map(|(_, name)| *name).collect();
            format!("{} or clip(low;high), joined by +", names.join(", "))
        })?;
        if list.len() > Epilogue::MOST {
            return Err(format!("at most {} operations", Epilogue::MOST));
        }
        match [Epilogue::Bias, Epilogue::Add].iter().find(|e| list.iter().filter(|x| x == e).count() > 1) {
            Some(twice) => Err(format!("{twice} at most once")),
            None => Ok(list),
        }
    }

    fn parse(word: &str) -> Option<Epilogue> {
        if let Some((epilogue, _)) = Epilogue::NAMES.iter().find(|(_, name)| *name == word) {
            return Some(*epilogue);
        }
        let (low, high) = word.strip_prefix("clip(")?.strip_suffix(')')?.split_once(';')?;
        let bound = |text: &str| text.trim().parse::<f64>().ok().filter(|x| x.is_finite());
        // Adding zero makes a negative zero a plain one.
        let (low, high) = (bound(low)? + 0.0, bound(high)? + 0.0);
        (low < high).then_some(Epilogue::Clip { low, high })
    }

    /// The operation on a value; `operand` gives the element of the extra input that [`Epilogue::Bias`] or
    /// [`Epilogue::Add`] adds.
    pub(super) fn apply(self, x: Expr, operand: impl FnOnce() -> Expr) -> Expr {
        let (add, multiply) = (|a, b| Expr::binary(BinaryOp::Add, a, b), |a, b| Expr::binary(BinaryOp::Mul, a, b));
        let one = Expr::Const(1.0);
        match self {
            Epilogue::Bias | Epilogue::Add => add(x, operand()),
            Epilogue::Relu => Expr::binary(BinaryOp::Max, x, Expr::Const(0.0)),
            Epilogue::Clip { low, high } => {
                Expr::binary(BinaryOp::Min, Expr::binary(BinaryOp::Max, x, Expr::Const(low)), Expr::Const(high))
            }
            Epilogue::Sigmoid => {
                let power = Expr::unary(UnaryOp::Exp, Expr::unary(UnaryOp::Neg, x));
                Expr::binary(BinaryOp::Div, one.clone(), add(one, power))
            }
            Epilogue::Tanh => Expr::unary(UnaryOp::Tanh, x),
            Epilogue::Gelu => {
                let erf = Expr::unary(UnaryOp::Erf, multiply(x.clone(), Expr::Const(FRAC_1_SQRT_2)));
                multiply(multiply(Expr::Const(0.5), x), add(one, erf))
            }
        }
    }
}

impl fmt::Display for Epilogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (Epilogue::NAMES.iter().find(|(e, _)| e == self), self) {
            (Some((_, name)), _) => f.write_str(name),
            (None, Epilogue::Clip { low, high }) => write!(f, "clip({low};{high})"),
            (None, _) => unreachable!("every operation but a clip has one name"),
        }
    }
}
