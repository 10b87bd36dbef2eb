//! Value expressions: what one element of a tensor is computed from.

use crate::index::Index;
use crate::program::{BufferId, LoopId};

/// A floating-point scalar expression of the dtype of the buffer it is stored to.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A literal.
    Const(f64),
    /// One element of a buffer.
    Load(BufferId, Vec<Index>),
    /// An integer index as a number.
    FromIndex(Index),
    /// A function of one value.
    Unary(UnaryOp, Box<Expr>),
    /// A function of two values.
    Binary(BinaryOp, Box<Expr>, Box<Expr>),
    /// The first value where the condition holds, else the second; only the chosen side is evaluated.
    Select(Box<Cond>, Box<Expr>, Box<Expr>),
}

/// Functions of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnaryOp {
    /// −x
    Neg,
    /// |x|
    Abs,
    /// eˣ
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// Hyperbolic tangent.
    Tanh,
    /// The error function.
    Erf,
}

impl UnaryOp {
    /// Every function with its name in the text format.
    pub const ALL: [(UnaryOp, &'static str); 7] = [
        (UnaryOp::Neg, "neg"),
        (UnaryOp::Abs, "abs"),
        (UnaryOp::Exp, "exp"),
        (UnaryOp::Log, "log"),
        (UnaryOp::Sqrt, "sqrt"),
        (UnaryOp::Tanh, "tanh"),
        (UnaryOp::Erf, "erf"),
    ];
}

/// Functions of two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinaryOp {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a · b
    Mul,
    /// a / b
    Div,
    /// The smaller; the other one where one is NaN.
    Min,
    /// The larger; the other one where one is NaN.
    Max,
}

impl BinaryOp {
    /// Every function with its name in the text format.
    pub const ALL: [(BinaryOp, &'static str); 6] = [
        (BinaryOp::Add, "+"),
        (BinaryOp::Sub, "-"),
        (BinaryOp::Mul, "*"),
        (BinaryOp::Div, "/"),
        (BinaryOp::Min, "min"),
        (BinaryOp::Max, "max"),
    ];
}

/// How a reduction combines its old value with a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum; identity 0.
    Sum,
    /// Maximum; identity −∞.
    Max,
    /// Minimum; identity +∞.
    Min,
}

impl ReduceOp {
    /// Every reduction with its assignment operator in the text format.
    pub const ALL: [(ReduceOp, &'static str); 3] =
        [(ReduceOp::Sum, "+="), (ReduceOp::Max, "max="), (ReduceOp::Min, "min=")];

    /// The value that changes nothing.
    pub fn identity(self) -> f64 {
        match self {
            ReduceOp::Sum => 0.0,
            ReduceOp::Max => f64::NEG_INFINITY,
            ReduceOp::Min => f64::INFINITY,
        }
    }

    /// The function that combines old and new.
    pub fn combine(self) -> BinaryOp {
        match self {
            ReduceOp::Sum => BinaryOp::Add,
            ReduceOp::Max => BinaryOp::Max,
            ReduceOp::Min => BinaryOp::Min,
        }
    }
}

/// A condition on loop variables or on values.
#[derive(Clone, Debug, PartialEq)]
pub enum Cond {
    /// Always holds; the empty conjunction.
    True,
    /// `a < b`
    Lt(Index, Index),
    /// `a == b`
    Eq(Index, Index),
    /// `a < b` on values; false where one is NaN.
    Less(Box<Expr>, Box<Expr>),
    /// Both hold.
    And(Box<Cond>, Box<Cond>),
    /// Does not hold.
    Not(Box<Cond>),
}

impl Cond {
    /// Both hold.
    pub fn and(self, other: Cond) -> Cond {
        match (self, other) {
            (Cond::True, c) | (c, Cond::True) => c,
            (a, b) => Cond::And(Box::new(a), Box::new(b)),
        }
    }

    /// The condition with every index rewritten.
    pub fn map_index(&self, f: &mut dyn FnMut(&Index) -> Index) -> Cond {
        match self {
            Cond::True => Cond::True,
            Cond::Lt(a, b) => Cond::Lt(f(a), f(b)),
            Cond::Eq(a, b) => Cond::Eq(f(a), f(b)),
            Cond::Less(a, b) => Cond::Less(Box::new(a.map_index(f)), Box::new(b.map_index(f))),
            Cond::And(a, b) => a.map_index(f).and(b.map_index(f)),
            Cond::Not(a) => Cond::Not(Box::new(a.map_index(f))),
        }
    }

    /// Calls `change` for every index in the condition, subscripts of loads included.
    pub fn for_each_index_mut(&mut self, change: &mut dyn FnMut(&mut Index)) {
        match self {
            Cond::True => {}
            Cond::Lt(a, b) | Cond::Eq(a, b) => {
                change(a);
                change(b);
            }
            Cond::Less(a, b) => {
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
            Cond::And(a, b) => {
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
            Cond::Not(a) => a.for_each_index_mut(change),
        }
    }

    /// Calls `visit` for every index in the condition, subscripts of loads included.
    pub fn for_each_index(&self, visit: &mut dyn FnMut(&Index)) {
        match self {
            Cond::True => {}
            Cond::Lt(a, b) | Cond::Eq(a, b) => {
                visit(a);
                visit(b);
            }
            Cond::Less(a, b) => {
                a.for_each_index(visit);
                b.for_each_index(visit);
            }
            Cond::And(a, b) => {
                a.for_each_index(visit);
                b.for_each_index(visit);
            }
            Cond::Not(a) => a.for_each_index(visit),
        }
    }

    /// Calls `visit` for every load inside the condition.
    pub fn for_each_load(&self, visit: &mut dyn FnMut(BufferId, &[Index])) {
        match self {
            Cond::True | Cond::Lt(..) | Cond::Eq(..) => {}
            Cond::Less(a, b) => {
                a.for_each_load(visit);
                b.for_each_load(visit);
            }
            Cond::And(a, b) => {
                a.for_each_load(visit);
                b.for_each_load(visit);
            }
            Cond::Not(a) => a.for_each_load(visit),
        }
    }

    /// Whether a loop variable occurs in it.
    pub fn uses(&self, var: LoopId) -> bool {
        let mut used = false;
        self.for_each_index(&mut |i| used |= i.uses(var));
        used
    }

    /// The condition with some loads replaced.
    pub fn map_loads(&self, f: &mut dyn FnMut(BufferId, &[Index]) -> Option<Expr>) -> Cond {
        match self {
            Cond::True | Cond::Lt(..) | Cond::Eq(..) => self.clone(),
            Cond::Less(a, b) => Cond::Less(Box::new(a.map_loads(f)), Box::new(b.map_loads(f))),
            Cond::And(a, b) => a.map_loads(f).and(b.map_loads(f)),
            Cond::Not(a) => Cond::Not(Box::new(a.map_loads(f))),
        }
    }
}

impl Expr {
    /// A unary function applied.
    pub fn unary(op: UnaryOp, x: Expr) -> Expr {
        Expr::Unary(op, Box::new(x))
    }

    /// A binary function applied.
    pub fn binary(op: BinaryOp, a: Expr, b: Expr) -> Expr {
        Expr::Binary(op, Box::new(a), Box::new(b))
    }

    /// The expression with every index rewritten.
    pub fn map_index(&self, f: &mut dyn FnMut(&Index) -> Index) -> Expr {
        match self {
            Expr::Const(_) => self.clone(),
            Expr::Load(b, index) => Expr::Load(*b, index.iter().map(f).collect()),
            Expr::FromIndex(i) => Expr::FromIndex(f(i)),
            Expr::Unary(op, x) => Expr::unary(*op, x.map_index(f)),
            Expr::Binary(op, a, b) => Expr::binary(*op, a.map_index(f), b.map_index(f)),
            Expr::Select(c, a, b) => {
                Expr::Select(Box::new(c.map_index(f)), Box::new(a.map_index(f)), Box::new(b.map_index(f)))
            }
        }
    }

    /// The expression with some loads replaced.
    pub fn map_loads(&self, f: &mut dyn FnMut(BufferId, &[Index]) -> Option<Expr>) -> Expr {
        match self {
            Expr::Const(_) | Expr::FromIndex(_) => self.clone(),
            Expr::Load(b, index) => f(*b, index).unwrap_or_else(|| self.clone()),
            Expr::Unary(op, x) => Expr::unary(*op, x.map_loads(f)),
            Expr::Binary(op, a, b) => Expr::binary(*op, a.map_loads(f), b.map_loads(f)),
            Expr::Select(c, a, b) => {
                Expr::Select(Box::new(c.map_loads(f)), Box::new(a.map_loads(f)), Box::new(b.map_loads(f)))
            }
        }
    }

    /// Calls `visit` for every load.
    pub fn for_each_load(&self, visit: &mut dyn FnMut(BufferId, &[Index])) {
        match self {
            Expr::Const(_) | Expr::FromIndex(_) => {}
            Expr::Load(b, index) => visit(*b, index),
            Expr::Unary(_, x) => x.for_each_load(visit),
            Expr::Binary(_, a, b) => {
                a.for_each_load(visit);
                b.for_each_load(visit);
            }
            Expr::Select(c, a, b) => {
                c.for_each_load(visit);
                a.for_each_load(visit);
                b.for_each_load(visit);
            }
        }
    }

    /// Calls `change` for every index, subscripts of loads and conditions included.
    pub fn for_each_index_mut(&mut self, change: &mut dyn FnMut(&mut Index)) {
        match self {
            Expr::Const(_) => {}
            Expr::Load(_, index) => index.iter_mut().for_each(change),
            Expr::FromIndex(i) => change(i),
            Expr::Unary(_, x) => x.for_each_index_mut(change),
            Expr::Binary(_, a, b) => {
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
            Expr::Select(c, a, b) => {
                c.for_each_index_mut(change);
                a.for_each_index_mut(change);
                b.for_each_index_mut(change);
            }
        }
    }

    /// Calls `visit` for every index, subscripts of loads and conditions included.
    pub fn for_each_index(&self, visit: &mut dyn FnMut(&Index)) {
        match self {
            Expr::Const(_) => {}
            Expr::Load(_, index) => index.iter().for_each(visit),
            Expr::FromIndex(i) => visit(i),
            Expr::Unary(_, x) => x.for_each_index(visit),
            Expr::Binary(_, a, b) => {
                a.for_each_index(visit);
                b.for_each_index(visit);
            }
            Expr::Select(c, a, b) => {
                c.for_each_index(visit);
                a.for_each_index(visit);
                b.for_each_index(visit);
            }
        }
    }

    /// Whether a loop variable occurs in it.
    pub fn uses(&self, var: LoopId) -> bool {
        let mut used = false;
        self.for_each_index(&mut |i| used |= i.uses(var));
        used
    }
}
