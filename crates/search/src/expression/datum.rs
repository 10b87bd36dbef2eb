//! Values of expressions: those of Python that constraints need, with its arithmetic.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::Undefined;

/// Value of an expression. Rust's equality is structural, so that values can be keys; [`Datum::same`] is
/// Python's `==`.
#[derive(Debug, Clone)]
pub enum Datum {
    /// `None`.
    Nothing,
    /// `True` or `False`, which are numbers as well.
    Bool(bool),
    /// Integer.
    Int(i64),
    /// Floating-point number.
    Float(f64),
    /// A text.
    Text(Arc<str>),
    /// List, tuple or set.
    List(Arc<[Datum]>),
}

impl From<i64> for Datum {
    fn from(value: i64) -> Datum {
        Datum::Int(value)
    }
}

impl From<&str> for Datum {
    fn from(text: &str) -> Datum {
        Datum::Text(text.into())
    }
}

impl PartialEq for Datum {
    fn eq(&self, other: &Datum) -> bool {
        match (self, other) {
            (Datum::Nothing, Datum::Nothing) => true,
            (Datum::Bool(a), Datum::Bool(b)) => a == b,
            (Datum::Int(a), Datum::Int(b)) => a == b,
            (Datum::Float(a), Datum::Float(b)) => a.to_bits() == b.to_bits(),
            (Datum::Text(a), Datum::Text(b)) => a == b,
            (Datum::List(a), Datum::List(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Datum {}

impl Hash for Datum {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Datum::Nothing => {}
            Datum::Bool(value) => value.hash(state),
            Datum::Int(value) => value.hash(state),
            Datum::Float(value) => value.to_bits().hash(state),
            Datum::Text(text) => text.hash(state),
            Datum::List(items) => items.hash(state),
        }
    }
}

/// Writes a value as Python's `str` does, but for floating-point numbers with an exponent.
impl fmt::Display for Datum {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Datum::Nothing => out.write_str("None"),
            Datum::Bool(value) => out.write_str(if *value { "True" } else { "False" }),
            Datum::Int(value) => write!(out, "{value}"),
            Datum::Float(value) => write!(out, "{value:?}"),
            Datum::Text(text) => out.write_str(text),
            Datum::List(items) => {
                out.write_str("[")?;
                for (at, item) in items.iter().enumerate() {
                    out.write_str(if at > 0 { ", " } else { "" })?;
                    match item {
                        Datum::Text(text) => write_quoted(out, text)?,
                        other => write!(out, "{other}")?,
                    }
                }
                out.write_str("]")
            }
        }
    }
}

/// Writes a text in quotes, as in an expression.
pub(super) fn write_quoted(out: &mut fmt::Formatter, text: &str) -> fmt::Result {
    let quote = if text.contains('"') && !text.contains('\'') { '\'' } else { '"' };
    write!(out, "{quote}")?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\t' => out.write_str("\\t")?,
            '\r' => out.write_str("\\r")?,
            c if c == '\\' || c == quote => write!(out, "\\{c}")?,
            c => write!(out, "{c}")?,
        }
    }
    write!(out, "{quote}")
}

/// Number, for arithmetic.
#[derive(Clone, Copy)]
pub(super) enum Number {
    Int(i64),
    Float(f64),
}

/// Integers up to this size are exact in floating point.
const EXACT: u64 = 1 << 53;

impl Number {
    pub(super) fn float(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }
    }
}

impl Datum {
    /// Returns the value as a number; `True` is 1.
    pub(super) fn number(&self) -> Result<Number, Undefined> {
        match self {
            Datum::Bool(value) => Ok(Number::Int((*value).into())),
            Datum::Int(value) => Ok(Number::Int(*value)),
            Datum::Float(value) => Ok(Number::Float(*value)),
            _ => Err(Undefined::Kind),
        }
    }

    /// Integer value, if it is an integer or a boolean.
    pub fn int(&self) -> Option<i64> {
        match self {
            Datum::Bool(value) => Some((*value).into()),
            Datum::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Converts the value to JSON; numbers that JSON cannot represent become null.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Datum::Nothing => serde_json::Value::Null,
            Datum::Bool(value) => (*value).into(),
            Datum::Int(value) => (*value).into(),
            Datum::Float(value) => (*value).into(),
            Datum::Text(text) => (**text).into(),
            Datum::List(items) => items.iter().map(Datum::to_json).collect(),
        }
    }

    /// Truth value as in Python: false for zero, `None` and empty texts or lists.
    pub fn holds(&self) -> bool {
        match self {
            Datum::Nothing => false,
            Datum::Bool(value) => *value,
            Datum::Int(value) => *value != 0,
            Datum::Float(value) => *value != 0.0,
            Datum::Text(text) => !text.is_empty(),
            Datum::List(items) => !items.is_empty(),
        }
    }

    /// Equality as Python's `==`.
    pub fn same(&self, other: &Datum) -> bool {
        match (self, other) {
            (Datum::Int(a), Datum::Int(b)) => a == b,
            (Datum::Nothing, Datum::Nothing) => true,
            (Datum::Text(a), Datum::Text(b)) => a == b,
            (Datum::List(a), Datum::List(b)) => a.len() == b.len() && a.iter().zip(&**b).all(|(a, b)| a.same(b)),
            _ => self.compare(other) == Ok(Some(Ordering::Equal)),
        }
    }

    /// Compares two numbers or two texts; `None` if one is NaN.
    pub(super) fn compare(&self, other: &Datum) -> Result<Option<Ordering>, Undefined> {
        if let (Datum::Text(a), Datum::Text(b)) = (self, other) {
            return Ok(Some(a.cmp(b)));
        }
        Ok(match (self.number()?, other.number()?) {
            (Number::Int(a), Number::Int(b)) => Some(a.cmp(&b)),
            (Number::Int(a), Number::Float(b)) => mixed(a, b),
            (Number::Float(a), Number::Int(b)) => mixed(b, a).map(Ordering::reverse),
            (Number::Float(a), Number::Float(b)) => a.partial_cmp(&b),
        })
    }

    /// `-self`.
    pub(super) fn negate(&self) -> Result<Datum, Undefined> {
        match self.number()? {
            Number::Int(a) => whole(a.checked_neg()),
            Number::Float(a) => Ok(Datum::Float(-a)),
        }
    }

    /// `abs(self)`.
    pub(super) fn absolute(&self) -> Result<Datum, Undefined> {
        match self.number()? {
            Number::Int(a) => whole(a.checked_abs()),
            Number::Float(a) => Ok(Datum::Float(a.abs())),
        }
    }

    /// Sums, differences and products.
    pub(super) fn arithmetic(
        &self,
        other: &Datum,
        of_ints: fn(i64, i64) -> Option<i64>,
        of_floats: fn(f64, f64) -> f64,
    ) -> Result<Datum, Undefined> {
        match (self.number()?, other.number()?) {
            (Number::Int(a), Number::Int(b)) => whole(of_ints(a, b)),
            (a, b) => Ok(Datum::Float(of_floats(a.float(), b.float()))),
        }
    }

    /// `self / other`.
    pub(super) fn quotient(&self, other: &Datum) -> Result<Datum, Undefined> {
        let (a, b) = (self.number()?, other.number()?);
        if b.float() == 0.0 {
            return Err(Undefined::ZeroDivision);
        }
        let is_exact =
            |n: Number| matches!(n, Number::Float(_)) || matches!(n, Number::Int(i) if i.unsigned_abs() <= EXACT);
        // Python rounds once; beyond `EXACT`, floats would round both operands and then the quotient.
        let is_whole = matches!((a, b), (Number::Int(_), Number::Int(_)));
        if is_whole && !(is_exact(a) && is_exact(b)) {
            Err(Undefined::TooLarge)
        } else {
            Ok(Datum::Float(a.float() / b.float()))
        }
    }

    /// `self // other`.
    pub(super) fn floor_quotient(&self, other: &Datum) -> Result<Datum, Undefined> {
        match (self.number()?, other.number()?) {
            (Number::Int(_), Number::Int(0)) => Err(Undefined::ZeroDivision),
            (Number::Int(a), Number::Int(b)) => whole(floor_div(a, b)),
            (a, b) => Ok(Datum::Float(float_divmod(a.float(), b.float())?.0)),
        }
    }

    /// `self % other`, which has the sign of `other`.
    pub(super) fn remainder(&self, other: &Datum) -> Result<Datum, Undefined> {
        match (self.number()?, other.number()?) {
            (Number::Int(_), Number::Int(0)) => Err(Undefined::ZeroDivision),
            (Number::Int(a), Number::Int(b)) => {
                let rest = a.checked_rem(b).unwrap_or(0);
                whole(Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
            }
            (a, b) => Ok(Datum::Float(float_divmod(a.float(), b.float())?.1)),
        }
    }

    /// `self ** other`.
    pub(super) fn power(&self, other: &Datum) -> Result<Datum, Undefined> {
        let (a, b) = (self.number()?, other.number()?);
        match (a, b) {
            (Number::Int(base @ (0 | 1)), Number::Int(1..)) => Ok(Datum::Int(base)),
            (Number::Int(-1), Number::Int(b @ 0..)) => Ok(Datum::Int(if b % 2 == 0 { 1 } else { -1 })),
            (Number::Int(a), Number::Int(b @ 0..)) => whole(u32::try_from(b).ok().and_then(|b| a.checked_pow(b))),
            _ => {
                let (a, b) = (a.float(), b.float());
                if a == 0.0 && b < 0.0 {
                    return Err(Undefined::ZeroDivision);
                }
                if a < 0.0 && a.is_finite() && b.is_finite() && b.fract() != 0.0 {
                    return Err(Undefined::Kind);
                }
                let power = a.powf(b);
                if power.is_infinite() && a.is_finite() && b.is_finite() {
                    return Err(Undefined::TooLarge);
                }
                Ok(Datum::Float(power))
            }
        }
    }
}

fn whole(value: Option<i64>) -> Result<Datum, Undefined> {
    value.map(Datum::Int).ok_or(Undefined::TooLarge)
}

/// Compares an integer with a floating-point number exactly.
fn mixed(a: i64, b: f64) -> Option<Ordering> {
    const END: f64 = 9_223_372_036_854_775_808.0;
    if b.is_nan() {
        return None;
    }
    Some(if b >= END {
        Ordering::Less
    } else if b < -END {
        Ordering::Greater
    } else {
        // The integral part fits; the fraction decides between equal integral parts.
        a.cmp(&(b.trunc() as i64)).then(0.0f64.total_cmp(&(b.fract() + 0.0)))
    })
}

/// Quotient rounded down.
pub(super) fn floor_div(a: i64, b: i64) -> Option<i64> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

/// Quotient and remainder as CPython computes them.
fn float_divmod(a: f64, b: f64) -> Result<(f64, f64), Undefined> {
    if b == 0.0 {
        return Err(Undefined::ZeroDivision);
    }
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest != 0.0 {
        if (b < 0.0) != (rest < 0.0) {
            rest += b;
            quotient -= 1.0;
        }
    } else {
        rest = 0.0f64.copysign(b);
    }
    let quotient = if quotient == 0.0 {
        0.0f64.copysign(a / b)
    } else {
        let floor = quotient.floor();
        if quotient - floor > 0.5 { floor + 1.0 } else { floor }
    };
    Ok((quotient, rest))
}
