//! Compiled expressions, with names resolved to slots, and their evaluation.

use std::fmt;
use std::sync::Arc;

use super::datum::{Number, floor_div};
use super::{
    Clause, Datum, Expression, ExpressionError, ExpressionNode, ExpressionOperator, MOST_ITEMS, Op, Reason, Undefined,
};

/// Static type of an expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueType {
    /// A number.
    Number,
    /// Boolean.
    Boolean,
    /// Text that is one of these values.
    Category(Arc<[String]>),
    /// Text of any value.
    Text,
    /// A list.
    List,
    /// Any type, known at evaluation only.
    Any,
}

impl fmt::Display for ValueType {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match self {
            ValueType::Number => "a number",
            ValueType::Boolean => "a condition",
            ValueType::Category(_) => "a category",
            ValueType::Text => "a text",
            ValueType::List => "a list",
            ValueType::Any => "a value",
        })
    }
}

impl ValueType {
    pub(super) fn of(datum: &Datum) -> ValueType {
        match datum {
            Datum::Nothing => ValueType::Any,
            Datum::Bool(_) => ValueType::Boolean,
            Datum::Int(_) | Datum::Float(_) => ValueType::Number,
            Datum::Text(_) => ValueType::Text,
            Datum::List(_) => ValueType::List,
        }
    }

    /// Common type of these values; [`ValueType::Any`] if they differ or the list is empty.
    pub fn of_all(data: &[Datum]) -> ValueType {
        let Some((first, rest)) = data.split_first() else { return ValueType::Any };
        let first = ValueType::of(first);
        if rest.iter().any(|datum| ValueType::of(datum) != first) {
            return ValueType::Any;
        }
        match first {
            ValueType::Text => ValueType::Category(data.iter().map(Datum::to_string).collect()),
            other => other,
        }
    }

    fn is_numeric(&self) -> bool {
        matches!(self, ValueType::Number | ValueType::Boolean | ValueType::Any)
    }

    fn is_text(&self) -> bool {
        matches!(self, ValueType::Text | ValueType::Category(_))
    }

    /// Type of a value that has one of two types.
    fn or(self, other: ValueType) -> ValueType {
        match (self, other) {
            (a, b) if a == b => a,
            (ValueType::Number | ValueType::Boolean, ValueType::Number | ValueType::Boolean) => ValueType::Number,
            (category @ ValueType::Category(_), ValueType::Text)
            | (ValueType::Text, category @ ValueType::Category(_)) => category,
            (a, b) if a.is_text() && b.is_text() => ValueType::Text,
            _ => ValueType::Any,
        }
    }
}

/// Names that an expression may read, each with its type; the index of a name is the slot of its value.
pub type VariableNames = Vec<(String, ValueType)>;

/// Compiled expression: names are resolved to slots.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ResolvedExpression {
    /// Constant, or the reason why it is undefined.
    Constant(Result<Datum, Undefined>),
    /// Value of the slot at this index.
    Slot(usize),
    /// Current item of the enclosing comprehension at this nesting level, counted from the outermost.
    Local(usize),
    /// Operator applied to operands.
    Apply(ExpressionOperator, Vec<ResolvedExpression>),
    /// Comprehension: an expression for each item.
    Each(Box<ResolvedExpression>, Vec<Clause<ResolvedExpression>>),
}

impl Expression {
    /// Resolves names and checks types; returns the code and its type.
    ///
    /// # Errors
    /// An unknown name or an operand of the wrong type, with its position.
    pub fn compile(&self, scope: &VariableNames) -> Result<(ResolvedExpression, ValueType), ExpressionError> {
        NameResolver { scope, locals: Vec::new() }.compile(self)
    }

    /// Compiles a condition. Numbers and lists are converted to booleans as in Python; a text is refused.
    ///
    /// # Errors
    /// As for [`Expression::compile`].
    pub fn compile_condition(&self, scope: &VariableNames) -> Result<ResolvedExpression, ExpressionError> {
        NameResolver { scope, locals: Vec::new() }.condition(self, "a constraint")
    }
}

struct NameResolver<'a> {
    scope: &'a VariableNames,
    /// Names bound by the enclosing comprehensions, outermost first.
    locals: Vec<(String, ValueType)>,
}

impl NameResolver<'_> {
    fn compile(&mut self, expression: &Expression) -> Result<(ResolvedExpression, ValueType), ExpressionError> {
        let fail = |reason| Err(ExpressionError { position: expression.position, reason });
        match &expression.kind {
            ExpressionNode::Constant(datum) => {
                Ok((ResolvedExpression::Constant(Ok(datum.clone())), ValueType::of(datum)))
            }
            ExpressionNode::Name(name) => {
                if let Some(at) = self.locals.iter().rposition(|(known, _)| known == name) {
                    return Ok((ResolvedExpression::Local(at), self.locals[at].1.clone()));
                }
                match self.scope.iter().position(|(known, _)| known == name) {
                    Some(slot) => Ok((ResolvedExpression::Slot(slot), self.scope[slot].1.clone())),
                    None => {
                        let names = self.scope.iter().chain(&self.locals).map(|(name, _)| name.as_str());
                        fail(Reason::UnknownName { name: name.clone(), known: names.collect::<Vec<_>>().join(", ") })
                    }
                }
            }
            // A parameter for one element of a list has the index in its name: `sizes[0]`.
            ExpressionNode::Apply(Op::Item, _) if let Some(slot) = self.place(expression) => {
                Ok((ResolvedExpression::Slot(slot), self.scope[slot].1.clone()))
            }
            ExpressionNode::Apply(operator, operands) => self.apply(expression, *operator, operands),
            ExpressionNode::Compare(first, rest) => {
                let (mut left, mut whole): (&Expression, Option<ResolvedExpression>) = (first, None);
                for (operator, right) in rest {
                    let compared = self.comparison(*operator, left, right)?;
                    whole = Some(match whole {
                        Some(whole) => ResolvedExpression::Apply(Op::And, vec![whole, compared]),
                        None => compared,
                    });
                    left = right;
                }
                Ok((whole.expect("invariant: a comparison has an operator"), ValueType::Boolean))
            }
            ExpressionNode::Each(item, clauses) => {
                let n_locals = self.locals.len();
                let mut compiled = Vec::new();
                for clause in clauses {
                    compiled.push(match clause {
                        Clause::For(name, list) => {
                            let list = self.listed(list, "for")?;
                            self.locals.push((name.clone(), ValueType::Any));
                            Clause::For(name.clone(), list)
                        }
                        Clause::If(condition) => Clause::If(self.condition(condition, "if")?),
                    });
                }
                let item = self.compile(item)?.0;
                self.locals.truncate(n_locals);
                Ok((ResolvedExpression::Each(Box::new(item), compiled), ValueType::List))
            }
        }
    }

    /// Slot of the parameter that an item access spells, as in `sizes[0]`; `None` if the list is bound by a
    /// comprehension.
    fn place(&self, item: &Expression) -> Option<usize> {
        let name = item.name_of_place()?;
        let is_its = |local: &str| name.strip_prefix(local).is_some_and(|place| place.starts_with('['));
        if self.locals.iter().any(|(local, _)| is_its(local)) {
            return None;
        }
        self.scope.iter().position(|(known, _)| *known == name)
    }

    fn refuse<T>(
        operand: &Expression,
        operator: &'static str,
        expected: &ValueType,
        found: &ValueType,
    ) -> Result<T, ExpressionError> {
        let reason = Reason::Type { operator, expected: expected.to_string(), found: found.to_string() };
        Err(ExpressionError { position: operand.position, reason })
    }

    fn number(&mut self, operand: &Expression, operator: &'static str) -> Result<ResolvedExpression, ExpressionError> {
        let (code, found) = self.compile(operand)?;
        if found.is_numeric() { Ok(code) } else { Self::refuse(operand, operator, &ValueType::Number, &found) }
    }

    fn condition(
        &mut self,
        operand: &Expression,
        operator: &'static str,
    ) -> Result<ResolvedExpression, ExpressionError> {
        let (code, found) = self.compile(operand)?;
        if found.is_text() { Self::refuse(operand, operator, &ValueType::Boolean, &found) } else { Ok(code) }
    }

    fn listed(&mut self, operand: &Expression, operator: &'static str) -> Result<ResolvedExpression, ExpressionError> {
        let (code, found) = self.compile(operand)?;
        let is_list = matches!(found, ValueType::List | ValueType::Any);
        if is_list { Ok(code) } else { Self::refuse(operand, operator, &ValueType::List, &found) }
    }

    /// Compiles a comparison of two values.
    fn comparison(
        &mut self,
        operator: ExpressionOperator,
        left: &Expression,
        right: &Expression,
    ) -> Result<ResolvedExpression, ExpressionError> {
        let symbol = operator.row().0;
        let ((a, of_a), (b, of_b)) = (self.compile(left)?, self.compile(right)?);
        match operator {
            Op::In | Op::NotIn => {
                if of_b.is_numeric() && of_b != ValueType::Any {
                    return Self::refuse(right, symbol, &ValueType::List, &of_b);
                }
                if let (ValueType::Category(_) | ValueType::List, ExpressionNode::Apply(Op::List | Op::Set, items)) =
                    (&of_a, &right.kind)
                {
                    for item in items {
                        self.check_category(symbol, &of_a, item)?;
                    }
                }
            }
            Op::Equal | Op::NotEqual => {
                if matches!(of_a, ValueType::Category(_) | ValueType::List) {
                    self.check_category(symbol, &of_a, right)?;
                } else if matches!(of_b, ValueType::Category(_) | ValueType::List) {
                    self.check_category(symbol, &of_b, left)?;
                }
            }
            _ => {
                let is_text = of_a.is_text() && of_b.is_text() && (of_a == ValueType::Text || of_b == ValueType::Text);
                for (operand, found) in [(left, &of_a), (right, &of_b)] {
                    if !found.is_numeric() && !is_text {
                        return Self::refuse(operand, symbol, &ValueType::Number, found);
                    }
                }
            }
        }
        Ok(ResolvedExpression::Apply(operator, vec![a, b]))
    }

    /// Refuses a text that no category equals, or that is compared with a list: a mistake of the author.
    fn check_category(
        &mut self,
        operator: &'static str,
        category: &ValueType,
        other: &Expression,
    ) -> Result<(), ExpressionError> {
        let ValueType::Category(values) = category else {
            let is_text = self.compile(other)?.1.is_text();
            return if is_text { Self::refuse(other, operator, category, &ValueType::Text) } else { Ok(()) };
        };
        if let ExpressionNode::Constant(Datum::Text(text)) = &other.kind {
            if values.iter().any(|value| **value == **text) {
                return Ok(());
            }
            let reason = Reason::UnknownValue { text: text.to_string(), known: values.join(", ") };
            return Err(ExpressionError { position: other.position, reason });
        }
        let found = self.compile(other)?.1;
        if found.is_text() || found == ValueType::Any {
            Ok(())
        } else {
            Self::refuse(other, operator, category, &found)
        }
    }

    fn apply(
        &mut self,
        whole: &Expression,
        operator: ExpressionOperator,
        operands: &[Expression],
    ) -> Result<(ResolvedExpression, ValueType), ExpressionError> {
        let symbol = operator.row().0;
        let numbers = |compiler: &mut Self| {
            operands.iter().map(|operand| compiler.number(operand, symbol)).collect::<Result<Vec<_>, _>>()
        };
        let (codes, kind) = match operator {
            Op::Or | Op::And => {
                let codes = operands.iter().map(|operand| self.condition(operand, symbol)).collect::<Result<_, _>>()?;
                let kind = self.compile(&operands[0])?.1.or(self.compile(&operands[1])?.1);
                (codes, kind)
            }
            Op::Not => (vec![self.condition(&operands[0], symbol)?], ValueType::Boolean),
            Op::Choose => {
                let ((then, of_then), (otherwise, of_otherwise)) =
                    (self.compile(&operands[0])?, self.compile(&operands[2])?);
                let condition = self.condition(&operands[1], symbol)?;
                if of_then.is_text() != of_otherwise.is_text()
                    && of_then != ValueType::Any
                    && of_otherwise != ValueType::Any
                {
                    return Self::refuse(&operands[2], symbol, &of_then, &of_otherwise);
                }
                (vec![then, condition, otherwise], of_then.or(of_otherwise))
            }
            Op::Add | Op::Multiply => {
                let (mut codes, mut is_list) = (Vec::new(), false);
                for operand in operands {
                    let (code, found) = self.compile(operand)?;
                    is_list |= found == ValueType::List;
                    if !found.is_numeric() && found != ValueType::List {
                        return Self::refuse(operand, symbol, &ValueType::Number, &found);
                    }
                    codes.push(code);
                }
                (codes, if is_list { ValueType::List } else { ValueType::Number })
            }
            Op::Item => {
                if let (ExpressionNode::Name(name), ExpressionNode::Constant(Datum::Text(text))) =
                    (&operands[0].kind, &operands[1].kind)
                    && self.scope.iter().all(|(known, _)| known != name)
                {
                    let reason =
                        Reason::Foreign { found: format!("{name}['{text}']"), instead: format!("write `{text}`") };
                    return Err(ExpressionError { position: whole.position, reason });
                }
                (vec![self.listed(&operands[0], symbol)?, self.number(&operands[1], symbol)?], ValueType::Any)
            }
            Op::List | Op::Set => {
                let codes = operands.iter().map(|operand| Ok(self.compile(operand)?.0));
                (codes.collect::<Result<_, _>>()?, ValueType::List)
            }
            Op::Minimum | Op::Maximum if operands.len() > 1 => (numbers(self)?, ValueType::Number),
            Op::Minimum | Op::Maximum => (vec![self.listed(&operands[0], symbol)?], ValueType::Any),
            Op::Sum => (vec![self.listed(&operands[0], symbol)?], ValueType::Number),
            Op::Any | Op::All => (vec![self.listed(&operands[0], symbol)?], ValueType::Boolean),
            Op::Length => {
                let (code, found) = self.compile(&operands[0])?;
                if matches!(found, ValueType::Number | ValueType::Boolean) {
                    return Self::refuse(&operands[0], symbol, &ValueType::List, &found);
                }
                (vec![code], ValueType::Number)
            }
            Op::ToList => {
                let codes = operands.iter().map(|operand| self.listed(operand, symbol)).collect::<Result<_, _>>()?;
                (codes, ValueType::List)
            }
            Op::Range => (numbers(self)?, ValueType::List),
            Op::IsPowerOfTwo => (numbers(self)?, ValueType::Boolean),
            Op::Subtract
            | Op::Divide
            | Op::FloorDivide
            | Op::Remainder
            | Op::Negate
            | Op::Power
            | Op::Absolute
            | Op::ToInt
            | Op::ToFloat
            | Op::CeilDivide
            | Op::Gcd => (numbers(self)?, ValueType::Number),
            Op::In | Op::NotIn | Op::Equal | Op::NotEqual | Op::AtMost | Op::AtLeast | Op::Less | Op::Greater => {
                unreachable!("invariant: comparisons are parsed as such")
            }
        };
        Ok((ResolvedExpression::Apply(operator, codes), kind))
    }
}

/// State of an evaluation.
struct ExpressionEvaluation<'a> {
    slots: &'a [Option<Datum>],
    locals: Vec<Datum>,
    n_left: usize,
}

impl ExpressionEvaluation<'_> {
    /// Counts list items against the limit of one evaluation.
    fn spend(&mut self, n: usize) -> Result<(), Undefined> {
        self.n_left = self.n_left.checked_sub(n).ok_or(Undefined::TooMany)?;
        Ok(())
    }

    fn value(&mut self, code: &ResolvedExpression) -> Result<Datum, Undefined> {
        match code {
            ResolvedExpression::Constant(value) => value.clone(),
            ResolvedExpression::Slot(slot) => self.slots[*slot].clone().ok_or(Undefined::Unknown),
            ResolvedExpression::Local(at) => Ok(self.locals[*at].clone()),
            ResolvedExpression::Apply(operator, operands) => self.apply(*operator, operands),
            ResolvedExpression::Each(item, clauses) => {
                let mut found = Vec::new();
                self.comprehend(item, clauses, &mut found)?;
                Ok(Datum::List(found.into()))
            }
        }
    }

    fn items(&mut self, code: &ResolvedExpression) -> Result<Arc<[Datum]>, Undefined> {
        match self.value(code)? {
            Datum::List(items) => Ok(items),
            _ => Err(Undefined::Kind),
        }
    }

    fn comprehend(
        &mut self,
        item: &ResolvedExpression,
        clauses: &[Clause<ResolvedExpression>],
        found: &mut Vec<Datum>,
    ) -> Result<(), Undefined> {
        self.spend(1)?;
        match clauses {
            [] => found.push(self.value(item)?),
            [Clause::If(condition), rest @ ..] => {
                if self.value(condition)?.holds() {
                    self.comprehend(item, rest, found)?;
                }
            }
            [Clause::For(_, list), rest @ ..] => {
                for value in self.items(list)?.iter() {
                    self.locals.push(value.clone());
                    let inner = self.comprehend(item, rest, found);
                    self.locals.pop();
                    inner?;
                }
            }
        }
        Ok(())
    }

    fn bounds(&mut self, operands: &[ResolvedExpression]) -> Result<(i64, i64, i64), Undefined> {
        let mut bounds = [0; 3];
        for (bound, operand) in bounds.iter_mut().zip(operands) {
            *bound = self.value(operand)?.int().ok_or(Undefined::Kind)?;
        }
        match (operands.len(), bounds) {
            (1, [end, ..]) => Ok((0, end, 1)),
            (2, [start, end, _]) => Ok((start, end, 1)),
            (_, [.., 0]) => Err(Undefined::Kind),
            (_, [start, end, step]) => Ok((start, end, step)),
        }
    }

    /// Whether a list or a text contains an item, without expanding a range to a list.
    fn is_in(&mut self, operands: &[ResolvedExpression]) -> Result<bool, Undefined> {
        let item = self.value(&operands[0])?;
        if let ResolvedExpression::Apply(Op::Range, bounds) = &operands[1] {
            let (start, end, step) = self.bounds(bounds)?;
            let number = match item.number() {
                Ok(Number::Int(number)) => number,
                Ok(Number::Float(number)) if number.fract() == 0.0 && number.abs() < 9e15 => number as i64,
                _ => return Ok(false),
            };
            let is_between = if step > 0 { start <= number && number < end } else { end < number && number <= start };
            return Ok(is_between && (i128::from(number) - i128::from(start)) % i128::from(step) == 0);
        }
        match (&item, self.value(&operands[1])?) {
            (_, Datum::List(items)) => Ok(items.iter().any(|other| item.same(other))),
            (Datum::Text(part), Datum::Text(whole)) => Ok(whole.contains(&**part)),
            _ => Err(Undefined::Kind),
        }
    }

    fn apply(&mut self, operator: ExpressionOperator, operands: &[ResolvedExpression]) -> Result<Datum, Undefined> {
        use std::cmp::Ordering;
        let mut value = |at: usize| self.value(&operands[at]);
        let holds = |condition: bool| Ok(Datum::Bool(condition));
        match operator {
            Op::Choose => {
                let at = if value(1)?.holds() { 0 } else { 2 };
                value(at)
            }
            Op::Or => Some(value(0)?).filter(Datum::holds).map_or_else(|| value(1), Ok),
            Op::And => Some(value(0)?).filter(|first| !first.holds()).map_or_else(|| value(1), Ok),
            Op::Not => holds(!value(0)?.holds()),
            Op::In => holds(self.is_in(operands)?),
            Op::NotIn => holds(!self.is_in(operands)?),
            Op::Equal => holds(value(0)?.same(&value(1)?)),
            Op::NotEqual => holds(!value(0)?.same(&value(1)?)),
            Op::AtMost => holds(matches!(value(0)?.compare(&value(1)?)?, Some(Ordering::Less | Ordering::Equal))),
            Op::AtLeast => holds(matches!(value(0)?.compare(&value(1)?)?, Some(Ordering::Greater | Ordering::Equal))),
            Op::Less => holds(value(0)?.compare(&value(1)?)? == Some(Ordering::Less)),
            Op::Greater => holds(value(0)?.compare(&value(1)?)? == Some(Ordering::Greater)),
            Op::Add => match (value(0)?, value(1)?) {
                (Datum::List(a), Datum::List(b)) => {
                    self.spend(a.len() + b.len())?;
                    Ok(Datum::List(a.iter().chain(&*b).cloned().collect()))
                }
                (a, b) => a.arithmetic(&b, i64::checked_add, |a, b| a + b),
            },
            Op::Subtract => value(0)?.arithmetic(&value(1)?, i64::checked_sub, |a, b| a - b),
            Op::Multiply => match (value(0)?, value(1)?) {
                (Datum::List(items), times) | (times, Datum::List(items)) => {
                    let times = usize::try_from(times.int().ok_or(Undefined::Kind)?).unwrap_or(0);
                    self.spend(items.len().saturating_mul(times))?;
                    Ok(Datum::List(std::iter::repeat_n(&*items, times).flatten().cloned().collect()))
                }
                (a, b) => a.arithmetic(&b, i64::checked_mul, |a, b| a * b),
            },
            Op::Divide => value(0)?.quotient(&value(1)?),
            Op::FloorDivide => value(0)?.floor_quotient(&value(1)?),
            Op::Remainder => value(0)?.remainder(&value(1)?),
            Op::Negate => value(0)?.negate(),
            Op::Power => value(0)?.power(&value(1)?),
            Op::Item => {
                let (items, at) = (value(0)?, value(1)?.int().ok_or(Undefined::Kind)?);
                let Datum::List(items) = items else { return Err(Undefined::Kind) };
                let at = if at < 0 { at + items.len() as i64 } else { at };
                usize::try_from(at).ok().and_then(|at| items.get(at)).cloned().ok_or(Undefined::Kind)
            }
            Op::List => {
                self.spend(operands.len())?;
                Ok(Datum::List(operands.iter().map(|operand| self.value(operand)).collect::<Result<_, _>>()?))
            }
            Op::Set => {
                self.spend(operands.len())?;
                let mut items: Vec<Datum> = Vec::new();
                for operand in operands {
                    let item = self.value(operand)?;
                    if !items.iter().any(|other| item.same(other)) {
                        items.push(item);
                    }
                }
                Ok(Datum::List(items.into()))
            }
            Op::Minimum => self.extreme(operands, Ordering::Less),
            Op::Maximum => self.extreme(operands, Ordering::Greater),
            Op::Absolute => value(0)?.absolute(),
            Op::Length => match value(0)? {
                Datum::List(items) => Ok(Datum::Int(items.len() as i64)),
                Datum::Text(text) => Ok(Datum::Int(text.chars().count() as i64)),
                _ => Err(Undefined::Kind),
            },
            Op::Sum => {
                let items = self.items(&operands[0])?;
                items.iter().try_fold(Datum::Int(0), |sum, item| sum.arithmetic(item, i64::checked_add, |a, b| a + b))
            }
            Op::Any => holds(self.items(&operands[0])?.iter().any(Datum::holds)),
            Op::All => holds(self.items(&operands[0])?.iter().all(Datum::holds)),
            Op::Range => {
                let (start, end, step) = self.bounds(operands)?;
                let (from, to, by) = (i128::from(start), i128::from(end), i128::from(step));
                // Rounded up, towards the end.
                let n = ((to - from + by - by.signum()) / by).max(0);
                self.spend(usize::try_from(n).unwrap_or(usize::MAX))?;
                Ok(Datum::List((0..n).map(|at| Datum::Int((from + at * by) as i64)).collect()))
            }
            Op::ToList => match operands {
                [] => Ok(Datum::List(Arc::from([]))),
                [list, ..] => Ok(Datum::List(self.items(list)?)),
            },
            Op::ToInt => match value(0)?.number()? {
                Number::Int(number) => Ok(Datum::Int(number)),
                Number::Float(number) if number.abs() < 9e18 => Ok(Datum::Int(number as i64)),
                Number::Float(_) => Err(Undefined::TooLarge),
            },
            Op::ToFloat => Ok(Datum::Float(value(0)?.number()?.float())),
            Op::CeilDivide => {
                let (a, b) = (value(0)?.int().ok_or(Undefined::Kind)?, value(1)?.int().ok_or(Undefined::Kind)?);
                if b == 0 {
                    return Err(Undefined::ZeroDivision);
                }
                let quotient = a.checked_neg().and_then(|a| floor_div(a, b)?.checked_neg());
                quotient.map(Datum::Int).ok_or(Undefined::TooLarge)
            }
            Op::Gcd => {
                let (a, b) = (value(0)?.int().ok_or(Undefined::Kind)?, value(1)?.int().ok_or(Undefined::Kind)?);
                let (mut a, mut b) = (a.unsigned_abs(), b.unsigned_abs());
                while b != 0 {
                    (a, b) = (b, a % b);
                }
                i64::try_from(a).map(Datum::Int).map_err(|_| Undefined::TooLarge)
            }
            Op::IsPowerOfTwo => holds(value(0)?.int().ok_or(Undefined::Kind)?.max(0).count_ones() == 1),
        }
    }

    /// First of the smallest or, by `wanted`, of the largest operands.
    fn extreme(&mut self, operands: &[ResolvedExpression], wanted: std::cmp::Ordering) -> Result<Datum, Undefined> {
        let items = match operands {
            [list] => self.items(list)?,
            _ => operands.iter().map(|operand| self.value(operand)).collect::<Result<_, _>>()?,
        };
        let mut best = items.first().ok_or(Undefined::Kind)?;
        for item in &items[1..] {
            if item.compare(best)? == Some(wanted) {
                best = item;
            }
        }
        Ok(best.clone())
    }
}

impl ResolvedExpression {
    /// Evaluates the code; `None` if it is undefined.
    pub fn evaluate(&self, slots: &[Option<Datum>]) -> Option<Datum> {
        self.try_evaluate(slots).ok()
    }

    /// Evaluates the code as a condition; an undefined one is false.
    pub fn holds(&self, slots: &[Option<Datum>]) -> bool {
        self.try_evaluate(slots).is_ok_and(|value| value.holds())
    }

    /// Evaluates the code.
    ///
    /// # Errors
    /// The reason why the value is undefined.
    pub fn try_evaluate(&self, slots: &[Option<Datum>]) -> Result<Datum, Undefined> {
        ExpressionEvaluation { slots, locals: Vec::new(), n_left: MOST_ITEMS }.value(self)
    }

    /// Folds constants: partially evaluates the code with some slots known. The inner `None` is a slot known
    /// to be undefined. The result means the same, and reads as few slots as possible.
    pub fn fold(&self, known: &[Option<Option<Datum>>]) -> ResolvedExpression {
        self.fold_within(known, false)
    }

    /// `in_each`: whether the code is part of a comprehension, on whose items it may depend.
    fn fold_within(&self, known: &[Option<Option<Datum>>], in_each: bool) -> ResolvedExpression {
        let fold_slot = |slot: usize| match &known[slot] {
            Some(value) => ResolvedExpression::Constant(value.clone().ok_or(Undefined::Unknown)),
            None => ResolvedExpression::Slot(slot),
        };
        let (operator, operands) = match self {
            ResolvedExpression::Constant(_) | ResolvedExpression::Local(_) => return self.clone(),
            ResolvedExpression::Slot(slot) => return fold_slot(*slot),
            ResolvedExpression::Each(item, clauses) => {
                let clauses = clauses.iter().map(|clause| match clause {
                    Clause::For(name, list) => Clause::For(name.clone(), list.fold_within(known, true)),
                    Clause::If(condition) => Clause::If(condition.fold_within(known, true)),
                });
                let folded = ResolvedExpression::Each(Box::new(item.fold_within(known, true)), clauses.collect());
                let is_known = !in_each && folded.all_reads().is_empty();
                return if is_known { ResolvedExpression::Constant(folded.try_evaluate(&[])) } else { folded };
            }
            ResolvedExpression::Apply(operator, operands) => (*operator, operands),
        };
        let mut folded: Vec<ResolvedExpression> =
            operands.iter().map(|operand| operand.fold_within(known, in_each)).collect();
        if let (Op::In | Op::NotIn, [_, ResolvedExpression::Apply(Op::Range, bounds)]) = (operator, &operands[..]) {
            // A range is not expanded to a list here, however long it is.
            folded[1] = ResolvedExpression::Apply(
                Op::Range,
                bounds.iter().map(|bound| bound.fold_within(known, in_each)).collect(),
            );
        }
        let decider = usize::from(operator == Op::Choose);
        match (operator, folded.get(decider)) {
            (Op::Choose | Op::Or | Op::And, Some(ResolvedExpression::Constant(Err(why)))) => {
                ResolvedExpression::Constant(Err(*why))
            }
            (Op::Choose, Some(ResolvedExpression::Constant(Ok(value)))) => {
                let at = if value.holds() { 0 } else { 2 };
                folded.swap_remove(at)
            }
            (Op::Or, Some(ResolvedExpression::Constant(Ok(value)))) if !value.holds() => folded.swap_remove(1),
            (Op::And, Some(ResolvedExpression::Constant(Ok(value)))) if value.holds() => folded.swap_remove(1),
            (Op::Or | Op::And, Some(ResolvedExpression::Constant(decided))) => {
                ResolvedExpression::Constant(decided.clone())
            }
            _ if folded.iter().all(|operand| matches!(operand, ResolvedExpression::Constant(_))) => {
                ResolvedExpression::Constant(ResolvedExpression::Apply(operator, folded).try_evaluate(&[]))
            }
            _ => ResolvedExpression::Apply(operator, folded),
        }
    }

    /// Returns the code with its slots renumbered by `place`.
    pub(crate) fn moved(&self, place: &impl Fn(usize) -> usize) -> ResolvedExpression {
        match self {
            ResolvedExpression::Constant(_) | ResolvedExpression::Local(_) => self.clone(),
            ResolvedExpression::Slot(slot) => ResolvedExpression::Slot(place(*slot)),
            ResolvedExpression::Apply(operator, operands) => {
                ResolvedExpression::Apply(*operator, operands.iter().map(|operand| operand.moved(place)).collect())
            }
            ResolvedExpression::Each(item, clauses) => {
                let clauses = clauses.iter().map(|clause| match clause {
                    Clause::For(name, list) => Clause::For(name.clone(), list.moved(place)),
                    Clause::If(condition) => Clause::If(condition.moved(place)),
                });
                ResolvedExpression::Each(Box::new(item.moved(place)), clauses.collect())
            }
        }
    }

    /// Splits a condition into conjuncts.
    pub fn conjuncts(self) -> Vec<ResolvedExpression> {
        match self {
            ResolvedExpression::Apply(Op::And, operands) => {
                operands.into_iter().flat_map(ResolvedExpression::conjuncts).collect()
            }
            other => vec![other],
        }
    }

    /// Slots that the code reads, repeated for each read.
    pub(crate) fn all_reads(&self) -> Vec<usize> {
        let mut slots = Vec::new();
        self.reads(&mut slots);
        slots
    }

    /// Collects the slots that the code reads.
    pub fn reads(&self, slots: &mut Vec<usize>) {
        match self {
            ResolvedExpression::Constant(_) | ResolvedExpression::Local(_) => {}
            ResolvedExpression::Slot(slot) => slots.push(*slot),
            ResolvedExpression::Apply(_, operands) => operands.iter().for_each(|operand| operand.reads(slots)),
            ResolvedExpression::Each(item, clauses) => {
                item.reads(slots);
                clauses.iter().for_each(|clause| match clause {
                    Clause::For(_, part) | Clause::If(part) => part.reads(slots),
                });
            }
        }
    }
}
