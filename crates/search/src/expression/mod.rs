//! Expressions with Python's meaning: constraints between parameters, definitions of kernel specifications,
//! and the lists of values that people write.
//!
//! Integers are 64 bits wide. An expression for which Python would raise an exception, such as a division by
//! zero, or whose result does not fit into those bits has no value here, and a constraint without a value
//! does not hold.
//! `and`, `or` and `… if … else …` evaluate only what they need, so that a condition can guard a division.

mod code;
mod datum;
mod parse;
pub mod residual;
#[cfg(test)]
mod tests;

use std::fmt;

pub use code::{ResolvedExpression, ValueType, VariableNames};
pub use datum::Datum;

/// The most words and symbols that an expression may have.
const MOST_PARTS: usize = 20_000;
/// The deepest nesting, which is walked by recursion.
const MOST_DEPTH: usize = 500;
/// The most items of lists that one evaluation may make: expressions come from others.
const MOST_ITEMS: usize = 1 << 20;

/// Error of a text that is no expression, or does not fit the names it reads. The fault is the writer's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("position {position}: {reason}")]
pub struct ExpressionError {
    /// Position of the character that the error is about, from 1.
    pub position: usize,
    /// Reason of the error.
    pub reason: Reason,
}

/// Reasons for which an expression is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// A character that no expression has.
    #[error("unexpected character {0:?}")]
    Character(char),
    /// A symbol of other languages, or of Python, that expressions here do not have.
    #[error("`{found}` is not known here; {instead}")]
    Foreign {
        /// The symbol.
        found: String,
        /// Advice on what to write in its place.
        instead: String,
    },
    /// An integer beyond 64 bits, or digits that form no number.
    #[error("the number is too large, or none")]
    Number,
    /// A text that does not end.
    #[error("the quoted text does not end")]
    Quote,
    /// A different symbol, word or value is expected here.
    #[error("expected {expected}, found {found}")]
    Expected {
        /// Description of what could stand here.
        expected: String,
        /// Description of what stands here.
        found: String,
    },
    /// More words and symbols than an expression may have.
    #[error("more than {MOST_PARTS} words and symbols")]
    TooLong,
    /// Deeper nesting than an expression may have.
    #[error("nested more than {MOST_DEPTH} deep")]
    TooDeep,
    /// A function with too few or too many arguments.
    #[error("{function} takes {expected}, found {found}")]
    Arguments {
        /// The function.
        function: &'static str,
        /// Number of arguments that it takes, in words.
        expected: String,
        /// Number of arguments given.
        found: usize,
    },
    /// A function that is not known.
    #[error("unknown function {name}; there are {known}")]
    UnknownFunction {
        /// The name.
        name: String,
        /// The functions there are.
        known: String,
    },
    /// A name that is not defined, or only later.
    #[error("unknown name {name}; {}", if known.is_empty() { "there are none here".to_owned() } else { format!("there are {known}") })]
    UnknownName {
        /// The name.
        name: String,
        /// The names there are.
        known: String,
    },
    /// An operand of a kind that the operator does not take.
    #[error("{operator} takes {expected}, found {found}")]
    Type {
        /// The operator.
        operator: &'static str,
        /// Kinds of operands that it takes.
        expected: String,
        /// Kind of the operand given.
        found: String,
    },
    /// A text that is not one of the values it is compared with.
    #[error("{text:?} is none of its values {known}")]
    UnknownValue {
        /// The text.
        text: String,
        /// The values.
        known: String,
    },
    /// An expression that reads no names and has no value.
    #[error("it has no value: {0}")]
    Undefined(Undefined),
}

/// Reasons for which an expression has no value, where Python has an exception or a number that does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Undefined {
    /// A division by zero.
    #[error("a division by zero")]
    ZeroDivision,
    /// A number beyond 64 bits.
    #[error("the number is too large")]
    TooLarge,
    /// Operands of kinds that the operator does not take, or a place that a list does not have.
    #[error("an operator of what it does not take")]
    Kind,
    /// Lists with more items than one evaluation may make.
    #[error("more than {MOST_ITEMS} values")]
    TooMany,
    /// A name without a value.
    #[error("a name without a value")]
    Unknown,
}

/// Operators of expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpressionOperator {
    /// `a if c else b`; operands are `a`, `c`, `b`.
    Choose,
    /// The first operand if it holds, else the second.
    Or,
    /// The first operand unless it holds, else the second.
    And,
    /// Negation of a condition.
    Not,
    /// `x in list`.
    In,
    /// `x not in list`.
    NotIn,
    /// `a == b`.
    Equal,
    /// `a != b`.
    NotEqual,
    /// `a <= b`.
    AtMost,
    /// `a >= b`.
    AtLeast,
    /// `a < b`.
    Less,
    /// `a > b`.
    Greater,
    /// Sum, of lists too.
    Add,
    /// Difference.
    Subtract,
    /// Product, of a list and a number too.
    Multiply,
    /// Quotient, a floating-point number.
    Divide,
    /// Quotient, rounded down.
    FloorDivide,
    /// Remainder of the quotient rounded down; its sign is the divisor's.
    Remainder,
    /// The negative.
    Negate,
    /// Power of a number.
    Power,
    /// `list[place]`, from the end where the place is negative.
    Item,
    /// `[a, b]`.
    List,
    /// `{a, b}`.
    Set,
    /// The least, of a list or of the arguments.
    Minimum,
    /// The greatest.
    Maximum,
    /// The absolute value.
    Absolute,
    /// Items of a list, or characters of a text.
    Length,
    /// The sum of a list.
    Sum,
    /// Whether an item of a list holds.
    Any,
    /// Whether all items of a list hold.
    All,
    /// Integers as Python's `range` gives them.
    Range,
    /// The items of a list.
    ToList,
    /// Conversion to an integer, rounded towards zero.
    ToInt,
    /// Conversion to a floating-point number.
    ToFloat,
    /// Quotient, rounded up; Python has none of that name.
    CeilDivide,
    /// Greatest common divisor.
    Gcd,
    /// Whether it is 1, 2, 4, 8, …
    IsPowerOfTwo,
}

use ExpressionOperator as Op;

/// Form in which an operator is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OperatorForm {
    /// Infix form; operands on the right bind more tightly.
    Infix(u8),
    /// Infix form of comparisons; several in a row hold where each does.
    Comparison,
    /// Prefix of its operand.
    Prefix(u8),
    /// Function of this many arguments, at least and at most.
    Function(usize, usize),
    /// Form of its own.
    Special(u8),
}

/// Levels of binding, the loosest first.
const CHOICE: u8 = 1;
const COMPARISON: u8 = 5;
const NEGATION: u8 = 8;
const POWER: u8 = 9;
const WHOLE: u8 = 10;

/// Every operator with its text.
const OPERATORS: &[(ExpressionOperator, &str, OperatorForm)] = &[
    (Op::Choose, "if", OperatorForm::Special(CHOICE)),
    (Op::Or, "or", OperatorForm::Infix(2)),
    (Op::And, "and", OperatorForm::Infix(3)),
    (Op::Not, "not", OperatorForm::Prefix(4)),
    (Op::In, "in", OperatorForm::Comparison),
    (Op::NotIn, "not in", OperatorForm::Comparison),
    (Op::Equal, "==", OperatorForm::Comparison),
    (Op::NotEqual, "!=", OperatorForm::Comparison),
    (Op::AtMost, "<=", OperatorForm::Comparison),
    (Op::AtLeast, ">=", OperatorForm::Comparison),
    (Op::Less, "<", OperatorForm::Comparison),
    (Op::Greater, ">", OperatorForm::Comparison),
    (Op::Add, "+", OperatorForm::Infix(6)),
    (Op::Subtract, "-", OperatorForm::Infix(6)),
    (Op::Multiply, "*", OperatorForm::Infix(7)),
    (Op::Divide, "/", OperatorForm::Infix(7)),
    (Op::FloorDivide, "//", OperatorForm::Infix(7)),
    (Op::Remainder, "%", OperatorForm::Infix(7)),
    (Op::Negate, "-", OperatorForm::Prefix(NEGATION)),
    (Op::Power, "**", OperatorForm::Special(POWER)),
    (Op::Item, "[]", OperatorForm::Special(WHOLE)),
    (Op::List, "a list", OperatorForm::Special(WHOLE)),
    (Op::Set, "a set", OperatorForm::Special(WHOLE)),
    (Op::Minimum, "min", OperatorForm::Function(1, usize::MAX)),
    (Op::Maximum, "max", OperatorForm::Function(1, usize::MAX)),
    (Op::Absolute, "abs", OperatorForm::Function(1, 1)),
    (Op::Length, "len", OperatorForm::Function(1, 1)),
    (Op::Sum, "sum", OperatorForm::Function(1, 1)),
    (Op::Any, "any", OperatorForm::Function(1, 1)),
    (Op::All, "all", OperatorForm::Function(1, 1)),
    (Op::Range, "range", OperatorForm::Function(1, 3)),
    (Op::ToList, "list", OperatorForm::Function(0, 1)),
    (Op::ToList, "tuple", OperatorForm::Function(0, 1)),
    (Op::ToInt, "int", OperatorForm::Function(1, 1)),
    (Op::ToFloat, "float", OperatorForm::Function(1, 1)),
    (Op::CeilDivide, "ceil_div", OperatorForm::Function(2, 2)),
    (Op::Gcd, "gcd", OperatorForm::Function(2, 2)),
    (Op::IsPowerOfTwo, "is_power_of_two", OperatorForm::Function(1, 1)),
];
/// Symbols of other languages, each with advice on what to write here.
const FOREIGN: &[(&str, &str)] = &[
    (".", "names have no parts: write the value, and `tile` in the place of `p.tile`"),
    ("=", "write `==`"),
    ("<>", "write `!=`"),
    ("!", "write `not`"),
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("&", "write `and`, or `x % 4` for the last bits of x"),
    ("|", "write `or`"),
    ("^", "write `**` for a power, `!=` between conditions"),
    ("~", "write `not`"),
    ("<<", "write a product with a power of 2"),
    (">>", "write `//` with a power of 2"),
    ("?", "write `a if c else b`"),
    (":", LONE_CONDITION),
];
const LONE_CONDITION: &str = "write the condition alone, such as `tile <= 32`";
/// A word that begins a function of Python's.
const LAMBDA: &str = "lambda";
/// Symbols that belong to no one operator.
const PUNCTUATION: &[&str] = &["(", ")", "[", "]", "{", "}", ","];
/// Words that belong to no one operator.
const ELSE: &str = "else";
const FOR: &str = "for";
const CONSTANTS: &[(&str, Datum)] =
    &[("True", Datum::Bool(true)), ("False", Datum::Bool(false)), ("None", Datum::Nothing)];

impl ExpressionOperator {
    fn row(self) -> (&'static str, OperatorForm) {
        let row = OPERATORS.iter().find(|(operator, ..)| *operator == self).expect("invariant: the table has all");
        (row.1, row.2)
    }

    fn level(self) -> u8 {
        match self.row().1 {
            OperatorForm::Infix(level) | OperatorForm::Prefix(level) | OperatorForm::Special(level) => level,
            OperatorForm::Comparison => COMPARISON,
            OperatorForm::Function(..) => WHOLE,
        }
    }
}

/// Whether a text can name a field, a parameter or a definition. Functions are told from names by their
/// arguments.
pub fn is_name(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_alphabetic() || c == '_');
    let is_operator =
        OPERATORS.iter().any(|(_, word, form)| *word == text && !matches!(form, OperatorForm::Function(..)));
    let is_reserved = [ELSE, FOR, LAMBDA].contains(&text) || CONSTANTS.iter().any(|(word, _)| *word == text);
    begins && !is_operator && !is_reserved && text.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// Meaning of `/` in an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slash {
    /// Quotient as in Python, a floating-point number.
    Divides,
    /// Quotient rounded down, as `//`: so it is in kernel specifications, whose numbers are whole.
    RoundsDown,
}

/// An expression as it was written. Equality does not ask where in a text a part stood.
#[derive(Debug, Clone)]
pub struct Expression {
    kind: ExpressionNode,
    position: usize,
    /// Depth of its nesting.
    depth: usize,
}

impl PartialEq for Expression {
    fn eq(&self, other: &Expression) -> bool {
        self.kind == other.kind
    }
}

#[derive(Debug, Clone, PartialEq)]
enum ExpressionNode {
    Constant(Datum),
    Name(String),
    Apply(ExpressionOperator, Vec<Expression>),
    /// Comparisons in a row, each with what is on its right.
    Compare(Box<Expression>, Vec<(ExpressionOperator, Expression)>),
    /// `[item for name in list if condition]`.
    Each(Box<Expression>, Vec<Clause<Expression>>),
}

/// A part of a comprehension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Clause<T> {
    /// Iteration over the items of a list, by this name.
    For(String, T),
    /// Condition that an item must satisfy.
    If(T),
}

impl Expression {
    /// Reads an expression.
    ///
    /// # Errors
    /// If the text is no expression, with the position.
    pub fn parse(text: &str) -> Result<Expression, ExpressionError> {
        Expression::parse_with(text, Slash::Divides)
    }

    /// Evaluates an expression that reads no names.
    ///
    /// # Errors
    /// If it reads a name, or has no value.
    pub fn value(&self) -> Result<Datum, ExpressionError> {
        let value = self.compile(&VariableNames::new())?.0.try_evaluate(&[]);
        value.map_err(|why| ExpressionError { position: self.position, reason: Reason::Undefined(why) })
    }

    fn new(kind: ExpressionNode, position: usize) -> Expression {
        let depth = match &kind {
            ExpressionNode::Constant(_) | ExpressionNode::Name(_) => 0,
            ExpressionNode::Apply(_, operands) => operands.iter().map(|operand| operand.depth).max().unwrap_or(0),
            ExpressionNode::Compare(first, rest) => {
                rest.iter().fold(first.depth, |depth, (_, next)| depth.max(next.depth))
            }
            ExpressionNode::Each(item, clauses) => clauses.iter().fold(item.depth, |depth, clause| match clause {
                Clause::For(_, part) | Clause::If(part) => depth.max(part.depth),
            }),
        };
        Expression { kind, position, depth: depth + 1 }
    }

    /// Text of a name, or of an item of what has such a text, at a place that is a number.
    fn name_of_place(&self) -> Option<String> {
        match &self.kind {
            ExpressionNode::Name(name) => Some(name.clone()),
            ExpressionNode::Apply(Op::Item, operands) => match &operands[..] {
                [list, Expression { kind: ExpressionNode::Constant(Datum::Int(place)), .. }] => {
                    Some(format!("{}[{place}]", list.name_of_place()?))
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn level(&self) -> u8 {
        match &self.kind {
            ExpressionNode::Apply(operator, _) => operator.level(),
            ExpressionNode::Compare(..) => COMPARISON,
            ExpressionNode::Constant(Datum::Int(..0)) => NEGATION,
            ExpressionNode::Constant(Datum::Float(x)) if x.is_sign_negative() => NEGATION,
            _ => WHOLE,
        }
    }

    /// Prints it, with parentheses where its level is below what is wanted.
    fn print(&self, out: &mut fmt::Formatter, wanted: u8) -> fmt::Result {
        if self.level() < wanted { write!(out, "({self})") } else { write!(out, "{self}") }
    }
}

/// Evaluates an expression in which names have these values.
///
/// # Errors
/// A description, when the text is no expression or has no value.
pub fn evaluate(text: &str, known: &[(String, Datum)]) -> Result<Datum, String> {
    let scope: VariableNames = known.iter().map(|(name, value)| (name.clone(), ValueType::of(value))).collect();
    let slots: Vec<Option<Datum>> = known.iter().map(|(_, value)| Some(value.clone())).collect();
    let code = Expression::parse(text).and_then(|expression| expression.compile(&scope));
    code.map_err(|error| error.to_string())?.0.try_evaluate(&slots).map_err(|error| error.to_string())
}

/// Evaluates an expression that writes a list, without names.
///
/// # Errors
/// If the text is no expression, or its value no list.
pub fn list(text: &str) -> Result<Vec<Datum>, ExpressionError> {
    let expression = Expression::parse(text)?;
    match expression.value()? {
        Datum::List(items) => Ok(items.to_vec()),
        other => {
            let reason = Reason::Expected { expected: "a list, such as [1, 2, 4]".into(), found: other.to_string() };
            Err(ExpressionError { position: expression.position, reason })
        }
    }
}

fn print_list(out: &mut fmt::Formatter, list: &[Expression]) -> fmt::Result {
    for (at, item) in list.iter().enumerate() {
        write!(out, "{}{item}", if at > 0 { ", " } else { "" })?;
    }
    Ok(())
}

impl fmt::Display for Expression {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match &self.kind {
            ExpressionNode::Constant(Datum::Text(text)) => datum::write_quoted(out, text),
            ExpressionNode::Constant(datum) => write!(out, "{datum}"),
            ExpressionNode::Name(name) => out.write_str(name),
            ExpressionNode::Compare(first, rest) => {
                first.print(out, COMPARISON + 1)?;
                rest.iter().try_for_each(|(operator, next)| {
                    write!(out, " {} ", operator.row().0)?;
                    next.print(out, COMPARISON + 1)
                })
            }
            ExpressionNode::Each(item, clauses) => {
                write!(out, "[{item}")?;
                for clause in clauses {
                    match clause {
                        Clause::For(name, list) => {
                            write!(out, " {FOR} {name} in ")?;
                            list.print(out, CHOICE + 1)?;
                        }
                        Clause::If(condition) => {
                            out.write_str(" if ")?;
                            condition.print(out, CHOICE + 1)?;
                        }
                    }
                }
                out.write_str("]")
            }
            ExpressionNode::Apply(operator, operands) => match (operator, operator.row(), &operands[..]) {
                (Op::Choose, _, [then, condition, otherwise]) => {
                    then.print(out, CHOICE + 1)?;
                    out.write_str(" if ")?;
                    condition.print(out, CHOICE + 1)?;
                    write!(out, " {ELSE} {otherwise}")
                }
                (Op::Power, _, [base, power]) => {
                    base.print(out, POWER + 1)?;
                    out.write_str(" ** ")?;
                    power.print(out, NEGATION)
                }
                (Op::Item, _, [list, place]) => {
                    list.print(out, WHOLE)?;
                    write!(out, "[{place}]")
                }
                (Op::List | Op::Set, _, items) => {
                    out.write_str(if *operator == Op::List { "[" } else { "{" })?;
                    print_list(out, items)?;
                    out.write_str(if *operator == Op::List { "]" } else { "}" })
                }
                (_, (symbol, OperatorForm::Function(..)), arguments) => {
                    write!(out, "{symbol}(")?;
                    print_list(out, arguments)?;
                    out.write_str(")")
                }
                (_, (symbol, OperatorForm::Prefix(level)), [operand]) => {
                    write!(out, "{symbol}{}", if level == NEGATION { "" } else { " " })?;
                    operand.print(out, level)
                }
                (_, (symbol, _), [left, right]) => {
                    let level = operator.level();
                    left.print(out, level)?;
                    write!(out, " {symbol} ")?;
                    right.print(out, level + 1)
                }
                _ => unreachable!("invariant: operators have the operands they take"),
            },
        }
    }
}
