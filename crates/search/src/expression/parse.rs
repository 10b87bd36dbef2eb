//! Lexer and parser of expressions.

use std::fmt;

use super::{
    CHOICE, CONSTANTS, Clause, Datum, ELSE, Expression, ExpressionError, ExpressionNode, ExpressionOperator, FOR,
    FOREIGN, LAMBDA, LONE_CONDITION, MOST_DEPTH, MOST_PARTS, NEGATION, OPERATORS, Op, OperatorForm, POWER, PUNCTUATION,
    Reason, Slash, is_name,
};

#[derive(Debug, Clone, PartialEq)]
enum ExpressionToken {
    Constant(Datum),
    /// Name, or operator or function that is written as a word.
    Word(String),
    Symbol(&'static str),
    End,
}

impl fmt::Display for ExpressionToken {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            ExpressionToken::Constant(Datum::Text(text)) => write!(out, "{text:?}"),
            ExpressionToken::Constant(datum) => write!(out, "{datum}"),
            ExpressionToken::Word(word) => write!(out, "`{word}`"),
            ExpressionToken::Symbol(symbol) => write!(out, "`{symbol}`"),
            ExpressionToken::End => out.write_str("the end"),
        }
    }
}

/// Splits a text into tokens with their positions; the last one is the end.
fn tokens(text: &str) -> Result<Vec<(ExpressionToken, usize)>, ExpressionError> {
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
        let is_number = first.is_ascii_digit() || first == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit());
        let (token, length) = if is_number {
            let (datum, length) = number(rest).ok_or_else(|| fail(Reason::Number))?;
            (ExpressionToken::Constant(datum), length)
        } else if first.is_alphabetic() || first == '_' {
            let length = length_of(|c| c.is_alphanumeric() || c == '_');
            let word = &rest[..length];
            match CONSTANTS.iter().find(|(known, _)| *known == word) {
                Some((_, datum)) => (ExpressionToken::Constant(datum.clone()), length),
                None => (ExpressionToken::Word(word.to_owned()), length),
            }
        } else if first == '"' || first == '\'' {
            let (text, length) = quoted(rest, first).ok_or_else(|| fail(Reason::Quote))?;
            (ExpressionToken::Constant(Datum::Text(text.into())), length)
        } else {
            let symbols = OPERATORS.iter().filter(|(_, text, _)| *text != Op::Item.row().0);
            let symbols = symbols.map(|(_, text, _)| *text).chain(PUNCTUATION.iter().copied());
            let symbols = symbols.map(|symbol| (symbol, None));
            let foreign = FOREIGN.iter().map(|(symbol, instead)| (*symbol, Some(*instead)));
            let here = symbols.chain(foreign).filter(|(symbol, _)| rest.starts_with(symbol));
            let (symbol, foreign) =
                here.max_by_key(|(symbol, _)| symbol.len()).ok_or_else(|| fail(Reason::Character(first)))?;
            if let Some(instead) = foreign {
                let lambda =
                    found.iter().find(|(token, _)| matches!(token, ExpressionToken::Word(word) if word == LAMBDA));
                return Err(match lambda {
                    Some(&(_, position)) => ExpressionError { position, ..refused(LAMBDA, LONE_CONDITION) },
                    None => ExpressionError { position, ..refused(symbol, instead) },
                });
            }
            (ExpressionToken::Symbol(symbol), symbol.len())
        };
        found.push((token, position));
        position += rest[..length].chars().count();
        rest = &rest[length..];
    }
    found.push((ExpressionToken::End, position));
    Ok(found)
}

fn refused(found: &str, instead: &str) -> ExpressionError {
    ExpressionError { position: 0, reason: Reason::Foreign { found: found.into(), instead: instead.into() } }
}

/// Number at the beginning of a text, in Python's decimal notation, and its length.
fn number(text: &str) -> Option<(Datum, usize)> {
    let digits = |from: usize| {
        let rest = &text[from..];
        from + rest.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(rest.len())
    };
    let mut end = digits(0);
    let mut is_whole = true;
    if text[end..].starts_with('.') {
        is_whole = false;
        end = digits(end + 1);
    }
    if text[end..].starts_with(['e', 'E']) {
        let sign = usize::from(text[end + 1..].starts_with(['+', '-']));
        let exponent = digits(end + 1 + sign);
        if text[end + 1 + sign..].starts_with(|c: char| c.is_ascii_digit()) {
            is_whole = false;
            end = exponent;
        }
    }
    // Digits followed by a letter, as in `0x10` or `3k`, are not a number.
    if text[end..].starts_with(|c: char| c.is_ascii_alphanumeric()) && !begins_with_word(&text[end..]) {
        return None;
    }
    let plain = text[..end].replace('_', "");
    let has_stray = text[..end].ends_with('_') || text[..end].contains("__");
    if has_stray || is_whole && plain.len() > 1 && plain.starts_with('0') && plain.bytes().any(|b| b != b'0') {
        return None;
    }
    let datum = if is_whole {
        Datum::Int(plain.parse().ok()?)
    } else {
        Datum::Float(plain.parse().ok().filter(|x: &f64| x.is_finite())?)
    };
    Some((datum, end))
}

/// Whether a keyword directly follows a number, which Python allows.
fn begins_with_word(text: &str) -> bool {
    ["if", "or", "and", "in", "not", ELSE, FOR].iter().any(|word| {
        text.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    })
}

/// Quoted text at the beginning of a text, and its length with the quotes.
fn quoted(text: &str, quote: char) -> Option<(String, usize)> {
    let mut found = String::new();
    let mut characters = text.char_indices().skip(1);
    while let Some((at, c)) = characters.next() {
        match c {
            c if c == quote => return Some((found, at + 1)),
            '\\' => match characters.next()?.1 {
                'n' => found.push('\n'),
                't' => found.push('\t'),
                'r' => found.push('\r'),
                c @ ('\\' | '\'' | '"') => found.push(c),
                other => found.extend(['\\', other]),
            },
            c => found.push(c),
        }
    }
    None
}

impl Expression {
    /// Parses like [`Expression::parse`], with the given meaning of `/`.
    ///
    /// # Errors
    /// As for [`Expression::parse`].
    pub fn parse_with(text: &str, slash: Slash) -> Result<Expression, ExpressionError> {
        let mut parser = Parser { tokens: tokens(text)?, at: 0, depth: 0, slash };
        let expression = parser.expression(CHOICE)?;
        match parser.peek() {
            ExpressionToken::End => Ok(expression),
            ExpressionToken::Word(word) => {
                let is_word = |known: &&str| known.starts_with(|c: char| c.is_ascii_alphabetic());
                let known = OPERATORS.iter().map(|(_, known, _)| *known).filter(is_word);
                let is_meant = |known: &&str| known.eq_ignore_ascii_case(word);
                Err(parser.expected(&match known.into_iter().find(is_meant) {
                    Some(known) => format!("an operator, such as `{known}`, or the end"),
                    None => "an operator or the end".to_owned(),
                }))
            }
            _ => Err(parser.expected("an operator or the end")),
        }
    }
}

/// Operator-precedence parser (Pratt).
struct Parser {
    tokens: Vec<(ExpressionToken, usize)>,
    at: usize,
    depth: usize,
    slash: Slash,
}

impl Parser {
    fn peek(&self) -> &ExpressionToken {
        &self.tokens[self.at].0
    }

    fn position(&self) -> usize {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> ExpressionToken {
        let token = self.peek().clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn expected(&self, expected: &str) -> ExpressionError {
        let reason = Reason::Expected { expected: expected.into(), found: self.peek().to_string() };
        ExpressionError { position: self.position(), reason }
    }

    fn is_at(&self, text: &str) -> bool {
        match self.peek() {
            ExpressionToken::Word(word) => word == text,
            ExpressionToken::Symbol(symbol) => *symbol == text,
            _ => false,
        }
    }

    /// Consumes the next token if it is `text`; returns whether it is.
    fn takes(&mut self, text: &str) -> bool {
        let is_it = self.is_at(text);
        if is_it {
            self.next();
        }
        is_it
    }

    fn take(&mut self, text: &str) -> Result<(), ExpressionError> {
        if self.takes(text) { Ok(()) } else { Err(self.expected(&format!("`{text}`"))) }
    }

    /// Operator that follows an operand at the current position, and its number of tokens.
    fn operator(&self) -> Option<(ExpressionOperator, usize)> {
        let text = match self.peek() {
            ExpressionToken::Word(word) => word.as_str(),
            ExpressionToken::Symbol(symbol) => symbol,
            _ => return None,
        };
        if text == Op::Not.row().0 {
            let is_in = matches!(&self.tokens[self.at + 1].0, ExpressionToken::Word(word) if word == Op::In.row().0);
            return is_in.then_some((Op::NotIn, 2));
        }
        let follows = |form: &OperatorForm| !matches!(form, OperatorForm::Prefix(_) | OperatorForm::Function(..));
        let found = OPERATORS.iter().find(|(_, word, form)| *word == text && follows(form));
        found.map(|&(operator, ..)| match operator {
            Op::Divide if self.slash == Slash::RoundsDown => (Op::FloorDivide, 1),
            _ => (operator, 1),
        })
    }

    fn make(&self, kind: ExpressionNode, position: usize) -> Result<Expression, ExpressionError> {
        let made = Expression::new(kind, position);
        if made.depth > MOST_DEPTH { Err(ExpressionError { position, reason: Reason::TooDeep }) } else { Ok(made) }
    }

    /// Parses an expression whose operators bind at least as tightly as `lowest`.
    fn expression(&mut self, lowest: u8) -> Result<Expression, ExpressionError> {
        self.depth += 1;
        if self.depth > MOST_DEPTH {
            return Err(ExpressionError { position: self.position(), reason: Reason::TooDeep });
        }
        let mut left = self.operand(lowest)?;
        while let Some((operator, n_words)) = self.operator().filter(|(operator, _)| operator.level() >= lowest) {
            let position = self.position();
            let level = operator.level();
            // The lists and conditions of a comprehension contain no conditional expression without
            // parentheses.
            (0..n_words).for_each(|_| {
                self.next();
            });
            let kind = match operator.row().1 {
                OperatorForm::Comparison => {
                    let mut rest = vec![(operator, self.expression(level + 1)?)];
                    while let Some((next, n_words)) = self.operator().filter(|(next, _)| next.level() == level) {
                        (0..n_words).for_each(|_| {
                            self.next();
                        });
                        rest.push((next, self.expression(level + 1)?));
                    }
                    ExpressionNode::Compare(Box::new(left), rest)
                }
                _ if operator == Op::Choose => {
                    let condition = self.expression(CHOICE + 1)?;
                    self.take(ELSE)?;
                    ExpressionNode::Apply(operator, vec![left, condition, self.expression(CHOICE)?])
                }
                _ => {
                    let right = if level == POWER { NEGATION } else { level + 1 };
                    ExpressionNode::Apply(operator, vec![left, self.expression(right)?])
                }
            };
            left = self.make(kind, position)?;
        }
        self.depth -= 1;
        Ok(left)
    }

    /// Parses the items between brackets, up to the closing one, and tells whether there is a comma:
    /// expressions, or one expression with the clauses of a comprehension.
    fn items(&mut self, closing: &str) -> Result<(Vec<Expression>, bool), ExpressionError> {
        let (mut items, mut has_comma) = (Vec::new(), false);
        while !self.takes(closing) {
            let position = self.position();
            let item = self.expression(CHOICE)?;
            let mut clauses = Vec::new();
            loop {
                if self.takes(FOR) {
                    let name = match self.peek() {
                        ExpressionToken::Word(word) if is_name(word) => word.clone(),
                        _ => return Err(self.expected("a name")),
                    };
                    self.next();
                    self.take(Op::In.row().0)?;
                    clauses.push(Clause::For(name, self.expression(CHOICE + 1)?));
                } else if !clauses.is_empty() && self.takes(Op::Choose.row().0) {
                    clauses.push(Clause::If(self.expression(CHOICE + 1)?));
                } else {
                    break;
                }
            }
            let is_each = !clauses.is_empty();
            if is_each && !items.is_empty() {
                return Err(ExpressionError {
                    position,
                    ..refused(FOR, "a comprehension stands alone in its brackets")
                });
            }
            items.push(if is_each {
                self.make(ExpressionNode::Each(Box::new(item), clauses), position)?
            } else {
                item
            });
            if is_each || !self.takes(",") {
                self.take(closing)?;
                break;
            }
            has_comma = true;
        }
        Ok((items, has_comma))
    }

    /// Makes a list or set of these items; a comprehension is a list already.
    fn collection(
        &self,
        operator: ExpressionOperator,
        mut items: Vec<Expression>,
        position: usize,
    ) -> Result<Expression, ExpressionError> {
        match &items[..] {
            [Expression { kind: ExpressionNode::Each(..), .. }] if operator == Op::List => Ok(items.swap_remove(0)),
            [Expression { kind: ExpressionNode::Each(..), .. }] => {
                Err(ExpressionError { position, ..refused("{… for …}", "write a list, `[… for …]`") })
            }
            [] if operator == Op::Set => Err(ExpressionError { position, ..refused("{}", "write `[]`") }),
            _ => self.make(ExpressionNode::Apply(operator, items), position),
        }
    }

    fn operand(&mut self, lowest: u8) -> Result<Expression, ExpressionError> {
        let mut operand = self.first(lowest)?;
        while self.is_at("[") {
            let position = self.position();
            self.next();
            let place = self.expression(CHOICE)?;
            self.take("]")?;
            operand = self.make(ExpressionNode::Apply(Op::Item, vec![operand, place]), position)?;
        }
        Ok(operand)
    }

    fn first(&mut self, lowest: u8) -> Result<Expression, ExpressionError> {
        let position = self.position();
        match self.peek().clone() {
            ExpressionToken::Constant(datum) => {
                self.next();
                self.make(ExpressionNode::Constant(datum), position)
            }
            ExpressionToken::Symbol("(") => {
                self.next();
                let (mut items, has_comma) = self.items(")")?;
                let is_each = matches!(&items[..], [Expression { kind: ExpressionNode::Each(..), .. }]);
                if items.len() == 1 && !has_comma && !is_each {
                    return Ok(items.swap_remove(0));
                }
                self.collection(Op::List, items, position)
            }
            ExpressionToken::Symbol("[") => {
                self.next();
                let items = self.items("]")?.0;
                self.collection(Op::List, items, position)
            }
            ExpressionToken::Symbol("{") => {
                self.next();
                let items = self.items("}")?.0;
                self.collection(Op::Set, items, position)
            }
            ExpressionToken::Symbol("-") => {
                self.next();
                let operand = self.expression(NEGATION)?;
                self.make(ExpressionNode::Apply(Op::Negate, vec![operand]), position)
            }
            ExpressionToken::Symbol("+") => {
                self.next();
                self.expression(NEGATION)
            }
            ExpressionToken::Word(word) if word == Op::Not.row().0 && lowest <= Op::Not.level() => {
                self.next();
                let operand = self.expression(Op::Not.level())?;
                self.make(ExpressionNode::Apply(Op::Not, vec![operand]), position)
            }
            ExpressionToken::Word(word) if word == LAMBDA => {
                Err(ExpressionError { position, ..refused(LAMBDA, LONE_CONDITION) })
            }
            ExpressionToken::Word(word) if is_name(&word) => {
                self.next();
                if self.is_at("(") {
                    self.call(&word, position)
                } else {
                    self.make(ExpressionNode::Name(word), position)
                }
            }
            _ => Err(self.expected("a number, a name or `(`")),
        }
    }

    fn call(&mut self, word: &str, position: usize) -> Result<Expression, ExpressionError> {
        let functions = OPERATORS.iter().filter_map(|(operator, name, form)| match form {
            OperatorForm::Function(least, most) => Some((*operator, *name, *least, *most)),
            _ => None,
        });
        let fail = |reason| Err(ExpressionError { position, reason });
        let Some((operator, function, least, most)) = functions.clone().find(|(_, name, ..)| *name == word) else {
            let known = functions.map(|(_, name, ..)| name).collect::<Vec<_>>().join(", ");
            return fail(Reason::UnknownFunction { name: word.into(), known });
        };
        self.next();
        let (arguments, _) = self.items(")")?;
        if !(least..=most).contains(&arguments.len()) {
            let s = if least == 1 { "" } else { "s" };
            let expected = match most {
                usize::MAX => format!("{least} or more arguments"),
                most if most > least => format!("{least} to {most} arguments"),
                _ => format!("{least} argument{s}"),
            };
            return fail(Reason::Arguments { function, expected, found: arguments.len() });
        }
        self.make(ExpressionNode::Apply(operator, arguments), position)
    }
}
