//! Residuals: the values on which an expression still depends once some of the names that it reads are
//! decided.
//!
//! With `a` and `b` decided, the residual of `a + b + c <= n` is `a + b`: prefixes with equal sums are
//! equivalent. Sums, products, minima and maxima are reassociated for that, sums and products only where they
//! cannot overflow in any order.

use super::{Datum, ExpressionOperator as Op, ResolvedExpression};

/// Interval of an integer value, if it is defined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueRange {
    least: i128,
    most: i128,
}

/// Largest absolute value of ranges that are tracked, so that regrouped values stay within 64 bits.
const MOST: i128 = 1 << 62;

impl ValueRange {
    fn new(least: i128, most: i128) -> Option<ValueRange> {
        (least >= -MOST && most <= MOST).then_some(ValueRange { least, most })
    }

    /// Interval of these values; `None` if one is not an integer.
    pub fn of(values: &[Datum]) -> Option<ValueRange> {
        let numbers = values.iter().map(Datum::int).collect::<Option<Vec<_>>>()?;
        ValueRange::new((*numbers.iter().min()?).into(), (*numbers.iter().max()?).into())
    }

    /// Returns the largest absolute value.
    fn size(self) -> i128 {
        self.least.abs().max(self.most.abs())
    }

    /// Interval of an expression from those of the slots it reads (interval arithmetic); `None` for operators
    /// that are not supported.
    pub fn of_code(code: &ResolvedExpression, ranges: &[Option<ValueRange>]) -> Option<ValueRange> {
        let (operator, operands) = match code {
            ResolvedExpression::Constant(value) => return ValueRange::of(&[value.clone().ok()?]),
            ResolvedExpression::Slot(slot) => return ranges[*slot],
            ResolvedExpression::Local(_) | ResolvedExpression::Each(..) => return None,
            ResolvedExpression::Apply(operator, operands) => (*operator, operands),
        };
        let of = |at: usize| ValueRange::of_code(&operands[at], ranges);
        let hull = |a: ValueRange, b: ValueRange| ValueRange { least: a.least.min(b.least), most: a.most.max(b.most) };
        match operator {
            Op::Or | Op::And => Some(hull(of(0)?, of(1)?)),
            Op::Not | Op::In | Op::NotIn | Op::Equal | Op::NotEqual | Op::Any | Op::All => ValueRange::new(0, 1),
            Op::AtMost | Op::AtLeast | Op::Less | Op::Greater | Op::IsPowerOfTwo => ValueRange::new(0, 1),
            Op::Add => ValueRange::new(of(0)?.least + of(1)?.least, of(0)?.most + of(1)?.most),
            Op::Subtract => ValueRange::new(of(0)?.least - of(1)?.most, of(0)?.most - of(1)?.least),
            Op::Negate => ValueRange::new(-of(0)?.most, -of(0)?.least),
            Op::Multiply => {
                let (a, b) = (of(0)?, of(1)?);
                // Each at most 2^62 in size: the products fit into 128 bits.
                let corners = [a.least * b.least, a.least * b.most, a.most * b.least, a.most * b.most];
                ValueRange::new(*corners.iter().min()?, *corners.iter().max()?)
            }
            Op::Choose => Some(hull(of(0)?, of(2)?)),
            Op::Minimum | Op::Maximum if operands.len() == 1 => None,
            Op::Minimum | Op::Maximum => (1..operands.len()).try_fold(of(0)?, |all, at| Some(hull(all, of(at)?))),
            // Divisors are integers, so no quotient exceeds the dividend, except by rounding.
            Op::FloorDivide | Op::CeilDivide if of(1).is_some() => {
                ValueRange::new(-of(0)?.size() - 1, of(0)?.size() + 1)
            }
            Op::Remainder if of(0).is_some() => ValueRange::new(-of(1)?.size(), of(1)?.size()),
            Op::Gcd => ValueRange::new(0, of(0)?.size().max(of(1)?.size())),
            Op::Absolute => ValueRange::new(0, of(0)?.size()),
            Op::Length => ValueRange::new(0, super::MOST_ITEMS as i128),
            Op::FloorDivide | Op::CeilDivide | Op::Remainder | Op::Divide | Op::Power | Op::ToInt | Op::ToFloat => None,
            Op::Item | Op::List | Op::Set | Op::Sum | Op::Range | Op::ToList => None,
        }
    }
}

/// Reassociates chains of operators so that operands are ordered by the last slot that they read: once the
/// first slots are known, the known part of a chain [folds](ResolvedExpression::fold) to one constant.
pub fn regrouped(code: &ResolvedExpression, ranges: &[Option<ValueRange>]) -> ResolvedExpression {
    let ResolvedExpression::Apply(operator, operands) = code else { return code.clone() };
    let mut parts = parts(code);
    // Two operands need no regrouping.
    if parts.len() < 3 || !can_regroup(*operator, &parts, ranges) {
        return ResolvedExpression::Apply(
            *operator,
            operands.iter().map(|operand| regrouped(operand, ranges)).collect(),
        );
    }
    parts.sort_by_key(|part| part.code.all_reads().into_iter().max());
    let signed = parts.iter().map(|part| ChainOperand { code: &regrouped(part.code, ranges), ..*part }.signed());
    let joined =
        signed.reduce(|a, b| ResolvedExpression::Apply(joining(*operator), vec![a, b])).expect("invariant: not empty");
    match operator {
        Op::Add | Op::Subtract | Op::Negate | Op::Multiply | Op::Minimum | Op::Maximum => joined,
        // The difference of both sides is compared with 0.
        _ => ResolvedExpression::Apply(*operator, vec![joined, ResolvedExpression::Constant(Ok(Datum::Int(0)))]),
    }
}

/// Replaces integers in sums and products of which only the remainder by a constant matters by their own
/// remainders: prefixes that are congruent are equivalent.
pub fn reduced(code: ResolvedExpression, ranges: &[Option<ValueRange>]) -> ResolvedExpression {
    let ResolvedExpression::Apply(operator, operands) = code else { return code };
    let operands: Vec<ResolvedExpression> = operands.into_iter().map(|operand| reduced(operand, ranges)).collect();
    if let (Op::Remainder, [number, ResolvedExpression::Constant(Ok(Datum::Int(by)))]) = (operator, &operands[..])
        && ValueRange::of_code(number, ranges).is_some()
    {
        let congruent = congruent(number, *by);
        // An interval of its own: where large terms cancelled each other, they may do so no longer.
        if ValueRange::of_code(&congruent, ranges).is_some() {
            return ResolvedExpression::Apply(operator, vec![congruent, operands[1].clone()]);
        }
    }
    ResolvedExpression::Apply(operator, operands)
}

/// Sum or product that leaves the same remainder: with those of its integers, each no larger in size than the
/// integer.
fn congruent(code: &ResolvedExpression, by: i64) -> ResolvedExpression {
    match code {
        ResolvedExpression::Constant(Ok(Datum::Int(number))) => {
            ResolvedExpression::Constant(Ok(Datum::Int(number.checked_rem(by).unwrap_or(*number))))
        }
        ResolvedExpression::Apply(operator @ (Op::Add | Op::Subtract | Op::Negate | Op::Multiply), operands) => {
            let operands = operands.iter().map(|operand| congruent(operand, by));
            ResolvedExpression::Apply(*operator, operands.collect())
        }
        _ => code.clone(),
    }
}

/// Adds to `found` the subexpressions of decided slots on which an expression still depends.
pub fn residual(
    code: &ResolvedExpression,
    is_decided: &dyn Fn(usize) -> bool,
    ranges: &[Option<ValueRange>],
    found: &mut Vec<ResolvedExpression>,
) {
    let ResolvedExpression::Apply(operator, operands) = code else {
        // Within a comprehension, a subexpression that depends on the item is not a partial result.
        let mut reads = Vec::new();
        code.reads(&mut reads);
        return reads
            .into_iter()
            .filter(|&slot| is_decided(slot))
            .for_each(|slot| add(ResolvedExpression::Slot(slot), found));
    };
    let known = |code: &ResolvedExpression| {
        let mut reads = Vec::new();
        code.reads(&mut reads);
        (reads.iter().any(|&slot| is_decided(slot)), reads.iter().all(|&slot| is_decided(slot)))
    };
    match known(code) {
        (false, _) => return,
        (true, true) => return add(code.clone(), found),
        (true, false) => {}
    }
    let parts = parts(code);
    // Constants are not partial results: the known part of a group has to read a slot.
    let of_group: Vec<&ChainOperand> = parts.iter().filter(|part| known(part.code) == (true, true)).collect();
    if of_group.is_empty() || of_group.len() > 1 && !can_regroup(*operator, &parts, ranges) {
        return operands.iter().for_each(|operand| residual(operand, is_decided, ranges, found));
    }
    let joined = match &of_group[..] {
        [part] => part.code.clone(),
        // All operands are numbers, or they could not be regrouped.
        _ => {
            let signed = of_group.iter().map(|part| part.signed());
            let joined = signed.reduce(|a, b| ResolvedExpression::Apply(joining(*operator), vec![a, b]));
            joined.expect("invariant: not empty")
        }
    };
    add(joined, found);
    let rest = parts.iter().filter(|part| known(part.code) != (true, true));
    rest.for_each(|part| residual(part.code, is_decided, ranges, found));
}

fn add(result: ResolvedExpression, found: &mut Vec<ResolvedExpression>) {
    if !found.contains(&result) {
        found.push(result);
    }
}

/// Operand of a chain of operators that can be regrouped.
struct ChainOperand<'a> {
    code: &'a ResolvedExpression,
    /// Whether the operand is subtracted.
    is_negative: bool,
}

impl ChainOperand<'_> {
    fn signed(&self) -> ResolvedExpression {
        let code = self.code.clone();
        if self.is_negative { ResolvedExpression::Apply(Op::Negate, vec![code]) } else { code }
    }
}

/// Operator of a chain; a comparison counts as a sum, because it depends on the difference of its sides.
fn joining(operator: Op) -> Op {
    match operator {
        Op::Multiply | Op::Minimum | Op::Maximum => operator,
        _ => Op::Add,
    }
}

/// Operands of an expression that is a chain; empty for any other.
fn parts(code: &ResolvedExpression) -> Vec<ChainOperand<'_>> {
    let mut parts = Vec::new();
    match code {
        ResolvedExpression::Apply(
            Op::Equal | Op::NotEqual | Op::AtMost | Op::AtLeast | Op::Less | Op::Greater,
            sides,
        ) => {
            terms(&sides[0], false, &mut parts);
            terms(&sides[1], true, &mut parts);
        }
        ResolvedExpression::Apply(Op::Add | Op::Subtract | Op::Negate, _) => terms(code, false, &mut parts),
        // With one argument, `min` and `max` are those of a list.
        ResolvedExpression::Apply(Op::Minimum | Op::Maximum, operands) if operands.len() == 1 => {}
        ResolvedExpression::Apply(operator @ (Op::Multiply | Op::Minimum | Op::Maximum), _) => {
            let mut open = vec![code];
            while let Some(code) = open.pop() {
                match code {
                    ResolvedExpression::Apply(inner, operands) if inner == operator && operands.len() > 1 => {
                        open.extend(operands)
                    }
                    _ => parts.push(ChainOperand { code, is_negative: false }),
                }
            }
        }
        _ => {}
    }
    parts
}

fn terms<'a>(code: &'a ResolvedExpression, is_negative: bool, parts: &mut Vec<ChainOperand<'a>>) {
    match code {
        ResolvedExpression::Apply(operator @ (Op::Add | Op::Subtract), operands) => {
            terms(&operands[0], is_negative, parts);
            terms(&operands[1], is_negative != (*operator == Op::Subtract), parts);
        }
        ResolvedExpression::Apply(Op::Negate, operands) => terms(&operands[0], !is_negative, parts),
        _ => parts.push(ChainOperand { code, is_negative }),
    }
}

/// Whether a chain has the same value in any order, which requires that no partial result overflows.
fn can_regroup(operator: Op, parts: &[ChainOperand], ranges: &[Option<ValueRange>]) -> bool {
    let sizes = parts.iter().map(|part| Some(ValueRange::of_code(part.code, ranges)?.size()));
    match joining(operator) {
        Op::Add => sizes.sum::<Option<i128>>().is_some_and(|size| size <= MOST),
        Op::Multiply => {
            let product = |all: i128, size: Option<i128>| Some(all * size?.max(1)).filter(|size| *size <= MOST);
            sizes.into_iter().try_fold(1, product).is_some()
        }
        // The minimum or maximum of values that may not be numbers depends on their order.
        _ => sizes.into_iter().all(|size| size.is_some()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Expression, ValueType, VariableNames};
    use super::*;

    fn between(least: i64, most: i64) -> Option<ValueRange> {
        ValueRange::of(&[least.into(), most.into()])
    }

    const NAMES: [&str; 4] = ["a", "b", "c", "d"];

    fn compiled(text: &str) -> ResolvedExpression {
        let scope: VariableNames = NAMES.map(|name| (name.to_owned(), ValueType::Number)).into();
        Expression::parse(text)
            .and_then(|expression| expression.compile(&scope))
            .unwrap_or_else(|e| panic!("{text}: {e}"))
            .0
    }

    fn results(text: &str, n_decided: usize, ranges: &[Option<ValueRange>]) -> Vec<ResolvedExpression> {
        let mut found = Vec::new();
        residual(&compiled(text), &|slot| slot < n_decided, ranges, &mut found);
        found
    }

    #[test]
    fn sums_products_and_extremes_are_joined() {
        let ranges = [between(-8, 8); 4];
        let check = |text: &str, expected: &[&str]| {
            let expected: Vec<ResolvedExpression> = expected.iter().map(|text| compiled(text)).collect();
            assert_eq!(results(text, 2, &ranges), expected, "{text}");
        };
        check("d + b + c + a <= 9", &["b + a"]);
        check("c - a == d - b", &["-a + b"]);
        check("(a + b) * c < d", &["a + b"]);
        check("max(c, a) + d < max(b, c, d)", &["a", "b"]);
        check("min(a, d, min(b, c)) < 3", &["min(b, a)"]);
        check("a * c * b * d > 5", &["b * a"]);
        check("c == 1 or d == 2", &[]);
        check("(a == 1 or c == 2) and b / c > 1", &["a == 1", "b"]);
        let huge = [between(i64::MIN, i64::MAX); 4];
        assert_eq!(results("d + b + c + a <= 9", 2, &huge), [compiled("b"), compiled("a")]);
    }

    #[test]
    fn chains_are_ordered_by_what_is_decided_last() {
        let ranges = [between(-8, 8); 4];
        let check = |text: &str, expected: &str| {
            assert_eq!(regrouped(&compiled(text), &ranges), compiled(expected), "{text}");
        };
        check("d + b + c + a", "a + b + c + d");
        check("d + b <= c - a", "a + b + -c + d <= 0");
        check("c * (d + a + b) * a < 9", "a * c * (a + b + d) < 9");
        check("max(c, a, max(d, b)) == 3 or b", "max(max(max(a, b), c), d) == 3 or b");
        check("d / b / c", "d / b / c");
    }

    #[test]
    fn of_a_remainder_congruent_numbers_are_the_same() {
        let check = |text: &str, ranges: [Option<ValueRange>; 4], expected: &str| {
            assert_eq!(reduced(compiled(text), &ranges), compiled(expected), "{text}");
        };
        let near = [between(-8, 8); 4];
        check("(17 * a + 7 * (b - 9)) % 7 == 8", near, "(3 * a + 0 * (b - 2)) % 7 == 8");
        check("(a + 100) % 32 + a + 100", near, "(a + 4) % 32 + a + 100");
        check(
            "(max(a, 9) + 9 // b - 9) % 5 in [9, (a + 9) % 4]",
            near,
            "(max(a, 9) + 9 // b - 4) % 5 in [9, (a + 1) % 4]",
        );
        // What is no integer, or might overflow, is left as it is.
        check("(a + 0.5 + 9) % 7", near, "(a + 0.5 + 9) % 7");
        check("(a + 9) % 0", near, "(a + 9) % 0");
        check("(a + 9) % b", near, "(a + 9) % b");
        check("(a + 9) % 7", [between(i64::MIN, i64::MAX); 4], "(a + 9) % 7");
        check("(a - a) * 9 % 7", [between(-(1 << 61), 0); 4], "(a - a) * 9 % 7");
    }

    fn text() -> impl Strategy<Value = String> {
        let leaf = prop_oneof!["[abcd]", "[0-9]", Just("4611686018427387904".to_owned())];
        leaf.prop_recursive(4, 24, 3, |inner| {
            let operator = "[+*%-]|//|/|min|max|<=|==|if|gcd|sum";
            (operator, inner.clone(), inner.clone(), inner).prop_map(|(operator, a, b, c)| match operator.as_str() {
                "min" | "max" | "gcd" => format!("{operator}({a}, {b})"),
                "if" => format!("({a} if {b} > {c} else {c})"),
                "sum" => format!("sum([{a} * x + {b} for x in range(3) if x < {c}])"),
                "<=" | "==" => format!("({a} if {a} {operator} {b} or {c} < 3 else {c})"),
                _ => format!("({a} {operator} {b})"),
            })
        })
    }

    proptest! {
        /// Checks that if the partial results agree, so does the expression, whatever values are chosen
        /// later.
        #[test]
        fn results_tell_all_that_matters(text in text(), values in prop::array::uniform6(-3i64..4), far: bool, n_decided in 1usize..4) {
            let (least, most) = (if far { i64::MIN } else { -3 }, if far { i64::MAX } else { 4 });
            let ranges = [between(least, most); 4];
            prop_assume!(text.len() < 400);
            let code = compiled(&text);
            let found = results(&text, n_decided, &ranges);
            let in_order = regrouped(&code, &ranges);
            let congruent = reduced(in_order.clone(), &ranges);
            let slots = |first: i64, second: i64| -> Vec<Option<Datum>> {
                let decided = [first, second, first + second].into_iter().take(n_decided);
                decided.chain(values).take(4).map(|value| Some(Datum::Int(value))).collect()
            };
            let of = |slots: &[Option<Datum>]| found.iter().map(|result| result.evaluate(slots)).collect::<Vec<_>>();
            for first in -3..3 {
                for second in -3..3 {
                    let (one, other) = (slots(first, second), slots(second, first));
                    if of(&one) == of(&other) {
                        prop_assert_eq!(code.evaluate(&one), code.evaluate(&other), "{} {:?} {:?}", text, one, other);
                    }
                    let holds = code.holds(&one);
                    prop_assert_eq!(holds, in_order.holds(&one), "{} {:?}", text, one);
                    prop_assert_eq!(holds, congruent.holds(&one), "{} {:?}", text, one);
                }
            }
        }
    }
}
