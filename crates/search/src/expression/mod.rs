//! Expressions with Python's semantics: constraints between parameters, definitions of kernel specifications,
//! and value lists that users write.
//!
//! Integers are 64 bits wide. An expression for which Python would raise an exception, such as a division by
//! zero, or whose result does not fit 64 bits is undefined, and an undefined constraint does not hold. `and`,
//! `or` and `… if … else …` short-circuit, so that a condition can guard a division.

mod code;
mod datum;
mod parse;
pub mod residual;
#[cfg(test)]
mod tests;

use std::fmt;

pub use code::{ResolvedExpression, ValueType, VariableNames};
pub use datum::Datum;

/// Maximum number of tokens of an expression.
const MOST_PARTS: usize = 20_000;
/// Maximum nesting depth: expressions are processed by recursion.
const MOST_DEPTH: usize = 500;
/// Maximum number of list items that one evaluation may create: expressions are untrusted input.
const MOST_ITEMS: usize = 1 << 20;

/// Error of a text that is not a valid expression; the mistake is its author's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("position {position}: {reason}")]
pub struct ExpressionError {
    /// Position of the offending character, counted from 1.
    pub position: usize,
    /// Reason of the error.
    pub reason: Reason,
}

/// Reason why an expression is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Invalid character.
    #[error("unexpected character {0:?}")]
    Character(char),
    /// Symbol of Python or another language that expressions here do not support.
    #[error("`{found}` is not known here; {instead}")]
    Foreign {
        /// The symbol.
        found: String,
        /// Advice on what to write instead.
        instead: String,
    },
    /// Malformed number, or integer beyond 64 bits.
    #[error("the number is malformed or too large")]
    Number,
    /// Unterminated text.
    #[error("the quoted text does not end")]
    Quote,
    /// Unexpected token.
    #[error("expected {expected}, found {found}")]
    Expected {
        /// Description of the tokens that are valid at this position.
        expected: String,
        /// Description of the token found.
        found: String,
    },
    /// Expression of too many tokens.
    #[error("more than {MOST_PARTS} words and symbols")]
    TooLong,
    /// Expression nested too deeply.
    #[error("nested more than {MOST_DEPTH} deep")]
    TooDeep,
    /// Function with too few or too many arguments.
    #[error("{function} takes {expected}, found {found}")]
    Arguments {
        /// The function.
        function: &'static str,
        /// Number of arguments that it takes, in words.
        expected: String,
        /// Number of arguments given.
        found: usize,
    },
    /// Unknown function.
    #[error("unknown function {name}; there are {known}")]
    UnknownFunction {
        /// The name.
        name: String,
        /// Names of the known functions.
        known: String,
    },
    /// Name that is undefined, or defined only later.
    #[error("unknown name {name}; {}", if known.is_empty() { "there are none here".to_owned() } else { format!("there are {known}") })]
    UnknownName {
        /// The name.
        name: String,
        /// Names that are defined.
        known: String,
    },
    /// Operand of a type that the operator does not accept.
    #[error("{operator} takes {expected}, found {found}")]
    Type {
        /// The operator.
        operator: &'static str,
        /// Accepted types, in words.
        expected: String,
        /// Type of the operand.
        found: String,
    },
    /// Text that is not among the values of the parameter it is compared with.
    #[error("{text:?} is not one of its values {known}")]
    UnknownValue {
        /// The text.
        text: String,
        /// Values of the parameter.
        known: String,
    },
    /// Constant expression that is undefined.
    #[error("it has no value: {0}")]
    Undefined(Undefined),
}

/// Reason why an expression is undefined: Python raises an exception, or a number overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Undefined {
    /// Division by zero.
    #[error("a division by zero")]
    ZeroDivision,
    /// Integer overflow beyond 64 bits.
    #[error("the number is too large")]
    TooLarge,
    /// Operands of unsuitable types, or a list index out of range.
    #[error("an operator with operands that it does not take")]
    Kind,
    /// List that exceeds the limit of items of one evaluation.
    #[error("more than {MOST_ITEMS} values, those in between included")]
    TooMany,
    /// Undefined name.
    #[error("a name without a value")]
    Unknown,
}

/// Operator or function of expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpressionOperator {
    /// Conditional `a if c else b`; operands are `a`, `c`, `b`.
    Choose,
    /// `a or b`: the first operand if it is true, else the second.
    Or,
    /// `a and b`: the second operand if the first is true, else the first.
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
    /// `a + b`; concatenates lists.
    Add,
    /// Difference.
    Subtract,
    /// `a * b`; repeats a list.
    Multiply,
    /// `a / b`, a floating-point number.
    Divide,
    /// `a // b`, rounded down.
    FloorDivide,
    /// `a % b`, with the sign of the divisor.
    Remainder,
    /// `-a`.
    Negate,
    /// `a ** b`.
    Power,
    /// `list[index]`; a negative index counts from the end.
    Item,
    /// `[a, b]`.
    List,
    /// `{a, b}`.
    Set,
    /// `min`, of a list or of the arguments.
    Minimum,
    /// `max`, of a list or of the arguments.
    Maximum,
    /// `abs`.
    Absolute,
    /// `len`, of a list or a text.
    Length,
    /// `sum` of a list.
    Sum,
    /// `any`: whether an item of a list is true.
    Any,
    /// `all`: whether all items of a list are true.
    All,
    /// `range`, as a list.
    Range,
    /// `list`: the items as a list.
    ToList,
    /// `int`: conversion to an integer, rounded towards zero.
    ToInt,
    /// `float`: conversion to a floating-point number.
    ToFloat,
    /// Quotient rounded up, which is not a Python function.
    CeilDivide,
    /// Greatest common divisor.
    Gcd,
    /// Whether a number is 1, 2, 4, 8, …
    IsPowerOfTwo,
}

use ExpressionOperator as Op;

/// Form in which an operator is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OperatorForm {
    /// Infix form; operands on the right bind more tightly.
    Infix(u8),
    /// Infix form of comparisons; a chain holds if each of them does.
    Comparison,
    /// Prefix of its operand.
    Prefix(u8),
    /// Function with this minimum and maximum number of arguments.
    Function(usize, usize),
    /// Special form.
    Special(u8),
}

/// Binding strengths, loosest first.
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
/// Keyword that begins an anonymous function in Python.
const LAMBDA: &str = "lambda";
/// Symbols that belong to no single operator.
const PUNCTUATION: &[&str] = &["(", ")", "[", "]", "{", "}", ","];
/// Keywords that belong to no single operator.
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

/// Whether a text is a valid name of a field, a parameter or a definition. Functions are distinguished from
/// names by their parentheses.
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
    /// Quotient rounded down, like `//`: in kernel specifications, all of whose numbers are integers.
    RoundsDown,
}

/// Parsed expression. Equality ignores positions in the source text.
#[derive(Debug, Clone)]
pub struct Expression {
    kind: ExpressionNode,
    position: usize,
    /// Nesting depth.
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
    /// Chain of comparisons, each with its right operand.
    Compare(Box<Expression>, Vec<(ExpressionOperator, Expression)>),
    /// `[item for name in list if condition]`.
    Each(Box<Expression>, Vec<Clause<Expression>>),
}

/// Clause of a comprehension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Clause<T> {
    /// Iteration over a list, with the name of the item.
    For(String, T),
    /// Filter that an item must satisfy.
    If(T),
}

impl Expression {
    /// Parses an expression.
    ///
    /// # Errors
    /// If the text is not an expression; the error has the position.
    pub fn parse(text: &str) -> Result<Expression, ExpressionError> {
        Expression::parse_with(text, Slash::Divides)
    }

    /// Evaluates an expression without names.
    ///
    /// # Errors
    /// If the expression reads a name or is undefined.
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

    /// Text of a name, or of such a text indexed by a constant number, as in `sizes[0]`.
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

    /// Prints the expression, in parentheses if it binds more loosely than `wanted`.
    fn print(&self, out: &mut fmt::Formatter, wanted: u8) -> fmt::Result {
        if self.level() < wanted { write!(out, "({self})") } else { write!(out, "{self}") }
    }
}

/// Parses and evaluates an expression with values for its names.
///
/// # Errors
/// A description, if the text is not an expression or its value is undefined.
pub fn evaluate(text: &str, known: &[(String, Datum)]) -> Result<Datum, String> {
    let scope: VariableNames = known.iter().map(|(name, value)| (name.clone(), ValueType::of(value))).collect();
    let slots: Vec<Option<Datum>> = known.iter().map(|(_, value)| Some(value.clone())).collect();
    let code = Expression::parse(text).and_then(|expression| expression.compile(&scope));
    code.map_err(|error| error.to_string())?.0.try_evaluate(&slots).map_err(|error| error.to_string())
}

/// Parses and evaluates an expression without names that yields a list.
///
/// # Errors
/// If the text is not an expression, or its value is not a list.
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
