//! Printer of the text format.
//!
//! Printing never fails: in an invalid program, an unknown loop prints as `?loop7`, an unknown buffer as
//! `?buffer7`.

use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, Subscript, UnaryOp};
use crate::index::{Atom, Index};
use crate::program::{Buffer, BufferId, LoopId, LoopKind, Part, Program, Role, Scope, Stmt};
use std::fmt::{self, Write};

/// Formats an index, with the names of the program's loops.
pub fn index_to_string(program: &Program, index: &Index) -> String {
    text(|out| Printer { program, out }.index(index))
}

/// Formats a value expression.
pub fn expr_to_string(program: &Program, expr: &Expr) -> String {
    text(|out| Printer { program, out }.expr(expr, 0))
}

/// Formats a condition.
pub fn cond_to_string(program: &Program, cond: &Cond) -> String {
    text(|out| Printer { program, out }.cond(cond))
}

/// Formats a statement with all nested ones, ending in a line break.
pub fn stmt_to_string(program: &Program, stmt: &Stmt) -> String {
    text(|out| Printer { program, out }.stmt(stmt, 0))
}

fn text(print: impl FnOnce(&mut String) -> fmt::Result) -> String {
    let mut out = String::new();
    print(&mut out).expect("writing to a string does not fail");
    out
}

pub(crate) fn loop_name(program: &Program, id: LoopId) -> String {
    program.loops.get(id.0 as usize).cloned().unwrap_or_else(|| format!("?loop{}", id.0))
}

fn word_of<T: Copy + PartialEq>(table: &[(T, &'static str)], value: T) -> &'static str {
    table.iter().find(|(v, _)| *v == value).map_or("?", |(_, word)| word)
}

/// Formats the program in the text format.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("program \"")?;
        for c in self.name.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                c if c.is_control() => write!(f, "\\u{{{:x}}}", c as u32)?,
                c => f.write_char(c)?,
            }
        }
        f.write_str("\"\n")?;
        for Buffer { name, dtype, shape, scope, role } in &self.buffers {
            let shape = shape.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
            let (scope, role) = (word_of(&Scope::ALL, *scope), word_of(&Role::ALL, *role));
            writeln!(f, "buffer {name}: {}[{shape}] {scope} {role}", dtype.name())?;
        }
        if !self.loops.is_empty() {
            writeln!(f, "loops {}", self.loops.join(", "))?;
        }
        let mut printer = Printer { program: self, out: f };
        for size in &self.sizes {
            write!(printer.out, "size {} = ", size.name)?;
            printer.index(&size.index())?;
            writeln!(printer.out, " in {}", size.n_values)?;
        }
        for (part, word) in Part::ALL {
            let block = self.part(part);
            if part == Part::Body || !block.is_empty() {
                write!(printer.out, "{word} ")?;
                printer.block(block, 0)?;
                printer.out.write_char('\n')?;
            }
        }
        Ok(())
    }
}

struct Printer<'a, W: Write> {
    program: &'a Program,
    out: &'a mut W,
}

impl<W: Write> Printer<'_, W> {
    fn indent(&mut self, depth: usize) -> fmt::Result {
        write!(self.out, "{:1$}", "", 2 * depth)
    }

    /// Prints `{ … }`, with the closing brace at the given depth.
    fn block(&mut self, block: &[Stmt], depth: usize) -> fmt::Result {
        self.out.write_str("{\n")?;
        for stmt in block {
            self.stmt(stmt, depth + 1)?;
        }
        self.indent(depth)?;
        self.out.write_char('}')
    }

    fn stmt(&mut self, stmt: &Stmt, depth: usize) -> fmt::Result {
        self.indent(depth)?;
        match stmt {
            Stmt::For(l) => {
                write!(self.out, "{} {} in ", word_of(&LoopKind::ALL, l.kind), loop_name(self.program, l.var))?;
                self.index(&l.extent)?;
                self.out.write_char(' ')?;
                self.block(&l.body, depth)?;
            }
            Stmt::If { cond, then, otherwise } => {
                self.out.write_str("if ")?;
                self.cond(cond)?;
                self.out.write_char(' ')?;
                self.block(then, depth)?;
                if !otherwise.is_empty() {
                    self.out.write_str(" else ")?;
                    self.block(otherwise, depth)?;
                }
            }
            Stmt::Alloc(b) => {
                self.out.write_str("alloc ")?;
                self.buffer(*b)?;
            }
            Stmt::Store { buffer, index, value } => {
                self.access(*buffer, index)?;
                self.out.write_str(" = ")?;
                self.expr(value, 0)?;
            }
            Stmt::Update { buffer, index, op, value, first } => {
                self.access(*buffer, index)?;
                write!(self.out, " {} ", word_of(&ReduceOp::ALL, *op))?;
                self.expr(value, 0)?;
                self.out.write_str(" first ")?;
                if *first == Cond::Not(Box::new(Cond::True)) {
                    self.out.write_str("never")?;
                } else {
                    self.cond(first)?;
                }
            }
            Stmt::Prefetch { buffer, index, for_write } => {
                self.out.write_str("prefetch ")?;
                self.access(*buffer, index)?;
                self.out.write_str(if *for_write { " write" } else { " read" })?;
            }
            Stmt::Barrier => self.out.write_str("barrier")?,
            Stmt::Wait(n) => write!(self.out, "wait {n}")?,
        }
        self.out.write_char('\n')
    }

    fn buffer(&mut self, id: BufferId) -> fmt::Result {
        match self.program.buffers.get(id.0 as usize) {
            Some(b) => self.out.write_str(&b.name),
            None => write!(self.out, "?buffer{}", id.0),
        }
    }

    fn access(&mut self, id: BufferId, index: &[Index]) -> fmt::Result {
        self.buffer(id)?;
        self.out.write_char('[')?;
        for (i, e) in index.iter().enumerate() {
            self.out.write_str(if i == 0 { "" } else { ", " })?;
            self.index(e)?;
        }
        self.out.write_char(']')
    }

    /// Prints positive terms, a positive constant, negative terms, then a negative constant.
    fn index(&mut self, index: &Index) -> fmt::Result {
        let constant = index.constant();
        let mut empty = true;
        for (atom, c) in index.terms().iter().filter(|(_, c)| *c >= 0) {
            self.out.write_str(if empty { "" } else { " + " })?;
            if *c != 1 {
                write!(self.out, "{c}*")?;
            }
            self.atom(atom, *c == 1)?;
            empty = false;
        }
        if constant > 0 {
            write!(self.out, "{}{constant}", if empty { "" } else { " + " })?;
            empty = false;
        }
        for (atom, c) in index.terms().iter().filter(|(_, c)| *c < 0) {
            self.out.write_str(if empty { "-" } else { " - " })?;
            if *c != -1 {
                write!(self.out, "{}*", c.unsigned_abs())?;
            }
            self.atom(atom, *c == -1)?;
            empty = false;
        }
        match constant {
            0 if empty => self.out.write_char('0'),
            c if c < 0 => write!(self.out, "{}{}", if empty { "-" } else { " - " }, c.unsigned_abs()),
            _ => Ok(()),
        }
    }

    fn atom(&mut self, atom: &Atom, alone: bool) -> fmt::Result {
        let (x, sign, divisor) = match atom {
            Atom::Var(v) => return self.out.write_str(&loop_name(self.program, *v)),
            Atom::Min(a, b) | Atom::Max(a, b) => {
                self.out.write_str(if matches!(atom, Atom::Min(..)) { "min(" } else { "max(" })?;
                self.index(a)?;
                self.out.write_str(", ")?;
                self.index(b)?;
                return self.out.write_char(')');
            }
            Atom::FloorDiv(x, d) => (x, "//", d),
            Atom::Mod(x, d) => (x, "%", d),
        };
        self.out.write_str(if alone { "" } else { "(" })?;
        match (x.terms(), x.constant()) {
            ([(Atom::Var(v), 1)], 0) => self.out.write_str(&loop_name(self.program, *v))?,
            _ => {
                self.out.write_char('(')?;
                self.index(x)?;
                self.out.write_char(')')?;
            }
        }
        write!(self.out, " {sign} {divisor}{}", if alone { "" } else { ")" })
    }

    /// Prints an expression as an operand of an operator of precedence `strength`.
    fn expr(&mut self, expr: &Expr, strength: u8) -> fmt::Result {
        match expr {
            Expr::Const(x) if x.is_nan() => self.out.write_str("nan"),
            Expr::Const(x) => write!(self.out, "{x:?}"),
            Expr::Load(b, index) => self.access(*b, index),
            Expr::Gather(b, subscripts) => {
                self.buffer(*b)?;
                self.out.write_char('[')?;
                for (at, subscript) in subscripts.iter().enumerate() {
                    self.out.write_str(if at == 0 { "" } else { ", " })?;
                    match subscript {
                        Subscript::Index(i) => self.index(i)?,
                        Subscript::Value(value) => {
                            self.out.write_str("at(")?;
                            self.expr(value, 0)?;
                            self.out.write_char(')')?;
                        }
                    }
                }
                self.out.write_char(']')
            }
            Expr::FromIndex(i) => {
                self.out.write_str("index(")?;
                self.index(i)?;
                self.out.write_char(')')
            }
            Expr::Unary(op, x) => {
                write!(self.out, "{}(", word_of(&UnaryOp::ALL, *op))?;
                self.expr(x, 0)?;
                self.out.write_char(')')
            }
            Expr::Cast(dtype, x) => {
                write!(self.out, "{}(", dtype.name())?;
                self.expr(x, 0)?;
                self.out.write_char(')')
            }
            Expr::Binary(op, a, b) => {
                let word = word_of(&BinaryOp::ALL, *op);
                let own = match op {
                    BinaryOp::Add | BinaryOp::Sub => 1,
                    BinaryOp::Mul | BinaryOp::Div => 2,
                    BinaryOp::Min | BinaryOp::Max | BinaryOp::Pow | BinaryOp::Nibble => {
                        write!(self.out, "{word}(")?;
                        self.expr(a, 0)?;
                        self.out.write_str(", ")?;
                        self.expr(b, 0)?;
                        return self.out.write_char(')');
                    }
                };
                let (open, close) = if own < strength { ("(", ")") } else { ("", "") };
                self.out.write_str(open)?;
                self.expr(a, own)?;
                write!(self.out, " {word} ")?;
                self.expr(b, own + 1)?;
                self.out.write_str(close)
            }
            Expr::Select(c, a, b) => {
                self.out.write_str("select(")?;
                self.cond(c)?;
                self.out.write_str(", ")?;
                self.expr(a, 0)?;
                self.out.write_str(", ")?;
                self.expr(b, 0)?;
                self.out.write_char(')')
            }
        }
    }

    fn cond(&mut self, cond: &Cond) -> fmt::Result {
        if let Cond::And(a, b) = cond {
            self.cond(a)?;
            self.out.write_str(" && ")?;
            return match &**b {
                Cond::And(c, d) => {
                    self.out.write_str("and(")?;
                    self.cond(c)?;
                    self.out.write_str(", ")?;
                    self.cond(d)?;
                    self.out.write_char(')')
                }
                b => self.cond(b),
            };
        }
        match cond {
            Cond::True => self.out.write_str("true"),
            Cond::Lt(a, b) | Cond::Eq(a, b) => {
                self.index(a)?;
                self.out.write_str(if matches!(cond, Cond::Lt(..)) { " < " } else { " == " })?;
                self.index(b)
            }
            Cond::Less(a, b) => {
                self.out.write_str("less(")?;
                self.expr(a, 0)?;
                self.out.write_str(", ")?;
                self.expr(b, 0)?;
                self.out.write_char(')')
            }
            Cond::Not(c) => {
                self.out.write_str("not(")?;
                self.cond(c)?;
                self.out.write_char(')')
            }
            Cond::And(..) => unreachable!("conjunctions are printed above"),
        }
    }
}
