//! Value range analysis of floating-point expressions, such as a clip.
//!
//! Conversions to integers are one instruction if the value is known to be in range; else they need code for
//! NaN and for numbers that no integer can represent.

use tilewright_ir::DType;
use tilewright_ir::expr::{BinaryOp, Cond, Expr, UnaryOp};

/// Least and greatest value of a floating-point expression that is never NaN.
///
/// `None` if the bounds are unknown. Bounds are f32 numbers: a constant between two f32 numbers is rounded
/// outwards.
pub(super) fn range(e: &Expr) -> Option<[f64; 2]> {
    range_where(e, None)
}

/// Whether an integer type holds every possible value of an expression, so that a conversion to the type only
/// truncates fractions.
pub(super) fn fits(e: &Expr, to: DType) -> bool {
    let is_held = |v: f64| v.is_finite() && to.wrap(v.trunc() as i128) == v.trunc() as i128;
    range(e).is_some_and(|ends| ends.into_iter().all(is_held))
}

/// Whether every finite value of an expression is an integer.
pub(super) fn is_whole(e: &Expr) -> bool {
    match e {
        Expr::Const(v) => v.fract() == 0.0,
        Expr::Unary(UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round, _) | Expr::FromIndex(_) => true,
        Expr::Unary(UnaryOp::Neg | UnaryOp::Abs, x) => is_whole(x),
        // Rounding of sums and products of integers gives integers.
        Expr::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Min | BinaryOp::Max, a, b) => {
            is_whole(a) && is_whole(b)
        }
        Expr::Select(_, a, b) => is_whole(a) && is_whole(b),
        Expr::Cast(to, x) => !to.is_float() || !to.is_half() && is_whole(x),
        Expr::Unary(..) | Expr::Binary(..) | Expr::Load(..) | Expr::Gather(..) => false,
    }
}

/// Range of an expression under the assumption that another expression is larger than a number, and thus not
/// NaN.
fn range_where(e: &Expr, larger: Option<(&Expr, f64)>) -> Option<[f64; 2]> {
    if let Some((x, low)) = larger
        && x == e
    {
        return Some([low, f64::INFINITY]);
    }
    let of = |e: &Expr| range_where(e, larger);
    let both = |a: &Expr, b: &Expr| Some((of(a)?, of(b)?));
    match e {
        Expr::Const(v) => (!v.is_nan()).then(|| outward(*v)),
        Expr::Unary(op @ (UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round), x) => of(x).map(|ends| {
            ends.map(|v| match op {
                UnaryOp::Floor => v.floor(),
                UnaryOp::Ceil => v.ceil(),
                _ => v.round_ties_even(),
            })
        }),
        Expr::Binary(BinaryOp::Min, a, b) => both(a, b).map(|(a, b)| [a[0].min(b[0]), a[1].min(b[1])]),
        Expr::Binary(BinaryOp::Max, a, b) => both(a, b).map(|(a, b)| [a[0].max(b[0]), a[1].max(b[1])]),
        Expr::Select(cond, a, b) => {
            let known = match &**cond {
                Cond::Less(low, x) => of(low).map(|[low, _]| (&**x, low)),
                _ => None,
            };
            let (a, b) = (range_where(a, known.or(larger))?, of(b)?);
            Some([a[0].min(b[0]), a[1].max(b[1])])
        }
        Expr::Cast(DType::F32 | DType::F64, x) => of(x),
        Expr::Cast(DType::I7, _) => Some([-64.0, 64.0]),
        Expr::Cast(to @ (DType::I8 | DType::U8 | DType::I16 | DType::U16), _) => {
            let (bits, is_unsigned) = (8 * to.bytes() as i32, to.is_unsigned());
            let n = 2f64.powi(bits);
            Some(if is_unsigned { [0.0, n - 1.0] } else { [-n / 2.0, n / 2.0 - 1.0] })
        }
        _ => None,
    }
}

/// Nearest f32 numbers around a number.
fn outward(v: f64) -> [f64; 2] {
    let near = v as f32;
    let (low, high) = if f64::from(near) <= v { (near, near.next_up()) } else { (near.next_down(), near) };
    if f64::from(near) == v { [v; 2] } else { [low.into(), high.into()] }
}

#[cfg(test)]
mod tests {
    use tilewright_ir::{BufferId, Index};

    use super::*;

    fn x() -> Expr {
        Expr::Load(BufferId(0), vec![Index::from(0)])
    }

    fn less(a: Expr, b: Expr) -> Box<Cond> {
        Box::new(Cond::Less(Box::new(a), Box::new(b)))
    }

    fn select(cond: Box<Cond>, a: Expr, b: f64) -> Expr {
        Expr::Select(cond, Box::new(a), Box::new(Expr::Const(b)))
    }

    #[test]
    fn a_clip_has_a_range_only_where_nan_has_a_value() {
        let clip = Expr::binary(BinaryOp::Min, x(), Expr::Const(255.0));
        assert_eq!(range(&Expr::binary(BinaryOp::Max, clip.clone(), Expr::Const(0.0))), None, "NaN stays NaN");
        let quantized = select(less(Expr::Const(-3.0), x()), clip, -3.0);
        assert_eq!(range(&quantized), Some([-3.0, 255.0]));
        assert!(fits(&quantized, DType::I16) && !fits(&quantized, DType::U8) && !fits(&quantized, DType::I8));
    }

    #[test]
    fn bounds_between_numbers_of_single_precision_count_outward() {
        let [low, high] = range(&Expr::Const(0.1)).expect("a constant is known");
        assert!(low < 0.1 && 0.1 < high && low as f32 as f64 == low && high as f32 as f64 == high);
    }

    #[test]
    fn another_condition_says_nothing() {
        let other = Expr::unary(UnaryOp::Neg, x());
        assert_eq!(range(&select(less(Expr::Const(0.0), other), x(), 0.0)), None);
        assert_eq!(range(&select(less(x(), Expr::Const(0.0)), x(), 0.0)), None, "no lower bound, though no NaN");
    }

    #[test]
    fn whole_numbers_stay_whole_in_sums_and_not_in_quotients() {
        let whole = Expr::unary(UnaryOp::Round, x());
        assert!(is_whole(&Expr::binary(BinaryOp::Add, whole.clone(), Expr::Const(12.0))));
        assert!(!is_whole(&Expr::binary(BinaryOp::Div, whole.clone(), Expr::Const(12.0))));
        assert!(!is_whole(&Expr::binary(BinaryOp::Add, whole, x())));
    }
}
