//! Lists of values as Python's expressions: literals, ranges, sums of lists, comprehensions.
//!
//! What an expression may cost is bounded: descriptions come from others.

use std::fmt;

use serde_json::{Number, Value as Json};

/// The most words and symbols of an expression: nesting is walked by recursion.
const MOST_PARTS: usize = 20_000;
/// The deepest nesting.
const MOST_DEPTH: usize = 50;
/// The most values that are computed, those of intermediate results included.
const MOST_VALUES: usize = 1 << 20;

/// Why a text is no list.
#[derive(Debug)]
pub(super) struct PythonError {
    /// The character that it is about, from 1.
    position: usize,
    reason: String,
}

impl fmt::Display for PythonError {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "position {}: {}", self.position, self.reason)
    }
}

/// The values of a list that an expression of Python writes.
///
/// # Errors
/// Where it is none, or beyond what is understood here.
pub(super) fn list(text: &str) -> Result<Vec<Json>, PythonError> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0, depth: 0 };
    let node = parser.expression(0)?;
    if *parser.peek() != Token::End {
        return Err(parser.expected("an operator or the end"));
    }
    match (Evaluation { names: Vec::new(), n_left: MOST_VALUES }).value(&node)? {
        Json::Array(values) => Ok(values),
        other => Err(node.fail(format!("{other} is no list"))),
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Value(Json),
    Name(String),
    Symbol(&'static str),
    End,
}

/// Of two where one begins like the other, the longer one comes first.
const SYMBOLS: &[&str] =
    &["**", "//", "==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%", "(", ")", "[", "]", "{", "}", ","];
/// Words that are no names.
const WORDS: &[&str] = &["for", "in", "if", "else", "and", "or", "not"];
/// Operators between two operands, with their levels of binding.
const OPERATORS: &[(&str, u8)] = &[
    ("or", 1),
    ("and", 2),
    ("in", 4),
    ("==", 4),
    ("!=", 4),
    ("<=", 4),
    (">=", 4),
    ("<", 4),
    (">", 4),
    ("+", 5),
    ("-", 5),
    ("*", 6),
    ("/", 6),
    ("//", 6),
    ("%", 6),
    ("**", 8),
];
const NOT: u8 = 3;
const COMPARISON: u8 = 4;
const NEGATION: u8 = 7;
const POWER: u8 = 8;

fn tokens(text: &str) -> Result<Vec<(Token, usize)>, PythonError> {
    let (mut found, mut rest, mut position) = (Vec::new(), text, 1);
    loop {
        let trimmed = rest.trim_start();
        position += rest[..rest.len() - trimmed.len()].chars().count();
        rest = trimmed;
        let fail = |reason: &str| PythonError { position, reason: reason.into() };
        let Some(first) = rest.chars().next() else { break };
        if found.len() == MOST_PARTS {
            return Err(fail("the expression is too long"));
        }
        let length_of = |test: fn(char) -> bool| rest.find(|c| !test(c)).unwrap_or(rest.len());
        let (token, length) = if first.is_ascii_digit() || first == '.' {
            let mut length = length_of(|c| c.is_ascii_alphanumeric() || c == '.' || c == '_');
            // The sign of an exponent.
            if rest[..length].ends_with(['e', 'E']) && rest[length..].starts_with(['+', '-']) {
                length += 1 + rest[length + 1..].find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len() - length - 1);
            }
            let digits = rest[..length].replace('_', "");
            let whole = digits.parse::<i64>().ok().map(Number::from);
            let number = whole.or_else(|| digits.parse::<f64>().ok().and_then(Number::from_f64));
            (Token::Value(Json::Number(number.ok_or_else(|| fail("this is no number"))?)), length)
        } else if first.is_alphabetic() || first == '_' {
            let length = length_of(|c| c.is_alphanumeric() || c == '_');
            let token = match &rest[..length] {
                "True" => Token::Value(true.into()),
                "False" => Token::Value(false.into()),
                "None" => Token::Value(Json::Null),
                word => match WORDS.iter().find(|known| **known == word) {
                    Some(word) => Token::Symbol(word),
                    None => Token::Name(word.into()),
                },
            };
            (token, length)
        } else if first == '"' || first == '\'' {
            let length = rest[1..].find(first).ok_or_else(|| fail("the text in quotes does not end"))?;
            let inner = &rest[1..1 + length];
            if inner.contains('\\') {
                return Err(fail("a text with a backslash"));
            }
            (Token::Value(inner.into()), length + 2)
        } else {
            let symbol = SYMBOLS.iter().find(|symbol| rest.starts_with(**symbol));
            let symbol = symbol.ok_or_else(|| fail(&format!("unexpected character {first:?}")))?;
            (Token::Symbol(symbol), symbol.len())
        };
        found.push((token, position));
        position += rest[..length].chars().count();
        rest = &rest[length..];
    }
    found.push((Token::End, position));
    Ok(found)
}

/// A part of an expression, and where it stands.
struct Node {
    kind: Kind,
    position: usize,
}

enum Kind {
    Value(Json),
    Name(String),
    List(Vec<Node>),
    Comprehension(Box<Node>, Vec<Clause>),
    Call(String, Vec<Node>),
    Negate(Box<Node>),
    Not(Box<Node>),
    Binary(&'static str, Box<Node>, Box<Node>),
    /// Of three, the first where the second holds and the last otherwise.
    Choose(Box<[Node; 3]>),
}

enum Clause {
    For(String, Node),
    If(Node),
}

impl Node {
    fn fail(&self, reason: impl Into<String>) -> PythonError {
        PythonError { position: self.position, reason: reason.into() }
    }
}

struct Parser {
    tokens: Vec<(Token, usize)>,
    at: usize,
    depth: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn expected(&self, expected: &str) -> PythonError {
        let found = match self.peek() {
            Token::Value(value) => value.to_string(),
            Token::Name(name) => format!("`{name}`"),
            Token::Symbol(symbol) => format!("`{symbol}`"),
            Token::End => "the end".into(),
        };
        PythonError { position: self.tokens[self.at].1, reason: format!("expected {expected}, found {found}") }
    }

    /// Whether this symbol is at hand; then it is passed.
    fn takes(&mut self, symbol: &'static str) -> bool {
        let is_it = *self.peek() == Token::Symbol(symbol);
        if is_it {
            self.next();
        }
        is_it
    }

    fn take(&mut self, symbol: &'static str) -> Result<(), PythonError> {
        if self.takes(symbol) { Ok(()) } else { Err(self.expected(&format!("`{symbol}`"))) }
    }

    /// An expression whose operators are of this level or bind more tightly; 0 is that of a choice.
    fn expression(&mut self, lowest: u8) -> Result<Node, PythonError> {
        let position = self.tokens[self.at].1;
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return Err(PythonError { position, reason: format!("nested more than {MOST_DEPTH} deep") });
        }
        let mut left = self.operand()?;
        while let Token::Symbol(symbol) = *self.peek()
            && let Some((operator, level)) = OPERATORS.iter().find(|(known, _)| *known == symbol)
            && *level >= lowest
        {
            self.next();
            // A power takes what is on its right first, and a negative there.
            let right = self.expression(if *level == POWER { NEGATION } else { level + 1 })?;
            left = Node { kind: Kind::Binary(operator, Box::new(left), Box::new(right)), position };
            let is_comparison = |symbol: &Token| {
                OPERATORS.iter().any(|(known, level)| *symbol == Token::Symbol(known) && *level == COMPARISON)
            };
            if *level == COMPARISON && is_comparison(self.peek()) {
                return Err(self.expected("`and` between two comparisons"));
            }
        }
        if lowest == 0 && self.takes("if") {
            let condition = self.expression(1)?;
            self.take("else")?;
            let otherwise = self.expression(0)?;
            left = Node { kind: Kind::Choose(Box::new([left, condition, otherwise])), position };
        }
        self.depth -= 1;
        Ok(left)
    }

    fn operand(&mut self) -> Result<Node, PythonError> {
        let position = self.tokens[self.at].1;
        let of = |kind| Ok(Node { kind, position });
        match self.peek().clone() {
            Token::Value(value) => {
                self.next();
                of(Kind::Value(value))
            }
            Token::Name(name) => {
                self.next();
                if !self.takes("(") {
                    return of(Kind::Name(name));
                }
                let (arguments, _) = self.items(")")?;
                of(Kind::Call(name, arguments))
            }
            Token::Symbol("-") => {
                self.next();
                let operand = Box::new(self.expression(NEGATION)?);
                of(Kind::Negate(operand))
            }
            Token::Symbol("not") => {
                self.next();
                let operand = Box::new(self.expression(NOT)?);
                of(Kind::Not(operand))
            }
            Token::Symbol("(") => {
                self.next();
                let (mut items, has_comma) = self.items(")")?;
                match items.len() {
                    1 if !has_comma => Ok(items.swap_remove(0)),
                    _ => of(Kind::List(items)),
                }
            }
            Token::Symbol("[") => {
                self.next();
                let (mut items, has_comma) = self.items("]")?;
                match items.first() {
                    Some(Node { kind: Kind::Comprehension(..), .. }) if items.len() == 1 && !has_comma => {
                        Ok(items.swap_remove(0))
                    }
                    _ => of(Kind::List(items)),
                }
            }
            _ => Err(self.expected("a value, a name or a bracket")),
        }
    }

    /// The contents before a closing bracket, and whether there is a comma: expressions, or one with the
    /// clauses of a comprehension.
    fn items(&mut self, closing: &'static str) -> Result<(Vec<Node>, bool), PythonError> {
        let (mut items, mut has_comma) = (Vec::new(), false);
        while !self.takes(closing) {
            let item = self.expression(0)?;
            let position = item.position;
            let mut clauses = Vec::new();
            loop {
                if self.takes("for") {
                    let Token::Name(name) = self.peek().clone() else { return Err(self.expected("a name")) };
                    self.next();
                    self.take("in")?;
                    clauses.push(Clause::For(name, self.expression(1)?));
                } else if !clauses.is_empty() && self.takes("if") {
                    clauses.push(Clause::If(self.expression(1)?));
                } else {
                    break;
                }
            }
            items.push(match clauses.is_empty() {
                true => item,
                false => Node { kind: Kind::Comprehension(Box::new(item), clauses), position },
            });
            if !self.takes(",") {
                self.take(closing)?;
                break;
            }
            has_comma = true;
        }
        Ok((items, has_comma))
    }
}

/// An evaluation under way.
struct Evaluation {
    /// The values of names; of two with one name, the later one counts.
    names: Vec<(String, Json)>,
    n_left: usize,
}

impl Evaluation {
    /// Counts values against what an expression may cost.
    fn spend(&mut self, n: usize, node: &Node) -> Result<(), PythonError> {
        self.n_left = self.n_left.checked_sub(n).ok_or_else(|| node.fail(format!("more than {MOST_VALUES} values")))?;
        Ok(())
    }

    fn value(&mut self, node: &Node) -> Result<Json, PythonError> {
        self.spend(1, node)?;
        match &node.kind {
            Kind::Value(value) => Ok(value.clone()),
            Kind::Name(name) => match self.names.iter().rev().find(|(known, _)| known == name) {
                Some((_, value)) => {
                    let value = value.clone();
                    self.spend(value.as_array().map_or(0, Vec::len), node)?;
                    Ok(value)
                }
                None => Err(node.fail(format!("unknown name `{name}`"))),
            },
            Kind::List(items) => items.iter().map(|item| self.value(item)).collect(),
            Kind::Comprehension(item, clauses) => {
                let mut found = Vec::new();
                self.comprehend(item, clauses, &mut found)?;
                Ok(found.into())
            }
            Kind::Call(function, arguments) => self.call(node, function, arguments),
            Kind::Negate(operand) => match number(&self.value(operand)?) {
                Some(Real::Whole(whole)) => whole.checked_neg().map(Json::from).ok_or_else(|| node.fail("too large")),
                Some(Real::Float(x)) => float(node, -x),
                None => Err(operand.fail("`-` takes a number")),
            },
            Kind::Not(operand) => Ok((!holds(&self.value(operand)?)).into()),
            Kind::Binary(operator @ ("and" | "or"), left, right) => {
                let left = self.value(left)?;
                if holds(&left) == (*operator == "or") { Ok(left) } else { self.value(right) }
            }
            Kind::Binary(operator, left, right) => {
                let (left, right) = (self.value(left)?, self.value(right)?);
                self.binary(node, operator, left, right)
            }
            Kind::Choose(parts) => {
                let [then, condition, otherwise] = &**parts;
                if holds(&self.value(condition)?) { self.value(then) } else { self.value(otherwise) }
            }
        }
    }

    fn items(&mut self, node: &Node) -> Result<Vec<Json>, PythonError> {
        match self.value(node)? {
            Json::Array(items) => Ok(items),
            other => Err(node.fail(format!("{other} is no list"))),
        }
    }

    fn comprehend(&mut self, item: &Node, clauses: &[Clause], found: &mut Vec<Json>) -> Result<(), PythonError> {
        match clauses {
            [] => found.push(self.value(item)?),
            [Clause::If(condition), rest @ ..] => {
                if holds(&self.value(condition)?) {
                    self.comprehend(item, rest, found)?;
                }
            }
            [Clause::For(name, list), rest @ ..] => {
                for value in self.items(list)? {
                    self.names.push((name.clone(), value));
                    let inner = self.comprehend(item, rest, found);
                    self.names.pop();
                    inner?;
                }
            }
        }
        Ok(())
    }

    fn call(&mut self, node: &Node, function: &str, arguments: &[Node]) -> Result<Json, PythonError> {
        match (function, arguments) {
            ("list" | "tuple", []) => Ok(Json::Array(Vec::new())),
            ("list" | "tuple", [list]) => Ok(self.items(list)?.into()),
            ("range", [_] | [_, _] | [_, _, _]) => {
                let mut bounds = Vec::new();
                for argument in arguments {
                    bounds.push(
                        self.value(argument)?.as_i64().ok_or_else(|| argument.fail("`range` takes whole numbers"))?,
                    );
                }
                let (start, end, step) = match bounds[..] {
                    [end] => (0, end, 1),
                    [start, end] => (start, end, 1),
                    _ => (bounds[0], bounds[1], bounds[2]),
                };
                if step == 0 {
                    return Err(node.fail("a step of 0"));
                }
                let mut values = Vec::new();
                let mut at = start;
                while if step > 0 { at < end } else { at > end } {
                    self.spend(1, node)?;
                    values.push(at.into());
                    match at.checked_add(step) {
                        Some(next) => at = next,
                        None => break,
                    }
                }
                Ok(Json::Array(values))
            }
            ("int", [argument]) => match number(&self.value(argument)?) {
                Some(Real::Whole(whole)) => Ok(whole.into()),
                Some(Real::Float(x)) if x.abs() < 9e15 => Ok((x as i64).into()),
                _ => Err(argument.fail("`int` takes a number")),
            },
            ("float", [argument]) => match number(&self.value(argument)?) {
                Some(x) => float(node, x.float()),
                None => Err(argument.fail("`float` takes a number")),
            },
            _ => {
                let known = "range, list, tuple, int, float";
                Err(node.fail(format!("`{function}` of so many arguments is not understood; there are {known}")))
            }
        }
    }

    fn binary(&mut self, node: &Node, operator: &str, left: Json, right: Json) -> Result<Json, PythonError> {
        let (left, right) = match (operator, left, right) {
            ("+", Json::Array(mut left), Json::Array(right)) => {
                self.spend(right.len(), node)?;
                left.extend(right);
                return Ok(left.into());
            }
            ("*", Json::Array(list), times) | ("*", times, Json::Array(list)) => {
                let times =
                    times.as_i64().ok_or_else(|| node.fail("a list times something that is no whole number"))?;
                let times = usize::try_from(times).unwrap_or(0);
                self.spend(list.len().saturating_mul(times), node)?;
                return Ok(std::iter::repeat_n(list, times).flatten().collect());
            }
            ("in", item, Json::Array(list)) => return Ok(list.iter().any(|other| same(&item, other)).into()),
            ("==", left, right) => return Ok(same(&left, &right).into()),
            ("!=", left, right) => return Ok((!same(&left, &right)).into()),
            (_, left, right) => match (number(&left), number(&right)) {
                (Some(left), Some(right)) => (left, right),
                _ => return Err(node.fail(format!("`{operator}` between {left} and {right}"))),
            },
        };
        let (a, b) = (left.float(), right.float());
        let compared = match operator {
            "<" => Some(a < b),
            "<=" => Some(a <= b),
            ">" => Some(a > b),
            ">=" => Some(a >= b),
            _ => None,
        };
        if let Some(compared) = compared {
            return Ok(compared.into());
        }
        let is_zero = b == 0.0;
        if is_zero && matches!(operator, "/" | "//" | "%") {
            return Err(node.fail("a division by zero"));
        }
        let whole = match (left, right) {
            (Real::Whole(a), Real::Whole(b)) => match operator {
                "+" => Some(a.checked_add(b)),
                "-" => Some(a.checked_sub(b)),
                "*" => Some(a.checked_mul(b)),
                "//" => Some(floor_div(a, b)),
                "%" => Some(floor_div(a, b).and_then(|quotient| a.checked_sub(quotient.checked_mul(b)?))),
                "**" if b >= 0 => Some(u32::try_from(b).ok().and_then(|b| a.checked_pow(b))),
                _ => None,
            },
            _ => None,
        };
        match (whole, operator) {
            (Some(whole), _) => whole.map(Json::from).ok_or_else(|| node.fail("the number is too large")),
            (None, "+") => float(node, a + b),
            (None, "-") => float(node, a - b),
            (None, "*") => float(node, a * b),
            (None, "/") => float(node, a / b),
            (None, "//") => float(node, (a / b).floor()),
            (None, "%") => float(node, a - b * (a / b).floor()),
            (None, "**") => float(node, a.powf(b)),
            _ => Err(node.fail(format!("`{operator}` between numbers"))),
        }
    }
}

/// A number of Python; `True` is 1.
#[derive(Clone, Copy)]
enum Real {
    Whole(i64),
    Float(f64),
}

impl Real {
    fn float(self) -> f64 {
        match self {
            Real::Whole(whole) => whole as f64,
            Real::Float(x) => x,
        }
    }
}

fn number(value: &Json) -> Option<Real> {
    match value {
        Json::Bool(holds) => Some(Real::Whole((*holds).into())),
        Json::Number(number) => number.as_i64().map(Real::Whole).or_else(|| number.as_f64().map(Real::Float)),
        _ => None,
    }
}

fn float(node: &Node, x: f64) -> Result<Json, PythonError> {
    Number::from_f64(x).map(Json::Number).ok_or_else(|| node.fail("the result is no number"))
}

fn floor_div(a: i64, b: i64) -> Option<i64> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

fn holds(value: &Json) -> bool {
    match value {
        Json::Null => false,
        Json::Bool(holds) => *holds,
        Json::Number(number) => number.as_f64() != Some(0.0),
        Json::String(text) => !text.is_empty(),
        Json::Array(items) => !items.is_empty(),
        Json::Object(members) => !members.is_empty(),
    }
}

fn same(a: &Json, b: &Json) -> bool {
    match (number(a), number(b)) {
        (Some(Real::Whole(a)), Some(Real::Whole(b))) => a == b,
        (Some(a), Some(b)) => a.float() == b.float(),
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_have_the_values_that_python_gives_them() {
        let check = |text: &str, expected: Json| match list(text) {
            Ok(values) => assert_eq!(Json::from(values), expected, "{text}"),
            Err(error) => panic!("{text}: {error}"),
        };
        check("[1, 2,4]", json!([1, 2, 4]));
        check(" [ -1, 0.5, 'a b', \"c\", True, False, None, ] ", json!([-1, 0.5, "a b", "c", true, false, null]));
        check("[[1, 2], (3,), ()]", json!([[1, 2], [3], []]));
        check("range(3)", json!([0, 1, 2]));
        check("list(range(1, 9, 3))", json!([1, 4, 7]));
        check("list(range(3, 0, -1))", json!([3, 2, 1]));
        check("[1, 2, 4, 8, 16] + list(range(32, 96+1, 32))", json!([1, 2, 4, 8, 16, 32, 64, 96]));
        check("[2**i for i in range(0, 4)]", json!([1, 2, 4, 8]));
        check("[32 * i for i in range(1, 4)]", json!([32, 64, 96]));
        check("list(i*j for i in [1, 2] for j in (3, 4) if i*j != 4)", json!([3, 6, 8]));
        check("[i if i % 2 == 0 else -i for i in range(4) if not i == 0 or i > 2]", json!([-1, 2, -3]));
        check(
            "[-2 ** 2, 2 ** -1, 2 ** 3 ** 2, -7 // 2, -7 % 3, 7 / 2, 1_000, 1e-3]",
            json!([-4, 0.5, 512, -4, 2, 3.5, 1000, 0.001]),
        );
        check("[0] * 2 + 2 * ['a']", json!([0, 0, "a", "a"]));
        check("[]", json!([]));
        check("[int(2.5), float(2), 3 in [1, 3]]", json!([2, 2.0, true]));
    }

    #[test]
    fn what_is_no_list_is_refused_with_its_position() {
        let check = |text: &str, expected: &str| match list(text) {
            Ok(values) => panic!("{text}: {values:?}"),
            Err(error) => assert_eq!(error.to_string(), expected, "{text}"),
        };
        check("", "position 1: expected a value, a name or a bracket, found the end");
        check("3", "position 1: 3 is no list");
        check("[1", "position 3: expected `]`, found the end");
        check("[1 2]", "position 4: expected `]`, found 2");
        check("[a]", "position 2: unknown name `a`");
        check("['a\\'']", "position 2: a text with a backslash");
        check("np.arange(3)", "position 3: this is no number");
        check(
            "arange(3)",
            "position 1: `arange` of so many arguments is not understood; there are range, list, tuple, int, float",
        );
        check("range(10**18)", "position 1: more than 1048576 values");
        check("[0] * 9999999999", "position 1: more than 1048576 values");
        check("[10 ** 99]", "position 2: the number is too large");
        check("[1 // 0]", "position 2: a division by zero");
        check("[1 < i < 3 for i in range(9)]", "position 8: expected `and` between two comparisons, found `<`");
        check("[x for x in 3]", "position 13: 3 is no list");
        assert!(list(&"[".repeat(100_000)).unwrap_err().to_string().contains("too long"));
        assert!(list(&"[".repeat(1000)).unwrap_err().to_string().contains("deep"));
        assert!(list(&"-".repeat(1000)).unwrap_err().to_string().contains("deep"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[ a-c0-9()\\[\\]<>=!+*/%,'.-]{0,60}|\\PC{0,40}|(range|list|\\(|\\)|\\[|\\]| for a in | if |a|3|,|\\+|\\*\\*){0,20}") {
            if let Err(error) = list(&text) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
    }
}
