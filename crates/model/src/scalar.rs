//! Scalar expressions of elementwise functions, in which `Load(i, [])` is the element of input `i`.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

use tilewright_graph::op::{Binary, Unary};
use tilewright_ir::expr::{BinaryOp, Cond, UnaryOp};
use tilewright_ir::{BufferId, DType, Expr};

/// Element of an input.
pub fn input(at: usize) -> Expr {
    Expr::Load(BufferId(at as u32), Vec::new())
}

/// Floating-point literal.
pub fn number(x: f64) -> Expr {
    Expr::Const(x)
}

/// Magnitude beyond which doubles skip integers.
const MOST_EXACT: f64 = (1u64 << 53) as f64;

/// Integer literal of a type; a sum of two if an f64 cannot represent it.
pub fn whole(dtype: DType, n: i128) -> Expr {
    if n.abs() < MOST_EXACT as i128 {
        return number(n as f64);
    }
    let (high, low) = (n >> 32 << 32, n & 0xffff_ffff);
    Expr::cast(dtype, Expr::binary(BinaryOp::Add, number(high as f64), number(low as f64)))
}

/// Folds to the literal `x`, unless it could be an integer that was rounded.
fn folded(x: f64) -> Option<Expr> {
    (x.abs() < MOST_EXACT || x.fract() != 0.0).then_some(Expr::Const(x))
}

/// `a + b`
pub fn add(a: Expr, b: Expr) -> Expr {
    if let (Expr::Const(a), Expr::Const(b)) = (&a, &b)
        && let Some(sum) = folded(a + b)
    {
        return sum;
    }
    match (&a, &b) {
        (_, Expr::Const(0.0)) => a,
        (Expr::Const(0.0), _) => b,
        _ => Expr::binary(BinaryOp::Add, a, b),
    }
}

/// `a − b`
pub fn sub(a: Expr, b: Expr) -> Expr {
    match b {
        Expr::Const(b) => add(a, Expr::Const(-b)),
        b => Expr::binary(BinaryOp::Sub, a, b),
    }
}

/// `a · b`
pub fn mul(a: Expr, b: Expr) -> Expr {
    if let (Expr::Const(a), Expr::Const(b)) = (&a, &b)
        && let Some(product) = folded(a * b)
    {
        return product;
    }
    match (&a, &b) {
        (_, Expr::Const(1.0)) => a,
        (Expr::Const(1.0), _) => b,
        _ => Expr::binary(BinaryOp::Mul, a, b),
    }
}

/// Smallest normal f32.
const NORMAL: f64 = f32::MIN_POSITIVE as f64;

/// `a / b`
pub fn div(a: Expr, b: Expr) -> Expr {
    match b {
        // The inverses of other divisors overflow or are subnormal.
        Expr::Const(b) if (NORMAL..=1.0 / NORMAL).contains(&b.abs()) => mul(a, Expr::Const(1.0 / b)),
        b => Expr::binary(BinaryOp::Div, a, b),
    }
}

/// Division by a constant: exact, or as a product with the inverse, whose result may round below an integer
/// quotient.
pub fn part(x: Expr, n: f64, is_exact: bool) -> Expr {
    if is_exact { Expr::binary(BinaryOp::Div, x, number(n)) } else { mul(x, number(1.0 / n)) }
}

/// Minimum of two values.
pub fn min(a: Expr, b: Expr) -> Expr {
    bound(BinaryOp::Min, a, b, f64::INFINITY)
}

/// Maximum of two values.
pub fn max(a: Expr, b: Expr) -> Expr {
    bound(BinaryOp::Max, a, b, f64::NEG_INFINITY)
}

/// Applies a bound; the infinite bound `none` has no effect.
fn bound(op: BinaryOp, a: Expr, b: Expr, none: f64) -> Expr {
    match (&a, &b) {
        (Expr::Const(x), _) if *x == none => b,
        (_, Expr::Const(x)) if *x == none => a,
        _ => Expr::binary(op, a, b),
    }
}

/// Clamp to bounds.
pub fn clip(x: Expr, low: f64, high: f64) -> Expr {
    min(max(x, number(low)), number(high))
}

/// Clamp to bounds, NaN to the lower one, as in quantization.
pub fn quantized(x: Expr, low: f64, high: f64) -> Expr {
    where_less(number(low), x.clone(), min(x, number(high)), number(low))
}

/// Unary function.
pub fn of(op: UnaryOp, x: Expr) -> Expr {
    Expr::unary(op, x)
}

/// `1 / (1 + e⁻ˣ)`
pub fn sigmoid(x: Expr) -> Expr {
    let power = of(UnaryOp::Exp, of(UnaryOp::Neg, x));
    Expr::binary(BinaryOp::Div, number(1.0), add(number(1.0), power))
}

/// Selection: `then` if `a < b`, else `otherwise`.
pub fn where_less(a: Expr, b: Expr, then: Expr, otherwise: Expr) -> Expr {
    Expr::Select(Box::new(Cond::Less(Box::new(a), Box::new(b))), Box::new(then), Box::new(otherwise))
}

/// Selection by a condition.
pub fn choose_if(is: Cond, then: Expr, otherwise: Expr) -> Expr {
    Expr::Select(Box::new(is), Box::new(then), Box::new(otherwise))
}

/// Condition `a < b`.
pub fn less(a: Expr, b: Expr) -> Cond {
    Cond::Less(Box::new(a), Box::new(b))
}

/// Negated condition.
pub fn not(cond: Cond) -> Cond {
    Cond::Not(Box::new(cond))
}

/// Condition that `x` equals the minimum or maximum, `extreme`, found among it and other values; for `ArgMin`
/// and `ArgMax`.
pub fn is_extreme(x: Expr, extreme: Expr, is_min: bool) -> Cond {
    let is_nan = |x: Expr| not(less(x.clone(), number(1.0))).and(not(less(number(0.0), x)));
    let (worse, better) = if is_min { (extreme.clone(), x.clone()) } else { (x.clone(), extreme.clone()) };
    // If the extreme is NaN, all numbers are worse, although no comparison with NaN holds.
    not(less(worse, better)).and(not(is_nan(extreme).and(not(is_nan(x)))))
}

/// Expression that is 1 if the condition holds, else 0.
fn truth(is: Cond) -> Expr {
    Expr::Select(Box::new(is), Box::new(number(1.0)), Box::new(number(0.0)))
}

/// `log(1 + eˣ)`, without overflow.
fn softplus(x: Expr) -> Expr {
    let small = of(UnaryOp::Exp, of(UnaryOp::Neg, of(UnaryOp::Abs, x.clone())));
    add(max(x, number(0.0)), of(UnaryOp::Log1p, small))
}

/// `eˣ − 1` for `x ≤ 0`, else 0.
fn negative_exp(x: Expr) -> Expr {
    of(UnaryOp::Expm1, min(x, number(0.0)))
}

/// `x · tanh(log(1 + eˣ))`, a ratio of polynomials of eˣ, which is 1 in f32 from 20 on.
fn mish(x: Expr) -> Expr {
    let power = of(UnaryOp::Exp, min(x.clone(), number(20.0)));
    let above = mul(power.clone(), add(power, number(2.0)));
    mul(x, Expr::binary(BinaryOp::Div, above.clone(), add(above, number(2.0))))
}

/// Hyperbolic sine, computed from `h = e^(|x| / 2) − 1`, which is finite wherever the result is.
fn sinh(x: Expr) -> Expr {
    let h = of(UnaryOp::Expm1, mul(of(UnaryOp::Abs, x.clone()), number(0.5)));
    let root = add(h.clone(), number(1.0));
    let share = add(div(number(1.0), mul(root.clone(), root)), number(1.0));
    let of_absolute = mul(mul(mul(h.clone(), number(0.5)), add(h, number(2.0))), share);
    // Zeros keep their sign, and NaN stays NaN.
    let others = where_less(x.clone(), number(0.0), of(UnaryOp::Neg, of_absolute.clone()), x.clone());
    where_less(number(0.0), x, of_absolute, others)
}

/// Hyperbolic cosine, computed from `e^(|x| / 2)`, which is finite wherever the result is.
fn cosh(x: Expr) -> Expr {
    let root = of(UnaryOp::Exp, mul(of(UnaryOp::Abs, x), number(0.5)));
    let half = mul(root.clone(), number(0.5));
    add(mul(half, root.clone()), div(number(0.5), mul(root.clone(), root)))
}

/// Expression that is 1 for nonzero values except NaN, else 0.
pub fn is_not_zero(x: Expr) -> Expr {
    let not = |cond: Cond| Cond::Not(Box::new(cond));
    let is_between = not(less(x.clone(), number(0.0))).and(not(less(number(0.0), x.clone())));
    truth(not(is_between.and(less(x, number(1.0)))))
}

/// Selection by a boolean value.
pub fn choose(truth: Expr, a: Expr, b: Expr) -> Expr {
    let is = condition(&truth).unwrap_or_else(|| less(number(0.0), truth));
    Expr::Select(Box::new(is), Box::new(a), Box::new(b))
}

/// Condition equivalent to a boolean expression, if it is built from conditions.
pub fn condition(truth: &Expr) -> Option<Cond> {
    match truth {
        Expr::Cast(DType::Bool, x) => condition(x),
        Expr::Select(is, one, zero) if **one == number(1.0) && **zero == number(0.0) => Some((**is).clone()),
        _ => None,
    }
}

/// Whether a function's floating-point expression yields integers for integers.
pub fn is_whole(f: Unary) -> bool {
    matches!(f, Unary::Identity | Unary::Abs | Unary::Neg | Unary::Relu | Unary::Sign | Unary::Not)
}

/// Binary function of the graph on integers; `None` if no expression computes it.
pub fn binary_of_whole(f: Binary, a: Expr, b: Expr) -> Option<Expr> {
    let not = |cond: Cond| Cond::Not(Box::new(cond));
    Some(match f {
        Binary::Div => Expr::binary(BinaryOp::Div, a, b),
        Binary::Equal => truth(not(less(a.clone(), b.clone())).and(not(less(b, a)))),
        Binary::LessOrEqual => truth(not(less(b, a))),
        Binary::GreaterOrEqual => truth(not(less(a, b))),
        Binary::Pow => power(a, &b)?,
        Binary::PRelu => where_less(a.clone(), number(0.0), mul(a.clone(), b), a),
        f => return binary(f, a, b),
    })
}

/// Power of an integer as products; `None` unless the exponent is a small constant.
fn power(base: Expr, exponent: &Expr) -> Option<Expr> {
    let Expr::Const(n @ 0.0..=64.0) = exponent else { return None };
    let (mut rest, mut square, mut power) = (*n as u32, base, number(1.0));
    while rest > 0 {
        if rest % 2 == 1 {
            power = mul(power, square.clone());
        }
        rest /= 2;
        square = mul(square.clone(), square);
    }
    Some(power)
}

/// Integer raised to a floating-point exponent, with a truncated result.
pub fn power_of_whole(base: Expr, exponent: Expr) -> Expr {
    Expr::cast(DType::F64, Expr::binary(BinaryOp::Pow, base, exponent))
}

/// Expression of a unary function of the graph, if there is one.
pub fn unary(f: Unary, x: Expr) -> Option<Expr> {
    use Unary as U;
    let zero = || number(0.0);
    Some(match f {
        U::Identity => x,
        U::Abs => of(UnaryOp::Abs, x),
        U::Affine { alpha, beta } => add(mul(x, number(alpha)), number(beta)),
        U::Neg => of(UnaryOp::Neg, x),
        U::Exp => of(UnaryOp::Exp, x),
        U::Log => of(UnaryOp::Log, x),
        U::Sqrt => of(UnaryOp::Sqrt, x),
        U::Tanh => of(UnaryOp::Tanh, x),
        U::ScaledTanh { alpha, beta } => mul(of(UnaryOp::Tanh, mul(x, number(beta))), number(alpha)),
        U::Erf => of(UnaryOp::Erf, x),
        U::Reciprocal => div(number(1.0), x),
        U::Relu => max(x, zero()),
        U::Sigmoid => sigmoid(x),
        U::HardSigmoid { alpha, beta } => clip(add(mul(x, number(alpha)), number(beta)), 0.0, 1.0),
        U::HardSwish => mul(x.clone(), clip(add(mul(x, number(1.0 / 6.0)), number(0.5)), 0.0, 1.0)),
        U::LeakyRelu { alpha } => add(max(x.clone(), zero()), mul(number(alpha), min(x, zero()))),
        U::Swish { alpha } => mul(x.clone(), sigmoid(mul(x, number(alpha)))),
        U::Softplus => softplus(x),
        U::Softsign => div(x.clone(), add(number(1.0), of(UnaryOp::Abs, x))),
        U::Mish => mish(x),
        U::Elu { alpha } => add(max(x.clone(), zero()), mul(number(alpha), negative_exp(x))),
        U::Celu { alpha } => add(max(x.clone(), zero()), mul(number(alpha), negative_exp(mul(x, number(1.0 / alpha))))),
        U::Selu { alpha, gamma } => {
            mul(number(gamma), add(max(x.clone(), zero()), mul(number(alpha), negative_exp(x))))
        }
        U::Gelu { by_tanh: false } => {
            let erf = of(UnaryOp::Erf, mul(x.clone(), number(FRAC_1_SQRT_2)));
            mul(mul(x, number(0.5)), add(number(1.0), erf))
        }
        U::Gelu { by_tanh: true } => {
            let cube = mul(mul(x.clone(), mul(x.clone(), x.clone())), number(0.044715));
            let tanh = of(UnaryOp::Tanh, mul(add(x.clone(), cube), number(FRAC_2_PI.sqrt())));
            mul(mul(x, number(0.5)), add(number(1.0), tanh))
        }
        U::ThresholdedRelu { alpha } => where_less(number(alpha), x.clone(), x, zero()),
        U::Shrink { bias, lambd } => {
            let above = where_less(number(lambd), x.clone(), sub(x.clone(), number(bias)), zero());
            where_less(x.clone(), number(-lambd), add(x, number(bias)), above)
        }
        U::Floor => of(UnaryOp::Floor, x),
        U::Ceil => of(UnaryOp::Ceil, x),
        U::Round => of(UnaryOp::Round, x),
        U::Sin => of(UnaryOp::Sin, x),
        U::Cos => of(UnaryOp::Cos, x),
        U::Tan => Expr::binary(BinaryOp::Div, of(UnaryOp::Sin, x.clone()), of(UnaryOp::Cos, x)),
        U::Sign => {
            let not_negative = where_less(number(0.0), x.clone(), number(1.0), mul(x.clone(), number(0.0)));
            where_less(x, number(0.0), number(-1.0), not_negative)
        }
        U::Not => sub(number(1.0), x),
        U::IsNan => {
            // Every number is below 1 or above 0; NaN is neither.
            let is_below = less(x.clone(), number(1.0));
            truth(Cond::Not(Box::new(is_below)).and(Cond::Not(Box::new(less(number(0.0), x)))))
        }
        U::Sinh => sinh(x),
        U::Cosh => cosh(x),
        _ => return None,
    })
}

/// Expression that is 1 for a number, 0 for NaN.
fn number_of(x: &Expr) -> Expr {
    match x {
        Expr::Const(_) => number(1.0),
        x => where_less(x.clone(), number(1.0), number(1.0), truth(less(number(0.0), x.clone()))),
    }
}

/// Expression of a binary function of the graph, if there is one.
pub fn binary(f: Binary, a: Expr, b: Expr) -> Option<Expr> {
    Some(match f {
        Binary::Add => add(a, b),
        Binary::Sub => sub(a, b),
        Binary::Mul => mul(a, b),
        Binary::Div => div(a, b),
        Binary::Less => truth(less(a, b)),
        Binary::Greater => truth(less(b, a)),
        // Neither comparison holds if an operand is NaN.
        Binary::LessOrEqual => where_less(a.clone(), b.clone(), number(1.0), binary(Binary::Equal, a, b)?),
        Binary::GreaterOrEqual => where_less(b.clone(), a.clone(), number(1.0), binary(Binary::Equal, a, b)?),
        Binary::Equal => {
            // If neither operand is less, they are equal or one is NaN.
            let differ = |a: &Expr, b: &Expr| Cond::Not(Box::new(less(a.clone(), b.clone())));
            let is = differ(&a, &b).and(differ(&b, &a));
            mul(truth(is), mul(number_of(&a), number_of(&b)))
        }
        Binary::And => mul(a, b),
        Binary::Or => max(a, b),
        Binary::Xor => of(UnaryOp::Abs, sub(a, b)),
        Binary::PRelu => match b {
            Expr::Const(slope) if slope.is_finite() => {
                add(max(a.clone(), number(0.0)), mul(number(slope), min(a, number(0.0))))
            }
            // The slope applies only below 0, and may have any value elsewhere, even infinity.
            slope => where_less(a.clone(), number(0.0), mul(a.clone(), slope), a),
        },
        Binary::Pow => match b {
            Expr::Const(1.0) => a,
            Expr::Const(2.0) => mul(a.clone(), a),
            Expr::Const(3.0) => mul(a.clone(), mul(a.clone(), a)),
            Expr::Const(0.5) => of(UnaryOp::Sqrt, a),
            Expr::Const(-1.0) => div(number(1.0), a),
            Expr::Const(-0.5) => div(number(1.0), of(UnaryOp::Sqrt, a)),
            b => Expr::binary(BinaryOp::Pow, a, b),
        },
        _ => return None,
    })
}

/// Cost of an expression in operations; slow ones count several times.
pub fn cost(e: &Expr) -> usize {
    match e {
        Expr::Const(_) | Expr::Load(..) | Expr::FromIndex(_) => 0,
        Expr::Gather(..) => 4,
        Expr::Unary(UnaryOp::Neg | UnaryOp::Abs, x) | Expr::Cast(_, x) => 1 + cost(x),
        Expr::Unary(UnaryOp::Sqrt, x) => 6 + cost(x),
        Expr::Unary(UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round, x) => 1 + cost(x),
        Expr::Unary(_, x) => 15 + cost(x),
        Expr::Binary(BinaryOp::Div, a, b) => 6 + cost(a) + cost(b),
        Expr::Binary(BinaryOp::Pow, a, b) => 40 + cost(a) + cost(b),
        Expr::Binary(_, a, b) => 1 + cost(a) + cost(b),
        Expr::Select(_, a, b) => 2 + cost(a) + cost(b),
    }
}

/// Inputs that an expression reads, with repetition.
pub fn inputs(e: &Expr) -> Vec<usize> {
    let mut found = Vec::new();
    e.for_each_load(&mut |buffer, _| found.push(buffer.0 as usize));
    found
}

/// Substitutes expressions for inputs.
pub fn substitute(e: &Expr, by: &dyn Fn(usize) -> Expr) -> Expr {
    rebuilt(&e.map_loads(&mut |buffer, _| Some(by(buffer.0 as usize))))
}

/// Replaces every occurrence of a subexpression.
pub fn replaced(e: &Expr, old: &Expr, new: &Expr) -> Expr {
    if e == old {
        return new.clone();
    }
    match e {
        Expr::Unary(op, x) => Expr::unary(*op, replaced(x, old, new)),
        Expr::Binary(op, a, b) => Expr::binary(*op, replaced(a, old, new), replaced(b, old, new)),
        Expr::Cast(dtype, x) => Expr::cast(*dtype, replaced(x, old, new)),
        Expr::Select(cond, a, b) => {
            let cond = replaced_in(cond, old, new);
            Expr::Select(Box::new(cond), Box::new(replaced(a, old, new)), Box::new(replaced(b, old, new)))
        }
        other => other.clone(),
    }
}

/// Replaces every occurrence of an expression in a condition.
fn replaced_in(cond: &Cond, old: &Expr, new: &Expr) -> Cond {
    match cond {
        Cond::Less(a, b) => less(replaced(a, old, new), replaced(b, old, new)),
        Cond::Not(inner) => not(replaced_in(inner, old, new)),
        Cond::And(a, b) => replaced_in(a, old, new).and(replaced_in(b, old, new)),
        other => other.clone(),
    }
}

/// Rebuilds an expression, folding constants.
fn rebuilt(e: &Expr) -> Expr {
    match e {
        Expr::Binary(op, a, b) => {
            let (a, b) = (rebuilt(a), rebuilt(b));
            match op {
                BinaryOp::Add => add(a, b),
                BinaryOp::Sub => sub(a, b),
                BinaryOp::Mul => mul(a, b),
                BinaryOp::Min => min(a, b),
                BinaryOp::Max => max(a, b),
                // A division of integers cannot become a product.
                BinaryOp::Div | BinaryOp::Pow | BinaryOp::Nibble => Expr::binary(*op, a, b),
            }
        }
        Expr::Unary(op, x) => of(*op, rebuilt(x)),
        Expr::Cast(dtype, x) => Expr::cast(*dtype, rebuilt(x)),
        Expr::Select(cond, a, b) => {
            let (a, b) = (rebuilt(a), rebuilt(b));
            match &**cond {
                // The condition that the boolean was made from is used directly.
                Cond::Less(zero, is) if **zero == number(0.0) => choose(rebuilt(is), a, b),
                _ => Expr::Select(cond.clone(), Box::new(a), Box::new(b)),
            }
        }
        other => other.clone(),
    }
}
