//! Expressions: what a kernel specification computes from the fields of a problem and the parameters of a
//! configuration.
//!
//! Integers are 64 bits wide; an overflow or a division by zero is undefined. `and`, `or` and `… if … else …`
//! evaluate only what they need, so that a condition can guard a division.

use std::fmt;
use std::sync::Arc;

use super::count;

/// The most parts that an expression may have: nesting is walked by recursion.
const MOST_PARTS: usize = 500;

/// Why a text is no expression, or does not fit the names it reads. The fault is the writer's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("position {position}: {reason}")]
pub struct ExpressionError {
    /// The character that it is about, from 1.
    pub position: usize,
    /// What is wrong there.
    pub reason: Reason,
}

/// What can be wrong with an expression.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// A character that no expression has.
    #[error("unexpected character {0:?}")]
    Character(char),
    /// What other languages have.
    #[error("`{found}` is not known here; {instead}")]
    Foreign {
        /// The symbol.
        found: String,
        /// What is written in its place.
        instead: &'static str,
    },
    /// Comparisons one after the other.
    #[error("comparisons do not chain; write `{instead}`")]
    Chained {
        /// What is written in their place.
        instead: String,
    },
    /// A number beyond 64 bits.
    #[error("the number is too large")]
    Number,
    /// A text that does not end.
    #[error("the quoted text does not end")]
    Quote,
    /// Something else is wanted here.
    #[error("expected {expected}, found {found}")]
    Expected {
        /// What could stand here.
        expected: String,
        /// What does.
        found: String,
    },
    /// More parts than [`MOST_PARTS`].
    #[error("more than {MOST_PARTS} words and symbols (define parts of it by names)")]
    TooLong,
    /// A function with too few or too many arguments.
    #[error("{function} takes {expected}, found {found}")]
    Arguments {
        /// The function.
        function: &'static str,
        /// How many it takes, in words.
        expected: String,
        /// How many there are.
        found: usize,
    },
    /// A name that is not defined, or only later.
    #[error("unknown name {name}; there are {known}")]
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
        /// What it takes.
        expected: String,
        /// What it was given.
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
    /// A text where nothing is compared.
    #[error("a text can only be compared with a name that has texts as values")]
    LooseText,
}

/// What is done to operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// `a if c else b`; operands are `a`, `c`, `b`.
    Choose,
    /// Either holds.
    Or,
    /// Both hold.
    And,
    /// It does not hold.
    Not,
    /// `x in {a, b}`; operands are `x`, `a`, `b`.
    Among,
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// At most.
    AtMost,
    /// At least.
    AtLeast,
    /// Less.
    Less,
    /// Greater.
    Greater,
    /// Sum.
    Add,
    /// Difference.
    Subtract,
    /// Product.
    Multiply,
    /// Quotient, rounded down.
    Divide,
    /// What is left of the quotient rounded down; it has the divisor's sign.
    Remainder,
    /// The negative.
    Negate,
    /// The least.
    Minimum,
    /// The greatest.
    Maximum,
    /// Quotient, rounded up.
    CeilDivide,
    /// Greatest common divisor.
    Gcd,
    /// Whether it is 1, 2, 4, 8, …
    IsPowerOfTwo,
}

use Operator as Op;

/// How an operator is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Between its operands, which bind more tightly on the right.
    Infix(u8),
    /// Between its operands, neither of which is of the same level.
    Comparison,
    /// Before its operand.
    Prefix(u8),
    /// As a function of at least, and at most, so many arguments.
    Function(usize, usize),
    /// In a way of its own.
    Special(u8),
}

/// Levels of binding, the loosest first.
const CHOICE: u8 = 1;
const COMPARISON: u8 = 5;
const NEGATION: u8 = 8;
const WHOLE: u8 = 9;

/// Every operator with its text. Of two where one begins like the other, the longer one comes first.
const OPERATORS: &[(Operator, &str, Form)] = &[
    (Op::Choose, "if", Form::Special(CHOICE)),
    (Op::Or, "or", Form::Infix(2)),
    (Op::And, "and", Form::Infix(3)),
    (Op::Not, "not", Form::Prefix(4)),
    (Op::Among, "in", Form::Special(COMPARISON)),
    (Op::Equal, "==", Form::Comparison),
    (Op::NotEqual, "!=", Form::Comparison),
    (Op::AtMost, "<=", Form::Comparison),
    (Op::AtLeast, ">=", Form::Comparison),
    (Op::Less, "<", Form::Comparison),
    (Op::Greater, ">", Form::Comparison),
    (Op::Add, "+", Form::Infix(6)),
    (Op::Subtract, "-", Form::Infix(6)),
    (Op::Multiply, "*", Form::Infix(7)),
    (Op::Divide, "/", Form::Infix(7)),
    (Op::Remainder, "%", Form::Infix(7)),
    (Op::Negate, "-", Form::Prefix(NEGATION)),
    (Op::Minimum, "min", Form::Function(2, usize::MAX)),
    (Op::Maximum, "max", Form::Function(2, usize::MAX)),
    (Op::CeilDivide, "ceil_div", Form::Function(2, 2)),
    (Op::Gcd, "gcd", Form::Function(2, 2)),
    (Op::IsPowerOfTwo, "is_power_of_two", Form::Function(1, 1)),
];
/// What other languages write, and how it is written here.
const FOREIGN: &[(&str, &str)] = &[
    ("//", "write `/`, which rounds down"),
    ("**", "write the product, such as `x * x`"),
    ("[", "write a list as `{1, 2, 4}`, and `tile` in the place of `p['tile']`"),
    ("]", "write a list as `{1, 2, 4}`, and `tile` in the place of `p['tile']`"),
    (".", "numbers are whole, so write `2 * x <= 3 * y` in the place of `x <= 1.5 * y`; names have no parts"),
    ("=", "write `==`"),
    ("<>", "write `!=`"),
    ("!", "write `not`"),
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("&", "write `and`, or `x % 4` for the last bits of x"),
    ("|", "write `or`"),
    ("<<", "write a product with a power of 2"),
    (">>", "write `/` with a power of 2"),
    ("?", "write `a if c else b`"),
    (":", LONE_CONDITION),
];
const LONE_CONDITION: &str = "write the condition alone, such as `tile <= 32`";
/// A word that begins a function of Python's.
const LAMBDA: &str = "lambda";
/// Symbols that belong to no one operator.
const PUNCTUATION: &[&str] = &["(", ")", "{", "}", ","];
/// The second word of a choice.
const ELSE: &str = "else";

impl Operator {
    fn row(self) -> (&'static str, Form) {
        let row = OPERATORS.iter().find(|(operator, ..)| *operator == self).expect("invariant: the table has all");
        (row.1, row.2)
    }

    fn level(self) -> u8 {
        match self.row().1 {
            Form::Infix(level) | Form::Prefix(level) | Form::Special(level) => level,
            Form::Comparison => COMPARISON,
            Form::Function(..) => WHOLE,
        }
    }
}

/// Whether an operator is written as a word.
fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
}

/// Whether a text can name a field, a parameter or a definition.
pub fn is_name(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let is_reserved = text == ELSE || OPERATORS.iter().any(|(_, word, _)| *word == text);
    begins && !is_reserved && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// An expression as it was written. Equality does not ask where in a text a part stood.
#[derive(Debug, Clone)]
pub struct Expression {
    kind: Kind,
    position: usize,
}

impl PartialEq for Expression {
    fn eq(&self, other: &Expression) -> bool {
        self.kind == other.kind
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Number(i64),
    Text(String),
    Name(String),
    Apply(Operator, Vec<Expression>),
}

impl Expression {
    /// Reads an expression.
    ///
    /// # Errors
    /// Where the text is none, with the position.
    pub fn parse(text: &str) -> Result<Expression, ExpressionError> {
        let mut parser = Parser { tokens: tokens(text)?, at: 0 };
        let expression = parser.expression(CHOICE)?;
        match parser.peek() {
            Token::End => Ok(expression),
            Token::Word(word) => {
                let known = OPERATORS.iter().map(|(_, known, _)| *known).filter(|known| is_word(known));
                let is_meant = |known: &&str| known.eq_ignore_ascii_case(word);
                Err(parser.expected(&match known.into_iter().find(is_meant) {
                    Some("not") => "an operator or the end (it is `not x in {…}` here)".to_owned(),
                    Some(known) => format!("an operator, such as `{known}`, or the end"),
                    None => "an operator or the end".to_owned(),
                }))
            }
            _ => Err(parser.expected("an operator or the end")),
        }
    }

    fn level(&self) -> u8 {
        match &self.kind {
            Kind::Apply(operator, _) => operator.level(),
            _ => WHOLE,
        }
    }

    /// With parentheses where its level is below what is wanted.
    fn print(&self, out: &mut fmt::Formatter, wanted: u8) -> fmt::Result {
        if self.level() < wanted { write!(out, "({self})") } else { write!(out, "{self}") }
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
            Kind::Number(number) => write!(out, "{number}"),
            Kind::Text(text) if text.contains('"') => write!(out, "'{text}'"),
            Kind::Text(text) => write!(out, "\"{text}\""),
            Kind::Name(name) => out.write_str(name),
            Kind::Apply(operator, operands) => match (operator, operator.row(), &operands[..]) {
                (Op::Choose, _, [then, condition, otherwise]) => {
                    then.print(out, CHOICE + 1)?;
                    out.write_str(" if ")?;
                    condition.print(out, CHOICE + 1)?;
                    write!(out, " {ELSE} {otherwise}")
                }
                (Op::Among, _, [item, list @ ..]) => {
                    item.print(out, COMPARISON + 1)?;
                    out.write_str(" in {")?;
                    print_list(out, list)?;
                    out.write_str("}")
                }
                (_, (symbol, Form::Function(..)), arguments) => {
                    write!(out, "{symbol}(")?;
                    print_list(out, arguments)?;
                    out.write_str(")")
                }
                (_, (symbol, Form::Prefix(level)), [operand]) => {
                    write!(out, "{symbol}{}", if level == NEGATION { "" } else { " " })?;
                    operand.print(out, level)
                }
                (_, (symbol, form), [left, right]) => {
                    let level = operator.level();
                    left.print(out, if form == Form::Comparison { level + 1 } else { level })?;
                    write!(out, " {symbol} ")?;
                    right.print(out, level + 1)
                }
                _ => unreachable!("invariant: operators have the operands they take"),
            },
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Number(i64),
    Text(String),
    /// A name, or an operator or function that is written as a word.
    Word(String),
    Symbol(&'static str),
    End,
}

impl fmt::Display for Token {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Token::Number(number) => write!(out, "{number}"),
            Token::Text(text) => write!(out, "{text:?}"),
            Token::Word(word) => write!(out, "`{word}`"),
            Token::Symbol(symbol) => write!(out, "`{symbol}`"),
            Token::End => out.write_str("the end"),
        }
    }
}

/// The words and symbols of a text with their positions; the last one is the end.
fn tokens(text: &str) -> Result<Vec<(Token, usize)>, ExpressionError> {
    let (mut found, mut rest, mut position) = (Vec::new(), text, 1);
    loop {
        let trimmed = rest.trim_start();
        position += rest[..rest.len() - trimmed.len()].chars().count();
        rest = trimmed;
        let fail = |reason| ExpressionError { position, reason };
        if found.len() > MOST_PARTS {
            return Err(fail(Reason::TooLong));
        }
        let Some(first) = rest.chars().next() else { break };
        let length_of = |test: fn(char) -> bool| rest.find(|c| !test(c)).unwrap_or(rest.len());
        let (token, length) = if first.is_ascii_digit() {
            let length = length_of(|c| c.is_ascii_digit());
            (Token::Number(rest[..length].parse().map_err(|_| fail(Reason::Number))?), length)
        } else if first.is_ascii_alphabetic() || first == '_' {
            let length = length_of(|c| c.is_ascii_alphanumeric() || c == '_');
            (Token::Word(rest[..length].to_owned()), length)
        } else if first == '"' || first == '\'' {
            let length = rest[1..].find(first).ok_or_else(|| fail(Reason::Quote))?;
            (Token::Text(rest[1..1 + length].to_owned()), length + 2)
        } else {
            let symbols = OPERATORS.iter().map(|(_, text, _)| *text).chain(PUNCTUATION.iter().copied());
            let symbols = symbols.map(|symbol| (symbol, None));
            let foreign = FOREIGN.iter().map(|(symbol, instead)| (*symbol, Some(*instead)));
            let here = symbols.chain(foreign).filter(|(symbol, _)| rest.starts_with(symbol));
            let (symbol, foreign) =
                here.max_by_key(|(symbol, _)| symbol.len()).ok_or_else(|| fail(Reason::Character(first)))?;
            if let Some(instead) = foreign {
                let lambda = found.iter().find(|(token, _)| matches!(token, Token::Word(word) if word == LAMBDA));
                return Err(match lambda {
                    Some(&(_, position)) => {
                        let reason = Reason::Foreign { found: LAMBDA.into(), instead: LONE_CONDITION };
                        ExpressionError { position, reason }
                    }
                    None => fail(Reason::Foreign { found: symbol.into(), instead }),
                });
            }
            (Token::Symbol(symbol), symbol.len())
        };
        found.push((token, position));
        position += rest[..length].chars().count();
        rest = &rest[length..];
    }
    found.push((Token::End, position));
    Ok(found)
}

/// A parser by levels of binding (Pratt).
struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn position(&self) -> usize {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn expected(&self, expected: &str) -> ExpressionError {
        let reason = Reason::Expected { expected: expected.into(), found: self.peek().to_string() };
        ExpressionError { position: self.position(), reason }
    }

    fn take(&mut self, text: &str) -> Result<(), ExpressionError> {
        match self.peek() {
            Token::Word(word) if word == text => {}
            Token::Symbol(symbol) if *symbol == text => {}
            _ => return Err(self.expected(&format!("`{text}`"))),
        }
        self.next();
        Ok(())
    }

    /// The operator at hand that stands after an operand.
    fn operator(&self) -> Option<Operator> {
        let text = match self.peek() {
            Token::Word(word) => word.as_str(),
            Token::Symbol(symbol) => symbol,
            _ => return None,
        };
        let follows = |form: &Form| !matches!(form, Form::Prefix(_) | Form::Function(..));
        OPERATORS.iter().find(|(_, word, form)| *word == text && follows(form)).map(|(operator, ..)| *operator)
    }

    /// An expression whose operators are of this level or bind more tightly.
    fn expression(&mut self, lowest: u8) -> Result<Expression, ExpressionError> {
        let mut left = self.operand(lowest)?;
        // An operator to the right of one that takes no operand of its own level.
        let mut highest = WHOLE;
        while let Some(operator) = self.operator().filter(|o| (lowest..=highest).contains(&o.level())) {
            let position = self.position();
            let level = operator.level();
            self.next();
            let operands = match operator {
                Op::Choose => {
                    let condition = self.expression(CHOICE + 1)?;
                    self.take(ELSE)?;
                    vec![left, condition, self.expression(CHOICE)?]
                }
                Op::Among => {
                    self.take("{")?;
                    let mut operands = vec![left];
                    operands.extend(self.list("}")?);
                    operands
                }
                _ => vec![left, self.expression(level + 1)?],
            };
            highest = if level == COMPARISON { COMPARISON - 1 } else { level };
            left = Expression { kind: Kind::Apply(operator, operands), position };
            self.check_chain(&left)?;
        }
        Ok(left)
    }

    /// Refuses a comparison behind this one, which other languages read in different ways.
    fn check_chain(&mut self, left: &Expression) -> Result<(), ExpressionError> {
        let position = self.position();
        let next = self.operator().filter(|next| left.level() == COMPARISON && next.level() == COMPARISON);
        let (Some(next), Kind::Apply(first, operands)) = (next, &left.kind) else { return Ok(()) };
        self.next();
        let instead = match (&operands[..], self.expression(COMPARISON + 1)) {
            ([_, middle], Ok(right)) if *first != Op::Among && next != Op::Among => {
                let operands = vec![middle.clone(), right];
                let second = Expression { kind: Kind::Apply(next, operands), position };
                format!("{left} and {second}")
            }
            _ => "a < b and b < c".to_owned(),
        };
        Err(ExpressionError { position, reason: Reason::Chained { instead } })
    }

    /// Expressions with commas between them, at least one, up to the closing symbol.
    fn list(&mut self, closing: &str) -> Result<Vec<Expression>, ExpressionError> {
        let mut list = vec![self.expression(CHOICE)?];
        while *self.peek() == Token::Symbol(",") {
            self.next();
            list.push(self.expression(CHOICE)?);
        }
        self.take(closing)?;
        Ok(list)
    }

    fn operand(&mut self, lowest: u8) -> Result<Expression, ExpressionError> {
        let position = self.position();
        let of = |kind| Ok(Expression { kind, position });
        match self.peek().clone() {
            Token::Number(number) => {
                self.next();
                of(Kind::Number(number))
            }
            Token::Text(text) => {
                self.next();
                of(Kind::Text(text))
            }
            Token::Symbol("(") => {
                self.next();
                let inner = self.expression(CHOICE)?;
                self.take(")")?;
                Ok(inner)
            }
            Token::Symbol("-") => {
                self.next();
                of(Kind::Apply(Op::Negate, vec![self.expression(NEGATION)?]))
            }
            Token::Word(word) if word == Op::Not.row().0 && lowest <= Op::Not.level() => {
                self.next();
                of(Kind::Apply(Op::Not, vec![self.expression(Op::Not.level())?]))
            }
            Token::Word(word) if is_name(&word) => {
                self.next();
                of(Kind::Name(word))
            }
            Token::Word(word) => {
                let row = OPERATORS.iter().find_map(|(operator, name, form)| match form {
                    Form::Function(least, most) if *name == word => Some((*operator, *name, *least, *most)),
                    _ => None,
                });
                let Some((operator, function, least, most)) = row else {
                    return Err(self.expected("a number, a name or `(`"));
                };
                self.next();
                self.take("(")?;
                let arguments = self.list(")")?;
                if !(least..=most).contains(&arguments.len()) {
                    let expected =
                        if most > least { format!("{least} or more arguments") } else { count(least, "argument") };
                    let reason = Reason::Arguments { function, expected, found: arguments.len() };
                    return Err(ExpressionError { position, reason });
                }
                of(Kind::Apply(operator, arguments))
            }
            _ => Err(self.expected("a number, a name or `(`")),
        }
    }
}

/// What kind of value an expression has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Type {
    /// A number.
    Integer,
    /// Yes or no, held as 1 or 0.
    Boolean,
    /// One of these texts, held as its index; -1 is a text that is none of them.
    Category(Arc<[String]>),
}

impl fmt::Display for Type {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match self {
            Type::Integer => "a number",
            Type::Boolean => "a condition",
            Type::Category(_) => "a category",
        })
    }
}

/// The names that an expression may read, each with its type; its place is where its value is kept.
pub type Scope = Vec<(String, Type)>;

/// An expression whose names and types have been resolved.
#[derive(Debug, Clone, PartialEq)]
pub enum Code {
    /// A value, or nothing where it is undefined.
    Constant(Option<i64>),
    /// The value of the name at this place of the scope.
    Slot(usize),
    /// An operator with its operands.
    Apply(Operator, Vec<Code>),
}

impl Expression {
    /// Resolves names and checks types.
    ///
    /// # Errors
    /// An unknown name or an operand of the wrong type, with its position.
    pub fn compile(&self, scope: &Scope) -> Result<(Code, Type), ExpressionError> {
        let fail = |reason| Err(ExpressionError { position: self.position, reason });
        match &self.kind {
            Kind::Number(number) => Ok((Code::Constant(Some(*number)), Type::Integer)),
            Kind::Text(_) => fail(Reason::LooseText),
            Kind::Name(name) => match scope.iter().position(|(known, _)| known == name) {
                Some(slot) => Ok((Code::Slot(slot), scope[slot].1.clone())),
                None => {
                    let known = scope.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
                    fail(Reason::UnknownName { name: name.clone(), known })
                }
            },
            Kind::Apply(operator, operands) => self.compile_apply(*operator, operands, scope),
        }
    }

    fn compile_apply(
        &self,
        operator: Operator,
        operands: &[Expression],
        scope: &Scope,
    ) -> Result<(Code, Type), ExpressionError> {
        let symbol = operator.row().0;
        let wanted = |operand: &Expression, expected: &Type| {
            let (code, found) = operand.compile_as(expected, scope)?;
            if found == *expected {
                return Ok(code);
            }
            let reason = Reason::Type { operator: symbol, expected: expected.to_string(), found: found.to_string() };
            Err(ExpressionError { position: operand.position, reason })
        };
        let all = |expected: &Type| operands.iter().map(|o| wanted(o, expected)).collect::<Result<Vec<_>, _>>();
        /// The type that texts are compared with: that of the first operand that is no text.
        fn common(operands: &[&Expression], scope: &Scope) -> Result<Type, ExpressionError> {
            let lead = operands.iter().find(|operand| !matches!(operand.kind, Kind::Text(_))).unwrap_or(&operands[0]);
            Ok(lead.compile(scope)?.1)
        }
        let (codes, kind) = match operator {
            Op::Or | Op::And | Op::Not => (all(&Type::Boolean)?, Type::Boolean),
            Op::Equal | Op::NotEqual | Op::Among => {
                let operands: Vec<&Expression> = operands.iter().collect();
                (all(&common(&operands, scope)?)?, Type::Boolean)
            }
            Op::AtMost | Op::AtLeast | Op::Less | Op::Greater | Op::IsPowerOfTwo => {
                (all(&Type::Integer)?, Type::Boolean)
            }
            Op::Choose => {
                let kind = common(&[&operands[0], &operands[2]], scope)?;
                let codes = [(0, &kind), (1, &Type::Boolean), (2, &kind)].map(|(at, kind)| wanted(&operands[at], kind));
                (codes.into_iter().collect::<Result<Vec<_>, _>>()?, kind)
            }
            Op::Add
            | Op::Subtract
            | Op::Multiply
            | Op::Divide
            | Op::Remainder
            | Op::Negate
            | Op::Minimum
            | Op::Maximum
            | Op::CeilDivide
            | Op::Gcd => (all(&Type::Integer)?, Type::Integer),
        };
        Ok((Code::Apply(operator, codes), kind))
    }

    /// As [`Expression::compile`], but that a text stands for its index where a category is expected.
    fn compile_as(&self, expected: &Type, scope: &Scope) -> Result<(Code, Type), ExpressionError> {
        let (Kind::Text(text), Type::Category(values)) = (&self.kind, expected) else { return self.compile(scope) };
        match values.iter().position(|value| value == text) {
            Some(index) => Ok((Code::Constant(Some(index as i64)), expected.clone())),
            None => {
                let reason = Reason::UnknownValue { text: text.clone(), known: values.join(", ") };
                Err(ExpressionError { position: self.position, reason })
            }
        }
    }
}

impl Code {
    /// The value for these values of the scope's names; `None` where it is undefined.
    pub fn evaluate(&self, slots: &[Option<i64>]) -> Option<i64> {
        let (operator, operands) = match self {
            Code::Constant(value) => return *value,
            Code::Slot(slot) => return slots[*slot],
            Code::Apply(operator, operands) => (operator, operands),
        };
        let value = |at: usize| operands[at].evaluate(slots);
        let holds = |condition: bool| Some(i64::from(condition));
        let extreme = |better: fn(i64, i64) -> i64| {
            operands.iter().map(|o| o.evaluate(slots)).reduce(|a, b| Some(better(a?, b?))).flatten()
        };
        match operator {
            Op::Choose => value(if value(1)? != 0 { 0 } else { 2 }),
            Op::Or => {
                if value(0)? != 0 {
                    Some(1)
                } else {
                    value(1)
                }
            }
            Op::And => {
                if value(0)? == 0 {
                    Some(0)
                } else {
                    value(1)
                }
            }
            Op::Not => holds(value(0)? == 0),
            Op::Among => {
                let item = value(0)?;
                for at in 1..operands.len() {
                    if value(at)? == item {
                        return Some(1);
                    }
                }
                Some(0)
            }
            Op::Equal => holds(value(0)? == value(1)?),
            Op::NotEqual => holds(value(0)? != value(1)?),
            Op::AtMost => holds(value(0)? <= value(1)?),
            Op::AtLeast => holds(value(0)? >= value(1)?),
            Op::Less => holds(value(0)? < value(1)?),
            Op::Greater => holds(value(0)? > value(1)?),
            Op::Add => value(0)?.checked_add(value(1)?),
            Op::Subtract => value(0)?.checked_sub(value(1)?),
            Op::Multiply => value(0)?.checked_mul(value(1)?),
            Op::Divide => floor_div(value(0)?, value(1)?),
            Op::Remainder => {
                let (a, b) = (value(0)?, value(1)?);
                a.checked_sub(floor_div(a, b)?.checked_mul(b)?)
            }
            Op::Negate => value(0)?.checked_neg(),
            Op::Minimum => extreme(i64::min),
            Op::Maximum => extreme(i64::max),
            Op::CeilDivide => floor_div(value(0)?.checked_neg()?, value(1)?)?.checked_neg(),
            Op::Gcd => {
                let (mut a, mut b) = (value(0)?.checked_abs()?, value(1)?.checked_abs()?);
                while b != 0 {
                    (a, b) = (b, a % b);
                }
                Some(a)
            }
            Op::IsPowerOfTwo => holds(value(0)?.count_ones() == 1 && value(0)? > 0),
        }
    }

    /// The code with some values known already; `None` within `Some` is a value known to be undefined. It
    /// means the same, and reads no more than it has to.
    pub fn fold(&self, known: &[Option<Option<i64>>]) -> Code {
        let (operator, operands) = match self {
            Code::Constant(_) => return self.clone(),
            Code::Slot(slot) => return known[*slot].map_or(Code::Slot(*slot), Code::Constant),
            Code::Apply(operator, operands) => (*operator, operands),
        };
        let mut operands: Vec<Code> = operands.iter().map(|operand| operand.fold(known)).collect();
        let decider = if operator == Op::Choose { 1 } else { 0 };
        match (operator, &operands[decider]) {
            (Op::Choose | Op::Or | Op::And, Code::Constant(None)) => Code::Constant(None),
            (Op::Choose, Code::Constant(Some(holds))) => operands.swap_remove(if *holds != 0 { 0 } else { 2 }),
            (Op::Or, Code::Constant(Some(0))) | (Op::And, Code::Constant(Some(1))) => operands.swap_remove(1),
            (Op::Or | Op::And, Code::Constant(decided)) => Code::Constant(*decided),
            _ if operands.iter().all(|operand| matches!(operand, Code::Constant(_))) => {
                Code::Constant(Code::Apply(operator, operands).evaluate(&[]))
            }
            _ => Code::Apply(operator, operands),
        }
    }

    /// The conditions of which each has to hold for this one to hold.
    pub fn conjuncts(self) -> Vec<Code> {
        match self {
            Code::Apply(Op::And, operands) => operands.into_iter().flat_map(Code::conjuncts).collect(),
            other => vec![other],
        }
    }

    /// Adds the places of the scope that it reads.
    pub fn reads(&self, slots: &mut Vec<usize>) {
        match self {
            Code::Constant(_) => {}
            Code::Slot(slot) => slots.push(*slot),
            Code::Apply(_, operands) => operands.iter().for_each(|operand| operand.reads(slots)),
        }
    }
}

fn floor_div(a: i64, b: i64) -> Option<i64> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scope() -> Scope {
        let values: Arc<[String]> = ["F", "B"].map(String::from).into();
        [("x", Type::Integer), ("y", Type::Integer), ("d", Type::Category(values))]
            .map(|(name, kind)| (name.to_owned(), kind))
            .into()
    }

    /// The value of a text for x = 7, y = -2, d = "B".
    fn value(text: &str) -> Result<Option<i64>, String> {
        let compiled = Expression::parse(text).and_then(|e| e.compile(&scope()));
        let slots = [Some(7), Some(-2), Some(1)];
        compiled.map(|(code, _)| code.evaluate(&slots)).map_err(|e| e.to_string())
    }

    #[test]
    fn expressions_have_the_values_of_arithmetic() {
        let check = |text: &str, expected: i64| assert_eq!(value(text), Ok(Some(expected)), "{text}");
        check("1 + 2 * 3 - 4", 3);
        check("(1 + 2) * 3", 9);
        check("10 - 3 - 2", 5);
        check("x / y", -4);
        check("x % y", -1);
        check("-x / 2", -4);
        check("ceil_div(x, 2) + ceil_div(-x, 2)", 1);
        check("min(x, 3, 9) + max(x, 3)", 10);
        check("gcd(12, 18) + gcd(0, 5)", 11);
        check("is_power_of_two(64) and not is_power_of_two(0) and not is_power_of_two(y)", 1);
        check("x in {1, 7} and not x in {1, 2}", 1);
        check("d == \"B\" and d != 'F' and d in {'F', 'B'}", 1);
        check("1 if x > 7 else 2 if x == 7 else 3", 2);
        check("0 if y == -2 or 1 / 0 == 1 else 1", 0);
    }

    #[test]
    fn what_has_no_value_is_undefined() {
        for text in ["1 / 0", "x % (y + 2)", "9223372036854775807 + x", "1 / 0 == 1 or x == 7", "ceil_div(1, 0)"] {
            assert_eq!(value(text), Ok(None), "{text}");
        }
    }

    #[test]
    fn errors_say_where_and_what() {
        let check = |text: &str, expected: &str| assert_eq!(value(text).unwrap_err(), expected, "{text}");
        check("x +", "position 4: expected a number, a name or `(`, found the end");
        check("x $ 3", "position 3: unexpected character '$'");
        check("x + (3", "position 7: expected `)`, found the end");
        check("1 < x < 3", "position 7: comparisons do not chain; write `1 < x and x < 3`");
        check("(1 + y <= x * 2 == y)", "position 17: comparisons do not chain; write `1 + y <= x * 2 and x * 2 == y`");
        check("1 < x in {1, 2}", "position 7: comparisons do not chain; write `a < b and b < c`");
        check("x // 2 == 1", "position 3: `//` is not known here; write `/`, which rounds down");
        check("x <= 2**5", "position 7: `**` is not known here; write the product, such as `x * x`");
        let list = "is not known here; write a list as `{1, 2, 4}`, and `tile` in the place of `p['tile']`";
        check("x in [1, 2]", &format!("position 6: `[` {list}"));
        check("p['x'] < 3", &format!("position 2: `[` {list}"));
        let alone = "is not known here; write the condition alone, such as `tile <= 32`";
        check("lambda p: p['x'] <= 32", &format!("position 1: `lambda` {alone}"));
        check("not lambda a, p: a", &format!("position 5: `lambda` {alone}"));
        check("x = 3", "position 3: `=` is not known here; write `==`");
        check("x == 3 && y == 1", "position 8: `&&` is not known here; write `and`");
        check("!x", "position 1: `!` is not known here; write `not`");
        check("x == 1 ? 2 : 3", "position 8: `?` is not known here; write `a if c else b`");
        check("x << 2 <= 3", "position 3: `<<` is not known here; write a product with a power of 2");
        assert!(
            value("x * 1.5 <= 64").unwrap_err().starts_with("position 6: `.` is not known here; numbers are whole")
        );
        let or = "position 8: expected an operator, such as `or`, or the end, found `OR`";
        check("x == 1 OR y == 1", or);
        check("x not in {1}", "position 3: expected an operator or the end (it is `not x in {…}` here), found `not`");
        check("é == 1", "position 1: unexpected character 'é'");
        check("x == z", "position 6: unknown name z; there are x, y, d");
        check("x + (x == 1)", "position 8: + takes a number, found a condition");
        check("d == \"W\"", "position 6: \"W\" is none of its values F, B");
        check("d + 1", "position 1: + takes a number, found a category");
        check("d == 1", "position 6: == takes a category, found a number");
        check("\"B\"", "position 1: a text can only be compared with a name that has texts as values");
        check("x == 99999999999999999999", "position 6: the number is too large");
        check("min(x)", "position 1: min takes 2 or more arguments, found 1");
        check("d == 'B", "position 6: the quoted text does not end");
        assert!(value(&"(".repeat(10_000)).unwrap_err().contains("more than 500"));
    }

    fn expression() -> impl Strategy<Value = Expression> {
        let of = |kind| Expression { kind, position: 0 };
        let leaf = prop_oneof![
            (0..i64::MAX).prop_map(Kind::Number),
            "[a-z '\"]{0,3}"
                .prop_filter("one kind of quotes", |t| !(t.contains('"') && t.contains('\'')))
                .prop_map(Kind::Text),
            "[xyd]".prop_map(Kind::Name),
        ];
        leaf.prop_map(of).prop_recursive(5, 40, 4, move |inner| {
            let operator = proptest::sample::select(OPERATORS);
            (operator, proptest::collection::vec(inner, 4)).prop_map(move |((operator, _, form), mut operands)| {
                operands.truncate(match form {
                    Form::Infix(_) | Form::Comparison => 2,
                    Form::Prefix(_) => 1,
                    Form::Function(least, most) => 3.clamp(least, most),
                    Form::Special(_) => 3,
                });
                of(Kind::Apply(operator, operands))
            })
        })
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_back(e in expression()) {
            let text = e.to_string();
            match Expression::parse(&text) {
                Ok(parsed) => prop_assert_eq!(parsed, e),
                Err(error) => prop_assert_eq!(error.reason, Reason::TooLong, "{}", text),
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[ xyd0-9()<>=!+*/%{},'\"a-z-]{0,60}|\\PC{0,40}") {
            if let Ok(parsed) = Expression::parse(&text) {
                prop_assert_eq!(Expression::parse(&parsed.to_string()), Ok(parsed.clone()));
                if let Ok((code, _)) = parsed.compile(&scope()) {
                    code.evaluate(&[Some(i64::MAX), Some(i64::MIN), Some(-1)]);
                }
            }
        }

        #[test]
        fn folding_keeps_the_value(e in expression(), x in -9i64..9, y in -9i64..9, d in -1i64..2, which in 0usize..8) {
            if let Ok((code, _)) = e.compile(&scope()) {
                let slots = [Some(x), Some(y), Some(d)];
                let known: Vec<_> = slots.iter().enumerate().map(|(at, v)| (which >> at & 1 == 1).then_some(*v)).collect();
                prop_assert_eq!(code.fold(&known).evaluate(&slots), code.evaluate(&slots));
            }
        }
    }
}
