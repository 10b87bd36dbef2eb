//! Parser of the text format.

use super::is_name;
use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, Subscript, UnaryOp};
use crate::index::{Atom, Index};
use crate::program::{Buffer, BufferId, Loop, LoopId, LoopKind, OpenSize, Part, Program, Role, Scope, Stmt};
use std::collections::HashMap;
use thiserror::Error;

/// Maximum nesting depth of blocks and expressions; sums and conjunctions nest with every operator.
pub const MAX_DEPTH: usize = 256;

/// Parse error, with its position in the text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Kind of error.
    pub message: Message,
}

/// Kind of parse error.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Message {
    /// Unexpected token.
    #[error("expected {expected}, found {found}")]
    Expected {
        /// Expected tokens.
        expected: &'static str,
        /// Token found.
        found: String,
    },
    /// Character that begins no token.
    #[error("unexpected character {0:?}")]
    Character(char),
    /// Unterminated string, or unknown escape.
    #[error("unfinished or malformed string")]
    String,
    /// Name that is not in the `loops` line.
    #[error("there is no loop variable {0}")]
    UnknownLoop(String),
    /// Name without a `buffer` line.
    #[error("there is no buffer {0}")]
    UnknownBuffer(String),
    /// Name that is already taken.
    #[error("{0} is declared twice")]
    Duplicate(String),
    /// Number out of the range of its type.
    #[error("{0} is out of range")]
    Range(String),
    /// Index beyond 64 bits.
    #[error("the index overflows")]
    Overflow,
    /// Product of two non-constant indices.
    #[error("an index is multiplied by something that is not an integer")]
    Product,
    /// Nesting beyond [`MAX_DEPTH`].
    #[error("nesting deeper than {MAX_DEPTH}")]
    Depth,
}

/// Parses a program.
///
/// # Errors
/// [`ParseError`] at the first syntax error. The program need not be valid, which
/// [`verify`](crate::verify::verify) checks.
///
/// # Cost
/// Linear in the text, but quadratic in the number of terms of one index.
pub fn parse(text: &str) -> Result<Program, ParseError> {
    let located = |(at, message): Located| {
        let before = &text[..at];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        ParseError {
            line: 1 + before.bytes().filter(|b| *b == b'\n').count(),
            column: 1 + before[line_start..].chars().count(),
            message,
        }
    };
    let tokens = tokens(text).map_err(located)?;
    let mut parser =
        ProgramParser { tokens, at: 0, end: text.len(), depth: 0, loops: HashMap::new(), buffers: HashMap::new() };
    parser.program().map_err(located)
}

/// Offset in the text and the error there.
type Located = (usize, Message);

#[derive(Clone, Copy, Debug, PartialEq)]
enum ProgramToken<'a> {
    Word(&'a str),
    /// Digits only.
    Integer(&'a str),
    /// Number with a point or an exponent.
    Float(&'a str),
    /// String, with its quotes.
    Quoted(&'a str),
    Sign(&'static str),
}

/// All signs; a sign comes before its prefixes.
const SIGNS: [&str; 20] =
    ["==", "&&", "+=", "*=", "//", "{", "}", "[", "]", "(", ")", ",", ":", "<", "=", "+", "-", "*", "/", "%"];

fn tokens(text: &str) -> Result<Vec<(usize, ProgramToken<'_>)>, Located> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        let length_while = |from: usize, keep: fn(u8) -> bool| {
            from + rest.bytes().skip(from).position(|b| !keep(b)).unwrap_or(rest.len() - from)
        };
        let digits = |from| length_while(from, |b| b.is_ascii_digit());
        let (token, length) = if c.is_whitespace() {
            at += c.len_utf8();
            continue;
        } else if c == '#' {
            at += rest.find('\n').unwrap_or(rest.len());
            continue;
        } else if c.is_ascii_alphabetic() || c == '_' {
            let n = length_while(0, |b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.');
            (ProgramToken::Word(&rest[..n]), n)
        } else if c.is_ascii_digit() {
            let whole = digits(0);
            let byte = |i: usize| rest.as_bytes().get(i).copied().unwrap_or(0);
            let mut n = whole;
            if byte(n) == b'.' && byte(n + 1).is_ascii_digit() {
                n = digits(n + 1);
            }
            if byte(n) | 32 == b'e' {
                let signed = n + 1 + usize::from(matches!(byte(n + 1), b'+' | b'-'));
                if byte(signed).is_ascii_digit() {
                    n = digits(signed);
                }
            }
            (if n == whole { ProgramToken::Integer(&rest[..n]) } else { ProgramToken::Float(&rest[..n]) }, n)
        } else if c == '"' {
            let mut escaped = false;
            let end = rest.char_indices().skip(1).find(|(_, c)| {
                let ends = *c == '"' && !escaped;
                escaped = *c == '\\' && !escaped;
                ends
            });
            let n = end.ok_or((at, Message::String))?.0 + 1;
            (ProgramToken::Quoted(&rest[..n]), n)
        } else {
            let sign = SIGNS.iter().find(|s| rest.starts_with(**s)).ok_or((at, Message::Character(c)))?;
            (ProgramToken::Sign(sign), sign.len())
        };
        tokens.push((at, token));
        at += length;
    }
    Ok(tokens)
}

struct ProgramParser<'a> {
    tokens: Vec<(usize, ProgramToken<'a>)>,
    at: usize,
    /// Length of the text.
    end: usize,
    depth: usize,
    loops: HashMap<&'a str, LoopId>,
    buffers: HashMap<&'a str, BufferId>,
}

type Parsed<T> = Result<T, Located>;

impl<'a> ProgramParser<'a> {
    fn peek(&self) -> Option<ProgramToken<'a>> {
        self.tokens.get(self.at).map(|(_, t)| *t)
    }

    fn peek_second(&self) -> Option<ProgramToken<'a>> {
        self.tokens.get(self.at + 1).map(|(_, t)| *t)
    }

    fn fail<T>(&self, message: Message) -> Parsed<T> {
        Err((self.tokens.get(self.at).map_or(self.end, |(at, _)| *at), message))
    }

    fn expected<T>(&self, expected: &'static str) -> Parsed<T> {
        let found = match self.peek() {
            None => "the end".to_owned(),
            Some(
                ProgramToken::Word(s) | ProgramToken::Integer(s) | ProgramToken::Float(s) | ProgramToken::Quoted(s),
            ) => brief(s),
            Some(ProgramToken::Sign(s)) => s.to_owned(),
        };
        self.fail(Message::Expected { expected, found })
    }

    fn take(&mut self, token: ProgramToken<'_>) -> bool {
        let same = self.peek() == Some(token);
        self.at += usize::from(same);
        same
    }

    fn sign(&mut self, sign: &'static str) -> Parsed<()> {
        if self.take(ProgramToken::Sign(sign)) { Ok(()) } else { self.expected(sign) }
    }

    fn word(&mut self, expected: &'static str) -> Parsed<&'a str> {
        let Some(ProgramToken::Word(word)) = self.peek() else { return self.expected(expected) };
        self.at += 1;
        Ok(word)
    }

    /// Parses a word of a table.
    fn one_of<T: Copy>(&mut self, expected: &'static str, table: &[(T, &'static str)]) -> Parsed<T> {
        match self.peek().and_then(|t| table.iter().find(|(_, w)| t == ProgramToken::Word(w))) {
            Some((value, _)) => {
                self.at += 1;
                Ok(*value)
            }
            None => self.expected(expected),
        }
    }

    /// Runs `inner` one level deeper.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth >= MAX_DEPTH {
            return self.fail(Message::Depth);
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn height(&self, height: usize) -> Parsed<usize> {
        if height > MAX_DEPTH { self.fail(Message::Depth) } else { Ok(height) }
    }

    /// Parses comma-separated items up to the closing sign.
    fn items<T>(&mut self, close: &'static str, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        if self.take(ProgramToken::Sign(close)) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.take(ProgramToken::Sign(close)) {
                return Ok(items);
            }
            if !self.take(ProgramToken::Sign(",")) {
                return self.expected("a comma or the closing bracket");
            }
        }
    }

    fn program(&mut self) -> Parsed<Program> {
        if !self.take(ProgramToken::Word("program")) {
            return self.expected("`program`");
        }
        let Some(ProgramToken::Quoted(quoted)) = self.peek() else { return self.expected("the name in quotes") };
        let Some(name) = unquote(quoted) else { return self.fail(Message::String) };
        self.at += 1;
        let mut program = Program { name, ..Program::default() };
        while self.take(ProgramToken::Word("buffer")) {
            let name = self.declared("a buffer name")?;
            if self.buffers.insert(name, BufferId(program.buffers.len() as u32)).is_some() {
                self.at -= 1;
                return self.fail(Message::Duplicate(brief(name)));
            }
            self.sign(":")?;
            let dtype = self.one_of("an element type", &DType::ALL)?;
            self.sign("[")?;
            let shape = self.items("]", Self::signed)?;
            let scope = self.one_of("a scope", &Scope::ALL)?;
            let role = self.one_of("a role", &Role::ALL)?;
            program.buffers.push(Buffer { name: name.to_owned(), dtype, shape, scope, role });
        }
        if self.take(ProgramToken::Word("loops")) {
            loop {
                let name = self.declared("a loop name")?;
                if self.loops.insert(name, LoopId(program.loops.len() as u32)).is_some() {
                    self.at -= 1;
                    return self.fail(Message::Duplicate(brief(name)));
                }
                program.loops.push(name.to_owned());
                if !self.take(ProgramToken::Sign(",")) {
                    break;
                }
            }
        }
        while self.take(ProgramToken::Word("size")) {
            program.sizes.push(self.open_size()?);
        }
        for (part, word) in Part::ALL {
            if self.take(ProgramToken::Word(word)) {
                *program.part_mut(part) = self.block()?;
            } else if part == Part::Body {
                return self.expected("`run`");
            }
        }
        if self.peek().is_some() { self.expected("the end") } else { Ok(program) }
    }

    /// Parses `m = 32*m.steps + 32 in 16`, after the keyword.
    fn open_size(&mut self) -> Parsed<OpenSize> {
        let name = self.declared("the name of a size")?.to_owned();
        self.sign("=")?;
        let at = self.at;
        let index = self.index()?;
        let &[(Atom::Var(var), step)] = index.terms() else {
            self.at = at;
            return self.expected("a loop variable, perhaps times a number, and perhaps a number more");
        };
        if !self.take(ProgramToken::Word("in")) {
            return self.expected("`in`");
        }
        Ok(OpenSize { name, var, least: index.constant(), step, n_values: self.signed()? })
    }

    fn declared(&mut self, expected: &'static str) -> Parsed<&'a str> {
        let name = self.word(expected)?;
        debug_assert!(is_name(name), "every word is a name");
        Ok(name)
    }

    fn block(&mut self) -> Parsed<Vec<Stmt>> {
        self.sign("{")?;
        self.nested(|p| {
            let mut block = Vec::new();
            while !p.take(ProgramToken::Sign("}")) {
                block.push(p.stmt()?);
            }
            Ok(block)
        })
    }

    fn stmt(&mut self) -> Parsed<Stmt> {
        let Some(ProgramToken::Word(word)) = self.peek() else { return self.expected("a statement or }") };
        if self.peek_second() == Some(ProgramToken::Sign("[")) {
            return self.assignment();
        }
        match word {
            "if" => {
                self.at += 1;
                let (cond, _) = self.cond()?;
                let then = self.block()?;
                let otherwise = if self.take(ProgramToken::Word("else")) { self.block()? } else { Vec::new() };
                Ok(Stmt::If { cond, then, otherwise })
            }
            "alloc" => {
                self.at += 1;
                Ok(Stmt::Alloc(self.buffer()?))
            }
            "prefetch" => {
                self.at += 1;
                let (buffer, index) = self.access()?;
                let for_write = self.one_of("`read` or `write`", &[(false, "read"), (true, "write")])?;
                Ok(Stmt::Prefetch { buffer, index, for_write })
            }
            "barrier" => {
                self.at += 1;
                Ok(Stmt::Barrier)
            }
            "wait" => {
                self.at += 1;
                let at = self.at;
                match u8::try_from(self.integer(false)?) {
                    Ok(n) => Ok(Stmt::Wait(n)),
                    Err(_) => {
                        self.at = at;
                        self.expected("how many groups may be on their way, 255 at most")
                    }
                }
            }
            _ => {
                let kind = self.one_of("a statement or }", &LoopKind::ALL)?;
                let var = self.var()?;
                if !self.take(ProgramToken::Word("in")) {
                    return self.expected("`in`");
                }
                let extent = self.index()?;
                Ok(Stmt::For(Loop { var, extent, kind, body: self.block()? }))
            }
        }
    }

    fn assignment(&mut self) -> Parsed<Stmt> {
        let (buffer, index) = self.access()?;
        let op = match (self.peek(), self.peek_second()) {
            (Some(ProgramToken::Sign("=")), _) => {
                self.at += 1;
                let (value, _) = self.expr()?;
                return Ok(Stmt::Store { buffer, index, value });
            }
            (Some(ProgramToken::Sign("+=")), _) => ReduceOp::Sum,
            (Some(ProgramToken::Sign("*=")), _) => ReduceOp::Product,
            (Some(ProgramToken::Word("max")), Some(ProgramToken::Sign("="))) => ReduceOp::Max,
            (Some(ProgramToken::Word("min")), Some(ProgramToken::Sign("="))) => ReduceOp::Min,
            _ => return self.expected("=, +=, *=, max= or min="),
        };
        self.at += if matches!(op, ReduceOp::Sum | ReduceOp::Product) { 1 } else { 2 };
        let (value, _) = self.expr()?;
        if !self.take(ProgramToken::Word("first")) {
            return self.expected("`first`");
        }
        let first = if self.peek() == Some(ProgramToken::Word("never")) && !self.goes_on_as_index() {
            self.at += 1;
            Cond::Not(Box::new(Cond::True))
        } else {
            self.cond()?.0
        };
        Ok(Stmt::Update { buffer, index, op, value, first })
    }

    fn var(&mut self) -> Parsed<LoopId> {
        let name = self.word("a loop variable")?;
        match self.loops.get(name) {
            Some(id) => Ok(*id),
            None => {
                self.at -= 1;
                self.fail(Message::UnknownLoop(brief(name)))
            }
        }
    }

    fn buffer(&mut self) -> Parsed<BufferId> {
        let name = self.word("a buffer")?;
        match self.buffers.get(name) {
            Some(id) => Ok(*id),
            None => {
                self.at -= 1;
                self.fail(Message::UnknownBuffer(brief(name)))
            }
        }
    }

    fn access(&mut self) -> Parsed<(BufferId, Vec<Index>)> {
        let buffer = self.buffer()?;
        self.sign("[")?;
        Ok((buffer, self.items("]", Self::index)?))
    }

    /// Parses an integer with an optional minus.
    fn signed(&mut self) -> Parsed<i64> {
        let negative = self.take(ProgramToken::Sign("-"));
        self.integer(negative)
    }

    fn integer(&mut self, negative: bool) -> Parsed<i64> {
        let Some(ProgramToken::Integer(digits)) = self.peek() else { return self.expected("an integer") };
        let value = digits.parse::<i128>().ok().map(|n| if negative { -n } else { n });
        match value.and_then(|n| i64::try_from(n).ok()) {
            Some(n) => {
                self.at += 1;
                Ok(n)
            }
            None => self.fail(Message::Range(format!("{}{}", if negative { "-" } else { "" }, brief(digits)))),
        }
    }

    /// Whether the current word is the start of an index rather than a keyword.
    fn goes_on_as_index(&self) -> bool {
        matches!(self.peek_second(), Some(ProgramToken::Sign("<" | "==" | "+" | "-" | "*" | "//" | "%")))
    }

    fn index(&mut self) -> Parsed<Index> {
        self.nested(|p| {
            let negative = p.take(ProgramToken::Sign("-"));
            let mut sum = p.product(negative)?;
            loop {
                let negative = match p.peek() {
                    Some(ProgramToken::Sign("+")) => false,
                    Some(ProgramToken::Sign("-")) => true,
                    _ => return Ok(sum),
                };
                p.at += 1;
                let negative = negative != p.take(ProgramToken::Sign("-"));
                let term = p.product(negative)?;
                sum = p.checked(checked_add(&sum, &term))?;
            }
        })
    }

    fn checked(&self, index: Option<Index>) -> Parsed<Index> {
        match index {
            Some(index) if height_of(&index) > MAX_DEPTH => self.fail(Message::Depth),
            Some(index) => Ok(index),
            None => self.fail(Message::Overflow),
        }
    }

    /// Parses a product, negated if `negative`, without which the smallest integer could not be parsed.
    fn product(&mut self, mut negative: bool) -> Parsed<Index> {
        let mut product = if matches!(self.peek(), Some(ProgramToken::Integer(_))) {
            Index::from(self.integer(std::mem::take(&mut negative))?)
        } else {
            self.factor()?
        };
        loop {
            let sign = self.peek();
            self.at += 1;
            product = match sign {
                Some(ProgramToken::Sign("*")) => {
                    let factor = if matches!(self.peek(), Some(ProgramToken::Integer(_))) {
                        Index::from(self.integer(false)?)
                    } else {
                        self.factor()?
                    };
                    match (product.as_const(), factor.as_const()) {
                        (Some(c), _) => self.checked(checked_scale(&factor, c))?,
                        (_, Some(c)) => self.checked(checked_scale(&product, c))?,
                        _ => return self.fail(Message::Product),
                    }
                }
                Some(ProgramToken::Sign("//")) => {
                    let divisor = self.signed()?;
                    self.checked(Some(product.floor_div(divisor)))?
                }
                Some(ProgramToken::Sign("%")) => {
                    let divisor = self.signed()?;
                    self.checked(Some(product.modulo(divisor)))?
                }
                _ => {
                    self.at -= 1;
                    return if negative { self.checked(checked_scale(&product, -1)) } else { Ok(product) };
                }
            };
        }
    }

    fn factor(&mut self) -> Parsed<Index> {
        match (self.peek(), self.peek_second()) {
            (Some(ProgramToken::Word(word @ ("min" | "max"))), Some(ProgramToken::Sign("("))) => {
                self.at += 2;
                let a = self.index()?;
                self.sign(",")?;
                let b = self.index()?;
                self.sign(")")?;
                self.checked(Some(if word == "min" { a.smaller(&b) } else { a.larger(&b) }))
            }
            (Some(ProgramToken::Word(_)), _) => Ok(Index::from(self.var()?)),
            (Some(ProgramToken::Sign("(")), _) => {
                self.at += 1;
                let inner = self.index()?;
                self.sign(")")?;
                Ok(inner)
            }
            _ => self.expected("an index"),
        }
    }

    /// Parses an expression; returns it with the height of its tree.
    fn expr(&mut self) -> Parsed<(Expr, usize)> {
        self.nested(|p| {
            p.chain(&[("+", BinaryOp::Add), ("-", BinaryOp::Sub)], |p| {
                p.chain(&[("*", BinaryOp::Mul), ("/", BinaryOp::Div)], Self::operand)
            })
        })
    }

    fn chain(
        &mut self,
        signs: &[(&'static str, BinaryOp)],
        mut operand: impl FnMut(&mut Self) -> Parsed<(Expr, usize)>,
    ) -> Parsed<(Expr, usize)> {
        let (mut left, mut height) = operand(self)?;
        while let Some((_, op)) = signs.iter().find(|(s, _)| self.peek() == Some(ProgramToken::Sign(s))) {
            self.at += 1;
            let (right, h) = operand(self)?;
            left = Expr::binary(*op, left, right);
            height = self.height(1 + height.max(h))?;
        }
        Ok((left, height))
    }

    fn operand(&mut self) -> Parsed<(Expr, usize)> {
        if let (Some(ProgramToken::Word(name)), Some(ProgramToken::Sign("("))) = (self.peek(), self.peek_second()) {
            return self.call(name);
        }
        if let (Some(ProgramToken::Word(_)), Some(ProgramToken::Sign("["))) = (self.peek(), self.peek_second()) {
            return self.element();
        }
        if self.take(ProgramToken::Sign("(")) {
            let inner = self.expr()?;
            self.sign(")")?;
            return Ok(inner);
        }
        let negative = self.take(ProgramToken::Sign("-"));
        let value = match self.peek() {
            Some(ProgramToken::Word("inf")) => f64::INFINITY,
            Some(ProgramToken::Word("nan")) => f64::NAN,
            Some(ProgramToken::Integer(digits) | ProgramToken::Float(digits)) => match digits.parse::<f64>() {
                Ok(x) if x.is_finite() => x,
                _ => return self.fail(Message::Range(brief(digits))),
            },
            _ => return self.expected("a value"),
        };
        self.at += 1;
        Ok((Expr::Const(if negative { -value } else { value }), 1))
    }

    /// Parses a load, or a gather if a subscript is `at(value)`.
    fn element(&mut self) -> Parsed<(Expr, usize)> {
        let buffer = self.buffer()?;
        self.sign("[")?;
        let mut height = 0;
        let subscripts = self.items("]", |p| {
            if (p.peek(), p.peek_second()) != (Some(ProgramToken::Word("at")), Some(ProgramToken::Sign("("))) {
                return Ok(Subscript::Index(p.index()?));
            }
            p.at += 2;
            let (value, h) = p.expr()?;
            p.sign(")")?;
            height = height.max(h);
            Ok(Subscript::Value(Box::new(value)))
        })?;
        let known = |subscript: &Subscript| match subscript {
            Subscript::Index(i) => Some(i.clone()),
            Subscript::Value(_) => None,
        };
        let expr = match subscripts.iter().map(known).collect() {
            Some(index) => Expr::Load(buffer, index),
            None => Expr::Gather(buffer, subscripts),
        };
        Ok((expr, self.height(1 + height)?))
    }

    fn call(&mut self, name: &str) -> Parsed<(Expr, usize)> {
        let unary = UnaryOp::ALL.iter().find(|(_, w)| *w == name);
        let binary = BinaryOp::ALL.iter().find(|(op, w)| *w == name && !op.is_sign()).map(|(op, _)| *op);
        let cast = DType::ALL.iter().find(|(_, w)| *w == name);
        if unary.is_none() && binary.is_none() && cast.is_none() && !matches!(name, "index" | "select") {
            return self.expected("a function of values");
        }
        self.at += 2;
        let (expr, height) = if name == "index" {
            (Expr::FromIndex(self.index()?), 0)
        } else if let Some((op, _)) = unary {
            let (x, height) = self.expr()?;
            (Expr::unary(*op, x), height)
        } else if let Some((dtype, _)) = cast {
            let (x, height) = self.expr()?;
            (Expr::cast(*dtype, x), height)
        } else {
            let cond = match binary {
                Some(_) => None,
                None => {
                    let cond = self.cond()?;
                    self.sign(",")?;
                    Some(cond)
                }
            };
            let (a, ha) = self.expr()?;
            self.sign(",")?;
            let (b, hb) = self.expr()?;
            match (binary, cond) {
                (Some(op), _) => (Expr::binary(op, a, b), ha.max(hb)),
                (None, Some((c, hc))) => (Expr::Select(Box::new(c), Box::new(a), Box::new(b)), ha.max(hb).max(hc)),
                (None, None) => unreachable!("a condition was read for what is not a function of two values"),
            }
        };
        self.sign(")")?;
        Ok((expr, self.height(1 + height)?))
    }

    /// Parses a condition; returns it with the height of its tree.
    fn cond(&mut self) -> Parsed<(Cond, usize)> {
        self.nested(|p| {
            let (mut left, mut height) = p.plain_cond()?;
            while p.take(ProgramToken::Sign("&&")) {
                let (right, h) = p.plain_cond()?;
                left = Cond::And(Box::new(left), Box::new(right));
                height = p.height(1 + height.max(h))?;
            }
            Ok((left, height))
        })
    }

    fn plain_cond(&mut self) -> Parsed<(Cond, usize)> {
        match (self.peek(), self.peek_second()) {
            (Some(ProgramToken::Word("true")), _) if !self.goes_on_as_index() => {
                self.at += 1;
                return Ok((Cond::True, 1));
            }
            (Some(ProgramToken::Word(word @ ("not" | "and" | "less"))), Some(ProgramToken::Sign("("))) => {
                self.at += 2;
                let (cond, height) = if word == "less" {
                    let (a, ha) = self.expr()?;
                    self.sign(",")?;
                    let (b, hb) = self.expr()?;
                    (Cond::Less(Box::new(a), Box::new(b)), ha.max(hb))
                } else {
                    let (a, ha) = self.cond()?;
                    if word == "not" {
                        (Cond::Not(Box::new(a)), ha)
                    } else {
                        self.sign(",")?;
                        let (b, hb) = self.cond()?;
                        (Cond::And(Box::new(a), Box::new(b)), ha.max(hb))
                    }
                };
                self.sign(")")?;
                return Ok((cond, self.height(1 + height)?));
            }
            _ => {}
        }
        let a = self.index()?;
        if self.take(ProgramToken::Sign("<")) {
            Ok((Cond::Lt(a, self.index()?), 1))
        } else if self.take(ProgramToken::Sign("==")) {
            Ok((Cond::Eq(a, self.index()?), 1))
        } else {
            self.expected("< or ==")
        }
    }
}

/// Shortens a long word to its start.
fn brief(word: &str) -> String {
    match word.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &word[..end]),
        None => word.to_owned(),
    }
}

/// Returns the string between quotes with its escapes resolved.
fn unquote(quoted: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = quoted.strip_prefix('"')?.strip_suffix('"')?;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        if c != '\\' {
            out.push(c);
        } else if let Some(code) = rest.strip_prefix("u{") {
            let (digits, after) = code.split_once('}')?;
            out.push(char::from_u32(u32::from_str_radix(digits, 16).ok()?)?);
            rest = after;
        } else {
            let escaped = rest.chars().next().filter(|c| matches!(c, '"' | '\\'))?;
            out.push(escaped);
            rest = &rest[1..];
        }
    }
    Some(out)
}

fn checked_add(a: &Index, b: &Index) -> Option<Index> {
    a.constant().checked_add(b.constant())?;
    for (atom, c) in b.terms() {
        if let Ok(at) = a.terms().binary_search_by(|(x, _)| x.cmp(atom)) {
            a.terms()[at].1.checked_add(*c)?;
        }
    }
    Some(a.add(b))
}

fn checked_scale(index: &Index, factor: i64) -> Option<Index> {
    index.constant().checked_mul(factor)?;
    for (_, c) in index.terms() {
        c.checked_mul(factor)?;
    }
    Some(index.scale(factor))
}

fn height_of(index: &Index) -> usize {
    let heights = index.terms().iter().map(|(atom, _)| match atom {
        Atom::Var(_) => 0,
        Atom::FloorDiv(x, _) | Atom::Mod(x, _) => height_of(x),
        Atom::Min(a, b) | Atom::Max(a, b) => height_of(a).max(height_of(b)),
    });
    1 + heights.max().unwrap_or(0)
}
